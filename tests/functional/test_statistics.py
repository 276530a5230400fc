"""Gradient norm, clipping, zeros and the norm of the parameters: what Dobb reports is what AdamW reports."""

import functools
import shlex

import pytest
import torch
from pretrain_runs import ADAMW, DOBB, train

from testbed import tiers

TRAINING = shlex.split(
    "--global-batch-size 8 --train-iters 2 --eval-iters 0 --eval-interval 1000 --lr-decay-style constant "
    # Untied, so that unseen tokens have rows of zeros in the gradient of the embedding.
    "--log-num-zeros-in-grad --log-params-norm --untie-embeddings-and-output-weights"
)
CLIP, TINY_CLIP = 1e-3, 1e-12

CASES = {
    "fp32": ("", 2),
    "bf16": ("--bf16", 2),
    "fp16": ("--fp16 --initial-loss-scale 1024", 2),
    "buckets": ("--overlap-grad-reduce --ddp-bucket-size 20000", 2),
    "tensor parallel": ("--tensor-model-parallel-size 2", 4),
    "experts": ("--num-experts 4 --expert-model-parallel-size 2 --disable-bias-linear --moe-router-topk 2", 4),
}
every_case = pytest.mark.parametrize("case", tiers.quick(CASES, ["bf16", "experts"]))


def note_momentum(job):
    """Note every step's momentum of the weights on Dobb."""
    original = job.optimizer.step

    def step():
        done = original()
        job.notes.append([s.momentum.clone() for o in job.optimizer.chained_optimizers for g in o.segments for s in g])
        return done

    job.optimizer.step = step


@functools.cache
def trained(case, clip, rate=0.0, optimizer="dobb"):
    flags, world = CASES[case]
    words = [*TRAINING, *flags.split(), "--clip-grad", str(clip), "--lr", str(rate)]
    if optimizer == "adam":
        return train([*words, *ADAMW], world)
    return train([*words, *DOBB], world, note_momentum)


@every_case
def test_norms_and_zeros_are_those_that_adamw_reports_for_the_same_weights_and_gradients(case):
    """At a learning rate of 0 both optimizers keep the weights. The zeros are equal exactly, and the norms but for the
    order in which the squares of differently cut shards are added."""
    for rank, plain in zip(trained(case, CLIP), trained(case, CLIP, 0.0, "adam"), strict=True):
        for ours, theirs in zip(rank.steps, plain.steps, strict=True):
            assert theirs.grad_norm > 0.1
            assert theirs.zeros > 0
            assert theirs.params_norm > 1
            assert (ours.zeros, ours.loss) == (theirs.zeros, theirs.loss)
            assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-6)
            assert ours.params_norm == pytest.approx(theirs.params_norm, rel=1e-6)
        assert rank.steps[0].grad_norm != rank.steps[1].grad_norm


@pytest.mark.parametrize("case", tiers.quick(["fp32", "bf16"], ["bf16"]))
def test_the_reported_norm_of_the_parameters_follows_dobbs_updates(case):
    for rank in trained(case, CLIP, 1e-2):
        squares = sum(float(w.double().square().sum()) for w in rank.weights.values())
        assert rank.steps[-1].params_norm == pytest.approx(squares**0.5, rel=1e-6 if case == "fp32" else 1e-4)
        assert abs(rank.steps[-1].params_norm / rank.steps[0].params_norm - 1) > 2e-4


@every_case
def test_clipping_scales_what_enters_the_momentum(case):
    """The first step's momentum is (1 - mu) times the gradient, and a clipped one that times clip / norm."""
    compared = 0
    for clipped, plain in zip(trained(case, CLIP), trained(case, 0.0), strict=True):
        factor = CLIP / (clipped.steps[0].grad_norm + 1e-6)
        assert factor < 0.01
        for small, large in zip(clipped.notes[0], plain.notes[0], strict=True):
            assert torch.allclose(small.double(), large.double() * factor, rtol=1e-5, atol=1e-30)
            compared += int((large != 0).sum())
    assert compared > 10_000


@pytest.mark.parametrize("case", tiers.quick(["fp32", "bf16"], ["bf16"]))
def test_a_tiny_clip_does_not_stall_the_updates(case):
    """A sign has no epsilon: weights on Dobb move as far as under a clip a thousand million times larger."""
    for rank, other, start in zip(
        trained(case, TINY_CLIP, 1e-2), trained(case, CLIP, 1e-2), trained(case, CLIP), strict=True
    ):
        for name in sorted({name for name, _ in rank.state["bases"]}):
            moved = [float((r.weights[name] - start.weights[name]).square().mean().sqrt()) for r in (rank, other)]
            assert moved[1] > 1e-3
            assert moved[0] == pytest.approx(moved[1], rel=0.05)
