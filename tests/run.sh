#!/bin/sh
# Builds the wheel and tests it: generated code, formatting, lint, types, all tests, two minutes of soak.
#
#     sh tests/run.sh [argument of pytest ...]
#
# As root everything is run; otherwise what needs root is left out, and named at the end. AFXDPD_REQUIRE_KERNEL=1 makes it
# a failure if a kernel test cannot run. Everything is installed into .venv-test in this checkout.
set -eu

me=tests
checkout=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
. "$checkout/examples/prepare.sh"

find_python
packages="ip:iproute2 ethtool:ethtool unshare:util-linux nsenter:util-linux setpriv:util-linux mount:mount"
if [ "$(id -u)" = 0 ]; then # who else runs the tests does without the one file and the image
    packages="$packages skopeo:skopeo umoci:umoci $(single_file_needs)"
fi
# shellcheck disable=SC2086  # several words
install_missing $packages
cd "$checkout"
venv=$checkout/.venv-test
make_venv "$venv"

say() { echo "== $*"; }
say "wheel"
pip_quietly "$venv" wheel --no-deps --wheel-dir "$scratch/wheels" .
wheel=$(echo "$scratch"/wheels/*.whl)
pip_quietly "$venv" install "$wheel[dev]"
pip_quietly "$venv" install --no-deps --force-reinstall "$wheel"

if [ "$(id -u)" = 0 ] && { [ $# = 0 ] || [ ! -e dist/afxdpd ]; }; then
    say "one file"
    sh examples/build_single_file.sh
fi

PATH=$venv/bin:$PATH
export PATH
say "generated code"
sh proto/generate.sh --check
say "formatting"
ruff format --check .
say "lint"
ruff check .
say "types"
mypy
say "tests"
pytest "$@"
if [ "$(id -u)" = 0 ] && [ $# = 0 ]; then
    say "soak, two minutes"
    python tests/soak.py --minutes 2 --seed "${AFXDPD_SOAK_SEED:-1}"
fi
[ "$(id -u)" = 0 ] || say "left out, since this is not root: the kernel tests, which are the skipped ones above"
