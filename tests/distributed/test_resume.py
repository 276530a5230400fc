"""A run that is saved and loaded on the same layout goes on bit for bit."""

import functools

import pytest
import torch
from checkpoint_runs import FORMATS, load, save
from global_form import merge
from layout_runs import Layout, Run, start

from megatron_dobb import DobbConfig
from testbed import processes

CONFIG = DobbConfig(blocks=4, refresh_interval=3, capture_sequences=10)
FOUR_LAYERS = {"num_layers": 4}
SAVED_AFTER, STEPS = 5, 9  # refreshes at 0, 3 and 6: the save is two steps into an interval

LAYOUTS = [
    Layout(micro_batch=6),
    Layout(2, micro_batch=6),
    Layout(3, micro_batch=4, bucket_size=20_000),
    Layout(2, pipeline=2, chunks=2, tensor=1, micro_batch=6),
    Layout(4, tensor=2, sequence_parallel=True, micro_batch=6),
    Layout(4, expert=2, experts=True, micro_batch=3),
    Layout(4, instances=2, micro_batch=6),
]


def losses(run, first, last):
    return [run.step(number) for number in range(first, last)]


def train_and_save(layout, config, path):
    """Train, save on the way, and go on."""
    start(layout)
    run = Run(layout, config, FOUR_LAYERS)
    losses(run, 0, SAVED_AFTER)
    for sharding in FORMATS:
        save(run, path / sharding, sharding)
    at_save = run.snapshot()
    return at_save, losses(run, SAVED_AFTER, STEPS), run.snapshot()


def resume(layout, config, path):
    start(layout)
    run = Run(layout, config, FOUR_LAYERS)
    load(run, path)
    return run.snapshot(), losses(run, SAVED_AFTER, STEPS), run.snapshot(), run.dobb.attempted_steps


def assert_same(found, expected):
    for what in ("parameters", "momenta", "moments", "bases"):
        left, right = getattr(found, what), getattr(expected, what)
        assert left.keys() == right.keys()
        for name in left:
            assert torch.equal(left[name], right[name]), f"{what} of {name} differ"


@functools.cache
def undisturbed(layout, path):
    return processes.run(layout.world, train_and_save, layout, CONFIG, path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("sharding", FORMATS)
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(layout, sharding, folder):
    path = folder / str(LAYOUTS.index(layout))
    saved = undisturbed(layout, path)
    resumed = processes.run(layout.world, resume, layout, CONFIG, path / sharding)
    assert_same(merge([rank[0] for rank in resumed]), merge([rank[0] for rank in saved]))
    assert [rank[1] for rank in resumed] == [rank[1] for rank in saved]
    assert_same(merge([rank[2] for rank in resumed]), merge([rank[2] for rank in saved]))
    assert {rank[3] for rank in resumed} == {STEPS}
