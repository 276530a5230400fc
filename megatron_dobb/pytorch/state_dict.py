"""The plain optimizer's state as torch knows that of every optimizer, and what a state_dict must hold to be loaded.

A weight on Dobb has the entries `momentum` `[m, n]`, `moment` and `basis` `[B, b, b]`, and its param group counts the
steps. Whatever carries ordinary optimizer state, such as `torch.distributed.checkpoint.state_dict`, so carries Dobb's.
Besides, a state_dict names the weights under `dobb`, which torch's helpers drop. An older form of state_dict, which had
all of Dobb's state there, is still read.
"""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..methods.dobb.settings import DobbConfig
from .select_weights import LinearWeight

STATE = "dobb"
"""The key of the weights' names in a state_dict, and of the mark of a param group."""

KEYS = ("momentum", "moment", "basis")
COUNTERS = ("attempted_steps", "capture_sequences")

_NOT_OURS = "it was not saved by Dobb"


@dataclass(frozen=True)
class Loadable:
    """What a state_dict holds, known to fit.

    Attributes:
        weights: tensors of the weights on Dobb by `KEYS`, by name.
        attempted_steps: calls of `step`.
        capture_sequences: how many sequences feed the moments; None if not settled yet.
        of_adamw: the state_dict without those tensors, which torch would cast to the parameters' dtype.
    """

    weights: Mapping[str, Mapping[str, Tensor]]
    attempted_steps: int
    capture_sequences: int | None
    of_adamw: dict[str, Any]


def counters(attempted_steps: int, capture_sequences: int | None) -> dict[str, int | None]:
    """What Dobb's param group says of the schedule."""
    return dict(zip(COUNTERS, (attempted_steps, capture_sequences), strict=True))


def begin_adamw(state: MutableMapping[Any, Any], groups: Iterable[Mapping[str, Any]]) -> None:
    """Give the parameters on AdamW the state that its first step would give them, where they have none.

    Torch's helpers ask an optimizer for its state before they load into it, and take only what is there.
    """
    for group in groups:
        on_device = group.get("capturable") or group.get("fused")
        for parameter in group["params"] if not group[STATE] else ():
            known = state.get(parameter)
            if known and (known["step"] != 0 or _alike(known["exp_avg"], parameter)):
                continue
            step = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
            sums = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group.get("amsgrad") else []))
            state[parameter] = {"step": step, **{key: torch.zeros_like(parameter.detach()) for key in sums}}


def read(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    weights: Mapping[str, LinearWeight],
    live: Mapping[str, Mapping[str, Tensor]],
    config: DobbConfig,
) -> Loadable:
    """What a state_dict holds for an optimizer.

    Args:
        state_dict: `Dobb.state_dict()`, what torch's helpers made of it, or one of the older form.
        groups: the optimizer's param groups.
        weights: those on Dobb, by name.
        live: their tensors by `KEYS`, by name.
        config: the optimizer's settings.

    Raises:
        ConfigError: if something is missing or does not fit.
    """
    part, saved_groups = state_dict.get(STATE), state_dict.get("param_groups")
    if not saved_groups or not isinstance(state_dict.get("state"), Mapping):
        raise ConfigError(f"this state_dict has no param_groups or no state: {_NOT_OURS}")
    older = isinstance(part, Mapping) and "weights" in part
    if isinstance(part, Mapping) and "weights" in part:
        known, found = part, part["weights"]
        of_adamw = {**state_dict}
    else:
        known = next((group for group in saved_groups if group.get(STATE)), {})
        names = part.get("names") if isinstance(part, Mapping) else None
        ours = _entries_of_ours(state_dict["state"], known, names, saved_groups, groups, weights)
        found = {name: state_dict["state"][key] for key, name in ours.items()}
        of_adamw = {**state_dict, "state": {k: v for k, v in state_dict["state"].items() if k not in ours}}
    if not found:
        raise ConfigError(f"this state_dict has no state of weights on Dobb: {_NOT_OURS}")
    had = known.get("side", "input"), known.get("source", "activation")
    if had != (config.side, config.source):
        raise ConfigError(
            f"this state_dict has moments of side {had[0]!r} and source {had[1]!r}, and this optimizer those of side "
            f"{config.side!r} and source {config.source!r}: build it with the same ones"
        )
    _check_weights(found, weights, live)
    missing = [key for key in COUNTERS if key not in known]
    if missing:
        raise ConfigError(f"this state_dict has no {' and no '.join(missing)} of Dobb's: {_NOT_OURS}")
    _check_rest(of_adamw, groups)
    if not older:
        _check_adamw(of_adamw, groups)
    return Loadable(found, int(known["attempted_steps"]), known["capture_sequences"], of_adamw)


