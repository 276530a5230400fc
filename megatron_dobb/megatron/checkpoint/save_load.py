"""How Dobb's part of the distributed optimizer is saved to and loaded from Megatron's distributed checkpoints."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from torch import Tensor

from ...errors import CheckpointError
from ...methods.dobb.capture import Capture
from ...methods.dobb.refresh_group import RefreshGroup
from ...methods.dobb.settings import DobbConfig
from ...sharding.segment import Segment
from ..console import log_load, say
from ..dobb.process_groups import Ranks
from ..dobb.scheduler import Refreshes
from ..dobb.sharded_blocks import StateOfBlocks, WeightInModel
from ..model.global_names import kind_of
from ..model.select_weights import ManagedWeight
from ..options.flags import OPTIMIZER
from ..upstream_fixes import ReshardableOptimizer
from .foreign import refusal
from .metadata import METADATA, Saved

MOMENTUM = "exp_avg"  # Megatron's checkpoint code carries flat state of this name.
PLACEHOLDER = "exp_avg_sq"  # what AdamW has besides and Dobb has not
STATE = "dobb"
FACTS = "dobb_facts"
"""Where a save finds what belongs into its content metadata, if the program gives it others than `metadata`."""
INCOMPLETE_ATTRIBUTE = "dobb_moments_are_incomplete"


class ResumableOptimizer(ReshardableOptimizer):
    """The checkpoints of `DobbDistributedOptimizer`, which fills in the attributes.

    Attributes:
        dobb: its settings.
        managed: the weights on Dobb, by name.
        kinds_on_adamw: names without numbers of all parameters of the whole model that are not on Dobb.
        moment_ranks: the global ranks over which the moment of each is summed.
        refresh_groups, captures, refreshes, segments, shards: see there.
        attempted_steps: steps so far, skipped ones included.
        refresh_is_asked: whether the next step refreshes, whatever the schedule says.
        is_expert: whether this optimizer has the experts that Megatron keeps apart.
    """

    dobb: DobbConfig
    managed: dict[str, ManagedWeight]
    kinds_on_adamw: set[str]
    moment_ranks: dict[str, Ranks]
    refresh_groups: list[RefreshGroup]
    captures: list[Capture]
    segments: list[list[Segment]]
    shards: list[list[torch.nn.Parameter]]
    refreshes: Refreshes
    attempted_steps: int
    refresh_is_asked: bool
    is_expert: bool

    # Save and load.

    def sharded_state_dict(
        self,
        model_sharded_state_dict: Any = {},  # noqa: B006  (Megatron's signature)
        is_loading: bool = False,
        sharding_type: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """See Megatron's. A save adds Dobb's facts to `metadata`, which is to be the checkpoint's content metadata.

        Raises:
            CheckpointError: if this run cannot continue the checkpoint that `metadata` describes.
        """
        if metadata is None:
            raise CheckpointError(
                "sharded_state_dict needs metadata: when saving a dictionary that goes into dist_checkpointing.save as "
                "content_metadata, when loading what load_content_metadata gives"
            )
        self.refreshes.wait()
        saved = Saved.read(metadata) if is_loading else None
        if is_loading:
            self._check(saved, metadata)
        state = super().sharded_state_dict(model_sharded_state_dict, is_loading, sharding_type, metadata)
        blocks = self._state_of_blocks()
        if not is_loading:
            state[STATE] = blocks.to_save()
            if not self.is_expert:  # every rank has the optimizer of the other weights, and it comes first
                metadata[METADATA] = self._facts().plain()
                state[FACTS] = LocalNonpersistentObject(metadata[METADATA])
        elif saved is not None:
            state[STATE] = {**blocks.to_load(saved), "saved": LocalNonpersistentObject(saved.plain())}
        else:
            state[STATE] = {"saved": LocalNonpersistentObject(None)}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `sharded_state_dict` asked for, once a checkpoint has filled it in."""
        self.refreshes.forget()
        state = {key: value for key, value in state_dict.items() if key not in (STATE, FACTS)}
        mine = state_dict.get(STATE)
        if mine is not None and mine["saved"] is None:
            state = self._with_groups_of_ours(state)
        super().load_state_dict(state)
        self._settle_inner_state()
        if mine is None:
            return
        blocks, saved = self._state_of_blocks(), Saved.read({METADATA: mine["saved"]})
        if saved is None:
            blocks.restart()
            self._continue(0, None, ask=False)
            log_load(self.refresh_groups, None, self.dobb)
            return
        report = blocks.take(mine, saved)
        ask = self._moments_are_incomplete(saved) or saved.refresh_is_asked
        # Where there is nothing to refresh, no step would ever take the request back.
        ask = ask and self.dobb.source != "none"
        self._continue(saved.attempted_steps, saved.capture_sequences, ask=ask)
        log_load(self.refresh_groups, report, self.dobb)

    def _moments_are_incomplete(self, saved: Saved) -> bool:
        """Whether some weight of the whole model starts with other moments than the checkpoint's, on whatever rank.

        Every stage of a pipeline must refresh on the next step, or none. The optimizer of the dense weights, which all
        ranks have and which comes first, finds it out with all others; that of the experts takes its answer.
        """
        chunk = self.model_chunks[0]
        if not self.is_expert:
            weights = [weight for chunk in self.model_chunks for weight in chunk.dobb_plan.managed]
            same_moments = (saved.side, saved.source) == (self.dobb.side, self.dobb.source)
            mine = not same_moments or any(saved.width(w.name, w.features) != w.width for w in weights)
            agreed = torch.tensor([mine], dtype=torch.long, device=torch.cuda.current_device())
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
            setattr(chunk, INCOMPLETE_ATTRIBUTE, bool(agreed))
        return bool(getattr(chunk, INCOMPLETE_ATTRIBUTE))

    def _check(self, saved: Saved | None, metadata: dict[str, Any]) -> None:
        if saved is None:
            if reason := refusal(metadata):
                raise CheckpointError(reason)
            if not self.dobb.load_other_optimizer:
                raise CheckpointError(
                    "the checkpoint's content metadata have no state of Dobb: another optimizer wrote it. Continue it "
                    "with --dobb-load-other-optimizer, which takes over the masters and AdamW's first moments as "
                    "momentum and starts Dobb's moments and bases anew, or start a fresh optimizer with --no-load-optim"
                )
            return
        if saved.experts_apart != self._experts_are_apart():
            had, has = ("with", "without") if saved.experts_apart else ("without", "with")
            raise CheckpointError(
                f"the checkpoint was saved {had} expert parallelism and this run is {has} it: Megatron then keeps its "
                "optimizer state in another number of optimizers, and does not convert it. Keep "
                f"--expert-model-parallel-size {'above 1' if saved.experts_apart else '1'}, or start a fresh optimizer "
                "with --no-load-optim"
            )

        for chunk in self.model_chunks:
            for name, features in chunk.dobb_plan.left_out.items():
                if saved.width(name, features[saved.side]) is not None:
                    raise CheckpointError(
                        f"{name} was on Dobb in the run that saved the checkpoint and is on AdamW in this one, for "
                        "which there is no second moment of its gradient: do not --dobb-exclude it, nor ask for more "
                        "blocks than it has features, or start a fresh optimizer with --no-load-optim"
                    )

    def _experts_are_apart(self) -> bool:
        config = self.model_chunks[0].config
        return config.num_moe_experts is not None and config.expert_model_parallel_size > 1

    def _facts(self) -> Saved:
        """What a reader must know. Collective over all ranks of the job."""
        # A rank without weights on Dobb captures nothing, and so never settles how many sequences to take.
        settled = max((capture.sequences or 0 for capture in self.captures), default=0)
        agreed = torch.tensor([settled], dtype=torch.long, device=torch.cuda.current_device())
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        return Saved.of(
            self.dobb,
            attempted_steps=self.attempted_steps,
            capture_sequences=int(agreed) or None,
            experts_apart=self._experts_are_apart(),
            refresh_is_asked=self.refresh_is_asked,
        )

    def _continue(self, attempted_steps: int, capture_sequences: int | None, *, ask: bool) -> None:
        """Go on with the schedule."""
        self.attempted_steps, self.refresh_is_asked = attempted_steps, ask
        if self.dobb.capture == "first" and self.dobb.capture_sequences is None:
            for capture in self.captures:
                capture.sequences = capture_sequences
        self._begin_step()

    def _begin_step(self, announced: bool = False) -> None:
        raise NotImplementedError

    def _state_of_blocks(self) -> StateOfBlocks:
        weights = {name: self._in_model(w) for name, w in self.managed.items()}
        return StateOfBlocks(self.refresh_groups, weights, self.dobb)

    def _in_model(self, weight: ManagedWeight) -> WeightInModel:
        group = self.expert_tp_group if weight.moe is not None else self.tp_group
        peers = dist.get_process_group_ranks(group)
        if weight.blocks_over_tp:
            return WeightInModel(weight.features, group.rank() * weight.local_blocks, 0)
        # Where the moment is summed over the tensor-parallel ranks too, a block has one owner among all of them.
        shared = set(peers) <= set(self.moment_ranks[weight.name])
        return WeightInModel(weight.features, 0, 0 if shared else group.rank())

    # Flat state.

    def _ranks_that_load(self) -> dist.ProcessGroup | None:
        # Every rank has the optimizer of the other weights, and not every pipeline stage has experts.
        return super()._ranks_that_load() if self.is_expert else None

    def _get_main_param_and_optimizer_states(self, model_param: Any) -> dict[str, Tensor]:
        tensors = super()._get_main_param_and_optimizer_states(model_param)
        if id(model_param) in self._on_dobb:
            # All parameters of a bucket must have the same state; this one is made for a save or a load alone.
            tensors[PLACEHOLDER] = torch.zeros(tensors["param"].shape, dtype=torch.float32, device="cpu")
        return tensors

    def sharded_param_state_fully_reshardable(
        self, model_sharded_state_dict: Any, is_loading: bool = False, metadata: dict[str, Any] | None = None
    ) -> dict[int, dict[str, Any]] | None:
        """See Megatron's; weights on Dobb have no placeholders there."""
        state = super().sharded_param_state_fully_reshardable(model_sharded_state_dict, is_loading, metadata)
        for number, parameter in self._parameters_in_order():
            weight = self._on_dobb.get(id(parameter))
            # Megatron stacks the layers of a model in one tensor, which must be whole if any of them is on AdamW.
            if state is not None and weight and (is_loading or kind_of(weight.name) not in self.kinds_on_adamw):
                del state[number][PLACEHOLDER]
        return state

    @functools.cached_property
    def _on_dobb(self) -> dict[int, ManagedWeight]:
        return {id(weight.parameter): weight for weight in self.managed.values()}

    def _settle_inner_state(self) -> None:
        """Let the inner optimizer hold the momenta that the segments update, whatever its own load made of them."""
        for segments, shards in zip(self.segments, self.shards, strict=True):
            for segment, shard in zip(segments, shards, strict=True):
                state = self.optimizer.state[shard]
                if state[MOMENTUM] is not segment.momentum:
                    segment.momentum.copy_(state[MOMENTUM])
                self.optimizer.state[shard] = {MOMENTUM: segment.momentum}
        for group in self.optimizer.param_groups:
            if is_dobb(group):
                group.pop("step", None)  # the inner optimizer never counts it on

    def _with_groups_of_ours(self, state: dict[str, Any]) -> dict[str, Any]:
        """State of another optimizer with param groups for the weights on Dobb, made of those that had them before."""
        groups = state["optimizer"]["param_groups"]
        known = [group for group in groups if not is_dobb(group)]
        ours = []
        for group in self.optimizer.param_groups:
            if is_dobb(group):
                alike = [other for other in known if _same_kind(group, other)]
                if not alike:
                    raise CheckpointError(
                        "the checkpoint has no param group with the learning rate and weight decay settings of the "
                        "weights on Dobb: give the settings of the run that saved it, or --no-load-optim"
                    )
                ours.append({**alike[0], "optimizer": OPTIMIZER})
        say("dobb: the checkpoint is another optimizer's; AdamW's first moments become momentum")
        return {**state, "optimizer": {**state["optimizer"], "param_groups": [*known, *ours]}}


