"""CUDA kernels on the CPU: builds the harness from the .cu files of csrc and the emulation, and calls it with tensors.

An operation is a C++ function of named buffers and numbers (`harness.h`) and a Python function that calls `run`. To
add one, write both; the build takes every .cpp file of this folder and every .cu file of csrc.
"""

import contextlib
import hashlib
import os
import platform
import re
import shutil
import signal
import struct
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILT = ROOT / "build" / "emulation"
"""Compiled programs, one folder for each state of what they are made of; git ignores it."""
FLAGS = ["-std=c++20", "-O1", "-g1", "-fno-omit-frame-pointer"]
INCLUDE = ["-I", str(HERE / "include"), "-I", str(HERE / "runtime"), "-I", str(ROOT / "csrc")]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
SOURCES = (".cpp", ".cu", ".cuh", ".h")
REPORTS_ACCESSES = ["-fsanitize=thread"]  # to runtime/races.cpp: the sanitizer's own library is not linked
SANITIZER_OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0", "UBSAN_OPTIONS": "print_stacktrace=1"}


class EmulationError(Exception):
    """A defect of a kernel that the emulation or a sanitizer found."""


@dataclass(frozen=True)
class Schedule:
    """An order in which threads run; numbered as `Order` in dobb_simt.h."""

    order: int
    seed: int = 0


FORWARD, BACKWARD, ROTATING = Schedule(0), Schedule(1), Schedule(2)
SCHEDULES = (FORWARD, BACKWARD, ROTATING, Schedule(3, 1), Schedule(3, 2))


@dataclass(frozen=True)
class Device:
    """What a kernel's launcher is told of the GPU."""

    multiprocessors: int = 3
    resident_blocks: int = 2
    most_shared_memory: int = 227 * 1024


@dataclass
class Misaligned:
    """A tensor that the kernel finds `bytes` after a multiple of 16."""

    tensor: Tensor
    bytes: int


Argument = Tensor | Misaligned | Sequence[Tensor | Misaligned]


def find_compiler() -> str | None:
    """The C++ compiler, as the build of the extension finds it."""
    return os.environ.get("CXX") or next((name for name in ("g++", "clang++", "c++") if shutil.which(name)), None)


@dataclass(frozen=True)
class Programs:
    """The harness, compiled twice.

    Attributes:
        checked: runs the schedules.
        sanitized: whether the compiler has sanitizers of addresses and undefined behaviour for it.
        watched: reports every access of the kernels to the search for races; `None` if the compiler cannot do it.
    """

    checked: Path
    sanitized: bool
    watched: Path | None


def built(place: Path = BUILT) -> Programs:
    """Compile the harness, unless an earlier run has compiled just this.

    Raises:
        RuntimeError: with the compiler's messages.
    """
    folder = place / _digest()
    if not folder.exists():
        place.mkdir(parents=True, exist_ok=True)
        earlier = [other for other in place.iterdir() if "." not in other.name]
        with tempfile.TemporaryDirectory(prefix="new.", dir=place) as under_way:
            programs = build(Path(under_way))
            finished = Path(under_way) / folder.name
            finished.mkdir()
            for program in filter(None, (programs.checked, programs.watched)):
                program.rename(finished / program.name)
            (finished / "sanitized").write_text(str(programs.sanitized))
            # Under its name there is never half a build; of two at the same time the first stays.
            with contextlib.suppress(OSError):
                finished.rename(folder)
        for other in earlier:
            shutil.rmtree(other, ignore_errors=True)
    watched = folder / "watched"
    sanitized = (folder / "sanitized").read_text() == str(True)
    return Programs(folder / "checked", sanitized, watched if watched.exists() else None)


