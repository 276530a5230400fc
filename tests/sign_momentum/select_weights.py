"""Choose the weights for sign momentum: every matrix of a layer, in whatever shards."""

from torch import nn

from megatron_dobb.megatron.model.chunk_state import ManagedWeight, Matrix, Selection
from megatron_dobb.megatron.model.select_weights import choose, embedding_or_output
from megatron_dobb.settings.patterns import first_match

from .settings import SignMomentumConfig


def select_weights(root: nn.Module, settings: SignMomentumConfig) -> Selection[ManagedWeight]:
    """Choose and tag the managed weights of a model chunk."""

    def reason_on_adamw(matrix: Matrix, selection: Selection[ManagedWeight]) -> str | None:
        if reason := embedding_or_output(matrix.parameter):
            return reason
        if isinstance(matrix.module, nn.Embedding):
            return "learned positions"
        pattern = first_match(settings.exclude, matrix.name)
        if pattern is None:
            return None
        selection.patterns_used.add(pattern)
        return "excluded by --signmomentum-exclude"

    return choose(root, settings, reason_on_adamw, lambda matrix: ManagedWeight(**vars(matrix)))
