"""What framework and plugin promise, name by name as their API documents have it; kubelet is grpcio elsewhere."""

from __future__ import annotations

import sys
import threading
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from fakes import FakeDevlink, FakeEthtool, FakeHost, FakeNetwork, FakePodResources, FakeXdp
from kubelet import Kubelet, KubeletError, running_kubelet

import afxdpd
from afxdpd import (
    HEALTHY,
    UNHEALTHY,
    ConfigError,
    DeviceInfo,
    DeviceTree,
    EndpointBusyError,
    GrpcServer,
    Manager,
    NetDevice,
    Network,
    Notifier,
    PluginConfig,
    PoolConfig,
    PoolDeviceInfo,
    PoolManager,
    UdsServer,
    UseDefaultMethodError,
    Xdp,
    get_plugin_config,
    get_pool_configs,
    new_device_info,
    new_device_info_with_topology_hints,
    new_device_tree,
    new_pool_manager,
)
from afxdpd_proto import deviceplugin_pb2 as api

pytestmark = pytest.mark.kubelet

RESOURCE = "test.org/demo"


class Plugin:
    """A Scanner that tells what a test shows it. Subclasses have hooks."""

    def __init__(self, **types: dict[str, DeviceInfo]) -> None:
        self.notifier: Notifier | None = None
        self.types = types

    async def scan(self, notifier: Notifier) -> None:
        """Hands the notifier to the test."""
        self.notifier = notifier
        self.show(**self.types)
        await trio.sleep_forever()

    def show(self, **types: dict[str, DeviceInfo]) -> None:
        """Notifies of these device types."""
        assert self.notifier is not None
        self.notifier.notify(DeviceTree(types))


@asynccontextmanager
async def managed(plugin: Any, directory: Path) -> AsyncIterator[Manager]:
    """A Manager at work, at a kubelet below a directory."""
    manager = Manager("test.org", plugin, kubelet_dir=directory)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(manager.run)
        yield manager
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def node(plugin: Any, directory: Path) -> AsyncIterator[Kubelet]:
    """kubelet, and a plugin whose type "demo" it watches."""
    async with running_kubelet(directory) as kubelet, managed(plugin, directory):
        await kubelet.wait(RESOURCE, registers=1, streams_open=1, messages=1)
        yield kubelet


NULL = api.DeviceSpec(host_path="/dev/null", container_path="/dev/null", permissions="rw")


async def test_new_device_info(short_path: Path) -> None:
    """Nodes, mounts and envs of a DeviceInfo reach the container, whatever becomes of its topology."""
    info = new_device_info(
        HEALTHY, [NULL], [api.Mount(host_path="/a", container_path="/b")], {"A": "1"}, {"n": "x"}, ["c"]
    )
    async with node(Plugin(demo={"d": info}), short_path) as kubelet:
        (answer,) = await kubelet.allocate(RESOURCE, ["d"])
    assert answer["devices"] == [{"host_path": "/dev/null", "container_path": "/dev/null", "permissions": "rw"}]
    assert answer["mounts"] == [{"host_path": "/a", "container_path": "/b", "read_only": False}]
    assert (answer["envs"], answer["annotations"], answer["cdi_devices"]) == ({"A": "1"}, {"n": "x"}, [{"name": "c"}])


async def test_new_device_info_with_topology_hints(short_path: Path) -> None:
    """The topology that a plugin gives reaches kubelet, as does none."""
    hint = api.TopologyInfo(nodes=[api.NUMANode(ID=1)])
    devices = {
        "near": new_device_info_with_topology_hints(HEALTHY, [NULL], topology=hint),
        "far": new_device_info_with_topology_hints(HEALTHY, [NULL]),
    }
    async with node(Plugin(demo=devices), short_path) as kubelet:
        listed = (await kubelet.state(RESOURCE))["devices"]
    assert {name: device["nodes"] for name, device in listed.items()} == {"near": [1], "far": []}


