"""What happens seldom, and went wrong once, on the real kernel."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
from conftest import Kernel
from kubelet import pod, running_kubelet
from support import PROGRAM, Pod, daemon_process, delete_link, in_thread, make_veth, xdp_prog_id
from test_cni_kernel import DONE, OTHERS, Cni, delete, log, logs, with_constants
from test_daemon_kernel import PINS, ip, until
from test_options_kernel import devices, features
from test_reload_kernel import KEPT, SOON_RELEASED, Node, give, links, node, pod_under_traffic, pool, write

from afxdpd import KindNetwork

pytestmark = [pytest.mark.kernel, pytest.mark.kubelet]


# -- The log file ------------------------------------------------------------------------------------------------------


@contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    """A file system of 64 KiB while the block runs."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def fill(disk: Path) -> Path:
    """Takes all room that there is; returns the file that has it."""
    file = disk / "filler"
    with file.open("ab", buffering=0) as stream:
        try:
            while stream.write(bytes(4096)):
                pass
        except OSError:
            return file
    raise AssertionError("there is room for ever")


async def talk(here: Node, done: Callable[[], bool]) -> None:
    """Has the daemon log what it does until something holds."""
    with trio.fail_after(20):
        while not done():
            await here.kubelet.allocate("afxdp/a", ["afa0"])


def says_more(directory: Path, before: int) -> bool:
    """Whether the disk was found full more often than before."""
    return log(directory).count(FULL) > before


FULL = "afxdpd.log: cannot be written: [Errno 28] No space left on device"


@pytest.mark.parametrize("mends", ["room is made", "the log is removed", "the configuration is read again"])
async def test_daemon_serves_on_when_the_disk_of_its_log_is_full(kernel: Kernel, short_path: Path, mends: str) -> None:
    """A full disk is one line on standard error; pods get their devices, and the log goes on when there is room."""
    a = pool("a", "afa0")
    with small_disk(short_path / "logs") as disk:
        written = disk / "afxdpd.log"
        async with node(short_path, ["afa0"], a) as here:
            await here.reload(a, logFile=written.name)
            for _ in range(2):
                filler = fill(disk)
                before = log(short_path).count(FULL)
                await talk(here, partial(says_more, short_path, before))
                for _ in range(5):
                    await here.kubelet.allocate("afxdp/a", ["afa0"])
                assert log(short_path).count(FULL) == before + 1
                if mends == "the log is removed":
                    written.unlink()  # it has the only room that there will be, once nobody has it open
                    await talk(here, written.exists)
                else:
                    if mends == "the configuration is read again":
                        await here.reload(a, logFile=written.name)
                    filler.unlink()
                await here.kubelet.allocate("afxdp/a", ["afa0"])
                start = written.stat().st_size
                await here.kubelet.allocate("afxdp/a", ["afa0"])
                with written.open() as stream:
                    stream.seek(start)
                    assert "allocated: afa0" in stream.read()
                assert here.daemon.poll() is None


async def test_daemon_serves_on_when_the_directory_of_its_log_is_removed(kernel: Kernel, short_path: Path) -> None:
    """That there is no place for the log is one line on standard error; the file is made again when there is."""
    a = pool("a", "afa0")
    written = short_path / "logs" / "afxdpd.log"
    words = f"afxdpd: {written}: cannot be written: [Errno 2] No such file or directory"
    async with node(short_path, ["afa0"], a) as here:
        await here.reload(a, logFile=written.name)
        for turn in range(2):
            await in_thread(shutil.rmtree, written.parent)
            for _ in range(3):
                await here.kubelet.allocate("afxdp/a", ["afa0"])
            assert log(short_path).count(words) == turn + 1
            written.parent.mkdir()
            await here.kubelet.allocate("afxdp/a", ["afa0"])
            await until(lambda: written.exists() and "allocated: afa0" in written.read_text())


