"""Figures 1 and 2: losses over steps and time, and what happens to spectra and updates during training."""

import argparse
import statistics
from typing import Any

import torch
from rich.console import Console
from torch import nn

from megatron_dobb import Dobb, reference

from .comparison import (
    Outcome,
    add_compare_arguments,
    add_size_arguments,
    draw_curves,
    outcomes_of,
    save_curves,
    size_of,
    table,
)
from .geometry import parts
from .measures import effective_rank, orthogonality
from .optimizers import tensors_of
from .results import Command, Result, standard_error
from .runs import MissingPart, Run, dobb
from .training import train


def by_time(outcomes: dict[str, Outcome]) -> Result:
    """Loss against CPU time."""
    rows = []
    for name, outcome in outcomes.items():
        if outcome.finals:
            seconds = statistics.median(r["seconds"]["step_cpu_mean"] for r in outcome.records)
            steps = max(int(step) for step in outcome.records[0]["held_out"])
            rows.append((name, steps * seconds, statistics.fmean(outcome.finals)))
    return Result(
        "Figure 1: loss against CPU time of one thread",
        ("optimizer", "seconds", "loss"),
        rows,
        ["Evaluations are not counted. On GPUs the gaps between optimizers are others: see tools/bench.py."],
        draw=lambda axes: draw_curves(axes, outcomes, against="time"),
    )


def final_losses(outcomes: dict[str, Outcome]) -> Result:
    """Final losses with their standard errors."""
    rows = [(n, statistics.fmean(o.finals), standard_error(o.finals)) for n, o in outcomes.items() if o.finals]
    rows.sort(key=lambda row: row[1])

    def draw(axes: Any) -> None:
        names, means, errors = zip(*rows, strict=True)
        axes.errorbar(means, range(len(names)), xerr=[error or 0.0 for error in errors], fmt="o", capsize=3)
        axes.set(yticks=range(len(names)), yticklabels=names, xlabel="held-out loss (nats per byte)")
        axes.invert_yaxis()

    return Result("Final held-out loss and standard error", ("optimizer", "loss", "s.e."), rows, draw=draw)


def plots(by_step: Result, outcomes: dict[str, Outcome]) -> dict[str, Result]:
    """What a comparison draws, by the names of the files; nothing where every method diverged."""
    if not any(outcome.finals for outcome in outcomes.values()):
        return {}
    return {"loss-by-step": by_step, "loss-by-time": by_time(outcomes), "final-loss": final_losses(outcomes)}


def figure1(options: argparse.Namespace) -> list[Result]:
    """The curves of a comparison; trains what its file of runs does not have."""
    if options.preset == "paper":
        raise MissingPart("figure1 --preset paper: needs GPUs; `compare --preset paper` prints the commands to run")
    plan, outcomes = outcomes_of(options, Console())
    by_step = table(plan, outcomes)
    save_curves(options.plot_dir, by_step, outcomes)
    return [by_step, by_time(outcomes)]


class Spectra:
    """A probe of a training with Dobb: means over all matrices, every few steps."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.rows: list[tuple[int, float, float, float, float]] = []

    def __call__(self, step: int, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """Measure momenta and bases that the last step left behind."""
        (optimizer,) = optimizers
        if step == 0 or step % self.every or not isinstance(optimizer, Dobb):
            return
        found = []
        for name, state in tensors_of(optimizer):
            basis = state["basis"].float()
            width = basis.shape[-1]
            for _, momentum in parts(name, state["momentum"]):
                direction = reference.direction(momentum.unflatten(1, (-1, width)), basis).flatten(1)
                ranks = [effective_rank(torch.linalg.svdvals(block).clamp(min=0)) for block in state["moment"].double()]
                found.append(
                    (
                        effective_rank(torch.linalg.svdvals(momentum.double())),
                        orthogonality(momentum),
                        orthogonality(direction),
                        statistics.fmean(ranks),
                    )
                )
        self.rows.append((step, *(statistics.fmean(column) for column in zip(*found, strict=True))))


def figure2(options: argparse.Namespace) -> list[Result]:
    """Effective rank and orthogonality while Dobb trains."""
    size = size_of(options)
    probe = Spectra(max(1, size.steps // 10))
    train(Run(dobb(options.blocks), options.lr, 0, size), probe=probe)
    rows = probe.rows

    def draw(axes: Any) -> None:
        labels = ("effective rank of M", "orthogonality of M", "orthogonality of O", "effective rank of A")
        for column, label in enumerate(labels, start=1):
            axes.plot([row[0] for row in rows], [row[column] for row in rows], "o-", ms=3, label=label)
        axes.set(xlabel="step", ylim=(0, 1))
        axes.legend(frameon=False)

    title = f"Figure 2: spectra and updates while Dobb trains (B = {options.blocks}, width {size.width})"
    return [
        Result(
            title,
            ("step", "rank of M", "orth. of M", "orth. of O", "rank of A's blocks"),
            [(str(row[0]), *row[1:]) for row in rows],
            ["Means over all matrices: M momentum, O update, A second moment of the inputs; ranks are entropy "
             "effective ranks as fractions."],
            draw=draw,
        )
    ]  # fmt: skip


def _figure2_arguments(parser: argparse.ArgumentParser) -> None:
    add_size_arguments(parser)
    parser.add_argument("--blocks", type=int, default=4, help="B (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate (default: %(default)s)")


COMMANDS = {
    "figure1": Command(
        "loss over steps and over time, for the optimizers of `compare`", figure1, add_compare_arguments
    ),
    "figure2": Command("spectra and orthogonality while Dobb trains", figure2, _figure2_arguments),
}
