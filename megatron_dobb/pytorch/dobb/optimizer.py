"""Dobb for any `nn.Module`, in one process or under DistributedDataParallel."""

import gc
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import CaptureError, ConfigError
from ...kernels.dispatch import Backend
from ...methods.dobb import kernels
from ...methods.dobb import metrics as figures
from ...methods.dobb import update as reference
from ...methods.dobb.capture import MomentSum, scale_sums
from ...methods.dobb.metrics_recorder import Observer, Sink
from ...methods.dobb.refresh_group import RefreshCounts
from ...sharding.segment import Segment
from ...sharding.shard import Shard
from .. import state_dict as saved_state
from ..base import MatrixOptimizer, adamw_lines, flat_gradient, named_as_keywords, process_group_of, ranks_of_job
from ..select_weights import logger, unwrap
from ..state_dict import StateForm
from .batch_capture import BatchCapture
from .block_weights import BlockWeight, select_block_weights
from .keywords import Exclude, check_sink, read_settings
from .replicated_bases import ModelBases

STATE = "dobb"
KEYS = ("momentum", "moment", "basis")
COUNTERS = ("attempted_steps", "capture_sequences")
FORM = StateForm(STATE, "Dobb", KEYS, COUNTERS, {"side": "input", "source": "activation"})

_owner_of: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[Dobb]]" = weakref.WeakKeyDictionary()
"""Dobb instance with hooks on a layer, by layer."""


