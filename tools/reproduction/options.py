"""Options that several commands share: how large their runs are, how many, and where finished ones are kept."""

import argparse
import dataclasses
from pathlib import Path

from .runs import PRESETS, Size

FOLDER = Path("reproduction_out")


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
    parser.add_argument("--runs", type=Path, help=f"folder of finished runs (default: {FOLDER}/runs-PRESET)")


def runs_folder(options: argparse.Namespace) -> Path:
    """Folder of finished runs."""
    return options.runs or FOLDER / f"runs-{options.preset}"
