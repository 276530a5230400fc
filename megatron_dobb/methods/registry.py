"""Name the optimization methods: what `--optimizer NAME` means, as strings that are resolved on first use.

Nothing outside a method's own folders imports it; this table is the one place that knows where its parts are. To add a
method, write its folders and add one line here (docs/contributing.md, "How to add an optimizer").
"""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Method:
    """The parts of one method, each as `module:name`.

    Attributes:
        name: the value of `--optimizer`; also the prefix of its flags, its key in checkpoints, and the value of
            `optimizer` in its param groups.
        settings: a frozen dataclass of all settings; its class attribute `method` is `name`.
        select_weights: a function of a model chunk and the settings that chooses and tags the weights to manage.
        optimizer: a subclass of `megatron.shard_optimizer.ShardOptimizer`.
        refusals: Megatron options that the method does not work with, besides those that no method works with.
        startup_report: a function that logs what was built.
    """

    name: str
    settings: str
    select_weights: str
    optimizer: str
    refusals: str
    startup_report: str

    def load(self, part: str) -> Any:
        """The object that a part names.

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
    """The values of `--optimizer` that this package adds."""
    return tuple(_METHODS)


def method(name: str) -> Method:
    """The method of that name.

    Raises:
        KeyError: if there is none.
    """
    return _METHODS[name]


def method_of(settings: object) -> Method | None:
    """The method whose settings these are; None for an object of any other kind."""
    known = _METHODS.get(getattr(type(settings), "method", ""))
    return known if known is not None and isinstance(settings, known.load("settings")) else None


def methods() -> Iterator[Method]:
    """All methods, in the order of registration."""
    yield from _METHODS.values()


def register(method: Method) -> None:
    """Add a method, or replace the one of that name."""
    _METHODS[method.name] = method
