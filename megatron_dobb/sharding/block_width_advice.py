"""Propose block widths with a small common alignment unit."""

import math
from collections.abc import Iterable

SMALL_UNIT = 10_000
"""Alignment unit up to which padding shards adds less than 1 % to a full default bucket."""

NARROWEST_ADVISED = 32
"""Narrowest block width that advice proposes, unless a narrower one was requested."""


def workable_counts(columns: int, multiple_of: int = 1) -> list[int]:
    """List all block counts that divide `columns` and are a multiple of `multiple_of`."""
    small = [d for d in range(1, math.isqrt(max(columns, 0)) + 1) if columns % d == 0]
    return sorted(c for c in {*small, *(columns // d for d in small)} if c % multiple_of == 0)


def suggest_widths(wanted: Iterable[tuple[int, int]], limit: int = SMALL_UNIT) -> dict[tuple[int, int], int]:
    """Suggest block widths near the wanted ones that have a small common alignment unit.

    Args:
        wanted: (columns on one rank, width) pairs.
        limit: the largest lcm of 64 and of all widths proposed.

    Returns:
        A width for each pair that divides its columns, with the smallest sum of `|log2(proposed / wanted)|` within the
        limit (or nearly: the search keeps only the best 256 units); empty if there is none.
    """
    pairs = sorted(set(wanted))
    best: dict[int, tuple[float, tuple[int, ...]]] = {64: (0.0, ())}  # alignment unit: (distance, widths)
    for columns, width in pairs:
        reached: dict[int, tuple[float, tuple[int, ...]]] = {}
        for candidate in workable_counts(columns):
            if candidate < min(width, NARROWEST_ADVISED):
                continue
            for unit, (distance, chosen) in best.items():
                grown = math.lcm(unit, candidate)
                option = (distance + abs(math.log2(candidate / width)), (*chosen, candidate))
                if grown <= limit and (grown not in reached or option < reached[grown]):
                    reached[grown] = option
        best = dict(sorted(reached.items(), key=lambda option: option[1])[:256])
    if not best:
        return {}
    _, _, chosen = min((distance, unit, chosen) for unit, (distance, chosen) in best.items())
    return dict(zip(pairs, chosen, strict=True))
