"""Dobb for any `nn.Module`: `megatron_dobb.Dobb`.

`block_weights` chooses the weights, `batch_capture` sees their inputs, `replicated_bases` keeps moments and bases.
"""

from .optimizer import Dobb

__all__ = ["Dobb"]
