"""Checks of what is installed: each is found or not, and supported or not."""

import importlib
import importlib.metadata
import importlib.util
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from ..version import __version__
from .findings import Finding, first_line

OLDEST_PYTHON = (3, 12)
OLDEST_TORCH = (2, 11)


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: `(2, 11, 0)` of `2.11.0a0+git`."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def package() -> Iterator[Finding]:
    yield Finding("package", "ok", f"megatron_dobb {__version__} in {Path(__file__).resolve().parents[1]}")


def python() -> Iterator[Finding]:
    # An older one does not get here: the package says so in a sentence when it is imported.
    found = ".".join(map(str, sys.version_info[:3]))
    yield Finding("python", "ok", f"Python {found} (supported: {_dotted(OLDEST_PYTHON)} or newer), {sys.executable}")


def pytorch() -> Iterator[Finding]:
    wanted = _dotted(OLDEST_TORCH)
    remedy = f"install PyTorch {wanted} or newer: pip install 'torch>={wanted}', or see pytorch.org for CUDA builds"
    try:
        import torch
    except Exception as error:  # ImportError of torch or of a library that it loads
        yield Finding("torch", "failure", f"PyTorch does not import: {first_line(error)}", remedy)
        return
    version = str(torch.__version__)
    if release(version) < OLDEST_TORCH:
        yield Finding("torch", "failure", f"PyTorch {version} is not supported, only {wanted} or newer", remedy)
    else:
        yield Finding("torch", "ok", f"PyTorch {version} (supported: {wanted} or newer)")
    if torch.version.cuda is None:
        other = " but for ROCm, which nobody has tried" if getattr(torch.version, "hip", None) else ""
        yield Finding(
            "torch",
            "warning",
            f"PyTorch {version} is built without CUDA{other}: everything runs on CPUs",
            "to train on NVIDIA GPUs, install a CUDA build of PyTorch, from pytorch.org or in NVIDIA's container",
        )
    else:
        yield Finding("torch", "ok", f"PyTorch is built with CUDA {torch.version.cuda}")


def nccl() -> Iterator[Finding]:
    import torch

    if torch.version.cuda is None:
        yield Finding("nccl", "note", "NCCL is not in a PyTorch without CUDA; ranks talk through gloo")
    elif not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        yield Finding(
            "nccl",
            "warning",
            "PyTorch is built without NCCL: ranks with GPUs cannot talk to each other",
            "install a PyTorch with NCCL, from pytorch.org or in NVIDIA's container",
        )
    else:
        found = ".".join(map(str, torch.cuda.nccl.version()))
        yield Finding("nccl", "ok", f"NCCL {found} (supported: whichever comes with PyTorch)")


def transformer_engine() -> Iterator[Finding]:
    yield from _optional(
        "transformer-engine",
        "transformer_engine",
        ("transformer-engine", "transformer_engine"),
        "Transformer Engine",
        "optional; without it train with --transformer-impl local",
        "its range is megatron-core's own; Dobb's adapters were tried with 2.20 on a CPU, never on a GPU",
    )


def apex() -> Iterator[Finding]:
    yield from _optional(
        "apex",
        "apex",
        ("apex",),
        "Apex",
        "optional; without it train with --no-gradient-accumulation-fusion unless Transformer Engine is there",
        "any that megatron-core takes",
    )


def _optional(
    check: str, module: str, distributions: tuple[str, ...], title: str, without: str, supported: str
) -> Iterator[Finding]:
    if importlib.util.find_spec(module) is None:
        yield Finding(check, "note", f"{title} is not found: {without}")
        return
    version = next(filter(None, map(_installed, distributions)), "of unknown version")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(module)
    except Exception as error:
        yield Finding(
            check,
            "warning",
            f"{title} {version} is installed but does not import, so Megatron goes without it: {first_line(error)}",
            f"install a {title} built for this PyTorch, or uninstall it",
        )
        return
    yield Finding(check, "ok", f"{title} {version} (supported: {supported})")


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
