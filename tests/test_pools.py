"""The pools with fakes for the kernel and for kubelet: preparing, allocating, serving, releasing, restoring."""

from __future__ import annotations

import array
import dataclasses
import errno
import itertools
import logging
import os
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from conftest import open_fds
from fakes import FakeHost, FakeKubelet, FakeNetwork, FakePodResources, FakeXdp
from trio.testing import MockClock, wait_all_tasks_blocked

from afxdpd import (
    CLOSING_MAX,
    HEALTHY,
    RELEASE_AFTER,
    RELEASE_AFTER_EMPTY,
    RELEASE_GRACE,
    SESSIONS_MAX,
    UNHEALTHY,
    DeviceConfig,
    Fd,
    Manager,
    NetDevice,
    Notifier,
    Owner,
    Paths,
    PluginConfig,
    PodFiles,
    PodResources,
    PodView,
    PoolDeviceInfo,
    PoolManager,
    PoolRules,
    PoolScanner,
    RequestError,
    RpcError,
    UdsServer,
    choose_devices,
    serve,
)
from afxdpd_proto import deviceplugin_pb2 as api

RESOURCE = "afxdp/pool"
NAMES = ("veth0", "veth1", "veth2")
TIMEOUT = 10.0
"""Seconds for what takes milliseconds."""


def net(name: str, **changes: Any) -> NetDevice:
    """A device whose ifindex follows from its name."""
    return NetDevice(**{"name": name, "ifindex": 10 + int(name[4:]), "queues": 4, **changes})


def config_of(**pools: tuple[str, ...]) -> PluginConfig:
    """Pools of named devices."""
    return PluginConfig(
        pools=tuple(
            PoolRules(name=pool, mode="primary", devices=tuple(DeviceConfig(name=name) for name in names))
            for pool, names in pools.items()
        )
    )


async def eventually(condition: Callable[[], bool]) -> None:
    """Returns when something holds. Threads may have to do their part, so trio's clock is not asked and never jumps."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await trio.lowlevel.checkpoint()


# -- Choosing devices --------------------------------------------------------------------------------------------------


def choose(config: PluginConfig, *devices: NetDevice) -> tuple[dict[str, list[str]], dict[str, dict[str, str]]]:
    """What choose_devices says, with names for devices."""
    pools, passed = choose_devices(config, {device.name: device for device in devices}, FakeHost())
    return {pool.name: list(pool.devices) for pool in pools}, passed


def test_choose_takes_devices_when_they_are_named_and_there() -> None:
    """A pool takes the devices it names, in its order, each once, and no others."""
    config = config_of(pool=("veth2", "veth0", "veth2"))
    assert choose(config, net("veth0"), net("veth1"), net("veth2")) == ({"pool": ["veth2", "veth0"]}, {"pool": {}})


@pytest.mark.parametrize(
    ("device", "why"),
    [
        (net("veth0", default_route=True), "default route"),
        (net("veth0", master=3), "bridge or bond"),
        (NetDevice(name="lo", ifindex=1), "loopback"),
        (net("veth1"), "no such device in the host's network namespace"),
    ],
    ids=["default route", "master", "lo", "absent"],
)
def test_choose_passes_over_a_device_when_a_rule_forbids_it(device: NetDevice, why: str) -> None:
    """No configuration can claim what the host needs; the reason is told."""
    name = "lo" if device.name == "lo" else "veth0"
    taken, passed = choose(config_of(pool=(name,)), device)
    assert taken == {"pool": []}
    assert why in passed["pool"][name]


def test_choose_gives_a_device_to_the_first_pool_when_two_claim_it() -> None:
    """A device is in one pool, and the other one's reason names the holder."""
    taken, passed = choose(config_of(a=("veth0",), b=("veth0", "veth1")), net("veth0"), net("veth1"))
    assert taken == {"a": ["veth0"], "b": ["veth1"]}
    assert "a" in passed["b"]["veth0"]


def test_choose_gives_a_device_to_nobody_when_it_is_forbidden_to_the_first_pool() -> None:
    """A rule holds for every pool."""
    taken, passed = choose(config_of(a=("veth0",), b=("veth0",)), net("veth0", master=3))
    assert taken == {"a": [], "b": []}
    assert passed["a"] == passed["b"]


def test_choose_takes_a_device_when_it_carries_a_program() -> None:
    """A program, of whomever, keeps no device from being listed: it is unhealthy, not absent."""
    assert choose(config_of(pool=("veth0",)), net("veth0", xdp_mode="native", xdp_prog_id=7))[0] == {"pool": ["veth0"]}


async def test_scanner_notifies_when_devices_come_and_go(tmp_path: Path) -> None:
    """Each pool is a device type with what the host has of its devices, and a pool without any is an empty type."""
    network, notifier = FakeNetwork(), Notifier()
    scanner = PoolScanner(config_of(a=("veth0",), b=("veth1",)), network, FakeHost(), sysfs=tmp_path)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scanner.scan, notifier)
        assert await notifier.wait_changed() == {"a": {}, "b": {}}
        network.show(net("veth0"), net("veth2"))
        info = PoolDeviceInfo(net=net("veth0"))
        assert await notifier.wait_changed() == {"a": {"veth0": info}, "b": {}}
        network.show(net("veth1", ifindex=99))
        info = PoolDeviceInfo(net=net("veth1", ifindex=99))
        assert await notifier.wait_changed() == {"a": {}, "b": {"veth1": info}}
        nursery.cancel_scope.cancel()


def test_scanner_logs_a_device_once_when_it_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Why a device was passed over goes to the log, and again only when the reason is another."""
    caplog.set_level(logging.INFO, "afxdpd")
    scanner = PoolScanner(config_of(pool=("veth0",)), FakeNetwork(), FakeHost(), sysfs=tmp_path)
    for device in (net("veth1"), net("veth1"), net("veth0", master=3), net("veth0", master=4), net("veth0")):
        scanner.tree({device.name: device})
    scanner.tree({})  # the device is in a pod now: that is the pool's to tell
    assert ["no such device" in record.message for record in caplog.records] == [True, False]


# -- A pool and what is around it --------------------------------------------------------------------------------------


class Session:
    """The pod's side of a connection, in this thread."""

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self.sock = sock

    async def send(self, request: bytes, *fds: int) -> None:
        """Sends one packet."""
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        await self.sock.sendmsg([request], ancillary)

    async def receive(self) -> tuple[bytes, list[Fd]]:
        """Receives one packet, empty at the end, with its descriptors, the caller's to close."""
        data, ancillary, flags, _ = await self.sock.recvmsg(512, socket.CMSG_SPACE(4 * 4))
        assert not flags & socket.MSG_CTRUNC
        fds = array.array("i", b"".join(content for _, _, content in ancillary))
        return data, [Fd(fd) for fd in fds]

    async def ask(self, request: bytes, *fds: int) -> bytes:
        """Sends a packet and returns the reply, which has no descriptor."""
        await self.send(request, *fds)
        reply, received = await self.receive()
        assert received == []
        return reply

    async def ask_map(self, device: str) -> str | None:
        """Asks for a map; returns its name, None where it is refused."""
        await self.send(f"/xsk_map_fd, {device}".encode())
        reply, received = await self.receive()
        if not received:
            assert reply == b"/fd_nak"
            return None
        assert reply == b"/fd_ack"
        (fd,) = received
        with fd:
            return Path(os.readlink(f"/proc/self/fd/{fd.fileno()}")).name

    async def is_over(self) -> bool:
        """Whether the server has closed the connection."""
        try:
            data, fds = await self.receive()
        except ConnectionResetError:
            return True
        return (data, fds) == (b"", [])


@asynccontextmanager
async def connected(path: Path) -> AsyncIterator[Session]:
    """A connection to a socket."""
    with trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        await sock.connect(str(path))
        yield Session(sock)


