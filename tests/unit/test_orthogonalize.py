"""`Q <- orth(A Q)` against float64, on every kind of moment that training can produce."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moment_kinds import cases, equal_features, float64_error, generator, moments, normalised, random_basis

from megatron_dobb.errors import ConfigError
from megatron_dobb.methods.dobb import orthogonalize
from megatron_dobb.methods.dobb.orthogonalize import householder, orthonormality_error, refresh_basis
from megatron_dobb.numerics.precision import full_precision

METHODS = ("householder", "cholesky", "eigh")
ITERATIVE = ("householder", "cholesky")
WIDTHS = (1, 7, 32, 48)
DAMPING = {"householder": 0.0, "cholesky": 1e-5}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("method", METHODS)
def test_every_moment_gets_a_complete_orthonormal_basis_without_fallback(method, width):
    moment, start = cases(width)
    basis, fell_back = refresh_basis(moment, start, method=method)
    assert basis.dtype == torch.float32
    assert basis.shape == moment.shape
    assert float64_error(basis) <= 1e-5
    assert not fell_back.any()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("method", ITERATIVE)
def test_a_refresh_is_one_step_of_subspace_iteration(method, width):
    """`Q_new^T A Q` is upper triangular: column i lies in the span of the first i + 1 columns of `A Q`."""
    moment, start = cases(width)
    basis, _ = refresh_basis(moment, start, method=method)
    product = (normalised(moment) + DAMPING[method] * torch.eye(width)) @ start.double()
    below = (basis.double().mT @ product).tril(-1).abs().amax((1, 2))
    assert (below <= 2e-6 * product.abs().amax((1, 2))).all()


@pytest.mark.parametrize("method", ITERATIVE)
def test_a_well_conditioned_refresh_equals_float64_qr_up_to_column_signs(method):
    vectors = random_basis(32, seed=1)
    moment = ((vectors * torch.linspace(1, 3, 32).double()) @ vectors.T)[None]
    start = random_basis(32, seed=2)[None]
    basis, _ = refresh_basis(moment.float(), start.float(), method=method, iterations=3)
    expected = start
    for _ in range(3):
        expected = torch.linalg.qr((normalised(moment) + DAMPING[method] * torch.eye(32)) @ expected).Q
    signs = (basis.double() * expected).sum(1, keepdim=True).sign()
    assert (basis * signs - expected).abs().max() <= 1e-5


def test_eigh_diagonalises_every_moment():
    moment, start = cases(48)
    basis = refresh_basis(moment, start, method="eigh").basis.double()
    rotated = basis.mT @ normalised(moment) @ basis
    rotated.diagonal(dim1=1, dim2=2).zero_()
    assert rotated.abs().max() <= 2e-5


@pytest.mark.parametrize("method", ITERATIVE)
def test_iterating_converges_to_the_eigenbasis(method):
    vectors = random_basis(7, seed=3)
    moment = ((vectors * 3.0 ** -torch.arange(7.0).double()) @ vectors.T).float()[None]
    basis = random_basis(7, seed=4).float()[None]
    for _ in range(20):
        basis, _ = refresh_basis(moment, basis, method=method)
    leading = torch.linalg.eigh(moment[0].double()).eigenvectors.flip(1)
    for rank in range(1, 7):
        found, expected = basis[0, :, :rank].double(), leading[:, :rank]
        assert (found @ found.T - expected @ expected.T).abs().max() <= 1e-3


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=20, deadline=None)
@given(exponent=st.integers(-90, 90))
def test_a_power_of_two_on_the_moment_changes_no_bit_of_the_basis(method, exponent):
    moment, start = moments(7)[[0, 5, 7, 12]], random_basis(7).float().expand(4, 7, 7)
    scaled = refresh_basis(moment * 2.0**exponent, start, method=method).basis
    assert torch.equal(scaled, refresh_basis(moment, start, method=method).basis)


@settings(max_examples=60, deadline=None)
@given(
    method=st.sampled_from(METHODS),
    width=st.integers(1, 12),
    tokens=st.integers(0, 14),
    spread=st.integers(0, 18),
    scale=st.integers(-35, 35),
    seed=st.integers(0, 1000),
)
def test_no_scale_rank_or_spread_of_features_breaks_orthonormality(method, width, tokens, spread, scale, seed):
    x = torch.randn(tokens, width, dtype=torch.float64, generator=generator(seed))
    x *= torch.logspace(0, -spread, width, dtype=torch.float64)
    moment = (10.0**scale * x.T @ x).float()[None]
    basis, _ = refresh_basis(moment, random_basis(width, seed).bfloat16()[None], method=method, iterations=2)
    assert float64_error(basis) <= 1e-5


@pytest.mark.parametrize("method", ITERATIVE)
def test_dead_features_stay_exactly_unmixed_over_refreshes_with_bf16_bases(method):
    width, dead = 48, torch.tensor([0, 5, 6, 31, 40, 47])
    basis = torch.eye(width).bfloat16()[None]
    for step in range(6):
        x = torch.randn(30, width, generator=generator(step))  # fewer tokens than live features
        x[:, dead] = 0
        basis = refresh_basis((x.T @ x)[None], basis, method=method).basis.bfloat16()
        assert torch.equal(basis[0, dead], torch.eye(width).bfloat16()[dead])
        assert torch.equal(basis[0, :, dead], torch.eye(width).bfloat16()[:, dead])
        assert (basis[0, 1] != 0).sum() > width // 2


def test_a_block_that_breaks_cholesky_falls_back_to_householder_alone_and_is_reported():
    width = 192
    moment = torch.stack([torch.eye(width), equal_features(width), torch.eye(width)])
    start = random_basis(width).bfloat16().float().expand_as(moment)
    basis, fell_back = refresh_basis(moment, start, method="cholesky", iterations=2)
    assert fell_back.tolist() == [False, True, False]
    assert float64_error(basis) <= 1e-5
    by_householder = refresh_basis(moment[1:2], start[1:2], method="householder", iterations=2).basis
    assert torch.equal(basis[1:2], by_householder)


@pytest.mark.parametrize("sign", ["a basis that is not orthonormal", "a breakdown that is reported"])
def test_either_sign_of_failure_makes_cholesky_fall_back(monkeypatch, sign):
    if sign == "a basis that is not orthonormal":
        monkeypatch.setattr(orthogonalize, "_CHOLESKY_PASSES", 1)
    else:
        factorise = torch.linalg.cholesky_ex
        monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda gram: (factorise(gram).L, torch.ones(len(gram))))
    moment, start = cases(32)
    basis, fell_back = refresh_basis(moment[:13], start[13:26], method="cholesky")
    assert fell_back[4]  # spectrum i^-6
    assert torch.equal(basis[4:5], refresh_basis(moment[4:5], start[17:18], method="householder").basis)


def test_dependent_columns_of_the_old_basis_are_completed():
    start = random_basis(7).float().repeat(3, 1, 1)
    start[0, :, 1] = start[0, :, 0]
    start[1, :, 2] = 0
    start[2] = 0
    for method in ITERATIVE:
        basis, _ = refresh_basis(moments(7)[:3], start, method=method)
        assert float64_error(basis) <= 1e-5


def test_householder_stays_orthonormal_when_a_wide_block_has_many_equal_features():
    """Reflections alone end at 1.8e-5."""
    token = torch.randn(1, 2, generator=generator(2)).repeat(1, 512)
    assert float64_error(householder((token.T @ token)[None])) <= 1e-5


def test_eigh_retries_in_float64_and_then_falls_back_to_householder(monkeypatch):
    eigh = torch.linalg.eigh
    moment, start = moments(7), random_basis(7).float().expand(13, 7, 7)
    exact = refresh_basis(moment, start, method="eigh").basis

    def fail_in(*dtypes):
        def failing(matrices):
            if matrices.dtype in dtypes:
                raise torch.linalg.LinAlgError("did not converge")
            return eigh(matrices)

        monkeypatch.setattr(torch.linalg, "eigh", failing)

    fail_in(torch.float32)
    basis, fell_back = refresh_basis(moment, start, method="eigh")
    assert not fell_back.any()
    assert ((basis[0] * exact[0]).sum(0).abs() - 1).abs().max() <= 1e-5
    fail_in(torch.float32, torch.float64)
    basis, fell_back = refresh_basis(moment, start, method="eigh")
    assert fell_back.all()
    assert torch.equal(basis, refresh_basis(moment, start, method="householder").basis)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_moment_neither_raises_nor_touches_its_neighbours(method, bad):
    moment, start = moments(7)[:3], random_basis(7).float().expand(3, 7, 7)
    expected = refresh_basis(moment, start, method=method).basis
    moment[1, 2, 3] = bad
    basis, fell_back = refresh_basis(moment, start, method=method)
    assert not fell_back.any()
    assert float64_error(basis) <= 1e-5
    assert torch.equal(basis[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("method", ITERATIVE)
def test_a_zero_moment_keeps_the_basis_up_to_column_signs(method):
    start = random_basis(7).float()[None]
    basis, _ = refresh_basis(torch.zeros(1, 7, 7), start, method=method)
    assert (basis.abs() - start.abs()).abs().max() <= 1e-6


@pytest.mark.parametrize("method", METHODS)
def test_no_blocks_are_no_work(method):
    empty = torch.zeros(0, 5, 5)
    basis, fell_back = refresh_basis(empty, empty.bfloat16(), method=method, iterations=2)
    assert basis.shape == (0, 5, 5)
    assert fell_back.shape == orthonormality_error(basis).shape == (0,)


@pytest.mark.parametrize("method", METHODS)
def test_low_precision_allowed_elsewhere_changes_no_bit_and_is_restored(method):
    moment, start = cases(32)
    expected = refresh_basis(moment, start, method=method).basis
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            basis, _ = refresh_basis(moment, start, method=method)
            with full_precision(moment.device):
                assert torch.backends.cuda.matmul.fp32_precision == "ieee"
                assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(basis, expected)


@pytest.mark.parametrize("method", METHODS)
def test_the_inputs_are_left_alone(method):
    moment, start = cases(7)
    moment_before, start_before = moment.clone(), start.clone()
    refresh_basis(moment, start, method=method, iterations=2)
    assert torch.equal(moment, moment_before)
    assert torch.equal(start, start_before)


def test_orthonormality_error_is_the_largest_entry_of_the_gram_minus_the_identity():
    basis = torch.stack([torch.eye(3), 2 * torch.eye(3), torch.full((3, 3), torch.nan)])
    basis[0, 0, 1] = 0.25
    error = orthonormality_error(basis)
    assert error[:2].tolist() == [0.25, 3.0]
    assert error[2].isnan()


def test_an_unknown_method_and_no_iterations_are_errors_that_name_the_flag():
    block = torch.eye(3)[None]
    with pytest.raises(ConfigError, match=r"--dobb-qr lu is unknown; use one of householder, cholesky, eigh"):
        refresh_basis(block, block, method="lu")
    with pytest.raises(ConfigError, match=r"--dobb-iterations 0 is too few .* use 1 or more"):
        refresh_basis(block, block, method="householder", iterations=0)
