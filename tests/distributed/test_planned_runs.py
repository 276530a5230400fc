"""What tools/plan.py says of a run is what the run's ranks hold and send, to the byte."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from layout_runs import EXPERT_HIDDEN, EXPERTS, HEAD, Layout, Run, global_batch, start

from megatron_dobb import DobbConfig
from megatron_dobb.megatron.dobb.startup_report import rank_costs
from megatron_dobb.methods.dobb.footprint import RankCosts
from testbed import gpt, processes, tiers, traffic
from tools.planning.plan import Request, plan
from tools.planning.sizes import ModelSizes, Parallel
from tools.planning.timing import Rates

HIDDEN, INTERVAL, STEPS = 80, 2, 3
DOBB = DobbConfig(blocks=4, refresh_interval=INTERVAL)
SOME_EXCLUDED = replace(DOBB, exclude=("*.layers.0.mlp.experts.local_experts.[13].linear_fc2",))
"""Half of the experts are otherwise just what the other half is, and so are their shards."""
L2 = replace(DOBB, norm="l2")
OUTPUTS = DobbConfig(
    blocks=16, blocks_for={"*.linear_fc1": 80, "*.linear_fc2": 40}, refresh_interval=INTERVAL, side="output"
)
"""Wider row blocks would pad buffers of this size by more than is allowed."""
STAGGERED = replace(DOBB, stagger=True, moment_transport="bf16")
NOTHING = DobbConfig(norm="l2", source="none", refresh_interval=INTERVAL)
CASES = {
    "DP 4": (Layout(4, micro_batch=6), [DOBB]),
    "DP 4, buckets": (Layout(4, micro_batch=6, bucket_size=30_000), [DOBB]),
    "DP 3": (Layout(3, micro_batch=8), [DOBB]),
    "DP 2 x TP 2": (Layout(4, tensor=2, micro_batch=6), [DOBB]),
    "DP 2 x TP 2, sequence parallel": (
        Layout(4, tensor=2, sequence_parallel=True, micro_batch=6),
        [DOBB, OUTPUTS, replace(OUTPUTS, source="gram")],
    ),
    "DP 2 x CP 2": (Layout(4, context=2, micro_batch=6), [DOBB]),
    "DP 2 x PP 2 x 1 layer, 2 chunks": (Layout(4, pipeline=2, chunks=2, micro_batch=3), [DOBB, STAGGERED]),
    "MoE, DP 4 x EP 2": (Layout(4, micro_batch=6, experts=True, expert=2), [SOME_EXCLUDED]),
    "MoE, DP 4": (Layout(4, micro_batch=6, experts=True), [SOME_EXCLUDED]),
    "MoE, DP 2 x TP 2 x EP 2": (
        Layout(4, tensor=2, sequence_parallel=True, micro_batch=6, experts=True, expert=2, expert_tensor=1),
        [SOME_EXCLUDED, replace(STAGGERED, norm="l2", refresh_interval=3)],
    ),
    "DP 2": (
        Layout(2, micro_batch=12),
        [
            L2,
            NOTHING,
            replace(NOTHING, side="output", block_width=None),
            OUTPUTS,
            replace(OUTPUTS, source="gram"),
            STAGGERED,
        ],
    ),
    "TP 2": (Layout(2, tensor=2, micro_batch=24), [L2, replace(OUTPUTS, norm="l2"), replace(OUTPUTS, source="gram")]),
    "DP 4, 2 instances": (
        Layout(4, micro_batch=6, instances=2),
        [DOBB, replace(OUTPUTS, norm="l2", source="gram"), L2],
    ),
}


def measured(layout, layers, configs):
    """For every config: what this rank holds and hands to collectives, and the figures of its start-up table."""
    start(layout)
    transformer = {"hidden_size": HIDDEN, "num_layers": layers}
    plain = Run(layout, None, transformer)
    calls_of_plain = calls_of_steps(plain)
    return [compared(Run(layout, config, transformer), plain, calls_of_plain) for config in configs]


def compared(run, plain, calls_of_plain):
    """A run with Dobb beside the same with AdamW."""
    calls = calls_of_steps(run)
    state = {
        "momentum": sum(s.momentum.nbytes for dobb in run.dobbs for segments in dobb.segments for s in segments),
        "moments": sum(group.moment.nbytes for group in run.groups),
        "bases": sum(group.basis.nbytes for group in run.groups),
        "sums": sum(4 * group.width**2 * weight.blocks for group in run.groups for weight in group.weights),
    }
    reported = [rank_costs(dobb) for dobb in run.dobbs]
    return {
        "state": state,
        "reported": {name: sum(getattr(costs, name) for costs in reported) for name in state},
        "buffers": [buffer_elements(of) for of in (plain, run)],
        "buffers' bytes": [
            [of_buffers(step, len(of.optimizer.chained_optimizers)) for step in its_calls]
            for of, its_calls in ((plain, calls_of_plain), (run, calls))
        ],
        "more": [more_of(ours, plain) for plain, ours in zip(calls_of_plain, calls, strict=True)],
    }


def calls_of_steps(run):
    found = []
    for step in range(STEPS):
        with traffic.record() as calls:
            gpt.train_step(run.chunks, run.optimizer, global_batch(step), run.layout.micro_batch)
        found.append(calls)
    return found


def more_of(ours, plain):
    """Bytes of the calls that Dobb makes more than AdamW, in the same step from the same weights or routing."""
    mine = dict.fromkeys(
        ("reduced", "to_owners", "from_others", "bases sent", "bases received", "column norms", "others"), 0
    )
    for (name, _, dtype, sent, received), count in (counted(ours) - counted(plain)).items():
        if name == "reduce_scatter_tensor" or (name == "all_to_all_single" and dtype == torch.bfloat16):
            mine["reduced"] += count * sent
        elif name == "all_to_all_single" and dtype == torch.uint8:
            mine["bases sent"] += count * sent
            mine["bases received"] += count * received
        elif name == "all_to_all_single":
            mine["to_owners"] += count * sent
            mine["from_others"] += count * received
        elif name == "all_reduce":
            mine["column norms"] += count * sent
        else:
            mine["others"] += count * (sent + received)
    return mine


def of_buffers(calls, optimizers):
    """Bytes of the calls for the param/grad buffers, which Megatron coalesces.

    Each of several optimizers gathers all parameters unless that overlaps; a plan counts it once.
    """
    handed = {"all_gather_into_tensor": 0, "others": 0}
    for call in calls:
        if call.coalesced is not None:
            handed[call.name if call.name in handed else "others"] += max(call.sent, call.received)
    return handed["others"] + handed["all_gather_into_tensor"] / optimizers


def counted(calls):
    """The calls outside of the param/grad buffers."""
    return Counter((c.name, c.ranks, c.dtype, c.sent, c.received) for c in calls if c.coalesced is None)


def buffer_elements(run):
    """Elements of all param/grad buffers."""
    return sum(
        bucket.grad_data.numel()
        for chunk in run.chunks
        for groups in (chunk.bucket_groups, chunk.expert_parallel_bucket_groups)
        for group in groups
        for bucket in group.buckets
    )


def planned(layout, layers, config):
    """The plan of the same run."""
    experts = {
        "num_experts": EXPERTS,
        "moe_ffn_hidden_size": EXPERT_HIDDEN,
        "moe_shared_ffn": 64,
        "bias": False,
    }
    sizes = ModelSizes(
        layers,
        HIDDEN,
        4,
        kv_channels=HEAD,
        vocab_size=gpt.VOCABULARY,
        make_vocab_size_divisible_by=1,
        max_position_embeddings=gpt.SEQUENCE,
        tied=False,
        transformer_engine=False,
        grouped_experts=False,
        bf16=False,
        **(experts if layout.experts else {}),
    )
    parallel = Parallel(
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        context=layout.context,
        data=layout.data,
        expert=layout.expert,
        expert_tensor=layout.expert_tensor,
        chunks=layout.chunks,
        sequence_parallel=layout.sequence_parallel,
        overlap_grad_reduce=layout.bucket_size is not None,
        bucket_size=layout.bucket_size,
        instances=layout.instances,
    )
    return plan(Request(sizes, parallel, config, Rates()))


def refreshed_on(step, kind, config):
    """What a rank has of the refresh of a step, by the plan."""
    place = step % config.refresh_interval
    if step == 0 or not config.stagger:
        due = kind.refreshes.values() if place == 0 else ()
    else:
        due = [refresh for phase, refresh in kind.refreshes.items() if phase == place]
    return sum((refresh.costs for refresh in due), start=RankCosts())


QUICK = ["DP 3", "DP 2 x TP 2, sequence parallel", "DP 2 x PP 2 x 1 layer, 2 chunks", "MoE, DP 2 x TP 2 x EP 2", "DP 2"]


@pytest.mark.parametrize("case", tiers.quick(CASES, QUICK))
def test_a_plan_says_what_every_rank_of_a_run_holds_and_sends(case):
    layout, configs = CASES[case]
    layers = 4 if layout.chunks > 1 else 2
    ranks = processes.run(layout.world, measured, layout, layers, configs)
    per_stage = layout.world // layout.pipeline
    for place, config in enumerate(configs):
        stages = {number: stage for stage in planned(layout, layers, config) for number in stage.stages}
        for number, rank in enumerate(of_rank[place] for of_rank in ranks):
            if config.stagger and number // layout.expert_tensor % layout.expert:
                continue  # the first expert-parallel rank's experts are planned, and others may have other turns
            stage = stages[number // per_stage]
            kind = stage.rank(number // per_stage, number % per_stage)
            assert [stage.stock_elements, stage.stock_elements + stage.padding] == rank["buffers"], config
            handed = [stage.handed_over(lambda b: b.stock), stage.handed_over(lambda b: b.placed.numel)]
            assert [[bytes_of_step] * STEPS for bytes_of_step in handed] == rank["buffers' bytes"], config
            state = {name: getattr(kind.costs, name) for name in rank["state"]}
            assert state == rank["state"] == rank["reported"], config
            for step, more in enumerate(rank["more"]):
                costs = refreshed_on(step, kind, config)
                expected = {
                    "reduced": costs.reduced,
                    "to_owners": costs.to_owners,
                    "from_others": costs.from_others,
                    "bases sent": costs.to_holders + costs.counts,
                    "bases received": costs.from_owners + costs.counts,
                    "column norms": stage.column_norms,
                    "others": 0,
                }
                if layout.experts and step:  # once the weights differ, so do the tokens that travel between experts
                    del expected["to_owners"], expected["from_others"], expected["others"]
                assert {name: more[name] for name in expected} == expected, (config, step)


def test_some_case_pads_and_some_weight_is_cut():
    """Otherwise the equalities above would say little."""
    (stage,) = planned(CASES["DP 3"][0], 2, DOBB)
    assert stage.padding > 0
    costs = [stage.rank(0, rank).costs for rank in range(3)]
    assert len({each.state for each in costs}) > 1
    assert all(each.to_holders or each.from_owners for each in costs)


def test_staggered_steps_differ_and_each_variant_sends_what_others_do_not():
    (stage,) = planned(CASES["DP 2"][0], 2, STAGGERED)
    refreshes = stage.rank(0, 0).refreshes
    assert len({refresh.costs.refresh for refresh in refreshes.values()}) == INTERVAL
    (row_blocks,) = planned(CASES["DP 2"][0], 2, OUTPUTS)
    assert row_blocks.padding > 0
    (over_tensor,) = planned(CASES["TP 2"][0], 2, replace(OUTPUTS, norm="l2"))
    assert over_tensor.column_norms > 0
