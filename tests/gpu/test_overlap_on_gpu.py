"""Refreshes beside the program on a stream of their own: those of the program's stream, whichever kernels are late."""

import os
import random
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from megatron_dobb.background.side_stream import Worker
from megatron_dobb.methods.dobb.capture import MomentSum
from megatron_dobb.methods.dobb.refresh_group import HeldWeight, RefreshGroup, share_out

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

WIDTH, BLOCKS, REFRESHES = 64, 6, 200
HOW = {"beta": 0.9, "method": "cholesky", "iterations": 1}


def group(ranks):
    weights = [HeldWeight(f"w{i}", BLOCKS, WIDTH, tuple(range(BLOCKS))) for i in range(3)]
    return RefreshGroup(
        weights,
        ranks,
        share_out({0: weights}, ranks)[0],
        moment_dtype=torch.float32,
        basis_dtype=torch.bfloat16,
        device=torch.device("cuda", torch.cuda.current_device()),
    )


def sums(generator):
    found = {}
    for number in range(3):
        x = torch.randn(BLOCKS, 3 * WIDTH, WIDTH, generator=generator, device="cuda")
        found[f"w{number}"] = MomentSum(x.mT @ x, 3 * WIDTH)
    return found


class Late:
    """Kernels that keep the current stream busy for random times, which are others on every rank."""

    def __init__(self, rank):
        self.dice = random.Random(1 + rank)

    def __call__(self):
        torch.cuda._sleep(self.dice.choice([0, 0, 100_000, 2_000_000]))


def in_the_call(made, worker, captured, late, meanwhile):
    made.refresh(captured, **HOW)
    meanwhile()


def by_worker(made, worker, captured, late, meanwhile):
    def call():
        late()
        counts = made.refresh(captured, **HOW)
        late()
        return counts

    task = worker.submit(call, [entry.total for entry in captured.values()])
    meanwhile()
    late()
    task.result()


def by_program(made, worker, captured, late, meanwhile):
    def reduce():
        late()
        return [made.reduce(captured)]

    def renew():
        late()
        counts = made.renew(received.pop(), **HOW)
        late()
        return counts

    received = worker.launch(reduce, (entry.total for entry in captured.values()))
    task = worker.submit(renew)
    meanwhile()
    late()
    counts = task.result()
    counts.record_stream(torch.cuda.current_stream())
    made.exchange(counts)


def refreshed(way, ranks=None):
    """The bases after every refresh, as the program's stream sees them right after it has waited.

    Args:
        way: one of the three above.
        ranks: a process group whose ranks all capture something else; None for a single process. On another group the
            program makes collectives of its own, beside the refresh.
    """
    rank = dist.get_rank() if ranks is not None else 0
    made, late = group(ranks), Late(rank)
    worker = Worker(made.basis.device)
    generator = torch.Generator(device="cuda").manual_seed(5 + rank)
    seen = []

    def meanwhile():
        taken = torch.randn(2 * BLOCKS, 3 * WIDTH, WIDTH, device="cuda").square_()  # takes what was freed too early
        for _ in range(3 if ranks is not None else 0):
            late()
            dist.all_reduce(taken)
            taken.mul_(0.5)

    for _ in range(REFRESHES):
        late()
        way(made, worker, sums(generator), late, meanwhile)
        seen.append(made.basis.float().sum(dim=(1, 2)))
    return torch.stack(seen).cpu()


@pytest.mark.parametrize("way", [by_worker, by_program])
def test_two_hundred_refreshes_with_late_kernels_on_either_stream_are_those_of_one_stream(way):
    assert torch.equal(refreshed(way), refreshed(in_the_call))


# CUDA reads this once, when a process first uses it: so these run in processes of their own.
ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def test_two_hundred_refreshes_through_one_launch_queue_are_those_of_one_stream():
    test = f"{__file__}::test_two_hundred_refreshes_with_late_kernels_on_either_stream_are_those_of_one_stream"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", test]
    found = subprocess.run(command, env=os.environ | ONE_QUEUE, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "2 passed" in found.stdout


def both_ways(rank, world, store):
    """On one rank: with the program's collectives between and beside those of the refreshes."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=world)
    ranks = dist.new_group(list(range(world)))
    assert torch.equal(refreshed(by_program, ranks), refreshed(in_the_call, ranks))
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each rank")
def test_ranks_with_one_launch_queue_never_wait_for_each_other_for_ever(tmp_path, monkeypatch):
    for name, value in ONE_QUEUE.items():
        monkeypatch.setenv(name, value)
    context = torch.multiprocessing.start_processes(
        both_ways, (2, tmp_path / "store"), nprocs=2, join=False, start_method="spawn"
    )
    ends = time.monotonic() + 300
    try:
        while not context.join(timeout=10):  # True once all have ended, and raises what one raised
            assert time.monotonic() < ends, "a rank still waits"
    finally:
        for process in context.processes:
            process.kill()
