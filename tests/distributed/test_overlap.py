"""Refreshes beside the backward pass: the same function as in the optimizer's call, whatever the threads' timing."""

import dataclasses
import functools
import random
import threading
import time

import pytest
import torch
from layout_runs import Layout, Run, global_batch, start

from megatron_dobb import DobbConfig
from megatron_dobb.errors import CaptureError
from megatron_dobb.megatron.dobb.scheduler import microbatches_of_a_step
from megatron_dobb.methods.dobb.schedule import is_due, phases
from testbed import gpt, processes, tiers, traffic

BLOCKS, INTERVAL, STEPS = 4, 2, 5
CONFIG = DobbConfig(blocks=BLOCKS, refresh_interval=INTERVAL)
LAYOUTS = {
    "DP 2": Layout(2, micro_batch=3),
    "TP 2 + SP": Layout(2, tensor=2, sequence_parallel=True, micro_batch=6),
    "PP 2": Layout(2, pipeline=2, micro_batch=3),
    "PP 2 x 2 chunks, DP 2": Layout(4, pipeline=2, chunks=2, micro_batch=3),
    "buckets": Layout(2, micro_batch=3, bucket_size=30_000),
    "EP 2 x TP 2": Layout(4, tensor=2, expert=2, experts=True, sequence_parallel=True, micro_batch=3),
    "recompute": Layout(2, micro_batch=3, recompute="full"),
}


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        for kind in ("parameters", "moments", "bases"):
            ours, theirs = getattr(one, kind), getattr(other, kind)
            assert ours.keys() == theirs.keys()
            assert ours
            for key in theirs:
                assert torch.equal(ours[key], theirs[key]), (kind, key)


def trained(layout, config, steps=STEPS, prepare=None, layers=None, launcher="worker"):
    """Train; returns this rank's state and which thread did each part of its refreshes."""
    run = Run(layout, config, {"num_layers": layers or 2 * layout.chunks})
    run.let_launch(launcher)
    threads = set()
    for group in run.groups:
        for part in ("reduce", "renew", "send_to_holders"):
            setattr(group, part, functools.partial(note_thread, getattr(group, part), part, threads))
    if prepare:
        prepare(run)
    for step in range(steps):
        run.step(step)
    return run.snapshot(), threads


def note_thread(call, part, threads, *args, **settings):
    threads.add((part, threading.current_thread().name))
    return call(*args, **settings)


def all_on(thread):
    return {("reduce", thread), ("renew", thread), ("send_to_holders", thread)}


BESIDE, IN_THE_CALL = all_on("dobb-refresh"), all_on("MainThread")
COMPUTED_BESIDE = {("reduce", "MainThread"), ("renew", "dobb-refresh"), ("send_to_holders", "MainThread")}


def in_every_way(layout, config):
    start(layout)
    plain = dataclasses.replace(config, overlap_refresh=False)
    return trained(layout, config), trained(layout, config, launcher="program"), trained(layout, plain)


@pytest.mark.parametrize(
    ("name", "stagger"),
    tiers.quick(
        [*((name, False) for name in LAYOUTS), ("DP 2", True), ("PP 2 x 2 chunks, DP 2", True)],
        [("TP 2 + SP", False), ("buckets", False), ("PP 2 x 2 chunks, DP 2", True)],
    ),
)
def test_training_is_the_same_to_the_last_bit_with_and_without_overlap(name, stagger):
    layout = LAYOUTS[name]
    config = dataclasses.replace(CONFIG, stagger=stagger)
    for found in processes.run(layout.world, in_every_way, layout, config):
        (by_worker, by_program, plain), threads = zip(*found, strict=True)
        assert threads == (BESIDE, COMPUTED_BESIDE, IN_THE_CALL)
        assert_same([by_worker, by_program], [plain, plain])


# Races.

REFRESHES = 500


def delay(generator, call, *args, **settings):
    time.sleep(generator.choice([0, 0, 0.0003, 0.001]))
    return call(*args, **settings)


def delayed(run):
    """Hold up the hooks, the worker before each refresh, and both sides of its collectives, for random times."""
    seeds = random.Random(100 + torch.distributed.get_rank())

    def slowed(call):
        return functools.partial(delay, random.Random(seeds.random()), call)

    for group in run.groups:
        group.refresh, group.bring_to_owners = slowed(group.refresh), slowed(group.bring_to_owners)
        group.send_to_holders = slowed(group.send_to_holders)
    for optimizer in run.dobbs:
        for capture in optimizer.captures:
            capture.on_complete, capture._add = slowed(capture.on_complete), slowed(capture._add)
        optimizer.refreshes.finish = slowed(optimizer.refreshes.finish)
    for weight in run.weights.values():
        weight.register_hook(slowed(lambda gradient: None))


def with_and_without_delays(layout, config, steps):
    start(layout)
    plain = dataclasses.replace(config, overlap_refresh=False)
    return trained(layout, config, steps, delayed, layers=1), trained(layout, plain, steps, layers=1)


@tiers.FULL
def test_five_hundred_refreshes_with_random_delays_are_those_without_overlap():
    layout, config = Layout(2, micro_batch=12), dataclasses.replace(CONFIG, refresh_interval=1)
    ranks = processes.run(2, with_and_without_delays, layout, config, REFRESHES, timeout=240)
    for (overlapped, threads), (plain, others) in ranks:
        assert (threads, others) == (BESIDE, IN_THE_CALL)
        assert_same([overlapped], [plain])


