"""The C helper against the running kernel, without the daemon around it."""

from __future__ import annotations

import array
import ctypes
import errno
import os
import platform
import resource
import signal
import socket
import struct
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import pytest
from pyroute2 import IPRoute

from _uds import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# The C helper's own numbers: the bits of uds_recv()'s flags.
END_OF_FILE = 1
CUT = 2

# Linux's, where Python has no names for them. See include/uapi/asm-generic/socket.h, linux/if_xdp.h, linux/bpf.h.
AF_XDP = 44
SO_BUSY_POLL = 46
SO_PREFER_BUSY_POLL = 69
SOL_XDP = 283
XDP_RX_RING = 2
XDP_PASS = 2
XDP_REDIRECT = 4
BPF_MAP_CREATE = 0
BPF_MAP_UPDATE_ELEM = 2
BPF_PROG_LOAD = 5
BPF_PROG_TEST_RUN = 10
BPF_LINK_CREATE = 28
BPF_MAP_TYPE_PERCPU_ARRAY = 6  # the same number as an XDP link
BPF_PROG_TYPE_RAW_TRACEPOINT = 17  # the same number as an XSKMAP
BPF_PROG_TYPE_FLOW_DISSECTOR = 22
BPF_FLOW_DISSECTOR = 17


class Kernel(Protocol):
    """What these tests use of the fixture "kernel"."""

    @property
    def bpffs(self) -> Path:
        """A mounted BPF file system of the test's own."""


def check(ret: int) -> int:
    """Returns what the helper returned, or raises it as OSError."""
    if ret < 0:
        raise OSError(-ret, os.strerror(-ret))
    return ret


def count_open_fds() -> int:
    """Counts this process's descriptors, one more for the count itself."""
    return len(os.listdir("/proc/self/fd"))


# -- Messages: no privilege needed -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Packet:
    """What uds_recv() returned, the fds being the test's to close."""

    data: bytes
    fds: list[int]
    n_fds: int
    pid: int
    uid: int
    flags: int


def receive(sock: socket.socket, *, size: int = 128, max_fds: int = 4) -> Packet:
    """Calls uds_recv() once.

    Raises:
        OSError: what the helper returned.
    """
    buffer, fds = ffi.new("char[]", size), ffi.new("int[]", max_fds)
    n_fds, pid, uid, flags = ffi.new("unsigned int *"), ffi.new("int *"), ffi.new("unsigned int *"), ffi.new("int *")
    length = check(lib.uds_recv(sock.fileno(), buffer, size, fds, max_fds, n_fds, pid, uid, flags))
    return Packet(
        data=bytes(ffi.buffer(buffer, length)),
        fds=list(fds[0 : min(n_fds[0], max_fds)]),
        n_fds=n_fds[0],
        pid=pid[0],
        uid=uid[0],
        flags=flags[0],
    )


def send(sock: socket.socket, data: bytes, fd: int = -1) -> None:
    """Calls uds_send() once, or raises what it returned as OSError."""
    check(lib.uds_send(sock.fileno(), data, len(data), fd))


def send_fds(sock: socket.socket, data: bytes, fds: list[int]) -> None:
    """Sends many fds, which the helper itself never does."""
    sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Our end of a connection and the peer's, both in blocking mode, to see that the helper does not block."""
    ours, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, peer:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        yield ours, peer


def test_recv_returns_the_packet_and_its_sender_when_no_fd_is_attached(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """A packet arrives as it was sent, with the process and the user that sent it."""
    ours, peer = pair
    send(peer, b"/version")
    assert receive(ours) == Packet(data=b"/version", fds=[], n_fds=0, pid=os.getpid(), uid=os.getuid(), flags=0)


def test_recv_tells_the_sender_when_it_sent_before_we_accepted(tmp_path: Path) -> None:
    """A connection inherits SO_PASSCRED from the listening socket, so that no early packet is without a sender."""
    path = str(tmp_path / "afxdp.sock")
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer,
    ):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        listener.bind(path)
        listener.listen()
        peer.connect(path)
        send(peer, b"early")
        ours, _address = listener.accept()
        with ours:
            send(peer, b"late")
            for data in (b"early", b"late"):
                packet = receive(ours)
                assert (packet.data, packet.pid, packet.uid) == (data, os.getpid(), os.getuid())


