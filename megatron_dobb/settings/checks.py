"""Kinds of settings: the values that each accepts, and how to read them from a command line."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

_EXAMPLE = "*.mlp.linear_fc2"


class Misfit(Exception):
    """Invalid value for a setting.

    Args:
        reason: why, as the predicate of a sentence about the value.
        value: the part of the value that is wrong.
        remedy: what to give instead; the setting's default if empty.
    """

    def __init__(self, reason: str, value: Any, remedy: str = "") -> None:
        super().__init__(reason)
        self.value, self.reason, self.remedy = value, reason, remedy


@dataclass(frozen=True)
class Kind:
    """A kind of setting.

    Attributes:
        check: returns a value in its stored form; raises `Misfit` if it is not of this kind.
        options: keywords of `argparse.ArgumentParser.add_argument`.
        read: converts the command-line parser's result to a value; raises `Misfit`.
        patterns: returns the name patterns in a value, for kinds that contain any.
    """

    check: Callable[[Any], Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[Any], Any] = lambda value: value
    patterns: Callable[[Any], tuple[str, ...]] | None = None


def _that(accepts: Callable[[Any], bool], reason: str, remedy: str = "") -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if not accepts(value):
            raise Misfit(reason, value, remedy)
        return value

    return check


def _is_integer(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def choice(names: Sequence[str]) -> Kind:
    """Make a kind that accepts one of some names."""
    listed = ", ".join(names)
    return Kind(_that(lambda value: value in names, "is unknown", f"use one of {listed}"), {"choices": tuple(names)})


def _pattern(pattern: object) -> str:
    if not isinstance(pattern, str) or not pattern:
        raise Misfit("is not a name pattern", pattern, f"use a glob such as '{_EXAMPLE}'")
    return pattern


def _check_patterns(value: Any) -> tuple[str, ...]:
    if not isinstance(value, Iterable):
        raise Misfit("must be a sequence of name patterns", value, f"use a list such as ['{_EXAMPLE}']")
    return tuple(map(_pattern, (value,) if isinstance(value, str) else value))


def _check_pattern_counts(value: Any) -> dict[str, int]:
    if not isinstance(value, Mapping):
        raise Misfit("must map name patterns to counts", value, f"use one such as {{'{_EXAMPLE}': 16}}")
    for pattern, count in value.items():
        _pattern(pattern)
        if not _is_integer(count, 1):
            raise Misfit("must be a whole number of at least 1", {pattern: count}, "use one such as 16")
    return dict(value)


def _read_pattern_counts(words: Sequence[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for word in words:
        pattern, _, count = word.rpartition("=")
        if not pattern or not count.isdecimal():
            raise Misfit("is not of the form PATTERN=COUNT", word, f"use one such as '{_EXAMPLE}=16'")
        if counts.setdefault(pattern, int(count)) != int(count):
            raise Misfit(f"is given both {counts[pattern]} and {int(count)}", pattern, "remove one of them")
    return counts


COUNT = Kind(_that(lambda value: _is_integer(value, 1), "must be a whole number of at least 1"), {"type": int})
INTERVAL = Kind(
    _that(lambda value: _is_integer(value, 0), "must be a whole number of steps", "use one such as 100, or 0 for none"),
    {"type": int},
)
DECAY = Kind(
    _that(lambda value: _is_number(value) and 0 <= value < 1, "must be at least 0 and below 1"), {"type": float}
)
POSITIVE = Kind(_that(lambda value: _is_number(value) and 0 < value < math.inf, "must be positive"), {"type": float})
SWITCH = Kind(_that(lambda value: isinstance(value, bool), "must be True or False"))
DTYPE = choice(tuple(DTYPES))
PATTERNS = Kind(_check_patterns, {"nargs": "+", "metavar": "PATTERN"}, tuple, tuple)
PATTERN_COUNTS = Kind(_check_pattern_counts, {"nargs": "+", "metavar": "PATTERN=COUNT"}, _read_pattern_counts, tuple)
