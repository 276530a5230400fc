"""The rooms of the package: which may import which, and how modules and public docstrings open."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_dobb"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

ROOMS = ("settings", "sharding", "numerics", "kernels", "background", "methods", "pytorch", "megatron")
"""From the bottom up: a room imports those before it, `errors` and `version`, and no others."""

SIDE_BY_SIDE = {("pytorch", "megatron")}
"""Rooms on the same floor, which do not know each other."""

ENTRANCES = {"__init__", "__main__", "autoload", "patch", "post_import", "doctor"}
"""Modules above all rooms. `post_import` knows none, so a room may import it."""

INTEGERS_ONLY = {"load_balancing", "ownership", "flat_redistribution", "buffer_layout", "block_width_advice", "shard"}
"""Modules of `sharding` that plans for thousands of ranks run without torch."""

FRONT_ENDS = {"megatron_dobb.megatron.bridge"}
"""Modules with a public class of one method."""

METHODS = {path.name for path in (PACKAGE / "methods").iterdir() if path.is_dir() and path.name != "__pycache__"}


def imports(module, *, for_types=True):
    """Every module that a module imports anywhere, as absolute dotted names, with the line."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    nodes = list(ast.walk(ast.parse(path.read_text())))
    only_types = [node for node in nodes if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    skipped = set() if for_types else {inner for node in only_types for inner in ast.walk(node)}
    for node in nodes:
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inside = f"{origin}.{alias.name}"
                yield (inside if inside in MODULES else origin), node.lineno


def room(module):
    """The first folder or module below the package."""
    return module.split(".")[1] if "." in module else "__init__"


def method_of(module):
    """The method whose folder, or whose own file, a module is; None for all others."""
    return next((name for name in METHODS if name in module.split(".")[2:]), None)


def wrong(module, imported):
    """Why a module may not import another one of the package, or None."""
    mine, other = room(module), room(imported)
    if mine in ENTRANCES or other in ("errors", "version", "post_import", mine):
        pass
    elif other not in ROOMS or mine not in ROOMS:
        return f"{mine} is below {other}"
    elif ROOMS.index(other) > ROOMS.index(mine) or (other, mine) in SIDE_BY_SIDE:
        return f"{mine} does not know {other}"
    its_method = method_of(imported)
    if (
        its_method is not None
        and method_of(module) != its_method
        and mine not in ENTRANCES
        and module not in FRONT_ENDS
    ):
        return f"only the registry names {its_method} outside of its folders"
    return None


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_rooms_below_its_own_and_no_other_method(module):
    found = [
        f"{MODULES[module].relative_to(ROOT)}:{line}: imports {imported}: {reason}"
        for imported, line in imports(module)
        if imported.startswith("megatron_dobb") and (reason := wrong(module, imported))
    ]
    assert not found, "\n".join(found)


def test_no_module_imports_itself_in_a_circle():
    known = {module: {name for name, _ in imports(module, for_types=False) if name in MODULES} for module in MODULES}
    done, path = set(), []

    def visit(module):
        if module in path:
            raise AssertionError(" -> ".join([*path[path.index(module) :], module]))
        if module not in done:
            path.append(module)
            for other in sorted(known[module] - {module}):
                visit(other)
            done.add(path.pop())

    for module in MODULES:
        visit(module)


@pytest.mark.parametrize("module", MODULES)
def test_only_the_seam_imports_megatron_and_plans_import_no_torch(module):
    outside = {name.partition(".")[0] for name, _ in imports(module)} - {"megatron_dobb"}
    if room(module) not in ("megatron", "doctor"):
        assert "megatron" not in outside
    if room(module) == "sharding" and module.rpartition(".")[2] in INTEGERS_ONLY:
        assert "torch" not in outside
    if room(module) in ("settings", "sharding", "numerics"):
        assert "torch.distributed" not in {name for name, _ in imports(module)}


def test_nothing_in_the_package_imports_the_simple_statement_of_the_method():
    users = [module for module in MODULES for name, _ in imports(module) if name.endswith(".simple")]
    assert not users


def test_every_room_says_what_it_is_for():
    for folder in (path.parent for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE):
        lines = (ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or "").splitlines()
        assert len(lines) >= 3, folder.relative_to(ROOT)


OPENINGS = re.compile(r"(What|Of|Those|Which|See|Where|That|Whose)\b")


def documented(path):
    """The docstrings of a module and its public definitions, with their lines."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and not getattr(node, "name", "").startswith("_"):
                yield getattr(node, "lineno", 1), text


@pytest.mark.parametrize("module", MODULES)
def test_docstrings_open_with_a_verb_or_a_noun(module):
    path = MODULES[module]
    found = [
        f"{path.relative_to(ROOT)}:{n}: {text.splitlines()[0]}" for n, text in documented(path) if OPENINGS.match(text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", ["megatron_dobb", "tools", "tests", "csrc", "build_support"])
def test_no_file_is_over_500_lines(folder):
    files = [path for end in ("py", "h", "cpp", "cu", "cuh", "sh") for path in (ROOT / folder).rglob(f"*.{end}")]
    assert files
    assert not [str(path.relative_to(ROOT)) for path in files if len(path.read_text().splitlines()) > 500]
