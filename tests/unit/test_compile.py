"""torch.compile, of the model and of the update: it changes no result, and hooks are never lost silently."""

import copy

import pytest
import torch
from compiled import needs_extension
from small_mlp import BLOCKS, LAYERS, assert_same, backward, batch, mlp, tensors, train, weights
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from megatron_dobb import Dobb
from megatron_dobb.errors import CaptureError
from megatron_dobb.methods.dobb import kernels as ops
from megatron_dobb.sharding.segment import Segment
from megatron_dobb.sharding.shard import Shard

STEPS = 5  # of which the first, third and fifth refresh


@pytest.fixture(autouse=True)
def dynamo():
    """Another test's Megatron may have turned it off for the process."""
    torch.compiler.reset()
    with torch._dynamo.config.patch(disable=False):
        yield
    torch.compiler.reset()


def dobb(model):
    return Dobb(model, lr=0.01, blocks=BLOCKS, refresh_interval=2, capture="all")


def compiled_first(model, backend):
    called = torch.compile(model, backend=backend)
    return called, dobb(called)


def compiled_later(model, backend):
    optimizer = dobb(model)
    return torch.compile(model, backend=backend), optimizer


def compiled_in_place(model, backend):
    model.compile(backend=backend)
    return model, dobb(model)


def compiled_by_layer(model, backend):
    for name in LAYERS:
        getattr(model, name).compile(backend=backend)
    return model, dobb(model)


def trained(make=None, backend="eager", steps=STEPS, recompute=None, micro_batches=2):
    """A model and optimizer after some steps, the moments after the first of them, and what was compiled."""
    model, counter = mlp(recompute), CompileCounterWithBackend(backend)
    called, optimizer = make(model, counter) if make else (model, dobb(model))
    train(called, optimizer, range(1), micro_batches)
    moments = [tensors(optimizer, name)["moment"].clone() for name in LAYERS]
    train(called, optimizer, range(1, steps), micro_batches)
    return model, optimizer, moments, counter


@pytest.mark.parametrize("make", [compiled_first, compiled_later, compiled_in_place, compiled_by_layer])
def test_a_compiled_model_trains_as_the_plain_one_to_the_last_bit(make):
    plain, plain_optimizer, *_ = trained()
    model, optimizer, _, counter = trained(make)
    assert counter.frame_count > 0, "nothing was compiled"
    assert_same(weights(model), weights(plain))
    assert_same(optimizer.state_dict(), plain_optimizer.state_dict())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_backends_that_rewrite_the_model_capture_the_same_moments(backend):
    *_, expected, _ = trained(steps=1)
    *_, found, counter = trained(compiled_first, backend, steps=1)
    assert counter.frame_count > 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("recompute", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_layers_that_are_recomputed_inside_of_a_compiled_model_are_captured_once(recompute, backend):
    *_, expected, _ = trained(steps=1)
    *_, found, counter = trained(compiled_first, backend, steps=1, recompute=recompute)
    assert counter.frame_count > 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_a_model_is_compiled_for_refresh_steps_and_for_others_and_then_no_more():
    model, counter = mlp(), CompileCounterWithBackend("eager")
    called, optimizer = compiled_first(model, counter)
    train(called, optimizer, range(4))
    compiled = counter.frame_count
    train(called, optimizer, range(4, 30))
    assert counter.frame_count == compiled


def test_hooks_that_come_after_the_first_call_of_a_compiled_model_are_missed_loudly_until_it_is_reset():
    model = mlp()
    called = torch.compile(model, backend="eager")
    backward(called, batch(0))
    model.zero_grad()
    optimizer = dobb(called)
    backward(called, batch(0))
    before = copy.deepcopy((weights(model), optimizer.state_dict()))
    with pytest.raises(
        CaptureError, match=r"first\.weight, second\.weight, third\.weight .*torch\.compiler\.reset\(\)"
    ):
        optimizer.step()
    assert_same((weights(model), optimizer.state_dict()), before)
    torch.compiler.reset()
    train(called, optimizer, range(STEPS), 2)
    assert_same(weights(model), weights(trained()[0]))


def test_a_layer_inside_of_a_part_that_was_compiled_too_early_is_named_alone():
    model = nn.Sequential(nn.Sequential(nn.Linear(24, 24), nn.Tanh()), nn.Linear(24, 10))
    model[0].compile(backend="eager")
    backward(model, batch(0))
    optimizer = Dobb(model, lr=0.01, blocks=4)
    backward(model, batch(0))
    with pytest.raises(CaptureError, match=r"no input activation of 0\.0\.weight was captured for"):
        optimizer.step()


def test_a_full_graph_is_refused_on_a_refresh_step_with_the_way_out():
    called = torch.compile(mlp(), backend="eager", fullgraph=True)
    optimizer = dobb(called)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"Dobb takes its second moments.*without fullgraph=True"):
        train(called, optimizer, range(1))


def test_a_full_graph_is_fine_where_no_step_refreshes():
    called = torch.compile(mlp(), backend="eager", fullgraph=True)
    optimizer = dobb(called)
    optimizer.attempted_steps = 1
    optimizer.zero_grad()
    optimizer._begin_step()
    train(called, optimizer, range(1))


@pytest.mark.parametrize("kernels", [pytest.param("extension", marks=needs_extension), "reference"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_that_updates_weights_gives_the_same_bits(kernels, backend):
    torch.manual_seed(0)
    start = torch.randn(6, 16), torch.randn(96), torch.randn(96), torch.linalg.qr(torch.randn(2, 8, 8)).Q

    def update(weight, gradient, momentum, basis):
        segment = Segment("w", Shard(0, 96, 16, 8), 6, 16, weight.view(-1), momentum, basis)
        ops.update(
            [segment],
            [gradient],
            learning_rate=0.01,
            weight_decay=0.1,
            momentum=0.95,
            nesterov=False,
            update_scale=0.2,
            precision="exact",
            backend=kernels,
        )
        return weight

    counter = CompileCounterWithBackend(backend)
    found = []
    for function in (update, torch.compile(update, backend=counter)):
        values = [value.clone() for value in start]
        with torch.no_grad():
            function(*values)
        found.append(values)
    assert counter.frame_count > 0
    assert_same(found[0], found[1])
    assert not torch.equal(found[0][0], start[0])
