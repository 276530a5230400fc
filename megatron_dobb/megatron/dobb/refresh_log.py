"""Log refreshes that left blocks alone, and moments and bases that a load did not take over."""

from collections.abc import Sequence

import torch.distributed as dist

from ...methods.dobb.refresh_group import RefreshCounts, RefreshGroup
from ...methods.dobb.settings import DobbConfig
from ..console import say
from .sharded_blocks import LoadReport


def log_refresh(step: int, counts: RefreshCounts, total: RefreshCounts) -> None:
    """Warn when a refresh left blocks alone or needed the slow path for some.

    Args:
        step: the refresh step, from 1.
        counts: what this rank has to report; every event is in the counts of at least one rank.
        total: all counts of this rank's weights since the start.
    """
    if counts.skipped or counts.fallbacks:
        print(
            f"dobb: refresh of step {step}, rank {dist.get_rank()}: {counts.skipped} blocks kept their basis (no "
            f"token, or an all-zero or non-finite moment), {counts.fallbacks} were finished by Householder; "
            f"{total.skipped} and {total.fallbacks} since the start",
            flush=True,
        )


def log_load(groups: Sequence[RefreshGroup], report: LoadReport | None, config: DobbConfig) -> None:
    """Say which moments and bases a load did not take over as they were saved.

    Args:
        groups: of this rank; the first rank of each speaks for it.
        report: of the load; None if another optimizer wrote the checkpoint.
        config: the settings of this run.
    """
    if report is None:
        if config.source != "none":
            say("dobb: moments and bases start anew, and the next step refreshes them")
        return
    spoken_for = {weight.key for group in groups if group.rank == 0 for weight in group.weights}
    for names, what in (
        (report.cut, "had wider blocks: their moments are cut out of those, and their bases"),
        (report.restarted, "had blocks that theirs cannot be cut from, or none: moments and bases"),
    ):
        mine = sorted(names & spoken_for)
        if mine:
            print(
                f"dobb: rank {dist.get_rank()}: {len(mine)} weights ({mine[0]}, ...) of the checkpoint {what} start "
                "anew on the next step, which refreshes them",
                flush=True,
            )