async def test_device_tree(short_path: Path) -> None:
    """Each type of a tree becomes a resource with the devices that were added to it."""
    tree = new_device_tree()
    tree.add_device("demo", "d1", DeviceInfo())
    tree.add_device("demo", "d2", DeviceInfo(state=UNHEALTHY, reason="a test"))
    tree.add_device("other", "d1", DeviceInfo())
    async with node(Plugin(**tree), short_path) as kubelet:
        await kubelet.wait(RESOURCE, devices={"d1": "Healthy", "d2": "Unhealthy"})
        await kubelet.wait("test.org/other", devices={"d1": "Healthy"})


@pytest.mark.parametrize("plain", [False, True])
async def test_scanner_scan(short_path: Path, plain: bool) -> None:
    """Its failure ends the Manager with that very error, and nothing else."""

    class Failing:
        async def scan(self, _: Notifier) -> None:
            raise LookupError("no bus")

    class FailingPlain:
        def scan(self, _: Notifier) -> None:
            raise LookupError("no bus")

    manager = Manager("test.org", FailingPlain() if plain else Failing(), kubelet_dir=short_path)  # type: ignore[arg-type]
    with pytest.raises(LookupError, match=r"^no bus$"):
        await manager.run()


async def test_notifier_notify(short_path: Path) -> None:
    """Ten thousand times the same tree is no message to kubelet, and no memory."""
    plugin = Plugin(demo={f"d{number}": DeviceInfo() for number in range(10)})
    async with node(plugin, short_path) as kubelet:
        messages = (await kubelet.state(RESOURCE))["messages"]
        plugin.show(**plugin.types)
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(10_000):
            plugin.show(demo={f"d{number}": DeviceInfo() for number in range(10)})
        growth = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        plugin.show(demo={"last": DeviceInfo()})
        state = await kubelet.wait(RESOURCE, devices={"last": "Healthy"})
    assert state["messages"] == messages + 1
    assert growth < 100_000


async def test_manager_run(short_path: Path) -> None:
    """One type's failure does not stop the others: here the endpoint of one cannot be made."""
    plugin = Plugin(demo={"d": DeviceInfo()})
    async with node(plugin, short_path) as kubelet:
        (short_path / "device-plugins" / "test.org-bad.sock").mkdir()
        plugin.show(demo={"d": DeviceInfo(), "e": DeviceInfo()}, bad={"d": DeviceInfo()}, good={"d": DeviceInfo()})
        await kubelet.wait("test.org/good", devices={"d": "Healthy"})
        state = await kubelet.wait(RESOURCE, devices={"d": "Healthy", "e": "Healthy"})
        assert state["registers_total"] == 1
        (short_path / "device-plugins" / "test.org-bad.sock").rmdir()
        await kubelet.wait("test.org/bad", devices={"d": "Healthy"})


async def test_allocator_allocate(short_path: Path) -> None:
    """It replaces the default, and falls back to it by UseDefaultMethodError; async or plain."""

    class Allocating(Plugin):
        def allocate(self, request: api.AllocateRequest) -> api.AllocateResponse:
            if list(request.container_requests[0].devices_ids) == ["usual"]:
                raise UseDefaultMethodError
            return api.AllocateResponse(container_responses=[api.ContainerAllocateResponse(envs={"OWN": "1"})])

    async with node(Allocating(demo={"usual": DeviceInfo(envs={"USUAL": "1"})}), short_path) as kubelet:
        assert [(await kubelet.allocate(RESOURCE, [name]))[0]["envs"] for name in ("usual", "other")] == [
            {"USUAL": "1"},
            {"OWN": "1"},
        ]


async def test_default_allocate(short_path: Path) -> None:
    """It names what is unknown or unhealthy, merges without repeating, and refuses what contradicts itself."""
    devices = {
        "a": DeviceInfo(nodes=[NULL], envs={"X": "1"}),
        "b": DeviceInfo(nodes=[NULL], envs={"X": "1", "Y": "2"}),
        "c": DeviceInfo(envs={"X": "3"}),
        "bad": DeviceInfo(state=UNHEALTHY, reason="on fire"),
    }
    async with node(Plugin(demo=devices), short_path) as kubelet:
        (answer,) = await kubelet.allocate(RESOURCE, ["a", "b"])
        assert (len(answer["devices"]), answer["envs"]) == (1, {"X": "1", "Y": "2"})
        for names, code, words in (
            (["nosuch"], "NOT_FOUND", "nosuch"),
            (["bad"], "FAILED_PRECONDITION", "bad is unhealthy: on fire"),
            (["a", "c"], "FAILED_PRECONDITION", "disagree on the variable X: '1', '3'"),
        ):
            with pytest.raises(KubeletError, match=words) as refusal:
                await kubelet.allocate(RESOURCE, names)
            assert refusal.value.code == code


