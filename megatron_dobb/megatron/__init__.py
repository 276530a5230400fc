"""Dobb inside Megatron-Core. Nothing outside this folder imports `megatron`."""

from .seam import install

__all__ = ["install"]
