"""What one layout saves, another loads bit for bit in the form of the whole model, and computes the same with it.

A GPT and a mixture of experts, saved in the middle of an interval between two refreshes. The module prints a table of
how far the following steps, of which one refreshes, lead from the undisturbed run; on the same layout they are equal.
"""

import functools
from collections import Counter

import pytest
import torch
from checkpoint_runs import load_and_go_on, train_and_save
from global_form import merge
from layout_runs import Layout

from megatron_dobb import DobbConfig
from testbed import processes, tiers

CONFIG = DobbConfig(blocks=4, refresh_interval=3, capture="all", basis_dtype="fp32")
MODELS = {False: {"num_layers": 4}, True: {"num_layers": 2}}
"""With and without experts; four layers are enough for two pipeline stages of two chunks each."""
SAVED_AFTER, END = 4, 7  # refreshes in the steps 0, 3 and 6
TOLERANCE = 0.02
"""Mean difference of a weight's entries over their RMS, END - SAVED_AFTER steps later. Signs may flip."""

ALONE = Layout(micro_batch=6, bucket_size=20_000)
BUCKETS = Layout(3, micro_batch=4, bucket_size=20_000)
DATA = Layout(4, micro_batch=3, bucket_size=20_000)
INSTANCES = Layout(4, instances=2, micro_batch=6)
TENSOR = Layout(4, tensor=2, sequence_parallel=True, micro_batch=6)
STAGES = Layout(2, pipeline=2, chunks=2, micro_batch=6)
BOTH = Layout(4, tensor=2, pipeline=2, micro_batch=12)
DENSE = [ALONE, BUCKETS, DATA, INSTANCES, TENSOR, STAGES, BOTH]

EXPERTS = Layout(4, expert=2, experts=True, micro_batch=3)
MORE_EXPERTS = Layout(4, expert=4, experts=True, micro_batch=6, bucket_size=20_000)
EXPERT_TENSOR = Layout(4, tensor=2, expert=2, expert_tensor=2, sequence_parallel=True, experts=True, micro_batch=6)
EXPERT_STAGES = Layout(4, pipeline=2, expert=2, experts=True, micro_batch=6)
FEW_EXPERTS = Layout(2, expert=2, experts=True, micro_batch=6)
MIXTURES = [EXPERTS, MORE_EXPERTS, EXPERT_TENSOR, EXPERT_STAGES]

FULLY, DATA_ONLY = "fully_reshardable", "dp_reshardable"
PAIRS = [
    # The same layout.
    *((layout, layout, FULLY) for layout in (BUCKETS, TENSOR, STAGES, EXPERTS)),
    *((layout, layout, DATA_ONLY) for layout in (BUCKETS, INSTANCES, TENSOR, STAGES, EXPERTS, EXPERT_TENSOR)),
    # Another data-parallel size with the same buckets.
    (ALONE, DATA, DATA_ONLY),
    (BUCKETS, ALONE, DATA_ONLY),
    (DATA, BUCKETS, DATA_ONLY),
    (EXPERTS, FEW_EXPERTS, DATA_ONLY),
    # Anything else.
    *((BUCKETS, other, FULLY) for other in (ALONE, TENSOR, STAGES, BOTH)),
    *((TENSOR, other, FULLY) for other in (DATA, STAGES, BUCKETS)),
    *((STAGES, other, FULLY) for other in (BUCKETS, TENSOR, INSTANCES)),
    (ALONE, BOTH, FULLY),
    (BOTH, DATA, FULLY),
    (INSTANCES, TENSOR, FULLY),
    *((EXPERTS, other, FULLY) for other in (MORE_EXPERTS, EXPERT_TENSOR, EXPERT_STAGES)),
    *((EXPERT_TENSOR, other, FULLY) for other in (EXPERTS, EXPERT_STAGES)),
    (EXPERT_STAGES, MORE_EXPERTS, FULLY),
    (MORE_EXPERTS, FEW_EXPERTS, FULLY),
]


