"""Record what a rank asks torch.distributed to do.

    with traffic.record() as calls:
        optimizer.step()
    assert [call.name for call in calls] == ["reduce_scatter_tensor", "all_gather_into_tensor"]

A call is recorded when it is made, in order, whether it is asynchronous or coalesced, and by whatever thread. What
torch.distributed calls on its own to carry it out is not. Besides torch.distributed's own attributes, every name in a
loaded Megatron module (or this project's) that is bound to one of these functions is replaced: Megatron keeps aliases
such as `dist_reduce_scatter_func`. Out of sight are calls of methods of a process group, and functions that were stored
before the recording began anywhere but in a module's namespace.
"""

import contextlib
import functools
import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

_MODULES = ("torch.distributed", "torch.distributed.distributed_c10d")
_PACKAGES = ("megatron", "megatron_dobb", "testbed")


@dataclass(frozen=True)
class Call:
    """One call, as this rank made it."""

    name: str
    """Its public name: `_all_gather_base` and `all_gather_single` appear as `all_gather_into_tensor`."""
    ranks: tuple[int, ...]
    """Global ranks of the group; of point-to-point calls too."""
    dtype: torch.dtype | None
    """None for barriers and objects."""
    sent: int
    """Bytes of the buffers this rank puts in."""
    received: int
    """Bytes of the buffers it gets back; equal to `sent` for all_reduce."""
    peer: int | None = None
    """Global rank of the root or the other side, where there is one."""
    coalesced: int | None = None
    """The number, within the recording, of the coalescing manager around the call."""
    beside: bool = False
    """Whether a thread other than the program's made it."""

    @property
    def numel(self) -> int:
        """Elements of the larger of the two sides: the whole buffer of a gather or scatter."""
        return max(self.sent, self.received) // self.dtype.itemsize if self.dtype else 0


@dataclass(frozen=True)
class _Function:
    """How to read the arguments of a function of torch.distributed."""

    name: str
    sent: str = ""
    received: str = ""
    peer: str = ""
    rooted: bool = False
    """The one buffer goes out on the root and comes in everywhere else."""


_FUNCTIONS = {
    "all_reduce": _Function("all_reduce", "tensor", "tensor"),
    "reduce_scatter_tensor": _Function("reduce_scatter_tensor", "input", "output"),
    "reduce_scatter_single": _Function("reduce_scatter_tensor", "input", "output"),
    "_reduce_scatter_base": _Function("reduce_scatter_tensor", "input", "output"),
    "reduce_scatter": _Function("reduce_scatter", "input_list", "output"),
    "all_gather_into_tensor": _Function("all_gather_into_tensor", "input_tensor", "output_tensor"),
    "all_gather_single": _Function("all_gather_into_tensor", "input_tensor", "output_tensor"),
    "_all_gather_base": _Function("all_gather_into_tensor", "input_tensor", "output_tensor"),
    "all_gather": _Function("all_gather", "tensor", "tensor_list"),
    "all_to_all_single": _Function("all_to_all_single", "input", "output"),
    "all_to_all": _Function("all_to_all", "input_tensor_list", "output_tensor_list"),
    "broadcast": _Function("broadcast", "tensor", peer="src", rooted=True),
    "reduce": _Function("reduce", "tensor", peer="dst"),
    "gather": _Function("gather", "tensor", "gather_list", peer="dst"),
    "scatter": _Function("scatter", "scatter_list", "tensor", peer="src"),
    "send": _Function("send", "tensor", peer="dst"),
    "isend": _Function("isend", "tensor", peer="dst"),
    "recv": _Function("recv", "", "tensor", peer="src"),
    "irecv": _Function("irecv", "", "tensor", peer="src"),
    "all_gather_object": _Function("all_gather_object"),
    "gather_object": _Function("gather_object", peer="dst"),
    "broadcast_object_list": _Function("broadcast_object_list", peer="src"),
    "scatter_object_list": _Function("scatter_object_list", peer="src"),
    "barrier": _Function("barrier"),
    "monitored_barrier": _Function("monitored_barrier"),
}


