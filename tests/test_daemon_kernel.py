"""The whole daemon on the real kernel, with grpcio in a process of its own as kubelet."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from conftest import Kernel, open_fds
from kubelet import Kubelet, KubeletError, pod, running_kubelet
from pyroute2 import IPRoute
from support import (
    CAPABILITIES,
    RESOURCE,
    Client,
    Pod,
    PodApp,
    daemon_process,
    delete_link,
    get_map_id,
    in_thread,
    make_veth,
    map_id,
    running_daemon,
    send_packets,
    with_capabilities,
    write_config,
    xdp_prog_id,
)

import afxdpd
from _uds import lib

pytestmark = pytest.mark.kernel

PINS = Path("/sys/fs/bpf/afxdpd")


@asynccontextmanager
async def node(directory: Path, *devices: str, **pools: list[str]) -> AsyncIterator[Kubelet]:
    """A node with devices (by default all in one pool), kubelet and the daemon, in which all devices are Healthy."""
    make_veth(*devices)
    pools = pools or {"pool": list(devices)}
    async with running_kubelet(directory / "kubelet") as kubelet, running_daemon(directory, **pools):
        for name, members in pools.items():
            await kubelet.wait(f"afxdp/{name}", registers=1, streams_open=1, healthy=len(members))
        yield kubelet


def uds(directory: Path, device: str) -> Path:
    """The socket of a device of the pool "pool"."""
    return directory / "uds" / "pool" / device / "afxdp.sock"


def attach_by_netlink(name: str) -> None:
    """Attaches a program the way other tools do, without a bpf_link."""
    xskmap = lib.uds_xskmap_create(b"foreign", 1)
    program = lib.uds_redirect_prog_load(xskmap, b"foreign")
    with IPRoute() as ipr:
        ipr.link("set", index=ipr.link_lookup(ifname=name)[0], xdp_fd=program)
    os.close(program)
    os.close(xskmap)


def detach_by_netlink(name: str) -> None:
    """Detaches what attach_by_netlink attached."""
    subprocess.run(["ip", "link", "set", "dev", name, "xdp", "off"], check=True)


async def test_pod_gets_its_map_when_it_holds_the_device(kernel: Kernel, short_path: Path) -> None:
    """A pod's environment, mount and map are those of the device that was allocated, which is pinned."""
    async with node(short_path, "afa0", "afa1") as kubelet:
        (answer,) = await kubelet.allocate(RESOURCE, ["afa0"])
        assert answer["envs"] == {"AFXDP_DEVICES_POOL": "afa0"}
        (mount,) = answer["mounts"]
        assert mount == {
            "container_path": "/tmp/afxdp_dp/afa0",
            "host_path": str(short_path / "uds/pool/afa0"),
            "read_only": True,
        }
        await kubelet.pods(pod("pod-x", {RESOURCE: ["afa0"]}))
        assert await in_thread(get_map_id, uds(short_path, "afa0"), "pod-x", "afa0")
        assert sorted(path.name for path in (PINS / "pool/afa0").iterdir()) == ["link", "xsks_map"]
        assert not (PINS / "pool/afa1").exists()
        assert xdp_prog_id("afa0")
        assert xdp_prog_id("afa1")
    assert xdp_prog_id("afa0"), "an allocated device keeps its program when the daemon ends"
    assert not xdp_prog_id("afa1"), "a free device's program goes with the daemon"


async def test_packets_arrive_when_the_device_is_in_the_pod(kernel: Kernel, short_path: Path) -> None:
    """Every packet that is sent to a pod's device reaches its AF_XDP socket."""
    async with node(short_path, "afa0") as kubelet:
        await kubelet.allocate(RESOURCE, ["afa0"])
        await kubelet.pods(pod("pod-x", {RESOURCE: ["afa0"]}))
        with Pod() as sandbox:
            sandbox.take("afa0")
            with await in_thread(PodApp, sandbox, short_path / "uds/pool", "pod-x", ["afa0"], 5000) as app:
                await in_thread(send_packets, "afa0p", 5000)
                result = await in_thread(app.result)
    assert (result["numbered"], result["lost"], result["duplicates"]) == (5000, 0, 0)


