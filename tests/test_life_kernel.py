"""Nothing is lost: kubelet, the daemon, allocations and devices go wrong in every way, on the real kernel."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
from conftest import Kernel
from kubelet import KubeletError, pod, running_kubelet
from pyroute2 import IPRoute
from support import (
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
    paths,
    write_config,
    xdp_prog_id,
)
from test_cni_kernel import OTHERS, log, logs
from test_daemon_kernel import PINS, delete_entry, ip, kill, until
from test_reload_kernel import SOON_RELEASED, Traffic, give, node, pool, write

import afxdpd

pytestmark = [pytest.mark.kernel, pytest.mark.kubelet]

AT_ONCE = {"RELEASE_GRACE": 0.0, "RELEASE_AFTER": 0.0}
"""A device is released with the third answer of kubelet that does not list it."""


@asynccontextmanager
async def receiving(
    directory: Path, sandbox: Pod, pool: str, device: str, hostname: str, *, total: int = 4000
) -> AsyncIterator[None]:
    """While the block runs, a pod's application receives packets on AF_XDP; in the end it has got every one of them."""
    traffic = Traffic(f"{device}p", total, rate=5000)
    with await in_thread(PodApp, sandbox, directory / "uds" / pool, hostname, [device], total) as app:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(in_thread, traffic.send)
            yield
            traffic.hurry()
        result = await in_thread(app.result)
    assert (result["numbered"], result["lost"], result["duplicates"]) == (total, 0, 0)


async def assert_receives(directory: Path, sandbox: Pod, pool: str, device: str, hostname: str) -> None:
    """A pod's application gets all of a thousand packets."""
    async with receiving(directory, sandbox, pool, device, hostname, total=1000):
        pass


class HostNetwork(Pod):
    """A pod whose devices stay in the host's network namespace."""

    def __init__(self) -> None:
        """Has no namespace to make."""

    def __exit__(self, *_: object) -> None:
        """Has none to end."""

    def prefix(self) -> list[str]:
        """Commands run where they are."""
        return []


def is_there(command: int, number: int) -> bool:
    """Whether a BPF object exists; see bpf(2), BPF_PROG_GET_FD_BY_ID and BPF_MAP_GET_FD_BY_ID."""
    attributes = (ctypes.c_uint32 * 3)(number, 0, 0)
    fd = ctypes.CDLL(None).syscall(321 if os.uname().machine == "x86_64" else 280, command, attributes, 12)
    if fd >= 0:
        os.close(fd)
    return bool(fd >= 0)


PROGRAM, MAP = 13, 14


# -- kubelet -----------------------------------------------------------------------------------------------------------


async def test_pod_loses_nothing_when_kubelet_fails_in_every_way(kernel: Kernel, short_path: Path) -> None:
    """Whatever kubelet does, each incarnation of it is registered with once, and the pod is served all the time."""
    async with node(short_path, ["afa0", "afb0"], pool("a", "afa0"), pool("b", "afb0")) as here:
        kubelet = here.kubelet

        async def check(*, streams: int = 1) -> None:
            assert await in_thread(session.ask, b"/version") == (b"0.1", []), "the pod's session has not ended"
            for name in ("a", "b"):
                state = await kubelet.wait(f"afxdp/{name}", registers=1, streams_open=1, healthy=1)
                assert (state["registers"], state["streams_max"], state["trap"]) == (1, streams, 0)

        with Pod() as sandbox:
            before = await give(here, "a", "afa0", "pod-x", sandbox)
            with Client(here.uds("a", "afa0")) as session:
                assert await in_thread(session.ask, b"/connect,pod-x") == (b"/host_ok", [])
                async with receiving(short_path, sandbox, "a", "afa0", "pod-x", total=16_000):
                    for mode in ("slow", "refuse", "unimplemented"):
                        await kubelet.stop(wipe=mode == "refuse")
                        assert await in_thread(session.ask, b"/version") == (b"0.1", [])
                        await kubelet.register_mode(mode, delay=0.5)
                        await kubelet.start()
                        await kubelet.wait("afxdp/a", attempts=1 if mode == "slow" else 2)
                        await kubelet.register_mode()
                        await check()
                    for _ in range(2):
                        await kubelet.restart()
                    await check()
                    await kubelet.stop(wipe=True)
                    await in_thread(shutil.rmtree, kubelet.plugin_dir)
                    await kubelet.start()
                    await check()
                    await trio.sleep(afxdpd.ResourceServer.STREAM_GRACE + 0.5)  # that nothing more happens
                    await check()
                    assert await here.map_id("a", "afa0", "pod-x") == before
                    await kubelet.drop("afxdp/a", keep_channel=True)  # silently: the sockets stay
                    state = await kubelet.wait("afxdp/a", registers=2, streams_open=1, healthy=1)
                    assert (state["registers"], state["streams_max"], state["trap"]) == (2, 1, 0)
                    assert (await kubelet.state("afxdp/b"))["registers"] == 1
        assert log(short_path).count("afxdpd 0.1.0") == 1


