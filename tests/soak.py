#!/usr/bin/env python3
"""A node whose pods come and go, and every fault there is, at random: nothing may be lost. A script; it runs as root.

    python tests/soak.py --minutes 20 --seed 1

It moves into namespaces of its own, starts a stand-in for kubelet and the daemon, makes veth pairs, and then goes step
by step: one fault, while pods end and others start. The steps follow from --seed, --minutes and --pods alone, so that a
run can be repeated; how far it gets in its time, and what happens at the very same moment, may differ.

A pod is a network namespace (or the host's) with an AF_XDP socket in it. All of them are in this process: the kernel
and the daemon see no difference, and a process for each would leave no time for anything else. Each is sent RATE
numbered packets a second, and every single one has to arrive, whatever happens to kubelet, the daemon or other pods.
No loss is ever forgiven: a step that harms a device which a pod has first waits for all its packets, and sends none
while the harm lasts; afterwards they have to flow again.

After each step, within BOUND seconds: every packet has arrived, once; kubelet lists all devices as Healthy, watches,
and has been registered with once for each reason; pinned and with a socket are the devices that pods have, and no
others; those are in their pods, all others in the host's namespace with a program of ours; the daemon has logged no
bug. Every IDLE_EVERY steps all pods end. Then descriptors and tasks of the daemon, its programs, maps and links in the
kernel, pins, sockets and directories have to be as at the beginning; at the very end its threads, too.

Memory: a daemon that is restarted begins anew, so the faults that end it come in the first part only, the first
RESTART_STEPS steps for each minute (about two fifths of the time). The daemon of that moment lives to the end. Its RSS
is noted after each step; it goes up and down by some percent, as Python's garbage does. So the median of the minute
after its first one is compared with the median of the last minute, unless the run is too short for that.

Times that are long in production are shorter here, see CONSTANTS; otherwise each pod's end would take two minutes.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import itertools
import json
import os
import random
import resource
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

try:
    import conftest
    import trio
    from kubelet import Kubelet, KubeletError, pod, running_kubelet
    from prometheus_client.parser import text_string_to_metric_families
    from support import ETHERTYPE, ROOT, Client, delete_link, get_map_id, in_thread, make_veth, paths_options

    import afxdpd
except ImportError as exc:
    sys.exit(f"soak.py: there is no {exc.name}: it needs what the tests need, as .venv-test has after sh tests/run.sh")
from afxdpd_proto import dpcnisyncer_pb2 as syncer

sys.path.append(str(ROOT / "examples"))
import pod_app

T = TypeVar("T")

CONSTANTS = {"RELEASE_GRACE": 3.0, "RELEASE_AFTER": 1.0, "RELEASE_AFTER_EMPTY": 20.0, "HOLD_OFF": 1.5}
"""Of the daemon; beside that its PodResources.IDLE is 1.0, and no delay of a Backoff longer than 10.0."""
RATE, TICK = 200, 0.05
"""Packets a second for each pod; they are sent in bursts, so many seconds apart."""
BOUND, POD_BOUND = 30.0, 60.0
"""Seconds until all is as it has to be (registrations are up to 12 apart), and until a pod runs or has ended."""
SOON, EXIT_BOUND = 2.0, 2.0
"""Seconds for a handshake beside a hostile pod, and for the daemon's end: here the machine may be busy."""
IDLE_EVERY, RESTART_STEPS = 15, 10
SPARE, RSS_GROWTH, GIVE_UP = 4, 0.05, 5
"""Devices beyond one for each pod; how much the daemon may grow; violations after which the run ends."""
BUGS = ("Traceback", "a bug", "never closed", "Exception ignored")
"""What must not be in the daemon's log."""

DAEMON = """
import gc, json, os, signal, sys
import _uds, afxdpd, trio

settings = json.loads(sys.argv.pop(1))
vars(afxdpd).update(settings["constants"])
afxdpd.PodResources.IDLE = 1.0
name = settings["name"].encode()

class Backoff(afxdpd.Backoff):  # a pool that crashes often would wait a minute
    def __init__(self, first, limit):
        super().__init__(first, min(limit, 10.0))

class Library:  # what it makes in the kernel has a name that no other daemon uses
    def __getattr__(self, function):
        return getattr(_uds.lib, function)
    def uds_xskmap_create(self, _, queues):
        return _uds.lib.uds_xskmap_create(name, queues)
    def uds_redirect_prog_load(self, fd, _):
        return _uds.lib.uds_redirect_prog_load(fd, name)

def count_tasks(*_):
    with open(settings["tasks"] + ".new", "w") as file:
        print(trio.lowlevel.current_statistics().tasks_living, file=file)
    os.rename(settings["tasks"] + ".new", settings["tasks"])

async def fail():
    raise RuntimeError("soak: a pool crashes")

def crash_pools():
    for pool in [each for each in gc.get_objects() if type(each) is afxdpd.PoolManager and each._nursery]:
        pool._nursery.start_soon(fail)

afxdpd.Backoff, afxdpd.lib = Backoff, Library()
signal.signal(signal.SIGUSR1, count_tasks)
signal.signal(signal.SIGUSR2, lambda *_: trio.lowlevel.current_trio_token().run_sync_soon(crash_pools))
sys.exit(afxdpd.main())
"""
"""The program that runs the daemon; its first argument are the settings, in JSON."""


class Report:
    """What is printed, and how much was wrong."""

    def __init__(self, log: Path) -> None:
        self.violations = 0
        self._log = log
        self._begun = time.monotonic()

    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._begun

    def say(self, text: str) -> None:
        """Prints a line."""
        print(f"{self.elapsed():7.1f}  {text}", flush=True)

    def violation(self, text: str) -> None:
        """Prints what is wrong, with the end of the daemon's log."""
        self.violations += 1
        self.say(f"VIOLATION: {text}")
        with self._log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4000))
            for line in file.read().decode(errors="replace").splitlines()[1:]:
                print(f"           | {line}", flush=True)


# -- The kernel --------------------------------------------------------------------------------------------------------


def bpf(command: int, *words: int) -> list[int]:
    """Makes the system call with an argument of 32-bit words; returns the result and the words afterwards."""
    attr = (ctypes.c_uint32 * 4)(*words)
    number = ctypes.c_long(pod_app.SYS_BPF[os.uname().machine])
    return [pod_app.libc.syscall(number, command, attr, ctypes.sizeof(attr)), *attr]


def bpf_objects(name: str) -> dict[str, set[int]]:
    """Ids of all programs and maps in the kernel that have a name, and of the links of these programs.

    See bpf(2): the numbers are BPF_…_GET_NEXT_ID, BPF_…_GET_FD_BY_ID, and where struct bpf_…_info has the name.
    """
    found: dict[str, set[int]] = {"programs": set(), "maps": set(), "links": set()}
    for kind, get_next, get_fd, name_at in (("programs", 11, 13, 64), ("maps", 12, 14, 24), ("links", 31, 30, 0)):
        identity = 0
        while (answer := bpf(get_next, identity))[0] == 0:
            identity = answer[2]
            fd = bpf(get_fd, identity)[0]
            if fd < 0:
                continue  # gone meanwhile
            info = ctypes.create_string_buffer(256)
            address = ctypes.addressof(info)
            bpf(pod_app.BPF_OBJ_GET_INFO_BY_FD, fd, len(info), address & 0xFFFFFFFF, address >> 32)
            os.close(fd)
            if kind == "links":
                mine = struct.unpack_from("I", info, 8)[0] in found["programs"]
            else:
                mine = info.raw[name_at : name_at + 16].rstrip(b"\0") == name.encode()
            if mine:
                found[kind].add(identity)
    return found


