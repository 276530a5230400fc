"""Small models of every kind that Megatron builds from its own layers, and how a rank trains one with Dobb.

`KindRun` belongs to one rank. The selective scan of Mamba's layers, whose
kernels need a GPU, is a stand-in (`testbed.mamba`), and so is attention with heads of unequal sizes.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
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
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules  # noqa: E402
from megatron.core.models.hybrid.hybrid_model import HybridModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules  # noqa: E402
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules  # noqa: E402
from megatron.core.ssm.mlp_layer import MLPLayer  # noqa: E402
from megatron.core.tensor_parallel import (  # noqa: E402
    ColumnParallelLinear,
    RowParallelLinear,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer import MLATransformerConfig, TransformerConfig  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules  # noqa: E402

import testbed.mamba  # noqa: E402
from megatron_dobb.megatron.model.chunk_state import selection_of  # noqa: E402
from megatron_dobb.megatron.model.global_names import weight_names  # noqa: E402
from megatron_dobb.megatron.seam import patches  # noqa: E402
from megatron_dobb.methods.dobb.settings import DobbConfig  # noqa: E402
from testbed import gpt  # noqa: E402
from testbed.attention import PlainAttention  # noqa: E402

SEQUENCES, SEED, HIDDEN = 8, 11, 32
FULL_QKV = ("self_attention.linear_qkv", "self_attention.linear_proj")
MLP = ("mlp.linear_fc1", "mlp.linear_fc2")
LATENT = ("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj")


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of model.

    Attributes:
        layers: makes the specification of a layer; for a hybrid, that of its stack.
        managed: the matrices of each layer that Dobb must manage, without `.weight`.
        transformer: changes to the `TransformerConfig`.
        model: changes to what `GPTModel` is given.
        config: the class of the configuration.
        every_layer: whether the two layers are alike; otherwise names in `managed` begin with the layer's number.
    """

    layers: Callable[[], Any]
    managed: tuple[str, ...]
    transformer: Mapping[str, Any]
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config: type[TransformerConfig] = TransformerConfig
    every_layer: bool = True

    def names(self) -> list[str]:
        """The names of all matrices that Dobb must manage."""
        layers = (f"{layer}.{matrix}" for layer in range(2) for matrix in self.managed)
        return sorted(f"decoder.layers.{matrix}.weight" for matrix in (layers if self.every_layer else self.managed))


def _latent_layers() -> Any:
    layers = get_gpt_layer_local_spec(multi_latent_attention=True)
    layers.submodules.self_attention.submodules.core_attention = PlainAttention
    return layers


DENSE = Kind(
    functools.partial(get_gpt_layer_local_spec, normalization="RMSNorm"),
    FULL_QKV + MLP,
    {
        "num_query_groups": 2,
        "ffn_hidden_size": 48,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "bias_activation_fusion": False,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "apply_rope_fusion": False,
    },
    {"position_embedding_type": "rope"},
)
EXPERTS = Kind(
    functools.partial(get_gpt_layer_local_spec, num_experts=4, moe_grouped_gemm=False),
    FULL_QKV
    + tuple(f"mlp.experts.local_experts.{e}.{m}" for e in range(4) for m in ("linear_fc1", "linear_fc2"))
    + ("mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"),
    {
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 48,
        "moe_shared_expert_intermediate_size": 32,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-2,
        "moe_token_dispatcher_type": "alltoall",
        "add_bias_linear": False,
    },
)
LATENT_ATTENTION = Kind(
    _latent_layers,
    tuple(f"self_attention.{name}" for name in LATENT) + MLP,
    {
        "multi_latent_attention": True,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 8,
        "rope_type": "rope",
        "add_bias_linear": False,  # with biases, Megatron's recompute of the MLP alone never ends
        "apply_rope_fusion": False,
    },
    {"position_embedding_type": "rope"},
    MLATransformerConfig,
)


