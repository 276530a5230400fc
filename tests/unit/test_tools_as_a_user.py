"""The tools as programs of their own, started from their folder, where one has the name of a standard module."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHECKPOINT = sorted((ROOT / "tests/data/checkpoints").iterdir())[-1] / "plain.pt"


def as_a_user(*words):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTHONPATH", None)
    return subprocess.run(
        [sys.executable, *map(str, words)], cwd=ROOT / "tools", env=environment, capture_output=True, text=True
    )


def test_the_tools_run_from_their_folder_beside_a_file_of_the_name_inspect(tmp_path):
    """Python puts the folder of a script first on its path, where `import inspect` then looks."""
    figures = tmp_path / "figures.json"
    done = as_a_user("inspect.py", CHECKPOINT, "--json", figures)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(figures.read_text())["weights"]) == 2
    others = ("plan.py", "reproduce.py")
    # In one process, which starts like theirs: importing torch takes longest.
    script = f"""
import runpy, sys
sys.path[0] = {str(ROOT / "tools")!r}
for name in {others!r}:
    sys.argv[:] = [name, "--help"]
    try:
        runpy.run_path(name, run_name="__main__")
    except SystemExit as stop:
        assert not stop.code, stop.code
"""
    done = as_a_user("-c", script)
    assert done.returncode == 0, done.stderr
    assert all(f"usage: tools/{name}" in done.stdout for name in others), done.stdout


def test_a_script_beside_it_gets_the_standard_librarys_inspect(tmp_path):
    shutil.copy(ROOT / "tools/inspect.py", tmp_path)
    (tmp_path / "script.py").write_text(
        "import dataclasses, inspect\nprint(inspect.__file__, inspect.signature(print))\n"
    )
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert Path(done.stdout.split()[0]).parent == Path(os.__file__).parent
