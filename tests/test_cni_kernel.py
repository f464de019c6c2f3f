"""The CNI that users have, on the real kernel: a stand-in for what it does when it takes a device from a pod."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import trio
from conftest import Kernel
from kubelet import Kubelet, KubeletError, pod, running_kubelet
from support import (
    PROGRAM,
    RESOURCE,
    Pod,
    PodApp,
    daemon_process,
    get_map_id,
    in_thread,
    make_veth,
    send_packets,
    write_config,
    xdp_prog_id,
)
from test_daemon_kernel import PINS, attach_by_netlink, detach_by_netlink, uds, until

import afxdpd

pytestmark = [pytest.mark.kernel, pytest.mark.kubelet]

OTHERS = pod("other", {})
"""A pod without devices: kubelet's answer is never empty."""
DONE = ("OK", b"")
"""The status and the reply of a call that is answered with ret 0, which protobuf leaves out."""


def with_constants(**values: float) -> list[str]:
    """A prefix for daemon_process: the program with other values of constants, for those who need not wait so long."""
    code = f"import sys, afxdpd; vars(afxdpd).update({values!r}); sys.exit(afxdpd.main(sys.argv[{1 + len(PROGRAM)}:]))"
    return [sys.executable, "-P", "-c", code]


class Cni:
    """The CNI's connection to the daemon, by grpcio in a process of its own; it blocks, so it is for threads."""

    def __init__(self, directory: Path) -> None:
        command = [sys.executable, str(Path(__file__).with_name("grpc_peer.py")), str(syncer(directory))]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def __enter__(self) -> Cni:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def call(self, request: bytes, times: int = 1) -> list[tuple[str, bytes]]:
        """Makes so many calls at once; returns the status and the reply of each."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        command = {"method": "/dpcnisyncer.NetDev/DelNetDev", "request": request.hex(), "timeout": 20, "times": times}
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        replies = json.loads(self._process.stdout.readline())
        return [(reply["status"], bytes.fromhex("".join(reply["messages"]))) for reply in replies]

    def del_net_dev(self, name: str) -> tuple[str, bytes]:
        """Calls DelNetDev once."""
        content = name.encode()
        (answer,) = self.call(b"\x0a" + bytes([len(content)]) + content if content else b"")
        return answer


def syncer(directory: Path) -> Path:
    """Where the CNI calls."""
    return directory / "kubelet" / "device-plugins" / "afxdp-syncer.sock"


async def logs(directory: Path, text: str, times: int = 1) -> None:
    """Waits until the daemon has logged something, so often."""
    await until(lambda: log(directory).count(text) >= times)


def log(directory: Path) -> str:
    """What the daemon has logged."""
    return (directory / "daemon.log").read_text()


def made(path: Path) -> int | None:
    """When a socket was made, in nanoseconds; None where there is none. Numbers of inodes are used again."""
    try:
        return path.stat().st_ctime_ns
    except FileNotFoundError:
        return None


def delete(cni: Cni, sandbox: Pod, name: str, *, calls: int = 1) -> None:
    """What the CNI does when a pod ends: the device comes back, the daemon lets go of it, XDP is detached at once."""
    sandbox.give_back(name)
    for _ in range(calls):
        assert cni.del_net_dev(name) == DONE
    detach_by_netlink(name)
    assert not xdp_prog_id(name)


@asynccontextmanager
async def node(
    directory: Path, config: Path, *devices: str, hold_off: float = 0.3, **constants: float
) -> AsyncIterator[tuple[Kubelet, Cni, subprocess.Popen[bytes]]]:
    """A node with devices, kubelet, the daemon as a process of its own, and a CNI; all devices are Healthy."""
    make_veth(*devices)
    prefix = with_constants(HOLD_OFF=hold_off, **constants)
    async with running_kubelet(directory / "kubelet") as kubelet:
        await kubelet.pods(OTHERS)
        with daemon_process(config, directory, prefix=prefix) as daemon, Cni(directory) as cni:
            await kubelet.wait(RESOURCE, streams_open=1, healthy=len(devices))
            await until(syncer(directory).exists)
            yield kubelet, cni, daemon


async def test_cni_detaches_at_once_when_a_device_comes_back_ten_times(kernel: Kernel, short_path: Path) -> None:
    """Ten pods have the device one after another, each with a fresh map; each time the CNI's DEL ends well at once."""
    config = write_config(short_path, pool=["afa0"])
    maps = set()
    async with node(short_path, config, "afa0", hold_off=0.1) as (kubelet, cni, _):
        for number in range(10):
            name = f"pod-{number}"
            await kubelet.allocate(RESOURCE, ["afa0"])
            await kubelet.pods(OTHERS, pod(name, {RESOURCE: ["afa0"]}))
            with Pod() as sandbox:
                sandbox.take("afa0")
                maps.add(await in_thread(get_map_id, uds(short_path, "afa0"), name, "afa0"))
                await kubelet.pods(OTHERS)
                await in_thread(partial(delete, cni, sandbox, "afa0", calls=1 + number % 2))
            assert not (PINS / "pool").exists()
            assert not uds(short_path, "afa0").parent.exists()
            await until(lambda: xdp_prog_id("afa0"))
            await kubelet.wait(RESOURCE, devices={"afa0": "Healthy"})
        assert len(maps) == 10
        assert (await kubelet.state(RESOURCE))["registers"] == 1


