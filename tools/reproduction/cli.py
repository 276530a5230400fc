"""The command line of `tools/reproduce.py`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_dobb.errors import DobbError

from ..common.files import why_not_written
from ..common.tables import make_console, show, show_error
from . import ablations, compare, geometry, orthogonality, spectra, traffic, update_size
from .results import Command, save_json, save_plot
from .runs import MissingPart

COMMANDS: dict[str, Command] = {
    **orthogonality.COMMANDS,
    **geometry.COMMANDS,
    **traffic.COMMANDS,
    **update_size.COMMANDS,
    **compare.COMMANDS,
    **ablations.COMMANDS,
    **spectra.COMMANDS,
}


FILES = {"json": ".json", "plot": ".png", "save": ".pt"}
"""Options that name a file to write, and how its name may end."""

FOLDERS = {"plot_dir": "curves", "runs": "runs"}
"""Options that name a folder to write to, and an example."""

NUMBERS = {"lr": (1e-9, 10, 2e-3), "dead": (0, 1, 0.1)}
"""Least, limit and an example of other numbers."""


def read_options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, and refuse what could only fail after the work is done."""
    parser = argparse.ArgumentParser(prog="tools/reproduce.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        own = commands.add_parser(name, help=command.help, description=command.help)
        own.add_argument("--json", type=Path, help="write the tables and the data behind them to this file")
        own.add_argument("--plot", type=Path, help="draw them into this file, such as figure.png")
        own.add_argument("--threads", type=int, default=None, help="CPU threads of this process (default: PyTorch's)")
        command.add_arguments(own)
    options = parser.parse_args(words)
    for name, suffix in FILES.items():
        path = getattr(options, name, None)
        if path is not None and (problem := why_not_written(name, path, options.command + suffix)):
            parser.error(problem)
    for name, example in FOLDERS.items():
        folder = getattr(options, name, None)
        if folder is not None and folder.exists() and not folder.is_dir():
            parser.error(f"--{name.replace('_', '-')} {folder} is a file: give a folder, such as {example}")
    for name, (least, most, usual) in NUMBERS.items():
        value = getattr(options, name, None)
        if value is not None and not least <= value < most:
            parser.error(f"--{name} {value}: must be at least {least:g} and below {most:g}, such as {usual:g}")
    for name in ("threads", "seeds", "jobs", "steps", "sequences", "refreshes", "size"):
        value = getattr(options, name, None)
        if isinstance(value, int) and value < 1:
            parser.error(f"--{name} {value}: must be 1 or more")
    return options


def main(words: Sequence[str] | None = None) -> int:
    """Run one subcommand; the exit status."""
    options = read_options(words)
    if options.threads:
        torch.set_num_threads(options.threads)
    console = make_console(140)
    try:
        results = COMMANDS[options.command].run(options)
    except (MissingPart, DobbError) as error:
        return show_error(console, error)
    show(console, results)
    if options.json:
        save_json(results, options.json)
    if options.plot and not save_plot(results, options.plot):
        console.print(f"--plot {options.plot}: nothing of {options.command} can be drawn; no file was written")
        return 2
    return 0
