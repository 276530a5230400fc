"""A step is what its batch says, however it is cut, scaled or stored: claims about the plain optimizer."""

import math

import pytest
import torch
from small_mlp import BLOCKS, LAYERS, assert_same, backward, batch, mlp, tensors, weights
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_dobb import Dobb

WIDTH = 6


def dobb(model, **settings):
    return Dobb(model, **({"lr": 0.01, "blocks": BLOCKS, "basis_dtype": "fp32"} | settings))


def moments(*inputs):
    """`sum x_j x_j^T / tokens` for every block, in float64."""
    tokens = torch.cat([x.double().flatten(0, -2) for x in inputs]).unflatten(1, (-1, WIDTH))
    return torch.einsum("tjc,tjd->jcd", tokens, tokens) / len(tokens)


@pytest.mark.parametrize("micro_batches", [2, 4, 8])
def test_one_batch_gives_the_same_update_in_one_piece_and_in_several_micro_batches(micro_batches):
    found = []
    for parts in (1, micro_batches):
        model = mlp()
        start = weights(model)
        optimizer = dobb(model, capture="all")
        backward(model, batch(0), parts)
        optimizer.step()
        found.append({name: value - start[name] for name, value in weights(model).items() if value.ndim == 2})
    for name, whole in found[0].items():
        flips = (whole - found[1][name]).square().sum() / (4 * whole.square().mean())
        assert flips < 2.5, name  # coefficients within rounding of zero
        assert (whole - found[1][name]).abs().median() < 1e-6


def test_every_token_of_uneven_micro_batches_counts_alike():
    model = nn.Sequential(nn.Linear(24, 8))
    optimizer = dobb(model, blocks=None, block_width=WIDTH, capture="all")
    parts = [batch(0, 1)[:, :5], batch(1, 5), batch(2, 2)[:, :17]]
    for part in parts:
        model(part).square().mean().backward()
    optimizer.step()
    found = tensors(optimizer, "0")["moment"].double()
    torch.testing.assert_close(found, 0.05 * moments(*parts), rtol=1e-5, atol=1e-7)
    mean_of_means = 0.05 * sum(moments(part) for part in parts) / 3
    assert (found - mean_of_means).abs().max() > 1e-3 * mean_of_means.max(), "the test would see no difference"


@pytest.mark.parametrize("power", [-60, 40])
def test_gradients_clipped_to_next_to_nothing_move_weights_as_far_as_others(power):
    """Signs know no scale, and no epsilon stands in the way. Powers of two change no bit of the mantissa."""
    found = []
    for scale in (1.0, 2.0**power):
        model = mlp()
        optimizer = dobb(model)
        for step in range(3):
            optimizer.zero_grad()
            backward(model, batch(step))
            for name in LAYERS:
                getattr(model, name).weight.grad *= scale
            for parameter in model.parameters():  # what AdamW would do with them is not the question
                if parameter.ndim < 2:
                    parameter.grad = None
            optimizer.step()
        found.append(weights(model))
    assert_same(found[0], found[1])


def test_rows_without_a_gradient_stay_where_weight_decay_leaves_them():
    model = nn.Linear(24, 8, bias=False)
    start = model.weight.detach().clone()
    optimizer = dobb(model, blocks=4, weight_decay=0.1)
    (model(batch(0)) * torch.tensor([0.0, 1, 1, 0, 1, 1, 1, 1])).square().sum().backward()
    optimizer.step()
    assert torch.equal(model.weight[[0, 3]], start[[0, 3]] * (1 - 0.01 * 0.1))
    assert not torch.equal(model.weight[1], start[1] * (1 - 0.01 * 0.1))


@pytest.mark.parametrize("parts", [[24, 24, 24], [24, 8, 8], [48, 12, 12]], ids=str)
def test_fused_and_split_weights_differ_in_scale_alone_and_only_where_a_part_has_fewer_rows_than_columns(parts):
    """A fused QKV of ordinary and of grouped-query attention: no rule is needed to split it."""
    torch.manual_seed(0)
    columns, rows = 24, sum(parts)
    fused = nn.Linear(columns, rows, bias=False)
    split = nn.ModuleList(nn.Linear(columns, m, bias=False) for m in parts)
    with torch.no_grad():
        for layer, part in zip(split, fused.weight.split(parts), strict=True):
            layer.weight.copy_(part)
    start = fused.weight.detach().clone()
    split.forward = lambda x: torch.cat([layer(x) for layer in split], dim=-1)
    for model in (fused, split):
        optimizer = dobb(model, blocks=4, weight_decay=0.0)
        model(batch(0)).sin().square().sum().backward()
        optimizer.step()
    whole = math.sqrt(max(rows, columns) / rows)
    for layer, m, first, after in zip(split, parts, start.split(parts), fused.weight.split(parts), strict=True):
        ratio = math.sqrt(max(m, columns) / m) / whole
        assert (ratio > 1) == (m < columns)
        torch.testing.assert_close(layer.weight - first, ratio * (after - first), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_weight_that_two_recomputed_layers_share_is_captured_once_for_each(reentrant):
    first, second = nn.Linear(24, 24), nn.Linear(24, 24)
    second.weight = first.weight
    seen = []
    for layer in (first, second):
        layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    model = nn.Sequential(first, second)
    model.forward = lambda x: checkpoint(
        second, checkpoint(first, x, use_reentrant=reentrant).sin(), use_reentrant=reentrant
    )
    optimizer = dobb(model, blocks=None, block_width=WIDTH)
    model(batch(0).requires_grad_()).square().mean().backward()
    assert len(seen) == 4, "the layers must really run again in the backward pass"
    assert optimizer._capture.sums["0.weight"].tokens == 2 * batch(0)[..., 0].numel()
    optimizer.step()
    found = tensors(optimizer, "0")["moment"].double()
    torch.testing.assert_close(found, 0.05 * moments(*seen[:2]), rtol=1e-5, atol=1e-7)


def test_casting_the_model_later_touches_no_state():
    model = mlp()
    optimizer = dobb(model)
    backward(model, batch(0))
    optimizer.step()
    before = {name: tensors(optimizer, name) for name in LAYERS}
    model.bfloat16()
    assert_same({name: tensors(optimizer, name) for name in LAYERS}, before)
    assert all(t.dtype == torch.float32 for state in before.values() for t in state.values())
    assert not list(model.buffers())
