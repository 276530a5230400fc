"""What adapters make of the inputs of quantising layers: values, and no rows that only fill up an expert's share."""

import sys
import types

import pytest
import torch
from torch import nn

from megatron_dobb.megatron.model.adapters.base import dequantized, imported_class, without_padding
from megatron_dobb.megatron.model.adapters.local import ColumnParallel
from megatron_dobb.megatron.model.adapters.transformer_engine import Column, GroupedColumn, LayerNormColumn, normalized


def layer_of(**attributes):
    return types.SimpleNamespace(**({"config": types.SimpleNamespace(fp8=None, fp4=None)} | attributes))


QUANTISING = [{"fp8": "e4m3", "fp4": None}, {"fp8": None, "fp4": "e2m1"}]


def padded(tokens, rows):
    """`[rows, 4]`: tokens of ones, with a zero token in their middle, then padding."""
    x = torch.zeros(rows, 4)
    x[:tokens] = 1.0
    if tokens > 2:
        x[1] = 0.0
    return x


@pytest.mark.parametrize("tokens", [0, 1, 3, 16])
def test_only_the_zero_rows_at_the_end_are_padding(tokens):
    assert torch.equal(without_padding(padded(tokens, 16)), padded(tokens, 16)[:tokens])


@pytest.mark.parametrize("config", QUANTISING)
@pytest.mark.parametrize("adapter", [ColumnParallel(), Column()])
def test_padding_of_a_quantised_expert_is_left_out(adapter, config):
    layer = layer_of(is_expert=True, config=types.SimpleNamespace(**config))
    assert torch.equal(adapter.activation(layer, (padded(3, 16),), {}, "weight"), padded(3, 3))


@pytest.mark.parametrize("adapter", [ColumnParallel(), Column()])
def test_zero_rows_of_an_expert_that_does_not_quantise_are_tokens(adapter):
    assert len(adapter.activation(layer_of(is_expert=True), (padded(3, 16),), {}, "weight")) == 16


@pytest.mark.parametrize("adapter", [ColumnParallel(), Column()])
def test_zero_rows_of_a_layer_that_is_no_expert_are_tokens(adapter):
    layer = layer_of(is_expert=False, config=types.SimpleNamespace(fp8="e4m3"))
    x = padded(3, 16)[:, None]
    assert adapter.activation(layer, (x,), {}, "weight") is x


@pytest.mark.parametrize("splits", [[16, 0, 32], torch.tensor([16, 0, 32])], ids=["list", "tensor"])
@pytest.mark.parametrize("by_keyword", [False, True])
def test_grouped_experts_get_their_rows_without_padding(splits, by_keyword):
    x = torch.cat([padded(3, 16), 2 * padded(20, 32)])
    args, kwargs = ((x,), {"m_splits": splits}) if by_keyword else ((x, splits), {})
    for config, rows in (({"fp8": "e4m3"}, [3, 0, 20]), ({"fp8": None}, [16, 0, 32])):
        layer = layer_of(config=types.SimpleNamespace(**config))
        found = [GroupedColumn().activation(layer, args, kwargs, f"weight{i}") for i in range(3)]
        assert [len(part) for part in found] == rows
        assert torch.equal(found[0], padded(3, rows[0]))
        assert torch.equal(found[2], 2 * padded(20, rows[2]))


def test_experts_whose_weights_share_one_tensor_are_refused_by_name():
    layer = nn.Module()
    layer.num_gemms, layer.single_grouped_weight = 2, True
    layer.weight = nn.Parameter(torch.zeros(2, 4, 4))
    assert GroupedColumn().weights(layer) == {}
    assert GroupedColumn().refusal(layer) == "experts' weights in one tensor"


def test_a_quantised_input_is_captured_by_its_values(monkeypatch):
    class QuantizedTensor(torch.Tensor):
        def dequantize(self):
            return self.as_subclass(torch.Tensor) * 2

    module = types.ModuleType("transformer_engine.pytorch.quantized_tensor")
    module.QuantizedTensor = QuantizedTensor
    monkeypatch.setitem(sys.modules, module.__name__, module)
    x = torch.ones(3, 2, 4)
    quantized = x.as_subclass(QuantizedTensor)
    assert type(dequantized(quantized)) is torch.Tensor
    assert torch.equal(dequantized(quantized), 2 * x)
    assert dequantized(x) is x
    assert torch.equal(Column().activation(layer_of(), (), {"x": quantized}, "weight"), 2 * x)


def test_a_mock_or_nothing_in_place_of_a_class_is_no_class(monkeypatch):
    module = types.ModuleType("made_up_layers")
    module.Nothing, module.Mock, module.Class = None, object(), nn.Linear
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert imported_class("made_up_layers:Class") is nn.Linear
    assert [imported_class(f"made_up_layers:{name}") for name in ("Nothing", "Mock", "Absent")] == [None] * 3


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centred", [False, True])
def test_a_fused_norm_is_computed_in_fp32_and_rounded_to_the_activations_type(kind, zero_centred):
    generator = torch.Generator().manual_seed(0)
    gamma, beta = torch.randn(32, generator=generator), torch.randn(32, generator=generator)
    bias = nn.Parameter(beta) if kind == "LayerNorm" else None
    layer = layer_of(
        normalization=kind,
        eps=1e-5,
        zero_centered_gamma=zero_centred,
        layer_norm_weight=nn.Parameter(gamma),
        layer_norm_bias=bias,
        activation_dtype=torch.bfloat16,
    )
    x = 3 + torch.randn(5, 2, 32, generator=generator)
    exact = x.bfloat16().double()
    if kind == "LayerNorm":
        exact = exact - exact.mean(-1, keepdim=True)
    exact = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (gamma.double() + zero_centred)
    exact = exact + (beta.double() if bias is not None else 0)
    torch.testing.assert_close(normalized(layer, x.bfloat16().float()).double(), exact, rtol=1e-5, atol=1e-5)
    found = LayerNormColumn().activation(layer, (x,), {}, "weight")
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-5)
