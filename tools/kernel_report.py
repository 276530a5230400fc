#!/usr/bin/env python
"""What the assembler says of the CUDA kernels: registers, shared memory and spills, and what follows for their speed.

    python tools/kernel_report.py --architectures 80 90 100 --markdown docs/kernel-report.md

Needs nvcc but no GPU. Registers, spills and static shared memory are the assembler's; occupancy follows from them and
from the kernels' own choice of threads; the share of the copy bandwidth is an estimate for an H200, between a kernel
whose stages do not overlap at all and one whose stages overlap fully. Nothing in this report was measured on a GPU.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
REGISTERS = 65536  # of one multiprocessor, on all three architectures
SHARED_KB = {"80": 164, "90": 228, "100": 228}  # of one multiprocessor
MOST_WARPS = 64
RESERVED_BYTES = 1024  # of shared memory, that a block takes besides
ENTRY_BYTES, FRAGMENT, PADDING = 128, 16, 8  # as in csrc/dobb/cuda/kernels/update_fragments.cuh
STAGE_BYTES, MOST_STAGES = 2048, 4  # of a warp's ring, as in update_fused.cuh

# An H200: copy bandwidth and multiprocessors as measured; clock and tensor rate of the data sheet, of which the
# products used here reach about 0.62 on that generation; time that a load takes when memory is busy.
COPY_BYTES_PER_NS, MULTIPROCESSORS, GHZ = 4300.0, 132, 1.755
PRODUCTS_PER_CLOCK, SHARED_BYTES_PER_CLOCK, LATENCY_NS = 0.62 * 2048, 128, 750


@dataclass(frozen=True)
class Kernel:
    """One kernel as the assembler reports it. `numbers` are the template arguments."""

    name: str
    numbers: tuple[int, ...]
    registers: int
    spill_bytes: int
    static_shared_bytes: int

    @property
    def title(self) -> str:
        arguments = ", ".join(str(n) for n in self.numbers)
        return f"{self.name}<{arguments}>" if arguments else self.name


@dataclass(frozen=True)
class Shape:
    """What the source says of a one-pass kernel: see Variant in update_fused.cuh, Streamed in update_streamed.cuh."""

    width: int
    threads: int
    shared_bytes: int  # without the rings
    ring_bytes: int  # for each warp and stage
    wanted_blocks: int  # that the source wants on one multiprocessor
    momentum_terms: int
    loads_in_flight: int  # bytes of G and M for each warp, and for each stage of its ring if it has one
    basis_reads: int  # times that shared memory is read for each 16 rows, in bytes


def parse(output: str) -> list[Kernel]:
    """The kernels in what `nvcc -Xptxas=-v` printed.

    Raises:
        ValueError: if nothing in it is a report.
    """
    kernels = []
    for part in output.split("Compiling entry function '")[1:]:
        mangled = part.split("'")[0]
        found = re.search(r"Used (\d+) registers", part)
        stores, loads = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part).groups()
        shared = re.search(r"(\d+) bytes smem", part)
        kernels.append(
            Kernel(
                *_readable(mangled),
                registers=int(found[1]),
                spill_bytes=int(stores) + int(loads),
                static_shared_bytes=int(shared[1]) if shared else 0,
            )
        )
    if not kernels:
        raise ValueError("no kernel is reported: compile with -Xptxas=-v, and give what nvcc printed to stderr")
    return kernels


def is_usual(kernel: Kernel) -> bool:
    """Whether it updates by the signs of a bf16 basis, four columns at a time: what almost every step runs."""
    if kernel.name == "fused_update":
        return kernel.numbers[2:] == (1, 0, 1)
    return kernel.name == "streamed_update"


def shape_of(kernel: Kernel) -> Shape | None:
    steps = kernel.numbers[0] if kernel.numbers else 0
    pitch, width = steps * FRAGMENT + PADDING, steps * FRAGMENT
    if kernel.name == "fused_update":
        terms, basis_terms, unit_columns, aligned = kernel.numbers[1:]
        usual = basis_terms == 1 and not unit_columns and aligned
        wanted = 1 if not usual else 4 if steps <= 4 else 3 if steps <= 8 else 2 if steps <= 12 else 1
        return Shape(
            width=width,
            threads=128 if steps <= 8 else 192 if steps <= 12 else 256,
            shared_bytes=ENTRY_BYTES + width * pitch * basis_terms * 2,
            ring_bytes=STAGE_BYTES if aligned else 0,
            wanted_blocks=wanted,
            momentum_terms=terms,
            loads_in_flight=STAGE_BYTES,
            basis_reads=2 * basis_terms * width * width * 2,
        )
    if kernel.name == "streamed_update":
        return Shape(
            width=width,
            threads=256,
            shared_bytes=ENTRY_BYTES + (2 * 64 * pitch + 2 * FRAGMENT * pitch) * 2,
            ring_bytes=0,
            wanted_blocks=1,
            momentum_terms=kernel.numbers[1],
            loads_in_flight=4 * 32 * 32,
            basis_reads=2 * width * width * 2,
        )
    return None


def stages_of(shape: Shape, architecture: str) -> int:
    """Stages of each ring, as stages_of in update_fused.cuh finds them; 0 without rings."""
    if not shape.ring_bytes:
        return 0
    mine = SHARED_KB[architecture] * 1024 // shape.wanted_blocks - RESERVED_BYTES
    warps, stages = shape.threads // 32, MOST_STAGES
    while stages > 1 and (
        stages * FRAGMENT > shape.width or shape.shared_bytes + warps * stages * shape.ring_bytes > mine
    ):
        stages //= 2
    return stages


def shared_bytes(shape: Shape, architecture: str) -> int:
    """Dynamic shared memory of one block of threads."""
    return shape.shared_bytes + shape.threads // 32 * stages_of(shape, architecture) * shape.ring_bytes


def resident_blocks(kernel: Kernel, shape: Shape, architecture: str) -> int:
    """Blocks of threads on one multiprocessor, by registers (handed out to warps by 256) and shared memory."""
    warps = shape.threads // 32
    by_registers = REGISTERS // (-(-kernel.registers * 32 // 256) * 256) // warps
    needed = shared_bytes(shape, architecture) + kernel.static_shared_bytes + RESERVED_BYTES
    by_shared = SHARED_KB[architecture] * 1024 // needed
    return min(by_registers, by_shared, MOST_WARPS // warps)


def bandwidth_share(shape: Shape, blocks: int) -> tuple[float, float]:
    """Estimated share of an H200's copy bandwidth: without overlap of the stages, and with full overlap."""
    memory = 16 * shape.width * 20 / (COPY_BYTES_PER_NS / MULTIPROCESSORS)
    in_flight = blocks * shape.threads // 32 * max(1, stages_of(shape, "90")) * shape.loads_in_flight
    memory_alone = memory / min(1.0, in_flight / (LATENCY_NS * COPY_BYTES_PER_NS / MULTIPROCESSORS))
    products = 16 * shape.width**2 * (shape.momentum_terms + 1) / PRODUCTS_PER_CLOCK / GHZ
    shared = shape.basis_reads / SHARED_BYTES_PER_CLOCK / GHZ
    return memory / (memory_alone + products + shared), memory / max(memory_alone, products, shared)


