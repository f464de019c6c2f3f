"""The configuration file: what is taken, what is refused and in which words, and the schema of it all."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from support import PROGRAM, ROOT

import afxdpd
from afxdpd import (
    ConfigError,
    DeviceConfig,
    DriverConfig,
    NodeConfig,
    Paths,
    PluginConfig,
    PoolConfig,
    PoolOptions,
    PoolRules,
    get_config_schema,
    get_plugin_config,
)

Json = dict[str, Any]

POOL_NAME = "1 to 63 letters, digits, '-', '_' and '.', the first and the last a letter or digit"
DEVICE_NAME = "1 to 50 letters, digits, '-' and '_'"
PCI = "a PCI address such as '0000:81:00.1'"
MAC = "a MAC address"
MODES = "'primary' or 'cdq'"
FLAG = "true or false"
SECONDARY = "0 (unset) to 64"
PRIMARY = "0 (all) to 10"
HOSTNAME = "1 to 63 letters, digits and '-'"
UDS_TIMEOUT = "-1 (never), 0 (30 seconds) or 30 to 300 seconds"
UID = "0, or 1000 to 256000"
ETHTOOL = "an option of ethtool with -device-, of letters, digits, spaces and '-:./'"
LOG_FILE = "letters, digits, '-' and '_' with .log or .txt at the end"
LEVELS = "'error', 'warning', 'info' or 'debug'"

EVERYTHING: Json = {
    "pools": [
        {
            "name": "blue",
            "mode": "primary",
            "devices": [{"name": "ens1f0", "secondary": 1}, {"pci": "0000:81:00.1"}, {"mac": "3C:fd:fe:00:10:02"}],
            "drivers": [
                {
                    "name": "i40e",
                    "primary": 2,
                    "secondary": 3,
                    "excludeDevices": [{"name": "ens1f1"}, {"pci": "0000:5E:00.0"}, {"mac": "3c:fd:fe:00:10:03"}],
                    "excludeAddressed": True,
                },
                {"name": "ice"},
            ],
            "nodes": [
                {
                    "hostname": "node-2",
                    "devices": [{"name": "ens2f0"}],
                    "drivers": [{"name": "ice", "excludeDevices": [{"name": "ens2f1"}]}],
                },
                {"hostname": "node-3"},
            ],
            "udsServerDisable": False,
            "bpfMapPinningEnable": True,
            "udsTimeout": 60,
            "udsFuzz": True,
            "requiresUnprivilegedBpf": True,
            "uid": 1500,
            "ethtoolCmds": ["-K -device- gro off", "-N -device- flow-type udp4 dst-ip -ip- action 2"],
        },
        {"name": "red", "mode": "cdq", "devices": [{"mac": "3c:fd:fe:00:20:00", "secondary": 64}]},
    ],
    "logFile": "afxdp-dp.log",
    "logLevel": "debug",
    "kindCluster": False,
}
"""A file with every key; the first element of each list has all that an element can have, but for devices."""


def pool(*without: str, **keys: Any) -> Json:
    """A pool that is right, but for these keys."""
    content = {"name": "blue", "mode": "primary", "devices": [{"name": "veth0"}], **keys}
    return {key: value for key, value in content.items() if key not in without}


def plugin(*pools: object, **keys: Any) -> Json:
    """A whole file."""
    return {"pools": list(pools), **keys}


def place(content: Any, path: str) -> tuple[Any, Any]:
    """Where a path such as ``pools[0].name`` leads to: the object or list, and the key or index in it."""
    *steps, last = (int(index) if index else key for index, key in re.findall(r"\[(\d+)\]|([^.\[]+)", path))
    for step in steps:
        content = content[step]
    return content, last


def changed(path: str, value: object) -> Json:
    """EVERYTHING with another value at a path."""
    content = copy.deepcopy(EVERYTHING)
    container, key = place(content, path)
    container[key] = value
    return content


def without(path: str) -> Json:
    """EVERYTHING without what is at a path."""
    content = copy.deepcopy(EVERYTHING)
    container, key = place(content, path)
    del container[key]
    return content


def write(directory: Path, content: object) -> Path:
    """Writes a file: bytes as they are, anything else as JSON."""
    file = directory / "config.json"
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return file


def errors_of(file: Path) -> list[str]:
    """What is wrong with a file, each line without the file's name in front."""
    with pytest.raises(ConfigError) as caught:
        get_plugin_config(file)
    assert str(caught.value) == "\n".join(caught.value.errors)
    assert all(line.startswith(f"{file}: ") for line in caught.value.errors)
    return [line.removeprefix(f"{file}: ") for line in caught.value.errors]


# -- What is taken -----------------------------------------------------------------------------------------------------


def test_config_has_every_value_when_the_file_gives_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each key of the file arrives in the field of its name, and none is warned of."""
    assert get_plugin_config(write(tmp_path, EVERYTHING)) == PluginConfig(
        pools=(
            PoolRules(
                name="blue",
                mode="primary",
                devices=(
                    DeviceConfig(name="ens1f0", secondary=1),
                    DeviceConfig(pci="0000:81:00.1"),
                    DeviceConfig(mac="3C:fd:fe:00:10:02"),
                ),
                drivers=(
                    DriverConfig(
                        name="i40e",
                        primary=2,
                        secondary=3,
                        exclude_devices=(
                            DeviceConfig(name="ens1f1"),
                            DeviceConfig(pci="0000:5E:00.0"),
                            DeviceConfig(mac="3c:fd:fe:00:10:03"),
                        ),
                        exclude_addressed=True,
                    ),
                    DriverConfig(name="ice"),
                ),
                nodes=(
                    NodeConfig(
                        hostname="node-2",
                        devices=(DeviceConfig(name="ens2f0"),),
                        drivers=(DriverConfig(name="ice", exclude_devices=(DeviceConfig(name="ens2f1"),)),),
                    ),
                    NodeConfig(hostname="node-3"),
                ),
                uds_server_disable=False,
                bpf_map_pinning_enable=True,
                uds_timeout=60,
                uds_fuzz=True,
                requires_unprivileged_bpf=True,
                uid=1500,
                ethtool_cmds=("-K -device- gro off", "-N -device- flow-type udp4 dst-ip -ip- action 2"),
            ),
            PoolRules(name="red", mode="cdq", devices=(DeviceConfig(mac="3c:fd:fe:00:20:00", secondary=64),)),
        ),
        log_file="afxdp-dp.log",
        log_level="debug",
        kind_cluster=False,
    )
    assert not caplog.records


OPTIONAL = {
    "pools[0].devices[0].secondary": 0,
    "pools[0].drivers[0].primary": 0,
    "pools[0].drivers[0].secondary": 0,
    "pools[0].drivers[0].excludeDevices": (),
    "pools[0].drivers[0].excludeAddressed": False,
    "pools[0].nodes[0].devices": (),
    "pools[0].nodes[0].drivers": (),
    "pools[0].devices": (),
    "pools[0].drivers": (),
    "pools[0].nodes": (),
    "pools[0].udsServerDisable": False,
    "pools[0].bpfMapPinningEnable": False,
    "pools[0].udsTimeout": 0,
    "pools[0].udsFuzz": False,
    "pools[0].requiresUnprivilegedBpf": False,
    "pools[0].uid": 0,
    "pools[0].ethtoolCmds": (),
    "logFile": "",
    "logLevel": "info",
    "kindCluster": False,
}
"""Every key that can be left out, but for a device's identities, and what it then stands for."""


