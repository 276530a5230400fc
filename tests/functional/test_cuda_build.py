"""The real CUDA extension, built by nvcc for one architecture on a machine that needs no GPU for it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_dobb.kernels import toolchain
from tools import kernel_report

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURE = "90"

nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
needs_toolkit = pytest.mark.skipif(
    nvcc is None
    or torch.version.cuda is None
    or not toolchain.fits(toolchain.cuda_release(Path(nvcc)), torch.version.cuda),
    reason="no nvcc of the CUDA version that PyTorch was built with",
)

ASK = """
import json
import torch
import megatron_dobb
import megatron_dobb._C as built
has = torch._C._dispatch_has_kernel_for_dispatch_key
print(json.dumps({
    "file": built.__file__,
    "architectures": megatron_dobb.build_info().cuda_architectures,
    "ops": {name: has(f"dobb::{name}", "CUDA") for name in ("update", "gram_")},
}))
"""


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """A copy of the sources with the extension in it, and what the build printed."""
    copy = tmp_path_factory.mktemp("build") / "megatron_dobb"
    copy.mkdir()
    for name in ("csrc", "build_support", "megatron_dobb"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for path in (*ROOT.glob("*.toml"), *ROOT.glob("*.pth"), *ROOT.glob("*.md"), ROOT / "setup.py", ROOT / "LICENSE"):
        shutil.copy(path, copy)
    settings = {name: value for name, value in os.environ.items() if not name.startswith("MEGATRON_DOBB_NO_")}
    result = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=copy,
        env=settings | {"TORCH_CUDA_ARCH_LIST": f"{ARCHITECTURE[0]}.{ARCHITECTURE[1:]}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return copy, result.stdout + result.stderr


@pytest.mark.full
@needs_toolkit
def test_nvcc_builds_an_extension_that_loads_without_a_gpu(build):
    copy, printed = build
    result = subprocess.run(
        [sys.executable, "-c", ASK],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, printed[-4000:] + result.stderr
    found = json.loads(result.stdout)
    assert Path(found["file"]).is_relative_to(copy)
    assert found["architectures"] == "9.0"
    assert found["ops"] == {"update": True, "gram_": True}


@pytest.mark.full
@needs_toolkit
def test_no_usual_kernel_spills_registers(build):
    _, printed = build
    usual = [kernel for kernel in kernel_report.parse(printed) if kernel.is_usual]
    assert {kernel.numbers[0] for kernel in usual} == {1, 2, 3, 4, 6, 8, 12, 16, 20, 26, 32}
    for kernel in usual:
        assert kernel.spill_bytes == 0, kernel


@pytest.mark.full
@needs_toolkit
def test_the_moment_kernels_do_not_spill(build):
    _, printed = build
    grams = [kernel for kernel in kernel_report.parse(printed) if "gram" in kernel.name]
    assert grams
    assert all(kernel.spill_bytes == 0 for kernel in grams)
