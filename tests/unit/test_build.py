"""The plan of the build: what is compiled where, and what is said where something is missing."""

import importlib.util
import subprocess
import sys
import types
from pathlib import Path

import pytest
import setuptools

from build_support import backend, extension

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch):
    for name in ("MEGATRON_DOBB_NO_EXTENSION", "MEGATRON_DOBB_NO_CUDA", "TORCH_CUDA_ARCH_LIST", "CXX", "MAX_JOBS"):
        monkeypatch.delenv(name, raising=False)


def cuda_torch(version="13.0", available=False):
    cuda = types.SimpleNamespace(
        is_available=lambda: available, device_count=lambda: 2, get_device_capability=lambda i: (9 + i, 0)
    )
    return types.SimpleNamespace(version=types.SimpleNamespace(cuda=version), cuda=cuda)


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    """A CUDA toolkit of release 13.0 that can only tell its release, and a source file for it."""
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    nvcc.chmod(0o755)
    (tmp_path / "csrc" / "a_method" / "cuda").mkdir(parents=True)
    (tmp_path / "csrc" / "a_method" / "cuda" / "update.cu").touch()
    monkeypatch.setattr(extension, "ROOT", tmp_path)
    return types.SimpleNamespace(CUDA_HOME=str(tmp_path))


