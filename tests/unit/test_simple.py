"""The one-file statement of the method: Dobb trains as it does, and no other code depends on it."""

import ast
import itertools
import math
from pathlib import Path

import pytest
import torch
from small_mlp import BLOCKS, LAYERS, backward, batch, mlp, tensors

import megatron_dobb
from megatron_dobb import Dobb
from megatron_dobb.methods.dobb.simple import SimpleDobb, project, reconstruct

PACKAGE = Path(megatron_dobb.__file__).parent
LR, STEPS = 0.01, 22

FLIP_BOUND = 1e-4
"""Fraction of the RMS of a weight's coefficients below which rounding may decide a sign. Dobb's coefficients differ
from those in float64 by up to 2e-5 of it."""


def flips(oracle, weight, difference, step_size):
    """Signs in which Dobb's step differs from the oracle's, `[m, B, b]`; each must be one that rounding can decide."""
    changes = (project(difference, oracle.state[weight]["basis"]) / -step_size).round()
    coefficients = oracle.coefficients(weight)
    assert (coefficients.abs() <= FLIP_BOUND * coefficients.square().mean().sqrt())[changes != 0].all()
    return changes


CASES = [
    pytest.param(blocks, settings, id=f"{blocks}, {settings}")
    for blocks, settings in [
        *itertools.product(
            ({"*": 4}, {"first": 1, "second": 30, "third": 8}),
            ({"refresh_interval": t, "nesterov": nesterov} for t in (1, 3) for nesterov in (False, True)),
        ),
        (BLOCKS, {"qr": "cholesky"}),
        (BLOCKS, {"basis_dtype": "bf16"}),
        (BLOCKS, {"basis_dtype": "bf16", "qr": "cholesky"}),
    ]
]


@pytest.mark.parametrize(("blocks", "settings"), CASES)
def test_dobb_follows_the_simple_form_in_float64(blocks, settings):
    model, exact = mlp(), mlp().double()
    optimizer = Dobb(model, lr=LR, blocks=blocks, **({"basis_dtype": "fp32"} | settings))
    of_both = {key: settings[key] for key in settings if key in ("refresh_interval", "nesterov")}
    oracles = {
        name: SimpleDobb([getattr(exact, name)], lr=LR, blocks=blocks.get(name, 4), **of_both) for name in LAYERS
    }
    adamw = torch.optim.AdamW([p for p in exact.parameters() if p.ndim == 1], lr=LR, weight_decay=0)
    flipped = coefficients = 0
    for step in range(STEPS):
        for trained, x in ((model, batch(step)), (exact, batch(step).double())):
            trained.zero_grad()
            backward(trained, x)
        optimizer.step()
        adamw.step()
        for name, oracle in oracles.items():
            found, weight = getattr(model, name).weight.detach().double(), getattr(exact, name).weight
            state, of_dobb = oracle.state[weight], tensors(optimizer, name)
            oracle.refresh(weight)
            basis = of_dobb["basis"].double()
            basis *= (basis * state["basis"]).sum(1, keepdim=True).sign()
            tolerance = 2e-3 if "basis_dtype" in settings else 1e-4
            torch.testing.assert_close(basis, state["basis"], rtol=0, atol=tolerance)
            if settings.keys() & {"basis_dtype", "qr"}:  # neither rounding to bf16 nor damping decides a sign
                state["basis"] = basis
            oracle.step()
            step_size = LR * 0.2 * math.sqrt(max(weight.shape) / len(weight))
            changes = flips(oracle, weight, found - weight.detach(), step_size)
            weight.data -= step_size * reconstruct(changes, state["basis"])
            torch.testing.assert_close(found, weight.detach(), rtol=0, atol=1e-3 * step_size)
            for key, fraction in (("moment", 1e-5), ("momentum", 1e-4)):
                largest = float(state[key].abs().max())
                torch.testing.assert_close(of_dobb[key].double(), state[key], rtol=0, atol=fraction * largest)
            flipped += int(changes.count_nonzero())
            coefficients += changes.numel()
    assert flipped <= FLIP_BOUND * coefficients


def test_the_simple_form_trains_a_model_by_itself_beside_adamw():
    model = mlp()
    optimizer = SimpleDobb([model.first, model.second, model.third], lr=LR, blocks=4)
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.ndim == 1], lr=LR)

    losses = []
    for _ in range(30):
        model.zero_grad()
        loss = (model(batch(0)) - batch(0)[..., :10].sin()).square().mean()
        loss.backward()
        optimizer.step()
        adamw.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_the_simple_form_refuses_blocks_that_do_not_divide_the_features():
    with pytest.raises(RuntimeError, match="unflatten"):
        SimpleDobb([torch.nn.Linear(10, 3)], blocks=4)


def imported(path):
    """The last parts of the names of the modules, and the names, that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.name.rpartition(".")[2] for alias in node.names}
            names |= set((getattr(node, "module", None) or "").split("."))
    return names


def test_production_code_and_the_simple_form_do_not_import_each_other():
    (simple,) = PACKAGE.rglob("simple.py")
    assert imported(simple) <= {"math", "collections", "abc", "Callable", "Iterable", "torch", "Tensor", "nn", ""}
    importers = [path for path in PACKAGE.rglob("*.py") if path != simple and imported(path) & {"simple", "SimpleDobb"}]
    assert importers == []
