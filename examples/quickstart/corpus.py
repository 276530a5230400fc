"""English that every Python brings along, as a byte-level Megatron dataset.

The text is the language reference in `pydoc_data.topics` and the docstrings of the standard library: one to two
megabytes, mostly prose. Paragraphs that occur again are dropped, so that none of the held-out text is trained on.
"""

import ast
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder, get_bin_path, get_idx_path

VOCABULARY = 257
"""All bytes, and the end of a document; Megatron's NullTokenizer takes the last token for that."""
END_OF_DOCUMENT = VOCABULARY - 1

_HELD_OUT_EVERY = 28
_SHORTEST_DOCSTRING = 200
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "ensurepip", "turtledemo"}


@dataclass(frozen=True)
class Corpus:
    """Where the two datasets are, and how many tokens each has."""

    train: Path
    valid: Path
    train_tokens: int
    valid_tokens: int


def build(directory: Path) -> Corpus:
    """Write `train` and `valid` as indexed datasets into a directory.

    Every 28th document is held out.

    Args:
        directory: made if it does not exist.
    """
    directory.mkdir(parents=True, exist_ok=True)
    documents = list(_without_repetitions(_documents()))
    valid = documents[_HELD_OUT_EVERY // 2 :: _HELD_OUT_EVERY]
    train = [text for i, text in enumerate(documents) if i % _HELD_OUT_EVERY != _HELD_OUT_EVERY // 2]
    return Corpus(
        train=directory / "train",
        valid=directory / "valid",
        train_tokens=_write(directory / "train", train),
        valid_tokens=_write(directory / "valid", valid),
    )


def _write(prefix: Path, documents: list[str]) -> int:
    builder = IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype=DType.optimal_dtype(VOCABULARY))
    tokens = 0
    for text in documents:
        document = [*text.encode(), END_OF_DOCUMENT]
        builder.add_document(torch.tensor(document), [len(document)])
        tokens += len(document)
    builder.finalize(get_idx_path(str(prefix)))
    return tokens


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
        return  # the library has a few files for other Pythons, or broken on purpose
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
