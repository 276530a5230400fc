"""Choose the weights of a model chunk that Dobb manages, and tag them for the buffer layout."""

import re
from collections import Counter
from dataclasses import dataclass, field

from torch import nn

from ..blocks import block_width
from ..config import DobbConfig
from .adapters import Adapter, Geometry, find, matrix_of

WIDTH_ATTRIBUTE = "dobb_block_width"
NAME_ATTRIBUTE = "dobb_name"
COLUMN_SHARDS_ATTRIBUTE = "dobb_column_shards"
_LAYER = re.compile(r"(.*\blayers)\.\d+$")


@dataclass(frozen=True)
class ManagedWeight:
    """A weight on Dobb.

    Attributes:
        name: its name in the whole model, with global layer numbers.
        parameter: this rank's part of it.
        module: the layer that owns it.
        adapter: what is known about such layers.
        geometry: its global shape.
        width: width of its blocks.
    """

    name: str
    parameter: nn.Parameter
    module: nn.Module
    adapter: Adapter
    geometry: Geometry
    width: int

    @property
    def local_columns(self) -> int:
        """Columns that this rank holds."""
        return self.parameter.shape[1]


@dataclass
class ChunkPlan:
    """Which weights of one model chunk are on Dobb, and why the others are not.

    Attributes:
        root: the model chunk.
        managed: the weights on Dobb; one that several modules share appears once for each.
        adamw: number of parameters on AdamW and of their elements, for each reason.
        patterns_used: the user's name patterns that matched a weight here.
    """

    root: nn.Module
    managed: list[ManagedWeight] = field(default_factory=list)
    adamw: Counter[tuple[str, str]] = field(default_factory=Counter)
    patterns_used: set[str] = field(default_factory=set)


def manage(root: nn.Module, config: DobbConfig) -> ChunkPlan:
    """Choose and tag the managed weights of a model chunk.

    Raises:
        BlockError: if a managed weight cannot be cut into the blocks that the settings ask for.
    """
    plan = ChunkPlan(root)
    names = global_names(root)
    managed: dict[int, ManagedWeight] = {}
    reasons: dict[int, str] = {}
    owners = [
        (names[path], module, weight)
        for path, module in root.named_modules()
        if (weight := matrix_of(module)) is not None
    ]
    for path, module, weight in owners:
        # A weight that several modules share is on Dobb only if all of them let Dobb see their inputs.
        reason = _why_not(module, weight, _weight_name(path), config, plan)
        if reason is not None:
            reasons.setdefault(id(weight), reason)
    for path, module, weight in owners:
        if id(weight) in reasons:
            continue
        name = _weight_name(path)
        known = managed.get(id(weight))
        adapter = find(module)
        assert adapter is not None
        if known is not None:
            plan.managed.append(ManagedWeight(known.name, weight, module, adapter, known.geometry, known.width))
            continue
        geometry = adapter.geometry(module)
        width = block_width(name, geometry.columns, column_shards=geometry.column_shards, **config.blocks_of(name))
        setattr(weight, WIDTH_ATTRIBUTE, width)
        setattr(weight, NAME_ATTRIBUTE, name)
        setattr(weight, COLUMN_SHARDS_ATTRIBUTE, geometry.column_shards)
        managed[id(weight)] = ManagedWeight(name, weight, module, adapter, geometry, width)
        plan.managed.append(managed[id(weight)])
    for parameter in root.parameters():
        if parameter.requires_grad and id(parameter) not in managed:
            for tag in (WIDTH_ATTRIBUTE, NAME_ATTRIBUTE):
                if hasattr(parameter, tag):  # the model was wrapped before, with other settings
                    delattr(parameter, tag)
            reason = reasons.get(id(parameter)) or _shape_reason(parameter)
            plan.adamw[reason, "parameters"] += 1
            plan.adamw[reason, "elements"] += parameter.numel()
    return plan


def _weight_name(path: str) -> str:
    return f"{path}.weight" if path else "weight"


def _why_not(module: nn.Module, weight: nn.Parameter, name: str, config: DobbConfig, plan: ChunkPlan) -> str | None:
    """Why a 2-D weight goes to AdamW; None if Dobb manages it."""
    if getattr(weight, "is_embedding_or_output_parameter", False) or getattr(weight, "shared_embedding", False):
        return "embedding or output layer"
    adapter = find(module)
    if adapter is None:
        return f"no adapter for {type(module).__name__}"
    refusal = adapter.refusal(module)
    if refusal is not None:
        return refusal
    plan.patterns_used |= config.patterns_matching(name)
    return "excluded by --dobb-exclude" if config.excluded(name) else None


def _shape_reason(parameter: nn.Parameter) -> str:
    return "not a matrix (norms, biases)" if parameter.ndim != 2 else "2-D, but no layer's weight"


def global_names(root: nn.Module) -> dict[str, str]:
    """Names of all modules with layer numbers counted over all pipeline stages, from 0.

    Megatron numbers the layers of a stage from 0 in module names and from 1 over the whole model in
    `layer_number`; wrappers such as Float16Module add a leading `module.`.
    """
    renamed: dict[str, str] = {"": ""}
    for path, module in root.named_modules():
        if not path:
            continue
        parent, _, last = path.rpartition(".")
        name = f"{renamed[parent]}.{last}" if renamed[parent] else last
        match = _LAYER.match(name)
        number = getattr(module, "layer_number", None)
        if match and isinstance(number, int):
            name = f"{match[1]}.{number - 1}"
        renamed[path] = "" if name == "module" else name
    return renamed
