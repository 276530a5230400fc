"""Checkpoints of `megatron_dobb.Dobb`: files of `torch.save`, and folders of `torch.distributed.checkpoint`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_dobb.errors import CheckpointError
from megatron_dobb.state import COUNTERS, KEYS, STATE

from .index import Index
from .sources import Facts, State, not_ours

_ENTRY = re.compile(rf"(?P<prefix>(?:.*?\.)?)state\.(?P<name>.+)\.(?P<key>{'|'.join(KEYS)})")
_DEPTH = 4  # of dictionaries around a state_dict


class FileOfTorch:
    """What `torch.save` wrote: `Dobb.state_dict()`, or dictionaries with it inside.

    Args:
        path: for messages.
        content: of the file.
    """

    def __init__(self, path: Path, content: Any) -> None:
        self.path = path
        for found in _state_dicts(content):
            self._tensors, group = _of_state_dict(found)
            if self._tensors:
                break
        else:
            raise not_ours(path)
        self.facts = _facts("torch.save", group)

    @property
    def names(self) -> Sequence[str]:
        """See `Source`."""
        return list(self._tensors)

    def state(self, name: str) -> State:
        """See `Source`."""
        return _state(self._tensors[name], f"{self.path}: {name}")


class FolderOfTorch:
    """What `torch.distributed.checkpoint` wrote of `Dobb.state_dict()` or of its helpers' form."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._keys: dict[str, dict[str, str]] = {}
        prefixes = set()
        for key in index.entries:
            entry = _ENTRY.fullmatch(key)
            if entry and index.is_tensor(key):
                prefixes.add(entry["prefix"])
                self._keys.setdefault(entry["name"], {})[entry["key"]] = key
        if len(prefixes) > 1:
            raise CheckpointError(
                f"{index.folder} has the state of several optimizers, under {sorted(prefixes)}: save each in a folder "
                "of its own"
            )
        if not prefixes:
            raise not_ours(index.folder)
        [prefix] = prefixes
        self.facts = _facts("torch.distributed.checkpoint", self._group(prefix))
        numbers = self._names(prefix)
        self._keys = {numbers.get(name, name): keys for name, keys in self._keys.items()}

    @property
    def names(self) -> Sequence[str]:
        """See `Source`."""
        return list(self._keys)

    def state(self, name: str) -> State:
        """See `Source`."""
        tensors = {kind: self.index.tensor(key) for kind, key in self._keys[name].items()}
        return _state(tensors, f"{self.index.folder}: {name}")

    def _group(self, prefix: str) -> Mapping[str, Any]:
        """Dobb's param group: one object, one for each entry, or (flattened by torch's helpers) one for each weight."""
        stored = self._others(f"{prefix}param_groups")
        whole = stored.get("")
        if isinstance(whole, list):
            return next((group for group in whole if isinstance(group, Mapping) and group.get(STATE)), {})
        groups: dict[str, dict[str, Any]] = {}
        for name, value in stored.items():
            of, _, key = name.rpartition(".")
            groups.setdefault(of, {})[key] = value
        return next((group for group in groups.values() if group.get(STATE)), {})

    def _names(self, prefix: str) -> dict[str, str]:
        """The weights' names by the numbers of a plain state_dict."""
        stored = self._others(f"{prefix}{STATE}")
        names = stored.get("names") or [stored[key] for key in sorted(stored, key=_place) if key.startswith("names.")]
        return {str(number): name for number, name in enumerate(names)}

    def _others(self, prefix: str) -> dict[str, Any]:
        """Objects under a key, by the rest of their keys."""
        wanted = [key for key in self.index.others() if key == prefix or key.startswith(f"{prefix}.")]
        return {key.removeprefix(prefix).removeprefix("."): self.index.other(key) for key in wanted}


def _place(key: str) -> tuple[int, str]:
    last = key.rpartition(".")[2]
    return (int(last) if last.isdecimal() else 0), key


def _state_dicts(content: Any, depth: int = _DEPTH) -> Iterator[Mapping[str, Any]]:
    if isinstance(content, Mapping):
        if isinstance(content.get("state"), Mapping) and "param_groups" in content:
            yield content
        elif depth:
            for inner in content.values():
                yield from _state_dicts(inner, depth - 1)


def _of_state_dict(found: Mapping[str, Any]) -> tuple[dict[str, Mapping[str, Any]], Mapping[str, Any]]:
    """The tensors of the weights on Dobb by their names, and Dobb's param group."""
    part = found.get(STATE)
    if isinstance(part, Mapping) and "weights" in part:  # the form of development versions
        return dict(part["weights"]), part
    groups = [group for group in found["param_groups"] if isinstance(group, Mapping)]
    group: Mapping[str, Any] = next((group for group in groups if group.get(STATE)), {})
    names = part.get("names", []) if isinstance(part, Mapping) else []
    name_of = dict(zip(group.get("params", []), names, strict=False))
    ours = {key: entry for key, entry in found["state"].items() if any(kind in entry for kind in KEYS)}
    return {name_of.get(key, str(key)): entry for key, entry in ours.items()}, group


def _facts(layout: str, group: Mapping[str, Any]) -> Facts:
    attempted, sequences = (group.get(key) for key in COUNTERS)
    return Facts(
        "plain",
        layout,
        attempted_steps=int(attempted) if attempted is not None else None,
        capture_sequences=sequences,
        side=group.get("side") or "input",
        source=group.get("source") or "activation",
    )


def _state(tensors: Mapping[str, Any], where: str) -> State:
    for kind, tensor in tensors.items():
        dimensions = 2 if kind == "momentum" else 3
        if kind in KEYS and not (isinstance(tensor, Tensor) and tensor.ndim == dimensions):
            shape = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise CheckpointError(f"{where}: the {kind} is {shape}, and no tensor of {dimensions} dimensions")
    momentum = tensors.get("momentum")
    reason = None if momentum is not None else "there is no momentum of it in the checkpoint"
    return State(tensors.get("moment"), tensors.get("basis"), momentum, reason)
