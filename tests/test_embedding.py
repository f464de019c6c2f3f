"""The module inside somebody else's program: what its import does, and the daemon beside other tasks."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
from conftest import Kernel, open_fds
from fakes import FakeHost
from kubelet import pod, running_kubelet
from support import RESOURCE, ROOT, get_map_id, in_thread, make_veth, paths, xdp_prog_id
from test_daemon_kernel import until
from test_pools import config_of

import afxdpd

SNAPSHOT = """
import gc, json, logging, os, resource, signal, sys, threading, warnings

def snapshot():
    umask = os.umask(0)
    os.umask(umask)
    known = logging.root.manager.loggerDict.values()
    loggers = [logging.root, *(each for each in known if isinstance(each, logging.Logger))]
    handlers = [handler for each in loggers for handler in each.handlers]
    return {
        "threads": [thread.name for thread in threading.enumerate()],
        "children": open(f"/proc/self/task/{os.getpid()}/children").read(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "signals": {int(number): str(signal.getsignal(number)) for number in signal.valid_signals()},
        "umask": umask,
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "limits": [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")],
        "levels": {each.name: each.level for each in loggers if each.level},
        "handlers": [str(handler) for handler in handlers if type(handler) != logging.NullHandler],
        "hooks": [str(hook) for hook in (sys.excepthook, sys.unraisablehook, threading.excepthook, gc.callbacks)],
        "warnings": len(warnings.filters),
    }

before = snapshot()
import afxdpd
print(json.dumps([before, snapshot(), sorted(sys.modules)]))
"""


@pytest.mark.program
def test_import_starts_and_changes_nothing(tmp_path: Path) -> None:
    """No thread, descriptor, signal, handler, hook, limit or variable is another one; of levels only purerpc's."""
    line = [sys.executable, "-P", "-c", SNAPSHOT]
    result = subprocess.run(line, capture_output=True, text=True, timeout=30, check=True, cwd=tmp_path, umask=0o027)
    before, after, modules = json.loads(result.stdout)
    assert before["umask"] == 0o027, "not one that pytest's own import has changed"
    assert (before["levels"].pop("root"), after["levels"].pop("root")) == (30, 30)
    assert (before.pop("levels"), after.pop("levels")) == ({}, {"purerpc": 40})
    assert after == before
    assert result.stderr == ""
    assert not {"h11", "prometheus_client", "http.server"} & set(modules), "they are imported when they are needed"


async def test_errors_are_those_that_are_documented(short_path: Path) -> None:
    """What is wrong with the configuration, the host or the place is raised as it is, and nothing is left open."""
    before = open_fds()
    place = afxdpd.Paths(kubelet_dir=short_path, uds_dir=short_path / "uds", bpffs=short_path / "bpf")
    serve = partial(afxdpd.serve, config_of(pool=("veth0",)))
    with pytest.raises(afxdpd.HostError, match="is not a BPF file system"):
        await serve(place)
    with pytest.raises(afxdpd.ConfigError, match="longer than 107 bytes"):
        await serve(afxdpd.Paths(kubelet_dir=Path("/" + "x" * 100)))
    (short_path / "file").touch()
    with pytest.raises(afxdpd.HostError, match=re.escape(f"{short_path}/file/uds: Not a directory")):
        await serve(afxdpd.Paths(kubelet_dir=short_path, uds_dir=short_path / "file" / "uds"), host=FakeHost())
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve, place, host=FakeHost()))
        with pytest.raises(afxdpd.EndpointBusyError, match="another afxdpd serves this directory"):
            await serve(place, host=FakeHost())
        nursery.cancel_scope.cancel()
    assert open_fds() == before


