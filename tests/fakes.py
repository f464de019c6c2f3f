"""Stand-ins within this process for what the daemon meets: each keeps a contract, and fails where a test says so."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import math
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio
from conftest import open_fds

from afxdpd import (
    Attachment,
    Ethtool,
    Fd,
    ForeignProgramError,
    GrpcServer,
    KindNetwork,
    Method,
    NetDevice,
    PodResources,
    PodView,
    RequestError,
    RpcError,
    open_unix_listener,
)
from afxdpd_proto import deviceplugin_pb2 as api
from afxdpd_proto import podresources_pb2 as podresources


class FakeNetwork:
    """Network: the devices of the host namespace are those that the test shows."""

    def __init__(self) -> None:
        self._devices: dict[str, NetDevice] = {}
        self._changed = trio.Event()

    def show(self, *devices: NetDevice) -> None:
        """From now on there are these devices and no others."""
        self._devices = {device.name: device for device in devices}
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    def change(self, *devices: NetDevice, gone: Collection[str] = ()) -> None:
        """From now on there are these devices, too, and some are gone. May be called from a worker thread."""
        if threading.current_thread() is not threading.main_thread():
            trio.from_thread.run_sync(partial(self.change, *devices, gone=gone))
            return
        self.show(*(device for name, device in self._devices.items() if name not in gone), *devices)

    def devices(self) -> dict[str, NetDevice]:
        """See Network.devices."""
        return dict(self._devices)

    async def watch_devices(self) -> AsyncGenerator[dict[str, NetDevice], None]:
        """See Network.watch_devices."""
        while True:
            changed = self._changed
            yield self.devices()
            await changed.wait()


@dataclass(eq=False)
class FakeLink:
    """A bpf_link of FakeXdp: what it is attached to now, and the map behind it."""

    path: Path
    ifindex: int
    prog_id: int


class FakeXdp:
    """Xdp: links and maps are files, so that their descriptors can be sent, recognised and looked for when they leak.

    A link is attached as long as anybody has it open or it is pinned, as with the kernel's own. Where a device is
    pinned, `pins` has its pool and name, with the path behind each of the two pins.

    Attributes:
        calls: What was asked for: (method, ifindex or name).
        errors: What a method raises for one device: (method, ifindex or name) → error.
        foreign: Programs of somebody else: ifindex → program id.
        attaching: Set when attach has been called.
        gate: Clear it, and attach waits.
    """

    def __init__(self, directory: Path, network: FakeNetwork) -> None:
        directory.mkdir()
        self.pins: dict[tuple[str, str], dict[str, Path]] = {}
        self.calls: list[tuple[str, int | str]] = []
        self.errors: dict[tuple[str, int | str], Exception] = {}
        self.foreign: dict[int, int] = {}
        self.attaching = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self._directory = directory
        self._network = network
        self._links: dict[Path, FakeLink] = {}
        self._numbers = itertools.count(1)

    # ---- for the test

    def descriptors(self) -> list[str]:
        """Names of the links and maps that this process has open, sorted, as often as it has."""
        targets = map(Path, open_fds().values())
        return sorted(target.name for target in targets if target.parent == self._directory)

    def program(self, ifindex: int) -> int:
        """Id of the program of ours on a device, 0 for none."""
        held = {*self.descriptors(), *(pin.name for pins in self.pins.values() for pin in pins.values())}
        found = [link.prog_id for link in self._links.values() if link.ifindex == ifindex and link.path.name in held]
        return sum(found)  # there is one at most

    def destroy(self, ifindex: int) -> None:
        """Lets a device cease to exist, wherever it is."""
        for link in self._links.values():
            if link.ifindex == ifindex:
                link.ifindex = 0

    # ---- the contract

    def attach(self, ifindex: int, queues: int) -> Attachment:
        """See Xdp.attach."""
        self.attaching.set()
        self.gate.wait()
        self._call("attach", ifindex)
        device = next((net for net in self._network.devices().values() if net.ifindex == ifindex), None)
        if device is None:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV), f"attaching XDP to ifindex {ifindex}")
        if prog_id := self.foreign.get(ifindex) or self.program(ifindex):
            raise ForeignProgramError(errno.EBUSY, dataclasses.replace(device, xdp_mode="native", xdp_prog_id=prog_id))
        path = self._file("link")
        self._links[path] = link = FakeLink(path, ifindex, next(self._numbers))
        return self._attachment(link, self._file("map"), queues, "native")

    def renew(self, attachment: Attachment) -> Attachment:
        """See Xdp.renew."""
        link = self._link(attachment)
        self._call("renew", link.ifindex)
        if link.ifindex == 0:
            raise OSError(errno.ENOLINK, os.strerror(errno.ENOLINK), "replacing the XDP program")
        link.prog_id = next(self._numbers)
        renewed = self._attachment(link, self._file("map"), attachment.queues, attachment.xdp_mode)
        attachment.close()
        return renewed

    def ifindex(self, attachment: Attachment) -> int:
        """See Xdp.ifindex."""
        return self._link(attachment).ifindex

    def pin(self, attachment: Attachment, pool: str, device: str) -> None:
        """See Xdp.pin."""
        self.unpin(pool, device)
        self.pins[pool, device] = pins = {"xsks_map": self._target(attachment.xskmap)}
        self._call("pin", device)
        pins["link"] = self._target(attachment.link)
        attachment.pinned = True

    def unpin(self, pool: str, device: str) -> None:
        """See Xdp.unpin."""
        self._call("unpin", device)
        self.pins.pop((pool, device), None)

    def is_pinned(self, attachment: Attachment, pool: str, device: str) -> bool:
        """See Xdp.is_pinned."""
        return attachment.pinned and len(self.pins.get((pool, device), ())) == 2

    def pinned_pools(self) -> list[str]:
        """See Xdp.pinned_pools."""
        return sorted({pool for pool, _ in self.pins})

    def pinned_devices(self, pool: str) -> list[str]:
        """See Xdp.pinned_devices."""
        return sorted(device for owner, device in self.pins if owner == pool)

    def pinned_map(self, pool: str, device: str) -> Path:
        """See Xdp.pinned_map."""
        return self._directory / "pins" / pool / device / "xsks_map"  # what is there, `pins` says

    def open_pinned(self, pool: str, device: str) -> Attachment:
        """See Xdp.open_pinned."""
        self._call("open_pinned", device)
        pins = self.pins[pool, device]
        for name in ("link", "xsks_map"):
            if name not in pins:
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), f"{pool}/{device}/{name}")
        link = self._links[pins["link"]]
        if link.ifindex == 0:
            raise OSError(errno.ENOLINK, "the device no longer exists", f"{pool}/{device}")
        attachment = self._attachment(link, pins["xsks_map"], 1, None)
        attachment.pinned = attachment.handed_out = True
        return attachment

    # ---- files

    def _call(self, method: str, key: int | str) -> None:
        self.calls.append((method, key))
        if (error := self.errors.get((method, key))) is not None:
            raise error

    def _file(self, kind: str) -> Path:
        path = self._directory / f"{kind}-{next(self._numbers)}"
        path.touch()
        return path

    def _attachment(self, link: FakeLink, xskmap: Path, queues: int, xdp_mode: str | None) -> Attachment:
        fds = [Fd(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) for path in (link.path, xskmap)]
        return Attachment(link=fds[0], xskmap=fds[1], queues=queues, prog_id=link.prog_id, map_id=0, xdp_mode=xdp_mode)

    def _link(self, attachment: Attachment) -> FakeLink:
        return self._links[self._target(attachment.link)]

    @staticmethod
    def _target(fd: Fd) -> Path:
        if fd.fileno() < 0:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return Path(os.readlink(f"/proc/self/fd/{fd.fileno()}"))


class FakeHost:
    """Host: fit for the daemon; what it is to grant is noted, or refused with `error`.

    Attributes:
        granted: Path, user and permissions of each grant.
        name: What hostname returns.
        unprivileged_bpf: What allows_unprivileged_bpf returns.
    """

    def __init__(self, name: str = "node-1") -> None:
        self.granted: list[tuple[Path, int, int]] = []
        self.error: OSError | None = None
        self.name = name
        self.unprivileged_bpf = False

    def hostname(self) -> str:
        """See Host.hostname."""
        return self.name

    def allows_unprivileged_bpf(self) -> bool:
        """See Host.allows_unprivileged_bpf."""
        return self.unprivileged_bpf

    def check(self, bpffs: Path) -> None:
        """See Host.check."""

    def grant(self, path: Path, uid: int, permissions: int) -> None:
        """See Host.grant."""
        if self.error is not None:
            raise self.error
        self.granted.append((path, uid, permissions))

    def user_of(self, path: Path) -> int:
        """See Host.user_of."""
        return next((uid for granted, uid, _ in reversed(self.granted) if granted == path), 0)


class FakeDevlink:
    """Devlink: the network device of a subfunction (SF) comes to a FakeNetwork, beside its NIC's, as with ice.

    Attributes:
        calls: What was asked for, but for `netdev`: (method, SF's number or device's name).
        errors: What a method raises.
        ports: The SFs: (PCI address, number) → name of the network device, None where it has not come.
        slow: Whether no network device comes until `bring` is called.
        prefix: What the kernel, or udev, calls new devices.
    """

    def __init__(self, network: FakeNetwork) -> None:
        self.calls: list[tuple[str, int | str]] = []
        self.errors: dict[str, OSError] = {}
        self.ports: dict[tuple[str, int], str | None] = {}
        self.slow = False
        self.prefix = "eth"
        self._network = network
        self._numbers = itertools.count(100)

    # ---- for the test

    def bring(self, pci: str, number: int) -> None:
        """Lets the network device of an SF come."""
        ifindex = next(self._numbers)
        name = self.ports[pci, number] = f"{self.prefix}{ifindex}"
        self._network.change(NetDevice(name=name, ifindex=ifindex, queues=4, driver="ice", bus="pci", pci=pci))

    def numbers(self) -> list[int]:
        """The SFs that there are."""
        return sorted(number for _, number in self.ports)

    # ---- the contract

    def exists(self, pci: str, number: int) -> bool:
        """See Devlink.exists."""
        return (pci, number) in self.ports

    def add(self, pci: str, number: int) -> None:
        """See Devlink.add."""
        self._call("add", number)
        if self.ports.setdefault((pci, number)) is None and not self.slow:
            self.bring(pci, number)

    def delete(self, pci: str, number: int) -> None:
        """See Devlink.delete."""
        self._call("delete", number)
        name = self.ports.pop((pci, number), None)
        if name is not None:
            self._network.change(gone=[name])

    def netdev(self, pci: str, number: int) -> str | None:
        """See Devlink.netdev."""
        self._call("netdev", number)
        name = self.ports.get((pci, number))
        return name if name in self._network.devices() else None

    def rename(self, old: str, new: str) -> None:
        """See Devlink.rename."""
        self._call("rename", new)
        devices = self._network.devices()
        if old not in devices:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV), old)
        if new in devices:
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), new)
        self.ports = {port: new if name == old else name for port, name in self.ports.items()}
        self._network.change(dataclasses.replace(devices[old], name=new), gone=[old])

    def _call(self, method: str, key: int | str) -> None:
        if method != "netdev":
            self.calls.append((method, key))
        if (error := self.errors.get(method)) is not None:
            raise error


class FakeEthtool:
    """Ethtool: a command has a device and a setting's name and value, such as "-K -device- gro off".

    What undoes it is the same command with the former value.

    Attributes:
        ran: The commands that changed something, in order.
        settings: (device, name) → value; it is "default" where nothing was set.
        errors: What a command raises, by its arguments in one string.
    """

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.settings: dict[tuple[str, str], str] = {}
        self.errors: dict[str, OSError] = {}

    def arguments(self, command: str, device: str) -> list[str]:
        """See Ethtool.arguments."""
        return Ethtool.arguments(command, device)

    def apply(self, arguments: Sequence[str], remember: Callable[[list[list[str]]], None]) -> None:
        """See Ethtool.apply."""
        option, device, name, _ = arguments
        remember([[option, device, name, self.settings.get((device, name), "default")]])
        self._run(arguments)

    def undo(self, commands: Sequence[Sequence[str]]) -> None:
        """See Ethtool.undo."""
        errors = []
        for command in reversed(commands):
            try:
                self._run(command)
            except OSError as exc:
                errors.append(exc)
        if errors:
            raise errors[0]

    def _run(self, arguments: Sequence[str]) -> None:
        _, device, name, value = arguments
        command = " ".join(arguments)
        if command in self.errors:
            raise self.errors[command]
        if self.settings.get((device, name), "default") != value:
            self.settings[device, name] = value
            self.ran.append(command)


class FakeKind:
    """KindNetwork: bridge and pairs come to a FakeNetwork, and go from there.

    Attributes:
        made: How often something was made.
        kept: For each removal what was to be kept.
        error: What set_up and remove raise.
        removing: Set when something was removed.
        gate: Clear it, and remove waits before it returns.
    """

    def __init__(self, network: FakeNetwork) -> None:
        self.made = 0
        self.kept: list[set[str]] = []
        self.error: OSError | None = None
        self.removing = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self._network = network
        self._numbers = itertools.count(200)

    def missing(self, devices: Mapping[str, NetDevice]) -> bool:
        """See KindNetwork.missing."""
        return KindNetwork.missing(devices)

    def set_up(self) -> list[str]:
        """See KindNetwork.set_up."""
        if self.error is not None:
            raise self.error
        before = self._network.devices()
        names = [KindNetwork.BRIDGE] if KindNetwork.BRIDGE not in before else []
        for pod, port in KindNetwork.PAIRS.items():
            names += [] if port in before else [pod, port]
        after = {name: NetDevice(name=name, ifindex=next(self._numbers), driver="veth") for name in names}
        bridge = {**before, **after}[KindNetwork.BRIDGE].ifindex
        for port in KindNetwork.PAIRS.values():
            after[port] = dataclasses.replace({**before, **after}[port], master=bridge)
        if names:
            self.made += 1
            self._network.change(*after.values())
        return names

    def remove(self, keep: Collection[str]) -> None:
        """See KindNetwork.remove."""
        self.kept.append(set(keep))
        if self.error is not None:
            raise self.error
        devices = self._network.devices()
        pairs = {pod: port for pod, port in KindNetwork.PAIRS.items() if pod in devices and pod not in keep}
        ports = devices.keys() & set(KindNetwork.PAIRS.values()) - set(pairs.values())
        self._network.change(gone=[*pairs, *pairs.values(), *([] if ports else [KindNetwork.BRIDGE])])
        self.removing.set()
        self.gate.wait()


class FakePodResources(PodResources):
    """PodResources without kubelet: a question is answered with `view` or `error` at once, and only when it is asked.

    Attributes:
        hurried: How often somebody was in a hurry.
        asked: How many questions there were.
    """

    def __init__(self) -> None:
        super().__init__(Path("/nonexistent"))
        self.view = PodView(owners={}, asked_at=0.0, empty=True)
        self.error: RpcError | None = None
        self.hurried = 0
        self.asked = 0

    def tell(self, view: PodView) -> bool:
        """Lets the subscribers see an answer; returns whether anybody wants more."""
        wanted = [subscriber(view) for subscriber in list(self._subscribers)]
        return any(wanted)

    def hurry(self, after: float = 0.0) -> None:
        """See PodResources.hurry."""
        self.hurried += 1

    async def ask(self) -> PodView:
        """See PodResources.ask."""
        self.asked += 1
        if self.error is not None:
            await trio.sleep(self.BUSY)
            raise self.error
        await trio.lowlevel.checkpoint()
        view = dataclasses.replace(self.view, asked_at=trio.current_time())
        self.tell(view)
        return view


class FakeKubelet:
    """Registration and PodResourcesLister on sockets of this process. It opens no stream: for that see kubelet.py.

    Attributes:
        registered: Yields each RegisterRequest.
        registering: Called within Register, before it is answered.
        pods: What List answers.
        error: What List answers instead.
        lists: trio's time of each List.
        asked: Set when there has been a List.
        gate: List waits for it.
    """

    def __init__(self, directory: Path) -> None:
        self.pod_resources_socket = directory / "pod-resources" / "kubelet.sock"
        self.pods = podresources.ListPodResourcesResponse()
        self.error: RequestError | None = None
        self.lists: list[float] = []
        self.asked = trio.Event()
        self.gate = trio.Event()
        self.gate.set()
        self.registering: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
        self._registered, self.registered = trio.open_memory_channel[api.RegisterRequest](math.inf)
        register = Method(request_type=api.RegisterRequest, call=self._register)
        list_pods = Method(request_type=podresources.ListPodResourcesRequest, call=self._list)
        self._servers = {
            directory / "device-plugins" / "kubelet.sock": GrpcServer({"v1beta1.Registration": {"Register": register}}),
            self.pod_resources_socket: GrpcServer({"v1.PodResourcesLister": {"List": list_pods}}),
        }

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves until cancelled; the sockets' files stay, as those of a kubelet that dies."""
        async with trio.open_nursery() as nursery:
            for path, server in self._servers.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                listener = trio.socket.from_stdlib_socket(open_unix_listener(path))
                await nursery.start(server.serve_unix, trio.SocketListener(listener))
            task_status.started()

    def list_device(self, resource: str, *device_ids: str, pod: str = "pod-x", container: str = "app") -> None:
        """Adds an entry to the answer: a container of a pod holds devices."""
        entry = self.pods.pod_resources.add(name=pod, namespace="default").containers.add(name=container)
        entry.devices.add(resource_name=resource, device_ids=device_ids)

    async def _register(self, request: api.RegisterRequest) -> api.Empty:
        self._registered.send_nowait(request)
        await self.registering()
        return api.Empty()

    async def _list(self, _: podresources.ListPodResourcesRequest) -> podresources.ListPodResourcesResponse:
        self.lists.append(trio.current_time())
        self.asked.set()
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return self.pods
