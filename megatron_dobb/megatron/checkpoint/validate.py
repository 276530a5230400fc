"""Check that a checkpoint is complete and fits before anything is loaded from it: Megatron loads in place.

`incomplete_files` needs no Megatron, so that tools can ask it too.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

from ...errors import CheckpointError
from ...methods import registry

USE_ANOTHER = "use the checkpoint of another iteration"

_BUCKETS = "optimizer.distributed.dp_group_idx_"  # keys of dp_reshardable state
_OF_OPTIMIZERS = "optimizer."


def check(
    wanted: Any, folder: str, group: dist.ProcessGroup | None = None, *, together: bool = True, strict: bool = True
) -> None:
    """Check that the files of a checkpoint are complete and contain what will be asked of them.

    Args:
        wanted: the sharded state dict to load into.
        folder: the checkpoint.
        group: the ranks that load it together.
        together: whether all of them call this; otherwise this rank looks by itself.
        strict: whether tensors of the model, too, must be there.

    Raises:
        CheckpointError: on every rank of the group, if the checkpoint does not do for one of them.
    """
    problem: str | None = None
    try:
        metadata = FileSystemReader(folder).read_metadata()
    except Exception as error:  # whatever pickle makes of a damaged file
        problem = f"cannot read {os.path.join(folder, '.metadata')} ({error!r}): {USE_ANOTHER}"
    else:
        # One rank looks at the files, and every rank at what it wants itself.
        if not together or dist.get_rank(group) == 0:
            problem = incomplete_files(folder, metadata)
        problem = problem or next(_misfits(wanted, metadata, strict), None)
    everyone = [problem]
    if together:
        everyone = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, problem, group=group)
    for problem in everyone:
        if problem is not None:
            raise CheckpointError(problem)


def diagnosis(folder: str) -> str | None:
    """The reason why a checkpoint cannot be read, as far as its files tell, or None."""
    try:
        return incomplete_files(folder, FileSystemReader(folder).read_metadata())
    except Exception as error:
        return f"cannot read {os.path.join(folder, '.metadata')} ({error!r}): {USE_ANOTHER}"


def incomplete_files(folder: str, metadata: Any) -> str | None:
    """The first fault in the files of a checkpoint, or None."""
    needed: dict[str, int] = {}
    for part in metadata.storage_data.values():
        needed[part.relative_path] = max(needed.get(part.relative_path, 0), part.offset + part.length)
    for name, size in sorted(needed.items()):
        file = Path(folder) / name
        stored = file.stat().st_size if file.is_file() else None
        if stored is None:
            return f"the checkpoint {folder} lacks its file {name}: {USE_ANOTHER}"
        if stored < size:
            return f"{file} is cut off: it has {stored} bytes of at least {size}; {USE_ANOTHER}"
    return None


def _misfits(wanted: Any, metadata: Any, strict: bool) -> Iterator[str]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    stored = metadata.state_dict_metadata
    for tensor in nested_values(wanted):
        if not isinstance(tensor, ShardedTensor) or tensor.allow_shape_mismatch:
            continue
        shape, expected = getattr(stored.get(tensor.key), "size", None), tuple(tensor.global_shape)
        if shape is None and not strict and _OF_OPTIMIZERS not in tensor.key:
            continue
        if shape is None or tuple(shape) != expected:
            has = f"has the shape {tuple(shape)}" if shape is not None else "is not there"
            yield f"{tensor.key} {has} in the checkpoint, and {expected} in this run: {_advice(tensor.key)}"


def _advice(key: str) -> str:
    if _BUCKETS in key:
        return (
            "its optimizer state is dp_reshardable, which needs the same weights in the same buckets. Keep the model "
            "and the optimizer of the run that saved it, and what decides the buckets: --ddp-bucket-size (its default "
            "grows with the data-parallel size), --overlap-grad-reduce, --bf16 or --fp16, and --dobb-blocks. A run "
            "that saves with --dist-ckpt-optim-fully-reshardable can be continued with any of these changed"
        )
    for method in registry.names():
        if f"optimizer.{method}." in key:
            return (
                "it was saved by a run of another model, or with other weights on "
                f"{method.capitalize()}; --no-load-optim starts afresh"
            )
    return "it is of another model; give the flags of the run that saved it"
