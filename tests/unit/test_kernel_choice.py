"""The CPU kernels that a process runs agree with plain C++: variants that are wrong are passed over, with a warning.

A build of the extension's module without operators, whose list of variants (spoiled_kernels.cpp) can make some wrong.
"""

import json
import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from compiled import KERNELS, C, needs_extension

from megatron_dobb.kernels import extension

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    ROOT / "csrc" / "common" / "bindings.cpp",
    *sorted(ROOT.glob("csrc/dobb/cpu/kernel_c*.cpp")),
    ROOT / "csrc" / "dobb" / "cpu" / "kernel_functions.cpp",
    *sorted(ROOT.glob("csrc/dobb/cpu/kernels_*.cpp")),
    Path(__file__).with_name("spoiled_kernels.cpp"),
]
needs_a_faster_kernel = pytest.mark.skipif(len(KERNELS) < 2, reason="this processor runs plain C++ alone")
pytestmark = [needs_extension, pytest.mark.full]

ASK = """
import importlib.util, json, sys, threading, warnings
import torch
spec = importlib.util.spec_from_file_location("megatron_dobb._C", sys.argv[1])
sys.modules["megatron_dobb._C"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
library = torch.library.Library("dobb", "FRAGMENT")
library.define("update(Tensor weights) -> Tensor")  # build_info() asks where it runs
from megatron_dobb.kernels import extension
chosen, ready = [], threading.Barrier(4)
def ask():
    ready.wait()
    chosen.append(module.chosen_cpu_kernel())
threads = [threading.Thread(target=ask) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    info = [extension.build_info() for _ in range(2)][1]
print(json.dumps({
    "chosen": sorted(set(chosen)), "supported": info.cpu_kernels, "cpu": info.cpu, "checked": info.cpu_checked,
    "rejected": info.cpu_rejected, "warnings": [str(w.message) for w in caught],
}))
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spoiled")
    includes = [ROOT / "csrc", Path(torch.__file__).parent / "include", sysconfig.get_path("include")]
    macros = [f"-DDOBB_{name}" for name in (f'TORCH_VERSION="{torch.__version__}"', 'COMPILER=""')]
    macros += [f'-DDOBB_SOURCES="{C.sources}"', "-DTORCH_EXTENSION_NAME=_C"]
    flags = ["-std=c++20", "-O1", "-w", "-fPIC", "-fvisibility=hidden", *(f"-I{path}" for path in includes), *macros]
    compiler = os.environ.get("CXX", "g++").split()
    objects = [str(folder / f"{source.stem}.o") for source in SOURCES]
    commands = [[*compiler, *flags, "-c", str(x), "-o", made] for x, made in zip(SOURCES, objects, strict=True)]
    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        list(pool.map(lambda command: subprocess.run(command, check=True), commands))
    subprocess.run([*compiler, "-shared", *objects, "-o", str(folder / "_C.so")], check=True)
    return folder / "_C.so"


def ask(module, spoiled=""):
    """What a process says in which variants are wrong."""
    environment = os.environ | {"DOBB_TEST_SPOILED": spoiled, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", ASK, str(module)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_the_fastest_variant_runs_and_was_checked_where_none_is_wrong(module):
    found = ask(module)
    assert found["chosen"] == [found["cpu"]] == [KERNELS[0]]
    assert found["supported"] == KERNELS
    assert found["checked"] == (len(KERNELS) > 1)
    assert found["rejected"] == found["warnings"] == []


@needs_a_faster_kernel
@pytest.mark.parametrize("wrong", ["count", "weight", "gram", "widen_bf16", "divide", "reflect"])
def test_a_variant_with_one_wrong_function_is_passed_over_with_one_warning(module, wrong):
    found = ask(module, f"{KERNELS[0]}:{wrong}")
    assert found["chosen"] == [found["cpu"]] == [KERNELS[1]]
    assert found["rejected"] == [KERNELS[0]]
    assert found["checked"] == (KERNELS[1] != "plain")
    (warning,) = found["warnings"]
    assert f"runs its {KERNELS[1]} kernels on this CPU: on a test block, {KERNELS[0]} gave other results" in warning


@needs_a_faster_kernel
def test_plain_kernels_run_unchecked_where_all_others_are_wrong(module):
    found = ask(module, ",".join(f"{kernel}:weight" for kernel in KERNELS[:-1]))
    assert found["cpu"] == "plain"
    assert not found["checked"]
    assert found["rejected"] == KERNELS[:-1]
    assert len(found["warnings"]) == 1


def test_every_variant_of_this_processor_agrees_with_plain():
    for kernel in KERNELS:
        C.choose_cpu_kernel(kernel)
        assert extension.build_info().cpu == kernel
