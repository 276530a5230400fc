"""One step of subspace iteration on every block, `Q <- orth(A Q)`: the three ways to orthonormalise.

* `householder` is exact for every input, but slow when batched on a GPU.
* `cholesky` is matrix products and triangular solves. Damping (`A / max(diag A) + 1e-5 I`, which leaves the
  eigenvectors of `A` alone), unit columns and three shifted passes keep it from breaking down.
* `eigh` takes the eigenvectors of `A` themselves.

Every result of the last two is checked; a block that fails is done again with Householder reflections and
reported. With the first two, a feature that never carried any activation, and starts from the identity, stays
exactly apart from all others; `eigh` may mix such features with each other.

This is the plain statement; `kernels.refresh_basis` runs the extension's on a CPU. On a GPU this is what runs, and all
blocks of one width go through each operation in one call: of PyTorch 2.14's, `cholesky_ex` is one batched cuSOLVER
call for more than one block, `solve_triangular` one batched cuBLAS call (one call per block for up to 8 blocks of
width 64 or more), and neither waits for the device. `qr` and `eigh` may take one block after the other. `cholesky`
waits once, to learn which blocks failed; `householder` never does.
"""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ...errors import ConfigError
from ...numerics.precision import full_precision

Method = Literal["householder", "cholesky", "eigh"]

MAX_ERROR = 1e-5
"""Largest `max |Q^T Q - I|` of a basis that is handed out, in fp32."""

_DAMPING = 1e-5
_FIRST_SHIFT_PER_COLUMN = 1e-7
_CHOLESKY_PASSES = 3


class RefreshedBasis(NamedTuple):
    """New bases `[k, b, b]` in fp32, and for each block `[k]` whether it fell back to Householder."""

    basis: Tensor
    fell_back: Tensor


def refresh_basis(moment: Tensor, basis: Tensor, *, method: Method, iterations: int = 1) -> RefreshedBasis:
    """`Q <- orth(A Q)`, `iterations` times, for every block at once.

    The result is a complete orthonormal basis, `max |Q^T Q - I| <= 1e-5`, for every symmetric positive
    semidefinite `A`: rank deficient, with dead features, of any scale. A block whose moment is zero or
    non-finite says nothing about its basis and counts as the identity: `orth(Q)`, or the identity for `eigh`.

    Args:
        moment: second moments `A [k, b, b]`, symmetric positive semidefinite; computed with in fp32.
        basis: old bases `Q [k, b, b]`, orthonormal up to the rounding of their dtype. Neither is changed.
        method: how to orthonormalise (`--dobb-qr`).
        iterations: steps of subspace iteration (`--dobb-iterations`); `eigh` needs and makes none.

    Raises:
        ConfigError: on an unknown method or fewer than one iteration.
    """
    if method not in get_args(Method):
        raise ConfigError("is unknown", f"use one of {', '.join(get_args(Method))}", settings={"qr": method})
    if iterations < 1:
        raise ConfigError("is too few for a refresh", "use 1 or more", settings={"iterations": iterations})
    with full_precision(moment.device):
        scaled, start = _scale(moment.float()), basis.float()
        if method == "householder":
            fell_back = torch.zeros(len(moment), dtype=torch.bool, device=moment.device)
            return RefreshedBasis(_iterate_householder(scaled, start, iterations), fell_back)
        if method == "cholesky":
            result, failed = _iterate_cholesky(scaled, start, iterations)
        else:
            result, failed = _eigenvectors(scaled)
        # The number of failed blocks decides what to launch, so this waits for the device.
        index = failed.nonzero().squeeze(1)
        if len(index):
            result[index] = _iterate_householder(scaled[index], start[index], iterations)
        return RefreshedBasis(result, failed)


def orthonormality_error(basis: Tensor) -> Tensor:
    """`max |Q^T Q - I|` of every block of `Q [k, b, b]`, as `[k]` in fp32; NaN where `Q` is non-finite."""
    with full_precision(basis.device):
        return _gram_minus_identity(basis.float()).abs().amax(dim=(-2, -1))


def householder(matrices: Tensor) -> Tensor:
    """Complete orthonormal bases `[k, b, b]` of the fp32 matrices `[k, b, b]`, by Householder reflections.

    Column `i` of the result lies in the span of the first `i + 1` columns where these are independent, and
    completes the basis where they are not. Zero matrices give the identity.

    Reflections alone lose orthonormality when many features are equal, for then all rounding errors point the
    same way: 5e-5 at width 3072. One step of Newton's iteration for the polar factor brings that back to 6e-6.
    """
    basis = torch.linalg.qr(matrices, mode="complete").Q
    return torch.baddbmm(basis, basis, _gram_minus_identity(basis), alpha=-0.5)


def cholesky(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormal bases of matrices with independent columns, by Cholesky QR in three passes.

    Args:
        matrices: `[k, b, b]` in fp32, with columns of any norm but zero.

    Returns:
        The bases `[k, b, b]`, and `[k]` whether a block broke down or misses `MAX_ERROR`; its basis is then
        not to be used.
    """
    width = matrices.shape[-1]
    result = matrices / torch.linalg.vector_norm(matrices, dim=-2, keepdim=True)
    broke_down = torch.zeros(len(matrices), dtype=torch.bool, device=matrices.device)
    for number in range(_CHOLESKY_PASSES):
        gram = result.mT @ result
        if number == 0:
            gram.diagonal(dim1=-2, dim2=-1).add_(_FIRST_SHIFT_PER_COLUMN * width)
        factor, info = torch.linalg.cholesky_ex(gram)
        broke_down |= info != 0
        result = torch.linalg.solve_triangular(factor.mT, result, upper=True, left=False)
    return result, broke_down | _is_inexact(result)


def _scale(moment: Tensor) -> Tensor:
    """`A / max(diag A)`, which bounds every entry by 1; the identity where that is zero or non-finite."""
    width = moment.shape[-1]
    largest = moment.diagonal(dim1=-2, dim2=-1).amax(dim=-1)
    usable = moment.isfinite().flatten(1).all(dim=1) & (largest > 0)
    identity = torch.eye(width, dtype=moment.dtype, device=moment.device)
    return torch.where(usable[:, None, None], moment / largest[:, None, None], identity)


def _iterate_householder(scaled: Tensor, basis: Tensor, iterations: int) -> Tensor:
    for _ in range(iterations):
        basis = householder(scaled @ basis)
    return basis


def _iterate_cholesky(scaled: Tensor, basis: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    damped = scaled.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(_DAMPING)
    failed = torch.zeros(len(scaled), dtype=torch.bool, device=scaled.device)
    for _ in range(iterations):
        basis, failed_now = cholesky(damped @ basis)
        failed |= failed_now
    return basis, failed


def _eigenvectors(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvectors `[k, b, b]` of every block, in fp64 where fp32 fails, and `[k]` whether both failed."""
    result = _eigh_or_nan(scaled)
    for block in _is_inexact(result).nonzero().flatten().tolist():
        result[block] = _eigh_or_nan(scaled[block].double()).float()
    return result, _is_inexact(result)


def _eigh_or_nan(matrices: Tensor) -> Tensor:
    try:
        return torch.linalg.eigh(matrices).eigenvectors
    except torch.linalg.LinAlgError:
        return torch.full_like(matrices, torch.nan)


def _gram_minus_identity(basis: Tensor) -> Tensor:
    gram = basis.mT @ basis
    gram.diagonal(dim1=-2, dim2=-1).sub_(1.0)
    return gram


def _is_inexact(basis: Tensor) -> Tensor:
    return ~(orthonormality_error(basis) <= MAX_ERROR)
