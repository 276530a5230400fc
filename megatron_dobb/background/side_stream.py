"""Work beside the program: on a thread of its own and, on a GPU, on a stream of its own."""

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
"""How long a program that ends waits for what its workers are doing."""


class Task[T]:
    """Something that a `Worker` was given to do."""

    def __init__(self, call: Callable[[], T], began: Any = None) -> None:
        self.call: Callable[[], T] | None = call
        self.began, self.ended = began, None
        self.future: Future[T] = Future()

    @torch.no_grad()
    def run(self, stream: torch.cuda.Stream | None = None) -> None:
        """Do it, here and now; what it raises is kept for `result`."""
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
        """Wait until it is done. On a GPU, what the caller's stream is given from now on waits for it too."""
        self.future.exception()
        if self.ended is not None:
            torch.cuda.current_stream().wait_event(self.ended)

    def result(self) -> T:
        """Result of the call, after `wait`.

        Raises:
            BaseException: what the call raised.
        """
        self.wait()
        return self.future.result()


class Worker:
    """Does calls one after another, in the order in which they were given, while the program goes on.

    The thread starts with the first call, when a training has forked the workers of its data loaders. A program that
    ends waits for it, but not for long: it may wait for ranks that are gone, so it is a daemon. To leave at once would
    not do. A thread that comes back from C++ to an interpreter that has ended is ended in the middle of it, which
    aborts the process and so replaces its exit status.

    Args:
        device: where the calls compute. On a CUDA device they have a stream of their own, on which each waits for
            what the program's stream had been given before.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._tasks: queue.SimpleQueue[Task[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._tasks.put, None).atexit = False
        _workers.add(self)

    def submit[T](self, call: Callable[[], T], reads: Iterable[Tensor] = ()) -> Task[T]:
        """Have something done.

        Args:
            call: what to do.
            reads: the tensors that it reads and that nobody else keeps until it has.
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
        """Do something on this thread, here and now, but on a GPU on the stream of the calls given to `submit`.

        What the program's stream is given later does not wait for it; what a later call is given does.

        Args:
            call: what to launch. Of what it returns, only later calls may read.
            reads: see `submit`.
        """
        began = self._hand_over(reads)
        if self.stream is None:
            return call()
        self.stream.wait_event(began)
        with torch.cuda.stream(self.stream):
            return call()

    def _hand_over(self, reads: Iterable[Tensor]) -> Any:
        """Let the stream of the calls read tensors of the program's; returns the event that they are written after."""
        if self.stream is None:
            return None
        for tensor in reads:
            tensor.record_stream(self.stream)
        return torch.cuda.current_stream(self.device).record_event()

    def end(self, timeout: float) -> None:
        """Let the thread end after what it was given, and wait for that, at most `timeout` seconds."""
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
        torch.cuda.set_device(stream.device)  # each thread has a current device of its own
        torch.cuda.set_stream(stream)
    while (task := tasks.get()) is not None:
        task.run(stream)
        del task  # with the results, before the next one comes
