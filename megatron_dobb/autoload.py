"""Patch Megatron when a program imports it; nothing heavy is imported before that, and nothing else is touched.

The launcher asks for it, and so does `megatron_dobb_autoload.pth` at every start of an interpreter when
`MEGATRON_DOBB_AUTOLOAD=1` is set.
"""

import os
from types import ModuleType

from .post_import import after_import

VARIABLE = "MEGATRON_DOBB_AUTOLOAD"


def wait_for_megatron() -> None:
    """Patch Megatron when, and only if, the program imports it."""
    after_import("megatron.core", _install)


def _install(core: ModuleType) -> None:
    from .megatron import install

    install()


if os.environ.get(VARIABLE) == "1":
    wait_for_megatron()
