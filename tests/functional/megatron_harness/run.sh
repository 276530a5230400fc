#!/usr/bin/env bash
# Run cases through Megatron-LM's own functional-test harness, on a node of 8 GPUs.
#
#   export MEGATRON_LM=/opt/megatron-lm          # a checkout, in an environment that runs its functional tests
#   tests/functional/megatron_harness/run.sh gpt_dp8_overlap moe_ep4_dp8     # some, or: all
#   tests/functional/megatron_harness/run.sh --record all                    # keep this node's values as golden ones
#
# Each case is trained by run_ci_test.sh with Megatron's unmodified pretrain_gpt.py, and then check_run.py reads the
# logs. Where golden_values_$ENVIRONMENT_$PLATFORM.json lies beside a case, the harness compares with it as well.
#   OUT (default: ./megatron_harness_out), ENVIRONMENT (dev), PLATFORM (dgx_h100), GPUS_PER_NODE (8),
#   SCRIPT (pretrain_gpt.py), CASES (the folder cases/ beside this file)
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
CASES="${CASES:-$here/cases}" OUT="${OUT:-$PWD/megatron_harness_out}" GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
golden_name="golden_values_${ENVIRONMENT:-dev}_${PLATFORM:-dgx_h100}.json"
YQ=/usr/local/bin/yq # where the harness looks for it

fail() {
    echo "error: $*" >&2
    exit 2
}

record=0
if [ "${1:-}" = --record ]; then
    record=1
    shift
fi
[ $# -gt 0 ] || fail "no case given. Give names, or all; there are: $(cd "$CASES" && echo *)"
cases=("$@")
if [ "$1" = all ]; then cases=($(cd "$CASES" && echo *)); fi
for name in "${cases[@]}"; do
    [ -f "$CASES/$name/model_config.yaml" ] || fail "there is no case $name. There are: $(cd "$CASES" && echo *)"
done

[ -n "${MEGATRON_LM:-}" ] || fail "MEGATRON_LM is not set. It is a Megatron-LM checkout: export MEGATRON_LM=/opt/megatron-lm"
harness="$MEGATRON_LM/tests/functional_tests"
[ -f "$harness/shell_test_utils/run_ci_test.sh" ] ||
    fail "MEGATRON_LM=$MEGATRON_LM has no tests/functional_tests/shell_test_utils/run_ci_test.sh. Give a whole checkout"
for tool in "$YQ" uv envsubst; do
    command -v "$tool" >/dev/null ||
        fail "the harness needs $tool (yq: github.com/mikefarah/yq version 4, at $YQ; envsubst: package gettext-base)"
done
cd "$MEGATRON_LM"
# pretrain_gpt.py is not told of Dobb: the file megatron_dobb_autoload.pth does that in every interpreter.
MEGATRON_DOBB_AUTOLOAD=1 uv run --no-sync python -c 'import sys; sys.exit("megatron_dobb.autoload" not in sys.modules)' ||
    fail "megatron_dobb is not installed where the harness runs: uv pip install --no-build-isolation -e FOLDER"
# /tmp/checkpoints is a fixed path of the harness itself.
if [ -n "$(ls -A /tmp/checkpoints 2>/dev/null)" ]; then
    fail "/tmp/checkpoints is not empty, and the harness would continue from it: move it away"
fi

failed=()
for name in "${cases[@]}"; do
    echo "== $name"
    output="$OUT/$name" golden="$CASES/$name/$golden_name"
    rm -rf "$output"
    mkdir -p "$output/tensorboard" "$output/checkpoints"
    config="$output/model_config.yaml"
    cp "$CASES/$name/model_config.yaml" "$config" # the harness writes into it
    if [ "$record" = 1 ] || [ ! -f "$golden" ]; then "$YQ" -i '.ENV_VARS.SKIP_PYTEST = 1' "$config"; fi
    status=ok
    GPUS_PER_NODE="$GPUS_PER_NODE" bash "$harness/shell_test_utils/run_ci_test.sh" \
        TRAINING_SCRIPT_PATH="${SCRIPT:-pretrain_gpt.py}" TRAINING_PARAMS_PATH="$config" GOLDEN_VALUES_PATH="$golden" \
        OUTPUT_PATH="$output" TENSORBOARD_PATH="$output/tensorboard" \
        CHECKPOINT_SAVE_PATH="$output/checkpoints" CHECKPOINT_LOAD_PATH=/tmp/checkpoints/ \
        DATA_PATH="$output" DATA_CACHE_PATH="$output/cache" N_REPEAT=1 >"$output/harness.log" 2>&1 || status=FAILED
    uv run --no-sync python "$here/check_run.py" "$CASES/$name/model_config.yaml" "$output" \
        --gpus "$GPUS_PER_NODE" || status=FAILED
    if [ "$status" = FAILED ]; then
        failed+=("$name")
        echo "FAILED  $name: see $output/harness.log"
    elif [ "$record" = 1 ]; then
        first="$output/1/tensorboard" # the harness puts a folder for the repeat before the last part
        [ ! -d "$first/run_1" ] || first="$first/run_1"
        PYTHONPATH="$MEGATRON_LM" uv run --no-sync python \
            "$harness/python_test_utils/get_test_results_from_tensorboard_logs.py" --logs-dir "$first" \
            --train-iters "$("$YQ" '.MODEL_ARGS."--train-iters"' "$config")" --output-path "$golden" \
            --is-normal-test --step-size 1
        [ -f "$golden" ] || fail "$name left no TensorBoard log in $first: is tensorboard installed?"
        echo "recorded $golden"
    fi
done
[ ${#failed[@]} = 0 ] || fail "${#failed[@]} of ${#cases[@]} cases failed: ${failed[*]}"
