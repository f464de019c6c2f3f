"""The whole story on one machine, without a cluster: kubelet asks, a pod receives, the daemon dies, nothing is lost.

`sh examples/quickstart.sh` installs what this needs and runs it. Real are the daemon in a process of its own, its gRPC,
programs and maps, the pod's namespaces, user and capabilities, and the packets. Stand-ins are standin_kubelet.py for
kubelet, veth pairs for network cards, and this program for the CNI plugin and the container runtime.

The node is this process: it moves into network and mount namespaces of its own, and all its files, sockets and BPF pins
are in file systems in memory that are mounted there. The pod is another process, with further namespaces. Every process
ends with this one, even if it is killed, and the rest goes with the last process: nothing stays behind.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn, Self

import pod_app
from afxdpd_client import Client, ClientError
from pyroute2 import IPRoute

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

EXAMPLES = Path(__file__).resolve().parent
RESOURCE = "afxdp/quickstart"
DEVICES = {"qs0": "qs0-far", "qs1": "qs1-far"}  # and the far ends of the wires that they are plugged into
POD, NEXT_POD, OTHER_POD = "quickstart-pod", "next-pod", "other-pod"
POD_UID = 200_000 + os.getpid() % 50_000  # of this run alone: the kernel counts locked memory by user
MEMLOCK = 8 << 20  # containers have that by default

RUN = Path("/run")  # covered by a file system in memory, of this name in the table of mounts:
MOUNT_NAME = "afxdpd-quickstart"
LOGS, KUBELET, UDS, BPFFS, PYTHON = (RUN / f"quickstart-{name}" for name in ("logs", "kubelet", "uds", "bpf", "python"))

# linux/sched.h, linux/mount.h, linux/prctl.h, linux/capability.h, linux/bpf.h
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x0002_0000, 0x0400_0000, 0x4000_0000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 1, 8, 47, 2
CAP_VERSION_3, CAP_NET_RAW = 0x2008_0522, 13
BPF_MAP_GET_FD_BY_ID = 14

libc = ctypes.CDLL(None, use_errno=True)


class QuickstartError(Exception):
    """What went wrong, in one line."""


def call(function: str, *arguments: int | bytes) -> int:
    """Calls a function of the C library. Raises OSError."""
    words = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in arguments]
    result: int = getattr(libc, function)(*words)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{function}: {os.strerror(ctypes.get_errno())}")
    return result


def mount(source: Path | str, target: Path, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Makes a mount, or changes one. Raises OSError."""
    call("mount", os.fsencode(source), os.fsencode(target), kind.encode(), flags, options.encode())


class Story:
    """Tells what happens: a line for each step, and what the processes log if that is wanted."""

    STEPS = 10

    def __init__(self, *, verbose: bool) -> None:
        self._verbose, self._step = verbose, 0
        self._shown: dict[Path, int] = {}

    @contextmanager
    def step(self, title: str) -> Iterator[Callable[[str], None]]:
        """Tells of a step and how long it takes; gives the block a function that adds a fact."""
        self._step += 1
        print(f"[{self._step:2}/{self.STEPS}] {title} ... ", end="", flush=True)
        facts: list[str] = []
        started = time.monotonic()
        try:
            yield facts.append
        except BaseException:
            print("failed", flush=True)
            raise
        print(", ".join([*facts, f"{time.monotonic() - started:.1f} s"]), flush=True)
        if self._verbose:
            self.show_logs(sys.stdout, last=1000)

    def show_logs(self, file: IO[str], last: int) -> None:
        """Shows what each process has logged since the last time, but not more than the last lines of it."""
        for log in sorted(LOGS.glob("*")):
            lines = log.read_text(errors="replace").splitlines()
            news, self._shown[log] = lines[self._shown.get(log, 0) :], len(lines)
            for line in news[-last:]:
                print(f"        {log.name}: {line}", file=file)


# --- Processes --------------------------------------------------------------------------------------------------------


