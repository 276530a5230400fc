"""Dobb: a distributed optimizer with block-diagonal eigenbases, for Megatron-LM and plain PyTorch.

`Dobb` is a `torch.optim.Optimizer` for any model; `DobbConfig` holds the settings; `install` adds `--optimizer dobb` to
Megatron, or takes a `DobbConfig` where there is no command line. Names are imported on first use, so the autoload hook
costs nothing.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from .version import __version__

if sys.version_info < (3, 12):  # noqa: UP036  (a source tree on PYTHONPATH passes no installer that would refuse)
    _too_old = (
        f"megatron_dobb {__version__} needs Python 3.12 or newer, as megatron-core 0.19 does; this is Python "
        f"{sys.version.split()[0]} ({sys.executable}). Make a virtual environment with a newer one: python3.12 -m venv"
    )
    if sys.argv[:2] == ["-m", "doctor"]:  # sys.argv while runpy locates this package
        print(f"not usable: {_too_old}")
        sys.exit(1)
    raise ImportError(_too_old)

if TYPE_CHECKING:
    from .kernels.extension import build_info as build_info
    from .megatron import install as install
    from .methods.dobb.settings import DobbConfig as DobbConfig
    from .pytorch.dobb import Dobb as Dobb

_HOME = {
    "Dobb": ".pytorch.dobb",
    "DobbConfig": ".methods.dobb.settings",
    "build_info": ".kernels.extension",
    "install": ".megatron",
}

__all__ = ["Dobb", "DobbConfig", "__version__", "build_info", "install"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name], __name__), name)
