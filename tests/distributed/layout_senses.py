"""What the ranks run to show that every layout computes the same function (docs/layouts.md).

`train_in_every_sense` returns, on each rank, what the four senses compare. The reference, one process with one
micro-batch, makes the states from which the other layouts start.
"""

import zlib
from dataclasses import replace

import flips
import torch
from global_form import merge
from layout_runs import SEQUENCES, Layout, Run, global_batch, start
from whole_model import is_expert

from megatron_dobb import DobbConfig
from megatron_dobb.methods.dobb.schedule import is_due
from testbed import gpt

STEPS, BLOCKS, CAPTURED, BETA = 20, 4, 10, 0.95
LOSS_STEPS = 12
"""Of the full run: four refreshes. The spread that a loss may have only grows later, from 5e-5 to 1.5e-4."""
LEARNING_RATE, UPDATE_SCALE = 2e-3, 0.2
CONFIG = DobbConfig(blocks=BLOCKS, refresh_interval=3, capture_sequences=CAPTURED, moment_beta=BETA, basis_dtype="fp32")
POLICIES = {"first": CONFIG, "all": replace(CONFIG, capture="all", capture_sequences=None)}
TAKEN = {"first": CAPTURED, "all": SEQUENCES}
TOLERANCE = 1e-5
NEVER = 10**9
PERTURBED, NOISE = 8, 1e-7
DENSE, EXPERTS = Layout(micro_batch=SEQUENCES), Layout(micro_batch=SEQUENCES, experts=True)
FOUR_LAYERS = {"num_layers": 4}
"""Enough for two pipeline stages of two chunks each."""


def reference_of(layout):
    """The layout that trains the same model in one process with one micro-batch."""
    return EXPERTS if layout.experts else DENSE


def config_of(layout):
    """What captures the same tokens on every layout: of experts, whose tokens are permuted, only all of them."""
    return POLICIES["all" if layout.experts else "first"]


def built(layout, config):
    return Run(layout, config, FOUR_LAYERS, lr=LEARNING_RATE)


def train_in_every_sense(layout, reference=None):
    """All of this module's runs on one layout, started from the reference's states; the reference starts its own."""
    start(layout)
    return {
        "first": {policy: first_refresh(layout, config) for policy, config in POLICIES.items()},
        "later": later_refreshes(layout, reference) if reference else reference_refreshes(layout),
        "frozen": frozen(layout, reference),
        "losses": losses(layout),
    }


def first_refresh(layout, config):
    run = built(layout, config)
    captures = run.record_captures()
    run.step(0)
    return captures[0], run.snapshot()


def reference_refreshes(layout):
    """The states before and after every refresh."""
    run = built(layout, config_of(layout))
    states = {}
    for step in range(STEPS):
        before = merge([run.snapshot()])
        run.step(step)
        if is_due(step, 0, CONFIG.refresh_interval):
            states[step] = (before, merge([run.snapshot()]))
    return states


def later_refreshes(layout, reference):
    """What every refresh makes of the reference's weights, A and Q."""
    run = built(layout, config_of(layout))
    snapshots = {}
    for step, (before, _) in reference["later"].items():
        run.load(before.parameters, before.moments, before.bases)
        run.begin_at(step)
        run.step(step)
        snapshots[step] = run.snapshot()
    return snapshots


def frozen(layout, reference):
    """Train with fixed bases. A flipped sign is recorded and undone, for its effect would hide further ones."""
    run = built(layout, replace(config_of(layout), refresh_interval=NEVER))
    run.begin_at(1)  # no refresh at the start either
    bases = {name: fixed_basis(name, weight.geometry.columns) for name, weight in run.managed.items()}
    run.load(bases=bases)
    states, found, errors, largest = [], [], [], 0.0
    for step in range(STEPS):
        run.step(step)
        if reference is None:
            states.append(merge([run.snapshot()]))
            continue
        expected = reference["frozen"]["states"][step]
        for name in run.names:
            try:
                new, explained, relative = compare_weight(run, name, expected, bases[name], step)
            except AssertionError as error:  # for the test to raise: the ranks go on together
                errors.append(str(error))
                continue
            with torch.no_grad():
                run.weights[name].sub_(explained)
            found += new
            largest = max(largest, relative)
    return {"states": states, "flips": found, "errors": errors, "largest": largest, "end": run.snapshot()}


def compare_weight(run, name, expected, basis, step):
    whole = expected.parameters[name]
    rows, columns = whole.shape
    weight, momentum = run.local(name, whole), run.local(name, expected.momenta[name])
    blocks = momentum.shape[1] * BLOCKS // columns
    first = run.first_block(name, blocks)
    basis = basis[first : first + blocks]
    scale = float(whole.square().mean().sqrt())
    difference = run.weights[name].detach().double() - weight
    new, explained = flips.find(
        difference,
        flips.coefficients(momentum, basis),
        basis,
        step_size=LEARNING_RATE * UPDATE_SCALE * (max(rows, columns) / rows) ** 0.5,
        tolerance=TOLERANCE * scale,
        name=name,
        step=step,
    )
    return new, explained, float((difference - explained).abs().max()) / scale


def losses(layout, noise_seed=None):
    """The loss curve of the full run, with the default bf16 bases; maybe from slightly other initial weights."""
    run = built(layout, replace(config_of(layout), basis_dtype="bf16"))
    if noise_seed is not None:
        generator = torch.Generator().manual_seed(noise_seed)
        run.load({n: w * (1 + NOISE * torch.randn(w.shape, generator=generator)) for n, w in run.weights.items()})
    return [run.step(step) for step in range(LOSS_STEPS)]


def perturbed_losses(reference):
    start(reference)
    return [losses(reference, noise_seed=seed) for seed in range(PERTURBED)]


def float64_moments(reference):
    """`x^T x / tokens` of every block and the tokens, from float64 forward passes with hooks of its own."""
    start(reference)
    run = built(reference, config_of(reference))
    run.model.module.double()
    moments = {}
    for policy, taken in TAKEN.items():
        moments[policy] = {}
        for name, x in layer_inputs(run, global_batch(0)[:taken, :-1]).items():
            if is_expert(name) and policy != "all":
                continue  # its share of the taken sequences is found in no other layout
            assert x.dtype == torch.float64
            blocks = x.unflatten(1, (BLOCKS, -1)).unbind(1)
            moments[policy][name] = torch.stack([b.T @ b for b in blocks]) / len(x), len(x)
    return moments


def layer_inputs(run, tokens):
    """What every managed weight multiplies in one forward pass, `[tokens, n]`."""
    inputs, handles = {}, []
    for name, weight in run.managed.items():

        def record(_module, args, _output, name=name):
            inputs[name] = args[0].detach().flatten(0, -2)

        handles.append(weight.module.register_forward_hook(record))
    mask = torch.ones(1, 1, gpt.SEQUENCE, gpt.SEQUENCE, dtype=torch.bool).triu(1)
    places = torch.arange(gpt.SEQUENCE).expand(len(tokens), -1)
    run.model.module(input_ids=tokens, position_ids=places, attention_mask=mask)
    for handle in handles:
        handle.remove()
    return inputs


def fixed_basis(name, columns):
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.linalg.qr(torch.randn(BLOCKS, columns // BLOCKS, columns // BLOCKS, generator=generator)).Q
