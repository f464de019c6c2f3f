"""What the daemon shows of itself: probes, metrics, status, and HTTP with its limits; the kernel is a fake."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from conftest import open_fds
from fakes import FakeHost
from prometheus_client.parser import text_string_to_metric_families
from test_pool_options import Daemon
from test_pools import Bench, config_of, connected, eventually, net
from trio.testing import MockClock, wait_all_tasks_blocked

import afxdpd
from afxdpd import (
    HANDSHAKES,
    HTTP_BODY_MAX,
    HTTP_CONNECTIONS_MAX,
    HTTP_HEAD_MAX,
    HTTP_IDLE_TIMEOUT,
    HTTP_SEND_TIMEOUT,
    RELEASE_AFTER,
    RELEASE_GRACE,
    ConfigError,
    EndpointBusyError,
    Histogram,
    HostError,
    HttpServer,
    Observation,
    Page,
    PluginConfig,
    RequestError,
    ask_daemon,
    http_listener,
    parse_http_address,
    random_request,
    text_page,
)
from afxdpd_proto import deviceplugin_pb2 as api

# -- Histogram ---------------------------------------------------------------------------------------------------------


def test_histogram_counts_a_duration_in_the_class_whose_bound_it_is_not_above() -> None:
    """A duration that is exactly a bound belongs to it; what is above all bounds is counted as well."""
    histogram = Histogram([0.1, 1.0])
    for seconds in (0.0, 0.1, 0.5, 1.0, 7.0):
        histogram.observe(seconds)
    assert histogram.counts == [2, 2, 1]
    assert histogram.cumulated() == [2, 4, 5]
    assert histogram.total == pytest.approx(8.6)


# -- Addresses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9100", (socket.AF_INET, ("127.0.0.1", 9100))),
        ("0.0.0.0:0", (socket.AF_INET, ("0.0.0.0", 0))),
        ("[::1]:65535", (socket.AF_INET6, ("::1", 65535, 0, 0))),
        ("[::]:80", (socket.AF_INET6, ("::", 80, 0, 0))),
        ("[fe80::1%lo]:80", (socket.AF_INET6, ("fe80::1", 80, 0, 1))),
        ("/run/afxdpd/http.sock", Path("/run/afxdpd/http.sock")),
        ("./http.sock", Path("http.sock")),
    ],
)
def test_address_is_read_when_it_is_one(text: str, address: object) -> None:
    """IPv4 and IPv6 addresses have a port, a path has a slash."""
    assert parse_http_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        *("", ":9100", "9100", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "127.1:80", "1.2.3.256:80"),
        *("::1:80", "[::1]", "[::1:80", "[:::1]:80", "[fe80::1%absent0]:80", "localhost:80", "http.sock"),
        *("/" + "x" * 107, "/a\nb"),
    ],
)
def test_address_is_refused_when_it_is_none(text: str) -> None:
    """Whatever is no address and no path is refused with the text in the message."""
    with pytest.raises(ValueError, match=r"neither ADDRESS:PORT nor|is no path") as refusal:
        parse_http_address(text)
    assert repr(text) in str(refusal.value)


def test_listening_is_refused_when_another_process_does(tmp_path: Path, short_path: Path) -> None:
    """An address in use is told from other errors, and the one who has it keeps it."""
    path = short_path / "http.sock"
    with http_listener(parse_http_address("127.0.0.1:0")) as (first, name, _), http_listener(path):
        assert name == f"127.0.0.1:{first.getsockname()[1]}"
        for address in (parse_http_address(name), path):
            with pytest.raises(EndpointBusyError, match="another process serves this"), http_listener(address):
                pass
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
        assert path.stat().st_mode & 0o777 == 0o600
    assert not path.exists()


def test_listening_is_refused_when_there_is_a_file(short_path: Path) -> None:
    """A file that is no socket is never removed."""
    (short_path / "file").write_text("kept")
    (short_path / "link").symlink_to("file")
    for name in ("file", "link"):
        with pytest.raises(OSError, match="is no socket"), http_listener(short_path / name):
            pass
    assert (short_path / "file").read_text() == "kept"
    before = open_fds()
    with pytest.raises(OSError, match="No such file or directory"), http_listener(short_path / "absent" / "sock"):
        pass
    assert open_fds() == before


# -- HTTP --------------------------------------------------------------------------------------------------------------


class Web:
    """An HttpServer on loopback, with pages of all kinds."""

    def __init__(self) -> None:
        self.server = HttpServer(
            {
                "/": {"GET": self.page(b"root\n")},
                "/big": {"GET": self.page(bytes(32 << 20))},
                "/broken": {"GET": self.broken},
                "/act": {"POST": self.page(b"done\n")},
            }
        )
        self.address: tuple[str, int] = ("", 0)

    @staticmethod
    def page(body: bytes) -> Callable[[], Awaitable[Page]]:
        """What makes a page."""

        async def make() -> Page:
            await trio.lowlevel.checkpoint()
            return Page(body=body)

        return make

    async def broken(self) -> Page:
        """A page that cannot be made."""
        raise KeyError("a bug")

    async def connect(self) -> trio.SocketStream:
        """A connection."""
        return await trio.open_tcp_stream(*self.address)

    async def ask(self, *parts: bytes) -> tuple[int, dict[str, str], bytes]:
        """Sends something on a connection of its own; returns status, headers and body of what comes until its end."""
        async with await self.connect() as stream:
            for part in parts:
                await stream.send_all(part)
                await wait_all_tasks_blocked()
            return parse(await receive(stream))


async def receive(stream: trio.SocketStream) -> bytes:
    """All that comes until the end."""
    data = b""
    while part := await stream.receive_some():
        data += part
    return data


def parse(data: bytes) -> tuple[int, dict[str, str], bytes]:
    """Takes a response apart."""
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(first.split()[1]), headers, body


CLOSE = b"Host: x\r\nConnection: close\r\n\r\n"


@asynccontextmanager
async def web() -> AsyncIterator[Web]:
    """The server at work; in the end nothing is open any more."""
    before = open_fds()
    own = Web()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            with http_listener(parse_http_address("127.0.0.1:0")) as (listener, _, _):
                own.address = listener.getsockname()
                await nursery.start(own.server.serve, listener)
                yield own
                nursery.cancel_scope.cancel()
    assert own.server.connections == 0
    assert open_fds() == before


async def test_page_is_served_when_it_is_asked_for() -> None:
    """GET has the page with its length and type; HEAD the same without the body; neither may be stored."""
    async with web() as server:
        status, headers, body = await server.ask(b"GET / HTTP/1.1\r\n" + CLOSE)
        assert (status, body) == (200, b"root\n")
        assert headers.pop("date").endswith(" gmt")
        assert headers == {
            "content-type": "text/plain; charset=utf-8",
            "content-length": "5",
            "cache-control": "no-store",
            "connection": "close",
        }
        status, headers, body = await server.ask(b"HEAD / HTTP/1.1\r\n" + CLOSE)
        assert (status, headers["content-length"], body) == (200, "5", b"")
        for target in (b"/?x=1", b"http://any.host/", b"http://any.host:80/?x"):
            assert (await server.ask(b"GET " + target + b" HTTP/1.1\r\n" + CLOSE))[0] == 200
        assert (await server.ask(b"POST /act HTTP/1.1\r\n" + CLOSE))[::2] == (200, b"done\n")
        assert (await server.ask(b"GET / HTTP/1.0\r\n\r\n"))[::2] == (200, b"root\n")


async def test_connection_is_kept_when_requests_go_on() -> None:
    """Requests on one connection, also those sent ahead of replies, are answered one after another."""
    async with web() as server, await server.connect() as stream:
        await stream.send_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 3 + b"GET /absent HTTP/1.1\r\n" + CLOSE)
        data = await receive(stream)
        assert data.count(b"HTTP/1.1 200 OK\r\n") == 3
        assert data.count(b"root\n") == 3
        assert data.count(b"HTTP/1.1 404 Not Found\r\n") == 1


@pytest.mark.parametrize(
    ("request_bytes", "status", "words"),
    [
        (b"GET /absent HTTP/1.1\r\n" + CLOSE, 404, b"there are /, /big"),
        (b"GET //etc/passwd HTTP/1.1\r\n" + CLOSE, 404, b"no such page"),
        (b"POST / HTTP/1.1\r\nContent-Length: 3\r\n" + CLOSE + b"abc", 405, b"this page is for GET, HEAD"),
        (b"HEAD /act HTTP/1.1\r\n" + CLOSE, 405, b""),
        (b"DELETE /act HTTP/1.1\r\n" + CLOSE, 405, b"this page is for POST"),
        (b"GET /broken HTTP/1.1\r\n" + CLOSE, 500, b"see the log"),
        (b"nonsense\r\n\r\n", 400, b"illegal request line"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, b""),
        (b"GET / HTTP/1.1\r\n\r\n", 400, b"Missing mandatory Host: header"),
        (b"GET / HTTP/1.1\r\nContent-Length: x\r\n" + CLOSE, 400, b"bad Content-Length"),
        (b"GET / HTTP/1.1\r\nTransfer-Encoding: zip\r\n" + CLOSE, 501, b""),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 2 * HTTP_HEAD_MAX, 431, b""),
        (b"GET /" + b"x" * 2 * HTTP_HEAD_MAX, 431, b""),
        (b"POST /act HTTP/1.1\r\nContent-Length: 999999\r\n" + CLOSE + bytes(HTTP_BODY_MAX + 1), 413, b"too long"),
        (b"POST /act HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 9\r\n" + CLOSE, 200, b"done"),
        (b"POST /act HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + CLOSE + b"2\r\nab\r\n0\r\n\r\n", 200, b"done"),
        (b"POST /act HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + CLOSE + b"zz\r\n", 400, b""),
    ],
)
async def test_request_is_answered_when_it_is_wrong(
    request_bytes: bytes, status: int, words: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Each wrong request has the answer that HTTP has for it, in one piece or byte by byte; the next one is served."""
    async with web() as server:
        found, headers, body = await server.ask(request_bytes)
        assert found == status
        assert words in body
        assert ("allow" in headers) == (status == 405)
        if len(request_bytes) < 100:
            pieces = [request_bytes[at : at + 1] for at in range(len(request_bytes))]
            assert (await server.ask(*pieces))[0] == status
        assert (await server.ask(b"GET / HTTP/1.1\r\n" + CLOSE))[0] == 200
    assert all(("/broken failed" in record.message) == (status == 500) for record in caplog.records)


