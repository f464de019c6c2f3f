"""A gRPC client of another make, grpcio, in a process of its own: its threads open descriptors when they like.

    grpc_peer.py SOCKET

Its parent drives it: one JSON object a line on stdin, one JSON reply a line on stdout, in order. The end of stdin makes
it exit. Messages are bytes, in hexadecimal, so that it knows no message types.

    {"method": "/test.Service/Echo", "request": "0a0161", "pad": 0, "timeout": 10, "times": 1}
        makes so many unary calls at once, on one connection; the request is followed by "pad" bytes "x", and compressed
        where "compress" is true
        → [{"status": "OK", "text": "", "messages": ["0a0161"]}, …], a call each
    {"method": "/test.Service/Watch", "request": "", "timeout": 10, "read": 2}
        makes a call with a stream of replies and cancels it after so many
        → [{"status": "CANCELLED", "text": …, "messages": […]}]
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import grpc

OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 4 << 20),
)

Reply = dict[str, Any]


def passed_on(message: bytes) -> bytes:
    """Serializes nothing."""
    return message


def reply_of(call: Any, *messages: bytes) -> Reply:
    """How a call has ended."""
    return {"status": call.code().name, "text": call.details() or "", "messages": [each.hex() for each in messages]}


def unary(channel: grpc.Channel, command: Reply, request: bytes) -> list[Reply]:
    """Makes calls at once and waits for all."""
    method: Any = channel.unary_unary(command["method"], passed_on, passed_on)
    compression = grpc.Compression.Gzip if command.get("compress") else None
    calls = [
        method.future(request, timeout=command["timeout"], compression=compression)
        for _ in range(command.get("times", 1))
    ]
    return [reply_of(call, *([] if call.exception() else [call.result()])) for call in calls]


def stream(channel: grpc.Channel, command: Reply, request: bytes) -> list[Reply]:
    """Makes a call, reads some replies and cancels it."""
    method: Any = channel.unary_stream(command["method"], passed_on, passed_on)
    call = method(request, timeout=command["timeout"])
    messages: list[bytes] = []
    try:
        messages += itertools.islice(call, command["read"])
    except grpc.RpcError:
        pass
    else:
        call.cancel()
    return [reply_of(call, *messages)]


def main() -> None:
    """Does what it is told until stdin ends."""
    with grpc.insecure_channel(f"unix:{sys.argv[1]}", options=OPTIONS) as channel:
        for line in sys.stdin:
            command = json.loads(line)
            request = bytes.fromhex(command["request"]) + b"x" * command.get("pad", 0)
            print(json.dumps((stream if "read" in command else unary)(channel, command, request)), flush=True)


if __name__ == "__main__":
    main()
