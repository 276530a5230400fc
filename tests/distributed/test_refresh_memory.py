"""What the start-up table says of memory is what the allocator was asked for, to 2 %."""

import dataclasses
import functools
import re
import threading

import pytest
import torch
import torch.distributed as dist
from layout_runs import Layout, Run, global_batch, start

from megatron_dobb import DobbConfig
from megatron_dobb.background.side_stream import Task, Worker
from megatron_dobb.megatron.dobb.optimizer import DobbDistributedOptimizer
from megatron_dobb.megatron.dobb.startup_report import rank_costs, refresh_peak, start_table
from testbed import gpt, processes

MODEL = {"num_layers": 2, "hidden_size": 192, "kv_channels": 48}
CONFIG = DobbConfig(blocks=2, overlap_refresh=False)
MIB = 2**20


def allocated(action):
    """The highest and the last point, in bytes, of the memory that an action takes."""
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as found:
        action()
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    highest = now = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        highest = max(highest, now)
    return highest, now


def out_of_sight(collective, output, given, *args, **settings):
    """A collective on copies that another thread makes.

    The profile sees this thread alone, but gloo's threads may be the last to let go of a buffer.
    """

    def with_copies():
        theirs = output.clone()
        collective(theirs, given.clone(), *args, **settings)
        output.copy_(theirs)

    thread = threading.Thread(target=with_copies)
    thread.start()
    thread.join()


class Here(Worker):
    """A worker that needs no thread: the profile sees this one alone."""

    def submit(self, call, reads=()):
        task = Task(call)
        task.run()
        return task


def measured(self, build, built):
    built.append(allocated(lambda: build(self))[1])


def measure(layout, config, launcher):
    start(layout)
    built = []
    for name in ("_build", "_build_segments"):
        build = getattr(DobbDistributedOptimizer, name)
        setattr(DobbDistributedOptimizer, name, functools.partialmethod(measured, build, built))
    run = Run(layout, config, MODEL)
    if launcher is not None:
        run.let_launch(launcher)
        run.dobb.refreshes.worker = Here(torch.device("cpu"))
    refresh, refreshed = run.dobb.refreshes.finish, []

    for name in ("reduce_scatter_tensor", "all_to_all_single"):
        setattr(dist, name, functools.partial(out_of_sight, getattr(dist, name)))

    def with_sums():
        """Refresh from copies: what was allocated before the profile began is not seen to be freed either."""
        for capture in run.dobb.captures:
            for entry in capture.sums.values():
                entry.total = entry.total.clone() if entry.total is not None else None
        refresh()

    def finish():
        refreshed.append(allocated(with_sums)[0])

    run.dobb.refreshes.finish = finish
    gpt.train_step(run.chunks, run.optimizer, global_batch(0), layout.micro_batch)
    return {
        "state": (sum(built), rank_costs(run.dobb).state),
        "peak": (refreshed[0], refresh_peak(run.dobb)),
        "table": start_table(run.dobb),
    }


SETTINGS = [{}, {"moment_dtype": "bf16", "basis_dtype": "fp32"}, {"moment_transport": "bf16"}, {"blocks": 1}]
# While the first group is renewed, the sums of the second, of about the same size, are triangles already.
REDUCED_FIRST = {"blocks": 1, "blocks_for": {"*linear_fc2*": 8}}


@pytest.mark.parametrize(
    ("ranks", "settings", "launcher"),
    [
        *((ranks, settings, None) for ranks in (1, 2) for settings in SETTINGS),
        *((ranks, REDUCED_FIRST, "program") for ranks in (1, 2)),
    ],
    ids=str,
)
def test_state_and_highest_point_of_a_refresh_are_those_of_the_allocator(ranks, settings, launcher):
    layout = Layout(ranks, micro_batch=12)
    for found in processes.run(ranks, measure, layout, dataclasses.replace(CONFIG, **settings), launcher):
        for what in ("state", "peak"):
            measured, said = found[what]
            assert measured > 2 * MIB
            assert said == pytest.approx(measured, rel=0.02), what
        (line,) = [line for line in found["table"] if "highest point" in line]
        shown = float(re.search(r"highest point ([\d.]+) MiB", line)[1])
        assert shown == pytest.approx(found["peak"][1] / MIB, abs=0.05)
