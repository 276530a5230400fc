"""`--save` and `--load` in Megatron's own training loop: a resumed run is the undisturbed one."""

import re

import pytest
import torch
from test_launcher import DOBB, LAUNCHER, PYTHON, SCRIPT, TORCHRUN, TRAINING, alone, run

ITERATIONS, SAVED = 6, 3
TRAIN = [
    *(*LAUNCHER, SCRIPT, *TRAINING, *DOBB, "--train-iters", str(ITERATIONS), "--save-interval", str(SAVED)),
    *("--bf16", "--ckpt-format", "torch_dist"),
]
READ = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[1] + ".store", rank=0, world_size=1)
from megatron.core import dist_checkpointing
state = dist_checkpointing.load_plain_tensors(sys.argv[1])
tensors = {name: value for name, value in state.items() if torch.is_tensor(value)}
assert "megatron_dobb" not in sys.modules
torch.save(tensors, sys.argv[2])
"""


def losses(finished):
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-4000:]
    found = re.findall(r"iteration +(\d+)/ +\d+ .*lm loss: (\S+)", finished.stdout + finished.stderr)
    return {int(step): float(loss) for step, loss in found}


def tensors(folder, iteration, tmp_path):
    """Every tensor of a checkpoint, read by Megatron without this package."""
    read = run(*PYTHON, "-c", READ, folder / f"iter_{iteration:07d}", tmp_path / "tensors.pt")
    assert read.returncode == 0, read.stderr[-3000:]
    return torch.load(tmp_path / "tensors.pt", weights_only=True)


@pytest.mark.full
def test_a_checkpoint_of_sgd_is_refused_by_name(tmp_path):
    common = [word for word in TRAINING if word != "--use-distributed-optimizer"]
    saving = ["--ckpt-format", "torch_dist", "--save", tmp_path, "--train-iters", "1", "--save-interval", "1"]
    saved = alone(*PYTHON, SCRIPT, *common, "--optimizer", "sgd", *saving)
    assert saved.returncode == 0, saved.stderr[-3000:]
    refused = alone(*PYTHON, *TRAIN, "--load", tmp_path, "--dobb-load-other-optimizer")
    assert refused.returncode != 0
    assert "the checkpoint was written by --optimizer sgd, which Dobb cannot" in refused.stderr
    assert "no second moments" in refused.stderr
    assert "--no-load-optim" in refused.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    ("launch", "saving", "loading"),
    [
        pytest.param(
            lambda *words: run(*TORCHRUN, *words),
            ["--overlap-grad-reduce"],
            ["--overlap-grad-reduce", "--ckpt-fully-parallel-load"],
            id="dp_reshardable",
        ),
        pytest.param(
            lambda *words: alone(*PYTHON, *words),
            ["--dist-ckpt-optim-fully-reshardable", "--async-save", "--async-strategy", "mcore"],
            ["--dist-ckpt-optim-fully-reshardable"],
            id="fully_reshardable, async",
        ),
    ],
)
def test_a_resumed_training_is_the_undisturbed_one(launch, saving, loading, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    undisturbed = losses(launch(*TRAIN, "--save", first, *saving))
    resumed = losses(launch(*TRAIN, "--load", first, "--ckpt-step", str(SAVED), "--save", second, *loading))
    assert list(resumed) == list(range(SAVED + 1, ITERATIONS + 1))
    assert resumed[ITERATIONS] == undisturbed[ITERATIONS]
    expected, found = tensors(first, ITERATIONS, tmp_path), tensors(second, ITERATIONS, tmp_path)
    assert expected.keys() == found.keys()
    assert sum(name.startswith("optimizer.dobb.") for name in found) == 2 * 8
    weights = [name for name in found if not name.startswith("optimizer.")]
    assert len(weights) > 10
    for name, tensor in expected.items():
        if ".gbuf_idx_" not in name:  # of padding, nobody says what it holds
            assert torch.equal(found[name], tensor), name
