"""State of Dobb in checkpoints besides masters and momentum: moments, bases, and the schedule of refreshes."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ...errors import CheckpointError
from ...methods.dobb.capture import Capture
from ...methods.dobb.refresh_group import RefreshGroup
from ...methods.dobb.settings import DobbConfig
from ..checkpoint.save_load import ExtraState
from ..model.chunk_state import Selection
from .rank_state import RankState
from .refresh_log import log_load
from .run_metadata import DobbRunMetadata
from .scheduler import Refreshes
from .select_weights import DobbWeight
from .sharded_blocks import ShardedBlocks, WeightInModel


class RefreshedOptimizer(Protocol):
    """The attributes of a `DobbDistributedOptimizer` that a save or a load needs."""

    settings: DobbConfig
    selections: Sequence[Selection[DobbWeight]]
    managed: dict[str, DobbWeight]
    captures: list[Capture]
    refresh_groups: list[RefreshGroup]
    refreshes: Refreshes
    rank_state: RankState
    attempted_steps: int
    refresh_is_asked: bool
    is_expert: bool
    tp_group: Any
    expert_tp_group: Any

    def begin_step(self) -> None:
        """Start the captures of the coming step."""


class DobbExtraState(ExtraState[DobbRunMetadata]):
    """Moments and bases as sharded tensors, counters as run metadata.

    Args:
        optimizer: whose state it is.
    """

    metadata_class = DobbRunMetadata

    def __init__(self, optimizer: RefreshedOptimizer) -> None:
        self.optimizer = optimizer
        self.settings = optimizer.settings

    def metadata(self, *, experts_apart: bool) -> DobbRunMetadata:
        """The settings and counters that a reader must know. Collective over all ranks of the job."""
        # A rank without weights on Dobb captures nothing, and so never settles how many sequences to take.
        settled = max((capture.sequences or 0 for capture in self.optimizer.captures), default=0)
        return DobbRunMetadata.of(
            self.settings,
            attempted_steps=self.optimizer.attempted_steps,
            capture_sequences=_maximum_over_all_ranks(settled) or None,
            experts_apart=experts_apart,
            refresh_is_asked=self.optimizer.refresh_is_asked,
        )

    def check(self, run: DobbRunMetadata) -> None:
        """Refuse a run in which a weight was on Dobb that the settings of this one send to AdamW."""
        for selection in self.optimizer.selections:
            for name, features in selection.left_out.items():
                if run.width(name, features[run.side]) is not None:
                    raise CheckpointError(
                        f"{name} was on Dobb in the run that saved the checkpoint and is on AdamW in this one, for "
                        "which there is no second moment of its gradient: do not --dobb-exclude it, nor ask for more "
                        "blocks than it has features, or start a fresh optimizer with --no-load-optim"
                    )

    def to_save(self) -> dict[str, Any]:
        """Every block's moment and basis, from its owner, of one point in time."""
        self.optimizer.refreshes.wait()
        return self.blocks().to_save()

    def to_load(self, run: DobbRunMetadata) -> dict[str, Any]:
        """Room for the moments and bases that this rank wants."""
        return self.blocks().to_load(run)

    def discard(self) -> None:
        """Wait for refreshes that have begun, and make nothing of them."""
        self.optimizer.refreshes.forget()

    def resume(self, loaded: dict[str, Any], run: DobbRunMetadata | None) -> None:
        """Take over moments, bases and counters; of another optimizer's checkpoint, start with none."""
        blocks, groups = self.blocks(), self.optimizer.refresh_groups
        if run is None:
            blocks.restart()
            self._continue(0, None, refresh=False)
            log_load(groups, None, self.settings)
            return
        report = blocks.take(loaded, run)
        refresh = self._moments_are_incomplete(run) or run.refresh_is_asked
        # Where there is nothing to refresh, no step would ever take the request back.
        self._continue(run.attempted_steps, run.capture_sequences, refresh=refresh and self.settings.source != "none")
        log_load(groups, report, self.settings)

    def blocks(self) -> ShardedBlocks:
        """The moments and bases of this rank, with their places in the whole model."""
        weights = {name: self._in_model(weight) for name, weight in self.optimizer.managed.items()}
        return ShardedBlocks(self.optimizer.refresh_groups, weights, self.settings)

    def _in_model(self, weight: DobbWeight) -> WeightInModel:
        group = self.optimizer.expert_tp_group if weight.moe is not None else self.optimizer.tp_group
        peers = dist.get_process_group_ranks(group)
        if weight.blocks_over_tp:
            return WeightInModel(weight.features, group.rank() * weight.local_blocks, 0)
        # Where the moment is summed over the tensor-parallel ranks too, a block has one owner among all of them.
        shared = set(peers) <= set(self.optimizer.rank_state.moment_groups.ranks_of[weight.name])
        return WeightInModel(weight.features, 0, 0 if shared else group.rank())

    def _moments_are_incomplete(self, run: DobbRunMetadata) -> bool:
        """Whether some weight of the whole model starts with other moments than the checkpoint's, on whatever rank.

        Every stage of a pipeline must refresh on the next step, or none. The optimizer of the dense weights, which all
        ranks have and which comes first, finds it out with all others; that of the experts takes its answer.
        """
        state = self.optimizer.rank_state
        if not self.optimizer.is_expert:
            weights = [weight for selection in self.optimizer.selections for weight in selection.managed]
            same_moments = (run.side, run.source) == (self.settings.side, self.settings.source)
            incomplete = not same_moments or any(run.width(w.name, w.features) != w.width for w in weights)
            state.moments_incomplete = bool(_maximum_over_all_ranks(incomplete))
        return state.moments_incomplete

    def _continue(self, attempted_steps: int, capture_sequences: int | None, *, refresh: bool) -> None:
        """Go on with the schedule."""
        self.optimizer.attempted_steps, self.optimizer.refresh_is_asked = attempted_steps, refresh
        if self.settings.capture == "first" and self.settings.capture_sequences is None:
            for capture in self.optimizer.captures:
                capture.sequences = capture_sequences
        self.optimizer.begin_step()


def _maximum_over_all_ranks(number: int) -> int:
    """Collective."""
    agreed = torch.tensor([number], dtype=torch.long, device=torch.cuda.current_device())
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    return int(agreed)
