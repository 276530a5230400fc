"""All checks in their order, and one guard around each."""

import importlib
from collections.abc import Callable, Iterator

from .findings import Finding, State, first_line

CHECKS: dict[str, tuple[str, State]] = {
    "package": ("versions:package", "failure"),
    "python": ("versions:python", "failure"),
    "torch": ("versions:pytorch", "failure"),
    "nccl": ("versions:nccl", "warning"),
    "transformer-engine": ("versions:transformer_engine", "warning"),
    "apex": ("versions:apex", "warning"),
    "megatron-core": ("megatron:megatron_core", "failure"),
    "extension": ("build:compiled", "failure"),
    "gpu": ("build:gpu", "warning"),
    "compiler": ("build:compiler", "warning"),
    "nvcc": ("build:nvcc", "warning"),
    "autoload": ("megatron:autoload", "warning"),
    "kernels": ("selftest:kernels", "failure"),
    "refresh": ("selftest:refresh", "failure"),
    "step": ("selftest:step", "failure"),
    "patches": ("megatron:seam", "failure"),
}
"""By name: the module of this folder and its function, and how bad it is if the check itself breaks."""


def run(name: str) -> Iterator[Finding]:
    """The findings of one check; if it raises, a finding that says so."""
    module, _, function = CHECKS[name][0].partition(":")
    try:
        check: Callable[[], Iterator[Finding]] = getattr(importlib.import_module(f"{__package__}.{module}"), function)
        yield from check()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a broken installation raises anything, and must still get its verdict
        if isinstance(error, ImportError) and not _torch_imports():
            yield Finding(name, "note", "not tried, because PyTorch does not import")
        else:
            yield broken(name, first_line(error))


def broken(name: str, reason: str) -> Finding:
    """The finding of a check that could not end."""
    return Finding(
        name,
        CHECKS[name][1],
        f"the check of {name} broke off: {reason}",
        "mend what the message names; if it names nothing that you can mend, please report it",
    )


def _torch_imports() -> bool:
    try:
        importlib.import_module("torch")
    except Exception:
        return False
    return True
