"""A refresh spread over ranks: equal to the one in a single process, and known to all ranks alike."""

import random
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from megatron_dobb.errors import CaptureError, LayoutError
from megatron_dobb.methods.dobb.capture import MomentSum
from megatron_dobb.methods.dobb.moment import gram
from megatron_dobb.methods.dobb.refresh_group import HeldWeight, RefreshCounts, RefreshGroup, share_out
from megatron_dobb.sharding.shard import Shard
from testbed import processes, traffic

BETA = 0.5  # sums of small whole numbers stay exact in fp32, so that moments compare bit for bit
HOW = {"beta": BETA, "method": "householder", "iterations": 1}


@dataclass(frozen=True)
class Problem:
    """Weights of one width, cut into flat shards at random chunks as a bucket is, the same for every rank."""

    width: int
    blocks: dict[str, int]
    held: dict[str, list[tuple[int, ...]]]
    idle: frozenset[str] = frozenset()

    @classmethod
    def draw(cls, ranks, seed):
        """A random problem; some ranks may hold nothing, some weights lie in one shard."""
        dice = random.Random(seed)
        width = dice.choice([1, 2, 3, 8])
        blocks = {f"layers.{i}": dice.randint(1, 5) for i in range(dice.randint(1, 5))}
        held = {}
        for key, count in blocks.items():
            chunks = count * dice.randint(1, 4)
            cuts = sorted(dice.choices(range(chunks + 1), k=ranks - 1))
            shards = zip([0, *cuts], [*cuts, chunks], strict=True)
            held[key] = [Shard(a * width, b * width, count * width, width).held_blocks() for a, b in shards]
        return cls(width, blocks, held)

    def group(self, rank=None, basis_dtype=torch.float32, transport_dtype=torch.float32):
        """This rank's group, or with `rank` None one that holds everything in a single process."""
        weights = []
        for key, count in self.blocks.items():
            held = tuple(range(count)) if rank is None else self.held[key][rank]
            weights.append(HeldWeight(key, count, self.width, held, key in self.idle))
        ranks = None if rank is None else dist.group.WORLD
        return RefreshGroup(
            weights,
            ranks,
            share_out({0: weights}, ranks)[0],
            moment_dtype=torch.float32,
            basis_dtype=basis_dtype,
            device=torch.device("cpu"),
            transport_dtype=transport_dtype,
        )

    def inputs(self, key, rank, step):
        """Whole-number activations `[tokens, n]` of a rank; sometimes it sees no token."""
        dice = random.Random(f"{key} {rank} {step} {self.width}")
        generator = torch.Generator().manual_seed(dice.randrange(2**31))
        tokens = dice.choice([0, 5, 9]) if rank else 8
        x = torch.randint(-3, 4, (tokens, self.blocks[key] * self.width), generator=generator).float()
        return x + torch.arange(x.shape[1]) % 3 * x[:, :1] if tokens else x

    def sums(self, ranks, step):
        """Captured sums of some ranks together."""
        found = {}
        for key in self.blocks:
            x = torch.cat([self.inputs(key, rank, step) for rank in ranks])
            found[key] = MomentSum(gram(x, self.width) if len(x) else None, len(x))
        return found


def run_problems(problems, basis_dtype=torch.float32, steps=3):
    """Every problem on this rank: moments and bases by block, and what was counted."""
    rank = dist.get_rank()
    found = []
    for problem in problems:
        group = problem.group(rank, basis_dtype)
        counts = [group.refresh(problem.sums([rank], step), **HOW) for step in range(steps)]
        moments = dict(zip(group.owned, group.moment, strict=True))
        bases = dict(zip(group.kept, group.basis, strict=True))
        found.append((moments, bases, counts))
    return found


