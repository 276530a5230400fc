"""Alternatives to a layout that does not work: block counts and tensor-parallel sizes for the same model."""

from dataclasses import dataclass, replace

from megatron_dobb.errors import DobbError
from megatron_dobb.methods.dobb.settings import DobbConfig
from megatron_dobb.sharding.block_width_advice import workable_counts

from .plan import Request, lay_out_stage, unlike_stages

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
TENSOR_SIZES = (1, 2, 4, 8, 16)
MOST = 12


@dataclass(frozen=True)
class Alternative:
    """A layout that works.

    Attributes:
        what: the flag and its value.
        unit: the widest alignment unit.
        padding: of all elements, on the stage that has the most.
    """

    what: str
    unit: int
    padding: float


def try_out(request: Request, what: str) -> Alternative | None:
    """Lay a request out, without owners; None if it cannot be."""
    try:
        buffers = [buffer for kind in unlike_stages(request) for buffer in lay_out_stage(request, kind.chunks)]
    except DobbError:
        return None
    return Alternative(
        what, max(b.unit for b in buffers), max(b.padding / b.stock if b.stock else 0.0 for b in buffers)
    )


def alternatives(request: Request) -> list[Alternative]:
    """Block counts for all weights, and tensor-parallel sizes with the blocks that were asked for, that work.

    The nearest ones to what was asked, at most `MOST` of each. For whole row blocks, which pad, optimizer instances and
    the input side as well.
    """
    found: list[Alternative | None] = []
    config, parallel = request.config, request.parallel
    if config.source != "none":
        asked = config.blocks if isinstance(config.blocks, int) else 16
        counts = sorted({*COUNTS, *_counts_of_model(request)}, key=lambda count: (_distance(count, asked), count))
        for count in counts:
            if sum(each is not None for each in found) == MOST:
                break
            found.append(try_out(replace(request, config=with_blocks(config, count)), f"--blocks {count}"))
    for size in TENSOR_SIZES:
        # As many ranks, where that is possible.
        ranks = parallel.data * parallel.tensor
        if size != parallel.tensor and ranks % size == 0:
            changes = {"tensor": size, "data": ranks // size}
            found.append(_with_layout(request, changes, f"--tp {size} --dp {ranks // size}"))
    if config.side == "output":
        for instances in (2, 4, 8, 16):
            what = f"--num-distributed-optimizer-instances {instances}"
            found.append(
                _with_layout(request, {"instances": instances}, what) if instances > parallel.instances else None
            )
        other = replace(
            config,
            side="input",
            source=None if config.source == "output-gradient" else config.source,
            block_width=None if config.source == "none" else config.block_width,
        )
        found.append(try_out(replace(request, config=other), "--side input"))
    return [each for each in found if each is not None]


def with_blocks(config: DobbConfig, count: int) -> DobbConfig:
    """Replace the number of blocks in the settings."""
    return replace(config, blocks=count, block_width=None)


def _with_layout(request: Request, changes: dict[str, int], what: str) -> Alternative | None:
    try:
        return try_out(replace(request, parallel=replace(request.parallel, **changes)), what)
    except DobbError:  # expert parallelism or optimizer instances do not fit
        return None


def _counts_of_model(request: Request) -> list[int]:
    """Block counts that divide the model's width; others cannot work. Whole row blocks may have to be narrow."""
    most = request.sizes.hidden_size if request.config.side == "output" else 256
    return [count for count in workable_counts(request.sizes.hidden_size) if count <= most]


def _distance(count: int, asked: int) -> float:
    return max(count / asked, asked / count)
