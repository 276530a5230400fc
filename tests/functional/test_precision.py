"""One step in fp32, bf16 and fp16, with gradients reduced in fp32 or bf16, against the formula in float64.

The formula, that of docs/how-it-works.md, gets the gradients, bases, masters and momenta that the step is given on two
data-parallel ranks.
"""

import functools
import math

import pytest
import torch
from pretrain_runs import DOBB, train

from testbed import tiers

RATE, DECAY, MOMENTUM, UPDATE_SCALE, BLOCKS = 1e-2, 0.1, 0.95, 0.2, 4
STEPS = 5  # two of them refresh the bases
TRAINING = (
    f"--global-batch-size 8 --train-iters {STEPS} --eval-iters 0 --eval-interval 1000 --lr-decay-style constant "
    f"--weight-decay {DECAY} --clip-grad 0"
).split()

CASES = {
    "fp32": "",
    "bf16": "--bf16",
    "bf16, overlap": "--bf16 --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000",
    "bf16 gradients": "--bf16 --grad-reduce-in-bf16",
    "bf16 gradients, fp32 sums of micro-batches": (
        "--bf16 --grad-reduce-in-bf16 --ddp-param-name-patterns-for-fp32-local-accumulation all"
    ),
    "fp16": "--fp16 --initial-loss-scale 1024",
}
every_case = pytest.mark.parametrize("case", tiers.quick(CASES, ["bf16, overlap", "bf16 gradients", "fp16"]))

TOLERANCE = 1e-6
"""Of the length of a step along one basis vector, and of the largest weight: fp32 rounding of the new weight."""
FLIP_BOUND = 1e-6
"""A coefficient below this fraction of the RMS of its row's block may have either sign in fp32."""


def record(job):
    """Note what each step is given and what it makes of it."""
    step_with_ready_grads, dobb = job.dobb.step_with_ready_grads, job.dobb

    def recorded():
        given = {**job.state(), "gradients": {}, "buffers": {}}
        segments = [pair for pairs in zip(dobb.segments, dobb.shards, strict=True) for pair in zip(*pairs, strict=True)]
        parameters = dict(job.inner_model.named_parameters())
        for segment, shard in segments:
            flat = parameters[segment.name].main_grad.flatten()
            given["gradients"][segment.name] = shard.grad.clone()
            given["buffers"][segment.name] = flat[segment.shard.start : segment.shard.end].clone()
        given["starts"] = {segment.name: segment.shard.start for segment, _ in segments}
        given["loss_scale"] = float(job.optimizer.get_loss_scale())
        given["before"] = job.weights()
        done = step_with_ready_grads()
        job.notes.append((given, job.state(), {n: w.detach().clone() for n, w in parameters.items()}, masters(job)))
        return done

    dobb.step_with_ready_grads = recorded


def masters(job):
    """This rank's fp32 shards of all parameters, AdamW's too: (start, values) by name."""
    dobb, found = job.dobb, {}
    name_of = {id(p): name for name, p in job.inner_model.named_parameters()}
    pairs = zip(
        [*dobb.model_float16_groups, *dobb.model_fp32_groups],
        [*dobb.shard_fp32_from_float16_groups, *dobb.shard_fp32_groups],
        strict=True,
    )
    for model_group, shard_group in pairs:
        for parameter, shard in zip(model_group, shard_group, strict=True):
            place = dobb._get_model_param_range_map(parameter)["param"]
            found[name_of[id(parameter)]] = (place.start, shard.detach().clone())
    return found


@functools.cache
def trained(case):
    return train([*TRAINING, *CASES[case].split(), *DOBB], prepare=record)


def whole(ranks, kind, name, shape, state=0):
    """`[m, n]` values of a weight from both ranks' shards, in float64."""
    flat = torch.full((math.prod(shape),), torch.nan, dtype=torch.float64)
    for rank in ranks:
        if name in rank[0]["starts"]:
            start, values = rank[0]["starts"][name], rank[state][kind][name].flatten()
            flat[start : start + len(values)] = values.double()
    assert not flat.isnan().any()
    return flat.view(shape)


