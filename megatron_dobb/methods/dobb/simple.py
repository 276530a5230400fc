"""Dobb in one file, for one process: the method itself, without anything that makes it fast or distributed.

A layer computes `y = W x` with an `m x n` weight, whose `n` input features form `B` blocks of width `b = n / B`::

    A_j <- beta A_j + (1 - beta) mean over tokens of x_j x_j^T      every T-th step, starting with the first
    Q_j <- orth(A_j Q_j)                                            right after that; Q_j starts as the identity
    M   <- mu M + (1 - mu) G                                        every step
    O_j  = sign(M_j Q_j) Q_j^T / sqrt(m)                            Nesterov: mu M + (1 - mu) G in place of M
    W   <- (1 - lr wd) W - lr tau sqrt(max(m, n)) O

The package does not import this file; its tests run it in float64 to check `megatron_dobb.Dobb`. It leaves out several
processes, low precision, non-finite values and the choice of captured sequences.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def second_moments(x: Tensor, blocks: int) -> Tensor:
    """Mean over tokens of `x_j x_j^T` for each block of features: `[B, b, b]` from activations `[..., n]`."""
    tokens = x.reshape(-1, blocks, x.shape[-1] // blocks)
    return torch.einsum("tjc,tjd->jcd", tokens, tokens) / len(tokens)


def project(momentum: Tensor, basis: Tensor) -> Tensor:
    """Coefficients `M_j Q_j` of each row in each block's basis: `[m, B, b]` from `[m, n]` and `[B, b, b]`."""
    return torch.einsum("rjc,jcd->rjd", momentum.unflatten(1, basis.shape[:2]), basis)


def reconstruct(coefficients: Tensor, basis: Tensor) -> Tensor:
    """Back from the bases to the features: `[m, n]` from `[m, B, b]` and `[B, b, b]`."""
    return torch.einsum("rjd,jcd->rjc", coefficients, basis).flatten(1)


class SimpleDobb(torch.optim.Optimizer):
    """Dobb for the weights of some `nn.Linear` layers; give all other parameters to `torch.optim.AdamW`.

    Refresh steps capture the first forward call of each layer in training mode.

    Args:
        layers: the layers, on their device and in the dtype of all state, fp32 or float64; no two share a weight.
        lr, weight_decay: as in AdamW; the decay is decoupled.
        blocks: number of blocks, `B`; must divide the input features of every layer.
        refresh_interval: steps between two refreshes of the bases, `T`.
        iterations: orthogonal iterations per refresh.
        momentum: `mu`.
        moment_beta: `beta`.
        nesterov: take the sign of `mu M + (1 - mu) G` instead of `M`.
        update_scale: `tau`, the RMS of the update, divided by `lr`, of a weight with `m >= n`.
    """

    def __init__(
        self,
        layers: Iterable[nn.Linear],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        *,
        blocks: int = 16,
        refresh_interval: int = 9,
        iterations: int = 1,
        momentum: float = 0.95,
        moment_beta: float = 0.95,
        nesterov: bool = False,
        update_scale: float = 0.2,
    ) -> None:
        layers = list(layers)
        super().__init__([layer.weight for layer in layers], {"lr": lr, "weight_decay": weight_decay})
        self.blocks, self.refresh_interval, self.iterations = blocks, refresh_interval, iterations
        self.momentum, self.moment_beta, self.nesterov = momentum, moment_beta, nesterov
        self.update_scale = update_scale
        for layer in layers:
            weight = layer.weight.detach()
            width = weight.unflatten(1, (blocks, -1)).shape[-1]
            self.state[layer.weight] = {
                "step": 0,
                "momentum": torch.zeros_like(weight),
                "moment": weight.new_zeros(blocks, width, width),
                "basis": torch.eye(width).to(weight).repeat(blocks, 1, 1),
            }
            layer.register_forward_hook(self._capture)

    @torch.no_grad()
    def _capture(self, layer: nn.Linear, args: tuple[Tensor, ...], output: Tensor) -> None:
        state = self.state[layer.weight]
        if layer.training and state["step"] % self.refresh_interval == 0 and "captured" not in state:
            state["captured"] = second_moments(args[0], self.blocks)

    @torch.no_grad()
    def refresh(self, weight: nn.Parameter) -> None:
        """Update a weight's moments and bases with what was captured since the last call, if anything."""
        state = self.state[weight]
        if "captured" in state:
            state["moment"].lerp_(state.pop("captured"), 1 - self.moment_beta)
            for _ in range(self.iterations):
                state["basis"] = torch.linalg.qr(state["moment"] @ state["basis"]).Q

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Refresh the bases that are due, then update every weight that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                self.refresh(weight)
                self.state[weight]["step"] += 1
                if weight.grad is not None:
                    self.state[weight]["momentum"].lerp_(weight.grad, 1 - self.momentum)
                    signs = self.coefficients(weight).sign()
                    step_size = group["lr"] * self.update_scale * math.sqrt(max(weight.shape) / len(weight))
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.sub_(step_size * reconstruct(signs, self.state[weight]["basis"]))

    def coefficients(self, weight: nn.Parameter) -> Tensor:
        """`M_j Q_j` of the latest step, `[m, B, b]`."""
        momentum = self.state[weight]["momentum"]
        if self.nesterov:
            momentum = momentum.lerp(weight.grad, 1 - self.momentum)
        return project(momentum, self.state[weight]["basis"])
