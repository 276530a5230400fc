"""On which steps each weight is refreshed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dobb.methods.dobb.schedule import is_due, phases

GPT = {
    f"layers.{layer}.{name}": width**3
    for layer in range(12)
    for name, width in {"qkv": 48, "proj": 48, "fc1": 48, "fc2": 192}.items()
}


@pytest.mark.parametrize("interval", [1, 4, 9])
def test_every_weight_has_one_step_of_every_interval_after_the_first(interval):
    phase_of = phases(GPT, interval)
    assert phase_of.keys() == GPT.keys()
    for phase in phase_of.values():
        due = [step for step in range(1 + 3 * interval) if is_due(step, phase, interval)]
        assert due[0] == 0, "the first step refreshes all"
        rest = [step for step in due if step > 0]
        assert {step % interval for step in rest} == {phase}
        assert len(rest) == 3


def test_without_staggering_the_refresh_steps_are_the_first_and_every_further_interval():
    assert [step for step in range(28) if is_due(step, 0, 9)] == [0, 9, 18, 27]


@pytest.mark.parametrize("interval", [4, 9])
def test_no_step_has_more_than_its_share_and_one_weight(interval):
    phase_of = phases(GPT, interval)
    loads = [sum(GPT[name] for name in GPT if phase_of[name] == phase) for phase in range(interval)]
    assert max(loads) <= sum(GPT.values()) / interval + max(GPT.values())
    assert min(loads) > 0


@given(
    st.dictionaries(st.text(min_size=1, max_size=4), st.integers(1, 9), max_size=20), st.integers(1, 9), st.randoms()
)
@settings(max_examples=50, deadline=None)
def test_the_schedule_does_not_depend_on_the_order_in_which_weights_are_known(work_of, interval, random):
    names = list(work_of)
    random.shuffle(names)
    assert phases({name: work_of[name] for name in names}, interval) == phases(work_of, interval)
