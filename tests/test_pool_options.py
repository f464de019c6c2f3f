"""What the configuration can say of a pool, and how pools change while they run; fakes for the kernel and kubelet."""

from __future__ import annotations

import errno
import logging
import math
import os
import random
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from conftest import open_fds
from fakes import FakeDevlink, FakeEthtool, FakeHost, FakeKind, FakeKubelet, FakeNetwork, FakePodResources, FakeXdp
from kubelet import pod, running_kubelet
from test_pools import (
    RESOURCE,
    SOON,
    Bench,
    assert_nothing_allocated,
    config_of,
    connected,
    eventually,
    net,
    release,
)
from trio.testing import MockClock, wait_all_tasks_blocked

import afxdpd
from afxdpd import (
    FUZZ_REQUESTS,
    HEALTHY,
    HOLD_OFF,
    OWNER_TIMEOUT,
    SUBFUNCTION_TIMEOUT,
    UNHEALTHY,
    DeviceConfig,
    DriverConfig,
    Fin,
    KindKeeper,
    KindNetworkError,
    NetDevice,
    Notifier,
    Owner,
    Paths,
    PluginConfig,
    PodResources,
    PodView,
    PoolManager,
    PoolOptions,
    PoolRules,
    PoolScanner,
    RequestError,
    RpcError,
    Syncer,
    call_unix,
    open_unix_listener,
    parse_request,
    random_request,
    serve,
)
from afxdpd_proto import deviceplugin_pb2 as api
from afxdpd_proto import dpcnisyncer_pb2 as syncer


class OptionsBench(Bench):
    """The pool of Bench with fakes also for devlink and ethtool; while it runs, it hears of changes by itself."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.ethtool = FakeEthtool()
        super().__init__(directory, **settings)
        self.devlink = FakeDevlink(self.network)
        self.pool = self.new_pool()

    def new_pool(self, pod_resources: PodResources | None = None, *, retired: bool = False) -> PoolManager:
        """See Bench.new_pool."""
        return PoolManager(
            self.config.pools[0],
            retired=retired,
            xdp=self.xdp,
            host=self.host,
            network=self.network,
            devlink=getattr(self, "devlink", None),
            ethtool=self.ethtool,
            pod_resources=pod_resources or self.pod_resources,
            uds_dir=self.directory / "uds",
            kubelet_dir=self.directory / "kubelet",
            released=self.scanner.refresh,
        )

    @asynccontextmanager
    async def running(self, *devices: str | NetDevice, prepared: bool = True) -> AsyncIterator[None]:
        """See Bench.running."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow)
            async with super().running(*devices, prepared=prepared):
                yield
            nursery.cancel_scope.cancel()

    async def _follow(self) -> None:
        """Does what a Manager does."""
        notifier = Notifier()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.scanner.scan, notifier)
            while True:
                self.pool.update((await notifier.wait_changed())["pool"])

    def configure(self, **settings: Any) -> None:
        """The configuration says something else of the pool now, as after a reload."""
        rules = self.config.pools[0]
        fields = {name: getattr(rules, name) for name in rules.__struct_fields__}
        self.config = PluginConfig(pools=(PoolRules(**{**fields, **settings}),))
        self.scanner.configure(self.config)
        self.pool.reconfigure(self.scanner.pools["pool"])

    async def at_rest(self) -> None:
        """Returns when nothing is worked on, and nothing is going to be before the clock goes on."""
        await wait_all_tasks_blocked()
        while any(device.working is not None for device in self.pool.devices.values()):
            await eventually(lambda: not any(device.working is not None for device in self.pool.devices.values()))
            await wait_all_tasks_blocked()

    def mounts(self, answer: api.AllocateResponse) -> list[tuple[str, str, bool]]:
        """What the containers of an answer mount: (path in the pod, on the host, read-only)."""
        containers = answer.container_responses
        return [(mount.container_path, mount.host_path, mount.read_only) for c in containers for mount in c.mounts]

    def pinned(self, name: str) -> str:
        """Which map is pinned for a device."""
        return self.xdp.pins["pool", name]["xsks_map"].name

    def map_path(self, name: str) -> Path:
        """Where the pinned map of a device is."""
        return self.xdp.pinned_map("pool", name)

    def tell(self, *names: str) -> None:
        """kubelet answers now that some pod holds these devices."""
        self.list_pods(trio.current_time(), *names)


# -- udsServerDisable --------------------------------------------------------------------------------------------------


@pytest.fixture
def raw(short_path: Path) -> OptionsBench:
    """A pool whose devices are handed over raw."""
    return OptionsBench(short_path, uds_server_disable=True)


async def test_raw_device_is_healthy_when_nothing_is_on_it(raw: OptionsBench) -> None:
    """A pool without socket and shared map attaches nothing, and does not mind what others have attached."""
    raw.xdp.foreign[10] = 4711
    async with raw.running(net("veth0", xdp_mode="native", xdp_prog_id=4711), "veth1"):
        await raw.at_rest()
        assert raw.health() == {"veth0": HEALTHY, "veth1": HEALTHY}
        assert raw.xdp.calls == []
        assert raw.xdp.descriptors() == []


async def test_raw_allocate_answers_with_names_alone_when_devices_are_there(raw: OptionsBench) -> None:
    """The container gets its devices' names and mounts nothing; there is no socket, no directory and no pin."""
    async with raw.running("veth0", "veth1"):
        answer = await raw.allocate(["veth1", "veth0"])
        assert dict(answer.container_responses[0].envs) == {"AFXDP_DEVICES_POOL": "veth1 veth0"}
        assert raw.mounts(answer) == []
        assert not raw.uds.exists()
        assert raw.xdp.pins == {}
        assert sorted(raw.pool.allocated()) == ["veth0", "veth1"]
        await raw.pre_start("veth0", "veth1")
        assert raw.xdp.descriptors() == []


@pytest.mark.parametrize("where", ["host", "pod"])
async def test_raw_device_is_taken_over_when_it_is_still_allocated(raw: OptionsBench, where: str) -> None:
    """kubelet knows best, also where there is nothing to be handed over, and wherever the device is."""
    async with raw.running("veth0"):
        await raw.allocate(["veth0"])
        raw.owned("veth0", pod="old")
        raw.tell("veth0")
        before = raw.pool.devices["veth0"].allocation
        raw.show(*(["veth0"] if where == "host" else []))
        await raw.allocate(["veth0"])
        assert raw.pool.devices["veth0"].allocation not in (None, before)
        assert raw.pool.devices["veth0"].owners == ()
        assert raw.health() == {"veth0": HEALTHY}


async def test_raw_device_is_released_when_kubelet_lists_it_no_more(raw: OptionsBench) -> None:
    """A raw device is free again at once where it is in the host, and gone where it is not."""
    async with raw.running("veth0", "veth1"):
        await raw.allocate(["veth0", "veth1"])
        raw.show("veth0")
        assert raw.health() == {"veth0": HEALTHY, "veth1": HEALTHY}
        release(raw)
        assert raw.pool.allocated() == []
        assert raw.health() == {"veth0": HEALTHY}
        raw.show("veth0", "veth1")
        await raw.allocate(["veth1"])


async def test_raw_devices_are_adopted_when_kubelet_lists_them_after_a_restart(raw: OptionsBench) -> None:
    """Without pins kubelet alone knows what pods have, in the host or away; the rest is free."""
    async with raw.running("veth0", "veth1", "veth2"):
        await raw.allocate(["veth0"], ["veth1"])
        raw.show("veth0", "veth2")
    raw.pool = raw.new_pool()
    async with raw.running("veth0", "veth2"):
        assert raw.pool.allocated() == []
        raw.tell("veth0", "veth1")
        assert raw.health() == dict.fromkeys(("veth0", "veth1", "veth2"), HEALTHY)
        assert sorted(raw.pool.allocated()) == ["veth0", "veth1"]
        assert raw.pool.devices["veth1"].owners == (Owner("default", "pod-x", "app"),)
        release(raw)
        assert raw.pool.allocated() == []
        assert raw.health() == {"veth0": HEALTHY, "veth2": HEALTHY}


async def test_raw_devices_are_adopted_when_kubelet_has_listed_nobody_first(raw: OptionsBench) -> None:
    """A kubelet that has just started lists no pod at all, which says nothing of what they have."""
    async with raw.running("veth0", prepared=False):
        raw.list_pods(trio.current_time(), empty=True)
        raw.tell("veth0", "veth1")
        assert sorted(raw.pool.allocated()) == ["veth0", "veth1"]


async def test_raw_device_is_not_adopted_when_it_was_allocated_meanwhile(raw: OptionsBench) -> None:
    """An answer that was asked for before an Allocate says nothing of it."""
    async with raw.running("veth0"):
        asked = trio.current_time()
        await raw.allocate(["veth0"])
        allocation = raw.pool.devices["veth0"].allocation
        raw.list_pods(asked - 1, "veth0")
        assert raw.pool.devices["veth0"].allocation is allocation
        assert raw.pool.devices["veth0"].owners == ()


async def test_device_is_adopted_when_kubelet_lists_it_after_a_reboot(short_path: Path) -> None:
    """A device in the host that kubelet lists and nobody has pinned is equipped for its pod, without an Allocate."""
    bench = OptionsBench(short_path)
    async with bench.running("veth0", "veth1"):
        bench.owned("veth0")
        bench.tell("veth0")
        assert bench.pool.allocated() == ["veth0"]
        await bench.at_rest()
        assert bench.health() == {"veth0": HEALTHY, "veth1": HEALTHY}
        assert bench.xdp.pinned_devices("pool") == ["veth0"]
        assert await bench.get_map("veth0") == bench.pinned("veth0")


async def test_device_is_adopted_when_it_is_away_after_a_reboot(short_path: Path) -> None:
    """A pod's device stays listed while it is neither here nor pinned; its container cannot start with it."""
    bench = OptionsBench(short_path)
    async with bench.running("veth1"):
        bench.tell("veth0")
        assert bench.health() == {"veth0": HEALTHY, "veth1": HEALTHY}
        with pytest.raises(RequestError, match=r"veth0: it is not in the host's .*; delete the pod"):
            await bench.pre_start("veth0")


# -- bpfMapPinningEnable -----------------------------------------------------------------------------------------------

DIRECTORY = "/tmp/afxdp_dp/veth0"
"""Of a device, in the pod."""


