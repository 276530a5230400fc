"""Send segments of a flat buffer from holders of equal chunks to the ranks that need them whole, and back."""

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class FlatRedistribution:
    """Routes of a flat buffer, held in equal chunks, to the ranks that need its segments whole, and back.

    Rank `r` first gets elements `[r * chunk, (r + 1) * chunk)` of the sum, then forwards parts of them. Every message
    lists its parts in the buffer's order, so concatenating a rank's messages by source gives all its segments in order.

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
        """List, for every destination, the ranges of `rank`'s chunk to send, counted from the chunk's start."""
        row: list[list[tuple[int, int]]] = [[] for _ in range(self.ranks)]
        for segment, low, high in self._segments_of(rank):
            for destination in self.destinations[segment]:
                _append(row[destination], low, high)
        return row

    def receive_sizes(self, rank: int) -> list[int]:
        """Count, for every source, the elements that it sends to `rank`."""
        sizes = [0] * self.ranks
        for segment in self._wanted_by[rank]:
            for source, low, high in self._split(self._bounds[segment], self._bounds[segment + 1]):
                sizes[source] += high - low
        return sizes

    def returns(self, rank: int) -> list[list[tuple[int, int]]]:
        """List, for every destination, the received ranges that `rank` sends back to the chunk they came from.

        If several ranks received a segment, the lowest sends it back. Ranges count from the start of all elements that
        `rank` received, its segments one after another.
        """
        row: list[list[tuple[int, int]]] = [[] for _ in range(self.ranks)]
        place = 0
        for segment in self._wanted_by[rank]:
            start, end = self._bounds[segment], self._bounds[segment + 1]
            if min(self.destinations[segment]) == rank:
                for source, low, high in self._split(start, end):
                    _append(row[source], place + low - start, place + high - start)
            place += end - start
        return row

    def return_places(self, rank: int) -> list[list[tuple[int, int]]]:
        """List, for every source, the ranges of `rank`'s chunk that it sends back, counted from the chunk's start."""
        row: list[list[tuple[int, int]]] = [[] for _ in range(self.ranks)]
        for segment, low, high in self._segments_of(rank):
            if self.destinations[segment]:
                _append(row[min(self.destinations[segment])], low, high)
        return row

    def _segments_of(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """Yield each segment in `rank`'s chunk and the range of its elements there, counted from the chunk's start."""
        origin, end = rank * self.chunk, (rank + 1) * self.chunk
        segment = bisect_right(self._bounds, origin) - 1
        while segment < len(self.lengths) and self._bounds[segment] < end:
            low, high = max(self._bounds[segment], origin), min(self._bounds[segment + 1], end)
            if low < high:
                yield segment, low - origin, high - origin
            segment += 1

    def _split(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Cut a range of the buffer at chunk bounds; yield the rank of each chunk and its part of the range."""
        while start < end:
            rank = start // self.chunk
            stop = min(end, (rank + 1) * self.chunk)
            yield rank, start, stop
            start = stop

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


def _append(ranges: list[tuple[int, int]], low: int, high: int) -> None:
    """Add a range, merging it with the last one if there is no gap."""
    if ranges and ranges[-1][1] == low:
        ranges[-1] = (ranges[-1][0], high)
    else:
        ranges.append((low, high))
