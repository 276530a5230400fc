"""Update whole matrices by one method and everything else by AdamW, for any `nn.Module`.

This is the method-independent part of a plain PyTorch optimizer: param groups, masters, the order of a step, and the
listing of managed and AdamW parameters.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import ConfigError, DobbError, Style, UnsupportedError
from ..numerics.finite import check_finite
from . import state_dict as saved_state
from .select_weights import LinearWeight
from .state_dict import StateForm


@contextlib.contextmanager
def named_as_keywords() -> Iterator[None]:
    """Let errors name settings as keywords in place of command-line flags."""
    try:
        yield
    except DobbError as error:
        error.style = Style.KEYWORD
        raise


class MatrixOptimizer[Weight: LinearWeight](torch.optim.Optimizer):
    """Optimizer for some of a model's matrices, with AdamW for every other parameter at the same learning rate.

    A subclass implements `_prepare_step`, `_update_flat`, and any other hooks that it needs.

    Args:
        root: the model, unwrapped.
        matrices: the weights that the method manages, by name.
        adamw: the reason for each parameter that it does not, by name.
        frozen: number of parameters that require no gradient.
        form: the form of the method's state.
        group: the ranks that train the same weights; None for a process of its own.
        built_alone: whether torch.distributed had not been started and no group was given.
        lr, weight_decay, betas, eps: AdamW's; the first two are shared.

    Attributes:
        attempted_steps: calls of `step` so far.
    """

    def __init__(
        self,
        root: nn.Module,
        matrices: Mapping[str, Weight],
        adamw: Mapping[str, str],
        frozen: int,
        form: StateForm,
        *,
        group: dist.ProcessGroup | None,
        built_alone: bool,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        self._matrices, self._on_adamw, self._frozen, self._form = matrices, adamw, frozen, form
        self.attempted_steps = 0
        self._built = False
        self._weight_of = {weight.parameter: weight for weight in matrices.values()}
        self._adamw = torch.optim.AdamW([{"params": []}], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(self._make_groups(root), dict(self._adamw.defaults))
        self._group, self._built_alone = group, built_alone
        self._rank = dist.get_rank(group) if group is not None else 0
        self._momentum = {
            name: torch.zeros_like(weight.parameter, dtype=torch.float32, memory_format=torch.contiguous_format)
            for name, weight in matrices.items()
        }
        self._built = True

    def _make_groups(self, root: nn.Module) -> list[dict[str, Any]]:
        others = [p for p in root.parameters() if p.requires_grad and p not in self._weight_of]
        groups = [
            {"params": list(self._weight_of), self._form.mark: True},
            {"params": [p for p in others if p.ndim >= 2], self._form.mark: False},
            {"params": [p for p in others if p.ndim < 2], self._form.mark: False, "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, which AdamW will update: the method's weights are chosen when the optimizer is built.

        Raises:
            ConfigError: if the group requests the method.
        """
        title = self._form.title
        if param_group.setdefault(self._form.mark, False) and self._built:
            raise ConfigError(f"{title} chooses its weights when it is built: build a new one for the whole model")
        super().add_param_group(param_group)
        if self._built:
            saved_state.begin_adamw(self.state, self.param_groups, self._form.mark)

    # The method.

    def _prepare_step(self) -> None:
        """Run the method's work that precedes any update. May raise, since nothing has been changed yet."""

    def _begin_step(self) -> None:
        """Prepare for the forward passes of the next step."""

    def _finish_step(self) -> None:
        """Run the work that follows all updates, such as logging."""

    def _update_flat(
        self, weights: Sequence[Weight], flat: Sequence[Tensor], learning_rate: float, weight_decay: float
    ) -> None:
        """Update weights in place.

        Args:
            weights: those that have a gradient.
            flat: their values, `[m n]` each, in fp32 or float64.
            learning_rate, weight_decay: of their param group.
        """
        raise NotImplementedError

    # Steps.

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @named_as_keywords()
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: clears the gradients, computes the loss and its gradients, and returns the loss.

        Raises:
            NonFiniteError: if a gradient of a managed weight is not finite. Nothing was changed then.
            ConfigError: if torch.distributed was started, with several ranks, after the optimizer was built.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_gradients()
        self._prepare_step()
        self.attempted_steps += 1
        self._begin_step()
        mark = self._form.mark
        for group in self.param_groups:
            if group[mark]:
                due = [self._weight_of[p] for p in group["params"] if p.grad is not None]
                self._update(due, float(group["lr"]), group["weight_decay"])
        self._adamw.param_groups = [group for group in self.param_groups if not group[mark]]
        if self.attempted_steps == 1:  # the model may have been moved or converted since
            saved_state.begin_adamw(self.state, self.param_groups, mark)
        self._adamw.state = self.state
        self._adamw.step()
        self._finish_step()
        return loss

    def _check_gradients(self) -> None:
        if self._built_alone and ranks_of_job() > 1:
            raise ConfigError(
                f"{self._form.title} was built before torch.distributed was started, which now has {ranks_of_job()} "
                "ranks: each would update its weights from its own data, and they would drift apart. Build it after "
                "init_process_group, or give it the process_group of the ranks that train together"
            )
        by_device: dict[torch.device, list[Weight]] = {}
        for weight in self._matrices.values():
            if weight.parameter.device != self._momentum[weight.name].device:
                raise ConfigError(
                    f"{weight.name} moved to {weight.parameter.device} after {self._form.title} was built on "
                    f"{self._momentum[weight.name].device}: move the model first, then build the optimizer"
                )
            if weight.parameter.grad is not None:
                by_device.setdefault(weight.parameter.device, []).append(weight)
        for weights in by_device.values():
            check_finite([w.name for w in weights], [flat_gradient(w) for w in weights])

    def _update(self, weights: Sequence[Weight], learning_rate: float, weight_decay: float) -> None:
        """Update these weights by one step, in one call except for weights without their own fp32 storage."""
        in_place: list[Weight] = []
        for weight in weights:
            parameter = weight.parameter.detach()
            if parameter.is_contiguous() and parameter.dtype in (torch.float32, torch.float64):
                in_place.append(weight)
                continue
            master = parameter.to(torch.promote_types(parameter.dtype, torch.float32)).contiguous()
            self._update_flat([weight], [master.view(-1)], learning_rate, weight_decay)
            parameter.copy_(master)
        flat = [weight.parameter.detach().view(-1) for weight in in_place]
        self._update_flat(in_place, flat, learning_rate, weight_decay)

    # Description.

    def describe(self) -> str:
        """List the weights that the method manages, the parameters on AdamW, and why."""
        weights = self._matrices.values()
        total = sum(w.parameter.numel() for w in weights)
        lines = [f"{self._form.title}: {len(weights)} matrices, {total:,} elements", *self._shape_lines()]
        lines.append(f"AdamW: {len(self._on_adamw)} parameters; frozen: {self._frozen}")
        return "\n".join([*lines, *(f"  {line}" for line in adamw_lines(self._on_adamw))])

    def _shape_lines(self) -> list[str]:
        """Format a table of the shapes of managed weights."""
        return []

    def __repr__(self) -> str:
        return self.describe()

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedError(
            f"a {self._form.title} cannot be copied or pickled, because its hooks belong to one model: build another "
            "one for the copy of the model and give it load_state_dict(copy.deepcopy(optimizer.state_dict()))"
        )


def adamw_lines(reasons: Mapping[str, str]) -> list[str]:
    """Format a line for each reason why parameters are on AdamW, with the first of their names."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        by_reason.setdefault(reason, []).append(name)
    return [
        f"{len(names)} {reason}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
        for reason, names in by_reason.items()
    ]


def process_group_of(model: nn.Module, given: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the group of ranks that share the weights; None if this process is alone.

    Raises:
        ConfigError: if the given group does not contain this rank.
    """
    if not ranks_of_job():
        return None
    inner = getattr(model, "_orig_mod", model)
    default = inner.process_group if isinstance(inner, DistributedDataParallel) else dist.group.WORLD
    group = given if given is not None else default
    if dist.get_rank(group) < 0:
        raise ConfigError("process_group does not contain this rank: give every rank the group that it belongs to")
    return group if dist.get_world_size(group) > 1 else None


def ranks_of_job() -> int:
    """The ranks of torch.distributed; 0 where it has not been started."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0


def flat_gradient(weight: LinearWeight) -> Tensor:
    """A weight's gradient, `[m n]`."""
    assert weight.parameter.grad is not None
    return weight.parameter.grad.reshape(-1)
