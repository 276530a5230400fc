"""The CUDA kernels of the update, run by the emulation, against float64."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from emulation.emulated import BACKWARD, FORWARD, Device, Schedule
from emulation.update_operation import update
from megatron_dobb.blocks import Shard
from unit.update_cases import (
    DTYPES,
    SETTINGS,
    WIDTHS,
    Case,
    check_against_float64,
    check_scaled_against_float64,
    copied,
    in_float64,
    random_scales,
    segment,
    signs_of,
)

EXACT = 2.0**-15  # relative error of a product of two bf16 terms each, beyond that of fp32
ROUNDED = 2.0**-7  # of one term each
KERNELS = ["fused", "wide"]


@st.composite
def cases(draw, widths=WIDTHS):
    """Segments of one width: anywhere in a weight, of any length down to nothing, aligned or not."""
    width = draw(st.sampled_from(widths))
    made, shifts = [], []
    for _ in range(draw(st.integers(0, 3))):
        blocks, rows = draw(st.integers(1, 4)), draw(st.integers(1, 40 if width < 64 else 20))
        total = rows * blocks
        first = draw(st.integers(0, total))
        last = draw(st.one_of(st.just(min(first + 1, total)), st.just(total), st.integers(first, total)))
        shard = Shard(first * width, last * width, blocks * width, width)
        made.append(segment(shard, seed=draw(st.integers(0, 2**31)), dtypes=draw(st.tuples(DTYPES, DTYPES, DTYPES))))
        shifts.append(draw(st.integers(0, 3)))
    return Case([s for s, _ in made], [g for _, g in made]), shifts


@pytest.mark.parametrize("kernels", KERNELS)
@settings(max_examples=60, deadline=None)
@given(case=cases(), nesterov=st.booleans(), processors=st.integers(1, 4))
def test_signs_momentum_and_update_agree_with_float64(harness, kernels, case, nesterov, processors):
    case, shifts = case
    options = SETTINGS | {"nesterov": nesterov}
    after = copied(case)
    device = Device(multiprocessors=processors)
    schedules = (FORWARD, BACKWARD, Schedule(3, 1))
    bad = update(
        harness,
        after.segments,
        after.gradients,
        **options,
        kernels=kernels,
        misaligned=shifts,
        device=device,
        schedules=schedules,
    )
    assert bad == 0
    check_against_float64(case, after, options, EXACT)
