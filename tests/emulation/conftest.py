import pytest

from emulation import emulated


@pytest.fixture(scope="session")
def harness(tmp_path_factory):
    """The process that runs the CUDA kernels on the CPU, built once for each state of its sources."""
    if emulated.find_compiler() is None:
        pytest.skip("no C++ compiler: install g++ or set CXX")
    try:
        programs = emulated.built()
    except RuntimeError as error:
        pytest.fail(f"the emulation of the CUDA kernels does not compile: {error}")
    process = emulated.Harness(programs, tmp_path_factory.mktemp("emulation"))
    yield process
    process.close()
