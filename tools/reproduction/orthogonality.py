"""Table 1: what the sign does for the orthogonality of a matrix, and what a basis adds."""

import argparse
import functools
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_dobb.methods.dobb import update
from megatron_dobb.methods.dobb.orthogonalize import refresh_basis

from ..common.tables import Result
from . import measures
from .paper import TABLE_1A
from .results import Command, spread

SIZE = 768
BLOCKS = (1, 4, 16, 64)


@functools.lru_cache(maxsize=64)
def matrix(size: int, rank_fraction: float, seed: int) -> Tensor:
    """The matrices of both parts of the table."""
    return measures.with_effective_rank(size, rank_fraction, seed)


def table1a(size: int, seeds: Sequence[int]) -> Result:
    """Orthogonality of `Y` and `sign(Y)` for matrices of falling effective rank."""
    rows: list[Sequence[str | float | None]] = []
    data = []
    for percent, paper in TABLE_1A.items():
        found = {"Y": [], "sign(Y)": []}  # type: dict[str, list[float]]
        for seed in seeds:
            y = matrix(size, percent / 100, seed)
            found["Y"].append(measures.orthogonality(y))
            found["sign(Y)"].append(measures.orthogonality(y.sign()))
        for name, values in found.items():
            mean = statistics.fmean(values)
            rows.append((f"{percent} %", name, mean, spread(values), paper[name], mean - paper[name]))
            data.append({"percent": percent, "matrix": name, "values": values, "paper": paper[name]})

    def draw(axes) -> None:
        for name in ("Y", "sign(Y)"):
            axes.plot([*TABLE_1A], [r[2] for r in rows if r[1] == name], "o-", label=f"{name}, ours")
            axes.plot([*TABLE_1A], [p[name] for p in TABLE_1A.values()], "kx", label=f"{name}, paper")
        axes.set(xlabel="entropy effective rank, %", ylabel="orthogonality", xscale="log")
        axes.legend(frameon=False)

    return Result(
        f"Table 1(a): orthogonality of a {size} x {size} matrix and of its sign",
        ("effective rank", "matrix", "ours", "s.d.", "paper", "ours - paper"),
        rows,
        [f"{len(seeds)} matrices each; singular values i^-a, Haar singular vectors. The paper's figures are for 768."],
        data,
        draw,
    )


def sign_in_blocks(y: Tensor, blocks: int) -> Tensor:
    """Dobb's direction for the momentum `y [m, n]`, in exact eigenbases of the diagonal blocks of `y^T y`."""
    width = y.shape[1] // blocks
    rectangle = y.float().unflatten(1, (blocks, width))
    moment = torch.einsum("rjc,rjd->jcd", rectangle, rectangle)
    basis = refresh_basis(moment, torch.eye(width).expand_as(moment), method="eigh").basis
    return update.direction(rectangle, basis).flatten(1)


def table1b(size: int, seeds: Sequence[int]) -> Result:
    """Orthogonality of the sign taken in block eigenbases, against the number of blocks."""
    counts = [blocks for blocks in BLOCKS if size % blocks == 0]
    rows, data = [], []
    for percent in TABLE_1A:
        by_blocks = [
            [measures.orthogonality(sign_in_blocks(matrix(size, percent / 100, seed), blocks)) for seed in seeds]
            for blocks in counts
        ]
        plain = [measures.orthogonality(matrix(size, percent / 100, seed).sign()) for seed in seeds]
        rows.append((f"{percent} %", *map(statistics.fmean, by_blocks), statistics.fmean(plain)))
        data.append({"percent": percent, "blocks": dict(zip(counts, by_blocks, strict=True)), "no basis": plain})

    def draw(axes) -> None:
        for row in rows:
            axes.plot(counts, row[1 : 1 + len(counts)], "o-", label=f"effective rank {row[0]}")
        axes.set(xlabel="blocks B", ylabel="orthogonality")
        axes.set_xscale("log", base=4)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.legend(frameon=False)

    return Result(
        f"Ours (beside Table 1): orthogonality of the sign in block eigenbases, {size} x {size}",
        ("effective rank", *(f"B = {blocks}" for blocks in counts), "no basis"),
        rows,
        [
            "We have no figures of the paper's Table 1(b). Shown: the matrices of Table 1(a) as momentum, the sign "
            "taken in the eigenbases of the B diagonal blocks of Y^T Y.",
            "A random matrix of signs would have 8/(3 pi) = 0.849.",
        ],
        data,
        draw,
    )


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=5, help="matrices of each effective rank (default: %(default)s)")
    parser.add_argument("--size", type=int, default=SIZE, help="rows and columns (default: the paper's %(default)s)")


COMMANDS = {
    "table1a": Command(
        "orthogonality of a matrix and of its sign, against its effective rank",
        lambda options: [table1a(options.size, range(options.seeds))],
        _arguments,
    ),
    "table1b": Command(
        "orthogonality of the sign in block eigenbases, against the number of blocks (ours)",
        lambda options: [table1b(options.size, range(options.seeds))],
        _arguments,
    ),
}
