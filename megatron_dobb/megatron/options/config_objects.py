"""Megatron's config objects, validated for programs that build their own instead of parsing a command line."""

import dataclasses
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from ...errors import ConfigError, Style, UnsupportedError
from ...methods import registry
from ..model.chunk_state import state_of
from .unsupported import refused

INNER = "adam"


def settings_of(model_chunks: Sequence[Any]) -> Any:
    """The settings that all chunks of a model were wrapped with; None if they were wrapped without any.

    Raises:
        UnsupportedError: if they were not all wrapped with the same.
    """
    states = [state_of(chunk) for chunk in model_chunks]
    settings = [state.selection.settings if state is not None else None for state in states]
    if any(other != settings[0] for other in settings):
        raise UnsupportedError(
            f"the {len(settings)} chunks of a model were wrapped in DistributedDataParallel with different settings: "
            "call megatron_dobb.install(config) once, before the first of them is wrapped"
        )
    return settings[0]


def check(model_chunks: Sequence[Any], config: Any) -> Any:
    """Validate an `OptimizerConfig` against the settings its model was wrapped with.

    Returns:
        These settings, or None where neither of them has any.

    Raises:
        ConfigError: if the field of `OptimizerConfig` for the method is no settings of that method.
        UnsupportedError: names the field, the reason and what works.
    """
    settings = settings_of(model_chunks)
    if settings is None:
        for method in registry.names():
            if getattr(config, method, None) is not None:
                raise UnsupportedError(
                    f"OptimizerConfig.{method} is set, but the model was wrapped in DistributedDataParallel without "
                    f"{method.capitalize()}, so its buffers are not aligned: call megatron_dobb.install(config) before "
                    "the model is wrapped"
                )
        return None
    _check_same(settings, getattr(config, settings.method, None))
    title = settings.method.capitalize()
    if config.optimizer != INNER:
        raise UnsupportedError(
            f"the model was wrapped in DistributedDataParallel for {title}, and OptimizerConfig.optimizer is "
            f"{config.optimizer!r}: set it to {INNER!r}, which updates what is not on {title}, or wrap the model after "
            "megatron_dobb.megatron.configure(None)"
        )
    chunk = model_chunks[0]
    for name, checked in (("OptimizerConfig", config), ("DistributedDataParallelConfig", chunk.ddp_config)):
        if not checked.use_distributed_optimizer:
            raise UnsupportedError(
                f"{title} needs use_distributed_optimizer=True in OptimizerConfig and DistributedDataParallelConfig, "
                f"because it lives in the param/grad buffers of the distributed optimizer: set it in {name}"
            )
    for refusal in refused(_merged([chunk.config, chunk.ddp_config, config]), settings):
        error = refusal.error(settings, f"the config objects of this program cannot be used: {title} does not work")
        error.style = Style.FIELD
        raise error
    return settings


def _check_same(settings: Any, given: Any) -> None:
    if given is None or given == settings:
        return
    field, kind = f"OptimizerConfig.{settings.method}", type(settings)
    if not isinstance(given, kind):
        raise ConfigError(
            f"{field} must be the same {kind.__name__} that megatron_dobb.install was given, and is {given!r}: leave "
            "it out"
        )
    changed = [f.name for f in dataclasses.fields(kind) if getattr(given, f.name) != getattr(settings, f.name)]
    raise UnsupportedError(
        f"{field} is not the {kind.__name__} for which the model was wrapped in DistributedDataParallel; they differ "
        f"in {', '.join(changed)}: leave {field} out, or give the same to both"
    )


def _merged(configs: Sequence[Any]) -> Namespace:
    """The fields of several configs in one object; Megatron names them as its command line does."""
    values: dict[str, Any] = {"tensor_model_parallel_size": 1}
    for config in configs:
        for name, value in vars(config).items():
            values[name] = values.get(name) if value is None or value is False else value
    return Namespace(**values)