def value_at(config: PluginConfig, path: str) -> object:
    """What a configuration has for a path in the file."""
    value: Any = config
    for index, key in re.findall(r"\[(\d+)\]|([^.\[]+)", path):
        value = value[int(index)] if index else getattr(value, re.sub(r"[A-Z]", lambda c: f"_{c[0].lower()}", key))
    return value


@pytest.mark.parametrize(("path", "default"), OPTIONAL.items(), ids=str)
def test_config_has_the_default_when_a_key_says_nothing(path: str, default: object, tmp_path: Path) -> None:
    """An optional key that is left out or null, or a text that is empty, stands for its default."""
    nothing = [None, ""] if isinstance(default, str) else [None]
    for content in (without(path), *(changed(path, value) for value in nothing)):
        assert value_at(get_plugin_config(write(tmp_path, content)), path) == default


@pytest.mark.parametrize("nothing", [None, ""])
def test_device_has_one_identity_when_the_others_say_nothing(nothing: str | None, tmp_path: Path) -> None:
    """Identities that are null or empty do not count: a program that writes all keys writes them so."""
    devices = [{"name": "a", "pci": nothing, "mac": nothing}, {"name": nothing, "mac": "3c:fd:fe:00:10:02"}]
    (config,) = get_plugin_config(write(tmp_path, plugin(pool(devices=devices)))).pools
    assert config.devices == (DeviceConfig(name="a"), DeviceConfig(mac="3c:fd:fe:00:10:02"))


def test_config_is_empty_when_there_are_no_pools(tmp_path: Path) -> None:
    """A file without any pool is right, as on a node that has nothing to give yet."""
    assert get_plugin_config(write(tmp_path, plugin())).pools == ()


