"""examples/afxdpd_client.py against the daemon's own socket, and against servers that break the protocol."""

from __future__ import annotations

import ast
import os
import re
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import trio
from conftest import Kernel, open_fds
from fakes import FakeHost
from kubelet import pod, running_kubelet
from support import RESOURCE, ROOT, get_map_id, in_thread, make_veth, running_daemon

from afxdpd import Fd, RpcError, UdsServer

sys.path.append(str(ROOT / "examples"))
import afxdpd_client
from afxdpd_client import (
    BusyPollError,
    Client,
    ClientError,
    ConnectionClosedError,
    NoReplyError,
    NoSocketError,
    NotAllocatedError,
    NotOwnerError,
    OwnerUnknownError,
    ProtocolError,
    allocated_devices,
)

PROGRAM = [sys.executable, str(ROOT / "examples" / "afxdpd_client.py")]
DEVICES = ("veth0", "veth1")


@pytest.fixture(autouse=True)
def _nothing_left_open() -> Iterator[None]:
    """After each test the same descriptors are open as before, whatever came with the replies."""
    before = open_fds()
    yield
    assert open_fds() == before


# -- The daemon's socket -----------------------------------------------------------------------------------------------


class Daemon:
    """The daemon's own socket of a device; veth1 was allocated together with it.

    Attributes:
        silent: How many times it cannot find out who holds the device.
        maps: A file for each device.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.silent = 0
        self.maps: dict[str, Fd] = {}
        self.server = UdsServer(
            directory / DEVICES[0],
            name=DEVICES[0],
            idle_timeout=30.0,
            is_owner=self._is_owner,
            xskmap=self.maps.get,
        )

    async def _is_owner(self, hostname: str) -> bool:
        await trio.lowlevel.checkpoint()
        self.silent -= 1
        if self.silent >= 0:
            raise RpcError("UNAVAILABLE", "kubelet is not there")
        return hostname == "pod-x"

    def client(self, hostname: str | None = "pod-x", timeout: float = 10.0) -> Client:
        """A client of it, not connected yet."""
        return Client(DEVICES[0], socket_dir=str(self.directory), hostname=hostname, timeout=timeout)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The socket at work."""
        for device in DEVICES:
            path = self.directory / f"{device}.map"
            path.write_text(device)
            self.maps[device] = Fd(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.server.serve, self.server.listen(FakeHost(), 0))
            yield
            self.server.scope.cancel()
        for fd in self.maps.values():
            fd.close()
        for thread in threading.enumerate():
            if thread.name == "afxdpd-close":  # what is left of the connections
                await in_thread(thread.join)


async def test_maps_of_all_devices_come_when_the_pod_asks(short_path: Path) -> None:
    """One conversation has it all: version, a map for each device of the allocation, busy polling, the end."""
    daemon = Daemon(short_path)

    def converse() -> list[str]:
        found = []
        with daemon.client() as client:
            assert client.version() == "0.1"
            for device in DEVICES:
                fd = client.xsk_map_fd(device)
                found.append(os.pread(fd, 99, 0).decode())
                assert not os.get_inheritable(fd)
                os.close(fd)
            with socket.socket() as other, pytest.raises(BusyPollError, match="20 µs and a budget of 64 was refused"):
                client.config_busy_poll(other, 20, 64)  # no AF_XDP socket
            assert client.version() == "0.1"  # a refusal does not end the conversation
            client.fin()
            with pytest.raises(ConnectionClosedError, match=r"call connect\(\) first"):
                client.version()
        return found

    async with daemon.running():
        assert await in_thread(converse) == list(DEVICES)


@pytest.mark.kernel
async def test_busy_polling_is_set_when_the_socket_is_af_xdp(kernel: Kernel, short_path: Path) -> None:
    """The daemon takes the socket, as an object or as a descriptor; neither is closed."""
    daemon = Daemon(short_path)

    def converse() -> None:
        with socket.socket(44, socket.SOCK_RAW) as xsk, daemon.client() as client:  # AF_XDP
            client.config_busy_poll(xsk, 20, 64)
            assert xsk.getsockopt(socket.SOL_SOCKET, 46) == 20  # SO_BUSY_POLL
            client.config_busy_poll(xsk.fileno(), 30, 64)
            assert xsk.getsockopt(socket.SOL_SOCKET, 46) == 30

    async with daemon.running():
        await in_thread(converse)


async def test_descriptor_that_is_closed_is_the_callers_mistake(short_path: Path) -> None:
    """Then nothing is sent, and the conversation goes on."""
    daemon = Daemon(short_path)

    def converse() -> None:
        with daemon.client() as client:
            with pytest.raises(OSError, match="Bad file descriptor"):
                client.config_busy_poll(9999, 20, 64)
            assert client.version() == "0.1"

    async with daemon.running():
        await in_thread(converse)


