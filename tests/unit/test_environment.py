"""tools/environment.sh finds a Python, and installs once until something that is compiled changes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PREPARE = """
pip_install() { echo "pip $*" >>pip.log; [ -z "${FAIL:-}" ]; }
python=$(find_python) && prepare_environment "$python" test
"""


@pytest.fixture
def clone(tmp_path):
    """The files that an installation depends on, in a folder of their own."""
    for name in ("tools", "build_support", "csrc"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "megatron_dobb_autoload.pth"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def sourced(clone, script, **variables):
    environment = {"PATH": os.environ["PATH"], "HOME": str(clone), **variables}
    command = ["bash", "-euc", f". tools/environment.sh\n{script}"]
    return subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, check=False)


def test_an_interpreter_is_found_outside_the_path_and_the_given_one_is_taken(clone):
    versions = clone / ".pyenv" / "versions"
    for version in ("3.12.9", "3.9.1"):
        (versions / version / "bin").mkdir(parents=True)
    (versions / "3.12.9" / "bin" / "python").symlink_to(sys.executable)
    tools = clone / "bin"
    tools.mkdir()
    (tools / "dirname").symlink_to(shutil.which("dirname"))
    (tools / "bash").symlink_to(shutil.which("bash"))
    found = sourced(clone, "find_python", PATH=str(tools))
    assert found.stdout.strip() == str(versions / "3.12.9" / "bin" / "python"), found.stderr
    assert sourced(clone, "find_python", PYTHON=sys.executable).stdout.strip() == sys.executable


def test_without_a_fitting_interpreter_one_sentence_says_what_to_do(clone):
    refused = sourced(clone, "find_python", PYTHON="/nowhere/python")
    assert refused.returncode == 1
    assert "PYTHON=/nowhere/python is not a working Python >= 3.12 (it does not run)" in refused.stderr
    refused = sourced(clone, "is_supported() { false; }; find_python")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "uv python install 3.12" in refused.stderr


def test_it_is_installed_once_with_pytorch_first_and_again_when_a_source_changes(clone):
    log, words = clone / "pip.log", {"PYTHON": sys.executable}
    failed = sourced(clone, PREPARE, FAIL="1", **words)
    assert failed.returncode == 1
    assert "pip could not install what megatron_dobb needs" in failed.stderr
    log.unlink()
    for _ in range(2):
        assert sourced(clone, PREPARE, **words).returncode == 0
    first, second = log.read_text().splitlines()
    assert first.startswith("pip torch>=")
    assert second == f"pip --editable {clone}[test]"
    (clone / "csrc" / "new.cpp").write_text("int one = 1;\n")
    assert sourced(clone, PREPARE, **words).returncode == 0
    assert len(log.read_text().splitlines()) == 4
