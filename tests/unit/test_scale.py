"""A refresh over 1,024 data-parallel ranks, all of them played by one process: what they send each other fits.

The layout, the owners and the collectives are the product's own. torch's fake process group carries nothing, and
tensors on the meta device hold nothing, so only the arithmetic of the refresh itself is left out.
"""

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from model_holdings import MODELS, aligned, holdings_of
from model_shapes import experts
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_dobb.methods.dobb.block_ownership import BlockOwnership, work
from megatron_dobb.methods.dobb.refresh_group import HeldWeight, RefreshGroup, share_out
from megatron_dobb.sharding.buffer_layout import Item
from megatron_dobb.sharding.load_balancing import TOLERANCE, best_possible
from testbed import processes

CASES: dict[str, tuple[int, Callable[[], list[Item]]]] = {
    "Llama-3 8B": (1024, lambda: MODELS["Llama-3 8B"](1)),
    "Llama-3 70B, a stage of 8, TP 8": (1024, lambda: MODELS["Llama-3 70B, a stage of 8"](8)),
    "GPT-2 XL": (256, lambda: MODELS["GPT-2 XL"](1)),
    "experts": (256, lambda: experts(8, 7168, 2048, 4)),
}
"""Data-parallel ranks, and the parameters of each."""

Members = dict[int, list[HeldWeight]]


@dataclass
class Simulated:
    """What all ranks together did, collective by collective.

    Attributes:
        calls: of every rank, the collectives in order: name, ranks of the group, dtype, bytes of a reduce-scatter.
        splits: for every all-to-all, elements from rank to rank as the senders have it, and as the receivers do.
        owned: the blocks of every rank.
        owners: of the blocks of each refresh group.
        padding: elements at the end of each flat buffer.
        extra: elements of the param/grad buffer over Megatron's own, as a part.
    """

    calls: list[list[tuple[Any, ...]]] = field(default_factory=list)
    splits: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    owned: list[list[tuple[str, int]]] = field(default_factory=list)
    owners: list[BlockOwnership] = field(default_factory=list)
    padding: list[int] = field(default_factory=list)
    extra: float = 0.0


