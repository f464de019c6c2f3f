"""Another configuration for a running daemon, by SIGHUP, on the real kernel and under traffic."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from conftest import Kernel
from kubelet import Kubelet, pod, running_kubelet
from support import (
    Client,
    Pod,
    PodApp,
    daemon_process,
    get_map_id,
    in_thread,
    make_veth,
    send_packets,
    xdp_prog_id,
)
from test_cni_kernel import OTHERS, Cni, delete, log, logs, with_constants
from test_daemon_kernel import PINS, detach_by_netlink, until

import afxdpd

pytestmark = [pytest.mark.kernel, pytest.mark.kubelet]

READ = "the configuration was read again"
KEPT = "the configuration stays as it was"
SOON_RELEASED = {"RELEASE_GRACE": 0.0, "RELEASE_AFTER": 0.2, "HOLD_OFF": 0.5}


def pool(name: str, *devices: str, **options: Any) -> dict[str, Any]:
    """A pool for the configuration."""
    return {"name": name, "mode": "primary", "devices": [{"name": device} for device in devices], **options}


class Node:
    """A node with kubelet and a daemon, and the file that the daemon reads."""

    def __init__(self, directory: Path, kubelet: Kubelet, daemon: subprocess.Popen[bytes]) -> None:
        self.directory = directory
        self.kubelet = kubelet
        self.daemon = daemon

    async def reload(self, *pools: dict[str, Any], **options: Any) -> None:
        """Writes the file, sends SIGHUP and waits until the file was read."""
        write(self.directory, *pools, **options)
        await self.hang_up(READ)

    async def hang_up(self, words: str) -> None:
        """Sends SIGHUP and waits until the log has these words once more."""
        before = log(self.directory).count(words)
        self.daemon.send_signal(signal.SIGHUP)
        await logs(self.directory, words, times=before + 1)

    def uds(self, pool: str, device: str) -> Path:
        """The socket of a device."""
        return self.directory / "uds" / pool / device / "afxdp.sock"

    def endpoint(self, pool: str) -> Path:
        """Where the daemon serves kubelet for a pool."""
        return self.directory / "kubelet" / "device-plugins" / f"afxdp-{pool}.sock"

    async def map_id(self, pool: str, device: str, hostname: str) -> int:
        """A pod's whole conversation; the id of the map it got."""
        return int(await in_thread(get_map_id, self.uds(pool, device), hostname, device))


def write(directory: Path, *pools: dict[str, Any], **options: Any) -> Path:
    """Writes the configuration: at any moment the file is the old one or the new one."""
    file, new = directory / "config.json", directory / "config.json.new"
    new.write_text(json.dumps({"pools": pools, "logLevel": "debug", **options}))
    new.replace(file)
    return file


@asynccontextmanager
async def node(
    directory: Path, devices: list[str], *pools: dict[str, Any], constants: dict[str, float] | None = None
) -> AsyncIterator[Node]:
    """A node with devices, kubelet and the daemon as a process of its own; all devices of the pools are Healthy."""
    make_veth(*devices)
    config = write(directory, *pools)
    prefix = with_constants(**constants) if constants else []
    async with running_kubelet(directory / "kubelet") as kubelet:
        await kubelet.pods(OTHERS)
        with daemon_process(config, directory, "--log-dir", str(directory / "logs"), prefix=prefix) as daemon:
            for each in pools:
                await kubelet.wait(f"afxdp/{each['name']}", streams_open=1, healthy=len(each["devices"]))
            yield Node(directory, kubelet, daemon)
            assert daemon.poll() is None
    assert "Traceback" not in log(directory)


class Traffic:
    """Numbered packets at a steady rate on a device while the block runs; then the rest of so many."""

    def __init__(self, name: str, total: int, rate: int = 3000) -> None:
        self.total = total
        self._name = name
        self._rate = rate
        self._sent = 0
        self._hurry = False

    def send(self) -> None:
        """Sends all of them, in a thread."""
        while self._sent < self.total:
            count = min(200, self.total - self._sent)
            send_packets(self._name, count, first=self._sent, rate=2 * self._rate if self._hurry else self._rate)
            self._sent += count

    def hurry(self) -> None:
        """From now on nothing else happens: the rest may come faster."""
        self._hurry = True


