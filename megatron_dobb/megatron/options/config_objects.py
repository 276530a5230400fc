"""Dobb without a command line: what Megatron's config objects must look like, for programs that build their own."""

import dataclasses
import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

from ...errors import ConfigError, UnsupportedError
from ...methods.dobb.settings import DobbConfig
from ..model.chunk_state import state_of
from .flags import REFUSALS, Refusal

INNER = "adam"
_WITHOUT_DISTRIBUTED = "without --use-distributed-optimizer"


def settings_of(model_chunks: Sequence[Any]) -> DobbConfig | None:
    """With which settings all chunks of a model were wrapped; None if they were wrapped without Dobb.

    Raises:
        UnsupportedError: if they were not all wrapped with the same.
    """
    states = [state_of(chunk) for chunk in model_chunks]
    settings = [state.selection.settings if state is not None else None for state in states]
    if any(found != settings[0] for found in settings):
        raise UnsupportedError(
            f"the {len(settings)} chunks of a model were wrapped in DistributedDataParallel with different settings of "
            "Dobb: call megatron_dobb.install(config) once, before the first of them is wrapped"
        )
    return settings[0]


def check(model_chunks: Sequence[Any], config: Any) -> DobbConfig | None:
    """Check that an `OptimizerConfig` asks for what its model was wrapped for, and for nothing that cannot work.

    Returns:
        The settings of Dobb, or None where neither of them asks for it.

    Raises:
        ConfigError: if `OptimizerConfig.dobb` is no `DobbConfig`.
        UnsupportedError: names the field, the reason and what works.
    """
    settings, asked = settings_of(model_chunks), getattr(config, "dobb", None)
    if settings is None and asked is not None:
        raise UnsupportedError(
            "OptimizerConfig.dobb is set, but the model was wrapped in DistributedDataParallel without Dobb, so its "
            "buffers are not aligned: call megatron_dobb.install(config) before the model is wrapped"
        )
    if settings is None:
        return None
    if asked is not None and not isinstance(asked, DobbConfig):
        raise ConfigError(
            f"OptimizerConfig.dobb takes a DobbConfig, and is {asked!r}: leave it out, or give the one that "
            "megatron_dobb.install was given"
        )
    if asked is not None and asked != settings:
        changed = [f.name for f in dataclasses.fields(settings) if getattr(asked, f.name) != getattr(settings, f.name)]
        raise UnsupportedError(
            "OptimizerConfig.dobb is not the DobbConfig for which the model was wrapped in DistributedDataParallel; "
            f"they differ in {', '.join(changed)}: leave OptimizerConfig.dobb out, or give the same to both"
        )
    if config.optimizer != INNER:
        raise UnsupportedError(
            f"the model was wrapped in DistributedDataParallel for Dobb, and OptimizerConfig.optimizer is "
            f"{config.optimizer!r}: set it to {INNER!r}, which updates what is not on Dobb, or wrap the model after "
            "megatron_dobb.megatron.configure(None)"
        )
    if not config.use_distributed_optimizer:
        raise UnsupportedError(
            "Dobb needs OptimizerConfig.use_distributed_optimizer=True: it lives in the param/grad buffers of the "
            "distributed optimizer"
        )
    chunk = model_chunks[0]
    if not chunk.ddp_config.use_distributed_optimizer:
        raise UnsupportedError(
            "Dobb needs DistributedDataParallelConfig.use_distributed_optimizer=True, which the model was wrapped "
            "without: its param/grad buffers are not laid out for shards. Set it in that config as well"
        )
    for refusal in _refusals([chunk.config, chunk.ddp_config, config], settings):
        raise UnsupportedError(
            f"Dobb does not work {_as_field(refusal.what)}, which a config object of this program says: "
            f"{_as_field(refusal.reason)}; {_as_field(refusal.instead)}"
        )
    return settings


def _refusals(configs: Sequence[Any], settings: DobbConfig) -> Iterator[Refusal]:
    """The refused options in use. Megatron's config objects call them as its command line does."""
    values: dict[str, Any] = {"tensor_model_parallel_size": 1}
    for config in configs:
        for name, value in vars(config).items():
            values[name] = values.get(name) if value is None or value is False else value
    values |= {f"dobb_{name}": getattr(settings, name, None) for name in ("source", "side")}
    for refusal in REFUSALS:
        if refusal.what != _WITHOUT_DISTRIBUTED and refusal.used(Namespace(**values)):
            yield refusal


def _as_field(text: str) -> str:
    """A text about flags, in names of fields."""
    text = text.replace("--dobb-", "--")
    return re.sub(r"--([a-z0-9-]+)", lambda flag: flag[1].replace("-", "_"), text)
