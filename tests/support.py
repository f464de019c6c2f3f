"""Helpers of the kernel tests: network devices, pods, the client side of the handshake, packets."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio
from pyroute2 import IPRoute

import afxdpd

ROOT = Path(__file__).parents[1]
RESOURCE = "afxdp/pool"
CAPABILITIES = {"bpf": 39, "net_admin": 12}
"""What the daemon needs, and nothing else; see capability.h. examples/kubernetes has the same."""
CHOWN = {"chown": 0}
"""What it needs besides where a map's file, or a socket on a file system without ACLs, is to be the pod's user's."""
PROGRAM = [sys.executable, "-P", "-m", "afxdpd"]  # the installed one, not the checkout's


def with_capabilities(names: Iterable[str]) -> list[str]:
    """A prefix: root with these capabilities, and no way to any other."""
    capabilities = ",".join(["-all", *(f"+{name}" for name in names)])
    return ["setpriv", "--bounding-set", capabilities, "--inh-caps", capabilities, "--no-new-privs"]


def make_veth(*names: str, queues: int = 1) -> None:
    """Makes veth pairs <name> and <name>p, both ends up."""
    with IPRoute() as ipr:
        for name in names:
            peer = {"ifname": f"{name}p", "num_rx_queues": queues, "num_tx_queues": queues}
            ipr.link("add", ifname=name, kind="veth", num_rx_queues=queues, num_tx_queues=queues, peer=peer)
            for end in (name, f"{name}p"):
                ipr.link("set", index=ipr.link_lookup(ifname=end)[0], state="up")


def wait_up(name: str) -> None:
    """Waits until a device of this namespace is operational: before that it drops what is sent on it."""
    with IPRoute() as ipr:
        ipr.bind()
        while ipr.link("get", ifname=name)[0].get_attr("IFLA_OPERSTATE") != "UP":
            list(ipr.get())  # until something changes


def delete_link(name: str) -> None:
    """Deletes a device, and with a veth its peer."""
    with IPRoute() as ipr:
        ipr.link("del", index=ipr.link_lookup(ifname=name)[0])


def xdp_prog_id(name: str) -> int:
    """Id of the XDP program on a device of this namespace, 0 for none."""
    return afxdpd.Network().devices()[name].xdp_prog_id


