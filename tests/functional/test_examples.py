"""The examples run: on a CPU as they are or shrunk, and those for clusters are also parsed at their full size."""

import contextlib
import io
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness_runs import parsed, train

from testbed import processes

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CLUSTER = ["single_node_8gpu.sh", "moe_8gpu.sh", "resume_on_another_layout.sh", "slurm_multi_node.sh"]
SLURM = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "4242"}
LOSS = re.compile(r"iteration +(\d+)/ *\d+ .* lm loss: (\S+)")


def run(*words, **variables):
    """Run an example in an environment that has nothing of its settings but `variables`."""
    kept = {"PATH", "HOME", "LANG", "TMPDIR"}
    environment = {name: value for name, value in os.environ.items() if name in kept}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {"PYTHON": sys.executable, "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(EXAMPLES.parent)}
    return subprocess.run(
        [str(word) for word in words],
        env=environment | {name: str(value) for name, value in variables.items()},
        capture_output=True,
        text=True,
        timeout=300,
    )


def printed(finished):
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    return finished.stdout + finished.stderr


def losses(text):
    return {int(iteration): float(loss) for iteration, loss in LOSS.findall(text)}


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


@pytest.fixture
def slurm(tmp_path):
    """A Slurm of two nodes, both of them this machine: the settings of a job, and `srun` and `scontrol` on its PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    stubs = {
        # srun runs a command once on each node, and fails if one of them does. Its own options come first.
        "srun": 'shift\n"$@" & first=$!\n"$@" || exit 1\nwait $first',
        "scontrol": '[ "$*" = "show hostnames node[1-2]" ] && printf "localhost\\nnode2\\n"',
    }
    for name, text in stubs.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    return SLURM | {"PATH": path, "DOBB_EXAMPLES": str(EXAMPLES), "MASTER_PORT": str(free_port())}


@pytest.fixture
def cluster(tmp_path):
    """What somebody with a cluster sets: a checkout, a dataset, a tokenizer, and where checkpoints go."""
    checkout, data = tmp_path / "Megatron-LM", tmp_path / "data" / "text_document"
    checkout.mkdir()
    data.parent.mkdir()
    for path in (checkout / "pretrain_gpt.py", data.with_suffix(".idx"), data.with_suffix(".bin")):
        path.touch()
    return {
        "MEGATRON_LM": checkout,
        "DATA_PATH": data,
        "TOKENIZER_MODEL": "some/tokenizer",
        "CHECKPOINTS": tmp_path / "checkpoints",
    }


def command_lines(script, settings, *words):
    """Megatron's arguments in each command that a script would run."""
    shown = printed(run("bash", EXAMPLES / script, *words, DRY_RUN=1, **settings))
    commands = [shlex.split(line) for line in shown.splitlines() if "megatron_dobb" in line]
    return [command[command.index("megatron_dobb") + 2 :] for command in commands]


def test_megatron_accepts_the_clusters_commands_at_full_size(cluster, slurm):
    lines, worlds = {}, {"slurm_multi_node.sh": 32}
    for script in CLUSTER:
        found = command_lines(script, cluster | slurm, "--eval-iters", "7")
        lines |= {(script, number): line for number, line in enumerate(found)}
    assert len(lines) == len(CLUSTER) + 1, "two trainings in the one that moves"
    sizes = {}
    for world in (8, 32):
        keys = [key for key in lines if worlds.get(key[0], 8) == world]
        sizes |= dict(zip(keys, parsed([lines[key] for key in keys], world), strict=True))
    for (script, _), args in sizes.items():
        assert args["optimizer"] == "dobb"
        assert args["eval_iters"] == 7, "what the user adds wins"
        assert args["data_parallel_size"] * args["tensor_model_parallel_size"] * args[
            "pipeline_model_parallel_size"
        ] == worlds.get(script, 8)
        assert args["save"] == args["load"] == str(cluster["CHECKPOINTS"])
    moved = [sizes["resume_on_another_layout.sh", number] for number in (0, 1)]
    assert [args["tensor_model_parallel_size"] for args in moved] == [2, 1]
    assert moved[0]["exit_interval"] * 2 == moved[1]["train_iters"]
    assert sizes["moe_8gpu.sh", 0]["expert_model_parallel_size"] == 4


@pytest.mark.parametrize("script", CLUSTER)
def test_a_cluster_script_names_what_is_missing(script, cluster, slurm):
    for name in ("MEGATRON_LM", "DATA_PATH", "TOKENIZER_MODEL", "CHECKPOINTS"):
        less = {key: value for key, value in cluster.items() if key != name}
        refused = run("bash", EXAMPLES / script, DRY_RUN=1, **less, **slurm)
        assert refused.returncode == 2
        assert f"error: {name} is not set." in refused.stderr
        assert f"export {name}=" in refused.stderr, "an example"
    nowhere = cluster | {"DATA_PATH": "/nowhere/text"}
    refused = run("bash", EXAMPLES / script, DRY_RUN=1, **nowhere, **slurm)
    assert refused.returncode == 2
    assert "/nowhere/text.idx" in refused.stderr


@pytest.mark.parametrize("script", CLUSTER)
def test_what_a_dry_run_prints_is_what_runs(script, cluster, slurm, tmp_path):
    python = tmp_path / "a python"  # notes what it was started with
    python.write_text(
        '#!/usr/bin/env bash\nprintf \'%s\\n\' "$PYTHONPATH" "$CUDA_DEVICE_MAX_CONNECTIONS" "$@" >"$NOTES.$$"\n'
    )
    python.chmod(0o755)
    settings = cluster | slurm | {"PYTHON": python, "MASTER_PORT": 20_000}
    printed(run("bash", EXAMPLES / script, "--log-interval", "1", NOTES=tmp_path / "run", **settings))
    shown = run("bash", EXAMPLES / script, "--log-interval", "1", DRY_RUN=1, **settings)
    slurms = {"PATH": slurm["PATH"]}
    printed(run("bash", "-c", shown.stdout, NOTES=tmp_path / "pasted", **slurms))
    ran, pasted = ({path.read_text() for path in tmp_path.glob(f"{name}.*")} for name in ("run", "pasted"))
    assert all(notes.startswith(f"{cluster['MEGATRON_LM']}:") for notes in ran)
    assert pasted == ran


@pytest.mark.parametrize(("iterations", "warmup"), [("100", "5"), ("1", "0"), ("100000", "500")])
def test_a_short_training_has_a_short_warm_up(iterations, warmup, cluster):
    (line,) = command_lines("single_node_8gpu.sh", cluster | {"TRAIN_ITERS": iterations})
    assert line[line.index("--lr-warmup-iters") + 1] == warmup


@pytest.mark.parametrize(
    ("script", "iterations"),
    [("single_node_8gpu.sh", "abc"), ("moe_8gpu.sh", "0"), ("resume_on_another_layout.sh", "1")],
)
def test_a_wrong_number_of_iterations_is_named(script, iterations, cluster):
    refused = run("bash", EXAMPLES / script, DRY_RUN=1, TRAIN_ITERS=iterations, **cluster)
    assert refused.returncode == 2
    assert f"error: TRAIN_ITERS={iterations} " in refused.stderr
    assert "export TRAIN_ITERS=" in refused.stderr


@pytest.mark.full
def test_two_nodes_meet_under_slurm(slurm, tmp_path):
    settings = slurm | {"ON_CPU": 1, "CPU_PROCESSES": 1, "CHECKPOINTS": tmp_path}
    text = printed(run("bash", EXAMPLES / "slurm_multi_node.sh", TRAIN_ITERS=4, **settings))
    assert list(losses(text)) == [1, 2, 3, 4]
    assert "using world size: 2" in text


@pytest.mark.full
def test_a_run_continues_on_another_layout(tmp_path):
    text = printed(run("bash", EXAMPLES / "resume_on_another_layout.sh", ON_CPU=1, CHECKPOINTS=tmp_path, TRAIN_ITERS=6))
    before, after = text.split("== iterations 4 to 6 on TP 1, PP 2")
    assert list(losses(before)) == [1, 2, 3]
    assert list(losses(after)) == [4, 5, 6]
    assert "start anew" not in after
    assert losses(after)[6] < losses(before)[1] - 0.5
    again = run("bash", EXAMPLES / "resume_on_another_layout.sh", ON_CPU=1, CHECKPOINTS=tmp_path)
    assert again.returncode == 2
    assert "give a new folder" in again.stderr


@pytest.mark.full
@pytest.mark.parametrize("script", ["single_node_8gpu.sh", "moe_8gpu.sh"])
def test_a_node_trains(script, tmp_path):
    """Its command as it is, on forked ranks; torchrun and the launcher are those of the tests above."""
    (line,) = command_lines(script, {"ON_CPU": 1, "CHECKPOINTS": tmp_path / "checkpoints", "TRAIN_ITERS": 4})
    train(line, 2, tmp_path)
    logs = "".join((tmp_path / "attempt_0" / rank / "stdout.log").read_text() for rank in "01")
    assert list(losses(logs)) == [1, 2, 3, 4]
    assert losses(logs)[4] < losses(logs)[1]
    assert ("expert matrices" in logs) == script.startswith("moe")


def as_script(path, words, port):
    """Run an example on a forked rank as torchrun would; returns what it prints."""
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    sys.argv = [str(path), *words]
    sys.path.insert(0, str(path.parent))
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        runpy.run_path(str(path), run_name="__main__")
    return text.getvalue()


def test_plain_ddp_trains_and_continues(tmp_path):
    checkpoint = tmp_path / "state.pt"
    for steps, first in ((4, 1), (8, 5)):
        words = ["--steps", str(steps), "--checkpoint", str(checkpoint)]
        text, quiet = processes.run(2, as_script, EXAMPLES / "plain_ddp.py", words, free_port())
        assert not quiet, "one rank speaks"
        found = re.findall(r"step +(\d+) +loss (\S+)", text)
        assert [int(step) for step, _ in found] == list(range(first, steps + 1))
        saved = torch.load(checkpoint, weights_only=True)
        (group,) = [group for group in saved["optimizer"]["param_groups"] if group["dobb"]]
        assert group["attempted_steps"] == saved["step"] == steps
    assert float(found[-1][1]) < 4.5, "of 5.5 at the start"
    words[1] = "7"
    with pytest.raises(processes.RankError, match="SystemExit"):
        processes.run(1, as_script, EXAMPLES / "plain_ddp.py", words, free_port())
    assert torch.load(checkpoint, weights_only=True)["step"] == 8, "not turned back"


@pytest.mark.full
def test_spectra_are_drawn(tmp_path):
    words = ["--steps", "12", "--out", str(tmp_path / "spectra.png")]
    (text,) = processes.run(1, as_script, EXAMPLES / "spectra.py", words, free_port())
    assert (tmp_path / "spectra.png").read_bytes().startswith(b"\x89PNG")
    assert len(re.findall(r"orthogonality 0\.\d+", text)) == 12
    first, *_, last = re.findall(r"basis_residual (\S+)", text)
    assert float(last) < float(first)
    words = ["--steps", "1", "--out", str(tmp_path / "no folder" / "spectra.png")]
    with pytest.raises(processes.RankError, match="SystemExit"):
        processes.run(1, as_script, EXAMPLES / "spectra.py", words, free_port())


@pytest.fixture(scope="module")
def with_hugging_face(tmp_path_factory):
    """A Python that has Hugging Face's packages besides those of this one.

    They are not installed for all tests: Megatron imports them where they are, which takes every process seconds.
    """
    folder = tmp_path_factory.mktemp("hugging-face")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = folder / "bin" / "python"
    project = tomllib.loads((EXAMPLES.parent / "pyproject.toml").read_text())["project"]
    words = ["-m", "pip", "--python", python, "install", "--quiet", *project["optional-dependencies"]["huggingface"]]
    installed = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, timeout=300)
    if installed.returncode:
        # A skip would let the example rot wherever an index is out of reach; the tests need one to be installed at all.
        pytest.fail(f"pip could not install Hugging Face for this test: {installed.stderr.strip()}")
    return python


