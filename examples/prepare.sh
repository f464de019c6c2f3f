# shellcheck shell=sh
# For quickstart.sh and tests/run.sh, which source it with $me set to their name: finds Python, installs what is missing,
# makes virtual environments and builds outside the checkout. Whatever fails says so in one line and ends the script.

fail() {
    echo "$me: $*" >&2
    exit 1
}

show_and_fail() { # a log is shown before the line that says what failed
    cat "$scratch/log" >&2
    fail "$@"
}

runs() { # the interpreter $1 runs the program $2
    "$1" -I -c "$2" >/dev/null 2>&1
}

scratch=$(mktemp -d) || fail "no temporary directory could be made"
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
unset PYTHONHOME PYTHONPATH

new_enough='import sys; sys.exit(sys.version_info < (3, 11))'

# Sets $python: the first new enough one that can make virtual environments and compile, or that apt-get can complete.
find_python() {
    has_venv='import ensurepip, venv'
    has_headers='import os, sysconfig; os.stat(os.path.join(sysconfig.get_path("include"), "Python.h"))'
    is_debians='import os, subprocess, sys
sys.exit(subprocess.call(["dpkg", "-S", os.path.realpath(sys.executable)]))'
    python=''
    incomplete=''
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        runs "$candidate" "$new_enough" || continue
        if runs "$candidate" "$has_venv" && runs "$candidate" "$has_headers"; then
            python=$candidate
            return
        fi
        [ -n "$incomplete" ] || incomplete=$candidate
        if [ -z "$python" ] && runs "$candidate" "$is_debians"; then
            python=$candidate
        fi
    done
    [ -n "$python$incomplete" ] ||
        fail "this needs Python 3.11 or newer; here is $(command -v python3 >/dev/null && python3 --version || echo none)"
    [ -n "$python" ] || fail "$(command -v "$incomplete") lacks Python.h or ensurepip: install its development files"
}

# Installs a compiler and Python's headers and venv where they are missing, and the packages that bring the programs that
# are named as program:package.
install_missing() {
    missing=''
    if ! printf '#include <stdio.h>\n#include <linux/bpf.h>\n' | gcc -E - >/dev/null 2>&1; then
        missing="gcc libc6-dev" # the latter brings the kernel's headers along
    fi
    package=$("$python" -I -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
    runs "$python" "$has_headers" || missing="$missing $package-dev"
    runs "$python" "$has_venv" || missing="$missing $package-venv"
    for pair in "$@"; do
        command -v "${pair%:*}" >/dev/null || missing="$missing ${pair#*:}"
    done
    [ -n "$missing" ] || return 0
    missing=${missing# }
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        fail "install these first, or what your distribution has for them: $missing"
    fi
    echo "$me: installing $missing ..."
    # An update that fails for one of many sources is no reason to give up.
    DEBIAN_FRONTEND=noninteractive apt-get -q update >"$scratch/log" 2>&1 || :
    # shellcheck disable=SC2086  # several words
    DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=120 install --no-install-recommends $missing \
        >>"$scratch/log" 2>&1 || show_and_fail "apt-get cannot install $missing"
}

# What build_single_file.sh needs, for install_missing.
single_file_needs() {
    echo ldd:libc-bin musl-gcc:musl-tools zstd:zstd
    [ -e /usr/include/zstd.h ] || echo zstd.h:libzstd-dev
}

# Makes the virtual environment $1, unless it is there and works.
make_venv() {
    if ! runs "$1/bin/python" "$new_enough" || ! runs "$1/bin/python" 'import pip'; then
        rm -rf "$1"
        "$python" -I -m venv "$1" >"$scratch/log" 2>&1 || show_and_fail "cannot make a virtual environment in $1"
    fi
}

# Calls pip of the virtual environment $1, quietly, in the checkout; setuptools would otherwise build there.
pip_quietly() {
    environment=$1
    shift
    printf '[build]\nbuild_base=%s\n[egg_info]\negg_base=%s\n' "$scratch" "$scratch" >"$scratch/build.cfg"
    DIST_EXTRA_CONFIG=$scratch/build.cfg PIP_DISABLE_PIP_VERSION_CHECK=1 \
        "$environment/bin/python" -I -m pip -q "$@" >"$scratch/log" 2>&1 ||
        show_and_fail "pip cannot $1 what is needed; is there a network, and a C compiler?"
}