def _hybrid_stack() -> Any:
    """A Mamba layer, an attention layer and an MLP, each with its norm, of Megatron's own linear layers."""
    testbed.mamba.install()
    mixer = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    mamba = MambaLayerSubmodules(
        norm=WrappedTorchNorm, mixer=ModuleSpec(MambaMixer, submodules=mixer), mamba_bda=get_bias_dropout_add
    )
    layer = get_gpt_layer_local_spec(normalization="RMSNorm").submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=layer.input_layernorm, self_attention=layer.self_attention, self_attn_bda=layer.self_attn_bda
    )
    mlp = TransformerLayerSubmodules(pre_mlp_layernorm=layer.pre_mlp_layernorm, mlp=layer.mlp, mlp_bda=layer.mlp_bda)
    return ModuleSpec(
        HybridStack,
        submodules=HybridStackSubmodules(
            mamba_layer=ModuleSpec(MambaLayer, submodules=mamba),
            attention_layer=ModuleSpec(TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(MLPLayer, submodules=mlp),
        ),
    )


HYBRID = Kind(
    _hybrid_stack,
    (
        "0.mixer.in_proj",
        "0.mixer.out_proj",
        "1.self_attention.linear_qkv",
        "1.self_attention.linear_proj",
        "2.mlp.linear_fc1",
        "2.mlp.linear_fc2",
    ),
    {
        "num_layers": 3,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "mamba_state_dim": 8,
        "mamba_head_dim": 16,
        "mamba_num_groups": 2,
    },
    {"hybrid_layer_pattern": "M*-"},
    every_layer=False,
)


@dataclasses.dataclass(frozen=True)
class Place:
    """How training is spread over ranks: total, tensor-parallel (with the sequence), expert-parallel."""

    world: int = 1
    tensor: int = 1
    expert: int = 1

    def __str__(self) -> str:
        parts = [f"DP {self.world // self.tensor}", f"TP {self.tensor}+SP", f"EP {self.expert}"]
        return " ".join([parts[0]] + parts[1:2] * (self.tensor > 1) + parts[2:] * (self.expert > 1))

    def start(self) -> None:
        """Set up Megatron's process groups, once in every rank."""
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=self.tensor,
            expert_model_parallel_size=self.expert,
            expert_tensor_parallel_size=1,
        )


def global_batch(step: int) -> Tensor:
    """Tokens that a model can learn, `[SEQUENCES, SEQUENCE + 1]`: 5 t + 3 follows t, but for one token in eight."""
    generator = torch.Generator().manual_seed(300 + step)
    tokens = torch.randint(0, gpt.VOCABULARY, (SEQUENCES, gpt.SEQUENCE + 1), generator=generator)
    keep = torch.rand(tokens.shape, generator=generator) < 0.875
    for place in range(1, gpt.SEQUENCE + 1):
        tokens[:, place] = torch.where(
            keep[:, place], (5 * tokens[:, place - 1] + 3) % gpt.VOCABULARY, tokens[:, place]
        )
    return tokens