class Program:
    """A process that ends with this one.

    Args:
        name: What messages and its log call it.
        command: Its command line.
        setup: What the process does before it becomes the program.
        env: Its environment; ours by default.
        log_stdout: Whether its stdout goes to the log, as stderr does; otherwise we read it.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        setup: Callable[[], None] = lambda: None,
        env: Mapping[str, str] | None = None,
        log_stdout: bool = False,
    ) -> None:
        def prepare() -> None:
            try:
                setup()
                call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # the last: a change of user resets it
            except OSError as exc:
                os.write(2, f"error: {exc.strerror}\n".encode())
                raise

        self.name, self._log = name, LOGS / name
        pipe = subprocess.PIPE
        with self._log.open("ab") as log:
            out = log if log_stdout else pipe
            try:
                self.process = subprocess.Popen(  # noqa: S603  nothing in it comes from outside
                    command, stdin=pipe, stdout=out, stderr=log, preexec_fn=prepare, env=env, cwd="/"
                )
            except subprocess.SubprocessError:
                self.fail("did not start")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def fail(self, what: str) -> NoReturn:
        """Raises QuickstartError, with the last line of the log."""
        lines = self._log.read_text(errors="replace").splitlines()
        raise QuickstartError(": ".join([f"the {self.name} {what}", *lines[-1:]]))

    def check(self) -> None:
        """Raises QuickstartError if it has ended."""
        if (status := self.process.poll()) is not None:
            self.fail(f"has ended with status {status}")

    def read_line(self, timeout: float) -> str:
        """Returns the next line of its stdout. It writes no more than one before it hears from us."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], timeout)[0]:
            self.fail(f"has said nothing for {timeout:g} s")
        line = self.process.stdout.readline().decode()
        if not line:
            self.process.wait()
            self.check()
        return line

    def wait(self, timeout: float) -> int:
        """Returns its exit status."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.fail(f"has not ended within {timeout:g} s")


class Kubelet(Program):
    """The stand-in for kubelet."""

    def __init__(self) -> None:
        command = [sys.executable, str(EXAMPLES / "standin_kubelet.py"), "--plugin-dir", f"{KUBELET}/device-plugins"]
        super().__init__("kubelet", [*command, "--pod-resources-socket", f"{KUBELET}/pod-resources/kubelet.sock"])

    def command(self, cmd: str, **arguments: Any) -> Any:
        """Carries out a command and returns the reply; see standin_kubelet.py."""
        assert self.process.stdin is not None
        self.check()
        self.process.stdin.write(json.dumps({"cmd": cmd, **arguments}).encode() + b"\n")
        self.process.stdin.flush()
        reply = json.loads(self.read_line(30))
        if not reply["ok"]:
            raise QuickstartError(f"kubelet: {cmd}: {reply['code']}: {reply['message']}")
        return reply

    def wait_healthy(self, daemon: Program, registrations: int) -> None:
        """Waits until the daemon has registered so often, and all devices are healthy."""
        wanted = {"registers": registrations, "devices": dict.fromkeys(DEVICES, "Healthy")}
        deadline = time.monotonic() + 20
        while True:
            try:
                self.command("wait", resource=RESOURCE, timeout=0.5, **wanted)
            except QuickstartError:
                daemon.check()
                if time.monotonic() > deadline:
                    raise
            else:
                return

    def allocate(self, device: str) -> tuple[Any, str]:
        """Has the daemon allocate a healthy device; returns what the container gets, and how long that took."""
        started = time.monotonic()
        reply = self.command("allocate", resource=RESOURCE, containers=[[device]], timeout=20, force=False)
        return reply["containers"][0], f"{(time.monotonic() - started) * 1000:.1f} ms"

    def set_pods(self, pods: Mapping[str, list[str]]) -> None:
        """Sets which pods there are, and which devices each one holds."""
        held = {name: [{"name": "app", "devices": {RESOURCE: devices}}] for name, devices in pods.items()}
        self.command("pods", pods=[{"name": name, "containers": containers} for name, containers in held.items()])


def start_daemon() -> Program:
    """Starts afxdpd as it is installed."""
    paths = ["--kubelet-dir", str(KUBELET), "--uds-dir", str(UDS), "--bpffs", str(BPFFS)]
    command = [sys.executable, "-P", "-m", "afxdpd", "--config", f"{RUN}/config.json", *paths]
    return Program("daemon", command, log_stdout=True)


# --- The node and the pod ---------------------------------------------------------------------------------------------


@contextmanager
def restored_namespaces(**kinds: int) -> Iterator[None]:
    """After the block, goes back to the namespaces that this process is in now: net or mnt, with their flags."""
    fds = [(os.open(f"/proc/self/ns/{name}", os.O_RDONLY), flag) for name, flag in kinds.items()]
    try:
        yield
    finally:
        for fd, flag in fds:
            with suppress(PermissionError):  # then it could not leave them either
                call("setns", fd, flag)
            os.close(fd)


def make_node(*, verbose: bool) -> None:
    """Makes the node: namespaces, file systems, devices with their wires, and the daemon's configuration."""
    try:
        call("unshare", CLONE_NEWNS | CLONE_NEWNET)
        mount("none", Path("/"), flags=MS_REC | MS_PRIVATE)
        mount(MOUNT_NAME, RUN, "tmpfs", options="mode=755")
        for path in (LOGS, KUBELET, BPFFS, PYTHON):
            path.mkdir()
        mount(MOUNT_NAME, BPFFS, "bpf")
    except OSError as exc:
        hint = "; in a container it takes --privileged" if isinstance(exc, PermissionError) else ""
        raise QuickstartError(f"cannot make namespaces and mounts: {exc.strerror}{hint}") from exc
    with IPRoute() as network:
        for device, far in DEVICES.items():
            network.link("add", ifname=device, kind="veth", peer={"ifname": far})
            for end in (device, far):
                network.link("set", index=network.link_lookup(ifname=end)[0], state="up")
    devices = [{"name": name} for name in DEVICES]
    pool = {"name": RESOURCE.split("/")[1], "mode": "primary", "devices": devices, "uid": POD_UID}
    config = {"pools": [pool], "logLevel": "debug" if verbose else "info"}
    (RUN / "config.json").write_text(json.dumps(config))
    for name in ("pod_app.py", "afxdpd_client.py"):
        shutil.copyfile(EXAMPLES / name, RUN / name)  # the pod's user may not be let into the checkout


