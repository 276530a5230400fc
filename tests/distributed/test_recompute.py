"""Activation recompute, as Megatron offers it, changes neither what is captured nor the training, to the last bit."""

import functools

import pytest
import torch
from model_kinds import DENSE, EXPERTS, LATENT_ATTENTION, KindRun, Place

from megatron_dobb import DobbConfig
from testbed import processes, tiers

CONFIG = DobbConfig(blocks=4, capture="all", refresh_interval=1)
KINDS = {"dense": DENSE, "experts": EXPERTS, "latent": LATENT_ATTENTION}
STEPS, MICRO_BATCH = 2, 2
FIRST, SECOND = "decoder.layers.0", "decoder.layers.1"


def full(method, layers, **more):
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers, **more}


def selective(*modules):
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


EVERY_LAYER = [f"{FIRST}.mlp.linear_fc1", f"{SECOND}.self_attention.linear_qkv"]
# Of each kind, the ways to recompute, and the modules that then run twice and once.
CASES = {
    ("dense", "uniform-1"): (full("uniform", 1), EVERY_LAYER, []),
    ("dense", "uniform-2"): (full("uniform", 2), EVERY_LAYER, []),
    ("dense", "block-1"): (full("block", 1), [f"{FIRST}.mlp.linear_fc2"], [f"{SECOND}.mlp.linear_fc2"]),
    ("dense", "core_attn"): (
        selective("core_attn"),
        [f"{FIRST}.self_attention.core_attention"],
        [f"{FIRST}.self_attention.linear_qkv"],
    ),
    ("dense", "layernorm"): (selective("layernorm"), [f"{FIRST}.pre_mlp_layernorm"], [f"{FIRST}.mlp.linear_fc1"]),
    ("dense", "mlp"): (selective("mlp"), [f"{FIRST}.mlp.linear_fc1"], [f"{FIRST}.self_attention.linear_qkv"]),
    ("dense", "all-selective"): (
        selective("core_attn", "layernorm", "mlp"),
        [f"{SECOND}.mlp.linear_fc2", f"{SECOND}.input_layernorm"],
        [f"{SECOND}.self_attention.linear_proj"],
    ),
    ("experts", "uniform-1"): (full("uniform", 1), [f"{FIRST}.mlp.router", f"{FIRST}.self_attention.linear_proj"], []),
    ("experts", "moe"): (
        selective("moe"),
        [f"{FIRST}.mlp.experts.local_experts.0.linear_fc1", f"{FIRST}.mlp.shared_experts.linear_fc1"],
        [f"{FIRST}.self_attention.linear_proj"],
    ),
    ("experts", "shared_experts"): (
        selective("shared_experts"),
        [f"{FIRST}.mlp.shared_experts.linear_fc2"],
        [f"{FIRST}.mlp.experts.local_experts.0.linear_fc2"],
    ),
    ("experts", "layernorm"): (selective("layernorm"), [f"{FIRST}.pre_mlp_layernorm"], [f"{FIRST}.mlp.router"]),
    ("latent", "block-1"): (full("block", 1), [f"{FIRST}.mlp.linear_fc2"], [f"{SECOND}.mlp.linear_fc2"]),
    ("latent", "mla_up_proj"): (
        selective("mla_up_proj"),
        [f"{FIRST}.self_attention.linear_q_up_proj", f"{SECOND}.self_attention.linear_kv_up_proj"],
        [f"{FIRST}.self_attention.linear_q_down_proj"],
    ),
    ("latent", "all-selective"): (
        selective("mla_up_proj", "core_attn", "layernorm", "mlp"),
        [f"{FIRST}.self_attention.linear_kv_up_proj", f"{FIRST}.mlp.linear_fc1"],
        [f"{FIRST}.self_attention.linear_proj"],
    ),
}
# Where outputs are discarded, the backward pass adds the gradients of a residual in another order.
DISCARDING = {way for of, way in CASES if way in ("layernorm", "mla_up_proj", "all-selective")}
SPREAD = full("uniform", 2, distribute_saved_activations=True)
PLACES = {
    "dense": [Place(), Place(2), Place(2, tensor=2)],
    "experts": [Place(), Place(2, expert=2)],
    "latent": [Place(), Place(2, tensor=2)],
}


