"""A stand-in for attention whose heads have other sizes for keys than for values."""

from typing import Any

import torch
from torch import Tensor, nn


class PlainAttention(nn.Module):
    """Causal attention with the interface of Megatron's core attention, in plain torch.

    Megatron's own `DotProductAttention` takes no `k_channels`, so without Transformer Engine it has none for MLA.
    """

    def __init__(self, *args: Any, softmax_scale: float | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`query` and `key` `[s, b, heads, k]`, `value [s, b, heads, v]`; returns `[s, b, heads v]`."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale)
        return out.permute(2, 0, 1, 3).flatten(2)