async def test_connection_is_closed_when_it_is_silent_or_slow(mock_clock: MockClock) -> None:
    """A peer has half a minute for a whole request, however it sends it."""
    async with web() as server:
        silent, slow = await server.connect(), await server.connect()
        async with silent, slow:
            await slow.send_all(b"GET / HT")
            await wait_all_tasks_blocked()
            mock_clock.jump(HTTP_IDLE_TIMEOUT - 1)
            await slow.send_all(b"T")
            await wait_all_tasks_blocked()
            assert server.server.connections == 2
            mock_clock.jump(1.1)
            assert await receive(silent) == await receive(slow) == b""
        await wait_all_tasks_blocked()
        assert server.server.connections == 0


async def test_connection_is_closed_when_the_peer_does_not_read(mock_clock: MockClock) -> None:
    """A peer has ten seconds to read a reply; meanwhile others are served."""
    async with web() as server, await server.connect() as stream:
        await stream.send_all(b"GET /big HTTP/1.1\r\nHost: x\r\n\r\n")
        await wait_all_tasks_blocked()
        assert (await server.ask(b"GET / HTTP/1.1\r\n" + CLOSE))[0] == 200
        assert server.server.connections == 1
        mock_clock.jump(HTTP_SEND_TIMEOUT + 0.1)
        await wait_all_tasks_blocked()
        assert server.server.connections == 0


