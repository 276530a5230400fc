"""How tests are shared out where pytest-xdist runs them in several workers, and how random their cases are."""

import pytest
from hypothesis import settings

# The same cases in every run, so that none fails by chance; `--hypothesis-profile nightly` draws others.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("nightly", derandomize=False, max_examples=1000, deadline=None)
settings.load_profile("fixed")


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
