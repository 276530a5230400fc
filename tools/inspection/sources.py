"""What a checkpoint is, and how the state of one weight is taken out of it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from megatron_dobb.errors import CheckpointError

from .unpickling import load

FILE = ".metadata"
"""The index of `torch.distributed.checkpoint` in its folder."""

LATEST = "latest_checkpointed_iteration.txt"
_NOT_OURS = "it was not saved by Dobb"


@dataclass
class Facts:
    """What a checkpoint says of its run; None where it does not say it.

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

    def plain(self) -> dict[str, Any]:
        """The facts for JSON."""
        return asdict(self)


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


def open_checkpoint(path: Path) -> Source:
    """Find out what a path is, and open it.

    Raises:
        CheckpointError: if it is no checkpoint, or none of Dobb's.
    """
    if path.is_file() and path.name != LATEST:
        from .plain import FileOfTorch

        return FileOfTorch(path, _load(path))
    folder = _folder(path.parent if path.is_file() else path)
    from .folders import FolderOfTorch  # torch.distributed.checkpoint takes seconds to import
    from .index import Index
    from .megatron import MegatronCheckpoint

    index = Index(folder)
    if MegatronCheckpoint.recognises(index):
        return MegatronCheckpoint(index)
    return FolderOfTorch(index)


def _folder(path: Path) -> Path:
    """The folder of one checkpoint: `path`, or the latest iteration in it."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist: give a checkpoint's folder or file")
    if (path / FILE).is_file():
        return path
    latest = path / LATEST
    if latest.is_file():
        text = latest.read_text(errors="replace").strip()
        name = text if text == "release" else f"iter_{int(text):07d}" if text.isdecimal() else None
        if name is None:
            raise CheckpointError(f"{latest} says {text[:40]!r}, which is no iteration: give an iteration's own folder")
        found = path / name
        if (found / FILE).is_file():
            return found
        raise CheckpointError(
            f"{latest} names {name}, and {found / FILE} is not there: either it was not written to its end, or "
            "it is no distributed checkpoint (--ckpt-format torch_dist); give another iteration's folder"
        )
    iterations = sorted(each.name for each in path.glob("iter_*") if (each / FILE).is_file())
    if iterations:
        raise CheckpointError(f"{path} has no {LATEST}: give one iteration's folder, such as {path / iterations[-1]}")
    raise CheckpointError(
        f"{path} is no checkpoint: it has neither {FILE} (torch.distributed.checkpoint) nor {LATEST} (Megatron)"
    )


def _load(path: Path) -> Any:
    try:
        return load(path)
    except Exception as error:  # whatever torch.load makes of a damaged file
        raise CheckpointError(
            f"cannot read {path} ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}): it is "
            "damaged, or was not written by torch.save; give another checkpoint"
        ) from error


def not_ours(path: Any, reason: str = "") -> CheckpointError:
    """The error for a checkpoint of another optimizer."""
    return CheckpointError(f"{path} has no state of Dobb: {reason or _NOT_OURS}; give a checkpoint of a run with Dobb")