def train(kind, place, recompute):
    run = KindRun(KINDS[kind], place, CONFIG, MICRO_BATCH, **recompute)
    calls = {}
    for name, module in run.model.module.named_modules():
        module.register_forward_hook(lambda *_, name=name: calls.update({name: calls.get(name, 0) + 1}))
    sums = run.record_sums()
    losses = [run.step(step) for step in range(STEPS)]
    return {"losses": losses, "sums": sums, "calls": calls, "weights": [p.detach() for p in run.model.parameters()]}


def train_all(kind, place):
    """Every way to recompute, in one set of processes, and none."""
    place.start()
    ways = {way: settings for (of, way), (settings, _, _) in CASES.items() if of == kind}
    return {way: train(kind, place, settings) for way, settings in {"none": {}, **ways}.items()}


@functools.cache
def trained(kind, place):
    return processes.run(place.world, train_all, kind, place)


PLACED = tiers.quick(
    [(kind, way, place) for kind, way in CASES for place in PLACES[kind]],
    [(kind, way, PLACES[kind][-1]) for kind, way in CASES],
)
placed = pytest.mark.parametrize(("kind", "way", "place"), PLACED, ids=str)


def assert_same(found, expected, exact, what):
    if exact or found is None or expected is None:
        assert found is expected is None or torch.equal(found, expected), what
    else:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, msg=what)


@placed
def test_recompute_changes_no_bit_of_the_captured_sums_and_counts_each_token_once(kind, way, place):
    for rank in trained(kind, place):
        found, expected = rank[way]["sums"], rank["none"]["sums"]
        assert len(found) == len(expected) == 2
        for refresh, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert one.keys() == other.keys()
            assert any(total is not None for _, total in other.values())
            for name, (tokens, total) in other.items():
                if refresh == 0 or way not in DISCARDING:
                    assert one[name][0] == tokens, name
                assert_same(one[name][1], total, refresh == 0 or way not in DISCARDING, name)


@placed
def test_recompute_changes_no_bit_of_the_losses_and_the_weights(kind, way, place):
    """But for the order in which gradients are added, where outputs are discarded."""
    for rank in trained(kind, place):
        found, expected = rank[way], rank["none"]
        assert found["losses"][0] == expected["losses"][0]
        assert_same(torch.tensor(found["losses"]), torch.tensor(expected["losses"]), way not in DISCARDING, way)
        for one, other in zip(found["weights"], expected["weights"], strict=True):
            if way not in DISCARDING:
                assert torch.equal(one, other)


@placed
def test_the_modules_named_by_the_setting_really_run_a_second_time_and_the_others_do_not(kind, way, place):
    """Or the tests above would show nothing."""
    _, twice, once = CASES[kind, way]
    for rank in trained(kind, place):
        plain, calls = rank["none"]["calls"], rank[way]["calls"]
        assert {name: calls[name] for name in twice} == {name: 2 * plain[name] for name in twice}
        assert {name: calls[name] for name in once} == {name: plain[name] for name in once}


@pytest.mark.parametrize("place", [Place(2, tensor=2)], ids=str)
def test_saved_activations_that_are_spread_over_ranks_change_nothing_either(place):
    """Megatron offers it for tensor parallelism without sequence parallelism."""

    def both():
        place.start()
        plain = {"sequence_parallel": False}
        return [train("dense", place, settings | plain) for settings in ({}, SPREAD)]

    for none, spread in processes.run(place.world, both):
        assert spread["calls"][f"{FIRST}.mlp.linear_fc1"] == 2 * none["calls"][f"{FIRST}.mlp.linear_fc1"]
        assert spread["losses"] == none["losses"]
        for one, other in zip(spread["sums"], none["sums"], strict=True):
            for name, (tokens, total) in other.items():
                assert one[name][0] == tokens
                assert torch.equal(one[name][1], total), name


@pytest.mark.parametrize("kind", KINDS)
def test_without_recompute_every_sequence_is_counted_once(kind):
    """The number to which the tests above compare."""
    place = PLACES[kind][0]
    (rank,) = trained(kind, place)
    tokens = {name: tokens for name, (tokens, _) in rank["none"]["sums"][0].items() if ".local_experts." not in name}
    assert set(tokens.values()) == {8 * 16}
