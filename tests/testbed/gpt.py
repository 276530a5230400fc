"""A small GPT in Megatron's own DDP and DistributedOptimizer, trained on made-up tokens, for tests.

Call these on every rank, inside `testbed.processes.run`, with `testbed.enable()` done before it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from .attention import GatheredAttention, places_on_this_rank

VOCABULARY, SEQUENCE = 64, 16
Chunks = DistributedDataParallel | Sequence[DistributedDataParallel]


def initialize(seed: int = 1, **sizes: int) -> None:
    """Set up Megatron's groups and random numbers.

    Args:
        seed: seed of the weights, the same on every layout because they are made on the CPU and then split.
        sizes: as in `initialize_model_parallel`, such as `tensor_model_parallel_size=2`.
    """
    parallel_state.initialize_model_parallel(**sizes)
    model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)


def build(
    ddp: dict[str, Any] | None = None,
    layers: Any = None,
    config_class: type[TransformerConfig] = TransformerConfig,
    **transformer: Any,
) -> DistributedDataParallel:
    """The only chunk of `build_chunks`, where a pipeline stage has one."""
    (chunk,) = build_chunks(ddp, layers, config_class, **transformer)
    return chunk


def build_chunks(
    ddp: dict[str, Any] | None = None,
    layers: Any = None,
    config_class: type[TransformerConfig] = TransformerConfig,
    **transformer: Any,
) -> list[DistributedDataParallel]:
    """This rank's chunks of a two-layer GPT in fp32 without dropout, each wrapped in DDP for the distributed optimizer.

    Args:
        ddp: changes to the `DistributedDataParallelConfig`, such as `{"bucket_size": 5000}`.
        layers: what a layer is made of; Megatron's own classes, without experts, unless given.
        config_class: another `TransformerConfig`, such as MLA's.
        transformer: changes to the `TransformerConfig`, such as `hidden_size=64`.
    """
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    settings: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": virtual,
        "pipeline_dtype": torch.float32,
        # Batched, the messages of two stages in both directions would be taken for each other.
        "overlap_p2p_comm": virtual is not None,
        "batch_p2p_comm": virtual is None,
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "gradient_accumulation_fusion": False,
    }
    config = config_class(**(settings | transformer))
    config.finalize_model_grads_func = finalize_model_grads
    spec = get_gpt_layer_local_spec() if layers is None else layers
    if config.context_parallel_size > 1:  # Megatron's own attention knows no context parallelism
        spec.submodules.self_attention.submodules.core_attention = GatheredAttention
    ddp_config = DistributedDataParallelConfig(**({"use_distributed_optimizer": True} | (ddp or {})))
    chunks = []
    for number in range(virtual or 1):
        stage = {"ignore_virtual": False, "vp_stage": number} if virtual else {}
        model = GPTModel(
            config,
            spec,
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(**stage),
            post_process=parallel_state.is_pipeline_last_stage(**stage),
            share_embeddings_and_output_weights=False,
            vp_stage=number if virtual else None,
        )
        if config.bf16:
            model = Float16Module(config, model)
        chunks.append(DistributedDataParallel(config, ddp_config, model, disable_bucketing=number > 0))
    if ddp_config.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return chunks


def build_optimizer(model: Chunks, **settings: Any) -> MegatronOptimizer:
    """Megatron's optimizer: AdamW unless `settings`, changes to the `OptimizerConfig`, say otherwise.

    `adam_eps` is large: with 1e-8, rounding noise in tiny gradients shows at full size in the weights.
    """
    defaults = {"optimizer": "adam", "lr": 1e-2, "adam_eps": 1e-3, "use_distributed_optimizer": True}
    chunks = _chunks(model)
    optimizer = get_megatron_optimizer(OptimizerConfig(**(defaults | settings)), chunks)
    chunks[0].config.grad_scale_func = optimizer.scale_loss
    return optimizer


def global_batch(step: int, sequences: int) -> torch.Tensor:
    """The tokens of one step, the same on every layout: `[sequences, SEQUENCE + 1]`."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, VOCABULARY, (sequences, SEQUENCE + 1), generator=generator)


def train_step(
    model: Chunks,
    optimizer: MegatronOptimizer,
    tokens: torch.Tensor,
    micro_batch: int = 1,
) -> float:
    """One training step on a global batch, through Megatron's own schedule.

    As in Megatron's sampler, micro-batch `i` of all data-parallel ranks together is a run of consecutive sequences.

    Args:
        model, optimizer: from `build` or `build_chunks`, and from `build_optimizer`.
        tokens: the global batch, `[sequences, SEQUENCE + 1]`.
        micro_batch: sequences of a rank in one forward pass.

    Returns:
        The mean loss over this rank's part of the batch, before the step; NaN on all but the last pipeline stage.
    """
    chunks = _chunks(model)
    ranks = parallel_state.get_data_parallel_world_size()
    runs = tokens.split(micro_batch)
    own = runs[parallel_state.get_data_parallel_rank() :: ranks]
    if len(runs) % ranks or any(len(run) != micro_batch for run in runs):
        raise ValueError(f"{len(tokens)} sequences do not split over {ranks} ranks x micro-batch {micro_batch}")
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=[iter(own) for _ in chunks],
        model=chunks,
        num_microbatches=len(own),
        seq_length=SEQUENCE,
        micro_batch_size=micro_batch,
    )
    succeeded, _, _ = optimizer.step()
    if not succeeded:
        raise RuntimeError("the optimizer skipped the step")
    return float(torch.stack([loss["loss"] for loss in losses]).mean()) if losses else float("nan")


def _chunks(model: Chunks) -> list[DistributedDataParallel]:
    return [model] if isinstance(model, DistributedDataParallel) else list(model)


def _forward_step(runs: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    tokens = next(runs)
    places = places_on_this_rank(SEQUENCE)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    losses = model(
        input_ids=tokens[:, :-1][:, places],
        position_ids=places.expand(len(tokens), -1),
        attention_mask=mask,
        labels=tokens[:, 1:][:, places],
    )
    return losses, _mean_loss


def _mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = losses.float().mean()
    # Megatron's schedule takes the sum of what the context-parallel ranks return.
    return loss / parallel_state.get_context_parallel_world_size(), {"loss": loss.detach().clone()}
