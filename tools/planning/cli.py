"""Plan what Dobb would cost on a model and a parallel layout: blocks, padding, memory, bytes and time of its ranks."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.progress import track

from megatron_dobb.errors import BlockError, ConfigError, LayoutError, UnsupportedError

from ..common.tables import make_console, show, show_error
from .alternatives import COUNTS, alternatives, with_blocks
from .arguments import read
from .plan import Request, plan
from .request import request_of
from .summary import heaviest, plan_data, refusal_data, stage_data
from .tables import refusal_table, tables, trade_off


def main(words: Sequence[str] | None = None) -> int:
    """Plan, print and write; the exit status: 2 if it cannot be."""
    console = make_console(140)
    try:
        return _main(words, console)
    except OSError as error:
        return show_error(console, f"{error}; give --json and --plot files that can be written")


def _main(words: Sequence[str] | None, console: Console) -> int:
    try:
        options, ignored = read(sys.argv[1:] if words is None else words)
        request, notes = request_of(options)
    except (ConfigError, UnsupportedError) as error:
        return show_error(console, error)
    try:
        stages = plan(request)
    except (BlockError, LayoutError) as error:
        show_error(console, error)
        data = refusal_data(request, str(error), alternatives(request), notes, ignored)
        show(console, [refusal_table(data["alternatives"])])
        _save(data, options.json)
        return 2
    except (ConfigError, UnsupportedError) as error:
        return show_error(console, error)
    data = plan_data(request, stages, notes, ignored)
    name = options.preset or (str(options.args) if options.args else "a model of the given sizes")
    console.print(f"{name}: {request.parallel}, {request.parallel.ranks:,} ranks", style="bold", highlight=False)
    for note in notes:
        console.print(f"  {note}", highlight=False, markup=False)
    if ignored:
        console.print(f"  not looked at in {options.args}: {' '.join(ignored)}", highlight=False, markup=False)
    show(console, tables(data))
    if options.plot is not None:
        data["trade_off"] = _trade_off(request, console)
        trade_off(data["trade_off"], options.plot)
    _save(data, options.json)
    return 0


def _trade_off(request: Request, console: Console) -> list[dict[str, Any]]:
    """The heaviest rank's figures for every usual B that works, and for the one that was asked for."""
    points = []
    asked = request.config.blocks
    for count in track(
        sorted({*COUNTS, *([asked] if isinstance(asked, int) else [])}),
        "planning for every B",
        console=console,
        transient=True,
    ):
        try:
            stages = plan(replace(request, config=with_blocks(request.config, count)))
        except ConfigError:
            continue
        points.append({"blocks": count} | heaviest([stage_data(stage) for stage in stages]))
    return points


def _save(data: dict[str, Any], path: Any) -> None:
    if path is not None:
        path.write_text(json.dumps(data, indent=1) + "\n")
