"""The package before anything heavy: the Python that it needs, lazy names, what its wheel and sdist contain."""

import ast
import json
import os
import shutil
import subprocess
import sys
import tarfile
import textwrap
import tomllib
import zipfile
from pathlib import Path

import pytest

import megatron_dobb

ROOT = Path(__file__).resolve().parents[2]
AUTOLOAD = "megatron_dobb_autoload.pth"
OLD_PYTHONS = [name for name in ("python3.11", "python3.10", "python3.9") if shutil.which(name)]


def run(python, code, **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MEGATRON_DOBB")}
    return subprocess.run(
        [python, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_an_installer_knows_which_python_is_needed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.12"


def test_an_old_python_is_told_so_in_a_sentence():
    finished = run(sys.executable, "import sys; sys.version_info = (3, 11, 9, 'final', 0); import megatron_dobb")
    assert finished.returncode == 1
    last = finished.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: megatron_dobb {megatron_dobb.__version__} needs Python 3.12 or newer")
    assert "python3.12 -m venv" in last


@pytest.mark.parametrize("module", ["__init__", "version"])
def test_what_says_so_can_be_read_by_an_old_python(module):
    ast.parse((ROOT / "megatron_dobb" / f"{module}.py").read_text(), feature_version=(3, 8))


@pytest.mark.skipif(not OLD_PYTHONS, reason="no older Python on this machine")
def test_a_real_old_python_says_so_too():
    found = [run(python, "import sys; print(sys.version_info[:2])") for python in OLD_PYTHONS]
    working = [python for python, answer in zip(OLD_PYTHONS, found, strict=True) if answer.returncode == 0]
    if not working:
        pytest.skip("no older Python runs on this machine")
    for statement in ("import megatron_dobb", "from megatron_dobb import Dobb", "import megatron_dobb.patch"):
        finished = run(working[0], statement)
        assert finished.returncode == 1
        assert "ImportError: megatron_dobb" in finished.stderr.strip().splitlines()[-1]
        assert "needs Python 3.12 or newer" in finished.stderr


def test_importing_the_package_imports_no_torch_and_names_appear_on_use():
    finished = run(
        sys.executable,
        """
        import json, sys
        import megatron_dobb
        before = "torch" in sys.modules
        config = megatron_dobb.DobbConfig()
        print(json.dumps([before, "torch" in sys.modules, "megatron" in sys.modules, config.blocks]))
        """,
    )
    assert json.loads(finished.stdout) == [False, True, False, 16], finished.stderr


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="module 'megatron_dobb' has no attribute 'dobb'"):
        _ = megatron_dobb.dobb
    assert set(megatron_dobb.__all__) == {"Dobb", "DobbConfig", "build_info", "install", "__version__"}


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """A wheel, without the extension that takes a minute, and an sdist, built from a copy of the source tree."""
    setuptools = pytest.importorskip("setuptools", reason="building needs setuptools")
    if int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip(f"building needs setuptools 77, here is {setuptools.__version__}")
    source = tmp_path_factory.mktemp("build") / "source"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", AUTOLOAD):
        shutil.copy(ROOT / name, source)
    for name in ("megatron_dobb", "build_support", "csrc", "tests"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    code = "from setuptools import build_meta as b; print(b.build_sdist('out')); print(b.build_wheel('out'))"
    environment = os.environ | {"MEGATRON_DOBB_NO_EXTENSION": "1"}
    finished = subprocess.run(
        [sys.executable, "-c", code], cwd=source, env=environment, capture_output=True, text=True, timeout=240
    )
    assert finished.returncode == 0, finished.stderr
    (wheel,), (sdist,) = (source / "out").glob("*.whl"), (source / "out").glob("*.tar.gz")
    return wheel, sdist


def test_the_wheel_has_the_autoload_file_beside_the_package(distributions):
    with zipfile.ZipFile(distributions[0]) as wheel:
        names = set(wheel.namelist())
        record = next(name for name in names if name.endswith("/RECORD"))
        assert AUTOLOAD in names
        assert f"{AUTOLOAD}," in wheel.read(record).decode(), "an uninstall must know of it"
        metadata = wheel.read(record.replace("RECORD", "METADATA")).decode()
    assert "Requires-Python: >=3.12" in metadata
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "megatron_dobb").rglob("*.py")}
    assert sources <= names
    assert "megatron_dobb/py.typed" in names
    others = {name.split("/")[0] for name in names} - {"megatron_dobb", AUTOLOAD}
    assert [other.endswith(".dist-info") for other in others] == [True]


def test_the_sdist_can_build_the_autoload_file_again(distributions):
    with tarfile.open(distributions[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {AUTOLOAD, "setup.py", "pyproject.toml", "LICENSE"} <= names


def test_an_unpacked_wheel_autoloads_when_asked_and_only_then(distributions, tmp_path):
    with zipfile.ZipFile(distributions[0]) as wheel:
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
