"""Dobb inside Megatron-Core. Nothing outside this folder imports `megatron`."""

from .seam.patches import configure, install

__all__ = ["configure", "install"]