async def test_pod_is_refused_when_it_is_not_the_owner(short_path: Path) -> None:
    """The message names the hostname, which is this host's own unless it is given, and says what it has to be."""
    daemon = Daemon(short_path)
    async with daemon.running():
        for hostname in ("pod-y", None):
            with pytest.raises(NotOwnerError, match="the hostname must be the pod's name") as caught:
                await in_thread(daemon.client(hostname).connect)
            assert repr(hostname or socket.gethostname()) in str(caught.value)


async def test_device_is_refused_when_it_is_of_another_allocation(short_path: Path) -> None:
    """That is an error of its own, and the conversation goes on."""
    daemon = Daemon(short_path)

    def converse() -> None:
        with daemon.client() as client:
            for device in ("veth7", "", "x" * 60):
                with pytest.raises(ClientError) as caught:
                    client.xsk_map_fd(device)
                if device == "veth7":
                    assert isinstance(caught.value, NotAllocatedError)
                    assert "'veth7' was not allocated together with" in str(caught.value)
                    assert client.version() == "0.1"
                else:
                    client.connect()

    async with daemon.running():
        await in_thread(converse)


async def test_pod_connects_when_the_daemon_finds_the_owner_at_last(short_path: Path) -> None:
    """While the daemon could not find out who holds the device, the client asks again."""
    daemon = Daemon(short_path)
    daemon.silent = 2

    def converse() -> str:
        with daemon.client() as client:
            return client.version()

    async with daemon.running():
        assert await in_thread(converse) == "0.1"
    assert daemon.silent == -1


async def test_pod_is_told_to_try_again_when_the_owner_stays_unknown(short_path: Path) -> None:
    """When the time is over, the client gives up, and its error says that it is worth another try."""
    daemon = Daemon(short_path)
    daemon.silent = 1_000_000
    client = daemon.client(timeout=0.4)
    async with daemon.running():
        with pytest.raises(OwnerUnknownError, match=r"in 0\.4 s the daemon could not find out .*; try again"):
            await in_thread(client.connect)
        with pytest.raises(ConnectionClosedError):
            client.version()
        assert 1_000_000 - daemon.silent < 5  # tries


async def test_pod_connects_anew_when_the_daemon_has_restarted(short_path: Path) -> None:
    """The old connection ends with the daemon, and says so; connect() finds the next daemon at the same path."""
    client = Daemon(short_path).client()
    for _ in range(2):
        daemon = Daemon(short_path)
        async with daemon.running():
            await in_thread(client.connect)
            assert await in_thread(client.version) == "0.1"
        with pytest.raises(ConnectionClosedError, match=r"call connect\(\) again"):
            await in_thread(client.version)
    with pytest.raises(NoSocketError, match="the device plugin is not running"):
        client.connect()


# -- Servers that break the protocol -----------------------------------------------------------------------------------

Reply = tuple[bytes, int] | None
"""What is answered: the packet, and how many files go with it; None to end the connection."""


class FakeServer:
    """A socket that answers the first requests with these replies, and then never again."""

    def __init__(self, directory: Path, replies: Sequence[Reply]) -> None:
        self.directory, self._replies = directory, replies
        (directory / "veth0").mkdir()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(directory / "veth0" / "afxdp.sock"))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def client(self, timeout: float = 10.0) -> Client:
        """A client of it, not connected yet."""
        return Client("veth0", socket_dir=str(self.directory), hostname="pod-x", timeout=timeout)

    def _serve(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # nobody came, and the test is over
            return
        with connection, open(os.devnull) as file:
            for reply in self._replies:
                if not connection.recv(256):
                    return
                if reply is None:
                    return
                packet, count = reply
                socket.send_fds(connection, [packet], [file.fileno()] * count)
            while connection.recv(256):  # until the client has closed
                pass


HELLO = (b"/host_ok", 0)


def get_map(client: Client) -> int:
    """A request for a map."""
    return client.xsk_map_fd("veth0")


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        ((b"/fd_ack", 0), ProtocolError, r"0 descriptors .* too many files open"),
        ((b"/fd_ack", 2), ProtocolError, r"2 descriptors .* whose socket"),
        ((b"/fd_ack", 100), ProtocolError, r"unexpected descriptors .* whose socket"),
        ((b"/fd_ack ", 1), ProtocolError, r"answered '/fd_ack ': /fd_ack was expected"),
        ((b"/host_ok", 1), ProtocolError, r"answered '/host_ok'"),
        ((b"\xff\x00", 1), ProtocolError, r"answered '\\ufffd\\x00'|answered '.\\x00'"),
        ((b"/nak", 1), ProtocolError, r"does not understand"),
        ((b"/fd_nak", 1), NotAllocatedError, r"not allocated together"),
        ((b"/fd_ack" * 10_000, 1), ProtocolError, r"too long"),
        ((b"", 0), ConnectionClosedError, r"closed the connection"),
        (None, ConnectionClosedError, r"closed the connection at '/xsk_map_fd, veth0'"),
    ],
    ids=["no fd", "two fds", "100 fds", "space", "wrong", "binary", "nak", "fd_nak", "huge", "empty", "closed"],
)
def test_map_is_refused_when_the_reply_is_no_reply(
    short_path: Path, reply: Reply, error: type[ClientError], message: str
) -> None:
    """Whatever comes, it is an error with its reason, what came with it is closed, and the conversation is over."""
    with FakeServer(short_path, [HELLO, reply]) as server, server.client() as client:
        with pytest.raises(ClientError, match=message) as caught:
            get_map(client)
        assert type(caught.value) is error
        if error is not NotAllocatedError:
            with pytest.raises(ConnectionClosedError, match=r"call connect\(\) first"):
                client.version()


