"""Small checkpoints of Dobb with given tensors, in the forms that the plain optimizer and Megatron write."""

import io

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from megatron_dobb import Dobb
from megatron_dobb.megatron.dobb.run_metadata import DobbRunMetadata

FACTS = {
    "blocks": 2,
    "block_width": None,
    "blocks_for": {},
    "exclude": [],
    "moment_dtype": "fp32",
    "basis_dtype": "fp32",
    "attempted_steps": 200,
    "capture_sequences": 8,
    "experts_apart": False,
    "version": DobbRunMetadata.version,
}


def state_of(rows=12, blocks=2, width=8, seed=0):
    """Momentum, moment and basis as training leaves them: Q nearly diagonalises A."""
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(blocks, 64, width, generator=random) * torch.linspace(1, 4, width)
    moment = inputs.mT @ inputs / 64
    basis = torch.linalg.eigh(moment + 0.02 * torch.diag(torch.arange(width))).eigenvectors
    return {"momentum": torch.randn(rows, blocks * width, generator=random), "moment": moment, "basis": basis}


def plain_file(path, weights, steps=200, **group):
    """A file as `torch.save` writes it of `Dobb.state_dict()`."""
    known = {"dobb": True, "attempted_steps": steps, "capture_sequences": 8, "side": "input", "source": "activation"}
    groups = [{**known, **group, "params": list(range(len(weights)))}]
    state = {"state": dict(enumerate(weights.values())), "param_groups": groups, "dobb": {"names": list(weights)}}
    torch.save({"model": {}, "optimizer": state}, path)
    return path


def megatron_folder(folder, tensors, layout="fully_reshardable", dobb=FACTS, **common):
    """A folder as Megatron writes it, with these tensors; `dobb` None for another optimizer's."""
    content = {"distrib_optim_sharding_type": layout} | ({"dobb": dobb} if dobb else {})
    packed = io.BytesIO()
    torch.save([{"content_metadata": content, **common}], packed)
    packed.seek(0)
    dcp.save({**tensors, "common_state/shard_0_1": packed}, checkpoint_id=folder, no_dist=True)
    return folder


def of_dobb(name, state):
    return {f"optimizer.dobb.{kind}.{name}": state[kind] for kind in ("moment", "basis")}


def small_dobb():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 12))
    optimizer = Dobb(model, lr=0.01, blocks=4)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 16, 24)).square().mean().backward()
        optimizer.step()
    return model, optimizer
