"""The update with matrix units against float64: the kernel of AMX and AVX512-BF16 over leaf functions in plain C++."""

import ctypes
import dataclasses
import math
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from compiled import KERNELS, C
from hypothesis import given, settings
from hypothesis import strategies as st
from update_cases import (
    BF16,
    HALVES,
    MATRIX_UNITS,
    SETTINGS,
    Case,
    cases,
    check_against_float64,
    check_scaled_against_float64,
    copied,
    random_scales,
    segment,
)

from megatron_dobb.methods.dobb import kernels
from megatron_dobb.methods.dobb import update as reference
from megatron_dobb.sharding.shard import Shard

SOURCE = Path(__file__).with_name("matrix_units.cpp")
COMPILER = os.environ.get("CXX") or next((name for name in ("g++", "clang++", "c++") if shutil.which(name)), None)
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

LOSSES = {True: HALVES, False: BF16}


@dataclasses.dataclass
class Emulated:
    library: ctypes.CDLL
    kernel: str  # the one that computes as it does, on a processor with its instructions

    def update(self, case, options, *, exact=True, rows=128, blocks=2, copies=None, column_scales=None):
        """One step of every segment, in units of at most `rows` rows and `blocks` blocks. Returns how many coefficients
        are not finite."""
        bad = 0
        for i, (made, gradient) in enumerate(zip(case.segments, case.gradients, strict=True)):
            found = self.library.update_segment(
                *(pointer(tensor) for tensor in (made.weight, gradient, made.momentum, made.basis)),
                pointer(copies[i] if copies else None),
                pointer(column_scales[i] if column_scales else None),
                made.shard.numel,
                made.shard.start,
                made.shard.columns,
                ctypes.c_float(
                    options["learning_rate"] * reference.step_scale(made.rows, made.columns, options["update_scale"])
                ),
                *(int(tensor.dtype == torch.bfloat16) for tensor in (gradient, made.momentum, made.basis)),
                made.shard.width,
                ctypes.c_float(1 - options["learning_rate"] * options["weight_decay"]),
                ctypes.c_float(1 - options["momentum"]),
                int(options["nesterov"]),
                int(exact),
                rows,
                blocks,
            )
            assert found >= 0, "tile registers were not given back"
            bad += found
        return bad


def pointer(tensor):
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


@pytest.fixture(scope="module", params=MATRIX_UNITS)
def emulated(request, tmp_path_factory):
    tiles = {"amx": 2, "avx512bf16": 1}[request.param]
    library = tmp_path_factory.mktemp("matrix_units") / f"{request.param}.so"
    flags = ["-std=c++20", "-O2", "-march=native", "-Wno-psabi", "-shared", "-fPIC"]
    flags += ["-I", str(SOURCE.parents[2] / "csrc")]
    command = [*COMPILER.split(), *flags, f"-DDOBB_PLAIN_TILES={tiles}", str(SOURCE), "-o", str(library)]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(library))
    p, n, f, i = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
    loaded.update_segment.argtypes = [p] * 6 + [n] * 3 + [f] + [i] * 3 + [n, f, f, i, i, n, n]
    loaded.update_segment.restype = n
    loaded.take_apart.argtypes = [p, n, p, p]
    return Emulated(loaded, request.param)


unit_sizes = st.tuples(st.sampled_from([1, 5, 16, 33, 128]), st.integers(1, 4))


@settings(max_examples=60, deadline=None)
@given(case=cases(), nesterov=st.booleans(), exact=st.booleans(), unit=unit_sizes)
def test_signs_momentum_and_update_agree_with_float64(emulated, case, nesterov, exact, unit):
    options = SETTINGS | {"nesterov": nesterov}
    after = copied(case)
    assert emulated.update(after, options, exact=exact, rows=unit[0], blocks=unit[1]) == 0
    check_against_float64(case, after, options, **LOSSES[exact])


@settings(max_examples=40, deadline=None)
@given(case=cases(), exact=st.booleans(), unit=unit_sizes)
def test_scaled_coefficients_agree_with_float64(emulated, case, exact, unit):
    after, scales = copied(case), [random_scales(made) for made in case.segments]
    assert emulated.update(after, SETTINGS, exact=exact, rows=unit[0], blocks=unit[1], column_scales=scales) == 0
    check_scaled_against_float64(case, after, scales, SETTINGS, **LOSSES[exact])


@settings(max_examples=60, deadline=None)
@given(case=cases(), exact=st.booleans(), scaled=st.booleans(), power=st.sampled_from([0, -60, -118]))
def test_a_processor_with_the_instructions_computes_the_same_bits(emulated, case, exact, scaled, power):
    """From weights of zero, where compilers have no choice of what to round. Small momenta have denormal halves."""
    if emulated.kernel not in KERNELS:
        pytest.skip(f"no {emulated.kernel} on this processor")
    for made, gradient in zip(case.segments, case.gradients, strict=True):
        made.weight.zero_()
        made.momentum.mul_(2.0**power)
        gradient.mul_(2.0**power)
    after, expected = copied(case), copied(case)
    scales = [random_scales(made) for made in case.segments] if scaled else None
    emulated.update(expected, SETTINGS, exact=exact, column_scales=scales)
    C.choose_cpu_kernel(emulated.kernel)
    precision = "exact" if exact else "bf16"
    kernels.update(
        after.segments, after.gradients, **SETTINGS, backend="extension", precision=precision, column_scales=scales
    )
    for ours, theirs in zip(after.segments, expected.segments, strict=True):
        assert torch.equal(ours.momentum, theirs.momentum)
        assert torch.equal(ours.weight, theirs.weight)


