"""The sums of the second moments against float64, on every CPU kernel that this processor runs."""

import subprocess
import sys

import pytest
import torch
from compiled import KERNELS, C, needs_extension
from hypothesis import given, settings
from hypothesis import strategies as st
from update_cases import WIDTHS

from megatron_dobb.errors import BlockError
from megatron_dobb.methods.dobb import kernels, moment


@needs_extension
@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=60, deadline=None)
@given(
    width=st.sampled_from(WIDTHS),
    blocks=st.integers(1, 3),
    tokens=st.sampled_from([0, 1, 3, 255, 256, 700]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    skipped=st.integers(0, 3),
)
def test_gram_adds_the_sums_that_float64_gives(kernel, width, blocks, tokens, dtype, skipped):
    C.choose_cpu_kernel(kernel)
    x = torch.randn(tokens, blocks * width + skipped)[:, skipped:].to(dtype)
    before = torch.randn(blocks, width, width)
    before = before + before.mT
    total = before.clone()
    torch.ops.dobb.gram_(total, x, width)
    by_block = x.double().view(tokens, blocks, width).transpose(0, 1)
    torch.testing.assert_close(total.double(), before.double() + by_block.mT @ by_block, rtol=1e-5, atol=1e-4)
    assert torch.equal(total, total.mT)


@needs_extension
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_gram_shares_out_the_rows_of_few_blocks(threads):
    x, number = torch.randn(300, 400), torch.get_num_threads()
    total = torch.zeros(1, 400, 400)
    try:
        torch.set_num_threads(threads)
        torch.ops.dobb.gram_(total, x, 400)
    finally:
        torch.set_num_threads(number)
    torch.testing.assert_close(total[0].double(), x.double().T @ x.double(), rtol=1e-5, atol=1e-4)


@needs_extension
def test_gram_obeys_the_rules_of_the_dispatcher():
    torch.library.opcheck(torch.ops.dobb.gram_.default, (torch.zeros(2, 3, 3), torch.randn(5, 6), 3))


@needs_extension
@pytest.mark.parametrize(
    ("total", "activations", "width", "message"),
    [
        (torch.zeros(2, 3, 3), torch.zeros(5, 7), 3, r"width is 3, expected a divisor of the 7 features"),
        (
            torch.zeros(3, 3, 3),
            torch.zeros(5, 6),
            3,
            r"total is Float \[3, 3, 3\], expected contiguous fp32 \[2, 3, 3\]",
        ),
        (torch.zeros(2, 3, 3), torch.zeros(6, 5).T, 3, r"activations has shape \[5, 6\] and strides \[1, 5\]"),
        (torch.zeros(2, 3, 3), torch.zeros(5, 6).double(), 3, r"activations is Double, expected fp32, bf16 or fp16"),
    ],
)
def test_gram_names_a_wrong_argument(total, activations, width, message):
    with pytest.raises(ValueError, match="dobb::gram_: " + message):
        torch.ops.dobb.gram_(total, activations, width)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gram_takes_any_leading_shape_and_dtype(dtype):
    x, total = torch.randn(3, 5, 12).to(dtype), torch.ones(3, 4, 4)
    kernels.gram_(total, x, 4)
    torch.testing.assert_close(total, 1 + moment.gram(x, 4), rtol=1e-5, atol=1e-5)
    with pytest.raises(BlockError, match="block width 5 does not divide the 12 features"):
        kernels.gram_(total, x, 5)


# In a process of its own: the test bed, which other tests use, makes devices of type cuda stand for the CPU.
ON_A_GPU = """
import sys

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dobb.kernels import extension
from megatron_dobb.methods.dobb import kernels


class Names(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        names.add(str(op))
        return op(*args, **(kwargs or {}))


extension.load()
for built in (False, True):
    extension.runs_on = lambda device: built and device == "cuda"
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        names = set()
        with FakeTensorMode(), Names():
            x = torch.empty(5, 6, dtype=dtype, device="cuda")
            kernels.gram_(torch.empty(2, 3, 3, device="cuda"), x, 3)
        print(built, dtype, "dobb.gram_.default" in names, "aten.bmm.default" in names)
"""


@needs_extension
def test_gram_on_a_gpu_takes_the_kernel_where_tensor_cores_are_accurate():
    result = subprocess.run([sys.executable, "-c", ON_A_GPU], capture_output=True, text=True, check=False)
    assert result.stdout.splitlines() == [
        "False torch.float32 False True",
        "False torch.bfloat16 False True",
        "False torch.float16 False True",
        "True torch.float32 False True",
        "True torch.bfloat16 True False",
        "True torch.float16 True False",
    ], result.stderr


@needs_extension
def test_one_feature_may_have_any_stride():
    x = torch.randn(1, 5).t()
    assert x.shape == (5, 1)
    total = torch.zeros(1, 1, 1)
    kernels.gram_(total, x, 1)
    torch.testing.assert_close(total.flatten(), (x * x).sum().reshape(1))


@needs_extension
def test_shapes_that_do_not_fit_are_refused_without_data_too():
    with pytest.raises(ValueError, match="total is Float"):
        torch.ops.dobb.gram_(torch.zeros(3, 2, 2, device="meta"), torch.zeros(5, 4, device="meta"), 2)
    with pytest.raises(ValueError, match="expected cpu, like activations"):
        torch.ops.dobb.gram_(torch.zeros(2, 2, 2, device="meta"), torch.zeros(5, 4), 2)