async def test_allocate_answers_with_the_map_when_there_is_no_socket(short_path: Path) -> None:
    """The pinned map alone is mounted, for the pod's user to read and write; there is no socket and no directory."""
    bench = OptionsBench(short_path, uds_server_disable=True, bpf_map_pinning_enable=True, uid=1500)
    async with bench.running("veth0"):
        assert bench.xdp.program(10)
        answer = await bench.allocate(["veth0"])
        assert bench.mounts(answer) == [(f"{DIRECTORY}/xsks_map", str(bench.map_path("veth0")), True)]
        assert bench.host.granted == [(bench.map_path("veth0"), 1500, 6)]
        assert not (bench.uds / "veth0").exists()
        await bench.pre_start("veth0")
        assert not (bench.uds / "veth0").exists()


async def test_allocate_answers_with_map_and_directory_when_there_is_a_socket_too(short_path: Path) -> None:
    """The map is mounted on an empty file in the socket's directory, which is mounted before it."""
    bench = OptionsBench(short_path, bpf_map_pinning_enable=True, uid=1500)
    async with bench.running("veth0"):
        answer = await bench.allocate(["veth0"])
        path, directory = bench.map_path("veth0"), bench.uds / "veth0"
        assert bench.mounts(answer) == [
            (DIRECTORY, str(directory), True),
            (f"{DIRECTORY}/xsks_map", str(path), True),
        ]
        assert sorted(os.listdir(directory)) == ["afxdp.sock", "xsks_map"]
        assert (directory / "xsks_map").stat().st_size == 0
        assert sorted(bench.host.granted) == sorted(
            [(path, 1500, 6), (directory, 1500, 5), (directory / "afxdp.sock", 1500, 6)]
        )
        bench.owned("veth0")
        assert await bench.get_map("veth0") == bench.pinned("veth0")
        (directory / "xsks_map").unlink()
        await bench.pre_start("veth0")
        assert (directory / "xsks_map").is_file()


async def test_allocate_grants_nothing_when_the_pool_has_no_user(short_path: Path) -> None:
    """Without uid the map is root's."""
    bench = OptionsBench(short_path, bpf_map_pinning_enable=True)
    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
        assert bench.host.granted == []


@pytest.mark.parametrize("socket", [False, True], ids=["alone", "and socket"])
@pytest.mark.parametrize("how", ["released", "taken over"])
async def test_next_pod_gets_a_fresh_map_when_the_last_one_had_it_as_a_file(
    short_path: Path, how: str, socket: bool
) -> None:
    """Nobody sees who opens the file, so its map is never given to another pod."""
    bench = OptionsBench(short_path, uds_server_disable=not socket, bpf_map_pinning_enable=True)
    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
        old = bench.pinned("veth0")
        if how == "released":
            release(bench)
            await bench.at_rest()
            assert_nothing_allocated(bench, "veth0")
        await bench.allocate(["veth0"])
        assert bench.pinned("veth0") != old


async def test_allocate_rolls_back_when_the_map_cannot_be_granted(short_path: Path) -> None:
    """A map that the pod's user could not open is not handed over, and neither is any other device."""
    bench = OptionsBench(short_path, uds_server_disable=True, bpf_map_pinning_enable=True, uid=1500)
    async with bench.running("veth0", "veth1"):
        bench.host.error = OSError(errno.EPERM, "Operation not permitted")
        with pytest.raises(OSError, match="not permitted"):
            await bench.allocate(["veth0"], ["veth1"])
        await bench.at_rest()
        assert_nothing_allocated(bench, "veth0", "veth1")


async def test_map_stays_its_pods_users_when_the_uid_changed_before_a_restart(short_path: Path) -> None:
    """A running pod keeps its user's access to the map, whatever the configuration says now."""
    bench = OptionsBench(short_path, uds_server_disable=True, bpf_map_pinning_enable=True, uid=1500)
    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
        pinned = bench.pinned("veth0")
    bench.configure(uid=1600)
    bench.pool = bench.new_pool()
    async with bench.running("veth0"):
        assert bench.pinned("veth0") == pinned
        await bench.pre_start("veth0")
        assert bench.pinned("veth0") != pinned, "the container has started before, for all that is known"
        assert bench.host.user_of(bench.map_path("veth0")) == 1500


# -- udsFuzz -----------------------------------------------------------------------------------------------------------