class Pod:
    """A pod with one container. Whoever makes it closes it.

    Args:
        name: Its name, and therefore its hostname.
        container: What Allocate answered.
    """

    def __init__(self, name: str, container: Any) -> None:
        self.name, self._container = name, container
        with ExitStack() as stack:
            # It only holds the namespaces, until the end of its stdin.
            self._sandbox = stack.enter_context(Program("sandbox", ["cat"], setup=self._make_sandbox)).process
            self._pidfd = os.pidfd_open(self._sandbox.pid)
            stack.callback(os.close, self._pidfd)
            with restored_namespaces(net=CLONE_NEWNET):
                call("setns", self._pidfd, CLONE_NEWNET)
                self._network = stack.enter_context(IPRoute())  # its socket stays in the pod's namespace
            self._resources = stack.pop_all()

    def close(self) -> None:
        """Ends the pod; a device that is still in it is lost."""
        self._resources.close()

    def take(self, device: str) -> None:
        """Does what a CNI plugin does: moves a device into the pod and sets it up; waits until it is operational."""
        with IPRoute() as node:
            node.link("set", index=node.link_lookup(ifname=device)[0], net_ns_pid=self._sandbox.pid)
            self._network.link("set", index=self._network.link_lookup(ifname=device)[0], state="up")
            # It can take the kernel a second to act on the carrier; until then it drops what is sent, and does not say.
            deadline = time.monotonic() + 10
            for network, end in ((node, DEVICES[device]), (self._network, device)):
                while next(iter(network.get_links(ifname=end))).get_attr("IFLA_OPERSTATE") != "UP":
                    if time.monotonic() > deadline:
                        raise QuickstartError(f"{end} is not operational after 10 s")
                    time.sleep(0.01)

    def give_back(self, device: str) -> None:
        """Moves a device back to the node, as the CNI plugin does in the end."""
        self._network.link("set", index=self._network.link_lookup(ifname=device)[0], net_ns_pid=os.getpid())

    def start_app(self, packets: int) -> Program:
        """Starts the container's program, which ends after so many packets; returns when it is ready for them."""
        options = ["--packets", str(packets), "--seconds", "10", "--frames", "4096", "--json"]
        python = f"{PYTHON}/bin/python3.{sys.version_info.minor}"
        env = {"LD_LIBRARY_PATH": f"{PYTHON}/lib", **self._container["envs"]}  # some Pythons have a libpython there
        app = Program("pod", [python, f"{RUN}/pod_app.py", *options], setup=self._enter, env=env)
        with ExitStack() as stack:
            stack.enter_context(app).read_line(20)
            stack.pop_all()
        return app

    def _make_sandbox(self) -> None:
        """In a new process: makes the namespaces, and the mounts that a container runtime would make."""
        call("unshare", CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWNS)
        socket.sethostname(self.name)
        mount(sys.base_prefix, PYTHON, flags=MS_BIND)  # it may be in root's home directory
        mount(MOUNT_NAME, Path("/tmp"), "tmpfs", options="mode=1777")  # noqa: S108  the pod's own
        for wanted in self._container["mounts"]:
            target = Path(wanted["container_path"])
            target.mkdir(parents=True)
            mount(wanted["host_path"], target, flags=MS_BIND)
            if wanted["read_only"]:
                mount("", target, flags=MS_BIND | MS_REMOUNT | MS_RDONLY)

    def _enter(self) -> None:
        """In a new process: enters the pod, as an ordinary user with CAP_NET_RAW."""
        call("setns", self._pidfd, CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWNET)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (MEMLOCK, MEMLOCK))
        os.setgroups([])
        os.setgid(POD_UID)
        call("prctl", PR_SET_KEEPCAPS, 1, 0, 0, 0)
        os.setuid(POD_UID)
        only = 1 << CAP_NET_RAW  # effective, permitted, inheritable; then the same of capabilities above 31
        call("capset", struct.pack("Ii", CAP_VERSION_3, 0), struct.pack("6I", only, only, only, 0, 0, 0))
        call("prctl", PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_NET_RAW, 0, 0)


