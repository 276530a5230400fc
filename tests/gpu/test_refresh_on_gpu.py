"""The refresh of the bases on a GPU: orthonormal for every kind of moment, by every method."""

import pytest
import torch

from megatron_dobb.methods.dobb.orthogonalize import MAX_ERROR, refresh_basis

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

KINDS = ["decay", "few tokens", "one token", "dead features", "zero", "tiny", "huge", "mean"]


def moment_of(kind, width):
    generator = torch.Generator(device="cuda").manual_seed(width)
    x = torch.randn(4 * width, width, generator=generator, device="cuda")
    if kind == "decay":
        x *= torch.arange(1, width + 1, device="cuda").pow(-3.0)
    elif kind == "few tokens":
        x = x[: width // 4]
    elif kind == "one token":
        x = x[:1]
    elif kind == "dead features":
        x[:, ::4] = 0
    elif kind == "zero":
        x.zero_()
    elif kind == "mean":
        x += 30
    scale = {"tiny": 1e-30, "huge": 1e30}.get(kind, 1.0)
    return x.mT @ x / len(x) * scale


@pytest.mark.parametrize("method", ["householder", "cholesky", "eigh"])
@pytest.mark.parametrize("width", [48, 100, 192, 400])
@pytest.mark.parametrize("tf32", [False, True])
def test_every_basis_is_orthonormal(method, width, tf32):
    moments = torch.stack([moment_of(kind, width) for kind in KINDS])
    bases = torch.eye(width, device="cuda").expand_as(moments).contiguous()
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        for _ in range(3):
            refreshed = refresh_basis(moments, bases, method=method)
            bases = refreshed.basis
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    identity = torch.eye(width, device="cuda", dtype=torch.float64)
    error = (bases.double().mT @ bases.double() - identity).abs().amax(dim=(1, 2))
    assert (error <= MAX_ERROR * 1.01).all(), dict(zip(KINDS, error.tolist(), strict=True))
