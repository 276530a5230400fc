"""Schedule of the steps on which each weight's bases are refreshed."""

from collections.abc import Mapping


def phases(work_of: Mapping[str, int], interval: int) -> dict[str, int]:
    """Assign the weights of a whole model to the `interval` steps of a staggered refresh (`--dobb-stagger`).

    Weights with the most work go first, each to the step with the least work so far, on a tie to the earliest. Only
    the names, their work and the interval matter, so that every layout of the model has the same schedule.

    Args:
        work_of: work of refreshing each weight, `B b^3` with the whole model's `B`, by its name.
        interval: steps between two refreshes of a weight, T.

    Returns:
        The phase of every weight, from 0 to `interval - 1`.
    """
    load = [0] * interval
    found = {}
    for name in sorted(work_of, key=lambda name: (-work_of[name], name)):
        phase = load.index(min(load))
        found[name] = phase
        load[phase] += work_of[name]
    return found


def is_due(step: int, phase: int, interval: int) -> bool:
    """Return whether the step after `step` attempted ones refreshes the weights of a phase.

    The first step refreshes all weights; those of phase `p` are then refreshed on every step that lies `p` steps behind
    a multiple of the interval. Without staggering all weights have phase 0.
    """
    return step == 0 or step % interval == phase
