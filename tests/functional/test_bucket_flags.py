"""Flags of Megatron's param/grad buffers: with any of them, Dobb trains as it does without."""

import functools

import pytest
import torch
from pretrain_runs import DOBB, train

STEPS = 7
TRAINING = [
    *f"--global-batch-size 8 --train-iters {STEPS} --eval-iters 0 --eval-interval 1000 --lr-decay-style constant".split(),
    # The norm's rounding depends on how the buckets are cut, and a clipped gradient would carry it on.
    *"--clip-grad 0".split(),
    *DOBB,
]
OVERLAP = "--overlap-grad-reduce"
BUCKETS = f"{OVERLAP} --ddp-bucket-size 20000"
GATHER = f"{BUCKETS} --overlap-param-gather"


def buckets(job):
    """What the flags made of the buffers."""
    (chunk,) = job.model
    ((args,),) = [[chunk.ddp_config]]
    job.notes.append([bucket.grad_data.numel() for buffer in chunk.buffers for bucket in buffer.buckets])
    job.notes.append(args)
    job.notes.append(job.dobb.config)


@functools.cache
def trained(flags, world=2):
    return train([*TRAINING, *flags.split()], world, buckets)


CASES = {
    "grad overlap": (OVERLAP, ""),
    "bucket size": (BUCKETS, ""),
    "bucket number": (f"{OVERLAP} --ddp-num-buckets 5", ""),
    "param overlap": (GATHER, ""),
    "param overlap, not aligned": (f"{GATHER} --no-align-param-gather --no-align-grad-reduce", ""),
    "padded for bus bandwidth": (f"{BUCKETS} --ddp-pad-buckets-for-high-nccl-busbw", ""),
    "average in collective": (f"{BUCKETS} --ddp-average-in-collective", ""),
    "loss per token": ("--calculate-per-token-loss", ""),
    "bf16, param overlap": (f"{GATHER} --bf16", "--bf16"),
    "bf16 reduction, fp32 sums": (
        f"{GATHER} --bf16 --grad-reduce-in-bf16 --ddp-reduce-scatter-with-fp32-accumulation",
        "--bf16 --grad-reduce-in-bf16",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_weights_are_those_without_the_flag_bit_for_bit(case):
    """On two ranks no sum depends on the flags: there are two terms."""
    flags, without = CASES[case]
    for with_flags, plain in zip(trained(flags), trained(without), strict=True):
        assert len(plain.losses) == STEPS
        assert plain.losses[-1] < plain.losses[0]
        assert with_flags.losses == plain.losses
        for name, weight in plain.weights.items():
            assert torch.equal(weight, with_flags.weights[name]), name
