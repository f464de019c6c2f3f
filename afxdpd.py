"""afxdpd: an AF_XDP device plugin for Kubernetes, and a framework for other device plugins.

The daemon advertises pools of network devices to kubelet. A pod that asks for ``afxdp/<pool>: 1`` gets a device
that carries an XDP program which redirects its packets into an XSKMAP, and the map's file descriptor over a Unix
socket, so that it can run AF_XDP with CAP_NET_RAW and nothing more.

The module reads from top to bottom; each section uses only those above it:

    Constants and errors    the numbers and names of the contracts, the exception types
    Kernel                  the only place that talks to the C helper, netlink, inotify and extended attributes
    Configuration           the JSON file, as frozen values
    Handshake               the pod's protocol without I/O
    gRPC                    purerpc over Unix sockets, server and client
    Device plugins          the framework: anything about kubelet, nothing about AF_XDP
    AF_XDP pools            the framework's first user
    Observation             probes, metrics and status: it reads the pools, and changes nothing of them
    Command line            main, logging, exit codes
"""

from __future__ import annotations

import argparse
import bisect
import collections
import contextlib
import copy
import ctypes
import dataclasses
import datetime
import difflib
import enum
import errno
import fcntl
import functools
import gc
import hashlib
import importlib
import inspect
import itertools
import json
import logging
import logging.handlers
import math
import os
import random
import re
import resource
import select
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
import urllib.parse
import warnings
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    NoReturn,
    Protocol,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import anyio
import h2.connection
import h2.events
import h2.exceptions
import hpack
import inotify_simple
import msgspec
import trio
from google.protobuf.message import DecodeError, Message
from purerpc.grpc_proto import GRPCProtoSocket, GRPCProtoStream
from purerpc.grpc_socket import SocketWrapper
from purerpc.grpclib.config import GRPCConfiguration
from purerpc.grpclib.connection import GRPCConnection
from purerpc.grpclib.events import MessageReceived, RequestEnded, RequestReceived, ResponseEnded, WindowUpdated
from purerpc.grpclib.exceptions import (
    GRPCError,
    MessageTooLargeError,
    ProtocolError,
    RpcFailedError,
    UnsupportedMessageEncodingError,
)
from purerpc.grpclib.status import Status, StatusCode
from purerpc.wrappers import extract_message_from_singleton_stream, send_single_message_client

from _uds import ffi, lib
from afxdpd_proto import deviceplugin_pb2 as api
from afxdpd_proto import dpcnisyncer_pb2 as syncer
from afxdpd_proto import podresources_pb2 as podresources

if TYPE_CHECKING:
    import h11

# ======================================================================================================================
# Constants and errors
# ======================================================================================================================

__version__ = "0.1.0"

NAMESPACE = "afxdp"
"""The domain of the resources: a pod asks for ``afxdp/<pool>``."""

KUBELET_DIR = Path("/var/lib/kubelet")
UDS_DIR = Path("/var/run/afxdp_dp")
LOG_DIR = Path("/var/log/afxdp-k8s-plugins")
BPFFS = Path("/sys/fs/bpf")

API_VERSION = "v1beta1"
HEALTHY = "Healthy"
UNHEALTHY = "Unhealthy"

RESOURCE_NAME = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
"""What kubelet accepts after the slash of a resource."""
RESOURCE_NAME_RULE = "1 to 63 letters, digits, '-', '_' and '.', the first and the last a letter or digit"

POD_SOCKET_DIR = "/tmp/afxdp_dp"  # noqa: S108  a path in the pod, fixed by the clients
SOCKET_NAME = "afxdp.sock"
MAP_NAME = "xsks_map"
DEVICE_NAME_MAX = 15
"""Bytes in the name of a network device, see netdevice(7)."""
SUN_PATH_MAX = 107
"""Bytes in the path of a Unix socket, see unix(7)."""

REGISTER_TIMEOUT = 20.0
"""Seconds for Register; kubelet dials us inside it and gives up after 10, an answer we want to see."""
ALLOCATE_TIMEOUT = 20.0
"""Seconds for one Allocate: kubelet sets none, and admits no other pod meanwhile."""
PRE_START_TIMEOUT = 25.0
"""Seconds for one PreStartContainer: kubelet gives up after 30."""
HOOK_TIMEOUT = 10.0
"""Seconds for the short calls of the device plugin API."""
LIST_TIMEOUT = 5.0
"""Seconds for one List of the pod resources API."""
FILES_ROOM = 1 << 14
"""Descriptors for which there is room from the start; it takes 128 KiB."""
LIST_MAX = 16 << 20
"""Bytes in its answer; kubelet's own client takes no more either."""

log = logging.getLogger("afxdpd")


class ExitCode(enum.IntEnum):
    """What the process answers with; the numbers are those of the Go plugin."""

    NORMAL = 0
    CONFIGURATION = 1
    LOGGING = 2
    HOST_CHECK = 3
    POOLS = 4
    KIND_NETWORK = 5


class ConfigError(Exception):
    """The configuration file cannot be used.

    Attributes:
        errors: One line for each thing that is wrong: path in the file, rule, value.
    """

    def __init__(self, errors: Iterable[str]) -> None:
        self.errors = tuple(errors)
        super().__init__("\n".join(self.errors))


class HostError(Exception):
    """This host, or what this process may do on it, does not suffice to run the daemon."""


class KindNetworkError(Exception):
    """The network for a cluster of kind cannot be made."""


class LogFileError(Exception):
    """The log file cannot be written."""


class EndpointBusyError(Exception):
    """Another process already serves what this one was told to serve."""


class RequestError(Exception):
    """A peer asked for what it cannot have; the text is for the operator.

    Attributes:
        status: Name of the gRPC status that says so.
    """

    def __init__(self, message: str, *, status: str = "INVALID_ARGUMENT") -> None:
        if status not in StatusCode.__members__:
            raise ValueError(f"no gRPC status {status!r}")
        self.status = status
        super().__init__(message)


class RpcError(Exception):
    """A call that we made failed: the peer's answer, or that there was none.

    Attributes:
        status: Name of the gRPC status; UNAVAILABLE and DEADLINE_EXCEEDED where no answer came.
        message: What the peer says, or what happened.
    """

    def __init__(self, status: str, message: str) -> None:
        self.status = status
        self.message = message
        super().__init__(f"{status}: {message}" if message else status)


# ======================================================================================================================
# Kernel
#
# What the rest of the module sees are the classes Fd, Attachment, Xdp, Network, Host and DirectoryWatch. Calls that can
# wait for the kernel (attaching waits for an RCU grace period, dumps for the RTNL lock) say "blocks": they are for
# worker threads. All others return at once.
# ======================================================================================================================

POSIX_ACL = "system.posix_acl_access"
"""The extended attribute that is a file's ACL."""
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
"""What the kernel says when there are too many files or too little memory: it passes."""
NLM_F_REQUEST, NLM_F_DUMP_INTR, NLM_F_DUMP = 0x1, 0x10, 0x300
NLMSG_ERROR, NLMSG_DONE = 2, 3
"""Flags and types of netlink messages, see netlink(7)."""
RTM_NEWLINK, RTM_DELLINK, RTM_GETLINK = 16, 17, 18
RTM_NEWADDR, RTM_DELADDR, RTM_GETADDR = 20, 21, 22
RTM_NEWROUTE, RTM_DELROUTE, RTM_GETROUTE = 24, 25, 26
RTM_NEWNEXTHOP, RTM_DELNEXTHOP, RTM_GETNEXTHOP = 104, 105, 106
RTMGRP_LINK = 0x1
RTMGRP_IPV4_IFADDR, RTMGRP_IPV4_ROUTE = 0x10, 0x40
RTMGRP_IPV6_IFADDR, RTMGRP_IPV6_ROUTE = 0x100, 0x400
RTMGRP_NEXTHOP = 1 << 31
"""Types and multicast groups of rtnetlink(7)."""
PAIRS = ("veth", "netkit", "vxcan")
"""Kinds of devices that come in pairs."""
XDP_MODES = ("", "native", "generic", "offloaded", "several")
"""Our names of the values of IFLA_XDP_ATTACHED, see linux/if_link.h."""


def _check(result: int, what: str) -> int:
    """Returns a result of the C helper, or raises the OSError that it stands for; `what` names the object."""
    if result < 0:
        raise OSError(-result, os.strerror(-result), what)
    return result


class Fd:
    """Owner of one file descriptor.

    The number is -1 once closed, so that a late user gets EBADF and never somebody else's file.
    """

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __repr__(self) -> str:
        return f"Fd({self._fd})"

    def __enter__(self) -> Fd:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._fd >= 0:
            text = f"never closed: {self!r}"
            self.close()  # first: a warning may be an error
            warnings.warn(text, ResourceWarning, stacklevel=2)

    def fileno(self) -> int:
        """The number; it stays this object's."""
        return self._fd

    def duplicate(self) -> Fd:
        """Another descriptor of the same file, the caller's to close."""
        return Fd(os.dup(self._fd))

    def close(self) -> None:
        """Closes the descriptor; closing twice is harmless."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetDevice:
    """A network device as netlink and sysfs show it.

    Attributes:
        queues: Receive queues the device was made with; queue indices are below it.
        master: ifindex of the bridge or bond that it is enslaved to, 0 for none.
        mac: Its address, small letters; "" for none.
        driver: Name of its driver; of a virtual device the kind, such as "veth".
        bus: Where the hardware is: "pci", "virtio", "auxiliary" for a subfunction, and so on; "" of a virtual device.
        pci: PCI address of the hardware, "" for none.
        peer_elsewhere: Whether it is one end of a pair whose other end is in another network namespace.
        xdp_mode, xdp_prog_id: What is attached to it, by whomever; None and 0 for nothing.
        default_route: Whether a default route (IPv4 or IPv6, any table) leaves through it.
        addressed: Whether it has an IP address; the link-local IPv6 address, which any device gets, does not count.
            For both counts what is made on top of it, too, such as a VLAN, and the bridge of that.
        lower: ifindex of the device that it is made on top of, 0 for none.
    """

    name: str
    ifindex: int
    queues: int = 1
    master: int = 0
    lower: int = 0
    mac: str = ""
    driver: str = ""
    bus: str = ""
    pci: str = ""
    peer_elsewhere: bool = False
    xdp_mode: str | None = None
    xdp_prog_id: int = 0
    default_route: bool = False
    addressed: bool = False


class NetworkHandler(Protocol):
    """What the pools need of the network; `Network` is the real one, tests hand in another."""

    def devices(self) -> dict[str, NetDevice]:
        """See Network.devices."""

    def watch_devices(self) -> AsyncGenerator[dict[str, NetDevice], None]:
        """See Network.watch_devices."""


SYSFS = Path("/sys")


class Network:
    """The devices of this network namespace, by netlink. See rtnetlink(7).

    Messages are taken apart here, not by pyroute2: that takes ten times as long, and 12 MB of memory.

    Args:
        sysfs: Where sysfs shows the same namespace.
    """

    _HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence number, port
    _BUFFER = 1 << 18
    _EVENTS_MAX = 1000  # packets with events that are taken together

    def __init__(self, sysfs: Path = SYSFS) -> None:
        self._sysfs = sysfs
        self._hardware: dict[int, tuple[str, str, str, str]] = {}  # ifindex → name, driver, bus, pci
        self._nexthops = False  # whether a default route leads through a nexthop object

    def device(self, ifindex: int) -> NetDevice:
        """One device, without its routes. Blocks.

        Raises:
            OSError: ENODEV where there is none.
        """
        return self._device(self._request(RTM_GETLINK, self._link_request(ifindex), NLM_F_REQUEST)[0])

    def devices(self) -> dict[str, NetDevice]:
        """All devices by name. Blocks."""
        return self._named(*self._dump_all())

    async def watch_devices(self) -> AsyncGenerator[dict[str, NetDevice], None]:
        """Yields all devices by name, at once and again after each change, until closed.

        Changes that come together are one, and while they come one after another at most half the time is spent on
        them. Where the kernel could not keep up (ENOBUFS), everything is asked for again, so that what is yielded is
        always the present state.
        """
        groups = RTMGRP_LINK | RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR
        groups |= RTMGRP_IPV4_ROUTE | RTMGRP_IPV6_ROUTE | RTMGRP_NEXTHOP
        while True:
            try:
                # Bound before anything is asked for: what changes in between is seen twice, not never. After a loss
                # with a new socket: what waits in the old one is older than the answers.
                with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as events:
                    events.setblocking(False)
                    events.bind((0, groups))
                    table, routes, addresses = await trio.to_thread.run_sync(self._dump_all)
                    told: dict[str, NetDevice] | None = None
                    stale = False
                    while True:
                        begun = trio.current_time()
                        if stale:
                            routes = await trio.to_thread.run_sync(self._default_routes)
                        named = self._named(table, routes, addresses)
                        if named != told:
                            yield named
                            told = named
                        await trio.sleep(trio.current_time() - begun)
                        touched, default_route = await self._receive(events, table, addresses)
                        # The kernel tells nothing of a route that goes with its device's state or address.
                        stale = default_route or bool(touched & routes)
            except OSError as exc:
                if exc.errno == errno.ENOBUFS:
                    log.warning("netlink: events were lost, asking for all devices again")
                elif exc.errno in OUT_OF_RESOURCES:
                    log.warning("netlink: %s, asking for all devices again", exc.strerror)
                    await trio.sleep(1)
                else:
                    raise

    def _dump_all(self) -> tuple[dict[int, NetDevice], set[int], dict[int, set[bytes]]]:
        """Returns the devices by ifindex, those with default routes, and the addresses. Blocks."""
        links = self._request(RTM_GETLINK, self._link_request(), NLM_F_REQUEST | NLM_F_DUMP)
        table = {device.ifindex: device for device in map(self._device, links)}
        return table, self._default_routes(), self._addresses()

    async def _receive(
        self, events: socket.socket, table: dict[int, NetDevice], addresses: dict[int, set[bytes]]
    ) -> tuple[set[int], bool]:
        """Waits for events and applies all that are there; see _apply."""
        await trio.lowlevel.wait_readable(events)
        touched: set[int] = set()
        default_route = False
        with contextlib.suppress(BlockingIOError):
            for _ in range(self._EVENTS_MAX):
                devices, route = self._apply(events.recv(self._BUFFER), table, addresses)
                touched |= devices
                default_route = default_route or route
        return touched, default_route

    def _apply(
        self, data: bytes, table: dict[int, NetDevice], addresses: dict[int, set[bytes]]
    ) -> tuple[set[int], bool]:
        """Brings the tables up to date; returns the devices concerned, and whether a default route came or went."""
        touched: set[int] = set()
        default_route = False
        for kind, message in self._split(data):
            if kind in (RTM_NEWLINK, RTM_DELLINK) and message[16] != socket.AF_BRIDGE:
                ifindex = struct.unpack_from("=i", message, 20)[0]
                touched.add(ifindex)
                if kind == RTM_NEWLINK:
                    table[ifindex] = self._device(message)
                else:
                    for known in (table, addresses, self._hardware):
                        known.pop(ifindex, None)
            elif kind in (RTM_NEWADDR, RTM_DELADDR):
                ifindex, address = self._address(message)
                if kind == RTM_DELADDR:
                    touched.add(ifindex)
                    addresses.get(ifindex, set()).discard(address)
                elif address:
                    addresses.setdefault(ifindex, set()).add(address)
            elif kind in (RTM_NEWROUTE, RTM_DELROUTE):
                default_route = default_route or message[17] == 0  # rtm_dst_len
            elif kind in (RTM_NEWNEXTHOP, RTM_DELNEXTHOP):
                default_route = default_route or self._nexthops  # a route through it goes without a word
        return touched, default_route

    @staticmethod
    def _named(table: dict[int, NetDevice], routes: set[int], addresses: dict[int, set[bytes]]) -> dict[str, NetDevice]:
        with_route, with_address = set(routes), {ifindex for ifindex, found in addresses.items() if found}
        below = [(device.ifindex, device.lower) for device in table.values() if device.lower]
        below += [(device.master, device.ifindex) for device in table.values() if device.master]
        for marked in (with_route, with_address):
            while more := {lower for upper, lower in below if upper in marked and lower not in marked}:
                marked |= more
        named = {}
        for ifindex, device in table.items():
            default_route, addressed = ifindex in with_route, ifindex in with_address
            if default_route or addressed:
                device = dataclasses.replace(device, default_route=default_route, addressed=addressed)
            named[device.name] = device
        return named

    def _addresses(self) -> dict[int, set[bytes]]:
        """The IP addresses of each device by ifindex. Blocks."""
        addresses: dict[int, set[bytes]] = {}
        for ifindex, address in map(self._address, self._dump(RTM_GETADDR)):
            if address:
                addresses.setdefault(ifindex, set()).add(address)
        return addresses

    def _address(self, message: bytes) -> tuple[int, bytes]:
        """Returns (ifindex, prefix length and address); nothing for a link-local IPv6 address."""
        family, prefix_length, ifindex = struct.unpack_from("=BB2xI", message, 16)  # ifaddrmsg
        attributes = self._attributes(message, 24)
        address = attributes.get(2) or attributes.get(1, b"")  # IFA_LOCAL, IFA_ADDRESS
        link_local = family == socket.AF_INET6 and address[:1] == b"\xfe" and address[1] & 0xC0 == 0x80
        return ifindex, b"" if link_local else bytes([prefix_length]) + address

    def _default_routes(self) -> set[int]:
        """Ifindexes of the devices that default routes leave through, in all tables. Blocks."""
        found = set()
        nexthops: set[int] = set()
        for family in (socket.AF_INET, socket.AF_INET6):
            for message in self._dump(RTM_GETROUTE, family):
                if message[17] == 0:  # rtm_dst_len: most routes are not worth taking apart
                    attributes = self._attributes(message, 28)
                    found.add(self._number(attributes.get(4)))  # RTA_OIF
                    nexthops.add(self._number(attributes.get(30)))  # RTA_NH_ID
                    hops = attributes.get(9, b"")  # RTA_MULTIPATH
                    while len(hops) >= 8:
                        length, ifindex = struct.unpack_from("=H2xi", hops)  # rtnexthop
                        found.add(ifindex)
                        hops = hops[(max(length, 8) + 3) & ~3 :]
        self._nexthops = bool(nexthops - {0})
        if self._nexthops:
            found |= self._devices_of(nexthops)
        return found - {0}

    def _devices_of(self, nexthops: set[int]) -> set[int]:
        """Ifindexes of the devices of nexthop objects and of groups of them. Blocks. See ip-nexthop(8)."""
        members, devices = {}, {}
        for message in self._request(RTM_GETNEXTHOP, bytes(8), NLM_F_REQUEST | NLM_F_DUMP):  # nhmsg
            attributes = self._attributes(message, 24)
            identity = self._number(attributes.get(1))  # NHA_ID
            devices[identity] = self._number(attributes.get(5))  # NHA_OIF
            members[identity] = {entry[0] for entry in struct.iter_unpack("=I4x", attributes.get(2, b""))}  # NHA_GROUP
        every = nexthops.union(*(members.get(identity, ()) for identity in nexthops))
        return {devices.get(identity, 0) for identity in every}

    @staticmethod
    def _link_request(ifindex: int = 0) -> bytes:
        """What asks for a link, or for all of them, without their statistics.

        Only where IFLA_EXT_MASK is there the kernel makes room for the largest link: without it, it leaves out a link
        that is too large and all that come after it, and says nothing.
        """
        return struct.pack("=BxHiII", 0, 0, ifindex, 0, 0) + struct.pack("=HHI", 8, 29, 1 << 3)  # ifinfomsg, SKIP_STATS

    def _dump(self, kind: int, family: int = socket.AF_UNSPEC) -> list[bytes]:
        """Asks for all addresses, or all routes of a family. Blocks."""
        return self._request(kind, bytes([family, 0, 0, 0]), NLM_F_REQUEST | NLM_F_DUMP)  # rtgenmsg

    def _request(self, kind: int, request: bytes, flags: int) -> list[bytes]:
        """Sends a request and returns the messages of the answer, all of the same moment. Blocks."""
        while (messages := self._request_once(kind, request, flags)) is None:
            pass  # something has changed while it was listed, and may be missing
        return messages

    def _request_once(self, kind: int, request: bytes, flags: int) -> list[bytes] | None:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as sock:
            sock.send(self._HEADER.pack(self._HEADER.size + len(request), kind, flags, 0, 0) + request)
            messages: list[bytes] = []
            interrupted = False
            while True:
                for answer, message in self._split(sock.recv(self._BUFFER)):
                    interrupted = interrupted or bool(self._HEADER.unpack_from(message)[2] & NLM_F_DUMP_INTR)
                    if answer in (NLMSG_DONE, NLMSG_ERROR):
                        code = -struct.unpack_from("=i", message, self._HEADER.size)[0]
                        if code > 0 or answer == NLMSG_ERROR:
                            raise OSError(code, os.strerror(code), "netlink")
                        return None if interrupted else messages
                    messages.append(message)
                if not flags & NLM_F_DUMP:
                    return messages

    def _split(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yields (type, message with header) for each message in a packet."""
        offset = 0
        while offset + self._HEADER.size <= len(data):
            length, kind, *_ = self._HEADER.unpack_from(data, offset)
            yield kind, data[offset : offset + length]
            offset += (max(length, self._HEADER.size) + 3) & ~3

    @staticmethod
    def _attributes(data: bytes, offset: int = 0) -> dict[int, bytes]:
        """The attributes from an offset on by their types. See rtnetlink(7), rtattr."""
        found = {}
        while offset + 4 <= len(data):
            length, kind = struct.unpack_from("=HH", data, offset)
            found[kind & 0x3FFF] = data[offset + 4 : offset + length]  # without NLA_F_NESTED and NLA_F_NET_BYTEORDER
            offset += (max(length, 4) + 3) & ~3
        return found

    @staticmethod
    def _number(data: bytes | None) -> int:
        """The value of an attribute that is a number; 0 where there is none."""
        return int.from_bytes(data or b"", sys.byteorder)

    def _device(self, message: bytes) -> NetDevice:
        ifindex = struct.unpack_from("=i", message, 20)[0]
        link = self._attributes(message, 32)
        xdp = self._attributes(link.get(43, b""))  # IFLA_XDP
        mode = XDP_MODES[min(self._number(xdp.get(2)), len(XDP_MODES) - 1)] or None  # IFLA_XDP_ATTACHED
        programs = (self._number(xdp.get(kind)) for kind in (4, 5, 6, 7))  # IFLA_XDP_PROG_ID, of each mode if several
        kind = self._attributes(link.get(18, b"")).get(1, b"").rstrip(b"\0").decode()  # IFLA_LINKINFO, IFLA_INFO_KIND
        name = os.fsdecode(link[3].rstrip(b"\0"))  # IFLA_IFNAME
        _, driver, bus, pci = ("", kind, "", "") if kind else self._find_hardware(ifindex, name)
        return NetDevice(
            name=name,
            ifindex=ifindex,
            queues=self._number(link.get(32)) or 1,  # IFLA_NUM_RX_QUEUES
            master=self._number(link.get(10)),  # IFLA_MASTER
            # IFLA_LINK, which is the other end of a pair, and means nothing where it is in another namespace.
            lower=0 if kind in PAIRS or 37 in link else self._number(link.get(5)),
            mac=link.get(1, b"").hex(":"),  # IFLA_ADDRESS
            driver=driver,
            bus=bus,
            pci=pci,
            peer_elsewhere=37 in link,  # IFLA_LINK_NETNSID
            xdp_mode=mode,
            xdp_prog_id=next(filter(None, programs), 0) if mode else 0,
        )

    def _find_hardware(self, ifindex: int, name: str) -> tuple[str, str, str, str]:
        """Returns (name, driver, bus, PCI address) of a device; looked up once."""
        known = self._hardware.get(ifindex)
        if known is None or known[0] != name:
            device = self._sysfs / "class" / "net" / name / "device"
            driver, bus = self._target(device / "driver"), self._target(device / "subsystem")
            # virtio is a bus of its own between the device and PCI.
            slot = device.resolve().parent if bus == "virtio" else device
            pci = slot.resolve().name if self._target(slot / "subsystem") == "pci" else ""
            known = self._hardware[ifindex] = name, driver, bus, pci
        return known

    @staticmethod
    def _target(link: Path) -> str:
        """Name of what a symbolic link leads to, "" where there is none."""
        try:
            return Path(os.readlink(link)).name
        except OSError:
            return ""


class ForeignProgramError(OSError):
    """A device carries an XDP program that is not ours. It is never replaced or detached.

    Attributes:
        device: The device with what is attached to it.
    """

    def __init__(self, code: int, device: NetDevice) -> None:
        super().__init__(
            code,
            f"the XDP program with id {device.xdp_prog_id} is attached in {device.xdp_mode} mode by somebody else; "
            f"detach it (ip link set dev {device.name} xdp off, or end the process that holds its bpf_link), "
            "or take the device out of the pool",
        )
        self.device = device


@dataclass(slots=True, kw_only=True)
class Attachment:
    """A redirect program on a device and the XSKMAP behind it, as the kernel holds them.

    It owns both file descriptors. Closing it detaches the program, unless the link is pinned.

    Attributes:
        link: The bpf_link.
        xskmap: The map: key queue index, value AF_XDP socket.
        queues: Entries of the map.
        prog_id, map_id: As bpftool shows them.
        xdp_mode: "native" or "generic"; None where it was opened from a pin and is not known.
        pinned: Whether it is what is pinned for its device.
        handed_out: Whether anybody outside was ever given the map: then it can serve no other allocation.
    """

    link: Fd
    xskmap: Fd
    queues: int
    prog_id: int
    map_id: int
    xdp_mode: str | None
    pinned: bool = False
    handed_out: bool = False

    def close(self) -> None:
        """Closes both descriptors."""
        self.link.close()
        self.xskmap.close()


class XdpHandler(Protocol):
    """What the pools need of XDP; `Xdp` is the real one, tests hand in another."""

    def attach(self, ifindex: int, queues: int) -> Attachment:
        """See Xdp.attach."""

    def renew(self, attachment: Attachment) -> Attachment:
        """See Xdp.renew."""

    def ifindex(self, attachment: Attachment) -> int:
        """See Xdp.ifindex."""

    def pin(self, attachment: Attachment, pool: str, device: str) -> None:
        """See Xdp.pin."""

    def unpin(self, pool: str, device: str) -> None:
        """See Xdp.unpin."""

    def is_pinned(self, attachment: Attachment, pool: str, device: str) -> bool:
        """See Xdp.is_pinned."""

    def pinned_pools(self) -> list[str]:
        """See Xdp.pinned_pools."""

    def pinned_devices(self, pool: str) -> list[str]:
        """See Xdp.pinned_devices."""

    def pinned_map(self, pool: str, device: str) -> Path:
        """See Xdp.pinned_map."""

    def open_pinned(self, pool: str, device: str) -> Attachment:
        """See Xdp.open_pinned."""


class Xdp:
    """XDP programs, XSKMAPs and their pins under ``<bpffs>/afxdpd/<pool>/<device>/``.

    Needs CAP_BPF and CAP_NET_ADMIN, and Linux 5.9 for bpf_link. See bpf(2).
    """

    def __init__(self, bpffs: Path = BPFFS) -> None:
        self._root = bpffs / "afxdpd"
        self._network = Network()

    def probe(self) -> None:
        """Makes a map and loads the program, to see that this process may; leaves nothing.

        Raises:
            OSError: EPERM where capabilities are missing, EINVAL where the kernel is too old.
        """
        for fd in self._load(1):
            fd.close()

    def attach(self, ifindex: int, queues: int) -> Attachment:
        """Attaches a new program with a new, empty map to a device of this network namespace. Blocks.

        Native mode; generic only where the device has no native one.

        Raises:
            ForeignProgramError: A program is attached already.
            OSError: ENODEV where the device is gone, or what its driver says.

        See bpf(2), BPF_LINK_CREATE. Linux 5.9.
        """
        xskmap, program = self._load(queues)
        with program:
            try:
                link, xdp_mode = lib.uds_xdp_link_create(program.fileno(), ifindex, 0), "native"
                if link == -errno.EOPNOTSUPP:
                    link, xdp_mode = lib.uds_xdp_link_create(program.fileno(), ifindex, 1), "generic"
                if link in (-errno.EBUSY, -errno.EEXIST, -errno.EINVAL):
                    device = self._network.device(ifindex)  # ENODEV, for which the call above has EINVAL
                    if device.xdp_prog_id:
                        raise ForeignProgramError(-link, device)
                link_fd = Fd(_check(link, f"attaching XDP to ifindex {ifindex}"))
            except OSError:
                xskmap.close()
                raise
        return self._describe(link_fd, xskmap, xdp_mode)

    def renew(self, attachment: Attachment) -> Attachment:
        """Puts a new program with a new, empty map behind the link, wherever its device is. Blocks.

        The new attachment takes over the link; the old map stays its owner's to close. Former holders of that can no
        longer affect the device.

        Raises:
            OSError: ENOLINK where the device no longer exists; the old attachment is then as it was.

        See bpf(2), BPF_LINK_UPDATE. Linux 5.9.
        """
        xskmap, program = self._load(attachment.queues)
        with program:
            try:
                _check(lib.uds_link_update(attachment.link.fileno(), program.fileno()), "replacing the XDP program")
                renewed = self._describe(attachment.link, xskmap, attachment.xdp_mode)
            except OSError:
                xskmap.close()
                raise
        return renewed

    def ifindex(self, attachment: Attachment) -> int:
        """The ifindex that the device has now, in the namespace where it is now; 0 if it no longer exists."""
        return self._query(attachment.link)[1]

    def pin(self, attachment: Attachment, pool: str, device: str) -> None:
        """Pins map and link: they outlive this process. What was pinned there before is replaced.

        See bpf(2), BPF_OBJ_PIN.
        """
        directory = self._directory(pool, device)
        for path in (directory.parent, directory):
            if path.exists() and not path.is_dir():  # nothing of ours
                path.unlink()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The link comes last: where it is, everything is. Each is replaced at once, so that there is one at any time.
        for fd, name in ((attachment.xskmap, MAP_NAME), (attachment.link, "link")):
            path, new = directory / name, directory / f"{name}_new"
            new.unlink(missing_ok=True)
            _check(lib.uds_obj_pin(fd.fileno(), os.fsencode(new)), str(path))
            if path.is_dir():  # nothing of ours
                shutil.rmtree(path)
            new.replace(path)
        attachment.pinned = True

    def unpin(self, pool: str, device: str) -> None:
        """Removes what is pinned; unless this process holds the link, that detaches. Nothing there is fine."""
        directory = self._directory(pool, device)
        for path in (directory.parent, directory):
            if path.exists() and not path.is_dir():  # nothing of ours
                path.unlink()
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(directory)
        with contextlib.suppress(OSError):  # other devices of the pool are still pinned
            directory.parent.rmdir()

    def is_pinned(self, attachment: Attachment, pool: str, device: str) -> bool:
        """Whether this attachment is pinned for the device, and both pins are there."""
        directory = self._directory(pool, device)
        return attachment.pinned and (directory / "link").exists() and (directory / MAP_NAME).exists()

    def pinned_pools(self) -> list[str]:
        """Names of the pools that have a directory of pins, sorted."""
        return self._names(self._root)

    def pinned_devices(self, pool: str) -> list[str]:
        """Names of the devices that have a directory of pins, sorted."""
        return self._names(self._directory(pool))

    def pinned_map(self, pool: str, device: str) -> Path:
        """Where the map of a device is, if it is pinned."""
        return self._directory(pool, device) / MAP_NAME

    @staticmethod
    def _names(directory: Path) -> list[str]:
        try:
            return sorted(urllib.parse.unquote(entry.name) for entry in directory.iterdir() if entry.is_dir())
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return []

    def open_pinned(self, pool: str, device: str) -> Attachment:
        """Opens what is pinned for a device.

        Raises:
            OSError: ENOENT where a pin is missing, ENOLINK where the device no longer exists.

        See bpf(2), BPF_OBJ_GET.
        """
        directory = self._directory(pool, device)
        fds: list[Fd] = []
        try:
            fds.extend(self._open_pin(directory / name) for name in ("link", MAP_NAME))
            attachment = self._describe(fds[0], fds[1], None)
        except OSError:
            for fd in fds:
                fd.close()
            raise
        if self.ifindex(attachment) == 0:
            attachment.close()
            raise OSError(errno.ENOLINK, "the device no longer exists", str(directory))
        attachment.pinned = True
        attachment.handed_out = True  # by whoever pinned it, for all we know
        return attachment

    @staticmethod
    def _open_pin(path: Path) -> Fd:
        fd = lib.uds_obj_get(os.fsencode(path))
        if fd == -errno.EACCES:  # it is the pod's user's: CAP_CHOWN, which has made it so, lets us in again
            user = path.stat().st_uid
            os.chown(path, os.geteuid(), -1)
            try:
                fd = lib.uds_obj_get(os.fsencode(path))
            finally:
                os.chown(path, user, -1)
        return Fd(_check(fd, str(path)))

    def _directory(self, *names: str) -> Path:
        # bpffs refuses names with a dot.
        return self._root.joinpath(*(name.replace("%", "%25").replace(".", "%2E") for name in names))

    def _load(self, queues: int) -> tuple[Fd, Fd]:
        """Returns a new map and the program that redirects into it, the caller's to close."""
        xskmap = Fd(_check(lib.uds_xskmap_create(b"afxdpd_xsks", queues), f"creating an XSKMAP of {queues} queues"))
        try:
            program = lib.uds_redirect_prog_load(xskmap.fileno(), b"afxdpd_redir")
            return xskmap, Fd(_check(program, "loading the redirect program"))
        except OSError:
            xskmap.close()
            raise

    def _query(self, link: Fd) -> tuple[int, int]:
        """Returns (program id, ifindex)."""
        info = ffi.new("struct uds_link_info *")
        _check(lib.uds_link_query(link.fileno(), info), "asking for an XDP link")
        return info.prog_id, info.ifindex

    def _describe(self, link: Fd, xskmap: Fd, xdp_mode: str | None) -> Attachment:
        map_id = ffi.new("unsigned int *")
        queues = _check(lib.uds_xskmap_query(xskmap.fileno(), map_id), "asking for an XSKMAP")
        return Attachment(
            link=link,
            xskmap=xskmap,
            queues=queues,
            prog_id=self._query(link)[0],
            map_id=map_id[0],
            xdp_mode=xdp_mode,
        )