def kinds(pair):
    """The kinds of parallelism of both layouts and the format: every two come together in the quick tier."""
    saving, loading, sharding = pair
    return saving.tensor, saving.pipeline, saving.expert, loading.tensor, loading.pipeline, loading.expert, sharding


QUICK = tiers.pairwise(PAIRS, kinds)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def table(request):
    """Rows of measured values, printed when the module is done."""
    rows = []
    yield rows
    lines = ["| saved on | loaded on | format | loss | weights |", "|---|---|---|---|---|", *rows]
    with request.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        print("", *lines, sep="\n")


@functools.cache
def source(layout, folder):
    """Where a layout's checkpoints are, and what its undisturbed run holds."""
    path = folder / str((*DENSE, *MIXTURES).index(layout))
    return path, processes.run(
        layout.world, train_and_save, layout, CONFIG, MODELS[layout.experts], SAVED_AFTER, END, path
    )


@functools.cache
def outcomes(layout, pairs, folder):
    """What a layout makes of all checkpoints that it is to load: results of its ranks, by source and format."""
    sources = [(saved, sharding) for saved, loading, sharding in pairs if loading == layout]
    paths = [source(saved, folder)[0] / sharding for saved, sharding in sources]
    ranks = processes.run(
        layout.world, load_and_go_on, layout, CONFIG, MODELS[layout.experts], SAVED_AFTER, END, paths, timeout=300
    )
    return dict(zip(sources, zip(*ranks, strict=True), strict=True))


def assert_same(found, expected):
    for what in ("parameters", "momenta", "moments", "bases"):
        left, right = getattr(found, what), getattr(expected, what)
        assert left.keys() == right.keys()
        for name in left:
            assert torch.equal(left[name], right[name]), f"{what} of {name} differ"


def mean_difference(found, expected):
    """The largest mean difference of a weight's entries, over their RMS."""
    differences = {
        name: float((found.parameters[name] - weight).abs().mean() / weight.square().mean().sqrt())
        for name, weight in expected.parameters.items()
        if weight.ndim == 2
    }
    return max(differences.values())


@pytest.mark.parametrize(
    "layout", tiers.quick(dict.fromkeys(pair[0] for pair in PAIRS), {pair[0] for pair in QUICK}), ids=str
)
def test_every_block_is_written_by_exactly_one_rank(layout, folder):
    saved = source(layout, folder)[1]
    written = Counter(block for rank in saved for block in rank["written"])
    state = merge([rank["saved"] for rank in saved])
    kinds = {"moment": state.moments, "basis": state.bases}
    assert written == Counter(
        (f"optimizer.dobb.{kind}.{name}", number)
        for kind, blocks_of in kinds.items()
        for name, blocks in blocks_of.items()
        for number in range(len(blocks))
    )


@pytest.mark.parametrize(
    ("saving", "loading", "sharding"),
    tiers.quick(PAIRS, QUICK),
    ids=str,
)
def test_a_checkpoint_is_loaded_bit_for_bit_on_another_layout_and_trained_on(
    saving, loading, sharding, folder, table, request
):
    saved = source(saving, folder)[1]
    pairs = tuple(tiers.selected(request, ("saving", "loading", "sharding")))
    found = outcomes(loading, pairs, folder)[saving, sharding]
    assert_same(merge([rank["loaded"] for rank in found]), merge([rank["saved"] for rank in saved]))
    assert all(rank["attempted"] == {END} for rank in found)
    end, expected = merge([rank["end"] for rank in found]), merge([rank["end"] for rank in saved])
    losses, expected_losses = torch.tensor(found[0]["losses"]), torch.tensor(saved[0]["losses"])
    if saving == loading:
        assert_same(end, expected)
        assert torch.equal(losses, expected_losses)
    of_losses = float((losses / expected_losses - 1).abs().max())
    of_weights = mean_difference(end, expected)
    table.append(f"| {saving} | {loading} | {sharding} | {of_losses:.0e} | {of_weights:.0e} |")
    assert of_losses < 1e-3
    assert of_weights < TOLERANCE