def compile_for(architecture: str, nvcc: str, jobs: int, sources: Sequence[Path]) -> list[Kernel]:
    """Assemble the .cu files and read the report."""
    with TemporaryDirectory() as folder:

        def report(source: Path) -> str:
            command = [
                nvcc, "-std=c++20", "-O3", "-Xptxas=-v", "-cubin", f"-arch=sm_{architecture}",
                "-I", str(ROOT / "csrc"), "-I", str(ROOT / "csrc" / "common" / "cuda" / "ptx"),
                str(source), "-o", f"{folder}/{source.stem}.cubin",
            ]  # fmt: skip
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode:
                raise SystemExit(f"{' '.join(command)} failed:\n{result.stderr[-3000:]}")
            return result.stderr

        with ThreadPoolExecutor(jobs) as pool:
            return parse("".join(pool.map(report, sources)))


def table(kernels: Iterable[Kernel], architecture: str) -> list[str]:
    lines = [
        f"## sm_{architecture}",
        "",
        "| kernel | registers | spilled bytes | shared KB | blocks x warps | occupancy | share of copy bandwidth |",
        "|---|---|---|---|---|---|---|",
    ]
    for kernel in sorted(kernels, key=lambda k: (not is_usual(k), k.name, k.numbers)):
        shape, row = shape_of(kernel), [kernel.title, str(kernel.registers), str(kernel.spill_bytes)]
        if shape is None:
            row += [f"{kernel.static_shared_bytes / 1024:.1f}", "", "", ""]
        else:
            blocks = resident_blocks(kernel, shape, architecture)
            warps = shape.threads // 32
            row += [
                f"{shared_bytes(shape, architecture) / 1024:.1f}",
                f"{blocks} x {warps}" if blocks else "does not fit",
            ]
            row.append(f"{100 * blocks * warps / MOST_WARPS:.0f} %" if blocks else "")
            low, high = bandwidth_share(shape, blocks) if blocks else (0, 0)
            row.append(f"{100 * low:.0f} to {100 * high:.0f} %" if blocks and architecture == "90" else "")
        lines.append("| " + " | ".join(row) + " |")
    return [*lines, ""]


