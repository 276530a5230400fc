"""What happens around the steps of Megatron's training loop: evaluation, reruns, exits, growing batches."""

import functools
import os
import shlex
import signal
from dataclasses import replace

import pytest
import torch
from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
from megatron.training import get_args
from pretrain_runs import ADAMW, DOBB, train

from testbed import tiers

STEPS = 7
QUIET = "--eval-iters 0 --eval-interval 1000"
FIXED_BATCH = f"--global-batch-size 8 --train-iters {STEPS}"
CONSTANT_RATE = "--lr-decay-style constant"


def note_captures(job):
    """Note, for every step, the tokens that the sum of each weight was refreshed from, or its capture has left."""
    if not hasattr(job.dobb, "captures"):
        return
    (capture,) = job.dobb.captures
    take, step = capture.take, job.optimizer.step
    taken = {}

    def take_and_count():
        sums = take()
        taken.update({name: entry.tokens for name, entry in sums.items()})
        return sums

    def step_and_note():
        job.notes.append({name: taken.get(name, entry.tokens) for name, entry in capture.sums.items()})
        taken.clear()
        return step()

    capture.take, job.optimizer.step = take_and_count, step_and_note


def expect_no_capture_between_steps(job):
    """Fail if anything was captured when Megatron starts a step, for which the captures start again anyway."""
    original = job.optimizer.zero_grad

    def zero_grad(*args):
        (capture,) = job.dobb.captures
        assert capture.microbatch == -1
        assert not any(entry.tokens for entry in capture.sums.values())
        return original(*args)

    job.optimizer.zero_grad = zero_grad
    note_captures(job)


@functools.cache
def trained(flags, prepare=note_captures, optimizer="dobb", world=2):
    return train([*shlex.split(f"{CONSTANT_RATE} {flags}"), *(DOBB if optimizer == "dobb" else ADAMW)], world, prepare)


def plain(flags=""):
    return trained(f"{FIXED_BATCH} {QUIET}{flags}")


def assert_same_training(found, expected):
    for rank, other in zip(found, expected, strict=True):
        assert rank.losses == other.losses
        assert len(rank.losses) == STEPS
        assert rank.notes == other.notes, "another number of tokens was captured"
        assert rank.attempted_steps == other.attempted_steps == STEPS
        for name, weight in other.weights.items():
            assert torch.equal(weight, rank.weights[name]), name
        for kind, values in other.state.items():
            for key, value in values.items():
                assert torch.equal(value, rank.state[kind][key]), (kind, key)


def test_captures_are_those_of_the_first_microbatch_on_refresh_steps():
    """What the comparisons below rest on."""
    for rank in plain():
        assert [set(tokens.values()) for tokens in rank.notes] == [{32 if n % 3 == 0 else 0} for n in range(STEPS)]
        assert rank.captured_sequences == 2


@pytest.mark.parametrize(
    "overlap",
    tiers.quick(["", "--overlap-grad-reduce --overlap-param-gather"], ["--overlap-grad-reduce --overlap-param-gather"]),
    ids=["plain", "overlap"],
)
def test_evaluation_between_steps_changes_nothing_and_is_not_captured(overlap):
    found = trained(f"{FIXED_BATCH} --eval-interval 2 --eval-iters 2 {overlap}", expect_no_capture_between_steps)
    assert_same_training(found, plain())


@pytest.mark.full
def test_skip_train_evaluates_without_an_optimizer():
    for optimizer in ("dobb", "adam"):
        for rank in trained(f"{FIXED_BATCH} --eval-interval 2 --eval-iters 1 --skip-train", None, optimizer):
            assert rank.steps == []
            assert rank.exit_code is None


# Reruns. With all sequences captured: the first ones alone would not be counted twice even if the count went on.

CAPTURE_ALL = " --dobb-capture all"


def rerun_every_step(job):
    """As `--rerun-mode report_stats` would, which stock 0.19.2 rejects (the mode has another name by now)."""
    get_rerun_state_machine().set_mode(RerunMode.REPORT_DETERMINISM_STATS)
    note_captures_and_passes(job)


def note_captures_and_passes(job):
    """Note in turn the number of forward passes of a step and what they captured."""
    note_captures(job)
    calls = []
    job.model[0].register_forward_hook(lambda *_: calls.append(1))
    original = job.optimizer.step

    def step():
        job.notes.append(f"{len(calls)} forward passes")
        calls.clear()
        return original()

    job.optimizer.step = step


@pytest.mark.full
def test_a_forward_backward_pass_that_runs_twice_counts_once():
    ranks = trained(f"{FIXED_BATCH} {QUIET}{CAPTURE_ALL}", rerun_every_step)
    for rank in ranks:
        assert rank.notes[::2] == ["8 forward passes"] * STEPS
    ranks = [replace(rank, notes=rank.notes[1::2]) for rank in ranks]
    assert_same_training(ranks, plain(CAPTURE_ALL))


