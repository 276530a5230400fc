"""What else a program may do while a refresh runs beside it, or once its optimizer is gone."""

import copy
import dataclasses
import functools
import gc
import itertools
import pickle
import weakref

import checkpoint_runs
import pytest
import torch
from layout_runs import Layout, Run, global_batch, start
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from megatron_dobb import DobbConfig
from testbed import gpt, processes

CONFIG = DobbConfig(blocks=4, refresh_interval=1)
LAYOUT = Layout(2, micro_batch=6)
MICRO_BATCHES = 2


def assert_same(one, other):
    for kind in ("parameters", "moments", "bases"):
        ours, theirs = getattr(one, kind), getattr(other, kind)
        assert ours
        assert ours.keys() == theirs.keys()
        for key in theirs:
            assert torch.equal(ours[key], theirs[key]), (kind, key)


def save_then_step(run, step, path):
    checkpoint_runs.save(run, path, "fully_reshardable")
    return step()


def saved_before_the_optimizers_call(overlap, path):
    start(LAYOUT)
    run, undisturbed = (Run(LAYOUT, dataclasses.replace(CONFIG, overlap_refresh=overlap)) for _ in range(2))
    step = run.optimizer.step
    for number in range(2):
        run.optimizer.step = functools.partial(save_then_step, run, step, path / str(number))
        run.step(number)
        undisturbed.step(number)
    return run.snapshot(), undisturbed.snapshot()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_checkpoint_saved_before_the_optimizers_call_changes_nothing(overlap, tmp_path):
    for found, undisturbed in processes.run(2, saved_before_the_optimizers_call, overlap, tmp_path):
        assert_same(found, undisturbed)


def train(chunks, settings):
    """Build an optimizer, make one step with it, and drop it; returns weak references to its refresh groups."""
    config = OptimizerConfig(optimizer="adam", lr=2e-3, adam_eps=1e-3, use_distributed_optimizer=True)
    config.dobb = settings
    optimizer = get_megatron_optimizer(config, chunks)
    chunks[0].config.grad_scale_func = optimizer.scale_loss
    dobb = optimizer.chained_optimizers[0]
    for capture in dobb.captures:
        capture.microbatches = lambda: MICRO_BATCHES
    gpt.train_step(chunks, optimizer, global_batch(0), LAYOUT.micro_batch)
    return [weakref.ref(group) for group in dobb.refresh_groups]


def train_three_times(settings):
    start(LAYOUT)
    run = Run(LAYOUT, settings)
    chunks, model = run.chunks, weakref.ref(run.model)
    del run
    alive = []
    for _ in range(3):
        groups = train(chunks, settings)
        gc.collect()
        chunks[0].config.grad_scale_func = None
        gc.collect()
        alive.append([len(groups), sum(group() is not None for group in groups)])
    hooks = sum(len(module._forward_hooks) for module in chunks[0].modules())
    del chunks
    gc.collect()
    return alive, hooks, model() is not None


@pytest.mark.parametrize("overlap", [True, False])
def test_an_optimizer_that_is_gone_leaves_neither_hooks_nor_bases_and_the_next_one_trains(overlap):
    settings = dataclasses.replace(CONFIG, capture="all", overlap_refresh=overlap)
    for alive, hooks, model_is_alive in processes.run(2, train_three_times, settings):
        assert alive == [[3, 0]] * 3
        assert hooks == 0
        assert not model_is_alive


def copied(settings):
    """What becomes of copies of a model and of its configurations, once an optimizer has made a step."""
    start(LAYOUT)
    run = Run(LAYOUT, settings)
    run.step(0)
    run.model.config.grad_scale_func = None  # a method of the optimizer, which Megatron's process groups are part of
    found = {}
    for name, original in {
        "model": run.model.module,
        "state": run.model.module.state_dict(),
        "its configuration": run.model.config,
        "configuration of the optimizer": run.optimizer.chained_optimizers[0].config,
    }.items():
        for way in (copy.deepcopy, lambda original: pickle.loads(pickle.dumps(original))):
            try:
                made = way(original)
            except Exception as error:
                made = error
            found.setdefault(name, []).append(str(made) if isinstance(made, Exception) else type(made).__name__)
        assert getattr(made, "dobb", settings) == settings
    return found


def test_what_can_be_copied_of_a_model_that_adamw_trains_can_be_copied_with_dobb():
    with_dobb, with_adamw = (processes.run(2, copied, settings) for settings in (CONFIG, None))
    assert with_dobb == with_adamw
    assert with_dobb[0]["configuration of the optimizer"] == ["OptimizerConfig"] * 2


def steps_without_zero_grad(overlap):
    start(LAYOUT)
    run = Run(LAYOUT, DobbConfig(blocks=4, refresh_interval=3, source="gram", overlap_refresh=overlap))
    run.optimizer.zero_grad = lambda: None
    bases = []
    for number in range(5):
        run.step(number)
        bases.append(run.snapshot().bases)
    return [
        any(not torch.equal(basis, after[key]) for key, basis in before.items())
        for before, after in itertools.pairwise(bases)
    ]


@pytest.mark.parametrize("overlap", [True, False])
def test_gram_matrices_refresh_on_their_steps_alone_where_nobody_announces_steps(overlap):
    for changed in processes.run(2, steps_without_zero_grad, overlap):
        assert changed == [False, False, True, False]


def forward_pass_between_steps(overlap):
    """On one rank alone, and of other tokens."""
    start(LAYOUT)
    run, undisturbed = (Run(LAYOUT, dataclasses.replace(CONFIG, overlap_refresh=overlap)) for _ in range(2))
    tokens = global_batch(99)[: LAYOUT.micro_batch]
    for number in range(2):
        if torch.distributed.get_rank() == 1:
            gpt._forward_step(iter([tokens]), run.model)
        run.step(number)
        undisturbed.step(number)
    return run.snapshot(), undisturbed.snapshot()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_forward_pass_before_zero_grad_is_no_part_of_the_step(overlap):
    for found, undisturbed in processes.run(2, forward_pass_between_steps, overlap):
        assert_same(found, undisturbed)