class Dobb(MatrixOptimizer[BlockWeight]):
    """Dobb for the weights of `nn.Linear` layers and AdamW for every other parameter, at one learning rate::

        optimizer = Dobb(model, lr=1e-3, weight_decay=0.1)

    Dobb captures the layers' input activations with forward hooks, which it registers on the model here. Use it
    like any optimizer, with learning-rate schedulers, gradient accumulation, `GradScaler`, activation recompute and
    DistributedDataParallel; ranks share the work of the refreshes. Each call of the model in training mode is one
    micro-batch, and the leading dimension of its input counts sequences.

    Embeddings, `nn.Linear` layers tied to one, what a Hugging Face model returns from `get_output_embeddings()`,
    norms, biases and everything else go to AdamW. An output layer that is **not** tied looks like any other layer:
    name it in `exclude`. Weight decay applies to all parameters with two or more dimensions.

    `torch.compile` of the model works before or after Dobb is built, as long as the model was not called before, and
    without `fullgraph=True`: on refresh steps the hooks run outside of compiled code. Layers whose hooks do not run are
    an error on the next refresh step, never a silent lack of moments.

    Args:
        model: the model, on its device; wrapped in DistributedDataParallel or not.
        lr: learning rate, shared by Dobb and AdamW.
        weight_decay: decoupled weight decay, shared too.
        betas: AdamW's.
        eps: AdamW's.
        exclude: weights to leave to AdamW: glob patterns over names of weights or layers, such as `lm_head` or
            `*.mlp.*`, and functions of a weight's name and the weight.
        process_group: ranks that train on different data with the same weights. The default is the model's, if it is
            wrapped in DistributedDataParallel, or all ranks.
        diagnostics: called after every `log_diagnostics_interval`-th step, on the first rank alone, with the number of
            that step and the figures of docs/diagnostics.md by name.
        settings: every other setting of `DobbConfig`, by its name. `blocks` also takes a mapping from pattern to
            count; dtypes may be given as torch dtypes.

    Attributes:
        config: the settings.
        attempted_steps: calls of `step` so far; the schedule of the refreshes follows it.
        refresh_counts: blocks that refreshes left alone or Householder had to finish, over all ranks, since the start.
        on_dobb: the weights on Dobb, by name.
        on_adamw: the reason for each parameter that is not, by name.

    Raises:
        ConfigError: if a setting is wrong, a pattern names nothing, no weight is left for Dobb, or a weight already
            belongs to another Dobb.
        BlockError: if the blocks do not divide a layer's input features.
        UnsupportedError: if the model is sharded or replicated in a way that hides weights or activations.
        TypeError: on an unknown setting.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        exclude: Exclude = (),
        process_group: dist.ProcessGroup | None = None,
        diagnostics: Sink | None = None,
        **settings: Any,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(f"Dobb takes the model itself, not {type(model).__name__}: Dobb(model, lr=...)")
        root = unwrap(model)
        with named_as_keywords():
            self.config, predicates = read_settings(exclude, settings)
            selection = select_block_weights(root, self.config, predicates)
        self.on_dobb, self.on_adamw = selection.dobb, selection.adamw
        if not self.on_dobb:
            raise ConfigError(
                f"Dobb manages no weight of this {type(root).__name__}, only those of nn.Linear layers; on AdamW "
                f"would be {'; '.join(adamw_lines(self.on_adamw)) or 'nothing'}; frozen: {selection.frozen} "
                "parameters. Use torch.optim.AdamW, or exclude less"
            )
        _check_free(self.on_dobb.values())
        super().__init__(
            root,
            self.on_dobb,
            self.on_adamw,
            selection.frozen,
            FORM,
            group=process_group_of(model, process_group),
            built_alone=process_group is None and not ranks_of_job(),
            lr=lr,
            weight_decay=weight_decay,
            betas=betas,
            eps=eps,
        )
        self.refresh_counts = RefreshCounts()
        self._pending: kernels.Pending = []
        self._sink, self._observer = diagnostics, Observer(self.config, active=self._rank == 0)
        check_sink(self.config, diagnostics, is_first=self._rank == 0)
        self._bases = ModelBases(tuple(self.on_dobb.values()), self.config, self._group)
        self._live = {
            name: {"momentum": momentum, "moment": self._bases.moment_of(name), "basis": self._bases.basis_of(name)}
            for name, momentum in self._momentum.items()
        }
        self._capture = BatchCapture(
            root,
            [source for weight in self.on_dobb.values() for source in weight.sources()],
            self.config.capture_sequences,
            rank=self._rank,
            ranks=dist.get_world_size(self._group) if self._group is not None else 1,
            default_to_first=self.config.capture == "first",
            backend=self.config.backend,
        )
        self._remove = weakref.finalize(self, _release, self._capture)
        self._remove.atexit = False
        _owner_of.update({source.module: weakref.ref(self) for source in self._capture.sources})
        self._show_state()
        self._begin_step()

    def remove_hooks(self) -> None:
        """Remove the hooks, so that another Dobb can be built for the model. This one's next refresh would fail."""
        self._remove()

    # Steps.

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and the activations captured for them if their step was never taken."""
        if self._capture.backward_has_run():
            self._begin_step()
        super().zero_grad(set_to_none)

    def _prepare_step(self) -> None:
        """Refresh the bases if this step is due.

        Raises:
            CaptureError: on a refresh step, if a weight has a gradient, but none of its layer's calls was seen. A layer
                whose calls had no token among the captured sequences, such as an expert, keeps its bases; they are
                counted.
        """
        if refreshed := self._bases.due(self.attempted_steps):
            with self._observer.refresh(self.attempted_steps + 1, lambda: self._bases.copies(refreshed)):
                self._refresh({name: entry for name, entry in self._take_sums().items() if name in refreshed})

    def _finish_step(self) -> None:
        if self._observer.is_due(self.attempted_steps):
            self._report()

    def _report(self) -> None:
        assert self._sink is not None
        for blocks, moments, bases in self._bases.blocks():
            self._observer.add_moments(blocks, moments, bases)
        counts = self.refresh_counts
        self._sink(self.attempted_steps, figures.named(self._observer.take(), counts.skipped, counts.fallbacks))

    def _begin_step(self) -> None:
        due = self._bases.due(self.attempted_steps) if self.config.captures else set()
        self._capture.begin(armed=bool(due), keys=due)

    def _check_gradients(self) -> None:
        kernels.check(self._pending)
        self._pending = []
        super()._check_gradients()

    def _take_sums(self) -> dict[str, MomentSum]:
        """Return this rank's contribution to the moments in this refresh."""
        if self.config.captures:
            return self._capture.sums
        sums = {}
        for weight in self.on_dobb.values():
            gradient = weight.parameter.grad
            sums[weight.name] = MomentSum() if gradient is None else _gram(weight, gradient, self.config.backend)
        return sums

    def _refresh(self, sums: dict[str, MomentSum]) -> None:
        idle = self._idle(sums)
        if self.config.source == "output-gradient":  # of the mean loss of all ranks, not of this one's alone
            scale_sums(sums.values(), 1 / self._capture.ranks)
        counts = self._bases.refresh(sums)
        counts.skipped -= sum(self.on_dobb[name].blocks for name in idle)
        self.refresh_counts.skipped += counts.skipped
        self.refresh_counts.fallbacks += counts.fallbacks
        if (counts.skipped or counts.fallbacks) and self._rank == 0:
            logger.warning(
                "refresh of step %d: %d blocks kept their basis (no captured token, or an all-zero or non-finite "
                "moment), %d were finished by Householder; %d and %d since the start",
                self.attempted_steps + 1,
                *(counts.skipped, counts.fallbacks),
                *(self.refresh_counts.skipped, self.refresh_counts.fallbacks),
            )

    def _idle(self, sums: Mapping[str, MomentSum]) -> list[str]:
        """Find the weights that no rank used in this step: no token and no gradient."""
        weights = [weight for weight in self.on_dobb.values() if weight.name in sums]
        seen = torch.tensor([[sums[w.name].tokens, sums[w.name].calls, _has_gradient(w, sums)] for w in weights])
        if self._group is not None:
            seen = seen.to(self._bases.device)
            dist.all_reduce(seen, group=self._group)
        counted = list(zip(weights, seen.tolist(), strict=True))
        missed = [w.name for w, (tokens, calls, gradients) in counted if gradients and not calls]
        if missed:
            raise CaptureError(
                f"no input activation of {', '.join(missed)} was captured for the refresh of step "
                f"{self.attempted_steps + 1}, though there is a gradient; nothing was changed. "
                + (
                    "Layers must be called, with their hooks, in training mode; code that torch.compile made before "
                    "Dobb was built runs no hooks until torch.compiler.reset() is called; exclude=[...] leaves "
                    "weights to AdamW"
                    if self._capture.handles
                    else "remove_hooks() was called"
                )
            )
        return [w.name for w, (tokens, calls, gradients) in counted if not tokens and not gradients]

    def _update_flat(
        self, weights: Sequence[BlockWeight], flat: Sequence[Tensor], learning_rate: float, weight_decay: float
    ) -> None:
        segments = [
            Segment(
                weight.name,
                Shard(0, values.numel(), weight.rows if weight.output_side else weight.columns, weight.width),
                weight.rows,
                weight.columns,
                values,
                self._momentum[weight.name].view(-1),
                self._bases.basis_of(weight.name) if self.config.source != "none" else None,
                weight.output_side,
            )
            for weight, values in zip(weights, flat, strict=True)
        ]
        gradients = [flat_gradient(weight) for weight in weights]
        scales = self._column_scales(segments, gradients) if self.config.norm == "l2" else None
        self._pending += kernels.update(
            segments,
            gradients,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            momentum=self.config.momentum,
            nesterov=self.config.nesterov,
            update_scale=self.config.update_scale,
            precision=self.config.precision,
            backend=self.config.backend,
            column_scales=scales,
        )
        if self._observer.is_due(self.attempted_steps):
            spectra = self._observer.spectra(self.on_dobb, self.attempted_steps)
            for i, (weight, segment) in enumerate(zip(weights, segments, strict=True)):
                update = self._observer.add_update(segment, gradients[i], scales[i] if scales else None)
                if update is not None and weight.name in spectra:
                    self._observer.add_spectrum(weight.name, update.view(weight.rows, weight.columns))

    def _column_scales(self, segments: Sequence[Segment], gradients: Sequence[Tensor]) -> list[Tensor]:
        scales = []
        for segment, gradient in zip(segments, gradients, strict=True):
            squares = reference.column_squares(
                segment, gradient, momentum=self.config.momentum, nesterov=self.config.nesterov
            )
            scales.append(reference.column_scales(squares, segment.column_length))
        return scales

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return standard optimizer state, plus the names of the weights under `dobb`; the same on every rank."""
        self._note_counters()
        return {**super().state_dict(), STATE: {"names": list(self.on_dobb)}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict`, saved on any number of ranks; every rank loads the same one.

        Raises:
            ConfigError: if the state lacks Dobb's part or does not match these weights and blocks exactly. Nothing is
                changed in that case.
        """
        saved = saved_state.read(state_dict, self.param_groups, self.on_dobb, self._live, FORM, self._facts())
        super().load_state_dict(saved.of_adamw)
        with torch.no_grad():
            for name, tensors in self._live.items():
                for key, tensor in tensors.items():
                    tensor.copy_(saved.weights[name][key])
        self._bases.take_owned_moments()
        self.attempted_steps = int(saved.counters["attempted_steps"])
        if self.config.capture == "first":
            self._capture.sequences = self.config.capture_sequences or saved.counters["capture_sequences"]
        self._show_state()
        self._begin_step()

    def _facts(self) -> dict[str, str]:
        return {"side": self.config.side, "source": self.config.source or ""}

    def _show_state(self) -> None:
        """Fill `self.state` and the param groups with the entries of an optimizer that has taken a step."""
        self.state.update({self.on_dobb[name].parameter: tensors for name, tensors in self._live.items()})
        saved_state.begin_adamw(self.state, self.param_groups, STATE)
        self._note_counters()

    def _note_counters(self) -> None:
        counters = {"attempted_steps": self.attempted_steps, "capture_sequences": self._capture.sequences}
        for group in self.param_groups:
            if group[STATE]:
                group.update(counters | self._facts())

    def _shape_lines(self) -> list[str]:
        shapes = Counter((w.rows, w.columns, w.blocks, w.width) for w in self.on_dobb.values())
        rows = (f"  {count:7d} " + " ".join(f"{size:7d}" for size in shape) for shape, count in shapes.items())
        return ["    count       m       n  blocks   width", *rows]


