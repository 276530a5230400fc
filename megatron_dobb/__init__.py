"""Dobb: a distributed optimizer with block-diagonal eigenbases, for Megatron-LM and plain PyTorch.

`Dobb` is a `torch.optim.Optimizer` for any model; `DobbConfig` holds the settings; `install` teaches Megatron
`--optimizer dobb`. Names are imported on first use, so that the autoload hook costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .config import DobbConfig as DobbConfig
    from .megatron import install as install
    from .optimizer import Dobb as Dobb

_HOME = {"Dobb": ".optimizer", "DobbConfig": ".config", "install": ".megatron"}

__all__ = ["Dobb", "DobbConfig", "__version__", "install"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name], __name__), name)
