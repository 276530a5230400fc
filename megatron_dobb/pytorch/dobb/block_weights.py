"""Choose the weights of a plain PyTorch model that Dobb manages, and the width of their blocks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ...methods.dobb.blocks import block_width
from ...methods.dobb.capture import Source
from ...methods.dobb.settings import DobbConfig
from ...settings.patterns import matches
from ..select_weights import LinearWeight, Predicate, linear_layers, select_weights


@dataclass(frozen=True)
class BlockWeight(LinearWeight):
    """Weight managed by Dobb.

    Attributes:
        width: columns in one block, `b`; rows, on the output side.
        output_side: whether the blocks divide the output features.
    """

    width: int
    output_side: bool = False

    @property
    def blocks(self) -> int:
        """Blocks over the input features, `B`; over the output features, on that side."""
        return (self.rows if self.output_side else self.columns) // self.width

    @property
    def detail(self) -> str:
        """The blocks, for messages."""
        return f", with {self.blocks} blocks of {self.width} columns"

    def sources(self) -> Iterator[Source]:
        """Return the layers that expose this weight's activations, on the side of its blocks."""
        for module in self.modules:
            if self.output_side:
                yield Source(self.name, module, self.width, _output, 0, of_gradient=True)
            else:
                yield Source(self.name, module, self.width, _input, 0)


@dataclass(frozen=True)
class BlockSelection:
    """The parameters of a model, by name: those on Dobb, why others are on AdamW, and the number of frozen ones."""

    dobb: Mapping[str, BlockWeight]
    adamw: Mapping[str, str]
    frozen: int


def select_block_weights(root: nn.Module, config: DobbConfig, predicates: Sequence[Predicate] = ()) -> BlockSelection:
    """Choose the weights that Dobb manages.

    Args:
        root: the model.
        config: the settings.
        predicates: functions of a weight's name and the weight; one that returns true leaves it to AdamW.

    Raises:
        ConfigError: if a name pattern matches nothing.
        BlockError: if the blocks do not divide a layer's input features.
        UnsupportedError: if weights are shards of some other library.
    """

    def excluded(name: str, weight: nn.Parameter) -> bool:
        return config.excluded(name) or any(predicate(name, weight) for predicate in predicates)

    selection = select_weights(root, excluded, "Dobb")
    _check_patterns(root, config)
    output_side = config.side == "output"
    dobb = {}
    for name, weight in selection.matrices.items():
        features = weight.rows if output_side else weight.columns
        asked, pattern = config.blocks_of(name), config.pattern_of(name)
        width = block_width(name, features, side=config.side, pattern=pattern, **asked)
        dobb[name] = BlockWeight(name, weight.parameter, weight.modules, width, output_side)
    return BlockSelection(dobb, selection.adamw, selection.frozen)


def _input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The input of an `nn.Linear`, `[batch, ..., n]`."""
    x: Tensor = args[0] if args else kwargs["input"]
    return x if x.ndim > 1 else x[None]


def _output(module: nn.Module, output: Any) -> Tensor:
    """The output of an `nn.Linear`, `[batch, ..., m]` or `[m]`."""
    assert isinstance(output, Tensor)
    return output


def _check_patterns(root: nn.Module, config: DobbConfig) -> None:
    layers = [name for owners in linear_layers(root).values() for name, _ in owners]
    everything = [name for name, _ in root.named_parameters(remove_duplicate=False)]
    used = {pattern for pattern in config.exclude if any(matches(pattern, name) for name in everything)}
    for patterns in (config.blocks_for, config.log_diagnostics_weights):
        used |= {pattern for pattern in patterns if any(matches(pattern, name) for name in layers)}
    config.check_patterns_used(used)
