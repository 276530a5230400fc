"""A step holds little memory of its own, whatever it steps."""

import subprocess
import sys

import pytest

from megatron_dobb.kernels import extension

MIB = 2**20

# In a process of its own, where nothing else comes and goes: the peak of the resident set above what was there before.
STEP = """
import sys
from pathlib import Path

import torch

from megatron_dobb.methods.dobb import kernels
from megatron_dobb.sharding.segment import Segment
from megatron_dobb.sharding.shard import Shard

width, elements = int(sys.argv[1]), 24 * 2**20
torch.set_num_threads(2)
blocks = max(1, 4096 // width)
columns = blocks * width
rows = elements // columns
tensors = [torch.randn(rows * columns) for _ in range(3)]
basis = torch.eye(width, dtype=torch.bfloat16).expand(blocks, width, width).contiguous()
segment = Segment("w", Shard(0, rows * columns, columns, width), rows, columns, tensors[0], tensors[1], basis)
settings = dict(learning_rate=0.1, weight_decay=0.1, momentum=0.9, nesterov=False, update_scale=0.2)
status = Path("/proc/self/status")
value = lambda key: int(status.read_text().split(key + ":")[1].split()[0]) * 1024
Path("/proc/self/clear_refs").write_text("5")
before = value("VmRSS")
kernels.update([segment], [tensors[2]], **settings, backend="extension")
print(value("VmHWM") - before)
"""


@pytest.mark.skipif(not extension.runs_on("cpu"), reason=f"no extension: {extension.load().reason}")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("width", [48, 192, 1024, 3072])
def test_a_step_of_96_mb_of_weights_takes_less_than_32_mb_more(width):
    result = subprocess.run([sys.executable, "-c", STEP, str(width)], capture_output=True, text=True, check=False)
    if "clear_refs" in result.stderr:
        pytest.skip("the kernel does not let a process reset its peak")
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 32 * MIB
