"""Settings of sign momentum."""

from dataclasses import dataclass
from typing import ClassVar

from megatron_dobb.settings.checks import DECAY, PATTERNS, POSITIVE, SWITCH
from megatron_dobb.settings.fields import Settings, setting
from megatron_dobb.settings.patterns import check_used

REFUSALS = ()  # It works with whatever the distributed optimizer works with.


@dataclass(frozen=True)
class SignMomentumConfig(Settings):
    """Settings of sign momentum; the flag of each is `--signmomentum-` and its name."""

    method: ClassVar[str] = "signmomentum"

    momentum: float = setting(0.95, DECAY, "decay of the momentum, in [0, 1)")
    update_scale: float = setting(0.05, POSITIVE, "size of the update of every entry")
    exclude: tuple[str, ...] = setting((), PATTERNS, "globs of weights that AdamW updates instead")
    load_other_optimizer: bool = setting(False, SWITCH, "continue AdamW's checkpoint")

    def check_patterns_used(self, used: set[str]) -> None:
        """Raise for a pattern that names no weight of the model."""
        check_used(self, used)
