"""The plain optimizer: properties of its step, and its behavior in a training loop."""

import math

import pytest
import torch
from small_mlp import BLOCKS, LAYERS, assert_same, backward, batch, mlp, tensors, train, weights
from torch import nn

from megatron_dobb import Dobb
from megatron_dobb.errors import ConfigError

# The step; test_simple.py compares it with float64.


def test_parameters_of_adamw_are_updated_as_by_torch():
    model = mlp()
    optimizer = Dobb(model, lr=0.01, weight_decay=0.1, blocks=BLOCKS, betas=(0.8, 0.9), eps=1e-6, exclude="third")
    ours = {name: p for name, p in model.named_parameters() if name not in ("first.weight", "second.weight")}
    copies = {name: nn.Parameter(p.detach().clone()) for name, p in ours.items()}
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in copies.values() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in copies.values() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.8, 0.9),
        eps=1e-6,
    )
    for step in range(5):
        optimizer.zero_grad()
        backward(model, batch(step))
        for name, p in ours.items():
            copies[name].grad = p.grad.clone()
        optimizer.step()
        adamw.step()
        for name, p in ours.items():
            assert torch.equal(p, copies[name]), name
    assert set(optimizer.on_adamw) == set(ours)


def test_update_rms_is_the_papers_up_to_zero_coefficients():
    torch.manual_seed(0)
    for rows, columns in ((24, 60), (60, 24)):
        layer = nn.Linear(columns, rows, bias=False)
        before = layer.weight.detach().clone()
        optimizer = Dobb(layer, lr=1.0, weight_decay=0.0, blocks=4, basis_dtype="fp32")
        (layer(torch.randn(200, columns)) * torch.randn(200, rows)).sum().backward()
        layer.weight.grad[:5] = 0  # rows without momentum
        optimizer.step()
        update = layer.weight.detach() - before
        assert torch.equal(update[:5], torch.zeros(5, columns))
        nonzero = (rows - 5) / rows
        expected = 0.2 * math.sqrt(max(rows, columns) / rows * nonzero)
        assert float(update.square().mean().sqrt()) == pytest.approx(expected, rel=1e-4)


def test_dead_features_stay_untouched():
    model = nn.Sequential(nn.Linear(24, 16, bias=False))
    optimizer = Dobb(model, lr=0.1, weight_decay=0.0, blocks=4, refresh_interval=2)
    dead, before = [1, 7, 8], model[0].weight.detach().clone()
    for step in range(6):
        x = batch(step)
        x[..., dead] = 0
        optimizer.zero_grad()
        model(x).sin().sum().backward()
        optimizer.step()
    changed = model[0].weight.detach() != before
    assert not changed[:, dead].any()
    alive = [i for i in range(24) if i not in dead]
    assert changed[:, alive].float().mean() > 0.99


def test_order_and_sign_of_the_basis_columns_change_nothing():
    found = []
    for rearrange in (False, True):
        model = mlp()
        optimizer = Dobb(model, lr=0.01, blocks=BLOCKS, basis_dtype="fp32")
        train(model, optimizer, range(1))
        if rearrange:
            torch.manual_seed(5)
            for name in LAYERS:
                basis = tensors(optimizer, name)["basis"]  # the live one
                width = basis.shape[-1]
                basis.copy_(basis[..., torch.randperm(width)] * torch.randint(0, 2, (width,)).mul(2).sub(1))
        train(model, optimizer, range(1, 2))
        found.append(weights(model))
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=0, atol=1e-6)


def test_low_precision_weights_are_updated_in_fp32_and_rounded_once():
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        layer = nn.Linear(24, 16, bias=False).to(torch.bfloat16).to(dtype)
        optimizer = Dobb(layer, lr=0.1, blocks=4)
        layer(torch.randn(64, 24, generator=torch.Generator().manual_seed(1)).bfloat16().to(dtype)).sum().backward()
        layer.weight.grad = torch.randn(16, 24).to(torch.bfloat16).to(dtype)
        optimizer.step()
        found[dtype] = layer.weight.detach()
        state = optimizer.state[layer.weight]
        assert state["momentum"].dtype == state["moment"].dtype == torch.float32
    assert torch.equal(found[torch.float32].to(torch.bfloat16), found[torch.bfloat16])


