"""The test bed itself: Megatron trains on it, the runner reports what happens, the recorder sees every collective."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

import testbed

testbed.enable()

from whole_model import fill, parameters_by_name, whole_parameters  # noqa: E402  (Megatron, after the patches)

from testbed import gpt, processes, traffic  # noqa: E402

STEPS, SEQUENCES = 4, 8
INSTANCES = {"num_distributed_optimizer_instances": 2}


def build(ddp=None, transformer=None):
    chunks = gpt.build_chunks(ddp, **({"num_layers": 4} | (transformer or {})))
    parameters = parameters_by_name(chunks)
    fill(parameters)
    return chunks, parameters


def train(sizes=None, ddp=None, micro_batch=1, transformer=None):
    gpt.initialize(**(sizes or {}))
    chunks, parameters = build(ddp, transformer)
    optimizer = gpt.build_optimizer(chunks)
    for step in range(STEPS):
        gpt.train_step(chunks, optimizer, gpt.global_batch(step, SEQUENCES), micro_batch)
    return whole_parameters(parameters)


@pytest.fixture(scope="module")
def one_process():
    return processes.run(1, train)[0]


@pytest.mark.parametrize(
    ("world", "sizes", "ddp", "micro_batch", "transformer"),
    [
        pytest.param(2, {}, {}, 1, {}, id="dp2"),
        pytest.param(2, {}, {"overlap_grad_reduce": True, "bucket_size": 5000}, 1, {}, id="dp2-buckets"),
        pytest.param(1, {}, {}, 4, {}, id="larger-micro-batch"),
        pytest.param(2, {"tensor_model_parallel_size": 2}, {}, 1, {}, id="tp2"),
        pytest.param(2, {"tensor_model_parallel_size": 2}, {}, 1, {"sequence_parallel": True}, id="tp2-sp"),
        pytest.param(2, {"pipeline_model_parallel_size": 2}, {}, 1, {}, id="pp2"),
        pytest.param(
            2,
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            {"overlap_grad_reduce": True, "bucket_size": 5000},
            2,
            {},
            id="pp2-two-chunks-buckets",
        ),
        pytest.param(2, {"context_parallel_size": 2}, {}, 2, {}, id="cp2"),
        pytest.param(4, INSTANCES, INSTANCES, 1, {}, id="two-instances"),
    ],
)
def test_megatron_trains_to_the_same_weights_on_every_layout(one_process, world, sizes, ddp, micro_batch, transformer):
    ranks = processes.run(world, train, sizes, ddp, micro_batch, transformer)
    assert set().union(*ranks) == one_process.keys()
    for parameters in ranks:
        for name, value in parameters.items():
            torch.testing.assert_close(value, one_process[name], rtol=1e-5, atol=2e-6, msg=f"{name} differs")


def test_training_changes_every_weight(one_process):
    def initial():
        gpt.initialize()
        return whole_parameters(build()[1])

    before = processes.run(1, initial)[0]
    unchanged = [name for name in before if torch.equal(before[name], one_process[name])]
    assert not unchanged


def test_ranks_draw_different_numbers_in_megatrons_tracker():
    def draw():
        gpt.initialize(tensor_model_parallel_size=2)
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        with get_cuda_rng_tracker().fork():
            return torch.rand(4, device="cuda")

    first, second = processes.run(2, draw)
    assert not torch.equal(first, second)


def test_recorder_sees_the_collectives_of_a_megatron_step_in_order():
    def calls_of_a_step(overlap):
        gpt.initialize()
        model = gpt.build({"overlap_grad_reduce": overlap, "bucket_size": 5000 if overlap else None})
        optimizer = gpt.build_optimizer(model)
        gpt.train_step(model, optimizer, gpt.global_batch(0, SEQUENCES))
        with traffic.record() as calls:
            gpt.train_step(model, optimizer, gpt.global_batch(1, SEQUENCES))
        outside = len(calls)
        dist.barrier()
        assert len(calls) == outside, "recorded after the end"
        buffer = model.buffers[0]
        return calls, [bucket.grad_data.numel() for bucket in buffer.buckets], buffer.numel

    for overlap in (False, True):
        calls, buckets, numel = processes.run(2, calls_of_a_step, overlap)[0]
        scattered = [call for call in calls if call.name == "reduce_scatter_tensor"]
        gathered = [call for call in calls if call.name == "all_gather_into_tensor"]
        assert [call.numel for call in scattered] == buckets
        assert (len(buckets) > 1) == overlap
        assert sum(call.numel for call in gathered) == numel
        assert calls.index(gathered[0]) > calls.index(scattered[-1])
        for call in scattered + gathered:
            assert call.ranks == (0, 1)
            assert call.dtype == torch.float32
            assert call.coalesced is not None, "Megatron puts these into a coalescing manager"
            assert max(call.sent, call.received) == 4 * call.numel == 2 * min(call.sent, call.received)


def test_recorder_reads_every_kind_of_call():
    def make_calls():
        rank, pair = dist.get_rank(), dist.new_group([0, 1])
        single, double = torch.ones(2), torch.ones(4)
        with traffic.record() as calls:
            dist.all_reduce(single, group=pair)
            dist.broadcast(single, src=1)
            dist.all_gather([torch.ones(2), torch.ones(2)], single)
            splits = [1, 3] if rank == 0 else [3, 1]  # each keeps 1 and sends 3
            dist.all_to_all_single(torch.empty(4), double, splits, splits)
            dist.all_gather_object([None, None], "text")
            dist.barrier()
            peer = 1 - rank
            ops = [dist.P2POp(dist.isend, single, peer), dist.P2POp(dist.irecv, torch.empty(2), peer)]
            for request in dist.batch_isend_irecv(ops):
                request.wait()
            (dist.send if rank == 0 else dist.recv)(torch.ones(3, dtype=torch.bfloat16), peer)
        return [(c.name, c.sent, c.received, c.peer) for c in calls]

    def expected(rank):
        last = ("send", 6, 0, 1) if rank == 0 else ("recv", 0, 6, 0)
        return [
            ("all_reduce", 8, 8, None),
            ("broadcast", *((8, 0) if rank == 1 else (0, 8)), 1),
            ("all_gather", 8, 16, None),
            ("all_to_all_single", 16, 16, None),
            ("all_gather_object", 0, 0, None),
            ("barrier", 0, 0, None),
            ("isend", 8, 0, 1 - rank),
            ("irecv", 0, 8, 1 - rank),
            last,
        ]

    assert processes.run(2, make_calls) == [expected(0), expected(1)]


def test_all_gather_of_unequal_sizes_works_on_gloo():
    def gather():
        rank = dist.get_rank()
        parts = [torch.zeros(1), torch.zeros(3)]
        dist.all_gather(parts, torch.full((1 + 2 * rank,), float(rank + 1)))
        return parts

    for parts in processes.run(2, gather):
        assert [part.tolist() for part in parts] == [[1.0], [2.0, 2.0, 2.0]]


class OddError(Exception):
    pass


def test_runner_returns_results_by_rank_even_tensors_and_closures():
    offset = 10
    results = processes.run(3, lambda scale: torch.tensor([scale * dist.get_rank() + offset]), 2)
    assert [result.item() for result in results] == [10, 12, 14]


def test_runner_raises_what_a_rank_raised_and_kills_the_others(tmp_path):
    def fail_on_rank_1():
        (tmp_path / str(dist.get_rank())).write_text(str(os.getpid()))
        dist.barrier()
        if dist.get_rank() == 1:
            raise OddError("the reason")
        dist.barrier()  # would wait for the failed rank for ever

    started = time.monotonic()
    with pytest.raises(processes.RankError, match=r"rank 1 of 3 failed:(.|\n)*fail_on_rank_1(.|\n)*the reason") as info:
        processes.run(3, fail_on_rank_1)
    assert isinstance(info.value.__cause__, OddError)
    assert time.monotonic() - started < 30
    for file in tmp_path.iterdir():
        assert not alive(int(file.read_text()))


def test_runner_tells_which_rank_died():
    def die_on_rank_0():
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(processes.RankError, match="rank 0 of 2 died: killed by SIGKILL"):
        processes.run(2, die_on_rank_0)


def test_runner_gives_up_after_the_timeout_and_says_where_each_rank_was(tmp_path):
    def hang():
        helper = os.fork()
        (tmp_path / str(dist.get_rank())).write_text(str(helper or os.getpid()))
        wait_for_ever()

    def wait_for_ever():
        time.sleep(1000)

    with pytest.raises(processes.RankTimeout, match=r"2 of 2 ranks did not finish in 2 s(.|\n)*wait_for_ever"):
        processes.run(2, hang, timeout=2)
    for file in tmp_path.iterdir():
        assert not alive(int(file.read_text()))


def test_runner_works_after_the_parent_has_used_threads_and_autograd():
    weight = torch.randn(300, 300, requires_grad=True)

    def backward():
        weight.grad = None
        (weight @ weight).sum().backward()
        return weight.grad.sum().item()

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        here = backward()
        for there in processes.run(2, backward, timeout=60):
            assert there == pytest.approx(here, rel=1e-3)
    finally:
        torch.set_num_threads(threads)


def alive(pid, seconds=5.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        if (state := process_state(pid)) in ("Z", None):
            return False
        time.sleep(0.05)
    return state is not None


def process_state(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return None
