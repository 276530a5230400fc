"""The fused update against float64, on every CPU kernel that this processor runs."""

import dataclasses
import math
import subprocess
import sys

import pytest
import torch
from compiled import KERNELS, C, needs_extension
from hypothesis import given, settings
from hypothesis import strategies as st
from update_cases import (
    SETTINGS,
    Case,
    cases,
    check_against_float64,
    copied,
    in_float64,
    rounding_of,
    segment,
    signs_of,
)

from megatron_dobb.errors import NonFiniteError, UnsupportedError
from megatron_dobb.kernels import dispatch, extension
from megatron_dobb.methods.dobb import kernels
from megatron_dobb.methods.dobb import update as reference
from megatron_dobb.sharding.segment import Segment
from megatron_dobb.sharding.shard import Shard


@needs_extension
@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=200, deadline=None)
@given(case=cases(), nesterov=st.booleans(), learning_rate=st.sampled_from([0.5, 0.03]))
def test_signs_momentum_and_update_agree_with_float64(kernel, case, nesterov, learning_rate):
    C.choose_cpu_kernel(kernel)
    options = SETTINGS | {"nesterov": nesterov, "learning_rate": learning_rate}
    after = copied(case)
    kernels.update(after.segments, after.gradients, **options, backend="extension")
    check_against_float64(case, after, options, **rounding_of(kernel))


@needs_extension
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("width", [48, 100, 192, 400, 512])
@pytest.mark.parametrize("precision", ["exact", "bf16"])
def test_ordinary_widths_with_many_rows_agree_with_float64(kernel, width, precision):
    C.choose_cpu_kernel(kernel)
    made, gradient = segment(Shard(0, 300 * 2 * width, 2 * width, width), seed=width, by=1)
    case = Case([made], [gradient])
    after = copied(case)
    kernels.update(after.segments, after.gradients, **SETTINGS, backend="extension", precision=precision)
    check_against_float64(case, after, SETTINGS, **rounding_of(kernel, precision))


@needs_extension
@pytest.mark.parametrize("start", range(6))
@pytest.mark.parametrize("blocks", range(1, 14))
def test_every_wrap_around_a_row_end_uses_the_right_basis(start, blocks):
    width = 8
    made, gradient = segment(Shard(start * width, (start + blocks) * width, 6 * width, width), seed=blocks)
    case = Case([made], [gradient])
    after = copied(case)
    kernels.update(after.segments, after.gradients, **SETTINGS, backend="extension")
    check_against_float64(case, after, SETTINGS, **rounding_of(C.chosen_cpu_kernel()))


@needs_extension
@pytest.mark.parametrize("kernel", KERNELS)
def test_ten_thousand_segments_of_several_widths_go_in_one_call(kernel):
    C.choose_cpu_kernel(kernel)
    made = [segment(Shard(0, 4 * width, 2 * width, width), seed=i) for i in range(2500) for width in (1, 3, 8, 20)]
    case = Case([s for s, _ in made], [g for _, g in made])
    after, expected = copied(case), copied(case)
    dispatch.kernels_run.clear()
    kernels.update(after.segments, after.gradients, **SETTINGS, backend="extension")
    assert dispatch.kernels_run == {kernel: 10_000}
    reference.update(expected.segments, expected.gradients, **SETTINGS)
    flips = 0
    for ours, theirs in zip(after.segments, expected.segments, strict=True):
        flips += not torch.allclose(ours.weight, theirs.weight, atol=1e-5)
    assert flips < 10


@needs_extension
@pytest.mark.parametrize("kernel", KERNELS)
def test_fewer_than_one_sign_in_100_000_differs_from_float64_on_realistic_momenta(kernel):
    C.choose_cpu_kernel(kernel)
    width, rows, blocks = 48, 1500, 8
    made, gradient = segment(Shard(0, rows * blocks * width, blocks * width, width), seed=1)
    scales = torch.logspace(0, -4, blocks * width)[torch.randperm(blocks * width)]
    made.momentum.view(rows, -1).mul_(scales)
    gradient.view(rows, -1).mul_(scales)
    made.weight.zero_()
    case = Case([made], [gradient])
    after = copied(case)
    kernels.update(after.segments, after.gradients, **SETTINGS, backend="extension")
    _, coefficients, _, _ = in_float64(made, gradient, SETTINGS)
    signs = signs_of(made, after.segments[0].weight, SETTINGS).round()
    assert (signs != coefficients.sign()).double().mean() < 1e-5


