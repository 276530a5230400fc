"""The three ways to `--optimizer dobb`, run as users run them, and what each says when something is wrong."""

import importlib.metadata
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import megatron_dobb

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("pretrain_tiny.py")
PYTHON = [sys.executable, "-W", "ignore"]
TORCHRUN = [*PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LAUNCHER = ["-m", "megatron_dobb"]

TRAINING = shlex.split(
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 4 --train-iters 3 "
    "--eval-iters 0 --eval-interval 1000 --lr 1e-3 --log-interval 1 --num-workers 0 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 32 "
    "--use-distributed-optimizer --distributed-backend gloo --transformer-impl local --use-cpu-initialization "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm"
)
DOBB = ["--optimizer", "dobb", "--dobb-blocks", "2", "--dobb-refresh-interval", "2"]


def run(*command, cwd=None, **variables):
    """Run a command to its end, in an environment that knows nothing of Dobb but `variables`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MEGATRON_DOBB")}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}
    return subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=240
    )


def alone(*command, **variables):
    """Run a training of one process without torchrun."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    return run(*command, MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1", **variables)


def losses(finished):
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    found = re.findall(r"iteration +(\d+)/ +3 .*lm loss: (\S+)", finished.stdout + finished.stderr)
    assert [int(step) for step, _ in found] == [1, 2, 3]
    return [float(loss) for _, loss in found]


def needs_installation():
    try:
        importlib.metadata.distribution("megatron-dobb")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("megatron_dobb is not installed here, so no .pth file of it is: pip install -e .")


@pytest.fixture(scope="module")
def launched():
    return run(*TORCHRUN, *LAUNCHER, SCRIPT, *TRAINING, *DOBB)


def test_the_launcher_trains_an_unmodified_script_under_torchrun(launched):
    first, _, last = losses(launched)
    assert last < first
    assert "dobb: 8 matrices (98,304 elements) of the whole model are on Dobb" in launched.stdout
    assert launched.stdout.count("of the whole model") == 1, "one rank speaks"


def test_a_literal_torchrun_works_with_the_autoload_variable_and_trains_the_same(launched):
    needs_installation()
    finished = run(*TORCHRUN, SCRIPT, *TRAINING, *DOBB, MEGATRON_DOBB_AUTOLOAD="1")
    assert losses(finished) == losses(launched)


@pytest.mark.full
def test_one_import_at_the_top_of_a_script_works(launched, tmp_path):
    script = tmp_path / "pretrain_mine.py"
    script.write_text(f"import megatron_dobb.patch\nimport runpy\nrunpy.run_path({str(SCRIPT)!r}, run_name='__main__')")
    finished = alone(*PYTHON, script, *TRAINING, *DOBB, PYTHONPATH=str(ROOT))
    assert losses(finished)[0] == pytest.approx(losses(launched)[0], rel=1e-5)


@pytest.mark.full
def test_without_the_variable_the_optimizer_is_unknown():
    finished = alone(*PYTHON, SCRIPT, *TRAINING, "--optimizer", "dobb")
    assert finished.returncode == 2
    assert re.search(r"argument --optimizer: invalid choice: 'dobb'", finished.stderr)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--use-mup"], "--optimizer dobb does not work with --use-mup"),
        (["--dobb-blocks", "5"], r"decoder\.layers\.0\.\S+\.weight: --dobb-blocks 5 does not divide its 64 input"),
    ],
    ids=["at-the-arguments", "at-the-model"],
)
def test_an_error_of_ours_is_one_line_and_status_1(words, message):
    finished = alone(*PYTHON, *LAUNCHER, SCRIPT, *TRAINING, *DOBB, *words)
    assert finished.returncode == 1
    assert "Traceback" not in finished.stderr
    assert re.match(rf"megatron_dobb: error: {message}.*\Z", finished.stderr.splitlines()[-1])


# Small scripts, without Megatron.


