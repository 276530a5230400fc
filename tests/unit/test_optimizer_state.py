"""What the plain optimizer captures, which weights it takes, and its answers to bad input."""

import copy
import gc
import logging
import math
import pickle

import pytest
import torch
from small_mlp import BLOCKS, LAYERS, assert_same, backward, batch, mlp, tensors, train, weights
from torch import nn

from megatron_dobb import Dobb
from megatron_dobb.errors import BlockError, CaptureError, ConfigError, NonFiniteError, UnsupportedError


def dobb(model, **settings):
    return Dobb(model, lr=0.01, **{"blocks": BLOCKS, **settings})


# Capture.


def moment_after(settings, micro_batches, recompute=None, steps=1, disturb=None):
    model = mlp(recompute)
    optimizer = dobb(model, **settings)
    for step in range(steps):
        optimizer.zero_grad()
        if disturb:
            disturb(model)
        backward(model, batch(step), micro_batches)
        if disturb:
            disturb(model)
        optimizer.step()
    return [tensors(optimizer, name)["moment"] for name in LAYERS]


@pytest.mark.parametrize("settings", [{"capture": "all"}, {"capture_sequences": 3}])
def test_one_batch_of_eight_and_four_of_two_capture_the_same_tokens(settings):
    for one, other in zip(moment_after(settings, 1), moment_after(settings, 4), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-8)


