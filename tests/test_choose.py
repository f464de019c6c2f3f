"""Which pool takes which device of a host, and which rule passes over the others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeHost, FakeNetwork
from hypothesis import given, settings
from hypothesis import strategies as st
from support import ROOT

from afxdpd import (
    ConfigError,
    DeviceConfig,
    DriverConfig,
    NetDevice,
    NodeConfig,
    PluginConfig,
    PoolConfig,
    PoolRules,
    PoolScanner,
    Subfunction,
    choose_devices,
    get_plugin_config,
    get_pool_configs,
)


def nic(name: str, driver: str, slot: str, mac: str, **changes: Any) -> NetDevice:
    """A device of hardware."""
    fields: dict[str, Any] = {"bus": "pci", "pci": f"0000:{slot}", **changes}
    return NetDevice(name=name, ifindex=0, driver=driver, mac=f"3c:fd:fe:00:{mac}", **fields)


def virtual(name: str, kind: str, mac: str = "00:00", **changes: Any) -> NetDevice:
    """A device of the kernel's own."""
    return NetDevice(name=name, ifindex=0, driver=kind, mac=f"3c:fd:fe:00:{mac}", **changes)


HOST = {
    device.name: replace(device, ifindex=ifindex)
    for ifindex, device in enumerate(
        (
            NetDevice(name="lo", ifindex=1),
            nic("eno1", "tg3", "01:00.0", "01:00", default_route=True, addressed=True),  # IPv4
            nic("eno2", "tg3", "01:00.1", "01:01"),
            nic("ens1f0", "i40e", "3b:00.0", "10:00"),
            nic("ens1f1", "i40e", "3b:00.1", "10:01", addressed=True),
            nic("ens1f2", "i40e", "3b:00.2", "10:02"),
            nic("ens1f3", "i40e", "3b:00.3", "10:03"),
            nic("ens2f0", "ice", "81:00.0", "20:00"),
            nic("ens2f1", "ice", "81:00.1", "20:01"),
            nic("ens3f0", "i40e", "5e:00.0", "50:00"),
            nic("ens3f1", "i40e", "5e:00.1", "50:01"),
            nic("ens4f0", "i40e", "60:00.0", "40:00", default_route=True),  # IPv6
            nic("ens5f0", "i40e", "61:00.0", "50:00", master=71),
            nic("eth5", "i40e", "62:00.0", "55:00"),
            nic("ens6f0", "ice", "82:00.0", "60:00", master=70),
            nic("ens6f1", "ice", "82:00.1", "60:00", master=70),
            nic("ens7f0sf1", "ice", "", "70:01", bus="auxiliary", pci=""),
            virtual("bond0", "bond", "60:00"),
            virtual("bond0-7", "vlan", "60:00", addressed=True),
            virtual("storage", "vlan", "10:00", addressed=True),  # on ens1f0
            virtual("br0", "bridge", "50:00"),
            virtual("docker0", "bridge", addressed=True),
            virtual("cni0", "bridge", addressed=True),
            virtual("flannel-1", "vxlan", addressed=True),
            virtual("veth0", "veth"),
            virtual("veth1", "veth"),
            virtual("veth2", "veth", master=71),
            virtual("cali5", "veth", peer_elsewhere=True),
            virtual("cnib1", "veth"),
        ),
        start=1,
    )
}
"""A host with one of everything."""

NOT_HERE = "no such device in the host's network namespace"
DEFAULT_ROUTE = "a default route leaves through it"
ENSLAVED = "it is enslaved to a bridge or bond"
LOOPBACK = "the loopback device is never taken"
NOT_PHYSICAL = "it is not physical: only a pool that names it under devices takes it"
SUBFUNCTION = "it is a subfunction: only a pool that names it under devices takes it"
PEER_ELSEWHERE = "its other end is in another network namespace: it is how some pod is connected"
INDIVISIBLE = "cdq: it cannot be divided; the devices of these drivers can: ice"
UNPRIVILEGED = "requiresUnprivilegedBpf: kernel.unprivileged_bpf_disabled is not 0 on this node"


def reserved(prefix: str) -> str:
    """Why a driver rule does not take a device whose name begins so."""
    return f"its name begins with {prefix}: only a pool that names it under devices takes it"


def limit(driver: str, number: int) -> str:
    """Why a driver rule takes no more devices."""
    return f"primary: {driver} has {number} devices in the pool already"


def device(identity: str, **changes: Any) -> DeviceConfig:
    """A device by its name, PCI address or MAC address."""
    key = {0: "name", 2: "pci", 5: "mac"}[identity.count(":")]
    return DeviceConfig(**{key: identity, **changes})


def driver(name: str, *excluded: str, **changes: Any) -> DriverConfig:
    """A driver without these devices."""
    return DriverConfig(name=name, exclude_devices=tuple(map(device, excluded)), **changes)


