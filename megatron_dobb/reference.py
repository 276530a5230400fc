"""The update of Dobb in plain PyTorch: the clear statement that every faster path is checked against.

Shapes: a rectangle of `rows` rows and `blocks` blocks of width `b` is a tensor `[rows, blocks, b]`; the bases of
these blocks are `[blocks, b, b]`, one orthonormal basis in the columns of each.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .blocks import Shard
from .errors import NonFiniteError


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


def direction(momentum: Tensor, basis: Tensor, column_scales: Tensor | None = None) -> Tensor:
    """`sign(M_j Q_j) Q_j^T` for a rectangle of blocks; with `column_scales` `[blocks, b]` these instead of the sign."""
    coefficients = project(momentum, basis)
    kept = sign(coefficients) if column_scales is None else scaled(coefficients, column_scales)
    return reconstruct(kept, basis)


def step_scale(rows: int, columns: int, update_scale: float) -> float:
    """Factor of the direction in the weight's step: `tau sqrt(max(m, n) / m)` for global `m` rows, `n` columns."""
    return update_scale * math.sqrt(max(rows, columns) / rows)


@dataclass
class Segment:
    """A flat shard of one managed weight and all that its update touches.

    Attributes:
        name: the weight's name.
        shard: the range, in whole blocks.
        rows: the weight's **global** number of rows, `m`.
        columns: its **global** number of columns, `n`.
        weight: the shard of the weight, `[shard.numel]`; the fp32 master where there is one.
        momentum: `M`, `[shard.numel]` fp32.
        basis: bases of `shard.held_blocks()`, `[held, b, b]`, in that order.
    """

    name: str
    shard: Shard
    rows: int
    columns: int
    weight: Tensor
    momentum: Tensor
    basis: Tensor

    def rectangle(self, flat: Tensor, offset: int, rows: int, blocks: int) -> Tensor:
        """View `[rows, blocks, b]` of a piece of a flat tensor of this shard."""
        return flat[offset : offset + rows * blocks * self.shard.width].view(rows, blocks, self.shard.width)


def check_finite(names: Sequence[str], gradients: Sequence[Tensor]) -> None:
    """Refuse a step before anything is changed.

    Raises:
        NonFiniteError: if a gradient holds a NaN or an infinity; names the weight and the number of entries.
    """
    filled = [gradient for gradient in gradients if gradient.numel()]
    if not filled:
        return
    peaks = torch.stack([g.float() for g in torch._foreach_norm(filled, math.inf)])
    if bool(peaks.isfinite().all()):
        return
    for name, gradient in zip(names, gradients, strict=True):
        bad = int((~gradient.isfinite()).sum())
        if bad:
            raise NonFiniteError(
                f"gradient of {name} holds {bad} non-finite of {gradient.numel()} entries; no weight or momentum "
                "was changed. Find the cause, or let the training loop skip such steps before it calls the optimizer"
            )


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
    """One step of every segment, in place (DESIGN, section 2).

    ```
    M <- mu M + (1 - mu) G
    W <- (1 - lr wd) W - lr tau sqrt(max(m, n) / m) sign(M_j Q_j) Q_j^T
    ```

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
        gradient = gradient.float()
        segment.momentum.lerp_(gradient, 1 - momentum)
        source = segment.momentum.lerp(gradient, 1 - momentum) if nesterov else segment.momentum
        basis = segment.basis.float()
        held = segment.shard.held_blocks()
        scale = learning_rate * step_scale(segment.rows, segment.columns, update_scale)
        segment.weight.mul_(1 - learning_rate * weight_decay)
        for piece in segment.shard.pieces():
            first = held.index(piece.first_block)
            rectangle = (piece.offset, piece.rows, piece.blocks)
            blocks = slice(first, first + piece.blocks)
            of_blocks = column_scale[blocks] if column_scale is not None else None
            step = direction(segment.rectangle(source, *rectangle), basis[blocks], of_blocks)
            segment.rectangle(segment.weight, *rectangle).add_(step.to(segment.weight.dtype), alpha=-scale)
