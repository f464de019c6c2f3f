"""The benchmark's node: namespaces, network devices, the plugin as a process, the pods' side of the handshake."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import selectors
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRATCH = Path("/run/bench")
"""In a file system of the benchmark alone."""
FIXED_PATHS = {
    "/var/lib/kubelet": "kubelet",
    "/tmp/afxdp_dp": "uds",
    "/var/log/afxdp-k8s-plugins": "log",
}
"""Where plugins look that cannot be told: path → what of SCRATCH is there, too."""
PLACEHOLDERS = {
    "config": f"{SCRATCH}/config.json",
    "kubelet_dir": f"{SCRATCH}/kubelet",
    "uds_dir": "/run/afxdp_dp",
    "bpffs": "/sys/fs/bpf",
    "log_dir": f"{SCRATCH}/log",
    "resource": "afxdp/bench",
}
POOL, GROUP, SPARE = "bench", 77, "spare"
"""The pool; the devices' group, by which they are deleted at once; a device that the pool may have, and comes later."""
START_TIMEOUT, STOP_TIMEOUT = 60.0, 10.0
QUIET_WINDOW, QUIET_CPU, QUIET_WINDOWS, QUIET_BOUND = 0.01, 0.0003, 3, 10.0
"""Seconds; see Plugin.settle."""


class MeasureError(Exception):
    """Something cannot be measured; the text says why."""


class LacksError(MeasureError):
    """A plugin does not do what would be measured: that is no failure, unless it is ours."""


def enter(environment: str, *fds: int) -> int:
    """Runs this program again in namespaces of its own, with `environment` set, and returns its exit status.

    All that is made there (devices, mounts, pins, files, processes) goes when the first process in them ends, and that
    goes with this one, whatever ends it.
    """
    libc = ctypes.CDLL(None)
    kill = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
    inner = subprocess.Popen(
        [*kill, "--propagation", "private", sys.executable, *sys.argv],
        env={**os.environ, environment: "1"},
        pass_fds=fds,
        preexec_fn=lambda: libc.prctl(1, signal.SIGKILL),  # PR_SET_PDEATHSIG, see prctl(2)
    )
    ended = False

    def end(*_: object) -> None:
        nonlocal ended
        ended = True
        inner.kill()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    status = inner.wait()
    return 130 if ended else status


def isolate(*, fixed_paths: bool) -> list[str]:
    """Makes the file systems of a node in the namespaces that `enter` has made.

    Args:
        fixed_paths: Whether a plugin may look at FIXED_PATHS. What is missing of them is made in a layer above the
            directory that it is to be in, so that nothing of it is ever in that directory.

    Returns:
        Those of them that cannot be made here.
    """
    missing = []
    mount("-t", "tmpfs", "none", "/run")
    mount("-t", "sysfs", "none", "/sys")
    mount("-t", "bpf", "none", "/sys/fs/bpf")
    for name in ("kubelet", "uds", "log", "layers"):
        (SCRATCH / name).mkdir(parents=True)
    if fixed_paths:
        for path, name in FIXED_PATHS.items():
            place = Path(path)
            if not place.is_dir():
                upper, work = SCRATCH / "layers" / f"{name}-upper", SCRATCH / "layers" / f"{name}-work"
                upper.mkdir()
                work.mkdir()
                layers = f"lowerdir={place.parent},upperdir={upper},workdir={work}"
                try:
                    mount("-t", "overlay", "-o", layers, "overlay", str(place.parent))
                except MeasureError:
                    missing.append(path)
                    continue
                place.mkdir()
            mount("--bind", str(SCRATCH / name), path)
    ip("link set lo up")
    for family, key, value in (("ipv6", "accept_dad", 0), ("ipv6", "router_solicitations", 0)):
        with suppress(OSError):  # addresses are there at once, and nothing follows: no news while something is measured
            Path(f"/proc/sys/net/{family}/conf/default/{key}").write_text(str(value))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return missing


def mount(*arguments: str) -> None:
    """Runs the program mount, which has to succeed."""
    run("mount", *arguments)


def ip(*commands: str) -> None:
    """Runs commands of the program ip, which have to succeed, in one process."""
    run("ip", "-batch", "-", text="\n".join(commands))


