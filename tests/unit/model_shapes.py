"""The parameters of well-known models, in the order in which Megatron places them in a buffer."""

from collections.abc import Callable

from megatron_dobb.sharding.buffer_layout import Item

BLOCKS = 16


def column_parallel(name: str, outputs: int, inputs: int, tp: int) -> Item:
    """A weight whose output features are split over `tp` ranks."""
    return Item(outputs // tp * inputs, inputs // BLOCKS, name=name, columns=inputs)


def row_parallel(name: str, outputs: int, inputs: int, tp: int) -> Item:
    """A weight whose input features are split over `tp` ranks."""
    part = inputs // tp
    return Item(outputs * part, inputs // BLOCKS, name=name, columns=part, column_shards=tp)


def gpt2(layers: int, hidden: int, tp: int) -> list[Item]:
    """GPT-2 with biases and tied embeddings."""
    items = [Item(50304 * hidden // tp), Item(1024 * hidden)]
    for layer in range(layers):
        name = f"layers.{layer}."
        items += [
            *[Item(hidden)] * 2,
            row_parallel(name + "proj", hidden, hidden, tp),
            Item(hidden),
            column_parallel(name + "qkv", 3 * hidden, hidden, tp),
            Item(3 * hidden // tp),
            *[Item(hidden)] * 2,
            column_parallel(name + "fc1", 4 * hidden, hidden, tp),
            Item(4 * hidden // tp),
            row_parallel(name + "fc2", hidden, 4 * hidden, tp),
            Item(hidden),
        ]
    return [*items, *[Item(hidden)] * 2][::-1]


def llama(layers: int, hidden: int, ffn: int, heads: int, tp: int, whole: bool = True) -> list[Item]:
    """Llama-3 with 8 query groups: all of it, or a middle pipeline stage."""
    key_value = 8 * (hidden // heads)
    items = [Item(128256 * hidden // tp)] if whole else []
    for layer in range(layers):
        name = f"layers.{layer}."
        items += [
            row_parallel(name + "proj", hidden, hidden, tp),
            Item(hidden),
            column_parallel(name + "qkv", hidden + 2 * key_value, hidden, tp),
            Item(hidden),
            column_parallel(name + "fc1", 2 * ffn, hidden, tp),
            row_parallel(name + "fc2", hidden, ffn, tp),
        ]
    if whole:
        items += [Item(hidden), Item(128256 * hidden // tp)]
    return items[::-1]


def experts(layers: int, hidden: int, ffn: int, local: int) -> list[Item]:
    """The expert buffer of a mixture of experts with `local` experts on each rank."""
    items = []
    for layer in range(layers):
        for expert in range(local):
            name = f"layers.{layer}.experts.{expert}."
            items.append(column_parallel(name + "fc1", 2 * ffn, hidden, 1))
            items.append(row_parallel(name + "fc2", hidden, ffn, 1))
    return items[::-1]


def latent_attention(layers: int, inputs: dict[str, tuple[int, int]]) -> list[Item]:
    """The dense buffer of a fine-grained mixture: weights `name: (outputs, inputs)` in every layer, and norms."""
    items = []
    for layer in range(layers):
        for name, (outputs, width) in inputs.items():
            items += [Item(width), column_parallel(f"layers.{layer}.{name}", outputs, width, 1)]
    return items[::-1]


DEEPSEEK_V3 = {
    "q_down": (1536, 7168),
    "kv_down": (576, 7168),
    "q_up": (24576, 1536),
    "kv_up": (32768, 512),
    "proj": (7168, 16384),
    "fc1": (36864, 7168),
    "fc2": (7168, 18432),
}
DEEPSEEK_V2_LITE = {
    "kv_down": (576, 2048),
    "kv_up": (4096, 512),
    "proj": (2048, 2048),
    "fc1": (21888, 2048),
    "fc2": (2048, 10944),
    "expert_fc2": (2048, 1408),
}

MODELS: dict[str, Callable[[], list[Item]]] = {
    "GPT-2 Small": lambda: gpt2(12, 768, 1),
    "GPT-2 Medium": lambda: gpt2(24, 1024, 1),
    "GPT-2 Large": lambda: gpt2(36, 1280, 1),
    "GPT-2 XL": lambda: gpt2(48, 1600, 1),
    "GPT-2 XL, TP 8": lambda: gpt2(48, 1600, 8),
    "Llama-3 8B": lambda: llama(32, 4096, 14336, 32, 1),
    "Llama-3 8B, TP 2": lambda: llama(32, 4096, 14336, 32, 2),
    "Llama-3 8B, TP 4": lambda: llama(32, 4096, 14336, 32, 4),
    "Llama-3 8B, TP 8": lambda: llama(32, 4096, 14336, 32, 8),
    "Llama-3 70B, TP 1": lambda: llama(80, 8192, 28672, 64, 1),
    "Llama-3 70B, TP 8, PP 8": lambda: llama(10, 8192, 28672, 64, 8, whole=False),
    "Mixtral experts": lambda: experts(32, 4096, 14336, 1),
    "fine-grained experts": lambda: experts(60, 7168, 2048, 4),
    "narrow experts": lambda: experts(48, 2048, 768, 16),
}
"""Models whose alignment unit is at most 10,000."""

WIDE_UNITS: dict[str, tuple[Callable[[], list[Item]], int]] = {
    "DeepSeek-V3 dense": (lambda: latent_attention(6, DEEPSEEK_V3), 64_512),
    "DeepSeek-V2-Lite": (lambda: latent_attention(4, DEEPSEEK_V2_LITE), 240_768),
}
"""Models with a wide alignment unit, and that unit."""
