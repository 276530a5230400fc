"""Test whether Dobb can attach to the installed Megatron, without starting a run."""

import importlib
import importlib.util
import runpy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import patches

OPTIONAL = ("megatron.training", "megatron.bridge")


@dataclass(frozen=True)
class Place:
    """A Megatron on the module path: its folder `megatron/core`, and the version that it states."""

    folder: Path
    version: str


def find() -> Place | None:
    """The megatron.core that an import would take, without importing it; None if there is none."""
    if not has("megatron.core"):
        return None
    spec = importlib.util.find_spec("megatron.core")
    folder = Path(next(iter(spec.submodule_search_locations or ()), "")) if spec is not None else Path()
    return Place(folder, str(runpy.run_path(str(folder / "package_info.py"))["__version__"]))


def has(name: str) -> bool:
    """Whether a module is on the module path."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a package above it
        return False


def problems() -> Iterator[tuple[str, BaseException | None]]:
    """For each module of the contract, the error that prevents attaching to it, or None.

    The modules are imported and patched for good, so this belongs into a process of its own. Packages that some
    programs do without, `megatron.training` and `megatron.bridge`, are left out where they are missing.
    """
    for name, attachment in patches.attachments().items():
        package = ".".join(name.split(".")[:2])
        if package in OPTIONAL and not has(package):
            continue
        try:
            attachment(importlib.import_module(name))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever an import raises, SystemExit too
            yield name, error
        else:
            yield name, None
