"""Declare the settings of a method as fields of a frozen dataclass."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import ConfigError, verbatim
from .checks import Kind, Misfit

_KEY = "setting"


@dataclass(frozen=True)
class Description:
    """Description of one setting.

    Attributes:
        default: value if none is given.
        kind: the values that it accepts.
        help: what it is, in Markdown without links; one sentence without its full stop.
        metavar: placeholder for the value in command-line help.
        default_text: text shown for a default of None.
        link: Markdown link to more in the project's documentation.
        stored: whether checkpoints store it.
        keyword: whether optimizers without Megatron accept it.
    """

    default: Any
    kind: Kind
    help: str
    metavar: str | None = None
    default_text: str = ""
    link: str = ""
    stored: bool = False
    keyword: bool = True


def setting(default: Any, kind: Kind, help: str, **others: Any) -> Any:
    """Declare a dataclass field with a description; `others` are attributes of `Description`."""
    metadata = {_KEY: Description(default, kind, help, **others)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Settings:
    """Base of the frozen dataclasses that hold the settings of one method.

    Attributes:
        method: the value of `--optimizer`, and the prefix of the flags.
    """

    method: ClassVar[str]

    @classmethod
    def described(cls) -> dict[str, Description]:
        """Return the description of each setting, by name."""
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]  # subclasses are dataclasses
        return {field.name: field.metadata[_KEY] for field in fields if _KEY in field.metadata}

    def __post_init__(self) -> None:
        self._check_each()

    def _check_each(self) -> None:
        """Check every setting on its own, and store it in the form of its kind."""
        for name, about in self.described().items():
            value = getattr(self, name)
            if value is not None or about.default is not None:
                self._settle(name, self.convert(name, value, about.kind.check))

    @classmethod
    def convert(cls, name: str, value: Any, conversion: Callable[[Any], Any]) -> Any:
        """Convert a value, turning a `Misfit` into an error that names the setting."""
        try:
            return conversion(value)
        except Misfit as misfit:
            default = cls.described()[name].default
            usual = f"the default is {default}" if isinstance(default, int | float | str) else ""
            shown = f", not {misfit.value}" if isinstance(misfit.value, bool) else ""
            raise cls.error(
                verbatim(misfit.reason + shown), verbatim(misfit.remedy or usual), {name: misfit.value}
            ) from None

    @classmethod
    def error(cls, reason: str, remedy: str, settings: Mapping[str, Any]) -> ConfigError:
        """Make an error about some of these settings."""
        return ConfigError(reason, remedy, settings=settings, owner=cls)

    def _settle(self, name: str, value: Any) -> None:
        """Set a field of the frozen dataclass during initialization."""
        object.__setattr__(self, name, value)

    def stored(self) -> dict[str, Any]:
        """Return the settings that checkpoints store, as numbers, strings, lists and dictionaries."""
        values = {name: getattr(self, name) for name, about in self.described().items() if about.stored}
        return {
            name: list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, Mapping) else value
            for name, value in values.items()
        }
