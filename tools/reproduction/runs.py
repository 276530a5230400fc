"""Description of a training run: the sizes, the optimizers by name, and the run's own description."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_dobb import DobbConfig


class MissingPart(RuntimeError):
    """Something that a run needs is not here, such as a checkout of Dion or an option of Dobb."""


@dataclass(frozen=True)
class Size:
    """A model and how long it is trained.

    Attributes:
        layers: transformer layers.
        width: width of the residual stream; a multiple of `heads`.
        heads: attention heads.
        context: tokens (bytes of text) in a sequence.
        sequences: sequences in a batch.
        steps: training steps.
        evaluate_every: steps between two evaluations; the last step is evaluated too.
        evaluation_batches: held-out batches, the same ones each time and for every run.
        refresh_interval: T of every Dobb whose settings do not give another. The paper's 10,000 steps have 1,111
            refreshes at T = 9; with T = 9 in a short run, bases would still be far from the eigenvectors at its end.
        text: a key of `training.TEXTS`.
    """

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128
    sequences: int = 8
    steps: int = 600
    evaluate_every: int = 60
    evaluation_batches: int = 16
    refresh_interval: int = 1
    text: str = "english"


PRESETS = {
    "minutes": Size(),
    "hours": Size(width=192, heads=6, sequences=16, steps=1200, evaluate_every=100),
}
"""Sizes for CPUs. On one core of an EPYC with AVX2, a run takes about 2 and about 15 minutes."""


@dataclass(frozen=True)
class Method:
    """An optimizer with its settings.

    Attributes:
        optimizer: a key of `optimizers.BUILDERS`.
        settings: what it is given besides learning rate and weight decay; of `Dobb`, any of its settings.
        paper: the name of its figure in `paper.FINAL_LOSS`, if there is one.
    """

    optimizer: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    paper: str = ""

    def missing_settings(self) -> list[str]:
        """Settings that this version of `Dobb` does not know."""
        known = {f.name for f in dataclasses.fields(DobbConfig)}
        return sorted(self.settings.keys() - known) if self.optimizer == "dobb" else []


def dobb(blocks: int, paper: str = "", **settings: Any) -> Method:
    """Dobb with `blocks` blocks over the input axis."""
    return Method("dobb", {"blocks": blocks, **settings}, paper)


_BLOCKS = (1, 4, 16, 64)
METHODS: dict[str, Method] = {
    "adamw": Method("adamw", paper="adamw"),
    "muon": Method("muon", paper="muon"),
    "muon-plain": Method("muon", {"nesterov": False}),
    "rmnp": Method("dobb", {"norm": "l2", "side": "output", "source": "none"}, "rmnp"),
    **{f"dobb-{b}": dobb(b, f"dobb-{b}") for b in _BLOCKS},
    **{f"dobb-nesterov-{b}": dobb(b, f"dobb-nesterov-{b}", nesterov=True) for b in _BLOCKS},
    **{f"dobb-l2-{b}": dobb(b, f"dobb-l2-{b}", norm="l2") for b in _BLOCKS},
    **{f"dobb-g-{b}": dobb(b, f"dobb-g-{b}", side="output") for b in _BLOCKS},
    **{f"dobb-g-l2-{b}": dobb(b, f"dobb-g-l2-{b}", side="output", norm="l2") for b in _BLOCKS},
    **{f"dion-{part}": Method("dion", {"rank_fraction": 1 / part}, f"dion-{part}") for part in (1, 4, 16)},
}
"""Methods that `compare` knows, by name: the number is B, or n / rank of Dion. A variant of Dobb is one line more.

`muon` has Nesterov momentum, as PyTorch's does by default; `muon-plain` has not, as Dobb of the paper."""

DEFAULT_METHODS = ("adamw", "muon", "rmnp", "dobb-1", "dobb-4", "dobb-16", "dobb-l2-4", "dobb-g-4", "dion-4")


@dataclass(frozen=True)
class Run:
    """Everything that decides a run's result, apart from the machine."""

    method: Method
    learning_rate: float
    seed: int
    size: Size
    weight_decay: float = 0.1
    warmup: float = 0.1
    clip: float = 1.0

    def key(self) -> str:
        """The run in one line: equal for runs that give the same result."""
        facts = dataclasses.asdict(self)
        del facts["method"]["paper"]
        return json.dumps(facts, sort_keys=True)
