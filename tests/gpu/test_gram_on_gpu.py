"""The CUDA kernel of the second moments on a GPU, against float64."""

import pytest
import torch

from megatron_dobb.kernels import extension
from megatron_dobb.methods.dobb import kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(not extension.runs_on("cuda"), reason=f"no CUDA kernels: {extension.why_not('cuda')}"),
]


def error_bound(x):
    """What sums of |x x^T| allow at 1e-5 relative, for each block."""
    return 1e-5 * (x.abs().double().mT @ x.abs().double()) + 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "features", "width"),
    [(8192, 4096, 256), (4096, 3584, 896), (1000, 700, 100), (300, 64, 1), (77, 21, 7), (0, 128, 64)],
)
def test_gram_on_a_gpu_adds_the_sums_that_float64_gives(dtype, tokens, features, width):
    x = torch.randn(tokens, features + 8, device="cuda").to(dtype)[:, 8:]
    total = torch.zeros(features // width, width, width, device="cuda")
    torch.ops.dobb.gram_(total, x, width)
    by_block = x.unflatten(1, (-1, width)).transpose(0, 1)
    expected = by_block.double().mT @ by_block.double()
    assert ((total - expected).abs() <= error_bound(by_block)).all()
    assert torch.equal(total, total.mT)


def test_gram_on_a_gpu_gives_the_same_bits_again():
    x = torch.randn(5000, 512, device="cuda").bfloat16()
    totals = torch.zeros(20, 4, 128, 128, device="cuda")
    for total in totals:
        kernels.gram_(total, x, 128)
    assert (totals == totals[0]).all()


def test_gram_on_a_gpu_can_be_captured_in_a_graph():
    x = torch.randn(300, 128, device="cuda").bfloat16()
    total = torch.zeros(2, 64, 64, device="cuda")
    kernels.gram_(total, x, 64)
    once = total.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.gram_(total, x, 64)
    total.zero_()
    graph.replay()
    assert torch.equal(total, once)


def test_gram_on_a_gpu_names_a_wrong_argument():
    x, total = torch.zeros(5, 6, device="cuda"), torch.zeros(2, 3, 3, device="cuda")
    with pytest.raises(ValueError, match="activations is Float, expected bf16 or fp16 on a GPU"):
        torch.ops.dobb.gram_(total, x, 3)
    with pytest.raises(ValueError, match="total is on cuda:0, expected cpu, like activations"):
        torch.ops.dobb.gram_(total, x.bfloat16().cpu(), 3)
