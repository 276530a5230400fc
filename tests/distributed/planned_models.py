"""Megatron's models and what tools/planning says of their parameters; test_planned_models.py compares them.

    python tests/distributed/planned_models.py RESULTS

As a program it builds those of Transformer Engine's layers, on stand-ins for them: Megatron decides at its import
whether there is a Transformer Engine. It writes what `compare` gives for each case.
"""

import dataclasses
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import torch  # noqa: E402

import testbed  # noqa: E402
from tools.planning.sizes import ModelSizes, Parallel  # noqa: E402

GPT2 = ModelSizes(4, 32, 4, vocab_size=100, make_vocab_size_divisible_by=4, max_position_embeddings=16)
LLAMA = dataclasses.replace(
    GPT2,
    num_query_groups=2,
    ffn_hidden_size=48,
    learned_positions=False,
    swiglu=True,
    bias=False,
    rms_norm=True,
    tied=False,
)
MIXTURE = dataclasses.replace(LLAMA, num_experts=4, moe_ffn_hidden_size=24, moe_shared_ffn=40, shared_expert_gate=True)
LATENT = dataclasses.replace(
    LLAMA,
    num_query_groups=None,
    latent_attention=True,
    qk_layernorm=True,
    q_lora_rank=16,
    kv_lora_rank=8,
    qk_head_dim=8,
    qk_pos_emb_head_dim=4,
    v_head_dim=8,
)
MODELS = {
    "GPT-2": GPT2,
    "untied, biases of QKV alone": dataclasses.replace(LLAMA, qkv_bias=True, qk_layernorm=True, kv_channels=6),
    "Llama": LLAMA,
    "mixture": MIXTURE,
    "mixture in some layers": dataclasses.replace(MIXTURE, moe_layers=(False, True, True, False)),
    "latent attention": LATENT,
    "latent attention, queries not compressed": dataclasses.replace(LATENT, q_lora_rank=None, qk_layernorm=False),
}
PIPED = ("GPT-2", "mixture in some layers")
LAYOUTS = {
    "one rank": Parallel(),
    "TP 2": Parallel(tensor=2, expert_tensor=2, sequence_parallel=True),
    "PP 2": Parallel(pipeline=2),
    "EP 2": Parallel(tensor=2, expert=2, sequence_parallel=True),
    "uneven PP 2": Parallel(pipeline=2, first_layers=1),
    "embedding counted, PP 3": Parallel(pipeline=3, count_embedding=True, count_loss=True),
    "embedding counted, PP 3, 2 chunks": Parallel(pipeline=3, chunks=2, count_embedding=True, count_loss=True),
    "PP 2, 2 chunks": Parallel(pipeline=2, chunks=2),
}


def cases(transformer_engine: bool) -> dict[str, tuple[ModelSizes, Parallel]]:
    """Every model on layouts that fit it."""
    found = {}
    for name, sizes in MODELS.items():
        for where, parallel in LAYOUTS.items():
            # How layers are dealt out has little to do with what is in them.
            piped = parallel.pipeline == 1 or name in PIPED
            if piped and (parallel.expert == 1 or sizes.num_experts is not None):
                own = dataclasses.replace(
                    sizes, transformer_engine=transformer_engine, grouped_experts=transformer_engine
                )
                found[f"{name}, {where}"] = own, parallel
    return found


