"""Megatron's distributed checkpoints, read without Megatron: Dobb's tensors, and the momentum where it can be found."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_dobb.errors import CheckpointError
from megatron_dobb.megatron.dobb.run_metadata import DobbRunMetadata
from megatron_dobb.megatron.model.global_names import kind_of
from megatron_dobb.megatron.options.flags import OPTIMIZER
from megatron_dobb.methods.dobb.settings import DobbConfig

from .buckets import Buckets
from .contents import Facts, State, not_ours
from .index import Index
from .unpickling import load

_COMMON_KEY, _COMMON_FILE = "common_state", "common.pt"
_CONTENT, _SHARDING = "content_metadata", "distrib_optim_sharding_type"
_OURS = re.compile(r"(?P<prefix>(?:chained_\d+\.)?optimizer\.)dobb\.(?P<kind>moment|basis)\.(?P<name>.+)")
_MOMENTUM, _SECOND = "state.exp_avg.", "state.exp_avg_sq."
_LAYER = re.compile(r"(?<=\blayers)\.(\d+)(?=\.)")
_LOCAL_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
_GROUPED_EXPERT = re.compile(r"\.experts\.(\w+)\.weight(\d+)$")
_PLACING = ("tensor", "pipeline", "context", "expert")


class MegatronCheckpoint:
    """A folder of one iteration.

    Raises:
        CheckpointError: if it is not Dobb's, or of a newer format.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        common = _common(index)
        content, arguments = common.get(_CONTENT), common.get("args")
        content = content if isinstance(content, Mapping) else {}
        saved = DobbRunMetadata.read(content, OPTIMIZER)
        if saved is None:
            writer = getattr(arguments, "optimizer", None)
            by = f"it was written by --optimizer {writer}" if isinstance(writer, str) and writer != OPTIMIZER else ""
            raise not_ours(index.folder, by)
        layout = content.get(_SHARDING)
        iteration = common.get("iteration")
        self._keys: dict[str, dict[str, str]] = {}
        self._prefixes: dict[str, str] = {}
        for key in index.entries:
            ours = _OURS.fullmatch(key)
            if ours and index.is_tensor(key):
                self._keys.setdefault(ours["name"], {})[ours["kind"]] = key
                self._prefixes[ours["name"]] = ours["prefix"]
        if not self._keys and saved.source == "none":
            self._prefixes = dict(_without_moments(index, saved))
        if not self._prefixes:
            raise CheckpointError(
                f"{index.folder} was written by Dobb, and has no moments of any weight: "
                + (
                    "it has none with --dobb-source none, and its optimizer state is not by the names of the weights; "
                    "save with --dist-ckpt-optim-fully-reshardable"
                    if saved.source == "none"
                    else "it was saved with --no-save-optim, or is damaged; give another iteration"
                )
            )
        self.facts = Facts(
            "megatron",
            str(layout),
            saved.version,
            iteration if isinstance(iteration, int) else None,
            saved.attempted_steps,
            saved.capture_sequences,
            saved.side,
            saved.source,
            _argument(arguments, "dobb_norm", str),
            saved.refresh_is_asked,
            {key: saved.plain()[key]
             for key in ("blocks", "block_width", "blocks_for", "exclude", "moment_dtype", "basis_dtype")},
            {name: _argument(arguments, name, int)
             for name in (*(f"{axis}_model_parallel_size" for axis in _PLACING), "world_size")},
        )  # fmt: skip
        self._buckets = Buckets(index)

    @classmethod
    def recognises(cls, index: Index) -> bool:
        """True if a folder is Megatron's at all."""
        return bool(_common_keys(index)) or (index.folder / _COMMON_FILE).is_file()

    @property
    def names(self) -> Sequence[str]:
        """Names of the weights on Dobb."""
        return list(self._prefixes)

    def state(self, name: str) -> State:
        """Read the state of one of them."""
        if name not in self._keys:
            return State(None, None, *self._momentum(name, None))
        keys = self._keys[name]
        lost = [kind for kind in ("moment", "basis") if kind not in keys]
        if lost:
            raise CheckpointError(f"{self.index.folder} has no {' and no '.join(lost)} of {name}: it is damaged")
        moment, basis = (self.index.tensor(keys[kind]) for kind in ("moment", "basis"))
        if moment.ndim != 3 or moment.shape != basis.shape:
            raise CheckpointError(
                f"{self.index.folder}: the moment of {name} is {list(moment.shape)} and its basis {list(basis.shape)}, "
                "which no version wrote: it is damaged"
            )
        momentum, reason = self._momentum(name, moment.shape[0] * moment.shape[2])
        return State(moment, basis, momentum, reason)

    def _momentum(self, name: str, features: int | None) -> tuple[Tensor | None, str | None]:
        """The momentum of a weight whose blocks, if it has any, divide so many features, or why there is none."""
        if features is not None and self.facts.side == "output" and name.endswith("linear_fc1.weight"):
            return None, "the rows of a gated layer may lie in another order in the checkpoint than its blocks"
        axis = 1 if self.facts.side == "input" else 0
        if self.facts.layout == "fully_reshardable":
            found = self._whole(self._prefixes[name] + _MOMENTUM, name) or self._whole("optimizer." + _MOMENTUM, name)
            if not found:
                return None, "no momentum was found under its name"
            momentum = torch.cat([self.index.tensor(key, lead) for key, lead in found])
        elif self.facts.layout == "dp_reshardable":
            found = self._whole("", name)
            if not found:
                return None, "dp_reshardable keeps momenta by their place in buckets, and the weight was not found"
            weights = (self.index.tensor(key, lead) for key, lead in found)
            flat = self._buckets.momentum(torch.cat(list(weights)))
            if flat is None:
                return None, (
                    "dp_reshardable keeps momenta by their place in buckets, and no masters there are this weight's, "
                    "whole or in equal tensor-parallel parts; save with --dist-ckpt-optim-fully-reshardable"
                )
            momentum = flat
        else:
            return None, f"momenta of the layout {self.facts.layout} are not known"
        if momentum.ndim != 2 or momentum.shape[axis] != (features or momentum.shape[axis]):
            return None, f"what was found under its name has the shape {list(momentum.shape)}"
        return momentum, None

    def _whole(self, prefix: str, name: str) -> list[tuple[str, tuple[int, ...]]]:
        """Keys and places of the parts that a weight's rows are, in the tensors of all layers and experts."""
        for own, lead in places(name):
            key = prefix + own
            if self.index.is_tensor(key):
                return [(key, lead)]
            # Some layers' rows are kept apart: gates, and the parts of Mamba's projection.
            parts = [k for k in self.index.entries if k.startswith((f"{key}.", f"{key}_")) and self.index.is_tensor(k)]
            if parts and all(len(self.index.shape(part)) == len(lead) + 2 for part in parts):
                return [(part, lead) for part in sorted(parts)]
        return []


