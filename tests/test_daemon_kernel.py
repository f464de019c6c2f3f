"""The whole daemon on the real kernel, with grpcio in a process of its own as kubelet."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Kernel
from kubelet import pod, running_kubelet
from support import RESOURCE, get_map_id, in_thread, make_veth, running_daemon, xdp_prog_id

pytestmark = pytest.mark.kernel


async def test_pod_gets_its_map_when_it_holds_the_device(kernel: Kernel, short_path: Path) -> None:
    """kubelet registers the pool, allocates a device, and the pod gets its XSKMAP over the socket."""
    make_veth("afa0", "afa1")
    async with running_kubelet(short_path / "kubelet") as kubelet, running_daemon(short_path, pool=["afa0", "afa1"]):
        await kubelet.wait(RESOURCE, registers=1, healthy=2)
        (answer,) = await kubelet.allocate(RESOURCE, ["afa0"])
        assert answer["envs"] == {"AFXDP_DEVICES_POOL": "afa0"}
        await kubelet.pods(pod("pod-x", {RESOURCE: ["afa0"]}))
        assert xdp_prog_id("afa0")
        assert await in_thread(get_map_id, short_path / "uds/pool/afa0/afxdp.sock", "pod-x", "afa0")
