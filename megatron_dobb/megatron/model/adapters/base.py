"""Base class of adapters for kinds of layers, and helpers that several adapters share."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

SEQUENCE_DIM = 1  # Megatron's activations are [sequence, batch, features].

_QUANTIZED_TENSORS = (
    "transformer_engine.pytorch.quantized_tensor:QuantizedTensor",
    "transformer_engine.pytorch.tensor.quantized_tensor:QuantizedTensor",  # before 2.9
)


@dataclass(frozen=True)
class GlobalShape:
    """Global shape of a weight and its place in the tensor-parallel layout.

    Attributes:
        rows: global number of output features, `m`.
        columns: global number of input features, `n`.
        column_shards: tensor-parallel ranks that share the columns.
        tokens_over_tp: whether tensor-parallel ranks see different tokens (the input is a sequence shard).
        replicated: whether every tensor-parallel rank holds the whole weight. Such a weight gets one basis for all
            of them, or rounding would let the copies drift apart.
        outputs_over_tp: whether tensor-parallel ranks see different tokens in the layer's output (it is a sequence
            shard); None if the gradient of the output cannot be seen.
    """

    rows: int
    columns: int
    column_shards: int
    tokens_over_tp: bool
    replicated: bool = False
    outputs_over_tp: bool | None = None


class Adapter:
    """Knowledge about one kind of layer. Subclass it and `register` an instance to manage another kind.

    Attributes:
        layer: the layer's class, as `module:name`; it need not be importable.
    """

    layer: str

    def layer_class(self) -> type | None:
        """The layer's class, or None while nothing has imported its module: then no model contains it."""
        return imported_class(self.layer)

    def refusal(self, module: Any) -> str | None:
        """Why this instance cannot be managed, or None."""
        return None

    def weights(self, module: nn.Module) -> Mapping[str, nn.Parameter]:
        """The trainable matrices of a layer, by their names in it. All have the same `geometry`.

        A number at the end of a name counts the layer's experts.
        """
        weight = matrix_of(module)
        return {"weight": weight} if weight is not None else {}

    def geometry(self, module: Any) -> GlobalShape:
        """Global shape of each weight of the layer."""
        raise NotImplementedError

    def activation(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Tensor:
        """The tensor that multiplies a weight, with the columns that this rank holds.

        Args:
            module: the layer.
            args, kwargs: of its forward call.
            name: of the weight, as in `weights`.

        Returns:
            `[s, b, n]`; `[tokens, n]` for an expert.
        """
        return args[0] if args else kwargs["input_"]

    def output(self, module: Any, output: Any) -> Tensor:
        """The product of the layer's weight with its input, `[s, b, m]` with the rows that this rank holds.

        Args:
            module: the layer.
            output: what its forward call returned.
        """
        product: Tensor = output[0] if isinstance(output, tuple) else output
        return product


def imported_class(path: str) -> type | None:
    """The class that `module:name` names, if something has imported its module."""
    module, _, name = path.partition(":")
    found = getattr(sys.modules.get(module), name, None)
    # Without Transformer Engine, Megatron's wrappers of its layers are mocks, or None.
    return found if isinstance(found, type) else None


def matrix_of(module: nn.Module, name: str = "weight") -> nn.Parameter | None:
    """A parameter of a module if it is trainable, 2-D and the module's own."""
    weight = module._parameters.get(name)
    return weight if weight is not None and weight.ndim == 2 and weight.requires_grad else None


def size(group: dist.ProcessGroup | None) -> int:
    """Number of ranks of a group; None is this rank alone."""
    return group.size() if group is not None else 1


def quantizes(module: Any) -> bool:
    """Whether the layer multiplies in fp8 or fp4, for which Megatron pads the rows of each expert with zeros."""
    return bool(getattr(module.config, "fp8", None) or getattr(module.config, "fp4", None))


def without_padding(rows: Tensor) -> Tensor:
    """`rows [tokens, n]` without the zero rows at their end, which would count as tokens."""
    used = rows.count_nonzero(dim=1).nonzero()
    return rows[: int(used[-1]) + 1] if len(used) else rows[:0]


def dequantized(x: Tensor) -> Tensor:
    """The values of a tensor that may come quantised from the layer before."""
    for path in _QUANTIZED_TENSORS:
        quantized = imported_class(path)
        if quantized is not None and isinstance(x, quantized):
            return x.dequantize()
    return x
