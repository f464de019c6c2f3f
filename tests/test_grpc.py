"""gRPC over Unix sockets: our server and client, against each other, against grpcio, and against hostile peers."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import json
import logging
import os
import re
import socket
import struct
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest
import trio
import trio.testing
from conftest import open_fds
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

import afxdpd
from afxdpd import GrpcServer, Method, RequestError, RpcError, call_unix, open_unix_listener, refuse_busy
from afxdpd_proto import deviceplugin_pb2 as api
from afxdpd_proto import podresources_pb2 as podresources

SERVICE = "test.Service"
MESSAGE_MAX = 4 << 20
Text = api.PreStartContainerRequest
"""The message of these tests, request and reply: a list of strings."""

# Numbers of gRPC's statuses.
OK, INVALID_ARGUMENT, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, UNIMPLEMENTED = 0, 3, 4, 8, 12


def text(*strings: str) -> api.PreStartContainerRequest:
    """A message."""
    return Text(devices_ids=strings)


# -- What is served ----------------------------------------------------------------------------------------------------


class Service:
    """Methods of every kind.

    Attributes:
        running: Calls of Wait, Gather and Watch that are at work.
        most: The most there have been at once.
        ended: How many of them have ended, in whatever way.
        go: Lets the calls of Wait and Gather answer.
        list: What Watch sends, again after each `announce`.
    """

    def __init__(self) -> None:
        self.running = 0
        self.most = 0
        self.ended = 0
        self.go = trio.Event()
        self.list: Message = text("first")
        self._announced = trio.Event()
        self._changed = trio.Event()
        calls: list[Callable[[Any], Awaitable[Message]]] = [
            self.Echo, self.Refuse, self.Fail, self.Break, self.Wait, self.Gather, self.Big
        ]  # fmt: skip
        self.methods = {call.__name__: Method(request_type=Text, call=call) for call in calls}
        self.methods["Hurry"] = Method(request_type=Text, call=self.Wait, timeout=2.0)
        self.methods["Watch"] = Method(request_type=Text, stream=self.Watch, timeout=float("inf"))
        self.methods["Half"] = Method(request_type=Text, stream=self.Half)

    def server(self) -> GrpcServer:
        """A server for these methods."""
        return GrpcServer({SERVICE: self.methods})

    def announce(self, message: Message) -> None:
        """Lets Watch send this."""
        self.list = message
        announced, self._announced = self._announced, trio.Event()
        announced.set()

    async def until(self, **counts: int) -> None:
        """Waits until attributes have these values."""
        while any(getattr(self, name) != value for name, value in counts.items()):
            await self._changed.wait()

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        self.running += 1
        self.most = max(self.most, self.running)
        self._announce_counts()
        try:
            yield
        finally:
            self.running -= 1
            self.ended += 1
            self._announce_counts()

    def _announce_counts(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    async def Echo(self, request: Message) -> Message:  # noqa: N802  named as methods of gRPC are
        """Answers with the request."""
        return request

    async def Refuse(self, request: api.PreStartContainerRequest) -> Message:  # noqa: N802
        """Refuses with the status and the text in the request."""
        status, message = request.devices_ids
        raise RequestError(message, status=status)

    async def Fail(self, _: Message) -> Message:  # noqa: N802
        """Fails as a system call does."""
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), "/sys/fs/bpf/x")

    async def Break(self, _: Message) -> Message:  # noqa: N802
        """Has a bug."""
        raise KeyError("a secret")

    async def Wait(self, request: Message) -> Message:  # noqa: N802
        """Answers with the request when told to."""
        with self._at_work():
            await self.go.wait()
        return request

    async def Gather(self, request: Message) -> Message:  # noqa: N802
        """Answers with the request when 100 calls are waiting."""
        with self._at_work():
            if self.running == 100:
                self.go.set()
            await self.go.wait()
        return request

    async def Big(self, request: api.PreStartContainerRequest) -> Message:  # noqa: N802
        """Answers with a message of so many bytes."""
        return padded(int(request.devices_ids[0]))

    async def Watch(self, _: Message) -> AsyncGenerator[Message, None]:  # noqa: N802
        """Sends the list, at once and whenever it is announced."""
        with self._at_work():
            while True:
                announced = self._announced
                yield self.list
                await announced.wait()

    async def Half(self, _: Message) -> AsyncGenerator[Message, None]:  # noqa: N802
        """Sends one message and then refuses."""
        yield text("one")
        raise RequestError("no more", status="ABORTED")


def padded(size: int) -> api.PreStartContainerRequest:
    """A message of exactly so many bytes."""
    message = text("x" * (size - 5))  # tag and length
    assert message.ByteSize() == size
    return message


@pytest.fixture
def service() -> Service:
    """What the server of a test serves."""
    return Service()


# -- How it is reached -------------------------------------------------------------------------------------------------


@asynccontextmanager
async def connection(server: GrpcServer, timeout: float = 20.0) -> AsyncIterator[trio.abc.Stream]:
    """The client's end of a connection in memory; when it is closed, the server's tasks for it have to end."""
    mine, its = trio.testing.memory_stream_pair()
    with trio.fail_after(timeout):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.serve_connection, its)
            async with mine:
                yield mine


def listen(path: Path) -> trio.SocketListener:
    """A listening Unix socket for trio."""
    return trio.SocketListener(trio.socket.from_stdlib_socket(open_unix_listener(path)))


@asynccontextmanager
async def serving(path: Path, server: GrpcServer) -> AsyncIterator[None]:
    """Serves on a Unix socket, and cancels the server at the end."""
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve_unix, listen(path))
            yield
            nursery.cancel_scope.cancel()


async def call(
    stream: trio.abc.Stream, method: str, request: Message, reply_max: int = MESSAGE_MAX
) -> Message | RpcError:
    """Makes a call with our own client; it closes the stream."""
    return await afxdpd._call_once(stream, f"{SERVICE}/{method}", request, Text, 10.0, reply_max)


async def call_in_memory(server: GrpcServer, method: str, request: Message) -> Message | RpcError:
    """The same on a connection of its own."""
    async with connection(server) as stream:
        return await call(stream, method, request)


async def refused(stream: trio.abc.Stream, method: str, request: Message) -> tuple[str, str]:
    """Makes a call that fails: status and text."""
    outcome = await call(stream, method, request)
    assert isinstance(outcome, RpcError)
    return outcome.status, str(outcome).removeprefix(f"{outcome.status}: ")


@dataclass
class Answer:
    """What has arrived for one call.

    Attributes:
        status: Number of the gRPC status, -1 while the call goes on.
        text: The message that comes with it.
        messages: The replies.
    """

    status: int = -1
    text: str = ""
    messages: list[bytes] = field(default_factory=list)
    reset: bool = False
    _received: bytes = b""

    def take(self, event: Any) -> None:
        """Takes over what HTTP/2 has brought."""
        if isinstance(event, h2.events.DataReceived):
            self._received += event.data
            while len(self._received) >= 5 and len(self._received) >= 5 + (size := self._size()):
                self.messages.append(self._received[5 : 5 + size])
                self._received = self._received[5 + size :]
        elif isinstance(event, h2.events.StreamReset):
            self.reset = True
        else:
            headers = dict(event.headers)
            self.status = int(headers.get("grpc-status", self.status))
            self.text = headers.get("grpc-message", self.text)

    def _size(self) -> int:
        return int.from_bytes(self._received[1:5])


class Http2Client:
    """A client that does what no proper one does. What is queued leaves with `flush` in one write.

    Attributes:
        answers: What has arrived, by stream id.
        events: All that has arrived.
        unread: Streams whose data is counted here instead of being acknowledged.
    """

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        self.h2.initiate_connection()
        self.answers: dict[int, Answer] = {}
        self.events: list[Any] = []
        self.unread: dict[int, int] = {}

    async def flush(self, more: bytes = b"") -> None:
        """Sends what is queued."""
        await self.stream.send_all(self.h2.data_to_send() + more)

    def headers(self, method: str, **changes: str) -> int:
        """Queues the beginning of a call; returns its stream id."""
        stream_id = int(self.h2.get_next_available_stream_id())
        self.answers[stream_id] = Answer()
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": f"/{SERVICE}/{method}",
            ":authority": "localhost",
            "te": "trailers",
            "content-type": "application/grpc",
        }
        headers |= {
            (":" if name in ("method", "path", "scheme") else "") + name: value for name, value in changes.items()
        }
        headers = {name.replace("_", "-"): value for name, value in headers.items() if value}
        self.h2.send_headers(stream_id, headers.items())
        return stream_id

    def data(self, stream_id: int, *messages: bytes, end: bool = True) -> None:
        """Queues messages, which have to fit in the window."""
        content = b"".join(struct.pack(">BI", 0, len(each)) + each for each in messages)
        for start in range(0, len(content), 1 << 14):
            self.h2.send_data(stream_id, content[start : start + (1 << 14)])
        if end:
            self.h2.end_stream(stream_id)

    def request(self, method: str, message: Message | None = None, **headers: str) -> int:
        """Queues a whole request; returns its stream id."""
        stream_id = self.headers(method, **headers)
        self.data(stream_id, (message or text()).SerializeToString())
        return stream_id

    async def read(self) -> bool:
        """Reads once; returns False at the end of the connection."""
        data = await self.stream.receive_some()
        for event in self.h2.receive_data(data) if data else ():
            self.events.append(event)
            if isinstance(event, h2.events.DataReceived) and event.stream_id in self.unread:
                self.unread[event.stream_id] += event.flow_controlled_length
            elif isinstance(event, h2.events.DataReceived):
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            if isinstance(
                event,
                h2.events.ResponseReceived
                | h2.events.DataReceived
                | h2.events.TrailersReceived
                | h2.events.StreamReset,
            ):
                self.answers[event.stream_id].take(event)
        if data:
            await self.flush()
        return bool(data)

    async def message(self, stream_id: int, number: int = 0) -> bytes:
        """Waits for a reply of a call."""
        while len(self.answers[stream_id].messages) <= number:
            assert await self.read(), "the server closed the connection"
        return self.answers[stream_id].messages[number]

    async def answer(self, stream_id: int) -> Answer:
        """Waits for the end of a call."""
        while (answer := self.answers[stream_id]).status < 0:
            assert await self.read(), "the server closed the connection"
        return answer

    async def ask(self, method: str, message: Message | None = None, **headers: str) -> Answer:
        """Makes a whole call."""
        stream_id = self.request(method, message, **headers)
        await self.flush()
        return await self.answer(stream_id)

    async def still_works(self) -> None:
        """Fails where the connection does not serve calls any more."""
        answer = await self.ask("Echo", text("still there"))
        assert (answer.status, answer.messages) == (OK, [text("still there").SerializeToString()])

    async def until_closed(self) -> None:
        """Waits until the server closes the connection."""
        with contextlib.suppress(trio.BrokenResourceError):  # an answer to what it has sent before
            while await self.read():
                pass


@asynccontextmanager
async def http2_client(server: GrpcServer, timeout: float = 20.0) -> AsyncIterator[Http2Client]:
    """An improper client on a connection in memory."""
    async with connection(server, timeout) as stream:
        yield Http2Client(stream)


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    """An HTTP/2 frame, see RFC 9113, section 4.1."""
    return len(payload).to_bytes(3) + bytes([kind & 0xFF, flags & 0xFF]) + stream_id.to_bytes(4) + payload


DATA, HEADERS, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 5, 6, 7, 8, 9
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HELLO = PREFACE + frame(SETTINGS, 0, 0, b"")


class Grpcio:
    """A running grpc_peer.py."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self._received = b""

    async def call(self, method: str, request: Message | None = None, **more: Any) -> list[dict[str, Any]]:
        """Makes calls, see grpc_peer.py."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        content = (request or text()).SerializeToString().hex() + more.pop("head", "")
        command = {"method": f"/{SERVICE}/{method}", "request": content, "timeout": 10, **more}
        await self._process.stdin.send_all(json.dumps(command).encode() + b"\n")
        while b"\n" not in self._received:
            data = await self._process.stdout.receive_some()
            assert data, "grpc_peer.py has ended"
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return list(json.loads(line))

    async def statuses(self, method: str, request: Message | None = None, **more: Any) -> set[str]:
        """The same, only the statuses."""
        return {reply["status"] for reply in await self.call(method, request, **more)}


@asynccontextmanager
async def grpcio(path: Path) -> AsyncIterator[Grpcio]:
    """A client of another make, in a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("grpc_peer.py")), str(path)]
    pipe = subprocess.PIPE
    process = await trio.lowlevel.open_process(command, stdin=pipe, stdout=pipe)
    try:
        yield Grpcio(process)
    finally:
        with trio.CancelScope(shield=True):
            process.kill()
            await process.wait()
            for end in (process.stdin, process.stdout):
                assert end is not None
                await end.aclose()