@needs_extension
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("width", [5, 16, 48])
def test_a_zero_coefficient_moves_nothing(kernel, width):
    """A zero row stays, and so does a feature without activations, whose basis vector is its own."""
    C.choose_cpu_kernel(kernel)
    made, gradient = segment(Shard(0, 20 * 2 * width, 2 * width, width), seed=3)
    dead = 3
    made.basis[0, dead, :] = made.basis[0, :, dead] = 0
    made.basis[0, dead, dead] = 1
    for tensor in (made.momentum, gradient):
        grid = tensor.view(20, 2 * width)
        grid[:, dead] = 0
        grid[7] = 0
    before = made.weight.clone()
    kernels.update([made], [gradient], **(SETTINGS | {"weight_decay": 0.0}), backend="extension")
    old, new = before.view(20, -1), made.weight.view(20, -1)
    assert torch.equal(new[7], old[7])
    assert torch.equal(new[:, dead], old[:, dead])
    assert (new[:7, dead + 1 :] != old[:7, dead + 1 :]).any(dim=0).all()


@needs_extension
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_coefficient_that_is_not_finite_is_counted_raised_and_leaves_nan(kernel, value):
    C.choose_cpu_kernel(kernel)
    width = 12
    made, gradient = segment(Shard(0, 30 * 3 * width, 3 * width, width), seed=4)
    gradient.view(30, 3, width)[11, 1, 5] = value
    with pytest.raises(NonFiniteError, match=rf"^{width} coefficients of the momentum were not.* in weight4: NaN"):
        kernels.update([made], [gradient], **SETTINGS, backend="extension")
    finite = made.weight.isfinite().view(30, 3, width)
    assert not finite[11, 1].any()
    assert finite.sum() == made.weight.numel() - width


@needs_extension
@pytest.mark.parametrize("width", [3, 16, 20])
def test_copies_receive_the_rounded_weights(width):
    made = [segment(Shard(0, 9 * width, 3 * width, width), seed=i) for i in range(3)]
    copies = [torch.zeros(9 * width, dtype=torch.bfloat16), None, torch.zeros(9 * width, dtype=torch.bfloat16)]
    segments = [s for s, _ in made]
    kernels.update(segments, [g for _, g in made], **SETTINGS, backend="extension", copies=copies)
    for i in (0, 2):
        assert torch.equal(copies[i], segments[i].weight.bfloat16())


@needs_extension
def test_the_result_does_not_depend_on_the_number_of_threads():
    made, gradient = segment(Shard(48, 700 * 96, 96, 48), seed=5)
    case, results = Case([made], [gradient]), []
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            after = copied(case)
            kernels.update(after.segments, after.gradients, **SETTINGS, backend="extension")
            results.append(after.segments[0].weight)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


# The op.


def arguments(**changes):
    width = 8
    made, gradient = segment(Shard(0, 6 * width, 2 * width, width), seed=6)
    values = {
        "weights": [made.weight],
        "gradients": [gradient],
        "momenta": [made.momentum],
        "bases": [made.basis],
        "copies": [],
        "column_scales": [],
        "starts": [0],
        "columns": [2 * width],
        "width": width,
        "scales": [0.1],
        "decay": 0.99,
        "momentum": 0.95,
        "nesterov": False,
        "precision": "exact",
        "norm": "sign",
    }
    return tuple((values | changes).values())


@needs_extension
def test_the_op_obeys_the_rules_of_the_dispatcher():
    torch.library.opcheck(torch.ops.dobb.update.default, arguments())
    torch.library.opcheck(torch.ops.dobb.update.default, arguments(norm="l2", column_scales=[torch.rand(2, 8)]))


@needs_extension
def test_a_compiled_function_gives_the_same_as_the_plain_one():
    rest = arguments()[4:]

    def step(weight, gradient, momentum, basis):
        return torch.ops.dobb.update([weight], [gradient], [momentum], [basis], *rest)

    weights, gradients, momenta, bases = (values[0] for values in arguments()[:4])
    plain = [weights.clone(), gradients, momenta.clone(), bases]
    compiled = [weights.clone(), gradients, momenta.clone(), bases]
    assert torch.equal(step(*plain), torch.compile(step, backend="aot_eager", fullgraph=True)(*compiled))
    assert torch.equal(plain[0], compiled[0])
    assert torch.equal(plain[2], compiled[2])