async def test_fuzz_is_bounded_and_counted_when_a_device_is_allocated(
    short_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Each new socket is asked so many random things; seed and replies go to the log, and nothing stays open."""
    bench = OptionsBench(short_path, uds_fuzz=True)
    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
        bench.owned("veth0")
        before = open_fds()
        async with connected(bench.path("veth0")) as session:
            assert await session.ask(b"/connect,pod-x") == b"/host_ok"
            for _ in range(20):
                await trio.sleep(1)
                assert await session.ask(b"/version") == b"0.1"
            assert await session.ask_map("veth0") == bench.pinned("veth0")
        lines = [record.getMessage() for record in caplog.records if "udsFuzz" in record.message]
        assert len(lines) == 2
        assert re.fullmatch(rf"{RESOURCE}: veth0: udsFuzz: {FUZZ_REQUESTS} random requests, seed \d+", lines[0])
        replies = lines[1].partition("done: ")[2].split(", ")
        assert sum(int(reply.split()[0]) for reply in replies) == FUZZ_REQUESTS
        assert {"/nak", "/host_nak", "0.1", "/fd_nak"} <= {reply.split()[1] for reply in replies}
        # Its own end has gone; what is missing of `before` is what it had open then.
        await eventually(lambda: open_fds().items() <= before.items())
    assert not any("bug" in record.message for record in caplog.records)


async def test_fuzz_ends_when_its_device_is_released(
    short_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A socket that goes takes its questions along, in the middle of them."""
    bench = OptionsBench(short_path, uds_fuzz=True)
    async with bench.running("veth0"):
        before = open_fds()
        await bench.allocate(["veth0"])
        await trio.sleep(0.5)
        release(bench)
        await eventually(lambda: open_fds() == before)
    assert sum("udsFuzz" in record.message for record in caplog.records) == 1


def test_random_requests_are_the_same_when_the_seed_is() -> None:
    """A seed from the log repeats its requests; none of them ends the conversation, and some mean something."""
    one, other = random.Random(7), random.Random(7)
    packets = [random_request(one) for _ in range(5000)]
    assert packets == [random_request(other) for _ in range(5000)]
    requests = [parse_request(packet, connected=True) for packet in packets]
    assert not any(isinstance(request, Fin) for request in requests)
    assert {type(request).__name__ for request in requests} >= {"Connect", "GetVersion", "GetXskMap", "Malformed"}


# -- Other options while the pool runs ---------------------------------------------------------------------------------


@pytest.fixture
def bench(short_path: Path) -> OptionsBench:
    """A pool with a socket and nothing else."""
    return OptionsBench(short_path)


async def test_options_count_from_the_next_allocation_on_when_they_change(bench: OptionsBench) -> None:
    """What a pod was given stays as it was, also when it is looked after; the next one gets what is said now."""
    async with bench.running("veth0", "veth1"):
        await bench.allocate(["veth0"])
        bench.configure(bpf_map_pinning_enable=True, uid=1500, ethtool_cmds=("-K -device- gro off",))
        assert isinstance(bench.pool.config, PoolOptions)
        assert bench.pool.uid == 1500
        await bench.at_rest()
        await bench.pre_start("veth0")
        assert os.listdir(bench.uds / "veth0") == ["afxdp.sock"]
        assert bench.host.granted == []
        assert bench.ethtool.ran == []
        answer = await bench.allocate(["veth1"])
        assert [path for path, _, _ in bench.mounts(answer)] == [
            "/tmp/afxdp_dp/veth1",
            "/tmp/afxdp_dp/veth1/xsks_map",
        ]
        assert {uid for _, uid, _ in bench.host.granted} == {1500}
        assert bench.ethtool.ran == ["-K veth1 gro off"]
        answer = await bench.allocate(["veth0"])
        assert len(bench.mounts(answer)) == 2


async def test_timeout_counts_from_the_next_allocation_on_when_it_changes(
    short_path: Path, mock_clock: MockClock
) -> None:
    """Connections of a pod that may be silent for ever stay open when another timeout is said."""
    bench = OptionsBench(short_path, uds_timeout=-1)
    async with bench.running("veth0", "veth1"):
        await bench.allocate(["veth0"])
        bench.configure(uds_timeout=30)
        await bench.allocate(["veth1"])
        bench.owned("veth0", "veth1")
        async with connected(bench.path("veth0")) as old, connected(bench.path("veth1")) as new:
            for session in (old, new):
                assert await session.ask(b"/connect,pod-x") == b"/host_ok"
            await wait_all_tasks_blocked()
            mock_clock.jump(31)
            assert await new.is_over()
            assert await old.ask(b"/version") == b"0.1"


async def test_programs_go_and_come_when_the_socket_is_switched_off_and_on(bench: OptionsBench) -> None:
    """Free devices lose and get their program at once, and are healthy with and without; a pod keeps what it has."""
    async with bench.running("veth0", "veth1"):
        await bench.allocate(["veth0"])
        bench.owned("veth0")
        program, old_map = bench.xdp.program(10), await bench.get_map("veth0")
        bench.configure(uds_server_disable=True)
        assert bench.health() == {"veth0": HEALTHY, "veth1": HEALTHY}
        await bench.at_rest()
        assert bench.xdp.program(11) == 0
        assert len(bench.xdp.descriptors()) == 2
        assert bench.xdp.program(10) == program
        assert await bench.get_map("veth0") == old_map
        answer = await bench.allocate(["veth1"])
        assert bench.mounts(answer) == []
        bench.configure(uds_server_disable=False)
        await bench.at_rest()
        assert bench.xdp.program(11) == 0, "a raw device got a program under its pod"
        assert bench.health() == {"veth0": HEALTHY, "veth1": HEALTHY}
        assert bench.xdp.program(10) == program
        release(bench, "veth0")
        await bench.at_rest()
        assert bench.xdp.program(11)
        assert bench.ready("veth0", "veth1")()
        await bench.allocate(["veth1"])
        assert bench.path("veth1").is_socket()


async def test_device_loses_its_program_when_it_is_released_into_a_raw_pool(bench: OptionsBench) -> None:
    """What was allocated with a program and comes back to a pool without is free, healthy and bare."""
    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
        bench.configure(uds_server_disable=True)
        release(bench)
        await bench.at_rest()
        assert bench.health() == {"veth0": HEALTHY}
        assert bench.xdp.descriptors() == []
        assert bench.mounts(await bench.allocate(["veth0"])) == []


@pytest.mark.parametrize("switch", ["off", "on"])
async def test_allocate_goes_by_what_is_said_now_when_it_comes_at_once(short_path: Path, switch: str) -> None:
    """An Allocate right after the change waits for the device to be as it has to be now."""
    bench = OptionsBench(short_path, uds_server_disable=switch == "on")
    async with bench.running("veth0"):
        bench.configure(uds_server_disable=switch == "off")
        answer = await bench.allocate(["veth0"])
        assert len(bench.mounts(answer)) == (switch == "on")
        assert (bench.xdp.program(10) != 0) == (switch == "on")


async def test_allocate_goes_by_what_is_said_now_when_it_changes_under_it(bench: OptionsBench) -> None:
    """A device that was just made ready for other options is made ready once more."""
    bench.xdp.gate.clear()
    answers = []

    async def allocate() -> None:
        answers.append(await bench.allocate(["veth0"]))

    async with bench.running("veth0", prepared=False), trio.open_nursery() as nursery:
        nursery.start_soon(allocate)
        await eventually(bench.xdp.attaching.is_set)
        bench.configure(uds_server_disable=True)
        bench.xdp.gate.set()
        await eventually(lambda: not nursery.child_tasks)
        assert bench.mounts(answers[0]) == []
        assert bench.xdp.descriptors() == []
        assert bench.health() == {"veth0": HEALTHY}


# -- Pools that are configured no more, and again ----------------------------------------------------------------------


@pytest.mark.parametrize("holds", [False, True], ids=["nothing", "a device"])
async def test_resource_goes_and_comes_when_the_pool_is_retired_and_wanted_again(
    bench: OptionsBench, holds: bool
) -> None:
    """It leaves kubelet at once, keeps what pods have and nothing else; wanted again, it registers and is as before."""
    kubelet = FakeKubelet(bench.directory / "kubelet")
    rules = bench.config
    async with trio.open_nursery() as nursery:
        await nursery.start(kubelet.serve)
        async with bench.running("veth0", "veth1"):
            assert (await kubelet.registered.receive()).resource_name == RESOURCE
            if holds:
                await bench.allocate(["veth0"])
                bench.owned("veth0")
                old_map = await bench.get_map("veth0")
            bench.scanner.configure(PluginConfig(pools=()))
            bench.pool.reconfigure(None)
            assert bench.pool.config is None
            assert bench.health() == ({"veth0": HEALTHY} if holds else {})
            await eventually(lambda: not bench.pool.socket_path.exists())
            await bench.at_rest()
            assert bench.xdp.program(11) == 0
            assert len(bench.xdp.descriptors()) == (2 if holds else 0)
            if holds:
                assert await bench.get_map("veth0") == old_map
                await bench.pre_start("veth0")
            bench.scanner.configure(rules)
            bench.pool.reconfigure(bench.scanner.pools["pool"])
            assert (await kubelet.registered.receive()).resource_name == RESOURCE
            await eventually(bench.ready("veth0", "veth1"))
            assert bench.pool.allocated() == (["veth0"] if holds else [])
            if holds:
                assert await bench.get_map("veth0") == old_map
            await bench.allocate(["veth1"])
        nursery.cancel_scope.cancel()


async def test_pool_is_as_before_when_it_is_retired_and_wanted_again_at_once(bench: OptionsBench) -> None:
    """Two reloads one after the other lose no device: nobody may have noticed that there were two."""
    rules = bench.config
    async with bench.running("veth0", "veth1"):
        await bench.allocate(["veth0"])
        bench.scanner.configure(PluginConfig(pools=()))
        bench.pool.reconfigure(None)
        bench.scanner.configure(rules)
        bench.pool.reconfigure(bench.scanner.pools["pool"])
        await eventually(bench.ready("veth0", "veth1"))
        await bench.at_rest()
        assert bench.xdp.program(11)


async def test_device_is_forgotten_when_it_is_released_from_a_retired_pool(bench: OptionsBench) -> None:
    """What comes back to a pool that is configured no more is bare, and nobody's."""
    async with bench.running("veth0", "veth1"):
        await bench.allocate(["veth0"], ["veth1"])
        bench.scanner.configure(PluginConfig(pools=()))
        bench.pool.reconfigure(None)
        bench.show("veth0")
        release(bench, "veth1")
        await bench.at_rest()
        assert bench.health() == {"veth1": HEALTHY}
        await eventually(lambda: bench.xdp.program(10) == 0 and len(bench.xdp.descriptors()) == 2)


# -- The scanner -------------------------------------------------------------------------------------------------------


class Scanning:
    """A scanner at work: what it notifies of, and what pods have."""

    def __init__(self, directory: Path, config: PluginConfig, *devices: NetDevice) -> None:
        self.network = FakeNetwork()
        self.network.show(*devices)
        self.allocated: dict[str, str] = {}
        self.scanner = PoolScanner(
            config, self.network, FakeHost(), allocated=lambda: self.allocated, sysfs=directory / "sys"
        )
        self.notifier = Notifier()

    async def wait(self) -> dict[str, list[str]]:
        """The next tree: pool → names."""
        with trio.fail_after(10):
            tree = await self.notifier.wait_changed()
        return {pool: list(devices) for pool, devices in tree.items()}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The scanner at work."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.scanner.scan, self.notifier)
            yield
            nursery.cancel_scope.cancel()


async def test_scanner_tells_other_pools_when_it_is_configured_anew(short_path: Path) -> None:
    """Pools come, and change what they take; one that is configured no more stays, without devices."""
    scanning = Scanning(short_path, config_of(a=("veth0",), b=("veth1",)), net("veth0"), net("veth1"))
    async with scanning.running():
        assert await scanning.wait() == {"a": ["veth0"], "b": ["veth1"]}
        scanning.scanner.configure(config_of(b=("veth0",), c=("veth1",)))
        assert list(scanning.scanner.pools) == ["b", "c"]
        assert await scanning.wait() == {"a": [], "b": ["veth0"], "c": ["veth1"]}
        scanning.scanner.configure(config_of(a=("veth0",)))
        assert await scanning.wait() == {"a": ["veth0"], "b": [], "c": []}


async def test_scanner_leaves_a_device_with_its_pool_when_a_pod_has_it(short_path: Path) -> None:
    """A device that another pool claims now goes there when its pod has gone, and somebody says so."""
    scanning = Scanning(short_path, config_of(a=("veth0", "veth1")), net("veth0"), net("veth1"))
    async with scanning.running():
        assert await scanning.wait() == {"a": ["veth0", "veth1"]}
        scanning.allocated = {"veth0": "a"}
        scanning.scanner.configure(config_of(b=("veth0", "veth1")))
        assert await scanning.wait() == {"a": ["veth0"], "b": ["veth1"]}
        scanning.allocated = {}
        scanning.scanner.refresh()
        assert await scanning.wait() == {"a": [], "b": ["veth0", "veth1"]}


async def test_scanner_tells_a_pool_when_only_pods_know_it(short_path: Path) -> None:
    """What an earlier daemon has left to pods is a pool, configured or not, with what is here of it."""
    scanning = Scanning(short_path, config_of(a=("veth0",)), net("veth0"), net("veth1"))
    scanning.allocated = {"veth1": "old", "veth2": "old"}
    async with scanning.running():
        assert await scanning.wait() == {"a": ["veth0"], "old": ["veth1"]}
        scanning.network.show(net("veth0"), net("veth1"), net("veth2"))
        assert await scanning.wait() == {"a": ["veth0"], "old": ["veth1", "veth2"]}


async def test_scanner_keeps_quiet_when_it_has_seen_nothing_yet(short_path: Path) -> None:
    """Before the first look at the host there is nothing to be told, whatever the configuration says."""
    scanning = Scanning(short_path, config_of(a=("veth0",)), net("veth0"))
    scanning.scanner.refresh()
    scanning.scanner.configure(config_of(b=("veth0",)))
    async with scanning.running():
        assert await scanning.wait() == {"b": ["veth0"]}


# -- The CNI lets go ---------------------------------------------------------------------------------------------------


def past_hold_off(clock: MockClock) -> None:
    """Lets the time pass in which nothing is made of a device."""
    clock.jump(HOLD_OFF + 0.1)


async def test_free_device_is_bare_for_a_while_when_the_cni_lets_go_of_it(
    bench: OptionsBench, mock_clock: MockClock
) -> None:
    """Program and all are off when the call returns, and are made again only when the CNI has had its time."""
    async with bench.running("veth0", "veth1"):
        assert await bench.pool.let_go("veth0")
        assert bench.xdp.program(10) == 0
        mock_clock.jump(HOLD_OFF - 0.1)
        await bench.at_rest()
        assert bench.xdp.program(10) == 0
        mock_clock.jump(0.2)
        await eventually(bench.ready("veth0", "veth1"))


async def test_device_is_released_at_once_when_the_cni_lets_go_of_it(
    bench: OptionsBench, mock_clock: MockClock
) -> None:
    """Its pod is not listed any more: session, socket, pins and program are gone with the call, then it is as new."""
    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
        bench.owned("veth0")
        async with connected(bench.path("veth0")) as session:
            assert await session.ask(b"/connect,pod-x") == b"/host_ok"
            old_map = await session.ask_map("veth0")
            bench.show()
            bench.show("veth0")
            bench.pod_resources.view = PodView(owners={}, asked_at=0.0, empty=False)
            assert await bench.pool.let_go("veth0")
            assert bench.xdp.descriptors() == []
            assert bench.xdp.program(10) == 0
            assert bench.xdp.pins == {}
            assert not (bench.uds / "veth0").exists()
            assert await session.is_over()
        past_hold_off(mock_clock)
        await eventually(bench.ready("veth0"))
        await bench.at_rest()
        assert_nothing_allocated(bench, "veth0")
        await bench.allocate(["veth0"])
        assert bench.pinned("veth0") != old_map


async def test_nothing_happens_when_the_cni_lets_go_of_what_is_no_device_of_the_pool(bench: OptionsBench) -> None:
    """The CNI does not know which pool has a device: it is told no more than that this one has not."""
    async with bench.running("veth0"):
        assert not await bench.pool.let_go("veth9")
        assert bench.ready("veth0")()


async def test_cni_may_let_go_twice_when_it_does_so(bench: OptionsBench, mock_clock: MockClock) -> None:
    """The second time is as the first, and the while begins anew."""
    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
        bench.tell("veth0")
        assert await bench.pool.let_go("veth0")
        mock_clock.jump(HOLD_OFF - 1)
        assert await bench.pool.let_go("veth0")
        assert bench.xdp.program(10) == 0
        mock_clock.jump(HOLD_OFF - 1)
        await bench.at_rest()
        assert bench.xdp.program(10) == 0
        past_hold_off(mock_clock)
        await eventually(bench.ready("veth0"))


async def test_cni_waits_when_the_device_is_worked_on(bench: OptionsBench, mock_clock: MockClock) -> None:
    """A program that is just being attached is off when the call returns."""
    bench.xdp.gate.clear()
    async with bench.running("veth0", prepared=False), trio.open_nursery() as nursery:
        await eventually(bench.xdp.attaching.is_set)
        nursery.start_soon(bench.pool.let_go, "veth0")
        await wait_all_tasks_blocked()
        assert nursery.child_tasks
        bench.xdp.gate.set()
        await eventually(lambda: not nursery.child_tasks)
        assert bench.xdp.descriptors() == []
        past_hold_off(mock_clock)
        await eventually(bench.ready("veth0"))


async def test_allocate_waits_when_the_cni_has_let_go_of_the_device(bench: OptionsBench, mock_clock: MockClock) -> None:
    """A pod that comes meanwhile is answered when the while is over, with a device that is as it has to be."""
    async with bench.running("veth0"), trio.open_nursery() as nursery:
        await bench.allocate(["veth0"])
        bench.tell("veth0")
        await bench.pool.let_go("veth0")
        nursery.start_soon(bench.allocate, ["veth0"])
        await wait_all_tasks_blocked()
        mock_clock.jump(HOLD_OFF - 0.1)
        await wait_all_tasks_blocked()
        assert nursery.child_tasks
        assert bench.xdp.descriptors() == []
        mock_clock.jump(0.2)
        await eventually(lambda: not nursery.child_tasks)
        assert bench.xdp.pinned_devices("pool") == ["veth0"]
        assert bench.xdp.program(10)


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "not listed yet"])
async def test_next_pod_keeps_the_device_when_the_cni_lets_go_for_the_last_one(
    bench: OptionsBench, mock_clock: MockClock, listed: bool
) -> None:
    """A device that kubelet has given away again stays allocated, without a program until the CNI is done with it."""
    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
        bench.owned("veth0", pod="old")
        bench.tell("veth0")
        await bench.allocate(["veth0"])
        if listed:
            bench.owned("veth0", pod="new")
            mock_clock.jump(1000)
        else:
            bench.pod_resources.view = PodView(owners={}, asked_at=0.0, empty=False)
        assert await bench.pool.let_go("veth0")
        assert bench.xdp.program(10) == 0
        assert bench.pool.allocated() == ["veth0"]
        assert bench.health() == {"veth0": HEALTHY}
        assert bench.path("veth0").is_socket()
        past_hold_off(mock_clock)
        await eventually(lambda: bench.xdp.program(10) != 0)
        await bench.at_rest()
        assert bench.xdp.pinned_devices("pool") == ["veth0"]
        bench.owned("veth0", pod="new")
        assert await bench.get_map("veth0", hostname="new") == bench.pinned("veth0")


