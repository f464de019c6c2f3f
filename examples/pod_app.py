#!/usr/bin/env python3
"""Receive packets in a pod through AF_XDP: a complete pod application, and a quarry of code for your own.

It asks afxdpd for the XSKMAP of each of the pod's devices, puts one AF_XDP socket per receive queue into it and counts
what arrives. Packets of ethertype 0x88B5 that carry ``b"AFXDPQS1"`` and a 64-bit number are also checked for loss.
It needs ``afxdpd_client.py`` beside it, Python 3.9 (standard library only), Linux 5.19 on x86_64 or aarch64,
CAP_NET_RAW, and 2 MiB of lockable memory for each queue. The usual limit of 8 MiB is enough for four; for more queues
add CAP_IPC_LOCK or say ``--frames 512``.

The order of things is the same for every application:

1. ``afxdpd_client.Client``: the handshake on the Unix socket that afxdpd mounts into the container.
2. ``XskSocket``: packet memory and rings, bound to a queue. In the pod: the device must have moved there before.
3. ``xskmap_update``: from now on the XDP program on the device redirects that queue's packets to the socket.
4. ``XskSocket.receive`` whenever poll(2) says so. A socket that is closed leaves the map: there is nothing to undo.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import mmap
import os
import platform
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from errno import EAFNOSUPPORT, EBUSY, EINVAL, ENOBUFS, ENODEV, ENOMEM, EOPNOTSUPP, EPERM
from typing import NoReturn

from afxdpd_client import SOCKET_DIR, Client, ClientError, allocated_devices

ETHERTYPE, MAGIC = 0x88B5, b"AFXDPQS1"  # a numbered packet: Ethernet header, MAGIC, number (8 bytes, big endian)
NUMBERED = struct.Struct("!H8sQ")  # these three, from byte 12 of the packet on
FRAME_SIZE = 2048  # of which the kernel keeps 256 to itself: longer packets than 1792 bytes are dropped
VERSION = "0.1"  # of the handshake
BATCH = 64  # packets that are taken from a ring before their frames go back to the kernel

# linux/if_xdp.h
AF_XDP, SOL_XDP = 44, 283
XDP_MMAP_OFFSETS, XDP_RX_RING, XDP_UMEM_REG, XDP_UMEM_FILL_RING, XDP_UMEM_COMPLETION_RING = 1, 2, 4, 5, 6
XDP_STATISTICS = 7
XDP_PGOFF_RX_RING, XDP_UMEM_PGOFF_FILL_RING = 0, 0x1_0000_0000
XDP_COPY, XDP_ZEROCOPY, XDP_USE_NEED_WAKEUP = 1 << 1, 1 << 2, 1 << 3
# linux/bpf.h; linux/sockios.h, linux/ethtool.h, linux/if.h
BPF_MAP_UPDATE_ELEM, BPF_OBJ_GET_INFO_BY_FD, BPF_MAP_TYPE_XSKMAP = 2, 15, 17
SIOCGIFFLAGS, SIOCETHTOOL, ETHTOOL_GCHANNELS, IFF_UP = 0x8913, 0x8946, 0x3C, 1
SYS_BPF = {"x86_64": 321, "aarch64": 280}

libc = ctypes.CDLL(None, use_errno=True)

# What to do, by the step that failed and the errno
MEMLOCK = (
    "the limit of locked memory, which counts for all pods on the node with this user ID, is too low: add IPC_LOCK to "
    "the container's securityContext.capabilities, raise the limit (ulimit -l), or use fewer --frames"
)
ADVICE = {
    "device": {ENODEV: "its CNI plugin has to move it into this network namespace: see the pod's networks annotation"},
    "socket": {
        EPERM: "add NET_RAW to the container's securityContext.capabilities; unless it runs as root, the program file "
        "must have it too (setcap cap_net_raw+ep)",
        EAFNOSUPPORT: "this node's kernel was built without AF_XDP (CONFIG_XDP_SOCKETS)",
    },
    "memory": {ENOBUFS: MEMLOCK, ENOMEM: MEMLOCK},
    "bind": {
        EBUSY: "another AF_XDP socket is bound to it: is a second application running in this pod?",
        EOPNOTSUPP: "its driver has no zero-copy mode: leave out --zero-copy",
    },
    "map": {EPERM: "it takes Linux 5.19 (or CAP_BPF), and a seccomp profile that allows bpf(2): not RuntimeDefault"},
}


class PodError(Exception):
    """What went wrong and what to do about it, in one line; errno where the kernel said so."""

    def __init__(self, message: str, number: int | None = None) -> None:
        super().__init__(message)
        self.errno = number


@contextmanager
def explained(step: str, what: str) -> Iterator[None]:
    """Turns an OSError into a PodError with the advice for this step."""
    try:
        yield
    except OSError as exc:
        advice = ADVICE.get(step, {}).get(exc.errno or 0)
        message = f"cannot {what}: {exc.strerror or exc}" + (f"; {advice}" if advice else "")
        raise PodError(message, exc.errno) from exc


# -- The kernel --------------------------------------------------------------------------------------------------------


def bpf(command: int, attr: bytes) -> None:
    """Makes the system call, which the C library does not wrap. Raises OSError."""
    number = SYS_BPF.get(platform.machine())
    if number is None:
        raise PodError(f"the number of bpf(2) on {platform.machine()} is not known: add it to SYS_BPF")
    if libc.syscall(ctypes.c_long(number), ctypes.c_long(command), attr, ctypes.c_long(len(attr))) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def xskmap_entries(map_fd: int) -> int:
    """Returns how many queues the map has room for. Holding its fd is enough. Linux 5.19."""
    info = (ctypes.c_uint32 * 5)()  # the head of struct bpf_map_info: type, id, key_size, value_size, max_entries
    with explained("map", "query the XSKMAP"):
        bpf(BPF_OBJ_GET_INFO_BY_FD, struct.pack("IIQ", map_fd, ctypes.sizeof(info), ctypes.addressof(info)))
    if info[0] != BPF_MAP_TYPE_XSKMAP:
        raise PodError(f"a map of type {info[0]} came instead of an XSKMAP: whose socket is this?")
    return info[4]


def xskmap_update(map_fd: int, queue: int, xsk_fd: int) -> None:
    """Puts a bound socket into the map at its queue. Holding the map's fd is enough. Linux 5.19."""
    key, value = ctypes.c_uint32(queue), ctypes.c_uint32(xsk_fd)
    with explained("map", f"put queue {queue} into the XSKMAP"):
        attr = struct.pack("I4xQQQ", map_fd, ctypes.addressof(key), ctypes.addressof(value), 0)
        bpf(BPF_MAP_UPDATE_ELEM, attr)