def run_alone(problem, ranks, basis_dtype=torch.float32, steps=3):
    group = problem.group(None, basis_dtype)
    counts = [group.refresh(problem.sums(range(ranks), step), **HOW) for step in range(steps)]
    return dict(zip(group.owned, group.moment, strict=True)), dict(zip(group.kept, group.basis, strict=True)), counts


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_refresh_over_ranks_is_the_refresh_of_a_single_process(ranks):
    problems = [Problem.draw(ranks, seed) for seed in range(12)]
    results = processes.run(ranks, run_problems, problems)
    for number, problem in enumerate(problems):
        moments, bases, counts = run_alone(problem, ranks)
        owned = [block for rank in range(ranks) for block in results[rank][number][0]]
        assert sorted(owned) == sorted(moments), "every block has one owner"
        for rank in range(ranks):
            their_moments, their_bases, their_counts = results[rank][number]
            assert their_counts == counts
            assert {key for key, _ in their_bases} == {key for key in problem.blocks if problem.held[key][rank]}
            for block, moment in their_moments.items():
                assert torch.equal(moment, moments[block]), block
            for block, basis in their_bases.items():
                torch.testing.assert_close(basis, bases[block], rtol=1e-5, atol=1e-5, msg=f"{problem} {block}")


@pytest.mark.parametrize("basis_dtype", [torch.float32, torch.bfloat16])
def test_all_holders_of_a_block_have_the_same_basis_bit_for_bit(basis_dtype):
    problems = [Problem.draw(3, seed) for seed in range(20, 32)]
    results = processes.run(3, run_problems, problems, basis_dtype)
    shared = 0
    for number in range(len(problems)):
        first = {}
        for rank in range(3):
            for block, basis in results[rank][number][1].items():
                assert basis.dtype == basis_dtype
                assert torch.equal(first.setdefault(block, basis), basis)
                shared += first[block] is not basis
    assert shared > 20, "the problems must share blocks"


WHOLE = Problem(
    width=2, blocks={"a": 3, "b": 2}, held={"a": [(0, 1), (1, 2)], "b": [(0, 1), ()]}, idle=frozenset({"b"})
)
"""Two ranks: block 1 of `a` is cut, `b` is an expert that lies with rank 0."""


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_sum_of_one_rank_leaves_the_block_alone_everywhere_and_all_ranks_count_it(value):
    def refresh_twice():
        rank = dist.get_rank()
        group = WHOLE.group(rank)
        group.refresh(WHOLE.sums([rank], 0), **HOW)
        before = group.basis.clone(), group.moment.clone()
        sums = WHOLE.sums([rank], 2)
        if rank == 1:
            sums["a"].total[1, 0, 0] = value
        counts = group.refresh(sums, **HOW)
        kept_bases = [b for i, b in enumerate(group.kept) if torch.equal(before[0][i], group.basis[i])]
        kept_moments = [b for i, b in enumerate(group.owned) if torch.equal(before[1][i], group.moment[i])]
        return counts, kept_bases, kept_moments

    first, second = processes.run(2, refresh_twice)
    assert first[0] == second[0] == RefreshCounts(skipped=1, fallbacks=0)
    assert first[1] == second[1] == [("a", 1)]
    assert first[2] + second[2] == [("a", 1)]


def test_an_expert_that_no_rank_saw_keeps_its_state_and_all_ranks_count_it():
    def refresh():
        rank = dist.get_rank()
        group = WHOLE.group(rank)
        sums = WHOLE.sums([rank], 0) | {"b": MomentSum()}
        return group.refresh(sums, **HOW)

    assert processes.run(2, refresh) == [RefreshCounts(skipped=2)] * 2


def test_a_weight_that_no_rank_saw_is_an_error_on_every_rank():
    def refresh():
        rank = dist.get_rank()
        group = WHOLE.group(rank)
        with pytest.raises(CaptureError, match="no input activation was captured for a on a refresh step"):
            group.refresh(WHOLE.sums([rank], 0) | {"a": MomentSum()}, **HOW)
        dist.barrier()  # nobody is left waiting in a collective
        return True

    assert processes.run(2, refresh) == [True, True]


def test_a_weight_that_only_one_rank_saw_is_refreshed():
    def refresh():
        rank = dist.get_rank()
        group = WHOLE.group(rank)
        sums = WHOLE.sums([0], 0) if rank == 0 else {"a": MomentSum(), "b": MomentSum()}
        return group.refresh(sums, **HOW), group.basis_of("a")[-1 if rank == 0 else 0]

    alone = WHOLE.group(None)
    alone.refresh(WHOLE.sums([0], 0), **HOW)
    for counts, basis in processes.run(2, refresh):
        assert counts == RefreshCounts()
        torch.testing.assert_close(basis, alone.basis_of("a")[1])