def pinned(xdp: XdpHandler) -> dict[str, str]:
    """What is pinned: device → pool."""
    return {device: pool for pool in xdp.pinned_pools() for device in xdp.pinned_devices(pool)}


class HostHandler(Protocol):
    """What the daemon needs of the host; `Host` is the real one, tests hand in another."""

    def check(self, bpffs: Path) -> None:
        """See Host.check."""

    def grant(self, path: Path, uid: int, permissions: int) -> None:
        """See Host.grant."""

    def user_of(self, path: Path) -> int:
        """See Host.user_of."""

    def hostname(self) -> str:
        """See Host.hostname."""

    def allows_unprivileged_bpf(self) -> bool:
        """See Host.allows_unprivileged_bpf."""


class Host:
    """The machine and what this process may do on it."""

    def hostname(self) -> str:
        """The node's name, without its domain, in small letters."""
        return socket.gethostname().partition(".")[0].lower()

    def allows_unprivileged_bpf(self) -> bool:
        """Whether processes without capabilities may use bpf(2). See sysctl kernel.unprivileged_bpf_disabled."""
        try:
            return Path("/proc/sys/kernel/unprivileged_bpf_disabled").read_bytes().strip() == b"0"
        except OSError:
            return False

    def check(self, bpffs: Path) -> None:
        """Makes sure that this host can do what the daemon does.

        Raises:
            HostError: It cannot; the text says what to do.
        """
        try:
            mounted = _filesystem_type(bpffs) == "bpf"
        except OSError:
            mounted = False
        if not mounted:
            raise HostError(
                f"{bpffs} is not a BPF file system: mount one there (mount -t bpf bpf {bpffs}), "
                "or name the place of one with --bpffs"
            )
        try:
            Xdp(bpffs).probe()
        except OSError as exc:
            if exc.errno == errno.EPERM:
                raise HostError(
                    f"{exc.filename}: not permitted: the daemon needs CAP_BPF and CAP_NET_ADMIN (or CAP_SYS_ADMIN)"
                ) from exc
            raise HostError(f"{exc.filename}: {exc.strerror}: the daemon needs Linux 5.9 or newer with BPF") from exc

    def grant(self, path: Path, uid: int, permissions: int) -> None:
        """Gives one more user access to a file: an ACL entry, or ownership where the file system has no ACLs.

        Args:
            path: The file; its owner keeps all rights, everybody else has none.
            uid: The user.
            permissions: Bits 4 read, 2 write, 1 execute.

        See acl(5); the attribute's form is in linux/posix_acl_xattr.h.
        """
        nobody = 0xFFFFFFFF  # ACL_UNDEFINED_ID; the tags are ACL_USER_OBJ, ACL_USER, ACL_GROUP_OBJ, ACL_MASK, ACL_OTHER
        entries = ((1, 7, nobody), (2, permissions, uid), (4, 0, nobody), (16, permissions, nobody), (32, 0, nobody))
        acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
        try:
            os.setxattr(path, POSIX_ACL, acl, follow_symlinks=False)
        except OSError as exc:
            if exc.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            if path.is_dir():
                path.chmod(0o711)  # we have to get in ourselves: what is in it is the user's, and nobody else's
            else:
                try:
                    os.chown(path, uid, -1, follow_symlinks=False)
                except PermissionError as exc:
                    raise OSError(exc.errno, f"cannot be given to user {uid}: that needs CAP_CHOWN", str(path)) from exc

    def user_of(self, path: Path) -> int:
        """The user that `grant` gave access to a file; 0 for none, or if the file is not there."""
        try:
            acl = os.getxattr(path, POSIX_ACL)
        except OSError:
            return path.stat().st_uid if path.exists() else 0
        return next((uid for tag, _, uid in struct.iter_unpack("<HHI", acl[4:]) if tag == 2), 0)


def _filesystem_type(path: Path) -> str:
    """The type of the file system that a path is on, "" where it cannot be told. See proc(5), mountinfo."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        mount, _, source = line.partition(" - ")
        if mount.split()[2] == number:
            return source.split()[0]
    return ""


class Place:
    """What is at a path now, told from whatever takes its place: it is held, so that its number is not used again.

    Raises:
        OSError: Nothing is there.

    See open(2), O_PATH.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = Fd(os.open(path, os.O_PATH | os.O_CLOEXEC))

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self._fd.close()

    def is_there(self) -> bool:
        """Whether it still is."""
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._fd.fileno()))
        except OSError:
            return False


class DirectoryWatch:
    """Tells when something in a directory came, went or changed its place.

    Where inotify cannot be had (its instances are exhausted), and while the directory does not exist, it is looked at
    every few seconds instead. Use it in a ``with`` block. See inotify(7).
    """

    POLL = 1.0
    """Seconds between looks where nothing can be watched."""
    LOOK = 10.0
    """Seconds after which it is looked whether the directory is another one by now, of which inotify tells nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inotify: inotify_simple.INotify | None = None
        self._identity: tuple[int, int] | None = None  # not held open, as the kernel tells of its end only then
        self._last_trouble = ""

    def __enter__(self) -> DirectoryWatch:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    async def changed(self) -> None:
        """Returns when something has happened since the last call, or might have; never misses anything."""
        if self._inotify is None:
            await trio.sleep(self.POLL)
            self._open()
            return
        flags = inotify_simple.flags
        while True:
            events = []
            with trio.move_on_after(self.LOOK) as look:
                await trio.lowlevel.wait_readable(self._inotify.fileno())
                events = list(self._inotify.read(timeout=0))
            ended = any(event.mask & (flags.IGNORED | flags.MOVE_SELF | flags.UNMOUNT) for event in events)
            if ended or self._identity != self._look():  # removed, moved or mounted over, or something above it
                self._close()
                self._open()
                return
            if not look.cancelled_caught:
                return

    def _open(self) -> None:
        flags = inotify_simple.flags
        inotify_simple._libc = ctypes.CDLL(None, use_errno=True)  # it would look for it with programs that it starts
        try:
            self._inotify = inotify_simple.INotify(nonblocking=True)
            self._inotify.add_watch(
                self._path,
                flags.CREATE | flags.DELETE | flags.MOVED_TO | flags.MOVED_FROM | flags.MOVE_SELF | flags.ONLYDIR,
            )
            self._identity = self._look()
        except OSError as exc:
            self._close()
            if exc.errno not in (errno.ENOENT, errno.ENOTDIR) and self._last_trouble != exc.strerror:
                log.warning("%s: watched by polling, since inotify says: %s", self._path, exc.strerror)
                self._last_trouble = str(exc.strerror)

    def _close(self) -> None:
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None

    def _look(self) -> tuple[int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino


PROGRAM_TIMEOUT = 10.0
"""Seconds for one run of ethtool or devlink."""


def _run_program(
    program: str, arguments: Sequence[str], timeout: float = PROGRAM_TIMEOUT
) -> subprocess.CompletedProcess[str]:
    """Runs a program without a shell, and returns its exit code and what it printed. Blocks.

    Raises:
        OSError: ENOENT where there is none, ETIMEDOUT; `filename` is the command.
    """
    command = [program, *arguments]
    log.debug("%s", " ".join(command))
    try:
        return subprocess.run(  # noqa: S603  the configuration says what is run
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env={"LC_ALL": "C", "PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")},
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise OSError(errno.ETIMEDOUT, f"not done after {timeout:g} s", " ".join(command)) from exc
    except OSError as exc:
        missing = f"there is no program {program}: install it in the daemon's image"
        text = missing if exc.errno == errno.ENOENT else str(exc.strerror)
        raise OSError(exc.errno, text, " ".join(command)) from exc


class EthtoolHandler(Protocol):
    """What the pools need of ethtool; `Ethtool` is the real one, tests hand in another."""

    def arguments(self, command: str, device: str) -> list[str]:
        """See Ethtool.arguments."""

    def apply(self, arguments: Sequence[str], remember: Callable[[list[list[str]]], None]) -> None:
        """See Ethtool.apply."""

    def undo(self, commands: Sequence[Sequence[str]]) -> None:
        """See Ethtool.undo."""


ETHTOOL_SHOWS = {
    **dict.fromkeys(("-K", "--features", "--offload"), "-k"),
    **dict.fromkeys(("-L", "--set-channels"), "-l"),
    **dict.fromkeys(("-G", "--set-ring"), "-g"),
    **dict.fromkeys(("-C", "--coalesce"), "-c"),
    **dict.fromkeys(("-A", "--pause"), "-a"),
    "--set-priv-flags": "--show-priv-flags",
}
"""ethtool's options that set what another one shows, and that other one."""
ETHTOOL_INDIRECTION = ("-X", "--set-rxfh-indir", "--rxfh")
ETHTOOL_RULES = ("-N", "-U", "--config-nfc", "--config-ntuple")


class Ethtool:
    """Runs ethtool commands on devices, and undoes them. See ethtool(8).

    What undoes a command is ethtool commands again, as lists of arguments, so that it can be kept in a file.

    Settings that ethtool shows by name (features, channels, rings, coalescing, pause, private flags) are put back to
    what they were. The whole state is made known before the command runs, since a command can change more than it
    names; afterwards, only what it did change. `undo` sets what differs from the state it finds and nothing else: what
    was known before a crash is too much, and drivers refuse even the present value of what they do not support.

    An indirection table goes back to the driver's default, a flow rule is deleted. Nothing else is undone.
    """

    def __init__(self, timeout: float = PROGRAM_TIMEOUT) -> None:
        self._timeout = timeout
        self._warned: set[tuple[str, ...]] = set()

    @staticmethod
    def arguments(command: str, device: str) -> list[str]:
        """The arguments that a command of the configuration stands for; it may begin with the program's name."""
        words = command.split()
        return [word.replace("-device-", device) for word in words[words[0] == "ethtool" :]]

    @staticmethod
    def is_command(command: str) -> bool:
        """Whether it is an option of ethtool with a device, which is all that can be said without running it."""
        words = Ethtool.arguments(command, "device") if command.split() else []
        return len(words) > 1 and words[0].startswith("-")

    @staticmethod
    def is_undone(arguments: Sequence[str]) -> bool:
        """Whether `undo` can undo all that the command does."""
        option, _, *settings = arguments
        if option in ETHTOOL_INDIRECTION:
            return not {"context", "hkey", "hfunc"} & set(settings)
        return option in ETHTOOL_SHOWS or (option in ETHTOOL_RULES and settings[:1] == ["flow-type"])

    def apply(self, arguments: Sequence[str], remember: Callable[[list[list[str]]], None]) -> None:
        """Runs a command. Blocks.

        Args:
            arguments: What `arguments` returned.
            remember: Called with what undoes the command, before it runs where that is known by then; a later call
                replaces an earlier one. What it was called with last holds also where this method raises.

        Raises:
            OSError: EIO with what ethtool says, ENOENT where there is no ethtool, ETIMEDOUT; `filename` is the command.
        """
        option, device, *settings = arguments
        show = ETHTOOL_SHOWS.get(option)
        before = self._state(show, device) if show else {}
        rule = option in ETHTOOL_RULES and settings[:1] == ["flow-type"]
        if show:
            remember([[option, device, *itertools.chain(*before.items())]])
        elif option in ETHTOOL_INDIRECTION and "context" not in settings:
            remember([[option, device, "default"]])
        elif rule and "loc" in settings[:-1]:
            remember([[option, device, "delete", settings[settings.index("loc") + 1]]])
        try:
            answer = self._run(arguments)
        except OSError as exc:
            if not show and exc.errno != errno.ETIMEDOUT:
                remember([])  # it did nothing: a rule in that place is somebody else's
            raise
        if show:
            changed = self._differing(before, self._state(show, device))
            remember([[option, device, *changed]] if changed else [])
        elif rule and (added := re.search(r"Added rule with ID (\d+)", answer)):
            remember([[option, device, "delete", added[1]]])
        if not self.is_undone(arguments) and (option, *settings) not in self._warned:
            self._warned.add((option, *settings))
            log.warning("ethtool %s: not undone at release, or not all of it", " ".join(arguments))

    def undo(self, commands: Sequence[Sequence[str]]) -> None:
        """Runs what `apply` said to remember, the newest first; one that fails stops no other. Blocks.

        Raises:
            OSError: As from `apply`; where several failed, the text names them all.
        """
        errors = []
        for command in reversed(commands):
            try:
                self._undo(command)
            except OSError as exc:
                errors.append(exc)
        if errors:
            others = (f"; {exc.filename}: {exc.strerror}" for exc in errors[1:])
            raise OSError(errors[0].errno, f"{errors[0].strerror}{''.join(others)}", errors[0].filename)

    def _undo(self, command: Sequence[str]) -> None:
        option, device, *settings = command
        show = ETHTOOL_SHOWS.get(option)
        if not show:
            try:
                self._run(command)
            except OSError as exc:
                if option not in ETHTOOL_RULES or os.strerror(errno.ENOENT) not in str(exc.strerror):
                    raise  # else the rule is gone already
            return
        wanted = dict(zip(settings[::2], settings[1::2], strict=True))
        if differing := self._differing(wanted, self._state(show, device)):
            try:
                self._run([option, device, *differing])
            except OSError:
                # -K fails also where it changes what is requested and nothing else; what counts is the state.
                if self._differing(wanted, self._state(show, device)):
                    raise

    @staticmethod
    def _differing(wanted: Mapping[str, str], present: Mapping[str, str]) -> list[str]:
        """The settings that are not as wanted, as arguments: name, value, name, value."""
        return [word for name, value in wanted.items() if present.get(name) != value for word in (name, value)]

    def _state(self, show: str, device: str) -> dict[str, str]:
        """What can be set, by the names that it is set by. Blocks.

        This reads the text for people: ethtool 6.1 has JSON for two of the kinds. Of a feature it takes what is
        requested, since whether it is on may depend on others.
        """
        # Coalescing has lines for two: "Adaptive RX: off  TX: off".
        text = re.sub(r"(?m)^(.+) RX: (\S+) +TX: (\S+)$", r"\1 RX: \2\n\1 TX: \3", self._run([show, device]))
        state: dict[str, str] = {}
        group = ""
        pattern = r"(?m)^(\t?)(\S.*?) *:[ \t]+(\S+)(?: \[(?:requested )?(\w+)\])?$"
        for indent, name, value, note in re.findall(pattern, text):
            if show not in ("-k", "--show-priv-flags"):
                name = name.lower().replace(" ", "-").replace("autonegotiate", "autoneg")
                name = name.replace("-frame-", "-frames-").replace("-buff-len", "-buf-len")
            if indent:
                state.pop(group, None)  # it sums up those below it, and sets them all
            else:
                group = name
            state[name] = note or value  # the maximum comes first, what is set later, by the same name
        fixed = ("fixed", "n/a")
        return {name: value for name, value in state.items() if value not in fixed and "-negotiated" not in name}

    def _run(self, arguments: Sequence[str]) -> str:
        """Returns what ethtool prints. Blocks."""
        done = _run_program("ethtool", arguments, self._timeout)
        # ethtool before 6.3 answers 0 also where a rule is refused, and complains where it needs a second try.
        refused = arguments[0] in ETHTOOL_RULES and done.stderr and "Added rule" not in done.stdout
        if done.returncode != 0 or refused:
            said = re.sub(r"\s*\n\s*", "; ", done.stderr.strip() or done.stdout.strip())
            raise OSError(errno.EIO, said or f"exit status {done.returncode}", " ".join(done.args))
        return done.stdout


IFF_UP = 1
"""Bit in the flags of a device that is up. See netdevice(7)."""


@contextlib.contextmanager
def _rtnetlink() -> Iterator[Callable[..., list[Any]]]:
    """Yields ``call(device, method, **arguments)``: one request of pyroute2's IPRoute, and the answer. Blocks.

    What the kernel refuses is an OSError that names the device. IPRoute runs an event loop: not for a thread with one.
    """
    from pyroute2 import IPRoute, NetlinkError

    def call(device: str, method: str, *command: str, **arguments: object) -> list[Any]:
        log.debug("netlink: %s: %s %s %s", device, method, " ".join(command), arguments)
        while True:
            try:
                answer = list(getattr(ipr, method)(*command, **arguments))
            except NetlinkError as exc:
                raise OSError(exc.code, os.strerror(exc.code), device) from exc
            if not any(message["header"]["flags"] & NLM_F_DUMP_INTR for message in answer):
                return answer  # else something changed while it was listed, and may be missing; pyroute2 does not look

    with IPRoute() as ipr:
        yield call


def _links(call: Callable[..., list[Any]]) -> dict[str, Any]:
    """The devices of this namespace by name, as pyroute2 has them. Blocks."""
    return {link.get_attr("IFLA_IFNAME"): link for link in call("all", "get_links")}


def _kind(link: Any) -> str:
    """The type of a device as `ip link add` takes it; "physical" for those that it cannot make."""
    return link.get_nested("IFLA_LINKINFO", "IFLA_INFO_KIND") or "physical"


def _delete(call: Callable[..., list[Any]], link: Any) -> None:
    """Deletes a device; that it has gone meanwhile is fine. Blocks."""
    try:
        call(link.get_attr("IFLA_IFNAME"), "link", "del", index=link["index"])
    except OSError as exc:
        if exc.errno != errno.ENODEV:
            raise


class KindHandler(Protocol):
    """What the daemon needs of the network for kind; `KindNetwork` is the real one, tests hand in another."""

    def missing(self, devices: Mapping[str, NetDevice]) -> bool:
        """See KindNetwork.missing."""

    def set_up(self) -> list[str]:
        """See KindNetwork.set_up."""

    def remove(self, keep: Collection[str]) -> None:
        """See KindNetwork.remove."""


class KindNetwork:
    """What a node in a container has for NICs: veth pairs, one end for pods and one on a bridge.

    It is told by its names; nothing of it is kept here. A pair whose pod end is not here is with a pod.
    """

    BRIDGE = "afxdp-kind-br"
    ADDRESS, PREFIX = "192.168.1.1", 24
    PAIRS: Mapping[str, str] = {"veth6": "veth7", "veth8": "veth9", "veth10": "veth11", "veth12": "veth13"}
    """The end for pods, and the end on the bridge."""

    @classmethod
    def missing(cls, devices: Mapping[str, NetDevice]) -> bool:
        """Whether there is something to make again, told from the devices that are here."""
        bridge = devices.get(cls.BRIDGE)
        return bridge is None or any(
            port not in devices or devices[port].master != bridge.ifindex for port in cls.PAIRS.values()
        )

    def set_up(self) -> list[str]:
        """Makes what is missing, puts right what is there, and returns both for the log. Blocks.

        Raises:
            OSError: EEXIST where a name is taken by something else; nothing is changed then.
        """
        made = []
        with _rtnetlink() as call:
            links = _links(call)
            self._check(links)
            if self.BRIDGE not in links:
                call(self.BRIDGE, "link", "add", ifname=self.BRIDGE, kind="bridge")
                made.append(f"bridge {self.BRIDGE}")
                links = _links(call)
            bridge = links[self.BRIDGE]["index"]
            addresses = call(self.BRIDGE, "get_addr", index=bridge)
            if (self.ADDRESS, self.PREFIX) not in {(a.get_attr("IFA_LOCAL"), a["prefixlen"]) for a in addresses}:
                call(self.BRIDGE, "addr", "add", index=bridge, address=self.ADDRESS, prefixlen=self.PREFIX)
                made.append(f"address {self.ADDRESS}/{self.PREFIX}")
            for pod, port in self.PAIRS.items():
                if port not in links:
                    call(port, "link", "add", ifname=port, kind="veth", master=bridge, peer=pod)
                    made.append(f"pair {pod} and {port}")
                elif links[port].get_attr("IFLA_MASTER") != bridge:
                    call(port, "link", "set", index=links[port]["index"], master=bridge)
                    made.append(f"{port} on the bridge")
            for name, link in _links(call).items():
                if name in (self.BRIDGE, *self.PAIRS, *self.PAIRS.values()) and not link["flags"] & IFF_UP:
                    call(name, "link", "set", index=link["index"], state="up")
        return made

    def remove(self, keep: Collection[str]) -> None:
        """Deletes the pairs whose pod end is here and not in `keep`, then the bridge if nothing is on it. Blocks."""
        with _rtnetlink() as call:
            links = _links(call)
            for pod, port in self.PAIRS.items():
                if pod in links and pod not in keep and self._is_pair(links, pod, port):
                    _delete(call, links[pod])  # by this end: once a pod has it, there is no such ifindex here
            links = _links(call)
            bridge = links.get(self.BRIDGE)
            masters = {link.get_attr("IFLA_MASTER") for link in links.values()}
            if bridge and _kind(bridge) == "bridge" and bridge["index"] not in masters:
                _delete(call, bridge)

    @staticmethod
    def _is_pair(links: Mapping[str, Any], pod: str, port: str) -> bool:
        """Whether the bridge's end is here, and its peer is the pod end or, without one, in another namespace."""
        if port not in links or _kind(links[port]) != "veth":
            return False
        if links[port].get_attr("IFLA_LINK_NETNSID") is not None:  # the peer's namespace, if it is not this one
            return pod not in links
        return pod in links and bool(links[pod]["index"] == links[port].get_attr("IFLA_LINK"))

    @classmethod
    def _check(cls, links: Mapping[str, Any]) -> None:
        """Raises OSError with EEXIST where a name is taken by something else."""
        advice = "delete or rename it (see ip-link(8)), or set kindCluster to false"
        bridge = links.get(cls.BRIDGE)
        if bridge and _kind(bridge) != "bridge":
            raise OSError(errno.EEXIST, f"a {_kind(bridge)} device has the bridge's name: {advice}", cls.BRIDGE)
        for pod, port in cls.PAIRS.items():
            if (pod in links or port in links) and not cls._is_pair(links, pod, port):
                name, peer = (pod, port) if pod in links else (port, pod)
                what = f"this {_kind(links[name])} device is not the end of a veth pair with {peer}: {advice}"
                raise OSError(errno.EEXIST, what, name)


class DevlinkHandler(Protocol):
    """What the pools need of devlink; `Devlink` is the real one, tests hand in another."""

    def exists(self, pci: str, number: int) -> bool:
        """See Devlink.exists."""

    def add(self, pci: str, number: int) -> None:
        """See Devlink.add."""

    def delete(self, pci: str, number: int) -> None:
        """See Devlink.delete."""

    def netdev(self, pci: str, number: int) -> str | None:
        """See Devlink.netdev."""

    def rename(self, old: str, new: str) -> None:
        """See Devlink.rename."""


def _read_line(path: Path) -> str:
    """What a file of sysfs holds, "" if it is not there."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


class Devlink:
    """Subfunctions (SF) of NICs, by iproute2's program; each is a devlink port of flavour pcisf. All methods block.

    An SF is told by the PCI address of its NIC and its number; nothing is kept here.

    See devlink-port(8). Linux 5.12; for ice 6.12, in switchdev mode.
    """

    def __init__(self, program: str = "devlink", sysfs: Path = SYSFS) -> None:
        self._program = program
        self._sysfs = sysfs

    def exists(self, pci: str, number: int) -> bool:
        """Whether there is an SF with this number, wherever its network device is."""
        return self._find(pci, number) is not None

    def add(self, pci: str, number: int) -> None:
        """Makes an SF where there is none with this number, and activates it. Its network device may come later.

        Raises:
            OSError: What the program says, with the command as filename. An SF that was made is deleted again.
        """
        found = self._find(pci, number)
        if found is None:
            function = pci.rpartition(".")[2]
            self._run("port", "add", f"pci/{pci}", "flavour", "pcisf", "pfnum", function, "sfnum", str(number))
        port, _ = found or self._find(pci, number) or (None, {})
        if port is None:
            raise OSError(errno.ENODEV, f"devlink made SF {number}, but does not show it", f"pci/{pci}")
        try:
            self._run("port", "function", "set", port, "state", "active")
        except OSError:
            if found is None:
                with contextlib.suppress(OSError):
                    self._run("port", "del", port)
            raise

    def delete(self, pci: str, number: int) -> None:
        """Deletes an SF, and with it its network device; nothing there is fine."""
        found = self._find(pci, number)
        if found is not None:
            self._run("port", "del", found[0])

    def netdev(self, pci: str, number: int) -> str | None:
        """The name of an SF's network device, None while it is not in this network namespace.

        It lies below the auxiliary device that has the number (mlx5), or beside the NIC's own device, with the address
        that devlink shows (ice). The device that devlink shows is another one: the switch's port to the SF.
        """
        nic = self._sysfs / "bus/pci/devices" / pci
        for sfnum in nic.glob("*/sfnum"):
            if _read_line(sfnum) == str(number):
                return next((device.name for device in sfnum.parent.glob("net/*")), None)
        _, shown = self._find(pci, number) or ("", {})
        address = shown.get("function", {}).get("hw_addr", "")
        devices = nic.glob("net/*") if address.strip("0:") else ()  # zeros: the driver will choose one
        return next((device.name for device in devices if _read_line(device / "address") == address), None)

    def rename(self, old: str, new: str) -> None:
        """Renames a network device. One that is up is down meanwhile, which Linux needs before 6.2.

        Raises:
            OSError: ENODEV without the old one, EEXIST where the new name is taken, ENAMETOOLONG.
        """
        if len(os.fsencode(new)) > DEVICE_NAME_MAX:
            raise OSError(
                errno.ENAMETOOLONG, f"longer than the {DEVICE_NAME_MAX} bytes of a network device's name", new
            )
        with _rtnetlink() as call:
            link = call(old, "link", "get", ifname=old)[0]
            if link["flags"] & IFF_UP:
                call(old, "link", "set", index=link["index"], state="down")
            try:
                call(new, "link", "set", index=link["index"], ifname=new)
            finally:
                if link["flags"] & IFF_UP:
                    call(new, "link", "set", index=link["index"], state="up")

    def _find(self, pci: str, number: int) -> tuple[str, dict[str, Any]] | None:
        """The devlink port of an SF, and what is shown of it."""
        wanted = (int(pci.rpartition(".")[2]), number)
        for port, shown in json.loads(self._run("-j", "port", "show"))["port"].items():
            if port.startswith(f"pci/{pci}/") and (shown.get("pfnum"), shown.get("sfnum")) == wanted:
                return port, shown
        return None

    def _run(self, *arguments: str) -> str:
        """Runs the program and returns what it printed."""
        done = _run_program(self._program, arguments)
        if done.returncode:
            text = "; ".join(line.strip() for line in done.stderr.splitlines()) or f"exit status {done.returncode}"
            answer = text.rpartition(": ")[2]  # "devlink answers: Operation not supported"
            code = next((code for code in errno.errorcode if os.strerror(code) == answer), errno.EIO)
            raise OSError(code, text, " ".join(done.args))
        return done.stdout


# ======================================================================================================================
# Configuration
#
# The file is read leaf by leaf, so that one reading finds everything that is wrong with it. Each type carries its rule:
# the check and the words for it stand side by side, and the JSON Schema comes from the same place.
# ======================================================================================================================

T = TypeVar("T")


def _rule(description: str, *, schema: dict[str, Any] | None = None, **limits: Any) -> msgspec.Meta:
    """A rule for a value: its words, and what msgspec and JSON Schema make of it."""
    return msgspec.Meta(description=description, extra_json_schema=schema, **limits)


END = r"$(?!\n)"  # Python's $ lets a newline follow
Flag = Annotated[bool, _rule("true or false")]
PoolName = Annotated[str, _rule(RESOURCE_NAME_RULE, pattern=rf"^{RESOURCE_NAME}{END}")]
DeviceName = Annotated[str, _rule("1 to 50 letters, digits, '-' and '_'", pattern=rf"^[A-Za-z0-9_-]{{1,50}}{END}")]
PciAddress = Annotated[
    str,
    _rule(
        "a PCI address such as '0000:81:00.1'",
        pattern=rf"^[0-9A-Fa-f]{{4}}:[0-9A-Fa-f]{{2}}:[0-9A-Fa-f]{{2}}\.[0-7]{END}",
    ),
]
MacAddress = Annotated[str, _rule("a MAC address", pattern=rf"^[0-9A-Fa-f]{{2}}(:[0-9A-Fa-f]{{2}}){{5}}{END}")]
Hostname = Annotated[str, _rule("1 to 63 letters, digits and '-'", pattern=rf"^[A-Za-z0-9-]{{1,63}}{END}")]
EthtoolCommand = Annotated[
    str,
    _rule(
        "an option of ethtool with -device-, of letters, digits, spaces and '-:./'", pattern=rf"^[A-Za-z0-9 :./-]+{END}"
    ),
    Ethtool.is_command,
]
LogFile = Annotated[
    str, _rule("letters, digits, '-' and '_' with .log or .txt at the end", pattern=rf"^[A-Za-z0-9_-]+\.(log|txt){END}")
]
PrimaryLimit = Annotated[int, _rule("0 (all) to 10", ge=0, le=10)]
SecondaryLimit = Annotated[int, _rule("0 (unset) to 64", ge=0, le=64)]
UdsTimeout = Annotated[
    int,
    _rule(
        "-1 (never), 0 (30 seconds) or 30 to 300 seconds",
        ge=-1,
        le=300,
        schema={"anyOf": [{"enum": [-1, 0]}, {"minimum": 30}]},
    ),
    lambda value: value <= 0 or value >= 30,
]
Uid = Annotated[
    int,
    _rule("0, or 1000 to 256000", ge=0, le=256000, schema={"anyOf": [{"const": 0}, {"minimum": 1000}]}),
    lambda value: value == 0 or value >= 1000,
]
Mode = Annotated[Literal["primary", "cdq"], _rule("'primary' or 'cdq'")]
LogLevel = Annotated[Literal["error", "warning", "info", "debug"], _rule("'error', 'warning', 'info' or 'debug'")]


class _Struct(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An object of the file.

    Attributes:
        schema: What JSON Schema can say of `problems`.
    """

    schema: ClassVar[dict[str, Any]] = {}

    @staticmethod
    def problems(_: Mapping[str, Any], /) -> Iterator[tuple[str, str]]:
        """Yields (path below this object, what is wrong) about values that are right one by one.

        Given are the values that the file has; None stands for one that is wrong, also within them.
        """
        yield from ()


class DeviceConfig(_Struct, frozen=True, kw_only=True):
    """One device, by exactly one of its identities.

    Attributes:
        secondary: How many subfunctions of it a cdq pool takes; 0 for all that are left.
    """

    name: DeviceName = ""
    pci: PciAddress = ""
    mac: MacAddress = ""
    secondary: SecondaryLimit = 0

    schema: ClassVar[dict[str, Any]] = {"oneOf": [{"required": [key]} for key in ("name", "pci", "mac")]}

    @staticmethod
    def problems(values: Mapping[str, Any], /) -> Iterator[tuple[str, str]]:
        """See _Struct.problems."""
        if len(values.keys() & {"name", "pci", "mac"}) != 1:
            yield "", "needs exactly one of name, pci and mac"

    def __str__(self) -> str:
        return self.name or self.pci or self.mac

    @property
    def wanted(self) -> tuple[str, str]:
        """The attribute of a NetDevice that tells, and its value."""
        if self.name:
            return "name", self.name
        return ("pci", self.pci.lower()) if self.pci else ("mac", self.mac.lower())

    def matches(self, device: NetDevice) -> bool:
        """Whether a device is the one, or one of those with the same MAC address."""
        attribute, value = self.wanted
        return bool(getattr(device, attribute) == value)


class DriverConfig(_Struct, frozen=True, kw_only=True):
    """All devices of a driver.

    Attributes:
        primary: How many devices at most on this node; 0 for all.
        secondary: How many subfunctions of each a cdq pool takes; 0 for all that are left.
        exclude_devices: Devices that are not taken.
        exclude_addressed: Whether devices that have an IP address are not taken.
    """

    name: DeviceName
    primary: PrimaryLimit = 0
    secondary: SecondaryLimit = 0
    exclude_devices: tuple[DeviceConfig, ...] = ()
    exclude_addressed: Flag = False


class NodeConfig(_Struct, frozen=True, kw_only=True):
    """What a pool takes on one node, instead of what it takes elsewhere."""

    hostname: Hostname
    devices: tuple[DeviceConfig, ...] = ()
    drivers: tuple[DriverConfig, ...] = ()


class PoolOptions(_Struct, frozen=True, kw_only=True):
    """What is said of a pool but for its devices: the resource ``afxdp/<name>``.

    Attributes:
        mode: "primary": it gives away whole devices; "cdq": subfunctions of them.
        uds_server_disable: Whether pods get no socket, and no XDP program unless the map is shared as a file.
        bpf_map_pinning_enable: Whether pods get the map as a file.
        uds_timeout: Seconds after which an idle connection of a pod is closed: -1 never, 0 the default of 30.
        uds_fuzz: Whether each socket server is fed random requests, for its development.
        requires_unprivileged_bpf: Whether it takes nothing where the kernel refuses BPF to unprivileged processes.
        uid: The pod's user, who gets access to socket and map besides root; 0 for nobody else.
        ethtool_cmds: Arguments of ethtool for each device that is allocated.
    """

    name: PoolName
    mode: Mode
    uds_server_disable: Flag = False
    bpf_map_pinning_enable: Flag = False
    uds_timeout: UdsTimeout = 0
    uds_fuzz: Flag = False
    requires_unprivileged_bpf: Flag = False
    uid: Uid = 0
    ethtool_cmds: tuple[EthtoolCommand, ...] = ()

    @property
    def filters(self) -> tuple[str, ...]:
        """The ethtool filters of its devices, which are ethtool_cmds."""
        return self.ethtool_cmds

    @property
    def environment_name(self) -> str:
        """The variable that tells a container its devices."""
        return "AFXDP_DEVICES_" + re.sub(r"[-.]", "_", self.name).upper()

    @property
    def idle_timeout(self) -> float:
        """Seconds, inf for never."""
        return {-1: float("inf"), 0: 30.0}.get(self.uds_timeout, float(self.uds_timeout))

    @property
    def has_socket(self) -> bool:
        """Whether its pods get a socket."""
        return not self.uds_server_disable

    @property
    def has_program(self) -> bool:
        """Whether its devices get a program and a map."""
        return self.has_socket or self.bpf_map_pinning_enable


