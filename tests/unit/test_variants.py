"""Every variant of the method against an independent statement of it in float64, for the plain optimizer.

The statement works on whole matrices: the output side is the input side of the transposed matrix, a basis is found by
QR of `A Q`, and nothing is shared with the product's code.
"""

import copy
import itertools

import pytest
import torch
from torch import nn

from megatron_dobb import Dobb, DobbConfig
from megatron_dobb.errors import CaptureError, ConfigError
from megatron_dobb.methods.dobb import update

LR, DECAY, MU, BETA, TAU = 0.02, 0.1, 0.9, 0.8, 0.2
BLOCKS = 4
STEPS, INTERVAL = 7, 3

KINDS = [
    (norm, side, source)
    for norm, (side, source) in itertools.product(
        ("sign", "l2"),
        (
            ("input", "activation"),
            ("input", "gram"),
            ("input", "none"),
            ("output", "output-gradient"),
            ("output", "gram"),
            ("output", "none"),
        ),
    )
]


class Stated:
    """One weight `[m, n]` in float64; the blocks run over the columns of `M^T` on the output side."""

    def __init__(self, weight, norm, side, source, nesterov):
        self.turned = side == "output"
        self.norm, self.source, self.nesterov = norm, source, nesterov
        self.weight = self._turn(weight.detach().double().clone())
        self.momentum = torch.zeros_like(self.weight)
        width = self.weight.shape[1] // BLOCKS
        self.blocks = [slice(i * width, (i + 1) * width) for i in range(BLOCKS)]
        self.moments = [torch.zeros(width, width, dtype=torch.float64) for _ in self.blocks]
        self.bases = [torch.eye(width, dtype=torch.float64) for _ in self.blocks]

    def _turn(self, matrix):
        return matrix.t().contiguous() if self.turned else matrix

    def refresh(self, inputs, output_gradients, gradient):
        if self.source == "none":
            return
        rows = {"activation": inputs, "output-gradient": output_gradients, "gram": self._turn(gradient)}[self.source]
        rows = rows.double().reshape(-1, self.weight.shape[1])
        count = gradient.numel() if self.source == "gram" else len(rows)
        for i, block in enumerate(self.blocks):
            moment = rows[:, block].t() @ rows[:, block] / count
            self.moments[i] = BETA * self.moments[i] + (1 - BETA) * moment
            self.bases[i] = torch.linalg.qr(self.moments[i] @ self.bases[i])[0]

    def step(self, gradient):
        gradient = self._turn(gradient.double())
        self.momentum = MU * self.momentum + (1 - MU) * gradient
        source = MU * self.momentum + (1 - MU) * gradient if self.nesterov else self.momentum
        m, n = self.weight.shape
        raw = torch.zeros_like(self.weight)
        for block, basis in zip(self.blocks, self.bases, strict=True):
            if self.source == "none":
                basis = torch.eye(basis.shape[0], dtype=torch.float64)
            coefficients = source[:, block] @ basis
            if self.norm == "sign":
                kept = coefficients.sign() / m**0.5
            else:
                kept = nn.functional.normalize(coefficients, dim=0)
            raw[:, block] = kept @ basis.t()
        self.weight = (1 - LR * DECAY) * self.weight - LR * TAU * max(m, n) ** 0.5 * raw

    def weight_as_stored(self):
        return self._turn(self.weight)


def optimizer_of(model, norm, side, source, **others):
    blocks = {} if source == "none" else {"blocks": BLOCKS}
    settings = {"norm": norm, "side": side, "source": source, **blocks, **others}
    return Dobb(
        model,
        lr=LR,
        weight_decay=DECAY,
        momentum=MU,
        moment_beta=BETA,
        update_scale=TAU,
        refresh_interval=INTERVAL,
        basis_dtype=torch.float32,
        **settings,
    )


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("norm", "side", "source"), KINDS)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_the_plain_optimizer_takes_the_stated_steps(norm, side, source, backend, nesterov):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8, bias=False))
    stated = {
        name: Stated(layer.weight, norm, side, source, nesterov)
        for name, layer in model.named_children()
        if isinstance(layer, nn.Linear)
    }
    optimizer = optimizer_of(model, norm, side, source, backend=backend, nesterov=nesterov)
    for step in range(STEPS):
        inputs, gradients = {}, {}

        def watch(layer, args, output, name, inputs=inputs, gradients=gradients):
            inputs[name] = args[0].detach()
            output.register_hook(lambda g: gradients.__setitem__(name, g.detach()))

        handles = [
            model.get_submodule(name).register_forward_hook(lambda m, a, o, name=name: watch(m, a, o, name))
            for name in stated
        ]
        model(torch.randn(5, 10, 16)).square().mean().backward()
        for handle in handles:
            handle.remove()
        for name, statement in stated.items():
            gradient = model.get_submodule(name).weight.grad
            if step % INTERVAL == 0:
                statement.refresh(inputs[name], gradients[name], gradient)
            statement.step(gradient)
        optimizer.step()
        optimizer.zero_grad()
        for name, statement in stated.items():
            weight = model.get_submodule(name).weight.detach().double()
            torch.testing.assert_close(weight, statement.weight_as_stored(), rtol=2e-5, atol=2e-6)
            # Both go on from the same values, so that a sign within rounding of zero cannot part them later.
            statement.weight = statement._turn(weight.clone())


