"""Diagnostics of a model in shards: each rank looks at what it holds, and the last one joins and writes it.

The last rank is the one that has Megatron's TensorBoard and W&B writers.

What a logged step sends besides the training's own traffic, and no other step does:

1. for every weight whose update's singular values are wanted, a reduction of this rank's tensor-parallel part of the
   update (fp32) to one of its data-parallel ranks, and a gather of such parts over tensor-parallel ranks;
2. one `gather_object` of plain floats over the whole job.

Which weights, and which ranks compute, follows from the step and the names of the weights, so that all ranks agree.
"""

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import flag
from ...methods.dobb.metrics import merge, named
from ...methods.dobb.metrics_recorder import Observer, Sink
from ...methods.dobb.refresh_group import RefreshCounts, RefreshGroup
from ...methods.dobb.settings import DobbConfig
from ...sharding.ownership import Block
from ...sharding.segment import Segment
from .select_weights import DobbWeight

SINK_ATTRIBUTE = "dobb_diagnostics"
"""Attribute of Megatron's `OptimizerConfig`: a function that receives, on the last rank, what the writers do."""

_GLOBALS = "megatron.training.global_vars"


class Diagnosed(Protocol):
    """The attributes of a `DobbDistributedOptimizer` that diagnostics read, Megatron's own among them."""

    config: Any
    model_chunks: Sequence[Any]
    data_parallel_group: dist.ProcessGroup
    tp_group: dist.ProcessGroup
    expert_tp_group: dist.ProcessGroup
    is_expert: bool
    settings: DobbConfig
    attempted_steps: int
    managed: Mapping[str, DobbWeight]
    cut_of: Mapping[str, tuple[int, int]]
    segments: Sequence[Sequence[Segment]]
    refresh_groups: Sequence[RefreshGroup]


class Diagnostics:
    """The log of a rank's whole model, whose dense weights and experts may be in two optimizers.

    Attributes:
        counts: blocks that refreshes left alone or Householder had to finish, of the refresh groups that this rank
            speaks for.
    """

    def __init__(self) -> None:
        self.counts = RefreshCounts()
        self._observers: dict[bool, Observer] = {}  # of the dense weights, and of the experts where they are apart
        self._arrived: set[bool] = set()
        self._said_that_nobody_listens = False

    def observe(self, optimizer: Diagnosed) -> None:
        """Take an optimizer into the log."""
        self._observers[optimizer.is_expert] = Observer(optimizer.settings)

    def refresh(self, group: RefreshGroup, step: int, is_expert: bool) -> contextlib.AbstractContextManager[None]:
        """Around a refresh, at a step with the number `step_number`: see `Observer.refresh`."""

        def bases() -> list[tuple[Sequence[Block], Tensor]]:
            return [(group.owned, group.basis[group.owned_positions])]

        return self._observers[is_expert].refresh(step, bases)

    def after_update(
        self,
        optimizer: Diagnosed,
        gradients: Sequence[Sequence[Tensor]],
        column_scales: Sequence[Sequence[Tensor] | None],
    ) -> None:
        """Look at the update that an optimizer has just made; after the last one of the rank, join and write.

        Collective over all ranks of the job on a logged step.

        Args:
            optimizer: its weights and bases are those of the update.
            gradients: of each segment, as `optimizer.segments` has them.
            column_scales: with `--dobb-norm l2`, those of each segment; None for each param group otherwise.
        """
        step, observer = step_number(optimizer.attempted_steps), self._observers[optimizer.is_expert]
        if not observer.is_due(step):
            return
        if optimizer.settings.source != "none":
            for group in optimizer.refresh_groups:
                observer.add_moments(group.owned, group.moment, group.basis[group.owned_positions])
        updates = {
            segment.name: (segment, of_group[place], scales[place] if scales is not None else None)
            for segments, of_group, scales in zip(optimizer.segments, gradients, column_scales, strict=True)
            for place, segment in enumerate(segments)
        }
        spectra = observer.spectra(optimizer.managed, step)
        for name, weight in sorted(optimizer.managed.items()):
            update = observer.add_update(*updates[name]) if name in updates else None
            if name in spectra:
                whole = _bring_together(optimizer, weight, update, spectra.index(name))
                if whole is not None:
                    observer.add_spectrum(name, whole)
        self._arrived.add(optimizer.is_expert)
        if self._arrived == self._observers.keys():
            self._arrived = set()
            self._join(step, optimizer.config)

    def _join(self, step: int, config: Any) -> None:
        ranks, last = dist.get_world_size(), dist.get_world_size() - 1
        everyone: list[Any] | None = [None] * ranks if dist.get_rank() == last else None
        mine = merge(observer.take() for observer in self._observers.values())
        dist.gather_object((mine, self.counts.skipped, self.counts.fallbacks), everyone, dst=last)
        if everyone is not None:
            weights = merge(sums for sums, _, _ in everyone)
            skipped, fallbacks = (sum(counts) for counts in list(zip(*everyone, strict=True))[1:])
            self._write(step, named(weights, skipped, fallbacks), config)

    def _write(self, step: int, figures: dict[str, float], config: Any) -> None:
        given: Sink | None = getattr(config, SINK_ATTRIBUTE, None)
        sinks = [given] if given is not None else []
        megatron = sys.modules.get(_GLOBALS)
        board = megatron.get_tensorboard_writer() if megatron is not None else None
        if board is not None:
            sinks.append(lambda step, found: [board.add_scalar(name, value, step) for name, value in found.items()])
        wandb = megatron.get_wandb_writer() if megatron is not None else None
        if wandb is not None:
            sinks.append(lambda step, found: wandb.log(found, step))
        for sink in sinks:
            sink(step, figures)
        if not sinks and not self._said_that_nobody_listens:
            self._said_that_nobody_listens = True
            interval = next(iter(self._observers.values())).interval
            print(
                f"dobb: {flag('dobb', 'log_diagnostics_interval')} {interval}, but nothing takes the diagnostics of "
                f"step {step} or of later ones: give --tensorboard-dir (with tensorboard) or --wandb-project, or set "
                f"OptimizerConfig.{SINK_ATTRIBUTE} to a function of step and figures",
                flush=True,
            )


