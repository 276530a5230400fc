"""The settings of `DobbConfig` as keyword arguments of the plain optimizer."""

from collections.abc import Iterable
from typing import Any

from ...errors import ConfigError
from ...methods.dobb.metrics_recorder import Sink
from ...methods.dobb.settings import DobbConfig
from ...settings.checks import DTYPE, DTYPES
from ..base import named_as_keywords
from ..select_weights import Predicate

Exclude = str | Predicate | Iterable[str | Predicate]


def read_settings(exclude: Exclude, settings: dict[str, Any]) -> tuple[DobbConfig, list[Predicate]]:
    """Split keywords into settings and the functions among `exclude`."""
    kinds = {name: about.kind for name, about in DobbConfig.described().items() if about.keyword}
    unknown = sorted(settings.keys() - kinds.keys())
    if unknown:
        raise TypeError(f"Dobb has no setting {', '.join(unknown)}; those of Dobb's own are {', '.join(sorted(kinds))}")
    entries = [exclude] if isinstance(exclude, str) or callable(exclude) else list(exclude)
    names = {dtype: name for name, dtype in DTYPES.items()}
    named = {name: names.get(value, value) if kinds[name] is DTYPE else value for name, value in settings.items()}
    patterns = tuple(entry for entry in entries if not callable(entry))
    return DobbConfig(exclude=patterns, **named), [entry for entry in entries if callable(entry)]


def check_sink(config: DobbConfig, sink: Sink | None, *, is_first: bool) -> None:
    """Raise if `diagnostics` and `log_diagnostics_interval` are not given together.

    Args:
        config: the settings.
        sink: the `diagnostics` argument.
        is_first: whether this is the first rank, which alone calls it; other ranks need not give it.
    """
    interval = config.log_diagnostics_interval
    with named_as_keywords():
        if sink is not None and not interval:
            raise ConfigError("{diagnostics} requires {log_diagnostics_interval}", "add {log_diagnostics_interval:100}")
        if sink is None and interval and is_first:
            raise ConfigError(
                "requires {diagnostics}, a function of the number of a step and a mapping from names to figures",
                "add one, such as diagnostics=print",
                settings={"log_diagnostics_interval": interval},
            )
