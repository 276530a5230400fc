"""Command-line flags of a method's settings, named `--METHOD-SETTING`."""

import argparse
from typing import Any

from ..errors import flag
from .checks import SWITCH
from .fields import Description, Settings
from .format import default_text, plain


def destination(kind: type[Settings], name: str) -> str:
    """Return the name of the parsed argument that holds a setting."""
    return f"{kind.method}_{name}"


def add_arguments(parser: argparse.ArgumentParser, kind: type[Settings]) -> None:
    """Add an argument group with a flag for every setting of a class."""
    group = parser.add_argument_group(title=kind.method, description=f"settings of --optimizer {kind.method}")
    for name, about in kind.described().items():
        group.add_argument(flag(kind.method, name), dest=destination(kind, name), **_options(about))


def _options(about: Description) -> dict[str, Any]:
    shown = default_text(about)
    text = plain(about.help).replace("%", "%%")
    options: dict[str, Any] = {**about.kind.options, "default": about.default}
    if about.kind is SWITCH:
        options["action"] = argparse.BooleanOptionalAction if about.default else "store_true"
    elif about.metavar is not None:
        options["metavar"] = about.metavar
    if about.kind.patterns is not None:
        options["default"] = []
    help_text = f"{text[:1].upper()}{text[1:]}" + (f" (default: {plain(shown)})." if shown else ".")
    return {**options, "help": help_text}


def read_arguments[S: Settings](kind: type[S], arguments: argparse.Namespace) -> S:
    """Read settings from parsed flags; settings missing from `arguments` take their defaults.

    Raises:
        ConfigError: for a value out of range, flags that contradict each other, or a malformed PATTERN=COUNT.
    """
    values = vars(arguments)
    given = {}
    for name, about in kind.described().items():
        if (key := destination(kind, name)) in values:
            given[name] = kind.convert(name, values[key], about.kind.read)
    return kind(**given)
