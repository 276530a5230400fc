"""Every setting of Dobb, validated at birth. Defaults are the paper's principal configuration (PAPER, section 4)."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal, TypedDict, get_args

import torch

from ...errors import ConfigError
from ...kernels.dispatch import BACKENDS, Backend
from .kernels import PRECISIONS, Precision
from .orthogonalize import Method

DEFAULT_BLOCKS = 16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
QR_METHODS = get_args(Method)
CAPTURE_POLICIES = ("first", "all")

Norm = Literal["sign", "l2"]
Side = Literal["input", "output"]
Source = Literal["activation", "output-gradient", "gram", "none"]
NORMS, SIDES, SOURCES = get_args(Norm), get_args(Side), get_args(Source)


class Asked(TypedDict, total=False):
    """What a user asked for: a number of blocks, or the columns in one. Arguments of `blocks.block_width`."""

    blocks: int
    width: int


def flag(name: str) -> str:
    """The command-line flag of a setting."""
    return "--dobb-" + name.replace("_", "-")


def matches(pattern: str, weight_name: str) -> bool:
    """Whether a glob pattern names a weight: by its full name, or by the name of the module that owns it."""
    return fnmatchcase(weight_name, pattern) or fnmatchcase(weight_name.rpartition(".")[0], pattern)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class DobbConfig:
    """Settings of the optimizer; the flag of each is `--dobb-` and its name.

    Attributes:
        blocks: blocks over the input axis of every weight (`B`), or a mapping from name pattern to count where
            the pattern `*` gives the default. Exclusive with `block_width`; 16 if neither is given.
        block_width: columns in one block (`b`).
        blocks_for: block counts for weights whose name matches a glob pattern; the first match wins.
        refresh_interval: steps between two refreshes of the bases (`T`).
        iterations: orthogonal iterations in one refresh (`k`).
        momentum: decay of the momentum (`mu`), in [0, 1).
        moment_beta: decay of the second moments (`beta_A`), in [0, 1).
        nesterov: project `mu M + (1 - mu) G` in place of `M`.
        qr: how a basis is orthogonalised: `householder`, `cholesky` or `eigh` (exact eigendecomposition).
        capture: `first` takes the first `capture_sequences` sequences of a global batch, `all` every one.
        capture_sequences: number of sequences; `None` means the first global micro-batch at the first launch.
        exclude: glob patterns of weights that AdamW updates instead.
        update_scale: `tau`, the update's RMS for a weight with `m >= n`.
        moment_dtype: storage of the moments, `fp32` or `bf16`.
        basis_dtype: storage of the bases, `fp32` or `bf16`.
        moment_transport: in what captured sums travel between ranks, `fp32`, or `bf16` for half the bytes; they are
            added up in fp32 either way.
        norm: what the coefficients become: `sign` takes their signs, `l2` gives each of their columns unit norm
            (Dobb-l2; rows, on the output side).
        side: the axis of a weight that its blocks divide: `input`, or `output` (Dobb-G).
        source: whose second moment the bases diagonalise: `activation`, the layer's inputs (input side only);
            `output-gradient`, the gradients of its outputs (output side only); `gram`, the gradient itself, `G^T G` or
            `G G^T` (Table 13); `none`, no basis at all, so that `l2` on the output side is RMNP. `None` means
            `activation` on the input side and `output-gradient` on the other.
        backend: what computes the update, the moment sums and the bases: `auto` takes the compiled extension where it
            is there, `extension` and `reference` (plain PyTorch) insist on one.
        precision: `exact` decides signs as fp32 products would, `bf16` may round the momentum and the basis first.
        load_other_optimizer: continue Megatron's checkpoint of AdamW, whose first moments become the momentum.
        overlap_refresh: refresh the bases beside the backward pass (Megatron only; see docs/performance.md).
        stagger: refresh about 1/T of the weights on every step, in place of all of them on every T-th; the first step
            refreshes all.
        log_diagnostics_interval: steps between two logs of the diagnostics (see docs/diagnostics.md); 0 for none.
        log_diagnostics_weights: glob patterns of the weights to log, each with the spectrum of its update. Without
            them all are logged, and the spectra of a few, in turn.

    Raises:
        ConfigError: if a value is out of range or two settings contradict each other.
    """

    method: ClassVar[str] = "dobb"

    blocks: int | Mapping[str, int] | None = None
    block_width: int | None = None
    blocks_for: Mapping[str, int] = field(default_factory=dict)
    refresh_interval: int = 9
    iterations: int = 1
    momentum: float = 0.95
    moment_beta: float = 0.95
    nesterov: bool = False
    qr: Method = "householder"
    capture: str = "first"
    capture_sequences: int | None = None
    exclude: tuple[str, ...] = ()
    update_scale: float = 0.2
    moment_dtype: str = "fp32"
    basis_dtype: str = "bf16"
    moment_transport: str = "fp32"
    norm: Norm = "sign"
    side: Side = "input"
    source: Source | None = None
    backend: Backend = "auto"
    precision: Precision = "exact"
    load_other_optimizer: bool = False
    overlap_refresh: bool = True
    stagger: bool = False
    log_diagnostics_interval: int = 0
    log_diagnostics_weights: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._settle_patterns()
        self._settle_source()
        if self.blocks is not None and self.block_width is not None:
            raise ConfigError(
                f"--dobb-blocks {self.blocks} and --dobb-block-width {self.block_width} exclude each other: "
                "give one of them"
            )
        if self.blocks is None and self.block_width is None:
            object.__setattr__(self, "blocks", DEFAULT_BLOCKS)
        self._check_values()

    def _settle_patterns(self) -> None:
        """Give the settings that hold name patterns the one form in which the rest of the code knows them."""
        if not isinstance(self.blocks_for, Mapping):
            raise ConfigError(f"{flag('blocks_for')} {self.blocks_for!r} must map name patterns to block counts")
        blocks_for = dict(self.blocks_for)
        if isinstance(self.blocks, Mapping):
            per_pattern = dict(self.blocks)
            object.__setattr__(self, "blocks", per_pattern.pop("*", None))
            blocks_for |= per_pattern
        object.__setattr__(self, "blocks_for", blocks_for)
        for name in ("exclude", "log_diagnostics_weights"):
            value = getattr(self, name)
            given = (value,) if isinstance(value, str) else value
            if not isinstance(given, Iterable):
                raise ConfigError(f"{flag(name)} {given!r} must be a sequence of name patterns")
            object.__setattr__(self, name, tuple(given))
        for name, patterns in self._patterns().items():
            for pattern in patterns:
                if not isinstance(pattern, str) or not pattern:
                    raise ConfigError(f"{flag(name)} {pattern!r} is not a name pattern, such as '*.mlp.linear_fc2'")

    def _patterns(self) -> dict[str, tuple[str, ...]]:
        """The user's name patterns, by the setting that they are given to."""
        return {
            "exclude": self.exclude,
            "blocks_for": tuple(self.blocks_for),
            "log_diagnostics_weights": self.log_diagnostics_weights,
        }

    def _settle_source(self) -> None:
        self._check_choice("norm", NORMS)
        self._check_choice("side", SIDES)
        if self.source is None:
            object.__setattr__(self, "source", "activation" if self.side == "input" else "output-gradient")
        self._check_choice("source", SOURCES)
        for source, side in (("activation", "input"), ("output-gradient", "output")):
            if self.source == source and self.side != side:
                raise ConfigError(
                    f"--dobb-source {source} with --dobb-side {self.side}: these second moments belong to the {side} "
                    f"axis; use --dobb-side {side}, or --dobb-source gram"
                )
        if self.source == "none":
            for name in ("blocks", "block_width", "blocks_for"):
                if getattr(self, name):
                    raise ConfigError(
                        f"{flag(name)} {getattr(self, name)} has no meaning with --dobb-source none, which has no "
                        "bases: leave one of them out"
                    )
            if self.backend == "extension":
                raise ConfigError(
                    "--dobb-backend extension has no kernel for --dobb-source none, which has nothing to project: use "
                    "--dobb-backend auto"
                )
            object.__setattr__(self, "block_width", 1)
        if not self.captures and (self.capture != "first" or self.capture_sequences is not None):
            raise ConfigError(
                f"--dobb-capture {self.capture} and --dobb-capture-sequences {self.capture_sequences} have no meaning "
                f"with --dobb-source {self.source}, which looks at no sequences: leave them out"
            )

    @property
    def captures(self) -> bool:
        """Whether the second moments come from the model's forward or backward pass."""
        return self.source in ("activation", "output-gradient")

    def _check_values(self) -> None:
        for name in ("blocks", "block_width", "capture_sequences"):
            if getattr(self, name) is not None:
                self._check_count(name, getattr(self, name))
        for name in ("refresh_interval", "iterations"):
            self._check_count(name, getattr(self, name))
        for pattern, count in self.blocks_for.items():
            self._check_count("blocks_for", count, shown=f"{pattern}={count}")
        for name in ("momentum", "moment_beta"):
            value = getattr(self, name)
            if not (_is_number(value) and 0.0 <= value < 1.0):
                raise ConfigError(f"{flag(name)} {value} must be at least 0 and below 1; the usual value is 0.95")
        if not (_is_number(self.update_scale) and 0 < self.update_scale < math.inf):
            raise ConfigError(f"{flag('update_scale')} {self.update_scale} must be positive; the usual value is 0.2")
        for name in ("nesterov", "load_other_optimizer", "overlap_refresh", "stagger"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{flag(name)} {getattr(self, name)!r} must be True or False")
        self._check_choice("qr", QR_METHODS)
        self._check_choice("capture", CAPTURE_POLICIES)
        self._check_choice("moment_dtype", tuple(DTYPES))
        self._check_choice("basis_dtype", tuple(DTYPES))
        self._check_choice("moment_transport", tuple(DTYPES))
        self._check_choice("backend", BACKENDS)
        self._check_choice("precision", PRECISIONS)
        self._check_diagnostics()
        if self.stagger and not self.captures:
            raise ConfigError(
                f"--dobb-stagger with --dobb-source {self.source}: only bases of what the forward and backward passes "
                "show can be refreshed in turn; leave it out, or use --dobb-source activation"
            )
        if self.capture == "all" and self.capture_sequences is not None:
            raise ConfigError(
                f"--dobb-capture-sequences {self.capture_sequences} has no meaning with --dobb-capture all: "
                "leave one of them out"
            )

    def _check_diagnostics(self) -> None:
        interval = self.log_diagnostics_interval
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 0:
            raise ConfigError(
                f"{flag('log_diagnostics_interval')} {interval} must be a whole number: steps between two logs, such "
                "as 100, or 0 for none"
            )
        if self.log_diagnostics_weights and not interval:
            raise ConfigError(
                f"{flag('log_diagnostics_weights')} {' '.join(self.log_diagnostics_weights)} has no meaning without "
                f"{flag('log_diagnostics_interval')}: give that too, such as 100"
            )

    def _check_count(self, name: str, value: Any, shown: str | None = None) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{flag(name)} {shown or value} must be a whole number of at least 1")

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise ConfigError(f"{flag(name)} {value} is unknown: use one of {', '.join(choices)}")

    def blocks_of(self, weight_name: str) -> Asked:
        """The `blocks=` or `width=` argument of `block_width` for one weight."""
        pattern = self.pattern_of(weight_name)
        if pattern is not None:
            return {"blocks": self.blocks_for[pattern]}
        if self.block_width is not None:
            return {"width": self.block_width}
        assert isinstance(self.blocks, int)
        return {"blocks": self.blocks}

    def pattern_of(self, weight_name: str) -> str | None:
        """The pattern of `blocks_for` that says the number of a weight's blocks, the first that names it."""
        return next((pattern for pattern in self.blocks_for if matches(pattern, weight_name)), None)

    def excluded(self, weight_name: str) -> bool:
        """Whether the user sent this weight to AdamW."""
        return any(matches(pattern, weight_name) for pattern in self.exclude)

    def patterns_matching(self, weight_name: str) -> set[str]:
        """The user's patterns that name this weight."""
        used = {p for p in (*self.exclude, *self.blocks_for) if matches(p, weight_name)}
        if not self.excluded(weight_name):
            used |= {p for p in self.log_diagnostics_weights if matches(p, weight_name)}
        return used

    def check_patterns_used(self, used: set[str]) -> None:
        """Raise for a pattern that names no weight of the model.

        Args:
            used: every pattern that matched at least one weight, over all ranks.
        """
        for name, patterns in self._patterns().items():
            for pattern in patterns:
                if pattern not in used:
                    raise ConfigError(
                        f"{flag(name)} {pattern!r} matches no weight that Dobb could manage; patterns are globs "
                        "over full names, such as '*.mlp.linear_fc2'"
                    )

    def diagnosed(self, weight_name: str) -> bool:
        """Whether the diagnostics of a weight are logged."""
        patterns = self.log_diagnostics_weights
        return not patterns or any(matches(pattern, weight_name) for pattern in patterns)
