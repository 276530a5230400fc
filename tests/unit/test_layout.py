"""Aligned buffer layouts: Megatron's own where nothing is managed, whole blocks in every shard where something is."""

import ast
import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from model_shapes import MODELS, WIDE_UNITS

import megatron_dobb
from megatron_dobb.errors import LayoutError
from megatron_dobb.sharding.block_width_advice import SMALL_UNIT, suggest_widths
from megatron_dobb.sharding.buffer_layout import (
    MAX_ALIGNMENT_UNIT,
    BufferLayout,
    Item,
    align,
    alignment_unit,
    bucket_divisor,
    default_bucket_size,
)
from megatron_dobb.sharding.shard import Shard

# Their lcm with 64 is 403,200: any mix is possible, and few divide each other.
WIDTHS = (1, 2, 3, 7, 9, 12, 16, 25, 48, 50, 64, 84, 96, 100, 112, 144, 448, 1152)
DATA_PARALLEL = (1, 2, 3, 8, 64, 512, 1024)

bucket_sizes = st.none() | st.integers(1, 60_000)
shard_counts = st.integers(1, 64)


managed_items = st.builds(
    lambda width, blocks, rows: Item(rows * blocks * width, width, columns=blocks * width),
    st.sampled_from(WIDTHS),
    st.integers(1, 6),
    st.integers(1, 40),
)
plain_items = st.builds(Item, numel=st.integers(0, 5000), own_bucket=st.sampled_from([False] * 9 + [True]))
mixes = st.lists(managed_items | plain_items, min_size=1, max_size=16)


def relative_starts(layout: BufferLayout) -> list[int]:
    """Start of every item, counted from its bucket's."""
    return [start - layout.buckets[bucket][0] for start, bucket in zip(layout.starts, layout.bucket_ids, strict=True)]


def members_of(layout: BufferLayout) -> list[list[int]]:
    """Item indices in every bucket."""
    members: list[list[int]] = [[] for _ in layout.buckets]
    for index, bucket in enumerate(layout.bucket_ids):
        members[bucket].append(index)
    return members


class FakeParameter:
    """What Megatron's layout functions read of a parameter."""

    def __init__(self, item: Item) -> None:
        self.data = SimpleNamespace(nelement=lambda: item.numel)
        self.shared_embedding = item.own_bucket


@pytest.fixture(scope="module")
def megatron() -> SimpleNamespace:
    pytest.importorskip("megatron.core")
    from megatron.core.optimizer import param_layout
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    def layout(items: list[Item], bucket_size: int | None, shards: int, high_busbw: bool):
        """Megatron's layout of parameters that it will place in the order of `items`."""
        parameters = [FakeParameter(item) for item in items[::-1]]
        config = SimpleNamespace(pad_buckets_for_high_nccl_busbw=high_busbw)
        return DistributedOptimizer._compute_per_buffer_param_layout(parameters, bucket_size, shards, config)

    return SimpleNamespace(
        layout=layout,
        bucket_end_divisor=param_layout.bucket_end_divisor,
        shard_of_bucket=DistributedOptimizer._build_model_gbuf_range,
    )


# -- Megatron's own layout ---------------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None)
@given(st.lists(plain_items, max_size=25), bucket_sizes, st.integers(1, 300), st.booleans())
def test_without_managed_weights_the_layout_is_megatrons(
    megatron: SimpleNamespace, items: list[Item], bucket_size: int | None, shards: int, high_busbw: bool
) -> None:
    stock = megatron.layout(items, bucket_size, shards, high_busbw)
    ours = align(items, bucket_size, shards, bucket_divisor(shards, high_busbw))
    assert list(stock.param_index_map.values()) == list(zip(ours.starts, ours.ends, ours.bucket_ids, strict=True))
    assert stock.bucket_indices == list(ours.buckets)
    assert stock.per_bucket_numel_unpadded == list(ours.unpadded)
    assert stock.num_optimizer_shards == ours.shards


