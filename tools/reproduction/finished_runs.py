"""Finished runs, a JSON file each, so that a comparison that was killed goes on where it stopped."""

import contextlib
import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from .optimizers import use_dion
from .runs import Run
from .training import train

Record = dict[str, Any]


class FinishedRuns:
    """A folder of finished runs. Several comparisons may use it at a time.

    Attributes:
        folder: where they are.
        records: what was there when it was opened, and what was added, by `Run.key()`.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.records: dict[str, Record] = {}
        for file in folder.glob("*.json"):
            with contextlib.suppress(ValueError, KeyError, TypeError):  # of a damaged one; that run is done again
                entry = json.loads(file.read_text())
                self.records[entry["key"]] = entry["record"]

    def add(self, run: Run, record: Record) -> None:
        """Keep a finished run; what is cut short by a kill is left under another name."""
        name = hashlib.sha256(run.key().encode()).hexdigest()[:16]
        unfinished = self.folder / f"{name}.{os.getpid()}"
        unfinished.write_text(json.dumps({"key": run.key(), "record": record}))
        unfinished.replace(self.folder / f"{name}.json")
        self.records[run.key()] = record


def finish(
    runs: Sequence[Run],
    finished: FinishedRuns,
    jobs: int,
    dion_path: Path | None,
    report: Callable[[Run, Record], None],
) -> None:
    """Do those of the runs that are not finished, `jobs` at a time with one thread each.

    Args:
        runs: what is wanted.
        finished: what is there; gets each run when it is done.
        jobs: processes. With 1, runs happen in this process.
        dion_path: a checkout of microsoft/dion, for runs that need it.
        report: called with each run that was done.
    """
    due = list({run.key(): run for run in runs if run.key() not in finished.records}.values())
    if jobs == 1:
        _prepare(dion_path)
        for run in due:
            finished.add(run, record := _record(run))
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
                    finished.add(doing[future], future.result())
                    report(doing[future], future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _prepare(dion_path: Path | None) -> None:
    torch.set_num_threads(1)
    use_dion(dion_path)


def _record(run: Run) -> Record:
    return train(run)[0]
