"""The `--dobb-*` flags, and Megatron options that Dobb does not work with yet."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError, UnsupportedError
from ...kernels.dispatch import BACKENDS
from ...methods.dobb.kernels import PRECISIONS
from ...methods.dobb.settings import CAPTURE_POLICIES, DTYPES, NORMS, QR_METHODS, SIDES, SOURCES, DobbConfig

OPTIMIZER = "dobb"


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `dobb` to the choices of `--optimizer`, and every setting of `DobbConfig` as a flag."""
    action = parser._option_string_actions["--optimizer"]
    action.choices = [*(action.choices or ()), OPTIMIZER]
    default = DobbConfig()
    group = parser.add_argument_group(
        title="dobb",
        description="settings of --optimizer dobb; see the documentation of megatron_dobb.DobbConfig",
    )

    def add(name: str, help_text: str, **options: Any) -> None:
        group.add_argument(f"--dobb-{name}", help=help_text, **options)

    add("blocks", "Blocks over the input axis of every weight, B (default 16).", type=int)
    add("block-width", "Columns in one block, b; exclusive with --dobb-blocks.", type=int)
    add(
        "blocks-for",
        "Block counts for weights whose name matches a glob pattern; the first match wins.",
        nargs="+",
        metavar="PATTERN=COUNT",
        default=[],
    )
    add(
        "refresh-interval",
        "Steps between refreshes of the bases, T.",
        type=int,
        default=default.refresh_interval,
    )
    add("iterations", "Orthogonal iterations in a refresh, k.", type=int, default=default.iterations)
    add("momentum", "Decay of the momentum.", type=float, default=default.momentum)
    add("moment-beta", "Decay of the second moments.", type=float, default=default.moment_beta)
    add("nesterov", "Use Nesterov momentum.", action="store_true")
    add("qr", "How bases are orthogonalised.", choices=QR_METHODS, default=default.qr)
    add(
        "capture",
        "Which sequences of a global batch feed the moments.",
        choices=CAPTURE_POLICIES,
        default=default.capture,
    )
    add(
        "capture-sequences",
        "Number of sequences that --dobb-capture first takes (default: the first global micro-batch).",
        type=int,
    )
    add("exclude", "Glob patterns of weights that AdamW updates.", nargs="+", metavar="PATTERN", default=[])
    add(
        "update-scale",
        "RMS of the update of a weight with m >= n, tau.",
        type=float,
        default=default.update_scale,
    )
    add("moment-dtype", "Storage of the moments.", choices=tuple(DTYPES), default=default.moment_dtype)
    add("basis-dtype", "Storage of the bases.", choices=tuple(DTYPES), default=default.basis_dtype)
    add(
        "moment-transport",
        "In what captured sums travel between ranks, to be added up in fp32.",
        choices=tuple(DTYPES),
        default=default.moment_transport,
    )
    add("norm", "What the coefficients become: signs, or columns of unit norm.", choices=NORMS, default=default.norm)
    add("side", "Axis of a weight that its blocks divide.", choices=SIDES, default=default.side)
    add(
        "source",
        "Whose second moments give the bases (default: activation, or output-gradient on the output side).",
        choices=SOURCES,
    )
    add("backend", "What computes update, moment sums and bases.", choices=BACKENDS, default=default.backend)
    add("precision", "How the signs of the coefficients are found.", choices=PRECISIONS, default=default.precision)
    add(
        "load-other-optimizer",
        "Continue a checkpoint that AdamW wrote: its first moments become the momentum, the rest starts anew.",
        action="store_true",
    )
    add(
        "overlap-refresh",
        "Refresh the bases beside the backward pass (default), or in the optimizer's call.",
        action=argparse.BooleanOptionalAction,
        default=default.overlap_refresh,
    )
    add(
        "stagger",
        "Refresh about 1/T of the weights on every step in place of all of them on every T-th.",
        action="store_true",
    )
    add(
        "log-diagnostics-interval",
        "Steps between two logs of Dobb's diagnostics to TensorBoard and W&B (default 0: none).",
        type=int,
        default=default.log_diagnostics_interval,
    )
    add(
        "log-diagnostics-weights",
        "Glob patterns of the weights to log, each with the spectrum of its update (default: all weights, and the "
        "spectra of a few in turn).",
        nargs="+",
        metavar="PATTERN",
        default=[],
    )
    return parser


