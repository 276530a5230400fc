"""Imported by `megatron_dobb_autoload.pth` at every interpreter start when `MEGATRON_DOBB_AUTOLOAD=1` is set.

It only leaves a note to patch Megatron when a program imports it; everything else is untouched and nothing heavy is
imported.
"""

import os
from types import ModuleType

from .postimport import after_import

VARIABLE = "MEGATRON_DOBB_AUTOLOAD"


def _install(core: ModuleType) -> None:
    from .megatron import install

    install()


if os.environ.get(VARIABLE) == "1":
    after_import("megatron.core", _install)
