"""A small model with layers of odd shapes, its data, and the loop that trains it."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.set_num_threads(1)  # for layers this small, more are slower

BATCH, LENGTH = 8, 48


class Mlp(nn.Module):
    """`[batch, length, 24]` through layers of 24, 60 and 32 inputs; recomputes the middle one if told to."""

    def __init__(self, recompute=None):
        super().__init__()
        self.first = nn.Linear(24, 60)
        self.norm = nn.LayerNorm(60)
        self.second = nn.Linear(60, 32, bias=False)
        self.third = nn.Linear(32, 10)
        self.recompute = recompute

    def forward(self, x):
        x = self.norm(self.first(x).sin())
        if self.recompute is None:
            return self.third(self.second(x).tanh())
        x = checkpoint(lambda y: self.second(y).tanh(), x, use_reentrant=self.recompute == "reentrant")
        return self.third(x)


BLOCKS = {"*": 4, "second": 6}
LAYERS = ("first", "second", "third")


def mlp(recompute=None):
    torch.manual_seed(1)
    return Mlp(recompute)


def batch(step, size=BATCH):
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(size, LENGTH, 24, generator=generator) * torch.linspace(0.5, 1.5, 24)


def backward(model, x, micro_batches=1):
    for part in x.chunk(micro_batches):
        ((model(part) - part[..., :10].sin()).square().mean() / micro_batches).backward()


def train(model, optimizer, steps, micro_batches=1):
    for step in steps:
        optimizer.zero_grad()
        backward(model, batch(step), micro_batches)
        optimizer.step()


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def tensors(optimizer, layer):
    return optimizer.state[optimizer.on_dobb[f"{layer}.weight"].parameter]


def on_dobb(state):
    """The tensors of the weights on Dobb in a state_dict, by name."""
    group = next(group for group in state["param_groups"] if group["dobb"])
    return {name: state["state"][key] for key, name in zip(group["params"], state["dobb"]["names"], strict=True)}


COUNTERS = ("attempted_steps", "capture_sequences")


def older_form(state):
    """A state_dict as Dobb returned it when all of its state was under `dobb`."""
    groups = [{key: group[key] for key in group if key not in COUNTERS} for group in state["param_groups"]]
    ours = {key: state["param_groups"][0][key] for key in COUNTERS}
    others = {key: entry for key, entry in state["state"].items() if "momentum" not in entry}
    return {"state": others, "param_groups": groups, "dobb": {**ours, "weights": on_dobb(state)}}


def assert_same(one, other):
    """Equal to the last bit, through nested dictionaries and lists."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    else:
        assert one == other
