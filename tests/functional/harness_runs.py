"""Command lines of trainings for clusters, parsed as they are and started small on forked ranks.

For the cases of `megatron_harness` and the scripts of `examples/`, on a machine without a GPU.
"""

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pretrain_runs  # noqa: F401  (imports and patches Megatron here, once, instead of in every rank)
import pretrain_tiny
import yaml
from megatron.training.arguments import parse_args, validate_args

from testbed import processes

CASES = Path(__file__).with_name("megatron_harness") / "cases"
GPUS = 8

SMALLER = shlex.split(
    "--hidden-size 128 --ffn-hidden-size 512 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--vocab-size 127 --make-vocab-size-divisible-by 32 --micro-batch-size 1 --global-batch-size 8 --num-workers 0 "
    "--dobb-blocks 4 --dobb-refresh-interval 2 --lr 1e-2 --lr-warmup-iters 1 "
    "--distributed-backend gloo --transformer-impl local --use-cpu-initialization --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --no-persist-layer-norm --no-rope-fusion"
)
"""Behind a command line for GPUs these win: the sizes of a test, and what needs a GPU or Transformer Engine."""

NEEDS_A_GPU = {"--moe-grouped-gemm", "--log-memory-to-tensorboard"}
"""Switches that nothing behind them can turn off again."""


def case(name: str) -> dict[str, Any]:
    """The `model_config.yaml` of a case."""
    return yaml.safe_load((CASES / name / "model_config.yaml").read_text())


def command_line(words: Mapping[str, object], variables: Mapping[str, str]) -> list[str]:
    """MODEL_ARGS as the harness makes a command line of them, with `${NAME}` replaced."""
    line: list[str] = []
    for flag, value in words.items():
        text = re.sub(r"\$\{(\w+)\}", lambda found: variables[found[1]], str(value))
        line += [flag] if value is True else [flag, *shlex.split(text)]
    return line


def shrunk(words: Sequence[str]) -> list[str]:
    """A command line that a CPU can train in seconds, on the same parallel layout."""
    return [*(word for word in words if word not in NEEDS_A_GPU), *SMALLER]


def parsed(lines: Sequence[Sequence[str]], world: int = GPUS) -> list[dict[str, Any]]:
    """The validated arguments of each command line, on a job of `world` ranks."""
    (found,) = processes.run(1, _parse, lines, world)
    return found


def _parse(lines: Sequence[Sequence[str]], world: int) -> list[dict[str, Any]]:
    os.environ["WORLD_SIZE"] = str(world)
    found = []
    for line in lines:
        sys.argv = ["pretrain_gpt.py", *line]
        args = parse_args()
        validate_args(args)
        found.append({name: value for name, value in vars(args).items() if isinstance(value, int | float | str)})
    return found


def train(words: Sequence[str], world: int, logs: Path) -> None:
    """Train, with each rank's log where torchrun puts it under its `--log-dir`: `logs/attempt_0/RANK/stdout.log`."""
    processes.run(world, _train, words, logs)


def _train(words: Sequence[str], logs: Path) -> None:
    log = logs / "attempt_0" / os.environ["RANK"] / "stdout.log"
    log.parent.mkdir(parents=True)
    sys.argv = ["pretrain_gpt.py", *words]
    # Not the descriptors: under pytest they are not what Python prints to.
    with log.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        try:
            pretrain_tiny.main()
        except SystemExit as exit_:
            if exit_.code:
                raise RuntimeError(f"the training ended with status {exit_.code}: {log}") from exit_
