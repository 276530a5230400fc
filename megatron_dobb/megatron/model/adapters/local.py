"""Megatron's own linear layers."""

from typing import Any

from torch import Tensor

from .base import Adapter, GlobalShape, quantizes, size, without_padding


class ColumnParallel(Adapter):
    """Rows split over tensor parallelism; with sequence parallelism the hooked input is a sequence shard."""

    layer = "megatron.core.tensor_parallel.layers:ColumnParallelLinear"

    def geometry(self, module: Any) -> GlobalShape:
        """Implement `Adapter.geometry`."""
        # With explicit expert communication, somebody else gathers the sequence before the layer sees it.
        shard = bool(module.sequence_parallel and not module.explicit_expert_comm)
        whole = module.gather_output and size(module.tp_group) > 1  # every rank then has the outputs of all
        seen = None if module.is_expert or whole else False
        return GlobalShape(module.output_size, module.input_size, 1, shard, outputs_over_tp=seen)

    def activation(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Tensor:
        """Implement `Adapter.activation`."""
        return _input(module, args, kwargs)


class RowParallel(Adapter):
    """Columns split over tensor parallelism: each rank holds blocks of its own."""

    layer = "megatron.core.tensor_parallel.layers:RowParallelLinear"

    def geometry(self, module: Any) -> GlobalShape:
        """Implement `Adapter.geometry`."""
        shards = module.input_size // module.input_size_per_partition
        # With explicit expert communication, somebody else reduces what the layer returns.
        seen = None if module.is_expert or module.explicit_expert_comm else bool(module.sequence_parallel)
        return GlobalShape(module.output_size, module.input_size, shards, False, outputs_over_tp=seen)

    def activation(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Tensor:
        """Implement `Adapter.activation`."""
        x = _input(module, args, kwargs)
        if module.input_is_parallel or size(module.tp_group) == 1:
            return x
        return x.chunk(size(module.tp_group), dim=-1)[module.tp_group.rank()]  # as the layer scatters it


def _input(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    x = args[0] if args else kwargs["input_"]
    return without_padding(x) if module.is_expert and quantizes(module) else x