async def test_post_allocator_post_allocate(short_path: Path) -> None:
    """It may change the response, and its error fails the call."""

    class Stamping(Plugin):
        async def post_allocate(self, response: api.AllocateResponse) -> None:
            if response.container_responses[0].envs.get("FAIL"):
                raise LookupError("no stamp")
            response.container_responses[0].annotations["stamped"] = "yes"

    devices = {"a": DeviceInfo(), "b": DeviceInfo(envs={"FAIL": "1"})}
    async with node(Stamping(demo=devices), short_path) as kubelet:
        assert (await kubelet.allocate(RESOURCE, ["a"]))[0]["annotations"] == {"stamped": "yes"}
        with pytest.raises(KubeletError, match=r"post_allocate failed: LookupError\('no stamp'\)"):
            await kubelet.allocate(RESOURCE, ["b"])


async def test_preferred_allocator_get_preferred_allocation(short_path: Path) -> None:
    """It is announced only where the plugin has it, and its advice reaches kubelet."""

    class Advising(Plugin):
        async def get_preferred_allocation(self, _: api.PreferredAllocationRequest) -> api.PreferredAllocationResponse:
            return api.PreferredAllocationResponse(
                container_responses=[api.ContainerPreferredAllocationResponse(deviceIDs=["b"])]
            )

    async with node(Advising(demo={"a": DeviceInfo()}), short_path) as kubelet:
        assert (await kubelet.options(RESOURCE))["get_preferred_allocation_available"]
        assert await kubelet.preferred(RESOURCE, ["a", "b"], 1) == ["b"]
    async with node(Plugin(demo={"a": DeviceInfo()}), short_path) as kubelet:
        assert not (await kubelet.options(RESOURCE))["get_preferred_allocation_available"]


async def test_container_pre_starter_pre_start_container(short_path: Path) -> None:
    """It is announced only where the plugin has it, and is called with the container's devices."""
    seen = []

    class Resetting(Plugin):
        def pre_start_container(self, request: api.PreStartContainerRequest) -> None:
            seen.append(list(request.devices_ids))

    async with node(Resetting(demo={"a": DeviceInfo()}), short_path) as kubelet:
        assert (await kubelet.options(RESOURCE))["pre_start_required"]
        await kubelet.prestart(RESOURCE, ["a"])
    async with node(Plugin(demo={"a": DeviceInfo()}), short_path) as kubelet:
        assert not (await kubelet.options(RESOURCE))["pre_start_required"]
    assert seen == [["a"]]


# -- What happens while kubelet is away --------------------------------------------------------------------------------


async def test_kubelet_finds_the_present_state_when_it_was_away(short_path: Path) -> None:
    """Types that came, changed and went meanwhile are as they are now; those that went have no socket."""
    plugin = Plugin(demo={"a": DeviceInfo()}, old={"a": DeviceInfo()})
    plugins = short_path / "device-plugins"
    async with node(plugin, short_path) as kubelet:
        await kubelet.wait("test.org/old", registers=1)
        await kubelet.stop()
        plugin.show(demo={"b": DeviceInfo()}, new={"c": DeviceInfo()})
        await kubelet.start()
        await kubelet.wait(RESOURCE, registers=1, devices={"b": "Healthy"})
        await kubelet.wait("test.org/new", registers=1, devices={"c": "Healthy"})
        state = await kubelet.state()
        assert state["resources"]["test.org/old"]["registers"] == 0
        assert not (plugins / "test.org-old.sock").exists()


