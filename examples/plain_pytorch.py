"""Dobb without Megatron: a small byte-level GPT on English text, trained with AdamW and then with Dobb.

    python examples/plain_pytorch.py

This takes under a minute on a CPU and downloads nothing: the text is the language reference included in Python.
"""

import argparse
import math
import time
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_dobb import Dobb

CONTEXT, WIDTH, HEADS, LAYERS, BATCH, VALIDATION_BATCHES = 64, 128, 4, 2, 12, 8


class Block(nn.Module):
    """Causal attention and an MLP, each with a pre-norm and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3).unbind(2)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(-2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class GPT(nn.Module):
    """Map bytes `[batch, length]` to logits of the next byte, `[batch, length, 256]`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        for embedding in (self.embedding, self.position):
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight  # tied, so that Dobb recognizes the output layer

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text) + self.position.weight[: text.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def batches(text: Tensor, count: int, seed: int) -> Tensor:
    """Random pieces of the text, `[count, BATCH, CONTEXT + 1]`."""
    starts = torch.randint(len(text) - CONTEXT, (count, BATCH, 1), generator=torch.Generator().manual_seed(seed))
    return text[starts + torch.arange(CONTEXT + 1)]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Cross entropy of the next byte, in nats."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def validate(model: nn.Module, held_out: Tensor) -> float:
    """Mean loss over the held-out batches."""
    model.eval()
    loss = sum(float(loss_of(model, batch)) for batch in held_out) / len(held_out)
    model.train()
    return loss


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Tensor, held_out: Tensor, every: int
) -> list[float]:
    """Train on every batch once, with warm-up and cosine decay, and return the validation losses."""
    steps, losses = len(data), [validate(model, held_out)]
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (0.1 * steps), 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    for step, batch in enumerate(data, start=1):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        schedule.step()
        if step % every == 0:
            losses.append(validate(model, held_out))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--lr", type=float, default=3.54e-3, help="for both optimizers (default: %(default)s)")
    parser.add_argument(
        "--diagnostics", type=int, default=0, metavar="STEPS", help="steps between two rows of Dobb's diagnostics"
    )
    parser.add_argument("--save", metavar="FILE", help="write Dobb's state, for tools/inspect.py")
    args = parser.parse_args()
    text = torch.tensor(list("\n".join(topics.values()).encode()))
    data = batches(text[: -len(text) // 10], args.steps, seed=0)
    held_out = batches(text[-len(text) // 10 :], VALIDATION_BATCHES, seed=1)
    every, curves, figures = max(1, args.steps // 8), {}, {}
    for name in ("AdamW", "Dobb"):
        torch.manual_seed(0)
        model = GPT()
        if name == "AdamW":
            optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
        else:
            logging = {"diagnostics": figures.__setitem__, "log_diagnostics_interval": args.diagnostics}
            optimizer = Dobb(model, lr=args.lr, weight_decay=0.1, blocks=4, **(logging if args.diagnostics else {}))
            print(optimizer, flush=True)
        start = time.perf_counter()
        curves[name] = train(model, optimizer, data, held_out, every)
        if name == "Dobb" and args.save:
            torch.save(optimizer.state_dict(), args.save)
        print(f"{name}: {args.steps} steps in {time.perf_counter() - start:.1f} s", flush=True)
    print("\nvalidation loss\n  step" + "".join(f"{name:>9}" for name in curves))
    for row, losses in enumerate(zip(*curves.values(), strict=True)):
        print(f"{row * every:6d}" + "".join(f"{loss:9.3f}" for loss in losses))
    for step, found in figures.items():
        means = {name.removeprefix("dobb/"): value for name, value in found.items() if name.count("/") == 1}
        if step == args.diagnostics:
            print("\nDobb's diagnostics, means over the weights\n  step  " + "  ".join(means))
        print(f"{step:6d}  " + "  ".join(f"{value:{len(name)}.3f}" for name, value in means.items()))


if __name__ == "__main__":
    main()
