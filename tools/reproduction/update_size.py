"""Table 9: the size of the update, measured on steps that the optimizers really take."""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_dobb import Dobb
from megatron_dobb.methods.dobb import update as reference

from ..common.tables import Result
from .dion import Dion
from .optimizers import UPDATE_SCALE, Muon, tensors_of
from .results import Command
from .runs import METHODS, Method

SHAPES = ((256, 256), (256, 1024), (1024, 256))
"""Square, wide and tall: rows m, columns n."""


@dataclass
class Layer:
    """A linear layer's data for one step.

    Attributes:
        inputs: activations `[tokens, n]`.
        sensitivities: gradients of the outputs, `[tokens, m]`.
    """

    inputs: Tensor
    sensitivities: Tensor

    @property
    def gradient(self) -> Tensor:
        """The weight's, `[m, n]`."""
        return self.sensitivities.T @ self.inputs

    @classmethod
    def random(cls, rows: int, columns: int, dead: float, seed: int) -> "Layer":
        """Correlated activations, a part of whose features is always zero, and as many tokens as fill the ranks."""
        generator = torch.Generator().manual_seed(seed)
        tokens = 2 * max(rows, columns)
        inputs = torch.randn(tokens, columns, generator=generator) @ torch.randn(columns, columns, generator=generator)
        inputs[:, torch.randperm(columns, generator=generator)[: round(dead * columns)]] = 0
        return cls(inputs / math.sqrt(columns), torch.randn(tokens, rows, generator=generator) / tokens)


@dataclass
class Update:
    """A raw update `O [m, n]`, and the fraction of it that dead features leave.

    That is the fraction of its coefficients that are not zero where it is made of signs, and of its singular values
    where these are set to 1.
    """

    raw: Tensor
    filled: float = 1.0


def step_of(layer: Layer, build: Callable[[nn.Linear], torch.optim.Optimizer]) -> tuple[Tensor, Any]:
    """The raw update `O` of an optimizer's first step at learning rate 1 without decay, and the optimizer."""
    rows, columns = layer.sensitivities.shape[1], layer.inputs.shape[1]
    linear = nn.Linear(columns, rows, bias=False)
    nn.init.zeros_(linear.weight)
    optimizer = build(linear)
    linear(layer.inputs[None]).backward(layer.sensitivities[None])
    optimizer.step()
    return -linear.weight.detach() / (UPDATE_SCALE * math.sqrt(max(rows, columns))), optimizer


def dobb_step(layer: Layer, settings: Mapping[str, Any]) -> Update:
    """Update of `megatron_dobb.Dobb` with these settings."""
    raw, optimizer = step_of(layer, lambda linear: Dobb(nn.Sequential(linear), 1.0, 0.0, **settings))
    ((_, state),) = tensors_of(optimizer)
    # A column of this is a direction of the basis, or a row of the weight on the output side.
    momentum = state["momentum"].T if settings.get("side") == "output" else state["momentum"]
    coefficients = momentum
    if settings.get("source") != "none":
        basis = state["basis"].float()
        coefficients = reference.project(momentum.unflatten(1, (len(basis), -1)), basis)
    nonzero = coefficients != 0
    if settings.get("norm") == "l2":  # each column is scaled as a whole
        nonzero = nonzero.any(dim=0)
    return Update(raw, float(nonzero.float().mean()))


def muon_step(layer: Layer, settings: Mapping[str, Any]) -> Update:
    """Muon's, by Newton-Schulz, whose singular values lie around 1."""
    gradient = layer.gradient
    filled = int(torch.linalg.matrix_rank(gradient)) / min(gradient.shape)
    return Update(step_of(layer, lambda linear: Muon(linear.parameters(), 1.0, 0.0))[0], filled)


def polar_step(layer: Layer, settings: Mapping[str, Any]) -> Update:
    """The exact polar factor that Muon approximates."""
    left, values, right = torch.linalg.svd(layer.gradient.double(), full_matrices=False)
    kept = values > 1e-6 * values[0]
    return Update((left * kept) @ right, float(kept.double().mean()))


