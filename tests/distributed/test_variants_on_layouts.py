"""Every variant of the method, through Megatron's buffers, on one rank and on several.

After a first step with a refresh, what the ranks hold is joined. The moments must be those of an independent statement
in float64, and the weights must have moved as the statement says for the momentum and the bases found. Nothing of the
statement knows of shards; the output side is the input side of the transposed matrix.
"""

import functools

import checkpoint_runs
import pytest
import torch
from global_form import is_row_parallel, merge
from layout_runs import SEQUENCES, Layout, Run, global_batch, start
from torch.nn.functional import normalize

from megatron_dobb import DobbConfig
from testbed import gpt, processes, tiers, traffic

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


OF_EXPERTS = [("l2", "input", "gram"), ("l2", "output", "none")]
"""What does not depend on which sequences an expert's tokens are of."""

LAYOUTS_WITH_EXPERTS = [
    Layout(micro_batch=SEQUENCES, experts=True),
    Layout(2, micro_batch=6, experts=True, expert=2),
    Layout(4, tensor=2, sequence_parallel=True, micro_batch=6, experts=True, expert=2),
]
PAIRS = [
    *(
        (layout, variant)
        for layout in LAYOUTS
        for variant in VARIANTS
        # Whole row blocks would pad small buckets by more than is allowed.
        if not (layout.bucket_size and variant[1] == "output")
    ),
    *((layout, variant) for layout in LAYOUTS_WITH_EXPERTS for variant in OF_EXPERTS),
    *((Layout(4, micro_batch=3, instances=2), variant) for variant in OF_EXPERTS),
]
"""Every layout with the variants that are run on it."""


def factors(pair):
    """Every two of these come together in the quick tier."""
    layout, variant = pair
    return layout.data, layout.tensor, layout.bucket_size, layout.experts, *variant


QUICK = tiers.pairwise(PAIRS, factors)


def config_of(norm, side, source):
    blocks = {} if source == "none" else {"blocks": 32 if side == "output" else 8}
    captured = {"capture_sequences": CAPTURED} if source in ("activation", "output-gradient") else {}
    return DobbConfig(norm=norm, side=side, source=source, refresh_interval=3, basis_dtype="fp32", **blocks, **captured)


def named(value):
    return "-".join(value) if isinstance(value, tuple) else str(value)


@pytest.fixture(scope="module")
def trained(request):
    """The states in global form, and the losses, of all variants that tests compare on a layout."""
    pairs = tiers.selected(request, ("layout", "variant"))
    pairs += [(reference_of(layout), variant) for layout, variant in pairs]

    @functools.cache
    def train_all(layout):
        variants = list(dict.fromkeys(variant for other, variant in pairs if other == layout))
        ranks = processes.run(layout.world, train, layout, variants)
        return {
            variant: (
                merge([rank[variant][0] for rank in ranks]),
                merge([rank[variant][1] for rank in ranks]),
                ranks[0][variant][2],
            )
            for variant in variants
        }

    return train_all


def reference_of(layout):
    return LAYOUTS_WITH_EXPERTS[0] if layout.experts else ONE


def train(layout, variants):
    """For every variant: the state before and after the first step, and the losses of all steps."""
    start(layout)
    found = {}
    for variant in variants:
        run = Run(layout, config_of(*variant), lr=LR)
        before = run.snapshot()
        losses = [run.step(0)]
        after = run.snapshot()
        losses += [run.step(step) for step in range(1, STEPS)]
        found[variant] = before, after, losses
    return found


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
    rows = gradient if source == "gram" else seen_by_one_process()[name][source == "output-gradient"]
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


@pytest.mark.parametrize(("layout", "variant"), tiers.quick(PAIRS, QUICK), ids=named)
def test_a_step_is_the_stated_one(layout, variant, trained):
    norm, side, source = variant
    before, after, _ = trained(layout)[variant]
    assert before.momenta.keys() == after.momenta.keys()
    assert layout.experts or after.momenta.keys() == seen_by_one_process().keys()
    for name, momentum in after.momenta.items():

        def turn(matrix):
            return matrix.double().t() if side == "output" else matrix.double()

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


@pytest.mark.parametrize(
    ("layout", "variant"),
    tiers.quick(
        [pair for pair in PAIRS if pair[0].world > 1],
        [pair for pair in QUICK if pair[0].world > 1],
    ),
    ids=named,
)
def test_every_layout_trains_as_one_process_does(layout, variant, trained):
    _, expected, expected_losses = trained(reference_of(layout))[variant]
    _, found, losses = trained(layout)[variant]
    for name, momentum in expected.momenta.items():
        torch.testing.assert_close(found.momenta[name], momentum, rtol=0, atol=1e-5 * float(momentum.abs().max()))
    # Two steps before any sign can differ, then the few that rounding flips.
    torch.testing.assert_close(losses[:2], expected_losses[:2], rtol=1e-5, atol=0)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-3, atol=0)
    assert losses[-1] < losses[0]


