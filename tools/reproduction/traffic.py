"""Tables 3 and 7: what the shards of a weight send each other for an update, counted in gloo process groups.

For Dobb the calls are those of Megatron's distributed optimizer with `--optimizer dobb`, next to the same steps with
AdamW. Muon and Dion are the plainest row-sharded forms of their update, written here.
"""

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..common import payload
from ..common.tables import Result
from .optimizers import newton_schulz
from .results import Command
from .runs import Method, MissingPart, dobb

TESTS = Path(__file__).resolve().parents[2] / "tests"
STEPS, INTERVAL, BLOCKS, HIDDEN = 5, 3, 4, 64
ROWS, COLUMNS, RANK = 256, 128, 32
VARIANTS = {
    "Dobb": dobb(BLOCKS),
    "Dobb-l2": dobb(BLOCKS, norm="l2"),
    # Row blocks stay whole in a flat shard, and in a model this small only small ones pad its buffers little.
    "Dobb-G": dobb(8 * BLOCKS, side="output"),
    "Dobb-G-l2": dobb(8 * BLOCKS, side="output", norm="l2"),
}
FORMULAS = {"Dobb": ("0", "0"), "Dobb-l2": ("O(n)", "0"), "Dobb-G": ("0", "0"), "Dobb-G-l2": ("0", "O(m)")}
"""The paper's payload for each matrix and step: with the output axis sharded, and with the input axis sharded."""
LAYOUTS: dict[str, dict[str, int]] = {
    "2 flat shards (DP 2)": {"world": 2, "micro_batch": 6},
    "4 flat shards (DP 4)": {"world": 4, "micro_batch": 6},
    "TP 2": {"world": 2, "tensor": 2, "micro_batch": 12},
    "TP 2 x DP 2": {"world": 4, "tensor": 2, "micro_batch": 6},
}


@dataclass
class Counted:
    """Elements that a rank hands to collectives beyond those of AdamW.

    Attributes:
        elements: in each step, outside of the parameter and gradient buffers; the larger side of each call.
        calls: in each step, all calls.
        padding: elements that an ordinary step's buffers have more than AdamW's.
        scattered: elements of the reduce-scatters among them, in each step: the moments.
        triangles: `n (b + 1) / 2`, summed over this rank's matrices; what the moments of one refresh should be.
        matrices: how many matrices these are.
    """

    elements: list[int]
    calls: list[int]
    padding: int
    scattered: list[int]
    triangles: int
    matrices: int


def testbed_parts() -> tuple[Any, Any, Any, Any]:
    """The tests' process groups, small GPT, recorder of calls, and runs on a layout. "cuda" then means the CPU.

    Raises:
        MissingPart: if Megatron or the tests are not here.
    """
    for folder in (TESTS, TESTS / "distributed"):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    try:
        import layout_runs

        from testbed import gpt, processes, traffic
    except ImportError as error:
        raise MissingPart(f"counting needs Megatron-Core and the folder {TESTS}: {error}") from error
    return processes, gpt, traffic, layout_runs


