"""The layers that Dobb manages in a plain PyTorch model: which weights, and where their inputs are seen."""

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from ..errors import ConfigError, Style, UnsupportedError
from ..methods.dobb.blocks import block_width
from ..methods.dobb.capture import Capture, Source
from ..methods.dobb.settings import DobbConfig
from ..settings.patterns import matches

Predicate = Callable[[str, nn.Parameter], bool]

logger = logging.getLogger("megatron_dobb")


@dataclass(frozen=True)
class LinearWeight:
    """The weight of one `nn.Linear`, or of several that share it.

    Attributes:
        name: its name in the model.
        parameter: the weight, `[m, n]`.
        modules: the layers that multiply it.
        width: columns in one block, `b`; rows, on the output side.
        output_side: whether the blocks divide the output features.
    """

    name: str
    parameter: nn.Parameter
    modules: tuple[nn.Linear, ...]
    width: int
    output_side: bool = False

    @property
    def rows(self) -> int:
        """Output features, `m`."""
        return self.parameter.shape[0]

    @property
    def columns(self) -> int:
        """Input features, `n`."""
        return self.parameter.shape[1]

    @property
    def blocks(self) -> int:
        """Blocks over the input features, `B`; over the output features, on that side."""
        return (self.rows if self.output_side else self.columns) // self.width

    def sources(self) -> Iterator[Source]:
        """Where the activations of this weight can be seen, on the side of its blocks."""
        for module in self.modules:
            if self.output_side:
                yield Source(self.name, module, self.width, _output, 0, of_gradient=True)
            else:
                yield Source(self.name, module, self.width, _input, 0)


@dataclass(frozen=True)
class Choice:
    """The parameters of a model, by name: those on Dobb, why others are on AdamW, and the number of frozen ones."""

    dobb: Mapping[str, LinearWeight]
    adamw: Mapping[str, str]
    frozen: int


