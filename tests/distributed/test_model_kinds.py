"""Every kind of model trains with Dobb through Megatron's schedule, on two ranks as on one.

Dense (fused QKV, SwiGLU, RMSNorm, rotary embedding, grouped-query attention), experts with a shared one, latent
attention with a stand-in for its core, and a hybrid with Mamba layers with a stand-in for their scan.
"""

import functools
import gc
import time

import pytest
import torch
from model_kinds import DENSE, EXPERTS, HYBRID, LATENT_ATTENTION, KindRun, Place

from megatron_dobb import DobbConfig
from megatron_dobb.megatron.model.chunk_state import selection_of
from testbed import processes, tiers

STEPS, BLOCKS, BETA, NOISE, PERTURBED = 20, 4, 0.95, 1e-7, 3
CONFIG = DobbConfig(blocks=BLOCKS, capture="all", refresh_interval=9, moment_beta=BETA)
CASES = {
    "dense": (DENSE, [Place(2, tensor=2), Place(2)]),
    "experts": (EXPERTS, [Place(2, expert=2)]),
    "latent": (LATENT_ATTENTION, [Place(2, tensor=2)]),
    "hybrid": (HYBRID, [Place(2)]),
}
every_kind = pytest.mark.parametrize("kind", CASES)
every_place = pytest.mark.parametrize(
    ("kind", "place"),
    [pytest.param(kind, place, id=f"{kind}-{place}") for kind, (_, places) in CASES.items() for place in places],
)


def train(run, steps=STEPS):
    losses, moments = [], None
    for step in range(steps):
        losses.append(run.step(step))
        if step == 0:
            moments = run.moments()
    return {"losses": losses, "moments": moments, "names": run.names, "weights": weights(run), "norms": run.norms}


def weights(run):
    return {name: weight.detach().clone() for name, weight in run.weights.items()}


def train_reference(kind):
    """One rank, and the same from slightly other weights; float64 moments of what the layers were given in step 1."""
    Place().start()
    run = KindRun(CASES[kind][0], Place(), CONFIG)
    initial, inputs, hooks = weights(run), {}, []
    for name in CASES[kind][0].names():
        module = run.model.module.get_submodule(name.removesuffix(".weight"))

        def record(_module, args, _output, name=name):
            inputs.setdefault(name, []).append(args[0].detach().double().flatten(0, -2))

        hooks.append(module.register_forward_hook(record))
    first = run.step
    run.step = lambda number: (first(number), [hook.remove() for hook in hooks])[0]
    result = train(run)
    exact = {}
    for name, seen in inputs.items():
        x = torch.cat(seen)
        blocks = x.unflatten(1, (BLOCKS, -1))
        exact[name] = (1 - BETA) * torch.einsum("tjc,tjd->jcd", blocks, blocks) / len(x)
    spread = []
    for seed in range(PERTURBED):
        generator = torch.Generator().manual_seed(seed)
        other = KindRun(CASES[kind][0], Place(), CONFIG)
        other.load({n: w * (1 + NOISE * torch.randn(w.shape, generator=generator)) for n, w in initial.items()})
        spread.append(train(other)["losses"])
    return result | {"initial": initial, "exact": exact, "spread": spread}


def train_there(kind, place, initial):
    place.start()
    run = KindRun(CASES[kind][0], place, CONFIG)
    run.load(initial)
    return train(run)


@functools.cache
def reference(kind):
    return processes.run(1, train_reference, kind)[0]


@functools.cache
def trained(kind, place):
    return processes.run(place.world, train_there, kind, place, reference(kind)["initial"])


@every_place
def test_all_expected_matrices_are_on_dobb_and_no_other(kind, place):
    expected = CASES[kind][0].names()
    assert reference(kind)["names"] == expected
    ranks = trained(kind, place)
    assert sorted({name for rank in ranks for name in rank["names"]}) == expected
    assert place.expert > 1 or all(rank["names"] == expected for rank in ranks)


@every_place
def test_the_first_refresh_is_the_float64_moment_of_what_the_layers_were_given(kind, place):
    exact = reference(kind)["exact"]
    for ranks in ([reference(kind)], trained(kind, place)):
        found = {}
        for rank in ranks:
            for key, moment in rank["moments"].items():
                assert torch.equal(found.setdefault(key, moment), moment), key
        assert found.keys() == {(name, block) for name in exact for block in range(BLOCKS)}
        for (name, block), moment in found.items():
            expected = exact[name][block]
            assert (moment.double() - expected).abs().max() <= 1e-5 * expected.abs().max(), (name, block)


@every_place
def test_losses_fall(kind, place):
    for rank in (reference(kind), *trained(kind, place)):
        assert rank["losses"][-1] < rank["losses"][0] - 1


