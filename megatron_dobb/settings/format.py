"""Format settings' descriptions as the README's table of flags and as attributes in a docstring."""

import textwrap
from collections.abc import Iterator
from typing import Any

from ..errors import flag
from .fields import Description, Settings


def plain(text: str) -> str:
    """Format Markdown without links for a terminal."""
    return text.replace("`", "")


def default_text(about: Description) -> str:
    """Format a default as Markdown; empty if there is none."""
    value: Any = about.default
    if about.default_text:
        return about.default_text
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, str):
        return f"`{value}`"
    return "" if value is None or value == () or value == {} else str(value)


def flags_table(kind: type[Settings]) -> Iterator[str]:
    """Yield the lines of a Markdown table of all flags."""
    yield "| Flag | Default | Meaning |"
    yield "|---|---|---|"
    for name, about in kind.described().items():
        off = "no-" if about.default is True else ""
        value = about.metavar or about.kind.options.get("metavar", "")
        more = " ..." if "nargs" in about.kind.options else ""
        shown = f"--{off}{flag(kind.method, name)[2:]}" + (f" {value}{more}" if value else "")
        text = about.help + (f": {about.link}" if about.link else "")
        yield f"| `{shown}` | {default_text(about)} | {text} |".replace("|  |", "| |")


def document(kind: type[Settings]) -> None:
    """Add the attributes to the docstring of a settings class."""
    if kind.__doc__ is None:  # python -OO
        return
    lines = [
        textwrap.fill(
            f"{name}: {about.help}.", 120, initial_indent=" " * 8, subsequent_indent=" " * 12, break_long_words=False
        )
        for name, about in kind.described().items()
    ]
    body = "\n".join(["", "    Attributes:", *lines, ""])
    head, raises, tail = kind.__doc__.partition("\n    Raises:")
    kind.__doc__ = head.rstrip() + "\n" + body + raises + tail