# -- The CNI comes late, or again --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kubelet_says", ["the next pod", "nothing, it refuses"])
async def test_next_pod_loses_nothing_when_the_cni_asks_late_or_again(
    kernel: Kernel, short_path: Path, kubelet_says: str
) -> None:
    """A device that the next pod has in its namespace is let alone: every packet arrives, whatever kubelet answers."""
    async with node(short_path, ["afa0"], pool("a", "afa0"), constants={"HOLD_OFF": 0.5}) as here:
        with Pod() as old, Pod() as new, Cni(short_path) as cni:
            first = await give(here, "a", "afa0", "pod-x", old)
            await here.kubelet.pods(OTHERS)
            await in_thread(delete, cni, old, "afa0")
            await until(lambda: xdp_prog_id("afa0"))
            second = await give(here, "a", "afa0", "pod-y", new)
            assert second != first
            pins = {path: path.stat().st_ino for path in (PINS / "a/afa0").iterdir()}
            state = await here.kubelet.state("afxdp/a")
            async with pod_under_traffic(here, new, "a", "afa0", "pod-y", total=4000):
                if kubelet_says == "nothing, it refuses":
                    await here.kubelet.podresources("exhausted")
                for _ in range(3):
                    assert await in_thread(cni.del_net_dev, "afa0") == DONE
                await trio.sleep(0.6)  # that nothing happens after the time that the CNI has, either
                await here.kubelet.podresources()
            assert await here.map_id("a", "afa0", "pod-y") == second
            assert {path: path.stat().st_ino for path in (PINS / "a/afa0").iterdir()} == pins
            after = await here.kubelet.state("afxdp/a")
            assert [after[key] for key in ("registers", "messages", "devices")] == [
                state[key] for key in ("registers", "messages", "devices")
            ]
            await here.kubelet.pods(OTHERS)
            await in_thread(delete, cni, new, "afa0")
        await until(lambda: xdp_prog_id("afa0"))
    assert log(short_path).count("afa0: the CNI lets go of it, but its pod has it: nothing is done") == 3


async def test_nothing_happens_when_a_device_in_the_host_is_let_go_and_unpinned_twice(
    kernel: Kernel, short_path: Path
) -> None:
    """Pins that are gone already and calls that come again do no harm; in the end the device is as any other."""
    async with node(short_path, ["afa0"], pool("a", "afa0"), constants={"HOLD_OFF": 0.6}) as here:
        with Cni(short_path) as cni:
            await here.kubelet.allocate("afxdp/a", ["afa0"])
            await here.kubelet.pods(OTHERS, pod("pod-x", {"afxdp/a": ["afa0"]}))
            before = await here.map_id("a", "afa0", "pod-x")
            await here.kubelet.pods(OTHERS)
            shutil.rmtree(PINS / "a")
            for _ in range(2):
                assert await in_thread(cni.del_net_dev, "afa0") == DONE
                assert not xdp_prog_id("afa0")
            await until(lambda: xdp_prog_id("afa0"))
            assert not (PINS / "a").exists()
            assert not here.uds("a", "afa0").parent.exists()
        await here.kubelet.allocate("afxdp/a", ["afa0"])
        await here.kubelet.pods(OTHERS, pod("pod-y", {"afxdp/a": ["afa0"]}))
        assert await here.map_id("a", "afa0", "pod-y") != before
        state = await here.kubelet.state("afxdp/a")
        assert (state["registers"], state["devices"]["afa0"]["health"]) == (1, "Healthy")
    assert " ERROR " not in log(short_path)


async def test_pool_goes_on_when_a_free_device_is_deleted_ten_times(kernel: Kernel, short_path: Path) -> None:
    """Each time kubelet is told, and a device that was let go meanwhile is prepared as ever."""
    both = {"afa0": "Healthy", "afa1": "Healthy"}
    async with node(short_path, ["afa0", "afa1"], pool("a", *both), constants={"HOLD_OFF": 0.05}) as here:
        with Cni(short_path) as cni:
            for number in range(10):
                if number % 2:  # it goes while it is held off
                    assert await in_thread(cni.del_net_dev, "afa0") == DONE
                await in_thread(delete_link, "afa0")
                await here.kubelet.wait("afxdp/a", devices={"afa1": "Healthy"})
                before = xdp_prog_id("afa1")
                assert await in_thread(cni.del_net_dev, "afa1") == DONE
                await until(lambda before=before: xdp_prog_id("afa1") not in (0, before))
                await in_thread(make_veth, "afa0")
                await here.kubelet.wait("afxdp/a", devices=both)
        await until(lambda: xdp_prog_id("afa0"))
        await here.kubelet.allocate("afxdp/a", ["afa0", "afa1"])
        assert (await here.kubelet.state("afxdp/a"))["registers"] == 1


