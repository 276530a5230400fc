#!/usr/bin/env bash
# Run the tests that need no GPU.
#
#   tests/run.sh                        installs into .venv (once); formatting, lint, types, then the quick tests
#   tests/run.sh --all                  the same with all tests: what continuous integration runs
#   tests/run.sh tests/unit -k layout   only pytest, with these arguments
#   tests/run.sh -m gpu                 the tests that need a GPU
set -euo pipefail

# shellcheck source=../tools/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/../tools/environment.sh"

selection="not gpu and not full"
if [ "${1:-}" = --all ]; then
    if [ $# -gt 1 ]; then
        say "error: --all takes no further arguments, and was given $2; without --all they go to pytest, which then also"
        say "       runs the tests that only --all runs: tests/run.sh $2"
        exit 2
    fi
    selection="not gpu"
    shift
fi

python=$(find_python)
without_cuda_unless_a_gpu_is_there # tests/functional/test_cuda_build.py compiles the CUDA kernels
prepare_environment "$python" test
cd "$ROOT"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # the tests run several processes at once, on small matrices

if [ $# -eq 0 ]; then
    "$VENV_PYTHON" -m ruff check .
    "$VENV_PYTHON" -m ruff format --check .
    "$VENV_PYTHON" -m mypy
    find csrc tests -type f \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) \
        -exec "$VENV/bin/clang-format" --dry-run -Werror {} +
fi

# pytest takes the last -m. With one of the caller's own, GPUs stay visible.
case " $* " in
*" -m "*) ;;
*) export CUDA_VISIBLE_DEVICES="" ;;
esac
if [ $# -gt 0 ]; then
    exec "$VENV_PYTHON" -m pytest -m "not gpu" "$@"
fi

# Files of tests run side by side (tests/conftest.py). The ranks of a test use several cores at some times and one at
# others, and sleep while they wait: two such files fill two cores, and more need more.
cores=$(env -u OMP_NUM_THREADS nproc) # which takes that variable for the number of cores
at_most_8() { echo "$(($1 < 8 ? $1 : 8))"; }
status=0
"$VENV_PYTHON" -m pytest -m "$selection" -n "$(at_most_8 "$cores")" tests/emulation tests/unit || status=$?
"$VENV_PYTHON" -m pytest -m "$selection" -n "$(at_most_8 $((cores < 2 ? 1 : cores < 8 ? 2 : cores / 4)))" \
    --durations=15 tests/distributed tests/functional || status=$?
exit $status
