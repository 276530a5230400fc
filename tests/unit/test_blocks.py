"""Block arithmetic against brute force over every element, and messages that say what would work."""

import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dobb.errors import BlockError
from megatron_dobb.methods.dobb.blocks import block_width
from megatron_dobb.sharding.block_width_advice import suggest_widths, workable_counts
from megatron_dobb.sharding.shard import Shard


@st.composite
def shards(draw: st.DrawFn) -> Shard:
    width, blocks, rows = draw(st.integers(1, 5)), draw(st.integers(1, 6)), draw(st.integers(1, 8))
    chunks = sorted(draw(st.lists(st.integers(0, rows * blocks), min_size=2, max_size=2)))
    return Shard(chunks[0] * width, chunks[1] * width, blocks * width, width)


def block_of(element: int, shard: Shard) -> int:
    """The block of one element of the weight, from its column."""
    return element % shard.columns // shard.width


@settings(max_examples=120, deadline=None)
@given(shards())
def test_pieces_cover_the_shard_once_in_order_and_are_rectangles_of_whole_blocks(shard: Shard) -> None:
    covered = 0
    pieces = list(shard.pieces())
    for piece in pieces:
        assert piece.offset == covered
        assert piece.rows >= 1
        assert piece.blocks >= 1
        for row, j, k in product(range(piece.rows), range(piece.blocks), range(shard.width)):
            element = shard.start + piece.offset + (row * piece.blocks + j) * shard.width + k
            assert block_of(element, shard) == piece.first_block + j
            assert element % shard.width == k
        covered += piece.rows * piece.blocks * shard.width
    assert covered == shard.numel == shard.end - shard.start
    assert len(pieces) <= 3
    whole = [piece for piece in pieces if piece.blocks == shard.blocks_per_row]
    assert len(whole) <= 1
    assert all(piece.rows == 1 for piece in pieces if piece not in whole)


@settings(max_examples=120, deadline=None)
@given(shards())
def test_held_blocks_are_those_of_the_shards_elements(shard: Shard) -> None:
    touched = {block_of(element, shard) for element in range(shard.start, shard.end)}
    assert shard.held_blocks() == tuple(sorted(touched))


def test_a_partial_first_row_whole_rows_and_a_partial_last_row_make_three_pieces() -> None:
    pieces = list(Shard(start=4, end=32, columns=8, width=2).pieces())
    assert [(p.offset, p.rows, p.first_block, p.blocks) for p in pieces] == [(0, 1, 2, 2), (4, 3, 0, 4)]
    pieces = list(Shard(start=4, end=34, columns=8, width=2).pieces())
    assert [(p.offset, p.rows, p.first_block, p.blocks) for p in pieces] == [
        (0, 1, 2, 2),
        (4, 3, 0, 4),
        (28, 1, 0, 1),
    ]


def test_an_empty_shard_has_no_pieces() -> None:
    shard = Shard(24, 24, 8, 2)
    assert list(shard.pieces()) == []
    assert shard.held_blocks() == ()


@pytest.mark.parametrize(("start", "end"), [(1, 8), (0, 7), (-2, 4), (6, 4)])
def test_a_shard_that_cuts_a_block_is_refused(start: int, end: int) -> None:
    with pytest.raises(BlockError, match=rf"shard \[{start}, {end}\) cuts a block of width 2"):
        Shard(start, end, 8, 2)


@pytest.mark.parametrize(("columns", "width"), [(8, 3), (8, 0), (0, 2), (8, -2)])
def test_a_width_that_does_not_divide_the_columns_is_refused(columns: int, width: int) -> None:
    with pytest.raises(BlockError, match=f"block width {width} does not divide {columns} columns"):
        Shard(0, 0, columns, width)


