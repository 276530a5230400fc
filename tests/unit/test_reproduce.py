"""tools/reproduce.py: its figures are the paper's, and its comparison is fair and survives being killed."""

import dataclasses
import functools
import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from tools.reproduction import ablations, cli, compare, comparison, geometry, measures, optimizers, update_size
from tools.reproduction.dion import Dion
from tools.reproduction.finished_runs import FinishedRuns, finish
from tools.reproduction.orthogonality import sign_in_blocks, table1a
from tools.reproduction.runs import DEFAULT_METHODS, METHODS, Method, MissingPart, Run, Size, dobb
from tools.reproduction.training import GPT, Batches, loss_of, schedule, short_english, train
from tools.reproduction.watch import Watch

TINY = Size(
    layers=1, width=16, heads=2, context=16, sequences=4, steps=6, evaluate_every=3, evaluation_batches=1, text="short"
)


@functools.cache
def first_table():
    return table1a(768, range(2))


def test_orthogonality_of_table_1a_is_the_papers():
    assert len(first_table().rows) == 8
    for _, name, ours, _, paper, _ in first_table().rows:
        assert abs(ours - paper) <= (5e-4 if name == "Y" else 5e-3), (name, ours, paper)


@pytest.mark.parametrize("fraction", [0.8, 0.2, 0.05])
def test_a_matrix_has_the_effective_rank_it_was_made_for(fraction):
    matrix = measures.with_effective_rank(96, fraction, seed=3)
    assert measures.effective_rank(torch.linalg.svdvals(matrix)) == pytest.approx(fraction, abs=1e-9)


def test_effective_rank_that_no_spectrum_has_is_refused():
    with pytest.raises(ValueError, match=r"effective rank 0\.001"):
        measures.power_law(100, 0.001)


def test_orthogonality_is_one_for_equal_singular_values_and_least_for_one_direction():
    q = measures.haar(32, torch.Generator().manual_seed(0))
    assert measures.orthogonality(3 * q[:, :8]) == pytest.approx(1)
    assert measures.orthogonality(torch.ones(16, 25)) == pytest.approx(1 / 4)


def test_the_sign_in_an_exact_eigenbasis_is_more_orthogonal_than_without_one():
    matrix = measures.with_effective_rank(128, 0.2, seed=0)
    values = [measures.orthogonality(sign_in_blocks(matrix, blocks)) for blocks in (1, 4)]
    plain = measures.orthogonality(matrix.sign())
    assert values[0] > values[1] > plain + 0.02
    # With one block the columns are orthogonal, here U times the singular values, and the sign sees U alone.
    left = torch.linalg.svd(matrix).U
    assert values[0] == pytest.approx(measures.orthogonality(left.sign()), abs=0.005)
    # The identity is the eigenbasis of blocks of one column: only the sign is left.
    torch.testing.assert_close(sign_in_blocks(matrix, 128), matrix.sign().float())


@pytest.mark.parametrize("dead", [0.0, 0.25])
def test_the_updates_that_are_taken_have_the_size_of_table_9(dead):
    result = update_size.table9(dead, shapes=[(128, 128), (64, 256), (256, 64)])
    assert len(result.rows) + 3 * len(result.notes[1:]) == 3 * len(update_size.ROWS)
    for name, shape, _, filled, norm, expected, rms, expected_rms in result.rows:
        exact = "iterations" not in name
        assert norm == pytest.approx(expected, rel=1e-2 if exact else 0.35), (name, shape)
        assert rms == pytest.approx(expected_rms, rel=5e-3 if exact else 0.2), (name, shape)
        if name in ("Dobb, B = 1", "Dobb, B = 16"):
            assert filled == pytest.approx(1 - dead, abs=0.005)


@pytest.mark.parametrize("name", ["muon", "muon-plain"])
def test_muon_in_fp32_is_torchs_up_to_the_rounding_of_bf16(name):
    steps, settings = [], METHODS[name].settings
    for build in (
        lambda p: optimizers.Muon(p, 0.1, 0.5, **settings),
        lambda p: torch.optim.Muon(p, 0.1, 0.5, adjust_lr_fn="match_rms_adamw", **settings),
    ):
        generator = torch.Generator().manual_seed(0)
        weight = nn.Parameter(torch.randn(48, 32, generator=generator))
        start, optimizer = weight.detach().clone(), build([weight])
        for _ in range(3):
            weight.grad = torch.randn(48, 32, generator=generator)
            optimizer.step()
        steps.append(weight.detach() - start)
    difference = (steps[0] - steps[1]).norm() / steps[1].norm()
    assert 0 < difference < 0.02


