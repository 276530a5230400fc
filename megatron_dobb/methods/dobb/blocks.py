"""Choose the width of a weight's blocks.

A weight of `columns` input features is cut into `columns / width` blocks of `width` neighbouring columns, the same on
every parallel layout.
"""

import math

from ...errors import BlockError
from ...sharding.block_width_advice import workable_counts


def block_width(
    name: str,
    columns: int,
    *,
    blocks: int | None = None,
    width: int | None = None,
    column_shards: int = 1,
    side: str = "input",
    pattern: str | None = None,
) -> int:
    """Compute the block width of one weight, the same on every parallel layout.

    Args:
        name: the weight's name, for the message of an error.
        columns: the weight's **global** number of input features; of output features, on the output side.
        blocks: number of blocks over all columns (`--dobb-blocks`); exclusive with `width`.
        width: columns in one block (`--dobb-block-width`).
        column_shards: number of tensor-parallel ranks that share the columns (1 unless row-parallel).
        side: which features they are, `input` or `output`, for the message of an error.
        pattern: the pattern in `--dobb-blocks-for` that set `blocks`, if any, for error messages.

    Raises:
        BlockError: if the blocks do not divide the columns, or a block would span two tensor-parallel ranks.
    """
    if blocks is not None and width is not None:
        raise BlockError(
            "exclude each other", "give one of them", subject=name, settings={"blocks": blocks, "block_width": width}
        )
    asked: dict[str, object]
    if blocks is not None:
        value, asked = blocks, {"blocks": blocks} if pattern is None else {"blocks_for": {pattern: blocks}}
    elif width is not None:
        value, asked = width, {"block_width": width}
    else:
        raise BlockError("give either {blocks} or {block_width}", subject=name)
    advice = _advice(columns, column_shards, value, by_count=width is None, has_own=pattern is not None)
    if value < 1 or columns < 1 or columns % value:
        raise BlockError(f"does not divide its {columns} {side} features", advice, subject=name, settings=asked)
    count = value if width is None else columns // value
    if count % column_shards:
        raise BlockError(
            f"makes {count} blocks, which is not a multiple of the {column_shards} tensor-parallel ranks that share "
            f"its {columns} {side} features, so a block would span two",
            advice,
            subject=name,
            settings=asked,
        )
    return columns // count


def _advice(columns: int, column_shards: int, asked: int, *, by_count: bool, has_own: bool) -> str:
    counts = workable_counts(columns, column_shards)
    if not counts:
        return f"no block count works, because {column_shards} ranks do not divide {columns}: use {{exclude}}"
    values = counts if by_count else [columns // count for count in counts]
    nearest = sorted(values, key=lambda value: abs(math.log(value / max(asked, 1))))[:8]
    own = "" if has_own else " give this weight its own count with {blocks_for},"
    return f"use one of {', '.join(map(str, sorted(nearest)))},{own} or leave it to AdamW with {{exclude}}"
