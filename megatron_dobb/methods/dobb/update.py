"""The update of Dobb in plain PyTorch: the clear statement that every faster path is checked against.

Shapes: a rectangle of `rows` rows and `blocks` blocks of width `b` is a tensor `[rows, blocks, b]`; the bases of
these blocks are `[blocks, b, b]`, one orthonormal basis in the columns of each.

Everything is said of blocks over the input axis. Blocks over the output axis (Dobb-G) are those of the transposed
weight: such a segment is `turned` first.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...sharding.segment import Segment


def project(momentum: Tensor, basis: Tensor) -> Tensor:
    """Coefficients `C_j = M_j Q_j` (paper, section 3): `[rows, blocks, b]` from the same and `[blocks, b, b]`."""
    return torch.einsum("rjc,jcd->rjd", momentum, basis)


def sign(coefficients: Tensor) -> Tensor:
    """Elementwise sign with `sign(0) = 0`; a non-finite coefficient gives NaN, never a silent zero."""
    return torch.where(coefficients.isfinite(), coefficients.sign(), math.nan)


def scaled(coefficients: Tensor, column_scales: Tensor) -> Tensor:
    """Coefficients times the scale of their column (Dobb-l2), `[rows, blocks, b]` from the same and `[blocks, b]`.

    A product that is not finite gives NaN.
    """
    products = coefficients * column_scales
    return torch.where(products.isfinite(), products, math.nan)


def reconstruct(signs: Tensor, basis: Tensor) -> Tensor:
    """The direction `S_j Q_j^T`, `[rows, blocks, b]`. The raw update `O` of Table 9 is this over `sqrt(m)`."""
    return torch.einsum("rjd,jcd->rjc", signs, basis)


def direction(momentum: Tensor, basis: Tensor | None, column_scales: Tensor | None = None) -> Tensor:
    """`sign(M_j Q_j) Q_j^T` for a rectangle of blocks; with `column_scales` `[blocks, b]` these instead of the sign.

    Without a basis the momentum's own entries are the coefficients.
    """
    coefficients = project(momentum, basis) if basis is not None else momentum
    kept = sign(coefficients) if column_scales is None else scaled(coefficients, column_scales)
    return reconstruct(kept, basis) if basis is not None else kept


def step_scale(rows: int, columns: int, update_scale: float) -> float:
    """Factor of the direction in the weight's step: `tau sqrt(max(m, n) / m)` for global `m` rows, `n` columns."""
    return update_scale * math.sqrt(max(rows, columns) / rows)


def update(
    segments: Sequence[Segment],
    gradients: Sequence[Tensor],
    *,
    learning_rate: float,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
    update_scale: float,
    column_scales: Sequence[Tensor] | None = None,
) -> None:
    """One step of every segment, in place::

        M <- mu M + (1 - mu) G
        W <- (1 - lr wd) W - lr tau sqrt(max(m, n) / m) sign(M_j Q_j) Q_j^T

    Args:
        segments: what to update.
        gradients: one `[shard.numel]` tensor for each segment, fp32 or bf16.
        learning_rate: `lr`.
        weight_decay: `wd`, decoupled.
        momentum: `mu`.
        nesterov: project `mu M + (1 - mu) G` instead of `M`.
        update_scale: `tau`.
        column_scales: for Dobb-l2, one tensor `[held, b]` for each segment: coefficients are multiplied by it instead
            of taking their sign.

    Callers refuse non-finite gradients first, with `check_finite`: a NaN would stay in the momentum for ever.
    """
    scales = column_scales if column_scales is not None else [None] * len(segments)
    for segment, gradient, column_scale in zip(segments, gradients, scales, strict=True):
        turned = segment.turned()
        of_shard = segment.turn(gradient.float())
        turned.momentum.lerp_(of_shard, 1 - momentum)
        source = turned.momentum.lerp(of_shard, 1 - momentum) if nesterov else turned.momentum
        scale = learning_rate * step_scale(turned.rows, turned.columns, update_scale)
        turned.weight.mul_(1 - learning_rate * weight_decay)
        for rectangle, blocks in turned.rectangles():
            basis = turned.basis[blocks].float() if turned.basis is not None else None
            of_blocks = column_scale[blocks] if column_scale is not None else None
            step = direction(turned.rectangle(source, *rectangle), basis, of_blocks)
            turned.rectangle(turned.weight, *rectangle).add_(step.to(turned.weight.dtype), alpha=-scale)
        if segment.output_side:
            segment.take_back(turned)


def column_squares(segment: Segment, gradient: Tensor, *, momentum: float, nesterov: bool) -> Tensor:
    """Sum this shard's squares in every column of the coefficients of the coming step (Dobb-l2).

    Nothing is changed. The sum over all shards of a weight gives `column_scales` their whole norms.

    Args:
        segment: the piece of a weight.
        gradient: `[shard.numel]`.
        momentum, nesterov: as of the `update` to come.

    Returns:
        `[held, b]` fp32.
    """
    of_shard = segment.turn(gradient.float())
    source = segment.turn(segment.momentum).lerp(of_shard, 1 - momentum)
    if nesterov:
        source = source.lerp(of_shard, 1 - momentum)
    squares = source.new_zeros(len(segment.shard.held_blocks()), segment.shard.width)
    for rectangle, blocks in segment.rectangles():
        coefficients = segment.rectangle(source, *rectangle)
        if segment.basis is not None:
            coefficients = project(coefficients, segment.basis[blocks].float())
        squares[blocks] += coefficients.square().sum(0)
    return squares


def column_scales(squares: Tensor, column_length: int) -> Tensor:
    """Factors that give every column of coefficients the norm `sqrt(column_length)`: that of signs (Dobb-l2).

    Both normalisations then have the same Frobenius norm (paper, Table 9), and share `step_scale`.

    Args:
        squares: squared norms of the columns over the whole weight. A column whose square is below the smallest
            normal number is taken for zeros and gives none: what decayed for hundreds of steps ends there.
        column_length: `Segment.column_length`.
    """
    scales = squares.rsqrt() * math.sqrt(column_length)
    return torch.where(squares >= torch.finfo(squares.dtype).tiny, scales, 0)
