"""Measures of a matrix from its singular values, and matrices with a given effective rank. All in float64."""

import torch
from torch import Tensor

from megatron_dobb.methods.dobb import metrics as diagnostics


def orthogonality(matrix: Tensor) -> float:
    """`||O||_* / (sqrt(min(m, n)) ||O||_F)` (paper, section 2): 1 where all singular values are equal.

    A zero matrix gives NaN.
    """
    return diagnostics.orthogonality(torch.linalg.svdvals(matrix.double()))


def effective_rank(values: Tensor) -> float:
    """`exp(-sum p log p)` with `p = sigma / sum sigma`, as a fraction of the number of singular values given."""
    return diagnostics.effective_rank(values) / len(values)


def power_law(size: int, rank_fraction: float) -> Tensor:
    """Singular values `i^-a`, `[size]`, with `a` found by bisection so that they have this effective rank.

    Raises:
        ValueError: if no `a` between 0 and 16 gives it.
    """
    index = torch.arange(1, size + 1, dtype=torch.float64)
    low, high = 0.0, 16.0  # the effective rank falls as `a` grows, from 1 to nearly 1 / size
    if not effective_rank(index**-high) < rank_fraction < 1:
        raise ValueError(f"effective rank {rank_fraction}: must lie between 1/{size} and 1, both excluded")
    for _ in range(60):
        middle = (low + high) / 2
        if effective_rank(index**-middle) > rank_fraction:
            low = middle
        else:
            high = middle
    return index**-low


def haar(size: int, generator: torch.Generator) -> Tensor:
    """A random orthogonal matrix `[size, size]`, uniformly distributed."""
    q, r = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))
    return q * r.diagonal().sign()  # without this, the distribution is that of the QR routine


def with_effective_rank(size: int, rank_fraction: float, seed: int) -> Tensor:
    """A matrix `[size, size]` of power-law singular values between Haar singular vectors (paper, Table 1)."""
    generator = torch.Generator().manual_seed(seed)
    left, right = haar(size, generator), haar(size, generator)
    return (left * power_law(size, rank_fraction)) @ right.T