def pool(name: str, *rules: str | DeviceConfig | DriverConfig | NodeConfig, **changes: Any) -> PoolRules:
    """A pool of named devices, drivers and nodes."""
    rules = tuple(device(rule) if isinstance(rule, str) else rule for rule in rules)
    return PoolRules(
        **{
            "name": name,
            "mode": "primary",
            "devices": tuple(rule for rule in rules if isinstance(rule, DeviceConfig)),
            "drivers": tuple(rule for rule in rules if isinstance(rule, DriverConfig)),
            "nodes": tuple(rule for rule in rules if isinstance(rule, NodeConfig)),
            **changes,
        }
    )


Taken = dict[str, list[str]]
Passed = dict[str, dict[str, str]]


def choose(
    *pools: PoolRules,
    devices: Mapping[str, NetDevice] = HOST,
    allocated: Mapping[str, str] | None = None,
    host: FakeHost | None = None,
    kind_cluster: bool = False,
) -> tuple[Taken, Passed]:
    """What choose_devices says, with names for devices."""
    config = PluginConfig(pools=pools, kind_cluster=kind_cluster)
    found, passed = choose_devices(config, devices, host or FakeHost(), allocated)
    return {each.name: list(each.devices) for each in found}, passed


def only(*names: str) -> dict[str, NetDevice]:
    """Some devices of the host."""
    return {name: HOST[name] for name in names}


def subfunctions(primary: str, first: int, last: int) -> list[str]:
    """Names of subfunctions."""
    return [f"{primary}sf{number}" for number in range(first, last + 1)]


# -- The examples ------------------------------------------------------------------------------------------------------

EXAMPLES: dict[str, tuple[Taken, Passed]] = {
    "primary-by-name": ({"fast": ["ens1f0", "ens1f1"]}, {"fast": {}}),
    "primary-by-pci-and-mac": (
        {"fast": ["ens2f1", "ens1f0"]},
        {"fast": {"storage": "3c:fd:fe:00:10:00 stands for ens1f0, which has the same address"}},
    ),
    "drivers": (
        {"i40e": ["ens1f2", "ens1f3"], "all-ice": ["ens2f0", "ens2f1"]},
        {
            "i40e": {
                "ens1f0": "excludeDevices: ens1f0",
                "ens1f1": "excludeAddressed: it has an IP address",
                "ens3f0": "excludeDevices: 0000:5e:00.0",
                "ens3f1": "excludeDevices: 3c:fd:fe:00:50:01",
                "ens4f0": limit("i40e", 2),
                "ens5f0": limit("i40e", 2),
                "eth5": reserved("eth"),
            },
            "all-ice": {"ens6f0": ENSLAVED, "ens6f1": ENSLAVED, "ens7f0sf1": SUBFUNCTION},
        },
    ),
    "nodes": (
        {"fast": ["ens1f0", "ens2f0"]},
        {
            "fast": {
                "ens2f1": limit("ice", 1),
                "ens6f0": limit("ice", 1),
                "ens6f1": limit("ice", 1),
                "ens7f0sf1": SUBFUNCTION,
            }
        },
    ),
    "cdq": (
        {
            "small": subfunctions("ens2f0", 1, 2),
            "large": [*subfunctions("ens2f0", 3, 5), *subfunctions("ens2f1", 1, 3)],
        },
        {
            "small": {},
            "large": {"ens6f0": limit("ice", 2), "ens6f1": limit("ice", 2), "ens7f0sf1": SUBFUNCTION},
        },
    ),
    "kind": (
        {"kind": ["veth0", "veth1"]},
        {"kind": {"cali5": PEER_ELSEWHERE, "cnib1": reserved("cni"), "veth2": ENSLAVED}},
    ),
    "raw": ({"raw": ["ens1f0"]}, {"raw": {}}),
    "pinned-map": (
        {"pinned": ["ens1f0"], "pinned-and-socket": ["ens1f1"]},
        {"pinned": {}, "pinned-and-socket": {}},
    ),
    "ethtool": (
        {"steered": ["ens2f0", "ens2f1"]},
        {"steered": {"ens6f0": ENSLAVED, "ens6f1": ENSLAVED, "ens7f0sf1": SUBFUNCTION}},
    ),
    "several-pools": (
        {
            "app-a": ["ens2f1"],
            "app-b": [],
            "app-c": subfunctions("ens2f0", 1, 2),
            "rest": ["ens1f0", "ens1f1", "ens1f2", "ens1f3", "ens3f0", "ens3f1"],
        },
        {
            "app-a": {},
            "app-b": {"everything": UNPRIVILEGED},
            "app-c": {
                "ens2f1": "the pool app-a has it",
                "ens6f0": ENSLAVED,
                "ens6f1": ENSLAVED,
                "ens7f0sf1": SUBFUNCTION,
            },
            "rest": {
                "ens2f0": "the pool app-c has it",
                "ens2f1": "the pool app-a has it",
                "ens4f0": DEFAULT_ROUTE,
                "ens5f0": ENSLAVED,
                "eth5": reserved("eth"),
                "ens6f0": ENSLAVED,
                "ens6f1": ENSLAVED,
                "ens7f0sf1": SUBFUNCTION,
            },
        },
    ),
    "development": ({"fuzzed": ["veth0"]}, {"fuzzed": {}}),
}
"""What each example takes on the node node-1, and why not the rest."""


