"""Lay parameters out in a param/grad buffer so that no shard boundary cuts a block.

Megatron's distributed optimizer cuts every bucket of a buffer into equal flat shards, one per rank. A rank can project
its part of a weight on its own exactly when every cut inside the weight lies a multiple of the block width from the
weight's start. Three rules ensure that and keep Megatron's own contract:

* Parameters go to the same buckets as in Megatron's own layout (decided on its positions, before ours), so
  the number and order of collectives never change.
* Inside a bucket, counted from its start, a managed weight starts at a multiple of lcm(64, its width) and
  anything else at a multiple of 64. No start depends on the number of shards.
* A bucket's length is a multiple of Megatron's divisor, and of `shards` times the lcm of the widths inside.

Megatron counts its 64 from the buffer's start. That is the same thing: every bucket starts at a multiple of
the divisor, which is a multiple of 128. Without managed weights the result is Megatron's own to the element.

Nothing here imports torch or Megatron: a plan for thousands of ranks needs neither.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..errors import LayoutError
from .block_width_advice import suggest_widths
from .shard import Shard

START_MULTIPLE = 64
"""Alignment, in elements, of every parameter's start in Megatron (`pad_param_start`)."""

MAX_ALIGNMENT_UNIT = 2**19
"""Largest lcm of 64 and the block widths of one bucket: about half of one shard of a full default bucket on
many ranks (1M elements). Every shard is rounded up to a multiple of its widths."""


MAX_ROW_BLOCK_PADDING = 0.05
"""Largest fraction that whole row blocks, for output-side bases, may add to a buffer."""

MORE_BLOCKS = (
    "use more and so smaller blocks ({blocks}) if there are bases, fewer data-parallel ranks (of one optimizer "
    "instance), or {side:input}, whose blocks need hardly any padding"
)


def check_row_blocks(aligned: "BufferLayout", stock_numel: int) -> None:
    """Reject a layout in which whole row blocks cause too much padding.

    Args:
        aligned: the layout.
        stock_numel: number of elements in Megatron's own layout.

    Raises:
        LayoutError: if some blocks are whole rows and the padding exceeds `MAX_ROW_BLOCK_PADDING`.
    """
    items = [item for item in aligned.items if item.whole_rows]
    extra = aligned.numel - stock_numel
    if items and extra > MAX_ROW_BLOCK_PADDING * stock_numel:
        widest = max(items, key=lambda item: item.width)
        raise LayoutError(
            f"keeps whole row blocks together, the largest of {widest.width} elements in {widest.label}; over "
            f"{aligned.shards} shards that pads a param/grad buffer of {stock_numel} elements by "
            f"{100 * extra / stock_numel:.1f} %, and at most {100 * MAX_ROW_BLOCK_PADDING:.0f} % is allowed",
            MORE_BLOCKS,
            settings={"side": "output"},
        )


def bucket_divisor(shards: int, pad_for_high_nccl_busbw: bool = False) -> int:
    """Compute the divisor of Megatron's bucket ends (`bucket_end_divisor`): lcm(shards, 128[, 2^16])."""
    return math.lcm(shards, 128, 2**16 if pad_for_high_nccl_busbw else 1)


def default_bucket_size(shards: int) -> int:
    """Return the elements per Megatron bucket with `--overlap-grad-reduce` and no `--ddp-bucket-size`."""
    return max(40_000_000, 1_000_000 * shards)


def round_up(value: int, multiple: int) -> int:
    """Round `value` up to a multiple of `multiple`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Item:
    """Parameter of a buffer, as needed to place it.

    Args:
        numel: elements of this parameter on this rank.
        width: columns in one block; 0 when Dobb does not manage it.
        own_bucket: Megatron's `shared_embedding`: nothing else may share its bucket.
        name: for messages.
        columns: input features of the weight on this rank (0 if unknown), for advice and for `held_blocks`.
        column_shards: tensor-parallel ranks that share the input features, for advice.
        whole_rows: whether `width` counts the elements of the whole rows in an output-side block, rather than a block's
            columns. The weight then counts as one row, and `columns` is its number of elements.

    Raises:
        LayoutError: if the blocks do not fill the parameter.
    """

    numel: int
    width: int = 0
    own_bucket: bool = False
    name: str = ""
    columns: int = 0
    column_shards: int = 1
    whole_rows: bool = False

    def __post_init__(self) -> None:
        if self.numel < 0 or self.width < 0 or (self.width and self.numel % self.width):
            raise LayoutError(
                f"{self.label}: blocks of width {self.width} do not fill its {self.numel} elements; the "
                f"width must divide the weight's input features on this rank"
            )
        if self.width and self.columns % self.width:
            raise LayoutError(
                f"{self.label}: block width {self.width} does not divide the {self.columns} input features on this rank"
            )

    @property
    def label(self) -> str:
        """The name to print."""
        return self.name or "an unnamed weight"

    @property
    def start_multiple(self) -> int:
        """Divisor of this item's start, counted from its bucket's start."""
        return math.lcm(START_MULTIPLE, self.width or 1)


@dataclass(frozen=True)
class Padding:
    """Elements of one bucket: in its parameters, in Megatron's own layout and in ours; and its alignment unit."""

    bucket: int
    needed: int
    stock_length: int
    length: int
    unit: int

    @property
    def extra(self) -> int:
        """Elements that this layout adds to Megatron's own."""
        return self.length - self.stock_length


