"""A program that ends, or drops its process groups, while a refresh runs beside it."""

import ctypes
import functools
import os
import signal
import sys
import time

import pytest
import torch.distributed as dist
from layout_runs import Layout, Run, start
from test_overlap import CONFIG

from testbed import processes

LAYOUT, STATUS = Layout(2, micro_batch=6), 7


def late(call, *args, **settings):
    time.sleep(0.2)
    return call(*args, **settings)


def leave(refreshes, destroy):
    """In place of the optimizer's call."""
    assert not any(chunk.job.task.future.done() for chunk in refreshes.chunks), "it is in flight"
    if destroy:
        dist.destroy_process_group()
        raise SystemExit(STATUS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(STATUS))
    os.kill(os.getpid(), signal.SIGTERM)


def end_in_flight(launcher, destroy):
    start(LAYOUT)
    run = Run(LAYOUT, CONFIG)
    run.let_launch(launcher)
    for group in run.groups:
        group.renew = functools.partial(late, group.renew)
    run.optimizer.step = functools.partial(leave, run.dobb.refreshes, destroy)
    try:
        run.step(0)
    except SystemExit as ended:
        ctypes.pythonapi.Py_Exit(ended.code)  # as an interpreter ends that no test bed waits for


@pytest.mark.parametrize("destroy", [False, True], ids=["terminated", "groups destroyed"])
@pytest.mark.parametrize("launcher", ["worker", "program"])
def test_a_program_that_ends_while_a_refresh_runs_neither_hangs_nor_loses_its_exit_status(launcher, destroy):
    with pytest.raises(processes.RankError, match=f"died: exit code {STATUS}$"):
        processes.run(2, end_in_flight, launcher, destroy, timeout=60)
