"""What netlink says of the devices, compared with what ip(8) makes of the same, on the real kernel."""

from __future__ import annotations

import dataclasses
import errno
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import pytest
import trio
from conftest import Kernel
from support import Pod, make_veth
from test_daemon_kernel import until

import afxdpd
from _uds import lib

pytestmark = pytest.mark.kernel

PLAYGROUND = """
link add afb0 type bridge
link add afv0 numrxqueues 3 numtxqueues 2 type veth peer name afv1
link set afv1 master afb0
link add link afv0 name afv0.7 type macvlan
link add afd0 type bridge
link add afd1 type bridge
link add afd2 type bridge
link add afd3 address 02:00:00:AB:CD:EF type bridge
link set afb0 up
link set afv0 up
link set afv1 up
link set afd0 up
link set afd1 up
link set afd2 up
address add 10.9.0.1/24 dev afd0
address add 10.9.1.1/24 dev afd1
address add fd00:9::1/64 dev afd2
route add default via 10.9.0.2 dev afd0 table 77
"""
"""Devices of many kinds; afd2 is addressed by IPv6 alone, afd0 carries the default route of another table."""


def ip_batch(commands: str) -> None:
    """Runs the commands of ip(8), a line each."""
    subprocess.run(["ip", "-batch", "-"], input=commands, text=True, check=True, timeout=60)


def ip_json(*command: str) -> list[dict[str, Any]]:
    """What ip(8) says, as JSON."""
    said = subprocess.run(["ip", "-json", "-details", *command], check=True, capture_output=True, timeout=60).stdout
    return list(json.loads(said or b"[]"))


def default_devices() -> Iterator[str]:
    """The devices that default routes of any table leave through, as ip(8) says."""
    for family in ("-4", "-6"):
        for route in ip_json(family, "route", "show", "table", "all", "default"):
            yield from filter(None, [route.get("dev"), *(hop["dev"] for hop in route.get("nexthops", ()))])


def assert_agrees() -> dict[str, afxdpd.NetDevice]:
    """Our devices are those of ip(8) in all that both show; returns ours."""
    ours = afxdpd.Network().devices()
    theirs = {link["ifname"]: link for link in ip_json("address")}
    ways_out = set(default_devices())
    addressed = {name for name, link in theirs.items() if any(a["scope"] != "link" for a in link["addr_info"])}
    for name, link in theirs.items():  # what is on top of a device counts for it
        if link.get("linkinfo", {}).get("info_kind") == "macvlan":
            for marked in (ways_out, addressed):
                marked.update({link["link"]} if name in marked else ())
    assert ours.keys() == theirs.keys()
    for name, device in ours.items():
        link = theirs[name]
        assert device.name == name
        assert device.ifindex == link["ifindex"]
        assert device.mac == link.get("address", "")
        assert device.queues == link["num_rx_queues"]
        assert device.driver == link.get("linkinfo", {}).get("info_kind", "")
        assert device.master == (theirs[link["master"]]["ifindex"] if "master" in link else 0)
        assert device.peer_elsewhere == ("link_netnsid" in link)
        assert device.addressed == (name in addressed)
        assert device.default_route == (name in ways_out)
        assert device.xdp_prog_id == link.get("xdp", {}).get("prog", {}).get("id", 0)
    return ours


def test_devices_are_those_of_ip_when_there_are_many_kinds(kernel: Kernel) -> None:
    """Names, numbers, addresses, masters, kinds, queues and default routes are what ip(8) shows."""
    ip_batch(PLAYGROUND)
    ours = assert_agrees()
    assert ours["lo"].addressed
    assert [name for name, device in ours.items() if device.default_route] == ["afd0"]
    assert ours["afv0"].queues == 3
    assert ours["afd3"].mac == "02:00:00:ab:cd:ef"
    assert ours["afd2"].addressed, "by IPv6"
    assert not ours["afv0"].addressed, "a link-local address of IPv6 does not count"
    ip_batch("route add default nexthop via 10.9.0.2 dev afd0 nexthop via 10.9.1.2 dev afd1\n")
    subprocess.run(
        ["ip", "-6", "route", "add", "default", "via", "fd00:9::2", "dev", "afd2", "table", "78"], check=True
    )
    ours = assert_agrees()
    assert {name for name, device in ours.items() if device.default_route} == {"afd0", "afd1", "afd2"}