async def test_device_is_left_alone_when_the_cni_has_asked_for_it(kernel: Kernel, short_path: Path) -> None:
    """For five seconds nothing is attached to a device that was let go; an Allocate waits for that, and has it then."""
    config = write_config(short_path, pool=["afa0", "afa1"])
    async with node(short_path, config, "afa0", "afa1", hold_off=afxdpd.HOLD_OFF) as (kubelet, cni, _):
        for name in ("afa0", "afa1"):
            assert xdp_prog_id(name)
            assert await in_thread(cni.del_net_dev, name) == DONE
            assert not xdp_prog_id(name)
            await in_thread(detach_by_netlink, name)
        begun = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kubelet.allocate, RESOURCE, ["afa1"])
            await until(lambda: xdp_prog_id("afa0"))
            assert trio.current_time() - begun > 4
        assert trio.current_time() - begun > 4
        await kubelet.pods(OTHERS, pod("pod-x", {RESOURCE: ["afa1"]}))
        assert await in_thread(get_map_id, uds(short_path, "afa1"), "pod-x", "afa1")
        assert xdp_prog_id("afa1")


async def test_device_is_offered_at_once_when_it_was_let_go(kernel: Kernel, short_path: Path) -> None:
    """A device that was let go stays Healthy, so that kubelet can give it away before it is prepared again."""
    config = write_config(short_path, pool=["afa0"])
    async with node(short_path, config, "afa0") as (kubelet, cni, _):
        messages = (await kubelet.state(RESOURCE))["messages"]
        assert await in_thread(cni.del_net_dev, "afa0") == DONE
        await kubelet.allocate(RESOURCE, ["afa0"], force=False)
        assert (await kubelet.state(RESOURCE))["messages"] == messages


