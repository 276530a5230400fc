"""Capture: which sequences of a global batch are taken, once each, and that their moments are right."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_dobb.errors import CaptureError
from megatron_dobb.methods.dobb.capture import Capture, Source

FEATURES, WIDTH, TOKENS = 8, 4, 3


class Layer(nn.Module):
    """A linear layer that takes its input by keyword, like some of Megatron's."""

    def __init__(self, features=FEATURES):
        super().__init__()
        self.linear = nn.Linear(features, features, bias=False)

    def forward(self, *, input_):
        return self.linear(input_)


class Model(nn.Module):
    """`[tokens, sequences, features]` through two layers, the first optionally recomputed or called twice."""

    def __init__(self, mode="plain"):
        super().__init__()
        self.first = Layer()
        self.second = nn.Linear(FEATURES, FEATURES)
        self.mode = mode

    def forward(self, x):
        if self.mode == "twice":
            x = self.first(input_=self.first(input_=x))
        elif self.mode in ("reentrant", "non-reentrant"):
            x = checkpoint(lambda y: self.first(input_=y).sin(), x, use_reentrant=self.mode == "reentrant")
        else:
            x = self.first(input_=x)
        return self.second(x)


def sources(model):
    return [
        Source("first", model.first, WIDTH, lambda module, args, kwargs: kwargs["input_"], 1),
        Source("second", model.second, WIDTH, lambda module, args, kwargs: args[0], 1),
    ]


def capture_of(model, sequences=None, **settings):
    return Capture(model, sources(model), sequences, **settings)


