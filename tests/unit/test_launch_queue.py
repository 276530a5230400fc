"""Whose thread makes the collectives of refreshes: where those of two streams could block each other, the program's."""

from types import SimpleNamespace

import pytest
import torch

from megatron_dobb.errors import CaptureError
from megatron_dobb.megatron.dobb.stages import RefreshStages, has_one_launch_queue, launcher_of
from megatron_dobb.methods.dobb.refresh_group import HeldWeight, RefreshGroup, share_out
from megatron_dobb.methods.dobb.settings import DobbConfig


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


def refresh_group(width):
    weight = HeldWeight(f"of width {width}", 2, width, (0, 1))
    ownership = share_out({0: [weight]}, None)[0]
    dtypes = {"moment_dtype": torch.float32, "basis_dtype": torch.float32}
    return RefreshGroup([weight], None, ownership, **dtypes, device=torch.device("cpu"))


def exchange(monkeypatch, *of_groups):
    """What the program exchanges of some groups whose workers counted so, and how often it read tensors."""
    parts = RefreshStages(DobbConfig(), diagnostics=None, is_expert=False)
    renewed = [(refresh_group(width), torch.tensor(counts, dtype=torch.int32)) for width, counts in of_groups]
    reads, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(tensor) or tolist(tensor))
    try:
        return [(counts.skipped, counts.fallbacks) for _, counts in parts.exchange(renewed)], len(reads)
    finally:
        monkeypatch.undo()


def test_the_counts_of_all_groups_are_read_at_once_since_reading_waits_for_the_gpu(monkeypatch):
    assert exchange(monkeypatch, (4, [1, 0, 0]), (8, [0, 2, 0]), (6, [3, 1, 0])) == ([(1, 0), (0, 2), (3, 1)], 1)
    assert exchange(monkeypatch) == ([], 0)


def test_a_group_that_saw_no_token_is_named_whatever_the_others_counted(monkeypatch):
    with pytest.raises(CaptureError, match="captured for of width 8 on"):
        exchange(monkeypatch, (4, [1, 0, 0]), (8, [0, 0, 1]), (6, [0, 0, 0]))
