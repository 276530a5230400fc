"""Bytes of state and of a refresh, counted in one pass over all ranks, are those of the exchange itself."""

import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dobb.methods.dobb import footprint
from megatron_dobb.methods.dobb.block_ownership import BlockOwnership
from megatron_dobb.methods.dobb.refresh_group import COUNTS_BYTES
from megatron_dobb.sharding.flat_redistribution import FlatRedistribution

MOMENT_BYTES, BASIS_BYTES = 4, 2


@st.composite
def holdings(draw):
    """Blocks of some weights of two widths, held by up to 6 ranks; every block has a holder."""
    ranks = draw(st.integers(1, 6))
    weights = {f"w{i}": draw(st.integers(1, 5)) for i in range(draw(st.integers(1, 4)))}
    widths = {key: draw(st.sampled_from([2, 3])) for key in weights}
    held = [{} for _ in range(ranks)]
    for key, blocks in weights.items():
        for block in range(blocks):
            for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
                held[rank].setdefault(key, []).append(block)
    return held, weights, widths


@given(holdings())
@settings(max_examples=150, deadline=None)
def test_costs_of_every_rank_are_those_of_owners_and_exchange(case):
    held, weights, widths = case
    ownership = BlockOwnership.share_out(held, widths)
    found = footprint.refresh_costs(ownership, weights, moment_bytes=MOMENT_BYTES, basis_bytes=BASIS_BYTES)
    assert set(found) == set(widths.values())
    for width, of_width in found.items():
        keys = sorted(key for key in weights if widths[key] == width)
        triangles = [{owner} for key in keys for owner in ownership.owners[key]]
        flow = FlatRedistribution(
            [width * (width + 1) // 2] * len(triangles) + [1] * len(keys),
            [*triangles, *(set(ownership.owners[key]) for key in keys)],
            len(held),
        )

        def square(blocks, width=width):
            return width**2 * sum(widths[key] == width for key, _ in blocks)

        for rank in range(len(held)):
            of_rank = of_width.of(rank)
            assert of_rank.moments == MOMENT_BYTES * square(ownership.owned_by(rank))
            assert of_rank.bases == BASIS_BYTES * square(ownership.held_by(rank))
            assert of_rank.sums == 4 * width**2 * sum(weights[key] for key in keys)
            alone = len(held) == 1
            sent = sum(end - start for ranges in flow.sends(rank) for start, end in ranges)
            assert of_rank.reduced == (0 if alone else 4 * flow.chunk * len(held))
            assert of_rank.to_owners == (0 if alone else 4 * sent)
            assert of_rank.from_others == (0 if alone else 4 * sum(flow.receive_sizes(rank)))
            assert of_rank.to_holders == BASIS_BYTES * sum(map(square, ownership.result_sends(rank)))
            assert of_rank.from_owners == BASIS_BYTES * sum(map(square, ownership.result_receives(rank)))
            assert of_rank.counts == (0 if alone else COUNTS_BYTES * len(held))


def test_costs_add_up():
    a, b = footprint.momentum_costs(10), footprint.RankCosts(moments=3, bases=2, reduced=5, to_owners=7, counts=1)
    assert (a + b).state == 45
    assert (a + b).refresh == 13


def test_what_waits_to_be_renewed_counts_where_groups_or_chunks_are_reduced_first():
    small, large = footprint.Transient(10, 16, 5, 3), footprint.Transient(10, 30, 5, 3)
    assert footprint.transient_peak([[small, large]]) == footprint.transient_peak([[small], [large]]) == 30
    assert footprint.transient_peak([[small, large]], reduced_first=True) == 30 + 5
    assert footprint.transient_peak([[small], [large]], reduced_first=True) == 30 + 5 + 3, "it may be at work"
    assert footprint.transient_peak([[footprint.Transient(1, 1, 5, 9)] * 2], reduced_first=True) == 5 + 5 + 9


def test_costs_need_no_torch():
    code = "import sys, megatron_dobb.methods.dobb.footprint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