def test_devices_are_those_of_ip_when_one_end_is_elsewhere(kernel: Kernel) -> None:
    """A pair whose other end is with a pod is told from one that is here with both."""
    make_veth("afa0", "afa1")
    with Pod() as pod:
        pod.take("afa0")
        ours = assert_agrees()
        assert ours["afa0p"].peer_elsewhere
        assert not ours["afa1p"].peer_elsewhere


@pytest.mark.parametrize("generic", [0, 1])
def test_devices_are_those_of_ip_when_a_program_is_attached(kernel: Kernel, generic: int) -> None:
    """The id of a program is what ip(8) shows, and its mode is told."""
    make_veth("afa0")
    xdp = afxdpd.Xdp()
    xskmap, program = xdp._load(1)
    with xskmap, program:
        index = afxdpd.Network().devices()["afa0"].ifindex
        with afxdpd.Fd(lib.uds_xdp_link_create(program.fileno(), index, generic)):
            ours = assert_agrees()
            assert ours["afa0"].xdp_prog_id
            assert ours["afa0"].xdp_mode == ("native", "generic")[generic]
        assert ours["afa0"] == dataclasses.replace(
            afxdpd.Network().device(index), xdp_mode=ours["afa0"].xdp_mode, xdp_prog_id=ours["afa0"].xdp_prog_id
        )


@pytest.mark.parametrize("family", ["-4", "-6"])
def test_default_route_is_seen_when_it_leads_through_nexthop_objects(kernel: Kernel, family: str) -> None:
    """Also where the kernel names the object, or a group of them, and not the device."""
    ip_batch(PLAYGROUND)
    compat = Path("/proc/sys/net/ipv4/nexthop_compat_mode")
    before = compat.read_text()
    compat.write_text("0")
    try:
        gateways = {
            "-4": ("10.9.0.2 dev afd0", "10.9.1.2 dev afd1"),
            "-6": ("fd00:9::2 dev afd2", "fd00:9::3 dev afd2"),
        }
        for number, gateway in enumerate(gateways[family], 7):
            command = f"ip {family} nexthop add id {number} via {gateway}"
            subprocess.run(command.split(), check=True, timeout=60)
        ip_batch("route del default table 77\nnexthop add id 9 group 7/8\n")
        for number, expected in ((8, gateways[family][1:]), (9, gateways[family])):
            subprocess.run(f"ip {family} route add default nhid {number}".split(), check=True, timeout=60)
            found = {name for name, device in afxdpd.Network().devices().items() if device.default_route}
            assert found == {gateway.split()[-1] for gateway in expected}
            subprocess.run(f"ip {family} route del default nhid {number}".split(), check=True, timeout=60)
    finally:
        compat.write_text(before)
        ip_batch("nexthop flush\n")


async def test_device_is_free_again_when_the_object_of_its_default_route_goes(kernel: Kernel) -> None:
    """The kernel tells of the nexthop object alone; the routes through it go without a word."""
    ip_batch(f"{PLAYGROUND}\nroute del default table 77\nnexthop add id 7 via 10.9.0.2 dev afd0\n")
    ip_batch("route add default nhid 7\n")
    async with aclosing(afxdpd.Network().watch_devices()) as snapshots:
        assert (await anext(snapshots))["afd0"].default_route
        ip_batch("nexthop del id 7\n")
        with trio.fail_after(20):
            async for snapshot in snapshots:
                if not snapshot["afd0"].default_route:
                    break