def _digest() -> str:
    """A name for the state of the sources, the flags, the compiler and the machine."""
    compiler = (find_compiler() or "").split()
    digest = hashlib.sha256(subprocess.run([*compiler, "-v"], capture_output=True, check=False).stderr)
    digest.update(f"{compiler} {FLAGS} {platform.machine()}".encode())
    sources = [file for folder in (HERE, ROOT / "csrc" / "cuda") for file in folder.rglob("*") if file.is_file()]
    for file in sorted(file for file in sources if file == Path(__file__) or file.suffix in SOURCES):
        digest.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def build(folder: Path) -> Programs:
    """Compile the harness into a folder.

    Raises:
        RuntimeError: with the compiler's messages.
    """
    compiler = (find_compiler() or "").split()
    sanitizers = SANITIZERS if _links(compiler, SANITIZERS, folder) else []
    reports = _links(compiler, REPORTS_ACCESSES, folder)
    if not sanitizers or not reports:
        warnings.warn(f"{compiler[0]} has no {' or '.join(SANITIZERS[:1] + REPORTS_ACCESSES)}", stacklevel=2)
    runtime = sorted((HERE / "runtime").glob("*.cpp"))
    kernels = sorted(HERE.glob("*.cpp")) + sorted((ROOT / "csrc").glob("**/*.cu"))
    work = [(source, folder / f"{source.name}.checked.o", sanitizers) for source in runtime + kernels]
    if reports:
        work += [(source, folder / f"{source.name}.watched.o", []) for source in runtime]
        work += [(source, folder / f"{source.name}.watched.o", REPORTS_ACCESSES) for source in kernels]

    def compile_one(source: Path, target: Path, flags: Sequence[str]) -> None:
        _run([*compiler, *FLAGS, *flags, *INCLUDE, "-x", "c++", "-c", str(source), "-o", str(target)])

    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        list(pool.map(compile_one, *zip(*work, strict=True)))

    def link(kind: str, flags: Sequence[str]) -> Path:
        program = folder / kind
        objects = [str(target) for _, target, _ in work if target.suffixes[-2] == f".{kind}"]
        _run([*compiler, *flags, *objects, "-o", str(program), "-ldl"])
        return program

    return Programs(link("checked", sanitizers), bool(sanitizers), link("watched", []) if reports else None)


