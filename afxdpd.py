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
    Command line            main, logging, exit codes
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import dataclasses
import datetime
import difflib
import enum
import errno
import fcntl
import functools
import hashlib
import inspect
import json
import logging
import os
import random
import re
import resource
import shutil
import signal
import socket
import stat
import struct
import sys
import threading
import urllib.parse
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Protocol, TypeVar, get_args, get_origin, get_type_hints

import anyio
import h2.events
import h2.exceptions
import inotify_simple
import msgspec
import trio
from google.protobuf.message import DecodeError, Message
from purerpc.grpc_proto import GRPCProtoSocket, GRPCProtoStream
from purerpc.grpc_socket import SocketWrapper
from purerpc.grpclib.config import GRPCConfiguration
from purerpc.grpclib.connection import GRPCConnection
from purerpc.grpclib.events import RequestEnded, RequestReceived, ResponseEnded, WindowUpdated
from purerpc.grpclib.exceptions import GRPCError, MessageTooLargeError, RpcFailedError
from purerpc.grpclib.status import Status, StatusCode
from purerpc.wrappers import extract_message_from_singleton_stream, send_single_message_client
from pyroute2.netlink import NLM_F_DUMP, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR
from pyroute2.netlink.rtnl import (
    RTM_DELADDR,
    RTM_DELLINK,
    RTM_DELROUTE,
    RTM_GETLINK,
    RTM_GETROUTE,
    RTM_NEWLINK,
    RTM_NEWROUTE,
    RTMGRP_IPV4_IFADDR,
    RTMGRP_IPV4_ROUTE,
    RTMGRP_IPV6_ROUTE,
    RTMGRP_LINK,
)
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
from pyroute2.netlink.rtnl.rtmsg import rtmsg

from _uds import ffi, lib
from afxdpd_proto import deviceplugin_pb2 as api
from afxdpd_proto import podresources_pb2 as podresources

# ======================================================================================================================
# Constants and errors
# ======================================================================================================================

__version__ = "0.1.0"

NAMESPACE = "afxdp"
"""The domain of the resources: a pod asks for ``afxdp/<pool>``."""

KUBELET_DIR = Path("/var/lib/kubelet")
UDS_DIR = Path("/var/run/afxdp_dp")
BPFFS = Path("/sys/fs/bpf")

API_VERSION = "v1beta1"
HEALTHY = "Healthy"
UNHEALTHY = "Unhealthy"

RESOURCE_NAME = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
"""What kubelet accepts after the slash of a resource."""
RESOURCE_NAME_RULE = "1 to 63 letters, digits, '-', '_' and '.', the first and the last a letter or digit"

POD_SOCKET_DIR = "/tmp/afxdp_dp"  # noqa: S108  a path in the pod, fixed by the clients
SOCKET_NAME = "afxdp.sock"
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
XDP_MODES = {"xdp": "native", "xdpgeneric": "generic", "xdpoffload": "offloaded", "xdpmulti": "several"}
"""pyroute2's names of the values of IFLA_XDP_ATTACHED (if_link.h), and ours."""


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
    """A network device as netlink shows it.

    Attributes:
        queues: Receive queues the device was made with; queue indices are below it.
        master: ifindex of the bridge or bond that it is enslaved to, 0 for none.
        xdp_mode, xdp_prog_id: What is attached to it, by whomever; None and 0 for nothing.
        default_route: Whether a default route (IPv4 or IPv6, any table) leaves through it.
    """

    name: str
    ifindex: int
    queues: int = 1
    master: int = 0
    xdp_mode: str | None = None
    xdp_prog_id: int = 0
    default_route: bool = False


class NetworkHandler(Protocol):
    """What the pools need of the network; `Network` is the real one, tests hand in another."""

    def devices(self) -> dict[str, NetDevice]:
        """See Network.devices."""

    def watch_devices(self) -> AsyncGenerator[dict[str, NetDevice], None]:
        """See Network.watch_devices."""


