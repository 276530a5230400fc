"""Train a small GPT on English text, the same way for every optimizer: same seed, same start and same batches."""

import functools
import math
import platform
import runpy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import megatron_dobb
from megatron_dobb.errors import NonFiniteError

from .optimizers import BUILDERS
from .runs import Run, Size

BYTES = 256
_ENGLISH = Path(__file__).resolve().parents[2] / "examples" / "quickstart" / "english.py"
_EVALUATION_SEED = 1_000_003
Probe = Callable[[int, nn.Module, list[torch.optim.Optimizer]], None]


@dataclass(frozen=True)
class Text:
    """Bytes `[length]` to train on, and held-out ones."""

    train: Tensor
    held_out: Tensor


@functools.cache
def english() -> Text:
    """One and a half megabytes of English that come with every Python (examples/quickstart/english.py)."""
    documents = runpy.run_path(str(_ENGLISH))["documents"]()
    return Text(*(_bytes("\n".join(part)) for part in documents))


@functools.cache
def short_english() -> Text:
    """The language reference alone: half a megabyte, at once. For tests."""
    text = _bytes("\n".join(topics.values()))
    return Text(text[: -len(text) // 10], text[-len(text) // 10 :])


TEXTS: dict[str, Callable[[], Text]] = {"english": english, "short": short_english}


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


class Layer(nn.Module):
    """Causal attention and an MLP, each behind a norm and beside the residual stream."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.projection = nn.Linear(size.width, size.width)
        self.fc1, self.fc2 = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(-2))
        return x + self.fc2(F.gelu(self.fc1(self.mlp_norm(x))))


class GPT(nn.Module):
    """GPT-2's shape: pre-norm, learned positions, GELU, output tied to the embedding. Bytes to logits."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(BYTES, size.width), nn.Embedding(size.context, size.width)
        self.layers = nn.Sequential(*(Layer(size) for _ in range(size.layers)))
        self.norm, self.output = nn.LayerNorm(size.width), nn.Linear(size.width, BYTES, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                into_stream = name.endswith(("projection.weight", "fc2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * size.layers) if into_stream else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        self.output.weight = self.embedding.weight

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text) + self.position.weight[: text.shape[1]]
        return self.output(self.norm(self.layers(x)))


class Batches:
    """Random pieces of a text, `[sequences, context + 1]`; the same for the same seed."""

    def __init__(self, text: Tensor, size: Size, seed: int) -> None:
        self.text, self.size = text, size
        self.generator = torch.Generator().manual_seed(seed)

    def next(self) -> Tensor:
        """The next batch."""
        last = len(self.text) - self.size.context
        starts = torch.randint(last, (self.size.sequences, 1), generator=self.generator)
        return self.text[starts + torch.arange(self.size.context + 1)].long()


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Cross entropy of the next byte, in nats."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: nn.Module, text: Text, size: Size) -> float:
    """Mean loss over the held-out batches, which are the same for every run."""
    batches = Batches(text.held_out, size, _EVALUATION_SEED)
    model.eval()
    loss = statistics.fmean(float(loss_of(model, batches.next())) for _ in range(size.evaluation_batches))
    model.train()
    return loss


def schedule(step: int, run: Run) -> float:
    """Fraction of the learning rate in step 0, 1, ...: linear warm-up, then a cosine to zero."""
    warm = max(1, round(run.warmup * run.size.steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 + 0.5 * math.cos(math.pi * (step - warm) / max(1, run.size.steps - warm))


def train(run: Run, probe: Probe | None = None) -> tuple[dict[str, Any], nn.Module]:
    """One training run.

    A loss or gradient that is not finite ends it: the record then says `diverged`.

    Args:
        run: what to train.
        probe: called after the backward pass and before the optimizers in every step, counted from 0.

    Returns:
        The record, which can be written as JSON, and the model. Losses are in nats per byte, times in seconds: wall
        clock and this process's CPU time, of all optimizers together and of the whole step without evaluations.
    """
    text, size = TEXTS[run.size.text](), run.size
    torch.manual_seed(run.seed)
    model = GPT(size)
    optimizers = BUILDERS[run.method.optimizer](model, run)
    groups = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    batches = Batches(text.train, size, run.seed)
    train_loss: list[float] = []
    held_out = {0: evaluate(model, text, size)}
    times: dict[str, list[float]] = {"optimizer": [], "optimizer_cpu": [], "step": [], "step_cpu": []}
    diverged = False
    for step in range(size.steps):
        batch = batches.next()
        for group, rate in groups:
            group["lr"] = rate * schedule(step, run)
        start = _now()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), run.clip)
        if probe is not None:
            probe(step, model, optimizers)
        before = _now()
        try:
            for optimizer in optimizers:
                optimizer.step()
        except NonFiniteError:
            diverged = True
        end = _now()
        for name, since in (("optimizer", before), ("step", start)):
            times[name].append(end[0] - since[0])
            times[name + "_cpu"].append(end[1] - since[1])
        train_loss.append(float(loss.detach()))
        diverged = diverged or not math.isfinite(train_loss[-1])
        if diverged:
            break
        if (step + 1) % size.evaluate_every == 0 or step + 1 == size.steps:
            held_out[step + 1] = evaluate(model, text, size)
    last = held_out[max(held_out)]
    diverged = diverged or not math.isfinite(last)
    record = {
        "diverged": diverged,
        "final": None if diverged else last,
        "train_loss": train_loss,
        "held_out": {str(step): loss for step, loss in held_out.items()},
        "seconds": {
            **{f"{name}_median": statistics.median(found) for name, found in times.items()},
            **{f"{name}_mean": statistics.fmean(found) for name, found in times.items()},
        },
        "environment": {
            "torch": torch.__version__,
            "megatron_dobb": megatron_dobb.__version__,
            "threads": torch.get_num_threads(),
            "machine": platform.processor() or platform.machine(),
        },
    }
    return record, model


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()