@pytest.mark.parametrize("change", [str.upper, str.lower, str.title, str.swapcase])
def test_keys_are_known_when_their_case_differs(change: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Keys are matched without regard to case, at every level."""

    def rewritten(content: Any) -> Any:
        match content:
            case dict():
                return {change(key): rewritten(value) for key, value in content.items()}
            case list():
                return [rewritten(item) for item in content]
            case _:
                return content

    expected = get_plugin_config(write(tmp_path, EVERYTHING))
    assert get_plugin_config(write(tmp_path, rewritten(EVERYTHING))) == expected
    assert not caplog.records


LIMITS: dict[str, list[object]] = {
    "pools[0].name": ["a", "A.b-c_9", "x" * 63],
    "pools[0].devices[0].name": ["-", "_", "x" * 50],
    "pools[0].devices[1].pci": ["0000:00:00.0", "ABCD:ef:Fe.7"],
    "pools[0].devices[2].mac": ["00:00:00:00:00:00", "FF:ff:Ff:fF:AB:cd"],
    "pools[0].devices[0].secondary": [0, 1, 64],
    "pools[0].drivers[0].name": ["-", "x" * 50],
    "pools[0].drivers[0].primary": [0, 1, 10],
    "pools[0].drivers[0].secondary": [0, 1, 64],
    "pools[0].nodes[0].hostname": ["-", "Node-1", "x" * 63],
    "pools[0].nodes[0].devices": [[]],
    "pools[0].udsTimeout": [-1, 0, 30, 300],
    "pools[0].uid": [0, 1000, 256000],
    "pools[0].ethtoolCmds[0]": ["-a -", " -K  -device- ", "ethtool -K -device- gro off", "--set-ring -device- rx 1"],
    "pools[1].mode": ["primary", "cdq"],
    "pools": [[]],
    "logFile": ["-.log", "_.txt", f"{'x' * 200}.log"],
    "logLevel": ["error", "warning", "info", "debug"],
}


@pytest.mark.parametrize(
    ("path", "value"),
    [(path, value) for path, values in LIMITS.items() for value in values],
    ids=lambda value: str(value)[:40],
)
def test_file_is_taken_when_a_value_is_at_its_limit(path: str, value: object, tmp_path: Path) -> None:
    """The first and the last value of each range belong to it, and to the schema's, too."""
    content = changed(path, value)
    expected = tuple(value) if isinstance(value, list) else value
    assert value_at(get_plugin_config(write(tmp_path, content)), path) == expected
    SCHEMA.validate(content)


def test_file_is_read_when_it_begins_with_a_byte_order_mark(tmp_path: Path) -> None:
    """Editors that write a byte order mark do no harm."""
    assert get_plugin_config(write(tmp_path, b'\xef\xbb\xbf{"pools": []}')) == PluginConfig(pools=())


# -- What is refused ---------------------------------------------------------------------------------------------------

SCHEMA = Draft202012Validator(get_config_schema())


class Row(NamedTuple):
    """A file that is refused.

    Attributes:
        schema: Whether a JSON Schema can refuse it.
    """

    title: str
    content: object
    errors: list[str]
    schema: bool = True


def shown(value: object) -> str:
    """A value as an error shows it."""
    return ascii(value) if isinstance(value, str) else json.dumps(value)


def wrong(path: str, words: str, *values: object, schema: bool = True) -> Iterator[Row]:
    """Values that break the rule of what is at a path."""
    for value in values:
        error = f"{path}: not {words}: {shown(value)}"
        yield Row(f"{path}={value!r:.20}", changed(path, value), [error], schema)


def integers(path: str, words: str, *values: object) -> Iterator[Row]:
    """The same for a whole number: what is none, besides these."""
    yield from wrong(path, words, *values, 10**30, 1.5, "1", True, False, [1], {"a": 1})
    yield from wrong(path, words, 1.0, 1e3, schema=False)  # to JSON Schema a whole number


def names(path: str, words: str, *values: object) -> Iterator[Row]:
    """The same for a text."""
    yield from wrong(path, words, *values, 5, 0, 1.5, True, False, ["a"], {"a": 1}, [], {})


BAD_NAMES = ("a b", "a/b", "a:b", "a'b", "ä", "x" * 51, "veth0\n", "\nveth0", "a.b", "..", "\ud800", "\x00")
BAD_PCI = ("81:00.1", "0000:81:00", "0000:81:00.8", "0000:81:0.1", "0000-81-00.1", "000g:81:00.1", "0000:81:00.1\n")
BAD_MAC = (
    "98:03:9b",
    "98:03:9b:00:00",
    "98:03:9b:00:00:00:00",
    "98-03-9b-00-00-00",
    "9803.9b00.0000",
    "98:03:9b:0:0:0",
)
NOTHING_TAKEN = "takes nothing: needs devices, drivers or nodes"
ONE_IDENTITY = "needs exactly one of name, pci and mac"

ROWS = [
    # What the file has in all.
    Row("file list", [], ["the file: not an object: []"]),
    Row("file null", b"null", ["the file: not an object: null"]),
    Row("file text", b'"pools"', ["the file: not an object: 'pools'"]),
    Row("file number", b"7", ["the file: not an object: 7"]),
    Row("no pools", {}, ["pools: is missing"]),
    Row("pools null", {"pools": None}, ["pools: is missing"]),
    *names(
        "logFile", LOG_FILE, "afxdp", ".log", "a.logs", "a.log.1", "a b.log", "../a.log", "/a.log", "a.log\n", "a.LOG"
    ),
    *names("logLevel", LEVELS, "INFO", "warn", "loud", "info "),
    *wrong("kindCluster", FLAG, 0, 1, "true", "yes", [], {}),
    Row("not a number", b'{"pools": [], "logLevel": NaN}', [f"logLevel: not {LEVELS}: NaN"], schema=False),
    # Lists and objects.
    *(
        row
        for path in (
            "pools",
            "pools[0].devices",
            "pools[0].drivers",
            "pools[0].nodes",
            "pools[0].ethtoolCmds",
            "pools[0].drivers[0].excludeDevices",
            "pools[0].nodes[0].devices",
            "pools[0].nodes[0].drivers",
            "pools[0].nodes[0].drivers[0].excludeDevices",
        )
        for row in wrong(path, "a list", {}, {"name": "a"}, "a", 5, 0, True, False)
    ),
    *(
        row
        for path in (
            "pools[0]",
            "pools[0].devices[0]",
            "pools[0].drivers[0]",
            "pools[0].nodes[0]",
            "pools[0].drivers[0].excludeDevices[0]",
            "pools[0].nodes[0].devices[0]",
        )
        for row in wrong(path, "an object", [], ["a"], "a", "", 5, True, None)
    ),
    # A pool.
    Row("name missing", without("pools[0].name"), ["pools[0].name: is missing"]),
    Row("name null", changed("pools[0].name", None), ["pools[0].name: is missing"]),
    *names(
        "pools[0].name", POOL_NAME, "", "-a", "a-", ".a", "a.", "_a", "a_", "a b", "a/b", "ä", "x" * 64, "a\n", "\na"
    ),
    Row("mode missing", without("pools[0].mode"), ["pools[0].mode: is missing"]),
    Row("mode null", changed("pools[0].mode", None), ["pools[0].mode: is missing"]),
    *names("pools[0].mode", MODES, "", "Primary", "CDQ", "primary ", "both"),
    *integers("pools[0].udsTimeout", UDS_TIMEOUT, -2, 1, 29, 301, 30_000),
    *integers("pools[0].uid", UID, -1, 1, 999, 256001),
    *wrong("pools[0].udsServerDisable", FLAG, 0, 1, "true", [], {}),
    *wrong("pools[0].bpfMapPinningEnable", FLAG, 0, 1, "false", [], {}),
    *wrong("pools[0].udsFuzz", FLAG, 0, 1, "no", [], {}),
    *wrong("pools[0].requiresUnprivilegedBpf", FLAG, 0, 1, "yes", [], {}),
    *names(
        "pools[0].ethtoolCmds[0]",
        ETHTOOL,
        "",
        "-K -device- a;b",
        "-K -device- $a",
        "-K -device-\n",
        "-K\t-device-",
        "ä",
    ),
    *wrong("pools[0].ethtoolCmds[1]", ETHTOOL, " ", "-K", "gro off", "ethtool", "ethtool -K", schema=False),
    *wrong("pools[0].ethtoolCmds[1]", ETHTOOL, None),
    Row("no lists", plugin(pool("devices")), [f"pools[0]: {NOTHING_TAKEN}"]),
    Row("empty lists", plugin(pool(devices=[], drivers=[], nodes=[])), [f"pools[0]: {NOTHING_TAKEN}"]),
    Row("no list but null", plugin(pool(devices=None)), [f"pools[0]: {NOTHING_TAKEN}"]),
    Row(
        "cdq and ethtool",
        changed("pools[0].mode", "cdq"),
        ["pools[0].ethtoolCmds: not in cdq mode"],
    ),
    # A device, wherever it stands.
    *names("pools[0].devices[0].name", DEVICE_NAME, *BAD_NAMES),
    *names("pools[0].devices[1].pci", PCI, *BAD_PCI, "0000:81:00.1 ", "ens1f0"),
    *names("pools[0].devices[2].mac", MAC, *BAD_MAC, "98:03:9b:00:00:0g", "98:03:9b:00:00:00\n"),
    Row(
        "the documented example",
        changed("pools[1].devices[0].mac", "98:03:9b"),
        ["pools[1].devices[0].mac: not a MAC address: '98:03:9b'"],
    ),
    *integers("pools[0].devices[0].secondary", SECONDARY, -1, 65),
    *names("pools[0].drivers[0].excludeDevices[0].name", DEVICE_NAME, "a b"),
    *names("pools[0].drivers[0].excludeDevices[1].pci", PCI, "81:00.1"),
    *names("pools[0].drivers[0].excludeDevices[2].mac", MAC, "98:03:9b"),
    *names("pools[0].nodes[0].devices[0].name", DEVICE_NAME, "a b"),
    *names("pools[0].nodes[0].drivers[0].excludeDevices[0].name", DEVICE_NAME, "a b"),
    *(
        Row(f"identity {identity}", plugin(pool(devices=[identity])), [f"pools[0].devices[0]: {ONE_IDENTITY}"])
        for identity in (
            {},
            {"secondary": 1},
            {"name": ""},
            {"name": None, "pci": None},
            {"name": "a", "pci": "0000:81:00.1"},
            {"name": "a", "mac": "3c:fd:fe:00:10:02"},
            {"pci": "0000:81:00.1", "mac": "3c:fd:fe:00:10:02"},
            {"name": "a", "pci": "0000:81:00.1", "mac": "3c:fd:fe:00:10:02"},
        )
    ),
    Row(
        "excluded identity",
        changed("pools[0].drivers[0].excludeDevices[1]", {"secondary": 3}),
        [f"pools[0].drivers[0].excludeDevices[1]: {ONE_IDENTITY}"],
    ),
    # A driver.
    Row("driver missing", without("pools[0].drivers[0].name"), ["pools[0].drivers[0].name: is missing"]),
    *names("pools[0].drivers[0].name", DEVICE_NAME, "", *BAD_NAMES),
    *integers("pools[0].drivers[0].primary", PRIMARY, -1, 11),
    *integers("pools[0].drivers[0].secondary", SECONDARY, -1, 65),
    *wrong("pools[0].drivers[0].excludeAddressed", FLAG, 0, 1, "true", [], {}),
    *names("pools[0].nodes[0].drivers[0].name", DEVICE_NAME, ""),
    # A node.
    Row("hostname missing", without("pools[0].nodes[0].hostname"), ["pools[0].nodes[0].hostname: is missing"]),
    *names("pools[0].nodes[0].hostname", HOSTNAME, "", "a.b", "a_b", "a b", "x" * 64, "ä", "node-1\n"),
    Row(
        "hostname twice",
        changed("pools[0].nodes[1].hostname", "NODE-2"),
        ["pools[0].nodes[1].hostname: the same as nodes[0].hostname: 'node-2'"],
        schema=False,
    ),
    # All pools.
    Row(
        "kind with two pools",
        changed("kindCluster", True),
        ["kindCluster: with it there can be one pool, not 2"],
    ),
]


@pytest.mark.parametrize(("content", "errors"), [pytest.param(row.content, row.errors, id=row.title) for row in ROWS])
def test_file_is_refused_when_it_breaks_a_rule(content: object, errors: list[str], tmp_path: Path) -> None:
    """Whatever breaks a rule is named by its path in the file, with the rule and the value."""
    assert errors_of(write(tmp_path, content)) == errors


def test_every_error_is_told_when_there_are_several(tmp_path: Path) -> None:
    """One reading finds all that is wrong, in the order of the file."""
    content = plugin(
        pool(name="-", mode="both", udsTimeout=5, uid=7),
        7,
        pool("mode", "name", devices=[{"name": "veth0"}, {"name": "a b", "mac": 5}, {"pci": "81:00"}, {}]),
        pool(name="red", devices=[], nodes=[{"hostname": "a.b", "drivers": [{"primary": 11}]}], drivers=True, uid=2),
        pool(name="grey", devices=[], ethtoolCmds=["", "-K"]),
        kindCluster="no",
        logLevel="loud",
        logFile="a",
    )
    assert errors_of(write(tmp_path, content)) == [
        f"pools[0].name: not {POOL_NAME}: '-'",
        f"pools[0].mode: not {MODES}: 'both'",
        f"pools[0].udsTimeout: not {UDS_TIMEOUT}: 5",
        f"pools[0].uid: not {UID}: 7",
        "pools[1]: not an object: 7",
        f"pools[2].devices[1].name: not {DEVICE_NAME}: 'a b'",
        f"pools[2].devices[1].mac: not {MAC}: 5",
        f"pools[2].devices[1]: {ONE_IDENTITY}",
        f"pools[2].devices[2].pci: not {PCI}: '81:00'",
        f"pools[2].devices[3]: {ONE_IDENTITY}",
        "pools[2].name: is missing",
        "pools[2].mode: is missing",
        f"pools[3].nodes[0].hostname: not {HOSTNAME}: 'a.b'",
        f"pools[3].nodes[0].drivers[0].primary: not {PRIMARY}: 11",
        "pools[3].nodes[0].drivers[0].name: is missing",
        "pools[3].drivers: not a list: true",
        f"pools[3].uid: not {UID}: 2",
        f"pools[4].ethtoolCmds[0]: not {ETHTOOL}: ''",
        f"pools[4].ethtoolCmds[1]: not {ETHTOOL}: '-K'",
        f"pools[4]: {NOTHING_TAKEN}",
        "kindCluster: not true or false: 'no'",
        f"logLevel: not {LEVELS}: 'loud'",
        f"logFile: not {LOG_FILE}: 'a'",
    ]


def test_pools_are_refused_when_they_share_a_name(tmp_path: Path) -> None:
    """Each pool has a name of its own; the later ones are at fault."""
    assert errors_of(write(tmp_path, plugin(pool(), pool(name="red"), pool(), pool()))) == [
        "pools[2].name: 'blue' has the name of pools[0].name: 'blue'",
        "pools[3].name: 'blue' has the name of pools[0].name: 'blue'",
    ]


@pytest.mark.parametrize(("one", "other"), [("a-b", "a.b"), ("a_b", "a-b"), ("pool", "POOL")])
def test_pools_are_refused_when_they_share_an_environment_variable(one: str, other: str, tmp_path: Path) -> None:
    """Two names that would give a container the same variable do not go together."""
    variable = "AFXDP_DEVICES_" + one.replace("-", "_").upper()
    assert errors_of(write(tmp_path, plugin(pool(name=one), pool(name=other)))) == [
        f"pools[1].name: {other!r} has the environment variable of pools[0].name: {variable!r}"
    ]


def test_shared_names_are_told_when_the_pools_have_other_errors(tmp_path: Path) -> None:
    """What is wrong between pools, or nodes, is found whatever else is wrong in them."""
    nodes = [{"hostname": "node-1", "devices": [{}]}, {"hostname": "node-1"}]
    content = plugin(pool(uid=5), pool(nodes=nodes), pool("devices", name="BLUE"))
    assert errors_of(write(tmp_path, content)) == [
        f"pools[0].uid: not {UID}: 5",
        f"pools[1].nodes[0].devices[0]: {ONE_IDENTITY}",
        "pools[1].nodes[1].hostname: the same as nodes[0].hostname: 'node-1'",
        f"pools[2]: {NOTHING_TAKEN}",
        "pools[1].name: 'blue' has the name of pools[0].name: 'blue'",
        "pools[2].name: 'BLUE' has the environment variable of pools[0].name: 'AFXDP_DEVICES_BLUE'",
    ]


# -- What is not known -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "warning"),
    [
        (plugin(logLevl="debug"), "logLevl: unknown key, ignored, did you mean logLevel?"),
        (plugin(Comment="x"), "Comment: unknown key, ignored"),
        (plugin(kindcluter=None), "kindcluter: unknown key, ignored, did you mean kindCluster?"),
        (plugin(pool(UDSTIMEOUTS=30)), "pools[0].UDSTIMEOUTS: unknown key, ignored, did you mean udsTimeout?"),
        (plugin(pool(UdsTimeoutSecs="x")), "pools[0].UdsTimeoutSecs: unknown key, ignored, did you mean udsTimeout?"),
        (plugin(pool(ethtoolCmd=[])), "pools[0].ethtoolCmd: unknown key, ignored, did you mean ethtoolCmds?"),
        (plugin(pool(zzz=[])), "pools[0].zzz: unknown key, ignored"),
        (
            plugin(pool(), pool(name="red", devices=[{"name": "v", "names": {}}])),
            "pools[1].devices[0].names: unknown key, ignored, did you mean name?",
        ),
        (
            plugin(pool(drivers=[{"name": "ice", "excludedDevices": 5}])),
            "pools[0].drivers[0].excludedDevices: unknown key, ignored, did you mean excludeDevices?",
        ),
        (
            plugin(pool(nodes=[{"hostname": "a", "driver": {}}])),
            "pools[0].nodes[0].driver: unknown key, ignored, did you mean drivers?",
        ),
        (plugin(**{"log\nLevel\ud800é": 1}), r"log\nLevel\ud800\xe9: unknown key, ignored, did you mean logLevel?"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unknown_key_is_warned_of_when_the_rest_is_right(
    content: Json, warning: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An unknown key is accepted, whatever its value, with a warning of one line that names the nearest known one."""
    get_plugin_config(write(tmp_path, content))
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [(logging.WARNING, warning)]


def test_key_is_warned_of_when_it_is_there_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a key in two spellings the last one counts, as with the Go plugin, and the log says so."""
    file = write(tmp_path, b'{"pools": [], "logLevel": "error", "LOGLEVEL": "debug", "loglevel": null}')
    assert get_plugin_config(file).log_level == "debug"
    assert [record.getMessage() for record in caplog.records] == [
        "logLevel: is there more than once, the last one counts"
    ]


# -- What is no configuration at all -----------------------------------------------------------------------------------


def test_file_is_refused_when_it_is_not_there(tmp_path: Path) -> None:
    """A missing file is told in the system's words."""
    assert errors_of(tmp_path / "absent.json") == ["No such file or directory: name the configuration with --config"]


def test_file_is_refused_when_it_is_a_directory(tmp_path: Path) -> None:
    """What cannot be read is told in the system's words."""
    assert errors_of(tmp_path) == ["Is a directory"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "Expecting value: line 1 column 1 (char 0)"),
        (b"{'pools': []}", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        (b'{"pools": []', "Expecting ',' delimiter: line 1 column 13 (char 12)"),
        (b'{"pools": []} x', "Extra data: line 1 column 15 (char 14)"),
        (b'{"pools": [],\n "x": \x80}', "'utf-8' codec can't decode byte 0x80 in position 20: invalid start byte"),
        (b"\x7fELF\x02\x01\x01\x00\x00\x00", ""),
        (b"\xff\xfe\x00", ""),
        (b"[" * 100_000, ""),
        (b'{"a":' * 100_000, ""),
        (b'{"pools": [], "uid": ' + b"9" * 10_000 + b"}", ""),
    ],
    ids=["empty", "quotes", "open", "extra", "byte", "binary", "utf-16", "lists", "objects", "digits"],
)
def test_file_is_refused_when_it_is_not_json(content: bytes, words: str, tmp_path: Path) -> None:
    """What is not JSON is one error of one line that tells where."""
    (error,) = errors_of(write(tmp_path, content))
    assert error.startswith(f"not JSON: {words}")
    assert "\n" not in error


@pytest.mark.parametrize("path", ["logLevel", "pools[0].name", "pools[0].devices", "pools[0].drivers[0].primary"])
def test_file_is_refused_when_a_value_is_nested_as_deeply_as_can_be_read(path: str, tmp_path: Path) -> None:
    """A value at the limit of Python's JSON parser is an error like any other, and so is one beyond it."""
    before, after = json.dumps(changed(path, "HERE")).encode().split(b'"HERE"')
    for depth in range(900, 1010, 4):
        (error,) = errors_of(write(tmp_path, before + b"[" * depth + b"]" * depth + after))
        assert error.startswith(("not JSON: ", path))


@pytest.mark.parametrize(
    ("value", "text"), [("x" * 1000, f"'{'x' * 76}..."), ("x" * 78, f"'{'x' * 78}'"), ([1] * 99, f"[{'1, ' * 25}1...")]
)
def test_value_is_cut_when_it_is_long(value: object, text: str, tmp_path: Path) -> None:
    """An error shows no more than 80 characters of the value."""
    assert errors_of(write(tmp_path, plugin(pool(name=value)))) == [f"pools[0].name: not {POOL_NAME}: {text}"]


# -- Anything at all ---------------------------------------------------------------------------------------------------


def fits(*, pattern: str = "", low: int = 0, high: int = 0, gap: int = 0, flag: bool = False) -> Callable[[Any], bool]:
    """A rule, said once more: a text of a pattern, a whole number from low to high but not from 1 to gap, or a flag."""
    if flag:
        return lambda value: isinstance(value, bool)
    if pattern:
        return lambda value: isinstance(value, str) and bool(re.fullmatch(pattern, value))
    return lambda value: type(value) is int and low <= value <= high and not 1 <= value < gap


IS_DEVICE: Json = {
    "name": fits(pattern="[A-Za-z0-9_-]{1,50}"),
    "pci": fits(pattern=r"[\da-fA-F]{4}:[\da-fA-F]{2}:[\da-fA-F]{2}\.[0-7]"),
    "mac": fits(pattern=r"([\da-fA-F]{2}:){5}[\da-fA-F]{2}"),
    "secondary": fits(high=64),
}
IS_DRIVER: Json = {
    "name": fits(pattern="[A-Za-z0-9_-]{1,50}"),
    "primary": fits(high=10),
    "secondary": fits(high=64),
    "excludeDevices": [IS_DEVICE],
    "excludeAddressed": fits(flag=True),
}
SHAPE: Json = {
    "pools": [
        {
            "name": fits(pattern="[A-Za-z0-9]([A-Za-z0-9._-]{,61}[A-Za-z0-9])?"),
            "mode": fits(pattern="primary|cdq"),
            "devices": [IS_DEVICE],
            "drivers": [IS_DRIVER],
            "nodes": [{"hostname": fits(pattern="[A-Za-z0-9-]{1,63}"), "devices": [IS_DEVICE], "drivers": [IS_DRIVER]}],
            "udsServerDisable": fits(flag=True),
            "bpfMapPinningEnable": fits(flag=True),
            "udsTimeout": fits(low=-1, high=300, gap=30),
            "udsFuzz": fits(flag=True),
            "requiresUnprivilegedBpf": fits(flag=True),
            "uid": fits(high=256000, gap=1000),
            "ethtoolCmds": [fits(pattern="(ethtool +)?-[A-Za-z0-9:./-]* +[A-Za-z0-9:./-][A-Za-z0-9 :./-]*")],
        }
    ],
    "logFile": fits(pattern=r"[A-Za-z0-9_-]+\.(log|txt)"),
    "logLevel": fits(pattern="error|warning|info|debug"),
    "kindCluster": fits(flag=True),
}
"""The file once more: its keys, and for each value whether it is right."""


def places_of(content: Any, shape: Any, path: str = "") -> Iterator[tuple[Any, Any, str, Any]]:
    """Yields (object or list, key or index, path, shape) for each known place below a content."""
    if isinstance(content, dict) and isinstance(shape, dict):
        spelled = {key.lower(): key for key in shape}
        for key in content:
            if name := spelled.get(key.lower()):
                below = f"{path}.{name}" if path else name
                yield content, key, below, shape[name]
                yield from places_of(content[key], shape[name], below)
    elif isinstance(content, list) and isinstance(shape, list):
        for index, item in enumerate(content):
            yield content, index, f"{path}[{index}]", shape[0]
            yield from places_of(item, shape[0], f"{path}[{index}]")


KEYS = sorted({path.rpartition(".")[2] for *_, path, _ in places_of(EVERYTHING, SHAPE) if not path.endswith("]")})

keys = st.one_of(st.sampled_from([*KEYS, *map(str.upper, KEYS)]), st.text(max_size=8))
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters(codec=None), max_size=8),
    st.sampled_from(["", "primary", "cdq", "info", "a.log", "blue", "veth0", "veth0\n", "-K -device- a b"]),
    st.sampled_from(["0000:81:00.1", "3c:fd:fe:00:10:02", "98:03:9b", "x" * 64, 0, -1, 1, 29, 30, 301, 1000, 10**20]),
)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3)),
    max_leaves=6,
)


