# Sourced by examples/quickstart.sh and tests/run.sh: finds a Python and installs this clone into .venv.
#
#   . tools/environment.sh
#   python=$(find_python) || exit 1
#   prepare_environment "$python" test || exit 1      # leaves the interpreter in $VENV_PYTHON
#
# PYTHON=/path/to/python in the environment chooses the interpreter. Works with bash 3.2 and later.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV="$ROOT/.venv"
VENV_PYTHON="$VENV/bin/python"

say() { printf '%s\n' "$*" >&2; }

is_supported() { "$1" -c 'import sys; sys.exit(not (3, 12) <= sys.version_info[:2] < (4,))' 2>/dev/null; }

# Prints the interpreter to use; says what to install where there is none. Python 3.12 and 3.13 come before 3.14
# because Megatron-Core publishes compiled packages for them. A pattern without a match fails as any other name does.
find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        is_supported "$PYTHON" && echo "$PYTHON" && return
        say "error: PYTHON=$PYTHON is not a working Python >= 3.12 ($("$PYTHON" --version 2>/dev/null || echo "it does not run"))."
        say "       Unset PYTHON to have one looked for, or give another."
        return 1
    fi
    for candidate in "$VENV_PYTHON" python3.12 python3.13 python3.14 python3 python \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python \
        "${UV_PYTHON_INSTALL_DIR:-$HOME/.local/share/uv/python}"/cpython-3.*/bin/python3 \
        /{opt/homebrew,usr/local,usr}/bin/python3.1[2-9] \
        {"$HOME",/opt}/{conda,miniconda3,anaconda3,miniforge3,mambaforge}{,/envs/*}/bin/python; do
        is_supported "$candidate" && echo "$candidate" && return
    done
    say "error: no Python >= 3.12 found on PATH or among those of pyenv, uv, conda and Homebrew. Install one, such as"
    say "       python3.12 and python3.12-venv of Ubuntu 24.04, or with 'uv python install 3.12'"
    say "       (https://docs.astral.sh/uv), or point to one with PYTHON=/path/to/python."
    return 1
}

# CUDA kernels take minutes to compile, and .venv has no use for them without a GPU.
without_cuda_unless_a_gpu_is_there() {
    if ! nvidia-smi -L >/dev/null 2>&1; then
        export MEGATRON_DOBB_NO_CUDA="${MEGATRON_DOBB_NO_CUDA:-1}"
    fi
}

# prepare_environment PYTHON EXTRA: makes .venv unless it is there and installs this clone with the extra.
prepare_environment() {
    local python=$1 extra=$2 stamp="$VENV/installed-$2" wanted requirements name
    wanted=$(installed_state)
    if is_supported "$VENV_PYTHON"; then
        [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || return 0
    elif "$VENV_PYTHON" --version >/dev/null 2>&1; then
        say "error: $VENV has $("$VENV_PYTHON" --version), and Python >= 3.12 is needed; remove that folder."
        return 1
    else # it is missing, or its base was removed
        say "Making .venv with $("$python" --version) ($python) ..."
        rm -rf "$VENV"
        if ! "$python" -m venv "$VENV"; then
            rm -rf "$VENV" # which has an interpreter, but no pip
            say "error: $python could not make a virtual environment in $VENV; see its message above."
            return 1
        fi
    fi
    say "Installing megatron_dobb[$extra] and what it needs into .venv (a download of 2 to 3 GB the first time) ..."
    # PyTorch first: the extension is compiled against it, and only where it is already there.
    requirements=$("$VENV_PYTHON" -c 'import sys, tomllib
with open(sys.argv[1], "rb") as file: print(*tomllib.load(file)["project"]["dependencies"])' "$ROOT/pyproject.toml")
    name=$(sed -n 's/^name = "\(.*\)"$/\1/p' "$ROOT/pyproject.toml")
    # Where another extra has installed this very state, the extension is compiled: what is missing is the extra's.
    if grep -qsxF "$wanted" "$VENV"/installed-* && pip_install "$name[$extra]"; then
        echo "$wanted" >"$stamp"
        return 0
    fi
    # shellcheck disable=SC2086  # several words
    if ! pip_install $requirements || ! pip_install --editable "$ROOT[$extra]"; then
        say "error: pip could not install what megatron_dobb needs; its messages are above. It takes about 8 GB of disk;"
        say "       what was already downloaded is kept. Megatron-Core is published compiled for Linux on x86-64 with"
        say "       Python 3.12 and 3.13; elsewhere a C++ compiler is needed."
        return 1
    fi
    echo "$wanted" >"$stamp"
}

pip_install() { "$VENV_PYTHON" -m pip install --disable-pip-version-check "$@"; }

# What an installation depends on: a change of it means that pip must run again.
installed_state() (
    cd "$ROOT" || exit 1
    find pyproject.toml setup.py ./*.pth build_support csrc -type f ! -name '*.pyc' | LC_ALL=C sort | xargs cat | cksum
)
