"""User-facing errors, and the three styles in which they name a setting.

An error stores the settings involved, the reason and the remedy separately, and builds its text when shown:
`--dobb-blocks 3` for a command line, `DobbConfig(blocks=3)` for a program with config objects, `blocks=3` for keywords.
"""

import ast
import shlex
from collections.abc import Mapping
from enum import Enum
from typing import Any

_NO_VALUE = object()


def flag(method: str, name: str) -> str:
    """Return the command-line flag of a setting, or of a Megatron option if `method` is empty."""
    return "--" + "-".join(filter(None, (method, name.replace("_", "-"))))


class Style(Enum):
    """Style in which a message names settings."""

    FLAG = "flag"
    FIELD = "field"
    KEYWORD = "keyword"

    def named(self, method: str, name: str, value: object = _NO_VALUE) -> str:
        """Name a setting, or a Megatron option if `method` is empty, with its value if one is given."""
        if self is not Style.FLAG:
            return name if value is _NO_VALUE else f"{name}={value!r}"
        if value is False:
            return flag("no", flag(method, name)[2:])
        return flag(method, name) + ("" if value is _NO_VALUE or value is True else f" {_words(value)}")


def _words(value: object) -> str:
    """Format a value as command-line words."""
    if isinstance(value, Mapping):
        return " ".join(shlex.quote(f"{key}={inner}") for key, inner in value.items()) or "{}"
    if isinstance(value, tuple):
        return " ".join(map(_words, value)) or "()"
    return shlex.quote(value) if isinstance(value, str) else repr(value)


class _Reference:
    """Reference to a setting in a message: `{name}`, or `{name:value}` to show a value."""

    def __init__(self, style: Style, method: str, name: str) -> None:
        self._style, self._method, self._name = style, method, name

    def __format__(self, value: str) -> str:
        if not value:
            return self._style.named(self._method, self._name)
        try:
            literal = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            literal = value
        return self._style.named(self._method, self._name, literal)


class _MegatronOptions:
    """References to Megatron's options: `{megatron.bf16}`, `{megatron.ckpt_format:torch_dist}`."""

    def __init__(self, style: Style) -> None:
        self._style = style

    def __getattr__(self, name: str) -> _Reference:
        return _Reference(self._style, "", name)


class _References(dict[str, Any]):
    def __init__(self, style: Style, method: str) -> None:
        super().__init__(megatron=_MegatronOptions(style))
        self._style, self._method = style, method

    def __missing__(self, name: str) -> _Reference:
        return _Reference(self._style, self._method, name)


def verbatim(text: object) -> str:
    """Escape the braces of a text, so that a reason or remedy can contain it literally."""
    return str(text).replace("{", "{{").replace("}", "}}")


class DobbError(Exception):
    """Base class of all errors that this package raises deliberately.

    Args:
        reason: what is wrong; the literal text of the error if no other argument is given.
        remedy: what to do.
        subject: the object at fault, such as the name of a weight.
        settings: the settings involved and their values.
        owner: the class of the settings.
        style: how the text names settings.

    Reason and remedy name other settings as `{source}` or `{source:gram}`, and Megatron's options as `{megatron.bf16}`.
    """

    def __init__(
        self,
        reason: str = "",
        remedy: str = "",
        *,
        subject: str = "",
        settings: Mapping[str, Any] | None = None,
        owner: type | None = None,
        style: Style = Style.FLAG,
    ) -> None:
        self.is_template = bool(remedy or subject or settings is not None)
        self.reason, self.remedy, self.subject = reason, remedy, subject
        self.settings = dict(settings or {})
        self.method: str = getattr(owner, "method", "dobb")
        self.class_name = owner.__name__ if owner is not None else ""
        self.style = style
        super().__init__(self.text(style))

    def text(self, style: Style) -> str:
        """The whole error in one sentence, which names settings in this style."""
        if not self.is_template:
            return self.reason
        references = _References(style, self.method)
        named = [style.named(self.method, *setting) for setting in self.settings.items()]
        if style is Style.FIELD and named and self.class_name:
            named = [f"{self.class_name}({', '.join(named)})"]
        reason = " ".join(filter(None, (" and ".join(named), self.reason.format_map(references))))
        remedy = self.remedy.format_map(references)
        return (f"{self.subject}: " if self.subject else "") + reason + (f"; {remedy}" if remedy else "")

    def __str__(self) -> str:
        return self.text(self.style)


class ConfigError(DobbError, ValueError):
    """Invalid setting, or two settings that contradict each other."""


class BlockError(ConfigError):
    """Weight that cannot be cut into the requested blocks."""


class LayoutError(ConfigError):
    """Blocks that cannot be aligned to the shards of a param/grad buffer."""


class CaptureError(DobbError, RuntimeError):
    """Refresh step without activations for a managed weight."""


class NonFiniteError(DobbError, ArithmeticError):
    """NaN or infinite entry in a gradient or momentum; nothing was updated."""


class UnsupportedError(DobbError, RuntimeError):
    """Option, version or environment that Dobb does not support."""


class CheckpointError(DobbError, RuntimeError):
    """Checkpoint that cannot be written, or that this run cannot continue from; nothing was loaded."""