def _device_ioctl(device: str, request: int, argument: int = 0) -> int:
    """Returns what the ioctl wrote behind the name in struct ifreq: the flags, for SIOCGIFFLAGS. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        ifreq = fcntl.ioctl(sock, request, struct.pack("16sQ16x", device.encode(), argument))
    return int(struct.unpack_from("H", ifreq, 16)[0])


def is_up(device: str) -> bool:
    """Tells whether the device is set up. Raises OSError."""
    return bool(_device_ioctl(device, SIOCGIFFLAGS) & IFF_UP)


def rx_queues(device: str) -> int:
    """Returns the number of receive queues, 0 if the driver does not tell. /sys is often another namespace's."""
    channels = (ctypes.c_uint32 * 9)(ETHTOOL_GCHANNELS)  # struct ethtool_channels: [5] is rx_count, [8] combined_count
    with suppress(OSError):
        _device_ioctl(device, SIOCETHTOOL, ctypes.addressof(channels))
    return channels[5] + channels[8]


class Ring:
    """Entries in memory shared with the kernel, and the counters of who writes (producer) and who reads (consumer)."""

    def __init__(self, sock: socket.socket, page: int, offsets: Sequence[int], entries: int, entry_size: int) -> None:
        producer, consumer, first_entry, _flags = offsets
        self._memory = mmap.mmap(sock.fileno(), first_entry + entries * entry_size, offset=page)
        # c_uint32 is read and written in one piece, which a counter needs; struct's "<I" goes byte by byte.
        self.producer = ctypes.c_uint32.from_buffer(self._memory, producer)
        self.consumer = ctypes.c_uint32.from_buffer(self._memory, consumer)
        self.entries = memoryview(self._memory)[first_entry:]
        self.mask = entries - 1

    def close(self) -> None:
        """Unmaps the ring."""
        del self.producer, self.consumer  # memory that something points to cannot be unmapped
        self.entries.release()
        self._memory.close()


