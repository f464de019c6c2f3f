"""The benchmark's kubelet: a device plugin's peer with a clock, in a process of its own, on grpcio.

    bench_kubelet.py --plugin-dir DIR --pod-resources-socket PATH      (needs grpcio)

It does what kubelet does where a plugin registers: connects, asks for the options, answers, opens ListAndWatch. It is
light, since it shares the processors with the plugin; kubelet's temper is in examples/standin_kubelet.py.

Its parent drives it: one JSON object a line on stdin, one JSON reply a line on stdout, in order; the first reply comes
when it serves. The commands are the `cmd_…` methods of Console. The end of stdin makes it exit. Times are of
CLOCK_MONOTONIC, the same in all processes of a machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import grpc

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from standin_kubelet import CHANNEL_OPTIONS, serve

from afxdpd_proto import deviceplugin_pb2 as dp
from afxdpd_proto import dpcnisyncer_pb2 as syncer
from afxdpd_proto import podresources_pb2 as pr

Json = dict[str, Any]

DEADLINE = 60.0
"""Seconds for one call of the plugin."""
MESSAGES = 64
"""Of ListAndWatch, that are kept."""
SOCKET_DIR, SOCKET_NAME = "/tmp/afxdp_dp", "afxdp.sock"


class Registration:
    """kubelet's end of one registration."""

    def __init__(self, path: Path, began: float) -> None:
        self.began = began
        self.messages: deque[tuple[float, dict[str, str]]] = deque(maxlen=MESSAGES)  # when it came; id → health
        self.ended = False
        self._channel = grpc.insecure_channel(f"unix:{path}", options=CHANNEL_OPTIONS)
        self.options = self._method("GetDevicePluginOptions", dp.DevicePluginOptions)
        self.allocate = self._method("Allocate", dp.AllocateResponse)

    def _method(self, name: str, reply: Any) -> Any:
        return self._channel.unary_unary(
            f"/v1beta1.DevicePlugin/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=reply.FromString,
        )

    def watch(self, changed: threading.Condition) -> None:
        """Follows ListAndWatch to its end. A message's time is that at which all of its bytes are here."""
        method: Any = self._channel.unary_stream(
            "/v1beta1.DevicePlugin/ListAndWatch",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=lambda data: (time.monotonic(), dp.ListAndWatchResponse.FromString(data)),
        )
        try:
            for came, message in method(dp.Empty()):
                devices = {device.ID: device.health for device in message.devices}
                with changed:
                    self.messages.append((came, devices))
                    changed.notify_all()
        except grpc.RpcError:
            pass
        with changed:
            self.ended = True
            changed.notify_all()

    def close(self) -> None:
        """Ends every call and the connection."""
        self._channel.close()


class Kubelet:
    """What it serves, and what it knows; guarded by `changed`."""

    def __init__(self, plugin_dir: Path, pod_resources_socket: Path) -> None:
        self.changed = threading.Condition()
        self.plugin_dir = plugin_dir
        self.registrations: dict[str, Registration] = {}
        self.pods = pr.ListPodResourcesResponse()
        self.lists = 0
        plugin_dir.mkdir(parents=True, exist_ok=True)
        self._servers = [
            serve(plugin_dir / "kubelet.sock", plugin_dir.parent, "v1beta1.Registration",
                  {"Register": (dp.RegisterRequest, self._register)}),
            serve(pod_resources_socket, pod_resources_socket.parent, "v1.PodResourcesLister",
                  {"List": (pr.ListPodResourcesRequest, self._list)}),
        ]  # fmt: skip

    def _register(self, request: dp.RegisterRequest, _: grpc.ServicerContext) -> dp.Empty:
        registration = Registration(self.plugin_dir / request.endpoint, time.monotonic())
        registration.options(dp.Empty(), timeout=10, wait_for_ready=True)
        with self.changed:
            old = self.registrations.pop(request.resource_name, None)
            self.registrations[request.resource_name] = registration
            self.changed.notify_all()
        if old is not None:
            old.close()
        threading.Thread(target=registration.watch, args=(self.changed,), daemon=True).start()
        return dp.Empty()

    def _list(self, _: pr.ListPodResourcesRequest, __: grpc.ServicerContext) -> pr.ListPodResourcesResponse:
        self.lists += 1
        return self.pods


