"""The plain optimizer keeps nothing of a step: tensors neither pile up nor outlive their refresh."""

import gc
import weakref

import pytest
import torch
from small_mlp import BLOCKS, backward, batch, mlp, train

from megatron_dobb import Dobb


def live_tensors():
    """Number of tensors that are alive, and of their elements; not the fake ones that torch.compile keeps."""
    gc.collect()
    found = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
    return len(found), sum(t.numel() for t in found)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_as_many_tensors_are_alive_after_two_hundred_steps_as_after_a_few(micro_batches):
    model = mlp()
    optimizer = Dobb(model, lr=0.01, blocks=BLOCKS, refresh_interval=3, capture="all")
    counts = {}
    for step in range(200):
        train(model, optimizer, [step % 7], micro_batches)
        if step > 3 and step % 49 < 3:  # refresh steps and others
            counts.setdefault(step % 3 == 0, set()).add(live_tensors())
    assert len(counts) == 2
    assert all(len(found) == 1 for found in counts.values())


def test_captured_sums_are_gone_when_their_refresh_is_done():
    model = mlp()
    optimizer = Dobb(model, lr=0.01, blocks=BLOCKS, refresh_interval=2)
    backward(model, batch(0))
    totals = [weakref.ref(entry.total) for entry in optimizer._capture.sums.values()]
    assert len(totals) == 3
    assert all(total() is not None for total in totals)
    optimizer.step()
    assert all(total() is None for total in totals)
    assert all(entry.total is None for entry in optimizer._capture.sums.values())


def test_steps_that_do_not_refresh_capture_nothing():
    model = mlp()
    optimizer = Dobb(model, lr=0.01, blocks=BLOCKS, refresh_interval=2)
    train(model, optimizer, [0])
    backward(model, batch(1))
    assert all(entry.total is None and entry.calls == 0 for entry in optimizer._capture.sums.values())


def test_a_discarded_step_leaves_no_sums_behind():
    model = mlp()
    optimizer = Dobb(model, lr=0.01, blocks=BLOCKS)
    backward(model, batch(0))
    totals = [weakref.ref(entry.total) for entry in optimizer._capture.sums.values()]
    optimizer.zero_grad()
    assert all(total() is None for total in totals)


def test_model_and_optimizer_can_be_freed():
    model = mlp()
    optimizer = Dobb(model, lr=0.01, blocks=BLOCKS)
    train(model, optimizer, range(2))
    refs = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(optimizer._momentum["first.weight"])]
    del model, optimizer
    gc.collect()
    assert all(ref() is None for ref in refs)