async def test_no_packet_is_lost_when_the_daemon_is_killed(kernel: Kernel, short_path: Path) -> None:
    """SIGKILL costs a pod nothing, and the next daemon serves the same map at the same path."""
    make_veth("afa0", "afa1")
    config = write_config(short_path, pool=["afa0", "afa1"])
    count = 20_000
    async with running_kubelet(short_path / "kubelet") as kubelet:
        with Pod() as sandbox, daemon_process(config, short_path) as daemon:
            await kubelet.wait(RESOURCE, healthy=2)
            await kubelet.allocate(RESOURCE, ["afa0"])
            await kubelet.pods(pod("pod-x", {RESOURCE: ["afa0"]}))
            before = await in_thread(get_map_id, uds(short_path, "afa0"), "pod-x", "afa0")
            sandbox.take("afa0")
            with await in_thread(PodApp, sandbox, short_path / "uds/pool", "pod-x", ["afa0"], count) as app:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(in_thread, send_packets, "afa0p", count)
                    await in_thread(kill, daemon)
                    registers = (await kubelet.wait(RESOURCE, streams_open=0))["registers"]
                    with daemon_process(config, short_path):
                        await kubelet.wait(RESOURCE, registers=registers + 1, streams_open=1, healthy=2)
                        after = await in_thread(get_map_id, uds(short_path, "afa0"), "pod-x", "afa0")
                        result = await in_thread(app.result)
                        assert (await kubelet.state(RESOURCE))["devices"]["afa0"]["health"] == "Healthy"
    assert (result["numbered"], result["lost"]) == (count, 0)
    assert after == before


def kill(daemon: subprocess.Popen[bytes]) -> None:
    """Kills the daemon in the middle of things."""
    daemon.send_signal(signal.SIGKILL)
    daemon.wait()


async def test_nothing_changes_for_a_pod_when_kubelet_restarts(kernel: Kernel, short_path: Path) -> None:
    """A kubelet that wipes its directory and comes back after two seconds is registered with once, within two."""
    count = 20_000
    async with node(short_path, "afa0", "afa1") as kubelet:
        await kubelet.allocate(RESOURCE, ["afa0"])
        await kubelet.pods(pod("pod-x", {RESOURCE: ["afa0"]}))
        before = await in_thread(get_map_id, uds(short_path, "afa0"), "pod-x", "afa0")
        with Pod() as sandbox, Client(uds(short_path, "afa0")) as session:
            assert await in_thread(session.ask, b"/connect,pod-x") == (b"/host_ok", [])
            sandbox.take("afa0")
            with await in_thread(PodApp, sandbox, short_path / "uds/pool", "pod-x", ["afa0"], count) as app:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(in_thread, send_packets, "afa0p", count)
                    await kubelet.stop(wipe=True)
                    await trio.sleep(2)  # the fact to be shown: the new kubelet.sock comes two seconds later
                    await kubelet.start()
                    with trio.fail_after(2):
                        state = await kubelet.wait(RESOURCE, registers=1, streams_open=1, healthy=2)
                    result = await in_thread(app.result)
            assert state["registers"] == 1
            assert state["trap"] == 0
            assert await in_thread(session.ask, b"/version") == (b"0.1", []), "the pod's session has not ended"
        assert (result["numbered"], result["lost"]) == (count, 0)
        assert await in_thread(get_map_id, uds(short_path, "afa0"), "pod-x", "afa0") == before


async def test_pods_are_served_when_many_connect(kernel: Kernel, short_path: Path) -> None:
    """Connections one after another, at once, and beside one that says nothing, all complete the handshake."""
    async with node(short_path, "afa0") as kubelet:
        await kubelet.allocate(RESOURCE, ["afa0"])
        await kubelet.pods(pod("pod-x", {RESOURCE: ["afa0"]}))
        path = uds(short_path, "afa0")
        with Client(path):
            with Client(path) as first, Client(path) as second:
                fds: list[int] = []

                async def handshake(client: Client) -> None:
                    fds.append(await in_thread(client.handshake, "pod-x", "afa0"))

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(handshake, first)
                    nursery.start_soon(handshake, second)
            for _ in range(20):
                with Client(path) as client:
                    await handshake(client)
        assert len({map_id(fd) for fd in fds}) == 1
        for fd in fds:
            os.close(fd)


