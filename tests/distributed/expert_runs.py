"""Train a small mixture of experts with Dobb on a parallel layout, with routing that a test decides.

`ExpertRun` and what `train` gives back belong to one rank; every weight has its name in the whole model, so that
`merge` can put together what the ranks hold.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_dobb
import testbed

testbed.enable()
megatron_dobb.install()

import megatron.core.models.mimo  # noqa: E402, F401  (or the optimizer factory imports it in every rank)
from megatron.core import parallel_state  # noqa: E402  (Megatron is imported after the patches)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402
from whole_model import fill, first_block, parameters_by_name, part_of, whole_parameters  # noqa: E402

from megatron_dobb.megatron.dobb.stages import RefreshStages  # noqa: E402
from megatron_dobb.megatron.model.chunk_state import selection_of  # noqa: E402
from megatron_dobb.megatron.model.global_names import weight_names  # noqa: E402
from megatron_dobb.megatron.seam import patches  # noqa: E402
from megatron_dobb.methods.dobb.settings import DobbConfig  # noqa: E402
from testbed import gpt, traffic  # noqa: E402

EXPERTS, HIDDEN, EXPERT_HIDDEN, SEQUENCES = 4, 32, 48, 8
NEVER, ONE_TOKEN = 3, 2  # experts to which the uneven routing sends nothing, and one token of each global batch
OUT_OF_REACH = 1e4
BLOCKS, LEARNING_RATE, WEIGHT_DECAY = 4, 2e-3, 0.1


@dataclass(frozen=True)
class ExpertLayout:
    """How the same training is spread over ranks: total, tensor-, expert- and the experts' tensor-parallel."""

    world: int = 1
    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1
    micro_batch: int = 2

    def __str__(self) -> str:
        data = self.world // self.tensor
        tensor = f" TP {self.tensor}+SP ETP {self.expert_tensor}" if self.tensor > 1 else ""
        return f"DP {data}{tensor} EP {self.expert}"


def start(layout: ExpertLayout) -> None:
    """Set up Megatron's process groups, once in every rank."""
    gpt.initialize(
        tensor_model_parallel_size=layout.tensor,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )


class ExpertRun:
    """A model and its optimizers on this rank.

    Args:
        layout: what `start` was called with.
        dobb: Dobb's settings; None trains with Megatron's AdamW.
        routing: "router", as the model says; "uneven", with no token for one expert and a single one for another; or
            "one", with all tokens for the first expert.
        transformer: more of the `TransformerConfig`.
    """

    def __init__(self, layout: ExpertLayout, dobb: DobbConfig | None, routing: str, **transformer: Any) -> None:
        self.layout = layout
        patches.configure(dobb)
        self.model = gpt.build(
            layers=get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False),
            hidden_size=HIDDEN,
            sequence_parallel=layout.tensor > 1,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
            num_moe_experts=EXPERTS,
            moe_ffn_hidden_size=EXPERT_HIDDEN,
            moe_shared_expert_intermediate_size=HIDDEN,
            moe_router_topk=1,
            moe_router_pre_softmax=True,
            moe_router_load_balancing_type="none",
            moe_token_dispatcher_type="alltoall",
            add_bias_linear=False,
            **transformer,
        )
        self.parameters = parameters_by_name([self.model])
        fill(self.parameters)
        if routing != "router":
            reroute(self.model.module, routing)
        config = OptimizerConfig(
            optimizer="adam",
            lr=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            adam_eps=1e-3,
            clip_grad=0.0,
            use_distributed_optimizer=True,
        )
        config.dobb = dobb
        self.optimizer = get_megatron_optimizer(config, [self.model])
        self.model.config.grad_scale_func = self.optimizer.scale_loss
        self.dobb = self.optimizer.chained_optimizers if dobb else []
        self.names = sorted({w.name for w in selection_of(self.model).managed}) if dobb else []

    def step(self, number: int) -> float:
        """Train on global batch `number`; returns this rank's loss."""
        tokens = gpt.global_batch(number, SEQUENCES)
        data = parallel_state.get_data_parallel_world_size()
        self.model.module.microbatches = SEQUENCES // self.layout.micro_batch // data
        return gpt.train_step(self.model, self.optimizer, tokens, self.layout.micro_batch)

    def moments(self) -> dict[tuple[str, int], Tensor]:
        """The blocks that this rank owns, by name and by number in the whole weight."""
        return {
            (name, self.first_block(name, group) + block): group.moment[place].clone()
            for optimizer in self.dobb
            for group in optimizer.refresh_groups
            for place, (name, block) in enumerate(group.owned)
        }

    def bases(self) -> dict[tuple[str, int], Tensor]:
        """The blocks that this rank holds, likewise."""
        return {
            (name, self.first_block(name, group) + block): group.basis[place].clone()
            for optimizer in self.dobb
            for group in optimizer.refresh_groups
            for place, (name, block) in enumerate(group.kept)
        }

    def gradients(self) -> dict[str, list[tuple[int, int, int, Tensor]]]:
        """Shards of the gradients on Dobb: split dimension, tensor-parallel rank, start in that part, values."""
        found: dict[str, list[tuple[int, int, int, Tensor]]] = {}
        for optimizer in self.dobb:
            for segments, shards in zip(optimizer.segments, optimizer.shards, strict=True):
                for segment, shard in zip(segments, shards, strict=True):
                    dim, rank = part_of(segment.name, self.parameters[segment.name])
                    found.setdefault(segment.name, []).append((dim, rank, segment.shard.start, shard.grad.clone()))
        return found

    def whole(self) -> dict[str, Tensor]:
        """The managed weights that this rank holds, put together over tensor parallelism."""
        return whole_parameters({name: self.parameters[name] for name in self.names})

    def first_block(self, name: str, group: Any) -> int:
        """The global number of this rank's first block of a weight that a refresh group serves."""
        blocks = next(weight.blocks for weight in group.weights if weight.key == name)
        return first_block(name, self.parameters[name], blocks)


