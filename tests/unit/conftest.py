import pytest
from compiled import KERNELS, C


@pytest.fixture(autouse=True)
def _first_kernel_afterwards():
    """A test that chooses a CPU kernel leaves the usual one to the next."""
    yield
    if C is not None:
        C.choose_cpu_kernel(KERNELS[0])
