"""Attach to Megatron: the patches, the versions they fit, and the probes that prove it.

Everything that replaces a name of Megatron's is here.
"""
