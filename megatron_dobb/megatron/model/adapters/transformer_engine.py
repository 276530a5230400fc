"""Megatron's wrappers of Transformer Engine's linear layers.

What is read here of a layer are Megatron's attributes and those that Transformer Engine documents; which of them were
seen on real objects, and which only on stand-ins, is said in docs/layers.md.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .base import Adapter, GlobalShape, dequantized, matrix_of, quantizes, size, without_padding

_LAYERS = "megatron.core.extensions.transformer_engine:"


class Replicated(Adapter):
    """`parallel_mode="duplicated"`: the whole weight on every tensor-parallel rank, such as MLA's down projections."""

    layer = _LAYERS + "TELinear"

    def refusal(self, module: Any) -> str | None:
        """Implement `Adapter.refusal`."""
        if module.parallel_mode is not None:
            return f"TELinear with parallel_mode {module.parallel_mode!r}, not of Megatron's column or row class"
        return None

    def geometry(self, module: Any) -> GlobalShape:
        """Implement `Adapter.geometry`."""
        rows, columns = module.weight.shape
        # Not the layer's own flag: alone of its tensor-parallel ranks, it has switched that off.
        shard = bool(module.config.sequence_parallel and size(module._tp_group) > 1)
        return GlobalShape(rows, columns, 1, shard, replicated=size(module._tp_group) > 1, outputs_over_tp=shard)

    def activation(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Tensor:
        """Implement `Adapter.activation`."""
        return _input(module, args, kwargs)


class Column(Adapter):
    """Rows split over tensor parallelism."""

    layer = _LAYERS + "TEColumnParallelLinear"

    def geometry(self, module: Any) -> GlobalShape:
        """Implement `Adapter.geometry`."""
        rows, columns = module.weight.shape
        # An expert, or a shared expert that overlaps the dispatcher, has no mode: others gather its sequence.
        shard = bool(module.sequence_parallel and module.parallel_mode == "column")
        seen = False if module.parallel_mode == "column" else None
        return GlobalShape(rows * size(module._tp_group), columns, 1, shard, outputs_over_tp=seen)

    def activation(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Tensor:
        """Implement `Adapter.activation`."""
        return _input(module, args, kwargs)


class LayerNormColumn(Column):
    """A norm, then `Column`. Hooks see the norm's input, so it is normalised here once more, on refresh steps."""

    layer = _LAYERS + "TELayerNormColumnParallelLinear"

    def activation(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Tensor:
        """Implement `Adapter.activation`."""
        x = super().activation(module, args, kwargs, name)
        return normalized(module, x.to(getattr(module, "activation_dtype", None) or x.dtype))


class Row(Adapter):
    """Columns split over tensor parallelism."""

    layer = _LAYERS + "TERowParallelLinear"

    def geometry(self, module: Any) -> GlobalShape:
        """Implement `Adapter.geometry`."""
        rows, columns = module.weight.shape
        shards = size(module._tp_group)
        seen = bool(module.sequence_parallel) if module.parallel_mode == "row" else None
        return GlobalShape(rows, columns * shards, shards, False, outputs_over_tp=seen)

    def activation(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Tensor:
        """Implement `Adapter.activation`."""
        return _input(module, args, kwargs)


class _Grouped(Adapter):
    """The experts of one rank: `weight0` to `weight<n-1>`, and rows sorted by expert, `m_splits[i]` for the i-th."""

    def refusal(self, module: Any) -> str | None:
        """Implement `Adapter.refusal`."""
        return "experts' weights in one tensor" if getattr(module, "single_grouped_weight", False) else None

    def weights(self, module: nn.Module) -> Mapping[str, nn.Parameter]:
        """Implement `Adapter.weights`."""
        names = [f"weight{expert}" for expert in range(int(module.num_gemms))]  # type: ignore[arg-type]
        found = {name: matrix_of(module, name) for name in names}
        return {name: weight for name, weight in found.items() if weight is not None}

    def activation(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Tensor:
        """Implement `Adapter.activation`."""
        # Megatron's wrapper calls them x and m_splits.
        x, splits = [*args, *(kwargs[key] for key in ("x", "m_splits")[len(args) :])][:2]
        counts = splits.tolist() if isinstance(splits, Tensor) else splits
        expert = int(name.removeprefix("weight"))
        start = sum(counts[:expert])
        rows = dequantized(x).reshape(-1, x.shape[-1])[start : start + counts[expert]]
        return without_padding(rows) if quantizes(module) else rows


class GroupedColumn(_Grouped):
    """Each expert's rows split over the experts' tensor parallelism."""

    layer = _LAYERS + "TEColumnParallelGroupedLinear"

    def geometry(self, module: Any) -> GlobalShape:
        """Implement `Adapter.geometry`."""
        rows, columns = module.weight0.shape
        return GlobalShape(rows * size(module._tp_group), columns, 1, False)


class GroupedRow(_Grouped):
    """Each expert's columns split over the experts' tensor parallelism."""

    layer = _LAYERS + "TERowParallelGroupedLinear"

    def geometry(self, module: Any) -> GlobalShape:
        """Implement `Adapter.geometry`."""
        rows, columns = module.weight0.shape
        return GlobalShape(rows, columns * size(module._tp_group), size(module._tp_group), False)


def normalized(module: Any, x: Tensor) -> Tensor:
    """`x [..., n]` after the norm of a fused layer, computed in fp32 and rounded to `x`'s dtype as the layer does."""
    y = x.float()
    if module.normalization == "LayerNorm":
        y = y - y.mean(dim=-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(dim=-1, keepdim=True) + module.eps)
    gamma = module.layer_norm_weight.float()
    y = y * (gamma + 1 if module.zero_centered_gamma else gamma)
    if module.layer_norm_bias is not None:
        y = y + module.layer_norm_bias.float()
    return y.to(x.dtype)


def _input(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    x = dequantized(args[0] if args else kwargs["x"])
    # Only an expert's input is [tokens, n].
    return without_padding(x) if x.ndim == 2 and quantizes(module) else x
