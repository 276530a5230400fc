"""What each kind of Megatron layer multiplies its weight with, and how the weight is cut over tensor parallelism."""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SEQUENCE_DIM = 1  # Megatron's activations are [sequence, batch, features].


@dataclass(frozen=True)
class Geometry:
    """Global shape of a weight and its place in the tensor-parallel layout.

    Attributes:
        rows: global number of output features, `m`.
        columns: global number of input features, `n`.
        column_shards: tensor-parallel ranks that share the columns.
        tokens_over_tp: whether tensor-parallel ranks see different tokens (the input is a sequence shard).
    """

    rows: int
    columns: int
    column_shards: int
    tokens_over_tp: bool


class Adapter:
    """Knowledge about one kind of layer. Subclass it and `register` an instance to manage another kind.

    Attributes:
        layer: the layer's class, as `module:name`; it need not be importable.
    """

    layer: str

    def layer_class(self) -> type | None:
        """The layer's class, or None while nothing has imported its module: then no model contains it."""
        module, _, name = self.layer.partition(":")
        return getattr(sys.modules.get(module), name, None)

    def refusal(self, module: Any) -> str | None:
        """Why this instance cannot be managed, or None."""
        return None

    def geometry(self, module: Any) -> Geometry:
        """Global shape of `module.weight`."""
        raise NotImplementedError

    def activation(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The tensor that multiplies the weight, `[s, b, n]` with the columns that this rank holds."""
        return args[0] if args else kwargs["input_"]


class _MegatronLinear(Adapter):
    def refusal(self, module: Any) -> str | None:
        return "expert weights" if module.is_expert else None


class ColumnParallel(_MegatronLinear):
    """Rows split over tensor parallelism; with sequence parallelism the hooked input is a sequence shard."""

    layer = "megatron.core.tensor_parallel.layers:ColumnParallelLinear"

    def geometry(self, module: Any) -> Geometry:
        """See `Adapter.geometry`."""
        # With explicit expert communication, somebody else gathers the sequence before the layer sees it.
        shard = bool(module.sequence_parallel and not module.explicit_expert_comm)
        return Geometry(module.output_size, module.input_size, 1, shard)


class RowParallel(_MegatronLinear):
    """Columns split over tensor parallelism: each rank holds blocks of its own."""

    layer = "megatron.core.tensor_parallel.layers:RowParallelLinear"

    def refusal(self, module: Any) -> str | None:
        """See `Adapter.refusal`."""
        if not module.input_is_parallel:
            return "row-parallel layers that scatter their own input"
        return super().refusal(module)

    def geometry(self, module: Any) -> Geometry:
        """See `Adapter.geometry`."""
        return Geometry(
            module.output_size, module.input_size, module.input_size // module.input_size_per_partition, False
        )


REGISTRY: list[Adapter] = [ColumnParallel(), RowParallel()]


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


def matrix_of(module: nn.Module) -> torch.nn.Parameter | None:
    """The weight of a module if it is a trainable 2-D parameter of its own."""
    weight = module._parameters.get("weight")
    return weight if weight is not None and weight.ndim == 2 and weight.requires_grad else None