@asynccontextmanager
async def pod_under_traffic(
    node: Node, sandbox: Pod, pool: str, device: str, hostname: str, total: int = 6000
) -> AsyncIterator[None]:
    """While the block runs, a pod's application receives packets; in the end it has got all of them."""
    traffic = Traffic(f"{device}p", total)
    with await in_thread(PodApp, sandbox, node.directory / "uds" / pool, hostname, [device], total) as app:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(in_thread, traffic.send)
            yield
            traffic.hurry()
        result = await in_thread(app.result)
    assert (result["numbered"], result["lost"], result["duplicates"]) == (total, 0, 0)


async def give(node: Node, pool: str, device: str, hostname: str, sandbox: Pod) -> int:
    """Gives a device to a pod: Allocate, kubelet's list, the CNI; returns the id of its map."""
    resource = f"afxdp/{pool}"
    await node.kubelet.allocate(resource, [device])
    await node.kubelet.pods(OTHERS, pod(hostname, {resource: [device]}))
    await in_thread(sandbox.take, device)
    return await node.map_id(pool, device, hostname)


async def test_running_pod_loses_nothing_when_pools_come_change_and_go(kernel: Kernel, short_path: Path) -> None:
    """Under traffic one pool comes, one goes, and one has other devices and options: its pod gets every packet."""
    old = pool("a", "afa0", "afa1"), pool("c", "afc0")
    new = pool("a", "afa0", "afa2", udsTimeout=60, uid=1500), pool("b", "afb0")
    async with node(short_path, ["afa0", "afa1", "afa2", "afb0", "afc0"], *old) as here:
        kubelet = here.kubelet
        with Pod() as sandbox:
            before = await give(here, "a", "afa0", "pod-x", sandbox)
            with Client(here.uds("a", "afa0")) as session:
                assert await in_thread(session.ask, b"/connect,pod-x") == (b"/host_ok", [])
                async with pod_under_traffic(here, sandbox, "a", "afa0", "pod-x"):
                    for turn in range(2):
                        await here.reload(*new)
                        await kubelet.wait("afxdp/b", registers=turn + 1, streams_open=1, devices={"afb0": "Healthy"})
                        await kubelet.wait("afxdp/c", streams_open=0)
                        await kubelet.wait("afxdp/a", devices={"afa0": "Healthy", "afa2": "Healthy"})
                        assert here.endpoint("b").exists()
                        await until(lambda: not here.endpoint("c").exists())
                        await until(lambda: not xdp_prog_id("afa1") and not xdp_prog_id("afc0"))
                        await kubelet.allocate("afxdp/a", ["afa2"])
                        assert user_of(here.uds("a", "afa2")) == 1500
                        assert user_of(here.uds("a", "afa0")) == 0, "a running pod's user stays"
                        assert await here.map_id("a", "afa0", "pod-x") == before
                        await here.reload(*old)
                        await kubelet.wait("afxdp/c", registers=turn + 2, streams_open=1, devices={"afc0": "Healthy"})
                        await kubelet.wait("afxdp/b", streams_open=0)
                        # afa2 is still allocated: it stays where it is
                        await kubelet.wait("afxdp/a", devices=dict.fromkeys(["afa0", "afa1", "afa2"], "Healthy"))
                        await until(lambda: not here.endpoint("b").exists() and not xdp_prog_id("afb0"))
                assert await in_thread(session.ask, b"/version") == (b"0.1", []), "the pod's session has not ended"
        for name in ("a", "b", "c"):
            state = await kubelet.state(f"afxdp/{name}")
            assert (name, state["registers"], state["trap"]) == (name, {"a": 1, "b": 2, "c": 3}[name], 0)


def user_of(path: Path) -> int:
    """The user besides root who may use a socket."""
    return afxdpd.Host().user_of(path)


