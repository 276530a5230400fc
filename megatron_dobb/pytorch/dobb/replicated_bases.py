"""Moments and bases of a model with whole weights on every rank."""

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...methods.dobb import schedule
from ...methods.dobb.block_ownership import BlockOwnership, work
from ...methods.dobb.capture import MomentSum
from ...methods.dobb.refresh_group import HeldWeight, RefreshCounts, RefreshGroup, share_out
from ...methods.dobb.settings import DTYPES, DobbConfig
from ...sharding.ownership import Block
from .block_weights import BlockWeight


class ModelBases:
    """Moments and bases of all weights: one `RefreshGroup` for each block width and device, and phase of a stagger.

    Every rank keeps a copy of all moments, so that each can save them by itself; owners send theirs after a refresh.
    """

    def __init__(self, weights: Sequence[BlockWeight], config: DobbConfig, group: dist.ProcessGroup | None) -> None:
        self.config = config
        self.device = weights[0].parameter.device
        work_of = {weight.name: weight.blocks * work(weight.width) for weight in weights}
        self.phase_of = schedule.phases(work_of, config.refresh_interval if config.stagger else 1)
        members: dict[int, dict[tuple[int, str], list[HeldWeight]]] = {}
        for weight in weights:
            held = HeldWeight(weight.name, weight.blocks, weight.width, tuple(range(weight.blocks)), may_be_idle=True)
            of_phase = members.setdefault(self.phase_of[weight.name], {})
            of_phase.setdefault((-weight.width, str(weight.parameter.device)), []).append(held)
        self.groups: list[RefreshGroup] = []
        self.moments: list[Tensor] = []
        self.place: dict[str, tuple[int, slice]] = {}
        for _, of_phase in sorted(members.items()):
            for key, ownership in share_out(of_phase, group).items():
                self._add(of_phase[key], group, ownership, torch.device(key[1]))

    def _add(
        self,
        weights: Sequence[HeldWeight],
        group: dist.ProcessGroup | None,
        ownership: BlockOwnership,
        device: torch.device,
    ) -> None:
        refresh_group = RefreshGroup(
            weights,
            group,
            ownership,
            moment_dtype=DTYPES[self.config.moment_dtype],
            basis_dtype=DTYPES[self.config.basis_dtype],
            device=device,
            transport_dtype=DTYPES[self.config.moment_transport],
        )
        keys = [key for key, _ in refresh_group.held]
        for held in weights:
            first = keys.index(held.key)
            self.place[held.key] = (len(self.groups), slice(first, first + held.blocks))
        self.groups.append(refresh_group)
        self.moments.append(_space_for_all(refresh_group))

    def due(self, step: int) -> set[str]:
        """List the weights to refresh on the step after `step` attempted ones."""
        if self.config.source == "none":
            return set()
        interval = self.config.refresh_interval
        return {name for name, phase in self.phase_of.items() if schedule.is_due(step, phase, interval)}

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

    def copies(self, weights: Collection[str]) -> list[tuple[Sequence[Block], Tensor]]:
        """All blocks of the groups of some weights and copies of their bases."""
        return [(blocks, bases.clone()) for blocks, _, bases in self.blocks() if blocks[0][0] in weights]

    def refresh(self, sums: Mapping[str, MomentSum]) -> RefreshCounts:
        """Run `RefreshGroup.refresh` for the groups with captured sums."""
        counts = RefreshCounts()
        for group, moments in zip(self.groups, self.moments, strict=True):
            if group.weights[0].key not in sums:
                continue
            found = group.refresh(
                sums,
                beta=self.config.moment_beta,
                method=self.config.qr,
                iterations=self.config.iterations,
                backend=self.config.backend,
            )
            counts.add(found)
            if group.ranks > 1:
                _collect_moments(group, moments)
        return counts

    def take_owned_moments(self) -> None:
        """Copy the owned part of loaded moments to the owners."""
        for group, moments in zip(self.groups, self.moments, strict=True):
            group.moment.copy_(moments[group.owned_positions])


def _space_for_all(group: RefreshGroup) -> Tensor:
    """Space for the moments of all blocks, `[held, b, b]`; one rank alone owns them all already."""
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