class SlowPodResources(FakePodResources):
    """A kubelet that lists nothing, and takes its time to say so."""

    def __init__(self) -> None:
        super().__init__()
        self.question, self.answer = trio.Event(), trio.Event()

    async def ask(self) -> PodView:
        """See PodResources.ask."""
        self.question.set()
        await self.answer.wait()
        return PodView(owners={}, asked_at=trio.current_time(), empty=False)


async def test_next_pod_keeps_the_device_when_it_comes_while_kubelet_is_asked(
    bench: OptionsBench, mock_clock: MockClock
) -> None:
    """An Allocate that arrives while the CNI waits for kubelet's answer is for another pod than the one that ends."""
    bench.pod_resources = kubelet = SlowPodResources()
    bench.pool = bench.new_pool()
    async with bench.running("veth0"), trio.open_nursery() as nursery:
        await bench.allocate(["veth0"])
        bench.tell("veth0")
        mock_clock.jump(SOON)
        nursery.start_soon(bench.pool.let_go, "veth0")
        await kubelet.question.wait()
        await bench.allocate(["veth0"])
        kubelet.answer.set()
        await eventually(lambda: not nursery.child_tasks)
        assert bench.pool.allocated() == ["veth0"]
        assert bench.path("veth0").is_socket()
        past_hold_off(mock_clock)
        await eventually(lambda: bench.xdp.pinned_devices("pool") == ["veth0"])


async def test_cni_waits_when_work_on_the_device_begins_while_kubelet_is_asked(
    bench: OptionsBench, mock_clock: MockClock
) -> None:
    """Also a program that was attached for the next pod meanwhile is off when the call returns."""
    bench.pod_resources = kubelet = SlowPodResources()
    bench.pool = bench.new_pool()
    async with bench.running("veth0"), trio.open_nursery() as nursery:
        await bench.allocate(["veth0"])
        bench.tell("veth0")
        gone = trio.Event()

        async def let_go() -> None:
            await bench.pool.let_go("veth0")
            gone.set()

        nursery.start_soon(let_go)
        await kubelet.question.wait()
        bench.xdp.gate.clear()
        bench.xdp.attaching.clear()
        bench.xdp.destroy(10)
        bench.show(net("veth0", ifindex=20))
        nursery.start_soon(bench.allocate, ["veth0"])
        await eventually(bench.xdp.attaching.is_set)
        kubelet.answer.set()
        await wait_all_tasks_blocked()
        assert not gone.is_set()
        bench.xdp.gate.set()
        await eventually(gone.is_set)
        assert bench.xdp.program(20) == 0
        past_hold_off(mock_clock)
        await eventually(lambda: bench.xdp.pinned_devices("pool") == ["veth0"])
        await eventually(lambda: not nursery.child_tasks)
        assert bench.pool.allocated() == ["veth0"]
        assert bench.xdp.program(20)


async def test_restored_device_is_released_when_the_cni_lets_go_before_kubelet_has_spoken(
    bench: OptionsBench, mock_clock: MockClock
) -> None:
    """After a restart a device that kubelet does not list is the last pod's, however young the daemon is."""
    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
    bench.pool = bench.new_pool()
    async with bench.running("veth0"):
        assert await bench.pool.let_go("veth0")
        assert bench.pool.allocated() == []
        assert bench.xdp.pins == {}


@pytest.mark.parametrize("how", ["refuses", "hangs"])
async def test_device_is_released_when_the_cni_lets_go_and_kubelet_does_not_answer(
    bench: OptionsBench, mock_clock: MockClock, how: str
) -> None:
    """Whoever calls has to go on: without an answer in time the CNI is believed."""
    async with bench.running("veth0"), trio.open_nursery() as nursery:
        await bench.allocate(["veth0"])
        bench.owned("veth0")
        bench.tell("veth0")
        bench.pod_resources.error = RpcError("UNAVAILABLE", "kubelet is away")
        bench.pod_resources.BUSY = 0.1 if how == "refuses" else 1000.0
        nursery.start_soon(bench.pool.let_go, "veth0")
        await wait_all_tasks_blocked()
        mock_clock.jump(0.2 if how == "refuses" else OWNER_TIMEOUT + 0.1)
        await eventually(lambda: not nursery.child_tasks)
        assert bench.pool.allocated() == []
        assert bench.xdp.descriptors() == []


async def test_device_stays_bare_when_it_is_back_only_after_the_cni_has_let_go(
    bench: OptionsBench, mock_clock: MockClock
) -> None:
    """The CNI's call may overtake netlink: a device that shows up right afterwards is held off as well."""
    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
        bench.owned("veth0")
        bench.tell("veth0")
        bench.show()
        bench.pod_resources.view = PodView(owners={}, asked_at=0.0, empty=False)
        assert await bench.pool.let_go("veth0")
        bench.show("veth0")
        await bench.at_rest()
        assert bench.xdp.program(10) == 0
        past_hold_off(mock_clock)
        await eventually(bench.ready("veth0"))


# -- ethtoolCmds -------------------------------------------------------------------------------------------------------

COMMANDS = ("-K -device- gro off", "-N -device- rule -ip-", "-G -device- rx 512")
REFUSED = OSError(errno.EIO, "netlink error: Operation not supported", "ethtool")


@pytest.fixture
def tuned(short_path: Path) -> OptionsBench:
    """A pool with ethtool commands, of which only the CNI can run one."""
    return OptionsBench(short_path, ethtool_cmds=COMMANDS)


def undo_files(bench: OptionsBench) -> list[str]:
    """The devices for which something is kept that is to be undone."""
    directory = bench.directory / "uds" / ".ethtool" / "pool"
    return sorted(os.listdir(directory)) if directory.exists() else []


async def test_commands_run_in_their_order_when_a_device_is_allocated(
    tuned: OptionsBench, caplog: pytest.LogCaptureFixture
) -> None:
    """Each has the device's name in it; one that needs the pod's address is left out, which the log says."""
    async with tuned.running("veth0", "veth1"):
        assert tuned.pool.ethtool_filters == COMMANDS
        assert tuned.ethtool.ran == []
        await tuned.allocate(["veth1"])
        assert tuned.ethtool.ran == ["-K veth1 gro off", "-G veth1 rx 512"]
        assert undo_files(tuned) == ["veth1"]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    left_out = "ethtool -N -device- rule -ip- is left out: only the CNI knows the address"
    assert [text for text in warnings if "ethtool" in text] == [f"{RESOURCE}: veth1: {left_out}"]


async def test_commands_are_undone_when_the_device_is_released(tuned: OptionsBench) -> None:
    """The newest comes first; afterwards the device is free and nothing is kept."""
    async with tuned.running("veth0"):
        await tuned.allocate(["veth0"])
        tuned.ethtool.ran.clear()
        tuned.show()
        tuned.show("veth0")
        await tuned.at_rest()
        assert tuned.ethtool.ran == []
        release(tuned)
        await tuned.at_rest()
        assert tuned.ethtool.ran == ["-G veth0 rx default", "-K veth0 gro default"]
        assert undo_files(tuned) == []
        assert_nothing_allocated(tuned, "veth0")