# -- What holds for each test ------------------------------------------------------------------------------------------


def loud(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What has been logged above debug, and is herewith known."""
    records = [record for record in caplog.get_records("call") if record.levelno > logging.DEBUG]
    caplog.clear()
    return records


@pytest.fixture(autouse=True, scope="module")
def _only_objects_of_these_tests_are_collected() -> Iterator[None]:
    """Keeps the garbage collector from looking at all modules after each test, which takes longer than most tests."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _nothing_is_left_or_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No stream is left to the garbage collector, which would warn of it, and all that is logged is expected."""
    caplog.set_level(logging.INFO, "afxdpd")
    yield
    gc.collect()
    assert [record.getMessage() for record in loud(caplog)] == []


# -- Calls and their statuses ------------------------------------------------------------------------------------------


async def test_call_returns_the_reply_when_the_handler_answers(service: Service) -> None:
    """A unary call brings back what the handler returned."""
    assert await call_in_memory(service.server(), "Echo", text("a", "ä", "")) == text("a", "ä", "")


async def test_call_returns_the_reply_when_the_message_is_empty(service: Service) -> None:
    """A message without any field, as most of kubelet's requests, has no bytes and still arrives."""
    assert await call_in_memory(service.server(), "Echo", text()) == text()


async def test_call_unix_returns_the_reply_when_the_server_answers(service: Service, short_path: Path) -> None:
    """A call on a Unix socket brings back what the handler returned, any number of times."""
    path = short_path / "s.sock"
    async with serving(path, service.server()):
        for number in range(20):
            request = text(str(number))
            assert await call_unix(path, f"{SERVICE}/Echo", request, Text, timeout=10) == request


async def test_call_unix_raises_when_the_server_refuses(service: Service, short_path: Path) -> None:
    """The server's status and text are the error's."""
    path = short_path / "s.sock"
    async with serving(path, service.server()):
        with pytest.raises(RpcError, match=r"^NOT_FOUND: no device veth0$") as caught:
            await call_unix(path, f"{SERVICE}/Refuse", text("NOT_FOUND", "no device veth0"), Text, timeout=10)
    assert caught.value.status == "NOT_FOUND"


@pytest.mark.parametrize("message", ["no device veth0", "50 % of\nätherisches 世界 /:,;=", "", "x" * 1000])
@pytest.mark.parametrize("status", ["INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "UNIMPLEMENTED"])
async def test_status_is_the_handlers_when_it_refuses(status: str, message: str, service: Service) -> None:
    """A RequestError reaches the caller as the status that it names, with its text."""
    outcome = await call_in_memory(service.server(), "Refuse", text(status, message))
    assert isinstance(outcome, RpcError)
    assert (outcome.status, str(outcome)) == (status, f"{status}: {message}" if message else status)


async def test_status_text_is_cut_when_it_is_long(service: Service) -> None:
    """No more than 1000 characters of a text are sent: they travel in a header."""
    async with connection(service.server()) as stream:
        assert await refused(stream, "Refuse", text("ABORTED", "x" * 5000)) == ("ABORTED", "x" * 1000)


@pytest.mark.parametrize(
    "path", [f"/{SERVICE}/None", "/test.None/Echo", "/None/None", f"/{SERVICE}/echo", f"/{SERVICE}/"]
)
async def test_call_is_unimplemented_when_there_is_no_such_method(path: str, service: Service) -> None:
    """An unknown method or service is the end of that call, and of nothing else on its connection."""
    async with http2_client(service.server()) as client:
        for _ in range(10):  # tasks run in any order
            answer = await client.ask("", path=path)
            assert (answer.status, answer.text) == (UNIMPLEMENTED, f"no%20method%20{path[1:].replace('/', '%2F')}")
            await client.still_works()


async def test_status_is_failed_precondition_when_a_system_call_fails(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    """An OSError is told to the caller in the system's words, and once to the log, without a traceback."""
    async with connection(service.server()) as stream:
        assert await refused(stream, "Fail", text()) == (
            "FAILED_PRECONDITION",
            "Fail: [Errno 16] Device or resource busy: '/sys/fs/bpf/x'",
        )
    (record,) = loud(caplog)
    assert (record.levelno, record.exc_info) == (logging.WARNING, None)
    assert record.getMessage() == "Fail: [Errno 16] Device or resource busy: '/sys/fs/bpf/x'"


async def test_status_is_internal_when_the_handler_has_a_bug(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug is one traceback in the log; the caller is told nothing of what is inside."""
    async with connection(service.server()) as stream:
        assert await refused(stream, "Break", text()) == ("INTERNAL", "Break failed, see the log of the plugin")
    (record,) = loud(caplog)
    assert (record.levelno, record.getMessage()) == (logging.ERROR, "Break failed, which is a bug")
    assert record.exc_info
    assert isinstance(record.exc_info[1], KeyError)


@pytest.mark.parametrize(
    "messages",
    [[b"\x0a\xff"], [b"\xff"], [b"\x0a\x01\xff"], [], [b"", b""], [b"\x0a\xff", b""]],
    ids=["cut", "tag", "utf-8", "none", "two", "cut and another"],
)
async def test_status_is_invalid_argument_when_there_is_not_one_message(
    messages: list[bytes], service: Service
) -> None:
    """A request that is no message of its type, or none or two, is refused; its connection goes on."""
    async with http2_client(service.server()) as client:
        for _ in range(10):  # tasks run in any order
            stream_id = client.headers("Echo")
            client.data(stream_id, *messages)
            await client.flush()
            answer = await client.answer(stream_id)
            assert (answer.status, answer.text) == (INVALID_ARGUMENT, "Echo%3A%20not%20one%20well-formed%20message")
            await client.still_works()


async def test_messages_come_before_the_status_when_a_stream_fails(service: Service) -> None:
    """What a stream has sent before it fails arrives."""
    async with http2_client(service.server()) as client:
        answer = await client.ask("Half")
        assert (answer.status, answer.text) == (10, "no%20more")
        assert answer.messages == [text("one").SerializeToString()]


async def test_reply_is_refused_when_it_is_too_large(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    """A reply of 4 MiB arrives; a larger one is RESOURCE_EXHAUSTED, and the log says so."""
    assert await call_in_memory(service.server(), "Big", text(str(MESSAGE_MAX))) == padded(MESSAGE_MAX)
    async with http2_client(service.server()) as client:
        assert (await client.ask("Big", text(str(MESSAGE_MAX + 1)))).status == RESOURCE_EXHAUSTED
        await client.still_works()
    (record,) = loud(caplog)
    assert record.levelno >= logging.WARNING
    assert str(MESSAGE_MAX + 1) in record.getMessage()


# -- Deadlines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "timeout", "seconds"),
    [
        ("Wait", "50m", 0.05),
        ("Wait", "3S", 3.0),
        ("Wait", "2500000u", 2.5),
        ("Wait", "0S", 0.0),
        ("Wait", "1H", 10.0),
        ("Wait", "", 10.0),
        ("Hurry", "", 2.0),
        ("Hurry", "1S", 1.0),
        ("Hurry", "1M", 2.0),
        ("Watch", "7S", 7.0),
    ],
)
async def test_call_is_cut_off_when_its_deadline_passes(
    method: str, timeout: str, seconds: float, service: Service, autojump_clock: trio.testing.MockClock
) -> None:
    """The server ends a call at the caller's deadline or its own, whichever comes first, and the handler with it."""
    async with http2_client(service.server()) as client:
        start = trio.current_time()
        answer = await client.ask(method, grpc_timeout=timeout)
        assert (answer.status, answer.text) == (DEADLINE_EXCEEDED, f"{method}%20did%20not%20end%20in%20time")
        assert trio.current_time() - start == pytest.approx(seconds)
        assert service.running == 0
        assert service.ended == (1 if seconds else 0)
        await client.still_works()


async def test_request_that_never_ends_is_cut_off_when_the_deadline_passes(
    service: Service, autojump_clock: trio.testing.MockClock
) -> None:
    """The server's own deadline holds also while it waits for the rest of a request."""
    async with http2_client(service.server()) as client:
        stream_id = client.headers("Hurry")
        await client.flush(frame(DATA, 0, stream_id, b"\0\0\0\0\x05ab"))
        assert (await client.answer(stream_id)).status == DEADLINE_EXCEEDED
        assert trio.current_time() == pytest.approx(2.0)


async def test_stream_goes_on_when_it_has_no_deadline(service: Service, autojump_clock: trio.testing.MockClock) -> None:
    """A stream without deadlines is still there after a year."""
    async with http2_client(service.server(), timeout=2 * 365 * 86400) as client:
        stream_id = client.request("Watch")
        await client.flush()
        assert await client.message(stream_id) == text("first").SerializeToString()
        await trio.sleep(365 * 86400)
        service.announce(text("second"))
        assert await client.message(stream_id, 1) == text("second").SerializeToString()
        assert service.ended == 0


# -- The end of a call, and what comes after it ------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["Wait", "Watch"])
async def test_handler_ends_when_its_call_is_reset(method: str, service: Service) -> None:
    """RST_STREAM cancels the handler; the connection goes on."""
    async with http2_client(service.server()) as client:
        for number in range(1, 4):
            stream_id = client.request(method)
            await client.flush()
            await service.until(running=1)
            client.h2.reset_stream(stream_id)
            await client.flush()
            await service.until(running=0, ended=number)
            await client.still_works()


@pytest.mark.parametrize("method", ["Wait", "Watch"])
async def test_handler_ends_when_the_connection_is_lost(method: str, service: Service) -> None:
    """The end of the connection cancels the handlers of all its calls."""
    server = service.server()
    async with http2_client(server) as client:
        for _ in range(3):
            client.request(method)
        await client.flush()
        await service.until(running=3)
    assert (service.running, service.ended, server.connections) == (0, 3, 0)


@pytest.mark.parametrize("method", ["Echo", "Wait", "Watch", "None"])
async def test_handler_ends_when_the_reset_comes_with_the_request(method: str, service: Service) -> None:
    """A request and its RST_STREAM may arrive in one read: no call is left, and the connection goes on."""
    async with http2_client(service.server()) as client:
        for _ in range(10):  # tasks run in any order
            client.h2.reset_stream(client.request(method))
            await client.flush()
            await trio.testing.wait_all_tasks_blocked()
            assert service.running == 0
            await client.still_works()


@pytest.mark.parametrize("method", ["Echo", "Wait", "Watch", "None"])
async def test_connection_goes_on_when_the_reset_comes_with_the_data(method: str, service: Service) -> None:
    """The message of a request and its RST_STREAM may arrive in one read."""
    async with http2_client(service.server()) as client:
        for end in (True, False):
            stream_id = client.headers(method)
            await client.flush()
            await trio.testing.wait_all_tasks_blocked()
            client.data(stream_id, b"", end=end)
            client.h2.reset_stream(stream_id)
            await client.flush()
            await trio.testing.wait_all_tasks_blocked()
            assert service.running == 0
            await client.still_works()


@pytest.mark.parametrize("method", ["Wait", "Watch"])
async def test_connection_goes_on_when_the_reset_comes_with_the_answer(method: str, service: Service) -> None:
    """A peer may reset a call in the moment in which the handler answers; that is no bug to be logged."""
    async with http2_client(service.server()) as client:
        for _ in range(20):  # the server reads before or after the handler runs
            service.go = trio.Event()
            stream_id = client.request(method)
            await client.flush()
            await trio.testing.wait_all_tasks_blocked()
            client.h2.reset_stream(stream_id)
            await client.flush()
            service.go.set()
            service.announce(text("second"))
            await trio.testing.wait_all_tasks_blocked()
            assert service.running == 0
            await client.still_works()


async def test_connection_goes_on_when_data_comes_after_the_reset(service: Service) -> None:
    """DATA of a call that the peer has reset itself is ignored."""
    async with http2_client(service.server()) as client:
        stream_id = client.request("Watch")
        await client.flush()
        await client.message(stream_id)
        client.h2.reset_stream(stream_id)
        await client.flush(3 * frame(DATA, 0, stream_id, bytes(1 << 14)))
        await service.until(ended=1)
        await client.flush(frame(DATA, 1, stream_id, b"x"))
        await client.still_works()


async def test_connection_goes_on_when_data_comes_after_the_answer(service: Service) -> None:
    """A call that is refused before its message has arrived takes no harm from the message."""
    async with http2_client(service.server()) as client:
        for end in (True, False):
            stream_id = client.headers("None")
            await client.flush()
            assert (await client.answer(stream_id)).status == UNIMPLEMENTED
            client.data(stream_id, bytes(50_000), end=end)
            await client.flush()
            await client.still_works()
            if not end:
                client.h2.reset_stream(stream_id)
                await client.flush()
                await client.still_works()


@pytest.mark.parametrize("more", [0, 1, 3])
@pytest.mark.parametrize(("kind", "content"), [(WINDOW_UPDATE, b"\0\0\1\0"), (RST_STREAM, bytes(4)), (2, bytes(5))])
async def test_connection_goes_on_when_something_comes_after_the_end(
    kind: int, content: bytes, more: int, service: Service
) -> None:
    """A window, a reset and a priority may come for a call that has ended, also when there were others since."""
    async with http2_client(service.server()) as client:
        stream_id = client.request("Echo")
        await client.flush()
        await client.answer(stream_id)
        for _ in range(more):
            await client.still_works()
        await client.flush(frame(kind, 0, stream_id, content))
        await client.still_works()


async def test_nothing_is_logged_when_the_peer_says_goodbye(service: Service) -> None:
    """A stream that has something to send after GOAWAY, as kubelet ends its connections, is no bug to be logged."""
    async with http2_client(service.server()) as client:
        stream_id = client.request("Watch")
        client.request("Wait")
        await client.flush()
        await client.message(stream_id)
        client.h2.close_connection()
        await client.flush()
        await trio.testing.wait_all_tasks_blocked()
        service.announce(text("second"))
        service.go.set()
        await trio.testing.wait_all_tasks_blocked()
    assert (service.running, service.ended) == (0, 2)


async def test_ping_is_acknowledged_when_a_client_sends_one(service: Service) -> None:
    """PING comes back with the same eight bytes, as grpc-go expects."""
    async with http2_client(service.server()) as client:
        client.h2.ping(b"12345678")
        await client.flush()
        while not any(isinstance(event, h2.events.PingAcknowledged) for event in client.events):
            assert await client.read()


# -- Many, and large ---------------------------------------------------------------------------------------------------


def devices(count: int) -> api.ListAndWatchResponse:
    """A list as kubelet gets it."""
    return api.ListAndWatchResponse(
        devices=[api.Device(ID=f"ens785f0v{number}", health="Healthy") for number in range(count)]
    )


async def test_large_message_arrives_whole_when_the_window_is_small(service: Service) -> None:
    """A list of 5,000 devices goes through a window of 1,000 bytes, piece by piece."""
    service.list = devices(5000)
    async with http2_client(service.server()) as client:
        client.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 1000})
        await client.flush()
        while not any(isinstance(event, h2.events.SettingsAcknowledged) for event in client.events):
            assert await client.read()
        stream_id = client.request("Watch")
        await client.flush()
        message = await client.message(stream_id)
        assert len(message) > 100_000
        assert api.ListAndWatchResponse.FromString(message) == service.list


async def test_other_calls_are_answered_when_a_stream_is_not_read(service: Service) -> None:
    """A client that gives a stream no window holds up that stream alone, and gets the rest when it does."""
    service.list = devices(5000)
    async with http2_client(service.server()) as client:
        client.h2.increment_flow_control_window(1 << 20)
        stream_id = client.request("Watch")
        client.unread[stream_id] = 0
        await client.flush()
        while client.unread[stream_id] < 65_535:  # the window of each stream
            assert await client.read()
        await client.still_works()
        assert client.answers[stream_id].messages == []
        client.h2.acknowledge_received_data(client.unread.pop(stream_id), stream_id)
        await client.flush()
        assert await client.message(stream_id) == service.list.SerializeToString()


async def test_connections_are_forgotten_when_a_hundred_have_come_and_gone(service: Service, short_path: Path) -> None:
    """A hundred clients that open a stream, read once and drop the connection leave no descriptor and no task."""
    path = short_path / "s.sock"
    server = service.server()
    async with serving(path, server):

        async def visit() -> None:
            async with await trio.open_unix_socket(os.fspath(path)) as stream:
                client = Http2Client(stream)
                stream_id = client.request("Watch")
                await client.flush()
                await client.message(stream_id)

        await visit()
        await server.wait_no_connections()
        await trio.testing.wait_all_tasks_blocked()
        fds, tasks = open_fds(), trio.lowlevel.current_statistics().tasks_living
        for _ in range(100):
            await visit()
        await server.wait_no_connections()
        await trio.testing.wait_all_tasks_blocked()
        assert open_fds() == fds
        assert trio.lowlevel.current_statistics().tasks_living == tasks
    assert (service.running, service.ended) == (0, 101)


async def test_connection_ends_when_a_client_has_left_unread_what_it_asked_for(
    service: Service, short_path: Path
) -> None:
    """A client that reads nothing and sends no more is let go, though not all could be written to it."""
    path = short_path / "s.sock"
    server = service.server()
    service.list = padded(3 << 20)
    async with serving(path, server), await trio.open_unix_socket(os.fspath(path)) as stream:
        client = Http2Client(stream)
        client.h2.increment_flow_control_window(1 << 24)
        client.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 1 << 24})
        await client.flush()
        while not any(isinstance(event, h2.events.SettingsAcknowledged) for event in client.events):
            assert await client.read()
        client.request("Watch")
        await client.flush()
        await service.until(running=1)
        await trio.testing.wait_all_tasks_blocked()
        await stream.send_eof()
        await server.wait_no_connections()


async def test_wait_no_connections_returns_when_the_last_one_is_closed(service: Service) -> None:
    """Connections are counted while they are open; who waits for none is told at once."""
    server = service.server()
    await server.wait_no_connections()
    async with http2_client(server) as first:
        await first.still_works()
        async with http2_client(server) as second:
            await second.still_works()
            assert server.connections == 2
        assert server.connections == 1
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.wait_no_connections)
            await trio.testing.wait_all_tasks_blocked()
            assert len(nursery.child_tasks) == 1
            await first.stream.aclose()
    assert server.connections == 0