@contextmanager
def no_inotify(uid: int) -> Iterator[None]:
    """While the block runs, a user has as many inotify instances as it may; see inotify(7)."""
    program = (
        "import ctypes, resource, sys\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))\n"
        "while ctypes.CDLL(None).inotify_init() >= 0: pass\n"
        "print(flush=True); sys.stdin.read()\n"
    )
    command = [*as_user(uid), sys.executable, "-P", "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        yield
        process.kill()


def as_user(uid: int) -> list[str]:
    """A prefix: a user that may do what the daemon does, and open root's files."""
    capabilities = "-all,+bpf,+net_admin,+dac_override"
    return [
        "setpriv",
        "--reuid",
        str(uid),
        "--clear-groups",
        "--inh-caps",
        capabilities,
        "--ambient-caps",
        capabilities,
    ]


async def test_kubelet_is_followed_when_inotify_is_exhausted(kernel: Kernel, short_path: Path) -> None:
    """Where the user's inotify instances are used up, the daemon says so once, polls, and finds the next kubelet."""
    make_veth("afa0")
    config = write_config(short_path, pool=["afa0"])
    uid = 54_321  # one that nobody else is: its limit is its own
    async with running_kubelet(short_path / "kubelet") as kubelet:
        with no_inotify(uid), daemon_process(config, short_path, prefix=as_user(uid)) as daemon:
            await kubelet.wait(RESOURCE, registers=1, streams_open=1, healthy=1)
            for total in (2, 3):
                await kubelet.stop(wipe=True)
                await kubelet.start()
                state = await kubelet.wait(RESOURCE, registers=1, streams_open=1, healthy=1)
                assert (state["registers_total"], state["trap"]) == (total, 0)
            assert daemon.poll() is None
    assert log(short_path).count("device-plugins: watched by polling, since inotify says: Too many open files") == 2


# -- The daemon --------------------------------------------------------------------------------------------------------


async def test_no_packet_is_lost_when_the_daemon_is_upgraded(kernel: Kernel, short_path: Path) -> None:
    """SIGTERM ends the daemon within a second, its pods keep all they have, and the next one goes on with it."""
    make_veth("afa0", "afb0", "afb1")
    config = write_config(short_path, a=["afa0"], b=["afb0", "afb1"])
    devices = {"afa0": "a", "afb0": "b"}
    sockets = {name: short_path / "uds" / pool / name / "afxdp.sock" for name, pool in devices.items()}
    endpoint = short_path / "kubelet/device-plugins/afxdp-a.sock"

    async def map_ids() -> list[int]:
        return [await in_thread(get_map_id, sockets[name], f"pod-{name}", name) for name in devices]

    async with running_kubelet(short_path / "kubelet") as kubelet, trio.open_nursery() as nursery:
        with ExitStack() as daemons, Pod() as first, Pod() as second:
            daemon = daemons.enter_context(daemon_process(config, short_path))
            await kubelet.wait("afxdp/a", healthy=1)
            await kubelet.wait("afxdp/b", healthy=2)
            await kubelet.pods(*(pod(f"pod-{name}", {f"afxdp/{pool}": [name]}) for name, pool in devices.items()))
            for sandbox, (name, pool_name) in zip((first, second), devices.items(), strict=True):
                await kubelet.allocate(f"afxdp/{pool_name}", [name])
                await in_thread(sandbox.take, name)
            before = await map_ids()
            async with (
                receiving(short_path, first, "a", "afa0", "pod-afa0", total=8000),
                receiving(short_path, second, "b", "afb0", "pod-afb0", total=8000),
            ):
                for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL, signal.SIGTERM):
                    registers = (await kubelet.state("afxdp/b"))["registers"]
                    with Client(sockets["afa0"]) as session:
                        assert await in_thread(session.ask, b"/connect,pod-afa0") == (b"/host_ok", [])
                        status, seconds = await in_thread(end, daemon, number)
                        assert status == (0 if number == signal.SIGTERM else -number)
                        assert seconds < 1
                        assert await in_thread(session.sock.recv, 1) == b""
                    await kubelet.wait("afxdp/b", streams_open=0)
                    assert endpoint.exists() == (number == signal.SIGKILL)
                    assert all(path.is_socket() for path in sockets.values())
                    assert sorted(path.name for path in PINS.glob("*/*/*")) == sorted(["link", "xsks_map"] * 2)
                    assert not xdp_prog_id("afb1"), "a free device's program goes with the daemon"
                    daemon = daemons.enter_context(daemon_process(config, short_path))
                    await kubelet.wait("afxdp/b", registers=registers + 1, streams_open=1, healthy=2)
                    await kubelet.wait("afxdp/a", streams_open=1, healthy=1)
                    assert await map_ids() == before
        nursery.cancel_scope.cancel()
    assert "Traceback" not in log(short_path)


