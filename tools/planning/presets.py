"""The models that have a name."""

from dataclasses import replace

from .sizes import ModelSizes, Parallel


def _gpt2(layers: int, hidden: int, heads: int) -> ModelSizes:
    return ModelSizes(layers, hidden, heads)


_LLAMA3 = ModelSizes(
    32,
    4096,
    32,
    ffn_hidden_size=14336,
    num_query_groups=8,
    vocab_size=128256,
    learned_positions=False,
    swiglu=True,
    bias=False,
    rms_norm=True,
    tied=False,
)

PRESETS: dict[str, ModelSizes] = {
    "gpt2-small": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "llama3-8b": _LLAMA3,
    "llama3-70b": replace(_LLAMA3, num_layers=80, hidden_size=8192, num_attention_heads=64, ffn_hidden_size=28672),
    "llama3-405b": replace(_LLAMA3, num_layers=126, hidden_size=16384, num_attention_heads=128, ffn_hidden_size=53248),
    "mixtral-8x7b": replace(_LLAMA3, vocab_size=32000, num_experts=8, moe_ffn_hidden_size=14336),
    "deepseek-v3-like": replace(
        _LLAMA3,
        num_layers=61,
        hidden_size=7168,
        num_attention_heads=128,
        num_query_groups=None,
        ffn_hidden_size=18432,
        vocab_size=129280,
        qk_layernorm=True,
        num_experts=256,
        moe_ffn_hidden_size=2048,
        moe_shared_ffn=2048,
        moe_layers=(False,) * 3 + (True,) * 58,
        latent_attention=True,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_head_dim=128,
        qk_pos_emb_head_dim=64,
        v_head_dim=128,
    ),
}
"""The models that `--preset` knows. The last is of DeepSeek-V3's sizes, without its multi-token prediction."""


def counted_split(sizes: ModelSizes, parallel: Parallel) -> Parallel:
    """Let embedding and loss count as layers where a preset's layers divide over the stages only so.

    Of Llama-3 405B's 126 layers, 16 stages get 8 each if embedding and loss are two more.
    """
    even = parallel.first_layers is None and parallel.last_layers is None
    if even and sizes.num_layers % parallel.pipeline and (sizes.num_layers + 2) % parallel.pipeline == 0:
        return replace(parallel, count_embedding=True, count_loss=True)
    return parallel
