"""Optimizers for any `nn.Module`, in one process or under DistributedDataParallel.

They share the mathematics of `methods` with the Megatron optimizers; nothing here imports Megatron.
"""
