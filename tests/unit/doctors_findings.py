"""Runs the doctor's checks in the process of a test."""

from megatron_dobb.doctor import checks


def found(*names):
    return [finding for name in names for finding in checks.run(name)]


def only(findings, state):
    (one,) = [finding for finding in findings if finding.state == state]
    return one