@pytest.mark.kernel
@pytest.mark.kubelet
async def test_two_daemons_serve_in_one_program_when_their_places_differ(kernel: Kernel, short_path: Path) -> None:
    """Each has its pods; the end of one is none for the other, and leaves signals, logging and threads as they were."""
    make_veth("afa0", "afa1")
    places = []
    for name in ("a", "b"):
        (kernel.bpffs / name).mkdir()
        places.append(dataclasses.replace(paths(short_path / name), bpffs=kernel.bpffs / name))
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    before = open_fds()
    umask = os.umask(0o022)
    async with (
        running_kubelet(short_path / "a" / "kubelet") as first,
        running_kubelet(short_path / "b" / "kubelet") as second,
    ):
        held = open_fds()
        async with trio.open_nursery() as nursery:
            scopes = []
            for place, device in zip(places, ("afa0", "afa1"), strict=True):
                scope = await nursery.start(serve_in_scope, config_of(pool=(device,)), place)
                scopes.append(scope)
            for kubelet, device, place in zip((first, second), ("afa0", "afa1"), places, strict=True):
                await kubelet.wait(RESOURCE, streams_open=1, healthy=1)
                await kubelet.allocate(RESOURCE, [device])
                await kubelet.pods(pod("pod-x", {RESOURCE: [device]}))
                socket = place.uds_dir / "pool" / device / "afxdp.sock"
                assert await in_thread(get_map_id, socket, "pod-x", device)
                assert socket.stat().st_mode & 0o077 == 0
                assert place.status_socket.stat().st_mode & 0o077 == 0
                said = json.loads((await in_thread(afxdpd.ask_daemon, place.status_socket, "GET", "/status"))[1])
                assert [each["name"] for each in said["pools"][0]["devices"]] == [device]
            scopes[0].cancel()
            await first.wait(RESOURCE, streams_open=0)
            await until(lambda: not places[0].status_socket.exists())
            assert xdp_prog_id("afa0"), "the pod keeps its program"
            assert await in_thread(get_map_id, places[1].uds_dir / "pool/afa1/afxdp.sock", "pod-x", "afa1")
            nursery.cancel_scope.cancel()
        assert open_fds().keys() == held.keys()
    assert os.umask(umask) == 0o022
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers
    assert open_fds() == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("afxdpd")]
    assert sorted(path.name for path in (kernel.bpffs / "a" / "afxdpd" / "pool").iterdir()) == ["afa0"]
    for place in places:
        afxdpd.Xdp(place.bpffs).unpin("pool", "afa0")
        afxdpd.Xdp(place.bpffs).unpin("pool", "afa1")
        (place.bpffs / "afxdpd").rmdir()
        place.bpffs.rmdir()


async def serve_in_scope(
    config: afxdpd.PluginConfig, place: afxdpd.Paths, *, task_status: trio.TaskStatus[trio.CancelScope]
) -> None:
    """The daemon, until the scope is cancelled that is the value of start()."""
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(afxdpd.serve, config, place))
            task_status.started(scope)


SCRIPT = str(ROOT / "examples" / "embedded.py")


@contextmanager
def example(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The example as a process."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, SCRIPT, *arguments], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.kernel
@pytest.mark.kubelet
async def test_example_serves_what_it_is_told(kernel: Kernel, short_path: Path) -> None:
    """The example serves the devices that are named, then those that are typed, and ends with its input."""
    make_veth("afa0", "afa1")
    place = ["--kubelet-dir", str(short_path / "kubelet"), "--uds-dir", str(short_path / "uds")]
    resource = "afxdp/embedded"
    async with running_kubelet(short_path / "kubelet") as kubelet:
        with example(*place, "afa0") as process:
            assert process.stdin is not None
            await kubelet.wait(resource, streams_open=1, healthy=1)
            process.stdin.write("afa0 afa1\n")
            process.stdin.flush()
            await kubelet.wait(resource, streams_open=1, healthy=2)
            second = await trio.run_process([sys.executable, SCRIPT, *place, "afa0"], capture_stderr=True, check=False)
            assert second.returncode == 1
            assert second.stderr.endswith(b"uds: another afxdpd serves this directory; end it first\n")
            output, _ = await in_thread(process.communicate)
            assert (process.returncode, output) == (0, "serving\n")
