"""The extension's refresh of the bases: as good as the plain one, and the same bits in any company."""

import pytest
import torch
from compiled import KERNELS, C
from moment_kinds import cases, float64_error, generator, moments, normalised, random_basis
from small_mlp import BLOCKS, mlp, train
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dobb import Dobb
from megatron_dobb.errors import ConfigError
from megatron_dobb.kernels import extension
from megatron_dobb.methods.dobb import kernels
from megatron_dobb.methods.dobb.orthogonalize import refresh_basis as plain_refresh_basis

METHODS = ("householder", "cholesky")
DAMPING = {"householder": 0.0, "cholesky": 1e-5}
WIDE = 520  # shared out inside the block

pytestmark = pytest.mark.skipif(extension.load().module is None, reason=f"no extension: {extension.load().reason}")


@pytest.fixture(autouse=True)
def _threads_afterwards():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def op(moment, basis, method, iterations=1):
    return torch.ops.dobb.refresh_basis(moment, basis, method, iterations)


def without_alignment(tensor):
    """The same values, starting where no vector register would."""
    moved = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    return moved.copy_(tensor)


def test_loops_of_the_extension_run_on_the_threads_of_pytorch():
    parallel = "ATen parallel backend: OpenMP" in torch.__config__.parallel_info()
    assert extension.load().module.parallel == (parallel and "clang" not in extension.load().module.compiler)


@pytest.mark.parametrize("width", [1, 7, 32, 48, 100, 192])
@pytest.mark.parametrize("method", METHODS)
def test_every_moment_gets_a_complete_orthonormal_basis_without_fallback(method, width):
    moment, start = cases(width)
    basis, fell_back = op(moment, start, method)
    assert basis.dtype == torch.float32
    assert float64_error(basis) <= 5e-6
    assert fell_back.tolist() == plain_refresh_basis(moment, start, method=method).fell_back.tolist()
    assert not fell_back.any()


@pytest.mark.parametrize("width", [1, 7, 48, 100])
@pytest.mark.parametrize("kernel", KERNELS)
def test_householder_is_orthonormal_and_one_step_with_every_kernel(kernel, width):
    C.choose_cpu_kernel(kernel)
    moment, start = cases(width)
    basis, _ = op(moment, start, "householder")
    assert float64_error(basis) <= 5e-6
    product = normalised(moment) @ start.double()
    below = (basis.double().mT @ product).tril(-1).abs().amax((1, 2))
    assert (below <= 2e-6 * product.abs().amax((1, 2))).all()


@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1e-12])
def test_features_far_below_the_others_are_reflected_as_exactly(scale):
    """The squares of their entries underflow in fp32."""
    width = 48
    moment = torch.diag(torch.where(torch.arange(width) < 8, 1.0, scale))
    moment[8:, 8:] += scale * torch.ones(40, 40)
    basis, _ = op(moment[None], torch.eye(width)[None], "householder")
    assert float64_error(basis) <= 5e-6
    below = (basis[0].double().mT @ moment.double())[8:, 8:].tril(-1)
    assert below.abs().max() <= 1e-5 * scale


@pytest.mark.parametrize("width", [1, 7, 32, 48, 192])
@pytest.mark.parametrize("method", METHODS)
def test_a_refresh_is_one_step_of_subspace_iteration(method, width):
    """`Q_new^T A Q` is upper triangular: column i lies in the span of the first i + 1 columns of `A Q`."""
    moment, start = cases(width)
    basis, _ = op(moment, start, method)
    product = (normalised(moment) + DAMPING[method] * torch.eye(width)) @ start.double()
    below = (basis.double().mT @ product).tril(-1).abs().amax((1, 2))
    assert (below <= 2e-6 * product.abs().amax((1, 2))).all()


