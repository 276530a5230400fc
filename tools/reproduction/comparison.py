"""Compare optimizers by their held-out loss: first their learning rates, then the best rate with several seeds."""

import argparse
import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from .journal import Journal, Record, finish, opened
from .launch import launch_commands
from .optimizers import dion_is_here, use_dion
from .paper import FINAL_LOSS
from .results import Command, Result, save_plot, standard_error
from .runs import DEFAULT_METHODS, METHODS, PRESETS, Method, MissingPart, Run, Size
from .watch import Watch

RATES = (1e-3, 2e-3, 4e-3)
EXTENSIONS = 2
FOLDER = Path("reproduction_out")


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
    """What a comparison found for one method: losses by rate (seed 0), its best rate, and its runs at that rate."""

    losses: dict[float, float | None]
    best: float | None
    at_edge: bool
    records: list[Record]

    @property
    def finals(self) -> list[float]:
        """Held-out losses at the best rate, by seed; empty if any of them diverged."""
        finals = [record["final"] for record in self.records]
        return [] if None in finals else finals


def run_plan(plan: Plan, journal: Journal, jobs: int, dion_path: Path | None, watch: Watch) -> dict[str, Outcome]:
    """Do what the journal does not have yet, and gather the outcomes."""

    def do(runs: Sequence[Run]) -> None:
        watch.expect(len({run.key() for run in runs} - journal.records.keys()))
        finish(runs, journal, jobs, dion_path, watch.finished)

    rates = {name: sorted(plan.rates) for name in plan.methods}
    for extension in range(plan.extensions + 1):
        do([_run(plan, name, rate) for name, tried in rates.items() for rate in tried])
        for name, tried in rates.items():
            further = _next_rate(_losses(plan, journal, name, tried))
            if further is not None and extension < plan.extensions:
                tried.append(further)
    losses = {name: _losses(plan, journal, name, rates[name]) for name in plan.methods}
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
            [journal.records[run.key()] for run in finals[name]],
        )
        for name in plan.methods
    }


def _run(plan: Plan, name: str, rate: float, seed: int = 0) -> Run:
    return Run(plan.methods[name], rate, seed, plan.size)


def _losses(plan: Plan, journal: Journal, name: str, rates: Sequence[float]) -> dict[float, float | None]:
    return {rate: journal.records[_run(plan, name, rate).key()]["final"] for rate in rates}


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
    for name, outcome in outcomes.items():
        if not outcome.finals:
            continue
        steps = [int(step) for step in outcome.records[0]["held_out"] if int(step)]  # all start alike, far above
        losses = [statistics.fmean(r["held_out"][str(step)] for r in outcome.records) for step in steps]
        each = statistics.median(r["seconds"]["step_cpu_mean"] for r in outcome.records) if against == "time" else 1
        axes.plot([each * step for step in steps], losses, marker="o", ms=2.5, lw=1.4, label=name)
    what = "seconds of CPU time" if against == "time" else "step"
    axes.set(xlabel=what, ylabel="held-out loss (nats per byte)")
    axes.legend(frameon=False, fontsize=8)


def methods_of(names: Sequence[str], dion_path: Path | None, console: Console) -> dict[str, Method]:
    """The methods of these names; those that cannot run here are left out and named."""
    unknown = sorted(set(names) - METHODS.keys())
    if unknown:
        raise MissingPart(f"--methods {' '.join(unknown)}: unknown; use some of {' '.join(METHODS)}")
    use_dion(dion_path)
    chosen = {}
    for name in names:
        method = METHODS[name]
        if method.optimizer == "dion" and not dion_is_here():
            console.print(f"{name} is left out: --dion-path needs a checkout of https://github.com/microsoft/dion")
        elif missing := method.missing_settings():
            console.print(f"{name} is left out: this megatron_dobb has no setting {', '.join(missing)}")
        else:
            chosen[name] = method
    if not chosen:
        raise MissingPart(f"--methods {' '.join(names)}: none of them can run here")
    return chosen


