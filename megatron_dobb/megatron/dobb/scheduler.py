"""Schedule refreshes: start each chunk's after its last captured micro-batch, and wait for it in the optimizer's call.

With `overlap_refresh`, the refresh of a model chunk starts at the end of its last captured micro-batch's forward
pass. A thread (on a GPU with a stream of its own) then reduces the moments, refreshes the bases and exchanges them,
while the program goes on with the backward pass; the call of the optimizer only waits for it. All collectives of a
rank are made by that one thread, chunk after chunk as their captures end. The ranks of a moment's process group are
ranks of one pipeline stage, which run the same schedule: they make the same collectives in the same order.

Where all streams of a GPU launch through one queue, that would not do. What depends on a collective holds up there
whatever is launched after it, on other streams too. A rank whose thread launches the reduction before Megatron's next
collective and one that launches them the other way round would wait for each other. So the program's own thread makes
all collectives then, at places that its schedule fixes: it launches the reduction (on the other stream, and goes on)
where the refresh starts, and the exchange in the optimizer's call, once the worker's thread, which now only computes,
is done. This cannot block:

1. A rank's collectives, Megatron's and these, are launched by one thread at fixed places of one schedule, which all
   ranks of a stage have in common. So there is one order of all collectives of the job that every rank keeps to: that
   in which they end when all ranks of all groups take each step of the schedule together.
2. Let C be the first in that order that does not end. Whatever is ahead of it in the queue of one of its ranks is a
   kernel or waits for a collective that the rank launched before C: the program's work is launched by the same thread,
   and the worker's needs nothing but kernels and what the program had launched before them. Those collectives have all
   ended, so C is launched on each of its ranks, and ends.

Without `overlap_refresh`, the same calls are made in the optimizer's call, one chunk after another.
"""

import functools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ...background.side_stream import Task, Worker
from ...methods.dobb import schedule
from ...methods.dobb.capture import Capture, MomentSum, scale_sums
from ...methods.dobb.refresh_group import HeldWeight, RefreshCounts, RefreshGroup, share_out
from ...methods.dobb.settings import DTYPES, DobbConfig
from ...numerics.precision import products_are_exact
from ..console import say
from .metrics import Diagnostics, step_number
from .process_groups import Ranks
from .refresh_log import log_refresh
from .stages import GroupCounts, Launcher, RefreshJob, RefreshStages

_CALCULATOR = "_GLOBAL_NUM_MICROBATCHES_CALCULATOR"

Members = dict[tuple[Ranks, int], dict[tuple[int, int], list[HeldWeight]]]
"""Weights by the ranks of their moments and their phase, and of these by model chunk and negative width."""


@dataclass
class ChunkRefresh:
    """The refreshes of one model chunk.

    Attributes:
        capture: where its moments come from.
        groups: its refresh groups, in the order in which they are refreshed, each with its phase.
        job: the refresh of the current step, once it has begun.
    """

    capture: Capture
    groups: Sequence[tuple[RefreshGroup, int]]
    job: RefreshJob[Any] | None = None


