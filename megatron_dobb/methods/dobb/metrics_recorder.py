"""Collect the metrics of one log while an optimizer steps, and nothing on steps that are not logged."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ...sharding.ownership import Block
from ...sharding.segment import Segment
from . import metrics
from .metrics import Sums
from .settings import DobbConfig

BlocksOf = Callable[[], Iterable[tuple[Sequence[Block], Tensor]]]
"""Function that returns blocks and copies of their bases `[k, b, b]`, in the same order every time."""

Sink = Callable[[int, dict[str, float]], object]
"""Function that receives the number of a step, from 1, and the metrics of its log."""


class Observer:
    """Collect this process's part of the next log. It changes nothing, and keeps tensors only during a call.

    Args:
        config: the settings; with `log_diagnostics_interval` 0 there is no log.
        active: whether there is a log here.
    """

    def __init__(self, config: DobbConfig, active: bool = True) -> None:
        self.config = config
        self.interval = config.log_diagnostics_interval if active else 0
        self._step: dict[str, Sums] = {}
        self._last_refresh: dict[str, Sums] = {}

    def is_due(self, step: int) -> bool:
        """Return whether `step`, counted from 1, is logged."""
        return self.interval > 0 and step % self.interval == 0

    def spectra(self, names: Iterable[str], step: int) -> list[str]:
        """Choose the weights whose singular values a logged step computes, in the order of their names."""
        chosen = sorted(name for name in names if self.config.diagnosed(name))
        if self.config.log_diagnostics_weights:
            return chosen
        return sorted(metrics.in_turn(chosen, step // self.interval))

    @contextlib.contextmanager
    def refresh(self, step: int, bases: BlocksOf) -> Iterator[None]:
        """Compare the bases before and after what is done within, if a log comes before their next refresh."""
        wanted = self.interval > 0 and -step % self.interval < self.config.refresh_interval
        before = list(bases()) if wanted else []
        yield
        found: dict[str, Sums] = {}
        for (blocks, old), (_, new) in zip(before, bases() if wanted else (), strict=True):
            for name, places in self._weights_among(blocks):
                self._add(found, name, metrics.sums_of_rotation(old[places], new[places]))
        self._last_refresh.update(found)

    def add_moments(self, blocks: Sequence[Block], moment: Tensor, basis: Tensor) -> None:
        """Record the moments and bases `[k, b, b]` of some blocks."""
        for name, places in self._weights_among(blocks):
            self._add(self._step, name, metrics.sums_of_moment(moment[places], basis[places]))

    def add_update(self, segment: Segment, gradient: Tensor, column_scales: Tensor | None) -> Tensor | None:
        """Record a segment's latest update.

        Returns:
            Its direction, see `metrics.update_direction`; None if the weight is not to be logged.
        """
        if not self.config.diagnosed(segment.name):
            return None
        update = metrics.update_direction(
            segment,
            gradient,
            momentum=self.config.momentum,
            nesterov=self.config.nesterov,
            column_scales=column_scales,
        )
        self._add(self._step, segment.name, metrics.sums_of_step(segment, update, self.config.update_scale))
        return update

    def add_spectrum(self, name: str, update: Tensor) -> None:
        """Record the direction of a whole update, `[m, n]`."""
        self._add(self._step, name, metrics.sums_of_spectrum(update))

    def take(self) -> dict[str, Sums]:
        """Return the sums of this log. Those of the last refresh stay until the next one."""
        step, self._step = self._step, {}
        return metrics.merge((step, self._last_refresh))

    def _weights_among(self, blocks: Sequence[Block]) -> list[tuple[str, Tensor]]:
        places: dict[str, list[int]] = {}
        for place, (name, _) in enumerate(blocks):
            if self.config.diagnosed(name):
                places.setdefault(name, []).append(place)
        return [(name, torch.tensor(numbers)) for name, numbers in places.items()]

    def _add(self, to: dict[str, Sums], name: str, sums: Sums) -> None:
        to.setdefault(name, Sums()).add(sums)
