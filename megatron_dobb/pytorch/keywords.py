"""The settings of `DobbConfig` as keyword arguments of the plain optimizer."""

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import Any

from ..errors import ConfigError
from ..methods.dobb.metrics_recorder import Sink
from ..methods.dobb.settings import DTYPES, DobbConfig
from .select_weights import Predicate

Exclude = str | Predicate | Iterable[str | Predicate]


def read_settings(exclude: Exclude, settings: dict[str, Any]) -> tuple[DobbConfig, list[Predicate]]:
    """The settings that a user gave as keywords, and the functions among `exclude`."""
    known = {field.name for field in dataclasses.fields(DobbConfig)} - {"exclude", "load_other_optimizer"}
    unknown = sorted(settings.keys() - known)
    if unknown:
        raise TypeError(f"Dobb has no setting {', '.join(unknown)}; those of Dobb's own are {', '.join(sorted(known))}")
    entries = [exclude] if isinstance(exclude, str) or callable(exclude) else list(exclude)
    names = {dtype: name for name, dtype in DTYPES.items()}
    for key in ("moment_dtype", "basis_dtype", "moment_transport"):
        if key in settings:
            settings[key] = names.get(settings[key], settings[key])
    patterns = tuple(entry for entry in entries if not callable(entry))
    return DobbConfig(exclude=patterns, **settings), [entry for entry in entries if callable(entry)]


@contextlib.contextmanager
def named_as_keywords() -> Iterator[None]:
    """Let errors name settings as keywords; code shared with Megatron names command-line flags."""
    try:
        yield
    except ConfigError as error:
        text = re.sub(r"--dobb-([a-z-]+)", lambda flag: flag[1].replace("-", "_"), str(error))
        raise type(error)(text) from None


def check_sink(config: DobbConfig, sink: Sink | None, *, is_first: bool) -> None:
    """Raise if `diagnostics` and `log_diagnostics_interval` are not given together.

    Args:
        config: the settings.
        sink: what was given as `diagnostics`.
        is_first: whether this is the first rank, which alone calls it; other ranks need not give it.
    """
    interval = config.log_diagnostics_interval
    if sink is not None and not interval:
        raise ConfigError("diagnostics has no meaning without log_diagnostics_interval: give that too, such as 100")
    if sink is None and interval and is_first:
        raise ConfigError(
            f"log_diagnostics_interval {interval} has no meaning without diagnostics, a function that takes the number "
            "of a step and a mapping from names to figures: give that too, such as diagnostics=print"
        )
