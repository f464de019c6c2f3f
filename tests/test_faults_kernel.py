"""What must not hurt: hostile pods, odd states and refusals of the kernel, on the real kernel."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import trio
from conftest import Kernel
from kubelet import KubeletError, pod, running_kubelet
from support import (
    RESOURCE,
    Client,
    Pod,
    daemon_process,
    delete_link,
    get_map_id,
    in_thread,
    make_veth,
    paths,
    running_daemon,
    write_config,
    xdp_prog_id,
)
from test_daemon_kernel import PINS, ip, node, uds, until

import afxdpd
from _uds import lib

pytestmark = pytest.mark.kernel

SOON = 2.0
"""Seconds for what takes a few milliseconds where nobody is in the way."""


# -- Hostile pods ------------------------------------------------------------------------------------------------------


def lingering_socket(seconds: int) -> tuple[socket.socket, socket.socket]:
    """A TCP socket whose close takes that long, and its peer, which never reads."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        sock = socket.create_connection(listener.getsockname())
        peer, _ = listener.accept()
    sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        send_for_ever(sock)
    sock.setblocking(True)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, seconds))
    return sock, peer


def send_for_ever(sock: socket.socket) -> None:
    """Sends until the socket is full, which a non-blocking one says by BlockingIOError."""
    while True:
        sock.send(bytes(1 << 16))


async def test_other_pods_are_served_when_one_sends_files_that_take_long_to_close(
    kernel: Kernel, short_path: Path
) -> None:
    """A lingering socket in the queue of another one, and hundreds of packet sockets, delay nobody but their pod."""
    async with node(short_path, "afa0", "afa1") as kubelet:
        await kubelet.allocate(RESOURCE, ["afa0"])
        await kubelet.allocate(RESOURCE, ["afa1"])
        await kubelet.pods(pod("bad", {RESOURCE: ["afa0"]}), pod("good", {RESOURCE: ["afa1"]}))
        kept = []
        with Client(uds(short_path, "afa0")) as client:
            for _ in range(3):
                inner, outer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
                lingering, peer = lingering_socket(30)
                socket.send_fds(inner, [b"x"], [lingering.fileno()])
                os.close(lingering.detach())  # the last reference is in the queue now
                socket.send_fds(client.sock, [b"/version"], [outer.fileno()])
                outer.close()
                kept += [inner, peer]
            packets = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW) for _ in range(253)]
            socket.send_fds(client.sock, [b"/version"], [sock.fileno() for sock in packets])
            for sock in packets:
                sock.close()
            with trio.fail_after(SOON):
                assert await in_thread(get_map_id, uds(short_path, "afa1"), "good", "afa1")
                await kubelet.allocate(RESOURCE, ["afa1"])
        for sock in kept:
            sock.close()


async def test_other_pods_are_served_when_one_fills_its_connections(kernel: Kernel, short_path: Path) -> None:
    """A pod that opens hundreds of connections and floods them has at most so many sessions, and others have theirs."""
    async with node(short_path, "afa0", "afa1") as kubelet:
        await kubelet.allocate(RESOURCE, ["afa0"])
        await kubelet.allocate(RESOURCE, ["afa1"])
        await kubelet.pods(pod("bad", {RESOURCE: ["afa0"]}), pod("good", {RESOURCE: ["afa1"]}))
        clients = []
        for _ in range(300):
            clients.append(await in_thread(Client, uds(short_path, "afa0")))
            for _ in range(3):
                try:
                    clients[-1].sock.send(b"/nonsense", socket.MSG_DONTWAIT)
                except OSError:  # full, or refused already
                    break
        with trio.fail_after(SOON):
            assert await in_thread(get_map_id, uds(short_path, "afa1"), "good", "afa1")
        for client in clients:
            client.sock.close()
        with trio.fail_after(20):
            while not await in_thread(is_answered, uds(short_path, "afa0")):
                await trio.lowlevel.checkpoint()


def is_answered(path: Path) -> bool:
    """Whether a connection is served."""
    try:
        with Client(path) as client:
            client.sock.send(b"/version")
            return client.sock.recv(16) != b""
    except OSError:
        return False


