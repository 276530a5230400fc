"""Stand-ins for Transformer Engine's layers on machines without a GPU, below Megatron's own wrappers of them.

    import testbed
    testbed.enable()
    testbed.transformer_engine.install()    # before Megatron is imported

Then Megatron believes that Transformer Engine is installed, and its `TELinear` and the like are its own code on top of
these classes. They have the attributes, the call signatures, the division over tensor-parallel ranks and the tensor
that a forward hook sees of the real classes; they compute forward only, in plain torch, and keep what multiplied their
weights in `multiplied`. They show what Megatron does with such layers. They cannot show what Transformer Engine does.

`install(real=True)` takes the classes of an installed Transformer Engine instead, whose compiled extension need not be
there, and gives them these forward functions: what a constructor makes is real then.
"""

import contextlib
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

VERSION = "2.2.0"


def install(*, real: bool = False) -> None:
    """Make `import transformer_engine` find the stand-ins, or the real package with their forward functions.

    Raises:
        RuntimeError: if Megatron is imported already, and so has decided whether there is a Transformer Engine.
    """
    if "megatron.core.extensions.transformer_engine" in sys.modules:
        raise RuntimeError("install the stand-ins before Megatron is imported: it has looked for the real ones already")
    if real:
        _stub_extension()
        import transformer_engine.pytorch as pytorch

        for kind in (Linear, LayerNormLinear, GroupedLinear, LayerNorm, RMSNorm):
            getattr(pytorch, kind.__name__).forward = kind.forward
        _construct_without_a_gpu()
        return
    for name, content in _package().items():
        module = types.ModuleType(name)
        module.__path__ = []
        module.__spec__ = importlib.util.spec_from_loader(name, None)
        vars(module).update(content)
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)


# What the layers compute.


def linear(layer: Any, inp: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`Linear.forward`."""
    return _multiply(layer, inp)


def layer_norm_linear(layer: Any, inp: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`LayerNormLinear.forward`."""
    gamma = layer.layer_norm_weight + 1 if layer.zero_centered_gamma else layer.layer_norm_weight
    if layer.normalization == "RMSNorm":
        x = F.rms_norm(inp, inp.shape[-1:], gamma, layer.eps)
    else:
        x = F.layer_norm(inp, inp.shape[-1:], gamma, layer.layer_norm_bias, layer.eps)
    return _multiply(layer, x)


def norm(layer: Any, x: Tensor) -> Tensor:
    """`LayerNorm.forward` and `RMSNorm.forward`; only the former has a bias."""
    gamma = layer.weight + 1 if layer.zero_centered_gamma else layer.weight
    bias = getattr(layer, "bias", None)
    if bias is None:
        return F.rms_norm(x, x.shape[-1:], gamma, layer.eps)
    return F.layer_norm(x, x.shape[-1:], gamma, bias, layer.eps)


def grouped_linear(layer: Any, inp: Tensor, m_splits: Any, *args: Any, **kwargs: Any) -> Any:
    """`GroupedLinear.forward`."""
    rows = inp.reshape(-1, inp.shape[-1]).split([int(n) for n in m_splits])
    layer.multiplied = [part.detach().clone() for part in rows]
    weights = [getattr(layer, f"weight{i}") for i in range(layer.num_gemms)]
    output = torch.cat([part @ weight.T for part, weight in zip(rows, weights, strict=True)])
    return output.view(*inp.shape[:-1], -1)


def _multiply(layer: Any, x: Tensor) -> Any:
    """Gather the sequence, multiply, and sum over tensor parallelism, as the layer's mode says."""
    if layer.parallel_mode == "column" and layer.sequence_parallel:
        parts = [torch.empty_like(x) for _ in range(layer.tp_size)]
        dist.all_gather(parts, x.detach(), group=layer.tp_group)
        x = torch.cat(parts)
    layer.multiplied = x.detach().clone()
    output = x @ layer.weight.T
    if layer.parallel_mode == "row" and layer.tp_size > 1:
        output = output.detach().clone()
        dist.all_reduce(output, group=layer.tp_group)
        if layer.sequence_parallel:
            output = output.chunk(layer.tp_size)[layer.tp_group.rank()]
    bias = layer.bias if isinstance(layer.bias, nn.Parameter) and layer.bias.numel() else None
    if layer.return_bias:
        return output, bias
    return output if bias is None else output + bias


# The classes.


class _Parallel(nn.Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        parallel_mode: str | None = None,
        params_dtype: torch.dtype = torch.float32,
        rng_tracker_name: str | None = None,
        **ignored: Any,
    ) -> None:
        super().__init__()
        self.parallel_mode, self.tp_group, self.tp_size = parallel_mode, tp_group, tp_size
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        self.return_bias, self.use_bias = return_bias, bias
        self.rng_tracker_name = rng_tracker_name
        self.in_features = in_features // (tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (tp_size if parallel_mode == "column" else 1)
        self._make_weights(init_method or nn.init.normal_, params_dtype)

    def _make_weights(self, init_method: Any, dtype: torch.dtype) -> None:
        self.weight = self._matrix(init_method, dtype)
        self.bias: Any = nn.Parameter(torch.zeros(self.out_features, dtype=dtype)) if self.use_bias else Tensor()

    def _matrix(self, init_method: Any, dtype: torch.dtype) -> nn.Parameter:
        weight = nn.Parameter(torch.empty(self.out_features, self.in_features, dtype=dtype))
        init_method(weight)
        weight.tensor_model_parallel = self.tp_size > 1 and self.parallel_mode is not None
        weight.partition_dim, weight.partition_stride = int(self.parallel_mode == "row"), 1
        return weight


class Linear(_Parallel):
    """A stand-in for `transformer_engine.pytorch.Linear`."""

    forward = linear


class LayerNormLinear(_Parallel):
    """A stand-in for `transformer_engine.pytorch.LayerNormLinear`."""

    forward = layer_norm_linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        **kwargs: Any,
    ) -> None:
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.normalized = in_features
        super().__init__(in_features, out_features, **kwargs)

    def _make_weights(self, init_method: Any, dtype: torch.dtype) -> None:
        # Before the weight, as Transformer Engine registers them.
        gamma = torch.full((self.normalized,), float(not self.zero_centered_gamma))
        self.layer_norm_weight = nn.Parameter(gamma)
        bias = nn.Parameter(torch.zeros(self.normalized)) if self.normalization != "RMSNorm" else None
        self.register_parameter("layer_norm_bias", bias)
        super()._make_weights(init_method, dtype)


