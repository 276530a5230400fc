"""A plan as plain data, with stable keys: what `--json` writes and the tables show. See docs/planning.md."""

import dataclasses
from collections import Counter
from typing import Any

from megatron_dobb.methods.dobb.footprint import RankCosts

from .alternatives import Alternative
from .plan import Request, StagePlan
from .timing import Times

FORMAT = 1
ADAMW_STATE_BYTES, MUON_STATE_BYTES = 8, 4
"""State of an element of a managed weight: two fp32 moments; one fp32 momentum."""


def plan_data(request: Request, stages: list[StagePlan], notes: list[str], ignored: list[str]) -> dict[str, Any]:
    """Everything that the tables show."""
    described = [stage_data(stage) for stage in stages]
    return _head(request, notes, ignored) | {"stages": described, "heaviest": heaviest(described)}


def refusal_data(
    request: Request, error: str, found: list[Alternative], notes: list[str], ignored: list[str]
) -> dict[str, Any]:
    """Data that `--json` writes of a layout that does not work."""
    return _head(request, notes, ignored) | {
        "error": error,
        "alternatives": [dataclasses.asdict(alternative) for alternative in found],
    }


def _head(request: Request, notes: list[str], ignored: list[str]) -> dict[str, Any]:
    config = request.config
    names = (
        *("blocks", "block_width", "refresh_interval", "iterations", "moment_dtype", "moment_transport", "basis_dtype"),
        *("precision", "qr", "norm", "side", "source", "stagger", "nesterov"),
    )
    return {
        "format": FORMAT,
        "model": dataclasses.asdict(request.sizes),
        "parallel": dataclasses.asdict(request.parallel) | {"ranks": request.parallel.ranks},
        "dobb": {name: getattr(config, name) for name in names}
        | {"blocks_for": dict(config.blocks_for), "exclude": list(config.exclude)},
        "rates": dataclasses.asdict(request.rates),
        "notes": notes,
        "ignored_flags": ignored,
    }


def stage_data(stage: StagePlan) -> dict[str, Any]:
    """One kind of pipeline stages."""
    work_over_mean, work_over_best = stage.balance
    return {
        "stages": stage.stages,
        "ranks": stage.request.parallel.stage_ranks,
        "elements": sum(p.numel for chunk in stage.kind.chunks for p in chunk.parameters),
        "matrices": _matrices(stage),
        "adamw": [
            {"reason": reason, "parameters": count, "elements": stage.adamw[reason, "elements"]}
            for (reason, kind), count in stage.adamw.items()
            if kind == "parameters"
        ],
        "buffers": [
            {
                "experts": buffer.apart,
                "shards": buffer.placed.shards,
                "buckets": len(buffer.placed.buckets),
                "elements": buffer.placed.numel,
                "padding": buffer.padding,
                "unit": buffer.unit,
            }
            for buffer in stage.buffers
        ],
        "padding": stage.padding,
        "padding_part": stage.padding / stage.stock_elements,
        "unit": stage.unit,
        "memory": _memory(stage),
        "step_bytes": _step_bytes(stage),
        "refresh_bytes": _refresh_bytes(stage),
        "owners": {"work_over_mean": work_over_mean, "work_over_best": work_over_best},
        "seconds": _seconds(stage),
    }


def _matrices(stage: StagePlan) -> list[dict[str, Any]]:
    counted = Counter(
        (*weight.parameter.whole, weight.features, weight.width, weight.local_blocks, weight.parameter.expert)
        for weight in stage.managed
    )
    has_blocks = stage.request.config.source != "none"
    return [
        {
            "count": count,
            "rows": rows,
            "columns": columns,
            "blocks": features // width if has_blocks else None,
            "width": width if has_blocks else None,
            "blocks_on_a_rank": local if has_blocks else None,
            "expert": expert,
        }
        for (rows, columns, features, width, local, expert), count in counted.items()
    ]


def _memory(stage: StagePlan) -> dict[str, Any]:
    def of(name: str) -> dict[str, float]:
        return dataclasses.asdict(stage.spread(lambda kind, _: getattr(kind.costs, name)))

    momentum = of("momentum")
    elements = {key: value / 4 for key, value in momentum.items()}
    others = dataclasses.asdict(stage.spread(lambda kind, _: kind.adamw))
    return {
        "dobb": {name: of(name) for name in ("momentum", "moments", "bases", "state", "sums")},
        "adamw": {"state": {key: ADAMW_STATE_BYTES * value for key, value in elements.items()}},
        "muon": {"state": {key: MUON_STATE_BYTES * value for key, value in elements.items()}},
        "other_weights": {"state": {key: ADAMW_STATE_BYTES * value for key, value in others.items()}},
    }


def _step_bytes(stage: StagePlan) -> dict[str, Any]:
    adamw = stage.handed_over(lambda buffer: buffer.stock)
    dobb = stage.handed_over(lambda buffer: buffer.placed.numel) + stage.column_norms

    def more(kind: str) -> dict[str, float]:
        spread = stage.spread(lambda of, _: getattr(of, kind))
        return {"mean": adamw + 4 * spread.mean, "most": adamw + 4 * spread.most}

    return {
        "adamw": {"mean": adamw, "most": adamw},
        "dobb": {"mean": dobb, "most": dobb},
        "column_norms": {"mean": stage.column_norms, "most": stage.column_norms},
        "muon": more("muon"),
        "dion": more("dion"),
    }


def _refresh_bytes(stage: StagePlan) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(RankCosts)]
    sent = {
        name: dataclasses.asdict(stage.spread(lambda kind, _, name=name: kind.most(name)))
        for name in [*names[names.index("reduced") :], "refresh"]
    }
    sent["total"] = sent.pop("refresh")
    sent["first"] = dataclasses.asdict(stage.spread(lambda kind, _: kind.costs.refresh))
    paper = float(stage.papers_refresh)
    return {
        "dobb": sent,
        "paper": {"mean": paper, "most": paper},
    }


def _seconds(stage: StagePlan) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(Times)]
    return {name: dataclasses.asdict(stage.spread(lambda _, found, name=name: getattr(found, name))) for name in names}


def heaviest(stages: list[dict[str, Any]]) -> dict[str, float]:
    """The rank with the most over all stages, figure by figure."""
    return {
        "state_bytes": max(stage["memory"]["dobb"]["state"]["most"] for stage in stages),
        "adamw_state_bytes": max(stage["memory"]["adamw"]["state"]["most"] for stage in stages),
        "sums_bytes": max(stage["memory"]["dobb"]["sums"]["most"] for stage in stages),
        "refresh_bytes": max(stage["refresh_bytes"]["dobb"]["total"]["most"] for stage in stages),
        "papers_refresh_bytes": max(stage["refresh_bytes"]["paper"]["most"] for stage in stages),
        "padding_part": max(stage["padding_part"] for stage in stages),
        "update_seconds": max(stage["seconds"]["update"]["most"] for stage in stages),
        "refresh_step_seconds": max(stage["seconds"]["refresh_step"]["most"] for stage in stages),
        "amortised_seconds": max(stage["seconds"]["amortised"]["most"] for stage in stages),
        "adamw_seconds": max(stage["seconds"]["adamw"]["most"] for stage in stages),
    }
