"""Refreshes beside the program on a stream of their own: those of the program's stream, whichever kernels are late."""

import random

import pytest
import torch

from megatron_dobb.capture import MomentSum
from megatron_dobb.exchange import HeldWeight, RefreshGroup, share_out
from megatron_dobb.worker import Worker

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

WIDTH, BLOCKS, REFRESHES = 64, 6, 200
HOW = {"beta": 0.9, "method": "cholesky", "iterations": 1}


def group():
    weights = [HeldWeight(f"w{i}", BLOCKS, WIDTH, tuple(range(BLOCKS))) for i in range(3)]
    return RefreshGroup(
        weights,
        None,
        share_out({0: weights}, None)[0],
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


def refreshed(beside):
    """The bases after every refresh, as the program's stream sees them right after it has waited."""
    made, dice = group(), random.Random(1)
    worker = Worker(made.basis.device) if beside else None
    generator = torch.Generator(device="cuda").manual_seed(5)
    seen = []

    def late():
        torch.cuda._sleep(dice.choice([0, 0, 100_000, 2_000_000]))

    for _ in range(REFRESHES):
        late()
        captured = sums(generator)
        if worker is None:
            made.refresh(captured, **HOW)
        else:

            def call(captured=captured):
                late()
                counts = made.refresh(captured, **HOW)
                late()
                return counts

            task = worker.submit(call, [entry.total for entry in captured.values()])
            del captured
            torch.randn(2 * BLOCKS, 3 * WIDTH, WIDTH, device="cuda").square_()  # takes what was freed too early
            late()
            task.result()
        seen.append(made.basis.float().sum(dim=(1, 2)))
    return torch.stack(seen).cpu()


def test_two_hundred_refreshes_with_late_kernels_on_either_stream_are_those_of_one_stream():
    assert torch.equal(refreshed(beside=True), refreshed(beside=False))
