"""The tests' hold on examples/standin_kubelet.py: a peer in another process, on another gRPC implementation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

SCRIPT = Path(__file__).parents[1] / "examples" / "standin_kubelet.py"
START_TIMEOUT = 30
EXIT_TIMEOUT = 15

Reply = dict[str, Any]


class KubeletError(Exception):
    """A command failed, mostly with what the plugin answered. `reply` has more, as the last state `wait` saw."""

    def __init__(self, code: str, message: str, reply: Reply) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.reply = reply


class Kubelet:
    """A running stand-in. Commands may be given concurrently; one that is cancelled goes on over there.

    There is no task that reads: whoever waits for a reply reads on behalf of all. So no nursery is open around a test,
    which would wrap what it raises (`pytest.skip()` included) in an exception group.
    """

    def __init__(self, process: trio.Process, plugin_dir: Path, pod_resources_socket: Path) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.plugin_dir = plugin_dir
        self.pod_resources_socket = pod_resources_socket
        self.process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._sending = trio.Lock()
        self._reading = False
        self._arrived = trio.lowlevel.ParkingLot()
        self._received = b""
        self._last_id = 0
        self._replies: dict[int, Reply | None] = {0: None}  # by id; None until it is there; 0 stands for "ready"

    async def command(self, cmd: str, **arguments: Any) -> Reply:
        """Executes a command and returns its reply.

        Raises:
            KubeletError: the reply is not "ok".
            EOFError: the process has ended.
        """
        self._last_id = identity = self._last_id + 1
        line = json.dumps({"cmd": cmd, "id": identity, **arguments}) + "\n"
        with trio.CancelScope(shield=True):  # half a line would spoil the next one; the peer always reads
            async with self._sending:
                try:
                    await self._stdin.send_all(line.encode())
                except trio.BrokenResourceError as exc:
                    raise EOFError("the stand-in for kubelet has ended") from exc
        reply = await self._reply(identity)
        if not reply["ok"]:
            raise KubeletError(reply["code"], reply["message"], reply)
        return reply

    async def ready(self) -> None:
        """Waits until it serves. Raises EOFError where it ended instead."""
        await self._reply(0)

    async def _reply(self, identity: int) -> Reply:
        self._replies[identity] = None
        try:
            while (reply := self._replies[identity]) is None:
                if self._reading:
                    await self._arrived.park()
                    continue
                self._reading = True
                try:
                    await self._read()
                finally:
                    self._reading = False
                    self._arrived.unpark_all()
            return reply
        finally:
            del self._replies[identity]

    async def _read(self) -> None:
        data = await self._stdout.receive_some()
        if not data:
            raise EOFError("the stand-in for kubelet has ended")
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            reply = json.loads(line)
            identity = reply.get("id", 0)
            if identity in self._replies:  # otherwise nobody waits any more
                self._replies[identity] = reply

    async def state(self, resource: str | None = None) -> Reply:
        """The whole state, or that of one resource, which may never have been registered."""
        return await self.command("state") if resource is None else await self.wait(resource)

    async def wait(self, resource: str, *, timeout: float = 10.0, **conditions: Any) -> Reply:
        """Waits until all conditions hold and returns the resource's state.

        At least: registers, registers_total, attempts, messages, trap, lists. Exactly: streams_open, healthy, devices.
        """
        reply = await self.command("wait", resource=resource, timeout=timeout, **conditions)
        return dict(reply["state"])

    async def allocate(
        self, resource: str, *containers: Iterable[str], timeout: float | None = None, force: bool = True
    ) -> list[Reply]:
        """Calls Allocate for the device ids of each container; returns what each gets."""
        requests = [list(ids) for ids in containers]
        reply = await self.command("allocate", resource=resource, containers=requests, timeout=timeout, force=force)
        return list(reply["containers"])

    async def prestart(self, resource: str, devices: Sequence[str], *, timeout: float = 30.0) -> None:
        """Calls PreStartContainer."""
        await self.command("prestart", resource=resource, devices=list(devices), timeout=timeout)

    async def preferred(
        self, resource: str, available: Iterable[str], size: int, must_include: Iterable[str] = ()
    ) -> list[str]:
        """Calls GetPreferredAllocation for one container."""
        arguments = {"available": list(available), "must_include": list(must_include), "size": size}
        return list((await self.command("preferred", resource=resource, **arguments))["devices"])

    async def options(self, resource: str) -> dict[str, bool]:
        """Calls GetDevicePluginOptions."""
        return dict((await self.command("options", resource=resource))["options"])

    async def pods(self, *pods: Reply) -> None:
        """Sets what PodResources lists, see `pod`."""
        await self.command("pods", pods=pods)

    async def podresources(self, mode: str = "ok", *, delay: float = 0.0, times: int | None = None) -> None:
        """Sets how PodResources answers: ok, unavailable, exhausted, empty, hang, slow."""
        await self.command("podresources", mode=mode, delay=delay, times=times)

    async def register_mode(self, mode: str = "ok", *, delay: float = 0.0) -> None:
        """Sets how Register answers: ok, unimplemented, slow, refuse, error."""
        await self.command("register_mode", mode=mode, delay=delay)

    async def drop(self, resource: str, how: str = "cancel", *, keep_channel: bool = False) -> None:
        """Ends the stream: "cancel" resets it, "channel" closes the connection."""
        await self.command("drop", resource=resource, how=how, keep_channel=keep_channel)

    async def churn(self, resource: str, count: int) -> Reply:
        """Opens so many further streams, one after the other; returns "messages" read and "errors" by status."""
        return await self.command("churn", resource=resource, count=count)

    async def stop(self, *, wipe: bool = False) -> None:
        """Lets kubelet die; its process, the stand-in's, stays."""
        await self.command("stop", wipe=wipe)

    async def start(self) -> None:
        """Starts the next incarnation of kubelet."""
        await self.command("start")

    async def restart(self) -> None:
        """Stops and starts kubelet."""
        await self.stop()
        await self.start()

    async def aclose(self) -> None:
        """Ends the process. Raises RuntimeError if it does not end well."""
        await self._stdin.aclose()
        with trio.move_on_after(EXIT_TIMEOUT):
            await self.process.wait()
        if self.process.returncode is None:
            await self.kill()
            raise RuntimeError("the stand-in for kubelet did not end with its stdin")
        if self.process.returncode != 0:
            raise RuntimeError(f"the stand-in for kubelet ended with status {self.process.returncode}")

    async def kill(self) -> None:
        """Ends the process if need be, and closes its pipes."""
        with trio.CancelScope(shield=True):
            self.process.kill()
            await self.process.wait()
            await self._stdin.aclose()
            await self._stdout.aclose()


