"""A plan: every pipeline stage of a model on a layout, with what its ranks keep, send and compute."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_dobb.config import DTYPES, DobbConfig
from megatron_dobb.costs import RankCosts
from megatron_dobb.owners import work

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
class StagePlan:
    """Pipeline stages whose parameters have the same shapes, planned once, with the names of the first.

    Attributes:
        request: what was asked.
        stages: their numbers.
        chunks: model chunks.
        buffers: of all chunks.
        ranks: owners, holders and shards.
    """

    request: Request
    stages: list[int]
    chunks: list[Chunk]
    buffers: list[Buffer]
    ranks: StageRanks

    @property
    def managed(self) -> list[Managed]:
        """The weights on Dobb."""
        return [weight for chunk in self.chunks for weight in chunk.chosen.managed.values()]

    @property
    def adamw(self) -> Counter[tuple[str, str]]:
        """Parameters and elements on AdamW, by reason."""
        return sum((chunk.chosen.adamw for chunk in self.chunks), Counter())

    @cached_property
    def _kinds(self) -> tuple[list[RankKind], list[int]]:
        return self.ranks.kinds()

    @property
    def costs(self) -> list[RankCosts]:
        """Bytes on every rank."""
        kinds, of_rank = self._kinds
        return [kinds[number].costs for number in of_rank]

    @cached_property
    def times(self) -> list[tuple[RankKind, Times]]:
        """Bounds of the optimizer call of every kind of ranks."""
        asked = self.request
        return [
            (kind, times(kind.managed, kind.adamw, kind.owned, kind.costs, asked.config, asked.rates, asked.sizes.bf16))
            for kind in self._kinds[0]
        ]

    def spread(self, figure: Callable[[RankKind, Times], float]) -> Spread:
        """A figure over all ranks."""
        found = [(figure(kind, seconds), kind.count) for kind, seconds in self.times]
        return Spread(sum(value * count for value, count in found) / len(self._kinds[1]), max(found)[0])

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

    @property
    def buffer_bytes(self) -> int:
        """Handed to a step's collectives for each element of the buffers: a gradient and a parameter."""
        return self.request.gradient_bytes + (2 if self.request.sizes.bf16 else 4)

    @property
    def papers_refresh(self) -> int:
        """Bytes that the paper's Dobb all-reduces on a refresh: whole blocks in fp32."""
        return sum(4 * payload.papers_refresh(w.local_blocks * w.width, w.width) for w in self.managed)

    @property
    def balance(self) -> tuple[float, float]:
        """The heaviest rank's refresh work over the mean, and over the best possible."""
        loads = self.spread(lambda kind, _: kind.work)
        widest = max((work(weight.width) for weight in self.managed), default=0)
        if not widest:
            return 1.0, 1.0
        return loads.most / loads.mean, loads.most / max(loads.mean, widest)


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


def unlike_stages(request: Request) -> list[tuple[list[int], list[Chunk]]]:
    """The stages of the pipeline, those of the same shapes together."""
    found: dict[tuple[object, ...], tuple[list[int], list[Chunk]]] = {}
    used: set[str] = set()
    for stage, layers in enumerate(layers_of_chunks(request.sizes, request.parallel)):
        chunks = chunks_of_stage(request, stage, layers)
        shapes = tuple(
            (chunk.bucketed, tuple((p.shape, p.own_bucket, _width(chunk, p)) for p in chunk.parameters))
            for chunk in chunks
        )
        found.setdefault(shapes, ([], chunks))[0].append(stage)
        used |= set().union(*(chunk.chosen.patterns_used for chunk in chunks))
    request.config.check_patterns_used(used)
    if not any(chunk.chosen.managed for _, chunks in found.values() for chunk in chunks):
        raise PlanError("no matrix of this model is on Dobb: use fewer --dobb-exclude patterns, or fewer --blocks")
    return list(found.values())


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
    """
    found = []
    for stages, chunks in unlike_stages(request):
        buffers = lay_out_stage(request, chunks)
        ranks = ranks_of_stage(
            buffers,
            [chunk.chosen.managed for chunk in chunks],
            request.parallel,
            moment_bytes=DTYPES[request.config.moment_dtype].itemsize,
            basis_bytes=DTYPES[request.config.basis_dtype].itemsize,
            transport_bytes=DTYPES[request.config.moment_transport].itemsize,
        )
        found.append(StagePlan(request, stages, chunks, buffers, ranks))
    return found
