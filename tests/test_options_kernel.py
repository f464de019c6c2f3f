"""What the configuration's options do, on the real kernel: who is let in, what is mounted, run, made and undone."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from conftest import Kernel
from kubelet import Kubelet, KubeletError, Reply, pod, running_kubelet
from support import (
    CAPABILITIES,
    CHOWN,
    RESOURCE,
    ROOT,
    Client,
    Pod,
    PodApp,
    daemon_process,
    get_map_id,
    in_thread,
    make_veth,
    paths,
    send_packets,
    with_capabilities,
    xdp_prog_id,
)
from test_daemon_kernel import PINS, attach_by_netlink, delete_entry, ip, kill, uds, until

import afxdpd
from _uds import ffi, lib
from afxdpd_proto import dpcnisyncer_pb2 as syncer

pytestmark = pytest.mark.kernel


def configure(directory: Path, *pools: dict[str, Any], **more: Any) -> Path:
    """Writes a configuration of pools, the first of which is called "pool" where nothing else is said."""
    file = directory / "config.json"
    content = [{"name": "pool", "mode": "primary", **each} for each in pools]
    file.write_text(json.dumps({"pools": content, "logLevel": "debug", **more}))
    return file


def named(*devices: str) -> dict[str, Any]:
    """A pool's list of devices, by name."""
    return {"devices": [{"name": device} for device in devices]}


@asynccontextmanager
async def node(directory: Path, *pools: dict[str, Any], **more: Any) -> AsyncIterator[Kubelet]:
    """kubelet, and the daemon in this process, which has registered its first pool."""
    async with running_kubelet(directory / "kubelet") as kubelet, running(directory, *pools, **more):
        await kubelet.wait(f"afxdp/{pools[0].get('name', 'pool')}", registers=1, streams_open=1, messages=1)
        yield kubelet


@asynccontextmanager
async def running(directory: Path, *pools: dict[str, Any], **more: Any) -> AsyncIterator[None]:
    """The daemon in this process."""
    config = afxdpd.get_plugin_config(configure(directory, *pools, **more))
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(afxdpd.serve, config, paths(directory)))
        yield
        nursery.cancel_scope.cancel()


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "afxdpd")


@pytest.fixture
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CNI of these tests detaches nothing: the daemon need not keep its hands off a device for long."""
    monkeypatch.setattr(afxdpd, "HOLD_OFF", 0.1)


async def allocate(kubelet: Kubelet, device: str, log: pytest.LogCaptureFixture | Path) -> Reply:
    """A pod called pod-x is given a device, and the daemon knows of it; returns the answer."""
    known = f"{RESOURCE}: {device}: held by default/pod-x"
    before = text_of(log).count(known)
    (answer,) = await kubelet.allocate(RESOURCE, [device])
    await kubelet.pods(pod("pod-x", {RESOURCE: [device]}))
    await until(lambda: text_of(log).count(known) > before)
    return answer


def text_of(log: pytest.LogCaptureFixture | Path) -> str:
    """What has been logged: here, or by a daemon in a process of its own that works below a directory."""
    return (log / "daemon.log").read_text() if isinstance(log, Path) else log.text


async def release(kubelet: Kubelet, directory: Path, *devices: str) -> None:
    """The pod is gone, and the CNI says so."""
    await kubelet.pods(pod("other", {}))
    socket = directory / "kubelet/device-plugins/afxdp-syncer.sock"
    for device in devices:
        request = syncer.DeleteNetDevReq(name=device)
        reply = await afxdpd.call_unix(
            socket, "dpcnisyncer.NetDev/DelNetDev", request, syncer.DeleteNetDevResp, timeout=10
        )
        assert reply.ret == 0


def devices() -> dict[str, dict[str, Any]]:
    """What `ip link` says of each device but lo."""
    shown = subprocess.run(["ip", "-json", "-detail", "link"], check=True, capture_output=True, text=True).stdout
    return {device["ifname"]: device for device in json.loads(shown) if device["ifname"] != "lo"}


# -- A container -------------------------------------------------------------------------------------------------------

CONTAINER = """
import json, os, select, socket, subprocess, sys
from _uds import ffi, lib
settings = json.loads(sys.argv[1])
sys.path.append(settings["examples"])
import pod_app

