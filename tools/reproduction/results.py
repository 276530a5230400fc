"""Results of the paper's experiments: the commands that make them, and the files that they are written to."""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..common.plots import picture
from ..common.tables import Result


@dataclass(frozen=True)
class Command:
    """A subcommand: one line of help, its own arguments, and what it does."""

    help: str
    run: Callable[[argparse.Namespace], list[Result]]
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None


def spread(values: Sequence[float]) -> float | None:
    """Standard deviation of a sample; None for a single value."""
    return statistics.stdev(values) if len(values) > 1 else None


def standard_error(values: Sequence[float]) -> float | None:
    """Standard error of a sample's mean; None for a single value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def save_json(results: Sequence[Result], path: Path) -> None:
    """Write tables and the data behind them."""
    written = [
        {"title": r.title, "columns": list(r.columns), "rows": [list(row) for row in r.rows], "notes": r.notes,
         "data": r.data}
        for r in results
    ]  # fmt: skip
    path.write_text(json.dumps(written, indent=1))


def save_plot(results: Sequence[Result], path: Path) -> bool:
    """Draw what can be drawn, side by side; False if nothing can."""
    drawn = [result for result in results if result.draw is not None]
    if not drawn:
        return False
    with picture(path, (7.5 * len(drawn), 4.8), columns=len(drawn)) as axes:
        for result, each in zip(drawn, axes[0], strict=True):
            assert result.draw is not None
            result.draw(each)
            each.set_title(result.title, fontsize=10)
    return True
