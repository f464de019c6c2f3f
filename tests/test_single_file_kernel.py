"""dist/afxdpd, the one file that examples/build_single_file.sh makes, in a root directory that has nothing else."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from conftest import REQUIRE_KERNEL, Kernel
from kubelet import pod, running_kubelet
from support import RESOURCE, ROOT, Pod, PodApp, get_map_id, in_thread, make_veth, send_packets, xdp_prog_id

import afxdpd

pytestmark = [pytest.mark.kernel, pytest.mark.program]

FILE = ROOT / "dist" / "afxdpd"
PINS = Path("/sys/fs/bpf/afxdpd")
NOBODY = 65534


@pytest.fixture
def executable() -> Path:
    """The executable, which tests/run.sh makes."""
    if not FILE.exists():
        missing = "dist/afxdpd is not there: sh examples/build_single_file.sh"
        if REQUIRE_KERNEL:
            pytest.fail(missing)
        pytest.skip(missing)
    return FILE


@pytest.fixture
def root(executable: Path, short_path: Path) -> Path:
    """A root directory with the executable, and empty directories to mount on."""
    root = short_path / "root"
    for name in ("proc", "sys", "kubelet", "uds", "etc"):
        (root / name).mkdir(parents=True)
    shutil.copy(executable, root / "afxdpd")
    return root


def in_root(root: Path, *arguments: str) -> list[str]:
    """The command for the executable in its root directory, which is read-only, in a mount namespace of its own."""
    script = """
        cd "$1"
        mount --bind . .
        cd "$1"
        for name in proc sys; do mount --rbind /$name $name; done
        for name in kubelet uds; do mount --bind $name $name; done
        mount -o remount,bind,ro .
        shift
        exec chroot . /afxdpd "$@"
    """
    return ["unshare", "--mount", "sh", "-euc", script, "sh", str(root), *arguments]


def files_below(root: Path) -> set[str]:
    """All regular files below a directory."""
    return {str(path.relative_to(root)) for path in root.rglob("*") if stat.S_ISREG(path.lstat().st_mode)}


@contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The daemon as a process with nothing in its environment."""
    with log.open("ab") as output:
        path = {"PATH": os.environ["PATH"]}  # for unshare and chroot
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=path)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def write_config(file: Path, *devices: str) -> Path:
    """A configuration with one pool of named devices."""
    pool = {"name": "pool", "mode": "primary", "devices": [{"name": name} for name in devices]}
    file.write_text(json.dumps({"pools": [pool]}))
    return file


def capabilities(pid: int) -> int:
    """The effective capabilities of a process, a bit for each."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))


async def test_pod_gets_device_map_and_packets_when_the_root_directory_is_empty(
    kernel: Kernel, root: Path, short_path: Path
) -> None:
    """The one file is the whole daemon: it registers, allocates, hands the map over, ends on SIGTERM; packets go on."""
    write_config(root / "etc/config.json", "afa0")
    make_veth("afa0")
    half = 2000
    command = in_root(root, "--config", "/etc/config.json", "--kubelet-dir", "/kubelet", "--uds-dir", "/uds")
    sockets = root / "uds/pool"
    async with running_kubelet(root / "kubelet") as kubelet:
        before = files_below(root)
        with running(command, short_path / "daemon.log") as daemon, Pod() as sandbox:
            await kubelet.wait(RESOURCE, registers=1, streams_open=1, healthy=1, timeout=30)
            (answer,) = await kubelet.allocate(RESOURCE, ["afa0"])
            assert answer["mounts"][0]["host_path"] == "/uds/pool/afa0"
            await kubelet.pods(pod("pod-x", {RESOURCE: ["afa0"]}))
            assert await in_thread(get_map_id, sockets / "afa0/afxdp.sock", "pod-x", "afa0")
            process = Path(f"/proc/{daemon.pid}")
            assert (process / "comm").read_text() == "afxdpd\n", "the process that was started is the daemon"
            assert (process / "cmdline").read_bytes().startswith(b"/afxdpd\0--config\0")
            assert not any(children.read_text() for children in process.glob("task/*/children"))
            sandbox.take("afa0")
            with await in_thread(PodApp, sandbox, sockets, "pod-x", ["afa0"], 2 * half) as app:
                await in_thread(send_packets, "afa0p", half)
                daemon.send_signal(signal.SIGTERM)
                assert await in_thread(daemon.wait, 20) == 0, (short_path / "daemon.log").read_text()
                await in_thread(partial(send_packets, "afa0p", half, first=half))
                result = await in_thread(app.result)
            assert (result["numbered"], result["lost"], result["duplicates"]) == (2 * half, 0, 0)
        assert files_below(root) - before <= {"uds/pool/afa0/xsks_map"}, "nothing is unpacked into a file"
    assert (PINS / "pool/afa0/link").exists()


def test_check_says_what_a_pool_takes_when_the_root_directory_is_empty(kernel: Kernel, root: Path) -> None:
    """--check, --version and wrong arguments have the same answers and exit codes as the installed program's."""
    write_config(root / "etc/config.json", "afa0", "afa1")
    make_veth("afa0")

    def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(in_root(root, *arguments), capture_output=True, text=True, timeout=60, check=False)

    check = ask("--check", "--config", "/etc/config.json")
    assert check.returncode == 0, check.stderr
    assert "\n  takes afa0: " in check.stdout
    assert ask("--version").stdout == f"afxdpd {afxdpd.__version__}\n"
    wrong = ask("--config", "/none.json")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (1, 1)
    assert "/none.json" in wrong.stderr


