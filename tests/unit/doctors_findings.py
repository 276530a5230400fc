"""Runs the doctor's checks in the process of a test."""

from megatron_dobb import doctor


def found(*names):
    return [finding for name in names for finding in doctor.findings_of(name)]


def only(findings, state):
    (one,) = [finding for finding in findings if finding.state == state]
    return one
