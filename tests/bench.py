#!/usr/bin/env python3
"""How fast and how small a device plugin is, on the real kernel. A script; it runs as root, and needs grpcio.

    python tests/bench.py                                  everything, about ten minutes
    python tests/bench.py --list                           what that is
    python tests/bench.py --only start,allocate --bars     some of it; fails where a bar is missed
    python tests/bench.py --scale 1,10,100                 how it grows
    python tests/bench.py --plugin '/opt/afxdp-dp -config {config}'      another plugin

It moves into network, mount and process namespaces of its own, makes veth pairs there, starts a stand-in for kubelet in
a process of its own (tests/bench_kubelet.py, on grpcio) and the plugin, as on a new machine for each round. It prints a
table in Markdown, and with --json writes the same for programs. Whatever ends it, nothing is left.

Another plugin. Words in braces in its command line stand for paths:

    {config}        the configuration: JSON, a pool "bench" in mode "primary" with devices by name, as for the AF_XDP
                    plugins; one of the devices, "spare", comes only later
    {kubelet_dir}   kubelet's directory, with device-plugins/kubelet.sock and pod-resources/kubelet.sock
    {uds_dir}       an empty directory, for sockets; it is /var/run/afxdp_dp
    {bpffs}         a BPF file system without anything in it; it is /sys/fs/bpf
    {log_dir}       an empty directory
    {resource}      the resource that it has to register, see --resource

The same directories are where a plugin looks that cannot be told: /var/lib/kubelet, /tmp/afxdp_dp and
/var/log/afxdp-k8s-plugins, without anything of that in the machine's. The process that is started has to be, or become,
the plugin. The mounts in its answer to Allocate say where its sockets are. What it lacks is named below the table.

What is not announced. A plugin does not say when it is done with what it does after a call, or ahead of the next. So
between two measurements its processor time is looked at every 10 ms, until it has used less than 0.3 ms in three looks,
ten seconds at most. Between the moment at which kubelet lists a pod and its first handshake is half a second, in which
in life a sandbox and a container are made.

Exit codes: 0 measured, 1 a bar is missed (with --bars), 2 something could not be measured, or a wrong option.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

try:
    from bench_node import (
        SCRATCH,
        SPARE,
        Handshake,
        LacksError,
        LinkEvents,
        MeasureError,
        Node,
        Plugin,
        answering,
        enter,
        handshakes,
        isolate,
    )
    from bench_report import LINEAR, Bar, Figure, ratios, table
except ImportError as exc:
    sys.exit(f"bench.py: there is no {exc.name}: it needs what the tests need, as .venv-test has after sh tests/run.sh")


INSIDE = "AFXDPD_BENCH_INSIDE"
"""Is set in the environment of the process that is in the namespaces."""
DEFAULT_PLUGIN = (
    "{python} -P -c 'import sys, afxdpd; sys.exit(afxdpd.main())' --config {config} --kubelet-dir {kubelet_dir}"
)
POD_START = 0.5
"""Seconds from a pod's admission to its application's first word: less than a container ever takes."""
OTHER_PODS, CROWD = 200, 50
RELEASE_BOUND, CHANGE_BOUND = 150.0, 60.0
"""Seconds until a device has to be free, and until kubelet has to know of a change."""
PODS = 8
"""That have a device in handshakes without a crowd, however many devices the pool has."""
GROWTH = {
    **dict.fromkeys(("allocate", "allocate-raw", "handshake-first", "handshake"), 1.5),
    **dict.fromkeys(("allocate-many", "burst"), LINEAR),
}
"""Bars for the median of the largest size against that of the least."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says, as far as measurements need it."""

    node: Node
    own: bool  # whether the plugin is afxdpd
    command: Sequence[str]
    environment: dict[str, str]
    samples: int | None
    idle_seconds: float

    def count(self, default: int) -> int:
        """How many samples."""
        return self.samples or default