@dataclass
class Refreshes:
    """The refreshes of an optimizer.

    Attributes:
        config: the settings.
        chunks: for each model chunk.
        diagnostics: what is told of the refreshes.
        is_expert: whose they are, for the diagnostics.
        worker: does them beside the program; None if nothing overlaps.
        launcher: whose thread makes their collectives, with a worker.
        gradient_factor: what captured gradients are multiplied with.
        counts: blocks that refreshes left alone or Householder had to finish, since the start.
        step: attempted steps before the current one.
        asked: whether the current step refreshes all weights, whatever the schedule says.
        announced: whether the program itself began the current step, by `zero_grad`. A forward call before that may be
            no part of a step, so nothing starts with it: `zero_grad` forgets it.
    """

    config: DobbConfig
    chunks: Sequence[ChunkRefresh]
    diagnostics: Diagnostics
    is_expert: bool
    worker: Worker | None
    launcher: Launcher = "worker"
    gradient_factor: float = 1.0
    counts: RefreshCounts = field(default_factory=RefreshCounts)
    step: int = 0
    asked: bool = False
    announced: bool = False

    def __post_init__(self) -> None:
        self._stages = RefreshStages(self.config, self.diagnostics, self.is_expert)
        # The hooks of the model must neither keep the optimizer alive nor go on capturing after it is gone. Nor must
        # this keep the model alive, which may know the optimizer: Megatron's configuration does.
        weakref.finalize(self, _remove, [weakref.ref(chunk.capture) for chunk in self.chunks]).atexit = False
        # What is captured of gradients is complete only after the backward pass.
        if self.worker is not None and self.config.source == "activation":
            for number, chunk in enumerate(self.chunks):
                if chunk.groups:
                    chunk.capture.on_complete = functools.partial(_complete, weakref.ref(self), number)
                    chunk.capture.microbatches = microbatches_of_a_step

    def begin(self, step: int, asked: bool, announced: bool = True) -> None:
        """Arm the captures of the step after `step` attempted ones.

        Called again for the same step, when Megatron runs its forward and backward passes again, it lets a refresh
        stand that has begun: it was made of the same activations.
        """
        self.step, self.asked, self.announced = step, asked, announced
        for chunk in self.chunks:
            due = self._due(chunk) if chunk.job is None and self.config.captures else []
            chunk.capture.begin(armed=bool(due), keys={weight.key for group in due for weight in group.weights})

    def finish(self) -> None:
        """Have all refreshes of the current step done, for whatever was captured.

        Raises:
            CaptureError: see `RefreshGroup.exchange`. Other refreshes of the step are done.
        """
        for chunk in self.chunks:
            if chunk.job is None and self._due(chunk):
                self._start(chunk)
        counts: GroupCounts = []
        error: BaseException | None = None
        for chunk in self.chunks:
            if chunk.job is not None:
                job, chunk.job = chunk.job, None
                try:
                    counts += job.result()
                except Exception as raised:
                    error = error or raised
        if error is not None:
            raise error
        self._report(counts, self.step + 1)

    def wait(self) -> None:
        """Wait until the owners' moments and bases are of one time, whatever has begun. `finish` is still to come."""
        for chunk in self.chunks:
            if chunk.job is not None:
                chunk.job.wait()

    def forget(self) -> None:
        """Wait for refreshes that have begun and make nothing of them: other moments and bases are about to come."""
        self.wait()
        for chunk in self.chunks:
            chunk.job = None

    def of_gradients(self, sums: dict[str, MomentSum], step: int) -> None:
        """Refresh everything from the given sums at once."""
        number = step_number(step)
        self._report(
            [counts for chunk in self.chunks for counts in self._stages.whole(self._due(chunk), sums, number)], step
        )
        self.asked = False  # until the next step begins, which nobody may announce

    def _due(self, chunk: ChunkRefresh) -> list[RefreshGroup]:
        if self.config.source == "none":
            return []
        interval = self.config.refresh_interval
        return [g for g, phase in chunk.groups if self.asked or schedule.is_due(self.step, phase, interval)]

    def _complete(self, chunk: ChunkRefresh) -> None:
        """Start now what is captured, unless the refresh would have to switch the precision of the backward pass."""
        if not self.announced:
            _say_once(
                "dobb: a forward pass in training mode came before the optimizer's zero_grad: its moments are used if "
                "none follows, but nothing starts with them beside the backward pass"
            )
        elif products_are_exact():
            if self.launcher == "program":
                _say_once(
                    "dobb: bases are computed beside the backward pass, but exchanged in the optimizer's call: with "
                    "CUDA_DEVICE_MAX_CONNECTIONS=1 all streams launch through one queue, where collectives that a "
                    "thread of Dobb's launches and Megatron's could wait for each other"
                )
            self._start(chunk)
        else:
            _say_once(
                "dobb: refreshes do not overlap with the backward pass: they need fp32 products, and this process "
                "allows TF32 or bf16 in their place (torch.set_float32_matmul_precision('highest') overlaps them)"
            )

    def _start(self, chunk: ChunkRefresh) -> None:
        due, sums, step = self._due(chunk), chunk.capture.take(), step_number(self.step + 1)
        if self.gradient_factor != 1.0:
            scale_sums(sums.values(), self.gradient_factor)
        totals = (entry.total for entry in sums.values() if entry.total is not None)  # a list would keep them alive
        stages, worker = self._stages, self.worker
        if worker is None:
            task = Task(functools.partial(stages.whole, due, sums, step))
            task.run()
            chunk.job = RefreshJob(task, _unchanged)
        elif self.launcher == "worker":
            task = worker.submit(functools.partial(stages.whole, due, sums, step), totals)
            chunk.job = RefreshJob(task, _unchanged)
        else:
            received = worker.launch(functools.partial(stages.reduce, due, sums), totals)
            renewed = worker.submit(functools.partial(stages.renew, due, received, step))
            chunk.job = RefreshJob(renewed, stages.exchange)

    def _report(self, refreshed: GroupCounts, step: int) -> None:
        to_report = RefreshCounts()
        for group, counts in refreshed:
            self.counts.add(counts)
            if group.rank == 0:  # it speaks for the group, of which the job's first rank need not be a member
                to_report.add(counts)
        self.diagnostics.counts.add(to_report)
        log_refresh(step, to_report, self.counts)


def make_groups(
    members: Members,
    chunks: int,
    process_groups: Mapping[Ranks, dist.ProcessGroup | None],
    config: DobbConfig,
    device: torch.device,
) -> list[list[tuple[RefreshGroup, int]]]:
    """The refresh groups of each model chunk with their phases, in the order in which they are refreshed.

    Collective over every process group of moments. What is refreshed on one step is shared out at once, so that each
    step's work is balanced.

    Args:
        members: the weights of each group.
        chunks: number of model chunks.
        process_groups: of the ranks in `members`.
        config: the settings.
        device: where moments and bases live.
    """
    made: list[list[tuple[RefreshGroup, int]]] = [[] for _ in range(chunks)]
    for (ranks, phase), weights in sorted(members.items()):
        for (chunk, width), ownership in share_out(weights, process_groups[ranks]).items():
            group = RefreshGroup(
                weights[chunk, width],
                process_groups[ranks],
                ownership,
                moment_dtype=DTYPES[config.moment_dtype],
                basis_dtype=DTYPES[config.basis_dtype],
                device=device,
                transport_dtype=DTYPES[config.moment_transport],
            )
            made[chunk].append((group, phase))
    return made


def microbatches_of_a_step() -> int | None:
    """How many micro-batches Megatron gives each rank in the current step; None outside of its training."""
    from megatron.core import num_microbatches_calculator as calculator

    made = getattr(calculator, _CALCULATOR, None)
    return int(made.get()) if made is not None else None


def _complete(refreshes: "weakref.ref[Refreshes]", number: int) -> None:
    if (alive := refreshes()) is not None:
        alive._complete(alive.chunks[number])


def _unchanged(counts: GroupCounts) -> GroupCounts:
    return counts


def _remove(captures: "Sequence[weakref.ref[Capture]]") -> None:
    for capture in captures:
        if (alive := capture()) is not None:
            alive.remove()


@functools.cache
def _say_once(text: str) -> None:
    say(text)
