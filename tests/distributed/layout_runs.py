"""Train the test bed's GPT with Dobb on a parallel layout.

`Run` and what it gives back belong to one rank; `global_form` joins the ranks.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo  # here, not in every rank: its import takes a second
import torch.distributed as dist
from global_form import Captured, Shard, Snapshot
from torch import Tensor

import megatron_dobb
import testbed

testbed.enable()
megatron_dobb.install()

import megatron.core.models.mimo  # noqa: E402, F401  (or the optimizer factory imports it in every rank)
from megatron.core import parallel_state  # noqa: E402  (Megatron is imported after the patches)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402
from whole_model import (  # noqa: E402
    fill,
    first_block,
    local_part,
    parameters_by_name,
    part_of,
    split_dimension,
    tensor_group,
    whole_parameters,
)

from megatron_dobb.megatron.dobb import optimizer as dobb_optimizer  # noqa: E402
from megatron_dobb.megatron.model.chunk_state import selection_of  # noqa: E402
from megatron_dobb.megatron.seam import patches  # noqa: E402
from megatron_dobb.methods.dobb.settings import DobbConfig  # noqa: E402
from testbed import gpt  # noqa: E402

HIDDEN, HEAD = 64, 8
"""Width of the model and of its 4 heads. The QKV weight so has more rows than columns, but a part of it on one of two
tensor-parallel ranks has fewer: the scale of the update would show whether it comes from the whole weight."""
EXPERTS, EXPERT_HIDDEN = 4, 48
SEQUENCES = 24
"""Sequences in a global batch: divides over 1, 2, 3 and 4 ranks, and over 3 ranks as 1 x 8 and as 4 x 2."""
SEED = 7


@dataclass(frozen=True)
class Layout:
    """How the same training is spread over ranks.

    Attributes:
        world: number of ranks; those that no other size takes are data-parallel.
        tensor: tensor-parallel size.
        sequence_parallel: Megatron's sequence parallelism.
        micro_batch: sequences of one rank in one forward pass.
        bucket_size: several buckets of about so many elements, with overlapped gradient reduction; None for one.
        pipeline: number of pipeline stages.
        chunks: model chunks of a pipeline stage; more than one is Megatron's virtual pipeline.
        context: context-parallel size.
        instances: instances of the distributed optimizer.
        experts: whether the model is a mixture of experts.
        expert: expert-parallel size.
        expert_tensor: tensor-parallel size of the experts.
        recompute: "full" or "selective" activation recompute.
    """

    world: int = 1
    tensor: int = 1
    sequence_parallel: bool = False
    micro_batch: int = 1
    bucket_size: int | None = None
    pipeline: int = 1
    chunks: int = 1
    context: int = 1
    instances: int = 1
    experts: bool = False
    expert: int = 1
    expert_tensor: int = 1
    recompute: str = ""

    @property
    def data(self) -> int:
        """Data-parallel size."""
        return self.world // (self.tensor * self.pipeline * self.context)

    def __str__(self) -> str:
        sizes = {"PP": self.pipeline, "CP": self.context, "TP": self.tensor, "EP": self.expert}
        others = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        parts = [f"DP {self.data}"] if self.data > 1 or not others else []
        name = ("MoE, " if self.experts else "") + " x ".join(parts + others)
        name = name.replace("PP 2", f"PP 2 x {self.chunks} chunks") if self.chunks > 1 else name
        name += f" ETP {self.expert_tensor}" if self.expert_tensor > 1 else ""
        name += " + SP" if self.sequence_parallel else ""
        name += f", {SEQUENCES // self.data // self.micro_batch} x {self.micro_batch}"
        name += ", buckets" if self.bucket_size else ""
        name += f", {self.instances} instances" if self.instances > 1 else ""
        return name + (f", {self.recompute} recompute" if self.recompute else "")


RECOMPUTE: dict[str, dict[str, Any]] = {
    "": {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
}


def start(layout: Layout) -> None:
    """Set up Megatron's process groups, once in every rank."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.chunks if layout.chunks > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        num_distributed_optimizer_instances=layout.instances,
    )


