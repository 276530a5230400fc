"""What the quickstart shows at the end: the curves, a table and the outcome in a sentence."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("agg")

from matplotlib import pyplot as plt
from rich.table import Table
from trainings import SEQUENCE, SEQUENCES_PER_STEP, Training

_COLOURS = ("#0072b2", "#d55e00", "#e69f00", "#999999")


def save_results(trainings: Sequence[Training], path: Path) -> None:
    """Write all losses and times as JSON."""
    results = [
        {
            "name": training.name,
            "learning_rate": training.learning_rate,
            "steps": training.steps,
            "validation_loss": training.validation_loss,
            "train_loss": training.train_loss,
            "step_ms": training.step_ms,
        }
        for training in trainings
    ]
    path.write_text(json.dumps(results, indent=1))


def save_curves(trainings: Sequence[Training], path: Path) -> None:
    """Plot the validation loss of every training over the steps."""
    figure, axes = plt.subplots(figsize=(7.5, 4.8), layout="constrained")
    for training, colour in zip(trainings, _COLOURS, strict=False):
        steps, losses = zip(*sorted(training.validation_loss.items()), strict=True)
        width = 2.4 if training is trainings[0] else 1.6
        axes.plot(steps, losses, color=colour, lw=width, marker="o", ms=3.5, label=training.name)
        axes.annotate(
            f"{losses[-1]:.3f}", (steps[-1], losses[-1]), xytext=(5, 0), textcoords="offset points", va="center"
        )
    axes.set(xlabel=f"step ({SEQUENCES_PER_STEP * SEQUENCE:,} bytes each)", ylabel="validation loss (nats per byte)")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:.1f}")
    axes.yaxis.set_minor_formatter("{x:.1f}")
    axes.grid(which="both", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    axes.set_title("A small GPT on English text, Megatron-Core on two CPU processes", fontsize=11)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def table(trainings: Sequence[Training]) -> Table:
    """Tabulate steps, losses and step times of the trainings."""
    dobb = trainings[0]
    result = Table(title="After training")
    for heading in ("optimizer", "learning rate", "steps", "held-out loss", "Dobb gets there at", "ms per step"):
        result.add_column(heading, justify="left" if heading == "optimizer" else "right")
    for training in trainings:
        reached = step_at_loss(dobb, training.final_loss) if training is not dobb else None
        result.add_row(
            training.name.partition(",")[0],
            f"{training.learning_rate:.3g}",
            str(training.steps),
            f"{training.final_loss:.3f}",
            "" if training is dobb else f"step {reached}" if reached is not None else "never",
            f"{median_step_ms(training):.0f}",
        )
    return result


def verdict(trainings: Sequence[Training]) -> str:
    """Compare Dobb's final loss with the best of the others."""
    dobb, *others = trainings
    best = min(others, key=_final_loss_or_infinity)
    difference = best.final_loss - dobb.final_loss
    if math.isnan(difference):
        return "A loss is not a number: see the logs."
    where = "below" if difference > 0 else "above"
    return f"Dobb ends {abs(difference):.3f} {where} the best AdamW (learning rate {best.learning_rate:.3g})."


def step_at_loss(training: Training, loss: float) -> int | None:
    """The step at which the validation loss reached a value, interpolated between evaluations."""
    previous = None
    for step, value in sorted(training.validation_loss.items()):
        if value <= loss:
            if previous is None or previous[1] <= value:
                return step
            start, before = previous
            return round(start + (step - start) * (before - loss) / (before - value))
        previous = step, value
    return None


def median_step_ms(training: Training) -> float:
    """Median over the log's entries, to exclude start-up and outliers."""
    times = sorted(training.step_ms.values())
    return times[len(times) // 2]


def _final_loss_or_infinity(training: Training) -> float:
    return math.inf if math.isnan(training.final_loss) else training.final_loss
