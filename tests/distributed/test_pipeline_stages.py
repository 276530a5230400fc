"""Pipeline stages that hold nothing for Dobb, or hold it unevenly, train with the others."""

import pytest
import torch
from layout_runs import EXPERTS, Layout, Run, start

from megatron_dobb import DobbConfig
from testbed import processes

CONFIG = DobbConfig(blocks=4, refresh_interval=2, capture="all", basis_dtype="fp32")
STEPS = 4


def train(layout, transformer):
    start(layout)
    run = Run(layout, CONFIG, transformer)
    return {
        "losses": [run.step(step) for step in range(STEPS)],
        "managed": run.names,
        "counts": run.dobb.refresh_counts,
        "attempted": run.dobb.attempted_steps,
    }


@pytest.mark.parametrize(
    ("transformer", "managed"),
    [
        pytest.param({"num_layers": 1, "account_for_embedding_in_pipeline_split": True}, [0, 4], id="embedding alone"),
        pytest.param({"num_layers": 1, "account_for_loss_in_pipeline_split": True}, [4, 0], id="output layer alone"),
        pytest.param({"num_layers": 3, "num_layers_in_first_pipeline_stage": 1}, [4, 8], id="uneven"),
    ],
)
def test_stages_without_or_with_fewer_weights_on_dobb_train_as_one_process_does(transformer, managed):
    layout = Layout(2, pipeline=2, micro_batch=6)
    ranks = processes.run(2, train, layout, transformer)
    (alone,) = processes.run(1, train, Layout(micro_batch=6), {"num_layers": transformer["num_layers"]})
    assert [len(rank["managed"]) for rank in ranks] == managed
    assert sorted(name for rank in ranks for name in rank["managed"]) == alone["managed"]
    for rank in ranks:
        assert rank["attempted"] == STEPS
        assert rank["counts"].skipped == 0
        torch.testing.assert_close(torch.tensor(rank["losses"]), torch.tensor(alone["losses"]), rtol=1e-4, atol=0)


def ask_once(layout, transformer):
    start(layout)
    run = Run(layout, CONFIG, transformer)
    run.step(0)
    run.dobb.refresh_is_asked = True
    run.step(1)
    return len(run.groups), run.dobb.refresh_is_asked


def test_a_stage_without_weights_on_dobb_forgets_with_the_others_that_a_refresh_was_asked_for():
    """Its first rank writes the checkpoints' metadata, and every resumed run would refresh once more."""
    transformer = {"num_layers": 1, "account_for_embedding_in_pipeline_split": True}
    (groups, asked), (other_groups, other_asked) = processes.run(
        2, ask_once, Layout(2, pipeline=2, micro_batch=12), transformer
    )
    assert groups == 0 < other_groups
    assert not asked
    assert not other_asked


@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, pipeline=2, micro_batch=12),
        Layout(2, tensor=2, micro_batch=12),
        Layout(4, pipeline=2, expert=2, experts=True, micro_batch=6),
        Layout(4, tensor=2, sequence_parallel=True, expert=2, expert_tensor=2, experts=True, micro_batch=6),
    ],
    ids=str,
)
def test_start_says_how_much_of_the_whole_model_is_on_dobb(layout, capfd):
    def size():
        start(layout)
        return {name: w.geometry.rows * w.geometry.columns for name, w in Run(layout, CONFIG).managed.items()}

    weights = {name: elements for rank in processes.run(layout.world, size) for name, elements in rank.items()}
    assert len(weights) == 2 * (2 + (2 + 2 * EXPERTS if layout.experts else 2))
    said = f"dobb: {len(weights)} matrices ({sum(weights.values()):,} elements) of the whole model are on Dobb"
    assert capfd.readouterr().out.count(said) == 1
