"""The param/grad buffers of one model chunk, laid out by the product's own code, and who holds what of them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_dobb import layout
from megatron_dobb.blocks import block_width
from megatron_dobb.config import DobbConfig
from megatron_dobb.megatron.manage import fewer_features_than_blocks

from .parameters import Parameter
from .sizes import Parallel


@dataclass(frozen=True)
class Managed:
    """A weight on Dobb: the parameter, the width of its blocks, and how many of them a rank has."""

    parameter: Parameter
    width: int

    @property
    def name(self) -> str:
        """Its name in the whole model."""
        return self.parameter.name

    @property
    def local_blocks(self) -> int:
        """Blocks on a tensor-parallel rank."""
        return self.parameter.shape[1] // self.width

    @property
    def ranks(self) -> str:
        """Over which ranks its moment is summed: a key of `RANK_SETS`."""
        if self.parameter.apart:
            return "expert"
        return "over tensor" if self.parameter.over_tensor else "dense"


@dataclass
class Chosen:
    """Which parameters of a chunk are on Dobb and why the others are not.

    Attributes:
        managed: by name.
        adamw: parameters and elements on AdamW, for each reason.
        patterns_used: patterns of the settings that name a weight here.
    """

    managed: dict[str, Managed] = field(default_factory=dict)
    adamw: Counter[tuple[str, str]] = field(default_factory=Counter)
    patterns_used: set[str] = field(default_factory=set)


def choose(parameters: Sequence[Parameter], config: DobbConfig) -> Chosen:
    """Apply the rules of `megatron_dobb.megatron.manage` to the parameters of a chunk.

    Raises:
        BlockError: if a weight cannot be cut into the blocks that the settings ask for.
    """
    chosen = Chosen()
    for parameter in parameters:
        reason = _why_not(parameter, config)
        if parameter.columns:
            chosen.patterns_used |= config.patterns_matching(parameter.name)
        if reason is not None:
            chosen.adamw[reason, "parameters"] += 1
            chosen.adamw[reason, "elements"] += parameter.numel
            continue
        width = block_width(
            parameter.name,
            parameter.columns,
            column_shards=parameter.column_shards,
            **config.blocks_of(parameter.name),
        )
        chosen.managed[parameter.name] = Managed(parameter, width)
    return chosen


def _why_not(parameter: Parameter, config: DobbConfig) -> str | None:
    if not parameter.columns:
        if len(parameter.shape) < 2:
            return "not a matrix (norms, biases)"
        is_table = parameter.name.startswith(("embedding.", "output_layer."))
        return "embedding or output layer" if is_table else "no layer that Dobb knows (router, gate)"
    if config.excluded(parameter.name):
        return "excluded by --dobb-exclude"
    if fewer_features_than_blocks(parameter.columns, config.blocks_of(parameter.name)):
        return "fewer input features than blocks"
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
    placed: layout.BufferLayout
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
        LayoutError: if the widths in a bucket cannot be aligned to each other.
    """
    bucket_size = None
    if bucketed and parallel.overlap_grad_reduce:
        bucket_size = parallel.bucket_size or layout.default_bucket_size(parallel.shards)
    buffers = []
    for apart, shards in ((False, parallel.shards), (True, parallel.expert_shards)):
        inside = tuple(parameter for parameter in reversed(parameters) if parameter.apart == apart)
        if inside:
            placed = layout.align(
                [_item(parameter, managed) for parameter in inside],
                bucket_size,
                shards,
                layout.bucket_divisor(shards, parallel.pad_for_high_nccl_busbw),
            )
            report = placed.padding_report()
            stock, unit = sum(row.stock_length for row in report), max(row.unit for row in report)
            buffers.append(Buffer(apart, placed, inside, stock, unit))
    return buffers


def _item(parameter: Parameter, managed: dict[str, Managed]) -> layout.Item:
    weight = managed.get(parameter.name)
    return layout.Item(
        parameter.numel,
        weight.width if weight else 0,
        parameter.own_bucket,
        parameter.name,
        columns=parameter.shape[1] if weight else 0,
        column_shards=parameter.column_shards if weight else 1,
    )
