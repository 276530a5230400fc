"""Choose between the compiled extension and plain PyTorch, count the paths run, and warn once about a slower one."""

import os
import warnings
from collections import Counter
from typing import Literal, get_args

import torch

from ..errors import UnsupportedError, verbatim
from . import extension

Backend = Literal["auto", "extension", "reference"]
BACKENDS = get_args(Backend)

kernels_run: Counter[str] = Counter()
"""Number of segments that each path ran: the CPU variant's name, `cuda` or `reference`."""

_warned: set[str] = set()


def may_use_extension(device_type: str, backend: Backend) -> bool:
    """Return whether an operator may run in the extension; `chooses_extension` also raises or warns if it cannot."""
    return backend != "reference" and extension.runs_on(device_type)


def chooses_extension(device_type: str, backend: Backend) -> bool:
    """Decide whether the update on a device runs in the extension.

    Args:
        device_type: `cpu` or `cuda`.
        backend: `auto` uses the extension if available, and otherwise warns once.

    Raises:
        UnsupportedError: if `backend` is `extension` and it cannot run there.
    """
    if may_use_extension(device_type, backend) or backend == "reference":
        return backend != "reference"
    reason = extension.why_not(device_type)
    if backend == "extension":
        raise UnsupportedError(
            f"cannot run on {device_type}: {verbatim(reason)}",
            f"use {{backend:auto}} or {{backend:reference}}; or {verbatim(extension.HOW_TO_BUILD)}",
            settings={"backend": backend},
        )
    warn_once(
        f"megatron_dobb runs its slower plain PyTorch update on {device_type}, because the extension is missing: "
        f"{reason}. To build it, {extension.HOW_TO_BUILD}; --dobb-backend reference silences this"
    )
    return False


def warn_once(message: str) -> None:
    """Warn on the first rank, once per process and message."""
    if message not in _warned and os.environ.get("RANK", "0") == "0":
        warnings.warn(message, RuntimeWarning, stacklevel=5)
    _warned.add(message)


def kernel_name(device: torch.device) -> str:
    """Return the variant of the extension that runs on a device."""
    module = extension.load().module
    return module.chosen_cpu_kernel() if device.type == "cpu" and module is not None else device.type