def test_recv_returns_one_packet_when_several_wait(pair: tuple[socket.socket, socket.socket]) -> None:
    """Each call receives one packet, in the order sent."""
    ours, peer = pair
    for data in (b"first", b"second"):
        send(peer, data)
    assert [receive(ours).data, receive(ours).data] == [b"first", b"second"]


def test_recv_returns_the_fd_when_one_is_attached(pair: tuple[socket.socket, socket.socket]) -> None:
    """A descriptor that was sent arrives as another one of the same file, close-on-exec."""
    ours, peer = pair
    with open(os.devnull, "rb") as file:
        send(peer, b"take this", file.fileno())
        packet = receive(ours)
        [fd] = packet.fds
        try:
            assert (packet.data, packet.n_fds, packet.flags) == (b"take this", 1, 0)
            assert fd != file.fileno()
            assert os.path.samestat(os.fstat(fd), os.fstat(file.fileno()))
            assert not os.get_inheritable(fd)
        finally:
            os.close(fd)


def test_recv_tells_an_empty_packet_from_the_end_when_both_have_no_bytes(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """A packet of no bytes is a packet, and what follows the peer's close is the end of file, however often asked."""
    ours, peer = pair
    send(peer, b"")
    peer.close()
    packet = receive(ours)
    assert (packet.data, packet.pid, packet.flags) == (b"", os.getpid(), 0)
    for _ in range(2):
        end = receive(ours)
        assert (end.data, end.flags) == (b"", END_OF_FILE)
        assert (end.pid, end.uid) == (0, 2**32 - 1)


def test_recv_returns_the_fd_when_the_packet_is_empty(pair: tuple[socket.socket, socket.socket]) -> None:
    """A packet of no bytes may carry a descriptor."""
    ours, peer = pair
    send(peer, b"", ours.fileno())
    packet = receive(ours)
    os.close(packet.fds[0])
    assert (packet.data, packet.n_fds, packet.flags) == (b"", 1, 0)


def test_recv_says_so_when_the_packet_is_longer_than_the_buffer(pair: tuple[socket.socket, socket.socket]) -> None:
    """A packet that does not fit is cut and marked, and the next packet is not its rest."""
    ours, peer = pair
    send(peer, b"123456789")
    send(peer, b"next")
    packet = receive(ours, size=8)
    assert (packet.data, packet.flags) == (b"12345678", CUT)
    assert receive(ours, size=8).data == b"next"


def test_recv_does_not_say_cut_when_the_packet_just_fits(pair: tuple[socket.socket, socket.socket]) -> None:
    """A packet as long as the buffer is whole."""
    ours, peer = pair
    send(peer, b"12345678")
    packet = receive(ours, size=8)
    assert (packet.data, packet.flags) == (b"12345678", 0)


@pytest.mark.parametrize("max_fds", [0, 1, 4])
def test_recv_closes_the_surplus_when_a_peer_sends_as_many_fds_as_it_can(
    pair: tuple[socket.socket, socket.socket], max_fds: int
) -> None:
    """Of 253 descriptors the caller gets as many as it has room for, and the others are closed."""
    ours, peer = pair
    before = count_open_fds()
    send_fds(peer, b"many", [ours.fileno()] * 253)
    packet = receive(ours, max_fds=max_fds)
    after = count_open_fds()
    for fd in packet.fds:
        os.close(fd)
    assert (packet.data, packet.n_fds, packet.flags) == (b"many", 253, 0)
    assert after - before == len(set(packet.fds)) == max_fds


def test_recv_counts_what_the_kernel_could_give_when_the_process_runs_out_of_fds(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """At the limit of open files the packet still arrives, with the descriptors that fitted."""
    ours, peer = pair
    send_fds(peer, b"many", [ours.fileno()] * 8)
    before = count_open_fds()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(ours.fileno())  # the lowest free number
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))
    try:
        packet = receive(ours, max_fds=0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (packet.data, packet.n_fds) == (b"many", 1)
    assert count_open_fds() == before


def test_recv_switches_linger_off_when_it_closes_a_surplus_socket(pair: tuple[socket.socket, socket.socket]) -> None:
    """A socket that would keep its closer waiting for the peer is told not to."""
    ours, peer = pair
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as lingering:
        lingering.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
        send(peer, b"", lingering.fileno())
        receive(ours, max_fds=0)
        assert struct.unpack("ii", lingering.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8))[0] == 0


