"""From options to a request: a preset or Megatron's defaults, changed by what was given."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_dobb.megatron.options.flags import config_from_args
from megatron_dobb.megatron.options.unsupported import refuse_unsupported
from megatron_dobb.methods.dobb.settings import DobbConfig

from .plan import Request
from .presets import PRESETS, counted_split
from .sizes import ModelSizes, Parallel, PlanError
from .timing import Rates

_SAME = (
    *("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "num_query_groups", "kv_channels"),
    *("vocab_size", "make_vocab_size_divisible_by", "max_position_embeddings", "qk_layernorm", "swiglu"),
    *("num_experts", "moe_ffn_hidden_size", "q_lora_rank", "kv_lora_rank"),
    *("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
)
"""Sizes whose name is the flag's."""

_OTHERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "disable_bias_linear": ("bias", lambda given: not given),
    "add_qkv_bias": ("qkv_bias", bool),
    "untie_embeddings_and_output_weights": ("tied", lambda given: not given),
    "normalization": ("rms_norm", lambda given: given == "RMSNorm"),
    "transformer_impl": ("transformer_engine", lambda given: given == "transformer_engine"),
    "position_embedding_type": ("learned_positions", lambda given: given == "learned_absolute"),
    "use_rotary_position_embeddings": ("learned_positions", lambda given: not given),
    "bf16": ("bf16", bool),
    "fp16": ("bf16", bool),
    "moe_grouped_gemm": ("grouped_experts", bool),
    "moe_shared_expert_intermediate_size": ("moe_shared_ffn", int),
    "moe_shared_expert_gate": ("shared_expert_gate", bool),
    "moe_shared_expert_overlap": ("shared_expert_overlap", bool),
    "multi_latent_attention": ("latent_attention", bool),
}
"""For other flags, the size that they set, and how."""

_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")


def request_of(options: Namespace) -> tuple[Request, list[str]]:
    """Build the request, and notes for its reader.

    Raises:
        ConfigError, UnsupportedError: in one sentence.
    """
    given = vars(options)
    notes: list[str] = []
    sizes = _sizes(given)
    tensor, pipeline = given.get("tp", 1), given.get("pp", 1)
    named = options.preset is not None
    sequence = given.get("sequence_parallel", named and tensor > 1)
    parallel = Parallel(
        tensor=tensor,
        pipeline=pipeline,
        context=given.get("cp", 1),
        data=options.dp,
        expert=given.get("ep", 1),
        expert_tensor=given.get("etp", 1 if named or not sizes.num_experts else tensor),
        chunks=_chunks(given, sizes),
        sequence_parallel=bool(sequence),
        overlap_grad_reduce=given.get("overlap_grad_reduce", False),
        bucket_size=given.get("ddp_bucket_size"),
        pad_for_high_nccl_busbw=given.get("ddp_pad_buckets_for_high_nccl_busbw", False),
        first_layers=given.get("decoder_first_pipeline_num_layers"),
        last_layers=given.get("decoder_last_pipeline_num_layers"),
        count_embedding=given.get("account_for_embedding_in_pipeline_split", False),
        count_loss=given.get("account_for_loss_in_pipeline_split", False),
        instances=given.get("num_distributed_optimizer_instances", 1),
    )
    if named and "sequence_parallel" not in given and tensor > 1:
        notes.append("with --sequence-parallel, as a preset has it where --tp is above 1 (or --no-sequence-parallel)")
    if named and parallel != counted_split(sizes, parallel):
        parallel = counted_split(sizes, parallel)
        notes.append(
            f"{sizes.num_layers} layers do not divide over {pipeline} stages: with "
            "--account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split"
        )
    rates = Rates(options.memory_bandwidth, options.flops, options.fp32_flops, options.network_bandwidth)
    reduced = 2 if given.get("grad_reduce_in_bf16") else 4
    config = _config(given)
    if options.plot is not None and config.source == "none":
        raise PlanError("--plot shows a trade-off over the number of blocks, and --source none has none: leave it out")
    refuse_unsupported(Namespace(**given, use_distributed_optimizer=True, tensor_model_parallel_size=tensor))
    if (config.norm, config.side, config.source) != ("sign", "input", "activation"):
        notes.append(f"variant: norm {config.norm}, side {config.side}, source {config.source}")
    return Request(sizes, parallel, config, rates, reduced), notes


def _sizes(given: dict[str, Any]) -> ModelSizes:
    changes = {name: given[name] for name in _SAME if name in given}
    changes |= {size: read(given[name]) for name, (size, read) in _OTHERS.items() if name in given}
    if given["preset"] is None:
        missing = [name for name in _REQUIRED if name not in given]
        if missing:
            flags = ", ".join("--" + name.replace("_", "-") for name in missing)
            raise PlanError(
                f"{flags} missing: give them on the command line or with --args FILE, or take a model with "
                f"--preset {', '.join(PRESETS)}"
            )
        if not given.get("group_query_attention"):
            changes.pop("num_query_groups", None)  # Megatron does not look at it then
        base = ModelSizes(1, 1, 1, bf16=False, grouped_experts=False)
    else:
        base = PRESETS[given["preset"]]
    if base.moe_layers and changes.get("num_layers", base.num_layers) != base.num_layers:
        dense = base.moe_layers.count(False)
        changes["moe_layers"] = (False,) * dense + (True,) * (changes["num_layers"] - dense)
    frequency = given.get("moe_layer_freq")
    if frequency is not None:
        if not changes.get("num_experts", base.num_experts):
            raise PlanError("--moe-layer-freq without --num-experts: give both, or neither")
        every = isinstance(frequency, int)
        layers = range(changes.get("num_layers", base.num_layers))
        changes["moe_layers"] = tuple(n % frequency == 0 for n in layers) if every else tuple(map(bool, frequency))
    return replace(base, **changes)


def _chunks(given: dict[str, Any], sizes: ModelSizes) -> int:
    per_chunk = given.get("num_layers_per_virtual_pipeline_stage")
    if per_chunk is None:
        return int(given.get("vpp", 1))
    stages = given.get("pp", 1)
    if "vpp" in given or sizes.num_layers % (stages * per_chunk):
        raise PlanError(
            f"--num-layers-per-virtual-pipeline-stage {per_chunk} "
            + (
                "and --num-virtual-stages-per-pipeline-rank exclude each other: give one of them"
                if "vpp" in given
                else f"times --pp {stages} does not divide {sizes.num_layers} layers: give a number that does"
            )
        )
    return int(sizes.num_layers // (stages * per_chunk))


def _config(given: dict[str, Any]) -> DobbConfig:
    settings = {name: value for name, value in given.items() if name.startswith("dobb_")}
    lists: dict[str, Any] = {f"dobb_{name}": [] for name in ("exclude", "blocks_for", "log_diagnostics_weights")}
    return config_from_args(Namespace(**(lists | settings)))
