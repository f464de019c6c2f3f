#!/usr/bin/env python3
"""A pod's side of afxdpd's handshake: copy this file into your application.

It needs Python 3.9 and its standard library. Nothing in it is about AF_XDP itself: it gets the XSKMAP of each of the
pod's devices, and has busy polling set on a socket. ``pod_app.py`` shows what to do with a map.

    for devices in allocated_devices().values():
        with Client(devices[0]) as client:  # one socket answers for all that were allocated together
            for device in devices:
                xskmap = client.xsk_map_fd(device)  # yours: os.close() it
                ...

Run as a program, it says what the daemon answers for each device: a quick look whether a pod is set up well.
"""

from __future__ import annotations

import argparse
import array
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from errno import EACCES, EBADF, ECONNREFUSED, ENOENT
from typing import Protocol

SOCKET_DIR = "/tmp/afxdp_dp"  # noqa: S108  the name is the contract
SOCKET_NAME = "afxdp.sock"
REPLY_MAX = 128  # bytes; the longest reply has 21
FDS_MAX = 8  # of a reply; one is right, but those that come have to be closed
CONNECT_PAUSE = 0.1, 1.0  # seconds between two tries: the first pause, and the longest


class ClientError(Exception):
    """The daemon did not do what was asked. The message says what to do about it; errno is the kernel's, if any."""

    def __init__(self, message: str, number: int | None = None) -> None:
        super().__init__(message)
        self.errno = number


class NoSocketError(ClientError):
    """Nobody listens at the socket's path, or this user may not connect."""


class NotOwnerError(ClientError):
    """Another pod holds the device, as far as the daemon can tell from the hostname."""


class OwnerUnknownError(ClientError):
    """The daemon could not find out who holds the device, however often it was asked: try again later."""


class NotAllocatedError(ClientError):
    """The device was not allocated together with the one whose socket this is."""


class BusyPollError(ClientError):
    """Busy polling cannot be set like this."""


class ConnectionClosedError(ClientError):
    """There is no connection, or the daemon has closed it: connect() makes another."""


class NoReplyError(ClientError):
    """The daemon did not answer in time. The connection is closed: the answer may yet come, to another question."""


class ProtocolError(ClientError):
    """The reply is none that was expected. The connection is closed."""


ADVICE = {
    ENOENT: "was the container given a device (resources.limits afxdp/<pool>), and is its directory mounted?",
    ECONNREFUSED: "the device plugin is not running on this node: look for its pod there",
    EACCES: "this user may not write to the socket: the pool's uid has to be the container's runAsUser",
}


def allocated_devices(environ: Mapping[str, str] = os.environ) -> dict[str, list[str]]:
    """Returns the container's devices by pool, which is spelt as in the variable; pools without any are left out."""
    prefix = "AFXDP_DEVICES_"
    found = {key[len(prefix) :]: value.split() for key, value in sorted(environ.items()) if key.startswith(prefix)}
    return {pool: devices for pool, devices in found.items() if devices}


class HasFileno(Protocol):
    """Sockets, and whatever else has a descriptor."""

    def fileno(self) -> int:
        """Returns the descriptor."""