def network() -> FakeNetwork:
    """The host's network."""
    net = FakeNetwork()
    net.show(*HOST.values())
    return net


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_takes_its_devices_when_it_is_read_on_a_host(name: str) -> None:
    """Each example takes what it is an example of, and each device that it passes over has its reason."""
    taken, passed = EXAMPLES[name]
    file = ROOT / "examples" / "configs" / f"{name}.json"
    pools = get_pool_configs(file, network(), FakeHost())
    assert {each.name: list(each.devices) for each in pools} == taken
    config = get_plugin_config(file)
    assert choose(*config.pools, kind_cluster=config.kind_cluster) == (taken, passed)


def test_every_example_is_in_the_table_when_they_are_listed() -> None:
    """No example is without a test."""
    assert {file.stem for file in (ROOT / "examples" / "configs").iterdir()} == EXAMPLES.keys()


@pytest.mark.parametrize(
    ("hostname", "taken"),
    [
        ("node-1", ["ens1f0", "ens2f0"]),
        ("NODE-1", ["ens1f0", "ens2f0"]),
        ("node-2", []),
        ("node-3", ["ens1f0", "ens1f1", "ens1f2", "ens1f3", "ens3f0", "ens3f1"]),
        ("node", ["ens1f0", "ens1f1", "ens1f2", "ens1f3", "ens3f0", "ens3f1"]),
    ],
)
def test_example_takes_other_devices_when_the_node_is_another(hostname: str, taken: list[str]) -> None:
    """A node's lists replace the pool's own, also where they are empty; other nodes have the pool's."""
    file = ROOT / "examples" / "configs" / "nodes.json"
    (found,) = get_pool_configs(file, network(), FakeHost(hostname))
    assert list(found.devices) == taken


def test_pool_config_has_the_options_and_the_devices_when_it_is_made() -> None:
    """A PoolConfig says of a pool what the file says, and has the devices as they are on this host."""
    file = ROOT / "examples" / "configs" / "pinned-map.json"
    first, _ = get_pool_configs(str(file), network(), FakeHost())
    assert first == PoolConfig(
        name="pinned",
        mode="primary",
        uds_server_disable=True,
        bpf_map_pinning_enable=True,
        uid=1500,
        devices=only("ens1f0"),
    )