def size_of(options: argparse.Namespace) -> Size:
    """The preset's size, with `--steps` and `--sequences` in place of its own."""
    size = PRESETS[options.preset]
    if options.sequences is not None:
        size = dataclasses.replace(size, sequences=options.sequences)
    if options.steps is not None:
        size = dataclasses.replace(size, steps=options.steps, evaluate_every=max(1, options.steps // 10))
    return size


def add_size_arguments(parser: argparse.ArgumentParser, *more: str) -> None:
    """Arguments that say how large a run is."""
    choices = [*PRESETS, *more]
    parser.add_argument("--preset", choices=choices, default="minutes", help="size of the runs (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="steps of each run, in place of the preset's")
    parser.add_argument("--sequences", type=int, help="sequences of 128 bytes in a batch, in place of the preset's")


def add_training_arguments(parser: argparse.ArgumentParser, seeds: int) -> None:
    """Arguments of every command that trains with several optimizers."""
    add_size_arguments(parser, "paper")
    parser.add_argument("--seeds", type=int, default=seeds, help="seeds of each method (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, one thread each")
    parser.add_argument("--runs", type=Path, help=f"file of finished runs (default: {FOLDER}/runs-PRESET.jsonl)")


def journal_path(options: argparse.Namespace) -> Path:
    """Where finished runs are kept."""
    return options.runs or FOLDER / f"runs-{options.preset}.jsonl"


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    add_training_arguments(parser, seeds=3)
    chosen, known = " ".join(DEFAULT_METHODS), " ".join(METHODS)
    parser.add_argument(
        "--methods", nargs="+", default=[*DEFAULT_METHODS], help=f"some of {known} (default: {chosen})", metavar="NAME"
    )
    parser.add_argument("--rates", nargs="+", type=float, default=[*RATES], help="learning rates of the first stage")
    parser.add_argument("--extensions", type=int, default=EXTENSIONS, help="rates to add where the best is at the edge")
    parser.add_argument("--dion-path", type=Path, help="a checkout of microsoft/dion")
    parser.add_argument("--plot-dir", type=Path, help="draw the curves into this folder")


def outcomes_of(options: argparse.Namespace, console: Console) -> tuple[Plan, dict[str, Outcome]]:
    """Run a comparison, or go on with it, as the options say."""
    methods = methods_of(options.methods, options.dion_path, console)
    bad = [rate for rate in options.rates if not 0 < rate < 10]
    if bad or not options.rates:
        raise MissingPart(f"--rates {bad}: learning rates must be above 0 and below 10, such as {RATES[0]:g}")
    plan = Plan(methods, sorted(options.rates), options.seeds, size_of(options), max(0, options.extensions))
    with opened(journal_path(options)) as journal, Watch(console) as watch:
        if journal.unreadable:
            console.print(f"{journal_path(options)}: {journal.unreadable} unreadable lines; those runs are done again")
        return plan, run_plan(plan, journal, options.jobs, options.dion_path, watch)


def save_curves(folder: Path | None, by_step: Result, outcomes: dict[str, Outcome]) -> None:
    """Write the comparison's plots, if a folder is given for them."""
    if folder is not None:
        from .curves import plots

        folder.mkdir(parents=True, exist_ok=True)
        for name, result in plots(by_step, outcomes).items():
            save_plot([result], folder / f"{name}.png")


def compare(options: argparse.Namespace) -> list[Result]:
    console = Console()
    if options.preset == "paper":
        return [launch_commands(methods_of(options.methods, options.dion_path, console), options.seeds)]
    plan, outcomes = outcomes_of(options, console)
    result = table(plan, outcomes)
    save_curves(options.plot_dir, result, outcomes)
    return [result]


COMMANDS = {
    "compare": Command(
        "train with every optimizer: learning rates with one seed, then the best rate with several",
        compare,
        add_compare_arguments,
    )
}
