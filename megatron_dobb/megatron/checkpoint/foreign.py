"""Checkpoints of other optimizers: which wrote one, whether it can be continued, and its param groups."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import CheckpointError
from ...methods import registry

_CONTENT_METADATA = "content_metadata"
_SHARDING = "distrib_optim_sharding_type"
_ADAMW = "adam"

_NO_SECOND_MOMENTS = "AdamW, which takes the embeddings and norms, finds no second moments in it"
_REASONS = {
    "sgd": f"its momentum adds up gradients together with weight decay, and {_NO_SECOND_MOMENTS}",
    "lion": _NO_SECOND_MOMENTS,
}
_OTHERWISE = "Megatron stores its state in another form than the distributed optimizer's"
_UNDISTRIBUTED = "it was saved without --use-distributed-optimizer, and Megatron does not convert that form"

_last_read: tuple[object, str] = None, _ADAMW
"""The content metadata that were read last, and the optimizer that Megatron's arguments beside them name.

Megatron gives an optimizer the metadata alone."""


def note_writer(common: Mapping[str, Any]) -> None:
    """Remember which optimizer wrote the checkpoint of this common state."""
    global _last_read
    writer = getattr(common.get("args"), "optimizer", None)
    _last_read = common.get(_CONTENT_METADATA), writer if isinstance(writer, str) else _ADAMW


def writer_of(content: Mapping[str, Any]) -> str:
    """The optimizer that wrote the checkpoint of these content metadata; AdamW if nothing says so."""
    last, writer = _last_read
    return writer if content is last else _ADAMW


def refusal(content: Mapping[str, Any], writer: str, method: str) -> str | None:
    """The reason why another optimizer's checkpoint cannot be continued even if that is asked for, or None.

    Args:
        content: the checkpoint's content metadata.
        writer: the optimizer that wrote it.
        method: the one that is to continue it.
    """
    other = next((name for name in registry.names() if name != method and name in content), None)
    if other is not None:
        writer, reason = other, "its matrices have no second moments"
    elif writer not in (_ADAMW, method):
        reason = _REASONS.get(writer, _OTHERWISE)
    elif content.get(_SHARDING) is None:
        reason = _UNDISTRIBUTED
    else:
        return None
    return (
        f"the checkpoint was written by --optimizer {writer}, which {method.capitalize()} cannot continue: {reason}. "
        "Start a fresh optimizer from its weights with --no-load-optim"
    )


def with_groups_of(method: str, state: dict[str, Any], groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """AdamW's state with param groups for the managed weights, made of those that had them before.

    Args:
        method: that continues the checkpoint.
        state: of Megatron's distributed optimizer.
        groups: the param groups of this run.
    """
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    keys = [key for key in param_group_identifier_keys if key != "optimizer"]
    stored = [group for group in state["optimizer"]["param_groups"] if group.get("optimizer") != method]
    added = []
    for group in groups:
        if group.get("optimizer") == method:
            alike = [other for other in stored if all(group.get(key) == other.get(key) for key in keys)]
            if not alike:
                raise CheckpointError(
                    "the checkpoint has no param group with the learning rate and weight decay settings of the "
                    f"weights on {method.capitalize()}: give the settings of the run that saved it, or --no-load-optim"
                )
            added.append({**alike[0], "optimizer": method})
    return {**state, "optimizer": {**state["optimizer"], "param_groups": [*stored, *added]}}
