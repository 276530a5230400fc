"""Settings of sign momentum."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar

from megatron_dobb.errors import ConfigError

REFUSALS = ()  # It works with whatever the distributed optimizer works with.


@dataclass(frozen=True)
class SignMomentumConfig:
    """Settings of the optimizer.

    Attributes:
        momentum: decay of the momentum (`mu`).
        update_scale: the update of every entry (`tau`).
        exclude: glob patterns of weights that AdamW updates instead.
        load_other_optimizer: continue Megatron's checkpoint of AdamW, whose first moments become the momentum.
    """

    method: ClassVar[str] = "signmomentum"

    momentum: float = 0.95
    update_scale: float = 0.05
    exclude: tuple[str, ...] = ()
    load_other_optimizer: bool = False

    def check_patterns_used(self, used: set[str]) -> None:
        """Raise for a pattern that names no weight of the model."""
        for pattern in self.exclude:
            if pattern not in used:
                raise ConfigError(f"--signmomentum-exclude {pattern!r} matches no weight")

    def patterns_matching(self, name: str) -> set[str]:
        """The patterns that name a weight."""
        return {pattern for pattern in self.exclude if fnmatchcase(name, pattern)}
