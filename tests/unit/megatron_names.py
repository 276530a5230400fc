"""The names of Megatron that `megatron_dobb/megatron` uses, derived from its syntax trees.

* Imported: `from megatron.x import y`, and constants of the form `megatron.x:Y` or `megatron.x`.
* Overridden: methods of a subclass of `DistributedOptimizer` (or of Bridge's config) that the base class has too.
* Read on self: attributes of such a subclass that no class of ours defines.
* Read elsewhere: every other attribute whose name neither this package nor torch nor Python's own types define. The
  receivers are untyped, so these are compared by name alone; that the owner in the table has the name, the probe tells.
"""

import argparse
import ast
import functools
import inspect
import logging
import pathlib
import re
import types
import weakref

import torch
import torch.distributed as dist

import megatron_dobb

PACKAGE = pathlib.Path(megatron_dobb.__file__).parent
FILES = sorted((PACKAGE / "megatron").rglob("*.py"))
STRING = re.compile(r"(megatron\.[\w.]+)(?::(\w+))?")
TABLE = "contract.py"


@functools.cache
def tree_of(file):
    return ast.parse(file.read_text())


def trees():
    return [(file, tree_of(file)) for file in FILES if file.name != TABLE]


def base_names(definition):
    return [ast.unparse(base).split("[")[0] for base in definition.bases]


@functools.cache
def classes():
    """Every class of the package by name."""
    found = {}
    for file in PACKAGE.rglob("*.py"):
        found |= {node.name: node for node in ast.walk(tree_of(file)) if isinstance(node, ast.ClassDef)}
    return found


def chain(name):
    """A class of ours and its bases that are ours."""
    definition = classes().get(name)
    if definition is None:
        return []
    return [definition, *(one for base in base_names(definition) for one in chain(base))]


def members(definition):
    """What a class defines: methods, class attributes, annotations and what its methods assign to self."""
    if "Protocol" in base_names(definition):
        return set()
    names = set()
    for node in definition.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            names.add(ast.unparse(node.target))
        elif isinstance(node, ast.Assign):
            names |= {ast.unparse(target) for target in node.targets}
    for node in ast.walk(definition):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    return names


def imports():
    """`(module, name)` of everything imported from Megatron or named in a string."""
    found = set()
    for _, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("megatron."):
                found |= {(node.module, alias.name) for alias in node.names}
    return found


def classes_in_strings():
    """`(module, class)` of the layers that adapters name; `_LAYERS + "TELinear"` is one too."""
    found = set()
    for _, tree in trees():
        prefixes = {
            ast.unparse(node.targets[0]): node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        }
        for node in ast.walk(tree):
            text = None
            if isinstance(node, ast.BinOp) and isinstance(node.right, ast.Constant):
                text = prefixes.get(ast.unparse(node.left), "") + str(node.right.value)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            match = STRING.fullmatch(text or "")
            if match and match[2]:
                found.add((match[1], match[2]))
    return found


def subclasses(root):
    """Our classes below a class of Megatron's, by its name."""
    return [definition for name, definition in classes().items() if any(root in base_names(one) for one in chain(name))]


def overridden(root, names):
    """Methods of these subclasses that are among the base class's names, with their parameters."""
    found = {}
    for definition in subclasses(root):
        for node in definition.body:
            if isinstance(node, ast.FunctionDef) and node.name in names:
                arguments = [a.arg for a in [*node.args.args, *node.args.kwonlyargs] if a.arg != "self"]
                found.setdefault(node.name, set()).update(arguments)
    return found


def read_on_self(root):
    """Attributes that these subclasses read on self or super() and none of ours defines."""
    family = subclasses(root)
    ours = set().union(*(members(definition) for definition in family)) if family else set()
    found = set()
    for definition in family:
        for node in ast.walk(definition):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "super()"):
                found.add(node.attr)
    return found - ours


def attributes():
    """Every attribute that is read, with the places; also those that `getattr` and `hasattr` name."""
    found = {}
    for file, tree in trees():
        constants = {
            target.id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        modules = {
            (alias.asname or alias.name).split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        for node in ast.walk(tree):
            name = None
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                root = ast.unparse(node.value).split(".")[0]
                name = node.attr if root not in modules else None
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
                argument = node.args[1]
                name = argument.value if isinstance(argument, ast.Constant) else constants.get(ast.unparse(argument))
            if name is not None:
                found.setdefault(name, []).append(f"{file.relative_to(PACKAGE)}:{node.lineno}")
    return found


ORDINARY = [
    *(str, bytes, int, float, list, tuple, dict, set, frozenset, slice, type, property, Exception, BaseException),
    *(types.FunctionType, types.ModuleType, types.MethodType, types.SimpleNamespace, object, weakref.finalize),
    *(pathlib.Path, re.Pattern, re.Match, inspect.Signature, inspect.BoundArguments, inspect.Parameter),
    *(logging.Logger, logging.LogRecord, argparse.ArgumentParser, argparse.Action, ast.AST),
    *(torch.Tensor, torch.nn.Parameter, torch.nn.Module, torch.dtype, torch.device, torch.Size, torch.Generator),
    *(torch.optim.Optimizer, torch.cuda.Stream, torch.cuda.Event, dist.ProcessGroup),
]
"""Types whose attributes are nobody's secret."""


@functools.cache
def ordinary():
    names = {name for kind in ORDINARY for name in dir(kind)}
    for file in PACKAGE.rglob("*.py"):
        tree = tree_of(file)
        names |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        names |= {
            node.id
            for statement in tree.body
            for node in ast.walk(statement)
            if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(node, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                names |= members(node)
            if isinstance(node, ast.Assign):  # attributes that we put on Megatron's objects
                names |= {t.attr for t in node.targets if isinstance(t, ast.Attribute) and t.attr.startswith("dobb")}
    return names


def read_elsewhere():
    return {name: places for name, places in attributes().items() if name not in ordinary()}


def replaced():
    """The names that the seam assigns to modules and classes of Megatron."""
    found = set()
    for file, tree in trees():
        if file.parent.name != "seam":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name.startswith(("_patch", "_keep", "patch")):
                parameters = {argument.arg for argument in node.args.args}
                local = {
                    ast.unparse(target)
                    for statement in node.body
                    if isinstance(statement, ast.Assign) and ast.unparse(statement.value).split(".")[0] in parameters
                    for target in statement.targets
                }
                for inner in node.body:
                    for target in ast.walk(inner):
                        stored = isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store)
                        if stored and ast.unparse(target.value) in parameters | local:
                            found.add(target.attr)
    return found


def keywords():
    """The keywords of calls and the attributes that the layout's dataclass takes."""
    return {
        keyword.arg
        for _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg
    }


def strings():
    """All string constants."""
    return {
        node.value
        for _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