Measure = Callable[[Options, int], Iterator[Figure]]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What --only names.

    Attributes:
        what: For people.
        sizes: With which sizes it is made; --scale multiplies the first.
        most: No size is more: what limits and patience allow.
        own: Whether it is of afxdpd alone.
    """

    name: str
    what: str
    sizes: tuple[int, ...]
    most: int
    measure: Measure
    own: bool = False


MEASUREMENTS: dict[str, Measurement] = {}


def measurement(
    name: str, what: str, *, sizes: tuple[int, ...] = (1,), most: int = 1, own: bool = False
) -> Callable[[Measure], Measure]:
    """Makes a function a measurement; it yields its figures."""

    def add(measure: Measure) -> Measure:
        MEASUREMENTS[name] = Measurement(name=name, what=what, sizes=sizes, most=most, measure=measure, own=own)
        return measure

    return add


def milliseconds(seconds: Sequence[float]) -> list[float]:
    """Seconds as milliseconds."""
    return [1000 * each for each in seconds]


def names(count: int, first: int = 0) -> list[str]:
    """The names of devices."""
    return [f"bench{number}" for number in range(first, first + count)]


def handshake_figures(
    done: Sequence[Handshake], name: str, what: str, whole: Sequence[Bar], connect: Sequence[Bar], **size: Any
) -> Iterator[Figure]:
    """Both figures of handshakes."""
    samples = milliseconds([each.whole for each in done])
    yield Figure(name=name, what=f"handshake, {what}", unit="ms", samples=samples, bars=whole, **size)
    samples = milliseconds([each.connect for each in done])
    yield Figure(name=f"{name}-connect", what=f"/connect, {what}", unit="ms", samples=samples, bars=connect, **size)


# -- Start -------------------------------------------------------------------------------------------------------------


@measurement("floor", "an empty call, for the client's own part of the others")
def measure_floor(options: Options, _: int) -> Iterator[Figure]:
    """What all calls of the same client take at least."""
    node, rested = options.node, []
    with node.plugin(1) as plugin:
        seconds = node.kubelet("options", resource=node.resource, count=options.count(1000) + 50)["seconds"][50:]
        for _ in range(options.count(100)):
            plugin.settle()
            rested += node.kubelet("options", resource=node.resource, count=1)["seconds"]
        what = "floor: GetDevicePluginOptions"
        yield Figure(name="floor", what=what, unit="ms", samples=milliseconds(seconds))
        what = "floor: the same after a rest"
        yield Figure(name="floor-rested", what=what, unit="ms", samples=milliseconds(rested))
    with answering(SCRATCH / "floor.sock"):
        pods = [(str(SCRATCH / "floor.sock"), "pod", "device")] * CROWD
        for at_once, what in ((1, "alone"), (CROWD, f"{CROWD} at once")):
            done = [each for _ in range(-(-options.count(1000) // CROWD)) for each in handshakes(pods, at_once=at_once)]
            name = f"floor-handshake-{at_once}"
            yield from handshake_figures(done, name, f"floor, {what}", (), ())


def starts(options: Options, devices: int, links: int, count: int) -> tuple[list[float], list[float]]:
    """How long it takes until Register, and until kubelet has got all devices as Healthy, in milliseconds."""
    registered, healthy = [], []
    for _ in range(options.count(count)):
        with options.node.plugin(devices, links=links) as plugin:
            registered.append(plugin.registered - plugin.started)
            healthy.append(plugin.healthy - plugin.started)
    return milliseconds(registered), milliseconds(healthy)


@measurement(
    "start", "from the start of the process to Register, and to all devices Healthy", sizes=(8, 800), most=1000
)
def measure_start(options: Options, devices: int) -> Iterator[Figure]:
    """Also with 64 devices on a host with 130 links."""
    first = devices == 8
    registered, healthy = starts(options, devices, 0, 20 if devices <= 100 else 3)
    size: dict[str, Any] = {"unit": "ms", "size": devices, "size_of": "devices"}
    bars = (Bar("median", 350),) if first else ()
    yield Figure(name="start", what="start to Register", samples=registered, bars=bars, **size)
    yield Figure(name="start-healthy", what="start to all devices Healthy", samples=healthy, **size)
    if first:
        many, all_healthy = starts(options, 64, 130, 20)
        bars = (Bar("median", 400),)
        yield Figure(
            name="start-64", what="start to Register, 64 devices, 130 links", unit="ms", samples=many, bars=bars
        )
        yield Figure(
            name="start-64-healthy",
            what="start to all devices Healthy, 64 devices, 130 links",
            unit="ms",
            samples=all_healthy,
        )
        ratio = sorted(many)[len(many) // 2] / sorted(registered)[len(registered) // 2]
        what = "start to Register: 64 devices, 130 links against 8 devices"
        yield Figure(name="start-64-ratio", what=what, unit="times", samples=[ratio], bars=(Bar("median", 1.2),))


@measurement("import", "import of the module, by a Python that has just started", own=True)
def measure_import(options: Options, _: int) -> Iterator[Figure]:
    """The interpreter's own start is another figure."""
    program = "import time; begun = time.perf_counter(); import afxdpd; print(time.perf_counter() - begun)"
    seconds, bare = [], []
    for _ in range(options.count(20)):
        command = [sys.executable, "-P", "-c"]
        seconds.append(float(subprocess.check_output([*command, program], env=options.environment)))
        begun = time.perf_counter()
        subprocess.check_call([*command, "pass"], env=options.environment)
        bare.append(time.perf_counter() - begun)
    yield Figure(name="import", what="import afxdpd", unit="ms", samples=milliseconds(seconds))
    yield Figure(name="python", what="a Python that does nothing", unit="ms", samples=milliseconds(bare))