def mutate(draw: st.DrawFn, content: Any) -> None:
    """Replaces, removes or adds something anywhere in a content."""
    node = content
    while True:
        places = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = draw(st.sampled_from(places)) if places else None
        what = draw(st.sampled_from(["below", "below", "below", "add", "replace", "delete"]))
        if key is not None and what == "below" and isinstance(node[key], dict | list):
            node = node[key]
            continue
        if key is None or what == "add":
            if isinstance(node, dict):
                node[draw(keys)] = draw(anything)
            else:
                node.append(draw(anything))
        elif what == "delete":
            del node[key]
        else:
            node[key] = draw(anything)
        return


@st.composite
def mutated(draw: st.DrawFn) -> Json:
    """EVERYTHING after a few mutations: it may still be right."""
    content = copy.deepcopy(EVERYTHING)
    for _ in range(draw(st.integers(0, 3))):
        mutate(draw, content)
    return content


@st.composite
def spoiled(draw: st.DrawFn) -> tuple[Json, str]:
    """EVERYTHING after a few mutations and with one value that is wrong; and the path of that."""
    content = draw(mutated())
    places = list(places_of(content, SHAPE))
    if not places:
        return content, "pools"
    container, key, path, shape = draw(st.sampled_from(places))
    value = draw(anything)
    says_nothing = isinstance(container, dict) and value in (None, "")
    if says_nothing or (shape(value) if callable(shape) else isinstance(value, type(shape))):
        value = draw(st.sampled_from([3.5, "\n", "\ud800"]))  # is wrong everywhere
    container[key] = value
    return content, path