class Sender:
    """Sends packets to a device, numbered in the form that pod_app.py counts."""

    BURST, PAUSE = 25, 0.002  # some 10,000 packets a second; a veth has room for 256

    def __init__(self, device: str) -> None:
        self._number = 0
        self._sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
        self._sock.bind((DEVICES[device], 0))

    def close(self) -> None:
        """Closes the socket."""
        self._sock.close()

    def send(self, count: int) -> None:
        """Sends so many packets of 64 bytes."""
        for index in range(1, count + 1):
            numbered = pod_app.NUMBERED.pack(pod_app.ETHERTYPE, pod_app.MAGIC, self._number)
            self._sock.send(b"\xff" * 6 + b"\x02" * 6 + numbered + bytes(34))
            self._number += 1
            if index % self.BURST == 0:
                time.sleep(self.PAUSE)


def get_map_id(container: Any, pod: str) -> int:
    """Has the XSKMAP of a container's device handed out, once more; returns its id."""
    directory = Path(container["mounts"][0]["host_path"])
    with Client(directory.name, socket_dir=str(directory.parent), hostname=pod) as client:
        fd = client.xsk_map_fd(directory.name)
    try:
        info = Path(f"/proc/self/fdinfo/{fd}").read_text()
    finally:
        os.close(fd)
    return int(info.partition("map_id:")[2].split()[0])


def check_all_arrived(app: Program, sent: int) -> None:
    """Waits for the application's end. Raises QuickstartError unless each packet has arrived, once."""
    result = json.loads(app.read_line(30))
    lost = sent - (result["numbered"] - result["duplicates"])
    if (status := app.wait(20)) or lost or result["duplicates"]:
        raise QuickstartError(f"{lost} of {sent} packets are lost; the pod ended with status {status}: {result}")


# --- The story --------------------------------------------------------------------------------------------------------


