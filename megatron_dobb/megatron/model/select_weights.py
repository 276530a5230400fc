"""Choose the weights of a model chunk that Dobb manages, and tag them for the buffer layout."""

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from ...methods.dobb.capture import Source
from ...methods.dobb.settings import Asked, DobbConfig
from .adapters import SEQUENCE_DIM, Adapter, Geometry, find, imported_class, matrix_of
from .global_names import global_names, kind_of, weight_names
from .weight_sharding import BlockedWeight, alignment, check_outputs_seen, choose_width

__all__ = ["ChunkPlan", "ManagedWeight", "global_names", "manage"]

WIDTH_ATTRIBUTE = "dobb_block_width"
OUTPUT_SIDE_ATTRIBUTE = "dobb_output_side"
NAME_ATTRIBUTE = "dobb_name"
COLUMN_SHARDS_ATTRIBUTE = "dobb_column_shards"
_MOE_LAYER = "megatron.core.transformer.moe.moe_layer:BaseMoELayer"


@dataclass(frozen=True)
class ManagedWeight(BlockedWeight):
    """A weight on Dobb.

    Attributes:
        name: its name in the whole model, with global numbers of layers and experts.
        parameter: this rank's part of it.
        module: the layer that owns it.
        own_name: its name in that layer.
        adapter: what is known about such layers.
        geometry: its global shape.
        width: width of its blocks.
        output_side: whether the blocks divide its rows.
        moe: the layer whose router deals an expert its tokens, of which there may be none; None for other weights.
    """

    name: str
    parameter: nn.Parameter
    module: nn.Module
    own_name: str
    adapter: Adapter
    geometry: Geometry
    width: int
    output_side: bool
    moe: nn.Module | None

    @property
    def shape(self) -> torch.Size:
        """Rows and columns of this rank's part."""
        return self.parameter.shape

    @property
    def is_expert_parallel(self) -> bool:
        """Whether Megatron reduces its gradient over the experts' data-parallel group."""
        return not getattr(self.parameter, "allreduce", True)

    def source(self) -> Source:
        """Where the weight's input activations can be seen, or the gradients of its outputs."""
        if self.output_side:
            return Source(self.name, self.module, self.width, self.adapter.output, SEQUENCE_DIM, of_gradient=True)
        activation = functools.partial(self.adapter.activation, name=self.own_name)
        return Source(self.name, self.module, self.width, activation, SEQUENCE_DIM, batch=self.moe)


@dataclass
class ChunkPlan:
    """Which weights of one model chunk are on Dobb, and why the others are not.

    Attributes:
        root: the model chunk.
        settings: with which they were chosen.
        managed: the weights on Dobb; one that several modules share appears once for each.
        adamw: number of parameters on AdamW and of their elements, for each reason.
        patterns_used: the user's name patterns that matched a weight here.
        left_out: features, by side, of the matrices, by name, that are on AdamW only because the settings say so.
    """

    root: nn.Module
    settings: DobbConfig
    managed: list[ManagedWeight] = field(default_factory=list)
    adamw: Counter[tuple[str, str]] = field(default_factory=Counter)
    patterns_used: set[str] = field(default_factory=set)
    left_out: dict[str, dict[str, int]] = field(default_factory=dict)

    def kinds_on_adamw(self) -> set[str]:
        """Names of the parameters on AdamW, without the numbers of their layers and experts."""
        ours = {weight.name for weight in self.managed}
        return {kind_of(name) for name in weight_names(self.root).values() if name not in ours}


@dataclass(frozen=True)
class _Matrix:
    """A matrix that a module multiplies with, whoever updates it."""

    name: str
    own_name: str
    parameter: nn.Parameter
    module: nn.Module
    moe: nn.Module | None
    adapter: Adapter | None


