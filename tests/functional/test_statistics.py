"""Gradient norm, clipping, zeros and the norm of the parameters: what Dobb reports is what AdamW reports.

On the first step both have the same weights and gradients.
"""

import functools

import pytest
import torch
from pretrain_runs import ADAMW, DOBB, train

TRAINING = (
    "--global-batch-size 8 --train-iters 3 --eval-iters 0 --eval-interval 1000 --lr-decay-style constant "
    "--log-num-zeros-in-grad --log-params-norm"
).split()
MOMENTUM = 0.95

CASES = {
    "fp32": ("", 2),
    "bf16": ("--bf16", 2),
    "fp16": ("--fp16 --initial-loss-scale 1024", 2),
    "buckets": ("--overlap-grad-reduce --ddp-bucket-size 20000 --overlap-param-gather", 2),
    "tensor parallel": ("--tensor-model-parallel-size 2", 4),
    "experts": ("--num-experts 4 --expert-model-parallel-size 2 --disable-bias-linear --moe-router-topk 2", 4),
}
every_case = pytest.mark.parametrize("case", CASES)


def note_momentum(job):
    """Note every step's momentum of the weights on Dobb."""
    original = job.optimizer.step

    def step():
        done = original()
        job.notes.append([s.momentum.clone() for o in job.optimizer.chained_optimizers for g in o.segments for s in g])
        return done

    job.optimizer.step = step


@functools.cache
def trained(case, clip, optimizer="dobb"):
    flags, world = CASES[case]
    words = [*TRAINING, *flags.split(), "--clip-grad", str(clip), *(DOBB if optimizer == "dobb" else ADAMW)]
    return train(words, world, note_momentum if optimizer == "dobb" else None)


@every_case
def test_the_first_step_reports_the_norms_and_zeros_that_adamw_reports(case):
    """The zeros exactly; the norms but for the order in which the squares of differently cut shards are added."""
    for rank, plain in zip(trained(case, 1e-3), trained(case, 1e-3, "adam"), strict=True):
        ours, theirs = rank.steps[0], plain.steps[0]
        assert theirs.grad_norm > 0.1
        assert theirs.zeros > 0
        assert ours.zeros == theirs.zeros
        assert ours.loss == theirs.loss
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=2e-6)
        # After the update; the weights on Dobb move otherwise than with AdamW.
        assert ours.params_norm == pytest.approx(theirs.params_norm, rel=5e-2)
        assert rank.steps[-1].params_norm != ours.params_norm


@every_case
def test_the_reported_norm_of_the_parameters_is_that_of_the_masters(case):
    """Its counterpart with AdamW is the same function of Megatron's, which knows the masters by the model's weights."""
    if CASES[case][1] > 2:
        pytest.skip("the weights of several model-parallel ranks")
    for rank in trained(case, 1e-3):
        squares = sum(float(w.double().square().sum()) for w in rank.weights.values())
        assert rank.steps[-1].params_norm == pytest.approx(squares**0.5, rel=1e-3 if "16" in case else 1e-6)


@every_case
def test_clipping_scales_what_enters_the_momentum(case):
    """The first step's momentum is (1 - mu) times the gradient, and a clipped one that times clip / norm."""
    clip = 1e-3
    compared = 0
    for clipped, plain in zip(trained(case, clip), trained(case, 0.0), strict=True):
        factor = clip / (clipped.steps[0].grad_norm + 1e-6)
        assert factor < 0.01
        for small, large in zip(clipped.notes[0], plain.notes[0], strict=True):
            assert torch.allclose(small.double(), large.double() * factor, rtol=1e-5, atol=0)
            compared += int((large != 0).sum())
    assert compared > 10_000


@every_case
def test_signs_do_not_see_the_clip(case):
    """Dobb's first update does not depend on the gradient's length; AdamW's second moments make its own nearly so."""
    for clipped, plain in zip(trained(case, 1e-3), trained(case, 0.0), strict=True):
        assert clipped.steps[0].loss == plain.steps[0].loss
