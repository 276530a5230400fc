"""What tools/plan.py says of a run is what the run's ranks hold and send, to the byte."""

from collections import Counter

import pytest
import torch
from layout_runs import EXPERT_HIDDEN, EXPERTS, HEAD, Layout, Run, global_batch, start

from megatron_dobb import DobbConfig
from megatron_dobb.megatron.report import rank_costs
from testbed import gpt, processes, traffic
from tools.planning.plan import Request, plan
from tools.planning.sizes import ModelSizes, Parallel
from tools.planning.timing import Rates

BLOCKS, HIDDEN, INTERVAL, STEPS = 4, 80, 2, 3
CONFIG = DobbConfig(blocks=BLOCKS, refresh_interval=INTERVAL)
SOME_EXCLUDED = DobbConfig(
    blocks=BLOCKS, refresh_interval=INTERVAL, exclude=("*.layers.0.mlp.experts.local_experts.[13].linear_fc2",)
)
"""Half of the experts are otherwise just what the other half is, and so are their shards."""
CASES = {
    "DP 4": Layout(4, micro_batch=6),
    "DP 4, buckets": Layout(4, micro_batch=6, bucket_size=30_000),
    "DP 3": Layout(3, micro_batch=8),
    "DP 2 x TP 2": Layout(4, tensor=2, micro_batch=6),
    "DP 2 x TP 2, sequence parallel": Layout(4, tensor=2, sequence_parallel=True, micro_batch=6),
    "DP 2 x CP 2": Layout(4, context=2, micro_batch=6),
    "DP 2 x PP 2": Layout(4, pipeline=2, micro_batch=6),
    "DP 2 x PP 2 x 1 layer, 2 chunks": Layout(4, pipeline=2, chunks=2, micro_batch=3),
    "MoE, DP 4 x EP 2": Layout(4, micro_batch=6, experts=True, expert=2),
    "MoE, DP 4": Layout(4, micro_batch=6, experts=True),
    "MoE, DP 2 x TP 2 x EP 2": Layout(
        4, tensor=2, sequence_parallel=True, micro_batch=6, experts=True, expert=2, expert_tensor=1
    ),
}


def config_of(layout):
    return SOME_EXCLUDED if layout.experts else CONFIG


def measured(layout, layers):
    """What this rank holds and hands to collectives, and the figures of its start-up table."""
    start(layout)
    transformer = {"hidden_size": HIDDEN, "num_layers": layers}
    plain = Run(layout, None, transformer)
    run = Run(layout, config_of(layout), transformer)
    calls = [calls_of_steps(of) for of in (plain, run)]
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
        # Once the weights differ, so do the tokens that experts get.
        "more": [more_of(ours, plain) for plain, ours in zip(*calls, strict=True)][: 1 if layout.experts else None],
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
    mine = {"reduced": 0, "to_owners": 0, "from_others": 0, "bases sent": 0, "bases received": 0, "others": 0}
    for (name, _, dtype, sent, received), count in (counted(ours) - counted(plain)).items():
        if name == "reduce_scatter_tensor":
            mine["reduced"] += count * sent
        elif name == "all_to_all_single" and dtype == torch.uint8:
            mine["bases sent"] += count * sent
            mine["bases received"] += count * received
        elif name == "all_to_all_single":
            mine["to_owners"] += count * sent
            mine["from_others"] += count * received
        else:
            mine["others"] += count * (sent + received)
    return mine


def counted(calls):
    """The calls outside of the param/grad buffers, which Megatron coalesces; their sizes are compared apart."""
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


def planned(layout, layers):
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
    )
    return plan(Request(sizes, parallel, config_of(layout), Rates()))


@pytest.mark.parametrize("case", CASES)
def test_a_plan_says_what_every_rank_of_a_run_holds_and_sends(case):
    layout = CASES[case]
    layers = 4 if layout.chunks > 1 else 2
    ranks = processes.run(layout.world, measured, layout, layers)
    stages = {number: stage for stage in planned(layout, layers) for number in stage.stages}
    per_stage = layout.world // layout.pipeline
    for number, rank in enumerate(ranks):
        stage = stages[number // per_stage]
        costs = stage.costs[number % per_stage]
        plain, ours = rank["buffers"]
        assert (stage.stock_elements, stage.stock_elements + stage.padding) == (plain, ours)
        state = {name: getattr(costs, name) for name in rank["state"]}
        assert state == rank["state"] == rank["reported"]
        for step, more in enumerate(rank["more"]):
            expected = {
                "reduced": costs.reduced,
                "to_owners": costs.to_owners,
                "from_others": costs.from_others,
                "bases sent": costs.to_holders + costs.counts,
                "bases received": costs.from_owners + costs.counts,
            }
            assert more == (expected if step % INTERVAL == 0 else dict.fromkeys(expected, 0)) | {"others": 0}


def test_some_case_pads_and_some_weight_is_cut():
    """Otherwise the equalities above would say little."""
    (stage,) = planned(CASES["DP 3"], 2)
    assert stage.padding > 0
    assert len({costs.state for costs in stage.costs}) > 1
    assert all(costs.to_holders or costs.from_owners for costs in stage.costs)