@pytest.mark.parametrize("kubelet_lists", ["the next pod", "no pod yet", "nothing, it refuses"])
async def test_next_pod_keeps_the_device_when_the_cni_comes_late(
    kernel: Kernel, short_path: Path, kubelet_lists: str
) -> None:
    """A device that the next pod was given before the CNI took it from the last one gets a program for the next one."""
    config = write_config(short_path, pool=["afa0"])
    async with node(short_path, config, "afa0") as (kubelet, cni, _):
        await kubelet.allocate(RESOURCE, ["afa0"])
        await kubelet.pods(OTHERS, pod("pod-x", {RESOURCE: ["afa0"]}))
        with Pod() as old, Pod() as new:
            old.take("afa0")
            first = await in_thread(get_map_id, uds(short_path, "afa0"), "pod-x", "afa0")
            await kubelet.pods(OTHERS)
            await kubelet.allocate(RESOURCE, ["afa0"])
            next_pods = (OTHERS, pod("pod-y", {RESOURCE: ["afa0"]}))
            if kubelet_lists == "the next pod":
                await kubelet.pods(*next_pods)
            elif kubelet_lists == "nothing, it refuses":
                await kubelet.podresources("exhausted")
            await in_thread(delete, cni, old, "afa0")
            await kubelet.pods(*next_pods)
            await kubelet.podresources()
            assert uds(short_path, "afa0").exists()
            await until(lambda: xdp_prog_id("afa0"))
            await until((PINS / "pool/afa0/link").exists)
            await kubelet.wait(RESOURCE, devices={"afa0": "Healthy"})
            assert await in_thread(get_map_id, uds(short_path, "afa0"), "pod-y", "afa0") != first
            new.take("afa0")
            with await in_thread(PodApp, new, short_path / "uds/pool", "pod-y", ["afa0"], 500) as app:
                await in_thread(send_packets, "afa0p", 500)
                result = await in_thread(app.result)
            assert (result["numbered"], result["lost"]) == (500, 0)
            await kubelet.pods(OTHERS)
            await in_thread(delete, cni, new, "afa0")
        assert not (PINS / "pool").exists()


async def test_next_pod_keeps_the_device_when_it_gets_it_during_the_call(kernel: Kernel, short_path: Path) -> None:
    """An Allocate that comes while the CNI's call waits for kubelet's answer is not undone by that answer."""
    config = write_config(short_path, pool=["afa0"])
    async with node(short_path, config, "afa0", RELEASE_GRACE=0.8) as (kubelet, cni, _):
        await in_thread(cni.del_net_dev, "nosuch")  # it is connected by now
        await kubelet.allocate(RESOURCE, ["afa0"])
        await kubelet.pods(OTHERS, pod("pod-x", {RESOURCE: ["afa0"]}))
        with Pod() as sandbox:
            sandbox.take("afa0")
            await logs(short_path, "held by default/pod-x/app")
            await trio.sleep(0.7)  # the fact to be shown: the allocation is not one that kubelet may not know yet
            await kubelet.pods(OTHERS)
            await kubelet.podresources("slow", delay=0.2)
            await in_thread(sandbox.give_back, "afa0")
            lists = (await kubelet.state())["lists"]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(in_thread, cni.del_net_dev, "afa0")
                await kubelet.wait(RESOURCE, lists=lists + 1)
                await kubelet.allocate(RESOURCE, ["afa0"])
            await in_thread(detach_by_netlink, "afa0")
        await kubelet.pods(OTHERS, pod("pod-y", {RESOURCE: ["afa0"]}))
        await until(lambda: xdp_prog_id("afa0"))
        assert await in_thread(get_map_id, uds(short_path, "afa0"), "pod-y", "afa0")


async def test_next_pod_is_refused_when_it_has_the_device_before_it_is_prepared(
    kernel: Kernel, short_path: Path
) -> None:
    """A device that moves to the next pod too early gets no program there, and that pod's container does not start."""
    config = write_config(short_path, pool=["afa0"])
    async with node(short_path, config, "afa0") as (kubelet, cni, _):
        await kubelet.allocate(RESOURCE, ["afa0"])
        await kubelet.pods(OTHERS, pod("pod-x", {RESOURCE: ["afa0"]}))
        with Pod() as old, Pod() as new:
            old.take("afa0")
            await logs(short_path, "held by default/pod-x/app")
            await kubelet.allocate(RESOURCE, ["afa0"])
            await kubelet.pods(OTHERS, pod("pod-y", {RESOURCE: ["afa0"]}))
            await in_thread(delete, cni, old, "afa0")
            new.take("afa0")
            with pytest.raises(KubeletError, match="delete the pod to have it made again") as error:
                await kubelet.prestart(RESOURCE, ["afa0"])
            assert error.value.code == "FAILED_PRECONDITION"
            await kubelet.pods(OTHERS)
            await in_thread(delete, cni, new, "afa0")
        await until(lambda: xdp_prog_id("afa0"))
        await kubelet.wait(RESOURCE, devices={"afa0": "Healthy"})