async def test_other_types_never_blink_when_one_is_removed(short_path: Path) -> None:
    """The stream of a removed type ends and its socket goes; the others are not registered again."""
    plugin = Plugin(demo={"a": DeviceInfo()}, old={"a": DeviceInfo()})
    async with node(plugin, short_path) as kubelet:
        await kubelet.wait("test.org/old", registers=1, streams_open=1)
        plugin.show(demo={"a": DeviceInfo()})
        await kubelet.wait("test.org/old", streams_open=0)
        state = await kubelet.wait(RESOURCE, streams_open=1)
        assert (state["registers_total"], state["streams_max"]) == (1, 1)
        plugin.show(demo={"a": DeviceInfo(), "b": DeviceInfo()})
        await kubelet.wait(RESOURCE, devices={"a": "Healthy", "b": "Healthy"})
        assert not (short_path / "device-plugins" / "test.org-old.sock").exists()


async def test_kubelet_gets_one_message_when_a_thousand_trees_came_while_it_was_away(short_path: Path) -> None:
    """Only the last of a thousand different trees is kept, and it is the one message of the new stream."""
    plugin = Plugin(demo={"a": DeviceInfo()})
    async with node(plugin, short_path) as kubelet:
        await kubelet.stop()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for number in range(1000):
            plugin.show(demo={f"d{number}": DeviceInfo()})
            await trio.lowlevel.checkpoint()
        growth = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        await kubelet.start()
        state = await kubelet.wait(RESOURCE, registers=1, devices={"d999": "Healthy"})
    assert state["messages"] == 1
    assert growth < 200_000


# -- Plugins that go wrong ---------------------------------------------------------------------------------------------


class WrongBase(Plugin):
    """A plugin whose every hook does what `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__(demo={"a": DeviceInfo(), "b": DeviceInfo()})
        self.how = how
        self.end = threading.Event()  # of what hangs

    def fail(self, request: object) -> int:
        """Goes wrong at once; Allocate of device b is left to the default, so that post_allocate has its turn."""
        if isinstance(request, api.AllocateRequest) and request.container_requests[0].devices_ids[0] == "b":
            raise UseDefaultMethodError
        match self.how:
            case "raises":
                raise LookupError("lost")
            case "cannot":
                raise FileNotFoundError(2, "No such file or directory", "/dev/bus")
            case "exits":
                sys.exit(3)
        return 42


class Wrong(WrongBase):
    """With async methods."""

    async def _misbehave(self, request: object) -> int:
        result = self.fail(request)
        if self.how == "hangs":
            await trio.sleep_forever()
        return result

    allocate = get_preferred_allocation = pre_start_container = post_allocate = _misbehave


class WrongPlain(WrongBase):
    """With plain methods."""

    def _misbehave_plainly(self, request: object) -> int:
        result = self.fail(request)
        if self.how == "hangs":
            assert self.end.wait(60)
        return result

    allocate = get_preferred_allocation = pre_start_container = post_allocate = _misbehave_plainly


HOOKS: dict[str, Callable[[Kubelet], Awaitable[Any]]] = {
    "allocate": lambda kubelet: kubelet.allocate(RESOURCE, ["a"]),
    "post_allocate": lambda kubelet: kubelet.allocate(RESOURCE, ["b"]),
    "get_preferred_allocation": lambda kubelet: kubelet.preferred(RESOURCE, ["a"], 1),
    "pre_start_container": lambda kubelet: kubelet.prestart(RESOURCE, ["a"]),
}


@pytest.mark.parametrize("kind", [Wrong, WrongPlain])
async def test_caller_is_told_hook_and_error_when_a_hook_goes_wrong(
    short_path: Path, kind: type[WrongBase], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook that raises, returns the wrong type or hangs costs its caller one call, with words that name it."""
    for timeout in ("ALLOCATE_TIMEOUT", "PRE_START_TIMEOUT", "HOOK_TIMEOUT"):
        monkeypatch.setattr(afxdpd, timeout, 0.3)
    plugin = kind("raises")
    async with node(plugin, short_path) as kubelet:
        for plugin.how, code, words in (
            ("raises", "INTERNAL", r"{hook} failed: LookupError\('lost'\)"),
            ("cannot", "INTERNAL", r"{hook} failed: FileNotFoundError\(2, "),
            ("returns", "INTERNAL", "{hook} returned int, not "),
            ("exits", "INTERNAL", r"{hook} failed: SystemExit\(3\)"),
            ("hangs", "DEADLINE_EXCEEDED", "{hook} did not end in time"),
        ):
            for hook, call in HOOKS.items():
                with pytest.raises(KubeletError, match=words.format(hook=hook)) as error:
                    await call(kubelet)
                assert error.value.code == code
        plugin.end.set()
        plugin.show(demo={"c": DeviceInfo()})
        state = await kubelet.wait(RESOURCE, devices={"c": "Healthy"})
        assert state["registers_total"] == 1


