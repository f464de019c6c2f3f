"""A stand-in for kubelet: the peer of a device plugin, in a process of its own.

    standin_kubelet.py --plugin-dir DIR --pod-resources-socket PATH      (needs grpcio: pip install '.[quickstart]')

It serves what kubelet serves (Registration on DIR/kubelet.sock, PodResourcesLister on PATH) and calls what kubelet
calls, with grpcio. Its parent drives it: one JSON object a line on stdin, one JSON reply a line on stdout. The first
line on stdout is {"ready": true}, when both servers listen; the end of stdin makes it exit.

    {"cmd": "wait", "resource": "afxdp/demo", "healthy": 2, "timeout": 10}
    {"cmd": "allocate", "resource": "afxdp/demo", "containers": [["veth1"]], "id": 7}

The commands and their arguments are the `cmd_…` methods of Console. A reply has "ok": true and what the command
returns, or "ok": false, "code" (the name of a gRPC status) and "message". Commands without an "id" are executed one
after the other; those with an "id" at once, in a thread each, and the reply has the same "id", so that one that hangs
holds up no other.

It shares no code with the daemon, only the messages. As in kubelet:
  - it wipes its directory when it starts;
  - Register dials the plugin and asks for its options before it answers; ListAndWatch follows; a stream that has ended
    is not opened again, and its devices are unhealthy at once;
  - the end of a stream disconnects whichever client is registered for the resource *by then*. Where a plugin registers
    again before its old stream has ended, that is the new client (counted as "trap"), and the old connection stays.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import queue
import re
import sys
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

try:
    import grpc
except ImportError:
    sys.exit("the stand-in for kubelet needs grpcio: pip install '.[quickstart]'")
from google.protobuf.json_format import MessageToDict

from afxdpd_proto import deviceplugin_pb2 as dp
from afxdpd_proto import podresources_pb2 as pr

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from google.protobuf.message import Message

Json = dict[str, Any]
M = TypeVar("M", bound="Message")

API_VERSION = "v1beta1"
CHECKPOINT = "kubelet_internal_checkpoint"
DIAL_TIMEOUT = 10.0
PRE_START_TIMEOUT = 30.0
HEALTHY, UNHEALTHY = "Healthy", "Unhealthy"
LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
RESOURCE_NAME = re.compile(rf"{LABEL}(\.{LABEL})*/[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?")
REGISTER_MODES = ("ok", "unimplemented", "slow", "refuse", "error")
LIST_MODES = ("ok", "unavailable", "exhausted", "empty", "hang", "slow")
CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # otherwise channels to the same socket share a connection
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.enable_http_proxy", 0),
)
SERVER_OPTIONS = (("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 4 << 20))


class StatusError(Exception):
    """What becomes the status of an RPC that we serve, or the "code" and "message" of a command's reply."""

    def __init__(self, code: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = details

    @classmethod
    def from_rpc(cls, exc: grpc.RpcError) -> StatusError:
        """The plugin's answer, or grpcio's own when there was none."""
        return cls(exc.code().name, exc.details() or "")


# --- Serving: sockets that outlive their server, as a killed kubelet leaves them --------------------------------------


_serial = itertools.count()


def serve(path: Path, scratch: Path, service: str, methods: Mapping[str, tuple[type[Message], Any]]) -> grpc.Server:
    """Serves `service` on the Unix socket `path`, replacing what is there.

    gRPC removes the name it has bound when it stops; a kubelet that dies does not. So the server binds a name in the
    directory `scratch` (same file system), and `path` is a hard link to that socket.
    """
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        name: grpc.unary_unary_rpc_method_handler(
            function,
            request_deserializer=request.FromString,
            response_serializer=lambda message: message.SerializeToString(),
        )
        for name, (request, function) in methods.items()
    }
    server = grpc.server(
        ThreadPoolExecutor(max_workers=32),
        handlers=[grpc.method_handlers_generic_handler(service, handlers)],
        options=SERVER_OPTIONS,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    bound = scratch / f".standin-{os.getpid()}-{next(_serial)}"
    server.add_insecure_port(f"unix:{bound}")
    server.start()
    path.unlink(missing_ok=True)
    os.link(bound, path)
    bound.unlink(missing_ok=True)
    return server


def clean(directory: Path) -> None:
    """Removes all that kubelet removes from its plugin directory: everything but subdirectories and its checkpoint."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name != CHECKPOINT and not entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):  # a plugin removes its own socket meanwhile
                    os.unlink(entry.path)


# --- One registration of a plugin, and what is known of a resource ----------------------------------------------------


class PluginClient:
    """kubelet's end of one registration: a connection to the plugin's socket. Whoever creates it closes it."""

    def __init__(self, resource: str, path: Path) -> None:
        self.resource = resource
        self.disconnected = False  # by us, or about to be: what the stream does from now on does not count
        self.thread: threading.Thread | None = None  # follows the stream
        self._channel = grpc.insecure_channel(f"unix:{path}", options=CHANNEL_OPTIONS)
        self._watch: grpc.Call | None = None

    def call(
        self, method: str, request: Message, response: type[M], timeout: float | None = None, dial: bool = False
    ) -> M:
        """Calls a method of the plugin; where `dial`, waits for a connection first. Raises StatusError."""
        call: grpc.UnaryUnaryMultiCallable[Message, M] = self._channel.unary_unary(
            f"/v1beta1.DevicePlugin/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=response.FromString,
        )
        if self.disconnected:
            raise StatusError("FAILED_PRECONDITION", f"{self.resource}: endpoint is stopped")
        try:
            return call(request, timeout=timeout, wait_for_ready=dial)
        except grpc.RpcError as exc:
            raise StatusError.from_rpc(exc) from exc
        except ValueError as exc:  # grpcio's answer when the channel has just been closed
            raise StatusError("CANCELLED", f"{self.resource}: {exc}") from exc

    def watch(self, timeout: float | None = None) -> Iterator[dp.ListAndWatchResponse]:
        """Opens ListAndWatch: an iterator of its messages that raises grpc.RpcError. Once per client."""
        watch: grpc.UnaryStreamMultiCallable[Message, dp.ListAndWatchResponse] = self._channel.unary_stream(
            "/v1beta1.DevicePlugin/ListAndWatch",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=dp.ListAndWatchResponse.FromString,
        )
        self._watch = messages = watch(dp.Empty(), timeout=timeout)
        return iter(messages)

    def cancel(self) -> None:
        """Ends the stream with RST_STREAM; the connection stays."""
        if self._watch is not None:
            self._watch.cancel()

    def close(self) -> None:
        """Closes the connection and ends every call on it."""
        self._channel.close()

    def join(self, timeout: float) -> None:
        """Waits for the thread that follows the stream."""
        if self.thread is not None:
            self.thread.join(timeout)


@dataclass(kw_only=True)
class Resource:
    """What this incarnation of kubelet knows of a resource; `trap` and `registers_total` are of all incarnations."""

    endpoint: str | None = None
    options: Json | None = None  # the answer of GetDevicePluginOptions
    register_options: Json | None = None  # those in RegisterRequest, which kubelet ignores
    attempts: int = 0  # all calls of Register
    registers: int = 0  # those that were accepted
    registers_total: int = 0
    streams_max: int = 0
    messages: int = 0
    trap: int = 0
    devices: dict[str, Json] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    streams: set[PluginClient] = field(default_factory=set)
    client: PluginClient | None = None  # where Allocate goes; it may be disconnected

    def view(self) -> Json:
        """The state as the parent sees it."""
        fields = dict(vars(self), streams_open=len(self.streams))
        fields["connected"] = self.client is not None and not self.client.disconnected
        del fields["streams"], fields["client"]
        return {**fields, "devices": dict(self.devices), "errors": list(self.errors)}

    def update(self, response: dp.ListAndWatchResponse) -> None:
        """Takes over a message: it replaces the whole list."""
        self.messages += 1
        self.devices = {
            device.ID: {"health": device.health, "nodes": [node.ID for node in device.topology.nodes]}
            for device in response.devices
        }

    def mark_unhealthy(self) -> None:
        """All devices are unhealthy at once."""
        self.devices = {name: {**device, "health": UNHEALTHY} for name, device in self.devices.items()}


# --- kubelet ----------------------------------------------------------------------------------------------------------


class Kubelet:
    """The device manager. All state is guarded by `changed`, which tells of every change."""

    def __init__(self, plugin_dir: Path, pod_resources_socket: Path) -> None:
        self.changed = threading.Condition()
        self.plugin_dir = plugin_dir
        self.incarnation = 0
        self.running = False
        self.resources: dict[str, Resource] = {}
        self.register_mode = ("ok", 0.0)
        self.pod_resources = PodResources(self.changed, pod_resources_socket)
        self._lifecycle = threading.Lock()
        self._servers: list[grpc.Server] = []
        self._registered: dict[str, PluginClient] = {}
        self._open: set[PluginClient] = set()  # all that are to be closed in the end

    def start(self) -> None:
        """Starts a new incarnation, which knows of no plugin."""
        with self._lifecycle:
            with self.changed:
                if self.running:
                    raise StatusError("FAILED_PRECONDITION", "kubelet is running")
                self.running = True
                self.incarnation += 1
                for name, old in self.resources.items():
                    self.resources[name] = Resource(registers_total=old.registers_total, trap=old.trap)
            self.plugin_dir.mkdir(parents=True, exist_ok=True)
            clean(self.plugin_dir)
            methods = {"Register": (dp.RegisterRequest, self._register)}
            socket = self.plugin_dir / "kubelet.sock"
            self._servers = [
                self.pod_resources.serve(),
                serve(socket, self.plugin_dir.parent, "v1beta1.Registration", methods),
            ]

    def stop(self) -> None:
        """Ends this incarnation as if it had been killed: all connections are lost, the sockets stay."""
        with self._lifecycle:
            with self.changed:
                if not self.running:
                    raise StatusError("FAILED_PRECONDITION", "kubelet is not running")
                self.running = False
                clients = list(self._open)
                for client in clients:
                    self._forget(client)
                self._registered.clear()
                self.changed.notify_all()
            for stopped in [server.stop(None) for server in self._servers]:
                stopped.wait(5)
            for client in clients:
                self._close(client)

    def resource(self, name: str) -> Resource:
        """What is known of a resource, maybe nothing; the caller holds `changed`."""
        return self.resources.get(name) or Resource()

    def client(self, name: str) -> PluginClient:
        """The plugin that Allocate goes to; it may be disconnected."""
        with self.changed:
            client = self.resource(name).client
            if not self.running or client is None:
                raise StatusError("FAILED_PRECONDITION", f"{name}: no plugin is registered")
            return client

    def drop(self, name: str, how: str, *, keep_channel: bool) -> None:
        """Ends the stream of a resource's devices from our side, and disconnects."""
        with self.changed:
            client = self._registered.pop(name, None)
            if client is None:
                raise StatusError("FAILED_PRECONDITION", f"{name}: no plugin is connected")
            self._forget(client)
            self.changed.notify_all()
        if how == "cancel":
            client.cancel()
            client.join(5)
        if not keep_channel:
            self._close(client)
        client.join(5)

    def _register(self, request: dp.RegisterRequest, context: grpc.ServicerContext) -> dp.Empty:
        with self.changed:
            resource = self.resources.setdefault(request.resource_name, Resource())
            resource.attempts += 1
            incarnation = self.incarnation
            self.changed.notify_all()
        try:
            self._accept(request, incarnation)
        except StatusError as exc:
            with self.changed:
                resource.errors.append(f"Register: {exc.code}: {exc.message}")
                self.changed.notify_all()
            context.abort(grpc.StatusCode[exc.code], exc.message)
        return dp.Empty()

    def _accept(self, request: dp.RegisterRequest, incarnation: int) -> None:
        """Connects to the plugin that registers, also when it has lost patience.

        An error of kubelet's own code is UNKNOWN to its peer.
        """

        def stopped() -> bool:
            return not self.running or self.incarnation != incarnation

        name, endpoint = request.resource_name, request.endpoint
        mode, delay = self.register_mode
        if mode == "unimplemented":
            raise StatusError("UNIMPLEMENTED", "unknown service v1beta1.Registration")
        if mode == "refuse":
            raise StatusError("UNKNOWN", "told to refuse")
        if mode == "slow":
            with self.changed:
                self.changed.wait_for(stopped, delay)
        if request.version != API_VERSION:
            raise StatusError("UNKNOWN", f"API version {request.version!r} is not supported, only {API_VERSION!r}")
        if not RESOURCE_NAME.fullmatch(name) or name.split("/")[0].endswith("kubernetes.io"):
            raise StatusError("UNKNOWN", f"resource name {name!r} is invalid")
        if endpoint in ("", ".", "..") or "/" in endpoint:
            raise StatusError("UNKNOWN", f"endpoint {endpoint!r} is not a file name")
        client = PluginClient(name, self.plugin_dir / endpoint)
        with self.changed:
            if stopped():
                client.close()
                raise StatusError("UNAVAILABLE", "kubelet is stopping")
            self._open.add(client)
            self._registered[name] = client  # before it is connected: from here on an older stream is dangerous
        try:
            self._connect(client, request, mode)
        except StatusError as exc:
            with self.changed:
                self._forget(client)
                if self._registered.get(name) is client:
                    del self._registered[name]
            self._close(client)
            raise StatusError("UNKNOWN", f"{endpoint}: {exc.code}: {exc.message}") from exc

    def _connect(self, client: PluginClient, request: dp.RegisterRequest, mode: str) -> None:
        options = client.call("GetDevicePluginOptions", dp.Empty(), dp.DevicePluginOptions, DIAL_TIMEOUT, dial=True)
        if mode == "error":
            raise StatusError("UNKNOWN", "told to fail")
        with self.changed:
            if client.disconnected:
                raise StatusError("UNKNOWN", "disconnected by the end of an older stream")
            resource = self.resource(client.resource)
            resource.client = client
            resource.endpoint = request.endpoint
            resource.options = to_json(options)
            resource.register_options = to_json(request.options)
            resource.registers += 1
            resource.registers_total += 1
            resource.streams.add(client)
            resource.streams_max = max(resource.streams_max, len(resource.streams))
            client.thread = threading.Thread(target=self._follow, args=(client, resource), daemon=True)
            client.thread.start()
            self.changed.notify_all()

    def _follow(self, client: PluginClient, resource: Resource) -> None:
        """Follows one ListAndWatch stream to its end."""
        with self.changed:
            if client.disconnected:
                return
            messages = client.watch()
        error = None
        try:
            for response in messages:
                with self.changed:
                    if not client.disconnected:
                        resource.update(response)
                        self.changed.notify_all()
        except grpc.RpcError as exc:
            error = f"ListAndWatch: {exc.code().name}: {exc.details()}"
        with self.changed:
            if client.disconnected:
                return
            if error is not None:
                resource.errors.append(error)
            resource.streams.discard(client)
            resource.mark_unhealthy()
            registered = self._registered.pop(client.resource, None)
            if registered is not None:
                resource.trap += registered is not client
                self._forget(registered)
            self.changed.notify_all()
        if registered is not None:
            self._close(registered)

    def _forget(self, client: PluginClient) -> None:
        """First half of disconnecting, with `changed` held: its stream and devices no longer count."""
        client.disconnected = True
        resource = self.resource(client.resource)
        if client in resource.streams:
            resource.streams.discard(client)
            resource.mark_unhealthy()

    def _close(self, client: PluginClient) -> None:
        """Second half, without the lock. In this order: who sees the connection close may register again safely."""
        client.close()
        with self.changed:
            self._open.discard(client)


class PodResources:
    """The pod resources service: answers what it is told to, and fails as it is told to."""

    def __init__(self, changed: threading.Condition, path: Path) -> None:
        self.changed = changed
        self.path = path
        self.lists = 0
        self.pods = pr.ListPodResourcesResponse()
        self.mode = "ok"
        self.delay = 0.0
        self.times: int | None = None  # so many Lists until the mode is "ok" again

    def serve(self) -> grpc.Server:
        """Serves on the socket; other methods are UNIMPLEMENTED, as Get is in kubelet by default."""
        methods = {"List": (pr.ListPodResourcesRequest, self._list)}
        return serve(self.path, self.path.parent, "v1.PodResourcesLister", methods)

    def _list(self, _: pr.ListPodResourcesRequest, context: grpc.ServicerContext) -> pr.ListPodResourcesResponse:
        with self.changed:
            self.lists += 1
            mode, delay = self.mode, self.delay
            if self.times is not None and mode != "ok":
                self.times -= 1
                if self.times <= 0:
                    self.mode, self.times = "ok", None
            self.changed.notify_all()
            if mode == "hang":
                self._sleep(context, None)
            elif mode == "slow":
                self._sleep(context, delay)
            pods = self.pods
        if mode == "unavailable":
            context.abort(grpc.StatusCode.UNAVAILABLE, "told to fail")
        if mode == "exhausted":
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
        return pods if mode != "empty" else pr.ListPodResourcesResponse()

    def _sleep(self, context: grpc.ServicerContext, seconds: float | None) -> None:
        """Sleeps (for ever if None) until the peer gives the call up or the server stops, with `changed` held."""
        context.add_callback(self._wake)
        self.changed.wait_for(lambda: not context.is_active(), seconds)

    def _wake(self) -> None:
        with self.changed:
            self.changed.notify_all()


def to_json(message: Message) -> Json:
    """A message as the parent sees it: all fields, by the names they have in the API."""
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


# --- The parent's side ------------------------------------------------------------------------------------------------


def holds(view: Json, condition: str, wanted: Any) -> bool:
    """Whether one condition of `wait` holds for a resource's state."""
    if condition == "devices":
        return bool({name: device["health"] for name, device in view["devices"].items()} == wanted)
    if condition == "healthy":
        return bool(sum(device["health"] == HEALTHY for device in view["devices"].values()) == wanted)
    if condition == "streams_open":
        return bool(view["streams_open"] == wanted)
    if condition in ("registers", "registers_total", "attempts", "messages", "trap", "lists"):
        return bool(view[condition] >= wanted)
    raise StatusError("INVALID_ARGUMENT", f"unknown condition {condition!r}")


class Console:
    """Reads commands and writes replies. The parameters of a `cmd_…` method are the members of the JSON object."""

    def __init__(self, kubelet: Kubelet) -> None:
        self._kubelet = kubelet
        self._writing = threading.Lock()
        self._in_order: queue.SimpleQueue[Json] = queue.SimpleQueue()

    def run(self) -> None:
        """Executes commands until stdin ends."""
        threading.Thread(target=self._execute_in_order, daemon=True).start()
        self._write({"ready": True})
        for line in sys.stdin:
            try:
                request = json.loads(line)
                request["cmd"] = str(request["cmd"])
            except (ValueError, KeyError, TypeError) as exc:
                self._write({"ok": False, "code": "INVALID_ARGUMENT", "message": f"not a command: {exc!r}"})
                continue
            if "id" in request:
                threading.Thread(target=self._execute, args=(request,), daemon=True).start()
            else:
                self._in_order.put(request)

    def exit(self) -> None:
        """Ends the process, and with it the threads of commands that still wait for the plugin."""
        with self._writing:
            sys.stdout.flush()
            os._exit(0)

    def _execute_in_order(self) -> None:
        while True:
            self._execute(self._in_order.get())

    def _execute(self, request: Json) -> None:
        identity = {"id": request.pop("id")} if "id" in request else {}
        command = request.pop("cmd")
        try:
            method: Callable[..., Json] | None = getattr(self, f"cmd_{command}", None)
            if method is None:
                raise StatusError("INVALID_ARGUMENT", f"unknown command {command!r}")  # noqa: TRY301 - one way out
            reply = {"ok": True, **method(**request)}
        except StatusError as exc:
            reply = {"ok": False, "code": exc.code, "message": exc.message, **exc.details}
        except Exception as exc:  # noqa: BLE001 - a command without a reply would leave the parent waiting
            traceback.print_exc()
            code = "INVALID_ARGUMENT" if isinstance(exc, (TypeError, ValueError, KeyError)) else "INTERNAL"
            reply = {"ok": False, "code": code, "message": f"{command}: {exc!r}"}
        self._write({**identity, **reply})

    def _write(self, reply: Json) -> None:
        with self._writing:
            print(json.dumps(reply), flush=True)

    def cmd_state(self) -> Json:
        """Everything that is known."""
        kubelet = self._kubelet
        with kubelet.changed:
            return {
                "running": kubelet.running,
                "incarnation": kubelet.incarnation,
                "lists": kubelet.pod_resources.lists,
                "resources": {name: resource.view() for name, resource in kubelet.resources.items()},
            }

    def cmd_wait(self, resource: str, timeout: float = 10.0, **conditions: Any) -> Json:
        """Waits until all conditions hold.

        At least so many: registers, registers_total, attempts, messages, trap, and lists (calls of PodResources List).
        Exactly: streams_open, healthy (a number), devices ({id: health, …}). DEADLINE_EXCEEDED has the state too.
        """
        kubelet = self._kubelet
        deadline = time.monotonic() + timeout
        with kubelet.changed:
            while True:
                view = {**kubelet.resource(resource).view(), "lists": kubelet.pod_resources.lists}
                missing = [name for name, wanted in conditions.items() if not holds(view, name, wanted)]
                if not missing:
                    return {"state": view}
                if not kubelet.changed.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    message = f"{resource}: in vain waited {timeout} s for {', '.join(missing)}"
                    raise StatusError("DEADLINE_EXCEEDED", message, state=view)

    def cmd_allocate(
        self, resource: str, containers: list[list[str]], timeout: float | None = None, force: bool = True
    ) -> Json:
        """Calls Allocate, like kubelet without a deadline; unless `force`, only for devices listed as healthy."""
        client = self._kubelet.client(resource)
        with self._kubelet.changed:
            devices = self._kubelet.resource(resource).devices
            bad = [name for ids in containers for name in ids if devices.get(name, {}).get("health") != HEALTHY]
        if bad and not force:
            raise StatusError("FAILED_PRECONDITION", f"{resource}: not healthy: {', '.join(bad)}")
        requests = [dp.ContainerAllocateRequest(devices_ids=ids) for ids in containers]
        request = dp.AllocateRequest(container_requests=requests)
        response = client.call("Allocate", request, dp.AllocateResponse, timeout)
        return {"containers": [to_json(container) for container in response.container_responses]}

    def cmd_prestart(self, resource: str, devices: list[str], timeout: float = PRE_START_TIMEOUT) -> Json:
        """Calls PreStartContainer, announced or not."""
        request = dp.PreStartContainerRequest(devices_ids=devices)
        self._kubelet.client(resource).call("PreStartContainer", request, dp.PreStartContainerResponse, timeout)
        return {}

    def cmd_preferred(
        self,
        resource: str,
        available: list[str],
        size: int,
        must_include: list[str] | None = None,
        timeout: float | None = None,
    ) -> Json:
        """Calls GetPreferredAllocation for one container, announced or not; "devices" has the answer."""
        container = dp.ContainerPreferredAllocationRequest(
            available_deviceIDs=available, must_include_deviceIDs=must_include or [], allocation_size=size
        )
        response = self._kubelet.client(resource).call(
            "GetPreferredAllocation",
            dp.PreferredAllocationRequest(container_requests=[container]),
            dp.PreferredAllocationResponse,
            timeout,
        )
        return {"devices": [name for container in response.container_responses for name in container.deviceIDs]}

    def cmd_options(self, resource: str, timeout: float = DIAL_TIMEOUT) -> Json:
        """Calls GetDevicePluginOptions once more."""
        client = self._kubelet.client(resource)
        response = client.call("GetDevicePluginOptions", dp.Empty(), dp.DevicePluginOptions, timeout)
        return {"options": to_json(response)}

    def cmd_pods(self, pods: list[Json]) -> Json:
        """Sets what PodResources lists: [{name, namespace, containers: [{name, devices: {resource: [ids]}}]}].

        Each device makes an entry of its own: that a resource appears several times is allowed, so plugins must cope.
        """
        listed = pr.ListPodResourcesResponse()
        for pod in pods:
            entry = listed.pod_resources.add(name=pod["name"], namespace=pod.get("namespace", "default"))
            for container in pod["containers"]:
                devices = container.get("devices", {})
                entry.containers.add(name=container["name"]).devices.extend(
                    pr.ContainerDevices(resource_name=resource, device_ids=[name])
                    for resource, ids in devices.items()
                    for name in ids
                )
        with self._kubelet.changed:
            self._kubelet.pod_resources.pods = listed
        return {}

    def cmd_podresources(self, mode: str = "ok", delay: float = 0.0, times: int | None = None) -> Json:
        """Sets how List answers: if `times` is given only so often, then "ok" again.

        unavailable and exhausted are statuses, empty is a list without pods, hang never answers, slow after `delay`.
        """
        if mode not in LIST_MODES:
            raise StatusError("INVALID_ARGUMENT", f"mode {mode!r} is none of {', '.join(LIST_MODES)}")
        service = self._kubelet.pod_resources
        with self._kubelet.changed:
            service.mode, service.delay, service.times = mode, delay, times
        return {}

    def cmd_drop(self, resource: str, how: str = "cancel", keep_channel: bool = False) -> Json:
        """Ends the ListAndWatch stream by RST_STREAM, then closes the connection (cancel), or just does that (channel).

        With `keep_channel`, cancel leaves the connection open. Returns when kubelet has forgotten the plugin.
        """
        if how not in ("cancel", "channel"):
            raise StatusError("INVALID_ARGUMENT", f"how {how!r} is neither 'cancel' nor 'channel'")
        self._kubelet.drop(resource, how, keep_channel=keep_channel and how == "cancel")
        return {}

    def cmd_register_mode(self, mode: str, delay: float = 0.0) -> Json:
        """Sets how Register answers.

        unimplemented and refuse fail at once, error after it got the plugin's options; slow goes on after `delay`.
        """
        if mode not in REGISTER_MODES:
            raise StatusError("INVALID_ARGUMENT", f"mode {mode!r} is none of {', '.join(REGISTER_MODES)}")
        with self._kubelet.changed:
            self._kubelet.register_mode = (mode, delay)
        return {}

    def cmd_stop(self, wipe: bool = False) -> Json:
        """Dies. The sockets stay as stale files; with `wipe` they and the plugin directory's files are removed."""
        self._kubelet.stop()
        if wipe:
            clean(self._kubelet.plugin_dir)
            self._kubelet.pod_resources.path.unlink(missing_ok=True)
        return {}

    def cmd_start(self) -> Json:
        """Starts a new incarnation."""
        self._kubelet.start()
        return {"incarnation": self._kubelet.incarnation}

    def cmd_churn(self, resource: str, count: int, timeout: float = 10.0) -> Json:
        """So many times: opens one more ListAndWatch on a connection of its own, reads a message, drops the connection.

        These streams change nothing in the state. Streams that gave no message are counted by status in "errors".
        """
        self._kubelet.client(resource)
        with self._kubelet.changed:
            path = self._kubelet.plugin_dir / str(self._kubelet.resource(resource).endpoint)
        messages, errors = 0, Counter[str]()
        for _ in range(count):
            client = PluginClient(resource, path)
            try:
                next(client.watch(timeout))
                messages += 1
            except StopIteration:
                errors["OK"] += 1
            except grpc.RpcError as exc:
                errors[exc.code().name] += 1
            finally:
                client.close()
        return {"messages": messages, "errors": errors}


def main() -> None:
    """Runs until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plugin-dir", type=Path, required=True, help="the plugin directory, …/device-plugins")
    parser.add_argument("--pod-resources-socket", type=Path, required=True, help="where PodResources is served")
    arguments = parser.parse_args()
    kubelet = Kubelet(arguments.plugin_dir.absolute(), arguments.pod_resources_socket.absolute())
    kubelet.start()
    console = Console(kubelet)
    with contextlib.suppress(KeyboardInterrupt):
        console.run()
    if kubelet.running:
        kubelet.stop()
    console.exit()


if __name__ == "__main__":
    main()
