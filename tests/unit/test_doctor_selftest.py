"""The doctor's self-test passes here, and fails on an update, a refresh or a step that is wrong."""

import types

import pytest
from doctors_findings import found, only

from megatron_dobb.doctor import usable
from megatron_dobb.methods.dobb import kernels, self_test
from megatron_dobb.pytorch.dobb import Dobb


def test_an_update_with_one_wrong_sign_fails_the_self_test(monkeypatch):
    real = kernels.update

    def wrong(segments, gradients, **settings):
        pending = real(segments, gradients, **settings)
        basis = segments[0].basis[0].float()
        segments[0].weight[: self_test.WIDTH] += 2 * self_test.LR * self_test.TAU * basis[:, 5]
        return pending

    assert found("self-test")[0].state == "ok"
    monkeypatch.setattr(kernels, "update", wrong)
    findings = found("self-test")
    assert "a weight is off by" in findings[0].text
    assert not usable(findings)


def test_a_momentum_that_is_off_fails_the_self_test(monkeypatch):
    real = kernels.update
    monkeypatch.setattr(kernels, "update", lambda *given, **settings: real(*given, **(settings | {"momentum": 0.951})))
    assert "its momentum is off by more than rounding" in only(found("self-test"), "failure").text


@pytest.mark.parametrize("returned", ["moment", "basis"])
def test_a_refresh_that_orthonormalises_nothing_or_does_nothing_fails_the_self_test(monkeypatch, returned):
    def wrong(moment, basis, **settings):
        return types.SimpleNamespace(basis={"moment": moment, "basis": basis}[returned])

    assert found("self-test")[1].state == "ok"
    monkeypatch.setattr(kernels, "refresh_basis", wrong)
    assert found("self-test")[1].state == "failure"


def test_a_step_that_does_nothing_fails_the_self_test(monkeypatch):
    assert found("self-test")[-1].state == "ok"
    monkeypatch.setattr(Dobb, "step", lambda self: None)
    assert "does not lower a loss" in only(found("self-test"), "failure").text