async def test_second_plugin_is_refused_when_another_serves_the_type(short_path: Path) -> None:
    """It ends with a message that names the socket, and the first does not notice; a dead one's file is replaced."""
    path = short_path / "device-plugins" / "test.org-demo.sock"
    async with node(Plugin(demo={"a": DeviceInfo()}), short_path) as kubelet:
        with pytest.raises(EndpointBusyError, match=str(path)):
            await Manager("test.org", Plugin(demo={"z": DeviceInfo()}), kubelet_dir=short_path).run()
        state = await kubelet.wait(RESOURCE, streams_open=1, devices={"a": "Healthy"})
        assert state["registers_total"] == 1


async def test_kubelet_is_told_when_a_plugin_changes_what_it_gave(short_path: Path) -> None:
    """A topology that the plugin goes on changing is news when it is told again: what was told before was a copy."""
    hint = api.TopologyInfo(nodes=[api.NUMANode(ID=0)])
    plugin = Plugin(demo={"a": new_device_info_with_topology_hints(HEALTHY, topology=hint)})
    async with node(plugin, short_path) as kubelet:
        messages = (await kubelet.state(RESOURCE))["messages"]
        hint.nodes[0].ID = 1
        plugin.show(demo={"a": new_device_info_with_topology_hints(HEALTHY, topology=hint)})
        state = await kubelet.wait(RESOURCE, messages=messages + 1)
    assert state["devices"]["a"]["nodes"] == [1]


# -- What a plugin may hand over ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"state": "healthy"},
        {"state": 1},
        {"nodes": [api.Mount()]},
        {"mounts": ["/dev"]},
        {"envs": {"A": 1}},
        {"envs": {"A": "\udcff"}},
        {"annotations": {1: "a"}},
        {"cdi_devices": "vendor.com/x=1"},
        {"cdi_devices": [1]},
        {"topology": "node0"},
    ],
)
def test_device_info_is_refused_when_kubelet_could_not_be_told(wrong: dict[str, Any]) -> None:
    """What no message of kubelet's API can hold fails where it is made, not when a pod is admitted."""
    with pytest.raises((TypeError, ValueError)):
        DeviceInfo(**wrong)


@pytest.mark.parametrize("device_id", ["", 1, b"a", "\udcff"])
async def test_tree_is_refused_when_an_id_is_no_text(device_id: Any) -> None:
    """An id that kubelet cannot be told is an error of the scan."""
    with pytest.raises(ValueError, match="not the id of a device"):
        Notifier().notify(DeviceTree(demo={device_id: DeviceInfo()}))


@pytest.mark.parametrize("namespace", ["", "a/b", "../x", "a b", "UPPER", "x\0", "a" * 254])
def test_manager_is_refused_when_its_namespace_is_no_domain(namespace: str) -> None:
    """A namespace that kubelet would not take, or that would leave its directory, is refused at once."""
    with pytest.raises(ValueError, match="not a domain"):
        Manager(namespace, Plugin())


async def test_manager_serves_again_when_it_is_run_again(short_path: Path) -> None:
    """A Manager can be run a second time after the first, and not beside it."""
    manager = Manager("test.org", Plugin(demo={"a": DeviceInfo()}), kubelet_dir=short_path)
    async with running_kubelet(short_path) as kubelet:
        for number in (1, 2):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(manager.run)
                await kubelet.wait(RESOURCE, registers=number, streams_open=1, devices={"a": "Healthy"})
                with pytest.raises(RuntimeError, match="runs already"):
                    await manager.run()
                nursery.cancel_scope.cancel()
            assert not manager.servers


