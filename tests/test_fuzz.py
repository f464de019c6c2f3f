"""Anything at all, sent to whatever listens: pods' sockets, the configuration, gRPC as server and as client.

Each target takes bytes, so that each input is a file in corpus/<target>/; all of those are replayed. CI generates the
same inputs each time. To look for new ones, with a new seed each time:

    AFXDPD_FUZZ=100000 pytest -o faulthandler_timeout=0 tests/test_fuzz.py -k anything

makes so many inputs for each target and writes the smallest one that fails to corpus/<target>/found-<hash>.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import json
import logging
import os
import random
import socket
import struct
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import trio
import trio.testing
from conftest import FUZZ, open_fds
from fakes import FakeHost
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st
from test_config import anything, damaged, mutated
from test_grpc import (
    CONTINUATION,
    DATA,
    GOAWAY,
    GOOD_HEADERS,
    HEADERS,
    HELLO,
    NOTHING,
    PING,
    PREFACE,
    PUSH_PROMISE,
    RST_STREAM,
    SERVICE,
    SETTINGS,
    WINDOW_UPDATE,
    Service,
    Text,
    frame,
    hpack,
    listen,
    text,
)

import afxdpd

CORPUS = Path(__file__).with_name("corpus")
CPU_MAX = 5.0
"""Seconds of this process's time for one configuration, which takes some milliseconds."""

Target = Callable[[bytes], None]


# -- Inputs as bytes ---------------------------------------------------------------------------------------------------


def joined(pieces: list[tuple[int, bytes]]) -> bytes:
    """Pieces with flags as one input: a byte of flags and two of length before each."""
    return b"".join(struct.pack(">BH", flags, len(piece)) + piece for flags, piece in pieces)


