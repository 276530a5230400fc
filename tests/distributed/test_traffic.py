"""Dobb communicates what Megatron's AdamW does, plus the moments that docs/performance.md counts, on refresh steps.

Every collective of every rank is recorded, for both optimizers on the same model. What is expected on refresh steps is
computed here from the model's shapes and from which flat shard touches which block.
"""

import dataclasses
import functools
import math
import re

import pytest
import torch
from global_form import is_row_parallel
from layout_runs import Layout, Run, global_batch, start
from megatron.core import parallel_state

from megatron_dobb import DobbConfig
from megatron_dobb.megatron.dobb.startup_report import start_table
from testbed import gpt, processes, tiers, traffic

STEPS, INTERVAL, BLOCKS = 5, 3, 4
CONFIG = DobbConfig(blocks=BLOCKS, refresh_interval=INTERVAL)
BASIS_BYTES = 2  # bf16, the default
HEADER_BYTES = 12  # kept blocks, fallback blocks and the number of an unseen weight, in front of every message

CASES = {
    "one bucket": (Layout(2, micro_batch=6), 64),
    "no overlap": (Layout(2, micro_batch=6), 64),
    "padded": (Layout(3, micro_batch=8), 80),
    "padded, buckets": (Layout(3, micro_batch=4, bucket_size=30_000), 80),
    "tensor parallel": (Layout(4, tensor=2, micro_batch=6), 64),
    "sequence parallel": (Layout(4, tensor=2, sequence_parallel=True, micro_batch=6), 80),
    "sequence parallel, one data-parallel rank": (Layout(2, tensor=2, sequence_parallel=True, micro_batch=12), 64),
    "context parallel": (Layout(4, context=2, micro_batch=6), 64),
    "pipeline": (Layout(4, pipeline=2, micro_batch=3), 80),
}
QUICK = ["no overlap", "one bucket", "padded, buckets", "sequence parallel", "pipeline"]
every_case = pytest.mark.parametrize("case", tiers.quick(CASES, QUICK))


def record(layout, hidden, config):
    """Every call of five steps, of AdamW and of Dobb, and what is needed to expect them."""
    start(layout)
    plain, dobb = Run(layout, None, {"hidden_size": hidden}), Run(layout, config, {"hidden_size": hidden})
    groups = dobb.dobb.refresh_groups
    megatrons = [
        parallel_state.get_data_parallel_group(),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_tensor_model_parallel_group(),
        torch.distributed.group.WORLD,
    ]
    return {
        "plain": calls_of_steps(plain),
        "dobb": calls_of_steps(dobb),
        "plain buckets": bucket_sizes(plain),
        "dobb buckets": bucket_sizes(dobb),
        "shapes": {name: tuple(dobb.weights[name].shape) for name in dobb.names},
        "holdings": {name: blocks_touched(dobb, name) for name in dobb.names},
        "owned": [block for group in groups for block in group.owned],
        "own groups": all(group.group is None or group.group not in megatrons for group in groups),
        "table": start_table(dobb.dobb),
    }


def calls_of_steps(run):
    steps = []
    for step in range(STEPS):
        with traffic.record() as calls:
            gpt.train_step(run.chunks, run.optimizer, global_batch(step), run.layout.micro_batch)
        steps.append(calls)
    return steps


def bucket_sizes(run):
    return [bucket.grad_data.numel() for group in run.model.bucket_groups for bucket in group.buckets]


