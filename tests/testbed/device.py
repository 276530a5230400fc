"""Patches of torch that make the device "cuda" the CPU."""

import contextlib
import functools
import logging
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

_LIKE_CONSTRUCTORS = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
_TENSOR_CONSTRUCTORS = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided")


class NoStream:
    """A stream: on the CPU everything has already run in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def _nothing(self, *args: Any, **kwargs: Any) -> "NoStream":
        return self

    record = wait = synchronize = wait_event = wait_stream = record_event = _nothing

    def query(self) -> bool:
        """Whether the work is done: always."""
        return True

    def elapsed_time(self, end: "NoStream") -> float:
        """Milliseconds until `end`: unknown."""
        return 0.0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The least and the greatest priority."""
        return 0, 0


class NoEvent(NoStream):
    """An event."""


def patch() -> None:
    """Patch torch for this process."""
    _patch_cuda_module()
    _patch_random_numbers()
    _patch_tensors()


def names_cuda(device: Any) -> bool:
    """Whether an argument means a GPU: an index, a string or a `torch.device`."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def _patch_cuda_module() -> None:
    # No function stands in under two names: dynamo has a rule for each name and refuses two for one function.
    cuda: Any = torch.cuda
    # With True, torch itself would believe in a GPU: the DataLoader would pin memory, for one.
    cuda.is_available = lambda: False
    cuda.device_count = lambda: 1  # with 0, Megatron sets up no parallel groups
    cuda.current_device = lambda: 0  # an int: Megatron also writes f"cuda:{current_device()}"
    cuda.set_device = lambda device: None
    cuda.get_device_capability = lambda device=None: (8, 0)
    cuda.get_device_properties = lambda device=None: types.SimpleNamespace(
        name="cpu", major=8, minor=0, total_memory=1 << 34, multi_processor_count=1
    )
    cuda.Stream = NoStream
    cuda.Event = NoEvent
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.set_stream = lambda stream: None
    cuda.current_stream = lambda device=None: NoStream()
    cuda.default_stream = lambda device=None: NoStream()
    cuda.synchronize = lambda device=None: None
    cuda.empty_cache = lambda: None


def _patch_random_numbers() -> None:
    cuda: Any = torch.cuda
    # Unless CUDA counts as initialised, seeding it is only queued, silently, and every rank draws the same numbers.
    cuda.is_initialized = lambda: True
    cuda.default_generators = (torch.default_generator,)
    cuda.random.current_device = lambda: 0
    # Megatron's tracker of the GPU's generator warns at every fork that the CPU's state changed. Here it must.
    tracker_log = logging.getLogger("megatron.core.tensor_parallel.random")
    tracker_log.addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _patch_tensors() -> None:
    # `_device_constructors` caches what it finds, so this call must come before the patches.
    for name in {f.__name__ for f in _device_constructors()}.union(_LIKE_CONSTRUCTORS):
        if hasattr(torch, name):
            setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor: Any = torch.Tensor
    for name in _TENSOR_CONSTRUCTORS:
        setattr(tensor, name, _on_cpu(getattr(tensor, name)))

    original_to, original_type = tensor.to, tensor.type

    @functools.wraps(original_to)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and names_cuda(args[0]):
            args = ("cpu", *args[1:])
        if names_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return original_to(self, *args, **kwargs)

    @functools.wraps(original_type)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Megatron's optimizers sort parameters by names such as 'torch.cuda.FloatTensor' and refuse others.
        result = original_type(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    tensor.to = to
    tensor.type = type_
    tensor.cuda = lambda self, *args, **kwargs: self


def _on_cpu(constructor: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(constructor)
    def construct(*args: Any, **kwargs: Any) -> torch.Tensor:
        if names_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return constructor(*args, **kwargs)

    return construct