async def test_commands_are_undone_first_when_the_device_is_taken_over(tuned: OptionsBench) -> None:
    """The next pod's device is set up from the beginning, and what undoes that is kept once."""
    async with tuned.running("veth0"):
        await tuned.allocate(["veth0"])
        tuned.configure(ethtool_cmds=("-K -device- lro on",))
        tuned.ethtool.ran.clear()
        await tuned.allocate(["veth0"])
        assert tuned.ethtool.ran == ["-G veth0 rx default", "-K veth0 gro default", "-K veth0 lro on"]
        release(tuned)
        await tuned.at_rest()
        assert tuned.ethtool.ran[3:] == ["-K veth0 lro default"]


async def test_commands_are_left_out_when_the_device_is_still_with_its_last_pod(
    tuned: OptionsBench, caplog: pytest.LogCaptureFixture
) -> None:
    """What is in another namespace cannot be set up from here; that is said, and what was set before is kept."""
    async with tuned.running("veth0"):
        await tuned.allocate(["veth0"])
        tuned.show()
        tuned.ethtool.ran.clear()
        await tuned.allocate(["veth0"])
        assert tuned.ethtool.ran == []
        assert undo_files(tuned) == ["veth0"]
    assert "-K -device- gro off is left out: the device is still with its last pod" in caplog.text


async def test_allocate_rolls_back_when_a_command_fails(tuned: OptionsBench) -> None:
    """No device of the request is handed over, and what was set on any of them is undone; then it can succeed."""
    async with tuned.running("veth0", "veth1"):
        tuned.ethtool.errors["-G veth1 rx 512"] = REFUSED
        with pytest.raises(RequestError, match=r"veth1: ethtoolCmds: '-G -device- rx 512': .*not supported"):
            await tuned.allocate(["veth0"], ["veth1"])
        await tuned.at_rest()
        assert_nothing_allocated(tuned, "veth0", "veth1")
        assert set(tuned.ethtool.settings.values()) == {"default"}
        assert undo_files(tuned) == []
        tuned.ethtool.errors.clear()
        await tuned.allocate(["veth0"], ["veth1"])


async def test_commands_are_undone_when_the_device_cannot_be_handed_over(tuned: OptionsBench) -> None:
    """What fails after the commands rolls them back as well."""
    async with tuned.running("veth0"):
        tuned.xdp.errors["pin", "veth0"] = OSError(errno.ENOSPC, "No space left on device")
        with pytest.raises(OSError, match="No space"):
            await tuned.allocate(["veth0"])
        del tuned.xdp.errors["pin", "veth0"]
        await tuned.at_rest()
        assert set(tuned.ethtool.settings.values()) == {"default"}
        assert_nothing_allocated(tuned, "veth0")


async def test_commands_are_undone_when_the_device_is_released_after_a_restart(tuned: OptionsBench) -> None:
    """What undoes them outlives the daemon, and is left alone as long as the pod has its device."""
    async with tuned.running("veth0"):
        await tuned.allocate(["veth0"])
    tuned.pool = tuned.new_pool()
    tuned.ethtool.ran.clear()
    async with tuned.running("veth0"):
        tuned.tell("veth0")
        await tuned.pre_start("veth0")
        await tuned.at_rest()
        assert tuned.ethtool.ran == []
        release(tuned)
        await tuned.at_rest()
        assert tuned.ethtool.ran == ["-G veth0 rx default", "-K veth0 gro default"]


async def test_commands_are_undone_when_nobody_has_the_device_after_a_crash(tuned: OptionsBench) -> None:
    """A daemon that died in an Allocate leaves what it set to the next one."""
    async with tuned.running("veth0"):
        await tuned.allocate(["veth0"])
        tuned.xdp.pins.clear()  # as if it had never got so far
    tuned.pool = tuned.new_pool()
    async with tuned.running("veth0", prepared=False):
        tuned.tell()
        await tuned.at_rest()
        assert tuned.health() == {"veth0": HEALTHY}
        assert set(tuned.ethtool.settings.values()) == {"default"}
        assert undo_files(tuned) == []


@pytest.mark.parametrize("restart", [True, False], ids=["restarted", "crashed"])
async def test_commands_are_not_undone_when_a_raw_devices_pod_is_not_known_yet(short_path: Path, restart: bool) -> None:
    """When it begins again only kubelet knows who has a raw device: nothing is done to it before kubelet has spoken."""
    raw = OptionsBench(short_path, uds_server_disable=True, ethtool_cmds=COMMANDS)
    async with raw.running("veth0", "veth1"):
        await raw.allocate(["veth0"], ["veth1"])
    if restart:
        raw.pool = raw.new_pool()
    raw.ethtool.ran.clear()
    async with raw.running("veth0", "veth1", prepared=False):
        await raw.at_rest()
        assert raw.ethtool.ran == []
        raw.tell("veth0")
        await raw.at_rest()
        assert raw.ethtool.ran == ["-G veth1 rx default", "-K veth1 gro default"]


async def test_commands_are_undone_only_when_the_device_is_back(short_path: Path) -> None:
    """Nothing can be undone in another namespace; once the device is in the host again it is, whoever had it."""
    raw = OptionsBench(short_path, uds_server_disable=True, ethtool_cmds=COMMANDS)
    async with raw.running("veth0"):
        await raw.allocate(["veth0"])
        raw.show()
        raw.ethtool.ran.clear()
        release(raw)
        await raw.at_rest()
        assert raw.health() == {}
        assert raw.ethtool.ran == []
        raw.show("veth0")
        await raw.at_rest()
        assert raw.ethtool.ran == ["-G veth0 rx default", "-K veth0 gro default"]


async def test_commands_are_undone_when_the_pool_is_retired_meanwhile(tuned: OptionsBench) -> None:
    """A pool that is configured no more cleans up what its last pod leaves, and then forgets the device."""
    async with tuned.running("veth0"):
        await tuned.allocate(["veth0"])
        tuned.scanner.configure(PluginConfig(pools=()))
        tuned.pool.reconfigure(None)
        release(tuned)
        await eventually(lambda: tuned.health() == {})
        assert set(tuned.ethtool.settings.values()) == {"default"}
        assert undo_files(tuned) == []


async def test_device_is_unhealthy_when_its_commands_cannot_be_undone(
    tuned: OptionsBench, mock_clock: MockClock
) -> None:
    """No pod gets a device as the last one left it; the reason is told, and it is tried again."""
    async with tuned.running("veth0"):
        await tuned.allocate(["veth0"])
        tuned.ethtool.errors["-K veth0 gro default"] = REFUSED
        release(tuned)
        await tuned.at_rest()
        assert tuned.health() == {"veth0": UNHEALTHY}
        assert "Operation not supported" in tuned.reason("veth0")
        with pytest.raises((OSError, RequestError), match="Operation not supported"):
            await tuned.allocate(["veth0"])
        assert tuned.pool.allocated() == []
        tuned.ethtool.errors.clear()
        for _ in range(3):
            mock_clock.jump(10)
            await tuned.at_rest()
        assert_nothing_allocated(tuned, "veth0")
        assert undo_files(tuned) == []


async def test_commands_are_undone_after_a_while_when_the_cni_lets_go(
    tuned: OptionsBench, mock_clock: MockClock
) -> None:
    """While the CNI is at work on a device nobody else is."""
    async with tuned.running("veth0"):
        await tuned.allocate(["veth0"])
        tuned.owned("veth0")
        tuned.tell("veth0")
        tuned.pod_resources.view = PodView(owners={}, asked_at=0.0, empty=False)
        tuned.ethtool.ran.clear()
        await tuned.pool.let_go("veth0")
        await tuned.at_rest()
        assert tuned.ethtool.ran == []
        past_hold_off(mock_clock)
        await eventually(lambda: tuned.ethtool.ran == ["-G veth0 rx default", "-K veth0 gro default"])


# -- cdq: subfunctions -------------------------------------------------------------------------------------------------

PCI = "0000:4b:00.1"
NIC = NetDevice(name="ens1", ifindex=5, queues=8, driver="ice", bus="pci", pci=PCI)
PARTS = ("ens1sf1", "ens1sf2")


@pytest.fixture
def cdq(short_path: Path) -> OptionsBench:
    """A pool of two subfunctions of a NIC."""
    return OptionsBench(short_path, mode="cdq", devices=(DeviceConfig(name="ens1", secondary=2),))


@asynccontextmanager
async def dividing(bench: OptionsBench, *devices: NetDevice) -> AsyncIterator[None]:
    """The pool at work on a host with the NIC, and perhaps more; its subfunctions are healthy."""
    async with bench.running(NIC, *devices, prepared=False):
        await eventually(bench.ready(*PARTS))
        await bench.at_rest()
        yield


def assert_nothing_made(bench: OptionsBench) -> None:
    """No subfunction is there, nor a trace of one in the host, in the pins or in open files."""
    assert bench.devlink.numbers() == []
    assert list(bench.network.devices()) == ["ens1"]
    assert bench.xdp.pins == {}
    assert bench.xdp.descriptors() == []
    assert bench.pool.allocated() == []


async def test_subfunctions_are_healthy_when_none_has_been_made(cdq: OptionsBench) -> None:
    """What can be made is offered under the name that it will have; nothing is made ahead, the NIC is left alone."""
    async with dividing(cdq):
        assert cdq.pool.mode == "cdq"
        assert cdq.devlink.calls == []
        assert cdq.xdp.calls == []


async def test_subfunction_is_made_when_it_is_allocated(cdq: OptionsBench) -> None:
    """Its network device gets the name that kubelet knows, and is handed over as any other."""
    async with dividing(cdq):
        answer = await cdq.allocate(["ens1sf2"])
        assert dict(answer.container_responses[0].envs) == {"AFXDP_DEVICES_POOL": "ens1sf2"}
        assert cdq.mounts(answer) == [("/tmp/afxdp_dp/ens1sf2", str(cdq.uds / "ens1sf2"), True)]
        assert cdq.devlink.calls == [("add", 2), ("rename", "ens1sf2")]
        assert list(cdq.network.devices()) == ["ens1", "ens1sf2"]
        assert cdq.xdp.program(cdq.network.devices()["ens1sf2"].ifindex)
        assert cdq.xdp.pinned_devices("pool") == ["ens1sf2"]
        await cdq.at_rest()
        assert cdq.ready(*PARTS)()
        cdq.owned("ens1sf2")
        assert await cdq.get_map("ens1sf2") == cdq.pinned("ens1sf2")


