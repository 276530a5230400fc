"""Owners of blocks and the messages between owners, holders and reduced chunks."""

import itertools
import random
import time
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_holdings import aligned, holdings_of
from model_shapes import MODELS

from megatron_dobb.errors import LayoutError
from megatron_dobb.methods.dobb.block_ownership import BlockOwnership, is_worth_moving, work
from megatron_dobb.sharding.flat_redistribution import FlatRedistribution
from megatron_dobb.sharding.ownership import assign, imbalance

Group = tuple[list[dict[str, tuple[int, ...]]], dict[str, int]]


@st.composite
def groups(draw: st.DrawFn) -> Group:
    """What up to 8 ranks hold of up to 5 weights, with at least one holder for every block; and the widths."""
    ranks, weights = draw(st.integers(1, 8)), draw(st.integers(0, 5))
    holdings: list[dict[str, tuple[int, ...]]] = [{} for _ in range(ranks)]
    widths = {}
    for number in range(weights):
        key = f"weight{number}"
        widths[key] = draw(st.sampled_from([8, 16, 24, 96]))
        for block in range(draw(st.integers(1, 4))):
            for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
                holdings[rank][key] = (*holdings[rank].get(key, ()), block)
    return holdings, widths


# -- Owners ------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(groups())
def test_every_block_has_exactly_one_owner_and_the_owner_holds_it_or_it_counts_as_moved(group: Group) -> None:
    holdings, widths = group
    owners = BlockOwnership.share_out(holdings, widths)
    held = {(key, block) for rank in holdings for key, blocks in rank.items() for block in blocks}
    owned = [block for rank in range(len(holdings)) for block in owners.owned_by(rank)]
    assert sorted(owned) == sorted(held)
    moved = [block for rank in range(len(holdings)) for block in {*owners.owned_by(rank)} - {*owners.held_by(rank)}]
    assert sorted(moved) == list(owners.moved())
    assert all(is_worth_moving(widths[key]) for key, _ in moved)


@settings(max_examples=60, deadline=None)
@given(groups())
def test_a_rank_keeps_the_bases_that_it_holds_and_then_those_that_it_owns_besides(group: Group) -> None:
    owners = BlockOwnership.share_out(*group)
    for rank in range(len(owners.holdings)):
        held, owned, kept = owners.held_by(rank), owners.owned_by(rank), owners.kept_by(rank)
        assert kept[: len(held)] == held
        assert list(kept[len(held) :]) == sorted({*owned} - {*held})
        assert list(owned) == sorted(owned)


@settings(max_examples=60, deadline=None)
@given(groups(), st.randoms(use_true_random=False))
def test_owners_do_not_depend_on_the_order_of_keys_or_blocks(group: Group, rng: random.Random) -> None:
    holdings, widths = group
    shuffled = []
    for rank in holdings:
        keys = rng.sample(list(rank), len(rank))
        shuffled.append({key: frozenset(rank[key]) for key in keys})
    mixed_widths = {key: widths[key] for key in rng.sample(list(widths), len(widths))}
    first, second = (
        BlockOwnership.share_out(*group).owners for group in ((holdings, widths), (shuffled, mixed_widths))
    )
    assert list(first.items()) == list(second.items())


def test_widest_blocks_go_first_to_the_least_loaded_holder_and_ties_to_the_lowest_rank() -> None:
    holdings = [{"narrow": (0, 1), "wide": (0,)}, {"narrow": (0, 1), "wide": (0,)}, {"narrow": (1,)}]
    assert assign(holdings, {"narrow": 1, "wide": 8}) == {"narrow": (1, 2), "wide": (0,)}


@given(st.integers(1, 12), st.lists(st.sampled_from([8, 16, 24, 96]), min_size=1, max_size=12))
def test_blocks_that_every_rank_holds_are_balanced_to_within_one_block(ranks: int, widths: list[int]) -> None:
    sizes = {f"weight{i}": width for i, width in enumerate(widths)}
    holdings = [{key: range(4) for key in sizes} for _ in range(ranks)]
    load = BlockOwnership.share_out(holdings, sizes).work()
    assert sum(load) == sum(4 * work(width) for width in widths)
    assert max(load) - min(load) <= work(max(widths))


