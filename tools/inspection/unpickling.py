"""Read the pickles of a checkpoint without running what is in them, and without the packages that wrote them.

`torch.load(weights_only=True)` is not enough: beside the tensors, it refuses a whole file for one `defaultdict` or name
of the module `os`, even with stand-ins among its safe globals, and cannot read the index of
`torch.distributed.checkpoint`, which `FileSystemReader` unpickles without any restriction.
"""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_BUILTINS = "bool bytearray bytes complex dict float frozenset int list object range set slice str tuple"
_ALLOWED = {
    "builtins": _BUILTINS,
    "__builtin__": _BUILTINS,
    "_codecs": "encode",
    "argparse": "Namespace",
    "collections": "Counter OrderedDict defaultdict deque",
    "io": "BytesIO",
    "_io": "BytesIO",
    "torch._utils": "_rebuild_parameter _rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    "torch.nn.parameter": "Parameter",
    "torch.serialization": "_get_layout",
}
_TYPES_OF = ["torch", "torch.storage", "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner"]


class Unknown:
    """Stands for an object of a class that is not needed here, and ignores what is put into it."""

    def __new__(cls, *args: Any, **keywords: Any) -> "Unknown":
        """Take what the class would have taken."""
        return super().__new__(cls)

    def _ignore(self, *values: Any) -> None:
        pass

    __setstate__ = __setitem__ = append = extend = _ignore


class Unpickler(pickle.Unpickler):
    """Knows tensors and plain values, and makes everything else `Unknown`."""

    def find_class(self, module: str, name: str) -> Any:
        """The class or function of a name in a pickle, if it is known to be harmless."""
        if name in _ALLOWED.get(module, "").split():
            return super().find_class(module, name)
        if module in _TYPES_OF and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type | torch.dtype | torch.layout | torch.memory_format):
                return found
        return type(name, (Unknown,), {"__module__": module})


class _Careful:
    """Takes the place of the module `pickle` in `torch.load`."""

    Unpickler = Unpickler
    load: Callable[..., Any] = staticmethod(lambda file, **options: Unpickler(file, **options).load())


def load(file: Any) -> Any:
    """Load what `torch.save` wrote to a path or an open file; tensors of a path stay on disk until they are used."""
    if isinstance(file, Path):
        try:
            return torch.load(file, map_location="cpu", mmap=True, weights_only=False, pickle_module=_Careful)
        except RuntimeError as error:
            if "mmap" not in str(error):  # the format of old releases
                raise
    return torch.load(file, map_location="cpu", weights_only=False, pickle_module=_Careful)