async def test_device_is_let_go_when_the_daemon_was_restarted_meanwhile(kernel: Kernel, short_path: Path) -> None:
    """A daemon that knows an allocation from its pins alone lets go of the device as the one before would have."""
    config = write_config(short_path, pool=["afa0"])
    async with node(short_path, config, "afa0") as (kubelet, _, daemon):
        await kubelet.allocate(RESOURCE, ["afa0"])
        await kubelet.pods(OTHERS, pod("pod-x", {RESOURCE: ["afa0"]}))
        with Pod() as sandbox:
            sandbox.take("afa0")
            first = await in_thread(get_map_id, uds(short_path, "afa0"), "pod-x", "afa0")
            daemon.kill()
            await in_thread(daemon.wait)
            await kubelet.pods(OTHERS)
            with daemon_process(config, short_path, prefix=with_constants(HOLD_OFF=0.3)), Cni(short_path) as cni:
                await kubelet.wait(RESOURCE, registers=2, streams_open=1, healthy=1)
                await in_thread(delete, cni, sandbox, "afa0")
                assert not (PINS / "pool").exists()
                await kubelet.allocate(RESOURCE, ["afa0"])
                await kubelet.pods(OTHERS, pod("pod-y", {RESOURCE: ["afa0"]}))
                assert await in_thread(get_map_id, uds(short_path, "afa0"), "pod-y", "afa0") != first


async def test_nothing_is_left_on_the_device_when_two_calls_come_at_once(kernel: Kernel, short_path: Path) -> None:
    """Each call is answered when the device is bare, also one that comes while another is on its way."""
    names = [f"afa{number}" for number in range(6)]
    config = write_config(short_path, pool=names)
    network = afxdpd.Network()
    left: list[int] = []

    def call(cni: Cni, name: str) -> None:
        ifindex = socket.if_nametoindex(name)
        assert cni.del_net_dev(name) == DONE
        left.append(network.device(ifindex).xdp_prog_id)

    async with node(short_path, config, *names) as (_, cni, _):
        with Cni(short_path) as other:
            await in_thread(other.del_net_dev, "unknown0")  # connected by now, like the first one
            await in_thread(cni.del_net_dev, "unknown0")
            for name in names:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(in_thread, call, cni, name)
                    nursery.start_soon(in_thread, call, other, name)
    assert left == [0] * (2 * len(names))


async def test_allocate_succeeds_when_the_cni_asks_again_meanwhile(kernel: Kernel, short_path: Path) -> None:
    """A second DelNetDev is answered at once while an Allocate waits for the first one's time, which begins again."""
    config = write_config(short_path, pool=["afa0"])
    async with node(short_path, config, "afa0", hold_off=1.0) as (kubelet, cni, _):
        assert await in_thread(cni.del_net_dev, "afa0") == DONE
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kubelet.allocate, RESOURCE, ["afa0"])
            await logs(short_path, "Allocate [['afa0']]")
            assert await in_thread(cni.del_net_dev, "afa0") == DONE
            assert "allocated: afa0" not in log(short_path)
            await in_thread(detach_by_netlink, "afa0")
        await until((PINS / "pool/afa0/link").exists)
        assert xdp_prog_id("afa0")


