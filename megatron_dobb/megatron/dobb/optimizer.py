"""Dobb on the shards of Megatron's distributed optimizer: refreshes, captures and the update."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...methods.dobb import kernels
from ...methods.dobb.block_ownership import work
from ...methods.dobb.capture import Capture, MomentSum
from ...methods.dobb.refresh_group import HeldWeight, RefreshCounts, RefreshGroup
from ...methods.dobb.schedule import is_due, phases
from ...methods.dobb.settings import DobbConfig
from ...sharding.segment import Segment
from ..model.chunk_state import ChunkState
from ..shard_optimizer import ShardOptimizer
from ..startup_check import gather_over_all_ranks
from .column_norms import ColumnNorms
from .extra_state import DobbExtraState
from .metrics import Diagnostics
from .process_groups import MomentGroups
from .rank_state import RankState
from .scheduler import ChunkRefresh, Members, Refreshes, make_groups
from .select_weights import DobbWeight
from .stages import has_one_launch_queue, launcher_of


@dataclass(frozen=True)
class RefreshFacts:
    """Facts on the refreshes of one rank, compared over all ranks at the start.

    Attributes:
        work_of: the work of refreshing each of its weights, by name, where refreshes are staggered.
        one_launch_queue: whether its streams launch through one queue.
    """

    work_of: dict[str, int]
    one_launch_queue: bool


class DobbDistributedOptimizer(ShardOptimizer[DobbWeight, Segment]):
    """ZeRO-1 with Dobb.

    On a refresh step the moments are reduced and the bases renewed before the gradients are looked at, so that a step
    that Megatron skips drops only the update.

    Attributes:
        attempted_steps: steps so far, skipped ones included.
        refresh_is_asked: whether the next step refreshes, whatever the schedule says.
        rank_state: what it shares with the other optimizer of this rank.
        captures: of each model chunk.
        refresh_groups: of this rank.
        refreshes: their schedule.
    """

    method = "dobb"
    settings: DobbConfig
    rank_state: RankState

    # Start.

    def _prepare(self, chunk: Any, state: ChunkState) -> None:
        self.attempted_steps = 0
        self.refresh_is_asked = False
        self.captures: list[Capture] = []
        self.refresh_groups: list[RefreshGroup] = []
        self.refreshes = Refreshes(self.settings, [], Diagnostics(), is_expert=False, worker=None)
        self._pending: kernels.Pending = []
        if state.shared is None:
            facts = gather_over_all_ranks(self._refresh_facts())
            work_of = {name: number for of_rank in facts for name, number in of_rank.work_of.items()}
            state.shared = RankState(
                MomentGroups.create(chunk, self.selections, self.settings),
                phases(work_of, self.settings.refresh_interval) if self.settings.stagger else {},
                any(of_rank.one_launch_queue for of_rank in facts),
            )
        self.rank_state = state.shared

    def _refresh_facts(self) -> RefreshFacts:
        weights = [weight for selection in self.selections for weight in selection.managed]
        work_of = {weight.name: weight.features // weight.width * work(weight.width) for weight in weights}
        return RefreshFacts(work_of if self.settings.stagger else {}, has_one_launch_queue())

    def _build(self) -> None:
        moment_groups = self.rank_state.moment_groups
        device = torch.device("cuda", torch.cuda.current_device())
        held: dict[str, tuple[int, ...]] = {}
        members: Members = {}
        for number, weights in enumerate(self.weights_of_chunk):
            for weight in weights:
                name, width = weight.name, weight.width
                # One that several chunks share belongs to the last of them.
                if self.managed[name] is weight:
                    held[name] = weight.held_blocks(*self.cut_of[name]) if name in self.cut_of else ()
                    if self.settings.source == "none":
                        continue  # there is nothing to refresh
                    place = moment_groups.ranks_of[name], self.rank_state.phases.get(name, 0)
                    members.setdefault(place, {}).setdefault((number, -width), []).append(
                        HeldWeight(name, weight.local_blocks, width, held[name], may_be_idle=weight.moe is not None)
                    )
        chunks = len(self.weights_of_chunk)
        groups_of_chunk = make_groups(members, chunks, moment_groups.groups, self.settings, device)
        self.refresh_groups = [group for groups in groups_of_chunk for group, _ in groups]
        self._basis_of = {
            weight.key: group.basis_of(weight.key)
            for group in self.refresh_groups
            for weight in group.weights
            if weight.held
        }
        self.diagnostics = self.rank_state.diagnostics_of(self)
        if self.settings.norm == "l2":
            self.column_norms = ColumnNorms(self.managed, moment_groups.columns_of, moment_groups.groups, held, device)
        for selection, weights in zip(self.selections, self.weights_of_chunk, strict=True):
            self.captures.append(
                Capture(
                    selection.root,
                    [weight.source() for weight in weights] if self.settings.captures else [],
                    self.settings.capture_sequences,
                    rank=self.model_chunks[0].dp_group.rank(),
                    ranks=self.model_chunks[0].dp_group.size(),
                    default_to_first=self.settings.capture == "first",
                    backend=self.settings.backend,
                )
            )
        overlaps = self.settings.overlap_refresh and self.refresh_groups
        self.refreshes = Refreshes(
            self.settings,
            [ChunkRefresh(*pair) for pair in zip(self.captures, groups_of_chunk, strict=True)],
            self.diagnostics,
            self.is_expert,
            self.rank_state.worker_on(self.refresh_groups[0].basis.device) if overlaps else None,
            launcher_of(self.refresh_groups, self.rank_state.one_launch_queue),
            self._gradient_factor(),
        )
        self.begin_step()

    def _segment(self, weight: DobbWeight, shard: torch.nn.Parameter, momentum: Tensor) -> Segment:
        return Segment(
            weight.name,
            weight.shard(*self.cut_of[weight.name]),
            weight.geometry.rows,
            weight.geometry.columns,
            shard,
            momentum,
            self._basis_of[weight.name] if self.settings.source != "none" else None,
            weight.output_side,
        )

    # Steps.

    def begin_step(self, announced: bool = False) -> None:
        """Arm the captures of the coming step; `announced` by the program's `zero_grad`."""
        self.refreshes.begin(self.attempted_steps, self.refresh_is_asked, announced)

    @property
    def refresh_counts(self) -> RefreshCounts:
        """Blocks of this rank's refresh groups that refreshes left alone or Householder had to finish."""
        return self.refreshes.counts

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Megatron's zero_grad; also starts the captures of the coming step (again, when Megatron reruns one)."""
        super().zero_grad(set_to_none)
        self.begin_step(announced=True)

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Refresh the bases if this step is due, whatever becomes of its gradients, then Megatron's own work."""
        if not self.is_stub_optimizer:
            if self.settings.captures:
                self.refreshes.finish()
                self.refresh_is_asked = False
            elif self.settings.source == "gram" and is_due(self.attempted_steps, 0, self.settings.refresh_interval):
                # Moments of the gradient wait until Megatron has judged it; a skipped step leaves its refresh due.
                self.refresh_is_asked = True
            self.attempted_steps += 1
            self.begin_step()
        return super().prepare_grads()

    def _gradient_factor(self) -> float:
        """The factor of captured gradients.

        They are those of a rank's mean loss. The mean over the ranks, of which Megatron makes the gradients of the
        weights, knows no number of ranks.
        """
        if self.settings.source != "output-gradient" or self.model_chunks[0].config.calculate_per_token_loss:
            return 1.0
        return 1 / self.model_chunks[0].dp_cp_group.size()

    def _check_gradients(self, gradients: Sequence[Sequence[Tensor]]) -> None:
        kernels.check(self._pending)
        self._pending = []
        super()._check_gradients(gradients)

    def _update(self, gradients: Sequence[Sequence[Tensor]]) -> None:
        if self.refresh_is_asked and self.settings.source == "gram":
            self.refreshes.of_gradients(self._grams(gradients), self.attempted_steps)
            self.refresh_is_asked = False
        scales = self._column_scales(gradients)
        for group, segments, group_gradients, group_scales in zip(
            self.optimizer.param_groups, self.segments, gradients, scales, strict=True
        ):
            self._pending += kernels.update(
                segments,
                group_gradients,
                learning_rate=group["lr"],
                weight_decay=group["weight_decay"],
                momentum=self.settings.momentum,
                nesterov=self.settings.nesterov,
                update_scale=self.settings.update_scale,
                precision=self.settings.precision,
                backend=self.settings.backend,
                column_scales=group_scales,
            )
        self.diagnostics.after_update(self, gradients, scales)

    def _grams(self, gradients: Sequence[Sequence[Tensor]]) -> dict[str, MomentSum]:
        """Sum this rank's part of `G^T G` of every weight, or of `G G^T` on the output side."""
        sums = {weight.key: MomentSum() for group in self.refresh_groups for weight in group.weights}
        for segments, of_group in zip(self.segments, gradients, strict=True):
            for segment, gradient in zip(segments, of_group, strict=True):
                weight = self.managed[segment.name]
                held = weight.held_blocks(*self.cut_of[segment.name])
                total = kernels.gradient_gram(segment, gradient, weight.local_blocks, held, self.settings.backend)
                # Entries of the whole gradient, also where other tensor-parallel ranks have blocks of their own.
                entries = gradient.numel() * (weight.features // (weight.local_blocks * weight.width))
                sums[segment.name] = MomentSum(total, entries, calls=1)
        return sums

    def _column_scales(self, gradients: Sequence[Sequence[Tensor]]) -> list[list[Tensor] | None]:
        """Dobb-l2's, for every param group."""
        if self.settings.norm != "l2":
            return [None] * len(self.segments)
        flat = self.column_norms.scales(
            [segment for segments in self.segments for segment in segments],
            [gradient for of_group in gradients for gradient in of_group],
            momentum=self.settings.momentum,
            nesterov=self.settings.nesterov,
        )
        remaining = iter(flat)
        return [[next(remaining) for _ in segments] for segments in self.segments]

    def _extra_state(self) -> DobbExtraState:
        return DobbExtraState(self)
