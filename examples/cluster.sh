# Sourced by the examples for clusters: what they check, what they share, and how a training starts.
#
# Settings come from the environment:
#   MEGATRON_LM       folder of a Megatron-LM checkout                             (needed)
#   DATA_PATH         an indexed dataset, without .bin and .idx                    (needed, unless MOCK_DATA=1)
#   TOKENIZER_MODEL   folder or name of a Hugging Face tokenizer                   (needed, unless MOCK_DATA=1)
#   CHECKPOINTS       folder for checkpoints, seen by all nodes                    (needed)
#   MOCK_DATA=1       Megatron's made-up data instead: a test of a cluster without any data
#   LR, TRAIN_ITERS, WARMUP_ITERS, GLOBAL_BATCH, MICRO_BATCH, SEQUENCE, BLOCKS, SAVE_INTERVAL, GPUS_PER_NODE
#   DRY_RUN=1         print the command instead of running it; it may be pasted back into a shell
#   ON_CPU=1          the same script with a tiny model, made-up data and two processes of this machine's CPU
# Arguments of a script are added to Megatron's, so they win: single_node_8gpu.sh --eval-iters 10
#
# A script calls, in this order: settings; its own arrays MODEL and LAYOUT; train.

EXAMPLES=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

fail() {
    echo "error: $*" >&2
    exit 2
}

# need NAME WHAT EXAMPLE: stop unless a variable is set.
need() {
    [ -n "${!1:-}" ] || fail "$1 is not set. It is $2, for example: export $1=$3"
}

on_cpu() { [ "${ON_CPU:-0}" = 1 ]; }

# Checks what was given, fills in the rest.
settings() {
    if on_cpu; then
        MEGATRON_LM="$EXAMPLES/quickstart" SCRIPT=pretrain_gpt_cpu.py MOCK_DATA=1 GPUS_PER_NODE="${CPU_PROCESSES:-2}"
        CHECKPOINTS="${CHECKPOINTS:-$(mktemp -d)}"
        TRAIN_ITERS="${TRAIN_ITERS:-20}" WARMUP_ITERS= GLOBAL_BATCH=8 MICRO_BATCH=1 SEQUENCE=32 LR=1e-2
        BLOCKS=4 SAVE_INTERVAL="${SAVE_INTERVAL:-10}"
        # The tiny model of a CPU; ahead of a script's arguments, behind its own choices.
        SHRINK=(--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --num-query-groups 2
            --max-position-embeddings 32 --log-interval 1 --eval-iters 0 --num-workers 0)
        EXPORTED=(CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1)
        # Some machines' names resolve to no address of theirs, which is where gloo would listen.
        if [ -d /sys/class/net/lo ]; then EXPORTED+=(GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"); fi
    else
        SCRIPT=pretrain_gpt.py SHRINK=() EXPORTED=()
        need MEGATRON_LM "the folder of a Megatron-LM checkout" "\$HOME/Megatron-LM"
        need CHECKPOINTS "a folder for checkpoints that every node sees" /shared/checkpoints/run1
        if [ "${MOCK_DATA:-0}" != 1 ]; then
            need DATA_PATH "an indexed dataset without .bin and .idx (or set MOCK_DATA=1)" /shared/data/text_document
            need TOKENIZER_MODEL "a Hugging Face tokenizer (or set MOCK_DATA=1)" meta-llama/Llama-3.1-8B
            [ -f "$DATA_PATH.idx" ] && [ -f "$DATA_PATH.bin" ] ||
                fail "DATA_PATH=$DATA_PATH: there is no $DATA_PATH.idx and .bin. Make them with tools/preprocess_data.py" \
                    "of Megatron-LM, or set MOCK_DATA=1"
        fi
    fi
    [ -f "$MEGATRON_LM/$SCRIPT" ] ||
        fail "MEGATRON_LM=$MEGATRON_LM has no $SCRIPT. Give the folder of a Megatron-LM checkout," \
            "for example: export MEGATRON_LM=\$HOME/Megatron-LM"
    PYTHON="${PYTHON:-python}"
    GPUS_PER_NODE="${GPUS_PER_NODE:-8}" LR="${LR:-3e-4}" TRAIN_ITERS="${TRAIN_ITERS:-10000}"
    case "$TRAIN_ITERS" in
    *[!0-9]* | "" | 0*) fail "TRAIN_ITERS=$TRAIN_ITERS is no number of iterations, for example: export TRAIN_ITERS=10000" ;;
    esac
    # Megatron wants a warm-up shorter than the training, and says so with a bare assertion.
    WARMUP_ITERS="${WARMUP_ITERS:-$((TRAIN_ITERS < 10000 ? TRAIN_ITERS / 20 : 500))}"
    GLOBAL_BATCH="${GLOBAL_BATCH:-256}" MICRO_BATCH="${MICRO_BATCH:-1}" SEQUENCE="${SEQUENCE:-4096}" BLOCKS="${BLOCKS:-16}" SAVE_INTERVAL="${SAVE_INTERVAL:-1000}"
    # Megatron wants this with tensor or context parallelism on GPUs before Blackwell. With it Dobb's collectives are
    # launched by the program's own thread: docs/performance.md.
    EXPORTED+=(CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}")
    LAUNCH=("$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$GPUS_PER_NODE")
}

# train [ARGUMENT...]: start the script in $SCRIPT with MODEL, LAYOUT and everything that is not about one example.
train() {
    local data precision command
    if [ "${MOCK_DATA:-0}" = 1 ]; then
        data=(--mock-data --tokenizer-type NullTokenizer --vocab-size 32000)
        if on_cpu; then data=(--mock-data --tokenizer-type NullTokenizer --vocab-size 127); fi
    else
        data=(--data-path "$DATA_PATH" --split 99,1,0
            --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER_MODEL")
    fi
    if on_cpu; then
        precision=(--distributed-backend gloo --transformer-impl local --use-cpu-initialization
            --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm --no-rope-fusion)
    else
        precision=(--transformer-impl transformer_engine --distributed-timeout-minutes 30)
    fi
    command=("${LAUNCH[@]}" -m megatron_dobb "$MEGATRON_LM/$SCRIPT"
        --optimizer dobb --use-distributed-optimizer --dobb-blocks "$BLOCKS"
        --overlap-grad-reduce --overlap-param-gather
        --lr "$LR" --min-lr 0 --lr-decay-style cosine --lr-warmup-iters "$WARMUP_ITERS"
        --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
        --train-iters "$TRAIN_ITERS" --micro-batch-size "$MICRO_BATCH" --global-batch-size "$GLOBAL_BATCH"
        --seq-length "$SEQUENCE" --max-position-embeddings "$SEQUENCE"
        --bf16 --log-interval 10 --eval-interval 1000 --eval-iters 20 --num-workers 2
        --ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable --save-interval "$SAVE_INTERVAL"
        --save "$CHECKPOINTS" --load "$CHECKPOINTS"
        "${data[@]}" "${precision[@]}" "${MODEL[@]}" "${LAYOUT[@]}" ${SHRINK[@]+"${SHRINK[@]}"} "$@")
    # So that pretrain_gpt.py finds its neighbours, and every process this package where it is not installed.
    command=(env PYTHONPATH="$MEGATRON_LM:$EXAMPLES/..${PYTHONPATH:+:$PYTHONPATH}"
        "${EXPORTED[@]}" "${command[@]}")
    if [ "${DRY_RUN:-0}" = 1 ]; then
        printf '%q ' "${command[@]}"
        echo
        return
    fi
    "${command[@]}"
}
