"""Process groups of our own, so that moment traffic never queues behind Megatron's."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..config import DobbConfig
from ..errors import UnsupportedError
from .manage import ChunkPlan, ManagedWeight

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class MomentGroups:
    """Over which ranks the moment of each weight of this rank is summed, and the norms of its columns.

    Attributes:
        ranks_of: the global ranks whose sums make up the moment, for each weight's name.
        columns_of: the global ranks that share the columns of coefficients, with `--dobb-norm l2`.
        groups: the process group of each such set of ranks.
    """

    ranks_of: dict[str, Ranks]
    columns_of: dict[str, Ranks]
    groups: dict[Ranks, dist.ProcessGroup | None]

    @classmethod
    def create(cls, chunk: Any, plans: Sequence[ChunkPlan], config: DobbConfig) -> "MomentGroups":
        """The groups for all weights, experts and others, of a rank's model. Collective over all ranks of the job.

        Args:
            chunk: one of the rank's model chunks, for Megatron's groups.
            plans: of all its model chunks.
            config: the settings.
        """
        weights = [weight for plan in plans for weight in plan.managed]
        for weight in weights:
            if weight.is_expert_parallel and weight.parts_over_tp and (config.norm == "l2" or config.source == "gram"):
                raise UnsupportedError(
                    f"--dobb-norm {config.norm} with --dobb-source {config.source} does not work with "
                    f"--expert-tensor-parallel-size above 1, which splits the blocks of {weight.name}: use 1, or "
                    "--dobb-exclude the experts"
                )
        same_tokens, over_tensor_parallel = token_ranks(chunk.dp_cp_group, chunk.tp_group)
        # The dispatcher gives all tensor-parallel ranks of an expert the same tokens.
        expert_ranks = tuple(sorted(dist.get_process_group_ranks(chunk.expt_dp_group)))
        ranks_of: dict[str, Ranks] = {}
        for weight in weights:
            if weight.is_expert_parallel:
                ranks_of[weight.name] = expert_ranks
            elif _sums_over_tp(weight, config):
                # Copies that all see the same tokens count them once each, which leaves the mean as it is.
                ranks_of[weight.name] = over_tensor_parallel
            else:
                ranks_of[weight.name] = same_tokens
        columns_of: dict[str, Ranks] = {}
        if config.norm == "l2":
            mine = (dist.get_rank(),)
            shards, shards_over_tp = token_ranks(chunk.intra_dp_cp_group, chunk.tp_group)
            expert_shards = tuple(sorted(dist.get_process_group_ranks(chunk.intra_expt_dp_group)))
            tensor_ranks = tuple(sorted(dist.get_process_group_ranks(chunk.tp_group)))
            for weight in weights:
                own, over_tp = (mine, tensor_ranks) if weight.output_side else (shards, shards_over_tp)
                if weight.is_expert_parallel:
                    columns_of[weight.name] = mine if weight.output_side else expert_shards
                else:
                    columns_of[weight.name] = over_tp if weight.parts_over_tp else own
        wanted = [*ranks_of.values(), *columns_of.values()]
        return cls(ranks_of, columns_of, create_groups(wanted, timeout_of(chunk.dp_cp_group)))


def _sums_over_tp(weight: ManagedWeight, config: DobbConfig) -> bool:
    """Whether the sums of tensor-parallel ranks make up one moment together."""
    geometry = weight.geometry
    if config.source == "gram":  # what is summed are parts of the gradient
        return weight.parts_over_tp or geometry.replicated
    over_tp = geometry.outputs_over_tp if weight.output_side else geometry.tokens_over_tp
    return bool(over_tp) or geometry.replicated


def token_ranks(tokens_group: dist.ProcessGroup, tensor_group: dist.ProcessGroup) -> tuple[Ranks, Ranks]:
    """Global ranks over which the tokens of a weight are summed. Collective over all ranks of the job.

    Args:
        tokens_group: the ranks that hold different sequences (data and context parallelism).
        tensor_group: the tensor-parallel ranks.

    Returns:
        The ranks of `tokens_group`, and the union of those groups over all tensor-parallel peers: the ranks to sum
        over when the hooked input is a sequence shard.
    """
    mine = tuple(sorted(dist.get_process_group_ranks(tokens_group)))
    everyone: list[Ranks] = [()] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    peers = dist.get_process_group_ranks(tensor_group)
    return mine, tuple(sorted({rank for peer in peers for rank in everyone[peer]}))


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long the collectives of a group may take: what `--distributed-timeout-minutes` gave Megatron's groups."""
    device = torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu")
    return group._get_backend(device).options._timeout


def create_groups(wanted: Sequence[Ranks], timeout: timedelta | None = None) -> dict[Ranks, dist.ProcessGroup | None]:
    """New process groups for the rank sets that this rank wants. Collective over all ranks of the job.

    A set of one rank needs no group and maps to None.

    Args:
        wanted: sets of global ranks.
        timeout: of the groups' collectives; torch's default unless given.
    """
    everyone: list[list[Ranks]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, sorted(set(wanted)))
    groups: dict[Ranks, dist.ProcessGroup | None] = {}
    for ranks in sorted({ranks for theirs in everyone for ranks in theirs}):
        group = dist.new_group(list(ranks), timeout=timeout) if len(ranks) > 1 else None
        if dist.get_rank() in ranks:
            groups[ranks] = group  # type: ignore[assignment]  # only ranks outside it get a placeholder
    return groups
