#!/usr/bin/env bash
# Pretrain a small GPT with Dobb and with AdamW on two CPU processes and compare the loss curves.
#
#   examples/quickstart.sh              installs into .venv (once), then trains: about ten minutes on two cores
#   examples/quickstart.sh --help       options
set -euo pipefail

# shellcheck source=../tools/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/../tools/environment.sh"

quickstart="$ROOT/examples/quickstart.py"
python=$(find_python)
case " $* " in
*" -h "* | *" --help "*) exec "$python" "$quickstart" --help ;;
esac
"$python" "$quickstart" --check-options "$@" # a misspelt option should not cost an installation
without_cuda_unless_a_gpu_is_there
prepare_environment "$python" examples
exec "$VENV_PYTHON" "$quickstart" "$@"
