"""Finished runs, one JSON line each, so that a comparison that was killed goes on where it stopped."""

import fcntl
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .optimizers import use_dion
from .runs import MissingPart, Run
from .training import train

Record = dict[str, Any]


class Journal:
    """The file of finished runs. Only one process may have it open.

    Attributes:
        records: what is in it, by `Run.key()`.
        unreadable: lines that could not be read, such as one that was cut short when its process was killed.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise MissingPart(
                f"--runs {path}: another comparison is writing to it; wait, or use another file"
            ) from None
        self.records: dict[str, Record] = {}
        self.unreadable = 0
        self._file.seek(0)
        content = self._file.read()
        for line in content.splitlines():
            try:
                entry = json.loads(line)
                self.records[entry["key"]] = entry["record"]
            except (ValueError, KeyError, TypeError):
                self.unreadable += 1
        if content and not content.endswith("\n"):
            self._file.write("\n")  # or the next record would be appended to what was cut short

    def add(self, run: Run, record: Record) -> None:
        """Keep a finished run; it is on disk when this returns."""
        self.records[run.key()] = record
        self._file.write(json.dumps({"key": run.key(), "record": record}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Let others open the file."""
        self._file.close()


@contextmanager
def opened(path: Path) -> Iterator[Journal]:
    """A journal that is closed at the end."""
    journal = Journal(path)
    try:
        yield journal
    finally:
        journal.close()


def finish(
    runs: Sequence[Run], journal: Journal, jobs: int, dion_path: Path | None, report: Callable[[Run, Record], None]
) -> None:
    """Do those of the runs that the journal does not have, `jobs` at a time with one thread each.

    Args:
        runs: what is wanted.
        journal: what is there; gets each run when it is finished.
        jobs: processes. With 1, runs happen in this process.
        dion_path: a checkout of microsoft/dion, for runs that need it.
        report: called with each run that was done.
    """
    due = list({run.key(): run for run in runs if run.key() not in journal.records}.values())
    if jobs == 1:
        _prepare(dion_path)
        for run in due:
            journal.add(run, record := _record(run))
            report(run, record)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, _prepare, (dion_path,)) as pool:
        doing = {pool.submit(_record, run): run for run in due}
        left = set(doing)
        try:
            while left:
                done, left = wait(left, return_when=FIRST_COMPLETED)
                for future in sorted(done, key=lambda f: f.exception() is not None):  # what succeeded is kept first
                    journal.add(doing[future], future.result())
                    report(doing[future], future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _prepare(dion_path: Path | None) -> None:
    torch.set_num_threads(1)
    use_dion(dion_path)


def _record(run: Run) -> Record:
    return train(run)[0]
