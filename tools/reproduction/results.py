"""How results are shown: as a table in the terminal, as JSON and as a plot."""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Cell = str | int | float | None

NAME_WIDTH = 40  # of the first column, before the headings of the others are broken


@dataclass
class Result:
    """One table of ours beside the paper's.

    Attributes:
        title: what is shown, with the paper's table number.
        columns: headings.
        rows: cells; None is a figure that does not exist.
        notes: what to know when reading it.
        data: everything behind the table, for JSON.
        draw: draws it on matplotlib axes; None where a plot says nothing.
        words: whether the cells are words, which begin on the left.
    """

    title: str
    columns: Sequence[str]
    rows: list[Sequence[Cell]]
    notes: list[str] = field(default_factory=list)
    data: Any = None
    draw: Callable[[Any], None] | None = None
    words: bool = False


@dataclass(frozen=True)
class Command:
    """A subcommand: one line of help, its own arguments, and what it does."""

    help: str
    run: Callable[[argparse.Namespace], list[Result]]
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None


def shown(cell: Cell) -> str:
    """A cell as the table shows it."""
    if cell is None:
        return "-"
    return (
        f"{cell:.4g}" if isinstance(cell, float) and abs(cell) >= 100 else f"{cell:.3f}" if _real(cell) else str(cell)
    )


def _real(cell: Cell) -> bool:
    return isinstance(cell, float)


def spread(values: Sequence[float]) -> float | None:
    """Standard deviation of a sample; None for a single value."""
    return statistics.stdev(values) if len(values) > 1 else None


def standard_error(values: Sequence[float]) -> float | None:
    """Standard error of a sample's mean; None for a single value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def show(console: Console, results: Sequence[Result]) -> None:
    """Print every table with its notes."""
    for result in results:
        table = Table(title=result.title)
        for number, heading in enumerate(result.columns):
            room = max((len(shown(row[0])) for row in result.rows), default=0) if number == 0 else 0
            justify = "right" if number and not result.words else "left"
            table.add_column(heading, justify=justify, overflow="fold", min_width=min(room, NAME_WIDTH))
        for row in result.rows:
            table.add_row(*(shown(cell) for cell in row))
        console.print(table)
        for note in result.notes:
            console.print(f"  {note}", highlight=False)


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
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(drawn), figsize=(7.5 * len(drawn), 4.8), layout="constrained", squeeze=False)
    for result, each in zip(drawn, axes[0], strict=True):
        assert result.draw is not None
        result.draw(each)
        each.set_title(result.title, fontsize=10)
        each.grid(alpha=0.25)
        each.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)
    plt.close(figure)
    return True