class XskSocket:
    """An AF_XDP socket that receives from one queue, with packet memory of its own. For one thread.

    Theory of operation: the packet memory consists of frames. A frame is in the fill ring (the kernel may write a
    packet to it), in the Rx ring (it holds a packet for us) or in our hands. Each ring has as many entries as there are
    frames, so it never overflows. Where the kernel finds the fill ring empty, it drops the packet: the number of frames
    is how late the application may be (1024 are 50 ms at 20,000 packets per second).

    Memory order: the kernel writes an entry and then the producer counter, so we must read the counter before the
    entry, and be done with the entry before we write the consumer counter; for the fill ring it is the reverse. CPython
    makes plain loads and stores of it. x86 keeps their order, arm does not: _fence() stands wherever it matters.
    """

    def __init__(self, device: str, queue: int, *, frames: int = 1024, zero_copy: bool = False) -> None:
        self.device, self.queue, self.received = device, queue, 0
        self._lock = threading.Lock()
        self._lock.acquire()
        name, size = f"queue {queue} of {device}", frames * FRAME_SIZE
        with ExitStack() as stack:  # closes what is open when a step fails
            with explained("socket", "open an AF_XDP socket"):
                self._sock = stack.enter_context(socket.socket(AF_XDP, socket.SOCK_RAW))
            with explained("memory", f"lock {size >> 10} KiB for {name}"):
                umem = stack.enter_context(mmap.mmap(-1, size))
                address = ctypes.addressof(ctypes.c_char.from_buffer(umem))
                self._sock.setsockopt(SOL_XDP, XDP_UMEM_REG, struct.pack("QQII", address, size, FRAME_SIZE, 0))
            with explained("rings", f"make the rings of {name}"):
                self._sock.setsockopt(SOL_XDP, XDP_UMEM_FILL_RING, frames)
                self._sock.setsockopt(SOL_XDP, XDP_UMEM_COMPLETION_RING, 2)  # for sending; bind insists on it
                self._sock.setsockopt(SOL_XDP, XDP_RX_RING, frames)
                # For Rx, Tx, fill and completion: the offsets of producer, consumer, entries, flags
                offsets = struct.unpack("16Q", self._sock.getsockopt(SOL_XDP, XDP_MMAP_OFFSETS, 128))
                self._rx = Ring(self._sock, XDP_PGOFF_RX_RING, offsets[0:4], frames, 16)
                stack.callback(self._rx.close)
                self._fill = Ring(self._sock, XDP_UMEM_PGOFF_FILL_RING, offsets[8:12], frames, 8)
                stack.callback(self._fill.close)
            self._packets = stack.enter_context(memoryview(umem))
            self._free = stack.enter_context(self._fill.entries.cast("Q"))  # addresses: offsets in the packet memory
            for frame in range(frames):
                self._free[frame] = frame * FRAME_SIZE
            self._fence()
            self._fill.producer.value = frames
            with explained("bind", f"bind to {name}"):
                flags = XDP_USE_NEED_WAKEUP | (XDP_ZEROCOPY if zero_copy else XDP_COPY)
                # struct sockaddr_xdp, which Python's own bind() does not know; no packet memory shared with fd 0
                sockaddr = struct.pack("HHIII", AF_XDP, flags, socket.if_nametoindex(device), queue, 0)
                if libc.bind(self._sock.fileno(), sockaddr, len(sockaddr)) < 0:
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            self._resources = stack.pop_all()

    def _fence(self) -> None:
        """A full memory barrier, or the closest that Python has to it: a lock is given back and taken again."""
        self._lock.release()
        self._lock.acquire()

    def fileno(self) -> int:
        """The socket's fd, for poll(2) and the XSKMAP; it stays ours."""
        return self._sock.fileno()

    def receive(self, handle: Callable[[memoryview], None]) -> int:
        """Hands up to BATCH packets to handle, each valid during that call only; returns how many. Never waits."""
        rx, fill = self._rx, self._fill
        consumer, producer = rx.consumer.value, fill.producer.value  # only we write these two
        count = min((rx.producer.value - consumer) & 0xFFFFFFFF, BATCH)
        self._fence()
        for i in range(count):
            address, length, _options = struct.unpack_from("QII", rx.entries, ((consumer + i) & rx.mask) * 16)
            handle(self._packets[address : address + length])
            self._free[(producer + i) & fill.mask] = address - address % FRAME_SIZE
        self._fence()
        rx.consumer.value = consumer + count  # c_uint32 wraps around, as the kernel's counters do
        fill.producer.value = producer + count
        self.received += count
        return count

    def busy_poll(self) -> None:
        """Runs the driver's receive loop in this thread, once busy polling is configured."""
        with suppress(BlockingIOError):
            self._sock.recv(0, socket.MSG_DONTWAIT)

    def dropped(self) -> int:
        """Returns how many packets the kernel dropped: no frame was free, or the packet was too long for one."""
        statistics = struct.unpack("6Q", self._sock.getsockopt(SOL_XDP, XDP_STATISTICS, 48))
        return int(statistics[0] + statistics[3])

    def check(self) -> None:
        """Raises PodError if the device is gone: the kernel has unbound the socket then; poll(2) does not tell."""
        if number := self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise PodError(f"{self.device} has left this network namespace: start again once it is back", number)

    def close(self) -> None:
        """Closes the socket, which takes it out of the XSKMAP, and frees its memory."""
        self._resources.close()


