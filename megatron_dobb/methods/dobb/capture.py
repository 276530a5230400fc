"""Capture second-moment sums of a model's activations, or of their gradients, with hooks on refresh steps."""

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...errors import CaptureError, Style
from .kernels import Backend, gram_

_NOT_TRACED = "Dobb takes its second moments here on refresh steps: use torch.compile without fullgraph=True"


@dataclass(frozen=True)
class Source:
    """Layer at which to capture one managed weight's input activations or output gradients.

    Attributes:
        key: the weight's name.
        module: the module whose forward call multiplies the weight.
        width: width of the weight's blocks.
        activation: returns the tensor that multiplies the weight, `[..., n]`, from a forward call's arguments; with
            `of_gradient` the layer's output, `[..., m]`, from what the call returned.
        sequence_dim: the dimension of that tensor that counts sequences; with `batch`, of that module's input.
        batch: an enclosing module that receives whole sequences, if this one receives only reordered tokens (an
            expert). Its tokens cannot be separated by sequence, so whole micro-batches are captured.
        of_gradient: whether the gradient of the output is summed, when the backward pass reaches it.
    """

    key: str
    module: nn.Module
    width: int
    activation: Callable[..., Tensor]
    sequence_dim: int
    batch: nn.Module | None = None
    of_gradient: bool = False


@dataclass
class MomentSum:
    """`sum_tokens x_j x_j^T`, `[blocks, b, b]` fp32 or None before the first token, and the number of tokens.

    `calls` counts the forward calls that could have been captured, with or without tokens among the captured sequences;
    without any call, the weight's inputs are unknown.
    """

    total: Tensor | None = None
    tokens: int = 0
    calls: int = 0


