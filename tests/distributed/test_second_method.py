"""A second method, written in `tests/sign_momentum` alone, trains, is saved, and is continued on other layouts."""

import functools

import pytest
import sign_momentum
import torch
from checkpoint_runs import FORMATS, go_on, load, save, train_and_save
from global_form import merge
from layout_runs import Layout, Run, start
from sign_momentum.settings import SignMomentumConfig

from megatron_dobb import DobbConfig
from megatron_dobb.errors import CheckpointError, ConfigError, NonFiniteError
from megatron_dobb.megatron.model.chunk_state import alignment_of
from testbed import processes

CONFIG = SignMomentumConfig()
ALONE = Layout(micro_batch=6, bucket_size=20_000)
ONE_BUCKET = Layout(micro_batch=6)  # of more, megatron-core 0.19 saves AdamW's state wrongly
PAIR = Layout(2, micro_batch=6, bucket_size=20_000)
FOUR = Layout(4, micro_batch=3, bucket_size=20_000)
TENSOR = Layout(2, tensor=2, sequence_parallel=True, micro_batch=6)
STAGES = Layout(2, pipeline=2, chunks=2, micro_batch=6)
EXPERTS = Layout(2, expert=2, experts=True, micro_batch=6)
DENSE = {"num_layers": 4}
SAVED_AFTER, END = 2, 4
DP_ONLY, FULLY = FORMATS

FLIPPED = 1e-4
"""Part of all entries whose sign may differ: of momenta within rounding of zero. Found: none."""


@pytest.fixture(autouse=True, scope="module")
def method():
    with sign_momentum.registered():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("second")


@functools.cache
def source(layout, folder):
    """States of a layout when it saves and at its end; merging them shows that all ranks' copies are equal."""
    ranks = processes.run(layout.world, train_and_save, layout, CONFIG, DENSE, SAVED_AFTER, END, folder / str(layout))
    return merge([rank["saved"] for rank in ranks]), merge([rank["end"] for rank in ranks]), ranks[0]["losses"]


def continued(layout, folder, sharding):
    """The state loaded from the checkpoint of `PAIR`, that at the end, and the losses between."""

    def run():
        start(layout)
        made = Run(layout, CONFIG, DENSE)
        load(made, folder / str(PAIR) / sharding)
        loaded = made.snapshot()
        return loaded, go_on(made, SAVED_AFTER, END), made.snapshot()

    loaded, losses, end = zip(*processes.run(layout.world, run), strict=True)
    return merge(loaded), merge(end), losses[0]


def flipped(state, expected):
    """Part of the entries of all matrices that differ by more than rounding."""
    differing = sum(int((state.parameters[n] - w).abs().gt(1e-5).sum()) for n, w in expected.parameters.items())
    return differing / sum(weight.numel() for weight in expected.parameters.values())