@measurement("install", "what is installed: the wheel's files, and with its dependencies; else the program's file")
def measure_install(options: Options, _: int) -> Iterator[Figure]:
    """Compiled modules (.pyc) are not counted."""
    if not options.own:
        program = shutil.which(options.command[0])
        if program is None:
            raise MeasureError(f"{options.command[0]}: not found")
        yield Figure(name="install", what="its program", unit="MB", samples=[Path(program).stat().st_size / 1e6])
        return
    wanted, found = ["afxdpd"], dict[str, float]()
    while wanted:
        name = wanted.pop()
        distribution = importlib.metadata.distribution(name)
        files = [Path(str(distribution.locate_file(file))) for file in distribution.files or ()]
        found[name] = sum(file.stat().st_size for file in files if file.suffix != ".pyc" and file.is_file()) / 1e6
        for requirement in distribution.requires or ():
            needed = re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")
            if "extra ==" not in requirement and needed not in found and needed not in wanted:
                with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # of another platform
                    importlib.metadata.distribution(needed)
                    wanted.append(needed)
    yield Figure(name="install", what="installed: afxdpd", unit="MB", samples=[found["afxdpd"]])
    what = f"installed: afxdpd and the {len(found) - 1} packages that it needs"
    yield Figure(name="install-all", what=what, unit="MB", samples=[sum(found.values())])


# -- Allocate ----------------------------------------------------------------------------------------------------------