def pod(name: str, devices: dict[str, list[str]], *, namespace: str = "default", container: str = "app") -> Reply:
    """A pod for `Kubelet.pods`, with one container that has these devices, by resource."""
    return {"name": name, "namespace": namespace, "containers": [{"name": container, "devices": devices}]}


async def start_kubelet(directory: Path, stderr: IO[bytes] | None) -> Kubelet:
    """Starts a stand-in that serves below `directory`; the caller kills it."""
    plugin_dir = directory / "device-plugins"
    socket = directory / "pod-resources" / "kubelet.sock"
    command = [sys.executable, str(SCRIPT), "--plugin-dir", str(plugin_dir), "--pod-resources-socket", str(socket)]
    pipe = subprocess.PIPE
    process = await trio.lowlevel.open_process(command, stdin=pipe, stdout=pipe, stderr=stderr)
    return Kubelet(process, plugin_dir, socket)


@asynccontextmanager
async def running_kubelet(tmp_path: Path) -> AsyncIterator[Kubelet]:
    """A stand-in for kubelet that serves below `tmp_path` as long as the context lasts.

    What it writes to stderr is shown where the context fails, or all the time if AFXDPD_TEST_VERBOSE is set.
    """
    tmp_path.mkdir(parents=True, exist_ok=True)
    log = tmp_path / "kubelet.stderr"
    try:
        with log.open("wb") as stderr:
            kubelet = await start_kubelet(tmp_path, None if os.environ.get("AFXDPD_TEST_VERBOSE") else stderr)
        try:
            with trio.fail_after(START_TIMEOUT):
                await kubelet.ready()
            yield kubelet
            await kubelet.aclose()
        finally:
            await kubelet.kill()
    except Exception:
        sys.stderr.write(f"--- stderr of the stand-in for kubelet:\n{log.read_text(errors='replace')}---\n")
        raise