def _check_free(weights: Iterable[BlockWeight]) -> None:
    def taken() -> list[str]:
        owners = {w.name: _owner_of.get(module) for w in weights for module in w.modules}
        return [name for name, owner in owners.items() if owner is not None and owner() is not None]

    if taken():
        gc.collect()  # schedulers and their optimizers refer to each other
    if names := taken():
        raise ConfigError(
            f"{names[0]} already belongs to another Dobb, and its activations would be captured twice: call "
            "remove_hooks() on that one, or delete it, before building another"
        )


def _release(capture: BatchCapture) -> None:
    capture.remove()
    for source in capture.sources:
        _owner_of.pop(source.module, None)


def _has_gradient(weight: BlockWeight, sums: Mapping[str, MomentSum]) -> bool:
    """Return whether a gradient reached a weight; a zero gradient counts only if the weight was called."""
    gradient = weight.parameter.grad
    return gradient is not None and (sums[weight.name].calls > 0 or bool(gradient.any()))


def _gram(weight: BlockWeight, gradient: Tensor, backend: Backend) -> MomentSum:
    """`G^T G` of the blocks over the input axis, or `G G^T` of those over the output axis (paper, Table 13)."""
    rows = gradient.t() if weight.output_side else gradient
    total = rows.new_zeros(weight.blocks, weight.width, weight.width, dtype=torch.float32)
    kernels.gram_(total, rows, weight.width, backend)
    return MomentSum(total, gradient.numel(), calls=1)
