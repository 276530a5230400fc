"""The table of Megatron's names is the one that the code uses, and a rename of any of them is caught and named."""

import importlib
import inspect
import itertools
import sys
import time
import types

import megatron_names
import pytest

import megatron_dobb
import testbed

testbed.enable(training=True)
megatron_dobb.install()

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402  (imported after the patches)

from megatron_dobb.errors import UnsupportedError  # noqa: E402
from megatron_dobb.megatron.seam import contract, patches  # noqa: E402

DISTRIBUTED = f"{DistributedOptimizer.__module__}:DistributedOptimizer"
BRIDGE = "megatron.bridge.training.config:OptimizerConfig"
TE = "megatron.core.extensions.transformer_engine"

TRANSFORMER_ENGINES = {
    *("activation_dtype", "eps", "layer_norm_bias", "layer_norm_weight", "normalization", "num_gemms"),
    *("parallel_mode", "single_grouped_weight", "weight0", "zero_centered_gamma"),
}
"""Attributes that Transformer Engine gives to its layers, which docs/layers.md lists."""

OF_OTHERS = {
    # argparse and importlib
    *("choices", "_option_string_actions", "submodule_search_locations"),
    # torch: its modules, backends, and what torch.distributed.checkpoint reads from a checkpoint's index
    *("Module", "Parameter", "_timeout", "options"),
    *("read_metadata", "relative_path", "state_dict_metadata", "storage_data", "st_size"),
    *("add_scalar", "param_groups", "value"),
}
"""Attributes of objects of other packages that `ordinary()` cannot list."""

OPTIONS = {
    *("ckpt_format", "expert_tensor_parallel_num_weight_shards", "expert_tensor_parallel_size", "fp16", "yaml_cfg"),
    *("non_persistent_ckpt_type", "recompute_granularity", "recompute_modules", "save", "tensor_model_parallel_size"),
    "tensor_parallel_num_weight_shards",
}
"""Options of Megatron's command line, which the parser knows and no module."""


def rows(kind=None):
    return [name for name in contract.NAMES if kind in (None, name.kind)]


def told(difference, what):
    """A failure message: the rows to add or to delete."""
    return "\n".join([f"{what} contract.NAMES:", *map(str, sorted(difference))])


def same(derived, listed):
    assert not derived - listed, told(derived - listed, "add to")
    assert not listed - derived, told(listed - derived, "delete from")


def is_module(path):
    return path in contract.modules()


# The table is what the code uses.


def test_what_is_imported_is_listed():
    derived = megatron_names.imports() | megatron_names.classes_in_strings()
    unlisted = derived - {(row.owner, row.name) for row in rows()}
    unlisted = {(module, name) for module, name in unlisted if not is_module(f"{module}.{name}")}
    assert not unlisted, told(unlisted, "add to")


@pytest.mark.parametrize(
    ("owner", "root", "names"),
    [
        (DISTRIBUTED, "DistributedOptimizer", set(dir(DistributedOptimizer))),
        (BRIDGE, "OptimizerConfig", {"finalize", "provide"}),
    ],
)
def test_what_is_overridden_is_listed_with_its_parameters(owner, root, names):
    derived = {(name, *sorted(parameters)) for name, parameters in megatron_names.overridden(root, names).items()}
    replaced = {row.name for row in rows("replaced") if row.owner == owner}
    listed = {(row.name, *sorted(row.parameters)) for row in rows("overridden") if row.owner == owner}
    same({row for row in derived if row[0] not in replaced}, listed)


def test_what_is_read_on_self_is_listed():
    listed = {row.name for row in rows("read") if row.owner == DISTRIBUTED}
    derived = megatron_names.read_on_self("DistributedOptimizer")
    assert not derived - listed, told({f"{DISTRIBUTED} {name}" for name in derived - listed}, "add to")


def test_every_other_attribute_that_nobody_else_has_is_listed():
    listed = {row.name for row in rows()}
    unlisted = {
        f"{name} ({', '.join(places)})"
        for name, places in megatron_names.read_elsewhere().items()
        if name not in listed | TRANSFORMER_ENGINES | OF_OTHERS | OPTIONS
        and not name.startswith(("dobb", "megatron_dobb"))
    }
    assert not unlisted, told(unlisted, "add to")


def test_every_row_is_used():
    imported = {name for _, name in megatron_names.imports() | megatron_names.classes_in_strings()}
    replaced = megatron_names.replaced()
    methods = megatron_names.overridden("DistributedOptimizer", set(dir(DistributedOptimizer)))
    methods |= megatron_names.overridden("OptimizerConfig", {"finalize", "provide"})
    used = {
        "replaced": replaced,
        "overridden": set(methods),
        "read": imported | megatron_names.attributes().keys() | megatron_names.keywords(),
    }
    # Nothing calls a layer's `forward`, but hooks look its arguments up by their names.
    called = {row for row in rows() if row.name == "forward" and megatron_names.strings().issuperset(row.parameters)}
    unused = {f"{row} ({row.kind})" for row in rows() if row.name not in used[row.kind] and row not in called}
    assert not unused, told(unused, "delete from")


def test_what_is_replaced_is_listed():
    same(megatron_names.replaced(), {row.name for row in rows("replaced")})


def test_no_row_is_there_twice():
    for one, other in itertools.combinations(rows(), 2):
        assert (one.owner, one.name, one.kind) != (other.owner, other.name, other.kind)