class Bench:
    """A pool of three devices, of which the host has what the test shows, and the fakes around it."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        (config,) = config_of(pool=NAMES).pools
        self.config = PluginConfig(pools=(PoolRules(**{**_fields(config), **settings}),))
        self.directory = directory
        self.uds = directory / "uds" / "pool"
        (directory / "kubelet" / "device-plugins").mkdir(parents=True)
        self.network = FakeNetwork()
        self.xdp = FakeXdp(directory / "kernel", self.network)
        self.host = FakeHost()
        self.pod_resources = FakePodResources()
        self.scanner = PoolScanner(
            self.config,
            self.network,
            self.host,
            allocated=lambda: dict.fromkeys(self.pool.kept(), "pool"),
            sysfs=directory / "sys",
        )
        self.pool = self.new_pool()

    def new_pool(self, pod_resources: PodResources | None = None, *, retired: bool = False) -> PoolManager:
        """Another daemon's pool on the same machine."""
        return PoolManager(
            self.config.pools[0],
            retired=retired,
            xdp=self.xdp,
            host=self.host,
            pod_resources=pod_resources or self.pod_resources,
            uds_dir=self.directory / "uds",
            kubelet_dir=self.directory / "kubelet",
            host_devices=lambda: self.network.devices().values(),
        )

    def show(self, *devices: str | NetDevice) -> None:
        """The host's namespace has these devices now."""
        self.network.show(*(net(device) if isinstance(device, str) else device for device in devices))
        self.pool.update(self.scanner.tree(self.network.devices())["pool"])

    def health(self) -> dict[str, str]:
        """What kubelet is told."""
        return {name: info.state for name, info in self.pool.listed().items()}

    def reason(self, name: str) -> str:
        """Why a device is unhealthy."""
        return self.pool.listed()[name].reason

    def ready(self, *names: str) -> Callable[[], bool]:
        """The condition that there are these devices, and that all are healthy."""
        return lambda: self.health() == dict.fromkeys(names, HEALTHY)

    @asynccontextmanager
    async def running(self, *devices: str | NetDevice, prepared: bool = True) -> AsyncIterator[None]:
        """The pool at work, with devices prepared; in the end nothing of the kernel's is open any more."""
        self.show(*devices)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.pool.run)
            if prepared:
                names = [device if isinstance(device, str) else device.name for device in devices]
                await eventually(self.ready(*names, *self.xdp.pinned_devices("pool")))
            await wait_all_tasks_blocked()
            yield
            if self.xdp.gate.is_set():
                await eventually(lambda: all(device.working is None for device in self.pool.devices.values()))
            nursery.cancel_scope.cancel()
        assert self.xdp.descriptors() == []

    async def allocate(self, *containers: list[str]) -> api.AllocateResponse:
        """Calls Allocate."""
        requests = [api.ContainerAllocateRequest(devices_ids=ids) for ids in containers]
        return await self.pool.Allocate(api.AllocateRequest(container_requests=requests))

    async def pre_start(self, *names: str) -> None:
        """Calls PreStartContainer."""
        await self.pool.PreStartContainer(api.PreStartContainerRequest(devices_ids=names))

    def owned(self, *names: str, pod: str = "pod-x", container: str = "app") -> None:
        """From now on kubelet lists a container that holds these devices, besides those that it lists already."""
        owner = (Owner("default", pod, container),)
        owners = {**self.pod_resources.view.owners, **{(RESOURCE, name): owner for name in names}}
        self.pod_resources.view = PodView(owners=owners, asked_at=0.0, empty=False)

    def list_pods(self, at: float, *names: str, empty: bool = False) -> bool:
        """kubelet answers a question that was asked at a time, with these devices held by some pod."""
        owners = {(RESOURCE, name): (Owner("default", "pod-x", "app"),) for name in names}
        return self.pod_resources.tell(PodView(owners=owners, asked_at=at, empty=empty))

    def path(self, name: str) -> Path:
        """The socket of a device."""
        return self.uds / name / "afxdp.sock"

    async def get_map(self, name: str, device: str = "", *, hostname: str = "pod-x") -> str | None:
        """A pod's conversation on the socket of a device; returns the name of the map of that or another device."""
        async with connected(self.path(name)) as session:
            assert await session.ask(f"/connect, {hostname}".encode()) == b"/host_ok"
            return await session.ask_map(device or name)


def _fields(config: PoolRules) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__struct_fields__}


@pytest.fixture
def bench(short_path: Path) -> Bench:
    """A pool and what is around it."""
    return Bench(short_path)


# -- Preparing ---------------------------------------------------------------------------------------------------------


async def test_devices_become_healthy_when_they_are_prepared(bench: Bench) -> None:
    """A device is listed at once, unhealthy, and is healthy when program and map are on it."""
    bench.xdp.gate.clear()
    async with bench.running("veth0", "veth1", prepared=False):
        assert bench.health() == {"veth0": UNHEALTHY, "veth1": UNHEALTHY}
        assert bench.reason("veth0") == "not prepared yet"
        bench.xdp.gate.set()
        await eventually(bench.ready("veth0", "veth1"))
        assert bench.xdp.program(10)
        assert bench.xdp.program(11)
        assert bench.xdp.pins == {}
        attachment = bench.pool.devices["veth0"].attachment
        assert attachment is not None
        assert attachment.queues == 4


async def test_devices_become_healthy_when_they_appear_later(bench: Bench) -> None:
    """A device that comes while the pool is at work is prepared too."""
    async with bench.running("veth0"):
        bench.show("veth0", "veth2")
        await eventually(bench.ready("veth0", "veth2"))


