"""What a checkpoint says of its run, and which blocks lie next to each other."""

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import testbed

testbed.enable()

from megatron_dobb.errors import CheckpointError  # noqa: E402
from megatron_dobb.megatron.checkpoint import foreign  # noqa: E402
from megatron_dobb.megatron.dobb.run_metadata import DobbRunMetadata  # noqa: E402
from megatron_dobb.megatron.dobb.sharded_blocks import ShardedBlocks, WeightInModel, runs  # noqa: E402
from megatron_dobb.methods.dobb.block_ownership import BlockOwnership  # noqa: E402
from megatron_dobb.methods.dobb.settings import DobbConfig  # noqa: E402  (Megatron is imported after the patches)

CONFIG = DobbConfig(blocks=4, blocks_for={"*.linear_fc2": 8}, exclude=("*.linear_proj",))


def metadata_of(config):
    return DobbRunMetadata.of(config, attempted_steps=7, capture_sequences=12, experts_apart=False)


SAVED = metadata_of(CONFIG)


def plain_types(value):
    if isinstance(value, dict):
        return all(isinstance(key, str) and plain_types(inner) for key, inner in value.items())
    return all(map(plain_types, value)) if isinstance(value, list) else value is None or type(value) in (int, str, bool)


def test_facts_are_plain_numbers_and_texts_and_come_back_as_they_were():
    assert plain_types(SAVED.plain())
    assert DobbRunMetadata.read({"dobb": SAVED.plain(), "dp_cp_group": object()}, "dobb") == SAVED
    assert DobbRunMetadata.read({}, "dobb") is None


@pytest.mark.parametrize(
    ("writer", "sharding", "reason"),
    [
        ("adam", "dp_reshardable", None),
        ("adam", None, "without --use-distributed-optimizer"),
        ("sgd", None, "no second moments"),
        ("lion", "dp_reshardable", "no second moments"),
        ("muon", "fully_reshardable", "in another form than the distributed optimizer's"),
        (None, "fully_reshardable", None),
    ],
)
def test_a_checkpoint_that_dobb_cannot_continue_is_refused_with_its_writer_and_a_reason(writer, sharding, reason):
    metadata = {} if sharding is None else {"distrib_optim_sharding_type": sharding}
    foreign.note_writer({"content_metadata": metadata, "args": SimpleNamespace(optimizer=writer)} if writer else {})
    found = foreign.refusal(metadata, foreign.writer_of(metadata), "dobb")
    if reason is None:
        assert found is None
    else:
        assert f"--optimizer {writer}, which Dobb cannot continue" in found
        assert reason in found
        assert "--no-load-optim" in found


def test_the_writer_of_one_checkpoint_is_not_taken_for_that_of_another():
    read, other = {"distrib_optim_sharding_type": "dp_reshardable"}, {"distrib_optim_sharding_type": "dp_reshardable"}
    foreign.note_writer({"content_metadata": read, "args": SimpleNamespace(optimizer="lion")})
    assert (foreign.writer_of(read), foreign.writer_of(other)) == ("lion", "adam")
    assert read == other, "the metadata of a checkpoint stay as they are"


def test_the_width_of_a_weights_blocks_is_found_again():
    assert SAVED.width("decoder.layers.0.mlp.linear_fc1.weight", 64) == 16
    assert SAVED.width("decoder.layers.0.mlp.linear_fc2.weight", 64) == 8
    assert SAVED.width("decoder.layers.0.self_attention.linear_proj.weight", 64) is None, "it was excluded"
    assert SAVED.width("decoder.layers.0.mlp.linear_fc2.weight", 4) is None, "it had fewer columns than blocks"
    assert SAVED.width("decoder.layers.0.mlp.linear_fc1.weight", 66) is None, "it was of another model"
    by_width = metadata_of(DobbConfig(block_width=32))
    assert by_width.width("any", 64) == 32


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        ({"version": DobbRunMetadata.version + 1}, f"is of version {DobbRunMetadata.version + 1}"),
        ({"version": "1"}, "damaged"),
        ({"version": None}, "damaged"),
        ({"attempted_steps": ...}, "damaged"),
        ({"unknown": 1}, "damaged"),
    ],
)
def test_newer_and_damaged_facts_are_refused(damage, text):
    plain = {key: value for key, value in (SAVED.plain() | damage).items() if value is not ...}
    with pytest.raises(CheckpointError, match=text):
        DobbRunMetadata.read({"dobb": plain}, "dobb")


def test_every_fact_that_differs_shows():
    assert replace(SAVED, attempted_steps=8) != SAVED
    assert {field.name for field in fields(DobbRunMetadata)} == SAVED.plain().keys()


@given(st.sets(st.tuples(st.sampled_from("ab"), st.integers(0, 9))))
def test_runs_list_every_block_once_in_as_few_pieces_as_possible(blocks):
    ordered = sorted(blocks)
    found = list(runs(ordered))
    assert [(run.name, run.first + i) for run in found for i in range(run.count)] == ordered
    assert [run.place for run in found] == [ordered.index((run.name, run.first)) for run in found]
    assert all((run.name, run.first + run.count) not in blocks for run in found)


@given(st.sets(st.tuples(st.sampled_from("ab"), st.integers(0, 9))), st.integers(1, 4))
def test_runs_end_where_they_must_and_leave_out_what_is_not_wanted(blocks, multiple):
    ordered = sorted(blocks)
    wanted = {(name, number) for name, number in ordered if name == "a" or number % 3}
    found = list(runs(ordered, only=wanted, begins=lambda block: block[1] % multiple == 0))
    assert [(run.name, run.first + i) for run in found for i in range(run.count)] == sorted(wanted)
    assert [ordered[run.place] for run in found] == [(run.name, run.first) for run in found]
    assert all((run.first + run.count - 1) // multiple == run.first // multiple for run in found)
    joined = [run for run in found if (run.name, run.first + run.count) in wanted]
    assert all((run.first + run.count) % multiple == 0 for run in joined)


@settings(deadline=None)
@given(
    st.lists(st.sets(st.integers(0, 7)), min_size=2, max_size=4),
    st.lists(st.integers(0, 3), min_size=8, max_size=8),
    st.sampled_from([1, 2, 4]),
)
def test_what_ranks_read_from_one_offset_on_has_one_length(held, wanted_owners, ratio):
    """Megatron takes it for the same data. Blocks are of width 8, and `ratio` times as wide in the checkpoint."""
    owners = tuple(rank % len(held) for rank in wanted_owners)
    everything = BlockOwnership([{"w": tuple(sorted(blocks))} for blocks in held], {"w": 1}, {"w": owners}, {"w": 8})
    config = DobbConfig(blocks=8)
    saved = metadata_of(DobbConfig(blocks=8 // ratio))
    lengths: dict[tuple, set] = {}
    for rank in range(len(held)):
        group = SimpleNamespace(
            owned=everything.owned_by(rank), kept=everything.kept_by(rank), ownership=everything, width=8, rank=rank
        )
        state = ShardedBlocks([group], {"w": WeightInModel(64, 0, 0)}, config).to_load(saved)
        read = [tensor for kind in state.values() for tensor in kind.values()]
        for tensor in read:
            lengths.setdefault((tensor.key, tensor.global_offset), set()).add(tensor.local_shape)
        blocks = [
            tensor.global_offset[0] + i for tensor in state["moment"].values() for i in range(tensor.local_shape[0])
        ]
        assert set(blocks) == {number // ratio for _, number in group.owned}
    assert all(len(shapes) == 1 for shapes in lengths.values())