def split(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The pieces of an input; any bytes are some pieces."""
    while len(data) >= 3:
        flags, length = struct.unpack_from(">BH", data)
        yield flags, data[3 : 3 + length]
        data = data[3 + length :]


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Checks that a block leaves no descriptor open and that nothing in it was a bug to the log."""
    bugs: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: bugs.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("afxdpd")
    before = open_fds()
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
    assert bugs == []
    for _ in range(1000):  # a pod's files are closed in a thread
        if open_fds() == before:
            return
        time.sleep(0.01)
    assert open_fds() == before


def in_trio(target: Callable[[bytes, Path], Awaitable[None]], *, jump: bool = False) -> Target:
    """An async target, which gets a directory, as a plain one."""

    def run(data: bytes) -> None:
        clock = trio.testing.MockClock(autojump_threshold=0) if jump else None
        with tempfile.TemporaryDirectory(prefix="afx") as directory, nothing_left():
            trio.run(target, data, Path(directory), clock=clock)

    return run


# -- The handshake -----------------------------------------------------------------------------------------------------


def request(data: bytes) -> None:
    """A packet, after a byte that says whether /connect was answered: it is some request, and its fields are text."""
    connected, packet = data[:1] == b"\1", data[1:]
    parsed = afxdpd.parse_request(packet, connected=connected)
    match parsed:
        case afxdpd.Connect(value) | afxdpd.GetXskMap(value):
            assert value
            assert value.isascii()
            assert value.isprintable()
            assert "," not in value
            assert value.encode() in packet
        case afxdpd.ConfigBusyPoll(timeout, budget):
            assert max(abs(timeout), abs(budget)) < 2**31
        case afxdpd.Malformed(why):
            assert why
    assert connected or isinstance(parsed, afxdpd.Connect | afxdpd.Malformed)


REPLIES = {
    afxdpd.GetVersion: {b"0.1"},
    afxdpd.ConfigBusyPoll: {b"/config_busy_poll_ack", b"/config_busy_poll_nak"},
    afxdpd.Fin: {b"/fin_ack"},
    afxdpd.Malformed: {b"/nak"},
}


def expected(packet: bytes, *, connected: bool) -> set[bytes]:
    """What a packet may be answered with by a socket that belongs to pod-x and has a map for veth0."""
    if len(packet) > 512:
        return {b"/nak"}
    match parsed := afxdpd.parse_request(packet, connected=connected):
        case afxdpd.Connect(hostname):
            return {b"/host_ok" if hostname == "pod-x" else b"/host_nak"}
        case afxdpd.GetXskMap(device):
            return {b"/fd_ack" if device == "veth0" else b"/fd_nak"}
    return REPLIES[type(parsed)]


def opened(kind: int, connection: socket.socket) -> list[int]:
    """Files of a kind, the caller's to close."""
    if kind == 0:
        return [os.open(os.devnull, os.O_RDONLY)]
    if kind == 1:
        return list(os.pipe())
    if kind == 2:
        return [end.detach() for end in socket.socketpair()]
    return [os.dup(connection.fileno())]


async def uds(data: bytes, directory: Path) -> None:
    """Packets to a pod's socket, flags for the files that go along: each has its one reply, and each file is closed."""

    async def is_owner(hostname: str) -> bool:
        await trio.lowlevel.checkpoint()
        return hostname == "pod-x"

    with afxdpd.Fd(os.open(os.devnull, os.O_RDONLY)) as xskmap, trio.fail_after(60):
        server = afxdpd.UdsServer(
            directory / "veth0",
            name="veth0",
            idle_timeout=float("inf"),
            is_owner=is_owner,
            xskmap=lambda name: xskmap if name == "veth0" else None,
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.serve, server.listen(FakeHost(), 0))
            packets = list(split(data))
            while packets:
                await conversation(server.path, packets)
            server.scope.cancel()


async def conversation(path: Path, packets: list[tuple[int, bytes]]) -> None:
    """Sends packets on one connection until there are no more or the server ends it, and takes those away."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as pod:
        pod.setblocking(False)
        pod.connect(os.fspath(path))
        connected = False
        while packets:
            flags, packet = packets.pop(0)
            files = opened(flags & 3, pod) if flags & 4 else []
            try:
                socket.send_fds(pod, [packet], (files * 253)[:253] if flags & 8 else files)
            finally:
                for fd in files:
                    os.close(fd)
            await trio.lowlevel.wait_readable(pod)
            reply, fds, _, _ = socket.recv_fds(pod, 512, 4)
            for fd in fds:
                os.close(fd)
            assert reply in expected(packet, connected=connected)
            assert len(fds) == (reply == b"/fd_ack")
            connected = connected or reply == b"/host_ok"
            if reply == b"/fin_ack":
                await trio.lowlevel.wait_readable(pod)
                assert pod.recv(1) == b""
                return
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(BlockingIOError):  # there is no second reply
                pod.recv(1)


# -- The configuration -------------------------------------------------------------------------------------------------


def config(data: bytes) -> None:
    """A file: it is a configuration, or a ConfigError of lines that can be printed and name the file."""
    with tempfile.NamedTemporaryFile(prefix="afx") as file, nothing_left():
        Path(file.name).write_bytes(data)
        start = time.process_time()
        try:
            result: object = afxdpd.get_plugin_config(file.name)
        except afxdpd.ConfigError as exc:
            result = str(exc).splitlines()
        assert time.process_time() - start < CPU_MAX
    if isinstance(result, list):
        assert result
        for line in result:
            assert line.startswith(f"{file.name}: ")
            assert line.isprintable()
            assert len(line) < 1000
    else:
        assert isinstance(result, afxdpd.PluginConfig)


# -- gRPC --------------------------------------------------------------------------------------------------------------

SETTLE, END, READ = 1, 2, 4
"""Flags of a piece: when it has been taken, the next one is sent; it is the last one; what has come is read."""


async def send_pieces(stream: trio.SocketStream, data: bytes) -> None:
    """Sends the pieces of an input, those without SETTLE together with the next one."""
    queued = b""
    with contextlib.suppress(trio.BrokenResourceError):  # the peer has had enough
        for flags, piece in split(data):
            queued += piece
            if flags & SETTLE:
                await stream.send_all(queued)
                queued = b""
                await trio.testing.wait_all_tasks_blocked()
            if flags & READ:
                with trio.move_on_after(0):
                    await stream.receive_some()
            if flags & END:
                break
        await stream.send_all(queued)
        await trio.testing.wait_all_tasks_blocked()
        if queued and flags & END:
            await stream.send_eof()
            await trio.testing.wait_all_tasks_blocked()


async def server(data: bytes, directory: Path) -> None:
    """Pieces of a conversation with our server: others are served meanwhile and after, and nothing is kept."""
    service = Service()
    server = service.server()
    path = directory / "s.sock"
    echo = functools.partial(afxdpd.call_unix, path, f"{SERVICE}/Echo", text("a"), Text, timeout=60)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve_unix, listen(path))
            before = trio.lowlevel.current_statistics().tasks_living
            async with await trio.open_unix_socket(os.fspath(path)) as stream:
                await send_pieces(stream, data)
                assert trio.lowlevel.current_statistics().tasks_living - before <= 2 * afxdpd.GRPC_CALLS_MAX + 10
                assert await echo() == text("a")
            await server.wait_no_connections()
            assert await echo() == text("a")
            await server.wait_no_connections()
            await trio.testing.wait_all_tasks_blocked()
            assert trio.lowlevel.current_statistics().tasks_living == before
            assert service.running == 0
            nursery.cancel_scope.cancel()


async def client(data: bytes, directory: Path) -> None:
    """Pieces of a server's answer to our client, END for a server that stays: a reply or an RpcError ends the call."""
    path = directory / "s.sock"
    stays = any(flags & END for flags, _ in split(data))

    async def hostile(stream: trio.SocketStream) -> None:
        async with stream:
            await send_pieces(stream, bytes(data))
            while stays and await receive(stream):
                pass

    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, hostile, [listen(path)])
        before = trio.lowlevel.current_statistics().tasks_living
        try:
            reply: object = await afxdpd.call_unix(path, f"{SERVICE}/Echo", text("a"), Text, timeout=60)
        except afxdpd.RpcError as exc:
            reply = exc
        assert isinstance(reply, Message | afxdpd.RpcError)
        for _ in range(100):  # the server waits for the same thing
            await trio.testing.wait_all_tasks_blocked()
            if trio.lowlevel.current_statistics().tasks_living == before:
                break
        assert trio.lowlevel.current_statistics().tasks_living == before
        nursery.cancel_scope.cancel()


