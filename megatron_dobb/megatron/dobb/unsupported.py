"""Options of Megatron that hide activations or output gradients from Dobb, or replay its steps."""

import argparse

from ...methods.dobb.settings import DobbConfig
from ..options.unsupported import Refusal, option

_NO_PYTHON = "captured graphs run no Python, so the hooks that capture activations would never fire"


def _recomputes_layers(args: argparse.Namespace) -> bool:
    granularity = getattr(args, "recompute_granularity", None)
    modules = set(getattr(args, "recompute_modules", None) or ()) if granularity == "selective" else set()
    return granularity == "full" or bool(modules & {"mlp", "moe", "mla_up_proj", "shared_experts"})


def _with_output_gradients(what: str, attribute: str, reason: str, remedy: str) -> Refusal:
    def used(args: argparse.Namespace, settings: DobbConfig) -> bool:
        is_on = _recomputes_layers(args) if attribute == "recompute" else getattr(args, attribute, False)
        return settings.source == "output-gradient" and bool(is_on)

    return Refusal(f"with {{source:output-gradient}}, the default of {{side:output}}, and {what}", used, reason, remedy)


REFUSALS = (
    option("overlap_moe_expert_parallel_comm", "it runs layers by a schedule plan that calls no forward hooks"),
    option(
        "hybrid_context_parallel",
        "it distributes sequences to ranks by length, so micro-batches do not count the global batch",
    ),
    option("cuda_graph_impl", _NO_PYTHON, "use {megatron.cuda_graph_impl:none}", works=("none", None)),
    option("enable_cuda_graph", _NO_PYTHON),
    option("external_cuda_graph", _NO_PYTHON),
    option(
        "optimizer_cuda_graph",
        "refresh steps run other kernels than the steps between them, so one captured step cannot be replayed",
    ),
    option(
        "use_transformer_engine_op_fuser",
        "fused operations call the hooks of their layers without an input or not at all",
    ),
    _with_output_gradients(
        "recompute of whole layers",
        "recompute",
        "autograd does not follow their first forward pass, whose sequences are the ones to capture",
        "use {source:gram}, or {megatron.recompute_granularity:selective} with {megatron.recompute_modules:core_attn}",
    ),
    _with_output_gradients(
        "{megatron.fp16:True}",
        "fp16",
        "the gradients of the outputs carry the loss scale, so each change of it would reweight the average",
        "use {megatron.bf16:True}, or {source:gram}",
    ),
    _with_output_gradients(
        "{megatron.calculate_per_token_loss:True}",
        "calculate_per_token_loss",
        "the gradients of the outputs are then those of a sum over tokens, so steps with more tokens would weigh more",
        "use {source:gram}",
    ),
)
"""Options that Dobb does not work with in addition to `IN_BUFFERS`; most run layers without calling their hooks."""
