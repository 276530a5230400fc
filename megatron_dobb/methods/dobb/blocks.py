"""Which columns form a block, and which blocks a flat shard of a weight touches.

A weight of `columns` input features is cut into `columns / width` blocks of `width` neighbouring columns. In
row-major storage, row `i` of block `j` is the chunk of `width` elements number `i * blocks_per_row + j`; any
shard of whole chunks can be projected locally. This module is the only place with that arithmetic.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ...errors import BlockError


@dataclass(frozen=True)
class Piece:
    """A rectangle inside a flat shard: `rows` full runs of the blocks `first_block .. first_block + blocks`.

    `offset` is the rectangle's first element, relative to the shard's start. The rectangle is contiguous.
    """

    offset: int
    rows: int
    first_block: int
    blocks: int


@dataclass(frozen=True)
class Shard:
    """The flat, row-major range `[start, end)` of a weight with `columns` columns in blocks of `width`.

    Raises:
        BlockError: if a bound of the range lies inside a block.
    """

    start: int
    end: int
    columns: int
    width: int

    def __post_init__(self) -> None:
        if self.width < 1 or self.columns < 1 or self.columns % self.width:
            raise BlockError(f"block width {self.width} does not divide {self.columns} columns")
        if self.start % self.width or self.end % self.width or not 0 <= self.start <= self.end:
            raise BlockError(
                f"shard [{self.start}, {self.end}) cuts a block of width {self.width}: both bounds must be "
                f"multiples of {self.width}"
            )

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.end - self.start

    @property
    def blocks_per_row(self) -> int:
        """Number of blocks in one row of the weight."""
        return self.columns // self.width

    def pieces(self) -> Iterator[Piece]:
        """The at most three rectangles of the shard: a partial first row, whole rows, a partial last row."""
        per_row = self.blocks_per_row
        chunk, last = self.start // self.width, self.end // self.width
        while chunk < last:
            row_end = (chunk // per_row + 1) * per_row
            whole_rows = (last - chunk) // per_row if chunk % per_row == 0 else 0
            rows, blocks = (whole_rows, per_row) if whole_rows else (1, min(row_end, last) - chunk)
            yield Piece(chunk * self.width - self.start, rows, chunk % per_row, blocks)
            chunk += rows * blocks

    def held_blocks(self) -> tuple[int, ...]:
        """The blocks, in ascending order, of which the shard holds at least one row."""
        held: set[int] = set()
        for piece in self.pieces():
            held.update(range(piece.first_block, piece.first_block + piece.blocks))
        return tuple(sorted(held))


SMALL_UNIT = 10_000
"""Alignment unit up to which padding shards adds less than 1 % to a full default bucket."""

NARROWEST_ADVISED = 32
"""Advice proposes no narrower block, unless a narrower one was asked for."""


def workable_counts(columns: int, multiple_of: int = 1) -> list[int]:
    """All block counts that divide `columns` and are a multiple of `multiple_of`."""
    small = [d for d in range(1, math.isqrt(max(columns, 0)) + 1) if columns % d == 0]
    return sorted(c for c in {*small, *(columns // d for d in small)} if c % multiple_of == 0)


def block_width(
    name: str,
    columns: int,
    *,
    blocks: int | None = None,
    width: int | None = None,
    column_shards: int = 1,
    side: str = "input",
    pattern: str | None = None,
) -> int:
    """Width of the blocks of one weight, the same on every parallel layout.

    Args:
        name: the weight's name, for the message of an error.
        columns: the weight's **global** number of input features; of output features, on the output side.
        blocks: number of blocks over all columns (`--dobb-blocks`); exclusive with `width`.
        width: columns in one block (`--dobb-block-width`).
        column_shards: number of tensor-parallel ranks that share the columns (1 unless row-parallel).
        side: which features they are, `input` or `output`, for the message of an error.
        pattern: of `--dobb-blocks-for`, if that asks for `blocks`, for the message of an error.

    Raises:
        BlockError: if the blocks do not divide the columns, or a block would span two tensor-parallel ranks.
    """
    if blocks is not None and width is not None:
        raise BlockError(
            "exclude each other", "give one of them", subject=name, settings={"blocks": blocks, "block_width": width}
        )
    asked: dict[str, object]
    if blocks is not None:
        value, asked = blocks, {"blocks": blocks} if pattern is None else {"blocks_for": {pattern: blocks}}
    elif width is not None:
        value, asked = width, {"block_width": width}
    else:
        raise BlockError("give either {blocks} or {block_width}", subject=name)
    advice = _advice(columns, column_shards, value, by_count=width is None, has_own=pattern is not None)
    if value < 1 or columns < 1 or columns % value:
        raise BlockError(f"does not divide its {columns} {side} features", advice, subject=name, settings=asked)
    count = value if width is None else columns // value
    if count % column_shards:
        raise BlockError(
            f"makes {count} blocks, which is not a multiple of the {column_shards} tensor-parallel ranks that share "
            f"its {columns} {side} features, so a block would span two",
            advice,
            subject=name,
            settings=asked,
        )
    return columns // count


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


def _advice(columns: int, column_shards: int, asked: int, *, by_count: bool, has_own: bool) -> str:
    counts = workable_counts(columns, column_shards)
    if not counts:
        return f"no block count works, because {column_shards} ranks do not divide {columns}: use {{exclude}}"
    values = counts if by_count else [columns // count for count in counts]
    nearest = sorted(values, key=lambda value: abs(math.log(value / max(asked, 1))))[:8]
    own = "" if has_own else " give this weight its own count with {blocks_for},"
    return f"use one of {', '.join(map(str, sorted(nearest)))},{own} or leave it to AdamW with {{exclude}}"
