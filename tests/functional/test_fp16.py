"""fp16 with loss scaling, and steps skipped for their gradient norm: only the update of a skipped step is dropped.

Compared with AdamW under the same flags, and with a run of Dobb in which nothing overflows.
"""

import functools
import math

import pytest
import torch
from pretrain_runs import ADAMW, DOBB, train

from testbed import tiers

INTERVAL = 3
STEPS = 8
TRAINING = (
    f"--global-batch-size 8 --train-iters {STEPS} --eval-iters 0 --eval-interval 1000 --lr-decay-style constant "
    "--fp16 --initial-loss-scale 4096 --loss-scale-window 2 --hysteresis 1"
).split()
REFRESH_STEP, OTHER_STEP = 2 * INTERVAL, INTERVAL + 1  # counted from 0
LAST = "decoder.layers.1.mlp.linear_fc2"
BLOCK = 2


def before_every_step(job, act):
    """Call `act(number)` when the gradients of a step, counted from 0, are ready."""
    original, number = job.optimizer.step, iter(range(1000))

    def step():
        act(next(number))
        return original()

    job.optimizer.step = step


def note_states(job):
    """Note the state before every step, whose refresh begins amid it; `Finished.state` is that after the last."""
    original = job.optimizer.zero_grad

    def zero_grad(*args):
        job.notes.append({**job.state(), "weights": job.weights()})
        return original(*args)

    if hasattr(job.dobb, "captures"):
        job.optimizer.zero_grad = zero_grad


def overflow_of_one_gradient(job, at):
    """Make an entry of a gradient infinite in one micro-batch on rank 1, before anything is reduced."""
    calls = iter(range(1000))
    microbatches = 4

    def poison(gradient):
        if next(calls) // microbatches == at and torch.distributed.get_rank() == 1:
            gradient = gradient.clone()
            gradient[3, 5] = torch.inf
        return gradient

    job.inner_model.get_submodule(LAST).weight.register_hook(poison)


def overflow_of_one_activation(job, at):
    """Make an input of the last layer's fc2 infinite on rank 1, in the first micro-batch."""
    calls = iter(range(1000))
    microbatches = 4

    def poison(_module, inputs):
        number = next(calls)
        if number != at * microbatches or torch.distributed.get_rank() != 1:
            return None
        x = inputs[0].clone()
        x[3, 0, BLOCK * 64 + 5] = torch.inf
        return (x, *inputs[1:])

    job.inner_model.get_submodule(LAST).register_forward_pre_hook(poison)


def large_norm(job, at):
    """Have Megatron skip a step for the norm of its gradient (`OptimizerConfig.grad_norm_skip_threshold`)."""

    def set_threshold(number):
        job.dobb.config.grad_norm_skip_threshold = 1e-9 if number == at else math.inf

    before_every_step(job, set_threshold)


FAULTS = {f.__name__: f for f in (overflow_of_one_gradient, overflow_of_one_activation, large_norm)}


@functools.cache
def trained(fault, at, optimizer="dobb", flags=""):
    def prepare(job):
        note_states(job)
        if fault:
            FAULTS[fault](job, at)

    words = [*TRAINING, *flags.split(), *(DOBB if optimizer == "dobb" else ADAMW)]
    return train(words, prepare=prepare)


def states(rank):
    """The states before every step and after the last."""
    return [*rank.notes, {**rank.state, "weights": rank.weights}]


def same(before, after, kind):
    """Whether each tensor of a kind stayed as it was, bit for bit."""
    assert before[kind]
    return {key: torch.equal(value, after[kind][key]) for key, value in before[kind].items()}


every_fault = pytest.mark.parametrize("fault", FAULTS)
every_step = pytest.mark.parametrize(
    "at", tiers.quick([REFRESH_STEP, OTHER_STEP], [REFRESH_STEP]), ids=["refresh step", "other step"]
)