@dataclass(frozen=True)
class BufferLayout:
    """Positions of `items` in a buffer that is cut into `shards` shards per bucket.

    `starts`, `ends` and `bucket_ids` follow the order of `items` (placement order: Megatron's reversed one);
    positions count elements from the buffer's start. `buckets` holds (start, end) of each bucket, `unpadded`
    its length without the padding at its end (Megatron's `per_bucket_numel_unpadded`), and `divisor` is Megatron's own
    divisor of bucket ends.
    """

    items: tuple[Item, ...]
    shards: int
    divisor: int
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    bucket_ids: tuple[int, ...]
    buckets: tuple[tuple[int, int], ...]
    unpadded: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements in the whole buffer."""
        return self.buckets[-1][1] if self.buckets else 0

    @property
    def lengths(self) -> tuple[int, ...]:
        """Elements in each bucket."""
        return tuple(end - start for start, end in self.buckets)

    @property
    def padding(self) -> tuple[int, ...]:
        """Elements of each bucket that belong to no parameter."""
        left = list(self.lengths)
        for item, bucket in zip(self.items, self.bucket_ids, strict=True):
            left[bucket] -= item.numel
        return tuple(left)

    def holders(self, index: int) -> range:
        """Ranks whose shard holds at least one element of item `index`."""
        start, end, shard = self._span(index)
        return range(start // shard, -(-end // shard)) if start < end else range(0)

    def shard_range(self, index: int, rank: int) -> tuple[int, int] | None:
        """Return the flat range `[start, end)` of item `index` in shard `rank`, counted from the item's start."""
        start, end, shard = self._span(index)
        low, high = max(start, rank * shard), min(end, (rank + 1) * shard)
        return (low - start, high - start) if low < high else None

    def held_blocks(self, index: int, rank: int) -> tuple[int, ...]:
        """List, in ascending order, the blocks of managed item `index` with at least one row in shard `rank`."""
        item, held = self.items[index], self.shard_range(index, rank)
        return Shard(*held, item.columns, item.width).held_blocks() if held and item.width else ()

    def cuts(self, index: int) -> tuple[int, ...]:
        """Return the offsets at which shard boundaries cut item `index`, counted from the item's start."""
        start, _, shard = self._span(index)
        return tuple(rank * shard - start for rank in self.holders(index)[1:])

    def misaligned_cuts(self) -> Iterator[tuple[int, int]]:
        """Yield every (item index, cut) at which a shard boundary lies inside a block of a managed item."""
        for index, item in enumerate(self.items):
            if item.width:
                yield from ((index, cut) for cut in self.cuts(index) if cut % item.width)

    @property
    def aligned(self) -> bool:
        """Return whether every shard holds whole rows of blocks."""
        return next(self.misaligned_cuts(), None) is None

    def verify(self) -> None:
        """Check that every shard holds whole rows of blocks.

        Raises:
            LayoutError: if a weight is cut inside a block; names the first one.
        """
        for index, cut in self.misaligned_cuts():
            item = self.items[index]
            raise LayoutError(
                f"{item.label}: a boundary of one of the {self.shards} shards lies {cut} elements from its "
                f"start, inside a block of width {item.width}. This param/grad buffer was not laid out by "
                f"megatron_dobb: import megatron_dobb.patch before Megatron builds the model"
            )

    def padding_report(self) -> tuple[Padding, ...]:
        """Compare the elements of each bucket in Megatron's own layout and in this one."""
        members: list[list[Item]] = [[] for _ in self.buckets]
        for item, bucket in zip(self.items, self.bucket_ids, strict=True):
            members[bucket].append(item)
        report = []
        for bucket, inside in enumerate(members):
            plain = [replace(item, width=0, own_bucket=False) for item in inside]
            stock_length = align(plain, None, self.shards, self.divisor).numel
            needed = sum(item.numel for item in inside)
            report.append(Padding(bucket, needed, stock_length, self.lengths[bucket], alignment_unit(inside)))
        return tuple(report)

    def _span(self, index: int) -> tuple[int, int, int]:
        """Return the start and end of item `index`, counted from its bucket's start, and the bucket's shard size."""
        start, end = self.buckets[self.bucket_ids[index]]
        return self.starts[index] - start, self.ends[index] - start, (end - start) // self.shards