# -- Devices with odd names, and names that change ---------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-8:strict", "utf-8:surrogateescape"])
async def test_device_is_passed_over_when_its_name_is_no_text(kernel: Kernel, short_path: Path, encoding: str) -> None:
    """What the kernel takes for a name may be no text for kubelet: the device is passed over, and that is told."""
    rules = {"name": "kind", "mode": "primary", "drivers": [{"name": "veth"}]}
    config = write(short_path, rules, kindCluster=True)
    prefix = ["env", f"PYTHONIOENCODING={encoding}"]  # strict: as with LANG=en_US.UTF-8, say
    odd, pods = [b"\xff\xfe1", b"\xe2", b"a\x1b[31m", b"\xed\xb2\x80"], list(KindNetwork.PAIRS)
    for number, name in enumerate(odd[:2]):
        add_veth(name, f"p{number}")
    command = [*prefix, *PROGRAM, "--config", str(config), "--check"]
    check = await in_thread(run, command)
    assert check.stderr == b""
    assert b"kindCluster: veth6, veth8, veth10, veth12 are made for pods when the daemon starts\n" in check.stdout
    assert check.stdout.count(b": its name is not UTF-8") == 2
    async with running_kubelet(short_path / "kubelet") as kubelet:
        await kubelet.pods(OTHERS)
        with daemon_process(config, short_path, prefix=prefix) as daemon:
            await kubelet.wait("afxdp/kind", streams_open=1, devices=dict.fromkeys([*pods, "p0", "p1"], "Healthy"))
            for number, name in enumerate(odd[2:], 2):
                await in_thread(add_veth, name, f"p{number}")
            everything = dict.fromkeys([*pods, *(f"p{number}" for number in range(4))], "Healthy")
            state = await kubelet.wait("afxdp/kind", devices=everything)
            assert state["registers"] == 1
            await kubelet.allocate("afxdp/kind", ["p3"])
            assert daemon.poll() is None
    said = (short_path / "daemon.log").read_bytes()
    assert said.count(b" is not taken: its name is not UTF-8") == 4
    assert b"Traceback" not in said
    assert b"\x1b" not in said, "a name moves no terminal"


def add_veth(name: bytes, peer: str) -> None:
    """Makes a veth pair, one end of which has any bytes for a name."""
    subprocess.run(["ip", "link", "add", "name", name, "type", "veth", "peer", "name", peer], check=True)


def run(command: list[str]) -> subprocess.CompletedProcess[bytes]:
    """Runs a program that ends well."""
    return subprocess.run(command, capture_output=True, timeout=30, check=True)