async def test_subfunction_is_made_when_its_network_device_comes_late(cdq: OptionsBench) -> None:
    """The kernel makes it in its own time; until then Allocate waits, and a device that is another's is left alone."""
    cdq.devlink.slow = True
    async with dividing(cdq), trio.open_nursery() as nursery:
        nursery.start_soon(cdq.allocate, ["ens1sf1"])
        await eventually(lambda: cdq.devlink.calls == [("add", 1)])
        cdq.network.change(NetDevice(name="eth7", ifindex=7, driver="ice", bus="pci", pci=PCI))
        await wait_all_tasks_blocked()
        assert nursery.child_tasks
        cdq.devlink.bring(PCI, 1)
        await eventually(lambda: not nursery.child_tasks)
        assert list(cdq.network.devices()) == ["ens1", "eth7", "ens1sf1"]
        assert cdq.xdp.pinned_devices("pool") == ["ens1sf1"]


@pytest.mark.parametrize("where", ["host", "pod"])
async def test_subfunction_is_deleted_when_it_is_released(cdq: OptionsBench, where: str) -> None:
    """With its pod the subfunction goes, is offered as before, and is made anew for the next one, with a fresh map."""
    async with dividing(cdq):
        await cdq.allocate(["ens1sf1"])
        old = cdq.pinned("ens1sf1")
        device = cdq.network.devices()["ens1sf1"]
        if where == "pod":
            cdq.network.change(gone=["ens1sf1"])
            await cdq.at_rest()
            assert cdq.ready(*PARTS)()
            assert cdq.xdp.program(device.ifindex)
            cdq.network.change(device)
            await cdq.at_rest()
        cdq.devlink.calls.clear()
        release(cdq)
        await cdq.at_rest()
        assert cdq.devlink.calls == [("delete", 1)]
        assert_nothing_made(cdq)
        assert cdq.ready(*PARTS)()
        await cdq.allocate(["ens1sf1"])
        assert cdq.pinned("ens1sf1") != old


def no_devlink(bench: OptionsBench) -> str:
    """devlink refuses to make one."""
    bench.devlink.errors["add"] = OSError(errno.EOPNOTSUPP, "only in switchdev mode", "devlink port add")
    return "only in switchdev mode"


def no_netdev(bench: OptionsBench) -> str:
    """The network device does not come."""
    bench.devlink.slow = True
    return "did not come"


def no_name(bench: OptionsBench) -> str:
    """The network device cannot be renamed."""
    bench.devlink.errors["rename"] = OSError(errno.EEXIST, "File exists", "ens1sf1")
    return "File exists"


def no_program(bench: OptionsBench) -> str:
    """The program cannot be attached, to any of the devices that may come."""
    for ifindex in range(100, 120):
        bench.xdp.errors["attach", ifindex] = OSError(errno.ENOSPC, "No space left on device", "attaching XDP")
    return "No space left"


def no_pin(bench: OptionsBench) -> str:
    """The program cannot be pinned."""
    bench.xdp.errors["pin", "ens1sf1"] = OSError(errno.ENOSPC, "No space left on device", "/sys/fs/bpf")
    return "No space left"