def test_pool_configs_are_refused_when_the_file_is_wrong(tmp_path: Path) -> None:
    """The function get_pool_configs raises what get_plugin_config raises."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"pools": [{}]}))
    with pytest.raises(ConfigError, match=r"pools\[0\].name: is missing"):
        get_pool_configs(file, network(), FakeHost())


# -- Devices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "identity",
    ["ens1f1", "0000:3b:00.1", "3c:fd:fe:00:10:01", "3C:FD:FE:00:10:01"],
    ids=lambda text: text.replace(":", ""),
)
def test_device_is_taken_when_it_has_the_identity(identity: str) -> None:
    """A name, a PCI address or a MAC address stands for the device that has it; addresses in any case."""
    assert choose(pool("a", identity)) == ({"a": ["ens1f1"]}, {"a": {}})


def test_device_is_taken_when_its_pci_address_is_in_capitals() -> None:
    """PCI addresses are hexadecimal numbers, which can be written in capitals."""
    assert choose(pool("a", "0000:5E:00.0")) == ({"a": ["ens3f0"]}, {"a": {}})


@pytest.mark.parametrize("name", ["eno2", "eth5", "docker0", "cni0", "flannel-1", "cnib1", "veth0", "storage", "cali5"])
def test_device_is_taken_when_it_is_named_although_no_driver_rule_would(name: str) -> None:
    """What a driver rule does not take for its name or its kind is taken where it is named."""
    assert choose(pool("a", name)) == ({"a": [name]}, {"a": {}})
    taken, passed = choose(pool("a", driver(HOST[name].driver)), devices=only(name))
    assert taken == {"a": []}
    assert passed["a"].keys() == {name}


@pytest.mark.parametrize(
    ("identity", "name", "why"),
    [
        ("lo", "lo", LOOPBACK),
        ("eno1", "eno1", DEFAULT_ROUTE),
        ("0000:01:00.0", "eno1", DEFAULT_ROUTE),
        ("3c:fd:fe:00:40:00", "ens4f0", DEFAULT_ROUTE),
        ("ens5f0", "ens5f0", ENSLAVED),
        ("0000:82:00.1", "ens6f1", ENSLAVED),
        ("veth2", "veth2", ENSLAVED),
        ("ens9", "ens9", NOT_HERE),
        ("0000:99:00.0", "0000:99:00.0", NOT_HERE),
        ("3c:fd:fe:00:99:00", "3c:fd:fe:00:99:00", NOT_HERE),
    ],
)
@pytest.mark.parametrize("mode", ["primary", "cdq"])
def test_device_is_never_taken_when_the_host_needs_it(identity: str, name: str, why: str, mode: str) -> None:
    """No identity and no mode gives away what the host needs; the reason names the device, or what was looked for."""
    assert choose(pool("a", identity, mode=mode)) == ({"a": []}, {"a": {name: why}})


def test_hardware_is_taken_when_devices_on_top_of_it_have_its_mac() -> None:
    """A MAC address stands for the hardware, not for a VLAN on it, and the log says so of the VLAN."""
    taken, passed = choose(pool("a", "3c:fd:fe:00:10:00"))
    assert taken == {"a": ["ens1f0"]}
    assert passed == {"a": {"storage": "3c:fd:fe:00:10:00 stands for ens1f0, which has the same address"}}


def test_mac_stands_for_one_device_when_the_hardware_is_in_a_bond() -> None:
    """The bond and the VLAN on it are not taken in place of the hardware, whose reason is told."""
    assert choose(pool("a", "3c:fd:fe:00:60:00")) == (
        {"a": []},
        {
            "a": {
                "ens6f0": ENSLAVED,
                **dict.fromkeys(
                    ("ens6f1", "bond0", "bond0-7"), "3c:fd:fe:00:60:00 stands for ens6f0, which has the same address"
                ),
            }
        },
    )


@pytest.mark.parametrize("rules", [["storage", "3c:fd:fe:00:10:00"], ["3c:fd:fe:00:10:00", "storage"]])
def test_device_is_not_passed_over_when_another_rule_of_the_pool_takes_it(rules: list[str]) -> None:
    """What one rule of a pool leaves to another that takes it is not passed over."""
    taken, passed = choose(pool("a", *rules))
    assert sorted(taken["a"]) == ["ens1f0", "storage"]
    assert "storage" not in passed["a"]


def test_device_is_taken_once_when_several_rules_name_it() -> None:
    """All identities of a device and its driver are one device."""
    rules = pool("a", "ens1f1", "0000:3b:00.1", "3c:fd:fe:00:10:01", driver("i40e"))
    assert choose(rules, devices=only("ens1f1", "ens1f2")) == ({"a": ["ens1f1", "ens1f2"]}, {"a": {}})


# -- Drivers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "taken", "passed"),
    [
        (driver("i40e"), ["ens1f0", "ens1f1", "ens1f2", "ens1f3", "ens3f0", "ens3f1"], {}),
        (driver("i40e", primary=1), ["ens1f0"], dict.fromkeys(["ens1f1", "ens1f2"], limit("i40e", 1))),
        (driver("i40e", primary=10), ["ens1f0", "ens1f1", "ens1f2", "ens1f3", "ens3f0", "ens3f1"], {}),
        (
            driver("i40e", exclude_addressed=True, primary=1),
            ["ens1f0"],
            {"ens1f1": "excludeAddressed: it has an IP address", "ens1f2": limit("i40e", 1)},
        ),
        (
            driver("i40e", "ens1f0", "0000:3B:00.2", "3C:fd:fe:00:10:03", "ens9", primary=2),
            ["ens1f1", "ens3f0"],
            {
                "ens1f0": "excludeDevices: ens1f0",
                "ens1f2": "excludeDevices: 0000:3B:00.2",
                "ens1f3": "excludeDevices: 3C:fd:fe:00:10:03",
                "ens3f1": limit("i40e", 2),
            },
        ),
        (driver("i40e"), None, {"ens4f0": DEFAULT_ROUTE, "ens5f0": ENSLAVED, "eth5": reserved("eth")}),
        (driver("tg3"), [], {"eno1": reserved("eno"), "eno2": reserved("eno")}),
        (driver("bridge"), [], {"br0": NOT_PHYSICAL, "docker0": reserved("docker"), "cni0": reserved("cni")}),
        (driver("vxlan"), [], {"flannel-1": reserved("flannel")}),
        (driver("bond"), [], {"bond0": NOT_PHYSICAL}),
        (driver("vlan"), [], {"bond0-7": NOT_PHYSICAL, "storage": NOT_PHYSICAL}),
        (driver("veth"), [], {"veth0": NOT_PHYSICAL, "cali5": NOT_PHYSICAL}),
        (driver("I40E"), [], {"driver I40E": "no device here has it"}),
        (driver("mlx5_core"), [], {"driver mlx5_core": "no device here has it"}),
    ],
    ids=str,
)
def test_driver_takes_its_devices_when_no_rule_passes_over_them(
    rule: DriverConfig, taken: list[str] | None, passed: dict[str, str]
) -> None:
    """A driver stands for its devices in the order of their names, but for those that a rule excludes."""
    found, why = choose(pool("a", rule))
    assert taken is None or found == {"a": taken}
    assert passed.items() <= why["a"].items()
    of_driver = {device.name for device in HOST.values() if device.driver == rule.name}
    assert {*found["a"], *why["a"]} - {f"driver {rule.name}"} == of_driver


def test_named_device_is_not_counted_when_the_driver_has_a_limit() -> None:
    """A driver's limit is for what the driver rule takes; what is named under devices comes on top."""
    taken, _ = choose(pool("a", "ens1f1", "0000:3b:00.3", driver("i40e", primary=2)))
    assert taken == {"a": ["ens1f1", "ens1f3", "ens1f0", "ens1f2"]}


