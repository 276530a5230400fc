"""Stand-ins for what Megatron's Mamba layers take from packages that need a GPU, in plain torch.

`install` makes the mixer, which is Megatron's own, run on a CPU. The selective scan is a loop over the sequence: it
shows what Megatron and Dobb do around it, not what the real kernels do.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def install() -> None:
    """Patch Megatron's modules for this process. Call it before a model is built."""
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.ssm import mamba_context_parallel, mamba_mixer
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    patched: Any = mamba_mixer
    patched.HAVE_MAMBA_SSM = patched.HAVE_EINOPS = True
    patched.ExtendedRMSNorm = GroupNorm
    patched.rearrange = rearrange
    patched.mamba_split_conv1d_scan_combined = convolve_and_scan
    mamba_context_parallel.HAVE_EINOPS = True
    hybrid_block.TENorm = WrappedTorchNorm


class GroupNorm(nn.Module):
    """RMS norm over groups of features."""

    def __init__(self, features: int, eps: float, group_size: int, **ignored: Any) -> None:
        super().__init__()
        self.eps, self.group_size = eps, group_size
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        """`x [..., features]`."""
        groups = x.unflatten(-1, (-1, self.group_size))
        return (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)).flatten(-2) * self.weight


def rearrange(x: Tensor, pattern: str) -> Tensor:
    """The patterns of einops that the mixer uses."""
    if pattern == "d 1 w -> d w":
        return x.squeeze(1)
    if pattern in ("l b d -> b l d", "b l d -> l b d"):
        return x.transpose(0, 1)
    raise NotImplementedError(pattern)


def convolve_and_scan(
    zxbcdt: Tensor,
    weight: Tensor,
    bias: Tensor,
    dt_bias: Tensor,
    a: Tensor,
    *,
    D: Tensor,
    headdim: int,
    ngroups: int,
    **ignored: Any,
) -> Tensor:
    """Mamba 2's convolution, selective scan and gate: `[b, l, d]` to `[b, l, heads * headdim]`."""
    heads, length = len(a), zxbcdt.shape[1]
    inner = heads * headdim
    state = (zxbcdt.shape[-1] - 2 * inner - heads) // (2 * ngroups)
    z, xbc, dt = zxbcdt.split([inner, inner + 2 * ngroups * state, heads], dim=-1)
    padded = F.pad(xbc.transpose(1, 2), (weight.shape[1] - 1, 0))
    xbc = F.silu(F.conv1d(padded, weight[:, None], bias, groups=len(weight))).transpose(1, 2)
    x, b, c = xbc.split([inner, ngroups * state, ngroups * state], dim=-1)
    x = x.unflatten(-1, (heads, headdim))
    b, c = (v.unflatten(-1, (ngroups, state)).repeat_interleave(heads // ngroups, dim=2) for v in (b, c))
    dt = F.softplus(dt + dt_bias)
    hidden = x.new_zeros(len(x), heads, headdim, state)
    outputs = []
    for place in range(length):
        step = dt[:, place]
        hidden = torch.exp(step * a)[..., None, None] * hidden
        hidden = hidden + (step[..., None] * x[:, place])[..., None] * b[:, place, :, None]
        outputs.append((hidden * c[:, place, :, None]).sum(-1) + D[:, None] * x[:, place])
    return torch.stack(outputs, dim=1).flatten(2) * F.silu(z)
