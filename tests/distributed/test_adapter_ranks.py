"""Adapters on real Megatron layers: the captured tensor is the one that multiplies the weight, on every layout."""

import pytest
import torch
from torch import nn

import megatron_dobb
import testbed

testbed.enable()
megatron_dobb.install()

from megatron.core import parallel_state  # noqa: E402  (Megatron is imported after the patches)
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

from megatron_dobb.megatron.dobb.select_weights import select_weights  # noqa: E402
from megatron_dobb.megatron.model.adapters import SEQUENCE_DIM, Adapter, GlobalShape, find, register  # noqa: E402
from megatron_dobb.megatron.seam import patches  # noqa: E402
from megatron_dobb.methods.dobb.capture import Capture, Source  # noqa: E402
from megatron_dobb.methods.dobb.settings import DobbConfig  # noqa: E402
from testbed import gpt, processes  # noqa: E402

LENGTH, BATCH, INPUTS, OUTPUTS, WIDTH = 6, 2, 16, 12, 4
LAYOUTS = pytest.mark.parametrize(
    ("tensor", "sequence_parallel", "by_keyword"),
    [
        pytest.param(1, False, False, id="tp1"),
        pytest.param(1, False, True, id="input-by-keyword"),
        pytest.param(2, False, False, id="tp2"),
        pytest.param(2, True, False, id="tp2-sp"),
    ],
)


def full_input():
    """`[LENGTH, BATCH, INPUTS]`, the same on every layout."""
    return torch.randn(LENGTH, BATCH, INPUTS, generator=torch.Generator().manual_seed(0))


def true_moment():
    """`sum x_j x_j^T` of the full input, in float64."""
    blocks = full_input().double().view(-1, INPUTS // WIDTH, WIDTH)
    return torch.einsum("tjc,tjd->jcd", blocks, blocks)


def call_layer(
    kind, tensor, sequence_parallel, *, explicit_expert_comm=False, by_keyword=False, input_is_parallel=True
):
    """One forward of a layer on its rank; returns all that a test may want to see of it."""
    gpt.initialize(tensor_model_parallel_size=tensor)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=INPUTS,
        num_attention_heads=4,
        tensor_model_parallel_size=tensor,
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    common = {"config": config, "init_method": nn.init.normal_, "bias": True, "skip_bias_add": False}
    if kind == "column":
        layer = ColumnParallelLinear(INPUTS, OUTPUTS, gather_output=False, **common)
        layer.explicit_expert_comm = explicit_expert_comm
    else:
        layer = RowParallelLinear(INPUTS, OUTPUTS, input_is_parallel=input_is_parallel, **common)
    nn.init.normal_(layer.bias)
    rank = parallel_state.get_tensor_model_parallel_rank()
    x = full_input()
    if kind == "row" and input_is_parallel:
        x = x.chunk(tensor, dim=-1)[rank]
    elif kind == "column" and sequence_parallel and not explicit_expert_comm:
        x = x.chunk(tensor, dim=0)[rank]
    adapter = find(layer)
    seen = []

    def activation(module, args, kwargs):
        seen.append(adapter.activation(module, args, kwargs, "weight"))
        return seen[-1]

    capture = Capture(layer, [Source("w", layer, WIDTH, activation, SEQUENCE_DIM)], None)
    capture.begin(armed=True)
    output, _ = layer(input_=x) if by_keyword else layer(x)
    entry = capture.take()["w"]
    return {
        "geometry": adapter.geometry(layer),
        "seen": seen[0],
        "total": entry.total,
        "tokens": entry.tokens,
        "weight": layer.weight.detach(),
        "bias": layer.bias.detach(),
        "output": output.detach(),
    }


def close(actual, expected):
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@LAYOUTS
def test_column_parallel_layers_are_captured_with_all_their_columns(tensor, sequence_parallel, by_keyword):
    ranks = processes.run(tensor, lambda: call_layer("column", tensor, sequence_parallel, by_keyword=by_keyword))
    sharded = sequence_parallel
    for rank in ranks:
        assert rank["geometry"] == GlobalShape(
            OUTPUTS, INPUTS, column_shards=1, tokens_over_tp=sharded, outputs_over_tp=False
        )
    parts = ranks if sharded else ranks[:1]
    multiplied = torch.cat([rank["seen"] for rank in parts], dim=0).double()
    for rank in ranks:
        close(rank["output"], multiplied @ rank["weight"].double().T + rank["bias"].double())
        if not sharded:
            assert torch.equal(rank["total"], ranks[0]["total"])
    close(sum(rank["total"].double() for rank in parts), true_moment())
    assert sum(rank["tokens"] for rank in parts) == LENGTH * BATCH


@LAYOUTS
def test_row_parallel_layers_are_captured_with_the_blocks_of_their_rank(tensor, sequence_parallel, by_keyword):
    ranks = processes.run(tensor, lambda: call_layer("row", tensor, sequence_parallel, by_keyword=by_keyword))
    product = sum(rank["seen"].double() @ rank["weight"].double().T for rank in ranks)
    output = torch.cat([rank["output"] for rank in ranks], dim=0) if sequence_parallel else ranks[0]["output"]
    close(output, product + ranks[0]["bias"].double())
    for rank, expected in zip(ranks, true_moment().chunk(tensor), strict=True):
        assert rank["geometry"] == GlobalShape(
            OUTPUTS, INPUTS, column_shards=tensor, tokens_over_tp=False, outputs_over_tp=sequence_parallel
        )
        close(rank["total"], expected)
        assert rank["tokens"] == LENGTH * BATCH


def test_a_column_parallel_layer_whose_sequence_somebody_else_gathers_holds_all_tokens():
    """Megatron sets this on shared experts with `--moe-shared-expert-overlap`."""
    ranks = processes.run(2, lambda: call_layer("column", 2, True, explicit_expert_comm=True))
    for rank in ranks:
        assert rank["geometry"] == GlobalShape(
            OUTPUTS, INPUTS, column_shards=1, tokens_over_tp=False, outputs_over_tp=False
        )
        close(rank["output"], rank["seen"].double() @ rank["weight"].double().T + rank["bias"].double())
        close(rank["total"], true_moment())


@pytest.mark.parametrize("tensor", [1, 2])
def test_row_parallel_layers_that_scatter_their_own_input_are_captured_after_that(tensor):
    ranks = processes.run(tensor, lambda: call_layer("row", tensor, False, input_is_parallel=False))
    for rank, expected in zip(ranks, true_moment().chunk(tensor), strict=True):
        product = sum(other["seen"].double() @ other["weight"].double().T for other in ranks)
        close(rank["output"], product + rank["bias"].double())
        close(rank["total"], expected)
        assert rank["tokens"] == LENGTH * BATCH


# Weights that tensor parallelism replicates.


class Replicated(nn.Linear):
    """The whole weight on every tensor-parallel rank, as in TELinear's mode "duplicated"."""


class ReplicatedAdapter(Adapter):
    layer = f"{__name__}:Replicated"

    def geometry(self, module):
        return GlobalShape(module.out_features, module.in_features, 1, False, replicated=True)

    def activation(self, module, args, kwargs, name):
        return args[0]


def train_replicated():
    """One step on tokens that differ a little between tensor-parallel ranks, as rounding would make them differ."""
    gpt.initialize(tensor_model_parallel_size=2)
    register(ReplicatedAdapter())
    patches.configure(REPLICATED)
    config = TransformerConfig(num_layers=1, hidden_size=INPUTS, num_attention_heads=4, tensor_model_parallel_size=2)
    layer = nn.ModuleDict({"fc": Replicated(INPUTS, OUTPUTS, bias=False)})
    layer.forward = lambda x: layer["fc"](x)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), layer)
    settings = OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=True)
    settings.dobb = REPLICATED
    optimizer = get_megatron_optimizer(settings, [model])
    optimizer.zero_grad()
    x = full_input() + 1e-3 * parallel_state.get_tensor_model_parallel_rank() * full_input().flip(0)
    model(x).square().sum().backward()
    model.finish_grad_sync()
    optimizer.step()
    (group,) = optimizer.chained_optimizers[0].refresh_groups
    return {"x": x, "ranks": group.ranks, "moment": group.moment, "owned": group.owned, "basis": group.basis}


