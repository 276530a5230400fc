"""`python -m megatron_dobb doctor`: what works here, what does not, and what to do about it.

It starts no training and needs no launcher. Nothing heavy is imported in the process that the user started: the checks
run in another one, which may break.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence

from . import apart
from .checks import CHECKS
from .findings import Finding, usable, verdict

USAGE = """usage: python -m megatron_dobb doctor [--json]

Looks at versions, the compiled extension, GPUs, compilers and Megatron, tests the optimizer on small
blocks, and ends with a verdict. Exit status: 0 if Dobb can be used, 1 if not, 2 for wrong arguments."""

MARKS = {"ok": "ok  ", "note": "note", "warning": "WARN", "failure": "FAIL"}


def main(arguments: Sequence[str]) -> int:
    """Print the findings and the verdict, and return the exit status."""
    if any(argument in ("-h", "--help") for argument in arguments):
        print(USAGE)
        return 0
    unknown = [argument for argument in arguments if argument != "--json"]
    if unknown:
        print(f"megatron_dobb doctor: unknown argument {unknown[0]!r}\n{USAGE}", file=sys.stderr)
        return 2
    as_json = "--json" in arguments
    findings: list[Finding] = []
    for finding in apart.run(list(CHECKS)):
        findings.append(finding)
        if not as_json:
            print(line(finding), flush=True)
    if as_json:
        print(as_text(findings))
    else:
        print(f"\n{verdict(findings)}")
    return 0 if usable(findings) else 1


def line(finding: Finding) -> str:
    """A finding for people: one line, and one more if there is something to do."""
    text = f"{MARKS[finding.state]}  {finding.check:<18}  {finding.text}"
    return f"{text}\n{'':26}-> {finding.remedy}" if finding.remedy else text


def as_text(findings: Sequence[Finding]) -> str:
    """Everything in JSON."""
    found = [dataclasses.asdict(finding) for finding in findings]
    return json.dumps({"verdict": verdict(findings), "usable": usable(findings), "findings": found}, indent=2)