@every_place
def test_replicas_hold_the_same_weights_after_training(kind, place):
    first, second = (rank["weights"] for rank in trained(kind, place))
    start = reference(kind)["initial"]
    shared = [name for name in first.keys() & second.keys() if first[name].shape == start[name].shape]
    assert len(shared) == len(first) or place.tensor > 1 or place.expert > 1
    for name in shared:
        assert torch.equal(first[name], second[name]), name
        assert not torch.equal(first[name], start[name]), name


@every_place
def test_the_loss_curve_of_two_ranks_lies_near_that_of_one(kind, place):
    """As near as single-rank runs that start from weights that differ by rounding."""
    expected, spread = torch.tensor(reference(kind)["losses"]), torch.tensor(reference(kind)["spread"])
    allowed = 3 * (spread - expected).abs().amax(0).cummax(0).values.clamp(min=1e-6)
    found = torch.tensor(trained(kind, place)[0]["losses"])
    print(f"{kind} {place}: off by {float((found - expected).abs().max()):.1e} of {float(allowed.max()):.1e} allowed")
    assert ((found - expected).abs() <= allowed).all()


@every_place
def test_the_gradients_norm_and_zeros_are_those_of_one_rank(kind, place):
    """Experts are counted once, though their gradients are reduced over other groups."""
    norm, zeros = reference(kind)["norms"][0]
    assert norm > 0
    for rank in trained(kind, place):
        assert rank["norms"][0][0] == pytest.approx(norm, rel=1e-5)
        assert rank["norms"][0][1] == pytest.approx(zeros, abs=5)  # a gradient may round to zero on one side alone


@every_kind
def test_a_global_batch_of_one_times_eight_and_of_four_times_two_makes_the_same_update(kind):
    def run(micro_batch):
        Place().start()
        made = KindRun(CASES[kind][0], Place(), CONFIG, micro_batch, **no_balancing(kind))
        start = weights(made)
        made.step(0)
        return {name: (made.weights[name].detach() - start[name]) for name in made.names}

    whole, parts = (processes.run(1, run, micro_batch)[0] for micro_batch in (8, 2))
    for name, update in whole.items():
        assert update.any(), name
        flips = (update - parts[name]).square().sum() / (4 * update.square().mean())
        assert flips < 4.5, name  # coefficients within rounding of zero
        assert (update - parts[name]).abs().median() <= 1e-6, name


def no_balancing(kind):
    """The loss that balances experts is a function of each micro-batch, not of the batch."""
    return {"moe_aux_loss_coeff": 0.0} if kind == "experts" else {}


# Weights that are tied or frozen, and memory.


def run_on_two(**settings):
    def run():
        Place(2).start()
        made = KindRun(DENSE, Place(2), CONFIG, **settings)
        start = weights(made)
        captured = made.record_sums()
        return train(made, 10) | {"start": start, "captured": captured, "adamw": dict(selection_of(made.model).adamw)}

    return processes.run(2, run)


def test_a_tied_embedding_stays_on_adamw_and_trains_alike_on_all_ranks():
    first, second = run_on_two(model={"share_embeddings_and_output_weights": True})
    assert first["names"] == DENSE.names()
    assert first["adamw"]["embedding or output layer", "parameters"] == 1
    assert not any("output_layer" in name for name in first["weights"])
    assert first["losses"][-1] < first["losses"][0] - 0.5
    for name, weight in first["weights"].items():
        assert torch.equal(weight, second["weights"][name]), name
        assert not torch.equal(weight, first["start"][name]), name


def test_frozen_weights_are_neither_managed_nor_captured_nor_changed():
    frozen = {"decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.1.self_attention.linear_qkv.weight"}

    def freeze(model):
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)

    for rank in run_on_two(prepare=freeze):
        assert set(rank["names"]) == set(DENSE.names()) - frozen == rank["captured"][0].keys()
        for name, weight in rank["weights"].items():
            assert torch.equal(weight, rank["start"][name]) == (name in frozen), name


@tiers.FULL
def test_memory_does_not_grow_with_steps_and_captured_sums_are_gone_after_each():
    def tensors():
        gc.collect()
        found = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
        return len(found), sum(t.numel() for t in found)

    def run():
        Place().start()
        made = KindRun(DENSE, Place(), DobbConfig(blocks=BLOCKS, refresh_interval=3), micro_batch=8)
        made.step(0)  # of which the first, fourth and so on refresh
        counts = []
        first = {}
        for step in range(1, 200):
            made.step(step % 10)
            for capture in made.dobb[0].captures:
                assert all(entry.total is None and not entry.tokens for entry in capture.sums.values())
            if step % 33 in (0, 1, 2) and step > 3:
                found = tensors()
                for _ in range(50):  # gloo's thread lets go of its tensor some time after the collective
                    if found == first.setdefault(step % 3, found):
                        break
                    time.sleep(0.02)
                    found = tensors()
                counts.append((step % 3, *found))
        return counts

    (counts,) = processes.run(1, run)
    assert len(counts) >= 15
    for phase in range(3):
        assert len({count[1:] for count in counts if count[0] == phase}) == 1
