"""Write and read the checkpoints that are kept of every release, so that later ones prove that they still load them.

At a release, after the version was raised:

    PYTHONPATH=.:tests:tests/distributed python -m kept_checkpoints

writes `tests/data/checkpoints/version-VERSION/`: a tiny GPT's checkpoint in both of Megatron's formats (packed, since
their many small tensors are mostly headers), a plain optimizer's state, and `values.json` with what they hold. Commit
it and never change it again.
"""

import hashlib
import json
import re
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from checkpoint_runs import FORMATS, go_on, load, save
from global_form import merge
from layout_runs import Layout, Run, start
from torch import Tensor, nn

from megatron_dobb import Dobb, DobbConfig
from megatron_dobb.version import __version__
from testbed import processes

FOLDER = Path(__file__).resolve().parents[1] / "data" / "checkpoints"

ARCHIVE = "gpt.tar.xz"
LAYOUT = Layout(micro_batch=6)
CONFIG = DobbConfig(blocks=4, refresh_interval=3, basis_dtype="bf16", moment_dtype="fp32")
MODEL = {"hidden_size": 16, "kv_channels": 4, "ffn_hidden_size": 32}
SAVED_AFTER, END = 4, 7  # refreshes in the steps 0, 3 and 6


def gpt_run() -> Run:
    """The GPT of these checkpoints, at its start."""
    return Run(LAYOUT, CONFIG, MODEL)


def plain() -> tuple[nn.Module, Dobb]:
    """The model of the plain optimizer, at its start."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 12))
    return model, Dobb(model, lr=0.01, blocks=4, refresh_interval=3)


def train_plain(model: nn.Module, optimizer: Dobb, first: int, end: int) -> list[float]:
    """Losses of the steps `first` to `end - 1`."""
    losses = []
    for step in range(first, end):
        x = torch.randn(8, 16, 24, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x[..., :12].sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def tensors_of_run(run: Run) -> dict[str, Tensor]:
    """Everything that a checkpoint has to carry, by what it is and the parameter's name."""
    state = merge([run.snapshot()])
    kinds = {"weight": state.parameters, "momentum": state.momenta, "moment": state.moments, "basis": state.bases}
    tensors = {f"{kind} of {name}": tensor for kind, by_name in kinds.items() for name, tensor in by_name.items()}
    for name, parameter in run.weights.items():
        if name not in run.managed:
            states = run.dobb._get_main_param_and_optimizer_states(parameter)
            tensors |= {f"{kind} of {name}": states[kind] for kind in ("exp_avg", "exp_avg_sq")}
    return tensors


def tensors_of_plain(model: nn.Module, optimizer: Dobb) -> dict[str, Tensor]:
    """The same of the plain optimizer."""
    tensors = {f"weight of {name}": weight.detach() for name, weight in model.named_parameters()}
    for name, parameter in model.named_parameters():
        tensors |= {f"{kind} of {name}": tensor for kind, tensor in optimizer.state[parameter].items()}
    return tensors


def values(tensors: dict[str, Tensor]) -> dict[str, list[Any]]:
    """Shape, dtype, sum, and a digest of the bits of each tensor."""
    return {
        name: [
            list(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            float(tensor.double().sum()),
            hashlib.sha256(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16],
        ]
        for name, tensor in sorted(tensors.items())
    }


def write_gpt(path: Path) -> dict[str, Any]:
    """Train, save in both formats, and go on; returns what was saved."""
    start(LAYOUT)
    run = gpt_run()
    go_on(run, 0, SAVED_AFTER)
    for sharding in FORMATS:
        save(run, path / sharding, sharding)
    found = values(tensors_of_run(run))
    return {"tensors": found, "losses": go_on(run, SAVED_AFTER, END)}


def read_gpt(path: Path) -> dict[str, dict[str, Any]]:
    """What each format holds, and how training goes on from it."""
    start(LAYOUT)
    results = {}
    for sharding in FORMATS:
        run = gpt_run()
        load(run, path / sharding)
        found, attempted = values(tensors_of_run(run)), run.dobb.attempted_steps
        results[sharding] = {"tensors": found, "losses": go_on(run, attempted, END)}
    return results


def write_plain(file: Path) -> dict[str, Any]:
    """The same for the plain optimizer."""
    model, optimizer = plain()
    train_plain(model, optimizer, 0, SAVED_AFTER)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    found = values(tensors_of_plain(model, optimizer))
    return {"tensors": found, "losses": train_plain(model, optimizer, SAVED_AFTER, END)}


def read_plain(file: Path) -> dict[str, Any]:
    """What the file holds, and how training goes on from it."""
    saved = torch.load(file, weights_only=True)
    model, optimizer = plain()
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    found, attempted = values(tensors_of_plain(model, optimizer)), optimizer.attempted_steps
    return {"tensors": found, "losses": train_plain(model, optimizer, attempted, END)}


def main() -> None:
    """Write the checkpoints of this version."""
    path = FOLDER / f"version-{__version__}"
    if path.exists():
        sys.exit(f"{path} is there already, and is to be kept: raise the version first")
    torch.set_num_threads(1)
    path.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        [of_gpt] = processes.run(1, write_gpt, Path(folder))
        with tarfile.open(path / ARCHIVE, "w:xz") as archive:
            for sharding in FORMATS:
                archive.add(Path(folder) / sharding, sharding)
    facts = {
        "written by": {name: version(name) for name in ("torch", "megatron-core")},
        "gpt": of_gpt,
        "plain": write_plain(path / "plain.pt"),
    }
    text = re.sub(r"\n {4,}|\n   (?=\])", " ", json.dumps(facts, indent=1))  # one line for each tensor
    (path / "values.json").write_text(text + "\n")
    print(f"{path}: {sum(file.stat().st_size for file in path.rglob('*') if file.is_file()):,} bytes")


if __name__ == "__main__":
    main()
