"""The fused update of Dobb-l2, on every CPU kernel of this processor, and its reference, against float64."""

import math

import pytest
import torch
from compiled import KERNELS, C, needs_extension
from hypothesis import given, settings
from hypothesis import strategies as st
from update_cases import (
    SETTINGS,
    Case,
    cases,
    check_scaled_against_float64,
    copied,
    random_scales,
    rounding_of,
    segment,
)

from megatron_dobb.errors import NonFiniteError
from megatron_dobb.methods.dobb import kernels, update
from megatron_dobb.sharding.shard import Shard


@needs_extension
@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=100, deadline=None)
@given(case=cases(), nesterov=st.booleans(), seed=st.integers(0, 99))
def test_scaled_coefficients_agree_with_float64(kernel, case, nesterov, seed):
    C.choose_cpu_kernel(kernel)
    options = SETTINGS | {"nesterov": nesterov}
    after, scales = copied(case), [random_scales(made, seed) for made in case.segments]
    kernels.update(after.segments, after.gradients, **options, backend="extension", column_scales=scales)
    check_scaled_against_float64(case, after, scales, options, **rounding_of(kernel))


@needs_extension
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("width", [48, 100, 400, 512])
def test_scaled_coefficients_of_ordinary_widths_with_many_rows_agree_with_float64(kernel, width):
    C.choose_cpu_kernel(kernel)
    made, gradient = segment(Shard(0, 300 * 2 * width, 2 * width, width), seed=width, by=1)
    case = Case([made], [gradient])
    after, scales = copied(case), [random_scales(made)]
    kernels.update(after.segments, after.gradients, **SETTINGS, backend="extension", column_scales=scales)
    check_scaled_against_float64(case, after, scales, SETTINGS, **rounding_of(kernel))


@settings(max_examples=50, deadline=None)
@given(case=cases(), nesterov=st.booleans())
def test_the_reference_of_dobb_l2_agrees_with_float64(case, nesterov):
    options = SETTINGS | {"nesterov": nesterov}
    after, scales = copied(case), [random_scales(made) for made in case.segments]
    for made in after.segments:
        made.momentum = made.momentum.float()
    update.update(after.segments, after.gradients, **options, column_scales=scales)
    check_scaled_against_float64(case, after, scales, options)


@needs_extension
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("backend", ["extension", "reference"])
def test_a_zero_scale_moves_nothing_along_its_column_and_a_zero_row_stays(kernel, backend):
    C.choose_cpu_kernel(kernel)
    width = 12
    made, gradient = segment(Shard(0, 20 * 2 * width, 2 * width, width), seed=3)
    made.momentum.view(20, -1)[7] = gradient.view(20, -1)[7] = 0
    scales, before = random_scales(made), made.weight.clone()
    scales[1, 5] = 0
    kernels.update([made], [gradient], **(SETTINGS | {"weight_decay": 0.0}), backend=backend, column_scales=[scales])
    step = (made.weight - before).view(20, 2, width)
    along = torch.einsum("rjc,jcd->rjd", step, made.basis)
    assert torch.equal(step[7], torch.zeros(2, width))
    assert along[:, 1, 5].abs().max() < 1e-6
    assert (along[:7].abs() > 1e-6).float().mean() > 0.9


@needs_extension
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_scaled_coefficient_that_is_not_finite_is_counted_raised_and_leaves_nan(kernel, value):
    C.choose_cpu_kernel(kernel)
    width = 12
    made, gradient = segment(Shard(0, 30 * 3 * width, 3 * width, width), seed=4)
    gradient.view(30, 3, width)[11, 1, 5] = value
    with pytest.raises(NonFiniteError, match=rf"^{width} coefficients of the momentum were not.* in weight4: NaN"):
        kernels.update([made], [gradient], **SETTINGS, backend="extension", column_scales=[random_scales(made)])
    finite = made.weight.isfinite().view(30, 3, width)
    assert made.weight.view(30, 3, width)[11, 1].isnan().all()
    assert finite.sum() == made.weight.numel() - width


def test_a_product_that_is_not_finite_is_nan_in_the_reference():
    coefficients = torch.tensor([-2.0, 0.0, 3e38, math.inf, math.nan])
    products = update.scaled(coefficients, torch.full((5,), 2.0))
    assert products[:2].tolist() == [-4.0, 0.0]
    assert products[2:].isnan().all()