async def test_everything_is_closed_when_the_server_is_cancelled(service: Service, short_path: Path) -> None:
    """The end of the server ends its handlers, its connections and its listener."""
    path = short_path / "s.sock"
    before = open_fds()
    server = service.server()
    async with serving(path, server):
        stream = await trio.open_unix_socket(os.fspath(path))
        client = Http2Client(stream)
        for method in ("Watch", "Wait", "Echo"):
            client.request(method)
        await client.flush()
        await service.until(running=2)
    assert (service.running, service.ended, server.connections) == (0, 2, 0)
    async with stream:
        await client.until_closed()
    assert open_fds().keys() - before.keys() == set()
    with pytest.raises(RpcError, match=r"^UNAVAILABLE: .*/s\.sock: Connection refused$"):
        await call_unix(path, f"{SERVICE}/Echo", text(), Text, timeout=10)


# -- A client of another make ------------------------------------------------------------------------------------------


async def test_statuses_are_understood_when_the_client_is_grpcio(
    service: Service, short_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An independent client gets replies, statuses and texts, all on one connection."""
    path = short_path / "s.sock"
    server = service.server()
    async with serving(path, server), grpcio(path) as peer:

        async def ask(method: str, *strings: str, **more: Any) -> tuple[str, str, list[str]]:
            (reply,) = await peer.call(method, text(*strings), **more)
            return reply["status"], reply["text"], reply["messages"]

        assert await ask("Echo", "a", "ä") == ("OK", "", [text("a", "ä").SerializeToString().hex()])
        assert await ask("None") == ("UNIMPLEMENTED", f"no method {SERVICE}/None", [])
        assert await ask("Refuse", "NOT_FOUND", "keine 50 % 世界") == ("NOT_FOUND", "keine 50 % 世界", [])
        assert await ask("Fail") == (
            "FAILED_PRECONDITION",
            "Fail: [Errno 16] Device or resource busy: '/sys/fs/bpf/x'",
            [],
        )
        assert await ask("Break") == ("INTERNAL", "Break failed, see the log of the plugin", [])
        (reply,) = await peer.call("Echo", Text.FromString(b""), pad=3)  # "xxx" is not a message
        assert (reply["status"], reply["text"]) == ("INVALID_ARGUMENT", "Echo: not one well-formed message")
        one = text("one").SerializeToString().hex()
        assert await ask("Half", read=5) == ("ABORTED", "no more", [one])
        assert (await ask("Wait", timeout=0.3))[0] == "DEADLINE_EXCEEDED"  # as both find at the same time
        await service.until(running=0, ended=1)
        assert await ask("Echo") == ("OK", "", [""])
        assert server.connections == 1
    assert len(loud(caplog)) == 2


async def test_large_list_arrives_whole_when_the_client_is_grpcio(service: Service, short_path: Path) -> None:
    """A list of 5,000 devices comes through a stream in one piece, and the stream ends when the client cancels it."""
    path = short_path / "s.sock"
    service.list = devices(5000)
    async with serving(path, service.server()), grpcio(path) as peer:
        for number in range(1, 4):
            (reply,) = await peer.call("Watch", read=1)
            assert reply["status"] == "CANCELLED"
            assert reply["messages"] == [service.list.SerializeToString().hex()]
            await service.until(running=0, ended=number)


async def test_all_calls_are_answered_when_grpcio_makes_many_at_once(service: Service, short_path: Path) -> None:
    """One connection serves 100 calls at a time; more of them wait for their turn."""
    path = short_path / "s.sock"
    server = service.server()
    async with serving(path, server), grpcio(path) as peer:
        assert await peer.statuses("Gather", times=250) == {"OK"}
        assert (service.most, service.ended, server.connections) == (100, 250, 1)


async def test_request_is_refused_when_it_is_too_large(service: Service, short_path: Path) -> None:
    """A request of 4 MiB is served; a larger one is not, and takes no other client's connection with it."""
    path = short_path / "s.sock"
    async with serving(path, service.server()), grpcio(path) as peer, grpcio(path) as other:
        head = b"\x0a" + bytes([0xFB, 0xFF, 0xFF, 0x01])  # a string of 4 MiB - 5 bytes
        (reply,) = await peer.call("Echo", head=head.hex(), pad=MESSAGE_MAX - 5)
        assert (reply["status"], len(reply["messages"][0])) == ("OK", 2 * MESSAGE_MAX)
        assert await other.statuses("Echo") == {"OK"}
        head = b"\x0a" + bytes([0xFC, 0xFF, 0xFF, 0x01])
        assert not await peer.statuses("Echo", head=head.hex(), pad=MESSAGE_MAX - 4) & {"OK", "DEADLINE_EXCEEDED"}
        assert await other.statuses("Echo") == {"OK"}
        assert await peer.statuses("Echo") == {"OK"}


# -- Hostile clients ---------------------------------------------------------------------------------------------------


def hpack(*headers: tuple[str, str]) -> bytes:
    """Headers as literals without indexing, see RFC 7541, section 6.2.2."""
    return b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode() for name, value in headers
    )