@settings(max_examples=50, deadline=None)
@given(groups())
def test_a_part_of_the_weights_keeps_the_owners_that_sharing_out_all_gave_them(group: Group) -> None:
    holdings, widths = group
    whole = BlockOwnership.share_out(holdings, widths)
    parts = [whole.part({key for key in widths if widths[key] == width}) for width in sorted(set(widths.values()))]
    assert {key: ranks for part in parts for key, ranks in part.owners.items()} == whole.owners
    loads = [part.work() for part in parts] or [[0] * len(holdings)]
    assert [sum(of_rank) for of_rank in zip(*loads, strict=True)] == whole.work()
    for rank in range(len(holdings)):
        assert sorted(block for part in parts for block in part.held_by(rank)) == list(whole.held_by(rank))


def test_a_block_without_a_holder_is_refused() -> None:
    with pytest.raises(LayoutError, match="fc1: no rank holds a row of block 1, but one holds block 2"):
        assign([{"fc1": (0,)}, {"fc1": (2,)}], {"fc1": 8})


def test_imbalance_is_the_largest_load_of_all_parts_together_over_the_best_possible() -> None:
    whole = BlockOwnership.share_out([{"a": (0, 1)}, {"b": (0,), "c": (0,)}], {"a": 8, "b": 8, "c": 16})
    assert imbalance([whole]) == imbalance([whole.part("a"), whole.part("bc")]) == 9 / 8
    assert imbalance([whole.part("a")]) == 2
    assert imbalance([whole.part("")]) == imbalance([]) == 1


def test_a_thousand_ranks_are_shared_out_in_seconds() -> None:
    rng = random.Random(0)
    widths = {f"layers.{i}.weight": rng.choice([256, 512, 1792]) for i in range(400)}
    holdings: list[dict[str, tuple[int, ...]]] = [{} for _ in range(1024)]
    for number, key in enumerate(widths):
        for rank in range(24):
            holdings[(number * 2 + rank) % 1024][key] = tuple(range(16))
    began = time.perf_counter()
    owners = BlockOwnership.share_out(holdings, widths)
    rows = [owners.result_sends(rank) for rank in range(0, 1024, 128)]
    assert any(any(row) for row in rows)
    assert time.perf_counter() - began < 10


# -- Bases from owners to holders --------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(groups())
def test_both_ends_agree_on_the_bases_of_every_message_and_their_order(group: Group) -> None:
    owners = BlockOwnership.share_out(*group)
    ranks = range(len(owners.holdings))
    sends = [owners.result_sends(rank) for rank in ranks]
    receives = [owners.result_receives(rank) for rank in ranks]
    for source in ranks:
        for destination in ranks:
            message = owners.sends(source, destination)
            assert message == sends[source][destination] == receives[destination][source]
            assert list(message) == sorted(message)


@settings(max_examples=60, deadline=None)
@given(groups())
def test_every_rank_gets_each_basis_it_needs_once_and_no_other(group: Group) -> None:
    owners = BlockOwnership.share_out(*group)
    for rank in range(len(owners.holdings)):
        received = [block for message in owners.result_receives(rank) for block in message]
        assert sorted([*received, *owners.owned_by(rank)]) == sorted(owners.kept_by(rank))


def test_a_weight_held_by_one_rank_never_sends_its_basis() -> None:
    owners = BlockOwnership.share_out([{"fc1": range(4)}, {"fc2": range(4)}], {"fc1": 8, "fc2": 8})
    assert owners.result_sends(0) == owners.result_sends(1) == [(), ()]


@pytest.mark.parametrize(
    ("shards", "kept"),
    [(2, 0.66), (8, 0.40), (64, 0.20), (1024, 0.02)],
)
def test_llama_8b_keeps_the_share_of_state_that_the_design_states(shards: int, kept: float) -> None:
    items = MODELS["Llama-3 8B"]()
    owners = BlockOwnership.share_out(*holdings_of(aligned(items, shards)))
    all_of_it = sum(6 * item.width * item.columns for item in items)
    bytes_kept = [
        4 * owners.elements(owners.owned_by(rank)) + 2 * owners.elements(owners.kept_by(rank)) for rank in range(shards)
    ]
    assert sum(bytes_kept) / shards / all_of_it == pytest.approx(kept, abs=0.006)