def is_dobb(group: dict[str, Any]) -> bool:
    """Whether the parameters of a param group are on Dobb."""
    return group.get("optimizer") == OPTIMIZER


def _same_kind(ours: dict[str, Any], other: dict[str, Any]) -> bool:
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    return all(ours.get(key) == other.get(key) for key in param_group_identifier_keys if key != "optimizer")


def with_facts(metadata: dict[str, Any] | None, state: Any) -> dict[str, Any] | None:
    """Content metadata for a save of this state: with Dobb's facts, if it has state of Dobb.

    Programs (verl is one) make the dictionary that they save anew, where Megatron's has been through
    `sharded_state_dict`, or save the one that they have loaded, whose facts are those of then. No load could continue
    such a checkpoint, or it would continue with the wrong step.
    """
    facts = next(_facts_in(state), None)
    if facts is None:
        return metadata
    return {**(metadata or {}), METADATA: facts}


def has_state_of_dobb(state: Any) -> bool:
    """Whether a state to load into, or a part of it, is what Dobb's `sharded_state_dict` asks for."""
    if not isinstance(state, dict):
        return False
    mine = state.get(STATE)
    return (isinstance(mine, dict) and "saved" in mine) or any(map(has_state_of_dobb, state.values()))


def _facts_in(state: Any) -> Iterator[dict[str, Any]]:
    if isinstance(state, dict):
        if isinstance(facts := state.get(FACTS), LocalNonpersistentObject):
            yield facts.unwrap()
        for value in state.values():
            yield from _facts_in(value)
