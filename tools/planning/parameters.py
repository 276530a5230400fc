"""The parameters of a rank of a GPT, in the order in which Megatron's modules register them.

Names, shapes and order are those of Megatron-Core 0.19; the tests compare them with its models.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_dobb.megatron.model.adapters import GlobalShape

from .sizes import ModelSizes, Parallel, PlanError


@dataclass(frozen=True)
class Parameter:
    """One parameter as a tensor-parallel rank holds it.

    Attributes:
        name: in the whole model.
        shape: of this rank's part.
        geometry: of the whole weight, if it is the matrix of a layer that Dobb knows.
        layer: the class of that layer.
        apart: whether it is in the experts' buffer.
        expert: whether it is an expert's.
        own_bucket: Megatron's `shared_embedding`.
        elsewhere: names of the experts of other expert-parallel ranks that are just like it.
    """

    name: str
    shape: tuple[int, ...]
    geometry: GlobalShape | None = None
    layer: str = ""
    apart: bool = False
    expert: bool = False
    own_bucket: bool = False
    elsewhere: tuple[str, ...] = ()

    @property
    def whole(self) -> tuple[int, int]:
        """Rows and columns of the whole weight; 0 if it is no matrix of a layer that Dobb knows."""
        return (self.geometry.rows, self.geometry.columns) if self.geometry else (0, 0)

    @property
    def numel(self) -> int:
        """Elements on this rank."""
        product = 1
        for size in self.shape:
            product *= size
        return product


@dataclass(frozen=True)
class _Layers:
    """Makes the parameters of layers; yields them in the order of registration."""

    sizes: ModelSizes
    parallel: Parallel

    @property
    def in_shards(self) -> bool:
        """True if tensor-parallel ranks have different parts of a sequence between layers."""
        return self.parallel.sequence_parallel and self.parallel.tensor > 1

    def layer_class(self, name: str) -> str:
        return f"TE{name}" if self.sizes.transformer_engine else name

    def divide(self, size: int, by: int, what: str, flag: str = "--tp") -> int:
        if size % by:
            workable = ", ".join(str(d) for d in range(1, min(size, 64) + 1) if size % d == 0)
            raise PlanError(f"{flag} {by} does not divide the {size} {what}: use one of {workable}")
        return size // by

    def norm(self, name: str, size: int) -> Iterator[Parameter]:
        yield Parameter(f"{name}.weight", (size,))
        if not self.sizes.rms_norm:
            yield Parameter(f"{name}.bias", (size,))

    def fused_norm(self, name: str, size: int) -> Iterator[Parameter]:
        yield Parameter(f"{name}.layer_norm_weight", (size,))
        if not self.sizes.rms_norm:
            yield Parameter(f"{name}.layer_norm_bias", (size,))

    def column(
        self, name: str, rows: int, columns: int, what: str, *, bias: bool = False, sequence: bool = True
    ) -> Iterator[Parameter]:
        part = self.divide(rows, self.parallel.tensor, what)
        seen = False if sequence or not self.sizes.transformer_engine else None
        geometry = GlobalShape(rows, columns, 1, self.in_shards and sequence, outputs_over_tp=seen)
        yield Parameter(f"{name}.weight", (part, columns), geometry, self.layer_class("ColumnParallelLinear"))
        if bias:
            yield Parameter(f"{name}.bias", (part,))

    def row(
        self, name: str, rows: int, columns: int, what: str, *, bias: bool = False, sequence: bool = True
    ) -> Iterator[Parameter]:
        part = self.divide(columns, self.parallel.tensor, what)
        seen = self.in_shards if sequence else None
        geometry = GlobalShape(rows, columns, self.parallel.tensor, False, outputs_over_tp=seen)
        yield Parameter(f"{name}.weight", (rows, part), geometry, self.layer_class("RowParallelLinear"))
        if bias:
            yield Parameter(f"{name}.bias", (rows,))

    def layer(self, number: int) -> Iterator[Parameter]:
        name, sizes = f"decoder.layers.{number}", self.sizes
        mixture = sizes.is_mixture(number)
        if not sizes.transformer_engine or sizes.latent_attention:
            yield from self.norm(f"{name}.input_layernorm", sizes.hidden_size)
        attention = self.latent_attention if sizes.latent_attention else self.attention
        yield from attention(f"{name}.self_attention")
        if not sizes.transformer_engine or mixture:
            yield from self.norm(f"{name}.pre_mlp_layernorm", sizes.hidden_size)
        yield from self.mixture(f"{name}.mlp") if mixture else self.mlp(f"{name}.mlp", sizes.ffn, fused_norm=True)

    def attention(self, name: str) -> Iterator[Parameter]:
        sizes, hidden = self.sizes, self.sizes.hidden_size
        queries, keys = sizes.num_attention_heads * sizes.head, sizes.query_groups * sizes.head
        self.divide(sizes.num_attention_heads, self.parallel.tensor, "heads (--num-attention-heads)")
        if sizes.query_groups % self.parallel.tensor and self.parallel.tensor % sizes.query_groups:
            raise PlanError(
                f"--tp {self.parallel.tensor} is neither a multiple nor a divisor of --num-query-groups "
                f"{sizes.query_groups}, and Megatron needs one: use --tp {sizes.query_groups}"
            )
        yield from self.row(f"{name}.linear_proj", hidden, queries, "channels of the heads", bias=sizes.bias)
        if sizes.transformer_engine:
            yield from self.fused_norm(f"{name}.linear_qkv", hidden)
        rows = queries + 2 * keys
        bias = sizes.bias or sizes.qkv_bias
        yield from self.column(f"{name}.linear_qkv", rows, hidden, "rows of QKV", bias=bias)
        if sizes.qk_layernorm:
            yield from self.norm(f"{name}.q_layernorm", sizes.head)
            yield from self.norm(f"{name}.k_layernorm", sizes.head)

    def latent_attention(self, name: str) -> Iterator[Parameter]:
        sizes, heads, hidden = self.sizes, self.sizes.num_attention_heads, self.sizes.hidden_size
        channels = sizes.qk_head_dim + sizes.qk_pos_emb_head_dim
        down = self.copied if sizes.transformer_engine else self.column
        fused = sizes.transformer_engine and sizes.qk_layernorm
        self.divide(heads, self.parallel.tensor, "heads (--num-attention-heads)")
        inputs = heads * sizes.v_head_dim
        yield from self.row(f"{name}.linear_proj", hidden, inputs, "channels of the heads", bias=sizes.bias)
        if sizes.q_lora_rank is None:
            if fused:
                yield from self.fused_norm(f"{name}.linear_q_proj", hidden)
            yield from self.column(f"{name}.linear_q_proj", heads * channels, hidden, "rows of the queries")
        else:
            rank = sizes.q_lora_rank
            yield from down(f"{name}.linear_q_down_proj", rank, hidden, "rows (--q-lora-rank)")
            if fused:
                yield from self.fused_norm(f"{name}.linear_q_up_proj", rank)
            yield from self.column(f"{name}.linear_q_up_proj", heads * channels, rank, "rows of the queries")
        rank = sizes.kv_lora_rank
        compressed = rank + sizes.qk_pos_emb_head_dim
        yield from down(f"{name}.linear_kv_down_proj", compressed, hidden, "rows of the compressed keys and values")
        if fused:
            yield from self.fused_norm(f"{name}.linear_kv_up_proj", rank)
        rows = heads * (sizes.qk_head_dim + sizes.v_head_dim)
        yield from self.column(f"{name}.linear_kv_up_proj", rows, rank, "rows of keys and values")
        if sizes.qk_layernorm and not sizes.transformer_engine:
            if sizes.q_lora_rank is not None:
                yield from self.norm(f"{name}.q_layernorm", sizes.q_lora_rank)
            yield from self.norm(f"{name}.kv_layernorm", rank)

    def copied(self, name: str, rows: int, columns: int, what: str) -> Iterator[Parameter]:
        geometry = GlobalShape(
            rows, columns, 1, self.in_shards, self.parallel.tensor > 1, outputs_over_tp=self.in_shards
        )
        yield Parameter(f"{name}.weight", (rows, columns), geometry, "TELinear")

    def mlp(self, name: str, ffn: int, *, fused_norm: bool, sequence: bool = True) -> Iterator[Parameter]:
        sizes = self.sizes
        if fused_norm and sizes.transformer_engine:
            yield from self.fused_norm(f"{name}.linear_fc1", sizes.hidden_size)
        rows = ffn * (2 if sizes.swiglu else 1)
        yield from self.column(
            f"{name}.linear_fc1", rows, sizes.hidden_size, "rows of fc1", bias=sizes.bias, sequence=sequence
        )
        yield from self.row(
            f"{name}.linear_fc2", sizes.hidden_size, ffn, "inputs of fc2", bias=sizes.bias, sequence=sequence
        )

    def mixture(self, name: str) -> Iterator[Parameter]:
        sizes = self.sizes
        assert sizes.num_experts is not None
        yield Parameter(f"{name}.router.weight", (sizes.num_experts, sizes.hidden_size))
        local = self.divide(sizes.num_experts, self.parallel.expert, "experts (--num-experts)", "--ep")
        pattern = "experts.local_experts.{expert}.{matrix}.weight"
        if sizes.grouped_experts:
            pattern = "experts.{matrix}.weight{expert}"
        order = [(expert, matrix) for expert in range(local) for matrix in ("linear_fc1", "linear_fc2")]
        # Of the first expert-parallel rank; the others' have the same shapes.
        for expert, matrix in sorted(order, key=lambda pair: pair[1]) if sizes.grouped_experts else order:
            numbers = range(expert, sizes.num_experts, local)
            yield self.expert([f"{name}.{pattern.format(expert=n, matrix=matrix)}" for n in numbers], matrix)
        if sizes.moe_shared_ffn is not None:
            # Overlapped with the dispatcher, it is given a sequence that the dispatcher has gathered.
            if sizes.shared_expert_gate:
                yield Parameter(f"{name}.shared_experts.gate_weight", (1, sizes.hidden_size))
            yield from self.mlp(
                f"{name}.shared_experts",
                sizes.moe_shared_ffn,
                fused_norm=False,
                sequence=not sizes.shared_expert_overlap,
            )

    def expert(self, names: Sequence[str], matrix: str) -> Parameter:
        sizes, shards = self.sizes, self.parallel.expert_tensor
        hidden, ffn = sizes.hidden_size, sizes.expert_ffn
        part = self.divide(ffn, shards, "inputs of an expert's fc2 (--moe-ffn-hidden-size)", "--etp")
        gates = 2 if sizes.swiglu else 1
        row_parallel = matrix == "linear_fc2"
        # A layer of Transformer Engine that is neither grouped nor cut is as any other.
        plain = sizes.transformer_engine and not sizes.grouped_experts and self.parallel.expert * shards == 1
        seen = False if plain else None
        kind = ("Row" if row_parallel else "Column") + "Parallel" + ("Grouped" if sizes.grouped_experts else "")
        geometry = GlobalShape(hidden, ffn, shards, False, outputs_over_tp=seen)
        shape = (hidden, part)
        if not row_parallel:
            geometry = GlobalShape(gates * ffn, hidden, 1, False, outputs_over_tp=seen)
            shape = (gates * part, hidden)
        return Parameter(
            names[0],
            shape,
            geometry,
            self.layer_class(f"{kind}Linear"),
            apart=self.parallel.experts_apart,
            expert=True,
            elsewhere=tuple(names[1:]),
        )


def parameters_of_chunk(
    sizes: ModelSizes, parallel: Parallel, layers: range, *, first: bool, last: bool
) -> list[Parameter]:
    """The parameters of one model chunk on one rank, in the order of their registration.

    Args:
        sizes: of the model.
        parallel: of the layout.
        layers: the chunk's, counted over the whole model.
        first: whether it begins with the embedding.
        last: whether it ends with the output layer.

    Raises:
        PlanError: if a size does not divide over the ranks that share it.
    """
    make = _Layers(sizes, parallel)
    vocabulary = (sizes.padded_vocabulary(parallel.tensor) // parallel.tensor, sizes.hidden_size)
    twice = sizes.tied and parallel.pipeline > 1
    found: list[Parameter] = []
    if first:
        found.append(Parameter("embedding.word_embeddings.weight", vocabulary, own_bucket=twice))
        if sizes.learned_positions:
            positions = (sizes.max_position_embeddings, sizes.hidden_size)
            found.append(Parameter("embedding.position_embeddings.weight", positions))
    for number in layers:
        found += make.layer(number)
    if last:
        found += make.norm("decoder.final_layernorm", sizes.hidden_size)
        if not sizes.tied or twice:
            found.append(Parameter("output_layer.weight", vocabulary, own_bucket=twice))
    return found
