"""The plain optimizer with staggered refreshes: each weight on its own steps, as if it had its own schedule."""

import copy

import pytest
import torch
from small_mlp import BLOCKS, LAYERS, backward, batch, mlp, train

from megatron_dobb import Dobb
from megatron_dobb.errors import ConfigError
from megatron_dobb.methods.dobb.schedule import is_due

INTERVAL, STEPS = 3, 8


def bases_of(optimizer):
    return {name: optimizer._bases.basis_of(name).clone() for name in optimizer.on_dobb}


def test_every_weight_is_refreshed_on_the_first_step_and_on_those_of_its_phase():
    model = mlp()
    optimizer = Dobb(model, lr=0.01, blocks=BLOCKS, refresh_interval=INTERVAL, stagger=True)
    phases = optimizer._bases.phase_of
    assert sorted(phases.values()) == list(range(INTERVAL)), "three weights, three phases"
    before = bases_of(optimizer)
    for step in range(STEPS):
        train(model, optimizer, [step])
        after = bases_of(optimizer)
        for name, basis in after.items():
            changed = not torch.equal(basis, before[name])
            assert changed == is_due(step, phases[name], INTERVAL), (step, name)
        before = after


def test_only_the_weights_of_the_step_are_captured():
    model = mlp()
    optimizer = Dobb(model, lr=0.01, blocks=BLOCKS, refresh_interval=INTERVAL, stagger=True)
    train(model, optimizer, [0])
    optimizer.zero_grad()
    backward(model, batch(1))
    captured = {name for name, entry in optimizer._capture.sums.items() if entry.tokens}
    assert captured == {name for name, phase in optimizer._bases.phase_of.items() if phase == 1}
    assert len(captured) == 1


def test_with_an_interval_of_one_staggering_changes_nothing():
    states = []
    for stagger in (False, True):
        model = mlp()
        train(model, Dobb(model, lr=0.01, blocks=BLOCKS, refresh_interval=1, stagger=stagger), range(4))
        states.append(model.state_dict())
    for name in states[0]:
        assert torch.equal(states[0][name], states[1][name]), name


def test_a_staggered_run_continues_from_its_state():
    settings = {"lr": 0.01, "blocks": BLOCKS, "refresh_interval": INTERVAL, "stagger": True}
    model, other = mlp(), mlp()
    optimizer, resumed = Dobb(model, **settings), Dobb(other, **settings)
    train(model, optimizer, range(4))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.load_state_dict(model.state_dict())
    train(model, optimizer, range(4, STEPS))
    train(other, resumed, range(4, STEPS))
    for name in LAYERS:
        assert torch.equal(model.get_submodule(name).weight, other.get_submodule(name).weight)


@pytest.mark.parametrize("source", ["gram", "none"])
def test_what_is_not_captured_cannot_be_staggered(source):
    with pytest.raises(ConfigError, match=r"stagger.*source"):
        Dobb(mlp(), stagger=True, source=source)


def test_the_transport_of_the_moments_may_be_given_as_a_torch_dtype():
    assert Dobb(mlp(), blocks=BLOCKS, moment_transport=torch.bfloat16).config.moment_transport == "bf16"
