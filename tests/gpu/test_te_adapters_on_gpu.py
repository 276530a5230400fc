"""Transformer Engine's own layers on a GPU: what is captured is the moment of the tensor that multiplied the weight.

That tensor stays inside the fused kernels. But a linear layer shows it: with the identity as its weight, its output is
what multiplied the weight. So every layer runs once with the identity, and the moment of its output is the truth.
"""

import os

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine as te
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from torch import nn

from megatron_dobb.megatron.model.adapters import SEQUENCE_DIM, find
from megatron_dobb.methods.dobb.capture import Capture, Source

pytestmark = pytest.mark.gpu  # conftest.py leaves this file out where it cannot be imported

LENGTH, BATCH, FEATURES, WIDTH = 32, 4, 64, 16
NORMS = [("LayerNorm", False), ("LayerNorm", True), ("RMSNorm", False), ("RMSNorm", True)]


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def config_of(dtype, **settings):
    return TransformerConfig(
        num_layers=1,
        hidden_size=FEATURES,
        num_attention_heads=4,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        gradient_accumulation_fusion=False,
        **settings,
    )


def make(kind, config):
    common = {"config": config, "init_method": nn.init.normal_, "bias": False, "skip_bias_add": False}
    group = parallel_state.get_tensor_model_parallel_group()
    if kind is te.TELinear:
        return kind(FEATURES, FEATURES, parallel_mode="duplicated", skip_weight_param_allocation=False, **common)
    if kind is te.TERowParallelLinear:
        return kind(FEATURES, FEATURES, input_is_parallel=True, is_expert=False, tp_group=group, **common)
    return kind(FEATURES, FEATURES, gather_output=False, is_expert=False, tp_group=group, **common)


def capture_once(layer, call, names):
    adapter = find(layer)
    assert adapter is not None
    assert adapter.refusal(layer) is None
    assert list(adapter.weights(layer)) == names
    geometry = adapter.geometry(layer)
    assert (geometry.rows, geometry.columns, geometry.column_shards) == (FEATURES, FEATURES, 1)
    sources = [
        Source(
            name,
            layer,
            WIDTH,
            lambda module, args, kwargs, name=name: adapter.activation(module, args, kwargs, name),
            SEQUENCE_DIM,
            batch=None,
        )
        for name in names
    ]
    capture = Capture(layer, sources, None)
    capture.begin(armed=True)
    output, _ = call()
    sums = capture.take()
    capture.remove()
    return sums, output.detach()


def assert_moment(entry, multiplied, tolerance):
    rows = multiplied.reshape(-1, FEATURES)
    assert entry.tokens == len(rows)
    blocks = rows.double().unflatten(1, (-1, WIDTH))
    exact = torch.einsum("tjc,tjd->jcd", blocks, blocks)
    error = (entry.total.double() - exact).abs().max() / exact.abs().max()
    print(f"relative error {error:.1e}")
    assert error <= tolerance


def identity_(weight):
    with torch.no_grad():
        weight.copy_(torch.eye(FEATURES))


def batch(dtype):
    x = torch.randn(LENGTH, BATCH, FEATURES, generator=torch.Generator().manual_seed(0))
    return (x + 0.3).to("cuda", dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", [te.TELinear, te.TEColumnParallelLinear, te.TERowParallelLinear])
def test_linear_layers_are_captured_with_what_they_multiply(kind, dtype):
    layer, x = make(kind, config_of(dtype)), batch(dtype)
    identity_(layer.weight)
    sums, output = capture_once(layer, lambda: layer(x), ["weight"])
    assert_moment(sums["weight"], output, 1e-2 if dtype == torch.bfloat16 else 1e-3)  # fp32 products may be TF32
    assert_moment(sums["weight"], x.detach(), 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("norm", "zero_centred"), NORMS)
def test_fused_norms_are_captured_with_the_normalised_input(norm, zero_centred, dtype):
    config = config_of(dtype, normalization=norm, layernorm_zero_centered_gamma=zero_centred)
    layer, x = make(te.TELayerNormColumnParallelLinear, config), batch(dtype)
    identity_(layer.weight)
    with torch.no_grad():
        layer.layer_norm_weight.add_(0.3 * torch.randn_like(layer.layer_norm_weight))
        if layer.layer_norm_bias is not None:
            layer.layer_norm_bias.add_(0.3 * torch.randn_like(layer.layer_norm_bias))
    sums, output = capture_once(layer, lambda: layer(x), ["weight"])
    # Rounding to bf16 at the last bit may fall the other way in the kernel.
    assert_moment(sums["weight"], output, 1e-2 if dtype == torch.bfloat16 else 1e-3)
    with pytest.raises(AssertionError):
        assert_moment(sums["weight"], x.detach(), 1e-2)


@pytest.mark.parametrize("kind", [te.TEColumnParallelGroupedLinear, te.TERowParallelGroupedLinear])
def test_grouped_experts_are_captured_one_by_one_also_without_a_token(kind):
    splits = [5, 0, 1, 26]
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layer = kind(
        len(splits),
        FEATURES,
        FEATURES,
        config=config_of(torch.bfloat16, num_moe_experts=len(splits), add_bias_linear=False),
        init_method=nn.init.normal_,
        bias=False,
        skip_bias_add=False,
        is_expert=True,
        pg_collection=groups,
    )
    names = [f"weight{expert}" for expert in range(len(splits))]
    for name in names:
        identity_(getattr(layer, name))
    x = batch(torch.bfloat16).detach()[:, 0].requires_grad_()
    adapter = find(layer)
    parts = {}
    layer.register_forward_hook(
        lambda module, args, kwargs, output: parts.update(
            {name: adapter.activation(module, args, kwargs, name).detach() for name in names}
        ),
        with_kwargs=True,
    )
    output, _ = layer(x, splits)
    assert [len(parts[name]) for name in names] == splits
    torch.testing.assert_close(torch.cat([parts[name] for name in names]), output.detach())
    geometry = adapter.geometry(layer)
    assert (geometry.rows, geometry.columns, geometry.column_shards) == (FEATURES, FEATURES, 1)


def test_fp8_layers_are_captured_before_quantisation():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with fp8")
    import transformer_engine.pytorch as transformer_engine
    from transformer_engine.common.recipe import DelayedScaling

    layer, x = make(te.TEColumnParallelLinear, config_of(torch.bfloat16)), batch(torch.bfloat16)
    identity_(layer.weight)
    with transformer_engine.fp8_autocast(enabled=True, fp8_recipe=DelayedScaling()):
        sums, output = capture_once(layer, lambda: layer(x), ["weight"])
    assert_moment(sums["weight"], x.detach(), 1e-5)
    assert_moment(sums["weight"], output, 0.1)
