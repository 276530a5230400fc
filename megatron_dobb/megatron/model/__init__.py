"""Describe a Megatron model: which weights a method takes, their global names, shapes and layer inputs.

Adapters know the layers of Megatron-Core and Transformer Engine; the rest works from what adapters say.
"""