def test_limit_is_each_drivers_own_when_there_are_several() -> None:
    """One driver's devices do not count for another."""
    taken, _ = choose(pool("a", driver("i40e", primary=1), driver("ice", primary=1)))
    assert taken == {"a": ["ens1f0", "ens2f0"]}


def test_limit_is_for_each_pool_when_two_have_the_same_driver() -> None:
    """The second pool begins where the first one has enough."""
    taken, passed = choose(pool("a", driver("i40e", primary=2)), pool("b", driver("i40e", primary=1)))
    assert taken == {"a": ["ens1f0", "ens1f1"], "b": ["ens1f2"]}
    assert passed["b"]["ens1f0"] == "the pool a has it"


# -- Nodes and hosts ---------------------------------------------------------------------------------------------------


def test_nodes_replace_the_lists_when_the_hostname_is_theirs() -> None:
    """On a node that is named, neither the pool's devices nor its drivers count."""
    rules = pool(
        "a",
        "ens1f0",
        driver("ice"),
        NodeConfig(hostname="Node-1", devices=(device("ens3f0"),)),
        NodeConfig(hostname="node-2", drivers=(driver("i40e", primary=1),)),
        NodeConfig(hostname="node-3"),
    )
    found = {f"node-{number}": choose(rules, host=FakeHost(f"node-{number}"))[0]["a"] for number in range(1, 5)}
    assert found == {
        "node-1": ["ens3f0"],
        "node-2": ["ens1f0"],
        "node-3": [],
        "node-4": ["ens1f0", "ens2f0", "ens2f1"],
    }


def test_pool_takes_nothing_when_only_other_nodes_are_in_it() -> None:
    """A pool that has nothing but nodes takes nothing elsewhere, and says so."""
    rules = pool("a", NodeConfig(hostname="node-2", devices=(device("ens1f0"),)))
    assert choose(rules) == ({"a": []}, {"a": {"everything": "its rules for the node node-1 list nothing"}})


@pytest.mark.parametrize(
    ("allowed", "taken", "passed"),
    [(True, ["ens1f0"], {}), (False, [], {"everything": UNPRIVILEGED})],
)
def test_pool_takes_nothing_when_it_needs_unprivileged_bpf_and_the_node_has_none(
    allowed: bool, taken: list[str], passed: dict[str, str]
) -> None:
    """A pool with requiresUnprivilegedBpf leaves its devices to others where the kernel does not allow that."""
    host = FakeHost()
    host.unprivileged_bpf = allowed
    pools = pool("a", "ens1f0", requires_unprivileged_bpf=True), pool("b", "ens1f0", "ens1f1")
    found, why = choose(*pools, host=host)
    assert found == {"a": taken, "b": [name for name in ("ens1f0", "ens1f1") if name not in taken]}
    assert why["a"] == passed


def test_pool_keeps_what_pods_have_when_the_node_refuses_unprivileged_bpf() -> None:
    """A node that changes its mind takes nothing from running pods."""
    rules = pool("a", "ens1f0", "ens1f1", requires_unprivileged_bpf=True)
    assert choose(rules, allocated={"ens1f0": "a"})[0] == {"a": ["ens1f0"]}


def test_veths_are_physical_when_it_is_a_cluster_of_kind() -> None:
    """With kindCluster a driver rule takes veths, and nothing else that is not physical."""
    rules = pool("a", driver("veth"), driver("bridge"), driver("vlan"))
    assert choose(rules, kind_cluster=True) == (
        {"a": ["veth0", "veth1"]},
        {
            "a": {
                "cali5": PEER_ELSEWHERE,
                "cnib1": reserved("cni"),
                "veth2": ENSLAVED,
                "br0": NOT_PHYSICAL,
                "docker0": reserved("docker"),
                "cni0": reserved("cni"),
                "bond0-7": NOT_PHYSICAL,
                "storage": NOT_PHYSICAL,
            }
        },
    )


# -- Subfunctions ------------------------------------------------------------------------------------------------------


def test_subfunctions_are_numbered_from_1_when_they_are_chosen() -> None:
    """A subfunction has its name, its number and its primary's PCI address before it is made."""
    config = PluginConfig(pools=(pool("a", device("ens2f1", secondary=2), mode="cdq"),))
    ((found,), _) = choose_devices(config, HOST, FakeHost())
    assert found.devices == {
        f"ens2f1sf{number}": Subfunction(primary="ens2f1", pci="0000:81:00.1", number=number) for number in (1, 2)
    }


