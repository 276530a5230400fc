"""Patches of megatron.core beyond the device: each makes up for something that only a GPU machine has."""

import contextlib
import copy
import functools
import queue
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from .adam import FusedAdam


def patch() -> None:
    """Import megatron.core and patch it for this process."""
    _import_uncompiled()
    _allow_torch_norms_under_sequence_parallelism()
    _give_split_sizes_as_numpy()
    _use_fused_adam()
    _load_fp32_parameters_without_grad()
    _save_checkpoints_with_a_plain_queue()
    _gather_unequal_sizes()
    _recompute_discarded_outputs_on_the_cpu()


def _import_uncompiled() -> None:
    """Keep Megatron's fused functions as they are written: inductor would build C++ for each of them.

    Only Megatron is affected. But where it was imported earlier its functions are compiled objects already, and the
    one way left to keep them from compiling is to turn dynamo off for the process.
    """
    if "megatron.core.jit" in sys.modules:
        import torch._dynamo

        torch._dynamo.config.disable = True
    with _compile_does_nothing(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that Transformer Engine and Apex are missing, again and again
        from megatron.core import jit
    jit.disable_jit_fuser()  # for Megatron's modules that are imported later


@contextlib.contextmanager
def _compile_does_nothing() -> Iterator[None]:
    owner: Any = torch
    original = owner.compile
    owner.compile = lambda model=None, **kwargs: model if model is not None else lambda function: function
    try:
        yield
    finally:
        owner.compile = original


def _allow_torch_norms_under_sequence_parallelism() -> None:
    """Without Apex and Transformer Engine the norms are torch's, which Megatron refuses under sequence parallelism.

    All they lack is the mark on the parameters by which `finalize_model_grads` sums their gradients over the
    tensor-parallel ranks.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    original: Any = WrappedTorchNorm.__new__

    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = plain.persist_layer_norm = False
        norm = original(cls, plain, *args, **kwargs)
        for param in norm.parameters():
            param.sequence_parallel = config.sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = new


def _give_split_sizes_as_numpy() -> None:
    """The split sizes of MoE's all-to-all become numpy arrays only where `is_cuda` says so."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = to_host
    token_dispatcher.maybe_move_tensor_to_cpu = to_host


def _use_fused_adam() -> None:
    """Pretend that Apex is installed, for its Adam alone (see `FusedAdam`)."""
    import megatron.core.optimizer as optimizer
    from megatron.core.optimizer import distrib_optimizer

    optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True


def _load_fp32_parameters_without_grad() -> None:
    """Megatron loads `dp_reshardable` checkpoints into fp32 parameters in place, with gradients on, and fails."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    name = "load_parameter_state_from_dp_reshardable"
    setattr(DistributedOptimizer, name, torch.no_grad()(getattr(DistributedOptimizer, name)))


def _save_checkpoints_with_a_plain_queue() -> None:
    """Each rank would spawn a process just for a queue, importing the main module again: seconds for every save."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()


def _gather_unequal_sizes() -> None:
    """NCCL gathers tensors of unequal sizes (as MoE and Muon do) and gloo does not: broadcast them one by one."""
    original = dist.all_gather

    @functools.wraps(original)
    def all_gather(
        tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if len({t.shape for t in tensor_list}) == 1:
            return original(tensor_list, tensor, group, async_op)
        tensor_list[dist.get_rank(group)].copy_(tensor)
        works: list[Any] = [
            dist.broadcast(t, group=group, group_src=i, async_op=True) for i, t in enumerate(tensor_list)
        ]

        def wait(*timeout: Any) -> None:
            for work in works:
                work.wait(*timeout)

        return types.SimpleNamespace(wait=wait) if async_op else wait()

    dist.all_gather = all_gather


def _recompute_discarded_outputs_on_the_cpu() -> None:
    """Where outputs are discarded, Megatron takes no fp8 for fp8 and gives memory back in C++, a minute to build."""
    from megatron.core.tensor_parallel import random

    original: Any = random.CheckpointWithoutOutput.__init__

    def __init__(self: Any, fp8: Any = None) -> None:
        original(self, fp8 or None)

    def share_storage(discarded: torch.Tensor, recomputed: torch.Tensor) -> None:
        # Of the storage, not of the tensor: autograd would notice that.
        storage, source = discarded.untyped_storage(), recomputed.detach().contiguous().untyped_storage()
        storage.resize_(source.nbytes())
        storage.copy_(source)

    random.CheckpointWithoutOutput.__init__ = __init__  # type: ignore[method-assign]
    random._share_storage_ext = types.SimpleNamespace(share_storage=share_storage)
