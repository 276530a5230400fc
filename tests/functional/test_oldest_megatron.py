"""The oldest Megatron-Core that is supported: the patches fit it, and it trains.

All other tests run with the newest one that the registry has.
"""

import os
import subprocess
import sys

import pytest
from packaging.version import Version
from test_launcher import DOBB, ROOT, SCRIPT, TORCHRUN, TRAINING, losses, run

from megatron_dobb.megatron.seam import versions

OLDEST = f"{next(part.version for part in versions.SUPPORTED if part.operator == '>=')}.0"

TRAIN = f"""
import megatron_dobb.patch, runpy, sys
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
from megatron_dobb import post_import
waiting = sorted(name for name in post_import._finder.patches if not name.startswith("megatron.bridge"))
print("trained by megatron-core", sys.modules["megatron.core"].__version__, "with patches left:", waiting)
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A PYTHONPATH that puts it before the installed one."""
    assert Version(OLDEST) in versions.SUPPORTED
    folder = tmp_path_factory.mktemp("oldest")
    words = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, f"megatron-core=={OLDEST}"]
    finished = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, timeout=300)
    if finished.returncode:
        # Not a skip: the support of this version would go untested wherever an index is out of reach.
        pytest.fail(f"pip could not install megatron-core {OLDEST} for this test: {finished.stderr.strip()}")
    return os.pathsep.join([str(ROOT), str(folder)])


@pytest.mark.full
def test_all_patches_fit_it_and_it_trains_on_two_processes(path, tmp_path):
    script = tmp_path / "pretrain_mine.py"
    script.write_text(TRAIN)
    finished = run(*TORCHRUN, script, *TRAINING, *DOBB, PYTHONPATH=path, CUDA_VISIBLE_DEVICES="")
    first, _, last = losses(finished)
    assert last < first
    assert finished.stdout.count(f"trained by megatron-core {OLDEST} with patches left: []") == 2
    assert "dobb: 8 matrices (98,304 elements) of the whole model are on Dobb" in finished.stdout
