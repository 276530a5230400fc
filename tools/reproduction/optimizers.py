"""Optimizers that training runs compare: all take the same learning rate and decoupled weight decay.

Each updates the weights of the linear layers; AdamW takes embeddings, positions, norms and biases. A matrix's update
is scaled by `tau sqrt(max(m, n))`, `tau = 0.2`, everywhere (paper, Table 9).
"""

import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_dobb import Dobb

from .runs import MissingPart, Run

BETAS = (0.9, 0.95)
UPDATE_SCALE = 0.2
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of Muon's quintic iteration, as published by its author and in torch.optim.Muon."""


def newton_schulz(matrix: Tensor, steps: int = 5) -> Tensor:
    """Muon's approximate polar factor of a matrix, in the matrix's own dtype."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide / wide.norm().clamp(min=1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide is matrix else x.T


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon with fp32 products.

    PyTorch's own always multiplies in bf16, which a CPU without bf16 units does ten times slower than fp32: an
    optimizer step then takes four times as long as the forward and backward pass.
    """

    def __init__(
        self, parameters: Any, lr: float, weight_decay: float, momentum: float = 0.95, nesterov: bool = True
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                buffer = state.setdefault("momentum", torch.zeros_like(parameter))
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                followed = parameter.grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
                update = newton_schulz(followed)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * UPDATE_SCALE * math.sqrt(max(parameter.shape)))


def matrices_of(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The weights of the linear layers that are not tied to an embedding, and all other parameters."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    linear = {module.weight for module in model.modules() if isinstance(module, nn.Linear)} - embeddings
    parameters = list(model.parameters())
    return [p for p in parameters if p in linear], [p for p in parameters if p not in linear]


def adamw(parameters: list[nn.Parameter], run: Run) -> torch.optim.AdamW:
    """AdamW; only what has two dimensions decays."""
    decayed, others = ([p for p in parameters if (p.ndim > 1) is wanted] for wanted in (True, False))
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=run.learning_rate,
        betas=BETAS,
        weight_decay=run.weight_decay,
    )


def build_adamw(model: nn.Module, run: Run) -> list[torch.optim.Optimizer]:
    return [adamw(list(model.parameters()), run)]


def build_muon(model: nn.Module, run: Run) -> list[torch.optim.Optimizer]:
    matrices, others = matrices_of(model)
    given: dict[str, Any] = {"lr": run.learning_rate, "weight_decay": run.weight_decay, **run.method.settings}
    if matrices[0].is_cuda:
        muon: torch.optim.Optimizer = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **given)
    else:
        muon = Muon(matrices, **given)
    return [muon, adamw(others, run)]


def build_dobb(model: nn.Module, run: Run) -> list[torch.optim.Optimizer]:
    if missing := run.method.missing_settings():
        raise MissingPart(f"this megatron_dobb has no setting {', '.join(missing)}; leave that variant out")
    settings = {"refresh_interval": run.size.refresh_interval, **run.method.settings}
    return [Dobb(model, run.learning_rate, run.weight_decay, betas=BETAS, **settings)]


def build_dion(model: nn.Module, run: Run) -> list[torch.optim.Optimizer]:
    dion = import_dion()
    matrices, others = matrices_of(model)
    groups = []
    for matrix in matrices:
        # Dion multiplies a group's learning rate by sqrt(m / n): give it the one that makes this the common scale.
        rows, columns = matrix.shape
        factor = UPDATE_SCALE * math.sqrt(max(rows, columns)) / math.sqrt(rows / columns)
        decay = run.weight_decay / factor
        groups.append({"params": [matrix], "lr": run.learning_rate * factor, "weight_decay": decay})
    return [dion(groups, lr=run.learning_rate, mu=0.95, **run.method.settings), adamw(others, run)]


def tensors_of(optimizer: Dobb) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Every weight on Dobb by name, with its `momentum` `[m, n]`, `moment` and `basis` `[B, b, b]`."""
    for name, weight in optimizer.on_dobb.items():
        yield name, optimizer.state[weight.parameter]


BUILDERS: dict[str, Callable[[nn.Module, Run], list[torch.optim.Optimizer]]] = {
    "adamw": build_adamw,
    "muon": build_muon,
    "dobb": build_dobb,
    "dion": build_dion,
}


def use_dion(checkout: Path | None) -> None:
    """Make `import dion` find a checkout of microsoft/dion; None leaves things as they are."""
    if checkout is not None and str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))


def dion_is_here() -> bool:
    """True if Dion can be imported."""
    return importlib.util.find_spec("dion") is not None


def import_dion() -> Any:
    """Microsoft's Dion, run without torch.compile, whose compilation would take longer than a small run.

    Raises:
        MissingPart: if it cannot be imported.
    """
    if not dion_is_here():
        raise MissingPart("Dion is not here: give --dion-path a checkout of https://github.com/microsoft/dion")
    compiler = torch.compile
    torch.compile = lambda model=None, **_: model if model is not None else lambda function: function
    try:
        from dion import Dion
    finally:
        torch.compile = compiler
    return Dion
