"""Every step of Dobb inside Megatron against a float64 computation written straight from docs/how-it-works.md.

The float64 model gets what a step is given, the run's gradients and layer inputs, and from there on computes
everything itself: the moments, the bases, the momentum and the weights.
"""

import functools
import math

import flips
import pytest
import torch
from global_form import join_shards
from layout_runs import Layout, Run, start

from megatron_dobb import DobbConfig
from megatron_dobb.methods.dobb.schedule import is_due
from testbed import processes

STEPS, BLOCKS, CAPTURED = 20, 4, 19
LEARNING_RATE, WEIGHT_DECAY = 2e-3, 0.1
MOMENTUM, MOMENT_BETA, UPDATE_SCALE = 0.95, 0.9, 0.2

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


class Float64Dobb:
    """One weight, exactly as docs/how-it-works.md states the update."""

    def __init__(self, weight, *, nesterov=False, iterations=1):
        self.W = weight.double()
        self.m, self.n = weight.shape
        self.b = self.n // BLOCKS
        self.M = torch.zeros_like(self.W)
        self.A = [torch.zeros(self.b, self.b, dtype=torch.float64) for _ in range(BLOCKS)]
        self.Q = [torch.eye(self.b, dtype=torch.float64) for _ in range(BLOCKS)]
        self.C = [torch.zeros(self.m, self.b, dtype=torch.float64) for _ in range(BLOCKS)]
        self.nesterov, self.iterations = nesterov, iterations

    def columns(self, j):
        return slice(j * self.b, (j + 1) * self.b)

    def refresh(self, x):
        """`x [tokens, n]`: the inputs of the layer."""
        for j in range(BLOCKS):
            x_j = x.double()[:, self.columns(j)]
            self.A[j] = MOMENT_BETA * self.A[j] + (1 - MOMENT_BETA) * (x_j.T @ x_j) / len(x)
            for _ in range(self.iterations):
                self.Q[j] = torch.linalg.qr(self.A[j] @ self.Q[j]).Q

    def step(self, gradient):
        G = gradient.double()
        self.M = MOMENTUM * self.M + (1 - MOMENTUM) * G
        source = MOMENTUM * self.M + (1 - MOMENTUM) * G if self.nesterov else self.M
        self.O = torch.empty_like(self.W)
        for j in range(BLOCKS):
            self.C[j] = source[:, self.columns(j)] @ self.Q[j]
            self.O[:, self.columns(j)] = torch.sign(self.C[j]) @ self.Q[j].T / math.sqrt(self.m)
        self.W = self.decayed(self.W) - LEARNING_RATE * self.scale * self.O

    @property
    def scale(self):
        return UPDATE_SCALE * math.sqrt(max(self.m, self.n))

    @staticmethod
    def decayed(weight):
        return (1 - LEARNING_RATE * WEIGHT_DECAY) * weight


def config_of(variant):
    return DobbConfig(
        blocks=BLOCKS,
        capture_sequences=CAPTURED,
        momentum=MOMENTUM,
        moment_beta=MOMENT_BETA,
        update_scale=UPDATE_SCALE,
        basis_dtype="fp32",
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
        model = Float64Dobb(weights[0][name], nesterov=config.nesterov, iterations=config.iterations)
        flipped = torch.zeros_like(model.W)
        for step in range(STEPS):
            if is_due(step, 0, config.refresh_interval):
                model.refresh(captured_input(ranks, layout, step, name))
            model.step(join_shards([rank["gradients"][step] for rank in ranks], name))
            step_size = LEARNING_RATE * model.scale / math.sqrt(model.m)
            made = weights[step + 1][name].double() - model.decayed(weights[step][name].double())
            new, explained = flips.find(
                made + LEARNING_RATE * model.scale * model.O,
                torch.stack(model.C, dim=1),
                torch.stack(model.Q),
                step_size=step_size,
                tolerance=STEP_TOLERANCE * step_size,
                bound=FLIP_BOUND,
                name=name,
                step=step,
            )
            found += new
            flipped = model.decayed(flipped) + explained
        error = float((weights[-1][name] - flipped - model.W).abs().max())
        largest = max(largest, error / step_size)
    coefficients = STEPS * sum(w.numel() for w in weights[0].values())
    with capsys.disabled():
        print(f"\n{layout}, {variant}: after {STEPS} steps the weights are within {largest:.1e} of one step's length,")
        print(f"with {len(found)} of {coefficients} signs flipped", *found, sep="\n")
    assert largest <= STEPS * STEP_TOLERANCE / 2
    assert len(found) <= FLIP_BOUND * coefficients
