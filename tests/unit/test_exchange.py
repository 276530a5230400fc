"""A refresh in one process: what a group keeps, counts and refuses. `test_exchange_ranks` has the traffic."""

import math

import pytest
import torch

from megatron_dobb.errors import CaptureError, LayoutError
from megatron_dobb.methods.dobb.capture import MomentSum
from megatron_dobb.methods.dobb.moment import gram
from megatron_dobb.methods.dobb.orthogonalize import orthonormality_error
from megatron_dobb.methods.dobb.refresh_group import HeldWeight, RefreshCounts, RefreshGroup, share_out

WIDTH = 4
HOW = {"beta": 0.9, "method": "householder", "iterations": 1}
WEIGHTS = [
    HeldWeight("b", 2, WIDTH, (0, 1)),
    HeldWeight("a", 3, WIDTH, (0, 1, 2)),
    HeldWeight("expert", 1, WIDTH, (0,), may_be_idle=True),
]


def group(weights=WEIGHTS, moment_dtype=torch.float32, basis_dtype=torch.float32):
    owners = share_out({WIDTH: weights}, None)[WIDTH]
    return RefreshGroup(
        weights, None, owners, moment_dtype=moment_dtype, basis_dtype=basis_dtype, device=torch.device("cpu")
    )


def activations(blocks, seed, tokens=20):
    return torch.randn(tokens, blocks * WIDTH, generator=torch.Generator().manual_seed(seed))


def sums(**inputs):
    """Captured sums of the given activations; a weight that is not named saw none."""
    entries = {weight.key: MomentSum() for weight in WEIGHTS}
    for key, x in inputs.items():
        entries[key] = MomentSum(gram(x, WIDTH), len(x))
    return entries


def inputs(seed):
    return {"a": activations(3, seed), "b": activations(2, seed + 100), "expert": activations(1, seed + 200)}


def true_mean(x):
    blocks = x.double().view(len(x), -1, WIDTH)
    return torch.einsum("tjc,tjd->jcd", blocks, blocks) / len(x)


def moment_of(made, key):
    return made.moment[[i for i, (name, _) in enumerate(made.owned) if name == key]]


def test_a_new_group_starts_from_zero_moments_and_identity_bases():
    made = group()
    assert not made.moment.any()
    assert torch.equal(made.basis_of("a"), torch.eye(WIDTH).repeat(3, 1, 1))
    assert torch.equal(made.basis_of("b"), torch.eye(WIDTH).repeat(2, 1, 1))


def test_moments_are_the_moving_average_of_the_mean_over_tokens():
    made = group()
    expected = {"a": 0, "b": 0}
    for step in range(3):
        seen = inputs(step)
        made.refresh(sums(**seen), **HOW)
        for key in expected:
            expected[key] = 0.9 * expected[key] + 0.1 * true_mean(seen[key])
            torch.testing.assert_close(moment_of(made, key).double(), expected[key], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("method", ["householder", "cholesky", "eigh"])
def test_bases_are_orthonormal_and_turn_towards_the_eigenvectors(method):
    made = group()
    for step in range(40):
        made.refresh(sums(**inputs(0)), **(HOW | {"method": method}))
        assert orthonormality_error(made.basis).max() < 1e-5, step
    basis, moment = made.basis_of("a").double(), moment_of(made, "a").double()
    rotated = basis.mT @ moment @ basis
    off = rotated - torch.diag_embed(rotated.diagonal(dim1=-2, dim2=-1))
    assert off.abs().max() < 0.05 * rotated.abs().max()


def test_a_view_of_a_basis_sees_every_refresh():
    made = group()
    view = made.basis_of("b")
    made.refresh(sums(**inputs(0)), **HOW)
    assert view.data_ptr() == made.basis_of("b").data_ptr()
    assert torch.equal(view, made.basis_of("b"))
    assert not torch.equal(view, torch.eye(WIDTH).repeat(2, 1, 1))


def test_sums_are_freed_once_they_are_packed():
    entries = sums(**inputs(0))
    group().refresh(entries, **HOW)
    assert all(entry.total is None for entry in entries.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_and_bases_keep_their_storage_type(dtype):
    made = group(moment_dtype=dtype, basis_dtype=dtype)
    made.refresh(sums(**inputs(0)), **HOW)
    assert made.moment.dtype == made.basis.dtype == dtype
    error = orthonormality_error(made.basis).max().item()
    assert error < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_block_keeps_its_moment_and_basis_and_is_counted(value):
    made = group()
    made.refresh(sums(**inputs(0)), **HOW)
    before = made.moment.clone(), made.basis.clone()
    spoilt = inputs(1)
    spoilt["a"][3, WIDTH] = value  # in block 1
    assert made.refresh(sums(**spoilt), **HOW) == RefreshCounts(skipped=1, fallbacks=0)
    kept = [torch.equal(old[i], new[i]) for i in range(len(made.owned)) for old, new in [(before[0], made.moment)]]
    assert [block for block, same in zip(made.owned, kept, strict=True) if same] == [("a", 1)]
    kept = [torch.equal(before[1][i], made.basis[i]) for i in range(len(made.held))]
    assert [block for block, same in zip(made.held, kept, strict=True) if same] == [("a", 1)]
    assert made.moment.isfinite().all()
    assert made.basis.isfinite().all()


def test_all_zero_activations_keep_the_moment_and_basis_and_are_counted():
    made = group()
    made.refresh(sums(**inputs(0)), **HOW)
    before = moment_of(made, "b").clone(), made.basis_of("b").clone()
    assert made.refresh(sums(**(inputs(1) | {"b": torch.zeros(20, 8)})), **HOW) == RefreshCounts(skipped=2)
    assert torch.equal(moment_of(made, "b"), before[0])
    assert torch.equal(made.basis_of("b"), before[1])


def test_an_idle_expert_keeps_its_state_and_is_counted():
    made = group()
    made.refresh(sums(**inputs(0)), **HOW)
    before = moment_of(made, "expert").clone(), made.basis_of("expert").clone()
    seen = inputs(1)
    del seen["expert"]
    assert made.refresh(sums(**seen), **HOW) == RefreshCounts(skipped=1)
    assert torch.equal(moment_of(made, "expert"), before[0])
    assert torch.equal(made.basis_of("expert"), before[1])


def test_a_weight_without_tokens_is_an_error_that_names_it():
    seen = inputs(0)
    del seen["b"]
    with pytest.raises(CaptureError, match=r"no input activation was captured for b on a refresh step.*--dobb-exclude"):
        group().refresh(sums(**seen), **HOW)


def test_a_block_that_nobody_holds_is_an_error():
    with pytest.raises(LayoutError, match="no rank holds a row of block 1"):
        group([HeldWeight("a", 3, WIDTH, (0, 2))])
    with pytest.raises(LayoutError, match="a has 3 blocks, but the ranks of its data-parallel group hold only 2"):
        group([HeldWeight("a", 3, WIDTH, (0, 1))])
