"""Diagnostics in Megatron's own training loop: what reaches its writers, and at which of its iterations."""

import functools
import shlex

import pytest
from megatron.training import global_vars
from pretrain_runs import DOBB, train

TRAINING = shlex.split(
    "--global-batch-size 4 --train-iters 7 --eval-iters 0 --eval-interval 1000 --iterations-to-skip 3"
)
LOGGED = ["--dobb-log-diagnostics-interval", "2"]


class Writer:
    """Stands in for TensorBoard's writer and for W&B."""

    def __init__(self):
        self.scalars, self.wandb, self.config = [], [], {}

    def add_scalar(self, name, value, step):
        self.scalars.append((name, float(value), step))

    def log(self, values, step):
        self.wandb += [(name, float(value), step) for name, value in values.items()]

    def ignore(self, *args, **kwargs):
        pass

    add_text = flush = finish = ignore  # Megatron's own calls


def write(job):
    """Give the last rank writers, as Megatron does, where the job's notes show what they got."""
    writer = Writer()
    job.notes.append(writer)
    if global_vars.get_args().rank == global_vars.get_args().world_size - 1:
        global_vars._GLOBAL_TENSORBOARD_WRITER = global_vars._GLOBAL_WANDB_WRITER = writer


@functools.cache
def trained(*words):
    return train([*TRAINING, *DOBB, *words], 2, write)


def by_step(entries, only_dobb=True):
    found = {}
    for name, value, step in entries:
        if name.startswith("dobb/") == only_dobb:
            found.setdefault(step, {})[name] = value
    return found


def test_both_writers_get_the_figures_at_megatrons_own_iterations():
    """Iteration 3 is skipped, so that the optimizer's steps and Megatron's iterations differ from there on."""
    first, last = (rank.notes[0] for rank in trained(*LOGGED))
    assert not first.scalars
    assert not first.wandb
    assert last.scalars
    assert trained(*LOGGED)[0].attempted_steps == 6
    log = by_step(last.scalars)
    assert list(log) == [2, 4, 6]
    assert log == by_step(last.wandb)
    assert {2, 4, 6} <= by_step(last.scalars, only_dobb=False).keys(), "Megatron's own figures are at these iterations"
    for figures in log.values():
        # 2 layers of QKV (192 x 64), projection (64 x 64), fc1 (256 x 64) and fc2 (64 x 256).
        rms = {name: value for name, value in figures.items() if name.startswith("dobb/update_rms/")}
        assert len(rms) == 8
        for name, value in rms.items():
            assert value == pytest.approx(0.4 if "linear_fc2" in name else 0.2, rel=2e-3), name  # of bf16 bases
        assert 0.5 < figures["dobb/orthogonality"] < 1
        assert 0 < figures["dobb/moment_effective_rank"] < 1
        assert 0 < figures["dobb/basis_residual"] < 1
        assert figures["dobb/skipped_blocks"] == 0
    turns = [{name for name in figures if name.startswith("dobb/orthogonality/")} for figures in log.values()]
    assert [len(names) for names in turns] == [2, 2, 2]
    assert len(set().union(*turns)) == 6
    # The refresh of attempted step 1 is that of iteration 1, and that of step 4 is iteration 5's.
    rotations = [figures.get("dobb/refresh_rotation") for figures in log.values()]
    assert rotations[0] == rotations[1] != rotations[2]


def test_named_weights_are_logged_alone_and_with_their_spectra():
    _, last = (rank.notes[0] for rank in trained(*LOGGED, "--dobb-log-diagnostics-weights", "*.1.mlp.linear_fc2"))
    for figures in by_step(last.scalars).values():
        weights = {name.split("/")[2] for name in figures if name.count("/") == 2}
        assert weights == {"decoder.layers.1.mlp.linear_fc2.weight"}
        assert "dobb/orthogonality/decoder.layers.1.mlp.linear_fc2.weight" in figures


def test_without_the_flag_nothing_is_written_and_the_training_is_the_same():
    for plain, logged in zip(trained(), trained(*LOGGED), strict=True):
        assert not by_step(plain.notes[0].scalars)
        assert plain.losses == logged.losses
        assert all((plain.weights[name] == logged.weights[name]).all() for name in plain.weights)


def test_a_log_that_nobody_takes_is_named_once(capfd):
    train([*TRAINING, *DOBB, *LOGGED], 1)
    said = capfd.readouterr().out
    assert said.count("dobb: --dobb-log-diagnostics-interval 2, but nothing takes the diagnostics of step 2") == 1
    assert "--tensorboard-dir" in said
