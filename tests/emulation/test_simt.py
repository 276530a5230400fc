"""The emulation reports each defect that it is there to find, and moves fragments as the hardware does."""

import re

import pytest
import torch

from emulation import emulated
from emulation.emulated import BACKWARD, FORWARD, EmulationError, Harness, Misaligned

pytestmark = pytest.mark.full

FLOATS = 64
BLOCK = r"of block 0 of the kernel launched at defects\.cpp:\d+"


def test_threads_at_two_barriers_are_divergent(harness):
    with pytest.raises(EmulationError, match=r"divergence in block 0 .*threads 0-47 wait at barrier \(defects.cpp:\d+"):
        harness.run("divergent_barrier")


def test_a_thread_that_returned_before_a_barrier_is_divergent(harness):
    with pytest.raises(EmulationError, match=r"threads 0-4 wait at barrier .*, thread 5 returned, threads 6-63 wait"):
        harness.run("early_return")


def test_a_shuffle_of_half_a_warp_is_divergent(harness):
    with pytest.raises(EmulationError, match=r"threads 0-15 wait at shuffle_xor .*, threads 16-31 returned"):
        harness.run("divergent_shuffle", {"to": torch.zeros(FLOATS)})


def test_lanes_at_two_shuffles_are_divergent(harness):
    with pytest.raises(EmulationError, match=r"thread 0 waits at shuffle_xor .*, thread 1 waits at shuffle_xor"):
        harness.run("warp_operations_at_two_places", {"to": torch.zeros(FLOATS)})


def test_warps_may_run_apart_and_shuffles_take_the_value_of_the_other_lane(harness):
    to = torch.zeros(FLOATS)
    harness.run("warps_apart", {"to": to}, changed=["to"])
    lane = torch.arange(FLOATS)
    once = lane + (lane ^ 1)
    expected = torch.where(lane < 32, once, once + once[lane ^ 2])
    assert torch.equal(to, expected.float())


@pytest.fixture
def sanitized(harness):
    if not harness.programs.sanitized:
        pytest.skip("this compiler has no sanitizers")
    return harness


@pytest.mark.parametrize("offset", [1, -1])
def test_reading_outside_of_a_tensor_is_reported(sanitized, offset):
    buffers = {"to": torch.zeros(FLOATS), "from": torch.zeros(FLOATS)}
    sanitized.run("reads_global", buffers, {"offset": 0})
    with pytest.raises(EmulationError, match="heap-buffer-overflow"):
        sanitized.run("reads_global", buffers, {"offset": offset})


def test_reading_outside_of_shared_memory_is_reported(sanitized):
    to = torch.zeros(FLOATS)
    sanitized.run("reads_shared", {"to": to}, {"offset": 0}, changed=["to"])
    assert torch.equal(to, torch.ones(FLOATS))
    with pytest.raises(EmulationError, match="heap-buffer-overflow"):
        sanitized.run("reads_shared", {"to": to}, {"offset": 1})


@pytest.mark.parametrize("misaligned", [2, 4, 8])
def test_a_misaligned_quad_is_reported(harness, misaligned):
    to, values = torch.zeros(FLOATS), torch.arange(FLOATS).float()
    harness.run("copies_quads", {"to": to, "from": values}, changed=["to"])
    assert torch.equal(to, values)
    message = (
        rf"load_once of 16 bytes at an address that is {misaligned} off its alignment at defects.*thread \d+ {BLOCK}"
    )
    with pytest.raises(EmulationError, match=message):
        harness.run("copies_quads", {"to": to, "from": Misaligned(values, misaligned)})


def copied(harness, search_races=True, **arguments):
    values = torch.arange(4.0 * FLOATS)
    to = torch.zeros_like(values)
    integers = {"offset": 0, "waits": 1, "meets": 1, **arguments}
    harness.run(
        "copies_behind_its_back", {"to": to, "from": values}, integers, changed=["to"], search_races=search_races
    )
    return to, values.view(-1, 4).flip(0).flatten()


