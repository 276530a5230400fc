#!/usr/bin/env python
"""Registers and spills of the CUDA kernels, as nvcc's assembler reports them.

    python tools/kernel_report.py --architectures 80 90 100 --usual --markdown docs/kernel-report.md

Needs nvcc but no GPU.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

ENTRY = re.compile(
    r"Compiling entry function '(?P<mangled>\w+)'.*?"
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


class Kernel(NamedTuple):
    """A kernel in the assembler's report; `numbers` are its template arguments."""

    name: str
    numbers: tuple[int, ...]
    registers: int
    spill_bytes: int

    @property
    def title(self) -> str:
        arguments = ", ".join(map(str, self.numbers))
        return f"{self.name}<{arguments}>" if arguments else self.name

    @property
    def is_usual(self) -> bool:
        """True if it updates by the signs of a bf16 basis, four columns at a time: what almost every step runs."""
        return self.name == "streamed_update" or (self.name == "fused_update" and self.numbers[2:] == (1, 0, 1))


def parse(output: str) -> list[Kernel]:
    """The kernels in what `nvcc -Xptxas=-v` printed.

    Raises:
        ValueError: if nothing in it is a report.
    """
    kernels = [
        Kernel(*demangle(entry["mangled"]), int(entry["registers"]), int(entry["stores"]) + int(entry["loads"]))
        for entry in ENTRY.finditer(output)
    ]
    if not kernels:
        raise ValueError("no kernel is reported: compile with -Xptxas=-v, and give what nvcc printed to stderr")
    return kernels


def demangle(mangled: str) -> tuple[str, tuple[int, ...]]:
    """The kernel's own name and its template arguments; `c++filt` is not installed everywhere."""
    name, at = "", re.match(r"_ZN?", mangled).end()
    while (part := re.match(r"\d+", mangled[at:])) is not None:
        begin = at + part.end()
        at = begin + int(part[0])
        name = mangled[begin:at]
    # What follows the end of the template arguments describes the function's parameters.
    arguments = mangled[at:].split("EEE")[0] if mangled[at : at + 1] == "I" else ""
    return name, tuple(int(value) for value in re.findall(r"L[ib](\d+)", arguments))


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


def table(kernels_of: Mapping[str, Sequence[Kernel]]) -> list[str]:
    """A row for every kernel, with two columns for each architecture."""
    headings = ["kernel"]
    rows: dict[str, list[str]] = {}
    for architecture, kernels in kernels_of.items():
        headings += [f"sm_{architecture}: registers", "spilled bytes"]
        for kernel in sorted(kernels, key=lambda k: (not k.is_usual, k.name, k.numbers)):
            rows.setdefault(kernel.title, [kernel.title]).extend([str(kernel.registers), str(kernel.spill_bytes)])
    return [f"| {' | '.join(row)} |" for row in (headings, ["---"] * len(headings), *rows.values())]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", nargs="+", default=["90"], metavar="SM", help="such as 80 90 100")
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--usual", action="store_true", help="only the kernels that almost every step runs")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
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
        "# CUDA resource usage",
        "",
        f"Made by `{command}` with nvcc {release.partition('release ')[2].partition(',')[0]}. No GPU was involved.",
        "",
        "`fused_update<steps, terms of M, terms of Q, l2, aligned>` serves widths up to 16 x steps, "
        "`streamed_update<steps, terms of M>` likewise from 257 on. The usual kernels come first: signs of a bf16 "
        "basis with aligned columns.",
        "",
        *table({each: compile_for(each, options.nvcc, options.jobs, sources) for each in options.architectures}),
    ]
    text = "\n".join(lines) + "\n"
    if options.markdown:
        options.markdown.write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