REPLICATED = DobbConfig(block_width=WIDTH, basis_dtype="fp32", moment_beta=0.0)


@pytest.mark.parametrize("data", [1, 2])
def test_copies_of_a_replicated_weight_share_one_moment_of_all_their_tokens_and_one_basis(data):
    ranks = processes.run(2 * data, train_replicated)
    blocks = torch.cat([rank["x"] for rank in ranks]).double().view(-1, INPUTS // WIDTH, WIDTH)
    exact = torch.einsum("tjc,tjd->jcd", blocks, blocks) / len(blocks)
    owned = {block: rank["moment"][i] for rank in ranks for i, (_, block) in enumerate(rank["owned"])}
    assert {rank["ranks"] for rank in ranks} == {2 * data}
    assert sum(len(rank["owned"]) for rank in ranks) == len(owned) == len(exact)
    for block, moment in owned.items():
        close(moment, exact[block])
    for rank, other in zip(ranks[::2], ranks[1::2], strict=True):  # tensor-parallel ranks; they hold the same shard
        assert torch.equal(rank["basis"], other["basis"])
        assert not torch.equal(rank["basis"], torch.eye(WIDTH).expand_as(rank["basis"]))


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_shape_and_blocks_of_every_weight_are_those_of_the_whole_model(tensor):
    def plan():
        gpt.initialize(tensor_model_parallel_size=tensor)
        model = gpt.build().module
        return {
            w.name: (w.geometry.rows, w.geometry.columns, w.width) for w in select_weights(model, DobbConfig()).managed
        }

    expected = {
        f"decoder.layers.{layer}.{name}.weight": shape
        for layer in range(2)
        for name, shape in {
            "self_attention.linear_qkv": (96, 32, 2),
            "self_attention.linear_proj": (32, 32, 2),
            "mlp.linear_fc1": (128, 32, 2),
            "mlp.linear_fc2": (32, 128, 8),
        }.items()
    }
    assert processes.run(tensor, plan) == [expected] * tensor


def test_layers_of_pipeline_stages_have_the_names_of_the_whole_model():
    def names():
        gpt.initialize(pipeline_model_parallel_size=2)
        config = TransformerConfig(
            num_layers=4,
            hidden_size=32,
            num_attention_heads=4,
            pipeline_model_parallel_size=2,
            pipeline_dtype=torch.float32,
            use_cpu_initialization=True,
        )
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            gpt.VOCABULARY,
            gpt.SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        )
        return [w.name.split(".")[2] for w in select_weights(model, DobbConfig(blocks=4)).managed]

    first, second = processes.run(2, names)
    assert (set(first), set(second)) == ({"0", "1"}, {"2", "3"})
