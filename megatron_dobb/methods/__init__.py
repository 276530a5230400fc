"""Optimization methods, side by side.

Each folder holds one method's mathematics, state and cost model. They do not import one another, nor Megatron.
"""
