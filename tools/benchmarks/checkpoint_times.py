"""Time saves and loads with Dobb against those with Megatron's AdamW, interleaved in one run on two ranks.

    python -m tools.benchmarks.checkpoint_times [--rounds 7] [--folder FOLDER]

A round saves and loads with both optimizers, one after the other in turns; of each time the slowest rank counts, and of
all rounds the median. Sizes are those of the whole checkpoint.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_runs import FORMATS, load, save
from layout_runs import Layout, Run, start

from megatron_dobb import DobbConfig
from testbed import processes

LAYOUT = Layout(2, micro_batch=12)
OPTIMIZERS = {"adamw": None, "dobb": DobbConfig(blocks=8)}
MODELS: dict[str, dict[str, Any]] = {
    "0.1 M parameters": {},
    "3.2 M parameters": {"num_layers": 4, "hidden_size": 256, "kv_channels": 64},
    "14 M parameters": {"num_layers": 8, "hidden_size": 384, "kv_channels": 96},
}


def timed(action: Callable[[], Any]) -> float:
    """Seconds that the slowest rank takes."""
    dist.barrier()
    begin = time.perf_counter()
    action()
    seconds = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def measure(model: dict[str, Any], folder: Path, rounds: int) -> dict[tuple[str, str, str], list[float]]:
    """Seconds of saves and loads and bytes, by format, optimizer and what it is."""
    start(LAYOUT)
    runs = {name: Run(LAYOUT, config, model) for name, config in OPTIMIZERS.items()}
    for run in runs.values():
        run.step(0)
    found: dict[tuple[str, str, str], list[float]] = {}
    for number in range(rounds + 1):  # the first warms up
        for sharding in FORMATS:
            for name in sorted(runs, reverse=bool(number % 2)):
                path = folder / f"{sharding}-{name}"
                seconds = {
                    "save": timed(lambda path=path, run=runs[name], sharding=sharding: save(run, path, sharding)),
                    "load": timed(lambda path=path, run=runs[name]: load(run, path)),
                    "bytes": float(sum(file.stat().st_size for file in path.iterdir())),
                }
                dist.barrier()
                if dist.get_rank() == 0:
                    shutil.rmtree(path)
                dist.barrier()
                for what, value in seconds.items() if number else ():
                    found.setdefault((sharding, name, what), []).append(value)
    return found


def main() -> None:
    """Print a table of medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where checkpoints go for a moment (default: a temporary folder)")
    parser.add_argument("--models", type=int, default=len(MODELS), help="only so many, from the smallest on")
    options = parser.parse_args()
    print("| model | format | | AdamW | Dobb | ratio |\n|---|---|---|---|---|---|")
    for title, model in list(MODELS.items())[: options.models]:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            found = processes.run(2, measure, model, Path(folder), options.rounds, timeout=900)[0]
        for sharding in FORMATS:
            for what in ("save", "load", "bytes"):
                adamw, dobb = (statistics.median(found[sharding, name, what]) for name in OPTIMIZERS)
                unit, scale = ("MB", 1e-6) if what == "bytes" else ("ms", 1e3)
                print(
                    f"| {title} | `{sharding}` | {what.replace('bytes', 'size')} | {adamw * scale:.1f} {unit} | "
                    f"{dobb * scale:.1f} {unit} | {dobb / adamw:.2f} |"
                )


if __name__ == "__main__":
    main()