async def test_notifier_tells_a_tree_when_it_comes_from_any_thread(short_path: Path) -> None:
    """A thread that trio did not make may notify, until the Manager has ended: then it is told so."""
    plugin = Plugin(demo={"a": DeviceInfo()})
    async with node(plugin, short_path) as kubelet:
        thread = threading.Thread(target=plugin.show, kwargs={"demo": {"b": DeviceInfo()}})
        thread.start()
        await kubelet.wait(RESOURCE, devices={"b": "Healthy"})
        thread.join()
    with pytest.raises(RuntimeError, match="has ended"):
        plugin.show(demo={"c": DeviceInfo()})


async def test_type_is_served_when_its_name_makes_a_path_too_long(short_path: Path) -> None:
    """A resource's name of any length that kubelet takes gets a socket."""
    name = "x" * 63
    directory = short_path / ("d" * 30)
    async with running_kubelet(directory) as kubelet, managed(Plugin(**{name: {"a": DeviceInfo()}}), directory):
        await kubelet.wait(f"test.org/{name}", devices={"a": "Healthy"})


class Odd(Plugin):
    """Hooks that are async in unusual ways, or fail in a nursery of their own."""

    def __init__(self) -> None:
        super().__init__(demo={"a": DeviceInfo(envs={"D": "1"})})
        self.post_allocate = lambda response: self.stamp(response)
        self.get_preferred_allocation = None

    async def allocate(self, request: api.AllocateRequest) -> api.AllocateResponse:
        """Spoils its copy of the request, then leaves the answer to the default, from inside a nursery."""
        request.container_requests[0].devices_ids[:] = ["nonsense"]
        async with trio.open_nursery():
            raise UseDefaultMethodError

    async def stamp(self, response: api.AllocateResponse) -> None:
        """Is reached through a plain function."""
        response.container_responses[0].annotations["stamped"] = "yes"


async def test_hooks_work_when_they_are_async_in_unusual_ways(short_path: Path) -> None:
    """Plain functions around async ones, groups around our own errors, and None for a hook are what they mean."""
    async with node(Odd(), short_path) as kubelet:
        assert not (await kubelet.options(RESOURCE))["get_preferred_allocation_available"]
        (answer,) = await kubelet.allocate(RESOURCE, ["a"])
    assert (answer["envs"], answer["annotations"]) == ({"D": "1"}, {"stamped": "yes"})


async def test_allocate_fails_when_the_plugin_answers_too_little(short_path: Path) -> None:
    """A container without an answer would start without its devices: kubelet is told an error instead."""

    class Short(Plugin):
        def allocate(self, _: api.AllocateRequest) -> api.AllocateResponse:
            return api.AllocateResponse()

    async with node(Short(demo={"a": DeviceInfo()}), short_path) as kubelet:
        with pytest.raises(KubeletError, match="allocate answered 0 of 1 containers"):
            await kubelet.allocate(RESOURCE, ["a"])


# -- The AF_XDP plugin, name by name -----------------------------------------------------------------------------------

CONFIG = """{
    "logFile": "afxdp-dp.log",
    "logLevel": "debug",
    "pools": [{
        "name": "pool",
        "mode": "primary",
        "udsTimeout": 60,
        "udsFuzz": true,
        "uid": 1500,
        "requiresUnprivilegedBpf": true,
        "ethtoolCmds": ["-K -device- gro off"],
        "devices": [{"name": "veth0"}, {"name": "veth1"}]
    }]
}"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A configuration with something for each field of the structs."""
    file = tmp_path / "config.json"
    file.write_text(CONFIG)
    return file


@pytest.fixture
def network() -> FakeNetwork:
    """A host with a device of the pool, and another one."""
    network = FakeNetwork()
    network.show(NetDevice(name="veth0", ifindex=10), NetDevice(name="veth9", ifindex=19))
    return network