def _entries_of_ours(
    state: Mapping[Any, Mapping[str, Any]],
    known: Mapping[str, Any],
    names: Sequence[str] | None,
    saved_groups: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    weights: Mapping[str, LinearWeight],
) -> dict[Any, str]:
    """The names of the weights whose entries in `state` are Dobb's, by the entries' keys."""
    # Torch's helpers use names as keys, and arrange them as the optimizer has its parameters.
    ours = {key: str(key) for key, entry in state.items() if any(kind in entry for kind in KEYS)}
    if names is not None and known:
        ours.update(dict(zip(known["params"], names, strict=False)))
        return {key: name for key, name in ours.items() if key in state}
    if _sizes(saved_groups) == _sizes(groups):
        name_of = {weight.parameter: name for name, weight in weights.items()}
        parameters = chain.from_iterable(group["params"] for group in groups)
        keys = chain.from_iterable(group["params"] for group in saved_groups)
        ours.update({key: name_of[p] for key, p in zip(keys, parameters, strict=True) if key in ours and p in name_of})
    elif ours and not any(isinstance(key, str) for key in ours):
        raise _other_groups(saved_groups, groups)
    return ours


def _check_weights(
    found: Mapping[str, Mapping[str, Any]],
    weights: Mapping[str, LinearWeight],
    live: Mapping[str, Mapping[str, Tensor]],
) -> None:
    for names, problem in (
        (weights.keys() - found.keys(), "this state_dict has no state of"),
        (found.keys() - weights.keys(), "this optimizer does not have on Dobb, but the state_dict has,"),
    ):
        if names:
            shown = ", ".join(sorted(names)[:4]) + (", ..." if len(names) > 4 else "")
            raise ConfigError(f"{problem} {shown}: build it for the same model with the same exclude")
    for name, weight in weights.items():
        for key, tensor in live[name].items():
            saved = found[name].get(key)
            if not isinstance(saved, Tensor):
                raise ConfigError(f"this state_dict has no {key} of {name}")
            if not saved.is_floating_point():
                raise ConfigError(f"this state_dict has the {key} of {name} in {saved.dtype}, which is no real number")
            if saved.shape != tensor.shape:
                raise ConfigError(
                    f"this state_dict has the {key} of {name} as {list(saved.shape)}, and this optimizer as "
                    f"{list(tensor.shape)}, with {weight.blocks} blocks of {weight.width} columns: "
                    "use the same model and the same blocks or block_width"
                )


def _check_rest(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """That nothing of AdamW was lost, and that the param groups are the optimizer's."""
    for key, entry in state_dict["state"].items():
        lost = [kind for kind, value in entry.items() if isinstance(value, Mapping) and not value]
        if lost:  # what torch's helpers make of entries that a flattened state_dict does not have
            raise ConfigError(f"this state_dict has no {' and no '.join(lost)} of {key}, which is on AdamW")
    saved_groups = state_dict["param_groups"]
    marks = [[bool(group.get(STATE)) for group in which] for which in (saved_groups, groups)]
    if _sizes(saved_groups) != _sizes(groups) or marks[0] != marks[1]:
        raise _other_groups(saved_groups, groups)


def _check_adamw(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """That every parameter on AdamW has its state: what is missing would start anew, as if no step had been taken."""
    for saved, group in zip(state_dict["param_groups"], groups, strict=True):
        for key in saved["params"] if not group[STATE] else ():
            entry = state_dict["state"].get(key, {})
            lost = [kind for kind in ("step", "exp_avg", "exp_avg_sq") if kind not in entry]
            if lost:
                raise ConfigError(
                    f"this state_dict has no {' and no '.join(lost)} of parameter {key!r} of its param groups, which "
                    "is on AdamW"
                )


def _other_groups(saved_groups: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> ConfigError:
    return ConfigError(
        f"this state_dict has param groups of {_sizes(saved_groups)} parameters, and this optimizer of "
        f"{_sizes(groups)}: build it for the same model with the same exclude, and add the same param groups"
    )


def _sizes(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def _alike(tensor: Tensor, parameter: Tensor) -> bool:
    return tensor.dtype == parameter.dtype and tensor.device == parameter.device