async def receive(stream: trio.SocketStream) -> bytes:
    """Reads; nothing where the peer has gone in whatever way."""
    try:
        return bytes(await stream.receive_some())
    except trio.BrokenResourceError:
        return b""


# -- What is generated -------------------------------------------------------------------------------------------------

names = st.sampled_from([*GOOD_HEADERS, "grpc-timeout", "grpc-encoding", "grpc-status", "grpc-message", ":status", "x"])
values = st.one_of(
    st.sampled_from([*GOOD_HEADERS.values(), f"/{SERVICE}/Watch", f"/{SERVICE}/Wait", "200", "0", "5", "1S", "gzip"]),
    st.text(st.characters(codec="utf-8"), max_size=20),
    st.integers().map(str),
)
good_headers = st.dictionaries(names, values, max_size=2).map(lambda more: [*(GOOD_HEADERS | more).items()])
blocks = st.one_of(
    st.one_of(good_headers, st.lists(st.tuples(names, values), max_size=5)).map(lambda pairs: packed(*pairs)),
    st.binary(max_size=40),
    st.binary(max_size=3).map(lambda head: head + b"\xff" * 100),
)
messages = st.one_of(
    st.just(NOTHING),
    st.just(struct.pack(">BI", 0, 3) + b"\x0a\x01a"),
    st.builds(
        lambda flag, length, body: struct.pack(">BI", flag, length) + body,
        st.sampled_from([0, 1, 255]),
        st.sampled_from([0, 1, 5, 1 << 22, (1 << 22) + 1, (1 << 32) - 1]),
        st.binary(max_size=10),
    ),
)
stream_ids = st.sampled_from([0, 1, 1, 1, 2, 3, 3, 5, 7, 0x7FFFFFFF, 0x80000001])
flag_bits = st.sampled_from([0, 1, 4, 5, 8, 0x20, 0x2D, 0xFF])
settings_ = st.lists(
    st.tuples(st.integers(0, 8), st.sampled_from([0, 1, 16384, 65535, (1 << 24) - 1, (1 << 31) - 1, (1 << 32) - 1])),
    max_size=4,
).map(lambda pairs: b"".join(struct.pack(">HI", *pair) for pair in pairs))
frames = st.one_of(
    st.builds(frame, st.just(HEADERS), flag_bits, stream_ids, blocks),
    st.builds(frame, st.just(DATA), flag_bits, stream_ids, messages),
    st.builds(frame, st.just(SETTINGS), flag_bits, st.just(0), settings_),
    st.builds(frame, st.just(CONTINUATION), flag_bits, stream_ids, blocks),
    st.builds(
        frame,
        st.sampled_from([2, RST_STREAM, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, 10, 99]),
        flag_bits,
        stream_ids,
        st.one_of(st.sampled_from([bytes(4), bytes(5), bytes(8), b"\x7f\xff\xff\xff"]), st.binary(max_size=12)),
    ),
)