GOOD_HEADERS = {
    ":method": "POST",
    ":scheme": "http",
    ":path": f"/{SERVICE}/Echo",
    ":authority": "localhost",
    "te": "trailers",
    "content-type": "application/grpc",
}
NOTHING = b"\0\0\0\0\0"  # an empty message of gRPC


def hostile_request(data: bytes = NOTHING, flags: int = 4, **changes: str) -> bytes:
    """A connection's beginning and a request that is not quite right."""
    headers = GOOD_HEADERS | {name.replace("_", "-").replace("--", ":"): value for name, value in changes.items()}
    block = hpack(*((name, value) for name, value in headers.items() if value))
    return HELLO + frame(HEADERS, flags, 1, block) + (frame(DATA, 1, 1, data) if data else b"")


HOSTILE = {
    "nothing": b"",
    "http/1.1": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
    "half a preface": PREFACE[:11],
    "preface": PREFACE,
    "preface and text": PREFACE + b"hello, is anybody there?",
    "zeros": bytes(1000),
    "half a frame": HELLO + frame(SETTINGS, 0, 0, bytes(6))[:-1],
    "unknown frame": HELLO + frame(0xEE, 0xFF, 0, b"?" * 100),
    "huge frame": HELLO + b"\xff\xff\xff" + bytes(6) + bytes(1000),
    "settings of five bytes": HELLO + frame(SETTINGS, 0, 0, bytes(5)),
    "settings of a stream": HELLO + frame(SETTINGS, 0, 1, bytes(6)),
    "window too large": HELLO + frame(SETTINGS, 0, 0, b"\0\x04\xff\xff\xff\xff"),
    "frames of one byte": HELLO + frame(SETTINGS, 0, 0, b"\0\x05\0\0\0\x01"),
    "data of no stream": HELLO + frame(DATA, 0, 0, b"x"),
    "data of an idle stream": HELLO + frame(DATA, 0, 7, b"x"),
    "reset of an idle stream": HELLO + frame(RST_STREAM, 0, 7, bytes(4)),
    "headers that are none": HELLO + frame(HEADERS, 4, 1, b"\xff" * 20),
    "headers of an even stream": HELLO + frame(HEADERS, 4, 2, hpack(*GOOD_HEADERS.items())),
    "headers without end": HELLO + frame(HEADERS, 0, 1, hpack(*GOOD_HEADERS.items())) + frame(PING, 0, 0, bytes(8)),
    "continuation of nothing": HELLO + frame(CONTINUATION, 4, 1, b""),
    "push": HELLO + frame(PUSH_PROMISE, 4, 1, bytes(4)),
    "window of nothing": HELLO + frame(WINDOW_UPDATE, 0, 0, bytes(4)),
    "window overflow": HELLO + 2 * frame(WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"),
    "goaway": HELLO + frame(GOAWAY, 0, 0, bytes(8)) + frame(PING, 0, 0, bytes(8)),
    "padding longer than the frame": HELLO + frame(DATA, 8, 1, b"\xff"),
    "no method": hostile_request(__method=""),
    "get": hostile_request(__method="GET"),
    "no path": hostile_request(__path=""),
    "path of one part": hostile_request(__path="/Echo"),
    "path of three parts": hostile_request(__path="/a/b/c"),
    "path without a slash": hostile_request(__path="a/b"),
    "scheme": hostile_request(__scheme="gopher"),
    "no te": hostile_request(te=""),
    "html": hostile_request(content_type="text/html"),
    "no content type": hostile_request(content_type=""),
    "timeout of no number": hostile_request(grpc_timeout="soon"),
    "timeout of no unit": hostile_request(grpc_timeout="10"),
    "timeout of all time": hostile_request(grpc_timeout="9999999999999999H"),
    "negative timeout": hostile_request(grpc_timeout="-5S"),
    "binary header": hostile_request(x_bin="?"),
    "headers and the end": hostile_request(flags=5, data=b""),
    "compressed": hostile_request(b"\x01\0\0\0\x01x"),
    "compressed so it says": hostile_request(b"\x01\0\0\0\x01x", grpc_encoding="gzip"),
    "compressed by nobody": hostile_request(b"\x01\0\0\0\x01x", grpc_encoding="magic"),
    "message without end": hostile_request(b"\0\0\0\0\x05x"),
    "half a length": hostile_request(b"\0\0"),
    "message of 4 GiB": hostile_request(b"\0\xff\xff\xff\xffx"),
    "trailers": hostile_request(data=b"")
    + frame(DATA, 0, 1, NOTHING)
    + frame(HEADERS, 5, 1, hpack(("grpc-status", "0"))),
    "trailers without status": hostile_request(data=b"") + frame(HEADERS, 5, 1, hpack(("x", "y"))),
    "1,000 calls": HELLO
    + b"".join(frame(HEADERS, 4, number, hpack(*GOOD_HEADERS.items())) for number in range(1, 2000, 2)),
    "1,000 resets": HELLO
    + b"".join(
        frame(HEADERS, 4, number, hpack(*GOOD_HEADERS.items())) + frame(RST_STREAM, 0, number, bytes(4))
        for number in range(1, 2000, 2)
    ),
}


async def endure(service: Service, *pieces: bytes) -> None:
    """Serves a hostile client and a proper one at once. The proper one has to be served before, during and after."""
    server = service.server()
    async with http2_client(server) as client:
        await client.still_works()
        async with connection(server) as stream:
            for piece in pieces:
                with contextlib.suppress(trio.BrokenResourceError):  # it has closed the connection
                    await stream.send_all(piece)
                await trio.testing.wait_all_tasks_blocked()
            await client.still_works()
        await client.still_works()
        assert server.connections == 1


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
async def test_others_are_served_when_a_client_is_hostile(data: bytes, service: Service) -> None:
    """What is no gRPC ends its own connection at most; others are served, and the log is not filled."""
    await endure(service, data)


@pytest.mark.parametrize("name", ["http/1.1", "tls", "huge frame", "get", "message of 4 GiB"])
async def test_connection_is_closed_when_its_client_is_beyond_help(name: str, service: Service) -> None:
    """A client that speaks something else sees the end of its connection instead of waiting for an answer."""
    async with connection(service.server()) as stream:
        await stream.send_all(HOSTILE[name])
        while await stream.receive_some():
            pass


async def test_others_are_served_when_a_client_sends_bytes_one_by_one(service: Service) -> None:
    """A request that arrives byte by byte is served as any other."""
    async with connection(service.server()) as stream:
        client = Http2Client(stream)
        stream_id = client.request("Echo", text("slow"))
        for byte in client.h2.data_to_send():
            await stream.send_all(bytes([byte]))
            await trio.testing.wait_all_tasks_blocked()
        assert (await client.answer(stream_id)).messages == [text("slow").SerializeToString()]


frames = st.builds(
    frame,
    st.integers(0, 11),
    st.sampled_from([0, 1, 4, 5, 8, 0x20, 0xFF]),
    st.integers(0, 8),
    st.one_of(
        st.binary(max_size=40),
        st.just(hpack(*GOOD_HEADERS.items())),
        st.just(NOTHING),
        st.just(bytes(4)),
        st.just(bytes(8)),
    ),
)


@settings(max_examples=100, deadline=None)
@given(
    start=st.sampled_from([b"", HELLO, hostile_request()]),
    pieces=st.lists(st.one_of(frames, st.binary(max_size=60)), max_size=8),
    at_once=st.booleans(),
)
async def test_others_are_served_when_a_client_sends_anything(start: bytes, pieces: list[bytes], at_once: bool) -> None:
    """Whatever bytes and frames arrive, in one read or in several, others are served."""
    await endure(Service(), *([start + b"".join(pieces)] if at_once else [start, *pieces]))


# -- What a peer can make us keep or compute ---------------------------------------------------------------------------


@pytest.fixture
def dropped(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Returns why connections have been dropped."""
    caplog.set_level(logging.DEBUG, "afxdpd")
    head = "gRPC: connection dropped: "
    return lambda: [text.removeprefix(head) for text in caplog.messages if text.startswith(head)]


def raw_connections() -> list[afxdpd._Connection]:
    """What there is of HTTP/2 connections in this process."""
    return [each for each in gc.get_objects() if isinstance(each, afxdpd._Connection)]


async def flood(stream: trio.abc.Stream, data: bytes, times: int) -> int:
    """Sends data again and again while the server lets it happen; returns how often."""
    for number in range(times):
        try:
            await stream.send_all(data)
        except trio.BrokenResourceError:
            return number
    return times


HEADERS_BLOCKS = {
    "one long number": (b"\0\x7f" + b"\xff" * 900_000, r"bytes of headers"),
    "many small ones": (b"\0\1x\1y" * 10_000, r"bytes of headers"),
    "one that unpacks to many": (b"\x40\1x\x7f\xa1\x1e" + b"y" * 4000 + b"\xbe" * 50, r"header list larger than 8192"),
}


@pytest.mark.parametrize(("block", "reason"), HEADERS_BLOCKS.values(), ids=HEADERS_BLOCKS)
async def test_headers_are_not_decoded_when_they_are_too_large(
    block: bytes, reason: str, service: Service, dropped: Callable[[], list[str]]
) -> None:
    """Headers that are larger than 8 KiB, packed or unpacked, end their connection before time is spent on them."""
    pieces = [block[start : start + (1 << 14)] for start in range(0, len(block), 1 << 14)]
    frames_ = [frame(CONTINUATION if number else HEADERS, 0, 1, piece) for number, piece in enumerate(pieces)]
    async with connection(service.server()) as stream:
        await stream.send_all(HELLO + b"".join(frames_) + frame(CONTINUATION, 4, 1, b""))
        while await stream.receive_some():
            pass
    (why,) = dropped()
    assert re.search(reason, why)


async def test_connection_ends_when_headers_go_on_and_on(service: Service, dropped: Callable[[], list[str]]) -> None:
    """No more than 64 frames of one call's headers are waited for."""
    async with connection(service.server()) as stream:
        await stream.send_all(HELLO + frame(HEADERS, 0, 1, b""))
        await flood(stream, frame(CONTINUATION, 0, 1, b""), 100)
        while await stream.receive_some():
            pass
    assert "Too many continuation frames" in dropped()[0]


async def test_settings_say_what_is_taken_when_a_connection_begins(service: Service) -> None:
    """A client is told the sizes of frames, headers, calls and unfinished messages."""
    async with http2_client(service.server()) as client:
        await client.still_works()
        settings = client.h2.remote_settings
        assert settings.max_frame_size == 1 << 14
        assert settings.max_header_list_size == 1 << 13
        assert settings.max_concurrent_streams == 100
        assert settings.initial_window_size >= MESSAGE_MAX + 5
        assert client.h2.outbound_flow_control_window <= 16 << 20


async def test_connection_ends_when_a_frame_begins_that_is_too_large(
    service: Service, dropped: Callable[[], list[str]]
) -> None:
    """A frame of more than 16 KiB is refused at its head, before there is a byte to be kept."""
    async with connection(service.server()) as stream:
        await stream.send_all(HELLO + frame(DATA, 0, 1, bytes((1 << 14) + 1))[:9])
        while await stream.receive_some():
            pass
    assert "a frame that is too large" in dropped()[0]


async def test_connection_ends_when_settings_have_no_end(service: Service, dropped: Callable[[], list[str]]) -> None:
    """A client cannot have kept what it invents as settings."""
    async with connection(service.server()) as stream:
        kinds = b"".join(struct.pack(">HI", kind, 1) for kind in range(100, 200))
        await stream.send_all(HELLO + frame(SETTINGS, 0, 0, kinds))
        while await stream.receive_some():
            pass
    assert "too many settings" in dropped()[0]


async def test_table_of_headers_stays_small_when_the_client_allows_more(service: Service) -> None:
    """A client that lets our headers refer to gigabytes of earlier ones is not taken at its word."""
    async with http2_client(service.server()) as client:
        client.h2.update_settings({h2.settings.SettingCodes.HEADER_TABLE_SIZE: 1 << 31})
        await client.flush()
        for number in range(50):
            name = f"/{SERVICE}/{number}" + "x" * 500
            assert (await client.ask("", path=name)).status == UNIMPLEMENTED
        encoder = raw_connections()[0].h2_connection.encoder
        assert encoder.header_table_size <= 4096
        await client.still_works()


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "snappy", "magic", ""])
async def test_call_is_unimplemented_when_its_message_is_compressed(encoding: str, service: Service) -> None:
    """A compressed message is refused and not inflated, whatever it would become; its connection goes on."""
    bomb = zlib.compress(bytes(100 << 20))
    async with http2_client(service.server()) as client:
        stream_id = client.headers("Echo", grpc_encoding=encoding)
        content = struct.pack(">BI", 1, len(bomb)) + bomb
        client.h2.increment_flow_control_window(1 << 20)
        await client.flush()
        for start in range(0, len(content), 1 << 14):
            await client.flush(frame(DATA, 0, stream_id, content[start : start + (1 << 14)]))
        answer = await client.answer(stream_id)
        assert (answer.status, answer.text) == (UNIMPLEMENTED, "Echo%3A%20messages%20must%20not%20be%20compressed")