class PoolRules(PoolOptions, frozen=True, kw_only=True):
    """A pool as the file has it.

    Attributes:
        devices: Devices that it takes.
        drivers: Drivers whose devices it takes.
        nodes: What it takes on these nodes instead.
    """

    devices: tuple[DeviceConfig, ...] = ()
    drivers: tuple[DriverConfig, ...] = ()
    nodes: tuple[NodeConfig, ...] = ()

    schema: ClassVar[dict[str, Any]] = {
        "anyOf": [{"required": [key], "properties": {key: {"minItems": 1}}} for key in ("devices", "drivers", "nodes")],
        "if": {"properties": {"mode": {"const": "cdq"}}},
        "then": {"properties": {"ethtoolCmds": {"maxItems": 0}}},
    }

    @staticmethod
    def problems(values: Mapping[str, Any], /) -> Iterator[tuple[str, str]]:
        """See _Struct.problems."""
        if not any(values.get(key, ()) != () for key in ("devices", "drivers", "nodes")):
            yield "", "takes nothing: needs devices, drivers or nodes"
        if values.get("mode") == "cdq" and values.get("ethtool_cmds"):
            yield "ethtoolCmds", "not in cdq mode"
        first: dict[str, int] = {}
        for index, node in enumerate(values.get("nodes") or ()):
            hostname = node.hostname.lower() if node and node.hostname else ""
            if hostname and (other := first.setdefault(hostname, index)) != index:
                yield f"nodes[{index}].hostname", f"the same as nodes[{other}].hostname: {hostname!r}"

    def on_node(self, hostname: str) -> tuple[tuple[DeviceConfig, ...], tuple[DriverConfig, ...]]:
        """Devices and drivers that it takes on a node."""
        here: PoolRules | NodeConfig = next(
            (node for node in self.nodes if node.hostname.lower() == hostname.lower()), self
        )
        return here.devices, here.drivers


class PluginConfig(_Struct, frozen=True, kw_only=True):
    """The whole file.

    Attributes:
        log_file: Name of a file in the directory for logs; "" for none.
        kind_cluster: Whether the devices are veths that the daemon makes itself, for a cluster of kind.
    """

    pools: tuple[PoolRules, ...]
    log_file: LogFile = ""
    log_level: LogLevel = "info"
    kind_cluster: Flag = False

    schema: ClassVar[dict[str, Any]] = {
        "if": {"required": ["kindCluster"], "properties": {"kindCluster": {"const": True}}},
        "then": {"properties": {"pools": {"maxItems": 1}}},
    }

    @staticmethod
    def problems(values: Mapping[str, Any], /) -> Iterator[tuple[str, str]]:
        """See _Struct.problems."""
        pools = list(values.get("pools") or ())
        for key, what in (("name", "the name"), ("environment_name", "the environment variable")):
            first: dict[str, int] = {}
            for index, pool in enumerate(pools):
                if pool is None or pool.name is None:
                    continue
                value = getattr(pool, key)
                other = first.setdefault(value, index)
                if other != index and (key == "name" or pools[other].name != pool.name):
                    yield f"pools[{index}].name", f"{pool.name!r} has {what} of pools[{other}].name: {value!r}"
        if values.get("kind_cluster") and len(pools) > 1:
            yield "kindCluster", f"with it there can be one pool, not {len(pools)}"


def get_plugin_config(
    file: str | os.PathLike[str], *, problems: Callable[[PluginConfig], Iterable[str]] = lambda _: ()
) -> PluginConfig:
    """Reads the configuration file.

    Args:
        file: Its path; JSON, keys in any case.
        problems: Says what else is wrong with it; None in the configuration stands for what is wrong already.

    Returns:
        The configuration, complete and right.

    Raises:
        ConfigError: It cannot be read, or something in it is wrong: one line for each thing.
    """
    try:
        if stat.S_IFMT(os.stat(file).st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
            raise ConfigError([f"{file}: not a regular file"])  # which might have us wait
        raw = json.loads(Path(file).read_bytes())
    except OSError as exc:
        hint = ": name the configuration with --config" if exc.errno == errno.ENOENT else ""
        raise ConfigError([f"{file}: {exc.strerror}{hint}"]) from exc
    except (ValueError, RecursionError) as exc:
        hint = " (JSON has no comments, and no comma before ] or })" if isinstance(exc, json.JSONDecodeError) else ""
        raise ConfigError([f"{file}: not JSON: {exc}{hint}"]) from exc
    errors: list[str] = []
    config: PluginConfig | None = _parse(raw, PluginConfig, "", errors)
    if config is not None:
        errors += problems(config)
    if config is None or errors:
        raise ConfigError(f"{file}: {error}" for error in errors)
    for index, pool in enumerate(config.pools):
        for number, command in enumerate(pool.ethtool_cmds):
            if "-device-" not in command:
                log.warning("pools[%d].ethtoolCmds[%d]: names no -device-: %r", index, number, command)
    return config


def get_config_schema() -> dict[str, Any]:
    """The JSON Schema of the file. It spells keys as they are documented; the daemon takes them in any case."""
    schema = msgspec.json.schema(PluginConfig)
    for kind in (PluginConfig, PoolRules, DeviceConfig):
        schema["$defs"][kind.__name__] |= kind.schema
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "afxdpd's configuration", **schema}


def _parse(raw: object, kind: Any, path: str, errors: list[str]) -> Any:
    """Makes a value of a type of the file out of JSON; appends to `errors` and returns None where that fails."""
    if isinstance(kind, type) and issubclass(kind, _Struct):
        return _parse_object(raw, kind, path, errors)
    if get_origin(kind) is tuple:
        if not isinstance(raw, list):
            errors.append(f"{path}: not a list: {_shown(raw)}")
            return None
        return tuple(_parse(item, get_args(kind)[0], f"{path}[{index}]", errors) for index, item in enumerate(raw))
    meta, *rules = kind.__metadata__
    with contextlib.suppress(msgspec.ValidationError, UnicodeEncodeError):  # a lone surrogate is no UTF-8
        value = msgspec.convert(raw, kind)
        if all(rule(value) for rule in rules):
            return value
    errors.append(f"{path}: not {meta.description}: {_shown(raw)}")
    return None


def _parse_object(raw: object, kind: type[_Struct], path: str, errors: list[str]) -> Any:
    if not isinstance(raw, dict):
        errors.append(f"{path or 'the file'}: not an object: {_shown(raw)}")
        return None
    prefix = f"{path}." if path else ""
    fields, types = _fields(kind)
    values: dict[str, object] = {}
    for key, value in raw.items():
        info = fields.get(key.lower())
        if info is not None:
            if value is None or (value == "" and isinstance(info.default, str)):
                continue  # as if it were not there, which is what it means to the Go plugin
            if info.name in values:
                log.warning("%s%s: is there more than once, the last one counts", prefix, info.encode_name)
            values[info.name] = _parse(value, types[info.name], prefix + info.encode_name, errors)
        elif not key.startswith("$"):  # as "$schema", for editors
            nearest = difflib.get_close_matches(key.lower(), fields, n=1)
            hint = f", did you mean {fields[nearest[0]].encode_name}?" if nearest else ""
            log.warning("%s%s: unknown key, ignored%s", prefix, ascii(key)[1:-1][:80], hint)
    for info in fields.values():
        if info.required and info.name not in values:
            errors.append(f"{prefix}{info.encode_name}: is missing")
    for below, problem in kind.problems(values):
        errors.append(f"{prefix}{below}: {problem}" if below else f"{path}: {problem}")
    missing = dict.fromkeys((info.name for info in fields.values() if info.required), None)
    return kind(**{**missing, **values})  # where there are errors, only for the problems of what is above it


@functools.cache
def _fields(kind: type[_Struct]) -> tuple[dict[str, msgspec.structs.FieldInfo], dict[str, Any]]:
    """The keys of an object in small letters, and the types of its attributes."""
    return {info.encode_name.lower(): info for info in msgspec.structs.fields(kind)}, get_type_hints(
        kind, include_extras=True
    )


def _shown(raw: object) -> str:
    try:
        text = ascii(raw) if isinstance(raw, str) else json.dumps(raw, ensure_ascii=True)
    except RecursionError:  # json.loads goes a few levels deeper
        text = "something nested too deeply"
    return text if len(text) <= 80 else f"{text[:77]}..."


RESERVED_NAMES = ("eno", "eth", "docker", "flannel", "cni")
"""A driver rule takes no device whose name begins so: on many nodes it is the node's own."""
SUBFUNCTION_DRIVERS = ("ice",)
"""Drivers whose devices can be divided."""
SUBFUNCTIONS_MAX = 64
"""Subfunctions of one device, over all pools."""
EVERYTHING = "everything"
"""Stands for a device's name where a pool is passed over as a whole."""


