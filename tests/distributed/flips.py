"""Signs that differ between two computations of the same step, and whether rounding explains them.

A sign is discontinuous: where a coefficient is within rounding of zero, another order of the same sum may give the
other sign, and the weight then moves the other way along one basis vector. Every difference between two weights
must be such a flip; anything else is an error.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BOUND = 1e-5
"""Coefficients below this fraction of the RMS of their row's block may flip between two fp32 runs.

The coefficients of two layouts differ by up to 5e-6 of that RMS here: sums over hundreds of tokens, in a different
order, of terms that cancel.
"""


@dataclass(frozen=True)
class Flip:
    """One coefficient whose sign differs; `magnitude` is the reference's, over the RMS of its row's block."""

    name: str
    step: int
    row: int
    block: int
    column: int
    magnitude: float

    def __str__(self) -> str:
        return f"step {self.step}: {self.name}[{self.row}], block {self.block}, {self.column}: {self.magnitude:.1e}"


def coefficients(momentum: Tensor, basis: Tensor) -> Tensor:
    """`M_j Q_j` in float64, `[m, B, b]`, of `[m, n]` and `[B, b, b]`."""
    blocks, width, _ = basis.shape
    return torch.einsum("rjc,jcd->rjd", momentum.double().unflatten(1, (blocks, width)), basis.double())


def directions(signs: Tensor, basis: Tensor) -> Tensor:
    """`S_j Q_j^T` in float64, `[m, n]`, of `[m, B, b]` and `[B, b, b]`."""
    return torch.einsum("rjd,jcd->rjc", signs.double(), basis.double()).flatten(1)


def find(
    difference: Tensor,
    reference: Tensor,
    basis: Tensor,
    *,
    step_size: float,
    tolerance: float,
    bound: float = BOUND,
    name: str = "",
    step: int = 0,
) -> tuple[list[Flip], Tensor]:
    """Explain the difference of a weight after one step from the same weights.

    Args:
        difference: `[m, n]`, the weight less the reference's.
        reference: the reference's coefficients, `[m, B, b]`.
        basis: the bases that both used, `[B, b, b]`.
        step_size: factor of `S Q^T` in the step.
        tolerance: the largest difference of any entry that needs no flip.
        bound: the largest magnitude of a flipped coefficient.
        name, step: for the record.

    Returns:
        The flips, and what they contribute to the difference, `[m, n]`.

    Raises:
        AssertionError: for a difference that is no sum of flips, or a flip of a coefficient above the bound.
    """
    changes = (coefficients(difference, basis) / -step_size).round()
    explained = directions(changes, basis) * -step_size
    excess = (difference.double() - explained).abs().max()
    assert excess <= tolerance, f"{name}, step {step}: an entry differs by {excess:.2e} without a flip"
    magnitudes = reference.abs() / reference.square().mean(dim=2, keepdim=True).sqrt()
    flips = [Flip(name, step, *place, float(magnitudes[tuple(place)])) for place in changes.nonzero().tolist()]
    beyond = [flip for flip in flips if not flip.magnitude <= bound]
    assert not beyond, f"{len(beyond)} signs differ where rounding cannot explain it: {'; '.join(map(str, beyond[:5]))}"
    return flips, explained
