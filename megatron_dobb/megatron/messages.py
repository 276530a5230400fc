"""What a run says when a refresh left blocks alone."""

import torch.distributed as dist

from ..exchange import RefreshCounts


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
