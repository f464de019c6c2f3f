#!/bin/sh
# Builds the wheel and tests it: generated code, formatting, lint, types, all tests.
# As root everything is run; otherwise what needs root is left out, and named at the end.
# AFXDPD_REQUIRE_KERNEL=1 makes it a failure if a kernel test cannot run. Arguments go to pytest.
set -eu
cd "$(dirname "$0")/.."
. examples/prepare.sh

prepare "the tests" iproute2 util-linux
venv=.venv-test
make_venv "$venv"

rm -rf build ./*.egg-info  # what is left of an earlier build would get into the wheel
wheels=$(mktemp -d)
trap 'rm -rf "$wheels" build ./*.egg-info' EXIT
"$venv/bin/python" -m pip wheel --quiet --no-deps --wheel-dir "$wheels" .
"$venv/bin/python" -m pip install --quiet "$(echo "$wheels"/*.whl)[dev]"
"$venv/bin/python" -m pip install --quiet --no-deps --force-reinstall "$wheels"/*.whl

PATH="$PWD/$venv/bin:$PATH"
export PATH
say() { echo "== $*"; }
say "generated code"; sh proto/generate.sh --check
say "formatting";     ruff format --check .
say "lint";           ruff check .
say "types";          mypy
say "tests";          pytest "$@"
[ "$(id -u)" = 0 ] || say "left out, as this is not root: the kernel tests (see the skipped ones above)"