class Network:
    """The devices of this network namespace, by netlink. See rtnetlink(7)."""

    _HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence number, port
    _BUFFER = 1 << 18

    def device(self, ifindex: int) -> NetDevice:
        """One device, without its routes. Blocks.

        Raises:
            OSError: ENODEV where there is none.
        """
        request = ifinfmsg()
        request["index"] = ifindex
        return self._device(self._request(RTM_GETLINK, request, NLM_F_REQUEST)[0])

    def devices(self) -> dict[str, NetDevice]:
        """All devices by name. Blocks."""
        table = {device.ifindex: device for device in map(self._device, self._dump(RTM_GETLINK, ifinfmsg()))}
        return self._named(table, self._default_routes())

    async def watch_devices(self) -> AsyncGenerator[dict[str, NetDevice], None]:
        """Yields all devices by name, at once and again after each change, until closed.

        Changes that come together are one. Where the kernel could not keep up with them (ENOBUFS), everything is
        asked for again, so that what is yielded is always the present state.
        """
        groups = RTMGRP_LINK | RTMGRP_IPV4_ROUTE | RTMGRP_IPV6_ROUTE | RTMGRP_IPV4_IFADDR
        with trio.socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as events:
            await events.bind((0, groups))  # before the dump: what changes in between is seen twice, not never
            while True:
                try:
                    links = await trio.to_thread.run_sync(self._dump, RTM_GETLINK, ifinfmsg())
                    table = {device.ifindex: device for device in map(self._device, links)}
                    routes = await trio.to_thread.run_sync(self._default_routes)
                    changed = True
                    while True:
                        if changed:
                            yield self._named(table, routes)
                        before = dict(table)
                        touched, default_route = self._apply(await events.recv(self._BUFFER), table)
                        changed = table != before
                        # The kernel tells nothing of a route that goes with its device's state or address.
                        if default_route or touched & routes:
                            known, routes = routes, await trio.to_thread.run_sync(self._default_routes)
                            changed = changed or known != routes
                except OSError as exc:
                    if exc.errno == errno.ENOBUFS:
                        log.warning("netlink: events were lost, asking for all devices again")
                    elif exc.errno in OUT_OF_RESOURCES:
                        log.warning("netlink: %s, asking for all devices again", exc.strerror)
                        await trio.sleep(1)
                    else:
                        raise

    def _apply(self, data: bytes, table: dict[int, NetDevice]) -> tuple[set[int], bool]:
        """Brings the table up to date; returns the devices concerned, and whether a default route came or went."""
        touched: set[int] = set()
        default_route = False
        for kind, message in self._split(data):
            if kind in (RTM_NEWLINK, RTM_DELLINK) and message[16] != socket.AF_BRIDGE:
                ifindex = struct.unpack_from("=i", message, 20)[0]
                touched.add(ifindex)
                if kind == RTM_NEWLINK:
                    table[ifindex] = self._device(message)
                else:
                    table.pop(ifindex, None)
            elif kind == RTM_DELADDR:
                touched.add(struct.unpack_from("=I", message, 20)[0])
            elif kind in (RTM_NEWROUTE, RTM_DELROUTE):
                default_route = default_route or message[17] == 0  # rtm_dst_len
        return touched, default_route

    @staticmethod
    def _named(table: dict[int, NetDevice], routes: set[int]) -> dict[str, NetDevice]:
        return {
            device.name: dataclasses.replace(device, default_route=True) if device.ifindex in routes else device
            for device in table.values()
        }

    def _default_routes(self) -> set[int]:
        """Ifindexes of the devices that default routes leave through, in all tables. Blocks."""
        found = set()
        for family in (socket.AF_INET, socket.AF_INET6):
            request = rtmsg()
            request["family"] = family
            for message in self._dump(RTM_GETROUTE, request):
                if message[17] == 0:  # rtm_dst_len: most routes are not worth taking apart
                    route = rtmsg(message)
                    route.decode()
                    hops = route.get_attr("RTA_MULTIPATH") or []
                    found.update({route.get_attr("RTA_OIF"), *(hop["oif"] for hop in hops)})
        return {ifindex for ifindex in found if ifindex}

    def _dump(self, kind: int, request: Any) -> list[bytes]:
        """Asks for everything of a kind. Blocks."""
        return self._request(kind, request, NLM_F_REQUEST | NLM_F_DUMP)

    def _request(self, kind: int, request: Any, flags: int) -> list[bytes]:
        """Sends a request and returns the messages of the answer. Blocks."""
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as sock:
            request["header"]["type"] = kind
            request["header"]["flags"] = flags
            request.encode()
            sock.send(request.data)
            messages: list[bytes] = []
            while True:
                for answer, message in self._split(sock.recv(self._BUFFER)):
                    if answer == NLMSG_DONE:
                        return messages
                    if answer == NLMSG_ERROR:
                        code = -struct.unpack_from("=i", message, self._HEADER.size)[0]
                        raise OSError(code, os.strerror(code), "netlink")
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
    def _device(message: bytes) -> NetDevice:
        link = ifinfmsg(message)
        link.decode()
        xdp = link.get_attr("IFLA_XDP")
        mode = XDP_MODES.get(xdp.get_attr("IFLA_XDP_ATTACHED")) if xdp else None
        return NetDevice(
            name=link.get_attr("IFLA_IFNAME"),
            ifindex=link["index"],
            queues=link.get_attr("IFLA_NUM_RX_QUEUES") or 1,
            master=link.get_attr("IFLA_MASTER") or 0,
            xdp_mode=mode,
            xdp_prog_id=(xdp.get_attr("IFLA_XDP_PROG_ID") or 0) if mode else 0,
        )


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

        The old attachment is closed; former holders of its map can no longer affect the device.

        Raises:
            OSError: ENOLINK where the device no longer exists; the old attachment is then as it was.

        See bpf(2), BPF_LINK_UPDATE. Linux 5.9.
        """
        xskmap, program = self._load(attachment.queues)
        with program:
            try:
                _check(lib.uds_link_update(attachment.link.fileno(), program.fileno()), "replacing the XDP program")
                renewed = self._describe(attachment.link.duplicate(), xskmap, attachment.xdp_mode)
            except OSError:
                xskmap.close()
                raise
        attachment.close()
        return renewed

    def ifindex(self, attachment: Attachment) -> int:
        """The ifindex that the device has now, in the namespace where it is now; 0 if it no longer exists."""
        return self._query(attachment.link)[1]

    def pin(self, attachment: Attachment, pool: str, device: str) -> None:
        """Pins map and link: they outlive this process. What was pinned there before is replaced.

        See bpf(2), BPF_OBJ_PIN.
        """
        self.unpin(pool, device)
        directory = self._directory(pool, device)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The link comes last: where it is, everything is.
        for fd, name in ((attachment.xskmap, "xsks_map"), (attachment.link, "link")):
            path = directory / name
            _check(lib.uds_obj_pin(fd.fileno(), os.fsencode(path)), str(path))
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
        return attachment.pinned and (directory / "link").exists() and (directory / "xsks_map").exists()

    def pinned_pools(self) -> list[str]:
        """Names of the pools that have a directory of pins, sorted."""
        return self._names(self._root)

    def pinned_devices(self, pool: str) -> list[str]:
        """Names of the devices that have a directory of pins, sorted."""
        return self._names(self._directory(pool))

    @staticmethod
    def _names(directory: Path) -> list[str]:
        try:
            return sorted(urllib.parse.unquote(entry.name) for entry in directory.iterdir() if entry.is_dir())
        except (FileNotFoundError, NotADirectoryError):
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
            for name in ("link", "xsks_map"):
                path = directory / name
                fds.append(Fd(_check(lib.uds_obj_get(os.fsencode(path)), str(path))))
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


class HostHandler(Protocol):
    """What the daemon needs of the host; `Host` is the real one, tests hand in another."""

    def check(self, bpffs: Path) -> None:
        """See Host.check."""

    def grant(self, path: Path, uid: int, permissions: int) -> None:
        """See Host.grant."""

    def user_of(self, path: Path) -> int:
        """See Host.user_of."""


class Host:
    """The machine and what this process may do on it."""

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
            os.setxattr(path, POSIX_ACL, acl)
        except OSError as exc:
            if exc.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            os.chown(path, uid, -1)

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

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inotify: inotify_simple.INotify | None = None
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
        await trio.lowlevel.wait_readable(self._inotify.fileno())
        events = list(self._inotify.read(timeout=0))
        flags = inotify_simple.flags
        if any(event.mask & (flags.IGNORED | flags.MOVE_SELF | flags.UNMOUNT) for event in events):
            self._close()
            self._open()

    def _open(self) -> None:
        flags = inotify_simple.flags
        try:
            self._inotify = inotify_simple.INotify(nonblocking=True)
            self._inotify.add_watch(
                self._path,
                flags.CREATE | flags.DELETE | flags.MOVED_TO | flags.MOVED_FROM | flags.MOVE_SELF | flags.ONLYDIR,
            )
        except OSError as exc:
            self._close()
            if exc.errno not in (errno.ENOENT, errno.ENOTDIR) and self._last_trouble != exc.strerror:
                log.warning("%s: watched by polling, since inotify says: %s", self._path, exc.strerror)
                self._last_trouble = str(exc.strerror)

    def _close(self) -> None:
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None


# ======================================================================================================================
# Configuration
#
# The file is read leaf by leaf, so that one reading finds everything that is wrong with it. Each type carries its rule:
# the check and the words for it stand side by side, and the JSON Schema comes from the same place.
# ======================================================================================================================

T = TypeVar("T")

PoolName = Annotated[
    str,
    msgspec.Meta(
        pattern=rf"^{RESOURCE_NAME}$(?!\n)",  # Python's $ lets a newline follow
        description=RESOURCE_NAME_RULE,
    ),
]
DeviceName = Annotated[
    str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,50}$(?!\n)", description="1 to 50 letters, digits, '-' and '_'")
]
UdsTimeout = Annotated[
    int,
    msgspec.Meta(ge=-1, le=300, description="-1 (never), 0 (30 seconds) or 30 to 300 seconds"),
    lambda value: value <= 0 or value >= 30,
]
Uid = Annotated[
    int,
    msgspec.Meta(ge=0, le=256000, description="0, or 1000 to 256000"),
    lambda value: value == 0 or value >= 1000,
]
Mode = Annotated[Literal["primary"], msgspec.Meta(description="'primary' (this version has no other)")]
LogLevel = Annotated[
    Literal["error", "warning", "info", "debug"], msgspec.Meta(description="'error', 'warning', 'info' or 'debug'")
]


class _Struct(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An object of the file."""


class DeviceConfig(_Struct, frozen=True, kw_only=True):
    """One named device of a pool."""

    name: DeviceName


