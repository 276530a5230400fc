"""The state of `megatron_dobb.Dobb` in a folder of `torch.distributed.checkpoint`."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_dobb.errors import CheckpointError
from megatron_dobb.pytorch.dobb.optimizer import KEYS, STATE

from .contents import State, not_ours
from .index import Index
from .plain import checked, facts_of_group

_ENTRY = re.compile(rf"(?P<prefix>(?:.*?\.)?)state\.(?P<name>.+)\.(?P<key>{'|'.join(KEYS)})")


class FolderOfTorch:
    """Folder that `torch.distributed.checkpoint` wrote of `Dobb.state_dict()` or of its helpers' form."""

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
        self.facts = facts_of_group("torch.distributed.checkpoint", self._group(prefix))
        numbers = self._names(prefix)
        self._keys = {numbers.get(name, name): keys for name, keys in self._keys.items()}

    @property
    def names(self) -> Sequence[str]:
        """Names of the weights on Dobb."""
        return list(self._keys)

    def state(self, name: str) -> State:
        """Read the state of one of them."""
        tensors = {kind: self.index.tensor(key) for kind, key in self._keys[name].items()}
        return checked(tensors, f"{self.index.folder}: {name}")

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
