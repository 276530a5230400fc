"""Propose block widths that align to one another within few elements."""

import math
from collections.abc import Iterable

SMALL_UNIT = 10_000
"""Alignment unit up to which padding shards adds less than 1 % to a full default bucket."""

NARROWEST_ADVISED = 32
"""Advice proposes no narrower block, unless a narrower one was asked for."""


def workable_counts(columns: int, multiple_of: int = 1) -> list[int]:
    """All block counts that divide `columns` and are a multiple of `multiple_of`."""
    small = [d for d in range(1, math.isqrt(max(columns, 0)) + 1) if columns % d == 0]
    return sorted(c for c in {*small, *(columns // d for d in small)} if c % multiple_of == 0)


def suggest_widths(wanted: Iterable[tuple[int, int]], limit: int = SMALL_UNIT) -> dict[tuple[int, int], int]:
    """Block widths near the wanted ones that align to each other within few elements.

    Args:
        wanted: (columns on one rank, width) pairs.
        limit: the largest lcm of 64 and of all widths proposed.

    Returns:
        A width for each pair, dividing its columns, with the smallest sum of `|log2(proposed / wanted)|` that
        the limit allows (or close to it: beyond 256 possible units only the best are followed); empty when it
        allows none.
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