@st.composite
def cut(draw: st.DrawFn) -> tuple[bytes, str]:
    """A file that ends too early, or has a byte that no text has."""
    content = json.dumps(draw(mutated())).encode()
    end = draw(st.integers(0, len(content) - 1))
    return content[:end] + draw(st.sampled_from([b"", b"\xff" + content[end:]])), "not JSON"


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A file with some of its bytes replaced: it may still be right."""
    content = bytearray(json.dumps(EVERYTHING).encode())
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(content)))
        content[start : start + draw(st.integers(0, 4))] = draw(st.binary(max_size=4))
    return bytes(content)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for all examples of a test."""
    return tmp_path_factory.mktemp("config")


@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=st.one_of(spoiled(), spoiled(), spoiled(), cut()))
def test_program_ends_with_1_when_the_file_is_malformed(case: tuple[object, str], directory: Path) -> None:
    """However a file is malformed, the code is 1, each line names the file, and one of them the place; no traceback."""
    content, path = case
    file = write(directory, content)
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        assert afxdpd.main(["--check", "--config", str(file)]) == 1
    lines = errors.getvalue().splitlines()
    assert all(line.startswith(f"afxdpd: {file}: ") for line in lines)
    assert any(line.startswith(f"afxdpd: {file}: {path}: ") for line in lines), (path, lines)
    assert all(" WARNING " in line for line in output.getvalue().splitlines())