async def test_device_is_prepared_again_when_an_attempt_failed(
    bench: Bench, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A device is unhealthy, with the kernel's words, while attempts go on, ever more rarely, until one works."""
    bench.xdp.errors["attach", 10] = OSError(errno.ENOSPC, "No space left on device", "attaching XDP to ifindex 10")
    async with bench.running("veth0", "veth1", prepared=False):
        await eventually(lambda: bench.health() == {"veth0": UNHEALTHY, "veth1": HEALTHY})
        await eventually(lambda: bench.reason("veth0") == "attaching XDP to ifindex 10: No space left on device")
        bench.xdp.calls.clear()
        for _ in range(100):
            await trio.sleep(1)
            await eventually(lambda: bench.pool.devices["veth0"].working is None)
        assert 8 <= bench.xdp.calls.count(("attach", 10)) <= 20
        assert bench.xdp.calls.count(("attach", 11)) == 0
        del bench.xdp.errors["attach", 10]
        await trio.sleep(15)
        await eventually(bench.ready("veth0", "veth1"))
    assert sum("No space left" in record.message for record in caplog.records) == 1


async def test_device_is_prepared_at_once_when_a_foreign_program_is_gone(bench: Bench, mock_clock: MockClock) -> None:
    """Somebody else's program is left alone; that it is gone is noticed when netlink tells, not after a pause."""
    bench.xdp.foreign[10] = 4711
    async with bench.running(net("veth0", xdp_mode="native", xdp_prog_id=4711), prepared=False):
        await eventually(lambda: "4711" in bench.reason("veth0"))
        assert bench.health() == {"veth0": UNHEALTHY}
        with pytest.raises(RequestError, match="4711") as refusal:
            await bench.allocate(["veth0"])
        assert refusal.value.status == "FAILED_PRECONDITION"
        del bench.xdp.foreign[10]
        bench.show("veth0")
        await eventually(bench.ready("veth0"))


async def test_allocate_waits_when_the_device_is_being_prepared(bench: Bench) -> None:
    """An Allocate that comes early is answered when the device is ready, and the device is prepared once."""
    bench.xdp.gate.clear()
    responses = []

    async def allocate() -> None:
        responses.append(await bench.allocate(["veth0"]))

    async with bench.running("veth0", prepared=False), trio.open_nursery() as nursery:
        nursery.start_soon(allocate)
        await wait_all_tasks_blocked()
        assert responses == []
        bench.xdp.gate.set()
    assert len(responses) == 1
    assert bench.xdp.calls.count(("attach", 10)) == 1


async def test_device_that_is_allocated_is_prepared_first_when_several_wait(bench: Bench) -> None:
    """What a running pod needs comes before devices that nobody has."""
    async with bench.running("veth0", "veth2"):
        await bench.allocate(["veth2"])
        bench.xdp.gate.clear()
        bench.xdp.attaching.clear()
        bench.show(net("veth0", ifindex=20), "veth1", "veth2")
        await trio.to_thread.run_sync(bench.xdp.attaching.wait)
        bench.xdp.destroy(12)
        bench.show(net("veth0", ifindex=20), "veth1", net("veth2", ifindex=22))
        bench.xdp.gate.set()
        await eventually(bench.ready("veth0", "veth1", "veth2"))
        await eventually(lambda: bench.xdp.program(22) != 0)
        assert [key for method, key in bench.xdp.calls if method == "attach"] == [10, 12, 20, 22, 11]


async def test_device_is_gone_when_it_vanishes_while_it_is_free(bench: Bench) -> None:
    """A free device that leaves the namespace is listed no more, and nothing of it stays open."""
    async with bench.running("veth0", "veth1"):
        assert len(bench.xdp.descriptors()) == 4
        bench.show("veth1")
        assert bench.health() == {"veth1": HEALTHY}
        await eventually(lambda: len(bench.xdp.descriptors()) == 2)
        assert bench.xdp.program(10) == 0
        with pytest.raises(RequestError) as refusal:
            await bench.allocate(["veth0"])
        assert refusal.value.status == "NOT_FOUND"


async def test_device_stays_healthy_when_it_vanishes_while_it_is_allocated(bench: Bench) -> None:
    """A device that has moved into its pod is listed and healthy as before, with its program."""
    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
        program = bench.xdp.program(10)
        bench.show()
        assert bench.health() == {"veth0": HEALTHY}
        assert bench.xdp.program(10) == program != 0


@pytest.mark.parametrize("comes_again", [False, True], ids=["for good", "and comes again as another"])
async def test_device_is_forgotten_when_it_vanishes_while_it_is_being_prepared(bench: Bench, comes_again: bool) -> None:
    """What was prepared for a device that is gone meanwhile is dropped; one that takes its name is prepared."""
    bench.xdp.gate.clear()
    async with bench.running("veth0", prepared=False):
        await trio.to_thread.run_sync(bench.xdp.attaching.wait)
        # Attaching is too far to fail: the kernel still has the device.
        bench.network.show(net("veth0"), net("veth9", ifindex=20))
        bench.pool.update({"veth0": PoolDeviceInfo(net=net("veth0", ifindex=20))} if comes_again else {})
        bench.xdp.gate.set()
        if comes_again:
            await eventually(lambda: bench.xdp.program(20) != 0)
            await eventually(bench.ready("veth0"))
            assert len(bench.xdp.descriptors()) == 2
        else:
            await eventually(lambda: ("attach", 10) in bench.xdp.calls)
            await eventually(bench.ready())
            await eventually(lambda: bench.xdp.descriptors() == [])


async def test_device_is_prepared_anew_when_another_takes_its_name(bench: Bench) -> None:
    """A device with another ifindex is another device."""
    async with bench.running("veth0"):
        bench.show(net("veth0", ifindex=20))
        await eventually(lambda: bench.xdp.program(20) != 0)
        assert bench.xdp.program(10) == 0
        assert len(bench.xdp.descriptors()) == 2
        await eventually(bench.ready("veth0"))


async def test_device_gets_program_and_pins_when_it_is_made_again_while_allocated(bench: Bench) -> None:
    """A device that was destroyed and made again is equipped for the pod that has it, and that is what is pinned."""
    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
        before = dict(bench.xdp.pins["pool", "veth0"])
        bench.xdp.destroy(10)
        bench.show()
        bench.show(net("veth0", ifindex=20))
        await eventually(lambda: bench.xdp.program(20) != 0)
        await eventually(lambda: bench.pool.devices["veth0"].working is None)
        bench.owned("veth0")
        assert await bench.get_map("veth0") == bench.xdp.pins["pool", "veth0"]["xsks_map"].name
        assert bench.xdp.pins["pool", "veth0"].keys() == before.keys()
        assert bench.xdp.pins["pool", "veth0"]["link"] != before["link"]
        assert bench.health() == {"veth0": HEALTHY}
    assert bench.xdp.program(20), "the program went with the daemon, though a pod has the device"


# -- Allocate ----------------------------------------------------------------------------------------------------------


async def test_allocate_answers_with_mounts_and_names_when_devices_are_healthy(bench: Bench) -> None:
    """A container gets the directory of each device, read-only, and the names in one variable."""
    async with bench.running(*NAMES):
        response = await bench.allocate(["veth2", "veth0"], ["veth1"])
        assert [dict(container.envs) for container in response.container_responses] == [
            {"AFXDP_DEVICES_POOL": "veth2 veth0"},
            {"AFXDP_DEVICES_POOL": "veth1"},
        ]
        assert [list(container.mounts) for container in response.container_responses] == [
            [
                api.Mount(container_path=f"/tmp/afxdp_dp/{name}", host_path=str(bench.uds / name), read_only=True)
                for name in names
            ]
            for names in (["veth2", "veth0"], ["veth1"])
        ]
        assert not any(container.devices for container in response.container_responses)


async def test_allocate_names_a_variable_after_the_pool_when_the_name_has_other_characters(short_path: Path) -> None:
    """What a variable's name cannot have becomes an underscore."""
    bench = Bench(short_path)
    assert replace_name(bench.config.pools[0], "my-pool.2").environment_name == "AFXDP_DEVICES_MY_POOL_2"


def replace_name(config: PoolRules, name: str) -> PoolRules:
    """The same pool under another name."""
    return PoolRules(**{**_fields(config), "name": name})


async def test_allocate_pins_and_listens_when_it_answers(bench: Bench) -> None:
    """When the answer is there, map and link are pinned and the socket listens, for root alone."""
    async with bench.running(*NAMES):
        await bench.allocate(["veth0", "veth1"])
        assert sorted(bench.xdp.pins) == [("pool", "veth0"), ("pool", "veth1")]
        assert bench.xdp.pins["pool", "veth0"].keys() == {"link", "xsks_map"}
        for name in ("veth0", "veth1"):
            assert bench.path(name).stat().st_mode & 0o777 == 0o600
            assert (bench.uds / name).stat().st_mode & 0o777 == 0o700
            async with connected(bench.path(name)):
                pass
        assert bench.host.granted == []
        assert bench.health() == dict.fromkeys(NAMES, HEALTHY)


async def test_allocate_grants_access_when_the_pool_has_a_uid(short_path: Path) -> None:
    """The pod's user may look into the directory and connect to the socket."""
    bench = Bench(short_path, uid=1500)
    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
        assert bench.host.granted == [(bench.uds / "veth0", 1500, 5), (bench.path("veth0"), 1500, 6)]


async def test_allocate_makes_the_directory_when_there_is_a_link_in_its_place(bench: Bench) -> None:
    """A link at the place of a device's directory is replaced, not followed."""
    elsewhere = bench.directory / "elsewhere"
    elsewhere.mkdir()
    async with bench.running("veth0"):
        bench.uds.mkdir(parents=True)
        (bench.uds / "veth0").symlink_to(elsewhere)
        await bench.allocate(["veth0"])
        assert not (bench.uds / "veth0").is_symlink()
        assert bench.path("veth0").is_socket()
        assert os.listdir(elsewhere) == []


@pytest.mark.parametrize(
    ("containers", "status"),
    [
        ([["veth0", "veth9"]], "NOT_FOUND"),
        ([["veth0"], ["veth9"]], "NOT_FOUND"),
        ([["veth0", "veth0"]], "INVALID_ARGUMENT"),
        ([["veth0"], ["veth0"]], "INVALID_ARGUMENT"),
        ([["veth0"], []], "INVALID_ARGUMENT"),
        ([], "INVALID_ARGUMENT"),
    ],
    ids=["unknown", "unknown in another", "twice", "twice in two", "none in one", "none"],
)
async def test_allocate_does_nothing_when_the_request_is_wrong(
    bench: Bench, containers: list[list[str]], status: str
) -> None:
    """A wrong request is refused with its status, and no device of it is taken."""
    async with bench.running("veth0"):
        with pytest.raises(RequestError) as refusal:
            await bench.allocate(*containers)
        assert refusal.value.status == status
        assert_nothing_allocated(bench, "veth0")


def assert_nothing_allocated(bench: Bench, *names: str) -> None:
    """No trace of an allocation; the devices are free, healthy and prepared as before."""
    assert bench.xdp.pins == {}
    assert not any((bench.uds / name).is_dir() for name in NAMES)
    assert bench.health() == dict.fromkeys(names, HEALTHY)
    assert len(bench.xdp.descriptors()) == 2 * len(names)
    assert all(device.allocation is None and device.server is None for device in bench.pool.devices.values())


def break_pin(bench: Bench) -> Callable[[], object]:
    """Lets pinning veth1 fail; returns what repairs it."""
    bench.xdp.errors["pin", "veth1"] = OSError(errno.ENOSPC, "No space left on device", "/sys/fs/bpf")
    return bench.xdp.errors.clear


def break_directory(bench: Bench) -> Callable[[], object]:
    """Puts a file where the directory of veth1 has to be; returns what repairs it."""
    bench.uds.mkdir(parents=True, exist_ok=True)
    (bench.uds / "veth1").touch()
    return (bench.uds / "veth1").unlink


def break_grant(bench: Bench) -> Callable[[], object]:
    """Lets granting access fail; returns what repairs it."""
    bench.host.error = OSError(errno.EPERM, "Operation not permitted")
    return lambda: setattr(bench.host, "error", None)


BREAKS = {"pin": break_pin, "directory": break_directory, "grant": break_grant}


@pytest.mark.parametrize("what", BREAKS)
async def test_allocate_rolls_back_when_a_later_device_fails(what: str, short_path: Path) -> None:
    """Where one device of a request cannot be handed over, none is, and the same request succeeds afterwards."""
    bench = Bench(short_path, uid=1500)
    async with bench.running("veth0", "veth1"):
        repair = BREAKS[what](bench)
        with pytest.raises(OSError, match=r".") as failure:
            await bench.allocate(["veth0"], ["veth1"])
        assert failure.value.errno in (errno.ENOSPC, errno.EEXIST, errno.EPERM)
        assert_nothing_allocated(bench, "veth0", "veth1")
        repair()
        await bench.allocate(["veth0"], ["veth1"])
        bench.owned("veth1")
        assert await bench.get_map("veth1") == bench.xdp.pins["pool", "veth1"]["xsks_map"].name


async def test_allocate_rolls_back_when_a_later_device_is_unhealthy(bench: Bench) -> None:
    """Where one device of a request is unhealthy, none is handed over; the error has the reason."""
    async with bench.running("veth0"):
        bench.xdp.errors["attach", 11] = OSError(errno.EIO, "Input/output error")
        bench.show("veth0", "veth1")
        await eventually(lambda: bench.reason("veth1") == "Input/output error")
        with pytest.raises(RequestError, match="veth1 is unhealthy: Input/output error") as refusal:
            await bench.allocate(["veth0", "veth1"])
        assert refusal.value.status == "FAILED_PRECONDITION"
        bench.show("veth0")
        assert_nothing_allocated(bench, "veth0")


async def test_allocate_rolls_back_when_it_is_cancelled(bench: Bench) -> None:
    """A deadline that ends an Allocate in the middle leaves no device half allocated."""
    async with bench.running("veth0"):
        bench.xdp.gate.clear()
        bench.show("veth0", "veth1")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.allocate, ["veth0", "veth1"])
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        bench.xdp.gate.set()
        await eventually(bench.ready("veth0", "veth1"))
        assert_nothing_allocated(bench, "veth0", "veth1")


