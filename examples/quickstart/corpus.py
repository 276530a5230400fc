"""A byte-level Megatron dataset made from the text of `english`."""

from dataclasses import dataclass
from pathlib import Path

import english
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder, get_bin_path, get_idx_path

VOCABULARY = 257
"""All bytes, plus an end-of-document token; Megatron's NullTokenizer uses the last token for that."""
END_OF_DOCUMENT = VOCABULARY - 1


@dataclass(frozen=True)
class Corpus:
    """Paths and token counts of the two datasets."""

    train: Path
    valid: Path
    train_tokens: int
    valid_tokens: int


def build(directory: Path) -> Corpus:
    """Write `train` and `valid` as indexed datasets into a directory.

    Args:
        directory: created if it does not exist.
    """
    directory.mkdir(parents=True, exist_ok=True)
    train, valid = english.documents()
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
