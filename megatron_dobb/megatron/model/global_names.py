"""Names that mean the same module on every rank: layers and experts counted over the whole model."""

import re
from typing import Any

from torch import nn

_LAYER = re.compile(r"(.*\blayers)\.\d+$")
_EXPERT = re.compile(r"(.*\blocal_experts)\.(\d+)$")
_EXPERT_WEIGHT = re.compile(r"(weight)(\d+)$")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|(?<=\.weight)\d+$")


def global_names(root: nn.Module) -> dict[str, str]:
    """Names of all modules with layers counted over all pipeline stages and experts over all ranks, from 0.

    Megatron numbers the layers of a stage from 0 in module names and from 1 over the whole model in
    `layer_number`, and a rank's experts from 0; wrappers such as Float16Module add a leading `module.`.
    """
    renamed: dict[str, str] = {"": ""}
    offsets = _first_experts(root)
    for path, module in root.named_modules():
        if not path:
            continue
        parent, _, last = path.rpartition(".")
        name = f"{renamed[parent]}.{last}" if renamed[parent] else last
        layer, expert = _LAYER.match(name), _EXPERT.match(name)
        number = getattr(module, "layer_number", None)
        if layer and isinstance(number, int):
            name = f"{layer[1]}.{number - 1}"
        elif expert:
            name = f"{expert[1]}.{int(expert[2]) + offsets[path]}"
        renamed[path] = "" if name == "module" else name
    return renamed


def weight_names(root: nn.Module) -> dict[tuple[str, str], str]:
    """Global names of all parameters that modules own, by the module's path and the parameter's name in it."""
    renamed, offsets = global_names(root), _first_experts(root)
    names = {}
    for path, module in root.named_modules():
        for own in module._parameters:
            numbered = _EXPERT_WEIGHT.match(own)
            name = f"{numbered[1]}{int(numbered[2]) + offsets[path]}" if numbered else own
            names[path, own] = f"{renamed[path]}.{name}" if renamed[path] else name
    return names


def kind_of(name: str) -> str:
    """The name of a weight without the numbers of layers and experts."""
    return _NUMBER.sub("*", name)


def _first_experts(root: nn.Module) -> dict[str, int]:
    """For every module's path, the global number of the first of this rank's experts around it; 0 outside of any."""
    offsets: dict[str, int] = {}
    for path, module in root.named_modules():
        found: Any = module
        experts, group = getattr(found, "num_local_experts", None), getattr(found, "ep_group", None)
        if isinstance(experts, int) and group is not None:
            offsets[path] = group.rank() * experts
        else:
            offsets[path] = offsets.get(path.rpartition(".")[0], 0)
    return offsets