# -- The application ---------------------------------------------------------------------------------------------------


class Tally:
    """What arrived on one device. Its sender numbers the packets, starting anywhere."""

    WINDOW = 65536  # a number that comes later than that counts as a duplicate: memory stays bounded

    def __init__(self) -> None:
        self.received = self.bytes = self.numbered = self.duplicates = self.other = 0
        self._first = self._next = 0  # the numbers seen so far are in [first, next), except for the missing ones
        self._missing: set[int] = set()

    @property
    def lost(self) -> int:
        """The gaps: numbers between the lowest and the highest that did not come."""
        return self._next - self._first - (self.numbered - self.duplicates)

    def add(self, packet: memoryview) -> None:
        """Counts one packet, which begins with its Ethernet header."""
        self.received += 1
        self.bytes += len(packet)
        if len(packet) < 12 + NUMBERED.size or NUMBERED.unpack_from(packet, 12)[:2] != (ETHERTYPE, MAGIC):
            self.other += 1
            return
        number: int = NUMBERED.unpack_from(packet, 12)[2]
        self.numbered += 1
        if self.numbered == 1:
            self._first, self._next = number, number + 1
        elif number >= self._next:
            self._missing.update(range(max(self._next, number - self.WINDOW), number))
            self._next = number + 1
            if len(self._missing) > 2 * self.WINDOW:
                self._missing = {n for n in self._missing if n >= number - self.WINDOW}
        elif number < self._first:  # queues may overtake each other
            self._missing.update(range(max(number + 1, self._first - self.WINDOW), self._first))
            self._first = number
        elif number in self._missing:
            self._missing.remove(number)
        else:
            self.duplicates += 1


def device_groups(names: Sequence[str]) -> list[list[str]]:
    """Returns the devices in groups that one socket answers for: those named, or those of each pool's variable."""
    if names:
        return [list(dict.fromkeys(names))]
    groups = list(allocated_devices().values())
    if not groups:
        hint = "the device plugin sets AFXDP_DEVICES_<POOL> for a container with resources.limits afxdp/<pool>"
        raise PodError(f"no device: {hint}; elsewhere name it with --device")
    return groups


def open_device(device: str, map_fd: int, args: argparse.Namespace, stack: ExitStack) -> list[XskSocket]:
    """Opens a socket for each receive queue of the device that the map has room for, and puts it there."""
    with explained("device", f"use {device}"):
        if not is_up(device):
            print(f"warning: {device} is down: nothing arrives before its CNI plugin sets it up", file=sys.stderr)
    entries, xsks = xskmap_entries(map_fd), []
    for queue in range(min(rx_queues(device) or entries, entries)):
        try:
            xsk = XskSocket(device, queue, frames=args.frames, zero_copy=args.zero_copy)
        except PodError as exc:
            if queue and exc.errno == EINVAL:
                break  # no such queue: the map is larger, and the driver did not tell
            raise
        stack.callback(xsk.close)
        xskmap_update(map_fd, queue, xsk.fileno())
        xsks.append(xsk)
    return xsks


def receive_all(
    xsks: Sequence[XskSocket], tallies: dict[str, Tally], args: argparse.Namespace, stop: Sequence[int]
) -> bool:
    """Receives until enough has arrived or, and then returns False, nothing for a while, or stop is not empty."""
    poller = select.poll()
    for xsk in xsks:
        poller.register(xsk, select.POLLIN)
    sources = {xsk.fileno(): (xsk, tallies[xsk.device].add) for xsk in xsks}
    last = time.monotonic()
    while not stop:
        ready = [sources[fd] for fd, _ in poller.poll(0 if args.busy_poll else 200)]  # at most: a signal may have come
        if sum(xsk.receive(handle) for xsk, handle in ready):
            last = time.monotonic()
            if args.packets and sum(tally.numbered - tally.duplicates for tally in tallies.values()) >= args.packets:
                return True
            continue
        for xsk in xsks:
            xsk.check()
            if args.busy_poll:
                xsk.busy_poll()
        if args.seconds and time.monotonic() - last >= args.seconds:
            break
    return not args.packets


