"""Commands of `tools/reproduce.py`: one module for each group of the paper's results."""
