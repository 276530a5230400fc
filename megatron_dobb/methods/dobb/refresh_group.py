"""Sum moments to their owners and send bases to their holders: the only traffic that Dobb adds, on refresh steps.

One `RefreshGroup` serves all weights of one block width whose tokens are summed over one process group. Every
refresh makes the same three collectives on every rank of the group, whatever tokens a rank saw:

1. a reduce-scatter of one flat fp32 buffer: a triangle of every block, then one token count per weight, in equal
   chunks;
2. an all-to-all that brings whole blocks from the chunks to their owners;
3. an all-to-all in which owners send refreshed bases to the (other) holders. In front of every message go the counts
   of kept and of fallback blocks, and the number of a weight that wrongly saw no token, so that all ranks know.

With moments that travel in bf16, the first is an all-to-all of the same buffer in half the bytes, whose parts are
summed in fp32 where they arrive.

All splits are fixed at construction. A group of one rank communicates nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import CaptureError, LayoutError
from ...sharding.ownership import Block
from .block_ownership import BlockOwnership, triangle
from .capture import MomentSum
from .footprint import COUNT_TERMS, COUNTS_BYTES, blocks_at_a_time
from .kernels import Backend, refresh_basis
from .moment import pack_triangle, refresh_, unpack_triangle
from .orthogonalize import Method


@dataclass(frozen=True)
class HeldWeight:
    """Managed weight, as seen by one rank.

    Attributes:
        key: the weight's name, the same on all ranks of the group.
        blocks: blocks in a row of the weight (of its tensor-parallel part, when the columns are split).
        width: of each block, `b`.
        held: the blocks with a row in this rank's shard, ascending.
        may_be_idle: whether a step without tokens is normal (an expert that received none).
    """

    key: str
    blocks: int
    width: int
    held: tuple[int, ...]
    may_be_idle: bool = False


@dataclass
class RefreshCounts:
    """Blocks that a refresh left alone (no tokens, all zero or non-finite), and that Householder had to finish."""

    skipped: int = 0
    fallbacks: int = 0

    def add(self, other: "RefreshCounts") -> None:
        """Add the counts of another refresh."""
        self.skipped += other.skipped
        self.fallbacks += other.fallbacks


def share_out[Key: Any](
    members: Mapping[Key, Sequence[HeldWeight]], group: dist.ProcessGroup | None
) -> dict[Key, BlockOwnership]:
    """Assign the blocks of all refresh groups in a process group together, to balance their total work.

    Collective over the group: one gather, however many members there are.

    Args:
        members: the weights of every refresh group to be, by what tells the groups apart (sortable); the same on every
            rank but for what it holds.
        group: the process group over which tokens differ; None for a single process.

    Returns:
        The ownership of each refresh group's blocks.

    Raises:
        LayoutError: on every rank, if the ranks disagree about the weights, or hold no row of some block.
    """
    weights = sorted((w for each in members.values() for w in each), key=lambda w: w.key)
    known = [(w.key, w.blocks, w.width) for w in weights]
    mine = (known, {w.key: w.held for w in weights if w.held})
    everyone = [mine]
    rank = 0
    if group is not None and dist.get_world_size(group) > 1:
        rank = dist.get_rank(group)
        everyone = [mine] * dist.get_world_size(group)
        dist.all_gather_object(everyone, mine, group=group)
    for other, (theirs, _) in enumerate(everyone):
        if theirs != known:
            differing = {*known} ^ {*theirs}
            raise LayoutError(
                f"ranks {rank} and {other} of one data-parallel group manage different weights (name, blocks, block "
                f"width): {sorted(differing)[:4]}; every rank must build the same model with the same --dobb-* flags"
            )
    whole = BlockOwnership.share_out([held for _, held in everyone], {w.key: w.width for w in weights})
    for weight in weights:
        owned = len(whole.owners.get(weight.key, ()))
        if owned != weight.blocks:
            raise LayoutError(
                f"{weight.key} has {weight.blocks} blocks, but the ranks of its data-parallel group hold only {owned} "
                "of them"
            )
    return {key: whole.part([w.key for w in members[key]]) for key in sorted(members)}


class RefreshGroup:
    """Moments at their owners and bases at owners and holders, for weights of one width and one process group.

    A refresh consists of `reduce`, `renew` and `exchange`: `renew` computes, the other two communicate.

    Attributes:
        held: the blocks with a row on this rank, ascending: the first of `kept`.
        owned: the blocks whose moments are here, ascending; `moment [owned, b, b]` follows them.
        kept: `held`, then what is owned without being held, ascending; `basis [kept, b, b]` follows them.
        owned_positions: where each of `owned` is among `kept`.

    Args:
        weights: the managed weights; the same keys and block counts on every rank of the group.
        group: the process group over which tokens differ; None for a single process.
        ownership: their owners, from `share_out`.
        moment_dtype: storage of the moments.
        basis_dtype: storage of the bases.
        device: where both live.
        transport_dtype: dtype for communicating captured sums, fp32 or bf16.
    """

    def __init__(
        self,
        weights: Sequence[HeldWeight],
        group: dist.ProcessGroup | None,
        ownership: BlockOwnership,
        *,
        moment_dtype: torch.dtype,
        basis_dtype: torch.dtype,
        device: torch.device,
        transport_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.transport_dtype, self.count_terms = transport_dtype, COUNT_TERMS[transport_dtype.itemsize]
        (self.width,) = {w.width for w in weights}
        self.blocks_at_a_time = blocks_at_a_time(self.width)
        self.weights = tuple(sorted(weights, key=lambda w: w.key))
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.ranks = dist.get_world_size(group) if group is not None else 1
        self.ownership = ownership
        self.held = self.ownership.held_by(self.rank)
        self.owned = self.ownership.owned_by(self.rank)
        self.kept = self.ownership.kept_by(self.rank)

        def positions(blocks: Sequence[Block]) -> Tensor:
            return torch.tensor([position[b] for b in blocks], dtype=torch.long, device=device)

        position = {block: i for i, block in enumerate(self.kept)}
        self.owned_positions = positions(self.owned)
        sends, receives = self.ownership.result_sends(self.rank), self.ownership.result_receives(self.rank)
        self.sent_positions = positions([block for message in sends for block in message])
        self.received_positions = positions([block for message in receives for block in message])
        self.block_bytes = self.width**2 * basis_dtype.itemsize
        self.basis_send_sizes = [COUNTS_BYTES + len(blocks) * self.block_bytes for blocks in sends]
        self.basis_receive_sizes = [COUNTS_BYTES + len(blocks) * self.block_bytes for blocks in receives]
        self.basis = torch.eye(self.width, dtype=basis_dtype, device=device).repeat(len(self.kept), 1, 1)
        self.moment = torch.zeros(len(self.owned), self.width, self.width, dtype=moment_dtype, device=device)
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
        """Fold the captured sums of all ranks into the moments and renew the bases; collective.

        Args:
            sums: see `reduce`.
            beta: decay of the moments.
            method: how to orthogonalise.
            iterations: orthogonal iterations.
            backend: see `kernels.refresh_basis`.

        Returns:
            Counts over all ranks of the group.

        Raises:
            CaptureError: see `exchange`.
        """
        received = [self.reduce(sums)]  # `renew` alone is to keep it
        counts = self.renew(received.pop(), beta=beta, method=method, iterations=iterations, backend=backend)
        return self.exchange(counts)

    def reduce(self, sums: Mapping[str, MomentSum]) -> Tensor:
        """Sum what all ranks have captured; collective.

        Args:
            sums: captured on this rank since the last refresh, for every key. Emptied as they are packed.

        Returns:
            Every triangle that this rank owns, then the token count of every weight that has one.
        """
        return self.bring_to_owners(self._pack(sums))

    def renew(
        self, received: Tensor, *, beta: float, method: Method, iterations: int, backend: Backend = "auto"
    ) -> Tensor:
        """Fold what `reduce` brought into the owned moments and renew their bases, without communication.

        Returns:
            `[3]` in int32: blocks that were left alone, those that Householder had to finish, and the number of a
            weight that wrongly saw no token, or 0.
        """
        end = len(self.owned) * self.triangle
        blocks = received[:end].view(-1, self.triangle).split(self.blocks_at_a_time)
        tokens = received[end:].view(-1, self.count_terms).sum(dim=1)[self.token_index]
        counts = torch.zeros(2, dtype=torch.long, device=received.device)
        for triangles, moment, positions, their_tokens in zip(
            blocks,
            *(t.split(self.blocks_at_a_time) for t in (self.moment, self.owned_positions, tokens)),
            strict=True,
        ):
            basis = self.basis[positions]
            counts += torch.stack(
                refresh_(
                    *(moment, basis, unpack_triangle(triangles, self.width), their_tokens),
                    beta=beta,
                    method=method,
                    iterations=iterations,
                    orthogonalize=partial(refresh_basis, backend=backend),
                )
            )
            self.basis[positions] = basis
        return torch.cat([counts, self._unseen(tokens)[None]]).to(torch.int32)

    def exchange(self, counts: Tensor) -> RefreshCounts:
        """Send the bases and counts from `renew` to the ranks that need them; collective.

        Returns:
            Counts over all ranks of the group.

        Raises:
            CaptureError: on every rank, if none captured a token for a weight that should have seen some.
        """
        return self.read_counts(self.send_to_holders(counts).tolist())

    def read_counts(self, everyone: Sequence[Sequence[int]]) -> RefreshCounts:
        """Add up the counts of all ranks, from `send_to_holders`.

        Raises:
            CaptureError: see `exchange`.
        """
        self._check_seen({number for _, _, number in everyone if number})
        return RefreshCounts(sum(row[0] for row in everyone), sum(row[1] for row in everyone))

    # Construction.

    def _plan_moments(self) -> None:
        """Compute this rank's sends and receives of the flat buffer."""
        self.triangle = triangle(self.width)
        self.first_token = sum(w.blocks for w in self.weights) * self.triangle
        self.flow = self.ownership.moment_route(self.count_terms)
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
        dtype = self.transport_dtype if self.ranks > 1 else torch.float32
        flat = torch.zeros(self.flow.chunk * self.ranks, dtype=dtype, device=self.basis.device)
        start = 0
        for index, weight in enumerate(self.weights):
            entry = sums[weight.key]
            end = start + weight.blocks * self.triangle
            if entry.total is not None:
                flat[start:end] = pack_triangle(entry.total).flatten()
                first = self.first_token + index * self.count_terms
                for place, part in enumerate(_split(entry.tokens, flat.dtype, self.count_terms)):
                    flat[first + place].fill_(part)  # a copy of a CPU tensor would wait for what the GPU has been given
                entry.total = None
            start = end
        return flat

    def bring_to_owners(self, flat: Tensor) -> Tensor:
        """Sum the flat buffers of all ranks; collective.

        Returns:
            Every triangle that this rank owns, then the token count of every weight that has one.
        """
        if self.ranks == 1:
            return flat
        if flat.dtype == torch.float32:
            mine = flat.new_empty(self.flow.chunk)
            dist.reduce_scatter_tensor(mine, flat, group=self.group)
            del flat  # its memory is free for what follows
        else:
            parts = torch.empty_like(flat)
            dist.all_to_all_single(parts, flat, group=self.group)
            mine = parts.view(self.ranks, self.flow.chunk).sum(dim=0, dtype=torch.float32)
            del flat, parts
        pieces = [mine[start:end] for ranges in self.moment_sends for start, end in ranges]
        outgoing = torch.cat(pieces) if pieces else mine[:0]
        received = mine.new_empty(sum(self.moment_receive_sizes))
        dist.all_to_all_single(received, outgoing, self.moment_receive_sizes, self.moment_send_sizes, group=self.group)
        return received

    def _unseen(self, tokens: Tensor) -> Tensor:
        """Find an owned weight that should have seen tokens but saw none; return its number from 1, or 0."""
        unseen = torch.where(tokens == 0, self.owned_numbers, 0)
        return torch.cat([unseen, unseen.new_zeros(1)]).amax()

    def _check_seen(self, numbers: set[int]) -> None:
        if numbers:
            keys = ", ".join(self.weights[number - 1].key for number in sorted(numbers))
            raise CaptureError(
                f"no input activation was captured for {keys} on a refresh step, or for more",
                "the module must be called in training mode through its own forward, with its hooks, or its "
                "weight be left to AdamW with {exclude}",
            )

    def send_to_holders(self, counts: Tensor) -> Tensor:
        """Send refreshed bases to their holders, and `counts [3]` in int32 to all ranks; collective.

        Returns:
            The counts of all ranks, `[ranks, 3]`.
        """
        if self.ranks == 1:
            return counts[None]
        heads = counts.view(torch.uint8).repeat(self.ranks)
        blocks = self.basis.index_select(0, self.sent_positions).flatten().view(torch.uint8)
        sizes = _pieces(self.basis_send_sizes)
        pairs = zip(heads.split(sizes[::2]), blocks.split(sizes[1::2]), strict=True)
        outgoing = torch.cat([piece for pair in pairs for piece in pair])
        received = outgoing.new_empty(sum(self.basis_receive_sizes))
        dist.all_to_all_single(received, outgoing, self.basis_receive_sizes, self.basis_send_sizes, group=self.group)
        # Concatenation makes a new tensor at an aligned address, which a view of another dtype needs.
        pieces = received.split(_pieces(self.basis_receive_sizes))
        arrived = torch.cat(pieces[1::2]).view(self.basis.dtype).view(-1, self.width, self.width)
        self.basis.index_copy_(0, self.received_positions, arrived)
        return torch.cat(pieces[::2]).view(torch.int32).view(self.ranks, -1)


def _pieces(sizes: Sequence[int]) -> list[int]:
    """Split consecutive messages of given sizes into alternating byte ranges of counts and of blocks.

    Most ranks get only counts from one another, no blocks; adjacent counts form one piece.
    """
    pieces, counts = [], 0
    for size in sizes:
        counts += COUNTS_BYTES
        if size > COUNTS_BYTES:
            pieces += [counts, size - COUNTS_BYTES]
            counts = 0
    return [*pieces, counts, 0]


def _split(count: int, dtype: torch.dtype, terms: int) -> list[int]:
    """Split a count into a sum of `terms` numbers of a dtype, each the remainder left by the ones before it."""
    parts = []
    for _ in range(terms):
        parts.append(int(torch.tensor(count, dtype=dtype, device="cpu")))
        count -= parts[-1]
    return parts
