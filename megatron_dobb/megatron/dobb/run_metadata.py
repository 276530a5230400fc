"""Dobb's run metadata stored in a checkpoint. Nothing here needs Megatron, so that tools can read it without."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...methods.dobb.settings import DobbConfig
from ..checkpoint.metadata import RunMetadata
from .weight_sharding import fewer_features_than_blocks


@dataclass(frozen=True, kw_only=True)
class DobbRunMetadata(RunMetadata):
    """Facts on the run of Dobb that saved a checkpoint.

    Attributes:
        blocks, block_width, blocks_for, exclude: the settings that decide which weights had which blocks.
        moment_dtype, basis_dtype: storage of the moments and bases.
        attempted_steps: steps so far, skipped ones included; the schedule of refreshes counts them.
        capture_sequences: how many sequences feed the moments; None for all, or not settled yet.
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
    side: str = "input"
    source: str = "activation"
    refresh_is_asked: bool = False
    version: int = 2

    @classmethod
    def of(cls, settings: DobbConfig, **others: Any) -> "DobbRunMetadata":
        """The facts of a run with these settings."""
        return cls(**settings.stored(), **others)

    def width(self, name: str, features: int) -> int | None:
        """The width that a weight's blocks had, on the side that had them; None if it was not on Dobb."""
        settings = DobbConfig(
            blocks=self.blocks, block_width=self.block_width, blocks_for=self.blocks_for, exclude=tuple(self.exclude)
        )
        asked = settings.blocks_of(name)
        if settings.excluded(name) or fewer_features_than_blocks(features, asked):
            return None
        width = asked.get("width") or features // (asked.get("blocks") or 1)
        return width if features % width == 0 else None
