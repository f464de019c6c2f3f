"""A device plugin for device nodes: each pattern is a resource, each node that matches a device for so many pods.

    python device_nodes.py --namespace example.org tun=/dev/net/tun:10 'serial=/dev/ttyUSB*'

A pod that asks for example.org/serial: 1 gets one of the nodes that are plugged in.
"""

import argparse
import glob
import logging
import sys
from pathlib import Path

import trio

from afxdpd import HEALTHY, DeviceTree, DirectoryWatch, EndpointBusyError, Manager, Notifier, new_device_info
from afxdpd_proto.deviceplugin_pb2 import DeviceSpec


class DeviceNodes:
    """The Scanner, which is all that a plugin has to have: resource → pattern, number of pods that share a node."""

    def __init__(self, patterns: dict[str, tuple[str, int]]) -> None:
        self.patterns = patterns

    async def scan(self, notifier: Notifier) -> None:
        """Follows the directories of the patterns for ever."""
        async with trio.open_nursery() as nursery:
            for directory in {Path(pattern).parent for pattern, _ in self.patterns.values()}:
                nursery.start_soon(self.follow, directory, notifier)

    async def follow(self, directory: Path, notifier: Notifier) -> None:
        """Notifies at the start, and whenever something came or went."""
        with DirectoryWatch(directory) as watch:
            while True:
                notifier.notify(self.tree())
                await watch.changed()

    def tree(self) -> DeviceTree:
        """All that is there now. A resource of which there is no device is announced all the same."""
        tree = DeviceTree({name: {} for name in self.patterns})
        for name, (pattern, count) in self.patterns.items():
            for path in filter(str.isprintable, glob.glob(pattern)):
                info = new_device_info(HEALTHY, [DeviceSpec(host_path=path, container_path=path, permissions="rw")])
                for number in range(count):
                    tree.add_device(name, f"{path.strip('/').replace('/', '-')}-{number}", info)
        return tree


def resource(text: str) -> tuple[str, tuple[str, int]]:
    """Takes NAME=PATTERN or NAME=PATTERN:COUNT apart."""
    name, _, rest = text.partition("=")
    pattern, _, count = rest.rpartition(":") if rest.rpartition(":")[2].isdecimal() else (rest, "", "1")
    if not name or not pattern.startswith("/"):
        raise argparse.ArgumentTypeError(f"not NAME=PATTERN or NAME=PATTERN:COUNT: {text}")
    return name, (pattern, int(count))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--namespace", default="example.org", help="domain of the resources (default: %(default)s)")
    parser.add_argument("--kubelet-dir", type=Path, default=Path("/var/lib/kubelet"), help="default: %(default)s")
    parser.add_argument("resources", nargs="+", type=resource, metavar="NAME=PATTERN[:COUNT]")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    plugin = DeviceNodes(dict(options.resources))
    try:
        trio.run(Manager(options.namespace, plugin, kubelet_dir=options.kubelet_dir).run)
    except* EndpointBusyError as group:
        sys.exit(str(group.exceptions[0]))
    except* KeyboardInterrupt:
        pass