def compare(sizes: ModelSizes, parallel: Parallel) -> list[tuple[list[Any], list[Any]]]:
    """For every chunk of this rank: name, shape, width, share of columns and kind of every parameter, real and planned.

    Runs in every rank.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    from megatron_dobb.megatron.dobb.select_weights import select_weights
    from megatron_dobb.megatron.dobb.weight_sharding import column_set, moment_set
    from megatron_dobb.megatron.model.global_names import weight_names
    from megatron_dobb.methods.dobb.settings import DobbConfig
    from testbed import gpt
    from testbed.attention import PlainAttention
    from tools.planning.plan import Request, chunks_of_stage
    from tools.planning.stages import layers_of_chunks
    from tools.planning.timing import Rates

    gpt.initialize(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.chunks if parallel.chunks > 1 else None,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
    )
    settings: dict[str, Any] = {
        "num_layers": sizes.num_layers,
        "hidden_size": sizes.hidden_size,
        "num_attention_heads": sizes.num_attention_heads,
        "num_query_groups": sizes.num_query_groups,
        "kv_channels": sizes.kv_channels,
        "ffn_hidden_size": sizes.ffn,
        "gated_linear_unit": sizes.swiglu,
        "activation_func": torch.nn.functional.silu if sizes.swiglu else torch.nn.functional.gelu,
        "add_bias_linear": sizes.bias,
        "add_qkv_bias": sizes.qkv_bias,
        "normalization": "RMSNorm" if sizes.rms_norm else "LayerNorm",
        "qk_layernorm": sizes.qk_layernorm,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "apply_rope_fusion": False,
        "transformer_impl": "transformer_engine" if sizes.transformer_engine else "local",
        "tensor_model_parallel_size": parallel.tensor,
        "sequence_parallel": parallel.sequence_parallel,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.chunks if parallel.chunks > 1 else None,
        "pipeline_dtype": torch.float32,
        "num_layers_in_first_pipeline_stage": parallel.first_layers,
        "num_layers_in_last_pipeline_stage": parallel.last_layers,
        "account_for_embedding_in_pipeline_split": parallel.count_embedding,
        "account_for_loss_in_pipeline_split": parallel.count_loss,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
    }
    if sizes.num_experts:
        settings |= {
            "num_moe_experts": sizes.num_experts,
            "moe_ffn_hidden_size": sizes.expert_ffn,
            "moe_shared_expert_intermediate_size": sizes.moe_shared_ffn,
            "moe_shared_expert_gate": sizes.shared_expert_gate,
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": sizes.grouped_experts,
            "moe_layer_freq": [int(sizes.is_mixture(n)) for n in range(sizes.num_layers)],
        }
    if sizes.latent_attention:
        names = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        settings |= {name: getattr(sizes, name) for name in names} | {"multi_latent_attention": True}
    config = (MLATransformerConfig if sizes.latent_attention else TransformerConfig)(**settings)
    sides = (DobbConfig(blocks=4), DobbConfig(blocks=4, side="output", source="gram"))
    stage = parallel_state.get_pipeline_model_parallel_rank()
    layers = layers_of_chunks(sizes, parallel)[stage]
    found = []
    plans = [chunks_of_stage(Request(sizes, parallel, config, Rates()), stage, layers) for config in sides]

    def about(weights: Sequence[Any], of_expert: bool, layer: str) -> tuple[Any, ...]:
        """What is known of a weight, whose blocks are over columns and over rows."""
        geometry = weights[0].geometry
        seen = geometry.outputs_over_tp
        shards = parallel.tensor > 1  # of a sequence, if there are any
        return (
            (geometry.rows, geometry.columns, geometry.column_shards, geometry.replicated, of_expert),
            (geometry.tokens_over_tp and shards, layer if seen is None else seen and shards),
            [(weight.width, weight.local_blocks, weight.alignment) for weight in weights],
            [(moment_set(weight, config), column_set(weight)) for weight, config in zip(weights, sides, strict=True)],
        )

    for number, planned in enumerate(zip(*plans, strict=True)):
        virtual = number if parallel.chunks > 1 else None
        place = {"ignore_virtual": False, "vp_stage": virtual}
        block = get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=sizes.transformer_engine,
            normalization=config.normalization,
            vp_stage=virtual,
        )
        for layer in block.layer_specs:  # it has no parameters
            layer.submodules.self_attention.submodules.core_attention = PlainAttention
        built = GPTModel(
            config,
            block,
            vocab_size=sizes.padded_vocabulary(parallel.tensor),
            max_sequence_length=sizes.max_position_embeddings,
            position_embedding_type="learned_absolute" if sizes.learned_positions else "rope",
            share_embeddings_and_output_weights=sizes.tied,
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            vp_stage=virtual,
        )
        managed = [
            {id(weight.parameter): weight for weight in select_weights(built, config).managed} for config in sides
        ]
        names = {
            id(built.get_submodule(path)._parameters[own]): name
            for (path, own), name in weight_names(built).items()
            if built.get_submodule(path)._parameters[own] is not None
        }
        real = []
        for parameter in built.parameters():
            weights = [of_side[id(parameter)] for of_side in managed if id(parameter) in of_side]
            apart = not getattr(parameter, "allreduce", True)
            own = getattr(parameter, "shared_embedding", False)
            layer = type(weights[0].module).__name__ if weights else ""
            known = about(weights, weights[0].moe is not None, layer) if weights else None
            real.append((names[id(parameter)], tuple(parameter.shape), apart, own, known))
        said = []
        for each in planned[0].parameters:
            weights = [chunk.chosen.managed[each.name] for chunk in planned if each.name in chunk.chosen.managed]
            known = about(weights, each.expert, each.layer) if weights else None
            said.append((each.name, each.shape, each.apart, each.own_bucket, known))
        found.append((real, said))
    return found


def ranks_of(parallel: Parallel) -> int:
    """As many ranks as the layout needs."""
    return max(parallel.tensor * parallel.pipeline, parallel.expert * parallel.expert_tensor)


def main(results: str) -> None:
    """Compare all models of Transformer Engine's layers."""
    from testbed import transformer_engine

    transformer_engine.install()
    testbed.enable()
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    from testbed import processes

    get_gpt_layer_with_transformer_engine_spec()
    found = {
        name: processes.run(ranks_of(parallel), compare, sizes, parallel)
        for name, (sizes, parallel) in cases(transformer_engine=True).items()
    }
    Path(results).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
