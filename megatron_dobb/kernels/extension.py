"""The compiled extension: whether it is there, what it holds, and why not."""

import functools
import importlib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from ..version import __version__
from .source_digest import stamp

_NOTE = Path(__file__).parents[1] / "_not_built.txt"
HOW_TO_BUILD = (
    "with PyTorch and a C++ compiler installed, run pip install --no-build-isolation --no-deps -e . in a checkout "
    "of megatron_dobb"
)


@dataclass(frozen=True)
class Loaded:
    """The extension's module, or `None` and the reason."""

    module: ModuleType | None
    reason: str = ""


@functools.cache
def load() -> Loaded:
    """Import the extension, which registers its ops, once per process."""
    try:
        module = importlib.import_module("megatron_dobb._C")
    except ImportError as error:
        if error.name == "megatron_dobb._C":
            note = _NOTE.read_text().splitlines() if _NOTE.exists() else []
            return Loaded(None, note[0] if note else "it was not built")
        return Loaded(None, f"it does not load with PyTorch {torch.__version__}: {error}")
    if module.torch_version != torch.__version__:
        return Loaded(None, f"it was built for PyTorch {module.torch_version}, and this is {torch.__version__}")
    current = stamp(Path(__file__).resolve().parents[2] / "csrc")
    if current and getattr(module, "sources", "") != current:
        return Loaded(None, f"{module.__file__} was built from other sources than those of this checkout")
    return Loaded(module)


def runs_on(device_type: str) -> bool:
    """Whether the extension has kernels for a type of device, `cpu` or `cuda`."""
    if load().module is None:
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key("dobb::update", device_type.upper())


def why_not(device_type: str) -> str:
    """In one clause, why `runs_on` is false."""
    if load().module is None:
        return load().reason
    notes = [line for line in _NOTE.read_text().splitlines() if "CUDA" in line] if _NOTE.exists() else []
    return notes[0] if notes and device_type == "cuda" else f"it was built without kernels for {device_type}"


@dataclass(frozen=True)
class BuildInfo:
    """What was built and what runs.

    Attributes:
        version: of megatron_dobb.
        torch: version of PyTorch in use.
        extension: whether the extension is usable.
        reason: why it is not, or empty.
        compiler: that built it, or empty.
        cpu_kernels: variants of the CPU kernels that this processor runs, the fastest first.
        cuda_architectures: that the CUDA kernels were built for, as in `TORCH_CUDA_ARCH_LIST`; empty without them.
        cpu: what `--dobb-backend auto` runs on a CPU: a variant, or `reference`.
        cuda: what it runs on a GPU: `cuda` or `reference`.
    """

    version: str
    torch: str
    extension: bool
    reason: str
    compiler: str
    cpu_kernels: tuple[str, ...]
    cuda_architectures: str
    cpu: str
    cuda: str


def build_info() -> BuildInfo:
    """What was built, and which path `--dobb-backend auto` runs."""
    loaded = load()
    module = loaded.module
    return BuildInfo(
        version=__version__,
        torch=torch.__version__,
        extension=module is not None,
        reason=loaded.reason,
        compiler=module.compiler if module else "",
        cpu_kernels=tuple(module.supported_cpu_kernels()) if module else (),
        cuda_architectures=module.cuda_architectures if module else "",
        cpu=module.chosen_cpu_kernel() if module else "reference",
        cuda="cuda" if runs_on("cuda") else "reference",
    )
