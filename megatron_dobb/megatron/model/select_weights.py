"""Choose the weights of a model chunk that a method updates, and tag them for the buffer layout."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from .adapters import find, imported_class, matrix_of
from .chunk_state import ManagedWeight, Matrix, Selection, set_tag
from .global_names import weight_names

_MOE_LAYER = "megatron.core.transformer.moe.moe_layer:BaseMoELayer"


def choose[W: ManagedWeight](
    root: nn.Module,
    settings: Any,
    reason_on_adamw: Callable[[Matrix, Selection[W]], str | None],
    managed_weight: Callable[[Matrix], W],
) -> Selection[W]:
    """Choose and tag the managed weights of a model chunk.

    A weight that several modules share is managed only if no module gives a reason against it.

    Args:
        root: the model chunk.
        settings: of the method.
        reason_on_adamw: why a matrix goes to AdamW, or None; it may note in the selection what it found.
        managed_weight: a matrix as the method knows it; its `tag` is set on the parameter.
    """
    selection: Selection[W] = Selection(root, settings)
    managed: dict[int, W] = {}
    reasons: dict[int, str] = {}
    matrices = list(_matrices(root))
    for matrix in matrices:
        reason = reason_on_adamw(matrix, selection)
        if reason is not None:
            reasons.setdefault(id(matrix.parameter), reason)
    for matrix in matrices:
        key = id(matrix.parameter)
        if key in reasons:
            continue
        if key in managed:
            selection.managed.append(managed[key].used_by(matrix))
        else:
            managed[key] = managed_weight(matrix)
            selection.managed.append(managed[key])
            set_tag(matrix.parameter, managed[key].tag)
    for parameter in root.parameters():
        if parameter.requires_grad and id(parameter) not in managed:
            set_tag(parameter, None)
            reason = reasons.get(id(parameter)) or _shape_reason(parameter)
            selection.adamw[reason, "parameters"] += 1
            selection.adamw[reason, "elements"] += parameter.numel()
    return selection


def embedding_or_output(weight: nn.Parameter) -> str | None:
    """The reason why an embedding or output layer goes to AdamW; None for other weights."""
    is_table = getattr(weight, "is_embedding_or_output_parameter", False) or getattr(weight, "shared_embedding", False)
    return "embedding or output layer" if is_table else None


def _matrices(root: nn.Module) -> Iterator[Matrix]:
    names = weight_names(root)
    moe_of = _moe_layers(root)
    for path, module in root.named_modules():
        adapter = find(module)
        if adapter is not None:
            weights = adapter.weights(module)
        else:
            weight = matrix_of(module)
            weights = {"weight": weight} if weight is not None else {}
        for own, parameter in weights.items():
            yield Matrix(names[path, own], own, parameter, module, moe_of.get(id(module)), adapter)


def _moe_layers(root: nn.Module) -> dict[int, nn.Module]:
    """The layer whose router deals the tokens, for every module that belongs to an expert."""
    kind = imported_class(_MOE_LAYER)
    layers = [module for module in root.modules() if kind is not None and isinstance(module, kind)]
    return {
        id(inner): layer
        for layer in layers
        if isinstance(layer.experts, nn.Module)
        for inner in layer.experts.modules()
    }


def _shape_reason(parameter: nn.Parameter) -> str:
    if parameter.ndim < 2:
        return "not a matrix (norms, biases)"
    return "2-D, but no layer's weight" if parameter.ndim == 2 else "more than two dimensions"
