"""Which rank keeps the moment of each block, and what the ranks of a group then send to each other.

A rank needs the bases of the blocks that its shards touch, and of those that it owns. Among the ranks that hold a
block, one is its owner: it keeps the moment and refreshes the basis. Only where that leaves a rank with much more
work than others is a block owned by a rank that does not hold it, see `share`. All of this is arithmetic on what
each rank holds, so every rank of a group finds the same answer without a message, in time proportional to that.

Nothing here imports torch: plans and tests of thousands of ranks run it as it is.
"""

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from ..errors import LayoutError
from .load_balancing import Block, best_possible, share, work

Holdings = Sequence[Mapping[str, Collection[int]]]
"""For every rank of a group, the blocks of each weight of which it holds at least one row."""


def triangle(width: int) -> int:
    """Elements of a symmetric block that travel."""
    return width * (width + 1) // 2


def assign(holdings: Holdings, widths: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """The owner of every block, shared out by work as `share` says.

    Only the contents of the arguments matter, not the order of their keys.

    Args:
        holdings: blocks held by every rank.
        widths: block width of every key.

    Returns:
        For each key in ascending order, the owner's rank for block 0, 1, ...

    Raises:
        LayoutError: if a block is held by no rank though a later one of its weight is.
    """
    owner_of = share(_holders(holdings), widths, len(holdings))
    owners: dict[str, list[int]] = {}
    for key, block in sorted(owner_of):
        known = owners.setdefault(key, [])
        if block != len(known):
            raise LayoutError(f"{key}: no rank holds a row of block {len(known)}, but one holds block {block}")
        known.append(owner_of[key, block])
    return {key: tuple(ranks) for key, ranks in owners.items()}


@dataclass(frozen=True)
class Ownership:
    """Owners and holders of all blocks in one group, and the bases that travel between them.

    Blocks are always listed in ascending order of (key, number), on both ends of every message.
    """

    holdings: Holdings
    widths: Mapping[str, int]
    owners: Mapping[str, tuple[int, ...]]

    @classmethod
    def share_out(cls, holdings: Holdings, widths: Mapping[str, int]) -> "Ownership":
        """Share the blocks out with `assign`, which see."""
        return cls(holdings, widths, assign(holdings, widths))

    def part(self, keys: Collection[str]) -> "Ownership":
        """The same owners, of some weights alone."""
        wanted = frozenset(keys)
        return Ownership(
            [{key: blocks for key, blocks in held.items() if key in wanted} for held in self.holdings],
            {key: width for key, width in self.widths.items() if key in wanted},
            {key: ranks for key, ranks in self.owners.items() if key in wanted},
        )

    def held_by(self, rank: int) -> tuple[Block, ...]:
        """The blocks of whose weights `rank` holds a row: those whose basis it needs."""
        return tuple(sorted((key, block) for key, blocks in self.holdings[rank].items() for block in blocks))

    def owned_by(self, rank: int) -> tuple[Block, ...]:
        """The blocks whose moment `rank` keeps and whose basis it refreshes."""
        return tuple(self._owned[rank])

    def kept_by(self, rank: int) -> tuple[Block, ...]:
        """The blocks whose basis `rank` keeps: all that it holds, then those that it owns without holding them."""
        held = self.held_by(rank)
        inside = frozenset(held)
        return (*held, *(block for block in self._owned[rank] if block not in inside))

    def moved(self) -> tuple[Block, ...]:
        """The blocks whose owner does not hold them."""
        return tuple(
            (key, number)
            for key, ranks in sorted(self.owners.items())
            for number, rank in enumerate(ranks)
            if number not in self.holdings[rank].get(key, ())
        )

    def owner(self, block: Block) -> int:
        """The rank that owns a block."""
        return self.owners[block[0]][block[1]]

    def sends(self, source: int, destination: int) -> tuple[Block, ...]:
        """The blocks whose refreshed basis `source` sends to `destination`."""
        if source == destination:
            return ()
        return tuple(block for block in self.held_by(destination) if self.owner(block) == source)

    def basis_sends(self, rank: int) -> list[tuple[Block, ...]]:
        """For every destination, the blocks whose refreshed basis `rank` sends there."""
        row: list[list[Block]] = [[] for _ in self.holdings]
        for block in self.owned_by(rank):
            for holder in self._holders[block]:
                if holder != rank:
                    row[holder].append(block)
        return [tuple(blocks) for blocks in row]

    def basis_receives(self, rank: int) -> list[tuple[Block, ...]]:
        """For every source, the blocks whose refreshed basis it sends to `rank`."""
        row: list[list[Block]] = [[] for _ in self.holdings]
        for block in self.held_by(rank):
            if self.owner(block) != rank:
                row[self.owner(block)].append(block)
        return [tuple(blocks) for blocks in row]

    def work(self) -> list[int]:
        """Refresh work of every rank, in units of b^3."""
        total = [0] * len(self.holdings)
        for key, ranks in self.owners.items():
            for rank in ranks:
                total[rank] += work(self.widths[key])
        return total

    def elements(self, blocks: Collection[Block]) -> int:
        """Elements in the `b x b` matrices of some blocks: of moments where owned, of bases where held."""
        return sum(self.widths[key] ** 2 for key, _ in blocks)

    @cached_property
    def cuts(self) -> frozenset[Block]:
        """The blocks at which what some rank keeps of a weight's bases begins, or ends just before.

        Between two of them, a rank keeps all bases or none.
        """
        cuts = set(self.moved()) | {(key, number + 1) for key, number in self.moved()}
        for held in self.holdings:
            for key, blocks in held.items():
                inside = frozenset(blocks)
                cuts.update((key, n) for n in inside if n - 1 not in inside)
                cuts.update((key, n + 1) for n in inside if n + 1 not in inside)
        return frozenset(cuts)

    def moment_flow(self, count_terms: int = 1) -> "FlatExchange":
        """What of the sums of all ranks goes where: the triangle of every block to its owner, then the token count of
        every weight, in so many numbers, to all owners of its blocks."""
        if count_terms not in self._flows:
            self._flows[count_terms] = self._moment_flow(count_terms)
        return self._flows[count_terms]

    @cached_property
    def _flows(self) -> dict[int, "FlatExchange"]:
        return {}

    def _moment_flow(self, count_terms: int) -> "FlatExchange":
        triangles = [(triangle(self.widths[key]), {rank}) for key, ranks in self.owners.items() for rank in ranks]
        counts = [(count_terms, set(ranks)) for ranks in self.owners.values()]
        lengths, destinations = zip(*triangles, *counts, strict=True) if triangles else ((), ())
        return FlatExchange(lengths, destinations, len(self.holdings))

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
    """Refresh work of the busiest rank over the best possible; 1 is perfect.

    Args:
        parts: all that one group of ranks shares out.
    """
    works = [work(part.widths[key]) for part in parts for key, ranks in part.owners.items() for _ in ranks]
    loads = [sum(of_rank) for of_rank in zip(*(part.work() for part in parts), strict=True)]
    return float(max(loads) / best_possible(works, len(loads))) if works else 1.0


@dataclass(frozen=True)
class FlatExchange:
    """How a flat buffer, reduce-scattered in equal chunks, reaches the ranks that want its segments whole.

    Rank `r` first gets elements `[r * chunk, (r + 1) * chunk)` of the sum, then sends parts of them on. Every
    message lists its parts in the buffer's order, so what a rank receives, joined by source, is simply all of
    its segments one after another.

    Args:
        lengths: elements of every segment; segments follow one another without gaps.
        destinations: the ranks that want each segment.
        ranks: size of the group.
    """

    lengths: Sequence[int]
    destinations: Sequence[Collection[int]]
    ranks: int

    @property
    def chunk(self) -> int:
        """Elements in one rank's chunk."""
        return -(-self._bounds[-1] // self.ranks)

    @property
    def padding(self) -> int:
        """Elements at the buffer's end that belong to no segment; fewer than there are ranks."""
        return self.chunk * self.ranks - self._bounds[-1]

    def sends(self, rank: int) -> list[list[tuple[int, int]]]:
        """For every destination, the ranges of `rank`'s chunk to send, counted from the chunk's start."""
        row: list[list[tuple[int, int]]] = [[] for _ in range(self.ranks)]
        origin, end = rank * self.chunk, (rank + 1) * self.chunk
        segment = bisect_right(self._bounds, origin) - 1
        while segment < len(self.lengths) and self._bounds[segment] < end:
            low = max(self._bounds[segment], origin) - origin
            high = min(self._bounds[segment + 1], end) - origin
            for destination in self.destinations[segment] if low < high else ():
                ranges = row[destination]
                if ranges and ranges[-1][1] == low:
                    ranges[-1] = (ranges[-1][0], high)
                else:
                    ranges.append((low, high))
            segment += 1
        return row

    def receive_sizes(self, rank: int) -> list[int]:
        """For every source, the elements that it sends to `rank`."""
        sizes = [0] * self.ranks
        for segment in self._wanted_by[rank]:
            start, end = self._bounds[segment], self._bounds[segment + 1]
            while start < end:
                source = start // self.chunk
                stop = min(end, (source + 1) * self.chunk)
                sizes[source] += stop - start
                start = stop
        return sizes

    @cached_property
    def _wanted_by(self) -> list[list[int]]:
        """The segments that each rank wants."""
        wanted: list[list[int]] = [[] for _ in range(self.ranks)]
        for segment, ranks in enumerate(self.destinations):
            for rank in ranks:
                wanted[rank].append(segment)
        return wanted

    @cached_property
    def _bounds(self) -> list[int]:
        return [0, *accumulate(self.lengths)]


def _holders(holdings: Holdings) -> dict[Block, list[int]]:
    """For every held block, the ranks that hold it, ascending."""
    holders: dict[Block, list[int]] = {}
    for rank, held in enumerate(holdings):
        for key, blocks in held.items():
            for block in blocks:
                holders.setdefault((key, block), []).append(rank)
    return holders
