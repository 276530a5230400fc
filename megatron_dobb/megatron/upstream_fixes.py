"""Fix how Megatron's distributed optimizer saves and loads checkpoints. Nothing here depends on a method.

* `fully_reshardable` cuts parameters out of buffers without padding at the places they have in the padded buffers:
  from the second bucket on, the saved state belongs to other parameters (megatron-core 0.19; later ones are left
  alone). Checkpoints that a plain Megatron so wrote are recognised and refused.
* `dp_reshardable` neither saves nor loads where a rank's shard of a bucket is all padding.
* Ranks that own no parameter of AdamW write no step count, or another one than the others.
* torch's AdamW, which Megatron takes without Transformer Engine and Apex, gets one step tensor for all parameters.
* State is made where there is none yet, so that a save before the first step is complete.
"""

import contextlib
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from ..errors import CheckpointError

_DIFFERING = 0.01
"""Part of a parameter's elements that may differ from the model's weights by more than rounding."""

_COARSEST, _SMALLEST = torch.finfo(torch.bfloat16).eps, torch.finfo(torch.float16).smallest_normal
"""Rounding of weights that were saved in any dtype, whatever they are now: relative, of values from so small on."""


class UpstreamFixes(DistributedOptimizer):
    """Megatron's distributed optimizer, with the repairs of this module.

    Attributes:
        taken_steps: steps of the inner optimizer, the same on every rank.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.taken_steps = 0
        super().__init__(*args, **kwargs)

    def step_with_ready_grads(self) -> bool:
        """Megatron's step, counted."""
        succeeded = super().step_with_ready_grads()
        self.taken_steps += 1
        return succeeded

    # State that is the same on every rank.

    def allocate_state(self) -> None:
        """Give every parameter the state that it has after a step, where it has none yet."""
        self.init_state_fn(self.optimizer, self.config)
        if not distrib_optimizer.HAVE_APEX_OR_TE:
            for state in self.optimizer.state.values():
                state.setdefault("step", torch.tensor(float(self.taken_steps)))

    def state_dict(self) -> dict[str, Any]:
        """Settings of the param groups and the state of the loss scaling; in every group the common step."""
        inner = self.optimizer.state_dict()
        groups = [
            {**{name: value for name, value in group.items() if name != "params"}, "step": self.taken_steps}
            for group in inner["param_groups"]
        ]
        state = {"optimizer": {**{k: v for k, v in inner.items() if k != "state"}, "param_groups": groups}}
        if self.grad_scaler:
            state["grad_scaler"] = self.grad_scaler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave and, if it is there, the state of the parameters.

        Raises:
            CheckpointError: if the masters are not those of the model's weights.
        """
        self.allocate_state()
        super().load_state_dict(state_dict)
        groups = self.optimizer.param_groups
        self.taken_steps = max((int(group.get("step") or 0) for group in groups), default=0)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Describe the state to save or load, once every parameter has it."""
        self.allocate_state()
        return super().sharded_state_dict(*args, **kwargs)

    # The state of a parameter.

    def _get_main_param_and_optimizer_states(self, model_param: Any) -> dict[str, Tensor]:
        tensors = super()._get_main_param_and_optimizer_states(model_param)
        tensors.pop("step", None)
        return tensors

    def _set_main_param_and_optimizer_states(self, model_param: Any, tensors: dict[str, Any]) -> None:
        # Otherwise the step that was there when the load began would replace the one that was loaded.
        super()._set_main_param_and_optimizer_states(model_param, {**tensors, "step": None})

    def _owned_shard(self, model_param: Any) -> slice | None:
        """The flat range of a parameter that this rank owns."""
        if model_param not in self.model_param_gbuf_map:
            return None
        cut = self._get_model_param_range_map(model_param)["param"]
        return slice(cut.start, cut.end)

    # dp_reshardable.

    def get_parameter_state_dp_reshardable(self) -> dict[Any, Any]:
        """Collect the state by buckets; one that is all padding on this rank gets an entry without elements."""
        state = super().get_parameter_state_dp_reshardable()
        for bucket in _buckets(state):
            if not bucket:
                empty = {key: torch.empty(0) for key in ("param", *self.optimizer_state_keys)}
                bucket.append({**empty, "gbuf_local_start": 0, "gbuf_local_end": 0})
        return state

    def sharded_param_state_dp_reshardable(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """Describe the state by buckets, without those of which this rank owns only padding."""
        state = super().sharded_param_state_dp_reshardable(*args, **kwargs)
        for bucket in _buckets(state):
            entries = [entry for entry in bucket if entry["param"].local_shape != (0,)]
            bucket[:] = entries or [{"padding": LocalNonpersistentObject(True)}]
        for key, of_dtype in state.items():
            if isinstance(key, int):
                # Of a list, the load would drop the buckets without tensors, and those behind would move up.
                state[key] = {dtype: dict(enumerate(buckets)) for dtype, buckets in of_dtype.items()}
        return state

    @torch.no_grad()
    def load_parameter_state_from_dp_reshardable(self, state_dict: Any) -> None:
        """Load without gradients: Megatron's load fails for fp32 parameters, views of leaves that require them."""
        super().load_parameter_state_from_dp_reshardable(state_dict)

    # fully_reshardable.

    def sharded_param_state_fully_reshardable(
        self, model_sharded_state_dict: Any, is_loading: bool = False, metadata: dict[str, Any] | None = None
    ) -> dict[int, dict[str, Any]] | None:
        """Describe the state of every parameter whole.

        Raises:
            CheckpointError: if what would be saved is not the state of the parameters.
        """
        with self._places_without_padding():
            state = super().sharded_param_state_fully_reshardable(model_sharded_state_dict, is_loading, metadata)
        if state is not None and not is_loading:
            self._check_gathered(state)
        return state

    def load_parameter_state_from_fully_reshardable(self, state_dict: dict[int, dict[str, Tensor]]) -> None:
        """Load the state of every parameter from whole ones.

        Raises:
            CheckpointError: on all ranks, if a master is not that of the model's weight; nothing was loaded.
        """
        self._check_masters(state_dict)
        self._take_whole_masters(state_dict)
        super().load_parameter_state_from_fully_reshardable(state_dict)

    @contextlib.contextmanager
    def _places_without_padding(self) -> Iterator[None]:
        """While this is active, the buffers place parameters as in the gathered state: without padding of buckets."""
        if upstream_is_repaired():
            yield
            return
        original = [buffer.param_index_map for buffer in self.buffers]
        try:
            for buffer in self.buffers:
                padding = [0]
                for bucket in buffer.buckets:
                    padding.append(padding[-1] + bucket.grad_data.numel() - bucket.numel_unpadded)
                buffer.param_index_map = {
                    parameter: (start - padding[bucket], end - padding[bucket], bucket)
                    for parameter, (start, end, bucket) in buffer.param_index_map.items()
                }
            yield
        finally:
            for buffer, places in zip(self.buffers, original, strict=True):
                buffer.param_index_map = places

    def _parameters_in_order(self) -> Iterator[tuple[int, Any]]:
        """The model's parameters, numbered as Megatron numbers them in `fully_reshardable` state."""
        return enumerate(parameter for buffer in self.buffers for parameter in buffer.param_index_map)

    def _check_gathered(self, state: dict[int, dict[str, Any]]) -> None:
        """Compare what this rank owns with what was gathered for it."""
        for number, parameter in self._parameters_in_order():
            shard = self._owned_shard(parameter)
            if shard is None:
                continue
            gathered = state[number]["param"]
            own = self._get_main_param_and_optimizer_states(parameter)["param"]
            if not torch.equal(gathered.data.flatten()[shard], own.detach().to(gathered.data)):
                raise CheckpointError(
                    f"the state gathered for {gathered.key} is not that of the parameter, so nothing was saved: this "
                    "megatron-core packs buckets in another way than megatron_dobb knows; save without "
                    "--dist-ckpt-optim-fully-reshardable, and please report it"
                )

    def _check_masters(self, state: dict[int, dict[str, Tensor]]) -> None:
        found: list[str | None] = [None] * dist.get_world_size(self._ranks_that_load())
        dist.all_gather_object(found, self._wrong_masters(state), group=self._ranks_that_load())
        wrong = next((text for text in found if text is not None), None)
        if wrong is not None:
            raise CheckpointError(
                f"the optimizer state in this checkpoint is not that of its weights: {wrong}. megatron-core 0.19 "
                "writes such state with --dist-ckpt-optim-fully-reshardable where buckets are padded, and it cannot be "
                "recovered; start from the weights alone with --no-load-optim, or from a checkpoint saved without that "
                "flag"
            )

    def _ranks_that_load(self) -> dist.ProcessGroup | None:
        """The ranks that certainly load when this one does; None for all."""
        return self.data_parallel_group

    def _wrong_masters(self, state: dict[int, dict[str, Tensor]]) -> str | None:
        """Describe the first of this rank's masters that differs from its weight by more than rounding, or None."""
        for number, parameter in self._parameters_in_order():
            shard = self._owned_shard(parameter)
            if shard is None or self._is_distopt_quantized_param(parameter):
                continue
            weight = parameter.detach().flatten()[shard].float()
            master = state[number]["param"].flatten()[shard].to(weight)
            differing = (master - weight).abs() > _COARSEST * weight.abs().clamp(min=_SMALLEST)
            if int(differing.sum()) > _DIFFERING * weight.numel():
                return (
                    f"{int(differing.sum())} of {weight.numel()} masters of a parameter of shape "
                    f"{tuple(parameter.shape)} differ from it"
                )
        return None

    @torch.no_grad()
    def _take_whole_masters(self, state: dict[int, dict[str, Tensor]]) -> None:
        """Give every rank whole masters where they are views of the parameters.

        If the weights were saved in a coarser type, each rank would otherwise compute with the masters it owns and with
        rounded values of the others until their first step.
        """
        for number, parameter in self._parameters_in_order():
            if parameter.dtype == torch.float32 and not self._is_distopt_quantized_param(parameter):
                parameter.copy_(state[number]["param"].reshape_as(parameter))


def _buckets(state: dict[Any, Any]) -> Iterator[list[dict[str, Any]]]:
    """The lists of entries of every bucket in `dp_reshardable` state."""
    for key, of_dtype in state.items():
        if isinstance(key, int):
            for buckets in of_dtype.values():
                yield from buckets


@functools.cache
def upstream_is_repaired() -> bool:
    """Whether this Megatron finds parameters behind padded buckets by itself.

    Its function is run on two buckets of two elements, each with a parameter of one element and one of padding.
    """
    values = [torch.tensor([1.0]), torch.tensor([2.0])]
    bucket = SimpleNamespace(grad_data=torch.empty(2), numel_unpadded=1)
    buffer = SimpleNamespace(
        buckets=[bucket, bucket],
        param_index_map={value: (2 * number, 2 * number + 1, number) for number, value in enumerate(values)},
        numel_unpadded=2,
    )
    gathered = {"param": torch.tensor([1.0, 2.0, 0.0])}  # one more than there are, so that no place is outside
    stand_in: Any = SimpleNamespace(
        buffers=[buffer],
        gbuf_ranges=[{torch.float32: None}],
        get_parameter_state_dp_zero=lambda **_: {0: {torch.float32: gathered}},
    )
    model = {str(number): ShardedTensor.from_rank_offsets(str(number), value) for number, value in enumerate(values)}
    state = DistributedOptimizer.sharded_param_state_fully_reshardable(stand_in, model, False, {})
    return torch.equal(state[1]["param"].data, values[1])
