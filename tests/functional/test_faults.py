"""Ranks are killed and disks fill up: the last complete checkpoint always resumes to the undisturbed run."""

import functools
import os
import random
import resource
import signal
import threading
import time

import pytest
import torch
from pretrain_runs import DOBB, train

from testbed import tiers
from testbed.processes import RankError

STEPS, KILLS = 40, 20
RESHARDABLE = {"dp_reshardable": [], "fully_reshardable": ["--dist-ckpt-optim-fully-reshardable"]}


def words(folder, sharding, steps=STEPS):
    return [
        *DOBB,
        *("--global-batch-size", "4", "--train-iters", str(steps), "--lr-decay-style", "constant"),
        *("--eval-interval", "1000", "--eval-iters", "0"),
        *("--ckpt-format", "torch_dist", "--save-interval", "2", "--save", str(folder), "--load", str(folder)),
        *RESHARDABLE[sharding],
    ]


@functools.cache
def undisturbed(sharding):
    """Two runs, of which the second shows that the first is what every run gives."""
    plain = words("/nowhere", sharding)
    runs = [train(plain[: plain.index("--ckpt-format")]) for _ in range(2)]
    for one, other in zip(*runs, strict=True):
        assert one.losses == other.losses
    return runs[0]


def kill_at(chance, victims):
    """A `prepare` that kills this rank, if it is a victim, some time after a few more steps."""
    steps, fraction = chance.randint(0, 4), chance.random()

    def prepare(job):
        if int(os.environ["RANK"]) not in victims:
            return
        step, began, left = job.optimizer.step, time.monotonic(), steps

        def die(delay):
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()

        def counted():
            nonlocal left, began
            result = step()
            left -= 1
            now = time.monotonic()
            if left < 0:
                die(fraction * (now - began) * 2)  # within the next two steps or the save between them
                left = STEPS
            began = now
            return result

        job.optimizer.step = counted

    return prepare


@pytest.mark.full
@pytest.mark.parametrize("sharding", RESHARDABLE)
def test_a_training_whose_ranks_are_killed_ends_with_the_weights_of_the_undisturbed_one(sharding, tmp_path):
    chance, kills, finished = random.Random(sharding), 0, None
    while finished is None:
        victims = chance.choice([{0}, {1}, {0, 1}])
        prepare = kill_at(chance, victims) if kills < KILLS // 2 else None
        try:
            finished = train(words(tmp_path, sharding), prepare=prepare)
        except RankError as error:
            if "SIGKILL" not in str(error):
                raise
            kills += 1
    assert kills == KILLS // 2
    assert_as_undisturbed(finished, undisturbed(sharding))


def assert_as_undisturbed(finished, ranks):
    for rank, expected in zip(finished, ranks, strict=True):
        assert rank.steps[-1].iteration == expected.steps[-1].iteration
        assert rank.losses == expected.losses[-len(rank.losses) :]
        assert rank.attempted_steps == expected.attempted_steps
        for name, weight in expected.weights.items():
            assert torch.equal(rank.weights[name], weight), name
        for kind, tensors in expected.state.items():
            for name, tensor in tensors.items():
                assert torch.equal(rank.state[kind][name], tensor), (kind, name)


@pytest.mark.parametrize("sharding", tiers.quick(RESHARDABLE, ["fully_reshardable"]))
def test_a_disk_that_fills_up_during_a_save_leaves_the_checkpoint_before_it_to_resume_from(sharding, tmp_path):
    """A limit on the size of files stands for the full disk."""

    def fill_up_before_the_second_save(job):
        step, taken = job.optimizer.step, 0

        def counted():
            nonlocal taken
            taken += 1
            if taken == 3:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
            return step()

        job.optimizer.step = counted

    once = words(tmp_path / "once", sharding, 6)
    expected = train(once)
    again = words(tmp_path / "again", sharding, 6)
    with pytest.raises(RankError, match="File too large"):
        train(again, prepare=fill_up_before_the_second_save)
    assert (tmp_path / "again" / "latest_checkpointed_iteration.txt").read_text() == "2"
    resumed = train(again)
    assert [step.iteration for step in resumed[0].steps] == [3, 4, 5, 6]
    assert_as_undisturbed(resumed, expected)


def test_a_directory_that_cannot_be_written_stops_the_run_by_name_and_leaves_the_checkpoint_alone(tmp_path):
    good, file = words(tmp_path / "good", "dp_reshardable", 4), tmp_path / "file"
    expected = train(good)
    file.write_text("in the way")
    with pytest.raises(RankError, match=str(file)):
        train([*good, "--ckpt-step", "2", "--save", str(file / "below")])
    resumed = train([*good, "--ckpt-step", "2"])
    assert [step.iteration for step in resumed[0].steps] == [3, 4]
    assert_as_undisturbed(resumed, expected)
