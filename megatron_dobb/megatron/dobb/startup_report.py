"""Start-up table of a run: what is on Dobb, memory, traffic and balance."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from ...methods.dobb.footprint import RankCosts, Transient, WidthCosts, momentum_costs, refresh_costs, transient_peak
from ...methods.dobb.refresh_group import RefreshGroup
from ...sharding.ownership import imbalance
from ..console import say
from ..model.chunk_state import alignment_of
from .optimizer import DobbDistributedOptimizer
from .select_weights import DobbWeight

MIB = 2**20


def log_start(optimizer: DobbDistributedOptimizer) -> None:
    """The start-up table: what is on Dobb and what is not, alignment, memory and traffic of this rank."""
    # The second optimizer, for experts, is empty where a rank has none.
    if not optimizer.is_stub_optimizer and (optimizer.managed or not optimizer.is_expert):
        say("\n".join(start_table(optimizer)))


def start_table(optimizer: DobbDistributedOptimizer) -> list[str]:
    """The lines of the start-up table."""
    managed = optimizer.managed
    elements = sum(w.parameter.numel() for w in managed.values())
    kind = "expert matrices" if optimizer.is_expert else "matrices"
    lines = [f"dobb: {len(managed)} {kind} ({elements:,} elements)"]
    settings = optimizer.settings
    if (settings.norm, settings.side, settings.source) != ("sign", "input", "activation"):
        lines.append(f"dobb: variant: norm {settings.norm}, side {settings.side}, source {settings.source}")
    lines += _shape_lines(managed.values()) if managed else []
    reasons: dict[str, list[int]] = {}
    for selection in optimizer.selections if not optimizer.is_expert else ():  # that of the others says it for all
        for (reason, unit), number in selection.adamw.items():
            reasons.setdefault(reason, [0, 0])[unit == "elements"] += number
    for reason, (parameters, numel) in reasons.items():
        lines.append(f"dobb: on AdamW: {parameters} parameters ({numel:,} elements): {reason}")
    lines += _cost_lines(optimizer)
    return lines


def _shape_lines(managed: Iterable[DobbWeight]) -> list[str]:
    shapes = Counter((w.geometry.rows, w.geometry.columns, w.features // w.width, w.width) for w in managed)
    lines = ["dobb:   count       m       n  blocks  width"]
    for (rows, columns, blocks, width), count in shapes.items():
        lines.append(f"dobb:   {count:5d} {rows:7d} {columns:7d} {blocks:7d} {width:6d}")
    return lines


def _cost_lines(optimizer: DobbDistributedOptimizer) -> list[str]:
    sizes = [
        (layout.bucket_indices[-1][1], alignment.stock_numel)
        for chunk in optimizer.model_chunks
        for key, layout in chunk.full_param_layout.layouts.items()
        if key.is_expert_parallel == optimizer.is_expert and (alignment := alignment_of(layout)) is not None
    ]
    padded, stock = sum(own for own, _ in sizes), sum(of_megatron for _, of_megatron in sizes)
    settings = optimizer.settings
    of_rank = rank_costs(optimizer)
    norms = optimizer.column_norms.bytes_reduced() if settings.norm == "l2" else 0
    others = f"{norms / MIB:.2f} MiB of column norms on every step" if norms else "nothing on other steps"
    more = f" ({100 * (padded - stock) / stock:+.2f} %)" if stock else ""
    return [
        f"dobb: param/grad buffers of {padded:,} elements, {padded - stock:,} more than AdamW's{more}",
        f"dobb: state of this rank: momentum {of_rank.momentum / MIB:.1f} MiB, "
        f"moments {of_rank.moments / MIB:.1f} MiB, bases {of_rank.bases / MIB:.1f} MiB; "
        f"captured sums of a refresh step {of_rank.sums / MIB:.1f} MiB, its highest point "
        f"{refresh_peak(optimizer) / MIB:.1f} MiB",
        f"dobb: sent by this rank on a refresh step: {of_rank.reduced / MIB:.2f} MiB reduce-scattered, "
        f"{of_rank.to_owners / MIB:.2f} MiB to owners, {of_rank.to_holders / MIB:.2f} MiB of bases; {others}",
        *_balance_lines(optimizer.refresh_groups),
    ]


def _balance_lines(groups: Sequence[RefreshGroup]) -> Iterator[str]:
    """How evenly each set of ranks that share moments shares the refresh out."""
    for ranks in dict.fromkeys(group.group for group in groups if group.ranks > 1):
        parts = [group.ownership for group in groups if group.group is ranks]
        moved = [(part, part.moved()) for part in parts]
        count, elements = sum(len(blocks) for _, blocks in moved), sum(part.elements(blocks) for part, blocks in moved)
        element_bytes = max(group.basis.element_size() for group in groups)
        where = "all blocks with ranks that hold them"
        if count:
            where = (
                f"{count} blocks moved to ranks that hold none of their rows, which costs all ranks together "
                f"{elements * element_bytes / MIB:.2f} MiB more of bases"
            )
        yield (
            f"dobb: refresh over {len(parts[0].holdings)} ranks: the busiest has {imbalance(parts):.2f} times the "
            f"work of the best sharing-out; {where}"
        )


def rank_costs(optimizer: DobbDistributedOptimizer) -> RankCosts:
    """Bytes of state and of a refresh on this rank."""
    costs = momentum_costs(sum(s.momentum.numel() for group in optimizer.segments for s in group))
    for group, found in zip(optimizer.refresh_groups, group_costs(optimizer), strict=True):
        costs += found.of(group.rank)
    return costs


def refresh_peak(optimizer: DobbDistributedOptimizer) -> int:
    """The most bytes that a refresh step takes at once on this rank besides the state."""
    refreshes, costs = optimizer.refreshes, iter(group_costs(optimizer))
    return transient_peak(
        [[Transient.of(next(costs), group.rank) for group, _ in chunk.groups] for chunk in refreshes.chunks],
        reduced_first=refreshes.worker is not None and refreshes.launcher == "program",
    )


def group_costs(optimizer: DobbDistributedOptimizer) -> list[WidthCosts]:
    """Costs of each refresh group, on all its ranks."""
    found = []
    for group in optimizer.refresh_groups:
        by_width = refresh_costs(
            group.ownership,
            {weight.key: weight.blocks for weight in group.weights},
            moment_bytes=group.moment.element_size(),
            basis_bytes=group.basis.element_size(),
            transport_bytes=group.transport_dtype.itemsize,
        )
        found.append(by_width[group.width])
    return found
