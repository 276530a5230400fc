"""Run a refresh as one background job, or in stages whose collectives stay on the program's own thread."""

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ...background.side_stream import Task
from ...errors import CaptureError
from ...methods.dobb.capture import MomentSum
from ...methods.dobb.refresh_group import RefreshCounts, RefreshGroup
from ...methods.dobb.settings import DobbConfig
from .metrics import Diagnostics

Launcher = Literal["worker", "program"]
"""Whose thread makes the collectives of refreshes: see `refreshes`."""

GroupCounts = list[tuple[RefreshGroup, RefreshCounts]]
"""Refreshed groups, and what their refreshes counted."""

ExchangeInputs = list[tuple[RefreshGroup, Tensor]]
"""Groups whose owned blocks are renewed, and the counts that are to be exchanged with the bases."""


def has_one_launch_queue() -> bool:
    """Whether this process asked CUDA to put the launches of all streams into one queue."""
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


def launcher_of(groups: Iterable[RefreshGroup], one_launch_queue: bool) -> Launcher:
    """Choose the thread that makes the collectives of some groups.

    Args:
        groups: of one rank.
        one_launch_queue: whether any rank of the job has one, so that all ranks decide alike.
    """
    on_gpu = any(group.ranks > 1 and group.basis.device.type == "cuda" for group in groups)
    return "program" if on_gpu and one_launch_queue else "worker"


@dataclass
class RefreshJob[T]:
    """A refresh under way.

    Attributes:
        task: what is done beside the program.
        complete: what the program has to do with the task's result, once.
    """

    task: Task[T]
    complete: Callable[[T], GroupCounts]

    def wait(self) -> None:
        """Wait for what is done beside the program: moments and bases of owned blocks are of one time after it."""
        self.task.wait()

    def result(self) -> GroupCounts:
        """Wait, and do what is left to do; collective if that is.

        Raises:
            BaseException: what the task raised, or what is left.
        """
        return self.complete(self.task.result())


@dataclass(frozen=True)
class RefreshStages:
    """The stages of a refresh of the groups of one chunk that are due, group by group.

    Attributes:
        config: the settings.
        diagnostics: what is told of the refreshes.
        is_expert: whose they are, for the diagnostics.
    """

    config: DobbConfig
    diagnostics: Diagnostics
    is_expert: bool

    @torch.no_grad()
    def whole(self, groups: Sequence[RefreshGroup], sums: dict[str, MomentSum], step: int) -> GroupCounts:
        """All stages; see `RefreshGroup.refresh`."""
        refreshed = []
        for group in groups:
            with torch.profiler.record_function("dobb::refresh"), self.diagnostics.refresh(group, step, self.is_expert):
                counts = group.refresh(sums, **self._how())
            refreshed.append((group, counts))
        return refreshed

    def reduce(self, groups: Sequence[RefreshGroup], sums: dict[str, MomentSum]) -> list[Tensor]:
        """Reduce the sums of each group (`RefreshGroup.reduce`); collective."""
        with torch.profiler.record_function("dobb::reduce"):
            return [group.reduce(sums) for group in groups]

    def renew(self, groups: Sequence[RefreshGroup], received: list[Tensor], step: int) -> ExchangeInputs:
        """Renew the owned blocks of each group (`RefreshGroup.renew`).

        Args:
            groups: those of `reduce`.
            received: what that returned; emptied group by group, to save memory.
            step: number of the step, for the diagnostics.
        """
        renewed = []
        received.reverse()
        for group in groups:
            with torch.profiler.record_function("dobb::refresh"), self.diagnostics.refresh(group, step, self.is_expert):
                counts = group.renew(received.pop(), **self._how())
            renewed.append((group, counts))
        return renewed

    def exchange(self, renewed: ExchangeInputs) -> GroupCounts:
        """Exchange the bases (`RefreshGroup.exchange`); collective.

        All groups make the exchange, whatever the counts of some of them say. The counts of all are read at once:
        reading waits for the device.
        """
        if not renewed:
            return []
        exchanged: GroupCounts = []
        error: CaptureError | None = None
        with torch.profiler.record_function("dobb::exchange"):
            sent = []
            for group, counts in renewed:
                if counts.is_cuda:  # made on the stream of the worker
                    counts.record_stream(torch.cuda.current_stream())
                sent.append(group.send_to_holders(counts))
            rows = iter(torch.cat(sent).tolist())
            for group, _ in renewed:
                try:
                    exchanged.append((group, group.read_counts(list(itertools.islice(rows, group.ranks)))))
                except CaptureError as raised:
                    error = error or raised
        if error is not None:
            raise error
        return exchanged

    def _how(self) -> dict[str, Any]:
        return {
            "beta": self.config.moment_beta,
            "method": self.config.qr,
            "iterations": self.config.iterations,
            "backend": self.config.backend,
        }
