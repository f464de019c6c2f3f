"""The framework: what it makes of a plugin's devices and hooks, and how it lives with kubelet."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from conftest import open_fds
from fakes import FakeKubelet
from kubelet import Kubelet, KubeletError, running_kubelet
from trio.testing import MockClock, wait_all_tasks_blocked

from afxdpd import (
    HEALTHY,
    UNHEALTHY,
    Backoff,
    DeviceInfo,
    DeviceTree,
    DirectoryWatch,
    EndpointBusyError,
    Manager,
    Notifier,
    Owner,
    PodResources,
    PodView,
    RequestError,
    ResourceServer,
    RpcError,
    Scanner,
    UseDefaultMethodError,
    call_unix,
)
from afxdpd_proto import deviceplugin_pb2 as api

RESOURCE = "test.org/demo"
TIMEOUT = 10.0
"""Seconds for what takes milliseconds."""

in_other_process = pytest.mark.kubelet


def tree_of(**types: list[str]) -> DeviceTree:
    """Device types and the ids of their devices, all alike."""
    return DeviceTree({name: {device_id: DeviceInfo() for device_id in ids} for name, ids in types.items()})


def request_for(*containers: list[str]) -> api.AllocateRequest:
    """An AllocateRequest for the device ids of each container."""
    return api.AllocateRequest(container_requests=[api.ContainerAllocateRequest(devices_ids=ids) for ids in containers])


def server_of(plugin: object = None, **devices: DeviceInfo) -> ResourceServer:
    """A server with devices; nothing of it runs."""
    server = ResourceServer("test.org", "demo", plugin=plugin)
    server.update(devices)
    return server


async def nothing_happens(wait: Callable[[], Awaitable[object]]) -> bool:
    """Whether something that waits would wait for a day; for tests with the autojump clock."""
    with trio.move_on_after(86_400) as scope:
        await wait()
    return scope.cancelled_caught


# -- Notifier, DeviceTree ----------------------------------------------------------------------------------------------


async def test_notifier_tells_a_tree_when_it_is_the_first() -> None:
    """The first tree is told, even if there is nothing in it."""
    notifier = Notifier()
    notifier.notify(DeviceTree())
    assert await notifier.wait_changed() == {}


async def test_notifier_tells_nothing_when_the_same_tree_comes_again(autojump_clock: MockClock) -> None:
    """A tree that equals the last one is nothing new, however often it comes."""
    notifier = Notifier()
    notifier.notify(tree_of(a=["1", "2"]))
    await notifier.wait_changed()
    for _ in range(10_000):
        notifier.notify(tree_of(a=["1", "2"]))
    assert await nothing_happens(notifier.wait_changed)


async def test_notifier_tells_only_the_last_tree_when_nobody_listened_meanwhile(autojump_clock: MockClock) -> None:
    """Of many changes while nobody listens, only the state after the last one is told."""
    notifier = Notifier()
    for number in range(10_000):
        notifier.notify(tree_of(a=[str(number)]))
    assert await notifier.wait_changed() == tree_of(a=["9999"])
    assert await nothing_happens(notifier.wait_changed)


async def test_notifier_tells_nothing_when_a_change_was_undone_meanwhile(autojump_clock: MockClock) -> None:
    """A change that is taken back before anybody listens is nothing new."""
    notifier = Notifier()
    notifier.notify(tree_of(a=["1"]))
    await notifier.wait_changed()
    notifier.notify(tree_of(a=[]))
    notifier.notify(tree_of(a=["1"]))
    assert await nothing_happens(notifier.wait_changed)


async def test_notifier_tells_a_change_when_the_scanner_goes_on_with_its_own_tree() -> None:
    """A scanner may keep one tree, change it and notify of it again."""
    notifier = Notifier()
    tree = tree_of(a=["1"])
    notifier.notify(tree)
    assert await notifier.wait_changed() == tree_of(a=["1"])
    tree.add_device("a", "2", DeviceInfo())
    notifier.notify(tree)
    assert await notifier.wait_changed() == tree_of(a=["1", "2"])


@pytest.mark.parametrize(
    "change",
    [
        {"state": UNHEALTHY},
        {"nodes": (api.DeviceSpec(host_path="/dev/a"),)},
        {"envs": {"A": "1"}},
        {"topology": api.TopologyInfo(nodes=[api.NUMANode(ID=1)])},
        {"reason": "broken"},
    ],
    ids=lambda change: next(iter(change)),
)
async def test_notifier_tells_a_change_when_one_field_differs(change: dict[str, Any]) -> None:
    """Every field of a device counts."""
    notifier = Notifier()
    notifier.notify(tree_of(a=["1"]))
    await notifier.wait_changed()
    changed = DeviceTree({"a": {"1": DeviceInfo(**change)}})
    notifier.notify(changed)
    with trio.fail_after(TIMEOUT):
        assert await notifier.wait_changed() == changed


def test_add_device_makes_the_type_when_it_is_its_first_device() -> None:
    """A device's type need not be made before, and a device that is added again is replaced."""
    tree = DeviceTree()
    tree.add_device("a", "1", DeviceInfo())
    tree.add_device("a", "2", DeviceInfo())
    tree.add_device("a", "1", DeviceInfo(state=UNHEALTHY))
    assert tree == {"a": {"1": DeviceInfo(state=UNHEALTHY), "2": DeviceInfo()}}


# -- Manager -----------------------------------------------------------------------------------------------------------


class Snapshots:
    """A Scanner that hands over what the test puts into it, and ends or fails when the test says so."""

    def __init__(self) -> None:
        self.trees, self._trees = trio.open_memory_channel[DeviceTree | Exception](100)

    async def scan(self, notifier: Notifier) -> None:
        """See Scanner.scan."""
        async with self._trees:
            async for tree in self._trees:
                if isinstance(tree, Exception):
                    raise tree
                notifier.notify(tree)


class Crashing(ResourceServer):
    """A server that fails at once as often as it is told, and then goes on."""

    def __init__(self, device_type: str, crashes: int) -> None:
        super().__init__("test.org", device_type)
        self.crashes = crashes
        self.runs: list[float] = []

    async def run(self) -> None:
        """See ResourceServer.run."""
        self.runs.append(trio.current_time())
        if len(self.runs) <= self.crashes:
            raise LookupError("a bug")
        await trio.sleep_forever()


