"""Compare Dobb's kernels with float64 on small blocks, for the doctor."""

import torch

from ...sharding.segment import Segment
from ...sharding.shard import Shard
from . import kernels, update

ROWS, BLOCKS, WIDTH = 64, 3, 48
LR, DECAY, MU, TAU = 0.1, 0.1, 0.95, 0.2
MOST_ERROR = 1e-4
"""Elementwise tolerance on `|Q^T Q - I|` of a basis."""


def update_problem(device: torch.device) -> str | None:
    """Compare one update of a small weight with float64; None if they agree."""
    generator = torch.Generator().manual_seed(1)
    columns, shape, eps = BLOCKS * WIDTH, (ROWS, BLOCKS, WIDTH), torch.finfo(torch.float32).eps
    basis = torch.linalg.qr(torch.randn(BLOCKS, WIDTH, WIDTH, generator=generator)).Q.bfloat16()
    before, momentum, gradient = (torch.randn(ROWS * columns, generator=generator) for _ in range(3))
    weight, new_momentum = before.clone().to(device), momentum.clone().to(device)
    shard = Shard(0, ROWS * columns, columns, WIDTH)
    segment = Segment("self-test", shard, ROWS, columns, weight, new_momentum, basis.to(device))
    pending = kernels.update(
        [segment],
        [gradient.to(device)],
        learning_rate=LR,
        weight_decay=DECAY,
        momentum=MU,
        nesterov=False,
        update_scale=TAU,
    )
    kernels.check(pending)
    wide = basis.double()
    moved = (MU * momentum.double() + (1 - MU) * gradient.double()).view(shape)
    if float((new_momentum.cpu().view(shape) - moved).abs().max()) > 8 * eps * float(moved.abs().max()):
        return "its momentum is off by more than rounding"
    step = LR * update.step_scale(ROWS, columns, TAU) * update.direction(moved, wide)
    off = (weight.cpu().view(shape) - (1 - LR * DECAY) * before.double().view(shape) + step).abs()
    # Where rounding can turn a sign, the row tells nothing.
    doubtful = (update.project(moved, wide).abs() <= 8 * WIDTH * eps * float(moved.abs().max())).any(-1)
    worst, most = float(off[~doubtful].max()), 4 * WIDTH * eps * float(before.abs().max())
    return None if worst <= most else f"a weight is off by {worst:.1e}, and rounding explains {most:.1e}"


def refresh_problem(device: torch.device) -> str | None:
    """Check that one refresh of small bases moves them and leaves them orthonormal; None if so."""
    activations = torch.randn(BLOCKS, 4 * WIDTH, WIDTH, generator=torch.Generator().manual_seed(2)).to(device)
    moment = activations.mT @ activations / activations.shape[1]
    identity = torch.eye(WIDTH, device=device)
    start = identity.expand(BLOCKS, -1, -1).contiguous()
    basis = kernels.refresh_basis(moment, start, method="householder").basis.float()
    error, moved = float((basis.mT @ basis - identity).abs().max()), float((basis - start).abs().max())
    if error <= MOST_ERROR and moved > MOST_ERROR:
        return None
    return f"|Q^T Q - I| is {error:.1e}, and the bases moved by {moved:.1e}"
