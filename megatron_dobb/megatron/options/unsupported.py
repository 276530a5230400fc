"""Options of Megatron that stop a run before it starts, because a method does not work with them."""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ...errors import UnsupportedError
from ...methods import registry
from .flags import chosen, config_from_args

REMOVE = "remove it"


@dataclass(frozen=True)
class Refusal:
    """A Megatron option that a method does not work with.

    Attributes:
        what: the option, after "with" or "without"; this and the other texts name options as errors do, such as
            `{megatron.use_mup}`.
        used: tells from Megatron's arguments and the method's settings whether it is in use.
        reason: why it cannot work.
        remedy: what to do.
    """

    what: str
    used: Callable[[argparse.Namespace, Any], bool]
    reason: str
    remedy: str

    def error(self, settings: Any, complaint: str) -> UnsupportedError:
        """The error for a run with these settings.

        Args:
            settings: the method's.
            complaint: opens the sentence, which goes on with `what`.
        """
        return UnsupportedError(f"{complaint} {self.what}: {self.reason}", self.remedy, owner=type(settings))


def option(name: str, reason: str, remedy: str = REMOVE, *, works: tuple[Any, ...] = (None, False)) -> Refusal:
    """A refusal of an option whatever else is given.

    Args:
        name: the attribute of Megatron's arguments.
        reason: why it cannot work.
        remedy: what to do.
        works: its values that do work.
    """
    return Refusal(
        f"with {{megatron.{name}}}", lambda args, _: getattr(args, name, works[0]) not in works, reason, remedy
    )


def _saves_or_loads(args: argparse.Namespace) -> bool:
    return bool(getattr(args, "save", None) or getattr(args, "load", None))


def _shards_weights(args: argparse.Namespace, _: Any) -> bool:
    return (getattr(args, "tensor_parallel_num_weight_shards", None) or 0) > args.tensor_model_parallel_size


def _shards_expert_weights(args: argparse.Namespace, _: Any) -> bool:
    split = getattr(args, "expert_tensor_parallel_size", None) or args.tensor_model_parallel_size
    return (getattr(args, "expert_tensor_parallel_num_weight_shards", None) or 0) > split


_NO_BUFFERS = "it shards parameters without the param/grad buffers whose layout this optimizer aligns"
_ONLY_DISTRIBUTED = "use {megatron.use_distributed_optimizer} alone"
_MORE_SHARDS = "it shards the rows of a weight once more and gathers them before use"

IN_BUFFERS = (
    option(
        "yaml_cfg",
        "its arguments are validated on a separate path that does not know the method's flags",
        "give the arguments on the command line",
    ),
    Refusal(
        "without {megatron.use_distributed_optimizer}",
        lambda args, _: not args.use_distributed_optimizer,
        "this optimizer lives in the distributed optimizer's param/grad buffers",
        "add {megatron.use_distributed_optimizer:True}",
    ),
    option("use_megatron_fsdp", _NO_BUFFERS, _ONLY_DISTRIBUTED),
    option("use_torch_fsdp2", _NO_BUFFERS, _ONLY_DISTRIBUTED),
    option("optimizer_cpu_offload", "it rebuilds the inner optimizer and keeps the masters on the host"),
    option(
        "use_precision_aware_optimizer",
        "it keeps the master weights inside FusedAdam, where this optimizer cannot update them",
    ),
    option(
        "fp4_param_gather",
        "its packed buffer layout places parameters with its own padding, which cuts blocks",
    ),
    option(
        "reuse_grad_buf_for_mxfp8_param_ag",
        "it copies masters to the model outside the optimizer step, an untested path",
    ),
    option(
        "overlap_param_gather_with_optimizer_step",
        "it splits the model chunks over several optimizers, an untested path",
        "use {megatron.overlap_param_gather}",
    ),
    Refusal(
        "with {megatron.tensor_parallel_num_weight_shards} above the tensor-parallel size",
        _shards_weights,
        _MORE_SHARDS,
        REMOVE,
    ),
    Refusal(
        "with {megatron.expert_tensor_parallel_num_weight_shards} above the experts' tensor-parallel size",
        _shards_expert_weights,
        _MORE_SHARDS,
        REMOVE,
    ),
    option(
        "use_mup",
        "MuP rescales the learning rate for Adam; the RMS of this optimizer's updates does not depend on the width",
    ),
    Refusal(
        "with {megatron.ckpt_format} other than torch_dist",
        lambda args, _: _saves_or_loads(args) and getattr(args, "ckpt_format", "torch_dist") != "torch_dist",
        "legacy checkpoints cannot hold the optimizer's sharded state",
        "use {megatron.ckpt_format:torch_dist}",
    ),
    Refusal(
        "with {megatron.non_persistent_ckpt_type:local}",
        lambda args, _: getattr(args, "non_persistent_ckpt_type", None) == "local",
        "such checkpoints have no content metadata, which holds the optimizer's counters",
        "use {megatron.non_persistent_ckpt_type:global}",
    ),
)
"""For every method that keeps its state in the param/grad buffers of the distributed optimizer."""


def refusals(method: str) -> tuple[Refusal, ...]:
    """All options that a method does not work with."""
    own: tuple[Refusal, ...] = registry.method(method).load("refusals")
    return (*IN_BUFFERS, *own)


def refused(args: argparse.Namespace, settings: Any) -> Iterator[Refusal]:
    """The refusals that apply to Megatron's arguments and a method's settings."""
    return (refusal for refusal in refusals(settings.method) if refusal.used(args, settings))


def refuse_unsupported(args: argparse.Namespace) -> None:
    """Stop before training starts if an option is in use that the chosen method does not work with.

    Raises:
        UnsupportedError: names the option, the reason and what to use instead.
    """
    settings = config_from_args(args)
    for refusal in refused(args, settings):
        raise refusal.error(settings, f"{{megatron.optimizer:{chosen(args)}}} does not work")