def run(*command: str, text: str | None = None) -> str:
    """Runs a program and returns what it printed. Raises MeasureError if it fails."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise MeasureError(f"{shlex.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


class LinkEvents:
    """What the kernel says of network devices, for the moment at which it does. See rtnetlink(7)."""

    _NEWLINK, _DELLINK, _IFNAME = 16, 17, 3

    def __init__(self) -> None:
        self._sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._sock.bind((0, 1))  # RTMGRP_LINK
        self._sock.settimeout(10)

    def __enter__(self) -> LinkEvents:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()

    def wait(self, name: str, *, there: bool) -> float:
        """Waits for the next news that a device is there, or is not any more; returns the time.

        On a busy machine others may act on the news before this process has a processor, so it asks for precedence.
        """
        with suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        try:
            return self._wait(name, self._NEWLINK if there else self._DELLINK)
        finally:
            with suppress(PermissionError):
                os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))

    def _wait(self, name: str, wanted: int) -> float:
        while True:
            data = self._sock.recv(65536)
            now = time.monotonic()
            while data:
                length, kind = struct.unpack_from("IH", data)
                if kind == wanted and self._name(data[32:length]) == name:
                    return now
                data = data[(length + 3) & ~3 :]

    def _name(self, attributes: bytes) -> str:
        while attributes:
            length, kind = struct.unpack_from("HH", attributes)
            if kind == self._IFNAME:
                return attributes[4:length].rstrip(b"\0").decode()
            attributes = attributes[(length + 3) & ~3 :]
        return ""


class Kubelet:
    """The process bench_kubelet.py."""

    def __init__(self, log: Path) -> None:
        script = Path(__file__).with_name("bench_kubelet.py")
        directory = SCRATCH / "kubelet"
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, str(script), "--plugin-dir", str(directory / "device-plugins")),
                    *("--pod-resources-socket", str(directory / "pod-resources" / "kubelet.sock")),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._log = log
        self._reply()

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.communicate()

    def __call__(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Executes a command of its Console. Raises MeasureError with what went wrong."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"cmd": command, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise MeasureError(f"the stand-in for kubelet has ended: {self._log.read_text(errors='replace').strip()}")
        reply = json.loads(line)
        if not reply.pop("ok"):
            raise MeasureError(reply["message"])
        return dict(reply)


@dataclass(slots=True)
class Plugin:
    """A running plugin.

    Attributes:
        pid: Of its process.
        started: When the process was asked for, by time.monotonic, as all times.
        registered: When its Register came to kubelet.
        healthy: When kubelet had got all devices as Healthy.
    """

    pid: int
    started: float
    registered: float = 0.0
    healthy: float = 0.0

    def cpu(self) -> float:
        """Seconds of processor time so far, of all threads there ever were. See clock_getcpuclockid(3)."""
        return time.clock_gettime((~self.pid << 3) | 2)

    def status(self, key: str) -> int:
        """A number in /proc/<pid>/status."""
        return self._number(Path(f"/proc/{self.pid}/status"), key)

    def switches(self) -> int:
        """How often its threads have gone to sleep."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(self._number(task / "status", "voluntary_ctxt_switches") for task in tasks)

    def rss(self) -> float:
        """Memory in MB (10⁶ bytes)."""
        return self.status("VmRSS") * 1024 / 1e6

    def fds(self) -> int:
        """How many descriptors it has open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def settle(self) -> None:
        """Waits until it rests: there is no word of a plugin that it has done what it does after a call.

        It rests when it has used less than 0.3 ms of processor time in each of three looks, 10 ms apart. After ten
        seconds it is taken as it is.
        """
        deadline = time.monotonic() + QUIET_BOUND
        quiet, last = 0, self.cpu()
        while quiet < QUIET_WINDOWS and time.monotonic() < deadline:
            time.sleep(QUIET_WINDOW)
            now = self.cpu()
            quiet = quiet + 1 if now - last < QUIET_CPU else 0
            last = now

    @staticmethod
    def _number(file: Path, key: str) -> int:
        for line in file.read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1])
        raise LookupError(key)


class Node:
    """A node on which a plugin is started again and again, each time as on a new machine.

    Args:
        command: The plugin's command line, with PLACEHOLDERS.
        environment: The plugin's.
        resource: What it registers.

    Attributes:
        command: The plugin's command line, in words.
    """

    def __init__(self, command: str, environment: dict[str, str], resource: str) -> None:
        self.resource = resource
        self.log = SCRATCH / "plugin.log"
        self._environment = environment
        self._links = False
        names = {**PLACEHOLDERS, "resource": resource}
        try:
            self.command = [word.format(**names) for word in shlex.split(command)]
        except (LookupError, ValueError) as exc:
            raise MeasureError(f"--plugin: {command!r}: {exc}") from exc
        self.kubelet = Kubelet(SCRATCH / "kubelet.log")

    def close(self) -> None:
        """Ends what still runs."""
        self.kubelet.close()

    @contextmanager
    def plugin(self, devices: int, *, links: int = 0, raw: bool = False, both_ends: bool = False) -> Iterator[Plugin]:
        """A plugin with so many devices, which are all Healthy, and at rest.

        Args:
            devices: Its pool; each is one end of a veth pair.
            links: How many links the host has, at least: lo, and both ends of the devices' pairs and of others.
            raw: Whether the pool is one with udsServerDisable.
            both_ends: Whether both ends of each pair are devices of the pool.
        """
        names = self._make_links(devices, links, both_ends=both_ends)
        pool = {"name": POOL, "mode": "primary", "devices": [{"name": name} for name in [*names, SPARE]]}
        config = {"pools": [{**pool, **({"udsServerDisable": True} if raw else {})}], "logLevel": "info"}
        Path(PLACEHOLDERS["config"]).write_text(json.dumps(config))
        with self.log.open("wb") as output:
            started = time.monotonic()
            try:
                process = subprocess.Popen(self.command, stdout=output, stderr=output, env=self._environment)
            except OSError as exc:
                raise MeasureError(f"--plugin: {self.command[0]}: {exc.strerror}") from exc
        try:
            plugin = Plugin(process.pid, started)
            plugin.registered = self._ask(process, "registered", resource=self.resource, timeout=START_TIMEOUT)["at"]
            wanted = {"resource": self.resource, "count": devices, "timeout": START_TIMEOUT + devices * 0.1}
            plugin.healthy = self._ask(process, "healthy", **wanted)["at"]
            plugin.settle()
            yield plugin
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self._wipe()

    def _ask(self, process: subprocess.Popen[bytes], command: str, **arguments: Any) -> dict[str, Any]:
        """Executes a command of kubelet while the plugin starts; if that fails, says what the plugin said."""
        deadline = time.monotonic() + arguments.pop("timeout")
        while True:
            try:
                return self.kubelet(command, timeout=0.5, **arguments)
            except MeasureError as exc:
                if process.poll() is None and time.monotonic() < deadline:
                    continue
                words = f"it has ended with status {process.returncode}" if process.poll() is not None else str(exc)
                last = self.log.read_text(errors="replace").splitlines()[-3:]
                raise MeasureError("; ".join([f"the plugin does not start: {words}", *last])) from exc

    def _make_links(self, devices: int, links: int, *, both_ends: bool) -> list[str]:
        """Makes veth pairs, and returns the names of those ends that are devices."""
        pairs = (devices + 1) // 2 if both_ends else devices
        ends = [f"{prefix}{number}" for prefix, count in (("bench", pairs), ("other", links // 2 - pairs))
                for number in range(count)]  # fmt: skip
        if ends:
            ip(*[f"link add {end} type veth peer name {end}p" for end in ends])
            self._links = True
            ip(*[f"link set {end} up group {GROUP}" for end in ends], *[f"link set {end}p up" for end in ends])
        names = [end for end in ends if end.startswith("bench")]
        return [each for end in names for each in (end, f"{end}p")][:devices] if both_ends else names

    def _wipe(self) -> None:
        """Removes everything that a plugin leaves, and what it was left on."""
        self.kubelet("forget")
        if self._links:
            run("ip", "link", "del", "group", str(GROUP))
            self._links = False
        for place in (SCRATCH / "uds", SCRATCH / "log", Path(PLACEHOLDERS["uds_dir"]), Path(PLACEHOLDERS["bpffs"])):
            for entry in place.iterdir() if place.is_dir() else ():
                shutil.rmtree(entry, ignore_errors=True)
        for entry in (SCRATCH / "kubelet" / "device-plugins").iterdir():
            if entry.name != "kubelet.sock":
                entry.unlink()

    def allocate(self, *requests: Sequence[str]) -> dict[str, Any]:
        """Calls Allocate for the devices of each request; see bench_kubelet.py."""
        return self.kubelet("allocate", resource=self.resource, requests=[list(names) for names in requests])


@dataclass(frozen=True, slots=True)
class Handshake:
    """How long one took: from before connect(2) to the map's descriptor in hand, and /connect of it, in seconds."""

    whole: float
    connect: float