@pytest.mark.parametrize(
    "other",
    [
        Problem(2, {"a": 3}, {"a": [(0, 1), (1, 2)]}),
        Problem(2, {"a": 3, "c": 2}, {"a": [(0, 1), (1, 2)], "c": [(0, 1), ()]}),
        Problem(2, {"a": 3, "b": 4}, {"a": [(0, 1), (1, 2)], "b": [(0, 1), (2, 3)]}),
    ],
    ids=["missing", "other-name", "other-count"],
)
def test_ranks_that_manage_different_weights_are_told_so(other):
    def build():
        rank = dist.get_rank()
        with pytest.raises(LayoutError, match=r"ranks . and . .* manage different weights \(name.*'[bc]'"):
            (WHOLE if rank == 0 else other).group(rank)
        return True

    assert processes.run(2, build) == [True, True]


def test_every_refresh_makes_the_same_three_collectives_whatever_was_captured():
    def record():
        rank = dist.get_rank()
        group = WHOLE.group(rank)
        found = []
        for sums in (WHOLE.sums([rank], 0), WHOLE.sums([rank], 1) | {"b": MomentSum()}):
            with traffic.record() as calls:
                group.refresh(sums, **HOW)
            found.append([(call.name, call.sent, call.received) for call in calls])
        return found

    for with_tokens, without in processes.run(2, record):
        assert with_tokens == without
        assert [name for name, *_ in with_tokens] == ["reduce_scatter_tensor", "all_to_all_single", "all_to_all_single"]


def refresh_in_bf16(problems, scale):
    """The moments of every problem after one refresh, and how many bytes each of its collectives sent."""
    rank, found = dist.get_rank(), []
    for problem in problems:
        group = problem.group(rank, transport_dtype=torch.bfloat16)
        sums = problem.sums([rank], 0)
        for entry in sums.values():
            entry.tokens *= scale
        with traffic.record() as calls:
            group.refresh(sums, **HOW)
        chunk = group.flow.chunk * group.ranks
        moments = dict(zip(group.owned, group.moment, strict=True))
        found.append((moments, [(call.name, call.dtype, call.sent) for call in calls], chunk))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_that_travel_in_bf16_take_half_the_bytes_and_are_added_in_fp32(ranks):
    problems = [Problem.draw(ranks, seed) for seed in range(8)]
    scale = 12_345  # counts of tokens that bf16 cannot hold
    results = processes.run(ranks, refresh_in_bf16, problems, scale)
    for number, problem in enumerate(problems):
        parts = [problem.sums([rank], 0) for rank in range(ranks)]
        seen = 0
        for moments, calls, chunk in (results[rank][number] for rank in range(ranks)):
            names = [name for name, *_ in calls]
            assert names == ["all_to_all_single"] * 3
            assert calls[0][1:] == (torch.bfloat16, 2 * chunk)
            assert calls[1][1] == torch.float32
            for (key, block), moment in moments.items():
                tokens = sum(part[key].tokens for part in parts) * scale
                rounded = [p[key].total[block].bfloat16().double() for p in parts if p[key].total is not None]
                expected = (1 - HOW["beta"]) * sum(rounded) / tokens
                torch.testing.assert_close(moment.double(), expected, rtol=1e-6, atol=0)
                seen += 1
        assert seen == sum(problem.blocks.values())


def test_groups_are_built_with_one_gather_for_all_widths():
    def record():
        held = [HeldWeight(f"w{width}", 4, width, (dist.get_rank(),)) for width in (2, 4)]
        held = [HeldWeight(w.key, 2, w.width, w.held) for w in held]
        with traffic.record() as calls:
            owners = share_out({w.width: [w] for w in held}, dist.group.WORLD)
            for weight in held:
                RefreshGroup(
                    [weight],
                    dist.group.WORLD,
                    owners[weight.width],
                    moment_dtype=torch.float32,
                    basis_dtype=torch.float32,
                    device=torch.device("cpu"),
                )
        return [call.name for call in calls]

    assert processes.run(2, record) == [["all_gather_object"]] * 2


def test_a_single_rank_communicates_nothing():
    def record():
        problem = Problem(2, {"a": 3}, {"a": [(0, 1, 2)]})
        group = problem.group(0)
        with traffic.record() as calls:
            group.refresh(problem.sums([0], 0), **HOW)
        return len(calls)

    assert processes.run(1, record) == [0]