def _without_moments(index: Index, saved: DobbRunMetadata) -> Iterator[tuple[str, str]]:
    """Names of the weights that have a momentum and no second moment, and what is before `state` in its key."""
    excluded = DobbConfig(source="none", exclude=tuple(saved.exclude)).excluded
    kept = [
        (name, prefix, f"{prefix}{_SECOND}{own}", lead)
        for key in index.entries
        for prefix, found, own in (key.partition(_MOMENTUM),)
        if found and index.is_tensor(key)
        for lead in itertools.product(*map(range, index.shape(key)[:-2]))
        for name in _names_at(own, lead)
    ]
    mixed = {kind_of(name) for name, *_ in kept if excluded(name)}
    for name, prefix, second, lead in kept:
        has_second = second in index.entries
        if has_second and kind_of(name) in mixed and not excluded(name):
            # Where a weight is on AdamW in any layer, all have a second moment; those on Dobb never fill it.
            has_second = bool(index.tensor(second, lead).any())
        if not has_second:
            yield name, prefix


def _names_at(own: str, lead: tuple[int, ...]) -> Iterator[str]:
    """The name of the weight that is kept under a key, at a place of its leading dimensions; none if it is unknown."""
    name = own = re.sub(r"(?<=\.weight)[._]\w+$", "", own)  # of a part that is kept apart
    rest = list(lead)
    if rest and re.search(r"\blayers\.(?!\d)", name):
        name = re.sub(r"\blayers\.", f"layers.{rest.pop(0)}.", name, count=1)
    if rest and ".experts.experts." in name:
        name = re.sub(r"\.experts\.experts\.(\w+)\.weight$", rf".experts.\1.weight{rest.pop()}", name)
    elif rest:
        name = name.replace(".experts.", f".experts.local_experts.{rest.pop()}.", 1)
    if (own, lead) in places(name):
        yield name


def places(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Under which keys Megatron may keep a weight, and at which place of the leading dimensions there.

    All layers alike are one tensor, and all experts, with a dimension for each of the two; or else none of them.
    """
    layers = list(_LAYER.finditer(name))
    for kept in itertools.product((False, True), repeat=len(layers)):
        own, lead = name, []
        for layer, keep in reversed(list(zip(layers, kept, strict=True))):
            if not keep:
                own = own[: layer.start()] + own[layer.end() :]
                lead.insert(0, int(layer[1]))
        local, grouped = _LOCAL_EXPERT.search(own), _GROUPED_EXPERT.search(own)
        if local:
            number = int(local[1])
            yield _LOCAL_EXPERT.sub(".experts.", own), (*lead, number)
            yield _LOCAL_EXPERT.sub(f".experts.{number}.", own), tuple(lead)
        elif grouped:
            number = int(grouped[2])
            head = own[: grouped.start()]
            yield f"{head}.experts.experts.{grouped[1]}.weight", (*lead, number)
            yield f"{head}.experts.experts.{number}.{grouped[1]}.weight", tuple(lead)
        else:
            yield own, tuple(lead)


def _common_keys(index: Index) -> list[str]:
    return [key for key in index.others() if key.partition("/")[0] == _COMMON_KEY]


def _common(index: Index) -> Mapping[str, Any]:
    """Load the state that all ranks share: Megatron's arguments, and its metadata on the checkpoint's content."""
    keys = _common_keys(index)
    if keys:
        found = index.other(keys[0])
        found = found[0] if isinstance(found, list) and len(found) == 1 else found
    else:
        try:
            found = load(index.folder / _COMMON_FILE)
        except Exception as error:  # whatever torch.load makes of a damaged file
            raise CheckpointError(f"cannot read {index.folder / _COMMON_FILE} ({error!r}): it is damaged") from error
    return found if isinstance(found, Mapping) else {}


def _argument(arguments: Any, name: str, kind: type) -> Any:
    value = getattr(arguments, name, None)
    return value if isinstance(value, kind) else None
