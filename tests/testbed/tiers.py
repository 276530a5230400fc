"""What the quick tier of the tests runs of a list of cases.

`tests/run.sh` leaves out what is marked `full`, `tests/run.sh --all` runs it too. A test that is named to pytest runs
whole.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

FULL = pytest.mark.full


def quick(cases: Iterable[Any], chosen: Collection[Any]) -> list[Any]:
    """Parameters of a test: all the cases, of which the quick tier runs the chosen ones.

    Raises:
        ValueError: if something chosen is no case.
    """
    cases = list(cases)
    if unknown := [case for case in chosen if case not in cases]:
        raise ValueError(f"{unknown[0]!r} is chosen for the quick tier, and is none of the cases")
    return [case if case in chosen else _full(case) for case in cases]


def _full(case: Any) -> Any:
    return pytest.param(*case, marks=FULL) if isinstance(case, tuple) else pytest.param(case, marks=FULL)


def pairwise(cases: Sequence[Any], factors: Callable[[Any], Sequence[Any]]) -> list[Any]:
    """A few cases in which every two values of two factors come together that do so in any case.

    Greedy: the case that shows most pairs that are new comes next, and of equal ones the earlier.
    """
    pairs = [set(combinations(enumerate(factors(case)), 2)) for case in cases]
    missing, chosen = set().union(*pairs), []
    while missing:
        best = max(range(len(cases)), key=lambda place: (len(pairs[place] & missing), -place))
        chosen.append(cases[best])
        missing -= pairs[best]
    return chosen


def selected(request: pytest.FixtureRequest, names: Sequence[str]) -> list[tuple[Any, ...]]:
    """The parameters with which the tests of this file are going to run, so that what they share is made for no others.

    Args:
        request: pytest's, of a test or of a fixture of the module.
        names: the parameters; tests without one of them are left aside.
    """
    of_file = [item.callspec.params for item in request.session.items if _takes_from(item, request, names)]
    return list(dict.fromkeys(tuple(params[name] for name in names) for params in of_file))


def _takes_from(item: Any, request: pytest.FixtureRequest, names: Sequence[str]) -> bool:
    return item.path == request.path and hasattr(item, "callspec") and set(names) <= item.callspec.params.keys()
