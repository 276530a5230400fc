"""Stand-ins for attention that Megatron has only with Transformer Engine."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
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


class GatheredAttention(PlainAttention):
    """Causal attention over sequences cut by context parallelism: every rank gathers all keys and values.

    Megatron's own `DotProductAttention` refuses context parallelism. Positions are dealt out as Megatron does it.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """All `[s / ranks, b, heads, d]`; returns `[s / ranks, b, heads d]`."""
        group = parallel_state.get_context_parallel_group()
        keys, values = (gather_from_sequence_parallel_region(x, group=group) for x in (key, value))
        places = [places_on_rank(len(keys), rank, group.size()) for rank in range(group.size())]
        seen = places[group.rank()][:, None] >= torch.cat(places)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, keys, values))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self.softmax_scale)
        return out.permute(2, 0, 1, 3).flatten(2)


def places_on_rank(length: int, rank: int, ranks: int) -> Tensor:
    """Which places of a sequence a context-parallel rank holds: of `2 ranks` parts, one from either end."""
    parts = torch.arange(length).chunk(2 * ranks)
    return torch.cat([parts[rank], parts[-1 - rank]]) if ranks > 1 else torch.arange(length)


def places_on_this_rank(length: int) -> Tensor:
    """Which places of a sequence this rank holds."""
    rank, ranks = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    return places_on_rank(length, rank, ranks)