def test_captured_sequences_are_the_first_of_the_batch():
    for settings, micro_batches, count in (
        ({"capture": "all"}, 4, 8),
        ({"capture_sequences": 3}, 4, 3),
        ({}, 4, 2),
        ({}, 1, 8),
    ):
        x = batch(0)[:count].double().flatten(0, 1)[:, :6]
        found = moment_after(settings, micro_batches)[0][0].double()
        torch.testing.assert_close(found, 0.05 * x.T @ x / len(x), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("recompute", ["reentrant", "non-reentrant"])
def test_recomputed_layers_are_captured_once(recompute):
    assert_same(moment_after({"capture": "all"}, 2, recompute), moment_after({"capture": "all"}, 2))


@pytest.mark.parametrize("mode", ["eval", "no_grad"])
def test_validation_is_neither_captured_nor_counted(mode):
    @torch.no_grad()
    def validate(model):
        model.train(mode != "eval")
        model(100 * batch(50))
        model.train()

    assert_same(moment_after({}, 2, disturb=validate), moment_after({}, 2))


def test_a_weight_with_several_uses_adds_them_all():
    shared, twice = nn.Linear(24, 24, bias=False), nn.Linear(24, 24, bias=False)
    model = nn.Sequential(shared, twice, twice, nn.Linear(24, 24, bias=False))
    model[3].weight = shared.weight
    seen = {}
    for i in (0, 1, 2, 3):
        model[i].register_forward_pre_hook(lambda m, args: seen.setdefault(m, []).append(args[0].detach()))
    optimizer = dobb(model, blocks=1)
    assert list(optimizer.on_dobb) == ["0.weight", "1.weight"]
    model(batch(0)).square().mean().backward()
    optimizer.step()
    for name, inputs in (("0", seen[shared] + seen[model[3]]), ("1", seen[twice])):
        x = torch.cat(inputs).double().flatten(0, -2)
        found = tensors(optimizer, name)["moment"][0].double()
        torch.testing.assert_close(found, 0.05 * x.T @ x / len(x), rtol=1e-5, atol=1e-7)


def test_a_layer_that_sees_flattened_tokens_takes_the_same_sequences():
    class Flattening(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(24, 8)

        def forward(self, batch):
            return self.layer(batch["x"].flatten(0, 1))

    model = Flattening()
    optimizer = dobb(model, blocks=4, capture_sequences=3)
    for part in batch(0).chunk(4):
        model({"x": part}).square().mean().backward()
    optimizer.step()
    x = batch(0)[:3].double().flatten(0, 1)[:, :6]
    torch.testing.assert_close(tensors(optimizer, "layer")["moment"][0].double(), 0.05 * x.T @ x / len(x))


def test_a_non_finite_activation_keeps_the_basis_is_counted_and_training_goes_on(caplog):
    model = mlp()
    optimizer = dobb(model)
    train(model, optimizer, range(9))
    before = copy.deepcopy(tensors(optimizer, "second"))
    optimizer.zero_grad()
    backward(model, batch(9))
    optimizer._capture.sums["second.weight"].total[2, 3, 0] = math.nan
    with caplog.at_level(logging.WARNING, logger="megatron_dobb"):
        optimizer.step()
    after = tensors(optimizer, "second")
    for key in ("moment", "basis"):
        same = [torch.equal(a, b) for a, b in zip(after[key], before[key], strict=True)]
        assert same == [False, False, True, False, False, False]
    assert optimizer.refresh_counts.skipped == 1
    assert "refresh of step 10: 1 blocks kept their basis" in caplog.text
    train(model, optimizer, range(10, 20))
    assert all(bool(value.isfinite().all()) for value in weights(model).values())
    assert optimizer.refresh_counts.skipped == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_gradient_raises_and_changes_nothing(bad):
    model = mlp()
    optimizer = dobb(model)
    train(model, optimizer, range(9))
    optimizer.zero_grad()
    backward(model, batch(9))
    model.second.weight.grad[3, 4] = bad
    before = copy.deepcopy((weights(model), optimizer.state_dict()))
    with pytest.raises(NonFiniteError, match=r"gradient of second\.weight holds 1 non-finite of 1920"):
        optimizer.step()
    assert_same((weights(model), optimizer.state_dict()), before)
    train(model, optimizer, range(10, 12))


def test_an_unused_layer_is_left_alone_in_silence(caplog):
    model = mlp()
    model.unused = nn.Linear(24, 24)
    optimizer = dobb(model)
    before = copy.deepcopy(model.unused.state_dict())
    train(model, optimizer, range(10))
    assert_same(dict(model.unused.state_dict()), dict(before))
    assert not tensors(optimizer, "unused")["momentum"].any()
    assert optimizer.refresh_counts.skipped == 0
    assert not caplog.records


def test_a_gradient_without_activations_on_a_refresh_step_names_the_weight_and_changes_nothing():
    model = mlp()
    optimizer = dobb(model)
    model.second.eval()
    backward(model, batch(0))
    before = copy.deepcopy((weights(model), optimizer.state_dict()))
    with pytest.raises(CaptureError, match=r"of second\.weight was captured for the refresh of step 1.*training mode"):
        optimizer.step()
    assert_same((weights(model), optimizer.state_dict()), before)


# Which weights.


class Language(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.attention = nn.MultiheadAttention(16, 2)
        self.mix = nn.Parameter(torch.zeros(16, 16))
        self.convolution = nn.Conv1d(16, 16, 1)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.mlp = nn.Linear(16, 16)
        self.head = nn.Linear(16, 40, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


@pytest.mark.parametrize(
    ("tied", "exclude", "expected"),
    [
        (True, (), ["mlp.weight"]),
        (True, "head", ["mlp.weight"]),
        (False, (), ["mlp.weight", "head.weight"]),
        (False, ["head"], ["mlp.weight"]),
        (False, ["he*", "frozen"], ["mlp.weight"]),
        (False, lambda name, weight: weight.shape[0] == 40, ["mlp.weight"]),
        (False, ["mlp.weight", lambda name, weight: False], ["head.weight"]),
    ],
)
def test_dobb_takes_linear_layers_but_embeddings_tied_outputs_and_what_is_excluded(tied, exclude, expected):
    model = Language(tied)
    optimizer = dobb(model, blocks=2, exclude=exclude)
    assert list(optimizer.on_dobb) == expected
    everything = {name for name, p in model.named_parameters() if p.requires_grad}
    assert everything == {*optimizer.on_dobb, *optimizer.on_adamw}
    assert optimizer.on_adamw["attention.out_proj.weight"].startswith("weight that nn.MultiheadAttention")
    listed = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(listed) == len({id(p) for p in listed}) == len(everything)
    for group in optimizer.param_groups:
        assert all((p.ndim < 2) == (group["weight_decay"] == 0) for p in group["params"])


def test_an_output_layer_that_a_model_names_goes_to_adamw():
    model = Language(tied=False)
    model.get_output_embeddings = lambda: model.head
    assert list(dobb(model, blocks=2).on_dobb) == ["mlp.weight"]


def test_an_untied_layer_of_an_embeddings_shape_is_pointed_out(caplog):
    optimizer = dobb(Language(tied=False), blocks=2)
    assert "head.weight has the shape of an embedding, 40 x 16" in caplog.text
    text = optimizer.describe()
    assert text == repr(optimizer)
    assert "Dobb: 2 matrices, 896 elements" in text
    assert "1 embedding: embedding.weight" in text
    assert "frozen: 2" in text


# Bad input.


@pytest.mark.parametrize(
    ("error", "message", "settings"),
    [
        (
            BlockError,
            r"third\.weight: blocks=6 does not divide its 32 input features; use one of .*4, 8",
            {"blocks": 6},
        ),
        (BlockError, r"first\.weight: block_width=16 does not divide its 24", {"blocks": None, "block_width": 16}),
        (ConfigError, "blocks=4 and block_width=8 exclude each other", {"blocks": 4, "block_width": 8}),
        (ConfigError, "exclude='forth' matches no weight", {"exclude": "forth"}),
        (ConfigError, "blocks_for='forth' matches no weight", {"blocks": {"*": 4, "forth": 2}}),
        (ConfigError, "moment_dtype=torch.float16 is unknown; use one of fp32, bf16", {"moment_dtype": torch.float16}),
        (ConfigError, "momentum=1.0 must be at least 0 and below 1", {"momentum": 1.0}),
        (ConfigError, "qr='lu' is unknown; use one of householder", {"qr": "lu"}),
        (
            ConfigError,
            "manages no weight of this Mlp.*3 excluded: first.weight.*Use torch.optim.AdamW",
            {"exclude": "*"},
        ),
        (TypeError, "no setting block, refresh; those of Dobb's own are .*block_width", {"block": 4, "refresh": 3}),
        (ValueError, "Invalid learning rate", {"lr": -1.0}),
    ],
)
def test_bad_settings_are_refused_by_name_and_leave_no_hooks(error, message, settings):
    model = mlp()
    with pytest.raises(error, match=message):
        Dobb(model, **{"blocks": BLOCKS, **settings})
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    dobb(model)


def test_bad_models_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"takes the model itself, not generator: Dobb\(model"):
        dobb(mlp().parameters())
    with pytest.raises(UnsupportedError, match="use DistributedDataParallel"):
        dobb(nn.DataParallel(mlp()))
    with pytest.raises(ConfigError, match=r"0\.weight has no shape yet: run the model once"):
        dobb(nn.Sequential(nn.LazyLinear(8)))
    model = mlp()
    optimizer = dobb(model)
    backward(model, batch(0))
    optimizer._momentum["first.weight"] = optimizer._momentum["first.weight"].to("meta")
    with pytest.raises(ConfigError, match=r"first\.weight moved to cpu after Dobb was built on meta"):
        optimizer.step()


def test_a_model_has_one_dobb_at_a_time():
    model = mlp()
    optimizer = dobb(model)
    for part in (model, nn.Sequential(model.second)):
        with pytest.raises(ConfigError, match=r"weight already belongs to another Dobb.*remove_hooks\(\)"):
            dobb(part, blocks=4)
    optimizer.remove_hooks()
    backward(model, batch(0))
    with pytest.raises(CaptureError, match=r"remove_hooks\(\) was called"):
        optimizer.step()
    second = dobb(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(second, lambda step: 1.0)
    del optimizer, second, scheduler
    third = dobb(model)
    train(model, third, range(1))
    del third
    gc.collect()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_is_free_of_the_optimizer(duplicate):
    model = mlp()
    optimizer = dobb(model)
    twin = duplicate(model)
    twin(100 * batch(3))
    assert not any(entry.tokens for entry in optimizer._capture.sums.values())
    train(twin, dobb(twin), range(2))
    train(model, optimizer, range(2))
    assert_same(weights(twin), weights(model))
    with pytest.raises(UnsupportedError, match="build another one for the copy of the model"):
        copy.deepcopy(optimizer)