def calls_of_steps(layout):
    """The collectives of a step without a refresh: of AdamW, and of every variant."""
    start(layout)
    found = {}
    for variant in [None, *VARIANTS]:
        run = Run(layout, config_of(*variant) if variant else None, lr=LR)
        run.step(0)
        with traffic.record() as calls:
            gpt.train_step(run.chunks, run.optimizer, global_batch(1), layout.micro_batch)
        found[variant] = [(call.name, call.ranks, call.dtype, call.sent) for call in calls if call.coalesced is None]
        found[variant, "buckets"] = [(call.name, call.ranks) for call in calls if call.coalesced is not None]
        shapes = {name: tuple(weight.shape) for name, weight in run.weights.items()}
    return found, shapes


@functools.cache
def recorded():
    return processes.run(4, calls_of_steps, Layout(4, tensor=2, micro_batch=6))


@pytest.mark.parametrize("variant", VARIANTS, ids="-".join)
def test_only_l2_communicates_and_one_scalar_for_each_column_of_a_cut_weight(variant):
    for rank, (calls, shapes) in enumerate(recorded()):
        assert calls[variant, "buckets"] == calls[None, "buckets"]
        sums = {}
        for name in seen_by_one_process() if variant[0] == "l2" else ():
            row_parallel = is_row_parallel(name)
            if variant[1] == "input":  # ZeRO cuts every weight's rows; tensor parallelism those of some
                ranks, scalars = ((rank % 2, rank % 2 + 2) if row_parallel else (0, 1, 2, 3)), shapes[name][1]
            elif row_parallel:
                ranks, scalars = (rank // 2 * 2, rank // 2 * 2 + 1), shapes[name][0]
            else:
                continue
            sums[ranks] = sums.get(ranks, 0) + scalars
        expected = [("all_reduce", ranks, torch.float32, 4 * scalars) for ranks, scalars in sums.items()]
        extra = list(calls[variant])
        for call in calls[None]:
            extra.remove(call)
        assert sorted(extra, key=str) == sorted(expected, key=str)


SAVED_AFTER, END = 4, 7


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Of one variant: what two ranks had when they saved and in the end, and where the checkpoints are."""
    path = tmp_path_factory.mktemp("variants")
    ranks = processes.run(
        2, checkpoint_runs.train_and_save, LAYOUTS[1], config_of("l2", "output", "gram"), {}, SAVED_AFTER, END, path
    )
    return merge([r["saved"] for r in ranks]), merge([r["end"] for r in ranks]), path


def loaded(layout, variant, paths):
    ranks = processes.run(
        layout.world, checkpoint_runs.load_and_go_on, layout, config_of(*variant), {}, SAVED_AFTER, END, paths
    )
    return [
        (merge([rank[place]["loaded"] for rank in ranks]), merge([rank[place]["end"] for rank in ranks]))
        for place in range(len(paths))
    ]


def test_a_variant_resumes_bit_for_bit_on_its_layout_and_with_equal_state_on_others(saved):
    before, end, path = saved
    for found, found_end in loaded(LAYOUTS[1], ("l2", "output", "gram"), [path / f for f in checkpoint_runs.FORMATS]):
        assert_equal(found, before)
        assert_equal(found_end, end)
    for layout in (ONE, LAYOUTS[4]):
        ((found, _),) = loaded(layout, ("l2", "output", "gram"), [path / "fully_reshardable"])
        assert_equal(found, before)


def assert_equal(found, expected):
    for kind in ("parameters", "momenta", "moments", "bases"):
        values = getattr(found, kind)
        assert values.keys() == getattr(expected, kind).keys()
        for name, value in getattr(expected, kind).items():
            assert torch.equal(values[name], value), (kind, name)


def test_another_variant_continues_with_the_momenta_and_new_moments(saved):
    before, _, path = saved
    ((found, end),) = loaded(LAYOUTS[1], ("sign", "input", "activation"), [path / "fully_reshardable"])
    for name, momentum in before.momenta.items():
        assert torch.equal(found.momenta[name], momentum)
        assert not found.moments[name].any()
        assert end.moments[name].any()


def test_output_gradients_of_experts_are_refused_by_name():
    layout = LAYOUTS_WITH_EXPERTS[0]
    with pytest.raises(processes.RankError, match=r"mlp\.experts.*--dobb-source gram"):
        processes.run(1, build, layout, config_of("sign", "output", "output-gradient"))


def build(layout, config):
    start(layout)
    Run(layout, config)