async def test_pod_of_a_removed_pool_goes_on_when_its_pool_is_gone(kernel: Kernel, short_path: Path) -> None:
    """A pool that is removed, made again, and removed again keeps its pod's traffic, map and socket until that ends."""
    a, b = pool("a", "afa0", "afa1"), pool("b", "afb0")
    async with node(short_path, ["afa0", "afa1", "afb0"], a, b, constants=SOON_RELEASED) as here:
        kubelet = here.kubelet
        with Pod() as sandbox:
            before = await give(here, "a", "afa0", "pod-x", sandbox)
            async with pod_under_traffic(here, sandbox, "a", "afa0", "pod-x"):
                await here.reload(b)
                await kubelet.wait("afxdp/a", streams_open=0)
                await until(lambda: not here.endpoint("a").exists() and not xdp_prog_id("afa1"))
                assert await here.map_id("a", "afa0", "pod-x") == before
                await here.reload(a, b)
                await kubelet.wait(
                    "afxdp/a", registers=2, streams_open=1, devices={"afa0": "Healthy", "afa1": "Healthy"}
                )
                assert await here.map_id("a", "afa0", "pod-x") == before
                await here.reload()
                await kubelet.wait("afxdp/a", streams_open=0)
                await kubelet.wait("afxdp/b", streams_open=0)
                assert await here.map_id("a", "afa0", "pod-x") == before
            assert "xdp" in sandbox.run("ip", "link", "show", "afa0")
            await in_thread(sandbox.give_back, "afa0")
        assert here.uds("a", "afa0").exists()
        await kubelet.pods(OTHERS)
        await logs(short_path, "afa0: released: kubelet lists no pod that holds it")
        await until(lambda: not (PINS / "a").exists() and not here.uds("a", "afa0").parent.exists())
        await until(lambda: not xdp_prog_id("afa0"))
        await here.reload(a)
        await kubelet.wait("afxdp/a", registers=3, streams_open=1, devices={"afa0": "Healthy", "afa1": "Healthy"})
        await kubelet.allocate("afxdp/a", ["afa0"])
        await kubelet.pods(OTHERS, pod("pod-y", {"afxdp/a": ["afa0"]}))
        assert await here.map_id("a", "afa0", "pod-y") != before


async def test_cni_detaches_at_once_when_the_pool_was_removed_or_comes_again(kernel: Kernel, short_path: Path) -> None:
    """A device of a removed pool is let go like any other; its pool, when it comes again, leaves it alone as long."""
    constants = {**SOON_RELEASED, "HOLD_OFF": 1.0}
    a, b = pool("a", "afa0"), pool("b", "afb0")
    async with node(short_path, ["afa0", "afb0"], a, b, constants=constants) as here:
        with Pod() as sandbox, Cni(short_path) as cni:
            before = await give(here, "a", "afa0", "pod-x", sandbox)
            await here.reload(b)
            await here.kubelet.wait("afxdp/a", streams_open=0)
            await here.kubelet.pods(OTHERS)
            left_at = trio.current_time()
            await in_thread(delete, cni, sandbox, "afa0")
            await here.reload(a, b)
            await here.kubelet.wait("afxdp/a", registers=2, streams_open=1)
            await in_thread(detach_by_netlink, "afa0")
            await until(lambda: xdp_prog_id("afa0"))
            assert trio.current_time() - left_at > 0.9
        await here.kubelet.wait("afxdp/a", devices={"afa0": "Healthy"})
        await here.kubelet.allocate("afxdp/a", ["afa0"])
        await here.kubelet.pods(OTHERS, pod("pod-y", {"afxdp/a": ["afa0"]}))
        assert await here.map_id("a", "afa0", "pod-y") != before