async def test_device_is_left_alone_when_the_cni_asks_before_it_is_back(kernel: Kernel, short_path: Path) -> None:
    """The time in which nothing is attached holds for a device, too, that is still in its pod at that moment."""
    config = write_config(short_path, pool=["afa0"])
    async with node(short_path, config, "afa0", hold_off=0.6) as (kubelet, cni, _):
        await kubelet.allocate(RESOURCE, ["afa0"])
        await kubelet.pods(OTHERS, pod("pod-x", {RESOURCE: ["afa0"]}))
        with Pod() as sandbox:
            sandbox.take("afa0")
            await logs(short_path, "held by default/pod-x/app")
            await kubelet.pods(OTHERS)
            begun = trio.current_time()
            assert await in_thread(cni.del_net_dev, "afa0") == DONE
            assert "xdp" not in sandbox.run("ip", "link", "show", "afa0")
            await in_thread(sandbox.give_back, "afa0")
            await until(lambda: xdp_prog_id("afa0"))
            assert trio.current_time() - begun > 0.5
        await kubelet.wait(RESOURCE, devices={"afa0": "Healthy"})


async def test_daemon_serves_on_when_a_call_makes_no_sense(kernel: Kernel, short_path: Path) -> None:
    """An unknown device is let go with ret 0; no name, a name that is none, and bytes that are no call are harmless."""
    config = write_config(short_path, pool=["afa0"])
    async with node(short_path, config, "afa0") as (kubelet, cni, daemon):
        program = xdp_prog_id("afa0")
        for name in ("lo", "afa0p", "nosuch", "../../afa0", "afa0/", "a\n", "ä" * 60):
            assert await in_thread(cni.del_net_dev, name) == DONE, name
        assert (await in_thread(cni.del_net_dev, ""))[0] == "INVALID_ARGUMENT"
        for request in (b"\x0a\xff", b"\xff" * 100, b"\x0a\x02\xff\xfe", b"\x08\x01"):
            ((status, _),) = await in_thread(cni.call, request)
            assert status not in ("OK", "UNAVAILABLE", "DEADLINE_EXCEEDED"), request
        for data in (b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", os.urandom(70_000)):
            for linger in (False, True):
                with sent(syncer(short_path), data):
                    if linger:
                        assert await in_thread(cni.del_net_dev, "nosuch") == DONE
        assert xdp_prog_id("afa0") == program
        assert await in_thread(cni.del_net_dev, "afa0") == DONE
        assert not xdp_prog_id("afa0")
        await kubelet.wait(RESOURCE, registers=1, streams_open=1, healthy=1)
        assert daemon.poll() is None
    assert "Traceback" not in log(short_path)


@contextmanager
def sent(path: Path, data: bytes) -> Iterator[None]:
    """A connection on which these bytes were sent, as far as the other side wants them."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5)
        sock.connect(os.fspath(path))
        with suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(data)
        yield


async def test_cni_is_served_again_when_kubelet_has_wiped_its_directory(kernel: Kernel, short_path: Path) -> None:
    """The socket comes again after a restart of kubelet, and goes with the daemon."""
    config = write_config(short_path, pool=["afa0"])
    async with node(short_path, config, "afa0") as (kubelet, cni, daemon):
        assert await in_thread(cni.del_net_dev, "nosuch") == DONE
        for _ in range(2):
            before = made(syncer(short_path))
            await kubelet.stop(wipe=True)
            await kubelet.start()
            await kubelet.wait(RESOURCE, registers=1, streams_open=1)
            await until(lambda before=before: made(syncer(short_path)) not in (None, before))
            with Cni(short_path) as fresh:
                assert await in_thread(fresh.del_net_dev, "afa0") == DONE
        daemon.send_signal(signal.SIGTERM)
        assert await in_thread(daemon.wait) == 0
        assert not syncer(short_path).exists()
        assert [path.name for path in syncer(short_path).parent.glob("afxdp*")] == []


async def test_pools_are_served_when_another_program_has_the_cnis_socket(kernel: Kernel, short_path: Path) -> None:
    """A plugin of old that still listens keeps its socket, is named once, and is followed when it ends."""
    config = write_config(short_path, pool=["afa0"])
    syncer(short_path).parent.mkdir(parents=True)
    make_veth("afa0")
    async with running_kubelet(short_path / "kubelet") as kubelet:
        with socket.socket(socket.AF_UNIX) as plugin_of_old:
            plugin_of_old.bind(os.fspath(syncer(short_path)))
            plugin_of_old.listen()
            before = made(syncer(short_path))
            with daemon_process(config, short_path) as daemon:
                await kubelet.wait(RESOURCE, streams_open=1, healthy=1)
                await kubelet.allocate(RESOURCE, ["afa0"])
                await kubelet.pods(OTHERS)
                words = f"the CNI cannot be served on {syncer(short_path)}: "
                await logs(short_path, words)
                for _ in range(3):
                    await in_thread(hang_up, plugin_of_old)  # it is asked again and again
                assert made(syncer(short_path)) == before
                assert log(short_path).count(f"WARNING {words}") == 1
                plugin_of_old.close()
                with Cni(short_path) as cni:
                    await until(lambda: made(syncer(short_path)) not in (None, before))
                    assert await in_thread(cni.del_net_dev, "afa0") == DONE
                assert (await kubelet.state(RESOURCE))["registers"] == 1
                assert daemon.poll() is None


def hang_up(listener: socket.socket) -> None:
    """Accepts a connection and closes it."""
    listener.accept()[0].close()


async def test_calls_are_answered_when_pools_come_meanwhile(kernel: Kernel, short_path: Path) -> None:
    """A pool that comes while a call waits for kubelet does not fail that call."""
    config = write_config(short_path, pool=["afa0"])
    async with node(short_path, config, "afa0") as (kubelet, cni, daemon):
        await kubelet.allocate(RESOURCE, ["afa0"])
        await kubelet.podresources("slow", delay=0.5)
        answers: list[tuple[str, bytes]] = []

        async def call() -> None:
            answers.append(await in_thread(cni.del_net_dev, "afa0"))

        pools = {"pool": ["afa0"]}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            while not answers:
                pools[f"more{len(pools)}"] = ["nosuch0"]
                write_config(short_path, **pools)
                daemon.send_signal(signal.SIGHUP)
                await logs(short_path, "the configuration was read again", times=len(pools) - 1)
        assert answers == [DONE]


async def test_raw_device_is_free_when_the_cni_says_so(kernel: Kernel, short_path: Path) -> None:
    """In a pool without programs the call ends the allocation, and what the pod has attached can be detached."""
    config = short_path / "config.json"
    pools = [{"name": "pool", "mode": "primary", "udsServerDisable": True, "devices": [{"name": "afa0"}]}]
    config.write_text(json.dumps({"pools": pools, "logLevel": "debug"}))
    async with node(short_path, config, "afa0", hold_off=afxdpd.HOLD_OFF) as (kubelet, cni, _):
        for number in range(3):
            assert not xdp_prog_id("afa0")
            with trio.fail_after(2):  # there is nothing to wait for
                (answer,) = await kubelet.allocate(RESOURCE, ["afa0"], force=False)
            assert answer["envs"] == {"AFXDP_DEVICES_POOL": "afa0"}
            await kubelet.pods(OTHERS, pod(f"pod-{number}", {RESOURCE: ["afa0"]}))
            with Pod() as sandbox:
                attach_by_netlink("afa0")  # the pod's own; it goes on living when the device moves
                sandbox.take("afa0")
                await logs(short_path, f"held by default/pod-{number}/app")
                await kubelet.pods(OTHERS)
                await in_thread(partial(delete, cni, sandbox, "afa0", calls=2))
            await logs(short_path, "released: the CNI says so", times=number + 1)
            await kubelet.wait(RESOURCE, devices={"afa0": "Healthy"})
        with Pod() as sandbox:  # and late, when the next pod has it
            await kubelet.allocate(RESOURCE, ["afa0"])
            sandbox.take("afa0")
            await kubelet.allocate(RESOURCE, ["afa0"])
            await kubelet.pods(OTHERS, pod("pod-y", {RESOURCE: ["afa0"]}))
            await in_thread(delete, cni, sandbox, "afa0")
        assert log(short_path).count("released: ") == 3
    assert "WARNING" not in log(short_path)