@pytest.mark.parametrize(
    ("rule", "last"),
    [
        (device("ens2f0"), 64),
        (device("0000:81:00.0", secondary=64), 64),
        (device("3c:fd:fe:00:20:00", secondary=1), 1),
        (driver("ice", primary=1), 64),
        (driver("ice", primary=1, secondary=5), 5),
    ],
    ids=str,
)
def test_primary_gives_so_many_subfunctions_when_the_rule_says_so(rule: DeviceConfig | DriverConfig, last: int) -> None:
    """A rule takes `secondary` subfunctions of a primary, or all 64."""
    assert choose(pool("a", rule, mode="cdq"))[0] == {"a": subfunctions("ens2f0", 1, last)}


def test_primary_is_shared_when_several_pools_divide_it() -> None:
    """Each pool continues with the number after the last one; the pool that comes when 64 are taken gets none."""
    numbers = {"a": 3, "b": 60, "c": 9, "d": 1}
    pools = [pool(name, device("ens2f0", secondary=number), mode="cdq") for name, number in numbers.items()]
    taken, passed = choose(*pools)
    assert taken == {
        "a": subfunctions("ens2f0", 1, 3),
        "b": subfunctions("ens2f0", 4, 63),
        "c": ["ens2f0sf64"],
        "d": [],
    }
    assert passed == {"a": {}, "b": {}, "c": {}, "d": {"ens2f0": "cdq: its 64 subfunctions are in other pools"}}


@pytest.mark.parametrize("modes", [("primary", "cdq"), ("cdq", "primary"), ("primary", "primary")])
def test_primary_is_not_shared_when_a_pool_takes_it_whole(modes: tuple[str, str]) -> None:
    """A whole device and parts of it are not given away both."""
    taken, passed = choose(pool("a", "ens2f0", mode=modes[0]), pool("b", "ens2f0", "ens2f1", mode=modes[1]))
    assert taken["a"]
    assert not any(name.startswith("ens2f0") for name in taken["b"])
    assert passed["b"] == {"ens2f0": "the pool a has it"}


@pytest.mark.parametrize("name", ["ens1f0", "veth0", "ens7f0sf1"])
def test_device_is_passed_over_when_it_cannot_be_divided(name: str) -> None:
    """Only hardware of a driver that knows subfunctions can be divided."""
    assert choose(pool("a", name, mode="cdq")) == ({"a": []}, {"a": {name: INDIVISIBLE}})


def test_first_rule_counts_when_several_rules_of_a_pool_divide_a_device() -> None:
    """What is named under devices is not divided again by the driver rule, and does not count for its limit."""
    rules = pool("a", device("ens2f1", secondary=1), driver("ice", primary=1, secondary=2), mode="cdq")
    assert choose(rules)[0] == {"a": ["ens2f1sf1", "ens2f0sf1", "ens2f0sf2"]}


def test_subfunctions_are_few_when_the_name_leaves_no_room() -> None:
    """Linux allows 15 bytes: a primary with a long name gives those whose names fit, or none, and the log says so."""
    twelve, thirteen = "enp129s0f0np", "enp129s0f0np0"
    devices = {
        name: nic(name, "ice", f"81:00.{number}", f"20:0{number}") for number, name in enumerate((twelve, thirteen))
    }
    taken, passed = choose(pool("a", twelve, thirteen, mode="cdq"), devices=devices)
    assert taken == {"a": subfunctions(twelve, 1, 9)}
    assert passed["a"] == {
        twelve: f"cdq: {twelve}sf10 would be longer than 15 bytes: give {twelve} a shorter name",
        thirteen: f"cdq: {thirteen}sf1 would be longer than 15 bytes: give {thirteen} a shorter name",
    }


def test_subfunction_is_its_pools_when_it_has_been_made() -> None:
    """The network device of a subfunction is passed over by no rule of the pool that it belongs to."""
    made = nic("ens2f0sf1", "ice", "", "20:99", bus="auxiliary", pci="")
    rules = pool("a", driver("ice", secondary=2), mode="cdq")
    for allocated in ({}, {"ens2f0sf1": "a"}):
        taken, passed = choose(rules, devices={**only("ens2f0"), made.name: made}, allocated=allocated)
        assert sorted(taken["a"]) == ["ens2f0sf1", "ens2f0sf2"]
        assert passed == {"a": {}}


# -- Devices that pods have --------------------------------------------------------------------------------------------


def test_limit_counts_devices_when_pods_have_them_elsewhere() -> None:
    """A device that is with a pod still counts, so that the pool does not grow beyond its limit."""
    rules = pool("a", driver("i40e", primary=2))
    here = {name: each for name, each in HOST.items() if name != "ens1f0"}
    assert choose(rules, devices=here, allocated={"ens1f0": "a"})[0] == {"a": ["ens1f1"]}
    assert choose(rules, devices=here, allocated={"ens1f0": "b"})[0] == {"a": ["ens1f1", "ens1f2"]}
    away = {"ens1f0": "a", "ens1f1": "a", "ens1f2": "a"}
    here = {name: each for name, each in HOST.items() if name not in away}
    assert choose(rules, devices=here, allocated=away)[0] == {"a": []}


