"""What happens seldom, and went wrong once: fakes for the kernel, and for kubelet where no stream is needed."""

from __future__ import annotations

import errno
import io
import logging
import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from conftest import open_fds
from fakes import FakeDevlink, FakeEthtool, FakeHost, FakeKind, FakeKubelet, FakeNetwork
from kubelet import KubeletError, pod, running_kubelet
from support import paths_options
from test_command_line import run
from test_config import EVERYTHING, changed, errors_of, plugin, without, write
from test_config import pool as pool_of
from test_ethtool import StandIn
from test_pool_options import (
    COMMANDS,
    NIC,
    PCI,
    Daemon,
    OptionsBench,
    allocate,
    del_net_dev,
    past_hold_off,
    plugin_socket,
    undo_files,
)
from test_pools import RESOURCE, config_of, eventually, net, release
from trio.testing import MockClock

import afxdpd
from afxdpd import (
    HEALTHY,
    OWNER_TIMEOUT,
    DeviceConfig,
    Ethtool,
    KindNetwork,
    NetDevice,
    PluginConfig,
    PodView,
    PoolRules,
    RpcError,
    check_report,
    get_plugin_config,
    serve,
)

OTHERS = pod("other", {})
"""A pod without devices: kubelet's answer is never empty."""


class Node(Daemon):
    """The daemon with fakes for all of the kernel. They outlive it, as the kernel does: it can be run again."""

    def __init__(self, directory: Path, config: PluginConfig, *devices: NetDevice) -> None:
        super().__init__(directory, config, *devices)
        self.devlink = FakeDevlink(self.network)
        self.ethtool = FakeEthtool()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """See Daemon.running."""
        async with aclosing(self._changes()) as changes, trio.open_nursery() as nursery:
            run = partial(serve, self.config, self.paths, changes=changes, network=self.network, xdp=self.xdp)
            run = partial(run, host=FakeHost(), kind=self.kind, devlink=self.devlink, ethtool=self.ethtool)
            await nursery.start(run)
            yield
            nursery.cancel_scope.cancel()
        assert self.xdp.descriptors() == []

    def kept(self) -> list[str]:
        """The files of what is to be undone."""
        return [path.name for path in (self.paths.uds_dir / ".ethtool").rglob("*") if path.is_file()]


def pools(*rules: dict[str, Any]) -> PluginConfig:
    """A configuration of these pools."""
    return PluginConfig(pools=tuple(PoolRules(**{"mode": "primary", **each}) for each in rules))


def named(*names: str) -> tuple[DeviceConfig, ...]:
    """Devices by name."""
    return tuple(DeviceConfig(name=name) for name in names)


# -- The CNI comes late, or again --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kubelet_says", ["the next pod", "nothing, it refuses", "nothing, it hangs"])
@pytest.mark.parametrize("raw", [False, True], ids=["socket", "raw"])
async def test_nothing_changes_when_the_cni_asks_late_for_what_the_next_pod_has(
    short_path: Path, mock_clock: MockClock, kubelet_says: str, raw: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A device that lives in a pod is that pod's: program, pins, socket and health stay, whatever kubelet answers."""
    caplog.set_level(logging.INFO, "afxdpd")
    bench = OptionsBench(short_path, uds_server_disable=raw)
    ended = PodView(owners={}, asked_at=0.0, empty=False)

    async def let_go(*, waits: bool = False) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.pool.let_go, "veth0")
            await trio.testing.wait_all_tasks_blocked()
            if waits:
                mock_clock.jump(OWNER_TIMEOUT + 0.1)

    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
        bench.owned("veth0", pod="old")
        bench.tell("veth0")
        bench.pod_resources.view = ended
        await let_go()
        past_hold_off(mock_clock)
        await eventually(bench.ready("veth0"))
        await bench.at_rest()
        await bench.allocate(["veth0"])
        bench.owned("veth0", pod="new")
        bench.tell("veth0")
        bench.show()
        bench.xdp.calls.clear()
        allocation = bench.pool.devices["veth0"].allocation
        before = state(bench)
        if kubelet_says != "the next pod":
            bench.pod_resources.error = RpcError("RESOURCE_EXHAUSTED", "later")
            bench.pod_resources.BUSY = 0.1 if "refuses" in kubelet_says else 1000.0
        for _ in range(3):
            await let_go(waits=kubelet_says != "the next pod")
            assert state(bench) == before
            past_hold_off(mock_clock)
            await bench.at_rest()
            assert state(bench) == before
        assert bench.pool.devices["veth0"].allocation is allocation
        assert bench.xdp.calls == []
        assert caplog.text.count("its pod has it: nothing is done") == 3

        bench.pod_resources.error, bench.pod_resources.view = None, ended
        bench.show("veth0")
        await let_go()
        assert bench.pool.allocated() == []
        past_hold_off(mock_clock)
        await eventually(bench.ready("veth0"))