# What the optimizer's call does, and does not.


def profiled(layout):
    start(layout)
    run = Run(layout, CONFIG)
    run.step(0)
    run.step(1)
    everything = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=everything
    ) as found:
        step = run.optimizer.step

        def marked():
            with torch.profiler.record_function("the optimizer's call"):
                return step()

        run.optimizer.step = marked
        run.step(2)  # a refresh step
    return [(event.name, event.thread, event.time_range.start, event.time_range.end) for event in found.events()]


REFRESH_WORK = ("dobb::refresh", "dobb::refresh_basis", "c10d::alltoall_base_", "gloo:all_to_all")


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_optimizers_call_of_a_refresh_step_has_no_work_of_the_refresh(ranks):
    for events in processes.run(ranks, profiled, Layout(ranks, micro_batch=3)):
        (call,) = [event for event in events if event[0] == "the optimizer's call"]
        work = [event for event in events if event[0] in REFRESH_WORK]
        assert {"dobb::refresh", "dobb::refresh_basis"} <= {event[0] for event in work}
        for name, thread, *_ in work:
            assert thread != call[1], f"{name} ran on the program's thread"
        names = {event[0] for event in events if event[1] == call[1] and call[2] <= event[2] <= call[3]}
        assert "dobb::update" in names, "the profile shows what the call does"


# Captures that end late, or never.


def capture_all(layout, microbatches):
    start(layout)
    run = Run(layout, dataclasses.replace(CONFIG, capture="all"))
    for optimizer in run.dobbs:
        for capture in optimizer.captures:
            capture.microbatches = lambda: microbatches
    try:
        run.step(0)
    except CaptureError as error:
        return str(error)
    return run.snapshot()


def test_all_sequences_are_complete_with_the_last_microbatch_that_megatron_announces():
    layout = Layout(2, micro_batch=3)  # 4 micro-batches
    ranks = [processes.run(2, capture_all, layout, announced) for announced in (4, None)]
    assert_same(*ranks)
    for message in processes.run(2, capture_all, layout, 3):
        assert "--dobb-capture all" in message
        assert "--no-dobb-overlap-refresh" in message


def test_nobody_announces_microbatches_outside_of_megatrons_training():
    assert microbatches_of_a_step() is None


def run_again(layout):
    """A step whose forward and backward passes run twice, of which the first is abandoned."""
    start(layout)
    run = Run(layout, CONFIG)
    step = run.optimizer.step
    run.optimizer.step = lambda: (True, None, None)
    run.step(0)
    run.optimizer.step = step
    with traffic.record() as calls:
        run.step(0)
    again = run.snapshot()
    other = Run(layout, CONFIG)
    other.step(0)
    return again, other.snapshot(), [call for call in calls if call.beside]


def test_a_refresh_that_has_begun_stands_when_the_step_is_run_again():
    for again, once, calls in processes.run(2, run_again, Layout(2, micro_batch=3)):
        assert_same([again], [once])
        assert calls == [], "it was not made twice"


def begin_without(begin, name, armed, keys=()):
    begin(armed, set(keys) - {name})


def unseen(layout, overlap):
    start(layout)
    run = Run(layout, dataclasses.replace(CONFIG, overlap_refresh=overlap))
    name = run.names[0]
    for optimizer in run.dobbs:
        for capture in optimizer.captures:
            capture.begin = functools.partial(begin_without, capture.begin, name)
    try:
        run.step(0)
    except CaptureError as error:
        return name in str(error)
    return False


@pytest.mark.parametrize("overlap", [True, False])
def test_a_weight_that_no_rank_saw_is_an_error_of_the_optimizers_call(overlap):
    assert processes.run(2, unseen, Layout(2, micro_batch=3), overlap) == [True, True]


# Staggered refreshes.


def staggered(layout, config, steps):
    start(layout)
    run = Run(layout, config, {"num_layers": 2 * layout.chunks})
    refreshed = []
    for group in run.groups:
        keys = [weight.key for weight in group.weights]
        group.refresh = functools.partial(note_keys, group.refresh, keys, refreshed)
    bases = []
    for step in range(steps):
        refreshed.append([])
        gpt.train_step(run.chunks, run.optimizer, global_batch(step), layout.micro_batch)
        bases.append(run.snapshot().bases)
    work = {w.name: w.features // w.width * w.width**3 for w in run.managed.values()}
    return refreshed, bases, work


def note_keys(refresh, keys, refreshed, *args, **settings):
    refreshed[-1] += keys
    return refresh(*args, **settings)


@pytest.mark.parametrize("name", ["DP 2", "PP 2 x 2 chunks, DP 2"])
def test_each_step_refreshes_the_weights_of_its_phase_and_no_other_basis_changes(name):
    layout, interval = LAYOUTS[name], 3
    config = dataclasses.replace(CONFIG, stagger=True, refresh_interval=interval)
    ranks = processes.run(layout.world, staggered, layout, config, 7)
    phase_of = phases({key: work for rank in ranks for key, work in rank[2].items()}, interval)
    assert set(phase_of.values()) == set(range(interval))
    for refreshed, bases, work in ranks:
        for step, keys in enumerate(refreshed):
            assert sorted(keys) == sorted(key for key in work if is_due(step, phase_of[key], interval))
            for (key, block), basis in bases[step].items() if step else ():
                same = torch.equal(basis, bases[step - 1][key, block])
                assert same == (key not in keys), (step, key)
