"""The figures against independent statements of them in float64, and the plain optimizer's log of them."""

import math

import pytest
import torch
from test_variants import BLOCKS, KINDS, MU, TAU, optimizer_of
from torch import nn

from megatron_dobb import Dobb
from megatron_dobb.errors import ConfigError
from megatron_dobb.methods.dobb import metrics
from megatron_dobb.methods.dobb.metrics import Sums

NAMES = ("0.weight", "2.weight")
METRICS = {"update_rms", "orthogonality", "update_effective_rank"}
OF_BASES = {"basis_residual", "moment_effective_rank", "refresh_rotation"}


def entropy_rank(values):
    p = values[values > 0] / values.sum()
    return float((-(p * p.log()).sum()).exp())


def stated(norm, side, nesterov, momentum, gradient, moments, bases, old_bases):
    """The figures of one weight in float64; blocks over the output axis are those of the transposed matrix."""
    source = momentum.double()
    source = MU * source + (1 - MU) * gradient.double() if nesterov else source
    source = source.t() if side == "output" else source
    m, n = source.shape
    step = torch.empty_like(source)
    width = n // BLOCKS
    for j in range(BLOCKS):
        basis = bases[j].double() if bases is not None else torch.eye(width, dtype=torch.float64)
        block = slice(j * width, (j + 1) * width)
        coefficients = source[:, block] @ basis
        kept = coefficients.sign() / m**0.5 if norm == "sign" else nn.functional.normalize(coefficients, dim=0)
        step[:, block] = TAU * max(m, n) ** 0.5 * kept @ basis.t()
    values = torch.linalg.svdvals(step)
    found = {
        "update_rms": step.square().mean().sqrt(),
        "orthogonality": values.sum() / (min(m, n) ** 0.5 * values.square().sum().sqrt()),
        "update_effective_rank": entropy_rank(values) / min(m, n),
    }
    if bases is None:
        return found
    whole, basis, old = (torch.block_diag(*blocks.double()) for blocks in (moments, bases, old_bases))
    rotated = basis.t() @ whole @ basis
    found["basis_residual"] = (rotated - torch.diag(rotated.diagonal())).norm() / whole.norm()
    found["moment_effective_rank"] = entropy_rank(torch.linalg.svdvals(whole)) / n
    cosines = (basis * old).sum(0) / basis.norm(dim=0) / old.norm(dim=0)
    found["refresh_rotation"] = cosines.abs().clamp(max=1).arccos().square().mean().sqrt()
    return found


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("norm", "side", "source"), KINDS)
def test_every_variant_logs_the_stated_figures(norm, side, source, nesterov):
    """A refresh before the third and the sixth step; a log after each second one, of the refresh before it."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8, bias=False))
    logs, expected = {}, {}
    optimizer = optimizer_of(
        *(model, norm, side, source),
        nesterov=nesterov,
        diagnostics=logs.__setitem__,
        log_diagnostics_interval=2,
        log_diagnostics_weights=["*"],
    )
    before_refresh = {}
    for step in range(1, 7):
        model(torch.randn(5, 10, 16)).square().mean().backward()
        state = {name: optimizer.state[model.get_parameter(name)] for name in NAMES}
        if step % 3 == 1:
            before_refresh = {name: state[name]["basis"].clone() for name in NAMES}
        optimizer.step()
        if step % 2 == 0:
            expected[step] = {
                name: stated(
                    *(norm, side, nesterov, state[name]["momentum"], model.get_parameter(name).grad),
                    *(
                        (None, None, None)
                        if source == "none"
                        else (state[name]["moment"], state[name]["basis"], before_refresh[name])
                    ),
                )
                for name in NAMES
            }
        optimizer.zero_grad()
    assert list(logs) == [2, 4, 6]
    figures = METRICS if source == "none" else METRICS | OF_BASES
    for step, log in logs.items():
        assert log.pop("dobb/skipped_blocks") == log.pop("dobb/fallback_blocks") == 0
        assert log.keys() == {f"dobb/{m}" for m in figures} | {f"dobb/{m}/{name}" for m in figures for name in NAMES}
        for metric in figures:
            values = [float(expected[step][name][metric]) for name in NAMES]
            assert [log[f"dobb/{metric}/{name}"] for name in NAMES] == pytest.approx(values, rel=1e-5, abs=1e-7)
            assert log[f"dobb/{metric}"] == pytest.approx(sum(values) / 2, rel=1e-5)


def test_the_update_rms_of_table_9_shrinks_with_the_zero_coefficients():
    torch.manual_seed(0)
    model, log = nn.Sequential(nn.Linear(32, 16, bias=False)), {}
    optimizer = Dobb(model, source="gram", blocks=4, diagnostics=lambda _, f: log.update(f), log_diagnostics_interval=1)
    model(torch.randn(64, 32)).square().mean().backward()
    model[0].weight.grad[:4] = 0  # rows of zeros have coefficients of zero
    optimizer.step()
    whole = 0.2 * math.sqrt(32 / 16)
    assert log["dobb/update_rms"] == pytest.approx(whole * math.sqrt(12 / 16), rel=1e-3)  # of bf16 bases


@pytest.mark.parametrize(("percent", "exponent", "orthogonality"), [(80, 0.491, 0.736), (5, 1.307, 0.109)])
def test_orthogonality_and_effective_rank_are_those_of_table_1(percent, exponent, orthogonality):
    """768 x 768 with singular values i^-a and random singular vectors (paper, Table 1(a))."""
    torch.manual_seed(0)
    values = torch.arange(1, 769, dtype=torch.float64) ** -exponent
    left, right = (torch.linalg.qr(torch.randn(768, 768, dtype=torch.float64))[0] for _ in range(2))
    found = metrics.singular_values(left * values @ right)
    assert metrics.orthogonality(found) == pytest.approx(orthogonality, abs=2e-3)
    assert metrics.effective_rank(found) / 768 == pytest.approx(percent / 100, abs=2e-3)
    assert torch.allclose(found, torch.linalg.svdvals(left * values @ right).flip(0), rtol=1e-8)


def test_extremes():
    orthonormal = torch.linalg.qr(torch.randn(20, 8))[0]
    for matrix in (orthonormal, orthonormal.t()):
        values = metrics.singular_values(matrix)
        assert metrics.orthogonality(values) == pytest.approx(1, rel=1e-6)
        assert metrics.effective_rank(values) == pytest.approx(8, rel=1e-6)
    one = metrics.singular_values(torch.ones(9, 4))
    assert metrics.orthogonality(one) == pytest.approx(0.5, rel=1e-6)
    assert metrics.effective_rank(one) == pytest.approx(1, rel=1e-6)
    for hopeless in (torch.zeros(3, 5), torch.full((3, 5), torch.nan), torch.full((5, 3), torch.inf)):
        assert metrics.metrics(metrics.sums_of_spectrum(hopeless)) == {}
    assert metrics.metrics(metrics.sums_of_moment(torch.zeros(2, 4, 4), torch.eye(4).repeat(2, 1, 1))) == {}


def test_a_rotation_is_the_angle_up_to_sign_even_if_tiny():
    for angle in (0.0, 1e-7, 0.3, math.pi / 2):
        c, s = math.cos(angle), math.sin(angle)
        turned = torch.tensor([[c, -s], [s, c]], dtype=torch.float64) * torch.tensor([1.0, -1.0])
        sums = metrics.sums_of_rotation(torch.eye(2)[None], turned[None])
        assert metrics.metrics(sums) == {"refresh_rotation": pytest.approx(angle, rel=1e-9, abs=1e-12)}


def test_parts_add_up_to_the_whole_in_any_order_and_however_often_all_are_added():
    torch.manual_seed(0)
    moment = torch.randn(6, 8, 20)
    moment, bases = moment @ moment.mT * torch.tensor([1, 2, 3, 40, 500, 6e-3])[:, None, None], torch.randn(2, 6, 8, 8)
    basis, turned = torch.linalg.qr(bases)[0]
    parts = []
    for k in range(6):
        part = metrics.sums_of_moment(moment[k : k + 1], basis[k : k + 1])
        part.add(metrics.sums_of_rotation(basis[k : k + 1], turned[k : k + 1]))
        parts.append({"w": part})
    parts.append({"w": Sums(orthogonality=0.5, update_rank=0.25)})
    whole = metrics.sums_of_moment(moment, basis)
    whole.add(metrics.sums_of_rotation(basis, turned))
    expected = metrics.metrics(whole) | {"orthogonality": 0.5, "update_effective_rank": 0.25}
    assert metrics.metrics(metrics.merge(parts)["w"]) == pytest.approx(expected, rel=1e-12)
    assert metrics.metrics(metrics.merge(parts[::-1] * 3)["w"]) == pytest.approx(expected, rel=1e-12)


def test_every_weight_has_its_turn():
    names = ["a", "b", "c", "d", "e"]
    assert [metrics.in_turn(names, log, 2) for log in range(3)] == [["a", "b"], ["c", "d"], ["e", "a"]]
    assert metrics.in_turn(["a"], 7, 2) == ["a"]
    assert metrics.in_turn([], 7, 2) == []


def train(steps=7, **settings):
    torch.manual_seed(1)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(5)])
    optimizer = Dobb(model, blocks=4, refresh_interval=3, **settings)
    for _ in range(steps):
        model(torch.randn(20, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def test_logging_does_not_change_the_training_by_a_bit():
    logs = {}
    logged, plain = train(diagnostics=logs.__setitem__, log_diagnostics_interval=2), train()
    for name, weight in plain.on_dobb.items():
        parameter = logged.on_dobb[name].parameter
        assert torch.equal(parameter, weight.parameter)
        for key in ("momentum", "moment", "basis"):
            assert torch.equal(logged.state[parameter][key], plain.state[weight.parameter][key]), (name, key)
    assert list(logs) == [2, 4, 6]


def test_without_patterns_all_weights_are_logged_and_two_spectra_at_a_time():
    logs = {}
    train(diagnostics=logs.__setitem__, log_diagnostics_interval=2)
    looked_at = [[name for name in log if name.startswith("dobb/orthogonality/")] for log in logs.values()]
    assert [len(names) for names in looked_at] == [2, 2, 2]
    assert len({name for names in looked_at for name in names}) == 5
    assert all(list(log)[:6] == [f"dobb/{metric}" for metric in metrics.METRICS] for log in logs.values())
    for log in logs.values():
        assert sum(name.startswith("dobb/update_rms/") for name in log) == 5
    only = {}
    train(diagnostics=only.__setitem__, log_diagnostics_interval=2, log_diagnostics_weights=["3", "0.weight"])
    for log in only.values():
        assert {name.split("/")[2] for name in log if name.count("/") == 2} == {"0.weight", "3.weight"}
        assert "dobb/orthogonality/0.weight" in log


def test_nothing_is_computed_on_other_steps(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("diagnostics were computed")

    for name in ("sums_of_step", "sums_of_moment", "sums_of_rotation", "sums_of_spectrum", "update_direction"):
        monkeypatch.setattr(metrics, name, fail)
    train()
    # The log after step 9 looks at the refresh before step 7, and at no other; that after step 10 at its own.
    train(steps=9, diagnostics=print, log_diagnostics_interval=10)
    train(steps=6, diagnostics=print, log_diagnostics_interval=9)
    with pytest.raises(AssertionError, match="computed"):
        train(steps=7, diagnostics=print, log_diagnostics_interval=9)


def test_a_function_and_an_interval_are_given_together():
    with pytest.raises(
        ConfigError, match="diagnostics requires log_diagnostics_interval; add log_diagnostics_interval=100"
    ):
        train(diagnostics=print)
    with pytest.raises(ConfigError, match=r"log_diagnostics_interval=5 requires diagnostics, .*=print"):
        train(log_diagnostics_interval=5)
    with pytest.raises(ConfigError, match=r"log_diagnostics_weights='output' matches no weight"):
        train(diagnostics=print, log_diagnostics_interval=5, log_diagnostics_weights="output")
