"""Blocks, alignment and communication sets of a weight, from its shape and its place in the tensor-parallel layout.

A run asks this of its parameters, and `tools/plan.py` of parameters that nobody has made: nothing here looks at more of
a weight than `BlockedWeight` names, and nothing imports Megatron.
"""

from collections.abc import Sequence
from typing import Literal

from ...errors import UnsupportedError
from ...methods.dobb.blocks import block_width
from ...methods.dobb.settings import Asked, DobbConfig
from ...sharding.shard import Shard
from ..model.adapters import GlobalShape

MomentSet = Literal["tokens", "tokens over tensor", "expert tokens"]
"""The ranks over which moments are summed: those with other sequences (data and context parallelism); those of all
tensor-parallel ranks together; the data-parallel ranks of an expert."""

ColumnSet = Literal["alone", "tensor", "shards", "shards over tensor", "expert shards"]
"""The ranks that share the columns of coefficients: this one alone; its tensor-parallel ranks; those that share its
param/grad buffer, in one optimizer instance; those of all tensor-parallel ranks together; those of an expert's."""


class BlockedWeight:
    """A weight on Dobb, as far as its shape says.

    Attributes:
        name: its name in the whole model, with global numbers of layers and experts.
        geometry: its global shape.
        width: width of its blocks.
        output_side: whether the blocks divide its rows.
    """

    name: str
    geometry: GlobalShape
    width: int
    output_side: bool

    @property
    def shape(self) -> Sequence[int]:
        """Rows and columns of this rank's part."""
        raise NotImplementedError

    @property
    def is_expert_parallel(self) -> bool:
        """Whether Megatron reduces its gradient over the experts' data-parallel group."""
        raise NotImplementedError

    @property
    def local_columns(self) -> int:
        """Columns that this rank holds."""
        return self.shape[1]

    @property
    def features(self) -> int:
        """Features that the blocks divide: the whole weight's columns, or its rows."""
        return self.geometry.rows if self.output_side else self.geometry.columns

    @property
    def local_blocks(self) -> int:
        """Blocks of which this rank holds a part, tensor parallelism considered and ZeRO not."""
        return self.shape[0 if self.output_side else 1] // self.width

    @property
    def blocks_over_tp(self) -> bool:
        """Whether tensor-parallel ranks hold different blocks, rather than parts of the same ones."""
        return self.local_blocks * self.width < self.features

    @property
    def parts_over_tp(self) -> bool:
        """Whether tensor-parallel ranks hold different parts of the same blocks."""
        features = self.geometry.columns if self.output_side else self.geometry.rows
        return self.shape[1 if self.output_side else 0] < features

    def shard(self, start: int, end: int) -> Shard:
        """A flat range of this rank's part, as `Segment` wants it."""
        if not self.output_side:
            return Shard(start, end, self.local_columns, self.width)
        return Shard(0, end - start, (end - start) // self.local_columns, self.width)

    def held_blocks(self, start: int, end: int) -> tuple[int, ...]:
        """The blocks of which a flat range of this rank's part holds something."""
        if not self.output_side:
            return self.shard(start, end).held_blocks()
        return tuple(range(start // self.alignment, end // self.alignment))

    @property
    def alignment(self) -> int:
        """Elements, from the weight's start, of which every cut inside it is a multiple."""
        return alignment(self.width, self.shape, self.output_side)


def alignment(width: int, shape: Sequence[int], output_side: bool) -> int:
    """A block over the output axis is `width` whole rows."""
    return width * shape[1] if output_side else width


def choose_width(name: str, geometry: GlobalShape, shape: Sequence[int], config: DobbConfig) -> tuple[int, int]:
    """Width of a weight's blocks, and the tensor-parallel ranks that share the features which they divide.

    Args:
        name: of the weight.
        geometry: its global shape.
        shape: rows and columns of this rank's part.
        config: the settings.

    Raises:
        BlockError: if it cannot be cut into the blocks that the settings ask for.
    """
    output_side = config.side == "output"
    features = geometry.rows if output_side else geometry.columns
    shards = features // shape[0] if output_side else geometry.column_shards
    asked, pattern = config.blocks_of(name), config.pattern_of(name)
    return block_width(name, features, column_shards=shards, side=config.side, pattern=pattern, **asked), shards


def fewer_features_than_blocks(features: int, asked: Asked) -> bool:
    """Whether a weight is too narrow for the blocks that `DobbConfig.blocks_of` asks for."""
    return features < (asked.get("blocks") or asked.get("width") or 0)


def check_outputs_seen(name: str, layer: str, geometry: GlobalShape, config: DobbConfig, *, of_expert: bool) -> None:
    """Refuse a weight whose second moments cannot be taken.

    Args:
        name: of the weight.
        layer: name of its layer's class.
        geometry: its global shape.
        config: the settings.
        of_expert: whether it is an expert's.

    Raises:
        UnsupportedError: if they are of the gradient of an output that Dobb cannot see.
    """
    if config.source == "output-gradient" and geometry.outputs_over_tp is None:
        raise UnsupportedError(
            f"cannot see the gradient of the output of {name}, a {layer}{' of an expert' if of_expert else ''}",
            "use {source:gram}, or leave the weight to AdamW with {exclude}",
            settings={"source": config.source},
        )


def check_split_expert(weight: BlockedWeight, config: DobbConfig) -> None:
    """Refuse an expert whose blocks are cut over ranks that make no sums together.

    Raises:
        UnsupportedError: if the settings need sums of all parts of a block.
    """
    if weight.is_expert_parallel and weight.parts_over_tp and (config.norm == "l2" or config.source == "gram"):
        raise UnsupportedError(
            "is incompatible with {megatron.expert_tensor_parallel_size} above 1, which splits the blocks of "
            f"{weight.name}",
            "use 1, or leave the experts to AdamW with {exclude}",
            settings={"norm": "l2"} if config.norm == "l2" else {"source": "gram"},
        )


def moment_set(weight: BlockedWeight, config: DobbConfig) -> MomentSet:
    """Over which ranks the moment of a weight is summed."""
    if weight.is_expert_parallel:
        return "expert tokens"  # the dispatcher gives all tensor-parallel ranks of an expert the same ones
    geometry = weight.geometry
    if config.source == "gram":  # what is summed are parts of the gradient
        over_tp = weight.parts_over_tp
    else:
        over_tp = bool(geometry.outputs_over_tp if weight.output_side else geometry.tokens_over_tp)
    # Copies that all see the same tokens count them once each, which leaves the mean as it is.
    return "tokens over tensor" if over_tp or geometry.replicated else "tokens"


def column_set(weight: BlockedWeight) -> ColumnSet:
    """Over which ranks the squared norms of a weight's columns of coefficients are summed, with `--dobb-norm l2`."""
    if weight.is_expert_parallel:
        return "alone" if weight.output_side else "expert shards"
    if weight.output_side:
        return "tensor" if weight.parts_over_tp else "alone"
    return "shards over tensor" if weight.parts_over_tp else "shards"
