"""Momenta in `dp_reshardable` state, which is flat and names no parameter: found by the masters beside them.

A master rounded to the weight's type is the weight, and both are in the checkpoint. So where the flat masters hold a
weight's values, the flat momenta hold its momentum.
"""

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .index import Index

_PARAM, _MOMENTUM = ".param", ".exp_avg"
_OF_BUCKETS = "distributed.dp_group_idx_"
_SAMPLE = 16  # first values of a parameter, which are compared before all of them are


def _rows(weight: Tensor, parts: int) -> list[Tensor]:
    return list(weight.chunk(parts)) if len(weight) % parts == 0 else []


def _columns(weight: Tensor, parts: int) -> list[Tensor]:
    return list(weight.chunk(parts, 1)) if weight.shape[1] % parts == 0 else []


def _gated(weight: Tensor, parts: int) -> list[Tensor]:
    """Each rank has rows of both halves."""
    if len(weight) % (2 * parts):
        return []
    return [torch.cat(both) for both in zip(*(half.chunk(parts) for half in weight.chunk(2)), strict=True)]


def _join_gated(parts: Sequence[Tensor]) -> Tensor:
    halves = [part.chunk(2) for part in parts]
    return torch.cat([half[0] for half in halves] + [half[1] for half in halves])


_PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
"""Tensor-parallel sizes that are tried."""

_WAYS: tuple[tuple[Callable[[Tensor, int], list[Tensor]], Callable[[Sequence[Tensor]], Tensor]], ...] = (
    (_rows, lambda parts: torch.cat(list(parts))),
    (_columns, lambda parts: torch.cat(list(parts), 1)),
    (_gated, _join_gated),
)
"""Pairs of functions: tensor parallelism's split of a weight, and the join of its parts."""


class Buckets:
    """The flat masters and momenta of a checkpoint. Nothing is read before the first question."""

    def __init__(self, index: Index) -> None:
        self.index = index

    def momentum(self, weight: Tensor) -> Tensor | None:
        """The momentum `[m, n]` of a weight in fp32, made of its tensor-parallel parts; None if one is not found."""
        for parts in _PARTS:
            for split, join in _WAYS:
                pieces = split(weight, parts)
                if len(pieces) != parts:
                    continue
                found: list[Tensor] = []
                for piece in pieces:
                    momentum = self._of_part(piece)
                    if momentum is None:
                        break
                    found.append(momentum)
                if len(found) == parts:
                    return join(found)
        return None

    def _of_part(self, part: Tensor) -> Tensor | None:
        """The momentum of what one rank has of a weight; None if no place holds it, or several with other momenta."""
        flat = part.reshape(-1)
        places, samples = self._starts
        sample = torch.full((_SAMPLE,), math.nan, dtype=flat.dtype)
        sample[: flat.numel()] = flat[:_SAMPLE]
        agree = (samples.to(flat.dtype) == sample) | sample.isnan()
        likely = [places[number] for number in agree.all(1).nonzero().flatten().tolist()]
        momentum = None
        for key, start in likely:
            momenta = key.removesuffix(_PARAM) + _MOMENTUM
            if not self._holds(key, start, flat) or not self.index.is_tensor(momenta):
                continue
            found = self.index.part(momenta, [start], [flat.numel()]).float()
            if momentum is not None and not torch.equal(found, momentum):
                return None
            momentum = found
        return None if momentum is None else momentum.reshape(part.shape)

    def _holds(self, key: str, start: int, flat: Tensor) -> bool:
        if start + flat.numel() > self.index.shape(key)[0]:
            return False
        return torch.equal(self.index.part(key, [start], [flat.numel()]).to(flat.dtype), flat)

    @functools.cached_property
    def _starts(self) -> tuple[list[tuple[str, int]], Tensor]:
        """Starts of parameters, or of what a rank owns of them, and the first values there: `[places, _SAMPLE]`."""
        places, samples = [], []
        for key in self.index.entries:
            if _OF_BUCKETS in key and key.endswith(_PARAM) and self.index.is_tensor(key):
                for chunk in self.index.chunks(key):
                    start = chunk.offsets[0]
                    sample = torch.full((_SAMPLE,), math.nan)
                    count = min(_SAMPLE, self.index.shape(key)[0] - start)
                    sample[:count] = self.index.part(key, [start], [count])
                    places.append((key, start))
                    samples.append(sample)
        return places, torch.stack(samples) if samples else torch.empty(0, _SAMPLE)
