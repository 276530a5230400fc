"""Run Dobb's update, moment sums and refreshes in the compiled extension if available, else in plain PyTorch.

This is the only module that calls the method's operators in csrc.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ...errors import NonFiniteError, UnsupportedError
from ...kernels import dispatch
from ...kernels.dispatch import Backend
from ...numerics.precision import full_precision
from ...sharding.segment import Segment
from . import moment
from . import update as reference
from .orthogonalize import Method, RefreshedBasis
from .orthogonalize import refresh_basis as plain_refresh_basis

Precision = Literal["exact", "bf16"]
PRECISIONS = get_args(Precision)

_GRAM_DTYPES = {
    "cpu": (torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16, torch.float16),  # the tensor cores' fp32 is TF32, too coarse for second moments
}
"""Activations whose second moments the extension sums; others go through batched matrix products."""

Pending = list[tuple[tuple[str, ...], Tensor]]
"""Names of weights, and the number of their coefficients that were not finite, still on its device."""


def update(
    segments: Sequence[Segment],
    gradients: Sequence[Tensor],
    *,
    learning_rate: float,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
    update_scale: float,
    precision: Precision = "exact",
    backend: Backend = "auto",
    copies: Sequence[Tensor | None] | None = None,
    column_scales: Sequence[Tensor] | None = None,
) -> Pending:
    """Update every segment in place by one step: `update.update`, fused if the extension allows.

    Args:
        segments: what to update.
        gradients: one `[shard.numel]` tensor for each segment, fp32 or bf16.
        learning_rate: `lr`.
        weight_decay: `wd`, decoupled.
        momentum: `mu`.
        nesterov: project `mu M + (1 - mu) G` instead of `M`.
        update_scale: `tau`.
        precision: `exact` takes the signs from products as good as fp32, `bf16` may round `M` and `Q` to bf16 first,
            where the device is faster with it.
        backend: `auto` takes the extension where it has kernels for the tensors, and warns once where it has none.
        copies: for each segment a bf16 tensor `[shard.numel]` that receives the new weight, or `None`.
        column_scales: for Dobb-l2, one fp32 tensor `[held, b]` for each segment: coefficients are multiplied by it
            instead of taking their sign.

    Returns:
        Counts that `check` must inspect before the next step, on devices that run asynchronously; empty on a CPU.

    Raises:
        NonFiniteError: if coefficients on a CPU are not finite, which `numerics.finite.check_finite` does not rule out:
            finite gradients can overflow the momentum.
        UnsupportedError: if `backend` is `extension` and it cannot run.
    """
    if any(segment.output_side and segment.basis is not None for segment in segments):
        return _update_turned(
            segments,
            gradients,
            copies,
            column_scales,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            update_scale=update_scale,
            precision=precision,
            backend=backend,
        )
    by_kernel: dict[tuple[torch.device, int], list[int]] = {}
    plain: list[int] = []
    for i, segment in enumerate(segments):
        if segment.weight.numel() == 0:
            continue
        if _takes(segment, backend):
            by_kernel.setdefault((segment.weight.device, segment.shard.width), []).append(i)
        else:
            plain.append(i)
    pending: Pending = []
    for (device, width), chosen in by_kernel.items():
        count = torch.ops.dobb.update(
            [segments[i].weight for i in chosen],
            [_supported_gradient(gradients[i]) for i in chosen],
            [segments[i].momentum for i in chosen],
            [_basis(segments[i]).contiguous() for i in chosen],
            [_copy_or_empty(copies[i], device) for i in chosen] if copies is not None else [],
            [column_scales[i].contiguous() for i in chosen] if column_scales is not None else [],
            [segments[i].shard.start for i in chosen],
            [segments[i].shard.columns for i in chosen],
            width,
            [
                learning_rate * reference.step_scale(s.rows, s.columns, update_scale)
                for s in (segments[i] for i in chosen)
            ],
            1 - learning_rate * weight_decay,
            momentum,
            nesterov,
            precision,
            "sign" if column_scales is None else "l2",
        )
        dispatch.kernels_run[dispatch.kernel_name(device)] += len(chosen)
        pending.append((tuple(segments[i].name for i in chosen), count))
    if plain:
        dispatch.kernels_run["reference"] += len(plain)
        device = segments[plain[0]].weight.device
        with full_precision(device) if precision == "exact" else contextlib.nullcontext():
            reference.update(
                [segments[i] for i in plain],
                [gradients[i] for i in plain],
                learning_rate=learning_rate,
                weight_decay=weight_decay,
                momentum=momentum,
                nesterov=nesterov,
                update_scale=update_scale,
                column_scales=[column_scales[i] for i in plain] if column_scales is not None else None,
            )
        for i in plain:
            target = copies[i] if copies is not None else None
            if target is not None:
                target.copy_(segments[i].weight)
    check([entry for entry in pending if entry[1].device.type == "cpu"])
    return [entry for entry in pending if entry[1].device.type != "cpu"]


def _update_turned(
    segments: Sequence[Segment],
    gradients: Sequence[Tensor],
    copies: Sequence[Tensor | None] | None,
    column_scales: Sequence[Tensor] | None,
    **settings: Any,
) -> Pending:
    """`update` for blocks over the output axis, one weight at a time: the transposed copies are short-lived."""
    pending: Pending = []
    for i, segment in enumerate(segments):
        turned = segment.turned()
        of_segment = [column_scales[i]] if column_scales is not None else None
        pending += update([turned], [segment.turn(gradients[i])], column_scales=of_segment, **settings)
        if segment.output_side:
            segment.take_back(turned)
        target = copies[i] if copies is not None else None
        if target is not None:
            target.copy_(segment.weight)
    return pending


def gram_(total: Tensor, activations: Tensor, width: int, backend: Backend = "auto") -> None:
    """Add `sum_tokens x_j x_j^T` of every block to `total`, as `moment.gram` computes it.

    Args:
        total: sums `[n / b, b, b]` in fp32, contiguous, changed in place.
        activations: `x [..., n]` in any floating dtype; every leading position is a token.
        width: features in one block, `b`.
        backend: `reference` keeps the extension out of it. It sums on CPUs only; elsewhere PyTorch does.

    Raises:
        BlockError: if `width` does not divide `n`.
    """
    rows = activations.detach().reshape(-1, activations.shape[-1])
    device = rows.device.type
    supported = rows.dtype in _GRAM_DTYPES.get(device, ()) and width > 0 and not rows.shape[1] % width
    if supported and dispatch.may_use_extension(device, backend):
        torch.ops.dobb.gram_(total, rows if rows.stride(1) == 1 else rows.contiguous(), width)
    else:
        total += moment.gram(activations, width)


def gradient_gram(
    segment: Segment, gradient: Tensor, blocks: int, held: Sequence[int], backend: Backend = "auto"
) -> Tensor:
    """Compute a shard's part of `G_j^T G_j` of every block, or of `G_j G_j^T` on the output side (Table 13).

    Args:
        segment: the piece of the weight.
        gradient: `[shard.numel]`.
        blocks: blocks that the sums have room for.
        held: the numbers, among these, of the blocks that the segment has bases of, in that order.
        backend: see `gram_`.

    Returns:
        `[blocks, b, b]` fp32, zero where the shard has nothing of a block.
    """
    width = segment.shard.width
    total = torch.zeros(blocks, width, width, dtype=torch.float32, device=gradient.device)
    flat = segment.turn(gradient)
    for (offset, rows, count), place in segment.rectangles():
        first = held[place.start]
        part = flat[offset : offset + rows * count * width].view(rows, count * width)
        gram_(total[first : first + count], part, width, backend)
    return total


def refresh_basis(
    moment: Tensor, basis: Tensor, *, method: Method, iterations: int = 1, backend: Backend = "auto"
) -> RefreshedBasis:
    """`Q <- orth(A Q)` for every block: `orthogonalize.refresh_basis`, on all threads where the extension allows.

    On a CPU the extension computes each block on its own: its bits depend neither on the blocks it comes with nor on
    the number of threads. It checks each block after every pass of Cholesky QR and stops at the first that is enough.

    Args:
        moment: second moments `A [k, b, b]`.
        basis: old bases `Q [k, b, b]`. Neither is changed.
        method: how to orthonormalise (`--dobb-qr`); `eigh` is plain PyTorch everywhere.
        iterations: steps of subspace iteration (`--dobb-iterations`).
        backend: `reference` keeps the extension out of it. It refreshes on CPUs only; elsewhere PyTorch does.

    Raises:
        ConfigError: on an unknown method or fewer than one iteration.
    """
    compiled = moment.device.type == "cpu" and method in ("householder", "cholesky") and iterations >= 1
    if not compiled or not dispatch.may_use_extension("cpu", backend):
        return plain_refresh_basis(moment, basis, method=method, iterations=iterations)
    with full_precision(moment.device):
        return RefreshedBasis(*torch.ops.dobb.refresh_basis(moment, basis, method, iterations))


def check(pending: Pending) -> None:
    """Raise if a step left weights that are not finite. Waits for the device.

    Raises:
        NonFiniteError: names the weights of the first kernel that met such coefficients.
    """
    for names, count in pending:
        number = int(count)
        if number:
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            raise NonFiniteError(
                f"{number} coefficients of the momentum were not finite, in {shown}: NaN went into these weights. The "
                "gradients or the momentum were too large for fp32; continue from a checkpoint, with clipped gradients"
            )


def _basis(segment: Segment) -> Tensor:
    assert segment.basis is not None
    return segment.basis


def _takes(segment: Segment, backend: Backend) -> bool:
    """Return whether the extension updates a segment; without a basis there is nothing to fuse."""
    if segment.basis is None or not dispatch.chooses_extension(segment.weight.device.type, backend):
        return False
    supported = segment.weight.dtype == torch.float32
    if not supported and backend == "extension":
        raise UnsupportedError(
            f"cannot update {segment.name} in {segment.weight.dtype}: it works on fp32 weights",
            "use {backend:auto}",
            settings={"backend": backend},
        )
    return supported


def _supported_gradient(gradient: Tensor) -> Tensor:
    return (gradient if gradient.dtype in (torch.float32, torch.bfloat16) else gradient.float()).contiguous()


def _copy_or_empty(copy: Tensor | None, device: torch.device) -> Tensor:
    return copy if copy is not None else torch.empty(0, dtype=torch.bfloat16, device=device)