async def test_request_is_answered_when_others_hold_all_connections() -> None:
    """There are so many connections at most; for a new one the oldest that asks nothing is closed."""
    async with web() as server:
        held = [await server.connect() for _ in range(HTTP_CONNECTIONS_MAX)]
        await held[0].send_all(b"GET /big HTTP/1.1\r\nHost: x\r\n\r\n")
        await wait_all_tasks_blocked()
        assert server.server.connections == HTTP_CONNECTIONS_MAX
        for number in range(1, 4):
            assert (await server.ask(b"GET / HTTP/1.1\r\n" + CLOSE))[0] == 200
            held.append(await server.connect())
            await wait_all_tasks_blocked()
            assert server.server.connections == HTTP_CONNECTIONS_MAX
            assert await receive(held[number]) == b""
        assert len(await held[0].receive_some(1000)) == 1000, "it is being answered"
        for stream in held:
            await stream.aclose()


async def test_server_lives_when_peers_vanish() -> None:
    """A peer that resets its connection at any moment ends nothing else."""
    async with web() as server:
        for request in (b"", b"GET / H", b"GET /big HTTP/1.1\r\nHost: x\r\n\r\n", b"POST / HTTP/1.1\r\nHost: x\r\nC"):
            stream = await server.connect()
            await stream.send_all(request)
            await wait_all_tasks_blocked()
            stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            await stream.aclose()
        await wait_all_tasks_blocked()
        assert (await server.ask(b"GET / HTTP/1.1\r\n" + CLOSE))[0] == 200
        await wait_all_tasks_blocked()
        assert server.server.connections == 0


# -- Probes ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def bench(short_path: Path) -> Bench:
    """A pool and what is around it."""
    return Bench(short_path)


def observation_of(bench: Bench, *configured: str) -> Observation:
    """What is seen of a pool."""
    return Observation({"pool": bench.pool}, lambda: configured or ["pool"])


async def test_pools_are_unready_until_kubelet_watches_them(bench: Bench) -> None:
    """A pool that is not begun, not registered or not watched is named with the reason; one that retired is not."""
    observation = observation_of(bench, "pool", "other")
    assert list(observation.unready_pools()) == [
        "afxdp/pool: not registered: kubelet has not answered yet",
        "afxdp/other: not begun yet",
    ]
    async with bench.running("veth0"):
        await eventually(lambda: bench.pool.trouble != "")
        page = await observation_of(bench).readyz()
        kubelet = bench.directory / "kubelet" / "device-plugins" / "kubelet.sock"
        assert page == text_page(
            [f"afxdp/pool: not registered: waiting for kubelet: {kubelet}: No such file or directory"], 503
        )
        bench.pool.registered = True
        assert list(observation_of(bench).unready_pools()) == [
            "afxdp/pool: registered, but kubelet does not watch the devices"
        ]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(watch, bench))
            await wait_all_tasks_blocked()
            assert await observation_of(bench).readyz() == text_page(["ok"])
            nursery.cancel_scope.cancel()
        bench.pool.registered = False
        bench.pool.reconfigure(None)
        assert await observation_of(bench).readyz() == text_page(["ok"])