def test_all_devices_are_seen_when_one_is_larger_than_a_packet_of_netlink(kernel: Kernel) -> None:
    """A device with very many names hides neither itself nor those after it."""
    make_veth("afa0", "afa1")
    for first in range(0, 330, 30):
        names = " ".join(f"altname {'n' * 100}{number:04}" for number in range(first, first + 30))
        ip_batch(f"link property add dev afa0 {names}\n")
    assert {"lo", "afa0", "afa0p", "afa1", "afa1p"} <= assert_agrees().keys()


def test_link_stays_open_when_its_program_is_replaced(kernel: Kernel) -> None:
    """Who still has the old attachment can ask for the device; the old map is its owner's to close."""
    make_veth("afa0")
    xdp = afxdpd.Xdp()
    old = xdp.attach(afxdpd.Network().devices()["afa0"].ifindex, 1)
    with closing(xdp.renew(old)) as new:
        assert xdp.ifindex(old) == xdp.ifindex(new) != 0
        assert new.map_id != old.map_id
        old.xskmap.close()


def test_device_counts_as_used_when_something_on_top_of_it_is(kernel: Kernel) -> None:
    """The default route and the addresses of a device on top of another are that one's, too."""
    ip_batch(f"{PLAYGROUND}\nroute del default table 77\nlink set afv0.7 up\naddress add 10.9.7.1/24 dev afv0.7\n")
    ours = assert_agrees()
    assert (ours["afv0.7"].lower, ours["afv0"].lower) == (ours["afv0"].ifindex, 0)
    assert (ours["afv0"].addressed, ours["afv0"].default_route) == (True, False)
    ip_batch("route add default via 10.9.7.2 dev afv0.7\n")
    ours = assert_agrees()
    assert {name for name, device in ours.items() if device.default_route} == {"afv0", "afv0.7"}
    bridged = "address flush dev afv0.7\nlink set afv0.7 master afd0\naddress add 10.9.7.1/24 dev afd0\n"
    ip_batch(f"{bridged}route add default via 10.9.7.2 dev afd0\n")
    ours = afxdpd.Network().devices()
    assert ours["afv0"].default_route
    assert ours["afv0"].addressed
    assert not ours["afv1"].default_route


def test_device_is_refused_when_there_is_none(kernel: Kernel) -> None:
    """To ask for an ifindex that nothing has is ENODEV."""
    with pytest.raises(OSError, match="No such device") as caught:
        afxdpd.Network().device(99_999)
    assert caught.value.errno == errno.ENODEV


async def test_snapshots_end_with_all_when_many_devices_come_at_once(kernel: Kernel) -> None:
    """However many changes are told together, the last snapshot has every one of them."""
    names = [f"afm{number}" for number in range(100)]
    snapshots = 0
    async with trio.open_nursery() as nursery:
        async with aclosing(afxdpd.Network().watch_devices()) as devices:
            await anext(devices)
            batch = "".join(f"link add {name} type bridge\n" for name in names)
            nursery.start_soon(trio.to_thread.run_sync, ip_batch, batch)
            with trio.fail_after(60):
                async for snapshot in devices:
                    snapshots += 1
                    if snapshot.keys() >= set(names):
                        break
        assert 1 <= snapshots <= 2 * len(names)
        batch = "".join(f"link del {name}\n" for name in names)
        async with aclosing(afxdpd.Network().watch_devices()) as devices:
            assert (await anext(devices)).keys() >= set(names)
            nursery.start_soon(trio.to_thread.run_sync, ip_batch, batch)
            with trio.fail_after(120):
                async for snapshot in devices:
                    if not snapshot.keys() & set(names):
                        break
    await until(lambda: not afxdpd.Network().devices().keys() & set(names))


def test_pyroute2_is_left_alone_when_devices_are_looked_at(kernel: Kernel) -> None:
    """To start and to look at devices takes nothing of what only the making of devices needs: it is large."""
    program = (
        "import sys, afxdpd; afxdpd.Network().devices(); print(sorted(set(sys.modules) & {'pyroute2', 'asyncio'}))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]"
