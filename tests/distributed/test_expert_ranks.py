"""Experts train the same on every layout: expert parallelism, the experts' tensor parallelism, any routing.

A small mixture of experts with a shared expert, in fp32. One expert never gets a token, another gets one of each
global batch.
"""

import functools

import flips
import pytest
import torch
from expert_runs import (
    BLOCKS,
    EXPERTS,
    HIDDEN,
    LEARNING_RATE,
    NEVER,
    ONE_TOKEN,
    SEQUENCES,
    WEIGHT_DECAY,
    ExpertLayout,
    float64_moments,
    join_gradient,
    merge,
    train,
)
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from whole_model import is_expert

from megatron_dobb import DobbConfig
from megatron_dobb.megatron.seam import patches
from testbed import gpt, processes, tiers

STEPS, BETA, MOMENTUM, UPDATE_SCALE = 4, 0.9, 0.95, 0.2
TOLERANCE = 1e-5
STEP_TOLERANCE = 1e-3
"""Of an entry of a weight after a step, as a fraction of the step along one basis vector: fp32 rounds the weight
itself, of about 0.5, to 3e-8, and a step is 4e-4. The largest found is 4e-4."""

LAYOUTS = [
    ExpertLayout(),
    ExpertLayout(2),
    ExpertLayout(2, expert=2),
    ExpertLayout(4, expert=2, micro_batch=1),
    ExpertLayout(2, tensor=2, expert_tensor=2),
    ExpertLayout(2, tensor=2, expert_tensor=1),
    ExpertLayout(4, tensor=2, expert=2, expert_tensor=1),
    ExpertLayout(4, tensor=2, expert=2, expert_tensor=2),
]
every_layout = pytest.mark.parametrize("layout", tiers.quick(LAYOUTS, [LAYOUTS[1], LAYOUTS[2], LAYOUTS[6]]), ids=str)
CONFIG = DobbConfig(
    blocks=BLOCKS,
    refresh_interval=2,
    capture="all",
    momentum=MOMENTUM,
    moment_beta=BETA,
    update_scale=UPDATE_SCALE,
    basis_dtype="fp32",
)


@functools.cache
def exact_moments(sequences):
    return processes.run(1, float64_moments, "uneven", sequences)[0]


@functools.cache
def recorded(layout):
    return processes.run(layout.world, train, layout, CONFIG, STEPS, "uneven")


def stack(blocks, name):
    return torch.stack([blocks[name, block] for block in range(BLOCKS)]).double()


def expert(number, name):
    return f".local_experts.{number}." in name


def assert_first_moments(ranks, exact):
    """After the first refresh every block is the moving average's first term, `(1 - beta) total / tokens`."""
    found = merge([rank["moments"][0] for rank in ranks])
    names = {name for name, _ in found}
    assert len(found) == BLOCKS * len(names)
    assert names >= exact.keys()
    for name in names:
        if expert(NEVER, name):
            assert not stack(found, name).any()
            continue
        total, tokens = exact[name]
        assert tokens == 1 if expert(ONE_TOKEN, name) else tokens > 1
        expected = (1 - BETA) * total / tokens
        error = (stack(found, name) - expected).abs().amax((1, 2)) / expected.abs().amax((1, 2))
        assert error.max() <= TOLERANCE, name


@every_layout
def test_first_refresh_takes_the_tokens_of_every_expert_to_their_float64_moment(layout):
    assert_first_moments(recorded(layout), exact_moments(SEQUENCES))


@pytest.mark.parametrize("layout", [ExpertLayout(2), ExpertLayout(2, expert=2)], ids=str)
@pytest.mark.parametrize(("wanted", "of_experts"), [(3, 4), (5, 8)])
def test_experts_are_captured_from_whole_micro_batches_and_other_layers_from_the_sequences_asked_for(
    layout, wanted, of_experts
):
    config = DobbConfig(blocks=BLOCKS, capture_sequences=wanted, moment_beta=BETA, basis_dtype="fp32")
    ranks = processes.run(layout.world, train, layout, config, 1, "uneven")
    dense, routed = exact_moments(wanted), exact_moments(of_experts)
    assert_first_moments(ranks, {name: routed[name] if is_expert(name) else dense[name] for name in routed})


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
        {"recompute_granularity": "selective", "recompute_modules": ["shared_experts"]},
    ],
    ids=["full", "moe", "shared_experts"],
)
def test_recomputed_experts_are_captured_once(recompute):
    layout = ExpertLayout(2, expert=2)
    ranks = processes.run(2, functools.partial(train, layout, CONFIG, 1, "uneven", **recompute))
    exact = exact_moments(SEQUENCES)
    assert_first_moments(ranks, exact)
    for name, (_, tokens) in exact.items():  # twice the tokens would have the same mean
        assert sum(rank["tokens"].get(name, 0) for rank in ranks) == tokens