class _Conversation:
    """One pod's side of it, as it goes on; it never blocks."""

    def __init__(self, path: str, hostname: str, device: str) -> None:
        self._requests = iter(
            [
                (b"/version", b"/host_ok"),
                (f"/xsk_map_fd, {device}".encode(), b"0.1"),
                (b"/fin", b"/fd_ack"),
            ]
        )
        self._device = device
        self._begun = time.perf_counter()
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.sock.connect(path)
            self._sent = time.perf_counter()
            self.sock.send(f"/connect, {hostname}".encode())
        except OSError as exc:
            self.sock.close()
            raise LacksError(f"its socket does not take this connection: {exc.strerror}") from exc
        self.sock.setblocking(False)
        self._connect = 0.0
        self.result: Handshake | None = None

    def go_on(self) -> bool:
        """Takes a reply; returns whether it is over."""
        try:
            reply, fds, _, _ = socket.recv_fds(self.sock, 512, 4)
        except OSError as exc:
            raise MeasureError(f"{self._device}: no handshake: {exc.strerror}") from exc
        now = time.perf_counter()
        for fd in fds:
            os.close(fd)
        if self.result is not None:
            return True  # /fin_ack
        request, expected = next(self._requests)
        if reply != expected or (expected == b"/fd_ack" and len(fds) != 1):
            raise MeasureError(f"{self._device}: no handshake: {reply!r} in place of {expected!r}")
        if expected == b"/host_ok":
            self._connect = now - self._sent
        elif expected == b"/fd_ack":
            self.result = Handshake(now - self._begun, self._connect)
        self.sock.send(request)
        return False