def state(bench: OptionsBench) -> tuple[object, ...]:
    """All that a pod has of veth0."""
    pins = {key: dict(files) for key, files in bench.xdp.pins.items()}
    path = bench.path("veth0")
    return (
        bench.health(),
        bench.pool.allocated(),
        bench.xdp.program(10),
        pins,
        path.stat().st_ctime_ns if path.exists() else 0,
    )


async def test_nothing_happens_when_a_device_in_the_host_is_let_go_and_unpinned_twice(
    short_path: Path, mock_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """What is bare stays bare, also where somebody has removed the pins, and is one prepared device in the end."""
    bench = OptionsBench(short_path)
    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
        bench.owned("veth0")
        bench.tell("veth0")
        bench.pod_resources.view = PodView(owners={}, asked_at=0.0, empty=False)
        bench.xdp.pins.clear()
        for _ in range(3):
            assert await bench.pool.let_go("veth0")
            assert (bench.xdp.pins, bench.xdp.descriptors(), bench.xdp.program(10)) == ({}, [], 0)
            assert bench.health() == {"veth0": HEALTHY}
        bench.xdp.calls.clear()
        past_hold_off(mock_clock)
        await eventually(lambda: bench.xdp.program(10) != 0)
        await bench.at_rest()
        assert bench.ready("veth0")()
        assert bench.xdp.calls == [("attach", 10)]
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [text for text in warnings if "waiting for kubelet" not in text] == []


@pytest.mark.kubelet
@pytest.mark.parametrize("goes", ["to another pool", "altogether"])
async def test_allocate_is_refused_when_the_device_goes_while_it_waits_for_the_cni(
    short_path: Path, goes: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A device that leaves its pool between DelNetDev and the end of an Allocate holds nobody up, here or elsewhere."""
    caplog.set_level(logging.DEBUG, "afxdpd")
    monkeypatch.setattr(afxdpd, "HOLD_OFF", 0.5)
    node = Node(short_path, config_of(a=("veth0", "veth2"), b=("veth1",)), net("veth0"), net("veth1"), net("veth2"))
    both = dict.fromkeys(("veth0", "veth1"), HEALTHY)
    async with running_kubelet(node.paths.kubelet_dir) as kubelet, node.running():
        await kubelet.pods(OTHERS)
        await kubelet.wait("afxdp/a", healthy=2)
        await kubelet.wait("afxdp/b", healthy=1)

        async def refused() -> None:
            with pytest.raises(KubeletError, match="no device veth0 any more"):
                await kubelet.allocate("afxdp/a", ["veth0"], timeout=8)

        assert await del_net_dev(node.syncer, "veth0") == 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(refused)
            await eventually(lambda: "Allocate [['veth0']]" in caplog.text)
            if goes == "to another pool":
                node.change(config_of(a=("veth2",), b=("veth0", "veth1")))
            else:
                node.network.change(gone=["veth0"])
        await kubelet.wait("afxdp/a", devices={"veth2": HEALTHY})
        if goes == "to another pool":
            await kubelet.wait("afxdp/b", devices=both)
            await eventually(lambda: node.xdp.program(10) != 0)
            await kubelet.allocate("afxdp/b", ["veth0"])
        else:
            node.network.change(net("veth0", ifindex=30))
            await kubelet.wait("afxdp/a", healthy=2)
            await kubelet.allocate("afxdp/a", ["veth0"])
        assert await del_net_dev(node.syncer, "veth2") == 0
        assert node.xdp.program(12) == 0
        await eventually(lambda: caplog.text.count("veth2: prepared") == 2)


async def test_cni_is_served_when_a_pool_has_the_name_of_its_socket(short_path: Path) -> None:
    """A pool called syncer is registered with an endpoint of another name, and the CNI finds its own where it was."""
    node = Node(short_path, config_of(syncer=("veth0",), other=("veth1",)), net("veth0"), net("veth1"))
    kubelet = FakeKubelet(node.paths.kubelet_dir)
    async with trio.open_nursery() as nursery:
        await nursery.start(kubelet.serve)
        async with node.running():
            requests = [await kubelet.registered.receive() for _ in range(2)]
            endpoints = {request.resource_name: request.endpoint for request in requests}
            assert endpoints["afxdp/other"] == "afxdp-other.sock"
            assert endpoints["afxdp/syncer"] not in ("afxdp-syncer.sock", "afxdp-other.sock")
            await eventually(node.syncer.is_socket)
            own = node.syncer.with_name(endpoints["afxdp/syncer"])
            own.rename(node.syncer.with_name("afxdp-moved.sock"))  # where `allocate` looks
            await allocate(node, "moved", "veth0")
            assert node.path("syncer", "veth0").is_socket()
            assert await del_net_dev(node.syncer, "veth0") == 0
            assert node.xdp.program(10) == 0
            assert not plugin_socket(node, "syncer").is_symlink()
        nursery.cancel_scope.cancel()


# -- What is to be undone ----------------------------------------------------------------------------------------------

GONE = "rmgr: Cannot delete RX class rule: No such file or directory\nCannot delete classification rule\n"
BUSY = "rmgr: Cannot delete RX class rule: Device or resource busy\nCannot delete classification rule\n"


@pytest.fixture
def ethtool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """A program ethtool that says what it is told to."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return StandIn(tmp_path)


@pytest.mark.parametrize(
    ("command", "said", "status", "done"),
    [
        ("-N veth6 delete 7", GONE, 1, True),
        ("-U veth6 delete 7", GONE, 1, True),
        ("--config-ntuple veth6 delete 7", GONE, 0, True),
        ("--config-nfc veth6 delete 7", GONE, 0, True),
        ("-N veth6 delete 7", BUSY, 1, False),
        ("-N veth6 delete 7", "netlink error: No such device\n", 1, False),
        ("-X veth6 default", GONE, 1, False),
    ],
    ids=["gone -N", "gone -U", "gone, status 0", "gone by its long name", "busy", "no device", "no rule"],
)
def test_rule_counts_as_deleted_when_there_is_none(
    ethtool: StandIn, tmp_path: Path, command: str, said: str, status: int, done: bool
) -> None:
    """A rule that somebody else has deleted is undone; whatever else ethtool refuses is told. All others are tried."""
    commands = [["-X", "veth6", "default"], command.split(), ["-X", "veth6", "default"]]
    ethtool.answers(complaint=said)
    ethtool.script(
        f"""cd {tmp_path}
        echo "$*" >> log
        [ "$*" != "{command}" ] || {{ cat complaint >&2; exit {status}; }}"""
    )
    if done:
        Ethtool().undo(commands)
    else:
        with pytest.raises(OSError, match=said.splitlines()[0].rpartition(": ")[2]):
            Ethtool().undo(commands)
    assert ethtool.calls() == [" ".join(each) for each in reversed(commands)]


def test_rule_is_not_undone_when_there_is_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That ethtool itself is no such file is another thing."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="install it"):
        Ethtool().undo([["-N", "veth6", "delete", "7"]])


@pytest.fixture
def tuned(short_path: Path) -> OptionsBench:
    """A pool with ethtool commands."""
    return OptionsBench(short_path, ethtool_cmds=COMMANDS)


async def while_allocated(bench: OptionsBench, clock: MockClock) -> None:
    """It is made again while its pod is still known; then that is released."""
    bench.network.show(net("veth0", ifindex=20))
    await bench.at_rest()
    assert bench.xdp.program(20)
    release(bench)


async def at_its_release(bench: OptionsBench, clock: MockClock) -> None:
    """It is made again and its pod is released before anything else happens."""
    bench.show(net("veth0", ifindex=20))
    release(bench)


async def at_the_next_allocate(bench: OptionsBench, clock: MockClock) -> None:
    """It is made again, and the next pod is given it before anything else happens."""
    bench.show(net("veth0", ifindex=20))
    await bench.allocate(["veth0"])
    assert not any("default" in command for command in bench.ethtool.ran)
    bench.ethtool.ran.clear()
    bench.xdp.destroy(20)
    bench.show()
    release(bench)
    await eventually(lambda: bench.pool.listed() == {})
    bench.show(net("veth0", ifindex=20))


async def after_its_release(bench: OptionsBench, clock: MockClock) -> None:
    """Its pod is released while there is no such device; then it is made again."""
    release(bench)
    await eventually(lambda: bench.pool.listed() == {})
    await bench.at_rest()
    bench.network.show(net("veth0", ifindex=20))


async def after_the_cnis_call(bench: OptionsBench, clock: MockClock) -> None:
    """The CNI asks for it when it is no more; then it is made again."""
    bench.pod_resources.view = PodView(owners={}, asked_at=0.0, empty=False)
    assert await bench.pool.let_go("veth0")
    bench.network.show(net("veth0", ifindex=20))
    past_hold_off(clock)


async def dying(bench: OptionsBench) -> None:
    """A pod gets veth0 with settings, takes it away, and its namespace ends."""
    await bench.allocate(["veth0"])
    bench.owned("veth0")
    bench.tell("veth0")
    bench.network.show()
    await bench.at_rest()
    bench.xdp.destroy(10)
    bench.ethtool.ran.clear()
    assert undo_files(bench) == ["veth0"]


async def check_owes_nothing(bench: OptionsBench) -> None:
    """veth0 is free as another device; nothing was run on it, and nothing is kept for it."""
    await eventually(bench.ready("veth0"))
    await bench.at_rest()
    assert bench.xdp.program(20)
    assert bench.pool.allocated() == []
    assert bench.ethtool.ran == []
    assert undo_files(bench) == []


@pytest.mark.parametrize(
    "made_again", [while_allocated, at_its_release, at_the_next_allocate, after_its_release, after_the_cnis_call]
)
async def test_device_owes_no_undo_when_it_is_made_again_under_the_name_of_one_that_died(
    tuned: OptionsBench, mock_clock: MockClock, made_again: Callable[[OptionsBench, MockClock], Awaitable[None]]
) -> None:
    """What was set on a device goes with it: nothing is put back on another one that has its name."""
    async with tuned.running("veth0"):
        await dying(tuned)
        await made_again(tuned, mock_clock)
        await check_owes_nothing(tuned)


@pytest.mark.parametrize("made_again", ["before the restart", "after the restart"])
async def test_device_owes_no_undo_when_the_daemon_was_restarted_meanwhile(
    tuned: OptionsBench, made_again: str
) -> None:
    """The next daemon, too, knows a device that died from another one with its name."""
    another = net("veth0", ifindex=20)
    async with tuned.running("veth0"):
        await dying(tuned)
    tuned.pool = tuned.new_pool()
    devices = [another] if made_again == "before the restart" else []
    async with tuned.running(*devices, prepared=False):
        tuned.tell()
        await tuned.at_rest()
        tuned.network.show(another)
        await check_owes_nothing(tuned)


@pytest.mark.kubelet
@pytest.mark.parametrize("its_pod", ["has ended meanwhile", "still runs"])
async def test_settings_are_undone_when_the_raw_pool_has_another_name_after_a_restart(
    short_path: Path, its_pod: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool of the new name offers a device that the old one has left as it was, and nothing more is kept for it."""
    monkeypatch.setattr(afxdpd, "HOLD_OFF", 0.3)
    rules = {"devices": named("veth0"), "uds_server_disable": True, "ethtool_cmds": ("-K -device- gro off",)}
    node = Node(short_path, pools({"name": "a", **rules}), net("veth0"), net("veth1"))
    setting = "veth0", "gro"
    async with running_kubelet(node.paths.kubelet_dir) as kubelet:
        async with node.running():
            await kubelet.wait("afxdp/a", devices={"veth0": HEALTHY})
            await kubelet.allocate("afxdp/a", ["veth0"])
            await kubelet.pods(pod("pod-x", {"afxdp/a": ["veth0"]}))
            assert node.kept() == ["veth0"]
        if its_pod == "has ended meanwhile":
            await kubelet.pods(OTHERS)
        node.config = pools({"name": "b", **rules, "devices": named("veth0", "veth1")})
        async with node.running():
            if its_pod == "still runs":
                lists = (await kubelet.state())["lists"]
                await kubelet.wait("afxdp/b", devices={"veth1": HEALTHY}, lists=lists + 2)
                await kubelet.wait("afxdp/b", devices={"veth1": HEALTHY})
                assert node.ethtool.settings[setting] == "off"
                await kubelet.pods(OTHERS)
                assert await del_net_dev(node.syncer, "veth0") == 0
            await kubelet.wait("afxdp/b", devices=dict.fromkeys(("veth0", "veth1"), HEALTHY))
            assert node.ethtool.settings[setting] == "default"
            assert node.kept() == []
            await kubelet.allocate("afxdp/b", ["veth0"])
            assert node.ethtool.settings[setting] == "off"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"null", b'"-K"', b"[1]", b"[[1]]", b'{"a": []}', b"\xff\xfe", b"[]", b"[[]]", b'[["-K"]]'],
    ids=repr,
)
async def test_device_is_free_when_what_is_to_be_undone_cannot_be_read(
    tuned: OptionsBench, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that says nothing is looked at once, and is gone; the device is prepared as any other."""
    caplog.set_level(logging.INFO, "afxdpd")
    file = tuned.directory / "uds" / ".ethtool" / "pool" / "veth0"
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    with trio.fail_after(10):
        async with tuned.running("veth0", "veth1", prepared=False):
            await tuned.at_rest()
            tuned.tell()
            await eventually(tuned.ready("veth0", "veth1"))
            await tuned.at_rest()
            assert undo_files(tuned) == []
            assert tuned.ethtool.ran == []
            assert tuned.xdp.calls.count(("attach", 10)) == 1
            await tuned.allocate(["veth0"])
    assert caplog.text.count("veth0: ethtool settings undone") == 1


# -- Another configuration after a restart -----------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["host", "pod"])
async def test_raw_device_stays_its_pods_when_its_pool_has_a_socket_after_a_restart(
    short_path: Path, where: str
) -> None:
    """A pod that runs with a raw device keeps it in kubelet's list, Healthy, whatever the file says by now."""
    bench = OptionsBench(short_path, uds_server_disable=True)
    async with bench.running("veth0", "veth1"):
        await bench.allocate(["veth0"])
        bench.owned("veth0")
        bench.tell("veth0")
    bench.configure(uds_server_disable=False)
    bench.pool = bench.new_pool()
    async with bench.running(*(["veth0", "veth1"] if where == "host" else ["veth1"])):
        bench.tell("veth0")
        await bench.at_rest()
        assert bench.health() == {"veth0": HEALTHY, "veth1": HEALTHY}
        assert bench.pool.allocated() == ["veth0"]
        bench.tell("veth0")
        await bench.at_rest()
        assert bench.health() == {"veth0": HEALTHY, "veth1": HEALTHY}
        bench.show("veth0", "veth1")
        release(bench)
        await bench.at_rest()
        await eventually(bench.ready("veth0", "veth1"))
        assert bench.pool.allocated() == []


AFTERWARDS = {
    "its pool takes whole devices": [{"name": "a", "devices": named("ens1")}],
    "another pool takes whole devices": [{"name": "b", "devices": named("ens1")}],
    "no pool takes anything": [],
}


@pytest.mark.kubelet
@pytest.mark.parametrize("where", ["host", "pod"])
@pytest.mark.parametrize("then", AFTERWARDS)
async def test_subfunction_is_deleted_when_its_pool_divides_no_more_after_a_restart(
    short_path: Path, then: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod's subfunction is its pod's, then it is deleted; before that nobody is offered the device it is of."""
    monkeypatch.setattr(afxdpd, "HOLD_OFF", 0.3)
    node = Node(short_path, pools({"name": "a", "mode": "cdq", "devices": (DeviceConfig(name="ens1", secondary=2),)}))
    node.network.show(NIC)
    async with running_kubelet(node.paths.kubelet_dir) as kubelet:
        async with node.running():
            await kubelet.wait("afxdp/a", devices=dict.fromkeys(("ens1sf1", "ens1sf2"), HEALTHY))
            await kubelet.allocate("afxdp/a", ["ens1sf1"])
            await kubelet.pods(pod("pod-x", {"afxdp/a": ["ens1sf1"]}))
            part = node.network.devices()["ens1sf1"]
        if where == "pod":
            node.network.change(gone=["ens1sf1"])
        node.config = pools(*AFTERWARDS[then])
        registers = {name: (await kubelet.state(f"afxdp/{name}"))["registers"] for name in ("a",)}
        lists = (await kubelet.state())["lists"]
        async with node.running():
            if then == "its pool takes whole devices":
                await kubelet.wait("afxdp/a", registers=registers["a"] + 1, devices={"ens1sf1": HEALTHY})
            elif then == "another pool takes whole devices":
                await kubelet.wait("afxdp/b", streams_open=1, devices={})
            await eventually_listed(kubelet, lists + 2)
            assert (node.devlink.numbers(), node.xdp.pinned_devices("a")) == ([1], ["ens1sf1"])
            assert ("attach", NIC.ifindex) not in node.xdp.calls
            assert node.xdp.program(part.ifindex)

            await kubelet.pods(OTHERS)
            if where == "pod":
                node.network.change(part)
            await eventually(node.syncer.is_socket)
            assert await del_net_dev(node.syncer, "ens1sf1") == 0
            assert node.devlink.numbers() == [1]
            assert ("attach", NIC.ifindex) not in node.xdp.calls
            await eventually(lambda: node.devlink.numbers() == [])
            if then != "no pool takes anything":
                name = "a" if then == "its pool takes whole devices" else "b"
                await kubelet.wait(f"afxdp/{name}", devices={"ens1": HEALTHY})
                assert node.xdp.program(NIC.ifindex)
            await eventually(lambda: list(node.network.devices()) == ["ens1"])
            assert node.devlink.calls[-1] == ("delete", 1)
            assert not node.devlink.exists(PCI, 1)


@pytest.mark.kubelet
@pytest.mark.parametrize("where", ["host", "pod"])
async def test_raw_subfunction_is_deleted_when_its_pool_divides_no_more_after_a_restart(
    short_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only kubelet knows who has a raw one: once it has said so, nobody is offered the device that it is of."""
    monkeypatch.setattr(afxdpd, "HOLD_OFF", 0.3)
    raw = {"name": "a", "uds_server_disable": True}
    node = Node(short_path, pools({**raw, "mode": "cdq", "devices": (DeviceConfig(name="ens1", secondary=2),)}), NIC)
    async with running_kubelet(node.paths.kubelet_dir) as kubelet:
        async with node.running():
            await kubelet.wait("afxdp/a", healthy=2)
            await kubelet.allocate("afxdp/a", ["ens1sf1"])
            await kubelet.pods(pod("pod-x", {"afxdp/a": ["ens1sf1"]}))
            part = node.network.devices()["ens1sf1"]
        if where == "pod":
            node.network.change(gone=["ens1sf1"])
        node.config = pools({**raw, "devices": named("ens1")})
        registers = (await kubelet.state("afxdp/a"))["registers"]
        async with node.running():
            await kubelet.wait("afxdp/a", registers=registers + 1, devices={"ens1sf1": HEALTHY})
            assert node.devlink.numbers() == [1]
            await kubelet.pods(OTHERS)
            if where == "pod":
                node.network.change(part)
            await eventually(node.syncer.is_socket)
            assert await del_net_dev(node.syncer, "ens1sf1") == 0
            await kubelet.wait("afxdp/a", devices={"ens1": HEALTHY})
            assert node.devlink.numbers() == []


@pytest.mark.kubelet
async def test_raw_device_is_offered_by_one_pool_when_the_file_moves_it_before_a_restart(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that kubelet lists for a pod of its old pool is that pod's until it ends, and then the new pool's."""
    monkeypatch.setattr(afxdpd, "HOLD_OFF", 0.3)
    old = {"a": ("veth0", "veth2"), "b": ("veth1",)}
    new = {"b": ("veth0", "veth1"), "a": ("veth2",)}
    raw = [
        pools(*({"name": name, "devices": named(*names), "uds_server_disable": True} for name, names in each.items()))
        for each in (old, new)
    ]
    node = Node(short_path, raw[0], net("veth0"), net("veth1"), net("veth2"))
    async with running_kubelet(node.paths.kubelet_dir) as kubelet:
        async with node.running():
            await kubelet.wait("afxdp/a", healthy=2)
            await kubelet.allocate("afxdp/a", ["veth0"])
            await kubelet.pods(pod("pod-x", {"afxdp/a": ["veth0"]}))
        node.config = raw[1]
        registers = {name: (await kubelet.wait(f"afxdp/{name}", streams_open=0))["registers"] for name in ("a", "b")}
        async with node.running():
            held = dict.fromkeys(("veth0", "veth2"), HEALTHY)
            await kubelet.wait("afxdp/a", registers=registers["a"] + 1, devices=held)
            await kubelet.wait("afxdp/b", registers=registers["b"] + 1, devices={"veth1": HEALTHY})
            await kubelet.pods(OTHERS)
            await eventually(node.syncer.is_socket)
            assert await del_net_dev(node.syncer, "veth0") == 0
            await kubelet.wait("afxdp/a", devices={"veth2": HEALTHY})
            await kubelet.wait("afxdp/b", devices=dict.fromkeys(("veth0", "veth1"), HEALTHY))


async def eventually_listed(kubelet: Any, lists: int) -> None:
    """Waits until kubelet's pods have been asked for so often."""
    with trio.fail_after(10):
        while (await kubelet.state())["lists"] < lists:  # noqa: ASYNC110  it has an event for resources only
            await trio.sleep(0.02)


# -- The configuration file --------------------------------------------------------------------------------------------

NOT_STRINGS = (
    "pools",
    "pools[0].devices",
    "pools[0].devices[0].secondary",
    "pools[0].drivers",
    "pools[0].drivers[0].primary",
    "pools[0].drivers[0].secondary",
    "pools[0].drivers[0].excludeDevices",
    "pools[0].drivers[0].excludeAddressed",
    "pools[0].nodes",
    "pools[0].nodes[0].devices",
    "pools[0].nodes[0].drivers",
    "pools[0].nodes[0].drivers[0].excludeDevices",
    "pools[0].udsServerDisable",
    "pools[0].bpfMapPinningEnable",
    "pools[0].udsTimeout",
    "pools[0].udsFuzz",
    "pools[0].requiresUnprivilegedBpf",
    "pools[0].uid",
    "pools[0].ethtoolCmds",
    "kindCluster",
)
"""Every key whose value is no text; an element of a list has the rule of its own key."""


@pytest.mark.parametrize("path", NOT_STRINGS)
def test_empty_text_is_refused_when_a_key_has_no_text(path: str, tmp_path: Path) -> None:
    """A text is no number, list or truth value, also an empty one, which for a text means that nothing is said."""
    (line,) = errors_of(write(tmp_path, changed(path, "")))
    assert line.startswith(f"{path}: not ")
    assert line.endswith(": ''")


@pytest.mark.parametrize("path", [path for path in NOT_STRINGS if path != "pools"] + ["logFile", "logLevel"])
def test_null_is_as_no_key_when_a_key_may_be_absent(path: str, tmp_path: Path) -> None:
    """Null says nothing, for any key."""
    assert get_plugin_config(write(tmp_path, changed(path, None))) == get_plugin_config(write(tmp_path, without(path)))


def test_every_key_is_in_the_table_when_all_are_counted() -> None:
    """The tables above have all keys of the file but those of texts that have to be there."""

    def keys(content: object) -> set[str]:
        if isinstance(content, list):
            return set().union(*map(keys, content))
        return set(content).union(*map(keys, content.values())) if isinstance(content, dict) else set()

    texts = {"name", "mode", "pci", "mac", "hostname", "logFile", "logLevel"}
    assert keys(EVERYTHING) == {path.rpartition(".")[2] for path in NOT_STRINGS} | texts


@pytest.mark.parametrize("kind", ["fifo", "socket", "device"])
@pytest.mark.parametrize("options", [[], ["--check"]], ids=["serve", "check"])
@pytest.mark.program
def test_program_ends_with_1_when_the_configuration_could_be_read_for_ever(
    kind: str, options: list[str], short_path: Path
) -> None:
    """What is no file is not even opened: nobody may ever write to it, or it may never end."""
    file = short_path / "config.json"
    with socket.socket(socket.AF_UNIX) as sock:
        if kind == "fifo":
            os.mkfifo(file)
        elif kind == "socket":
            sock.bind(os.fspath(file))
        else:
            file.symlink_to("/dev/null")  # and not the one that never ends, should it be read after all
        result = run(short_path, *paths_options(short_path), *options)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "afxdpd: config.json: not a regular file\n"


@pytest.mark.parametrize("more", [[], ["--check"]], ids=["serve", "check"])
def test_long_paths_are_told_when_other_things_are_wrong_too(
    short_path: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """One run tells all that is wrong, each line with the file in front, whether it is of the file or of the place."""
    broken = pool_of("mode", name="red", uid=5, devices=[{"name": "v"}, 7])
    file = write(short_path, plugin(pool_of(), broken, pool_of(name="-"), 7, kindCluster="no"))
    uds = short_path / ("x" * 100)
    options = ["--config", str(file), "--uds-dir", str(uds), "--kubelet-dir", str(short_path / "k")]
    assert afxdpd.main([*options, *more]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith(f"afxdpd: {file}: ") for line in lines)
    long = "makes the path of a socket longer than 107 bytes"
    told = [line.removeprefix(f"afxdpd: {file}: ") for line in lines]
    assert [line.partition(":")[0] for line in told] == [
        "pools[1].devices[1]",
        "pools[1].uid",
        "pools[1].mode",
        "pools[2].name",
        "pools[3]",
        "kindCluster",
        "pools[0].devices[0].name",
        "pools[1].devices[0].name",
    ]
    assert told[-2:] == [
        f"pools[0].devices[0].name: {long}: {uds}/blue/veth0/afxdp.sock",
        f"pools[1].devices[0].name: {long}: {uds}/red/v/afxdp.sock",
    ]
    assert not uds.exists()


@pytest.mark.parametrize(
    ("command", "runs"),
    [
        ("-K -device- tx-checksum-ip-generic off", True),
        ("-K -device- x-ip-4 off", True),
        ("-N -device- dst-ip -ip- action 4", False),
        ("-N -device- src-ip -ip-/24", False),
        ("-N -device- -ip- 4", False),
        ("-N -device- dst-ip -ip-", False),
    ],
)
async def test_command_is_left_out_when_the_pods_address_is_a_word_in_it(
    short_path: Path, command: str, runs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The address is meant by -ip- where it stands alone, not within the name of a feature."""
    bench = OptionsBench(short_path, ethtool_cmds=(command,))
    async with bench.running("veth0"):
        await bench.allocate(["veth0"])
        assert bench.ethtool.ran == ([command.replace("-device-", "veth0")] if runs else [])
    left_out = f"{RESOURCE}: veth0: ethtool {command} is left out: only the CNI knows the address"
    assert (left_out in caplog.text) is not runs


# -- The command line --------------------------------------------------------------------------------------------------


def test_check_tells_of_the_kind_network_when_it_is_still_to_be_made() -> None:
    """On a fresh node the pool has no device yet: the report says which the daemon is going to make, and only then."""
    rules = {"name": "pool", "drivers": (afxdpd.DriverConfig(name="veth"),)}
    config = PluginConfig(pools=pools(rules).pools, kind_cluster=True)
    words = "kindCluster: veth6, veth8, veth10, veth12 are made for pods when the daemon starts"
    assert list(check_report(config, {}, FakeHost(), {}))[:3] == [
        "node node-1: 1 pool",
        words,
        "afxdp/pool: primary mode, no devices",
    ]
    assert words not in list(check_report(PluginConfig(pools=config.pools), {}, FakeHost(), {}))
    network = FakeNetwork()
    FakeKind(network).set_up()
    report = list(check_report(config, network.devices(), FakeHost(), {}))
    assert words not in report
    assert {line.split(":")[0] for line in report} >= {f"  takes {name}" for name in KindNetwork.PAIRS}


def test_log_goes_on_when_its_file_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each trouble with the log file is one line on standard error; what comes after it is in the file again."""
    directory = tmp_path / "logs"
    file = directory / "a.log"
    directory.mkdir()
    handler = afxdpd._LogFile(file)
    handler.setFormatter(logging.Formatter("%(message)s"))

    def say(text: str) -> None:
        handler.handle(logging.LogRecord("afxdpd", logging.INFO, "", 0, text, (), None))

    def move_away() -> None:
        directory.rename(tmp_path / "old")
        directory.write_text("a file in its place")

    def move_back() -> None:
        directory.unlink()
        (tmp_path / "old").rename(directory)

    fds = open_fds()
    try:
        say("one")
        troubles: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
            ("[Errno 2] No such file or directory", partial(shutil.rmtree, directory), directory.mkdir),
            ("[Errno 20] Not a directory", move_away, move_back),
        ]
        for why, breaks, mends in troubles:
            breaks()
            for _ in range(3):
                say("lost")
            assert capsys.readouterr().err.splitlines() == [f"afxdpd: {file}: cannot be written: {why}: '{file}'"]
            mends()
            for _ in range(2):
                say(f"after {why}")
            assert capsys.readouterr() == ("", "")
        assert file.read_text().splitlines() == [f"after {why}" for why, *_ in troubles for _ in range(2)]
        assert file.stat().st_mode & 0o777 == 0o644
        assert len(open_fds()) == len(fds)
    finally:
        handler.close()


class Full(io.StringIO):
    """A stream to a full disk."""

    def write(self, _: str) -> int:
        """See io.TextIOBase.write."""
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_log_goes_on_when_standard_error_has_no_room_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever logs does not hear of a trouble with the log, even if nobody can be told."""
    (tmp_path / "logs").mkdir()
    handler = afxdpd._LogFile(tmp_path / "logs" / "a.log")
    record = logging.LogRecord("afxdpd", logging.INFO, "", 0, "words", (), None)
    try:
        shutil.rmtree(tmp_path / "logs")
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stderr", Full())
            handler.handle(record)
        (tmp_path / "logs").mkdir()
        handler.handle(record)
        assert (tmp_path / "logs" / "a.log").read_text() == "words\n"
    finally:
        handler.close()