def test_plugin_config(config_file: Path) -> None:
    """It holds what is said of the plugin as a whole: where it logs to, and how much."""
    config = get_plugin_config(config_file)
    assert isinstance(config, PluginConfig)
    assert (config.log_file, config.log_level) == ("afxdp-dp.log", "debug")


def test_get_plugin_config(config_file: Path) -> None:
    """It reads the file, and what is wrong there is one error that names the file."""
    assert get_plugin_config(str(config_file)) == get_plugin_config(config_file)
    config_file.write_text("{")
    with pytest.raises(ConfigError, match=str(config_file)):
        get_plugin_config(config_file)


def test_pool_config(config_file: Path, network: FakeNetwork) -> None:
    """It holds what is said of a pool, and the devices that the pool has on this host."""
    host = FakeHost()
    host.unprivileged_bpf = True
    (config,) = get_pool_configs(config_file, network, host)
    assert isinstance(config, PoolConfig)
    assert (config.name, config.mode) == ("pool", "primary")
    assert config.devices == {"veth0": network.devices()["veth0"]}
    assert config.filters == config.ethtool_cmds == ("-K -device- gro off",)
    assert (config.uds_server_disable, config.uds_timeout, config.uds_fuzz) == (False, 60, True)
    assert (config.requires_unprivileged_bpf, config.uid) == (True, 1500)


def test_get_pool_configs(config_file: Path, network: FakeNetwork) -> None:
    """What the host cannot do counts: this pool takes nothing without unprivileged BPF. A wrong file is an error."""
    (config,) = get_pool_configs(config_file, network, FakeHost())
    assert config.devices == {}
    config_file.write_text('{"pools": [{}]}')
    with pytest.raises(ConfigError, match=r"pools\[0\]\.name: is missing"):
        get_pool_configs(config_file, network, FakeHost())


async def test_new_pool_manager(network: FakeNetwork) -> None:
    """It makes a pool in the usual places, with the real handlers; nothing runs and nothing is touched yet."""
    pool = new_pool_manager(PoolConfig(name="pool", mode="primary", devices=network.devices()))
    assert isinstance(pool, PoolManager)
    assert isinstance(pool.bpf_handler, Xdp)
    assert isinstance(pool.net_handler, Network)
    assert pool.dp_api_socket == Path("/var/lib/kubelet/device-plugins/afxdp-pool.sock")
    assert not pool.registered


@asynccontextmanager
async def pool_at_work(directory: Path, **settings: Any) -> AsyncIterator[tuple[PoolManager, Kubelet]]:
    """A pool of veth0 and veth1 without a Manager, started in a nursery, at a kubelet; stopped in the end."""
    network = FakeNetwork()
    network.show(*(NetDevice(name=f"veth{number}", ifindex=10 + number) for number in range(2)))
    pool = PoolManager(
        PoolConfig(name="pool", mode="primary", devices=network.devices(), **settings),
        xdp=FakeXdp(directory / "kernel", network),
        host=FakeHost(),
        network=network,
        devlink=FakeDevlink(network),
        ethtool=FakeEthtool(),
        pod_resources=FakePodResources(),
        uds_dir=directory / "uds",
        kubelet_dir=directory / "kubelet",
    )
    async with running_kubelet(directory / "kubelet") as kubelet, trio.open_nursery() as nursery:
        pool.start(nursery)
        await kubelet.wait("afxdp/pool", devices={"veth0": HEALTHY, "veth1": HEALTHY})
        yield pool, kubelet
        await pool.stop()