def end(daemon: subprocess.Popen[bytes], number: signal.Signals) -> tuple[int, float]:
    """Sends a signal; returns the exit status, and how many seconds it took."""
    begun = time.monotonic()
    daemon.send_signal(number)
    return daemon.wait(20), time.monotonic() - begun


async def test_daemon_ends_within_a_second_when_a_program_hangs(kernel: Kernel, short_path: Path) -> None:
    """An ethtool that does not end, for an Allocate that waits for it, does not keep the daemon from ending."""
    make_veth("afa0")
    config = write(short_path, pool("a", "afa0", ethtoolCmds=["-K -device- gro on"]))
    program = short_path / "ethtool"
    program.write_text("#!/bin/sh\nexec sleep 5\n")
    program.chmod(0o755)
    prefix = ["env", f"PATH={short_path}:{os.environ['PATH']}"]
    async with running_kubelet(short_path / "kubelet") as kubelet, trio.open_nursery() as nursery:
        with daemon_process(config, short_path, prefix=prefix) as daemon:
            await kubelet.wait("afxdp/a", healthy=1)

            async def allocate() -> None:
                with pytest.raises(KubeletError):
                    await kubelet.allocate("afxdp/a", ["afa0"])

            nursery.start_soon(allocate)
            await logs(short_path, " DEBUG   ethtool -k afa0")
            status, seconds = await in_thread(end, daemon, signal.SIGTERM)
            assert (status, seconds < 1) == (0, True), seconds
        await kubelet.wait("afxdp/a", streams_open=0)
    assert not (PINS / "a").exists()


