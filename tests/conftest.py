"""What all tests share: the namespaces in which the kernel tests run, and a check that nothing is left open."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from pyroute2 import IPRoute, NetlinkError

REQUIRE_KERNEL = os.environ.get("AFXDPD_REQUIRE_KERNEL") == "1"
"""In CI a kernel test that cannot run is a failure."""

FUZZ = int(os.environ.get("AFXDPD_FUZZ", "0"))
"""How many new inputs each target of test_fuzz.py gets, with a new seed; 0 for the ones it always gets."""

settings.register_profile(
    "afxdpd", derandomize=not FUZZ, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile("afxdpd")  # a test does the same each time, however long it takes

_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000

_missing = "not looked at yet"


@dataclass(frozen=True)
class Kernel:
    """The namespaces of this test run: network devices, mounts and pins in them go with the process."""

    bpffs: Path


def _isolate() -> None:
    """Moves this process into network and mount namespaces of its own, with sysfs, bpffs and /run of its own."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function: str, *arguments: object) -> None:
        if getattr(libc, function)(*arguments) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), function)

    call("unshare", _CLONE_NEWNS | _CLONE_NEWNET)
    call("mount", b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)
    for kind, place in ((b"tmpfs", b"/run"), (b"sysfs", b"/sys"), (b"bpf", b"/sys/fs/bpf")):
        call("mount", kind, place, kind, ctypes.c_ulong(0), None)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def pytest_configure() -> None:
    """Isolates the process before there are threads, which would stay behind in the old namespaces."""
    global _missing
    for name in ("pyroute2", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        _isolate()
        _missing = ""
    except OSError as exc:
        _missing = f"{exc.filename}: {exc.strerror}; kernel tests run as root"


@pytest.fixture(autouse=True)
def _kernel_tests_can_run(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("kernel") and _missing:
        if REQUIRE_KERNEL:
            pytest.fail(f"AFXDPD_REQUIRE_KERNEL=1, but {_missing}")
        pytest.skip(_missing)


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Undoes what the command line does to this process's logging."""
    root, log = logging.getLogger(), logging.getLogger("afxdpd")
    handlers, level = list(root.handlers), log.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    log.setLevel(level)


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    """The namespaces; afterwards every pin, and every device but lo, is gone."""
    assert _missing == "", "a test that uses this fixture is marked kernel"  # or it would clean up the machine
    bpffs = Path("/sys/fs/bpf")
    yield Kernel(bpffs=bpffs)
    shutil.rmtree(bpffs / "afxdpd", ignore_errors=True)
    with IPRoute() as ipr:
        for link in ipr.get_links():
            if link.get_attr("IFLA_IFNAME") != "lo" and link.get_attr("IFLA_LINKINFO"):
                with contextlib.suppress(NetlinkError):  # its peer went first, and took it along
                    ipr.link("del", index=link["index"])


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory whose name leaves room for sockets below it; pytest's own are too long for sun_path."""
    with tempfile.TemporaryDirectory(prefix="afx") as path:
        yield Path(path)


def open_fds() -> dict[str, str]:
    """What this process has open: number → target, without the directory handle used to look."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            found[entry] = os.readlink(f"/proc/self/fd/{entry}")
        except FileNotFoundError:
            continue
    return found
