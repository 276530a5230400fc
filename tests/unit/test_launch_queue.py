"""Whose thread makes the collectives of refreshes: where those of two streams could block each other, the program's."""

from types import SimpleNamespace

import pytest
import torch

from megatron_dobb.megatron.refresh_parts import has_one_launch_queue, launcher_of


def group(device, ranks):
    return SimpleNamespace(ranks=ranks, basis=SimpleNamespace(device=torch.device(device)))


@pytest.mark.parametrize(
    ("groups", "one_queue", "launcher"),
    [
        ([("cuda", 2)], True, "program"),
        ([("cuda", 1), ("cuda", 2)], True, "program"),
        ([("cuda", 2)], False, "worker"),
        ([("cuda", 1)], True, "worker"),
        ([("cpu", 2)], True, "worker"),
        ([], True, "worker"),
    ],
)
def test_only_several_ranks_with_one_queue_on_a_gpu_leave_collectives_to_the_program(groups, one_queue, launcher):
    assert launcher_of([group(*each) for each in groups], one_queue) == launcher


@pytest.mark.parametrize(("connections", "found"), [("1", True), ("8", False), (None, False)])
def test_one_queue_is_what_cuda_is_asked_for(monkeypatch, connections, found):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if connections is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    assert has_one_launch_queue() is found
