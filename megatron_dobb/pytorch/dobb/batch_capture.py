"""Capture the first sequences of a batch, counted along the leading dimension of the model's input."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from ...errors import Style
from ...methods.dobb.capture import Capture


class BatchCapture(Capture):
    """Capture that counts sequences along the leading dimension of the model's own input.

    From a layer whose input flattens sequences into tokens, it takes a proportional share of the tokens.
    """

    style: ClassVar[Style] = Style.KEYWORD
    batch: int | None = None
    gradients: tuple[Any, ...] | None = None

    def begin(self, armed: bool, keys: Collection[str] | None = None) -> None:
        """Start a step, as `Capture.begin` does."""
        super().begin(armed, keys)
        self.gradients = None

    def taken(self, sequences: int) -> int:
        """Number of the leading `sequences` entries of a layer's input to take."""
        if not self.counting:  # a layer called outside of the model
            self.gradients = self._gradients()
        batch = (self.batch if self.counting else None) or sequences
        return -(-sequences * super().taken(batch) // batch) if batch else 0

    def backward_has_run(self) -> bool:
        """Return whether no forward call of this step still waits for gradients; true before the first call."""
        return self.gradients is None or self.gradients != self._gradients()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super()._enter(module, args, kwargs)
        if self.counting:
            tensors = _tensors([*args, *kwargs.values()])
            self.batch = next((t.shape[0] for t in tensors if t.ndim), None)
            self.gradients = self._gradients()

    def _gradients(self) -> tuple[Any, ...]:
        """Identity and version of the weights' gradients, which change when one is made or added to."""
        weights = (source.module.weight for source in self.sources)
        return tuple(None if w.grad is None else (id(w.grad), w.grad._version) for w in weights)


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors(list(value.values()))
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