def summary(xsks: Sequence[XskSocket], tallies: dict[str, Tally], *, as_json: bool) -> str:
    """Returns the result as one line."""
    keys = ("received", "bytes", "numbered", "lost", "duplicates", "other")
    total = {key: sum(getattr(tally, key) for tally in tallies.values()) for key in keys}
    total["dropped"] = sum(xsk.dropped() for xsk in xsks)
    if as_json:
        return json.dumps({**total, "queues": {f"{xsk.device}:{xsk.queue}": xsk.received for xsk in xsks}})
    line = "received {received} packets, {bytes} bytes: {numbered} numbered ({lost} lost, {duplicates} duplicates)"
    return (line + ", {other} other; dropped by the kernel: {dropped}").format(**total)


def two_numbers(text: str) -> tuple[int, int]:
    """Parses two numbers with a comma between them. Raises ArgumentTypeError."""
    try:
        first, second = text.split(",")
        return int(first), int(second)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"not two numbers, such as 20,64: {text}") from exc


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise PodError(f"{message}; --help shows the options")  # argparse would exit with 2, our "not all arrived"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line. Raises PodError."""
    status = "exit status: 0 done; 1 failed (stderr says why, and what to do); 2 ended before --packets had arrived"
    parser = _Parser(description="Receive packets of the pod's AF_XDP devices, and count them.", epilog=status)
    add = parser.add_argument
    add("--device", action="append", metavar="NAME", help="repeatable; default: those in AFXDP_DEVICES_*")
    add("--socket-dir", default=SOCKET_DIR, metavar="DIR", help="default: %(default)s")
    add("--hostname", default=socket.gethostname(), metavar="NAME", help="the pod's name; default: %(default)s")
    frames = [1 << n for n in range(6, 17)]
    add("--frames", type=int, default=1024, choices=frames, metavar="N", help="per queue, of 2 KiB; default: 1024")
    add("--zero-copy", action="store_true", help="have the driver write to the packet memory: few drivers can")
    busy_poll = "run the driver's receive loop here, such as 20,64"
    add("--busy-poll", type=two_numbers, metavar="TIMEOUT_US,BUDGET", help=busy_poll)
    add("--packets", type=int, metavar="N", help="end after N numbered packets, not counting duplicates")
    add("--seconds", type=float, metavar="S", help="end when nothing has arrived for S seconds")
    add("--json", action="store_true", help="print the result as one line of JSON")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    """Does it all; returns the exit status. Raises ClientError and PodError."""
    stop: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: stop.append(received))
    clients: list[Client] = []
    xsks: list[XskSocket] = []
    with ExitStack() as stack:
        for devices in device_groups(args.device or []):
            client = stack.enter_context(Client(devices[0], socket_dir=args.socket_dir, hostname=args.hostname))
            clients.append(client)
            if (version := client.version()) != VERSION:
                raise PodError(f"the daemon speaks version {version} of the handshake, this application {VERSION}")
            for device in devices:
                map_fd = client.xsk_map_fd(device)
                stack.callback(os.close, map_fd)
                opened = open_device(device, map_fd, args, stack)
                for xsk in opened if args.busy_poll else ():  # it takes privileges: the daemon does it for us
                    client.config_busy_poll(xsk.fileno(), *args.busy_poll)
                xsks += opened
        tallies = {xsk.device: Tally() for xsk in xsks}
        print(f"ready: {len(xsks)} queues on {' '.join(tallies)}", flush=True)
        done = receive_all(xsks, tallies, args, stop)
        print(summary(xsks, tallies, as_json=args.json), flush=True)
        for client in clients:
            try:
                client.fin()
            except ClientError as exc:  # the daemon was restarted meanwhile: no concern of a running application
                print(f"warning: {exc}", file=sys.stderr)
    return 0 if done else 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the application; returns its exit status."""
    try:
        return run(parse_args(argv))
    except (ClientError, PodError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