async def test_daemon_has_its_capabilities_when_its_user_is_not_root(
    kernel: Kernel, executable: Path, short_path: Path
) -> None:
    """The capabilities that the file has, as far as whoever starts it may have them, are those of the daemon."""
    bpf, net_admin, dac_override, chown = 39, 12, 1, 0
    allowed = "-all,+bpf,+net_admin,+dac_override"
    home = Path("/run/single")  # in memory, where every user can execute it
    (home / "uds").mkdir(parents=True)
    shutil.copy(executable, home / "afxdpd")
    has = sum(1 << number for number in (bpf, net_admin, dac_override, chown))
    permitted = struct.pack("<IIIII", 0x02000000, has & 0xFFFFFFFF, 0, has >> 32, 0)  # linux/capability.h, revision 2
    os.setxattr(home / "afxdpd", "security.capability", permitted)
    for path in (home, home / "uds"):
        os.chown(path, NOBODY, NOBODY)
    make_veth("afa0")
    command = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups", "--bounding-set", allowed]
    command += [str(home / "afxdpd"), "--config", str(write_config(home / "config.json", "afa0"))]
    command += ["--kubelet-dir", str(home / "kubelet"), "--uds-dir", str(home / "uds")]
    async with running_kubelet(home / "kubelet") as kubelet:
        with running(command, short_path / "daemon.log") as daemon:
            await kubelet.wait(RESOURCE, registers=1, streams_open=1, healthy=1, timeout=30)
            await kubelet.allocate(RESOURCE, ["afa0"])
            assert xdp_prog_id("afa0")
            assert capabilities(daemon.pid) == has - (1 << chown)
            assert Path(f"/proc/{daemon.pid}").stat().st_uid == NOBODY
            daemon.send_signal(signal.SIGTERM)
            assert await in_thread(daemon.wait, 20) == 0, (short_path / "daemon.log").read_text()
    shutil.rmtree(home)


async def test_kind_network_is_made_when_the_root_directory_is_empty(
    kernel: Kernel, root: Path, short_path: Path
) -> None:
    """What is imported only when it is needed is in the file too: pyroute2, for the network of a kind cluster."""
    pool = {"name": "pool", "mode": "primary", "drivers": [{"name": "veth"}]}
    (root / "etc/config.json").write_text(json.dumps({"kindCluster": True, "pools": [pool]}))
    command = in_root(root, "--config", "/etc/config.json", "--kubelet-dir", "/kubelet", "--uds-dir", "/uds")
    async with running_kubelet(root / "kubelet") as kubelet:
        with running(command, short_path / "daemon.log") as daemon:
            await kubelet.wait(RESOURCE, registers=1, healthy=4, timeout=30)
            assert "afxdp-kind-br" in Path("/proc/net/dev").read_text()
            daemon.send_signal(signal.SIGTERM)
            assert await in_thread(daemon.wait, 20) == 0, (short_path / "daemon.log").read_text()
    assert "afxdp-kind-br" not in Path("/proc/net/dev").read_text()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ('exec chroot "$1" /afxdpd --version', "/proc/self/exe (is /proc mounted?): No such file or directory"),
        ('truncate -s -1 "$1/afxdpd"; exec "$1/afxdpd" --version', "the file is not complete"),
        ('ulimit -n 50; exec "$1/afxdpd" --version', "too low a limit of open files"),
        (
            'printf "%1000s" | dd of="$1/afxdpd" bs=1000 seek=1000 conv=notrunc status=none; exec "$1/afxdpd"',
            "the file is damaged",
        ),
    ],
)
def test_reason_is_told_when_the_file_cannot_start(kernel: Kernel, root: Path, script: str, reason: str) -> None:
    """Where the interpreter cannot even be unpacked, a line says why, and the status is 127."""
    done = subprocess.run(["sh", "-euc", script, "sh", str(root)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (127, 1)
    assert done.stderr.startswith(f"afxdpd: {reason}")


def test_environment_changes_nothing_when_it_has_python_in_it(kernel: Kernel, root: Path) -> None:
    """Variables for other Pythons do not reach this one."""
    env = {"PATH": os.environ["PATH"], "PYTHONHOME": "/none", "PYTHONPATH": "/none", "PYTHONVERBOSE": "1"}
    done = subprocess.run(
        in_root(root, "--version"), capture_output=True, text=True, check=False, env=env, stdin=subprocess.DEVNULL
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"afxdpd {afxdpd.__version__}\n", "")
