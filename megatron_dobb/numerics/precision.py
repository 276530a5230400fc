"""Run fp32 products in full fp32, whatever the program allows."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_EXACT = ("none", "ieee")


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute products in full fp32, whatever the process allows elsewhere: no autocast, and no TF32 or bf16.

    With TF32, which some containers enable by environment variable, products have errors of 1e-3 and no basis would
    reach `MAX_ERROR`. Gradients are not recorded.
    """
    # Change only what is necessary: these switches are process-wide, and other threads may be running.
    changed = [(switch, switch.fp32_precision) for switch in _switches() if switch.fp32_precision not in _EXACT]
    try:
        for switch, _ in changed:
            switch.fp32_precision = "ieee"
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        for switch, precision in changed:
            switch.fp32_precision = precision


def products_are_exact() -> bool:
    """Return whether the whole process computes fp32 products in full, so that `full_precision` changes nothing."""
    return all(switch.fp32_precision in _EXACT for switch in _switches())


def _switches() -> tuple[Any, Any]:
    return torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
