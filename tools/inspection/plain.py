"""The state of `megatron_dobb.Dobb` in a file of `torch.save`."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_dobb.errors import CheckpointError
from megatron_dobb.pytorch.dobb.optimizer import COUNTERS, KEYS, STATE

from .contents import Facts, State, not_ours

_DEPTH = 4  # of dictionaries around a state_dict


class FileOfTorch:
    """File of `torch.save` with `Dobb.state_dict()`, or dictionaries with it inside.

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
        self.facts = facts_of_group("torch.save", group)

    @property
    def names(self) -> Sequence[str]:
        """Names of the weights on Dobb."""
        return list(self._tensors)

    def state(self, name: str) -> State:
        """Read the state of one of them."""
        return checked(self._tensors[name], f"{self.path}: {name}")


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


def facts_of_group(layout: str, group: Mapping[str, Any]) -> Facts:
    """Facts on the run from Dobb's param group."""
    attempted, sequences = (group.get(key) for key in COUNTERS)
    return Facts(
        "plain",
        layout,
        attempted_steps=int(attempted) if attempted is not None else None,
        capture_sequences=sequences,
        side=group.get("side") or "input",
        source=group.get("source") or "activation",
    )


def checked(tensors: Mapping[str, Any], where: str) -> State:
    """The state of one weight from its tensors by `megatron_dobb.pytorch.dobb.optimizer.KEYS`.

    Raises:
        CheckpointError: naming `where`, if one of them is of no shape that it can have.
    """
    for kind, tensor in tensors.items():
        dimensions = 2 if kind == "momentum" else 3
        if kind in KEYS and not (isinstance(tensor, Tensor) and tensor.ndim == dimensions):
            shape = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise CheckpointError(f"{where}: the {kind} is {shape}, and no tensor of {dimensions} dimensions")
    momentum = tensors.get("momentum")
    reason = None if momentum is not None else "there is no momentum of it in the checkpoint"
    return State(tensors.get("moment"), tensors.get("basis"), momentum, reason)