async def watch(bench: Bench) -> None:
    """Watches the list as kubelet does."""
    async for _ in bench.pool.ListAndWatch(api.Empty()):
        pass


async def test_daemon_is_unhealthy_when_one_of_its_sockets_was_removed(bench: Bench) -> None:
    """A socket that is gone is named; when it is there again, all is well."""
    observation = observation_of(bench)
    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
        assert await observation.healthz() == text_page(["ok"])
        away = bench.path("veth0").rename(bench.directory / "away")
        assert await observation.healthz() == text_page([f"{bench.path('veth0')} was removed"], 503)
        away.rename(bench.path("veth0"))
        assert await observation.healthz() == text_page(["ok"])
        observation.sockets["/other"] = lambda: False
        assert await observation.healthz() == text_page(["/other was removed"], 503)


# -- Metrics -----------------------------------------------------------------------------------------------------------

LABELS = ("version", "pool", "health", "verb", "result", "reason", "errno", "le")
Samples = dict[tuple[str, ...], float]


async def samples(observation: Observation) -> Samples:
    """The metrics: name, values of labels with the pool first → value."""
    page = await observation.metrics()
    assert page.content_type.startswith("text/plain; version=")
    families = list(text_string_to_metric_families(page.body.decode()))
    assert all(family.documentation for family in families)
    return {
        (
            sample.name.removeprefix("afxdpd_"),
            *(sample.labels[name] for name in LABELS if name in sample.labels),
        ): sample.value
        for family in families
        for sample in family.samples
    }


async def test_metrics_count_what_a_pool_does(bench: Bench) -> None:
    """Devices, allocations, handshakes and releases are counted where they happen; the series are there before."""
    observation = observation_of(bench)
    before = await samples(observation)
    assert before["build_info", afxdpd.__version__] == 1
    assert before["process_resident_memory_bytes",] > 1e6
    assert before["devices", "pool", "Healthy"] == before["devices", "pool", "Unhealthy"] == 0
    assert before["handshake_requests_total", "pool", "connect", "nak"] == 0
    call = partial(bench.pool._methods()["Allocate"].call or no_call)
    async with bench.running("veth0", "veth1", net("veth2")):
        await call(request_of("veth0", "veth1"))
        with pytest.raises(RequestError):
            await call(request_of("absent"))
        bench.owned("veth0", "veth1")
        async with connected(bench.path("veth0")) as session, connected(bench.path("veth1")):
            assert await session.ask(b"/connect, pod-y") == b"/host_nak"
            assert await session.ask(b"/connect, pod-x") == b"/host_ok"
            assert await session.ask(b"/version") == b"0.1"
            assert await session.ask_map("veth1")
            assert await session.ask_map("veth0")
            assert await session.ask_map("veth2") is None
            assert await session.ask(b"rubbish") == b"/nak"
            now = await samples(observation)
        await call(request_of("veth0"))
        later = await samples(observation)
    expected = {
        ("devices", "pool", "Healthy"): 3,
        ("allocated_devices", "pool"): 2,
        ("allocations_total", "pool"): 2,
        ("allocate_errors_total", "pool"): 1,
        ("allocate_duration_seconds_count", "pool"): 2,
        ("allocate_duration_seconds_bucket", "pool", "+Inf"): 2,
        ("registrations_total", "pool"): 0,
        ("kubelet_connected", "pool"): 0,
        ("sessions", "pool"): 2,
        ("handshake_requests_total", "pool", "connect", "ok"): 1,
        ("handshake_requests_total", "pool", "connect", "nak"): 1,
        ("handshake_requests_total", "pool", "version", "ok"): 1,
        ("handshake_requests_total", "pool", "xsk_map_fd", "ok"): 2,
        ("handshake_requests_total", "pool", "xsk_map_fd", "nak"): 1,
        ("handshake_requests_total", "pool", "unknown", "nak"): 1,
        ("handshake_duration_seconds_count", "pool"): 1,
        ("releases_total", "pool", "taken_over"): 0,
    }
    assert {key: now[key] for key in expected} == expected
    assert later["releases_total", "pool", "taken_over"] == 1
    assert later["allocations_total", "pool"] == 3
    assert later["sessions", "pool"] == 0


async def no_call(_: Any) -> Any:
    """Stands for a method that is not there."""
    raise AssertionError


def request_of(*names: str) -> api.AllocateRequest:
    """An Allocate for one container."""
    return api.AllocateRequest(container_requests=[api.ContainerAllocateRequest(devices_ids=names)])


