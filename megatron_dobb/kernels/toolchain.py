"""Find the compilers of this machine. The build uses this too, so it imports nothing of the package."""

import os
import shutil
import subprocess
from pathlib import Path


def wanted_compiler() -> str | None:
    """The command that would compile C++: what `CXX` says, else the first of the usual names on `PATH`, or None."""
    return os.environ.get("CXX") or next((name for name in ("g++", "clang++", "c++") if shutil.which(name)), None)


def missing_compiler(command: str | None) -> str | None:
    """In a sentence, why a command cannot compile C++, or None if it is there."""
    if command is not None and shutil.which(command.split()[0]):
        return None
    return f"no C++ compiler was found ({command or 'g++ and clang++'}): install g++ or set CXX"


def compiler_version(command: str) -> str:
    """The first line of what a compiler says of itself, without quotes."""
    found = subprocess.run([*command.split(), "--version"], capture_output=True, text=True, check=False)
    lines = found.stdout.splitlines()
    return lines[0].replace('"', "") if lines else command.split()[0]


def cuda_release(nvcc: Path) -> str:
    """The CUDA release of an nvcc, such as `13.0`."""
    text = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=False).stdout
    return text.partition("release ")[2].partition(",")[0] or "unknown release"


def fits(release: str, of_torch: str) -> bool:
    """Whether kernels that an nvcc of this release compiles go with a PyTorch built with CUDA `of_torch`."""
    return release.split(".")[0] == of_torch.split(".")[0]
