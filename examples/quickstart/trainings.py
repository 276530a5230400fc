"""The quickstart's training runs: their commands, and their progress as parsed from Megatron's log."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from corpus import VOCABULARY, Corpus

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("pretrain_gpt_cpu.py")
PROCESSES = 2
SEQUENCE = 64
SEQUENCES_PER_STEP = 16
VALIDATION_STEPS = 24
"""Batches per evaluation, the same for all trainings."""

MODEL = [
    *("--num-layers", "2", "--hidden-size", "128", "--num-attention-heads", "4"),
    *("--seq-length", str(SEQUENCE), "--max-position-embeddings", str(SEQUENCE)),
    *("--attention-dropout", "0", "--hidden-dropout", "0"),
]
TOKENIZER = [
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCABULARY), "--make-vocab-size-divisible-by", "32"),
]
SCHEDULE = [
    *("--micro-batch-size", str(SEQUENCES_PER_STEP // PROCESSES), "--global-batch-size", str(SEQUENCES_PER_STEP)),
    *("--lr-decay-style", "cosine", "--lr-warmup-fraction", "0.1", "--min-lr", "0"),
    *("--weight-decay", "0.1", "--clip-grad", "1.0", "--adam-beta2", "0.95"),
]
# Needed by Megatron without a GPU, Transformer Engine and Apex.
CPU = [
    *("--distributed-backend", "gloo", "--transformer-impl", "local", "--use-cpu-initialization"),
    *("--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-persist-layer-norm"),
]
DOBB = ["--optimizer", "dobb", "--dobb-blocks", "4"]
ADAMW = ["--optimizer", "adam"]

_NUMBER = r"([-+.\dE]+|nan|inf)"
_TRAINED = re.compile(
    rf"iteration +(\d+)/ *\d+ \|.* elapsed time per iteration \(ms\): {_NUMBER} .* lm loss: {_NUMBER}"
)
_VALIDATED = re.compile(rf"validation loss at iteration (\d+)(?: on validation set)? \| lm loss value: {_NUMBER}")


class TrainingError(Exception):
    """A training stopped before its last step; the message contains the end of its log."""


@dataclass
class Training:
    """One training run and its progress."""

    name: str
    optimizer: list[str]
    learning_rate: float
    steps: int
    train_loss: dict[int, float] = field(default_factory=dict)
    """Loss by step, averaged over the steps since the previous entry."""
    validation_loss: dict[int, float] = field(default_factory=dict)
    step_ms: dict[int, float] = field(default_factory=dict)
    """Time per step, averaged in the same way."""
    _unread: str = ""

    @property
    def final_loss(self) -> float:
        """Validation loss after the last step."""
        return self.validation_loss[self.steps]

    @property
    def step(self) -> int:
        """The last step that the log reports."""
        return max(self.train_loss, default=0)

    def command(self, corpus: Corpus) -> list[str]:
        """The command line: torchrun, megatron_dobb's launcher and the training script."""
        return [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES)),
            *("-m", "megatron_dobb", str(SCRIPT)),
            *("--use-distributed-optimizer", *self.optimizer, "--lr", f"{self.learning_rate:g}"),
            *("--train-iters", str(self.steps), *SCHEDULE, *MODEL, *TOKENIZER),
            *("--train-data-path", str(corpus.train), "--valid-data-path", str(corpus.valid), "--num-workers", "0"),
            *("--log-interval", str(max(1, self.steps // 100))),
            *("--eval-interval", str(self.steps // 12 + 1), "--eval-iters", str(VALIDATION_STEPS)),
            *CPU,
        ]

    def run(self, corpus: Corpus, log: Path) -> Iterator[None]:
        """Train, yielding a few times per second so that the caller can show progress.

        Raises:
            TrainingError: if it fails.
        """
        with log.open("w") as output:
            command = self.command(corpus)
            print("$", *command, file=output, flush=True)
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment(), cwd=ROOT, start_new_session=True
            )
        try:
            with log.open() as lines:
                while process.poll() is None:
                    self._read(lines.read())
                    yield
                    time.sleep(0.2)
                self._read(lines.read())
        finally:
            _end(process)
        if process.returncode or self.steps not in self.validation_loss:
            raise TrainingError(f"{self.name} failed; its log, {log}, ends with:\n\n{_end_of(log)}")

    def _read(self, text: str) -> None:
        *lines, self._unread = (self._unread + text).split("\n")
        for line in lines:
            if match := _TRAINED.search(line):
                step = int(match[1])
                self.step_ms[step], self.train_loss[step] = float(match[2]), float(match[3])
            elif match := _VALIDATED.search(line):
                self.validation_loss[int(match[1])] = float(match[2])


def environment() -> Mapping[str, str]:
    """Environment variables of the training processes: no GPU, one thread each, and only local network traffic."""
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    network = {"GLOO_SOCKET_IFNAME": loopback.pop()} if loopback else {}
    return network | os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminate a training that is still running, with all its processes."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _end_of(log: Path, lines: int = 25) -> str:
    """The last lines of the training's own output, and torchrun's line about the process that failed."""
    own = log.read_text(errors="replace").splitlines()
    torchrun = [i for i, line in enumerate(own) if "torch/distributed/elastic/multiprocessing/api.py" in line]
    ended = [own[i] for i in torchrun if "failed (exitcode" in own[i]]
    return "\n".join([*own[: torchrun[0] if torchrun else None][-lines:], *ended[:1]])