def config_from_args(args: argparse.Namespace) -> DobbConfig:
    """The settings that the flags state.

    Raises:
        ConfigError: for a value out of range, flags that exclude each other, or a malformed PATTERN=COUNT.
    """
    settings = {name.removeprefix("dobb_"): value for name, value in vars(args).items() if name.startswith("dobb_")}
    for name in ("exclude", "log_diagnostics_weights"):
        settings[name] = tuple(settings[name])
    settings["blocks_for"] = _pattern_counts(settings["blocks_for"])
    return DobbConfig(**settings)


def _pattern_counts(texts: Sequence[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for text in texts:
        pattern, _, count = text.rpartition("=")
        if not pattern or not count.isdecimal():
            raise ConfigError(
                f"--dobb-blocks-for {text} is not of the form PATTERN=COUNT, such as '*.mlp.linear_fc2=16'"
            )
        if counts.setdefault(pattern, int(count)) != int(count):
            raise ConfigError(
                f"--dobb-blocks-for gives {pattern} both {counts[pattern]} and {int(count)} blocks: leave one out"
            )
    return counts


@dataclass(frozen=True)
class Refusal:
    """A Megatron option that `--optimizer dobb` does not work with.

    Attributes:
        what: the option as the user wrote it, after "with" or "without".
        used: tells from Megatron's arguments whether it is in use.
        reason: why it cannot work.
        instead: what to do.
    """

    what: str
    used: Callable[[argparse.Namespace], bool]
    reason: str
    instead: str


def _is_set(name: str) -> Callable[[argparse.Namespace], bool]:
    return lambda args: bool(getattr(args, name, False))


def _differs(name: str, *ordinary: Any) -> Callable[[argparse.Namespace], bool]:
    return lambda args: getattr(args, name, ordinary[0]) not in ordinary


def _shards_weights(args: argparse.Namespace) -> bool:
    return (getattr(args, "tensor_parallel_num_weight_shards", None) or 0) > args.tensor_model_parallel_size


def _shards_expert_weights(args: argparse.Namespace) -> bool:
    split = getattr(args, "expert_tensor_parallel_size", None) or args.tensor_model_parallel_size
    return (getattr(args, "expert_tensor_parallel_num_weight_shards", None) or 0) > split


def _sees_output_gradients(args: argparse.Namespace) -> bool:
    source = getattr(args, "dobb_source", None)
    return source == "output-gradient" or (source is None and getattr(args, "dobb_side", None) == "output")


def _recomputes_layers(args: argparse.Namespace) -> bool:
    granularity = getattr(args, "recompute_granularity", None)
    modules = set(getattr(args, "recompute_modules", None) or ()) if granularity == "selective" else set()
    return granularity == "full" or bool(modules & {"mlp", "moe", "mla_up_proj", "shared_experts"})


_LEAVE_OUT = "leave it out"
_MORE_SHARDS = "it shards the rows of a weight once more and gathers them before use"
_NO_PYTHON = "captured graphs run no Python, so the hooks that take the second moments would never fire"

REFUSALS = (
    Refusal(
        "with --yaml-cfg",
        lambda args: getattr(args, "yaml_cfg", None) is not None,
        "its arguments are validated on a path of their own that knows no --dobb-* settings",
        "give the arguments on the command line",
    ),
    Refusal(
        "without --use-distributed-optimizer",
        lambda args: not args.use_distributed_optimizer,
        "Dobb lives in the distributed optimizer's param/grad buffers",
        "add --use-distributed-optimizer",
    ),
    Refusal(
        "with --use-megatron-fsdp",
        _is_set("use_megatron_fsdp"),
        "it shards parameters without the param/grad buffers whose layout Dobb aligns",
        "use --use-distributed-optimizer alone",
    ),
    Refusal(
        "with --use-torch-fsdp2",
        _is_set("use_torch_fsdp2"),
        "it shards parameters without the param/grad buffers whose layout Dobb aligns",
        "use --use-distributed-optimizer alone",
    ),
    Refusal(
        "with --optimizer-cpu-offload",
        _is_set("optimizer_cpu_offload"),
        "it rebuilds the inner optimizer and keeps the masters on the host",
        _LEAVE_OUT,
    ),
    Refusal(
        "with --use-precision-aware-optimizer",
        _is_set("use_precision_aware_optimizer"),
        "it keeps the master weights inside FusedAdam, where Dobb cannot update them",
        _LEAVE_OUT,
    ),
    Refusal(
        "with --fp4-param-gather",
        _is_set("fp4_param_gather"),
        "its packed buffer layout places parameters with padding of its own, which cuts blocks",
        _LEAVE_OUT,
    ),
    Refusal(
        "with --reuse-grad-buf-for-mxfp8-param-ag",
        _is_set("reuse_grad_buf_for_mxfp8_param_ag"),
        "it copies masters to the model outside the optimizer step, a path not tested with Dobb",
        _LEAVE_OUT,
    ),
    Refusal(
        "with --overlap-param-gather-with-optimizer-step",
        _is_set("overlap_param_gather_with_optimizer_step"),
        "it splits the model chunks over several optimizers, a path not tested with Dobb",
        "use --overlap-param-gather",
    ),
    Refusal(
        "with --overlap-moe-expert-parallel-comm",
        _is_set("overlap_moe_expert_parallel_comm"),
        "it runs layers by a schedule plan that calls no forward hooks",
        _LEAVE_OUT,
    ),
    Refusal(
        "with --hybrid-context-parallel",
        _is_set("hybrid_context_parallel"),
        "it deals sequences out to ranks by their lengths, so that micro-batches do not count the global batch",
        _LEAVE_OUT,
    ),
    Refusal(
        "with --tensor-parallel-num-weight-shards above the tensor-parallel size",
        _shards_weights,
        _MORE_SHARDS,
        _LEAVE_OUT,
    ),
    Refusal(
        "with --expert-tensor-parallel-num-weight-shards above the experts' tensor-parallel size",
        _shards_expert_weights,
        _MORE_SHARDS,
        _LEAVE_OUT,
    ),
    Refusal(
        "with --cuda-graph-impl",
        _differs("cuda_graph_impl", "none", None),
        _NO_PYTHON,
        "use --cuda-graph-impl none",
    ),
    Refusal("with --enable-cuda-graph", _is_set("enable_cuda_graph"), _NO_PYTHON, _LEAVE_OUT),
    Refusal("with --external-cuda-graph", _is_set("external_cuda_graph"), _NO_PYTHON, _LEAVE_OUT),
    Refusal(
        "with --optimizer-cuda-graph",
        _is_set("optimizer_cuda_graph"),
        "refresh steps run other work than the steps between them, so one captured step cannot be replayed",
        _LEAVE_OUT,
    ),
    Refusal(
        "with --use-mup",
        _is_set("use_mup"),
        "MuP rescales the learning rate for Adam; Dobb's update already has a width-independent RMS",
        _LEAVE_OUT,
    ),
    Refusal(
        "with --use-transformer-engine-op-fuser",
        _is_set("use_transformer_engine_op_fuser"),
        "fused operations call the hooks of their layers without an input or not at all",
        _LEAVE_OUT,
    ),
    Refusal(
        "with --dobb-source output-gradient, the default of --dobb-side output, and recompute of whole layers",
        lambda args: _sees_output_gradients(args) and _recomputes_layers(args),
        "autograd does not follow their first forward pass, whose sequences are the ones to take",
        "use --dobb-source gram, or --recompute-granularity selective with --recompute-modules core_attn",
    ),
    Refusal(
        "with --dobb-source output-gradient, the default of --dobb-side output, and --fp16",
        lambda args: _sees_output_gradients(args) and bool(getattr(args, "fp16", False)),
        "the gradients of the outputs carry the loss scale, and each change of it would weigh the average anew",
        "use --bf16, or --dobb-source gram",
    ),
    Refusal(
        "with --dobb-source output-gradient, the default of --dobb-side output, and --calculate-per-token-loss",
        lambda args: _sees_output_gradients(args) and bool(getattr(args, "calculate_per_token_loss", False)),
        "the gradients of the outputs are then those of a sum over tokens, and steps with more tokens would weigh more",
        "use --dobb-source gram",
    ),
    Refusal(
        "with --ckpt-format other than torch_dist",
        lambda args: bool(_checkpoints(args)) and getattr(args, "ckpt_format", "torch_dist") != "torch_dist",
        "legacy checkpoints have no place for the moments and bases",
        "use --ckpt-format torch_dist",
    ),
    Refusal(
        "with --non-persistent-ckpt-type local",
        lambda args: getattr(args, "non_persistent_ckpt_type", None) == "local",
        "such checkpoints carry no content metadata, where Dobb's counters are",
        "use --non-persistent-ckpt-type global",
    ),
)


def _checkpoints(args: argparse.Namespace) -> str | None:
    return getattr(args, "save", None) or getattr(args, "load", None)


def refuse_unsupported(args: argparse.Namespace) -> None:
    """Stop before training starts if an option is in use that Dobb does not work with.

    Raises:
        UnsupportedError: names the option, the reason and what to use instead.
    """
    for refusal in REFUSALS:
        if refusal.used(args):
            raise UnsupportedError(
                f"--optimizer dobb does not work {refusal.what}: {refusal.reason}; {refusal.instead}"
            )
