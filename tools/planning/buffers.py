"""The param/grad buffers of one model chunk, laid out by the product's own code, and who holds what of them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_dobb.megatron.dobb.weight_sharding import (
    BlockedWeight,
    check_outputs_seen,
    choose_width,
    fewer_features_than_blocks,
)
from megatron_dobb.megatron.model.adapters import GlobalShape
from megatron_dobb.methods.dobb.settings import DobbConfig
from megatron_dobb.sharding import buffer_layout

from .parameters import Parameter
from .sizes import Parallel


@dataclass(frozen=True)
class Managed(BlockedWeight):
    """A weight on Dobb.

    Attributes:
        parameter: it as a tensor-parallel rank holds it.
        width: of its blocks.
        output_side: whether they divide its rows.
        shards: tensor-parallel ranks that share the features which they divide.
    """

    parameter: Parameter
    width: int
    output_side: bool = False
    shards: int = 1

    @property
    def name(self) -> str:  # type: ignore[override]
        """Its name in the whole model."""
        return self.parameter.name

    @property
    def geometry(self) -> GlobalShape:  # type: ignore[override]
        """Its global shape."""
        assert self.parameter.geometry is not None
        return self.parameter.geometry

    @property
    def shape(self) -> Sequence[int]:
        """Rows and columns on a rank."""
        return self.parameter.shape

    @property
    def is_expert_parallel(self) -> bool:
        """True if it is in the experts' buffer."""
        return self.parameter.apart


@dataclass
class Chosen:
    """Parameters of a chunk on Dobb, and the reasons why others are not.

    Attributes:
        managed: by name.
        adamw: parameters and elements on AdamW, for each reason.
        patterns_used: patterns of the settings that name a weight here.
    """

    managed: dict[str, Managed] = field(default_factory=dict)
    adamw: Counter[tuple[str, str]] = field(default_factory=Counter)
    patterns_used: set[str] = field(default_factory=set)


def choose(parameters: Sequence[Parameter], config: DobbConfig) -> Chosen:
    """Apply the rules of `megatron_dobb.megatron.dobb.select_weights` to the parameters of a chunk.

    Raises:
        BlockError: if a weight cannot be cut into the blocks that the settings ask for.
        UnsupportedError: if its second moments cannot be taken.
    """
    chosen = Chosen()
    for parameter in parameters:
        reason = _why_not(parameter, config)
        if parameter.geometry is not None:
            chosen.patterns_used |= config.patterns_matching(parameter.name)
        if reason is not None:
            chosen.adamw[reason, "parameters"] += 1
            chosen.adamw[reason, "elements"] += parameter.numel
            continue
        geometry = parameter.geometry
        assert geometry is not None
        check_outputs_seen(parameter.name, parameter.layer, geometry, config, of_expert=parameter.expert)
        width, shards = choose_width(parameter.name, geometry, parameter.shape, config)
        chosen.managed[parameter.name] = Managed(parameter, width, config.side == "output", shards)
    return chosen


def _why_not(parameter: Parameter, config: DobbConfig) -> str | None:
    if parameter.geometry is None:
        if len(parameter.shape) < 2:
            return "not a matrix (norms, biases)"
        is_table = parameter.name.startswith(("embedding.", "output_layer."))
        return "embedding or output layer" if is_table else "no layer that Dobb knows (router, gate)"
    if config.excluded(parameter.name):
        return "excluded by --dobb-exclude"
    features = parameter.geometry.rows if config.side == "output" else parameter.geometry.columns
    if fewer_features_than_blocks(features, config.blocks_of(parameter.name)):
        return f"fewer {config.side} features than blocks"
    return None


@dataclass(frozen=True)
class Buffer:
    """One buffer and its layout.

    Attributes:
        apart: whether it is the experts'.
        placed: the layout of its parameters, the last registered first.
        parameters: in the order of placement.
        stock: elements of Megatron's own layout.
        unit: the widest alignment unit of its buckets.
    """

    apart: bool
    placed: buffer_layout.BufferLayout
    parameters: tuple[Parameter, ...]
    stock: int
    unit: int

    @property
    def padding(self) -> int:
        """Elements more than with AdamW."""
        return self.placed.numel - self.stock

    def held(self, index: int, rank: int) -> tuple[int, int]:
        """The flat range of a parameter in a rank's shard."""
        found = self.placed.shard_range(index, rank)
        assert found is not None
        return found


def lay_out(
    parameters: Sequence[Parameter], managed: dict[str, Managed], parallel: Parallel, *, bucketed: bool
) -> list[Buffer]:
    """The buffers of a chunk: the dense one, and that of experts if they are apart.

    Args:
        parameters: of the chunk, in the order of registration.
        managed: those on Dobb.
        parallel: of the layout.
        bucketed: whether Megatron cuts this chunk's buffers into buckets (only the first stage's first chunk).

    Raises:
        LayoutError: if the widths in a bucket cannot be aligned to each other, or only with too much padding.
    """
    bucket_size = None
    if bucketed and parallel.overlap_grad_reduce:
        bucket_size = parallel.bucket_size or buffer_layout.default_bucket_size(parallel.shards)
    buffers = []
    for apart in (False, True):
        shards = parallel.buffer_shards(apart=apart)
        inside = tuple(parameter for parameter in reversed(parameters) if parameter.apart == apart)
        if inside:
            placed = buffer_layout.align(
                [_item(parameter, managed) for parameter in inside],
                bucket_size,
                shards,
                buffer_layout.bucket_divisor(shards, parallel.pad_for_high_nccl_busbw),
            )
            report = placed.padding_report()
            stock, unit = sum(row.stock_length for row in report), max(row.unit for row in report)
            buffer_layout.check_row_blocks(placed, stock)
            buffers.append(Buffer(apart, placed, inside, stock, unit))
    return buffers


def _item(parameter: Parameter, managed: dict[str, Managed]) -> buffer_layout.Item:
    weight = managed.get(parameter.name)
    if weight is None:
        return buffer_layout.Item(parameter.numel, own_bucket=parameter.own_bucket, name=parameter.name)
    return buffer_layout.Item(
        parameter.numel,
        weight.alignment,
        parameter.own_bucket,
        parameter.name,
        columns=parameter.numel if weight.output_side else weight.local_columns,
        column_shards=weight.shards,
        whole_rows=weight.output_side,
    )
