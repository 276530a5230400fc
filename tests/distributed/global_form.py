"""What the ranks of a layout hold, joined into the form of the whole model.

Names are those of the whole model, and tensor-parallel parts are put together again, so that the results of two
layouts can be compared entry by entry. What several ranks hold must be the same on all of them, bit for bit.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


def is_row_parallel(name: str) -> bool:
    """Whether tensor parallelism splits the columns of a weight."""
    return name.endswith(("linear_proj.weight", "linear_fc2.weight"))


@dataclass
class Shard:
    """Values of a flat range of one tensor-parallel part of a managed weight."""

    name: str
    dim: int
    tensor_rank: int
    local_shape: tuple[int, int]
    start: int
    values: Tensor


@dataclass
class Captured:
    """Sums of `x x^T` of one refresh, by (weight, global block), and tokens by weight; of one rank."""

    sums: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)


@dataclass
class Snapshot:
    """What one rank holds."""

    parameters: dict[str, Tensor]
    masters: list[Shard]
    momenta: list[Shard]
    moments: dict[tuple[str, int], Tensor]
    bases: dict[tuple[str, int], Tensor]


@dataclass
class State:
    """A training state in global form: `[m, n]` weights and momenta, `[B, b, b]` moments and bases."""

    parameters: dict[str, Tensor]
    momenta: dict[str, Tensor]
    moments: dict[str, Tensor]
    bases: dict[str, Tensor]


def merge(snapshots: Sequence[Snapshot]) -> State:
    """Join the ranks' parts; what several ranks hold must be the same on all of them, bit for bit."""
    parameters = _join_equal([s.parameters for s in snapshots], "parameter")
    moments = _stack(_join_equal([s.moments for s in snapshots], "moment"))
    bases = _stack(_join_equal([s.bases for s in snapshots], "basis"))
    momenta = {}
    for name in {shard.name for s in snapshots for shard in s.momenta}:
        momenta[name] = join_shards([s.momenta for s in snapshots], name)
        master = join_shards([s.masters for s in snapshots], name)
        assert torch.equal(master, parameters[name]), f"master and parameter of {name} differ"
    return State(parameters, momenta, moments, bases)


def merge_captures(captures: Sequence[Captured]) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Sums over all tokens in float64, `[B, b, b]` by weight, and tokens, from every rank's part of one refresh."""
    total: dict[tuple[str, int], Tensor] = {}
    tokens: dict[str, int] = {}
    for captured in captures:
        for key, value in captured.sums.items():
            total[key] = total.get(key, 0) + value.double()
        for name, count in captured.tokens.items():
            tokens[name] = tokens.get(name, 0) + count
    return _stack(total), tokens


def _join_equal(parts: Iterable[Mapping[Any, Tensor]], what: str) -> dict[Any, Tensor]:
    joined: dict[Any, Tensor] = {}
    for part in parts:
        for key, value in part.items():
            assert torch.equal(joined.setdefault(key, value), value), f"ranks hold different copies of {what} {key}"
    return joined


def _stack(blocks: Mapping[tuple[str, int], Tensor]) -> dict[str, Tensor]:
    stacked = {}
    for name in {name for name, _ in blocks}:
        numbers = sorted(number for key, number in blocks if key == name)
        assert numbers == list(range(len(numbers))), f"blocks {numbers} of {name} are not all there"
        stacked[name] = torch.stack([blocks[name, number] for number in numbers])
    return stacked


def join_shards(shards_of_ranks: Sequence[Sequence[Shard]], name: str) -> Tensor:
    """The `[m, n]` values of one weight, from every rank's shards."""
    shards = [shard for of_rank in shards_of_ranks for shard in of_rank if shard.name == name]
    rows, columns = shards[0].local_shape
    parts = {shard.tensor_rank: torch.full((rows * columns,), torch.nan) for shard in shards}
    for shard in shards:
        parts[shard.tensor_rank][shard.start : shard.start + len(shard.values)] = shard.values
    whole = torch.cat([parts[rank].view(rows, columns) for rank in sorted(parts)], dim=shards[0].dim)
    assert not whole.isnan().any(), f"the ranks' shards do not cover {name}"
    return whole
