"""Bytes of Dobb's state and of one refresh on every rank of a group, printed by a run at startup and by
`tools/plan.py` for planned runs.

Everything follows from who holds and who owns which block. Nothing here imports torch or Megatron.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import repeat

from .block_ownership import BlockOwnership, triangle

MOMENTUM_BYTES = 4
"""Bytes per element of the momentum, which is fp32 for weights of any dtype."""

SUM_BYTES = 4
"""Bytes per element of the captured and the reduced sums."""

COUNT_TERMS = {4: 1, 2: 3}
"""Terms per token count on the wire, by bytes per number; exact up to 2^24 in each case."""

BATCH_BYTES = 2**26
"""Bytes of the fp32 moments refreshed in one call, which briefly makes a few copies of them."""

INDEX_BYTES = 8
"""Bytes per element of an int64 index tensor."""

COUNTS_BYTES = 12
"""Bytes of the header of every basis message: three int32, for kept blocks, fallback blocks and a weight's number."""


@dataclass(frozen=True)
class RankCosts:
    """Bytes on one rank.

    Attributes:
        momentum: of its shards of the managed weights.
        moments: of the blocks that it owns.
        bases: of the blocks that it holds or owns.
        sums: captured on a refresh step if none is freed before the last one is there.
        reduced: handed to the reduce-scatters of a refresh.
        to_owners: sent on to the owners.
        from_others: received as an owner.
        to_holders: bases sent.
        from_owners: bases received.
        counts: in front of the bases, sent; as much is received.
    """

    momentum: int = 0
    moments: int = 0
    bases: int = 0
    sums: int = 0
    reduced: int = 0
    to_owners: int = 0
    from_others: int = 0
    to_holders: int = 0
    from_owners: int = 0
    counts: int = 0

    def __add__(self, other: "RankCosts") -> "RankCosts":
        """Add up several groups."""
        return RankCosts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(RankCosts)))

    @property
    def state(self) -> int:
        """Bytes that stay between steps."""
        return self.momentum + self.moments + self.bases

    @property
    def refresh(self) -> int:
        """Bytes that the rank hands to collectives on a refresh step."""
        return self.reduced + self.to_owners + self.to_holders + self.counts


def momentum_costs(elements: int) -> RankCosts:
    """Bytes of the momentum of a rank whose shards hold this many elements of managed weights."""
    return RankCosts(momentum=MOMENTUM_BYTES * elements)