class Subfunction(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a device: made when it is allocated, its name known before."""

    primary: str
    pci: str
    number: int

    @property
    def name(self) -> str:
        """The network device that it has or will have."""
        return f"{self.primary}sf{self.number}"


def printable(name: str) -> str:
    """A device's name for people; the kernel takes almost any bytes."""
    return name if name.isprintable() else ascii(name)[1:-1]


def is_device_name(name: str) -> bool:
    """Whether a network device can be called so. See dev_valid_name() of Linux."""
    short = 0 < len(os.fsencode(name)) <= DEVICE_NAME_MAX
    return short and name not in (".", "..") and name.isprintable() and not re.search(r"[/:\s]", name)


def part_or_whole(device: NetDevice, devices: Mapping[str, NetDevice]) -> NetDevice | Subfunction:
    """A device of a pod, or the subfunction that it is by name, driver and PCI address."""
    name, _, number = device.name.rpartition("sf")
    primary = devices.get(name)
    if primary is None or device.driver not in SUBFUNCTION_DRIVERS or not number.isdecimal():
        return device
    return Subfunction(primary=name, pci=device.pci, number=int(number)) if primary.pci == device.pci else device


class PoolConfig(PoolOptions, frozen=True, kw_only=True):
    """A pool on this host.

    Attributes:
        devices: What it takes, by name: devices of the host, or in cdq mode subfunctions of them.
    """

    devices: Mapping[str, NetDevice | Subfunction] = {}


def get_pool_configs(file: str | os.PathLike[str], net: NetworkHandler, host: HostHandler) -> list[PoolConfig]:
    """Reads the configuration file and finds the devices of its pools on this host. Blocks.

    Raises:
        ConfigError: See get_plugin_config.
        OSError: The network cannot be looked at.
    """
    config = get_plugin_config(file)
    return choose_devices(config, net.devices(), host)[0]


def choose_devices(
    config: PluginConfig,
    devices: Mapping[str, NetDevice],
    host: HostHandler,
    allocated: Mapping[str, str] | None = None,
    known: Mapping[str, NetDevice] | None = None,
) -> tuple[list[PoolConfig], dict[str, dict[str, str]]]:
    """Decides which pool takes which device.

    Args:
        config: The pools; the first one that claims a device has it.
        devices: All devices of the host by name.
        host: Whose name and abilities count.
        allocated: Name → pool of the devices that pods have, wherever they are; they stay with their pool.
        known: Those of them that are elsewhere, as they were here.

    Returns:
        The pools in order, and pool name → device → why it was passed over.
    """
    choice = _Choice(config, devices, allocated or {}, known or {})
    hostname, unprivileged_bpf = host.hostname(), host.allows_unprivileged_bpf()
    pools = []
    passed = {}
    for pool in config.pools:
        if pool.requires_unprivileged_bpf and not unprivileged_bpf:
            why = {EVERYTHING: "requiresUnprivilegedBpf: kernel.unprivileged_bpf_disabled is not 0 on this node"}
            taken = choice.keep(pool)
        else:
            taken, why = choice.choose(pool, *pool.on_node(hostname))
            if not any(pool.on_node(hostname)):
                why[EVERYTHING] = f"its rules for the node {hostname} list nothing"
        options = {name: getattr(pool, name) for name in PoolOptions.__struct_fields__}
        pools.append(PoolConfig(**options, devices=taken))
        passed[pool.name] = why
    return pools, passed


class _Choice:
    """What the pools have taken so far."""

    def __init__(
        self,
        config: PluginConfig,
        devices: Mapping[str, NetDevice],
        allocated: Mapping[str, str],
        known: Mapping[str, NetDevice],
    ) -> None:
        self._devices = devices
        self._allocated = allocated
        self._known = known
        self._kind_cluster = config.kind_cluster
        self._parts = {part.rpartition("sf")[0]: part for part in sorted(allocated, reverse=True)}
        self._first_at: dict[str, int] = {}  # PCI address → the lowest ifindex there
        for device in devices.values():
            if device.pci:
                self._first_at[device.pci] = min(device.ifindex, self._first_at.get(device.pci, device.ifindex))
        self._holder: dict[str, PoolRules] = {}
        self._divided: dict[str, int] = {}  # device → how many subfunctions of it have been taken

    def keep(self, pool: PoolRules) -> dict[str, NetDevice | Subfunction]:
        """The devices here that are the pool's in any case: its pods have them."""
        names = sorted(name for name, owner in self._allocated.items() if owner == pool.name and name in self._devices)
        self._holder.update(dict.fromkeys(names, pool))
        return {name: part_or_whole(self._devices[name], self._devices) for name in names}

    def choose(
        self, pool: PoolRules, devices: Collection[DeviceConfig], drivers: Iterable[DriverConfig]
    ) -> tuple[dict[str, NetDevice | Subfunction], dict[str, str]]:
        """Takes what the rules of a pool say; returns that, and device → why it was passed over."""
        taken = self.keep(pool)
        passed: dict[str, str] = {}
        named = set()
        away = {
            name: self._known.get(name)
            for name, owner in self._allocated.items()
            if owner == pool.name and name not in self._devices
        }
        candidates = [*self._devices.values(), *filter(None, away.values())]
        index: dict[tuple[str, str], list[NetDevice]] = collections.defaultdict(list)
        for attribute in {rule.wanted[0] for rule in devices}:
            for device in candidates:
                index[attribute, getattr(device, attribute)].append(device)
        for rule in devices:
            # An address may be that of several: the hardware's, and that of devices made of it or on top of it later.
            matching = sorted(index.get(rule.wanted, ()), key=lambda device: (not device.bus, device.ifindex))
            if not matching and rule.name not in away:
                passed[str(rule)] = "no such device in the host's network namespace"
            for device in matching[:1]:
                named.add(device.name)
                if device.name in self._devices and (why := self._take(pool, device, rule.secondary, taken)):
                    passed[device.name] = why
            named.add(rule.name)
            for device in matching[1:]:
                passed[device.name] = f"{rule} stands for {matching[0].name}, which has the same address"
        for driver in drivers:
            if not any(device.driver == driver.name for device in candidates):
                passed[f"driver {driver.name}"] = "no device here has it"
            found = sorted((d for d in self._devices.values() if d.driver == driver.name), key=lambda d: d.name)
            # A device that is with a pod since before this daemon started counts for each driver: it may be its.
            count = sum(
                name not in named and (device is None or device.driver == driver.name)
                for name, device in away.items()
                if pool.mode == "primary"
            )
            count += sum(d.name in taken and d.name not in named for d in found)
            for device in found:
                if device.name in named or self._holder.get(device.name) is pool:
                    continue
                why = self._passed_by(driver, device)
                if not why and driver.primary and count >= driver.primary:
                    why = f"primary: {driver.name} has {driver.primary} devices in the pool already"
                why = why or self._take(pool, device, driver.secondary, taken)
                if why:
                    passed[device.name] = why
                else:
                    count += 1
        return taken, {name: why for name, why in passed.items() if name not in taken}

    def _passed_by(self, rule: DriverConfig, device: NetDevice) -> str:
        """Why a driver rule does not take a device of its driver; "" if it does."""
        if excluded := next((str(other) for other in rule.exclude_devices if other.matches(device)), ""):
            return f"excludeDevices: {excluded}"
        if rule.exclude_addressed and device.addressed:
            return "excludeAddressed: it has an IP address"
        if prefix := next((prefix for prefix in RESERVED_NAMES if device.name.startswith(prefix)), ""):
            return f"its name begins with {prefix}: only a pool that names it under devices takes it"
        if device.bus == "auxiliary" or self._is_part(device):
            return "it is a subfunction: only a pool that names it under devices takes it"
        if not device.bus:
            if not (self._kind_cluster and device.driver == "veth"):
                return "it is not physical: only a pool that names it under devices takes it"
            if device.peer_elsewhere:
                return "its other end is in another network namespace: it is how some pod is connected"
        return ""

    def _is_part(self, device: NetDevice) -> bool:
        """Whether a device is a subfunction, or the switch's side of one: made later, with the same address on PCI."""
        return device.driver in SUBFUNCTION_DRIVERS and self._first_at.get(device.pci, math.inf) < device.ifindex

    def _take(
        self, pool: PoolRules, device: NetDevice, secondary: int, taken: dict[str, NetDevice | Subfunction]
    ) -> str:
        """Gives a device, or so many subfunctions of it, to a pool; returns why not, or ""."""
        name = device.name
        holder, owner = self._holder.get(name), self._allocated.get(name)
        if holder is pool:
            return ""
        if holder is not None and not (pool.mode == holder.mode == "cdq"):
            return f"the pool {holder.name} has it"
        if owner is not None:
            return f"a pod has it from the pool {owner}"
        if why := _never_taken(device):
            return why
        if pool.mode == "primary":
            if held := self._parts.get(name):
                return f"a pod has {held} of it from the pool {self._allocated[held]}"
            self._holder[name] = pool
            taken[name] = device
            return ""
        if device.driver not in SUBFUNCTION_DRIVERS or not device.pci:
            return f"cdq: it cannot be divided; the devices of these drivers can: {', '.join(SUBFUNCTION_DRIVERS)}"
        first = self._divided.get(name, 0) + 1
        last = min(first + secondary - 1 if secondary else SUBFUNCTIONS_MAX, SUBFUNCTIONS_MAX)
        if last < first:
            return f"cdq: its {SUBFUNCTIONS_MAX} subfunctions are in other pools"
        self._holder[name] = pool
        self._divided[name] = last
        for number in range(first, last + 1):
            part = Subfunction(primary=name, pci=device.pci, number=number)
            if len(part.name) > DEVICE_NAME_MAX:
                return f"cdq: {part.name} would be longer than {DEVICE_NAME_MAX} bytes: give {name} a shorter name"
            if self._allocated.get(part.name, pool.name) == pool.name:
                taken[part.name] = part
        return ""


def _never_taken(device: NetDevice) -> str:
    """The rule by which no configuration can claim a device; "" where there is none."""
    if device.name == "lo":
        return "the loopback device is never taken"
    if not device.name.isprintable():  # kubelet could not be told of it
        return "its name is not UTF-8, or has control characters"
    if device.default_route:
        return "a default route leaves through it"
    if device.master:
        return "it is enslaved to a bridge or bond"
    return ""


# ======================================================================================================================
# Handshake
#
# The conversation of a pod with the socket of its device, version 0.1, as a protocol without I/O: a packet goes in,
# what it asks for comes out. One reply belongs to each packet. /connect has to be answered with /host_ok before
# anything else is granted; /fin ends the conversation.
# ======================================================================================================================

HANDSHAKE_VERSION = b"0.1"
HOST_OK, HOST_NAK, ERROR = b"/host_ok", b"/host_nak", b"/error"
FD_ACK, FD_NAK = b"/fd_ack", b"/fd_nak"
BUSY_POLL_ACK, BUSY_POLL_NAK = b"/config_busy_poll_ack", b"/config_busy_poll_nak"
FIN_ACK, NAK = b"/fin_ack", b"/nak"

REQUEST_MAX = 512
"""Bytes in a request; the longest that means something has some 320."""
FDS_MAX = 253
"""Descriptors in one packet, see unix(7)."""
HOSTNAME_MAX = 63
"""Where kubelet cuts a pod's name to make its hostname."""
HOSTNAME_CUTS = (31, 54)
"""Where CNDP and DPDK cut the hostname that they send."""


@dataclass(frozen=True, slots=True)
class Connect:
    """Who says it is there; to be checked, and answered with HOST_OK, HOST_NAK or ERROR."""

    hostname: str


@dataclass(frozen=True, slots=True)
class GetVersion:
    """Asks for HANDSHAKE_VERSION."""


@dataclass(frozen=True, slots=True)
class GetXskMap:
    """Asks for the XSKMAP of a device: FD_ACK with the fd, or FD_NAK."""

    device: str


@dataclass(frozen=True, slots=True)
class ConfigBusyPoll:
    """Asks for busy polling on the socket sent along: timeout in µs, budget in packets."""

    timeout_us: int
    budget: int


@dataclass(frozen=True, slots=True)
class Fin:
    """Ends the conversation: FIN_ACK, then the connection is closed."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """Nothing that the protocol knows, or not now: NAK. `why` is for the log."""

    why: str


Request = Connect | GetVersion | GetXskMap | ConfigBusyPoll | Fin | Malformed


def parse_request(packet: bytes, *, connected: bool) -> Request:
    """Says what one packet asks for.

    Args:
        packet: As received.
        connected: Whether /connect was answered with /host_ok on this connection.
    """
    try:
        text = packet.decode("ascii")
    except UnicodeDecodeError:
        return Malformed("not ASCII")
    verb, *fields = text.split(",")
    fields = [field.removeprefix(" ") for field in fields]
    if not all(part and part.isprintable() for part in fields):
        return Malformed("an empty or unprintable field")
    request: Request
    match verb, fields:
        case "/connect", [hostname]:
            request = Connect(hostname)
        case "/version", []:
            request = GetVersion()
        case "/xsk_map_fd", [device]:
            request = GetXskMap(device)
        case "/config_busy_poll", [timeout, budget] if _is_int(timeout) and _is_int(budget):
            request = ConfigBusyPoll(int(timeout), int(budget))
        case "/fin", []:
            request = Fin()
        case _:
            request = Malformed("unknown request, or a known one with the wrong fields")
    if not connected and not isinstance(request, Connect | Malformed):
        return Malformed("/connect has to come first")
    return request


def hostname_matches(hostname: str, pod: str) -> bool:
    """Whether a pod of that name would introduce itself so: kubelet and the client libraries cut what is long."""
    own = pod[:HOSTNAME_MAX].rstrip("-.")
    return hostname in (pod, own) or any(len(hostname) == cut and own.startswith(hostname) for cut in HOSTNAME_CUTS)


def _is_int(text: str) -> bool:
    return re.fullmatch(r"-?[0-9]{1,9}", text) is not None


# ======================================================================================================================
# gRPC
#
# purerpc has HTTP/2 and gRPC framing; what it lacks on Unix sockets is added here by subclassing: calls end when the
# peer resets them or goes away, deadlines hold on both sides, our exceptions become statuses, memory is given back, and
# what a peer can make us keep or compute is bounded.
# This section knows messages and methods and nothing of what they mean.
# ======================================================================================================================

GRPC_MESSAGE_MAX = 4 << 20
"""Bytes in one message; grpc-go takes no more either."""
GRPC_CALLS_MAX = 100
"""Calls at the same time on one connection."""
GRPC_CONNECTIONS_MAX = 32
"""Connections to one server. A further one takes the place of the one that has been longest without a call; where each
has a call, as kubelet's always does, the further one is closed."""
FRAME_MAX = 1 << 14
"""Bytes in a frame, either way: the least that HTTP/2 allows, since frames are kept whole; purerpc takes 16 MiB."""
HEADERS_MAX = 1 << 13
"""Bytes in the headers of a call, packed, and unpacked by HTTP/2's count, which adds 32 to each. A number in them takes
hpack a time that grows with the square of its length: this much 5 ms, a quarter of a MiB 4 s."""
UNFINISHED_FACTOR = 4
"""How many of the largest messages a peer may send on one connection before their calls take them: its window."""
UNSENT_MAX = 1 << 20
"""Bytes that wait until a peer reads. Answers wait for room; a peer that has twice as much made without reading,
of answers to PING for instance, loses its connection."""
SETTINGS_MAX = 64
"""Kinds of settings that are kept for a peer; HTTP/2 has six."""
CLOSED_MAX = 1000
"""Ended calls of a connection of which it is still known how they have ended."""

M = TypeVar("M", bound=Message)

logging.getLogger("purerpc").setLevel(logging.ERROR)  # it warns at every normal end of a stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A method that a server serves.

    Attributes:
        request_type: The message it takes.
        call: ``async def (request) -> reply``.
        stream: Instead of call: ``async def (request)`` that yields replies.
        timeout: Seconds after which a call is cut off, whatever the client says; inf for never.
    """

    request_type: type[Message]
    call: Callable[[Any], Awaitable[Message]] | None = None
    stream: Callable[[Any], AsyncGenerator[Message, None]] | None = None
    timeout: float = 10.0


Services = Mapping[str, Mapping[str, Method]]
"""Full service name → method name → method."""


class _Transport:
    """A trio stream in the form in which purerpc uses anyio's."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream

    async def send(self, data: bytes) -> None:
        await self._stream.send_all(data)

    async def receive(self, max_bytes: int) -> bytes:
        try:
            data = await self._stream.receive_some(max_bytes)
        except trio.BrokenResourceError as exc:
            raise anyio.BrokenResourceError from exc
        if not data:
            raise anyio.EndOfStream
        return bytes(data)


class _SocketWrapper(SocketWrapper):  # type: ignore[misc]  # purerpc has no types
    @staticmethod
    def _set_socket_options(_: object) -> None:
        """Leaves out purerpc's TCP options."""

    def wake(self) -> None:
        """Has sent what is queued."""
        self._flush_event.set()

    async def flush(self) -> None:
        """The same, and waits until there is room for more."""
        self.wake()
        while self._grpc_connection.unsent > UNSENT_MAX:
            await self._grpc_connection.room.wait()


class _Decoder(hpack.Decoder):  # type: ignore[misc]  # hpack has no types
    """hpack's decoder of headers, for short ones."""

    def decode(self, data: bytes, raw: bool = False) -> Any:
        if len(data) > HEADERS_MAX:
            raise hpack.OversizedHeaderListError(f"{len(data)} bytes of headers")
        return super().decode(data, raw)


class _Messages:
    """The messages of a call, put together from the pieces in which they arrive.

    purerpc's own inflates a message before it measures it, and keeps each piece, however small, as it is.
    """

    def __init__(self, message_max: int) -> None:
        self._message_max = message_max
        self._data = bytearray()
        self._length = 0  # as flow control counts it

    def data_received(self, data: bytes, flow_controlled_length: int) -> None:
        """Takes a piece."""
        self._data += data
        self._length += flow_controlled_length

    def read_all_complete_messages_flowcontrol(self) -> Iterator[tuple[bytes | None, int]]:
        """Yields the messages that are complete, None for a compressed one, and their lengths for flow control.

        Raises:
            MessageTooLargeError: One that has begun is too large.
        """
        while len(self._data) >= 5:
            compressed, size = struct.unpack_from(">BI", self._data)
            if size > self._message_max:
                raise MessageTooLargeError(f"a message of {size} bytes, {self._message_max} are allowed")
            if len(self._data) < 5 + size:
                return
            message = bytes(self._data[5 : 5 + size])
            del self._data[: 5 + size]
            length, self._length = self._length - len(self._data), len(self._data)
            yield None if compressed else message, length


class _Connection(GRPCConnection):  # type: ignore[misc]
    """purerpc's state of an HTTP/2 connection, with bounds, and with what it drops made known.

    Attributes:
        room: Set when what was queued is on its way.
    """

    MAX_CONCURRENT_STREAMS = GRPC_CALLS_MAX
    MAX_INBOUND_FRAME_SIZE = FRAME_MAX
    MAX_HEADER_LIST_SIZE = HEADERS_MAX

    def __init__(self, config: GRPCConfiguration, message_max: int) -> None:
        super().__init__(config)
        self._message_max = message_max
        self._unread: collections.Counter[int] = collections.Counter()  # stream id → bytes that nobody has taken
        self.room = trio.Event()
        self.h2_connection.decoder = _Decoder(HEADERS_MAX)
        self.h2_connection._closed_streams._size_limit = CLOSED_MAX
        self.h2_connection._frame_dispatch_table[h2.connection.WindowUpdateFrame] = self._window_update_received

    def initiate_connection(self) -> None:
        self.h2_connection.initiate_connection()
        window = UNFINISHED_FACTOR * self.config.max_message_length
        self.h2_connection.increment_flow_control_window(window - self.h2_connection.inbound_flow_control_window)

    @property
    def unsent(self) -> int:
        """Bytes that are queued."""
        return len(self.h2_connection._data_to_send)

    def data_to_send(self, amount: int | None = None) -> bytes:
        room, self.room = self.room, trio.Event()
        room.set()
        return bytes(super().data_to_send(amount))

    def flow_control_window(self, stream_id: int) -> int:
        return min(int(super().flow_control_window(stream_id)), FRAME_MAX)

    def receive_data(self, data: bytes) -> list[Any]:
        """Takes what has arrived and returns what it means.

        Raises:
            Exception: Of many types: the connection is of no more use.
        """
        events = list(super().receive_data(data))
        begun = self.h2_connection.incoming_buffer.data  # of a frame; h2 looks at its size when it is complete
        if len(begun) >= 3 and int.from_bytes(begun[:3]) > FRAME_MAX:
            raise ProtocolError("a frame that is too large")
        if len(self.h2_connection.remote_settings) > SETTINGS_MAX:
            raise ProtocolError("too many settings")
        if self.unsent > 2 * UNSENT_MAX:
            raise ProtocolError("the peer does not read")
        encoder = self.h2_connection.encoder
        if encoder.header_table_size > 4096:  # it need not be as large as the peer allows
            encoder.header_table_size = 4096
        return events

    def acknowledge_received_data(self, stream_id: int, flow_controlled_length: int) -> None:
        self._unread[stream_id] -= flow_controlled_length
        super().acknowledge_received_data(stream_id, flow_controlled_length)

    def forget(self, stream_id: int) -> None:
        """Gives back what is kept for a call that has ended, and its part of the connection's window."""
        self.message_read_buffers.pop(stream_id, None)
        unread = self._unread.pop(stream_id, 0)
        if unread > 0:
            self.h2_connection.acknowledge_received_data(unread, stream_id)

    def _window_update_received(self, frame: Any) -> tuple[list[Any], list[Any]]:
        """Like h2's, but the window of a call that has ended is ignored, as RFC 9113 wants it in section 5.1."""
        try:
            frames, events = self.h2_connection._receive_window_update_frame(frame)
        except h2.exceptions.StreamClosedError:
            return [], []
        return frames, events

    def _request_received(self, event: Any) -> list[Any]:
        events = list(super()._request_received(event))
        self.message_read_buffers[event.stream_id] = _Messages(self._message_max)
        return events

    def _response_received(self, event: Any) -> list[Any]:
        events = list(super()._response_received(event))
        if event.stream_id in self.message_read_buffers:
            self.message_read_buffers[event.stream_id] = _Messages(self._message_max)
        return events

    def _stream_reset(self, event: Any) -> list[Any]:
        self.message_read_buffers.pop(event.stream_id, None)
        return [event]

    def _data_received(self, event: Any) -> list[Any]:
        if event.stream_id in self.message_read_buffers:
            self._unread[event.stream_id] += event.flow_controlled_length
            return list(super()._data_received(event))
        # The rest of a call that has ended here: it only has to count for the connection's window.
        self.h2_connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        return []


class _Call(GRPCProtoStream):  # type: ignore[misc]
    """One call of a connection: purerpc's stream, with an end.

    Attributes:
        scope: Cancelled when the peer resets the call.
        ended: Whether nothing more can arrive or be answered.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.scope = trio.CancelScope()
        self.ended = False
        self._messages = 0

    def take(self, event: Any) -> None:
        """Takes over what has arrived for this call."""
        if isinstance(event, h2.events.StreamReset):
            self.end()
            self.scope.cancel()
            return
        if isinstance(event, MessageReceived):
            self._messages += 1
            if self._messages > 2:  # the second is one too many already
                self._grpc_connection.acknowledge_received_data(self._stream_id, event.flow_controlled_length)
                return
        self._incoming_events[0].send_nowait(event)
        if isinstance(event, RequestEnded | ResponseEnded):
            self._close_remote()

    async def receive_event(self) -> Any:
        """Waits for the next thing that has arrived.

        Raises:
            UnsupportedMessageEncodingError: It is a compressed message.
            DecodeError: It is a message of another type.
        """
        event = await self._receive()
        if isinstance(event, MessageReceived):
            if event.data is None:
                raise UnsupportedMessageEncodingError("messages must not be compressed")
            event.data = self._incoming_message_type.FromString(event.data)
        return event

    def end(self) -> None:
        """No more events: whoever waits for one gets EndOfStream; nothing is kept."""
        self.ended = True
        self._incoming_events[0].close()
        self._grpc_socket._streams.pop(self._stream_id, None)
        self._grpc_connection.forget(self._stream_id)
        self._socket.wake()

    def release(self) -> None:
        """Ends the call and gives back its memory; nobody may wait for its events any more."""
        self.end()
        self._incoming_events[1].close()


class _GrpcSocket(GRPCProtoSocket):  # type: ignore[misc]
    """purerpc's socket over any trio stream; the stream stays its opener's."""

    StreamClass = _Call

    def __init__(self, stream: trio.abc.Stream, *, client_side: bool, message_max: int = GRPC_MESSAGE_MAX) -> None:
        contextlib.AsyncExitStack.__init__(self)
        config = GRPCConfiguration(client_side=client_side, max_message_length=max(GRPC_MESSAGE_MAX, message_max))
        self._grpc_connection = _Connection(config, message_max)
        self._socket = _SocketWrapper(self._grpc_connection, _Transport(stream))
        self._receive_buffer_size = 1 << 14  # so much is looked at before others get their turn
        self._streams: dict[int, _Call] = {}

    async def _listen(self) -> AsyncGenerator[_Call, None]:
        """Like purerpc's, but what is still sent for a call that has ended ends nothing else.

        What has been read at once is handed out at once, without a checkpoint: no call can end in the middle of it.
        """
        while True:
            try:
                data = await self._socket.recv(self._receive_buffer_size)
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return
            events = self._grpc_connection.receive_data(data)
            self._socket.wake()
            for event in events:
                if isinstance(event, RequestReceived):
                    call = self._allocate_stream(event.stream_id)
                    call.take(event)
                    yield call
                elif isinstance(event, WindowUpdated):
                    streams = [event.stream_id] if event.stream_id else list(self._streams)
                    for call in (self._streams[each] for each in streams if each in self._streams):
                        await call._set_flow_control_update()
                elif event.stream_id in self._streams:
                    self._streams[event.stream_id].take(event)

    async def _reader_thread(self) -> None:
        async with contextlib.aclosing(self._listen()) as calls:
            async for call in calls:
                call.release()
                raise ProtocolError("a request from a server")
        for call in list(self._streams.values()):  # the peer has gone: no answer will come
            call.end()


class GrpcServer:
    """Serves methods to any number of connections.

    Attributes:
        connections: How many are open.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self.connections = 0
        self._idle: dict[trio.CancelScope, None] = {}  # connections without a call, the one that is so longest first
        self._changed = trio.Event()

    async def serve_unix(
        self,
        listener: trio.SocketListener,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> NoReturn:
        """Serves a listening socket until cancelled.

        Resource handling: The listener is closed at the end, and with it every connection.

        Error handling: What a peer does can end its own connection, and idle ones where there are too many.
        """
        async with listener, trio.open_nursery() as nursery:
            task_status.started()
            while True:
                try:
                    stream = await listener.accept()
                    if await self._room():
                        await nursery.start(self.serve_connection, stream)
                    else:
                        await stream.aclose()
                        log.debug("gRPC: connection refused: %d are open, each with a call", GRPC_CONNECTIONS_MAX)
                except OSError as exc:
                    if exc.errno not in OUT_OF_RESOURCES:
                        raise
                    log.warning("gRPC: cannot accept connections: %s", exc.strerror)
                    await trio.sleep(1)

    async def _room(self) -> bool:
        """Makes room for a connection, at the cost of one that has no call; returns whether there is."""
        while self.connections >= GRPC_CONNECTIONS_MAX:
            if not self._idle:
                return False
            next(iter(self._idle)).cancel()
            await self._changed.wait()
        return True

    async def serve_connection(
        self, stream: trio.abc.Stream, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serves one connection until the peer closes it, and closes the stream."""
        self.connections += 1
        scope = trio.CancelScope()
        self._idle[scope] = None
        task_status.started()
        try:
            async with stream:
                with scope:
                    await self._serve_connection(stream, scope)
        finally:
            self._idle.pop(scope, None)
            self.connections -= 1
            changed, self._changed = self._changed, trio.Event()
            changed.set()

    async def wait_no_connections(self) -> None:
        """Returns when no connection is open."""
        while self.connections:
            await self._changed.wait()

    async def _serve_connection(self, stream: trio.abc.Stream, scope: trio.CancelScope) -> None:
        try:
            async with trio.open_nursery() as nursery, _GrpcSocket(stream, client_side=False) as grpc_socket:

                async def serve_call(call: _Call) -> None:
                    await self._serve_call(call)
                    if len(nursery.child_tasks) == 1:  # this one
                        self._idle[scope] = None

                async with contextlib.aclosing(grpc_socket._listen()) as calls:
                    async for call in calls:
                        if len(nursery.child_tasks) >= 2 * GRPC_CALLS_MAX:  # ended, but not for us
                            call.release()
                            raise ProtocolError("too many calls")  # noqa: TRY301  handled as what h2 raises
                        self._idle.pop(scope, None)
                        nursery.start_soon(serve_call, call)
                nursery.cancel_scope.cancel()  # the peer is gone: nobody waits for what is still done and sent for it
        # Whatever purerpc and h2 make of what a peer sends, in groups and in many types: it ends this connection.
        except* Exception as group:  # noqa: BLE001
            log.debug("gRPC: connection dropped: %r", _only_error(group))

    async def _serve_call(self, call: _Call) -> None:
        status = Status(StatusCode.OK)
        try:
            with call.scope:
                try:
                    with _as_status():
                        await self._answer(call)
                except RpcFailedError as exc:
                    status = exc.status
                if not call.ended:  # in this very moment, by a reset
                    with contextlib.suppress(h2.exceptions.H2Error):  # the peer has said goodbye
                        await call.close(status)
        finally:
            call.release()

    async def _answer(self, call: _Call) -> None:
        start = await call.receive_event()
        method = self._services.get(start.service_name, {}).get(start.method_name)
        if method is None:
            raise RequestError(f"no method {start.service_name}/{start.method_name}", status="UNIMPLEMENTED")
        timeout = method.timeout if start.timeout is None else min(method.timeout, start.timeout.total_seconds())
        call.expect_message_type(method.request_type)
        with _as_status(start.method_name), trio.fail_after(max(timeout, 0)):
            request = await extract_message_from_singleton_stream(call)
            if method.stream is not None:
                await call.start_response()
                async with contextlib.aclosing(method.stream(request)) as replies:
                    async for reply in replies:
                        await call.send_message(reply)
            elif method.call is not None:
                reply = await method.call(request)
                await call.start_response()
                await call.send_message(reply)


@contextlib.contextmanager
def _as_status(method: str = "gRPC") -> Iterator[None]:
    """The one place where exceptions become statuses."""
    try:
        yield
    except Exception as exc:
        raise RpcFailedError(_status_of(_only_error(exc), method)) from exc


def _status_of(exc: BaseException, method: str) -> Status:
    """What a caller is told; what is no answer to anybody is a bug and goes to the log."""
    match exc:
        case RpcFailedError(status=status):
            return status
        case RequestError(status=name):
            return Status(StatusCode[name], str(exc)[:1000].encode(errors="backslashreplace").decode())
        case trio.TooSlowError():
            return Status(StatusCode.DEADLINE_EXCEEDED, f"{method} did not end in time")
        case OSError():
            log.warning("%s: %s", method, exc)
            return Status(StatusCode.FAILED_PRECONDITION, f"{method}: {exc}"[:1000])
        case h2.exceptions.H2Error():  # no answer can be sent, the peer does not wait for one
            return Status(StatusCode.UNAVAILABLE, f"{method}: the caller has gone")
        case MessageTooLargeError():  # ours: what a peer sends is measured before there is a call
            log.warning("%s: the answer is too large: %s", method, exc)
            return Status(StatusCode.RESOURCE_EXHAUSTED, f"{method}: the answer is too large")
        case UnsupportedMessageEncodingError():
            return Status(StatusCode.UNIMPLEMENTED, f"{method}: {exc}")
        case DecodeError() | GRPCError() | anyio.EndOfStream():
            return Status(StatusCode.INVALID_ARGUMENT, f"{method}: not one well-formed message")
    log.error("%s failed, which is a bug", method, exc_info=exc)
    return Status(StatusCode.INTERNAL, f"{method} failed, see the log of the plugin")


def _only_error(exc: BaseException) -> BaseException:
    """What a group holds if it holds a single exception, else the group."""
    while isinstance(exc, BaseExceptionGroup) and len(exc.exceptions) == 1:
        exc = exc.exceptions[0]
    return exc


@contextlib.contextmanager
def _single_errors() -> Iterator[None]:
    """Around a nursery: an error of one task is raised as it is, not in a group."""
    try:
        yield
    except ExceptionGroup as group:
        error = _only_error(group)
        if error is group:
            raise
        raise error from None


def open_unix_listener(path: Path, *, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """Makes a listening Unix socket at a path, whose directory exists; a file there is replaced.

    Returns:
        The non-blocking socket, the caller's to close. The file stays.

    Raises:
        OSError: From socket(2), bind(2), listen(2).
    """
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        listener.bind(os.fspath(path))
        listener.listen(128)
        listener.setblocking(False)
    except OSError as exc:
        listener.close()
        raise OSError(exc.errno, exc.strerror or str(exc), os.fspath(path)) from exc
    return listener


def refuse_busy(path: Path) -> None:
    """Makes sure that no process listens on a Unix stream socket; a file that a dead one left is fine.

    Raises:
        EndpointBusyError: One does.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except BlockingIOError:
            pass  # it listens, and its queue is full
        except OSError:
            return
    raise EndpointBusyError(f"{path}: another process serves this; end it first")


async def call_unix(
    path: Path,
    method: str,
    request: Message,
    reply_type: type[M],
    *,
    timeout: float,
    reply_max: int = GRPC_MESSAGE_MAX,
) -> M:
    """Makes one call on a connection of its own to a gRPC server on a Unix socket.

    Args:
        path: The socket.
        method: ``package.Service/Method``.
        request: The message to send.
        reply_type: The type of the one that is expected.
        timeout: Seconds for all of it.
        reply_max: Bytes in the reply.

    Raises:
        RpcError: The server's status, UNAVAILABLE where there is none or it went away, DEADLINE_EXCEEDED,
            RESOURCE_EXHAUSTED where the reply is too large.
    """
    try:
        with trio.fail_after(timeout):
            stream = await trio.open_unix_socket(os.fspath(path))
            outcome = await _call_once(stream, method, request, reply_type, timeout, reply_max)
    except trio.TooSlowError as exc:
        raise RpcError("DEADLINE_EXCEEDED", f"{path}: no answer to {method} within {timeout:g} s") from exc
    except OSError as exc:
        raise RpcError("UNAVAILABLE", f"{path}: {exc.strerror or exc}") from exc  # a path too long has no errno
    if isinstance(outcome, RpcError):
        raise outcome
    return outcome


async def _call_once(
    stream: trio.abc.Stream,
    method: str,
    request: Message,
    reply_type: type[M],
    timeout: float,
    reply_max: int = GRPC_MESSAGE_MAX,
) -> M | RpcError:
    service, _, name = method.partition("/")
    outcome: M | RpcError = RpcError("UNAVAILABLE", f"the server closed the connection before it answered {method}")
    try:
        async with stream, _GrpcSocket(stream, client_side=True, message_max=reply_max) as grpc_socket:
            deadline = datetime.timedelta(seconds=timeout)
            kind = request.DESCRIPTOR.full_name
            call = await grpc_socket.start_request("http", service, name, kind, "localhost", deadline)
            call.expect_message_type(reply_type)
            try:
                await send_single_message_client(call, request)
                outcome = await extract_message_from_singleton_stream(call)
            except RpcFailedError as exc:
                outcome = RpcError(exc.status.status_code.name, exc.status.status_message)
            except anyio.EndOfStream:
                pass
            finally:
                call.release()
    except* MessageTooLargeError as group:
        outcome = RpcError("RESOURCE_EXHAUSTED", f"{method}: {_only_error(group)}")
    except* UnsupportedMessageEncodingError as group:
        outcome = RpcError("INTERNAL", f"{method}: {_only_error(group)}")
    except* Exception as group:  # noqa: BLE001  whatever purerpc and h2 make of what the server sends
        if isinstance(outcome, RpcError):
            log.debug("gRPC: %s: %r", method, _only_error(group))
    return outcome


# ======================================================================================================================
# Device plugins
#
# The framework. Somebody who knows devices writes a Scanner, which tells a Notifier what is there; the Manager keeps
# one ResourceServer for each device type, and that does all that kubelet expects:
#
#     serve ─ register ─ watch the plugin directory ─ watch the stream    (the end of one ends all; then all begin anew)
#
# State is stored and changes are announced: a dict and an event that is replaced. Nobody who was away missed a message.
# ======================================================================================================================


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """What kubelet and containers get to know of one device. What it is made of is checked, and kept as copies.

    Attributes:
        state: HEALTHY or UNHEALTHY.
        nodes, mounts, envs, annotations, cdi_devices: What a container that is given the device gets.
        topology: The NUMA nodes it is near to; None where they are unknown.
        reason: Why it is unhealthy, for people.
    """

    state: str = HEALTHY
    nodes: Sequence[api.DeviceSpec] = ()
    mounts: Sequence[api.Mount] = ()
    envs: Mapping[str, str] = field(default_factory=dict)
    topology: api.TopologyInfo | None = None
    annotations: Mapping[str, str] = field(default_factory=dict)
    cdi_devices: Sequence[str] = ()
    reason: str = ""

    def __post_init__(self) -> None:
        # What the Notifier compares later must not be what the plugin goes on changing.
        for name in ("nodes", "mounts", "cdi_devices"):
            if isinstance(getattr(self, name), str):
                raise TypeError(f"{name} is one string, not a sequence: {getattr(self, name)!r}")
            object.__setattr__(self, name, tuple(map(copy.deepcopy, getattr(self, name))))
        for name in ("envs", "annotations"):
            object.__setattr__(self, name, dict(getattr(self, name)))
        object.__setattr__(self, "topology", copy.deepcopy(self.topology))
        if self.state not in (HEALTHY, UNHEALTHY):
            raise ValueError(f"state is {self.state!r}, neither {HEALTHY!r} nor {UNHEALTHY!r}")
        # kubelet's messages are the judges of everything else: TypeError and ValueError come here, not at Allocate.
        api.Device(topology=self.topology)
        api.ContainerAllocateResponse(
            devices=self.nodes,
            mounts=self.mounts,
            envs=self.envs,
            annotations=self.annotations,
            cdi_devices=[api.CDIDevice(name=name) for name in self.cdi_devices],
        )


def new_device_info(
    state: str,
    nodes: Sequence[api.DeviceSpec] = (),
    mounts: Sequence[api.Mount] = (),
    envs: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    cdi_devices: Sequence[str] = (),
) -> DeviceInfo:
    """Makes a DeviceInfo and finds the topology from the nodes' host paths; not to find it is a warning."""
    nodes = tuple(nodes)
    try:
        topology = get_topology_info([Path(node.host_path) for node in nodes])
    except (OSError, ValueError, RuntimeError) as exc:  # RuntimeError: a loop of symbolic links
        log.warning("topology of a device: %s", exc)
        topology = None
    return new_device_info_with_topology_hints(state, nodes, mounts, envs, topology, annotations, cdi_devices)


def new_device_info_with_topology_hints(
    state: str,
    nodes: Sequence[api.DeviceSpec] = (),
    mounts: Sequence[api.Mount] = (),
    envs: Mapping[str, str] | None = None,
    topology: api.TopologyInfo | None = None,
    annotations: Mapping[str, str] | None = None,
    cdi_devices: Sequence[str] = (),
) -> DeviceInfo:
    """Makes a DeviceInfo with the topology given; None for unknown."""
    return DeviceInfo(
        state=state,
        nodes=nodes,
        mounts=mounts,
        envs=envs or {},
        topology=topology,
        annotations=annotations or {},
        cdi_devices=cdi_devices,
    )


class DeviceTree(dict[str, dict[str, DeviceInfo]]):
    """Device type → device id → info. A type without devices is a resource of which there are none."""

    def add_device(self, device_type: str, device_id: str, info: DeviceInfo) -> None:
        """Adds a device, or replaces what was known of it."""
        self.setdefault(device_type, {})[device_id] = info


def new_device_tree() -> DeviceTree:
    """Makes an empty DeviceTree."""
    return DeviceTree()


class Notifier:
    """Takes snapshots from a Scanner and lets the Manager know when one differs from the last."""

    def __init__(self) -> None:
        self._tree: DeviceTree | None = None
        self._told: DeviceTree | None = None
        self._changed = trio.Event()
        self._loop = threading.get_ident()
        self._token = trio.lowlevel.current_trio_token()
        self._closed = False

    def notify(self, tree: DeviceTree) -> None:
        """Tells the Manager all that is there now. Returns at once; the same tree again is nothing new.

        May be called from any thread, as a plain (not async) scan does.

        Raises:
            TypeError: What is in the tree is no DeviceInfo.
            ValueError: A device type cannot be the name of a resource, or a device's id is no text.
            RuntimeError: The Manager has ended.
        """
        if self._closed:
            raise RuntimeError("the Manager has ended")
        for device_type, devices in tree.items():
            if not re.fullmatch(RESOURCE_NAME, device_type):
                raise ValueError(f"{device_type!r}: not a resource's name: {RESOURCE_NAME_RULE}")
            for device_id, info in devices.items():
                if (
                    not isinstance(device_id, str)
                    or not device_id
                    or device_id.encode(errors="ignore").decode() != device_id
                ):
                    raise ValueError(f"{device_type}: not the id of a device: {device_id!r}")
                if not isinstance(info, DeviceInfo):
                    raise TypeError(f"{device_type}/{device_id}: not a DeviceInfo: {info!r}")
        if tree == self._tree:
            return
        self._tree = DeviceTree({device_type: dict(devices) for device_type, devices in tree.items()})
        if threading.get_ident() == self._loop:
            self._changed.set()
        else:
            self._token.run_sync_soon(lambda: self._changed.set())

    def close(self) -> None:
        """Lets whoever still notifies know that nobody listens any more."""
        self._closed = True

    async def wait_changed(self) -> DeviceTree:
        """Waits for a tree other than the last one returned; where there were several, the newest is returned."""
        while self._tree is None or self._tree == self._told:
            self._changed = trio.Event()
            await self._changed.wait()
        self._told = self._tree
        return self._tree


class Scanner(Protocol):
    """Finds devices. All that a device plugin has to have; the protocols below are optional for the same object.

    Each method may be a plain function instead of an async one: it then runs in a thread.
    """

    async def scan(self, notifier: Notifier) -> None:
        """Looks for devices for ever, and notifies of all that are there whenever that may have changed.

        Called once. If it raises, the Manager ends with that error; if it returns, the Manager ends.
        """


class UseDefaultMethodError(Exception):
    """Raised by Allocator.allocate: do what would be done without it."""


class Allocator(Protocol):
    """Optional: makes the answer to Allocate itself."""

    async def allocate(self, request: api.AllocateRequest) -> api.AllocateResponse:
        """Answers a request; UseDefaultMethodError falls back to the default."""


class PostAllocator(Protocol):
    """Optional: has the last word on an answer to Allocate."""

    async def post_allocate(self, response: api.AllocateResponse) -> None:
        """May change the response; an error fails the call."""


class PreferredAllocator(Protocol):
    """Optional: advises kubelet on which devices to take."""

    async def get_preferred_allocation(
        self, request: api.PreferredAllocationRequest
    ) -> api.PreferredAllocationResponse:
        """Answers a request; kubelet fails the pod's admission on an error."""


class ContainerPreStarter(Protocol):
    """Optional: is called before each start of a container, restarts included."""

    async def pre_start_container(self, request: api.PreStartContainerRequest) -> None:
        """Makes the devices ready; an error fails the start."""


def get_topology_info(paths: Iterable[Path], *, sysfs: Path = SYSFS) -> api.TopologyInfo | None:
    """Finds the NUMA nodes that device nodes are near to.

    Args:
        paths: Character and block devices.
        sysfs: Where sysfs is.

    Returns:
        The nodes of all of them, sorted, each once; None where none is known.

    Raises:
        OSError: One of the paths is not there.

    See Documentation/ABI/stable/sysfs-devices-node and -testing/sysfs-bus-pci (numa_node) of Linux.
    """
    found: set[int] = set()
    for path in paths:
        status = path.stat()
        number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
        if stat.S_ISCHR(status.st_mode):
            device = sysfs / "dev" / "char" / number
        elif stat.S_ISBLK(status.st_mode):
            device = sysfs / "dev" / "block" / number
        else:
            raise OSError(errno.ENODEV, "neither a character nor a block device", os.fspath(path))
        if path.parent.name == "vfio" and path.name.isdecimal():
            for member in _listdir(sysfs / "kernel" / "iommu_groups" / path.name / "devices"):
                found |= _numa_nodes(member, sysfs)
        found |= _numa_nodes(device, sysfs)
    return _topology_info(found)


def get_netdev_topology_info(name: str, *, sysfs: Path = SYSFS) -> api.TopologyInfo | None:
    """The same for a network device of the namespace that this sysfs shows."""
    base = sysfs / "class" / "net" / name
    hardware = base / "device"
    return _topology_info(_numa_nodes(hardware if hardware.exists() else base, sysfs))


def _topology_info(nodes: set[int]) -> api.TopologyInfo | None:
    return api.TopologyInfo(nodes=[api.NUMANode(ID=node) for node in sorted(nodes)]) if nodes else None


def _numa_nodes(device: Path, sysfs: Path, above: frozenset[Path] = frozenset()) -> set[int]:
    """Nodes of a device's directory in sysfs: its own, its closest ancestor's, or those of the devices below it."""
    directory = device.resolve()
    below = [path for path in _listdir(directory) if path.name.startswith("lower_")]
    lower = [*_listdir(directory / "slaves"), *below]
    if lower and directory not in above:  # a virtual device; slaves of block devices, lower_… of network devices
        return set().union(*(_numa_nodes(path, sysfs, above | {directory}) for path in lower))
    root = sysfs.resolve()
    for ancestor in (directory, *directory.parents):
        if ancestor == root:
            break
        with contextlib.suppress(OSError, ValueError):
            # -1 is the kernel's word for "unknown"; what has more digits than it can have nodes is nonsense.
            if re.fullmatch("[0-9]{1,4}", text := (ancestor / "numa_node").read_text(encoding="ascii").strip()):
                return {int(text)}
    return set()


def _listdir(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


class Backoff:
    """Delays between attempts: doubling, with jitter, up to a limit.

    Attributes:
        limit: Seconds, the longest delay.
    """

    def __init__(self, first: float, limit: float) -> None:
        self._first, self.limit = first, limit
        self._next = first

    def reset(self) -> None:
        """Begins again with the first delay."""
        self._next = self._first

    def delay(self) -> float:
        """Returns how long to wait now, in seconds."""
        delay, self._next = self._next, min(self._next * 2, self.limit)
        return min(delay * random.uniform(0.8, 1.2), self.limit)  # noqa: S311  jitter, no secret


class Histogram:
    """Counts durations by their length.

    Args:
        bounds: Seconds, rising: the longest duration that each class has; one more class has all that are longer.

    Attributes:
        counts: How many each class has.
        total: The sum of all, in seconds.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """Counts one."""
        self.counts[bisect.bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    def cumulated(self) -> list[int]:
        """For each bound how many were not longer, and at last how many there were."""
        return list(itertools.accumulate(self.counts))


DURATIONS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0)
"""The bounds for what takes a millisecond and has seconds, see Histogram."""

_ENDS = (trio.Cancelled, KeyboardInterrupt)
"""Exceptions that are no failure of whatever they pass through."""


async def _run_again(run: Callable[[], Awaitable[None]], name: str) -> None:
    """Runs something until it ends or is cancelled; begins again where it fails, and lets nobody else feel it.

    Raises:
        EndpointBusyError: From `run`; to begin again would not help.
    """
    backoff = Backoff(0.5, 60.0)
    while True:
        begun = trio.current_time()
        try:
            await run()
        except* EndpointBusyError:
            raise
        except* Exception:
            log.exception("%s failed, which is a bug; it begins again", name)
        else:
            return
        if trio.current_time() - begun > backoff.limit:
            backoff.reset()
        await trio.sleep(backoff.delay())


class ResourceServer:
    """One resource ``<namespace>/<device type>``: its server, its registration, its list of devices.

    A subclass may override `update` and `listed`, and be a plugin of its own (Allocator and so on) for its resource.

    Attributes:
        resource: Its full name.
        socket_path: Where it serves; the file name is the endpoint that kubelet is told.
        registered: Whether kubelet has accepted the present registration.
        watched: Whether kubelet has the present list's stream open.
        grpc_server: What serves kubelet; None while nothing does.
        registrations: How often kubelet has accepted one.
        registered_at: trio's time of the last of them.
        allocations: How many devices kubelet was given in Allocate.
        allocate_errors: How many calls of Allocate failed.
        allocate_seconds: How long all calls of it took.
    """

    RESERVED: tuple[str, ...] = ()
    """Endpoints that are somebody else's."""
    STREAM_GRACE = 1.0
    """Seconds without a stream after which kubelet is registered with again. It never opens one on its own."""
    OPEN_GRACE = 5.0
    """Seconds that kubelet gets to open the stream after Register."""
    CLOSE_GRACE = 0.5
    """Seconds that kubelet gets to close its connection after a stream has ended."""

    def __init__(
        self, namespace: str, device_type: str, *, plugin: object = None, kubelet_dir: Path = KUBELET_DIR
    ) -> None:
        self.resource = f"{namespace}/{device_type}"
        plugin_dir = kubelet_dir / "device-plugins"
        self.socket_path = plugin_dir / f"{namespace}-{device_type}.sock"
        if len(os.fsencode(self.socket_path)) > SUN_PATH_MAX or self.socket_path.name in self.RESERVED:
            self.socket_path = plugin_dir / f"{hashlib.sha256(self.resource.encode()).hexdigest()[:16]}.sock"
        self.registered = False
        self.grpc_server: GrpcServer | None = None
        self.registrations = self.allocations = self.allocate_errors = 0
        self.registered_at = -math.inf
        self.allocate_seconds = Histogram(DURATIONS)
        self._kubelet_socket = plugin_dir / "kubelet.sock"
        self._plugin = plugin
        # For each of the plugin's plain methods: if they hang, nobody else waits.
        self._threads: dict[str, trio.CapacityLimiter] = collections.defaultdict(lambda: trio.CapacityLimiter(8))
        self._devices: Mapping[str, DeviceInfo] = {}
        self._list_changed = trio.Event()
        self._streams: list[object] = []  # the open ones of ListAndWatch; the last one is served
        self._streams_ended = 0  # how often all had to end
        self._streams_begun = 0
        self._superseded = False  # whether one has ended since there is a newer one
        self._streams_changed = trio.Event()
        self._last_trouble = ""
        self._served = False  # whether the endpoint was ever ours: then it is no mistake of whoever started us
        self._backoff = Backoff(0.1, 10.0)
        self._retry = Backoff(0.02, 0.1)
        self._scope = trio.CancelScope()
        self._stopped = trio.Event()

    # ---- devices

    def update(self, devices: Mapping[str, DeviceInfo]) -> None:
        """Takes over what the Scanner has found: all devices of this type."""
        for device_id, info in devices.items():
            before = self._devices.get(device_id)
            if info.reason and (before is None or before.reason != info.reason):
                log.warning("%s: %s is unhealthy: %s", self.resource, device_id, info.reason)
        self._devices = dict(devices)
        self.announce()

    def listed(self) -> Mapping[str, DeviceInfo]:
        """The devices that kubelet is told of."""
        return self._devices

    def announce(self) -> None:
        """Lets kubelet know that `listed` may have changed."""
        changed, self._list_changed = self._list_changed, trio.Event()
        changed.set()

    @property
    def watched(self) -> bool:
        """Whether kubelet has the stream open."""
        return bool(self._streams)

    @property
    def trouble(self) -> str:
        """What keeps it from kubelet, for people; "" for nothing that is known."""
        return self._last_trouble

    # ---- the five methods of the API

    async def GetDevicePluginOptions(self, _: api.Empty) -> api.DevicePluginOptions:  # noqa: N802  the API's name
        """Tells kubelet which optional methods to call: those that the plugin has."""
        return api.DevicePluginOptions(
            pre_start_required=getattr(self._plugin, "pre_start_container", None) is not None,
            get_preferred_allocation_available=getattr(self._plugin, "get_preferred_allocation", None) is not None,
        )

    async def ListAndWatch(self, _: api.Empty) -> AsyncGenerator[Message, None]:  # noqa: N802  the API's name
        """Yields the whole list, at once and after each change, until there is a newer stream that lasts.

        kubelet can have two, where it was about to connect to a daemon that died. To it the end of either means that we
        are gone, so that it is registered with again.
        """
        me, ended, sent = object(), self._streams_ended, None
        self._streams.append(me)
        self._streams_begun += 1
        self._announce_streams()
        try:
            while self._streams_ended == ended:
                if self._streams[-1] is not me:
                    if not await self._is_last_again(me):
                        self._superseded = self._superseded or self._streams_ended == ended
                        return
                    continue
                changed, begun = self._list_changed, trio.current_time()
                response = api.ListAndWatchResponse(
                    devices=[
                        api.Device(ID=device_id, health=info.state, topology=info.topology)
                        for device_id, info in self.listed().items()
                    ]
                )
                spent = trio.current_time() - begun
                if response != sent:
                    log.debug("%s: telling kubelet of %d devices", self.resource, len(response.devices))
                    yield response
                    sent = response
                    # To send it takes about as long as to make it. While changes come one after another, no more than
                    # half the time is spent on both.
                    await trio.sleep(2 * spent)
                if self._streams_ended == ended and self._streams[-1] is me:
                    await changed.wait()
        finally:
            self._streams.remove(me)
            self._announce_streams()

    async def _is_last_again(self, stream: object) -> bool:
        """Gives a newer stream a moment; returns whether it has gone again."""
        with trio.move_on_after(self.STREAM_GRACE):
            while self._streams[-1] is not stream:
                await self._streams_changed.wait()
        return self._streams[-1] is stream

    async def Allocate(self, request: api.AllocateRequest) -> api.AllocateResponse:  # noqa: N802  the API's name
        """Gives devices to containers of a pod that is being admitted."""
        ids = [list(container.devices_ids) for container in request.container_requests]
        log.debug("%s: Allocate %s", self.resource, ids)
        flat = [device_id for container in ids for device_id in container]
        if not all(ids) or not flat:
            raise RequestError(f"{self.resource}: Allocate of no device")
        if len(set(flat)) < len(flat):
            raise RequestError(f"{self.resource}: a device is named twice: {', '.join(sorted(flat))}")
        deadline = trio.current_time() + ALLOCATE_TIMEOUT
        try:
            response = await self._call_plugin("allocate", copy.deepcopy(request), api.AllocateResponse, deadline)
        except UseDefaultMethodError:
            response = self._default_allocate(request)
        with contextlib.suppress(UseDefaultMethodError):
            await self._call_plugin("post_allocate", response, type(None), deadline)
        answers = len(response.container_responses)
        if answers != len(ids):
            raise RequestError(
                f"{self.resource}: allocate answered {answers} of {len(ids)} containers", status="INTERNAL"
            )
        return response

    async def GetPreferredAllocation(  # noqa: N802  the API's name
        self, request: api.PreferredAllocationRequest
    ) -> api.PreferredAllocationResponse:
        """Advises kubelet, where the plugin can."""
        deadline = trio.current_time() + HOOK_TIMEOUT
        try:
            return await self._call_plugin(
                "get_preferred_allocation", request, api.PreferredAllocationResponse, deadline
            )
        except UseDefaultMethodError as exc:
            raise RequestError(f"{self.resource}: no preferred allocation here", status="UNIMPLEMENTED") from exc

    async def PreStartContainer(  # noqa: N802  the API's name
        self, request: api.PreStartContainerRequest
    ) -> api.PreStartContainerResponse:
        """Makes devices ready before a container starts, where the plugin does that."""
        deadline = trio.current_time() + PRE_START_TIMEOUT
        with contextlib.suppress(UseDefaultMethodError):
            await self._call_plugin("pre_start_container", request, type(None), deadline)
        return api.PreStartContainerResponse()

    async def _count_allocate(self, request: api.AllocateRequest) -> api.AllocateResponse:
        begun, failed = trio.current_time(), 1
        try:
            response = await self.Allocate(request)
            failed = 0
        finally:
            self.allocate_errors += failed
            self.allocate_seconds.observe(trio.current_time() - begun)
        self.allocations += sum(len(container.devices_ids) for container in request.container_requests)
        return response

    async def _call_plugin(self, hook: str, argument: Message, kind: type[T], deadline: float) -> T:
        """Calls a method of the plugin; what goes wrong in it is told to the caller under the hook's name.

        Raises:
            UseDefaultMethodError: The plugin says so, or has no such method.
            RequestError: It failed.
        """
        method = getattr(self._plugin, hook, None)
        if method is None:
            raise UseDefaultMethodError
        try:
            with trio.fail_at(deadline):
                result = await _call_plain_or_async(method, argument, limiter=self._threads[hook])
        except BaseException as raised:  # a plugin's sys.exit() is its failure, and not our end
            exc = _only_error(raised)
            group = exc if isinstance(exc, BaseExceptionGroup) else BaseExceptionGroup("", [exc])
            if group.subgroup(_ENDS) is not None:
                raise
            if isinstance(exc, RequestError | UseDefaultMethodError):
                raise exc from None
            if self._plugin is self and isinstance(exc, OSError):
                raise  # the kernel's answer; a subclass has its own words for it
            if isinstance(exc, trio.TooSlowError) and trio.current_time() >= deadline:
                raise RequestError(f"{self.resource}: {hook} did not end in time", status="DEADLINE_EXCEEDED") from exc
            log.exception("%s: %s of the plugin failed", self.resource, hook)
            raise RequestError(f"{self.resource}: {hook} failed: {exc!r}", status="INTERNAL") from exc
        if not isinstance(result, kind):
            raise RequestError(
                f"{self.resource}: {hook} returned {type(result).__name__}, not {kind.__name__}", status="INTERNAL"
            )
        return result

    def _default_allocate(self, request: api.AllocateRequest) -> api.AllocateResponse:
        response = api.AllocateResponse()
        for container in request.container_requests:
            answer = response.container_responses.add()
            for device_id in container.devices_ids:
                info = self._devices.get(device_id)
                if info is None:
                    raise RequestError(f"{self.resource}: no device {device_id}", status="NOT_FOUND")
                if info.state != HEALTHY:
                    raise RequestError(
                        f"{self.resource}: {device_id} is unhealthy: {info.reason or 'no reason given'}",
                        status="FAILED_PRECONDITION",
                    )
                answer.devices.extend(node for node in info.nodes if node not in answer.devices)
                answer.mounts.extend(mount for mount in info.mounts if mount not in answer.mounts)
                names = [api.CDIDevice(name=name) for name in info.cdi_devices]
                answer.cdi_devices.extend(name for name in names if name not in answer.cdi_devices)
                for what, target, values in (
                    ("variable", answer.envs, info.envs),
                    ("annotation", answer.annotations, info.annotations),
                ):
                    for key, value in values.items():
                        if target.setdefault(key, value) != value:
                            raise RequestError(
                                f"{self.resource}: devices of one container disagree on the {what} {key}: "
                                f"{target[key]!r}, {value!r}",
                                status="FAILED_PRECONDITION",
                            )
        return response

    # ---- life with kubelet

    def start(self, nursery: trio.Nursery) -> None:
        """Runs it in a nursery, and again where it fails; once."""
        nursery.start_soon(self._keep_running)

    async def stop(self) -> None:
        """Ends it in order, and returns when nothing of it runs any more; stopping twice is fine."""
        self._scope.cancel()
        await self._stopped.wait()

    @property
    def stopped(self) -> bool:
        """Whether it has been started and has ended."""
        return self._stopped.is_set()

    async def _keep_running(self) -> None:
        try:
            with self._scope:
                await _run_again(self.run, self.resource)
        finally:
            self._stopped.set()

    async def run(self) -> None:
        """Serves and keeps kubelet informed until cancelled, whatever kubelet does meanwhile.

        Raises:
            EndpointBusyError: Another process serves this resource.
        """
        with DirectoryWatch(self.socket_path.parent) as watch:
            while True:
                try:
                    kubelet = Place(self._kubelet_socket)
                except OSError as exc:
                    self._trouble(f"waiting for kubelet: {self._kubelet_socket}: {exc.strerror}")
                    await watch.changed()
                    continue
                with kubelet:
                    await self._serve_and_wait(kubelet, watch)

    async def _serve_and_wait(self, kubelet: Place, watch: DirectoryWatch) -> None:
        """Serves one kubelet once, and waits before the next time."""
        begun = trio.current_time()
        try:
            await self._serve_kubelet(kubelet, watch)
        except OSError as exc:
            self._trouble(f"cannot serve on {self.socket_path}: {exc.strerror}")
        except EndpointBusyError as exc:
            if not self._served:
                raise
            self._trouble(str(exc))
        # At once, but not again and again: a kubelet that refuses us, or that cuts every stream short.
        if trio.current_time() - begun > self._retry.limit:
            self._retry.reset()
        delay = self._backoff.delay() if self._last_trouble else self._retry.delay()
        with trio.move_on_after(delay):
            while kubelet.is_there():
                await watch.changed()

    async def _serve_kubelet(self, kubelet: Place, watch: DirectoryWatch) -> None:
        """Serves on a new socket, registers, and returns when that has to be done again."""
        refuse_busy(self.socket_path)
        listener = open_unix_listener(self.socket_path)
        try:
            own = Place(self.socket_path)
        except OSError:  # kubelet wipes its directory at any time
            listener.close()
            raise
        server = GrpcServer({"v1beta1.DevicePlugin": self._methods()})
        self._superseded = False

        async def watch_files() -> None:
            while kubelet.is_there():
                if not own.is_there():
                    log.info("%s: %s was removed", self.resource, self.socket_path)
                    return
                await watch.changed()
            log.info("%s: kubelet has restarted", self.resource)

        async def watch_kubelet() -> None:
            before = self._streams_begun
            if await self._register():
                # It may have opened and lost the stream already.
                await self._watch_stream(server, self.OPEN_GRACE if self._streams_begun == before else 0)

        with own, _single_errors():
            async with trio.open_nursery() as nursery:
                try:
                    await nursery.start(
                        server.serve_unix, trio.SocketListener(trio.socket.from_stdlib_socket(listener))
                    )
                    self._served = True
                    self.grpc_server = server
                    await _first_of(watch_files, watch_kubelet)
                finally:
                    self.registered, self.grpc_server = False, None
                    # End the stream, let kubelet close its connection, and only then begin anew: a stream that ends
                    # after the next Register would make kubelet drop the new one too.
                    self._streams_ended += 1
                    self._announce_streams()
                    with trio.move_on_after(self.CLOSE_GRACE, shield=True):
                        await server.wait_no_connections()
                    with contextlib.suppress(OSError):
                        if own.is_there():
                            self.socket_path.unlink()
                    nursery.cancel_scope.cancel()

    async def _register(self) -> bool:
        """Returns whether kubelet has accepted us."""
        request = api.RegisterRequest(
            version=API_VERSION,
            endpoint=self.socket_path.name,
            resource_name=self.resource,
            options=await self.GetDevicePluginOptions(api.Empty()),
        )
        try:
            await call_unix(
                self._kubelet_socket, "v1beta1.Registration/Register", request, api.Empty, timeout=REGISTER_TIMEOUT
            )
        except RpcError as exc:
            self._trouble(f"kubelet does not take the registration: {exc}")
            return False
        log.info("%s: registered with kubelet", self.resource)
        self.registered, self.registered_at = True, trio.current_time()
        self.registrations += 1
        self._last_trouble = ""
        self._backoff.reset()
        return True

    async def _watch_stream(self, server: GrpcServer, grace: float) -> None:
        """Returns when kubelet has had no stream open for a while, or has left; it has `grace` seconds to begin."""
        while True:
            with trio.move_on_after(grace):
                while not self._streams:
                    await self._streams_changed.wait()
            if not self._streams:
                log.warning("%s: kubelet does not watch the devices, registering again", self.resource)
                return
            while self._streams and not self._superseded:
                await self._streams_changed.wait()
            if self._superseded:
                log.info("%s: kubelet watches the devices twice, registering again", self.resource)
                return
            with trio.move_on_after(self.STREAM_GRACE):
                await server.wait_no_connections()
                log.info("%s: kubelet has closed its connection, registering again", self.resource)
                return
            grace = 0

    def _methods(self) -> dict[str, Method]:
        late = 1.0  # seconds: the hooks have their deadlines, whose words are better
        return {
            "GetDevicePluginOptions": Method(
                request_type=api.Empty, call=self.GetDevicePluginOptions, timeout=HOOK_TIMEOUT
            ),
            "ListAndWatch": Method(request_type=api.Empty, stream=self.ListAndWatch, timeout=float("inf")),
            "Allocate": Method(
                request_type=api.AllocateRequest, call=self._count_allocate, timeout=ALLOCATE_TIMEOUT + late
            ),
            "GetPreferredAllocation": Method(
                request_type=api.PreferredAllocationRequest,
                call=self.GetPreferredAllocation,
                timeout=HOOK_TIMEOUT + late,
            ),
            "PreStartContainer": Method(
                request_type=api.PreStartContainerRequest,
                call=self.PreStartContainer,
                timeout=PRE_START_TIMEOUT + late,
            ),
        }

    def _announce_streams(self) -> None:
        """Wakes whoever waits for streams to come and go, the streams themselves included."""
        changed, self._streams_changed = self._streams_changed, trio.Event()
        changed.set()
        self.announce()

    def _trouble(self, text: str) -> None:
        """Logs what keeps us from kubelet, once."""
        log.log(logging.DEBUG if text == self._last_trouble else logging.WARNING, "%s: %s", self.resource, text)
        self._last_trouble = text


async def _call_plain_or_async(
    function: Callable[..., Any], argument: object, *, limiter: trio.CapacityLimiter | None = None
) -> Any:
    """Calls a plugin's method: an async one here, a plain one in a thread, which is left to itself when cancelled."""
    for candidate in (function, inspect.unwrap(function), getattr(function, "__call__", None)):  # noqa: B004
        if inspect.iscoroutinefunction(candidate):
            return await function(argument)

    def call() -> tuple[Any]:
        return (function(argument),)  # in a tuple, as trio would refuse an awaitable

    (result,) = await trio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=limiter)
    return await result if inspect.isawaitable(result) else result  # a plain function around an async one


async def _first_of(*actors: Callable[[], Awaitable[None]]) -> None:
    """Runs all, and ends all when the first one ends. An error of one is raised as it is, not in a group."""

    async def run(actor: Callable[[], Awaitable[None]], nursery: trio.Nursery) -> None:
        await actor()
        nursery.cancel_scope.cancel()

    with _single_errors():
        async with trio.open_nursery() as nursery:
            for actor in actors:
                nursery.start_soon(run, actor, nursery)


class Manager:
    """Runs a device plugin: scans, and keeps one ResourceServer for each device type that is found.

    Args:
        namespace: The domain of the resources.
        plugin: A Scanner, and whichever of the optional protocols it has.
        kubelet_dir: kubelet's directory; its ``device-plugins`` is where sockets are.
        make_server: Makes the server of a device type; a ResourceServer with the plugin's hooks by default.

    Attributes:
        servers: The servers by device type.
    """

    def __init__(
        self,
        namespace: str,
        plugin: Scanner,
        *,
        kubelet_dir: Path = KUBELET_DIR,
        make_server: Callable[[str], ResourceServer] | None = None,
    ) -> None:
        if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", namespace):
            raise ValueError(f"{namespace!r}: not a domain: small letters, digits, '.' and '-'")
        self._plugin = plugin
        self._make_server = make_server or functools.partial(
            ResourceServer, namespace, plugin=plugin, kubelet_dir=kubelet_dir
        )
        self.servers: dict[str, ResourceServer] = {}

    async def run(self) -> None:
        """Runs until cancelled, or until the plugin's scan ends.

        Raises:
            EndpointBusyError: Another process serves one of the types.
            Exception: What scan raised.
        """
        if self.servers:
            raise RuntimeError("this Manager runs already")
        notifier = Notifier()

        async def scan() -> None:
            await _call_plain_or_async(self._plugin.scan, notifier)

        async def manage() -> None:
            async with trio.open_nursery() as nursery:
                while True:
                    await self._apply(await notifier.wait_changed(), nursery)

        try:
            await _first_of(scan, manage)
        finally:
            notifier.close()
            self.servers.clear()

    async def _apply(self, tree: DeviceTree, nursery: trio.Nursery) -> None:
        for device_type in self.servers.keys() - tree.keys():
            await self.servers.pop(device_type).stop()  # its socket may be wanted by the next of the same type
        for device_type, devices in tree.items():
            server = self.servers.get(device_type)
            if server is None:
                server = self.servers[device_type] = self._make_server(device_type)
                server.start(nursery)
            try:
                server.update(devices)
            except Exception:
                log.exception("%s: the update failed, which is a bug", server.resource)


@dataclass(frozen=True, slots=True)
class Owner:
    """A container that holds devices."""

    namespace: str
    pod: str
    container: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.pod}/{self.container}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """One answer of the pod resources API.

    Attributes:
        owners: (resource, device id) → who holds it; old kubelets list pods that have ended beside the one that runs.
        asked_at: trio's time when the question was sent: what happened later may not be in it.
        empty: Whether no pod at all was listed, as a kubelet does that has just started.
    """

    owners: Mapping[tuple[str, str], tuple[Owner, ...]]
    asked_at: float
    empty: bool


class PodResources:
    """Who holds which device, according to kubelet, kept fresh.

    It asks soon when hurried, then at doubling intervals up to `IDLE`, and not at all while no subscriber has anything
    to know. Two questions are at least `BUSY` apart: kubelet answers so many in a second and then refuses.
    """

    BUSY, IDLE = 0.1, 12.5  # the latter at most: with jitter it is ten seconds at least

    def __init__(self, path: Path) -> None:
        self._path = path
        self._subscribers: list[Callable[[PodView], bool]] = []
        self._due = float("inf")  # trio's time of the next question
        self._due_changed = trio.Event()
        self._gap = Backoff(self.BUSY, self.IDLE)
        self._answered = trio.Event()
        self._answer: tuple[float, PodView | RpcError]  # and when it was asked for
        self._last_trouble = ""

    @contextlib.contextmanager
    def subscribed(self, subscriber: Callable[[PodView], bool]) -> Iterator[None]:
        """Lets `subscriber` see each answer while the block runs; it returns whether it wants more."""
        self._subscribers.append(subscriber)
        try:
            yield
        finally:
            self._subscribers.remove(subscriber)

    def hurry(self, after: float = 0.0) -> None:
        """Asks kubelet so many seconds from now, and often for a while."""
        self._gap.reset()
        self._due = min(self._due, trio.current_time() + after)
        self._due_changed.set()

    async def ask(self) -> PodView:
        """Returns the answer to a question that is sent after this call; all who wait share it.

        Raises:
            RpcError: kubelet did not answer it.
        """
        begun = trio.current_time()
        while True:
            self.hurry()
            await self._answered.wait()
            asked_at, answer = self._answer
            if asked_at < begun:
                continue
            if isinstance(answer, RpcError):
                raise RpcError(answer.status, answer.message) from answer
            return answer

    async def run(self) -> NoReturn:
        """Asks until cancelled."""
        while True:
            while trio.current_time() < self._due:
                self._due_changed = trio.Event()
                with trio.move_on_at(self._due):
                    await self._due_changed.wait()
            self._due = float("inf")
            wanted = await self._list()
            await trio.sleep(self.BUSY)
            if wanted:
                self._due = min(self._due, trio.current_time() + self._gap.delay())

    async def _list(self) -> bool:
        """Asks once; returns whether anybody wants more."""
        asked_at = trio.current_time()
        try:
            answer = await call_unix(
                self._path,
                "v1.PodResourcesLister/List",
                podresources.ListPodResourcesRequest(),
                podresources.ListPodResourcesResponse,
                timeout=LIST_TIMEOUT,
                reply_max=LIST_MAX,
            )
        except RpcError as exc:
            trouble = f"pod resources: {exc}"
            log.log(logging.DEBUG if trouble == self._last_trouble else logging.WARNING, "%s", trouble)
            self._last_trouble = trouble
            self._tell(asked_at, exc)
            return True
        self._last_trouble = ""
        view = PodView(owners=self._owners(answer), asked_at=asked_at, empty=not answer.pod_resources)
        wanted = False
        for subscriber in list(self._subscribers):
            try:
                wanted = subscriber(view) or wanted
            except Exception:
                log.exception("pod resources: a pool could not use kubelet's answer, which is a bug")
                wanted = True
        self._tell(asked_at, view)
        return wanted

    def _tell(self, asked_at: float, answer: PodView | RpcError) -> None:
        self._answer = asked_at, answer
        answered, self._answered = self._answered, trio.Event()
        answered.set()

    @staticmethod
    def _owners(answer: podresources.ListPodResourcesResponse) -> dict[tuple[str, str], tuple[Owner, ...]]:
        owners: dict[tuple[str, str], dict[Owner, None]] = {}
        for pod in answer.pod_resources:
            for container in pod.containers:
                owner = Owner(pod.namespace, pod.name, container.name)
                for devices in container.devices:
                    for device_id in devices.device_ids:
                        owners.setdefault((devices.resource_name, device_id), {})[owner] = None
        return {key: tuple(sorted(found, key=str)) for key, found in owners.items()}


# ======================================================================================================================
# AF_XDP pools
#
# A device of a pool, and what is on it:
#
#     in the host namespace, free    Attachment with a map that nobody ever held: prepared, Healthy
#     allocated                      Attachment pinned, socket listening; in the pod's namespace or not: Healthy
#     released                       the same link with a fresh program and map behind it: prepared again
#
# An Attachment of a free device is held by this process alone and goes with it; the pins of the allocated ones are all
# the state there is, and a new daemon begins with them.
#
# What takes time (attaching, replacing a program) is work on one device in a task of its own, at most one at a time for
# a device; whoever needs the result waits for it, and may stop waiting. Everything else happens at once, between two
# awaits. What comes to pass while a device is worked on, or waited for, is looked at afterwards, in _settle.
# ======================================================================================================================

SESSIONS_MAX = 64
"""Connections at the same time on one socket; further ones are closed at once."""
CLOSING_MAX = 256
"""Files of one pod that wait to be closed; while there are more, nothing is received from it."""
LINES_MAX = 10
"""Lines in the log about the pod at one socket, in a minute; further ones are left out."""
SEND_TIMEOUT = 5.0
"""Seconds for a pod to read a reply."""
OWNER_TIMEOUT = 5.0
"""Seconds for finding out at /connect who holds a device, where it is not known already."""
RELEASE_AFTER_LISTS, RELEASE_AFTER = 3, 30.0
"""A device is released when so many answers of kubelet in a row, over so many seconds, do not list it."""
RELEASE_AFTER_EMPTY = 300.0
"""The same in seconds where kubelet lists no pod at all: then it may just have started."""
RELEASE_GRACE = 60.0
"""Seconds after Allocate in which a device is not released: kubelet lists a pod only once it is admitted."""
SYNCER_NAME = f"{NAMESPACE}-syncer.sock"
"""The socket beside kubelet's on which the CNI calls."""
HOLD_OFF = 5.0
"""Seconds in which nothing is made of a device that the CNI has asked for: it detaches whatever is attached."""
HOLD_OFF_TAKEN = 0.5
"""The same where the next pod has it already, whose CNI is about to move it: then it has to have its program."""
SUBFUNCTION_TIMEOUT = 10.0
"""Seconds for a new subfunction's network device to come."""
FUZZ_REQUESTS, FUZZ_PAUSE = 1000, 0.01
"""Random requests that udsFuzz makes to each new socket, and seconds between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDeviceInfo(DeviceInfo):
    """A DeviceInfo of the AF_XDP plugin, with the device itself.

    Attributes:
        net: The device; None where it is a subfunction that is not there.
        subfunction: The part of a device that it is; None where it is a whole one.
    """

    net: NetDevice | None
    subfunction: Subfunction | None = None


class PoolScanner:
    """The Scanner of the AF_XDP plugin: each pool is a device type, whatever the host has of its devices.

    Args:
        config: The pools.
        network, host: The kernel.
        allocated: Says which devices pods have: name → pool. Pools that are in it stay, configured or not.
        sysfs: Where sysfs is.

    Attributes:
        pools: The configured pools by name, as they were last seen on this host.
    """

    def __init__(
        self,
        config: PluginConfig,
        network: NetworkHandler,
        host: HostHandler,
        *,
        allocated: Callable[[], Mapping[str, str]] = dict,
        sysfs: Path = SYSFS,
    ) -> None:
        self.pools: dict[str, PoolConfig] = {}
        self._config = config
        self._network = network
        self._host = host
        self._allocated = allocated
        self._sysfs = sysfs
        self._devices: Mapping[str, NetDevice] | None = None  # of the host, as last seen
        self._notifier: Notifier | None = None
        self._known: dict[str, NetDevice] = {}  # devices here, and those with pods as they were here
        self._types: dict[str, None] = {}  # every pool there ever was: whoever has nothing left costs nothing
        self._passed: dict[str, dict[str, str]] = {}
        self._infos: dict[str, PoolDeviceInfo] = {}  # of the last tree

    async def scan(self, notifier: Notifier) -> None:
        """Follows the host's devices."""
        self._notifier = notifier
        async with contextlib.aclosing(self._network.watch_devices()) as snapshots:
            async for self._devices in snapshots:
                self.refresh()

    def devices(self) -> list[NetDevice]:
        """All devices of the host, as last seen."""
        return list((self._devices or {}).values())

    def configure(self, config: PluginConfig) -> None:
        """From now on these are the pools."""
        self._config = config
        self.refresh()

    def refresh(self) -> None:
        """Decides again who takes what, as when a device was released."""
        if self._notifier is not None and self._devices is not None:
            self._notifier.notify(self.tree(self._devices))

    def tree(self, devices: Mapping[str, NetDevice]) -> DeviceTree:
        """What the pools take of these devices; what has been passed over since the last time goes to the log."""
        allocated = self._allocated()
        away = {name: net for name, net in self._known.items() if name in allocated}
        self._known = {**away, **devices}
        pools, passed = choose_devices(self._config, devices, self._host, allocated, self._known)
        for pool, rules in passed.items():
            for name, why in rules.items():
                moved_away = name in self._infos and name not in devices  # which is the pool's to speak of
                if self._passed.get(pool, {}).get(name) != why and not moved_away:
                    log.info("%s/%s: %s is not taken: %s", NAMESPACE, pool, printable(name), why)
        self._passed = passed
        self.pools = {pool.name: pool for pool in pools}
        self._types.update(dict.fromkeys([*self.pools, *sorted(allocated.values())]))
        tree = DeviceTree()
        for pool in self._types:
            found: Mapping[str, NetDevice | Subfunction]
            if pool in self.pools:
                found = self.pools[pool].devices
            else:  # configured no more: what its pods have, and nothing else
                names = [name for name, owner in allocated.items() if owner == pool and name in devices]
                found = {name: part_or_whole(devices[name], devices) for name in names}
            tree[pool] = {name: self._info(device, devices.get(name)) for name, device in found.items()}
        self._infos = {
            name: info for found in tree.values() for name, info in found.items() if isinstance(info, PoolDeviceInfo)
        }
        return tree

    def _info(self, device: NetDevice | Subfunction, net: NetDevice | None) -> PoolDeviceInfo:
        """The device's info; its topology, which does not change, is looked up once."""
        before = self._infos.get(device.name)
        if before is not None:
            if isinstance(device, Subfunction):
                same = before.subfunction == device
            else:
                same = before.subfunction is None and before.net is not None and before.net.ifindex == device.ifindex
            if same:
                return before if before.net == net else dataclasses.replace(before, net=net)
        return _pool_device_info(device, net, self._sysfs)


def _pool_device_info(
    device: NetDevice | Subfunction, net: NetDevice | None = None, sysfs: Path = SYSFS
) -> PoolDeviceInfo:
    """Looks up the topology of a device; `net` is the one that a subfunction has."""
    if isinstance(device, Subfunction):
        topology = get_netdev_topology_info(device.primary, sysfs=sysfs)
        return PoolDeviceInfo(net=net, subfunction=device, topology=topology)
    if device.driver in PAIRS:  # which is near to nothing, and there can be many
        return PoolDeviceInfo(net=device)
    return PoolDeviceInfo(net=device, topology=get_netdev_topology_info(device.name, sysfs=sysfs))


@dataclass(frozen=True, slots=True, eq=False)
class Allocation:
    """What one Allocate gave one container: devices that answer for each other. It is told from others by identity.

    Attributes:
        options: What was said of the pool then.
        since: trio's time of the Allocate, or of this daemon's start for an older one.
        restored: Whether it is older than this daemon, so that what belongs together is known only by its owner.
        hearsay: Whether only kubelet knows of it, as after a reboot: what was set on its devices may be gone.
    """

    options: PoolOptions
    since: float
    restored: bool = False
    hearsay: bool = False


@dataclass(slots=True, eq=False)
class PoolDevice:
    """A device of a pool, and what is on it.

    Attributes:
        name: The device's name in the host namespace, which is its id for kubelet.
        net: The device in the host namespace; None while it is elsewhere.
        subfunction: The part of a device that it is, made when it is wanted; None where it is a whole one.
        topology: The NUMA nodes it is near to; None where they are not known.
        attachment: Program and map; None before they are prepared.
        allocation: Who has it; None for nobody.
        owners: The containers that hold it, once kubelet has told; see PodView.
        server: The socket of the allocation.
        reason: Why the last work on it failed.
        working: While somebody works on it: set at the end.
        started: Whether its container has started, as far as is known.
        stale: Whether its map is that of a container that has ended, and is to be replaced.
        leaving: While the pool is letting go of it: set when nothing of the pool is on it.
        known: Whether it was allocated, or about to be, since this daemon has started.
        kept: Whether the pool keeps it, whatever the configuration says: a pod has it, or has left something on it.
        wanted: How many requests are about to take it: then it is not forgotten.
        free_since: trio's time of its last release.
        hold_until: trio's time before which nothing is made of it: the CNI is at work on it.
        letting_go: Held while it is taken off for the CNI: whoever asks for the same meanwhile waits, too.
        missed, missed_since, missed_empty: Answers of kubelet in a row that did not list it, trio's time of the first
            of them, and whether they listed no pod at all.
    """

    name: str
    net: NetDevice | None = None
    subfunction: Subfunction | None = None
    topology: api.TopologyInfo | None = None
    attachment: Attachment | None = None
    allocation: Allocation | None = None
    owners: tuple[Owner, ...] = ()
    server: UdsServer | None = None
    reason: str = ""
    working: trio.Event | None = None
    started: bool = False
    stale: bool = False
    leaving: trio.Event | None = None
    known: bool = False
    kept: bool = False
    wanted: int = 0
    free_since: float = -math.inf
    hold_until: float = -math.inf
    letting_go: trio.Lock = field(default_factory=trio.Lock)
    missed: int = 0
    missed_since: float = 0.0
    missed_empty: bool = False
    backoff: Backoff = field(default_factory=lambda: Backoff(0.5, 10.0))


class PodFiles:
    """Closes what a pod has sent, and connections to it, in a thread of the pod's own.

    The close of somebody else's file can take as long as they like (a socket with SO_LINGER inside the queue of another
    socket), and the kernel does it on the thread that drops the last reference. So a pod waits for its own files, and
    nobody else does.
    """

    def __init__(self) -> None:
        self._waiting: collections.deque[int] = collections.deque()
        self._lock = threading.Lock()
        self._running = False
        self._token = trio.lowlevel.current_trio_token()
        self._room = trio.Event()

    def close(self, fds: Collection[int]) -> None:
        """Takes over descriptors and returns at once."""
        if not fds and not self._waiting:
            return
        with self._lock:
            self._waiting.extend(fds)
            start = bool(self._waiting) and not self._running
            self._running = self._running or start
        if start:
            try:
                threading.Thread(target=self._close_all, name="afxdpd-close", daemon=True).start()
            except RuntimeError:  # there can be no more threads: the next call tries again
                with self._lock:
                    self._running = False

    async def wait_room(self) -> None:
        """Returns when not too many wait."""
        while len(self._waiting) > CLOSING_MAX:
            if self._room.is_set():
                self._room = trio.Event()
            await self._room.wait()

    def _close_all(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running = False
                    return
                fd = self._waiting.popleft()
            with contextlib.suppress(OSError):
                os.close(fd)
            if len(self._waiting) == CLOSING_MAX:
                with contextlib.suppress(trio.RunFinishedError):
                    self._token.run_sync_soon(lambda: self._room.set())


class EthtoolUndo:
    """What undoes the ethtool commands of allocated devices, kept in files: it outlives the daemon.

    Args:
        uds_dir: Where the pools' directories are; beside them is one for these files.
        pool: Whose devices they are.
    """

    _NAME = ".ethtool"

    def __init__(self, uds_dir: Path, pool: str) -> None:
        self._directory = uds_dir / self._NAME / pool

    @classmethod
    def all_due(cls, uds_dir: Path) -> dict[str, str]:
        """The devices of all pools for which there is something to be undone: device → pool."""
        return {path.name: path.parent.name for path in (uds_dir / cls._NAME).glob("*/*")}

    def is_due(self, device: str) -> bool:
        """Whether there is anything to be undone for a device."""
        return (self._directory / device).exists()

    def commands(self, device: str) -> list[list[str]]:
        """Arguments of ethtool in the order in which they were added; a file that cannot be read has none."""
        try:
            content = (self._directory / device).read_bytes()
            return msgspec.json.decode(content, type=list[Annotated[list[str], msgspec.Meta(min_length=3)]])
        except (OSError, msgspec.DecodeError):
            return []

    def keep(self, device: str, commands: list[list[str]]) -> None:
        """Keeps these commands and no others."""
        if not commands:
            self.forget(device)
            return
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = self._directory / device
        new = file.with_name(f".{device}")
        new.write_bytes(msgspec.json.encode(commands))
        new.replace(file)

    def forget(self, device: str) -> None:
        """Removes what was kept."""
        (self._directory / device).unlink(missing_ok=True)


class HandshakeCounts:
    """What pods have asked for, and what they were answered.

    Attributes:
        requests: (type of the request, reply) → how often.
        seconds: How long it took from accepting a connection until the first descriptor was sent on it.
    """

    def __init__(self) -> None:
        self.requests: collections.Counter[tuple[type[Request], bytes]] = collections.Counter()
        self.seconds = Histogram(DURATIONS)


class UdsServer:
    """The socket of one allocated device, and the conversations of its pod.

    Args:
        directory: What the pod mounts; the socket is in it.
        name: For the log.
        idle_timeout: Seconds after which a silent connection is closed.
        is_owner: Whether a hostname is that of the pod that holds the device; RpcError where that cannot be known.
        xskmap: The map of a device of this allocation, borrowed; None for any other device.
        fuzz: Whether it asks itself random things, too.
        counts: Where it counts; its own by default.
    """

    def __init__(
        self,
        directory: Path,
        *,
        name: str,
        idle_timeout: float,
        is_owner: Callable[[str], Awaitable[bool]],
        xskmap: Callable[[str], Fd | None],
        fuzz: bool = False,
        counts: HandshakeCounts | None = None,
    ) -> None:
        self._directory = directory
        self._name = name
        self._idle_timeout = idle_timeout
        self._is_owner = is_owner
        self._xskmap = xskmap
        self._fuzz = fuzz
        self._counts = counts or HandshakeCounts()
        self._files = PodFiles()
        self._turn = trio.Lock()
        self._sessions = 0
        self._said = 0  # lines in the minute that began at …
        self._said_since = -60.0
        self._made: os.stat_result | None = None
        self.scope = trio.CancelScope()

    @property
    def path(self) -> Path:
        """The socket."""
        return self._directory / SOCKET_NAME

    @property
    def sessions(self) -> int:
        """How many connections are open."""
        return self._sessions

    def listen(self, host: HostHandler, uid: int) -> socket.socket:
        """Makes directory and socket, for root and one more user; returns the listening socket, the caller's.

        Raises:
            OSError: They cannot be made; no socket is left.
        """
        if self._directory.is_symlink():
            self._directory.unlink()
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        listener = open_unix_listener(self.path, kind=socket.SOCK_SEQPACKET)
        try:
            # Accepted connections inherit it, so that each packet tells its sender.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self.path.chmod(0o600)
            if uid:
                host.grant(self._directory, uid, 5)
                host.grant(self.path, uid, 6)
            self._made = self.path.lstat()
        except OSError:
            listener.close()
            self.path.unlink(missing_ok=True)
            raise
        return listener

    def is_there(self) -> bool:
        """Whether what is at its path is the socket that it has made."""
        try:
            return self._made is not None and os.path.samestat(self._made, self.path.lstat())
        except OSError:
            return False

    async def serve(self, listener: socket.socket) -> None:
        """Accepts connections until its scope is cancelled, then ends them all and closes the listener."""
        try:
            with self.scope:
                async with trio.open_nursery() as nursery:
                    if self._fuzz:
                        nursery.start_soon(self._fuzz_session)
                    while True:
                        await trio.lowlevel.wait_readable(listener)
                        await self._files.wait_room()
                        await self._accept(listener, nursery)
        finally:
            self._files.close([listener.detach()])  # with the connections that were never accepted

    async def _accept(self, listener: socket.socket, nursery: trio.Nursery) -> None:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            pass  # whoever was there has gone
        except OSError as exc:
            # Out of descriptors or memory: the connection stays in the queue.
            self._say(logging.WARNING, "cannot accept connections: %s", exc.strerror)
            await trio.sleep(1)
        else:
            if self._sessions < SESSIONS_MAX:
                self._sessions += 1
                nursery.start_soon(self._serve_session, connection)
            else:
                self._end_connection(connection)
                self._say(logging.WARNING, "%d connections are open, further ones are refused", SESSIONS_MAX)

    async def _serve_session(self, connection: socket.socket, connected: bool = False) -> None:
        try:
            session = _Session(connection, connected, trio.current_time(), trio.current_time() + self._idle_timeout)
            while True:
                with trio.move_on_at(session.idle_at) as idle:
                    await self._converse(session, idle)
                if not idle.cancelled_caught:
                    break
                if trio.current_time() >= session.idle_at:  # else a packet came when we were late
                    if not _is_readable(connection):
                        self._say(logging.INFO, "connection closed: silent for %g s", self._idle_timeout)
                        break
                    session.idle_at = trio.current_time() + self._idle_timeout
        except trio.TooSlowError:
            self._say(logging.WARNING, "connection closed: the pod does not read")
        except OSError as exc:
            log.debug("%s: connection closed: %s", self._name, exc.strerror)
        except Exception:
            log.exception("%s: connection closed, which is a bug", self._name)
        finally:
            self._end_connection(connection)
            self._sessions -= 1

    async def _fuzz_session(self) -> None:
        """Has a conversation with itself, of random requests, and counts the replies in the log."""
        seed = random.getrandbits(32)
        chance = random.Random(seed)  # noqa: S311  it has to be repeatable
        log.warning("%s: udsFuzz: %d random requests, seed %d", self._name, FUZZ_REQUESTS, seed)
        replies: collections.Counter[str] = collections.Counter()
        pod, own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with pod:
            for end in (pod, own):
                end.setblocking(False)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            async with trio.open_nursery() as nursery:
                self._sessions += 1
                nursery.start_soon(self._serve_session, own, True)
                with contextlib.suppress(OSError):  # the server has closed the connection, and says why
                    for _ in range(FUZZ_REQUESTS):
                        files = [pod.fileno()] * chance.choice((0, 0, 0, 1, 2))
                        socket.send_fds(pod, [random_request(chance)], files)
                        await trio.lowlevel.wait_readable(pod)
                        data, fds, _, _ = socket.recv_fds(pod, REQUEST_MAX, FDS_MAX)
                        self._files.close(fds)
                        replies[data.decode()] += 1
                        await trio.sleep(FUZZ_PAUSE)
                    pod.shutdown(socket.SHUT_RDWR)
        log.warning(
            "%s: udsFuzz: done: %s", self._name, ", ".join(f"{n} {reply}" for reply, n in sorted(replies.items()))
        )

    def _end_connection(self, connection: socket.socket) -> None:
        """Closes a connection; where packets are left in it, perhaps with files, not here."""
        try:
            connection.shutdown(socket.SHUT_RDWR)
            # Each packet has its sender's credentials, and the end of file, which nobody sent, has none.
            unread = connection.recvmsg(1, socket.CMSG_SPACE(12), socket.MSG_PEEK | socket.MSG_DONTWAIT)[1]
        except OSError:
            unread = [(0, 0, b"")]  # who knows
        if unread:
            self._files.close([connection.detach()])
        else:
            connection.close()

    def _say(self, level: int, text: str, *arguments: object) -> None:
        """Logs what a pod does: so many lines a minute, whatever it does."""
        now = trio.current_time()
        if now - self._said_since >= 60:
            self._said_since, self._said = now, 0
        self._said += 1
        if self._said <= LINES_MAX:
            log.log(level, "%s: " + text, self._name, *arguments)
        elif self._said == LINES_MAX + 1:
            log.warning("%s: further lines about its pod in this minute are left out", self._name)

    async def _converse(self, session: _Session, idle: trio.CancelScope) -> None:
        """Answers each packet until the end; `idle` is cancelled when none has come in the idle time."""
        connection = session.connection
        while True:
            packet = await self._receive(connection)
            # Which is longer than any answer takes.
            session.idle_at = idle.deadline = trio.current_time() + self._idle_timeout
            if packet.end_of_file:
                return
            fds = packet.fds
            try:
                if packet.truncated:
                    request: Request = Malformed("longer than any request")
                else:
                    request = parse_request(packet.data, connected=session.connected)
                if not isinstance(request, ConfigBusyPoll):  # nobody needs the files, and an answer may take its time
                    self._files.close(fds)
                    fds = ()
                reply, fd = await self._answer(request, packet)
            finally:
                self._files.close(fds)
            log.debug("%s: pid %d: %r: %r", self._name, packet.pid, packet.data, reply)
            session.connected = session.connected or reply == HOST_OK
            with fd or contextlib.nullcontext():
                await _send_packet(connection, reply, fd)
            self._counts.requests[type(request), reply] += 1
            if session.accepted is not None and reply == FD_ACK:
                self._counts.seconds.observe(trio.current_time() - session.accepted)
                session.accepted = None
            if isinstance(request, Fin):
                return
            await trio.lowlevel.wait_readable(connection)

    async def _receive(self, connection: socket.socket) -> Packet:
        """Waits for one packet. See uds_recv in _uds_helper.h.

        Where a pod has several conversations, they receive one at a time, and other pods get their turn in between: so
        a pod costs others the same, however many it has, and no more files are held than there is room for.
        """
        while True:
            async with self._turn if self._sessions > 1 else contextlib.nullcontext():
                if self._sessions > 1:
                    await trio.lowlevel.checkpoint()
                await self._files.wait_room()
                packet = _receive_now(connection)
            if packet is not None:
                return packet
            await trio.lowlevel.wait_readable(connection)

    async def _answer(self, request: Request, packet: Packet) -> tuple[bytes, Fd | None]:
        """Returns the reply, and the descriptor that goes with it, the caller's."""
        match request:
            case Connect(hostname):
                return await self._connect(hostname), None
            case GetVersion():
                return HANDSHAKE_VERSION, None
            case GetXskMap(device):
                xskmap = self._xskmap(device)
                if xskmap is None:
                    self._say(logging.WARNING, "no map for %r: it is no device of this allocation", device)
                    return FD_NAK, None
                return FD_ACK, xskmap.duplicate()
            case ConfigBusyPoll(timeout_us, budget):
                return self._config_busy_poll(packet.fds, timeout_us, budget), None
            case Fin():
                return FIN_ACK, None
            case Malformed(why):
                log.debug("%s: %r: %s", self._name, packet.data, why)
                return NAK, None

    async def _connect(self, hostname: str) -> bytes:
        try:
            if await self._is_owner(hostname):
                return HOST_OK
        except RpcError as exc:
            self._say(logging.WARNING, "cannot find out who holds the device: %s", exc)
            return ERROR
        self._say(logging.WARNING, "refused: the host %r is not the pod that holds the device", hostname)
        return HOST_NAK

    def _config_busy_poll(self, fds: Sequence[int], timeout_us: int, budget: int) -> bytes:
        try:
            fd = fds[0] if len(fds) == 1 else -1
            _check(lib.uds_busy_poll(fd, timeout_us, budget), f"busy polling on {len(fds)} file descriptors")
        except OSError as exc:
            self._say(logging.WARNING, "%s: %s", exc.filename, exc.strerror)
            return BUSY_POLL_NAK
        return BUSY_POLL_ACK


@dataclass(slots=True)
class _Session:
    """A conversation: whether /connect was answered with /host_ok, since when it waits for a map, when it is idle."""

    connection: socket.socket
    connected: bool
    accepted: float | None
    idle_at: float


def _is_readable(connection: socket.socket) -> bool:
    """Whether a packet or the end waits to be received."""
    try:
        connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    return True


def random_request(chance: random.Random) -> bytes:
    """A packet that means something, almost something or nothing; for tests. It never ends the conversation."""
    verbs = ("/connect", "/version", "/xsk_map_fd", "/config_busy_poll", "", "/", "connect", "/host_ok")
    verb = chance.choice(verbs)
    fields = [
        chance.choice(
            (
                str(chance.randrange(-9, 99_999)),
                "".join(chance.choices("ab7-", k=8)),
                "".join(chance.choices("ab7-, \0\x7fé/", k=chance.randrange(40))),
            )
        )
        for _ in range(chance.randrange(4))
    ]
    packet = ",".join([verb, *fields]).encode("latin-1" if chance.random() < 0.2 else "utf-8")
    if chance.random() < 0.1:
        packet += chance.randbytes(chance.randrange(2 * REQUEST_MAX))
    return packet


class Packet(NamedTuple):
    """One packet of a pod.

    Attributes:
        data: At most REQUEST_MAX bytes.
        truncated: Whether there were more.
        end_of_file: Whether there is no packet, and none will come.
        fds: The descriptors that came with it, the receiver's to close.
        pid: The sender, as the kernel vouches for it.
    """

    data: bytes
    truncated: bool
    end_of_file: bool
    fds: tuple[int, ...]
    pid: int


def _receive_now(connection: socket.socket) -> Packet | None:
    buffer = ffi.new("char[]", REQUEST_MAX)
    fds = ffi.new("int[]", FDS_MAX)
    n_fds, uid = ffi.new("unsigned int *"), ffi.new("unsigned int *")
    pid, flags = ffi.new("int *"), ffi.new("int *")
    length = lib.uds_recv(connection.fileno(), buffer, REQUEST_MAX, fds, FDS_MAX, n_fds, pid, uid, flags)
    if length == -errno.EAGAIN:
        return None
    _check(length, "receiving a request")
    return Packet(
        data=bytes(ffi.buffer(buffer, length)),
        truncated=bool(flags[0] & 2),
        end_of_file=bool(flags[0] & 1),
        fds=tuple(fds[0 : n_fds[0]]),
        pid=pid[0],
    )


async def _send_packet(connection: socket.socket, data: bytes, fd: Fd | None) -> None:
    """Sends one packet, when the peer has room for it. See uds_send in _uds_helper.h.

    Raises:
        TooSlowError: The peer has not made room in time.
    """
    number = -1 if fd is None else fd.fileno()
    result = lib.uds_send(connection.fileno(), data, len(data), number)
    if result in (-errno.EAGAIN, -errno.ETOOMANYREFS):
        with trio.fail_after(SEND_TIMEOUT):
            while result in (-errno.EAGAIN, -errno.ETOOMANYREFS):
                if result == -errno.EAGAIN:
                    await trio.lowlevel.wait_writable(connection)
                else:  # processes of our user, as pods may be, have too many on their way
                    await trio.sleep(0.05)
                result = lib.uds_send(connection.fileno(), data, len(data), number)
    _check(result, "sending a reply")


def prefer_devices(
    available: Iterable[str], must_include: Iterable[str], size: int, nodes: Mapping[str, frozenset[int]]
) -> list[str]:
    """Chooses devices on as few NUMA nodes as possible; the same question always has the same answer.

    Args:
        available: Names to choose from, in any order.
        must_include: Names that are in the answer in any case.
        size: How many are wanted.
        nodes: Name → the NUMA nodes that the device is near to; none where they are unknown. A device near to several
            counts for each of them, and is not looked at more closely.

    Returns:
        `size` names, or as many as there are.
    """
    chosen = list(dict.fromkeys(must_include))[: max(size, 0)]
    free = sorted(set(available) - set(chosen))
    covered = {node for name in chosen for node in nodes.get(name, ())}
    while len(chosen) < size and free:
        near = [name for name in free if covered & nodes.get(name, frozenset())]
        if not near:
            # The next node: the one with the fewest devices that are enough, else the one with the most.
            by_node: dict[int, list[str]] = {}
            for name in free:
                for node in nodes.get(name) or {-1}:
                    by_node.setdefault(node, []).append(name)
            missing = size - len(chosen)
            node = min(
                by_node,
                key=lambda node: (
                    node == -1,
                    max(missing - len(by_node[node]), 0),
                    len(by_node[node]),
                    node,
                ),
            )
            near = by_node[node]
            covered.add(node)
        chosen += near[: size - len(chosen)]
        free = [name for name in free if name not in chosen]
    return chosen


def _nodes_of(topology: api.TopologyInfo | None) -> frozenset[int]:
    return frozenset(node.ID for node in topology.nodes) if topology is not None else frozenset()


class PoolManager(ResourceServer):
    """One pool: the resource, its devices, their programs, maps and sockets.

    It is a plugin of its own for its resource: Allocator, PreferredAllocator and ContainerPreStarter. It can be used
    without a Manager: made with a PoolConfig, started in a nursery, stopped.

    Args:
        config: The pool; of a PoolConfig the devices are taken, too.
        xdp, host, network, devlink, ethtool: The kernel.
        pod_resources: Who holds what, shared by the pools and run by whoever made it; one of its own by default.
        uds_dir: Where the directories are that pods mount.
        kubelet_dir: See ResourceServer.
        retired: Whether it only serves the pods that it has; see reconfigure.
        released: Is called when a device is its pod's no more, and nothing of the pod is left on it.
        host_devices: Says which devices are in the host namespace.
        detaching: Shared by the pools: names of devices that one of them is letting go of, and when it has.

    Attributes:
        config: What is said of it now; None where it is configured no more.
        devices: Its devices by name: those in the host namespace, and the allocated ones wherever they are.
        server_factory: Makes the socket server of an allocated device.
        handshakes: What its pods have asked for.
        releases: How many devices were released, by the reason: "kubelet" lists no pod, the "cni" said so, or they
            were "taken_over" by the next Allocate.
        attach_errors: How often a program could not be attached or replaced, by errno.
    """

    RESERVED = (SYNCER_NAME,)
    device_prefix = NAMESPACE
    server_factory: Callable[..., UdsServer] = UdsServer

    def __init__(
        self,
        config: PoolOptions,
        *,
        xdp: XdpHandler | None = None,
        host: HostHandler | None = None,
        network: NetworkHandler | None = None,
        devlink: DevlinkHandler | None = None,
        ethtool: EthtoolHandler | None = None,
        pod_resources: PodResources | None = None,
        uds_dir: Path = UDS_DIR,
        kubelet_dir: Path = KUBELET_DIR,
        retired: bool = False,
        released: Callable[[], None] = lambda: None,
        host_devices: Callable[[], Iterable[NetDevice]] = tuple,
        detaching: dict[str, trio.Event] | None = None,
    ) -> None:
        super().__init__(NAMESPACE, config.name, plugin=self, kubelet_dir=kubelet_dir)
        self.name = config.name
        self.devices: dict[str, PoolDevice] = {}
        self.handshakes = HandshakeCounts()
        self.releases = dict.fromkeys(("kubelet", "cni", "taken_over"), 0)
        self.attach_errors: collections.Counter[int] = collections.Counter()
        self.bpf_handler = xdp or Xdp()
        self.net_handler = network or Network()
        self._options = config
        self._host = host or Host()
        self._devlink = devlink or Devlink()
        self._ethtool = ethtool or Ethtool()
        self._pod_resources = pod_resources or PodResources(kubelet_dir / "pod-resources" / "kubelet.sock")
        self._asks_itself = pod_resources is None
        self._uds_dir = uds_dir / config.name
        self._undo = EthtoolUndo(uds_dir, config.name)
        self._released = released
        self._host_devices = host_devices
        self._detaching = {} if detaching is None else detaching
        self._nursery: trio.Nursery | None = None
        self._retired = retired
        self._retired_changed = trio.Event()
        self._adopted = False
        self._strange: set[str] = set()  # ids that kubelet lists and that can be no devices of ours
        self._restored = trio.Event()
        self._orphans: set[str] = (
            set()
        )  # devices that were destroyed meanwhile, whose directories wait for kubelet's word
        self._listed: dict[str, DeviceInfo] = {}
        self._held: dict[str, float] = {}  # device name → trio's time before which nothing is made of it
        self._due: dict[str, float] = {}  # device name → trio's time from which it may be prepared
        self._due_changed = trio.Event()
        if isinstance(config, PoolConfig):
            self.update({name: _pool_device_info(device) for name, device in config.devices.items()})

    # ---- what is said of it

    @property
    def config(self) -> PoolOptions | None:
        """What is said of it now; None where it is configured no more."""
        return None if self._retired else self._options

    def reconfigure(self, options: PoolOptions | None) -> None:
        """Takes over what is said of it from now on; what pods have stays as it was given to them.

        Args:
            options: None where it is configured no more: it unregisters, and serves its pods until they are gone.
        """
        if self._retired != (options is None):
            self._retired = options is None
            changed, self._retired_changed = self._retired_changed, trio.Event()
            changed.set()
        self._options = options or self._options
        self.update(self._devices)  # also what was forgotten when it was retired
        for device in list(self.devices.values()):
            self._settle(device, news=True)

    @property
    def mode(self) -> str:
        """What it gives away: "primary", whole devices, or "cdq", subfunctions."""
        return self._options.mode

    @property
    def uds_server_disable(self) -> bool:
        """See PoolOptions."""
        return self._options.uds_server_disable

    @property
    def uds_timeout(self) -> int:
        """See PoolOptions."""
        return self._options.uds_timeout

    @property
    def uds_fuzz(self) -> bool:
        """See PoolOptions."""
        return self._options.uds_fuzz

    @property
    def uid(self) -> int:
        """See PoolOptions."""
        return self._options.uid

    @property
    def dp_api_socket(self) -> Path:
        """Where it serves kubelet."""
        return self.socket_path

    @property
    def dp_api_endpoint(self) -> str:
        """The same, as kubelet is told."""
        return self.socket_path.name

    @property
    def dp_api_server(self) -> GrpcServer | None:
        """What serves kubelet now."""
        return self.grpc_server

    @property
    def update_signal(self) -> trio.Event:
        """Is set at the next change of `listed`, and is another one then."""
        return self._list_changed

    @property
    def ethtool_filters(self) -> tuple[str, ...]:
        """The arguments of ethtool for its devices."""
        return self._options.filters

    # ---- life

    async def run(self) -> None:
        """Takes over what an earlier daemon left to running pods, then serves until cancelled; see ResourceServer.

        At the end the allocated devices keep program, map and directory.
        """
        async with self._at_work():
            while True:
                changed = self._retired_changed
                if self._retired:
                    log.warning("%s: is not configured any more; its pods keep their devices", self.resource)
                    await changed.wait()
                else:
                    await _first_of(super().run, changed.wait)

    @contextlib.asynccontextmanager
    async def _at_work(self) -> AsyncIterator[None]:
        try:
            with _single_errors():
                async with trio.open_nursery() as self._nursery:
                    with self._pod_resources.subscribed(self._reconcile):
                        self._restore()
                        self._nursery.start_soon(self._prepare_devices)
                        if self._asks_itself:
                            self._nursery.start_soon(self._pod_resources.run)
                        yield
                        self._nursery.cancel_scope.cancel()
        finally:
            self._nursery = None
            self._restored = trio.Event()
            for device in self.devices.values():
                if device.attachment is not None:
                    device.attachment.close()
                device.attachment = device.working = None
                self._has_left(device)

    def _restore(self) -> None:
        """Begins with the pins: what is pinned is allocated. The rest kubelet knows; see _adopt."""
        now = trio.current_time()
        kept = set()
        self._adopted = False
        for device in self.devices.values():
            device.allocation, device.server, device.owners, device.known = None, None, (), False
        for name in self.bpf_handler.pinned_devices(self.name):
            try:
                attachment = self.bpf_handler.open_pinned(self.name, name)
            except OSError as exc:
                if exc.errno in (*OUT_OF_RESOURCES, errno.EACCES, errno.EPERM):
                    log.warning("%s: %s: what is pinned cannot be opened, and stays: %s", self.resource, name, exc)
                    kept.add(name)
                else:
                    log.info("%s: %s: what was left of it is removed: %s", self.resource, name, exc.strerror)
                    self._unpin(name)
                    if exc.errno == errno.ENOLINK:
                        self._undo.forget(name)
                        kept.add(name)  # a running pod may have the directory mounted, and the device come again
                        self._orphans.add(name)
                continue
            device = self.devices.setdefault(name, PoolDevice(name))
            device.attachment = attachment
            log.info("%s: %s: still allocated", self.resource, name)
            try:
                self._hand_over(device, Allocation(self._restored_options(name), since=now, restored=True))
            except OSError as exc:
                self._fail(device, exc)
        kept.update(self.allocated())
        if self._uds_dir.is_dir():
            for entry in self._uds_dir.iterdir():
                if entry.name not in kept:
                    shutil.rmtree(entry, ignore_errors=True)
        self._pod_resources.hurry()
        for device in list(self.devices.values()):
            device.kept = device.kept or self._undo.is_due(device.name)
            self._settle(device)
        self._restored.set()

    def _restored_options(self, name: str) -> PoolOptions:
        """What a device was given to its pod with, as far as can be seen; the file may say something else by now."""
        options = self._options
        if (self._uds_dir / name).is_dir():
            options = msgspec.structs.replace(options, uds_server_disable=False)
        if not options.has_program:
            options = msgspec.structs.replace(options, bpf_map_pinning_enable=True)
        return options

    # ---- devices

    def update(self, devices: Mapping[str, DeviceInfo]) -> None:
        """Takes over what is in the host namespace, or can be made there."""
        self._devices = devices
        for name, device in list(self.devices.items()):
            if name not in devices:
                if device.net is not None:
                    words = "has left the host's namespace" if device.allocation else "is not the pool's any more"
                    log.info("%s: %s: %s", self.resource, name, words)
                    device.reason = ""  # of one that was here
                device.net = None
                if device.allocation is None:
                    device.subfunction = None
                    if device.leaving is None:
                        device.leaving = self._detaching[name] = trio.Event()
                self._settle(device)
        for name, info in devices.items():
            assert isinstance(info, PoolDeviceInfo)
            device = self.devices.setdefault(name, PoolDevice(name, hold_until=self._held.get(name, -math.inf)))
            self._has_left(device)
            if self._is_namesake(device, info.net):
                info = dataclasses.replace(info, net=None)
            if device.net != info.net or (info.subfunction and device.subfunction != info.subfunction):
                if device.allocation and device.net is None and info.net is not None:
                    log.info("%s: %s: back in the host namespace", self.resource, name)
                    self._pod_resources.hurry()
                device.net, device.topology = info.net, info.topology
                device.subfunction = info.subfunction or device.subfunction
                device.backoff.reset()
                self._settle(device, news=True)

    def _is_namesake(self, device: PoolDevice, net: NetDevice | None) -> bool:
        """Whether a device of the host only has the name of one that is with its pod."""
        if net is None or device.allocation is None or device.attachment is None:
            return False
        return self.bpf_handler.ifindex(device.attachment) not in (0, net.ifindex)

    def listed(self) -> Mapping[str, DeviceInfo]:
        """Every device that is in the host namespace or allocated."""
        return self._listed

    def allocated(self) -> list[str]:
        """Names of the devices that pods have."""
        return [name for name, device in self.devices.items() if device.allocation is not None]

    def kept(self) -> list[str]:
        """Names of the devices that are its own whatever the configuration says; see PoolDevice."""
        return [name for name, device in self.devices.items() if device.kept]

    def _info(self, device: PoolDevice) -> DeviceInfo:
        """What kubelet gets to know of a device."""
        reason = device.reason
        # While the CNI is at work on it, an Allocate waits: better than a pod that is not admitted.
        held = trio.current_time() < device.hold_until
        prepared = held or device.attachment or device.subfunction or not self._options.has_program
        if not reason and device.allocation is None and not prepared:
            reason = "not prepared yet"
        return DeviceInfo(state=UNHEALTHY if reason else HEALTHY, reason=reason, topology=device.topology)

    def _settle(self, device: PoolDevice, *, news: bool = False) -> None:
        """Draws the conclusions from a change: forgets the device, or has it worked on; and lets kubelet know.

        While it is worked on or wanted, that is left to whoever does. What failed is tried again after a while, or at
        once where there is news of the device.
        """
        if device.working is not None or device.wanted:
            return
        gone = device.net is None and device.subfunction is None
        # Before it runs, it does not know yet what its pods have.
        unwanted = self._retired and self._nursery is not None and not self._is_left_behind(device)
        if device.allocation is None and (gone or unwanted):
            if device.attachment is not None and self._nursery is not None:
                self._nursery.start_soon(self._detach, device)
            else:
                self._has_left(device)
            self.devices.pop(device.name, None)
            self._due.pop(device.name, None)
        elif self._needs_work(device):
            delay = device.backoff.delay() if device.reason and not news else 0
            self._due[device.name] = max(trio.current_time() + delay, device.hold_until)
            self._due_changed.set()
        info = self._info(device) if device.name in self.devices else None
        if info != self._listed.get(device.name):
            self._listed.pop(device.name, None)
            if info is not None:
                self._listed[device.name] = info
            self.announce()
        if device.kept and device.allocation is None and not self._is_left_behind(device):
            device.kept = False
            self._released()

    async def _detach(self, device: PoolDevice) -> None:
        try:
            await self._drop_attachment(device)
        finally:
            self._has_left(device)

    def _has_left(self, device: PoolDevice) -> None:
        """Lets other pools attach to a device that was dropped here, or is to be kept after all."""
        if device.leaving is not None:
            device.leaving.set()
            if self._detaching.get(device.name) is device.leaving:
                del self._detaching[device.name]
            device.leaving = None

    def _is_left_behind(self, device: PoolDevice) -> bool:
        """Whether a free device is in the host with something of its last pod on it, or the CNI at work on it."""
        return device.net is not None and (self._has_leftover(device) or trio.current_time() < device.hold_until)

    def _has_leftover(self, device: PoolDevice) -> bool:
        return device.net is not None and (device.subfunction is not None or self._undo.is_due(device.name))

    def _needs_work(self, device: PoolDevice) -> bool:
        """Whether something on the device is missing, used, dead or too much, and that can be changed."""
        attachment, net = device.attachment, device.net
        if device.allocation is None:
            if self._has_leftover(device) and not (device.known or self._adopted):
                return False  # perhaps by nobody: kubelet may still say that a pod has it
            there = attachment is not None or net is not None or device.subfunction is not None
            return there and not self._is_at_rest(device)
        if attachment is None and net is None:
            return False
        if device.reason:
            return True
        options = device.allocation.options
        if options.has_socket and device.server is None:
            return True
        if not options.has_program:
            return False
        return attachment is None or (net is not None and self.bpf_handler.ifindex(attachment) == 0)

    def _is_at_rest(self, device: PoolDevice) -> bool:
        """Whether a free device is as it stays until somebody wants it."""
        if device.reason or self._is_left_behind(device):
            return False
        if device.subfunction is not None:
            return device.attachment is None
        return self._is_ready(device)

    def _is_ready(self, device: PoolDevice) -> bool:
        """Whether the device is free, and its program is in its place, with a map that nobody ever held."""
        attachment = device.attachment
        if device.allocation is not None or device.reason:
            return False
        if not self._options.has_program:
            return attachment is None
        if attachment is None or attachment.handed_out:
            return False
        ifindex = self.bpf_handler.ifindex(attachment)
        return ifindex != 0 if device.net is None else ifindex == device.net.ifindex

    async def _prepare_devices(self) -> NoReturn:
        """Has devices worked on that need it, one after another (the kernel does no more), until cancelled."""
        while True:
            self._due_changed = trio.Event()
            now = trio.current_time()
            self._due = {name: max(due, self.devices[name].hold_until) for name, due in self._due.items()}
            ready = [self.devices[name] for name, due in self._due.items() if due <= now]
            for device in sorted(ready, key=lambda device: (device.allocation is None, device.name)):
                if self._due.pop(device.name, None) is not None:
                    await self._work_on(device)
                if self._due_changed.is_set():
                    break  # there may be something more urgent
            with trio.move_on_at(min(self._due.values(), default=float("inf"))):
                await self._due_changed.wait()

    async def _work_on(self, device: PoolDevice) -> None:
        """Gets a device what it has to have, and returns when that is done or has failed; see PoolDevice.reason.

        Who is cancelled waits no longer; the work goes on.
        """
        assert self._nursery is not None
        while trio.current_time() < device.hold_until:  # noqa: ASYNC110  the CNI may ask again meanwhile
            await trio.sleep_until(device.hold_until)
        if device.working is None:
            device.working = trio.Event()
            self._nursery.start_soon(self._work, device, device.working)
        await device.working.wait()

    async def _work(self, device: PoolDevice, done: trio.Event) -> None:
        try:
            if device.allocation is None and not device.wanted:
                await self._clean(device)
            idle = device.allocation is None and not device.wanted
            if not idle or (device.net is not None and device.subfunction is None and not self._retired):
                await self._make_attachment(device)
            if device.allocation is not None:
                self._hand_over(device, device.allocation)
        except OSError as exc:
            if device.net is not None or device.wanted or exc.errno != errno.ENODEV:  # else it has left meanwhile
                self._fail(device, exc)
        else:
            if device.reason:
                log.info("%s: %s: healthy again", self.resource, device.name)
            device.reason = ""
            device.backoff.reset()
        finally:
            device.working = None
            done.set()
        self._settle(device)

    async def _clean(self, device: PoolDevice) -> None:
        """Undoes what was done to a device for its last pod; a subfunction is deleted."""
        if device.subfunction is not None:
            await self._drop_attachment(device)
            if device.net is not None:
                await trio.to_thread.run_sync(
                    self._devlink.delete, device.subfunction.pci, device.subfunction.number, abandon_on_cancel=True
                )
                log.info("%s: %s: subfunction deleted", self.resource, device.name)
                device.net = None  # as netlink is about to say
            self._undo.forget(device.name)
        await self._undo_ethtool(device)

    async def _undo_ethtool(self, device: PoolDevice) -> None:
        if device.attachment is not None and self.bpf_handler.ifindex(device.attachment) == 0:
            self._undo.forget(device.name)  # its device is no more, and another has its name
        if device.net is not None and self._undo.is_due(device.name):
            await trio.to_thread.run_sync(self._ethtool.undo, self._undo.commands(device.name), abandon_on_cancel=True)
            self._undo.forget(device.name)
            log.info("%s: %s: ethtool settings undone", self.resource, device.name)

    async def _make_attachment(self, device: PoolDevice) -> None:
        """Attaches where nothing is attached, and replaces what a former holder knows."""
        free = device.allocation is None
        options = self._options if device.allocation is None else device.allocation.options
        part = device.subfunction
        if part is not None and device.net is None and device.attachment is None:
            # One that a pod has may be with it: what is there is not made again.
            device.net = await self._make_subfunction(part) if free or not await self._is_made(part) else None
        attachment, net = device.attachment, device.net
        if attachment is not None:
            ifindex = self.bpf_handler.ifindex(attachment)
            if ifindex == 0 or (free and (not options.has_program or (net is not None and ifindex != net.ifindex))):
                await self._drop_attachment(device)
                attachment = None
        if not options.has_program:
            return
        if attachment is None:
            detaching = self._detaching.get(device.name)
            if detaching is not None and detaching is not device.leaving:
                await detaching.wait()
            if net is None:
                raise OSError(errno.ENODEV, "it is not in the host's network namespace and carries no program of ours")
            with self._count_errors():
                attach = functools.partial(self.bpf_handler.attach, net.ifindex, net.queues)
                device.attachment = await _attach_in_thread(attach)
            log.info("%s: %s: prepared, %s mode", self.resource, device.name, device.attachment.xdp_mode)
        elif attachment.handed_out and (free or device.stale):
            with self._count_errors():
                device.attachment = await trio.to_thread.run_sync(self.bpf_handler.renew, attachment)
            attachment.xskmap.close()  # here, where it is handed out, and in no thread
            if device.server is not None:
                device.server.scope.cancel()
                device.server = None
            log.info("%s: %s: prepared again", self.resource, device.name)
        device.stale = False

    @contextlib.contextmanager
    def _count_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            self.attach_errors[exc.errno or 0] += 1
            raise

    async def _is_made(self, part: Subfunction) -> bool:
        """Whether there is a subfunction, here or with a pod."""
        return await trio.to_thread.run_sync(self._devlink.exists, part.pci, part.number)

    async def _make_subfunction(self, part: Subfunction) -> NetDevice:
        """Makes a subfunction and returns its network device.

        Raises:
            OSError: It cannot be made, and none is left; ETIMEDOUT where the device does not come.
        """
        existed = await self._is_made(part)
        try:
            await trio.to_thread.run_sync(self._devlink.add, part.pci, part.number, abandon_on_cancel=True)
            log.info("%s: %s: subfunction made", self.resource, part.name)
            return await self._wait_subfunction(part)
        except OSError:
            if not existed:
                with contextlib.suppress(OSError):
                    await trio.to_thread.run_sync(self._devlink.delete, part.pci, part.number)
            raise

    async def _wait_subfunction(self, part: Subfunction) -> NetDevice:
        """Waits for the network device of a subfunction, and gives it its name."""
        with trio.move_on_after(SUBFUNCTION_TIMEOUT):
            async with contextlib.aclosing(self.net_handler.watch_devices()) as snapshots:
                async for devices in snapshots:
                    if part.name in devices:
                        return devices[part.name]
                    name = await trio.to_thread.run_sync(self._devlink.netdev, part.pci, part.number)
                    if name is not None and name in devices:
                        await trio.to_thread.run_sync(self._devlink.rename, name, part.name)
        raise OSError(errno.ETIMEDOUT, f"its network device did not come in {SUBFUNCTION_TIMEOUT:g} s")

    async def _drop_attachment(self, device: PoolDevice) -> None:
        """Detaches the program of a device."""
        attachment, device.attachment = device.attachment, None
        if attachment is not None:
            if self._undo.is_due(device.name) and self.bpf_handler.ifindex(attachment) == 0:
                self._undo.forget(device.name)  # its device is no more, and another may come by its name
            await _close_in_thread(attachment)

    def _fail(self, device: PoolDevice, exc: OSError) -> None:
        """Makes an error the device's reason, and logs it where it is news."""
        reason = f"{exc.filename}: {exc.strerror}" if exc.filename else str(exc.strerror)
        if isinstance(exc, ForeignProgramError):
            for other in self.devices.values():
                if other.attachment is not None and other.attachment.prog_id == exc.device.xdp_prog_id:
                    reason = f"it carries the program of {other.name}: somebody has exchanged names; exchange them back"
        if reason != device.reason and (device.net is not None or device.allocation is not None):
            log.warning("%s: %s is unhealthy: %s", self.resource, device.name, reason)
        device.reason = reason

    # ---- allocations

    async def allocate(self, request: api.AllocateRequest) -> api.AllocateResponse:
        """Hands over prepared devices: pinned, with a listening socket. All of the request, or nothing.

        kubelet knows best who has a device: one that is still allocated here is taken over, with a map that its former
        holder never had.

        Raises:
            RequestError: NOT_FOUND for what is no device of this pool, FAILED_PRECONDITION for an unhealthy device.
        """
        containers = [list(container.devices_ids) for container in request.container_requests]
        response = api.AllocateResponse()
        with self._wanted(name for names in containers for name in names) as devices:
            taken_over = {device for device in devices.values() if await self._make_ready(device)}
            for device in devices.values():
                await self._run_ethtool(device)
            handed_over = []
            try:
                for names in containers:
                    allocation = Allocation(self._options, since=trio.current_time())
                    answer = response.container_responses.add()
                    answer.envs[allocation.options.environment_name] = " ".join(names)
                    for name in names:
                        # Something may have happened to it while another one was waited for.
                        self._refuse_unready(devices[name], taken_over=devices[name] in taken_over)
                        handed_over.append(devices[name])
                        self._hand_over(devices[name], allocation)
                        answer.mounts.extend(self._mounts(devices[name], allocation.options))
                    log.info("%s: allocated: %s", self.resource, " ".join(names))
            except (OSError, RequestError):
                for device in handed_over:
                    self._vacate(device)
                raise
        self._pod_resources.hurry(PodResources.BUSY)  # kubelet lists the pod when it has our answer
        return response

    def _mounts(self, device: PoolDevice, options: PoolOptions) -> Iterator[api.Mount]:
        """What the pod mounts: the directory of its socket, and in it the file of the map."""
        path = f"{POD_SOCKET_DIR}/{device.name}"
        if options.has_socket:
            yield api.Mount(host_path=str(self._uds_dir / device.name), container_path=path, read_only=True)
        if options.bpf_map_pinning_enable:
            pinned = self.bpf_handler.pinned_map(self.name, device.name)
            yield api.Mount(host_path=str(pinned), container_path=f"{path}/{MAP_NAME}", read_only=True)

    async def _run_ethtool(self, device: PoolDevice) -> None:
        """Runs the pool's ethtool commands for a device that is about to be allocated.

        Raises:
            RequestError: One failed; those before it are undone when the device is settled.
        """
        names = self.resource, device.name
        for command in self._options.ethtool_cmds:
            if device.net is None:
                log.warning("%s: %s: ethtool %s is left out: the device is still with its last pod", *names, command)
            elif re.search(r"(?<!\w)-ip-(?!\w)", command):  # not as in tx-checksum-ip-generic
                log.warning("%s: %s: ethtool %s is left out: only the CNI knows the address", *names, command)
            else:
                arguments = self._ethtool.arguments(command, device.name)
                before = self._undo.commands(device.name)

                def remember(commands: list[list[str]], before: list[list[str]] = before) -> None:
                    self._undo.keep(device.name, [*before, *commands])

                try:
                    await trio.to_thread.run_sync(self._ethtool.apply, arguments, remember, abandon_on_cancel=True)
                except OSError as exc:
                    raise RequestError(
                        f"{self.resource}: {device.name}: ethtoolCmds: {command!r}: {exc.strerror}",
                        status="FAILED_PRECONDITION",
                    ) from exc
                log.info("%s: %s: ethtool %s", *names, " ".join(arguments))

    async def get_preferred_allocation(
        self, request: api.PreferredAllocationRequest
    ) -> api.PreferredAllocationResponse:
        """Advises kubelet on devices near to each other; see prefer_devices. Never fails."""
        nodes = {name: _nodes_of(device.topology) for name, device in self.devices.items()}
        response = api.PreferredAllocationResponse()
        for container in request.container_requests:
            names = prefer_devices(
                container.available_deviceIDs, container.must_include_deviceIDs, container.allocation_size, nodes
            )
            response.container_responses.add(deviceIDs=names)
        return response

    async def pre_start_container(self, request: api.PreStartContainerRequest) -> None:
        """Makes sure that program, map, pins and socket of a container's devices are there before it starts.

        A container that starts again gets a fresh map and a new socket: nothing that it left is of any effect.

        Raises:
            RequestError: FAILED_PRECONDITION where one is not and cannot be made.
        """
        allocation = Allocation(self._options, since=trio.current_time())
        with self._wanted(dict.fromkeys(request.devices_ids)) as devices:
            for device in devices.values():
                forgotten = device.allocation is None or device.allocation.hearsay
                if device.allocation is not None:
                    device.stale = device.started
                    await self._work_on(device)
                else:  # forgotten, as after a reboot; kubelet knows better
                    await self._make_ready(device)
                    self._hand_over(device, allocation)
                    log.info("%s: %s: allocated, as kubelet says", self.resource, device.name)
                if forgotten and device.net is not None and not self._undo.is_due(device.name):
                    await self._run_ethtool(device)
                device.started = True
                if device.reason:
                    raise RequestError(
                        f"{self.resource}: {device.name}: {device.reason}; delete the pod to have it made again",
                        status="FAILED_PRECONDITION",
                    )
        self._pod_resources.hurry()

    @contextlib.contextmanager
    def _wanted(self, names: Iterable[str]) -> Iterator[dict[str, PoolDevice]]:
        """Finds devices, in order of their names, and keeps them from being forgotten while they are waited for."""
        devices: dict[str, PoolDevice] = {}
        for name in sorted(names):
            device = self.devices.get(name)
            if device is None:
                raise RequestError(f"{self.resource}: no device {name}", status="NOT_FOUND")
            devices[name] = device
        for device in devices.values():
            device.wanted += 1
            device.known = True
        try:
            yield devices
        finally:
            for device in devices.values():
                device.wanted -= 1
                self._settle(device)

    async def _make_ready(self, device: PoolDevice) -> bool:
        """Waits until a device can be handed over; returns whether it was taken from a former holder for that."""
        while device.working is not None:
            await device.working.wait()
        taken_over = device.allocation is not None
        if taken_over:
            log.info("%s: %s: taken over from an earlier allocation", self.resource, device.name)
            self._vacate(device, "taken_over")
        await self._undo_ethtool(device)
        if not self._is_ready(device) or (device.subfunction is not None and device.attachment is None):
            await self._work_on(device)
        while device.allocation is None and not device.reason and not self._is_ready(device):  # the CNI came between
            await self._work_on(device)
        self._refuse_unready(device, taken_over=taken_over)
        return taken_over

    def _refuse_unready(self, device: PoolDevice, *, taken_over: bool) -> None:
        """Refuses a device that is not as it has to be, or that is away, where not in its former holder's pod."""
        if device.net is None and not taken_over and not (device.subfunction is not None and device.reason):
            raise RequestError(f"{self.resource}: no device {device.name} any more", status="NOT_FOUND")
        if not self._is_ready(device):
            reason = device.reason or "it has changed, or was given away, in this moment"
            raise RequestError(f"{self.resource}: {device.name} is unhealthy: {reason}", status="FAILED_PRECONDITION")

    def _hand_over(self, device: PoolDevice, allocation: Allocation) -> None:
        """Makes a device that of an allocation: pins and listening socket, where they are missing.

        Raises:
            OSError: They cannot be made.
        """
        assert self._nursery is not None
        options = allocation.options
        if device.allocation is not allocation:
            device.allocation, device.owners, device.missed = allocation, (), 0
            device.known = device.kept = True
            device.started = allocation.restored
        # A running pod keeps its user, whatever the configuration says now.
        user = options.uid
        pinned_map = self.bpf_handler.pinned_map(self.name, device.name)
        if allocation.restored:
            user = (
                self._host.user_of(self._uds_dir / device.name / SOCKET_NAME) or self._host.user_of(pinned_map) or user
            )
        if device.attachment is not None and options.has_program:
            if not self.bpf_handler.is_pinned(device.attachment, self.name, device.name):
                self.bpf_handler.pin(device.attachment, self.name, device.name)
            if options.bpf_map_pinning_enable:
                device.attachment.handed_out = True
                if user:
                    self._host.grant(pinned_map, user, 6)
        if device.server is not None and not device.server.is_there():
            device.server.scope.cancel()
            device.server = None
        if device.server is None and options.has_socket:
            server = self.server_factory(
                self._uds_dir / device.name,
                name=f"{self.resource}: {device.name}",
                idle_timeout=options.idle_timeout,
                is_owner=functools.partial(self._is_owner, device),
                xskmap=functools.partial(self._xskmap, device),
                fuzz=options.uds_fuzz,
                counts=self.handshakes,
            )
            self._nursery.start_soon(server.serve, server.listen(self._host, user))
            device.server = server
        if options.has_socket and options.bpf_map_pinning_enable:
            self._make_mount_point(self._uds_dir / device.name / MAP_NAME)

    @staticmethod
    def _make_mount_point(path: Path) -> None:
        """Makes the empty file that the map is mounted on, if it is not there; a link in its place is not followed."""
        if path.is_symlink():
            path.unlink()
        Fd(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)).close()

    def _vacate(self, device: PoolDevice, released: str = "") -> None:
        """Ends a device's allocation: conversations ended, socket and directory removed, unpinned.

        A pod that still has the old directory mounted finds it empty for ever: the next one is another.

        Args:
            device: Whose.
            released: Why, see `releases`; "" where it was never really given away.
        """
        if released:
            self.releases[released] += 1
        if device.server is not None:
            device.server.scope.cancel()
            device.server = None
        shutil.rmtree(self._uds_dir / device.name, ignore_errors=True)
        with contextlib.suppress(OSError):  # other devices of the pool are still served
            self._uds_dir.rmdir()
        self._unpin(device.name)
        if device.attachment is not None:
            device.attachment.pinned = False
        device.allocation, device.owners, device.free_since = None, (), trio.current_time()
        info = self._devices.get(device.name)
        if device.net is None and device.subfunction is None and isinstance(info, PoolDeviceInfo):
            device.net = info.net  # what had only its name until now

    async def let_go(self, name: str) -> bool:
        """Detaches whatever is on a device, and makes nothing of it for a while: its pod has ended, says the CNI.

        If kubelet has given it to the next pod already, that pod keeps the allocation, and gets a program when the
        while is over.

        Returns:
            Whether it is a device of this pool.
        """
        await self._restored.wait()  # else it does not know yet what it has
        device = self.devices.get(name)
        if device is None:
            return False
        device.wanted += 1  # what may not happen to it meanwhile is the same
        try:
            async with device.letting_go:
                listed = device.allocation is not None and await self._is_listed(name)
                if listed is not False and await self._is_elsewhere(device):
                    log.info("%s: %s: the CNI lets go of it, but its pod has it: nothing is done", self.resource, name)
                    return True  # late, for an earlier pod: it detaches here, where the device is not
                while device.working is not None:
                    await device.working.wait()
                # From here on nothing is waited for: whoever has it now may have come only after the question.
                if device.allocation is not None and not listed and not self._is_unknown(device, device.allocation):
                    log.info("%s: %s: released: the CNI says so", self.resource, name)
                    self._vacate(device, "cni")
                self._unpin(name)
                now = trio.current_time()
                device.hold_until = now + (HOLD_OFF if device.allocation is None else HOLD_OFF_TAKEN)
                # It may not have been seen to be back yet: then it is forgotten now, and comes as a new one.
                self._held = {held: until for held, until in self._held.items() if until > now} | {
                    name: device.hold_until
                }
                await self._drop_attachment(device)
        finally:
            device.wanted -= 1
            self._settle(device)
        return True

    async def _is_listed(self, name: str) -> bool | None:
        """Whether kubelet lists a device now, and so for another pod than that which ends; None if it does not say."""
        with contextlib.suppress(RpcError), trio.move_on_after(OWNER_TIMEOUT):
            return (self.resource, name) in (await self._pod_resources.ask()).owners
        return None

    async def _is_elsewhere(self, device: PoolDevice) -> bool:
        """Whether a device lives in another network namespace at this moment."""
        if device.attachment is not None and not self.bpf_handler.ifindex(device.attachment):
            return False
        return device.name not in await trio.to_thread.run_sync(self.net_handler.devices)

    @staticmethod
    def _is_unknown(device: PoolDevice, allocation: Allocation) -> bool:
        """Whether an allocation is so new that kubelet has never listed it."""
        young = trio.current_time() - allocation.since < RELEASE_GRACE
        return young and not device.owners and not allocation.restored

    def _unpin(self, name: str) -> None:
        try:
            self.bpf_handler.unpin(self.name, name)
        except OSError as exc:
            log.warning("%s: %s: cannot be unpinned: %s", self.resource, name, exc)

    async def _is_owner(self, device: PoolDevice, hostname: str) -> bool:
        """Whether a hostname is that of a pod that holds the device; asks kubelet where it is not known yet.

        Raises:
            RpcError: kubelet does not say.
        """
        allocation = device.allocation
        if allocation is None or self._is_held_by(device, hostname):
            return allocation is not None
        # In the first minute kubelet may still have listed the last pod, and not yet this one.
        if not device.owners or trio.current_time() - allocation.since < RELEASE_GRACE:
            trouble = RpcError("DEADLINE_EXCEEDED", "kubelet's pod resources do not answer")
            with trio.move_on_after(OWNER_TIMEOUT) as waiting:
                while True:
                    try:
                        await self._pod_resources.ask()  # _reconcile sees the answer first
                        break
                    except RpcError as exc:
                        trouble = exc
            if waiting.cancelled_caught:
                raise trouble
        return self._is_held_by(device, hostname)

    @staticmethod
    def _is_held_by(device: PoolDevice, hostname: str) -> bool:
        return any(hostname_matches(hostname, owner.pod) for owner in device.owners)

    def _xskmap(self, device: PoolDevice, name: str) -> Fd | None:
        """The map of a device of the same allocation."""
        wanted = self.devices.get(name)
        if wanted is None or wanted.attachment is None or wanted.allocation is None:
            return None
        if wanted.allocation is not device.allocation:
            return None
        wanted.attachment.handed_out = True
        return wanted.attachment.xskmap

    def _reconcile(self, view: PodView) -> bool:
        """Compares the allocations with what kubelet says; returns whether there are any."""
        if not view.empty:
            first, self._adopted = not self._adopted, True
            self._adopt(view)
            if first:
                for name in self._orphans.difference(self.allocated()):
                    shutil.rmtree(self._uds_dir / name, ignore_errors=True)
                self._orphans.clear()
                for device in [device for device in self.devices.values() if self._has_leftover(device)]:
                    self._settle(device)  # which has waited for this
        joined: dict[tuple[Owner, ...], Allocation] = {}
        here = {net.xdp_prog_id for net in self._host_devices()}
        for device in list(self.devices.values()):
            allocation = device.allocation
            if allocation is None or view.asked_at < allocation.since:
                continue
            owners = view.owners.get((self.resource, device.name), ())
            if not owners:
                self._miss(device, allocation, view, here)
                continue
            device.missed = 0
            if owners != device.owners:
                log.info("%s: %s: held by %s", self.resource, device.name, printable(", ".join(map(str, owners))))
                if allocation.restored and not device.owners:
                    device.allocation = joined.setdefault(owners, allocation)
                device.owners = owners
        return bool(not self._adopted or self._strange or any(device.allocation for device in self.devices.values()))

    def _adopt(self, view: PodView) -> None:
        """Takes over what pods have without a pin that says so: after a reboot of the node, or in a raw pool."""
        listed = [name for resource_name, name in view.owners if resource_name == self.resource]
        never = {net.name for net in self._host_devices() if _never_taken(net)}
        strange = {name for name in listed if name not in self.devices and (name in never or not is_device_name(name))}
        if strange - self._strange:
            log.warning("%s: kubelet lists what is no device of ours: %.200r", self.resource, sorted(strange))
        self._strange = strange
        adopted = False
        for name in listed:
            if name in strange:
                continue
            device = self.devices.get(name)
            if device is None:
                device = self.devices[name] = PoolDevice(name)
            elif device.allocation or device.wanted or view.asked_at <= max(device.free_since, device.hold_until):
                continue
            log.info("%s: %s: still allocated, says kubelet", self.resource, name)
            device.allocation = Allocation(self._options, since=view.asked_at, restored=True, hearsay=True)
            device.kept = adopted = True
            self._settle(device, news=True)
        if adopted:
            self._released()  # they are not for other pools to give away

    def _miss(self, device: PoolDevice, allocation: Allocation, view: PodView, here: Collection[int]) -> None:
        """Counts that kubelet does not list an allocated device, and releases it once that is certain.

        A device that lives in some other namespace is in use, whatever kubelet says: it comes back, or dies with the
        namespace, when its pod ends. `here` has the ids of the programs on the devices of the host namespace.
        """
        attachment = device.attachment
        if (
            device.net is None
            and attachment is not None
            and attachment.prog_id not in here  # else it is here, by another name
            and self.bpf_handler.ifindex(attachment)
        ):
            device.missed = 0
            return
        if device.missed == 0 or device.missed_empty != view.empty:
            device.missed, device.missed_since, device.missed_empty = 0, view.asked_at, view.empty
        device.missed += 1
        after = RELEASE_AFTER_EMPTY if view.empty else RELEASE_AFTER
        certain = (
            device.missed >= RELEASE_AFTER_LISTS
            and view.asked_at - device.missed_since >= after
            and view.asked_at - allocation.since >= RELEASE_GRACE
        )
        if certain and device.working is None and not device.wanted:
            log.info("%s: %s: released: kubelet lists no pod that holds it", self.resource, device.name)
            self._vacate(device, "kubelet")
            self._settle(device)


def new_pool_manager(config: PoolConfig) -> PoolManager:
    """A pool in the usual places; see PoolManager."""
    return PoolManager(config)


async def _attach_in_thread(attach: Callable[[], Attachment]) -> Attachment:
    """Attaches, which may take seconds; who is cancelled does not wait for it, and the thread detaches again."""
    lock = threading.Lock()
    wanted = True
    made: list[Attachment] = []

    def run() -> Attachment:
        attachment = attach()
        with lock:
            if wanted:
                made.append(attachment)
        if not made:
            attachment.close()
        return attachment

    try:
        return await trio.to_thread.run_sync(run, abandon_on_cancel=True)
    except trio.Cancelled:
        with lock:
            wanted = False
        for attachment in made:  # in this very moment
            attachment.close()
        raise


async def _close_in_thread(attachment: Attachment) -> None:
    """Closes an attachment, which may detach: the kernel takes its time for that."""
    with trio.CancelScope(shield=True):
        await trio.to_thread.run_sync(attachment.close)


class Syncer:
    """What the CNI calls when it has taken a device from a pod: it is going to detach whatever is attached.

    The service of the Go plugin: ``dpcnisyncer.NetDev`` on ``afxdp-syncer.sock`` beside kubelet's socket.

    Args:
        pools: Says which pools there are, as soon as that is known.
        kubelet_dir: See ResourceServer.
    """

    TIMEOUT = 30.0
    """Seconds for one call."""

    def __init__(
        self, pools: Callable[[], Awaitable[Iterable[PoolManager]]], *, kubelet_dir: Path = KUBELET_DIR
    ) -> None:
        self.path = kubelet_dir / "device-plugins" / SYNCER_NAME
        self._pools = pools

    async def DelNetDev(self, request: syncer.DeleteNetDevReq) -> syncer.DeleteNetDevResp:  # noqa: N802  the API's name
        """Lets go of a device; when it returns, nothing of ours is on it. To ask twice is fine.

        Raises:
            RequestError: No device is named.
            OSError: The kernel does not let us.
        """
        if not request.name:
            raise RequestError("DelNetDev of no device")
        if not any([await pool.let_go(request.name) for pool in await self._pools()]):
            log.info("the CNI lets go of %r, which no pool has", request.name)
        return syncer.DeleteNetDevResp(ret=0)

    async def run(self) -> NoReturn:
        """Serves until cancelled; anew where kubelet has wiped its directory."""
        method = Method(request_type=syncer.DeleteNetDevReq, call=self.DelNetDev, timeout=self.TIMEOUT)
        backoff, trouble = Backoff(0.1, 10.0), ""
        with DirectoryWatch(self.path.parent) as watch:
            while True:
                try:
                    await self._serve(GrpcServer({"dpcnisyncer.NetDev": {"DelNetDev": method}}), watch)
                    backoff.reset()
                except FileNotFoundError:
                    await watch.changed()  # there is no kubelet yet
                except (OSError, EndpointBusyError) as exc:
                    level = logging.DEBUG if str(exc) == trouble else logging.WARNING
                    log.log(level, "the CNI cannot be served on %s: %s", self.path, exc)
                    trouble = str(exc)
                await trio.sleep(backoff.delay())

    async def _serve(self, server: GrpcServer, watch: DirectoryWatch) -> None:
        """Serves on a new socket until that is removed."""
        refuse_busy(self.path)
        listener = open_unix_listener(self.path)
        try:
            own = Place(self.path)
        except OSError:
            listener.close()
            raise
        with own, _single_errors():
            async with trio.open_nursery() as nursery:
                try:
                    await nursery.start(
                        server.serve_unix, trio.SocketListener(trio.socket.from_stdlib_socket(listener))
                    )
                    while own.is_there():
                        await watch.changed()
                finally:
                    if own.is_there():
                        self.path.unlink()
                    nursery.cancel_scope.cancel()


class KindKeeper:
    """Keeps the network for a cluster of kind complete, where that is wanted: pods take their veths with them.

    Args:
        kind: The bridge and the veths.
        network: Where they are.
        allocated: Says which devices pods have.
    """

    def __init__(self, kind: KindHandler, network: NetworkHandler, allocated: Callable[[], Mapping[str, str]]) -> None:
        self._kind = kind
        self._network = network
        self._allocated = allocated
        self._wanted = False
        self._changed = trio.Event()
        self._busy = trio.Lock()

    async def want(self, wanted: bool) -> None:
        """Makes the network, or removes what no pod has of it.

        Raises:
            KindNetworkError: It cannot be made.
        """
        if wanted != self._wanted:
            self._wanted = wanted
            changed, self._changed = self._changed, trio.Event()
            changed.set()
            await (self._set_up() if wanted else self.remove())

    async def remove(self) -> None:
        """Removes what no pod has."""
        try:
            async with self._busy:
                await trio.to_thread.run_sync(self._kind.remove, set(self._allocated()))
        except OSError as exc:
            log.warning("the kind network is not removed: %s", exc)

    async def run(self) -> NoReturn:
        """Makes again what is missing, until cancelled; then removes what no pod has."""
        try:
            while True:
                changed = self._changed
                if self._wanted:
                    await _first_of(self._follow, changed.wait)
                else:
                    await changed.wait()
        finally:
            if self._wanted:
                with trio.move_on_after(5, shield=True):
                    await self.remove()

    async def _follow(self) -> None:
        async with contextlib.aclosing(self._network.watch_devices()) as snapshots:
            async for devices in snapshots:
                if self._wanted and self._kind.missing(devices):
                    try:
                        await self._set_up()
                    except KindNetworkError as exc:
                        log.warning("%s", exc)

    async def _set_up(self) -> None:
        try:
            async with self._busy:
                done = await trio.to_thread.run_sync(self._kind.set_up)
            for made in done:
                log.info("kind network: made %s", made)
        except OSError as exc:
            raise KindNetworkError(f"the kind network cannot be made: {exc.filename}: {exc.strerror}") from exc


# ======================================================================================================================
# Observation
#
# What the daemon shows of itself: probes, metrics and status, as pages over HTTP. Nothing here changes anything of the
# pools; what has to be counted they count themselves. h11 and prometheus_client are imported when they are first used.
# ======================================================================================================================

STATUS_NAME = ".status.sock"
"""The socket in the directory of the pods' sockets on which the daemon tells its status; no pool is called so."""

HTTP_CONNECTIONS_MAX = 100
"""Connections at the same time; for a further one the oldest is closed, if possible of those that ask nothing now."""
HTTP_HEAD_MAX, HTTP_BODY_MAX = 8 << 10, 16 << 10
"""Bytes in the head and in the body of a request."""
HTTP_IDLE_TIMEOUT, HTTP_SEND_TIMEOUT = 30.0, 10.0
"""Seconds for a request to come, and for its reply to be read."""
HTTP_LINGER = 1.0
"""Seconds in which a peer may read why its request was refused."""
HEALTH_TIMEOUT = 2.0
"""Seconds in which our own sockets for kubelet have to answer."""

HttpAddress = Path | tuple[int, tuple[Any, ...]]
"""A Unix socket, or an address family and what bind(2) takes."""


def parse_http_address(text: str) -> HttpAddress:
    """Reads ``127.0.0.1:9808``, ``[::1]:9808`` or the path of a Unix socket, which has a slash.

    Raises:
        ValueError: It is none of them.
    """
    if "/" in text:
        if len(os.fsencode(text)) > SUN_PATH_MAX or not text.isprintable():
            raise ValueError(f"{text!r} is no path of at most {SUN_PATH_MAX} bytes")
        return Path(text)
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+(?:%\w+)?)\]|([0-9]+(?:\.[0-9]+){3})):([0-9]{1,5})", text)
    if match is not None and int(match[3]) < 1 << 16:
        with contextlib.suppress(OSError):
            numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
            ((family, _, _, _, address),) = socket.getaddrinfo(
                match[1] or match[2], match[3], type=socket.SOCK_STREAM, flags=numeric
            )
            return family, address
    raise ValueError(f"{text!r} is neither ADDRESS:PORT nor [IPV6 ADDRESS]:PORT nor the path of a socket with a slash")


