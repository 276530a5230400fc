"""`python -m megatron_dobb doctor`: the right verdict on every broken installation that can be made here."""

import json
import os
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest
import torch
from compiled import needs_extension
from doctors_findings import found, only
from torch.utils import collect_env

from megatron_dobb import doctor
from megatron_dobb.doctor import Finding, usable, verdict
from megatron_dobb.errors import UnsupportedError
from megatron_dobb.kernels import extension
from megatron_dobb.megatron.seam import contract, patches, probe_report
from megatron_dobb.megatron.seam import versions as compat

ROOT = Path(__file__).resolve().parents[2]


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def start(*words, folder=ROOT, **variables):
    path = os.pathsep.join(filter(None, (variables.pop("PYTHONPATH", ""), str(ROOT))))
    return subprocess.run(
        [sys.executable, "-m", "megatron_dobb", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture
def no_extension(monkeypatch):
    monkeypatch.setattr(extension, "load", lambda: extension.Loaded(None, "it was not built"))


@pytest.fixture
def machine(monkeypatch):
    """A PyTorch built with a CUDA, and a driver, that a test chooses."""

    def make(cuda, driver):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(collect_env, "get_nvidia_driver_version", lambda run: driver)

    return make


@pytest.fixture
def megatron_at(monkeypatch, tmp_path):
    """Puts a Megatron that states a version, and holds nothing else, in front of every other."""

    def make(version):
        for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
            monkeypatch.delitem(sys.modules, name)
        core = tmp_path / "megatron" / "core"
        core.mkdir(parents=True)
        (core.parent / "__init__.py").touch()
        (core / "__init__.py").write_text("raise RuntimeError('not to be imported')")
        (core / "package_info.py").write_text(f"__version__ = {version!r}")
        monkeypatch.syspath_prepend(str(tmp_path))
        return core

    yield make
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


# The whole.


def test_here_every_check_says_something_and_the_last_line_is_the_verdict():
    finished = start("doctor", CUDA_VISIBLE_DEVICES="")
    lines = finished.stdout.splitlines()
    assert finished.stderr == ""
    assert finished.returncode == 0, finished.stdout
    assert lines[-1].startswith(("ready: ", "works, with: "))
    said = {line[6:26].strip() for line in lines if line[:4] in doctor.MARKS.values()}
    assert said == set(doctor.CHECKS)
    assert "broke off" not in finished.stdout
    assert f"the {len(contract.NAMES)} names of the contract fit " in finished.stdout


def test_json_holds_every_finding_and_the_verdict(monkeypatch, capsys):
    given = [Finding("torch", "ok", "fine"), Finding("gpu", "failure", "does not fit", "rebuild")]
    monkeypatch.setattr(doctor, "run", lambda names: iter(given))
    assert doctor.main(["--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"] == "not usable: does not fit (rebuild)"
    assert told["usable"] is False
    assert [Finding(**finding) for finding in told["findings"]] == given


def test_an_unknown_argument_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        doctor.main(["--fix"])
    assert "unrecognized arguments: --fix" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("states", "begins", "may_be_used"),
    [
        (["ok", "note"], "ready: ", True),
        (["ok", "warning"], "works, with: text (remedy)", True),
        (["warning", "failure"], "not usable: text (remedy)", False),
        ([], "not usable: ", False),
    ],
)
def test_the_worst_finding_decides(states, begins, may_be_used):
    findings = [Finding("torch", state, "text", "remedy") for state in states]
    assert verdict(findings).startswith(begins)
    assert usable(findings) is may_be_used


def test_every_warning_and_failure_of_the_source_says_what_to_do():
    with pytest.raises(AssertionError, match="no remedy for WARN  gpu"):
        Finding("gpu", "warning", "no GPU")


# What may be broken.


def test_a_pytorch_without_cuda_works_on_cpus(machine):
    machine(None, None)
    findings = found("torch", "gpu")
    assert [finding.state for finding in findings] == ["ok", "warning", "note"]
    assert verdict(findings).startswith(f"works, with: PyTorch {torch.__version__} is built without CUDA: everything")
    assert "install a CUDA build of PyTorch" in verdict(findings)


@pytest.mark.parametrize(
    ("cuda", "driver", "hidden", "reason"),
    [
        (None, "580.1", None, "it is built without CUDA, and the NVIDIA driver is 580.1"),
        ("13.0", "580.1", "7", "CUDA_VISIBLE_DEVICES is '7'"),
        ("13.0", None, None, "there is no NVIDIA driver on this machine"),
        ("13.0", "535.1", None, "NVIDIA driver 535.1 does not serve its CUDA 13.0"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_told_with_the_reason(monkeypatch, machine, cuda, driver, hidden, reason):
    machine(cuda, driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert only(found("gpu"), "warning").text == f"PyTorch sees no GPU: {reason}"


def test_an_old_megatron_is_not_usable_with_its_version_range_and_remedy(megatron_at):
    core = megatron_at("0.18.2")
    findings = found("megatron-core", "patches")
    finding = only(findings, "failure")
    assert f"megatron-core 0.18.2 is not supported: megatron_dobb needs {compat.SUPPORTED}" in finding.text
    assert str(core) in finding.text
    assert verdict(findings).endswith("(install one with: pip install 'megatron-core>=0.19,<0.21')")
    assert not usable(findings)


def test_no_megatron_leaves_the_plain_optimizer(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "megatron", None)
    findings = found("megatron-core", "patches")
    assert [finding.state for finding in findings] == ["warning", "note"]
    assert verdict(findings).startswith("works, with: megatron-core is not found: only megatron_dobb.Dobb")
    assert "pip install 'megatron-core>=0.19,<0.21'" in verdict(findings)


def test_a_megatron_that_does_not_import_or_fit_is_told_module_by_module(monkeypatch):
    def moved(module):
        raise UnsupportedError("megatron.stub.name does not exist in megatron-core 0.19.9")

    here = types.ModuleType("a_stub_of_megatron")
    monkeypatch.setitem(sys.modules, here.__name__, here)
    monkeypatch.setattr(probe_report, "find", lambda: probe_report.Place(ROOT, "0.19.9"))
    monkeypatch.setattr(probe_report, "has", lambda name: False)
    fine = {here.__name__: lambda module: None}
    monkeypatch.setattr(patches, "attachments", lambda: fine)
    findings = found("patches")
    assert "megatron.training is not found beside megatron.core" in only(findings, "warning").text
    assert only(findings, "ok").text.endswith("fit 1 modules of Megatron")
    monkeypatch.setattr(patches, "attachments", lambda: {here.__name__: moved})
    assert only(found("patches"), "failure").text.startswith("megatron.stub.name does not exist")
    monkeypatch.setattr(patches, "attachments", lambda: {"no_such_megatron": moved})
    finding = only(found("patches"), "failure")
    assert finding.text == (
        "no_such_megatron does not import here: ModuleNotFoundError: No module named 'no_such_megatron'"
    )


def test_a_missing_extension_works_and_says_how_to_build_one(no_extension):
    findings = found("extension")
    finding = only(findings, "warning")
    assert finding.text.endswith("it was not built")
    assert finding.remedy == extension.HOW_TO_BUILD
    assert usable(findings)


@needs_extension
def test_a_stale_extension_is_named_as_such(monkeypatch):
    monkeypatch.setattr(extension, "stamp", lambda folder: "0123456789abcdef")
    monkeypatch.setattr(extension, "load", extension.load.__wrapped__)
    finding = only(found("extension"), "warning")
    assert "was built from other sources than those of this checkout" in finding.text
    assert finding.remedy == extension.HOW_TO_BUILD


@needs_extension
def test_an_extension_that_fits_is_described():
    text = " ".join(finding.text for finding in found("extension"))
    assert f"runs its {extension.build_info().cpu} kernels" in text
    assert extension.load().module.sources in text


@needs_extension
def test_an_extension_of_another_installation_is_told(monkeypatch, tmp_path):
    assert "warning" not in [finding.state for finding in found("extension")]
    monkeypatch.setattr(extension.load().module, "__file__", str(tmp_path / "_C.so"))
    finding = only(found("extension"), "warning")
    assert finding.text.startswith(f"the extension is that of another installation, {tmp_path / '_C.so'}")


def test_without_pytorch_there_is_one_failure_and_the_rest_is_said_to_be_untried(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in ("kernels.extension",):
        monkeypatch.delitem(sys.modules, f"megatron_dobb.{name}", raising=False)
    findings = found("torch", "gpu", "self-test")
    assert [finding.state for finding in findings] == ["failure", "note", "note"]
    assert "PyTorch does not import: ModuleNotFoundError" in verdict(findings)
    assert "pip install 'torch>=2.11'" in verdict(findings)


def test_an_old_pytorch_is_not_supported(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.6.0+cu124")
    assert only(found("torch"), "failure").text == "PyTorch 2.6.0+cu124 is not supported: megatron_dobb needs >=2.11"


def test_an_old_python_gets_the_verdict_alone():
    code = (
        "import runpy, sys; sys.version_info = (3, 11, 9, 'final', 0); sys.argv = ['-m', 'doctor'];"
        "runpy.run_module('megatron_dobb', run_name='__main__')"
    )
    finished = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert finished.returncode == 1
    assert finished.stderr == ""
    assert finished.stdout.startswith("not usable: megatron_dobb")
    assert "needs Python 3.12 or newer" in finished.stdout


def test_the_ranges_are_those_of_the_installer():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == doctor.PYTHON
    assert f"torch{doctor.TORCH}" in project["dependencies"]
    (megatron,) = [wanted for wanted in project["optional-dependencies"]["megatron"] if "megatron-core" in wanted]
    assert f"'{megatron}'" in doctor.INSTALL


@pytest.mark.parametrize(("version", "fits"), [("2.11.0a0+git", True), ("2.14.1+cu130", True), ("2.10.9", False)])
def test_builds_of_a_release_that_is_supported_are(version, fits):
    assert doctor._fits(version, doctor.TORCH) is fits


@pytest.mark.parametrize(
    ("kernels", "state", "said"),
    [
        (True, "ok", "Stub of capability 9.0, driver 580.1; the self-test runs the CUDA kernels on cuda:0"),
        (False, "warning", "no CUDA kernels, it was built without kernels for cuda"),
    ],
)
def test_each_kind_of_gpu_is_told_once(monkeypatch, machine, kernels, state, said):
    machine("13.0", "580.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "Stub")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (9, 0))
    stub = types.SimpleNamespace(cuda_architectures="")
    monkeypatch.setattr(extension, "load", lambda: extension.Loaded(stub))
    monkeypatch.setattr(extension, "runs_on", lambda device: kernels)
    (finding,) = found("gpu")
    assert finding.state == state
    assert said in finding.text
    assert state == "ok" or "TORCH_CUDA_ARCH_LIST=9.0" in finding.remedy


# MEGATRON_DOBB_AUTOLOAD, in an interpreter whose site-packages a test fills.


@pytest.fixture
def interpreter(monkeypatch, tmp_path):
    """An interpreter that has this package, and whatever .pth file a test puts into a folder."""
    site = tmp_path / "site"
    site.mkdir()
    code = f"import sys, site; sys.path.insert(0, {str(ROOT)!r}); site.addsitedir({str(site)!r}); exec(sys.argv[2])"
    wrapper = executable(tmp_path / "python", f'#!/bin/sh\nexec {sys.executable} -I -S -c "{code}" "$@"\n')
    monkeypatch.setattr(sys, "executable", str(wrapper))
    return site


def test_autoload_works_where_its_file_is_beside_the_package(interpreter):
    (interpreter / doctor.PTH).write_text((ROOT / doctor.PTH).read_text())
    assert only(found("autoload"), "ok").text.startswith("MEGATRON_DOBB_AUTOLOAD=1 works here")


def test_autoload_without_its_file_has_no_effect(interpreter):
    finding = only(found("autoload"), "warning")
    assert finding.text.startswith("MEGATRON_DOBB_AUTOLOAD=1 has no effect here: no megatron_dobb_autoload.pth in")
    assert "python -m megatron_dobb" in finding.remedy


def test_autoload_of_another_installation_is_told(interpreter):
    (interpreter / "megatron_dobb").mkdir()
    (interpreter / "megatron_dobb" / "__init__.py").touch()
    (interpreter / "megatron_dobb" / "autoload.py").touch()
    (interpreter / doctor.PTH).write_text(
        f"import sys; sys.path.insert(0, {str(interpreter)!r}); __import__('megatron_dobb.autoload')"
    )
    assert f"loads another megatron_dobb, {interpreter}" in only(found("autoload"), "warning").text


# Whatever breaks is a finding.


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (RuntimeError("first line\nsecond line"), "RuntimeError: first line"),
        (SystemExit(3), "SystemExit: 3"),
        (OSError(), "OSError"),
    ],
)
def test_a_check_that_raises_is_a_finding_in_one_line(monkeypatch, raised, said):
    def check():
        yield "note", "before"
        raise raised

    monkeypatch.setitem(doctor.CHECKS, "extension", (check, "failure"))
    before, finding = found("extension")
    assert before.text == "before"
    assert finding.text == f"the check of extension broke off: {said}"
    assert finding.state == "failure"


@pytest.mark.parametrize(
    ("apex", "limit_s", "said"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 60, "it ended its process with SIGSEGV"),
        ("import os, sys; print('why', file=sys.stderr); os._exit(4)", 60, "ended its process with exit status 4: why"),
        ("import time; time.sleep(60)", 2, "it did not end within 2 s"),
    ],
)
def test_a_library_that_ends_or_hangs_its_process_is_a_finding_and_the_other_checks_go_on(
    monkeypatch, tmp_path, apex, limit_s, said
):
    (tmp_path / "apex.py").write_text(apex)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    findings = list(doctor.run(["package", "apex", "transformer-engine"], limit_s))
    assert [(finding.check, finding.state) for finding in findings] == [
        ("package", "ok"),
        ("apex", "warning"),
        ("transformer-engine", "note"),
    ]
    assert said in findings[1].text


def test_a_library_that_prints_and_does_not_import_is_a_finding(monkeypatch, tmp_path):
    (tmp_path / "apex.py").write_text("print('{}')\nraise ImportError('libcudart.so.11: cannot open\\nmore')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    (finding,) = doctor.run(["apex"])
    assert finding.state == "warning"
    assert finding.text.endswith(
        "does not import, so Megatron runs without it: ImportError: libcudart.so.11: cannot open"
    )


def test_checks_that_cannot_even_begin_are_one_failure(monkeypatch, tmp_path):
    executable(tmp_path / "python", "#!/bin/sh\necho 'no module of that name' >&2\nexit 1\n")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (finding,) = doctor.run(["package", "torch"])
    assert finding.state == "failure"
    assert "exit status 1: no module of that name" in finding.text


# Scripts.


@pytest.mark.parametrize("name", ["doctor.py", "./doctor"])
def test_a_script_that_is_called_doctor_still_runs(tmp_path, name):
    (tmp_path / name).write_text("import sys; print('my own', sys.argv[1:])")
    finished = start(name, "--json", folder=tmp_path)
    assert finished.stdout == "my own ['--json']\n", finished.stderr


def test_a_file_that_the_command_hides_is_mentioned(tmp_path):
    (tmp_path / "doctor").write_text("print('my own')")
    finished = start("doctor", "--help", folder=tmp_path)
    assert "usage: python -m megatron_dobb doctor" in finished.stdout
    assert "to run the file 'doctor' of this folder instead, give ./doctor" in finished.stderr
