"""Ranks are killed and disks fill up: the last complete checkpoint always resumes to the undisturbed run."""

import functools
import os
import random
import signal
import threading
import time

import pytest
import torch
from pretrain_runs import DOBB, train

from testbed.processes import RankError

STEPS, KILLS = 40, 20
RESHARDABLE = {"dp_reshardable": [], "fully_reshardable": ["--dist-ckpt-optim-fully-reshardable"]}


def words(folder, sharding):
    return [
        *DOBB,
        *("--global-batch-size", "4", "--train-iters", str(STEPS), "--lr-decay-style", "constant"),
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
    for rank, expected in zip(finished, undisturbed(sharding), strict=True):
        assert rank.steps[-1].iteration == STEPS
        assert rank.losses == expected.losses[-len(rank.losses) :]
        assert rank.attempted_steps == expected.attempted_steps
        for name, weight in expected.weights.items():
            assert torch.equal(rank.weights[name], weight), name
        for kind, tensors in expected.state.items():
            for name, tensor in tensors.items():
                assert torch.equal(rank.state[kind][name], tensor), (kind, name)