async def test_other_pool_has_the_device_when_it_comes_back_with_another_name(kernel: Kernel, short_path: Path) -> None:
    """A device that its pod has renamed is released by what kubelet lists, and is then what its name says."""
    pools = pool("a", "afa0", "afa1"), {**pool("b"), "devices": [{"name": "net1"}]}
    make_veth("afa0", "afa1")
    config = write(short_path, *pools)
    async with running_kubelet(short_path / "kubelet") as kubelet:
        await kubelet.pods(OTHERS)
        with daemon_process(config, short_path, prefix=with_constants(**SOON_RELEASED)) as daemon:
            here = Node(short_path, kubelet, daemon)
            await kubelet.wait("afxdp/a", streams_open=1, healthy=2)
            await kubelet.wait("afxdp/b", streams_open=1, devices={})
            with Pod() as sandbox:
                before = await give(here, "a", "afa0", "pod-x", sandbox)
                for command in ("set afa0 down", "set afa0 name net1", "set net1 up"):
                    sandbox.run("ip", "link", *command.split())
                await in_thread(sandbox.give_back, "net1")
            assert xdp_prog_id("net1")
            await kubelet.wait("afxdp/b", devices={"net1": "Unhealthy"})
            assert await here.map_id("a", "afa0", "pod-x") == before, "it is still its pod's"
            await kubelet.pods(OTHERS)
            await logs(short_path, "afa0: released: kubelet lists no pod that holds it")
            await kubelet.wait("afxdp/a", devices={"afa1": "Healthy"})
            await kubelet.wait("afxdp/b", devices={"net1": "Healthy"}, timeout=15)
            assert not (PINS / "a").exists()
            await kubelet.allocate("afxdp/b", ["net1"])
            await kubelet.pods(OTHERS, pod("pod-y", {"afxdp/b": ["net1"]}))
            assert await here.map_id("b", "net1", "pod-y") != before
            assert daemon.poll() is None
    assert "Traceback" not in log(short_path)


# -- Another device, another daemon ------------------------------------------------------------------------------------


@pytest.mark.parametrize("released", ["first", "afterwards"])
async def test_new_device_stays_as_it_was_made_when_one_of_its_name_died(
    kernel: Kernel, short_path: Path, released: str
) -> None:
    """What the daemon set on a device that died with its pod is not put back on the next one of that name."""
    rules = pool("a", "afa0", ethtoolCmds=["-K -device- tso off"])
    async with node(short_path, ["afa0"], rules, constants=SOON_RELEASED) as here:
        assert features("afa0")["tcp-segmentation-offload"] == "on"
        with Pod() as sandbox:
            await give(here, "a", "afa0", "pod-x", sandbox)
        await until(lambda: "afa0p" not in links())
        await here.kubelet.pods(OTHERS)
        if released == "first":
            await logs(short_path, "afa0: released: ")
        await in_thread(make_veth, "afa0")
        await in_thread(run, ["ethtool", "-K", "afa0", "tso", "off"])  # as whoever made it wants it
        await logs(short_path, "afa0: released: ")
        await here.kubelet.wait("afxdp/a", devices={"afa0": "Healthy"})
        await until(lambda: not list((short_path / "uds/.ethtool").rglob("afa0")))
        await until(lambda: xdp_prog_id("afa0"))
        assert features("afa0")["tcp-segmentation-offload"] == "off"
        assert "ethtool settings undone" not in log(short_path)


async def test_device_of_a_pod_is_kept_when_another_gets_its_name(kernel: Kernel, short_path: Path) -> None:
    """What only has the name of a pod's device is left alone until that device is no more, and is then offered."""
    async with node(short_path, ["afa0"], pool("a", "afa0"), constants=SOON_RELEASED) as here:
        with Pod() as sandbox:
            before = await give(here, "a", "afa0", "pod-x", sandbox)
            await in_thread(run, ["ip", "link", "add", "afa0", "up", "type", "veth", "peer", "name", "afz0"])
            await here.kubelet.pods(OTHERS)
            lists = (await here.kubelet.state())["lists"]
            await here.kubelet.wait("afxdp/a", lists=lists + 4, timeout=30)
            async with pod_under_traffic(here, sandbox, "a", "afa0", "pod-x"):
                pass
            assert not xdp_prog_id("afa0")
            assert "released" not in log(short_path)
            await here.kubelet.pods(OTHERS, pod("pod-x", {"afxdp/a": ["afa0"]}))
            assert await here.map_id("a", "afa0", "pod-x") == before
            await here.kubelet.pods(OTHERS)
        await logs(short_path, "afa0: released: ")
        await here.kubelet.wait("afxdp/a", devices={"afa0": "Healthy"})
        await until(lambda: xdp_prog_id("afa0"))


