"""How tests are shared out where pytest-xdist runs them in several workers."""

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """The tests of a file share what is costly, and stay together; the emulation is built for all of its files.

    In place of `--dist loadgroup`, whose marks pytest 9.2 does not hand on to pytest-xdist 3.8.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            return "emulation" if "tests/emulation/" in file else file

    return ByFile(config, log)
