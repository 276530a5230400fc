"""Run the real pretrain_gpt.py of a Megatron-LM checkout with Dobb, on two CPU processes.

    python tests/functional/real_pretrain_gpt.py PATH/TO/Megatron-LM

1. Through the launcher: 20 iterations, with checkpoints after 10 and 20.
2. A literal torchrun with MEGATRON_DOBB_AUTOLOAD=1, from the checkpoint after 10: the losses must be those of the first
   run to the last digit that Megatron prints.

The checkout needs Megatron's dataset helpers, which `make -C megatron/core/datasets` builds where pybind11 is
installed; without them this script compiles them into a folder of its own. pytest does not collect it, because the
tests need no checkout.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ITERATIONS = 20
SAVED = ITERATIONS // 2

TRAINING = shlex.split(
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 "
    f"--train-iters {ITERATIONS} --eval-iters 0 --eval-interval 1000 --log-interval 1 --num-workers 0 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 32 "
    "--use-distributed-optimizer --distributed-backend gloo --transformer-impl local --use-cpu-initialization "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm "
    f"--optimizer dobb --dobb-blocks 2 --dobb-refresh-interval 3 --save-interval {SAVED}"
)
LINE = re.compile(r"iteration +(\d+)/ +\d+ .*?lm loss: (\S+)")


def build_helpers(checkout: Path, target: Path) -> None:
    """Compile Megatron's dataset helpers into `target`, unless the checkout has them."""
    name = f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    if (checkout / "megatron/core/datasets" / name).exists():
        return
    includes = [sysconfig.get_paths()["include"], str(Path(torch.__file__).parent / "include")]
    source = checkout / "megatron/core/datasets/helpers.cpp"
    command = [os.environ.get("CXX", "g++"), "-O2", "-shared", "-fPIC", "-std=c++17", str(source), "-o"]
    subprocess.run([*command, str(target / name), *(f"-I{path}" for path in includes)], check=True)


def train(checkout: Path, extra: Path, launcher: list[str], arguments: list[str], **variables: str) -> dict[int, str]:
    """Run pretrain_gpt.py on two processes.

    Returns:
        The printed loss of each iteration.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MEGATRON_DOBB")}
    paths = [HERE / "cpu_site", ROOT / "tests", ROOT, extra, checkout]
    environment |= {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "MEGATRON_DATASET_HELPERS": str(extra),
        **variables,
    }
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, *launcher, "pretrain_gpt.py", *TRAINING, *arguments]
    print("$", *launcher, "pretrain_gpt.py", *arguments, *(f"{k}={v}" for k, v in variables.items()), flush=True)
    finished = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if finished.returncode:
        sys.exit(f"{finished.stdout[-3000:]}\n{finished.stderr[-6000:]}\npretrain_gpt.py failed")
    return {int(step): loss for step, loss in LINE.findall(finished.stdout + finished.stderr)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the pretrain_gpt.py of a Megatron-LM checkout with Dobb on a CPU")
    parser.add_argument("checkout", type=Path, help="folder of a Megatron-LM checkout")
    checkout = parser.parse_args().checkout.resolve()
    if not (checkout / "pretrain_gpt.py").is_file():
        parser.error(f"checkout {checkout} has no pretrain_gpt.py; give the root folder of a Megatron-LM checkout")
    with tempfile.TemporaryDirectory() as folder:
        extra, saved = Path(folder) / "helpers", Path(folder) / "checkpoints"
        extra.mkdir()
        build_helpers(checkout, extra)
        whole = train(checkout, extra, ["-m", "megatron_dobb"], ["--save", str(saved)])
        (saved / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
        resumed = train(checkout, extra, [], ["--load", str(saved)], MEGATRON_DOBB_AUTOLOAD="1")
    for step in range(1, ITERATIONS + 1):
        print(f"iteration {step:2}: {whole.get(step, '-'):>14} {resumed.get(step, ''):>14}")
    if sorted(whole) != list(range(1, ITERATIONS + 1)) or float(whole[ITERATIONS]) >= float(whole[1]):
        sys.exit("the first run did not train")
    # For the second iteration after a load Megatron prints the mean of the first two.
    compared = [step for step in range(SAVED + 1, ITERATIONS + 1) if step != SAVED + 2]
    if len(resumed) != ITERATIONS - SAVED or any(resumed[step] != whole[step] for step in compared):
        sys.exit("the resumed run is not the uninterrupted one")
    print("both ways train, and the resumed run is the uninterrupted one")


if __name__ == "__main__":
    main()
