"""Choose the weights of a model chunk that Dobb manages: their blocks, alignment and sources of second moments."""

import functools
from dataclasses import dataclass

from torch import nn

from ...methods.dobb.capture import Source
from ...methods.dobb.settings import DobbConfig
from ..model.adapters import SEQUENCE_DIM, Adapter, GlobalShape
from ..model.chunk_state import ManagedWeight, Matrix, Selection, WeightTag
from ..model.select_weights import choose, embedding_or_output
from .weight_sharding import BlockedWeight, check_outputs_seen, choose_width, fewer_features_than_blocks


@dataclass(frozen=True)
class DobbWeight(ManagedWeight, BlockedWeight):
    """A weight on Dobb.

    Attributes:
        geometry: its global shape.
        width: width of its blocks.
        output_side: whether the blocks divide its rows.
        shards: tensor-parallel ranks that share the features which the blocks divide.
    """

    adapter: Adapter
    geometry: GlobalShape
    width: int
    output_side: bool
    shards: int

    @property
    def elements(self) -> int:
        """Elements of the whole weight."""
        return self.geometry.rows * self.geometry.columns

    @property
    def tag(self) -> WeightTag:
        """The tag of its parameter, which keeps every block inside one shard."""
        columns = self.parameter.numel() if self.output_side else self.local_columns
        return WeightTag(self.name, self.alignment, columns, self.shards, self.output_side)

    def source(self) -> Source:
        """The place where the weight's input activations can be captured, or the gradients of its outputs."""
        if self.output_side:
            return Source(self.name, self.module, self.width, self.adapter.output, SEQUENCE_DIM, of_gradient=True)
        activation = functools.partial(self.adapter.activation, name=self.own_name)
        return Source(self.name, self.module, self.width, activation, SEQUENCE_DIM, batch=self.moe)


def select_weights(root: nn.Module, settings: DobbConfig) -> Selection[DobbWeight]:
    """Choose and tag the managed weights of a model chunk.

    Raises:
        BlockError: if a managed weight cannot be cut into the blocks that the settings ask for.
    """
    return choose(
        root,
        settings,
        functools.partial(_reason_on_adamw, settings=settings),
        functools.partial(_dobb_weight, settings=settings),
    )


def _dobb_weight(matrix: Matrix, settings: DobbConfig) -> DobbWeight:
    assert matrix.adapter is not None
    shape = matrix.adapter.geometry(matrix.module)
    check_outputs_seen(matrix.name, type(matrix.module).__name__, shape, settings, of_expert=matrix.moe is not None)
    width, shards = choose_width(matrix.name, shape, matrix.parameter.shape, settings)
    return DobbWeight(**vars(matrix), geometry=shape, width=width, output_side=settings.side == "output", shards=shards)


def _reason_on_adamw(matrix: Matrix, selection: Selection[DobbWeight], settings: DobbConfig) -> str | None:
    if reason := embedding_or_output(matrix.parameter):
        return reason
    if matrix.adapter is None:
        return f"no adapter for {type(matrix.module).__name__}"
    if reason := matrix.adapter.refusal(matrix.module):
        return reason
    if getattr(matrix.module, "is_expert", False) and matrix.moe is None:
        return "expert outside of a MoE layer"
    selection.patterns_used |= settings.patterns_matching(matrix.name)
    shape = matrix.adapter.geometry(matrix.module)
    features = {"input": shape.columns, "output": shape.rows}
    if settings.excluded(matrix.name):
        selection.left_out[matrix.name] = features
        return "excluded by --dobb-exclude"
    if fewer_features_than_blocks(features[settings.side], settings.blocks_of(matrix.name)):
        # Low-rank adapters (LoRA) are such. An error would stop a run for matrices that hardly matter.
        selection.left_out[matrix.name] = features
        return f"fewer {settings.side} features than blocks (--dobb-blocks-for can give them their own count)"
    return None