def scale_sums(sums: Iterable[MomentSum], factor: float) -> None:
    """Rescale the sums in place, as if the summed tensors had been multiplied by `factor`."""
    for entry in sums:
        if entry.total is not None:
            entry.total *= factor**2


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
        backend: backend that computes the sums; see `kernels.gram_`.
        on_complete: called on an armed step at the end of the forward call after which no rank takes anything more.
        microbatches: number of micro-batches per step on each rank, None if unknown; used only when all sequences are
            taken.
        counting: whether the root's current forward call is a micro-batch; None outside of such calls.
        batches: how many sequences the `batch` modules of the sources were last given.
        keys: the sources that this step captures; None for all.
        closed: whether `on_complete` has taken all sequences of the step, so that no micro-batch may follow.
    """

    style: ClassVar[Style] = Style.FLAG
    """Style in which errors name settings."""

    root: nn.Module
    sources: Iterable[Source]
    sequences: int | None
    rank: int = 0
    ranks: int = 1
    default_to_first: bool = False
    backend: Backend = "auto"
    on_complete: Callable[[], None] | None = None
    microbatches: Callable[[], int | None] = lambda: None
    armed: bool = False
    microbatch: int = -1
    counting: bool | None = None
    sums: dict[str, MomentSum] = field(default_factory=dict)
    batches: dict[nn.Module, int] = field(default_factory=dict)
    keys: Collection[str] | None = None
    closed: bool = False
    _seen: int | None = None

    def __post_init__(self) -> None:
        self.sources = list(self.sources)
        self.handles = [
            self.root.register_forward_pre_hook(_Hook(self, self._enter), with_kwargs=True),
            self.root.register_forward_hook(_Hook(self, self._leave), always_call=True),
        ]
        # One hook per module, however many weights it has: hooks cost time on every step.
        of_module: dict[nn.Module, list[Source]] = {}
        batches: dict[nn.Module, int] = {}
        for source in self.sources:
            of_module.setdefault(source.module, []).append(source)
            if source.batch is not None:
                batches[source.batch] = source.sequence_dim
        for module, sources in of_module.items():
            self.handles.append(module.register_forward_hook(_Hook(self, self._hook(sources)), with_kwargs=True))
        for module, dim in batches.items():
            hook = _Hook(self, functools.partial(self._see_batch, dim))
            self.handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        self.begin(armed=False)

    def begin(self, armed: bool, keys: Collection[str] | None = None) -> None:
        """Start or restart a step: discard captured sums and count micro-batches from zero.

        Args:
            armed: whether to capture.
            keys: keys of the sources to capture; None for all.
        """
        self.armed, self.keys = armed, keys
        self.microbatch = -1
        self.closed, self._seen = False, None
        self.sums = {source.key: MomentSum() for source in self.sources}
        self.batches = {}

    def take(self) -> dict[str, MomentSum]:
        """Return the sums of this step and disarm."""
        sums = self.sums
        self.begin(armed=False)
        return sums

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def taken(self, sequences: int) -> int:
        """Count the sequences to capture in this rank's current micro-batch of `sequences` sequences."""
        wanted = self._wanted(sequences)
        first = (max(self.microbatch, 0) * self.ranks + self.rank) * sequences
        return sequences if wanted is None else min(max(wanted - first, 0), sequences)

    def takes_any(self, sequences: int) -> bool:
        """Return whether any rank captures part of the current micro-batch, with `sequences` sequences per rank."""
        wanted = self._wanted(sequences)
        return wanted is None or max(self.microbatch, 0) * self.ranks * sequences < wanted

    def _takes_all(self) -> bool:
        return self.sequences is None and not self.default_to_first

    def _is_complete(self) -> bool:
        """Return whether no rank captures any later micro-batch."""
        following = self.microbatch + 1
        if self._takes_all():
            total = self.microbatches()
            return total is not None and following >= total
        wanted = self._wanted(self._seen) if self._seen else None
        return wanted is not None and following * self.ranks * (self._seen or 0) >= wanted

    def _wanted(self, sequences: int) -> int | None:
        """Compute the sequences to capture per global batch, None for all, for micro-batches of `sequences`."""
        self._seen = sequences
        if self.sequences is None and self.default_to_first and sequences:
            self.sequences = sequences * self.ranks
        return self.sequences

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Whether gradients are recorded is asked here and not at the layers: reentrant recompute switches them off
        # for the layers' first forward pass.
        if not _in_backward():
            self.counting = module.training and torch.is_grad_enabled()
            if self.counting and self.closed:
                raise CaptureError(
                    f"captured as many micro-batches as Megatron reports for one step, {self.microbatches()}, and the "
                    "refresh has started, but another one came",
                    "call zero_grad before each step, or use {overlap_refresh:False}",
                    settings={"capture": "all"},
                    style=self.style,
                )
            self.microbatch += self.counting

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not _in_backward():
            ended, self.counting = self.counting and output is not None, None  # without output, by an exception
            if ended and self.on_complete is not None and self.armed and self._is_complete():
                self.on_complete()
                self.closed = self._takes_all() and not self.armed

    def _see_batch(self, dim: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.armed and not _in_backward():
            x = args[0] if args else next(iter(kwargs.values()))
            self.batches[module] = x.shape[dim]

    def _hook(self, sources: Sequence[Source]) -> Callable[..., None]:
        def capture(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if not self.armed or not module.training or _in_backward():
                return
            if not (torch.is_grad_enabled() if self.counting is None else self.counting):
                return
            with torch.no_grad():
                for source in sources:
                    if self.keys is not None and source.key not in self.keys:
                        continue
                    self.sums[source.key].calls += 1
                    if source.batch is not None and not self._takes_tokens_of(source.batch, source.key):
                        continue
                    if source.of_gradient:
                        self._await_gradient(source, source.activation(module, output))
                    else:
                        x = self._taken_part(source, source.activation(module, args, kwargs).detach())
                        self._add(source, self.sums[source.key], x)

        return capture

    def _takes_tokens_of(self, batch: nn.Module, key: str) -> bool:
        if batch not in self.batches:
            raise CaptureError(
                f"its layer was called, but not the {type(batch).__name__} around it, which shows how many sequences "
                "there are",
                "leave the weight to AdamW with {exclude}",
                subject=key,
                style=self.style,
            )
        return self.takes_any(self.batches[batch])

    def _await_gradient(self, source: Source, output: Tensor) -> None:
        """Sum the gradient of a layer's output when the backward pass computes it, for the step of this call."""
        if not output.requires_grad:
            raise CaptureError(
                "autograd does not follow the output of its layer, so {source:output-gradient} sees nothing of it",
                "use activation recompute that is not reentrant, or {source:gram}",
                subject=source.key,
                style=self.style,
            )
        entry = self.sums[source.key]
        taken = self._taken_part(source, _batched(output)).shape

        @torch.no_grad()
        def add(gradient: Tensor) -> None:
            x = _batched(gradient)
            if source.batch is None:
                x = x.narrow(source.sequence_dim, 0, taken[source.sequence_dim])
            self._add(source, entry, x)

        output.register_hook(add)

    def _taken_part(self, source: Source, x: Tensor) -> Tensor:
        """Select the captured sequences of a layer's input or output."""
        if source.batch is not None:
            return x
        if x.ndim < source.sequence_dim + 2:
            raise CaptureError(
                f"its {'output' if source.of_gradient else 'input'} has the shape {tuple(x.shape)}, of which dimension "
                f"{source.sequence_dim} cannot count sequences",
                "leave the weight to AdamW with {exclude}",
                subject=source.key,
                style=self.style,
            )
        return x.narrow(source.sequence_dim, 0, self.taken(x.shape[source.sequence_dim]))

    def _add(self, source: Source, entry: MomentSum, x: Tensor) -> None:
        if x.numel() == 0:  # no sequence is taken, or nothing was routed to this expert
            return
        if entry.total is None:
            width = source.width
            entry.total = x.new_zeros(x.shape[-1] // width, width, width, dtype=torch.float32)
        gram_(entry.total, x, source.width, self.backend)
        entry.tokens += x.numel() // x.shape[-1]


class _Hook:
    """Hook that acts only on steps for which its capture is armed; torch.compile does not trace it.

    Code that torch.compile traced before the hook was registered never runs it.

    It belongs to one model: in a copied or unpickled model, the hook does nothing.
    """

    def __init__(self, capture: Capture | None = None, call: Callable[..., None] | None = None) -> None:
        self._capture = capture
        self._call = torch.compiler.disable(call, reason=_NOT_TRACED) if call is not None else None

    def __call__(self, *args: Any) -> None:
        capture = self._capture
        if capture is not None and self._call is not None and (capture.armed or capture.closed):
            self._call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Hook":
        return _Hook()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ()


def _batched(x: Tensor) -> Tensor:
    """View a layer's output, or its gradient, with a sequence dimension."""
    return x if x.ndim > 1 else x[None]


def _in_backward() -> bool:
    """Return whether autograd is running: a forward call is then an activation recompute, already captured."""
    return torch._C._current_graph_task_id() != -1
