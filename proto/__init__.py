"""Protobuf messages of the kubelet APIs; the modules are made from the .proto files by generate.sh."""