@pytest.mark.parametrize("told", ["by the CNI", "by kubelet"])
async def test_device_changes_its_pool_when_its_pod_has_ended(kernel: Kernel, short_path: Path, told: str) -> None:
    """A device that the file gives to another pool is its pod's as long as that runs, then the other pool's."""
    pools = [pool("b", "afb0"), pool("a", "afa0", "afa1")]
    moved = [pool("b", "afb0", "afa0"), pool("a", "afa1")]
    async with node(short_path, ["afa0", "afa1", "afb0"], *pools, constants=SOON_RELEASED) as here:
        kubelet = here.kubelet
        with Pod() as sandbox, Cni(short_path) as cni:
            before = await give(here, "a", "afa0", "pod-x", sandbox)
            async with pod_under_traffic(here, sandbox, "a", "afa0", "pod-x", total=1500):
                await here.reload(*moved)
                await logs(short_path, "afxdp/b: afa0 is not taken: ")
                assert await here.map_id("a", "afa0", "pod-x") == before
            await kubelet.wait("afxdp/a", registers=1, devices={"afa0": "Healthy", "afa1": "Healthy"})
            await kubelet.wait("afxdp/b", registers=1, devices={"afb0": "Healthy"})
            await kubelet.pods(OTHERS)
            if told == "by the CNI":
                await in_thread(delete, cni, sandbox, "afa0")
                left_at = trio.current_time()
            else:
                await in_thread(sandbox.give_back, "afa0")
            await kubelet.wait("afxdp/b", registers=1, devices={"afa0": "Healthy", "afb0": "Healthy"})
            await until(lambda: xdp_prog_id("afa0"))
            if told == "by the CNI":
                assert trio.current_time() - left_at > 0.4, "nothing is attached while the CNI is at work"
        await kubelet.wait("afxdp/a", registers=1, devices={"afa1": "Healthy"})
        assert not (PINS / "a").exists()
        await kubelet.allocate("afxdp/b", ["afa0"])
        await kubelet.pods(OTHERS, pod("pod-y", {"afxdp/b": ["afa0"]}))
        assert await here.map_id("b", "afa0", "pod-y") != before
        assert "unhealthy" not in log(short_path)


async def test_free_device_changes_its_pool_when_the_file_says_so(kernel: Kernel, short_path: Path) -> None:
    """A free device that goes from pool to pool is Healthy in the one that has it, and is never taken for another's."""
    with_a = [pool("a", "afa0", "afa1"), pool("b", "afb0")]
    with_b = [pool("a", "afa1"), pool("b", "afa0", "afb0")]
    async with node(short_path, ["afa0", "afa1", "afb0"], *with_a) as here:
        for _ in range(5):
            for pools in (with_b, with_a):
                await here.reload(*pools)
                for each in pools:
                    devices = {device["name"]: "Healthy" for device in each["devices"]}
                    await here.kubelet.wait(f"afxdp/{each['name']}", registers=1, devices=devices)
                assert xdp_prog_id("afa0")
        assert "unhealthy" not in log(short_path)


async def test_everything_stays_when_the_file_is_broken(kernel: Kernel, short_path: Path) -> None:
    """Each error is logged, and that the configuration stays; pools, devices, pods and the log are as they were."""
    a = pool("a", "afa0", "afa1")
    blocked = short_path / "logs"
    blocked.write_text("a file where the directory should be")
    file = short_path / "config.json"
    cases: list[tuple[str | None, list[str]]] = [
        ("{", ["not JSON: "]),
        ("", ["not JSON: "]),
        ("[]", ["the file: not an object: []"]),
        ("null", ["the file: not an object: null"]),
        ("{}", ["pools: is missing"]),
        (text(pool("a", "afa0", udsTimeout=7)), ["pools[0].udsTimeout: not "]),
        (text(pool("a", "afa0"), pool("a", "afa1")), ["pools[1].name: 'a' has the name of pools[0].name: 'a'"]),
        (
            text(
                pool("b", "afa0", mode="x"), pool("", "afa0", uid=5), {"mode": "primary", "drivers": [{"name": "veth"}]}
            ),
            ["pools[0].mode: not ", "pools[1].name: not ", "pools[1].uid: not ", "pools[2].name: is missing"],
        ),
        (text(pool("a", "afa0"), pool("b", "afa1"), kindCluster=True), ["kindCluster: with it there can be one pool"]),
        (text(pool("n" * 64, "afa0")), ["pools[0].name: not "]),
        (None, [f"{file}: No such file or directory"]),
        (text(pool("b", "afa1"), logFile="afxdpd.log", logLevel="error"), [f"{blocked}/afxdpd.log: "]),
    ]
    async with node(short_path, ["afa0", "afa1"], a) as here:
        kubelet = here.kubelet
        with Pod() as sandbox:
            before = await give(here, "a", "afa0", "pod-x", sandbox)
            program = xdp_prog_id("afa1")
            state = await kubelet.state("afxdp/a")
            async with pod_under_traffic(here, sandbox, "a", "afa0", "pod-x", total=3000):
                for content, errors in cases:
                    if content is None:
                        file.unlink()
                    else:
                        file.write_text(content)
                    start = len(log(short_path))
                    await here.hang_up(KEPT)
                    lines = [line.partition(" ERROR   ")[2] for line in log(short_path)[start:].splitlines()]
                    said = [line for line in lines if line]
                    assert len(said) == len(errors) + 1, said
                    for line, error in zip(said, [*errors, KEPT], strict=True):
                        assert error in line
                assert await here.map_id("a", "afa0", "pod-x") == before
            await here.reload(a)
            assert xdp_prog_id("afa1") == program
            after = await kubelet.state("afxdp/a")
            for key in ("registers", "streams_open", "messages", "devices"):
                assert after[key] == state[key]
            assert sorted((await kubelet.state())["resources"]) == ["afxdp/a"]
    assert " DEBUG " in log(short_path).rpartition(KEPT)[2], "the level is the old one"


