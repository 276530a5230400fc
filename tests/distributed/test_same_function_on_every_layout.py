"""Dobb computes the same function on every parallel layout, in the four senses of docs/layouts.md.

A GPT and a mixture of experts, the same global batches, fp32; the reference is one process with one micro-batch. The
module prints a table of what it measured. Left out is the K part of the QKV biases, whose gradient is analytically
zero.
"""

import functools

import flips
import pytest
import torch
from global_form import merge, merge_captures
from layout_runs import Layout
from layout_senses import (
    BETA,
    DENSE,
    EXPERTS,
    POLICIES,
    STEPS,
    TOLERANCE,
    fixed_basis,
    float64_moments,
    perturbed_losses,
    reference_of,
    train_in_every_sense,
)
from whole_model import is_expert

from testbed import processes, tiers

SPREAD_FACTOR = 4.0
"""A loss may lie this many times as far from the middle of the perturbed runs as the farthest of them has been: their
noise comes once, in the initial weights, while the rounding of another layout comes in every step. Found: up to 2.2."""

ADAMW_TOLERANCE = 1e-4
"""For AdamW's parameters, over their RMS: among them are biases that start at zero. Found: up to 1e-5."""

ROUNDING = 4e-6
"""What the rounding of a loss near 4 adds to the spread: some units in the last place."""

# Most of the time goes into collectives of every micro-batch: larger layouts have no more of these than they need.
LAYOUTS = [
    Layout(micro_batch=6),
    Layout(2, micro_batch=6),
    Layout(3, micro_batch=2),
    Layout(4, micro_batch=3),
    Layout(2, tensor=2, micro_batch=12),
    Layout(2, tensor=2, sequence_parallel=True, micro_batch=12),
    Layout(4, tensor=2, sequence_parallel=True, micro_batch=12),
    Layout(3, micro_batch=4, bucket_size=20_000),
    Layout(2, pipeline=2, micro_batch=6),
    Layout(2, pipeline=2, chunks=2, micro_batch=6),
    Layout(2, context=2, micro_batch=12),
    Layout(4, instances=2, micro_batch=6),
    Layout(2, pipeline=2, chunks=2, micro_batch=6, recompute="selective"),
    # Products.
    Layout(4, pipeline=2, context=2, micro_batch=12),
    Layout(8, tensor=2, pipeline=2, sequence_parallel=True, micro_batch=6),
    Layout(8, tensor=2, context=2, micro_batch=12, recompute="full"),
    # A mixture of experts.
    Layout(2, expert=2, experts=True, micro_batch=12),
    Layout(4, expert=2, experts=True, micro_batch=6),
    Layout(4, tensor=2, expert=2, expert_tensor=2, sequence_parallel=True, experts=True, micro_batch=12),
    Layout(2, tensor=2, expert=2, sequence_parallel=True, experts=True, micro_batch=12, recompute="selective"),
    Layout(4, pipeline=2, chunks=2, expert=2, experts=True, micro_batch=6),
    Layout(4, tensor=2, pipeline=2, expert=2, sequence_parallel=True, experts=True, micro_batch=12),
]


def sizes(layout):
    """All kinds of parallelism of a layout: every two come together in the quick tier."""
    return min(layout.data, 2), layout.tensor, layout.pipeline, layout.context, layout.expert


# Two layouts of eight ranks took longer than the four others together.
QUICK = tiers.pairwise([layout for layout in LAYOUTS if layout.world <= 4], sizes)


# What the tests share.


@functools.cache
def reference(layout):
    return processes.run(1, train_in_every_sense, layout, timeout=300)[0]


@functools.cache
def outcome(layout):
    return processes.run(layout.world, train_in_every_sense, layout, reference(reference_of(layout)), timeout=300)


@functools.cache
def exact_moments(layout):
    return processes.run(1, float64_moments, layout)[0]


