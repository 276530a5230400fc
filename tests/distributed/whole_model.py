"""A rank's parameters as parts of those of the whole model: names, values and tensor-parallel cuts."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_dobb.megatron.model.global_names import weight_names


def parameters_by_name(chunks: Sequence[Any]) -> dict[str, Any]:
    """The parameters of a rank's model chunks, by their names in the whole model."""
    return {
        name: chunk.module.get_submodule(path)._parameters[own]
        for chunk in chunks
        for (path, own), name in weight_names(chunk.module).items()
        if chunk.module.get_submodule(path)._parameters[own] is not None
    }


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to an expert that a router deals its tokens."""
    return ".experts." in name


def tensor_group(name: str) -> Any:
    """The tensor-parallel ranks of a parameter; experts have their own."""
    if is_expert(name):
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def split_dimension(name: str, parameter: Any) -> int | None:
    """The dimension that tensor parallelism splits; None if every rank holds all of the parameter."""
    split = tensor_group(name).size() > 1 and getattr(parameter, "tensor_model_parallel", False)
    return parameter.partition_dim if split else None


def part_of(name: str, parameter: Any) -> tuple[int, int]:
    """The dimension along which this rank's part lies in the whole parameter, and the number of the part."""
    dim = split_dimension(name, parameter)
    return (0, 0) if dim is None else (dim, tensor_group(name).rank())


def local_part(name: str, parameter: Any, whole: Tensor) -> Tensor:
    """This rank's tensor-parallel part of the values of a whole parameter."""
    dim, group = split_dimension(name, parameter), tensor_group(name)
    return whole if dim is None else whole.chunk(group.size(), dim)[group.rank()]


def whole_parameters(parameters: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copies of parameters, put together over tensor parallelism. Every tensor-parallel rank must call it."""
    wholes = {}
    for name, parameter in parameters.items():
        whole, dim = parameter.detach().clone(), split_dimension(name, parameter)
        if dim is not None:
            parts = [torch.empty_like(whole) for _ in range(tensor_group(name).size())]
            dist.all_gather(parts, whole, group=tensor_group(name))
            whole = torch.cat(parts, dim)
        wholes[name] = whole
    return wholes


def first_block(name: str, parameter: Any, blocks: int, over_rows: bool = False) -> int:
    """The global number of the first of this rank's `blocks` blocks of a weight."""
    own = split_dimension(name, parameter) == (0 if over_rows else 1)
    return tensor_group(name).rank() * blocks if own else 0


def fill(parameters: Mapping[str, Any]) -> None:
    """Give every matrix values that depend on its name in the whole model alone."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            if parameter.ndim < 2:
                continue
            shape, dim = list(parameter.shape), split_dimension(name, parameter)
            if dim is not None:
                shape[dim] *= tensor_group(name).size()
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            whole = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
            parameter.copy_(local_part(name, parameter, whole))