@pytest.mark.parametrize(
    ("call", "reply"),
    [
        (Client.version, (b"0.1", 1)),
        (Client.version, (b"/host_ok", 0)),
        (Client.fin, (b"/fin_ack", 3)),
        (Client.fin, (b"/nak", 0)),
        (lambda client: client.config_busy_poll(0, 20, 64), (b"/config_busy_poll_ack", 1)),
        (lambda client: client.config_busy_poll(0, 20, 64), (b"/fd_ack", 0)),
    ],
    ids=["version with fd", "no version", "fin with fds", "fin refused", "busy poll with fd", "busy poll"],
)
def test_other_replies_are_refused_when_they_are_wrong(
    short_path: Path, call: Callable[[Client], object], reply: Reply
) -> None:
    """Descriptors that nobody asked for, and replies to another question, end the conversation."""
    with FakeServer(short_path, [HELLO, reply]) as server, server.client() as client:
        with pytest.raises(ProtocolError):
            call(client)
        with pytest.raises(ConnectionClosedError):
            client.version()


@pytest.mark.parametrize("reply", [(b"/host_ok", 1), (b"0.1", 0), (b"/nak", 0)], ids=["fd", "another", "nak"])
def test_nobody_is_connected_when_the_first_reply_is_wrong(short_path: Path, reply: Reply) -> None:
    """A server that does not say /host_ok, and nothing with it, is not asked anything else."""
    with FakeServer(short_path, [reply]) as server:
        client = server.client()
        with pytest.raises(ProtocolError):
            client.connect()
        with pytest.raises(ConnectionClosedError):
            client.version()


@pytest.mark.parametrize("replies", [[], [HELLO], [(b"/error", 0)]], ids=["connect", "map", "second connect"])
def test_client_gives_up_when_the_server_never_answers(short_path: Path, replies: Sequence[Reply]) -> None:
    """The time is over some day; the connection is closed then, since the answer could come to another question."""
    with FakeServer(short_path, replies) as server:
        client = server.client(timeout=0.3)
        expected = OwnerUnknownError if (b"/error", 0) in replies else NoReplyError
        with pytest.raises(expected, match=r"0\.3 s"):  # noqa: PT012  it is one conversation
            client.connect()
            get_map(client)
        with pytest.raises(ConnectionClosedError):
            client.version()


def test_client_gives_up_when_the_server_accepts_nobody(short_path: Path) -> None:
    """Where the queue of connections stays full, the client does not wait for ever."""
    (short_path / "veth0").mkdir()
    path = str(short_path / "veth0" / "afxdp.sock")
    with listening(path, backlog=0), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as first:
        first.connect(path)
        with pytest.raises(NoReplyError, match="the daemon accepts no connection"):
            Client("veth0", socket_dir=str(short_path), timeout=0.3).connect()