@needs_extension
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gradients": [torch.zeros(40)]}, r"gradients\[0\] has shape \[40\].*expected a contiguous \[48\]"),
        ({"gradients": []}, r"gradients has 0 entries, expected 1, one for each of weights"),
        ({"weights": [torch.zeros(48).double()]}, r"weights\[0\] is Double, expected fp32"),
        ({"momenta": [torch.zeros(48).half()]}, r"momenta\[0\] is Half, expected fp32 or bf16"),
        ({"momenta": [torch.zeros(96)[::2]]}, r"momenta\[0\] has shape \[48\] and strides \[2\]"),
        ({"bases": [torch.zeros(3, 8, 8)]}, r"bases\[0\] has shape \[3, 8, 8\].*\[2, 8, 8\] for the 2 blocks"),
        ({"bases": [torch.zeros(2, 8, 8, dtype=torch.half)]}, r"bases\[0\] is Half, expected bf16 or fp32"),
        ({"starts": [4]}, r"segment 0 is the range \[4, 52\), expected bounds that are multiples of .* 8"),
        ({"columns": [12]}, r"columns\[0\] is 12, expected a multiple of the block width 8"),
        ({"width": 0}, r"width is 0, expected a block width of at least 1"),
        ({"copies": [torch.zeros(48)]}, r"copies\[0\] is Float, expected bf16"),
        ({"precision": "fp8"}, r"precision is 'fp8', expected 'exact' or 'bf16'"),
        ({"norm": "l1"}, r"norm is 'l1', expected 'sign' or 'l2'"),
        ({"norm": "l2"}, r"column_scales has 0 entries, expected 1, one for each of weights"),
        (
            {"column_scales": [torch.ones(2, 8)]},
            r"column_scales has 1 entries, expected none for norm .sign.",
        ),
        (
            {"norm": "l2", "column_scales": [torch.ones(3, 8)]},
            r"column_scales\[0\] has shape \[3, 8\].*\[2, 8\] for",
        ),
        ({"norm": "l2", "column_scales": [torch.ones(2, 8).half()]}, r"column_scales\[0\] is Half, expected fp32"),
    ],
)
def test_a_wrong_argument_is_named_with_what_was_expected(changes, message):
    with pytest.raises(ValueError, match="dobb::update: " + message):
        torch.ops.dobb.update(*arguments(**changes))


# The choice of a path.


def without_extension(monkeypatch):
    monkeypatch.setattr(extension, "load", lambda: extension.Loaded(None, "it was not built"))
    monkeypatch.setattr(dispatch, "_warned", set())


def test_a_missing_extension_is_one_warning_and_the_reference(monkeypatch, recwarn):
    without_extension(monkeypatch)
    made, gradient = segment(Shard(0, 48, 16, 8), seed=7)
    case = Case([made], [gradient])
    ours, theirs = copied(case), copied(case)
    for _ in range(2):
        kernels.update(ours.segments, ours.gradients, **SETTINGS)
        reference.update(theirs.segments, theirs.gradients, **SETTINGS)
    assert torch.equal(ours.segments[0].weight, theirs.segments[0].weight)
    messages = [str(warning.message) for warning in recwarn if warning.category is RuntimeWarning]
    assert len(messages) == 1
    assert "because the extension is missing: it was not built. To build it, with PyTorch and a C++" in messages[0]


def test_asking_for_a_missing_extension_is_an_error(monkeypatch):
    without_extension(monkeypatch)
    made, gradient = segment(Shard(0, 48, 16, 8), seed=8)
    before = made.momentum.clone()
    with pytest.raises(UnsupportedError, match=r"--dobb-backend extension cannot run on cpu: it was not built; use"):
        kernels.update([made], [gradient], **SETTINGS, backend="extension")
    assert torch.equal(made.momentum, before)


def test_the_reference_on_request_neither_warns_nor_runs_a_kernel(monkeypatch, recwarn):
    without_extension(monkeypatch)
    made, gradient = segment(Shard(0, 48, 16, 8), seed=9)
    dispatch.kernels_run.clear()
    kernels.update([made], [gradient], **SETTINGS, backend="reference")
    assert dispatch.kernels_run == {"reference": 1}
    assert not [warning for warning in recwarn if warning.category is RuntimeWarning]


@needs_extension
def test_float64_weights_take_the_reference_unless_the_extension_was_asked_for():
    made, gradient = segment(Shard(0, 48, 16, 8), seed=10)
    made = dataclasses.replace(made, weight=made.weight.double())
    dispatch.kernels_run.clear()
    kernels.update([made], [gradient], **SETTINGS)
    assert dispatch.kernels_run == {"reference": 1}
    with pytest.raises(UnsupportedError, match=r"cannot update weight10 in torch\.float64: it works on fp32"):
        kernels.update([made], [gradient], **SETTINGS, backend="extension")


