"""Parts of single tensors out of a folder of `torch.distributed.checkpoint`, without a process group."""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_dobb.errors import CheckpointError
from megatron_dobb.megatron.checkpoint.validate import USE_ANOTHER, incomplete_files

from .contents import FILE
from .unpickling import Unpickler, load


class Index(FileSystemReader):
    """The index of a checkpoint, read once, and what it points to.

    Attributes:
        folder: the checkpoint.
        entries: what is known of every tensor and every other object, by its key.

    Raises:
        CheckpointError: if the index cannot be read, or files that it names are not complete.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        try:
            with open(folder / FILE, "rb") as file:
                found = Unpickler(file).load()
            entries = found.state_dict_metadata
        except Exception as error:  # whatever pickle makes of a damaged file
            raise CheckpointError(f"cannot read {folder / FILE} ({error!r}): {USE_ANOTHER}") from error
        if not isinstance(found, Metadata):
            raise CheckpointError(f"{folder / FILE} is no index of torch.distributed.checkpoint: {USE_ANOTHER}")
        problem = incomplete_files(str(folder), found)
        if problem:
            raise CheckpointError(problem)
        self.entries: dict[str, Any] = entries
        self.storage_data = found.storage_data

    def is_tensor(self, key: str) -> bool:
        """True if there is a tensor of this key."""
        return isinstance(self.entries.get(key), TensorStorageMetadata)

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of a whole tensor."""
        return tuple(self.entries[key].size)

    def chunks(self, key: str) -> list[ChunkStorageMetadata]:
        """The pieces in which a tensor was written."""
        return list(self.entries[key].chunks)

    def tensor(self, key: str, lead: Sequence[int] = ()) -> Tensor:
        """A tensor, or its part at the given places of its leading dimensions, without these."""
        shape = self.shape(key)
        rest = shape[len(lead) :]
        return self.part(key, [*lead, *(0 for _ in rest)], [*(1 for _ in lead), *rest]).reshape(rest)

    def part(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """The part of a tensor that begins at `offsets`; only the pieces that it touches are read, one by one.

        Raises:
            CheckpointError: if it is not there or cannot be read.
        """
        entry = self.entries[key]
        target = torch.zeros(list(sizes), dtype=entry.properties.dtype)
        wanted = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        items = create_read_items_for_chunk_list(key, entry, [wanted])
        if sum(math.prod(item.lengths) for item in items) < target.numel():
            raise CheckpointError(f"{self.folder} has only parts of {key}: {USE_ANOTHER}")
        self._read(key, items, _Into(target))
        return target

    def other(self, key: str) -> Any:
        """An object that is no tensor."""
        place, nothing = MetadataIndex(key), torch.Size((0,))
        item = ReadItem(LoadItemType.BYTE_IO, place, nothing, place, nothing, nothing)
        into = _Into(torch.empty(0))
        self._read(key, [item], into)
        return into.value

    def others(self) -> list[str]:
        """The keys of all objects that are no tensors."""
        return [key for key, entry in self.entries.items() if isinstance(entry, BytesStorageMetadata)]

    def _read(self, key: str, items: list[ReadItem], into: "_Into") -> None:
        try:
            self.read_data(LoadPlan(items), into).wait()
        except Exception as error:  # whatever torch.load makes of a damaged file
            raise CheckpointError(f"cannot read {key} in {self.folder} ({error!r}): {USE_ANOTHER}") from error


class _Into(DefaultLoadPlanner):
    """Puts what is read into one tensor, or keeps it as an object."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self.target, self.value = target, None

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The tensor that all pieces go into, each at its place."""
        return self.target

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Keep an object."""
        found = load(value)
        self.value = load(io.BytesIO(found.getvalue())) if isinstance(found, io.BytesIO) else found