def dion_step(layer: Layer, settings: Mapping[str, Any]) -> Update:
    """Dion's first update."""
    gradient = layer.gradient
    rank = max(1, round(settings["rank_fraction"] * min(gradient.shape)))
    return Update(Dion(gradient.shape, rank, seed=0).update(gradient))


def row_normalised(layer: Layer, settings: Mapping[str, Any]) -> Update:
    """RMNP: every row of the momentum divided by its norm."""
    return Update(nn.functional.normalize(layer.gradient, dim=1))


STEPS: dict[str, Callable[[Layer, Mapping[str, Any]], Update]] = {
    "dobb": dobb_step,
    "muon": muon_step,
    "polar": polar_step,
    "dion": dion_step,
    "rmnp": row_normalised,
}


@dataclass(frozen=True)
class Row:
    """A row of Table 9: an optimizer, the formula of `||O||_F^2` and what it gives for `m`, `n`."""

    method: Method
    formula: str
    expected: Callable[[int, int], float]


ROWS: dict[str, Row] = {
    "Dobb, B = 1": Row(Method("dobb", {"blocks": 1}), "n", lambda m, n: n),
    "Dobb, B = 16": Row(Method("dobb", {"blocks": 16}), "n", lambda m, n: n),
    "Muon, exact": Row(Method("polar"), "min(m, n)", min),
    "Muon, 5 iterations": Row(Method("muon"), "about min(m, n)", min),
    "Dion, r = n / 4": Row(Method("dion", {"rank_fraction": 1 / 4}), "r", lambda m, n: min(m, n) / 4),
    "Dobb-l2, B = 16": Row(Method("dobb", {"blocks": 16, "norm": "l2"}), "n", lambda m, n: n),
    "Dobb-G, B = 16": Row(Method("dobb", {"blocks": 16, "side": "output"}), "m", lambda m, n: m),
    "Dobb-G-l2, B = 16": Row(Method("dobb", {"blocks": 16, "side": "output", "norm": "l2"}), "m", lambda m, n: m),
    "RMNP": Row(METHODS["rmnp"], "m", lambda m, n: m),
    "RMNP, by its formula": Row(Method("rmnp"), "m", lambda m, n: m),
}
"""By name; a variant of Dobb is one line more, left out while `Dobb` lacks one of its settings."""


def table9(dead: float, shapes: Sequence[tuple[int, int]] = SHAPES, seed: int = 0) -> Result:
    """`||O||_F^2` and the RMS of `s O`, measured and expected."""
    rows: list[tuple[str | float | None, ...]] = []
    notes = []
    for name, row in ROWS.items():
        if missing := row.method.missing_settings():
            notes.append(f"{name} is left out: this megatron_dobb has no setting {', '.join(missing)}.")
            continue
        for m, n in shapes:
            update = STEPS[row.method.optimizer](Layer.random(m, n, dead, seed), row.method.settings)
            norm = float(update.raw.double().square().sum())
            expected = row.expected(m, n) * update.filled
            scale = UPDATE_SCALE * math.sqrt(max(m, n))
            rms = scale * math.sqrt(norm / (m * n))
            shape = f"{m} x {n}"
            rows.append(
                (name, shape, row.formula, update.filled, norm, expected, rms, scale * math.sqrt(expected / (m * n)))
            )
    return Result(
        "Table 9: squared norm of the raw update O, and the RMS of s O with s = 0.2 sqrt(max(m, n))",
        ("optimizer", "m x n", "formula", "filled", "||O||^2", "expected", "RMS(sO)", "expected"),
        rows,
        [
            "'filled' is the fraction of nonzero coefficients, sign(0) being 0; with l2 of nonzero columns, with Muon "
            f"of nonzero singular values. {dead:.0%} of the input features are always zero. Expected is the paper's "
            "formula times that fraction.",
            *notes,
        ],
    )


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dead", type=float, default=0.0, help="fraction of input features that are always zero")


COMMANDS = {
    "table9": Command("size of the update, measured against the formulas", lambda o: [table9(o.dead)], _arguments)
}
