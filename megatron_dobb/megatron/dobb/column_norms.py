"""Norms of the columns of coefficients, summed over the ranks that share a weight: the only traffic of Dobb-l2.

On the input side a column runs over all rows of a weight, which ZeRO cuts, and tensor parallelism too where it splits
the rows. On the output side the blocks are whole rows of one rank, and only tensor parallelism that splits the columns
makes a sum necessary. One all-reduce of `n` (or `m`) fp32 scalars for each weight, all of a process group in one call.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...methods.dobb import update
from ...sharding.segment import Segment
from .process_groups import Ranks
from .select_weights import DobbWeight


class ColumnNorms:
    """The sums for all weights of a rank's optimizer.

    Args:
        weights: the weights, by name: on every rank of a group the same.
        ranks_of: the global ranks that share each weight's columns.
        groups: the process groups of these; None for a rank alone.
        held: the blocks of which this rank's shard has something, by name.
        device: where the sums live.
    """

    def __init__(
        self,
        weights: Mapping[str, DobbWeight],
        ranks_of: Mapping[str, Ranks],
        groups: Mapping[Ranks, dist.ProcessGroup | None],
        held: Mapping[str, Sequence[int]],
        device: torch.device,
    ) -> None:
        self.groups = groups
        self.sums: dict[Ranks, Tensor] = {}
        self.place: dict[str, tuple[Ranks, slice, tuple[int, int]]] = {}
        self.held = {name: torch.tensor(held[name], dtype=torch.long, device=device) for name in weights}
        for ranks in sorted({ranks_of[name] for name in weights}):
            end = 0
            for name in sorted(name for name in weights if ranks_of[name] == ranks):
                shape = weights[name].local_blocks, weights[name].width
                start, end = end, end + shape[0] * shape[1]
                self.place[name] = ranks, slice(start, end), shape
            self.sums[ranks] = torch.zeros(end, dtype=torch.float32, device=device)

    def scales(
        self, segments: Sequence[Segment], gradients: Sequence[Tensor], *, momentum: float, nesterov: bool
    ) -> list[Tensor]:
        """The `column_scales` of `kernels.update`, `[held, b]` for each segment. Collective over every group.

        Args:
            segments: of all weights of this rank.
            gradients: one for each.
            momentum, nesterov: of the update to come.
        """
        for flat in self.sums.values():
            flat.zero_()
        for segment, gradient in zip(segments, gradients, strict=True):
            squares = update.column_squares(segment, gradient, momentum=momentum, nesterov=nesterov)
            self._of(segment.name)[self.held[segment.name]] = squares
        for ranks, flat in self.sums.items():
            group = self.groups[ranks]
            if group is not None:
                dist.all_reduce(flat, group=group)
        return [
            update.column_scales(self._of(segment.name)[self.held[segment.name]], segment.column_length)
            for segment in segments
        ]

    def bytes_reduced(self) -> int:
        """Bytes that this rank contributes to all-reduces in every step."""
        return sum(4 * flat.numel() for ranks, flat in self.sums.items() if self.groups[ranks] is not None)

    def _of(self, name: str) -> Tensor:
        """The squares of a weight's columns, `[blocks, b]`: a view."""
        ranks, place, shape = self.place[name]
        return self.sums[ranks][place].view(shape)
