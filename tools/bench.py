#!/usr/bin/env python
"""Time an optimizer step of Dobb against AdamW, Muon and (given a checkout) Dion, interleaved in one run.

    python tools/bench.py --model gpt2-small --blocks 16 --threads 2 --json figures.json

Only the weight matrices of the layers are stepped, with random gradients; embeddings would be on AdamW everywhere. The
floor is the time to move the 20 bytes per element that an update must touch (G, M and W read, M and W written) at the
copy bandwidth measured between the steps.
"""

import argparse
import importlib.util
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_dobb import build_info
from megatron_dobb.errors import DobbError
from megatron_dobb.kernels import dispatch
from megatron_dobb.methods.dobb import kernels
from megatron_dobb.methods.dobb.blocks import block_width
from megatron_dobb.methods.dobb.moment import refresh_
from megatron_dobb.sharding.segment import Segment
from megatron_dobb.sharding.shard import Shard
from tools.planning.presets import PRESETS

BYTES_PER_ELEMENT = 20
HEAD_START_CYCLES = 50_000_000  # about 25 ms of a GPU
MODELS = {name: sizes for name, sizes in PRESETS.items() if not sizes.num_experts}


def shapes_of(model: str, layers: int | None) -> list[tuple[int, int]]:
    """Rows and columns of every matrix of the layers, QKV and gate/up fused as in Megatron."""
    sizes = MODELS[model]
    n, heads = sizes.hidden_size, sizes.num_attention_heads * sizes.head
    qkv = heads + 2 * sizes.query_groups * sizes.head
    layer = [(qkv, n), (n, heads), (sizes.ffn * (2 if sizes.swiglu else 1), n), (n, sizes.ffn)]
    return layer * (layers or sizes.num_layers)


def read_options(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(MODELS), default="gpt2-small")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has, to fit in memory")
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--basis-dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--precision", choices=kernels.PRECISIONS, default="exact")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's)")
    parser.add_argument("--steps", type=int, default=7, help="timed steps of each optimizer; the median counts")
    parser.add_argument("--slow-steps", type=int, default=2, help="the same for Muon, Dion and the refresh")
    parser.add_argument("--without", nargs="*", default=[], help="contenders to leave out")
    parser.add_argument("--dion", type=Path, help="a checkout of microsoft/dion")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    options = parser.parse_args(words)
    for name in ("blocks", "layers", "threads", "steps", "slow_steps"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value}: at least 1")
    unknown = {*options.without} - {"dobb", "muon", "dion"}
    if unknown:
        parser.error(f"--without {' '.join(sorted(unknown))}: not a contender; dobb, muon or dion")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: PyTorch sees no GPU; use --device cpu")
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json {options.json}: the folder does not exist")
    return options


