"""Table 2: how orthogonal the updates are that each optimizer makes of the same real gradients of a trained GPT."""

import argparse
import copy
import dataclasses
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn

from megatron_dobb import Dobb
from megatron_dobb.methods.dobb import update as reference

from ..common.tables import Result
from .dion import Dion
from .measures import effective_rank, orthogonality
from .optimizers import newton_schulz, tensors_of
from .options import add_size_arguments, size_of
from .paper import TABLE_2
from .results import Command, spread
from .runs import METHODS, MissingPart, Run, Size
from .training import GPT, TEXTS, Batches, loss_of, train

BLOCKS = tuple(TABLE_2["Dobb"])
RANK_PARTS = tuple(TABLE_2["Dion"])


@dataclass
class Measured:
    """Orthogonality of every matrix's update by optimizer, and effective ranks; keys are as the table shows them."""

    updates: dict[str, list[float]] = field(default_factory=dict)
    ranks: dict[str, list[float]] = field(default_factory=dict)

    def add(self, where: dict[str, list[float]], name: str, value: float) -> None:
        where.setdefault(name, []).append(value)


def parts(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Q, K and V count as matrices of their own (as in the paper); any other weight is one."""
    if "qkv" not in name:
        yield name, weight
        return
    for letter, part in zip("qkv", weight.chunk(3), strict=True):
        yield f"{name}.{letter}", part


def dobb_updates(model: nn.Module, batches: Batches, blocks: int, refreshes: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Momentum and raw direction of every weight, from Dobb's own state after some steps at learning rate 0.

    The weights stand still, so the momentum is that of the checkpoint; every step refreshes the bases.
    """
    model = copy.deepcopy(model)
    optimizer = Dobb(model, 0.0, 0.0, blocks=blocks, refresh_interval=1)
    for _ in range(refreshes):
        optimizer.zero_grad()
        loss_of(model, batches.next()).backward()
        optimizer.step()
    found = {}
    for name, state in tensors_of(optimizer):
        momentum, basis = state["momentum"], state["basis"].float()
        direction = reference.direction(momentum.unflatten(1, (len(basis), -1)), basis).flatten(1)
        found[name] = momentum, direction
    return found


def dion_updates(model: nn.Module, batches: Batches, steps: int) -> dict[int, dict[str, Tensor]]:
    """Dion's last raw update of every matrix, by n / rank, after the same gradients."""
    model = copy.deepcopy(model)
    weights = {name: p for name, p in model.named_parameters() if name.startswith("layers.") and p.ndim == 2}
    state: dict[tuple[int, str], Dion] = {}
    found: dict[int, dict[str, Tensor]] = {part: {} for part in RANK_PARTS}
    for _ in range(steps):
        model.zero_grad()
        loss_of(model, batches.next()).backward()
        for weight_name, weight in weights.items():
            assert weight.grad is not None
            for name, gradient in parts(weight_name, weight.grad):
                for part in RANK_PARTS:
                    if (part, name) not in state:
                        rank = max(1, min(gradient.shape) // part)
                        state[part, name] = Dion(gradient.shape, rank, seed=len(state))
                    found[part][name] = state[part, name].update(gradient)
    return found


def sensitivity_ranks(model: nn.Module, batch: Tensor) -> Iterator[float]:
    """Effective rank of the gradients of every linear layer's outputs over the tokens of a batch, `[tokens, m]`."""
    seen: dict[str, Tensor] = {}
    handles = [
        module.register_full_backward_hook(lambda _, __, gradients, name=name: seen.update({name: gradients[0]}))
        for name, module in model.named_modules()
        if name.startswith("layers.") and isinstance(module, nn.Linear)
    ]
    loss_of(model, batch).backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    for gradients in seen.values():
        yield effective_rank(torch.linalg.svdvals(gradients.flatten(0, 1).double()))


def measure(model: nn.Module, size: Size, refreshes: int) -> Measured:
    """All of Table 2, on the momentum that some batches give at the model's weights."""
    result, text = Measured(), TEXTS[size.text]()

    def batches() -> Batches:
        return Batches(text.train, size, seed=7)

    for blocks in BLOCKS:
        for weight_name, (momentum, direction) in dobb_updates(model, batches(), blocks, refreshes).items():
            names = parts(weight_name, momentum)
            for (_, own_momentum), (_, own) in zip(names, parts(weight_name, direction), strict=True):
                result.add(result.updates, f"Dobb, B = {blocks}", orthogonality(own))
                if blocks == BLOCKS[0]:
                    result.add(result.updates, "Muon, 5 iterations", orthogonality(newton_schulz(own_momentum)))
                    result.add(result.updates, "sign, no basis", orthogonality(own_momentum.sign()))
                    result.add(result.updates, "the momentum itself", orthogonality(own_momentum))
                    values = torch.linalg.svdvals(own_momentum.double())
                    result.add(result.ranks, "momentum", effective_rank(values))
    for part, updates in dion_updates(model, batches(), refreshes).items():
        result.updates[f"Dion, rank n / {part}"] = [orthogonality(update) for update in updates.values()]
    result.ranks["sensitivities"] = list(sensitivity_ranks(model, batches().next()))
    return result


def load_or_train(checkpoint: Path | None, save: Path | None, size: Size) -> tuple[nn.Module, Size]:
    """The checkpoint's GPT, or one trained with AdamW."""
    if checkpoint is not None:
        if not checkpoint.is_file():
            raise MissingPart(f"--checkpoint {checkpoint}: no such file; --save FILE writes one that was trained here")
        saved = torch.load(checkpoint, weights_only=True)
        if not isinstance(saved, Mapping) or not {"size", "model"} <= saved.keys():
            raise MissingPart(f"--checkpoint {checkpoint}: not written by --save of this command; train one with it")
        size = Size(**saved["size"])
        model = GPT(size)
        model.load_state_dict(saved["model"])
        return model, size
    Console().print(f"training a GPT of {size.layers} layers, width {size.width}, for {size.steps} steps")
    _, model = train(Run(METHODS["adamw"], 2e-3, 0, size))
    if save is not None:
        torch.save({"size": dataclasses.asdict(size), "model": model.state_dict()}, save)
    return model, size


def table2(measured: Measured, size: Size) -> list[Result]:
    """Ours beside the paper's."""
    paper = {f"Dobb, B = {blocks}": figure for blocks, figure in TABLE_2["Dobb"].items()}
    paper |= {f"Dion, rank n / {part}": figure for part, figure in TABLE_2["Dion"].items()}
    rows = [(name, statistics.fmean(v), spread(v), paper.get(name)) for name, v in measured.updates.items()]
    mean = {row[0]: row[1] for row in rows}
    falls = [1 - mean[f"Dobb, B = {BLOCKS[-1]}"] / mean["Dobb, B = 1"]]
    falls.append(1 - mean[f"Dion, rank n / {RANK_PARTS[-1]}"] / mean["Dion, rank n / 1"])
    matrices = len(next(iter(measured.updates.values())))
    return [
        Result(
            f"Table 2: orthogonality of the updates of {matrices} matrices of a GPT of width {size.width}",
            ("update", "ours", "s.d.", "paper"),
            rows,
            [
                f"From B = 1 to {BLOCKS[-1]} Dobb falls by {falls[0]:.0%} (paper: 4 %); from rank n to "
                f"n / {RANK_PARTS[-1]} Dion falls by {falls[1]:.0%} (paper: 74 %).",
                "The paper's checkpoint is GPT-2 Small; ours is small and trained on bytes of English. A random matrix "
                "of signs has 8/(3 pi) = 0.849 if it is square, and more if it is not.",
            ],
            dataclasses.asdict(measured),
        ),
        Result(
            "Ours: entropy effective rank, as a fraction of min(rows, columns)",
            ("of", "mean", "s.d.", "least", "most"),
            [(name, statistics.fmean(v), spread(v), min(v), max(v)) for name, v in measured.ranks.items()],
            ["Sensitivities are the gradients of a layer's outputs over the tokens of one batch."],
        ),
    ]


def _run(options: argparse.Namespace) -> list[Result]:
    model, size = load_or_train(options.checkpoint, options.save, size_of(options))
    return table2(measure(model, size, options.refreshes), size)


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_size_arguments(parser)
    parser.add_argument("--checkpoint", type=Path, help="a GPT that --save wrote, instead of training one")
    parser.add_argument("--save", type=Path, help="keep the trained GPT in this file")
    parser.add_argument(
        "--refreshes", type=int, default=40, help="batches for momentum and bases, at fixed weights (%(default)s)"
    )


COMMANDS = {"table2": Command("orthogonality of updates on a trained GPT's gradients", _run, _arguments)}
