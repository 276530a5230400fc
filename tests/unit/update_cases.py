"""Random segments for tests of the update, and the update in float64 that they are compared with."""

import dataclasses

import torch
from hypothesis import strategies as st

from megatron_dobb.methods.dobb import update
from megatron_dobb.sharding.segment import Segment
from megatron_dobb.sharding.shard import Shard

WIDTHS = [1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 24, 31, 32, 40, 48, 64, 65, 100, 128, 176]
SETTINGS = {"learning_rate": 0.03, "weight_decay": 0.1, "momentum": 0.95, "nesterov": False, "update_scale": 0.2}
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@dataclasses.dataclass
class Case:
    segments: list[Segment]
    gradients: list[torch.Tensor]


def misaligned(values, dtype, by):
    """A contiguous copy that begins `by` elements after an aligned address."""
    memory = torch.empty(values.numel() + by, dtype=dtype)
    memory[by:] = values.flatten()
    return memory[by:]


def segment(shard, *, seed, dtypes=(torch.float32,) * 3, by=0, rows=None):
    """A random segment and its gradient; `dtypes` are those of gradient, momentum and basis."""
    generator = torch.Generator().manual_seed(seed)
    gradient_dtype, momentum_dtype, basis_dtype = dtypes
    held, width = len(shard.held_blocks()), shard.width
    rows = rows or max(1, -(-shard.end // shard.columns))
    weight, momentum, gradient = torch.randn(3, shard.numel, generator=generator)
    basis = torch.linalg.qr(torch.randn(held, width, width, generator=generator)).Q.contiguous()
    made = Segment(
        f"weight{seed}",
        shard,
        rows,
        shard.columns,
        misaligned(weight, torch.float32, by),
        misaligned(momentum, momentum_dtype, by),
        misaligned(basis, basis_dtype, by).view(held, width, width),
    )
    return made, misaligned(gradient, gradient_dtype, by)


def copied(case):
    segments = [
        dataclasses.replace(s, weight=s.weight.clone(), momentum=s.momentum.clone(), basis=s.basis.clone())
        for s in case.segments
    ]
    return Case(segments, case.gradients)


# What products in bf16 lose: an operand, a product of two relative to its magnitude, and the terms summed for each.
# bf16 has 8 significant bits, so high is within 2^-8 of a number, and a product of two within 2 * 2^-8 + 2^-8 * 2^-8.
BF16 = {"operand": 2.0**-8, "rounding": 2.0**-7 + 2.0**-16, "terms": 1}
# The rest is below 2^-8 of the number's power of two, where bf16 goes in steps of 2^-16 of it or less: once it is
# rounded to low, 2^-17 is lost. high high + low high + high low lacks that of either operand, and low low.
HALVES = {"operand": 2.0**-17, "rounding": 2 * 2.0**-17 + 2.0**-16, "terms": 3}
MATRIX_UNITS = ("amx", "avx512bf16")


def rounding_of(kernel, precision="exact"):
    """What a CPU kernel loses beyond sums in fp32. Those of vectors compute in fp32 whatever the precision."""
    if kernel not in MATRIX_UNITS:
        return {}
    return HALVES if precision == "exact" else BF16


@st.composite
def shards(draw):
    """Ranges of whole blocks: anywhere in a weight, of any length down to nothing."""
    width, blocks, rows = draw(st.sampled_from(WIDTHS)), draw(st.integers(1, 6)), draw(st.integers(1, 40))
    total = rows * blocks
    first = draw(st.integers(0, total))
    last = draw(st.one_of(st.just(min(first + 1, total)), st.just(total), st.integers(first, total)))
    return Shard(first * width, last * width, blocks * width, width)


@st.composite
def cases(draw):
    made = [
        segment(
            draw(shards()),
            seed=draw(st.integers(0, 2**31)),
            dtypes=draw(st.tuples(DTYPES, DTYPES, DTYPES)),
            by=draw(st.integers(0, 3)),
        )
        for _ in range(draw(st.integers(0, 4)))
    ]
    return Case([s for s, _ in made], [g for _, g in made])


def step_size(old, options):
    """What kept coefficients are multiplied with. Bases keep their norm, so it makes that of the step of it."""
    return options["learning_rate"] * update.step_scale(old.rows, old.columns, options["update_scale"])


def in_float64(old, gradient, options):
    """Momentum, coefficients, rounding bounds of these, and the function from kept coefficients to weights, in float64.

    Kept coefficients are signs, or (Dobb-l2) products with the scales of their columns.
    """
    mu = options["momentum"]
    momentum, g = old.momentum.double(), gradient.double()
    momentum = mu * momentum + (1 - mu) * g
    source = mu * momentum + (1 - mu) * g if options["nesterov"] else momentum
    coefficients, bounds = torch.zeros_like(source), torch.zeros_like(source)
    basis, held = old.basis.double(), old.shard.held_blocks()
    pieces = [(p, basis[held.index(p.first_block) :][: p.blocks]) for p in old.shard.pieces()]
    for piece, q in pieces:
        place = (piece.offset, piece.rows, piece.blocks)
        old.rectangle(coefficients, *place).copy_(update.project(old.rectangle(source, *place), q))
        size = update.project(old.rectangle(source, *place).abs() + 1, q.abs())
        old.rectangle(bounds, *place).copy_(size * (old.shard.width + 8) * 2.0**-23)

    def weights(kept):
        scale = step_size(old, options)
        new = old.weight.double() * (1 - options["learning_rate"] * options["weight_decay"])
        for piece, q in pieces:
            place = (piece.offset, piece.rows, piece.blocks)
            old.rectangle(new, *place).sub_(scale * update.reconstruct(old.rectangle(kept, *place), q))
        return new

    return momentum, coefficients, bounds, weights


def signs_of(old, new, options):
    """The signs that the new weight was built from, by projecting the step on the basis. In float64."""
    scale = step_size(old, options)
    kept = old.weight.double() * (1 - options["learning_rate"] * options["weight_decay"])
    direction = (kept - new.double()) / scale
    basis, held = old.basis.double(), old.shard.held_blocks()
    signs = torch.zeros_like(direction)
    for piece in old.shard.pieces():
        place = (piece.offset, piece.rows, piece.blocks)
        q = basis[held.index(piece.first_block) :][: piece.blocks]
        projected = torch.linalg.solve(q[None], old.rectangle(direction, *place).unsqueeze(-1)).squeeze(-1)
        old.rectangle(signs, *place).copy_(projected)
    # S Q^T solved for S with Q S^T = direction^T: rows of S are solutions, since O_r = Q s_r.
    return signs


def check_against_float64(before, after, options, relative=1e-5, rounding=0.0, operand=0.0, terms=1):
    """Momenta, signs and weights of `after` are those of a step from `before`.

    `relative` bounds the error of the step in its norm, weight decay apart. `rounding` is that of the products beyond
    fp32, relative to the sum of their magnitudes: within it a sign may be either. Signs are exact in bf16, so products
    of the step lose `operand` of each entry of Q: at most sqrt(b), the Frobenius norm of Q, times that of the step.
    """
    for old, new, gradient in zip(before.segments, after.segments, before.gradients, strict=True):
        momentum, coefficients, bounds, weights = in_float64(old, gradient, options)
        tolerance = 1e-6 if new.momentum.dtype == torch.float32 else 2**-8
        torch.testing.assert_close(new.momentum.double(), momentum, rtol=tolerance, atol=tolerance)
        found = signs_of(old, new.weight, options)
        signs = found.round()
        assert (found - signs).abs().max().item() < 0.1 if found.numel() else True
        assert (signs.abs() <= 1).all()
        # A sum of n terms rounds by n 2^-24, so that `bounds` hold for two of each product.
        sure = coefficients.abs() > bounds * (max(1, terms / 2) + rounding * 2**23 / (old.shard.width + 8))
        assert torch.equal(signs[sure], coefficients.sign()[sure])
        error = (new.weight.double() - weights(signs)).norm()
        allowed = (relative + operand * old.shard.width**0.5) * step_size(old, options) * signs.norm()
        assert error <= allowed + 2**-23 * old.weight.double().norm()


def random_scales(made, seed=0):
    """Scales of the columns, `[held, b]`, over three decades."""
    generator = torch.Generator().manual_seed(seed)
    return 10 ** (3 * torch.rand(made.basis.shape[:2], generator=generator) - 2)


def times_scales(old, coefficients, scales):
    """Coefficients of a shard, each times the scale of its column. In float64."""
    product, held = torch.zeros_like(coefficients), old.shard.held_blocks()
    for piece in old.shard.pieces():
        place = (piece.offset, piece.rows, piece.blocks)
        of_blocks = scales[held.index(piece.first_block) :][: piece.blocks].double()
        old.rectangle(product, *place).copy_(old.rectangle(coefficients, *place) * of_blocks)
    return product


def magnitudes(old, gradient, options):
    """Of every coefficient, the sum of the magnitudes of its terms. In float64."""
    mu, g = options["momentum"], gradient.double()
    source = mu * old.momentum.double() + (1 - mu) * g
    source = (mu * source + (1 - mu) * g if options["nesterov"] else source).abs()
    sums, basis, held = torch.zeros_like(source), old.basis.double().abs(), old.shard.held_blocks()
    for piece in old.shard.pieces():
        place = (piece.offset, piece.rows, piece.blocks)
        q = basis[held.index(piece.first_block) :][: piece.blocks]
        old.rectangle(sums, *place).copy_(update.project(old.rectangle(source, *place), q))
    return sums


def check_scaled_against_float64(
    before, after, scales, options, relative=1e-5, rounding=2.0**-22, operand=0.0, terms=1
):
    """The same for Dobb-l2: no coefficient is rounded to a sign, so weights agree to rounding.

    `rounding` is that of a coefficient, relative to the sum of the magnitudes of its terms, for they may cancel.
    `relative` is that of the step which the coefficients give, in its norm, weight decay apart. Where `operand` of each
    is lost there, and low times low, that makes up to 4 times as much of a product.
    """
    for old, new, gradient, scale in zip(before.segments, after.segments, before.gradients, scales, strict=True):
        momentum, coefficients, _, weights = in_float64(old, gradient, options)
        tolerance = 1e-6 if new.momentum.dtype == torch.float32 else 2**-8
        torch.testing.assert_close(new.momentum.double(), momentum, rtol=tolerance, atol=tolerance)
        expected = weights(times_scales(old, coefficients, scale))
        step = (expected - old.weight.double()).norm()
        size = step_size(old, options) * times_scales(old, magnitudes(old, gradient, options), scale).norm()
        rounded = (rounding + (terms - 1) * 2.0**-22) * size
        error = (new.weight.double() - expected).norm()
        allowed = (relative + 4 * operand * old.shard.width**0.5) * step + rounded
        assert error <= allowed + 2**-23 * old.weight.double().norm()
