"""Tables 11 to 19: one setting of Dobb changed at a time. The question is whether the order is the paper's."""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from ..common.tables import Result
from .finished_runs import FinishedRuns, Record, finish
from .launch import launch_commands
from .options import add_training_arguments, runs_folder, size_of
from .results import Command, standard_error
from .runs import Method, MissingPart, Run, dobb
from .watch import Watch

NOISE = 0.006
"""Differences below this look like the noise of one seed in the paper's ablations."""


INTERVAL_NOTE = "T is 1 where a variant does not give it: a short training has too few steps for the paper's 9."


@dataclass(frozen=True)
class Variant:
    """A variant: what the table calls it, Dobb with its settings, and the paper's loss."""

    label: str
    method: Method
    paper: float | None


def _variant(label: str, paper: float | None, blocks: int = 1, **settings: Any) -> Variant:
    return Variant(label, dobb(blocks, **settings), paper)


def _sides(blocks: int, paper: float, **settings: Any) -> Variant:
    words = [f"{key} {value}" for key, value in settings.items()] or ["principal"]
    return _variant(f"{', '.join(words)}, B = {blocks}", paper, blocks, **settings)


ABLATIONS: dict[str, tuple[Variant, ...]] = {
    "refresh-interval": tuple(
        _variant(f"T = {interval}", paper, refresh_interval=interval)
        for interval, paper in ((1, 3.005), (4, 3.014), (9, 3.017), (16, 3.017), (100, 3.015))
    ),
    "iterations": (
        *(_variant(f"k = {k}", paper, iterations=k) for k, paper in ((1, 3.017), (2, 3.019), (3, 3.017))),
        _variant("exact eigenvectors", 3.015, qr="eigh"),
    ),
    "qr": (
        _variant("Householder, B = 1", 3.017),
        _variant("Cholesky, B = 1", 3.016, qr="cholesky"),
        _variant("Householder, B = 4", 3.024, blocks=4),
        _variant("Cholesky, B = 4", 3.022, blocks=4, qr="cholesky"),
    ),
    "capture": (
        _variant("two sequences of the batch", 3.017, capture_sequences=2),
        _variant("the whole batch", 3.021, capture="all"),
    ),
    "precision": tuple(
        _variant(f"moments {moment}, bases {basis}", paper, moment_dtype=moment, basis_dtype=basis)
        for moment, basis, paper in (
            *(("fp32", "fp32", 3.023), ("fp32", "bf16", 3.017)),
            *(("bf16", "fp32", 3.028), ("bf16", "bf16", 3.027)),
        )
    ),
    "nesterov": (_variant("off", 3.017), _variant("on", 3.014, nesterov=True)),
    "norm": (
        *(_variant(f"sign, B = {b}", paper, b) for b, paper in ((1, 3.017), (4, 3.024), (16, 3.026))),
        *(_variant(f"l2, B = {b}", paper, b, norm="l2") for b, paper in ((1, 3.043), (4, 3.037), (16, 3.036))),
    ),
    "side-and-source": (
        _sides(1, 3.017),
        _sides(1, 3.071, side="output"),
        _sides(1, 3.077, side="output", norm="l2"),
        _sides(1, 3.027, source="gram"),
        _sides(1, 3.055, source="gram", side="output"),
    ),
}
"""By name; the first variant of each is what differences are taken from."""


def table(name: str, variants: Sequence[Variant], records: dict[str, list[Record]], notes: list[str]) -> Result:
    """Losses of all variants beside the paper's."""
    rows: list[tuple[Any, ...]] = []
    base = records[variants[0].label]
    for variant in variants:
        own = records[variant.label]
        finals = [r["final"] for r in own]
        if None in finals:
            rows.append((variant.label, "diverged", None, None, None, variant.paper, None))
            continue
        differences: list[float | None] = [None, None, None]
        if variant is not variants[0] and None not in [r["final"] for r in base]:
            margins = [ours - r["final"] for ours, r in zip(finals, base, strict=True)]
            differences = [statistics.fmean(margins), standard_error(margins), None]
            if variant.paper and variants[0].paper:
                differences[2] = variant.paper - variants[0].paper
        difference, error, paper = differences
        own_figures = (statistics.fmean(finals), standard_error(finals), difference, error)
        rows.append((variant.label, *own_figures, variant.paper, paper))
    first = variants[0].label
    return Result(
        f"Ablation {name}: held-out loss of Dobb",
        ("variant", "ours", "s.e.", f"- {first}", "s.e.", "paper", f"paper - {first}"),
        rows,
        [
            f"Ours in nats per byte, the paper's per token of GPT-2 Small, where below {NOISE} is noise.",
            INTERVAL_NOTE,
            *notes,
        ],
        records,
        lambda axes: _draw(axes, variants, records),
    )


def _draw(axes: Any, variants: Sequence[Variant], records: dict[str, list[Record]]) -> None:
    for variant in variants:
        steps = [step for step in records[variant.label][0]["held_out"] if int(step)]
        losses = [statistics.fmean(r["held_out"].get(s, float("nan")) for r in records[variant.label]) for s in steps]
        axes.plot([int(step) for step in steps], losses, "o-", ms=2.5, label=variant.label)
    axes.set(xlabel="step", ylabel="held-out loss (nats per byte)")
    axes.legend(frameon=False, fontsize=8)


def _run(options: argparse.Namespace) -> list[Result]:
    if options.name not in ABLATIONS:
        raise MissingPart(f"ablation {options.name}: unknown; use one of {', '.join(ABLATIONS)}")
    console = Console()
    variants = ABLATIONS[options.name]
    if options.preset == "paper":
        return [launch_commands({v.label: v.method for v in variants}, options.seeds)]
    notes = [
        f"{v.label} is left out: this megatron_dobb has no setting {', '.join(v.method.missing_settings())}."
        for v in variants
        if v.method.missing_settings()
    ]
    able = [v for v in variants if not v.method.missing_settings()]
    size = size_of(options)
    runs = {v.label: [Run(v.method, options.lr, seed, size) for seed in range(options.seeds)] for v in able}
    everything = [run for of_variant in runs.values() for run in of_variant]
    finished = FinishedRuns(runs_folder(options))
    with Watch(console) as watch:
        watch.expect(len({run.key() for run in everything} - finished.records.keys()))
        finish(everything, finished, options.jobs, None, watch.finished)
        records = {label: [finished.records[run.key()] for run in of_variant] for label, of_variant in runs.items()}
    return [table(options.name, able, records, notes)]


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help=f"one of {', '.join(ABLATIONS)}")
    add_training_arguments(parser, seeds=3)
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of all (default: %(default)s)")


COMMANDS = {"ablation": Command("Dobb with one setting changed at a time (Tables 11 to 19)", _run, _arguments)}
