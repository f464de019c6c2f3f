"""The daemon inside a program of one's own, which says what it serves and goes on with its own work.

    python examples/embedded.py ens1f0 ens1f1

gives pods the devices that are named. Whatever is typed then, as another list of devices, is what they get from then
on; the end of the input ends it. Pods keep what they have.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from pathlib import Path

import trio

import afxdpd


def config_of(names: list[str]) -> afxdpd.PluginConfig:
    """A configuration, made without a file."""
    devices = tuple(afxdpd.DeviceConfig(name=name) for name in names)
    return afxdpd.PluginConfig(pools=(afxdpd.PoolRules(name="embedded", mode="primary", devices=devices),))


async def typed_configs(lines: trio.MemoryReceiveChannel[str]) -> AsyncGenerator[afxdpd.PluginConfig, None]:
    """Yields a configuration for each line."""
    async for line in lines:
        yield config_of(line.split())


async def run(names: list[str], paths: afxdpd.Paths) -> None:
    """Runs the daemon beside the program's own work, until that is done."""
    typing, typed = trio.open_memory_channel[str](0)
    async with aclosing(typed_configs(typed)) as changes, trio.open_nursery() as nursery:
        await nursery.start(partial(afxdpd.serve, config_of(names), paths, changes=changes))
        print("serving", flush=True)
        async for line in trio.wrap_file(sys.stdin):  # the program's own work
            await typing.send(line)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("devices", nargs="+", metavar="DEVICE")
    parser.add_argument("--kubelet-dir", type=Path, default=afxdpd.KUBELET_DIR, help="default: %(default)s")
    parser.add_argument("--uds-dir", type=Path, default=afxdpd.UDS_DIR, help="default: %(default)s")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    pod_resources_socket = options.kubelet_dir / "pod-resources" / "kubelet.sock"
    place = afxdpd.Paths(
        kubelet_dir=options.kubelet_dir, pod_resources_socket=pod_resources_socket, uds_dir=options.uds_dir.absolute()
    )
    try:
        trio.run(run, options.devices, place)
    except* (afxdpd.HostError, afxdpd.EndpointBusyError) as group:
        sys.exit(str(group.exceptions[0]))
    except* KeyboardInterrupt:
        pass
