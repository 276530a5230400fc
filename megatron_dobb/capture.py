"""Second-moment sums of a model's input activations, taken by forward hooks on refresh steps."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .ops import Backend, gram_

ActivationOf = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Tensor]


@dataclass(frozen=True)
class Source:
    """Where the input activations of one managed weight can be seen.

    Attributes:
        key: the weight's name.
        module: the module whose forward call multiplies the weight.
        width: width of the weight's blocks.
        activation: returns the tensor that multiplies the weight, `[..., n]`, from a forward call's arguments.
        sequence_dim: the dimension of that tensor that counts sequences.
    """

    key: str
    module: nn.Module
    width: int
    activation: ActivationOf
    sequence_dim: int


@dataclass
class MomentSum:
    """`sum_tokens x_j x_j^T`, `[blocks, b, b]` fp32 or None before the first token, and the number of tokens."""

    total: Tensor | None = None
    tokens: int = 0


@dataclass
class Capture:
    """Hooks on a model that sum the moments of the first sequences of each global batch.

    The global batch is counted as Megatron deals it out: micro-batch `i` of rank `r` holds sequences
    `(i * ranks + r) * s` to `(i * ranks + r + 1) * s - 1`, for micro-batches of `s` sequences. Which sequences are
    taken therefore depends neither on `s` nor on `ranks`.

    Attributes:
        root: the model; each of its forward calls in training mode is one micro-batch, unless it runs without
            gradients (a validation).
        sources: what to capture.
        sequences: how many sequences of a global batch to take; None takes all of them.
        rank: this rank's place among the data-parallel ranks.
        ranks: number of data-parallel ranks that hold different sequences.
        default_to_first: with `sequences` None, settle it at the first captured micro-batch as one micro-batch of
            every rank.
        backend: what computes the sums, see `ops.gram_`.
        counting: whether the root's current forward call is a micro-batch; None outside of such calls.
    """

    root: nn.Module
    sources: Iterable[Source]
    sequences: int | None
    rank: int = 0
    ranks: int = 1
    default_to_first: bool = False
    backend: Backend = "auto"
    armed: bool = False
    microbatch: int = -1
    counting: bool | None = None
    sums: dict[str, MomentSum] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sources = list(self.sources)
        self.handles = [
            self.root.register_forward_pre_hook(_Hook(self, self._enter), with_kwargs=True),
            self.root.register_forward_hook(_Hook(self, self._leave), always_call=True),
        ]
        for source in self.sources:
            self.handles.append(source.module.register_forward_hook(_Hook(self, self._hook(source)), with_kwargs=True))
        self.begin(armed=False)

    def begin(self, armed: bool) -> None:
        """Start a step, or start it again: forget what was captured and count micro-batches from zero."""
        self.armed = armed
        self.microbatch = -1
        self.sums = {source.key: MomentSum() for source in self.sources}

    def take(self) -> dict[str, MomentSum]:
        """Hand over the sums of this step and disarm."""
        sums = self.sums
        self.begin(armed=False)
        return sums

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def taken(self, sequences: int) -> int:
        """How many of this rank's current micro-batch of `sequences` sequences to take."""
        if sequences == 0:
            return 0
        if self.sequences is None:
            if not self.default_to_first:
                return sequences
            self.sequences = sequences * self.ranks
        first = (max(self.microbatch, 0) * self.ranks + self.rank) * sequences
        return min(max(self.sequences - first, 0), sequences)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Whether gradients are recorded is asked here and not at the layers: reentrant recompute switches them off
        # for the layers' first forward pass.
        if not _in_backward():
            self.counting = module.training and torch.is_grad_enabled()
            self.microbatch += self.counting

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not _in_backward():
            self.counting = None

    def _hook(self, source: Source) -> Callable[..., None]:
        def capture(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if not module.training or _in_backward():
                return
            if not (torch.is_grad_enabled() if self.counting is None else self.counting):
                return
            with torch.no_grad():
                x = source.activation(module, args, kwargs).detach()
                count = self.taken(x.shape[source.sequence_dim])
                if count == 0:
                    return
                x = x.narrow(source.sequence_dim, 0, count)
                entry = self.sums[source.key]
                if entry.total is None:
                    width = source.width
                    entry.total = x.new_zeros(x.shape[-1] // width, width, width, dtype=torch.float32)
                gram_(entry.total, x, source.width, self.backend)
                entry.tokens += x.numel() // x.shape[-1]

        return capture


class _Hook:
    """A hook that acts on the steps for which its capture is armed; torch.compile traces nothing of it.

    It belongs to one model: a copy of the model, or what is unpickled from it, has one that never does anything.
    """

    def __init__(self, capture: Capture | None = None, call: Callable[..., None] | None = None) -> None:
        self._capture = capture
        self._call = torch.compiler.disable(call) if call is not None else None

    def __call__(self, *args: Any) -> None:
        if self._capture is not None and self._call is not None and self._capture.armed:
            self._call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Hook":
        return _Hook()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ()


def _in_backward() -> bool:
    """Whether autograd is running, so that a forward call is an activation recompute and was captured before."""
    return torch._C._current_graph_task_id() != -1