@settings(max_examples=100, deadline=None)
@given(groups())
def test_between_two_cuts_a_rank_keeps_all_bases_of_a_weight_or_none(group: Group) -> None:
    owners = BlockOwnership.share_out(*group)
    for rank in range(len(owners.holdings)):
        kept = frozenset(owners.kept_by(rank))
        for key, ranks in owners.owners.items():
            for number in range(1, len(ranks)):
                if (key, number) not in owners.cuts:
                    assert ((key, number) in kept) == ((key, number - 1) in kept)


# -- Sums from chunks to owners ----------------------------------------------------------------------------------


@st.composite
def exchanges(draw: st.DrawFn) -> FlatRedistribution:
    ranks = draw(st.integers(1, 7))
    lengths = draw(st.lists(st.integers(0, 20), max_size=12))
    destinations = [draw(st.sets(st.integers(0, ranks - 1), max_size=3)) for _ in lengths]
    return FlatRedistribution(lengths, destinations, ranks)


@settings(max_examples=120, deadline=None)
@given(exchanges())
def test_every_segment_arrives_whole_and_in_order_at_each_of_its_destinations(exchange: FlatRedistribution) -> None:
    total, chunk = sum(exchange.lengths), exchange.chunk
    flat = [*range(total), *[-1] * exchange.padding]
    chunks = [flat[rank * chunk : (rank + 1) * chunk] for rank in range(exchange.ranks)]
    assert sum(map(len, chunks)) == len(flat) == chunk * exchange.ranks
    sends = [exchange.sends(rank) for rank in range(exchange.ranks)]
    bounds = [0, *accumulate(exchange.lengths)]
    for rank in range(exchange.ranks):
        messages = [
            [element for start, end in sends[source][rank] for element in chunks[source][start:end]]
            for source in range(exchange.ranks)
        ]
        assert [len(message) for message in messages] == exchange.receive_sizes(rank)
        expected = [
            element
            for segment, wanted_by in enumerate(exchange.destinations)
            if rank in wanted_by
            for element in range(bounds[segment], bounds[segment + 1])
        ]
        assert [element for message in messages for element in message] == expected


@settings(max_examples=50, deadline=None)
@given(exchanges())
def test_what_is_returned_lands_where_it_came_from(exchange: FlatRedistribution) -> None:
    total = exchange.chunk * exchange.ranks
    chunks = [list(range(rank * exchange.chunk, (rank + 1) * exchange.chunk)) for rank in range(exchange.ranks)]
    received = [
        [
            x
            for source in range(exchange.ranks)
            for low, high in exchange.sends(source)[rank]
            for x in chunks[source][low:high]
        ]
        for rank in range(exchange.ranks)
    ]
    returned: list[int | None] = [None] * total
    for rank in range(exchange.ranks):
        places = exchange.return_places(rank)
        for source in range(exchange.ranks):
            values = [x for low, high in exchange.returns(source)[rank] for x in received[source][low:high]]
            slots = [rank * exchange.chunk + x for low, high in places[source] for x in range(low, high)]
            assert len(values) == len(slots)
            for slot, value in zip(slots, values, strict=True):
                assert returned[slot] is None, "only one rank returns a segment"
                returned[slot] = value
    bounds = [0, *itertools.accumulate(exchange.lengths)]
    wanted = {x for i, ranks in enumerate(exchange.destinations) if ranks for x in range(bounds[i], bounds[i + 1])}
    assert {slot for slot, value in enumerate(returned) if value is not None} == wanted
    assert all(value in (None, slot) for slot, value in enumerate(returned))


@given(exchanges())
def test_padding_is_below_the_group_size(exchange: FlatRedistribution) -> None:
    assert 0 <= exchange.padding < exchange.ranks


def test_neighbouring_ranges_of_one_message_are_sent_as_one() -> None:
    assert FlatRedistribution([4, 4, 4], [{1}, {1}, {0}], ranks=2).sends(0) == [[], [(0, 6)]]
    assert FlatRedistribution([4, 4, 4], [{1}, {1}, {0}], ranks=2).sends(1) == [[(2, 6)], [(0, 2)]]
