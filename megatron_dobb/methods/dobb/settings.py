"""Declare every setting of Dobb. Defaults are the paper's principal configuration (the paper, section 4)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypedDict, get_args

from ...kernels.dispatch import BACKENDS, Backend
from ...settings.checks import COUNT, DECAY, DTYPE, INTERVAL, PATTERN_COUNTS, PATTERNS, POSITIVE, SWITCH, choice
from ...settings.checks import DTYPES as DTYPES
from ...settings.fields import Settings, setting
from ...settings.format import document
from ...settings.patterns import check_used, first_match, matches
from .kernels import PRECISIONS, Precision
from .orthogonalize import Method

DEFAULT_BLOCKS = 16
CAPTURE_POLICIES = ("first", "all")

Norm = Literal["sign", "l2"]
Side = Literal["input", "output"]
Source = Literal["activation", "output-gradient", "gram", "none"]
NORMS = get_args(Norm)

_VARIANTS = "[docs/variants.md](docs/variants.md)"
_DIAGNOSTICS = "[docs/diagnostics.md](docs/diagnostics.md)"


class Asked(TypedDict, total=False):
    """A number of blocks, or the columns in one: arguments of `blocks.block_width`."""

    blocks: int
    width: int


@dataclass(frozen=True)
class DobbConfig(Settings):
    """Settings of Dobb; the flag of each is `--dobb-` and its name.

    `blocks` may also be a mapping from name pattern to count, where the pattern `*` gives the default.

    Raises:
        ConfigError: if a value is out of range or two settings contradict each other.
    """

    method: ClassVar[str] = "dobb"

    blocks: int | Mapping[str, int] | None = setting(
        None,
        COUNT,
        "number of blocks along the input axis of every weight, `B`",
        metavar="B",
        default_text=str(DEFAULT_BLOCKS),
        stored=True,
    )
    block_width: int | None = setting(
        None, COUNT, "columns in one block, `b`, instead of a number of blocks", metavar="b", stored=True
    )
    blocks_for: Mapping[str, int] = setting(
        {},
        PATTERN_COUNTS,
        "block counts for weights whose name matches a glob, such as `*.mlp.linear_fc2=32`; the first match wins",
        stored=True,
    )
    refresh_interval: int = setting(9, COUNT, "steps between two refreshes of the bases, `T`", metavar="T")
    iterations: int = setting(1, COUNT, "orthogonal iterations in one refresh, `k`", metavar="k")
    momentum: float = setting(0.95, DECAY, "decay of the momentum, in [0, 1)", metavar="MU")
    moment_beta: float = setting(0.95, DECAY, "decay of the second moments, in [0, 1)", metavar="BETA")
    nesterov: bool = setting(False, SWITCH, "use Nesterov momentum: project `mu M + (1 - mu) G` in place of `M`")
    qr: Method = setting(
        "householder",
        choice(get_args(Method)),
        "method of orthogonalizing a basis: `householder`, `cholesky` (matrix products, with a check and a fallback), "
        "`eigh` (exact eigenvectors)",
    )
    capture: str = setting(
        "first",
        choice(CAPTURE_POLICIES),
        "sequences that feed the second moments: the `first` of each global batch, or `all`",
    )
    capture_sequences: int | None = setting(
        None,
        COUNT,
        "number of sequences that the capture policy `first` takes",
        metavar="N",
        default_text="first global micro-batch",
    )
    exclude: tuple[str, ...] = setting(
        (), PATTERNS, "globs of weights that AdamW updates instead", stored=True, keyword=False
    )
    update_scale: float = setting(
        0.2, POSITIVE, "RMS of the update of a weight with at least as many rows as columns, `tau`", metavar="TAU"
    )
    moment_dtype: str = setting("fp32", DTYPE, "dtype for storing the moments, `fp32` or `bf16`", stored=True)
    basis_dtype: str = setting("bf16", DTYPE, "dtype for storing the bases, `fp32` or `bf16`", stored=True)
    moment_transport: str = setting(
        "fp32",
        DTYPE,
        "dtype for communicating captured sums, `fp32`, or `bf16` for half the bytes; they are added up in fp32",
    )
    norm: Norm = setting(
        "sign",
        choice(NORMS),
        "normalization of the coefficients: `sign` takes their signs, `l2` (Dobb-l2) scales each of their columns to "
        "unit norm (rows, on the output side)",
        link=_VARIANTS,
    )
    side: Side = setting(
        "input",
        choice(get_args(Side)),
        "axis of a weight that its blocks divide: `input`, or `output` (Dobb-G)",
        link=_VARIANTS,
        stored=True,
    )
    source: Source | None = setting(
        None,
        choice(get_args(Source)),
        "second moments that the bases diagonalize: those of the layer's inputs (`activation`, input side only), of "
        "the gradients of its outputs (`output-gradient`, output side only), or of the weight's gradient (`gram`); "
        "`none` uses no basis, so that `l2` on the output side is RMNP",
        default_text="`activation`, or `output-gradient` on the output side",
        link=_VARIANTS,
        stored=True,
    )
    backend: Backend = setting(
        "auto",
        choice(BACKENDS),
        "implementation of the update, the moment sums and the bases: the compiled `extension`, the plain PyTorch "
        "`reference`, or `auto`, the extension where it is available",
    )
    precision: Precision = setting(
        "exact",
        choice(PRECISIONS),
        "precision of the coefficients: `exact` finds the signs that fp32 products give, `bf16` may round momentum "
        "and basis first",
    )
    load_other_optimizer: bool = setting(
        False,
        SWITCH,
        "continue a checkpoint of AdamW, whose first moments become the momentum",
        link="[docs/checkpoints.md](docs/checkpoints.md#other-optimizers)",
        keyword=False,
    )
    overlap_refresh: bool = setting(
        True,
        SWITCH,
        "overlap the refresh with the backward pass (Megatron only); off, it runs inside `step()`",
        link="[docs/performance.md](docs/performance.md)",
    )
    stagger: bool = setting(
        False,
        SWITCH,
        "refresh about 1/T of the weights on every step instead of all on every T-th; the first step refreshes all",
    )
    log_diagnostics_interval: int = setting(
        0,
        INTERVAL,
        "steps between two logs of the diagnostics to TensorBoard and W&B; 0 for none",
        metavar="N",
        link=_DIAGNOSTICS,
    )
    log_diagnostics_weights: tuple[str, ...] = setting(
        (),
        PATTERNS,
        "globs of the weights to log, each with the spectrum of its update; by default all are logged, with the "
        "spectra of a few, in turn",
        default_text="all",
    )

    def __post_init__(self) -> None:
        self._move_patterns()
        self._check_each()
        if self.source is None:
            self._settle("source", "activation" if self.side == "input" else "output-gradient")
        self._check_source()
        if self.source == "none":
            self._settle("block_width", 1)
        elif self.blocks is not None and self.block_width is not None:
            raise self._contradiction("exclude each other", "give one of them", "blocks", "block_width")
        elif self.blocks is None and self.block_width is None:
            self._settle("blocks", DEFAULT_BLOCKS)
        if self.capture == "all" and self.capture_sequences is not None:
            raise self._contradiction("is incompatible with {capture:all}", "remove one of them", "capture_sequences")
        if self.log_diagnostics_weights and not self.log_diagnostics_interval:
            raise self._contradiction(
                "requires {log_diagnostics_interval}", "add {log_diagnostics_interval:100}", "log_diagnostics_weights"
            )

    def _move_patterns(self) -> None:
        """Reduce `blocks` to a number: a mapping moves to `blocks_for`, except the count of `*`."""
        if isinstance(self.blocks, Mapping) and isinstance(self.blocks_for, Mapping):
            per_pattern = dict(self.blocks)
            self._settle("blocks", per_pattern.pop("*", None))
            self._settle("blocks_for", {**self.blocks_for, **per_pattern})

    def _check_source(self) -> None:
        for source, side in (("activation", "input"), ("output-gradient", "output")):
            if self.source == source and self.side != side:
                raise self._contradiction(
                    f"contradict each other: these second moments belong to the {side} axis",
                    f"use {{side:{side}}}, or {{source:gram}}",
                    *("source", "side"),
                )
        if self.source == "none":
            for name in ("blocks", "block_width", "blocks_for"):
                if getattr(self, name):
                    raise self._contradiction(
                        "is incompatible with {source:none}, which has no bases", "remove one of them", name
                    )
            if self.backend == "extension":
                raise self._contradiction(
                    "has no kernel for {source:none}, which projects nothing", "use {backend:auto}", "backend"
                )
        if not self.captures:
            if self.capture != "first" or self.capture_sequences is not None:
                raise self._contradiction(
                    f"is incompatible with {{source:{self.source}}}, which captures no sequences",
                    "remove one of them",
                    "capture" if self.capture != "first" else "capture_sequences",
                )
            if self.stagger:
                raise self._contradiction(
                    f"is incompatible with {{source:{self.source}}}: only the bases of captured activations and "
                    "output gradients can be refreshed in turn",
                    "remove it, or use {source:activation}",
                    "stagger",
                )

    def _contradiction(self, reason: str, remedy: str, *names: str) -> Exception:
        return self.error(reason, remedy, {name: getattr(self, name) for name in names})

    @property
    def captures(self) -> bool:
        """Return whether the second moments come from the model's forward or backward pass."""
        return self.source in ("activation", "output-gradient")

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
        """The pattern of `blocks_for` that gives the number of a weight's blocks, the first that names it."""
        return first_match(self.blocks_for, weight_name)

    def excluded(self, weight_name: str) -> bool:
        """Return whether the user sent this weight to AdamW."""
        return first_match(self.exclude, weight_name) is not None

    def patterns_matching(self, weight_name: str) -> set[str]:
        """Return the user's patterns that match this weight."""
        logged = () if self.excluded(weight_name) else self.log_diagnostics_weights
        return {p for p in (*self.exclude, *self.blocks_for, *logged) if matches(p, weight_name)}

    def check_patterns_used(self, used: set[str]) -> None:
        """Raise for a pattern that names no weight of the model.

        Args:
            used: every pattern that matched at least one weight, over all ranks.
        """
        check_used(self, used)

    def diagnosed(self, weight_name: str) -> bool:
        """Return whether the diagnostics of a weight are logged."""
        patterns = self.log_diagnostics_weights
        return not patterns or first_match(patterns, weight_name) is not None


document(DobbConfig)