async def test_allocate_leaves_nothing_when_it_is_refused(kernel: Kernel, short_path: Path) -> None:
    """What cannot be allocated is answered with a proper status; nothing is pinned or made; the daemon serves on."""
    make_veth("afa0", "afa1")
    await in_thread(attach_by_netlink, "afa1")
    async with running_kubelet(short_path / "kubelet") as kubelet, running_daemon(short_path, pool=["afa0", "afa1"]):
        await kubelet.wait(RESOURCE, devices={"afa0": "Healthy", "afa1": "Unhealthy"})
        before = open_fds()
        for request, code in (
            ([["nosuch"]], "NOT_FOUND"),
            ([["afa0", "afa0"]], "INVALID_ARGUMENT"),
            ([["afa0"], ["afa0"]], "INVALID_ARGUMENT"),
            ([], "INVALID_ARGUMENT"),
            ([[]], "INVALID_ARGUMENT"),
            ([["afa0", "afa1"]], "FAILED_PRECONDITION"),
        ):
            with pytest.raises(KubeletError) as error:
                await kubelet.allocate(RESOURCE, *request)
            assert error.value.code == code, request
            assert not list(PINS.iterdir()), request
            assert not list((short_path / "uds").rglob("afxdp.sock"))
        await until(lambda: set(open_fds().values()) <= set(before.values()))
        assert await kubelet.allocate(RESOURCE, ["afa0"])