def test_a_weight_stored_column_by_column_is_updated_alike():
    found = []
    for transposed in (False, True):
        model = mlp()
        if transposed:
            model.first.weight = nn.Parameter(model.first.weight.detach().T.contiguous().T)
        optimizer = Dobb(model, lr=0.01, blocks=BLOCKS)
        train(model, optimizer, range(3))
        assert model.first.weight.is_contiguous() != transposed
        found.append(weights(model))
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=0, atol=1e-6)


# As any other optimizer.


def test_schedulers_change_the_rate_of_dobb_and_adamw_alike():
    model = mlp()
    optimizer = Dobb(model, lr=0.1, blocks=BLOCKS)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=10)
    for step in range(3):
        train(model, optimizer, [step])
        scheduler.step()
    assert {group["lr"] for group in optimizer.param_groups} == {scheduler.get_last_lr()[0]}
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = weights(model)
    train(model, optimizer, [3])
    assert_same(weights(model), before)


def test_closures_are_called_with_gradients_and_their_loss_returned():
    model, other = mlp(), mlp()
    optimizer, plain = Dobb(model, lr=0.01, blocks=BLOCKS), Dobb(other, lr=0.01, blocks=BLOCKS)
    for step in range(3):

        def closure(step=step):
            optimizer.zero_grad()
            backward(model, batch(step))
            return 0.5 + step

        assert optimizer.step(closure) == 0.5 + step
    train(other, plain, range(3))
    assert_same(weights(model), weights(other))


def test_step_hooks_run_once_whatever_else_made_an_adamw():
    torch.optim.AdamW(mlp().parameters())
    optimizer = Dobb(mlp(), blocks=BLOCKS)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    optimizer.step()
    assert calls == [1]


def test_added_parameters_go_to_adamw():
    model = mlp()
    optimizer = Dobb(model, lr=0.1, blocks=BLOCKS)
    more = nn.Parameter(torch.ones(4, 8))
    optimizer.add_param_group({"params": [more]})
    more.grad = torch.ones(4, 8)
    train_once = weights(model)
    optimizer.step()
    assert float(more.detach()[0, 0]) == pytest.approx(0.99 - 0.1)
    assert_same(weights(model), train_once)
    with pytest.raises(ConfigError, match="build a new one for the whole model"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4, 8))], "dobb": True})


@pytest.mark.parametrize("overflow_at", [0, 9])
def test_a_step_that_grad_scaler_skips_does_not_hold_up_the_refreshes(overflow_at):
    model = mlp()
    optimizer = Dobb(model, lr=0.01, blocks=BLOCKS, capture="all")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    attempts = 0
    for step in range(12):
        before, basis = weights(model), tensors(optimizer, "first")["basis"].clone()
        optimizer.zero_grad()
        x = batch(step)
        scaler.scale((model(x) - x[..., :10].sin()).square().mean()).backward()
        if step == overflow_at:
            model.first.bias.grad[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        if step == overflow_at:
            assert_same(weights(model), before)
            continue
        refreshed = not torch.equal(tensors(optimizer, "first")["basis"], basis)
        assert refreshed == (attempts % 9 == 0)
        if attempts == 0:  # the moment of this step's tokens alone, none of the skipped step's
            tokens = x.flatten(0, 1).double()[:, :6]
            expected = 0.05 * tokens.T @ tokens / len(tokens)
            torch.testing.assert_close(
                tensors(optimizer, "first")["moment"][0].double(), expected, rtol=1e-5, atol=1e-7
            )
        attempts += 1
    assert optimizer.attempted_steps == attempts == 11


@pytest.mark.parametrize("order", ["after forward", "never", "after step"])
def test_the_place_of_zero_grad_in_the_loop_does_not_matter(order):
    model, other = mlp(), mlp()
    optimizer, plain = Dobb(model, lr=0.01, blocks=BLOCKS), Dobb(other, lr=0.01, blocks=BLOCKS)
    for step in range(11):
        x = batch(step)
        loss = (model(x) - x[..., :10].sin()).square().mean()
        if order == "after forward":
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if order == "after step":
            optimizer.zero_grad()
        if order == "never":
            model.zero_grad()
    train(other, plain, range(11))
    assert_same(weights(model), weights(other))


def test_ranks_that_started_after_dobb_was_built_are_refused_at_the_first_step(monkeypatch):
    model = mlp()
    optimizer = Dobb(model, blocks=BLOCKS)
    before = weights(model)
    backward(model, batch(0))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    with pytest.raises(ConfigError, match=r"built before torch\.distributed was started, which now has 2 ranks"):
        optimizer.step()
    assert_same(weights(model), before)
    monkeypatch.undo()
    optimizer.step()