# -- Devices in odd states ---------------------------------------------------------------------------------------------


async def test_program_survives_when_a_device_was_made_again_and_the_daemon_is_killed(
    kernel: Kernel, short_path: Path
) -> None:
    """What is attached to an allocated device that was deleted and made again is pinned like the first."""
    make_veth("afa0")
    config = write_config(short_path, pool=["afa0"])
    async with running_kubelet(short_path / "kubelet") as kubelet:
        with daemon_process(config, short_path) as daemon:
            await kubelet.wait(RESOURCE, healthy=1)
            await kubelet.allocate(RESOURCE, ["afa0"])
            await in_thread(delete_link, "afa0")
            await in_thread(make_veth, "afa0")
            await until(lambda: xdp_prog_id("afa0"))
            program = xdp_prog_id("afa0")
            attached = afxdpd.Xdp()
            await until(lambda: attached.pinned_devices("pool") == ["afa0"] and pinned_program() == program)
            daemon.send_signal(signal.SIGKILL)
            await in_thread(daemon.wait)
        assert xdp_prog_id("afa0") == program


def pinned_program() -> int:
    """Id of the program behind the pinned link of afa0, 0 where there is none."""
    try:
        attachment = afxdpd.Xdp().open_pinned("pool", "afa0")
    except OSError:
        return 0
    attachment.close()
    return attachment.prog_id