def test_recv_does_not_block_when_nothing_waits(pair: tuple[socket.socket, socket.socket]) -> None:
    """Without a packet the answer is EAGAIN, even on a socket that is in blocking mode."""
    ours, _peer = pair
    with pytest.raises(BlockingIOError):
        receive(ours)


def test_recv_reports_a_reset_once_when_the_peer_closes_with_our_packets_unread(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """Our lost reply is reported once, before what the peer still sent and the end of file."""
    ours, peer = pair
    send(peer, b"/fin")
    send(ours, b"never read")
    peer.close()
    with pytest.raises(ConnectionResetError):
        receive(ours)
    assert receive(ours).data == b"/fin"
    assert receive(ours).flags == END_OF_FILE


def test_recv_and_send_fail_when_the_fd_is_no_socket() -> None:
    """What is no socket is ENOTSOCK, what is no descriptor EBADF."""
    outs = [ffi.new(kind) for kind in ("unsigned int *", "int *", "unsigned int *", "int *")]
    with open(os.devnull, "rb") as file:
        for fd, expected in ((file.fileno(), errno.ENOTSOCK), (-1, errno.EBADF)):
            assert lib.uds_recv(fd, ffi.new("char[1]"), 1, ffi.NULL, 0, *outs) == -expected
            assert lib.uds_send(fd, b"x", 1, -1) == -expected


def test_send_does_not_block_when_the_peer_does_not_read(pair: tuple[socket.socket, socket.socket]) -> None:
    """Once the peer's queue is full the answer is EAGAIN, and a packet read makes room for another."""
    ours, peer = pair

    def fill() -> None:
        for _ in range(100_000):
            send(ours, b"x" * 1000)

    with pytest.raises(BlockingIOError):
        fill()
    while True:
        try:
            peer.recv(1000, socket.MSG_DONTWAIT)
        except BlockingIOError:
            break
    send(ours, b"room again")


def test_send_raises_no_signal_when_the_peer_has_closed(pair: tuple[socket.socket, socket.socket]) -> None:
    """Sending to a peer that has closed is EPIPE, without SIGPIPE."""
    ours, peer = pair
    signals: list[int] = []
    former = signal.signal(signal.SIGPIPE, lambda number, _frame: signals.append(number))
    try:
        peer.close()
        with pytest.raises(BrokenPipeError):
            send(ours, b"anyone?")
    finally:
        signal.signal(signal.SIGPIPE, former)
    assert signals == []


def test_send_fails_when_the_fd_to_send_is_not_open(pair: tuple[socket.socket, socket.socket]) -> None:
    """A packet whose descriptor is not open is not sent at all."""
    ours, peer = pair
    assert lib.uds_send(ours.fileno(), b"x", 1, 2**30) == -errno.EBADF
    with pytest.raises(BlockingIOError):
        peer.recv(1, socket.MSG_DONTWAIT)


def test_send_keeps_the_senders_fd_open_when_it_was_sent(pair: tuple[socket.socket, socket.socket]) -> None:
    """A descriptor that is passed in is borrowed."""
    ours, peer = pair
    with open(os.devnull, "rb") as file:
        send(ours, b"x", file.fileno())
        os.fstat(file.fileno())
    _data, fds, _flags, _address = socket.recv_fds(peer, 1, 1)
    os.close(fds[0])


# -- Busy polling ----------------------------------------------------------------------------------------------------


def test_busy_poll_fails_when_the_fd_is_no_socket() -> None:
    """A file is ENOTSOCK, a closed descriptor EBADF."""
    with open(os.devnull, "rb") as file:
        assert lib.uds_busy_poll(file.fileno(), 20, 64) == -errno.ENOTSOCK
    assert lib.uds_busy_poll(-1, 20, 64) == -errno.EBADF


@pytest.mark.parametrize(
    ("family", "kind"),
    [(socket.AF_INET, socket.SOCK_DGRAM), (socket.AF_UNIX, socket.SOCK_SEQPACKET)],
)
def test_busy_poll_leaves_the_socket_alone_when_it_is_not_af_xdp(family: int, kind: int) -> None:
    """A socket of another family is EAFNOSUPPORT, and its options stay as they were."""
    with socket.socket(family, kind) as sock:
        assert lib.uds_busy_poll(sock.fileno(), 20, 64) == -errno.EAFNOSUPPORT
        assert busy_poll_options(sock) == (0, 0)


def busy_poll_options(sock: socket.socket) -> tuple[int, int]:
    """Returns what can be read of the three: the kernel does not tell the budget."""
    return (
        sock.getsockopt(socket.SOL_SOCKET, SO_PREFER_BUSY_POLL),
        sock.getsockopt(socket.SOL_SOCKET, SO_BUSY_POLL),
    )


@pytest.mark.kernel
@pytest.mark.usefixtures("kernel")
def test_busy_poll_sets_the_options_when_all_are_accepted() -> None:
    """An AF_XDP socket then prefers busy polling, for the time asked."""
    with socket.socket(AF_XDP, socket.SOCK_RAW) as xsk:
        assert lib.uds_busy_poll(xsk.fileno(), 20, 65535) == 0
        assert busy_poll_options(xsk) == (1, 20)


@pytest.mark.kernel
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(("timeout_us", "budget"), [(20, 70000), (20, -1), (-1, 64)])
@pytest.mark.parametrize("former", [(0, 0), (1, 50), (0, 50)])
def test_busy_poll_changes_nothing_when_one_value_is_refused(
    timeout_us: int, budget: int, former: tuple[int, int]
) -> None:
    """A value out of range is EINVAL, and the options that were set before it get their former values back."""
    with socket.socket(AF_XDP, socket.SOCK_RAW) as xsk:
        xsk.setsockopt(socket.SOL_SOCKET, SO_PREFER_BUSY_POLL, former[0])
        xsk.setsockopt(socket.SOL_SOCKET, SO_BUSY_POLL, former[1])
        assert lib.uds_busy_poll(xsk.fileno(), timeout_us, budget) == -errno.EINVAL
        assert busy_poll_options(xsk) == former


# -- BPF objects: tools ----------------------------------------------------------------------------------------------


@contextmanager
def closing(fd: int) -> Iterator[int]:
    """Closes an fd that the helper returned.

    Raises:
        OSError: the helper returned an error instead.
    """
    check(fd)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def veth(queues: int = 1) -> Iterator[int]:
    """Makes a pair of devices that are up, and yields the ifindex of one. The block may delete it."""
    with IPRoute() as ipr:
        peer = {"ifname": "uds1", "num_rx_queues": queues, "num_tx_queues": queues}
        ipr.link("add", ifname="uds0", kind="veth", num_rx_queues=queues, num_tx_queues=queues, peer=peer)
        [ifindex], [peer_ifindex] = ipr.link_lookup(ifname="uds0"), ipr.link_lookup(ifname="uds1")
        try:
            ipr.link("set", index=ifindex, state="up")
            ipr.link("set", index=peer_ifindex, state="up")
            yield ifindex
        finally:
            if ipr.link_lookup(ifname="uds0"):
                ipr.link("del", index=ifindex)


def attached(ifindex: int) -> tuple[str | None, int | None]:
    """Returns the mode ("xdp" for native, "xdpgeneric") and the id of the device's program, as netlink tells."""
    with IPRoute() as ipr:
        [link] = ipr.get_links(ifindex)
        xdp = link.get_attr("IFLA_XDP")
        return xdp.get_attr("IFLA_XDP_ATTACHED"), xdp.get_attr("IFLA_XDP_PROG_ID")


@contextmanager
def open_prog(entries: int = 1) -> Iterator[tuple[int, int]]:
    """Yields the fds of an XSKMAP and of a program that redirects into it."""
    with (
        closing(lib.uds_xskmap_create(b"xsks_map", entries)) as map_fd,
        closing(lib.uds_redirect_prog_load(map_fd, b"redirect")) as prog_fd,
    ):
        yield map_fd, prog_fd


def query_link(fd: int) -> tuple[int, int, int]:
    """Returns the ids of the link and of its program, and the ifindex."""
    info = ffi.new("struct uds_link_info *")
    check(lib.uds_link_query(fd, info))
    return info.id, info.prog_id, info.ifindex


def query_map(fd: int) -> tuple[int, int]:
    """Returns the map's number of entries and its id."""
    map_id = ffi.new("unsigned int *")
    return check(lib.uds_xskmap_query(fd, map_id)), map_id[0]


def raw_bpf(command: int, attr: ctypes.Array[ctypes.c_char]) -> int:
    """Calls bpf(2) past the helper, for what the helper does not do."""
    number = {"x86_64": 321, "aarch64": 280, "riscv64": 280}[platform.machine()]
    libc = ctypes.CDLL(None, use_errno=True)
    ret: int = libc.syscall(ctypes.c_long(number), ctypes.c_long(command), attr, ctypes.c_size_t(len(attr)))
    return ret if ret >= 0 else -ctypes.get_errno()


def attr_of(layout: str, *values: int) -> ctypes.Array[ctypes.c_char]:
    """Lays out attributes, or a structure that they point to."""
    data = struct.pack(layout, *values)
    return ctypes.create_string_buffer(data, len(data))


# -- BPF objects: maps and programs ----------------------------------------------------------------------------------


@pytest.mark.kernel
@pytest.mark.usefixtures("kernel")
def test_xskmap_query_tells_size_and_id_when_the_fd_is_an_xskmap() -> None:
    """A map has the number of entries it was made with, and an id of its own."""
    with closing(lib.uds_xskmap_create(b"one", 1)) as one, closing(lib.uds_xskmap_create(b"many", 64)) as many:
        assert (query_map(one)[0], query_map(many)[0]) == (1, 64)
        assert query_map(one)[1] != query_map(many)[1]
        assert not os.get_inheritable(one)


@pytest.mark.kernel
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(("name", "entries"), [(b"a" * 16, 1), (b"a b", 1), (b"a/b", 1), (b"xsks_map", 0)])
def test_xskmap_create_fails_when_name_or_size_is_wrong(name: bytes, entries: int) -> None:
    """A name that is too long or has other characters, or no entries at all, is EINVAL: nothing is cut to fit."""
    assert lib.uds_xskmap_create(name, entries) == -errno.EINVAL


@pytest.mark.kernel
@pytest.mark.usefixtures("kernel")
def test_create_and_load_accept_the_longest_name() -> None:
    """A name may have 15 characters."""
    with closing(lib.uds_xskmap_create(b"xsks_map.123456", 1)) as map_fd:
        os.close(check(lib.uds_redirect_prog_load(map_fd, b"redirect_123456")))


@pytest.mark.kernel
@pytest.mark.usefixtures("kernel")
def test_prog_load_returns_a_private_fd_when_the_map_is_an_xskmap() -> None:
    """The kernel accepts the program under our license, and its descriptor is close-on-exec."""
    with open_prog() as (_map_fd, prog_fd):
        assert not os.get_inheritable(prog_fd)


@pytest.mark.kernel
@pytest.mark.usefixtures("kernel")
def test_prog_load_fails_when_there_is_no_map() -> None:
    """A descriptor that is no map is EINVAL, one that is not open EBADF, and a name that is too long EINVAL."""
    with open(os.devnull, "rb") as file:
        assert lib.uds_redirect_prog_load(file.fileno(), b"redirect") == -errno.EINVAL
    assert lib.uds_redirect_prog_load(-1, b"redirect") == -errno.EBADF
    with closing(lib.uds_xskmap_create(b"xsks_map", 1)) as map_fd:
        assert lib.uds_redirect_prog_load(map_fd, b"a" * 16) == -errno.EINVAL


def run_prog(prog_fd: int, ifindex: int, queue: int) -> int:
    """Runs an XDP program on a made-up packet of a device's queue and returns its verdict.

    See bpf(2), BPF_PROG_TEST_RUN; the context is struct xdp_md. Linux 5.13.
    """
    packet = ctypes.create_string_buffer(64)
    context = attr_of("=6I", 0, len(packet), 0, ifindex, queue, 0)
    attr = attr_of(
        "=2I2I2Q2I2I2Q",
        *(prog_fd, 0),
        *(len(packet), 0, ctypes.addressof(packet), 0),
        *(1, 0),
        *(len(context), 0, ctypes.addressof(context), 0),
    )
    check(raw_bpf(BPF_PROG_TEST_RUN, attr))
    verdict: int = struct.unpack_from("=I", attr.raw, 4)[0]
    return verdict


@pytest.mark.kernel
@pytest.mark.usefixtures("kernel")
def test_prog_redirects_by_queue_when_the_map_has_a_socket_there() -> None:
    """A packet goes to the socket at its queue's index, and to the stack where there is none or no such entry."""
    with (
        veth(queues=3) as ifindex,
        open_prog(entries=2) as (map_fd, prog_fd),
        closing(lib.uds_xdp_link_create(prog_fd, ifindex, 0)),
        socket.socket(AF_XDP, socket.SOCK_RAW) as xsk,
    ):
        assert [run_prog(prog_fd, ifindex, queue) for queue in range(3)] == [XDP_PASS] * 3
        xsk.setsockopt(SOL_XDP, XDP_RX_RING, 64)  # an XSKMAP takes no socket without
        key, value = attr_of("=I", 1), attr_of("=I", xsk.fileno())
        check(
            raw_bpf(
                BPF_MAP_UPDATE_ELEM,
                attr_of("=2I3Q", map_fd, 0, ctypes.addressof(key), ctypes.addressof(value), 0),
            )
        )
        assert [run_prog(prog_fd, ifindex, queue) for queue in range(3)] == [XDP_PASS, XDP_REDIRECT, XDP_PASS]


@pytest.mark.kernel
@pytest.mark.usefixtures("kernel")
def test_queries_fail_when_the_fd_is_another_bpf_object() -> None:
    """What is no XSKMAP or no XDP link is EINVAL, even where its type happens to have the same number."""
    exit_0 = attr_of("=BBhiBBhi", 0xB7, 0, 0, 0, 0x95, 0, 0, 0)  # r0 = 0; exit
    license_text = ctypes.create_string_buffer(b"GPL")

    def load(prog_type: int) -> int:
        pointers = ctypes.addressof(exit_0), ctypes.addressof(license_text)
        return raw_bpf(BPF_PROG_LOAD, attr_of("=2I2Q", prog_type, 2, *pointers))

    with (
        veth() as ifindex,
        open_prog() as (map_fd, prog_fd),
        closing(lib.uds_xdp_link_create(prog_fd, ifindex, 0)) as link_fd,
        closing(load(BPF_PROG_TYPE_RAW_TRACEPOINT)) as tracepoint_fd,
        closing(raw_bpf(BPF_MAP_CREATE, attr_of("=4I", BPF_MAP_TYPE_PERCPU_ARRAY, 4, 4, 1))) as percpu_fd,
        closing(load(BPF_PROG_TYPE_FLOW_DISSECTOR)) as dissector_fd,
        open("/proc/thread-self/ns/net", "rb") as netns,
        closing(
            raw_bpf(BPF_LINK_CREATE, attr_of("=4I", dissector_fd, netns.fileno(), BPF_FLOW_DISSECTOR, 0))
        ) as other_link_fd,
    ):
        others = [prog_fd, tracepoint_fd, percpu_fd, other_link_fd, netns.fileno()]
        map_id, info = ffi.new("unsigned int *"), ffi.new("struct uds_link_info *")
        for fd in (*others, link_fd):
            assert lib.uds_xskmap_query(fd, map_id) == -errno.EINVAL
        for fd in (*others, map_fd):
            assert lib.uds_link_query(fd, info) == -errno.EINVAL


@pytest.mark.kernel
@pytest.mark.usefixtures("kernel")
def test_queries_fail_when_the_fd_is_not_open() -> None:
    """The kernel answers EBADFD here, not EBADF as elsewhere."""
    assert lib.uds_xskmap_query(-1, ffi.new("unsigned int *")) == -errno.EBADFD
    assert lib.uds_link_query(-1, ffi.new("struct uds_link_info *")) == -errno.EBADFD


# -- BPF objects: links and pins -------------------------------------------------------------------------------------


@pytest.mark.kernel
@pytest.mark.usefixtures("kernel")
def test_link_create_attaches_in_the_driver_when_it_can() -> None:
    """A link attaches its program natively, tells what is behind it, and detaches when its last fd is closed."""
    with veth() as ifindex, open_prog() as (_map_fd, prog_fd):
        with closing(lib.uds_xdp_link_create(prog_fd, ifindex, 0)) as link_fd:
            link_id, prog_id, link_ifindex = query_link(link_fd)
            assert link_id > 0
            assert link_ifindex == ifindex
            assert attached(ifindex) == ("xdp", prog_id)
            assert not os.get_inheritable(link_fd)
        assert attached(ifindex) == (None, None)


@pytest.mark.kernel
@pytest.mark.usefixtures("kernel")
def test_link_create_does_not_fall_back_when_the_driver_cannot() -> None:
    """A device without native XDP is EOPNOTSUPP, and takes the program in the stack when asked to."""
    loopback = socket.if_nametoindex("lo")
    with open_prog() as (_map_fd, prog_fd):
        assert lib.uds_xdp_link_create(prog_fd, loopback, 0) == -errno.EOPNOTSUPP
        with closing(lib.uds_xdp_link_create(prog_fd, loopback, 1)) as link_fd:
            assert attached(loopback) == ("xdpgeneric", query_link(link_fd)[1])


@pytest.mark.kernel
@pytest.mark.usefixtures("kernel")
def test_link_create_replaces_nothing_when_a_program_is_attached() -> None:
    """A device that has a program is EBUSY, or EEXIST in the other mode, and keeps its program."""
    with (
        veth() as ifindex,
        open_prog() as (_map_fd, first),
        open_prog() as (_other_map_fd, second),
        closing(lib.uds_xdp_link_create(first, ifindex, 0)) as link_fd,
    ):
        assert lib.uds_xdp_link_create(second, ifindex, 0) == -errno.EBUSY
        assert lib.uds_xdp_link_create(second, ifindex, 1) == -errno.EEXIST
        assert attached(ifindex) == ("xdp", query_link(link_fd)[1])


@pytest.mark.kernel
@pytest.mark.usefixtures("kernel")
def test_link_create_fails_when_device_or_program_is_missing() -> None:
    """A device that does not exist is EINVAL, and so is a descriptor that is no program."""
    with open_prog() as (map_fd, prog_fd):
        assert lib.uds_xdp_link_create(prog_fd, 2**31 - 1, 0) == -errno.EINVAL
        assert lib.uds_xdp_link_create(map_fd, socket.if_nametoindex("lo"), 1) == -errno.EINVAL
        assert lib.uds_xdp_link_create(-1, socket.if_nametoindex("lo"), 1) == -errno.EBADF


@pytest.mark.kernel
@pytest.mark.usefixtures("kernel")
def test_link_update_changes_the_program_when_the_device_is_there() -> None:
    """An update puts another program behind the same link."""
    with (
        veth() as ifindex,
        open_prog() as (_map_fd, first),
        open_prog() as (_other_map_fd, second),
        closing(lib.uds_xdp_link_create(first, ifindex, 0)) as link_fd,
    ):
        before = query_link(link_fd)
        assert lib.uds_link_update(link_fd, second) == 0
        after = query_link(link_fd)
        assert after[1] != before[1]
        assert (after[0], after[2]) == (before[0], before[2])
        assert attached(ifindex) == ("xdp", after[1])


@pytest.mark.kernel
@pytest.mark.usefixtures("kernel")
def test_link_outlives_its_device_when_the_device_is_deleted() -> None:
    """The link of a deleted device has ifindex 0 and can still be queried, but an update is ENOLINK."""
    with (
        veth() as ifindex,
        open_prog() as (_map_fd, prog_fd),
        closing(lib.uds_xdp_link_create(prog_fd, ifindex, 0)) as link_fd,
    ):
        link_id, prog_id, _ifindex = query_link(link_fd)
        with IPRoute() as ipr:
            ipr.link("del", index=ifindex)
        assert query_link(link_fd) == (link_id, prog_id, 0)
        assert lib.uds_link_update(link_fd, prog_fd) == -errno.ENOLINK


@pytest.mark.kernel
def test_pin_keeps_the_program_attached_when_every_fd_is_closed(kernel: Kernel) -> None:
    """A pinned link stays attached, is the same when opened again, and detaches with its last pin and fd."""
    link_pin, map_pin = kernel.bpffs / "link", kernel.bpffs / "xsks_map"
    with veth() as ifindex:
        try:
            with (
                open_prog(entries=4) as (map_fd, prog_fd),
                closing(lib.uds_xdp_link_create(prog_fd, ifindex, 0)) as link_fd,
            ):
                check(lib.uds_obj_pin(link_fd, os.fsencode(link_pin)))
                check(lib.uds_obj_pin(map_fd, os.fsencode(map_pin)))
                link, xskmap = query_link(link_fd), query_map(map_fd)
            assert attached(ifindex) == ("xdp", link[1])
            with closing(lib.uds_obj_get(os.fsencode(map_pin))) as map_fd:
                assert query_map(map_fd) == xskmap
            with closing(lib.uds_obj_get(os.fsencode(link_pin))) as link_fd:
                assert query_link(link_fd) == link
                assert not os.get_inheritable(link_fd)
                # In this order: closing the last fd detaches before it returns, removing the last pin some time later.
                link_pin.unlink()
                assert attached(ifindex) == ("xdp", link[1])
            assert attached(ifindex) == (None, None)
        finally:
            link_pin.unlink(missing_ok=True)
            map_pin.unlink(missing_ok=True)


@pytest.mark.kernel
def test_pin_and_get_fail_when_the_path_is_wrong(kernel: Kernel, tmp_path: Path) -> None:
    """Each path that cannot be used has its own errno, and a pin is never replaced."""
    pin = kernel.bpffs / "xsks_map"
    with closing(lib.uds_xskmap_create(b"xsks_map", 1)) as map_fd:
        try:
            check(lib.uds_obj_pin(map_fd, os.fsencode(pin)))
            assert lib.uds_obj_pin(map_fd, os.fsencode(pin)) == -errno.EEXIST
        finally:
            pin.unlink(missing_ok=True)
        assert lib.uds_obj_get(os.fsencode(pin)) == -errno.ENOENT
        assert lib.uds_obj_pin(map_fd, os.fsencode(kernel.bpffs / "no" / "xsks_map")) == -errno.ENOENT
        assert lib.uds_obj_pin(map_fd, os.fsencode(kernel.bpffs / "eth0.100")) == -errno.EPERM
        assert lib.uds_obj_pin(map_fd, os.fsencode(tmp_path / "not_bpffs")) == -errno.EPERM
