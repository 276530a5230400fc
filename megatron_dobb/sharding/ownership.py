"""Decide which rank owns each block, and list the blocks that owners and holders send each other.

A rank holds the blocks that its shards touch. One of a block's holders is its owner, which does the block's work. A
rank owns a block that it does not hold only if some rank would otherwise have much more work than the others; see
`load_balancing.share`. All of this is arithmetic on the holdings of every rank, so all ranks of a group get the same
result without communication, in time proportional to the holdings.

Nothing here imports torch, so plans and tests for thousands of ranks can use it directly.
"""

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from ..errors import LayoutError
from .flat_redistribution import FlatRedistribution
from .load_balancing import Block, best_possible, share

Holdings = Sequence[Mapping[str, Collection[int]]]
"""Blocks of each weight with at least one row on a rank, for every rank of a group."""


def assign(holdings: Holdings, costs: Mapping[str, int], *, movable: Container[str] = ()) -> dict[str, tuple[int, ...]]:
    """Choose the owner of every block by work, as `load_balancing.share` does.

    Only the contents of the arguments matter, not the order of their keys.

    Args:
        holdings: blocks held by every rank.
        costs: work of one block of every key.
        movable: keys whose blocks may be owned by ranks that do not hold them.

    Returns:
        For each key in ascending order, the owner's rank for block 0, 1, ...

    Raises:
        LayoutError: if a block is held by no rank though a later one of its weight is.
    """
    owner_of = share(_holders(holdings), costs, len(holdings), movable=movable)
    owners: dict[str, list[int]] = {}
    for key, block in sorted(owner_of):
        known = owners.setdefault(key, [])
        if block != len(known):
            raise LayoutError(f"{key}: no rank holds a row of block {len(known)}, but one holds block {block}")
        known.append(owner_of[key, block])
    return {key: tuple(ranks) for key, ranks in owners.items()}


@dataclass(frozen=True)
class Ownership:
    """Owners and holders of all blocks in one group.

    Blocks are always listed in ascending order of (key, number), on both ends of every message.

    Attributes:
        holdings: blocks held by every rank.
        costs: work of one block of every key.
        owners: for each key, the owner's rank for block 0, 1, ...
    """

    holdings: Holdings
    costs: Mapping[str, int]
    owners: Mapping[str, tuple[int, ...]]

    def part(self, keys: Collection[str]) -> Self:
        """Restrict to some weights, with the same owners."""
        wanted = frozenset(keys)
        return replace(
            self,
            holdings=[{key: blocks for key, blocks in held.items() if key in wanted} for held in self.holdings],
            owners={key: ranks for key, ranks in self.owners.items() if key in wanted},
        )

    def held_by(self, rank: int) -> tuple[Block, ...]:
        """List the blocks with a row on `rank`, which needs their results."""
        return tuple(sorted((key, block) for key, blocks in self.holdings[rank].items() for block in blocks))

    def owned_by(self, rank: int) -> tuple[Block, ...]:
        """List the blocks that `rank` works on."""
        return tuple(self._owned[rank])

    def kept_by(self, rank: int) -> tuple[Block, ...]:
        """List all blocks that `rank` holds, followed by those that it owns without holding them."""
        held = self.held_by(rank)
        inside = frozenset(held)
        return (*held, *(block for block in self._owned[rank] if block not in inside))

    def moved(self) -> tuple[Block, ...]:
        """List the blocks whose owner does not hold them."""
        return tuple(
            (key, number)
            for key, ranks in sorted(self.owners.items())
            for number, rank in enumerate(ranks)
            if number not in self.holdings[rank].get(key, ())
        )

    def owner(self, block: Block) -> int:
        """Return the rank that owns a block."""
        return self.owners[block[0]][block[1]]

    def sends(self, source: int, destination: int) -> tuple[Block, ...]:
        """List the blocks whose results `source` sends to `destination`."""
        if source == destination:
            return ()
        return tuple(block for block in self.held_by(destination) if self.owner(block) == source)

    def result_sends(self, rank: int) -> list[tuple[Block, ...]]:
        """List, for every destination, the blocks whose results `rank` sends there."""
        row: list[list[Block]] = [[] for _ in self.holdings]
        for block in self.owned_by(rank):
            for holder in self._holders[block]:
                if holder != rank:
                    row[holder].append(block)
        return [tuple(blocks) for blocks in row]

    def result_receives(self, rank: int) -> list[tuple[Block, ...]]:
        """List, for every source, the blocks whose results it sends to `rank`."""
        row: list[list[Block]] = [[] for _ in self.holdings]
        for block in self.held_by(rank):
            if self.owner(block) != rank:
                row[self.owner(block)].append(block)
        return [tuple(blocks) for blocks in row]

    def work(self) -> list[int]:
        """Compute the work of every rank, in the unit of `costs`."""
        total = [0] * len(self.holdings)
        for key, ranks in self.owners.items():
            for rank in ranks:
                total[rank] += self.costs[key]
        return total

    @cached_property
    def cuts(self) -> frozenset[Block]:
        """First blocks, and ends (exclusive), of the runs of consecutive blocks that ranks keep.

        Between two cuts, a rank keeps all blocks or none.
        """
        cuts = set(self.moved()) | {(key, number + 1) for key, number in self.moved()}
        for held in self.holdings:
            for key, blocks in held.items():
                inside = frozenset(blocks)
                cuts.update((key, n) for n in inside if n - 1 not in inside)
                cuts.update((key, n + 1) for n in inside if n + 1 not in inside)
        return frozenset(cuts)

    def to_owners(self, elements: Mapping[str, int], per_key: int) -> FlatRedistribution:
        """Route a flat buffer to owners: each block to its owner, then an entry per weight to all its blocks' owners.

        Args:
            elements: elements of one block of every key.
            per_key: elements of the entry per weight.
        """
        blocks = [(elements[key], {rank}) for key, ranks in self.owners.items() for rank in ranks]
        entries = [(per_key, set(ranks)) for ranks in self.owners.values()]
        lengths, destinations = zip(*blocks, *entries, strict=True) if blocks else ((), ())
        return FlatRedistribution(lengths, destinations, len(self.holdings))

    @cached_property
    def _holders(self) -> dict[Block, list[int]]:
        return _holders(self.holdings)

    @cached_property
    def _owned(self) -> list[list[Block]]:
        owned: list[list[Block]] = [[] for _ in self.holdings]
        for key, ranks in sorted(self.owners.items()):
            for number, rank in enumerate(ranks):
                owned[rank].append((key, number))
        return owned


def imbalance(parts: Sequence[Ownership]) -> float:
    """Divide the work of the busiest rank by the best possible; 1 is perfect.

    Args:
        parts: every ownership of one group of ranks.
    """
    costs = [part.costs[key] for part in parts for key, ranks in part.owners.items() for _ in ranks]
    loads = [sum(of_rank) for of_rank in zip(*(part.work() for part in parts), strict=True)]
    return float(max(loads) / best_possible(costs, len(loads))) if costs else 1.0


def _holders(holdings: Holdings) -> dict[Block, list[int]]:
    """List, in ascending order, the ranks that hold each held block."""
    holders: dict[Block, list[int]] = {}
    for rank, held in enumerate(holdings):
        for key, blocks in held.items():
            for block in blocks:
                holders.setdefault((key, block), []).append(rank)
    return holders