root, uid, device = settings["root"], settings["uid"], settings["device"]
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", root], check=True)
for mount in settings["mounts"]:
    source, place = mount["host_path"], root + mount["container_path"]
    os.makedirs(place if os.path.isdir(source) else os.path.dirname(place), exist_ok=True)
    if not os.path.exists(place):
        open(place, "x").close()
    subprocess.run(["mount", "--bind", source, place], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", place], check=True)
xsk = pod_app.XskSocket(device, 0, frames=1024) if device else None
os.chroot(root)
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)

def connect(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(path)
        sock.send(b"/connect,pod-x")
        return sock.recv(99).decode()

def open_map(path):
    global xskmap
    xskmap = lib.uds_obj_get(path.encode())
    if xskmap < 0:
        raise OSError(-xskmap, os.strerror(-xskmap))
    number = ffi.new("unsigned int *")
    lib.uds_xskmap_query(xskmap, number)
    return number[0]

def enter():
    pod_app.xskmap_update(xskmap, 0, xsk.fileno())

def receive(count, seconds):
    tally, poller = pod_app.Tally(), select.poll()
    poller.register(xsk, select.POLLIN)
    while tally.numbered < count and poller.poll(seconds * 1000):
        xsk.receive(tally.add)
    return tally.numbered, tally.lost

print(flush=True)
for line in sys.stdin:
    name, *arguments = json.loads(line)
    try:
        answer = globals()[name](*arguments)
    except OSError as exc:
        answer = exc.strerror
    print(json.dumps(answer), flush=True)
"""
"""Mounts what it is told in a root of its own, makes an AF_XDP socket, becomes a user, and takes commands."""


class Container:
    """A container of a pod: what the device plugin answered is mounted as a runtime does it, and it runs as a user.

    Args:
        pod: Its network.
        directory: Of the test.
        mounts: What Allocate answered.
        uid: The user, who has no capability if it is not root.
        device: Where it has an AF_XDP socket, made while it still may; "" for none.
    """

    def __init__(self, pod: Pod, directory: Path, mounts: list[Reply], *, uid: int, device: str = "") -> None:
        root = directory / "root"
        root.mkdir(exist_ok=True)
        settings = {
            "examples": str(ROOT / "examples"),
            "root": str(root),
            "mounts": mounts,
            "uid": uid,
            "device": device,
        }
        command = [*pod.prefix(), "unshare", "--mount", "--propagation", "private"]
        command += [sys.executable, "-P", "-c", CONTAINER, json.dumps(settings)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert self._process.stdout is not None
            assert self._process.stdout.readline() == "\n", "the container has ended"
            status = dict(re.findall(r"(\w+):\t(.*)", Path(f"/proc/{self._process.pid}/status").read_text()))
            assert status["Uid"].split() == [str(uid)] * 4
            assert not uid or {status[kind] for kind in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def connect(self, device: str) -> Any:
        """Answer to /connect on a device's socket, or why there is none."""
        return self.do("connect", f"/tmp/afxdp_dp/{device}/afxdp.sock")

    def open_map(self, device: str) -> Any:
        """Opens the map that is mounted as a file; returns its id, or why it cannot be opened."""
        return self.do("open_map", f"/tmp/afxdp_dp/{device}/xsks_map")

    def do(self, *command: Any) -> Any:
        """Has something done."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


# -- What a pool takes -------------------------------------------------------------------------------------------------


async def test_pools_take_devices_when_they_are_named_by_any_identity(
    kernel: Kernel, short_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A device is found by its name or its address; what is not here, or a driver rule does not take, is told."""
    make_veth("afa0", "afa1")
    mac = devices()["afa1"]["address"].upper()
    here = [{"name": "afa0"}, {"mac": mac}, {"pci": "0000:81:00.1"}, {"name": "afa9"}, {"name": "lo"}]
    others = [{"name": "veth"}, {"name": "i40e"}]
    async with node(short_path, {"devices": here}, {"name": "rest", "drivers": others}) as kubelet:
        await kubelet.wait(RESOURCE, devices={"afa0": "Healthy", "afa1": "Healthy"})
        await kubelet.wait("afxdp/rest", messages=1, devices={})
        passed = dict(re.findall(r"afxdp/(?:pool|rest): (\S+) is not taken: (.*)", caplog.text))
        missing = "no such device in the host's network namespace"
        virtual = "it is not physical: only a pool that names it under devices takes it"
        assert passed == {
            "lo": "the loopback device is never taken",
            "0000:81:00.1": missing,
            "afa9": missing,
            **dict.fromkeys(("afa0", "afa0p", "afa1", "afa1p"), virtual),
        }


async def test_device_comes_and_goes_when_exclude_addressed_is_set(kernel: Kernel, short_path: Path) -> None:
    """An address takes a free device out of the pool, and its removal brings it back; a pod keeps what it has."""
    driver = {"name": "veth", "excludeAddressed": True, "excludeDevices": [{"name": "veth12"}]}
    async with node(short_path, {"drivers": [driver]}, kindCluster=True) as kubelet:
        await kubelet.wait(RESOURCE, healthy=3)
        await kubelet.allocate(RESOURCE, ["veth8"])
        for device in ("veth6", "veth8"):
            await in_thread(ip, f"address add 192.0.2.1/24 dev {device}")
        await kubelet.wait(RESOURCE, devices=dict.fromkeys(("veth10", "veth8"), "Healthy"))
        assert not xdp_prog_id("veth6")
        assert xdp_prog_id("veth8")
        await in_thread(ip, "address del 192.0.2.1/24 dev veth6")
        await kubelet.wait(RESOURCE, devices=dict.fromkeys(("veth10", "veth6", "veth8"), "Healthy"))
        assert xdp_prog_id("veth6")


async def test_pool_follows_the_sysctl_when_it_requires_unprivileged_bpf(
    kernel: Kernel, short_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a pool takes its devices where the kernel allows BPF to everybody, and elsewhere says why it does not."""
    make_veth("afa0")
    allowed = Path("/proc/sys/kernel/unprivileged_bpf_disabled").read_text() == "0\n"
    async with node(short_path, {**named("afa0"), "requiresUnprivilegedBpf": True}) as kubelet:
        await kubelet.wait(RESOURCE, devices={"afa0": "Healthy"} if allowed else {})
        refused = (
            "everything is not taken: requiresUnprivilegedBpf: kernel.unprivileged_bpf_disabled is not 0 on this node"
        )
        assert (refused in caplog.text) is not allowed
        assert bool(xdp_prog_id("afa0")) is allowed


# -- A cluster of kind -------------------------------------------------------------------------------------------------

POD_ENDS = ("veth6", "veth8", "veth10", "veth12")
PORTS = ("veth7", "veth9", "veth11", "veth13")
KIND = {"drivers": [{"name": "veth"}]}


async def test_kind_network_is_the_pools_when_it_was_not_there(
    kernel: Kernel, short_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The daemon makes a bridge with four veths on it, whose other ends are the pool's and receive packets."""
    exclude = [{"name": "veth10"}]
    async with node(
        short_path, {"drivers": [{"name": "veth", "excludeDevices": exclude}]}, kindCluster=True
    ) as kubelet:
        await kubelet.wait(RESOURCE, devices=dict.fromkeys(("veth12", "veth6", "veth8"), "Healthy"))
        found = devices()
        assert found.keys() == {"afxdp-kind-br", *POD_ENDS, *PORTS}
        assert {name for name, device in found.items() if device.get("master") == "afxdp-kind-br"} == {*PORTS}
        passed = dict(re.findall(r"afxdp/pool: (\S+) is not taken: (.*)", caplog.text))
        enslaved = dict.fromkeys(PORTS, "it is enslaved to a bridge or bond")
        assert passed == {**enslaved, "veth10": "excludeDevices: veth10"}
        await allocate(kubelet, "veth6", caplog)
        with Pod() as sandbox:
            sandbox.take("veth6")
            with await in_thread(PodApp, sandbox, short_path / "uds/pool", "pod-x", ["veth6"], 1000) as app:
                await in_thread(send_packets, "veth7", 1000)
                assert (await in_thread(app.result))["lost"] == 0


async def test_kind_network_goes_with_the_daemon_when_no_pod_has_a_part_of_it(kernel: Kernel, short_path: Path) -> None:
    """What a daemon that was killed has left is used by the next one; one that ends in order leaves nothing."""
    mac = "02:00:00:00:00:06"
    exclude = {"drivers": [{"name": "veth", "excludeDevices": [{"mac": mac}]}]}
    config = configure(short_path, exclude, kindCluster=True)
    async with running_kubelet(short_path / "kubelet") as kubelet:
        with daemon_process(config, short_path) as daemon:
            await kubelet.wait(RESOURCE, healthy=4)
            first = {name: device["ifindex"] for name, device in devices().items()}
            await in_thread(kill, daemon)
        await kubelet.wait(RESOURCE, streams_open=0)
        ip(f"link set veth6 address {mac}")
        with daemon_process(config, short_path) as daemon:
            await kubelet.wait(RESOURCE, devices=dict.fromkeys(("veth10", "veth12", "veth8"), "Healthy"))
            assert {name: device["ifindex"] for name, device in devices().items()} == first
            daemon.send_signal(signal.SIGTERM)
            assert await in_thread(daemon.wait) == 0
    assert devices() == {}


@pytest.mark.parametrize("options", [{}, {"udsServerDisable": True}], ids=["socket", "raw"])
async def test_kind_network_stays_when_pods_have_a_part_of_it(
    kernel: Kernel, short_path: Path, options: dict[str, Any]
) -> None:
    """Pairs of which pods have one end, moved already or not, outlive the daemon with the bridge; the rest goes."""
    config = configure(short_path, {**KIND, **options}, kindCluster=True)
    async with running_kubelet(short_path / "kubelet") as kubelet:
        with ExitStack() as life:
            sandbox = life.enter_context(Pod())
            with daemon_process(config, short_path) as daemon:
                await kubelet.wait(RESOURCE, healthy=4)
                await kubelet.allocate(RESOURCE, ["veth6", "veth8"])
                await kubelet.pods(pod("pod-x", {RESOURCE: ["veth6", "veth8"]}))
                sandbox.take("veth6")
                first = {name: device["ifindex"] for name, device in devices().items()}
                daemon.send_signal(signal.SIGTERM)
                assert await in_thread(daemon.wait) == 0
            kept = devices()
            assert kept.keys() == {"afxdp-kind-br", "veth7", "veth8", "veth9"}
            registers = (await kubelet.wait(RESOURCE, streams_open=0))["registers"]
            with daemon_process(config, short_path) as daemon:
                await kubelet.wait(RESOURCE, registers=registers + 1, streams_open=1, healthy=4)
                now = {name: device["ifindex"] for name, device in devices().items()}
                assert {name: now[name] for name in kept} == {name: first[name] for name in kept}
                assert "veth6" not in now
                await until(lambda: "veth6: held by default/pod-x" in text_of(short_path))
                life.close()  # the pod's namespace ends, and takes the veth along
                await until(lambda: devices().keys() == {"afxdp-kind-br", *POD_ENDS, *PORTS})
                assert devices()["veth7"]["ifindex"] != first["veth7"]
                await kubelet.wait(RESOURCE, healthy=4)
                await release(kubelet, short_path, "veth6", "veth8")
                daemon.send_signal(signal.SIGTERM)
                assert await in_thread(daemon.wait) == 0
    assert devices() == {}


# -- The pod's user ----------------------------------------------------------------------------------------------------


@contextmanager
def without_acls(place: Path) -> Iterator[None]:
    """A file system at a place that has no ACLs."""
    place.mkdir()
    subprocess.run(["mount", "-t", "ramfs", "ramfs", place], check=True)
    try:
        with pytest.raises(OSError, match="not supported"):
            os.setxattr(place, "system.posix_acl_access", b"\2\0\0\0")
        yield
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


async def check_user(directory: Path, log: pytest.LogCaptureFixture) -> os.stat_result:
    """The pod's user connects, another one cannot; returns what the socket is then."""
    make_veth("afa0")
    async with node(directory, {**named("afa0"), "uid": 1500}) as kubelet:
        await kubelet.wait(RESOURCE, healthy=1)
        mounts = (await allocate(kubelet, "afa0", log))["mounts"]
        with Pod() as sandbox:
            for uid, answer in ((1500, "/host_ok"), (1501, "Permission denied")):
                with await in_thread(partial(Container, sandbox, directory, mounts, uid=uid)) as container:
                    assert await in_thread(container.connect, "afa0") == answer
    return uds(directory, "afa0").stat()


async def test_pods_user_connects_when_it_has_an_acl_entry(
    kernel: Kernel, short_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A process of the user without capabilities gets through directory and socket, one of another user does not."""
    assert (await check_user(short_path, caplog)).st_uid == 0
    assert os.getxattr(uds(short_path, "afa0"), "system.posix_acl_access")


async def test_pods_user_connects_when_the_file_system_has_no_acls(
    kernel: Kernel, short_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """There the user owns directory and socket, with the same effect."""
    with without_acls(short_path / "uds"):
        assert (await check_user(short_path, caplog)).st_uid == 1500


@pytest.mark.parametrize("acls", [True, False], ids=["acls", "no acls"])
async def test_pods_user_is_let_in_when_the_daemon_has_three_capabilities(
    kernel: Kernel, short_path: Path, acls: bool
) -> None:
    """With CAP_BPF, CAP_NET_ADMIN and CAP_CHOWN the pod's user gets socket and file, from the next daemon the same."""
    make_veth("afa0")
    config = configure(short_path, {**named("afa0"), "uid": 1500, "bpfMapPinningEnable": True})
    prefix = with_capabilities([*CAPABILITIES, *CHOWN])
    maps = []
    with nullcontext() if acls else without_acls(short_path / "uds"), Pod() as sandbox:
        async with running_kubelet(short_path / "kubelet") as kubelet:
            for daemons in (1, 2):
                with daemon_process(config, short_path, prefix=prefix) as daemon:
                    await kubelet.wait(RESOURCE, registers=daemons, streams_open=1, healthy=1)
                    if daemons == 1:
                        mounts = (await allocate(kubelet, "afa0", short_path))["mounts"]
                    container = partial(Container, sandbox, short_path, mounts, uid=1500)
                    with await in_thread(container) as container:
                        assert await in_thread(container.connect, "afa0") == "/host_ok"
                        maps.append(await in_thread(container.open_map, "afa0"))
                    await in_thread(kill, daemon)
                await kubelet.wait(RESOURCE, streams_open=0)
    assert isinstance(maps[0], int)
    assert maps[0] == maps[1]


# -- The map as a file -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("socket", [True, False], ids=["with socket", "alone"])
async def test_packets_arrive_when_the_map_is_opened_as_a_file(
    kernel: Kernel, short_path: Path, caplog: pytest.LogCaptureFixture, socket: bool
) -> None:
    """The pod's user opens the mounted map without capabilities and receives through it; another user cannot."""
    make_veth("afa0")
    options = {"bpfMapPinningEnable": True, "udsServerDisable": not socket, "uid": 1500}
    async with node(short_path, {**named("afa0"), **options}) as kubelet:
        await kubelet.wait(RESOURCE, healthy=1)
        mounts = (await allocate(kubelet, "afa0", caplog))["mounts"]
        path = {"container_path": "/tmp/afxdp_dp/afa0", "host_path": str(short_path / "uds/pool/afa0")}
        file = {"container_path": "/tmp/afxdp_dp/afa0/xsks_map", "host_path": str(PINS / "pool/afa0/xsks_map")}
        assert mounts == [{**mount, "read_only": True} for mount in ([path, file] if socket else [file])]
        assert uds(short_path, "afa0").exists() is socket
        with Pod() as sandbox:
            sandbox.take("afa0")
            with await in_thread(partial(Container, sandbox, short_path, mounts, uid=1501)) as other:
                assert await in_thread(other.open_map, "afa0") == "Permission denied"
            with await in_thread(partial(Container, sandbox, short_path, mounts, uid=1500, device="afa0")) as container:
                if socket:
                    assert await in_thread(container.connect, "afa0") == "/host_ok"
                    known = await in_thread(get_map_id, uds(short_path, "afa0"), "pod-x", "afa0")
                    assert await in_thread(container.open_map, "afa0") == known
                else:
                    assert isinstance(await in_thread(container.open_map, "afa0"), int)
                await in_thread(container.do, "enter")
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(in_thread, send_packets, "afa0p", 1000)
                    assert await in_thread(container.do, "receive", 1000, 10) == [1000, 0]


def map_at(path: Path) -> tuple[int, int]:
    """Opens a pinned map; returns a descriptor, the caller's, and the map's id."""
    fd = lib.uds_obj_get(os.fsencode(path))
    assert fd >= 0, os.strerror(-fd)
    number = ffi.new("unsigned int *")
    assert lib.uds_xskmap_query(fd, number) == 1
    return fd, number[0]


@pytest.mark.usefixtures("prompt")
@pytest.mark.parametrize("socket", [True, False], ids=["with socket", "alone"])
async def test_former_holder_is_powerless_when_it_still_has_the_map(
    kernel: Kernel, short_path: Path, caplog: pytest.LogCaptureFixture, socket: bool
) -> None:
    """A container that outlives the release has lost the file, or has that of the old map; the next pod has another."""
    make_veth("afa0")
    options = {"bpfMapPinningEnable": True, "udsServerDisable": not socket}
    async with node(short_path, {**named("afa0"), **options}) as kubelet:
        await kubelet.wait(RESOURCE, healthy=1)
        mounts = (await allocate(kubelet, "afa0", caplog))["mounts"]
        with Pod() as sandbox, await in_thread(partial(Container, sandbox, short_path, mounts, uid=0)) as former:
            old, old_id = map_at(PINS / "pool/afa0/xsks_map")
            assert await in_thread(former.open_map, "afa0") == old_id
            await release(kubelet, short_path, "afa0")
            assert not (PINS / "pool").exists()
            assert not (short_path / "uds/pool/afa0").exists()
            assert not xdp_prog_id("afa0")
            assert (await allocate(kubelet, "afa0", caplog))["mounts"] == mounts
            assert await in_thread(former.open_map, "afa0") == ("No such file or directory" if socket else old_id)
            sandbox.take("afa0")
            container = partial(Container, sandbox, short_path, mounts, uid=0, device="afa0")
            with await in_thread(container) as next_one:
                assert await in_thread(next_one.open_map, "afa0") != old_id
                await in_thread(next_one.do, "enter")
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(in_thread, send_packets, "afa0p", 1000)
                    for _ in range(100):
                        delete_entry(old)
                    assert await in_thread(next_one.do, "receive", 1000, 10) == [1000, 0]
            os.close(old)


async def test_pods_user_keeps_its_map_when_the_configuration_has_another(
    kernel: Kernel, short_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After a restart the file of a running pod is open to the user it was made for, also where there is no socket."""
    make_veth("afa0")
    options = {"bpfMapPinningEnable": True, "udsServerDisable": True}
    async with running_kubelet(short_path / "kubelet") as kubelet:
        async with running(short_path, {**named("afa0"), **options, "uid": 1500}):
            await kubelet.wait(RESOURCE, healthy=1)
            mounts = (await allocate(kubelet, "afa0", caplog))["mounts"]
        async with running(short_path, {**named("afa0"), **options, "uid": 1600}):
            await kubelet.wait(RESOURCE, registers=1, streams_open=1, healthy=1)
            with Pod() as sandbox:
                for uid, opens in ((1500, True), (1600, False)):
                    with await in_thread(partial(Container, sandbox, short_path, mounts, uid=uid)) as container:
                        answer = await in_thread(container.open_map, "afa0")
                        assert (answer != "Permission denied") is opens, uid


# -- Devices handed over raw -------------------------------------------------------------------------------------------


async def test_device_is_handed_over_raw_when_there_is_no_socket(
    kernel: Kernel, short_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is attached or mounted; another's program is no concern; after a restart kubelet says what pods have."""
    make_veth("afa0", "afa1")
    await in_thread(attach_by_netlink, "afa0")
    foreign = xdp_prog_id("afa0")
    options = {**named("afa0", "afa1"), "udsServerDisable": True}
    with Pod() as sandbox:
        async with running_kubelet(short_path / "kubelet") as kubelet:
            async with running(short_path, options):
                await kubelet.wait(RESOURCE, devices={"afa0": "Healthy", "afa1": "Healthy"})
                answer = await allocate(kubelet, "afa0", caplog)
                assert answer["envs"] == {"AFXDP_DEVICES_POOL": "afa0"}
                assert not answer["mounts"]
                assert xdp_prog_id("afa0") == foreign
                assert not xdp_prog_id("afa1")
                assert not list(PINS.iterdir())
                assert not list((short_path / "uds").rglob("afa*"))
                await in_thread(sandbox.take, "afa0")
                await kubelet.prestart(RESOURCE, ["afa0"])
                await kubelet.wait(RESOURCE, devices={"afa0": "Healthy", "afa1": "Healthy"})
            await kubelet.wait(RESOURCE, streams_open=0)
            async with running(short_path, options):
                await kubelet.wait(RESOURCE, streams_open=1, devices={"afa0": "Healthy", "afa1": "Healthy"})
                await kubelet.prestart(RESOURCE, ["afa0"])
                assert "afxdp/pool: afa0: still allocated, says kubelet" in caplog.text
                await in_thread(sandbox.give_back, "afa0")
                await until(lambda: "afa0: back in the host namespace" in caplog.text)
                await release(kubelet, short_path, "afa0")
                assert xdp_prog_id("afa0") == foreign
                assert not xdp_prog_id("afa1")
                await kubelet.wait(RESOURCE, devices={"afa0": "Healthy", "afa1": "Healthy"})


async def test_device_is_still_the_pods_when_kubelet_knows_no_pods_at_first(
    kernel: Kernel, short_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A daemon that begins together with kubelet, which lists nothing at first, learns what pods have all the same."""
    make_veth("afa0")
    with Pod() as sandbox:
        await in_thread(sandbox.take, "afa0")
        async with node(short_path, {**named("afa0"), "udsServerDisable": True}) as kubelet:
            await kubelet.wait(RESOURCE, lists=1, devices={})
            await kubelet.pods(pod("pod-x", {RESOURCE: ["afa0"]}))
            await kubelet.wait(RESOURCE, devices={"afa0": "Healthy"})
            assert "afxdp/pool: afa0: still allocated, says kubelet" in caplog.text
            await in_thread(sandbox.give_back, "afa0")


# -- ethtool -----------------------------------------------------------------------------------------------------------


def features(device: str) -> dict[str, str]:
    """What ethtool shows of a device."""
    shown = subprocess.run(["ethtool", "-k", device], check=True, capture_output=True, text=True).stdout
    return dict(re.findall(r"(?m)^\s*([\w-]+): (.*)$", shown))


TOGGLED = {"generic-receive-offload": "on", "tcp-segmentation-offload": "off", "rx-gro-list": "on"}
TOGGLES = ["-K -device- gro on tso off", "ethtool --offload -device- rx-gro-list on"]


def toggled(device: str) -> bool:
    """Whether a device is as the commands make it."""
    return TOGGLED.items() <= features(device).items()


@pytest.mark.usefixtures("prompt")
async def test_ethtool_commands_are_undone_when_the_device_is_released(
    kernel: Kernel, short_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Allocate runs them, for the next pod again; what only the CNI can fill in is left out with a warning."""
    make_veth("afa0", "afa1")
    commands = [*TOGGLES, "-N -device- flow-type udp4 dst-ip -ip- action 2"]
    async with node(short_path, {**named("afa0", "afa1"), "ethtoolCmds": commands}) as kubelet:
        await kubelet.wait(RESOURCE, healthy=2)
        before = features("afa0")
        assert not TOGGLED.items() & before.items()
        await allocate(kubelet, "afa0", caplog)
        assert toggled("afa0")
        assert features("afa1") == before
        assert "action 2 is left out: only the CNI knows the address" in caplog.text
        await kubelet.allocate(RESOURCE, ["afa0"])  # another container of the pod
        assert toggled("afa0")
        with Pod() as sandbox:
            sandbox.take("afa0")
            sandbox.give_back("afa0")
        assert toggled("afa0")
        await until(lambda: caplog.text.count("afa0: held by default/pod-x") == 2)
        await release(kubelet, short_path, "afa0")
        await until(lambda: "afa0: prepared" in caplog.text.rpartition("the CNI says so")[2])
        assert features("afa0") == before
        assert not list((short_path / "uds/.ethtool").rglob("*afa*"))


@pytest.mark.usefixtures("prompt")
async def test_ethtool_commands_are_undone_when_the_daemon_was_killed(
    kernel: Kernel, short_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What a daemon did that was killed, the next one undoes, whatever its configuration says, and not before."""
    make_veth("afa0")
    options = {**named("afa0"), "ethtoolCmds": TOGGLES}
    async with running_kubelet(short_path / "kubelet") as kubelet:
        with daemon_process(configure(short_path, options), short_path) as daemon:
            await kubelet.wait(RESOURCE, healthy=1)
            before = features("afa0")
            await allocate(kubelet, "afa0", short_path)
            await in_thread(kill, daemon)
        async with running(short_path, named("afa0")):
            await until(lambda: "afa0: held by default/pod-x" in caplog.text)
            assert toggled("afa0")
            await release(kubelet, short_path, "afa0")
            await until(lambda: "afa0: prepared" in caplog.text)
            assert "afa0: ethtool settings undone" in caplog.text
            assert features("afa0") == before


async def test_ethtool_commands_are_run_when_a_container_starts_after_a_reboot(
    kernel: Kernel, short_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """kubelet does not allocate again what a pod had before a reboot, which has undone everything: its start does."""
    make_veth("afa0")
    async with running_kubelet(short_path / "kubelet") as kubelet:
        await kubelet.pods(pod("pod-x", {RESOURCE: ["afa0"]}))
        async with running(short_path, {**named("afa0"), "ethtoolCmds": TOGGLES}):
            await kubelet.wait(RESOURCE, registers=1, streams_open=1, healthy=1)
            await until(lambda: "afa0: held by default/pod-x" in caplog.text)
            await kubelet.prestart(RESOURCE, ["afa0"])
            assert toggled("afa0")
            calls = caplog.text.count("ethtool -K")
            await kubelet.prestart(RESOURCE, ["afa0"])
            assert caplog.text.count("ethtool -K") == calls


async def test_allocate_fails_when_an_ethtool_command_does(kernel: Kernel, short_path: Path) -> None:
    """kubelet is told what ethtool said; no device of the request is taken or changed, and each can be had again."""
    make_veth("afa0", "afa1")
    bad = {**named("afa0", "afa1"), "ethtoolCmds": [*TOGGLES, "-K -device- gor off"]}
    good = {**named("afa0", "afa1"), "ethtoolCmds": TOGGLES}
    async with running_kubelet(short_path / "kubelet") as kubelet:
        async with running(short_path, bad):
            await kubelet.wait(RESOURCE, healthy=2)
            before = features("afa0")
            programs = [xdp_prog_id(name) for name in ("afa0", "afa1")]
            for request in (["afa0"], ["afa0", "afa1"]):
                with pytest.raises(
                    KubeletError, match=r"afa0: ethtoolCmds: '-K -device- gor off': .*bit name not found"
                ) as error:
                    await kubelet.allocate(RESOURCE, request)
                assert error.value.code == "FAILED_PRECONDITION"
                await until(lambda: [features(name) for name in ("afa0", "afa1")] == [before] * 2)
                await kubelet.wait(RESOURCE, healthy=2)
            assert not list(PINS.iterdir())
            assert not list((short_path / "uds").rglob("*afa*"))
            assert [xdp_prog_id(name) for name in ("afa0", "afa1")] == programs
        registers = (await kubelet.wait(RESOURCE, streams_open=0))["registers"]
        async with running(short_path, good):
            await kubelet.wait(RESOURCE, registers=registers + 1, streams_open=1, healthy=2)
            await kubelet.allocate(RESOURCE, ["afa0", "afa1"])
            assert toggled("afa0")
            assert toggled("afa1")


# -- udsFuzz -----------------------------------------------------------------------------------------------------------


async def test_pod_is_served_when_its_socket_is_fuzzed(
    kernel: Kernel, short_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random requests reach the handler, with their seed and replies in the log, beside the pod's own."""
    monkeypatch.setattr(afxdpd, "FUZZ_PAUSE", 0.001)
    make_veth("afa0")
    async with node(short_path, {**named("afa0"), "udsFuzz": True}) as kubelet:
        await kubelet.wait(RESOURCE, healthy=1)
        await kubelet.allocate(RESOURCE, ["afa0"])
        await kubelet.pods(pod("pod-x", {RESOURCE: ["afa0"]}))
        await until(lambda: re.search("afa0: udsFuzz: 1000 random requests, seed [0-9]+", caplog.text))
        with Client(uds(short_path, "afa0")) as client:
            assert await in_thread(client.ask, b"/connect,pod-x") == (b"/host_ok", [])
            xskmap = await in_thread(get_map_id, uds(short_path, "afa0"), "pod-x", "afa0")
            await until(lambda: "afa0: udsFuzz: done: " in caplog.text)
            assert await in_thread(client.ask, b"/version") == (b"0.1", [])
        assert await in_thread(get_map_id, uds(short_path, "afa0"), "pod-x", "afa0") == xskmap
        done = re.search("udsFuzz: done: (.*)", caplog.text)
        assert done is not None
        replies = {reply: int(count) for count, reply in re.findall(r"([0-9]+) ([^,]+)", done[1])}
        assert sum(replies.values()) == 1000
        assert replies.keys() >= {"/nak", "/host_nak", "/fd_nak", "0.1"}
        assert not [record for record in caplog.records if record.exc_info]
