"""Find the compilers on this machine. The build uses this too, so it imports nothing from the package."""

import os
import shutil
import subprocess
from pathlib import Path


def wanted_compiler() -> str | None:
    """Return the C++ compiler command: `CXX` if set, else the first usual name on `PATH`, or None."""
    return os.environ.get("CXX") or next((name for name in ("g++", "clang++", "c++") if shutil.which(name)), None)


def missing_compiler(command: str | None) -> str | None:
    """Explain in a sentence why a command cannot compile C++; None if it exists."""
    if command is not None and shutil.which(command.split()[0]):
        return None
    return f"no C++ compiler was found ({command or 'g++ and clang++'}): install g++ or set CXX"


def compiler_version(command: str) -> str:
    """Return the first line of a compiler's version output, without quotes."""
    found = subprocess.run([*command.split(), "--version"], capture_output=True, text=True, check=False)
    lines = found.stdout.splitlines()
    return lines[0].replace('"', "") if lines else command.split()[0]


def cuda_release(nvcc: Path) -> str:
    """Return the CUDA release of an nvcc, such as `13.0`."""
    text = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=False).stdout
    return text.partition("release ")[2].partition(",")[0] or "unknown release"


def fits(release: str, of_torch: str) -> bool:
    """Return whether kernels compiled by this nvcc release work with a PyTorch built for CUDA `of_torch`."""
    return release.split(".")[0] == of_torch.split(".")[0]
