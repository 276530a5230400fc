"""Checkpoints of other optimizers: which wrote one, and why only AdamW's under the distributed optimizer do."""

from collections.abc import Mapping
from typing import Any

from ..options.flags import OPTIMIZER

WRITER = "dobb_written_by"
"""The writer's name, added to content metadata while they are read; it is in no checkpoint."""

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


def note_writer(common: Mapping[str, Any]) -> None:
    """Let the content metadata of a checkpoint's common state tell which optimizer Megatron's arguments name."""
    metadata, writer = common.get(_CONTENT_METADATA), getattr(common.get("args"), "optimizer", None)
    if isinstance(metadata, dict) and isinstance(writer, str):
        metadata[WRITER] = writer


def refusal(metadata: Mapping[str, Any]) -> str | None:
    """Why a checkpoint that is not Dobb's cannot be continued with Dobb even if that is asked for, or None."""
    writer = metadata.get(WRITER, _ADAMW)
    if writer not in (_ADAMW, OPTIMIZER):
        reason = _REASONS.get(writer, _OTHERWISE)
    elif metadata.get(_SHARDING) is None:
        reason = _UNDISTRIBUTED
    else:
        return None
    return (
        f"the checkpoint was written by --optimizer {writer}, which Dobb cannot continue: {reason}. Start a fresh "
        "optimizer from its weights with --no-load-optim"
    )
