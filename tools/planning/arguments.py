"""The command line of `tools/plan.py`, and files of Megatron's flags."""

import argparse
import copy
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megatron_dobb.megatron.options.flags import add_arguments

from ..common.files import why_not_written
from .presets import PRESETS
from .sizes import PlanError
from .timing import Rates

ABSENT = argparse.SUPPRESS
EXAMPLES = {"json": "plan.json", "plot": "plan.png"}
REFUSED = {
    "--mtp-num-layers": "layers of multi-token prediction",
    "--moe-latent-size": "latent experts",
    "--mla-down-proj-fusion": "fused down projections",
    "--attention-output-gate": "gated attention",
    "--experimental-attention-variant": "experimental attention",
    "--hybrid-layer-pattern": "hybrid models",
    "--pipeline-model-parallel-layout": "a pipeline layout by hand",
    "--ddp-num-buckets": "a number of buckets",
    "--fp8-param-gather": "fp8 parameters in buffers of their own",
    "--use-megatron-fsdp": "Megatron-FSDP, which Dobb does not work with",
    "--spec": "layers of a specification of your own",
    "--encoder-num-layers": "encoders",
}
"""Flags that change what a rank holds in ways that are not planned for."""


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are `PlanError`s."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line."""
        given = re.sub(r"^argument (\S+?)(/\S+)*: ", r"\1 ", message)
        raise PlanError(f"{given}; see --help for what is there")


