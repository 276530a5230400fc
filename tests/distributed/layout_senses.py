"""What the ranks run to show that every layout computes the same function (DESIGN.md, section 12).

`train_in_every_sense` returns, on each rank, what the four senses compare. The reference, one process with one
micro-batch, makes the states from which the other layouts start.
"""

import zlib
from dataclasses import replace

import flips
import torch
from global_form import merge
from layout_runs import HEAD, HIDDEN, SEED, SEQUENCES, Layout, Run, global_batch, start

from megatron_dobb import DobbConfig
from megatron_dobb.megatron import seam
from testbed import gpt

STEPS, BLOCKS, CAPTURED, BETA = 20, 4, 10, 0.95
LEARNING_RATE, UPDATE_SCALE = 2e-3, 0.2
CONFIG = DobbConfig(blocks=BLOCKS, refresh_interval=3, capture_sequences=CAPTURED, moment_beta=BETA, basis_dtype="fp32")
POLICIES = {"first": CONFIG, "all": replace(CONFIG, capture="all", capture_sequences=None)}
TOKENS = {"first": CAPTURED * gpt.SEQUENCE, "all": SEQUENCES * gpt.SEQUENCE}
TOLERANCE = 1e-5
NEVER = 10**9
PERTURBED, NOISE = 8, 1e-7
REFERENCE = Layout(micro_batch=SEQUENCES)


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
    run = Run(layout, config, lr=LEARNING_RATE)
    captures = run.record_captures()
    run.step(0)
    return captures[0], run.snapshot()


def reference_refreshes(layout):
    """The states before and after every refresh."""
    run = Run(layout, CONFIG, lr=LEARNING_RATE)
    states = {}
    for step in range(STEPS):
        before = merge([run.snapshot()])
        run.step(step)
        if CONFIG.refresh_due(step):
            states[step] = (before, merge([run.snapshot()]))
    return states


def later_refreshes(layout, reference):
    """What every refresh makes of the reference's weights, A and Q."""
    run = Run(layout, CONFIG, lr=LEARNING_RATE)
    snapshots = {}
    for step, (before, _) in reference["later"].items():
        run.load(before.parameters, before.moments, before.bases)
        run.dobb.attempted_steps = step
        run.step(step)
        snapshots[step] = run.snapshot()
    return snapshots


def frozen(layout, reference):
    """Train with fixed bases. A flipped sign is recorded and undone, for its effect would hide further ones."""
    run = Run(layout, replace(CONFIG, refresh_interval=NEVER), lr=LEARNING_RATE)
    run.dobb.attempted_steps = 1  # no refresh at the start either
    bases = {name: fixed_basis(name, columns_of(name)) for name in run.names}
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
    run = Run(layout, replace(CONFIG, basis_dtype="bf16"), lr=LEARNING_RATE)
    if noise_seed is not None:
        generator = torch.Generator().manual_seed(noise_seed)
        run.load({n: w * (1 + NOISE * torch.randn(w.shape, generator=generator)) for n, w in run.weights.items()})
    return [run.step(step) for step in range(STEPS)]


def perturbed_losses():
    start(REFERENCE)
    return [losses(REFERENCE, noise_seed=seed) for seed in range(PERTURBED)]


def float64_moments():
    """`x^T x / tokens` of every block, from a float64 forward pass of the same model with hooks of its own."""
    start(REFERENCE)
    names = Run(REFERENCE, CONFIG).names
    seam.configure(None)
    torch.manual_seed(SEED)
    model = gpt.build(hidden_size=HIDDEN, kv_channels=HEAD).module.double()
    inputs = {}
    for name in names:
        module = model.get_submodule(name.removesuffix(".weight"))
        module.register_forward_hook(lambda _, args, output, name=name: inputs.update({name: args[0].detach()}))
    tokens = global_batch(0)[:, :-1]
    mask = torch.ones(1, 1, gpt.SEQUENCE, gpt.SEQUENCE, dtype=torch.bool).triu(1)
    model(input_ids=tokens, position_ids=torch.arange(gpt.SEQUENCE).expand(SEQUENCES, -1), attention_mask=mask)
    moments = {}
    for policy, count in (("first", CAPTURED), ("all", SEQUENCES)):
        moments[policy] = {}
        for name, x in inputs.items():
            assert x.dtype == torch.float64
            blocks = x[:, :count].reshape(count * gpt.SEQUENCE, BLOCKS, -1).unbind(1)
            moments[policy][name] = torch.stack([b.T @ b for b in blocks]) / (count * gpt.SEQUENCE)
    return moments


def fixed_basis(name, columns):
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.linalg.qr(torch.randn(BLOCKS, columns // BLOCKS, columns // BLOCKS, generator=generator)).Q


def columns_of(name):
    return {"linear_fc2": 4 * HIDDEN, "linear_proj": 4 * HEAD}.get(name.split(".")[-2], HIDDEN)