def test_a_copy_that_was_waited_for_is_there(harness):
    to, expected = copied(harness)
    assert torch.equal(to, expected)


def test_a_copy_that_was_not_waited_for_is_not_there(harness):
    to, _ = copied(harness, search_races=False, waits=0)
    assert to.isnan().all()


def test_a_copy_of_another_thread_without_a_barrier_is_a_race(harness):
    with pytest.raises(EmulationError, match="a race: copies_behind_its_back leaves different bits in to under"):
        copied(harness, meets=0)


def test_a_misaligned_copy_and_one_past_the_end_are_reported(harness):
    with pytest.raises(EmulationError, match=r"copy_async of 16 bytes at an address that is 4 off"):
        copied(harness, offset=1)
    with pytest.raises(EmulationError, match=r"copy_async outside of shared memory: bytes 1024 to 1040 of 1024"):
        copied(harness, offset=4)


def test_a_missing_barrier_is_a_race(harness):
    x = torch.arange(float(FLOATS))
    harness.run("reverses", {"x": x}, {"meets": 1}, changed=["x"])
    assert torch.equal(x, torch.arange(float(FLOATS)).flip(0))
    with pytest.raises(EmulationError, match=r"a race: reverses leaves different bits in x"):
        harness.run("reverses", {"x": x}, {"meets": 0}, changed=["x"])


def test_blocks_that_depend_on_their_order_are_a_race(harness):
    to = torch.zeros(1)
    with pytest.raises(EmulationError, match="a race: blocks_write_one_place leaves different bits in to"):
        harness.run("blocks_write_one_place", {"to": to}, changed=["to"], schedules=[FORWARD, BACKWARD])


@pytest.fixture
def watching(harness):
    if harness.programs.watched is None:
        pytest.skip("this compiler does not report accesses")
    return harness


RACES = [
    ("write_then_read", "reads byte 0 of shared memory, which thread 0 of block 0 wrote"),
    ("read_then_write", "writes byte 0 of shared memory, which several threads of block 0 read"),
    ("write_then_write", "writes byte 0 of shared memory, which thread 0 of block 0 wrote"),
    ("warp_barrier_for_another_warp", "reads byte 0 of shared memory, which thread 0 of block 0 wrote"),
    ("lanes_without_warp_barrier", "writes byte 4 of shared memory, which thread 0 of block 0 read"),
    ("copy_read_before_the_wait", "reads byte 0 of shared memory, which a copy of thread 0 of block 0 may not have"),
    ("copy_over_what_is_read", "writes byte 0 of shared memory, which several threads of block 0 read"),
    ("blocks_share_global_memory", "writes byte 0 of a buffer of 256 bytes, which thread 0 of block 0 wrote"),
]


@pytest.mark.parametrize(("defect", "message"), RACES, ids=[defect for defect, _ in RACES])
def test_accesses_that_nothing_orders_are_reported_where_the_bits_do_not_tell(watching, defect, message):
    """The values do not change, so that no schedule could show it."""
    buffers, number = {"x": torch.zeros(FLOATS)}, [name for name, _ in RACES].index(defect)
    with pytest.raises(EmulationError, match=f"a race: {message}.*of the kernel launched at defects.cpp"):
        watching.run("races", buffers, {"defect": number, "repaired": 0})
    watching.run("races", buffers, {"defect": number, "repaired": 1})


def test_a_crash_of_the_harness_is_reported_and_the_next_call_starts_another(harness):
    """Here by a kernel whose stack does not suffice."""
    with pytest.raises(EmulationError, match="the harness ended with code"):
        harness.run("uses_much_stack", {"to": torch.zeros(1)})
    copied(harness)


def test_a_kernel_without_an_end_is_stopped(harness, tmp_path):
    impatient = Harness(harness.programs, tmp_path, most_seconds=1)
    with pytest.raises(EmulationError, match="runs_for_ever did not end within 1 s"):
        impatient.run("runs_for_ever", {"x": torch.zeros(2)})


