"""Blocks whose owner does not hold them: everything is as if a holder owned them, in checkpoints too."""

import functools
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from checkpoint_runs import go_on, load, save
from global_form import merge
from layout_runs import Layout, Run, start

from megatron_dobb import DobbConfig
from megatron_dobb.methods.dobb import block_ownership
from megatron_dobb.methods.dobb.capture import MomentSum
from megatron_dobb.methods.dobb.moment import gram
from megatron_dobb.methods.dobb.refresh_group import HeldWeight, RefreshGroup, share_out
from megatron_dobb.sharding import load_balancing
from testbed import processes, tiers

HOW = {"beta": 0.5, "method": "householder", "iterations": 1}
WIDTH = 48
HELD = {"a": [range(6), (), (), ()], "b": [range(2), range(1, 4), (), ()], "c": [(), (), range(1), range(1)]}
BLOCKS = {"a": 6, "b": 4, "c": 1}


def move(as_much_as_possible):
    """Move blocks wherever that lightens the busiest rank, however narrow they are; or none."""
    load_balancing.TOLERANCE = Fraction(1 if as_much_as_possible else 10**6)
    block_ownership.BYTES_PER_SECOND = 10**18


def refresh_three_times(moving):
    move(moving)
    rank = dist.get_rank()
    weights = [HeldWeight(key, count, WIDTH, tuple(HELD[key][rank])) for key, count in BLOCKS.items()]
    owners = share_out({0: weights}, dist.group.WORLD)[0]
    group = RefreshGroup(
        weights,
        dist.group.WORLD,
        owners,
        moment_dtype=torch.float32,
        basis_dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    views = {key: group.basis_of(key) for key in BLOCKS if len(HELD[key][rank])}
    counts = []
    for step in range(3):
        sums = {}
        for key, count in BLOCKS.items():
            generator = torch.Generator().manual_seed(100 * step + rank)
            x = torch.randn(20, count * WIDTH, generator=generator)
            sums[key] = MomentSum(gram(x, WIDTH), len(x))
        counts.append(group.refresh(sums, **HOW))
    return {
        "moments": dict(zip(group.owned, group.moment, strict=True)),
        "kept": dict(zip(group.kept, group.basis, strict=True)),
        "views": {(key, b): v for key, view in views.items() for b, v in zip(HELD[key][rank], view, strict=True)},
        "counts": counts,
        "moved": owners.moved(),
    }


def test_a_refresh_with_moved_blocks_is_the_one_without_bit_for_bit():
    moved, unmoved = (processes.run(4, refresh_three_times, moving) for moving in (True, False))
    assert not unmoved[0]["moved"]
    assert len(moved[0]["moved"]) == 4
    assert {rank: len(result["moments"]) for rank, result in enumerate(moved)} == {0: 3, 1: 3, 2: 3, 3: 2}
    expected = {block: moment for result in unmoved for block, moment in result["moments"].items()}
    found = {block: moment for result in moved for block, moment in result["moments"].items()}
    assert sorted(found) == sorted(expected)
    assert sum(len(result["moments"]) for result in moved) == len(found)
    assert all(torch.equal(found[block], expected[block]) for block in found)
    identity = torch.eye(WIDTH, dtype=torch.bfloat16)
    bases = {block: basis for result in unmoved for block, basis in result["kept"].items()}
    for rank, result in enumerate(moved):
        assert result["counts"] == unmoved[rank]["counts"]
        assert result["views"].keys() == unmoved[rank]["views"].keys()
        assert result["kept"].keys() == result["views"].keys() | result["moments"].keys()
        for block, basis in [*result["kept"].items(), *result["views"].items()]:
            assert torch.equal(basis, bases[block]), (rank, block)
            assert not torch.equal(basis, identity)


# -- A training run ----------------------------------------------------------------------------------------------

CONFIG = DobbConfig(blocks=4, refresh_interval=3, capture="all")
LAYOUTS = {
    "DP 4": Layout(4, micro_batch=3, bucket_size=20_000),
    "DP 2, TP 2": Layout(4, tensor=2, sequence_parallel=True, micro_batch=6, bucket_size=20_000),
}
SAVED_AFTER, END = 4, 7  # refreshes in the steps 0, 3 and 6


def moved_blocks(run):
    return sum(len(set(group.owned) - set(group.held)) for group in run.groups)


def train(layout, moving, path=None):
    """Train to the end, and save on the way; a snapshot of either moment and the blocks moved."""
    move(moving)
    start(layout)
    run = Run(layout, CONFIG)
    go_on(run, 0, SAVED_AFTER)
    saved = run.snapshot()
    if path:
        for sharding in ("fully_reshardable", "dp_reshardable"):
            save(run, path / sharding, sharding)
    go_on(run, SAVED_AFTER, END)
    return saved, run.snapshot(), moved_blocks(run)


def resume(layout, moving, path, config=CONFIG):
    move(moving)
    start(layout)
    run = Run(layout, config)
    load(run, path)
    loaded = run.snapshot()
    go_on(run, SAVED_AFTER, END)
    return loaded, run.snapshot(), moved_blocks(run)


def assert_same(found, expected):
    found, expected = merge(list(found)), merge(list(expected))
    for what in ("parameters", "momenta", "moments", "bases"):
        left, right = getattr(found, what), getattr(expected, what)
        assert left.keys() == right.keys()
        assert left
        for name in left:
            assert torch.equal(left[name], right[name]), f"{what} of {name} differ"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("moved")


@functools.cache
def with_moves(layout, folder):
    return [*zip(*processes.run(4, train, LAYOUTS[layout], True, folder / layout), strict=True)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_with_moved_blocks_is_the_one_without_bit_for_bit(layout, folder):
    saved, end, moved = with_moves(layout, folder)
    assert sum(moved) >= 4
    unmoved_saved, unmoved_end, unmoved = zip(*processes.run(4, train, LAYOUTS[layout], False), strict=True)
    assert not any(unmoved)
    assert_same(saved, unmoved_saved)
    assert_same(end, unmoved_end)


@pytest.mark.parametrize("sharding", ["fully_reshardable", "dp_reshardable"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("moving", [True, False], ids=["moved again", "not moved any more"])
@tiers.FULL
def test_a_checkpoint_of_moved_blocks_is_resumed_bit_for_bit(layout, moving, sharding, folder):
    saved, end, _ = with_moves(layout, folder)
    ranks = processes.run(4, resume, LAYOUTS[layout], moving, folder / layout / sharding)
    loaded, resumed_end, moved = zip(*ranks, strict=True)
    assert (sum(moved) >= 4) == moving
    assert_same(loaded, saved)
    assert_same(resumed_end, end)


def test_moments_of_wider_blocks_are_cut_alike_whoever_owns_the_parts(folder):
    with_moves("DP 4", folder)
    path, narrower = folder / "DP 4" / "fully_reshardable", DobbConfig(blocks=8, refresh_interval=3, capture="all")
    runs = []
    for moving in (True, False):
        loaded, end, moved = zip(*processes.run(4, resume, LAYOUTS["DP 4"], moving, path, narrower), strict=True)
        assert bool(sum(moved)) == moving
        runs.append((loaded, end))
    assert_same(runs[0][0], runs[1][0])
    assert_same(runs[0][1], runs[1][1])
    assert any(moment.any() for moment in merge(list(runs[0][0])).moments.values())