# -- Taking over -------------------------------------------------------------------------------------------------------


async def test_allocate_takes_a_device_over_when_it_is_still_allocated(bench: Bench) -> None:
    """kubelet knows best: the former pod's session ends, the next pod gets a map and a directory of its own."""
    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
        bench.owned("veth0", pod="old")
        inode = (bench.uds / "veth0").stat().st_ino
        with (bench.uds / "veth0").joinpath("kept").open("w"):  # so that the inode's number is not used again
            pass
        directory = os.open(bench.uds / "veth0", os.O_RDONLY)
        try:
            async with connected(bench.path("veth0")) as session:
                assert await session.ask(b"/connect,old") == b"/host_ok"
                old_map = await session.ask_map("veth0")
                old_program = bench.xdp.program(10)
                await bench.allocate(["veth0"])
                assert await session.is_over()
            assert os.listdir(directory) == []
            assert (bench.uds / "veth0").stat().st_ino != inode
        finally:
            os.close(directory)
        bench.owned("veth0", pod="new")
        new_map = await bench.get_map("veth0", hostname="new")
        assert new_map not in (old_map, None)
        assert bench.xdp.program(10) not in (old_program, 0)
        assert bench.xdp.pins["pool", "veth0"]["xsks_map"].name == new_map
        async with connected(bench.path("veth0")) as session:
            assert await session.ask(b"/connect,old") == b"/host_nak"


async def test_allocate_keeps_the_map_when_nobody_was_given_it(bench: Bench) -> None:
    """An init container and the app container of one pod get a device one after the other, without a new program."""
    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
        before = bench.xdp.pins["pool", "veth0"]
        await bench.allocate(["veth0"])
        assert bench.xdp.pins["pool", "veth0"] == before
        assert ("renew", 10) not in bench.xdp.calls


async def test_allocate_takes_a_device_over_when_it_is_in_a_pods_namespace(bench: Bench) -> None:
    """A device that is still in the namespace of the last pod can be given to the next, with a map of its own."""
    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
        bench.owned("veth0")
        old_map = await bench.get_map("veth0")
        bench.show()
        await bench.allocate(["veth0"])
        bench.owned("veth0")
        assert await bench.get_map("veth0") not in (old_map, None)
        assert bench.health() == {"veth0": HEALTHY}


async def test_allocate_refuses_a_device_when_it_was_destroyed_with_its_pod(bench: Bench) -> None:
    """A device that exists nowhere any more is refused, and gone from the list."""
    async with bench.running("veth0", "veth1"):
        await bench.allocate(["veth0"])
        bench.show("veth1")
        bench.xdp.destroy(10)
        with pytest.raises(RequestError, match="veth0 is unhealthy: it is not in the host's") as refusal:
            await bench.allocate(["veth0", "veth1"])
        assert refusal.value.status == "FAILED_PRECONDITION"
        assert_nothing_allocated(bench, "veth1")


async def test_allocate_refuses_a_device_when_it_vanished_while_it_waited(bench: Bench) -> None:
    """A device that leaves the host while it is prepared is not given to the pod that waits for it."""
    bench.xdp.gate.clear()
    async with bench.running("veth0", prepared=False), trio.open_nursery() as nursery:

        async def allocate() -> None:
            with pytest.raises(RequestError) as refusal:
                await bench.allocate(["veth0"])
            assert refusal.value.status == "NOT_FOUND"

        nursery.start_soon(allocate)
        await wait_all_tasks_blocked()
        bench.pool.update({})  # the kernel still has it: attaching is too far to fail
        bench.xdp.gate.set()
        await eventually(bench.ready())
        await eventually(lambda: bench.xdp.descriptors() == [])
        assert bench.xdp.pins == {}


async def test_preferred_allocation_answers_when_it_is_asked(bench: Bench) -> None:
    """The advice is what has to be included and then the first by name, also of devices that nobody knows."""
    async with bench.running(*NAMES):
        response = await bench.pool.GetPreferredAllocation(
            api.PreferredAllocationRequest(
                container_requests=[
                    api.ContainerPreferredAllocationRequest(
                        available_deviceIDs=["veth2", "veth9", "veth1", "veth0"],
                        must_include_deviceIDs=["veth2"],
                        allocation_size=2,
                    )
                ]
            )
        )
    assert [list(container.deviceIDs) for container in response.container_responses] == [["veth2", "veth0"]]


# -- Maps and owners ---------------------------------------------------------------------------------------------------


async def test_socket_gives_the_maps_of_its_allocation_when_it_is_asked(bench: Bench) -> None:
    """A socket answers for every device that was allocated together with its own, and for no other."""
    async with bench.running(*NAMES):
        await bench.allocate(["veth0", "veth1"], ["veth2"])
        bench.owned("veth0", "veth1")
        bench.owned("veth2", container="other")
        maps = {name: bench.xdp.pins["pool", name]["xsks_map"].name for name in NAMES}
        for name in ("veth0", "veth1"):
            async with connected(bench.path(name)) as session:
                assert await session.ask(b"/connect, pod-x") == b"/host_ok"
                assert await session.ask_map("veth0") == maps["veth0"]
                assert await session.ask_map("veth1") == maps["veth1"]
                assert await session.ask_map("veth2") is None
                assert await session.ask_map("veth9") is None
        assert await bench.get_map("veth2") == maps["veth2"]
        assert await bench.get_map("veth2", "veth0") is None


async def test_connect_is_accepted_without_a_question_when_the_owner_is_known(bench: Bench) -> None:
    """Who holds a device is asked once, however often its pod connects; Allocate has hurried to know it by then."""
    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
        assert bench.pod_resources.hurried == 2  # at the start, and after Allocate
        bench.owned("veth0")
        for _ in range(3):
            await bench.get_map("veth0")
        assert bench.pod_resources.asked == 1


@pytest.mark.parametrize("holder", ["another pod", "nobody"])
async def test_connect_is_refused_when_the_pod_is_not_the_owner(bench: Bench, holder: str) -> None:
    """/host_nak is the answer to who does not hold the device; nothing else is granted, and the connection stays."""
    async with bench.running("veth0", "veth1"):
        await bench.allocate(["veth0"])
        bench.owned("veth0" if holder == "another pod" else "veth1", pod="pod-y")
        async with connected(bench.path("veth0")) as session:
            assert await session.ask(b"/connect,pod-x") == b"/host_nak"
            assert await session.ask(b"/xsk_map_fd,veth0") == b"/nak"
            bench.pod_resources.view = PodView(owners={}, asked_at=0.0, empty=False)
            bench.owned("veth0", pod="pod-y")
            assert await session.ask(b"/connect,pod-y") == b"/host_ok"


async def test_connect_is_an_error_when_kubelet_does_not_answer(bench: Bench, autojump_clock: MockClock) -> None:
    """/error is the answer when the owner cannot be found out; later the same connection can be accepted."""
    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
        bench.owned("veth0")
        bench.pod_resources.error = RpcError("UNAVAILABLE", "kubelet is away")
        async with connected(bench.path("veth0")) as session:
            assert await session.ask(b"/connect,pod-x") == b"/error"
            assert await session.ask(b"/version") == b"/nak"
            bench.pod_resources.error = None
            assert await session.ask(b"/connect,pod-x") == b"/host_ok"


