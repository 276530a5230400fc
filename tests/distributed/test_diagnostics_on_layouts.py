"""What Megatron's last rank logs of a model in shards is what an independent statement says of the whole model.

The statement is made in float64 from the state that the ranks hold together; one process must log the same. Logging
must change neither a bit of the training nor, on other steps, a call of torch.distributed.
"""

import functools
import itertools

import pytest
import torch
from global_form import join_shards, merge
from layout_runs import EXPERTS, SEQUENCES, Layout, Run, global_batch, start
from torch.nn.functional import normalize

from megatron_dobb import DobbConfig
from megatron_dobb.megatron.dobb.metrics import SINK_ATTRIBUTE
from testbed import gpt, processes, tiers, traffic

STEPS, INTERVAL, MU, TAU = 3, 2, 0.95, 0.2
SIGN, L2 = ("sign", "input", "activation"), ("l2", "output", "gram")
ONE, ONE_WITH_EXPERTS = Layout(micro_batch=SEQUENCES), Layout(micro_batch=SEQUENCES, experts=True)
BOTH = Layout(4, tensor=2, sequence_parallel=True, micro_batch=6)
CASES = {
    "one process": (ONE, SIGN),
    "DP 2 x TP 2 + SP": (BOTH, SIGN),
    "two instances": (Layout(4, micro_batch=6, instances=2), SIGN),
    "PP 2": (Layout(2, pipeline=2, micro_batch=6), SIGN),
    "l2 of the outputs, one process": (ONE, L2),
    "l2 of the outputs, DP 2 x TP 2 + SP": (BOTH, L2),
    "experts, one process": (ONE_WITH_EXPERTS, SIGN),
    "experts apart": (Layout(2, micro_batch=6, experts=True, expert=2), SIGN),
}
QUICK = ["one process", "DP 2 x TP 2 + SP", "PP 2", "l2 of the outputs, one process", "experts apart"]
every_case = pytest.mark.parametrize("case", tiers.quick(CASES, QUICK))


def config_of(norm, side, source, interval):
    captured = {"capture": "all"} if source == "activation" else {}
    return DobbConfig(
        norm=norm,
        side=side,
        source=source,
        blocks=32 if side == "output" else 8,
        nesterov=norm == "l2",
        refresh_interval=3,
        basis_dtype="fp32",
        log_diagnostics_interval=interval,
        log_diagnostics_weights=("*",) if interval else (),
        **captured,
    )


def train(layout, variants):
    """For every variant, without and with logs: losses, states, gradients and calls of all steps, and the logs."""
    start(layout)
    found = {}
    for variant, interval in itertools.product(variants, (0, INTERVAL)):
        run, logs = Run(layout, config_of(*variant, interval)), {}
        setattr(run.dobb.config, SINK_ATTRIBUTE, logs.__setitem__)
        found[variant, interval] = seen = {"losses": [], "states": [], "calls": [], "logs": logs}
        seen["gradients"] = note_gradients(run)
        for step in range(STEPS):
            with traffic.record() as calls:
                loss = gpt.train_step(run.chunks, run.optimizer, global_batch(step), layout.micro_batch)
            seen["losses"].append(loss)
            seen["calls"].append(calls)
            seen["states"].append(run.snapshot())
    return found


def note_gradients(run):
    """The shards of every step's gradients, in a list that grows."""
    noted = []
    first = run.dobbs[0]
    update = first.step_with_ready_grads

    def step_with_ready_grads():
        noted.append(run.shards(lambda segment, shard: shard.grad))
        return update()

    first.step_with_ready_grads = step_with_ready_grads
    return noted


@functools.cache
def trained(layout):
    variants = [variant for other, variant in CASES.values() if other == layout]
    return processes.run(layout.world, train, layout, variants)


def seen_by(case, interval=INTERVAL):
    """What every rank saw, with logs or without."""
    layout, variant = CASES[case]
    return [rank[variant, interval] for rank in trained(layout)]


def log_of(case):
    *others, last = seen_by(case)
    assert not any(rank["logs"] for rank in others), "the last rank writes, and no other"
    assert list(last["logs"]) == [INTERVAL]
    return last["logs"][INTERVAL]


def entropy_rank(values):
    p = values[values > 0] / values.sum()
    return (-(p * p.log()).sum()).exp()


