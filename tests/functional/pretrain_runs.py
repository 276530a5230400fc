"""Run `pretrain_tiny` on forked ranks: Megatron's own training loop, given flags as on the command line.

Megatron is imported once, here, and a run of a few steps takes a second or two.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import megatron_dobb

megatron_dobb.install()

import megatron.core.models.mimo  # noqa: E402, F401  (or the optimizer factory imports it in every rank)
import pretrain_tiny  # noqa: E402
import torch._dynamo  # noqa: E402  (here, not in every rank: its import takes a second)
from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset  # noqa: E402
from megatron.core.utils import unwrap_model  # noqa: E402
from megatron.training import argument_utils, arguments, global_vars, training  # noqa: E402

from testbed import processes  # noqa: E402

MODEL = shlex.split(
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --num-workers 0 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 32 "
    "--use-distributed-optimizer --distributed-backend gloo --transformer-impl local --use-cpu-initialization "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm --log-interval 1 --lr 1e-2 "
    # With eps 1e-8, rounding noise in tiny gradients would show at full size in AdamW's own parameters.
    "--adam-eps 1e-3"
)
DOBB = shlex.split("--optimizer dobb --dobb-blocks 4 --dobb-refresh-interval 3")
ADAMW = ["--optimizer", "adam"]


def _do_once_what_every_rank_would_do() -> None:
    """Megatron reads the sources of its flags' help texts; dynamo makes a table; and the mock data is millions long."""
    factory, known = argument_utils.ArgumentGroupFactory, {}
    read = factory._get_field_docstrings

    def read_once(self: Any, source: type) -> dict[str, str]:
        if source not in known:
            known[source] = read(self, source)
        return dict(known[source])

    factory._get_field_docstrings = read_once
    arguments.add_megatron_arguments(argparse.ArgumentParser())
    torch._dynamo.trace_rules.get_torch_obj_rule_map()
    MockGPTLowLevelDataset.size = 300


_do_once_what_every_rank_would_do()


@dataclass(frozen=True)
class Step:
    """What Megatron logs of one step."""

    iteration: int
    loss: float
    loss_scale: float
    skipped: bool
    grad_norm: float | None
    params_norm: float | None
    zeros: float | None


@dataclass
class Job:
    """One run on one rank, while it lasts."""

    model: list[Any] = field(default_factory=list)
    optimizer: Any = None
    notes: list[Any] = field(default_factory=list)
    """What a test's `prepare` function wrote down."""

    @property
    def dobb(self) -> Any:
        """The optimizer of the matrices on Dobb."""
        return self.optimizer.chained_optimizers[0]

    def weights(self) -> dict[str, torch.Tensor]:
        """This rank's parameters by name, as fp32."""
        return {name: p.detach().float().clone() for name, p in self.inner_model.named_parameters()}

    @property
    def inner_model(self) -> torch.nn.Module:
        """The GPT inside DDP and, with fp16 or bf16, Float16Module."""
        (inner,) = unwrap_model(self.model)
        return inner

    def state(self) -> dict[str, dict[Any, torch.Tensor]]:
        """Masters, momentum, moments and bases of this rank."""
        segments = [s for of_group in self.dobb.segments for s in of_group]
        groups = self.dobb.refresh_groups
        return {
            "masters": {s.name: s.weight.clone() for s in segments},
            "momentum": {s.name: s.momentum.clone() for s in segments},
            "moments": {block: m.clone() for g in groups for block, m in zip(g.owned, g.moment, strict=True)},
            "bases": {block: b.clone() for g in groups for block, b in zip(g.kept, g.basis, strict=True)},
        }


@dataclass(frozen=True)
class Finished:
    """What a rank has to show at the end of a run."""

    steps: list[Step]
    exit_code: int | None
    """What it exits with; None where the script goes on after `pretrain`."""
    weights: dict[str, torch.Tensor]
    notes: list[Any]
    attempted_steps: int | None
    captured_sequences: int | None
    kept_blocks: int | None
    state: dict[str, Any]

    @property
    def losses(self) -> list[float]:
        """The loss of every step."""
        return [step.loss for step in self.steps]


Prepare = Callable[[Job], None]


def train(words: Sequence[str], world: int = 2, prepare: Prepare | None = None) -> list[Finished]:
    """Train on `world` ranks with the flags `words`; returns what each rank has to show.

    Args:
        words: flags beside those of `MODEL`.
        world: number of ranks.
        prepare: called on every rank when model and optimizer are built.
    """
    return processes.run(world, _run, [*MODEL, *words], prepare)


def _run(words: Sequence[str], prepare: Prepare | None) -> Finished:
    job, steps, exit_code = Job(), [], None
    build, log = training.setup_model_and_optimizer, training.training_log

    def setup(*args: Any, **kwargs: Any) -> Any:
        built = build(*args, **kwargs)
        job.model, job.optimizer = built[0], built[1]
        if prepare is not None:
            prepare(job)
        return built

    def training_log(losses, total, rate, iteration, scale, report, skipped, norm, params, zeros, *rest, **kwargs):
        loss = float(losses["lm loss"]) if losses else float("nan")
        steps.append(Step(iteration, loss, scale, bool(skipped), norm, params, zeros))
        return log(losses, total, rate, iteration, scale, report, skipped, norm, params, zeros, *rest, **kwargs)

    training.setup_model_and_optimizer, training.training_log = setup, training_log
    sys.argv = ["pretrain_tiny.py", *words]
    try:
        pretrain_tiny.main()
    except SystemExit as exit_:
        exit_code = exit_.code
        if not job.model:
            raise RuntimeError(f"the run ended with status {exit_code} before there was a model") from exit_
    is_dobb = global_vars.get_args().optimizer == "dobb" and job.optimizer is not None
    return Finished(
        steps,
        exit_code,
        job.weights(),
        job.notes,
        job.dobb.attempted_steps if is_dobb else None,
        job.dobb.captures[0].sequences if is_dobb else None,
        job.dobb.refresh_counts.skipped if is_dobb else None,
        job.state() if is_dobb else {},
    )