def reject_one_loss(job):
    """A loss that Megatron finds suspicious on rank 1 at one refresh step, and not when it runs the step again."""
    machine = get_rerun_state_machine()
    validate = machine.validate_result

    def validate_result(result, rejection_func, **settings):
        suspicious = machine.current_iteration == 4 and torch.distributed.get_rank() == 1
        return validate(result, lambda x: suspicious or rejection_func(x), **(settings | {"fatal": False}))

    machine.validate_result = validate_result
    note_captures_and_passes(job)


def test_a_step_that_megatron_runs_again_after_a_suspicious_loss_counts_once():
    ranks = trained(f"{FIXED_BATCH} {QUIET}{CAPTURE_ALL}", reject_one_loss)
    for rank in ranks:
        assert rank.notes[::2] == [f"{8 if number == 3 else 4} forward passes" for number in range(STEPS)]
    ranks = [replace(rank, notes=rank.notes[1::2]) for rank in ranks]
    assert_same_training(ranks, plain(CAPTURE_ALL))


@pytest.mark.full
def test_a_fault_injected_into_a_loss_ends_the_job_as_with_adamw():
    flags = f"{FIXED_BATCH} {QUIET} --error-injection-rate 6 --error-injection-type transient_error"
    dobb, adamw = (trained(flags, None, optimizer) for optimizer in ("dobb", "adam"))
    for rank, other in zip(dobb, adamw, strict=True):
        assert rank.exit_code == other.exit_code == 17
        assert [step.iteration for step in rank.steps] == [step.iteration for step in other.steps]
        assert len(rank.steps) < STEPS
        assert rank.attempted_steps == len(rank.steps), "the step of a rejected loss was made"


# Exits.


def terminate_one_rank(job):
    """SIGTERM to one rank, in the middle of its fourth step."""
    original, calls = job.optimizer.step, iter(range(1000))

    def step():
        if next(calls) == 3 and torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original()

    job.optimizer.step = step


def at_once(job):
    """A shorter duration than the flag can say, which counts in whole minutes."""
    get_args().exit_duration_in_mins = 1e-9


EXITS = {
    "interval": ("--exit-interval 4", None, 4),
    "duration": ("--exit-duration-in-mins 1", at_once, 1),
    "signal": ("--exit-signal-handler", terminate_one_rank, 4),
}


@pytest.mark.parametrize(
    ("case", "save"),
    tiers.quick(
        [("interval", False), ("duration", False), ("signal", False), ("interval", True), ("signal", True)],
        [("signal", True)],
    ),
)
def test_training_ends_early_as_with_adamw_at_the_same_step_with_the_same_status(case, save, tmp_path):
    flags, prepare, last = EXITS[case]
    for optimizer in ("dobb", "adam"):
        folder = tmp_path / optimizer
        words = f"{FIXED_BATCH} {QUIET} {flags}" + f" --save {folder} --no-save-optim --save-interval 100" * save
        for rank in trained(words, prepare, optimizer):
            assert rank.exit_code == 0
            assert [step.iteration for step in rank.steps] == list(range(1, last + 1))
            if optimizer == "dobb":
                assert rank.losses == plain()[0].losses[:last]
        if save:
            assert (folder / "latest_checkpointed_iteration.txt").read_text() == str(last)


# Batch sizes.


GROWING = "--step-batch-size-schedule '0:4 256:8 512:12'"
"""The batch after so many tokens. 0.19.2 ignores the older --rampup-batch-size."""
GROWN = [4, 4, 8, 12, 12, 12, 12]


@pytest.mark.parametrize(
    "length", tiers.quick(["--train-samples 64 --lr-decay-samples 64", "--train-iters 7"], ["--train-iters 7"])
)
def test_a_growing_batch_leaves_the_number_of_captured_sequences_as_it_was_settled_at_the_start(length):
    for rank in trained(f"{GROWING} {length} {QUIET}", note_captures_and_passes):
        assert rank.notes[::2] == [f"{batch // 2} forward passes" for batch in GROWN]
        assert [set(tokens.values()) for tokens in rank.notes[1::2]] == [{32 if n % 3 == 0 else 0} for n in range(7)]
        assert rank.captured_sequences == 2
        assert rank.attempted_steps == 7
        assert rank.losses[-1] < rank.losses[0]


@pytest.mark.full
def test_with_capture_all_a_growing_batch_is_captured_whole():
    for rank in trained(f"{GROWING} --train-iters 7 --dobb-capture all {QUIET}"):
        taken = [max(tokens.values()) for tokens in rank.notes]
        assert taken == [32 * batch // 2 if n % 3 == 0 else 0 for n, batch in enumerate(GROWN)]


@pytest.mark.full
def test_a_run_given_in_samples_trains_as_one_given_in_iterations():
    samples = 8 * STEPS
    assert_same_training(trained(f"--global-batch-size 8 --train-samples {samples} {QUIET}"), plain())


def test_iterations_that_megatron_skips_are_no_attempted_steps():
    """`--iterations-to-skip` only draws the data: neither the schedule of refreshes nor a capture may move."""
    ranks = trained(f"{FIXED_BATCH} {QUIET} --iterations-to-skip 2 5")
    for rank in ranks:
        assert rank.attempted_steps == STEPS - 2
        assert [max(tokens.values()) for tokens in rank.notes] == [32, 0, 0, 32, 0]