class Console:
    """The commands. Their parameters are the members of the JSON object."""

    def __init__(self, kubelet: Kubelet) -> None:
        self._kubelet = kubelet

    def run(self) -> None:
        """Executes commands until stdin ends."""
        print(json.dumps({"ok": True}), flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            try:
                reply = {"ok": True, **getattr(self, f"cmd_{request.pop('cmd')}")(**request)}
            except grpc.RpcError as exc:
                reply = {"ok": False, "message": f"{exc.code().name}: {exc.details()}"}
            except (TimeoutError, LookupError, grpc.FutureTimeoutError) as exc:
                reply = {"ok": False, "message": str(exc.args[0]) if exc.args else repr(exc)}
            print(json.dumps(reply), flush=True)

    def _registration(self, resource: str) -> Registration:
        registration = self._kubelet.registrations.get(resource)
        if registration is None:
            raise LookupError(f"{resource}: no plugin is registered")
        return registration

    def cmd_registered(self, resource: str, timeout: float) -> Json:
        """Waits until the plugin has registered. "at": when its Register came."""
        with self._kubelet.changed:
            if not self._kubelet.changed.wait_for(lambda: resource in self._kubelet.registrations, timeout):
                raise TimeoutError(f"{resource}: no plugin has registered in {timeout:g} s")
            return {"at": self._registration(resource).began}

    def cmd_healthy(self, resource: str, count: int, timeout: float) -> Json:
        """Waits until so many devices are Healthy. "at": when that message came."""

        def found(devices: dict[str, str]) -> bool:
            return sum(health == "Healthy" for health in devices.values()) >= count

        return self._wait(resource, found, 0.0, timeout, f"{count} Healthy devices")

    def cmd_listed(self, resource: str, device: str, listed: bool, since: float, timeout: float) -> Json:
        """Waits until a device is listed, or is not. "at": when the first such message after `since` came."""
        what = f"a list {'with' if listed else 'without'} {device}"
        return self._wait(resource, lambda devices: (device in devices) == listed, since, timeout, what)

    def _wait(self, resource: str, condition: Any, since: float, timeout: float, what: str) -> Json:
        registration = self._registration(resource)
        deadline = time.monotonic() + timeout
        with self._kubelet.changed:
            while True:
                for came, devices in list(registration.messages):
                    if came >= since and condition(devices):
                        return {"at": came}
                if registration.ended:
                    raise LookupError(f"{resource}: the plugin ended ListAndWatch")
                if not self._kubelet.changed.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    raise TimeoutError(f"{resource}: in vain waited {timeout:g} s for {what}")

    def cmd_options(self, resource: str, count: int) -> Json:
        """Calls GetDevicePluginOptions so often, one after another: a call that does nothing."""
        options, request = self._registration(resource).options, dp.Empty()
        seconds = []
        for _ in range(count):
            begun = time.perf_counter()
            options(request, timeout=DEADLINE)
            seconds.append(time.perf_counter() - begun)
        return {"seconds": seconds}

    def cmd_allocate(self, resource: str, requests: list[list[str]]) -> Json:
        """Calls Allocate for the devices of each request, one after another.

        "seconds": of each call; "total": of all; "sockets": device → path of its socket on the host.
        """
        allocate = self._registration(resource).allocate
        messages = [
            dp.AllocateRequest(container_requests=[dp.ContainerAllocateRequest(devices_ids=ids)]) for ids in requests
        ]
        seconds, replies = [], []
        first = time.perf_counter()
        for message in messages:
            begun = time.perf_counter()
            replies.append(allocate(message, timeout=DEADLINE))
            seconds.append(time.perf_counter() - begun)
        total = time.perf_counter() - first
        sockets = {
            name: path
            for reply, ids in zip(replies, requests, strict=True)
            for name in ids
            if (path := socket_of(reply.container_responses[0], name)) is not None
        }
        return {"seconds": seconds, "total": total, "sockets": sockets}

    def cmd_pods(self, resource: str, pods: dict[str, list[str]], others: int = 0) -> Json:
        """Sets what PodResources lists: pod → its devices, and so many other pods, each with a device."""
        listed = pr.ListPodResourcesResponse()
        for name, ids in pods.items():
            container = listed.pod_resources.add(name=name, namespace="default").containers.add(name="app")
            container.devices.add(resource_name=resource, device_ids=ids)
        for number in range(others):
            container = listed.pod_resources.add(name=f"other-{number}", namespace="default").containers.add(name="app")
            container.devices.add(resource_name="example.org/other", device_ids=[f"other{number}"])
        self._kubelet.pods = listed
        return {}

    def cmd_del_net_dev(self, names: list[str]) -> Json:
        """Calls DelNetDev for each device, as a CNI does that has taken it from its pod. "seconds": of each call."""
        path = self._kubelet.plugin_dir / "afxdp-syncer.sock"
        if not path.exists():
            raise LookupError("the plugin serves no afxdp-syncer.sock")
        seconds = []
        with grpc.insecure_channel(f"unix:{path}", options=CHANNEL_OPTIONS) as channel:
            call: Any = channel.unary_unary(
                "/dpcnisyncer.NetDev/DelNetDev",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=syncer.DeleteNetDevResp.FromString,
            )
            grpc.channel_ready_future(channel).result(timeout=DEADLINE)
            for name in names:
                begun = time.perf_counter()
                call(syncer.DeleteNetDevReq(name=name), timeout=DEADLINE)
                seconds.append(time.perf_counter() - begun)
        return {"seconds": seconds}

    def cmd_forget(self) -> Json:
        """Forgets the plugin and the pods, as a kubelet of a new node."""
        with self._kubelet.changed:
            registrations = list(self._kubelet.registrations.values())
            self._kubelet.registrations.clear()
        for registration in registrations:
            registration.close()
        self._kubelet.pods = pr.ListPodResourcesResponse()
        return {}


def socket_of(response: dp.ContainerAllocateResponse, device: str) -> str | None:
    """Where on the host that socket is which the pod has as /tmp/afxdp_dp/<device>/afxdp.sock; None without one."""
    for mount in response.mounts:
        if mount.container_path.rstrip("/") == f"{SOCKET_DIR}/{device}":
            return f"{mount.host_path}/{SOCKET_NAME}"
        if mount.container_path == f"{SOCKET_DIR}/{device}/{SOCKET_NAME}":
            return mount.host_path
    return None


def main() -> None:
    """Runs until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plugin-dir", type=Path, required=True, help="the plugin directory, …/device-plugins")
    parser.add_argument("--pod-resources-socket", type=Path, required=True, help="where PodResources is served")
    options = parser.parse_args()
    kubelet = Kubelet(options.plugin_dir, options.pod_resources_socket)
    gc.freeze()
    gc.disable()  # a collection in the middle of a call would be measured as the plugin's
    Console(kubelet).run()
    os._exit(0)  # threads that follow a stream would be waited for


if __name__ == "__main__":
    main()