async def test_release_is_counted_by_its_reason(bench: Bench, autojump_clock: MockClock) -> None:
    """That kubelet lists no pod any more, and that the CNI says so, count apart; what is rolled back is neither."""
    async with bench.running("veth0", "veth1"):
        await bench.allocate(["veth0"], ["veth1"])
        bench.list_pods(trio.current_time() + 1, "veth0", "veth1")
        for seconds in (RELEASE_GRACE, RELEASE_GRACE + RELEASE_AFTER, RELEASE_GRACE + 2 * RELEASE_AFTER):
            bench.list_pods(trio.current_time() + seconds, "veth1")
        assert bench.pool.releases == {"kubelet": 1, "cni": 0, "taken_over": 0}
        await bench.pool.let_go("veth1")
        assert bench.pool.releases == {"kubelet": 1, "cni": 1, "taken_over": 0}
        await eventually(lambda: bench.pool.devices["veth0"].working is None)
        bench.xdp.errors["pin", "veth0"] = OSError(28, "No space left on device")
        with pytest.raises(OSError, match="No space left"):
            await bench.allocate(["veth0"])
        assert bench.pool.releases == {"kubelet": 1, "cni": 1, "taken_over": 0}


async def test_attach_errors_are_counted_by_errno(bench: Bench) -> None:
    """Somebody else's program is an EBUSY; an errno without a name has its number."""
    bench.xdp.foreign[10] = 4711
    bench.xdp.errors["attach", 11] = OSError(4095, "odd")
    async with bench.running("veth0", "veth1", prepared=False):
        await eventually(lambda: len(bench.pool.attach_errors) == 2)
        found = await samples(observation_of(bench))
        assert found["attach_errors_total", "pool", "EBUSY"] >= 1
        assert found["attach_errors_total", "pool", "4095"] >= 1
        assert found["devices", "pool", "Unhealthy"] == 2


async def test_pool_has_its_series_while_it_serves_pods(bench: Bench, autojump_clock: MockClock) -> None:
    """A pool that is configured no more is told of, but for kubelet's part, until its last pod is gone."""
    observation = observation_of(bench)
    async with bench.running("veth0", "veth1"):
        await bench.allocate(["veth0"])
        bench.list_pods(trio.current_time() + 1, "veth0")
        bench.pool.reconfigure(None)
        await eventually(lambda: list(bench.pool.listed()) == ["veth0"])
        found = await samples(observation)
        assert found["allocated_devices", "pool"] == found["devices", "pool", "Healthy"] == 1
        assert ("kubelet_connected", "pool") not in found
        assert not observation.status()["pools"][0]["configured"]
        for seconds in (RELEASE_GRACE, RELEASE_GRACE + RELEASE_AFTER, RELEASE_GRACE + 2 * RELEASE_AFTER):
            bench.list_pods(trio.current_time() + seconds)
        await eventually(lambda: not bench.pool.devices)
        assert ("allocated_devices", "pool") not in await samples(observation)
        assert observation.status()["pools"] == []


async def test_every_reply_has_a_place_in_the_metrics(bench: Bench) -> None:
    """Whatever a pod sends, request and reply are among those that the metrics know."""
    chance = random.Random(7)
    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
        bench.owned("veth0")
        async with connected(bench.path("veth0")) as session:
            assert await session.ask(b"/connect, pod-x") == b"/host_ok"
            for _ in range(500):
                await session.send(random_request(chance))
                for fd in (await session.receive())[1]:
                    fd.close()
            assert await session.ask(b"/config_busy_poll, 1, 1", 0) == b"/config_busy_poll_nak"
            assert await session.ask(b"/fin") == b"/fin_ack"
    assert sum(bench.pool.handshakes.requests.values()) == 503
    assert bench.pool.handshakes.requests.keys() <= HANDSHAKES.keys()


# -- Status ------------------------------------------------------------------------------------------------------------


def device(name: str, **changes: Any) -> dict[str, Any]:
    """A free device in a status."""
    free = {"health": "Healthy", "reason": "", "where": "host", "xdp_mode": "native", "sessions": 0, "allocation": None}
    return {"name": name, **free, "program_id": 7, "map_id": 9, **changes}