def run(story: Story, packets: int, *, verbose: bool) -> list[int]:
    """Tells the story; returns the ids of the maps that were handed out."""
    device = next(iter(DEVICES))
    with ExitStack() as stack:
        with story.step("node: namespaces and file systems that nobody else sees") as tell:
            make_node(verbose=verbose)
            tell(f"with devices {' and '.join(DEVICES)}")
        with story.step("kubelet: a stand-in that shares no code with the daemon"):
            kubelet = stack.enter_context(Kubelet())
            kubelet.read_line(30)
        with story.step(f"daemon: registers {RESOURCE}") as tell:
            daemon = stack.enter_context(start_daemon())
            kubelet.wait_healthy(daemon, 1)
            tell(f"{' and '.join(DEVICES)} are Healthy")
        with story.step(f"Allocate: {device} for {POD}") as tell:
            container, duration = kubelet.allocate(device)
            kubelet.set_pods({POD: [device], OTHER_POD: []})
            tell(" ".join(f"{name}={value}" for name, value in container["envs"].items()))
            tell(f"answered in {duration}")
        with story.step(f"CNI: {device} moves into the pod, which has {container['mounts'][0]['container_path']}"):
            pod = Pod(POD, container)
            stack.callback(pod.close)
            pod.take(device)
        with story.step(f"pod: user {POD_UID}, only CAP_NET_RAW, {MEMLOCK >> 20} MiB of lockable memory") as tell:
            kubelet.command("prestart", resource=RESOURCE, devices=[device])
            app = stack.enter_context(pod.start_app(packets))
            first_map = get_map_id(container, POD)
            tell(f"ready, with XSKMAP {first_map}")
        sender = stack.enter_context(closing(Sender(device)))
        with story.step(f"traffic: {packets} packets") as tell:
            sender.send(packets)
            check_all_arrived(app, packets)
            tell(f"{packets} received, 0 lost")
        with story.step(f"restart: {packets} more, and the daemon is killed and started again") as tell:
            kubelet.command("prestart", resource=RESOURCE, devices=[device])  # as for each start of a container
            app = stack.enter_context(pod.start_app(packets))
            second_map = get_map_id(
                container, POD
            )  # a fresh one: what the container's first start held is of no effect
            sender.send(packets // 4)
            daemon.process.kill()
            sender.send(packets // 4)
            daemon = stack.enter_context(start_daemon())
            sender.send(packets - packets // 4 * 2)
            kubelet.wait_healthy(daemon, 2)
            check_all_arrived(app, packets)
            tell(f"{packets} received, 0 lost")
            if (map_id := get_map_id(container, POD)) != second_map:
                raise QuickstartError(f"XSKMAP {map_id} is handed out after the restart, not {second_map}")
            tell(f"XSKMAP {map_id} before and after")
        with story.step(f"next pod: gets {device} when {POD} has ended") as tell:
            pod.give_back(device)
            pod.close()
            kubelet.set_pods({OTHER_POD: []})
            container, duration = kubelet.allocate(device)
            kubelet.set_pods({NEXT_POD: [device], OTHER_POD: []})
            if (next_map := get_map_id(container, NEXT_POD)) in (first_map, second_map):
                raise QuickstartError(f"{NEXT_POD} gets XSKMAP {next_map}, which {POD} may still hold")
            tell(f"answered in {duration}, a fresh XSKMAP {next_map}")
        with story.step("SIGTERM: the daemon ends") as tell:
            daemon.process.terminate()
            if status := daemon.wait(5):
                daemon.fail(f"has ended with status {status}")
            tell("status 0")
    return [first_map, second_map, next_map]


def left_running() -> str:
    """Returns which process other than this one is in our network namespace, "" for none."""
    namespace = os.readlink("/proc/self/ns/net")
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(process.name) != os.getpid() and os.readlink(process / "ns" / "net") == namespace:
                return f"process {process.name}"
    return ""


def left_behind(map_ids: Sequence[int]) -> str:
    """Looks at the machine from outside; returns what is still there of us, "" for nothing."""
    if MOUNT_NAME in Path("/proc/self/mountinfo").read_text():
        return "a mount"
    if names := {name for _, name in socket.if_nameindex()} & {*DEVICES, *DEVICES.values()}:
        return f"devices {', '.join(sorted(names))}"
    for map_id in map_ids:
        with suppress(FileNotFoundError):
            attr = struct.pack("III", map_id, 0, 0)
            os.close(call("syscall", pod_app.SYS_BPF[platform.machine()], BPF_MAP_GET_FD_BY_ID, attr, len(attr)))
            return f"BPF map {map_id}"
    return ""


def check_none(what: str, left: Callable[[], str]) -> None:
    """Waits a little until nothing is left: the kernel cleans up in the background. Raises QuickstartError."""
    deadline = time.monotonic() + 10
    while found := left():
        if time.monotonic() > deadline:
            raise QuickstartError(f"{what}: {found}")
        time.sleep(0.05)


def run_isolated(story: Story, packets: int, *, verbose: bool) -> None:
    """Tells the story, then checks that nothing is left of it. Raises QuickstartError, OSError and such."""
    if os.geteuid() != 0:
        raise QuickstartError("this needs root, for namespaces and BPF")
    with restored_namespaces(mnt=CLONE_NEWNS, net=CLONE_NEWNET):
        try:
            map_ids = run(story, packets, verbose=verbose)
        except Exception:
            story.show_logs(sys.stderr, last=50)
            raise
        check_none("still running", left_running)
    check_none("left behind", lambda: left_behind(map_ids))


def main() -> int:
    """Runs the program; returns its exit status."""
    parser = argparse.ArgumentParser(description="afxdpd's whole story on one machine, without a cluster; as root.")
    parser.add_argument("--packets", type=int, default=20_000, metavar="N", help="in each of two rounds (%(default)s)")
    parser.add_argument("--verbose", action="store_true", help="show what each process logs")
    args = parser.parse_args()
    if args.packets < 1:
        parser.error("--packets must be 1 or more")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it raises KeyboardInterrupt: everything is cleaned up
    os.umask(0o022)
    started = time.monotonic()
    try:
        run_isolated(Story(verbose=args.verbose), args.packets, verbose=args.verbose)
    except KeyboardInterrupt:
        print("quickstart: interrupted", file=sys.stderr)
        return 130
    except Exception as exc:  # noqa: BLE001  the end of the program: all that is left is to say why
        if args.verbose:
            traceback.print_exc()
        reason = str(exc) if isinstance(exc, (QuickstartError, ClientError)) else repr(exc)
        print(f"quickstart: failed: {reason}", file=sys.stderr)
        return 1
    total = args.packets * 2
    print(
        f"OK: {total} packets sent = {total} received, 0 lost, nothing left behind ({time.monotonic() - started:.1f} s)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
