"""Every variant of the method, through Megatron's buffers, on one rank and on several.

After a first step with a refresh, what the ranks hold is joined. The moments must be those of an independent statement
in float64, and the weights must have moved as the statement says for the momentum and the bases found. Nothing of the
statement knows of shards; the output side is the input side of the transposed matrix.
"""

import functools

import pytest
import torch
from global_form import merge
from layout_runs import SEQUENCES, Layout, Run, global_batch, start
from torch.nn.functional import normalize

from megatron_dobb import DobbConfig
from testbed import gpt, processes

ONE = Layout(micro_batch=SEQUENCES)
LAYOUTS = [
    ONE,
    Layout(2, micro_batch=4),
    Layout(3, micro_batch=8),
    Layout(2, micro_batch=3, bucket_size=30_000),
    Layout(2, tensor=2, micro_batch=12),
    Layout(4, tensor=2, sequence_parallel=True, micro_batch=6),
]
VARIANTS = [
    ("l2", "input", "activation"),
    ("sign", "input", "gram"),
    ("l2", "input", "gram"),
    ("l2", "input", "none"),
    ("sign", "output", "output-gradient"),
    ("l2", "output", "output-gradient"),
    ("sign", "output", "gram"),
    ("l2", "output", "none"),
]
LR, DECAY, MU, BETA, TAU, CAPTURED, STEPS = 2e-3, 0.1, 0.95, 0.95, 0.2, 10, 5


PAIRS = [
    (layout, variant)
    for layout in LAYOUTS
    for variant in VARIANTS
    # Whole row blocks would pad small buckets by more than is allowed.
    if not (layout.bucket_size and variant[1] == "output")
]


def config_of(norm, side, source):
    blocks = {} if source == "none" else {"blocks": 32 if side == "output" else 8}
    captured = {"capture_sequences": CAPTURED} if source in ("activation", "output-gradient") else {}
    return DobbConfig(norm=norm, side=side, source=source, refresh_interval=3, basis_dtype="fp32", **blocks, **captured)


def named(value):
    return "-".join(value) if isinstance(value, tuple) else str(value)


def variants_of(layout):
    return [variant for other, variant in PAIRS if other == layout]


def train(layout):
    """For every variant: the state before and after the first step, and the losses of all steps."""
    start(layout)
    found = {}
    for variant in variants_of(layout):
        run = Run(layout, config_of(*variant), lr=LR)
        before = run.snapshot()
        losses = [run.step(0)]
        after = run.snapshot()
        losses += [run.step(step) for step in range(1, STEPS)]
        found[variant] = before, after, losses
    return found


@functools.cache
def trained(layout):
    """The states in global form, and the losses, of all variants."""
    ranks = processes.run(layout.world, train, layout)
    return {
        variant: (
            merge([rank[variant][0] for rank in ranks]),
            merge([rank[variant][1] for rank in ranks]),
            ranks[0][variant][2],
        )
        for variant in variants_of(layout)
    }


def activations_and_gradients(layout):
    """What enters every managed layer, and the gradient of what leaves it, of the captured sequences in one process."""
    start(layout)
    run = Run(layout, config_of("sign", "output", "output-gradient"))
    inputs, gradients, handles = {}, {}, []
    for name, weight in run.managed.items():

        def record(_module, args, output, name=name):
            inputs[name] = args[0].detach()[:, :CAPTURED]
            output[0].register_hook(lambda g: gradients.__setitem__(name, g.detach()[:, :CAPTURED]))

        handles.append(weight.module.register_forward_hook(record))
    gpt.train_step(run.chunks, run.optimizer, global_batch(0), layout.micro_batch)
    return {name: (inputs[name].flatten(0, 1).double(), gradients[name].flatten(0, 1).double()) for name in inputs}


@functools.cache
def seen_by_one_process():
    return processes.run(1, activations_and_gradients, ONE)[0]


def stated_moments(name, source, gradient, blocks):
    """The moments of one refresh from zero, `[B, b, b]`; `gradient` is that of the side whose blocks are columns."""
    inputs, gradients = seen_by_one_process()[name]
    rows = {"activation": inputs, "output-gradient": gradients, "gram": gradient}[source]
    count = gradient.numel() if source == "gram" else len(rows)
    return torch.stack([(1 - BETA) * x.t() @ x / count for x in rows.chunk(blocks, dim=1)])


def stated_weight(weight, momentum, bases, norm):
    """One step of a weight whose blocks are columns."""
    rows, columns = weight.shape
    raw = []
    for part, basis in zip(momentum.chunk(len(bases), dim=1), bases, strict=True):
        coefficients = part @ basis
        kept = coefficients.sign() / rows**0.5 if norm == "sign" else normalize(coefficients, dim=0)
        raw.append(kept @ basis.t())
    return (1 - LR * DECAY) * weight - LR * TAU * max(rows, columns) ** 0.5 * torch.cat(raw, dim=1)


@pytest.mark.parametrize(("layout", "variant"), PAIRS, ids=named)
def test_a_step_is_the_stated_one(layout, variant):
    norm, side, source = variant
    before, after, _ = trained(layout)[variant]
    assert before.momenta.keys() == after.momenta.keys() == seen_by_one_process().keys()
    for name, momentum in after.momenta.items():

        def turn(matrix):
            return matrix.double().t() if side == "output" else matrix.double()  # noqa: B023

        gradient = turn(momentum) / (1 - MU)
        weight, moved = turn(before.parameters[name]), turn(after.parameters[name])
        if source == "none":
            bases = torch.eye(weight.shape[1], dtype=torch.float64)[None]
        else:
            bases = after.bases[name].double()
            expected = stated_moments(name, source, gradient, len(bases))
            found = after.moments[name].double()
            assert (found - expected).abs().max() <= 1e-5 * expected.abs().max(), f"A of {name}"
            # Q R = A: the first refresh starts from the identity.
            triangle = bases.mT @ found
            assert triangle.tril(-1).abs().max() <= 1e-5 * found.abs().max(), f"Q of {name}"
        expected = stated_weight(weight, turn(momentum), bases, norm)
        assert (moved - expected).abs().max() <= 1e-5 * weight.square().mean().sqrt(), name


@pytest.mark.parametrize(("layout", "variant"), [pair for pair in PAIRS if pair[0] != ONE], ids=named)
def test_every_layout_trains_as_one_process_does(layout, variant):
    _, expected, expected_losses = trained(ONE)[variant]
    _, found, losses = trained(layout)[variant]
    for name, momentum in expected.momenta.items():
        torch.testing.assert_close(found.momenta[name], momentum, rtol=0, atol=1e-5 * float(momentum.abs().max()))
    # Two steps before any sign can differ, then the few that rounding flips.
    torch.testing.assert_close(losses[:2], expected_losses[:2], rtol=1e-5, atol=0)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-3, atol=0)
    assert losses[-1] < losses[0]
