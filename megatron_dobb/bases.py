"""The moments and bases of a model whose weights are whole on every rank."""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .capture import MomentSum
from .config import DTYPES, DobbConfig
from .exchange import HeldWeight, RefreshCounts, RefreshGroup, share_out
from .linear import LinearWeight
from .owners import Block


class ModelBases:
    """Moments and bases of all weights: one `RefreshGroup` for each block width and device.

    Every rank keeps a copy of all moments, so that each can save them by itself; owners send theirs after a refresh.
    """

    def __init__(self, weights: Sequence[LinearWeight], config: DobbConfig, group: dist.ProcessGroup | None) -> None:
        self.config = config
        self.device = weights[0].parameter.device
        members: dict[tuple[int, str], list[HeldWeight]] = {}
        for weight in weights:
            held = HeldWeight(weight.name, weight.blocks, weight.width, tuple(range(weight.blocks)), may_be_idle=True)
            members.setdefault((-weight.width, str(weight.parameter.device)), []).append(held)
        self.groups: list[RefreshGroup] = []
        self.moments: list[Tensor] = []
        self.place: dict[str, tuple[int, slice]] = {}
        for key, ownership in share_out(members, group).items():
            held_weights = members[key]
            refresh_group = RefreshGroup(
                held_weights,
                group,
                ownership,
                moment_dtype=DTYPES[config.moment_dtype],
                basis_dtype=DTYPES[config.basis_dtype],
                device=torch.device(key[1]),
            )
            keys = [key for key, _ in refresh_group.held]
            for held in held_weights:
                first = keys.index(held.key)
                self.place[held.key] = (len(self.groups), slice(first, first + held.blocks))
            self.groups.append(refresh_group)
            self.moments.append(_space_for_all(refresh_group))

    def basis_of(self, name: str) -> Tensor:
        """The bases of a weight, `[B, b, b]`: a view."""
        index, blocks = self.place[name]
        return self.groups[index].basis[blocks]

    def moment_of(self, name: str) -> Tensor:
        """The moments of a weight, `[B, b, b]`: a view."""
        index, blocks = self.place[name]
        return self.moments[index][blocks]

    def blocks(self) -> Iterator[tuple[Sequence[Block], Tensor, Tensor]]:
        """All blocks of each group, their moments and their bases `[k, b, b]`."""
        for group, moments in zip(self.groups, self.moments, strict=True):
            yield group.held, moments, group.basis

    def copies(self) -> list[tuple[Sequence[Block], Tensor]]:
        """All blocks of each group and copies of their bases."""
        return [(blocks, bases.clone()) for blocks, _, bases in self.blocks()]

    def refresh(self, sums: Mapping[str, MomentSum]) -> RefreshCounts:
        """See `RefreshGroup.refresh`."""
        counts = RefreshCounts()
        for group, moments in zip(self.groups, self.moments, strict=True):
            found = group.refresh(
                sums,
                beta=self.config.moment_beta,
                method=self.config.qr,
                iterations=self.config.iterations,
                backend=self.config.backend,
            )
            counts.skipped += found.skipped
            counts.fallbacks += found.fallbacks
            if group.ranks > 1:
                _collect_moments(group, moments)
        return counts

    def take_owned_moments(self) -> None:
        """Give the owners their part of moments that were loaded."""
        for group, moments in zip(self.groups, self.moments, strict=True):
            group.moment.copy_(moments[group.owned_positions])


def _space_for_all(group: RefreshGroup) -> Tensor:
    """Where the moments of all blocks go, `[held, b, b]`; one rank alone owns them all already."""
    return group.moment if group.ranks == 1 else torch.zeros_like(group.basis, dtype=group.moment.dtype)


def _collect_moments(group: RefreshGroup, moments: Tensor) -> None:
    """Bring the moments of all blocks, `[held, b, b]`, from their owners to every rank."""
    owned = [group.ownership.owned_by(rank) for rank in range(group.ranks)]
    share = max(len(blocks) for blocks in owned)
    mine = moments.new_zeros(share, group.width, group.width)
    mine[: len(group.moment)] = group.moment
    everyone = moments.new_empty(group.ranks * share, group.width, group.width)
    dist.all_gather_into_tensor(everyone, mine, group=group.group)
    place = {block: rank * share + i for rank, blocks in enumerate(owned) for i, block in enumerate(blocks)}
    torch.index_select(everyone, 0, torch.tensor([place[b] for b in group.held], device=moments.device), out=moments)
