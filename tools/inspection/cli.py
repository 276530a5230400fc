"""Open a checkpoint, look at its weights one after the other, and show what was found."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from megatron_dobb.errors import CheckpointError, ConfigError
from megatron_dobb.methods.dobb.settings import NORMS

from ..common.files import why_not_written
from ..common.tables import make_console, show, show_error
from .contents import Source
from .figures import Figures, figures_of
from .health import Finding, findings, not_looked_at
from .sources import open_checkpoint
from .tables import draw, facts_table, health_table, weights_table

FORMAT = 1
"""Version of the JSON; keys are only added while it stays the same."""


def main(words: Sequence[str] | None = None) -> int:
    """Inspect, print and write; the exit status: 2 if the checkpoint cannot be read."""
    options = _parser().parse_args(words)
    console = make_console(170)
    try:
        if options.json is not None and (problem := why_not_written("json", options.json, "figures.json")):
            raise ConfigError(problem)
        source = open_checkpoint(options.checkpoint)
        source.facts.norm = source.facts.norm or options.norm
        names = _chosen(source, options.weights)
        figures = _look(source, names)
        found, missing = findings(figures, source.facts), not_looked_at(figures, source.facts)
        show(console, [facts_table(source.facts, options.checkpoint, len(source.names)), weights_table(figures)])
        if found:
            show(console, [health_table(found)])
        else:
            console.print(
                "Nothing looks unhealthy, by the limits of docs/diagnostics.md.", style="bold", highlight=False
            )
        console.print("Not looked at:", style="bold", highlight=False)
        for line in missing:
            console.print(f"  {line}", highlight=False, markup=False)
        if options.json is not None:
            options.json.write_text(
                json.dumps(_data(options.checkpoint, source, figures, found, missing), indent=1) + "\n"
            )
        if options.plot is not None:
            for picture in draw(figures, options.plot):
                console.print(f"wrote {picture}", highlight=False, markup=False)
    except (CheckpointError, ConfigError, OSError) as error:
        return show_error(console, error)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/inspect.py",
        description="What is in a checkpoint of Dobb, and what in it looks unhealthy. Needs no Megatron and no GPU.",
    )
    parser.add_argument(
        "checkpoint",
        type=Path,
        help="Megatron's --save folder (its latest iteration) or the folder of one iteration; a folder of "
        "torch.distributed.checkpoint or a file of torch.save with the state of megatron_dobb.Dobb",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw the figures and the spectra")
    parser.add_argument(
        "--weights", nargs="+", metavar="PATTERN", help="only weights whose name matches one of these glob patterns"
    )
    parser.add_argument(
        "--norm", choices=NORMS, help="that of the run, where the checkpoint does not name it (default: sign)"
    )
    return parser


def _chosen(source: Source, patterns: Sequence[str] | None) -> list[str]:
    """The names to look at, layer after layer."""
    names = sorted(source.names, key=_in_order)
    if not patterns:
        return names
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"--weights {pattern} matches no weight on Dobb; one of them is {names[0] if names else None}"
            )
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _in_order(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def _look(source: Source, names: Sequence[str]) -> list[Figures]:
    """The figures of each; only one weight's tensors are in memory at a time."""
    found = []
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for name in progress.track(names, description="looking at weights"):
            found.append(figures_of(name, source.state(name), source.facts))
    return found


def _data(
    path: Path, source: Source, figures: Sequence[Figures], found: Sequence[Finding], missing: Sequence[str]
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "checkpoint": str(path),
        "facts": asdict(source.facts),
        "weights": [asdict(each) for each in figures],
        "unhealthy": [asdict(each) for each in found],
        "not_looked_at": list(missing),
    }


if __name__ == "__main__":
    sys.exit(main())