def count(layout: dict[str, int], method: Method) -> Counted:
    """Count what this rank hands over in each of some steps. Runs in every rank."""
    _, gpt, traffic, runs = testbed_parts()
    from megatron_dobb import DobbConfig

    logging.disable(logging.WARNING)  # a rank is a process of its own: nobody else falls silent
    warnings.simplefilter("ignore")
    where = runs.Layout(**layout)
    runs.start(where)
    steps: list[list[list[Any]]] = []
    for config in (None, DobbConfig(refresh_interval=INTERVAL, **method.settings)):
        with contextlib.redirect_stdout(io.StringIO()):  # the start-up tables
            run = runs.Run(where, config, {"hidden_size": HIDDEN})
        steps.append([])
        for step in range(STEPS):
            with traffic.record() as calls:
                gpt.train_step(run.chunks, run.optimizer, runs.global_batch(step), where.micro_batch)
            steps[-1].append(calls)

    def more(of: Callable[[Any], int]) -> list[int]:
        return [sum(map(of, ours)) - sum(map(of, plain)) for plain, ours in zip(*steps, strict=True)]

    return Counted(
        # Megatron coalesces the calls of its buffers, and no others.
        elements=more(lambda call: call.numel if call.coalesced is None else 0),
        calls=more(lambda call: 1),
        padding=more(lambda call: call.numel if call.coalesced is not None else 0)[1],
        scattered=more(
            lambda call: call.numel if call.coalesced is None and call.name == "reduce_scatter_tensor" else 0
        ),
        triangles=sum(weight.local_columns * (weight.width + 1) // 2 for weight in run.managed.values()),
        matrices=len(run.managed),
    )


def muon_shards() -> int:
    """Elements that a rank receives for one Muon update of a row-sharded matrix: it gathers the whole momentum."""
    _, _, traffic, _ = testbed_parts()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    own = torch.randn(ROWS // ranks, COLUMNS)
    with traffic.record() as calls:
        whole = torch.empty(ROWS, COLUMNS)
        dist.all_gather_into_tensor(whole, own)
        newton_schulz(whole).chunk(ranks)[rank]
    return sum(call.numel for call in calls)


def dion_shards() -> int:
    """Make an update of Dion: `P [m, r]` is gathered to be orthonormalised, `R [n, r]` is a sum over the shards."""
    _, _, traffic, _ = testbed_parts()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    own, right = torch.randn(ROWS // ranks, COLUMNS), torch.ones(COLUMNS, RANK).tril()
    with traffic.record() as calls:
        image = torch.empty(ROWS, RANK)
        dist.all_gather_into_tensor(image, own @ right)
        left = torch.linalg.qr(image).Q.chunk(ranks)[rank]
        dist.all_reduce(own.T @ left)
    return sum(call.numel for call in calls)


def ordinary(counted: list[int]) -> list[int]:
    """The steps without a refresh."""
    return [value for step, value in enumerate(counted) if step % INTERVAL]


def table3(layouts: Sequence[str] = tuple(LAYOUTS)) -> list[Result]:
    """Payload of one update between shards, and of a refresh between data-parallel ranks."""
    processes = testbed_parts()[0]
    rows: list[tuple[Any, ...]] = []
    refreshes: list[tuple[Any, ...]] = []
    data = {}
    for name in layouts:
        layout = LAYOUTS[name]
        counted: list[Counted] = processes.run(layout["world"], count, layout, VARIANTS["Dobb"])
        data[name] = [vars(rank) for rank in counted]
        most = max(max(map(abs, ordinary(rank.elements))) for rank in counted)
        calls = max(max(map(abs, ordinary(rank.calls))) for rank in counted)
        matrices = counted[0].matrices
        rows.append(("Dobb", name, most / matrices, calls, "0", 0, f"measured, {matrices} matrices"))
        first = counted[0]
        others = first.elements[0] - first.scattered[0]
        refreshes.append((name, first.matrices, first.triangles, first.scattered[0], others, first.padding))
    for world in sorted({LAYOUTS[name]["world"] for name in layouts}):
        for name, shards, formula, expected in (
            ("Muon", muon_shards, "m n", payload.muon(ROWS, COLUMNS)),
            ("Dion", dion_shards, "r (m + n)", payload.dion(ROWS, COLUMNS, RANK)),
        ):
            (elements,) = set(processes.run(world, shards))
            how = f"measured, {ROWS} x {COLUMNS}" + (f", r = {RANK}" if name == "Dion" else "")
            rows.append((name, f"{world} row shards", elements, None, formula, expected, how))
    return [
        Result(
            "Table 3: elements that a rank passes to collectives for one matrix's update, beyond AdamW's traffic",
            ("optimizer", "shards", "elements", "calls more", "paper", "which is", "how"),
            rows,
            [
                "Dobb: Megatron's distributed optimizer, all ordinary steps, the rank with the most. Muon and Dion: "
                "the plainest row-sharded update. The paper gives orders; 'which is' takes their factors as 1.",
            ],
            data,
        ),
        Result(
            "Moments on a refresh step, elements per rank (fp32)",
            ("layout", "matrices", "n (b + 1) / 2", "reduce-scattered", "blocks and bases", "buffer padding"),
            refreshes,
            [
                "Reduce-scattered are the triangles, a token count for each matrix, and padding below the number of "
                f"ranks. n, b: this rank's columns, summed over its matrices; B = {BLOCKS}, width {HIDDEN}. Blocks to "
                "their owners are fp32, bases back are bf16, counted in bytes. Padding is that of an ordinary step.",
            ],
            data,
        ),
    ]


def table7() -> list[Result]:
    """Payload of the variants by the axis that is sharded."""
    processes = testbed_parts()[0]
    rows = []
    for name, method in VARIANTS.items():
        output, inputs = FORMULAS[name]
        if missing := method.missing_settings():
            how = f"formula: this megatron_dobb has no setting {', '.join(missing)}"
            rows.append((name, output, inputs, None, None, how))
            continue
        found = []
        for layout in (LAYOUTS["2 flat shards (DP 2)"], LAYOUTS["TP 2"]):
            counted: list[Counted] = processes.run(2, count, layout, method)
            found.append(max(max(map(abs, ordinary(rank.elements))) for rank in counted) / counted[0].matrices)
        rows.append((name, output, inputs, *found, "measured"))
    return [
        Result(
            "Table 7: elements per matrix and step between shards, beyond AdamW's traffic",
            ("optimizer", "output axis, paper", "input axis, paper", "flat shards, ours", "TP 2, ours", "how"),
            rows,
            ["Flat shards are runs of rows, so they cut the output axis; TP 2 cuts one axis or the other by layer."],
        )
    ]


COMMANDS = {
    "table3": Command("payload between shards for one update: Dobb, Muon, Dion", lambda options: table3()),
    "table7": Command("payload of Dobb's variants by the axis that is sharded", lambda options: table7()),
}
