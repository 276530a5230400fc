"""Collectives that the program's own thread makes, for refreshes that overlap where a GPU has one launch queue."""

import collections
import contextlib
import dataclasses
import functools
import io
import os
import random
import time

import pytest
import torch.distributed as dist
from layout_runs import Layout, Run, start
from test_overlap import CONFIG, assert_same

from megatron_dobb.errors import CaptureError
from testbed import processes, tiers, traffic

LAYOUTS = {
    "PP 2 x 2 chunks, DP 2": Layout(4, pipeline=2, chunks=2, micro_batch=3),
    "EP 2 x TP 2": Layout(4, tensor=2, expert=2, experts=True, sequence_parallel=True, micro_batch=6),
    "buckets": Layout(2, micro_batch=6, bucket_size=30_000),
}
POINT_TO_POINT = {"send", "isend", "recv", "irecv"}


def late(dice, call, *args, **settings):
    time.sleep(dice.choice([0, 0.002, 0.02]))
    return call(*args, **settings)


def within(place, places, call, *args, **settings):
    places.append(place)
    try:
        return call(*args, **settings)
    finally:
        places.pop()


def noted(part, places, seen, call, *args, **settings):
    seen.append((part, places[-1] if places else "elsewhere"))
    return call(*args, **settings)


def calls_of_run(layout, config, seed=None):
    """Two steps, the first of which refreshes; with a seed the program makes the collectives and the worker is late.

    Returns:
        All calls in their order, the parts of refreshes that communicate with the places that they were made from, and
        the state.
    """
    run = Run(layout, config, {"num_layers": 2 * layout.chunks})
    run.let_launch("program")
    dice, places, seen = random.Random(seed), [], []
    for group in run.groups:
        if seed is not None:
            group.renew = functools.partial(late, dice, group.renew)
        for part in ("reduce", "send_to_holders"):
            setattr(group, part, functools.partial(noted, part, places, seen, getattr(group, part)))
    for optimizer in run.dobbs:
        refreshes = optimizer.refreshes
        refreshes.finish = functools.partial(within, "finish", places, refreshes.finish)
        for capture in optimizer.captures:
            if capture.on_complete is not None:
                capture.on_complete = functools.partial(within, "trigger", places, capture.on_complete)
    with traffic.record() as calls:
        for step in range(2):
            run.step(step)
    return calls, seen, run.snapshot()


def repeated(layout, config):
    start(layout)
    rank = dist.get_rank()
    plain = dataclasses.replace(config, overlap_refresh=False)
    return calls_of_run(layout, plain), [calls_of_run(layout, config, seed=10 * rank + number) for number in range(2)]


def what(calls):
    return [(call.name, call.ranks, call.dtype, call.peer) for call in calls]


def shared(calls, one, other):
    """The collectives that two ranks make together, by all groups that both are members of."""
    return [
        (call.name, call.ranks, call.dtype)
        for call in calls
        if {one, other} <= set(call.ranks) and call.name not in POINT_TO_POINT
    ]


@pytest.mark.parametrize("name", tiers.quick(LAYOUTS, ["buckets"]))
def test_all_ranks_make_the_same_collectives_in_one_order_whenever_the_worker_is_done(name):
    layout = LAYOUTS[name]
    ranks = processes.run(layout.world, repeated, layout, CONFIG)
    for (plain_calls, plain_seen, plain), repetitions in ranks:
        for calls, seen, snapshot in repetitions:
            assert not any(call.beside for call in calls), "the worker's thread makes none"
            assert what(calls) == what(repetitions[0][0])
            assert collections.Counter(what(calls)) == collections.Counter(what(plain_calls)), "no more than it takes"
            assert set(seen) == {("reduce", "trigger"), ("send_to_holders", "finish")}
            assert len(seen) == len(plain_seen)
            assert_same([snapshot], [plain])
    orders = [repetitions[0][0] for _, repetitions in ranks]
    together = 0
    for one in range(layout.world):
        for other in range(one):
            of_one, of_other = (shared(orders[rank], one, other) for rank in (one, other))
            assert of_one == of_other, (one, other)
            together += len(of_one)
    assert together


