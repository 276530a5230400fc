"""The CUDA kernels of the update on a GPU, against float64 and against what a training loop needs of them."""

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
    cases,
    check_against_float64,
    check_scaled_against_float64,
    copied,
    random_scales,
    segment,
)

from megatron_dobb.errors import NonFiniteError
from megatron_dobb.kernels import extension
from megatron_dobb.methods.dobb import kernels
from megatron_dobb.sharding.shard import Shard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(not extension.runs_on("cuda"), reason=f"no CUDA kernels: {extension.why_not('cuda')}"),
]

EXACT, ROUNDED = 2.0**-15, 2.0**-7  # relative errors of products of two bf16 terms each, and of one
MIB = 2**20


def on_gpu(case):
    """The same segments on the GPU, each tensor as far from a multiple of 16 bytes as it was."""

    def moved(tensor):
        skip = tensor.data_ptr() % 16 // tensor.element_size()
        memory = torch.empty(tensor.numel() + skip, dtype=tensor.dtype, device="cuda")
        target = memory[skip:].view(tensor.shape)
        target.copy_(tensor)
        return target

    segments = [
        dataclasses.replace(s, weight=moved(s.weight), momentum=moved(s.momentum), basis=moved(s.basis))
        for s in case.segments
    ]
    return Case(segments, [moved(g) for g in case.gradients])


def back(case):
    segments = [
        dataclasses.replace(s, weight=s.weight.cpu(), momentum=s.momentum.cpu(), basis=s.basis.cpu())
        for s in case.segments
    ]
    return Case(segments, [g.cpu() for g in case.gradients])


def step(case, **more):
    kernels.check(kernels.update(case.segments, case.gradients, **SETTINGS | more, backend="extension"))


@settings(max_examples=200, deadline=None)
@given(case=cases(), nesterov=st.booleans())
def test_signs_momentum_and_update_agree_with_float64(case, nesterov):
    after = on_gpu(copied(case))
    step(after, nesterov=nesterov)
    check_against_float64(case, back(after), SETTINGS | {"nesterov": nesterov}, rounding=EXACT)


@settings(max_examples=50, deadline=None)
@given(case=cases(), seed=st.integers(0, 2**31))
def test_scaled_coefficients_agree_with_float64(case, seed):
    scales = [random_scales(made, seed) for made in case.segments]
    after = on_gpu(copied(case))
    step(after, column_scales=[s.cuda() for s in scales])
    check_scaled_against_float64(case, back(after), scales, SETTINGS, relative=2e-5, rounding=2.0**-16)


@pytest.mark.parametrize("width", [*WIDTHS[::4], 48, 192, 256, 260, 320, 400, 512, 513, 640, 896])
@pytest.mark.parametrize("precision", ["exact", "bf16"])
@pytest.mark.parametrize("basis", [torch.bfloat16, torch.float32])
def test_every_kind_of_width_agrees_with_float64(width, precision, basis):
    shard = Shard(width, (2 * 150 + 1) * width, 2 * width, width)
    made, gradient = segment(shard, seed=width, dtypes=(torch.float32, torch.float32, basis))
    case = Case([made], [gradient])
    after = on_gpu(copied(case))
    step(after, precision=precision)
    rounded = precision == "bf16" and basis is torch.bfloat16
    check_against_float64(case, back(after), SETTINGS, rounding=ROUNDED if rounded else EXACT)


@settings(max_examples=20, deadline=None)
@given(width=st.sampled_from([16, 48, 100, 320, 640]), dtypes=st.tuples(DTYPES, DTYPES, DTYPES))
def test_the_same_step_gives_the_same_bits_again(width, dtypes):
    made, gradient = segment(Shard(0, 300 * 2 * width, 2 * width, width), seed=1, dtypes=dtypes)
    results = []
    for _ in range(5):
        after = on_gpu(copied(Case([made], [gradient])))
        step(after)
        results.append(torch.cat([after.segments[0].weight, after.segments[0].momentum.float()]))
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("width", [48, 320, 640])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_coefficients_that_are_not_finite_are_raised_by_name_and_leave_nan(width, value):
    made, gradient = segment(Shard(0, 40 * width, 2 * width, width), seed=7)
    made.momentum[3 * width + 2] = value
    after = on_gpu(Case([made], [gradient]))
    with pytest.raises(NonFiniteError, match=rf"{width} coefficients .* in weight7"):
        step(after)
    bad = after.segments[0].weight.view(-1, width).isnan().all(dim=1)
    assert bad.nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize("width", [5, 48, 320, 640])
def test_copies_receive_the_rounded_weights(width):
    made, gradient = segment(Shard(0, 9 * width, 3 * width, width), seed=2)
    after = on_gpu(Case([made], [gradient]))
    given_copy = torch.zeros(9 * width, dtype=torch.bfloat16, device="cuda")
    step(after, copies=[given_copy])
    assert torch.equal(given_copy, after.segments[0].weight.to(torch.bfloat16))


@pytest.mark.parametrize("width", [48, 100, 320, 640])
def test_a_step_can_be_captured_in_a_graph(width):
    pairs = [segment(Shard(0, 70 * 2 * width, 2 * width, width), seed=i) for i in range(50)]
    case = Case([s for s, _ in pairs], [g for _, g in pairs])
    eager, captured = on_gpu(copied(case)), on_gpu(copied(case))
    step(eager)
    step(on_gpu(copied(case)))  # whatever the first call sets up
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.update(captured.segments, captured.gradients, **SETTINGS, backend="extension")
    graph.replay()
    for a, b in zip(eager.segments, captured.segments, strict=True):
        assert torch.equal(a.weight, b.weight)
        assert torch.equal(a.momentum, b.momentum)


@pytest.mark.parametrize("width", [48, 320, 640])
def test_a_step_does_not_wait_for_the_gpu(width):
    made, gradient = segment(Shard(0, 300 * 2 * width, 2 * width, width), seed=1)
    case = on_gpu(Case([made], [gradient]))
    step(case)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernels.update(case.segments, case.gradients, **SETTINGS, backend="extension")
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("width", [192, 512, 1024])
def test_a_step_of_400_mb_of_weights_takes_less_than_32_mb_more(width):
    rows, blocks = 25 * 2**20 // (4 * width) // 256 * 256, 16
    generator = torch.Generator(device="cuda").manual_seed(0)
    shard = Shard(0, rows * blocks * width, blocks * width, width)
    tensors = [torch.randn(shard.numel, generator=generator, device="cuda") for _ in range(3)]
    basis = torch.eye(width, device="cuda", dtype=torch.bfloat16).expand(blocks, width, width).contiguous()
    made, _ = segment(Shard(0, width, width, width), seed=1)
    made = dataclasses.replace(
        made, shard=shard, rows=rows, columns=blocks * width, weight=tensors[0], momentum=tensors[1], basis=basis
    )
    case = Case([made], [tensors[2]])
    step(case)  # cuBLAS takes its workspace once
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(case)
    assert torch.cuda.max_memory_allocated() - before < 32 * MIB


def test_ten_thousand_segments_go_in_one_call():
    width = 4
    pairs = [segment(Shard(i % 3 * width, (i % 3 + 1) * width, 3 * width, width), seed=i) for i in range(10_000)]
    case = Case([s for s, _ in pairs], [g for _, g in pairs])
    after = on_gpu(copied(case))
    step(after)
    check_against_float64(case, back(after), SETTINGS, rounding=EXACT)
