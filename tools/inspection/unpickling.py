"""Read the pickles of a checkpoint without running what is in them, and without the packages that wrote them."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_BUILTINS = ("bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "object", "range",
             "set", "slice", "str", "tuple")  # fmt: skip
_ALLOWED = {
    "builtins": _BUILTINS,
    "__builtin__": _BUILTINS,
    "_codecs": ("encode",),
    "argparse": ("Namespace",),
    "collections": ("Counter", "OrderedDict", "defaultdict", "deque"),
    "io": ("BytesIO",),
    "_io": ("BytesIO",),
    "torch._utils": ("_rebuild_parameter", "_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.nn.parameter": ("Parameter",),
    "torch.serialization": ("_get_layout",),
}
_TYPES_OF = (
    *("torch", "torch.storage", "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner"),
)
_PLAIN = (type, torch.dtype, torch.layout, torch.memory_format)


class Unknown:
    """Stands for an object of a class that is not needed here."""

    def __new__(cls, *args: Any, **keywords: Any) -> "Unknown":
        """Take what the class would have taken."""
        return super().__new__(cls)

    def __init__(self, *args: Any, **keywords: Any) -> None:
        self.arguments = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update({str(name): value for name, value in state.items()})

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """Ignore an entry."""

    def extend(self, values: Any) -> None:
        """Ignore entries."""


class Unpickler(pickle.Unpickler):
    """Knows tensors and plain values, and makes everything else `Unknown`."""

    def find_class(self, module: str, name: str) -> Any:
        """The class or function of a name in a pickle, if it is known to be harmless."""
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module in _TYPES_OF and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, _PLAIN):
                return found
        return type(name, (Unknown,), {"__module__": module})


class _Careful:
    """What `torch.load` takes for the module `pickle`."""

    Unpickler = Unpickler
    load: Callable[..., Any] = staticmethod(lambda file, **options: Unpickler(file, **options).load())


def load(file: Any) -> Any:
    """What `torch.save` wrote to a path or an open file; tensors of a path stay on disk until they are looked at."""
    if isinstance(file, Path):
        try:
            return torch.load(file, map_location="cpu", mmap=True, weights_only=False, pickle_module=_Careful)
        except RuntimeError as error:
            if "mmap" not in str(error):  # the format of old releases
                raise
    return torch.load(file, map_location="cpu", weights_only=False, pickle_module=_Careful)