class Process:
    """A program of the harness that runs and answers calls. One that a call ended is started anew by the next."""

    def __init__(self, program: Path, errors: Path, most_seconds: float):
        self._program = program
        self._errors = errors
        self._most_seconds = most_seconds
        self._process: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait(timeout=60)
            self._process.stdout.close()
            self._process = None

    def call(self, operation: str, call: bytes, sizes: Mapping[str, int]) -> dict[str, bytes]:
        """Send a call and return its buffers, whose sizes are given.

        Raises:
            EmulationError: see `Harness.run`.
        """
        process = self._start()
        late = threading.Timer(self._most_seconds, process.kill)
        late.start()
        try:
            process.stdin.write(call)
            process.stdin.flush()
            message = self._read(struct.unpack("=q", self._read(8))[0]).decode()
            if message:
                raise EmulationError(self._with_line(message))
            return {name: self._read(sizes[name]) for name in sorted(sizes)}
        except (BrokenPipeError, EOFError):
            code = process.wait(timeout=60)
            process.stdout.close()
            self._process = None
            if code == -signal.SIGKILL:
                raise EmulationError(f"{operation} did not end within {self._most_seconds:g} s") from None
            report = self._errors.read_text(errors="replace")
            raise EmulationError(f"the harness ended with code {code}:\n{report[:6000]}") from None
        finally:
            late.cancel()

    def _start(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            with self._errors.open("wb") as errors:
                self._process = subprocess.Popen(
                    [str(self._program)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env={**os.environ, **SANITIZER_OPTIONS},
                )
        return self._process

    def _read(self, size: int) -> bytes:
        found = self._process.stdout.read(size)
        if len(found) < size:
            raise EOFError
        return found

    def _with_line(self, message: str) -> str:
        """The message with the source line of the code that it points to, if binutils are there."""
        found = re.search(r"code at \+(0x[0-9a-f]+)", message)
        if found is None or shutil.which("addr2line") is None:
            return message
        command = ["addr2line", "-e", str(self._program), found[1]]
        line = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        return message.replace(found[0], f"code at {Path(line.split(' ')[0]).name}") if line else message


class Harness:
    """Runs operations in both programs of the harness."""

    def __init__(self, programs: Programs, folder: Path, most_seconds: float = 120):
        self.programs = programs
        self._checked = Process(programs.checked, folder / "checked.txt", most_seconds)
        self._watched = None
        if programs.watched is not None:
            self._watched = Process(programs.watched, folder / "watched.txt", most_seconds)

    def close(self) -> None:
        for process in (self._checked, self._watched):
            if process is not None:
                process.close()

    def run(
        self,
        operation: str,
        buffers: Mapping[str, Argument] | None = None,
        integers: Mapping[str, int | Sequence[int]] | None = None,
        numbers: Mapping[str, float | Sequence[float]] | None = None,
        *,
        changed: Sequence[str] = (),
        device: Device | None = None,
        schedules: Sequence[Schedule] = SCHEDULES,
        search_races: bool = True,
    ) -> None:
        """Run an operation under several schedules, and once more in search of races. Change the tensors of `changed`.

        Args:
            operation: its name in C++.
            buffers: tensors, or lists of tensors that C++ finds as `name[0]`, `name[1]`, ...; contiguous, but for
                those with strides, whose whole storage from their first entry on is sent.
            integers: numbers or lists of them.
            numbers: the same for floating point numbers.
            changed: names of buffers that the operation writes; contiguous tensors.
            device: what the launcher is told.
            schedules: every one must give the same bits.
            search_races: look for accesses that nothing orders, too.

        Raises:
            EmulationError: with the report of the emulation or of a sanitizer; if the schedules' results differ; or if
                the call takes longer than `most_seconds`.
        """
        named = _flatten(buffers or {})
        wanted = [name for name in named if name.partition("[")[0] in changed]
        settings = device or Device()
        sizes = {name: len(_bytes(m.tensor)) for name, m in named.items()}

        def call(schedule: Schedule, watch_races: bool) -> bytes:
            all_integers = {
                **(integers or {}),
                "device.order": schedule.order,
                "device.seed": schedule.seed,
                "device.watch_races": watch_races,
                "device.multiprocessors": settings.multiprocessors,
                "device.resident_blocks": settings.resident_blocks,
                "device.most_shared_memory": settings.most_shared_memory,
            }
            sent = [_string(name) + struct.pack("=q", m.bytes) + _sized(m.tensor) for name, m in named.items()]
            lists = [_string(operation), _lists(all_integers, "q"), _lists(numbers or {}, "d")]
            return b"".join([*lists, struct.pack("=q", len(named)), *sent])

        first: dict[str, bytes] = {}
        for schedule in schedules:
            found = self._checked.call(operation, call(schedule, False), sizes)
            for name in wanted:
                if found[name] != first.setdefault(name, found[name]):
                    raise EmulationError(
                        f"a race: {operation} leaves different bits in {name} under {schedules[0]} and {schedule}; "
                        f"{_first_difference(first[name], found[name])}"
                    )
        if search_races and self._watched is not None:
            self._watched.call(operation, call(FORWARD, True), sizes)
        for name in wanted:
            tensor = named[name].tensor
            if tensor.numel():
                tensor.copy_(torch.frombuffer(bytearray(first[name]), dtype=tensor.dtype).view_as(tensor))


def _flatten(buffers: Mapping[str, Argument]) -> dict[str, Misaligned]:
    named: dict[str, Misaligned] = {}
    for name, value in buffers.items():
        entries = [(name, value)]
        if not isinstance(value, Tensor | Misaligned):
            entries = [(f"{name}[{i}]", entry) for i, entry in enumerate(value)]
        for key, entry in entries:
            named[key] = entry if isinstance(entry, Misaligned) else Misaligned(entry, 0)
    return named


def _bytes(tensor: Tensor) -> bytes:
    """From the tensor's first entry to its last one, with what its strides skip."""
    if tensor.numel() == 0:
        return b""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach().as_strided((span,), (1,)).view(torch.uint8).numpy().tobytes()


def _sized(tensor: Tensor) -> bytes:
    data = _bytes(tensor)
    return struct.pack("=q", len(data)) + data


def _string(text: str) -> bytes:
    return struct.pack("=q", len(text)) + text.encode()


def _lists(values: Mapping[str, float | Sequence[float]], kind: str) -> bytes:
    parts = [struct.pack("=q", len(values))]
    for name, value in values.items():
        entries = [value] if isinstance(value, int | float) else list(value)
        parts += [_string(name), struct.pack("=q", len(entries)), struct.pack(f"={len(entries)}{kind}", *entries)]
    return b"".join(parts)


def _first_difference(a: bytes, b: bytes) -> str:
    differing = [i for i in range(len(a)) if a[i] != b[i]]
    return f"{len(differing)} of {len(a)} bytes differ, the first at byte {differing[0]}"


def _links(compiler: Sequence[str], flags: Sequence[str], folder: Path) -> bool:
    probe = folder / "probe.cc"
    probe.write_text("int main() { return 0; }\n")
    command = [*compiler, *flags, str(probe), "-o", str(folder / "probe")]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _run(command: Sequence[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with code {result.returncode}:\n{result.stderr[-6000:]}")