@settings(max_examples=80, deadline=None)
@given(mixes, bucket_sizes, shard_counts, st.booleans())
def test_buckets_hold_the_same_parameters_as_megatrons_and_the_report_gives_both_lengths(
    megatron: SimpleNamespace, items: list[Item], bucket_size: int | None, shards: int, high_busbw: bool
) -> None:
    stock = megatron.layout(items, bucket_size, shards, high_busbw)
    ours = align(items, bucket_size, shards, bucket_divisor(shards, high_busbw))
    assert [bucket for _, _, bucket in stock.param_index_map.values()] == list(ours.bucket_ids)
    report = ours.padding_report()
    assert [row.stock_length for row in report] == [end - start for start, end in stock.bucket_indices]
    assert [row.length for row in report] == list(ours.lengths)
    assert [row.length - row.needed for row in report] == list(ours.padding)
    assert all(row.extra >= 0 for row in report)
    assert sum(row.stock_length + row.extra for row in report) == ours.numel


def test_alignment_does_not_close_a_bucket_that_megatron_keeps_open() -> None:
    # Megatron counts 128 + 96 elements after the second item, our start at 192 makes 288.
    layout = align([Item(100), Item(96, 48), Item(10)], 250, 1, bucket_divisor(1))
    assert layout.starts == (0, 192, 320)
    assert layout.bucket_ids == (0, 0, 0)


@settings(max_examples=60, deadline=None)
@given(mixes, bucket_sizes, st.integers(1, 12))
def test_shard_ranges_are_those_that_megatron_computes(
    megatron: SimpleNamespace, items: list[Item], bucket_size: int | None, shards: int
) -> None:
    layout = align(items, bucket_size, shards, bucket_divisor(shards))
    places = dict(enumerate(zip(layout.starts, layout.ends, layout.bucket_ids, strict=True)))
    buckets = [
        SimpleNamespace(grad_data=SimpleNamespace(numel=lambda n=end - start: n), offset=start)
        for start, end in layout.buckets
    ]
    for rank in range(shards):
        group = SimpleNamespace(rank=lambda r=rank: r, size=lambda: shards)
        buffer = SimpleNamespace(
            data_parallel_group=group, num_optimizer_shards=shards, buckets=buckets, param_index_map=places
        )
        theirs = {}
        for bucket in range(len(buckets)):
            shard = megatron.shard_of_bucket(buffer, bucket)["param_map"]
            theirs |= {index: (ranges["param"].start, ranges["param"].end) for index, ranges in shard.items()}
        ours = {index: layout.shard_range(index, rank) for index in places}
        assert {index: held for index, held in ours.items() if held} == theirs


@given(st.integers(1, 2048), st.booleans())
def test_the_bucket_divisor_is_megatrons(megatron: SimpleNamespace, shards: int, high_busbw: bool) -> None:
    assert bucket_divisor(shards, high_busbw) == megatron.bucket_end_divisor(shards, high_busbw)


