"""Process groups of our own, so that moment traffic never queues behind Megatron's."""

from collections.abc import Sequence

import torch.distributed as dist

Ranks = tuple[int, ...]


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


def create_groups(wanted: Sequence[Ranks]) -> dict[Ranks, dist.ProcessGroup | None]:
    """New process groups for the rank sets that this rank wants. Collective over all ranks of the job.

    A set of one rank needs no group and maps to None.
    """
    everyone: list[list[Ranks]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, sorted(set(wanted)))
    groups: dict[Ranks, dist.ProcessGroup | None] = {}
    for ranks in sorted({ranks for theirs in everyone for ranks in theirs}):
        group = dist.new_group(list(ranks)) if len(ranks) > 1 else None
        if dist.get_rank() in ranks:
            groups[ranks] = group  # type: ignore[assignment]  # only ranks outside it get a placeholder
    return groups