@given(st.integers(1, 600), st.integers(1, 12))
def test_workable_counts_are_all_divisors_that_the_ranks_can_share(columns: int, ranks: int) -> None:
    expected = [c for c in range(1, columns + 1) if columns % c == 0 and c % ranks == 0]
    assert workable_counts(columns, ranks) == expected


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 400), st.integers(1, 64), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_a_width_is_given_exactly_when_whole_blocks_fit_every_rank(
    columns: int, value: int, ranks: int, by_count: bool
) -> None:
    asked = {"blocks": value} if by_count else {"width": value}
    width = (columns / value) if by_count else value
    fits = columns % width == 0 and width == int(width) and (columns / ranks) % width == 0
    if fits:
        assert block_width("w", columns, column_shards=ranks, **asked) == width
        return
    with pytest.raises(BlockError, match=f"^w: --dobb-block.* {value} ") as caught:
        block_width("w", columns, column_shards=ranks, **asked)
    message = str(caught.value)
    if "use one of " not in message:
        assert columns % ranks
        return
    advised = message.partition("use one of ")[2].partition(", give")[0].split(", ")
    assert 1 <= len(advised) <= 8
    for number in map(int, advised):
        works = {"blocks": number} if by_count else {"width": number}
        assert (columns // ranks) % block_width("w", columns, column_shards=ranks, **works) == 0


def test_advice_is_the_workable_values_nearest_to_what_was_asked() -> None:
    advice = (
        r"use one of 8, 16, 24, 40, 48, 56, 72, 80, give this weight its own count with --dobb-blocks-for, "
        r"or leave it to AdamW with --dobb-exclude"
    )
    with pytest.raises(BlockError, match=advice):
        block_width("fc2", 5040, blocks=23, column_shards=8)
    with pytest.raises(BlockError, match=r"--dobb-block-width 500 .* 448, 512, 896"):
        block_width("fc2", 14336, width=500)


def test_blocks_that_would_span_tensor_parallel_ranks_are_refused_with_counts_that_work() -> None:
    message = r"proj: --dobb-blocks 2 makes 2 blocks, .* not a multiple of the 4 tensor-parallel ranks .*use one of 4,"
    with pytest.raises(BlockError, match=message):
        block_width("proj", 96, blocks=2, column_shards=4)
    message = r"proj: --dobb-block-width 32 makes 3 blocks.*use one of .*24"
    with pytest.raises(BlockError, match=message):
        block_width("proj", 96, width=32, column_shards=4)
    with pytest.raises(BlockError, match="no block count works, because 5 ranks do not divide 96: use --dobb-exclude"):
        block_width("proj", 96, blocks=2, column_shards=5)


@pytest.mark.parametrize("value", [0, -4])
def test_counts_and_widths_below_one_are_refused(value: int) -> None:
    with pytest.raises(BlockError, match=f"--dobb-blocks {value} does not divide"):
        block_width("w", 96, blocks=value)
    with pytest.raises(BlockError, match=f"--dobb-block-width {value} does not divide"):
        block_width("w", 96, width=value)


def test_a_weight_without_columns_is_refused() -> None:
    with pytest.raises(BlockError, match="does not divide its 0 input features"):
        block_width("w", 0, blocks=16)


def test_exactly_one_of_count_and_width_is_needed() -> None:
    with pytest.raises(BlockError, match="w: --dobb-blocks 4 and --dobb-block-width 24 exclude each other"):
        block_width("w", 96, blocks=4, width=24)
    with pytest.raises(BlockError, match="w: give either --dobb-blocks or --dobb-block-width"):
        block_width("w", 96)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from([(768, 48), (1408, 88), (4096, 256), (684, 228), (1000, 125), (997, 997)]),
        min_size=1,
        max_size=3,
        unique=True,
    ),
    st.sampled_from([500, 3000, 10_000]),
)
def test_suggested_widths_divide_share_a_small_unit_and_are_the_nearest(
    wanted: list[tuple[int, int]], limit: int
) -> None:
    candidates = [[d for d in workable_counts(n) if d >= min(b, 32)] for n, b in wanted]
    possible = [choice for choice in product(*candidates) if math.lcm(64, *choice) <= limit]
    proposed = suggest_widths(wanted, limit)
    if not possible:
        assert proposed == {}
        return

    def distance(choice: tuple[int, ...]) -> float:
        return sum(abs(math.log2(d / b)) for d, (_, b) in zip(choice, wanted, strict=True))

    chosen = tuple(proposed[pair] for pair in wanted)
    assert chosen in possible
    assert distance(chosen) == pytest.approx(min(map(distance, possible)))
