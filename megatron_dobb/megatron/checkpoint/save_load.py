"""Save and load the parts of a method that Megatron does not know: run metadata, own tensors, param groups."""

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

from ...errors import CheckpointError
from ..console import say
from .foreign import refusal, with_groups_of, writer_of
from .metadata import RunMetadata

STATE = "megatron_dobb"
"""Key, in an optimizer's state, of the run metadata (under `RUN`) and of a method's own tensors (under `EXTRA`)."""
RUN, EXTRA = "run", "extra"


class ExtraState[R: RunMetadata]:
    """State of a method besides masters and momentum. This one has none; methods that have some derive it."""

    metadata_class: type[R] = RunMetadata  # type: ignore[assignment]  # the default of R

    def metadata(self, *, experts_apart: bool) -> R:
        """The current run metadata. Collective over all ranks of the job."""
        return self.metadata_class(experts_apart=experts_apart)

    def check(self, run: R) -> None:
        """Raise a `CheckpointError` if this run cannot continue that one."""

    def to_save(self) -> dict[str, Any]:
        """The sharded tensors to save."""
        return {}

    def to_load(self, run: R) -> dict[str, Any]:
        """The sharded tensors to read from the checkpoint of a run."""
        return {}

    def resume(self, loaded: dict[str, Any], run: R | None) -> None:
        """Take over the tensors that `to_load` requested; without a run, another optimizer wrote the checkpoint."""

    def discard(self) -> None:
        """Discard work in progress: other state is about to be loaded."""


class MethodCheckpoint:
    """A method's part in one save or load.

    Args:
        method: its name.
        extra: its state besides masters and momentum.
        is_expert: whether the optimizer is the one of the experts that Megatron keeps apart.
        experts_apart: whether the run has such an optimizer.
        load_other_optimizer: whether the user wants to continue another optimizer's checkpoint.
    """

    def __init__(
        self, method: str, extra: ExtraState[Any], *, is_expert: bool, experts_apart: bool, load_other_optimizer: bool
    ) -> None:
        self.method = method
        self.extra = extra
        self.is_expert = is_expert
        self.experts_apart = experts_apart
        self.load_other_optimizer = load_other_optimizer

    # Save.

    def add(self, state: dict[str, Any], content: dict[str, Any]) -> None:
        """Add the method's tensors to Megatron's state, and the run metadata to it and to the content metadata."""
        state[STATE] = {EXTRA: self.extra.to_save()}
        if not self.is_expert:  # every rank has the optimizer of the other weights, and it comes first
            content[self.method] = self.extra.metadata(experts_apart=self.experts_apart).plain()
            state[STATE][RUN] = LocalNonpersistentObject({self.method: content[self.method]})

    # Load.

    def find_run(self, content: dict[str, Any]) -> RunMetadata | None:
        """The run that saved the checkpoint; None if another optimizer wrote it and is to be continued.

        Raises:
            CheckpointError: if the checkpoint cannot be continued.
        """
        run = self.extra.metadata_class.read(content, self.method)
        if run is None:
            if reason := refusal(content, writer_of(content), self.method):
                raise CheckpointError(reason)
            if not self.load_other_optimizer:
                raise CheckpointError(
                    f"the checkpoint's content metadata have no state of {self.method.capitalize()}: another "
                    f"optimizer wrote it. Continue it with --{self.method}-load-other-optimizer, which takes over the "
                    "masters and AdamW's first moments as momentum and starts all other state afresh, or start a fresh "
                    "optimizer with --no-load-optim"
                )
            return None
        if run.experts_apart != self.experts_apart:
            had, has = ("with", "without") if run.experts_apart else ("without", "with")
            raise CheckpointError(
                f"the checkpoint was saved {had} expert parallelism and this run is {has} it: Megatron then keeps its "
                "optimizer state in another number of optimizers, and does not convert it. Keep "
                f"--expert-model-parallel-size {'above 1' if run.experts_apart else '1'}, or start a fresh optimizer "
                "with --no-load-optim"
            )
        self.extra.check(run)
        return run

    def request(self, state: dict[str, Any], run: RunMetadata | None) -> None:
        """Add to Megatron's request what the method wants to read of the checkpoint of a run."""
        plain = {self.method: run.plain()} if run is not None else None
        wanted = self.extra.to_load(run) if run is not None else {}
        state[STATE] = {EXTRA: wanted, RUN: LocalNonpersistentObject(plain)}

    def for_megatron(self, state: dict[str, Any], groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """A loaded state without the method's part, and with param groups for its weights."""
        self.extra.discard()
        own = state.get(STATE)
        rest = {key: value for key, value in state.items() if key != STATE}
        if own is None or own[RUN] is not None:
            return rest
        say(f"{self.method}: the checkpoint is another optimizer's; AdamW's first moments become momentum")
        return with_groups_of(self.method, rest, groups)

    def resume(self, state: dict[str, Any]) -> None:
        """Take over the method's part of a loaded state, if it has one."""
        if (own := state.get(STATE)) is not None:
            run = self.extra.metadata_class.read(own[RUN] or {}, self.method)
            self.extra.resume(own.get(EXTRA, {}), run)


def content_metadata_for(state: Any, content: dict[str, Any] | None) -> dict[str, Any] | None:
    """Content metadata for a save of this state: with the run metadata, if a method's optimizer is in it.

    Programs (verl is one) make the dictionary that they save afresh, where Megatron's has been through
    `sharded_state_dict`, or save the one that they have loaded, whose run metadata are those of then. No load could
    continue such a checkpoint, or it would continue with the wrong step.
    """
    run = next((run.unwrap() for run in _runs_in(state) if isinstance(run, LocalNonpersistentObject)), None)
    return content if run is None else {**(content or {}), **run}


def is_requested(state: Any) -> bool:
    """Whether a state to load into, or a part of it, is a method's request."""
    return next(_runs_in(state), None) is not None


def _runs_in(state: Any) -> Iterator[Any]:
    if isinstance(state, dict):
        own = state.get(STATE)
        if isinstance(own, dict) and RUN in own:
            yield own[RUN]
        for value in state.values():
            yield from _runs_in(value)
