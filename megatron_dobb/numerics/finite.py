"""Check gradients for non-finite values."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import NonFiniteError


def check_finite(names: Sequence[str], gradients: Sequence[Tensor]) -> None:
    """Reject a step with non-finite gradients before anything is changed.

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
