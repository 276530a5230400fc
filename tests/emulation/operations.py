"""The launchers of csrc/dobb/cuda as functions of tensors, run by the emulation."""

import torch
from torch import Tensor

from emulation.emulated import Device, Harness, Misaligned


def gram_(
    harness: Harness,
    total: Tensor,
    activations: Tensor,
    width: int,
    *,
    misaligned: int = 0,
    device: Device | None = None,
    tiles_at_a_time: int = 0,
) -> None:
    """`dobb::gram_` of bf16 or fp16 activations, which start `misaligned` bytes after a multiple of 16.

    `tiles_at_a_time` makes do with less scratch memory than the launcher plans.
    """
    tokens, features = activations.shape
    harness.run(
        "gram",
        {"total": total, "activations": Misaligned(activations, misaligned)},
        {
            "is_bf16": activations.dtype is torch.bfloat16,
            "tokens": tokens,
            "row_stride": activations.stride(0),
            "features": features,
            "width": width,
            "tiles_at_a_time": tiles_at_a_time,
        },
        changed=["total"],
        device=device,
    )