class KindRun:
    """A model of a kind and its optimizer on this rank.

    Args:
        kind: what to build.
        place: what `start` was called on.
        dobb: Dobb's settings.
        micro_batch: sequences of a rank in one forward pass.
        prepare: is given the model before it is wrapped.
        model: more of what the model's class is given.
        transformer: more of the `TransformerConfig`.
    """

    def __init__(
        self,
        kind: Kind,
        place: Place,
        dobb: DobbConfig,
        micro_batch: int = 2,
        prepare: Callable[[torch.nn.Module], None] = lambda model: None,
        model: Mapping[str, Any] | None = None,
        **transformer: Any,
    ) -> None:
        self.micro_batch = micro_batch
        patches.configure(dobb)
        model_parallel_cuda_manual_seed(SEED)
        torch.manual_seed(SEED)
        bare = build(kind, place, model or {}, transformer)
        prepare(bare)
        self.model = DistributedDataParallel(
            bare.config, DistributedDataParallelConfig(use_distributed_optimizer=True), bare
        )
        config = OptimizerConfig(
            optimizer="adam",
            lr=4e-3,
            weight_decay=0.1,
            adam_eps=1e-3,
            use_distributed_optimizer=True,
            log_num_zeros_in_grad=True,
        )
        config.dobb = dobb
        self.optimizer = get_megatron_optimizer(config, [self.model])
        self.model.config.grad_scale_func = self.optimizer.scale_loss
        self.dobb = self.optimizer.chained_optimizers
        self.norms: list[tuple[float, int]] = []
        self.optimizer.step = functools.partial(self._step_and_note, self.optimizer.step)
        self.names = sorted({weight.name for weight in selection_of(self.model).managed})

        self.weights = {
            name: self.model.module.get_submodule(path)._parameters[own]
            for (path, own), name in weight_names(self.model.module).items()
            if self.model.module.get_submodule(path)._parameters[own] is not None
        }

    def load(self, whole: Mapping[str, Tensor]) -> None:
        """Take over the weights of the whole model, in place. In fp32 the masters are the parameters."""
        with torch.no_grad():
            for name, weight in self.weights.items():
                value = whole[name]
                if value.shape != weight.shape:
                    group = parallel_state.get_tensor_model_parallel_group()
                    parts = value.chunk(group.size() * weight.partition_stride, dim=weight.partition_dim)
                    value = torch.cat(parts[group.rank() :: group.size()], dim=weight.partition_dim)
                weight.copy_(value)

    def moments(self) -> dict[tuple[str, int], Tensor]:
        """The blocks that this rank owns, by name and by number in the whole weight."""
        found = {}
        for group in [group for optimizer in self.dobb for group in optimizer.refresh_groups]:
            blocks = {weight.key: weight.blocks for weight in group.weights}
            for (name, block), moment in zip(group.owned, group.moment, strict=True):
                split = self.model.config.tensor_model_parallel_size > 1 and self.weights[name].partition_dim == 1
                first = parallel_state.get_tensor_model_parallel_rank() * blocks[name] if split else 0
                found[name, first + block] = moment.clone()
        return found

    def step(self, number: int) -> float:
        """Train on global batch `number`; returns the loss on all of it, before the step."""
        loss = torch.tensor(gpt.train_step(self.model, self.optimizer, global_batch(number), self.micro_batch))
        dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
        return float(loss) / parallel_state.get_data_parallel_world_size()

    def _step_and_note(self, step: Any) -> Any:
        """Megatron's step, which also notes the norm of the gradients and the number of zeros among them."""
        succeeded, norm, zeros = step()
        self.norms.append((float(norm), int(zeros)))
        return succeeded, norm, zeros

    def record_sums(self) -> list[dict[str, tuple[int, Tensor | None]]]:
        """Tokens and sums of every weight at each refresh from now on, in a list that grows."""
        record: list[dict[str, tuple[int, Tensor | None]]] = []
        for optimizer in self.dobb:
            for capture in optimizer.captures:
                capture.take = functools.partial(self._take, capture.take, record, optimizer is self.dobb[0])
        return record

    def _take(self, take: Any, record: list[Any], is_first: bool) -> Any:
        sums = take()
        if is_first:
            record.append({})
        record[-1] |= {name: (s.tokens, None if s.total is None else s.total.clone()) for name, s in sums.items()}
        return sums


def build(kind: Kind, place: Place, model: Mapping[str, Any], transformer: Mapping[str, Any]) -> torch.nn.Module:
    """A two-layer model in fp32 without dropout, not wrapped."""
    settings: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "tensor_model_parallel_size": place.tensor,
        "sequence_parallel": place.tensor > 1,
        "expert_model_parallel_size": place.expert,
        "expert_tensor_parallel_size": 1,
        "gradient_accumulation_fusion": False,
    }
    config = kind.config(**(settings | dict(kind.transformer) | dict(transformer)))
    config.finalize_model_grads_func = finalize_model_grads
    arguments = {"vocab_size": gpt.VOCABULARY, "max_sequence_length": gpt.SEQUENCE}
    arguments["share_embeddings_and_output_weights"] = False
    kind_of_model = HybridModel if "hybrid_layer_pattern" in kind.model else GPTModel
    return kind_of_model(config, kind.layers(), **(arguments | dict(kind.model) | dict(model)))