def ip(*commands: str, netns: Netns | None = None) -> None:
    """Runs commands of the program ip, which have to succeed."""
    command = [*(["nsenter", f"--net={netns.path}"] if netns is not None else []), "ip", "-batch", "-"]
    done = subprocess.run(command, input="\n".join(commands), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ip {commands}: {done.stdout}{done.stderr}")


def flap(device: str, netns: Netns | None) -> None:
    """Sets a device down and up, fifty times in a second."""
    for _ in range(50):
        ip(f"link set {device} down", f"link set {device} up", netns=netns)
        time.sleep(0.01)


def sysfs(device: str, attribute: str) -> str:
    """An attribute of a device of the host's namespace, "" where there is no such device."""
    with suppress(OSError):
        return Path("/sys/class/net", device, attribute).read_text().strip()
    return ""


async def until(condition: Callable[[], object], what: str, seconds: float = BOUND) -> None:
    """Waits until something is true that nobody announces."""
    with trio.move_on_after(seconds):
        while not condition():  # noqa: ASYNC110  there is no event for it
            await trio.sleep(0.02)
        return
    raise TimeoutError(f"in vain waited {seconds:g} s for {what}")


class Netns:
    """A network namespace, as long as it is not closed and nothing is left in it."""

    _CLONE_NEWNET = 0x40000000

    def __init__(self) -> None:
        self.fd = -1
        self._in_new_thread(self._create)

    @property
    def path(self) -> str:
        """Where other processes find it."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def run(self, function: Callable[[], T]) -> T:
        """Calls a function in it."""
        enter = partial(pod_app.libc.setns, self.fd, self._CLONE_NEWNET)
        return self._in_new_thread(lambda: (enter(), function())[1])

    def close(self) -> None:
        """Gives it up."""
        os.close(self.fd)

    def _create(self) -> None:
        if pod_app.libc.unshare(self._CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "unshare")
        self.fd = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    @staticmethod
    def _in_new_thread(function: Callable[[], T]) -> T:
        with ThreadPoolExecutor(1) as executor:
            return executor.submit(function).result()


# -- Pods and their traffic --------------------------------------------------------------------------------------------


class Flow:
    """Numbered packets from a device's other end to the AF_XDP socket of the pod that has it.

    It begins with packets that count for nothing, until one of them has arrived; from then on all have to.
    """

    _PACKET = struct.Struct("!12sH4sIQ30x")
    _MAGIC = b"SOAK"
    _ids = itertools.count(1)

    def __init__(self, name: str, report: Report) -> None:
        self.name = name
        self.sent = self.received = 0
        self._report = report
        self._id = next(self._ids)
        self._wanted = False  # whether to send
        self._flowing = trio.Event()
        self._next = 1  # the number of the next packet to come; those below the other one are of no interest
        self._floor = 1
        self._lost = self._strays = 0
        self._xsk: pod_app.XskSocket | None = None
        self._sender: socket.socket | None = None

    async def start(self, xsk: pod_app.XskSocket | None = None, sender: str = "") -> None:
        """Sends, and returns when packets arrive; to another socket, which it owns from now on, where one is given."""
        if xsk is not None:
            self._xsk = xsk
            self._sender = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
            self._sender.bind((sender, 0))
            self._sender.setblocking(False)
        self._flowing = trio.Event()
        self._wanted = True
        await until(self._flowing.is_set, f"packets at {self.name}")

    async def stop(self) -> None:
        """Stops to send when all that was sent is there."""
        self._wanted = False
        await self.check()

    def close(self) -> None:
        """Closes the sockets."""
        self._wanted = False
        if self._xsk is not None and self._sender is not None:
            self._xsk.close()
            self._sender.close()
        self._xsk = self._sender = None

    async def check(self) -> None:
        """Makes sure that everything arrives that has been sent until now."""
        sent = self.sent
        with suppress(TimeoutError):
            await until(lambda: self._next > sent or self._xsk is None, "the last packet", 5)
        missing = max(sent + 1 - self._next, 0)
        if missing or self._lost or self._strays:
            self._report.violation(
                f"{self.name}: of {sent} packets the last {missing} did not arrive, nor {self._lost} before; "
                f"{self._strays} came twice or were another's; "
                f"dropped at the socket: {self._xsk.dropped() if self._xsk else '?'}"
            )
            self._next, self._lost, self._strays = self.sent + 1, 0, 0

    def tick(self) -> None:
        """Sends a burst, and takes what has arrived."""
        try:
            for _ in range(int(RATE * TICK) if self._wanted and self._flowing.is_set() else 0):
                self.sent += 1
                self._send(self.sent)
        except OSError as exc:
            self._wanted = False
            self._report.violation(f"{self.name}: {exc}")
        if self._wanted and not self._flowing.is_set():
            with suppress(OSError):
                self._send(0)
        while self._xsk is not None and self._xsk.receive(self._take):
            pass

    def _send(self, number: int) -> None:
        assert self._sender is not None
        ends = b"\xff" * 6 + b"\x02" * 6
        self._sender.send(self._PACKET.pack(ends, ETHERTYPE, self._MAGIC, self._id, number))

    def _take(self, packet: memoryview) -> None:
        if len(packet) < self._PACKET.size:
            return
        _, ethertype, magic, identity, number = self._PACKET.unpack_from(packet)
        if (ethertype, magic) != (ETHERTYPE, self._MAGIC):
            return  # the kernel's own, such as neighbour discovery
        if identity != self._id:
            self._strays += 1
        elif number == 0:
            if self._wanted and not self._flowing.is_set():
                self._next = self._floor = self.sent + 1
                self._flowing.set()
        elif number >= self._next:
            self._lost += number - self._next
            self._next = number + 1
            self.received += 1
        elif number >= self._floor:
            self._strays += 1


class SoakPod:
    """A pod with one device, of a random kind.

    Some have the same name; some have the device in two containers, one after another; some stay in the host's
    namespace; some call the device otherwise, or have another device with its ifindex; some keep the connection to the
    daemon.
    """

    def __init__(self, number: int, device: str, pool: str, rng: random.Random, report: Report) -> None:
        self.device, self.pool, self.resource = device, pool, f"afxdp/{pool}"
        self.namespace = f"ns-{number}"
        self.name = rng.choice((f"pod-{number}", f"pod-{number}", "twin", f"pod-{number}-" + "x" * 60))
        self.hostname = self.name[:54]  # as DPDK sends it
        self.containers = rng.choice((1, 1, 2))
        self.is_on_host = rng.random() < 0.2
        self.inside = device if self.is_on_host else rng.choice((device, device, "net1"))
        self.is_crowded = rng.random() < 0.2
        self.netns: Netns | None = None
        self.flow = Flow(f"{self} ({device})", report)
        self._keeps_connection = rng.random() < 0.5
        self._client: Client | None = None

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name[:12]}"

    def listed(self) -> dict[str, Any]:
        """What PodResources has of it."""
        entry = pod(self.name, {self.resource: [self.device]}, namespace=self.namespace)
        return {**entry, "containers": [{**entry["containers"][0], "name": f"c{n}"} for n in range(self.containers)]}

    def enter(self) -> None:
        """What the CNI does when the pod starts. Blocks."""
        if self.is_on_host:
            return
        self.netns = Netns()
        if self.is_crowded:
            ip(f"link add crowd index {sysfs(self.device, 'ifindex')} type bridge", netns=self.netns)
        ip(f"link set {self.device} netns {self.netns.path}")
        rename = [f"link set {self.device} name {self.inside}"] if self.inside != self.device else []
        ip(*rename, f"link set {self.inside} up", netns=self.netns)

    def leave(self) -> None:
        """What the CNI does when the pod ends. Blocks."""
        if self.netns is not None:
            rename = [f"link set {self.inside} name {self.device}"] if self.inside != self.device else []
            back = f"link set {self.device} netns {os.getpid()}"
            ip(f"link set {self.inside} down", *rename, back, netns=self.netns)
            ip(f"link set {self.device} up")

    def open_socket(self, path: Path) -> pod_app.XskSocket:
        """What the application does when it starts; returns its AF_XDP socket, which is in the map. Blocks.

        Raises:
            OSError: The daemon is not there.
            AssertionError: The daemon has another answer.
        """
        with ExitStack() as stack:
            client = Client(path)
            stack.callback(client.sock.close)
            assert client.ask(f"/connect, {self.hostname}".encode()) == (b"/host_ok", [])
            reply, fds = client.ask(f"/xsk_map_fd, {self.device}".encode())
            assert (reply, len(fds)) == (b"/fd_ack", 1), (reply, fds)
            stack.callback(os.close, fds[0])
            make = partial(pod_app.XskSocket, self.inside, 0, frames=512)
            xsk: pod_app.XskSocket = make() if self.netns is None else self.netns.run(make)
            stack.callback(xsk.close)
            pod_app.xskmap_update(fds[0], 0, xsk.fileno())
            assert client.ask(b"/config_busy_poll, 20, 64", xsk.fileno()) == (b"/config_busy_poll_ack", [])
            if not self._keeps_connection:
                assert client.ask(b"/fin") == (b"/fin_ack", [])
                client.sock.close()
            os.close(fds[0])
            stack.pop_all()
        self._client = client
        return xsk

    def die(self) -> None:
        """Its processes end."""
        self.flow.close()
        if self._client is not None:
            self._client.sock.close()

    def dissolve(self) -> None:
        """Its namespace ends, too, with whatever is in it."""
        netns, self.netns = self.netns, None
        if netns is not None:
            netns.close()


# -- The node ----------------------------------------------------------------------------------------------------------


class Daemon:
    """The daemon as a process.

    Attributes:
        name: That of its programs and maps.
        command: How it is started.
        process: The present one.
        born: When it was started.
    """

    def __init__(self, directory: Path) -> None:
        self.name = f"afxdpd_{os.getpid()}"
        self.log = directory / "daemon.log"
        self.log.touch()
        self.born, self.starts, self.slowest_end = 0.0, 0, 0.0
        self._tasks = directory / "tasks"
        settings = json.dumps({"constants": CONSTANTS, "name": self.name, "tasks": str(self._tasks)})
        python = [sys.executable, "-P", "-W", "always:never closed:ResourceWarning", "-c", DAEMON, settings]
        options = ["--config", str(directory / "config.json"), *paths_options(directory)]
        self.command = ["setpriv", "--pdeathsig", "KILL", *python, *options]
        self._read = 0  # of the log
        self.process: subprocess.Popen[bytes]

    def start(self) -> None:
        """Starts it. From the main thread: it is killed when the thread that has started it ends."""
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(self.command, stdout=output, stderr=output)
        self.born = time.monotonic()
        self.starts += 1

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self.process.poll() is None

    def send(self, number: int) -> None:
        """Sends it a signal."""
        self.process.send_signal(number)

    async def end(self, number: int, process: subprocess.Popen[bytes] | None = None) -> int:
        """Ends it, or another, by a signal; returns the exit status."""
        process, begun = process or self.process, time.monotonic()
        process.send_signal(number)
        try:
            await until(lambda: process.poll() is not None, "the daemon's end", 10)
        finally:
            process.kill()
            process.wait()
        if number == signal.SIGTERM:
            self.slowest_end = max(self.slowest_end, time.monotonic() - begun)
        return process.returncode

    def news(self) -> str:
        """What it has logged since the last call."""
        text = self.logged_since(self._read)
        text = text[: text.rfind(b"\n") + 1]
        self._read += len(text)
        return text.decode(errors="replace")

    def logged_since(self, position: int) -> bytes:
        """What is in its log from a position on."""
        with self.log.open("rb") as file:
            file.seek(position)
            return file.read()

    async def says(self, text: str, number: int, *, times: int = 1) -> None:
        """Sends it a signal and waits until it has logged a text."""
        size = self.log.stat().st_size
        self.send(number)
        await until(lambda: self.logged_since(size).count(text.encode()) >= times, f"{text!r} in the log")

    def status(self, key: str) -> int:
        """A number of /proc/<pid>/status; see proc(5)."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(f"{key}:")).split()[1])

    async def usage(self) -> dict[str, int]:
        """What it has: descriptors, tasks and threads, programs, maps and links."""
        self._tasks.unlink(missing_ok=True)
        self.send(signal.SIGUSR1)
        await until(self._tasks.exists, "the daemon's number of tasks")
        usage = {kind: len(ids) for kind, ids in bpf_objects(self.name).items()}
        usage.update(tasks=int(self._tasks.read_text()), threads=self.status("Threads"), fds=len(self.files()))
        return usage

    def files(self) -> list[str]:
        """What its descriptors lead to."""
        found = []
        for entry in os.scandir(f"/proc/{self.process.pid}/fd"):
            with suppress(OSError):
                found.append(os.readlink(entry.path))
        return found


class Node:
    """kubelet, the daemon, the devices and the pods, and what has to be true of them.

    Attributes:
        pools: The devices of each pool.
        pods: By device.
        registers: How often kubelet has to have been registered with, for each pool, in its present incarnation.
        retries: How often something was done in vain for a pod, such as asking a daemon that was away.
    """

    def __init__(self, directory: Path, kubelet: Kubelet, daemon: Daemon, pods: int, report: Report) -> None:
        names = [f"sk{number}" for number in range(pods + SPARE)]
        self.directory, self.kubelet, self.daemon, self.report = directory, kubelet, daemon, report
        self.pools = {"pool": names[: -len(names) // 4], "aux": names[-len(names) // 4 :]}
        self.pods: dict[str, SoakPod] = {}
        self.registers: dict[str, int | None] = dict.fromkeys(self.pools, 0)
        self.traps = dict.fromkeys(self.pools, 0)
        self.retries = 0
        self._listed: dict[str, SoakPod] = {}
        self._listing = trio.Lock()
        self.write_config()

    @property
    def devices(self) -> list[str]:
        """All devices."""
        return [device for devices in self.pools.values() for device in devices]

    @property
    def free(self) -> list[str]:
        """Those that no pod has."""
        return [device for device in self.devices if device not in self.pods]

    def pool_of(self, device: str) -> str:
        """Whose device it is."""
        return next(name for name, devices in self.pools.items() if device in devices)

    def socket(self, pod: SoakPod) -> Path:
        """The socket of a pod's device."""
        return self.directory / "uds" / pod.pool / pod.device / "afxdp.sock"

    def write_config(self, *without: str, uds_timeout: int = 0) -> None:
        """Writes the configuration, without some pools or devices."""
        pools = []
        for name, devices in self.pools.items():
            options = {"mode": "primary", "udsTimeout": uds_timeout, "bpfMapPinningEnable": name == "aux"}
            named = [{"name": device} for device in devices if device not in without]
            pools += [{"name": name, **options, "devices": named}] if name not in without else []
        (self.directory / "config.json").write_text(json.dumps({"pools": pools, "logLevel": "info"}))

    def start_daemon(self) -> None:
        """Starts the daemon, which is going to register its pools."""
        self.daemon.start()
        self.expect_registers(*self.pools)

    def forgive_registers(self) -> None:
        """Takes it as it will be how often kubelet was registered with: who died may have done it, or half of it."""
        self.registers = dict.fromkeys(self.pools, None)

    def expect_registers(self, *pools: str) -> None:
        """Notes that some pools have to register once more; without any, that kubelet has just restarted."""
        for name in pools or self.pools:
            before = self.registers[name]
            self.registers[name] = 1 if not pools else None if before is None else before + 1

    # ---- the life of a pod

    async def start_pod(self, pod: SoakPod) -> None:
        """kubelet, the CNI and the application start a pod; they try again where kubelet or the daemon is away."""
        for _ in range(pod.containers):  # all calls come at admission
            await self._insist(pod, lambda: self.kubelet.allocate(pod.resource, [pod.device], force=False))
        self._listed[pod.device] = pod
        await self._list_pods()
        await in_thread(pod.enter)
        await self.start_container(pod)
        for _ in range(1, pod.containers):
            await self.restart_container(pod)

    async def restart_container(self, pod: SoakPod) -> None:
        """A container ends, and it or the next one starts."""
        await pod.flow.stop()
        pod.die()
        await self.start_container(pod)

    async def start_container(self, pod: SoakPod) -> None:
        """kubelet prepares the start, the application opens its socket, packets flow."""
        await self._insist(pod, lambda: self.kubelet.prestart(pod.resource, [pod.device]))
        xsk = await self._insist(pod, lambda: in_thread(pod.open_socket, self.socket(pod)))
        await pod.flow.start(xsk, f"{pod.device}p")

    async def end_pod(self, pod: SoakPod, how: str) -> None:
        """Ends a pod: by the CNI, which tells the daemon ("cni") or not ("quietly"); or its device goes ("vanish")."""
        await pod.flow.stop()
        pod.die()
        del self._listed[pod.device]
        await self._list_pods()
        if how == "vanish" and pod.netns is not None:
            pod.dissolve()
            await until(lambda: not sysfs(f"{pod.device}p", "ifindex"), f"the end of {pod.device}")
            await in_thread(make_veth, pod.device)
        else:
            await in_thread(pod.leave)
            pod.dissolve()
        if how == "cni":
            await self._insist(pod, partial(self._let_go, pod.device))
        del self.pods[pod.device]

    async def _let_go(self, device: str) -> None:
        path = self.kubelet.plugin_dir / "afxdp-syncer.sock"
        request = syncer.DeleteNetDevReq(name=device)
        await afxdpd.call_unix(path, "dpcnisyncer.NetDev/DelNetDev", request, syncer.DeleteNetDevResp, timeout=20)
        answered = time.monotonic()
        program = (await in_thread(afxdpd.Network().devices))[device].xdp_prog_id
        if program and time.monotonic() - answered < CONSTANTS["HOLD_OFF"] / 2:
            self.report.violation(f"{device}: carries a program when the daemon has let go of it")

    async def _insist(self, pod: SoakPod, action: Callable[[], Awaitable[T]]) -> T:
        deadline = trio.current_time() + POD_BOUND
        while True:
            try:
                return await action()
            except (KubeletError, afxdpd.RpcError, pod_app.PodError, OSError, AssertionError) as exc:
                if trio.current_time() > deadline:
                    raise TimeoutError(f"{pod}, {pod.device}: in vain for {POD_BOUND:g} s") from exc
            self.retries += 1
            await trio.sleep(0.2)

    async def _list_pods(self) -> None:
        async with self._listing:  # an older list must not come after a newer one
            static = pod("static", {}, namespace="kube-system")
            await self.kubelet.pods(static, *[each.listed() for each in self._listed.values()])

    # ---- what has to be true

    async def settle(self) -> None:
        """Waits until everything is as it has to be."""
        deadline = trio.current_time() + BOUND
        while troubles := await self._troubles():
            if trio.current_time() > deadline:
                self.report.violation("; ".join([f"still after {BOUND:g} s", *troubles]))
                self.forgive_registers()  # what is wrong is told once
                if not self.daemon.is_alive:
                    self.start_daemon()
                break
            await trio.sleep(0.2)
        for name, view in (await self.kubelet.state())["resources"].items():
            if self.registers.get(pool := name.removeprefix("afxdp/")) is None:
                self.registers[pool], self.traps[pool] = view["registers"], view["trap"]
        for each in list(self.pods.values()):
            await each.flow.check()
        for line in self.daemon.news().splitlines():
            if any(bug in line for bug in BUGS):
                self.report.violation(f"the daemon has logged: {line}")

    async def _troubles(self) -> list[str]:
        if not self.daemon.is_alive:
            return ["the daemon has ended"]
        state = (await self.kubelet.state())["resources"]
        troubles = []
        for name, devices in self.pools.items():
            view = state.get(f"afxdp/{name}", {"devices": {}})
            wanted: dict[str, int | None] = {"streams_open": 1, "connected": True}
            if self.registers[name] is not None:
                wanted |= {"registers": self.registers[name], "trap": self.traps[name]}
            seen = {key: view.get(key) for key in wanted}
            if seen != wanted:
                troubles.append(f"{name}: kubelet has {seen}, not {wanted}; {view.get('errors')}")
            listed = {device: entry["health"] for device, entry in view["devices"].items()}
            wrong = dict.fromkeys(devices, "Healthy").items() ^ listed.items()
            if wrong:
                troubles.append(f"{name}: kubelet's list is wrong in {wrong}")
            held = sorted(device for device in devices if device in self.pods)
            for what, root in (("pinned", Path("/sys/fs/bpf/afxdpd")), ("with a directory", self.directory / "uds")):
                found = sorted(path.name for path in (root / name).glob("*"))
                if found != held:
                    troubles.append(f"{name}: {what} are {found}, allocated are {held}")
        here = await in_thread(afxdpd.Network().devices)
        programs = bpf_objects(self.daemon.name)["programs"]
        for device in self.devices:
            is_away = device in self.pods and not self.pods[device].is_on_host
            if is_away != (device not in here):
                troubles.append(f"{device} is{' not' if is_away else ''} in the host's namespace")
            elif not is_away and here[device].xdp_prog_id not in programs:
                troubles.append(f"{device} carries no program of ours, but {here[device].xdp_prog_id}")
        return troubles or await self._wrong_numbers()

    async def _wrong_numbers(self) -> list[str]:
        """Where probe, status and metrics do not say what is so."""
        ask = partial(afxdpd.ask_daemon, self.directory / "uds" / afxdpd.STATUS_NAME, "GET")
        try:
            ready, status, metrics = [(await in_thread(ask, page))[1] for page in ("/readyz", "/status", "/metrics")]
        except OSError as exc:
            return [f"the daemon does not tell its status: {exc}"]
        told: dict[str, dict[str, float]] = {"afxdpd_devices": {}, "afxdpd_allocated_devices": {}}
        for family in text_string_to_metric_families(metrics.decode()):
            for sample in family.samples:
                if sample.labels.get("health") != "Unhealthy" and family.name in told:
                    told[family.name][sample.labels["pool"]] = sample.value
        troubles = [f"not ready: {ready!r}"] if ready != b"ok\n" else []
        for pool in json.loads(status)["pools"]:
            held = sorted(device["name"] for device in pool["devices"] if device["allocation"])
            numbers = {"afxdpd_devices": len(pool["devices"]), "afxdpd_allocated_devices": len(held)}
            found = {name: values.get(pool["name"]) for name, values in told.items()}
            if held != sorted(set(self.pools[pool["name"]]) & set(self.pods)) or numbers != found:
                troubles.append(f"{pool['name']}: status has {numbers}, {held}; metrics have {found}")
        return troubles

    async def check_idle(self, **limits: int) -> dict[str, int]:
        """Makes sure that nothing is left of any pod; returns what the daemon has, which may not be more than this."""
        await self.settle()
        limits.update(dict.fromkeys(("programs", "maps", "links"), len(self.devices)))
        deadline = trio.current_time() + BOUND
        while True:
            await trio.sleep(0.3)
            usage = await self.daemon.usage()
            more = {key: usage[key] for key, limit in limits.items() if usage[key] > limit}
            if not more:
                return usage
            if trio.current_time() > deadline:
                self.report.violation(f"idle, and more than {limits}: {more}; files: {Counter(self.daemon.files())}")
                return usage


# -- Hostile pods and strangers; these block ---------------------------------------------------------------------------


def flood(path: Path, rng: random.Random) -> None:
    """Opens a thousand connections, and sends something on each."""
    with ExitStack() as stack:
        for _ in range(1000):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            sock.setblocking(False)
            with suppress(OSError):
                sock.connect(os.fspath(path))
                sock.send(afxdpd.random_request(rng))


def talk_junk(path: Path, rng: random.Random) -> None:
    """Sends packets that mean nothing, are empty or too long; each gets one reply."""
    with Client(path) as client:
        for packet in (
            b"",
            rng.randbytes(100_000),
            b"/xsk_map_fd,sk0",
            *(afxdpd.random_request(rng) for _ in range(300)),
        ):
            reply, fds = client.ask(packet)
            assert (reply != b"", fds) == (True, []), (packet[:100], reply, fds)
        client.sock.setblocking(False)
        with suppress(BlockingIOError):
            raise AssertionError(f"more replies than requests: {client.sock.recv(100)!r}")


def send_files(path: Path, rng: random.Random) -> None:
    """Sends as many files as a packet can take, of several kinds, again and again."""
    with ExitStack() as stack:
        kinds = (
            (socket.AF_PACKET, socket.SOCK_RAW),
            (socket.AF_UNIX, socket.SOCK_DGRAM),
            (socket.AF_INET, socket.SOCK_DGRAM),
        )
        mine = [stack.enter_context(socket.socket(*rng.choice(kinds))).fileno() for _ in range(253)]
        with Client(path) as client:
            for request in (b"/version", b"/config_busy_poll,20,64", b"nonsense") * 3:
                reply, fds = client.ask(request, *mine)
                assert (reply != b"", fds) == (True, []), (request, reply, fds)


def never_read(path: Path, rng: random.Random) -> None:
    """Sends requests until there is no more room, and reads no reply, on several connections, for a while."""
    with ExitStack() as stack:
        for _ in range(10):
            client = stack.enter_context(Client(path))
            client.sock.setblocking(False)
            with suppress(OSError):
                while True:
                    client.sock.send(b"/version")
        time.sleep(rng.uniform(0.1, 1.5))


def half_close(path: Path, _rng: random.Random) -> None:
    """Closes one direction, before and after a request."""
    for how in (socket.SHUT_WR, socket.SHUT_RD, socket.SHUT_RDWR):
        for request in (b"", b"/version"):
            with Client(path) as client:
                client.sock.send(request or b"/nonsense")
                client.sock.shutdown(how)
                if how == socket.SHUT_WR:
                    assert client.sock.recv(100) != b""
                    assert client.sock.recv(100) == b""


ATTACKS = (flood, talk_junk, send_files, never_read, half_close)


def is_served(path: Path) -> bool:
    """Whether a request on a pod's socket is answered, and not the connection refused since there are too many."""
    with suppress(OSError), Client(path) as client:
        return client.ask(b"/version")[0] != b""
    return False


def talk_rubbish(path: Path, rng: random.Random) -> None:
    """Talks to a gRPC server as no client does, and hangs up at any point."""
    hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # the preface, no settings
    streams = [b"\0\0\3\1\5" + struct.pack("!I", number) + b"\x82\x84\x86" for number in range(1, 2001, 2)]
    texts = [
        rng.randbytes(rng.randrange(1, 5000)),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        hello[:12],
        hello + hello[-9:] * 1000,
        hello + b"".join(streams),
        hello + b"\xff\xff\xff\1\4\0\0\0\1" + rng.randbytes(1 << 16),  # a giant header
        hello + streams[0] + b"\0\0\5\0\1\0\0\0\1" + b"\0\xff\xff\xff\xff",  # a giant message
        hello + rng.randbytes(3000),
    ]
    for text in texts * 2:
        with socket.socket(socket.AF_UNIX) as sock, suppress(OSError):
            sock.settimeout(0.2)
            sock.connect(os.fspath(path))
            sock.sendall(text if rng.random() < 0.5 else text[: rng.randrange(len(text) + 1)])
            if rng.random() < 0.5:
                sock.recv(1 << 16)


# -- Faults ------------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Step:
    """What a fault may use: its own chance, a free device and two pods, which nothing else happens to meanwhile."""

    rng: random.Random
    device: str
    pod: SoakPod
    other: SoakPod


class Faults:
    """The faults, each a method that returns when the fault is over. What has to be true then, Node.settle checks."""

    ALONE = ("pools_crash", "link_flaps", "restart_node")
    """While these happen, no pod starts or ends."""

    def __init__(self, node: Node) -> None:
        self._node, self._kubelet, self._daemon = node, node.kubelet, node.daemon
        self.slowest_handshake = 0.0

    @classmethod
    def names(cls, *, restarts: bool) -> list[str]:
        """Those that end the daemon, or all others."""
        public = [name for name in vars(cls) if name.islower() and name[0] != "_" and name != "names"]
        return [name for name in public if name.startswith("restart_") == restarts]

    # ---- kubelet

    async def kubelet_restarts(self, step: Step) -> None:
        """kubelet restarts, maybe twice, at once or after a while, maybe with its directory deleted and made again."""
        for _ in range(step.rng.choice((1, 2))):
            wipe = step.rng.random() < 0.3
            await self._kubelet.stop(wipe=wipe)
            if wipe:
                await in_thread(shutil.rmtree, self._kubelet.plugin_dir, True)
            await trio.sleep(step.rng.choice((0, 0, 0.3, 2)))
            await self._kubelet.start()
            self._node.expect_registers()
            await trio.sleep(step.rng.choice((0, 0.05, 0.3)))

    async def kubelet_refuses(self, step: Step) -> None:
        """kubelet restarts and does not take registrations for a while, or takes its time."""
        await self._kubelet.stop()
        mode = step.rng.choice(("unimplemented", "refuse", "error", "slow"))
        await self._kubelet.register_mode(mode, delay=step.rng.uniform(0.5, 2))
        await self._kubelet.start()
        self._node.expect_registers()
        await trio.sleep(step.rng.uniform(0.5, 3))
        await self._kubelet.register_mode()

    async def kubelet_drops_stream(self, step: Step) -> None:
        """The stream of the devices ends without a word, while the sockets stay."""
        name = step.rng.choice(list(self._node.pools))
        how = step.rng.choice(("cancel", "channel"))
        await self._kubelet.drop(f"afxdp/{name}", how, keep_channel=step.rng.random() < 0.7)
        self._node.expect_registers(name)

    async def kubelet_loses_socket(self, step: Step) -> None:
        """Somebody removes the socket of a pool."""
        name = step.rng.choice(list(self._node.pools))
        (self._kubelet.plugin_dir / f"afxdp-{name}.sock").unlink()
        self._node.expect_registers(name)

    async def kubelet_meets_rubbish(self, step: Step) -> None:
        """Somebody who is no gRPC client connects to the sockets for kubelet and the CNI."""
        for name in ("pool", "aux", "syncer"):
            await in_thread(talk_rubbish, self._kubelet.plugin_dir / f"afxdp-{name}.sock", step.rng)
            await self._kubelet.options("afxdp/pool")
        await self._kubelet.churn("afxdp/aux", 5)

    async def pod_resources_fail(self, step: Step) -> None:
        """PodResources fails, refuses, has no pods, or does not answer, for a while."""
        mode = step.rng.choice(("unavailable", "exhausted", "empty", "hang", "slow"))
        await self._kubelet.podresources(mode, delay=1)
        await trio.sleep(step.rng.uniform(1, 4))
        await self._kubelet.podresources()

    # ---- the daemon; what begins with restart_ ends it

    async def restart_term(self, step: Step) -> None:
        """The daemon ends as it is asked to, in time, and is started again."""
        status = await self._daemon.end(signal.SIGTERM)
        if status != 0 or self._daemon.slowest_end > EXIT_BOUND:
            self._node.report.violation(f"exit status {status}; the slowest end took {self._daemon.slowest_end:.2f} s")
        await trio.sleep(step.rng.choice((0, 0.5, 2)))
        self._node.start_daemon()

    async def restart_kill(self, step: Step) -> None:
        """The daemon is killed and started again; maybe it is killed once more while it begins."""
        await self._daemon.end(signal.SIGKILL)
        self._daemon.start()
        self._node.expect_registers(*self._node.pools)
        if step.rng.random() < 0.3:
            await trio.sleep(step.rng.uniform(0, 0.3))
            await self._daemon.end(signal.SIGKILL)
            self._daemon.start()
            self._node.forgive_registers()
            # kubelet may still be about to connect for the one that died: that is known when it watches twice.
            await trio.sleep(2 * afxdpd.ResourceServer.STREAM_GRACE)

    async def restart_upgrade(self, step: Step) -> None:
        """The next daemon is started before the old one has ended, and again where it was refused."""
        old = self._daemon.process
        self._daemon.start()
        await trio.sleep(step.rng.uniform(0, 0.5))
        await self._daemon.end(signal.SIGTERM, old)
        await trio.sleep(1.5)  # by now it has looked whether there is another
        if not self._daemon.is_alive:
            self._daemon.start()
        self._node.expect_registers(*self._node.pools)

    async def restart_node(self, _: Step) -> None:
        """The node restarts: processes, namespaces, pins and sockets are gone; kubelet knows its pods."""
        node = self._node
        for each in node.pods.values():
            await each.flow.stop()
        await self._daemon.end(signal.SIGKILL)
        await self._kubelet.stop(wipe=True)
        for each in node.pods.values():
            each.die()
            each.dissolve()
        for directory in (Path("/sys/fs/bpf/afxdpd"), node.directory / "uds"):
            await in_thread(shutil.rmtree, directory, True)
        gone = [device for device, each in node.pods.items() if not each.is_on_host]
        await until(lambda: not any(sysfs(f"{device}p", "ifindex") for device in gone), "the end of the pods' devices")
        for device in set(node.devices) - set(gone):
            await in_thread(delete_link, device)
        await in_thread(make_veth, *node.devices)
        await self._kubelet.start()
        self._daemon.start()
        node.expect_registers()
        pins = Path("/sys/fs/bpf/afxdpd")
        await until(lambda: {path.name for path in pins.glob("*/*")} == set(node.pods), "the pins of all pods' devices")
        for each in node.pods.values():
            await in_thread(each.enter)
            await node.start_container(each)

    async def pools_crash(self, _: Step) -> None:
        """The pools fail by a bug, all at once."""
        bug = "which is a bug; it begins again"
        await self._daemon.says(bug, signal.SIGUSR2, times=len(self._node.pools))
        self._node.expect_registers(*self._node.pools)
        await until(lambda: "registered with kubelet" in self._daemon.news(), "the next registration")

    async def second_daemon(self, _: Step) -> None:
        """A second daemon is started by mistake, and refused."""
        with trio.fail_after(BOUND):
            done = await trio.run_process(self._daemon.command, capture_stdout=True, capture_stderr=True, check=False)
        if done.returncode != 4 or b"another afxdpd serves this directory" not in done.stderr:
            self._node.report.violation(f"the second daemon ends with {done.returncode}: {done.stderr!r}")

    async def daemon_freezes(self, step: Step) -> None:
        """The daemon gets no time for a while, and more happens than netlink keeps for it."""
        self._daemon.send(signal.SIGSTOP)
        try:
            await in_thread(ip, *[f"link set {step.device} {state}" for _ in range(300) for state in ("down", "up")])
            await in_thread(delete_link, step.device)
            await in_thread(make_veth, step.device)
            await trio.sleep(step.rng.uniform(0, 2))
        finally:
            self._daemon.send(signal.SIGCONT)

    async def reload(self, step: Step) -> None:
        """SIGHUP with the same file, with one that is broken, with one that lacks a device, then with the first."""
        node, read = self._node, "the configuration was read again"
        await self._daemon.says(read, signal.SIGHUP)
        (node.directory / "config.json").write_text("{")
        await self._daemon.says("the configuration stays as it was", signal.SIGHUP)
        node.write_config(step.device, uds_timeout=60)
        await self._daemon.says(read, signal.SIGHUP)
        await self._until_not_listed(step.device)
        node.write_config()
        await self._daemon.says(read, signal.SIGHUP)

    async def reload_without_pool(self, step: Step) -> None:
        """SIGHUP with a file that lacks a pool, whose pods keep what they have, then with the first."""
        self._node.write_config("aux")
        await self._daemon.says("afxdp/aux: is not configured any more", signal.SIGHUP)
        await trio.sleep(step.rng.uniform(0.5, 2))
        self._node.write_config()
        await self._daemon.says("the configuration was read again", signal.SIGHUP)
        self._node.expect_registers("aux")

    # ---- devices

    async def unplug(self, step: Step) -> None:
        """A free device is unplugged, and plugged again."""
        await in_thread(delete_link, step.device)
        await trio.sleep(step.rng.choice((0, 0.2, 1)))
        await in_thread(make_veth, step.device)

    async def unplug_from_pod(self, step: Step) -> None:
        """A pod's device is unplugged and plugged again; the daemon attaches to it, and the pod gets it back."""
        victim = step.pod
        await victim.flow.stop()
        await in_thread(delete_link, f"{victim.device}p")
        victim.die()
        await trio.sleep(step.rng.choice((0, 0.2, 1)))
        await in_thread(make_veth, victim.device)
        programs, devices = partial(bpf_objects, self._daemon.name), afxdpd.Network().devices
        await until(
            lambda: devices()[victim.device].xdp_prog_id in programs()["programs"], f"a program on {victim.device}"
        )
        victim.dissolve()
        await in_thread(victim.enter)
        await self._node.start_container(victim)

    async def rename(self, step: Step) -> None:
        """A free device is renamed, and gets its name back."""
        await in_thread(ip, f"link set {step.device} down", f"link set {step.device} name odd", "link set odd up")
        await self._until_not_listed(step.device)
        await in_thread(ip, "link set odd down", f"link set odd name {step.device}", f"link set {step.device} up")

    async def link_flaps(self, step: Step) -> None:
        """The link of a free device flaps, and kubelet and the log stay quiet; then that of a pod's, at each end."""
        messages, size = await self._messages(), self._daemon.log.stat().st_size
        await in_thread(flap, step.device, None)
        messages, lines = await self._messages() - messages, self._daemon.logged_since(size).count(b"\n")
        if messages > 4 or lines > 20:
            self._node.report.violation(f"{messages} messages and {lines} lines for 50 flaps of {step.device}")
        await step.pod.flow.stop()
        await in_thread(flap, step.pod.inside, step.pod.netns)
        await in_thread(flap, f"{step.pod.device}p", None)
        await step.pod.flow.start()

    async def mtu_changes(self, step: Step) -> None:
        """The MTU of a free device and of a pod's is changed; that costs no packet."""
        for mtu in (1400, 1500):
            await in_thread(ip, f"link set {step.device} mtu {mtu}")
            await in_thread(partial(ip, f"link set {step.pod.inside} mtu {mtu}", netns=step.pod.netns))

    async def default_route(self, step: Step) -> None:
        """A default route leads through a free device for a while, which is nobody's then."""
        await in_thread(ip, f"address add 192.0.2.1/24 dev {step.device}", "route add default via 192.0.2.2")
        await self._until_not_listed(step.device)
        await in_thread(ip, "route del default", f"address del 192.0.2.1/24 dev {step.device}")

    async def _messages(self) -> int:
        return sum(int(view["messages"]) for view in (await self._kubelet.state())["resources"].values())

    async def _until_not_listed(self, device: str) -> None:
        with trio.fail_after(BOUND):
            while device in (await self._kubelet.state(f"afxdp/{self._node.pool_of(device)}"))["devices"]:  # noqa: ASYNC110
                await trio.sleep(0.05)

    # ---- pods

    async def container_restarts(self, step: Step) -> None:
        """The container of a pod dies and is started again, maybe often."""
        for _ in range(step.rng.choice((1, 3))):
            await self._node.restart_container(step.pod)

    async def pod_is_hostile(self, step: Step) -> None:
        """A pod misuses its own socket in every way; another one is served as ever."""
        path, other = self._node.socket(step.pod), step.other
        over = trio.Event()

        async def watch_other() -> None:
            while not over.is_set():
                begun = time.monotonic()
                await in_thread(get_map_id, self._node.socket(other), other.hostname, other.device)
                self.slowest_handshake = max(self.slowest_handshake, time.monotonic() - begun)
                with trio.move_on_after(0.2):
                    await over.wait()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch_other)
            for attack in step.rng.sample(ATTACKS, len(ATTACKS)):
                await in_thread(attack, path, step.rng)
                await until(partial(is_served, path), f"an answer on {path}")
            over.set()
        if self.slowest_handshake > SOON:
            self._node.report.violation(f"{other}: a handshake took {self.slowest_handshake:.2f} s")

    async def pod_is_curious(self, step: Step) -> None:
        """A pod calls itself by another name, and asks for the map of another pod."""

        def ask() -> None:
            with Client(self._node.socket(step.pod)) as client:
                assert client.ask(b"/connect, nobody") == (b"/host_nak", [])
                assert client.ask(f"/connect, {step.pod.hostname}".encode()) == (b"/host_ok", [])
                assert client.ask(f"/xsk_map_fd, {step.other.device}".encode()) == (b"/fd_nak", [])

        await in_thread(ask)


# -- The run -----------------------------------------------------------------------------------------------------------


class Soak:
    """The run: step after step until the time is over, or too much is wrong."""

    ENDS = ("cni", "cni", "quietly", "vanish")

    def __init__(self, node: Node, report: Report, options: argparse.Namespace) -> None:
        self._node, self._report, self._options = node, report, options
        self._faults = Faults(node)
        self._rng = random.Random(options.seed)
        self._step_number = 0
        self._deck: list[str] = []
        self._kinds: Counter[str] = Counter()
        self._pods: list[SoakPod] = []
        self._first: dict[str, int] = {}
        self._last: dict[str, int] = {}
        self._rss: list[tuple[float, int]] = []  # ages of the last daemon from a minute on, and its memory then

    @property
    def _may_restart(self) -> bool:
        return self._step_number < int(RESTART_STEPS * self._options.minutes)

    async def run(self) -> None:
        """Runs it."""
        node = self._node
        await in_thread(make_veth, *node.devices)
        node.start_daemon()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send_packets)
                self._first = await node.check_idle()
                while self._report.elapsed() < 60 * self._options.minutes and self._report.violations < GIVE_UP:
                    self._step_number += 1
                    await (self._step() if self._step_number % IDLE_EVERY else self._idle("fds", "tasks"))
                await self._idle("fds", "tasks", "threads")
                nursery.cancel_scope.cancel()
        finally:
            for each in node.pods.values():
                each.die()
            with trio.CancelScope(shield=True):
                await node.daemon.end(signal.SIGKILL)

    async def _send_packets(self) -> None:
        while True:
            for each in list(self._node.pods.values()):
                each.flow.tick()
            await trio.sleep(TICK)

    async def _step(self) -> None:
        node, rng = self._node, self._rng
        if not self._deck:
            restarts, others = Faults.names(restarts=True), Faults.names(restarts=False)
            self._deck = [*restarts, *rng.sample(others, len(restarts))] if self._may_restart else others
            rng.shuffle(self._deck)
        if not self._may_restart:
            self._deck = [name for name in self._deck if not name.startswith("restart_")] or ["unplug"]
        name = self._deck.pop()
        self._kinds[name] += 1
        few = max(2, self._options.pods * 2 // 3)
        before = [self._new_pod(device) for device in rng.sample(node.free, max(0, few - len(node.pods)))]
        chosen = [node.pods[device] for device in rng.sample(sorted(node.pods), 2)]
        step = Step(rng=random.Random(rng.random()), device=rng.choice(node.free), pod=chosen[0], other=chosen[1])
        ends: list[tuple[SoakPod, str]] = []
        starts: list[SoakPod] = []
        if name not in Faults.ALONE:
            rest = [each for each in node.pods.values() if each not in (*chosen, *before)]
            ends = [(each, rng.choice(self.ENDS)) for each in rng.sample(rest, min(len(rest), rng.randrange(4)))]
            free = [device for device in node.free if device != step.device]
            count = min(len(free), self._options.pods - len(node.pods), rng.randrange(1, 6))
            starts = [self._new_pod(device) for device in rng.sample(free, max(count, 0))]
        texts = [f"{each} ends ({how})" for each, how in ends]
        texts += [f"{each} starts on {each.device}" for each in (*before, *starts)]
        about = f"{step.device}; {step.pod} on {step.pod.device}; {step.other} on {step.other.device}"
        self._report.say(f"step {self._step_number}: {name} ({about}); {', '.join(texts)}")
        await self._all_of(*[(f"start of {each}", partial(node.start_pod, each)) for each in before])
        await self._all_of(
            (name, partial(getattr(self._faults, name), step)),
            *[(f"end of {each}", partial(node.end_pod, each, how)) for each, how in ends],
            *[(f"start of {each}", partial(node.start_pod, each)) for each in starts],
        )
        await node.settle()
        self._note_memory()

    async def _idle(self, *kept: str) -> None:
        """All pods end, then nothing may be left of them."""
        node, rng = self._node, self._rng
        self._report.say(f"step {self._step_number}: all {len(node.pods)} pods end")
        ends = [(each, rng.choice(self.ENDS)) for each in node.pods.values()]
        await self._all_of(*[(f"end of {each}", partial(node.end_pod, each, how)) for each, how in ends])
        self._last = await node.check_idle(**{key: self._first[key] for key in kept})
        self._note_memory()
        self._report.say(f"idle: {self._last}; RSS {node.daemon.status('VmRSS')} KiB")

    def _new_pod(self, device: str) -> SoakPod:
        new = SoakPod(len(self._pods) + 1, device, self._node.pool_of(device), self._rng, self._report)
        self._pods.append(new)
        self._node.pods[device] = new
        return new

    async def _all_of(self, *actions: tuple[str, Callable[[], Awaitable[None]]]) -> None:
        """Does things at once; what goes wrong with one of them is a violation."""

        async def do(what: str, action: Callable[[], Awaitable[None]]) -> None:
            try:
                with trio.fail_after(3 * POD_BOUND):
                    await action()
            except Exception:  # noqa: BLE001  nothing may go wrong
                self._report.violation(f"{what}: {traceback.format_exc()}")

        async with trio.open_nursery() as nursery:
            for what, action in actions:
                nursery.start_soon(do, what, action)

    def _note_memory(self) -> None:
        age = time.monotonic() - self._node.daemon.born
        if self._node.daemon.is_alive and not self._may_restart and age >= 60:
            self._rss.append((age, self._node.daemon.status("VmRSS")))

    def summary(self) -> None:
        """Prints what was done and seen, when all processes have ended."""
        say, daemon = self._report.say, self._node.daemon
        say("steps: " + ", ".join(f"{name} {count}" for name, count in sorted(self._kinds.items())))
        sent, received = (sum(getattr(each.flow, key) for each in self._pods) for key in ("sent", "received"))
        say(
            f"packets: {sent} sent, {received} received; pods: {len(self._pods)}, {self._node.retries} attempts in vain"
        )
        say(f"daemons: {daemon.starts}; slowest end after SIGTERM {daemon.slowest_end:.2f} s")
        say(f"slowest handshake beside a hostile pod: {self._faults.slowest_handshake:.3f} s")
        say(f"idle, at the beginning: {self._first}; at the end: {self._last}")
        age = self._rss[-1][0] if self._rss else 0
        if age < 180:
            say("memory: not judged, the last daemon has lived for less than three minutes")
        say(f"RSS of the last daemon, {age:.0f} s old: {[rss for _, rss in self._rss[:1] + self._rss[-1:]]} KiB")
        if age >= 180:
            first = statistics.median(rss for when, rss in self._rss if when < 120)
            last = statistics.median(rss for when, rss in self._rss if when > age - 60)
            say(f"medians after its first minute and in the last: {first:.0f}, {last:.0f} KiB: {last / first - 1:+.1%}")
            if last > first * (1 + RSS_GROWTH):
                self._report.violation(f"the daemon has grown by more than {RSS_GROWTH:.0%}")
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        cpu = sum(usage.ru_utime + usage.ru_stime for usage in usages)
        say(f"processor time: {cpu:.0f} s, {cpu / self._report.elapsed():.0%}; violations: {self._report.violations}")


async def soak(options: argparse.Namespace) -> int:
    """Runs it all; returns the exit status."""
    directory = Path("/run/soak")  # in a file system of this process alone, so nothing is left of it
    directory.mkdir()
    daemon = Daemon(directory)
    report = Report(daemon.log)
    report.say(f"seed {options.seed}, {options.minutes:g} minutes, {options.pods} pods, {RATE} packets/s for each")
    report.say(f"the daemon has other constants than in production: {CONSTANTS}")
    report.say("and PodResources.IDLE 1.0, delays of Backoff at most 10.0")
    async with running_kubelet(directory / "kubelet") as kubelet:
        run = Soak(Node(directory, kubelet, daemon, options.pods, report), report, options)
        with trio.move_on_after(60 * options.minutes + 300) as scope:
            await run.run()
        if scope.cancelled_caught:
            report.violation("the run did not end in time")
    run.summary()
    return 1 if report.violations else 0


def _positive(kind: Callable[[str], T]) -> Callable[[str], T]:
    def parse(text: str) -> T:
        value = kind(text)
        if not 0 < float(text) < 1e6:
            raise argparse.ArgumentTypeError(f"not a positive number: {text}")
        return value

    return parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0 all was well, 1 it was not, 2 it could not begin."""
    parser = argparse.ArgumentParser(description="Pods, traffic and faults at random: nothing may be lost.")
    parser.add_argument("--minutes", type=_positive(float), default=2, help="how long (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 16), help="default: random")
    parser.add_argument(
        "--pods", type=_positive(int), default=20, help="at most so many at once (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    try:
        conftest._isolate()
    except OSError as exc:
        print(f"{exc.filename}: {exc.strerror}: it has to run as root", file=sys.stderr)
        return 2
    faulthandler.dump_traceback_later(60 * options.minutes + 360, exit=True)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        return trio.run(soak, options)
    except* KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