async def test_pool_manager(short_path: Path) -> None:
    """Each field of the struct is there: what is said of the pool, what it has, how it serves, and its handlers."""
    commands = ("-K -device- gro off",)
    settings = {"uds_timeout": 60, "uds_fuzz": True, "uid": 1500, "ethtool_cmds": commands}
    async with pool_at_work(short_path, **settings) as (pool, _):
        assert (pool.name, pool.mode, sorted(pool.devices)) == ("pool", "primary", ["veth0", "veth1"])
        assert pool.dp_api_socket == short_path / "kubelet" / "device-plugins" / "afxdp-pool.sock"
        assert pool.dp_api_endpoint == "afxdp-pool.sock"
        assert isinstance(pool.dp_api_server, GrpcServer)
        assert (pool.uds_server_disable, pool.uds_timeout, pool.uds_fuzz, pool.uid) == (False, 60, True, 1500)
        assert (pool.device_prefix, pool.ethtool_filters) == ("afxdp", commands)
        assert pool.server_factory is UdsServer
        assert isinstance(pool.bpf_handler, FakeXdp)
        assert isinstance(pool.net_handler, FakeNetwork)
        update = pool.update_signal
        assert not update.is_set()
        pool.update({})
        assert update.is_set()
        assert pool.devices == {}
        assert not pool.update_signal.is_set()
    assert pool.dp_api_server is None


async def test_pool_manager_server_factory(short_path: Path) -> None:
    """What makes the sockets of allocated devices can be replaced in one pool."""
    made = []

    class OwnServer(UdsServer):
        pass

    async with pool_at_work(short_path) as (pool, kubelet):

        def factory(*arguments: Any, **options: Any) -> UdsServer:
            made.append(OwnServer(*arguments, **options))
            return made[-1]

        pool.server_factory = factory
        await kubelet.allocate("afxdp/pool", ["veth0"])
        assert pool.devices["veth0"].server is made[0]
        assert made[0].path.is_socket()


async def test_pool_manager_allocate(short_path: Path) -> None:
    """kubelet gets what the container needs, and names that no device has are refused."""
    async with pool_at_work(short_path) as (pool, kubelet):
        (answer,) = await kubelet.allocate("afxdp/pool", ["veth1"])
        assert answer["envs"] == {"AFXDP_DEVICES_POOL": "veth1"}
        assert [mount["container_path"] for mount in answer["mounts"]] == ["/tmp/afxdp_dp/veth1"]
        assert pool.allocated() == ["veth1"]
        with pytest.raises(KubeletError, match="veth9") as refusal:
            await kubelet.allocate("afxdp/pool", ["veth9"])
        assert refusal.value.code == "NOT_FOUND"


async def test_pool_manager_get_device_plugin_options(short_path: Path) -> None:
    """Both optional methods are announced."""
    async with pool_at_work(short_path) as (_, kubelet):
        assert all((await kubelet.options("afxdp/pool")).values())


async def test_pool_manager_get_preferred_allocation(short_path: Path) -> None:
    """kubelet is advised."""
    async with pool_at_work(short_path) as (_, kubelet):
        assert await kubelet.preferred("afxdp/pool", ["veth1", "veth0"], 1) == ["veth0"]


async def test_pool_manager_list_and_watch(short_path: Path) -> None:
    """kubelet is told when a device goes."""
    async with pool_at_work(short_path) as (pool, kubelet):
        pool.update({"veth0": PoolDeviceInfo(net=NetDevice(name="veth0", ifindex=10))})
        await kubelet.wait("afxdp/pool", devices={"veth0": HEALTHY})


async def test_pool_manager_pre_start_container(short_path: Path) -> None:
    """Before each start of a container what it has is made sure of."""
    async with pool_at_work(short_path) as (pool, kubelet):
        await kubelet.allocate("afxdp/pool", ["veth0"])
        server = pool.devices["veth0"].server
        assert server is not None
        server.path.unlink()
        await kubelet.prestart("afxdp/pool", ["veth0"])
        assert server.path.is_socket()


async def test_pool_manager_start_and_stop(short_path: Path) -> None:
    """It runs in a nursery of the caller's from start to stop, which leaves no socket but what a pod has."""
    async with pool_at_work(short_path) as (pool, kubelet):
        await kubelet.allocate("afxdp/pool", ["veth0"])
        assert not pool.stopped
        await pool.stop()
        assert pool.stopped
        await kubelet.wait("afxdp/pool", streams_open=0)
        assert not pool.dp_api_socket.exists()
        assert (short_path / "uds" / "pool" / "veth0").is_dir()
        await pool.stop()