@pytest.fixture
def script(tmp_path):
    """Write a script into a folder of its own; returns its path."""

    def write(text, name="mine.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write


def launch(*words, **variables):
    return run(*PYTHON, *LAUNCHER, *words, cwd=ROOT, **variables)


def test_a_script_runs_as_if_started_alone(script):
    script("where = 'beside the script'\n", "neighbour.py")
    path = script(
        """
        import sys
        from neighbour import where
        print([__name__, __file__ == sys.argv[0], sys.argv[1:], where])
        """
    )
    finished = launch(path, "--help", "--lr", "1")
    assert finished.stdout.strip() == "['__main__', True, ['--help', '--lr', '1'], 'beside the script']"


def test_a_safe_path_stays_safe(script):
    path = script("import sys, json\nprint(json.dumps([sys.path[0], sys.argv]))")
    code = f"import sys; sys.argv = ['', {str(path)!r}]; from megatron_dobb.__main__ import main; main()"
    finished = run(*PYTHON, "-P", "-c", code, PYTHONPATH=str(ROOT))
    assert finished.stdout.strip() == json.dumps([str(ROOT), [str(path)]])


def test_a_scripts_own_exit_status_and_errors_pass_through(script):
    assert launch(script("raise SystemExit(3)")).returncode == 3
    failed = launch(script("raise KeyError('mine')"))
    assert failed.returncode == 1
    assert "KeyError: 'mine'" in failed.stderr
    assert "Traceback" in failed.stderr


def test_the_traceback_of_an_error_of_ours_is_shown_on_request(script):
    path = script("from megatron_dobb.errors import ConfigError\nraise ConfigError('--dobb-blocks 0')")
    assert launch(path).stderr.strip() == "megatron_dobb: error: --dobb-blocks 0"
    shown = launch(path, MEGATRON_DOBB_TRACEBACK="1")
    assert shown.returncode == 1
    assert "Traceback" in shown.stderr
    assert "ConfigError: --dobb-blocks 0" in shown.stderr


def test_without_a_script_the_launcher_says_how_it_is_used():
    finished = launch()
    assert finished.returncode == 2
    assert "usage: python -m megatron_dobb SCRIPT" in finished.stdout + finished.stderr


def test_help_and_version():
    shown = launch("--help")
    assert (shown.returncode, launch("-h").stdout) == (0, shown.stdout)
    for text in ("usage: python -m megatron_dobb SCRIPT", "torchrun --nproc-per-node 8 -m megatron_dobb", "--dobb-"):
        assert text in shown.stdout
    assert launch("--version").stdout.strip() == megatron_dobb.__version__


def test_a_missing_script_is_named_with_the_folder_it_was_looked_for_in():
    finished = launch("no_such_script.py", "--optimizer", "dobb")
    assert finished.returncode == 2
    assert "Traceback" not in finished.stderr
    assert f"no script 'no_such_script.py' in {ROOT}" in finished.stderr


OLD_MEGATRON = {
    "core/__init__.py": "",
    "core/package_info.py": "__version__ = '0.18.2'",
    "core/distributed/__init__.py": "",
    "core/distributed/distributed_data_parallel.py": "class DistributedDataParallel: pass",
}


@pytest.fixture
def old_megatron(tmp_path):
    """The path of a megatron-core 0.18.2 as far as it is looked at, and a script that imports it."""
    for name, text in OLD_MEGATRON.items():
        path = tmp_path / "megatron" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    script = tmp_path / "pretrain_old.py"
    script.write_text("import megatron.core.distributed.distributed_data_parallel")
    return tmp_path, script


def test_a_megatron_outside_the_range_is_refused_in_one_line(old_megatron):
    path, script = old_megatron
    finished = launch(script, PYTHONPATH=f"{path}:{ROOT}")
    assert finished.returncode == 1
    assert finished.stderr.strip().startswith("megatron_dobb: error: megatron-core 0.18.2 is not supported: ")
    assert len(finished.stderr.strip().splitlines()) == 1


def test_autoload_refuses_a_megatron_outside_the_range(old_megatron):
    needs_installation()
    path, script = old_megatron
    finished = run(*PYTHON, script, PYTHONPATH=f"{path}:{ROOT}", MEGATRON_DOBB_AUTOLOAD="1")
    assert finished.returncode == 1
    assert "UnsupportedError: megatron-core 0.18.2 is not supported" in finished.stderr
    assert run(*PYTHON, script, PYTHONPATH=f"{path}:{ROOT}").returncode == 0


LOADED = "import sys; print(sorted(name for name in sys.modules if name.split('.')[0] in ('megatron_dobb', 'torch')))"


def test_a_fresh_interpreter_loads_nothing_of_ours_unless_asked():
    needs_installation()
    assert run(*PYTHON, "-c", LOADED).stdout.strip() == "[]"
    assert run(*PYTHON, "-c", LOADED, MEGATRON_DOBB_AUTOLOAD="0").stdout.strip() == "[]"


def test_autoload_imports_neither_torch_nor_megatron():
    needs_installation()
    loaded = run(*PYTHON, "-c", LOADED, MEGATRON_DOBB_AUTOLOAD="1").stdout.strip()
    ours = ["megatron_dobb", "megatron_dobb.autoload", "megatron_dobb.post_import", "megatron_dobb.version"]
    assert loaded == str(ours)
    by_hand = run(*PYTHON, "-c", f"import megatron_dobb.autoload\n{LOADED}", cwd=ROOT).stdout.strip()
    assert by_hand == str(ours)
