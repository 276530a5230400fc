#!/usr/bin/env bash
#SBATCH --job-name=dobb
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#
# Pretrain a Llama-3 8B on several nodes of 8 GPUs under Slurm: TP 2 with sequence parallelism, DP over the rest.
#
#   export MEGATRON_LM=/shared/Megatron-LM CHECKPOINTS=/shared/checkpoints/8b
#   export DATA_PATH=/shared/data/text_document TOKENIZER_MODEL=/shared/tokenizers/llama3
#   cd <this repository> && sbatch --nodes 4 --account ACCOUNT --partition PARTITION examples/slurm_multi_node.sh
#
# One torchrun on each node; the first node is the meeting point. Ten minutes before the job's time is up Megatron saves
# a checkpoint and ends: submit again and it goes on, on as many nodes as you like. A container goes in front of torchrun
# through SRUN, such as SRUN="srun --container-image=/shared/images/pytorch.sqsh". cluster.sh has all settings.
set -euo pipefail
# Slurm runs a copy of this file, so it looks for its neighbours where sbatch was called.
here="${DOBB_EXAMPLES:-${SLURM_SUBMIT_DIR:-.}/examples}"
if [ ! -f "$here/cluster.sh" ]; then
    echo "error: no cluster.sh in $here. Call sbatch in the folder of megatron_dobb, or set DOBB_EXAMPLES," \
        "for example: export DOBB_EXAMPLES=\$HOME/megatron_dobb/examples" >&2
    exit 2
fi
. "$here/cluster.sh"

[ -n "${SLURM_JOB_NODELIST:-}" ] ||
    fail "SLURM_JOB_NODELIST is not set, which Slurm does in a job: start this with sbatch, or inside salloc"
SEQUENCE="${SEQUENCE:-8192}" GLOBAL_BATCH="${GLOBAL_BATCH:-512}"
settings
MODEL=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --position-embedding-type rope --rotary-base 500000 --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
)
LAYOUT=(--tensor-model-parallel-size "${TP:-2}" --sequence-parallel)
if [ -n "${SLURM_JOB_END_TIME:-}" ]; then # from Slurm 22.05 on
    minutes=$(((SLURM_JOB_END_TIME - $(date +%s)) / 60 - 10))
    LAYOUT+=(--exit-duration-in-mins "$((minutes > 1 ? minutes : 1))")
fi

read -r head < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port="${MASTER_PORT:-$((20000 + ${SLURM_JOB_ID:-0} % 20000))}" # two jobs that share a node must not share a port
read -r -a srun <<<"${SRUN:-srun}"
LAUNCH=("${srun[@]}" --kill-on-bad-exit=1 "$PYTHON" -m torch.distributed.run
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$GPUS_PER_NODE"
    --rdzv-id "${SLURM_JOB_ID:-0}" --rdzv-backend c10d --rdzv-endpoint "$head:$port")
train "$@"
