"""Run the methods inside Megatron-Core. Nothing outside this folder imports `megatron`.

`seam` attaches to Megatron, `options` and `model` read it, `shard_optimizer` is the base of every method's optimizer.
"""

from .seam.patches import configure, install

__all__ = ["configure", "install"]
