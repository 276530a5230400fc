"""The CUDA kernel of the second moments, run on the CPU, against float64."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from emulation.emulated import Device
from emulation.operations import gram_

pytestmark = pytest.mark.full

WIDTHS = [1, 2, 7, 8, 16, 24, 31, 63, 64, 65, 72, 100, 128, 136]
DTYPES = [torch.bfloat16, torch.float16]


def expected_sum(before, x, width):
    by_block = x.double().unflatten(1, (-1, width)).transpose(0, 1)
    return before.double() + by_block.mT @ by_block


def symmetric(blocks, width):
    half = torch.randn(blocks, width, width)
    return half + half.mT


@settings(max_examples=60, deadline=None)
@given(
    width=st.sampled_from(WIDTHS),
    blocks=st.integers(1, 3),
    tokens=st.sampled_from([0, 1, 3, 63, 64, 65, 130, 300]),
    dtype=st.sampled_from(DTYPES),
    gap=st.sampled_from([0, 1, 8]),
    misaligned=st.sampled_from([0, 2, 4, 8]),
    multiprocessors=st.integers(1, 3),
)
# Each reason for which copies of 16 bytes cannot be taken, alone.
@example(width=24, blocks=2, tokens=65, dtype=torch.bfloat16, gap=1, misaligned=0, multiprocessors=1)
@example(width=24, blocks=2, tokens=65, dtype=torch.bfloat16, gap=8, misaligned=8, multiprocessors=1)
@example(width=100, blocks=2, tokens=65, dtype=torch.bfloat16, gap=0, misaligned=0, multiprocessors=1)
def test_gram_adds_the_sums_that_float64_gives(harness, width, blocks, tokens, dtype, gap, misaligned, multiprocessors):
    features = width * blocks
    storage = torch.full((tokens, features + gap), torch.nan, dtype=dtype)
    x = storage[:, :features]
    x.copy_(torch.randn(tokens, features))
    before = symmetric(blocks, width)
    total = before.clone()
    gram_(harness, total, x, width, misaligned=misaligned, device=Device(multiprocessors=multiprocessors))
    torch.testing.assert_close(total.double(), expected_sum(before, x, width), rtol=2e-6, atol=1e-4)
    assert torch.equal(total, total.mT)


@pytest.mark.parametrize("width", [7, 24, 64, 72])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_gram_keeps_a_bad_feature_in_its_block(harness, width, bad):
    x = torch.randn(70, 3 * width).to(torch.bfloat16)
    x[5, width] = x[6, 2 * width - 1] = bad
    total = torch.zeros(3, width, width)
    gram_(harness, total, x, width)
    assert total[0].isfinite().all()
    assert total[2].isfinite().all()
    assert not total[1, 0].isfinite().any()
    assert not total[1, :, width - 1].isfinite().any()
    assert total[1, 1 : width - 1, 1 : width - 1].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("multiprocessors", "resident_blocks"), [(1, 1), (3, 2)])
def test_gram_of_many_tokens_stays_accurate(harness, dtype, multiprocessors, resident_blocks):
    """All products positive, so that an error that goes one way would add up."""
    x = (1 + torch.rand(4000, 8)).to(dtype)
    total = torch.zeros(1, 8, 8)
    gram_(harness, total, x, 8, device=Device(multiprocessors, resident_blocks))
    torch.testing.assert_close(total.double(), expected_sum(torch.zeros(1, 8, 8), x, 8), rtol=2e-6, atol=0)


@pytest.mark.parametrize("tiles_at_a_time", [1, 4])
def test_gram_with_little_scratch_memory_goes_in_several_launches(harness, tiles_at_a_time):
    x = torch.randn(3, 3 * 72).to(torch.bfloat16)
    before = symmetric(3, 72)
    total = before.clone()
    gram_(harness, total, x, 72, tiles_at_a_time=tiles_at_a_time)
    torch.testing.assert_close(total.double(), expected_sum(before, x, 72), rtol=2e-6, atol=1e-6)


def test_gram_of_no_tokens_or_no_features_launches_nothing(harness):
    total = torch.ones(2, 8, 8)
    gram_(harness, total, torch.zeros(0, 16, dtype=torch.bfloat16), 8)
    assert torch.equal(total, torch.ones(2, 8, 8))
    gram_(harness, torch.zeros(0, 8, 8), torch.zeros(5, 0, dtype=torch.bfloat16), 8)
