"""What is in a checkpoint of Dobb: `tools/inspect.py`."""