def test_dion_of_full_rank_follows_the_polar_factor_and_of_low_rank_the_largest_directions():
    generator = torch.Generator().manual_seed(0)
    left, right = measures.haar(24, generator).float(), measures.haar(24, generator).float()
    gradient = left * torch.tensor([1.5**-i for i in range(24)]) @ right.T
    full, low = (Dion(gradient.shape, rank, seed=1, decay=1.0) for rank in (24, 4))
    for _ in range(60):
        everything, largest = full.update(gradient), low.update(gradient)
    torch.testing.assert_close(largest, left[:, :4] @ right[:, :4].T, atol=2e-3, rtol=0)
    assert measures.orthogonality(everything) > 0.99
    assert float(everything.norm() ** 2) == pytest.approx(24)


@functools.cache
def trained(name):
    return train(Run(METHODS[name], 4e-3, 1, TINY))[0]


@pytest.mark.parametrize("name", ["adamw", "muon", "dobb-4"])
def test_the_same_seed_gives_the_same_curve(name):
    again = train(Run(METHODS[name], 4e-3, 1, TINY))[0]
    assert again["train_loss"] == trained(name)["train_loss"]
    assert again["held_out"] == trained(name)["held_out"]
    other = train(Run(METHODS[name], 4e-3, 2, TINY))[0]
    assert other["train_loss"] != again["train_loss"]


def test_batches_follow_the_seed_and_nothing_else():
    text = short_english().train
    first, again, other = (Batches(text, TINY, seed) for seed in (1, 1, 2))
    for _ in range(3):
        batch = first.next()
        assert torch.equal(batch, again.next())
        assert not torch.equal(batch, other.next())


def test_all_optimizers_start_from_the_same_weights_with_the_same_batch():
    first = {name: trained(name)["train_loss"][0] for name in ("adamw", "muon", "dobb-4")}
    assert len(set(first.values())) == 1
    assert len({trained(name)["final"] for name in first}) == 3, "and go different ways"
    assert [*trained("adamw")["held_out"]] == ["0", "3", "6"]