def choose(root: nn.Module, config: DobbConfig, predicates: Sequence[Predicate] = ()) -> Choice:
    """Choose the weights that Dobb manages: those of `nn.Linear` layers that nothing speaks against.

    Args:
        root: the model.
        config: the settings.
        predicates: functions of a weight's name and the weight; one that returns true leaves it to AdamW.

    Raises:
        ConfigError: if a name pattern names nothing.
        BlockError: if the blocks do not divide a layer's input features.
        UnsupportedError: if weights are shards of some other library.
    """
    parameters = dict(root.named_parameters())
    _check_supported(parameters)
    layers: dict[nn.Parameter, list[tuple[str, nn.Linear]]] = {}
    for path, module in root.named_modules():
        weight = module._parameters.get("weight") if isinstance(module, nn.Linear) else None
        if isinstance(module, nn.Linear) and weight is not None and weight.requires_grad:
            layers.setdefault(weight, []).append((f"{path}.weight" if path else "weight", module))
    _check_patterns(root, config, [name for owners in layers.values() for name, _ in owners])
    embeddings = {m.weight for m in root.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    outputs = _output_layers(root)
    dobb: dict[str, LinearWeight] = {}
    adamw: dict[str, str] = {}
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            continue
        owners = layers.get(parameter, [])
        modules = tuple(module for _, module in owners)
        names = [name, *(alias for alias, _ in owners)]
        reason: str | None
        if parameter in embeddings:
            reason = "output layer and embedding, tied" if owners else "embedding"
        elif not owners:
            reason = _shape_reason(parameter)
        elif outputs & set(modules):
            reason = "output layer, by get_output_embeddings()"
        else:
            reason = _why_not(parameter, modules, names, config, predicates)
        if reason:
            adamw[name] = reason
            continue
        output_side = config.side == "output"
        features = parameter.shape[0 if output_side else 1]
        asked, pattern = config.blocks_of(name), config.pattern_of(name)
        width = block_width(name, features, side=config.side, pattern=pattern, **asked)
        dobb[name] = LinearWeight(name, parameter, modules, width, output_side)
        _warn_of_output_layer(dobb[name], embeddings)
    return Choice(dobb, adamw, sum(not p.requires_grad for p in parameters.values()))


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and torch.compile, whose names are those of its own state_dict."""
    while True:
        if isinstance(model, nn.DataParallel):
            raise UnsupportedError(
                "nn.DataParallel runs copies of the model, whose activations Dobb does not see: use "
                "DistributedDataParallel"
            )
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model.get_submodule("_orig_mod")
        else:
            return model


class BatchCapture(Capture):
    """A capture that counts sequences along the leading dimension of the model's own input.

    A layer that sees sequences flattened into tokens then gives its share of them, in proportion.
    """

    style: ClassVar[Style] = Style.KEYWORD
    batch: int | None = None
    gradients: tuple[Any, ...] | None = None

    def begin(self, armed: bool, keys: Collection[str] | None = None) -> None:
        """See `Capture.begin`."""
        super().begin(armed, keys)
        self.gradients = None

    def taken(self, sequences: int) -> int:
        """How many of the leading `sequences` entries of a layer's input to take."""
        if not self.counting:  # a layer called outside of the model
            self.gradients = self._gradients()
        batch = (self.batch if self.counting else None) or sequences
        return -(-sequences * super().taken(batch) // batch) if batch else 0

    def backward_has_run(self) -> bool:
        """Whether no forward call of this step still waits for its gradients. True before the first one."""
        return self.gradients is None or self.gradients != self._gradients()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super()._enter(module, args, kwargs)
        if self.counting:
            tensors = _tensors([*args, *kwargs.values()])
            self.batch = next((t.shape[0] for t in tensors if t.ndim), None)
            self.gradients = self._gradients()

    def _gradients(self) -> tuple[Any, ...]:
        """What changes when a gradient of one of the weights is made or added to."""
        weights = (source.module.weight for source in self.sources)
        return tuple(None if w.grad is None else (id(w.grad), w.grad._version) for w in weights)


def _input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The input of an `nn.Linear`, `[batch, ..., n]`."""
    x: Tensor = args[0] if args else kwargs["input"]
    return x if x.ndim > 1 else x[None]


def _output(module: nn.Module, output: Any) -> Tensor:
    """The output of an `nn.Linear`, `[batch, ..., m]` or `[m]`."""
    assert isinstance(output, Tensor)
    return output


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors(list(value.values()))
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _check_supported(parameters: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(f"{name} has no shape yet: run the model once, then build the optimizer")
        if hasattr(parameter, "device_mesh"):
            raise UnsupportedError(
                f"{name} is a DTensor: Dobb needs whole weights on every rank; use DistributedDataParallel, or "
                "Megatron for sharded models"
            )


def _check_patterns(root: nn.Module, config: DobbConfig, layers: Sequence[str]) -> None:
    everything = [name for name, _ in root.named_parameters(remove_duplicate=False)]
    used = {pattern for pattern in config.exclude if any(matches(pattern, name) for name in everything)}
    for patterns in (config.blocks_for, config.log_diagnostics_weights):
        used |= {pattern for pattern in patterns if any(matches(pattern, name) for name in layers)}
    config.check_patterns_used(used)


def _output_layers(root: nn.Module) -> set[nn.Module]:
    """What models in the manner of Hugging Face's name as their output layers."""
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
    config: DobbConfig,
    predicates: Sequence[Predicate],
) -> str | None:
    if any(isinstance(module, NonDynamicallyQuantizableLinear) for module in modules):
        return "weight that nn.MultiheadAttention multiplies without calling its layer"
    if weight.ndim != 2 or weight.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        return f"{weight.ndim}-D weight of {weight.dtype}"
    if any(config.excluded(name) for name in names) or any(p(name, weight) for p in predicates for name in names):
        return "excluded"
    return None


def _shape_reason(parameter: nn.Parameter) -> str:
    if parameter.ndim < 2:
        return "norm, bias or other vector"
    return f"{parameter.ndim}-D parameter that is no weight of an nn.Linear"


def _warn_of_output_layer(weight: LinearWeight, embeddings: set[Tensor]) -> None:
    shape = weight.parameter.shape
    if weight.rows > weight.columns and any(e.shape == shape for e in embeddings):
        logger.warning(
            "%s has the shape of an embedding, %d x %d, and is on Dobb; if it is the output layer, leave it to AdamW "
            "with exclude=[%r]",
            *(weight.name, *shape, weight.name),
        )