def test_nothing_to_do_is_no_call(monkeypatch):
    kernels.update([], [], **SETTINGS)
    made, gradient = segment(Shard(16, 16, 16, 8), seed=11)
    dispatch.kernels_run.clear()
    assert kernels.update([made], [gradient], **SETTINGS) == []
    assert not dispatch.kernels_run


def test_the_extension_is_there_unless_nothing_can_build_it():
    """Without it the tests of the kernels are skipped, and all others pass."""
    wanted_so = ("no C++ compiler was found", "MEGATRON_DOBB_NO_EXTENSION=1 was set")
    loaded = extension.load()
    assert loaded.module is not None or any(text in loaded.reason for text in wanted_so), loaded.reason


def test_build_info_says_what_runs():
    found = subprocess.run(
        [sys.executable, "-c", "import megatron_dobb; print(megatron_dobb.build_info())"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    info = extension.build_info()
    assert found.strip() == str(info)
    assert info.extension == (C is not None)
    assert info.cpu == (KERNELS[0] if KERNELS else "reference")
    assert info.cpu_checked == (info.cpu not in ("plain", "reference"))
    assert info.cpu_rejected == ()
    assert bool(info.reason) != info.extension


@needs_extension
@pytest.mark.parametrize("shared", ["gradient", "momentum", "second segment", "copy"])
def test_memory_that_is_written_and_used_twice_is_refused_by_name(shared):
    made, gradient = segment(Shard(0, 64, 16, 8), seed=1)
    segments, gradients, copies = [made], [gradient], None
    if shared == "gradient":
        gradients = [made.weight]
    elif shared == "momentum":
        segments = [dataclasses.replace(made, momentum=made.weight)]
    elif shared == "copy":
        copies = [made.weight.view(torch.bfloat16)[:64]]
    else:
        segments, gradients = [made, made], [gradient, gradient]
    with pytest.raises(ValueError, match=r"dobb::update: \w+\[\d\] and \w+\[\d\] share memory"):
        kernels.update(segments, gradients, **SETTINGS, backend="extension", copies=copies)


@needs_extension
@pytest.mark.parametrize("rate", [math.nan, math.inf, 1e300])
def test_a_learning_rate_that_is_not_finite_is_refused_before_anything_is_changed(rate):
    made, gradient = segment(Shard(0, 64, 16, 8), seed=1)
    before = made.weight.clone()
    with pytest.raises(ValueError, match="check the learning rate"):
        kernels.update([made], [gradient], **SETTINGS | {"learning_rate": rate}, backend="extension")
    assert torch.equal(made.weight, before)


@needs_extension
def test_an_expanded_gradient_is_as_good_as_another():
    made, _ = segment(Shard(0, 64, 16, 8), seed=1)
    case = Case([made], [torch.ones(1).expand(64)])
    after = copied(case)
    kernels.update(after.segments, after.gradients, **SETTINGS, backend="extension")
    check_against_float64(case, after, SETTINGS, **rounding_of(C.chosen_cpu_kernel()))


@needs_extension
def test_an_extension_of_other_sources_is_not_used(monkeypatch):
    monkeypatch.setattr(C, "sources", "0123456789abcdef")
    extension.load.cache_clear()
    try:
        assert extension.load().module is None
        assert "built from other sources" in extension.load().reason
    finally:
        monkeypatch.undo()
        extension.load.cache_clear()


@pytest.mark.parametrize("precision", ["exact", "bf16"])
def test_plain_pytorch_finds_exact_signs_also_where_the_process_allows_less_than_fp32(monkeypatch, precision):
    seen = []
    original = reference.update

    def update(*args, **settings):
        seen.append(torch.backends.cuda.matmul.fp32_precision)
        original(*args, **settings)

    monkeypatch.setattr(reference, "update", update)
    segment = Segment("w", Shard(0, 8, 4, 2), 2, 4, torch.ones(8), torch.zeros(8), torch.eye(2).repeat(2, 1, 1))
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        kernels.update(
            [segment],
            [torch.ones(8)],
            learning_rate=0.1,
            weight_decay=0.0,
            momentum=0.9,
            nesterov=False,
            update_scale=0.2,
            precision=precision,
            backend="reference",
        )
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
    assert seen == ["ieee" if precision == "exact" else "tf32"]
