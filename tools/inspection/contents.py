"""Contents of an opened checkpoint: facts on its run, and the state of each weight."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from megatron_dobb.errors import CheckpointError

FILE = ".metadata"
"""The index of `torch.distributed.checkpoint` in its folder."""

_NOT_OURS = "it was not saved by Dobb"


@dataclass
class Facts:
    """Facts on the run that wrote a checkpoint; None where it does not name them.

    Attributes:
        kind: `megatron`, or `plain` for `megatron_dobb.Dobb`.
        layout: of the file or files.
        format_version: of Dobb's part; a plain optimizer's state has none.
        iteration: Megatron's.
        attempted_steps: of the optimizer, skipped ones included.
        capture_sequences: how many sequences feed the moments; None also for all of them.
        side, source, norm: the variant. A checkpoint names its norm only in the arguments of Megatron's training.
        refresh_is_asked: whether the next step refreshes, whatever the schedule says.
        settings: what decides the blocks, and types.
        run: Megatron's own arguments that help to place it.
    """

    kind: str
    layout: str
    format_version: int | None = None
    iteration: int | None = None
    attempted_steps: int | None = None
    capture_sequences: int | None = None
    side: str = "input"
    source: str = "activation"
    norm: str | None = None
    refresh_is_asked: bool | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)


@dataclass
class State:
    """Dobb's tensors of one weight.

    Attributes:
        moment, basis: `[B, b, b]`; None with the source `none`.
        momentum: `[m, n]`, None if it cannot be put together.
        reason: why it cannot.
    """

    moment: Tensor | None = None
    basis: Tensor | None = None
    momentum: Tensor | None = None
    reason: str | None = None


class Source(Protocol):
    """A checkpoint, opened."""

    facts: Facts

    @property
    def names(self) -> Sequence[str]:
        """The weights on Dobb."""

    def state(self, name: str) -> State:
        """Read one of them.

        Raises:
            CheckpointError: if it cannot be read.
        """


def not_ours(path: Any, reason: str = "") -> CheckpointError:
    """The error for a checkpoint of another optimizer."""
    return CheckpointError(f"{path} has no state of Dobb: {reason or _NOT_OURS}; give a checkpoint of a run with Dobb")