@contextmanager
def listening(path: str, *, backlog: int) -> Iterator[None]:
    """A socket that accepts nobody."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(backlog)
        yield


def test_client_says_what_to_do_when_there_is_no_socket(short_path: Path) -> None:
    """No directory, nobody who listens and a path that is too long have messages of their own."""
    with pytest.raises(NoSocketError, match=r"No such file or directory; was the container given a device") as caught:
        Client("veth0", socket_dir=str(short_path)).connect()
    assert caught.value.errno == 2
    with pytest.raises(NoSocketError, match="too long"):
        Client("veth0", socket_dir=str(short_path / ("x" * 100))).connect()
    (short_path / "veth0").mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(short_path / "veth0" / "afxdp.sock"))
    with pytest.raises(NoSocketError, match="the device plugin is not running on this node"):
        Client("veth0", socket_dir=str(short_path)).connect()


def test_map_is_refused_when_no_more_files_can_be_open(short_path: Path) -> None:
    """Where the kernel cannot hand over the map, the message says that too many files are open."""
    with FakeServer(short_path, [HELLO, (b"/fd_ack", 1)]) as server, server.client() as client:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = os.dup(0)
        os.close(highest)  # the lowest number that is free: none above may be given
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
        try:
            with pytest.raises(ProtocolError, match="are too many files open"):
                get_map(client)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# -- The environment, the program --------------------------------------------------------------------------------------


def test_devices_are_found_when_the_environment_has_them() -> None:
    """They are grouped by pool, in the order of the pools' names; other variables and empty ones do not count."""
    environ = {
        "AFXDP_DEVICES_SLOW": "ens2f0",
        "AFXDP_DEVICES_FAST": "ens1f1 ens1f0",
        "AFXDP_DEVICES_NONE": "",
        "X": "y",
    }
    assert allocated_devices(environ) == {"FAST": ["ens1f1", "ens1f0"], "SLOW": ["ens2f0"]}
    assert list(allocated_devices(environ)) == ["FAST", "SLOW"]


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs the client as a program."""
    return subprocess.run([*PROGRAM, *arguments], env=environ, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.kernel
@pytest.mark.kubelet
@pytest.mark.program
async def test_each_map_is_named_when_the_program_asks_the_daemon(kernel: Kernel, short_path: Path) -> None:
    """Run in a pod it prints a line for each device of the environment; the map is that of the device."""
    make_veth("afa0", "afa1", queues=2)
    async with running_kubelet(short_path / "kubelet") as kubelet, running_daemon(short_path, pool=["afa0", "afa1"]):
        await kubelet.wait(RESOURCE, healthy=2)
        await kubelet.allocate(RESOURCE, ["afa0", "afa1"])
        await kubelet.pods(pod("pod-x", {RESOURCE: ["afa0", "afa1"]}))
        directory = short_path / "uds" / "pool"
        ids = [await in_thread(get_map_id, directory / name / "afxdp.sock", "pod-x", name) for name in ("afa0", "afa1")]
        options = ["--socket-dir", str(directory), "--hostname", "pod-x"]
        result = await trio.to_thread.run_sync(lambda: run(*options, AFXDP_DEVICES_POOL="afa0 afa1"))
        assert result.stderr == ""
        assert result.stdout.splitlines() == [
            f"afa{number}: version 0.1, map {found} for 2 queues" for number, found in enumerate(ids)
        ]
        assert result.returncode == 0
        options[-1] = "pod-y"
        result = await trio.to_thread.run_sync(lambda: run(*options, AFXDP_DEVICES_POOL="afa0 afa1"))
        assert (result.returncode, result.stdout) == (1, "")
        assert "the pod 'pod-y' does not hold the device" in result.stderr


@pytest.mark.program
def test_program_says_what_to_do_when_there_is_nothing_to_ask(short_path: Path) -> None:
    """Without a device or without a socket it ends with 1 and a line that says why; --help names the options."""
    result = run()
    assert (result.returncode, result.stdout) == (1, "")
    assert "no AFXDP_DEVICES_<POOL> is set" in result.stderr
    result = run("--device", "a", "--device", "b", "--socket-dir", str(short_path))
    assert result.returncode == 1
    assert result.stderr.count("was the container given a device") == 2
    assert "--socket-dir" in run("--help").stdout


@pytest.mark.program
def test_application_finds_the_client_when_both_are_copied_to_another_place(short_path: Path) -> None:
    """The two files are all that a pod needs."""
    for name in ("pod_app.py", "afxdpd_client.py"):
        (short_path / name).write_bytes((ROOT / "examples" / name).read_bytes())
    command = [sys.executable, str(short_path / "pod_app.py"), "--device", "veth0", "--socket-dir", "/nowhere"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd="/", env={})
    assert result.returncode == 1
    assert result.stderr.startswith("error: cannot connect to /nowhere/veth0/afxdp.sock: No such file or directory; ")


def test_readme_names_what_the_client_has() -> None:
    """The chapter's code uses functions and methods that are there; its tables name all errors, and no others."""
    chapter = (ROOT / "README.md").read_text().partition("\n## In the pod\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```python\n(.*?)```", chapter, re.DOTALL)
    tree = ast.parse(block)
    (imported,) = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert imported.module == "afxdpd_client"
    assert all(hasattr(afxdpd_client, alias.name) for alias in imported.names)
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert "xsk_map_fd" in used
    assert used <= {*dir(Client), *dir(dict)}
    errors = {"ClientError", *(error.__name__ for error in ClientError.__subclasses__())}
    assert set(re.findall(r"`(\w+Error)`", chapter)) == errors


def test_client_imports_nothing_but_the_standard_library() -> None:
    """So it runs in any image with Python 3.9; its grammar is no newer either."""
    source = Path(afxdpd_client.__file__).read_text()
    names = set()
    for node in ast.walk(ast.parse(source, feature_version=(3, 9))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    assert names <= sys.stdlib_module_names
