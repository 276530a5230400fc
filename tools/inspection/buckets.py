"""Momenta in `dp_reshardable` state, which is flat and names no parameter: found by the masters beside them.

A master rounded to the weight's type is the weight, and both are in the checkpoint. So where the flat masters hold a
weight's values, the flat momenta hold its momentum.
"""

import functools
import math

import torch
from torch import Tensor

from .index import Index

_PARAM, _MOMENTUM = ".param", ".exp_avg"
_OF_BUCKETS = "distributed.dp_group_idx_"
_SAMPLE = 16  # first values of a parameter, which are compared before all of them are


class Buckets:
    """The flat masters and momenta of a checkpoint. Nothing is read before the first question."""

    def __init__(self, index: Index) -> None:
        self.index = index

    def momentum(self, weight: Tensor) -> Tensor | None:
        """The momentum `[m, n]` of a weight in fp32; None if not exactly one place has it as a whole."""
        flat = weight.reshape(-1)
        places, samples = self._starts
        sample = torch.full((_SAMPLE,), math.nan, dtype=flat.dtype)
        sample[: flat.numel()] = flat[:_SAMPLE]
        agree = (samples.to(flat.dtype) == sample) | sample.isnan()
        likely = [places[number] for number in agree.all(1).nonzero().flatten().tolist()]
        found = [(key, start) for key, start in likely if self._holds(key, start, flat)]
        if len(found) != 1:
            return None
        [(key, start)] = found
        momenta = key.removesuffix(_PARAM) + _MOMENTUM
        if not self.index.is_tensor(momenta):
            return None
        return self.index.part(momenta, [start], [flat.numel()]).float().reshape(weight.shape)

    def _holds(self, key: str, start: int, flat: Tensor) -> bool:
        if start + flat.numel() > self.index.shape(key)[0]:
            return False
        return torch.equal(self.index.part(key, [start], [flat.numel()]).to(flat.dtype), flat)

    @functools.cached_property
    def _starts(self) -> tuple[list[tuple[str, int]], Tensor]:
        """Where parameters, or what a rank owns of them, begin, and the first values there: `[places, _SAMPLE]`."""
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
