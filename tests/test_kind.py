"""The network of a kind cluster, on the real kernel."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import threading
from typing import Any

import pytest
import trio
from conftest import Kernel, open_fds
from pyroute2 import IPRoute
from support import Pod, delete_link, make_veth

from afxdpd import KindNetwork, NetDevice, Network

pytestmark = pytest.mark.kernel

POD_ENDS = ["veth6", "veth8", "veth10", "veth12"]
PORTS = ["veth7", "veth9", "veth11", "veth13"]
EVERYTHING = {"afxdp-kind-br", *POD_ENDS, *PORTS}


def ip(*command: str) -> None:
    """Runs ip in this namespace."""
    subprocess.run(["ip", *command], check=True)


def devices() -> dict[str, dict[str, Any]]:
    """What `ip address` says of each device but lo."""
    shown = subprocess.run(["ip", "-json", "-detail", "address"], check=True, capture_output=True, text=True).stdout
    return {device["ifname"]: device for device in json.loads(shown) if device["ifname"] != "lo"}


def assert_complete(*, with_pods: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    """Everything is there and as it should be, but for the ends that are with pods; returns the devices."""
    found = devices()
    assert found.keys() == EVERYTHING - set(with_pods)
    for name, device in found.items():
        assert "UP" in device["flags"]
        assert device.get("master") == ("afxdp-kind-br" if name in PORTS else None)
    bridge = found["afxdp-kind-br"]
    addresses = [(a["local"], a["prefixlen"]) for a in bridge["addr_info"] if a["family"] == "inet"]
    assert addresses == [("192.168.1.1", 24)]
    for pod, port in zip(POD_ENDS, PORTS, strict=True):
        if pod not in with_pods:
            assert found[pod]["link"] == port
    return found


def ifindexes() -> dict[str, int]:
    """The devices by name."""
    return {name: device["ifindex"] for name, device in devices().items()}


def wait_gone(name: str) -> None:
    """Waits until a device has left this namespace: the kernel cleans up behind a namespace in its own time."""
    with IPRoute() as ipr:
        ipr.bind()
        while ipr.link_lookup(ifname=name):
            list(ipr.get())


def test_network_is_complete_when_nothing_was_there(kernel: Kernel) -> None:
    """A bridge with its address and four pairs are made, all up, and each is reported once."""
    made = KindNetwork().set_up()
    assert_complete()
    assert made == [
        "bridge afxdp-kind-br",
        "address 192.168.1.1/24",
        *(f"pair {pod} and {port}" for pod, port in zip(POD_ENDS, PORTS, strict=True)),
    ]


def test_network_is_kept_when_it_is_set_up_twice(kernel: Kernel) -> None:
    """A second run makes nothing and leaves every device as it is."""
    KindNetwork().set_up()
    before = ifindexes()
    assert KindNetwork().set_up() == []
    assert ifindexes() == before
    assert_complete()


@pytest.mark.parametrize(
    ("damage", "made"),
    [
        (["link", "set", "veth9", "nomaster"], ["veth9 on the bridge"]),
        (["link", "set", "veth9", "down"], []),
        (["link", "set", "veth8", "down"], []),
        (["link", "set", "afxdp-kind-br", "down"], []),
        (["link", "del", "veth10"], ["pair veth10 and veth11"]),
        (["address", "del", "192.168.1.1/24", "dev", "afxdp-kind-br"], ["address 192.168.1.1/24"]),
        (
            ["link", "del", "afxdp-kind-br"],
            ["bridge afxdp-kind-br", "address 192.168.1.1/24", *(f"{port} on the bridge" for port in PORTS)],
        ),
    ],
    ids=" ".join,
)
def test_network_is_completed_when_a_part_is_missing(kernel: Kernel, damage: list[str], made: list[str]) -> None:
    """Whatever is missing is made or put right again, and only that."""
    KindNetwork().set_up()
    before = ifindexes()
    ip(*damage)
    kept = ifindexes()
    assert KindNetwork().set_up() == made
    assert_complete()
    assert kept.items() <= ifindexes().items()
    assert len(before) == len(ifindexes())


def test_port_is_moved_when_it_is_on_another_bridge(kernel: Kernel) -> None:
    """A port that is on another bridge is taken over."""
    KindNetwork().set_up()
    ip("link", "add", "br0", "type", "bridge")
    ip("link", "set", "veth7", "master", "br0")
    assert KindNetwork().set_up() == ["veth7 on the bridge"]
    ip("link", "del", "br0")
    assert_complete()


def test_packets_pass_when_both_ends_are_with_pods(kernel: Kernel) -> None:
    """Two pods reach each other and the bridge's address."""
    KindNetwork().set_up()
    with Pod() as one, Pod() as other:
        for pod, name, address in ((one, "veth6", "192.168.1.2/24"), (other, "veth8", "192.168.1.3/24")):
            pod.take(name)
            pod.run("ip", "address", "add", address, "dev", name)
        script = (
            "import socket; socket.setdefaulttimeout(10); server = socket.create_server(('192.168.1.3', 7)); "
            "print(flush=True); server.accept()"
        )
        with subprocess.Popen([*other.prefix(), sys.executable, "-c", script], stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            server.stdout.readline()
            one.run(sys.executable, "-c", "import socket; socket.create_connection(('192.168.1.3', 7), 10).close()")
        for name, prefix in (("veth6", one), ("veth8", other)):
            prefix.give_back(name)


def test_pair_is_left_alone_when_its_end_is_with_a_pod(kernel: Kernel) -> None:
    """With the pod's end away, the other is put back on the bridge and up, and nothing is made."""
    KindNetwork().set_up()
    before = ifindexes()
    with Pod() as pod:
        pod.take("veth6")
        assert KindNetwork().set_up() == []
        ip("link", "set", "veth7", "nomaster")
        ip("link", "set", "veth7", "down")
        assert KindNetwork().set_up() == ["veth7 on the bridge"]
        assert_complete(with_pods=("veth6",))
        assert not KindNetwork.missing(Network().devices())
        pod.give_back("veth6")
    assert KindNetwork().set_up() == []
    assert ifindexes() == before


def test_pair_is_made_again_when_its_pod_took_it_along(kernel: Kernel) -> None:
    """A namespace that ends takes its end of a pair along, and with it the other: both are made again."""
    KindNetwork().set_up()
    with Pod() as pod:
        pod.take("veth6")
    wait_gone("veth7")
    assert KindNetwork.missing(Network().devices())
    assert KindNetwork().set_up() == ["pair veth6 and veth7"]
    assert_complete()


@pytest.mark.parametrize(
    ("others", "name", "what"),
    [
        ([["veth6", "type", "bridge"]], "veth6", "this bridge device is not the end of a veth pair with veth7"),
        ([["veth7", "type", "bridge"]], "veth7", "this bridge device is not the end of a veth pair with veth6"),
        (
            [["veth6", "type", "veth", "peer", "x7"]],
            "veth6",
            "this veth device is not the end of a veth pair with veth7",
        ),
        (
            [["veth13", "type", "veth", "peer", "x"]],
            "veth13",
            "this veth device is not the end of a veth pair with veth12",
        ),
        (
            [["veth6", "type", "veth", "peer", "x6"], ["veth7", "type", "veth", "peer", "x7"]],
            "veth6",
            "this veth device is not the end of a veth pair with veth7",
        ),
        ([["afxdp-kind-br", "type", "veth", "peer", "x"]], "afxdp-kind-br", "a veth device has the bridge's name"),
    ],
)
def test_set_up_is_refused_when_a_name_is_taken(kernel: Kernel, others: list[list[str]], name: str, what: str) -> None:
    """A device that is something else is named with what to do about it, and nothing is changed."""
    for other in others:
        ip("link", "add", *other)
    before = devices()
    with pytest.raises(OSError, match="kindCluster") as caught:
        KindNetwork().set_up()
    assert caught.value.errno == errno.EEXIST
    assert caught.value.filename == name
    assert str(caught.value.strerror).startswith(what)
    assert devices() == before


def test_set_up_is_refused_when_a_pods_end_has_a_namesake(kernel: Kernel) -> None:
    """A device with the name of an end that is with a pod would be in its way on its return."""
    KindNetwork().set_up()
    with Pod() as pod:
        pod.take("veth6")
        ip("link", "add", "veth6", "type", "bridge")
        with pytest.raises(OSError, match="kindCluster") as caught:
            KindNetwork().set_up()
        assert caught.value.filename == "veth6"
        KindNetwork().remove(keep=())
        assert devices().keys() == {"afxdp-kind-br", "veth6", "veth7"}
        ip("link", "del", "veth6")
        pod.give_back("veth6")


def test_nothing_is_left_when_the_network_is_removed(kernel: Kernel) -> None:
    """Pairs and bridge go; removing twice is fine."""
    KindNetwork().set_up()
    KindNetwork().remove(keep=())
    assert devices() == {}
    KindNetwork().remove(keep=())
    assert devices() == {}


def test_pairs_are_kept_when_pods_have_them(kernel: Kernel) -> None:
    """A pair that is to be kept, or is with a pod, stays with the bridge; the rest goes."""
    KindNetwork().set_up()
    with Pod() as pod:
        pod.take("veth6")
        KindNetwork().remove(keep={"veth8"})
        assert devices().keys() == {"afxdp-kind-br", "veth7", "veth8", "veth9"}
        KindNetwork().remove(keep=())
        assert devices().keys() == {"afxdp-kind-br", "veth7"}
        pod.give_back("veth6")
    KindNetwork().remove(keep=())
    assert devices() == {}


def test_bridge_is_kept_when_something_else_is_on_it(kernel: Kernel) -> None:
    """A bridge with a port that somebody else put on it stays, and so do devices that only share a name."""
    KindNetwork().set_up()
    make_veth("other")
    ip("link", "set", "otherp", "master", "afxdp-kind-br")
    ip("link", "del", "veth6")
    ip("link", "add", "veth6", "type", "bridge")
    KindNetwork().remove(keep=())
    assert devices().keys() == {"afxdp-kind-br", "other", "otherp", "veth6"}


@pytest.mark.parametrize(
    ("gone", "missing"),
    [(set(), False), (set(POD_ENDS), False), ({"veth7"}, True), ({"veth6", "veth7"}, True), ({"afxdp-kind-br"}, True)],
)
def test_something_is_missing_when_no_pod_can_have_it(gone: set[str], missing: bool) -> None:
    """The bridge or its end of a pair being away means work; the pod's end being away does not."""
    names = (EVERYTHING | {"eth0"}) - gone
    found = {name: NetDevice(name=name, ifindex=9, master=9 if name in PORTS else 0) for name in names}
    assert KindNetwork.missing(found) is missing


def test_something_is_missing_when_a_port_is_not_on_the_bridge() -> None:
    """A port that somebody took off the bridge is to be put back."""
    found = {name: NetDevice(name=name, ifindex=9, master=9 if name in PORTS[1:] else 0) for name in EVERYTHING}
    assert KindNetwork.missing(found)


async def test_network_is_made_when_called_from_a_worker_thread(kernel: Kernel) -> None:
    """All of it works in trio's worker threads, and leaves no file or thread behind."""
    network = KindNetwork()
    await trio.to_thread.run_sync(network.set_up)
    fds, threads = open_fds(), threading.active_count()
    for _ in range(5):
        await trio.to_thread.run_sync(network.remove, ())
        assert len(await trio.to_thread.run_sync(network.set_up)) == 6
    assert_complete()
    assert open_fds() == fds
    assert threading.active_count() == threads
    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(trio.to_thread.run_sync, network.set_up)


def test_network_is_set_up_when_devices_come_and_go_meanwhile(kernel: Kernel) -> None:
    """On a node where pods come and go, a list of devices that changed while it was made is asked for again."""
    make_veth(*(f"many{number}" for number in range(50)))
    stop = threading.Event()

    def come_and_go() -> None:
        while not stop.is_set():
            make_veth("pod")
            delete_link("pod")

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(5):
            assert len(KindNetwork().set_up()) == 6
            KindNetwork().remove(keep=())
    finally:
        stop.set()
        thread.join()
    assert not EVERYTHING & devices().keys()
