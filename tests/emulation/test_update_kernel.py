"""The CUDA kernels of the update, run by the emulation, against float64."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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

from emulation.emulated import BACKWARD, FORWARD, Device, Schedule
from emulation.update_operation import update
from megatron_dobb.sharding.shard import Shard

pytestmark = pytest.mark.full

EXACT = 2.0**-15  # relative error of a product of two bf16 terms each, beyond that of fp32
ROUNDED = 2.0**-7  # of one term each
KERNELS = ["one_pass", "wide"]


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
    check_against_float64(case, after, options, rounding=EXACT)


@pytest.mark.parametrize("kernels", KERNELS)
@settings(max_examples=25, deadline=None)
@given(case=cases(), seed=st.integers(0, 2**31))
def test_scaled_coefficients_agree_with_float64(harness, kernels, case, seed):
    case, shifts = case
    scales = [random_scales(made, seed) for made in case.segments]
    after = copied(case)
    update(
        harness,
        after.segments,
        after.gradients,
        **SETTINGS,
        kernels=kernels,
        column_scales=scales,
        misaligned=shifts,
        schedules=(FORWARD, BACKWARD),
    )
    # Two products, each of terms that leave out 2^-17 of a factor.
    check_scaled_against_float64(case, after, scales, SETTINGS, relative=2e-5, rounding=2.0**-16)


@pytest.mark.parametrize("width", [16, 48, 64, 80, 100, 128, 176, 192, 256])
@pytest.mark.parametrize("basis", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("precision", ["exact", "bf16"])
def test_every_compiled_width_agrees_with_float64(harness, width, basis, precision):
    device = Device()
    if basis is torch.float32 and width > 192:
        device = Device(most_shared_memory=300 * 1024)
    shard = Shard(width, (2 * 21 + 1) * width, 2 * width, width)
    made, gradient = segment(shard, seed=width, dtypes=(torch.float32, torch.float32, basis))
    case = Case([made], [gradient])
    after = copied(case)
    update(
        harness,
        after.segments,
        after.gradients,
        **SETTINGS,
        precision=precision,
        device=device,
        schedules=(FORWARD, Schedule(3, 1)),
    )
    rounded = precision == "bf16" and basis is torch.bfloat16
    check_against_float64(case, after, SETTINGS, rounding=ROUNDED if rounded else EXACT)


@pytest.mark.parametrize("width", [260, 320, 400, 512])
@pytest.mark.parametrize("precision", ["exact", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_width_that_streams_its_basis_agrees_with_float64(harness, width, precision, dtype):
    # 64 rows make a tile: one block has a second one of a single row.
    shard = Shard(width, (64 * 2 + 2) * width, 2 * width, width)
    made, gradient = segment(shard, seed=width, dtypes=(dtype, dtype, torch.bfloat16))
    case = Case([made], [gradient])
    after = copied(case)
    schedules = (FORWARD, Schedule(3, 1))
    device = Device(multiprocessors=1, resident_blocks=1, most_shared_memory=163 * 1024)
    update(
        harness, after.segments, after.gradients, **SETTINGS, precision=precision, device=device, schedules=schedules
    )
    check_against_float64(case, after, SETTINGS, rounding=ROUNDED if precision == "bf16" else EXACT)


def test_a_width_whose_basis_does_not_fit_into_shared_memory_is_refused(harness):
    made, gradient = segment(Shard(0, 256, 256, 256), seed=1)
    with pytest.raises(Exception, match="no one-pass kernel fits"):
        update(harness, [made], [gradient], **SETTINGS)


def test_fewer_than_one_sign_in_100_000_differs_from_float64_on_realistic_momenta(harness):
    # Momenta of a trained model have a spread of sizes along their basis, which makes some coefficients tiny.
    width, rows, blocks = 96, 320, 4
    generator = torch.Generator().manual_seed(3)
    made, gradient = segment(Shard(0, rows * blocks * width, blocks * width, width), seed=3)
    basis = made.basis.to(torch.bfloat16).float()
    spectrum = torch.arange(1, width + 1).pow(-1.0)
    coefficients = torch.randn(rows, blocks, width, generator=generator) * spectrum
    made.momentum.copy_(torch.einsum("rjd,jcd->rjc", coefficients, basis).flatten())
    made = dataclasses.replace(made, basis=basis.to(torch.bfloat16))
    case = Case([made], [gradient * 1e-3])
    after = copied(case)
    update(harness, after.segments, after.gradients, **SETTINGS, schedules=(FORWARD,))
    _, exact, _, _ = in_float64(made, case.gradients[0], SETTINGS)
    found = signs_of(made, after.segments[0].weight, SETTINGS).round()
    assert (found != exact.sign()).sum().item() <= 1e-5 * found.numel()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("width", [1, 7, 48, 100])
def test_a_zero_momentum_row_moves_nothing(harness, kernels, width):
    made, gradient = segment(Shard(0, 6 * width, 2 * width, width), seed=5)
    made.momentum[: 2 * width] = 0
    gradient[: 2 * width] = 0
    before = made.weight.clone()
    update(harness, [made], [gradient], **SETTINGS | {"weight_decay": 0.0}, kernels=kernels)
    assert torch.equal(made.weight[: 2 * width], before[: 2 * width])
    assert not torch.equal(made.weight[2 * width :], before[2 * width :])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("basis", [torch.bfloat16, torch.float32])
def test_coefficients_that_are_not_finite_are_counted_and_leave_nan_in_their_row_and_block(
    harness, kernels, scaled, value, basis
):
    width = 20
    made, gradient = segment(Shard(0, 40 * width, 2 * width, width), seed=7, dtypes=(torch.float32,) * 2 + (basis,))
    expected = made.weight.clone()
    made.momentum[3 * width + 2] = value
    scales = [random_scales(made)] if scaled else None
    count = update(harness, [made], [gradient], **SETTINGS, kernels=kernels, column_scales=scales)
    bad = made.weight.view(-1, width).isnan().any(dim=1)
    assert count == width
    assert bad.nonzero().flatten().tolist() == [3]
    assert made.weight.view(-1, width)[3].isnan().all()
    assert not torch.equal(made.weight, expected)


def test_a_momentum_near_the_largest_number_keeps_its_signs(harness):
    width = 16
    made, gradient = segment(Shard(0, 4 * width, width, width), seed=9)
    made.basis.copy_(torch.eye(width))
    made.momentum.copy_(torch.where(torch.arange(4 * width) % 3 == 0, -3.4e38, 3.4e38))
    gradient.copy_(made.momentum)
    before = copied(Case([made], [gradient]))
    assert update(harness, [made], [gradient], **SETTINGS) == 0
    assert torch.equal(signs_of(before.segments[0], made.weight, SETTINGS).round(), gradient.sign().double())


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("width", [5, 48])
def test_copies_receive_the_rounded_weights(harness, kernels, width):
    pairs = [segment(Shard(0, 9 * width, 3 * width, width), seed=i) for i in range(3)]
    made, gradients = [s for s, _ in pairs], [g for _, g in pairs]
    given = [torch.zeros(9 * width, dtype=torch.bfloat16), None, torch.zeros(9 * width, dtype=torch.bfloat16)]
    update(harness, made, gradients, **SETTINGS, kernels=kernels, copies=given)
    for i in (0, 2):
        assert torch.equal(given[i], made[i].weight.to(torch.bfloat16))


@pytest.mark.parametrize("start", range(4))
@pytest.mark.parametrize("blocks", range(1, 10))
def test_every_wrap_around_a_row_end_uses_the_right_basis(harness, start, blocks):
    width = 8
    made, gradient = segment(Shard(start * width, (start + blocks) * width, 4 * width, width), seed=blocks)
    for kernels in KERNELS:
        case = Case([made], [gradient])
        after = copied(case)
        update(harness, after.segments, after.gradients, **SETTINGS, kernels=kernels, schedules=(FORWARD,))
        check_against_float64(case, after, SETTINGS, rounding=EXACT)


def test_ten_thousand_segments_go_in_one_call(harness):
    width = 4
    pairs = [segment(Shard(i % 3 * width, (i % 3 + 1) * width, 3 * width, width), seed=i) for i in range(10_000)]
    case = Case([s for s, _ in pairs], [g for _, g in pairs])
    after = copied(case)
    update(harness, after.segments, after.gradients, **SETTINGS, schedules=(FORWARD,))
    sample = range(0, 10_000, 97)
    check_against_float64(
        Case([case.segments[i] for i in sample], [case.gradients[i] for i in sample]),
        Case([after.segments[i] for i in sample], [after.gradients[i] for i in sample]),
        SETTINGS,
        rounding=EXACT,
    )
    assert all(not torch.equal(a.weight, b.weight) for a, b in zip(case.segments, after.segments, strict=True))


def test_the_result_does_not_depend_on_the_number_of_processors(harness):
    pairs = [segment(Shard(0, 37 * 3 * 24, 3 * 24, 24), seed=i) for i in range(2)]
    results = []
    for processors, resident in [(1, 1), (2, 3), (7, 4)]:
        after = copied(Case([s for s, _ in pairs], [g for _, g in pairs]))
        device = Device(multiprocessors=processors, resident_blocks=resident)
        update(harness, after.segments, after.gradients, **SETTINGS, device=device, schedules=(FORWARD,))
        results.append(torch.cat([s.weight for s in after.segments] + [s.momentum for s in after.segments]))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_no_segments_are_no_launch(harness):
    assert update(harness, [], [], **SETTINGS) == 0
