#!/bin/sh
# Makes dist/afxdpd: one static executable with the interpreter, all dependencies and the C helper inside.
#
#     sh examples/build_single_file.sh
#
# Needs Python 3.11 or newer with its library and headers, as Debian's and pyenv's have; what else is missing is installed
# with apt-get. Everything is built in a temporary directory. single_file/launcher.c says how the executable works.
set -eu

case " $* " in
*" --help "* | *" -h "*)
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
esac

me=build_single_file
checkout=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
. "$checkout/examples/prepare.sh"
[ $# = 0 ] || fail "it takes no arguments; see sh $0 --help"
[ "$(uname -s)" = Linux ] || fail "this needs Linux; here is $(uname -s)"

find_python
# shellcheck disable=SC2046  # several words
install_missing $(single_file_needs)
cd "$checkout"

make_venv "$scratch/venv"
echo "$me: building afxdpd and installing what it needs ..."
pip_quietly "$scratch/venv" install .

echo "$me: packing ..."
library=$(gcc -print-file-name=libzstd.a)
musl-gcc -static -Os -s -Wall -Wextra -idirafter /usr/include examples/single_file/launcher.c \
    -o "$scratch/launcher" -Wl,--build-id=none "$library" >"$scratch/log" 2>&1 || show_and_fail "cannot compile launcher.c"
PYTHONHASHSEED=0 "$scratch/venv/bin/python" -P -s -B examples/single_file/pack.py --launcher "$scratch/launcher" \
    --output "$scratch/afxdpd" >"$scratch/log" 2>&1 || show_and_fail "cannot pack"
sed 's/^/    /' "$scratch/log"

installed=$("$scratch/venv/bin/python" -I -m afxdpd --version)
started=$(env -i "$scratch/afxdpd" --version 2>&1) || :
[ "$started" = "$installed" ] || fail "the executable does not work: $started"
mkdir -p dist
mv -f "$scratch/afxdpd" dist/afxdpd
echo "$me: dist/afxdpd, $(wc -c <dist/afxdpd) bytes, $started"
