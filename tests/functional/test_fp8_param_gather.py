"""`--fp8-param-gather` with stand-ins: the masters that Dobb updates reach the model by Megatron's quantising copy.

Fp8 parameters are classes of Transformer Engine, which needs a GPU. Here the model's matrices stay bf16 tensors,
Megatron is told that they are quantised, and its `quantize_param_shard` is replaced by one that rounds to the values of
e4m3. What is shown is which of Megatron's functions gets what; no fp8 arithmetic is.
"""

import functools

import pytest
import torch
from megatron.core.optimizer import distrib_optimizer
from pretrain_runs import ADAMW, DOBB, train

STEPS = 5
TRAINING = (
    f"--global-batch-size 8 --train-iters {STEPS} --eval-iters 0 --eval-interval 1000 --lr-decay-style constant --bf16"
).split()


def e4m3(values):
    """The nearest fp8 values; bf16 holds them exactly."""
    return values.to(torch.float8_e4m3fn).to(torch.bfloat16)


def quantise(job):
    """Stand-ins for what Transformer Engine does with the layers' matrices."""
    dobb = job.dobb
    quantised = {p: name for name, p in job.inner_model.named_parameters() if p.ndim == 2 and "layers" in name}

    def is_quantised(tensor):
        return any(tensor is parameter for parameter in quantised)

    def quantize_param_shard(parameters, masters, starts, group):
        assert torch.distributed.get_world_size(group) == 2
        seen = {}
        for parameter, master, start in zip(parameters, masters, starts, strict=True):
            if master is not None:
                parameter.data.flatten()[start : start + master.numel()].copy_(e4m3(master))
                seen[quantised[parameter]] = (master.dtype, start, master.clone())
        job.notes.append((len(parameters), seen))

    dobb.ddp_config.fp8_param_gather = True
    dobb._is_distopt_quantized_param = dobb._is_fp8_param_for_param_gather = is_quantised
    distrib_optimizer.quantize_param_shard = quantize_param_shard


@functools.cache
def trained(optimizer, flags=""):
    return train([*TRAINING, *flags.split(), *(DOBB if optimizer == "dobb" else ADAMW)], prepare=quantise)


@pytest.mark.parametrize("overlap", ["", "--overlap-grad-reduce --overlap-param-gather"], ids=["plain", "overlap"])
def test_every_step_quantises_dobbs_fp32_masters_once_and_all_ranks_gather_them(overlap):
    ranks = trained("dobb", overlap)
    masters = {name: torch.full((w.numel(),), torch.nan) for name, w in ranks[0].weights.items()}
    for rank in ranks:
        assert [count for count, _ in rank.notes] == [8] * STEPS
        for name, (dtype, start, master) in rank.notes[-1][1].items():
            assert dtype == torch.float32
            assert torch.equal(rank.state["masters"][name].flatten(), master), "a master that is not the segment's"
            assert not torch.equal(rank.notes[-2][1][name][2], master)
            masters[name][start : start + len(master)] = master
    matrices = [name for name, master in masters.items() if not master.isnan().any()]
    assert len(matrices) == 8
    for name in matrices:
        expected = e4m3(masters[name]).float()
        assert not torch.equal(expected, masters[name].bfloat16().float())
        for rank in ranks:
            assert torch.equal(rank.weights[name].flatten(), expected), name
    assert ranks[0].losses[-1] < ranks[0].losses[0]


def test_the_quantising_copy_is_called_as_with_adamw():
    for rank, plain in zip(trained("dobb"), trained("adam"), strict=True):
        assert [count for count, _ in rank.notes] == [count for count, _ in plain.notes]
        assert {n for _, seen in rank.notes for n in seen} == {n for _, seen in plain.notes for n in seen}
        assert rank.losses[0] == plain.losses[0]
