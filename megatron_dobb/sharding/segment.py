"""View a flat, row-major shard of a weight as rectangles of whole blocks.

In row-major storage, row `i` of block `j` is the chunk of `width` elements number `i * blocks_per_row + j`, so a shard
of whole chunks is at most three rectangles: a partial first row, whole rows and a partial last row. This module is the
only place with that arithmetic.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

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


@dataclass
class Segment:
    """Flat shard of one managed weight and everything that its update touches.

    Attributes:
        name: the weight's name.
        shard: the range, in whole blocks.
        rows: the weight's **global** number of rows, `m`.
        columns: its **global** number of columns, `n`.
        weight: the shard of the weight, `[shard.numel]`; the fp32 master if there is one.
        momentum: `M`, `[shard.numel]` fp32.
        basis: bases of `shard.held_blocks()`, `[held, b, b]`, in that order; None for the momentum's own entries.
        output_side: whether the blocks run over the output axis. `weight` and `momentum` then hold whole row blocks
            `[k b, n]` (or a column slice of them), row-major, and `shard` describes their transpose.
    """

    name: str
    shard: Shard
    rows: int
    columns: int
    weight: Tensor
    momentum: Tensor
    basis: Tensor | None
    output_side: bool = False

    @property
    def column_length(self) -> int:
        """Entries in one column of the whole weight's coefficients: `m`, or `n` on the output side."""
        return self.columns if self.output_side else self.rows

    def turned(self) -> "Segment":
        """Return the segment with blocks over the input axis: a transposed copy if it is output-side, else itself."""
        if not self.output_side:
            return self
        return replace(
            self,
            rows=self.columns,
            columns=self.rows,
            weight=self.turn(self.weight),
            momentum=self.turn(self.momentum),
            output_side=False,
        )

    def turn(self, flat: Tensor) -> Tensor:
        """Put a flat tensor of this segment in the order of `shard`: a transposed copy if it is output-side."""
        if not self.output_side:
            return flat
        # Transposing a single row or column leaves it contiguous, so contiguous() or reshape() would not copy it.
        return flat.view(self.shard.columns, -1).t().clone(memory_format=torch.contiguous_format).view(-1)

    def turn_back(self, flat: Tensor) -> Tensor:
        """Undo `turn`."""
        return flat.view(-1, self.shard.columns).t().reshape(-1) if self.output_side else flat

    def take_back(self, turned: "Segment") -> None:
        """Copy the weight and momentum of a turned copy back into this segment."""
        for mine, other in ((self.weight, turned.weight), (self.momentum, turned.momentum)):
            mine.view(self.shard.columns, -1).copy_(other.view(-1, self.shard.columns).t())

    def rectangles(self) -> Iterator[tuple[tuple[int, int, int], slice]]:
        """Yield the offset, rows and blocks of each piece, and the slice of its blocks among the held ones."""
        place = {block: i for i, block in enumerate(self.shard.held_blocks())}
        for piece in self.shard.pieces():
            first = place[piece.first_block]
            yield (piece.offset, piece.rows, piece.blocks), slice(first, first + piece.blocks)

    def rectangle(self, flat: Tensor, offset: int, rows: int, blocks: int) -> Tensor:
        """View `[rows, blocks, b]` of a piece of a flat tensor of this shard."""
        return flat[offset : offset + rows * blocks * self.shard.width].view(rows, blocks, self.shard.width)
