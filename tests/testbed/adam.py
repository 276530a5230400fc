"""A stand-in for the FusedAdam of Apex and Transformer Engine."""

from collections.abc import Callable
from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """Adam with Apex's interface in plain torch.

    Megatron takes torch's AdamW where neither package is installed, but that keeps `step` as one tensor per
    parameter, with which its DistributedOptimizer cannot load a distributed checkpoint. Like Apex's, this one keeps
    it as an int in the parameter group.

    Args:
        params: parameters or parameter groups.
        lr, betas, eps, weight_decay: as in `torch.optim.AdamW`.
        adam_w_mode: decoupled weight decay; otherwise it is added to the gradient.
        capturable: accepted for its CUDA graphs and ignored.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        self.adam_w_mode = adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        if closure is not None:
            raise ValueError("FusedAdam takes no closure")
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)

    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        beta1, beta2 = group["betas"]
        decay = group["weight_decay"]
        if self.adam_w_mode:
            param.mul_(1 - group["lr"] * decay)
        elif decay:
            grad = grad.add(param, alpha=decay)
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        correction1, correction2 = 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]
        scale = state["exp_avg_sq"].sqrt().div_(correction2**0.5).add_(group["eps"])
        param.addcdiv_(state["exp_avg"], scale, value=-group["lr"] / correction1)
