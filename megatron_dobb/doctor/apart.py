"""Checks in a process of their own, so that a library which ends the interpreter does not end the doctor."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence

from ..autoload import VARIABLE
from . import checks
from .findings import Finding

LIMIT_S = 180.0
"""For all checks together: they take ten seconds, and Megatron's import on a busy file system longer."""


def run(names: Sequence[str], limit_s: float = LIMIT_S) -> Iterator[Finding]:
    """The findings of these checks, as they come. A check that ends its process is a finding, and the others go on."""
    left = list(names)
    while left:
        before, running = len(left), None
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            reading, writing = os.pipe()
            child = subprocess.Popen(
                _command(writing, left),
                # What autoload does is a check of its own; the others look at Megatron as it is.
                env={key: value for key, value in os.environ.items() if key != VARIABLE},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=(writing,),
            )
            os.close(writing)
            late = threading.Event()
            timer = threading.Timer(limit_s, _stop, (child, late))
            timer.start()
            try:
                with os.fdopen(reading) as pipe:
                    for line in pipe:
                        if not line.endswith("\n"):  # the process ended while it wrote
                            break
                        message = json.loads(line)
                        if "begins" in message:
                            running = message["begins"]
                        elif "finds" in message:
                            yield Finding(**message["finds"])
                        else:
                            left.remove(message["ends"])
                            running = None
                child.wait()
            finally:
                timer.cancel()
                child.kill()
                child.wait()
            if not left:
                return
            errors.seek(0)
            yield checks.broken(running or left[0], _reason(child.returncode, late.is_set(), limit_s, errors.read()))
        if running is None and len(left) == before:
            return  # not even a first check began, so no other would
        left.remove(running or left[0])


def _command(descriptor: int, names: Sequence[str]) -> list[str]:
    safe = ["-P"] if sys.flags.safe_path else []
    return [sys.executable, *safe, "-m", f"{__package__}.child", str(descriptor), *names]


def _stop(child: "subprocess.Popen[bytes]", late: threading.Event) -> None:
    late.set()
    child.kill()


def _reason(status: int, late: bool, limit_s: float, errors: str) -> str:
    if late:
        return f"it did not end within {limit_s:g} s"
    lines = errors.strip().splitlines()
    last = f": {lines[-1]}" if lines else ""
    how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    return f"it ended its process with {how}{last}"
