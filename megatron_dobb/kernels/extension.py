"""Load the compiled extension, and report what it contains or why it is unusable."""

import functools
import importlib
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from ..version import __version__
from .source_digest import stamp

_unchecked = threading.Lock()  # acquired by the first thread that uses CPU kernels, and never released
_NOTE = Path(__file__).parents[1] / "_not_built.txt"
HOW_TO_BUILD = (
    "with PyTorch and a C++ compiler installed, run pip install --no-build-isolation --no-deps -e . in a checkout "
    "of megatron_dobb"
)


@dataclass(frozen=True)
class Loaded:
    """Extension module, or `None` and the reason."""

    module: ModuleType | None
    reason: str = ""


@functools.cache
def load() -> Loaded:
    """Import the extension once per process, which registers its ops."""
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


def _check_cpu_kernels(module: ModuleType) -> None:
    """Choose the CPU kernels once per process, and warn about rejected variants.

    The extension compares the fastest variant that this processor supports with the plain one on a tiny block, and
    tries the next one if the results differ.
    """
    if not _unchecked.acquire(blocking=False):
        return
    kernel = module.chosen_cpu_kernel()
    if rejected := module.rejected_cpu_kernels():
        warnings.warn(
            f"megatron_dobb runs its {kernel} kernels on this CPU: on a test block, {', '.join(rejected)} gave other "
            "results than plain C++. The processor, the virtual machine or the compiler is at fault. Results are "
            "right, and slower; rebuild the extension with another compiler, and report the model of the CPU",
            RuntimeWarning,
            stacklevel=4,
        )


def runs_on(device_type: str) -> bool:
    """Return whether the extension has kernels for a device type, `cpu` or `cuda`."""
    module = load().module
    if module is None:
        return False
    if device_type == "cpu":
        _check_cpu_kernels(module)
    return torch._C._dispatch_has_kernel_for_dispatch_key("dobb::update", device_type.upper())


def why_not(device_type: str) -> str:
    """Explain in one clause why `runs_on` is false."""
    if load().module is None:
        return load().reason
    notes = [line for line in _NOTE.read_text().splitlines() if "CUDA" in line] if _NOTE.exists() else []
    return notes[0] if notes and device_type == "cuda" else f"it was built without kernels for {device_type}"


@dataclass(frozen=True)
class BuildInfo:
    """Build details of the extension, and the kernels in use.

    Attributes:
        version: version of megatron_dobb.
        torch: version of PyTorch in use.
        extension: whether the extension is usable.
        reason: why it is not, or empty.
        compiler: compiler that built it, or empty.
        cpu_kernels: variants of the CPU kernels that this processor runs, fastest first.
        cuda_architectures: architectures of the CUDA kernels, as in `TORCH_CUDA_ARCH_LIST`; empty without any.
        cpu: path of `--dobb-backend auto` on a CPU: a variant, or `reference`.
        cpu_checked: whether this process compared that variant with the plain one and found the same results; False
            for `plain` and `reference`, which are not compared.
        cpu_rejected: faster variants that gave different results on this processor, and are not used.
        cuda: path of `--dobb-backend auto` on a GPU: `cuda` or `reference`.
    """

    version: str
    torch: str
    extension: bool
    reason: str
    compiler: str
    cpu_kernels: tuple[str, ...]
    cuda_architectures: str
    cpu: str
    cpu_checked: bool
    cpu_rejected: tuple[str, ...]
    cuda: str


def build_info() -> BuildInfo:
    """Report how the extension was built and the path that `--dobb-backend auto` runs."""
    loaded = load()
    module = loaded.module
    if module is not None:
        _check_cpu_kernels(module)
    return BuildInfo(
        version=__version__,
        torch=torch.__version__,
        extension=module is not None,
        reason=loaded.reason,
        compiler=module.compiler if module else "",
        cpu_kernels=tuple(module.supported_cpu_kernels()) if module else (),
        cuda_architectures=module.cuda_architectures if module else "",
        cpu=module.chosen_cpu_kernel() if module else "reference",
        cpu_checked=module.chosen_cpu_kernel_was_checked() if module else False,
        cpu_rejected=tuple(module.rejected_cpu_kernels()) if module else (),
        cuda="cuda" if runs_on("cuda") else "reference",
    )