def pool_of(name: str, *devices: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A pool in a status."""
    kubelet = {"registered": True, "registered_for": 7200.0, "watched": True, "registrations": 1, "trouble": ""}
    pool = {"name": name, "resource": f"afxdp/{name}", "mode": "primary", "configured": True, "kubelet": kubelet}
    return {**pool, "devices": list(devices), **changes}


def status_of(*pools: dict[str, Any]) -> dict[str, Any]:
    """A status."""
    return {"version": "1.2", "pid": 47, "running_for": 3 * 86400.0, "pools": list(pools)}


OWNERS = [
    {"namespace": "default", "pod": "pod-x", "container": "app"},
    {"namespace": "a", "pod": "b", "container": "c"},
]


def test_status_is_a_table_when_a_person_reads_it() -> None:
    """Columns are aligned, numbers to the right; what is wrong is below its device, what is not known is a dash."""
    held = {"held_for": 125.0, "older_than_daemon": False, "owners": OWNERS}
    restored = {"held_for": 59.9, "older_than_daemon": True, "owners": []}
    nowhere = {"health": "Unhealthy", "xdp_mode": None, "program_id": None, "map_id": None}
    trouble = {"registered": False, "registered_for": None, "watched": False, "registrations": 0, "trouble": "not yet"}
    status = status_of(
        pool_of(
            "fast",
            device("ens785f0", allocation=held, where="elsewhere", program_id=12345, sessions=2),
            device("ens785f1", allocation=restored, xdp_mode="generic"),
            device("eth\x1b0", reason="no room\n", **nowhere),
        ),
        pool_of("slow", device("x"), mode="cdq", kubelet=trouble),
        pool_of("none", configured=False),
    )
    assert list(afxdpd.status_lines(status)) == [
        "afxdpd 1.2, process 47, running for 3 d: 3 pools, 4 devices, 2 allocated, 2 sessions",
        "",
        "afxdp/fast: primary mode, 3 devices, 2 allocated; registered with kubelet for 2 h, watched",
        "  DEVICE    HEALTH     WHERE      XDP      PROGRAM  MAP  SESSIONS  HELD FOR  HELD BY",
        "  ens785f0  Healthy    elsewhere  native     12345    9         2  2 min     default/pod-x/app, a/b/c",
        "  ens785f1  Healthy    host       generic        7    9         -  >59 s     kubelet has not said",
        "  eth\\x1b0  Unhealthy  host       -              -    -         -  -         -",
        "    no room\\n",
        "",
        "afxdp/slow: cdq mode, 1 device, none allocated; not yet",
        "  DEVICE  HEALTH   WHERE  XDP     PROGRAM  MAP  SESSIONS  HELD FOR  HELD BY",
        "  x       Healthy  host   native        7    9         -  -         -",
        "",
        "afxdp/none: primary mode, no devices, none allocated; configured no more",
    ]
    one = status_of(pool_of("a", device("x", sessions=1)))
    assert next(afxdpd.status_lines(one)).endswith(": 1 pool, 1 device, none allocated, 1 session")


def test_status_has_colours_when_they_are_wanted() -> None:
    """Colours change nothing of what is aligned with what."""
    status = status_of(pool_of("a", device("x"), device("y", health="Unhealthy", reason="why")))
    coloured = list(afxdpd.status_lines(status, colour=True))
    assert "  x       \x1b[32mHealthy  \x1b[0m  host" in coloured[4]
    assert "  y       \x1b[31mUnhealthy\x1b[0m  host" in coloured[5]
    plain = [re.sub(r"\x1b\[\d*m", "", line) for line in coloured]
    assert plain == list(afxdpd.status_lines(status))


def test_lines_are_left_out_when_there_is_no_room() -> None:
    """The last line says how many were left out."""
    lines = ["a", "b", "c"]
    assert afxdpd.fit(lines, 3) == lines
    assert afxdpd.fit(lines, 2) == ["a", "... and 2 further lines"]
    assert afxdpd.fit(["a", "b"], 1) == ["... and 2 further lines"]
    assert afxdpd.fit([*lines, "d"], 4) == [*lines, "d"]


async def test_status_has_all_that_a_pool_has(bench: Bench) -> None:
    """Health and reason, where a device is, program, map, who has it, and how many connections there are."""
    observation = observation_of(bench)
    bench.xdp.foreign[12] = 4711
    async with bench.running("veth0", "veth1", net("veth2"), prepared=False):
        await eventually(lambda: bench.health()["veth1"] == "Healthy" and "4711" in bench.reason("veth2"))
        await bench.allocate(["veth0"])
        bench.owned("veth0")
        async with connected(bench.path("veth0")) as session:
            assert await session.ask(b"/connect, pod-x") == b"/host_ok"
            bench.show("veth1", "veth2")
            status = json.loads((await observation.status_page()).body)
    (pool,) = status["pools"]
    away, free, foreign = pool["devices"]
    assert status["version"] == afxdpd.__version__
    assert status["pid"] == os.getpid()
    assert (pool["resource"], pool["mode"], pool["configured"]) == ("afxdp/pool", "primary", True)
    assert pool["kubelet"].pop("trouble").startswith("not registered: waiting for kubelet: ")
    assert pool["kubelet"] == {"registered": False, "registered_for": None, "watched": False, "registrations": 0}
    assert 0 <= away["allocation"].pop("held_for") < 60
    assert away == {
        "name": "veth0",
        "health": "Healthy",
        "reason": "",
        "where": "elsewhere",
        "xdp_mode": "native",
        "program_id": bench.xdp.program(10),
        "map_id": 0,
        "sessions": 1,
        "allocation": {"older_than_daemon": False, "owners": OWNERS[:1]},
    }
    assert (free["where"], free["allocation"], free["program_id"] > 0) == ("host", None, True)
    assert "4711" in foreign["reason"]
    assert (foreign["health"], foreign["xdp_mode"], foreign["program_id"]) == ("Unhealthy", None, None)


# -- The commands ------------------------------------------------------------------------------------------------------


@contextmanager
def answering(path: Path, answer: bytes) -> Iterator[None]:
    """A program that answers one connection with these bytes."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join()


def http(body: bytes, status: int = 200) -> bytes:
    """A response."""
    return b"HTTP/1.1 %d\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


def test_status_is_printed_when_a_daemon_answers(short_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command `status` prints lines without colours where there is no terminal, or JSON."""
    status = status_of(pool_of("a", device("x")))
    for options, expected in (([], "\n".join(afxdpd.status_lines(status))), (["--json"], json.dumps(status, indent=2))):
        path = short_path / f"{len(options)}.sock"
        with answering(path, http(json.dumps(status).encode())):
            assert afxdpd.main(["status", "--socket", str(path), *options]) == 0
        assert capsys.readouterr() == (f"{expected}\n", "")


@pytest.mark.parametrize("command", ["status", "reload"])
def test_command_ends_with_4_when_no_daemon_answers(
    command: str, short_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No socket, one that nobody serves, and one where something else answers: a line with path and options each."""
    path = short_path / ".status.sock"
    hint = "; name another place with --uds-dir or --socket\n"
    assert afxdpd.main([command, "--uds-dir", str(short_path)]) == 4
    why = "No such file or directory"
    assert capsys.readouterr() == ("", f"afxdpd {command}: no daemon answers on {path}: {why}{hint}")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert afxdpd.main([command, "--socket", str(path)]) == 4
    assert capsys.readouterr() == ("", f"afxdpd {command}: no daemon answers on {path}: Connection refused{hint}")
    for answer in (b"", b"220 mail ready\r\n", http(b"{")):
        path.unlink()
        with answering(path, answer):
            assert afxdpd.main([command, "--socket", str(path)]) == 4
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.startswith(f"afxdpd {command}: no daemon answers on {path}: ")
        assert output.err.endswith(hint)
        assert output.err.count("\n") == 1
    for lie in (b"[]", b"{}", b"null", b'"x"', b'{"errors": 5, "pools": [1]}', b'{"errors": [5], "pools": 7}'):
        path.unlink()
        with answering(path, http(lie)):
            assert afxdpd.main([command, "--socket", str(path)]) == 4
        words = f"afxdpd {command}: what answers on {path} is no afxdpd, or one of another version\n"
        assert capsys.readouterr() == ("", words)
    assert afxdpd.main([command, "--socket", "/" + "x" * 200]) == 4
    assert "AF_UNIX path too long" in capsys.readouterr().err


def test_reload_ends_with_1_when_the_file_is_wrong(short_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is wrong is printed line by line; a daemon that has no file says that."""
    path = short_path / "sock"
    with answering(path, http(b'{"errors": ["pools[0]: bad", "logLevel: worse"]}')):
        assert afxdpd.main(["reload", "--socket", str(path)]) == 1
    lines = ["pools[0]: bad", "logLevel: worse", "the configuration stays as it was"]
    assert capsys.readouterr() == ("", "".join(f"afxdpd reload: {line}\n" for line in lines))
    path.unlink()
    with answering(path, http(b'{"errors": []}')):
        assert afxdpd.main(["reload", "--socket", str(path)]) == 0
    assert capsys.readouterr() == ("the configuration was read again\n", "")
    path.unlink()
    with answering(path, http(b"it has none\n", 409)):
        assert afxdpd.main(["reload", "--socket", str(path)]) == 4
    assert capsys.readouterr() == ("", "afxdpd reload: it has none\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["status", "--watch", "0"], "argument --watch: '0' is no number of seconds from 0.1 to 86400"),
        (["status", "--watch", "nan"], "argument --watch: 'nan' is no number of seconds from 0.1 to 86400"),
        (["status", "--jso"], "unrecognized arguments: --jso"),
        (["status", "--socket", "a", "--uds-dir", "b"], "argument --uds-dir: not allowed with argument --socket"),
        (["reload", "now"], "unrecognized arguments: now"),
        (["--http", "localhost:80"], "argument --http: 'localhost:80' is neither ADDRESS:PORT nor [IPV6 ADDRESS]:PORT"),
    ],
)
def test_command_ends_with_1_when_its_options_are_wrong(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is wrong with a command's options is one line, which names the command's own help."""
    with pytest.raises(SystemExit) as caught:
        afxdpd.main(arguments)
    assert caught.value.code == 1
    program = "afxdpd" if arguments[0] == "--http" else f"afxdpd {arguments[0]}"
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"{program}: {message}")
    assert output.err.endswith(f"; see {program} --help\n")
    assert output.err.count("\n") == 1


# -- The daemon --------------------------------------------------------------------------------------------------------


@pytest.fixture
def directory(short_path: Path) -> Path:
    """A place for the daemon, with kubelet's directory."""
    (short_path / "kubelet" / "device-plugins").mkdir(parents=True)
    (short_path / "bpf").mkdir()
    return short_path


class ObservedDaemon(Daemon):
    """The daemon of the tests of options, which can be asked."""

    def listen(self, http: str) -> None:
        """Has it serve probes there."""
        self.paths = dataclasses.replace(self.paths, http=http)

    async def ask(self, page: str, method: str = "GET") -> tuple[int, bytes]:
        """Asks on the status socket."""
        ask = partial(ask_daemon, self.paths.status_socket, method, page)
        return await trio.to_thread.run_sync(ask)


async def test_daemon_answers_on_its_sockets_while_it_runs(directory: Path) -> None:
    """The status socket is root's alone, and both sockets go with the daemon."""
    daemon = ObservedDaemon(directory, config_of(pool=("veth0",)), net("veth0"))
    daemon.listen(str(directory / "http.sock"))
    before = open_fds()
    async with daemon.running():
        assert daemon.paths.status_socket == directory / "uds" / ".status.sock"
        assert daemon.paths.status_socket.stat().st_mode & 0o777 == 0o600
        assert await daemon.ask("/healthz") == (200, b"ok\n")
        assert (await daemon.ask("/readyz"))[0] == 503
        assert (await daemon.ask("/status"))[0] == 200
        status, why = await daemon.ask("/reload", "POST")
        assert (status, why) == (409, b"the program in which this daemon runs configures it\n")
        http = directory / "http.sock"
        status, body = await trio.to_thread.run_sync(ask_daemon, http, "GET", "/metrics")
        assert (status, b'afxdpd_build_info{version="' in body) == (200, True)
        for page in ("/status", "/reload"):
            assert (await trio.to_thread.run_sync(ask_daemon, http, "GET", page))[0] == 404
        http.unlink()
        assert await daemon.ask("/healthz") == (503, f"{http} was removed\n".encode())
    assert not daemon.paths.status_socket.exists()
    assert open_fds() == before


async def test_daemon_ends_when_its_address_cannot_be_had(directory: Path) -> None:
    """Wrong, in use, or not to be had: each is an exception of its own, and nothing is left open."""
    before = open_fds()
    with http_listener(parse_http_address("127.0.0.1:0")) as (_, name, _):
        for http, error, words in (
            ("localhost", ConfigError, "http: 'localhost' is neither"),
            (name, EndpointBusyError, f"{name}: another process serves this"),
            ("192.0.2.1:9100", HostError, "192.0.2.1:9100: Cannot assign requested address: name another place with"),
            (str(directory), HostError, "is there already, and is no socket: name another place with --http"),
        ):
            paths = afxdpd.Paths(kubelet_dir=directory, uds_dir=directory / "uds", bpffs=directory, http=http)
            with pytest.raises(error, match=re.escape(words)):
                await afxdpd.serve(config_of(), paths, host=FakeHost())
    assert open_fds() == before


async def test_daemon_runs_when_its_status_cannot_be_served(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is in the way of the status socket is a warning, and stays."""
    (directory / "uds").mkdir()
    (directory / "uds" / ".status.sock").write_text("mine")
    async with ObservedDaemon(directory, config_of(pool=())).running():
        pass
    assert any("afxdpd status cannot be served" in record.message for record in caplog.records)
    assert (directory / "uds" / ".status.sock").read_text() == "mine"


async def test_configuration_is_read_once_for_all_who_ask_meanwhile() -> None:
    """Whoever asks gets the outcome of a reading that began afterwards, when the daemon has taken it over."""
    outcomes: list[PluginConfig | ConfigError] = [config_of(a=()), ConfigError(["bad", "worse"]), config_of(b=())]
    taken = []

    def read() -> PluginConfig:
        outcome = outcomes.pop(0)
        if isinstance(outcome, ConfigError):
            raise outcome
        return outcome

    reload = afxdpd._Reload(read)
    gate = trio.Event()

    async def serve() -> None:
        async with aclosing(reload.changes()) as changes:
            async for config in changes:
                await gate.wait()
                taken.append(config.pools[0].name)

    answers: list[list[str]] = []

    async def ask() -> None:
        answers.append(await reload.run())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        nursery.start_soon(ask)
        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        assert answers == [], "it is not taken over yet"
        nursery.start_soon(ask)  # its reading is the next one
        await wait_all_tasks_blocked()
        gate.set()
        await wait_all_tasks_blocked()
        assert answers == [[], [], ["bad", "worse"]]
        reload.ask()
        await wait_all_tasks_blocked()
        assert taken == ["a", "b"]
        nursery.cancel_scope.cancel()
