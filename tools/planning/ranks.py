"""What each rank of a pipeline stage keeps and sends, from the product's own owners and costs."""

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
        costs: by width.
    """

    weights: Mapping[str, Managed]
    ownership: Ownership
    costs: dict[int, WidthCosts]

    @property
    def ranks(self) -> int:
        """Size of the set."""
        return len(self.ownership.holdings)

    def of(self, rank: int) -> RankCosts:
        """Bytes of one rank of the set, over all widths."""
        return sum((costs.of(rank) for costs in self.costs.values()), RankCosts())


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

    def elements(self, shard: int) -> int:
        """Elements on Dobb in a shard."""
        return sum(of_width[shard] for of_width in self.managed.values())


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

    def costs(self) -> list[RankCosts]:
        """Bytes on every rank of the stage."""
        of_set = {name: [ranks.of(place) for place in range(ranks.ranks)] for name, ranks in self.sets.items()}
        of_shard = {
            apart: [momentum_costs(shards.elements(shard)) for shard in range(shards.count)]
            for apart, shards in self.shards.items()
        }
        known: dict[tuple[int, ...], RankCosts] = {}  # most ranks of a large stage are like others
        found = []
        for rank in range(self.parallel.stage_ranks):
            places = self.places(rank)
            if places not in known:
                parts = [of_set[name][self.place_in(name, rank)] for name in of_set]
                parts += [of_shard[apart][self.shard_of(apart, rank)] for apart in of_shard]
                known[places] = sum(parts, RankCosts())
            found.append(known[places])
        return found

    def places(self, rank: int) -> tuple[int, ...]:
        """Where a rank of the stage stands in all that it belongs to; the same for ranks with the same figures."""
        dense = self.place_in("dense", rank)
        others = [self.place_in(name, rank) for name in self.sets if name != "dense"]
        return (dense, *others, self.place_in("expert", rank) if True in self.shards else 0)

    def work(self) -> list[int]:
        """Refresh work of every rank of the stage, in units of b^3."""
        of_set = {}
        for name, ranks in self.sets.items():
            of_set[name] = [
                sum(work(width) * costs.owned[place] for width, costs in ranks.costs.items())
                for place in range(ranks.ranks)
            ]
        return [
            sum(loads[self.place_in(name, rank)] for name, loads in of_set.items())
            for rank in range(self.parallel.stage_ranks)
        ]


def ranks_of_stage(
    buffers: Sequence[Buffer],
    managed: Mapping[str, Managed],
    parallel: Parallel,
    *,
    moment_bytes: int,
    basis_bytes: int,
) -> StageRanks:
    """Share out the blocks of a stage, and count.

    Args:
        buffers: of all its chunks.
        managed: its weights on Dobb.
        parallel: of the layout.
        moment_bytes, basis_bytes: of an element of a moment and of a basis.
    """
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
        blocks = {key: weight.local_blocks for key, weight in weights.items()}
        costs = refresh_costs(ownership, blocks, moment_bytes=moment_bytes, basis_bytes=basis_bytes)
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
