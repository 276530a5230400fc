"""Base of the methods that update weights in the shards of Megatron's distributed optimizer (ZeRO-1).

A method derives `ShardOptimizer`, names itself in `method` and writes `_update`; every other hook has a default. The
hooks, in the order in which they are called:

* `_prepare`: collective set-up over all ranks, such as process groups.
* `_build`: what the method needs for the weights of this rank, before their segments are made.
* `_segment`: what `_update` needs of one shard.
* `_check_gradients`: raises for gradients that are not finite, on the rank that has them. A method whose `_update`
  communicates must raise on all ranks that wait for one another.
* `_update`: the update of all weights of this rank.
* `_extra_state`: what a checkpoint holds besides the masters and the momentum.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import CheckpointError
from ..numerics.finite import check_finite
from .checkpoint.save_load import ExtraState, MethodCheckpoint
from .model.chunk_state import ChunkState, ManagedWeight, Selection, state_of
from .model.global_names import kind_of
from .startup_check import MethodSettings, check_whole_model
from .upstream_fixes import UpstreamFixes

MOMENTUM = "exp_avg"  # Megatron's checkpoint code carries flat state of this name.
PLACEHOLDER = "exp_avg_sq"  # AdamW has it besides, and the methods here do not.


class ShardSegment(Protocol):
    """A flat shard of one weight."""

    name: str
    momentum: Tensor


@dataclass
class FlatSegment:
    """A flat shard of one weight, for methods that look at nothing but its entries.

    Attributes:
        name: of the weight.
        weight: the fp32 master, `[numel]`.
        momentum: `[numel]`, fp32.
    """

    name: str
    weight: Tensor
    momentum: Tensor


class ShardOptimizer[W: ManagedWeight, S: ShardSegment](UpstreamFixes):
    """Megatron's distributed optimizer with a method for the managed weights and its own AdamW for all others.

    The param groups whose `optimizer` is the method's name are updated here, shard by shard; the others go through
    Megatron's inner AdamW. The momentum is the inner optimizer's `exp_avg`, so that it is saved and resharded as the
    masters are. Every model chunk must have the state that the patched DDP gives it.

    Attributes:
        method: its name, which is the value of `--optimizer`, its key in checkpoints and the `optimizer` of its param
            groups.
        settings: the method's, with which the model was wrapped.
        selections: the weights of each model chunk, of all optimizers of this rank.
        weights_of_chunk: for each model chunk, the weights of this optimizer.
        managed: the weights of this optimizer, by name.
        cut_of: the flat range of each weight that this rank's shard holds, by name; the others are not in it.
        segments: what this rank's shard holds of the weights, for each param group.
        shards: the inner optimizer's parameter of each segment.
        is_expert: whether this optimizer has the experts that Megatron keeps apart.
    """

    method: ClassVar[str]

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        config: Any,
        grad_scaler: Any,
        init_state_fn: Any,
        model_chunks: Sequence[Any],
        **kwargs: Any,
    ) -> None:
        states = [state for chunk in model_chunks if (state := state_of(chunk)) is not None]
        self.selections: list[Selection[W]] = [state.selection for state in states]
        self.settings: MethodSettings = self.selections[0].settings
        groups = optimizer.param_groups if optimizer is not None else []
        self.is_expert = any(group["is_expert_parallel"] for group in groups)
        own = {id(p) for group in groups if self._is_managed(group) for p in group["params"]}
        self.weights_of_chunk: list[list[W]] = [
            [weight for weight in selection.managed if id(weight.parameter) in own] for selection in self.selections
        ]
        # One that several chunks share belongs to the last of them.
        self.managed: dict[str, W] = {weight.name: weight for weights in self.weights_of_chunk for weight in weights}
        self.cut_of: dict[str, tuple[int, int]] = {}
        self.segments: list[list[S]] = []
        self.shards: list[list[torch.nn.Parameter]] = []
        if states[0].kinds_on_adamw is None:
            states[0].kinds_on_adamw = check_whole_model(self.method, self.settings, self.selections, model_chunks[0])
        self.kinds_on_adamw: set[str] = states[0].kinds_on_adamw
        self._prepare(model_chunks[0], states[0])
        super().__init__(optimizer, config, grad_scaler, init_state_fn, model_chunks, **kwargs)
        if self.is_stub_optimizer:
            return
        for _, weight, _ in self._managed_pairs():
            cut = self._get_model_param_range_map(weight.parameter)["param"]
            self.cut_of[weight.name] = cut.start, cut.end
        self._build()
        self._build_segments()

    # Hooks.

    def _prepare(self, chunk: Any, state: ChunkState) -> None:
        """Set up what the optimizers of a rank share; collective over all ranks, also on those without such weights.

        Every rank builds the optimizer of the dense weights, and builds it first; another one, for experts, finds what
        is shared in the state. So nothing depends on which ranks have experts.

        Args:
            chunk: the rank's first model chunk, for Megatron's process groups.
            state: its state, with room in `shared`.
        """

    def _build(self) -> None:
        """Build what the method needs for `managed` and `cut_of`, before the segments."""

    def _segment(self, weight: W, shard: torch.nn.Parameter, momentum: Tensor) -> S:
        """Describe a shard for `_update`. It must hold `shard` itself, whose tensor programs give other storage."""
        return FlatSegment(weight.name, shard, momentum)  # type: ignore[return-value]  # of methods without a type of their own

    def _check_gradients(self, gradients: Sequence[Sequence[Tensor]]) -> None:
        """Raise a `NonFiniteError` before anything is changed.

        Args:
            gradients: of each segment.
        """
        check_finite(
            [segment.name for segments in self.segments for segment in segments],
            [gradient for of_group in gradients for gradient in of_group],
        )

    def _update(self, gradients: Sequence[Sequence[Tensor]]) -> None:
        """Update momentum and weights of `segments`; learning rate and weight decay are in the param groups.

        Args:
            gradients: of each segment, finite.
        """
        raise NotImplementedError

    def _extra_state(self) -> ExtraState[Any]:
        """Describe the state that a checkpoint holds besides masters and momentum."""
        return ExtraState()

    # Start.

    def _is_managed(self, group: dict[str, Any]) -> bool:
        return group.get("optimizer") == self.method

    def _managed_pairs(self) -> Iterator[tuple[int, W, torch.nn.Parameter]]:
        """Param group index, weight and this rank's fp32 shard of every managed parameter."""
        weight_of = {id(weight.parameter): weight for weight in self.managed.values()}
        for index, group in enumerate(self.optimizer.param_groups):
            if self._is_managed(group):
                models = [*self.model_float16_groups[index], *self.model_fp32_groups[index]]
                shards = [*self.shard_fp32_from_float16_groups[index], *self.shard_fp32_groups[index]]
                for model, shard in zip(models, shards, strict=True):
                    yield index, weight_of[id(model)], shard

    def _build_segments(self) -> None:
        self.segments = [[] for _ in self.optimizer.param_groups]
        self.shards = [[] for _ in self.optimizer.param_groups]
        for index, weight, shard in self._managed_pairs():
            momentum = torch.zeros_like(shard, dtype=torch.float32)
            self.optimizer.state[shard][MOMENTUM] = momentum
            self.segments[index].append(self._segment(weight, shard, momentum))
            self.shards[index].append(shard)

    # Steps.

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Update the managed weights, then let Megatron step the others and gather the parameters.

        Raises:
            NonFiniteError: if a gradient of a managed weight is not finite; no weight of this rank was changed.
        """
        if self.is_stub_optimizer:
            return super().step_with_ready_grads()
        self._follow_moved_state()
        gradients = [[_gradient(shard) for shard in shards] for shards in self.shards]
        self._check_gradients(gradients)
        self._update(gradients)
        groups = self.optimizer.param_groups
        self.optimizer.param_groups = [group for group in groups if not self._is_managed(group)]
        try:
            return super().step_with_ready_grads()
        finally:
            self.optimizer.param_groups = groups

    def offload_to_cpu(self) -> None:
        """Offload the state as Megatron does, and free the momenta of managed weights as well."""
        super().offload_to_cpu()
        self._follow_moved_state()

    def restore_from_cpu(self) -> None:
        """Restore the state as Megatron does, and update the momenta that it made."""
        super().restore_from_cpu()
        self._follow_moved_state()

    def _follow_moved_state(self) -> None:
        """Update the momenta that Megatron has now.

        Programs that take the optimizer's state off the GPU between phases (verl does) give the shards other storage,
        which the segments follow by themselves, and the inner optimizer other tensors. What the segments were built on
        would be updated and never be read.
        """
        for segment, shard in self._segments_and_shards():
            segment.momentum = self.optimizer.state[shard][MOMENTUM]

    def _segments_and_shards(self) -> Iterator[tuple[S, torch.nn.Parameter]]:
        for segments, shards in zip(self.segments, self.shards, strict=True):
            yield from zip(segments, shards, strict=True)

    # Checkpoints: `checkpoint/__init__.py` follows a save and a load.

    def sharded_state_dict(
        self,
        model_sharded_state_dict: Any = {},  # noqa: B006  (Megatron's signature)
        is_loading: bool = False,
        sharding_type: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Describe the state to save or load. A save adds its run metadata to `metadata`, the content metadata to be.

        Raises:
            CheckpointError: if this run cannot continue the checkpoint that `metadata` describes.
        """
        if metadata is None:
            raise CheckpointError(
                "sharded_state_dict needs metadata: when saving a dictionary that goes into dist_checkpointing.save as "
                "content_metadata, when loading what load_content_metadata gives"
            )
        checkpoint = self._checkpoint()
        run = checkpoint.find_run(metadata) if is_loading else None
        state = super().sharded_state_dict(model_sharded_state_dict, is_loading, sharding_type, metadata)
        if is_loading:
            checkpoint.request(state, run)
        else:
            checkpoint.add(state, metadata)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `sharded_state_dict` asked for, once a checkpoint has filled it in."""
        checkpoint = self._checkpoint()
        super().load_state_dict(checkpoint.for_megatron(state_dict, self.optimizer.param_groups))
        self._settle_inner_state()
        checkpoint.resume(state_dict)

    def _checkpoint(self) -> MethodCheckpoint:
        config = self.model_chunks[0].config
        return MethodCheckpoint(
            self.method,
            self._extra_state(),  # made for each save or load: kept, it would keep the optimizer alive in a circle
            is_expert=self.is_expert,
            experts_apart=config.num_moe_experts is not None and config.expert_model_parallel_size > 1,
            load_other_optimizer=self.settings.load_other_optimizer,
        )

    def _ranks_that_load(self) -> dist.ProcessGroup | None:
        # Every rank has the optimizer of the other weights, and not every pipeline stage has experts.
        return super()._ranks_that_load() if self.is_expert else None

    def _get_main_param_and_optimizer_states(self, model_param: Any) -> dict[str, Tensor]:
        tensors = super()._get_main_param_and_optimizer_states(model_param)
        if id(model_param) in self._managed_by_id:
            # All parameters of a bucket must have the same state; this one is made for a save or a load alone.
            tensors[PLACEHOLDER] = torch.zeros(tensors["param"].shape, dtype=torch.float32, device="cpu")
        return tensors

    def sharded_param_state_fully_reshardable(
        self, model_sharded_state_dict: Any, is_loading: bool = False, metadata: dict[str, Any] | None = None
    ) -> dict[int, dict[str, Any]] | None:
        """Describe the state of every parameter whole; managed weights have no placeholders there."""
        state = super().sharded_param_state_fully_reshardable(model_sharded_state_dict, is_loading, metadata)
        for number, parameter in self._parameters_in_order():
            weight = self._managed_by_id.get(id(parameter))
            # Megatron stacks the layers of a model in one tensor, which must be whole if any of them is on AdamW.
            if state is not None and weight and (is_loading or kind_of(weight.name) not in self.kinds_on_adamw):
                del state[number][PLACEHOLDER]
        return state

    @functools.cached_property
    def _managed_by_id(self) -> dict[int, W]:
        return {id(weight.parameter): weight for weight in self.managed.values()}

    def _settle_inner_state(self) -> None:
        """Let the inner optimizer hold the momenta that the segments update, whatever its own load made of them."""
        for segment, shard in self._segments_and_shards():
            state = self.optimizer.state[shard]
            if state[MOMENTUM] is not segment.momentum:
                segment.momentum.copy_(state[MOMENTUM])
            self.optimizer.state[shard] = {MOMENTUM: segment.momentum}
        for group in self.optimizer.param_groups:
            if self._is_managed(group):
                group.pop("step", None)  # the inner optimizer never counts it on


def _gradient(shard: torch.nn.Parameter) -> Tensor:
    assert shard.grad is not None
    return shard.grad