def test_dobb_muon_and_dion_get_the_matrices_of_the_layers_and_nothing_else():
    model = GPT(TINY)
    matrices, others = optimizers.matrices_of(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    (managed,) = optimizers.build_dobb(model, Run(dobb(4), 1e-3, 0, TINY))
    assert {names[p] for p in matrices} == set(managed.on_dobb)
    assert {names[p] for p in others} == set(managed.on_adamw)
    assert len(matrices) == 4 * TINY.layers
    assert names.keys() == {*matrices, *others}


def test_dobb_refreshes_as_the_size_says_unless_its_settings_do():
    for settings, expected in (({}, 3), ({"refresh_interval": 16}, 16)):
        run = Run(dobb(4, **settings), 1e-3, 0, dataclasses.replace(TINY, refresh_interval=3))
        (optimizer,) = optimizers.build_dobb(GPT(TINY), run)
        assert optimizer.config.refresh_interval == expected


def test_the_learning_rate_warms_up_and_falls_to_zero():
    run = Run(METHODS["adamw"], 1.0, 0, dataclasses.replace(TINY, steps=100))
    factors = [schedule(step, run) for step in range(100)]
    assert factors[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert factors[10] == 1
    assert factors[55] == pytest.approx(0.5)
    assert factors[99] < 1e-3
    assert factors[10:] == sorted(factors[10:], reverse=True)


def test_a_run_that_diverges_is_recorded_as_such():
    record, _ = train(Run(METHODS["adamw"], 1e30, 0, TINY))
    assert record["diverged"]
    assert record["final"] is None
    json.dumps(record, allow_nan=True)


def test_no_held_out_text_is_ever_trained_on():
    text = short_english()
    held_out = bytes(text.held_out.tolist())
    batch = Batches(text.train, TINY, 0).next()
    assert batch.shape == (4, 17)
    assert all(bytes(row) not in held_out for row in batch.tolist())


# The comparison.


@pytest.fixture
def quick(monkeypatch):
    """Training takes no time: the loss is a function of method, rate and seed. Yields what was trained."""
    done = []

    def fake(run):
        done.append(run)
        best = {"adamw": 4e-3, "muon": 16e-3, "dobb": 1e-3}[run.method.optimizer]
        loss = 2 + abs(math.log2(run.learning_rate / best)) + 0.01 * run.seed
        seconds = {"step_cpu_mean": 0.1, "optimizer_cpu_mean": 0.01}
        diverged = run.learning_rate > 0.1
        return {"final": None if diverged else loss, "held_out": {"0": 5.0, "6": loss}, "seconds": seconds}

    monkeypatch.setattr("tools.reproduction.finished_runs._record", fake)
    return done


def compared(path, rates=(2e-3, 4e-3, 8e-3), seeds=3, extensions=2, names=("adamw", "muon", "dobb-4")):
    plan = comparison.Plan({name: METHODS[name] for name in names}, rates, seeds, TINY, extensions)
    with Watch(Console(quiet=True)) as watch:
        return plan, comparison.run_plan(plan, FinishedRuns(path), 1, None, watch)


def test_the_best_rate_is_found_and_the_grid_grows_where_it_was_at_the_edge(tmp_path, quick):
    _, outcomes = compared(tmp_path / "runs")
    assert {name: o.best for name, o in outcomes.items()} == {"adamw": 4e-3, "muon": 16e-3, "dobb-4": 1e-3}
    assert not any(outcome.at_edge for outcome in outcomes.values())
    assert outcomes["adamw"].finals == [2.0, 2.01, 2.02]
    assert len(quick) == len({run.key() for run in quick}) == 3 * 3 + 2 + 2 + 3 * 2


def test_a_best_rate_at_the_edge_is_said(tmp_path, quick):
    plan, outcomes = compared(tmp_path / "runs", extensions=0)
    assert [name for name, outcome in outcomes.items() if outcome.at_edge] == ["muon", "dobb-4"]
    notes = " ".join(comparison.table(plan, outcomes).notes)
    assert "muon: its best rate is at the edge" in notes
    assert "adamw: its" not in notes


def test_where_every_rate_diverges_the_table_says_so(tmp_path, quick):
    plan, outcomes = compared(tmp_path / "runs", rates=(4.0, 8.0), extensions=1, names=("adamw",))
    assert outcomes["adamw"].best is None
    assert comparison.table(plan, outcomes).rows[0][2] == "diverged"


def test_a_killed_comparison_goes_on_where_it_stopped(tmp_path, quick, monkeypatch):
    def killed(path, text):
        if len(list(path.parent.glob("*.json"))) == 7:
            write_text(path, text[:40])
            raise KeyboardInterrupt
        write_text(path, text)

    _, expected = compared(tmp_path / "whole")
    everything = len(quick)
    write_text = Path.write_text
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", killed)
        with pytest.raises(KeyboardInterrupt):
            compared(tmp_path / "runs")
    (tmp_path / "runs" / "damaged.json").write_text("")
    assert len(FinishedRuns(tmp_path / "runs").records) == 7
    quick.clear()
    _, outcomes = compared(tmp_path / "runs")
    assert len(quick) == everything - 7
    assert outcomes == expected
    quick.clear()
    compared(tmp_path / "runs")
    assert not quick


def test_two_comparisons_can_share_a_folder(tmp_path):
    runs = [Run(METHODS["dobb-4"], 2e-3, seed, TINY) for seed in range(2)]
    for both in (FinishedRuns(tmp_path), FinishedRuns(tmp_path)):
        for run in runs:
            both.add(run, {"final": run.seed})
    assert FinishedRuns(tmp_path).records == {run.key(): {"final": run.seed} for run in runs}


def test_runs_in_several_processes_are_those_of_one(tmp_path):
    runs = [Run(METHODS["dobb-4"], rate, 0, TINY) for rate in (2e-3, 4e-3)]
    finished = FinishedRuns(tmp_path)
    finish(runs, finished, 2, None, lambda run, record: None)
    assert [finished.records[run.key()]["final"] for run in runs] == [train(run)[0]["final"] for run in runs]


def test_a_run_is_another_when_any_of_its_settings_is():
    run = Run(dobb(4), 4e-3, 0, TINY)
    others = [
        Run(dobb(4, qr="cholesky"), 4e-3, 0, TINY),
        dataclasses.replace(run, seed=1),
        dataclasses.replace(run, learning_rate=8e-3),
        dataclasses.replace(run, size=dataclasses.replace(TINY, steps=7)),
    ]
    assert len({run.key(), *(other.key() for other in others)}) == 5
    assert run.key() == Run(dobb(4, "dobb-4"), 4e-3, 0, TINY).key(), "the paper's figure decides nothing"


def test_methods_that_cannot_run_here_are_left_out_aloud(capsys, monkeypatch):
    monkeypatch.setitem(METHODS, "strange", Method("dobb", {"blocks": 4, "frobnicate": 1}))
    console = Console()
    with pytest.raises(MissingPart, match="none of them can run"):
        compare.methods_of(["strange"], None, console)
    assert "no setting frobnicate" in capsys.readouterr().out
    with pytest.raises(MissingPart, match="--methods sgd: unknown"):
        compare.methods_of(["sgd"], None, console)
    assert {*DEFAULT_METHODS} <= METHODS.keys()


# Tables that train, and the command line.


def test_table_2_measures_every_matrix_of_every_optimizer():
    _, model = train(Run(METHODS["adamw"], 4e-3, 0, TINY))
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    measured = geometry.measure(model, TINY, refreshes=3)
    assert all(len(values) == 6 * TINY.layers for values in measured.updates.values())
    assert {f"Dobb, B = {b}" for b in (1, 4, 16)} | {f"Dion, rank n / {p}" for p in (1, 4, 16)} <= {*measured.updates}
    assert all(0 < value < 1.0001 for values in measured.updates.values() for value in values)
    for value in measured.updates["Dion, rank n / 16"]:
        assert value == pytest.approx(1 / 4, rel=1e-3), "rank 1 of 16"
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True)), "the model stands still"
    assert len(geometry.table2(measured, TINY)) == 2