def manage(root: nn.Module, config: DobbConfig) -> ChunkPlan:
    """Choose and tag the managed weights of a model chunk.

    Raises:
        BlockError: if a managed weight cannot be cut into the blocks that the settings ask for.
    """
    plan = ChunkPlan(root, config)
    managed: dict[int, ManagedWeight] = {}
    reasons: dict[int, str] = {}
    matrices = list(_matrices(root))
    for matrix in matrices:
        # A weight that several modules share is on Dobb only if all of them let Dobb see their inputs.
        reason = _why_not(matrix, config, plan)
        if reason is not None:
            reasons.setdefault(id(matrix.parameter), reason)
    for matrix in matrices:
        key = id(matrix.parameter)
        if key in reasons:
            continue
        assert matrix.adapter is not None
        known = managed.get(key)
        geometry = known.geometry if known else matrix.adapter.geometry(matrix.module)
        name = known.name if known else matrix.name
        width = known.width if known else _tag(matrix, geometry, config)
        weight = ManagedWeight(
            name,
            matrix.parameter,
            matrix.module,
            matrix.own_name,
            matrix.adapter,
            geometry,
            width,
            config.side == "output",
            matrix.moe,
        )
        managed.setdefault(key, weight)
        plan.managed.append(weight)
    for parameter in root.parameters():
        if parameter.requires_grad and id(parameter) not in managed:
            for tag in (WIDTH_ATTRIBUTE, NAME_ATTRIBUTE, OUTPUT_SIDE_ATTRIBUTE):
                if hasattr(parameter, tag):  # the model was wrapped before, with other settings
                    delattr(parameter, tag)
            reason = reasons.get(id(parameter)) or _shape_reason(parameter)
            plan.adamw[reason, "parameters"] += 1
            plan.adamw[reason, "elements"] += parameter.numel()
    return plan


def _matrices(root: nn.Module) -> Iterator[_Matrix]:
    names = weight_names(root)
    moe_of = _moe_layers(root)
    for path, module in root.named_modules():
        adapter = find(module)
        if adapter is not None:
            weights = adapter.weights(module)
        else:
            weight = matrix_of(module)
            weights = {"weight": weight} if weight is not None else {}
        for own, parameter in weights.items():
            yield _Matrix(names[path, own], own, parameter, module, moe_of.get(id(module)), adapter)


def _moe_layers(root: nn.Module) -> dict[int, nn.Module]:
    """The layer whose router deals the tokens, for every module that belongs to an expert."""
    kind = imported_class(_MOE_LAYER)
    layers = [module for module in root.modules() if kind is not None and isinstance(module, kind)]
    return {
        id(inner): layer
        for layer in layers
        if isinstance(layer.experts, nn.Module)
        for inner in layer.experts.modules()
    }


def _tag(matrix: _Matrix, geometry: Geometry, config: DobbConfig) -> int:
    """Choose a weight's block width, and say to the layout of the buffers what no boundary may cut."""
    check_outputs_seen(matrix.name, type(matrix.module).__name__, geometry, config, of_expert=matrix.moe is not None)
    output_side, shape = config.side == "output", matrix.parameter.shape
    width, shards = choose_width(matrix.name, geometry, shape, config)
    setattr(matrix.parameter, WIDTH_ATTRIBUTE, alignment(width, shape, output_side))
    setattr(matrix.parameter, OUTPUT_SIDE_ATTRIBUTE, output_side)
    setattr(matrix.parameter, NAME_ATTRIBUTE, matrix.name)
    setattr(matrix.parameter, COLUMN_SHARDS_ATTRIBUTE, shards)
    return width


def _why_not(matrix: _Matrix, config: DobbConfig, plan: ChunkPlan) -> str | None:
    """Why a 2-D weight goes to AdamW; None if Dobb manages it."""
    weight = matrix.parameter
    if getattr(weight, "is_embedding_or_output_parameter", False) or getattr(weight, "shared_embedding", False):
        return "embedding or output layer"
    if matrix.adapter is None:
        return f"no adapter for {type(matrix.module).__name__}"
    refusal = matrix.adapter.refusal(matrix.module)
    if refusal is not None:
        return refusal
    if getattr(matrix.module, "is_expert", False) and matrix.moe is None:
        return "expert outside of a MoE layer"
    plan.patterns_used |= config.patterns_matching(matrix.name)
    geometry, asked = matrix.adapter.geometry(matrix.module), config.blocks_of(matrix.name)
    features = {"input": geometry.columns, "output": geometry.rows}
    if config.excluded(matrix.name):
        plan.left_out[matrix.name] = features
        return "excluded by --dobb-exclude"
    if fewer_features_than_blocks(features[config.side], asked):
        # Low-rank adapters (LoRA) are such. An error would stop a run for matrices that hardly matter.
        plan.left_out[matrix.name] = features
        return f"fewer {config.side} features than blocks (--dobb-blocks-for can give them their own count)"
    return None


def fewer_features_than_blocks(features: int, asked: Asked) -> bool:
    """Whether a weight is too narrow for the blocks that `DobbConfig.blocks_of` asks for."""
    return features < (asked.get("blocks") or asked.get("width") or 0)


def _shape_reason(parameter: nn.Parameter) -> str:
    if parameter.ndim < 2:
        return "not a matrix (norms, biases)"
    return "2-D, but no layer's weight" if parameter.ndim == 2 else "more than two dimensions"