@dataclass
class WidthCosts:
    """Bytes for all weights of one width in one group, counted in blocks for every rank.

    Attributes:
        width: of the blocks.
        ranks: size of the group.
        moment_bytes, basis_bytes, transport_bytes: of one element.
        weights: how many there are.
        blocks: of all weights together.
        owned, held, both: blocks on each rank.
        owned_weights: weights with a block that the rank owns.
        sent, received: bases.
        counts_at: token counts that a rank sends on to owners.
    """

    width: int
    ranks: int
    moment_bytes: int
    basis_bytes: int
    transport_bytes: int = SUM_BYTES
    weights: int = 0
    blocks: int = 0
    owned: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    both: list[int] = field(default_factory=list)
    owned_weights: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    counts_at: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("owned", "held", "both", "owned_weights", "sent", "received", "counts_at"):
            setattr(self, name, list(repeat(0, self.ranks)))

    @property
    def triangles(self) -> int:
        """Elements of the triangles of all blocks."""
        return self.blocks * triangle(self.width)

    @property
    def chunk(self) -> int:
        """Elements that a rank gets of the reduced buffer: triangles, a count for each weight, padding."""
        return -(-(self.triangles + self.weights * self.count_terms) // self.ranks)

    @property
    def count_terms(self) -> int:
        """Terms per token count on the wire."""
        return COUNT_TERMS[self.transport_bytes]

    def counted(self, rank: int) -> tuple[int, ...]:
        """Return everything that a rank's costs depend on; in a large group most ranks share it with others."""
        return (
            *(self.owned[rank], self.held[rank], self.both[rank], self.owned_weights[rank]),
            *(self.sent[rank], self.received[rank]),
            min(max(self.triangles - rank * self.chunk, 0), self.chunk) + self.counts_at[rank],
        )

    def of(self, rank: int) -> RankCosts:
        """Compute the bytes on a rank of the group; a group of one rank communicates nothing."""
        owned, held, both, owned_weights, sent, received, sent_on = self.counted(rank)
        moment, basis = self.moment_bytes * self.width**2, self.basis_bytes * self.width**2
        sums = SUM_BYTES * self.width**2 * self.blocks
        alone = RankCosts(moments=moment * owned, bases=basis * (held + owned - both), sums=sums)
        if self.ranks == 1:
            return alone
        return alone + RankCosts(
            reduced=self.transport_bytes * self.chunk * self.ranks,
            to_owners=SUM_BYTES * sent_on,
            from_others=SUM_BYTES * (owned * triangle(self.width) + owned_weights * self.count_terms),
            to_holders=basis * sent,
            from_owners=basis * received,
            counts=COUNTS_BYTES * self.ranks,
        )


def blocks_at_a_time(width: int) -> int:
    """Choose the number of blocks refreshed per call: enough to fill a device, few enough to fit its memory."""
    return max(1, BATCH_BYTES // (SUM_BYTES * width**2))


@dataclass(frozen=True)
class Transient:
    """Bytes that the refresh of one group takes on one rank besides the state, by Householder on a CPU.

    Attributes:
        sums: captured, until they are packed.
        reducing: the most that packing and summing take above the sums of other groups, those of the group included.
        received: what is brought to the owner, until its blocks are renewed.
        renewing: the most that renewing takes besides that.
    """

    sums: int
    reducing: int
    received: int
    renewing: int

    @classmethod
    def of(cls, costs: WidthCosts, rank: int) -> "Transient":
        """The transient bytes of one rank of a group."""
        of_rank, alone = costs.of(rank), costs.ranks == 1
        whole = SUM_BYTES * (costs.triangles + costs.weights * costs.count_terms) if alone else of_rank.reduced
        # Four index tensors at first; then three, and the triangles of a weight.
        packing = max(4 * INDEX_BYTES, 3 * INDEX_BYTES + SUM_BYTES * costs.blocks // costs.weights)
        reducing = of_rank.sums + whole + packing * triangle(costs.width)
        received = whole if alone else of_rank.from_others
        if not alone:
            part = SUM_BYTES * costs.chunk
            reducing = max(reducing, 2 * whole + part, part + of_rank.to_owners + received)  # gloo copies
        batch = min(costs.owned[rank], blocks_at_a_time(costs.width))
        # Up to four square index tensors with the sums; then the sums, their average and its magnitudes.
        unpacking = max(4 * INDEX_BYTES, 3 * INDEX_BYTES + SUM_BYTES * batch)
        working = costs.basis_bytes * batch + max(unpacking, 3 * SUM_BYTES * batch) if batch else 0
        return cls(of_rank.sums, reducing, received, working * costs.width**2)


def transient_peak(chunks: Sequence[Sequence[Transient]], *, reduced_first: bool = False) -> int:
    """Compute the peak bytes of a refresh step on one rank, without the state.

    Captured sums are there first. Group by group they become triangles, which travel, and are squares again, a batch of
    blocks at a time, when they enter the moments.

    Args:
        chunks: the groups of each model chunk, in the order in which they are refreshed.
        reduced_first: whether all groups of a chunk are reduced before the first is renewed, as when the main thread
            runs the collectives. Earlier chunks may then still be refreshing.
    """
    left = peak = sum(group.sums for groups in chunks for group in groups)
    before = 0  # what chunks that may be at work have received, and renew
    for groups in chunks:
        received = 0
        for group in groups:
            left -= group.sums
            peak = max(peak, left + before + received + group.reducing)
            if reduced_first:
                received += group.received
            else:
                peak = max(peak, left + group.received + group.renewing)
        if reduced_first:
            waiting = received
            for group in groups:
                peak = max(peak, left + before + waiting + group.renewing)
                waiting -= group.received
            before += received + max((group.renewing for group in groups), default=0)
    return peak


def refresh_costs(
    ownership: BlockOwnership,
    blocks: Mapping[str, int],
    *,
    moment_bytes: int,
    basis_bytes: int,
    transport_bytes: int = SUM_BYTES,
) -> dict[int, WidthCosts]:
    """Costs of all weights of a group, by the width of their blocks.

    Args:
        ownership: owners and holders; its widths may be one or many.
        blocks: blocks of every weight on a rank, tensor parallelism considered.
        moment_bytes: of one element of a moment.
        basis_bytes: of one element of a basis.
        transport_bytes: of one element of the captured sums on their way.
    """
    ranks = len(ownership.holdings)
    found = {
        width: WidthCosts(width, ranks, moment_bytes, basis_bytes, transport_bytes)
        for width in sorted({ownership.widths[key] for key in blocks}, reverse=True)
    }
    owned: dict[str, dict[int, set[int]]] = {}
    for key in sorted(blocks):
        costs = found[ownership.widths[key]]
        costs.weights += 1
        costs.blocks += blocks[key]
        owned[key] = {}
        for block, owner in enumerate(ownership.owners.get(key, ())):
            owned[key].setdefault(owner, set()).add(block)
    holders = {key: [0] * count for key, count in blocks.items()}
    of_all = dict.fromkeys(blocks, 0)  # ranks that hold every block of a weight: most of them, where ranks are many
    for rank, holding in enumerate(ownership.holdings):
        for key, held in holding.items():
            costs, own = found[ownership.widths[key]], owned[key].get(rank, ())
            kept = len(own) if len(held) == blocks[key] else len(set(held).intersection(own)) if own else 0
            costs.held[rank] += len(held)
            costs.both[rank] += kept
            costs.received[rank] += len(held) - kept
            costs.sent[rank] -= kept
            if len(held) == blocks[key]:
                of_all[key] += 1
            else:
                for block in held:
                    holders[key][block] += 1
    places = dict.fromkeys(found, 0)
    for key in sorted(blocks):
        costs = found[width := ownership.widths[key]]
        for owner, of_owner in owned[key].items():
            costs.owned[owner] += len(of_owner)
            costs.owned_weights[owner] += 1
            costs.sent[owner] += sum(of_all[key] + holders[key][block] for block in of_owner)
        # A weight's count lies behind all triangles, in the order of the names.
        for place in range(places[width], places[width] + costs.count_terms):
            costs.counts_at[(costs.triangles + place) // costs.chunk] += len(owned[key])
        places[width] += costs.count_terms
    return found
