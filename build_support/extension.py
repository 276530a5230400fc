"""What of csrc/ can be built here: CPU kernels always, CUDA kernels with nvcc and a CUDA PyTorch.

Environment variables, all optional:
    MEGATRON_DOBB_NO_EXTENSION=1  build no extension
    MEGATRON_DOBB_NO_CUDA=1       build only the CPU kernels
    TORCH_CUDA_ARCH_LIST          architectures of the CUDA kernels, as in PyTorch
    MAX_JOBS                      parallel compilations; otherwise chosen from cores and free memory
    CXX, CUDA_HOME                compilers
"""

import os
import runpy
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NAME = "megatron_dobb._C"
NOTE = "_not_built.txt"
CUDA_ARCHITECTURES = "8.0;9.0;10.0"  # where TORCH_CUDA_ARCH_LIST is not set and no GPU is seen
GIB_FOR_A_JOB = 2.5  # a file with PyTorch's headers


def _of_package(name: str) -> SimpleNamespace:
    """A file of the package, which cannot be imported as a whole without PyTorch."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "megatron_dobb" / f"{name}.py")))


_toolchain = _of_package("kernels/toolchain")


@dataclass
class Plan:
    """What will be built.

    Attributes:
        extensions: for `setup(ext_modules=...)`; empty if the extension cannot be built.
        commands: for `setup(cmdclass=...)`.
        notes: what is missing and how to get it; the first is shown to users who run without the extension.
    """

    extensions: list[Any] = field(default_factory=list)
    commands: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def plan() -> Plan:
    """Look at compilers, PyTorch and CUDA."""
    if os.environ.get("MEGATRON_DOBB_NO_EXTENSION") == "1":
        return Plan(notes=["MEGATRON_DOBB_NO_EXTENSION=1 was set"])
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError as error:
        return Plan(notes=[f"PyTorch was not installed where the package was built ({error})"])
    compiler = _toolchain.wanted_compiler()
    if (missing := _toolchain.missing_compiler(compiler)) is not None:
        return Plan(notes=[missing])
    os.environ.setdefault("MAX_JOBS", str(parallel_jobs()))
    if cpp_extension.is_ninja_available() is False:
        print("megatron_dobb: ninja is not installed, so files are compiled one after the other")
    notes: list[str] = []
    architectures = _cuda_architectures(torch, cpp_extension, notes)
    version = _toolchain.compiler_version(compiler)
    macros = [
        ("DOBB_TORCH_VERSION", f'"{torch.__version__}"'),
        ("DOBB_COMPILER", f'"{version}"'),
        ("DOBB_SOURCES", f'"{_stamp()}"'),
    ]
    threads = _threads(torch, version)
    for_cpu = _extension(cpp_extension, macros, threads, "")
    return Plan(
        extensions=[_extension(cpp_extension, macros, threads, architectures) if architectures else for_cpu],
        commands={"build_ext": _or_with_less(cpp_extension.BuildExtension, notes, [for_cpu] if architectures else [])},
        notes=notes,
    )


def _extension(cpp_extension: Any, macros: list[tuple[str, str | None]], threads: list[str], architectures: str) -> Any:
    """For setuptools: the extension, with CUDA kernels if there are architectures to compile them for."""
    sources = cpu_sources()
    flags = {"cxx": ["-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wno-maybe-uninitialized", "-Wno-psabi"]}
    flags["cxx"] += threads
    kind, include = cpp_extension.CppExtension, [str(ROOT / "csrc")]
    if architectures:
        kind, include = cpp_extension.CUDAExtension, [*include, str(ROOT / "csrc" / "common" / "cuda" / "ptx")]
        os.environ["TORCH_CUDA_ARCH_LIST"] = architectures
        sources += cuda_sources()
        macros = [*macros, ("DOBB_WITH_CUDA", None), ("DOBB_CUDA_ARCHITECTURES", f'"{architectures}"')]
        flags["nvcc"] = ["-O3", "-std=c++20", "-Xptxas=-v"]
        for folder in _headers_that_the_toolkit_lacks(cpp_extension.CUDA_HOME):
            flags["cxx"] += ["-idirafter", str(folder)]
    relative = [str(source.relative_to(ROOT)) for source in sources]
    headers = [str(header.relative_to(ROOT)) for end in ("h", "cuh") for header in ROOT.glob(f"csrc/**/*.{end}")]
    return kind(NAME, relative, include_dirs=include, define_macros=macros, extra_compile_args=flags, depends=headers)


def cpu_sources() -> list[Path]:
    """Source files below csrc/ that need no CUDA: all .cpp files outside folders named `cuda`."""
    return sorted(path for path in ROOT.glob("csrc/**/*.cpp") if "cuda" not in path.relative_to(ROOT).parts)


def cuda_sources() -> list[Path]:
    """Source files in the `cuda` folders below csrc/."""
    return sorted(path for ending in ("cpp", "cu") for path in ROOT.glob(f"csrc/**/cuda/**/*.{ending}"))


def _stamp() -> str:
    """Tells the sources of this build."""
    return str(_of_package("kernels/source_digest").stamp(ROOT / "csrc"))


def parallel_jobs() -> int:
    """As many compilations as cores and free memory allow."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        meminfo = Path("/proc/meminfo").read_text()
        free = int(meminfo.split("MemAvailable:")[1].split()[0]) / 2**20
    except (OSError, IndexError):
        return cores
    return max(1, min(cores, int(free / GIB_FOR_A_JOB)))