def align(items: Sequence[Item], bucket_size: int | None, shards: int, divisor: int) -> BufferLayout:
    """Place `items` so that every shard holds whole rows of blocks.

    Args:
        items: in placement order (Megatron places a buffer's parameters in reverse).
        bucket_size: elements after which Megatron closes a bucket; None for a single bucket.
        shards: ranks that share each bucket (data-parallel size within one optimizer instance).
        divisor: Megatron's divisor of bucket ends; see `bucket_divisor`.

    Raises:
        LayoutError: if the widths in one bucket have an alignment unit above `MAX_ALIGNMENT_UNIT`.
    """
    if shards < 1 or divisor % shards or divisor % START_MULTIPLE:
        raise LayoutError(f"bucket divisor {divisor} must be a multiple of {START_MULTIPLE} and of the {shards} shards")
    starts: list[int] = []
    ends: list[int] = []
    bucket_ids: list[int] = []
    buckets: list[tuple[int, int]] = []
    unpadded: list[int] = []
    bucket_start = 0
    for members, before_own_bucket in _memberships(items, bucket_size):
        inside = items[members.start : members.stop]
        _check_unit(inside)
        position = 0
        for item in inside:
            position = round_up(position, item.start_multiple)
            starts.append(bucket_start + position)
            position += item.numel
            ends.append(bucket_start + position)
            bucket_ids.append(len(buckets))
        if before_own_bucket:  # Megatron rounds here for the item that it then moves to the next bucket
            position = round_up(position, START_MULTIPLE)
        widths = math.lcm(*(item.width for item in inside if item.width))
        bucket_end = bucket_start + round_up(position, math.lcm(divisor, shards * widths))
        unpadded.append(position)
        buckets.append((bucket_start, bucket_end))
        bucket_start = bucket_end
    return BufferLayout(
        items=tuple(items),
        shards=shards,
        divisor=divisor,
        starts=tuple(starts),
        ends=tuple(ends),
        bucket_ids=tuple(bucket_ids),
        buckets=tuple(buckets),
        unpadded=tuple(unpadded),
    )


def alignment_unit(items: Sequence[Item]) -> int:
    """Compute the lcm of 64 and all block widths among `items`."""
    return math.lcm(START_MULTIPLE, *(item.width for item in items if item.width))


def _memberships(items: Sequence[Item], bucket_size: int | None) -> Iterator[tuple[range, bool]]:
    """Yield each bucket's item indices in Megatron's own layout, and whether an own-bucket item forced its end."""
    first = position = 0
    for index, item in enumerate(items):
        position = round_up(position, START_MULTIPLE)
        if item.own_bucket and index > first:
            yield range(first, index), True
            first, position = index, 0
        position += item.numel
        if item.own_bucket or (bucket_size is not None and position >= bucket_size):
            yield range(first, index + 1), False
            first, position = index + 1, 0
    if first < len(items):
        yield range(first, len(items)), False


def _check_unit(items: Sequence[Item]) -> None:
    unit = alignment_unit(items)
    if unit <= MAX_ALIGNMENT_UNIT:
        return
    groups: dict[tuple[int, int], list[Item]] = {}
    for item in sorted(items, key=lambda item: -item.width):
        if item.width:
            groups.setdefault((item.columns, item.width), []).append(item)
    seen = "; ".join(
        f"width {width} of {members[0].label}" + (f" and {len(members) - 1} more" if members[1:] else "")
        for (_, width), members in groups.items()
    )
    if any(item.whole_rows for item in items):
        raise LayoutError(
            f"the row blocks in one bucket align only every {unit} elements (lcm of them and {START_MULTIPLE}; at most "
            f"{MAX_ALIGNMENT_UNIT}), and every shard would be padded to that: {seen}",
            MORE_BLOCKS,
        )
    proposal: dict[tuple[int, int], int] = {}
    if all(columns for columns, _ in groups):
        proposal = suggest_widths(groups) or suggest_widths(groups, MAX_ALIGNMENT_UNIT)
    advice = "; ".join(
        f"{members[0].columns * members[0].column_shards // proposal[pair]} blocks (width {proposal[pair]}) "
        f"for {members[0].label}"
        for pair, members in groups.items()
        if pair in proposal and proposal[pair] != pair[1]
    )
    raise LayoutError(
        f"the block widths in one bucket align only every {unit} elements (lcm of them and {START_MULTIPLE}; "
        f"at most {MAX_ALIGNMENT_UNIT}), and every shard would be padded to that: {seen}",
        f"use {{blocks_for}}{f', for example {advice}' if advice else ''}; or one {{block_width}} that divides all "
        "input features; or leave weights to AdamW with {exclude}",
    )
