"""Tables of the terminal, and the errors in place of them."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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


def shown(cell: Cell) -> str:
    """A cell as the table shows it."""
    if isinstance(cell, float):
        return f"{cell:.4g}" if abs(cell) >= 100 else f"{cell:.3f}"
    return "-" if cell is None else str(cell)


def make_console(width: int) -> Console:
    """A console as wide as its terminal, or `width` characters where its output goes elsewhere."""
    return Console(width=None if os.isatty(1) else width)


def show_error(console: Console, error: Exception | str) -> int:
    """Print an error as one line that can be copied; the exit status of a program that ends with it."""
    console.print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
    return 2


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