async def test_call_is_unimplemented_when_grpcio_compresses(service: Service, short_path: Path) -> None:
    """A client that compresses without being asked to is told that it must not."""
    path = short_path / "s.sock"
    async with serving(path, service.server()), grpcio(path) as peer:
        assert await peer.statuses("Echo", text("x" * 10_000), compress=True) == {"UNIMPLEMENTED"}
        assert await peer.statuses("Echo", text("x" * 10_000)) == {"OK"}


async def test_window_is_given_back_when_calls_end_unfinished(service: Service) -> None:
    """Calls that end in the middle of a message, in whatever way, do not use up their connection's window."""
    async with http2_client(service.server()) as client:
        await client.still_works()
        for number in range(60):
            stream_id = client.headers("Echo" if number % 2 else "None")
            client.h2.send_data(stream_id, struct.pack(">BI", 0, 1 << 20))
            for _ in range(40):
                client.h2.send_data(stream_id, bytes(1 << 14))  # raises when there is no window
            await client.flush()
            if number % 2:
                client.h2.reset_stream(stream_id)
            else:
                client.h2.end_stream(stream_id)
            await client.still_works()


async def test_connection_ends_when_unfinished_messages_exceed_its_window(
    service: Service, short_path: Path, dropped: Callable[[], list[str]]
) -> None:
    """Unfinished messages of all calls together are kept up to 16 MiB, and not from a client that ignores that."""
    path = short_path / "s.sock"
    async with serving(path, service.server()), await trio.open_unix_socket(os.fspath(path)) as stream:
        await stream.send_all(HELLO)
        for number in range(1, 21, 2):
            await stream.send_all(frame(HEADERS, 4, number, hpack(*GOOD_HEADERS.items())))
            await stream.send_all(frame(DATA, 0, number, struct.pack(">BI", 0, MESSAGE_MAX)))
        pieces = b"".join(frame(DATA, 0, number, bytes(1 << 14)) for number in range(1, 21, 2))
        assert (await flood(stream, pieces, 200)) * len(pieces) < 18 << 20  # some is in the socket
    assert "FlowControlError" in dropped()[0]