def text(*pools: dict[str, Any], **options: Any) -> str:
    """What is in a file."""
    return json.dumps({"pools": pools, **options})


async def test_last_file_counts_when_signals_come_quickly(kernel: Kernel, short_path: Path) -> None:
    """Fifty signals, with another file each, end with what the last file says; nobody is registered twice."""
    a, b = pool("a", "afa0"), pool("b", "afb0")
    async with node(short_path, ["afa0", "afb0"], a) as here:
        with Pod() as sandbox:
            before = await give(here, "a", "afa0", "pod-x", sandbox)
            async with pod_under_traffic(here, sandbox, "a", "afa0", "pod-x", total=3000):
                for number in range(50):
                    await in_thread(write, short_path, *[(a, b), (a,)][number % 2])
                    here.daemon.send_signal(signal.SIGHUP)
                await here.reload(a, b, pool("last", "nosuch0"))
                await here.kubelet.wait("afxdp/last", registers=1, streams_open=1, devices={})
                await here.kubelet.wait("afxdp/b", streams_open=1, devices={"afb0": "Healthy"})
                for _ in range(50):
                    here.daemon.send_signal(signal.SIGHUP)
                await here.reload(a)
                await here.kubelet.wait("afxdp/b", streams_open=0)
                await until(lambda: not here.endpoint("b").exists() and not xdp_prog_id("afb0"))
                assert await here.map_id("a", "afa0", "pod-x") == before
        state = await here.kubelet.wait("afxdp/a", registers=1, devices={"afa0": "Healthy"})
        assert state["registers"] == 1
        assert (await here.kubelet.state("afxdp/b"))["trap"] == 0


async def test_new_pools_are_known_when_kubelet_comes_later(kernel: Kernel, short_path: Path) -> None:
    """A daemon that runs takes another file at once, as soon as it says so, and while there is no kubelet."""
    make_veth("afa0", "afb0")
    config = write(short_path, pool("a", "afa0"))
    with daemon_process(config, short_path) as daemon:
        await logs(short_path, f"afxdpd {afxdpd.__version__}: afxdp/a")
        daemon.send_signal(signal.SIGHUP)
        await logs(short_path, READ)
        write(short_path, pool("b", "afb0"))
        daemon.send_signal(signal.SIGHUP)
        await logs(short_path, READ, times=2)
        await until(lambda: xdp_prog_id("afb0") and not xdp_prog_id("afa0"))
        async with running_kubelet(short_path / "kubelet") as kubelet:
            await kubelet.wait("afxdp/b", registers=1, streams_open=1, devices={"afb0": "Healthy"})
            assert sorted((await kubelet.state())["resources"]) == ["afxdp/b"]
            daemon.send_signal(signal.SIGTERM)
            assert await in_thread(daemon.wait) == 0
    assert "Traceback" not in log(short_path)


