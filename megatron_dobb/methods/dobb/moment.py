"""Second moments of the activations, block by block: sums, moving average, and the refresh of the bases.

A linear layer with input `x` of `n` features has the moment blocks `A_j [b, b]`, the moving average of
`x_j x_j^T` over tokens, where `x_j` are the `b` features of block `j`. The tensors of this module batch such
blocks, of one or of many weights, along their first axis.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...errors import BlockError
from ...numerics.precision import full_precision
from .orthogonalize import Method, RefreshedBasis, refresh_basis

_TOKENS_AT_A_TIME = 1024
"""Tokens in one product. It bounds the fp32 copy of the activations, and the error of the sum: products of
narrow blocks add token by token, whose rounding would otherwise reach 1e-5 of a sum over 20,000 tokens."""


class RefreshBasis(Protocol):
    """Signature of `orthogonalize.refresh_basis` and of equivalent functions."""

    def __call__(self, moment: Tensor, basis: Tensor, *, method: Method, iterations: int) -> RefreshedBasis: ...


class RefreshCounts(NamedTuple):
    """Blocks that kept their moment and basis, and blocks that fell back to Householder (int64 scalars)."""

    skipped: Tensor
    fallbacks: Tensor


def gram(activations: Tensor, width: int) -> Tensor:
    """`sum_tokens x_j x_j^T` for every block of `width` features.

    Args:
        activations: `x [..., n]` in any floating dtype. Every leading position is a token; there may be none.
        width: features in one block, `b`.

    Returns:
        Sums `[n / b, b, b]` in fp32, also accumulated in fp32.

    Raises:
        BlockError: if `width` does not divide `n`.
    """
    features = activations.shape[-1]
    if width < 1 or features % width:
        raise BlockError(f"block width {width} does not divide the {features} features of the activations")
    blocks = features // width
    with full_precision(activations.device):
        tokens = activations.reshape(-1, blocks, width)
        total = torch.zeros(blocks, width, width, dtype=torch.float32, device=activations.device)
        for chunk in tokens.split(_TOKENS_AT_A_TIME):
            by_block = chunk.float().transpose(0, 1)
            total += torch.bmm(by_block.mT, by_block)
        return total


def pack_triangle(blocks: Tensor) -> Tensor:
    """The lower triangles `[k, b (b + 1) / 2]`, row by row, of symmetric blocks `[k, b, b]`."""
    width = blocks.shape[-1]
    row, column = torch.tril_indices(width, width, device=blocks.device)
    return blocks.flatten(1).index_select(1, row * width + column)


def unpack_triangle(packed: Tensor, width: int) -> Tensor:
    """The symmetric blocks `[k, b, b]` whose lower triangles are `packed [k, b (b + 1) / 2]`."""
    index = torch.arange(width, device=packed.device)
    low, high = torch.minimum(index[:, None], index), torch.maximum(index[:, None], index)
    position = high * (high + 1) // 2 + low
    return packed.index_select(1, position.flatten()).unflatten(1, (width, width))


@torch.no_grad()
def fold(moment: Tensor, total: Tensor, tokens: Tensor, *, beta: float) -> Tensor:
    """`A <- beta A + (1 - beta) total / tokens`, in place, for every block with usable sums.

    A block without tokens, with all-zero sums or with a non-finite one keeps its `A`, bit for bit. The choice
    is made on the device.

    Args:
        moment: `A [k, b, b]`, changed in place; computed in fp32 and then rounded to its dtype.
        total: sums of `x x^T` over all captured tokens, `[k, b, b]` in fp32. Becomes their mean, to save memory.
        tokens: number of tokens in each of these sums, `[k]`.
        beta: decay of the moving average (`--dobb-moment-beta`).

    Returns:
        `[k]`, whether the block's sums entered `A`.
    """
    mean = total.div_(tokens[:, None, None])
    averaged = (moment.float() * beta).add_(mean, alpha=1 - beta).to(moment.dtype)
    # Tested after the division and the rounding, which can underflow and overflow.
    accepted = (tokens > 0) & _largest(averaged).isfinite() & (_largest(mean) > 0)
    torch.where(accepted[:, None, None], averaged, moment, out=moment)
    return accepted


def _largest(blocks: Tensor) -> Tensor:
    """The largest magnitude in every block, NaN where there is one: a faster reduction than those of booleans."""
    return blocks.abs().amax(dim=(-2, -1))


@torch.no_grad()
def refresh_(
    moment: Tensor,
    basis: Tensor,
    total: Tensor,
    tokens: Tensor,
    *,
    beta: float,
    method: Method,
    iterations: int = 1,
    orthogonalize: RefreshBasis = refresh_basis,
) -> RefreshCounts:
    """Fold new sums into the moments and refresh the bases, both in place.

    A block that `fold` does not accept keeps its `A` and its `Q`, bit for bit, and is counted as skipped.

    Args:
        moment: `A [k, b, b]` in fp32 or bf16.
        basis: `Q [k, b, b]` in fp32 or bf16, to which the new fp32 basis is rounded.
        total: see `fold`.
        tokens: see `fold`.
        beta: see `fold`.
        method: see `refresh_basis`.
        iterations: see `refresh_basis`.
        orthogonalize: function that computes the new bases: plain PyTorch, or `kernels.refresh_basis`.

    Raises:
        ConfigError: from `refresh_basis`.
    """
    accepted = fold(moment, total, tokens, beta=beta)
    chosen = accepted[:, None, None]
    # Kept blocks are computed with the rest, whatever they contain, and their results are discarded.
    refreshed = orthogonalize(moment, basis, method=method, iterations=iterations)
    torch.where(chosen, refreshed.basis.to(basis.dtype), basis, out=basis)
    return RefreshCounts(skipped=(~accepted).sum(), fallbacks=(refreshed.fell_back & accepted).sum())
