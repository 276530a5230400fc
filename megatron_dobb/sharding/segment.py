"""View a flat shard of a weight, its momentum and its bases as rectangles of whole blocks."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .shard import Shard


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
