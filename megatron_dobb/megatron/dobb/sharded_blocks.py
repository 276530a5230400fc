"""Save and load Dobb's moments and bases as sharded tensors, on any parallel layout.

The moments and the bases are sharded tensors `optimizer.dobb.moment.NAME` and `optimizer.dobb.basis.NAME`, of the
global shape `[B, b, b]`, where NAME is the weight's name in the whole model. Neither names nor block numbers depend
on the layout. Everything else that a reader has to know is in `DobbRunMetadata`, plain numbers and texts in Megatron's
content metadata, which is read before anything is asked of the checkpoint.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from ...methods.dobb.refresh_group import RefreshGroup
from ...methods.dobb.settings import DTYPES, DobbConfig
from ...sharding.ownership import Block
from .run_metadata import DobbRunMetadata

MOMENT, BASIS = "moment", "basis"


@dataclass(frozen=True)
class WeightInModel:
    """Place of a rank's blocks of a weight in the whole model.

    Attributes:
        features: of the whole weight, which its blocks divide.
        first_block: number, in the whole weight, of the rank's block 0.
        copy: 0 if nobody else keeps these blocks, or this rank is the first of the tensor-parallel ranks that keep
            equal ones; those write the checkpoint.
    """

    features: int
    first_block: int
    copy: int


@dataclass(frozen=True)
class Run:
    """Consecutive blocks of one weight: `count` entries from `place` on in a rank's tensor, block `first` first."""

    name: str
    place: int
    first: int
    count: int


@dataclass
class LoadReport:
    """Names of the weights that a load did not take over as they were."""

    cut: set[str]
    restarted: set[str]


