"""Work beside the program: its order, what it raises, and that nothing of it stays."""

import contextlib
import gc
import subprocess
import sys
import threading
import time
import weakref
from unittest import mock

import pytest
import torch

from megatron_dobb.background.side_stream import Task, Worker

CPU = torch.device("cpu")


def test_calls_run_one_after_another_in_their_order_on_one_other_thread():
    worker, seen = Worker(CPU), []

    def note(number):
        time.sleep(0.02 if number % 2 == 0 else 0)
        seen.append((number, threading.current_thread()))
        return number

    tasks = [worker.submit(lambda number=number: note(number)) for number in range(6)]
    assert [task.result() for task in reversed(tasks)] == list(reversed(range(6)))
    assert [number for number, _ in seen] == list(range(6))
    threads = {thread for _, thread in seen}
    assert len(threads) == 1
    assert threading.current_thread() not in threads


def test_the_program_goes_on_until_it_asks_for_the_result():
    worker, release = Worker(CPU), threading.Event()
    task = worker.submit(release.wait)
    assert not task.future.done()
    release.set()
    assert task.result() is True


def test_an_error_reaches_who_asks_and_the_next_call_runs():
    worker = Worker(CPU)
    failing = worker.submit(lambda: 1 // 0)
    assert worker.submit(lambda: 7).result() == 7
    with pytest.raises(ZeroDivisionError):
        failing.result()


def run_here(call):
    task = Task(call)
    task.run()
    return task.result()


@pytest.mark.parametrize(
    "run",
    [lambda call: Worker(CPU).submit(call).result(), Worker(CPU).launch, run_here],
    ids=["submit", "launch", "run"],
)
def test_no_gradient_is_recorded(run):
    x = torch.ones(2, requires_grad=True)
    assert not run(lambda: x * 2).requires_grad


def test_what_is_launched_here_is_on_the_stream_of_the_calls_behind_what_the_program_had_launched(monkeypatch):
    cuda, current, seen = mock.Mock(), [], []
    cuda.current_stream.return_value.record_event.side_effect = lambda: seen.append("event of the program")
    cuda.Stream.return_value.wait_event.side_effect = lambda event: seen.append("wait")
    cuda.stream.side_effect = lambda stream: on(stream, current)
    monkeypatch.setattr(torch, "cuda", cuda)
    worker, read = Worker(torch.device("cuda", 0)), mock.Mock()

    def call():
        seen.append(("call", threading.current_thread().name, *current))

    worker.launch(call, [read])
    assert seen == ["event of the program", "wait", ("call", "MainThread", worker.stream)]
    read.record_stream.assert_called_once_with(worker.stream)


@contextlib.contextmanager
def on(stream, current):
    current.append(stream)
    yield
    current.pop()


def test_what_a_call_held_is_released_with_its_task():
    worker = Worker(CPU)
    tensor = torch.ones(3)
    alive = weakref.ref(tensor)
    task = worker.submit(lambda tensor=tensor: float(tensor.sum()))
    del tensor
    assert task.result() == 3
    worker.submit(int).result()  # the thread has let go of the first by now
    gc.collect()
    assert alive() is None


def test_the_thread_ends_with_its_worker():
    before = set(threading.enumerate())
    worker = Worker(CPU)
    assert set(threading.enumerate()) == before, "data loaders would fork a process with two threads"
    worker.submit(int).result()
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon, "a program that ends by an error would wait for it"
    del worker
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()


ENDS = """
import sys, threading, time, torch
from megatron_dobb.background import side_stream

side_stream.SECONDS_TO_END = {seconds}
matrix = torch.randn(400, 400)

def compute():
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        torch.linalg.eigh(matrix)

beside = side_stream.Worker(torch.device("cpu"))
task = beside.submit({call})
time.sleep(0.1)
sys.exit(7)
"""


@pytest.mark.parametrize(
    ("call", "seconds"), [("compute", 60), ("threading.Event().wait", 0.2)], ids=["at work", "waiting for ever"]
)
def test_a_program_that_ends_while_a_call_runs_keeps_its_exit_status(call, seconds):
    script = ENDS.format(call=call, seconds=seconds)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert ended.returncode == 7, ended.stderr
