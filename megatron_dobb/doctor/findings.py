"""What the doctor finds, and what it concludes from all of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "warning", "failure"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: what it belongs to, such as `torch`.
        state: `ok`; `note`, nothing to do; `warning`, Dobb works with less; `failure`, it does not work.
        text: what was found.
        remedy: what to do about it; a warning and a failure must have one.

    Raises:
        ValueError: if it is missing.
    """

    check: str
    state: State
    text: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.state in ("warning", "failure") and not self.remedy:
            raise ValueError(f"a {self.state} of the check {self.check} needs a remedy, and {self.text!r} has none")


def verdict(findings: Sequence[Finding]) -> str:
    """One line: `ready: ...`, `works, with: ...` or `not usable: ...`, with what to do for each finding."""
    if not findings:
        return "not usable: nothing was found out (please report it)"
    for state, start in (("failure", "not usable: "), ("warning", "works, with: ")):
        of_state = [f.text + (f" ({f.remedy})" if f.remedy else "") for f in findings if f.state == state]
        if of_state:
            return start + "; ".join(of_state)
    told = ("package", "torch", "megatron-core", "extension", "gpu")
    return "ready: " + "; ".join(f.text for f in findings if f.check in told and f.state == "ok")


def usable(findings: Sequence[Finding]) -> bool:
    """Whether nothing failed. No finding at all is no reason to trust anything."""
    return bool(findings) and all(f.state != "failure" for f in findings)


def first_line(error: BaseException) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
