"""A plan: every pipeline stage of a model on a layout, with what its ranks keep, send and compute."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_dobb.methods.dobb.block_ownership import work
from megatron_dobb.methods.dobb.schedule import phases
from megatron_dobb.methods.dobb.settings import DobbConfig

from ..reproduction import payload
from .buffers import Buffer, Chosen, Managed, choose, lay_out
from .parameters import Parameter, parameters_of_chunk
from .ranks import RankKind, StageRanks, ranks_of_stage
from .sizes import ModelSizes, Parallel, PlanError
from .stages import layers_of_chunks
from .timing import Rates, Times, times


@dataclass(frozen=True)
class Spread:
    """A figure over all ranks of a stage: their mean, and the rank with the most."""

    mean: float
    most: float


@dataclass(frozen=True)
class Request:
    """What to plan: a model, a layout, Dobb's settings and the machine's rates."""

    sizes: ModelSizes
    parallel: Parallel
    config: DobbConfig
    rates: Rates
    gradient_bytes: int = 4


@dataclass
class Chunk:
    """One model chunk of a stage: its parameters, and which of them are on Dobb."""

    parameters: list[Parameter]
    chosen: Chosen
    bucketed: bool


@dataclass
class StageKind:
    """Pipeline stages whose parameters have the same shapes.

    Attributes:
        stages: their numbers.
        chunks: model chunks of the first of them.
        names: of the weights on Dobb of each of them, in the order of the first's chunks.
    """

    stages: list[int]
    chunks: list[Chunk]
    names: list[list[str]]

    @property
    def managed(self) -> list[Managed]:
        """The weights on Dobb, with the names of the first stage."""
        return [weight for chunk in self.chunks for weight in chunk.chosen.managed.values()]


@dataclass
class StagePlan:
    """Pipeline stages of one kind, planned once, with the names of the first.

    Attributes:
        request: what was asked.
        kind: the stages.
        buffers: of all chunks.
        ranks: owners, holders and shards. With `--dobb-stagger` the same weights have other turns in other stages: of
            each such schedule, and the stages that have it.
    """

    request: Request
    kind: StageKind
    buffers: list[Buffer]
    ranks: list[tuple[StageRanks, list[int]]]

    @property
    def stages(self) -> list[int]:
        """Numbers of the stages."""
        return self.kind.stages

    @property
    def managed(self) -> list[Managed]:
        """The weights on Dobb."""
        return self.kind.managed

    @property
    def adamw(self) -> Counter[tuple[str, str]]:
        """Parameters and elements on AdamW, by reason."""
        return sum((chunk.chosen.adamw for chunk in self.kind.chunks), Counter())

    @cached_property
    def _kinds(self) -> list[tuple[list[RankKind], list[int]]]:
        return [ranks.kinds() for ranks, _ in self.ranks]

    def rank(self, stage: int, rank: int) -> RankKind:
        """The figures of one rank of one of the stages."""
        (number,) = (number for number, (_, stages) in enumerate(self.ranks) if stage in stages)
        kinds, of_rank = self._kinds[number]
        return kinds[of_rank[rank]]

    @property
    def column_norms(self) -> int:
        """Bytes that each rank all-reduces on every step for Dobb-l2."""
        return self.ranks[0][0].column_norms

    @cached_property
    def times(self) -> list[tuple[RankKind, Times, int]]:
        """Bounds of the optimizer call of every kind of ranks, and how many such ranks the stages have."""
        asked = self.request
        return [
            (
                kind,
                times(
                    kind.managed,
                    kind.adamw,
                    [(refresh.costs, refresh.owned) for refresh in kind.refreshes.values()],
                    self.column_norms,
                    asked.config,
                    asked.rates,
                    asked.sizes.bf16,
                ),
                kind.count * len(stages),
            )
            for (kinds, _), (_, stages) in zip(self._kinds, self.ranks, strict=True)
            for kind in kinds
        ]

    def spread(self, figure: Callable[[RankKind, Times], float]) -> Spread:
        """A figure over all ranks."""
        found = [(figure(kind, seconds), count) for kind, seconds, count in self.times]
        ranks = self.request.parallel.stage_ranks * len(self.stages)
        return Spread(sum(value * count for value, count in found) / ranks, max(found)[0])

    @property
    def unit(self) -> int:
        """The widest alignment unit."""
        return max(buffer.unit for buffer in self.buffers)

    @property
    def stock_elements(self) -> int:
        """Elements of the buffers as Megatron lays them out."""
        return sum(buffer.stock for buffer in self.buffers)

    @property
    def padding(self) -> int:
        """Elements that the aligned buffers have more."""
        return sum(buffer.padding for buffer in self.buffers)

    def handed_over(self, elements: Callable[[Buffer], int]) -> float:
        """Bytes that a rank hands to a step's collectives of so many elements of each buffer.

        A gradient and a parameter of each; with several optimizer instances they also sum the gradients of each shard.
        """
        request = self.request
        each = request.gradient_bytes + (2 if request.sizes.bf16 else 4)
        again = request.gradient_bytes if request.parallel.instances > 1 else 0
        return sum(elements(buffer) * (each + again / buffer.placed.shards) for buffer in self.buffers)

    @property
    def papers_refresh(self) -> int:
        """Bytes that the paper's Dobb all-reduces on a refresh: whole blocks in fp32."""
        if self.request.config.source == "none" or self.request.parallel.shards == 1:
            return 0
        return sum(4 * payload.papers_refresh(w.local_blocks * w.width, w.width) for w in self.managed)

    @property
    def balance(self) -> tuple[float, float]:
        """The heaviest rank's refresh work over the mean, and over the best possible; of steps, the busiest."""
        found = [(0.0, 1.0, 1.0)]
        for phase in {phase for kind, *_ in self.times for phase in kind.refreshes}:

            def loads_of(kind: RankKind, _: Times, phase: int = phase) -> float:
                return kind.refreshes[phase].work if phase in kind.refreshes else 0

            loads = self.spread(loads_of)
            widths = {width for kind, *_ in self.times for width in kind.owned_in(phase)}
            widest = max(map(work, widths), default=0)
            if loads.most:
                found.append((loads.most, loads.most / loads.mean, loads.most / max(loads.mean, widest)))
        return max(found)[1:]


