#!/bin/sh
# The whole story on this machine, without a cluster; as root:
#
#     sh examples/quickstart.sh [--packets N] [--verbose]
#
# Needs Python 3.11 or newer. What else is missing is installed with apt-get: a C compiler, Python's headers and venv.
# Everything else goes to .venv-quickstart in this checkout; examples/quickstart.py, which is run then, leaves nothing.
set -eu

case " $* " in
*" --help "* | *" -h "*)
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
esac

me=quickstart
checkout=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
. "$checkout/examples/prepare.sh"

[ "$(uname -s)" = Linux ] || fail "this needs Linux; here is $(uname -s)"
[ "$(id -u)" = 0 ] || fail "this needs root, for network namespaces and BPF: sudo sh $0"
release=$(uname -r)
minor=${release#*.}
[ "$((${release%%.*} * 1000 + ${minor%%[!0-9]*}))" -ge 5019 ] ||
    fail "this needs Linux 5.19 or newer, where pods need no CAP_BPF; here is $release"

find_python
install_missing
cd "$checkout"
venv=$checkout/.venv-quickstart
make_venv "$venv"

sources=$(cat afxdpd.py _uds_helper.* build_ffi.py setup.py pyproject.toml proto/* | cksum) ||
    fail "the checkout $checkout is not complete"
installed=$(cat "$venv/sources" 2>/dev/null || :)
if [ "$installed" != "$sources" ] || ! runs "$venv/bin/python" 'import afxdpd, grpc'; then
    echo "quickstart: building and installing afxdpd in $venv ..."
    pip_quietly "$venv" install ".[quickstart]"
    echo "$sources" >"$venv/sources"
fi

rm -rf "$scratch"
exec "$venv/bin/python" examples/quickstart.py "$@"
