"""The tables and the pictures of a checkpoint."""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import batched
from pathlib import Path
from statistics import fmean
from typing import Any

from ..common.plots import picture
from ..common.tables import Cell, Result
from .contents import Facts
from .figures import Figures
from .health import HIGHEST_RESIDUAL, NO_BASIS, Finding, listed

MOST_ROWS = 60
"""Weights that are shown one by one; more are shown by kind."""

MOST_KINDS = 8  # of weights in one picture of spectra
LOWEST = 1e-9  # eigenvalue over the largest that is drawn

_COUNTED = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)|(?<=weight)\d+$")

_COLUMNS: tuple[tuple[str, Callable[[Figures], Cell]], ...] = (
    ("A: eff. rank", lambda found: found.moment_effective_rank),
    ("residual", lambda found: found.basis_residual),
    ("|Q^T Q - I|", lambda found: f"{found.basis_error:.1e}" if found.basis_error is not None else None),
    ("orthogonality", lambda found: found.orthogonality),
    ("O: eff. rank", lambda found: found.update_effective_rank),
    ("dead features", lambda found: found.dead_features),
    ("zero rows of M", lambda found: found.zero_momentum_rows),
    ("identity blocks", lambda found: found.identity_blocks),
)


def facts_table(facts: Facts, path: Path, names: int) -> Result:
    """Table of the facts on the run."""

    def text(value: Any) -> str:
        return "not in this checkpoint" if value is None else str(value)

    sequences = facts.capture_sequences if facts.capture_sequences is not None else "all, or not settled yet"
    rows: list[Sequence[Cell]] = [
        ("checkpoint", str(path)),
        ("written by", "Megatron" if facts.kind == "megatron" else "megatron_dobb.Dobb"),
        ("layout", facts.layout),
        ("format of Dobb's state", "torch's own" if facts.kind == "plain" else text(facts.format_version)),
    ]
    if facts.kind == "megatron":
        rows.append(("iteration", text(facts.iteration)))
    rows += [
        ("optimizer steps", text(facts.attempted_steps)),
        ("captured sequences", str(sequences)),
        ("variant", f"norm {facts.norm or 'unknown'}, side {facts.side}, source {facts.source}"),
        ("weights on Dobb", names),
    ]
    if facts.refresh_is_asked:
        rows.append(("refresh", "the next step refreshes, whatever the schedule says"))
    rows += [
        (key.replace("_", " "), str(value)) for key, value in facts.settings.items() if value not in (None, {}, [])
    ]
    rows += [(key.replace("_", " "), value) for key, value in facts.run.items() if value is not None]
    return Result("The checkpoint", ("what", "value"), rows, words=True)


def weights_table(figures: Sequence[Figures]) -> Result:
    """Every weight, or every kind of weight where there are many."""
    heads = [head for head, _ in _COLUMNS]
    notes = [
        "A: second moments; Q: bases; O: the update that the saved momentum M would make, without a gradient. Ranks "
        "are fractions; residual: ||offdiag(Q^T A Q)|| / ||A||."
    ]
    if len(figures) <= MOST_ROWS:
        rows = [(each.name, _shape(each), *(of(each) for _, of in _COLUMNS)) for each in figures]
        return Result("Weights", ("weight", "m x n, B x b", *heads), rows, notes)
    kinds: dict[tuple[str, str], list[Figures]] = {}
    for each in figures:
        kinds.setdefault((kind_of(each.name), _shape(each)), []).append(each)
    rows = [
        (f"{kind} ({len(members)})", shape, *(_range([of(each) for each in members]) for _, of in _COLUMNS))
        for (kind, shape), members in kinds.items()
    ]
    notes.append("Smallest, mean and largest of each kind; --weights PATTERN shows single ones, --json all.")
    return Result("Kinds of weights", ("weights", "m x n, B x b", *heads), rows, notes)


def kind_of(name: str) -> str:
    """Name of a weight that all layers and experts share, without the numbers that count them."""
    return _COUNTED.sub("*", name)


def _layer(name: str) -> int:
    """The first number in a name, or 0."""
    return int(next((part for part in name.split(".") if part.isdecimal()), 0))


def _shape(found: Figures) -> str:
    rows, columns = found.rows or "?", found.columns or "?"
    blocks = f", {found.blocks} x {found.width}" if found.blocks else ""
    return f"{rows} x {columns}{blocks}"