# Errors.


def failing(renew, failures, *args, **settings):
    if failures:
        failures.pop()
        raise RuntimeError("no memory left")
    return renew(*args, **settings)


def fail_once(launcher):
    """A step whose refresh fails in the worker and is tried again; and one without, on the same batches."""
    start(LAYOUTS["buckets"])
    run, undisturbed = (Run(LAYOUTS["buckets"], CONFIG) for _ in range(2))
    run.let_launch(launcher)
    run.groups[0].renew = functools.partial(failing, run.groups[0].renew, ["once"])
    with pytest.raises(RuntimeError, match="no memory left"):
        run.step(0)
    run.step(0)
    undisturbed.step(0)
    return run.snapshot(), undisturbed.snapshot()


@pytest.mark.parametrize("launcher", ["worker", "program"])
def test_a_refresh_that_fails_in_the_worker_is_an_error_of_the_call_and_the_step_can_be_tried_again(launcher):
    for again, undisturbed in processes.run(2, fail_once, launcher):
        assert_same([again], [undisturbed])


class _Interruption(Exception):
    pass


def interrupt(number, count, *args):
    count.append(number)
    if len(count) == 2:
        raise _Interruption


def interrupted_forward(launcher):
    """A step whose second micro-batch fails, after a refresh has begun, and is tried again."""
    layout = Layout(2, micro_batch=6)
    start(layout)
    run, undisturbed = (Run(layout, CONFIG) for _ in range(2))
    run.let_launch(launcher)
    with traffic.record() as calls:
        hook = run.model.register_forward_pre_hook(functools.partial(interrupt, 0, []))
        with pytest.raises(_Interruption):
            run.step(0)
        hook.remove()
        run.step(0)
    with traffic.record() as others:
        undisturbed.step(0)
    made, expected = (sum(call.name == "all_to_all_single" for call in each) for each in (calls, others))
    return run.snapshot(), undisturbed.snapshot(), made, expected


@pytest.mark.parametrize("launcher", ["worker", "program"])
def test_a_refresh_that_has_begun_stands_when_a_forward_pass_fails_and_the_step_is_tried_again(launcher):
    for again, undisturbed, made, expected in processes.run(2, interrupted_forward, launcher):
        assert_same([again], [undisturbed])
        assert made == expected > 0, "the refresh is made once"


def counted(found, key, call, *args):
    found[key] += 1
    return call(*args)


def blind(call, group, sums, **settings):
    for weight in group.weights:
        sums[weight.key].total, sums[weight.key].tokens = None, 0
    return call(sums, **settings)


def unseen():
    """How many exchanges each group has made, on a step on which no rank saw anything of the weights of the first."""
    start(LAYOUTS["buckets"])
    run = Run(LAYOUTS["buckets"], CONFIG)
    run.let_launch("program")
    first, exchanges = run.groups[0], collections.Counter()
    for number, group in enumerate(run.groups):
        group.send_to_holders = functools.partial(counted, exchanges, number, group.send_to_holders)
    first.reduce = functools.partial(blind, first.reduce, first)
    with pytest.raises(CaptureError, match="no input activation was captured for"):
        run.step(0)
    return exchanges, len(run.groups)


def test_a_weight_that_no_rank_saw_is_an_error_on_every_rank_and_other_groups_exchange_their_bases():
    for exchanges, groups in processes.run(2, unseen):
        assert exchanges == dict.fromkeys(range(groups), 1)
        assert groups > 1


def agreed():
    """Whether ranks know of one launch queue, which one of them has; and what the log says of it in two steps."""
    rank = dist.get_rank()
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8" if rank == 0 else "1"
    start(LAYOUTS["buckets"])
    run = Run(LAYOUTS["buckets"], dataclasses.replace(CONFIG, refresh_interval=1))
    run.let_launch("program")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        run.step(0)
        run.step(1)
    return run.dobb.rank_state.one_launch_queue, said.getvalue().count("one queue")


def test_one_rank_with_one_launch_queue_is_enough_for_all_and_the_log_says_so_once():
    assert processes.run(2, agreed) == [(True, 1), (True, 0)]
