"""Training and held-out text from the Python installation.

The text is the language reference in `pydoc_data.topics` and the docstrings of the standard library: one to two
megabytes, mostly prose. Repeated paragraphs are dropped, so that none of the held-out text is used for training.
"""

import ast
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

_HELD_OUT_EVERY = 28
_SHORTEST_DOCSTRING = 200
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "ensurepip", "turtledemo"}


def documents() -> tuple[list[str], list[str]]:
    """Training documents, and held-out documents (every 28th)."""
    found = list(_without_repetitions(_documents()))
    held_out = found[_HELD_OUT_EVERY // 2 :: _HELD_OUT_EVERY]
    return [text for i, text in enumerate(found) if i % _HELD_OUT_EVERY != _HELD_OUT_EVERY // 2], held_out


def _documents() -> Iterator[str]:
    for name in sorted(topics):
        yield topics[name]
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        if not _SKIPPED.intersection(path.relative_to(library).parts):
            yield from _docstrings(path)


def _docstrings(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, OSError):
        return  # a few library files are for other Python versions, or deliberately broken
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) >= _SHORTEST_DOCSTRING:
                yield text


def _without_repetitions(documents: Iterator[str]) -> Iterator[str]:
    seen: set[str] = set()
    for text in documents:
        kept = []
        for paragraph in re.split(r"\n\s*\n", text):
            key = " ".join(paragraph.split())
            if key and key not in seen:
                seen.add(key)
                kept.append(paragraph.strip("\n"))
        if kept:
            yield "\n\n".join(kept) + "\n"
