"""Switch fp32 products to real fp32, whatever the program allows."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_EXACT = ("none", "ieee")


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Real fp32 products, whatever the process allows elsewhere: no autocast, TF32 or bf16 in place of fp32.

    With TF32, which some containers switch on by environment variable, products carry errors of 1e-3 and no
    basis would reach `MAX_ERROR`. Gradients are not recorded.
    """
    # Only what must change is touched: these switches are the whole process's, in which other threads may run.
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
    """Whether fp32 products are real ones all over the process, so that `full_precision` switches nothing."""
    return all(switch.fp32_precision in _EXACT for switch in _switches())


def _switches() -> tuple[Any, Any]:
    return torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