class ShardedBlocks:
    """The moments and bases that a rank keeps, as parts of the whole model's.

    Args:
        groups: of the rank's optimizer.
        weights: where their blocks lie, by name.
        config: the settings of this run. Moments of another side or source are not taken over.
    """

    def __init__(
        self, groups: Sequence[RefreshGroup], weights: Mapping[str, WeightInModel], config: DobbConfig
    ) -> None:
        self.groups = groups
        self.config = config
        self.weights = weights

    def to_save(self) -> dict[str, dict[str, ShardedTensor]]:
        """Every block's moment and basis, from its owner."""
        state: dict[str, dict[str, ShardedTensor]] = {MOMENT: {}, BASIS: {}}
        for group in self.groups:
            owned = frozenset(group.owned)
            for kind, blocks, tensor in ((MOMENT, group.owned, group.moment), (BASIS, group.kept, group.basis)):
                for run in runs(blocks, only=owned):
                    part = tensor[run.place : run.place + run.count]
                    first = self.weights[run.name].first_block + run.first
                    state[kind][_entry(run)] = self._sharded(kind, run, group.width, part, first, 0)
        return state

    def to_load(self, saved: DobbRunMetadata) -> dict[str, dict[str, ShardedTensor]]:
        """Room for what this rank wants of a checkpoint, in the types that it is stored in."""
        state: dict[str, dict[str, ShardedTensor]] = {MOMENT: {}, BASIS: {}}
        for group, kind, run, saved_width in self._wanted(saved):
            dtype = DTYPES[saved.moment_dtype if kind == MOMENT else saved.basis_dtype]
            first, count = self._stored_blocks(group, run, saved_width)
            room = torch.empty(count, saved_width, saved_width, dtype=dtype, device="cpu")
            reader = 0 if kind == MOMENT else group.rank
            state[kind][_entry(run)] = self._sharded(kind, run, saved_width, room, first, reader)
        return state

    def take(self, loaded: Mapping[str, Mapping[str, Tensor]], saved: DobbRunMetadata) -> LoadReport:
        """Take over what `to_load` asked for; everything else starts anew."""
        report = LoadReport(set(), set())
        self.restart()
        for group, kind, run, saved_width in self._wanted(saved):
            blocks = loaded[kind][_entry(run)]
            target = group.moment if kind == MOMENT else group.basis
            if saved_width == group.width:
                target[run.place : run.place + run.count] = blocks
                continue
            first, _ = self._stored_blocks(group, run, saved_width)
            for number in range(run.count):
                column = self._column(group, (run.name, run.first + number))
                inside = column % saved_width
                part = slice(inside, inside + group.width)
                target[run.place + number] = blocks[column // saved_width - first][part, part]
        for group in self.groups:
            for weight in group.weights:
                readable = self._readable_width(group, weight.key, saved)
                if readable is None:
                    report.restarted.add(weight.key)
                elif readable != group.width:
                    report.cut.add(weight.key)
        return report

    def restart(self) -> None:
        """Moments of zero and bases of the identity, as at the start of a run."""
        for group in self.groups:
            group.moment.zero_()
            group.basis.copy_(torch.eye(group.width, dtype=group.basis.dtype, device=group.basis.device))

    def _wanted(self, saved: DobbRunMetadata) -> Iterator[tuple[RefreshGroup, str, Run, int]]:
        """The runs of blocks to read, and the width that each was saved in.

        Megatron takes what several ranks read from the same offset on for the same data. So it must have one length:
        runs end where those of any rank do, and do not go on from one stored block to the next if that is wider.
        """
        for group in self.groups:
            cuts = group.ownership.cuts

            def begins_stored_block(block: Block, group: RefreshGroup = group) -> bool:
                saved_width = self._readable_width(group, block[0], saved) or group.width
                return self._column(group, block) % saved_width == 0 and saved_width > group.width

            for kind, blocks, begins in (
                (MOMENT, group.owned, begins_stored_block),
                (BASIS, group.kept, cuts.__contains__),
            ):
                for run in runs(blocks, begins=begins):
                    saved_width = self._readable_width(group, run.name, saved)
                    # The bases of wider blocks say nothing of parts of them: they start anew from their moments.
                    if saved_width is not None and (kind == MOMENT or saved_width == group.width):
                        yield group, kind, run, saved_width

    def _column(self, group: RefreshGroup, block: Block) -> int:
        """The first column of a block in the whole weight."""
        name, number = block
        return (self.weights[name].first_block + number) * group.width

    def _readable_width(self, group: RefreshGroup, name: str, saved: DobbRunMetadata) -> int | None:
        if (saved.side, saved.source) != (self.config.side, self.config.source):
            return None
        width = saved.width(name, self.weights[name].features)
        return width if width is not None and width % group.width == 0 else None

    def _stored_blocks(self, group: RefreshGroup, run: Run, saved_width: int) -> tuple[int, int]:
        """The first and the number of the saved blocks that contain a run of this rank's blocks."""
        start = self._column(group, (run.name, run.first))
        first, last = start // saved_width, (start + run.count * group.width - 1) // saved_width
        return first, last - first + 1

    def _sharded(self, kind: str, run: Run, width: int, blocks: Tensor, first: int, reader: int) -> ShardedTensor:
        weight = self.weights[run.name]
        return ShardedTensor(
            f"optimizer.dobb.{kind}.{run.name}",
            blocks,
            blocks.dtype,
            tuple(blocks.shape),
            (weight.features // width, width, width),
            (first, 0, 0),
            None,  # ranks have different numbers of blocks
            replica_id=(0, weight.copy, reader),
        )


def runs(
    blocks: Sequence[Block],
    only: Container[Block] | None = None,
    begins: Callable[[Block], bool] = lambda block: False,
) -> Iterator[Run]:
    """Group the blocks of a rank's tensor into runs of consecutive ones of a weight.

    Args:
        blocks: in the tensor's order.
        only: leave all others out.
        begins: whether a run must begin with a block, even if it could go on.
    """
    run: Run | None = None
    for place, block in enumerate(blocks):
        wanted = only is None or block in only
        if run and wanted and block == (run.name, run.first + run.count) and not begins(block):
            run = replace(run, count=run.count + 1)
            continue
        if run:
            yield run
        run = Run(block[0], place, block[1], 1) if wanted else None
    if run:
        yield run


def _entry(run: Run) -> str:
    return f"{run.name}/{run.first}"
