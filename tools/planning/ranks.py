"""What each rank of a pipeline stage keeps and sends, from the product's own owners and costs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_dobb.costs import RankCosts, WidthCosts, momentum_costs, refresh_costs
from megatron_dobb.owners import Ownership, work

from ..reproduction import payload
from .buffers import Buffer, Managed
from .sizes import Parallel

RANK_SETS = ("dense", "over tensor", "expert")
"""Over which ranks moments are summed: data and context parallelism; those over all tensor-parallel ranks as well; the
experts' data parallelism."""


@dataclass
class RankSet:
    """The refresh of all weights whose moments are summed over the same ranks.

    Attributes:
        weights: by name.
        ownership: owners and holders of their blocks.
        costs: of each width in each model chunk, which are refreshed one after another.
    """

    weights: Mapping[str, Managed]
    ownership: Ownership
    costs: list[WidthCosts]

    @property
    def ranks(self) -> int:
        """Size of the set."""
        return len(self.ownership.holdings)

    def like(self, place: int) -> tuple[tuple[int, ...], ...]:
        """The same for ranks of the set with the same figures."""
        return tuple(costs.counted(place) for costs in self.costs)

    def add_to(self, kind: "RankKind", place: int) -> None:
        """Add what a rank of the set holds, sends and refreshes."""
        for costs in self.costs:
            kind.costs += costs.of(place)
            kind.owned[costs.width] += costs.owned[place]


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
        """The same for shards with the same figures."""
        of_width = [numel[shard] for numel in self.managed.values()]
        return (*of_width, self.adamw[shard], self.muon[shard], self.dion[shard])

    def add_to(self, kind: "RankKind", shard: int) -> None:
        """Add the elements of a shard."""
        kind.managed.update({width: numel[shard] for width, numel in self.managed.items()})
        kind.adamw += self.adamw[shard]
        kind.muon += self.muon[shard]
        kind.dion += self.dion[shard]


@dataclass
class RankKind:
    """Ranks of a stage with the same figures.

    Attributes:
        count: how many there are.
        costs: bytes of state and of a refresh.
        managed: elements on Dobb, by width.
        owned: blocks that it refreshes, by width.
        adamw: elements on AdamW.
        muon, dion: elements that an update of these methods passes.
    """

    count: int = 0
    costs: RankCosts = field(default_factory=RankCosts)
    managed: Counter[int] = field(default_factory=Counter)
    owned: Counter[int] = field(default_factory=Counter)
    adamw: int = 0
    muon: int = 0
    dion: int = 0

    @property
    def work(self) -> int:
        """Refresh work, in units of b^3."""
        return sum(work(width) * blocks for width, blocks in self.owned.items())


@dataclass
class StageRanks:
    """All ranks of a pipeline stage.

    Attributes:
        parallel: of the layout.
        sets: by their name in `RANK_SETS`, where there are weights.
        shards: of the dense buffers, and of the experts' under True.
    """

    parallel: Parallel
    sets: dict[str, RankSet]
    shards: dict[bool, Shards]

    def place_in(self, name: str, rank: int) -> int:
        """The number of a rank of the stage within its rank set. Tensor-parallel ranks are neighbours."""
        if name == "over tensor":
            return rank
        if name == "dense":
            return rank // self.parallel.tensor
        return rank // (self.parallel.expert * self.parallel.expert_tensor)

    def shard_of(self, apart: bool, rank: int) -> int:
        """The shard of a buffer that a rank has."""
        return self.place_in("expert" if apart else "dense", rank)

    def kinds(self) -> tuple[list[RankKind], list[int]]:
        """The kinds of ranks, and for every rank of the stage which kind it is."""
        parts = [(of_set, name, _numbered(of_set, of_set.ranks)) for name, of_set in self.sets.items()]
        parts += [
            (shards, "expert" if apart else "dense", _numbered(shards, shards.count))
            for apart, shards in self.shards.items()
        ]
        number_of: dict[tuple[int, ...], int] = {}
        kinds: list[RankKind] = []
        of_rank = []
        for rank in range(self.parallel.stage_ranks):
            like = tuple(numbers[self.place_in(name, rank)] for _, name, numbers in parts)
            if like not in number_of:
                number_of[like] = len(kinds)
                kinds.append(RankKind())
                for part, name, _ in parts:
                    part.add_to(kinds[-1], self.place_in(name, rank))
                kinds[-1].costs += momentum_costs(sum(kinds[-1].managed.values()))
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
    **element_bytes: int,
) -> StageRanks:
    """Share out the blocks of a stage, and count.

    Args:
        buffers: of all its chunks.
        chunks: the weights on Dobb of each of its chunks.
        parallel: of the layout.
        element_bytes: see `costs.refresh_costs`.
    """
    managed = {name: weight for chunk in chunks for name, weight in chunk.items()}
    sizes = {"dense": parallel.shards, "over tensor": parallel.stage_ranks, "expert": parallel.expert_shards}
    holdings: dict[str, list[dict[str, tuple[int, ...]]]] = {}
    shards: dict[bool, Shards] = {}
    for weight in managed.values():
        if weight.ranks not in holdings:
            holdings[weight.ranks] = [{} for _ in range(sizes[weight.ranks])]
    for buffer in buffers:
        _count(buffer, managed, shards.setdefault(buffer.apart, Shards(buffer.placed.shards)))
        for index, parameter in enumerate(buffer.parameters):
            if parameter.name in managed:
                copies = parallel.tensor if managed[parameter.name].ranks == "over tensor" else 1
                _note_holders(buffer, index, managed[parameter.name], holdings, copies)
    sets = {}
    for name, of_ranks in holdings.items():
        weights = {key: weight for key, weight in managed.items() if weight.ranks == name}
        ownership = Ownership.share_out(of_ranks, {key: weight.width for key, weight in weights.items()})
        costs: list[WidthCosts] = []
        for chunk in chunks:
            blocks = {key: weight.local_blocks for key, weight in chunk.items() if weight.ranks == name}
            part = ownership.part(blocks) if len(blocks) < len(weights) else ownership
            costs += refresh_costs(part, blocks, **element_bytes).values()
        sets[name] = RankSet(weights, ownership, costs)
    return StageRanks(parallel, sets, shards)


def _note_holders(
    buffer: Buffer,
    index: int,
    weight: Managed,
    holdings: Mapping[str, list[dict[str, tuple[int, ...]]]],
    copies: int,
) -> None:
    of_ranks, columns = holdings[weight.ranks], weight.parameter.shape[1]
    every = tuple(range(weight.local_blocks))
    for shard in buffer.placed.holders(index):
        start, end = buffer.held(index, shard)
        # As many elements as a row has touch every block, and most shards hold that many.
        held = every if end - start >= columns else buffer.placed.held_blocks(index, shard)
        for rank in range(shard * copies, (shard + 1) * copies):
            of_ranks[rank][weight.name] = held


def _count(buffer: Buffer, managed: Mapping[str, Managed], shards: Shards) -> None:
    for index, parameter in enumerate(buffer.parameters):
        weight = managed.get(parameter.name)
        holders = buffer.placed.holders(index)
        into = shards.managed.setdefault(weight.width, [0] * shards.count) if weight else shards.adamw
        rows, columns = parameter.rows, parameter.columns
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