def whole(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number of at least 1, such as 8")
    return int(text)


def rate(text: str) -> float:
    """A number above 0, such as 4.3e12."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be a number above 0, such as 4.3e12")
    return value


def pattern_of_layers(text: str) -> tuple[int, ...] | int:
    """`--moe-layer-freq`: a number, or a list such as `([0]*3+[1]*58)`.

    Raises:
        ArgumentTypeError: if it is neither.
    """
    if text.isdigit() and int(text):
        return int(text)
    compact = text.replace(" ", "")
    found: list[int] = []
    terms = compact.removeprefix("(").removesuffix(")").split("+") if "[" in compact else []
    for term in terms:
        matched = re.fullmatch(r"\[([01](?:,[01])*)\](?:\*(\d+))?", term)
        if matched is None:
            terms = []
            break
        found += [int(kind) for kind in matched[1].split(",")] * int(matched[2] or 1)
    if not terms:
        raise argparse.ArgumentTypeError(f"{text} must be a number, or a list such as ([0]*3+[1]*58)")
    return tuple(found)


def _model_flags(parser: argparse.ArgumentParser) -> None:
    sizes = parser.add_argument_group("sizes of the model (Megatron's flags)")
    numbers = (
        "num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups kv-channels vocab-size "
        "make-vocab-size-divisible-by max-position-embeddings num-experts moe-ffn-hidden-size "
        "moe-shared-expert-intermediate-size q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim"
    )
    for name in numbers.split():
        sizes.add_argument(f"--{name}", type=whole, default=ABSENT, metavar="N")
    switches = (
        "group-query-attention swiglu disable-bias-linear add-qkv-bias qk-layernorm "
        "untie-embeddings-and-output-weights bf16 fp16 moe-grouped-gemm moe-shared-expert-gate "
        "moe-shared-expert-overlap multi-latent-attention use-rotary-position-embeddings grad-reduce-in-bf16"
    )
    for name in switches.split():
        sizes.add_argument(f"--{name}", action="store_true", default=ABSENT)
    sizes.add_argument("--normalization", choices=("LayerNorm", "RMSNorm"), default=ABSENT)
    sizes.add_argument("--transformer-impl", choices=("transformer_engine", "local"), default=ABSENT)
    sizes.add_argument(
        "--position-embedding-type",
        choices=("learned_absolute", "rope", "yarn", "mrope", "relative", "none"),
        default=ABSENT,
    )
    sizes.add_argument("--moe-layer-freq", type=pattern_of_layers, default=ABSENT, metavar="PATTERN")


def _layout_flags(parser: argparse.ArgumentParser) -> None:
    layout = parser.add_argument_group("parallel layout (short, or as Megatron says it)")
    for short, long, what in (
        ("tp", "tensor-model-parallel-size", "tensor-parallel ranks"),
        ("pp", "pipeline-model-parallel-size", "pipeline stages"),
        ("cp", "context-parallel-size", "context-parallel ranks"),
        ("ep", "expert-model-parallel-size", "expert-parallel ranks"),
        ("etp", "expert-tensor-parallel-size", "tensor-parallel ranks of an expert"),
        ("vpp", "num-virtual-stages-per-pipeline-rank", "model chunks of a stage"),
    ):
        layout.add_argument(f"--{short}", f"--{long}", type=whole, default=ABSENT, metavar="N", help=what, dest=short)
    layout.add_argument("--num-layers-per-virtual-pipeline-stage", type=whole, default=ABSENT, metavar="N")
    layout.add_argument("--decoder-first-pipeline-num-layers", type=whole, default=ABSENT, metavar="N")
    layout.add_argument("--decoder-last-pipeline-num-layers", type=whole, default=ABSENT, metavar="N")
    layout.add_argument("--account-for-embedding-in-pipeline-split", action="store_true", default=ABSENT)
    layout.add_argument("--account-for-loss-in-pipeline-split", action="store_true", default=ABSENT)
    layout.add_argument("--sequence-parallel", action=argparse.BooleanOptionalAction, default=ABSENT)
    layout.add_argument("--overlap-grad-reduce", action="store_true", default=ABSENT)
    layout.add_argument("--ddp-bucket-size", type=whole, default=ABSENT, metavar="N")
    layout.add_argument("--ddp-pad-buckets-for-high-nccl-busbw", action="store_true", default=ABSENT)
    layout.add_argument("--num-distributed-optimizer-instances", type=whole, default=ABSENT, metavar="N")
    others = parser.add_argument_group("what some variants of Dobb do not work with")
    others.add_argument("--calculate-per-token-loss", action="store_true", default=ABSENT)
    others.add_argument("--recompute-granularity", choices=("full", "selective"), default=ABSENT)
    others.add_argument("--recompute-modules", nargs="*", default=ABSENT, metavar="MODULE")


def _dobb_flags(parser: argparse.ArgumentParser) -> None:
    """The run's own flags, and the same without `dobb-`; only what is given becomes an option."""
    of_a_run = argparse.ArgumentParser(add_help=False)
    of_a_run.add_argument("--optimizer")
    add_arguments(of_a_run)
    dobb = parser.add_argument_group("Dobb (as in a run, or without the dobb-)")
    for action in of_a_run._actions:
        if action.dest.startswith("dobb_"):
            same = copy.copy(action)
            same.option_strings = [s.replace("dobb-", "", 1) for s in action.option_strings] + [*action.option_strings]
            same.default = ABSENT
            dobb._add_action(same)


def _flags() -> Parser:
    """Parser of the flags that a file may hold."""
    parser = Parser(add_help=False, allow_abbrev=False)
    _model_flags(parser)
    _layout_flags(parser)
    _dobb_flags(parser)
    return parser


def parser() -> Parser:
    """The whole command line."""
    full = Parser(
        prog="tools/plan.py",
        description=__doc__,
        parents=[_flags()],
        conflict_handler="resolve",
        allow_abbrev=False,
    )
    full.add_argument("--preset", choices=tuple(PRESETS), default=None, help="a model that has a name")
    full.add_argument("--args", type=Path, default=None, metavar="FILE", help="a file of Megatron's flags")
    full.add_argument("--dp", type=whole, default=1, metavar="N", help="data-parallel ranks (default 1)")
    full.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the plan to this file")
    full.add_argument("--plot", type=Path, default=None, metavar="FILE", help="draw the trade-off over B")
    defaults = Rates()
    rates = full.add_argument_group("the machine, per rank (defaults derived from data sheets of an H200)")
    for name, what in (
        ("memory-bandwidth", "bytes per second of device memory"),
        ("flops", "bf16 operations per second"),
        ("fp32-flops", "fp32 operations per second"),
        ("network-bandwidth", "bytes per second to other ranks"),
    ):
        value = getattr(defaults, name.replace("-", "_"))
        rates.add_argument(f"--{name}", type=rate, default=value, metavar="X", help=f"{what} (default {value:g})")
    return full


def read(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Read the command line, and the file that it names: what the line says goes first.

    Returns:
        The options, and the flags of the file that a plan does not need.

    Raises:
        PlanError: in one sentence.
    """
    first, _ = parser().parse_known_args(words)
    given, ignored = argparse.Namespace(), []
    if first.args is not None:
        given, ignored = read_file(first.args)
    options = parser().parse_args(words, given)
    for name, example in EXAMPLES.items():
        path = getattr(options, name)
        if path is not None and (problem := why_not_written(name, path, example)):
            raise PlanError(problem)
    return options, ignored


def read_file(path: Path) -> tuple[argparse.Namespace, list[str]]:
    """Megatron's flags from a text file, as a shell script writes them: comments, quotes and continued lines.

    Raises:
        PlanError: if it cannot be read, or names what is not planned for.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"--args {path}: {error}; give a text file of Megatron's flags") from None
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise PlanError(f"--args {path}: {error}; close every quote") from None
    for word in words:
        name = word.partition("=")[0]
        if name in REFUSED:
            raise PlanError(f"--args {path}: {name} is not planned for ({REFUSED[name]}): leave it out of the file")
    try:
        given, unknown = _flags().parse_known_args(words)
    except PlanError as error:
        raise PlanError(f"--args {path}: {error}") from None
    return given, [word.partition("=")[0] for word in unknown if word.startswith("--")]