def test_one_step_is_the_formula_and_the_buffers_are_laid_out_as_megatrons():
    def step():
        start(ALONE)
        run = Run(ALONE, CONFIG)
        before = {name: weight.detach().clone() for name, weight in run.weights.items()}
        layouts = run.model.full_param_layout.layouts.values()
        run.step(0)
        momenta = merge([run.snapshot()]).momenta
        return before, momenta, dict(run.weights), [alignment_of(layout) for layout in layouts]

    ((before, momenta, after, alignments),) = processes.run(1, step)
    assert alignments == [None]
    assert len(momenta) == 8
    for name, momentum in momenta.items():
        assert momentum.any()
        expected = (1 - 2e-3 * 0.1) * before[name] - 2e-3 * CONFIG.update_scale * momentum.sign()
        torch.testing.assert_close(after[name], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("layout", [PAIR, FOUR, TENSOR, STAGES], ids=str)
def test_training_is_the_same_on_every_layout_up_to_signs_of_momenta_within_rounding_of_zero(layout, folder):
    expected, found = source(ALONE, folder), source(layout, folder)
    assert flipped(found[1], expected[1]) < FLIPPED
    assert found[2] == pytest.approx(expected[2], rel=1e-4)


@pytest.mark.parametrize(
    ("layout", "sharding"),
    [(PAIR, DP_ONLY), (PAIR, FULLY), (FOUR, DP_ONLY), (FOUR, FULLY), (TENSOR, FULLY), (STAGES, FULLY)],
    ids=str,
)
def test_a_checkpoint_is_loaded_bit_for_bit_on_another_layout_and_trained_on(layout, sharding, folder):
    saved, end, losses = source(PAIR, folder)
    loaded, later, later_losses = continued(layout, folder, sharding)
    for name, momentum in saved.momenta.items():
        assert torch.equal(loaded.momenta[name], momentum)
    for name, weight in saved.parameters.items():
        assert torch.equal(loaded.parameters[name], weight)
    if layout == PAIR:
        assert all(torch.equal(later.parameters[name], weight) for name, weight in end.parameters.items())
        assert later_losses == losses
    assert flipped(later, end) < FLIPPED
    assert later_losses == pytest.approx(losses, rel=1e-4)


def test_experts_in_an_optimizer_of_their_own_resume(tmp_path):
    def run():
        start(EXPERTS)
        first, second = Run(EXPERTS, CONFIG), Run(EXPERTS, CONFIG)
        go_on(first, 0, 2)
        save(first, tmp_path / FULLY, FULLY)
        load(second, tmp_path / FULLY)
        return len(first.dobbs), go_on(first, 2, 4), go_on(second, 2, 4)

    for optimizers, undisturbed, resumed in processes.run(2, run):
        assert optimizers == 2
        assert undisturbed == resumed


def test_adamw_is_continued_when_asked_and_methods_refuse_each_others_checkpoints(tmp_path):
    def refused(settings, name):
        with pytest.raises(CheckpointError) as raised:
            load(Run(ONE_BUCKET, settings), tmp_path / name)
        return str(raised.value)

    def run():
        start(ONE_BUCKET)
        for name, settings in {"adam": None, "dobb": DobbConfig(blocks=4), "signmomentum": CONFIG}.items():
            saving = Run(ONE_BUCKET, settings)
            go_on(saving, 0, 1)
            save(saving, tmp_path / name, FULLY)
        told = [refused(CONFIG, "adam"), refused(CONFIG, "dobb"), refused(DobbConfig(blocks=4), "signmomentum")]
        told.append(refused(None, "signmomentum"))
        asked = Run(ONE_BUCKET, SignMomentumConfig(load_other_optimizer=True))
        load(asked, tmp_path / "adam")
        return told, all(bool(segment.momentum.any()) for group in asked.dobb.segments for segment in group)

    (((adam, of_dobb, by_dobb, by_adam), has_momenta),) = processes.run(1, run)
    assert "--signmomentum-load-other-optimizer" in adam
    assert "--optimizer dobb, which Signmomentum cannot continue" in of_dobb
    assert "--optimizer signmomentum, which Dobb cannot continue" in by_dobb
    assert "--optimizer signmomentum" in by_adam
    assert has_momenta


def test_a_pattern_that_names_nothing_and_a_gradient_that_is_not_finite_are_errors():
    def run():
        start(ALONE)
        with pytest.raises(ConfigError, match="matches no weight"):
            Run(ALONE, SignMomentumConfig(exclude=("*.nothing",)))
        run = Run(ALONE, SignMomentumConfig(exclude=("*.linear_fc1.weight",)))
        names = sorted(run.managed)
        run.dobb.prepare_grads()
        for shards in run.dobb.shards:
            for shard in shards:
                shard.grad = torch.full_like(shard, torch.nan)
        with pytest.raises(NonFiniteError, match="no weight or momentum was changed"):
            run.dobb.step_with_ready_grads()
        return names, any(bool(segment.momentum.any()) for group in run.dobb.segments for segment in group)

    ((names, changed),) = processes.run(1, run)
    assert len(names) == 6
    assert not changed