@contextlib.contextmanager
def record() -> Iterator[list[Call]]:
    """Record this process's calls into the list that it yields."""
    recorder = _Recorder()
    replacements = recorder.replacements()
    replaced: list[tuple[Any, str, Any]] = []
    try:
        for module in _modules():
            for name, value in list(vars(module).items()):
                if inspect.isfunction(value) and value in replacements:
                    replaced.append((module, name, value))
                    setattr(module, name, replacements[value])
        yield recorder.calls
    finally:
        recorder.active = False
        for module, name, value in replaced:
            setattr(module, name, value)


def _modules() -> list[Any]:
    loaded = list(sys.modules.items())
    return [m for name, m in loaded if m and (name in _MODULES or name.partition(".")[0] in _PACKAGES)]


class _Recorder:
    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.active = True  # a wrapper may outlive the recording in a module that was imported meanwhile
        self._of_thread = threading.local()
        self._coalesced: int | None = None
        self._managers = itertools.count()

    @property
    def _inside(self) -> bool:
        """Whether this thread is inside of a recorded call."""
        return getattr(self._of_thread, "inside", False)

    @_inside.setter
    def _inside(self, inside: bool) -> None:
        self._of_thread.inside = inside

    def replacements(self) -> dict[Callable[..., Any], Callable[..., Any]]:
        """The recording stand-in of every function."""
        wrapped: dict[Callable[..., Any], Callable[..., Any]] = {}
        for owner in (dist, dist.distributed_c10d):  # the test bed has replaced some of the first's functions
            for name, function in _FUNCTIONS.items():
                if original := getattr(owner, name, None):
                    wrapped[original] = self._wrap(original, function)
        wrapped[dist.batch_isend_irecv] = self._wrap_batch(dist.batch_isend_irecv)
        wrapped[dist._coalescing_manager] = self._wrap_manager(dist._coalescing_manager)
        return wrapped

    def _wrap(self, original: Callable[..., Any], function: _Function) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if self.active and not self._inside:
                self._add(function, signature.bind(*args, **kwargs).arguments)
            with self._nested():
                return original(*args, **kwargs)

        return recorded

    def _wrap_batch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def recorded(p2p_op_list: list[Any]) -> Any:
            if self.active and not self._inside:
                for op in p2p_op_list:
                    name = op.op.__name__
                    side = "dst" if name == "isend" else "src"
                    self._add(_FUNCTIONS[name], {"tensor": op.tensor, side: op.peer, "group": op.group})
            with self._nested():
                return original(p2p_op_list)

        return recorded

    def _wrap_manager(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        @contextlib.contextmanager
        def recorded(*args: Any, **kwargs: Any) -> Iterator[Any]:
            outer, self._coalesced = self._coalesced, next(self._managers)
            try:
                with original(*args, **kwargs) as manager:
                    yield manager
            finally:
                self._coalesced = outer

        return recorded

    @contextlib.contextmanager
    def _nested(self) -> Iterator[None]:
        outer, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = outer

    def _add(self, function: _Function, arguments: dict[str, Any]) -> None:
        group: Any = arguments.get("group") or dist.group.WORLD
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            return
        peer = arguments.get(function.peer)
        if peer is None and arguments.get(f"group_{function.peer}") is not None:
            peer = dist.get_global_rank(group, arguments[f"group_{function.peer}"])
        sent, received = _tensors(arguments.get(function.sent)), _tensors(arguments.get(function.received))
        if function.rooted and peer != dist.get_rank():
            sent, received = received, sent
        dtypes = [tensor.dtype for tensor in (*sent, *received)]
        beside = threading.current_thread() is not threading.main_thread()
        self.calls.append(
            Call(
                name=function.name,
                ranks=tuple(dist.get_process_group_ranks(group)),
                dtype=dtypes[0] if dtypes else None,
                sent=sum(tensor.nbytes for tensor in sent),
                received=sum(tensor.nbytes for tensor in received),
                peer=peer,
                coalesced=None if beside else self._coalesced,
                beside=beside,
            )
        )


def _tensors(argument: Any) -> list[torch.Tensor]:
    if argument is None:
        return []
    return [argument] if isinstance(argument, torch.Tensor) else list(argument)