async def test_device_in_a_pod_is_kept_when_kubelet_lists_other_pods_only(
    kernel: Kernel, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a device lives in another namespace it is in use, however long kubelet does not list it."""
    for name in ("RELEASE_GRACE", "RELEASE_AFTER", "RELEASE_AFTER_EMPTY"):
        monkeypatch.setattr(afxdpd, name, 0.0)
    async with node(short_path, "afa0", "afa1") as kubelet:
        await kubelet.allocate(RESOURCE, ["afa0"])
        await kubelet.allocate(RESOURCE, ["afa1"])
        with Pod() as sandbox:
            sandbox.take("afa0")
            await kubelet.pods(pod("static", {}))
            await until(lambda: not (PINS / "pool/afa1").exists())  # it is in the host, and is released
            lists = (await kubelet.state())["lists"]
            await kubelet.wait(RESOURCE, lists=lists + 3, timeout=30)
            assert (PINS / "pool/afa0/link").exists()
            assert "xdp" in sandbox.run("ip", "link", "show", "afa0")
            sandbox.give_back("afa0")
        await until(lambda: not (PINS / "pool/afa0").exists())


async def test_allocate_ends_in_time_when_the_driver_takes_long(
    kernel: Kernel, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An Allocate of a device that is still being prepared is cut off by its deadline; the work goes on."""
    monkeypatch.setattr(afxdpd, "ALLOCATE_TIMEOUT", 0.3)
    release = threading.Event()

    class SlowXdp(afxdpd.Xdp):
        def attach(self, ifindex: int, queues: int) -> afxdpd.Attachment:
            assert release.wait(60)
            return super().attach(ifindex, queues)

    make_veth("afa0")
    config = afxdpd.get_plugin_config(write_config(short_path, pool=["afa0"]))
    async with running_kubelet(short_path / "kubelet") as kubelet, trio.open_nursery() as nursery:
        await nursery.start(partial(afxdpd.serve, config, paths(short_path), xdp=SlowXdp()))
        await kubelet.wait(RESOURCE, devices={"afa0": "Unhealthy"})
        with pytest.raises(KubeletError) as error:
            await kubelet.allocate(RESOURCE, ["afa0"])
        assert error.value.code == "DEADLINE_EXCEEDED"
        release.set()
        await kubelet.wait(RESOURCE, devices={"afa0": "Healthy"})
        await kubelet.allocate(RESOURCE, ["afa0"])
        nursery.cancel_scope.cancel()


async def test_device_is_offered_again_when_its_default_route_went_without_a_word(
    kernel: Kernel, short_path: Path
) -> None:
    """The kernel does not tell of routes that go with a device's state or address; they are noticed all the same."""
    async with node(short_path, "afa0") as kubelet:
        for command in ("address add 192.0.2.1/24 dev afa0", "route add default via 192.0.2.2"):
            await in_thread(ip, command)
        await kubelet.wait(RESOURCE, devices={})
        await in_thread(ip, "link set afa0 down")
        await kubelet.wait(RESOURCE, devices={"afa0": "Healthy"})
        await in_thread(ip, "link set afa0 up")
        await in_thread(ip, "route add default via 192.0.2.2")
        await kubelet.wait(RESOURCE, devices={})
        await in_thread(ip, "address flush dev afa0 scope global")
        await kubelet.wait(RESOURCE, devices={"afa0": "Healthy"})


# -- Owners ------------------------------------------------------------------------------------------------------------


async def test_pod_may_connect_when_an_ended_one_is_listed_beside_it(kernel: Kernel, short_path: Path) -> None:
    """Of several pods that kubelet lists for a device each is believed, and none that it does not list any more."""
    async with node(short_path, "afa0") as kubelet:
        await kubelet.pods(pod("new", {RESOURCE: ["afa0"]}), pod("old", {RESOURCE: ["afa0"]}))
        await kubelet.allocate(RESOURCE, ["afa0"])
        for name in ("new", "old"):
            assert await in_thread(get_map_id, uds(short_path, "afa0"), name, "afa0")
        await kubelet.pods(pod("new", {RESOURCE: ["afa0"]}))

        async def refused() -> bool:
            with Client(uds(short_path, "afa0")) as client:
                return bool((await in_thread(client.ask, b"/connect,old"))[0] == b"/host_nak")

        with trio.fail_after(15):
            while not await refused():
                await kubelet.wait(RESOURCE, lists=(await kubelet.state())["lists"] + 1, timeout=12)


async def test_pod_may_connect_when_the_last_one_was_still_listed(kernel: Kernel, short_path: Path) -> None:
    """Who is not the pod that kubelet has listed after Allocate is refused only when kubelet says so once more."""
    async with node(short_path, "afa0") as kubelet:
        await kubelet.pods(pod("old", {RESOURCE: ["afa0"]}))
        await kubelet.allocate(RESOURCE, ["afa0"])
        assert await in_thread(get_map_id, uds(short_path, "afa0"), "old", "afa0")
        await kubelet.pods(pod("new", {RESOURCE: ["afa0"]}))
        assert await in_thread(get_map_id, uds(short_path, "afa0"), "new", "afa0")
        with Client(uds(short_path, "afa0")) as client:
            assert (await in_thread(client.ask, b"/connect,old"))[0] == b"/host_nak"


async def test_pod_may_connect_when_kubelet_refuses_a_question(kernel: Kernel, short_path: Path) -> None:
    """One refused List is asked again; the pod only waits a moment."""
    async with node(short_path, "afa0") as kubelet:
        await kubelet.pods(pod("pod-x", {RESOURCE: ["afa0"]}))
        await kubelet.podresources("exhausted", times=2)
        await kubelet.allocate(RESOURCE, ["afa0"])
        assert await in_thread(get_map_id, uds(short_path, "afa0"), "pod-x", "afa0")


# -- Refusals of the kernel --------------------------------------------------------------------------------------------


def run(command: str) -> None:
    """Runs a program, which has to succeed."""
    subprocess.run(command.split(), check=True)


async def test_daemon_lives_when_the_pins_cannot_be_changed(
    kernel: Kernel, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With bpffs read-only an Allocate fails by name and a release is made up for later; nothing else happens."""
    for name in ("RELEASE_GRACE", "RELEASE_AFTER"):
        monkeypatch.setattr(afxdpd, name, 0.0)
    async with node(short_path, "afa0", "afa1") as kubelet:
        await kubelet.pods(pod("other", {}), pod("pod-x", {RESOURCE: ["afa0"]}))
        await kubelet.allocate(RESOURCE, ["afa0"])
        run("mount -o remount,ro /sys/fs/bpf")
        try:
            with pytest.raises(KubeletError, match="Read-only file system") as error:
                await kubelet.allocate(RESOURCE, ["afa1"])
            assert error.value.code == "FAILED_PRECONDITION"
            await kubelet.pods(pod("other", {}))
            await until(lambda: not (short_path / "uds/pool/afa0").exists())
        finally:
            run("mount -o remount,rw /sys/fs/bpf")
        await kubelet.allocate(RESOURCE, ["afa0"])
        state = await kubelet.wait(RESOURCE, streams_open=1, healthy=2)
        assert state["registers_total"] == 1


@pytest.mark.parametrize("garbage", ["a pin as the device", "a directory as the link", "a pin as the pool"])
async def test_pool_starts_when_there_is_garbage_among_the_pins(kernel: Kernel, short_path: Path, garbage: str) -> None:
    """What is not ours among the pins of a pool is removed, and the device can be allocated."""
    place = {
        "a pin as the device": "pool/afa0",
        "a directory as the link": "pool/afa0/link",
        "a pin as the pool": "pool",
    }
    path = PINS / place[garbage]
    path.parent.mkdir(parents=True, exist_ok=True)
    if "directory" in garbage:
        path.mkdir()
    else:
        xskmap = lib.uds_xskmap_create(b"garbage", 1)
        assert lib.uds_obj_pin(xskmap, os.fsencode(path)) == 0
        os.close(xskmap)
    async with node(short_path, "afa0") as kubelet:
        await kubelet.allocate(RESOURCE, ["afa0"])
        assert sorted(pin.name for pin in (PINS / "pool/afa0").iterdir()) == ["link", "xsks_map"]


async def test_daemon_lives_when_it_has_no_descriptors_left(kernel: Kernel, short_path: Path) -> None:
    """A daemon at its limit goes on with what it has, and does the rest when descriptors are free again."""
    make_veth("afa0")
    config = write_config(short_path, pool=["afa0", "afa1"])
    async with running_kubelet(short_path / "kubelet") as kubelet:
        with daemon_process(config, short_path, prefix=["prlimit", "--nofile=48:48"]) as daemon:
            await kubelet.wait(RESOURCE, healthy=1)
            await kubelet.allocate(RESOURCE, ["afa0"])
            clients = [await in_thread(Client, uds(short_path, "afa0")) for _ in range(60)]
            await until(lambda: "Too many open files" in (short_path / "daemon.log").read_text())
            await in_thread(make_veth, "afa1")
            for client in clients:
                client.sock.close()
            await kubelet.wait(RESOURCE, healthy=2, timeout=30)
            assert daemon.poll() is None
            log = (short_path / "daemon.log").read_text()
    assert "Traceback" not in log
    assert len(log.splitlines()) < 100


async def test_pool_waits_when_kubelets_directory_is_read_only(kernel: Kernel, short_path: Path) -> None:
    """A plugin directory that cannot be written to costs the registration, and nothing that pods have."""
    async with node(short_path, "afa0") as kubelet:
        await kubelet.allocate(RESOURCE, ["afa0"])
        await kubelet.pods(pod("pod-x", {RESOURCE: ["afa0"]}))
        before = await in_thread(get_map_id, uds(short_path, "afa0"), "pod-x", "afa0")
        directory = kubelet.plugin_dir
        run(f"mount --bind {directory} {directory}")
        run(f"mount -o remount,bind,ro {directory}")
        try:
            await kubelet.drop(RESOURCE, "channel")
            await kubelet.wait(RESOURCE, streams_open=0)
            with Client(uds(short_path, "afa0")) as session:
                assert (await in_thread(session.ask, b"/connect,pod-x"))[0] == b"/host_ok"
        finally:
            run(f"umount {directory}")
        await kubelet.wait(RESOURCE, streams_open=1, healthy=1, timeout=30)
        assert await in_thread(get_map_id, uds(short_path, "afa0"), "pod-x", "afa0") == before


# -- Several daemons, several configurations ---------------------------------------------------------------------------


async def test_second_daemon_is_refused_when_it_has_the_same_pins(kernel: Kernel, short_path: Path) -> None:
    """Another socket directory does not make a second daemon on the same BPF file system harmless: it is refused."""
    async with node(short_path, "afa0") as kubelet:
        config = write_config(short_path, pool=["afa0"])
        command = ["afxdpd", "--config", str(config), "--uds-dir", str(short_path / "other")]
        result = await in_thread(partial(subprocess.run, command, capture_output=True, text=True, check=False))
        assert result.returncode == afxdpd.ExitCode.POOLS
        assert result.stderr == "afxdpd: /sys/fs/bpf/afxdpd: another afxdpd serves this directory; end it first\n"
        assert (await kubelet.wait(RESOURCE, streams_open=1, healthy=1))["registers_total"] == 1


async def test_pods_of_a_pool_are_served_when_it_is_not_configured_any_more(
    kernel: Kernel, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a renamed pool has left is served until its pods are gone; then the device is the new pool's."""
    for name in ("RELEASE_GRACE", "RELEASE_AFTER"):
        monkeypatch.setattr(afxdpd, name, 0.0)
    async with running_kubelet(short_path / "kubelet") as kubelet:
        make_veth("afa0")
        await kubelet.pods(pod("other", {}), pod("pod-x", {RESOURCE: ["afa0"]}))
        async with running_daemon(short_path, pool=["afa0"]):
            await kubelet.wait(RESOURCE, healthy=1)
            await kubelet.allocate(RESOURCE, ["afa0"])
            before = await in_thread(get_map_id, uds(short_path, "afa0"), "pod-x", "afa0")
        async with running_daemon(short_path, renamed=["afa0"]):
            await kubelet.wait("afxdp/renamed", devices={})
            await until(lambda: is_served(uds(short_path, "afa0")))
            assert await in_thread(get_map_id, uds(short_path, "afa0"), "pod-x", "afa0") == before
            await kubelet.pods(pod("other", {}))
            await kubelet.wait("afxdp/renamed", devices={"afa0": "Healthy"}, timeout=30)
            assert not (PINS / "pool").exists()


def is_served(path: Path) -> bool:
    """Whether somebody listens on a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        return sock.connect_ex(os.fspath(path)) == 0


async def test_pods_user_keeps_its_access_when_the_configuration_has_another(kernel: Kernel, short_path: Path) -> None:
    """After a restart the socket of a running pod is open to the user it was made for, and to no other."""
    make_veth("afa0")
    content = {"name": "pool", "mode": "primary", "devices": [{"name": "afa0"}]}
    await trio.Path(short_path).chmod(0o711)
    async with running_kubelet(short_path / "kubelet") as kubelet:
        await kubelet.pods(pod("pod-x", {RESOURCE: ["afa0"]}))
        for number, uid in enumerate((1500, 1600), 1):
            (short_path / "config.json").write_text(json.dumps({"pools": [{**content, "uid": uid}]}))
            with daemon_process(short_path / "config.json", short_path):
                await kubelet.wait(RESOURCE, registers=number, streams_open=1, healthy=1)
                if uid == 1500:
                    await kubelet.allocate(RESOURCE, ["afa0"])
                # As the mount into the pod does, past the directories above, which are root's alone.
                directory = os.open(short_path / "uds/pool/afa0", os.O_PATH | os.O_DIRECTORY)
                path = f"/proc/self/fd/{directory}/afxdp.sock"
                assert await in_thread(answer_to, 1500, path) == b"/host_ok"
                assert await in_thread(answer_to, 1501, path) == b"Permission denied"
                os.close(directory)


def answer_to(uid: int, path: str) -> bytes:
    """What a user without capabilities is answered to /connect, or why it cannot connect."""
    program = (
        "import os, socket, sys\n"
        "sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "try: sock.connect(sys.argv[1])\n"
        "except OSError as exc: print(exc.strerror, end='')\n"
        "else: sock.send(b'/connect,pod-x'); print(sock.recv(99).decode(), end='')\n"
    )
    command = ["setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups", "--inh-caps", "-all"]
    fd = int(path.split("/")[4])
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable  # one that everybody may run
    command += [python, "-c", program, path]
    return subprocess.run(command, check=True, capture_output=True, pass_fds=[fd]).stdout