async def test_raw_device_stays_its_pods_when_its_pool_has_a_socket_after_a_restart(
    kernel: Kernel, short_path: Path
) -> None:
    """A pod that was given a raw device before the file changed has it in kubelet's list, Healthy, until it ends."""
    make_veth("afa0", "afa1")
    both = {"afa0": "Healthy", "afa1": "Healthy"}
    prefix = with_constants(HOLD_OFF=0.5)
    async with running_kubelet(short_path / "kubelet") as kubelet:
        with Pod() as sandbox:
            config = write(short_path, pool("a", *both, udsServerDisable=True))
            with daemon_process(config, short_path, prefix=prefix):
                await kubelet.wait("afxdp/a", streams_open=1, devices=both)
                await kubelet.allocate("afxdp/a", ["afa0"])
                await kubelet.pods(OTHERS, pod("pod-x", {"afxdp/a": ["afa0"]}))
                await in_thread(sandbox.take, "afa0")
                await logs(short_path, "afa0: held by default/pod-x")
            registers = (await kubelet.wait("afxdp/a", streams_open=0))["registers"]
            write(short_path, pool("a", *both))
            with daemon_process(config, short_path, prefix=prefix), Cni(short_path) as cni:
                await kubelet.wait("afxdp/a", registers=registers + 1, streams_open=1, devices=both)
                await logs(short_path, "afa0: held by default/pod-x", times=2)
                await kubelet.wait("afxdp/a", devices=both)
                await kubelet.pods(OTHERS)
                await in_thread(delete, cni, sandbox, "afa0")
                await until(lambda: xdp_prog_id("afa0"))
                await kubelet.wait("afxdp/a", devices=both)
                await kubelet.allocate("afxdp/a", ["afa0"])
                await kubelet.pods(OTHERS, pod("pod-y", {"afxdp/a": ["afa0"]}))
                assert (short_path / "uds/a/afa0/afxdp.sock").is_socket()
    assert "Traceback" not in log(short_path)


# -- Reload ------------------------------------------------------------------------------------------------------------


async def test_daemon_serves_on_when_its_configuration_is_a_pipe(kernel: Kernel, short_path: Path) -> None:
    """What nobody writes to is not waited for: an error is told, and everything stays and works."""
    a = pool("a", "afa0")
    file = short_path / "config.json"
    async with node(short_path, ["afa0"], a) as here:
        file.unlink()
        os.mkfifo(file)
        for turn in range(2):
            await here.hang_up(KEPT)
            assert log(short_path).count(f"ERROR   {file}: not a regular file") == turn + 1
            await here.kubelet.allocate("afxdp/a", ["afa0"])
        await here.reload(a, pool("b", "afa0p"))
        await here.kubelet.wait("afxdp/b", streams_open=1, devices={"afa0p": "Healthy"})


async def test_kind_network_is_put_right_when_a_hand_has_been_at_it(kernel: Kernel, short_path: Path) -> None:
    """What is in its way at a reload is told, and it is made when that is gone; a port that is taken off comes back."""
    others = [{"name": "afa0"}, {"name": "afa0p"}]
    kind = {"name": "kind", "mode": "primary", "drivers": [{"name": "veth", "excludeDevices": others}]}
    pods = dict.fromkeys(KindNetwork.PAIRS, "Healthy")
    async with node(short_path, ["afa0"], pool("a", "afa0")) as here:
        ip("link add veth6 type bridge")
        await here.reload(kind, kindCluster=True)
        await here.kubelet.wait("afxdp/kind", streams_open=1, devices={})
        assert "the kind network cannot be made: veth6: this bridge device" in log(short_path)
        assert KindNetwork.BRIDGE not in links()
        ip("link del veth6")
        await here.kubelet.wait("afxdp/kind", registers=1, devices=pods)
        for command in ("nomaster", "master other0"):
            ip("link add other0 type bridge")
            ip(f"link set veth7 {command}")
            await until(lambda: devices()["veth7"].get("master") == KindNetwork.BRIDGE)
            ip("link del other0")
        assert log(short_path).count("kind network: made veth7 on the bridge") == 2
        await here.reload(pool("a", "afa0"))
        await until(lambda: not set(KindNetwork.PAIRS) & links())
