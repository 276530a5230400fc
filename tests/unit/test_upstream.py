"""docs/upstream.md lists every name of Megatron that is replaced, and no other."""

import importlib
import inspect
import re
import types
from pathlib import Path

import megatron_dobb
import testbed

testbed.enable(training=True)
megatron_dobb.install()

from megatron_dobb.megatron.seam import contract, patches  # noqa: E402  (Megatron is imported after the patches)

PAGE = (Path(__file__).resolve().parents[2] / "docs/upstream.md").read_text()
LISTED = re.findall(r"^### `(megatron\.[\w.]+)`", PAGE, re.MULTILINE)
FOR_A_CALL = {"megatron.core.optimizer.DistributedOptimizer"}
"""Replaced only while one optimizer is built."""


def is_ours(value):
    return isinstance(value, types.FunctionType) and value.__globals__["__name__"] == patches.__name__


def replaced():
    """Functions of the seam in the modules that it patches, and in their classes."""
    for name in patches.patches():
        module = importlib.import_module(name)
        yield from (f"{name}.{key}" for key, value in vars(module).items() if is_ours(value))
        classes = [c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == name]
        for owner in classes:
            for key, value in vars(owner).items():
                if is_ours(
                    inspect.unwrap(value, stop=is_ours) if callable(value) else getattr(value, "__func__", value)
                ):
                    yield f"{name}.{owner.__qualname__}.{key}"


def found(name):
    """The object of Megatron that a dotted name means."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            value = getattr(value, part)
        return value
    raise AssertionError(name)


def test_the_page_and_the_contract_list_exactly_what_is_replaced():
    assert sorted(LISTED) == sorted({*replaced(), *FOR_A_CALL})
    assert sorted(LISTED) == sorted(str(row) for row in contract.NAMES if row.kind == "replaced")


def test_all_that_the_page_lists_is_in_this_megatron():
    for name in LISTED:
        assert callable(found(name)), name


def test_files_that_the_page_names_are_those_of_the_names():
    """Each entry says in which file the change would be."""
    entries = re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]
    for entry in entries:
        name = re.match(r"`(megatron\.[\w.]+)`", entry)
        if name is None:
            continue
        value = inspect.unwrap(found(name[1]))
        folder = Path(importlib.import_module("megatron.core").__file__).parents[2]
        assert str(Path(inspect.getsourcefile(value)).relative_to(folder)) in entry, name[1]