async def test_daemon_survives_when_signals_come_as_soon_as_it_logs(kernel: Kernel, short_path: Path) -> None:
    """Whoever has read the daemon's first line may send SIGHUP."""
    make_veth("afa0")
    config = write(short_path, pool("a", "afa0"))
    async with running_kubelet(short_path / "kubelet") as kubelet:
        for number in range(2):
            with daemon_process(config, short_path) as daemon:
                await logs(short_path, f"afxdpd {afxdpd.__version__}: ", times=number + 1)
                for _ in range(10):
                    daemon.send_signal(signal.SIGHUP)
                await kubelet.wait("afxdp/a", registers_total=number + 1, streams_open=1, healthy=1)
                await logs(short_path, READ, times=number + 1)
                daemon.send_signal(signal.SIGTERM)
                assert await in_thread(daemon.wait) == 0
    assert "Traceback" not in log(short_path)


async def test_log_follows_the_file_when_it_is_read_again(kernel: Kernel, short_path: Path) -> None:
    """Level and file of the log are those of the file that was read last."""
    a = pool("a", "afa0")
    written = short_path / "logs" / "afxdpd.log"

    async def said(here: Node) -> str:
        start = len(log(short_path))
        await here.kubelet.allocate("afxdp/a", ["afa0"])
        return log(short_path)[start:]

    async with node(short_path, ["afa0"], a) as here:
        words = await said(here)
        assert " DEBUG " in words
        assert " INFO " in words
        await here.reload(a, logLevel="info", logFile="afxdpd.log")
        words = await said(here)
        assert " DEBUG " not in words
        assert " INFO " in words
        assert words in written.read_text()
        write(short_path, a, logLevel="error")
        here.daemon.send_signal(signal.SIGHUP)
        await here.kubelet.wait("afxdp/a", registers=1)
        start = len(log(short_path))
        await until_silent(here)
        assert " INFO " not in log(short_path)[start:]
        size = written.stat().st_size
        await here.reload(a, logLevel="debug")
        assert " DEBUG " in await said(here)
        assert written.stat().st_size == size, "the file of the configuration before the last one"


async def until_silent(here: Node) -> None:
    """Waits until an Allocate leaves no line in the log."""
    with trio.fail_after(20):
        while True:
            start = len(log(here.directory))
            await here.kubelet.allocate("afxdp/a", ["afa0"])
            if len(log(here.directory)) == start:
                return


async def test_kind_network_comes_and_goes_when_the_file_says_so(kernel: Kernel, short_path: Path) -> None:
    """With kindCluster the veths are made and offered, without it all but those of pods are removed."""
    others = [{"name": "afa0"}, {"name": "afa0p"}]
    kind = {"name": "kind", "mode": "primary", "drivers": [{"name": "veth", "excludeDevices": others}]}
    pod_ends, ports = {"veth6", "veth8", "veth10", "veth12"}, {"veth7", "veth9", "veth11", "veth13"}
    async with node(short_path, ["afa0"], pool("a", "afa0")) as here:
        kubelet = here.kubelet
        await here.reload(kind, kindCluster=True)
        await kubelet.wait("afxdp/a", streams_open=0)
        await kubelet.wait("afxdp/kind", registers=1, streams_open=1, devices=dict.fromkeys(pod_ends, "Healthy"))
        assert links() >= {"afxdp-kind-br", *pod_ends, *ports}
        with Pod() as sandbox:
            before = await give(here, "kind", "veth6", "pod-x", sandbox)
            await here.reload(pool("a", "afa0"))
            await kubelet.wait("afxdp/a", streams_open=1, devices={"afa0": "Healthy"})
            await kubelet.wait("afxdp/kind", streams_open=0)
            await until(lambda: not (pod_ends | ports) - {"veth6", "veth7"} & links())
            assert "veth7" in links(), "the other end of a pod's device"
            assert await here.map_id("kind", "veth6", "pod-x") == before
            await here.reload(kind, kindCluster=True)
            await kubelet.wait("afxdp/kind", registers=2, streams_open=1, devices=dict.fromkeys(pod_ends, "Healthy"))
            assert links() >= {"afxdp-kind-br", *ports, *pod_ends} - {"veth6"}
            assert await here.map_id("kind", "veth6", "pod-x") == before
        await until(lambda: {"veth6", "veth7"} <= links())  # made again after they went with the pod
        await here.reload(pool("a", "afa0"))
        await until(lambda: not (pod_ends | ports) - {"veth6", "veth7"} & links())


def links() -> set[str]:
    """The names of all devices."""
    return set(afxdpd.Network().devices())
