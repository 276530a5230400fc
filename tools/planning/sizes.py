"""Sizes of a model and of a parallel layout, as Megatron's flags give them."""

from dataclasses import dataclass

from megatron_dobb.errors import ConfigError


def flag(name: str) -> str:
    """The command-line flag of a size."""
    return "--" + name.replace("_", "-")


class PlanError(ConfigError):
    """A size that no such model or layout can have."""


@dataclass(frozen=True)
class ModelSizes:
    """A GPT of Megatron-Core.

    Attributes:
        num_layers, hidden_size, num_attention_heads: of the model.
        ffn_hidden_size: inputs of fc2; Megatron's default if None.
        num_query_groups: of grouped-query attention; as many as heads if None.
        kv_channels: of one head; hidden size over heads if None.
        vocab_size: tokens, before Megatron pads them.
        make_vocab_size_divisible_by: what Megatron pads them to, times the tensor-parallel ranks.
        max_position_embeddings: rows of learned positions.
        learned_positions: whether there are learned positions.
        swiglu: whether fc1 holds a gate as well.
        bias: whether linear layers have a bias.
        qkv_bias: whether QKV has one although the others do not.
        rms_norm: whether norms have no bias.
        qk_layernorm: whether queries and keys are normed.
        tied: whether the output layer is the embedding.
        transformer_engine: whether layers are Transformer Engine's, with norms inside the linear layers.
        bf16: whether weights are bf16, with fp32 masters and gradients.
        num_experts: of a mixture of experts; None without.
        moe_ffn_hidden_size: inputs of an expert's fc2; the dense ones' if None.
        moe_shared_ffn: the same of the shared expert; None without.
        moe_layers: for each layer, whether its MLP is a mixture; empty for all (or none, without experts).
        grouped_experts: whether the experts of a rank are one grouped layer.
        shared_expert_gate: whether the shared expert has a gate.
        shared_expert_overlap: whether it overlaps the dispatcher, which then gathers its sequence.
        latent_attention: whether attention is latent (MLA), with the following sizes.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int | None = None
    num_query_groups: int | None = None
    kv_channels: int | None = None
    vocab_size: int = 50257
    make_vocab_size_divisible_by: int = 128
    max_position_embeddings: int = 1024
    learned_positions: bool = True
    swiglu: bool = False
    bias: bool = True
    qkv_bias: bool = False
    rms_norm: bool = False
    qk_layernorm: bool = False
    tied: bool = True
    transformer_engine: bool = True
    bf16: bool = True
    num_experts: int | None = None
    moe_ffn_hidden_size: int | None = None
    moe_shared_ffn: int | None = None
    moe_layers: tuple[bool, ...] = ()
    grouped_experts: bool = True
    shared_expert_gate: bool = False
    shared_expert_overlap: bool = False
    latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 32
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise PlanError(f"{flag(name)} {value} must be a whole number of at least 1")
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            raise PlanError(
                f"--hidden-size {self.hidden_size} is no multiple of --num-attention-heads {self.num_attention_heads}, "
                "so a head has no whole number of channels: give --kv-channels"
            )
        if self.num_attention_heads % self.query_groups:
            raise PlanError(
                f"--num-query-groups {self.query_groups} does not divide --num-attention-heads "
                f"{self.num_attention_heads}: use one of {_divisors(self.num_attention_heads)}"
            )
        if self.moe_layers and len(self.moe_layers) != self.num_layers:
            raise PlanError(
                f"--moe-layer-freq names {len(self.moe_layers)} layers of {self.num_layers}: give one entry for each "
                "layer, or a number"
            )
        if self.num_experts and self.bias:
            raise PlanError(
                f"--num-experts {self.num_experts} with biases in linear layers is not planned for: add "
                "--disable-bias-linear"
            )

    @property
    def head(self) -> int:
        """Channels of one head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Groups of queries that share keys and values."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def ffn(self) -> int:
        """Inputs of fc2."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return int((4 * self.hidden_size * 2 / 3) / 64) * 64 if self.swiglu else 4 * self.hidden_size

    @property
    def expert_ffn(self) -> int:
        """Inputs of an expert's fc2."""
        return self.moe_ffn_hidden_size or self.ffn

    def is_mixture(self, layer: int) -> bool:
        """True if the MLP of a layer, counted from 0, is a mixture of experts."""
        return self.moe_layers[layer] if self.moe_layers else self.num_experts is not None

    def padded_vocabulary(self, tensor: int) -> int:
        """Rows of the embedding over all tensor-parallel ranks."""
        multiple = self.make_vocab_size_divisible_by * tensor
        return -(-self.vocab_size // multiple) * multiple


PARALLEL_FLAGS = {
    "tensor": "--tp",
    "pipeline": "--pp",
    "context": "--cp",
    "data": "--dp",
    "expert": "--ep",
    "expert_tensor": "--etp",
    "chunks": "--vpp",
    "bucket_size": "--ddp-bucket-size",
    "first_layers": "--decoder-first-pipeline-num-layers",
    "last_layers": "--decoder-last-pipeline-num-layers",
    "instances": "--num-distributed-optimizer-instances",
}
"""The flags of the sizes of a layout."""


@dataclass(frozen=True)
class Parallel:
    """Layout of a run over its ranks. The data-parallel ranks are those that see different sequences.

    Attributes:
        tensor, pipeline, context, data: sizes of the parallel axes; their product is the number of ranks.
        expert: expert-parallel ranks.
        expert_tensor: tensor-parallel ranks of an expert.
        chunks: model chunks of a pipeline stage (virtual pipeline).
        sequence_parallel: Megatron's sequence parallelism.
        overlap_grad_reduce: whether the first stage's first chunk has several buckets.
        bucket_size: elements of a bucket; Megatron's default if None.
        pad_for_high_nccl_busbw: whether buckets are padded to 2^16 elements.
        first_layers, last_layers: layers of the first and the last stage, where they have not as many as others.
        count_embedding, count_loss: whether embedding and loss count as a layer when layers are dealt out.
        instances: of the distributed optimizer, which each share the buffers out among fewer ranks.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int = 1
    expert: int = 1
    expert_tensor: int = 1
    chunks: int = 1
    sequence_parallel: bool = False
    overlap_grad_reduce: bool = False
    bucket_size: int | None = None
    pad_for_high_nccl_busbw: bool = False
    first_layers: int | None = None
    last_layers: int | None = None
    count_embedding: bool = False
    count_loss: bool = False
    instances: int = 1

    def __post_init__(self) -> None:
        for name, of in PARALLEL_FLAGS.items():
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"{of} {value} must be a whole number of at least 1")
        dealt = self.expert * self.expert_tensor
        if self.stage_ranks % dealt:
            raise PlanError(
                f"--ep {self.expert} x --etp {self.expert_tensor} do not divide the {self.stage_ranks} ranks of a "
                f"pipeline stage (--tp x --cp x --dp): use expert-parallel sizes that do, such as "
                f"{_divisors(self.stage_ranks // self.expert_tensor)} with --etp {self.expert_tensor}"
                if self.stage_ranks % self.expert_tensor == 0
                else f"--etp {self.expert_tensor} does not divide the {self.stage_ranks} ranks of a pipeline stage "
                f"(--tp x --cp x --dp): use one of {_divisors(self.stage_ranks)}"
            )
        for ranks, what in ((self.shards, "--cp x --dp"), (self.expert_shards, "of an expert")):
            if ranks % self.instances:
                raise PlanError(
                    f"--num-distributed-optimizer-instances {self.instances} does not divide the {ranks} data-parallel "
                    f"ranks ({what}): use one of {_divisors(ranks)}"
                )

    @property
    def shards(self) -> int:
        """Ranks with other sequences: data and context parallelism. They share the dense buffers in one instance."""
        return self.data * self.context

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.shards * self.tensor

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.stage_ranks * self.pipeline

    @property
    def expert_shards(self) -> int:
        """Data-parallel ranks of an expert."""
        return self.stage_ranks // (self.expert * self.expert_tensor)

    def buffer_shards(self, *, apart: bool) -> int:
        """Ranks that share a buffer: the dense one, or that of experts."""
        return (self.expert_shards if apart else self.shards) // self.instances

    @property
    def experts_apart(self) -> bool:
        """True if experts have buffers and groups of their own."""
        return self.expert > 1 or self.expert_tensor != self.tensor

    def __str__(self) -> str:
        sizes = {"TP": self.tensor, "PP": self.pipeline, "CP": self.context, "DP": self.data, "EP": self.expert}
        sizes |= {"ETP": self.expert_tensor} if self.expert > 1 else {}
        named = [f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "DP"]
        text = " x ".join(named) + (", sequence parallel" if self.sequence_parallel and self.tensor > 1 else "")
        return text + (f", {self.instances} optimizer instances" if self.instances > 1 else "")


def _divisors(value: int, most: int = 8) -> str:
    found = [d for d in range(1, value + 1) if value % d == 0]
    return ", ".join(map(str, found[:most])) + (", ..." if len(found) > most else "")
