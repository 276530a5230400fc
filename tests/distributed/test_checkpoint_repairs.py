"""What the distributed optimizer of Megatron itself gets wrong in checkpoints, ours does not."""

import pytest
import torch
from checkpoint_runs import FORMATS, go_on, load, save
from global_form import merge
from layout_runs import Layout, Run, start
from megatron.core import dist_checkpointing
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import distrib_optimizer
from test_checkpoint_matrix import assert_same

from megatron_dobb import DobbConfig
from megatron_dobb.errors import CheckpointError
from megatron_dobb.megatron.upstream_fixes import upstream_is_repaired
from testbed import processes

CONFIG = DobbConfig(blocks=4, refresh_interval=2, capture="all")
SAVED_AFTER, END = 1, 4
PADDED = Layout(3, micro_batch=4, bucket_size=20_000)
ONE_PARAMETER_PER_BUCKET = Layout(3, micro_batch=8, bucket_size=1)


def differing_masters(path):
    """Parameters of a `fully_reshardable` checkpoint whose fp32 masters are not their fp32 weights."""
    state = dist_checkpointing.load_plain_tensors(str(path))
    prefix = "optimizer.state.param."
    masters = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    assert masters
    return [key for key, master in masters.items() if not torch.equal(master, state[key])]


def save_padded(layout, path):
    start(layout)
    wrong = {}
    for name, config in {"stock": None, "ours": CONFIG}.items():
        run = Run(layout, config)
        go_on(run, 0, SAVED_AFTER)
        save(run, path / name, "fully_reshardable")
        wrong[name] = differing_masters(path / name)
    other = Run(layout, DobbConfig(blocks=4, load_other_optimizer=True))
    before = other.snapshot()
    try:
        load(other, path / "stock")
    except CheckpointError as error:
        wrong["error"] = str(error)
    pairs = zip(before.momenta, other.snapshot().momenta, strict=True)
    wrong["momenta"] = all(torch.equal(a.values, b.values) for a, b in pairs)
    return wrong


def test_fully_reshardable_state_behind_padded_buckets_is_right_with_us_and_wrong_in_stock_megatron(tmp_path):
    ranks = processes.run(PADDED.world, save_padded, PADDED, tmp_path)
    assert all(rank["ours"] == [] for rank in ranks)
    if upstream_is_repaired():
        pytest.skip("this Megatron is repaired: its checkpoints are right too")
    assert all(rank["stock"] for rank in ranks)
    # What stock Megatron saved so is refused by all ranks, if it shows on one, and nothing of it is taken over.
    errors = [rank["error"] for rank in ranks]
    assert len(set(errors)) == 1
    for error in errors:
        assert "the optimizer state in this checkpoint is not that of its weights" in error
        assert "--no-load-optim" in error
    assert all(rank["momenta"] for rank in ranks)


def resume(layout, path, with_torchs_adamw):
    if with_torchs_adamw:
        megatron_optimizer.Adam = distrib_optimizer.Adam = torch.optim.AdamW
        megatron_optimizer.USING_PYTORCH_OPTIMIZER = True
        distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = False
    start(layout)
    run = Run(layout, CONFIG)
    empty = [
        [not bucket["param_map"] for of_dtype in ranges.values() for bucket in of_dtype]
        for ranges in run.dobb.gbuf_ranges
    ]
    save(run, path / "at the start", "dp_reshardable")
    go_on(run, 0, SAVED_AFTER)
    for sharding in FORMATS:
        save(run, path / sharding, sharding)
    states = {"saved": run.snapshot(), "losses": go_on(run, SAVED_AFTER, END), "end": run.snapshot(), "empty": empty[0]}
    for sharding in FORMATS:
        run = Run(layout, CONFIG)
        load(run, path / sharding)
        states[sharding] = run.snapshot(), go_on(run, SAVED_AFTER, END), run.snapshot()
    return states


@pytest.mark.parametrize("with_torchs_adamw", [False, True], ids=["FusedAdam", "torch's AdamW"])
def test_ranks_whose_shards_are_padding_save_and_resume(with_torchs_adamw, tmp_path):
    ranks = processes.run(3, resume, ONE_PARAMETER_PER_BUCKET, tmp_path, with_torchs_adamw)
    last = ranks[-1]["empty"]
    assert any(last), "this layout was to have shards of padding alone"
    assert not all(last[last.index(True) :]), "and some of them between others"
    for sharding in FORMATS:
        loaded = [rank[sharding] for rank in ranks]
        assert_same(merge([rank[0] for rank in loaded]), merge([rank["saved"] for rank in ranks]))
        assert [rank[1] for rank in loaded] == [rank["losses"] for rank in ranks]
        assert_same(merge([rank[2] for rank in loaded]), merge([rank["end"] for rank in ranks]))
