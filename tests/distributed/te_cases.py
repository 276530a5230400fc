"""Forward passes of Megatron models with Transformer Engine's layers; test_te_adapters.py checks what is captured.

    python tests/distributed/te_cases.py RESULTS [--real]

A program of its own, because Megatron decides at its import whether there is a Transformer Engine. It writes, for each
case and rank, what was captured of every managed weight and what the layer says that it multiplied. With `--real` the
layers are those of an installed Transformer Engine, except for their forward functions.
"""

import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import testbed  # noqa: E402
from testbed import transformer_engine  # noqa: E402

BLOCKS, BATCH = 4, 2

DENSE: dict[str, Any] = {}
MOE = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 48,
    "moe_shared_expert_intermediate_size": 32,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
}
MLA = {
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 8,
}
RMS = {"normalization": "RMSNorm", "layernorm_zero_centered_gamma": True, "gated_linear_unit": True}


@dataclass(frozen=True)
class Layout:
    """Total ranks, tensor-parallel and with sequence parallelism, expert-parallel, the experts' tensor-parallel."""

    world: int = 1
    tensor: int = 1
    sequence_parallel: bool = False
    expert: int = 1
    expert_tensor: int = 1

    def __str__(self) -> str:
        parts = {"TP": self.tensor, "EP": self.expert, "ETP": self.expert_tensor}
        named = [f"{name} {size}" for name, size in parts.items() if size > 1]
        return " ".join([*named, *(["SP"] if self.sequence_parallel else [])]) or "one rank"


ONE, TWO, SHARDED = Layout(), Layout(2, 2), Layout(2, 2, sequence_parallel=True)
EXPERTS, SPLIT_EXPERTS = Layout(2, expert=2), Layout(2, 2, sequence_parallel=True, expert_tensor=2)
BOTH = Layout(4, 2, sequence_parallel=True, expert=2, expert_tensor=1)


@dataclass(frozen=True)
class Model:
    """What a model is made of: settings of its configuration and of its layers."""

    settings: dict[str, Any]
    layers: dict[str, Any] = field(default_factory=dict)


MODELS = {
    "layer norm": Model(DENSE),
    "zero-centred RMS norm, SwiGLU": Model(RMS),
    "grouped experts": Model(MOE, {"num_experts": 4, "moe_grouped_gemm": True}),
    "single experts": Model(MOE, {"num_experts": 4, "moe_grouped_gemm": False}),
    "overlapped shared expert": Model(
        MOE | {"moe_shared_expert_overlap": True}, {"num_experts": 4, "moe_grouped_gemm": True}
    ),
    "latent experts": Model(MOE | {"moe_latent_size": 16}, {"num_experts": 4, "moe_grouped_gemm": True}),
    "latent attention": Model(MLA, {"multi_latent_attention": True}),
    "latent attention with norms": Model(
        MLA | {"qk_layernorm": True, "normalization": "RMSNorm"}, {"multi_latent_attention": True, "qk_layernorm": True}
    ),
}
CASES: list[tuple[str, Layout]] = []
for name, model in MODELS.items():
    if "num_experts" not in model.layers:
        CASES += [(name, layout) for layout in (ONE, TWO, SHARDED)]
    elif name in ("grouped experts", "single experts"):
        CASES += [(name, layout) for layout in (ONE, EXPERTS, SPLIT_EXPERTS, BOTH)]
    else:
        CASES += [(name, layout) for layout in (ONE, SPLIT_EXPERTS)]


def main(results: str, real: bool) -> None:
    """Run all cases."""
    transformer_engine.install(real=real)
    testbed.enable()
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer.moe import moe_utils

    from testbed import processes

    moe_utils.te_general_gemm = None  # routers multiply with Transformer Engine's compiled part where it is there
    get_gpt_layer_with_transformer_engine_spec()
    found = [processes.run(case[1].world, run, *case) for case in CASES]
    torch.save(found, results)  # plain pickle would need Megatron to read tensors


def run(name: str, layout: Layout) -> dict[str, Any]:
    """One forward pass on one rank."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    from megatron_dobb.megatron.dobb.select_weights import select_weights
    from megatron_dobb.methods.dobb.capture import Capture
    from megatron_dobb.methods.dobb.settings import DobbConfig
    from testbed import gpt
    from testbed.attention import PlainAttention

    gpt.initialize(
        tensor_model_parallel_size=layout.tensor,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )
    model = MODELS[name]
    config = (MLATransformerConfig if "q_lora_rank" in model.settings else TransformerConfig)(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=layout.tensor,
        sequence_parallel=layout.sequence_parallel,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        **model.settings,
    )
    layers = get_gpt_layer_with_transformer_engine_spec(**model.layers)
    layers.submodules.self_attention.submodules.core_attention = PlainAttention
    built = GPTModel(config, layers, gpt.VOCABULARY, gpt.SEQUENCE)
    change_norms(built)
    leave_the_last_expert_alone(built)
    plan = select_weights(built, DobbConfig(blocks=BLOCKS))
    capture = Capture(built, [weight.source() for weight in plan.managed], None)
    capture.begin(armed=True)
    data, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    tokens = gpt.global_batch(0, BATCH * data)[rank * BATCH :][:BATCH, :-1]
    built(
        input_ids=tokens,
        position_ids=torch.arange(gpt.SEQUENCE).expand(BATCH, -1),
        attention_mask=torch.ones(1, 1, gpt.SEQUENCE, gpt.SEQUENCE, dtype=torch.bool).triu(1),
    )
    sums = capture.take()
    weights = {}
    for weight in plan.managed:
        multiplied: Any = weight.module.multiplied
        if weight.own_name != "weight":
            multiplied = multiplied[int(weight.own_name.removeprefix("weight"))]
        entry = sums[weight.name]
        weights[weight.name] = {
            "kind": type(weight.module).__name__,
            "geometry": types.SimpleNamespace(**vars(weight.geometry)),  # to be read where Megatron is not imported
            "shape": tuple(weight.parameter.shape),
            "routed": weight.moe is not None,
            "expert_parallel": weight.is_expert_parallel,
            "total": entry.total,
            "tokens": entry.tokens,
            "multiplied": multiplied.reshape(-1, multiplied.shape[-1]),
        }
    reasons = {reason for reason, _ in plan.adamw}
    return {"weights": weights, "reasons": reasons, "tensor_rank": parallel_state.get_tensor_model_parallel_rank()}


def change_norms(model: torch.nn.Module) -> None:
    """Give norms weights and biases that show when they are left out."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "norm" in name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)


def leave_the_last_expert_alone(model: torch.nn.Module) -> None:
    """Let no router send it a token."""
    from megatron.core.transformer.moe.router import TopKRouter

    for router in [module for module in model.modules() if isinstance(module, TopKRouter)]:
        gating = router.gating
        away = torch.tensor([0.0] * 3 + [-1e4])
        router.gating = lambda x, gating=gating, away=away: gating(x) + away


if __name__ == "__main__":
    main(sys.argv[1], "--real" in sys.argv)