async def test_connect_is_an_error_when_kubelet_hangs(
    short_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A kubelet that does not answer delays /error by a few seconds at most."""
    bench, kubelet = Bench(short_path), FakeKubelet(short_path / "kubelet")
    kubelet.gate = trio.Event()
    pod_resources = PodResources(kubelet.pod_resources_socket)
    bench.pool = bench.new_pool(pod_resources)
    async with trio.open_nursery() as nursery:
        await nursery.start(kubelet.serve)
        nursery.start_soon(pod_resources.run)
        async with bench.running("veth0"):
            await bench.allocate(["veth0"])
            async with connected(bench.path("veth0")) as session:
                started = trio.current_time()
                assert await session.ask(b"/connect,pod-x") == b"/error"
                assert trio.current_time() - started < 10
                kubelet.list_device(RESOURCE, "veth0")
                kubelet.gate.set()
                assert await session.ask(b"/connect,pod-x") == b"/host_ok"
        nursery.cancel_scope.cancel()


# -- Releasing ---------------------------------------------------------------------------------------------------------

Answers = list[tuple[float, str]]

SOON = RELEASE_GRACE + 1
"""Seconds after Allocate when what kubelet says counts."""
NO_MORE = [(SOON, "others"), (SOON + RELEASE_AFTER / 2, "others"), (SOON + RELEASE_AFTER, "others")]
JUST_STARTED = [(SOON + RELEASE_AFTER * number, "nobody") for number in range(4)]
LATER = SOON + RELEASE_AFTER * 4
"""When another answer comes after those."""


@pytest.mark.parametrize(
    ("answers", "released"),
    [
        pytest.param(NO_MORE, True, id="three answers"),
        pytest.param([NO_MORE[0], NO_MORE[2]], False, id="two answers"),
        pytest.param([NO_MORE[0], NO_MORE[1], (SOON + RELEASE_AFTER - 1, "others")], False, id="too short a time"),
        pytest.param([(at - RELEASE_GRACE, what) for at, what in NO_MORE[:2]], False, id="too soon"),
        pytest.param([(-at, what) for at, what in NO_MORE] + NO_MORE[:1], False, id="asked before Allocate"),
        pytest.param([NO_MORE[0], (SOON + 1, "owner"), *NO_MORE[1:]], False, id="listed meanwhile"),
        pytest.param([(1, "owner"), *NO_MORE], True, id="listed before"),
        pytest.param([(SOON, "owner")], False, id="listed"),
        pytest.param(JUST_STARTED, False, id="nobody is listed"),
        pytest.param(
            [*JUST_STARTED, (SOON + RELEASE_AFTER_EMPTY, "nobody")], True, id="nobody is listed for a long time"
        ),
        pytest.param([*JUST_STARTED, (LATER, "others")], False, id="nobody is listed, then others once"),
        pytest.param(
            JUST_STARTED + [(at - SOON + LATER, what) for at, what in NO_MORE],
            True,
            id="nobody is listed, then others",
        ),
    ],
)
async def test_device_is_released_only_when_kubelet_lists_it_no_more(
    bench: Bench, answers: Answers, released: bool
) -> None:
    """It takes several answers in a row over some time, longer where they have no pod at all and not in sum with those.

    A kubelet that has just started lists nobody.
    """
    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
        allocated = trio.current_time()
        for at, what in answers:
            bench.list_pods(allocated + at, *(["veth0"] if what == "owner" else []), empty=what == "nobody")
        assert (bench.pool.devices["veth0"].allocation is None) == released
        assert (bench.xdp.pins == {}) == released
        assert (bench.uds / "veth0").exists() != released


async def test_more_answers_are_wanted_when_a_device_is_allocated(bench: Bench) -> None:
    """kubelet is asked as long as anything is allocated, and no longer."""
    async with bench.running("veth0", "veth1"):
        at = trio.current_time()
        assert not bench.list_pods(at)
        await bench.allocate(["veth0"])
        at = trio.current_time()
        assert bench.list_pods(at + 1, "veth0")
        assert bench.list_pods(at + SOON)
        assert bench.list_pods(at + SOON + 1)
        assert not bench.list_pods(at + SOON + RELEASE_AFTER)


def release(bench: Bench, *listed: str) -> None:
    """kubelet lists only these devices for long enough."""
    now = trio.current_time()
    for at, _ in NO_MORE:
        bench.list_pods(now + at, *listed)


async def test_device_is_prepared_afresh_when_it_is_released_in_the_host(bench: Bench) -> None:
    """A device that came back is free: session ended, unpinned, directory gone, another map; healthy throughout."""
    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
        bench.owned("veth0")
        program = bench.xdp.program(10)
        async with connected(bench.path("veth0")) as session:
            assert await session.ask(b"/connect,pod-x") == b"/host_ok"
            old_map = await session.ask_map("veth0")
            hurried = bench.pod_resources.hurried
            bench.show()
            bench.show("veth0")
            assert bench.pod_resources.hurried == hurried + 1
            release(bench)
            assert await session.is_over()
        await eventually(lambda: ("renew", 10) in bench.xdp.calls)
        await eventually(lambda: bench.pool.devices["veth0"].working is None)
        assert_nothing_allocated(bench, "veth0")
        assert bench.xdp.program(10) not in (0, program)
        assert old_map not in bench.xdp.descriptors()


async def test_device_is_not_released_when_it_is_in_another_namespace(bench: Bench) -> None:
    """A device that lives in a pod's namespace is in use, whatever kubelet says; back in the host it is not."""
    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
        bench.show()
        release(bench)
        assert bench.xdp.pinned_devices("pool") == ["veth0"]
        bench.show("veth0")
        release(bench)
        assert bench.xdp.pins == {}


async def test_nothing_is_taken_or_deleted_when_kubelet_lists_what_can_be_no_device(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Names that lead elsewhere, and devices that are never taken, stay what they are, whatever kubelet lists."""
    victim = bench.directory / "victim"
    victim.mkdir()
    names = ("../../victim", "..", ".", "", "/", str(victim), "a/b", "x" * 16, "a b", "new\nline", "\x1b[31m", "lo")
    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
        bench.show("veth0", dataclasses.replace(net("veth0"), name="lo", ifindex=1))
        for _ in range(2):
            bench.list_pods(trio.current_time(), "veth0", *names)
            assert bench.pool.devices.keys() == {"veth0"}
        for name in names:
            with pytest.raises(RequestError, match="no device"):
                await bench.allocate([name])
        release(bench, "veth0")
        assert victim.is_dir()
        assert bench.path("veth0").is_socket()
        assert ("attach", 1) not in bench.xdp.calls
    said = [record.getMessage() for record in caplog.records if "is no device of ours" in record.getMessage()]
    assert len(said) == 1
    assert said[0].isprintable()


async def test_device_is_its_pods_when_what_kept_it_from_being_taken_has_gone(bench: Bench) -> None:
    """kubelet is asked on while it lists a device that nobody may take, and the pod has it when it may be taken."""
    async with bench.running("veth0"):
        bench.show("veth0", dataclasses.replace(net("veth1"), default_route=True))
        assert bench.list_pods(trio.current_time(), "veth1"), "somebody wants further answers"
        assert "veth1" not in bench.pool.devices
        bench.show("veth0", "veth1")
        bench.list_pods(trio.current_time(), "veth1")
        await eventually(lambda: bench.path("veth1").is_socket())


async def test_answer_is_given_when_the_daemon_is_late(bench: Bench, mock_clock: MockClock) -> None:
    """A request that came before the idle time was over is answered, and the conversation goes on."""
    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
        bench.owned("veth0")
        async with connected(bench.path("veth0")) as session:
            assert await session.ask(b"/connect,pod-x") == b"/host_ok"
            for _ in range(3):
                os.write(session.sock.fileno(), b"/version")  # and nobody else has a turn
                mock_clock.jump(31)  # as after a process was stopped
                assert (await session.receive())[0] == b"0.1"
            mock_clock.jump(31)
            assert await session.is_over()


async def test_device_says_whose_program_it_carries_when_names_were_exchanged(bench: Bench) -> None:
    """Nobody is told to detach the program of a running pod."""
    async with bench.running("veth0", "veth1"):
        await bench.allocate(["veth0"])
        bench.show(dataclasses.replace(net("veth1"), ifindex=10))
        await eventually(lambda: "carries the program of veth0" in bench.pool.listed()["veth1"].reason)


async def test_device_is_gone_when_it_is_released_and_destroyed(bench: Bench) -> None:
    """A device that has gone with its pod's namespace is listed no more, and nothing of it stays open."""
    async with bench.running("veth0", "veth1"):
        await bench.allocate(["veth0"])
        bench.show("veth1")
        bench.xdp.destroy(10)
        assert bench.health() == {"veth0": HEALTHY, "veth1": HEALTHY}
        release(bench)
        await eventually(lambda: len(bench.xdp.descriptors()) == 2)
        assert_nothing_allocated(bench, "veth1")


async def test_release_takes_single_devices_when_the_others_are_still_listed(bench: Bench) -> None:
    """Only what kubelet lists no more is released."""
    async with bench.running("veth0", "veth1"):
        await bench.allocate(["veth0"], ["veth1"])
        release(bench, "veth1")
        assert bench.xdp.pinned_devices("pool") == ["veth1"]


async def test_release_goes_on_when_one_device_cannot_be_unpinned(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """A pin that cannot be removed harms nobody, and is replaced when the device is allocated again."""
    async with bench.running("veth0", "veth1"):
        await bench.allocate(["veth0"], ["veth1"])
        bench.owned("veth0")
        old_map = await bench.get_map("veth0")
        bench.xdp.errors["unpin", "veth0"] = OSError(errno.EROFS, "Read-only file system")
        release(bench)
        assert bench.xdp.pinned_devices("pool") == ["veth0"]
        assert "Read-only file system" in caplog.text
        bench.xdp.errors.clear()
        await bench.allocate(["veth0"])
        bench.owned("veth0")
        new_map = await bench.get_map("veth0")
        assert new_map not in (None, old_map)
        assert bench.xdp.pins["pool", "veth0"]["xsks_map"].name == new_map


async def test_device_is_not_released_when_it_is_worked_on(bench: Bench) -> None:
    """While a device is made ready again for its pod, kubelet's answers do not touch it."""
    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
        bench.xdp.gate.clear()
        bench.xdp.destroy(10)
        bench.show(net("veth0", ifindex=20))
        await eventually(lambda: bench.pool.devices["veth0"].working is not None)
        release(bench)
        assert bench.xdp.pinned_devices("pool") == ["veth0"]
        bench.xdp.gate.set()
        await eventually(lambda: bench.pool.devices["veth0"].working is None)
        release(bench)
        assert bench.xdp.pins == {}


# -- Restoring ---------------------------------------------------------------------------------------------------------


async def test_pool_takes_over_what_is_pinned_when_it_starts(bench: Bench) -> None:
    """The next daemon serves the same map on the same path in the same directory, and devices in pods are healthy."""
    async with bench.running("veth0", "veth1"):
        await bench.allocate(["veth0"])
        bench.owned("veth0")
        old_map = await bench.get_map("veth0")
        bench.show("veth1")
        inode = (bench.uds / "veth0").stat().st_ino
        program = bench.xdp.program(10)
    assert bench.xdp.program(10) == program, "the end of the daemon cut off a pod"
    assert bench.xdp.program(11) == 0
    bench.pool = bench.new_pool()
    async with bench.running("veth1"):
        assert bench.health() == {"veth0": HEALTHY, "veth1": HEALTHY}
        assert (bench.uds / "veth0").stat().st_ino == inode
        assert await bench.get_map("veth0") == old_map
        assert bench.xdp.program(10) == program
    assert bench.xdp.pinned_devices("pool") == ["veth0"]


async def test_pool_groups_devices_by_owner_when_it_has_restored_them(bench: Bench) -> None:
    """Which devices belong together is known again when kubelet has told their containers."""
    async with bench.running(*NAMES):
        await bench.allocate(["veth0", "veth2"], ["veth1"])
    bench.pool = bench.new_pool()
    async with bench.running(*NAMES):
        bench.owned("veth0", "veth2")
        bench.owned("veth1", container="sidecar")
        for name, others in {"veth0": ["veth0", "veth2"], "veth2": ["veth0", "veth2"], "veth1": ["veth1"]}.items():
            for other in NAMES:
                assert (await bench.get_map(name, other) is not None) == (other in others)


async def test_pool_hurries_to_know_owners_when_it_starts(bench: Bench) -> None:
    """At the start kubelet is asked: what pods have is not all pinned."""
    async with bench.running("veth0"):
        assert bench.pod_resources.hurried == 1


async def test_pool_gives_a_fresh_map_when_a_restored_device_is_taken_over(bench: Bench) -> None:
    """Whether the former pod ever had the map is not known after a restart, so the next one gets another."""
    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
        pinned = dict(bench.xdp.pins["pool", "veth0"])
    bench.pool = bench.new_pool()
    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
        assert bench.xdp.pins["pool", "veth0"]["xsks_map"] != pinned["xsks_map"]
        assert bench.xdp.pins["pool", "veth0"]["link"] == pinned["link"]


async def test_restored_device_is_released_when_its_pod_ended_meanwhile(bench: Bench) -> None:
    """After a restart the time since Allocate counts from the start."""
    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
    bench.pool = bench.new_pool()
    async with bench.running("veth0"):
        release(bench)
        assert bench.xdp.pins == {}
        await eventually(lambda: ("renew", 10) in bench.xdp.calls)


@pytest.mark.parametrize("broken", ["link missing", "map missing", "device destroyed"])
async def test_pool_removes_pins_when_they_are_of_no_use(bench: Bench, broken: str) -> None:
    """Pins that are incomplete, or of a device that exists no more, are removed.

    The directory goes with the former; in the latter case the pod may go on, and have it mounted.
    """
    async with bench.running("veth0", "veth1"):
        await bench.allocate(["veth0"], ["veth1"])
    match broken:
        case "link missing":
            del bench.xdp.pins["pool", "veth0"]["link"]
        case "map missing":
            del bench.xdp.pins["pool", "veth0"]["xsks_map"]
        case "device destroyed":
            bench.xdp.destroy(10)
    bench.pool = bench.new_pool()
    async with bench.running(net("veth0", ifindex=20), "veth1"):
        assert bench.xdp.pinned_devices("pool") == ["veth1"]
        assert sorted(os.listdir(bench.uds)) == (["veth0", "veth1"] if broken == "device destroyed" else ["veth1"])
        assert bench.xdp.program(20)


async def test_pool_removes_directories_when_nothing_is_pinned_for_them(bench: Bench) -> None:
    """What is left of sockets of devices that are free goes at the start."""
    (bench.uds / "veth0").mkdir(parents=True)
    bench.path("veth0").touch()
    async with bench.running("veth0"):
        assert os.listdir(bench.uds) == []


@pytest.mark.parametrize("what", ["directory", "grant"])
@pytest.mark.parametrize("where", ["host", "pod"])
async def test_pool_tries_again_when_a_restored_socket_cannot_be_served(
    what: str, where: str, short_path: Path, autojump_clock: MockClock
) -> None:
    """A device whose socket cannot be made is unhealthy with the reason, until it can, wherever the device is."""
    bench = Bench(short_path, uid=1500)
    async with bench.running("veth1"):
        await bench.allocate(["veth1"])
        if where == "pod":
            bench.show()
    await trio.to_thread.run_sync(os.unlink, bench.path("veth1"))
    (bench.uds / "veth1").rmdir()
    repair = BREAKS[what](bench)
    bench.pool = bench.new_pool()
    async with bench.running(*(["veth1"] if where == "host" else []), prepared=False):
        assert bench.health() == {"veth1": UNHEALTHY}
        assert bench.reason("veth1")
        await trio.sleep(100)
        assert bench.health() == {"veth1": UNHEALTHY}
        repair()
        await trio.sleep(15)
        await eventually(bench.ready("veth1"))
        bench.owned("veth1")
        assert await bench.get_map("veth1")


async def test_pool_restores_its_devices_when_it_has_crashed(
    short_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """After a crash the pool begins again with what is pinned, and the pods of the others do not notice."""
    bench, other = Bench(short_path), config_of(other=("veth7",)).pools[0]
    config = PluginConfig(pools=(*bench.config.pools, other))
    pools = {"pool": bench.pool}
    pools["other"] = PoolManager(
        other,
        xdp=bench.xdp,
        host=bench.host,
        pod_resources=bench.pod_resources,
        uds_dir=short_path / "uds",
        kubelet_dir=short_path / "kubelet",
    )
    bench.network.show(net("veth0"), net("veth7"))
    scanner = PoolScanner(config, bench.network, bench.host, sysfs=short_path)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Manager("afxdp", scanner, make_server=pools.__getitem__).run)
        await eventually(bench.ready("veth0"))
        await eventually(lambda: pools["other"].listed()["veth7"].state == HEALTHY)
        await bench.allocate(["veth0"])
        bench.owned("veth0")
        old_map, program, other_program = await bench.get_map("veth0"), bench.xdp.program(10), bench.xdp.program(17)

        bench.xdp.errors["attach", 11] = LookupError("a bug")
        bench.network.show(net("veth0"), net("veth1"), net("veth7"))
        await eventually(lambda: "which is a bug" in caplog.text)
        # Nothing of the pool is open now; what its pod has is pinned, and the other pool goes on.
        assert len(bench.xdp.descriptors()) == 2
        assert bench.xdp.program(10) == program
        assert bench.xdp.program(17) == other_program

        bench.xdp.errors.clear()
        await trio.sleep(1)
        await eventually(bench.ready("veth0", "veth1"))
        assert await bench.get_map("veth0") == old_map
        assert bench.xdp.program(10) == program
        nursery.cancel_scope.cancel()
    assert bench.xdp.descriptors() == []


async def test_leftover_is_served_when_its_pool_is_configured_no_more(bench: Bench) -> None:
    """What a pool has left serves its pods as before, until they are gone."""
    async with bench.running("veth0", "veth1"):
        await bench.allocate(["veth0"], ["veth1"])
        bench.show()
    bench.pool = bench.new_pool(retired=True)
    async with bench.running(prepared=False):
        await eventually(bench.ready("veth0", "veth1"))
        bench.owned("veth0")
        assert await bench.get_map("veth0") == bench.xdp.pins["pool", "veth0"]["xsks_map"].name
        release(bench)
        assert bench.xdp.pinned_devices("pool") == ["veth0", "veth1"]
        bench.show("veth0")
        release(bench, "veth1")
        assert bench.xdp.pinned_devices("pool") == ["veth1"]
        bench.xdp.destroy(11)
        release(bench)
        assert bench.pool.devices == {}
        assert bench.pool.listed() == {}
    assert bench.xdp.pins == {}
    assert bench.xdp.descriptors() == []


async def test_daemon_goes_on_when_a_leftover_crashes(
    bench: Bench, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug with what an old pool has left ends no pool of today's, and is tried again."""
    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
    bench.xdp.errors["open_pinned", "veth0"] = LookupError("a bug")
    paths = Paths(
        kubelet_dir=bench.directory / "kubelet",
        pod_resources_socket=bench.directory / "kubelet" / "pod-resources" / "kubelet.sock",
        uds_dir=bench.directory / "uds",
        bpffs=bench.directory / "bpf",
    )
    serving = partial(serve, config_of(new=("veth1",)), paths)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(serving, network=bench.network, xdp=bench.xdp, host=bench.host))
        await trio.sleep(10)
        assert "which is a bug" in caplog.text
        bench.xdp.errors.clear()
        await trio.sleep(20)
        assert bench.path("veth0").is_socket()
        nursery.cancel_scope.cancel()


async def test_pool_ends_at_once_when_an_attempt_hangs(bench: Bench) -> None:
    """A driver that takes its time does not keep the daemon from ending; what it then attaches is detached at once."""
    bench.xdp.gate.clear()
    try:
        async with bench.running("veth0", prepared=False):
            await eventually(bench.xdp.attaching.is_set)
    finally:
        bench.xdp.gate.set()
    await eventually(lambda: ("attach", 10) in bench.xdp.calls)
    await eventually(lambda: bench.xdp.descriptors() == [])


# -- PreStartContainer -------------------------------------------------------------------------------------------------


async def test_pre_start_does_nothing_when_all_is_there(bench: Bench) -> None:
    """A start with everything in place changes nothing, and ends no conversation."""
    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
        bench.owned("veth0")
        inode = bench.path("veth0").stat().st_ino
        bench.xdp.calls.clear()
        async with connected(bench.path("veth0")) as session:
            await bench.pre_start("veth0")
            assert await session.ask(b"/connect,pod-x") == b"/host_ok"
        assert bench.xdp.calls == []
        assert bench.path("veth0").stat().st_ino == inode


@pytest.mark.parametrize("missing", ["pins", "link", "socket", "directory"])
async def test_pre_start_repairs_when_something_is_missing(bench: Bench, missing: str) -> None:
    """Pins, socket and directory are made again, for the same map, also while the device is in its pod."""
    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
        bench.owned("veth0")
        old_map = await bench.get_map("veth0")
        bench.show()
        match missing:
            case "pins":
                bench.xdp.pins.clear()
            case "link":
                del bench.xdp.pins["pool", "veth0"]["link"]
            case "socket":
                bench.path("veth0").unlink()
            case "directory":
                bench.path("veth0").unlink()
                (bench.uds / "veth0").rmdir()
        await bench.pre_start("veth0")
        assert bench.xdp.pins["pool", "veth0"].keys() == {"link", "xsks_map"}
        assert await bench.get_map("veth0") == old_map


async def test_pre_start_refuses_when_the_device_exists_no_more(bench: Bench) -> None:
    """A device that was destroyed cannot be repaired: the start fails, and the text says what helps."""
    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
        bench.show()
        bench.xdp.destroy(10)
        with pytest.raises(RequestError, match=r"veth0: it is not in the host's .*; delete the pod") as refusal:
            await bench.pre_start("veth0")
        assert refusal.value.status == "FAILED_PRECONDITION"
        assert bench.health() == {"veth0": UNHEALTHY}


async def test_pre_start_refuses_when_there_is_no_such_device(bench: Bench) -> None:
    """A device that the pool has never heard of is NOT_FOUND."""
    async with bench.running("veth0"):
        with pytest.raises(RequestError) as refusal:
            await bench.pre_start("veth9")
        assert refusal.value.status == "NOT_FOUND"


async def test_pre_start_gives_a_fresh_map_when_the_container_starts_again(bench: Bench) -> None:
    """The first start leaves what Allocate gave; at the next one a map and conversations of the last are void."""
    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
        bench.owned("veth0")
        pinned = bench.xdp.pins["pool", "veth0"]["xsks_map"]
        await bench.pre_start("veth0")
        assert bench.xdp.pins["pool", "veth0"]["xsks_map"] == pinned
        async with connected(bench.path("veth0")) as session:
            assert await session.ask(b"/connect,pod-x") == b"/host_ok"
            assert await session.ask_map("veth0") == pinned.name
            await bench.pre_start("veth0")
            assert await session.is_over()
        assert bench.xdp.pins["pool", "veth0"]["xsks_map"] != pinned
        assert await bench.get_map("veth0") == bench.xdp.pins["pool", "veth0"]["xsks_map"].name


@pytest.mark.parametrize("what", BREAKS)
async def test_pre_start_refuses_when_what_is_missing_cannot_be_made(
    what: str, short_path: Path, autojump_clock: MockClock
) -> None:
    """The start fails with the reason; when it can be made the device becomes healthy by itself, and a start works."""
    bench = Bench(short_path, uid=1500)
    async with bench.running("veth1"):
        await bench.allocate(["veth1"])
        bench.show()
        bench.xdp.pins.clear()
        bench.path("veth1").unlink()
        (bench.uds / "veth1").rmdir()
        repair = BREAKS[what](bench)
        for _ in range(2):
            with pytest.raises(RequestError) as refusal:
                await bench.pre_start("veth1")
            assert refusal.value.status == "FAILED_PRECONDITION"
        assert bench.health() == {"veth1": UNHEALTHY}
        repair()
        await trio.sleep(15)
        await eventually(bench.ready("veth1"))
        await bench.pre_start("veth1")
        bench.owned("veth1")
        assert await bench.get_map("veth1")


async def test_pre_start_allocates_when_the_allocation_was_forgotten(bench: Bench) -> None:
    """After a reboot there are no pins, but kubelet starts its containers again: it knows better."""
    async with bench.running(*NAMES):
        await bench.pre_start("veth0", "veth1")
        assert bench.xdp.pinned_devices("pool") == ["veth0", "veth1"]
        bench.owned("veth0", "veth1")
        assert await bench.get_map("veth0", "veth1")
        assert await bench.get_map("veth0", "veth2") is None


# -- The socket --------------------------------------------------------------------------------------------------------


class Pods:
    """A socket without a pool: what it may give out is one file, and who asks is the owner unless told otherwise."""

    def __init__(self, directory: Path, *, idle_timeout: float = 30.0) -> None:
        self.xskmap = Fd(os.open(os.devnull, os.O_RDONLY))
        self.server = UdsServer(
            directory / "veth0",
            name="veth0",
            idle_timeout=idle_timeout,
            is_owner=self._is_owner,
            xskmap=lambda name: self.xskmap if name == "veth0" else None,
        )
        self.path = directory / "veth0" / "afxdp.sock"

    async def _is_owner(self, hostname: str) -> bool:
        await trio.lowlevel.checkpoint()
        if hostname == "bug":
            raise LookupError
        return hostname == "pod-x"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The socket at work; in the end as many descriptors are open as before."""
        with self.xskmap:
            before = open_fds()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.server.serve, self.server.listen(FakeHost(), 0))
                yield
                self.server.scope.cancel()
            await eventually(lambda: open_fds() == before)


@pytest.fixture
async def pods(short_path: Path) -> AsyncIterator[Pods]:
    """A socket at work."""
    pods = Pods(short_path)
    async with pods.running():
        yield pods


async def test_session_goes_through_the_protocol_when_the_pod_does(pods: Pods) -> None:
    """Each request has its reply, and /fin ends the connection but not the socket."""
    for _ in range(3):
        async with connected(pods.path) as session:
            assert await session.ask(b"/connect,pod-x") == b"/host_ok"
            assert await session.ask(b"/version") == b"0.1"
            await session.send(b"/xsk_map_fd,veth0")
            reply, (fd,) = await session.receive()
            fd.close()
            assert reply == b"/fd_ack"
            assert await session.ask(b"/xsk_map_fd,veth1") == b"/fd_nak"
            assert await session.ask(b"/fin") == b"/fin_ack"
            assert await session.is_over()


@pytest.mark.parametrize(
    "packet",
    [
        b"/connect",
        b"/connect,",
        b"/connect,pod-x,more",
        b"/nothing",
        b"\xff\xfe",
        b"",
        b"/version,1",
        b"/xsk_map_fd",
        b"x" * 512,
        b"x" * 513,
        b"/version" + b"\0" * 100_000,
        b"/connect," + b"x" * 600,
    ],
    ids=lambda packet: repr(packet[:20]),
)
async def test_session_replies_once_when_a_packet_is_malformed(pods: Pods, packet: bytes) -> None:
    """What means nothing has exactly one reply, /nak, before /connect and after, and the connection stays."""
    async with connected(pods.path) as session:
        assert await session.ask(packet) == b"/nak"
        assert await session.ask(b"/connect,pod-x") == b"/host_ok"
        assert await session.ask(packet) == b"/nak"
        assert await session.ask(b"/version") == b"0.1"


async def test_session_replies_to_each_packet_when_they_come_all_at_once(pods: Pods) -> None:
    """Requests that are sent without waiting are answered in their order."""
    async with connected(pods.path) as session:
        for packet in (b"/connect,pod-x", b"/version", b"/nothing", b"/version", b"/fin"):
            await session.send(packet)
        replies = [(await session.receive())[0] for _ in range(5)]
        assert replies == [b"/host_ok", b"0.1", b"/nak", b"0.1", b"/fin_ack"]
        assert await session.is_over()


@contextmanager
def some_fds(count: int) -> Iterator[list[int]]:
    """Descriptors of a pipe."""
    fds = [fd for _ in range((count + 1) // 2) for fd in os.pipe()]
    try:
        yield fds[:count]
    finally:
        for fd in fds:
            os.close(fd)


@pytest.mark.parametrize("count", [1, 2, 3, 253])
@pytest.mark.parametrize(
    ("packet", "reply"),
    [
        (b"/config_busy_poll,50,64", b"/config_busy_poll_nak"),
        (b"/version", b"0.1"),
        (b"/nothing", b"/nak"),
        (b"x" * 1000, b"/nak"),
    ],
    ids=["busy poll", "version", "unknown", "long"],
)
async def test_session_closes_descriptors_when_a_packet_has_some(
    pods: Pods, packet: bytes, reply: bytes, count: int
) -> None:
    """Whatever comes with whichever request is closed soon; none of these is a socket of AF_XDP."""
    with some_fds(count) as fds:
        async with connected(pods.path) as session:
            assert await session.ask(b"/connect,pod-x") == b"/host_ok"
            before = open_fds()
            assert await session.ask(packet, *fds) == reply
            await eventually(lambda: open_fds() == before)


async def test_session_refuses_busy_polling_when_there_is_no_socket_with_it(pods: Pods) -> None:
    """Without a descriptor there is nothing to be set."""
    async with connected(pods.path) as session:
        assert await session.ask(b"/connect,pod-x") == b"/host_ok"
        assert await session.ask(b"/config_busy_poll,50,64") == b"/config_busy_poll_nak"


async def test_session_leaves_nothing_open_when_descriptors_were_never_received(short_path: Path) -> None:
    """What a pod has sent and the daemon has not read yet is closed with the connection."""
    pods = Pods(short_path)
    with some_fds(2) as fds:
        async with pods.running(), connected(pods.path) as session:
            for _ in range(10):
                await session.send(b"/nothing", *fds)
            pods.server.scope.cancel()
            await wait_all_tasks_blocked()


async def test_socket_serves_many_connections_when_they_are_open_at_once(pods: Pods) -> None:
    """Conversations do not wait for each other."""
    async with connected(pods.path) as first, connected(pods.path) as second:
        assert await first.ask(b"/connect,pod-x") == b"/host_ok"
        assert await second.ask(b"/version") == b"/nak"
        assert await second.ask(b"/connect,pod-x") == b"/host_ok"
        assert await first.ask(b"/version") == b"0.1"


async def test_socket_refuses_connections_when_there_are_too_many(pods: Pods, caplog: pytest.LogCaptureFixture) -> None:
    """Of many connections so many are served; further ones are closed at once, until one of the others ends."""
    async with trio.open_nursery() as nursery:
        full, leave = trio.Event(), trio.Event()
        ready = itertools.count(1)

        async def stay() -> None:
            async with connected(pods.path) as session:
                assert await session.ask(b"/connect,pod-x") == b"/host_ok"
                if next(ready) == SESSIONS_MAX:
                    full.set()
                await leave.wait()
                assert await session.ask(b"/version") == b"0.1"

        for _ in range(SESSIONS_MAX):
            nursery.start_soon(stay)
        await full.wait()
        for _ in range(10):
            async with connected(pods.path) as session:
                assert await session.is_over()
        assert sum("further ones are refused" in record.message for record in caplog.records) >= 1
        leave.set()
    await wait_all_tasks_blocked()
    async with connected(pods.path) as session:
        assert await session.ask(b"/connect,pod-x") == b"/host_ok"


async def test_log_is_bounded_when_a_pod_makes_noise(
    pods: Pods, mock_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A pod can fill the log with a few lines a minute, and no more."""
    for minute in range(1, 4):
        async with connected(pods.path) as session:
            for _ in range(1000):
                assert await session.ask(b"/connect,somebody else") == b"/host_nak"
        assert len(caplog.records) <= 12 * minute
        mock_clock.jump(61)


async def test_connection_is_closed_when_it_is_idle(short_path: Path, mock_clock: MockClock) -> None:
    """A silent connection is closed after its time, which begins anew with each packet; the socket goes on."""
    pods = Pods(short_path, idle_timeout=30)
    async with pods.running(), connected(pods.path) as silent, connected(pods.path) as busy:
        for _ in range(3):
            await wait_all_tasks_blocked()
            mock_clock.jump(20)
            assert await busy.ask(b"/connect,pod-x") == b"/host_ok"
        assert await silent.is_over()
        mock_clock.jump(29)
        assert await busy.ask(b"/version") == b"0.1"
        await wait_all_tasks_blocked()
        mock_clock.jump(30)
        assert await busy.is_over()
        async with connected(pods.path) as session:
            assert await session.ask(b"/connect,pod-x") == b"/host_ok"


async def test_connection_stays_when_it_may_be_idle_for_ever(short_path: Path, mock_clock: MockClock) -> None:
    """udsTimeout -1 closes nothing."""
    assert Bench(short_path, uds_timeout=-1).config.pools[0].idle_timeout == float("inf")
    pods = Pods(short_path, idle_timeout=float("inf"))
    async with pods.running(), connected(pods.path) as session:
        await wait_all_tasks_blocked()
        mock_clock.jump(1_000_000)
        assert await session.ask(b"/connect,pod-x") == b"/host_ok"


async def test_connection_is_closed_when_the_pod_does_not_read(short_path: Path, mock_clock: MockClock) -> None:
    """A pod that sends and never reads loses its connection after some seconds, and holds up nobody."""
    pods = Pods(short_path)
    async with pods.running():
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf:
            deaf.connect(str(pods.path))
            deaf.setblocking(False)
            while fill(deaf):
                await wait_all_tasks_blocked()
            async with connected(pods.path) as session:
                assert await session.ask(b"/connect,pod-x") == b"/host_ok"
                mock_clock.jump(6)
                await wait_all_tasks_blocked()
                with pytest.raises((BrokenPipeError, ConnectionResetError)):
                    deaf.send(b"/version")
                assert await session.ask(b"/version") == b"0.1"
        await wait_all_tasks_blocked()


def fill(sock: socket.socket) -> int:
    """Sends packets until there is no room for another; returns how many."""
    for count in itertools.count():
        try:
            sock.send(b"/nothing")
        except BlockingIOError:
            return count
    raise AssertionError


async def test_socket_goes_on_when_there_are_no_descriptors_left(
    short_path: Path, mock_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A connection that cannot be accepted waits, and is served when there are descriptors again."""
    pods = Pods(short_path)
    async with pods.running():
        await wait_all_tasks_blocked()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            session = Session(sock)
            lowest = os.dup(0)
            os.close(lowest)
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
            try:
                await sock.connect(str(pods.path))
                await wait_all_tasks_blocked()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert "cannot accept connections" in caplog.text
            mock_clock.jump(2)
            assert await session.ask(b"/connect,pod-x") == b"/host_ok"


async def test_connection_ends_when_there_is_a_bug_in_it(pods: Pods, caplog: pytest.LogCaptureFixture) -> None:
    """What nobody thought of ends one conversation, and goes to the log."""
    async with connected(pods.path) as session, connected(pods.path) as other:
        await session.send(b"/connect,bug")
        assert await session.is_over()
        assert await other.ask(b"/connect,pod-x") == b"/host_ok"
    assert [record.exc_info is not None for record in caplog.records] == [True]


async def test_files_are_closed_when_there_are_more_than_may_wait(pods: Pods) -> None:
    """Who has to wait until there are fewer waits no longer than that, and in the end all are closed."""
    before = open_fds()
    files = PodFiles()
    for _ in range(3):
        files.close([os.dup(0) for _ in range(CLOSING_MAX + 10)])
        await files.wait_room()
        assert len(open_fds()) <= len(before) + CLOSING_MAX + 1  # which is being closed
    await eventually(lambda: open_fds() == before)


async def test_connections_end_when_the_socket_does(short_path: Path) -> None:
    """With the socket's scope every connection is closed, also one that was not accepted yet."""
    pods = Pods(short_path)
    async with pods.running(), connected(pods.path) as session:
        assert await session.ask(b"/connect,pod-x") == b"/host_ok"
        async with connected(pods.path) as queued:
            pods.server.scope.cancel()
            assert await session.is_over()
            assert await queued.is_over()
