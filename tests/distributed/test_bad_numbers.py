"""Non-finite activations and gradients, and skipped steps, in Megatron's training loop on several ranks."""

import re

import pytest
import torch
from global_form import merge
from layout_runs import Layout, Run, global_batch, start

from megatron_dobb import DobbConfig
from megatron_dobb.errors import NonFiniteError
from testbed import gpt, processes

INTERVAL = 2
CONFIG = DobbConfig(blocks=4, refresh_interval=INTERVAL, capture_sequences=12)
LAYOUT = Layout(2, micro_batch=6)
LOSS_SCALE = 1024.0
"""With a loss scale Megatron looks for non-finite gradients and skips the step, as in fp16."""


def train(run, step):
    """Whether the step was made; Megatron skips one with non-finite gradients."""
    try:
        gpt.train_step(run.model, run.optimizer, global_batch(step), run.layout.micro_batch)
    except RuntimeError as error:
        if "skipped the step" not in str(error):
            raise
        return False
    return True


def train_and_snapshot(layout, steps, prepare=lambda run, step: None):
    """The state before the first and after every step, whether each was made, and this rank's counters."""
    start(layout)
    run = Run(layout, CONFIG, loss_scale=LOSS_SCALE)
    snapshots, made = [run.snapshot()], []
    for step in range(steps):
        undo = prepare(run, step)
        made.append(train(run, step))
        if undo:
            undo()
        snapshots.append(run.snapshot())
    return snapshots, made, run.dobb.refresh_counts.skipped, run.dobb.attempted_steps


def states_of(ranks):
    return [merge(snapshots) for snapshots in zip(*(rank[0] for rank in ranks), strict=True)]


def same(before, after):
    return {name: torch.equal(value, after[name]) for name, value in before.items()}


# A non-finite activation.


def put_nan_into_one_activation(name, column, at_step, rank):
    def prepare(run, step):
        if step != at_step or torch.distributed.get_rank() != rank:
            return None

        def poison(_module, args):
            x = args[0].clone()
            x[3, 1, column] = torch.nan
            return (x, *args[1:])

        return run.model.module.get_submodule(name).register_forward_pre_hook(poison).remove

    return prepare


@pytest.mark.parametrize(
    ("layout", "rank", "column", "block", "counted"),
    [
        pytest.param(LAYOUT, 1, 2 * 64 + 5, 2, [1, 1], id="dp2"),
        pytest.param(Layout(4, tensor=2, micro_batch=6), 3, 5, 2, [0, 1, 0, 1], id="second tensor-parallel rank"),
    ],
)
def test_nan_activation_keeps_its_basis_is_counted_and_training_goes_on(layout, rank, column, block, counted, capfd):
    last = "decoder.layers.1.mlp.linear_fc2"
    prepare = put_nan_into_one_activation(last, column, INTERVAL, rank)
    ranks = processes.run(layout.world, train_and_snapshot, layout, 5, prepare)
    assert [made for _, made, _, _ in ranks] == [[True, True, False, True, True]] * layout.world
    assert [skipped for _, _, skipped, _ in ranks] == counted
    shown = re.findall(rf"refresh of step {INTERVAL + 1}, rank \d: 1 blocks kept their basis", capfd.readouterr().out)
    assert len(shown) == 1

    before, after, end = (states_of(ranks)[step] for step in (INTERVAL, INTERVAL + 1, 5))
    assert all(same(before.parameters, after.parameters).values()), "the step was skipped"
    assert all(same(before.momenta, after.momenta).values())
    kept = {
        (name, number)
        for name, blocks in before.moments.items()
        for number in range(len(blocks))
        if torch.equal(blocks[number], after.moments[name][number])
    }
    assert kept == {(f"{last}.weight", block)}
    assert torch.equal(before.bases[f"{last}.weight"][block], after.bases[f"{last}.weight"][block])
    assert not torch.equal(after.moments[f"{last}.weight"][block], end.moments[f"{last}.weight"][block])
    for values in (end.parameters, end.momenta, end.moments, end.bases):
        assert all(value.isfinite().all() for value in values.values())
    assert not any(same(after.momenta, end.momenta).values()), "training did not go on"


# A non-finite gradient that Megatron does not look for.


def poison_one_gradient(run, value):
    """Set one entry of fc1's reduced gradient right before the optimizer sees it, on the rank that holds it."""
    weight = run.weights["decoder.layers.0.mlp.linear_fc1.weight"]
    step = run.optimizer.step

    def poisoned_step():
        weight.main_grad[40, 9] = value
        return step()

    run.optimizer.step = poisoned_step


@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("layout", [Layout(micro_batch=24), LAYOUT], ids=str)
def test_non_finite_gradient_entry_raises_and_leaves_the_momentum_alone(layout, value):
    def train_until_it_raises():
        start(layout)
        run = Run(layout, CONFIG)
        assert not run.model.ddp_config.check_for_nan_in_grad
        for step in range(3):
            assert train(run, step)
        before = [(s.momentum.clone(), s.weight.clone()) for group in run.dobb.segments for s in group]
        poison_one_gradient(run, value)
        try:
            train(run, 3)
        finally:
            after = [(s.momentum, s.weight) for group in run.dobb.segments for s in group]
            for (momentum, weight), (new_momentum, new_weight) in zip(before, after, strict=True):
                assert torch.equal(momentum, new_momentum)
                assert torch.equal(weight, new_weight)

    message = r"gradient of decoder.layers.0.mlp.linear_fc1.weight holds 1 non-finite of \d+ entries; no weight"
    with pytest.raises(processes.RankError, match=message) as raised:
        processes.run(layout.world, train_until_it_raises)
    assert isinstance(raised.value.__cause__, NonFiniteError)


# Skipped steps.


def overflow_in_first_step(run, step):
    """An infinite gradient of a parameter that AdamW updates, so that only Megatron's own check can see it."""
    if step != 0:
        return None
    original = run.optimizer.step

    def overflowing_step():
        run.weights["decoder.final_layernorm.weight"].main_grad[0] = torch.inf
        return original()

    run.optimizer.step = overflowing_step

    def undo():
        run.optimizer.step = original

    return undo


def test_refresh_of_a_skipped_step_stands_and_the_schedule_counts_attempts():
    job = (LAYOUT.world, train_and_snapshot, LAYOUT, 3)
    skipping, plain = processes.run(*job, overflow_in_first_step), processes.run(*job)
    assert [rank[1] for rank in skipping] == [[False, True, True]] * 2
    assert [rank[3] for rank in skipping] == [3, 3]
    start_, first, second, third = states_of(skipping)
    expected = states_of(plain)[1]
    assert all(same(start_.parameters, first.parameters).values()), "the update of a skipped step was made"
    assert all(same(start_.momenta, first.momenta).values())
    assert all(same(expected.moments, first.moments).values()), "the refresh of a skipped step was dropped"
    assert all(same(expected.bases, first.bases).values())
    assert not any(same(start_.bases, first.bases).values())
    assert all(same(first.moments, second.moments).values()), "attempted step 2 is no refresh step"
    assert not any(same(first.momenta, second.momenta).values())
    assert not any(same(second.moments, third.moments).values()), "attempted step 3 is a refresh step"
