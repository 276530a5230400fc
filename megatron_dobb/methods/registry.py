"""Registry of optimization methods: maps `--optimizer NAME` to strings that are resolved on first use.

Nothing outside a method's own folders imports it; only this table knows where its parts are. To add a method, write its
folders and add one line here (docs/contributing.md, "How to add an optimizer").
"""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Method:
    """Parts of one method, each as `module:name`.

    Attributes:
        name: the value of `--optimizer`; also the prefix of its flags, its key in checkpoints, and the value of
            `optimizer` in its param groups.
        settings: a frozen dataclass of all settings; its class attribute `method` is `name`.
        select_weights: a function of a model chunk and the settings that chooses and tags the weights to manage.
        optimizer: a subclass of `megatron.shard_optimizer.ShardOptimizer`.
        refusals: Megatron options that the method does not support, in addition to those that no method supports.
        startup_report: a function that logs what was built.
    """

    name: str
    settings: str
    select_weights: str
    optimizer: str
    refusals: str
    startup_report: str

    def load(self, part: str) -> Any:
        """Return the object that a part names.

        Args:
            part: the name of one of the attributes.
        """
        module, _, name = getattr(self, part).partition(":")
        return getattr(importlib.import_module(module), name)


_METHODS = {
    "dobb": Method(
        "dobb",
        settings="megatron_dobb.methods.dobb.settings:DobbConfig",
        select_weights="megatron_dobb.megatron.dobb.select_weights:select_weights",
        optimizer="megatron_dobb.megatron.dobb.optimizer:DobbDistributedOptimizer",
        refusals="megatron_dobb.megatron.dobb.unsupported:REFUSALS",
        startup_report="megatron_dobb.megatron.dobb.startup_report:log_start",
    ),
}


def names() -> tuple[str, ...]:
    """Return the values of `--optimizer` that this package adds."""
    return tuple(_METHODS)


def method(name: str) -> Method:
    """Return the method with a given name.

    Raises:
        KeyError: if there is none.
    """
    return _METHODS[name]


def method_of(settings: object) -> Method | None:
    """Return the method that a settings object belongs to; None for any other object."""
    known = _METHODS.get(getattr(type(settings), "method", ""))
    return known if known is not None and isinstance(settings, known.load("settings")) else None


def methods() -> Iterator[Method]:
    """Return all methods, in order of registration."""
    yield from _METHODS.values()


def register(method: Method) -> None:
    """Add a method, or replace the one with the same name."""
    _METHODS[method.name] = method


def unregister(method: Method) -> None:
    """Remove a method that `register` added."""
    _METHODS.pop(method.name, None)
