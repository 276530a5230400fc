"""docs/troubleshooting.md has every error of the package, so that a search for its words finds it."""

import ast
import re
import string
from pathlib import Path

import pytest

from megatron_dobb import errors
from megatron_dobb.megatron.options.unsupported import refusals

ROOT = Path(__file__).parents[2]
PAGE = " ".join((ROOT / "docs/troubleshooting.md").read_text().split())
KINDS = {
    *(name for name, value in vars(errors).items() if isinstance(value, type)),
    *("ImportError", "TypeError", "Misfit", "settings.error", "self._contradiction"),
}
GAP = "\0"
WORDS = 3
GENERIC = ("is incompatible with",)
"""Words that many messages begin with; the next ones tell them apart."""
DYNAMIC = 7
"""Raises whose sentence is put together elsewhere."""


def literal(node):
    """The text of a string, with a gap for each value in it; None for what is no string."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(literal(part) or GAP for part in parts)
        case ast.BinOp(left=left, right=right):
            return (literal(left) or GAP) + (literal(right) or GAP)
    return None


def message(node):
    """The text of an error as shown, with a gap for each value and for each setting that it names."""
    text = literal(node)
    if text is None or "{" not in text:
        return text
    return "".join(before + GAP * (name is not None) for before, name, *_ in string.Formatter().parse(text))


def raises():
    for path in sorted((ROOT / "megatron_dobb").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                kind = ast.unparse(node.exc.func)
                if kind in KINDS:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", message(node.exc.args[0])
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "_that":  # of a kind of settings
                yield f"{path.relative_to(ROOT)}:{node.lineno}", message(node.args[1])


def leading_words(message):
    """The first words of a message that stand together: at least three, if it has as many."""
    parts = [part.strip(" :;,.'\"([") for part in message.split(GAP)]
    long = [part for part in parts if len(part.split()) >= 3 and part not in GENERIC]
    return " ".join((long or [max(parts, key=len)])[0].split()[:WORDS]).strip(" :;,.'\"([")


FOUND = [(place, message) for place, message in raises() if message is not None]


def test_the_raises_of_the_source_are_found():
    assert len(FOUND) > 60
    assert len(list(raises())) - len(FOUND) <= DYNAMIC


@pytest.mark.parametrize(("place", "message"), FOUND, ids=[place for place, _ in FOUND])
def test_every_error_is_on_the_page_by_its_words(place, message):
    words = leading_words(message)
    assert re.search(r"(?<!\w)" + re.escape(words), PAGE), f"{place}: {words!r}, of {message!r}"


def test_every_refused_option_of_megatrons_is_on_the_page():
    for refusal in refusals("dobb"):
        what = str(errors.UnsupportedError(refusal.what, settings={}))
        own = what.replace("with --dobb-source output-gradient, the default of --dobb-side output, and --", "--")
        assert own in PAGE, what
