"""Megatron's distributed optimizer with Dobb for the managed matrices and its own AdamW for everything else."""

import contextlib
import functools
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import ConfigError
from ...methods.dobb import kernels
from ...methods.dobb.block_ownership import work
from ...methods.dobb.capture import Capture, MomentSum
from ...methods.dobb.refresh_group import HeldWeight, RefreshCounts
from ...methods.dobb.schedule import is_due, phases
from ...methods.dobb.settings import DobbConfig
from ...numerics.finite import check_finite
from ...sharding.segment import Segment
from ..checkpoint.save_load import MOMENTUM, ResumableOptimizer, is_dobb
from ..console import log_whole_model
from ..model.select_weights import ChunkPlan, ManagedWeight
from .column_norms import ColumnNorms
from .metrics import Diagnostics
from .process_groups import MomentGroups
from .scheduler import ChunkRefresh, Members, Refreshes, make_groups, worker_of
from .stages import has_one_launch_queue, launcher_of

GROUPS_ATTRIBUTE, KINDS_ATTRIBUTE = "dobb_moment_groups", "dobb_kinds_on_adamw"
PHASES_ATTRIBUTE, ONE_QUEUE_ATTRIBUTE = "dobb_refresh_phases", "dobb_one_launch_queue"


class DobbDistributedOptimizer(ResumableOptimizer):
    """ZeRO-1 with Dobb.

    The param groups whose `optimizer` is `dobb` are updated here, shard by shard and without communication; the
    other groups go through Megatron's inner AdamW. On a refresh step the moments are reduced and the bases renewed
    before the gradients are looked at, so that a step that Megatron skips drops only the update.

    Every model chunk must have the `dobb_plan` that the patched DDP leaves there, which holds the `DobbConfig` too.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        config: Any,
        grad_scaler: Any,
        init_state_fn: Any,
        model_chunks: Sequence[Any],
        **kwargs: Any,
    ) -> None:
        self.dobb: DobbConfig = model_chunks[0].dobb_plan.settings
        self.attempted_steps = 0
        self.refresh_is_asked = False
        self.captures = []
        self.refreshes = Refreshes(self.dobb, [], Diagnostics(), is_expert=False, worker=None)
        self._pending: kernels.Pending = []
        self.refresh_groups = []
        self.segments = []
        self.shards = []
        self.managed = {}
        self.cut_of: dict[str, tuple[int, int]] = {}
        plans: list[ChunkPlan] = [chunk.dobb_plan for chunk in model_chunks]
        groups = optimizer.param_groups if optimizer is not None else []
        self.is_expert = any(group["is_expert_parallel"] for group in groups)
        mine = {id(p) for group in groups if is_dobb(group) for p in group["params"]}
        plans_of_mine = [[w for w in plan.managed if id(w.parameter) in mine] for plan in plans]
        moment_groups = self._moment_groups(model_chunks[0], plans)
        self.kinds_on_adamw = getattr(model_chunks[0], KINDS_ATTRIBUTE)
        self._phases: dict[str, int] = getattr(model_chunks[0], PHASES_ATTRIBUTE)
        super().__init__(optimizer, config, grad_scaler, init_state_fn, model_chunks, **kwargs)
        if self.is_stub_optimizer:
            return
        self._build(plans, plans_of_mine, moment_groups)

    # Start.

    def _moment_groups(self, chunk: Any, plans: Sequence[ChunkPlan]) -> MomentGroups:
        """The process groups of all moments of this rank; what is collective at the start happens here, once.

        Every rank builds the optimizer of the dense weights, and builds it first; another one, for experts, finds the
        groups there. So nothing depends on which ranks have experts.
        """
        if getattr(chunk, GROUPS_ATTRIBUTE, None) is None:
            kinds, work_of, one_queue = self._check_whole_model(chunk, plans)
            setattr(chunk, KINDS_ATTRIBUTE, kinds)
            setattr(chunk, ONE_QUEUE_ATTRIBUTE, one_queue)
            setattr(chunk, PHASES_ATTRIBUTE, phases(work_of, self.dobb.refresh_interval) if self.dobb.stagger else {})
            setattr(chunk, GROUPS_ATTRIBUTE, MomentGroups.create(chunk, plans, self.dobb))
        return getattr(chunk, GROUPS_ATTRIBUTE)

    def _check_whole_model(self, chunk: Any, plans: Sequence[ChunkPlan]) -> tuple[set[str], dict[str, int], bool]:
        """Check, over all ranks, that Dobb has something to do and that every name pattern names something.

        Returns:
            See `ChunkPlan.kinds_on_adamw`: of the whole model; the work of refreshing each of its weights; and whether
            any rank launches through one queue.
        """
        weights = {weight.name: weight for plan in plans for weight in plan.managed}.values()
        patterns = set().union(*(plan.patterns_used for plan in plans))
        stage, expert_rank = chunk.pp_group.rank(), chunk.ep_group.rank()
        # Ranks with the same key hold parts or copies of the same weights.
        mine = {
            (stage,): _size([weight for weight in weights if not weight.is_expert_parallel]),
            (stage, expert_rank): _size([weight for weight in weights if weight.is_expert_parallel]),
        }
        everyone: list[Any] = [None] * dist.get_world_size()
        kinds = set().union(*(plan.kinds_on_adamw() for plan in plans))
        work_of = {weight.name: weight.features // weight.width * work(weight.width) for weight in weights}
        known = (patterns, mine, kinds, work_of if self.dobb.stagger else {}, has_one_launch_queue())
        dist.all_gather_object(everyone, known)
        self.dobb.check_patterns_used(set().union(*(used for used, *_ in everyone)))
        sizes = {key: size for _, theirs, *_ in everyone for key, size in theirs.items()}.values()
        matrices = sum(count for count, _ in sizes)
        if matrices:
            log_whole_model(matrices, sum(elements for _, elements in sizes))
        else:
            reasons: Counter[str] = Counter()
            for plan in plans:
                reasons.update({r: n for (r, kind), n in plan.adamw.items() if kind == "parameters"})
            raise ConfigError(
                "--optimizer dobb manages no matrix of this model: "
                + "; ".join(f"{n} parameters: {reason}" for reason, n in reasons.items())
                + ". Use --optimizer adam, or fewer --dobb-exclude patterns"
            )
        _, _, kinds_of_all, work_of_all, one_queue = zip(*everyone, strict=True)
        return set().union(*kinds_of_all), functools.reduce(operator.or_, work_of_all), any(one_queue)

    def _build(
        self,
        plans: Sequence[ChunkPlan],
        mine: Sequence[Sequence[ManagedWeight]],
        moment_groups: MomentGroups,
    ) -> None:
        self.cut_of = cut_of = self._cuts_of_managed({id(w.parameter): w for weights in mine for w in weights})
        unique = {weight.name: weight for weights in mine for weight in weights}
        self.managed, self.moment_ranks = unique, moment_groups.ranks_of
        device = torch.device("cuda", torch.cuda.current_device())
        held: dict[str, tuple[int, ...]] = {}
        members: Members = {}
        for number, weights in enumerate(mine):
            for weight in weights:
                name, width = weight.name, weight.width
                # One that several chunks share belongs to the last of them.
                if unique[name] is weight:
                    held[name] = weight.held_blocks(*cut_of[name]) if name in cut_of else ()
                    if self.dobb.source == "none":
                        continue  # there is nothing to refresh
                    place = moment_groups.ranks_of[name], self._phases.get(name, 0)
                    members.setdefault(place, {}).setdefault((number, -width), []).append(
                        HeldWeight(name, weight.local_blocks, width, held[name], may_be_idle=weight.moe is not None)
                    )
        groups_of_chunk = make_groups(members, len(mine), moment_groups.groups, self.dobb, device)
        self.refresh_groups = [group for groups in groups_of_chunk for group, _ in groups]
        basis_of = {
            weight.key: group.basis_of(weight.key)
            for group in self.refresh_groups
            for weight in group.weights
            if weight.held
        }
        self._build_segments(unique, cut_of, basis_of)
        self.diagnostics = Diagnostics.of(self)
        if self.dobb.norm == "l2":
            self.column_norms = ColumnNorms(unique, moment_groups.columns_of, moment_groups.groups, held, device)
        for plan, weights in zip(plans, mine, strict=True):
            self.captures.append(
                Capture(
                    plan.root,
                    [weight.source() for weight in weights] if self.dobb.captures else [],
                    self.dobb.capture_sequences,
                    rank=self.model_chunks[0].dp_group.rank(),
                    ranks=self.model_chunks[0].dp_group.size(),
                    default_to_first=self.dobb.capture == "first",
                    backend=self.dobb.backend,
                )
            )
        overlaps = self.dobb.overlap_refresh and self.refresh_groups
        self.refreshes = Refreshes(
            self.dobb,
            [ChunkRefresh(*pair) for pair in zip(self.captures, groups_of_chunk, strict=True)],
            self.diagnostics,
            self.is_expert,
            worker_of(self.model_chunks[0], self.refresh_groups[0].basis.device) if overlaps else None,
            launcher_of(self.refresh_groups, getattr(self.model_chunks[0], ONE_QUEUE_ATTRIBUTE)),
            self._gradient_factor(),
        )
        self._begin_step()

    def _managed_pairs(self) -> Iterator[tuple[int, torch.nn.Parameter, torch.nn.Parameter]]:
        """Param group index, model parameter and this rank's fp32 shard of every parameter on Dobb."""
        for index, group in enumerate(self.optimizer.param_groups):
            if not is_dobb(group):
                continue
            yield from (
                (index, model, shard)
                for model, shard in zip(
                    [*self.model_float16_groups[index], *self.model_fp32_groups[index]],
                    [*self.shard_fp32_from_float16_groups[index], *self.shard_fp32_groups[index]],
                    strict=True,
                )
            )

    def _cuts_of_managed(self, managed: dict[int, ManagedWeight]) -> dict[str, tuple[int, int]]:
        """The flat range of every weight that this rank's shard holds."""
        cuts = {}
        for _, model, _ in self._managed_pairs():
            cut = self._get_model_param_range_map(model)["param"]
            cuts[managed[id(model)].name] = cut.start, cut.end
        return cuts

    def _build_segments(
        self, managed: dict[str, ManagedWeight], cut_of: dict[str, tuple[int, int]], basis_of: dict[str, Tensor]
    ) -> None:
        name_of = {id(weight.parameter): name for name, weight in managed.items()}
        self.segments = [[] for _ in self.optimizer.param_groups]
        self.shards = [[] for _ in self.optimizer.param_groups]
        for index, model, shard in self._managed_pairs():
            name = name_of[id(model)]
            momentum = torch.zeros_like(shard, dtype=torch.float32)
            self.optimizer.state[shard][MOMENTUM] = momentum
            weight = managed[name]
            self.segments[index].append(
                Segment(
                    name,
                    weight.shard(*cut_of[name]),
                    weight.geometry.rows,
                    weight.geometry.columns,
                    shard,  # not its tensor of now, which would stay in memory when a program moves it away
                    momentum,
                    basis_of[name] if self.dobb.source != "none" else None,
                    weight.output_side,
                )
            )
            self.shards[index].append(shard)

    # Steps.

    def _begin_step(self, announced: bool = False) -> None:
        self.refreshes.begin(self.attempted_steps, self.refresh_is_asked, announced)

    @property
    def refresh_counts(self) -> RefreshCounts:
        """Blocks of this rank's refresh groups that refreshes left alone or Householder had to finish."""
        return self.refreshes.counts

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Megatron's zero_grad; also starts the captures of the coming step (again, when Megatron reruns one)."""
        super().zero_grad(set_to_none)
        self._begin_step(announced=True)

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Refresh the bases if this step is due, whatever becomes of its gradients, then Megatron's own work."""
        if not self.is_stub_optimizer:
            if self.dobb.captures:
                self.refreshes.finish()
                self.refresh_is_asked = False
            elif self.dobb.source == "gram" and is_due(self.attempted_steps, 0, self.dobb.refresh_interval):
                # Moments of the gradient wait until Megatron has judged it; a skipped step leaves its refresh due.
                self.refresh_is_asked = True
            self.attempted_steps += 1
            self._begin_step()
        return super().prepare_grads()

    def _gradient_factor(self) -> float:
        """What captured gradients are multiplied with.

        They are those of a rank's mean loss. The mean over the ranks, of which Megatron makes the gradients of the
        weights, knows no number of ranks.
        """
        if self.dobb.source != "output-gradient" or self.model_chunks[0].config.calculate_per_token_loss:
            return 1.0
        return 1 / self.model_chunks[0].dp_cp_group.size()

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Update the weights on Dobb, then let Megatron step the others and gather the parameters.

        Raises:
            NonFiniteError: if a gradient of a weight on Dobb is not finite; no weight of this rank was changed.
        """
        if self.is_stub_optimizer:
            return super().step_with_ready_grads()
        self._follow_moved_state()
        gradients = [[_gradient(shard) for shard in shards] for shards in self.shards]
        kernels.check(self._pending)
        self._pending = []
        check_finite(
            [s.name for segments in self.segments for s in segments],
            [g for group in gradients for g in group],
        )
        if self.refresh_is_asked and self.dobb.source == "gram":
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
                momentum=self.dobb.momentum,
                nesterov=self.dobb.nesterov,
                update_scale=self.dobb.update_scale,
                precision=self.dobb.precision,
                backend=self.dobb.backend,
                column_scales=group_scales,
            )
        self.diagnostics.after_update(self, gradients, scales)
        with self._only_adamw_groups():
            return super().step_with_ready_grads()

    def offload_to_cpu(self) -> None:
        """See Megatron's; frees the momenta on Dobb as well."""
        super().offload_to_cpu()
        self._follow_moved_state()

    def restore_from_cpu(self) -> None:
        """See Megatron's."""
        super().restore_from_cpu()
        self._follow_moved_state()

    def _follow_moved_state(self) -> None:
        """Update the momenta that Megatron has now.

        Programs that take the optimizer's state off the GPU between phases (verl does) give the shards other storage,
        which the segments follow by themselves, and the inner optimizer other tensors. What the segments were built on
        would be updated and never be read.
        """
        for segments, shards in zip(self.segments, self.shards, strict=True):
            for segment, shard in zip(segments, shards, strict=True):
                segment.momentum = self.optimizer.state[shard][MOMENTUM]

    def _grams(self, gradients: Sequence[Sequence[Tensor]]) -> dict[str, MomentSum]:
        """What this rank's part of the gradient adds to `G^T G` of every weight, or to `G G^T` on the output side."""
        sums = {weight.key: MomentSum() for group in self.refresh_groups for weight in group.weights}
        for segments, of_group in zip(self.segments, gradients, strict=True):
            for segment, gradient in zip(segments, of_group, strict=True):
                weight = self.managed[segment.name]
                held = weight.held_blocks(*self.cut_of[segment.name])
                total = kernels.gradient_gram(segment, gradient, weight.local_blocks, held, self.dobb.backend)
                # Entries of the whole gradient, also where other tensor-parallel ranks have blocks of their own.
                entries = gradient.numel() * (weight.features // (weight.local_blocks * weight.width))
                sums[segment.name] = MomentSum(total, entries, calls=1)
        return sums

    def _column_scales(self, gradients: Sequence[Sequence[Tensor]]) -> list[list[Tensor] | None]:
        """Dobb-l2's, for every param group."""
        if self.dobb.norm != "l2":
            return [None] * len(self.segments)
        flat = self.column_norms.scales(
            [segment for segments in self.segments for segment in segments],
            [gradient for of_group in gradients for gradient in of_group],
            momentum=self.dobb.momentum,
            nesterov=self.dobb.nesterov,
        )
        remaining = iter(flat)
        return [[next(remaining) for _ in segments] for segments in self.segments]

    @contextlib.contextmanager
    def _only_adamw_groups(self) -> Iterator[None]:
        groups = self.optimizer.param_groups
        self.optimizer.param_groups = [group for group in groups if not is_dobb(group)]
        try:
            yield
        finally:
            self.optimizer.param_groups = groups


def _size(weights: Sequence[ManagedWeight]) -> tuple[int, int]:
    """Number of weights, and of their elements in the whole model."""
    return len(weights), sum(weight.geometry.rows * weight.geometry.columns for weight in weights)


def _gradient(shard: torch.nn.Parameter) -> Tensor:
    assert shard.grad is not None
    return shard.grad
