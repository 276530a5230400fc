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
NEEDED_GB=8 # PyTorch with its CUDA libraries, unpacked and on the way there

say() { printf '%s\n' "$*" >&2; }

# Prints "3.12" and the like, if the command is a Python that this project supports.
supported_version() {
    "$1" -c 'import sys; v = sys.version_info; print("%d.%d" % v[:2]); sys.exit(not (3, 12) <= v[:2] < (4,))' 2>/dev/null
}

can_make_venvs() { "$1" -c 'import venv, ensurepip' 2>/dev/null; }

# Commands that may be a Python, the likeliest first. Python 3.12 and 3.13 come before 3.14 because Megatron-Core
# publishes compiled packages for them.
python_candidates() {
    local version
    echo "$VENV_PYTHON"
    for version in 3.12 3.13 3.14; do
        echo "python$version"
        ls -d \
            "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version"*/bin/python \
            "${UV_PYTHON_INSTALL_DIR:-$HOME/.local/share/uv/python}/cpython-$version"*/bin/python3 \
            "/opt/homebrew/bin/python$version" "/usr/local/bin/python$version" "/usr/bin/python$version" \
            "/Library/Frameworks/Python.framework/Versions/$version/bin/python3" \
            2>/dev/null || true
    done
    echo python3
    echo python
    ls -d \
        "${CONDA_PREFIX:-/nonexistent}/bin/python" \
        "$HOME"/{miniconda3,anaconda3,miniforge3,mambaforge}{,/envs/*}/bin/python \
        /opt/{conda,miniconda3,anaconda3}{,/envs/*}/bin/python \
        2>/dev/null || true
}

# Prints the interpreter to use; explains what to install where there is none.
find_python() {
    local candidate version seen="" without_venv=""
    if [ -n "${PYTHON:-}" ]; then
        if ! supported_version "$PYTHON" >/dev/null; then
            say "error: PYTHON=$PYTHON is not a working Python >= 3.12 ($("$PYTHON" --version 2>/dev/null || echo "it does not run"))."
            say "       Unset PYTHON to have one looked for, or give another."
            return 1
        fi
        echo "$PYTHON"
        return 0
    fi
    while IFS= read -r candidate; do
        if ! version=$(supported_version "$candidate"); then
            [ -n "$version" ] && seen="$seen $candidate ($version)"
            continue
        fi
        if [ "$candidate" = "$VENV_PYTHON" ] || can_make_venvs "$candidate"; then
            echo "$candidate"
            return 0
        fi
        without_venv="$candidate"
    done < <(python_candidates)

    if [ -n "$without_venv" ]; then
        version=$(supported_version "$without_venv")
        say "error: $without_venv is Python $version, but it lacks the venv module."
        say "       Install it (Debian, Ubuntu: sudo apt install python$version-venv) and run this again."
        return 1
    fi
    say "error: no Python >= 3.12 found.${seen:+ Too old:$seen.}"
    say "       Looked on PATH and for pyenv, uv, conda and Homebrew. Install one, for example by"
    say "         sudo apt install python3.12 python3.12-venv     (Ubuntu 24.04 and later)"
    say "         uv python install 3.12                          (https://docs.astral.sh/uv)"
    say "         pyenv install 3.12"
    say "         conda create -n py312 python=3.12"
    say "       and run this again, or point to one with PYTHON=/path/to/python."
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
    local python=$1 extra=$2
    local wanted stamp="$VENV/installed-$extra" log="$VENV/install-errors.log" name
    wanted=$(installed_state)
    if [ -x "$VENV_PYTHON" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return 0
    fi
    if ! supported_version "$VENV_PYTHON" >/dev/null; then
        if "$VENV_PYTHON" --version >/dev/null 2>&1; then
            say "error: $VENV has $("$VENV_PYTHON" --version), and Python >= 3.12 is needed; remove that folder."
            return 1
        fi # otherwise it is missing, or its base was removed
        enough_disk || return 1
        say "Making .venv with $("$python" --version) ($python) ..."
        rm -rf "$VENV"
        if ! "$python" -m venv "$VENV"; then
            say "error: $python could not make a virtual environment in $VENV; see its message above."
            return 1
        fi
    elif ! compgen -G "$VENV/installed-*" >/dev/null; then
        enough_disk || return 1
    fi
    say "Installing megatron_dobb[$extra] and what it needs into .venv (a download of 2 to 3 GB the first time) ..."
    # PyTorch first: the extension is compiled against it, and only where it is already there.
    local requirement requirements=()
    while IFS= read -r requirement; do requirements+=("$requirement"); done < <(runtime_requirements)
    name=$(sed -n 's/^name = "\(.*\)"$/\1/p' "$ROOT/pyproject.toml")
    # Where another extra has installed this very state, the extension is compiled: what is missing is the extra's.
    if grep -qsxF "$wanted" "$VENV"/installed-* && pip_install "$log" "$name[$extra]"; then
        echo "$wanted" >"$stamp"
        return 0
    fi
    if ! pip_install "$log" "${requirements[@]}" || ! pip_install "$log" --editable "$ROOT[$extra]"; then
        explain_pip_failure "$log"
        return 1
    fi
    echo "$wanted" >"$stamp"
}

# The line of pyproject.toml that says which PyTorch is needed.
torch_requirement() { sed -n 's/^ *"\(torch[<>=][^"]*\)",$/\1/p' "$ROOT/pyproject.toml"; }

runtime_requirements() {
    "$VENV_PYTHON" -c 'import sys, tomllib
with open(sys.argv[1], "rb") as file: print(*tomllib.load(file)["project"]["dependencies"], sep="\n")' "$ROOT/pyproject.toml"
}

# pip_install LOG ARGUMENT...: its messages of errors also go to the log.
pip_install() (
    local log=$1
    shift
    set -o pipefail
    # Only standard error goes through the pipe: standard output stays the terminal, where pip shows its progress.
    { "$VENV_PYTHON" -m pip install --disable-pip-version-check "$@" 2>&1 >&3 | tee "$log" >&2; } 3>&1
)

# What an installation depends on: a change of it means that pip must run again.
installed_state() {
    (
        cd "$ROOT" || exit 1
        cat pyproject.toml setup.py build_support/*.py ./*.pth 2>/dev/null
        find build_support csrc -type f ! -name '*.pyc' 2>/dev/null | sort | while IFS= read -r file; do cat "$file"; done
    ) | cksum
}

enough_disk() {
    local free_kb
    free_kb=$(df -Pk "$ROOT" | awk 'NR == 2 { print $4 }')
    if [ "$free_kb" -lt $((NEEDED_GB * 1000 * 1000)) ]; then
        say "error: $((free_kb / 1000 / 1000)) GB free on the disk of $ROOT; the installation needs about $NEEDED_GB GB."
        say "       Free some space, or clone this repository on another disk."
        return 1
    fi
}

explain_pip_failure() {
    local network_error="ConnectionError|ConnectTimeout|ReadTimeout|ProxyError|SSLError|timed out|name resolution"
    network_error="$network_error|onnection (refused|reset|broken|aborted)|unreachable|from versions: none"
    say ""
    say "error: pip could not install what megatron_dobb needs; its messages are above and in ${1#"$ROOT"/}."
    if grep -qiE "no space left|disk quota" "$1"; then
        say "       The disk is full: about $NEEDED_GB GB are needed here, and room in \${TMPDIR:-/tmp} and pip's cache."
    elif grep -qE "$network_error" "$1"; then
        say "       pip did not reach the package index. Check the network; behind a proxy set HTTPS_PROXY, and for a"
        say "       mirror PIP_INDEX_URL. What was already downloaded is kept: just run this again."
    elif grep -qiE "no matching distribution|requires-python" "$1"; then
        say "       A package has no version for this Python or platform. Megatron-Core is published compiled for"
        say "       Linux on x86-64 with Python 3.12 and 3.13: try PYTHON=python3.12 (and remove .venv first)."
    elif grep -qiE "gcc|g\+\+|compiler|build wheel|subprocess-exited" "$1"; then
        say "       A package had to be compiled. Megatron-Core is published compiled for Linux on x86-64 with Python"
        say "       3.12 and 3.13; elsewhere a C++ compiler is needed (Debian, Ubuntu: sudo apt install g++)."
    fi
}
