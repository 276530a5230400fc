"""Metrics of a weight's update, second moments and bases; `docs/diagnostics.md` says what each one means.

Pure functions of tensors, in float64. A weight's shards and blocks lie on many ranks, so every figure is made of
`Sums` that can be added in any order; those of the whole weight give its `metrics`. Parts that several ranks hold
copies of may be added once for each copy, as long as all parts are: every figure is a ratio of two sums.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ...sharding.segment import Segment
from .update import direction, step_scale

PREFIX = "dobb"
METRICS = (
    *("update_rms", "orthogonality", "update_effective_rank"),
    *("basis_residual", "moment_effective_rank", "refresh_rotation"),
)
"""Metrics of a weight, in log order."""

SPECTRA_AT_ONCE = 2
"""Weights whose update's singular values are computed in one log, where the user names none."""


def update_direction(
    segment: Segment, gradient: Tensor, *, momentum: float, nesterov: bool, column_scales: Tensor | None = None
) -> Tensor:
    """The direction `S_j Q_j^T` in which a segment's weights have just moved: the raw update `O` times `sqrt(m)`.

    Args:
        segment: the piece of a weight, after its update.
        gradient: `[shard.numel]`, that of this update.
        momentum, nesterov: `mu`, and whether the update projected `mu M + (1 - mu) G`.
        column_scales: `[held, b]`, for Dobb-l2: those of this update.

    Returns:
        `[shard.numel]` fp32, in the order of the weight's storage.
    """
    source = segment.turn(segment.momentum)
    if nesterov:
        source = source.lerp(segment.turn(gradient.float()), 1 - momentum)
    result = torch.empty_like(source)
    for rectangle, blocks in segment.rectangles():
        basis = segment.basis[blocks].float() if segment.basis is not None else None
        of_blocks = column_scales[blocks] if column_scales is not None else None
        segment.rectangle(result, *rectangle).copy_(direction(segment.rectangle(source, *rectangle), basis, of_blocks))
    return segment.turn_back(result)


def singular_values(matrix: Tensor) -> Tensor:
    """The singular values `[min(m, n)]` of `matrix [m, n]`, ascending; all NaN if one of its entries is not finite.

    They are roots of the eigenvalues of the smaller Gram matrix: much cheaper, and values below 1e-8 of the largest,
    which this loses, add nothing to the figures here.
    """
    wide = matrix.double() if matrix.shape[0] <= matrix.shape[1] else matrix.double().t()
    gram = wide @ wide.t()
    if not bool(gram.isfinite().all()):
        return torch.full_like(gram[0], math.nan)
    return torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()


def orthogonality(values: Tensor) -> float:
    """`||O||_* / (sqrt(min(m, n)) ||O||_F)` from singular values `[min(m, n)]` (paper, Tables 1 and 2).

    It is 1 for a matrix with orthonormal rows or columns, and smaller the more unequal the singular values are; NaN for
    a matrix of zeros.
    """
    return float(values.sum() / (math.sqrt(len(values)) * torch.linalg.vector_norm(values)))


def effective_rank(values: Tensor) -> float:
    """`exp(-sum p log p)` with `p = values / sum(values)`, for values `>= 0` (paper, Table 1); NaN if all are 0."""
    total = values.double().sum()
    return float((total.log() - torch.special.xlogy(values.double(), values.double()).sum() / total).exp())


@dataclass
class Sums:
    """Sums over parts of a weight from which its metrics follow.

    Attributes:
        step_squares, step_entries: squares of the entries of `s O`, and their number.
        off_diagonal, moment_squares: squares of the off-diagonal entries of `Q^T A Q`, and of the entries of `A`.
        eigenvalue_sum, eigenvalue_logs, eigenvalues: sums of `lambda` and of `lambda log lambda` over the eigenvalues
            of `A`, and their number.
        angle_squares, columns: squares of the angles between old and new columns of `Q`, and the number of columns.
        orthogonality, update_rank: of the whole update, if it was looked at; NaN otherwise. Not summed.
    """

    step_squares: float = 0.0
    step_entries: float = 0.0
    off_diagonal: float = 0.0
    moment_squares: float = 0.0
    eigenvalue_sum: float = 0.0
    eigenvalue_logs: float = 0.0
    eigenvalues: float = 0.0
    angle_squares: float = 0.0
    columns: float = 0.0
    orthogonality: float = math.nan
    update_rank: float = math.nan

    def add(self, other: "Sums") -> None:
        """Add the sums of other parts of the weight."""
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            whole = each.name in ("orthogonality", "update_rank")
            setattr(self, each.name, (theirs if math.isnan(mine) else mine) if whole else mine + theirs)


def sums_of_step(segment: Segment, update: Tensor, update_scale: float) -> Sums:
    """Sums of a segment's `update_direction`, `[shard.numel]`, with `tau` as `update_scale`."""
    scale = step_scale(segment.column_length, max(segment.rows, segment.columns), update_scale)
    return Sums(
        step_squares=(scale * float(torch.linalg.vector_norm(update, dtype=torch.float64))) ** 2,
        step_entries=update.numel(),
    )


def sums_of_spectrum(update: Tensor) -> Sums:
    """Sums of the direction of a whole update `[m, n]`."""
    values = singular_values(update)
    return Sums(orthogonality=orthogonality(values), update_rank=effective_rank(values) / len(values))


