#!/bin/sh
# Makes the generated modules beside the .proto files. With --check: fails when they are not current.
# Needs the package grpcio-tools (the "dev" extra brings the version that made the ones in the tree).
set -eu
cd "$(dirname "$0")"
out=.
if [ "${1:-}" = --check ]; then
    out=$(mktemp -d)
    trap 'rm -rf "$out"' EXIT
fi
python3 -m grpc_tools.protoc -I. --python_out="$out" --pyi_out="$out" deviceplugin.proto dpcnisyncer.proto podresources.proto
if [ "$out" != . ]; then
    for module in deviceplugin_pb2 dpcnisyncer_pb2 podresources_pb2; do
        for suffix in py pyi; do
            if ! cmp -s "$out/$module.$suffix" "$module.$suffix"; then
                echo "proto/$module.$suffix is not current: run proto/generate.sh and commit what it writes" >&2
                exit 1
            fi
        done
    done
fi
