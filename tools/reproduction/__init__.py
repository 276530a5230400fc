"""What `tools/reproduce.py` does: one module for each group of the paper's results."""
