"""Moments summed to their owners, bases sent to their holders: the only traffic that Dobb adds, on refresh steps.

One `RefreshGroup` serves all weights of one block width whose tokens are summed over one process group. Every
refresh makes the same three collectives on every rank of the group, whatever tokens a rank saw:

1. a reduce-scatter of one flat fp32 buffer: a triangle of every block, then one token count per weight, in equal
   chunks;
2. an all-to-all that brings whole blocks from the chunks to their owners;
3. an all-to-all in which owners send refreshed bases to the other holders. In front of every message go the counts
   of kept and of fallback blocks, and the number of a weight that wrongly saw no token, so that all ranks know.

All splits are fixed at construction. A group of one rank communicates nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from .capture import MomentSum
from .costs import COUNTS_BYTES
from .errors import CaptureError, LayoutError
from .moment import pack_triangle, refresh_, unpack_triangle
from .ops import Backend, refresh_basis
from .orthogonalize import Method
from .owners import Block, FlatExchange, Ownership


@dataclass(frozen=True)
class HeldWeight:
    """One managed weight as a rank sees it.

    Attributes:
        key: the weight's name, the same on all ranks of the group.
        blocks: blocks in a row of the weight (of its tensor-parallel part, when the columns are split).
        held: the blocks of which this rank's shard holds a row, ascending.
        may_be_idle: whether a step without a token is ordinary (an expert that nothing was routed to).
    """

    key: str
    blocks: int
    held: tuple[int, ...]
    may_be_idle: bool = False


@dataclass
class RefreshCounts:
    """Blocks that a refresh left alone (no tokens, all zero or non-finite), and that Householder had to finish."""

    skipped: int = 0
    fallbacks: int = 0


class RefreshGroup:
    """Moments at their owners and bases at their holders, for all weights of one width and one process group.

    Args:
        width: the blocks' width `b`.
        weights: the managed weights; the same keys and block counts on every rank of the group.
        group: the process group over which tokens differ; None for a single process.
        moment_dtype: storage of the moments.
        basis_dtype: storage of the bases.
        device: where both live.
        loads: refresh work that each rank of the group has from wider blocks.

    Raises:
        LayoutError: if the ranks of the group disagree about the weights.
    """

    def __init__(
        self,
        width: int,
        weights: Sequence[HeldWeight],
        group: dist.ProcessGroup | None,
        *,
        moment_dtype: torch.dtype,
        basis_dtype: torch.dtype,
        device: torch.device,
        loads: Sequence[int] = (),
    ) -> None:
        self.width = width
        self.weights = tuple(sorted(weights, key=lambda w: w.key))
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.ranks = dist.get_world_size(group) if group is not None else 1
        widths = {w.key: width for w in self.weights}
        self.ownership = Ownership.share_out(self._gather_holdings(), widths, loads)
        self.held = self.ownership.held_by(self.rank)
        self.owned = self.ownership.owned_by(self.rank)

        def positions(blocks: Sequence[Block]) -> Tensor:
            return torch.tensor([position[b] for b in blocks], dtype=torch.long, device=device)

        position = {block: i for i, block in enumerate(self.held)}
        self.owned_positions = positions(self.owned)
        self.basis_sends = [positions(blocks) for blocks in self.ownership.basis_sends(self.rank)]
        self.basis_receives = [positions(blocks) for blocks in self.ownership.basis_receives(self.rank)]
        self.basis = torch.eye(width, dtype=basis_dtype, device=device).repeat(len(self.held), 1, 1)
        self.moment = torch.zeros(len(self.owned), width, width, dtype=moment_dtype, device=device)
        self._plan_moments()

    def basis_of(self, key: str) -> Tensor:
        """The bases of the blocks that this rank holds of a weight, `[held, b, b]`: a view that refreshes change."""
        positions = [i for i, (name, _) in enumerate(self.held) if name == key]
        return self.basis[positions[0] : positions[-1] + 1]

    def refresh(
        self,
        sums: Mapping[str, MomentSum],
        *,
        beta: float,
        method: Method,
        iterations: int,
        backend: Backend = "auto",
    ) -> RefreshCounts:
        """Fold the captured sums of all ranks into the moments and renew the bases.

        Args:
            sums: captured on this rank since the last refresh, for every key. Emptied as they are packed.
            beta: decay of the moments.
            method: how to orthogonalise.
            iterations: orthogonal iterations.
            backend: see `ops.refresh_basis`.

        Returns:
            Counts over all ranks of the group.

        Raises:
            CaptureError: on every rank, if none captured a token for a weight that should have seen some.
        """
        flat = self._pack(sums)
        received = self._bring_to_owners(flat)
        blocks = received[: len(self.owned) * self.triangle].view(-1, self.triangle)
        total = unpack_triangle(blocks, self.width)
        tokens = received[len(self.owned) * self.triangle :][self.token_index]
        basis = self.basis[self.owned_positions]
        skipped, fallbacks = refresh_(
            *(self.moment, basis, total, tokens),
            beta=beta,
            method=method,
            iterations=iterations,
            orthogonalize=partial(refresh_basis, backend=backend),
        )
        self.basis[self.owned_positions] = basis
        everyone = self._send_to_holders(torch.stack([skipped, fallbacks, self._unseen(tokens)]).to(torch.int32))
        self._check_seen({number for _, _, number in everyone if number})
        return RefreshCounts(sum(row[0] for row in everyone), sum(row[1] for row in everyone))

    # Construction.

    def _gather_holdings(self) -> list[dict[str, tuple[int, ...]]]:
        mine = [(w.key, w.blocks, w.held) for w in self.weights]
        if self.ranks == 1:
            everyone = [mine]
        else:
            everyone = [[] for _ in range(self.ranks)]
            dist.all_gather_object(everyone, mine, group=self.group)
        names = [(key, blocks) for key, blocks, _ in mine]
        for rank, theirs in enumerate(everyone):
            if [(key, blocks) for key, blocks, _ in theirs] != names:
                differing = {*names} ^ {(key, blocks) for key, blocks, _ in theirs}
                raise LayoutError(
                    f"ranks {self.rank} and {rank} of one data-parallel group manage different weights of block "
                    f"width {self.width}: {sorted(differing)[:4]}; every rank must build the same model with the "
                    "same --dobb-* flags"
                )
        return [{key: held for key, _, held in theirs} for theirs in everyone]

    def _plan_moments(self) -> None:
        """Fix what of the flat buffer goes where: all triangles, each to its owner, then all token counts."""
        owners = self.ownership.owners
        for weight in self.weights:
            if len(owners.get(weight.key, ())) != weight.blocks:
                raise LayoutError(
                    f"{weight.key} has {weight.blocks} blocks, but the ranks of its data-parallel group hold only "
                    f"{len(owners.get(weight.key, ()))} of them"
                )
        self.triangle = self.width * (self.width + 1) // 2
        self.first_token = sum(w.blocks for w in self.weights) * self.triangle
        triangles = [{owner} for w in self.weights for owner in owners[w.key]]
        counts = [set(owners[w.key]) for w in self.weights]
        lengths = [self.triangle] * len(triangles) + [1] * len(counts)
        self.flow = FlatExchange(lengths, triangles + counts, self.ranks)
        self.moment_sends = self.flow.sends(self.rank)
        self.moment_send_sizes = [sum(end - start for start, end in ranges) for ranges in self.moment_sends]
        self.moment_receive_sizes = self.flow.receive_sizes(self.rank)
        place = {key: i for i, key in enumerate(dict.fromkeys(key for key, _ in self.owned))}
        number = {w.key: 0 if w.may_be_idle else i for i, w in enumerate(self.weights, start=1)}
        self.owned_numbers = torch.tensor(
            [number[key] for key, _ in self.owned], dtype=torch.long, device=self.basis.device
        )
        self.token_index = torch.tensor(
            [place[key] for key, _ in self.owned], dtype=torch.long, device=self.basis.device
        )

    # Refresh.

    def _pack(self, sums: Mapping[str, MomentSum]) -> Tensor:
        flat = torch.zeros(self.flow.chunk * self.ranks, dtype=torch.float32, device=self.basis.device)
        start = 0
        for index, weight in enumerate(self.weights):
            entry = sums[weight.key]
            end = start + weight.blocks * self.triangle
            if entry.total is not None:
                flat[start:end] = pack_triangle(entry.total).flatten()
                flat[self.first_token + index] = entry.tokens
                entry.total = None
            start = end
        return flat

    def _bring_to_owners(self, flat: Tensor) -> Tensor:
        """Every owned triangle, then the token count of every weight that has one, from the flat buffers' sum."""
        if self.ranks == 1:
            return flat
        mine = flat.new_empty(self.flow.chunk)
        dist.reduce_scatter_tensor(mine, flat, group=self.group)
        pieces = [mine[start:end] for ranges in self.moment_sends for start, end in ranges]
        outgoing = torch.cat(pieces) if pieces else mine[:0]
        received = mine.new_empty(sum(self.moment_receive_sizes))
        dist.all_to_all_single(received, outgoing, self.moment_receive_sizes, self.moment_send_sizes, group=self.group)
        return received

    def _unseen(self, tokens: Tensor) -> Tensor:
        """The number, from 1, of an owned weight that saw no token though it should have; 0 if there is none."""
        unseen = torch.where(tokens == 0, self.owned_numbers, 0)
        return torch.cat([unseen, unseen.new_zeros(1)]).amax()

    def _check_seen(self, numbers: set[int]) -> None:
        if numbers:
            keys = ", ".join(self.weights[number - 1].key for number in sorted(numbers))
            raise CaptureError(
                f"no input activation was captured for {keys} on a refresh step, or for more; the module must be "
                "called in training mode through its own forward, with its hooks, or be excluded with --dobb-exclude"
            )

    def _send_to_holders(self, counts: Tensor) -> list[list[int]]:
        """Send refreshed bases to their holders, and `counts` of every rank to all others; returns all counts."""
        if self.ranks == 1:
            return [counts.tolist()]
        head = counts.view(torch.uint8)
        messages = []
        for positions in self.basis_sends:
            messages += [head, self.basis[positions].flatten().view(torch.uint8)]
        outgoing = torch.cat(messages)
        block_bytes = self.width * self.width * self.basis.element_size()
        send_sizes = [COUNTS_BYTES + p.numel() * block_bytes for p in self.basis_sends]
        receive_sizes = [COUNTS_BYTES + p.numel() * block_bytes for p in self.basis_receives]
        received = outgoing.new_empty(sum(receive_sizes))
        dist.all_to_all_single(received, outgoing, receive_sizes, send_sizes, group=self.group)
        heads = []
        for positions, message in zip(self.basis_receives, received.split(receive_sizes), strict=True):
            # A clone starts at an aligned address, which a view of another dtype needs.
            heads.append(message[:COUNTS_BYTES].clone().view(torch.int32))
            if positions.numel():
                blocks = message[COUNTS_BYTES:].clone().view(self.basis.dtype)
                self.basis[positions] = blocks.view(-1, self.width, self.width)
        return torch.stack(heads).tolist()
