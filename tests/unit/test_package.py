"""The package before anything heavy: the Python that it needs, and lazy names."""

import ast
import json
import os
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

import megatron_dobb

ROOT = Path(__file__).resolve().parents[2]
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