def moments(x):
    """`sum x_j x_j^T` for every block, in float64."""
    blocks = x.double().reshape(-1, x.shape[-1] // WIDTH, WIDTH)
    return torch.einsum("tjc,tjd->jcd", blocks, blocks)


def batch(sequences, seed=0):
    """`[TOKENS, sequences, FEATURES]`; the last feature is the sequence's number in the batch."""
    x = torch.randn(TOKENS, sequences, FEATURES, generator=torch.Generator().manual_seed(seed))
    x[..., -1] = torch.arange(sequences)
    return x


def assert_sum(entry, x):
    assert entry.tokens == x.shape[0] * x.shape[1]
    if entry.tokens:
        torch.testing.assert_close(entry.total.double(), moments(x), rtol=1e-6, atol=1e-5)
    else:
        assert entry.total is None


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 80), st.booleans())
def test_the_first_sequences_of_the_global_batch_are_taken_on_every_layout(micro, ranks, microbatches, wanted, late):
    """Against Megatron's order: micro-batch i of all ranks together is a run of consecutive sequences."""
    everything = batch(micro * ranks * microbatches)
    runs = everything.split(micro, dim=1)
    taken = []
    for rank in range(ranks):
        model = Model()
        capture = capture_of(model, wanted, rank=rank, ranks=ranks)
        own = runs[rank::ranks]
        capture.begin(armed=True)
        if late:  # pipeline schedules run several forwards before the first backward
            outputs = [model(run) for run in own]
            for output in outputs:
                output.sum().backward()
        else:
            for run in own:
                model(run).sum().backward()
        taken.append(capture.take()["first"])
    assert sum(entry.tokens for entry in taken) == TOKENS * min(wanted, everything.shape[1])
    total = sum(entry.total.double() for entry in taken if entry.total is not None)
    torch.testing.assert_close(total, moments(everything[:, :wanted]), rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_takes_every_sequence(ranks):
    runs = batch(2 * ranks * 3).split(2, dim=1)
    for rank in range(ranks):
        model = Model()
        capture = capture_of(model, None, rank=rank, ranks=ranks)
        capture.begin(armed=True)
        for run in runs[rank::ranks]:
            model(run)
        assert_sum(capture.take()["first"], torch.cat(runs[rank::ranks], dim=1))
        assert capture.sequences is None


def test_the_default_is_the_first_global_micro_batch_and_stays_that_number():
    model = Model()
    capture = capture_of(model, None, rank=1, ranks=3, default_to_first=True)
    runs = batch(4).split(2, dim=1)
    capture.begin(armed=True)
    for run in runs:
        model(run)
    assert_sum(capture.take()["first"], runs[0])
    assert capture.sequences == 6

    one_by_one = batch(4, seed=1).split(1, dim=1)  # rank 1 of 3 now holds sequences 1, 4, 7 and 10
    capture.begin(armed=True)
    for run in one_by_one:
        model(run)
    assert_sum(capture.take()["first"], torch.cat(one_by_one[:2], dim=1))


def test_every_layer_is_captured_with_what_it_is_given():
    model, x = Model(), batch(2)
    capture = capture_of(model)
    capture.begin(armed=True)
    model(x)
    sums = capture.take()
    assert_sum(sums["first"], x)
    assert_sum(sums["second"], model.first(input_=x))


def test_a_layer_called_twice_adds_both_inputs():
    model, x = Model("twice"), batch(2)
    capture = capture_of(model)
    capture.begin(armed=True)
    model(x)
    assert_sum(capture.take()["first"], torch.cat([x, model.first(input_=x)]))


def test_a_weight_that_two_modules_share_adds_both_inputs():
    model, x = Model(), batch(2)
    model.second.weight = model.first.linear.weight
    both = [Source("shared", s.module, s.width, s.activation, s.sequence_dim) for s in sources(model)]
    capture = Capture(model, both, None)
    capture.begin(armed=True)
    model(x)
    assert_sum(capture.take()["shared"], torch.cat([x, model.first(input_=x)]))


class Routed(nn.Module):
    """Sends each token to one of two experts, by the sign of its first feature; experts see `[tokens, features]`."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([Layer(), Layer()])

    def forward(self, x):
        flat = x.reshape(-1, FEATURES)
        chosen = (flat[:, 0] > 0).long()
        output = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            output = output.index_put((torch.where(chosen == number)[0],), expert(input_=flat[chosen == number]))
        return output.view_as(x)


def routed_capture(model, sequences=None, **settings):
    sources = [
        Source(f"expert{i}", expert, WIDTH, lambda module, args, kwargs: kwargs["input_"], 1, batch=model)
        for i, expert in enumerate(model.experts)
    ]
    return Capture(model, sources, sequences, **settings)


def tokens_of(expert, x):
    flat = x.reshape(-1, FEATURES)
    return flat[(flat[:, 0] > 0) == bool(expert)][:, None]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("wanted", "microbatches"),
    [pytest.param(None, 3, id="all"), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)],
)
def test_experts_are_captured_from_all_micro_batches_of_which_any_rank_takes_something(rank, wanted, microbatches):
    model = Routed()
    capture = routed_capture(model, wanted, rank=rank, ranks=2)
    runs = batch(6, seed=rank).split(2, dim=1)
    capture.begin(armed=True)
    for run in runs:
        model(run)
    sums = capture.take()
    for expert in range(2):
        assert_sum(sums[f"expert{expert}"], tokens_of(expert, torch.cat(runs[:microbatches], dim=1)))


def test_the_default_for_experts_is_the_first_global_micro_batch_whatever_they_are_dealt():
    model = Routed()
    capture = routed_capture(model, rank=1, ranks=3, default_to_first=True)
    capture.begin(armed=True)
    x = batch(2)
    x[..., 0] = -1
    model(x)
    model(batch(2, seed=1))
    sums = capture.take()
    assert capture.sequences == 6
    assert_sum(sums["expert0"], tokens_of(0, x))
    assert_sum(sums["expert1"], x[:, :0])


def test_an_expert_that_is_called_outside_of_its_layer_is_an_error_that_names_it():
    model = Routed()
    capture = routed_capture(model)
    capture.begin(armed=True)
    with pytest.raises(CaptureError, match=r"expert1: .*but not the Routed around it"):
        model.experts[1](input_=torch.ones(3, FEATURES))


def test_an_input_without_sequences_is_an_error_that_names_the_weight_and_its_shape():
    model = Model()
    capture = capture_of(model)
    capture.begin(armed=True)
    with pytest.raises(CaptureError, match=r"first: its input has the shape \(3, 8\)"):
        model.first(input_=torch.ones(3, FEATURES))


def test_a_module_has_one_hook_however_many_weights_it_has():
    layer = Layer()
    many = [Source(f"w{i}", layer, WIDTH, lambda module, args, kwargs: kwargs["input_"], 1) for i in range(5)]
    capture = Capture(layer, many, None)
    assert len(layer._forward_hooks) == 2  # and the root's own
    capture.begin(armed=True)
    x = batch(2)
    layer(input_=x)
    for entry in capture.take().values():
        assert_sum(entry, x)


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
def test_recomputed_activations_are_captured_once(mode):
    model = Model(mode)
    recomputed = []
    model.first.linear.register_forward_hook(lambda *_: recomputed.append(1))
    capture = capture_of(model)
    capture.begin(armed=True)
    runs = [run.requires_grad_() for run in batch(4).split(2, dim=1)]
    for run in runs:
        model(run).sum().backward()
    assert len(recomputed) == 4, "the layer must really run again in the backward pass"
    assert_sum(capture.take()["first"], torch.cat(runs, dim=1))


def test_a_model_that_is_recomputed_as_a_whole_counts_each_micro_batch_once():
    model = Model()
    capture = capture_of(model, 3)
    capture.begin(armed=True)
    runs = [run.requires_grad_() for run in batch(4).split(2, dim=1)]
    for run in runs:
        checkpoint(lambda x: model(x).sin(), run, use_reentrant=False).sum().backward()
    assert capture.microbatch == 1
    assert_sum(capture.take()["first"], torch.cat(runs, dim=1)[:, :3])


def test_evaluation_is_neither_captured_nor_counted():
    model, x = Model(), batch(2)
    capture = capture_of(model, 2)
    capture.begin(armed=True)
    model.eval()
    with torch.no_grad():
        model(x)
    model(x)
    model.train()
    model(x)
    assert_sum(capture.take()["first"], x)


def test_an_evaluating_layer_of_a_training_model_is_not_captured():
    model, x = Model(), batch(2)
    model.first.eval()
    capture = capture_of(model)
    capture.begin(armed=True)
    model(x)
    sums = capture.take()
    assert sums["first"].tokens == 0
    assert sums["second"].tokens == TOKENS * 2


def test_a_forward_of_the_whole_model_without_gradients_is_a_validation_even_in_training_mode():
    model, x = Model(), batch(2)
    capture = capture_of(model, 2)
    capture.begin(armed=True)
    with torch.no_grad():
        model(batch(2, seed=1))
    model(x)
    assert_sum(capture.take()["first"], x)


def test_a_copy_of_the_model_captures_nothing():
    model, x = Model(), batch(2)
    capture = capture_of(model)
    capture.begin(armed=True)
    copy.deepcopy(model)(batch(2, seed=1))
    pickle.loads(pickle.dumps(model))(batch(2, seed=1))
    model(x)
    assert_sum(capture.take()["first"], x)


def test_a_forward_that_fails_does_not_disturb_the_next_one():
    model, x = Model(), batch(2)
    capture = capture_of(model)
    capture.begin(armed=True)
    with pytest.raises(RuntimeError):
        model(x[..., :3])
    capture.begin(armed=True)
    model(x)
    assert_sum(capture.take()["first"], x)


def test_nothing_is_captured_unless_armed():
    model = Model()
    capture = capture_of(model)
    model(batch(2))
    capture.begin(armed=False)
    model(batch(2))
    assert all(entry.tokens == 0 for entry in capture.take().values())


def test_begin_forgets_a_step_that_is_run_again():
    model, x = Model(), batch(4)
    capture = capture_of(model, 2)
    capture.begin(armed=True)
    for run in batch(4, seed=1).split(2, dim=1):
        model(run)
    capture.begin(armed=True)
    for run in x.split(2, dim=1):
        model(run)
    assert_sum(capture.take()["first"], x[:, :2])


def test_take_hands_over_and_disarms():
    model, x = Model(), batch(2)
    capture = capture_of(model)
    capture.begin(armed=True)
    model(x)
    sums = capture.take()
    model(x)
    assert_sum(sums["first"], x)
    assert capture.take()["first"].tokens == 0


def test_sums_are_fp32_whatever_the_model_is_cast_to():
    model = Model()
    capture = capture_of(model)
    model.bfloat16()
    x = batch(2).bfloat16()
    capture.begin(armed=True)
    model(x)
    entry = capture.take()["first"]
    assert entry.total.dtype == torch.float32
    assert not entry.total.requires_grad
    assert_sum(entry, x)
    assert not list(model.buffers())


def test_remove_takes_every_hook_off():
    model = Model()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    capture = capture_of(model)
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] != hooks
    capture.begin(armed=True)
    capture.remove()
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    model(batch(2))
    assert all(entry.tokens == 0 for entry in capture.take().values())
    capture.remove()


def test_a_non_finite_activation_reaches_only_its_own_block():
    model, x = Model(), batch(2)
    x[0, 0, 0] = float("nan")
    capture = capture_of(model)
    capture.begin(armed=True)
    model(x)
    finite = capture.take()["first"].total.isfinite().flatten(1).all(1)
    assert finite.tolist() == [False, True]
