"""Check the whole model at the start: whether a method has weights to update, and name patterns match any."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist

from ..errors import ConfigError
from .console import log_whole_model
from .model.chunk_state import ManagedWeight, Selection


class MethodSettings(Protocol):
    """Settings that every method has."""

    @property
    def load_other_optimizer(self) -> bool:
        """Whether the user wants to continue AdamW's checkpoint, whose first moments become the momentum."""

    def check_patterns_used(self, used: set[str]) -> None:
        """Raise a `ConfigError` for a name pattern of the user that is not in `used`: it matches no weight."""


@dataclass(frozen=True)
class ModelPart:
    """Facts on the part of the model that one rank holds, compared over all ranks at the start.

    Attributes:
        patterns_used: the user's name patterns that match a weight here.
        weights: number of managed weights, and of their elements, by what ranks share: those with the same key hold
            parts or copies of the same weights.
        kinds_on_adamw: see `Selection.kinds_on_adamw`.
    """

    patterns_used: frozenset[str]
    weights: dict[tuple[int, ...], tuple[int, int]]
    kinds_on_adamw: frozenset[str]


def check_whole_model(
    method: str, settings: MethodSettings, selections: Sequence[Selection[Any]], chunk: Any
) -> set[str]:
    """Check, over all ranks, that there is something to update and that every name pattern names something.

    Args:
        method: its name.
        settings: of the method.
        selections: of this rank's model chunks.
        chunk: one of these, for Megatron's process groups.

    Returns:
        `Selection.kinds_on_adamw` of the whole model.

    Raises:
        ConfigError: on all ranks, if there is nothing to update or a pattern matches no weight.
    """
    weights = {weight.name: weight for selection in selections for weight in selection.managed}.values()
    stage, expert_rank = chunk.pp_group.rank(), chunk.ep_group.rank()
    part = ModelPart(
        frozenset().union(*(selection.patterns_used for selection in selections)),
        {
            (stage,): _size([weight for weight in weights if not weight.is_expert_parallel]),
            (stage, expert_rank): _size([weight for weight in weights if weight.is_expert_parallel]),
        },
        frozenset().union(*(selection.kinds_on_adamw() for selection in selections)),
    )
    parts = gather_over_all_ranks(part)
    settings.check_patterns_used(set().union(*(part.patterns_used for part in parts)))
    sizes = {key: size for part in parts for key, size in part.weights.items()}.values()
    matrices, elements = (sum(numbers) for numbers in zip(*sizes, strict=True))
    if not matrices:
        reasons = sum((selection.reasons() for selection in selections), Counter[str]())
        raise ConfigError(
            f"--optimizer {method} manages no matrix of this model: "
            + "; ".join(f"{number} parameters: {reason}" for reason, number in reasons.items())
            + f". Use --optimizer adam, or fewer --{method}-exclude patterns"
        )
    log_whole_model(method, matrices, elements)
    return set().union(*(part.kinds_on_adamw for part in parts))


def gather_over_all_ranks[T](value: T) -> list[T]:
    """The values of all ranks of the job, by rank. Collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _size(weights: Sequence[ManagedWeight]) -> tuple[int, int]:
    """Number of weights, and of their elements in the whole model."""
    return len(weights), sum(weight.elements for weight in weights)