class Client:
    """A conversation with afxdpd about all devices that were allocated together. For one thread at a time.

    As a context manager it connects, and closes the connection in the end. Maps stay valid without one.

    Args:
        device: One of the devices; its socket is asked.
        socket_dir: Where the devices' directories are mounted.
        hostname: The pod's name, which is its hostname unless the pod's spec says otherwise.
        timeout: Seconds for each method; replies usually come within a few milliseconds.
    """

    def __init__(
        self, device: str, *, socket_dir: str = SOCKET_DIR, hostname: str | None = None, timeout: float = 10.0
    ) -> None:
        self.path = os.path.join(socket_dir, device, SOCKET_NAME)
        self.hostname = socket.gethostname() if hostname is None else hostname
        self.timeout = timeout
        self._sock: socket.socket | None = None

    def __enter__(self) -> Client:
        self.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(self) -> None:
        """Opens a connection, in place of one that there may be, and says who this is.

        While the daemon cannot find out who holds the device, it is asked again until the time is over.

        Raises:
            NoSocketError: There is no daemon at the path.
            NotOwnerError: It is another pod's, or the hostname is not the pod's name.
            OwnerUnknownError: The daemon could not find out.
            ClientError: See ask.
        """
        self.close()
        deadline = time.monotonic() + self.timeout
        try:
            self._sock = self._open(deadline)
            self._introduce(deadline)
        except BaseException:
            self.close()
            raise

    def version(self) -> str:
        """Returns the version of the handshake that the daemon speaks, such as 0.1. Raises ClientError, see ask."""
        reply = self.ask("/version")
        if reply.startswith("/"):
            self._expect("/version", reply, "a number")
        return reply

    def xsk_map_fd(self, device: str) -> int:
        """Returns a descriptor of the device's XSKMAP, the caller's to close; child programs do not inherit it.

        Raises:
            NotAllocatedError: The device is none of this allocation.
            ClientError: See ask.
        """
        fds: list[int] = []
        request = f"/xsk_map_fd, {device}"
        try:
            reply = self._ask(request, time.monotonic() + self.timeout, received=fds)
            if reply == "/fd_nak":
                raise NotAllocatedError(
                    f"{self.path}: {device!r} was not allocated together with the device whose socket this is: "
                    "compare it with AFXDP_DEVICES_<POOL>"
                )
            self._expect(request, reply, "/fd_ack")
            if len(fds) != 1:
                self.close()
                hint = "are too many files open (ulimit -n)?" if not fds else "whose socket is this?"
                raise ProtocolError(f"{self.path}: {len(fds)} descriptors came with the map of {device!r}; {hint}")
            return fds.pop()
        finally:
            _close_all(fds)

    def config_busy_poll(self, xsk: int | HasFileno, timeout_us: int, budget: int) -> None:
        """Has the daemon set busy polling on an AF_XDP socket, which takes privileges that a pod does not have.

        Args:
            xsk: The socket, or its descriptor; borrowed.
            timeout_us: How long the kernel polls, in microseconds.
            budget: How many packets it takes at once.

        Raises:
            BusyPollError: The kernel refuses that.
            OSError: The descriptor is not open (EBADF).
            ClientError: See ask.
        """
        fd = xsk if isinstance(xsk, int) else xsk.fileno()
        request = f"/config_busy_poll, {timeout_us},{budget}"
        reply = self._ask(request, time.monotonic() + self.timeout, fd)
        if reply == "/config_busy_poll_nak":
            raise BusyPollError(
                f"{self.path}: busy polling with {timeout_us} µs and a budget of {budget} was refused: Linux 5.11 has "
                "it, with 0 µs or more and a budget of 1 to 65535; the daemon's log has the kernel's answer"
            )
        self._expect(request, reply, "/config_busy_poll_ack")

    def fin(self) -> None:
        """Says goodbye and closes the connection; close() alone will do as well. Raises ClientError, see ask."""
        self._expect("/fin", self._ask("/fin", time.monotonic() + self.timeout), "/fin_ack")
        self.close()

    def close(self) -> None:
        """Closes the connection, if there is one."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def ask(self, request: str) -> str:
        """Returns the reply to a request that takes no descriptor and gets none.

        Raises:
            ConnectionClosedError: Nobody has connected, or the daemon closed the connection.
            NoReplyError: The time is over.
            ProtocolError: The daemon does not know the request, or this is another daemon.
        """
        reply = self._ask(request, time.monotonic() + self.timeout)
        if reply == "/nak":
            self._expect(request, reply, "another one")
        return reply

    def _open(self, deadline: float) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            while True:
                sock.settimeout(_left(deadline))
                try:
                    sock.connect(self.path)
                except BlockingIOError as exc:  # it has too many connections to accept
                    if time.monotonic() + CONNECT_PAUSE[0] >= deadline:
                        raise NoReplyError(
                            f"{self.path}: the daemon accepts no connection: is it stuck? See its log", exc.errno
                        ) from exc
                    time.sleep(CONNECT_PAUSE[0])
                else:
                    return sock
        except OSError as exc:
            sock.close()
            advice = ADVICE.get(exc.errno or 0, "")
            message = f"cannot connect to {self.path}: {exc.strerror or exc}" + (f"; {advice}" if advice else "")
            raise NoSocketError(message, exc.errno) from exc
        except BaseException:
            sock.close()
            raise

    def _introduce(self, deadline: float) -> None:
        """Asks until the daemon knows who holds the device. See connect."""
        pause, longest = CONNECT_PAUSE
        reply = ""
        while True:
            try:
                reply = self._ask(f"/connect, {self.hostname}", deadline)
            except NoReplyError:
                if reply != "/error":  # each answer may take the daemon seconds
                    raise
            if reply != "/error":
                break
            if time.monotonic() + pause >= deadline:
                raise OwnerUnknownError(
                    f"{self.path}: in {self.timeout:g} s the daemon could not find out who holds the device, since "
                    "kubelet does not tell it; try again, then see the daemon's log"
                )
            time.sleep(pause)
            pause = min(2 * pause, longest)
        if reply == "/host_nak":
            raise NotOwnerError(
                f"{self.path}: the daemon says that the pod {self.hostname!r} does not hold the device: the hostname "
                "must be the pod's name; where it is not (hostNetwork, spec.hostname), give the pod's name"
            )
        self._expect("/connect", reply, "/host_ok")

    def _ask(self, request: str, deadline: float, fd: int = -1, received: list[int] | None = None) -> str:
        """Sends a request, with a borrowed descriptor or without, and returns the reply.

        Args:
            request: What to send.
            deadline: Of time.monotonic().
            fd: The descriptor; -1 for none.
            received: Where those that come are added, the caller's; None where none may come.
        """
        if self._sock is None:
            raise ConnectionClosedError(f"{self.path}: there is no connection: call connect() first")
        fds: list[int] = []
        try:
            files = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd >= 0 else []
            self._sock.settimeout(_left(deadline))
            self._sock.sendmsg([request.encode()], files)
            self._sock.settimeout(_left(deadline))
            # socket.recv_fds() drops its flags: child programs would inherit what comes.
            room = socket.CMSG_SPACE(FDS_MAX * array.array("i").itemsize)
            data, ancillary, flags, _ = self._sock.recvmsg(REPLY_MAX, room, socket.MSG_CMSG_CLOEXEC)
            for level, kind, content in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    numbers = array.array("i")
                    numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
                    fds += numbers
            if not data:
                raise ConnectionClosedError(
                    f"{self.path}: the daemon closed the connection at {request!r}: it may have been restarted, or the "
                    "connection was silent for too long; call connect() again"
                )
            if flags & socket.MSG_TRUNC:
                raise ProtocolError(f"{self.path}: the reply to {request!r} is too long: whose socket is this?")
            if flags & socket.MSG_CTRUNC or (fds and received is None):
                # Some came and some did not: too many were sent, or this process has no room for them.
                hint = "whose socket is this?" if fds else "are too many files open (ulimit -n)?"
                raise ProtocolError(f"{self.path}: unexpected descriptors with the reply to {request!r}; {hint}")
            if received is not None:
                received += fds
                fds = []
            return data.decode(errors="replace")
        except socket.timeout as exc:  # noqa: UP041  in Python 3.9 it is not TimeoutError
            self.close()
            raise NoReplyError(
                f"{self.path}: no answer to {request!r} in {self.timeout:g} s: is the daemon stuck? See its log"
            ) from exc
        except OSError as exc:
            if exc.errno == EBADF:
                raise  # the caller's descriptor; nothing was sent
            self.close()
            raise ConnectionClosedError(
                f"{self.path}: the connection broke at {request!r}: {exc.strerror or exc}; call connect() again",
                exc.errno,
            ) from exc
        except ClientError:
            self.close()
            raise
        finally:
            _close_all(fds)

    def _expect(self, request: str, reply: str, wanted: str) -> None:
        """Closes the connection and raises ProtocolError, unless the reply is the wanted one."""
        if reply == wanted:
            return
        self.close()
        if reply == "/nak":
            advice = "it does not understand the request: are the values well formed?"
        else:
            advice = f"{wanted} was expected: is the daemon of another version than this client?"
        raise ProtocolError(f"{self.path}: {request!r} was answered {reply!r}: {advice}")


def _left(deadline: float) -> float:
    """Seconds until then, for socket.settimeout(), which takes 0 for something else."""
    return max(deadline - time.monotonic(), 0.001)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        with suppress(OSError):
            os.close(fd)


def _describe(fd: int) -> str:
    """What the kernel says of a map to whoever holds it; see proc(5), fdinfo."""
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file if ":" in line)
    if "map_id" not in fields:
        return "a descriptor, but not of a map"
    return f"map {fields['map_id'].strip()} for {fields['max_entries'].strip()} queues"


def main(argv: Sequence[str] | None = None) -> int:
    """Asks the daemon for each device's map; returns the exit status."""
    parser = argparse.ArgumentParser(
        description="Ask afxdpd for the XSKMAP of each of the pod's devices, and say what came.",
        epilog="exit status: 0 all maps came; 1 at least one did not (stderr says why, and what to do); 2 command line",
    )
    add = parser.add_argument
    add("--device", action="append", metavar="NAME", help="repeatable; default: those in AFXDP_DEVICES_*")
    add("--socket-dir", default=SOCKET_DIR, metavar="DIR", help="default: %(default)s")
    add("--hostname", metavar="NAME", help="the pod's name; default: the hostname")
    add("--timeout", type=float, default=10.0, metavar="S", help="seconds for each answer; default: %(default)g")
    args = parser.parse_args(argv)
    groups = [[name] for name in args.device or ()] or list(allocated_devices().values())
    if not groups:
        print(
            "error: no AFXDP_DEVICES_<POOL> is set: the container was given no device; --device names one",
            file=sys.stderr,
        )
    failed = not groups
    for devices in groups:
        try:
            with Client(devices[0], socket_dir=args.socket_dir, hostname=args.hostname, timeout=args.timeout) as client:
                version = client.version()
                for device in devices:
                    fd = client.xsk_map_fd(device)
                    try:
                        print(f"{device}: version {version}, {_describe(fd)}")
                    finally:
                        os.close(fd)
                client.fin()
        except ClientError as exc:
            failed = True
            print(f"error: {exc}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
