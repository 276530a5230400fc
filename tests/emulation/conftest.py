import pytest

from emulation import emulated


@pytest.fixture(scope="session")
def harness(tmp_path_factory):
    """The process that runs the CUDA kernels on the CPU, built once for the session."""
    if emulated.find_compiler() is None:
        pytest.skip("no C++ compiler: install g++ or set CXX")
    folder = tmp_path_factory.mktemp("emulation")
    try:
        programs = emulated.build(folder)
    except RuntimeError as error:
        pytest.fail(f"the emulation of the CUDA kernels does not compile: {error}")
    process = emulated.Harness(programs, folder)
    yield process
    process.close()