# -- Whole blocks ------------------------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None)
@given(mixes, bucket_sizes, shard_counts, st.booleans())
def test_every_shard_holds_whole_rows_of_blocks(
    items: list[Item], bucket_size: int | None, shards: int, high_busbw: bool
) -> None:
    layout = align(items, bucket_size, shards, bucket_divisor(shards, high_busbw))
    layout.verify()
    assert layout.aligned
    for index, item in enumerate(items):
        ranges = [(rank, held) for rank in range(shards) if (held := layout.shard_range(index, rank))]
        assert [rank for rank, _ in ranges] == list(layout.holders(index))
        bounds = [held for _, held in ranges]
        assert sum(end - start for start, end in bounds) == item.numel
        assert all(before[1] == after[0] for before, after in pairwise(bounds))
        assert layout.cuts(index) == tuple(start for start, _ in bounds[1:])
        if item.width:
            for rank, (start, end) in ranges:  # a bound inside a block makes Shard raise
                shard = Shard(start, end, item.columns, item.width)
                assert layout.held_blocks(index, rank) == shard.held_blocks()
            held = {block for rank in range(shards) for block in layout.held_blocks(index, rank)}
            assert held == set(range(item.columns // item.width))


@settings(max_examples=120, deadline=None)
@given(mixes, bucket_sizes, shard_counts, st.booleans())
def test_the_layout_keeps_megatrons_contract(
    items: list[Item], bucket_size: int | None, shards: int, high_busbw: bool
) -> None:
    divisor = bucket_divisor(shards, high_busbw)
    layout = align(items, bucket_size, shards, divisor)
    assert [end - start for start, end in zip(layout.starts, layout.ends, strict=True)] == [
        item.numel for item in items
    ]
    assert all(start % 64 == 0 for start in layout.starts)
    assert all(a <= b for a, b in pairwise(layout.bucket_ids))
    assert set(layout.bucket_ids) == set(range(len(layout.buckets)))
    assert all(end <= start for end, start in zip(layout.ends, layout.starts[1:], strict=False))
    assert [start for start, _ in layout.buckets] == [0, *[end for _, end in layout.buckets[:-1]]]
    for bucket, members in enumerate(members_of(layout)):
        start, end = layout.buckets[bucket]
        assert start % divisor == 0
        assert end % divisor == 0
        assert start == layout.starts[members[0]]
        assert layout.ends[members[-1]] <= start + layout.unpadded[bucket] <= end
        assert all((end - start) // shards % (items[i].width or 1) == 0 for i in members)
        if any(items[i].own_bucket for i in members):
            assert len(members) == 1


@settings(max_examples=120, deadline=None)
@given(mixes, bucket_sizes, shard_counts, shard_counts)
def test_starts_do_not_depend_on_data_parallel_size(
    items: list[Item], bucket_size: int | None, shards: int, other: int
) -> None:
    one = align(items, bucket_size, shards, bucket_divisor(shards))
    two = align(items, bucket_size, other, bucket_divisor(other))
    assert one.bucket_ids == two.bucket_ids
    assert one.unpadded == two.unpadded
    assert relative_starts(one) == relative_starts(two)


@settings(max_examples=80, deadline=None)
@given(mixes, bucket_sizes, bucket_sizes, shard_counts)
def test_starts_depend_on_bucket_size_only_through_bucket_membership(
    items: list[Item], bucket_size: int | None, other: int | None, shards: int
) -> None:
    one = align(items, bucket_size, shards, bucket_divisor(shards))
    two = align(items, other, shards, bucket_divisor(shards))
    places = list(zip(members_of(two), strict=True))
    for members in members_of(one):
        if (members,) in places:
            assert [relative_starts(one)[i] for i in members] == [relative_starts(two)[i] for i in members]


def test_megatrons_own_layout_cuts_blocks_and_verify_names_the_weight() -> None:
    items = [Item(100), Item(48 * 3 * 11, 48, name="layers.0.fc2.weight", columns=144)]
    stock = align([Item(item.numel) for item in items], None, 8, bucket_divisor(8))
    cut = BufferLayout(**{**vars(stock), "items": tuple(items)})
    assert not cut.aligned
    with pytest.raises(LayoutError, match=r"layers\.0\.fc2\.weight: .* inside a block of width 48"):
        cut.verify()
    assert align(items, None, 8, bucket_divisor(8)).aligned


# -- Padding -----------------------------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None)
@given(mixes, bucket_sizes, shard_counts, st.booleans())
def test_padding_is_less_than_one_step_per_start_and_one_at_the_end(
    items: list[Item], bucket_size: int | None, shards: int, high_busbw: bool
) -> None:
    divisor = bucket_divisor(shards, high_busbw)
    layout = align(items, bucket_size, shards, divisor)
    for bucket, members in enumerate(members_of(layout)):
        widths = [items[i].width for i in members if items[i].width]
        end_step = math.lcm(divisor, shards * math.lcm(*widths))
        # The first item needs no padding; 63 more where Megatron rounds up before a shared embedding.
        starts = sum(math.lcm(64, items[i].width or 1) - 1 for i in members[1:])
        between = layout.unpadded[bucket] - sum(items[i].numel for i in members)
        assert 0 <= between <= starts + 63
        assert 0 <= layout.lengths[bucket] - layout.unpadded[bucket] < end_step
        assert layout.padding[bucket] == between + layout.lengths[bucket] - layout.unpadded[bucket]


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.sampled_from([*WIDTHS, 128, 256, 896, 1792, 3584]), min_size=1, max_size=3),
    st.integers(1, 2048),
    st.integers(0, 3_000_000),
)
def test_rounding_up_a_full_default_bucket_costs_less_than_one_percent(
    widths: list[int], shards: int, beyond: int
) -> None:
    # Shards are whole multiples of `step`: the widths' lcm, doubled where an odd number of them meets Megatron's 128.
    size, divisor = default_bucket_size(shards), bucket_divisor(shards)
    step = math.lcm(divisor, shards * math.lcm(*widths)) // shards
    rest = -(-(size + beyond) // widths[0]) * widths[0]
    items = [*[Item(width, width) for width in widths[1:]], Item(rest, widths[0])]
    assume(alignment_unit(items) <= MAX_ALIGNMENT_UNIT)
    layout = align(items, size, shards, divisor)
    assert len(layout.buckets) == 1
    assert (layout.lengths[0] // shards) % step == 0
    if step <= SMALL_UNIT:
        assert layout.lengths[0] - layout.unpadded[0] < 0.01 * size
    if shards % 2 == 0:  # then the step is the alignment unit of the start-up table, or less
        assert alignment_unit(items) % step == 0


@pytest.mark.parametrize("shards", DATA_PARALLEL)
@pytest.mark.parametrize("model", MODELS)
def test_real_models_keep_whole_blocks_and_pad_less_than_one_percent(model: str, shards: int) -> None:
    items = MODELS[model]()
    for bucket_size in (default_bucket_size(shards), None):
        layout = align(items, bucket_size, shards, bucket_divisor(shards))
        layout.verify()
        report = layout.padding_report()
        assert max(row.unit for row in report) <= SMALL_UNIT
        for row in report:
            assert row.length - row.needed < 0.01 * max(row.needed, default_bucket_size(shards))


@pytest.mark.parametrize("shards", DATA_PARALLEL)
@pytest.mark.parametrize("model", WIDE_UNITS)
def test_wide_units_of_fine_grained_mixtures_are_aligned_and_reported(model: str, shards: int) -> None:
    build, unit = WIDE_UNITS[model]
    layout = align(build(), None, shards, bucket_divisor(shards))
    layout.verify()
    (row,) = layout.padding_report()
    assert row.unit == unit <= MAX_ALIGNMENT_UNIT
    assert row.extra < shards * unit * 2


@pytest.mark.parametrize(
    ("model", "shards", "padded_percent"),
    [
        ("Llama-3 8B", 2, 0.00),
        ("Llama-3 8B", 8, 0.00),
        ("Llama-3 8B", 64, 0.01),
        ("Llama-3 8B", 1024, 0.12),
        ("Llama-3 8B, TP 8", 64, 0.12),
        ("Llama-3 70B, TP 8, PP 8", 64, 0.14),
        ("Llama-3 70B, TP 8, PP 8", 1024, 0.25),
        ("GPT-2 XL", 16, 0.00),
    ],
)
def test_padding_agrees_with_an_independent_simulation(model: str, shards: int, padded_percent: float) -> None:
    # The simulation ordered parameters and biases a little differently, hence the margin.
    items = MODELS[model]()
    layout = align(items, default_bucket_size(shards), shards, bucket_divisor(shards))
    percent = 100 * sum(layout.padding) / sum(item.numel for item in items)
    assert percent == pytest.approx(padded_percent, abs=0.045)


# -- Errors ------------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 1500), st.integers(1, 4)), min_size=1, max_size=6),
    st.none() | st.integers(1, 20_000),
    shard_counts,
)
def test_a_mix_is_refused_exactly_when_a_buckets_unit_is_above_the_cap(
    shapes: list[tuple[int, int]], bucket_size: int | None, shards: int
) -> None:
    items = [Item(w * n, w, name=f"weight{i}", columns=w * n) for i, (w, n) in enumerate(shapes)]
    stock = align([Item(item.numel) for item in items], bucket_size, shards, bucket_divisor(shards))
    units = [alignment_unit([items[i] for i in members]) for members in members_of(stock)]
    if max(units) <= MAX_ALIGNMENT_UNIT:
        align(items, bucket_size, shards, bucket_divisor(shards)).verify()
        return
    with pytest.raises(LayoutError, match=r"--dobb-blocks-for.*--dobb-block-width.*--dobb-exclude"):
        align(items, bucket_size, shards, bucket_divisor(shards))


def test_the_cap_is_half_a_shard_of_a_full_default_bucket() -> None:
    assert default_bucket_size(1024) // 1024 == pytest.approx(2 * MAX_ALIGNMENT_UNIT, rel=0.05)
    align([Item(MAX_ALIGNMENT_UNIT, MAX_ALIGNMENT_UNIT)], None, 2, bucket_divisor(2)).verify()
    with pytest.raises(LayoutError, match=f"align only every {MAX_ALIGNMENT_UNIT + 64} elements"):
        align([Item(MAX_ALIGNMENT_UNIT + 64, MAX_ALIGNMENT_UNIT + 64)], None, 2, bucket_divisor(2))


def test_an_impossible_mix_names_weights_widths_and_block_counts_that_work() -> None:
    shapes = {"first": (4096, 256), "second": (13000, 1625), "third": (10944, 684), "fourth": (1408, 88)}
    items = [Item(8 * n, b, name=name, columns=n) for name, (n, b) in shapes.items() for _ in range(2)]
    with pytest.raises(LayoutError) as caught:
        align(items, None, 4, bucket_divisor(4))
    message = str(caught.value)
    assert str(alignment_unit(items)) in message
    for name, (_, width) in shapes.items():
        assert f"width {width} of {name} and 1 more" in message
    proposed = suggest_widths(shapes.values())
    for name, (columns, width) in shapes.items():
        better = proposed[columns, width]
        advised = f"{columns // better} blocks (width {better}) for {name}" in message
        assert advised == (better != width)
    better_items = [Item(item.numel, proposed[item.columns, item.width], columns=item.columns) for item in items]
    assert alignment_unit(better_items) <= SMALL_UNIT
    align(better_items, None, 4, bucket_divisor(4)).verify()


def test_advice_counts_the_blocks_of_the_whole_weight_and_settles_for_a_unit_below_the_cap() -> None:
    items = [
        Item(997 * 4, 997, name="stubborn", columns=1994),  # 2 x a prime: no narrower block is worth having
        Item(4096 * 8, 512, name="easy", columns=4096),
        Item(13000 * 8, 1625, name="row_parallel", columns=13000, column_shards=4),
    ]
    shapes = [(item.columns, item.width) for item in items]
    assert not suggest_widths(shapes)
    width = suggest_widths(shapes, MAX_ALIGNMENT_UNIT)[13000, 1625]
    with pytest.raises(LayoutError, match=rf"{4 * 13000 // width} blocks \(width {width}\) for row_parallel"):
        align(items, None, 1, bucket_divisor(1))


def test_a_mix_that_no_block_count_can_align_is_refused_without_false_advice() -> None:
    items = [Item(2 * prime, prime, name=f"w{prime}", columns=prime) for prime in (997, 991)]
    with pytest.raises(LayoutError, match=r"use --dobb-blocks-for; or one --dobb-block-width .* --dobb-exclude"):
        align(items, None, 1, bucket_divisor(1))


def test_blocks_that_do_not_fill_a_weight_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"fc1: blocks of width 48 do not fill its 100 elements"):
        Item(100, 48, name="fc1")
    with pytest.raises(LayoutError, match=r"fc1: block width 48 does not divide the 100 input features"):
        Item(4800, 48, name="fc1", columns=100)


@pytest.mark.parametrize(("shards", "divisor"), [(0, 128), (3, 128), (2, 32)])
def test_a_divisor_that_breaks_megatrons_contract_is_refused(shards: int, divisor: int) -> None:
    with pytest.raises(LayoutError, match=f"bucket divisor {divisor} must be a multiple of 64"):
        align([Item(64)], None, shards, divisor)


@pytest.mark.parametrize("module", ["methods/dobb/blocks", "sharding/buffer_layout", "sharding/ownership"])
def test_planning_needs_neither_torch_nor_megatron(module: str) -> None:
    source = (Path(megatron_dobb.__file__).parent / f"{module}.py").read_text()
    imported = {
        alias.name.partition(".")[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0)
        for alias in (node.names if isinstance(node, ast.Import) else [ast.alias(node.module or "")])
    }
    assert imported
    assert imported <= {"bisect", "collections", "dataclasses", "functools", "itertools", "math", "typing"}
