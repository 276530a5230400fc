"""Name patterns: globs that select a model's weights by name."""

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from .fields import Settings


def matches(pattern: str, weight_name: str) -> bool:
    """Match a glob pattern against the full name of a weight, or the name of the module that owns it."""
    return fnmatchcase(weight_name, pattern) or fnmatchcase(weight_name.rpartition(".")[0], pattern)


def first_match(patterns: Iterable[str], weight_name: str) -> str | None:
    """Return the first pattern that matches a weight, or None."""
    return next((pattern for pattern in patterns if matches(pattern, weight_name)), None)


def patterns_of(settings: Settings) -> dict[str, tuple[str, ...]]:
    """Return the name patterns in settings, by setting."""
    return {
        name: about.kind.patterns(getattr(settings, name))
        for name, about in settings.described().items()
        if about.kind.patterns is not None
    }


def check_used(settings: Settings, used: Collection[str]) -> None:
    """Raise for a pattern that matches no weight of the model.

    Args:
        settings: the settings.
        used: every pattern that matched at least one weight, over all ranks.

    Raises:
        ConfigError: names the setting and the pattern.
    """
    for name, patterns in patterns_of(settings).items():
        for pattern in patterns:
            if pattern not in used:
                raise settings.error(
                    f"matches no weight that {settings.method.capitalize()} could manage",
                    "patterns are globs over full names, such as '*.mlp.linear_fc2'",
                    {name: pattern},
                )