@every_layout
def test_the_experts_of_a_rank_are_summed_over_the_ranks_that_hold_the_same_experts(layout):
    ranks = recorded(layout)
    separate = layout.expert > 1 or layout.expert_tensor != layout.tensor
    assert {rank["optimizers"] for rank in ranks} == {2 if separate else 1}
    experts_per_rank = EXPERTS // layout.expert
    owners = [name for rank in ranks for name in {n for n, _ in rank["weights"][0].items() if is_expert(n)}]
    assert {owners.count(name) for name in owners} == {layout.world // layout.expert}
    for rank in ranks:
        held = {name.split(".local_experts.")[1][0] for name in rank["weights"][0] if is_expert(name)}
        assert len(held) == experts_per_rank


@every_layout
def test_weights_follow_the_float64_computation_but_for_listed_flips(layout):
    ranks = recorded(layout)
    weights = [merge([rank["weights"][step] for rank in ranks]) for step in range(STEPS + 1)]
    assert len(weights[0]) == 2 * (2 + 2 + 2 * EXPERTS)
    found = []
    for name, start in weights[0].items():
        momentum = torch.zeros_like(start, dtype=torch.float64)
        rows, columns = start.shape
        length = LEARNING_RATE * UPDATE_SCALE * (max(rows, columns) / rows) ** 0.5
        for step in range(STEPS):
            gradient = join_gradient(ranks, step, name, start.shape).double()
            momentum = MOMENTUM * momentum + (1 - MOMENTUM) * gradient
            basis = stack(merge([rank["bases"][step] for rank in ranks]), name)
            eye = torch.eye(basis.shape[1], dtype=torch.float64)
            assert (basis.mT @ basis - eye).abs().max() <= 1e-5
            coefficients = flips.coefficients(momentum, basis)
            expected = (1 - LEARNING_RATE * WEIGHT_DECAY) * weights[step][name].double()
            expected -= length * flips.directions(coefficients.sign(), basis)
            new, _ = flips.find(
                weights[step + 1][name].double() - expected,
                coefficients,
                basis,
                step_size=length,
                tolerance=STEP_TOLERANCE * length,
                name=name,
                step=step,
            )
            # The gradient of a single token is the outer product with it: all else is rounding, whatever its sign.
            found += [flip for flip in new if not expert(ONE_TOKEN, name)]
            if expert(NEVER, name):
                assert not gradient.any()
                assert torch.equal(basis, eye.expand_as(basis))
    assert len(found) <= 3


@every_layout
def test_later_moments_follow_the_float64_moving_average_of_what_the_layers_were_given(layout):
    ranks = recorded(layout)
    for name in {name for name, _ in merge([rank["moments"][0] for rank in ranks]) if is_expert(name)}:
        average = 0.0
        for step in range(0, STEPS, CONFIG.refresh_interval):
            x = expert_tokens(ranks, step, name)
            if len(x):
                blocks = x.view(len(x), BLOCKS, -1)
                average = BETA * average + (1 - BETA) * torch.einsum("tjc,tjd->jcd", blocks, blocks) / len(x)
            found = stack(merge([rank["moments"][step] for rank in ranks]), name)
            assert (found - average).abs().max() <= TOLERANCE * max(1e-30, float(torch.as_tensor(average).abs().max()))


def expert_tokens(ranks, step, name):
    """`[tokens, n]` of an expert: ranks of one data-parallel group add tokens, tensor-parallel ranks add columns."""
    holders = [rank for rank in ranks if name in rank["weights"][0]]
    groups = {tuple(rank["expert_ranks"]) for rank in holders}
    parts = [
        torch.cat([x for number in group for x in ranks[number]["inputs"][step].get(name, ())]).double()
        for group in sorted(groups)
    ]
    return torch.cat(parts, dim=1) if name.endswith("linear_fc2.weight") else parts[0]


@pytest.mark.parametrize("layout", [ExpertLayout(2, expert=2), ExpertLayout(4, expert=4, micro_batch=1)], ids=str)
def test_all_tokens_to_one_expert_leave_the_others_alone_and_every_rank_in_step(layout):
    ranks = processes.run(layout.world, train, layout, CONFIG, 3, "one")
    idle = 2 * 2 * BLOCKS * (EXPERTS // layout.expert)  # two layers, two matrices, blocks, experts of a rank
    busy = 2 * 2 * BLOCKS
    assert [rank["skipped"][-1] for rank in ranks] == [2 * (idle - busy)] + [2 * idle] * (layout.world - 1)
    for step in range(3):
        for name, block in merge([rank["bases"][step] for rank in ranks]):
            if is_expert(name):
                basis = stack(merge([rank["bases"][step] for rank in ranks]), name)[block]
                assert torch.equal(basis, torch.eye(len(basis)).double()) != expert(0, name)


@pytest.mark.parametrize("layout", [ExpertLayout(2, expert=2), ExpertLayout(4, expert=2, micro_batch=1)], ids=str)
def test_a_rank_makes_the_same_moment_collectives_whatever_tokens_its_experts_got(layout):
    def collectives(routing):
        ranks = processes.run(layout.world, train, layout, CONFIG, 3, routing)
        return [[call for step in rank["refreshes"] for call in step] for rank in ranks]

    usual, *others = [collectives(routing) for routing in ("router", "uneven", "one")]
    assert all(usual)
    for other in others:
        assert other == usual


def test_a_pipeline_stage_without_experts_builds_its_optimizers_with_the_others():
    def expert_weights():
        gpt.initialize(pipeline_model_parallel_size=2, expert_model_parallel_size=2)
        patches.configure(CONFIG)
        config = TransformerConfig(
            num_layers=2,
            hidden_size=HIDDEN,
            num_attention_heads=4,
            pipeline_model_parallel_size=2,
            pipeline_dtype=torch.float32,
            expert_model_parallel_size=2,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            num_moe_experts=EXPERTS,
            moe_layer_freq=[0, 1],
            moe_ffn_hidden_size=HIDDEN,
            moe_token_dispatcher_type="alltoall",
            add_bias_linear=False,
        )
        first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
        model = GPTModel(config, spec, gpt.VOCABULARY, gpt.SEQUENCE, pre_process=first, post_process=last)
        model = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)
        settings = OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=True)
        settings.dobb = CONFIG
        built = get_megatron_optimizer(settings, [model]).chained_optimizers
        return sum(len(group.weights) for group in built[1].refresh_groups)

    assert processes.run(4, expert_weights) == [0, 0, EXPERTS, EXPERTS]
