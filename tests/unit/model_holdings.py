"""What every data-parallel rank holds of well-known models, with Megatron's buckets."""

from collections.abc import Callable, Sequence

from model_shapes import experts, gpt2, llama

from megatron_dobb.sharding.buffer_layout import BufferLayout, Item, align, bucket_divisor, default_bucket_size

GPT2 = {"Small": (12, 768), "Medium": (24, 1024), "Large": (36, 1280), "XL": (48, 1600)}
LLAMA = {"8B": (32, 4096, 14336, 32), "70B": (80, 8192, 28672, 64)}

MODELS: dict[str, Callable[[int], list[Item]]] = {
    **{f"GPT-2 {name}": (lambda tp, size=size: gpt2(*size, tp)) for name, size in GPT2.items()},
    **{f"Llama-3 {name}": (lambda tp, size=size: llama(*size, tp)) for name, size in LLAMA.items()},
    "Llama-3 70B, a stage of 8": lambda tp: llama(10, *LLAMA["70B"][1:], tp, whole=False),
    "Mixtral, 1 of 8 experts": lambda tp: experts(32, 4096, 14336, 1),
    "Mixtral, all 8 experts": lambda tp: experts(32, 4096, 14336, 8),
    "fine-grained, 4 of 256 experts": lambda tp: experts(60, 7168, 2048, 4),
    "fine-grained, 16 of 128 experts": lambda tp: experts(48, 2048, 768, 16),
}
"""By tensor-parallel size: the parameters of a rank. Experts are not split by it."""


def llama_405b_stage() -> list[Item]:
    """One of 16 pipeline stages, with tensor parallelism over 8 ranks."""
    return llama(8, 16384, 53248, 128, 8, whole=False)


def aligned(items: Sequence[Item], shards: int, *, one_bucket: bool = False) -> BufferLayout:
    """The buffer, in Megatron's default buckets or in one."""
    return align(items, None if one_bucket else default_bucket_size(shards), shards, bucket_divisor(shards))


def holdings_of(layout: BufferLayout) -> tuple[list[dict[str, tuple[int, ...]]], dict[str, int]]:
    """The blocks of each weight that every rank holds, and the widths."""
    holdings: list[dict[str, tuple[int, ...]]] = [{} for _ in range(layout.shards)]
    for index, item in enumerate(layout.items):
        if item.width:
            for rank in layout.holders(index):
                holdings[rank][item.name] = layout.held_blocks(index, rank)
    return holdings, {item.name: item.width for item in layout.items if item.width}