@pytest.mark.parametrize(
    ("blocks", "threads", "shared_bytes", "message"),
    [
        (0, 32, 0, "0 blocks, expected at least 1"),
        (1, 48, 0, "48 threads in a block, expected a multiple of 32 up to 1024"),
        (1, 1056, 0, "1056 threads in a block, expected a multiple of 32 up to 1024"),
        (1, 32, 1 << 20, "1048576 bytes of shared memory, expected at most 232448"),
    ],
)
def test_a_launch_that_a_gpu_refuses_is_refused(harness, blocks, threads, shared_bytes, message):
    integers = {"blocks": blocks, "threads": threads, "shared_bytes": shared_bytes}
    with pytest.raises(EmulationError, match=r"launch at defects\.cpp:\d+: " + re.escape(message)):
        harness.run("launches", integers=integers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_fragments_are_matrix_products(harness, dtype):
    a, b, d = torch.randn(16, 16).to(dtype), torch.randn(16, 8).to(dtype), torch.randn(16, 8)
    expected = d.double() + a.double() @ b.double()
    harness.run("multiplies", {"d": d, "a": a, "b": b}, {"is_bf16": dtype is torch.bfloat16}, changed=["d"])
    torch.testing.assert_close(d.double(), expected, rtol=2**-22, atol=2**-22)


@pytest.mark.parametrize("transposed", [False, True])
def test_loads_give_each_lane_its_pair_of_entries(harness, transposed):
    x = torch.arange(4 * 8 * 8, dtype=torch.int16).view(4, 8, 8)
    registers = torch.zeros(32, 4, 2, dtype=torch.int16)
    harness.run("loads", {"registers": registers, "x": x}, {"transposed": transposed}, changed=["registers"])
    matrices = x.mT if transposed else x
    # Lane 4 r + c has entries (r, 2 c) and (r, 2 c + 1) of every matrix.
    assert torch.equal(registers.view(8, 4, 4, 2).permute(2, 0, 1, 3).reshape(4, 8, 8), matrices)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_packing_rounds_as_pytorch_does(harness, dtype):
    bits = torch.randint(-(2**31), 2**31 - 1, (20000,), dtype=torch.int64).to(torch.int32)
    values = torch.cat([bits.view(torch.float32), torch.randn(1000) * 1e-6, torch.tensor([0.0, 65519.0, 65520.0])])
    ties = torch.randn(1000).to(dtype).view(torch.int16)
    halfway = (ties.view(dtype).float() + (ties + 1).view(dtype).float()) / 2
    values = torch.cat([values, halfway])
    values = values[~values.isnan()]
    to = torch.zeros(len(values), 2, dtype=torch.int16)
    integers = {"count": len(values), "is_bf16": dtype is torch.bfloat16}
    harness.run("rounds", {"to": to, "from": values}, integers, changed=["to"], schedules=[FORWARD])
    assert torch.equal(to, torch.stack([values, -values], dim=1).to(dtype).view(torch.int16))


def test_the_harness_is_compiled_anew_only_when_what_it_is_made_of_changes(monkeypatch, tmp_path):
    compilations = []

    def compile_into(folder):
        compilations.append(folder)
        (folder / "checked").write_text(str(len(compilations)))
        return emulated.Programs(folder / "checked", sanitized=True, watched=None)

    monkeypatch.setattr(emulated, "build", compile_into)
    first = emulated.built(tmp_path)
    assert (first.checked.read_text(), first.sanitized, first.watched) == ("1", True, None)
    assert emulated.built(tmp_path) == first
    monkeypatch.setattr(emulated, "FLAGS", [*emulated.FLAGS, "-O2"])
    assert emulated.built(tmp_path).checked.read_text() == "2"
    assert len(compilations) == 2
    assert not first.checked.exists(), "one build is kept"