class GroupedLinear(_Parallel):
    """A stand-in for `transformer_engine.pytorch.GroupedLinear`."""

    forward = grouped_linear

    def __init__(self, num_gemms: int, in_features: int, out_features: int, **kwargs: Any) -> None:
        self.num_gemms = num_gemms
        kwargs["bias"] = False
        super().__init__(in_features, out_features, **kwargs)

    def _make_weights(self, init_method: Any, dtype: torch.dtype) -> None:
        for number in range(self.num_gemms):
            self.register_parameter(f"weight{number}", self._matrix(init_method, dtype))


class LayerNorm(nn.Module):
    """A stand-in for `transformer_engine.pytorch.LayerNorm`."""

    forward = norm

    def __init__(
        self, normalized_shape: int, eps: float = 1e-5, zero_centered_gamma: bool = False, **ignored: Any
    ) -> None:
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.weight = nn.Parameter(torch.full((normalized_shape,), float(not zero_centered_gamma)))
        self.bias: nn.Parameter | None = nn.Parameter(torch.zeros(normalized_shape))


class RMSNorm(LayerNorm):
    """A stand-in for `transformer_engine.pytorch.RMSNorm`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bias = None


# The package.


def _package() -> dict[str, dict[str, Any]]:
    """The modules, and what Megatron takes from them while it is imported and builds a model."""

    def unused(*names: str) -> dict[str, Any]:
        return {name: type(name, (nn.Module,), {}) for name in names}

    layers = {kind.__name__: kind for kind in (Linear, LayerNormLinear, GroupedLinear, LayerNorm, RMSNorm)}
    contexts = dict.fromkeys(("fp8_autocast", "fp8_model_init"), contextlib.nullcontext)
    distributed = ("activation_recompute_forward", "CudaRNGStatesTracker")
    quantized = type("QuantizedTensor", (), {})
    prefix = "transformer_engine"
    return {
        prefix: {"__version__": VERSION},
        f"{prefix}.common": {},
        f"{prefix}.common.recipe": unused("DelayedScaling", "Format"),
        f"{prefix}.pytorch": layers | contexts | unused("DotProductAttention"),
        f"{prefix}.pytorch.fp8": contexts | unused("FP8GlobalStateManager"),
        f"{prefix}.pytorch.distributed": unused(*distributed),
        f"{prefix}.pytorch.tensor": {"QuantizedTensor": quantized},
        f"{prefix}.pytorch.ops": unused("FusibleOperation", "Sequential", "RMSNorm", "MakeExtraOutput"),
    }


def _stub_extension() -> None:
    """Let `transformer_engine.pytorch` be imported without its compiled part, of which nothing is ever called."""

    class Enumeration(type):
        """A class of whose members there is one for every name that is asked for; it can be called, too."""

        def __getattr__(cls, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            member = int.__new__(cls, len(cls.__members__))
            member.name = name
            setattr(cls, name, member)
            cls.__members__[name] = member
            return member

        def __iter__(cls) -> Any:
            return iter(())

    def enumeration(name: str) -> Any:
        content = {"__members__": {}, "__new__": lambda kind, *args, **kwargs: int.__new__(kind, 0)}
        return Enumeration(name, (int,), content)

    class Extension(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            setattr(self, name, enumeration(name))
            return getattr(self, name)

    sys.modules["transformer_engine_torch"] = Extension("transformer_engine_torch")
    import transformer_engine.common as common

    common.load_framework_extension = lambda framework: None
    loaded: Sequence[str] = [name for name in sys.modules if name.startswith("transformer_engine.pytorch")]
    for name in loaded:
        del sys.modules[name]


def _construct_without_a_gpu() -> None:
    """Transformer Engine's layers ask for a GPU when they are made."""
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    original: Any = TransformerEngineBaseModule.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        with mock.patch.object(torch.cuda, "is_available", return_value=True):
            original(self, *args, **kwargs)

    TransformerEngineBaseModule.__init__ = __init__