def _threads(torch: Any, compiler: str) -> list[str]:
    """What makes at::parallel_for more than a loop: its body is compiled here, into calls of PyTorch's OpenMP runtime.

    Only compiled with OpenMP, not linked: the calls resolve to the runtime that PyTorch brings (GNU's), so that there
    are never two with a thread pool each. clang would emit calls of another runtime.
    """
    if "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return []
    if "clang" in compiler:
        print(f"megatron_dobb: {compiler} cannot use PyTorch's OpenMP runtime: CPU kernels run on one thread; use g++")
        return []
    return ["-fopenmp"]


def _cuda_architectures(torch: Any, cpp_extension: Any, notes: list[str]) -> str:
    """The architectures to compile for, as in TORCH_CUDA_ARCH_LIST; empty if CUDA kernels cannot be built."""
    if os.environ.get("MEGATRON_DOBB_NO_CUDA") == "1" or not cuda_sources():
        return ""
    if torch.version.cuda is None:
        return ""
    nvcc = Path(cpp_extension.CUDA_HOME or "/nonexistent") / "bin" / "nvcc"
    if not nvcc.exists():
        notes.append("no CUDA kernels: nvcc was not found; install the CUDA toolkit or set CUDA_HOME")
        return ""
    # PyTorch takes the folder above any nvcc on PATH, which may be a script that calls one in a toolkit elsewhere.
    os.environ["CUDA_HOME"] = cpp_extension.CUDA_HOME = _toolkit_of(nvcc)
    release = _toolchain.cuda_release(nvcc)
    if not _toolchain.fits(release, torch.version.cuda):
        notes.append(f"no CUDA kernels: {nvcc} is of CUDA {release}, and PyTorch was built with {torch.version.cuda}")
        return ""
    if asked := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return asked
    if torch.cuda.is_available():
        seen = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
        return ";".join(f"{major}.{minor}" for major, minor in sorted(seen))
    return CUDA_ARCHITECTURES


def _toolkit_of(nvcc: Path) -> str:
    """The folder of the toolkit whose headers this nvcc uses."""
    command = [str(nvcc), "--dryrun", "-E", "-x", "cu", os.devnull]
    text = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    tops = [line.partition("TOP=")[2].strip() for line in text.splitlines() if line.startswith("#$ TOP=")]
    return str(Path(tops[0]).resolve()) if tops else str(nvcc.parents[1])


def _headers_that_the_toolkit_lacks(cuda_home: str) -> list[Path]:
    """Folders of nvidia's pip packages, where the toolkit has no headers of cuBLAS and the like."""
    if all((Path(cuda_home) / "include" / name).exists() for name in ("cublas_v2.h", "cusparse.h", "cusolverDn.h")):
        return []
    import importlib.util

    found = importlib.util.find_spec("nvidia")
    roots = list(found.submodule_search_locations or []) if found else []
    return [folder for root in roots for folder in sorted(Path(root).glob("*/include")) if folder.is_dir()]


def _or_with_less(command: Any, notes: list[str], instead: list[Any]) -> Any:
    class BuildOrWithLess(command):
        """If the extension does not compile, build what is to be built instead; or install without."""

        def build_extensions(self) -> None:
            nonlocal instead
            try:
                super().build_extensions()
            except Exception as error:  # compilers fail in many ways
                reason = str(error).splitlines()[0]
                if instead:
                    notes.insert(0, f"no CUDA kernels: the CUDA sources of csrc did not compile: {reason}")
                    for extension, smaller in zip(self.extensions, instead, strict=True):
                        vars(extension).update(vars(smaller))  # what setuptools has added to it stays
                    instead = []
                    return self.build_extensions()
                notes.insert(0, f"csrc did not compile: {reason}")
                for extension in self.extensions:  # what an earlier build left there is not of these sources
                    Path(self.get_ext_fullpath(extension.name)).unlink(missing_ok=True)
                self.extensions.clear()
            say(notes)
            in_place = self.inplace or getattr(self, "editable_mode", False)
            write_note(ROOT if in_place else Path(self.build_lib), notes)

        def get_outputs(self) -> list[str]:
            return super().get_outputs() if self.extensions else []

        def copy_extensions_to_source(self) -> None:
            if self.extensions:
                super().copy_extensions_to_source()

    return BuildOrWithLess


def write_note(root: Path, notes: list[str]) -> None:
    """Leave the notes beside the package below a folder, for `megatron_dobb.build_info()`; or none."""
    note = root / "megatron_dobb" / NOTE
    note.unlink(missing_ok=True)
    if notes and note.parent.is_dir():
        note.write_text("\n".join(notes) + "\n")


def say(notes: list[str]) -> None:
    """Print what was not built, so that it is found in the build log."""
    for note in notes:
        print(f"megatron_dobb: {note}", flush=True)