async def test_other_pools_do_not_notice_when_one_crashes(
    kernel: Kernel, short_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A pool that meets a bug begins again with what its pods have; no pod loses a packet, no other pool its stream."""

    class Buggy(afxdpd.Xdp):
        """It has a bug with one device, once."""

        trap = 0

        def attach(self, ifindex: int, queues: int) -> afxdpd.Attachment:
            if ifindex == self.trap:
                self.trap = 0
                raise LookupError("a bug")
            return super().attach(ifindex, queues)

    make_veth("afa0", "afb0")
    config = afxdpd.get_plugin_config(write_config(short_path, a=["afa0", "afa1"], b=["afb0"]))
    xdp = Buggy()
    sockets = [short_path / f"uds/{name}/af{name}0/afxdp.sock" for name in ("a", "b")]
    async with running_kubelet(short_path / "kubelet") as kubelet, trio.open_nursery() as nursery:
        await nursery.start(partial(afxdpd.serve, config, paths(short_path), xdp=xdp))
        await kubelet.pods(pod("pod-a", {"afxdp/a": ["afa0"]}), pod("pod-b", {"afxdp/b": ["afb0"]}))
        with Pod() as sandbox, ExitStack() as sessions:
            for name in ("a", "b"):
                await kubelet.wait(f"afxdp/{name}", healthy=1)
                await kubelet.allocate(f"afxdp/{name}", [f"af{name}0"])
                await in_thread(sandbox.take, f"af{name}0")
            before = await in_thread(get_map_id, sockets[0], "pod-a", "afa0")
            session = sessions.enter_context(Client(sockets[1]))
            assert await in_thread(session.ask, b"/connect,pod-b") == (b"/host_ok", [])
            async with (
                receiving(short_path, sandbox, "a", "afa0", "pod-a"),
                receiving(short_path, sandbox, "b", "afb0", "pod-b"),
            ):
                await in_thread(make_veth, "afa2")  # the trap is set before the device has its name
                xdp.trap = afxdpd.Network().devices()["afa2"].ifindex
                await in_thread(ip, "link set afa2 down")
                await in_thread(ip, "link set afa2 name afa1")
                await kubelet.wait("afxdp/a", registers=2, streams_open=1, healthy=2)
                assert await in_thread(get_map_id, sockets[0], "pod-a", "afa0") == before
                assert await in_thread(session.ask, b"/version") == (b"0.1", [])
        assert (await kubelet.state("afxdp/b"))["registers"] == 1
        nursery.cancel_scope.cancel()
    assert [record.message for record in caplog.records if record.exc_info] == [
        "afxdp/a failed, which is a bug; it begins again"
    ]


async def test_pods_are_served_again_when_the_node_was_rebooted(kernel: Kernel, short_path: Path) -> None:
    """What kubelet lists is attached and served where it is here, else when it is, and its container starts."""
    make_veth("afa0", "afa1", "afa2")
    listed = [pod(f"pod-{name}", {"afxdp/a": [name]}) for name in ("afa0", "afa1")]
    config = write_config(short_path, a=["afa0", "afa1", "afa2"])
    socket = short_path / "uds/a/afa0/afxdp.sock"
    async with running_kubelet(short_path / "kubelet") as kubelet:
        await kubelet.pods(OTHERS, *listed)
        with Pod() as sandbox, Pod() as early:
            await in_thread(early.take, "afa1")  # the CNI was faster than the daemon
            with daemon_process(config, short_path) as daemon:
                await until(socket.exists)  # nobody has called PreStartContainer
                await kubelet.wait("afxdp/a", healthy=3)  # also afa1: who has it may know more than we do
                await in_thread(sandbox.take, "afa0")
                await assert_receives(short_path, sandbox, "a", "afa0", "pod-afa0")
                with pytest.raises(KubeletError, match="afa1: it is not in the host's network namespace") as error:
                    await kubelet.prestart("afxdp/a", ["afa1"])
                assert error.value.code == "FAILED_PRECONDITION"
                await in_thread(early.give_back, "afa1")
                await kubelet.wait("afxdp/a", healthy=3)
                for name in ("afa1", "afa2"):  # of the second one kubelet has said nothing before its container starts
                    await kubelet.prestart("afxdp/a", [name])
                    await kubelet.pods(OTHERS, *listed, pod("pod-afa2", {"afxdp/a": ["afa2"]}))
                    await in_thread(sandbox.take, name)
                    await assert_receives(short_path, sandbox, "a", name, f"pod-{name}")
                assert (await kubelet.wait("afxdp/a", healthy=3))["registers_total"] == 1
                await in_thread(kill, daemon)
    assert "Traceback" not in log(short_path)


# -- Allocations -------------------------------------------------------------------------------------------------------


async def test_device_is_kept_when_kubelets_answers_are_no_answers(kernel: Kernel, short_path: Path) -> None:
    """Failed, rate-limited, empty and missing answers release nothing, however many; a proper one without it does."""
    async with node(
        short_path, ["afa0", "afa1"], pool("a", "afa0", "afa1"), constants={**AT_ONCE, "LIST_TIMEOUT": 0.5}
    ) as here:
        kubelet, sandbox = here.kubelet, HostNetwork()  # a device in another namespace is kept in any case
        await kubelet.allocate("afxdp/a", ["afa0"])
        await kubelet.pods(OTHERS, pod("pod-x", {"afxdp/a": ["afa0"]}))
        before = await here.map_id("a", "afa0", "pod-x")
        async with receiving(short_path, sandbox, "a", "afa0", "pod-x", total=8000):
            for mode in ("unavailable", "exhausted", "empty", "hang"):
                await kubelet.podresources(mode)
                await kubelet.pods(OTHERS)  # so that it would be released if this were heard
                lists = (await kubelet.state())["lists"]
                await kubelet.allocate("afxdp/a", ["afa1"])  # from then on kubelet is asked often
                await kubelet.wait("afxdp/a", lists=lists + (1 if mode == "hang" else 3))
                assert here.uds("a", "afa0").exists()
                assert (PINS / "a/afa0/link").exists()
                await kubelet.pods(OTHERS, pod("pod-x", {"afxdp/a": ["afa0"]}))
                await kubelet.podresources()
        assert await here.map_id("a", "afa0", "pod-x") == before
        await kubelet.pods(OTHERS)
        await kubelet.allocate("afxdp/a", ["afa1"])
        await until(lambda: not (PINS / "a/afa0").exists())


@pytest.mark.parametrize("state", ["up", "down"])
async def test_device_is_clean_when_it_comes_back(kernel: Kernel, short_path: Path, state: str) -> None:
    """The last pod's program and map cease to exist; the link, up or down, is left as found; the next pod has all."""
    async with node(short_path, ["afa0"], pool("a", "afa0"), constants=SOON_RELEASED) as here:
        with Pod() as sandbox:
            used = await give(here, "a", "afa0", "pod-x", sandbox)
            shown = json.loads(sandbox.run("ip", "-json", "-detail", "link", "show", "afa0"))[0]
            program = shown["xdp"]["prog"]["id"]
            assert is_there(PROGRAM, program)
            assert is_there(MAP, used)
            sandbox.run("ip", "link", "set", "afa0", "mtu", "1300", "promisc", "on", "alias", "was-pod-x")
            sandbox.run("ip", "address", "add", "192.0.2.1/24", "dev", "afa0")
            sandbox.run("tc", "qdisc", "add", "dev", "afa0", "clsact")
            sandbox.run("ip", "link", "set", "afa0", "netns", str(os.getpid()))
        await in_thread(ip, f"link set afa0 {state}")
        before = as_found("afa0")
        await here.kubelet.pods(OTHERS)
        await until(lambda: xdp_prog_id("afa0") not in (0, program) and not here.uds("a", "afa0").exists())
        await until(lambda: not is_there(PROGRAM, program) and not is_there(MAP, used))
        assert as_found("afa0") == before
        with Pod() as sandbox:
            assert await give(here, "a", "afa0", "pod-y", sandbox) != used
            await assert_receives(short_path, sandbox, "a", "afa0", "pod-y")


def as_found(name: str) -> tuple[bool, int, int, str, int]:
    """What of a device is not the daemon's business."""
    output = subprocess.run(["ip", "-json", "-detail", "address", "show", name], check=True, capture_output=True).stdout
    shown = json.loads(output)[0]
    return (
        "UP" in shown["flags"],
        shown["mtu"],
        shown["promiscuity"],
        shown.get("ifalias", ""),
        len([address for address in shown["addr_info"] if address["scope"] == "global"]),
    )


async def test_device_of_an_init_container_is_released_when_the_pod_is_gone(kernel: Kernel, short_path: Path) -> None:
    """kubelet never lists it: in the pod's namespace it stays until the pod ends, in the host for the grace."""
    async with node(short_path, ["afa0", "afa1", "afa2"], pool("a", "afa0", "afa1", "afa2"), constants=AT_ONCE) as here:
        kubelet = here.kubelet
        with Pod() as sandbox:
            for name in ("afa0", "afa1"):
                await kubelet.allocate("afxdp/a", [name])
            await in_thread(sandbox.take, "afa0")
            await kubelet.pods(OTHERS, pod("pod-x", {}))  # the app container runs, without a device
            await until(lambda: not (PINS / "a/afa1").exists())
            lists = (await kubelet.state())["lists"]
            await kubelet.allocate("afxdp/a", ["afa2"])
            await kubelet.wait("afxdp/a", lists=lists + 3, healthy=3)
            assert (PINS / "a/afa0/link").exists()
            await in_thread(sandbox.give_back, "afa0")
        await until(lambda: not (PINS / "a/afa0").exists() and not here.uds("a", "afa0").parent.exists())
        await kubelet.wait("afxdp/a", healthy=3)
        assert xdp_prog_id("afa0")


async def test_pods_have_their_own_devices_when_they_share_a_name(kernel: Kernel, short_path: Path) -> None:
    """Of two pods with one name in two namespaces each has its device; a pod that is listed twice is one pod."""
    async with node(short_path, ["afa0", "afa1"], pool("a", "afa0", "afa1"), constants=AT_ONCE) as here:
        kubelet = here.kubelet
        red = pod("web-0", {"afxdp/a": ["afa0"]}, namespace="red")
        blue = pod("web-0", {"afxdp/a": ["afa1"]}, namespace="blue")
        for name in ("afa0", "afa1"):
            await kubelet.allocate("afxdp/a", [name])
        await kubelet.pods(red, blue, red)
        first, second = [await here.map_id("a", name, "web-0") for name in ("afa0", "afa1")]
        assert first != second
        for own, other in (("afa0", "afa1"), ("afa1", "afa0")):
            with Client(here.uds("a", own)) as session:
                assert await in_thread(session.ask, b"/connect,web-0") == (b"/host_ok", [])
                assert await in_thread(session.ask, f"/xsk_map_fd,{other}".encode()) == (b"/fd_nak", [])
        with Pod() as sandbox:
            await in_thread(sandbox.take, "afa1")
            async with receiving(short_path, sandbox, "a", "afa1", "web-0", total=3000):
                await kubelet.pods(blue, blue)
                await until(lambda: not (PINS / "a/afa0").exists())
            assert await here.map_id("a", "afa1", "web-0") == second
            held = [line.partition(" INFO ")[2].strip() for line in log(short_path).splitlines() if " held by " in line]
            assert held == ["afxdp/a: afa0: held by red/web-0/app", "afxdp/a: afa1: held by blue/web-0/app"]


# -- Devices -----------------------------------------------------------------------------------------------------------


async def test_device_is_offered_or_served_again_when_it_is_plugged_in_again(kernel: Kernel, short_path: Path) -> None:
    """A free device that vanishes is listed no more, an allocated one stays; both are as before when they are back."""
    async with node(short_path, ["afa0", "afa1"], pool("a", "afa0", "afa1")) as here:
        kubelet = here.kubelet
        await kubelet.allocate("afxdp/a", ["afa0"])
        await kubelet.pods(OTHERS, pod("pod-x", {"afxdp/a": ["afa0"]}))
        for _ in range(3):
            for name in ("afa0", "afa1"):
                await in_thread(delete_link, name)
            await kubelet.wait("afxdp/a", devices={"afa0": "Healthy"})
            await in_thread(make_veth, "afa0", "afa1")
            await kubelet.wait("afxdp/a", devices={"afa0": "Healthy", "afa1": "Healthy"})
            await until(lambda: xdp_prog_id("afa0") and xdp_prog_id("afa1"))
        await kubelet.prestart("afxdp/a", ["afa0"])
        await kubelet.allocate("afxdp/a", ["afa1"])
        await kubelet.pods(OTHERS, *(pod("pod-x", {"afxdp/a": [name]}) for name in ("afa0", "afa1")))
        with Pod() as sandbox:
            for name in ("afa0", "afa1"):
                await in_thread(sandbox.take, name)
                await assert_receives(short_path, sandbox, "a", name, "pod-x")


def rename(old: str, new: str, sandbox: Pod | None = None) -> None:
    """Gives a device another name, as udev, an operator or a CNI does."""
    for command in (f"set {old} down", f"set {old} name {new}", f"set {new} up"):
        subprocess.run([*(sandbox.prefix() if sandbox else []), "ip", "link", *command.split()], check=True)


async def test_device_is_followed_when_it_is_renamed(kernel: Kernel, short_path: Path) -> None:
    """A name is what a pool knows: free, it goes and comes with the name; allocated, program and pod stay together."""
    async with node(short_path, ["afa0", "afa1"], pool("a", "afa0", "afa1")) as here:
        kubelet = here.kubelet
        await in_thread(rename, "afa1", "other1")
        await kubelet.wait("afxdp/a", devices={"afa0": "Healthy"})
        await until(lambda: not xdp_prog_id("other1"))
        await in_thread(rename, "other1", "afa1")
        await kubelet.wait("afxdp/a", devices={"afa0": "Healthy", "afa1": "Healthy"})
        assert xdp_prog_id("afa1")
        await kubelet.allocate("afxdp/a", ["afa0"])
        await kubelet.pods(OTHERS, pod("pod-x", {"afxdp/a": ["afa0"]}))
        before, program = await here.map_id("a", "afa0", "pod-x"), xdp_prog_id("afa0")
        await in_thread(rename, "afa0", "other0")
        await logs(short_path, "afa0: has left the host's namespace")
        assert xdp_prog_id("other0") == program
        await in_thread(rename, "other0", "afa0")
        await logs(short_path, "afa0: back in the host namespace")
        await kubelet.wait("afxdp/a", healthy=2)
        with Pod() as sandbox:
            await in_thread(sandbox.take, "afa0")
            await in_thread(rename, "afa0", "net1", sandbox)
            await in_thread(rename, "net1", "afa0", sandbox)
            assert await here.map_id("a", "afa0", "pod-x") == before
            await assert_receives(short_path, sandbox, "a", "afa0", "pod-x")


@pytest.mark.parametrize("rule", ["by name", "by address"])
async def test_device_is_released_when_it_comes_back_with_another_name(
    kernel: Kernel, short_path: Path, rule: str
) -> None:
    """A device that its pod has renamed is cleaned when the pod is gone, and is the pool's by whatever name it has."""
    make_veth("afa0")
    address = afxdpd.Network().devices()["afa0"].mac
    here_by = {"name": "afa0"} if rule == "by name" else {"mac": address}
    pools = {"name": "a", "mode": "primary", "devices": [here_by]}
    async with node(short_path, [], pools, constants=SOON_RELEASED) as here:
        with Pod() as sandbox:
            await give(here, "a", "afa0", "pod-x", sandbox)
            await in_thread(rename, "afa0", "net1", sandbox)
            await in_thread(sandbox.give_back, "net1")
        program = xdp_prog_id("net1")
        await here.kubelet.pods(OTHERS)
        await logs(short_path, "afa0: released: kubelet lists no pod that holds it")
        await until(lambda: xdp_prog_id("net1") != program)
        await here.kubelet.wait("afxdp/a", devices={} if rule == "by name" else {"net1": "Healthy"})
        assert not PINS.joinpath("a").exists()
        if rule == "by name":
            assert not xdp_prog_id("net1")
            await in_thread(rename, "net1", "afa0")
            await here.kubelet.wait("afxdp/a", devices={"afa0": "Healthy"})


async def test_kubelet_hears_nothing_when_links_flap(kernel: Kernel, short_path: Path) -> None:
    """A hundred flaps in two seconds, of free and of allocated devices, are no message, no line and no lost packet."""
    devices = ["afa0", "afa1", "afa2"]
    async with node(short_path, devices, pool("a", *devices)) as here:
        kubelet = here.kubelet
        with Pod() as sandbox:
            before = await give(here, "a", "afa0", "pod-x", sandbox)
            await kubelet.allocate("afxdp/a", ["afa1"])
            await kubelet.pods(OTHERS, pod("pod-x", {"afxdp/a": ["afa0"]}), pod("pod-y", {"afxdp/a": ["afa1"]}))
            await logs(short_path, "afa1: held by default/pod-y/app")
            messages = (await kubelet.state("afxdp/a"))["messages"]
            programs = [xdp_prog_id(name) for name in devices[1:]]
            lines = len(log(short_path).splitlines())
            async with receiving(short_path, sandbox, "a", "afa0", "pod-x"), trio.open_nursery() as nursery:
                for name in ("afa1", "afa2p"):  # a device itself, and the other end of one: its carrier
                    nursery.start_soon(in_thread, flap, name, 100, 50)
            state = await kubelet.wait("afxdp/a", streams_open=1, healthy=3)
            assert state["messages"] - messages <= 1
            assert [xdp_prog_id(name) for name in devices[1:]] == programs
            shown = [line for line in log(short_path).splitlines()[lines:] if " DEBUG " not in line]
            assert len(shown) <= 1, shown
            assert await here.map_id("a", "afa0", "pod-x") == before


def flap(name: str, times: int, rate: float) -> None:
    """Sets a link down and up so often, so many times a second."""
    with IPRoute() as ipr:
        index = ipr.link_lookup(ifname=name)[0]
        start = time.monotonic()
        for number in range(times):
            for state in ("down", "up"):
                ipr.link("set", index=index, state=state)
            time.sleep(max(0.0, start + (number + 1) / rate - time.monotonic()))  # the rate


async def test_nothing_changes_when_the_mtu_does(kernel: Kernel, short_path: Path) -> None:
    """A large MTU is no obstacle, and one that changes while packets arrive costs none and is no message to kubelet."""
    make_veth("afa0", "afa1")
    for end in ("afa1p", "afa1"):
        await in_thread(ip, f"link set {end} mtu 9000")
    async with node(short_path, [], pool("a", "afa0", "afa1")) as here:
        with Pod() as sandbox:
            before = await give(here, "a", "afa0", "pod-x", sandbox)
            program = xdp_prog_id("afa1")
            messages = (await here.kubelet.wait("afxdp/a", healthy=2))["messages"]
            async with receiving(short_path, sandbox, "a", "afa0", "pod-x"):
                for mtu in ("1400", "9000", "1500"):
                    await in_thread(sandbox.run, "ip", "link", "set", "afa0", "mtu", mtu)
                    await in_thread(ip, f"link set afa1 mtu {mtu}")
            assert (await here.kubelet.wait("afxdp/a", healthy=2))["messages"] == messages
            assert await here.map_id("a", "afa0", "pod-x") == before
            assert xdp_prog_id("afa1") == program


async def test_device_works_when_its_ifindex_is_taken_where_it_goes(kernel: Kernel, short_path: Path) -> None:
    """A device that has another ifindex in its pod, and yet another when it is back, is the same device."""
    async with node(short_path, ["afa0"], pool("a", "afa0"), constants=SOON_RELEASED) as here:
        index = afxdpd.Network().devices()["afa0"].ifindex
        with Pod() as sandbox:
            sandbox.run("ip", "link", "add", "taken", "index", str(index), "type", "bridge")
            used = await give(here, "a", "afa0", "pod-x", sandbox)
            shown = json.loads(sandbox.run("ip", "-json", "link", "show", "afa0"))[0]
            assert shown["ifindex"] != index
            await assert_receives(short_path, sandbox, "a", "afa0", "pod-x")
            await in_thread(ip, f"link add taken index {shown['ifindex']} type bridge")
            await in_thread(sandbox.give_back, "afa0")
        await here.kubelet.pods(OTHERS)
        await until(lambda: not (PINS / "a").exists())
        await here.kubelet.wait("afxdp/a", devices={"afa0": "Healthy"})
        with Pod() as sandbox:
            assert await give(here, "a", "afa0", "pod-y", sandbox) != used
            await assert_receives(short_path, sandbox, "a", "afa0", "pod-y")


async def test_devices_are_known_when_netlink_was_overrun(kernel: Kernel, short_path: Path) -> None:
    """After more events than the kernel keeps for a daemon that is stopped, it asks for all devices and is right."""
    devices = ["afa0", "afa1", "afa2"]
    async with node(short_path, devices, pool("a", *devices)) as here:
        await in_thread(delete_link, "afa2")
        await here.kubelet.wait("afxdp/a", devices={"afa0": "Healthy", "afa1": "Healthy"})
        here.daemon.send_signal(signal.SIGSTOP)
        try:
            await in_thread(make_noise, "afa0", 2000)
            await in_thread(delete_link, "afa1")
            await in_thread(make_veth, "afa2")
        finally:
            here.daemon.send_signal(signal.SIGCONT)
        await here.kubelet.wait("afxdp/a", devices={"afa0": "Healthy", "afa2": "Healthy"})
        await logs(short_path, "netlink: events were lost, asking for all devices again")
        await in_thread(make_veth, "afa1")
        state = await here.kubelet.wait("afxdp/a", healthy=3)
        assert (state["registers"], state["messages"] < 20) == (1, True)


def make_noise(name: str, events: int) -> None:
    """Changes a device so often."""
    with IPRoute() as ipr:
        index = ipr.link_lookup(ifname=name)[0]
        for number in range(events):
            ipr.link("set", index=index, ifalias=str(number))


# -- PreStartContainer -------------------------------------------------------------------------------------------------


async def test_container_has_all_it_needs_when_it_starts_again(kernel: Kernel, short_path: Path) -> None:
    """What is missing is made, and a map that the last container still has is of no effect: no packet is lost."""
    async with node(short_path, ["afa0"], pool("a", "afa0")) as here:
        with Pod() as sandbox:
            first = await give(here, "a", "afa0", "pod-x", sandbox)
            await here.kubelet.prestart("afxdp/a", ["afa0"])
            assert await here.map_id("a", "afa0", "pod-x") == first
            with Client(here.uds("a", "afa0")) as client:
                old = await in_thread(client.handshake, "pod-x", "afa0")
            await assert_receives(short_path, sandbox, "a", "afa0", "pod-x")
            for lost in ("nothing", "the pins", "the socket", "everything"):
                if lost in ("the pins", "everything"):
                    await in_thread(shutil.rmtree, PINS / "a")
                if lost in ("the socket", "everything"):
                    await in_thread(shutil.rmtree, here.uds("a", "afa0").parent)
                await here.kubelet.prestart("afxdp/a", ["afa0"])
                assert await here.map_id("a", "afa0", "pod-x") != map_id(old)
                async with receiving(short_path, sandbox, "a", "afa0", "pod-x", total=1000):
                    for _ in range(100):
                        delete_entry(old)
                assert sorted(path.name for path in (PINS / "a/afa0").iterdir()) == ["link", "xsks_map"]
                assert here.uds("a", "afa0").is_socket()
            os.close(old)
            sandbox.run("ip", "link", "delete", "afa0")
            with pytest.raises(KubeletError, match=r"afa0: .*; delete the pod to have it made again") as error:
                await here.kubelet.prestart("afxdp/a", ["afa0"])
            assert error.value.code == "FAILED_PRECONDITION"
