"""Compute the figures of one weight from its moment, basis and momentum, as `methods.dobb.metrics` defines them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_dobb.errors import CheckpointError
from megatron_dobb.methods.dobb import metrics, update
from megatron_dobb.methods.dobb.orthogonalize import MAX_ERROR

from .contents import Facts, State

POINTS = 65
"""Number of eigenvalues of a spectrum that are kept."""


@dataclass
class Figures:
    """Figures of one weight; None where a checkpoint has nothing to compute them from.

    Attributes:
        name: of the weight in the whole model.
        rows, columns: `m` and `n`; one of them may be unknown without a momentum.
        blocks, width: `B` and `b`.
        moment_effective_rank, basis_residual, orthogonality, update_effective_rank: as in `docs/diagnostics.md`, the
            last two of the update that the saved momentum would make by itself.
        basis_error: largest entry of `|Q^T Q - I|`.
        basis_error_allowed: the most that rounding to the stored type explains.
        identity_blocks: blocks whose basis is still the identity.
        empty_blocks: blocks whose moment is all zero.
        dead_features: zero rows of `A`, those of empty blocks included.
        zero_momentum_rows: rows of the momentum (columns, on the output side) that are all zero.
        not_finite: which of the tensors have entries that are not finite.
        spectrum: eigenvalues of all blocks together over the largest one, descending, at evenly spread ranks.
        no_update: why there are no figures of the update.
    """

    name: str
    rows: int | None = None
    columns: int | None = None
    blocks: int | None = None
    width: int | None = None
    moment_effective_rank: float | None = None
    basis_residual: float | None = None
    orthogonality: float | None = None
    update_effective_rank: float | None = None
    basis_error: float | None = None
    basis_error_allowed: float | None = None
    identity_blocks: int | None = None
    empty_blocks: int | None = None
    dead_features: int | None = None
    zero_momentum_rows: int | None = None
    not_finite: Sequence[str] = ()
    spectrum: Sequence[float] = ()
    no_update: str | None = None


def figures_of(name: str, state: State, facts: Facts) -> Figures:
    """Everything that the tensors of a weight tell.

    Raises:
        CheckpointError: if they do not fit each other.
    """
    found = Figures(name)
    if facts.source == "none":  # what is there then has one element for each feature, and is never used
        state = replace(state, moment=None, basis=None)
    tensors = {"moment": state.moment, "basis": state.basis, "momentum": state.momentum}
    found.not_finite = [kind for kind, each in tensors.items() if each is not None and not each.isfinite().all()]
    output_side = facts.side == "output"
    momentum = state.momentum.t() if state.momentum is not None and output_side else state.momentum
    if state.moment is not None and state.basis is not None:
        found.blocks, found.width = state.moment.shape[0], state.moment.shape[2]
        found.columns = found.blocks * found.width
        if momentum is not None and momentum.shape[1] != found.columns:
            raise CheckpointError(
                f"{name} has a momentum {list(momentum.shape)} and {found.blocks} blocks of width {found.width}, which "
                "do not fit: the checkpoint is damaged"
            )
        _of_blocks(found, state.moment, state.basis)
    if momentum is None:
        found.no_update = state.reason
    else:
        found.rows, found.columns = momentum.shape
        found.zero_momentum_rows = int((momentum == 0).all(1).sum())
        _of_update(found, momentum, state.basis, facts)
    if output_side:
        found.rows, found.columns = found.columns, found.rows
    return found


def _of_blocks(found: Figures, moments: Tensor, bases: Tensor) -> None:
    """One block after the other, which needs room for a few copies of one block only."""
    identity = torch.eye(bases.shape[2], dtype=torch.float64)
    sums, spectra = metrics.Sums(), []
    found.identity_blocks = found.empty_blocks = found.dead_features = 0
    if bool(bases.isfinite().all()):
        found.basis_error = 0.0
    for moment, basis in zip(moments, bases, strict=True):
        found.dead_features += int((moment == 0).all(1).sum())
        found.empty_blocks += not bool(moment.any())
        basis = basis.double()
        found.identity_blocks += torch.equal(basis, identity)
        if found.basis_error is not None:
            found.basis_error = max(found.basis_error, float((basis.mT @ basis - identity).abs().max()))
        if moment.isfinite().all() and basis.isfinite().all():
            values = metrics.eigenvalues(moment[None])
            sums.add(metrics.sums_of_moment(moment[None], basis[None], values))
            spectra.append(values.flatten())
    # Rounding of an entry by `u` relatively changes a product of two unit columns by at most 2 u + u^2.
    unit = torch.finfo(bases.dtype).eps / 2
    found.basis_error_allowed = (1 + MAX_ERROR) * (1 + unit) ** 2 - 1
    figures = metrics.metrics(sums)
    found.moment_effective_rank = figures.get("moment_effective_rank")
    found.basis_residual = figures.get("basis_residual")
    found.spectrum = _thinned(torch.cat(spectra)) if spectra else ()


def _of_update(found: Figures, momentum: Tensor, bases: Tensor | None, facts: Facts) -> None:
    """Figures of the momentum's update alone: `sign(M_j Q_j) Q_j^T`, or Dobb-l2's columns of unit norm."""
    if any(kind != "moment" for kind in found.not_finite):
        found.no_update = f"its {' and '.join(found.not_finite)} is not finite"
        return
    if not momentum.any():
        found.no_update = "its momentum is zero"
        return
    blocks = (bases.shape[0], bases.shape[2]) if bases is not None else (1, momentum.shape[1])
    rectangle, basis = momentum.float().unflatten(1, blocks), bases.float() if bases is not None else None
    scales = None
    if facts.norm == "l2":
        coefficients = update.project(rectangle, basis) if basis is not None else rectangle
        scales = update.column_scales(coefficients.square().sum(0), len(momentum))
    sums = metrics.sums_of_spectrum(update.direction(rectangle, basis, scales).flatten(1))
    found.orthogonality, found.update_effective_rank = sums.orthogonality, sums.update_rank


def _thinned(values: Tensor) -> list[float]:
    values = values.sort(descending=True).values
    if not float(values[0]) > 0:
        return []
    places = torch.linspace(0, len(values) - 1, min(POINTS, len(values)), dtype=torch.float64).round().long()
    return [float(value) for value in values[places] / values[0]]