def stated(norm, side, momentum, gradient, moments, bases):
    """The figures of a whole weight; the first refresh started from the identity."""
    source = momentum.double()
    source = MU * source + (1 - MU) * gradient.double() if norm == "l2" else source
    source = source.t() if side == "output" else source
    (m, n), raw = source.shape, []
    for part, basis in zip(source.chunk(len(bases), dim=1), bases, strict=True):
        coefficients = part @ basis
        raw.append((coefficients.sign() / m**0.5 if norm == "sign" else normalize(coefficients, dim=0)) @ basis.t())
    step = TAU * max(m, n) ** 0.5 * torch.cat(raw, dim=1)
    values, whole, turned = torch.linalg.svdvals(step), torch.block_diag(*moments), torch.block_diag(*bases)
    rotated = turned.t() @ whole @ turned
    return {
        "update_rms": step.square().mean().sqrt(),
        "orthogonality": values.sum() / (min(m, n) ** 0.5 * values.norm()),
        "update_effective_rank": entropy_rank(values) / min(m, n),
        "basis_residual": (rotated - rotated.diagonal().diag()).norm() / whole.norm(),
        "moment_effective_rank": entropy_rank(torch.linalg.svdvals(whole)) / n,
        "refresh_rotation": turned.diagonal().abs().clamp(max=1).arccos().square().mean().sqrt(),
    }


@every_case
def test_the_log_says_of_the_whole_model_what_float64_does(case):
    norm, side, _ = CASES[case][1]
    log = dict(log_of(case))
    assert log.pop("dobb/skipped_blocks") == log.pop("dobb/fallback_blocks") == 0
    state = merge([rank["states"][INTERVAL - 1] for rank in seen_by(case)])
    gradients = [rank["gradients"][INTERVAL - 1] for rank in seen_by(case)]
    expected = {}
    for name, momentum in state.momenta.items():
        bases, moments = state.bases[name].double(), state.moments[name].double()
        gradient = join_shards(gradients, name)
        for metric, value in stated(norm, side, momentum, gradient, moments, bases).items():
            expected[f"dobb/{metric}/{name}"] = float(value)
            expected.setdefault(f"dobb/{metric}", []).append(float(value))
    expected = {k: sum(v) / len(v) if isinstance(v, list) else v for k, v in expected.items()}
    assert log == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "case", tiers.quick([case for case in CASES if "one process" not in case], ["DP 2 x TP 2 + SP", "PP 2"])
)
def test_every_layout_logs_what_one_process_does(case):
    layout, variant = CASES[case]
    one = ONE_WITH_EXPERTS if layout.experts else ONE
    (alone,) = [name for name, found in CASES.items() if found == (one, variant)]
    assert log_of(case) == pytest.approx(log_of(alone), rel=1e-5)


@every_case
def test_logging_changes_no_bit_of_the_training(case):
    for without, with_logs in zip(seen_by(case, 0), seen_by(case), strict=True):
        assert repr(without["losses"]) == repr(with_logs["losses"])  # NaN before the last pipeline stage
        for plain, logged in zip(without["states"], with_logs["states"], strict=True):
            for kind in ("parameters", "moments", "bases"):
                ours, theirs = getattr(logged, kind), getattr(plain, kind)
                assert ours.keys() == theirs.keys()
                assert all(torch.equal(ours[key], theirs[key]) for key in theirs), kind
            for ours, theirs in zip(logged.momenta, plain.momenta, strict=True):
                assert torch.equal(ours.values, theirs.values)


@every_case
def test_only_logged_steps_communicate_more_and_all_ranks_alike(case):
    layout, _ = CASES[case]
    for without, with_logs in zip(seen_by(case, 0), seen_by(case), strict=True):
        for number, (plain, logged) in enumerate(zip(without["calls"], with_logs["calls"], strict=True), start=1):
            if number % INTERVAL:
                assert logged == plain
                continue
            more = list(logged)
            for call in plain:
                more.remove(call)
            names = {call.name for call in more}
            assert names <= {"reduce", "gather", "gather_object"}
            whole = [call for call in more if call.name == "gather_object"]
            assert [call.ranks for call in whole] == [tuple(range(layout.world))]
            assert ("reduce" in names) == (layout.data > layout.instances or layout.expert > 1)


def test_the_experts_of_all_ranks_are_in_the_log():
    names = {name for name in log_of("experts apart") if name.startswith("dobb/orthogonality/")}
    assert len({name for name in names if ".local_experts." in name}) == 2 * 2 * EXPERTS
