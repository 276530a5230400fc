#!/usr/bin/env bash
# Pretrain a mixture of 8 experts, two for each token, on one node of 8 GPUs: experts over 4 ranks (EP 4), DP 8.
#
#   export MEGATRON_LM=$HOME/Megatron-LM CHECKPOINTS=/shared/checkpoints/moe
#   export DATA_PATH=/shared/data/text_document TOKENIZER_MODEL=meta-llama/Llama-3.1-8B
#   examples/moe_8gpu.sh [MEGATRON'S ARGUMENTS]
#
# Every expert's matrices get bases of their own, from the tokens routed to it; docs/layers.md says from which.
# cluster.sh has all settings; ON_CPU=1 tries it without a GPU.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/cluster.sh"

settings
MODEL=(
    --num-layers 12 --hidden-size 1024 --ffn-hidden-size 2048 --num-attention-heads 16
    --group-query-attention --num-query-groups 4
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
    --moe-token-dispatcher-type alltoall
)
if on_cpu; then
    LAYOUT=(--expert-model-parallel-size "${EP:-2}" --num-experts 4 --moe-ffn-hidden-size 128)
else
    LAYOUT=(--expert-model-parallel-size "${EP:-4}" --moe-grouped-gemm)
fi
train "$@"
