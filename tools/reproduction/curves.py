"""Figure 1: what a comparison draws, losses over steps and over time."""

import statistics
from pathlib import Path
from typing import Any

from ..common.tables import Result
from .comparison import Outcome, draw_curves
from .results import save_plot, standard_error


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
    """Plots of a comparison, by the names of the files; nothing where every method diverged."""
    if not any(outcome.finals for outcome in outcomes.values()):
        return {}
    return {"loss-by-step": by_step, "loss-by-time": by_time(outcomes), "final-loss": final_losses(outcomes)}


def save_curves(folder: Path | None, by_step: Result, outcomes: dict[str, Outcome]) -> None:
    """Write the comparison's plots, if a folder is given for them."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, result in plots(by_step, outcomes).items():
            save_plot([result], folder / f"{name}.png")
