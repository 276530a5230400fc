"""When collectives of two streams could block each other on a device."""

from types import SimpleNamespace

import pytest
import torch

from megatron_dobb.megatron.refreshes import ChunkRefresh, _one_launch_queue


def chunk(device, ranks):
    group = SimpleNamespace(ranks=ranks, basis=torch.empty(0))
    if device == "cuda":
        group.basis = SimpleNamespace(device=torch.device("cuda", 0))
    return ChunkRefresh(None, [(group, 0)])


@pytest.mark.parametrize(
    ("device", "ranks", "connections", "blocks"),
    [
        ("cuda", 2, "1", True),
        ("cuda", 2, "8", False),
        ("cuda", 2, None, False),
        ("cuda", 1, "1", False),
        ("cpu", 2, "1", False),
    ],
)
def test_only_several_ranks_with_one_queue_on_a_gpu_can(monkeypatch, device, ranks, connections, blocks):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if connections is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    assert _one_launch_queue(chunk(device, ranks)) == blocks
