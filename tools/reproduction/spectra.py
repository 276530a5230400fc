"""Figure 2: what happens to spectra and updates while Dobb trains."""

import argparse
import statistics
from typing import Any

import torch
from torch import nn

from megatron_dobb import Dobb
from megatron_dobb.methods.dobb import update

from ..common.tables import Result
from .geometry import parts
from .measures import effective_rank, orthogonality
from .optimizers import tensors_of
from .options import add_size_arguments, size_of
from .results import Command
from .runs import Run, dobb
from .training import train


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
                direction = update.direction(momentum.unflatten(1, (-1, width)), basis).flatten(1)
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


COMMANDS = {"figure2": Command("spectra and orthogonality while Dobb trains", figure2, _figure2_arguments)}