def bases_of(ranks, name):
    """`[B, b, b]` in float64."""
    blocks = {key: basis for _, after, *_ in ranks for key, basis in after["bases"].items() if key[0] == name}
    return torch.stack([blocks[name, number] for number in range(BLOCKS)]).double()


@every_case
def test_one_step_is_the_formula_of_its_gradients_in_float64(case):
    compared = flips = 0
    for step in range(STEPS):
        ranks = [rank.notes[step] for rank in trained(case)]
        for name in ranks[0][1]["masters"].keys() | ranks[1][1]["masters"].keys():
            m, n = shape = ranks[0][2][name].shape
            gradient, momentum = (whole(ranks, kind, name, shape) for kind in ("gradients", "momentum"))
            momentum = MOMENTUM * momentum + (1 - MOMENTUM) * gradient
            by_block = momentum.view(m, BLOCKS, -1)
            basis = bases_of(ranks, name)
            coefficients = torch.einsum("rjc,jck->rjk", by_block, basis)
            direction = torch.einsum("rjk,jck->rjc", coefficients.sign(), basis).reshape(m, n) / math.sqrt(m)
            length = RATE * UPDATE_SCALE * math.sqrt(max(m, n) / m)
            weight = whole(ranks, "masters", name, shape)
            weight = (1 - RATE * DECAY) * weight - RATE * UPDATE_SCALE * math.sqrt(max(m, n)) * direction
            error = (whole(ranks, "masters", name, shape, state=1) - weight).abs() / length
            unsure = coefficients.abs() < FLIP_BOUND * by_block.square().mean(-1, keepdim=True).sqrt()
            sure = ~unsure.any(-1).repeat_interleave(n // BLOCKS, dim=1)
            assert error[sure].max() < TOLERANCE * (1 + weight.abs().max() / length)
            new = whole(ranks, "momentum", name, shape, state=1)
            assert (new - momentum).abs().max() <= 2**-22 * momentum.abs().max()
            compared += int(sure.sum())
            flips += int((~sure).sum())
    assert flips < 0.01 * compared


@every_case
def test_gradients_of_the_update_are_the_reduced_ones_without_the_loss_scale_in_fp32(case):
    reduced_in = {"bf16 gradients": torch.bfloat16, "fp16": torch.float16}.get(case, torch.float32)
    for rank in trained(case):
        for given, *_ in rank.notes:
            for name, gradient in given["gradients"].items():
                buffer = given["buffers"][name]
                assert (gradient.dtype, buffer.dtype) == (torch.float32, reduced_in)
                # The scale is a power of two. It may have grown right before the step, but not in five of them.
                assert torch.equal(gradient * given["loss_scale"], buffer.float())
                assert gradient.any()


@every_case
def test_model_weights_on_both_ranks_are_the_rounded_masters(case):
    """After the last step, when all gathers are done. Both optimizers' parameters."""
    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(case, torch.bfloat16)
    first, second = trained(case)
    covered = dict.fromkeys(first.weights, 0)
    for rank in (first, second):
        for name, (start, master) in rank.notes[-1][3].items():
            assert master.dtype == torch.float32
            covered[name] += len(master)
            for weights in (first.weights, second.weights):
                part = weights[name].flatten()[start : start + len(master)]
                assert torch.equal(part, master.to(dtype).float()), name
    assert covered == {name: weight.numel() for name, weight in first.weights.items()}
    assert first.notes[-1][2]["decoder.layers.0.mlp.linear_fc1.weight"].dtype == dtype
    if dtype != torch.float32:
        rounded = [not torch.equal(m, m.to(dtype).float()) for _, m in first.notes[-1][3].values()]
        assert all(rounded), "the masters hold no more than the model"