def _readable(mangled: str) -> tuple[str, tuple[int, ...]]:
    """The kernel's own name and its template arguments, from the mangled name."""
    name, at = "", re.match(r"_ZN?", mangled).end()
    while (part := re.match(r"\d+", mangled[at:])) is not None:
        begin = at + part.end()
        at = begin + int(part[0])
        name = mangled[begin:at]
    # Of a function's own parameters only what stands before the end of the template arguments counts.
    arguments = mangled[at:].split("EEE")[0] if mangled[at : at + 1] == "I" else ""
    return name, tuple(int(value) for value in re.findall(r"L[ib](\d+)", arguments))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", nargs="+", default=["90"], choices=tuple(SHARED_KB))
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--usual", action="store_true", help="only the kernels that almost every step runs")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    options = parser.parse_args(words)
    if shutil.which(options.nvcc) is None:
        parser.error(f"--nvcc {options.nvcc}: no such command; install the CUDA toolkit, or give the path of its nvcc")
    sources = sorted((ROOT / "csrc").glob("**/*.cu"))
    if options.usual:
        sources = [path for path in sources if "_signs_bf16_" in path.name]
    release = subprocess.run([options.nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    command = f"python tools/kernel_report.py --architectures {' '.join(options.architectures)}"
    command += f"{' --usual' if options.usual else ''} --markdown FILE"
    lines = [
        "# What the assembler says of the CUDA kernels",
        "",
        f"Made by `{command}` with nvcc {release.partition('release ')[2].partition(',')[0]}. "
        "No GPU was involved: the last column is an estimate for an H200, from a kernel whose stages do not overlap "
        "to one whose stages overlap fully.",
        "",
        "`fused_update<steps, terms of M, terms of Q, l2, aligned>` serves widths up to 16 x steps, "
        "`streamed_update<steps, terms of M>` likewise from 257 on. The first rows, the usual ones, are signs of a "
        "bf16 basis with aligned columns.",
        "",
    ]
    for architecture in options.architectures:
        lines += table(compile_for(architecture, options.nvcc, options.jobs, sources), architecture)
    text = "\n".join(lines)
    if options.markdown:
        options.markdown.write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
