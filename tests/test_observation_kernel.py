"""Probes, metrics, `afxdpd status` and `afxdpd reload` of the real daemon, on the real kernel."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from conftest import Kernel
from kubelet import pod, running_kubelet
from prometheus_client.parser import text_string_to_metric_families
from support import (
    PROGRAM,
    RESOURCE,
    Client,
    Pod,
    daemon_process,
    get_map_id,
    in_thread,
    make_veth,
    paths_options,
    write_config,
    xdp_prog_id,
)
from test_cni_kernel import Cni, delete
from test_daemon_kernel import until

from afxdpd import HTTP_CONNECTIONS_MAX

pytestmark = [pytest.mark.kernel, pytest.mark.kubelet, pytest.mark.program]

HTTP = "127.0.0.1:9808"  # of the tests' own network namespace


def get(page: str) -> tuple[int, str]:
    """Status and body of a page."""
    try:
        with urllib.request.urlopen(f"http://{HTTP}{page}", timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read().decode()


def is_up() -> bool:
    """Whether the daemon answers."""
    try:
        return get("/healthz") == (200, "ok\n")
    except OSError:
        return False


def metrics() -> dict[tuple[str, ...], float]:
    """The metrics: name and the labels in order of their names, without the pool's → value."""
    return {
        (sample.name.removeprefix("afxdpd_"), *(value for name, value in sample.labels.items() if name != "pool")): (
            sample.value
        )
        for family in text_string_to_metric_families(get("/metrics")[1])
        for sample in family.samples
    }