@contextmanager
def kept_at_most(size: int) -> Iterator[None]:
    """Checks how many bytes of memory are left allocated by the block."""
    gc.collect()
    tracemalloc.start()
    try:
        yield
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < size
    finally:
        tracemalloc.stop()


async def test_message_needs_its_length_when_it_comes_in_small_pieces(service: Service) -> None:
    """10,000 bytes in as many frames, and as many empty frames, need no more memory than in one piece."""
    async with http2_client(service.server()) as client:
        await client.still_works()
        client.headers("Echo")
        await client.flush(frame(DATA, 0, 3, struct.pack(">BI", 0, 1 << 20)))
        await trio.testing.wait_all_tasks_blocked()
        with kept_at_most(1 << 19):
            for _ in range(10):
                await client.stream.send_all((frame(DATA, 0, 3, b"x") + frame(DATA, 0, 3, b"")) * 1000)
                await trio.testing.wait_all_tasks_blocked()
        client.h2.reset_stream(3)
        await client.still_works()


@asynccontextmanager
async def greedy_client(path: Path) -> AsyncIterator[Http2Client]:
    """A client on a Unix socket that has given the server all the window there is."""
    async with await trio.open_unix_socket(os.fspath(path)) as stream:
        client = Http2Client(stream)
        client.h2.increment_flow_control_window((1 << 31) - 1 - 65_535)
        client.h2.update_settings(
            {
                h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: (1 << 31) - 1,
                h2.settings.SettingCodes.MAX_FRAME_SIZE: (1 << 24) - 1,
            }
        )
        await client.still_works()
        yield client


async def test_answers_wait_when_the_client_does_not_read(service: Service, short_path: Path) -> None:
    """What waits to be sent to a client that does not read stays bounded; all of it arrives when it does."""
    path = short_path / "s.sock"
    async with serving(path, service.server()), greedy_client(path) as client:
        size = 3 << 20
        calls = [client.request("Big", text(str(size))) for _ in range(20)]
        await client.flush()
        await trio.testing.wait_all_tasks_blocked(0.05)
        (its,) = (each for each in raw_connections() if not each.config.client_side)
        assert (1 << 20) < its.unsent < (1 << 20) + (1 << 16)
        for stream_id in calls:
            answer = await client.answer(stream_id)
            assert (answer.status, [len(each) for each in answer.messages]) == (OK, [size])


async def test_connection_ends_when_its_client_asks_and_never_reads(
    service: Service, short_path: Path, dropped: Callable[[], list[str]]
) -> None:
    """A client that has answers made by the megabyte and reads none is dropped; others are served meanwhile."""
    path = short_path / "s.sock"
    server = service.server()
    async with serving(path, server), greedy_client(path) as other, greedy_client(path) as client:
        data = frame(PING, 0, 0, bytes(8)) * 1000
        assert await flood(client.stream, data, 50) == 50
        await other.still_works()
        assert await flood(client.stream, data, 1000) < 1000
        await other.still_works()
        while server.connections > 1:
            await other.still_works()
    assert "the peer does not read" in dropped()[0]