def test_limit_counts_devices_when_pods_have_them_here() -> None:
    """A device that a pod has before the CNI moves it counts as well, wherever it is in the order of names."""
    rules = pool("a", driver("i40e", primary=2))
    assert choose(rules, allocated={"ens3f1": "a"})[0] == {"a": ["ens3f1", "ens1f0"]}


def test_named_device_counts_for_no_driver_when_a_pod_has_it_elsewhere() -> None:
    """What is named under devices comes on top of a driver's limit, also while it is away."""
    here = {name: each for name, each in HOST.items() if name != "ens1f0"}
    rules = pool("a", "ens1f0", driver("i40e", primary=1))
    assert choose(rules, devices=here, allocated={"ens1f0": "a"}) == ({"a": ["ens1f1"]}, {"a": choose(rules)[1]["a"]})


SEEN_BEFORE = [
    pytest.param(pool("a", driver("i40e", primary=1), driver("ice", primary=1)), "ens1f0", "ens2f0", id="driver"),
    pytest.param(pool("a", "0000:3b:00.0", driver("i40e", primary=1)), "ens1f0", "ens1f1", id="pci"),
    pytest.param(pool("a", "3c:fd:fe:00:10:00", driver("i40e", primary=1)), "ens1f0", "ens1f1", id="mac"),
]


