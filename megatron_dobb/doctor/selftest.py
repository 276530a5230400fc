"""The self-test: small blocks through the same doors as training, against float64."""

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..kernels import dispatch, extension
from ..methods.dobb import kernels as ops
from ..methods.dobb import update
from ..pytorch.dobb import Dobb
from ..sharding.segment import Segment, Shard
from .findings import Finding

ROWS, BLOCKS, WIDTH = 64, 3, 48
LR, DECAY, MU, TAU = 0.1, 0.1, 0.95, 0.2
EPS = torch.finfo(torch.float32).eps
MOST_ERROR = 1e-4
"""Of a basis: `|Q^T Q - I|`, elementwise."""


def kernels() -> Iterator[Finding]:
    """One update on every kind of device that is here."""
    for device in _devices():
        name, remedy = f"plain PyTorch on {device}", "please report it"
        if device == "cuda":
            remedy = f"unset NVIDIA_TF32_OVERRIDE and TORCH_ALLOW_TF32_CUBLAS_OVERRIDE if they are set, else {remedy}"
        if extension.runs_on(device):
            name = dispatch.kernel_name(torch.device(device))
            remedy = "train with --dobb-backend reference, and please report it"
        problem = update_error(device)
        if problem is None:
            yield Finding("self-test", "ok", f"the update by {name} agrees with float64")
        else:
            yield Finding("self-test", "failure", f"the update by {name} is wrong: {problem}", remedy)


def update_error(device: str) -> str | None:
    """What is wrong with one update of a small weight, compared with `reference` in float64; None if nothing is."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    columns = BLOCKS * WIDTH
    shard = Shard(0, ROWS * columns, columns, WIDTH)
    basis = torch.linalg.qr(draw(BLOCKS, WIDTH, WIDTH)).Q.bfloat16()
    before, momentum, gradient = (draw(ROWS * columns) for _ in range(3))
    segment = Segment(
        "self-test",
        shard,
        ROWS,
        columns,
        weight=before.clone().to(device),
        momentum=momentum.clone().to(device),
        basis=basis.to(device),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the extension is missing is a finding of its own
        pending = ops.update(
            [segment],
            [gradient.to(device)],
            learning_rate=LR,
            weight_decay=DECAY,
            momentum=MU,
            nesterov=False,
            update_scale=TAU,
        )
        ops.check(pending)
    after, new_momentum = segment.weight.cpu().double(), segment.momentum.cpu().double()

    shape = (ROWS, BLOCKS, WIDTH)
    wide = basis.double()
    expected_momentum = MU * momentum.double() + (1 - MU) * gradient.double()
    size = momentum.double().abs() + gradient.double().abs()
    if not bool(((new_momentum - expected_momentum).abs() <= 4 * EPS * size).all()):
        return "its momentum is off by more than rounding"
    coefficients = update.project(expected_momentum.view(shape), wide)
    # Where rounding can turn a sign, the row tells nothing.
    doubtful = coefficients.abs() <= 8 * WIDTH * EPS * update.project(size.view(shape), wide.abs())
    step = LR * update.step_scale(ROWS, columns, TAU) * update.direction(expected_momentum.view(shape), wide)
    expected = (1 - LR * DECAY) * before.double().view(shape) - step
    clear = ~doubtful.any(-1, keepdim=True).expand(shape)
    if int(clear.sum()) < clear.numel() // 2:
        return "its coefficients are too close to zero to tell anything"
    off = (after.view(shape) - expected).abs()[clear].max()
    most = 4 * WIDTH * EPS * float(expected.abs().max())
    return None if bool(off <= most) else f"a weight is off by {float(off):.1e}, and rounding explains {most:.1e}"


def refresh() -> Iterator[Finding]:
    """One refresh of small bases on every kind of device that is here."""
    for device in _devices():
        activations = torch.randn(BLOCKS, 4 * WIDTH, WIDTH, generator=torch.Generator().manual_seed(2)).to(device)
        moment = activations.mT @ activations / activations.shape[1]
        identity = torch.eye(WIDTH, device=device)
        start = identity.expand(BLOCKS, -1, -1).contiguous()
        basis = ops.refresh_basis(moment, start, method="householder").basis.float()
        error = float((basis.mT @ basis - identity).abs().max())
        moved = float((basis - start).abs().max())
        if error <= MOST_ERROR and moved > MOST_ERROR:
            text = f"a refresh on {device} gives orthonormal bases: |Q^T Q - I| <= {error:.1e}"
            yield Finding("self-test", "ok", text)
        else:
            yield Finding(
                "self-test",
                "failure",
                f"a refresh on {device} is wrong: |Q^T Q - I| is {error:.1e}, and the bases moved by {moved:.1e}",
                "train with --dobb-backend reference, and please report it",
            )


def step() -> Iterator[Finding]:
    """One step of the plain optimizer."""
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))
        optimizer = Dobb(model, lr=1e-2, weight_decay=0.0, blocks=2)
        inputs, targets = torch.randn(64, 32), torch.randn(64, 8)
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
    if losses[1] < losses[0]:
        text = f"a step of the plain optimizer lowers a loss: from {losses[0]:.3f} to {losses[1]:.3f}"
        yield Finding("self-test", "ok", text)
    else:
        yield Finding(
            "self-test",
            "failure",
            f"a step of the plain optimizer does not lower a loss: {losses[0]:.3f}, then {losses[1]:.3f}",
            "please report it",
        )


def _devices() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
