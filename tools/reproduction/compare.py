"""The commands that compare optimizers: `compare`, and `figure1` with its curves."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ..common.tables import Result
from .comparison import EXTENSIONS, Outcome, Plan, run_plan, table
from .curves import by_time, save_curves
from .finished_runs import FinishedRuns
from .launch import launch_commands
from .optimizers import dion_is_here, use_dion
from .options import add_training_arguments, runs_folder, size_of
from .results import Command
from .runs import DEFAULT_METHODS, METHODS, Method, MissingPart
from .watch import Watch

RATES = (1e-3, 2e-3, 4e-3)


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
    with Watch(console) as watch:
        finished = FinishedRuns(runs_folder(options))
        return plan, run_plan(plan, finished, options.jobs, options.dion_path, watch)


def compare(options: argparse.Namespace) -> list[Result]:
    console = Console()
    if options.preset == "paper":
        return [launch_commands(methods_of(options.methods, options.dion_path, console), options.seeds)]
    plan, outcomes = outcomes_of(options, console)
    result = table(plan, outcomes)
    save_curves(options.plot_dir, result, outcomes)
    return [result]


def figure1(options: argparse.Namespace) -> list[Result]:
    """The curves of a comparison; trains what is not finished."""
    if options.preset == "paper":
        raise MissingPart("figure1 --preset paper: needs GPUs; `compare --preset paper` prints the commands to run")
    plan, outcomes = outcomes_of(options, Console())
    by_step = table(plan, outcomes)
    save_curves(options.plot_dir, by_step, outcomes)
    return [by_step, by_time(outcomes)]


COMMANDS = {
    "compare": Command(
        "train with every optimizer: learning rates with one seed, then the best rate with several",
        compare,
        add_compare_arguments,
    ),
    "figure1": Command(
        "loss over steps and over time, for the optimizers of `compare`", figure1, add_compare_arguments
    ),
}
