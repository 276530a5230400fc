"""Which weights of real Megatron models Dobb takes, and why AdamW gets the others."""

from fnmatch import fnmatchcase

import pytest
import torch

import testbed

testbed.enable()

from megatron.core.models.gpt import GPTModel  # noqa: E402  (Megatron is imported after the patches)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

from megatron_dobb.config import DobbConfig  # noqa: E402
from megatron_dobb.megatron.manage import manage  # noqa: E402
from testbed import gpt, processes  # noqa: E402

DENSE = ["self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2"]


def plan_of(spec=None, settings=None, tied=False, **transformer):
    """Manage a two-layer GPT of width 32; returns what can be pickled of the plan."""
    gpt.initialize()
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True, **transformer
    )
    layer = get_gpt_layer_local_spec(**(spec or {}))
    model = GPTModel(config, layer, gpt.VOCABULARY, gpt.SEQUENCE, share_embeddings_and_output_weights=tied)
    plan = manage(model, settings or DobbConfig(blocks=4))
    geometries = {weight.name: weight.geometry for weight in plan.managed}
    shapes = {weight.name: tuple(weight.parameter.shape) for weight in plan.managed}
    reasons = {reason: number for (reason, what), number in plan.adamw.items() if what == "parameters"}
    total = sum(p.numel() for p in model.parameters())
    on_adamw = sum(number for (_, what), number in plan.adamw.items() if what == "elements")
    assert sum(weight.parameter.numel() for weight in plan.managed) + on_adamw == total
    return geometries, shapes, reasons


def in_a_rank(*args, **kwargs):
    return processes.run(1, lambda: plan_of(*args, **kwargs))[0]


def layers(*modules):
    return {f"decoder.layers.{layer}.{module}.weight" for layer in range(2) for module in modules}


def test_the_matrices_of_a_dense_gpt_are_on_dobb_and_nothing_else_is():
    geometries, shapes, reasons = in_a_rank()
    assert geometries.keys() == layers(*DENSE)
    assert {name: (g.rows, g.columns) for name, g in geometries.items()} == shapes
    assert reasons == {
        "embedding or output layer": 2,
        "no adapter for Embedding": 1,  # learned positions
        "not a matrix (norms, biases)": 2 * (4 + 4) + 2,
    }


def test_a_tied_embedding_is_one_parameter_on_adamw():
    geometries, _, reasons = in_a_rank(tied=True)
    assert geometries.keys() == layers(*DENSE)
    assert reasons["embedding or output layer"] == 1


def test_routed_experts_and_routers_go_to_adamw_and_shared_experts_to_dobb():
    geometries, _, reasons = in_a_rank(
        spec={"num_experts": 2, "moe_grouped_gemm": False},
        num_moe_experts=2,
        moe_shared_expert_intermediate_size=64,
        add_bias_linear=False,
    )
    shared = ["mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"]
    assert geometries.keys() == layers(*DENSE[:2], *shared)
    assert reasons["expert weights"] == 2 * 2 * 2
    assert reasons["no adapter for TopKRouter"] == 2


def test_layers_that_are_not_megatrons_go_to_adamw_by_name():
    def plan():
        gpt.initialize()
        model = gpt.build().module
        model.probe = torch.nn.Linear(32, 3, bias=False)
        return manage(model, DobbConfig(blocks=4)).adamw["no adapter for Linear", "parameters"]

    assert processes.run(1, plan) == [1]


@pytest.mark.parametrize("pattern", ["*.mlp.linear_fc2", "decoder.layers.1.*", "*.self_attention.*"])
def test_patterns_mean_names_of_the_whole_model(pattern):
    geometries, _, reasons = in_a_rank(settings=DobbConfig(blocks=4, exclude=(pattern,)))
    hit = {name for name in layers(*DENSE) if fnmatchcase(name.removesuffix(".weight"), pattern)}
    assert geometries.keys() == layers(*DENSE) - hit
    assert reasons["excluded by --dobb-exclude"] == len(hit)