@pytest.mark.parametrize(("rules", "given_away", "other"), SEEN_BEFORE)
def test_other_devices_stay_when_one_goes_to_its_pod(
    rules: PoolRules, given_away: str, other: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A device that moves into a pod costs the pool no other one: its driver and addresses are known from before."""
    allocated: dict[str, str] = {}
    host = FakeHost()
    scanner = PoolScanner(PluginConfig(pools=(rules,)), network(), host, allocated=lambda: allocated, sysfs=tmp_path)
    assert list(scanner.tree(HOST)["a"]) == [given_away, other]
    caplog.set_level("INFO", "afxdpd")
    allocated[given_away] = "a"
    here = {name: each for name, each in HOST.items() if name != given_away}
    for _ in range(2):
        assert list(scanner.tree(here)["a"]) == [other]
    assert [record.getMessage() for record in caplog.records] == []
    allocated.clear()
    assert list(scanner.tree(HOST)["a"]) == [given_away, other]


@pytest.mark.parametrize(
    "pools",
    [
        [pool("b", "ens1f0", "ens1f1"), pool("a", "ens1f2")],
        [pool("b", driver("i40e", primary=1)), pool("a", driver("ice", primary=1))],
        [pool("a", driver("i40e", "ens1f0", primary=1))],
        [pool("a", "ens2f1", mode="cdq"), pool("b", "ens1f0")],
        [pool("b", "ens1f0", mode="cdq"), pool("a", NodeConfig(hostname="node-1"), "ens1f0")],
    ],
    ids=["other", "driver", "excluded", "mode", "node"],
)
def test_device_stays_with_its_pool_when_the_configuration_has_changed(pools: list[PoolRules]) -> None:
    """A device that a pod has from a pool stays there, whatever that pool and the others would take now."""
    taken, passed = choose(*pools, allocated={"ens1f0": "a"})
    assert "ens1f0" in taken["a"]
    assert "ens1f0" not in taken.get("b", [])
    if "ens1f0" in passed.get("b", {}):
        assert passed["b"]["ens1f0"] in ("a pod has it from the pool a", "the pool a has it")


def test_device_is_nobodys_when_its_pool_is_configured_no_more() -> None:
    """A device that a pod has from a pool that is gone is taken by no other, as a whole or in parts."""
    for mode in ("primary", "cdq"):
        taken, passed = choose(pool("b", "ens2f0", mode=mode), allocated={"ens2f0": "a"})
        assert (taken, passed) == ({"b": []}, {"b": {"ens2f0": "a pod has it from the pool a"}})


def test_device_stays_with_its_pool_when_the_host_begins_to_use_it() -> None:
    """A default route or a bridge takes nothing from a pod."""
    devices = {
        name: nic(name, "i40e", "3b:00.0", "10:00", default_route=True, master=9) for name in ("ens1f0", "ens1f1")
    }
    assert choose(pool("a", "ens1f0", "ens1f1"), devices=devices, allocated={"ens1f0": "a"}) == (
        {"a": ["ens1f0"]},
        {"a": {"ens1f1": DEFAULT_ROUTE}},
    )


def test_subfunctions_keep_their_numbers_when_the_pools_change() -> None:
    """A subfunction that a pod has stays in its pool; another pool whose numbers begin earlier leaves it out."""
    pools = pool("a", device("ens2f0", secondary=4), mode="cdq"), pool("b", device("ens2f0", secondary=2), mode="cdq")
    taken, _ = choose(*pools, allocated={"ens2f0sf2": "b", "ens2f0sf3": "old"})
    assert taken == {"a": ["ens2f0sf1", "ens2f0sf4"], "b": ["ens2f0sf5", "ens2f0sf6"]}


@pytest.mark.parametrize("owner", ["a", "b", "old"])
def test_device_is_not_taken_whole_when_a_pod_has_a_part_of_it(owner: str) -> None:
    """A primary whose subfunction is with a pod is not given away until that is released."""
    rules = pool("a", "ens2f0", "ens2f1"), pool("b", "ens2f0", mode="cdq")
    taken, passed = choose(*rules, allocated={"ens2f0sf7": owner})
    assert taken["a"] == ["ens2f1"]
    assert passed["a"] == {"ens2f0": f"a pod has ens2f0sf7 of it from the pool {owner}"}


# -- Whatever the configuration is -------------------------------------------------------------------------------------

IDENTITIES = sorted({text for each in HOST.values() for text in (each.name, each.pci, each.mac) if text} | {"ens9"})
DRIVERS = sorted({each.driver for each in HOST.values() if each.driver})
POOLS = ("a", "b", "c")

some_devices = st.builds(device, st.sampled_from(IDENTITIES), secondary=st.sampled_from([0, 1, 3, 64]))
some_drivers = st.builds(
    lambda name, excluded, **changes: driver(name, *excluded, **changes),
    st.sampled_from([*DRIVERS, "i40e", "ice", "ice", "veth"]),
    st.lists(st.sampled_from(IDENTITIES), max_size=2),
    primary=st.integers(0, 3),
    secondary=st.sampled_from([0, 2, 40]),
    exclude_addressed=st.booleans(),
)
lists = {
    "devices": st.lists(some_devices, max_size=3).map(tuple),
    "drivers": st.lists(some_drivers, max_size=2).map(tuple),
}
some_pools = st.lists(
    st.builds(
        PoolRules,
        name=st.just(""),
        mode=st.sampled_from(["primary", "primary", "cdq"]),
        requires_unprivileged_bpf=st.sampled_from([False, False, False, True]),
        nodes=st.lists(st.builds(NodeConfig, hostname=st.sampled_from(["node-1", "node-2"]), **lists), max_size=1).map(
            tuple
        ),
        **lists,
    ),
    min_size=1,
    max_size=3,
).map(lambda pools: tuple(renamed(each, name) for each, name in zip(pools, POOLS, strict=False)))
some_configs = st.builds(PluginConfig, pools=some_pools, kind_cluster=st.booleans())
some_allocated = st.dictionaries(
    st.sampled_from([*HOST, "ens9", "ens2f0sf1", "ens2f0sf3", "ens2f1sf2"]),
    st.sampled_from([*POOLS, "old"]),
    max_size=3,
)


def renamed(rules: PoolRules, name: str) -> PoolRules:
    """The same pool by another name."""
    return PoolRules(**{**{key: getattr(rules, key) for key in rules.__struct_fields__}, "name": name})


@settings(max_examples=500, deadline=None)
@given(
    config=some_configs,
    order=st.permutations(list(HOST)),
    allocated=some_allocated.flatmap(lambda found: st.permutations(list(found.items()))),
)
def test_rules_hold_when_the_configuration_is_any(
    config: PluginConfig, order: list[str], allocated: list[tuple[str, str]]
) -> None:
    """The order in which the kernel lists devices changes nothing, no device is in two pools, none is unexplained."""
    held = dict(allocated)
    pools, passed = choose_devices(config, HOST, FakeHost(), dict(sorted(allocated)))
    again, passed_again = choose_devices(config, {name: HOST[name] for name in order}, FakeHost(), held)
    assert [list(each.devices.items()) for each in again] == [list(each.devices.items()) for each in pools]
    assert {name: list(why.items()) for name, why in passed_again.items()} == {
        name: list(why.items()) for name, why in passed.items()
    }

    everything = [name for each in pools for name in each.devices]
    assert len(everything) == len(set(everything))
    whole = {name for each in pools for name, found in each.devices.items() if isinstance(found, NetDevice)}
    divided = {found.primary for each in pools for found in each.devices.values() if isinstance(found, Subfunction)}
    assert not whole & divided
    for name in whole - held.keys():
        assert name != "lo"
        assert not HOST[name].default_route
        assert not HOST[name].master

    for each, rules in zip(pools, config.pools, strict=True):
        why = passed[each.name]
        assert not each.devices.keys() & why.keys()
        assert {name for name, owner in held.items() if owner == each.name and name in HOST} <= each.devices.keys()
        assert all(held.get(name, each.name) == each.name for name in each.devices)
        if why.keys() == {"everything"}:
            continue
        _, drivers = rules.on_node("node-1")
        for found in HOST.values():
            if found.driver in {rule.name for rule in drivers}:
                parts = {part.primary for part in each.devices.values() if isinstance(part, Subfunction)}
                assert found.name in {*each.devices, *why, *parts}
