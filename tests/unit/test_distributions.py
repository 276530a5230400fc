"""The sdist, the wheels built from it, and what works where one of them is installed."""

import base64
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata

import megatron_dobb

ROOT = Path(__file__).resolve().parents[2]
AUTOLOAD = "megatron_dobb_autoload.pth"
NOT_SHIPPED = {".ci", ".gitignore", ".github"}
MADE_BY_THE_BUILD = {"PKG-INFO", "setup.cfg", "megatron_dobb.egg-info"}
BUILT = next((ROOT / "megatron_dobb").glob("_C*.so"), None)


def run(*words, cwd, timeout=240, **variables):
    own = ("MEGATRON_DOBB", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    finished = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    return finished


def build(kind, folder, **variables):
    """Call the build backend as a front end without isolation does; returns what it built."""
    code = f"import backend; print(backend.build_{kind}('out'))"
    path = os.pathsep.join([str(folder / "build_support"), str(folder)])
    printed = run(sys.executable, "-c", code, cwd=folder, PYTHONPATH=path, **variables).stdout
    return folder / "out" / printed.strip().splitlines()[-1]


def files_of_the_repository():
    """Tracked files, and new ones that are not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    names = {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}
    if listed.returncode or "setup.py" not in names:
        pytest.skip("not in a git checkout, so nothing says which files belong to it")
    return names


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    setuptools = pytest.importorskip("setuptools", reason="building needs setuptools")
    if int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip(f"building needs setuptools 77, here is {setuptools.__version__}")
    source = tmp_path_factory.mktemp("sdist") / "source"
    for name in files_of_the_repository():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    for clutter in ("megatron_dobb/_C.so", "tests/__pycache__/a.pyc", "tools/b.pyc", "csrc/.DS_Store"):
        (source / clutter).parent.mkdir(exist_ok=True)
        (source / clutter).touch()
    return build("sdist", source)


def unpack(sdist, folder):
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return folder / sdist.name.removesuffix(".tar.gz")


@pytest.fixture
def unpacked(sdist, tmp_path):
    return unpack(sdist, tmp_path)


@pytest.fixture(scope="module")
def pure_wheel(sdist, tmp_path_factory):
    return build("wheel", unpack(sdist, tmp_path_factory.mktemp("pure")), MEGATRON_DOBB_NO_EXTENSION="1")


def a_compiler_that_copies(folder, library):
    """A C++ compiler in name: objects are empty, and what it links is an extension that was compiled before."""
    real = shutil.which(os.environ.get("CXX", "g++"))
    script = folder / "g++"
    script.write_text(
        '#!/bin/sh\nfor word; do [ "$previous" = -o ] && out=$word; previous=$word; done\n'
        f'case "$out" in\n  *.o) : >"$out" ;;\n  *.so) cp "{library}" "$out" ;;\n  *) exec {real} "$@" ;;\nesac\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


def install(wheel, folder):
    """A virtual environment with the wheel, and with everything else of this one: its interpreter and site-packages."""
    pytest.importorskip("pip", reason="a wheel is installed by pip")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", packages)
    run(*pip, wheel, cwd=folder)
    # A path in a .pth file is only searched: the .pth files there, an editable installation among them, stay asleep.
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python", packages


def test_the_sdist_holds_the_files_of_the_repository_and_nothing_else(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if not archive.getmember(name).isdir()}
    shipped = {name for name in names if name.split("/")[0] not in MADE_BY_THE_BUILD}
    wanted = {name for name in files_of_the_repository() if name.split("/")[0] not in NOT_SHIPPED}
    assert shipped == wanted


def check_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        record = next(name for name in names if name.endswith(".dist-info/RECORD"))
        entries = [line.rsplit(",", 2) for line in archive.read(record).decode().splitlines()]
        metadata = Metadata.from_email(archive.read(record.replace("RECORD", "METADATA")), validate=True)
        for name, digest, _ in entries:
            if digest:
                kind, _, encoded = digest.partition("=")
                found = base64.urlsafe_b64encode(hashlib.new(kind, archive.read(name)).digest()).decode()
                assert found.rstrip("=") == encoded, name
        tags = [
            line.removeprefix("Tag: ")
            for line in archive.read(record.replace("RECORD", "WHEEL")).decode().splitlines()
            if line.startswith("Tag: ")
        ]
    assert str(metadata.version) == megatron_dobb.__version__
    assert str(metadata.requires_python) == ">=3.12"
    assert metadata.license_expression == "Apache-2.0"
    assert metadata.description_content_type == "text/markdown"
    assert {name for name, _, _ in entries} == names, "an uninstall must know of all of them"
    return names, tags


def doctor(python, folder):
    report = json.loads(run(python, "-m", "megatron_dobb", "doctor", "--json", cwd=folder, OMP_NUM_THREADS="1").stdout)
    findings = {}
    for finding in report["findings"]:
        findings.setdefault(finding["check"], []).append(finding)
    return findings


@pytest.mark.full
def test_a_wheel_without_the_extension_is_for_every_platform_and_works(pure_wheel, tmp_path):
    names, tags = check_metadata(pure_wheel)
    assert tags == ["py3-none-any"]
    assert pure_wheel.name.endswith("-py3-none-any.whl")
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "megatron_dobb").rglob("*.py")}
    assert {name for name in names if ".dist-info/" not in name} == {
        *sources,
        "megatron_dobb/py.typed",
        "megatron_dobb/_not_built.txt",
        AUTOLOAD,
    }
    python, packages = install(pure_wheel, tmp_path / "environment")
    assert (packages / AUTOLOAD).read_bytes() == (ROOT / AUTOLOAD).read_bytes()
    code = """
import torch, megatron_dobb
layer = torch.nn.Linear(16, 8)
optimizer = megatron_dobb.Dobb(layer, lr=1e-2, blocks=2)
before = layer.weight.detach().clone()
layer(torch.randn(4, 16)).sum().backward()
optimizer.step()
print(megatron_dobb.__file__, torch.equal(before, layer.weight), megatron_dobb.build_info().reason)
"""
    place, unchanged, reason = run(python, "-W", "ignore", "-c", code, cwd=tmp_path).stdout.split(maxsplit=2)
    assert Path(place).is_relative_to(packages)
    assert unchanged == "False"
    assert "MEGATRON_DOBB_NO_EXTENSION=1 was set" in reason


@pytest.mark.full
@pytest.mark.skipif(BUILT is None, reason="the extension is not built here, so no wheel can hold it")
def test_a_wheel_with_the_extension_is_for_this_platform_and_passes_the_doctor(unpacked, tmp_path):
    compiler = a_compiler_that_copies(tmp_path, BUILT)
    wheel = build("wheel", unpacked, CXX=compiler, MEGATRON_DOBB_NO_CUDA="1")
    names, (tag,) = check_metadata(wheel)
    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert tag.startswith(f"{version}-{version}-")
    assert not tag.endswith("-any")
    assert {f"megatron_dobb/{BUILT.name}", AUTOLOAD} <= names
    assert "megatron_dobb/_not_built.txt" not in names
    python, packages = install(wheel, tmp_path / "environment")
    findings = doctor(python, tmp_path)
    texts = {check: " ".join(finding["text"] for finding in found) for check, found in findings.items()}
    assert str(packages) in texts["package"]
    assert "MEGATRON_DOBB_AUTOLOAD=1 works here" in texts["autoload"]
    assert "a step of the plain optimizer lowers a loss" in texts["self-test"]
    for check in ("package", "extension", "self-test", "autoload", "patches"):
        assert {finding["state"] for finding in findings[check]} <= {"ok", "note"}, texts[check]


@pytest.mark.full
def test_an_sdist_builds_a_wheel_where_there_is_no_compiler(unpacked):
    wheel = build("wheel", unpacked, CXX="/nowhere/g++")
    with zipfile.ZipFile(wheel) as archive:
        assert "no C++ compiler was found" in archive.read("megatron_dobb/_not_built.txt").decode()
    assert wheel.name.endswith("-py3-none-any.whl")


@pytest.mark.full
def test_an_unpacked_wheel_autoloads_when_asked_and_only_then(pure_wheel, tmp_path):
    with zipfile.ZipFile(pure_wheel) as wheel:
        wheel.extractall(tmp_path)
    code = f"import site, sys; site.addsitedir({str(tmp_path)!r}); print('megatron_dobb.autoload' in sys.modules)"
    # Without -S the interpreter could find this package where it is installed for development.
    for value, loaded in (("1", "True"), ("0", "False"), ("", "False")):
        finished = subprocess.run(
            [sys.executable, "-I", "-S", "-c", code],
            env={"MEGATRON_DOBB_AUTOLOAD": value},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert finished.stdout.strip() == loaded, finished.stderr
        assert not finished.stderr
