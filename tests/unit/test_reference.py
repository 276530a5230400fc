"""The update in plain PyTorch, shard by shard, against `simple.py` in float64."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megatron_dobb.errors import NonFiniteError
from megatron_dobb.methods.dobb import update as reference
from megatron_dobb.methods.dobb.simple import SimpleDobb
from megatron_dobb.numerics.finite import check_finite
from megatron_dobb.sharding.segment import Segment
from megatron_dobb.sharding.shard import Shard

SETTINGS = {
    "learning_rate": 0.01,
    "weight_decay": 0.1,
    "momentum": 0.95,
    "nesterov": False,
    "update_scale": 0.2,
}


def random_bases(blocks, width, seed=0, dtype=torch.float32):
    """Orthonormal `[blocks, width, width]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(blocks, width, width, generator=generator, dtype=torch.float64)).Q.to(dtype)


def exact_step(weight, old_momentum, gradient, bases, **settings):
    """Weight and momentum after one step of `simple.py` in float64, and which rows of which blocks have a sign that
    rounding may decide, `[m, blocks]`."""
    layer = nn.Linear(*reversed(weight.shape), bias=False, dtype=torch.float64)
    layer.weight.data, layer.weight.grad = weight.double(), gradient.double()
    optimizer = SimpleDobb([layer], blocks=len(bases), **settings)
    optimizer.state[layer.weight] |= {"momentum": old_momentum.double(), "basis": bases.double()}
    optimizer.step()
    coefficients = optimizer.coefficients(layer.weight).abs()
    bound = 1e-5 * coefficients.norm(dim=2, keepdim=True)
    near_zero = ((coefficients < bound) & (bound > 0)).any(dim=2)
    return layer.weight.detach(), optimizer.state[layer.weight]["momentum"], near_zero


@st.composite
def problems(draw):
    width = draw(st.integers(1, 6))
    blocks = draw(st.integers(1, 5))
    rows = draw(st.integers(1, 18))
    chunks = rows * blocks
    first = draw(st.integers(0, chunks))
    last = draw(st.integers(first, chunks))
    return width, blocks, rows, (first, last), draw(st.integers(0, 99))


@settings(deadline=None, max_examples=150)
@given(problems(), st.booleans(), st.sampled_from([0.0, 0.95]))
def test_a_shard_of_any_bounds_gets_its_part_of_the_whole_update(problem, nesterov, momentum_decay):
    width, blocks, rows, (first, last), seed = problem
    columns = blocks * width
    weight, momentum, gradient, bases = random_problem(rows, blocks, width, seed)
    common = {"weight_decay": 0.1, "momentum": momentum_decay, "nesterov": nesterov, "update_scale": 0.2}
    exact_weight, exact_momentum, near_zero = exact_step(weight, momentum, gradient, bases, lr=0.03, **common)
    shard = Shard(first * width, last * width, columns, width)
    cut = slice(shard.start, shard.end)
    held = (weight.flatten()[cut].clone(), momentum.flatten()[cut].clone(), bases[list(shard.held_blocks())])
    segment = Segment("w", shard, rows, columns, *held)
    reference.update([segment], [gradient.flatten()[cut]], learning_rate=0.03, **common)
    torch.testing.assert_close(segment.momentum.double(), exact_momentum.flatten()[cut], rtol=1e-6, atol=1e-6)
    settled = ~near_zero.flatten().repeat_interleave(width)[cut]
    torch.testing.assert_close(
        segment.weight.double()[settled], exact_weight.flatten()[cut][settled], rtol=1e-6, atol=1e-6
    )


def whole(weight, momentum, bases, rows=None):
    m, n = weight.shape
    shard = Shard(0, m * n, n, bases.shape[-1])
    return Segment("w", shard, rows or m, n, weight.flatten(), momentum.flatten(), bases)


def random_problem(rows=8, blocks=3, width=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight, momentum, gradient = torch.randn(3, rows, blocks * width, generator=generator)
    return weight, momentum, gradient, random_bases(blocks, width, seed)


def test_shards_together_make_the_update_of_the_whole_weight_bit_for_bit():
    weight, momentum, gradient, bases = random_problem(rows=7, blocks=3, width=4)
    undivided = whole(weight.clone(), momentum.clone(), bases)
    reference.update([undivided], [gradient.flatten()], **SETTINGS)
    pieces = []
    cuts = [0, 4, 32, 36, 60, 84]  # in the middle of rows 0, 2, 3 and at row 5
    for start, end in itertools.pairwise(cuts):
        shard = Shard(start, end, 12, 4)
        basis = bases[list(shard.held_blocks())]
        cut = slice(start, end)
        pieces.append(Segment("w", shard, 7, 12, weight.flatten()[cut].clone(), momentum.flatten()[cut].clone(), basis))
    gradients = [gradient.flatten()[p.shard.start : p.shard.end] for p in pieces]
    reference.update(pieces, gradients, **SETTINGS)
    assert torch.equal(torch.cat([p.weight for p in pieces]), undivided.weight)
    assert torch.equal(torch.cat([p.momentum for p in pieces]), undivided.momentum)


def test_sign_of_zero_is_zero_and_of_a_non_finite_coefficient_is_nan():
    coefficients = torch.tensor([-2.0, -0.0, 0.0, 1e-38, math.inf, -math.inf, math.nan])
    signs = reference.sign(coefficients)
    assert signs[:4].tolist() == [-1.0, 0.0, 0.0, 1.0]
    assert signs[4:].isnan().all()


def test_a_nan_in_the_momentum_shows_in_the_whole_block_of_its_row_and_nowhere_else():
    weight, momentum, gradient, bases = random_problem()
    momentum[2, 5] = math.nan
    segment = whole(weight, momentum, bases)
    reference.update([segment], [gradient.flatten()], **SETTINGS)
    expected = torch.zeros(8, 12, dtype=torch.bool)
    expected[2, 4:8] = True
    assert torch.equal(segment.weight.view(8, 12).isnan(), expected)


def test_a_zero_momentum_row_gives_a_zero_update_row():
    weight, momentum, gradient, bases = random_problem()
    momentum[3] = gradient[3] = 0
    segment = whole(weight.clone(), momentum, bases)
    reference.update([segment], [gradient.flatten()], **(SETTINGS | {"weight_decay": 0.0}))
    moved = (segment.weight.view(8, 12) != weight).any(dim=1)
    assert moved.tolist() == [True, True, True, False, True, True, True, True]


def test_the_update_does_not_depend_on_sign_or_order_of_the_basis_columns():
    _, momentum, _, bases = random_problem(width=4)
    rectangle = momentum.view(8, 3, 4)
    expected = reference.direction(rectangle.double(), bases.double())
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(4, generator=generator)
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    changed = reference.direction(rectangle.double(), bases.double()[..., order] * signs)
    torch.testing.assert_close(changed, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("rows", "columns"), [(8, 12), (12, 12), (24, 12)])
def test_norms_of_the_raw_update_and_of_the_step_are_those_of_the_papers_table_9(rows, columns):
    generator = torch.Generator().manual_seed(0)
    momentum = torch.randn(rows, columns // 4, 4, generator=generator, dtype=torch.float64)
    direction = reference.direction(momentum, random_bases(columns // 4, 4, dtype=torch.float64))
    raw = direction / math.sqrt(rows)
    assert raw.square().sum().item() == pytest.approx(columns)
    step = reference.step_scale(rows, columns, 0.2) * direction
    assert step.square().mean().sqrt().item() == pytest.approx(0.2 * math.sqrt(max(rows, columns) / rows))


def test_the_step_uses_the_rows_of_the_whole_weight_not_those_of_the_shard():
    weight, momentum, gradient, bases = random_problem(rows=4, blocks=3, width=4)
    steps = []
    for rows in (4, 48):
        segment = whole(weight.clone(), momentum.clone(), bases, rows)
        reference.update([segment], [gradient.flatten()], **(SETTINGS | {"weight_decay": 0.0}))
        steps.append((segment.weight.view(4, 12) - weight).norm().item())
    assert steps[0] / steps[1] == pytest.approx(math.sqrt(12 / 4), rel=1e-4)


def test_bf16_gradients_count_with_their_own_value_in_fp32():
    weight, momentum, gradient, bases = random_problem()
    rounded = gradient.bfloat16()
    outcomes = []
    for given_gradient in (rounded, rounded.float()):
        segment = whole(weight.clone(), momentum.clone(), bases)
        reference.update([segment], [given_gradient.flatten()], **SETTINGS)
        outcomes.append(segment)
    assert outcomes[0].momentum.dtype == torch.float32
    assert torch.equal(outcomes[0].momentum, outcomes[1].momentum)
    assert torch.equal(outcomes[0].weight, outcomes[1].weight)


def test_bf16_bases_are_used_as_they_are_stored():
    weight, momentum, gradient, bases = random_problem()
    outcomes = []
    for basis in (bases.bfloat16(), bases.bfloat16().float()):
        segment = whole(weight.clone(), momentum.clone(), basis)
        reference.update([segment], [gradient.flatten()], **SETTINGS)
        outcomes.append(segment.weight)
    assert torch.equal(*outcomes)


def test_gradients_are_left_alone():
    weight, momentum, gradient, bases = random_problem()
    before = gradient.clone()
    reference.update([whole(weight, momentum, bases)], [gradient.flatten()], **(SETTINGS | {"nesterov": True}))
    assert torch.equal(gradient, before)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_check_finite_names_the_weight_and_counts_the_entries(value, dtype):
    good, bad = torch.ones(6, dtype=dtype), torch.ones(10, dtype=dtype)
    check_finite(["fc1", "fc2"], [good, bad])
    bad[3] = bad[7] = value
    with pytest.raises(NonFiniteError, match=r"gradient of fc2 holds 2 non-finite of 10 entries; no weight"):
        check_finite(["fc1", "fc2"], [good, bad])


def test_check_finite_accepts_the_largest_numbers_mixed_types_and_empty_shards():
    largest = torch.full((5,), torch.finfo(torch.float32).max)
    check_finite([], [])
    check_finite(["empty"], [torch.zeros(0)])
    check_finite(["a", "empty", "b"], [largest, torch.zeros(0), torch.ones(3, dtype=torch.bfloat16)])