def handshakes(pods: Sequence[tuple[str, str, str]], *, at_once: int = 1) -> list[Handshake]:
    """Has pods go through the handshake, in one thread: so many begin together, and the next ones when all have ended.

    Args:
        pods: The path of the socket, the hostname, the device, of each.
        at_once: How many.
    """
    done = []
    for first in range(0, len(pods), at_once):
        with selectors.DefaultSelector() as selector:
            conversations = []
            try:
                for pod in pods[first : first + at_once]:
                    conversations.append(_Conversation(*pod))
                    selector.register(conversations[-1].sock, selectors.EVENT_READ, conversations[-1])
                while selector.get_map():
                    ready = selector.select(30)
                    if not ready:
                        raise MeasureError("no handshake: no reply in 30 s")
                    for key, _ in ready:
                        if key.data.go_on():
                            selector.unregister(key.fileobj)
            finally:
                for conversation in conversations:
                    conversation.sock.close()
        done += [conversation.result for conversation in conversations if conversation.result is not None]
    return done


@contextmanager
def answering(path: Path) -> Iterator[None]:
    """A process that answers each handshake on a socket as a plugin does, and does nothing else: the floor."""
    replies = {b"/c": b"/host_ok", b"/v": b"0.1", b"/f": b"/fin_ack"}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(path))
        listener.listen(128)
        child = os.fork()
        if child == 0:
            fd = os.open(os.devnull, os.O_RDONLY)
            selector = selectors.DefaultSelector()
            selector.register(listener, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is listener:
                        selector.register(listener.accept()[0], selectors.EVENT_READ, "connection")
                        continue
                    connection = key.fileobj
                    assert isinstance(connection, socket.socket)
                    request = connection.recv(512)
                    if not request:
                        selector.unregister(connection)
                        connection.close()
                    elif request.startswith(b"/x"):
                        socket.send_fds(connection, [b"/fd_ack"], [fd])
                    else:
                        connection.send(replies[request[:2]])
        try:
            yield
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            path.unlink()
