"""Bytes that each rank of a pipeline stage keeps and sends, from the product's own owners and costs."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_dobb.megatron.dobb.weight_sharding import MomentSet, check_split_expert, column_set, moment_set
from megatron_dobb.methods.dobb.block_ownership import BlockOwnership, work
from megatron_dobb.methods.dobb.footprint import SUM_BYTES, RankCosts, WidthCosts, momentum_costs, refresh_costs
from megatron_dobb.methods.dobb.settings import DTYPES, DobbConfig

from ..common import payload
from .buffers import Buffer, Managed
from .sizes import Parallel

SetKey = tuple[MomentSet, int]
"""The ranks over which moments are summed, and the phase of their refresh: 0 without `--dobb-stagger`."""


@dataclass
class RankSet:
    """The refresh of all weights of one `SetKey`.

    Attributes:
        key: which.
        ranks: size of the set.
        costs: of each width in each model chunk, which are refreshed one after another.
    """

    key: SetKey
    ranks: int
    costs: list[WidthCosts]

    def like(self, place: int) -> tuple[tuple[int, ...], ...]:
        """Key that ranks of the set with equal figures share."""
        return tuple(costs.counted(place) for costs in self.costs)

    def add_to(self, kind: "RankKind", place: int) -> None:
        """Add what a rank of the set holds, sends and refreshes."""
        refresh = kind.refreshes.setdefault(self.key[1], Refresh())
        for costs in self.costs:
            refresh.costs += costs.of(place)
            refresh.owned[costs.width] += costs.owned[place]


@dataclass
class Shards:
    """Elements of the buffers of one kind (dense, or experts') in each shard.

    Attributes:
        managed: for every width, elements on Dobb in each shard.
        adamw: elements on AdamW in each shard.
        muon, dion: elements that these methods' updates pass for the cut matrices of which a shard holds a part.
    """

    count: int
    managed: dict[int, list[int]] = field(default_factory=dict)
    adamw: list[int] = field(default_factory=list)
    muon: list[int] = field(default_factory=list)
    dion: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.adamw, self.muon, self.dion = ([0] * self.count for _ in range(3))

    def like(self, shard: int) -> tuple[int, ...]:
        """Key that shards with equal figures share."""
        of_width = [numel[shard] for numel in self.managed.values()]
        return (*of_width, self.adamw[shard], self.muon[shard], self.dion[shard])

    def add_to(self, kind: "RankKind", shard: int) -> None:
        """Add the elements of a shard."""
        kind.managed.update({width: numel[shard] for width, numel in self.managed.items()})
        kind.adamw += self.adamw[shard]
        kind.muon += self.muon[shard]
        kind.dion += self.dion[shard]


@dataclass
class Refresh:
    """A rank's part in the refresh of all weights of one phase.

    Attributes:
        costs: bytes of moments and bases, and of what it sends.
        owned: blocks that it refreshes, by width.
    """

    costs: RankCosts = field(default_factory=RankCosts)
    owned: Counter[int] = field(default_factory=Counter)

    @property
    def work(self) -> int:
        """Refresh work, in units of b^3."""
        return sum(work(width) * blocks for width, blocks in self.owned.items())


@dataclass
class RankKind:
    """Ranks of a stage with the same figures.

    Attributes:
        count: how many there are.
        refreshes: by phase.
        managed: elements on Dobb, by width.
        adamw: elements on AdamW.
        muon, dion: elements that an update of these methods passes.
    """

    count: int = 0
    refreshes: dict[int, Refresh] = field(default_factory=dict)
    managed: Counter[int] = field(default_factory=Counter)
    adamw: int = 0
    muon: int = 0
    dion: int = 0

    @property
    def costs(self) -> RankCosts:
        """Bytes of state, and of a step that refreshes all weights."""
        refreshes = (refresh.costs for refresh in self.refreshes.values())
        return sum(refreshes, start=momentum_costs(sum(self.managed.values())))

    def owned_in(self, phase: int) -> Collection[int]:
        """Widths of the blocks that it refreshes in a phase."""
        owned = self.refreshes[phase].owned if phase in self.refreshes else {}
        return [width for width, blocks in owned.items() if blocks]

    def most(self, name: str) -> int:
        """A figure of `RankCosts` on the refresh step with the most of it (the first of all steps aside)."""
        return max((getattr(refresh.costs, name) for refresh in self.refreshes.values()), default=0)


@dataclass
class StageRanks:
    """All ranks of a pipeline stage.

    Attributes:
        parallel: of the layout.
        sets: by their keys, where there are weights.
        shards: of the dense buffers, and of the experts' under True.
        column_norms: bytes that each rank all-reduces on every step (`--dobb-norm l2`).
    """

    parallel: Parallel
    sets: dict[SetKey, RankSet]
    shards: dict[bool, Shards]
    column_norms: int

    def place_in(self, name: MomentSet, rank: int) -> int:
        """The number of a rank of the stage within its rank set. Tensor-parallel ranks are neighbours."""
        if name == "tokens over tensor":
            return rank
        if name == "tokens":
            return rank // self.parallel.tensor
        return rank // (self.parallel.expert * self.parallel.expert_tensor)

    def kinds(self) -> tuple[list[RankKind], list[int]]:
        """The kinds of ranks, and for every rank of the stage which kind it is."""
        parts: list[tuple[RankSet | Shards, MomentSet, list[int]]] = [
            (of_set, name, _numbered(of_set, of_set.ranks)) for (name, _), of_set in self.sets.items()
        ]
        parts += [
            (shards, "expert tokens" if apart else "tokens", _numbered(shards, shards.count))
            for apart, shards in self.shards.items()
        ]
        number_of: dict[tuple[int, ...], int] = {}
        kinds: list[RankKind] = []
        of_rank = []
        for rank in range(self.parallel.stage_ranks):
            # Every optimizer instance shares the buffers out anew.
            places = [self.place_in(name, rank) % len(numbers) for _, name, numbers in parts]
            like = tuple(numbers[place] for (_, _, numbers), place in zip(parts, places, strict=True))
            if like not in number_of:
                number_of[like] = len(kinds)
                kinds.append(RankKind())
                for (part, _, _), place in zip(parts, places, strict=True):
                    part.add_to(kinds[-1], place)
            of_rank.append(number_of[like])
            kinds[number_of[like]].count += 1
        return kinds, of_rank


def _numbered(part: RankSet | Shards, places: int) -> list[int]:
    """For every place a number, the same for places with the same figures."""
    known: dict[tuple[object, ...], int] = {}
    return [known.setdefault(part.like(place), len(known)) for place in range(places)]


def ranks_of_stage(
    buffers: Sequence[Buffer],
    chunks: Sequence[Mapping[str, Managed]],
    parallel: Parallel,
    config: DobbConfig,
    phases: Mapping[str, int],
) -> StageRanks:
    """Share out the blocks of a stage, and count.

    Args:
        buffers: of all its chunks.
        chunks: the weights on Dobb of each of its chunks.
        parallel: of the layout.
        config: the settings.
        phases: of each weight, with `--dobb-stagger`.

    Raises:
        UnsupportedError: for an expert whose blocks are cut over ranks that make no sums together.
    """
    managed = {name: weight for chunk in chunks for name, weight in chunk.items()}
    for weight in managed.values():
        check_split_expert(weight, config)
    sizes = {"tokens": parallel.shards, "tokens over tensor": parallel.stage_ranks}
    sizes["expert tokens"] = parallel.expert_shards
    # Without bases there is nothing to refresh.
    refreshed = managed if config.source != "none" else {}
    key_of: dict[str, SetKey] = {
        name: (moment_set(weight, config), phases.get(name, 0)) for name, weight in refreshed.items()
    }
    holdings: dict[SetKey, list[dict[str, tuple[int, ...]]]] = {
        key: [{} for _ in range(sizes[key[0]])] for key in dict.fromkeys(key_of.values())
    }
    shards: dict[bool, Shards] = {}
    for buffer in buffers:
        _count(buffer, managed, shards.setdefault(buffer.apart, Shards(buffer.placed.shards)))
        for index, parameter in enumerate(buffer.parameters):
            if parameter.name in refreshed:
                key = key_of[parameter.name]
                copies = parallel.tensor if key[0] == "tokens over tensor" else 1
                _note_holders(buffer, index, managed[parameter.name], holdings[key], copies)
    sets = {}
    for key, of_ranks in holdings.items():
        names = [name for name, own in key_of.items() if own == key]
        ownership = BlockOwnership.share_out(of_ranks, {name: managed[name].width for name in names})
        costs: list[WidthCosts] = []
        for chunk in chunks:
            blocks = {name: managed[name].local_blocks for name in names if name in chunk}
            part = ownership.part(blocks) if len(blocks) < len(names) else ownership
            costs += refresh_costs(
                part,
                blocks,
                moment_bytes=DTYPES[config.moment_dtype].itemsize,
                basis_bytes=DTYPES[config.basis_dtype].itemsize,
                transport_bytes=DTYPES[config.moment_transport].itemsize,
            ).values()
        sets[key] = RankSet(key, len(of_ranks), costs)
    norms = _column_norms(managed.values(), parallel) if config.norm == "l2" else 0
    return StageRanks(parallel, sets, shards, norms)


def _note_holders(
    buffer: Buffer, index: int, weight: Managed, of_ranks: list[dict[str, tuple[int, ...]]], copies: int
) -> None:
    """Note which ranks of a set hold which blocks: in every optimizer instance, and on each of `copies` neighbours."""
    every = tuple(range(weight.local_blocks))
    shards = buffer.placed.shards
    instances = len(of_ranks) // (shards * copies)
    for shard in buffer.placed.holders(index):
        start, end = buffer.held(index, shard)
        # As many elements as a row has touch every block of the input side, and most shards hold that many.
        whole = not weight.output_side and end - start >= weight.local_columns
        held = every if whole else weight.held_blocks(start, end)
        for instance in range(instances):
            first = (instance * shards + shard) * copies
            for rank in range(first, first + copies):
                of_ranks[rank][weight.name] = held


def _column_norms(weights: Sequence[Managed], parallel: Parallel) -> int:
    """Bytes of the squared norms that a rank shares with others on every step: one number for each column."""
    shards = parallel.buffer_shards(apart=False)
    sizes = {
        "alone": 1,
        "tensor": parallel.tensor,
        "shards": shards,
        "shards over tensor": shards * parallel.tensor,
        "expert shards": parallel.buffer_shards(apart=True),
    }
    shared = (weight for weight in weights if sizes[column_set(weight)] > 1)
    return SUM_BYTES * sum(weight.local_blocks * weight.width for weight in shared)


def _count(buffer: Buffer, managed: Mapping[str, Managed], shards: Shards) -> None:
    for index, parameter in enumerate(buffer.parameters):
        weight = managed.get(parameter.name)
        holders = buffer.placed.holders(index)
        into = shards.managed.setdefault(weight.width, [0] * shards.count) if weight else shards.adamw
        rows, columns = parameter.whole
        is_cut = weight is not None and (len(holders) > 1 or parameter.numel < rows * columns)
        for shard in holders:
            start, end = buffer.held(index, shard)
            into[shard] += end - start
            if is_cut:
                shards.muon[shard] += payload.muon(rows, columns)
                shards.dion[shard] += payload.dion(rows, columns, dion_rank(rows, columns))


def dion_rank(rows: int, columns: int) -> int:
    """The rank of Dion's updates that it is compared at: a quarter of the full one."""
    return max(min(rows, columns) // 4, 1)
