"""Where devices are: NUMA nodes from sysfs, and choosing devices by them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import afxdpd
from afxdpd import HEALTHY, get_netdev_topology_info, get_topology_info, new_device_info, prefer_devices
from afxdpd_proto import deviceplugin_pb2 as api

NULL = Path("/dev/null")  # a character device of every machine: 1:3


class Sysfs:
    """A sysfs made for a test."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def device(self, path: str, numa_node: str | None = None) -> Path:
        """Makes a directory below devices/."""
        directory = self.root / "devices" / path
        directory.mkdir(parents=True, exist_ok=True)
        if numa_node is not None:
            (directory / "numa_node").write_text(f"{numa_node}\n")
        return directory

    def link(self, path: str, target: Path) -> None:
        """Makes a symbolic link."""
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    """An empty one."""
    return Sysfs(tmp_path / "sys")


def nodes(info: api.TopologyInfo | None) -> list[int] | None:
    """The ids, in order."""
    return None if info is None else [node.ID for node in info.nodes]


def test_node_is_that_of_the_device_when_it_knows(sysfs: Sysfs) -> None:
    """The numa_node beside the device behind a character device is the answer."""
    sysfs.link("dev/char/1:3", sysfs.device("pci0000:00/0000:00:01.0/misc/thing", "1"))
    assert nodes(get_topology_info([NULL], sysfs=sysfs.root)) == [1]


def test_node_is_that_of_the_closest_ancestor_when_the_device_does_not_know(sysfs: Sysfs) -> None:
    """Ancestors are asked from the device upwards, and the first that knows is believed."""
    sysfs.device("pci0000:00", "0")
    sysfs.device("pci0000:00/0000:00:01.0", "2")
    sysfs.link("dev/char/1:3", sysfs.device("pci0000:00/0000:00:01.0/misc/thing"))
    assert nodes(get_topology_info([NULL], sysfs=sysfs.root)) == [2]


@pytest.mark.parametrize("nonsense", ["-1", "-7", "", "many", "0x1"])
def test_node_is_unknown_when_sysfs_says_nonsense(sysfs: Sysfs, nonsense: str) -> None:
    """What is no node number is left out, and there is no topology without a node."""
    sysfs.link("dev/char/1:3", sysfs.device("virtual/misc/thing", nonsense))
    assert get_topology_info([NULL], sysfs=sysfs.root) is None


def test_nodes_are_those_below_when_the_device_is_virtual(sysfs: Sysfs) -> None:
    """A bond is where its lower devices are, in order and each node once."""
    bond = sysfs.device("virtual/net/bond0")
    sysfs.link("class/net/bond0", bond)
    for name, node in (("eth3", "1"), ("eth1", "0"), ("eth2", "1")):
        device = sysfs.device(f"pci0000:00/{name}", node)
        sysfs.link(f"devices/virtual/net/bond0/lower_{name}", sysfs.device(f"pci0000:00/{name}/net/{name}"))
        assert device.exists()
    assert nodes(get_netdev_topology_info("bond0", sysfs=sysfs.root)) == [0, 1]


def test_nodes_are_those_of_the_members_when_the_device_is_a_vfio_group(sysfs: Sysfs, tmp_path: Path) -> None:
    """A vfio group is where the devices of its IOMMU group are."""
    sysfs.link("kernel/iommu_groups/12/devices/0000:81:00.0", sysfs.device("pci0000:80/0000:81:00.0", "1"))
    sysfs.link("kernel/iommu_groups/12/devices/0000:01:00.0", sysfs.device("pci0000:00/0000:01:00.0", "0"))
    group = tmp_path / "vfio" / "12"
    group.parent.mkdir()
    group.symlink_to(NULL)
    assert nodes(get_topology_info([group], sysfs=sysfs.root)) == [0, 1]


def test_nodes_are_together_when_there_are_several_paths(sysfs: Sysfs) -> None:
    """The nodes of all paths are sorted, and each is named once."""
    sysfs.link("dev/char/1:3", sysfs.device("a", "1"))
    sysfs.link("dev/char/1:5", sysfs.device("b", "0"))
    sysfs.link("dev/char/1:7", sysfs.device("c", "1"))
    paths = [NULL, Path("/dev/zero"), Path("/dev/full")]
    assert nodes(get_topology_info(paths, sysfs=sysfs.root)) == [0, 1]


def test_netdev_is_where_its_hardware_is(sysfs: Sysfs) -> None:
    """A network device is where /sys/class/net/<name>/device is."""
    sysfs.link("devices/virtual/net/ens1/device", sysfs.device("pci0000:80/0000:81:00.0", "1"))
    sysfs.link("class/net/ens1", sysfs.device("virtual/net/ens1"))
    assert nodes(get_netdev_topology_info("ens1", sysfs=sysfs.root)) == [1]