@contextlib.contextmanager
def http_listener(address: HttpAddress) -> Iterator[tuple[socket.socket, str, Callable[[], bool]]]:
    """Listens at an address while the block runs; of a Unix socket, which is its user's alone, the file goes then.

    Returns:
        The non-blocking socket, where it listens, for people, and what says whether nobody has removed it.

    Raises:
        EndpointBusyError: Another process does.
        OSError: It cannot; the file name is the address.
    """
    with contextlib.ExitStack() as stack:
        is_there: Callable[[], bool] = lambda: True  # noqa: E731
        if isinstance(address, Path):
            name = str(address)
            if address.is_symlink() or (address.exists() and not address.is_socket()):
                raise OSError(errno.EEXIST, "is there already, and is no socket", name)
            refuse_busy(address)
            listener = stack.enter_context(open_unix_listener(address))
            address.chmod(0o600)
            is_there = stack.enter_context(Place(address)).is_there
            stack.callback(lambda: address.unlink() if is_there() else None)
        else:
            family, where = address
            name = "{}:{}".format(f"[{where[0]}]" if family == socket.AF_INET6 else where[0], where[1])
            listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listener.setblocking(False)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(where)
                listener.listen(128)
            except OSError as exc:
                if exc.errno == errno.EADDRINUSE:
                    raise EndpointBusyError(f"{name}: another process serves this; end it first") from exc
                raise OSError(exc.errno, exc.strerror, name) from exc
            name = f"{name.rpartition(':')[0]}:{listener.getsockname()[1]}"
        yield listener, name, is_there


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What is answered to a request."""

    body: bytes
    status: int = 200
    content_type: str = "text/plain; charset=utf-8"
    allow: str = ""


def text_page(lines: Iterable[str], status: int = 200) -> Page:
    """A page of lines for people."""
    return Page(body="".join(f"{line}\n" for line in lines).encode(errors="backslashreplace"), status=status)


def json_page(content: object, status: int = 200) -> Page:
    """A page for programs; names of devices may be no text, which json.dumps can say."""
    return Page(body=json.dumps(content).encode() + b"\n", status=status, content_type="application/json")


Pages = Mapping[str, Mapping[str, Callable[[], Awaitable[Page]]]]
"""Path → method → what makes the page. What is there for GET is there for HEAD."""


class HttpServer:
    """Serves pages over HTTP/1.1. What a peer does can end its own connection and no other."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._open: dict[trio.CancelScope, bool] = {}  # whether it has asked nothing yet; the oldest is the first
        self._turns: dict[object, trio.Lock] = collections.defaultdict(trio.Lock)

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._open)

    async def serve(
        self, listener: socket.socket, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> NoReturn:
        """Serves a listening socket until cancelled, and closes it."""
        acceptor = trio.SocketListener(trio.socket.from_stdlib_socket(listener))
        async with acceptor, trio.open_nursery() as nursery:
            task_status.started()
            while True:
                try:
                    stream = await acceptor.accept()
                except OSError as exc:
                    log.warning("HTTP: cannot accept connections: %s", exc.strerror)
                    await trio.sleep(1)
                    continue
                while len(self._open) >= HTTP_CONNECTIONS_MAX:
                    oldest = min(self._open, key=lambda scope: not self._open[scope])
                    del self._open[oldest]
                    oldest.cancel()
                scope = trio.CancelScope()
                self._open[scope] = True
                nursery.start_soon(self._serve_connection, stream, scope)

    async def _serve_connection(self, stream: trio.SocketStream, scope: trio.CancelScope) -> None:
        try:
            with scope:
                async with stream:
                    await self._converse(stream, scope)
        except (trio.BrokenResourceError, trio.TooSlowError):
            pass
        except Exception:
            log.exception("HTTP: connection closed, which is a bug")
        finally:
            self._open.pop(scope, None)

    async def _converse(self, stream: trio.SocketStream, scope: trio.CancelScope) -> None:
        import h11

        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=HTTP_HEAD_MAX)
        while True:
            head = False
            try:
                with trio.fail_after(HTTP_IDLE_TIMEOUT):
                    request = await self._next_request(connection, stream)
                if request is None:
                    return
                head = request.method == b"HEAD"
                page = await self._page(request, scope)
            except h11.RemoteProtocolError as exc:
                page = text_page([str(exc)], exc.error_status_hint)
            headers = [
                ("Date", datetime.datetime.now(datetime.UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")),
                ("Content-Type", page.content_type),
                ("Content-Length", str(len(page.body))),
                ("Cache-Control", "no-store"),
                *([("Allow", page.allow)] if page.allow else []),
            ]
            refused = connection.their_state not in (h11.DONE, h11.MUST_CLOSE)
            if refused:
                headers.append(("Connection", "close"))
            data = (
                connection.send(
                    h11.Response(status_code=page.status, headers=headers, reason=HTTPStatus(page.status).phrase)
                )
                or b""
            )
            data += (connection.send(h11.Data(data=page.body)) or b"") if not head else b""
            data += connection.send(h11.EndOfMessage()) or b""
            with trio.fail_after(HTTP_SEND_TIMEOUT):
                await stream.send_all(data)
            if refused:  # what it still sends would have the kernel throw away our answer
                with trio.move_on_after(HTTP_LINGER):
                    await stream.send_eof()
                    while await stream.receive_some(1 << 16):
                        pass
            if connection.our_state is not h11.DONE:
                return
            connection.start_next_cycle()
            if scope in self._open:
                self._open[scope] = True

    @staticmethod
    async def _next_request(connection: h11.Connection, stream: trio.SocketStream) -> h11.Request | None:
        """Waits for a whole request; None where none comes any more."""
        import h11

        request, size = None, 0
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                if request is not None and connection.they_are_waiting_for_100_continue:
                    return request  # nobody needs the body
                connection.receive_data(await stream.receive_some(1 << 14))
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                size += len(event.data)
                if size > HTTP_BODY_MAX:
                    raise h11.RemoteProtocolError("the body is too long", error_status_hint=413)
            elif isinstance(event, h11.EndOfMessage):
                return request
            else:
                return None

    async def _page(self, request: h11.Request, scope: trio.CancelScope) -> Page:
        if scope in self._open:
            self._open[scope] = False
        match = re.match(r"(?:https?://[^/?]*)?([^?]*)", request.target.decode("latin-1"))
        methods = self._pages.get(match[1] if match else "")
        if methods is None:
            return text_page([f"no such page; there are {', '.join(self._pages)}"], 404)
        method = request.method.decode("latin-1")
        make = methods.get("GET" if method == "HEAD" else method)
        if make is None:
            allow = ", ".join([*methods, *(["HEAD"] if "GET" in methods else [])])
            return dataclasses.replace(text_page([f"this page is for {allow}"], 405), allow=allow)
        try:
            async with self._turns[make]:  # however many ask for this page, whoever asks for another one waits for none
                return await make()
        except Exception:
            log.exception("HTTP: %s failed, which is a bug", match[1] if match else "")
            return text_page(["failed, see the log of the daemon"], 500)


HANDSHAKES = {
    (Connect, HOST_OK): ("connect", "ok"),
    (Connect, HOST_NAK): ("connect", "nak"),
    (Connect, ERROR): ("connect", "error"),
    (GetVersion, HANDSHAKE_VERSION): ("version", "ok"),
    (GetXskMap, FD_ACK): ("xsk_map_fd", "ok"),
    (GetXskMap, FD_NAK): ("xsk_map_fd", "nak"),
    (ConfigBusyPoll, BUSY_POLL_ACK): ("config_busy_poll", "ok"),
    (ConfigBusyPoll, BUSY_POLL_NAK): ("config_busy_poll", "nak"),
    (Fin, FIN_ACK): ("fin", "ok"),
    (Malformed, NAK): ("unknown", "nak"),
}
"""Request and reply → verb and result in the metrics. There are no others."""


class Observation:
    """Reads what the pools do.

    Args:
        pools: By name, as they come and go.
        configured: Says which pools there have to be.

    Attributes:
        sockets: Further sockets that have to be there, and what says whether they are.
    """

    def __init__(self, pools: Mapping[str, PoolManager], configured: Callable[[], Iterable[str]]) -> None:
        self._all = pools
        self._configured = configured
        self._begun = trio.current_time()
        self._limiter = trio.CapacityLimiter(1)  # whoever asks, however often, takes no thread from the pools
        self.sockets: dict[str, Callable[[], bool]] = {}

    def pools(self) -> list[PoolManager]:
        """The pools that are configured or still have pods."""
        return [pool for pool in self._all.values() if pool.config is not None or pool.devices]

    def pages(self) -> Pages:
        """The probes and the metrics."""
        return {"/healthz": {"GET": self.healthz}, "/readyz": {"GET": self.readyz}, "/metrics": {"GET": self.metrics}}

    # ---- probes

    def missing_sockets(self) -> Iterator[str]:
        """Yields a line for each socket that we have made and somebody has removed."""
        for path, is_there in self.sockets.items():
            if not is_there():
                yield f"{path} was removed"
        for pool in self._all.values():
            if pool.grpc_server is not None and not pool.socket_path.is_socket():
                yield f"{pool.socket_path} was removed"
            for device in pool.devices.values():
                if device.server is not None and not device.server.is_there():
                    yield f"{device.server.path} was removed"

    def unready_pools(self) -> Iterator[str]:
        """Yields a line for each configured pool that kubelet does not know or does not watch."""
        for name in self._configured():
            pool = self._all.get(name)
            if pool is None:
                yield f"{NAMESPACE}/{name}: not begun yet"
            elif pool.config is not None and not (pool.registered and pool.watched):
                yield f"{pool.resource}: {self._kubelet_trouble(pool)}"

    @staticmethod
    def _kubelet_trouble(pool: PoolManager) -> str:
        if pool.registered:
            return "registered, but kubelet does not watch the devices"
        return f"not registered: {pool.trouble or 'kubelet has not answered yet'}"

    async def silent_pools(self) -> list[str]:
        """Lines for the pools that serve kubelet, as they think, and do not answer."""
        lines = []

        async def ask(pool: PoolManager) -> None:
            method, timeout = "v1beta1.DevicePlugin/GetDevicePluginOptions", HEALTH_TIMEOUT
            try:
                await call_unix(pool.socket_path, method, api.Empty(), api.DevicePluginOptions, timeout=timeout)
            except RpcError as exc:
                if pool.grpc_server is not None:  # else it has ended meanwhile
                    lines.append(f"{pool.resource}: does not answer: {exc}")

        async with trio.open_nursery() as nursery:
            for pool in self._all.values():
                if pool.grpc_server is not None:
                    nursery.start_soon(ask, pool)
        return sorted(lines)

    async def healthz(self) -> Page:
        """Whether we live: that there is an answer, also on our sockets for kubelet, and nobody has removed others."""
        wrong = list(self.missing_sockets()) or await self.silent_pools()
        return text_page(wrong or ["ok"], 503 if wrong else 200)

    async def readyz(self) -> Page:
        """Whether kubelet knows and watches all pools."""
        wrong = list(self.unready_pools())
        return text_page(wrong or ["ok"], 503 if wrong else 200)

    # ---- metrics

    async def metrics(self) -> Page:
        """All metrics in Prometheus's text format."""
        in_thread = functools.partial(trio.to_thread.run_sync, limiter=self._limiter)
        exposition = await in_thread(importlib.import_module, "prometheus_client.exposition")  # which takes long
        body = await in_thread(exposition.generate_latest, _Families(self.families()))
        return Page(body=body, content_type=exposition.CONTENT_TYPE_LATEST)

    def families(self) -> list[Any]:
        """The metrics as prometheus_client has them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        pools = self.pools()
        found: list[Any] = []

        def add(kind: Callable[..., Any], name: str, text: str, labels: str, *samples: tuple[Any, ...]) -> None:
            family = kind(f"afxdpd_{name}", text, labels=labels.split())
            for *values, number in samples:
                family.add_metric(values, number)
            found.append(family)

        def add_histogram(name: str, text: str, of: Callable[[PoolManager], Histogram]) -> None:
            family = HistogramMetricFamily(f"afxdpd_{name}", text, labels=["pool"])
            for pool in pools:
                histogram = of(pool)
                bounds = [*map(str, histogram.bounds), "+Inf"]
                family.add_metric([pool.name], list(zip(bounds, histogram.cumulated(), strict=True)), histogram.total)
            found.append(family)

        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        states = {pool.name: collections.Counter(info.state for info in pool.listed().values()) for pool in pools}
        add(gauge, "build_info", "The daemon's version; the value is always 1.", "version", (__version__, 1))
        add(
            *(gauge, "devices", "Devices that kubelet is told of, by health.", "pool health"),
            *((name, state, count[state]) for name, count in states.items() for state in (HEALTHY, UNHEALTHY)),
        )
        add(
            *(gauge, "allocated_devices", "Devices that pods have.", "pool"),
            *((pool.name, len(pool.allocated())) for pool in pools),
        )
        add(
            *(counter, "allocations", "Devices that kubelet was given in Allocate.", "pool"),
            *((pool.name, pool.allocations) for pool in pools),
        )
        add(
            *(counter, "allocate_errors", "Calls of Allocate that failed.", "pool"),
            *((pool.name, pool.allocate_errors) for pool in pools),
        )
        add_histogram(
            "allocate_duration_seconds",
            "From the arrival of a call of Allocate until there is an answer, also a failure.",
            lambda pool: pool.allocate_seconds,
        )
        add(
            counter,
            "releases",
            "Devices that were released, since kubelet lists no pod, the CNI says so, or Allocate takes them over.",
            "pool reason",
            *((pool.name, reason, number) for pool in pools for reason, number in pool.releases.items()),
        )
        add(
            *(counter, "registrations", "Registrations that kubelet has accepted.", "pool"),
            *((pool.name, pool.registrations) for pool in pools),
        )
        add(
            *(gauge, "kubelet_connected", "Whether a configured pool is registered and watched by kubelet.", "pool"),
            *((pool.name, int(pool.registered and pool.watched)) for pool in pools if pool.config is not None),
        )
        add(
            *(gauge, "sessions", "Open connections of pods.", "pool"),
            *((pool.name, sum(map(_sessions, pool.devices.values()))) for pool in pools),
        )
        add(
            *(counter, "handshake_requests", "Requests of pods, by verb and result.", "pool verb result"),
            *(
                (pool.name, *labels, pool.handshakes.requests[key])
                for pool in pools
                for key, labels in HANDSHAKES.items()
            ),
        )
        add_histogram(
            "handshake_duration_seconds",
            "From accepting a pod's connection until the first descriptor of a map was sent on it, the pod's own time "
            "included.",
            lambda pool: pool.handshakes.seconds,
        )
        add(
            counter,
            "attach_errors",
            "Failures to attach or replace an XDP program, by errno.",
            "pool errno",
            *(
                (pool.name, errno.errorcode.get(number, str(number)), count)
                for pool in pools
                for number, count in pool.attach_errors.items()
            ),
        )
        return found

    # ---- status

    async def status_page(self) -> Page:
        """What `afxdpd status` shows."""
        return json_page(self.status())

    def status(self) -> dict[str, Any]:
        """All there is to know of the pools, for `afxdpd status`; times in seconds until now."""
        now = trio.current_time()
        return {
            "version": __version__,
            "pid": os.getpid(),
            "running_for": round(now - self._begun, 3),
            "pools": [self._pool_status(pool, now) for pool in self.pools()],
        }

    def _pool_status(self, pool: PoolManager, now: float) -> dict[str, Any]:
        connected = pool.registered and pool.watched
        trouble = "" if connected or pool.config is None else self._kubelet_trouble(pool)
        return {
            "name": pool.name,
            "resource": pool.resource,
            "mode": pool.mode,
            "configured": pool.config is not None,
            "kubelet": {
                "registered": pool.registered,
                "registered_for": round(now - pool.registered_at, 3) if pool.registered else None,
                "watched": pool.watched,
                "registrations": pool.registrations,
                "trouble": trouble,
            },
            "devices": [
                self._device_status(pool.devices[name], info, now)
                for name, info in sorted(pool.listed().items())
                if name in pool.devices
            ],
        }

    @staticmethod
    def _device_status(device: PoolDevice, info: DeviceInfo, now: float) -> dict[str, Any]:
        attachment, net, allocation = device.attachment, device.net, device.allocation
        xdp_mode = None if attachment is None else attachment.xdp_mode
        if attachment is not None and net is not None and net.xdp_prog_id == attachment.prog_id:
            xdp_mode = xdp_mode or net.xdp_mode
        where = "host" if net is not None else "elsewhere" if allocation is not None else "not made"
        return {
            "name": device.name,
            "health": info.state,
            "reason": info.reason,
            "where": where,
            "xdp_mode": xdp_mode,
            "program_id": None if attachment is None else attachment.prog_id,
            "map_id": None if attachment is None else attachment.map_id,
            "sessions": _sessions(device),
            "allocation": None
            if allocation is None
            else {
                "held_for": round(now - allocation.since, 3),
                "older_than_daemon": allocation.restored,
                "owners": [dataclasses.asdict(owner) for owner in device.owners],
            },
        }


def _sessions(device: PoolDevice) -> int:
    return 0 if device.server is None else device.server.sessions


def status_lines(status: Mapping[str, Any], *, colour: bool = False) -> Iterator[str]:
    """Yields a status as lines for a person at a terminal."""
    pools = status["pools"]
    devices = [device for pool in pools for device in pool["devices"]]
    yield (
        f"afxdpd {status['version']}, process {status['pid']}, running for {_age(status['running_for'])}: "
        f"{_count(len(pools), 'pool')}, {_count(len(devices), 'device')}, {_allocated(devices)}, "
        f"{_count(sum(device['sessions'] for device in devices), 'session')}"
    )
    for pool in pools:
        kubelet, trouble = pool["kubelet"], printable(pool["kubelet"]["trouble"])
        if not pool["configured"]:
            words = "configured no more"
        elif trouble:
            words = _painted(trouble, "31", colour)
        else:
            words = f"registered with kubelet for {_age(kubelet['registered_for'])}, watched"
        counts = f"{_count(len(pool['devices']), 'device')}, {_allocated(pool['devices'])}"
        yield ""
        yield f"{_painted(pool['resource'], '1', colour)}: {pool['mode']} mode, {counts}; {words}"
        rows = [_device_row(device) for device in pool["devices"]]
        table = [("DEVICE", "HEALTH", "WHERE", "XDP", "PROGRAM", "MAP", "SESSIONS", "HELD FOR", "HELD BY"), *rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for row, device in zip(table if rows else (), [None, *pool["devices"]], strict=False):
            cells = [
                cell.rjust(width) if name in ("PROGRAM", "MAP", "SESSIONS") else cell.ljust(width)
                for name, cell, width in zip(table[0], row, widths, strict=True)
            ]
            if device is not None:
                cells[1] = _painted(cells[1], "32" if device["health"] == HEALTHY else "31", colour)
            yield f"  {'  '.join(cells)}".rstrip()
            if device is not None and device["reason"]:
                yield f"    {printable(device['reason'])}"


def _device_row(device: Mapping[str, Any]) -> tuple[str, ...]:
    numbers = [str(device[key] or "-") for key in ("program_id", "map_id", "sessions")]
    held_for = held_by = "-"
    if (allocation := device["allocation"]) is not None:
        held_for = ">" * allocation["older_than_daemon"] + _age(allocation["held_for"])
        owners = [f"{owner['namespace']}/{owner['pod']}/{owner['container']}" for owner in allocation["owners"]]
        held_by = printable(", ".join(owners)) or "kubelet has not said"
    name, xdp_mode = printable(device["name"]), device["xdp_mode"] or "-"
    return name, device["health"], device["where"], xdp_mode, *numbers, held_for, held_by


def _painted(text: str, code: str, colour: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if colour else text


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


def _allocated(devices: Collection[Mapping[str, Any]]) -> str:
    return f"{sum(device['allocation'] is not None for device in devices) or 'none'} allocated"


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"


def ask_daemon(path: Path, method: str, page: str, *, timeout: float = 30.0) -> tuple[int, bytes]:
    """Asks the daemon that serves a status socket. Blocks.

    Args:
        path: The socket.
        method: See Pages.
        page: Likewise.
        timeout: Seconds without a byte.

    Returns:
        The HTTP status and the body.

    Raises:
        OSError: Nobody answers, or it is not HTTP.
    """
    import h11

    connection = h11.Connection(h11.CLIENT)
    status, body = 0, b""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(timeout)
        peer.connect(os.fspath(path))
        request = h11.Request(method=method, target=page, headers=[("Host", "afxdpd"), ("Connection", "close")])
        peer.sendall((connection.send(request) or b"") + (connection.send(h11.EndOfMessage()) or b""))
        try:
            while True:
                event = connection.next_event()
                if event is h11.NEED_DATA:
                    connection.receive_data(peer.recv(1 << 16))
                elif isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data):
                    body += event.data
                elif isinstance(event, h11.EndOfMessage):
                    return status, body
        except h11.RemoteProtocolError as exc:
            raise OSError(errno.EPROTO, f"the answer is no HTTP: {exc}") from exc


class _Families:
    """Metrics in the form in which prometheus_client asks for them, with those of the process; for a thread."""

    def __init__(self, families: list[Any]) -> None:
        self._families = families

    def collect(self) -> list[Any]:
        from prometheus_client import ProcessCollector

        return [*self._families, *ProcessCollector(registry=None).collect()]


# ======================================================================================================================
# Command line
# ======================================================================================================================


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Where the daemon meets others.

    Attributes:
        kubelet_dir: kubelet's directory.
        pod_resources_socket: The socket of kubelet's pod resources API.
        uds_dir: Where pods' socket directories are made; of this daemon alone.
        bpffs: A BPF file system, for the pins.
        http: Where probes and metrics are served, see parse_http_address; None for nowhere.
    """

    kubelet_dir: Path = KUBELET_DIR
    pod_resources_socket: Path = KUBELET_DIR / "pod-resources" / "kubelet.sock"
    uds_dir: Path = UDS_DIR
    bpffs: Path = BPFFS
    http: str | None = None

    @property
    def status_socket(self) -> Path:
        """Where the daemon tells its status."""
        return self.uds_dir / STATUS_NAME

    def problems(self, config: PluginConfig) -> Iterator[str]:
        """Yields a line for each socket whose path is too long to be bound. See get_plugin_config."""
        if self.http is not None:
            try:
                parse_http_address(self.http)
            except ValueError as exc:
                yield f"http: {exc}"
        paths = []
        for index, pool in enumerate(config.pools or ()):
            if pool is None or pool.name is None:
                continue
            endpoint = self.kubelet_dir / "device-plugins" / f"{NAMESPACE}-{pool.name}.sock"
            paths.append((f"pools[{index}].name", endpoint))
            devices = [device for device in pool.devices or () if device is not None]
            names = {device.name or "": f"devices[{number}].name" for number, device in enumerate(devices)}
            if pool.drivers or pool.nodes or "" in names or pool.mode == "cdq":
                names = {"x" * DEVICE_NAME_MAX: "name", **names}
            for name, key in names.items():
                paths.append((f"pools[{index}].{key}", self.uds_dir / pool.name / name / SOCKET_NAME))
        for key, path in paths:
            if len(os.fsencode(path)) > SUN_PATH_MAX:
                yield f"{key}: makes the path of a socket longer than {SUN_PATH_MAX} bytes: {path}"

    def check(self, config: PluginConfig) -> None:
        """Makes sure that each socket's path is short enough to be bound, and that `http` is an address.

        Raises:
            ConfigError: Something is not.
        """
        if errors := list(self.problems(config)):
            raise ConfigError(errors)


async def serve(
    config: PluginConfig,
    paths: Paths | None = None,
    *,
    changes: AsyncGenerator[PluginConfig, None] | None = None,
    network: NetworkHandler | None = None,
    xdp: XdpHandler | None = None,
    host: HostHandler | None = None,
    kind: KindHandler | None = None,
    devlink: DevlinkHandler | None = None,
    ethtool: EthtoolHandler | None = None,
    reload: Callable[[], Awaitable[list[str]]] | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Runs the daemon until cancelled.

    Resource handling: At the end kubelet's connections and the pods' are closed; programs, maps and directories of
    allocated devices stay as they are, and the next daemon takes them over.

    Args:
        config: What to serve.
        paths: Where.
        changes: Yields what to serve from then on: pools come, change and go; pods keep what they have.
        network: The kernel's; another for tests.
        xdp: Likewise.
        host: Likewise.
        kind: Likewise.
        devlink: Likewise.
        ethtool: Likewise.
        reload: What `afxdpd reload` does: has `changes` yield, and returns a line for each thing that is wrong.
        task_status: Started when this host has been found fit and nobody else serves these paths.

    Raises:
        ConfigError: A socket's path would be too long, or `Paths.http` is no address.
        HostError: This host does not suffice.
        KindNetworkError: The network for a cluster of kind cannot be made.
        EndpointBusyError: Another process serves the same.
    """
    paths = paths or Paths()
    host = host or Host()
    network = network or Network()
    paths.check(config)
    host.check(paths.bpffs)
    xdp = xdp or Xdp(paths.bpffs)
    with _locked_directory(paths.uds_dir, "--uds-dir"), _locked_directory(paths.bpffs / "afxdpd", "--bpffs"):
        pod_resources = PodResources(paths.pod_resources_socket)
        pools: dict[str, PoolManager] = {}
        detaching: dict[str, trio.Event] = {}

        begun = trio.Event()

        def make_pool(name: str) -> PoolManager:
            begun.set()
            retired = name not in scanner.pools
            pools[name] = PoolManager(
                PoolOptions(name=name, mode="primary") if retired else scanner.pools[name],
                xdp=xdp,
                host=host,
                network=network,
                devlink=devlink,
                ethtool=ethtool,
                pod_resources=pod_resources,
                uds_dir=paths.uds_dir,
                kubelet_dir=paths.kubelet_dir,
                retired=retired,
                released=scanner.refresh,
                host_devices=scanner.devices,
                detaching=detaching,
            )
            return pools[name]

        left = {**EthtoolUndo.all_due(paths.uds_dir), **pinned(xdp)}  # by an earlier daemon; the pools take it over

        def owners(names: Callable[[PoolManager], Iterable[str]]) -> dict[str, str]:
            now = {name: pool.name for pool in pools.values() for name in names(pool)}
            return {**{name: pool for name, pool in left.items() if pool not in pools}, **now}

        async def all_pools() -> list[PoolManager]:
            if config.pools or left:
                await begun.wait()  # and then all of them are made at once
                await trio.lowlevel.checkpoint()
            return list(pools.values())

        async def follow_changes() -> None:
            if changes is None:
                await trio.sleep_forever()
            async for new in changes:
                try:
                    await kind_keeper.want(new.kind_cluster)
                except KindNetworkError as exc:
                    log.error("%s", exc)  # noqa: TRY400  it says all
                scanner.configure(new)
                for pool in pools.values():
                    pool.reconfigure(scanner.pools.get(pool.name))
            await trio.sleep_forever()

        scanner = PoolScanner(config, network, host, allocated=functools.partial(owners, PoolManager.kept))
        manager = Manager(NAMESPACE, scanner, make_server=make_pool)
        kind_keeper = KindKeeper(kind or KindNetwork(), network, functools.partial(owners, PoolManager.allocated))
        observation = Observation(
            pools, lambda: scanner.pools if begun.is_set() else [pool.name for pool in config.pools]
        )
        with _http_servers(observation, paths, reload) as http_servers:
            await kind_keeper.want(config.kind_cluster)
            log.info("afxdpd %s: %s", __version__, _pool_names(config))
            task_status.started()
            await _first_of(
                manager.run,
                pod_resources.run,
                kind_keeper.run,
                Syncer(all_pools, kubelet_dir=paths.kubelet_dir).run,
                follow_changes,
                *http_servers,
            )


@contextlib.contextmanager
def _http_servers(
    observation: Observation, paths: Paths, reload: Callable[[], Awaitable[list[str]]] | None
) -> Iterator[list[Callable[[], Awaitable[None]]]]:
    """Listens where the daemon is observed; yields what serves there."""

    async def reload_page() -> Page:
        if reload is None:
            return text_page(["the program in which this daemon runs configures it"], 409)
        return json_page({"errors": await reload()})

    pages = observation.pages()
    own_pages = {**pages, "/status": {"GET": observation.status_page}, "/reload": {"POST": reload_page}}
    servers: list[Callable[[], Awaitable[None]]] = []
    with contextlib.ExitStack() as stack:

        def listen(address: HttpAddress, pages: Pages) -> str:
            listener, name, is_there = stack.enter_context(http_listener(address))
            observation.sockets[name] = is_there
            servers.append(functools.partial(HttpServer(pages).serve, listener))
            return name

        try:
            if paths.http is not None:
                log.info("HTTP on %s", listen(parse_http_address(paths.http), pages))
        except OSError as exc:
            raise HostError(f"{exc.filename}: {exc.strerror}: name another place with --http") from exc
        try:
            listen(paths.status_socket, own_pages)
        except (OSError, EndpointBusyError) as exc:
            log.warning("afxdpd status cannot be served: %s", exc)  # and everything else can
        yield servers


def _pool_names(config: PluginConfig) -> str:
    return ", ".join(f"{NAMESPACE}/{pool.name}" for pool in config.pools) or "no pools"


@contextlib.contextmanager
def _locked_directory(path: Path, option: str) -> Iterator[None]:
    """Makes a directory and holds a lock on it, which goes with the process whatever becomes of it."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory = Fd(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    except OSError as exc:
        raise HostError(f"{path}: {exc.strerror}: name another place with {option}") from exc
    with directory:
        try:
            fcntl.flock(directory.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise EndpointBusyError(f"{path}: another afxdpd serves this directory; end it first") from exc
        yield


def check_report(
    config: PluginConfig, devices: Mapping[str, NetDevice], host: HostHandler, allocated: Mapping[str, str]
) -> Iterator[str]:
    """Yields lines that say what each pool would take of these devices, and why it would not take others."""
    pools, passed = choose_devices(config, devices, host, allocated)
    hostname = host.hostname()
    yield f"node {hostname}: {_count(len(pools), 'pool')}"
    if config.kind_cluster and KindNetwork.missing(devices):
        yield f"kindCluster: {', '.join(KindNetwork.PAIRS)} are made for pods when the daemon starts"
    for rules, pool in zip(config.pools, pools, strict=True):
        special = ", by its rules for this node" if rules.on_node(hostname) != rules.on_node("") else ""
        yield f"{NAMESPACE}/{pool.name}: {pool.mode} mode, {_count(len(pool.devices), 'device')}{special}"
        for name, device in pool.devices.items():
            if isinstance(device, Subfunction):
                note = f"subfunction {device.number} of {device.primary}"
            else:
                note = f"{device.driver or 'no driver'}, {_count(device.queues, 'queue')}"
            if allocated.get(name) == pool.name:
                note += "; a pod has it"
            elif isinstance(device, NetDevice) and device.xdp_prog_id and pool.has_program:
                note += (
                    f"; carries the {device.xdp_mode} XDP program {device.xdp_prog_id}: unhealthy unless that is ours"
                )
            yield f"  takes {name}: {note}"
        for name in sorted(allocated):
            if allocated[name] == pool.name and name not in pool.devices:
                yield f"  has {name}: a pod has it"
        for name, why in passed[pool.name].items():
            yield f"  passes over {printable(name)}: {why}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Ends with the exit code for wrong input; argparse's own is taken."""
        self.exit(ExitCode.CONFIGURATION, f"{self.prog}: {message}; see {self.prog} --help\n")


def _http_address(text: str) -> str:
    try:
        parse_http_address(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc
    return text


def _parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="afxdpd",
        description="AF_XDP device plugin for Kubernetes: gives pods network devices with an XDP redirect program, "
        "and the file descriptors of their XSKMAPs.",
        epilog="Exit codes: 0 ended as asked, 1 wrong configuration or command line, 2 logging, 3 this host lacks "
        "something, 4 the pools cannot be served, 5 the network for kind cannot be made. "
        "SIGHUP reads the configuration again.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        "-config",
        type=Path,
        default=Path("config.json"),
        metavar="FILE",
        help="the configuration (default: %(default)s)",
    )
    parser.add_argument(
        "--kubelet-dir",
        type=Path,
        default=KUBELET_DIR,
        metavar="DIR",
        help="kubelet's directory, with device-plugins in it (default: %(default)s)",
    )
    parser.add_argument(
        "--pod-resources-socket",
        type=Path,
        metavar="PATH",
        help="kubelet's pod resources socket (default: pod-resources/kubelet.sock in kubelet's directory)",
    )
    parser.add_argument(
        "--uds-dir",
        type=Path,
        default=UDS_DIR,
        metavar="DIR",
        help="where pods' sockets are made (default: %(default)s)",
    )
    parser.add_argument(
        "--bpffs", type=Path, default=BPFFS, metavar="DIR", help="a mounted BPF file system (default: %(default)s)"
    )
    parser.add_argument(
        "--log-level",
        choices=get_args(get_args(LogLevel)[0]),
        help="what to log (default: logLevel of the configuration, or info)",
    )
    parser.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="lines for people, or a JSON object a line (default: %(default)s)",
    )
    parser.add_argument(
        "--log-dir",
        type=Path,
        default=LOG_DIR,
        metavar="DIR",
        help="where the logFile of the configuration is (default: %(default)s)",
    )
    parser.add_argument(
        "--http",
        type=_http_address,
        metavar="ADDRESS",
        help="serve /healthz, /readyz and /metrics there: 127.0.0.1:9808, [::1]:9808, or a Unix socket's path with a "
        "slash (default: nowhere)",
    )
    parser.add_argument("--schema", action="store_true", help="print the JSON Schema of the configuration, and end")
    parser.add_argument(
        "--check",
        action="store_true",
        help="read the configuration, say what each pool would take on this host, and end",
    )
    parser.add_argument("--version", action="version", version=f"afxdpd {__version__}")
    parser.add_argument_group(
        "commands",
        "afxdpd status: shows what the running daemon does. afxdpd reload: has it read its configuration again. "
        "Each has options of its own, see afxdpd status --help.",
    )
    return parser.parse_args(arguments)


class _JsonFormatter(logging.Formatter):
    """A record as a JSON object: time (RFC 3339), level, message, and error where there is a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter.format."""
        line = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


OUTPUT_MAX = 1 << 20
"""Bytes of log that wait until somebody reads standard output; what is more is left out, and the log says how much."""
OUTPUT_END = 0.25
"""Seconds for what waits when the daemon ends."""


class _OutputHandler(logging.Handler):
    """Writes to standard output in a thread of its own: who does not read it holds up the log and nothing else.

    The file may be shared with other programs, so that it is not for us to make it non-blocking.
    """

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self._fd = stream.fileno()
        self._encoding = stream.encoding
        self._lines: collections.deque[bytes] = collections.deque()  # the first one is being written
        self._size = 0
        self._left_out = 0
        self._ended = False
        self._changed = threading.Condition()
        threading.Thread(target=self._write_lines, name="afxdpd-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler.emit."""
        try:
            line = self._line(record)
        except Exception:  # noqa: BLE001  as logging does it
            self.handleError(record)
            return
        with self._changed:
            # Once there was no room, half of it has to be there again: lines are left out in few places.
            if self._size + len(line) > (OUTPUT_MAX // 2 if self._left_out else OUTPUT_MAX):
                self._left_out += 1
                return
            self._tell_left_out()
            self._append(line)

    def flush(self) -> None:
        """Waits for a while until everything is written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lines, OUTPUT_END)

    def close(self) -> None:
        """See logging.Handler.close; the file stays open."""
        self.flush()
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        super().close()

    def _line(self, record: logging.LogRecord) -> bytes:
        return f"{self.format(record)}\n".encode(self._encoding, errors="backslashreplace")

    def _append(self, line: bytes) -> None:
        self._lines.append(line)
        self._size += len(line)
        self._changed.notify_all()

    def _tell_left_out(self) -> None:
        if self._left_out:
            text = f"{self._left_out} lines are left out here: nobody has read the log"
            self._left_out = 0
            self._append(self._line(logging.LogRecord(log.name, logging.WARNING, "", 0, text, None, None)))

    def _write_lines(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._ended)
                if not self._lines:
                    return
                line = self._lines[0]
            self._write(line)
            with self._changed:
                self._size -= len(self._lines.popleft())
                if not self._lines:
                    self._tell_left_out()
                self._changed.notify_all()

    def _write(self, line: bytes) -> None:
        """Writes a line, as soon as it can be; where it never can, it is left out."""
        while line:
            try:
                line = line[os.write(self._fd, line) :]
            except BlockingIOError:  # somebody else has made it non-blocking
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll()
            except OSError:
                return


class _LogFile(logging.handlers.WatchedFileHandler):
    """A log file that somebody may rotate, and that everybody may read."""

    failed = False

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler.emit: what cannot be written is left out, and that is said once."""
        try:
            self.reopenIfNeeded()
            if self.stream is None:
                self.stream = self._open()
            self.stream.write(self.format(record) + self.terminator)
            self.stream.flush()
            self.failed = False
        except (OSError, ValueError) as exc:
            if not self.failed:
                with contextlib.suppress(OSError):  # which may be on the same disk
                    print(f"afxdpd: {self.baseFilename}: cannot be written: {exc}", file=sys.stderr)
            self.failed = True
            self.close()  # else what is still in its buffer would fail for ever, and keep the space of a removed file

    def close(self) -> None:
        """See logging.Handler.close: what cannot be written is left out."""
        with contextlib.suppress(OSError):
            super().close()

    def _open(self) -> Any:
        stream = super()._open()
        os.fchmod(stream.fileno(), 0o644)
        return stream


def _set_up_logging(options: argparse.Namespace, config: PluginConfig | None = None) -> None:
    """Logs to standard output, and to the file that the configuration names.

    Raises:
        LogFileError: It cannot be written; logging is then as it was.
    """
    handlers: list[logging.Handler] = [each for each in logging.root.handlers if isinstance(each, _OutputHandler)]
    if not handlers and not options.check:  # what a check prints has its place among what it logs
        with contextlib.suppress(AttributeError, OSError):  # there is no standard output, or it is no file
            handlers = [_OutputHandler(sys.stdout)]
    handlers = handlers or [logging.StreamHandler(sys.stdout)]
    if config is not None and config.log_file:
        path = options.log_dir / config.log_file
        try:
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            handlers.append(_LogFile(path))
        except OSError as exc:
            raise LogFileError(f"{path}: {exc.strerror}: name another directory with --log-dir") from exc
    formatter = logging.Formatter("%(asctime)s %(levelname)-7s %(message)s")
    for handler in handlers:
        handler.setFormatter(_JsonFormatter() if options.log_format == "json" else formatter)
    logging.root.handlers = [each for each in logging.root.handlers if each not in handlers]  # they stay open
    logging.basicConfig(handlers=handlers, force=True)
    log.setLevel((options.log_level or (config.log_level if config is not None else "info")).upper())


def _read_config(options: argparse.Namespace, paths: Paths) -> PluginConfig:
    """Reads the configuration, and logs as it says.

    Raises:
        ConfigError: See get_plugin_config and Paths.problems.
        LogFileError: See _set_up_logging.
    """
    config = get_plugin_config(options.config, problems=paths.problems)
    _set_up_logging(options, config)
    return config


class _Reload:
    """Reads the configuration again, whoever asks for that."""

    def __init__(self, read: Callable[[], PluginConfig]) -> None:
        self._read = read
        self._asked = trio.Event()
        self._outcome: tuple[trio.Event, list[str]] = trio.Event(), []  # of the next reading

    def ask(self) -> None:
        """Has it read, and returns at once."""
        self._asked.set()

    async def run(self) -> list[str]:
        """Has it read, and returns a line for each thing that is wrong with it."""
        done, errors = self._outcome
        self.ask()
        await done.wait()
        return errors

    async def changes(self) -> AsyncGenerator[PluginConfig, None]:
        """Yields each configuration that can be used."""
        while True:
            await self._asked.wait()
            self._asked = trio.Event()
            done, errors = self._outcome
            self._outcome = trio.Event(), []
            try:
                new = self._read()
            except (ConfigError, LogFileError) as exc:
                errors += str(exc).splitlines()
                for line in [*errors, "the configuration stays as it was"]:
                    log.error("%s", line)  # noqa: TRY400  it says all
            else:
                log.info("the configuration was read again: %s", _pool_names(new))
                yield new
            done.set()


async def _serve_until_signal(config: PluginConfig, paths: Paths, read: Callable[[], PluginConfig]) -> None:
    reload = _Reload(read)
    signals_of_interest = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    with trio.open_signal_receiver(*signals_of_interest) as signals:  # before anything says that we run
        scope = trio.CancelScope()

        async def serve_in_scope() -> None:
            with scope:
                async with contextlib.aclosing(reload.changes()) as configs:
                    await serve(config, paths, changes=configs, reload=reload.run)

        async def wait_signals() -> None:
            async for number in signals:
                if number == signal.SIGHUP:
                    reload.ask()
                else:
                    log.info("%s: ending; pods keep their devices", signal.Signals(number).name)
                    scope.cancel()

        await _first_of(serve_in_scope, wait_signals)


def _command_parser(command: str, description: str) -> _Parser:
    parser = _Parser(
        prog=f"afxdpd {command}",
        description=description,
        epilog="Exit codes: 0 done, 1 wrong command line or configuration, 4 no daemon answers.",
        allow_abbrev=False,
    )
    place = parser.add_mutually_exclusive_group()
    place.add_argument(
        "--uds-dir",
        type=Path,
        default=UDS_DIR,
        metavar="DIR",
        help="where the running daemon makes pods' sockets, as it was told (default: %(default)s)",
    )
    place.add_argument(
        "--socket", type=Path, metavar="PATH", help=f"the daemon's status socket (default: {STATUS_NAME} in that)"
    )
    return parser


def _ask(path: Path, method: str, page: str) -> dict[str, Any]:
    """Asks the running daemon for a JSON page.

    Raises:
        RequestError: There is none, or it does not want to; the text says so.
    """
    try:
        status, body = ask_daemon(path, method, page)
        answer = json.loads(body) if status == 200 else {}
    except (OSError, ValueError, RecursionError) as exc:
        why = getattr(exc, "strerror", None) or exc
        raise RequestError(
            f"no daemon answers on {path}: {why}; name another place with --uds-dir or --socket"
        ) from exc
    if status != 200:
        raise RequestError(printable(body.decode(errors="replace").strip()))
    if not isinstance(answer, dict):
        raise _no_answer(path)
    return answer


def _no_answer(path: Path) -> RequestError:
    return RequestError(f"what answers on {path} is no afxdpd, or one of another version")


def _ask_status(path: Path, *, colour: bool) -> tuple[dict[str, Any], list[str]]:
    """Returns the running daemon's status, and as lines for people; raises what `_ask` raises."""
    status = _ask(path, "GET", "/status")
    try:
        return status, list(status_lines(status, colour=colour))
    except (LookupError, TypeError, AttributeError, ValueError) as exc:
        raise _no_answer(path) from exc


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0.1 <= float(text) <= 86400:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0.1 to 86400")


def fit(lines: list[str], height: int) -> list[str]:
    """Leaves out what has no room in so many lines, and says so in the last one."""
    if len(lines) <= height:
        return lines
    kept = max(height - 1, 0)
    return [*lines[:kept], f"... and {_count(len(lines) - kept, 'further line')}"]


def _status(arguments: list[str]) -> ExitCode:
    parser = _command_parser("status", "Shows what the running daemon does: pools, devices, who has them.")
    parser.add_argument("--json", action="store_true", help="all of it as JSON; with --watch an object a line")
    parser.add_argument(
        "--watch",
        type=_seconds,
        nargs="?",
        const=2.0,
        metavar="SECONDS",
        help="show it again every so many seconds (%(const)g), until interrupted",
    )
    options = parser.parse_args(arguments)
    path = options.socket or options.uds_dir / STATUS_NAME
    terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    colour = terminal and not os.environ.get("NO_COLOR")
    while True:
        try:
            status, lines = _ask_status(path, colour=bool(colour))
        except RequestError as exc:
            if options.watch is None:
                print(f"{parser.prog}: {exc}", file=sys.stderr)
                return ExitCode.POOLS
            lines = [json.dumps({"error": str(exc)}) if options.json else str(exc)]
        else:
            indent = 2 if options.watch is None else None
            lines = [json.dumps(status, indent=indent)] if options.json else lines
        text = "\n".join(lines)
        if options.watch is not None and terminal and not options.json:
            text = "\n".join(fit(lines, shutil.get_terminal_size().lines - 1))
            text = f"\x1b[H\x1b[2J\x1b[?7l{text}\x1b[?7h"  # clears; and long lines are cut, not continued
        print(text, flush=True)
        if options.watch is None:
            return ExitCode.NORMAL
        time.sleep(options.watch)


def _reload(arguments: list[str]) -> ExitCode:
    parser = _command_parser("reload", "Has the running daemon read its configuration again, as SIGHUP does.")
    options = parser.parse_args(arguments)
    try:
        path = options.socket or options.uds_dir / STATUS_NAME
        errors = _ask(path, "POST", "/reload").get("errors")
        if not isinstance(errors, list) or not all(isinstance(error, str) for error in errors):
            raise _no_answer(path)
    except RequestError as exc:
        print(f"{parser.prog}: {exc}", file=sys.stderr)
        return ExitCode.POOLS
    if not errors:
        print("the configuration was read again")
        return ExitCode.NORMAL
    for line in [*errors, "the configuration stays as it was"]:
        print(f"{parser.prog}: {line}", file=sys.stderr)
    return ExitCode.CONFIGURATION


COMMANDS: dict[str, Callable[[list[str]], ExitCode]] = {"status": _status, "reload": _reload}


def _run_command(command: Callable[[list[str]], ExitCode], arguments: list[str]) -> ExitCode:
    try:
        return command(arguments)
    except KeyboardInterrupt:
        print()
    except BrokenPipeError:  # nobody reads any more; else the interpreter would complain at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return ExitCode.NORMAL


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: Without the program's name; those of the process by default.

    Returns:
        The exit code, see ExitCode.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in COMMANDS:
        return _run_command(COMMANDS[arguments[0]], arguments[1:])
    options = _parse_arguments(arguments)
    if options.schema:
        print(json.dumps(get_config_schema(), indent=2))
        return ExitCode.NORMAL
    _set_up_logging(options)
    paths = Paths(
        kubelet_dir=options.kubelet_dir,
        pod_resources_socket=options.pod_resources_socket or options.kubelet_dir / "pod-resources" / "kubelet.sock",
        uds_dir=options.uds_dir.absolute(),  # kubelet is told of it
        bpffs=options.bpffs.absolute(),
        http=options.http,
    )
    try:
        if options.check:
            config = get_plugin_config(options.config, problems=paths.problems)
            allocated = pinned(Xdp(paths.bpffs))
            print("\n".join(check_report(config, Network().devices(), Host(), allocated)))
            return ExitCode.NORMAL
        config = _read_config(options, paths)
        os.umask(0o077)
        gc.freeze()  # what was imported stays, and to look through it again and again takes time that pods wait
        _raise_file_limit()
        _share_memory()
        trio.run(_serve_until_signal, config, paths, functools.partial(_read_config, options, paths))
    except Exception as exc:  # noqa: BLE001  the end of the program: all that is left is to say why
        return _exit_code(exc)
    return ExitCode.NORMAL


def _exit_code(exc: Exception) -> ExitCode:
    """Says in a line for each error why the daemon ends, and with which code."""
    for handler in logging.root.handlers:
        handler.flush()  # before what is printed
    error = _only_error(exc)
    match error:
        case ConfigError(errors=errors):
            code, lines = ExitCode.CONFIGURATION, list(errors)
        case LogFileError():
            code, lines = ExitCode.LOGGING, [str(error)]
        case KindNetworkError():
            code, lines = ExitCode.KIND_NETWORK, [str(error)]
        case HostError():
            code, lines = ExitCode.HOST_CHECK, [str(error)]
        case EndpointBusyError() | OSError():
            code, lines = ExitCode.POOLS, [str(error)]
        case _:
            log.error("ended by a bug", exc_info=error)
            return ExitCode.POOLS
    for line in lines:
        print(f"afxdpd: {line}", file=sys.stderr)
    return code


def _share_memory() -> None:
    """Has all threads use one arena of malloc(3): what one of them frees is there for the others. See mallopt(3)."""
    with contextlib.suppress(AttributeError):  # another libc
        ctypes.CDLL(None).mallopt(-8, 1)  # M_ARENA_MAX


def _raise_file_limit() -> None:
    """Lets this process have as many descriptors as it may: each device takes four.

    There is room for many at once. Later, when there are threads, the kernel makes more by waiting for an RCU grace
    period, in the middle of an Allocate.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.suppress(OSError), Fd(os.open("/", os.O_PATH | os.O_CLOEXEC)) as root:
        Fd(fcntl.fcntl(root.fileno(), fcntl.F_DUPFD_CLOEXEC, min(hard, FILES_ROOM) - 1)).close()


if __name__ == "__main__":
    sys.exit(main())