class Contenders:
    """The optimizers, on the same gradients; each has weights and state of its own."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, torch.device(options.device)
        self.shapes = shapes_of(options.model, options.layers)
        self.gradients = [torch.randn(shape, device=self.device) for shape in self.shapes]
        self.steps: dict[str, Callable[[], Any]] = {}
        self.slow: set[str] = set()

    def _parameters(self) -> list[torch.nn.Parameter]:
        parameters = [torch.nn.Parameter(torch.randn(s, device=self.device) * 0.02) for s in self.shapes]
        for parameter, gradient in zip(parameters, self.gradients, strict=True):
            parameter.grad = gradient
        return parameters

    def add_adamw(self) -> None:
        self.steps["AdamW, fused"] = torch.optim.AdamW(self._parameters(), lr=1e-4, fused=True).step

    def add_dobb(self) -> None:
        segments, total = [], []
        for i, (m, n) in enumerate(self.shapes):
            width = block_width(f"matrix {i}", n, blocks=self.options.blocks)
            start = torch.randn(n // width, width, width, device=self.device)
            basis = torch.linalg.qr(start).Q.to(torch.bfloat16 if self.options.basis_dtype == "bf16" else torch.float32)
            weight, momentum = 0.02 * torch.randn(m * n, device=self.device), torch.zeros(m * n, device=self.device)
            segments.append(Segment(str(i), Shard(0, m * n, n, width), m, n, weight, momentum, basis.contiguous()))
            total.append(start @ start.mT)
        flat = [gradient.view(-1) for gradient in self.gradients]
        given: dict[str, Any] = {
            "learning_rate": 1e-4, "weight_decay": 0.1, "momentum": 0.95, "nesterov": False, "update_scale": 0.2,
        }  # fmt: skip
        backends = ["extension", "reference"] if build_info().extension else ["reference"]
        for backend in backends:
            self.steps[f"Dobb, {backend}"] = lambda backend=backend: kernels.update(
                segments, flat, **given, backend=backend, precision=self.options.precision
            )
        self.add_refresh(segments, total)

    def add_refresh(self, segments: list[Segment], totals: list[Tensor]) -> None:
        by_width: dict[int, list[int]] = {}
        for i, segment in enumerate(segments):
            by_width.setdefault(segment.shard.width, []).append(i)
        batches = []
        for chosen in by_width.values():
            total = torch.cat([totals[i] for i in chosen])
            basis = torch.cat([segments[i].basis for i in chosen])
            batches.append((total.clone(), basis, total, torch.ones(len(total), device=self.device)))
        for method in ("householder", "cholesky"):
            # Bases of its own: what one method leaves behind would make the other's next refresh easier.
            own = [(moment.clone(), basis.clone(), total, tokens) for moment, basis, total, tokens in batches]

            def refresh(method: Any = method, own: Any = own) -> None:
                for moment, basis, total, tokens in own:
                    refresh_(
                        moment, basis, total, tokens, beta=0.95, method=method, orthogonalize=kernels.refresh_basis
                    )

            self.steps[f"refresh of all bases, {method}"] = refresh
            self.slow.add(f"refresh of all bases, {method}")

    def add_muon(self) -> None:
        if hasattr(torch.optim, "Muon"):
            self.steps["Muon"] = torch.optim.Muon(self._parameters(), lr=1e-4).step
            self.slow.add("Muon")

    def add_dion(self) -> None:
        if self.options.dion is None:
            return
        sys.path.insert(0, str(self.options.dion))
        if importlib.util.find_spec("dion") is None:
            raise SystemExit(f"--dion {self.options.dion}: no package dion there; give a checkout of microsoft/dion")
        from dion import Dion

        self.steps["Dion, rank 1/4"] = Dion(self._parameters(), lr=1e-4, rank_fraction=0.25).step
        self.slow.add("Dion, rank 1/4")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(step: Callable[[], Any], device: torch.device) -> float:
    """Time of a step. On a GPU that of its kernels: a sleeping kernel before them lets the host run ahead."""
    synchronize(device)
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HEAD_START_CYCLES)
        begin.record()
        step()
        end.record()
        synchronize(device)
        return float(begin.elapsed_time(end)) / 1e3
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def host_seconds(step: Callable[[], Any], device: torch.device) -> float:
    """Time until the host may go on, median of five."""
    found = []
    for _ in range(5):
        synchronize(device)
        start = time.perf_counter()
        step()
        found.append(time.perf_counter() - start)
    synchronize(device)
    return statistics.median(found)


def measure(contenders: Contenders) -> tuple[dict[str, list[float]], float]:
    """Times of every contender, one after the other in each round, and the median copy bandwidth in bytes/s."""
    options, device = contenders.options, contenders.device
    source = torch.ones(32 * 2**20, device=device)
    target = torch.empty_like(source)
    times: dict[str, list[float]] = {name: [] for name in contenders.steps}
    copies = []
    for round_ in range(options.steps + 1):
        copies.append(seconds(lambda: target.copy_(source), device))
        for name, step in contenders.steps.items():
            if name in contenders.slow and round_ > options.slow_steps:
                continue
            times[name].append(seconds(step, device))
        if sys.stderr.isatty():
            print(f"\rround {round_ + 1} of {options.steps + 1}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    warm = {name: found[1:] for name, found in times.items()}  # the first round also fills caches and builds states
    return warm, 2 * source.nbytes / statistics.median(copies[1:])


def extra_memory(step: Callable[[], Any], device: torch.device) -> float | None:
    """Peak bytes that a step holds beyond what lived before. On a CPU, as the resident set shows it (Linux)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        synchronize(device)
        return float(torch.cuda.max_memory_allocated(device) - before)
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    try:
        clear.write_text("5")  # resets the peak
    except OSError:
        return None

    def value(key: str) -> int:
        return int(status.read_text().split(key + ":")[1].split()[0]) * 1024

    before = value("VmRSS")
    step()
    return float(max(0, value("VmHWM") - before))


def main() -> None:
    options = read_options()
    if options.threads:
        torch.set_num_threads(options.threads)
    contenders = Contenders(options)
    for name in ("adamw", "dobb", "muon", "dion"):
        if name not in options.without or name == "adamw":
            try:
                getattr(contenders, f"add_{name}")()
            except DobbError as error:
                raise SystemExit(f"error: {error}") from None
    dispatch.kernels_run.clear()
    times, bandwidth = measure(contenders)
    elements = sum(m * n for m, n in contenders.shapes)
    floor = BYTES_PER_ELEMENT * elements / bandwidth
    adamw = statistics.median(times["AdamW, fused"])
    print(f"{options.model}, {len(contenders.shapes)} matrices, {elements:,} elements, B = {options.blocks}, "
          f"{options.device}, {torch.get_num_threads()} threads")  # fmt: skip
    print(f"copy bandwidth {bandwidth / 1e9:.1f} GB/s; floor of an update {1e3 * floor:.2f} ms")
    print(f"{'':34}{'median ms':>10}{'min ms':>10}{'/ AdamW':>9}{'/ floor':>9}{'extra MB':>10}{'host ms':>9}")
    rows = []
    for name, found in times.items():
        median, memory = statistics.median(found), extra_memory(contenders.steps[name], contenders.device)
        host = host_seconds(contenders.steps[name], contenders.device) if contenders.device.type == "cuda" else median
        rows.append({"name": name, "seconds": found, "median": median, "to_adamw": median / adamw,
                     "to_floor": median / floor, "extra_bytes": memory, "host_seconds": host})  # fmt: skip
        shown = f"{'':10}" if memory is None else f"{memory / 1e6:10.1f}"
        print(f"{name:34}{1e3 * median:10.2f}{1e3 * min(found):10.2f}{median / adamw:9.2f}{median / floor:9.2f}{shown}"
              f"{1e3 * host:9.2f}")  # fmt: skip
    print("segments by kernel:", ", ".join(f"{kernel} {count}" for kernel, count in dispatch.kernels_run.items()))
    if options.json:
        facts = {"options": {k: str(v) for k, v in vars(options).items()}, "elements": elements, "floor": floor,
                 "bandwidth": bandwidth, "kernels": dict(dispatch.kernels_run), "build": vars(build_info()),
                 "machine": platform.processor() or platform.machine(), "threads": torch.get_num_threads(),
                 "results": rows}  # fmt: skip
        options.json.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