def test_the_momentum_of_table_2_is_that_of_gradients_at_the_checkpoints_weights():
    _, model = train(Run(METHODS["adamw"], 4e-3, 0, TINY))
    text = short_english().train
    found = geometry.dobb_updates(model, Batches(text, TINY, 7), blocks=4, refreshes=3)
    batches, expected = Batches(text, TINY, 7), 0.0
    weight = dict(model.named_parameters())["layers.0.fc1.weight"]
    for _ in range(3):
        (gradient,) = torch.autograd.grad(loss_of(model, batches.next()), weight)
        expected = 0.95 * expected + 0.05 * gradient.double()
    torch.testing.assert_close(found["layers.0.fc1.weight"][0].double(), expected, rtol=1e-5, atol=1e-9)


def test_every_ablation_has_a_first_variant_that_works_here():
    for name, variants in ablations.ABLATIONS.items():
        assert not variants[0].method.missing_settings(), name
        assert len({variant.label for variant in variants}) == len(variants)
        for variant in variants:
            if not variant.method.missing_settings():
                optimizers.build_dobb(GPT(TINY), Run(variant.method, 1e-3, 0, TINY))


def test_an_ablation_shows_differences_of_equal_seeds_beside_the_papers():
    variants = ablations.ABLATIONS["nesterov"]
    losses = {"off": [2.0, 2.2], "on": [1.9, 2.0]}
    records = {v.label: [{"final": loss, "held_out": {"0": 5.0}} for loss in losses[v.label]] for v in variants}
    first, second = ablations.table("nesterov", variants, records, []).rows
    assert first[3:] == (None, None, 3.017, None)
    assert second[1] == pytest.approx(1.95)
    assert second[3:5] == pytest.approx((-0.15, 0.05))
    assert second[6] == pytest.approx(-0.003)


def test_results_are_printed_and_written(tmp_path, capsys):
    arguments = ["table1b", "--size", "64", "--seeds", "1"]
    assert cli.main([*arguments, "--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]) == 0
    (written,) = json.loads((tmp_path / "a.json").read_text())
    assert len(written["rows"]) == 4
    assert (tmp_path / "a.png").stat().st_size > 1000
    assert "B = 64" in capsys.readouterr().out


def test_the_papers_configuration_is_printed_as_commands(capsys):
    methods = ["dobb-4", "dobb-nesterov-4", "adamw", "muon", "muon-plain"]
    assert cli.main(["compare", "--preset", "paper", "--methods", *methods]) == 0
    printed = capsys.readouterr().out
    assert "--optimizer dobb --dobb-blocks 4" in printed
    assert printed.count("--dobb-nesterov") == printed.count("--muon-nesterov") == 1
    assert printed.count("-m megatron_dobb pretrain_gpt.py") == len(methods)
    assert printed.count("--global-batch-size 480") == len(methods)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["table1a", "--seeds", "0"], "--seeds 0"),
        (["table1a", "--json", "no/such/folder/x.json"], "there is no folder no/such/folder"),
        (["table1a", "--plot", "."], "--plot . is a folder: name a file in it, such as table1a.png"),
        (
            ["table1a", "--plot", "x.doc"],
            "--plot x.doc does not end in a picture's format: use one of .png, .pdf, .svg, .jpg",
        ),
        (["table2", "--save", "no/such/folder/x.pt"], "there is no folder no/such/folder"),
        (["compare", "--runs", __file__], "is a file: give a folder, such as runs"),
        (["compare", "--plot-dir", __file__], "is a file: give a folder, such as curves"),
        (["figure2", "--lr", "-1"], "--lr -1.0: must be at least 1e-09 and below 10, such as 0.002"),
        (["table9", "--dead", "2"], "--dead 2.0: must be at least 0 and below 1, such as 0.1"),
        (["no-such-table"], "invalid choice"),
    ],
)
def test_bad_options_are_refused_before_any_work(words, message, capsys):
    with pytest.raises(SystemExit):
        cli.main(words)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compare", "--rates", "-1"], "--rates"),
        (["compare", "--methods", "sgd"], "unknown"),
        (["table2", "--checkpoint", "none.pt"], "no such file"),
        (["ablation", "colour"], "unknown"),
    ],
)
def test_what_cannot_be_done_is_one_line(words, message, capsys):
    assert cli.main(words) == 2
    assert message in capsys.readouterr().out