def _range(cells: Sequence[Cell]) -> Cell:
    known = [float(cell) for cell in cells if cell is not None]
    if not known:
        return None
    figures = [f"{value:.3g}" for value in (min(known), fmean(known), max(known))]
    return figures[0] if min(known) == max(known) else " / ".join(figures)


def health_table(found: Sequence[Finding]) -> Result:
    """Table of the unhealthy signs, their weights and the advice."""
    rows: list[Sequence[Cell]] = [(each.sign, _worst(each), each.limit, each.meaning, each.advice) for each in found]
    return Result("What looks unhealthy", ("sign", "weights", "when", "it means", "do"), rows, words=True)


def _worst(finding: Finding) -> str:
    shown = [f"{name} ({value:.3g})" if not isinstance(value, str) else f"{name} ({value})"
             for name, value in finding.weights.items()]  # fmt: skip
    return listed(shown)


def draw(figures: Sequence[Figures], folder: Path) -> list[Path]:
    """Draw the figures over the weights, and the spectra of each kind; returns the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    kinds: dict[str, list[Figures]] = {}
    for each in figures:
        kinds.setdefault(kind_of(each.name), []).append(each)
    written = [folder / "layers.png"]
    _draw_layers(kinds, written[0])
    spectra = [(kind, [each for each in members if each.spectrum]) for kind, members in kinds.items()]
    for page, chosen in enumerate(batched([each for each in spectra if each[1]], MOST_KINDS)):
        written.append(folder / ("spectra.png" if page == 0 else f"spectra-{page + 1}.png"))
        _draw_spectra(chosen, written[-1])
    return written


def _draw_layers(kinds: Mapping[str, Sequence[Figures]], path: Path) -> None:
    panels: tuple[tuple[str, Callable[[Figures], float | None], float | None], ...] = (
        ("effective rank of A (fraction)", lambda found: found.moment_effective_rank, None),
        ("basis residual", lambda found: found.basis_residual, HIGHEST_RESIDUAL),
        ("orthogonality of the update", lambda found: found.orthogonality, NO_BASIS),
        ("effective rank of the update (fraction)", lambda found: found.update_effective_rank, None),
    )
    with picture(path, (12, 7), 2, 2, dpi=110) as axes:
        for axis, (title, of, limit) in zip(axes.flat, panels, strict=True):
            for kind, members in kinds.items():
                points = [(_layer(each.name), value) for each in members if (value := of(each)) is not None]
                style = "o-" if len(dict(points)) == len(points) else "o"  # experts of one layer
                if points:
                    axis.plot(*zip(*points, strict=True), style, ms=3, label=kind)
            if limit is not None:
                axis.axhline(limit, color="gray", linestyle=":", linewidth=1)
            if not axis.lines or (limit is not None and len(axis.lines) == 1):
                axis.text(0.5, 0.5, "not in this checkpoint", ha="center", transform=axis.transAxes)
            axis.set(title=title, ylim=(0, None), xlabel="layer")
            axis.xaxis.get_major_locator().set_params(integer=True)
        legend = axes.flat[0].get_legend_handles_labels()
        axes.flat[0].figure.legend(*legend, loc="outside lower center", ncols=2, frameon=False)


def _draw_spectra(kinds: Sequence[tuple[str, Sequence[Figures]]], path: Path) -> None:
    lowest = max(LOWEST, min(each.spectrum[-1] for _, members in kinds for each in members))
    columns = min(4, len(kinds))
    rows = -(-len(kinds) // columns)
    from matplotlib import colormaps

    with picture(path, (4.2 * columns, 3.4 * rows), rows, columns, dpi=110) as axes:
        for axis in axes.flat[len(kinds) :]:
            axis.set_visible(False)
        for axis, (kind, members) in zip(axes.flat, kinds, strict=False):
            for number, each in enumerate(members):
                ranks = [place / max(1, len(each.spectrum) - 1) for place in range(len(each.spectrum))]
                axis.plot(ranks, each.spectrum, color=colormaps["viridis"](number / max(1, len(members) - 1)), lw=1)
            axis.set_yscale("log")
            axis.set_ylim(bottom=lowest / 2, top=2)
            axis.set_title(kind, fontsize=8)
            axis.set(xlabel="rank (fraction)", ylabel="eigenvalue / largest")
        axes.flat[0].figure.suptitle(
            "spectra of A, all blocks together; from the first weight of a kind (dark) to the last", fontsize=9
        )
