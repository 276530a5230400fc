#!/usr/bin/env bash
# Pretrain a dense Llama-like model of 1.2 B parameters on one node of 8 GPUs: TP 2 with sequence parallelism, DP 4.
#
#   export MEGATRON_LM=$HOME/Megatron-LM CHECKPOINTS=/shared/checkpoints/dense
#   export DATA_PATH=/shared/data/text_document TOKENIZER_MODEL=meta-llama/Llama-3.1-8B
#   examples/single_node_8gpu.sh [MEGATRON'S ARGUMENTS]
#
# Started again, it continues from the last checkpoint. cluster.sh has all settings; ON_CPU=1 tries it without a GPU.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/cluster.sh"

settings
MODEL=(
    --num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --position-embedding-type rope --rotary-base 500000 --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
)
LAYOUT=(--tensor-model-parallel-size "${TP:-2}" --sequence-parallel)
train "$@"