def allocate_all(
    options: Options, devices: int, each: int, count: int, *, raw: bool = False, rested: bool = False
) -> tuple[list[float], list[float]]:
    """How long the first Allocate of a plugin takes, and later ones, of free devices that it has had time to prepare.

    The later ones come one after another, as when a node comes up: then client and plugin are awake.

    Args:
        options: The node.
        devices: Of the pool.
        each: How many devices a request is for.
        count: How many later ones; in several rounds, where the pool has less devices.
        raw: Whether the pool is one with udsServerDisable.
        rested: Whether both rest before each of the later ones, too.
    """
    firsts: list[float] = []
    later: list[float] = []
    while len(later) < count:
        with options.node.plugin(devices, raw=raw, both_ends=devices > 1000) as plugin:
            firsts += options.node.allocate(names(1))["seconds"]
            free = (devices if devices <= 1000 else devices // 2) - 1
            requests = [names(each, 1 + n * each) for n in range(min(free // each, count - len(later)))]
            for batch in [[request] for request in requests] if rested else [requests]:
                plugin.settle()
                later += options.node.allocate(*batch)["seconds"]
    return milliseconds(firsts), milliseconds(later)


@measurement("allocate", "Allocate of one free device, attach included", sizes=(10, 1000), most=9000)
def measure_allocate(options: Options, devices: int) -> Iterator[Figure]:
    """Each device is allocated once: in a small pool in several rounds."""
    firsts, later = allocate_all(options, devices, 1, options.count(99))
    size: dict[str, Any] = {"unit": "ms", "size": devices, "size_of": "devices in the pool"}
    bars = (Bar("median", 2), Bar("p99", 5))
    yield Figure(name="allocate-first", what="the first Allocate of a plugin, one device", samples=firsts, **size)
    yield Figure(name="allocate", what="Allocate of one device", samples=later, bars=bars, **size)


@measurement("allocate-rested", "Allocate of one free device, each after a rest", sizes=(10,), most=9000)
def measure_allocate_rested(options: Options, devices: int) -> Iterator[Figure]:
    """What a single pod waits: the client has to wake up, too, which is floor-rested."""
    _, later = allocate_all(options, devices, 1, options.count(99), rested=True)
    size: dict[str, Any] = {"unit": "ms", "size": devices, "size_of": "devices in the pool"}
    yield Figure(name="allocate-rested", what="Allocate of one device after a rest", samples=later, **size)


@measurement("allocate-many", "Allocate of several free devices in one request", sizes=(8, 64), most=64)
def measure_allocate_many(options: Options, each: int) -> Iterator[Figure]:
    """Its size is that of the request."""
    _, later = allocate_all(options, 10 * each + 1, each, options.count(30))
    size: dict[str, Any] = {"unit": "ms", "size": each, "size_of": "devices in the request"}
    yield Figure(name="allocate-many", what="Allocate of several devices at once", samples=later, **size)


@measurement("allocate-raw", "Allocate with udsServerDisable", sizes=(10, 10_000), most=10_000)
def measure_allocate_raw(options: Options, devices: int) -> Iterator[Figure]:
    """A pool without programs, so that nothing is limited by descriptors."""
    _, later = allocate_all(options, devices, 1, options.count(99), raw=True)
    size: dict[str, Any] = {"unit": "ms", "size": devices, "size_of": "devices in the pool"}
    bars = (Bar("median", 1.2),)
    yield Figure(name="allocate-raw", what="Allocate with udsServerDisable", samples=later, bars=bars, **size)


@measurement("allocate-again", "Allocate of a device that another pod had until now", sizes=(8,), most=800)
def measure_allocate_again(options: Options, devices: int) -> Iterator[Figure]:
    """Nothing could be prepared: the former pod may hold the map."""
    node, samples = options.node, []
    with node.plugin(devices) as plugin:
        sockets = node.allocate(*[[name] for name in names(devices)])["sockets"]
        for number in range(options.count(100)):
            device = f"bench{number % devices}"
            if sockets:
                node.kubelet("pods", resource=node.resource, pods={f"pod-{device}": [device]})
                plugin.settle()
                handshakes([(sockets[device], f"pod-{device}", device)])
            plugin.settle()
            answer = node.allocate([device])
            samples += answer["seconds"]
            sockets.update(answer["sockets"])
    size: dict[str, Any] = {"unit": "ms", "size": devices, "size_of": "devices in the pool"}
    yield Figure(
        name="allocate-again", what="Allocate of a device that a pod had", samples=milliseconds(samples), **size
    )


@measurement("burst", "Allocates one after another, each of a free device", sizes=(50, 500), most=1000)
def measure_burst(options: Options, devices: int) -> Iterator[Figure]:
    """As kubelet does when a node comes up."""
    totals = []
    for _ in range(options.count(5 if devices <= 100 else 2)):
        with options.node.plugin(devices):
            totals.append(options.node.allocate(*[[name] for name in names(devices)])["total"])
    size: dict[str, Any] = {"size": devices, "size_of": "Allocates"}
    bars = (Bar("median", 0.1),) if devices == 50 else ()
    yield Figure(name="burst", what="burst of Allocates", unit="s", samples=totals, bars=bars, **size)


# -- Handshake ---------------------------------------------------------------------------------------------------------


class Pods:
    """Pods on a node, each with a device; admitted all together."""

    def __init__(self, node: Node, devices: int, others: int) -> None:
        self._node = node
        self._devices = names(devices)
        self._others = others
        self._generation = 0
        self._sockets: dict[str, str] = {}

    def admit(self) -> None:
        """Others than before get the devices, and are listed; those before were so until the devices were free."""
        self._generation += 1
        self._node.kubelet("pods", resource=self._node.resource, pods={}, others=max(1, self._others))
        self._sockets = self._node.allocate(*[[name] for name in self._devices])["sockets"]
        if not self._sockets:
            raise LacksError("its answer to Allocate mounts no socket")
        pods = {self._name(device): [device] for device in self._devices}
        self._node.kubelet("pods", resource=self._node.resource, pods=pods, others=self._others)

    def handshakes(self, *, at_once: int = 1) -> list[Handshake]:
        """Each goes through one."""
        return handshakes(
            [(self._sockets[device], self._name(device), device) for device in self._devices], at_once=at_once
        )

    def _name(self, device: str) -> str:
        return f"pod-{device}-{self._generation}"


@measurement(
    "handshake", "the handshake, from connect(2) to the descriptor, and /connect of it", sizes=(10, 1000), most=9000
)
def measure_handshake(options: Options, devices: int) -> Iterator[Figure]:
    """The first of an allocation, and later ones."""
    count = options.count(1000)
    size: dict[str, Any] = {"size": devices, "size_of": "devices in the pool"}
    bars = (Bar("median", 1), Bar("p99", 3)), (Bar("median", 0.4), Bar("p99", 2))
    first: list[Handshake] = []
    later: list[Handshake] = []
    with options.node.plugin(devices, both_ends=devices > 1000) as plugin:
        pods = Pods(options.node, min(PODS, devices), 0)
        while len(first) < max(1, count // 10):
            pods.admit()
            time.sleep(POD_START)  # what happens meanwhile in life
            plugin.settle()
            first += pods.handshakes()
        yield from handshake_figures(first, "handshake-first", "the first of an allocation", *bars, **size)
        while len(later) < count:
            plugin.settle()
            later += pods.handshakes()
    yield from handshake_figures(later, "handshake", "alone", *bars, **size)


@measurement(
    "crowd", f"the same of {CROWD} pods at once, with other pods listed", sizes=(OTHER_PODS,), most=100 * OTHER_PODS
)
def measure_crowd(options: Options, others: int) -> Iterator[Figure]:
    """CNDP gives up on /connect after some ten milliseconds."""
    size: dict[str, Any] = {"size": others, "size_of": "other pods listed"}
    limit = (), (Bar("p99", 5),)
    first: list[Handshake] = []
    later: list[Handshake] = []
    with options.node.plugin(CROWD) as plugin:
        pods = Pods(options.node, CROWD, others)
        while len(first) < options.count(200):
            pods.admit()
            time.sleep(POD_START)  # what happens meanwhile in life
            plugin.settle()
            first += pods.handshakes(at_once=CROWD)
        yield from handshake_figures(first, "crowd-first", f"the first, {CROWD} at once", *limit, **size)
        while len(later) < options.count(1000):
            plugin.settle()
            later += pods.handshakes(at_once=CROWD)
    yield from handshake_figures(later, "crowd", f"{CROWD} at once", *limit, **size)


# -- Changes -----------------------------------------------------------------------------------------------------------


@measurement(
    "change",
    "from the kernel's word that a device came or went to kubelet's list",
    sizes=(10, 1000, 10_000),
    most=10_000,
)
def measure_change(options: Options, devices: int) -> Iterator[Figure]:
    """More than 1,000 devices are a pool with udsServerDisable: each other device takes two descriptors or more."""
    node = options.node
    came: list[float] = []
    went: list[float] = []
    raw = devices > 1000
    with node.plugin(devices, raw=raw, both_ends=raw) as plugin, LinkEvents() as events:
        for _ in range(options.count(50 if not raw else 5)):
            for there, seconds in ((True, came), (False, went)):
                command = f"ip link add {SPARE} type veth peer name {SPARE}p" if there else f"ip link del {SPARE}"
                since = time.monotonic()
                with subprocess.Popen(command.split()):  # the kernel speaks of it while that still runs
                    said = events.wait(SPARE, there=there)
                wanted = {"device": SPARE, "listed": there, "since": since, "timeout": CHANGE_BOUND}
                try:
                    seconds.append(node.kubelet("listed", resource=node.resource, **wanted)["at"] - said)
                except MeasureError as exc:
                    raise LacksError(str(exc)) from exc
                plugin.settle()
    size: dict[str, Any] = {"unit": "ms", "size": devices, "size_of": "devices"}
    bars = (Bar("median", 20), Bar("p99", 20)) if devices == 1000 else ()
    yield Figure(name="change-came", what="a new device reaches kubelet", samples=milliseconds(came), bars=bars, **size)
    yield Figure(
        name="change-went", what="a device's end reaches kubelet", samples=milliseconds(went), bars=bars, **size
    )


@measurement("release", "the CNI lets go of a device: DelNetDev to its answer", sizes=(8,), most=800)
def measure_release(options: Options, devices: int) -> Iterator[Figure]:
    """The device is free, unpinned and without a program then."""
    node, samples = options.node, []
    for _ in range(-(-options.count(40) // devices)):
        with node.plugin(devices) as plugin:
            if not (SCRATCH / "kubelet" / "device-plugins" / "afxdp-syncer.sock").exists():
                raise LacksError("it serves no afxdp-syncer.sock")
            pods = {f"pod-{name}": [name] for name in names(devices)}
            sockets = node.allocate(*pods.values())["sockets"]
            node.kubelet("pods", resource=node.resource, pods=pods, others=1)
            time.sleep(POD_START)  # what happens meanwhile in life
            for name in names(devices):
                del pods[f"pod-{name}"]
                node.kubelet("pods", resource=node.resource, pods=pods, others=1)
                plugin.settle()
                samples += node.kubelet("del_net_dev", names=[name])["seconds"]
                if name in sockets and os.path.exists(sockets[name]):
                    raise MeasureError(f"{name}: after DelNetDev its socket is still there")
    size: dict[str, Any] = {"unit": "ms", "size": devices, "size_of": "devices"}
    yield Figure(name="release", what="DelNetDev of an allocated device", samples=milliseconds(samples), **size)


@measurement("release-listed", "from kubelet's last word of a pod to its device free; two minutes", sizes=(8,), most=80)
def measure_release_listed(options: Options, devices: int) -> Iterator[Figure]:
    """Free is a device whose socket is gone; the pods are older than a minute, and others are still listed."""
    node = options.node
    with node.plugin(devices) as plugin:
        pods = {f"pod-{name}": [name] for name in names(devices)}
        sockets = node.allocate(*pods.values())["sockets"]
        if not sockets:
            raise LacksError("its answer to Allocate mounts no socket")
        node.kubelet("pods", resource=node.resource, pods=pods, others=1)
        plugin.settle()
        time.sleep(65)  # the pods' lives: nothing is released in the first minute, which is not to be measured here
        node.kubelet("pods", resource=node.resource, pods={}, others=1)
        begun = time.monotonic()
        samples: list[float] = []
        while sockets and time.monotonic() < begun + RELEASE_BOUND:
            time.sleep(0.05)  # how exact the figure is; no plugin tells when it has released a device
            gone = [name for name, path in sockets.items() if not os.path.exists(path)]
            samples += [time.monotonic() - begun for name in gone if sockets.pop(name)]
    if sockets:
        raise LacksError(f"{len(sockets)} of {devices} devices are not free after {RELEASE_BOUND:g} s")
    size: dict[str, Any] = {"unit": "s", "size": devices, "size_of": "devices"}
    yield Figure(name="release-listed", what="pod not listed any more to device free", samples=samples, **size)


# -- Memory, descriptors, processor time -------------------------------------------------------------------------------


@measurement("memory", "RSS and descriptors after the start, all devices prepared", sizes=(8, 1, 100, 1000), most=1000)
def measure_memory(options: Options, devices: int) -> Iterator[Figure]:
    """RSS is that of the process, with what it shares with others."""
    rss, fds = [], []
    for _ in range(options.count(3 if devices <= 100 else 1)):
        with options.node.plugin(devices) as plugin:
            rss.append(plugin.rss())
            fds.append(float(plugin.fds()))
    size: dict[str, Any] = {"size": devices, "size_of": "devices"}
    bars = (Bar("median", 42),) if devices == 8 else ()
    yield Figure(name="memory", what="RSS after the start", unit="MB", samples=rss, bars=bars, **size)
    yield Figure(name="fds", what="descriptors after the start", unit="fds", samples=fds, **size)


@measurement(
    "use", "what is left of allocations and handshakes in RSS and descriptors", sizes=(1000, 2000), most=20_000
)
def measure_use(options: Options, count: int) -> Iterator[Figure]:
    """On eight devices in turn; at the end the CNI lets go of all of them, if the plugin knows that call."""
    devices, node = PODS, options.node
    count = options.samples or count
    with node.plugin(devices) as plugin:
        rss, fds = plugin.rss(), plugin.fds()
        pods = Pods(node, devices, 0)
        for _ in range(-(-count // devices)):
            pods.admit()
            pods.handshakes()
        node.kubelet("pods", resource=node.resource, pods={}, others=1)
        with contextlib.suppress(MeasureError):
            node.kubelet("del_net_dev", names=names(devices))
        wanted = {"resource": node.resource, "count": devices, "timeout": 30}
        node.kubelet("healthy", **wanted)
        rest(plugin)
        size: dict[str, Any] = {"size": count, "size_of": "allocations"}
        bars = ((Bar("median", 0),), (Bar("median", 2),)) if count == 2000 else ((), ())
        grown = [float(plugin.fds() - fds)]
        yield Figure(name="use-fds", what="more descriptors after", unit="fds", samples=grown, bars=bars[0], **size)
        grown = [plugin.rss() - rss]
        yield Figure(name="use-memory", what="more RSS after", unit="MB", samples=grown, bars=bars[1], **size)


def rest(plugin: Plugin) -> None:
    """Waits, half a minute at most, until it has used less than a millisecond of processor time in three seconds.

    What was let go of is prepared again after some seconds, and kubelet is asked less and less often.
    """
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        before = plugin.cpu()
        time.sleep(3)  # the time over which it is looked whether it rests
        if plugin.cpu() - before < 0.001:
            return


@measurement("idle", "processor time and wake-ups while nothing happens", sizes=(8,), most=1000)
def measure_idle(options: Options, devices: int) -> Iterator[Figure]:
    """With free devices, and with all of them allocated."""
    node, seconds = options.node, options.idle_seconds
    size: dict[str, Any] = {"size": devices, "size_of": "devices"}

    def idle(plugin: Plugin, name: str, what: str) -> Iterator[Figure]:
        rest(plugin)
        cpu, switches, begun = plugin.cpu(), plugin.switches(), time.monotonic()
        time.sleep(seconds)  # the time over which idleness is measured
        passed = time.monotonic() - begun
        used = [100 * (plugin.cpu() - cpu) / passed]
        woken = [60 * (plugin.switches() - switches) / passed]
        bars = (Bar("median", 0.1),)
        yield Figure(name=name, what=f"processor time, {what}", unit="% of a core", samples=used, bars=bars, **size)
        yield Figure(name=f"{name}-wakeups", what=f"wake-ups, {what}", unit="a minute", samples=woken, **size)

    with node.plugin(devices) as plugin:
        yield from idle(plugin, "idle", "all devices free")
        pods = {f"pod-{name}": [name] for name in names(devices)}
        node.allocate(*pods.values())
        node.kubelet("pods", resource=node.resource, pods=pods, others=1)
        yield from idle(plugin, "idle-allocated", "all devices allocated")


# -- Command line ------------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """See argparse."""
        self.exit(2, f"bench: {message}\n")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""

    def positive(kind: Callable[[str], float]) -> Callable[[str], float]:
        def parse(text: str) -> float:
            with contextlib.suppress(ValueError):
                if (value := kind(text)) > 0:
                    return value
            raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")

        return parse

    def chosen(text: str) -> list[str]:
        unknown = [name for name in text.split(",") if name not in MEASUREMENTS]
        if unknown:
            raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r}; --list names what there is")
        return text.split(",")

    def writable(text: str) -> IO[str]:
        try:
            return open(text, "w", encoding="utf-8")
        except OSError as exc:
            raise argparse.ArgumentTypeError(f"{text}: {exc.strerror}") from exc

    def scales(text: str) -> list[int]:
        return [int(positive(int)(part)) for part in text.split(",")]

    parser = Parser(
        prog="bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--list", action="store_true", help="say what can be measured, and end")
    parser.add_argument("--only", type=chosen, metavar="NAME,…", help="measure these, after the floor (default: all)")
    parser.add_argument(
        "--plugin", metavar="CMD", help="the plugin's command line (default: the afxdpd of this Python)"
    )
    parser.add_argument(
        "--resource",
        default="afxdp/bench",
        metavar="NAME",
        help="the resource that it registers (default: %(default)s)",
    )
    parser.add_argument(
        "--scale", type=scales, metavar="N,…", help="of each first size, instead of the sizes of --list"
    )
    parser.add_argument("--repeat", type=positive(int), default=1, metavar="N", help="measure everything so often")
    parser.add_argument("--samples", type=positive(int), metavar="N", help="about so many of each (default: as needed)")
    parser.add_argument(
        "--idle-seconds",
        type=positive(float),
        default=60.0,
        metavar="N",
        help="how long to look (default: %(default)s)",
    )
    parser.add_argument("--json", type=writable, metavar="FILE", help="write the figures to a file")
    parser.add_argument("--bars", action="store_true", help="exit with 1 if a bar is missed")
    return parser.parse_args(arguments)


def machine() -> dict[str, Any]:
    """What it is measured on."""
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "processor": model[1] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e6),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def busy(seconds: float = 1.0) -> float:
    """Which part of the machine's processor time others use, while this process waits."""

    def ticks() -> tuple[int, int]:
        user, nice, system, idle, iowait, *others = map(
            int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        )
        return user + nice + system + sum(others), idle + iowait

    (used, free) = ticks()
    time.sleep(seconds)
    (used_later, free_later) = ticks()
    return (used_later - used) / max(1, used_later - used + free_later - free)


def outer_environment() -> dict[str, str]:
    """The environment that this program was started with."""
    return {key: value for key, value in os.environ.items() if key != INSIDE}


def python_environment(say: Callable[[str], None]) -> dict[str, str]:
    """The environment of a plugin in Python: compiled modules have to be there, as in every installation.

    Where the installed afxdpd has none that fits, all modules are compiled into a directory of the benchmark.
    """
    environment = outer_environment()
    spec = importlib.util.find_spec("afxdpd")
    if spec is None or spec.origin is None:
        raise MeasureError("afxdpd is not installed")
    source = os.stat(spec.origin)
    with (
        contextlib.suppress(OSError, struct.error),
        open(importlib.util.cache_from_source(spec.origin), "rb") as compiled,
    ):
        magic, flags, modified, size = struct.unpack("<4s3I", compiled.read(16))
        current = (int(source.st_mtime) & 0xFFFFFFFF, source.st_size & 0xFFFFFFFF) == (modified, size)
        if magic == importlib.util.MAGIC_NUMBER and (flags or current):  # flags: see PEP 552
            return environment
    say(f"{spec.origin} has no compiled module that fits: all are compiled for this run")
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPYCACHEPREFIX"] = str(SCRATCH / "pycache")
    subprocess.check_call([sys.executable, "-P", "-c", "import afxdpd"], env=environment)
    return environment


def measure(arguments: argparse.Namespace) -> int:
    """Measures and reports; returns the exit status."""

    def say(text: str) -> None:
        print(f"bench: {text}", file=sys.stderr, flush=True)

    for path in isolate(fixed_paths=arguments.plugin is not None):
        say(f"{path} cannot be made here: the plugin has to be told where to look")
    gc.freeze()
    gc.disable()  # this process is the pods
    own = arguments.plugin is None
    command = DEFAULT_PLUGIN.replace("{python}", sys.executable) if own else arguments.plugin
    environment = python_environment(say) if own else outer_environment()
    node = Node(command, environment, arguments.resource)
    load = busy()
    if load > 0.1:
        say(f"others use {load:.0%} of this machine")
    about = machine()
    figures: dict[tuple[str, int | None], Figure] = {}
    left_out: list[dict[str, Any]] = []

    def rows() -> list[Figure]:
        return [*figures.values(), *ratios(figures.values(), GROWTH)]

    def write(**more: Any) -> None:
        """Writes what there is so far: a run takes long, and may be ended."""
        if arguments.json is None:
            return
        report = {
            "machine": about,
            "plugin": "afxdpd" if own else arguments.plugin,
            "others_use": {"before": round(load, 3), **more},
            "figures": [figure.as_json() for figure in rows()],
            "left_out": left_out,
        }
        arguments.json.seek(0)
        arguments.json.truncate()
        json.dump(report, arguments.json, indent=2, ensure_ascii=False)
        arguments.json.write("\n")
        arguments.json.flush()

    try:
        options = Options(
            node=node,
            own=own,
            command=node.command,
            environment=environment,
            samples=arguments.samples,
            idle_seconds=arguments.idle_seconds,
        )
        for each, size in plan(arguments, own, left_out):
            say(f"{each.name}, size {size:,}" if each.most > 1 else each.name)
            try:
                for figure in each.measure(options, size):
                    known = figures.setdefault((figure.name, figure.size), figure)
                    if known is not figure:
                        known.samples += figure.samples
            except MeasureError as exc:
                if each.name == "floor":
                    raise
                say(f"{each.name}: {exc}")
                failed = own or not isinstance(exc, LacksError)
                left_out.append({"name": each.name, "size": size, "reason": str(exc), "failed": failed})
            write()
    finally:
        node.close()
    after = busy()
    write(after=round(after, 3))
    print(f"{'afxdpd' if own else arguments.plugin}; {about['processor']}, {about['cores']} cores,", end=" ")
    print(f"Linux {about['kernel']}, Python {about['python']},")
    print(f"of which others used {load:.0%} before and {after:.0%} after\n")
    print(table(rows()))
    for entry in left_out:
        print(f"left out: {entry['name']}, size {entry['size']}: {entry['reason']}")
    missed = sum(len(figure.missed()) for figure in rows())
    print(f"\nbars: {sum(len(figure.bars) for figure in rows()) - missed} met, {missed} missed")
    if any(entry["failed"] for entry in left_out):
        return 2
    return 1 if arguments.bars and missed else 0


def plan(arguments: argparse.Namespace, own: bool, left_out: list[dict[str, Any]]) -> Iterator[tuple[Measurement, int]]:
    """What is measured with which sizes, the least first; what cannot be is added to `left_out`."""
    for _ in range(arguments.repeat):
        for name, each in MEASUREMENTS.items():
            if name != "floor" and arguments.only is not None and name not in arguments.only:
                continue
            sizes = each.sizes
            if arguments.scale is not None:
                sizes = tuple(each.sizes[0] * factor for factor in arguments.scale) if each.most > 1 else each.sizes
            for size in sizes:
                if size > each.most or (each.own and not own):
                    reason = f"at most {each.most:,}" if size > each.most else "only of afxdpd"
                    left_out.append({"name": name, "size": size, "reason": reason, "failed": False})
                else:
                    yield each, size


def main() -> int:
    """Runs the command line; returns the exit status."""
    arguments = parse_arguments()
    if arguments.list:
        for each in MEASUREMENTS.values():
            sizes = "" if each.most == 1 else f" [{', '.join(f'{size:,}' for size in each.sizes)}]"
            print(f"{each.name:15} {each.what}{sizes}")
        return 0
    if os.geteuid() != 0:
        print("bench: it has to run as root", file=sys.stderr)
        return 2
    if INSIDE not in os.environ:
        return enter(INSIDE)
    signal.signal(signal.SIGINT, lambda *_: None)  # the process outside ends this one
    try:
        return measure(arguments)
    except MeasureError as exc:
        print(f"bench: {exc}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