def test_the_extension_of_the_cpu_holds_every_source_of_the_cpu(monkeypatch):
    monkeypatch.setenv("MEGATRON_DOBB_NO_CUDA", "1")
    plan = extension.plan()
    (found,) = plan.extensions
    assert found.name == "megatron_dobb._C"
    listed = subprocess.run(["find", "csrc", "-name", "*.cpp"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert sorted(found.sources) == sorted(path for path in listed.stdout.split() if "/cuda/" not in path)
    assert "build_ext" in plan.commands
    assert not plan.notes


@pytest.mark.parametrize(
    ("backend_in_use", "compiler", "expected"),
    [("OpenMP", "g++ 12", ["-fopenmp"]), ("native thread pool", "g++ 12", []), ("OpenMP", "Debian clang 14", [])],
)
def test_loops_are_compiled_for_the_threads_that_pytorch_has(backend_in_use, compiler, expected):
    config = types.SimpleNamespace(parallel_info=lambda: f"ATen parallel backend: {backend_in_use}")
    assert extension._threads(types.SimpleNamespace(__config__=config), compiler) == expected


def test_no_extension_on_request(monkeypatch):
    monkeypatch.setenv("MEGATRON_DOBB_NO_EXTENSION", "1")
    assert extension.plan() == extension.Plan(notes=["MEGATRON_DOBB_NO_EXTENSION=1 was set"])


def test_a_machine_without_a_compiler_gets_no_extension_and_a_note(monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    plan = extension.plan()
    assert not plan.extensions
    assert plan.notes == ["no C++ compiler was found (/nowhere/g++): install g++ or set CXX"]


def test_a_build_without_torch_gets_no_extension_and_a_note(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    plan = extension.plan()
    assert not plan.extensions
    assert plan.notes[0].startswith("PyTorch was not installed where the package was built")


class Command:
    """What `build_ext` offers, compiling nothing; an extension with a failing source does not compile."""

    inplace = False

    def __init__(self, folder, extensions):
        self.build_lib, self.extensions = str(folder), extensions
        for extension_ in extensions:
            extension_._needs_stub = False  # as finalize_options does

    def build_extensions(self):
        for extension_ in self.extensions:
            assert extension_._needs_stub is False
            if any("broken" in source for source in extension_.sources):
                raise RuntimeError("Error compiling objects\nmore")

    def get_ext_fullpath(self, name):
        return str(Path(self.build_lib) / f"{name.replace('.', '/')}.so")


def an_extension(*sources):
    return setuptools.Extension("megatron_dobb._C", list(sources))


def test_a_failed_compilation_leaves_a_note_no_earlier_library_and_no_error(tmp_path, capsys):
    (tmp_path / "megatron_dobb").mkdir()
    earlier = tmp_path / "megatron_dobb" / "_C.so"
    earlier.touch()
    notes = []
    command = extension._or_with_less(Command, notes, [])(tmp_path, [an_extension("broken.cpp")])
    command.build_extensions()
    assert command.extensions == []
    assert not earlier.exists()
    assert notes == ["csrc did not compile: Error compiling objects"]
    assert "megatron_dobb: csrc did not compile" in capsys.readouterr().out
    assert (tmp_path / "megatron_dobb" / "_not_built.txt").read_text() == notes[0] + "\n"


def test_no_source_of_the_host_and_of_the_gpu_share_an_object_file():
    objects = [path.with_suffix(".o") for path in (*extension.cpu_sources(), *extension.cuda_sources())]
    assert len(objects) == len(set(objects))


def test_cuda_kernels_that_do_not_compile_leave_a_note_and_the_kernels_of_the_cpu(tmp_path):
    (tmp_path / "megatron_dobb").mkdir()
    notes = []
    smaller = an_extension("update.cpp")
    command = extension._or_with_less(Command, notes, [smaller])(tmp_path, [an_extension("update.cpp", "broken.cu")])
    command.build_extensions()
    assert command.extensions[0].sources == ["update.cpp"]
    assert notes == ["no CUDA kernels: the CUDA sources of csrc did not compile: Error compiling objects"]
    assert (tmp_path / "megatron_dobb" / "_not_built.txt").read_text() == notes[0] + "\n"


def test_an_nvcc_that_is_a_script_leads_to_the_toolkit_that_it_calls(tmp_path):
    toolkit, elsewhere = tmp_path / "toolkit" / "bin", tmp_path / "local" / "bin"
    toolkit.mkdir(parents=True)
    elsewhere.mkdir(parents=True)
    (toolkit / "nvcc").write_text(f"#!/bin/sh\necho '#$ TOP={toolkit}/..' >&2\n")
    (elsewhere / "nvcc").write_text(f'#!/bin/sh\nexec {toolkit}/nvcc "$@"\n')
    for script in (toolkit / "nvcc", elsewhere / "nvcc"):
        script.chmod(0o755)
    assert extension._toolkit_of(elsewhere / "nvcc") == str(tmp_path / "toolkit")


@pytest.mark.parametrize(
    ("torch", "variable", "expected"),
    [
        (cuda_torch(), None, "8.0;9.0;10.0"),
        (cuda_torch(), "9.0a", "9.0a"),
        (cuda_torch(available=True), None, "9.0;10.0"),
        (cuda_torch(version=None), None, ""),
    ],
)
def test_cuda_architectures_are_those_asked_for_or_seen(toolkit, monkeypatch, torch, variable, expected):
    if variable:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", variable)
    notes = []
    assert extension._cuda_architectures(torch, toolkit, notes) == expected
    assert not notes


def test_a_toolkit_of_another_release_is_named(toolkit):
    notes = []
    assert extension._cuda_architectures(cuda_torch(version="12.8"), toolkit, notes) == ""
    assert "is of CUDA 13.0, and PyTorch was built with 12.8" in notes[0]


def test_a_missing_nvcc_is_named(toolkit):
    toolkit.CUDA_HOME = None
    notes = []
    assert extension._cuda_architectures(cuda_torch(), toolkit, notes) == ""
    assert notes == ["no CUDA kernels: nvcc was not found; install the CUDA toolkit or set CUDA_HOME"]


def test_jobs_are_limited_by_free_memory(monkeypatch):
    monkeypatch.setattr(extension.os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(extension.Path, "read_text", lambda _: "MemAvailable:   10485760 kB\n")
    assert extension.parallel_jobs() == 4


def test_an_isolated_build_finds_the_torch_of_the_environment(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(backend.sysconfig, "get_path", lambda name: f"/environment/{name}")
    monkeypatch.setattr(sys, "path", ["/isolated"])
    backend._use_torch_of_target_environment()
    assert sys.path == ["/isolated", "/environment/platlib", "/environment/purelib"]
