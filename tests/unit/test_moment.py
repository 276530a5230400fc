"""Sums, moving average and refresh of the moment blocks against float64 statements of docs/how-it-works.md."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_dobb.errors import BlockError
from megatron_dobb.methods.dobb.moment import fold, gram, pack_triangle, refresh_, unpack_triangle

BETA = 0.95
METHODS = ("householder", "cholesky", "eigh")


def tokens_of(count: int, features: int, seed: int = 0) -> Tensor:
    return torch.randn(count, features, generator=torch.Generator().manual_seed(seed))


def blockwise_sums(x: Tensor, width: int) -> Tensor:
    """`sum x_j x_j^T` in float64, block by block."""
    blocks = x.double().flatten(0, -2).split(width, dim=-1)
    return torch.stack([block.T @ block for block in blocks])


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(bits(left), bits(right))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [1, 4, 24])
def test_gram_agrees_with_float64_over_many_tokens_of_any_leading_shape(dtype, width):
    x = (tokens_of(20_000, 24) + 1).unflatten(0, (5, 4, 1000)).to(dtype)
    total, expected = gram(x, width), blockwise_sums(x, width)
    assert total.dtype == torch.float32
    scale = expected.diagonal(dim1=1, dim2=2).sqrt()
    assert ((total - expected).abs() <= 5e-6 * scale[:, :, None] * scale[:, None, :]).all()


def test_gram_of_a_wide_layer_never_forms_the_products_of_all_pairs_of_features():
    """All pairs would take 160 GB."""
    assert torch.equal(gram(torch.ones(3, 200_000), 1), torch.full((200_000, 1, 1), 3.0))


def test_gram_of_no_tokens_is_zero():
    assert torch.equal(gram(torch.empty(0, 3, 8), 4), torch.zeros(2, 4, 4))


def test_gram_ignores_strides_autograd_and_autocast():
    x = tokens_of(8, 30).requires_grad_()
    expected = gram(x.detach()[:, ::2].contiguous(), 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total = gram(x[:, ::2], 5)
    assert not total.requires_grad
    assert torch.equal(total, expected)
    by_sequence = x.detach()[:, ::2].unflatten(0, (2, 4)).transpose(0, 1)
    assert torch.allclose(gram(by_sequence, 5), expected, atol=1e-5)


def test_a_non_finite_activation_reaches_only_its_own_block():
    x = tokens_of(9, 12)
    x[4, 5] = torch.nan
    finite = gram(x, 4).isfinite().flatten(1).all(1)
    assert finite.tolist() == [True, False, True]


@pytest.mark.parametrize("width", [0, 5])
def test_a_width_that_does_not_divide_the_features_is_an_error(width):
    with pytest.raises(BlockError, match=f"block width {width} does not divide the 12 features"):
        gram(torch.ones(2, 12), width)


@settings(max_examples=60, deadline=None)
@given(count=st.integers(0, 4), width=st.integers(1, 20), seed=st.integers(0, 99), half=st.booleans())
def test_one_triangle_carries_a_symmetric_block_bit_for_bit(count, width, seed, half):
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, 3e38])
    drawn = tokens_of(count * width, width, seed).view(count, width, width)
    drawn = torch.where(drawn > 1, special[(drawn.abs() * 1000).long() % 7], drawn)
    blocks = torch.where(torch.ones(width, width).tril().bool(), drawn, drawn.mT)
    blocks = blocks.bfloat16() if half else blocks
    packed = pack_triangle(blocks)
    assert packed.shape == (count, width * (width + 1) // 2)
    assert same_bits(unpack_triangle(packed, width), blocks)
    assert same_bits(pack_triangle(unpack_triangle(packed, width)), packed)


def test_sums_of_two_ranks_may_be_added_as_triangles():
    first, second = gram(tokens_of(7, 12, 1), 6), gram(tokens_of(5, 12, 2), 6)
    added = unpack_triangle(pack_triangle(first) + pack_triangle(second), 6)
    expected = blockwise_sums(torch.cat([tokens_of(7, 12, 1), tokens_of(5, 12, 2)]), 6)
    assert torch.allclose(added.double(), expected, atol=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.95, 1.0])
def test_fold_is_the_moving_average_of_the_token_mean(beta):
    moment, expected = torch.zeros(3, 4, 4), torch.zeros(3, 4, 4).double()
    for step in range(5):
        x = tokens_of(10 + step, 12, seed=step)
        tokens = torch.full((3,), 10.0 + step)
        assert fold(moment, gram(x, 4), tokens, beta=beta).all()
        expected = beta * expected + (1 - beta) * blockwise_sums(x, 4) / (10 + step)
    assert torch.allclose(moment.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_bf16_moment_is_averaged_in_fp32_and_rounded_once():
    moment, total = gram(tokens_of(9, 8, 1), 4).bfloat16(), gram(tokens_of(9, 8, 2), 4)
    wide, sums = moment.float(), total.clone()
    fold(moment, total, torch.full((2,), 9.0), beta=BETA)
    fold(wide, sums, torch.full((2,), 9.0), beta=BETA)
    assert same_bits(moment, wide.bfloat16())


def unusable(dtype: torch.dtype) -> list[tuple[str, Tensor, float]]:
    """Sums and token counts that must not enter a moment kept in `dtype`."""
    good = gram(tokens_of(9, 4), 4)[0]
    nan, infinite, corner = good.clone(), good.clone(), torch.zeros(4, 4)
    nan[1, 2] = torch.nan
    infinite[0, 0] = torch.inf
    corner[3, 0] = -torch.inf
    cases = [
        ("zero sums", torch.zeros(4, 4), 9.0),
        ("NaN", nan, 9.0),
        ("Inf", infinite, 9.0),
        ("-Inf off the diagonal", corner, 9.0),
        ("no tokens", torch.zeros(4, 4), 0.0),
        ("sums without tokens", good, 0.0),
        ("negative tokens", good, -9.0),
        ("NaN tokens", good, torch.nan),
        ("infinite tokens", good, torch.inf),
        ("a mean that underflows", torch.full((4, 4), 1e-45), 1e6),
    ]
    if dtype == torch.bfloat16:
        cases.append(("a mean that overflows bf16", torch.full((4, 4), 3.4e38), 1.0))
    return cases


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unusable_blocks_keep_moment_and_basis_bit_for_bit_and_are_counted(method, dtype):
    names, sums, counts = zip(*unusable(dtype), strict=True)
    good = gram(tokens_of(9, 4), 4)[0]
    total, tokens = torch.stack([*sums, good]), torch.tensor([*counts, 9.0])
    # A kept block may hold anything, down to the sign of a zero.
    moment = torch.full((len(tokens), 4, 4), -0.0).to(dtype)
    basis = torch.linalg.qr(tokens_of(4 * len(tokens), 4).view(-1, 4, 4)).Q.to(dtype)
    old_moment, old_basis = moment.clone(), basis.clone()
    skipped, fallbacks = refresh_(moment, basis, total, tokens, beta=0.0, method=method)
    for i, name in enumerate(names):
        assert same_bits(moment[i], old_moment[i]), name
        assert same_bits(basis[i], old_basis[i]), name
    assert (skipped.item(), fallbacks.item()) == (len(names), 0)
    assert torch.allclose(moment[-1].float(), good / 9, rtol=1e-2)
    assert not same_bits(basis[-1], old_basis[-1])


@pytest.mark.parametrize("method", METHODS)
def test_a_poisoned_moment_is_skipped_and_harms_nothing(method):
    moment, basis = torch.zeros(3, 4, 4), torch.eye(4).repeat(3, 1, 1)
    moment[1], basis[1] = torch.nan, torch.inf
    total, tokens = gram(tokens_of(9, 12), 4), torch.full((3,), 9.0)
    assert refresh_(moment, basis, total, tokens, beta=BETA, method=method) == (1, 0)
    assert moment[1].isnan().all()
    assert basis[1].isinf().all()
    assert moment[[0, 2]].isfinite().all()
    assert basis[[0, 2]].isfinite().all()


@pytest.mark.parametrize("iterations", [1, 2])
def test_refreshes_follow_the_float64_algorithm_up_to_column_signs(iterations):
    moment, basis = torch.zeros(2, 6, 6), torch.eye(6).repeat(2, 1, 1)
    expected_moment, expected_basis = moment.double(), basis.double()
    for step in range(4):
        x = tokens_of(60, 12, seed=step) * torch.linspace(1, 2, 12)
        counts = refresh_(
            moment,
            basis,
            gram(x, 6),
            torch.full((2,), 60.0),
            beta=BETA,
            method="householder",
            iterations=iterations,
        )
        expected_moment = BETA * expected_moment + (1 - BETA) * blockwise_sums(x, 6) / 60
        for _ in range(iterations):
            expected_basis = torch.linalg.qr(expected_moment @ expected_basis).Q
        signs = (basis.double() * expected_basis).sum(1, keepdim=True).sign()
        assert counts == (0, 0)
        assert torch.allclose(moment.double(), expected_moment, rtol=1e-5, atol=1e-7)
        assert (basis * signs - expected_basis).abs().max() <= 1e-5


def test_the_stored_basis_is_the_fp32_basis_rounded_once():
    total, tokens = gram(tokens_of(20, 12), 6), torch.full((2,), 20.0)
    stored = {dtype: torch.eye(6, dtype=dtype).repeat(2, 1, 1) for dtype in (torch.float32, torch.bfloat16)}
    for basis in stored.values():
        refresh_(torch.zeros(2, 6, 6), basis, total, tokens, beta=BETA, method="cholesky")
    assert torch.equal(stored[torch.bfloat16], stored[torch.float32].bfloat16())


def test_only_accepted_blocks_count_as_fallbacks():
    width, equal = 192, torch.ones(192, 192)
    start = torch.linalg.qr(tokens_of(width, width)).Q.bfloat16()
    moment, basis = torch.stack([equal, equal]), start.repeat(2, 1, 1)
    counts = refresh_(
        moment, basis, torch.stack([equal, equal]), torch.tensor([1.0, 0.0]), beta=BETA, method="cholesky"
    )
    assert counts == (1, 1)
    assert same_bits(basis[1], start)


@pytest.mark.parametrize("method", ["householder", "cholesky"])
def test_a_feature_without_activation_is_never_mixed_even_by_uneven_batches(method):
    moment, basis = torch.zeros(2, 16, 16), torch.eye(16).bfloat16().repeat(2, 1, 1)
    dead = [0, 9, 15]
    for step in range(5):
        x = tokens_of(3 + 7 * step, 32, seed=step).bfloat16()
        x.unflatten(1, (2, 16))[:, :, dead] = 0
        refresh_(moment, basis, gram(x, 16), torch.full((2,), float(len(x))), beta=BETA, method=method)
        identity = torch.eye(16).bfloat16()
        assert all(torch.equal(block[dead], identity[dead]) for block in basis)
        assert all(torch.equal(block[:, dead], identity[:, dead]) for block in basis)
        assert not torch.equal(basis[0], identity)


@pytest.mark.parametrize("method", METHODS)
def test_no_blocks_are_no_work(method):
    none, tokens = torch.zeros(0, 4, 4), torch.zeros(0)
    assert refresh_(none, none.clone(), none.clone(), tokens, beta=BETA, method=method) == (0, 0)


def test_sums_fold_and_householder_refresh_never_wait_for_the_device(monkeypatch):
    def wait(*args, **kwargs):
        raise AssertionError("the host read a tensor's value")

    for read in ("__bool__", "__int__", "__float__", "item", "tolist", "nonzero", "cpu", "numpy"):
        monkeypatch.setattr(Tensor, read, wait)
    total = unpack_triangle(pack_triangle(gram(torch.ones(9, 8), 4)), 4)
    moment, basis = torch.zeros(2, 4, 4), torch.eye(4).repeat(2, 1, 1)
    refresh_(moment, basis, total, torch.ones(2), beta=BETA, method="householder", iterations=2)