@pytest.mark.full
def test_the_trainer_of_hugging_face_continues_bit_for_bit(with_hugging_face, tmp_path):
    def trained(out, *words):
        script = EXAMPLES / "hugging_face_trainer.py"
        text = printed(run(with_hugging_face, script, "--steps", 8, "--save-steps", 4, "--out", out, *words))
        return text, [torch.load(out / "checkpoint-8" / f"{name}.pt", weights_only=True) for name in ("optimizer",)]

    text, (whole,) = trained(tmp_path / "whole")
    rates = [float(rate) for rate in re.findall(r"'learning_rate': '(\S+)'", text)]
    assert max(rates) == pytest.approx(3.54e-3)
    assert rates[-1] < 0.1 * max(rates), "the Trainer's own schedule reaches Dobb"
    _, (resumed,) = trained(tmp_path / "parts", "--resume", tmp_path / "whole" / "checkpoint-4")
    (group,) = [group for group in whole["param_groups"] if group["dobb"]]
    assert group["attempted_steps"] == 8, "two micro-batches are one step"
    assert group["capture_sequences"] == 6, "those of the first micro-batch"
    for number, tensors in whole["state"].items():
        for name, tensor in tensors.items():
            assert torch.equal(resumed["state"][number][name], tensor), (number, name)
    weights = [(tmp_path / run / "checkpoint-8" / "model.safetensors").read_bytes() for run in ("whole", "parts")]
    assert weights[0] == weights[1]
