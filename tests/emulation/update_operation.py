"""`dobb::update` of the CUDA sources, run by the emulation."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from emulation.emulated import SCHEDULES, Device, Harness, Misaligned, Schedule
from megatron_dobb.methods.dobb import update as reference
from megatron_dobb.sharding.segment import Segment


def update(
    harness: Harness,
    segments: Sequence[Segment],
    gradients: Sequence[Tensor],
    *,
    learning_rate: float,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
    update_scale: float,
    kernels: Literal["one_pass", "wide"] = "one_pass",
    precision: Literal["exact", "bf16"] = "exact",
    copies: Sequence[Tensor | None] | None = None,
    column_scales: Sequence[Tensor] | None = None,
    misaligned: Sequence[int] | None = None,
    slab: tuple[int, int] = (7, 2),
    device: Device | None = None,
    schedules: Sequence[Schedule] = SCHEDULES,
) -> int:
    """`kernels.update` for segments of one width; returns the number of coefficients that are not finite.

    Args:
        harness: runs the kernels.
        segments: what to update, in place.
        gradients: one `[shard.numel]` tensor for each segment, fp32 or bf16.
        learning_rate: `lr`.
        weight_decay: `wd`.
        momentum: `mu`.
        nesterov: project `mu M + (1 - mu) G`.
        update_scale: `tau`.
        kernels: those of one pass, or those around a library's products.
        precision: as in `kernels.update`.
        copies: as in `kernels.update`.
        column_scales: as in `kernels.update`.
        misaligned: for each segment, how many elements after a multiple of 16 bytes its tensors begin.
        slab: rows and blocks in one product of the wide kernels.
        device: what the launcher is told of the GPU.
        schedules: orders of the threads.
    """
    count = len(segments)
    by = misaligned or [0] * count
    bits = [torch.zeros(1, dtype=torch.int64)]
    given = list(copies or [None] * count)

    def shifted(tensors: Sequence[Tensor]) -> list[Misaligned]:
        return [Misaligned(t, by[i] * t.element_size() % 16) for i, t in enumerate(tensors)]

    buffers = {
        "weights": shifted([s.weight for s in segments]),
        "gradients": shifted(gradients),
        "momenta": shifted([s.momentum for s in segments]),
        "bases": shifted([s.basis for s in segments]),
        "copies": shifted([torch.empty(0, dtype=torch.bfloat16) if c is None else c for c in given]),
        "column_scales": [] if column_scales is None else shifted(column_scales),
        "not_finite": bits[0],
    }
    factor = [learning_rate * reference.step_scale(s.rows, s.columns, update_scale) for s in segments]
    harness.run(
        f"update_{kernels}",
        buffers,
        {
            "width": segments[0].shard.width if segments else 1,
            "starts": [s.shard.start for s in segments],
            "columns": [s.shard.columns for s in segments],
            "numel": [s.weight.numel() for s in segments],
            "has_copy": [c is not None for c in given],
            "gradient_is_bf16": [g.dtype is torch.bfloat16 for g in gradients],
            "momentum_is_bf16": [s.momentum.dtype is torch.bfloat16 for s in segments],
            "basis_is_bf16": [s.basis.dtype is torch.bfloat16 for s in segments],
            "nesterov": nesterov,
            "exact": precision == "exact",
            "unit_columns": column_scales is not None,
            "slab_rows": slab[0],
            "slab_blocks": slab[1],
        },
        {"scales": factor, "decay": 1 - learning_rate * weight_decay, "momentum": momentum},
        changed=["weights", "momenta", "copies", "not_finite"],
        device=device,
        schedules=schedules,
    )
    return int(bits[0])