def eigenvalues(moment: Tensor) -> Tensor:
    """Eigenvalues of second moments `A [k, b, b]`, ascending for each: `[k, b]`, none of them negative."""
    return torch.linalg.eigvalsh(moment.double()).clamp(min=0)


def sums_of_moment(moment: Tensor, basis: Tensor, values: Tensor | None = None) -> Sums:
    """Sums of second moments `A [k, b, b]` and bases `Q [k, b, b]` of some blocks, with `eigenvalues` if known."""
    moment, basis = moment.double(), basis.double()
    rotated = basis.mT @ moment @ basis
    rotated.diagonal(dim1=-2, dim2=-1).zero_()
    values = eigenvalues(moment) if values is None else values
    logs = torch.special.xlogy(values, values)
    found = torch.stack([rotated.square().sum(), moment.square().sum(), values.sum(), logs.sum()]).tolist()
    return Sums(
        off_diagonal=found[0],
        moment_squares=found[1],
        eigenvalue_sum=found[2],
        eigenvalue_logs=found[3],
        eigenvalues=values.numel(),
    )


def sums_of_rotation(before: Tensor, after: Tensor) -> Sums:
    """Sums of the angles between each column of bases `[k, b, b]` and its successor after a refresh, up to sign.

    Columns count alike, however small their eigenvalue, because the sign of every coefficient moves the weight by the
    same amount. An angle stays a good measure where the turn is small; `1 - |cos|` would be its square.
    """
    before, after = (torch.nn.functional.normalize(basis.double(), dim=-2) for basis in (before, after))
    after = after * torch.where((before * after).sum(-2, keepdim=True) < 0, -1.0, 1.0)
    # From the chord, because arccos loses half of the digits of a small angle.
    angles = 2 * torch.asin((torch.linalg.vector_norm(before - after, dim=-2) / 2).clamp(max=1))
    return Sums(angle_squares=float(angles.square().sum()), columns=angles.numel())


def metrics(sums: Sums) -> dict[str, float]:
    """Compute the metrics of one weight from the sums of all its parts; omit those without data.

    * `update_rms`: root mean square of the entries of `s O`, `tau sqrt(max(m, n) / m)` times the root of the fraction
      of coefficients that are not zero (paper, Table 9).
    * `orthogonality`, `update_effective_rank`: of the update; the rank as a fraction of `min(m, n)`.
    * `moment_effective_rank`: of the spectrum of all blocks of `A` together, as a fraction of `n`.
    * `basis_residual`: `||offdiag(Q^T A Q)||_F / ||A||_F`.
    * `refresh_rotation`: root mean square over columns of the angle, in radians, by which the last refresh turned them.
    """
    found: dict[str, float] = {}
    if sums.step_entries:
        found["update_rms"] = math.sqrt(sums.step_squares / sums.step_entries)
    if not math.isnan(sums.orthogonality):
        found["orthogonality"] = sums.orthogonality
        found["update_effective_rank"] = sums.update_rank
    if sums.moment_squares > 0 and sums.eigenvalue_sum > 0:
        found["basis_residual"] = math.sqrt(sums.off_diagonal / sums.moment_squares)
        entropy_per_value = sums.eigenvalue_logs / sums.eigenvalue_sum
        found["moment_effective_rank"] = sums.eigenvalue_sum / sums.eigenvalues * math.exp(-entropy_per_value)
    if sums.columns:
        found["refresh_rotation"] = math.sqrt(sums.angle_squares / sums.columns)
    return found


def named(weights: Mapping[str, Sums], skipped: int, fallbacks: int) -> dict[str, float]:
    """All figures by the names under which they are logged: of every weight, and their means over the weights.

    Args:
        weights: the sums of every weight, by its name.
        skipped, fallbacks: blocks that refreshes left alone, and that Householder finished, since the start.
    """
    of_weights = {name: metrics(weights[name]) for name in sorted(weights)}
    by_metric: dict[str, dict[str, float]] = {}
    for metric in METRICS:
        values = {name: found[metric] for name, found in of_weights.items() if metric in found}
        if values:
            by_metric[metric] = values
    log = {f"{PREFIX}/{metric}": math.fsum(values.values()) / len(values) for metric, values in by_metric.items()}
    log |= {f"{PREFIX}/skipped_blocks": float(skipped), f"{PREFIX}/fallback_blocks": float(fallbacks)}
    for metric, values in by_metric.items():
        log |= {f"{PREFIX}/{metric}/{name}": value for name, value in values.items()}
    return log


def merge(parts: Iterable[Mapping[str, Sums]]) -> dict[str, Sums]:
    """The sums of every weight over all parts, by its name. The parts are not changed."""
    merged: dict[str, Sums] = {}
    for part in parts:
        for name, sums in part.items():
            merged.setdefault(name, Sums()).add(sums)
    return merged


def in_turn(names: Sequence[str], number: int, at_once: int = SPECTRA_AT_ONCE) -> list[str]:
    """Choose some of `names` for log `number`, so that every one has its turn."""
    return [names[(number * at_once + i) % len(names)] for i in range(min(at_once, len(names)))]
