"""Cut a flat, row-major shard of a weight into rectangles of whole blocks.

In row-major storage, row `i` of block `j` is the chunk of `width` elements number `i * blocks_per_row + j`, so a shard
of whole chunks is at most three rectangles: a partial first row, whole rows and a partial last row. This module is the
only place with that arithmetic; it imports no torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import BlockError


@dataclass(frozen=True)
class Piece:
    """Rectangle inside a flat shard: `rows` full runs of the blocks `first_block .. first_block + blocks`.

    `offset` is the rectangle's first element, relative to the shard's start. The rectangle is contiguous.
    """

    offset: int
    rows: int
    first_block: int
    blocks: int


@dataclass(frozen=True)
class Shard:
    """Flat, row-major range `[start, end)` of a weight with `columns` columns in blocks of `width`.

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
        """Yield the shard's rectangles, at most three: a partial first row, whole rows, a partial last row."""
        per_row = self.blocks_per_row
        chunk, last = self.start // self.width, self.end // self.width
        while chunk < last:
            row_end = (chunk // per_row + 1) * per_row
            whole_rows = (last - chunk) // per_row if chunk % per_row == 0 else 0
            rows, blocks = (whole_rows, per_row) if whole_rows else (1, min(row_end, last) - chunk)
            yield Piece(chunk * self.width - self.start, rows, chunk % per_row, blocks)
            chunk += rows * blocks

    def held_blocks(self) -> tuple[int, ...]:
        """List, in ascending order, the blocks with at least one row in the shard."""
        held: set[int] = set()
        for piece in self.pieces():
            held.update(range(piece.first_block, piece.first_block + piece.blocks))
        return tuple(sorted(held))