def packed(*pairs: tuple[str, str]) -> bytes:
    """Headers as literals, cut to what one byte can count."""
    return b"".join(
        b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value
        for name, value in ((name.encode()[:126], value.encode()[:126]) for name, value in pairs)
    )


def call_frames(stream_id: int, method: str) -> list[bytes]:
    """A call as a client sends it."""
    headers = GOOD_HEADERS | {":path": f"/{SERVICE}/{method}"}
    return [frame(HEADERS, 4, stream_id, hpack(*headers.items())), frame(DATA, 1, stream_id, NOTHING)]


CALLS = [
    HELLO,
    frame(SETTINGS, 1, 0, b""),
    *call_frames(1, "Echo"),
    *call_frames(3, "Watch"),
    frame(PING, 0, 0, bytes(8)),
    *call_frames(5, "Wait"),
    frame(WINDOW_UPDATE, 0, 3, b"\0\0\1\0"),
    frame(RST_STREAM, 0, 5, bytes(4)),
    *call_frames(7, "None"),
    frame(GOAWAY, 0, 0, bytes(8)),
]
ANSWERS = [
    frame(SETTINGS, 0, 0, b""),
    frame(SETTINGS, 1, 0, b""),
    frame(WINDOW_UPDATE, 0, 0, b"\0\0\1\0"),
    frame(HEADERS, 4, 1, hpack((":status", "200"), ("content-type", "application/grpc"))),
    frame(DATA, 0, 1, struct.pack(">BI", 0, 3) + b"\x0a\x01a"),
    frame(PING, 0, 0, bytes(8)),
    frame(HEADERS, 5, 1, hpack(("grpc-status", "0"), ("grpc-message", "all%20well"))),
    frame(RST_STREAM, 0, 1, bytes(4)),
    frame(GOAWAY, 0, 0, bytes(8)),
]


@st.composite
def conversations(draw: st.DrawFn, valid: list[bytes], start: bytes) -> bytes:
    """A valid conversation with changes, or frames, or bytes."""
    kind = draw(st.sampled_from(["mutated", "mutated", "frames", "frames", "bytes"]))
    if kind == "mutated":
        pieces = list(valid)
        for _ in range(draw(st.integers(0, 4))):
            index = draw(st.integers(0, len(pieces) - 1)) if pieces else 0
            change = draw(st.sampled_from(["delete", "double", "move", "insert", "bytes", "cut"]))
            if change == "insert" or not pieces:
                pieces.insert(index, draw(frames))
            elif change == "delete":
                del pieces[index]
            elif change == "double":
                pieces.insert(index, pieces[index])
            elif change == "move":
                pieces.append(pieces.pop(index))
            else:
                piece, at = pieces[index], draw(st.integers(0, len(pieces[index])))
                length = len(piece) if change == "cut" else draw(st.integers(0, 3))
                pieces[index] = piece[:at] + draw(st.binary(max_size=3)) + piece[at + length :]
    elif kind == "frames":
        pieces = [start, *draw(st.lists(frames, max_size=8))]
    else:
        pieces = [draw(st.sampled_from([b"", start])), *draw(st.lists(st.binary(max_size=60), max_size=4))]
    flags = st.sampled_from([0, SETTLE, SETTLE | READ])
    flagged = [(draw(flags), piece) for piece in pieces]
    if flagged:
        flagged[-1] = (draw(st.sampled_from([0, END])), flagged[-1][1])
    return joined(flagged)


