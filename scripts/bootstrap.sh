#!/bin/sh
# Makes an environment: `bootstrap.sh` makes .venv (jaxserve and its tools), `bootstrap.sh torch` makes .venv-torch (the peer),
# `bootstrap.sh aot` makes .venv-aot (compiling for a GPU without one), `bootstrap.sh lm-eval` makes .venv-lm-eval,
# `bootstrap.sh clients` makes .venv-clients (other makers' clients of our server).
#
# Needs nothing but a Python. With nothing changed it returns at once; a changed pyproject.toml or constraints file is
# installed; an install that was cut short, or a tree that moved, starts over; two at once wait for each other.
#   PYTHON=<path>         the interpreter to use, instead of the search below
#   TORCH_PIP_ARGS=<args> pip arguments for .venv-torch and .venv-lm-eval, such as the index of a CPU build of torch
set -eu
unset CDPATH
cd -- "$(dirname -- "$0")/.."

case "${1:-jax}" in
jax)
    venv=.venv minors="12 13 14" inputs="pyproject.toml constraints/jax.txt"
    size="about 200 MB to fetch, a minute or two"
    ;;
torch)
    # The goldens' environment may be older than ours: transformers runs on 3.11, and not every index has torch for the newest.
    venv=.venv-torch minors="11 12 13 14" inputs="constraints/torch.txt"
    size="about 300 MB to fetch, a few minutes"
    ;;
aot)
    # What compiles for CUDA where there is none: jax's plugin, ptxas, libdevice and a disassembler, but no library that only runs.
    venv=.venv-aot minors="12 13 14" inputs="constraints/jax.txt"
    size="about 450 MB to fetch, a minute or two"
    ;;
lm-eval)
    # lm-eval with its own transformers: a client of our server, and the peer whose scores it must get.
    venv=.venv-lm-eval minors="11 12 13 14" inputs="constraints/torch.txt constraints/lm_eval.txt"
    size="about 450 MB to fetch, a few minutes"
    ;;
clients)
    # Clients beside what .venv has, with its Python: their wishes about versions are not its own.
    venv=.venv-clients minors="12 13 14" inputs="constraints/clients.txt" PYTHON="$(pwd -P)/.venv/bin/python"
    size="about 30 MB to fetch, some seconds"
    ;;
*)
    echo "bootstrap.sh: unknown environment '$1'; it makes jax (.venv), torch, aot, lm-eval or clients (.venv-<name>)" >&2
    exit 2
    ;;
esac
oldest=${minors%% *}
python=${PYTHON:-}
looked=""

say() { echo "jaxserve: $*" >&2; }