def command(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of the program, for the daemon below a directory."""
    line = [*PROGRAM, *arguments, "--uds-dir", str(directory / "uds")]
    return subprocess.run(line, capture_output=True, text=True, timeout=30, check=False)


def status(directory: Path) -> dict[str, Any]:
    """What `afxdpd status --json` says."""
    result = command(directory, "status", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    return dict(json.loads(result.stdout))


async def test_numbers_agree_while_pods_come_and_go(kernel: Kernel, short_path: Path) -> None:
    """Probes follow kubelet; metrics and status say the same of devices, programs, maps, pods and connections."""
    make_veth("afa0", "afa1")
    config = write_config(short_path, pool=["afa0", "afa1"])
    plugins = short_path / "kubelet" / "device-plugins"
    socket = short_path / "uds" / "pool" / "afa0" / "afxdp.sock"
    with daemon_process(config, short_path, "--http", HTTP) as daemon:
        await until(is_up)
        trouble = f"waiting for kubelet: {plugins}/kubelet.sock: No such file or directory"
        await until(lambda: get("/readyz") == (503, f"afxdp/pool: not registered: {trouble}\n"))
        async with running_kubelet(short_path / "kubelet") as kubelet:
            await kubelet.wait(RESOURCE, streams_open=1, healthy=2)
            await until(lambda: get("/readyz") == (200, "ok\n"))  # its watch may be there before the answer to Register
            await kubelet.allocate(RESOURCE, ["afa0"])
            await kubelet.pods(pod("pod-x", {RESOURCE: ["afa0"]}))
            with Pod() as sandbox, Cni(short_path) as cni:
                map_id = await in_thread(get_map_id, socket, "pod-x", "afa0")
                prog_id = xdp_prog_id("afa0")
                sandbox.take("afa0")
                with await in_thread(Client, socket) as client:
                    assert await in_thread(client.ask, b"/connect, pod-y") == (b"/host_nak", [])
                    said, counted = await in_thread(status, short_path), await in_thread(metrics)
                (pool,) = said["pools"]
                held, free = pool["devices"]
                assert said["pid"] == daemon.pid
                assert pool["kubelet"]["registered_for"] > 0
                assert (pool["kubelet"]["watched"], pool["kubelet"]["trouble"]) == (True, "")
                assert (held["name"], held["where"], held["health"]) == ("afa0", "elsewhere", "Healthy")
                assert (held["program_id"], held["map_id"], held["xdp_mode"]) == (prog_id, map_id, "native")
                assert held["allocation"]["owners"] == [{"namespace": "default", "pod": "pod-x", "container": "app"}]
                assert (held["sessions"], free["sessions"], free["allocation"]) == (1, 0, None)
                assert free["program_id"] == xdp_prog_id("afa1")
                expected = {
                    ("devices", "Healthy"): 2,
                    ("devices", "Unhealthy"): 0,
                    ("allocated_devices",): 1,
                    ("allocations_total",): 1,
                    ("allocate_duration_seconds_count",): 1,
                    ("registrations_total",): 1,
                    ("kubelet_connected",): 1,
                    ("sessions",): 1,
                    ("handshake_requests_total", "ok", "connect"): 1,
                    ("handshake_requests_total", "nak", "connect"): 1,
                    ("handshake_requests_total", "ok", "xsk_map_fd"): 1,
                    ("handshake_duration_seconds_count",): 1,
                    ("releases_total", "cni"): 0,
                }
                assert {key: counted[key] for key in expected} == expected
                await kubelet.pods()
                await in_thread(delete, cni, sandbox, "afa0")
            await until(lambda: metrics()["sessions",] == 0)
            said, counted = await in_thread(status, short_path), await in_thread(metrics)
            assert [device["allocation"] for device in said["pools"][0]["devices"]] == [None, None]
            assert (counted["allocated_devices",], counted["releases_total", "cni"], counted["sessions",]) == (0, 1, 0)
            await kubelet.stop()
            await until(lambda: get("/readyz")[0] == 503)
            assert (await in_thread(metrics))["kubelet_connected",] == 0
            await kubelet.start()
            await until(lambda: get("/readyz") == (200, "ok\n"))
            assert (await in_thread(metrics))["registrations_total",] == 2
        assert is_up()


async def test_status_is_known_again_when_the_daemon_was_killed(kernel: Kernel, short_path: Path) -> None:
    """The next daemon answers at the same place, with the pod that has the device since before."""
    make_veth("afa0")
    config = write_config(short_path, pool=["afa0"])
    async with running_kubelet(short_path / "kubelet") as kubelet:
        with daemon_process(config, short_path):
            await kubelet.wait(RESOURCE, streams_open=1, healthy=1)
            await kubelet.allocate(RESOURCE, ["afa0"])
            await kubelet.pods(pod("pod-x", {RESOURCE: ["afa0"]}))
            before = (await in_thread(status, short_path))["pools"][0]["devices"][0]
        result = await in_thread(command, short_path, "status")
        words = f"no daemon answers on {short_path}/uds/.status.sock: Connection refused"
        assert (result.returncode, result.stdout) == (4, "")
        assert result.stderr.startswith(f"afxdpd status: {words}; name another place with ")
        with daemon_process(config, short_path):
            await kubelet.wait(RESOURCE, registers=2, streams_open=1, healthy=1)

            def owned() -> dict[str, Any] | None:
                found = dict(status(short_path)["pools"][0]["devices"][0])
                return found if found["allocation"] and found["allocation"]["owners"] else None

            await until(owned)
            after = await in_thread(owned)
            assert after["allocation"]["older_than_daemon"]
            same = ("name", "health", "where", "xdp_mode", "program_id", "map_id")
            assert {key: after[key] for key in same} == {key: before[key] for key in same}


async def test_configuration_is_read_again_when_it_is_asked_for(kernel: Kernel, short_path: Path) -> None:
    """The command `reload` returns when the daemon has the new pools, or says what is wrong with the file."""
    make_veth("afa0", "afa1")
    config = write_config(short_path, pool=["afa0"])
    async with running_kubelet(short_path / "kubelet") as kubelet:
        with daemon_process(config, short_path):
            await kubelet.wait(RESOURCE, streams_open=1, healthy=1)
            write_config(short_path, pool=["afa0"], other=["afa1"])
            result = await in_thread(command, short_path, "reload")
            assert (result.returncode, result.stdout, result.stderr) == (0, "the configuration was read again\n", "")
            await kubelet.wait("afxdp/other", streams_open=1, healthy=1)
            config.write_text('{"pools": [{"name": "a b"}, 7]}')
            result = await in_thread(command, short_path, "reload")
            assert (result.returncode, result.stdout) == (1, "")
            lines = result.stderr.splitlines()
            assert [line.partition(":")[0] for line in lines] == ["afxdpd reload"] * len(lines)
            assert any("pools[0].name" in line for line in lines)
            assert any("pools[1]" in line for line in lines)
            assert lines[-1] == "afxdpd reload: the configuration stays as it was"
            assert len((await in_thread(status, short_path))["pools"]) == 2


AT_TERMINAL = """
import signal, sys, afxdpd
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background has it ignored
sys.exit(afxdpd.main(sys.argv[1:]))
"""


class Terminal:
    """The program at a terminal of so many lines."""

    def __init__(self, lines: int, *arguments: str) -> None:
        self._own, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, 80, 0, 0))
        environment = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "LINES", "COLUMNS")}
        line = [sys.executable, "-P", "-c", AT_TERMINAL, *arguments]
        self.process = subprocess.Popen(
            line, stdout=theirs, stderr=subprocess.PIPE, env={**environment, "TERM": "xterm"}
        )
        os.close(theirs)
        self.text = ""

    def read(self, text: str, times: int) -> None:
        """Reads until this was shown so often."""
        while self.text.count(text) < times:
            self.text += os.read(self._own, 1 << 16).decode()

    def close(self) -> None:
        """Ends the program if need be."""
        self.process.kill()
        self.process.communicate()
        os.close(self._own)


@contextmanager
def terminal(lines: int, *arguments: str) -> Iterator[Terminal]:
    """A program at a terminal while the block runs."""
    own = Terminal(lines, *arguments)
    try:
        yield own
    finally:
        own.close()


async def test_status_is_followed_at_a_terminal_until_interrupted(kernel: Kernel, short_path: Path) -> None:
    """With --watch the screen is drawn again and again, in colour and no longer than it is; Ctrl-C is its good end."""
    make_veth("afa0", "afa1", "afa2")
    config = write_config(short_path, pool=["afa0", "afa1", "afa2"])
    options = ["status", "--uds-dir", str(short_path / "uds"), "--watch", "0.1"]
    async with running_kubelet(short_path / "kubelet") as kubelet:
        with terminal(6, *options) as screen:
            with trio.fail_after(30):
                await in_thread(screen.read, "no daemon answers on ", 2)
                with daemon_process(config, short_path):
                    await kubelet.wait(RESOURCE, streams_open=1, healthy=3)
                    await in_thread(screen.read, "... and 3 further lines", 3)
                await in_thread(screen.read, "no daemon answers on ", screen.text.count("no daemon answers on ") + 1)
            screen.process.send_signal(signal.SIGINT)
            assert await in_thread(screen.process.wait, 20) == 0
            assert screen.process.stderr is not None
            assert screen.process.stderr.read() == b""
    screens = screen.text.split("\x1b[H\x1b[2J")[1:]
    last = next(text for text in reversed(screens) if "further lines" in text)
    assert last.startswith("\x1b[?7lafxdpd ")
    assert last.endswith("... and 3 further lines\x1b[?7h\r\n")
    assert last.count("\n") == 5
    assert "\x1b[1mafxdp/pool\x1b[0m: primary mode, 3 devices, none allocated; registered with kubelet for " in last


async def test_daemon_lives_when_its_address_is_attacked(kernel: Kernel, short_path: Path) -> None:
    """Hundreds of connections, silent, senseless or asking on, cost a hundred descriptors; it goes on answering."""
    make_veth("afa0")
    config = write_config(short_path, pool=["afa0"])
    (short_path / "kubelet" / "device-plugins").mkdir(parents=True)
    with daemon_process(config, short_path, "--http", HTTP) as daemon:
        await until(is_up)
        await until(lambda: status(short_path)["pools"][0]["devices"][0]["health"] == "Healthy")
        await in_thread(get, "/metrics")  # what it imports, it has now

        def descriptors() -> int:
            return len(os.listdir(f"/proc/{daemon.pid}/fd"))

        before = descriptors()
        async with AsyncExitStack() as held:

            async def attack(data: bytes) -> None:
                host, _, port = HTTP.partition(":")
                for _ in range(150):
                    stream = await held.enter_async_context(await trio.open_tcp_stream(host, int(port)))
                    with suppress(trio.BrokenResourceError):  # it was closed for a newer one
                        await stream.send_all(data)

            async with trio.open_nursery() as nursery:
                asking = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
                for data in (b"", asking[:-1], b"\x00\xff" * 9999, asking * 20):
                    nursery.start_soon(attack, data)
                for _ in range(10):
                    with trio.fail_after(20):
                        while not await in_thread(is_up):  # its connection may be the oldest one: then it asks again
                            await trio.lowlevel.checkpoint()
            assert descriptors() <= before + HTTP_CONNECTIONS_MAX + 10
        await until(lambda: descriptors() <= before)
        assert daemon.poll() is None
    assert "bug" not in (short_path / "daemon.log").read_text()


async def test_daemon_ends_with_4_when_its_address_is_in_use(kernel: Kernel, short_path: Path) -> None:
    """An address that another process serves is one line and the code for what cannot be served."""
    make_veth("afa0")
    config = write_config(short_path, pool=["afa0"])
    (short_path / "kubelet" / "device-plugins").mkdir(parents=True)
    listeners = await trio.open_tcp_listeners(9808, host="127.0.0.1")
    line = [*PROGRAM, "--config", str(config), *paths_options(short_path), "--http", HTTP]
    result = await trio.run_process(line, capture_stdout=True, capture_stderr=True, check=False)
    for listener in listeners:
        await listener.aclose()
    assert result.returncode == 4
    assert result.stderr == f"afxdpd: {HTTP}: another process serves this; end it first\n".encode()
