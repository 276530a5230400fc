"""Process groups of our own, so that moment traffic never queues behind Megatron's."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...methods.dobb.settings import DobbConfig
from ..model.chunk_state import Selection
from .select_weights import DobbWeight
from .weight_sharding import ColumnSet, MomentSet, check_split_expert, column_set, moment_set

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
    def create(cls, chunk: Any, selections: Sequence[Selection[DobbWeight]], config: DobbConfig) -> "MomentGroups":
        """The groups for all weights, experts and others, of a rank's model. Collective over all ranks of the job.

        Args:
            chunk: one of the rank's model chunks, for Megatron's groups.
            selections: of all its model chunks.
            config: the settings.
        """
        weights = [weight for selection in selections for weight in selection.managed]
        for weight in weights:
            check_split_expert(weight, config)
        tokens, tokens_over_tensor = token_ranks(chunk.dp_cp_group, chunk.tp_group)
        moment_sets: dict[MomentSet, Ranks] = {
            "tokens": tokens,
            "tokens over tensor": tokens_over_tensor,
            "expert tokens": ranks_of_group(chunk.expt_dp_group),
        }
        ranks_of = {weight.name: moment_sets[moment_set(weight, config)] for weight in weights}
        columns_of: dict[str, Ranks] = {}
        if config.norm == "l2":
            shards, shards_over_tensor = token_ranks(chunk.intra_dp_cp_group, chunk.tp_group)
            column_sets: dict[ColumnSet, Ranks] = {
                "alone": (dist.get_rank(),),
                "tensor": ranks_of_group(chunk.tp_group),
                "shards": shards,
                "shards over tensor": shards_over_tensor,
                "expert shards": ranks_of_group(chunk.intra_expt_dp_group),
            }
            columns_of = {weight.name: column_sets[column_set(weight)] for weight in weights}
        wanted = [*ranks_of.values(), *columns_of.values()]
        return cls(ranks_of, columns_of, create_groups(wanted, timeout_of(chunk.dp_cp_group)))


def ranks_of_group(group: dist.ProcessGroup) -> Ranks:
    """The global ranks of a group, ascending."""
    return tuple(sorted(dist.get_process_group_ranks(group)))


def token_ranks(tokens_group: dist.ProcessGroup, tensor_group: dist.ProcessGroup) -> tuple[Ranks, Ranks]:
    """Global ranks over which the tokens of a weight are summed. Collective over all ranks of the job.

    Args:
        tokens_group: the ranks that hold different sequences (data and context parallelism).
        tensor_group: the tensor-parallel ranks.

    Returns:
        The ranks of `tokens_group`, and the union of those groups over all tensor-parallel peers: the ranks to sum
        over when the hooked input is a sequence shard.
    """
    mine = ranks_of_group(tokens_group)
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
