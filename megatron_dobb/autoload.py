"""Patch Megatron when a program imports it; import nothing heavy before that, and touch nothing else.

The launcher imports this module, and so does `megatron_dobb_autoload.pth` whenever an interpreter starts with
`MEGATRON_DOBB_AUTOLOAD=1` set.
"""

import os
from types import ModuleType

from .post_import import after_import

VARIABLE = "MEGATRON_DOBB_AUTOLOAD"


def wait_for_megatron() -> None:
    """Patch Megatron if and when the program imports it."""
    after_import("megatron.core", _install)


def _install(core: ModuleType) -> None:
    from .megatron import install

    install()


if os.environ.get(VARIABLE) == "1":
    wait_for_megatron()