@pytest.mark.parametrize("width", [1, 7, 48, 100, 176])
@pytest.mark.parametrize("basis_dtype", [torch.float32, torch.bfloat16])
def test_ranges_with_partial_rows_at_both_ends_agree_with_float64(emulated, width, basis_dtype):
    columns = 3 * width
    made, gradient = segment(
        Shard(2 * width, 70 * columns + width, columns, width), seed=width, dtypes=(torch.float32,) * 2 + (basis_dtype,)
    )
    case = Case([made], [gradient])
    after, copies = copied(case), [torch.zeros(made.shard.numel, dtype=torch.bfloat16)]
    assert emulated.update(after, SETTINGS, copies=copies) == 0
    check_against_float64(case, after, SETTINGS, **HALVES)
    assert torch.equal(copies[0], after.segments[0].weight.bfloat16())


def test_exact_products_flip_fewer_than_one_sign_in_100_000_and_bf16_ones_more(emulated):
    width, rows = 48, 2000
    made, gradient = segment(Shard(0, rows * width, width, width), seed=1)
    case = Case([made], [gradient])
    signs = reference.project(
        made.momentum.double().lerp(gradient.double(), 0.05).view(rows, 1, width), made.basis.double()
    ).sign()
    flips = {}
    for exact in (True, False):
        after = copied(case)
        after.segments[0].weight.zero_()
        emulated.update(after, SETTINGS, exact=exact)
        step = -after.segments[0].weight.double().view(rows, 1, width)
        flips[exact] = (reference.project(step, made.basis.double()).sign() != signs).double().mean().item()
    assert flips[True] < 1e-5
    assert 1e-5 < flips[False] < 1e-2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_a_coefficient_that_is_not_finite_is_counted_and_leaves_nan_in_its_block_alone(emulated, value, exact, scaled):
    width = 12
    made, gradient = segment(Shard(0, 40 * 3 * width, 3 * width, width), seed=4)
    gradient.view(40, 3, width)[11, 1, 5] = value
    scales = [random_scales(made)] if scaled else None
    assert emulated.update(Case([made], [gradient]), SETTINGS, exact=exact, column_scales=scales) == width
    weight = made.weight.view(40, 3, width)
    assert weight[11, 1].isnan().all()
    assert weight.isfinite().sum() == made.weight.numel() - width


def test_the_largest_finite_momenta_give_their_signs(emulated):
    width, largest = 8, torch.finfo(torch.float32).max
    made, gradient = segment(Shard(0, 5 * width, width, width), seed=5)
    made.basis.copy_(torch.eye(width))
    made.momentum.fill_(largest)
    made.momentum[1::2] *= -1
    gradient.copy_(made.momentum)
    before = made.weight.clone()
    assert emulated.update(Case([made], [gradient]), SETTINGS | {"weight_decay": 0.0}) == 0
    assert torch.equal((before - made.weight).sign(), made.momentum.sign())


def test_a_zero_row_stays(emulated):
    made, gradient = segment(Shard(0, 20 * 24, 24, 24), seed=6)
    made.momentum.view(20, 24)[7] = gradient.view(20, 24)[7] = 0
    before = made.weight.clone().view(20, 24)
    emulated.update(Case([made], [gradient]), SETTINGS | {"weight_decay": 0.0})
    moved = (made.weight.view(20, 24) != before).any(dim=1)
    assert moved.tolist() == [row != 7 for row in range(20)]


def test_high_and_low_are_finite_and_make_up_the_number(emulated):
    largest, infinity = torch.finfo(torch.float32).max, math.inf
    special = torch.tensor([0.0, -0.0, 1.0, largest, -largest, largest * (1 - 2**-9), 3.3895e38, 1e-30])
    values = torch.cat([special, torch.randn(1000) * 10.0 ** torch.randint(-30, 38, (1000,))])
    values = values[values.isfinite()]
    high, low = torch.empty(2, len(values), dtype=torch.bfloat16)
    emulated.library.take_apart(pointer(values), len(values), pointer(high), pointer(low))
    assert high.isfinite().all()
    assert low.isfinite().all()
    error = (high.double() + low.double() - values.double()).abs()
    assert (error <= 2.0**-16 * values.double().abs()).all()  # 2^-17 but for the largest, which round towards zero
    bad = torch.tensor([infinity, -infinity, math.nan])
    emulated.library.take_apart(pointer(bad), 3, pointer(high), pointer(low))
    assert high[:2].tolist() == [infinity, -infinity]
    assert high[2].isnan()
    assert low[:3].tolist() == [0.0, 0.0, 0.0]
