"""Which weights of real Megatron models Dobb takes, and why AdamW gets the others."""

from fnmatch import fnmatchcase

import pytest
import torch

import testbed

testbed.enable()

from megatron.core.models.gpt import GPTModel  # noqa: E402  (Megatron is imported after the patches)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from megatron.core.transformer import MLATransformerConfig, TransformerConfig  # noqa: E402

from megatron_dobb.megatron.dobb.select_weights import select_weights  # noqa: E402
from megatron_dobb.megatron.model.adapters import REGISTRY, find  # noqa: E402
from megatron_dobb.methods.dobb.settings import DobbConfig  # noqa: E402
from testbed import gpt, processes  # noqa: E402
from testbed.attention import PlainAttention  # noqa: E402

DENSE = ["self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2"]


def plan_of(spec=None, settings=None, tied=False, config_class=TransformerConfig, **transformer):
    """Manage a two-layer GPT of width 32; returns what can be pickled of the plan."""
    gpt.initialize()
    config = config_class(
        num_layers=2, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True, **transformer
    )
    layer = get_gpt_layer_local_spec(**(spec or {}))
    if config_class is MLATransformerConfig:
        layer.submodules.self_attention.submodules.core_attention = PlainAttention
    model = GPTModel(config, layer, gpt.VOCABULARY, gpt.SEQUENCE, share_embeddings_and_output_weights=tied)
    plan = select_weights(model, settings or DobbConfig(blocks=4))
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


def test_experts_and_shared_experts_are_on_dobb_and_routers_on_adamw():
    geometries, _, reasons = in_a_rank(
        spec={"num_experts": 2, "moe_grouped_gemm": False},
        num_moe_experts=2,
        moe_shared_expert_intermediate_size=64,
        add_bias_linear=False,
    )
    modules = ["mlp.shared_experts", "mlp.experts.local_experts.0", "mlp.experts.local_experts.1"]
    expected = [f"{module}.{linear}" for module in modules for linear in ("linear_fc1", "linear_fc2")]
    assert geometries.keys() == layers(*DENSE[:2], *expected)
    assert reasons["no adapter for TopKRouter"] == 2


def test_every_projection_of_latent_attention_is_on_dobb():
    geometries, shapes, _ = in_a_rank(
        spec={"multi_latent_attention": True},
        config_class=MLATransformerConfig,
        multi_latent_attention=True,
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_head_dim=8,
        qk_pos_emb_head_dim=8,
        v_head_dim=8,
    )
    projections = ["linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj"]
    assert geometries.keys() == layers(*(f"self_attention.{p}" for p in projections), *DENSE[2:])
    assert {name: (g.rows, g.columns) for name, g in geometries.items()} == shapes


def test_megatrons_wrappers_of_transformer_engine_do_no_harm_where_it_is_not_installed():
    """They are mocks then, or None, which `isinstance` does not take."""
    from megatron.core.extensions import transformer_engine

    if transformer_engine.HAVE_TE:
        pytest.skip("Transformer Engine is installed")
    ours = [adapter for adapter in REGISTRY if "transformer_engine" in adapter.layer]
    assert len(ours) == 6
    assert not any(adapter.layer_class() for adapter in ours)
    assert find(torch.nn.Linear(2, 2)) is None


def test_mamba_projections_are_on_dobb_and_its_convolution_on_adamw(monkeypatch):
    """The mixer is Megatron's own; its kernels, which need a GPU, are never called."""
    from megatron.core.ssm import mamba_context_parallel, mamba_mixer

    monkeypatch.setattr(mamba_context_parallel, "HAVE_EINOPS", True)
    monkeypatch.setattr(mamba_mixer, "HAVE_MAMBA_SSM", True)
    monkeypatch.setattr(mamba_mixer, "HAVE_EINOPS", True)
    monkeypatch.setattr(mamba_mixer, "ExtendedRMSNorm", lambda *args, **kwargs: torch.nn.LayerNorm(64))

    def plan():
        gpt.initialize()
        config = TransformerConfig(
            num_layers=1,
            hidden_size=32,
            num_attention_heads=4,
            use_cpu_initialization=True,
            mamba_state_dim=8,
            mamba_head_dim=16,
            mamba_num_groups=2,
        )
        mixer = mamba_mixer.MambaMixer(
            config,
            mamba_mixer.MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
            d_model=32,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"]),
        )
        found = select_weights(torch.nn.ModuleDict({"mixer": mixer}), DobbConfig(blocks=4))
        shapes = {weight.name: (weight.geometry.rows, weight.geometry.columns) for weight in found.managed}
        return shapes, found.adamw["more than two dimensions", "parameters"]

    inner, state, heads = 64, 2 * 2 * 8, 4
    expected = {"mixer.in_proj.weight": (2 * inner + state + heads, 32), "mixer.out_proj.weight": (32, inner)}
    assert processes.run(1, plan) == [(expected, 1)]


def test_layers_that_are_not_megatrons_go_to_adamw_by_name():
    def plan():
        gpt.initialize()
        model = gpt.build().module
        model.probe = torch.nn.Linear(32, 3, bias=False)
        return select_weights(model, DobbConfig(blocks=4)).adamw["no adapter for Linear", "parameters"]

    assert processes.run(1, plan) == [1]


@pytest.mark.parametrize("pattern", ["*.mlp.linear_fc2", "decoder.layers.1.*", "*.self_attention.*"])
def test_patterns_mean_names_of_the_whole_model(pattern):
    geometries, _, reasons = in_a_rank(settings=DobbConfig(blocks=4, exclude=(pattern,)))
    hit = {name for name in layers(*DENSE) if fnmatchcase(name.removesuffix(".weight"), pattern)}
    assert geometries.keys() == layers(*DENSE) - hit
    assert reasons["excluded by --dobb-exclude"] == len(hit)
