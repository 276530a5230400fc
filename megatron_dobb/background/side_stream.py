"""Run work in the background: on a separate thread and, on a GPU, on a separate stream."""

import atexit
import queue
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

SECONDS_TO_END = 10.0
"""Seconds that an exiting program waits for its workers' running calls."""


class Task[T]:
    """Call submitted to a `Worker`."""

    def __init__(self, call: Callable[[], T], began: Any = None) -> None:
        self.call: Callable[[], T] | None = call
        self.began, self.ended = began, None
        self.future: Future[T] = Future()

    @torch.no_grad()
    def run(self, stream: torch.cuda.Stream | None = None) -> None:
        """Run the call now, on this thread; keep any exception for `result`."""
        call, self.call = self.call, None
        assert call is not None
        try:
            if stream is not None:
                stream.wait_event(self.began)
            found = call()
            if stream is not None:
                self.ended = stream.record_event()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(found)

    def wait(self) -> None:
        """Wait until the call is done. On a GPU, later work on the caller's stream waits for it too."""
        self.future.exception()
        if self.ended is not None:
            torch.cuda.current_stream().wait_event(self.ended)

    def result(self) -> T:
        """Wait for the call and return its result.

        Raises:
            BaseException: the exception that the call raised.
        """
        self.wait()
        return self.future.result()


class Worker:
    """Background thread that runs calls one after another, in the order submitted.

    The thread starts with the first call, after the data loaders have forked their workers. It is a daemon because it
    may be waiting for ranks that are gone, so an exiting program waits for it only briefly. Exiting at once would not
    work: a thread that returns from C++ to a finalized interpreter is killed mid-call, which aborts the process and
    replaces its exit status.

    Args:
        device: where the calls compute. On a CUDA device they run on a separate stream, and each waits for the work
            enqueued earlier on the program's stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._tasks: queue.SimpleQueue[Task[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._tasks.put, None).atexit = False
        _workers.add(self)

    def submit[T](self, call: Callable[[], T], reads: Iterable[Tensor] = ()) -> Task[T]:
        """Submit a call to the thread.

        Args:
            call: the function to run.
            reads: the tensors that it reads and that nothing else keeps alive until then.
        """
        began = self._hand_over(reads)
        if self._thread is None:
            arguments = (self._tasks, self.stream)
            self._thread = threading.Thread(target=_work, args=arguments, name="dobb-refresh", daemon=True)
            self._thread.start()
        task = Task(call, began)
        self._tasks.put(task)
        return task

    @torch.no_grad()
    def launch[T](self, call: Callable[[], T], reads: Iterable[Tensor] = ()) -> T:
        """Run a call now on this thread; on a GPU, launch its work on the stream that submitted calls use.

        Later work on the program's stream does not wait for it; later calls do.

        Args:
            call: the function to run. Only later calls may read its result.
            reads: as for `submit`.
        """
        began = self._hand_over(reads)
        if self.stream is None:
            return call()
        self.stream.wait_event(began)
        with torch.cuda.stream(self.stream):
            return call()

    def _hand_over(self, reads: Iterable[Tensor]) -> Any:
        """Let the side stream read the program's tensors; return an event recorded after they were written."""
        if self.stream is None:
            return None
        for tensor in reads:
            tensor.record_stream(self.stream)
        return torch.cuda.current_stream(self.device).record_event()

    def end(self, timeout: float) -> None:
        """Let the thread end after its submitted calls, and wait at most `timeout` seconds for that."""
        self._tasks.put(None)
        if self._thread is not None:
            self._thread.join(timeout)


_workers: "weakref.WeakSet[Worker]" = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for worker in list(_workers):
        worker.end(SECONDS_TO_END)


def _work(tasks: "queue.SimpleQueue[Task[Any] | None]", stream: torch.cuda.Stream | None) -> None:
    if stream is not None:
        torch.cuda.set_device(stream.device)  # the current device is per thread
        torch.cuda.set_stream(stream)
    while (task := tasks.get()) is not None:
        task.run(stream)
        del task  # free its results before waiting for the next task