@every_fault
@every_step
def test_skipped_steps_and_loss_scales_are_those_of_adamw_on_every_rank(fault, at):
    dobb, adamw = trained(fault, at), trained(fault, at, "adam")
    for rank in dobb:
        assert [step.skipped for step in rank.steps] == [number == at for number in range(STEPS)]
        assert [step.skipped for step in rank.steps] == [step.skipped for step in adamw[0].steps]
        assert [step.loss_scale for step in rank.steps] == [step.loss_scale for step in adamw[0].steps]
        assert rank.attempted_steps == STEPS
    halved = dobb[0].steps[at].loss_scale / dobb[0].steps[at - 1].loss_scale
    assert (halved < 1) == (fault != "large_norm")


@every_fault
@every_step
def test_a_skipped_step_leaves_weights_and_momenta_alone_and_its_refresh_stands(fault, at):
    for rank, plain in zip(trained(fault, at), trained(None, None), strict=True):
        before, after, expected = states(rank)[at], states(rank)[at + 1], states(plain)[at + 1]
        for kind in ("weights", "masters", "momentum"):
            assert all(same(before, after, kind).values()), f"the update of a skipped step changed the {kind}"
        refreshed = at % INTERVAL == 0
        for kind in ("moments", "bases"):
            kept = {block for block, is_same in same(before, after, kind).items() if is_same}
            others = set(before[kind]) - {(f"{LAST}.weight", BLOCK)}
            if fault != "overflow_of_one_activation":
                assert kept == (set() if refreshed else set(before[kind]))
            elif refreshed:
                assert kept & others == set()
                assert (f"{LAST}.weight", BLOCK) in kept or (f"{LAST}.weight", BLOCK) not in before[kind]
            for block in others:
                assert after[kind][block].isfinite().all()
                assert torch.equal(after[kind][block], expected[kind][block]), "the refresh is not that of other steps"


@every_fault
def test_training_goes_on_after_a_skipped_step_and_ranks_stay_in_step(fault):
    ranks = trained(fault, REFRESH_STEP)
    for rank in ranks:
        after, following = states(rank)[REFRESH_STEP + 1 :][:2]
        for kind in ("masters", "momentum"):
            assert not any(same(after, following, kind).values())
        assert all(value.isfinite().all() for kind in states(rank)[-1].values() for value in kind.values())
        assert rank.steps[-1].loss < rank.steps[0].loss
    first, second = (rank.state["bases"] for rank in ranks)
    shared = first.keys() & second.keys()
    assert shared
    assert all(torch.equal(first[block], second[block]) for block in shared)
    assert all(torch.equal(w, ranks[1].weights[name]) for name, w in ranks[0].weights.items())


@pytest.mark.full
def test_the_block_of_an_infinite_activation_is_counted_on_both_ranks():
    assert [rank.kept_blocks for rank in trained("overflow_of_one_activation", REFRESH_STEP)] == [1, 1]
    assert [rank.kept_blocks for rank in trained("overflow_of_one_activation", OTHER_STEP)] == [0, 0]


@pytest.mark.full
@pytest.mark.parametrize("overlap", ["", "--overlap-grad-reduce --overlap-param-gather"], ids=["plain", "overlap"])
def test_the_search_for_a_first_loss_scale_skips_as_many_steps_as_with_adamw(overlap):
    flags = f"--initial-loss-scale 33554432 --hysteresis 2 --train-iters 24 {overlap}"
    dobb, adamw = trained(None, None, "dobb", flags), trained(None, None, "adam", flags)
    skipped = [step.skipped for step in dobb[0].steps]
    made = skipped.index(False)
    assert made > 2
    assert skipped[: made + 1] == [step.skipped for step in adamw[0].steps[: made + 1]]
    scales = [[step.loss_scale for step in rank.steps[: made + 1]] for rank in (dobb[0], dobb[1], adamw[0])]
    assert scales[0] == scales[1] == scales[2]
    assert dobb[0].losses[: made + 1] == adamw[0].losses[: made + 1]
    assert dobb[0].losses[-1] < dobb[0].losses[made]