@functools.cache
def perturbed(layout):
    """The middle loss curve of the perturbed runs, and how far from it any of them has been up to each step."""
    curves = torch.tensor(processes.run(1, perturbed_losses, layout, timeout=300)[0]).double()
    middle = curves.median(dim=0).values
    return middle, (curves - middle).abs().amax(dim=0).cummax(dim=0).values + ROUNDING


@pytest.fixture(scope="module")
def table(request):
    """Rows of measured values by layout, printed when the module is done."""
    rows = {}
    yield rows
    columns = {
        "first": "A, first refresh",
        "later": "A / Q, later refreshes",
        "frozen": "frozen bases: Dobb / AdamW weights, flips",
        "losses": "loss, in spreads",
    }
    lines = ["| Layout | " + " | ".join(columns.values()) + " |", "|---" * (1 + len(columns)) + "|"]
    lines += [f"| {layout} | " + " | ".join(row.get(c, "") for c in columns) + " |" for layout, row in rows.items()]
    flipped = [f"{layout}: {flip}" for layout, row in rows.items() for flip in row.get("flips", ())]
    lines += ["Flipped signs (magnitude of the coefficient over the RMS of its row's block):", *(flipped or ["none"])]
    for model in (DENSE, EXPERTS) if perturbed.cache_info().currsize == 2 else ():
        _, spread = perturbed(model)
        lines.append(
            f"{model}: the perturbed losses spread {spread[0]:.0e} in the first step, {spread[-1]:.0e} in the last."
        )
    with request.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        print("", *lines, sep="\n")


def shown(value):
    return f"{value:.0e}" if value else "0"


def row_of(table, layout):
    return table.setdefault(str(layout), {})


def relative_error(found, exact):
    """Largest error of a block's entries over the largest entry of the block."""
    return max(float(((found[n] - exact[n]).abs().amax((1, 2)) / exact[n].abs().amax((1, 2))).max()) for n in exact)


def basis_error(found, exact):
    """Largest difference of any entry once every column has the sign that fits best."""
    signs = {n: (found[n] * exact[n]).sum(1, keepdim=True).sign() for n in exact}
    return max(float((found[n] * signs[n] - exact[n]).abs().max()) for n in exact)


every_layout = pytest.mark.parametrize("layout", tiers.quick(LAYOUTS, QUICK), ids=str)
references_and_every_layout = pytest.mark.parametrize(
    "layout", tiers.quick([DENSE, EXPERTS, *LAYOUTS], [DENSE, EXPERTS, *QUICK]), ids=str
)


# Sense 1.


@references_and_every_layout
@pytest.mark.parametrize("policy", POLICIES)
def test_first_refresh_takes_the_same_tokens_to_the_float64_moment(layout, policy, table):
    exact = exact_moments(reference_of(layout))[policy]
    ranks = [reference(layout)] if layout in (DENSE, EXPERTS) else outcome(layout)
    captures, snapshots = zip(*(rank["first"][policy] for rank in ranks), strict=True)
    sums, tokens = merge_captures(captures)
    moments = merge(snapshots).moments
    if policy == "first":  # experts take whole micro-batches
        sums, tokens, moments = ({n: v for n, v in d.items() if not is_expert(n)} for d in (sums, tokens, moments))
    assert tokens == {name: count for name, (_, count) in exact.items()}
    assert relative_error(sums, {name: moment * count for name, (moment, count) in exact.items()}) <= TOLERANCE
    error = relative_error(moments, {name: moment * (1 - BETA) for name, (moment, _) in exact.items()})
    row_of(table, layout)["first"] = shown(error)
    assert error <= TOLERANCE


# Sense 2.


@every_layout
def test_later_refreshes_from_the_same_state_give_the_same_moments_and_bases(layout, table):
    ranks = outcome(layout)
    moment_errors, basis_errors = {}, {}
    for step, (_, after) in reference(reference_of(layout))["later"].items():
        state = merge([rank["later"][step] for rank in ranks])
        moment_errors[step] = relative_error(state.moments, after.moments)
        basis_errors[step] = basis_error(state.bases, after.bases)
    assert len(basis_errors) == 7
    first_basis_error = basis_errors.pop(0)  # of A Q with Q the identity: no column has been tempered yet
    assert first_basis_error <= 1e-4
    row_of(table, layout)["later"] = f"{shown(max(moment_errors.values()))} / {shown(max(basis_errors.values()))}"
    assert max(moment_errors.values()) <= TOLERANCE
    assert max(basis_errors.values()) <= TOLERANCE