async def test_calls_are_bounded_when_their_client_never_reads(
    service: Service, short_path: Path, dropped: Callable[[], list[str]]
) -> None:
    """A client that makes calls and does not read how they end has no more than 200 of them kept."""
    path = short_path / "s.sock"
    server = service.server()
    async with serving(path, server), greedy_client(path) as other, greedy_client(path) as client:
        before = trio.lowlevel.current_statistics().tasks_living
        most = before

        def look() -> None:
            nonlocal most
            most = max(most, trio.lowlevel.current_statistics().tasks_living)

        client.request("Big", text(str(MESSAGE_MAX)))
        await client.flush()
        with contextlib.suppress(trio.BrokenResourceError):
            for _ in range(1000):
                client.request("None")
                client.h2.streams.clear()  # it does not wait for answers
                await client.flush()
                await trio.lowlevel.checkpoint()
                look()
        await other.still_works()
        while server.connections > 1:
            await other.still_works()
        assert 200 <= most - before < 220
    assert "too many calls" in dropped()[0]


async def test_calls_keep_two_messages_when_more_are_sent(service: Service, short_path: Path) -> None:
    """Of the messages of a call no more are kept than it takes to see that they are too many."""
    path = short_path / "s.sock"
    async with serving(path, service.server()), greedy_client(path) as client:
        client.request("Big", text(str(MESSAGE_MAX)))  # which is not read: no call gets on
        await client.flush()
        await trio.testing.wait_all_tasks_blocked(0.05)
        stream_id = client.headers("Echo")
        await client.flush()
        with kept_at_most(2 << 20):
            for _ in range(10):
                await client.stream.send_all(frame(DATA, 0, stream_id, NOTHING * 3000))
            await trio.testing.wait_all_tasks_blocked(0.05)
        assert (await client.answer(stream_id)).status == INVALID_ARGUMENT
        await client.still_works()


# -- Many connections --------------------------------------------------------------------------------------------------


async def test_kubelet_is_served_when_connections_flood_the_socket(service: Service, short_path: Path) -> None:
    """1,000 idle connections displace each other, and neither the one that has a call nor one that makes a call."""
    path = short_path / "s.sock"
    server = service.server()
    async with serving(path, server), greedy_client(path) as kubelet, contextlib.AsyncExitStack() as stack:
        watch = kubelet.request("Watch")
        await kubelet.flush()
        await kubelet.message(watch)
        for number in range(1000):
            stream = await stack.enter_async_context(await trio.open_unix_socket(os.fspath(path)))
            await stream.send_all(HELLO[: number % 40])
            assert server.connections <= 32
            if number % 100 == 0:
                assert await call_unix(path, f"{SERVICE}/Echo", text("a"), Text, timeout=10) == text("a")
        service.announce(text("second"))
        assert await kubelet.message(watch, 1) == text("second").SerializeToString()
        await kubelet.still_works()


async def test_connection_is_refused_when_all_others_have_calls(service: Service, short_path: Path) -> None:
    """Where each of 32 connections has a call, a further one is closed; when one has ended, there is room."""
    path = short_path / "s.sock"
    server = service.server()
    async with serving(path, server), contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(greedy_client(path)) for _ in range(32)]
        for client in clients:
            client.request("Watch")
            await client.flush()
        await service.until(running=32)
        with pytest.raises(RpcError, match=r"^UNAVAILABLE: "):
            await call_unix(path, f"{SERVICE}/Echo", text(), Text, timeout=10)
        assert server.connections == 32
        await clients[0].still_works()
        await clients[1].stream.aclose()
        await service.until(running=31)
        while server.connections == 32:
            await clients[0].still_works()
        assert await call_unix(path, f"{SERVICE}/Echo", text(), Text, timeout=10) == text()
        for client in clients[2:]:
            await client.still_works()


async def test_connection_counts_as_idle_when_its_calls_have_ended(service: Service, short_path: Path) -> None:
    """A connection whose calls have all ended makes room for others."""
    path = short_path / "s.sock"
    server = service.server()
    async with serving(path, server), greedy_client(path) as first, contextlib.AsyncExitStack() as stack:
        for _ in range(31):
            client = await stack.enter_async_context(greedy_client(path))
            client.request("Watch")
            await client.flush()
        await service.until(running=31)
        await first.still_works()
        assert await call_unix(path, f"{SERVICE}/Echo", text(), Text, timeout=10) == text()
        await first.until_closed()


# -- Our client, and servers that do not answer ------------------------------------------------------------------------


async def silent(stream: trio.abc.Stream) -> None:
    """Reads all and answers nothing."""
    async with stream:
        while await stream.receive_some():
            pass


async def leaving(stream: trio.abc.Stream, answer: bytes = b"") -> None:
    """Reads a request, answers something and closes the connection."""
    async with stream:
        await stream.receive_some()
        await stream.send_all(answer)


