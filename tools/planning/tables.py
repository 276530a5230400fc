"""A plan for people: tables, and a plot of what B trades for what."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..common.plots import picture
from ..common.tables import Cell, Result

MIB, GIB = 2**20, 2**30


def size(number: float) -> str:
    """Bytes in the unit that fits."""
    for unit, of in (("GiB", GIB), ("MiB", MIB), ("KiB", 1024)):
        if number >= of:
            return f"{number / of:,.2f} {unit}"
    return f"{number:.0f} B"


def duration(seconds: float) -> str:
    """Seconds in the unit that fits."""
    return f"{1e3 * seconds:,.2f} ms" if seconds >= 1e-4 else f"{1e6 * seconds:,.1f} us"


def numbers(stages: Sequence[int]) -> str:
    """Stage numbers, runs of them shortened."""
    runs: list[list[int]] = []
    for stage in stages:
        if runs and runs[-1][-1] == stage - 1:
            runs[-1].append(stage)
        else:
            runs.append([stage])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def tables(data: dict[str, Any]) -> list[Result]:
    """All tables of a plan."""
    return [_matrices(data), _buffers(data), _memory(data), _traffic(data), _times(data)]


def _matrices(data: dict[str, Any]) -> Result:
    rows: list[Sequence[Cell]] = []
    notes = []
    for stage in data["stages"]:
        for found in stage["matrices"]:
            name = numbers(stage["stages"]) + (" (experts)" if found["expert"] else "")
            keys = ("count", "rows", "columns", "blocks", "width", "blocks_on_a_rank")
            rows.append((name, *(found[key] for key in keys)))
        others = "; ".join(f"{each['parameters']} {each['reason']}" for each in stage["adamw"])
        notes.append(f"Stage {numbers(stage['stages'])}, on AdamW: {others}.")
    return Result(
        "Weights on Dobb, on one rank of each pipeline stage",
        ("stage", "count", "m", "n", "blocks", "width", "blocks on a rank"),
        rows,
        notes,
    )


def _buffers(data: dict[str, Any]) -> Result:
    rows: list[Sequence[Cell]] = []
    for stage in data["stages"]:
        for buffer in stage["buffers"]:
            name = numbers(stage["stages"]) + (" (experts)" if buffer["experts"] else "")
            part = buffer["padding"] / (buffer["elements"] - buffer["padding"])
            sizes = (buffer["shards"], buffer["buckets"], f"{buffer['elements']:,}", buffer["unit"])
            rows.append((name, *sizes, f"{buffer['padding']:,}", f"{100 * part:.3f} %"))
    return Result(
        "Param/grad buffers",
        ("stage", "shards", "buckets", "elements", "alignment unit", "padding", "of AdamW's"),
        rows,
        ["Padding: elements more than Megatron's own layout has; their bytes travel on every step."],
    )


def _by_stage(
    data: dict[str, Any], title: str, lines: Sequence[tuple[str, tuple[str, ...]]], show: Any, notes: list[str]
) -> Result:
    """A table with two columns for every kind of stage: the mean of its ranks, and the rank with the most.

    Args:
        lines: what each row says, and under which keys of a stage its figures are.
        show: how a figure is shown.
    """
    rows: list[Sequence[Cell]] = []
    for label, keys in lines:
        cells: list[str] = []
        for stage in data["stages"]:
            found = stage
            for key in keys:
                found = found[key]
            cells += [show(found["mean"]), show(found["most"])]
        rows.append((label, *cells))
    columns = ["what"]
    for stage in data["stages"]:
        columns += [f"stage {numbers(stage['stages'])}: mean", "the most"]
    return Result(title, columns, rows, notes)


def _memory(data: dict[str, Any]) -> Result:
    lines = [(f"Dobb: {name}", ("memory", "dobb", name)) for name in ("momentum", "moments", "bases")]
    lines += [
        ("Dobb: together", ("memory", "dobb", "state")),
        ("AdamW on the same weights", ("memory", "adamw", "state")),
        ("Muon on the same weights", ("memory", "muon", "state")),
        ("AdamW on the other weights", ("memory", "other_weights", "state")),
        ("Dobb: sums on a refresh step", ("memory", "dobb", "sums")),
    ]
    notes = [
        "Masters (4 bytes an element) are the same for all methods. Sums are transient, and an upper bound: they are "
        "freed as they are packed."
    ]
    return _by_stage(data, "Optimizer state of a rank, without masters", lines, size, notes)


def _traffic(data: dict[str, Any]) -> Result:
    methods = {"adamw": "AdamW", "dobb": "Dobb", "muon": "Muon", "dion": "Dion, rank a quarter"}
    if data["dobb"]["norm"] == "l2":
        methods = {"adamw": "AdamW", "dobb": "Dobb", "column_norms": "Dobb, column norms of it"} | methods
    lines = [(f"every step: {label}", ("step_bytes", method)) for method, label in methods.items()]
    parts = {
        "reduced": "reduce-scattered",
        "to_owners": "sent to owners",
        "to_holders": "bases sent",
        "from_owners": "bases received",
        "total": "together, sent",
    }
    lines += [(f"a refresh, more: Dobb, {label}", ("refresh_bytes", "dobb", part)) for part, label in parts.items()]
    if data["dobb"]["stagger"]:
        lines += [("the first step, more: Dobb, together, sent", ("refresh_bytes", "dobb", "first"))]
    lines += [("a refresh, more: the paper's Dobb, all-reduced", ("refresh_bytes", "paper"))]
    notes = [
        "Whole buffers, as they are handed over: a ring sends (ranks - 1)/ranks of a reduce-scatter, twice that of an "
        "all-reduce. Muon and Dion: the plainest row-sharded update, in fp32 (derived)."
    ]
    if data["dobb"]["stagger"]:
        notes.append(
            "Staggered: every step refreshes some weights. Of each rank and line, the step of an interval with the "
            "most; the first step of a run refreshes all weights."
        )
    return _by_stage(data, "Bytes that a rank hands to collectives for its optimizer", lines, size, notes)


def _times(data: dict[str, Any]) -> Result:
    labels = {
        "adamw": "AdamW alone",
        "memory": "Dobb: memory traffic",
        "products": "Dobb: products",
        "update": "Dobb: ordinary step",
        **({"norms": "Dobb: column norms, network"} if data["dobb"]["norm"] == "l2" else {}),
        "refresh": "Dobb: refresh, products",
        "exchange": "Dobb: refresh, network",
        "refresh_step": "Dobb: refresh step, nothing overlapped",
        "amortised": f"Dobb: mean at T = {data['dobb']['refresh_interval']}",
    }
    rates = data["rates"]
    notes = [
        f"Stage {numbers(stage['stages'])}: the heaviest rank has {stage['owners']['work_over_mean']:.2f} times the "
        f"mean refresh work, {stage['owners']['work_over_best']:.2f} times the best possible."
        for stage in data["stages"]
        if data["dobb"]["source"] != "none"
    ]
    notes.append(
        f"From {rates['memory_bandwidth']:.3g} B/s of memory, {rates['flops']:.3g} bf16 and {rates['fp32_flops']:.3g} "
        f"fp32 FLOP/s, {rates['network_bandwidth']:.3g} B/s of network for each rank. Factorisations of small matrices "
        "reach less: a refresh takes longer than its products say."
    )
    notes += _about_variants(data["dobb"])
    title = "Optimizer call of a rank: derived bounds, not measurements"
    return _by_stage(data, title, [(label, ("seconds", key)) for key, label in labels.items()], duration, notes)


def _about_variants(dobb: dict[str, Any]) -> list[str]:
    """Extra work in the times of a variant, beside the sign on the input side."""
    more = []
    if dobb["norm"] == "l2":
        more.append("column norms from a second projection, in fp32 and plain PyTorch")
    if dobb["side"] == "output":
        more.append("transposing gradient, momentum and master, and the latter two back")
    if dobb["source"] == "none":
        more.append("plain PyTorch, as there is no kernel without bases")
    return [f"In memory traffic and products: {'; '.join(more)}."] if more else []


def refusal_table(alternatives: Sequence[dict[str, Any]]) -> Result:
    """Table of the alternatives to a layout that does not work."""
    rows = [(each["what"], each["unit"], f"{100 * each['padding']:.3f} %") for each in alternatives]
    notes = [] if rows else ["Nothing that was tried works for all weights: use --blocks-for, or --exclude."]
    return Result("What would work for the same model", ("flags", "alignment unit", "padding"), rows, notes)


def trade_off(points: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw memory, bytes and predicted time of the heaviest rank against B.

    Args:
        points: `blocks`, and the plan's `heaviest`, for every B that works.
        path: the picture.
    """
    counts = [point["blocks"] for point in points]

    def draw(axis: Any, key: str, label: str, scale: float, **style: Any) -> None:
        axis.plot(counts, [point[key] / scale for point in points], marker="o", label=label, **style)

    with picture(path, (15, 4.4), columns=3) as panels:
        axes = panels[0]
        draw(axes[0], "state_bytes", "Dobb", GIB)
        draw(axes[0], "adamw_state_bytes", "AdamW", GIB, linestyle="--", color="gray")
        draw(axes[0], "sums_bytes", "sums on a refresh step", GIB, linestyle=":")
        axes[0].set(title="state of the heaviest rank", ylabel="GiB")
        sends = any(point["refresh_bytes"] for point in points)
        if sends:
            draw(axes[1], "refresh_bytes", "Dobb", GIB)
            draw(axes[1], "papers_refresh_bytes", "the paper's, all-reduced", GIB, linestyle="--", color="gray")
        else:
            axes[1].text(0.5, 0.5, "one data-parallel rank sends nothing", ha="center", transform=axes[1].transAxes)
        axes[1].set(title="handed to collectives on a refresh", ylabel="GiB")
        draw(axes[2], "update_seconds", "ordinary step", 1e-3)
        draw(axes[2], "amortised_seconds", "mean, nothing overlapped", 1e-3, linestyle=":")
        draw(axes[2], "adamw_seconds", "AdamW", 1e-3, linestyle="--", color="gray")
        axes[2].set(title="optimizer call, derived bound", ylabel="ms")
        for axis in axes:
            axis.set_xscale("log", base=2)
            axis.set_xticks(counts, [str(count) for count in counts])
            axis.set_xlabel("blocks, B")
            axis.grid(alpha=0.25, which="both")
            if sends or axis is not axes[1]:
                axis.set_yscale("log")
                axis.legend(frameon=False)
