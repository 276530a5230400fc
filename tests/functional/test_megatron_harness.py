"""The cases for Megatron's functional-test harness: parsed at full size, started small, and read by `check_run.py`."""

import contextlib
import io
import runpy
import shutil
import sys

import pytest
import yaml
from harness_runs import CASES, GPUS, case, command_line, parsed, shrunk, train

HARNESS = CASES.parent
NAMES = sorted(path.name for path in CASES.iterdir())
RANKS = 4
PATHS = {"CHECKPOINT_SAVE_PATH": "/none/save", "CHECKPOINT_LOAD_PATH": "/none/load", "TENSORBOARD_PATH": "/none/board"}
SMALL_LAST, SMALL_HALF = 6, 3


def phases(name):
    """The arguments of each training of a case."""
    config = case(name)
    if config["TEST_TYPE"] == "regular":
        return [config["MODEL_ARGS"]]
    return [config["MODEL_ARGS"], config.get("MODEL_ARGS_2", config["MODEL_ARGS"])]


def check(config, output, gpus):
    """The exit status of `check_run.py`, and the lines that it prints."""
    words = [str(HARNESS / "check_run.py"), str(config), str(output), "--gpus", str(gpus)]
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as exited:
            runpy.run_path(words[0], run_name="__main__")
    return exited.value.code, printed.getvalue().splitlines()


@pytest.fixture(scope="module")
def arguments():
    """What Megatron makes of every training's arguments on 8 ranks."""
    of_all = [(name, number, words) for name in NAMES for number, words in enumerate(phases(name))]
    found = parsed([command_line(words, PATHS) for _, _, words in of_all])
    return {(name, number): args for (name, number, _), args in zip(of_all, found, strict=True)}


def test_megatron_accepts_every_case_on_eight_gpus(arguments):
    for args in arguments.values():
        assert args["optimizer"] == "dobb"
        assert args["transformer_impl"] == "transformer_engine"
        assert args["world_size"] == GPUS
        assert args["save_interval"] * 2 == args["train_iters"], "the harness resumes at half of the iterations"


def test_the_cases_cover_every_kind_of_parallelism(arguments):
    for name, least in {
        "tensor_model_parallel_size": 4,
        "pipeline_model_parallel_size": 4,
        "virtual_pipeline_model_parallel_size": 2,
        "data_parallel_size": 8,
        "expert_model_parallel_size": 4,
        "sequence_parallel": True,
        "overlap_grad_reduce": True,
    }.items():
        assert max(args.get(name, 0) for args in arguments.values()) >= least, name
    layouts = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
    resumed = [[arguments[name, number] for number in (0, 1)] for name in NAMES if (name, 1) in arguments]
    moved = [any(first[size] != second[size] for size in layouts) for first, second in resumed]
    assert sorted(moved) == [False, True, True]


@pytest.mark.parametrize("name", NAMES)
def test_a_case_has_what_the_harness_reads(name):
    config = case(name)
    assert config["TEST_TYPE"] in ("regular", "ckpt-resume")
    assert config["ENV_VARS"]["MEGATRON_DOBB_AUTOLOAD"] == 1, "pretrain_gpt.py is Megatron's own"
    assert not set(config) - {"ENV_VARS", "MODEL_ARGS", "MODEL_ARGS_2", "TEST_TYPE", "METRICS"}
    assert ("MODEL_ARGS_2" in config) == (config["ENV_VARS"].get("NON_DETERMINSTIC_RESULTS") == 1)
    assert not list((CASES / name).glob("golden_values*")), "golden values belong to the node that recorded them"
    for value in config["MODEL_ARGS"].values():
        assert value is not False, "the harness would pass it as a word"


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_a_case_trains_small_on_a_cpu_and_shows_what_it_claims(name, tmp_path):
    config, checkpoints = case(name), tmp_path / "checkpoints"
    paths = PATHS | {"CHECKPOINT_SAVE_PATH": str(checkpoints), "CHECKPOINT_LOAD_PATH": str(tmp_path / "nothing")}
    small = ["--train-iters", str(SMALL_LAST), "--save-interval", str(SMALL_HALF)]
    if "gpt" in name and "interleaved" not in name:
        small += ["--num-layers", "2"]
    if "moe" in name:
        small += ["--num-layers", "1", "--moe-ffn-hidden-size", "256"]
    lines = []
    for number, words in enumerate(phases(name), start=1):
        if number == 2:  # as the harness does between the two
            shutil.rmtree(checkpoints / f"iter_{SMALL_LAST:07d}")
            (checkpoints / "latest_checkpointed_iteration.txt").write_text(str(SMALL_HALF))
            paths["CHECKPOINT_LOAD_PATH"] = str(checkpoints)
        lines.append([*shrunk(command_line(words, paths)), *small])
        train(lines[-1], RANKS, tmp_path / "out" / "logs" / "1" / f"none_{number}")
    for key, line in zip(("MODEL_ARGS", "MODEL_ARGS_2"), lines, strict=False):
        if key in config:
            config[key] = as_model_args(line)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(config))
    status, printed = check(tmp_path / "small.yaml", tmp_path / "out", RANKS)
    assert status == 0, "\n".join(printed)
    assert len(printed) == (8 if len(lines) == 1 else 17 if "MODEL_ARGS_2" in config else 16)