class PoolConfig(_Struct, frozen=True, kw_only=True):
    """One pool: the resource ``afxdp/<name>``.

    Attributes:
        devices: The devices it takes, where they are on this host.
        uds_timeout: Seconds after which an idle connection of a pod is closed: -1 never, 0 the default of 30.
        uid: The pod's user, who gets access to the socket besides root; 0 for nobody else.
    """

    name: PoolName
    mode: Mode
    devices: tuple[DeviceConfig, ...] = ()
    uds_timeout: UdsTimeout = 0
    uid: Uid = 0

    @property
    def environment_name(self) -> str:
        """The variable that tells a container its devices."""
        return "AFXDP_DEVICES_" + re.sub(r"[-.]", "_", self.name).upper()

    @property
    def idle_timeout(self) -> float:
        """Seconds, inf for never."""
        return {-1: float("inf"), 0: 30.0}.get(self.uds_timeout, float(self.uds_timeout))


class PluginConfig(_Struct, frozen=True, kw_only=True):
    """The whole file."""

    pools: tuple[PoolConfig, ...]
    log_level: LogLevel = "info"


_NOT_YET = {
    "pools[]": "drivers nodes udsServerDisable bpfMapPinningEnable udsFuzz requiresUnprivilegedBpf ethtoolCmds",
    "pools[].devices[]": "pci mac secondary",
    "": "logFile kindCluster",
}
"""Keys of the format that this version does not carry out: an error, since leaving them out would do another thing."""


def get_plugin_config(file: str | os.PathLike[str]) -> PluginConfig:
    """Reads the configuration file.

    Args:
        file: Its path; JSON, keys in any case.

    Returns:
        The configuration, complete and right.

    Raises:
        ConfigError: It cannot be read, or something in it is wrong: one line for each thing.
    """
    try:
        raw = json.loads(Path(file).read_bytes())
    except OSError as exc:
        raise ConfigError([f"{file}: {exc.strerror}"]) from exc
    except (ValueError, RecursionError) as exc:
        raise ConfigError([f"{file}: not JSON: {exc}"]) from exc
    errors: list[str] = []
    config: PluginConfig | None = _parse(raw, PluginConfig, "", errors)
    if config is not None:
        errors += _conflicts(config)
    if config is None or errors:
        raise ConfigError(f"{file}: {error}" for error in errors)
    return config


def get_pool_configs(file: str | os.PathLike[str]) -> list[PoolConfig]:
    """Reads the configuration file and returns its pools; see get_plugin_config."""
    return list(get_plugin_config(file).pools)


def _conflicts(config: PluginConfig) -> Iterator[str]:
    """What is wrong with pools that are right key by key."""
    for index, pool in enumerate(config.pools):
        if not pool.devices:
            yield f"pools[{index}].devices: the pool takes nothing: name its devices"
    for key, what in (("name", "the name"), ("environment_name", "the environment variable")):
        first: dict[str, int] = {}
        for index, pool in enumerate(config.pools):
            value = getattr(pool, key)
            other = first.setdefault(value, index)
            if other != index and (key == "name" or config.pools[other].name != pool.name):
                yield f"pools[{index}].name: {pool.name!r} has {what} of pools[{other}].name: {value!r}"


def _parse(raw: object, kind: Any, path: str, errors: list[str]) -> Any:
    """Makes a value of a type of the file out of JSON; appends to `errors` and returns None where that fails."""
    if isinstance(kind, type) and issubclass(kind, _Struct):
        return _parse_object(raw, kind, path, errors)
    if get_origin(kind) is tuple:
        if not isinstance(raw, list):
            errors.append(f"{path or 'the file'}: must be a list: {_shown(raw)}")
            return None
        return tuple(_parse(item, get_args(kind)[0], f"{path}[{index}]", errors) for index, item in enumerate(raw))
    meta, *rules = kind.__metadata__
    with contextlib.suppress(msgspec.ValidationError):
        value = msgspec.convert(raw, kind)
        if all(rule(value) for rule in rules):
            return value
    errors.append(f"{path}: must be {meta.description}: {_shown(raw)}")
    return None


def _parse_object(raw: object, kind: type[_Struct], path: str, errors: list[str]) -> Any:
    if not isinstance(raw, dict):
        errors.append(f"{path or 'the file'}: must be an object: {_shown(raw)}")
        return None
    prefix = f"{path}." if path else ""
    fields = {info.encode_name.lower(): info for info in msgspec.structs.fields(kind)}
    types = get_type_hints(kind, include_extras=True)
    not_yet = {key.lower() for key in _NOT_YET.get(re.sub(r"\[\d+\]", "[]", path), "").split()}
    values: dict[str, object] = {}
    before = len(errors)
    for key, value in raw.items():
        info = fields.get(key.lower())
        if info is not None:
            if info.name in values:
                log.warning("%s%s: is there more than once, the last one counts", prefix, info.encode_name)
            values[info.name] = _parse(value, types[info.name], prefix + info.encode_name, errors)
        elif key.lower() in not_yet:
            errors.append(f"{prefix}{key}: this version of afxdpd cannot do that yet")
        else:
            nearest = difflib.get_close_matches(key.lower(), fields, n=1)
            hint = f", did you mean {fields[nearest[0]].encode_name}?" if nearest else ""
            log.warning("%s%s: unknown key, ignored%s", prefix, ascii(key)[1:-1], hint)
    for info in fields.values():
        if info.required and info.name not in values:
            errors.append(f"{prefix}{info.encode_name}: is missing")
    if len(errors) > before:
        return None
    return kind(**values)


def _shown(raw: object) -> str:
    try:
        text = json.dumps(raw, ensure_ascii=True)
    except RecursionError:  # json.loads goes a few levels deeper
        text = "something nested too deeply"
    return text if len(text) <= 80 else f"{text[:77]}..."


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
# peer resets them or goes away, deadlines hold on both sides, our exceptions become statuses, memory is given back.
# This section knows messages and methods and nothing of what they mean.
# ======================================================================================================================

GRPC_MESSAGE_MAX = 4 << 20
"""Bytes in one message; grpc-go takes no more either."""
GRPC_CALLS_MAX = 100
"""Calls at the same time on one connection."""

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


class _Connection(GRPCConnection):  # type: ignore[misc]
    """purerpc's state of an HTTP/2 connection, with what it drops made known."""

    MAX_CONCURRENT_STREAMS = GRPC_CALLS_MAX

    def _stream_reset(self, event: Any) -> list[Any]:
        self.message_read_buffers.pop(event.stream_id, None)
        return [event]

    def _data_received(self, event: Any) -> list[Any]:
        if event.stream_id in self.message_read_buffers:
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

    def take(self, event: Any) -> None:
        """Takes over what has arrived for this call."""
        if isinstance(event, h2.events.StreamReset):
            self.end()
            self.scope.cancel()
            return
        self._incoming_events[0].send_nowait(event)
        if isinstance(event, RequestEnded | ResponseEnded):
            self._close_remote()

    def end(self) -> None:
        """No more events: whoever waits for one gets EndOfStream; nothing is kept."""
        self.ended = True
        self._incoming_events[0].close()
        self._grpc_socket._streams.pop(self._stream_id, None)
        self._grpc_connection.message_read_buffers.pop(self._stream_id, None)

    def release(self) -> None:
        """Ends the call and gives back its memory; nobody may wait for its events any more."""
        self.end()
        self._incoming_events[1].close()