@pytest.mark.parametrize("breaks", [no_devlink, no_netdev, no_name, no_program, no_pin])
async def test_allocate_leaves_nothing_when_a_subfunction_cannot_be_made(
    cdq: OptionsBench,
    mock_clock: MockClock,
    breaks: Callable[[OptionsBench], str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """kubelet is told why, whatever was made is deleted, and when the trouble is over the next pod gets its device."""
    async with dividing(cdq), trio.open_nursery() as nursery:
        words = breaks(cdq)
        refused = trio.Event()

        async def allocate() -> None:
            with pytest.raises((OSError, RequestError), match=words):
                await cdq.allocate(["ens1sf1"])
            refused.set()

        nursery.start_soon(allocate)
        if breaks is no_netdev:
            caplog.set_level(logging.INFO, "afxdpd")
            await eventually(lambda: "subfunction made" in caplog.text)
            await wait_all_tasks_blocked()
            mock_clock.jump(SUBFUNCTION_TIMEOUT + 0.1)
        await eventually(refused.is_set)
        cdq.devlink.errors.clear()
        cdq.xdp.errors.clear()
        cdq.devlink.slow = False
        for _ in range(3):
            await cdq.at_rest()
            mock_clock.jump(10)
        await cdq.at_rest()
        assert_nothing_made(cdq)
        assert cdq.ready(*PARTS)()
        await cdq.allocate(["ens1sf1"])


async def test_allocate_rolls_back_when_the_second_subfunction_cannot_be_made(
    cdq: OptionsBench, mock_clock: MockClock
) -> None:
    """All of the request or nothing: also what could be made is deleted."""
    async with dividing(cdq):
        for ifindex in range(101, 110):
            cdq.xdp.errors["attach", ifindex] = OSError(errno.ENOSPC, "No space left on device", "attaching XDP")
        with pytest.raises(RequestError, match=r"ens1sf2 .*No space left"):
            await cdq.allocate(["ens1sf1"], ["ens1sf2"])
        await cdq.at_rest()
        mock_clock.jump(1)
        await eventually(lambda: cdq.devlink.numbers() == [])
        await cdq.at_rest()
        assert_nothing_made(cdq)


async def test_subfunction_stays_when_the_daemon_restarts(cdq: OptionsBench) -> None:
    """What pods have is served on by the next daemon, in the host and in the pod, and deleted when it is released."""
    async with dividing(cdq):
        await cdq.allocate(["ens1sf1"], ["ens1sf2"])
        cdq.network.change(gone=["ens1sf2"])
        maps = {name: cdq.pinned(name) for name in PARTS}
    cdq.pool = cdq.new_pool()
    cdq.devlink.calls.clear()
    async with dividing(cdq, *(device for device in cdq.network.devices().values() if device != NIC)):
        cdq.owned(*PARTS)
        for name in PARTS:
            assert await cdq.get_map(name) == maps[name]
        assert cdq.devlink.calls == []
        release(cdq, "ens1sf2")
        await cdq.at_rest()
        assert cdq.devlink.calls == [("delete", 1)]
        assert cdq.ready(*PARTS)()


@pytest.mark.parametrize("named", [True, False], ids=["with its name", "before it had its name"])
async def test_subfunction_is_used_or_deleted_when_a_crash_has_left_it(cdq: OptionsBench, named: bool) -> None:
    """Whatever a daemon left that died in an Allocate is in nobody's way."""
    cdq.network.show(NIC)
    cdq.devlink.add(PCI, 1)
    if named:
        (name,) = (name for name in cdq.network.devices() if name != "ens1")
        cdq.devlink.rename(name, "ens1sf1")
    cdq.devlink.calls.clear()
    async with cdq.running(*cdq.network.devices().values(), prepared=False):
        cdq.pod_resources.tell(PodView(owners={}, asked_at=trio.current_time(), empty=False))
        await eventually(cdq.ready(*PARTS))
        await cdq.at_rest()
        if named:
            assert_nothing_made(cdq)
        await cdq.allocate(["ens1sf1"])
        assert cdq.devlink.numbers() == [1]
        assert list(cdq.network.devices()) == ["ens1", "ens1sf1"]
        release(cdq)
        await cdq.at_rest()
        assert_nothing_made(cdq)


async def test_subfunction_is_made_when_its_container_starts_after_a_reboot(cdq: OptionsBench) -> None:
    """Neither subfunctions nor pins outlive the node, but kubelet's pods do: it is made again under the same name."""
    async with dividing(cdq):
        cdq.owned("ens1sf2")
        cdq.tell("ens1sf2")
        await cdq.at_rest()
        assert cdq.pool.allocated() == ["ens1sf2"]
        assert cdq.ready(*PARTS)()
        assert cdq.devlink.calls == []
        await cdq.pre_start("ens1sf2")
        assert cdq.devlink.numbers() == [2]
        assert await cdq.get_map("ens1sf2") == cdq.pinned("ens1sf2")
        release(cdq)
        await cdq.at_rest()
        assert_nothing_made(cdq)


async def test_subfunction_is_deleted_when_its_pool_is_retired_meanwhile(cdq: OptionsBench) -> None:
    """A pool that is configured no more offers nothing and deletes what its last pod leaves."""
    async with dividing(cdq):
        await cdq.allocate(["ens1sf1"])
        cdq.scanner.configure(PluginConfig(pools=()))
        cdq.pool.reconfigure(None)
        await cdq.at_rest()
        assert cdq.health() == {"ens1sf1": HEALTHY}
        assert cdq.devlink.numbers() == [1]
        release(cdq)
        await eventually(lambda: cdq.health() == {})
        assert_nothing_made(cdq)


async def test_subfunctions_are_fewer_when_the_pool_takes_fewer(cdq: OptionsBench) -> None:
    """A free one is offered no more; an allocated one is its pod's until the end, and then it is not offered either."""
    async with dividing(cdq):
        await cdq.allocate(["ens1sf2"])
        cdq.configure(devices=(DeviceConfig(name="ens1", secondary=1),))
        await eventually(cdq.ready(*PARTS))
        cdq.owned("ens1sf2")
        assert await cdq.get_map("ens1sf2")
        release(cdq)
        await eventually(cdq.ready("ens1sf1"))
        await cdq.at_rest()
        assert_nothing_made(cdq)


async def test_subfunction_is_not_divided_when_the_pool_takes_devices_by_their_driver(short_path: Path) -> None:
    """It has its NIC's driver and PCI address, whatever it is called at first, and is nothing to be divided further."""
    bench = OptionsBench(short_path, mode="cdq", devices=(), drivers=(DriverConfig(name="ice", secondary=2),))
    bench.devlink.prefix = "ens1np"
    seen: set[str] = set()
    async with dividing(bench):
        await bench.allocate(["ens1sf1"])
        seen.update(bench.health())
        await bench.at_rest()
        seen.update(bench.health())
        release(bench)
        await bench.at_rest()
        seen.update(bench.health())
    assert seen == set(PARTS)


async def test_subfunction_is_deleted_after_a_while_when_the_cni_lets_go(
    cdq: OptionsBench, mock_clock: MockClock
) -> None:
    """The CNI still needs the network device; nothing is attached to it any more when the call returns."""
    async with dividing(cdq):
        await cdq.allocate(["ens1sf1"])
        ifindex = cdq.network.devices()["ens1sf1"].ifindex
        cdq.owned("ens1sf1")
        cdq.tell("ens1sf1")
        cdq.pod_resources.view = PodView(owners={}, asked_at=0.0, empty=False)
        assert await cdq.pool.let_go("ens1sf1")
        await cdq.at_rest()
        assert cdq.devlink.numbers() == [1]
        assert cdq.xdp.program(ifindex) == 0
        past_hold_off(mock_clock)
        await eventually(lambda: cdq.devlink.numbers() == [])
        await cdq.at_rest()
        assert_nothing_made(cdq)
        assert cdq.ready(*PARTS)()


async def test_raw_subfunction_is_made_and_deleted_when_there_is_no_socket(short_path: Path) -> None:
    """Without a program, too, it is there when Allocate answers, and gone when it is released."""
    rules = (DeviceConfig(name="ens1", secondary=2),)
    raw = OptionsBench(short_path, mode="cdq", devices=rules, uds_server_disable=True)
    async with dividing(raw):
        assert raw.mounts(await raw.allocate(["ens1sf1"])) == []
        assert list(raw.network.devices()) == ["ens1", "ens1sf1"]
        await raw.at_rest()
        assert raw.ready(*PARTS)()
        release(raw)
        await raw.at_rest()
        assert_nothing_made(raw)


async def test_raw_subfunction_stays_as_it_is_when_its_container_starts_again(short_path: Path) -> None:
    """It is with its pod: nothing is missing that could be seen from here, and nothing is made or deleted."""
    rules = (DeviceConfig(name="ens1", secondary=2),)
    raw = OptionsBench(short_path, mode="cdq", devices=rules, uds_server_disable=True)
    async with dividing(raw):
        await raw.allocate(["ens1sf1"])
        raw.network.change(gone=["ens1sf1"])
        await raw.at_rest()
        raw.devlink.calls.clear()
        with trio.fail_after(SUBFUNCTION_TIMEOUT / 2):
            await raw.pre_start("ens1sf1")
        assert raw.devlink.calls == []
        assert raw.devlink.numbers() == [1]
        assert raw.pool.allocated() == ["ens1sf1"]


async def test_raw_subfunction_stays_when_its_pod_is_not_known_yet(short_path: Path) -> None:
    """After a restart kubelet alone knows who has it, so it is not deleted before kubelet has spoken."""
    rules = (DeviceConfig(name="ens1", secondary=2),)
    raw = OptionsBench(short_path, mode="cdq", devices=rules, uds_server_disable=True)
    async with dividing(raw):
        await raw.allocate(["ens1sf1"], ["ens1sf2"])
    raw.pool = raw.new_pool()
    async with raw.running(*raw.network.devices().values(), prepared=False):
        await raw.at_rest()
        assert raw.devlink.numbers() == [1, 2]
        raw.tell("ens1sf1")
        await raw.at_rest()
        assert raw.devlink.numbers() == [1]
        assert raw.pool.allocated() == ["ens1sf1"]


async def test_unhealthy_subfunction_is_tried_again_when_it_cannot_be_deleted(
    cdq: OptionsBench, mock_clock: MockClock
) -> None:
    """What is left of one that devlink does not delete is unhealthy, with devlink's words, until it does."""
    async with dividing(cdq):
        await cdq.allocate(["ens1sf1"])
        cdq.devlink.errors["delete"] = OSError(errno.EBUSY, "Device or resource busy", "devlink port del")
        release(cdq)
        await cdq.at_rest()
        assert cdq.health() == {"ens1sf1": UNHEALTHY, "ens1sf2": HEALTHY}
        assert "resource busy" in cdq.reason("ens1sf1")
        cdq.devlink.errors.clear()
        for _ in range(3):
            mock_clock.jump(10)
            await cdq.at_rest()
        assert_nothing_made(cdq)
        assert cdq.ready(*PARTS)()


# -- The network for kind ----------------------------------------------------------------------------------------------

KIND_DEVICES = {"afxdp-kind-br", *(f"veth{number}" for number in range(6, 14))}


class Keeping:
    """A KindKeeper, and what is around it."""

    def __init__(self) -> None:
        self.network = FakeNetwork()
        self.kind = FakeKind(self.network)
        self.allocated: dict[str, str] = {}
        self.keeper = KindKeeper(self.kind, self.network, lambda: self.allocated)

    def names(self) -> set[str]:
        """What is there."""
        return set(self.network.devices())

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The keeper at work."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.keeper.run)
            await wait_all_tasks_blocked()
            yield
            nursery.cancel_scope.cancel()


async def test_kind_network_is_made_again_when_a_part_is_missing() -> None:
    """It is there when want returns, is complete again whenever a pod has taken a pair along, and goes at the end."""
    keeping = Keeping()
    await keeping.keeper.want(True)
    assert keeping.names() == KIND_DEVICES
    async with keeping.running():
        assert keeping.kind.made == 1
        for missing in (["veth6", "veth7"], ["afxdp-kind-br"], ["veth12", "veth13", "veth8", "veth9"]):
            keeping.network.change(gone=missing)
            await eventually(lambda: keeping.names() == KIND_DEVICES)
        keeping.network.change(gone=["veth6"])  # it is with a pod
        await wait_all_tasks_blocked()
        assert keeping.kind.made == 4
        keeping.network.change(net("veth6"))
    assert keeping.names() == set()
    assert keeping.kind.kept == [set()]


async def test_kind_network_stays_when_pods_have_devices_of_it() -> None:
    """At the end what pods have stays, and with it the bridge."""
    keeping = Keeping()
    await keeping.keeper.want(True)
    async with keeping.running():
        keeping.allocated = {"veth8": "pool"}
    assert keeping.names() == {"afxdp-kind-br", "veth8", "veth9"}
    assert keeping.kind.kept == [{"veth8"}]


async def test_kind_network_is_not_touched_when_it_is_not_wanted() -> None:
    """Without kindCluster nothing is made and nothing removed, also what somebody else calls so."""
    keeping = Keeping()
    keeping.network.show(net("veth6"))
    await keeping.keeper.want(False)
    async with keeping.running():
        keeping.network.show(net("veth6"), net("veth7"))
        await wait_all_tasks_blocked()
    assert (keeping.kind.made, keeping.kind.kept) == (0, [])


async def test_error_names_the_device_when_the_kind_network_cannot_be_made(caplog: pytest.LogCaptureFixture) -> None:
    """At the start it is an error of its own; later it is a line in the log, and tried again with the next change."""
    keeping = Keeping()
    keeping.kind.error = OSError(errno.EEXIST, "this dummy device is in the way", "veth6")
    with pytest.raises(KindNetworkError, match="cannot be made: veth6: this dummy device is in the way"):
        await keeping.keeper.want(True)
    async with keeping.running():
        await wait_all_tasks_blocked()
        keeping.kind.error = None
        keeping.network.change(net("veth1"))
        await eventually(lambda: keeping.names() == KIND_DEVICES | {"veth1"})
        keeping.network.change(gone=["veth1"])
        await wait_all_tasks_blocked()
        caplog.clear()
        keeping.kind.error = OSError(errno.EBUSY, "Device or resource busy", "veth10")
        keeping.network.change(gone=["veth10", "veth11"])
        await eventually(lambda: "cannot be made: veth10: Device or resource busy" in caplog.text)
        keeping.kind.error = None
        keeping.network.change(net("veth0"))
        await eventually(lambda: keeping.names() == KIND_DEVICES | {"veth0"})


async def test_end_is_in_order_when_the_kind_network_cannot_be_removed(caplog: pytest.LogCaptureFixture) -> None:
    """What cannot be removed is a line in the log."""
    keeping = Keeping()
    await keeping.keeper.want(True)
    async with keeping.running():
        keeping.kind.error = OSError(errno.EBUSY, "Device or resource busy")
    assert "the kind network is not removed" in caplog.text


async def test_kind_network_stays_away_when_it_is_wanted_no_more() -> None:
    """While it is being removed nobody takes it for broken and makes it again; wanted once more, it is there."""
    keeping = Keeping()
    await keeping.keeper.want(True)
    async with keeping.running(), trio.open_nursery() as nursery:
        keeping.kind.gate.clear()
        nursery.start_soon(keeping.keeper.want, False)
        await eventually(keeping.kind.removing.is_set)
        await wait_all_tasks_blocked()
        keeping.kind.gate.set()
        await eventually(lambda: not nursery.child_tasks)
        await wait_all_tasks_blocked()
        assert keeping.names() == set()
        assert keeping.kind.made == 1
        await keeping.keeper.want(True)
        keeping.network.change(gone=["veth6", "veth7"])
        await eventually(lambda: keeping.names() == KIND_DEVICES)


# -- What the CNI calls ------------------------------------------------------------------------------------------------


async def del_net_dev(path: Path, name: str) -> int:
    """Calls DelNetDev as the CNI does; returns `ret`."""
    request = syncer.DeleteNetDevReq(name=name)
    method = "dpcnisyncer.NetDev/DelNetDev"
    return (await call_unix(path, method, request, syncer.DeleteNetDevResp, timeout=10)).ret


def pools_are(*pools: PoolManager) -> Callable[[], Awaitable[list[PoolManager]]]:
    """What a Syncer asks for its pools."""

    async def present() -> list[PoolManager]:
        return list(pools)

    return present


async def test_cni_is_answered_when_it_lets_go(bench: OptionsBench, caplog: pytest.LogCaptureFixture) -> None:
    """0 for a device of any pool, for one that nobody has, and for the same again; without a name it is refused."""
    caplog.set_level(logging.INFO, "afxdpd")
    service = Syncer(pools_are(bench.pool), kubelet_dir=bench.directory / "kubelet")
    assert service.path == bench.directory / "kubelet" / "device-plugins" / "afxdp-syncer.sock"
    async with bench.running("veth0"), trio.open_nursery() as nursery:
        nursery.start_soon(service.run)
        await eventually(service.path.is_socket)
        await bench.allocate(["veth0"])
        bench.owned("veth0")
        bench.tell("veth0")
        bench.pod_resources.view = PodView(owners={}, asked_at=0.0, empty=False)
        for _ in range(2):
            assert await del_net_dev(service.path, "veth0") == 0
            assert bench.xdp.descriptors() == []
            assert bench.pool.allocated() == []
        assert await del_net_dev(service.path, "veth9") == 0
        assert "'veth9', which no pool has" in caplog.text
        with pytest.raises(RpcError) as refusal:
            await del_net_dev(service.path, "")
        assert refusal.value.status == "INVALID_ARGUMENT"
        nursery.cancel_scope.cancel()
    assert not service.path.exists()


async def test_cni_socket_is_made_again_when_it_is_removed(short_path: Path) -> None:
    """kubelet wipes its directory when it starts; the CNI is served again at once."""
    service = Syncer(pools_are(), kubelet_dir=short_path / "kubelet")
    service.path.parent.mkdir(parents=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(service.run)
        for _ in range(3):
            await eventually(service.path.is_socket)
            assert await del_net_dev(service.path, "veth9") == 0
            service.path.unlink()
        await eventually(service.path.is_socket)
        nursery.cancel_scope.cancel()


async def test_cni_is_served_when_kubelets_directory_comes_later(short_path: Path, autojump_clock: MockClock) -> None:
    """On a node where kubelet has never run there is nothing to serve on yet."""
    service = Syncer(pools_are(), kubelet_dir=short_path / "kubelet")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(service.run)
        await trio.sleep(5)
        service.path.parent.mkdir(parents=True)
        await trio.sleep(5)
        assert await del_net_dev(service.path, "veth9") == 0
        nursery.cancel_scope.cancel()


async def test_cni_is_served_when_another_plugin_has_ended(
    short_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The socket of the Go plugin that still runs is left alone, which the log says, and taken over afterwards."""
    service = Syncer(pools_are(), kubelet_dir=short_path)
    service.path.parent.mkdir()
    other = open_unix_listener(service.path)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(service.run)
        await trio.sleep(5)
        assert "another process serves this" in caplog.text
        other.close()
        await trio.sleep(15)
        assert await del_net_dev(service.path, "veth9") == 0
        nursery.cancel_scope.cancel()


async def test_cni_is_answered_when_pools_come_while_one_lets_go() -> None:
    """A reload in the middle of the call does not make it fail."""

    class SlowPool:
        def __init__(self) -> None:
            self.asked, self.answer = trio.Event(), trio.Event()

        async def let_go(self, _: str) -> bool:
            self.asked.set()
            await self.answer.wait()
            return True

    slow = SlowPool()
    pools: dict[str, Any] = {"a": slow}

    async def present() -> list[Any]:
        return list(pools.values())

    service = Syncer(present)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(service.DelNetDev, syncer.DeleteNetDevReq(name="veth0"))
        await slow.asked.wait()
        pools["b"] = slow
        slow.answer.set()


# -- The daemon, while its configuration changes -----------------------------------------------------------------------


class Daemon:
    """The daemon with fakes for the kernel, and configurations that come when the test says so."""

    def __init__(self, directory: Path, config: PluginConfig, *devices: NetDevice) -> None:
        self.config = config
        self.paths = Paths(
            kubelet_dir=directory / "kubelet",
            pod_resources_socket=directory / "kubelet" / "pod-resources" / "kubelet.sock",
            uds_dir=directory / "uds",
            bpffs=directory / "bpf",
        )
        self.network = FakeNetwork()
        self.network.show(*devices)
        self.xdp = FakeXdp(directory / "kernel", self.network)
        self.kind = FakeKind(self.network)
        self._sender, self._receiver = trio.open_memory_channel[PluginConfig](math.inf)

    def change(self, config: PluginConfig) -> None:
        """From now on this is the configuration."""
        self._sender.send_nowait(config)

    async def _changes(self) -> AsyncGenerator[PluginConfig, None]:
        async for config in self._receiver:
            yield config

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The daemon at work; in the end nothing of the kernel's is open any more."""
        async with aclosing(self._changes()) as changes, trio.open_nursery() as nursery:
            run = partial(serve, self.config, self.paths, changes=changes, network=self.network, xdp=self.xdp)
            devlink, ethtool = FakeDevlink(self.network), FakeEthtool()
            await nursery.start(partial(run, host=FakeHost(), kind=self.kind, devlink=devlink, ethtool=ethtool))
            yield
            nursery.cancel_scope.cancel()
        assert self.xdp.descriptors() == []

    @property
    def syncer(self) -> Path:
        """What the CNI calls."""
        return self.paths.kubelet_dir / "device-plugins" / "afxdp-syncer.sock"

    def path(self, pool: str, name: str) -> Path:
        """The socket of a device."""
        return self.paths.uds_dir / pool / name / "afxdp.sock"


async def get_map(path: Path) -> str | None:
    """The conversation of the pod "pod-x" on a socket; returns the name of the map it gets."""
    async with connected(path) as session:
        assert await session.ask(b"/connect,pod-x") == b"/host_ok"
        return await session.ask_map(path.parent.name)


@pytest.mark.kubelet
async def test_pools_come_change_and_go_when_the_configuration_does(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kubelet sees the difference and nothing else; a pod keeps its device until it ends, then the new pool has it."""
    monkeypatch.setattr(afxdpd, "HOLD_OFF", 2.0)
    devices = [net(f"veth{number}") for number in range(5)]
    daemon = Daemon(short_path, config_of(b=("veth1",), a=("veth0",), d=("veth4",)), *devices)
    async with running_kubelet(daemon.paths.kubelet_dir) as kubelet, daemon.running():
        await kubelet.wait("afxdp/a", devices={"veth0": HEALTHY})
        await kubelet.wait("afxdp/b", devices={"veth1": HEALTHY})
        untouched = await kubelet.wait("afxdp/d", devices={"veth4": HEALTHY})
        await kubelet.allocate("afxdp/a", ["veth0"])
        await kubelet.pods(pod("pod-x", {"afxdp/a": ["veth0"]}))
        old_map = await get_map(daemon.path("a", "veth0"))
        program = daemon.xdp.program(10)

        daemon.change(config_of(b=("veth0", "veth2"), c=("veth1",), d=("veth4",)))
        await kubelet.wait("afxdp/c", devices={"veth1": HEALTHY})
        await kubelet.wait("afxdp/b", devices={"veth2": HEALTHY})
        await kubelet.wait("afxdp/a", streams_open=0)
        assert not plugin_socket(daemon, "a").exists()
        assert await get_map(daemon.path("a", "veth0")) == old_map
        assert daemon.xdp.program(10) == program

        await kubelet.pods(pod("other", {}))
        assert await del_net_dev(daemon.syncer, "veth0") == 0
        released = time.monotonic()
        assert daemon.xdp.program(10) == 0
        await kubelet.wait("afxdp/b", devices={"veth0": HEALTHY, "veth2": HEALTHY})
        assert time.monotonic() - released >= 1.9
        assert daemon.xdp.program(10) not in (0, program)

        daemon.change(config_of(a=("veth0",), b=("veth2",), d=("veth4",)))
        await kubelet.wait("afxdp/a", devices={"veth0": HEALTHY})
        await kubelet.wait("afxdp/b", devices={"veth2": HEALTHY})
        await kubelet.wait("afxdp/c", streams_open=0)
        state = await kubelet.state("afxdp/d")
        assert (state["registers_total"], state["streams_max"]) == (1, 1)
        assert state["messages"] == untouched["messages"]


def plugin_socket(daemon: Daemon, pool: str) -> Path:
    """Where a pool serves kubelet."""
    return daemon.syncer.parent / f"afxdp-{pool}.sock"


def is_gone(path: Path) -> bool:
    """Whether nothing is there."""
    return not path.exists()


async def allocate(daemon: Daemon, pool: str, *names: str) -> None:
    """Calls Allocate as kubelet does."""
    request = api.AllocateRequest(container_requests=[api.ContainerAllocateRequest(devices_ids=names)])
    path = plugin_socket(daemon, pool)
    await call_unix(path, "v1beta1.DevicePlugin/Allocate", request, api.AllocateResponse, timeout=10)


@pytest.mark.parametrize("retired", [False, True], ids=["configured", "retired"])
async def test_pods_keep_their_devices_when_the_daemon_with_the_kind_network_ends(
    short_path: Path, retired: bool
) -> None:
    """What is allocated is not removed with the rest of the network, though the pools end at the same time."""
    for attempt in range(5):  # who is first to notice the end is up to chance
        directory = short_path / str(attempt)
        directory.mkdir()
        daemon = Daemon(directory, PluginConfig(pools=config_of(pool=("veth6",)).pools, kind_cluster=True))
        kubelet = FakeKubelet(daemon.paths.kubelet_dir)
        async with trio.open_nursery() as nursery:
            await nursery.start(kubelet.serve)
            async with daemon.running():
                assert daemon.network.devices().keys() >= KIND_DEVICES
                await kubelet.registered.receive()
                await allocate(daemon, "pool", "veth6")
                if retired:
                    daemon.change(PluginConfig(pools=(), kind_cluster=True))
                    await eventually(partial(is_gone, plugin_socket(daemon, "pool")))
                    await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert daemon.kind.kept == [{"veth6"}]
        assert set(daemon.network.devices()) == {"afxdp-kind-br", "veth6", "veth7"}


async def test_daemon_does_not_begin_when_the_kind_network_cannot_be_made(short_path: Path) -> None:
    """Without the devices that it is to give away there is nothing to serve."""
    daemon = Daemon(short_path, PluginConfig(pools=(), kind_cluster=True))
    daemon.kind.error = OSError(errno.EEXIST, "File exists", "veth6")
    with pytest.raises(ExceptionGroup) as caught:
        async with daemon.running():
            raise AssertionError("it has begun")
    assert caught.group_contains(KindNetworkError, match="veth6: File exists")


async def test_rest_of_a_change_counts_when_the_kind_network_cannot_be_made(
    short_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A daemon at work says what is wrong, and goes on with what it has."""
    daemon = Daemon(short_path, config_of(a=("veth0",)), net("veth0"), net("veth1"))
    kubelet = FakeKubelet(daemon.paths.kubelet_dir)
    async with trio.open_nursery() as nursery:
        await nursery.start(kubelet.serve)
        async with daemon.running():
            assert (await kubelet.registered.receive()).resource_name == "afxdp/a"
            daemon.kind.error = OSError(errno.EEXIST, "File exists", "veth6")
            (rules,) = config_of(b=("veth1",)).pools
            daemon.change(PluginConfig(pools=(rules,), kind_cluster=True))
            assert (await kubelet.registered.receive()).resource_name == "afxdp/b"
            assert "cannot be made: veth6: File exists" in caplog.text
            await allocate(daemon, "b", "veth1")
        nursery.cancel_scope.cancel()