def test_netdev_has_no_topology_when_it_is_not_there(sysfs: Sysfs) -> None:
    """A device that sysfs does not know is nowhere, which is no error."""
    assert get_netdev_topology_info("ens1", sysfs=sysfs.root) is None


@pytest.mark.parametrize("path", ["/nonexistent/device", "/", __file__])
def test_device_info_warns_when_the_topology_cannot_be_found(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """A path that is no device costs a line in the log, never an error."""
    info = new_device_info(HEALTHY, [api.DeviceSpec(host_path=path)])
    assert info.topology is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert path in caplog.text


def test_device_info_keeps_hints_when_they_are_given() -> None:
    """A topology that the plugin gives is taken as it is, also none."""
    hint = api.TopologyInfo(nodes=[api.NUMANode(ID=3)])
    spec = [api.DeviceSpec(host_path="/nonexistent")]
    assert afxdpd.new_device_info_with_topology_hints(HEALTHY, spec, topology=hint).topology == hint
    assert afxdpd.new_device_info_with_topology_hints(HEALTHY, spec).topology is None


# -- Choosing ----------------------------------------------------------------------------------------------------------

PLACES = {name: frozenset({node}) for node, names in ((0, "abc"), (1, "de"), (2, "fg")) for name in names}


@pytest.mark.parametrize(
    ("available", "must", "size", "expected"),
    [
        ("gfedcba", "", 1, "d"),  # the node with the fewest that are enough; the first by name
        ("gfedcba", "", 2, "de"),
        ("gfedcba", "", 3, "abc"),
        ("gfedcba", "", 4, "abcd"),
        ("gfedcba", "f", 2, "fg"),  # near to what has to be taken
        ("gfedcba", "fa", 3, "fab"),
        ("gfedcba", "a", 5, "abcde"),
        ("xyd", "", 2, "dx"),  # unknown places come last
        ("yx", "", 1, "x"),
        ("ab", "", 5, "ab"),  # as many as there are
        ("ab", "ab", 1, "a"),
        ("ab", "", 0, ""),
        ("ab", "", -3, ""),
        ("", "", 2, ""),
        ("aab", "bb", 2, "ba"),
    ],
)
def test_choice_is_near_together(available: str, must: str, size: int, expected: str) -> None:
    """Devices are chosen on few nodes, with what has to be in it, and as many as are wanted."""
    assert "".join(prefer_devices(available, must, size, PLACES)) == expected


@given(
    places=st.dictionaries(st.text("abcdefgh", min_size=1, max_size=2), st.integers(0, 3), max_size=12),
    size=st.integers(1, 12),
    data=st.data(),
)
def test_choice_is_exact_and_on_the_fewest_nodes(places: dict[str, int], size: int, data: st.DataObject) -> None:
    """Whatever is asked: the size is exact, must-include is honoured, and no choice needs fewer nodes."""
    names = sorted(places)
    must = data.draw(st.lists(st.sampled_from(names), unique=True, max_size=size) if names else st.just([]))
    order = data.draw(st.permutations(names))
    where = {name: frozenset({node}) for name, node in places.items()}
    chosen = prefer_devices(order, must, size, where)
    assert len(chosen) == len(set(chosen)) == min(size, len(names))
    assert set(must) <= set(chosen) <= set(names)
    assert chosen == prefer_devices(names, must, size, where)
    held = {places[name] for name in must}
    best = min(
        len(held.union(others))
        for count in range(5)
        for others in itertools.combinations(range(4), count)
        if len({name for name in names if places[name] in held.union(others)}) >= len(chosen)
    )
    assert len({places[name] for name in chosen}) == best


@pytest.mark.parametrize("nonsense", ["9" * 30, "2147483648", "1_0", "\uff11"])
def test_node_is_unknown_when_its_number_is_impossible(sysfs: Sysfs, nonsense: str) -> None:
    """A number that no node has is nonsense like any other."""
    sysfs.link("dev/char/1:3", sysfs.device("virtual/misc/thing", nonsense))
    assert get_topology_info([NULL], sysfs=sysfs.root) is None


def test_nodes_are_found_when_virtual_devices_go_in_circles(sysfs: Sysfs) -> None:
    """A device that is said to lie below itself is looked at once."""
    bond = sysfs.device("virtual/net/bond0", "1")
    sysfs.link("class/net/bond0", bond)
    sysfs.link("devices/virtual/net/bond0/lower_bond0", bond)
    assert nodes(get_netdev_topology_info("bond0", sysfs=sysfs.root)) == [1]


def test_device_info_keeps_its_nodes_when_they_come_from_a_generator() -> None:
    """The nodes are read once, for the topology and for the container."""
    info = new_device_info(HEALTHY, (api.DeviceSpec(host_path=path) for path in ["/dev/null"]))  # type: ignore[arg-type]
    assert [node.host_path for node in info.nodes] == ["/dev/null"]
