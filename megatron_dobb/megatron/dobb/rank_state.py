"""State that the optimizers of one rank share: that of the dense weights, and that of the experts."""

from dataclasses import dataclass, field

import torch

from ...background.side_stream import Worker
from .metrics import Diagnosed, Diagnostics
from .process_groups import MomentGroups


@dataclass
class RankState:
    """State that the optimizer of the dense weights sets up, and that of the experts finds.

    Attributes:
        moment_groups: the ranks that share the moments of each weight of this rank.
        phases: the phase of each weight of the whole model where refreshes are staggered.
        one_launch_queue: whether any rank of the job launches all streams through one queue.
        moments_incomplete: whether the last load gave some weight of the whole model other moments than the saved ones.
        diagnostics: the log of this rank's model; made with the first optimizer.
        worker: does what overlaps; made when it is first needed.
    """

    moment_groups: MomentGroups
    phases: dict[str, int]
    one_launch_queue: bool
    moments_incomplete: bool = False
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    worker: Worker | None = None

    def diagnostics_of(self, optimizer: Diagnosed) -> Diagnostics:
        """The log that an optimizer belongs to. Every rank has the same optimizers, that of the experts last."""
        if not optimizer.is_expert:
            self.diagnostics = Diagnostics()
        self.diagnostics.observe(optimizer)
        return self.diagnostics

    def worker_on(self, device: torch.device) -> Worker:
        """The one worker of a rank."""
        if self.worker is None:
            self.worker = Worker(device)
        return self.worker
