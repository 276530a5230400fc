"""Print how evenly the refresh of well-known models is shared out, as a table: `docs/layouts.md` has it.

PYTHONPATH=. python tests/unit/balance_table.py
"""

import time
from fractions import Fraction
from unittest import mock

from model_holdings import MODELS, aligned, holdings_of, llama_405b_stage

from megatron_dobb.methods.dobb.block_ownership import BlockOwnership
from megatron_dobb.sharding import load_balancing
from megatron_dobb.sharding.ownership import imbalance

MIB = 2**20
ROWS = [
    ("GPT-2 Small", 1, 32),
    ("GPT-2 XL", 1, 64),
    ("GPT-2 XL", 1, 256),
    ("Llama-3 8B", 1, 8),
    ("Llama-3 8B", 1, 64),
    ("Llama-3 8B", 1, 1024),
    ("Llama-3 8B", 4, 128),
    ("Llama-3 70B", 1, 512),
    ("Llama-3 70B, a stage of 8", 8, 1024),
    ("Mixtral, 1 of 8 experts", 1, 64),
    ("fine-grained, 4 of 256 experts", 1, 256),
]


def state(owners: BlockOwnership) -> str:
    """Largest `A` in fp32 and `Q` in bf16 that a rank keeps, in MiB."""
    ranks = range(len(owners.holdings))
    kept = (4 * owners.elements(owners.owned_by(r)) + 2 * owners.elements(owners.kept_by(r)) for r in ranks)
    return f"{max(kept) / MIB:.0f}"


def main() -> None:
    """Print the table."""
    columns = ["Model, TP, DP", "blocks", "busiest rank: holders alone, balanced", "moved"]
    columns += ["MiB sent more, all ranks together", "largest A + Q of a rank, MiB: before, after", "seconds"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    cases = [(f"{model}, {tp}, {dp}", MODELS[model](tp), dp) for model, tp, dp in ROWS]
    cases += [(f"Llama-3 405B, a stage of 16, 8, {dp}", llama_405b_stage(), dp) for dp in (1024, 16_384)]
    for name, items, shards in cases:
        holdings = holdings_of(aligned(items, shards))
        with mock.patch.object(load_balancing, "TOLERANCE", Fraction(10**6)):
            alone = BlockOwnership.share_out(*holdings)
        began = time.process_time()
        owners = BlockOwnership.share_out(*holdings)
        seconds = time.process_time() - began
        blocks = sum(map(len, owners.owners.values()))
        more = 2 * owners.elements(owners.moved()) / MIB
        print(
            f"| {name} | {blocks} | {imbalance([alone]):.2f}, {imbalance([owners]):.2f} | {len(owners.moved())} | "
            f"{more:.0f} | {state(alone)}, {state(owners)} | {seconds:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