@pytest.mark.parametrize("width", [40, WIDE])
@pytest.mark.parametrize("method", METHODS)
def test_a_well_conditioned_refresh_equals_float64_qr_up_to_column_signs(method, width):
    vectors = random_basis(width, seed=1)
    moment = ((vectors * torch.linspace(1, 3, width).double()) @ vectors.T)[None]
    start = random_basis(width, seed=2)[None]
    basis, _ = op(moment.float(), start.float(), method, 2)
    expected = start
    for _ in range(2):
        expected = torch.linalg.qr((normalised(moment) + DAMPING[method] * torch.eye(width)) @ expected).Q
    signs = (basis.double() * expected).sum(1, keepdim=True).sign()
    assert (basis * signs - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("method", METHODS)
def test_a_training_run_of_refreshes_stays_orthonormal_and_near_the_plain_one(method):
    """From bf16 bases and moving moments, most passes of Cholesky QR are not needed."""
    width, scale = 48, torch.arange(1, 49) ** -1.0
    vectors = random_basis(width).float()
    moment, basis = torch.zeros(2, width, width), torch.eye(width).bfloat16().repeat(2, 1, 1)
    for step in range(8):
        x = (torch.randn(2, 500, width, generator=generator(step)) * scale) @ vectors.T + 0.1
        moment = 0.95 * moment + 0.05 * x.mT @ x / 500
        refreshed, fell_back = op(moment, basis, method)
        expected = plain_refresh_basis(moment, basis, method=method).basis
        assert not fell_back.any()
        assert float64_error(refreshed) <= 5e-6
        assert ((refreshed * expected).sum(1).abs() - 1).abs().max() <= 1e-4
        basis = refreshed.bfloat16()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("width", [7, 48, 100, 192, WIDE])
def test_the_bits_of_a_block_depend_neither_on_its_company_nor_its_place_nor_the_threads(method, width):
    every, starts = cases(width) if width < WIDE else (moments(width), random_basis(width).float().expand(13, -1, -1))
    chosen = [4, 5, 12, 1, 9] if width < WIDE else [4, 12]
    moment, start = every[chosen], starts[chosen]
    torch.set_num_threads(1)
    expected, _ = op(moment, start, method)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(op(moment, start, method)[0], expected)
        assert torch.equal(op(moment.flip(0), start.flip(0), method)[0], expected.flip(0))
        assert torch.equal(op(without_alignment(moment), without_alignment(start), method)[0], expected)
        for j in range(len(chosen)):
            assert torch.equal(op(moment[j : j + 1], start[j : j + 1], method)[0], expected[j : j + 1])


def test_a_block_that_breaks_cholesky_falls_back_to_householder_alone_and_is_reported():
    moment, start = moments(48)[:3], random_basis(48).float().repeat(3, 1, 1)
    start[1, :, 5] = 0  # nothing to make a unit column of
    basis, fell_back = op(moment, start, "cholesky", 2)
    assert fell_back.tolist() == [False, True, False]
    assert float64_error(basis) <= 5e-6
    assert torch.equal(basis[1:2], op(moment[1:2], start[1:2], "householder", 2)[0])


def test_householder_stays_orthonormal_when_a_wide_block_has_many_equal_features():
    """Reflections alone end at 1.5e-5."""
    token = torch.randn(1, 2, generator=generator(2)).repeat(1, 512)
    moment = (token.T @ token)[None]
    assert float64_error(op(moment, torch.eye(1024)[None], "householder")[0]) <= 8e-6


@pytest.mark.parametrize("width", [192, WIDE])
def test_cholesky_needs_no_fallback_when_many_features_are_equal(width):
    """The second gram is singular in fp32 without a shift, and three passes are one too few.

    Lengths summed in fp32 are off by up to 1e-5; no column is corrected below 2e-6, and sums of either sign add 1e-6.
    """
    token = torch.randn(1, 2, generator=generator(2)).repeat(1, width // 2)
    moment = torch.stack([torch.ones(width, width), token.T @ token])
    basis, fell_back = op(moment, torch.eye(width).expand(2, -1, -1), "cholesky")
    assert not fell_back.any()
    assert float64_error(basis) <= 3e-6


@pytest.mark.parametrize("method", METHODS)
def test_dead_features_stay_exactly_unmixed_over_refreshes_with_bf16_bases(method):
    width, dead = 48, torch.tensor([0, 5, 6, 31, 40, 47])
    basis, identity = torch.eye(width).bfloat16()[None], torch.eye(width).bfloat16()
    for step in range(6):
        x = torch.randn(30, width, generator=generator(step))  # fewer tokens than live features
        x[:, dead] = 0
        basis = op((x.T @ x)[None], basis, method)[0].bfloat16()
        assert torch.equal(basis[0, dead], identity[dead])
        assert torch.equal(basis[0, :, dead], identity[:, dead])
        assert (basis[0, 1] != 0).sum() > width // 2


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
def test_an_unusable_moment_counts_as_the_identity(method, bad):
    moment, start = moments(7)[:3], random_basis(7).float().expand(3, 7, 7)
    expected = op(moment, start, method)[0]
    if bad == 0:
        moment[1] = 0
    moment[1, 2, 3] = bad
    basis, fell_back = op(moment, start, method)
    assert not fell_back.any()
    assert (basis[1].abs() - start[1].abs()).abs().max() <= 1e-6
    assert torch.equal(basis[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("method", METHODS)
def test_low_precision_allowed_elsewhere_changes_no_bit(method):
    moment, start = cases(48)
    expected = kernels.refresh_basis(moment, start, method=method).basis
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            basis = kernels.refresh_basis(moment, start, method=method).basis
            bare = op(moment, start.clone(), method)[0]
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(basis, expected)
    assert bare.dtype == torch.float32


def test_the_inputs_are_left_alone_and_any_dtype_and_stride_will_do():
    moment, start = cases(7)
    before = moment.clone(), start.clone()
    expected, _ = op(moment, start, "cholesky", 2)
    assert torch.equal(moment, before[0])
    assert torch.equal(start, before[1])
    assert torch.equal(op(moment.mT, start.mT.contiguous().mT, "cholesky", 2)[0], expected)
    rounded = moment.bfloat16(), start.bfloat16()
    assert torch.equal(op(*rounded, "cholesky")[0], op(rounded[0].float(), rounded[1].float(), "cholesky")[0])


@pytest.mark.parametrize("method", METHODS)
def test_no_blocks_are_no_work(method):
    empty = torch.zeros(0, 5, 5)
    basis, fell_back = op(empty, empty.bfloat16(), method, 2)
    assert basis.shape == (0, 5, 5)
    assert fell_back.shape == (0,)


@pytest.mark.parametrize("method", METHODS)
def test_refresh_obeys_the_rules_of_the_dispatcher(method):
    moment, start = cases(7)
    torch.library.opcheck(torch.ops.dobb.refresh_basis.default, (moment, start.bfloat16(), method, 1))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("moment", "basis", "method", "iterations", "message"),
    [
        (torch.eye(3), torch.eye(3), "cholesky", 1, r"moment has shape \[3, 3\], expected square blocks"),
        (torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), "cholesky", 1, r"moment has shape \[2, 3, 4\], expected"),
        (
            torch.zeros(2, 3, 3),
            torch.zeros(1, 3, 3),
            "cholesky",
            1,
            r"basis has shape \[1, 3, 3\], expected \[2,",
        ),
        (torch.zeros(2, 3, 3).int(), torch.zeros(2, 3, 3), "cholesky", 1, "moment is Int, expected a floating type"),
        (torch.zeros(2, 3, 3), torch.zeros(2, 3, 3), "eigh", 1, "method is 'eigh', expected 'householder' or"),
        (torch.zeros(2, 3, 3), torch.zeros(2, 3, 3), "cholesky", 0, "iterations is 0, expected 1 or more"),
    ],
)
def test_refresh_names_a_wrong_argument(device, moment, basis, method, iterations, message):
    with pytest.raises(ValueError, match="dobb::refresh_basis: " + message):
        op(moment.to(device), basis.to(device), method, iterations)


def test_the_door_knows_every_method_and_names_flags_as_the_plain_refresh_does():
    moment, start = cases(7)
    expected = plain_refresh_basis(moment, start, method="eigh").basis
    assert torch.equal(kernels.refresh_basis(moment, start, method="eigh").basis, expected)
    with pytest.raises(ConfigError, match=r"--dobb-qr lu is unknown; use one of householder, cholesky, eigh"):
        kernels.refresh_basis(moment, start, method="lu")
    with pytest.raises(ConfigError, match=r"--dobb-iterations 0 is too few .* use 1 or more"):
        kernels.refresh_basis(moment, start, method="cholesky", iterations=0)


class Calls(TorchDispatchMode):
    """Remembers the ops of the extension that ran."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "dobb":
            self.seen.add(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("backend", "expected"),
    [("reference", set()), ("auto", {"dobb.gram_.default", "dobb.refresh_basis.default", "dobb.update.default"})],
)
def test_the_reference_backend_runs_nothing_of_the_extension(backend, expected):
    model = mlp()
    optimizer = Dobb(model, lr=1e-2, blocks=BLOCKS, backend=backend)
    with Calls() as calls:
        train(model, optimizer, range(2))
    assert calls.seen == expected
