"""The build backend: setuptools, with the PyTorch of the environment that is installed into.

The extension must be compiled against the PyTorch that will load it. pip builds in an isolated environment; putting
torch among its requirements would download gigabytes on every installation, possibly of another version. pip runs that
build with the interpreter of the target environment, though, so the PyTorch there can be found and is used. Where there
is none (it is installed after this build, or another front end made the environment), setup.py installs the package
without the extension and leaves a note that says how to get it.
"""

import importlib.util
import sys
import sysconfig

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (hooks that need no PyTorch)


def _use_torch_of_target_environment() -> None:
    if importlib.util.find_spec("torch") is not None:
        return
    for folder in dict.fromkeys((sysconfig.get_path("platlib"), sysconfig.get_path("purelib"))):
        if folder not in sys.path:
            sys.path.append(folder)  # last: what the build requires comes first
    importlib.invalidate_caches()


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    _use_torch_of_target_environment()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    _use_torch_of_target_environment()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