def blocks_touched(run, name):
    """The local blocks of which this rank's flat shards hold an element, counted element by element."""
    (buffer,) = run.model.buffers
    weight = run.weights[name]
    first, end, bucket_id = buffer.param_index_map[weight]
    bucket = buffer.buckets[bucket_id]
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    shard = bucket.grad_data.numel() // group.size()
    shard_start = bucket.offset + group.rank() * shard
    elements = torch.arange(first, end)
    inside = elements[(elements >= shard_start) & (elements < shard_start + shard)] - first
    return (inside % weight.shape[1] // width_of(name, weight.shape[1], run.layout)).unique().tolist()


def width_of(name, local_columns, layout):
    return local_columns * (layout.tensor if is_row_parallel(name) else 1) // BLOCKS


@functools.cache
def recorded(case):
    layout, hidden = CASES[case]
    return processes.run(
        layout.world, record, layout, hidden, dataclasses.replace(CONFIG, overlap_refresh=overlaps(case))
    )


def overlaps(case):
    return case != "no overlap"


def is_refresh(step):
    return step % INTERVAL == 0


def kind(call):
    return call.name, call.ranks, call.dtype, call.peer, call.coalesced


def is_of_buckets(call):
    """Megatron puts the collectives of its param/grad buffers, and no others, into coalescing managers."""
    return call.coalesced is not None


def without_moments(plain, dobb):
    """The calls of a Dobb step without those that it makes more, and these.

    Its thread makes them beside the backward pass. Without overlap they must come all at once.
    """
    if beside := [call for call in dobb if call.beside]:
        return [call for call in dobb if not call.beside], beside
    more = len(dobb) - len(plain)
    place = next((i for i, (a, b) in enumerate(zip(plain, dobb, strict=False)) if kind(a) != kind(b)), len(plain))
    return dobb[:place] + dobb[place + more :], dobb[place : place + more]


@every_case
def test_dobb_makes_the_calls_of_adamw_in_the_same_order_on_the_same_groups(case):
    for rank in recorded(case):
        for step, (plain, dobb) in enumerate(zip(rank["plain"], rank["dobb"], strict=True)):
            common, more = without_moments(plain, dobb)
            assert len(plain) > 3
            assert [kind(call) for call in common] == [kind(call) for call in plain]
            assert bool(more) == is_refresh(step)
            assert {call.beside for call in more} <= {overlaps(case)}


@every_case
def test_bytes_are_those_of_adamw_but_for_the_reported_padding(case):
    for rank in recorded(case):
        sizes = rank["plain buckets"], rank["dobb buckets"]
        assert len(sizes[0]) == len(sizes[1])
        padding = sum(sizes[1]) - sum(sizes[0])
        assert padding > 0 or not case.startswith("padded")
        assert reported_padding(rank["table"]) == padding
        for plain, dobb in zip(rank["plain"], rank["dobb"], strict=True):
            common, _ = without_moments(plain, dobb)
            for a, b in zip(plain, common, strict=True):
                if not is_of_buckets(a):
                    assert (a.sent, a.received) == (b.sent, b.received)
            for name in ("reduce_scatter_tensor", "all_gather_into_tensor"):
                for calls, buckets in zip((plain, common), sizes, strict=True):
                    numels = [call.numel for call in calls if is_of_buckets(call) and call.name == name]
                    assert sorted(numels) == sorted(buckets)


def reported_padding(table):
    (line,) = [line for line in table if "param/grad buffers" in line]
    return int(re.search(r"elements, ([\d,]+) more than AdamW's", line)[1].replace(",", ""))


@every_case
def test_refresh_steps_add_exactly_the_moment_traffic(case):
    layout, _ = CASES[case]
    ranks = recorded(case)
    assert all(rank["own groups"] for rank in ranks), "moments travel on Megatron's own process groups"
    checked = 0
    for step in filter(is_refresh, range(STEPS)):
        more = [without_moments(rank["plain"][step], rank["dobb"][step])[1] for rank in ranks]
        for number, rank in enumerate(ranks):
            groups = expected_groups(number, rank["shapes"], layout)
            assert len(more[number]) == 3 * len(groups)
            for place, ((members, width), names) in enumerate(groups):
                calls = {m: more[m][3 * place : 3 * place + 3] for m in members}
                check_group(number, members, width, names, ranks, calls)
                checked += 1
    assert checked


def expected_groups(number, shapes, layout):
    """This rank's (ranks, width) groups of more than one rank, with their weights, widest first."""
    of_stage = layout.world // layout.pipeline
    first = number // of_stage * of_stage
    everyone = tuple(range(first, first + of_stage))
    same_tokens = everyone[number % layout.tensor :: layout.tensor]
    groups = {}
    for name, (_, columns) in shapes.items():
        sharded = layout.sequence_parallel and not is_row_parallel(name)
        members = everyone if sharded else same_tokens
        if len(members) > 1:
            groups.setdefault((members, width_of(name, columns, layout)), []).append(name)
    return sorted(groups.items(), key=lambda item: (item[0][0], -item[0][1]))


def check_group(number, members, width, names, ranks, calls):
    shapes = ranks[number]["shapes"]
    blocks = {name: shapes[name][1] // width for name in names}
    triangle = width * (width + 1) // 2
    moments = sum(blocks.values()) * triangle
    chunk = math.ceil((moments + len(names)) / len(members))
    owned = {m: [block for block in ranks[m]["owned"] if block[0] in names] for m in members}
    scatter, to_owners, to_holders = calls[number]

    assert [c.name for c in calls[number]] == ["reduce_scatter_tensor", "all_to_all_single", "all_to_all_single"]
    assert {c.ranks for c in calls[number]} == {members}
    assert [c.coalesced for c in calls[number]] == [None] * 3

    # One triangle of every block and one count per weight, padded by less than the group's size.
    assert (scatter.dtype, scatter.received, scatter.sent) == (torch.float32, 4 * chunk, 4 * chunk * len(members))
    assert chunk * len(members) - moments - len(names) < len(members)

    # Whole blocks to their owners, with the count of each weight of which they own some; every block has one owner.
    counts = {m: len({name for name, _ in owned[m]}) for m in members}
    assert to_owners.dtype == torch.float32
    assert to_owners.received == 4 * (triangle * len(owned[number]) + counts[number])
    assert sum(calls[m][1].sent for m in members) == 4 * (moments + sum(counts.values()))
    assert to_owners.sent <= 4 * (chunk + sum(counts.values()))
    every_block = sorted((name, block) for name in names for block in range(blocks[name]))
    assert sorted(block for m in members for block in owned[m]) == every_block

    # Bases from owners, which need not be holders, to the other holders.
    held = {m: {(name, block) for name in names for block in ranks[m]["holdings"][name]} for m in members}
    missing = held[number] - set(owned[number])
    wanted = sum(block in held[m] for m in members if m != number for block in owned[number])
    basis = BASIS_BYTES * width * width
    assert to_holders.dtype == torch.uint8
    assert to_holders.received == basis * len(missing) + HEADER_BYTES * len(members)
    assert to_holders.sent == basis * wanted + HEADER_BYTES * len(members)


@tiers.FULL
def test_the_start_up_table_says_how_many_blocks_were_moved_to_ranks_that_do_not_hold_them():
    found = {}
    for case, (layout, _) in CASES.items():
        ranks = recorded(case)
        for number, rank in enumerate(ranks):
            moved = 0
            for (members, _), names in expected_groups(number, rank["shapes"], layout):
                of_group = [(m, *block) for m in members for block in ranks[m]["owned"] if block[0] in names]
                moved += sum(block not in ranks[m]["holdings"][name] for m, name, block in of_group)
            said = [re.search(r"the busiest has [\d.]+ times .*; (\d+|all) blocks", line) for line in rank["table"]]
            assert sum(int(words[1].replace("all", "0")) for words in said if words) == moved, case
            found[case] = moved
    assert any(found.values()), found
    assert not all(found.values()), found


def test_some_weight_is_cut_and_some_is_not():
    """Otherwise the cases above could not tell holders from others."""
    ranks = recorded("one bucket")
    holders = {name: sum(bool(rank["holdings"][name]) for rank in ranks) for name in ranks[0]["shapes"]}
    assert set(holders.values()) == {1, 2}