# try WHAT PATH: takes PATH as $python if it runs, is new enough and can make an environment; else notes why not.
# A version is asked for, never guessed from a name: pyenv's shims exist for versions that don't run.
try() {
    if found=$("$2" -c "
import sys
version = '%d.%d.%d' % sys.version_info[:3]
if sys.version_info < (3, $oldest): sys.exit('Python ' + version + ', too old')
try: import ensurepip, venv
except ImportError: sys.exit('Python ' + version + ' without venv (Debian, Ubuntu: apt install python3.%d-venv)' % sys.version_info[1])
print(version)" 2>&1); then
        python=$2
        return 0
    fi
    looked="$looked
  $1: $(echo "$found" | head -n 1)"
    return 1
}

# Sets $python to the first interpreter that will do; says everywhere it looked if none does.
find_python() {
    if [ -n "$python" ]; then
        try "PYTHON=$python" "$python" && return 0
    else
        for name in $(printf 'python3.%s ' $minors) python3 python; do
            if path=$(command -v "$name"); then
                try "$name on PATH ($path)" "$path" && return 0
            else
                looked="$looked
  $name: not on PATH"
            fi
        done
        for versions in "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions" "${XDG_DATA_HOME:-${HOME:-}/.local/share}/uv/python"; do
            for minor in $minors; do
                for path in "$versions"/3."$minor".*/bin/python3 "$versions"/cpython-3."$minor".*/bin/python3; do
                    [ -x "$path" ] && try "$path" "$path" && return 0
                done
            done
            looked="$looked
  $versions: $(ls "$versions" 2>/dev/null | tr '\n' ' ' | grep . || echo 'not there')"
        done
    fi
    say "needs Python 3.$oldest or newer to make $venv, and found none:$looked
Install one, or name one that lies elsewhere: make PYTHON=/path/to/python3.$oldest"
    return 1
}

# What the finished environment was made from, word for word: the place (an environment can't move) and the files.
wanted() {
    echo "$(pwd -P)/$venv"
    cat scripts/bootstrap.sh $inputs
}

# Whether $venv runs, and with the Python asked for if one was.
usable() {
    which="import sys; print(sys.base_prefix, sys.version)"
    have=$("$venv/bin/python" -c "$which" 2>/dev/null) || return 1
    [ -z "${PYTHON:-}" ] || [ "$have" = "$("$PYTHON" -c "$which" 2>&1)" ]
}

current() { wanted | cmp -s - "$venv/stamp" && usable; }

# Quiet: what pip says goes to a file, whose end is shown if it fails.
pip() { "$venv/bin/python" -m pip --disable-pip-version-check install --progress-bar off "$@" >>"$venv/pip.log" 2>&1; }

install() {
    case $venv in
    .venv)
        pip -c constraints/jax.txt hatchling && # first, so that building jaxserve itself is pinned too
            pip -c constraints/jax.txt --no-build-isolation -e '.[dev]'
        ;;
    .venv-torch) pip ${TORCH_PIP_ARGS:-} -r constraints/torch.txt ;;
    .venv-lm-eval) pip ${TORCH_PIP_ARGS:-} -r constraints/torch.txt -r constraints/lm_eval.txt ;;
    .venv-clients)
        pip --no-deps -r constraints/clients.txt &&
            "$venv/bin/python" -c "
import subprocess, sysconfig
place = 'import sysconfig; print(sysconfig.get_path(\"purelib\"))'
beside = subprocess.check_output(['.venv/bin/python', '-c', place], text=True).strip()
open(sysconfig.get_path('purelib') + '/beside.pth', 'w').write(f'import site; site.addsitedir({beside!r})\n')"
        ;;
    .venv-aot) pip -c constraints/jax.txt jax flax chex absl-py jax-cuda13-plugin nvidia-cuda-nvcc nvidia-cuda-nvdisasm ;;
    esac
}

# The kernels for CPUs are compiled anew where their sources have changed: seconds, or nothing. Without a compiler XLA computes.
finish() {
    [ "$venv" != .venv ] || "$venv/bin/python" kernels/cpu/build.py
    exit 0
}

current && finish
find_python

# The lock belongs to descriptor 9, which this shell and its children hold until they end. flock(1) isn't everywhere; fcntl is.
exec 9>"$venv.lock"
"$python" -c "
import fcntl, sys
try: fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    sys.stderr.write('jaxserve: another set-up of $venv is running; waiting for it\n')
    fcntl.flock(9, fcntl.LOCK_EX)"
current && finish

started=$(date +%s)
if [ "$(head -n 1 "$venv/stamp" 2>/dev/null)" = "$(wanted | head -n 1)" ] && usable; then
    say "updating $venv: what it is made from has changed"
else # no stamp: never finished. pip can't tell a half-copied package from a whole one, so start over.
    say "making $venv with Python $found ($python)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi
rm -f "$venv/stamp" "$venv/pip.log"
wanted >"$venv/stamp.new" # before the install: a file that changes during it is noticed next time
say "installing the pinned packages ($size the first time)"
if ! install; then
    tail -n 12 "$venv/pip.log" >&2
    say "could not install into $venv: the end of $venv/pip.log is above. The first install needs a package index."
    if [ "$venv" = .venv-torch ] || [ "$venv" = .venv-lm-eval ]; then
        say "torch must be a CPU build; if your index has none, name one: make <target> TORCH_PIP_ARGS='--extra-index-url <index>'"
    fi
    exit 1
fi
mv "$venv/stamp.new" "$venv/stamp"
say "$venv is ready ($(($(date +%s) - started)) s)"
finish