def chunks_of_stage(request: Request, stage: int, layers: Sequence[range]) -> list[Chunk]:
    """The model chunks of a pipeline stage.

    Raises:
        BlockError: if a weight cannot be cut into the blocks that the settings ask for.
        PlanError: if a size does not divide over the ranks that share it.
    """
    chunks = []
    for number, part in enumerate(layers):
        first = stage == 0 and number == 0
        last = stage == request.parallel.pipeline - 1 and number == request.parallel.chunks - 1
        parameters = parameters_of_chunk(request.sizes, request.parallel, part, first=first, last=last)
        chunks.append(Chunk(parameters, choose(parameters, request.config), bucketed=first))
    return chunks


def unlike_stages(request: Request) -> list[StageKind]:
    """The stages of the pipeline, those of the same shapes together."""
    found: dict[tuple[object, ...], StageKind] = {}
    used: set[str] = set()
    for stage, layers in enumerate(layers_of_chunks(request.sizes, request.parallel)):
        chunks = chunks_of_stage(request, stage, layers)
        shapes = tuple(
            (chunk.bucketed, tuple((p.shape, p.own_bucket, _width(chunk, p)) for p in chunk.parameters))
            for chunk in chunks
        )
        kind = found.setdefault(shapes, StageKind([], chunks, []))
        kind.stages.append(stage)
        kind.names.append([name for chunk in chunks for name in chunk.chosen.managed])
        used |= set().union(*(chunk.chosen.patterns_used for chunk in chunks))
    request.config.check_patterns_used(used)
    if not any(kind.managed for kind in found.values()):
        raise PlanError("no matrix of this model is on Dobb: use fewer --dobb-exclude patterns, or fewer --blocks")
    return list(found.values())


def turns(request: Request, kinds: Sequence[StageKind]) -> dict[str, int]:
    """The phase in which each weight of the whole model is refreshed, with `--dobb-stagger`."""
    if not request.config.stagger:
        return {}
    work_of = {}
    for kind in kinds:
        for names in kind.names:
            for name, weight in zip(names, kind.managed, strict=True):
                same = (name, *(_of_layer(other, name) for other in weight.parameter.elsewhere))
                work_of.update(dict.fromkeys(same, weight.features // weight.width * work(weight.width)))
    return phases(work_of, request.config.refresh_interval)


def _of_layer(name: str, like: str) -> str:
    """The name of an expert, in the layer of another one."""
    layer, _, _ = like.partition(".mlp.")
    return layer + name[name.index(".mlp.") :]


def _width(chunk: Chunk, parameter: Parameter) -> int:
    weight = chunk.chosen.managed.get(parameter.name)
    return weight.width if weight else 0


def lay_out_stage(request: Request, chunks: Sequence[Chunk]) -> list[Buffer]:
    """The buffers of all chunks of a stage.

    Raises:
        LayoutError: if the widths in a bucket cannot be aligned to each other.
    """
    return [
        buffer
        for chunk in chunks
        for buffer in lay_out(chunk.parameters, chunk.chosen.managed, request.parallel, bucketed=chunk.bucketed)
    ]


def plan(request: Request) -> list[StagePlan]:
    """Plan every stage.

    Raises:
        ConfigError: naming what cannot be, and what would work.
        UnsupportedError: for a weight that the settings do not work with.
    """
    kinds = unlike_stages(request)
    laid_out = [lay_out_stage(request, kind.chunks) for kind in kinds]
    turn_of = turns(request, kinds)
    found = []
    for kind, buffers in zip(kinds, laid_out, strict=True):
        schedules: dict[tuple[int, ...], list[int]] = {}
        for stage, names in zip(kind.stages, kind.names, strict=True):
            schedules.setdefault(tuple(turn_of.get(name, 0) for name in names), []).append(stage)
        chunks = [chunk.chosen.managed for chunk in kind.chunks]
        ranks = [
            (
                ranks_of_stage(
                    buffers, chunks, request.parallel, request.config, dict(zip(kind.names[0], schedule, strict=True))
                ),
                stages,
            )
            for schedule, stages in schedules.items()
        ]
        found.append(StagePlan(request, kind, buffers, ranks))
    return found
