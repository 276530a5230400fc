"""Find out what a path is, and open the checkpoint that is there."""

from pathlib import Path
from typing import Any

from megatron_dobb.errors import CheckpointError

from .contents import FILE, Source
from .unpickling import load

LATEST = "latest_checkpointed_iteration.txt"


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
