"""Patches that wait for an import: applied once, in time, whatever else looks at the module first."""

import importlib
import importlib.util
import sys
import textwrap

import pytest

from megatron_dobb import post_import


@pytest.fixture
def module_file(tmp_path, monkeypatch):
    """Write a module that nothing has imported yet; returns its name."""
    monkeypatch.syspath_prepend(tmp_path)
    names = []

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        importlib.invalidate_caches()
        names.append(name)
        return name

    yield write
    for name in names:
        sys.modules.pop(name, None)
        post_import._finder.patches.pop(name, None)


def double(module):
    module.value *= 2


def test_patch_runs_right_after_the_first_import_and_once(module_file):
    name = module_file("waits_for_import", "value = 3")
    post_import.after_import(name, double)
    assert name not in sys.modules
    assert importlib.import_module(name).value == 6
    assert importlib.import_module(name).value == 6


def test_patch_runs_at_once_on_an_imported_module(module_file):
    name = module_file("imported_before", "value = 3")
    module = importlib.import_module(name)
    post_import.after_import(name, double)
    assert module.value == 6


def test_names_imported_from_the_module_are_the_patched_ones(module_file):
    patched = module_file("has_a_function", "def f():\n    return 'stock'\n")
    user = module_file("uses_the_function", f"from {patched} import f\n")
    post_import.after_import(patched, lambda module: setattr(module, "f", lambda: "patched"))
    assert importlib.import_module(user).f() == "patched"


def test_a_program_that_only_looks_for_the_module_does_not_use_up_the_patch(module_file):
    name = module_file("looked_for_first", "value = 3")
    post_import.after_import(name, double)
    assert importlib.util.find_spec(name) is not None
    assert importlib.import_module(name).value == 6


def test_the_patch_survives_an_import_that_fails(module_file):
    name = module_file("fails_once", "import sys\nvalue = 3\nif not hasattr(sys, 'dobb_test'): raise OSError('busy')")
    post_import.after_import(name, double)
    with pytest.raises(OSError, match="busy"):
        importlib.import_module(name)
    sys.dobb_test = True
    try:
        assert importlib.import_module(name).value == 6
    finally:
        del sys.dobb_test


def test_a_module_that_does_not_exist_is_still_missing():
    post_import.after_import("no_such_module_here", double)
    try:
        assert importlib.util.find_spec("no_such_module_here") is None
        with pytest.raises(ModuleNotFoundError, match="no_such_module_here"):
            importlib.import_module("no_such_module_here")
    finally:
        post_import._finder.patches.pop("no_such_module_here")


def test_the_module_looks_as_if_nothing_had_waited_for_it(module_file):
    plain, patched = module_file("plain_module", "value = 1"), module_file("patched_module", "value = 1")
    post_import.after_import(patched, double)
    expected, found = importlib.import_module(plain), importlib.import_module(patched)
    assert type(found.__loader__) is type(expected.__loader__)
    assert type(found.__spec__.loader) is type(expected.__spec__.loader)
    assert found.__spec__.origin.endswith("patched_module.py")
    assert importlib.reload(found).value == 1, "a patch is applied once"


def test_an_error_of_the_patch_stops_every_import(module_file):
    name = module_file("does_not_fit", "value = 3")

    def refuse(module):
        raise RuntimeError("this version does not fit")

    post_import.after_import(name, refuse)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="does not fit"):
            importlib.import_module(name)
        assert name not in sys.modules