# Sense 3.


@every_layout
def test_weights_agree_with_frozen_bases_but_for_listed_flips(layout, table):
    expected = reference(reference_of(layout))["frozen"]["states"][-1]
    ranks = [rank["frozen"] for rank in outcome(layout)]
    errors = [error for rank in ranks for error in rank["errors"]]
    assert not errors, errors[0]
    found = sorted({flip for rank in ranks for flip in rank["flips"]}, key=str)
    largest = max(rank["largest"] for rank in ranks)
    state = merge([rank["end"] for rank in ranks])
    others = {}
    for name, value in state.parameters.items():
        exact = expected.parameters[name]
        if name.endswith("linear_qkv.bias"):
            value, exact = without_keys(value), without_keys(exact)
        if name not in state.momenta:
            others[name] = float((value - exact).abs().max() / exact.square().mean().sqrt())
    row = row_of(table, layout)
    row["flips"] = found
    row["frozen"] = f"{shown(largest)} / {shown(max(others.values()))}, {len(found)}"
    assert largest <= TOLERANCE
    assert max(others.values()) <= ADAMW_TOLERANCE, max(others, key=others.get)
    assert len(found) <= 1e-5 * STEPS * sum(m.numel() for m in state.momenta.values()), "not a few flips"


def without_keys(bias):
    """A QKV bias without its K part: Megatron stores the three parts head by head."""
    return bias.unflatten(0, (4, 3, -1))[:, [0, 2]]


# Sense 4.


@every_layout
def test_loss_curve_lies_within_the_spread_of_perturbed_single_process_runs(layout, table):
    middle, spread = perturbed(reference_of(layout))
    ranks = [torch.tensor(rank["losses"]).double() for rank in outcome(layout)]
    assert all(torch.equal(curve, ranks[0]) for curve in ranks), "ranks report different losses"
    ratio = float(((ranks[0] - middle).abs() / spread).max())
    row_of(table, layout)["losses"] = f"{ratio:.1f}"
    assert middle[-1] < middle[0] - 0.5, "the model does not learn"
    assert ratio <= SPREAD_FACTOR


# The explanation of flips is strict.


def some_step(changed_sign_of):
    generator = torch.Generator().manual_seed(3)
    basis = fixed_basis("some weight", 32)
    reference = flips.coefficients(torch.randn(5, 32, generator=generator), basis)
    reference[2, 1, 4] = 1e-7
    signs = reference.sign()
    signs[changed_sign_of] *= -1
    difference = flips.directions(signs - reference.sign(), basis) * -1e-3
    return difference, reference, basis


def test_flip_of_a_tiny_coefficient_is_listed_and_fully_explained():
    difference, reference, basis = some_step((2, 1, 4))
    found, explained = flips.find(difference, reference, basis, step_size=1e-3, tolerance=1e-9)
    assert [(f.row, f.block, f.column) for f in found] == [(2, 1, 4)]
    torch.testing.assert_close(explained, difference, rtol=0, atol=1e-9)


def test_flip_of_an_ordinary_coefficient_is_an_error():
    with pytest.raises(AssertionError, match="1 signs differ where rounding cannot explain it"):
        flips.find(*some_step((3, 0, 2)), step_size=1e-3, tolerance=1e-9)


def test_difference_that_is_no_flip_is_an_error():
    difference, reference, basis = some_step((2, 1, 4))
    difference[0, 0] += 1e-5
    with pytest.raises(AssertionError, match=r"differs by .* without a flip"):
        flips.find(difference, reference, basis, step_size=1e-3, tolerance=1e-6)
