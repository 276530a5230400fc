"""Inspect a checkpoint of Dobb: `tools/inspect.py`."""
