"""Balance items over ranks by cost: among their holders, and on other ranks where that pays.

Work ends when the busiest rank is done, and all holders of an item may be busy: a data-parallel rank whose shards lie
in the most expensive weights can share them only with its neighbours. Moving an item to a rank that does not hold it
costs traffic, so that is done only if some rank has more than `TOLERANCE` times the work of the best possible
assignment, and only for items that the caller declares movable.

Integer arithmetic, the same on every rank.
"""

import heapq
import math
from collections.abc import Container, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate

Block = tuple[str, int]
"""Item to assign: the key of its weight and its index within the weight."""

TOLERANCE = Fraction(6, 5)
"""Largest ratio of the busiest rank's work to the best possible at which no item is moved."""


def best_possible(costs: Sequence[int], ranks: int) -> Fraction:
    """Compute a lower bound on the busiest rank's work when whole items are assigned to `ranks` ranks.

    The bound is at least the mean and the most expensive item: of the `k ranks + 1` most expensive items, some rank has
    at least `k + 1`, which cost no less than the cheapest `k + 1` of them.

    Args:
        costs: cost of every item.
        ranks: number of ranks.
    """
    descending = sorted(costs, reverse=True)
    sums = [0, *accumulate(descending)]
    together = [sums[k * ranks + 1] - sums[k * ranks - k] for k in range(len(costs)) if k * ranks < len(costs)]
    return max([Fraction(sums[-1], ranks), *map(Fraction, together)])


def share(
    holders: Mapping[Block, Sequence[int]],
    costs: Mapping[str, int],
    ranks: int,
    *,
    movable: Container[str] = (),
) -> dict[Block, int]:
    """Choose the owner of every item.

    Items are assigned in descending order of cost, each to its least busy holder, and ties go to the lowest rank.
    Overloaded ranks are then relieved. If that does not bring the busiest within `TOLERANCE` of the best possible, the
    assignment is repeated with a different start: a movable item whose holders have no room left goes to the least busy
    rank of all, so cheap items leave room for expensive ones.

    Args:
        holders: the ranks that hold a part of each item.
        costs: work of one item of every key.
        ranks: size of the group.
        movable: keys whose items may go to ranks that do not hold them.
    """
    limit = math.floor(TOLERANCE * best_possible([costs[key] for key, _ in holders], ranks))
    at_holders = _Assignment(holders, costs, ranks, movable, limit)
    at_holders.place(roaming=False)
    if at_holders.relieve():
        return at_holders.owner_of
    anywhere = _Assignment(holders, costs, ranks, movable, limit)
    anywhere.place(roaming=True)
    anywhere.relieve()
    return min(at_holders, anywhere, key=lambda assignment: max(assignment.load)).owner_of


class _Assignment:
    """Partial assignment of owners, and the resulting work of each rank.

    Args:
        holders, costs, ranks, movable: as for `share`.
        limit: work above which a rank is overloaded.
    """

    def __init__(
        self,
        holders: Mapping[Block, Sequence[int]],
        costs: Mapping[str, int],
        ranks: int,
        movable: Container[str],
        limit: int,
    ) -> None:
        self.holders, self.costs, self.movable, self.limit = holders, costs, movable, limit
        self.owner_of: dict[Block, int] = {}
        self.owned: list[list[Block]] = [[] for _ in range(ranks)]
        self.load = [0] * ranks
        # Heap entries with an outdated load are skipped.
        self._idlest = [(0, rank) for rank in range(ranks)]
        self._busiest = self._idlest.copy()

    def place(self, *, roaming: bool) -> None:
        """Assign every item to a holder or, if `roaming` and the holders have no room left, to any rank."""
        for item in sorted(self.holders, key=lambda item: (-self.costs[item[0]], item)):
            owner = self._least_busy_holder(item)
            if roaming and item[0] in self.movable and not self._has_room(owner, item, self.limit):
                owner = min(owner, self._idlest_rank(), key=lambda rank: self.load[rank])
            self._give(item, owner)

    def relieve(self) -> bool:
        """Move items off the busiest rank while it is overloaded and that helps; return whether none is overloaded.

        To move few items, it gives away the cheapest item that brings it below the limit, or else the most expensive.
        The item goes to a holder with room if there is one, which costs nothing, or else to the least busy rank.
        """
        while self.load[source := self._busiest_rank()] > self.limit:
            move = self._best_move(source)
            if move is None:
                return False
            item, destination = move
            self.owned[source].remove(item)
            self._add(source, -self.costs[item[0]])
            self._give(item, destination)
        return True

    def _best_move(self, source: int) -> tuple[Block, int] | None:
        excess, idlest = self.load[source] - self.limit, self._idlest_rank()

        def preference(item: Block) -> tuple[bool, int, Block]:
            cost = self.costs[item[0]]
            enough = cost >= excess
            return not enough, cost if enough else -cost, item

        in_order = sorted(self.owned[source], key=preference)
        for most in (self.limit, self.load[source] - 1):  # if nothing fits below the limit, any relief helps
            for item in in_order:
                holder = self._least_busy_holder(item)
                if self._has_room(holder, item, most):
                    return item, holder
                if item[0] in self.movable and self._has_room(idlest, item, most):
                    return item, idlest
        return None

    def _has_room(self, rank: int, item: Block, most: int) -> bool:
        return self.load[rank] + self.costs[item[0]] <= most

    def _least_busy_holder(self, item: Block) -> int:
        return min(self.holders[item], key=lambda rank: (self.load[rank], rank))

    def _give(self, item: Block, rank: int) -> None:
        self.owner_of[item] = rank
        self.owned[rank].append(item)
        self._add(rank, self.costs[item[0]])

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
