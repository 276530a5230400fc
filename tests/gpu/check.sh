#!/usr/bin/env bash
# Everything that needs a GPU, in one run of about five minutes: build, tests, compute-sanitizer, benchmarks.
#
#   tests/gpu/check.sh [REPORT_FOLDER]
#
# Uses the Python of PYTHON (default: python3), which must have PyTorch with CUDA, pytest, hypothesis and ninja; builds
# the extension inside this clone for the GPUs that are there. Writes its logs and figures to the folder
# (default: gpu-report) and ends with an error if a test, the sanitizer or a benchmark failed.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
if ! report=$(mkdir -p "${1:-gpu-report}" && cd "${1:-gpu-report}" && pwd); then
    echo "error: cannot write to the folder ${1:-gpu-report}; give another as the argument"
    exit 1
fi
python=${PYTHON:-python3}
failed=()

run() { # NAME COMMAND...: runs it into the log, and remembers a failure
    local name=$1 begin=$SECONDS
    shift
    if "$@" >"$report/$name.log" 2>&1; then
        echo "ok      $name ($((SECONDS - begin)) s)"
    else
        echo "FAILED  $name ($((SECONDS - begin)) s): see $report/$name.log"
        tail -n 15 "$report/$name.log"
        failed+=("$name")
    fi
}

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
if ! "$python" -c 'import torch; assert torch.cuda.is_available(), "PyTorch sees no GPU"' 2>"$report/torch.log"; then
    echo "error: $python cannot use a GPU: $(tail -n 1 "$report/torch.log"). Set PYTHON to one that can."
    exit 1
fi
"$python" -c 'import torch; print(torch.__version__, torch.cuda.get_device_name(), torch.version.cuda)'

run build "$python" setup.py build_ext --inplace
[ ${#failed[@]} -eq 0 ] || exit 1
if ! "$python" -c '
import megatron_dobb
info = megatron_dobb.build_info()
print(info)
raise SystemExit(info.cuda != "cuda")'; then
    echo "error: the build has no CUDA kernels; see $report/build.log"
    exit 1
fi

run tests "$python" -m pytest -m gpu tests/gpu -q -p no:cacheprovider

sanitizer=$(command -v compute-sanitizer || ls "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer" 2>/dev/null)
if [ -n "$sanitizer" ]; then
    for tool in memcheck racecheck synccheck; do
        run "sanitizer-$tool" "$sanitizer" --tool "$tool" --error-exitcode 9 --kernel-regex kns=dobb \
            "$python" tests/gpu/sanitized.py
    done
else
    echo "left out: compute-sanitizer is not installed"
fi

for model in gpt2-small gpt2-large gpt2-xl llama3-8b; do
    layers=$([ "$model" = llama3-8b ] && echo 8 || echo 0)
    run "bench-$model" "$python" tools/bench.py --model "$model" --blocks 16 --device cuda --steps 20 --slow-steps 3 \
        $([ "$layers" = 0 ] || echo --layers "$layers") --json "$report/bench-$model.json"
    cat "$report/bench-$model.log"
done

if [ ${#failed[@]} -ne 0 ]; then
    echo "failed: ${failed[*]}"
    exit 1
fi
echo "all checks passed; figures in $report"