class Pod:
    """A network namespace with a process in it, as a pod's sandbox is."""

    def __init__(self) -> None:
        command = ["unshare", "--net", "sh", "-c", "ip link set lo up; echo ready; exec sleep 1000"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def __enter__(self) -> Pod:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def prefix(self) -> list[str]:
        """What to put before a command to run it in the pod."""
        return ["nsenter", "--target", str(self._process.pid), "--net"]

    def run(self, *command: str) -> str:
        """Runs a command in the pod and returns what it printed."""
        return subprocess.run([*self.prefix(), *command], check=True, capture_output=True, text=True).stdout

    def take(self, name: str) -> None:
        """Moves a device from the host into the pod and sets it up, as a CNI does."""
        subprocess.run(["ip", "link", "set", name, "netns", str(self._process.pid)], check=True)
        self.run("ip", "link", "set", name, "up")

    def give_back(self, name: str) -> None:
        """Moves a device back to the host, as a CNI does when the pod ends."""
        self.run("ip", "link", "set", name, "netns", str(os.getpid()))
        subprocess.run(["ip", "link", "set", name, "up"], check=True)


class Client:
    """The pod's side of the handshake, one connection; it blocks, so it is for threads or short questions."""

    def __init__(self, path: Path | str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(10)
        self.sock.connect(os.fspath(path))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def ask(self, request: bytes, *fds: int) -> tuple[bytes, list[int]]:
        """Sends one request and returns the one reply with its descriptors, the caller's to close."""
        if fds:
            socket.send_fds(self.sock, [request], fds)
        else:
            self.sock.send(request)
        data, received, flags, _ = socket.recv_fds(self.sock, 512, 4)
        assert not flags & socket.MSG_CTRUNC
        return data, list(received)

    def handshake(self, hostname: str, device: str) -> int:
        """Goes through the whole conversation; returns the XSKMAP's descriptor."""
        assert self.ask(f"/connect, {hostname}".encode()) == (b"/host_ok", [])
        assert self.ask(b"/version") == (b"0.1", [])
        reply, fds = self.ask(f"/xsk_map_fd, {device}".encode())
        assert reply == b"/fd_ack"
        assert len(fds) == 1
        assert self.ask(b"/fin") == (b"/fin_ack", [])
        assert self.sock.recv(1) == b""
        return fds[0]


def map_id(fd: int) -> int:
    """Id of the BPF map behind a descriptor."""
    fields = dict(line.split(":\t") for line in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines())
    return int(fields["map_id"])


async def in_thread(function: Any, *arguments: Any) -> Any:
    """Runs something that blocks."""
    return await trio.to_thread.run_sync(partial(function, *arguments))


def get_map_id(path: Path | str, hostname: str, device: str) -> int:
    """A pod's whole conversation; returns the id of the map it got."""
    with Client(path) as client:
        fd = client.handshake(hostname, device)
        try:
            return map_id(fd)
        finally:
            os.close(fd)


@contextmanager
def daemon_process(
    config: Path, directory: Path, *options: str, prefix: Sequence[str] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """The daemon as a process of its own, for tests that kill it; its log goes to <directory>/daemon.log."""
    with (directory / "daemon.log").open("ab") as output:
        command = [*prefix, *PROGRAM, "--config", str(config), *paths_options(directory), *options]
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def paths(directory: Path) -> afxdpd.Paths:
    """The daemon's paths below a test's directory; bpffs is that of the test run."""
    return afxdpd.Paths(
        kubelet_dir=directory / "kubelet",
        pod_resources_socket=directory / "kubelet" / "pod-resources" / "kubelet.sock",
        uds_dir=directory / "uds",
    )


def paths_options(directory: Path) -> list[str]:
    """The same as command line options."""
    return ["--kubelet-dir", str(directory / "kubelet"), "--uds-dir", str(directory / "uds")]


def write_config(directory: Path, **pools: list[str]) -> Path:
    """Writes a configuration with pools of named devices."""
    file = directory / "config.json"
    content = [
        {"name": name, "mode": "primary", "devices": [{"name": device} for device in devices]}
        for name, devices in pools.items()
    ]
    file.write_text(json.dumps({"pools": content, "logLevel": "debug"}))
    return file


@asynccontextmanager
async def running_daemon(directory: Path, **pools: list[str]) -> AsyncIterator[None]:
    """The daemon in this process."""
    config = afxdpd.get_plugin_config(write_config(directory, **pools))
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(afxdpd.serve, config, paths(directory)))
        yield
        nursery.cancel_scope.cancel()


ETHERTYPE = 0x88B5
"""For local experiments; see IEEE 802."""


def send_packets(name: str, count: int, *, first: int = 0, rate: int = 10_000) -> None:
    """Sends numbered packets on a device of this namespace, in the form that examples/pod_app.py counts.

    Args:
        name: The device; its other end is the pod's.
        count: How many, in bursts.
        first: The number of the first one.
        rate: Packets in a second: the application's ring holds what comes while it is not scheduled.
    """
    wait_up(name)
    burst = 50
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
        sock.bind((name, 0))
        header = b"\xff" * 6 + b"\x02" * 6 + struct.pack(">H", ETHERTYPE) + b"AFXDPQS1"
        start = time.monotonic()
        for number in range(count):
            if number % burst == 0:
                time.sleep(max(0.0, start + number / rate - time.monotonic()))  # the rate, nothing is waited for
            sock.send(header + struct.pack(">Q", first + number) + bytes(38))


class PodApp:
    """examples/pod_app.py at work in a pod; ready when it is made."""

    def __init__(self, pod: Pod, directory: Path, hostname: str, devices: list[str], packets: int) -> None:
        named = [option for device in devices for option in ("--device", device)]
        command = [
            *pod.prefix(),
            *(sys.executable, str(ROOT / "examples" / "pod_app.py"), *named),
            *("--socket-dir", str(directory), "--hostname", hostname, "--frames", "4096"),
            *("--packets", str(packets), "--seconds", "20", "--json"),
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        ready = self._process.stdout.readline()
        if not ready.startswith("ready: "):
            raise AssertionError(f"{ready}{self._process.communicate()[1]}")

    def __enter__(self) -> PodApp:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def result(self) -> dict[str, Any]:
        """Waits until it ends and returns what it counted; see its --help."""
        output, errors = self._process.communicate(timeout=60)
        assert self._process.returncode == 0, output + errors
        return dict(json.loads(output.splitlines()[-1]))