def step_number(attempted_step: int) -> int:
    """The number that Megatron's own log gives to the current step; without Megatron's training, that attempted."""
    arguments = getattr(sys.modules.get(_GLOBALS), "_GLOBAL_ARGS", None)
    iteration = getattr(arguments, "curr_iteration", None)  # of the steps before this one
    return attempted_step if iteration is None else iteration + 1


def _bring_together(optimizer: Diagnosed, weight: DobbWeight, update: Tensor | None, number: int) -> Tensor | None:
    """The whole of an update on one of the ranks that hold parts of it; None on the others.

    Rows and columns may come in another order than the weight's, which its singular values do not know.

    Args:
        optimizer: that of the weight.
        weight: the weight.
        update: of this rank's flat shard, if it has one.
        number: spreads the work over the ranks.
    """
    rows, columns = weight.parameter.shape
    part = torch.zeros(rows * columns, dtype=torch.float32, device=torch.device("cuda", torch.cuda.current_device()))
    if update is not None:
        start, end = optimizer.cut_of[weight.name]
        part[start:end] = update
    shards = optimizer.data_parallel_group
    root = number % shards.size()
    if shards.size() > 1:
        dist.reduce(part, dst=dist.get_global_rank(shards, root), group=shards)
    if shards.rank() != root:
        return None
    part = part.view(rows, columns)
    tensor = optimizer.expert_tp_group if weight.moe is not None else optimizer.tp_group
    is_first = tensor.rank() == 0
    if rows == weight.geometry.rows and columns == weight.geometry.columns:
        return part if is_first else None
    parts = [torch.empty_like(part) for _ in range(tensor.size())] if is_first else None
    dist.gather(part, parts, dst=dist.get_global_rank(tensor, 0), group=tensor)
    return torch.cat(parts, dim=0 if rows < weight.geometry.rows else 1) if parts is not None else None