@asynccontextmanager
async def running(run: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Something runs in the background, and is cancelled in the end."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        yield
        nursery.cancel_scope.cancel()


async def test_manager_follows_when_types_and_devices_come_change_and_go(short_path: Path) -> None:
    """There is a server for each type of the newest snapshot, with the devices of the newest snapshot."""
    plugin = Snapshots()
    manager = Manager("test.org", plugin, kubelet_dir=short_path)
    async with running(manager.run):
        for tree in (tree_of(a=["1"]), tree_of(a=["1", "2"], b=[]), tree_of(b=["3"]), tree_of(a=["1"]), tree_of()):
            plugin.trees.send_nowait(tree)
            await wait_all_tasks_blocked()
            assert {name: server.listed() for name, server in manager.servers.items()} == tree


async def test_manager_keeps_a_server_when_only_its_devices_change(short_path: Path) -> None:
    """The server of a type goes on when devices come or go; one that comes again is another."""
    plugin = Snapshots()
    manager = Manager("test.org", plugin, kubelet_dir=short_path)
    servers = []
    async with running(manager.run):
        for tree in (tree_of(a=["1"]), tree_of(a=["2"], b=[]), tree_of(b=[]), tree_of(a=["2"])):
            plugin.trees.send_nowait(tree)
            await wait_all_tasks_blocked()
            servers.append(manager.servers.get("a"))
    assert servers[0] is servers[1]
    assert servers[2] is None
    assert servers[3] is not servers[0]


async def test_manager_fails_when_the_scan_fails(short_path: Path) -> None:
    """The scan's error ends the whole run, and is what the run ends with."""
    plugin = Snapshots()
    plugin.trees.send_nowait(tree_of(a=["1"]))
    plugin.trees.send_nowait(LookupError("no such bus"))
    with pytest.raises(LookupError, match="no such bus"):
        await Manager("test.org", plugin, kubelet_dir=short_path).run()


async def test_manager_ends_when_the_scan_ends(short_path: Path) -> None:
    """A scan that returns ends the run, without an error."""
    plugin = Snapshots()
    plugin.trees.send_nowait(tree_of(a=["1"]))
    plugin.trees.close()
    with trio.fail_after(TIMEOUT):
        await Manager("test.org", plugin, kubelet_dir=short_path).run()


async def test_manager_restarts_a_server_when_it_crashes(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that crashes begins again after a pause that grows, and the others do not notice."""
    plugin = Snapshots()
    servers = {"good": Crashing("good", 0), "bad": Crashing("bad", 4)}
    async with running(Manager("test.org", plugin, make_server=servers.__getitem__).run):
        plugin.trees.send_nowait(tree_of(good=[], bad=[]))
        await trio.sleep(3600)
    assert len(servers["good"].runs) == 1
    runs = servers["bad"].runs
    assert len(runs) == 5
    for first, second, delay in zip(runs, runs[1:], (0.5, 1, 2, 4), strict=False):
        assert 0.8 * delay <= second - first <= 1.2 * delay
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 4


async def test_manager_restarts_a_server_soon_when_it_had_run_for_long(autojump_clock: MockClock) -> None:
    """Crashes that are hours apart do not add up to a long pause."""

    class Hourly(Crashing):
        async def run(self) -> None:
            self.runs.append(trio.current_time())
            await trio.sleep(3600)
            raise LookupError("a bug")

    plugin, server = Snapshots(), Hourly("a", 0)
    async with running(Manager("test.org", plugin, make_server=lambda _: server).run):
        plugin.trees.send_nowait(tree_of(a=[]))
        await trio.sleep(20 * 3600)
    assert len(server.runs) == 20
    assert all(after - before < 3601 for before, after in zip(server.runs, server.runs[1:], strict=False))


async def test_manager_goes_on_when_a_server_cannot_be_updated(caplog: pytest.LogCaptureFixture) -> None:
    """A server that fails with new devices is left with the old ones, and the others get theirs."""

    class Stubborn(Crashing):
        def update(self, devices: Mapping[str, DeviceInfo]) -> None:
            if devices:
                raise LookupError("a bug")

    plugin = Snapshots()
    servers = {"bad": Stubborn("bad", 0), "good": Crashing("good", 0)}
    async with running(Manager("test.org", plugin, make_server=servers.__getitem__).run):
        for tree in (tree_of(bad=[], good=[]), tree_of(bad=["1"], good=["1"]), tree_of(bad=["2"], good=["2"])):
            plugin.trees.send_nowait(tree)
            await wait_all_tasks_blocked()
            assert servers["good"].listed() == tree["good"]
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 2


async def test_manager_fails_when_a_type_is_served_by_another_process(short_path: Path) -> None:
    """That somebody else serves the same resource ends the run: it would not become better."""
    kubelet = FakeKubelet(short_path)
    plugin = Snapshots()
    plugin.trees.send_nowait(tree_of(a=["1"]))
    async with trio.open_nursery() as nursery:
        await nursery.start(kubelet.serve)
        nursery.start_soon(ResourceServer("test.org", "a", kubelet_dir=short_path).run)
        await kubelet.registered.receive()
        with pytest.raises(EndpointBusyError, match=r"test\.org-a\.sock"):
            await Manager("test.org", plugin, kubelet_dir=short_path).run()
        nursery.cancel_scope.cancel()


async def test_manager_removes_the_socket_when_a_type_goes(short_path: Path) -> None:
    """The socket of a type that goes is unlinked, and the other types' stay."""
    kubelet = FakeKubelet(short_path)
    plugin = Snapshots()
    async with running(kubelet.serve), running(Manager("test.org", plugin, kubelet_dir=short_path).run):
        plugin.trees.send_nowait(tree_of(a=["1"], b=["1"]))
        endpoints = [(await kubelet.registered.receive()).endpoint for _ in range(2)]
        assert sorted(endpoints) == ["test.org-a.sock", "test.org-b.sock"]
        plugin.trees.send_nowait(tree_of(b=["1"]))
        gone, kept = (short_path / "device-plugins" / name for name in sorted(endpoints))
        with DirectoryWatch(gone.parent) as watch, trio.fail_after(TIMEOUT):
            while gone.exists():
                await watch.changed()
        assert kept.is_socket()


# -- Allocate without a plugin's hooks ---------------------------------------------------------------------------------


async def test_allocate_merges_what_its_devices_bring_when_a_container_gets_several() -> None:
    """A container gets the nodes, mounts, variables, annotations and CDI names of all its devices, each once."""
    node = api.DeviceSpec(container_path="/dev/bus", host_path="/dev/bus", permissions="rw")
    node_1 = api.DeviceSpec(container_path="/dev/1", host_path="/dev/1", permissions="r")
    mount = api.Mount(container_path="/lib/fw", host_path="/lib/fw", read_only=True)
    mount_2 = api.Mount(container_path="/2", host_path="/2")
    server = server_of(
        d1=DeviceInfo(
            nodes=(node, node_1),
            mounts=(mount,),
            envs={"BUS": "0", "D1": "yes"},
            annotations={"bus": "0"},
            cdi_devices=("test.org/bus=0", "test.org/demo=1"),
        ),
        d2=DeviceInfo(
            nodes=(node,),
            mounts=(mount, mount_2),
            envs={"BUS": "0", "D2": "yes"},
            annotations={"bus": "0", "d2": "yes"},
            cdi_devices=("test.org/bus=0",),
        ),
        d3=DeviceInfo(envs={"BUS": "1"}),
    )
    response = await server.Allocate(request_for(["d1", "d2"], ["d3"]))
    assert response == api.AllocateResponse(
        container_responses=[
            api.ContainerAllocateResponse(
                devices=[node, node_1],
                mounts=[mount, mount_2],
                envs={"BUS": "0", "D1": "yes", "D2": "yes"},
                annotations={"bus": "0", "d2": "yes"},
                cdi_devices=[api.CDIDevice(name="test.org/bus=0"), api.CDIDevice(name="test.org/demo=1")],
            ),
            api.ContainerAllocateResponse(envs={"BUS": "1"}),
        ]
    )


@pytest.mark.parametrize(
    ("request_", "status", "text"),
    [
        (request_for(["d1", "d9"]), "NOT_FOUND", "d9"),
        (request_for(["d1"], ["bad"]), "FAILED_PRECONDITION", "bad is unhealthy: the fan is off"),
        (request_for(["d1", "d1"]), "INVALID_ARGUMENT", "d1"),
        (request_for(["d1"], ["d1"]), "INVALID_ARGUMENT", "d1"),
        (request_for(["d1"], []), "INVALID_ARGUMENT", "no device"),
        (request_for(), "INVALID_ARGUMENT", "no device"),
        (request_for(["d1", "other"]), "FAILED_PRECONDITION", "variable MODE: 'a', 'b'"),
        (request_for(["d1", "third"]), "FAILED_PRECONDITION", "annotation mode: 'a', 'b'"),
    ],
    ids=["unknown", "unhealthy", "twice", "twice in two", "none in one", "none", "variables", "annotations"],
)
async def test_allocate_refuses_when_the_request_cannot_be_met(
    request_: api.AllocateRequest, status: str, text: str
) -> None:
    """The status and the text say what is wrong with the request: kubelet shows the text to the pod's owner."""
    server = server_of(
        d1=DeviceInfo(envs={"MODE": "a"}, annotations={"mode": "a"}),
        bad=DeviceInfo(state=UNHEALTHY, reason="the fan is off"),
        other=DeviceInfo(envs={"MODE": "b"}),
        third=DeviceInfo(annotations={"mode": "b"}),
    )
    with pytest.raises(RequestError) as refusal:
        await server.Allocate(request_)
    assert refusal.value.status == status
    assert text in str(refusal.value)
    assert RESOURCE in str(refusal.value)


# -- A plugin's hooks --------------------------------------------------------------------------------------------------


class WithAllocate:
    """An Allocator that knows one device better."""

    async def allocate(self, request: api.AllocateRequest) -> api.AllocateResponse:
        """See Allocator.allocate."""
        if list(request.container_requests[0].devices_ids) != ["special"]:
            raise UseDefaultMethodError
        return api.AllocateResponse(container_responses=[api.ContainerAllocateResponse(envs={"BY": "plugin"})])


class WithPostAllocate:
    """A PostAllocator that stamps each answer."""

    async def post_allocate(self, response: api.AllocateResponse) -> None:
        """See PostAllocator.post_allocate."""
        for container in response.container_responses:
            container.envs["STAMP"] = "1"


class FailingPostAllocate:
    """A PostAllocator that has no luck."""

    async def post_allocate(self, _: api.AllocateResponse) -> None:
        """See PostAllocator.post_allocate."""
        raise LookupError("no slot")


class WithBoth(WithAllocate, WithPostAllocate):
    """Both of them."""


class WithPreferred:
    """A PreferredAllocator that likes the last ones."""

    async def get_preferred_allocation(
        self, request: api.PreferredAllocationRequest
    ) -> api.PreferredAllocationResponse:
        """See PreferredAllocator.get_preferred_allocation."""
        return api.PreferredAllocationResponse(
            container_responses=[
                api.ContainerPreferredAllocationResponse(
                    deviceIDs=sorted(container.available_deviceIDs)[-container.allocation_size :]
                )
                for container in request.container_requests
            ]
        )


class WithPreStart:
    """A ContainerPreStarter that notes what it is asked for."""

    def __init__(self) -> None:
        self.started: list[list[str]] = []

    async def pre_start_container(self, request: api.PreStartContainerRequest) -> None:
        """See ContainerPreStarter.pre_start_container."""
        self.started.append(list(request.devices_ids))


class Answering:
    """A plugin whose every hook returns the same thing, or raises it."""

    def __init__(self, answer: object) -> None:
        self._answer = answer

    async def allocate(self, _: api.AllocateRequest) -> object:
        """See Allocator.allocate."""
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    post_allocate = get_preferred_allocation = pre_start_container = allocate


class Plain:
    """A plugin whose methods are plain functions, as of somebody who knows no trio."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.tree = tree_of(demo=["d1"])
        self.over = threading.Event()

    def scan(self, notifier: Notifier) -> None:
        """See Scanner.scan."""
        self.threads.append(threading.get_ident())
        notifier.notify(self.tree)
        self.over.wait()

    def allocate(self, request: api.AllocateRequest) -> api.AllocateResponse:
        """See Allocator.allocate."""
        self.threads.append(threading.get_ident())
        raise UseDefaultMethodError

    def post_allocate(self, response: api.AllocateResponse) -> None:
        """See PostAllocator.post_allocate."""
        self.threads.append(threading.get_ident())
        response.container_responses[0].envs["STAMP"] = "1"


HOOKS: dict[str, Callable[[ResourceServer], Awaitable[object]]] = {
    "allocate": lambda server: server.Allocate(request_for(["d1"])),
    "get_preferred_allocation": lambda server: server.GetPreferredAllocation(api.PreferredAllocationRequest()),
    "pre_start_container": lambda server: server.PreStartContainer(api.PreStartContainerRequest(devices_ids=["d1"])),
}


def envs(response: api.AllocateResponse) -> list[dict[str, str]]:
    """The variables of each container."""
    return [dict(container.envs) for container in response.container_responses]


async def test_allocate_answers_as_the_plugin_does_when_it_has_the_hook() -> None:
    """An Allocator's answer replaces the default one; it need not be about devices that are known."""
    assert envs(await server_of(WithAllocate()).Allocate(request_for(["special"]))) == [{"BY": "plugin"}]


async def test_allocate_answers_by_default_when_the_plugin_says_so() -> None:
    """UseDefaultMethodError from an Allocator leads to the default answer."""
    server = server_of(WithAllocate(), d1=DeviceInfo(envs={"BY": "default"}))
    assert envs(await server.Allocate(request_for(["d1"]))) == [{"BY": "default"}]


@pytest.mark.parametrize(("device", "by"), [("d1", "default"), ("special", "plugin")])
async def test_post_allocate_has_the_last_word_when_there_is_an_answer(device: str, by: str) -> None:
    """A PostAllocator changes the default answer, and the Allocator's."""
    server = server_of(WithBoth(), d1=DeviceInfo(envs={"BY": "default"}))
    assert envs(await server.Allocate(request_for([device]))) == [{"BY": by, "STAMP": "1"}]


async def test_post_allocate_fails_the_call_when_it_raises() -> None:
    """An error of a PostAllocator is the answer, under the hook's name."""
    with pytest.raises(RequestError, match=r"post_allocate failed: LookupError\('no slot'\)") as refusal:
        await server_of(FailingPostAllocate(), d1=DeviceInfo()).Allocate(request_for(["d1"]))
    assert refusal.value.status == "INTERNAL"


@pytest.mark.parametrize(
    ("plugin", "pre_start", "preferred"),
    [
        (None, False, False),
        (WithBoth(), False, False),
        (WithPreStart(), True, False),
        (WithPreferred(), False, True),
        (Answering(None), True, True),
    ],
    ids=["none", "allocators", "pre-start", "preferred", "all"],
)
async def test_options_announce_a_hook_when_the_plugin_has_it(plugin: object, pre_start: bool, preferred: bool) -> None:
    """PreStartContainer and GetPreferredAllocation are announced exactly where the plugin has them."""
    options = await server_of(plugin).GetDevicePluginOptions(api.Empty())
    assert options == api.DevicePluginOptions(
        pre_start_required=pre_start, get_preferred_allocation_available=preferred
    )


async def test_preferred_allocation_is_the_plugins_when_it_has_the_hook() -> None:
    """A PreferredAllocator's advice is passed on."""
    request = api.PreferredAllocationRequest(
        container_requests=[
            api.ContainerPreferredAllocationRequest(available_deviceIDs=["b", "c", "a"], allocation_size=2)
        ]
    )
    (container,) = (await server_of(WithPreferred()).GetPreferredAllocation(request)).container_responses
    assert list(container.deviceIDs) == ["b", "c"]


async def test_preferred_allocation_is_unimplemented_when_the_plugin_has_no_such_hook() -> None:
    """A kubelet that asks though nothing was announced is told so."""
    with pytest.raises(RequestError) as refusal:
        await server_of().GetPreferredAllocation(api.PreferredAllocationRequest())
    assert refusal.value.status == "UNIMPLEMENTED"


async def test_pre_start_calls_the_plugin_when_it_has_the_hook() -> None:
    """A ContainerPreStarter is told the devices; without one the call succeeds."""
    plugin = WithPreStart()
    await server_of(plugin).PreStartContainer(api.PreStartContainerRequest(devices_ids=["d1", "d2"]))
    assert plugin.started == [["d1", "d2"]]
    await server_of().PreStartContainer(api.PreStartContainerRequest(devices_ids=["d1"]))


async def test_hooks_run_in_threads_when_they_are_plain_functions() -> None:
    """A plugin without async functions works the same, and cannot hold up the event loop."""
    plugin = Plain()
    response = await server_of(plugin, d1=DeviceInfo()).Allocate(request_for(["d1"]))
    assert envs(response) == [{"STAMP": "1"}]
    assert len(plugin.threads) == 2
    assert threading.get_ident() not in plugin.threads


async def test_scan_runs_in_a_thread_when_it_is_a_plain_function(short_path: Path) -> None:
    """A plain scan notifies from its thread, and the Manager ends when it returns."""
    plugin = Plain()
    manager = Manager("test.org", cast("Scanner", plugin), kubelet_dir=short_path)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(manager.run)
        with trio.fail_after(TIMEOUT):
            while not manager.servers:
                await wait_all_tasks_blocked(0.01)
        assert manager.servers["demo"].listed() == plugin.tree["demo"]
        plugin.over.set()
    assert threading.get_ident() not in plugin.threads


@pytest.mark.parametrize("hook", HOOKS)
async def test_hook_fails_the_call_when_it_raises(hook: str, caplog: pytest.LogCaptureFixture) -> None:
    """Any error of a hook is INTERNAL to kubelet, with the hook and the error by name, and goes to the log once."""
    server = server_of(Answering(LookupError("no slot")), d1=DeviceInfo())
    with pytest.raises(RequestError, match=rf"{RESOURCE}: {hook} failed: LookupError\('no slot'\)") as refusal:
        await HOOKS[hook](server)
    assert refusal.value.status == "INTERNAL"
    assert [record.exc_info is not None for record in caplog.records] == [True]


@pytest.mark.parametrize("hook", HOOKS)
async def test_hook_fails_the_call_when_it_returns_another_type(hook: str) -> None:
    """What a hook returns is looked at before it is sent."""
    server = server_of(Answering({"not": "a message"}), d1=DeviceInfo())
    with pytest.raises(RequestError, match=f"{RESOURCE}: {hook} returned dict, not ") as refusal:
        await HOOKS[hook](server)
    assert refusal.value.status == "INTERNAL"


@pytest.mark.parametrize("hook", HOOKS)
async def test_hook_answers_with_its_own_status_when_it_refuses(hook: str) -> None:
    """A hook that raises RequestError decides on status and text."""
    server = server_of(Answering(RequestError("come again", status="UNAVAILABLE")), d1=DeviceInfo())
    with pytest.raises(RequestError, match=r"^come again$") as refusal:
        await HOOKS[hook](server)
    assert refusal.value.status == "UNAVAILABLE"


# -- ListAndWatch without kubelet --------------------------------------------------------------------------------------


Lists = AsyncGenerator[Any, None]


async def next_list(lists: Lists) -> dict[str, str]:
    """Device id → health in the next message of a stream."""
    with trio.fail_after(TIMEOUT):
        return {device.ID: device.health for device in (await anext(lists)).devices}


async def test_list_and_watch_tells_the_present_list_when_it_begins() -> None:
    """A stream begins with what there is, whatever happened before, and even if that is nothing."""
    server = server_of()
    async with aclosing(server.ListAndWatch(api.Empty())) as lists:
        assert await next_list(lists) == {}
    server.update({"d1": DeviceInfo()})
    server.update({"d1": DeviceInfo(), "d2": DeviceInfo(state=UNHEALTHY)})
    async with aclosing(server.ListAndWatch(api.Empty())) as lists:
        assert await next_list(lists) == {"d1": HEALTHY, "d2": UNHEALTHY}


async def test_list_and_watch_tells_topology_when_it_is_known() -> None:
    """The NUMA nodes of a device reach kubelet; where they are unknown, the field is left out."""
    topology = api.TopologyInfo(nodes=[api.NUMANode(ID=1)])
    server = server_of(d1=DeviceInfo(topology=topology), d2=DeviceInfo())
    async with aclosing(server.ListAndWatch(api.Empty())) as lists:
        assert await anext(lists) == api.ListAndWatchResponse(
            devices=[api.Device(ID="d1", health=HEALTHY, topology=topology), api.Device(ID="d2", health=HEALTHY)]
        )


async def test_list_and_watch_tells_the_last_list_when_several_changes_came_together() -> None:
    """Changes between two messages are one."""
    server = server_of(d1=DeviceInfo())
    async with aclosing(server.ListAndWatch(api.Empty())) as lists:
        await next_list(lists)
        for number in range(100):
            server.update({f"d{number}": DeviceInfo()})
        assert await next_list(lists) == {"d99": HEALTHY}


async def test_list_and_watch_tells_nothing_when_the_list_is_the_same(autojump_clock: MockClock) -> None:
    """An update that changes nothing that kubelet sees is not sent."""
    server = server_of(d1=DeviceInfo())
    async with aclosing(server.ListAndWatch(api.Empty())) as lists:
        await anext(lists)
        server.update({"d1": DeviceInfo(envs={"A": "1"})})
        server.announce()
        assert await nothing_happens(lists.__anext__)


async def test_list_and_watch_ends_when_there_is_a_newer_stream(autojump_clock: MockClock) -> None:
    """At most one stream is served for long: the newest."""
    server = server_of(d1=DeviceInfo())
    ended = trio.Event()

    async def follow() -> None:
        async with aclosing(server.ListAndWatch(api.Empty())) as older:
            assert await next_list(older) == {"d1": HEALTHY}
            with pytest.raises(StopAsyncIteration):
                await anext(older)
        ended.set()

    async with running(follow), aclosing(server.ListAndWatch(api.Empty())) as newer:
        await wait_all_tasks_blocked()
        assert await next_list(newer) == {"d1": HEALTHY}
        await ended.wait()
        assert trio.current_time() <= ResourceServer.STREAM_GRACE
        assert server.watched
        server.update({"d2": DeviceInfo()})
        assert await next_list(newer) == {"d2": HEALTHY}
    assert not server.watched


async def test_list_and_watch_goes_on_when_a_newer_stream_does_not_last(autojump_clock: MockClock) -> None:
    """Somebody who looks at the list for a moment does not end kubelet's stream, nor keep changes from it."""
    server = server_of(d1=DeviceInfo())
    async with aclosing(server.ListAndWatch(api.Empty())) as lists:
        await next_list(lists)

        async def look() -> None:
            async with aclosing(server.ListAndWatch(api.Empty())) as others:
                await next_list(others)
                await trio.sleep(ResourceServer.STREAM_GRACE / 2)
                server.update({"d2": DeviceInfo()})
                assert await next_list(others) == {"d2": HEALTHY}

        async with running(look):
            assert await next_list(lists) == {"d2": HEALTHY}


async def test_update_logs_a_reason_once_when_it_stays(caplog: pytest.LogCaptureFixture) -> None:
    """Why a device is unhealthy goes to the log when it becomes so, and again only with another reason."""
    server = server_of()
    for reason in ("hot", "hot", "dead", "dead", "", "dead"):
        server.update({"d1": DeviceInfo(state=UNHEALTHY if reason else HEALTHY, reason=reason)})
    assert [record.message.rpartition(" ")[2] for record in caplog.records] == ["hot", "dead", "dead"]


# -- Backoff -----------------------------------------------------------------------------------------------------------


def test_backoff_doubles_up_to_its_limit_when_attempts_go_on() -> None:
    """Delays double from the first one on, give or take a fifth, and none is longer than the limit."""
    backoff = Backoff(0.5, 10.0)
    delays = [backoff.delay() for _ in range(200)]
    for delay, nominal in zip(delays, (0.5, 1, 2, 4, 8), strict=False):
        assert 0.8 * nominal <= delay <= 1.2 * nominal
    assert all(8 <= delay <= 10 for delay in delays[5:])
    assert len(set(delays)) > 20, "there is no jitter"


def test_backoff_begins_anew_when_it_is_reset() -> None:
    """After a reset the next delay is the first again."""
    backoff = Backoff(0.5, 10.0)
    for _ in range(10):
        backoff.delay()
    backoff.reset()
    assert backoff.delay() <= 0.6


# -- DirectoryWatch ----------------------------------------------------------------------------------------------------


@contextmanager
def no_more_descriptors() -> Iterator[None]:
    """The process can open nothing more, so that inotify_init(2) fails as it does when its instances are exhausted."""
    lowest = os.dup(0)
    os.close(lowest)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("change", ["create", "delete", "rename", "socket"])
async def test_directory_watch_returns_when_something_changes(
    change: str, short_path: Path, autojump_clock: MockClock
) -> None:
    """What comes, goes or takes the place of something else is a change."""
    (short_path / "old").touch()
    with DirectoryWatch(short_path) as watch, socket.socket(socket.AF_UNIX) as sock:
        assert await nothing_happens(watch.changed)
        match change:
            case "create":
                (short_path / "new").touch()
            case "delete":
                (short_path / "old").unlink()
            case "rename":
                (short_path / "old").rename(short_path / "new")
            case "socket":
                sock.bind(str(short_path / "new"))
        await watch.changed()
        assert trio.current_time() == pytest.approx(86_400)
        assert await nothing_happens(watch.changed)


async def test_directory_watch_returns_when_the_change_came_before_the_call(
    short_path: Path, autojump_clock: MockClock
) -> None:
    """Nothing is missed between two calls, nor by a call that was cancelled."""
    with DirectoryWatch(short_path) as watch:
        for number in range(3):
            (short_path / str(number)).touch()
            with trio.move_on_after(0):
                await watch.changed()
            (short_path / f"{number}+").touch()
            started = trio.current_time()
            await watch.changed()
            assert trio.current_time() == started


@pytest.mark.parametrize("how", ["deleted", "moved away"])
async def test_directory_watch_goes_on_when_the_directory_is_made_again(
    how: str, short_path: Path, autojump_clock: MockClock
) -> None:
    """A directory that goes and comes again is watched again, under the same name."""
    directory = short_path / "device-plugins"
    directory.mkdir()
    with DirectoryWatch(directory) as watch:
        if how == "deleted":
            directory.rmdir()
        else:
            directory.rename(short_path / "other")
        await watch.changed()
        for _ in range(3):  # polling
            await watch.changed()
        directory.mkdir()
        started = trio.current_time()
        await watch.changed()
        assert trio.current_time() - started <= DirectoryWatch.POLL
        assert await nothing_happens(watch.changed)
        (directory / "kubelet.sock").touch()
        started = trio.current_time()
        await watch.changed()
        assert trio.current_time() == started


async def test_directory_watch_polls_when_inotify_cannot_be_had(
    short_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Without inotify it asks its user to look once a second, says so once, and uses inotify when it can."""
    with ExitStack() as stack:
        with no_more_descriptors():
            watch = stack.enter_context(DirectoryWatch(short_path))
            for second in range(1, 6):
                await watch.changed()
                assert trio.current_time() == second
        await watch.changed()
        assert await nothing_happens(watch.changed)
        (short_path / "new").touch()
        await watch.changed()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


async def test_directory_watch_leaves_nothing_open_when_it_ends(short_path: Path, autojump_clock: MockClock) -> None:
    """The inotify descriptor goes with the block, also where the directory came, went and came again."""
    before = open_fds()
    with DirectoryWatch(short_path / "not there"):
        pass
    with DirectoryWatch(short_path) as watch:
        shutil.rmtree(short_path)
        await watch.changed()
        short_path.mkdir()
        await watch.changed()
        assert len(open_fds()) == len(before) + 1
    assert open_fds() == before


# -- PodResources ------------------------------------------------------------------------------------------------------


@pytest.fixture
async def kubelet(short_path: Path, nursery: trio.Nursery) -> FakeKubelet:
    """kubelet's servers in this process."""
    fake = FakeKubelet(short_path)
    await nursery.start(fake.serve)
    return fake


@pytest.fixture
async def pod_resources(kubelet: FakeKubelet, nursery: trio.Nursery) -> PodResources:
    """A client of kubelet's, at work."""
    client = PodResources(kubelet.pod_resources_socket)
    nursery.start_soon(client.run)
    return client


async def test_pod_resources_lists_owners_when_kubelet_answers(
    autojump_clock: MockClock, kubelet: FakeKubelet, pod_resources: PodResources
) -> None:
    """A view has the holder of each device, also where a container has several entries of one resource."""
    kubelet.list_device("afxdp/a", "1", "2", pod="x", container="c1")
    kubelet.list_device("afxdp/b", "1", pod="y")
    entry = kubelet.pods.pod_resources[0].containers[0].devices
    entry.add(resource_name="afxdp/a", device_ids=["3"])
    view = await pod_resources.ask()
    owner = (Owner("default", "x", "c1"),)
    assert view.owners == {
        ("afxdp/a", "1"): owner,
        ("afxdp/a", "2"): owner,
        ("afxdp/a", "3"): owner,
        ("afxdp/b", "1"): (Owner("default", "y", "app"),),
    }
    assert not view.empty


async def test_pod_resources_lists_all_owners_when_a_device_has_several(
    autojump_clock: MockClock, kubelet: FakeKubelet, pod_resources: PodResources
) -> None:
    """An old kubelet lists a pod that has ended beside the one that has its device now."""
    kubelet.list_device("afxdp/a", "1", pod="ended")
    kubelet.list_device("afxdp/a", "1", pod="runs")
    kubelet.list_device("afxdp/a", "1", pod="runs")
    view = await pod_resources.ask()
    assert view.owners == {("afxdp/a", "1"): (Owner("default", "ended", "app"), Owner("default", "runs", "app"))}


async def test_pod_resources_view_is_empty_when_no_pod_is_listed(
    autojump_clock: MockClock, kubelet: FakeKubelet, pod_resources: PodResources
) -> None:
    """A kubelet that lists no pod at all is told from one that lists pods without devices."""
    assert (await pod_resources.ask()).empty
    kubelet.pods.pod_resources.add(name="x", namespace="default")
    view = await pod_resources.ask()
    assert not view.empty
    assert not view.owners


async def test_pod_resources_asks_at_growing_intervals_when_more_is_wanted(
    autojump_clock: MockClock, kubelet: FakeKubelet, pod_resources: PodResources
) -> None:
    """After a hurry it asks at once, then after gaps that double to ten seconds and more, while a subscriber wants."""
    with pod_resources.subscribed(lambda _: True):
        await trio.sleep(3600)
        assert kubelet.lists == []
        for _ in range(2):
            kubelet.lists.clear()
            started = trio.current_time()
            pod_resources.hurry()
            await trio.sleep(100)
            assert kubelet.lists[0] == started
            gaps = [after - before for before, after in zip(kubelet.lists, kubelet.lists[1:], strict=False)]
            nominal = [min(0.1 * 2**number, PodResources.IDLE) for number in range(len(gaps))]
            for gap, expected in zip(gaps, nominal, strict=True):
                assert 0.8 * expected <= gap - PodResources.BUSY <= 1.2 * expected
            assert len(gaps) > 10
            assert min(gaps[8:]) >= 10


async def test_pod_resources_asks_no_more_when_nobody_wants_it(
    autojump_clock: MockClock, kubelet: FakeKubelet, pod_resources: PodResources
) -> None:
    """kubelet is left alone when no subscriber has anything to know, and when there is none."""
    wanted = [True]
    with pod_resources.subscribed(lambda _: False), pod_resources.subscribed(lambda _: wanted[0]):
        pod_resources.hurry()
        await trio.sleep(10)
        assert len(kubelet.lists) > 3
        wanted[0] = False
        await trio.sleep(20)  # one more may have been due
        kubelet.lists.clear()
        await trio.sleep(3600)
        assert kubelet.lists == []
    pod_resources.hurry()
    await trio.sleep(3600)
    assert len(kubelet.lists) == 1


async def test_pod_resources_never_asks_often_when_everybody_is_in_a_hurry(
    autojump_clock: MockClock, kubelet: FakeKubelet, pod_resources: PodResources
) -> None:
    """However often it is hurried, there is a pause between questions: kubelet refuses more."""
    with trio.move_on_after(10):
        while True:
            pod_resources.hurry()
            await trio.sleep(0.001)
    assert 50 <= len(kubelet.lists) <= 101


async def test_pod_resources_ask_shares_an_answer_when_many_ask(
    autojump_clock: MockClock, kubelet: FakeKubelet, pod_resources: PodResources
) -> None:
    """Questions that come together are one to kubelet."""
    views: list[PodView] = []

    async def ask() -> None:
        views.append(await pod_resources.ask())

    async with trio.open_nursery() as nursery:
        for _ in range(100):
            nursery.start_soon(ask)
    assert len(views) == 100
    assert len(kubelet.lists) == 1


async def test_pod_resources_ask_waits_for_a_newer_answer_when_one_is_on_its_way(
    autojump_clock: MockClock, kubelet: FakeKubelet, pod_resources: PodResources
) -> None:
    """The answer to an earlier question does not count: it may not have what has just happened."""
    kubelet.gate = trio.Event()
    pod_resources.hurry()
    await kubelet.asked.wait()
    await trio.sleep(1)

    async def answer() -> None:
        await trio.sleep(1)
        kubelet.gate.set()

    asked_at = trio.current_time()
    async with running(answer):
        view = await pod_resources.ask()
    assert view.asked_at >= asked_at
    assert len(kubelet.lists) == 2


async def test_pod_resources_ask_fails_when_kubelet_refuses(
    autojump_clock: MockClock,
    kubelet: FakeKubelet,
    pod_resources: PodResources,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Who asks gets kubelet's status; the log has it once, and the next question is asked all the same."""
    kubelet.error = RequestError("rejected by rate limit", status="RESOURCE_EXHAUSTED")
    caplog.set_level(logging.WARNING, "afxdpd")
    for _ in range(5):
        with pytest.raises(RpcError, match=r"^RESOURCE_EXHAUSTED: rejected by rate limit$") as failure:
            await pod_resources.ask()
        assert failure.value.status == "RESOURCE_EXHAUSTED"
    assert len(caplog.records) == 1
    kubelet.error = None
    assert (await pod_resources.ask()).empty


async def test_pod_resources_ask_waits_for_a_newer_answer_when_an_earlier_question_fails(
    autojump_clock: MockClock, kubelet: FakeKubelet, pod_resources: PodResources
) -> None:
    """That kubelet did not answer an earlier question is no reason to fail."""
    kubelet.error = RequestError("kubelet is starting", status="UNAVAILABLE")
    kubelet.gate = trio.Event()
    pod_resources.hurry()
    await kubelet.asked.wait()
    await trio.sleep(1)

    kubelet.list_device("afxdp/a", "1")

    async def recover() -> None:
        kubelet.gate.set()
        await trio.sleep(0.05)  # less than the pause between two questions
        kubelet.error = None

    async with running(recover):
        view = await pod_resources.ask()
    assert view.owners


async def test_pod_resources_ask_fails_when_kubelet_is_away(autojump_clock: MockClock, short_path: Path) -> None:
    """No socket, nobody behind it, and no answer at all are told as RpcError."""
    path = short_path / "kubelet.sock"
    pod_resources = PodResources(path)
    async with running(pod_resources.run):
        for _ in range(2):
            with pytest.raises(RpcError) as failure:
                await pod_resources.ask()
            assert failure.value.status == "UNAVAILABLE"
            if not path.exists():
                with socket.socket(socket.AF_UNIX) as stale:
                    stale.bind(str(path))


async def test_pod_resources_ask_fails_when_kubelet_does_not_answer_in_time(
    autojump_clock: MockClock, kubelet: FakeKubelet, pod_resources: PodResources
) -> None:
    """A List has five seconds."""
    kubelet.gate = trio.Event()
    with pytest.raises(RpcError) as failure:
        await pod_resources.ask()
    assert failure.value.status == "DEADLINE_EXCEEDED"
    assert trio.current_time() == pytest.approx(5, abs=0.1)


async def test_pod_resources_tells_subscribers_first_when_somebody_asked(
    autojump_clock: MockClock, kubelet: FakeKubelet, pod_resources: PodResources
) -> None:
    """When ask returns, each subscriber has seen the answer; after its block it sees none."""
    seen: list[PodView] = []

    def see(view: PodView) -> bool:
        seen.append(view)
        return False

    with pod_resources.subscribed(see):
        view = await pod_resources.ask()
        assert seen == [view]
    await pod_resources.ask()
    assert seen == [view]


async def test_pod_resources_goes_on_when_a_subscriber_fails(
    autojump_clock: MockClock, kubelet: FakeKubelet, pod_resources: PodResources, caplog: pytest.LogCaptureFixture
) -> None:
    """A subscriber with a bug keeps the answer from nobody else, and is told the next one."""
    seen: list[PodView] = []

    def fail(_: PodView) -> bool:
        raise LookupError("a bug")

    def see(view: PodView) -> bool:
        seen.append(view)
        return False

    with pod_resources.subscribed(fail), pod_resources.subscribed(see):
        assert seen == [await pod_resources.ask()]
        await trio.sleep(3600)
        assert len(seen) > 100
    assert {record.levelname for record in caplog.records} == {"ERROR"}


async def test_pod_resources_asks_later_when_it_is_told_to(
    autojump_clock: MockClock, kubelet: FakeKubelet, pod_resources: PodResources
) -> None:
    """A hurry may be for some seconds from now; an earlier one is not put off by it."""
    started = trio.current_time()
    pod_resources.hurry(20)
    pod_resources.hurry(5)
    await trio.sleep(10)
    assert kubelet.lists == [started + 5]


# -- Life with kubelet, in this process --------------------------------------------------------------------------------


def plugin_dir(directory: Path) -> Path:
    """Where sockets are, below kubelet's directory."""
    return directory / "device-plugins"


async def test_registration_names_the_resource_when_kubelet_is_there(short_path: Path, kubelet: FakeKubelet) -> None:
    """Register has the API's version, the socket's file name, the resource and the options."""
    server = ResourceServer("test.org", "demo", plugin=WithPreStart(), kubelet_dir=short_path)
    async with running(server.run):
        with trio.fail_after(TIMEOUT):
            request = await kubelet.registered.receive()
    assert request == api.RegisterRequest(
        version="v1beta1",
        endpoint="test.org-demo.sock",
        resource_name=RESOURCE,
        options=api.DevicePluginOptions(pre_start_required=True),
    )


async def test_server_fails_when_another_one_serves_the_same_resource(short_path: Path, kubelet: FakeKubelet) -> None:
    """The second server of a resource ends with an error that names the socket, and the first goes on."""
    first = ResourceServer("test.org", "demo", kubelet_dir=short_path)
    second = ResourceServer("test.org", "demo", kubelet_dir=short_path)
    async with running(first.run):
        await kubelet.registered.receive()
        inode = first.socket_path.stat().st_ino
        with pytest.raises(EndpointBusyError, match=str(first.socket_path)), trio.fail_after(TIMEOUT):
            await second.run()
        assert first.socket_path.stat().st_ino == inode


async def test_server_waits_when_its_endpoint_is_taken_from_it(
    autojump_clock: MockClock, short_path: Path, kubelet: FakeKubelet, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody who takes the endpoint of a server at work does not end it: it serves again when they are gone."""
    server = ResourceServer("test.org", "demo", kubelet_dir=short_path)
    async with running(server.run):
        await kubelet.registered.receive()
        server.socket_path.unlink()
        with socket.socket(socket.AF_UNIX) as intruder:
            intruder.bind(str(server.socket_path))
            intruder.listen()
            await trio.sleep(100)
            assert server.socket_path.is_socket()
        await kubelet.registered.receive()
        assert caplog.text.count("another process serves this") == 1


async def test_server_replaces_a_socket_file_when_nobody_listens_on_it(short_path: Path, kubelet: FakeKubelet) -> None:
    """What a killed daemon left behind is no obstacle."""
    server = ResourceServer("test.org", "demo", kubelet_dir=short_path)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(server.socket_path))
    async with running(server.run):
        with trio.fail_after(TIMEOUT):
            await kubelet.registered.receive()


async def test_server_registers_again_when_kubelet_does_not_open_the_stream(
    autojump_clock: MockClock, short_path: Path, kubelet: FakeKubelet
) -> None:
    """kubelet opens the stream soon after Register or never, so a server without one registers again after a while."""
    server = ResourceServer("test.org", "demo", kubelet_dir=short_path)
    async with running(server.run):
        for number in range(5):
            await kubelet.registered.receive()
            assert trio.current_time() == pytest.approx(5 * number, abs=1)


async def watch_shortly(server: ResourceServer) -> None:
    """Opens a stream, as kubelet does, reads the list and loses it."""
    async with aclosing(server.ListAndWatch(api.Empty())) as lists:
        await anext(lists)


async def test_server_registers_again_when_the_stream_comes_and_goes_inside_register(
    autojump_clock: MockClock, short_path: Path, kubelet: FakeKubelet
) -> None:
    """A stream that kubelet opens and loses before it answers Register is not waited for any more."""
    server = ResourceServer("test.org", "demo", kubelet_dir=short_path)

    kubelet.registering = partial(watch_shortly, server)
    async with running(server.run):
        for _ in range(50):
            await kubelet.registered.receive()
        assert 0.05 * 50 < trio.current_time() < 0.2 * 50, "it waits in vain, or not at all"


async def test_server_registers_at_once_when_the_last_registration_had_lasted(
    autojump_clock: MockClock, short_path: Path, kubelet: FakeKubelet
) -> None:
    """A kubelet that was content for a while is not made to wait, whatever was before."""
    server = ResourceServer("test.org", "demo", kubelet_dir=short_path)

    kubelet.registering = partial(watch_shortly, server)
    async with running(server.run):
        for _ in range(50):
            await kubelet.registered.receive()
        kubelet.registering = trio.lowlevel.checkpoint
        await kubelet.registered.receive()
        async with aclosing(server.ListAndWatch(api.Empty())) as lists:
            await anext(lists)
            await trio.sleep(60)
            started = trio.current_time()
            server.socket_path.unlink()
            await kubelet.registered.receive()
            assert trio.current_time() - started < 0.03


async def test_server_ends_its_stream_when_it_has_to_register_again(
    autojump_clock: MockClock, short_path: Path, kubelet: FakeKubelet
) -> None:
    """The stream has ended before the next Register: otherwise kubelet would drop the new one with the old one."""
    server = ResourceServer("test.org", "demo", kubelet_dir=short_path)
    async with running(server.run), aclosing(server.ListAndWatch(api.Empty())) as lists:
        await kubelet.registered.receive()
        await anext(lists)
        server.socket_path.unlink()
        with pytest.raises(StopAsyncIteration):
            await anext(lists)
        assert not server.registered
        with pytest.raises(trio.WouldBlock):
            kubelet.registered.receive_nowait()
        await kubelet.registered.receive()


@pytest.mark.parametrize("after", [0.2, 10])
async def test_server_lets_kubelet_close_its_connection_when_it_registers_again(
    autojump_clock: MockClock, short_path: Path, kubelet: FakeKubelet, after: float
) -> None:
    """Before the next Register it waits until kubelet's connection is closed, for half a second at most."""
    server = ResourceServer("test.org", "demo", kubelet_dir=short_path)
    async with running(server.run):
        await kubelet.registered.receive()
        connection = await trio.open_unix_socket(server.socket_path)

        async def close() -> None:
            await trio.sleep(after)
            await connection.aclose()

        async with running(close):
            started = trio.current_time()
            server.socket_path.unlink()
            await kubelet.registered.receive()
            waited = trio.current_time() - started
        await connection.aclose()
        assert min(after, ResourceServer.CLOSE_GRACE) <= waited <= min(after, ResourceServer.CLOSE_GRACE) + 0.1


async def test_server_registers_again_when_kubelets_socket_is_another(
    autojump_clock: MockClock, short_path: Path, kubelet: FakeKubelet
) -> None:
    """A new kubelet.sock is a new kubelet, even while the old one still watches."""
    server = ResourceServer("test.org", "demo", kubelet_dir=short_path)
    successor = FakeKubelet(short_path)
    async with running(server.run), aclosing(server.ListAndWatch(api.Empty())) as lists:
        await kubelet.registered.receive()
        await anext(lists)
        async with trio.open_nursery() as nursery:
            await nursery.start(successor.serve)
            await successor.registered.receive()
            nursery.cancel_scope.cancel()


async def test_server_registers_ever_more_rarely_when_kubelet_refuses(
    autojump_clock: MockClock, short_path: Path, kubelet: FakeKubelet, caplog: pytest.LogCaptureFixture
) -> None:
    """A registration that is refused is tried again at growing intervals, and goes to the log once."""

    async def refuse() -> None:
        raise RequestError("not now", status="UNAVAILABLE")

    kubelet.registering = refuse
    server = ResourceServer("test.org", "demo", kubelet_dir=short_path)
    async with running(server.run):
        await trio.sleep(100)
        assert 12 <= kubelet.registered.statistics().current_buffer_used <= 24
        assert not server.registered
    assert [record.levelname for record in caplog.records] == ["WARNING"]


async def test_server_keeps_its_registration_when_nothing_has_happened_to_kubelets_socket(
    autojump_clock: MockClock, short_path: Path, kubelet: FakeKubelet
) -> None:
    """Other plugins' files come and go, and somebody may change who can use kubelet's socket: it is still the same."""
    server = ResourceServer("test.org", "demo", kubelet_dir=short_path)
    async with running(server.run), aclosing(server.ListAndWatch(api.Empty())) as lists:
        await kubelet.registered.receive()
        await anext(lists)
        (plugin_dir(short_path) / "kubelet.sock").chmod(0o777)
        (plugin_dir(short_path) / "another.sock").touch()
        (plugin_dir(short_path) / "another.sock").unlink()
        assert await nothing_happens(kubelet.registered.receive)


async def test_server_waits_when_its_directory_cannot_be_written(
    autojump_clock: MockClock, short_path: Path, kubelet: FakeKubelet, caplog: pytest.LogCaptureFixture
) -> None:
    """A socket that cannot be made is tried again at growing intervals, and goes to the log once."""
    server = ResourceServer("test.org", "demo", kubelet_dir=short_path)
    server.socket_path.mkdir()
    async with running(server.run):
        await trio.sleep(100)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        server.socket_path.rmdir()
        await kubelet.registered.receive()


# -- Life with kubelet, which is another process -----------------------------------------------------------------------


@asynccontextmanager
async def plugin_and_kubelet(
    directory: Path, *, plugin: object = None, devices: Mapping[str, DeviceInfo] | None = None
) -> AsyncIterator[tuple[ResourceServer, Kubelet]]:
    """A resource that is served, and a kubelet; one device by default."""
    server = ResourceServer("test.org", "demo", plugin=plugin, kubelet_dir=directory)
    server.update({"d1": DeviceInfo()} if devices is None else devices)
    async with running_kubelet(directory) as kubelet, running(server.run):
        yield server, kubelet


async def assert_registered_once(kubelet: Kubelet, *, total: int) -> None:
    """The present kubelet has one stream after one Register, and that is still so when a further one would be there."""
    await kubelet.wait(RESOURCE, streams_open=1, registers=1, healthy=1)
    with pytest.raises(KubeletError) as timeout:
        await kubelet.wait(RESOURCE, registers_total=total + 1, timeout=2 * ResourceServer.STREAM_GRACE)
    state = timeout.value.reply["state"]
    assert (state["attempts"], state["registers"], state["registers_total"]) == (1, 1, total)
    assert (state["streams_open"], state["streams_max"], state["trap"]) == (1, 1, 0)


@in_other_process
async def test_registration_is_answered_when_kubelet_dials_back_inside_it(short_path: Path) -> None:
    """kubelet asks for the options before it answers Register, and gets them, and then the list."""
    plugin = Answering(None)
    async with plugin_and_kubelet(short_path, plugin=plugin) as (server, kubelet):
        state = await kubelet.wait(RESOURCE, registers=1, healthy=1)
        both = {"pre_start_required": True, "get_preferred_allocation_available": True}
        assert state["options"] == state["register_options"] == both
        assert state["endpoint"] == "test.org-demo.sock"
        await assert_registered_once(kubelet, total=1)
        assert server.registered
        assert server.watched


@in_other_process
async def test_list_arrives_whole_when_it_has_5000_devices(short_path: Path) -> None:
    """A list of a hundred kilobytes arrives, at first and as an update."""
    devices = {f"device-{number:04}": DeviceInfo() for number in range(5000)}
    async with plugin_and_kubelet(short_path, devices=devices) as (server, kubelet):
        await kubelet.wait(RESOURCE, devices=dict.fromkeys(devices, HEALTHY))
        server.update(dict.fromkeys(devices, DeviceInfo(state=UNHEALTHY)))
        await kubelet.wait(RESOURCE, devices=dict.fromkeys(devices, UNHEALTHY))


@in_other_process
async def test_list_arrives_at_once_when_it_is_empty(short_path: Path) -> None:
    """A type without devices sends an empty list, so that kubelet knows the resource."""
    async with plugin_and_kubelet(short_path, devices={}) as (_, kubelet):
        state = await kubelet.wait(RESOURCE, registers=1, messages=1)
        assert state["devices"] == {}


@in_other_process
async def test_updates_reach_kubelet_when_devices_change(short_path: Path) -> None:
    """Each change arrives: health, a device more, a device less, topology."""
    async with plugin_and_kubelet(short_path) as (server, kubelet):
        await kubelet.wait(RESOURCE, devices={"d1": HEALTHY})
        server.update({"d1": DeviceInfo(state=UNHEALTHY)})
        await kubelet.wait(RESOURCE, devices={"d1": UNHEALTHY})
        server.update({"d1": DeviceInfo(state=UNHEALTHY), "d2": DeviceInfo()})
        await kubelet.wait(RESOURCE, devices={"d1": UNHEALTHY, "d2": HEALTHY})
        server.update({"d2": DeviceInfo(topology=api.TopologyInfo(nodes=[api.NUMANode(ID=3)]))})
        state = await kubelet.wait(RESOURCE, devices={"d2": HEALTHY}, messages=4)
        assert state["devices"]["d2"]["nodes"] == [3]


@in_other_process
async def test_statuses_reach_kubelet_when_calls_fail(short_path: Path) -> None:
    """kubelet's own gRPC sees the status and the whole text, and what a hook answers."""
    async with plugin_and_kubelet(short_path, plugin=WithBoth()) as (_, kubelet):
        await kubelet.wait(RESOURCE, healthy=1)
        (answer,) = await kubelet.allocate(RESOURCE, ["special"])
        assert answer["envs"] == {"BY": "plugin", "STAMP": "1"}
        with pytest.raises(KubeletError, match=f"{RESOURCE}: no device d2") as refusal:
            await kubelet.allocate(RESOURCE, ["d2"])
        assert refusal.value.code == "NOT_FOUND"
        with pytest.raises(KubeletError) as refusal:
            await kubelet.preferred(RESOURCE, ["d1"], 1)
        assert refusal.value.code == "UNIMPLEMENTED"


@in_other_process
@pytest.mark.parametrize("directory", [True, False], ids=["directory", "no directory"])
async def test_server_registers_when_kubelet_appears_after_it(short_path: Path, directory: bool) -> None:
    """A server that is there before kubelet, or even its directory, waits for it."""
    server = ResourceServer("test.org", "demo", kubelet_dir=short_path)
    server.update({"d1": DeviceInfo()})
    if directory:
        plugin_dir(short_path).mkdir()
    async with running(server.run):
        await wait_all_tasks_blocked()
        async with running_kubelet(short_path) as kubelet:
            await assert_registered_once(kubelet, total=1)


@in_other_process
@pytest.mark.parametrize("mode", ["refuse", "unimplemented", "error"])
async def test_server_registers_when_kubelet_takes_it_after_failures(short_path: Path, mode: str) -> None:
    """A registration that fails is tried again until it succeeds, and leaves no second stream behind."""
    server = ResourceServer("test.org", "demo", kubelet_dir=short_path)
    server.update({"d1": DeviceInfo()})
    async with running_kubelet(short_path) as kubelet:
        await kubelet.register_mode(mode)
        async with running(server.run):
            state = await kubelet.wait(RESOURCE, attempts=3)
            assert state["registers"] == 0
            assert not server.registered
            await kubelet.register_mode("ok")
            state = await kubelet.wait(RESOURCE, registers=1, healthy=1)
            assert (state["streams_max"], state["trap"]) == (1, 0)


@in_other_process
async def test_server_waits_when_kubelet_is_slow_to_register_it(short_path: Path) -> None:
    """A kubelet that takes seconds for Register is waited for, and not asked twice."""
    server = ResourceServer("test.org", "demo", kubelet_dir=short_path)
    server.update({"d1": DeviceInfo()})
    async with running_kubelet(short_path) as kubelet:
        await kubelet.register_mode("slow", delay=2)
        async with running(server.run):
            await assert_registered_once(kubelet, total=1)


@in_other_process
async def test_server_registers_again_when_kubelet_restarts(short_path: Path) -> None:
    """After a kubelet that was away for seconds and wiped its directory, it serves again within two seconds, once."""
    async with plugin_and_kubelet(short_path) as (server, kubelet):
        await kubelet.wait(RESOURCE, healthy=1)
        await kubelet.stop(wipe=True)
        await trio.sleep(2)  # as long as another process takes to come back
        assert not server.registered
        await kubelet.start()
        await kubelet.wait(RESOURCE, registers=1, healthy=1, timeout=2)
        await assert_registered_once(kubelet, total=2)
        (answer,) = await kubelet.allocate(RESOURCE, ["d1"])
        assert answer["envs"] == {}


@in_other_process
@pytest.mark.parametrize("wipe", [True, False], ids=["wiped", "stale"])
async def test_server_registers_once_with_each_kubelet_when_it_restarts_in_a_hurry(
    short_path: Path, wipe: bool
) -> None:
    """Restarts one after the other end in one registration with the last kubelet, whatever was under way."""
    async with plugin_and_kubelet(short_path) as (_, kubelet):
        await kubelet.wait(RESOURCE, healthy=1)
        for _ in range(2):
            await kubelet.stop(wipe=wipe)
            await kubelet.start()
        state = await kubelet.wait(RESOURCE, streams_open=1, healthy=1, timeout=2)
        assert state["registers_total"] <= 3
        await assert_registered_once(kubelet, total=state["registers_total"])


DROPS: dict[str, dict[str, Any]] = {
    "cancel": {"how": "cancel"},
    "channel": {"how": "channel"},
    "cancel and keep the channel": {"how": "cancel", "keep_channel": True},
}


@in_other_process
@pytest.mark.parametrize("drop", DROPS)
async def test_server_registers_again_when_the_stream_ends(short_path: Path, drop: str) -> None:
    """kubelet never opens a stream again by itself: however it has ended, there is one new registration."""
    async with plugin_and_kubelet(short_path) as (_, kubelet):
        for number in range(1, 4):
            await kubelet.wait(RESOURCE, registers=number, healthy=1)
            await kubelet.drop(RESOURCE, **DROPS[drop])
        state = await kubelet.wait(RESOURCE, registers=4, streams_open=1, healthy=1)
        assert (state["attempts"], state["streams_max"], state["trap"]) == (4, 1, 0)


@in_other_process
async def test_server_has_exactly_one_stream_when_it_was_dropped_200_times(short_path: Path) -> None:
    """After each of many drops there is one stream, by one registration, and kubelet's trap never closed."""
    async with plugin_and_kubelet(short_path) as (_, kubelet):
        with trio.fail_after(60):
            for number in range(1, 202):
                state = await kubelet.wait(RESOURCE, registers=number, streams_open=1, healthy=1)
                assert (state["attempts"], state["registers"], state["trap"]) == (number, number, 0)
                if number <= 200:
                    await kubelet.drop(RESOURCE, "cancel" if number % 2 else "channel")
        assert state["streams_max"] == 1
        assert state["errors"] == []


@in_other_process
async def test_server_registers_again_when_kubelet_watches_twice(short_path: Path) -> None:
    """A kubelet that has connected for a daemon that died, too, and to which the end of one stream is that of both."""
    async with plugin_and_kubelet(short_path) as (server, kubelet):
        await kubelet.wait(RESOURCE, streams_open=1, registers=1, healthy=1)
        request = api.RegisterRequest(version="v1beta1", endpoint=server.socket_path.name, resource_name=RESOURCE)
        await call_unix(
            short_path / "device-plugins" / "kubelet.sock",
            "v1beta1.Registration/Register",
            request,
            api.Empty,
            timeout=10,
        )
        state = await kubelet.wait(RESOURCE, registers=3, streams_open=1, healthy=1)
        assert (state["registers"], state["connected"]) == (3, True)
        await kubelet.allocate(RESOURCE, ["d1"])


@in_other_process
async def test_server_registers_again_when_kubelets_directory_is_made_again(short_path: Path) -> None:
    """A plugin directory that is deleted and made again is followed."""
    async with plugin_and_kubelet(short_path) as (_, kubelet):
        await kubelet.wait(RESOURCE, healthy=1)
        await kubelet.stop(wipe=True)
        await trio.to_thread.run_sync(shutil.rmtree, plugin_dir(short_path))
        await kubelet.start()
        await assert_registered_once(kubelet, total=2)


@in_other_process
async def test_server_serves_again_when_its_own_socket_is_deleted(short_path: Path) -> None:
    """A server whose socket somebody deletes makes it again and registers again, with one stream at a time."""
    async with plugin_and_kubelet(short_path) as (server, kubelet):
        for number in range(1, 4):
            await kubelet.wait(RESOURCE, registers=number, streams_open=1, healthy=1)
            server.socket_path.unlink()
        state = await kubelet.wait(RESOURCE, registers=4, streams_open=1, healthy=1)
        assert (state["attempts"], state["streams_max"], state["trap"]) == (4, 1, 0)
        assert server.socket_path.is_socket()


@in_other_process
async def test_server_keeps_nothing_when_streams_come_and_go(short_path: Path) -> None:
    """Descriptors and tasks are as many after a hundred streams that were dropped as before."""
    async with plugin_and_kubelet(short_path) as (_, kubelet):
        tasks, fds = [], []
        for _ in range(2):
            await kubelet.wait(RESOURCE, streams_open=1, healthy=1)
            await wait_all_tasks_blocked(0.2)
            tasks.append(trio.lowlevel.current_statistics().tasks_living)
            fds.append(len(open_fds()))
            await kubelet.churn(RESOURCE, 100)
        assert tasks[0] == tasks[1]
        assert fds[0] == fds[1]


@in_other_process
async def test_server_leaves_at_once_when_it_is_cancelled(short_path: Path) -> None:
    """On the way out the stream is ended and the socket unlinked, within a second, and nothing stays open."""
    async with running_kubelet(short_path) as kubelet:
        before = open_fds()
        server = ResourceServer("test.org", "demo", kubelet_dir=short_path)
        server.update({"d1": DeviceInfo()})
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server.run)
                await kubelet.wait(RESOURCE, streams_open=1, healthy=1)
                started = trio.current_time()
                scope.cancel()
        assert trio.current_time() - started < 1
        assert not server.socket_path.exists()
        await kubelet.wait(RESOURCE, streams_open=0, timeout=1)
        assert not server.registered
        assert not server.watched
        assert open_fds() == before