def global_batch(step: int, sequences: int = SEQUENCES) -> Tensor:
    """Tokens of one step that a model can learn, `[sequences, SEQUENCE + 1]`: mostly 5 t + 3 follows t."""
    generator = torch.Generator().manual_seed(5000 + step)
    tokens = torch.randint(0, gpt.VOCABULARY, (sequences, gpt.SEQUENCE + 1), generator=generator)
    keep = torch.rand(tokens.shape, generator=generator) < 0.75
    for place in range(1, gpt.SEQUENCE + 1):
        following = (5 * tokens[:, place - 1] + 3) % gpt.VOCABULARY
        tokens[:, place] = torch.where(keep[:, place], following, tokens[:, place])
    return tokens


class Run:
    """A model and its optimizer on this rank.

    Args:
        layout: what `start` was called with.
        dobb: settings of Dobb or another method; None trains with Megatron's AdamW.
        transformer: changes to the `TransformerConfig`.
        optimizer: changes to the `OptimizerConfig`.

    Attributes:
        chunks: the model chunks of this rank's pipeline stage; `model` is the first.
        dobbs: the optimizers of the dense weights and of the experts, where they are apart; `dobb` is the first.
        weights: this rank's parameters, by their names in the whole model.
        managed: those on Dobb.
    """

    def __init__(
        self, layout: Layout, dobb: DobbConfig | None, transformer: Mapping[str, Any] | None = None, **optimizer: Any
    ) -> None:
        self.layout = layout
        model_parallel_cuda_manual_seed(SEED)
        torch.manual_seed(SEED)
        patches.configure(dobb)
        ddp = {
            "bucket_size": layout.bucket_size,
            "overlap_grad_reduce": layout.bucket_size is not None,
            "num_distributed_optimizer_instances": layout.instances,
        }
        settings = {"hidden_size": HIDDEN, "kv_channels": HEAD, "sequence_parallel": layout.sequence_parallel}
        settings |= RECOMPUTE[layout.recompute] | dict(transformer or {})
        layers = None
        if layout.experts:
            layers = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
            settings |= expert_settings(layout)
        self.chunks = gpt.build_chunks(ddp, layers, **settings)
        self.model = self.chunks[0]
        self.weights = parameters_by_name(self.chunks)
        fill(self.weights)
        defaults = {
            "optimizer": "adam",
            "lr": 2e-3,
            "adam_eps": 1e-3,
            "weight_decay": 0.1,
            "use_distributed_optimizer": True,
        }
        config = OptimizerConfig(**(defaults | optimizer))
        if isinstance(dobb, DobbConfig):
            config.dobb = dobb
        self.optimizer = get_megatron_optimizer(config, self.chunks)
        self.model.config.grad_scale_func = self.optimizer.scale_loss
        self.dobbs: list[dobb_optimizer.DobbDistributedOptimizer] = []
        if dobb:
            self.dobbs = [built for built in self.optimizer.chained_optimizers if not built.is_stub_optimizer]
        self.dobb = self.dobbs[0] if self.dobbs else None
        self.managed = {w.name: w for chunk in self.chunks for w in selection_of(chunk).managed} if dobb else {}
        self.names = sorted(self.managed)

    @property
    def groups(self) -> list[Any]:
        """The refresh groups of all optimizers."""
        return [group for optimizer in self.dobbs for group in getattr(optimizer, "refresh_groups", ())]

    def let_launch(self, launcher: str) -> None:
        """Let the program's thread, or the worker's, make the collectives of refreshes, as if CUDA asked for it."""
        for optimizer in self.dobbs:
            optimizer.refreshes.launcher = launcher

    def step(self, number: int) -> float:
        """Train on global batch `number`; returns the loss on all of it, before the step."""
        own = gpt.train_step(self.chunks, self.optimizer, global_batch(number), self.layout.micro_batch)
        seen = torch.tensor([0.0, 0.0] if math.isnan(own) else [own, 1.0])  # only the last pipeline stage has losses
        dist.all_reduce(seen)
        return float(seen[0] / seen[1])

    def local(self, name: str, whole: Tensor) -> Tensor:
        """This rank's tensor-parallel part of a parameter."""
        return local_part(name, self.weights[name], whole)

    def first_block(self, name: str, blocks: int) -> int:
        """The global number of the first of this rank's `blocks` blocks."""
        return first_block(name, self.weights[name], blocks, over_rows=self.managed[name].output_side)

    def load(
        self,
        parameters: Mapping[str, Tensor] | None = None,
        moments: Mapping[str, Tensor] | None = None,
        bases: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Take over a state in global form, in place. In fp32 the masters are the parameters."""
        with torch.no_grad():
            for name in parameters.keys() & self.weights.keys() if parameters else ():
                self.weights[name].copy_(self.local(name, parameters[name]))
        for group in self.groups:
            first = {w.key: self.first_block(w.key, w.blocks) for w in group.weights}
            for place, (name, block) in enumerate(group.owned if moments else ()):
                group.moment[place] = moments[name][first[name] + block]
            for place, (name, block) in enumerate(group.kept if bases else ()):
                group.basis[place] = bases[name][first[name] + block]

    def begin_at(self, step: int) -> None:
        """Let the schedule of refreshes go on as if so many steps had been attempted."""
        for optimizer in self.dobbs:
            optimizer.attempted_steps = step

    def record_captures(self) -> list[Captured]:
        """The sums that go into each refresh from now on, in a list that grows.

        Of the tensor-parallel ranks that see the same tokens of the same columns, only the first counts.
        """
        record: list[Captured] = []
        for number, group in enumerate(self.groups):
            group.refresh = functools.partial(self._refresh, group, group.refresh, record, number == 0)
        return record

    def _refresh(
        self, group: Any, refresh: Any, record: list[Captured], is_first: bool, sums: Any, **settings: Any
    ) -> Any:
        if is_first:
            record.append(Captured())
        for weight in group.weights:
            name, entry = weight.key, sums[weight.key]
            first_rank = tensor_group(name).rank() == 0
            own_tokens = first_rank or self.managed[name].geometry.tokens_over_tp
            own_columns = own_tokens or split_dimension(name, self.weights[name]) == 1
            first = self.first_block(name, weight.blocks)
            record[-1].tokens[name] = entry.tokens if own_tokens else 0
            for block, total in enumerate(entry.total if entry.total is not None and own_columns else ()):
                record[-1].sums[name, first + block] = total.clone()
        return refresh(sums, **settings)

    def snapshot(self) -> Snapshot:
        """What this rank holds now; every rank must call it."""
        moments, bases = {}, {}
        for group in self.groups:
            first = {w.key: self.first_block(w.key, w.blocks) for w in group.weights}
            for (name, block), moment in zip(group.owned, group.moment, strict=True):
                moments[name, first[name] + block] = moment.clone()
            for (name, block), basis in zip(group.kept, group.basis, strict=True):
                bases[name, first[name] + block] = basis.clone()
        return Snapshot(
            parameters=whole_parameters(self.weights),
            masters=self.shards(lambda segment, shard: segment.weight),
            momenta=self.shards(lambda segment, shard: segment.momentum),
            moments=moments,
            bases=bases,
        )

    def shards(self, values: Callable[[Any, Any], Tensor]) -> list[Shard]:
        """What `values` gives for each segment of the optimizers and the shard's parameter."""
        return [
            Shard(
                segment.name,
                *part_of(segment.name, self.weights[segment.name]),
                tuple(self.weights[segment.name].shape),
                optimizer.cut_of[segment.name][0],
                values(segment, parameter).clone(),
            )
            for optimizer in self.dobbs
            for segments, parameters in zip(optimizer.segments, optimizer.shards, strict=True)
            for segment, parameter in zip(segments, parameters, strict=True)
        ]


def expert_settings(layout: Layout) -> dict[str, Any]:
    """The parts of a `TransformerConfig` that make it a mixture of experts."""
    return {
        "num_moe_experts": EXPERTS,
        "moe_ffn_hidden_size": EXPERT_HIDDEN,
        "moe_shared_expert_intermediate_size": HIDDEN,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "add_bias_linear": False,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
    } | ({"recompute_modules": ["core_attn", "moe"]} if layout.recompute == "selective" else {})
