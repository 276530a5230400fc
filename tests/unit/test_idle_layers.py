"""The plain optimizer and layers that a step gives nothing to do: experts in plain torch, later micro-batches."""

import pytest
import torch
from small_mlp import batch
from torch import nn

from megatron_dobb import Dobb
from megatron_dobb.errors import CaptureError

WIDTH, NOBODY = 6, 99


class Experts(nn.Module):
    """Three experts behind a routing that a test decides: for every call of the model, the expert of all tokens.

    Experts without a token are called with none, or are not called.
    """

    def __init__(self, routing, calls_empty):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.routing, self.calls_empty = iter(routing), calls_empty

    def forward(self, x):
        tokens, chosen = x.flatten(0, 1), next(self.routing)
        output = tokens.sin()
        for number, expert in enumerate(self.experts):
            own = tokens if number == chosen else tokens[:0]
            if len(own) or self.calls_empty:
                output = output + (expert(own).sum() if not len(own) else expert(own))
        return output.view_as(x)


def step(routing, calls_empty, set_to_none=True, warm_up=False, **settings):
    """The optimizer after one refresh step of as many micro-batches as the routing has entries."""
    torch.manual_seed(0)
    routing = [0, 1, 2] * warm_up + list(routing)
    model = Experts(routing, calls_empty)
    optimizer = Dobb(model, lr=0.01, block_width=WIDTH, blocks=None, refresh_interval=1, **settings)
    if warm_up:
        for number in range(3):
            (model(batch(number)) - batch(number).sin()).square().mean().backward()
        optimizer.zero_grad(set_to_none)
    for number in range(len(routing) - 3 * warm_up):
        (model(batch(number)) - batch(number).sin()).square().mean().backward()
    optimizer.step()
    return optimizer


def moment(optimizer, expert):
    return optimizer.state[optimizer.on_dobb[f"experts.{expert}.weight"].parameter]["moment"]


def assert_moment(optimizer, expert, inputs):
    x = torch.cat(inputs).double().flatten(0, 1).unflatten(1, (-1, WIDTH)) if inputs else None
    expected = torch.zeros(4, WIDTH, WIDTH).double() if x is None else torch.einsum("tjc,tjd->jcd", x, x) / len(x)
    torch.testing.assert_close(moment(optimizer, expert).double(), 0.05 * expected, rtol=1e-5, atol=1e-7)


def test_an_expert_that_was_called_without_a_token_keeps_its_bases_and_is_counted(caplog):
    optimizer = step([0], calls_empty=True)
    assert_moment(optimizer, 0, [batch(0)])
    assert_moment(optimizer, 1, [])
    assert optimizer.refresh_counts.skipped == 2 * 24 // WIDTH
    assert "8 blocks kept their basis (no captured token" in caplog.text


def test_an_expert_that_was_not_called_is_left_alone_in_silence(caplog):
    optimizer = step([0], calls_empty=False)
    assert_moment(optimizer, 0, [batch(0)])
    assert optimizer.refresh_counts.skipped == 0
    assert not caplog.records


def test_gradients_that_were_only_set_to_zero_are_not_taken_for_a_lost_activation(caplog):
    optimizer = step([0], calls_empty=False, warm_up=True, set_to_none=False)
    assert optimizer.param_groups[0]["params"][1].grad is not None
    assert_moment(optimizer, 0, [batch(0)])
    assert not caplog.records


@pytest.mark.parametrize("calls_empty", [True, False])
def test_an_expert_with_tokens_in_later_micro_batches_only_keeps_its_bases_and_is_counted(calls_empty):
    optimizer = step([0, 1], calls_empty)
    assert_moment(optimizer, 0, [batch(0)])
    assert_moment(optimizer, 1, [])
    assert optimizer.refresh_counts.skipped == (2 if calls_empty else 1) * 24 // WIDTH


def test_capturing_everything_takes_the_tokens_of_later_micro_batches():
    optimizer = step([0, 1, 0], calls_empty=False, capture="all")
    assert_moment(optimizer, 0, [batch(0), batch(2)])
    assert_moment(optimizer, 1, [batch(1)])


def test_an_expert_whose_call_was_not_seen_is_an_error_that_names_it_alone():
    model = Experts([0, NOBODY], calls_empty=True)
    optimizer = Dobb(model, block_width=WIDTH, blocks=None)
    model.experts[2].eval()
    model(batch(0)).mean().backward()
    model.experts[2].weight.grad.fill_(1.0)
    with pytest.raises(CaptureError, match=r"activation of experts\.2\.weight was captured"):
        optimizer.step()
