"""The supported versions of Megatron."""

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from ...errors import UnsupportedError

RANGE = ">=0.19,<0.21"
"""pyproject.toml and the doctor say the same; a test compares them."""
SUPPORTED = SpecifierSet(RANGE, prereleases=True)
REMEDY = f"install a supported one with: pip install 'megatron-core{RANGE}'"


def megatron_version() -> str:
    """The version that the imported megatron.core states.

    Raises:
        UnsupportedError: if it states none.
    """
    from megatron.core import package_info

    version = getattr(package_info, "__version__", None)
    if version is None:
        raise UnsupportedError(
            f"megatron.core.package_info.__version__ does not exist, so the version of Megatron is unknown; {REMEDY}"
        )
    return str(version)


def supports(version: str) -> bool:
    """Whether a version of megatron-core is inside the supported range."""
    try:
        return Version(version) in SUPPORTED
    except InvalidVersion:
        return False


def check_version(version: str) -> None:
    """Refuse a megatron-core outside the supported range.

    Raises:
        UnsupportedError: names the version found, the range, and the command that installs a supported one.
    """
    if not supports(version):
        raise UnsupportedError(
            f"megatron-core {version} is not supported: megatron_dobb needs {SUPPORTED}; "
            f"install one with: pip install 'megatron-core{RANGE}'"
        )
