"""Time training steps with Dobb against those with Megatron's AdamW, interleaved in one run.

    python -m tools.benchmarks.overlap_times [--ranks 2] [--rounds 5] [--sequences 96]

In every round each optimizer makes the same steps: one that refreshes and others. Shown are medians over the rounds, of
the slowest rank: of a whole step, and of the optimizer's call in it; and the spread of AdamW's own steps, which is the
machine's noise.
"""

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from layout_runs import Layout, Run, global_batch, start

from megatron_dobb import DobbConfig
from testbed import gpt, processes

MODEL: dict[str, Any] = {"num_layers": 4, "hidden_size": 256, "kv_channels": 64}
BLOCKS, INTERVAL, NEVER = 8, 9, 10**6
OPTIMIZERS = {
    "AdamW": None,
    "Dobb, T = 9": DobbConfig(blocks=BLOCKS, refresh_interval=INTERVAL),
    "Dobb, T = 9, no overlap": DobbConfig(blocks=BLOCKS, refresh_interval=INTERVAL, overlap_refresh=False),
    "Dobb, T = 9, staggered": DobbConfig(blocks=BLOCKS, refresh_interval=INTERVAL, stagger=True),
    "Dobb, T = infinity": DobbConfig(blocks=BLOCKS, refresh_interval=NEVER),
}
Times = dict[tuple[str, bool], list[tuple[float, float]]]
"""Seconds of whole steps and of the optimizer's calls in them, by optimizer and whether it refreshed all weights."""


def step_times(run: Run, number: int, sequences: int) -> tuple[float, float]:
    """Seconds that the slowest rank takes for a step, and for the optimizer's call in it."""
    inside = 0.0
    step = run.optimizer.step

    def timed() -> Any:
        nonlocal inside
        begin = time.perf_counter()
        found = step()
        inside = time.perf_counter() - begin
        return found

    run.optimizer.step = timed
    tokens = global_batch(number, sequences)
    dist.barrier()
    begin = time.perf_counter()
    gpt.train_step(run.chunks, run.optimizer, tokens, run.layout.micro_batch)
    seconds = torch.tensor([time.perf_counter() - begin, inside])
    run.optimizer.step = step
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    whole, call = seconds.tolist()
    return whole, call


def measure(layout: Layout, rounds: int, sequences: int) -> Times:
    """Times of all optimizers, step by step in turns."""
    start(layout)
    runs = {name: Run(layout, config, MODEL) for name, config in OPTIMIZERS.items()}
    found: Times = {}
    number = 0
    for run in runs.values():  # the first step refreshes everything, and warms up
        step_times(run, 0, sequences)
    for _ in range(rounds):
        for _ in range(INTERVAL):
            number += 1
            names = list(runs)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                config = OPTIMIZERS[name]
                refreshes = config is not None and not config.stagger and number % config.refresh_interval == 0
                found.setdefault((name, refreshes), []).append(step_times(runs[name], number, sequences))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help=f"of {INTERVAL} steps each")
    parser.add_argument("--sequences", type=int, default=96, help="of a global batch, in micro-batches of 6")
    options = parser.parse_args()
    layout = Layout(options.ranks, micro_batch=6)
    found = processes.run(options.ranks, measure, layout, options.rounds, options.sequences, timeout=3000)[0]
    medians = {key: [statistics.median(column) for column in zip(*times, strict=True)] for key, times in found.items()}
    adamw = medians["AdamW", False]
    low, _, high = statistics.quantiles([whole for whole, _ in found["AdamW", False]], n=4)
    print(f"AdamW's steps: quartiles {low * 1e3:.0f} and {high * 1e3:.0f} ms; {options.ranks} ranks")
    print("| optimizer | steps | step | of AdamW's | optimizer's call | of AdamW's |\n|---|---|---|---|---|---|")
    for (name, refreshes), (whole, call) in medians.items():
        kind = "refresh" if refreshes else "all" if name == "AdamW" or "stagg" in name else "other"
        print(
            f"| {name} | {kind} | {whole * 1e3:.0f} ms | {whole / adamw[0]:.2f} | {call * 1e3:.1f} ms | "
            f"{call / adamw[1]:.2f} |"
        )
    for name in OPTIMIZERS:
        whole = statistics.fmean(whole for key, times in found.items() if key[0] == name for whole, _ in times)
        print(f"mean step of {name}: {whole * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