def members_of(items: list[Item], held: dict[str, tuple[int, ...]]) -> Members:
    """The refresh groups of a rank."""
    members: Members = {}
    for item in items:
        if item.width:
            weight = HeldWeight(item.name, item.columns // item.width, item.width, held.get(item.name, ()))
            members.setdefault(-item.width, []).append(weight)
    return members


class _Told(Exception):
    """What a rank says in the gather."""


def share_out_among(members: list[Members]) -> dict[int, BlockOwnership]:
    """What `share_out` finds on the first and on the last rank, having gathered what each would have said."""
    said: list[Any] = []

    def listen(everyone: list[Any], mine: Any, group: Any) -> None:
        raise _Told(mine)

    def answer(everyone: list[Any], mine: Any, group: Any) -> None:
        assert mine == said[dist.get_rank(group)]
        everyone[:] = said

    ranks = len(members)
    for rank in range(ranks):
        with as_rank(rank, ranks), mock.patch.object(dist, "all_gather_object", listen):
            try:
                share_out(members[rank], dist.group.WORLD)
            except _Told as told:
                said.append(told.args[0])
    found = []
    for rank in (0, ranks - 1):
        with as_rank(rank, ranks), mock.patch.object(dist, "all_gather_object", answer):
            found.append(share_out(members[rank], dist.group.WORLD))
    assert found[0] == found[1]
    return found[0]


@contextlib.contextmanager
def as_rank(rank: int, ranks: int) -> Iterator[None]:
    """Be one of some ranks for a while."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def simulate(case: str) -> Simulated:
    """Play all ranks, one after the other."""
    dist.destroy_process_group()
    gc.disable()  # it would look at all that the ranks hold, time and again, and this process ends with the test
    ranks, items = CASES[case][0], CASES[case][1]()
    layout = aligned(items, ranks)
    members = [members_of(items, held) for held in holdings_of(layout)[0]]
    owners = share_out_among(members)
    result = Simulated(owners=list(owners.values()))
    report = layout.padding_report()
    result.extra = sum(bucket.extra for bucket in report) / sum(bucket.stock_length for bucket in report)
    for rank in range(ranks):
        with as_rank(rank, ranks):
            refresh(rank, members[rank], owners, result)
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())  # for the test bed to end
    return result


def refresh(rank: int, members: Members, owners: dict[int, BlockOwnership], result: Simulated) -> None:
    """The collectives of one rank's refresh."""
    calls: list[tuple[Any, ...]] = []
    number, ranks = 0, dist.get_world_size()

    def reduce_scatter(output: torch.Tensor, flat: torch.Tensor, group: Any) -> None:
        assert flat.numel() == output.numel() * ranks
        calls.append(("reduce_scatter_tensor", dist.get_process_group_ranks(group), flat.dtype, flat.nbytes))

    def all_to_all(
        output: torch.Tensor, outgoing: torch.Tensor, receive: list[int], send: list[int], group: Any
    ) -> None:
        nonlocal number
        assert (output.numel(), outgoing.numel()) == (sum(receive), sum(send))
        calls.append(("all_to_all_single", dist.get_process_group_ranks(group), outgoing.dtype, None))
        if len(result.splits) <= number:
            result.splits.append((torch.zeros(ranks, ranks).long(), torch.zeros(ranks, ranks).long()))
        sent, received = result.splits[number]
        sent[rank], received[:, rank] = torch.tensor(send), torch.tensor(receive)
        number += 1

    owned = []
    with (
        mock.patch.object(dist, "reduce_scatter_tensor", reduce_scatter),
        mock.patch.object(dist, "all_to_all_single", all_to_all),
    ):
        for key in sorted(members):
            group = RefreshGroup(
                members[key],
                dist.group.WORLD,
                owners[key],
                moment_dtype=torch.float32,
                basis_dtype=torch.bfloat16,
                device=torch.device("meta"),
            )
            received = group.bring_to_owners(torch.empty(group.flow.chunk * ranks, device="meta"))
            triangles = len(group.owned) * group.triangle
            assert received.numel() == triangles + len({name for name, _ in group.owned})
            assert group.send_to_holders(torch.empty(3, dtype=torch.int32, device="meta")).shape == (ranks, 3)
            owned += group.owned
            if rank == 0:
                result.padding.append(group.flow.padding)
    result.calls.append(calls)
    result.owned.append(owned)


@pytest.fixture(scope="module", params=CASES)
def simulated(request: pytest.FixtureRequest) -> tuple[int, list[Item], Simulated]:
    (result,) = processes.run(1, simulate, request.param)
    ranks, items = CASES[request.param]
    return ranks, items(), result


def test_every_block_has_exactly_one_owner(simulated):
    _, items, result = simulated
    count = Counter(block for owned in result.owned for block in owned)
    assert count == {
        (item.name, block): 1 for item in items if item.width for block in range(item.columns // item.width)
    }


def test_all_ranks_issue_the_same_collectives_on_the_same_group(simulated):
    ranks, _, result = simulated
    assert len(result.calls) == ranks
    first, of_group = result.calls[0], ["reduce_scatter_tensor", "all_to_all_single", "all_to_all_single"]
    assert [name for name, *_ in first] == of_group * len(result.owners)
    assert all(members == list(range(ranks)) for _, members, *_ in first)
    assert all(calls == first for calls in result.calls)


def test_every_rank_expects_from_each_other_what_that_one_sends(simulated):
    ranks, _, result = simulated
    assert len(result.splits) == 2 * len(result.owners)
    for sent, received in result.splits:
        assert torch.equal(sent, received)
        assert sent.count_nonzero() > ranks / 2


def test_no_rank_has_a_fifth_more_to_refresh_than_the_best_possible(simulated):
    ranks, items, result = simulated
    width_of = {item.name: item.width for item in items}
    loads = [sum(work(width_of[key]) for key, _ in owned) for owned in result.owned]
    works = [work(width_of[key]) for owned in result.owned for key, _ in owned]
    assert max(loads) <= TOLERANCE * best_possible(works, ranks)


def test_padding_stays_small(simulated):
    ranks, _, result = simulated
    assert all(padding < ranks for padding in result.padding)
    assert result.extra < 0.01