def reroute(model: torch.nn.Module, routing: str) -> None:
    """Send no token to one expert, and to another only the first token of each global batch; or all to the first."""
    away_from = [NEVER, ONE_TOKEN] if routing == "uneven" else list(range(1, EXPERTS))
    holds_first_token = (
        parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_data_parallel_rank() == 0
    )
    microbatch = -1

    def count(_module: Any, args: Any, kwargs: Any) -> None:
        nonlocal microbatch
        microbatch += 1

    def gating(router: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        logits = type(router).gating(router, x, *args, **kwargs)
        away = torch.zeros_like(logits)
        away[..., away_from] = -OUT_OF_REACH
        if routing == "uneven" and holds_first_token and microbatch % model.microbatches == 0:
            away.view(-1, EXPERTS)[0, ONE_TOKEN] = OUT_OF_REACH
        return logits + away

    model.microbatches = 1
    model.register_forward_pre_hook(count, with_kwargs=True)
    for router in [module for module in model.modules() if isinstance(module, TopKRouter)]:
        router.gating = functools.partial(gating, router)


def record_inputs(model: torch.nn.Module, names: Sequence[str]) -> list[dict[str, list[Tensor]]]:
    """What the experts' linear layers are given from now on, for each step, in a list to which a step is added."""
    steps: list[dict[str, list[Tensor]]] = []
    of_module = {path: name for (path, own), name in weight_names(model).items() if own == "weight" and name in names}
    for path, name in of_module.items():

        def record(_module: Any, args: Any, _output: Any, name: str = name) -> None:
            steps[-1].setdefault(name, []).append(args[0].detach().clone())

        model.get_submodule(path).register_forward_hook(record)
    return steps


def train(layout: ExpertLayout, config: DobbConfig, steps: int, routing: str, **transformer: Any) -> dict[str, Any]:
    """Train and return what this rank saw and holds."""
    start(layout)
    run = ExpertRun(layout, config, routing, **transformer)
    inputs = record_inputs(run.model.module, run.names)
    record: dict[str, Any] = {"weights": [run.whole()], "inputs": inputs, "gradients": [], "moments": [], "bases": []}
    first, *_ = run.dobb
    update = first.step_with_ready_grads

    def step_with_ready_grads() -> Any:  # the dense optimizer comes first; all gradients are ready
        record["gradients"].append(run.gradients())
        return update()

    first.step_with_ready_grads = step_with_ready_grads
    record["tokens"] = tokens = {}
    for capture in [capture for optimizer in run.dobb for capture in optimizer.captures]:
        capture.take = functools.partial(take_and_count, capture.take, tokens)
    record["refreshes"] = []
    for optimizer in run.dobb:
        parts = optimizer.refreshes._stages
        optimizer.refreshes._stages = RecordedParts(
            parts.config, parts.diagnostics, parts.is_expert, record["refreshes"]
        )
    for step in range(steps):
        inputs.append({})
        run.step(step)
        record["weights"].append(run.whole())
        record["moments"].append(run.moments())
        record["bases"].append(run.bases())
    record["optimizers"] = len(run.dobb)
    record["skipped"] = [optimizer.refresh_counts.skipped for optimizer in run.dobb]
    record["expert_ranks"] = dist.get_process_group_ranks(parallel_state.get_expert_data_parallel_group())
    return record


@dataclass(frozen=True)
class RecordedParts(RefreshStages):
    """Refreshes whose collectives go on record."""

    refreshes: list[list[traffic.Call]]

    def whole(self, *arguments: Any) -> Any:
        with traffic.record() as calls:
            found = super().whole(*arguments)
        self.refreshes.append([call for call in calls if call.beside])
        return found


def take_and_count(take: Any, tokens: dict[str, int]) -> Any:
    """`Capture.take`, which also adds to the numbers of tokens that were captured of each weight."""
    sums = take()
    for name, entry in sums.items():
        tokens[name] = tokens.get(name, 0) + entry.tokens
    return sums


def float64_moments(routing: str, sequences: int) -> dict[str, tuple[Tensor, int]]:
    """`sum x_j x_j^T` of every block and the number of tokens, from a float64 forward pass with hooks of its own."""
    start(ExpertLayout())
    run = ExpertRun(ExpertLayout(), DobbConfig(blocks=BLOCKS), routing)
    model = run.model.module.double()
    inputs = record_inputs(model, run.names)
    inputs.append({})
    tokens = gpt.global_batch(0, SEQUENCES)[:sequences, :-1]
    mask = torch.ones(1, 1, gpt.SEQUENCE, gpt.SEQUENCE, dtype=torch.bool).triu(1)
    model(input_ids=tokens, position_ids=torch.arange(gpt.SEQUENCE).expand(sequences, -1), attention_mask=mask)
    moments = {}
    for name, seen in inputs[0].items():
        x = torch.cat([part.reshape(-1, part.shape[-1]) for part in seen])
        assert x.dtype == torch.float64
        blocks = x.view(len(x), BLOCKS, x.shape[1] // BLOCKS)
        moments[name] = torch.einsum("tjc,tjd->jcd", blocks, blocks), len(x)
    return moments


def merge(parts: Sequence[dict[Any, Tensor]]) -> dict[Any, Tensor]:
    """Everything that the ranks hold; where several hold the same, they must agree bit for bit."""
    merged: dict[Any, Tensor] = {}
    for part in parts:
        for key, value in part.items():
            assert torch.equal(merged.setdefault(key, value), value), f"ranks hold different copies of {key}"
    return merged


def join_gradient(ranks: Sequence[dict[str, Any]], step: int, name: str, shape: torch.Size) -> Tensor:
    """The whole gradient of a weight, from all ranks' shards."""
    shards = [shard for rank in ranks for shard in rank["gradients"][step].get(name, ())]
    dim = shards[0][0]
    parts = 1 + max(rank for _, rank, _, _ in shards)
    local = torch.Size(n // parts if d == dim else n for d, n in enumerate(shape))
    flat = torch.full((parts, local.numel()), torch.nan)
    for _, rank, first, values in shards:
        flat[rank, first : first + len(values)] = values
    assert not flat.isnan().any(), f"the ranks' shards do not cover {name}"
    return torch.cat([part.view(local) for part in flat], dim=dim)
