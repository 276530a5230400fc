"""Which Megatron this seam fits, and probes for everything that it touches."""

import inspect
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from ...errors import UnsupportedError

RANGE = ">=0.19,<0.21"
"""pyproject.toml and the doctor say the same; a test compares them."""
SUPPORTED = SpecifierSet(RANGE, prereleases=True)


def megatron_version() -> str:
    """The version that the imported megatron.core states."""
    from megatron.core import package_info

    return str(package_info.__version__)


def check_version(version: str) -> None:
    """Refuse a megatron-core outside the supported range.

    Raises:
        UnsupportedError: names the version found, the range, and the command that installs a supported one.
    """
    try:
        supported = Version(version) in SUPPORTED
    except InvalidVersion:
        supported = False
    if not supported:
        raise UnsupportedError(
            f"megatron-core {version} is not supported: megatron_dobb needs {SUPPORTED}; "
            f"install one with: pip install 'megatron-core{RANGE}'"
        )


def probe(owner: Any, name: str, parameters: tuple[str, ...] = ()) -> Any:
    """Get what a patch replaces, after checking that it looks as the patch expects.

    Args:
        owner: a module or class of Megatron.
        name: attribute of it.
        parameters: names that the attribute, a function, must accept.

    Raises:
        UnsupportedError: if the attribute is missing or takes other parameters.
    """
    found = getattr(owner, name, None)
    where = f"{getattr(owner, '__module__', '')}.{owner.__name__}.{name}".lstrip(".")
    if found is None:
        raise UnsupportedError(_mismatch(f"{where} does not exist"))
    if parameters:
        signature = inspect.signature(found)
        missing = [p for p in parameters if p not in signature.parameters]
        if missing:
            raise UnsupportedError(_mismatch(f"{where}{signature} has no parameter {', '.join(missing)}"))
    return found


def _mismatch(what: str) -> str:
    return (
        f"{what} in megatron-core {megatron_version()}, so megatron_dobb cannot attach to it; supported are "
        f"versions {SUPPORTED}. If this version is inside the range, please report it"
    )