def as_model_args(line):
    """The words of a command line as MODEL_ARGS; of flags given twice, the last."""
    words, flag = {}, ""
    for word in line:
        if word.startswith("--"):
            flag = word
            words[flag] = True
        else:
            words[flag] = word
    return words


# What check_run.py says of runs that went wrong: those below are good but for one thing.

SIZES = {"--num-layers": 2, "--hidden-size": 128, "--dobb-blocks": 4, "--train-iters": 6}
START = """\
dobb: {matrices} matrices (393,216 elements) of the whole model are on Dobb; the first rank's part:
dobb: sent by this rank on a refresh step: {sent} MiB reduce-scattered, 0.15 MiB to owners, 0.00 MiB of bases; {others}
"""
ITERATION = (
    " iteration {:8d}/ 6 | lm loss: {:.6E} | number of skipped iterations: {:3d} | number of nan iterations:   0 |\n"
)


def made_up(
    folder,
    *,
    last=6,
    end=3.0,
    skipped=0,
    matrices=8,
    sent="0.30",
    others="nothing on other steps",
    noise=0.0,
    cut="",
):
    """Logs of a resumed case on 2 ranks; what is given goes wrong in the second run, or in both."""
    for run, first in ((1, 1), (2, 4)):
        losses = [5 + (end - 5) * iteration / 6 for iteration in range(1, 7)]
        log = folder / "logs" / "1" / f"none_{run}" / "attempt_0" / "0" / "stdout.log"
        log.parent.mkdir(parents=True)
        text = START.format(matrices=matrices, sent=sent, others=others)
        for iteration in range(first, (last if run == 2 else 6) + 1):
            loss = losses[iteration - 1] + (noise if (run, iteration) == (2, 6) else 0)
            text += ITERATION.format(iteration, loss, skipped if iteration == 5 else 0)
        log.write_text(text.replace(cut, "") if run == 2 and cut else text)


@pytest.mark.parametrize(
    ("fault", "claim"),
    [
        ({}, None),
        ({"last": 5}, "run 2: iterations 4 to 6 are logged"),
        ({"last": 4}, "run 2: iterations 4 to 6 are logged"),
        ({"last": 3}, "2 run(s) have logs (found 1)"),
        ({"cut": "+00"}, "run 2: every loss is finite {4: '3.666667E'"),
        ({"noise": float("nan")}, "run 2: every loss is finite"),
        ({"noise": 1e-6}, "resumed losses are those of the run that was not interrupted"),
        ({"end": 4.9}, "run 1: the loss falls"),
        ({"skipped": 1}, "run 1: no iteration was skipped"),
        ({"matrices": 6}, "run 1: 8 matrices of 393,216 elements"),
        ({"sent": "0.60"}, "run 1: a refresh reduce-scatters 0.30 MiB"),
        ({"others": "0.01 MiB of column norms on every step"}, "run 1: other steps send nothing"),
        ({"others": "nothing on other steps\ndobb: moments and bases start anew"}, "moments and bases were taken over"),
    ],
)
def test_the_check_finds_what_went_wrong(fault, claim, tmp_path):
    made_up(tmp_path, **fault)
    (tmp_path / "case.yaml").write_text(yaml.safe_dump({"TEST_TYPE": "ckpt-resume", "MODEL_ARGS": SIZES}))
    status, printed = check(tmp_path / "case.yaml", tmp_path, gpus=2)
    failed = [line for line in printed if line.startswith("FAILED")]
    assert status == bool(failed) == (claim is not None)
    assert claim is None or any(claim in line for line in failed)