@pytest.mark.parametrize("shape", [(16, 1), (1, 16), (1, 1)])
@pytest.mark.parametrize("norm", ["sign", "l2"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_weights_of_one_row_or_column_take_the_stated_step_on_the_output_side(shape, norm, backend):
    columns, rows = shape
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(columns, rows, bias=False))
    stated = Stated(model[0].weight, norm, "output", "none", False)
    optimizer = optimizer_of(model, norm, "output", "none", backend=backend)
    model(torch.randn(6, columns)).square().mean().backward()
    stated.blocks, stated.bases = [slice(0, rows)], [torch.eye(rows, dtype=torch.float64)]
    stated.step(model[0].weight.grad)
    optimizer.step()
    torch.testing.assert_close(model[0].weight.detach().double(), stated.weight_as_stored(), rtol=1e-5, atol=1e-7)


def test_columns_that_have_decayed_to_nothing_get_no_update_and_no_infinite_scale():
    squares = torch.tensor([4.0, 1e-30, 1.2e-38, 1e-40, 1e-44, 0.0])
    scales = update.column_scales(squares, 4096)
    expected = torch.tensor([32.0, 64e15, 64 / 1.2e-38**0.5, 0, 0, 0])
    torch.testing.assert_close(scales, expected, rtol=1e-4, atol=0)


def test_rmnp_gives_every_row_of_the_momentum_the_same_norm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20, bias=False))
    before = model[0].weight.detach().clone()
    optimizer = optimizer_of(model, "l2", "output", "none")
    model(torch.randn(6, 12)).square().mean().backward()
    gradient = model[0].weight.grad.clone()
    optimizer.step()
    moved = before * (1 - LR * DECAY) - model[0].weight.detach()
    rows = nn.functional.normalize(gradient, dim=1)
    torch.testing.assert_close(moved, LR * TAU * 20**0.5 * rows, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"side": "output", "source": "activation"}, "--dobb-side input"),
        ({"side": "input", "source": "output-gradient"}, "--dobb-side output"),
        ({"source": "none", "blocks": 4}, "remove one of them"),
        ({"source": "none", "block_width": 4}, "remove one of them"),
        ({"source": "none", "blocks_for": {"*": 4}}, "remove one of them"),
        ({"source": "none", "backend": "extension"}, "--dobb-backend auto"),
        ({"source": "gram", "capture": "all"}, "remove one of them"),
        ({"source": "gram", "capture_sequences": 4}, "remove one of them"),
        ({"norm": "l1"}, "sign, l2"),
        ({"side": "left"}, "input, output"),
        ({"source": "weights"}, "activation, output-gradient, gram, none"),
    ],
)
def test_combinations_without_meaning_are_refused_by_name(settings, words):
    with pytest.raises(ConfigError, match=words):
        DobbConfig(**settings)


def test_output_gradients_behind_reentrant_recompute_are_refused_by_name():
    class Recomputing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=True)

    model = Recomputing()
    optimizer = optimizer_of(model, "sign", "output", "output-gradient")
    with pytest.raises(CaptureError, match=r"layer\.weight: .*source='gram'"):
        model(torch.randn(4, 8, requires_grad=True))
    optimizer.remove_hooks()


def test_a_state_of_another_source_is_refused_by_name_and_one_of_the_same_continues():
    def built(source):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 8))
        return model, optimizer_of(model, "l2", "input", source)

    def train(model, optimizer, first, end):
        for step in range(first, end):
            torch.manual_seed(step)
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = built("gram")
    train(model, optimizer, 0, 4)
    saved, weights = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
    train(model, optimizer, 4, 8)
    _, other = built("activation")
    with pytest.raises(ConfigError, match="source 'gram', and this optimizer"):
        other.load_state_dict(saved)
    continued, again = built("gram")
    continued.load_state_dict(weights)
    again.load_state_dict(saved)
    train(continued, again, 4, 8)
    assert torch.equal(continued[0].weight, model[0].weight)
