"""Checks of the compiled extension, of the GPUs that it has to fit, and of the compilers that can build it."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..kernels import toolchain
from .findings import Finding

NVIDIA = Path("/dev/nvidiactl")
REBUILD = "rebuild it where the GPU is: pip install --no-build-isolation --no-deps -e . in a checkout of megatron_dobb"


def compiled() -> Iterator[Finding]:
    from ..kernels import extension
    from ..kernels.source_digest import stamp

    loaded = extension.load()
    if loaded.module is None:
        yield Finding(
            "extension",
            "warning",
            f"the extension is not usable, and slower plain PyTorch runs in its place: {loaded.reason}",
            extension.HOW_TO_BUILD,
        )
        return
    info = extension.build_info()
    yield Finding(
        "extension",
        "ok",
        f"the extension runs its {info.cpu} kernels on this CPU, of {', '.join(info.cpu_kernels)} that it could run",
    )
    current = stamp(Path(extension.__file__).resolve().parents[2] / "csrc")
    compared = "equal to the sources" if current else "no sources beside the package to compare with"
    built = getattr(loaded.module, "sources", "") or "none"
    yield Finding("extension", "note", f"built by {info.compiler} for PyTorch {info.torch}; stamp {built}: {compared}")
    file, here = Path(loaded.module.__file__ or "").resolve(), Path(extension.__file__).resolve().parent
    if file.parent != here:  # an editable installation of another checkout answers for a copy on PYTHONPATH
        yield Finding(
            "extension",
            "warning",
            f"the extension is that of another installation, {file}, and the package is in {here}",
            f"uninstall the other one, or {extension.HOW_TO_BUILD}",
        )
    if info.cuda_architectures:
        yield Finding("extension", "ok", f"CUDA kernels were built for {info.cuda_architectures}")
    else:
        yield Finding("extension", "note", f"no CUDA kernels: {extension.why_not('cuda')}")


def runs_on(architectures: str, capability: tuple[int, int]) -> bool | None:
    """Whether kernels for a `TORCH_CUDA_ARCH_LIST` run on a GPU of this capability; None if the list is not understood.

    Machine code runs on GPUs of the same major number and at least its minor one, that of `a` variants on its own GPU
    alone; what has `+PTX` is also translated for all later ones.
    """
    for entry in filter(None, re.split(r"[;,\s]+", architectures)):
        found = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", entry)
        if found is None:
            return None
        built = (int(found[1]), int(found[2]))
        if capability == built or (not found[3] and capability[0] == built[0] and capability[1] >= built[1]):
            return True
        if found[4] and not found[3] and capability >= built:
            return True
    return False


def gpu() -> Iterator[Finding]:
    import torch

    seen_by_system = NVIDIA.exists() or shutil.which("nvidia-smi") is not None
    if torch.version.cuda is None:
        if seen_by_system:
            yield Finding(
                "gpu",
                "warning",
                "this machine has an NVIDIA driver, which a PyTorch without CUDA cannot use",
                "install a CUDA build of PyTorch",
            )
        else:
            yield Finding("gpu", "note", "no NVIDIA driver on this machine, and no CUDA in PyTorch")
        return
    if not torch.cuda.is_available():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        if hidden is not None:
            reason, remedy = f"CUDA_VISIBLE_DEVICES is {hidden!r}", "unset CUDA_VISIBLE_DEVICES to see all GPUs"
        elif seen_by_system:
            reason = "the driver does not serve this PyTorch"
            remedy = "see what nvidia-smi says; a newer CUDA in PyTorch needs a newer driver"
        else:
            reason, remedy = "no NVIDIA driver here", "run the doctor where the training will run"
        yield Finding("gpu", "warning", f"PyTorch sees no GPU: {reason}", remedy)
        return
    yield from _each_gpu(torch)


def _each_gpu(torch: object) -> Iterator[Finding]:
    from ..kernels import extension

    cuda = torch.cuda  # type: ignore[attr-defined]
    kinds: dict[tuple[str, tuple[int, int]], int] = {}
    for i in range(cuda.device_count()):
        key = (cuda.get_device_name(i), tuple(cuda.get_device_capability(i)))
        kinds[key] = kinds.get(key, 0) + 1
    module = extension.load().module
    architectures = module.cuda_architectures if module is not None else ""
    for (name, capability), count in kinds.items():
        what = f"{count} x {name} of capability {capability[0]}.{capability[1]}"
        wanted = f"{REBUILD}, with TORCH_CUDA_ARCH_LIST={capability[0]}.{capability[1]}"
        fits = runs_on(architectures, capability) if architectures else None
        if not extension.runs_on("cuda"):
            yield Finding("gpu", "warning", f"{what}: no CUDA kernels, {extension.why_not('cuda')}", wanted)
        elif fits:
            yield Finding("gpu", "ok", f"{what}: the CUDA kernels run on it")
        elif fits is None:
            text = f"{what}: cannot tell whether kernels for {architectures!r} run on it; the self-test tries"
            yield Finding("gpu", "warning", text, wanted)
        else:
            text = f"{what}: the CUDA kernels, built for {architectures}, do not run on it"
            yield Finding("gpu", "failure", text, f"{wanted}; or train with --dobb-backend reference")


def compiler() -> Iterator[Finding]:
    command = toolchain.wanted_compiler()
    missing = toolchain.missing_compiler(command)
    if missing is None and command is not None:
        yield Finding("compiler", "ok", f"{command}: {toolchain.compiler_version(command)}")
    elif _have_extension():
        yield Finding("compiler", "note", f"{missing}; needed only to build the extension again")
    else:
        what, _, remedy = str(missing).partition(": ")
        yield Finding("compiler", "warning", f"{what}, so the extension cannot be built", remedy)


def nvcc() -> Iterator[Finding]:
    import torch

    wanted = torch.version.cuda
    if wanted is None:
        yield Finding("nvcc", "note", "nvcc is of no use with a PyTorch without CUDA")
        return
    path = _nvcc(_cuda_home())
    if path is None:
        text = "nvcc is not found, so CUDA kernels cannot be built"
        remedy = f"install the CUDA {wanted} toolkit, or set CUDA_HOME to it"
    else:
        release = toolchain.cuda_release(path)
        if toolchain.fits(release, wanted):
            yield Finding("nvcc", "ok", f"{path} of CUDA {release}, and PyTorch was built with {wanted}")
            return
        text = f"{path} is of CUDA {release}, and PyTorch was built with {wanted}, so CUDA kernels cannot be built"
        remedy = f"set CUDA_HOME to a toolkit of CUDA {wanted}, or install a PyTorch built with CUDA {release}"
    if _have_cuda_kernels():
        yield Finding("nvcc", "note", f"{text}; the extension has some already")
    else:
        yield Finding("nvcc", "warning", text, remedy)


def _cuda_home() -> str | None:
    """The toolkit that a build would take."""
    from torch.utils import cpp_extension

    return cpp_extension.CUDA_HOME


def _nvcc(home: str | None) -> Path | None:
    path = Path(home or "/nonexistent") / "bin" / "nvcc"
    return path if path.exists() else None


def _have_extension() -> bool:
    try:
        from ..kernels import extension

        return extension.load().module is not None
    except Exception:  # the check of the extension itself tells
        return False


def _have_cuda_kernels() -> bool:
    from ..kernels import extension

    return extension.runs_on("cuda")
