"""Find figures that look unhealthy, by the limits and with the advice of `docs/diagnostics.md`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .contents import Facts
from .figures import Figures

FIRST_STEPS = 100
"""Steps in which the bases still turn towards their moments."""

HIGHEST_RESIDUAL = 0.3
NO_BASIS = 0.55
"""Orthogonality near that of an update without a basis, 0.53."""

ONE_DIRECTION = 1.5
"""Effective number of directions of a moment that is as good as one."""


@dataclass
class Finding:
    """Something that looks unhealthy.

    Attributes:
        sign: which one; stable, for programs.
        weights: the weights that show it, and the value of each.
        limit: what was looked for.
        meaning, advice: for people.
    """

    sign: str
    weights: dict[str, float | str]
    limit: str
    meaning: str
    advice: str


@dataclass(frozen=True)
class _Rule:
    sign: str
    limit: str
    meaning: str
    advice: str
    value: Callable[[Figures], float | str | None]
    after: int = 0  # steps that must have been done


def _above(value: float | None, limit: float | None) -> float | None:
    return value if value is not None and limit is not None and value > limit else None


def _residual(found: Figures) -> float | None:
    return _above(found.basis_residual, HIGHEST_RESIDUAL)


def _no_basis(found: Figures) -> float | None:
    low = found.orthogonality is not None and found.orthogonality < NO_BASIS
    return found.orthogonality if low and _residual(found) is not None else None


def _directions(found: Figures) -> float | None:
    if found.moment_effective_rank is None or not found.blocks or not found.width:
        return None
    directions = found.moment_effective_rank * found.blocks * found.width
    return directions if directions < ONE_DIRECTION and found.blocks * found.width > 1 else None


def _never_refreshed(found: Figures) -> int | None:
    """Blocks whose basis is the identity though their moment is not empty; a basis of width 1 is 1 anyway."""
    if found.width == 1 or found.identity_blocks is None or found.empty_blocks is None:
        return None
    return max(0, found.identity_blocks - found.empty_blocks) or None


def _dead(found: Figures) -> int | None:
    if not found.dead_features or found.empty_blocks is None or found.width is None:
        return None
    return found.dead_features - found.empty_blocks * found.width or None


RULES = (
    _Rule(
        "not_finite",
        "every entry is finite",
        "a saved tensor has entries that are not finite",
        "continue from an earlier checkpoint, with clipped gradients",
        lambda found: " and ".join(found.not_finite) or None,
    ),
    _Rule(
        "basis_error",
        "max |Q^T Q - I| above what rounding explains",
        "Q is not orthonormal, which no refresh may cause",
        "compare with --dobb-backend reference and report it; the checkpoint may be damaged",
        lambda found: _above(found.basis_error, found.basis_error_allowed),
    ),
    _Rule(
        "basis_residual",
        f"basis_residual above {HIGHEST_RESIDUAL} after the first {FIRST_STEPS} steps",
        "A moves faster than the bases follow, or they are not refreshed at all",
        "a smaller --dobb-refresh-interval, --dobb-iterations 2, or --dobb-qr eigh for a test; log refresh_rotation",
        _residual,
        FIRST_STEPS,
    ),
    _Rule(
        "orthogonality",
        f"orthogonality below {NO_BASIS} (no basis at all: 0.53), with a high basis_residual",
        "the bases do not fit the activations",
        "as for basis_residual",
        _no_basis,
        FIRST_STEPS,
    ),
    _Rule(
        "one_direction",
        f"moment_effective_rank of less than {ONE_DIRECTION} directions",
        "the activations are dominated by their mean or by one feature",
        "usual for inputs without a norm before them; if training is unstable, look at the activations",
        _directions,
    ),
    _Rule(
        "empty_blocks",
        "blocks of A that are all zero",
        "no captured token ever reached them: an expert that is never routed to, or features that are always zero",
        "check the router, or the layer before; harmless for experts that will be used later",
        lambda found: found.empty_blocks or None,
        1,
    ),
    _Rule(
        "never_refreshed",
        "blocks with a moment whose basis is still the identity",
        "no refresh has turned them: their activations are not finite, or already without correlations",
        "see skipped_blocks in the log, and the warning that each refresh prints; look at the layer's activations",
        _never_refreshed,
        1,
    ),
    _Rule(
        "dead_features",
        "zero rows of A in blocks that are not empty",
        "features that never carried any activation",
        "look for dead units in the layer before; their part of the weight stays as it is but for weight decay",
        _dead,
        1,
    ),
    _Rule(
        "zero_momentum_rows",
        "rows of the momentum that are all zero",
        "units that get no gradient, experts without tokens, or frozen parts of a fused weight",
        "look for dead units; harmless for experts that will be used later",
        lambda found: found.zero_momentum_rows or None,
        1,
    ),
)
"""In the order in which they are shown."""


def findings(figures: Sequence[Figures], facts: Facts) -> list[Finding]:
    """Find what looks unhealthy; before the first step, only damage does."""
    steps = facts.attempted_steps or 0
    found = []
    for rule in RULES:
        weights = {each.name: value for each in figures if (value := rule.value(each)) is not None}
        if weights and steps >= rule.after:
            found.append(Finding(rule.sign, weights, rule.limit, rule.meaning, rule.advice))
    return found


def not_looked_at(figures: Sequence[Figures], facts: Facts) -> list[str]:
    """List what this checkpoint cannot tell, and why."""
    lines = [
        "skipped_blocks, fallback_blocks: counted from each start on, and saved in no checkpoint; see the log",
        "refresh_rotation: needs the bases before a refresh and after it; log it while training",
    ]
    if facts.source == "none":
        lines.append("moments, bases: this variant has none (--dobb-source none)")
    if facts.norm is None:
        lines.append(
            "norm: not named in this checkpoint; figures of the update are those of sign; --norm says otherwise"
        )
    if facts.attempted_steps is None:
        lines.append("attempted_steps: not in this checkpoint; what is judged only after some steps was left out")
    elif facts.attempted_steps < FIRST_STEPS:
        lines.append(
            f"basis_residual: not judged before step {FIRST_STEPS}; this is step {facts.attempted_steps}, and it falls "
            "for the first hundred steps"
        )
    reasons: dict[str, list[str]] = {}
    for each in figures:
        if each.no_update:
            reasons.setdefault(each.no_update, []).append(each.name)
    for reason, names in reasons.items():
        lines.append(f"figures of the update of {listed(names)}: {reason}")
    return lines


def listed(names: Sequence[str], most: int = 3) -> str:
    """Names for a sentence."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
