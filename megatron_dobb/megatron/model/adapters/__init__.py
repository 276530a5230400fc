"""Adapters: for each kind of Megatron layer, its weights, their inputs and their cuts over tensor parallelism.

`REGISTRY` lists them, most specific first; `register` adds one of another package.
"""

from torch import nn

from .base import SEQUENCE_DIM, Adapter, GlobalShape, imported_class, matrix_of
from .local import ColumnParallel, RowParallel
from .transformer_engine import Column, GroupedColumn, GroupedRow, LayerNormColumn, Replicated, Row

__all__ = [
    "REGISTRY",
    "SEQUENCE_DIM",
    "Adapter",
    "GlobalShape",
    "find",
    "imported_class",
    "matrix_of",
    "register",
]

REGISTRY: list[Adapter] = [
    ColumnParallel(),
    RowParallel(),
    LayerNormColumn(),
    GroupedColumn(),
    GroupedRow(),
    Column(),
    Row(),
    Replicated(),  # after the classes that Megatron derives from TELinear
]


def register(adapter: Adapter) -> None:
    """Manage another kind of layer. The latest registered adapter that fits a module serves it."""
    REGISTRY.insert(0, adapter)


def find(module: nn.Module) -> Adapter | None:
    """The adapter for a module, or None."""
    for adapter in REGISTRY:
        layer = adapter.layer_class()
        if layer is not None and isinstance(module, layer):
            return adapter
    return None