class _GrpcSocket(GRPCProtoSocket):  # type: ignore[misc]
    """purerpc's socket over any trio stream; the stream stays its opener's."""

    StreamClass = _Call

    def __init__(self, stream: trio.abc.Stream, *, client_side: bool) -> None:
        contextlib.AsyncExitStack.__init__(self)
        config = GRPCConfiguration(client_side=client_side, max_message_length=GRPC_MESSAGE_MAX)
        self._grpc_connection = _Connection(config)
        self._socket = _SocketWrapper(self._grpc_connection, _Transport(stream))
        self._receive_buffer_size = 1 << 16
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
            await self._socket.flush()
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
        await super()._reader_thread()
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
        self._changed = trio.Event()

    async def serve_unix(
        self,
        listener: trio.SocketListener,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> NoReturn:
        """Serves a listening socket until cancelled.

        Resource handling: The listener is closed at the end, and with it every connection.

        Error handling: What a peer does can end its own connection and no other.
        """
        async with listener, trio.open_nursery() as nursery:
            task_status.started()
            while True:
                try:
                    nursery.start_soon(self.serve_connection, await listener.accept())
                except OSError as exc:
                    if exc.errno not in OUT_OF_RESOURCES:
                        raise
                    log.warning("gRPC: cannot accept connections: %s", exc.strerror)
                    await trio.sleep(1)

    async def serve_connection(self, stream: trio.abc.Stream) -> None:
        """Serves one connection until the peer closes it, and closes the stream."""
        self.connections += 1
        try:
            async with stream:
                await self._serve_connection(stream)
        finally:
            self.connections -= 1
            changed, self._changed = self._changed, trio.Event()
            changed.set()

    async def wait_no_connections(self) -> None:
        """Returns when no connection is open."""
        while self.connections:
            await self._changed.wait()

    async def _serve_connection(self, stream: trio.abc.Stream) -> None:
        try:
            async with trio.open_nursery() as nursery, _GrpcSocket(stream, client_side=False) as grpc_socket:
                async with contextlib.aclosing(grpc_socket.listen()) as calls:
                    async for call in calls:
                        nursery.start_soon(self._serve_call, call)
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


async def call_unix(path: Path, method: str, request: Message, reply_type: type[M], *, timeout: float) -> M:
    """Makes one call on a connection of its own to a gRPC server on a Unix socket.

    Args:
        path: The socket.
        method: ``package.Service/Method``.
        request: The message to send.
        reply_type: The type of the one that is expected.
        timeout: Seconds for all of it.

    Raises:
        RpcError: The server's status, UNAVAILABLE where there is none or it went away, DEADLINE_EXCEEDED.
    """
    try:
        with trio.fail_after(timeout):
            stream = await trio.open_unix_socket(os.fspath(path))
            outcome = await _call_once(stream, method, request, reply_type, timeout)
    except trio.TooSlowError as exc:
        raise RpcError("DEADLINE_EXCEEDED", f"{path}: no answer to {method} within {timeout:g} s") from exc
    except OSError as exc:
        raise RpcError("UNAVAILABLE", f"{path}: {exc.strerror or exc}") from exc  # a path too long has no errno
    if isinstance(outcome, RpcError):
        raise outcome
    return outcome


async def _call_once(
    stream: trio.abc.Stream, method: str, request: Message, reply_type: type[M], timeout: float
) -> M | RpcError:
    service, _, name = method.partition("/")
    outcome: M | RpcError = RpcError("UNAVAILABLE", f"the server closed the connection before it answered {method}")
    try:
        async with stream, _GrpcSocket(stream, client_side=True) as grpc_socket:
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


SYSFS = Path("/sys")


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


_ENDS = (trio.Cancelled, KeyboardInterrupt)
"""Exceptions that are no failure of whatever they pass through."""


class ResourceServer:
    """One resource ``<namespace>/<device type>``: its server, its registration, its list of devices.

    A subclass may override `update` and `listed`, and be a plugin of its own (Allocator and so on) for its resource.

    Attributes:
        resource: Its full name.
        socket_path: Where it serves; the file name is the endpoint that kubelet is told.
        registered: Whether kubelet has accepted the present registration.
        watched: Whether kubelet has the present list's stream open.
    """

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
        if len(os.fsencode(self.socket_path)) > SUN_PATH_MAX:
            self.socket_path = plugin_dir / f"{hashlib.sha256(self.resource.encode()).hexdigest()[:16]}.sock"
        self.registered = False
        self._kubelet_socket = plugin_dir / "kubelet.sock"
        self._plugin = plugin
        # For each of the plugin's plain methods: if they hang, nobody else waits.
        self._threads: dict[str, trio.CapacityLimiter] = collections.defaultdict(lambda: trio.CapacityLimiter(8))
        self._devices: Mapping[str, DeviceInfo] = {}
        self._list_changed = trio.Event()
        self._streams: list[object] = []  # the open ones of ListAndWatch; the last one is served
        self._streams_ended = 0  # how often all had to end
        self._streams_begun = 0
        self._streams_changed = trio.Event()
        self._last_trouble = ""
        self._served = False  # whether the endpoint was ever ours: then it is no mistake of whoever started us
        self._backoff = Backoff(0.1, 10.0)
        self._retry = Backoff(0.02, 0.1)

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

    # ---- the five methods of the API

    async def GetDevicePluginOptions(self, _: api.Empty) -> api.DevicePluginOptions:  # noqa: N802  the API's name
        """Tells kubelet which optional methods to call: those that the plugin has."""
        return api.DevicePluginOptions(
            pre_start_required=getattr(self._plugin, "pre_start_container", None) is not None,
            get_preferred_allocation_available=getattr(self._plugin, "get_preferred_allocation", None) is not None,
        )

    async def ListAndWatch(self, _: api.Empty) -> AsyncGenerator[Message, None]:  # noqa: N802  the API's name
        """Yields the whole list, at once and after each change, until there is a newer stream that lasts."""
        me, ended, sent = object(), self._streams_ended, None
        self._streams.append(me)
        self._streams_begun += 1
        self._announce_streams()
        try:
            while self._streams_ended == ended:
                if self._streams[-1] is not me:
                    if not await self._is_last_again(me):
                        return
                    continue
                changed = self._list_changed
                response = api.ListAndWatchResponse(
                    devices=[
                        api.Device(ID=device_id, health=info.state, topology=info.topology)
                        for device_id, info in self.listed().items()
                    ]
                )
                if response != sent:
                    log.debug("%s: telling kubelet of %d devices", self.resource, len(response.devices))
                    yield response
                    sent = response
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
                    await _first_of(watch_files, watch_kubelet)
                finally:
                    self.registered = False
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
        self.registered = True
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
            while self._streams:
                await self._streams_changed.wait()
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
            "Allocate": Method(request_type=api.AllocateRequest, call=self.Allocate, timeout=ALLOCATE_TIMEOUT + late),
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


@dataclass(slots=True)
class _Running:
    """A ResourceServer at work."""

    server: ResourceServer
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    ended: trio.Event = field(default_factory=trio.Event)


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
        self._running: dict[str, _Running] = {}

    @property
    def servers(self) -> dict[str, ResourceServer]:
        """The servers by device type."""
        return {device_type: running.server for device_type, running in self._running.items()}

    async def run(self) -> None:
        """Runs until cancelled, or until the plugin's scan ends.

        Raises:
            EndpointBusyError: Another process serves one of the types.
            Exception: What scan raised.
        """
        if self._running:
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
            self._running.clear()

    async def _apply(self, tree: DeviceTree, nursery: trio.Nursery) -> None:
        for device_type in self._running.keys() - tree.keys():
            running = self._running.pop(device_type)
            running.scope.cancel()
            await running.ended.wait()  # its socket may be wanted by the next of the same type
        for device_type, devices in tree.items():
            if device_type not in self._running:
                self._running[device_type] = _Running(self._make_server(device_type))
                nursery.start_soon(self._keep_running, self._running[device_type])
            try:
                self._running[device_type].server.update(devices)
            except Exception:
                log.exception("%s: the update failed, which is a bug", self._running[device_type].server.resource)

    async def _keep_running(self, running: _Running) -> None:
        try:
            with running.scope:
                await _run_again(running.server.run, running.server.resource)
        finally:
            running.ended.set()


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

    BUSY, IDLE = 0.1, 10.0

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
        return {key: tuple(found) for key, found in owners.items()}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDeviceInfo(DeviceInfo):
    """A DeviceInfo of the AF_XDP plugin, with the device itself."""

    net: NetDevice


def choose_devices(
    config: PluginConfig, devices: Mapping[str, NetDevice]
) -> tuple[dict[str, list[NetDevice]], dict[str, dict[str, str]]]:
    """Decides which pool takes which device.

    Args:
        config: The pools; the first one that claims a device has it.
        devices: All devices of the host by name.

    Returns:
        Pool name → devices taken, and pool name → device name → why it was passed over.
    """
    taken: dict[str, list[NetDevice]] = {}
    passed: dict[str, dict[str, str]] = {}
    holder: dict[str, str] = {}
    for pool in config.pools:
        taken[pool.name], passed[pool.name] = [], {}
        for name in dict.fromkeys(device.name for device in pool.devices):
            device = devices.get(name)
            if device is None:
                why = "it is not in the host's network namespace"
            elif name in holder:
                why = f"the pool {holder[name]} has it"
            else:
                why = _never_taken(device)
            if why or device is None:
                passed[pool.name][name] = why
            else:
                holder[name] = pool.name
                taken[pool.name].append(device)
    return taken, passed


def _never_taken(device: NetDevice) -> str:
    """The rule by which no configuration can claim a device; "" where there is none."""
    if device.name == "lo":
        return "the loopback device is never taken"
    if device.default_route:
        return "a default route leaves through it"
    if device.master:
        return "it is enslaved to a bridge or bond"
    return ""


class PoolScanner:
    """The Scanner of the AF_XDP plugin: each pool is a device type, whatever the host has of its devices."""

    def __init__(self, config: PluginConfig, network: NetworkHandler, *, sysfs: Path = SYSFS) -> None:
        self._config = config
        self._network = network
        self._sysfs = sysfs
        self._passed: dict[str, dict[str, str]] = {}
        self._infos: dict[str, PoolDeviceInfo] = {}  # of the last tree

    async def scan(self, notifier: Notifier) -> None:
        """Follows the host's devices."""
        async with contextlib.aclosing(self._network.watch_devices()) as snapshots:
            async for devices in snapshots:
                notifier.notify(self.tree(devices))

    def tree(self, devices: Mapping[str, NetDevice]) -> DeviceTree:
        """What the pools take of these devices; what has been passed over since the last time goes to the log."""
        taken, passed = choose_devices(self._config, devices)
        for pool, rules in passed.items():
            for name, why in rules.items():
                moved_away = name in self._infos and name not in devices  # which is the pool's to speak of
                if self._passed.get(pool, {}).get(name) != why and not moved_away:
                    log.info("%s/%s: %s is not taken: %s", NAMESPACE, pool, name, why)
        self._passed = passed
        tree = DeviceTree(
            {pool: {device.name: self._info(device) for device in found} for pool, found in taken.items()}
        )
        self._infos = {
            name: info for found in tree.values() for name, info in found.items() if isinstance(info, PoolDeviceInfo)
        }
        return tree

    def _info(self, device: NetDevice) -> PoolDeviceInfo:
        """The device's info; its topology, which does not change, is looked up once."""
        before = self._infos.get(device.name)
        if before is None or before.net.ifindex != device.ifindex:
            return PoolDeviceInfo(net=device, topology=get_netdev_topology_info(device.name, sysfs=self._sysfs))
        return dataclasses.replace(before, net=device)


@dataclass(frozen=True, slots=True, eq=False)
class Allocation:
    """What one Allocate gave one container: devices that answer for each other. It is told from others by identity.

    Attributes:
        since: trio's time of the Allocate, or of this daemon's start for an older one.
        restored: Whether it is older than this daemon, so that what belongs together is known only by its owner.
    """

    since: float
    restored: bool = False


@dataclass(slots=True, eq=False)
class PoolDevice:
    """A device of a pool, and what is on it.

    Attributes:
        name: The device's name in the host namespace, which is its id for kubelet.
        net: The device in the host namespace; None while it is elsewhere.
        topology: The NUMA nodes it is near to; None where they are not known.
        attachment: Program and map; None before they are prepared.
        allocation: Who has it; None for nobody.
        owners: The containers that hold it, once kubelet has told; see PodView.
        server: The socket of the allocation.
        reason: Why the last work on it failed.
        working: While somebody works on it: set at the end.
        wanted: How many requests are about to take it: then it is not forgotten.
        missed, missed_since, missed_empty: Answers of kubelet in a row that did not list it, trio's time of the first
            of them, and whether they listed no pod at all.
    """

    name: str
    net: NetDevice | None = None
    topology: api.TopologyInfo | None = None
    attachment: Attachment | None = None
    allocation: Allocation | None = None
    owners: tuple[Owner, ...] = ()
    server: UdsServer | None = None
    reason: str = ""
    working: trio.Event | None = None
    wanted: int = 0
    missed: int = 0
    missed_since: float = 0.0
    missed_empty: bool = False
    backoff: Backoff = field(default_factory=lambda: Backoff(0.5, 10.0))

    @property
    def info(self) -> DeviceInfo:
        """What kubelet gets to know of it."""
        reason = self.reason
        if not reason and self.allocation is None and self.attachment is None:
            reason = "not prepared yet"
        return DeviceInfo(state=UNHEALTHY if reason else HEALTHY, reason=reason, topology=self.topology)


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

    def close(self, fds: Iterable[int]) -> None:
        """Takes over descriptors and returns at once."""
        with self._lock:
            self._waiting.extend(fds)
            start = bool(self._waiting) and not self._running
            self._running = self._running or start
        if start:
            threading.Thread(target=self._close_all, name="afxdpd-close", daemon=True).start()

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


class UdsServer:
    """The socket of one allocated device, and the conversations of its pod.

    Args:
        directory: What the pod mounts; the socket is in it.
        name: For the log.
        idle_timeout: Seconds after which a silent connection is closed.
        is_owner: Whether a hostname is that of the pod that holds the device; RpcError where that cannot be known.
        xskmap: The map of a device of this allocation, borrowed; None for any other device.
    """

    def __init__(
        self,
        directory: Path,
        *,
        name: str,
        idle_timeout: float,
        is_owner: Callable[[str], Awaitable[bool]],
        xskmap: Callable[[str], Fd | None],
    ) -> None:
        self._directory = directory
        self._name = name
        self._idle_timeout = idle_timeout
        self._is_owner = is_owner
        self._xskmap = xskmap
        self._files = PodFiles()
        self._sessions = 0
        self._said = 0  # lines in the minute that began at …
        self._said_since = -60.0
        self.scope = trio.CancelScope()

    @property
    def path(self) -> Path:
        """The socket."""
        return self._directory / SOCKET_NAME

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
        except OSError:
            listener.close()
            self.path.unlink(missing_ok=True)
            raise
        return listener

    async def serve(self, listener: socket.socket) -> None:
        """Accepts connections until its scope is cancelled, then ends them all and closes the listener."""
        try:
            with self.scope:
                async with trio.open_nursery() as nursery:
                    while True:
                        await self._accept(listener, nursery)
        finally:
            self._files.close([listener.detach()])  # with the connections that were never accepted

    async def _accept(self, listener: socket.socket, nursery: trio.Nursery) -> None:
        await trio.lowlevel.checkpoint()
        await self._files.wait_room()
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            await trio.lowlevel.wait_readable(listener)
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

    async def _serve_session(self, connection: socket.socket) -> None:
        try:
            await self._converse(connection)
        except trio.TooSlowError:
            self._say(logging.WARNING, "connection closed: the pod does not read")
        except OSError as exc:
            log.debug("%s: connection closed: %s", self._name, exc.strerror)
        except Exception:
            log.exception("%s: connection closed, which is a bug", self._name)
        finally:
            self._end_connection(connection)
            self._sessions -= 1

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

    async def _converse(self, connection: socket.socket) -> None:
        connected = False
        while True:
            await self._files.wait_room()
            packet = await _receive_packet(connection, self._idle_timeout)
            if packet is None:
                self._say(logging.INFO, "connection closed: silent for %g s", self._idle_timeout)
                return
            if packet.end_of_file:
                return
            try:
                if packet.truncated:
                    request: Request = Malformed("longer than any request")
                else:
                    request = parse_request(packet.data, connected=connected)
                reply, fd = await self._answer(request, packet)
            finally:
                self._files.close(packet.fds)
            log.debug("%s: pid %d: %r: %r", self._name, packet.pid, packet.data, reply)
            connected = connected or reply == HOST_OK
            with fd or contextlib.nullcontext(), trio.fail_after(SEND_TIMEOUT):
                await _send_packet(connection, reply, fd)
            if isinstance(request, Fin):
                return

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Packet:
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


async def _receive_packet(connection: socket.socket, timeout: float) -> Packet | None:
    """Waits for one packet; None if none has come in so many seconds. See uds_recv in _uds_helper.h."""
    await trio.lowlevel.checkpoint()  # others get their turn, however fast this peer is
    deadline = trio.current_time() + timeout
    while (packet := _receive_now(connection)) is None:
        with trio.move_on_at(deadline) as idle:
            await trio.lowlevel.wait_readable(connection)
        if idle.cancelled_caught:
            return _receive_now(connection)  # it may have come while we were stopped
    return packet


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
    """Sends one packet, when the peer has room for it. See uds_send in _uds_helper.h."""
    while True:
        result = lib.uds_send(connection.fileno(), data, len(data), -1 if fd is None else fd.fileno())
        if result != -errno.EAGAIN:
            break
        await trio.lowlevel.wait_writable(connection)
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

    It is a plugin of its own for its resource: Allocator, PreferredAllocator and ContainerPreStarter.

    Args:
        config: The pool.
        xdp, host: The kernel.
        pod_resources: Who holds what.
        uds_dir: Where the directories are that pods mount.
        kubelet_dir: See ResourceServer.

    Attributes:
        devices: Its devices by name: those in the host namespace, and the allocated ones wherever they are.
    """

    def __init__(
        self,
        config: PoolConfig,
        *,
        xdp: XdpHandler,
        host: HostHandler,
        pod_resources: PodResources,
        uds_dir: Path = UDS_DIR,
        kubelet_dir: Path = KUBELET_DIR,
    ) -> None:
        super().__init__(NAMESPACE, config.name, plugin=self, kubelet_dir=kubelet_dir)
        self.config = config
        self.devices: dict[str, PoolDevice] = {}
        self._xdp = xdp
        self._host = host
        self._pod_resources = pod_resources
        self._uds_dir = uds_dir / config.name
        self._nursery: trio.Nursery | None = None
        self._leftover = False  # whether it gives nothing away any more
        self._listed: dict[str, DeviceInfo] = {}
        self._due: dict[str, float] = {}  # device name → trio's time from which it may be prepared
        self._due_changed = trio.Event()

    # ---- life

    async def run(self) -> None:
        """Takes over what an earlier daemon left to running pods, then serves until cancelled; see ResourceServer.

        At the end the allocated devices keep program, map and directory.
        """
        async with self._at_work():
            await super().run()

    async def run_leftover(self, network: NetworkHandler) -> None:
        """Takes over what a pool has left that is not configured any more, and serves it until its pods are gone."""
        self._leftover = True

        async def follow() -> None:
            async with contextlib.aclosing(network.watch_devices()) as snapshots:
                async for devices in snapshots:
                    self.update({name: PoolDeviceInfo(net=devices[name]) for name in self.devices if name in devices})

        async def wait_empty() -> None:
            while self.devices:
                changed = self._list_changed
                await changed.wait()

        async with self._at_work():
            await _first_of(follow, wait_empty)
        log.info("%s: nothing is left of it", self.resource)

    @contextlib.asynccontextmanager
    async def _at_work(self) -> AsyncIterator[None]:
        try:
            with _single_errors():
                async with trio.open_nursery() as self._nursery:
                    with self._pod_resources.subscribed(self._reconcile):
                        self._restore()
                        self._nursery.start_soon(self._prepare_devices)
                        yield
                        self._nursery.cancel_scope.cancel()
        finally:
            self._nursery = None
            for device in self.devices.values():
                if device.attachment is not None:
                    device.attachment.close()
                device.attachment = device.allocation = device.server = device.working = None
                device.owners = ()

    def _restore(self) -> None:
        """Begins with the pins: what is pinned is allocated."""
        now = trio.current_time()
        for name in self._xdp.pinned_devices(self.config.name):
            try:
                attachment = self._xdp.open_pinned(self.config.name, name)
            except OSError as exc:
                log.info("%s: %s: what was left of it is removed: %s", self.resource, name, exc.strerror)
                self._unpin(name)
                continue
            device = self.devices.setdefault(name, PoolDevice(name))
            device.attachment = attachment
            log.info("%s: %s: still allocated", self.resource, name)
            try:
                self._hand_over(device, Allocation(since=now, restored=True))
            except OSError as exc:
                self._fail(device, exc)
        allocated = {name for name, device in self.devices.items() if device.allocation}
        if self._uds_dir.is_dir():
            for entry in self._uds_dir.iterdir():
                if entry.name not in allocated:
                    shutil.rmtree(entry, ignore_errors=True)
        if allocated:
            self._pod_resources.hurry()
        for device in list(self.devices.values()):
            self._settle(device)

    # ---- devices

    def update(self, devices: Mapping[str, DeviceInfo]) -> None:
        """Takes over what is in the host namespace."""
        for name, device in list(self.devices.items()):
            if name not in devices:
                if device.net is not None:
                    log.info("%s: %s: not to be had in the host namespace any more", self.resource, name)
                device.net = None
                self._settle(device)
        for name, info in devices.items():
            assert isinstance(info, PoolDeviceInfo)
            device = self.devices.setdefault(name, PoolDevice(name))
            if device.net != info.net:
                if device.allocation and device.net is None:
                    log.info("%s: %s: back in the host namespace", self.resource, name)
                    self._pod_resources.hurry()
                device.net, device.topology = info.net, info.topology
                device.backoff.reset()
                self._settle(device, news=True)

    def listed(self) -> Mapping[str, DeviceInfo]:
        """Every device that is in the host namespace or allocated."""
        return self._listed

    def _settle(self, device: PoolDevice, *, news: bool = False) -> None:
        """Draws the conclusions from a change: forgets the device, or has it worked on; and lets kubelet know.

        While it is worked on or wanted, that is left to whoever does. What failed is tried again after a while, or at
        once where there is news of the device.
        """
        if device.working is not None or device.wanted:
            return
        if device.allocation is None and (device.net is None or self._leftover):
            if device.attachment is not None and self._nursery is not None:
                self._nursery.start_soon(_close_in_thread, device.attachment)
            self.devices.pop(device.name, None)
            self._due.pop(device.name, None)
        elif self._needs_work(device):
            delay = device.backoff.delay() if device.reason and not news else 0
            self._due[device.name] = trio.current_time() + delay
            self._due_changed.set()
        info = device.info if device.name in self.devices else None
        if info != self._listed.get(device.name):
            self._listed.pop(device.name, None)
            if info is not None:
                self._listed[device.name] = info
            self.announce()

    def _needs_work(self, device: PoolDevice) -> bool:
        """Whether something on the device is missing, used or dead, and could be made."""
        attachment, net = device.attachment, device.net
        if attachment is None:
            return net is not None
        if device.reason:
            return True
        if device.allocation is not None:
            return device.server is None or (net is not None and self._xdp.ifindex(attachment) == 0)
        return not self._is_ready(device)

    def _is_ready(self, device: PoolDevice) -> bool:
        """Whether the device is free, and its program is in its place, with a map that nobody ever held."""
        attachment = device.attachment
        if device.allocation is not None or attachment is None or attachment.handed_out or device.reason:
            return False
        ifindex = self._xdp.ifindex(attachment)
        return ifindex != 0 if device.net is None else ifindex == device.net.ifindex

    async def _prepare_devices(self) -> NoReturn:
        """Has devices worked on that need it, one after another (the kernel does no more), until cancelled."""
        while True:
            self._due_changed = trio.Event()
            now = trio.current_time()
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
        if device.working is None:
            device.working = trio.Event()
            self._nursery.start_soon(self._work, device, device.working)
        await device.working.wait()

    async def _work(self, device: PoolDevice, done: trio.Event) -> None:
        try:
            await self._make_attachment(device)
            if device.allocation is not None:
                self._hand_over(device, device.allocation)
        except OSError as exc:
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

    async def _make_attachment(self, device: PoolDevice) -> None:
        """Attaches where nothing is attached, and replaces what a former holder knows."""
        attachment, net = device.attachment, device.net
        free = device.allocation is None
        if attachment is not None:
            ifindex = self._xdp.ifindex(attachment)
            if ifindex == 0 or (free and net is not None and ifindex != net.ifindex):
                device.attachment = None
                await _close_in_thread(attachment)
                attachment = None
        if attachment is None:
            if net is None:
                raise OSError(errno.ENODEV, "it is not in the host's network namespace and carries no program of ours")
            device.attachment = await trio.to_thread.run_sync(
                self._xdp.attach, net.ifindex, net.queues, abandon_on_cancel=True
            )
            log.info("%s: %s: prepared, %s mode", self.resource, device.name, device.attachment.xdp_mode)
        elif free and attachment.handed_out:
            device.attachment = await trio.to_thread.run_sync(self._xdp.renew, attachment)
            log.info("%s: %s: prepared again", self.resource, device.name)

    def _fail(self, device: PoolDevice, exc: OSError) -> None:
        """Makes an error the device's reason, and logs it where it is news."""
        reason = f"{exc.filename}: {exc.strerror}" if exc.filename else str(exc.strerror)
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
            handed_over = []
            try:
                for names in containers:
                    allocation = Allocation(since=trio.current_time())
                    answer = response.container_responses.add()
                    answer.envs[self.config.environment_name] = " ".join(names)
                    for name in names:
                        # Something may have happened to it while another one was waited for.
                        self._refuse_unready(devices[name], taken_over=devices[name] in taken_over)
                        handed_over.append(devices[name])
                        self._hand_over(devices[name], allocation)
                        answer.mounts.add(
                            host_path=str(self._uds_dir / name),
                            container_path=f"{POD_SOCKET_DIR}/{name}",
                            read_only=True,
                        )
                    log.info("%s: allocated: %s", self.resource, " ".join(names))
            except (OSError, RequestError):
                for device in handed_over:
                    self._vacate(device)
                raise
        self._pod_resources.hurry(PodResources.BUSY)  # kubelet lists the pod when it has our answer
        return response

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

        Raises:
            RequestError: FAILED_PRECONDITION where one is not and cannot be made.
        """
        allocation = Allocation(since=trio.current_time())
        with self._wanted(dict.fromkeys(request.devices_ids)) as devices:
            for device in devices.values():
                if device.allocation is not None:
                    await self._work_on(device)
                else:  # forgotten, as after a reboot; kubelet knows better
                    await self._make_ready(device)
                    self._hand_over(device, allocation)
                    log.info("%s: %s: allocated, as kubelet says", self.resource, device.name)
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
            self._vacate(device)
        if not self._is_ready(device):
            await self._work_on(device)
        self._refuse_unready(device, taken_over=taken_over)
        return taken_over

    def _refuse_unready(self, device: PoolDevice, *, taken_over: bool) -> None:
        """Refuses a device that is not as it has to be, or that is away, where not in its former holder's pod."""
        if device.net is None and not taken_over:
            raise RequestError(f"{self.resource}: no device {device.name} any more", status="NOT_FOUND")
        if not self._is_ready(device):
            reason = device.reason or "it has changed, or was given away, in this moment"
            raise RequestError(f"{self.resource}: {device.name} is unhealthy: {reason}", status="FAILED_PRECONDITION")

    def _hand_over(self, device: PoolDevice, allocation: Allocation) -> None:
        """Makes a device with an attachment that of an allocation: pins and listening socket, where they are missing.

        Raises:
            OSError: They cannot be made.
        """
        assert device.attachment is not None
        assert self._nursery is not None
        if device.allocation is not allocation:
            device.allocation, device.owners, device.missed = allocation, (), 0
        if not self._xdp.is_pinned(device.attachment, self.config.name, device.name):
            self._xdp.pin(device.attachment, self.config.name, device.name)
        if device.server is not None and not device.server.path.exists():
            device.server.scope.cancel()
            device.server = None
        if device.server is None:
            server = UdsServer(
                self._uds_dir / device.name,
                name=f"{self.resource}: {device.name}",
                idle_timeout=self.config.idle_timeout,
                is_owner=functools.partial(self._is_owner, device),
                xskmap=functools.partial(self._xskmap, device),
            )
            # A running pod keeps its user, whatever the configuration says now.
            user = self._host.user_of(self._uds_dir / device.name) if allocation.restored else 0
            self._nursery.start_soon(server.serve, server.listen(self._host, user or self.config.uid))
            device.server = server

    def _vacate(self, device: PoolDevice) -> None:
        """Ends a device's allocation: conversations ended, socket and directory removed, unpinned.

        A pod that still has the old directory mounted finds it empty for ever: the next one is another.
        """
        if device.server is not None:
            device.server.scope.cancel()
            device.server = None
        shutil.rmtree(self._uds_dir / device.name, ignore_errors=True)
        self._unpin(device.name)
        if device.attachment is not None:
            device.attachment.pinned = False
        device.allocation, device.owners = None, ()

    def _unpin(self, name: str) -> None:
        try:
            self._xdp.unpin(self.config.name, name)
        except OSError as exc:
            log.warning("%s: %s: cannot be unpinned: %s", self.resource, name, exc)

    async def _is_owner(self, device: PoolDevice, hostname: str) -> bool:
        """Whether a hostname is that of a pod that holds the device; asks kubelet where it is not known yet.

        Raises:
            RpcError: kubelet does not say.
        """
        if device.allocation is not None and not device.owners:
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
        joined: dict[tuple[Owner, ...], Allocation] = {}
        for device in list(self.devices.values()):
            allocation = device.allocation
            if allocation is None or view.asked_at < allocation.since:
                continue
            owners = view.owners.get((self.resource, device.name), ())
            if not owners:
                self._miss(device, allocation, view)
                continue
            device.missed = 0
            if owners != device.owners:
                log.info("%s: %s: held by %s", self.resource, device.name, ", ".join(map(str, owners)))
                if allocation.restored and not device.owners:
                    device.allocation = joined.setdefault(owners, allocation)
                device.owners = owners
        return any(device.allocation for device in self.devices.values())

    def _miss(self, device: PoolDevice, allocation: Allocation, view: PodView) -> None:
        """Counts that kubelet does not list an allocated device, and releases it once that is certain.

        A device that lives in some other namespace is in use, whatever kubelet says: it comes back, or dies with the
        namespace, when its pod ends.
        """
        if device.net is None and device.attachment is not None and self._xdp.ifindex(device.attachment):
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
            self._vacate(device)
            self._settle(device)


async def _close_in_thread(attachment: Attachment) -> None:
    """Closes an attachment, which may detach: the kernel takes its time for that."""
    with trio.CancelScope(shield=True):
        await trio.to_thread.run_sync(attachment.close)


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
    """

    kubelet_dir: Path = KUBELET_DIR
    pod_resources_socket: Path = KUBELET_DIR / "pod-resources" / "kubelet.sock"
    uds_dir: Path = UDS_DIR
    bpffs: Path = BPFFS

    def check(self, config: PluginConfig) -> None:
        """Makes sure that each socket's path is short enough to be bound.

        Raises:
            ConfigError: One is not.
        """
        paths = []
        for index, pool in enumerate(config.pools):
            endpoint = self.kubelet_dir / "device-plugins" / f"{NAMESPACE}-{pool.name}.sock"
            paths.append((f"pools[{index}].name", endpoint))
            for number, device in enumerate(pool.devices):
                path = self.uds_dir / pool.name / device.name / SOCKET_NAME
                paths.append((f"pools[{index}].devices[{number}].name", path))
        errors = [
            f"{key}: makes the path of a socket longer than {SUN_PATH_MAX} bytes: {path}"
            for key, path in paths
            if len(os.fsencode(path)) > SUN_PATH_MAX
        ]
        if errors:
            raise ConfigError(errors)


async def serve(
    config: PluginConfig,
    paths: Paths | None = None,
    *,
    network: NetworkHandler | None = None,
    xdp: XdpHandler | None = None,
    host: HostHandler | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Runs the daemon until cancelled.

    Resource handling: At the end kubelet's connections and the pods' are closed; programs, maps and directories of
    allocated devices stay as they are, and the next daemon takes them over.

    Args:
        config: What to serve.
        paths: Where.
        network: The kernel's; another for tests.
        xdp: Likewise.
        host: Likewise.
        task_status: Started when this host has been found fit and nobody else serves these paths.

    Raises:
        ConfigError: A socket's path would be too long.
        HostError: This host does not suffice.
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
        pools = {pool.name: pool for pool in config.pools}

        def make_pool(name: str) -> PoolManager:
            return PoolManager(
                pools.get(name) or PoolConfig(name=name, mode="primary"),
                xdp=xdp,
                host=host,
                pod_resources=pod_resources,
                uds_dir=paths.uds_dir,
                kubelet_dir=paths.kubelet_dir,
            )

        async def run_leftovers() -> None:
            async with trio.open_nursery() as nursery:
                for name in xdp.pinned_pools():
                    if name not in pools:
                        log.warning("%s/%s: is not configured any more; its pods keep their devices", NAMESPACE, name)
                        pool = make_pool(name)
                        nursery.start_soon(_run_again, functools.partial(pool.run_leftover, network), pool.resource)
            await trio.sleep_forever()

        manager = Manager(NAMESPACE, PoolScanner(config, network), make_server=make_pool)
        log.info("afxdpd %s: %s", __version__, ", ".join(f"{NAMESPACE}/{name}" for name in pools) or "no pools")
        task_status.started()
        await _first_of(manager.run, pod_resources.run, run_leftovers)


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


def check_report(config: PluginConfig, devices: Mapping[str, NetDevice]) -> Iterator[str]:
    """Yields lines that say what each pool would take of these devices, and why it would not take others."""
    taken, passed = choose_devices(config, devices)
    if not config.pools:
        yield "no pools"
    for pool in config.pools:
        yield f"{NAMESPACE}/{pool.name}: {pool.mode} mode, {len(taken[pool.name])} devices"
        for device in taken[pool.name]:
            note = ""
            if device.xdp_prog_id:
                note = (
                    f"; carries the {device.xdp_mode} XDP program {device.xdp_prog_id}: unhealthy unless that is ours"
                )
            yield f"  takes {device.name}: {device.queues} queues{note}"
        for name, why in passed[pool.name].items():
            yield f"  passes over {name}: {why}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Ends with the exit code for wrong input; argparse's own is taken."""
        self.exit(ExitCode.CONFIGURATION, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="afxdpd",
        description="AF_XDP device plugin for Kubernetes: gives pods network devices with an XDP redirect program, "
        "and the file descriptors of their XSKMAPs.",
        epilog="Exit codes: 0 ended as asked, 1 wrong configuration or command line, 2 logging, 3 this host lacks "
        "something, 4 the pools cannot be served.",
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
        "--check",
        action="store_true",
        help="read the configuration, say what each pool would take on this host, and end",
    )
    parser.add_argument("--version", action="version", version=f"afxdpd {__version__}")
    return parser.parse_args(arguments)


async def _serve_until_signal(config: PluginConfig, paths: Paths) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:  # before anything says that we run
        scope = trio.CancelScope()

        async def serve_in_scope() -> None:
            with scope:
                await serve(config, paths)

        async def wait_signals() -> None:
            async for number in signals:
                log.info("%s: ending; pods keep their devices", signal.Signals(number).name)
                scope.cancel()

        await _first_of(serve_in_scope, wait_signals)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: Without the program's name; those of the process by default.

    Returns:
        The exit code, see ExitCode.
    """
    options = _parse_arguments(arguments)
    logging.basicConfig(format="%(asctime)s %(levelname)-7s %(message)s", stream=sys.stdout)
    paths = Paths(
        kubelet_dir=options.kubelet_dir,
        pod_resources_socket=options.pod_resources_socket or options.kubelet_dir / "pod-resources" / "kubelet.sock",
        uds_dir=options.uds_dir.absolute(),  # kubelet is told of it
        bpffs=options.bpffs,
    )
    try:
        log.setLevel((options.log_level or "info").upper())
        config = get_plugin_config(options.config)
        paths.check(config)
        log.setLevel((options.log_level or config.log_level).upper())
        if options.check:
            print("\n".join(check_report(config, Network().devices())))
            return ExitCode.NORMAL
        os.umask(0o077)
        _raise_file_limit()
        trio.run(_serve_until_signal, config, paths)
    except Exception as exc:  # noqa: BLE001  the end of the program: all that is left is to say why
        return _exit_code(exc)
    return ExitCode.NORMAL


def _exit_code(exc: Exception) -> ExitCode:
    """Says in a line for each error why the daemon ends, and with which code."""
    error = _only_error(exc)
    match error:
        case ConfigError(errors=errors):
            code, lines = ExitCode.CONFIGURATION, list(errors)
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


def _raise_file_limit() -> None:
    """Lets this process have as many descriptors as it may: each device takes four."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main())