async def test_device_is_unhealthy_while_a_foreign_program_is_on_it(
    kernel: Kernel, short_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another's program is named, never touched, and the device is Healthy when it is gone."""
    make_veth("afa0")
    await in_thread(attach_by_netlink, "afa0")
    foreign = xdp_prog_id("afa0")
    async with running_kubelet(short_path / "kubelet") as kubelet, running_daemon(short_path, pool=["afa0"]):
        await kubelet.wait(RESOURCE, devices={"afa0": "Unhealthy"})
        with pytest.raises(KubeletError, match=f"program with id {foreign} is attached in native mode") as error:
            await kubelet.allocate(RESOURCE, ["afa0"])
        assert error.value.code == "FAILED_PRECONDITION"
        assert f"program with id {foreign} " in caplog.text
        assert xdp_prog_id("afa0") == foreign
        await in_thread(detach_by_netlink, "afa0")
        await kubelet.wait(RESOURCE, devices={"afa0": "Healthy"})
        assert xdp_prog_id("afa0") not in (0, foreign)


async def test_device_becomes_healthy_when_a_foreign_link_goes_without_an_event(
    kernel: Kernel, short_path: Path
) -> None:
    """The end of another's bpf_link, of which netlink tells nothing, is noticed all the same."""
    make_veth("afa0")
    foreign = await in_thread(afxdpd.Xdp().attach, afxdpd.Network().devices()["afa0"].ifindex, 1)
    async with running_kubelet(short_path / "kubelet") as kubelet, running_daemon(short_path, pool=["afa0"]):
        await kubelet.wait(RESOURCE, devices={"afa0": "Unhealthy"})
        await in_thread(foreign.close)
        await kubelet.wait(RESOURCE, devices={"afa0": "Healthy"}, timeout=15)


async def test_former_holder_is_powerless_when_the_device_is_allocated_again(kernel: Kernel, short_path: Path) -> None:
    """Whoever kept a map's descriptor can do nothing to the packets of the next pod, which loses none."""
    count = 5000
    async with node(short_path, "afa0") as kubelet:
        await kubelet.allocate(RESOURCE, ["afa0"])
        await kubelet.pods(pod("pod-x", {RESOURCE: ["afa0"]}))
        with Client(uds(short_path, "afa0")) as client:
            old = await in_thread(client.handshake, "pod-x", "afa0")
        with Client(uds(short_path, "afa0")) as session:
            assert await in_thread(session.ask, b"/connect,pod-x") == (b"/host_ok", [])
            await kubelet.allocate(RESOURCE, ["afa0"])
            assert await in_thread(session.sock.recv, 1) == b"", "the former holder's session has ended"
        await kubelet.pods(pod("pod-y", {RESOURCE: ["afa0"]}))
        new = await in_thread(get_map_id, uds(short_path, "afa0"), "pod-y", "afa0")
        assert new != map_id(old)
        with Pod() as sandbox:
            sandbox.take("afa0")
            with await in_thread(PodApp, sandbox, short_path / "uds/pool", "pod-y", ["afa0"], count) as app:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(in_thread, send_packets, "afa0p", count)
                    for _ in range(100):
                        delete_entry(old)
                        await trio.lowlevel.checkpoint()
                result = await in_thread(app.result)
        os.close(old)
    assert (result["numbered"], result["lost"]) == (count, 0)


def delete_entry(fd: int) -> None:
    """Deletes entry 0 of a map, as its holder may; see bpf(2), BPF_MAP_DELETE_ELEM."""
    key = ctypes.c_uint32(0)
    attributes = (ctypes.c_uint64 * 4)(fd, ctypes.addressof(key), 0, 0)
    ctypes.CDLL(None).syscall(321 if os.uname().machine == "x86_64" else 280, 3, attributes, 32)


async def test_containers_of_one_pod_get_the_same_map_when_allocated_one_after_another(
    kernel: Kernel, short_path: Path
) -> None:
    """An init container and the app container of a pod, allocated the same device before either runs, share the map."""
    async with node(short_path, "afa0") as kubelet:
        answers = [await kubelet.allocate(RESOURCE, ["afa0"]) for _ in range(2)]
        assert answers[0] == answers[1]
        await kubelet.pods(pod("pod-x", {RESOURCE: ["afa0"]}))
        ids = {await in_thread(get_map_id, uds(short_path, "afa0"), "pod-x", "afa0") for _ in range(2)}
        assert len(ids) == 1


async def test_device_is_taken_over_when_it_is_still_in_the_old_pod(kernel: Kernel, short_path: Path) -> None:
    """A device that has not come back yet gets its fresh map where it is, and works for the new pod."""
    async with node(short_path, "afa0") as kubelet:
        await kubelet.allocate(RESOURCE, ["afa0"])
        await kubelet.pods(pod("pod-x", {RESOURCE: ["afa0"]}))
        with Pod() as old, Pod() as new:
            old.take("afa0")
            first = await in_thread(get_map_id, uds(short_path, "afa0"), "pod-x", "afa0")
            await kubelet.allocate(RESOURCE, ["afa0"])
            await kubelet.pods(pod("pod-y", {RESOURCE: ["afa0"]}))
            assert await in_thread(get_map_id, uds(short_path, "afa0"), "pod-y", "afa0") != first
            old.give_back("afa0")
            new.take("afa0")
            with await in_thread(PodApp, new, short_path / "uds/pool", "pod-y", ["afa0"], 1000) as app:
                await in_thread(send_packets, "afa0p", 1000)
                result = await in_thread(app.result)
    assert (result["numbered"], result["lost"]) == (1000, 0)


async def test_device_is_released_when_kubelet_lists_it_no_more(
    kernel: Kernel, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the pod is gone the device is unpinned, its directory removed, and it is prepared with another map."""
    monkeypatch.setattr(afxdpd, "RELEASE_GRACE", 0.0)
    monkeypatch.setattr(afxdpd, "RELEASE_AFTER", 0.2)
    async with node(short_path, "afa0") as kubelet:
        await kubelet.pods(pod("other", {}), pod("pod-x", {RESOURCE: ["afa0"]}))
        await kubelet.allocate(RESOURCE, ["afa0"])
        used = await in_thread(get_map_id, uds(short_path, "afa0"), "pod-x", "afa0")
        program = xdp_prog_id("afa0")
        await kubelet.pods(pod("other", {}))
        await until(lambda: not (PINS / "pool").exists() and xdp_prog_id("afa0") not in (0, program))
        assert not (short_path / "uds/pool/afa0").exists()
        assert (await kubelet.state(RESOURCE))["devices"]["afa0"]["health"] == "Healthy"
        await kubelet.pods(pod("pod-y", {RESOURCE: ["afa0"]}))
        await kubelet.allocate(RESOURCE, ["afa0"])
        assert await in_thread(get_map_id, uds(short_path, "afa0"), "pod-y", "afa0") != used


async def until(condition: Any) -> None:
    """Waits until something is true that nobody announces."""
    with trio.fail_after(20):
        while not condition():  # noqa: ASYNC110  the kernel has no event for it
            await trio.sleep(0.02)


async def test_device_is_gone_when_its_pod_took_it_along(kernel: Kernel, short_path: Path) -> None:
    """A veth that was destroyed with its pod's namespace stays Healthy while allocated; made again, it is attached."""
    async with node(short_path, "afa0") as kubelet:
        await kubelet.allocate(RESOURCE, ["afa0"])
        await kubelet.pods(pod("pod-x", {RESOURCE: ["afa0"]}))
        with Pod() as sandbox:
            sandbox.take("afa0")
        await until(lambda: "afa0p" not in afxdpd.Network().devices())
        assert (await kubelet.state(RESOURCE))["devices"]["afa0"]["health"] == "Healthy"
        await in_thread(make_veth, "afa0")
        await until(lambda: xdp_prog_id("afa0"))
        assert await in_thread(get_map_id, uds(short_path, "afa0"), "pod-x", "afa0")
        assert (PINS / "pool/afa0/link").exists()


async def test_devices_are_followed_when_they_come_and_go(kernel: Kernel, short_path: Path) -> None:
    """A device of the pool that appears, vanishes, or gets a bridge or a default route is announced accordingly."""
    make_veth("afa0")
    async with (
        running_kubelet(short_path / "kubelet") as kubelet,
        running_daemon(short_path, pool=["afa0", "afa1"]),
    ):
        await kubelet.wait(RESOURCE, devices={"afa0": "Healthy"})
        await in_thread(make_veth, "afa1")
        await kubelet.wait(RESOURCE, devices={"afa0": "Healthy", "afa1": "Healthy"})
        await in_thread(delete_link, "afa0")
        await kubelet.wait(RESOURCE, devices={"afa1": "Healthy"})
        for command in ("link add br0 type bridge", "link set afa1 master br0"):
            await in_thread(ip, command)
        await kubelet.wait(RESOURCE, devices={})
        assert not xdp_prog_id("afa1")
        await in_thread(ip, "link set afa1 nomaster")
        await kubelet.wait(RESOURCE, devices={"afa1": "Healthy"})
        for command in ("address add 192.0.2.1/24 dev afa1", "route add default via 192.0.2.2"):
            await in_thread(ip, command)
        await kubelet.wait(RESOURCE, devices={})
        await in_thread(ip, "route del default")
        await kubelet.wait(RESOURCE, devices={"afa1": "Healthy"})


def ip(command: str) -> None:
    """Runs the program ip, which has to succeed."""
    subprocess.run(["ip", *command.split()], check=True)


async def test_generic_mode_is_used_when_the_device_has_no_native_one(kernel: Kernel, short_path: Path) -> None:
    """A device whose driver knows nothing of XDP gets the program in the stack, and that is reported."""
    ip("link add afd0 type bridge")
    device = afxdpd.Network().devices()["afd0"]
    attachment = await in_thread(afxdpd.Xdp().attach, device.ifindex, device.queues)
    assert attachment.xdp_mode == "generic"
    assert afxdpd.Network().devices()["afd0"].xdp_mode == "generic"
    attachment.close()


async def test_busy_polling_is_set_when_the_pod_sends_its_socket(kernel: Kernel, short_path: Path) -> None:
    """The daemon sets the options on the pod's own AF_XDP socket, refuses anything else, and keeps no descriptor."""
    async with node(short_path, "afa0") as kubelet:
        await kubelet.allocate(RESOURCE, ["afa0"])
        await kubelet.pods(pod("pod-x", {RESOURCE: ["afa0"]}))
        xsk = socket.socket(44, socket.SOCK_RAW)
        with xsk, socket.socket() as tcp, Client(uds(short_path, "afa0")) as client:
            ask = partial(in_thread, client.ask)
            assert await ask(b"/connect,pod-x") == (b"/host_ok", [])
            before = len(open_fds())
            assert await ask(b"/config_busy_poll, 20, 64", xsk.fileno()) == (b"/config_busy_poll_ack", [])
            assert xsk.getsockopt(socket.SOL_SOCKET, 46) == 20
            assert xsk.getsockopt(socket.SOL_SOCKET, 69) == 1
            for request, fds in (
                (b"/config_busy_poll,20,64", [tcp.fileno()]),
                (b"/config_busy_poll,20,64", []),
                (b"/config_busy_poll,20,64", [xsk.fileno(), xsk.fileno()]),
                (b"/config_busy_poll,-1,64", [xsk.fileno()]),
                (b"/config_busy_poll,20,65536", [xsk.fileno()]),
            ):
                assert await ask(request, *fds) == (b"/config_busy_poll_nak", []), (request, fds)
            assert xsk.getsockopt(socket.SOL_SOCKET, 46) == 20
            assert len(open_fds()) == before


async def test_daemon_is_as_before_when_streams_were_opened_and_dropped(kernel: Kernel, short_path: Path) -> None:
    """A hundred ListAndWatch streams that were read once and dropped leave no task and no descriptor behind."""
    async with node(short_path, "afa0") as kubelet:
        await kubelet.churn(RESOURCE, 5)
        await kubelet.wait(RESOURCE, registers_total=1, streams_open=1)
        fds, tasks = len(open_fds()), trio.lowlevel.current_statistics().tasks_living
        reply = await kubelet.churn(RESOURCE, 100)
        assert reply["messages"] == 100
        await kubelet.wait(RESOURCE, streams_open=1, healthy=1)
        await until(lambda: trio.lowlevel.current_statistics().tasks_living <= tasks and len(open_fds()) <= fds)


async def test_memory_is_flat_when_streams_were_opened_and_dropped(kernel: Kernel, short_path: Path) -> None:
    """The daemon's memory after four hundred dropped streams is what it was after the first hundred."""
    make_veth("afa0")
    config = write_config(short_path, pool=["afa0"])
    async with running_kubelet(short_path / "kubelet") as kubelet:
        with daemon_process(config, short_path, "--log-level", "info") as daemon:
            await kubelet.wait(RESOURCE, healthy=1)
            await kubelet.churn(RESOURCE, 100)
            before = resident_memory(daemon.pid)
            for _ in range(3):
                assert (await kubelet.churn(RESOURCE, 100))["messages"] == 100
            assert resident_memory(daemon.pid) - before < 512 << 10


def resident_memory(pid: int) -> int:
    """Resident memory of a process in bytes; see proc(5)."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_two_capabilities_suffice_when_the_daemon_runs_as_root(kernel: Kernel, short_path: Path) -> None:
    """With CAP_BPF and CAP_NET_ADMIN and no other, the daemon prepares, allocates, serves the map and releases."""
    make_veth("afa0")
    config = write_config(short_path, pool=["afa0"])
    async with running_kubelet(short_path / "kubelet") as kubelet:
        with daemon_process(config, short_path, prefix=with_capabilities(CAPABILITIES)) as daemon:
            await kubelet.wait(RESOURCE, healthy=1)
            status = Path(f"/proc/{daemon.pid}/status").read_text()
            mask = sum(1 << number for number in CAPABILITIES.values())
            assert f"CapEff:\t{mask:016x}" in status
            await kubelet.allocate(RESOURCE, ["afa0"])
            await kubelet.pods(pod("pod-x", {RESOURCE: ["afa0"]}))
            first = await in_thread(get_map_id, uds(short_path, "afa0"), "pod-x", "afa0")
            await kubelet.allocate(RESOURCE, ["afa0"])
            assert await in_thread(get_map_id, uds(short_path, "afa0"), "pod-x", "afa0") != first
            daemon.send_signal(signal.SIGTERM)
            assert await in_thread(daemon.wait) == 0
