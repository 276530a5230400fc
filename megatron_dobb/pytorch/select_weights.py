"""Choose the matrices of a plain PyTorch model, the weights of `nn.Linear` layers, and say why others are left out."""

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from ..errors import ConfigError, UnsupportedError

Predicate = Callable[[str, nn.Parameter], bool]

logger = logging.getLogger("megatron_dobb")


@dataclass(frozen=True)
class LinearWeight:
    """Weight of one `nn.Linear`, or of several that share it.

    Attributes:
        name: its name in the model.
        parameter: the weight, `[m, n]`.
        modules: the layers that multiply it.
    """

    name: str
    parameter: nn.Parameter
    modules: tuple[nn.Linear, ...]

    @property
    def rows(self) -> int:
        """Output features, `m`."""
        return self.parameter.shape[0]

    @property
    def columns(self) -> int:
        """Input features, `n`."""
        return self.parameter.shape[1]

    @property
    def detail(self) -> str:
        """A clause for messages that the method adds to the weight's shape."""
        return ""


@dataclass(frozen=True)
class Selection:
    """Trainable parameters of a model, by name.

    Attributes:
        matrices: weights that a method may manage.
        adamw: the reason why each other one is left to AdamW.
        frozen: number of parameters that require no gradient.
    """

    matrices: Mapping[str, LinearWeight]
    adamw: Mapping[str, str]
    frozen: int


def select_weights(root: nn.Module, excluded: Predicate, method: str) -> Selection:
    """Choose the weights of `nn.Linear` layers that a method may manage.

    Args:
        root: the model.
        excluded: a function of a weight's name and the weight that returns true if the user leaves it to AdamW.
        method: the method's name, for warnings.

    Raises:
        ConfigError: if a parameter has no shape yet.
        UnsupportedError: if weights are shards of some other library.
    """
    parameters = dict(root.named_parameters())
    _check_supported(parameters)
    layers = linear_layers(root)
    embeddings = {m.weight for m in root.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    outputs = _output_layers(root)
    matrices: dict[str, LinearWeight] = {}
    adamw: dict[str, str] = {}
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            continue
        owners = layers.get(parameter, [])
        modules = tuple(module for _, module in owners)
        reason: str | None
        if parameter in embeddings:
            reason = "output layer and embedding, tied" if owners else "embedding"
        elif not owners:
            reason = _shape_reason(parameter)
        elif outputs & set(modules):
            reason = "output layer, by get_output_embeddings()"
        else:
            reason = _why_not(parameter, modules, [name, *(alias for alias, _ in owners)], excluded)
        if reason:
            adamw[name] = reason
            continue
        matrices[name] = LinearWeight(name, parameter, modules)
        _warn_of_output_layer(matrices[name], embeddings, method)
    return Selection(matrices, adamw, sum(not p.requires_grad for p in parameters.values()))


def linear_layers(root: nn.Module) -> dict[nn.Parameter, list[tuple[str, nn.Linear]]]:
    """Find every trainable weight of an `nn.Linear`, with its names and the layers that share it."""
    layers: dict[nn.Parameter, list[tuple[str, nn.Linear]]] = {}
    for path, module in root.named_modules():
        weight = module._parameters.get("weight") if isinstance(module, nn.Linear) else None
        if isinstance(module, nn.Linear) and weight is not None and weight.requires_grad:
            layers.setdefault(weight, []).append((f"{path}.weight" if path else "weight", module))
    return layers


def unwrap(model: nn.Module) -> nn.Module:
    """Unwrap DistributedDataParallel and torch.compile, so that names are those of the model's own state_dict."""
    while True:
        if isinstance(model, nn.DataParallel):
            raise UnsupportedError(
                "nn.DataParallel runs copies of the model, whose activations the optimizer does not see: use "
                "DistributedDataParallel"
            )
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model.get_submodule("_orig_mod")
        else:
            return model


def _check_supported(parameters: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(f"{name} has no shape yet: run the model once, then build the optimizer")
        if hasattr(parameter, "device_mesh"):
            raise UnsupportedError(
                f"{name} is a DTensor: whole weights are needed on every rank; use DistributedDataParallel, or "
                "Megatron for sharded models"
            )


def _output_layers(root: nn.Module) -> set[nn.Module]:
    """Find the output layers that a Hugging Face style model names."""
    found = set()
    for module in root.modules():
        ask = getattr(module, "get_output_embeddings", None)
        with contextlib.suppress(NotImplementedError, AttributeError):
            layer = ask() if callable(ask) else None
            if isinstance(layer, nn.Module):
                found.add(layer)
    return found


def _why_not(
    weight: nn.Parameter,
    modules: Sequence[nn.Linear],
    names: Sequence[str],
    excluded: Predicate,
) -> str | None:
    if any(isinstance(module, NonDynamicallyQuantizableLinear) for module in modules):
        return "weight that nn.MultiheadAttention multiplies without calling its layer"
    if weight.ndim != 2 or weight.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        return f"{weight.ndim}-D weight of {weight.dtype}"
    if any(excluded(name, weight) for name in names):
        return "excluded"
    return None


def _shape_reason(parameter: nn.Parameter) -> str:
    if parameter.ndim < 2:
        return "norm, bias or other vector"
    return f"{parameter.ndim}-D parameter that is no weight of an nn.Linear"


def _warn_of_output_layer(weight: LinearWeight, embeddings: set[Tensor], method: str) -> None:
    shape = weight.parameter.shape
    if weight.rows > weight.columns and any(e.shape == shape for e in embeddings):
        logger.warning(
            "%s has the shape of an embedding, %d x %d, and is on %s; if it is the output layer, leave it to AdamW "
            "with exclude=[%r]",
            *(weight.name, *shape, method, weight.name),
        )