@settings(max_examples=300, deadline=None)
@given(content=st.one_of(anything, mutated(), damaged(), st.binary(max_size=40)))
def test_file_is_taken_or_refused_when_it_is_anything(content: object, directory: Path) -> None:
    """Whatever the file holds, it is a configuration that keeps the rules or a ConfigError of lines with its name."""
    file = write(directory, content)
    errors: list[str] | None = None
    try:
        config = get_plugin_config(file)
    except ConfigError as exc:
        errors = str(exc).splitlines()
    if errors is not None:
        assert errors
        assert all(line.startswith(f"{file}: ") for line in errors)
        return
    for container, key, path, shape in places_of(json.loads(file.read_bytes()), SHAPE):
        value = container[key]
        if value is not None and value != "":
            assert shape(value) if callable(shape) else isinstance(value, type(shape)), path
    assert len({each.environment_name for each in config.pools}) == len(config.pools)
    assert len(config.pools) <= 1 or not config.kind_cluster


@pytest.mark.program
@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (
            changed("pools[1].devices[0].mac", "98:03:9b"),
            ["pools[1].devices[0].mac: not a MAC address: '98:03:9b'"],
        ),
        (
            plugin(pool("mode", uid="\ud800"), kindCluster=1),
            [
                rf"pools[0].uid: not {UID}: '\ud800'",
                "pools[0].mode: is missing",
                "kindCluster: not true or false: 1",
            ],
        ),
        (
            b"pools: []",
            ["not JSON: Expecting value: line 1 column 1 (char 0) (JSON has no comments, and no comma before ] or })"],
        ),
    ],
    ids=["one", "several", "YAML"],
)
@pytest.mark.parametrize("options", [[], ["--check"], ["--log-format", "json"]], ids=["serve", "check", "json"])
def test_process_ends_with_1_when_the_file_is_malformed(
    content: object, lines: list[str], options: list[str], tmp_path: Path
) -> None:
    """The process tells what is wrong on standard error, a line each, and nothing else."""
    file = write(tmp_path, content)
    command = [*PROGRAM, "--config", str(file), *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.splitlines() == [f"afxdpd: {file}: {line}" for line in lines]


# -- The schema --------------------------------------------------------------------------------------------------------

EXAMPLES = sorted((ROOT / "examples" / "configs").glob("*.json"))


def content_of(row: Row) -> object:
    """What the file of a row holds."""
    return json.loads(row.content) if isinstance(row.content, bytes) else row.content


def test_schema_is_the_one_of_the_examples_when_it_is_made_anew() -> None:
    """The file in examples is what the program prints; make it again with ``afxdpd --schema``."""
    file = ROOT / "examples" / "config.schema.json"
    assert file.read_text() == json.dumps(get_config_schema(), indent=2) + "\n"


def test_schema_is_right_when_it_is_checked_itself() -> None:
    """The schema keeps the rules for schemas, and no default breaks the rule of its key."""
    schema = json.loads(json.dumps(get_config_schema()))
    Draft202012Validator.check_schema(schema)
    for kind in schema["$defs"].values():
        for key, rule in kind["properties"].items():
            if "default" in rule and rule["default"] != "":
                Draft202012Validator({**schema, "$ref": f"#/$defs/{kind['title']}/properties/{key}"}).validate(
                    rule["default"]
                )


def test_schema_has_every_key_when_the_file_gives_all() -> None:
    """The schema takes a file with every key, and describes each of them."""
    SCHEMA.validate(EVERYTHING)
    described = {key for kind in get_config_schema()["$defs"].values() for key in kind["properties"]}
    assert described == set(KEYS)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_schema_takes_a_file_when_it_is_an_example(file: Path) -> None:
    """Every example keeps the schema; there are no unknown keys in it."""
    content = json.loads(file.read_bytes())
    SCHEMA.validate(content)
    known = {path.rpartition(".")[2] for *_, path, _ in places_of(content, SHAPE)}
    assert all(key in known for key in re.findall(r'"(\w+)":', file.read_text()))


def test_every_key_is_in_an_example_when_all_are_read() -> None:
    """There is an example for each key of the file."""
    assert EXAMPLES
    assert {key for file in EXAMPLES for key in re.findall(r'"(\w+)":', file.read_text())} == set(KEYS)


@pytest.mark.parametrize("row", [pytest.param(row, id=row.title) for row in ROWS if row.schema])
def test_schema_refuses_a_file_when_it_breaks_a_rule(row: Row) -> None:
    """What the daemon refuses the schema refuses, too, as far as a schema can say it."""
    assert not SCHEMA.is_valid(content_of(row))


# -- What follows from a configuration ---------------------------------------------------------------------------------


def one_pool(name: str = "blue", *devices: str, **keys: Any) -> PoolRules:
    """A pool without a file."""
    named = tuple(DeviceConfig(name=each) for each in devices or ("veth0",))
    return PoolRules(**{"name": name, "mode": "primary", "devices": named, **keys})


@pytest.mark.parametrize(
    ("name", "variable"),
    [("blue", "AFXDP_DEVICES_BLUE"), ("a-b.c_9", "AFXDP_DEVICES_A_B_C_9"), ("A.-.b", "AFXDP_DEVICES_A___B")],
)
def test_environment_name_is_in_capitals_when_the_pool_has_any_name(name: str, variable: str) -> None:
    """The variable's name is the pool's in capitals, with '_' for what a variable's name cannot have."""
    assert one_pool(name).environment_name == variable


@pytest.mark.parametrize(("uds_timeout", "seconds"), [(-1, float("inf")), (0, 30.0), (30, 30.0), (300, 300.0)])
def test_idle_timeout_is_in_seconds_when_uds_timeout_is_a_code(uds_timeout: int, seconds: float) -> None:
    """In udsTimeout -1 stands for never and 0 for 30 seconds."""
    assert one_pool(uds_timeout=uds_timeout).idle_timeout == seconds


@pytest.mark.parametrize(
    ("disable", "pinning", "has_socket", "has_program"),
    [
        (False, False, True, True),
        (True, False, False, False),
        (False, True, True, True),
        (True, True, False, True),
    ],
)
def test_pool_has_socket_and_program_when_its_options_say_so(
    disable: bool, pinning: bool, has_socket: bool, has_program: bool
) -> None:
    """There is a program where there is a socket or a pinned map, and a raw device where there is neither."""
    config = one_pool(uds_server_disable=disable, bpf_map_pinning_enable=pinning)
    assert (config.has_socket, config.has_program) == (has_socket, has_program)


def test_filters_are_the_ethtool_commands_when_asked_for() -> None:
    """The Go plugin's PoolConfig has the ethtool commands under two names, and so have ours."""
    commands = ("-K -device- gro off",)
    assert one_pool(ethtool_cmds=commands).filters == commands
    assert PoolConfig(name="a", mode="primary", ethtool_cmds=commands).filters == commands
    assert issubclass(PoolRules, PoolOptions)
    assert issubclass(PoolConfig, PoolOptions)


def socket_path(paths: Paths, name: str, device: str) -> Path:
    """Where the socket of a device is made."""
    return paths.uds_dir / name / device / "afxdp.sock"


def padded(directory: str, length: int) -> Path:
    """A directory whose name has exactly so many bytes."""
    assert len(directory.encode()) <= length
    return Path(directory + "x" * (length - len(directory.encode())))


@pytest.mark.parametrize("prefix", ["/run/", "/run/ä"])
def test_device_path_is_refused_when_it_has_more_than_107_bytes(prefix: str) -> None:
    """The path of a device's socket may have 107 bytes, not characters, and no more."""
    room = 107 - len("/blue/veth0/afxdp.sock")
    config = PluginConfig(pools=(one_pool("red", "v"), one_pool("blue", "v", "veth0")))
    Paths(uds_dir=padded(prefix, room)).check(config)
    paths = Paths(uds_dir=padded(prefix, room + 1))
    with pytest.raises(ConfigError) as caught:
        paths.check(config)
    assert caught.value.errors == (
        "pools[1].devices[1].name: makes the path of a socket longer than 107 bytes: "
        f"{socket_path(paths, 'blue', 'veth0')}",
    )


@pytest.mark.parametrize(
    "keys",
    [
        {"devices": (), "drivers": (DriverConfig(name="ice"),)},
        {"devices": (), "nodes": (NodeConfig(hostname="node-1", devices=(DeviceConfig(name="v"),)),)},
        {"devices": (DeviceConfig(pci="0000:81:00.1"),)},
        {"devices": (DeviceConfig(name="v"), DeviceConfig(mac="3c:fd:fe:00:10:02"))},
        {"mode": "cdq"},
    ],
    ids=["drivers", "nodes", "pci", "mac", "cdq"],
)
def test_pool_path_is_refused_when_a_device_could_have_a_longer_one(keys: Json) -> None:
    """Where the names of the devices are not in the file, there has to be room for the longest that Linux allows."""
    room = 107 - len("/blue/afxdp.sock/") - 15
    config = PluginConfig(pools=(one_pool(**keys),))
    Paths(uds_dir=padded("/run/", room)).check(config)
    paths = Paths(uds_dir=padded("/run/", room + 1))
    with pytest.raises(ConfigError) as caught:
        paths.check(config)
    assert caught.value.errors == (
        f"pools[0].name: makes the path of a socket longer than 107 bytes: {socket_path(paths, 'blue', 'x' * 15)}",
    )


def test_endpoint_is_refused_when_it_has_more_than_107_bytes() -> None:
    """The path of a pool's socket in kubelet's directory has the same limit."""
    room = 107 - len("/device-plugins/afxdp-blue.sock")
    config = PluginConfig(pools=(one_pool("a"), one_pool()))
    Paths(kubelet_dir=padded("/var/", room)).check(config)
    paths = Paths(kubelet_dir=padded("/var/", room + 1))
    with pytest.raises(ConfigError) as caught:
        paths.check(config)
    endpoint = paths.kubelet_dir / "device-plugins" / "afxdp-blue.sock"
    assert caught.value.errors == (f"pools[1].name: makes the path of a socket longer than 107 bytes: {endpoint}",)


def test_every_path_is_told_when_several_are_too_long() -> None:
    """One check names all pools and devices whose sockets have no room."""
    paths = Paths(kubelet_dir=padded("/var/", 100), uds_dir=padded("/run/", 100))
    with pytest.raises(ConfigError) as caught:
        paths.check(PluginConfig(pools=(one_pool("a", "b", "c"), one_pool("d"))))
    assert [line.partition(":")[0] for line in caught.value.errors] == [
        "pools[0].name",
        "pools[0].devices[0].name",
        "pools[0].devices[1].name",
        "pools[1].name",
        "pools[1].devices[0].name",
    ]


def test_default_paths_have_room_when_the_names_are_as_long_as_allowed() -> None:
    """The longest pool name fits in kubelet's directory; with a device name of 15, Linux's limit, in /var/run too."""
    drivers = (DriverConfig(name="ice"),)
    Paths().check(PluginConfig(pools=(one_pool("x" * 62, "v" * 15), one_pool("y" * 62, devices=(), drivers=drivers))))
    assert afxdpd.SUN_PATH_MAX == 107
