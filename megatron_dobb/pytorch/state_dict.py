"""Read the state_dict of an optimizer for whole weights, and reject one that does not fit before changing anything.

A managed weight has its method's entries, such as `momentum`, and its param group counts the steps. Tools that carry
ordinary optimizer state, such as `torch.distributed.checkpoint.state_dict`, therefore carry the method's too. The
state_dict also lists the managed weights under the method's name, which torch's helpers drop. An older form, which
stored all of a method's state there, can still be read.
"""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from .select_weights import LinearWeight


@dataclass(frozen=True)
class StateForm:
    """Form of a method's state in a state_dict.

    Attributes:
        mark: key of the weights' names in a state_dict, and of the mark of the method's param group.
        title: the method's name in messages.
        keys: the tensors of a managed weight.
        counters: entries of the method's param group that count steps and the like.
        facts: entries that a state_dict must agree on with the optimizer, and their values where they are missing.
    """

    mark: str
    title: str
    keys: tuple[str, ...]
    counters: tuple[str, ...]
    facts: Mapping[str, str]

    @property
    def foreign(self) -> str:
        """Explain why another optimizer's state_dict does not fit."""
        return f"it was not saved by {self.title}"


@dataclass(frozen=True)
class Loadable:
    """Contents of a state_dict that fits.

    Attributes:
        weights: tensors of the managed weights by `StateForm.keys`, by name.
        counters: the method's counters.
        of_adamw: the state_dict without those tensors, which torch would cast to the parameters' dtype.
    """

    weights: Mapping[str, Mapping[str, Tensor]]
    counters: Mapping[str, Any]
    of_adamw: dict[str, Any]


def begin_adamw(state: MutableMapping[Any, Any], groups: Iterable[Mapping[str, Any]], mark: str) -> None:
    """Initialize missing state of the parameters on AdamW, as its first step would.

    Torch's helpers read an optimizer's state before they load into it, and load only the entries that exist.
    """
    for group in groups:
        on_device = group.get("capturable") or group.get("fused")
        for parameter in group["params"] if not group[mark] else ():
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
    form: StateForm,
    facts: Mapping[str, str],
) -> Loadable:
    """Find an optimizer's state in a state_dict.

    Args:
        state_dict: an optimizer's `state_dict()`, torch's helpers' form of it, or one of the older form.
        groups: the optimizer's param groups.
        weights: those that it manages, by name.
        live: their tensors by `StateForm.keys`, by name.
        form: the method's.
        facts: the optimizer's values of `form.facts`.

    Raises:
        ConfigError: if something is missing or does not fit.
    """
    part, saved_groups = state_dict.get(form.mark), state_dict.get("param_groups")
    if not saved_groups or not isinstance(state_dict.get("state"), Mapping):
        raise ConfigError(f"this state_dict has no param_groups or no state: {form.foreign}")
    older = isinstance(part, Mapping) and "weights" in part
    if isinstance(part, Mapping) and "weights" in part:
        known, entries = part, part["weights"]
        of_adamw = {**state_dict}
    else:
        known = next((group for group in saved_groups if group.get(form.mark)), {})
        names = part.get("names") if isinstance(part, Mapping) else None
        managed = _managed_entries(state_dict["state"], known, names, saved_groups, groups, weights, form)
        entries = {name: state_dict["state"][key] for key, name in managed.items()}
        of_adamw = {**state_dict, "state": {k: v for k, v in state_dict["state"].items() if k not in managed}}
    if not entries:
        raise ConfigError(f"this state_dict has no state of weights on {form.title}: {form.foreign}")
    saved_facts = {key: known.get(key, usual) for key, usual in form.facts.items()}
    if saved_facts != dict(facts):
        raise ConfigError(
            f"this state_dict has moments of {_listed(saved_facts)}, and this optimizer those of {_listed(facts)}: "
            "build it with the same ones"
        )
    _check_weights(entries, weights, live, form)
    missing = [key for key in form.counters if key not in known]
    if missing:
        raise ConfigError(f"this state_dict has no {' and no '.join(missing)} of {form.title}'s: {form.foreign}")
    _check_rest(of_adamw, groups, form.mark)
    if not older:
        _check_adamw(of_adamw, groups, form.mark)
    return Loadable(entries, {key: known[key] for key in form.counters}, of_adamw)


def _listed(facts: Mapping[str, str]) -> str:
    return " and ".join(f"{key} {value!r}" for key, value in facts.items())


def _managed_entries(
    state: Mapping[Any, Mapping[str, Any]],
    known: Mapping[str, Any],
    names: Sequence[str] | None,
    saved_groups: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    weights: Mapping[str, LinearWeight],
    form: StateForm,
) -> dict[Any, str]:
    """Map the keys of the managed weights' entries in `state` to their names."""
    # Torch's helpers use names as keys, and arrange them as the optimizer has its parameters.
    ours = {key: str(key) for key, entry in state.items() if any(kind in entry for kind in form.keys)}
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
    form: StateForm,
) -> None:
    for names, problem in (
        (weights.keys() - found.keys(), "this state_dict has no state of"),
        (found.keys() - weights.keys(), f"this optimizer does not have on {form.title}, but the state_dict has,"),
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
                    f"{list(tensor.shape)}{weight.detail}: use the same model and the same settings"
                )


def _check_rest(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], mark: str) -> None:
    """Check that no AdamW state is missing, and that the param groups match the optimizer's."""
    for key, entry in state_dict["state"].items():
        lost = [kind for kind, value in entry.items() if isinstance(value, Mapping) and not value]
        if lost:  # what torch's helpers make of entries that a flattened state_dict does not have
            raise ConfigError(f"this state_dict has no {' and no '.join(lost)} of {key}, which is on AdamW")
    saved_groups = state_dict["param_groups"]
    marks = [[bool(group.get(mark)) for group in which] for which in (saved_groups, groups)]
    if _sizes(saved_groups) != _sizes(groups) or marks[0] != marks[1]:
        raise _other_groups(saved_groups, groups)


def _check_adamw(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], mark: str) -> None:
    """Check that every parameter on AdamW has state, which would otherwise restart from zero."""
    for saved, group in zip(state_dict["param_groups"], groups, strict=True):
        for key in saved["params"] if not group[mark] else ():
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