@pytest.mark.parametrize(
    "answer", [b"", HELLO[len(PREFACE) :], frame(SETTINGS, 0, 0, b"") + frame(GOAWAY, 0, 0, bytes(8))]
)
async def test_call_fails_at_once_when_the_server_goes_away(
    answer: bytes, short_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """The end of the connection is UNAVAILABLE in that moment, not at the deadline."""
    path = short_path / "s.sock"
    async with trio.open_nursery() as nursery:
        listener = listen(path)
        handler = functools.partial(leaving, answer=answer)
        await nursery.start(trio.serve_listeners, handler, [listener])
        with pytest.raises(RpcError, match=r"the server closed the connection before it answered t\.S/M$") as caught:
            await call_unix(path, "t.S/M", text(), Text, timeout=60)
        assert caught.value.status == "UNAVAILABLE"
        assert trio.current_time() == 0
        nursery.cancel_scope.cancel()


async def test_call_fails_at_once_when_the_server_is_cancelled(
    service: Service, short_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """A call that is being answered by a server that ends is UNAVAILABLE in that moment."""
    path = short_path / "s.sock"

    async def ask() -> None:
        with pytest.raises(RpcError, match=r"^UNAVAILABLE: the server closed the connection"):
            await call_unix(path, f"{SERVICE}/Wait", text(), Text, timeout=60)

    async with trio.open_nursery() as nursery, serving(path, service.server()):
        nursery.start_soon(ask)
        await service.until(running=1)
    assert trio.current_time() == 0


async def test_call_fails_at_once_when_the_server_resets_it(
    short_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """RST_STREAM is UNAVAILABLE in that moment, though the server keeps the connection open."""

    async def resetting(stream: trio.abc.Stream) -> None:
        await stream.send_all(frame(SETTINGS, 0, 0, b"") + frame(RST_STREAM, 0, 1, bytes(4)))
        await silent(stream)

    path = short_path / "s.sock"
    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, resetting, [listen(path)])
        with pytest.raises(RpcError, match=r"^UNAVAILABLE: "):
            await call_unix(path, "t.S/M", text(), Text, timeout=60)
        assert trio.current_time() == 0
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("accepts", [True, False])
async def test_call_fails_at_its_deadline_when_the_server_never_answers(
    accepts: bool, short_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """A server that listens and answers nothing, or never accepts, is DEADLINE_EXCEEDED; nothing stays open."""
    path = short_path / "s.sock"
    async with trio.open_nursery() as nursery:
        listener = listen(path)
        if accepts:
            await nursery.start(trio.serve_listeners, silent, [listener])
        await trio.testing.wait_all_tasks_blocked()
        before = open_fds()
        with pytest.raises(RpcError, match=f"{path}: no answer to t.S/M within 7.5 s$") as caught:
            await call_unix(path, "t.S/M", text(), Text, timeout=7.5)
        assert caught.value.status == "DEADLINE_EXCEEDED"
        assert trio.current_time() == pytest.approx(7.5)
        await trio.testing.wait_all_tasks_blocked()
        assert open_fds() == before
        await listener.aclose()
        nursery.cancel_scope.cancel()


async def test_call_fails_when_there_is_no_socket(short_path: Path) -> None:
    """A server that is not there is UNAVAILABLE, with the path and the reason."""
    path = short_path / "s.sock"
    with pytest.raises(RpcError, match=f"^UNAVAILABLE: {path}: No such file or directory$"):
        await call_unix(path, "t.S/M", text(), Text, timeout=10)
    open_unix_listener(path).close()
    with pytest.raises(RpcError, match=f"^UNAVAILABLE: {path}: Connection refused$"):
        await call_unix(path, "t.S/M", text(), Text, timeout=10)


async def test_call_fails_when_the_path_is_too_long(short_path: Path) -> None:
    """A path that no socket can have is UNAVAILABLE, with a reason that can be read."""
    with pytest.raises(RpcError, match=r"^UNAVAILABLE: /.*: AF_UNIX path too long$"):
        await call_unix(short_path / ("x" * 108), "t.S/M", text(), Text, timeout=10)


async def test_call_leaves_nothing_when_it_is_cancelled(service: Service, short_path: Path) -> None:
    """A call that its caller gives up closes its connection, and the server's handler ends."""
    path = short_path / "s.sock"
    server = service.server()
    async with serving(path, server):
        before = open_fds()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(functools.partial(call_unix, path, f"{SERVICE}/Wait", text(), Text, timeout=60))
            await service.until(running=1)
            nursery.cancel_scope.cancel()
        await server.wait_no_connections()
        await trio.testing.wait_all_tasks_blocked()
        assert (service.running, service.ended) == (0, 1)
        assert open_fds() == before


ANSWER_HEADERS = frame(HEADERS, 4, 1, hpack((":status", "200"), ("content-type", "application/grpc")))
REFUSED = hpack(
    (":status", "200"),
    ("content-type", "application/grpc"),
    ("grpc-status", "5"),
    ("grpc-message", "no%20such%20thing"),
)
TRAILERS = frame(HEADERS, 5, 1, hpack(("grpc-status", "0")))
A = text("a").SerializeToString()
MESSAGE_A = frame(DATA, 0, 1, struct.pack(">BI", 0, len(A)) + A)


async def answer_with(*pieces: bytes, reply_max: int = MESSAGE_MAX) -> Message | RpcError:
    """Makes a call to a server that sends these pieces and closes the connection."""
    mine, its = trio.testing.memory_stream_pair()

    async def serve() -> None:
        async with its:
            await its.receive_some()
            with contextlib.suppress(trio.BrokenResourceError):  # the call has ended before
                for piece in pieces:
                    await its.send_all(piece)
                    await trio.testing.wait_all_tasks_blocked()

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            return await call(mine, "Echo", text(), reply_max)
    raise AssertionError


@pytest.mark.parametrize("at_once", [True, False])
async def test_call_returns_the_reply_when_the_server_closes_right_after_it(at_once: bool) -> None:
    """An answer counts, whether the end of the connection comes with it or later."""
    pieces = [frame(SETTINGS, 0, 0, b""), ANSWER_HEADERS, MESSAGE_A, TRAILERS]
    assert await answer_with(*([b"".join(pieces)] if at_once else pieces)) == text("a")


@pytest.mark.parametrize("at_once", [True, False])
async def test_call_has_the_servers_status_when_a_reset_follows_it(at_once: bool) -> None:
    """Servers reset a call that they refuse before it is complete: the status counts."""
    pieces = [frame(SETTINGS, 0, 0, b""), frame(HEADERS, 5, 1, REFUSED), frame(RST_STREAM, 0, 1, bytes(4))]
    outcome = await answer_with(*([b"".join(pieces)] if at_once else pieces))
    assert isinstance(outcome, RpcError)
    assert str(outcome) == "NOT_FOUND: no such thing"


UNUSABLE = {
    "http/1.1": [b"HTTP/1.1 400 Bad Request\r\n\r\n"],
    "no message": [HELLO[len(PREFACE) :], ANSWER_HEADERS, TRAILERS],
    "half an answer": [HELLO[len(PREFACE) :], ANSWER_HEADERS, MESSAGE_A],
    "two messages": [HELLO[len(PREFACE) :], ANSWER_HEADERS, MESSAGE_A, MESSAGE_A, TRAILERS],
    "no message of its type": [
        HELLO[len(PREFACE) :],
        ANSWER_HEADERS,
        frame(DATA, 0, 1, b"\0\0\0\0\x01\xff"),
        TRAILERS,
    ],
    "reset": [HELLO[len(PREFACE) :], frame(RST_STREAM, 0, 1, bytes(4))],
    "error of http": [HELLO[len(PREFACE) :], frame(HEADERS, 5, 1, hpack((":status", "503")))],
    "another stream": [HELLO[len(PREFACE) :], frame(HEADERS, 5, 3, REFUSED)],
    "a request": [HELLO[len(PREFACE) :], frame(HEADERS, 4, 2, hpack(*GOOD_HEADERS.items()))],
}


@pytest.mark.parametrize("pieces", UNUSABLE.values(), ids=UNUSABLE)
@pytest.mark.parametrize("at_once", [True, False])
async def test_call_fails_when_the_answer_cannot_be_used(at_once: bool, pieces: list[bytes]) -> None:
    """Whatever a server sends that is no answer, is UNAVAILABLE for the caller."""
    outcome = await answer_with(*([b"".join(pieces)] if at_once else pieces))
    assert isinstance(outcome, RpcError)
    assert outcome.status == "UNAVAILABLE"


def large_reply(message: Message) -> list[bytes]:
    """What a server sends to reply with a large message."""
    content = message.SerializeToString()
    content = struct.pack(">BI", 0, len(content)) + content
    frames_ = [frame(DATA, 0, 1, content[start : start + (1 << 14)]) for start in range(0, len(content), 1 << 14)]
    return [HELLO[len(PREFACE) :], ANSWER_HEADERS, b"".join(frames_), TRAILERS]


async def test_call_fails_when_the_reply_is_larger_than_wanted() -> None:
    """A reply may be as large as the caller says, 4 MiB where it says nothing; beyond, the error has both sizes."""
    pieces = large_reply(padded(MESSAGE_MAX + 1))
    assert await answer_with(*pieces, reply_max=MESSAGE_MAX + 1) == padded(MESSAGE_MAX + 1)
    for more in ({}, {"reply_max": MESSAGE_MAX}):
        assert str(await answer_with(*pieces, **more)) == (
            "RESOURCE_EXHAUSTED: test.Service/Echo: a message of 4194305 bytes, 4194304 are allowed"
        )
    assert str(await answer_with(*large_reply(text("x" * 99)), reply_max=100)) == (
        "RESOURCE_EXHAUSTED: test.Service/Echo: a message of 101 bytes, 100 are allowed"
    )


async def test_call_fails_when_the_reply_is_compressed() -> None:
    """Our client does not say that it takes compressed messages, and inflates none."""
    bomb = zlib.compress(bytes(1 << 20))
    answer = frame(DATA, 0, 1, struct.pack(">BI", 1, len(bomb)) + bomb)
    assert str(await answer_with(HELLO[len(PREFACE) :], ANSWER_HEADERS, answer, TRAILERS)) == (
        "INTERNAL: test.Service/Echo: messages must not be compressed"
    )


async def test_pod_resources_are_read_when_there_are_tens_of_thousands_of_pods(short_path: Path) -> None:
    """kubelet's list of pods may be larger than other messages."""
    pods = podresources.ListPodResourcesResponse()
    for number in range(40_000):
        container = pods.pod_resources.add(name=f"pod-{number}" + "x" * 50, namespace="n" * 30).containers.add(name="c")
        container.devices.add(resource_name="afxdp/pool", device_ids=[f"veth{number}"])
    assert pods.ByteSize() > MESSAGE_MAX

    async def serve(stream: trio.abc.Stream) -> None:
        async with stream:
            await stream.receive_some()
            await stream.send_all(b"".join(large_reply(pods)))
            while await stream.receive_some():
                pass

    path = short_path / "s.sock"
    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, serve, [listen(path)])
        kubelet = afxdpd.PodResources(path)
        nursery.start_soon(kubelet.run)
        with trio.fail_after(20):
            assert len((await kubelet.ask()).owners) == 40_000
        nursery.cancel_scope.cancel()


@settings(max_examples=50, deadline=None)
@given(
    start=st.sampled_from([b"", HELLO[len(PREFACE) :], HELLO[len(PREFACE) :] + ANSWER_HEADERS]),
    pieces=st.lists(st.one_of(frames, st.binary(max_size=60)), max_size=6),
)
async def test_call_ends_when_a_server_sends_anything(start: bytes, pieces: list[bytes]) -> None:
    """Whatever bytes and frames a server sends, the call ends with a reply or an RpcError."""
    assert isinstance(await answer_with(start, *pieces), Message | RpcError)


# -- Sockets -----------------------------------------------------------------------------------------------------------


def test_listener_replaces_what_is_there_when_it_is_opened(short_path: Path) -> None:
    """A file that a dead process left is no obstacle, whatever it is."""
    path = short_path / "s.sock"
    path.write_text("not a socket")
    with open_unix_listener(path), open_unix_listener(path) as second, socket.socket(socket.AF_UNIX) as client:
        client.connect(os.fspath(path))
        second.accept()[0].close()


@pytest.mark.parametrize(
    ("name", "error"), [("absent/s.sock", errno.ENOENT), ("file/s.sock", errno.ENOTDIR), ("x" * 108, None)]
)
def test_listener_raises_when_its_path_is_impossible(name: str, error: int | None, short_path: Path) -> None:
    """The system's error carries the path; nothing stays open."""
    (short_path / "file").touch()
    before = open_fds()
    with pytest.raises(OSError, match=r"AF_UNIX path too long|No such file|Not a directory") as caught:
        open_unix_listener(short_path / name)
    assert caught.value.errno == error
    assert caught.value.filename == os.fspath(short_path / name)
    assert open_fds() == before


def test_busy_socket_is_refused_when_a_process_listens(short_path: Path) -> None:
    """A socket that somebody serves is busy, also when the queue of connections is full."""
    path = short_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as stack:
        listener.bind(os.fspath(path))
        listener.listen(0)
        for _ in range(3):
            with pytest.raises(afxdpd.EndpointBusyError, match=f"^{path}: another process serves this; end it first$"):
                refuse_busy(path)
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(os.fspath(path))


def test_socket_is_not_busy_when_nobody_listens(short_path: Path) -> None:
    """No file, a dead process's socket and a plain file are all free to be replaced."""
    path = short_path / "s.sock"
    refuse_busy(path)
    open_unix_listener(path).close()
    assert path.is_socket()
    refuse_busy(path)
    (short_path / "file").touch()
    refuse_busy(short_path / "file")
