"""Save and load the runs of `layout_runs` with Megatron's distributed checkpoints, as Megatron's training does it.

Everything here runs on every rank.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from layout_runs import Layout, Run, start
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)

from megatron_dobb import DobbConfig

FORMATS = ("dp_reshardable", "fully_reshardable")


def metadata_of(sharding: str) -> dict[str, Any]:
    """What Megatron's training passes on to the model and the optimizer."""
    return {
        "distrib_optim_sharding_type": sharding,
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def state_of_model(run: Run, metadata: dict[str, Any]) -> dict[str, Any]:
    """The sharded state of the model chunks."""
    names = ["model"] if len(run.chunks) == 1 else [f"model{number}" for number in range(len(run.chunks))]
    chunks = (chunk.module.sharded_state_dict(metadata=metadata) for chunk in run.chunks)
    return dict(zip(names, chunks, strict=True))


def save(run: Run, path: Path, sharding: str, **metadata: Any) -> None:
    """Write a checkpoint into a new folder."""
    facts = metadata_of(sharding) | metadata
    state = state_of_model(run, facts)
    state["optimizer"] = run.optimizer.sharded_state_dict(state, metadata=facts)
    if dist.get_rank() == 0:
        path.mkdir(parents=True)
    dist.barrier()
    strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), facts["dp_cp_group"])
    dist_checkpointing.save(state, str(path), strategy, content_metadata=facts)


def load(run: Run, path: Path) -> None:
    """Continue from a checkpoint; the ranks share the reading of a `fully_reshardable` one."""
    common = dist_checkpointing.load_common_state_dict(str(path))
    facts = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    facts["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = state_of_model(run, facts)
    state["optimizer"] = run.optimizer.sharded_state_dict(state, is_loading=True, metadata=facts)
    strategy: Any = TorchDistLoadShardedStrategy()
    if facts["distrib_optim_sharding_type"] == "fully_reshardable":
        strategy = FullyParallelLoadStrategyWrapper(strategy, facts["dp_cp_group"])
    loaded = dist_checkpointing.load(state, str(path), strategy)
    for chunk, name in zip(run.chunks, state_of_model(run, facts), strict=True):
        chunk.module.load_state_dict(loaded[name], strict=True)
    run.optimizer.load_state_dict(loaded["optimizer"])


def blocks_written(run: Run) -> list[tuple[str, int]]:
    """The keys and numbers of the blocks that this rank writes."""
    return [
        (tensor.key, tensor.global_offset[0] + number)
        for optimizer in run.dobbs
        for kind in optimizer._extra_state().to_save().values()
        for tensor in kind.values()
        if is_main_replica(tensor.replica_id)
        for number in range(tensor.local_shape[0])
    ]


def go_on(run: Run, first: int, end: int) -> list[float]:
    """Train on the global batches `first` to `end - 1`; returns their losses."""
    return [run.step(number) for number in range(first, end)]


def train_and_save(
    layout: Layout, config: DobbConfig | None, transformer: dict[str, Any], saved_after: int, end: int, path: Path
) -> dict[str, Any]:
    """Train, save in every format on the way, and go on to step `end`."""
    start(layout)
    run = Run(layout, config, transformer)
    go_on(run, 0, saved_after)
    for sharding in FORMATS:
        save(run, path / sharding, sharding)
    result = {"saved": run.snapshot(), "written": blocks_written(run)}
    return result | {"losses": go_on(run, saved_after, end), "end": run.snapshot()}


def load_and_go_on(
    layout: Layout,
    config: DobbConfig | None,
    transformer: dict[str, Any],
    saved_after: int,
    end: int,
    paths: Sequence[Path],
) -> list[dict[str, Any]]:
    """For each of some checkpoints, continue it with a new model and optimizer to step `end`."""
    start(layout)
    results = []
    for path in paths:
        run = Run(layout, config, transformer)
        load(run, path)
        result = {"loaded": run.snapshot(), "losses": go_on(run, saved_after, end), "end": run.snapshot()}
        results.append(result | {"attempted": {optimizer.attempted_steps for optimizer in run.dobbs}})
    return results
