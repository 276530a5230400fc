"""How tests are shared out where pytest-xdist runs them in several workers."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """The tests of a file share what is costly, and stay together; the emulation is built for all of its files.

    First, because pytest-xdist's own hook reads the marks only once.
    """
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            folder = item.path.parent.name
            item.add_marker(pytest.mark.xdist_group(folder if folder == "emulation" else f"{folder}/{item.path.name}"))
