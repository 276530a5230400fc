"""Train the test bed's GPT with Dobb on a parallel layout.

`Run` and what it gives back belong to one rank; `global_form` joins the ranks.
"""

import functools
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
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402

from megatron_dobb.config import DobbConfig  # noqa: E402
from megatron_dobb.megatron import optimizer as dobb_optimizer  # noqa: E402
from megatron_dobb.megatron import seam  # noqa: E402
from testbed import gpt  # noqa: E402

HIDDEN, HEAD = 64, 8
"""Width of the model and of its 4 heads. The QKV weight so has more rows than columns, but a part of it on one of two
tensor-parallel ranks has fewer: the scale of the update would show whether it comes from the whole weight."""
SEQUENCES = 24
"""Sequences in a global batch: divides over 1, 2, 3 and 4 ranks, and over 3 ranks as 1 x 8 and as 4 x 2."""
SEED = 7


@dataclass(frozen=True)
class Layout:
    """How the same training is spread over ranks.

    Attributes:
        world: number of ranks; `world / tensor` of them are data-parallel.
        tensor: tensor-parallel size.
        sequence_parallel: Megatron's sequence parallelism.
        micro_batch: sequences of one rank in one forward pass.
        bucket_size: several buckets of about so many elements, with overlapped gradient reduction; None for one.
    """

    world: int = 1
    tensor: int = 1
    sequence_parallel: bool = False
    micro_batch: int = 1
    bucket_size: int | None = None

    def __str__(self) -> str:
        data = self.world // self.tensor
        parts = [f"DP {data}"] if data > 1 or self.tensor == 1 else []
        parts += [f"TP {self.tensor}"] if self.tensor > 1 else []
        name = " x ".join(parts) + (" + SP" if self.sequence_parallel else "")
        batches = SEQUENCES // data // self.micro_batch
        return f"{name}, {batches} x {self.micro_batch}" + (", buckets" if self.bucket_size else "")


def start(layout: Layout) -> None:
    """Set up Megatron's process groups, once in every rank."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=layout.tensor)


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
        dobb: Dobb's settings; None trains with Megatron's AdamW.
        transformer: changes to the `TransformerConfig`.
        optimizer: changes to the `OptimizerConfig`.
    """

    def __init__(
        self, layout: Layout, dobb: DobbConfig | None, transformer: Mapping[str, Any] | None = None, **optimizer: Any
    ) -> None:
        self.layout = layout
        self.tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        model_parallel_cuda_manual_seed(SEED)
        torch.manual_seed(SEED)
        seam.configure(dobb)
        overlap = layout.bucket_size is not None
        ddp = {"bucket_size": layout.bucket_size, "overlap_grad_reduce": overlap}
        settings = {"hidden_size": HIDDEN, "kv_channels": HEAD, "sequence_parallel": layout.sequence_parallel}
        self.model = gpt.build(ddp, **(settings | dict(transformer or {})))
        defaults = {
            "optimizer": "adam",
            "lr": 2e-3,
            "adam_eps": 1e-3,
            "weight_decay": 0.1,
            "use_distributed_optimizer": True,
        }
        config = OptimizerConfig(**(defaults | optimizer))
        config.dobb = dobb
        self.optimizer = get_megatron_optimizer(config, [self.model])
        self.model.config.grad_scale_func = self.optimizer.scale_loss
        self.dobb: dobb_optimizer.DobbDistributedOptimizer | None = None
        if dobb:
            (self.dobb,) = self.optimizer.chained_optimizers
        self.names = sorted({w.name for w in self.model.dobb_plan.managed}) if dobb else []
        self.weights = dict(self.model.module.named_parameters())

    def step(self, number: int) -> float:
        """Train on global batch `number`; returns the loss on all of it, before the step."""
        loss = torch.tensor(gpt.train_step(self.model, self.optimizer, global_batch(number), self.layout.micro_batch))
        dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
        return float(loss) / parallel_state.get_data_parallel_world_size()

    def local(self, name: str, whole: Tensor) -> Tensor:
        """This rank's tensor-parallel part of a parameter."""
        weight = self.weights[name]
        if self.layout.tensor == 1 or not getattr(weight, "tensor_model_parallel", False):
            return whole
        return whole.chunk(self.layout.tensor, dim=weight.partition_dim)[self.tensor_rank]

    def first_block(self, name: str, blocks: int) -> int:
        """The global number of the first of this rank's `blocks` blocks."""
        return self.tensor_rank * blocks if self.layout.tensor > 1 and self.weights[name].partition_dim == 1 else 0

    def load(
        self,
        parameters: Mapping[str, Tensor] | None = None,
        moments: Mapping[str, Tensor] | None = None,
        bases: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Take over a state in global form, in place. In fp32 the masters are the parameters."""
        with torch.no_grad():
            for name, whole in (parameters or {}).items():
                self.weights[name].copy_(self.local(name, whole))
        for group in self.dobb.refresh_groups if self.dobb else ():
            first = {w.key: self.first_block(w.key, w.blocks) for w in group.weights}
            for place, (name, block) in enumerate(group.owned if moments else ()):
                group.moment[place] = moments[name][first[name] + block]
            for place, (name, block) in enumerate(group.held if bases else ()):
                group.basis[place] = bases[name][first[name] + block]

    def record_captures(self) -> list[Captured]:
        """The sums that go into each refresh from now on, in a list that grows."""
        record: list[Captured] = []
        first, *others = self.dobb.refresh_groups
        for group in (first, *others):
            group.refresh = functools.partial(self._refresh, group, group.refresh, record, group is first)
        return record

    def _refresh(
        self, group: Any, refresh: Any, record: list[Captured], is_first: bool, sums: Any, **settings: Any
    ) -> Any:
        if is_first:
            record.append(Captured())
        for weight in group.weights:
            entry = sums[weight.key]
            first = self.first_block(weight.key, weight.blocks)
            record[-1].tokens[weight.key] = entry.tokens
            for block, total in enumerate(entry.total if entry.total is not None else ()):
                record[-1].sums[weight.key, first + block] = total.clone()
        return refresh(sums, **settings)

    def snapshot(self) -> Snapshot:
        """What this rank holds now; every rank must call it."""
        moments, bases = {}, {}
        for group in self.dobb.refresh_groups:
            first = {w.key: self.first_block(w.key, w.blocks) for w in group.weights}
            for (name, block), moment in zip(group.owned, group.moment, strict=True):
                moments[name, first[name] + block] = moment.clone()
            for (name, block), basis in zip(group.held, group.basis, strict=True):
                bases[name, first[name] + block] = basis.clone()
        return Snapshot(
            parameters=gpt.full_parameters(self.model),
            masters=self.shards(lambda segment, shard: segment.weight),
            momenta=self.shards(lambda segment, shard: segment.momentum),
            moments=moments,
            bases=bases,
        )

    def shards(self, values: Callable[[Any, Any], Tensor]) -> list[Shard]:
        """What `values` gives for each segment of the optimizer and the shard's parameter."""
        found = []
        for segments, parameters in zip(self.dobb.segments, self.dobb.shards, strict=True):
            for segment, parameter in zip(segments, parameters, strict=True):
                weight = self.weights[segment.name]
                found.append(
                    Shard(
                        segment.name,
                        self.tensor_rank,
                        tuple(weight.shape),
                        getattr(weight, "partition_dim", 0),
                        segment.shard.start,
                        values(segment, parameter).clone(),
                    )
                )
        return found
