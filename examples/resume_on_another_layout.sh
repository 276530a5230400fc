#!/usr/bin/env bash
# Save on one parallel layout, continue on another: TP 2 x DP, then TP 1 x PP 2 x DP, of the same model.
#
#   export MEGATRON_LM=$HOME/Megatron-LM CHECKPOINTS=/shared/checkpoints/moved MOCK_DATA=1
#   examples/resume_on_another_layout.sh             # on 8 GPUs
#   ON_CPU=1 examples/resume_on_another_layout.sh    # two processes, a minute
#
# The checkpoint is written with --dist-ckpt-optim-fully-reshardable, as all checkpoints of these examples are. Blocks,
# moments and bases belong to the model, so the second part computes the same function: docs/layouts.md says how closely
# losses agree, docs/checkpoints.md what may change. cluster.sh has all settings.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/cluster.sh"

on_cpu || TRAIN_ITERS="${TRAIN_ITERS:-200}"
settings
[ "$TRAIN_ITERS" -ge 2 ] || fail "TRAIN_ITERS=$TRAIN_ITERS has no half to save at, for example: export TRAIN_ITERS=200"
if [ -f "$CHECKPOINTS/latest_checkpointed_iteration.txt" ]; then
    fail "CHECKPOINTS=$CHECKPOINTS has a checkpoint already, and this example begins from nothing: give a new folder," \
        "for example: export CHECKPOINTS=$CHECKPOINTS-2"
fi
MODEL=(
    --num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
)
half=$((TRAIN_ITERS / 2))

echo "# == iterations 1 to $half on TP 2 with sequence parallelism"
LAYOUT=(--tensor-model-parallel-size 2 --sequence-parallel)
train --save-interval "$half" --exit-interval "$half" "$@"

echo "# == iterations $((half + 1)) to $TRAIN_ITERS on TP 1, PP 2"
LAYOUT=(--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2)
train --save-interval "$half" "$@"
