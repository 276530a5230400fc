"""Compare optimizers by their held-out loss: first their learning rates, then the best rate with several seeds."""

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.tables import Result
from .finished_runs import FinishedRuns, Record, finish
from .paper import FINAL_LOSS
from .results import standard_error
from .runs import Method, Run, Size
from .watch import Watch

EXTENSIONS = 2
COLOURS = 10
"""Number of curves with colours of their own in matplotlib; further ones differ in their dashes."""


@dataclass
class Plan:
    """A comparison.

    Attributes:
        methods: what is compared, by name.
        rates: learning rates of the first stage, rising.
        seeds: how many seeds each method has at its best rate; seed 0 is that of the first stage.
        size: the model and its training.
        extensions: how often the grid may grow by one rate where a method's best is its first or last.
    """

    methods: dict[str, Method]
    rates: Sequence[float]
    seeds: int
    size: Size
    extensions: int = EXTENSIONS


@dataclass
class Outcome:
    """Result of a comparison for one method: losses by rate (seed 0), its best rate, and its runs at that rate."""

    losses: dict[float, float | None]
    best: float | None
    at_edge: bool
    records: list[Record]

    @property
    def finals(self) -> list[float]:
        """Held-out losses at the best rate, by seed; empty if any of them diverged."""
        finals = [record["final"] for record in self.records]
        return [] if None in finals else finals


def run_plan(plan: Plan, finished: FinishedRuns, jobs: int, dion_path: Path | None, watch: Watch) -> dict[str, Outcome]:
    """Do the runs that are not finished, and gather the outcomes."""

    def do(runs: Sequence[Run]) -> None:
        watch.expect(len({run.key() for run in runs} - finished.records.keys()))
        finish(runs, finished, jobs, dion_path, watch.finished)

    rates = {name: sorted(plan.rates) for name in plan.methods}
    for extension in range(plan.extensions + 1):
        do([_run(plan, name, rate) for name, tried in rates.items() for rate in tried])
        for name, tried in rates.items():
            further = _next_rate(_losses(plan, finished, name, tried))
            if further is not None and extension < plan.extensions:
                tried.append(further)
    losses = {name: _losses(plan, finished, name, rates[name]) for name in plan.methods}
    best = {name: _best(found) for name, found in losses.items()}
    finals = {
        name: [_run(plan, name, rate, seed) for seed in range(plan.seeds)] if rate is not None else []
        for name, rate in best.items()
    }
    do([run for runs in finals.values() for run in runs])
    return {
        name: Outcome(
            losses[name],
            best[name],
            _next_rate(losses[name]) is not None,
            [finished.records[run.key()] for run in finals[name]],
        )
        for name in plan.methods
    }


def _run(plan: Plan, name: str, rate: float, seed: int = 0) -> Run:
    return Run(plan.methods[name], rate, seed, plan.size)


def _losses(plan: Plan, finished: FinishedRuns, name: str, rates: Sequence[float]) -> dict[float, float | None]:
    return {rate: finished.records[_run(plan, name, rate).key()]["final"] for rate in rates}


def _best(losses: dict[float, float | None]) -> float | None:
    finite = {rate: loss for rate, loss in losses.items() if loss is not None}
    return min(finite, key=lambda rate: finite[rate]) if finite else None


def _next_rate(losses: dict[float, float | None]) -> float | None:
    """Half the lowest or twice the highest rate, if that one is the best; None if the best lies between others."""
    best = _best(losses)
    if best is None or best == min(losses):
        return min(losses) / 2
    return best * 2 if best == max(losses) else None


def table(plan: Plan, outcomes: dict[str, Outcome]) -> Result:
    """Losses and times of all methods, best first."""
    reference = outcomes.get("adamw")
    rows: list[Sequence[Any]] = []
    notes = []
    for name, outcome in sorted(outcomes.items(), key=lambda pair: statistics.fmean(pair[1].finals or [1e9])):
        finals = outcome.finals
        margin: list[float] = []
        if reference is not None and len(finals) == len(reference.finals):
            margin = [ours - theirs for ours, theirs in zip(finals, reference.finals, strict=True)]
        seconds = [record["seconds"] for record in outcome.records]
        rows.append(
            (
                name,
                f"{outcome.best:.3g}" if outcome.best is not None else None,
                statistics.fmean(finals) if finals else "diverged",
                standard_error(finals),
                statistics.fmean(margin) if margin and name != "adamw" else None,
                standard_error(margin) if name != "adamw" else None,
                FINAL_LOSS.get(plan.methods[name].paper),
                1e3 * statistics.median(s["optimizer_cpu_mean"] for s in seconds) if seconds else None,
                1e3 * statistics.median(s["step_cpu_mean"] for s in seconds) if seconds else None,
            )
        )
        if outcome.at_edge:
            rates = ", ".join(f"{rate:.3g}" for rate in sorted(outcome.losses))
            notes.append(f"{name}: its best rate is at the edge of those tried ({rates}); a better one may lie beyond.")
    size = plan.size
    return Result(
        f"Held-out loss after {size.steps} steps of {size.sequences * size.context:,} bytes, {plan.seeds} seeds",
        ("optimizer", "rate", "loss", "s.e.", "- AdamW", "s.e.", "paper, Small", "optimizer ms", "step ms"),
        rows,
        [
            "Loss in nats per byte at each method's best learning rate; differences from AdamW are of equal seeds. "
            "The paper's are nats per token of GPT-2 Small: compare the order and the signs of the gaps.",
            "Times are CPU time per step of one thread, refreshes included.",
            f"Dobb's T is {size.refresh_interval}, so that a short training has enough refreshes (paper: 9).",
            *notes,
        ],
        {name: dataclasses.asdict(outcome) for name, outcome in outcomes.items()},
        lambda axes: draw_curves(axes, outcomes, against="step"),
    )


def draw_curves(axes: Any, outcomes: dict[str, Outcome], against: str) -> None:
    """Mean held-out loss over the seeds, against steps or seconds of CPU time."""
    shown = {name: outcome for name, outcome in outcomes.items() if outcome.finals}
    for number, (name, outcome) in enumerate(shown.items()):
        dashes = ("-", "--", ":")[number // COLOURS % 3]
        steps = [int(step) for step in outcome.records[0]["held_out"] if int(step)]  # all start alike, far above
        losses = [statistics.fmean(r["held_out"][str(step)] for r in outcome.records) for step in steps]
        each = statistics.median(r["seconds"]["step_cpu_mean"] for r in outcome.records) if against == "time" else 1
        axes.plot([each * step for step in steps], losses, dashes, marker="o", ms=2.5, lw=1.4, label=name)
    what = "seconds of CPU time" if against == "time" else "step"
    axes.set(xlabel=what, ylabel="held-out loss (nats per byte)")
    axes.legend(frameon=False, fontsize=8)
