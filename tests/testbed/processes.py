"""Run a function on several ranks: processes forked from this one, joined by gloo.

Forking keeps it fast: the parent imports torch and Megatron once, and a run with four ranks starts in a fraction of
a second. The function may be a closure; its result must be picklable.
"""

import contextlib
import ctypes
import faulthandler
import gc
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# The first backward pass of a process decides whether autograd runs threads, one for each device besides the CPU,
# and with them no forked child can call backward(). Once torch.compile has run there seems to be such a device, so
# this pass comes before anybody's. Where there really is a GPU it would do harm.
if not (torch.backends.cuda.is_built() and torch._C._cuda_getDeviceCount()):
    torch.zeros((), requires_grad=True).backward()

_context: Any = get_context("fork")
_SECONDS_TO_EXIT = 5.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class RankError(RuntimeError):
    """A rank raised or died. What it raised is the `__cause__`, where that can be pickled."""


class RankTimeout(RankError):
    """The ranks did not finish in time; the message says where each of them was."""


def run(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Run `fn(*args)` on `world` ranks that share a gloo process group.

    Each rank has one thread and torchrun's variables `RANK`, `LOCAL_RANK`, `WORLD_SIZE` and `LOCAL_WORLD_SIZE`.

    Args:
        world: number of ranks.
        fn: what every rank runs; `torch.distributed` is initialised.
        args: its arguments.
        timeout: seconds that all ranks have together.

    Returns:
        Every rank's result, by rank.

    Raises:
        RankError: if a rank raises or dies; the others are killed.
        RankTimeout: if the time is up; all ranks are killed.
    """
    with tempfile.TemporaryDirectory(prefix="testbed-") as directory:
        job = _Job(world, fn, args, timeout, Path(directory))
        ranks: list[_Rank] = []
        try:
            for rank in range(world):
                ranks.append(_Rank(job, rank, [other.pipe for other in ranks]))
            results = _collect(ranks, timeout)
            for finished in ranks:
                finished.release()
            _wait_until_exited(ranks)
            return results
        finally:
            for started in ranks:
                started.kill()


@dataclass(frozen=True)
class _Job:
    world: int
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    timeout: float
    directory: Path

    def stack_file(self, rank: int) -> Path:
        """Where a rank writes its stack when the parent asks for it."""
        return self.directory / f"stack{rank}"


class _Rank:
    """One rank, as the parent sees it."""

    def __init__(self, job: _Job, rank: int, earlier_pipes: list[Any]) -> None:
        self.job, self.rank = job, rank
        self.pipe, child_pipe = _context.Pipe()
        inherited = [self.pipe, *earlier_pipes]
        self.process = _context.Process(target=_child, args=(job, rank, child_pipe, inherited))
        with warnings.catch_warnings():
            # Python warns of forking a process with threads. The child uses none of them.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        child_pipe.close()

    def result(self) -> Any:
        """The result of a rank that has reported or died."""
        try:
            report = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.join(_SECONDS_TO_EXIT)
            raise RankError(f"{self} died: {_death(self.process.exitcode)}") from None
        if isinstance(report, _Failure):
            raise RankError(f"{self} failed:\n{report.traceback}") from report.exception()
        return report

    def exited(self) -> bool:
        """Whether the child is gone."""
        return bool(connection.wait([self.process.sentinel], 0))

    def stack(self) -> str:
        """Where the child is right now."""
        with contextlib.suppress(OSError):
            os.kill(self.process.pid, signal.SIGUSR1)
            for _ in range(20):
                time.sleep(0.05)
                if text := self.job.stack_file(self.rank).read_text():
                    return text
        return "(no stack)"

    def release(self) -> None:
        """Let the child exit, once no other rank needs it."""
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(b"done")

    def kill(self) -> None:
        """End the child and every process it started, and free what it held."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # in case it had not yet made its own process group
        self.process.join()
        self.process.close()
        self.pipe.close()

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.job.world}"


@dataclass(frozen=True)
class _Failure:
    traceback: str
    pickled: bytes | None

    @classmethod
    def of(cls, error: BaseException) -> "_Failure":
        """What to tell the parent about the exception being handled."""
        try:
            return cls(traceback.format_exc(), pickle.dumps(error))
        except Exception:
            return cls(traceback.format_exc(), None)

    def exception(self) -> BaseException | None:
        """The exception itself, if it survives pickling."""
        with contextlib.suppress(Exception):
            return pickle.loads(self.pickled) if self.pickled else None
        return None


def _collect(ranks: list[_Rank], timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        waiting = {r.pipe: r for r in ranks if r.rank not in results}
        ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            stacks = "\n".join(f"{r}:\n{r.stack()}" for r in waiting.values())
            raise RankTimeout(f"{len(waiting)} of {len(ranks)} ranks did not finish in {timeout:g} s\n{stacks}")
        # A rank that died makes others fail, and they may be the first to tell.
        reported = sorted((waiting[pipe] for pipe in ready), key=lambda r: not r.exited())
        for rank in reported:
            try:
                results[rank.rank] = rank.result()
            except RankError:
                for dead in waiting.values():
                    if dead is not rank and dead.exited():
                        dead.result()
                raise
    return [results[rank] for rank in range(len(ranks))]


def _wait_until_exited(ranks: list[_Rank]) -> None:
    alive = {r.process.sentinel for r in ranks}
    deadline = time.monotonic() + _SECONDS_TO_EXIT
    while alive and time.monotonic() < deadline:
        alive -= set(connection.wait(list(alive), max(0.0, deadline - time.monotonic())))


def _child(job: _Job, rank: int, pipe: Any, inherited: list[Any]) -> None:
    os.setpgid(0, 0)  # so that the parent can kill this rank together with whatever it starts
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for other in inherited:
        other.close()
    try:
        _prepare(job, rank)
        # Plain pickle: multiprocessing's own would pass tensors in shared memory, which ends with this process.
        report = pickle.dumps(job.fn(*job.args))
    except BaseException as error:
        report = pickle.dumps(_Failure.of(error))
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(OSError, EOFError):
        pipe.send_bytes(report)
        # Stay until every rank has reported. Closed connections would make the others fail too, and the first
        # failure that reaches the parent should be the one that started it.
        pipe.recv_bytes()
    os._exit(0)


def _prepare(job: _Job, rank: int) -> None:
    gc.freeze()  # Megatron collects garbage when it saves and loads; what the parent has imported is none
    faulthandler.register(signal.SIGUSR1, file=job.stack_file(rank).open("w"), all_threads=True)
    torch.set_num_threads(1)  # with more, the first parallel loop waits for threads that fork() did not copy
    world = str(job.world)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    # Some machines' host names resolve to no address of theirs, which is where gloo would listen.
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback.pop())
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.directory / 'store'}",
        rank=rank,
        world_size=job.world,
        timeout=timedelta(seconds=job.timeout + 60),  # the parent's comes first
    )


def _death(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"
