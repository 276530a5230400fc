"""Every step of Dobb inside Megatron against `simple.py` in float64.

The simple form is given the run's gradients and layer inputs, and computes everything else itself: the moments, the
bases, the momentum and the weights.
"""

import functools
import math

import flips
import pytest
import torch
from global_form import join_shards
from layout_runs import Layout, Run, start
from torch import nn

from megatron_dobb import DobbConfig
from megatron_dobb.methods.dobb.schedule import is_due
from megatron_dobb.methods.dobb.simple import SimpleDobb
from testbed import processes

STEPS, BLOCKS, CAPTURED = 20, 4, 19
LEARNING_RATE, WEIGHT_DECAY = 2e-3, 0.1
SETTINGS = {"momentum": 0.95, "moment_beta": 0.9, "update_scale": 0.2}

STEP_TOLERANCE = 5e-4
"""Allowed error of any entry, as a fraction of the length of the step along one basis vector. The moments of the fc2
inputs have condition numbers of about 1000, so the fp32 bases have errors of about 1000 x 2^-24, and an entry sums 64
of them. The largest found is 1.6e-4."""

FLIP_BOUND = 5e-5
"""Fraction of the RMS of a row's block below which a coefficient may flip, for the same reason."""

LAYOUTS = [Layout(micro_batch=8), Layout(3, micro_batch=2)]
VARIANTS = {
    "principal": {"refresh_interval": 9},
    "nesterov, two iterations": {"refresh_interval": 7, "nesterov": True, "iterations": 2},
}


def simple_form(weight, variant):
    """A layer with this weight, and the one-file statement of the method for it, both in float64."""
    layer = nn.Linear(*reversed(weight.shape), bias=False, dtype=torch.float64)
    layer.weight.data = weight.double()
    return layer, SimpleDobb([layer], LEARNING_RATE, WEIGHT_DECAY, blocks=BLOCKS, **SETTINGS, **VARIANTS[variant])


def config_of(variant):
    return DobbConfig(
        blocks=BLOCKS,
        capture_sequences=CAPTURED,
        basis_dtype="fp32",
        **SETTINGS,
        **VARIANTS[variant],
    )


def train_and_record(layout, config):
    """Weights before the first and after every step, and the gradients and layer inputs of every step."""
    start(layout)
    run = Run(layout, config, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    inputs, gradients = record_inputs(run), record_gradients(run)
    weights = [managed_weights(run)]
    for step in range(STEPS):
        inputs.append({name: [] for name in run.names})
        run.step(step)
        weights.append(managed_weights(run))
    return {"weights": weights, "inputs": inputs, "gradients": gradients}


def managed_weights(run):
    return {name: run.weights[name].detach().clone() for name in run.names}


def record_inputs(run):
    steps = []
    for name in run.names:
        module = run.model.module.get_submodule(name.removesuffix(".weight"))

        def record(_module, args, _output, name=name):
            steps[-1][name].append(args[0].detach().clone())

        module.register_forward_hook(record)
    return steps


def record_gradients(run):
    steps = []
    step_with_ready_grads = run.dobb.step_with_ready_grads

    def record():
        steps.append(run.shards(lambda segment, shard: shard.grad))
        return step_with_ready_grads()

    run.dobb.step_with_ready_grads = record
    return steps


def captured_input(ranks, layout, step, name):
    """`[tokens, n]` of the first CAPTURED sequences of a global batch: rank r's micro-batch i follows rank r - 1's."""
    microbatches = [x for i in zip(*(rank["inputs"][step][name] for rank in ranks), strict=True) for x in i]
    return torch.cat(microbatches, dim=1)[:, :CAPTURED].flatten(0, 1)


def moved(before, after):
    """How far a step took a weight, apart from the weight decay."""
    return after.detach() - (1 - LEARNING_RATE * WEIGHT_DECAY) * before


@functools.cache
def recorded(layout, variant):
    return processes.run(layout.world, train_and_record, layout, config_of(variant))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_follow_the_float64_computation_but_for_listed_flips(layout, variant, capsys):
    config, ranks = config_of(variant), recorded(layout, variant)
    weights = ranks[0]["weights"]
    assert sum(is_due(step, 0, config.refresh_interval) for step in range(STEPS)) == 3
    found, largest = [], 0.0
    for name in weights[0]:
        layer, exact = simple_form(weights[0][name], variant)
        step_size = LEARNING_RATE * exact.update_scale * math.sqrt(max(layer.weight.shape) / len(layer.weight))
        for step in range(STEPS):
            before = layer.weight.detach().clone()
            if is_due(step, 0, config.refresh_interval):
                layer(captured_input(ranks, layout, step, name).double())
            layer.weight.grad = join_shards([rank["gradients"][step] for rank in ranks], name).double()
            exact.step()
            new, explained = flips.find(
                moved(weights[step][name].double(), weights[step + 1][name].double()) - moved(before, layer.weight),
                exact.coefficients(layer.weight),
                exact.state[layer.weight]["basis"],
                step_size=step_size,
                tolerance=STEP_TOLERANCE * step_size,
                bound=FLIP_BOUND,
                name=name,
                step=step,
            )
            found += new
            layer.weight.data += explained
        error = float((weights[-1][name] - layer.weight.detach()).abs().max())
        largest = max(largest, error / step_size)
    coefficients = STEPS * sum(w.numel() for w in weights[0].values())
    with capsys.disabled():
        print(f"\n{layout}, {variant}: after {STEPS} steps the weights are within {largest:.1e} of one step's length,")
        print(f"with {len(found)} of {coefficients} signs flipped", *found, sep="\n")
    assert largest <= STEPS * STEP_TOLERANCE / 2
    assert len(found) <= FLIP_BOUND * coefficients
