"""What a checkpoint says of the run that wrote it. Nothing here needs Megatron, so that tools can read it without."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...errors import CheckpointError
from ...methods.dobb.settings import DobbConfig
from ..model.select_weights import fewer_features_than_blocks

FORMAT_VERSION = 2
METADATA = "dobb"  # of Megatron's content metadata


@dataclass(frozen=True)
class Saved:
    """What a checkpoint says of the run that wrote it, the same on every rank.

    Attributes:
        version: of the format.
        blocks, block_width, blocks_for, exclude: the settings that decide which weights had which blocks.
        moment_dtype, basis_dtype: what the moments and bases are stored in.
        attempted_steps: steps so far, skipped ones included; the schedule of refreshes counts them.
        capture_sequences: how many sequences feed the moments; None for all, or not settled yet.
        experts_apart: whether Megatron kept the experts in an optimizer of their own.
        side, source: which axis the blocks divide, and whose second moments those are.
        refresh_is_asked: whether a due refresh is still to be done, because its step was skipped.
    """

    blocks: int | None
    block_width: int | None
    blocks_for: Mapping[str, int]
    exclude: Sequence[str]
    moment_dtype: str
    basis_dtype: str
    attempted_steps: int
    capture_sequences: int | None
    experts_apart: bool
    side: str = "input"
    source: str = "activation"
    refresh_is_asked: bool = False
    version: int = FORMAT_VERSION

    @classmethod
    def of(cls, config: DobbConfig, **others: Any) -> "Saved":
        """The facts of a run with these settings."""
        return cls(**config.stored(), **others)

    def plain(self) -> dict[str, Any]:
        """The facts as numbers, texts, lists and dictionaries."""
        return asdict(self)

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> "Saved | None":
        """The facts in a checkpoint's content metadata; None if its optimizer was not Dobb.

        Raises:
            CheckpointError: if the facts are of a newer version, or not complete.
        """
        plain = metadata.get(METADATA)
        if plain is None:
            return None
        version = plain.get("version") if isinstance(plain, Mapping) else None
        if not isinstance(version, int) or version < 1:
            raise CheckpointError(f"the checkpoint's facts on Dobb are damaged: {plain!r} has no version; use another")
        if version > FORMAT_VERSION:
            raise CheckpointError(
                f"the checkpoint's state of Dobb is of version {version}, and this megatron_dobb reads up to version "
                f"{FORMAT_VERSION}: install the megatron_dobb that wrote it, or a newer one"
            )
        try:
            return cls(**plain)
        except TypeError as error:
            raise CheckpointError(f"the checkpoint's facts on Dobb are damaged ({error}); use another") from error

    def width(self, name: str, features: int) -> int | None:
        """The width that a weight's blocks had, on the side that had them; None if it was not on Dobb."""
        config = DobbConfig(
            blocks=self.blocks, block_width=self.block_width, blocks_for=self.blocks_for, exclude=tuple(self.exclude)
        )
        asked = config.blocks_of(name)
        if config.excluded(name) or fewer_features_than_blocks(features, asked):
            return None
        width = asked.get("width") or features // (asked.get("blocks") or 1)
        return width if features % width == 0 else None