VERBS = ["/connect,pod-x", "/connect, pod-x", "/version", "/xsk_map_fd,veth0", "/config_busy_poll,20,64", "/fin"]
packets = st.one_of(
    st.sampled_from(VERBS).map(str.encode),
    st.builds(
        lambda verb, at, more, length: verb[:at] + more + verb[at + length :],
        st.sampled_from(VERBS).map(str.encode),
        st.integers(0, 24),
        st.binary(max_size=4),
        st.integers(0, 4),
    ),
    st.integers().map(lambda seed: afxdpd.random_request(random.Random(seed))),
    st.binary(max_size=40),
    st.sampled_from([b"", b"x" * 512, b"x" * 513, b"/version" + bytes(504), b"/connect," + b"x" * 503]),
)
files = st.sampled_from([0, 0, 4, 5, 6, 7, 4 | 8, 6 | 8])

TARGETS: dict[str, tuple[Target, int, st.SearchStrategy[bytes]]] = {
    "request": (request, 1000, st.builds(lambda head, tail: head + tail, st.sampled_from([b"\0", b"\1"]), packets)),
    "uds": (in_trio(uds), 250, st.lists(st.tuples(files, packets), max_size=12).map(joined)),
    "config": (
        config,
        500,
        st.one_of(
            st.binary(max_size=60),
            damaged(),
            mutated().map(lambda content: json.dumps(content).encode()),
            anything.map(lambda content: json.dumps(content).encode()),
        ),
    ),
    "server": (in_trio(server), 400, conversations(CALLS, HELLO)),
    "client": (in_trio(client, jump=True), 400, conversations(ANSWERS, HELLO[len(PREFACE) :])),
}
"""The targets: how many inputs CI makes for each, and of which kind."""


# -- The tests ---------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True, scope="module")
def _only_objects_of_these_tests_are_collected() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_call_is_kept() -> Iterator[None]:
    yield
    gc.collect()
    kinds = (afxdpd._Call, afxdpd._Connection, afxdpd.Packet)
    assert [each for each in gc.get_objects() if isinstance(each, kinds)] == []


KEPT = sorted(CORPUS.glob("*/*"))


@pytest.mark.parametrize("file", KEPT, ids=["/".join(file.parts[-2:]) for file in KEPT])
def test_target_holds_when_an_input_is_kept(file: Path) -> None:
    """What once was, or would have been, a finding is none any more."""
    target, _, _ = TARGETS[file.parent.name]
    target(file.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_target_holds_when_the_input_is_anything(name: str) -> None:
    """Whatever is sent, the target's promise holds; the same inputs each time, unless AFXDPD_FUZZ says how many new."""
    target, examples, strategy = TARGETS[name]
    last = b""

    @settings(max_examples=FUZZ or examples)
    @given(strategy)
    def run(data: bytes) -> None:
        nonlocal last
        last = data
        target(data)

    try:
        run()
    except BaseException:  # the last input is the smallest one that fails
        if FUZZ:
            file = CORPUS / name / f"found-{hashlib.sha256(last).hexdigest()[:12]}"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(last)
        raise


def test_corpus_has_inputs_for_each_target() -> None:
    """Each target has inputs that are kept, and no input is without a target."""
    assert {file.parent.name for file in KEPT} == set(TARGETS)
