"""State of this package on Megatron's objects: one object per model chunk, one tag per managed parameter.

Both are the attribute `megatron_dobb`, which is read and written here alone.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import nn

from .adapters import Adapter
from .global_names import kind_of, weight_names

_ATTRIBUTE = "megatron_dobb"


@dataclass(frozen=True)
class WeightTag:
    """Note on a managed parameter, for the layout of the buffers and the choice of param groups.

    Attributes:
        name: of the weight in the whole model.
        alignment: elements, from the weight's start, of which every cut inside it must be a multiple; 0 allows any cut.
        columns: elements of this rank's part in one row.
        column_shards: tensor-parallel ranks that share the columns, or the rows if blocks divide those.
        whole_rows: whether `alignment` is a number of whole rows.
    """

    name: str
    alignment: int = 0
    columns: int = 0
    column_shards: int = 1
    whole_rows: bool = False


@dataclass(frozen=True)
class Matrix:
    """A matrix that a module multiplies with, whichever optimizer updates it.

    Attributes:
        name: in the whole model, with global numbers of layers and experts.
        own_name: in the module that owns it.
        parameter: this rank's part of it.
        module: the layer that owns it.
        moe: the layer whose router deals an expert its tokens, of which there may be none; None for other weights.
        adapter: knowledge about such layers, if there is any.
    """

    name: str
    own_name: str
    parameter: nn.Parameter
    module: nn.Module
    moe: nn.Module | None
    adapter: Adapter | None


@dataclass(frozen=True)
class ManagedWeight(Matrix):
    """A matrix that the method updates."""

    @property
    def shape(self) -> torch.Size:
        """Rows and columns of this rank's part."""
        return self.parameter.shape

    @property
    def elements(self) -> int:
        """Elements of the whole weight; those of this rank's part where no adapter knows its global shape."""
        if self.adapter is None:
            return self.parameter.numel()
        shape = self.adapter.geometry(self.module)
        return shape.rows * shape.columns

    @property
    def is_expert_parallel(self) -> bool:
        """Whether Megatron reduces its gradient over the experts' data-parallel group."""
        return not getattr(self.parameter, "allreduce", True)

    @property
    def tag(self) -> WeightTag:
        """The tag of its parameter."""
        return WeightTag(self.name)

    def used_by(self, matrix: Matrix) -> Self:
        """The same weight as another module uses it."""
        return replace(self, module=matrix.module, own_name=matrix.own_name, adapter=matrix.adapter, moe=matrix.moe)


@dataclass
class Selection[W: ManagedWeight]:
    """The weights of one model chunk that a method updates, and why AdamW updates the others.

    Attributes:
        root: the model chunk.
        settings: the method's, with which they were chosen.
        managed: the weights of the method; one that several modules share appears once for each.
        adamw: number of parameters on AdamW and of their elements, for each reason.
        patterns_used: the user's name patterns that matched a weight here.
        left_out: features, by side, of the matrices, by name, that are on AdamW only because the settings say so.
    """

    root: nn.Module
    settings: Any
    managed: list[W] = field(default_factory=list)
    adamw: Counter[tuple[str, str]] = field(default_factory=Counter)
    patterns_used: set[str] = field(default_factory=set)
    left_out: dict[str, dict[str, int]] = field(default_factory=dict)

    def kinds_on_adamw(self) -> set[str]:
        """Names of the parameters on AdamW, without the numbers of their layers and experts."""
        managed = {weight.name for weight in self.managed}
        return {kind_of(name) for name in weight_names(self.root).values() if name not in managed}

    def reasons(self) -> Counter[str]:
        """Number of parameters on AdamW for each reason."""
        return Counter({reason: number for (reason, unit), number in self.adamw.items() if unit == "parameters"})


@dataclass
class ChunkState:
    """State of this package for one model chunk.

    Attributes:
        selection: its weights.
        kinds_on_adamw: `Selection.kinds_on_adamw` of the whole model; None until an optimizer was built. Only the first
            chunk of a rank has it.
        shared: what the optimizers of a rank, of dense weights and of experts, share; only the first chunk has it.
    """

    selection: Selection[Any]
    kinds_on_adamw: set[str] | None = None
    shared: Any = None


@dataclass(frozen=True)
class AlignedLayout:
    """Note on a buffer layout that was aligned to blocks: the elements that Megatron's own would have."""

    stock_numel: int


def set_tag(parameter: nn.Parameter, note: WeightTag | None) -> None:
    """Set a parameter's tag, or remove it: the model may have been wrapped before, with other settings."""
    if note is not None:
        setattr(parameter, _ATTRIBUTE, note)
    elif hasattr(parameter, _ATTRIBUTE):
        delattr(parameter, _ATTRIBUTE)


def tag_of(parameter: Any) -> WeightTag | None:
    """The tag of a managed parameter; None for others."""
    note: WeightTag | None = getattr(parameter, _ATTRIBUTE, None)
    return note


def attach_state(chunk: Any, selection: Selection[Any]) -> None:
    """Give a wrapped model chunk its state."""
    setattr(chunk, _ATTRIBUTE, ChunkState(selection))


def state_of(chunk: Any) -> ChunkState | None:
    """The state of a model chunk; None if it was wrapped without a method."""
    state: ChunkState | None = getattr(chunk, _ATTRIBUTE, None)
    return state


def selection_of(chunk: Any) -> Selection[Any]:
    """The selection of a model chunk that was wrapped for a method."""
    state = state_of(chunk)
    assert state is not None
    return state.selection


def note_alignment(layout: Any, stock_numel: int) -> None:
    """Mark a buffer layout as aligned, in place of Megatron's own of `stock_numel` elements."""
    setattr(layout, _ATTRIBUTE, AlignedLayout(stock_numel))


def alignment_of(layout: Any) -> AlignedLayout | None:
    """The note of an aligned buffer layout; None for Megatron's own."""
    note: AlignedLayout | None = getattr(layout, _ATTRIBUTE, None)
    return note
