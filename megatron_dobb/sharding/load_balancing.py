"""Share blocks out by work: among the ranks that hold them, and beyond where that saves more time than it costs.

A refresh is over when its busiest rank is, and the ranks that hold a block may all be busy: a data-parallel rank
whose shards lie in the widest weights has nobody but its neighbours to share them with. Any rank can keep a moment
and refresh a basis for others, though. That costs one more basis to send, so it is done only where a rank has more
than `TOLERANCE` times the work of the best sharing-out there can be, and only with blocks that are wide enough.

Arithmetic on whole numbers, the same on every rank; nothing here imports torch.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate

Block = tuple[str, int]
"""A block: its weight's key and its number within that weight."""

TOLERANCE = Fraction(6, 5)
"""Work of the busiest rank, over the best possible, at which no block is moved."""

REFRESH_FLOPS = 14
"""Of one block, in units of `b^3`, with Cholesky QR: 2 for `A Q`; in each of three passes 2 for the Gram matrix, 1/3
for the factor and 1 for the triangular solve; 2 for the check. Householder QR takes 9, at a lower rate."""

FLOPS_PER_SECOND = 13 * 10**12
"""A fifth of the 67 TFLOP/s in fp32 of NVIDIA's data sheet for an H100 or H200: an assumption, not a measurement."""

BASIS_BYTES_PER_ELEMENT = 2
"""Of a basis in bf16."""

BYTES_PER_SECOND = 50 * 10**9
"""Between nodes, per GPU: one 400 Gb/s link."""


def work(width: int) -> int:
    """Relative cost of refreshing one block: products and orthogonalisation of `b x b` matrices, O(b^3)."""
    return width**3


def is_worth_moving(width: int) -> bool:
    """Whether a block takes longer to refresh than its basis takes to send once more: from a width of 38 on.

    A block whose owner holds it is sent to all other holders; one that was moved is sent to that one too. The moment
    goes to another rank instead, which costs nothing.
    """
    refreshing = Fraction(REFRESH_FLOPS * work(width), FLOPS_PER_SECOND)
    sending = Fraction(BASIS_BYTES_PER_ELEMENT * width**2, BYTES_PER_SECOND)
    return refreshing > sending


def best_possible(works: Sequence[int], ranks: int) -> Fraction:
    """No sharing-out of whole blocks over `ranks` ranks gives the busiest less work than this.

    That is the mean, or the widest block, or more: of the `k ranks + 1` widest blocks, some rank has at least
    `k + 1`, which are no less than the narrowest `k + 1` of them.

    Args:
        works: of every block.
        ranks: over which they are shared out.
    """
    widest_first = sorted(works, reverse=True)
    sums = [0, *accumulate(widest_first)]
    together = [sums[k * ranks + 1] - sums[k * ranks - k] for k in range(len(works)) if k * ranks < len(works)]
    return max([Fraction(sums[-1], ranks), *map(Fraction, together)])


def share(holders: Mapping[Block, Sequence[int]], widths: Mapping[str, int], ranks: int) -> dict[Block, int]:
    """The owner of every block.

    Widest blocks go first, each to its least busy holder, on a tie to the lowest rank. Then ranks with too much to do
    are relieved. Where that does not bring the busiest within `TOLERANCE` of the best possible, it is done again from
    a start in which a block whose holders have no room left goes to the least busy rank of all: narrow blocks then
    leave room for wide ones.

    Args:
        holders: the ranks that hold a row of each block.
        widths: block width of every key.
        ranks: size of the group.
    """
    limit = math.floor(TOLERANCE * best_possible([work(widths[key]) for key, _ in holders], ranks))
    at_holders = _Sharing(holders, widths, ranks, limit)
    at_holders.place(roaming=False)
    if at_holders.relieve():
        return at_holders.owner_of
    anywhere = _Sharing(holders, widths, ranks, limit)
    anywhere.place(roaming=True)
    anywhere.relieve()
    return min(at_holders, anywhere, key=lambda sharing: max(sharing.load)).owner_of


class _Sharing:
    """Owners so far, and the work that each rank has with it.

    Args:
        holders, widths, ranks: see `share`.
        limit: work above which a rank has too much.
    """

    def __init__(
        self, holders: Mapping[Block, Sequence[int]], widths: Mapping[str, int], ranks: int, limit: int
    ) -> None:
        self.holders, self.widths, self.limit = holders, widths, limit
        self.owner_of: dict[Block, int] = {}
        self.owned: list[list[Block]] = [[] for _ in range(ranks)]
        self.load = [0] * ranks
        # Entries whose load is no longer the rank's are passed over.
        self._idlest = [(0, rank) for rank in range(ranks)]
        self._busiest = self._idlest.copy()

    def place(self, *, roaming: bool) -> None:
        """Give every block an owner: a holder or, if `roaming`, any rank where the holders have no room left."""
        for block in sorted(self.holders, key=lambda block: (-self.widths[block[0]], block)):
            owner = self._least_busy_holder(block)
            if roaming and is_worth_moving(self.widths[block[0]]) and not self._has_room(owner, block, self.limit):
                owner = min(owner, self._idlest_rank(), key=lambda rank: self.load[rank])
            self._give(block, owner)

    def relieve(self) -> bool:
        """Let the busiest rank give blocks away while it has too much and that helps; whether none has any more.

        It gives the narrowest block that brings it below the limit, or else the widest, to a holder with room if
        there is one, which costs nothing, or else to the least busy rank. So few blocks move.
        """
        while self.load[source := self._busiest_rank()] > self.limit:
            move = self._best_move(source)
            if move is None:
                return False
            block, destination = move
            self.owned[source].remove(block)
            self._add(source, -work(self.widths[block[0]]))
            self._give(block, destination)
        return True

    def _best_move(self, source: int) -> tuple[Block, int] | None:
        excess, idlest = self.load[source] - self.limit, self._idlest_rank()

        def preference(block: Block) -> tuple[bool, int, Block]:
            width = self.widths[block[0]]
            enough = work(width) >= excess
            return not enough, width if enough else -width, block

        in_order = sorted(self.owned[source], key=preference)
        for most in (self.limit, self.load[source] - 1):  # if none of them then stays below the limit, it still helps
            for block in in_order:
                holder = self._least_busy_holder(block)
                if self._has_room(holder, block, most):
                    return block, holder
                if is_worth_moving(self.widths[block[0]]) and self._has_room(idlest, block, most):
                    return block, idlest
        return None

    def _has_room(self, rank: int, block: Block, most: int) -> bool:
        return self.load[rank] + work(self.widths[block[0]]) <= most

    def _least_busy_holder(self, block: Block) -> int:
        return min(self.holders[block], key=lambda rank: (self.load[rank], rank))

    def _give(self, block: Block, rank: int) -> None:
        self.owner_of[block] = rank
        self.owned[rank].append(block)
        self._add(rank, work(self.widths[block[0]]))

    def _add(self, rank: int, more: int) -> None:
        self.load[rank] += more
        heapq.heappush(self._idlest, (self.load[rank], rank))
        heapq.heappush(self._busiest, (-self.load[rank], rank))

    def _idlest_rank(self) -> int:
        while self._idlest[0][0] != self.load[self._idlest[0][1]]:
            heapq.heappop(self._idlest)
        return self._idlest[0][1]

    def _busiest_rank(self) -> int:
        while -self._busiest[0][0] != self.load[self._busiest[0][1]]:
            heapq.heappop(self._busiest)
        return self._busiest[0][1]
