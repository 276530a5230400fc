"""Layers of each pipeline stage and model chunk, as Megatron deals them out."""

from .sizes import ModelSizes, Parallel, PlanError


def layers_of_chunks(sizes: ModelSizes, parallel: Parallel) -> list[list[range]]:
    """The layers, counted over the whole model, of every model chunk of every pipeline stage.

    Raises:
        PlanError: if the layers do not divide so.
    """
    stages, chunks = parallel.pipeline, parallel.chunks
    if chunks > 1 and stages == 1:
        raise PlanError(f"--vpp {chunks} needs more than one pipeline stage: use --pp 2 or more, or --vpp 1")
    counts = [_chunks_of(layers, parallel) for layers in _layers_of_stages(sizes, parallel)]
    counts[0][0] -= parallel.count_embedding
    counts[-1][-1] -= parallel.count_loss
    found: list[list[range]] = [[] for _ in range(stages)]
    first = 0
    for chunk in range(chunks):
        for stage in range(stages):
            found[stage].append(range(first, first + counts[stage][chunk]))
            first += counts[stage][chunk]
    return found


def _layers_of_stages(sizes: ModelSizes, parallel: Parallel) -> list[int]:
    stages, first, last = parallel.pipeline, parallel.first_layers, parallel.last_layers
    if first is not None or last is not None:
        if parallel.count_embedding or parallel.count_loss:
            raise PlanError(
                "--account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split exclude "
                "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers: give one kind"
            )
        others = stages - (first is not None) - (last is not None)
        left = sizes.num_layers - (first or 0) - (last or 0)
        if others < 0 or left < 0 or (left % others if others else left):
            raise PlanError(
                f"--num-layers {sizes.num_layers} without the {(first or 0) + (last or 0)} layers that the first and "
                f"the last stage are given leaves {left} for {max(others, 0)} other stages of --pp {stages}: give "
                "them what leaves a multiple"
            )
        middle = left // others if others else 0
        counts = [middle] * stages
        counts[0] = first if first is not None else counts[0]
        counts[-1] = last if last is not None else counts[-1]
        return counts
    layers = sizes.num_layers + parallel.count_embedding + parallel.count_loss
    if layers % stages:
        workable = [str(s) for s in range(1, layers + 1) if layers % s == 0]
        raise PlanError(
            f"--pp {stages} does not divide {layers} layers"
            f"{' (embedding and loss counted)' if layers > sizes.num_layers else ''}: use --pp "
            f"{', '.join(workable[:-1])} or {workable[-1]}, or give the first and the last stage their own number with "
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers"
        )
    return [layers // stages] * stages


def _chunks_of(layers: int, parallel: Parallel) -> list[int]:
    if layers % parallel.chunks:
        workable = ", ".join(str(c) for c in range(1, layers + 1) if layers % c == 0)
        raise PlanError(
            f"--vpp {parallel.chunks} does not divide the {layers} layers of a stage: use one of {workable}"
        )
    return [layers // parallel.chunks] * parallel.chunks