# A rename is caught.


def renamed_code(code, old, new, *, parameters=False):
    """A function, compiled, that assigns another attribute or takes another parameter, and its inner functions."""

    def inner(constant):
        if isinstance(constant, types.CodeType):
            return renamed_code(constant, old, new)
        return new if not parameters and constant == old else constant

    def names(of):
        return tuple(new if name == old else name for name in of)

    if parameters:
        return code.replace(co_varnames=names(code.co_varnames), co_cellvars=names(code.co_cellvars))
    return code.replace(co_names=names(code.co_names), co_consts=tuple(map(inner, code.co_consts)))


def functions_of(owner):
    if not inspect.isclass(owner):
        return [inspect.unwrap(owner)]
    found = []
    for base in owner.__mro__:
        for value in vars(base).values():
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            function = inspect.unwrap(function) if callable(function) else function
            if isinstance(function, types.FunctionType):
                found.append(function)
    return found


def rename(monkeypatch, row):
    """Give a listed name of Megatron another one, wherever it is defined."""
    module = sys.modules[row.module]
    source = (row.set_by or row.owner).partition(":")[2]
    owner = getattr(module, source) if source else module
    if not source:
        monkeypatch.delattr(owner, row.name)
        return
    if inspect.isclass(owner) and not row.set_by:
        for base in owner.__mro__:
            if row.name in vars(base):
                # A base class of them all, object, has these too.
                if base is object:
                    continue
                monkeypatch.delattr(base, row.name)
            if row.name in vars(base).get("__dataclass_fields__", ()):
                monkeypatch.delitem(base.__dataclass_fields__, row.name)
    for function in functions_of(owner):
        code = function.__code__
        renamed = renamed_code(code, row.name, f"{row.name}_renamed")
        if renamed != code:
            monkeypatch.setattr(function, "__code__", renamed)


def importable(row):
    try:
        importlib.import_module(row.module)
    except ModuleNotFoundError:
        return False
    owner = (row.set_by or row.owner).partition(":")[2]
    return not owner or row.module != TE or inspect.isclass(getattr(sys.modules[TE], owner))


@pytest.fixture(autouse=True)
def as_if_not_installed(monkeypatch):
    """Lets `install` check again; nothing is patched when it raises."""
    monkeypatch.setattr(patches, "_installed", False)


HERE = [row for row in rows() if importable(row)]
ELSEWHERE = [row for row in rows() if not importable(row)]


def test_everything_but_bridge_and_transformer_engine_can_be_renamed_here():
    assert {row.module.split(".")[1] for row in ELSEWHERE if row.module != TE} <= {"bridge"}
    assert len(HERE) > 100


@pytest.mark.parametrize("row", [row for row in HERE if row.name != "__init__"], ids=str)
def test_install_names_what_was_renamed(monkeypatch, row):
    rename(monkeypatch, row)
    with pytest.raises(UnsupportedError) as refused:
        megatron_dobb.install()
    assert f"{row.owner.replace(':', '.')}.{row.name}" in str(refused.value)
    assert ">=0.19" in str(refused.value)


@pytest.mark.parametrize(
    ("row", "parameter"),
    [pytest.param(row, parameter, id=f"{row}({parameter})") for row in HERE for parameter in row.parameters],
)
def test_install_names_a_parameter_that_was_renamed(monkeypatch, row, parameter):
    module, _, source = row.owner.partition(":")
    owner = getattr(sys.modules[module], source) if source else sys.modules[module]
    function = getattr(owner, row.name)
    function = inspect.unwrap(function.__init__ if inspect.isclass(function) else function)
    code = renamed_code(function.__code__, parameter, "renamed", parameters=True)
    assert code != function.__code__
    monkeypatch.setattr(function, "__code__", code)
    with pytest.raises(UnsupportedError, match=rf"{row.name}\(.* has no parameter .*{parameter}"):
        megatron_dobb.install()


def stand_in(row):
    """A module with the row's name alone, for modules that are not here."""
    module = types.ModuleType(row.module)
    source = row.owner.partition(":")[2]
    function = eval(f"lambda {', '.join(row.parameters)}: None")
    if not source:
        setattr(module, row.name, function)
        return module

    members = {row.name: function} if row.parameters or row.kind == "overridden" else attributes_of(row.name)
    setattr(module, source, type(source, (), members))
    return module


def attributes_of(name):
    namespace = {}
    exec(f"def __init__(self):\n    self.{name} = None", namespace)
    return {"__init__": namespace["__init__"]}


@pytest.mark.parametrize("row", ELSEWHERE, ids=str)
def test_names_of_modules_that_are_not_here_are_found_in_a_stand_in_and_missed_in_an_empty_one(monkeypatch, row):
    monkeypatch.setattr(contract, "NAMES", (row,))
    assert list(contract.problems(stand_in(row))) == []
    empty = types.ModuleType(row.module)
    if ":" in row.owner:
        setattr(empty, row.owner.partition(":")[2], type("Empty", (), {}))
    assert list(contract.problems(empty)) == [f"{row} does not exist"]


def test_the_check_costs_little():
    contract._assignments.cache_clear()
    start = time.process_time()
    for name in {row.module for row in HERE}:
        contract.check(sys.modules[name])
    assert time.process_time() - start < 1
