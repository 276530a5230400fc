"""Run metadata stored in a checkpoint. Nothing here needs Megatron, so that tools can read it without."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from ...errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class RunMetadata:
    """Facts on the run that saved a checkpoint, in its content metadata under the method's name, equal on all ranks.

    A method whose state depends on settings or counters derives a class with those.

    Attributes:
        experts_apart: whether Megatron kept the experts in an optimizer of their own.
        version: of the format.
    """

    experts_apart: bool
    version: int = 1

    def plain(self) -> dict[str, Any]:
        """The facts as numbers, texts, lists and dictionaries."""
        return asdict(self)

    @classmethod
    def read(cls, content: Mapping[str, Any], method: str) -> Self | None:
        """The facts in a checkpoint's content metadata; None if another optimizer wrote it.

        Raises:
            CheckpointError: if the facts are of a newer version, or not complete.
        """
        plain = content.get(method)
        if plain is None:
            return None
        version = plain.get("version") if isinstance(plain, Mapping) else None
        if not isinstance(version, int) or version < 1:
            raise CheckpointError(
                f"the checkpoint's facts on {method.capitalize()} are damaged: {plain!r} has no version; use another"
            )
        if version > cls.version:
            raise CheckpointError(
                f"the checkpoint's state of {method.capitalize()} is of version {version}, and this megatron_dobb "
                f"reads up to version {cls.version}: install the megatron_dobb that wrote it, or a newer one"
            )
        try:
            return cls(**plain)
        except TypeError as error:
            raise CheckpointError(
                f"the checkpoint's facts on {method.capitalize()} are damaged ({error}); use another"
            ) from error
