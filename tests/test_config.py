"""The configuration file: what is taken, what is refused and in which words."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import afxdpd
from afxdpd import ConfigError, DeviceConfig, Paths, PluginConfig, PoolConfig, get_plugin_config, get_pool_configs

Json = dict[str, Any]

POOL_NAME = "1 to 63 letters, digits, '-', '_' and '.', the first and the last a letter or digit"
DEVICE_NAME = "1 to 50 letters, digits, '-' and '_'"
UDS_TIMEOUT = "-1 (never), 0 (30 seconds) or 30 to 300 seconds"
UID = "0, or 1000 to 256000"
LEVELS = "'error', 'warning', 'info' or 'debug'"
NOT_YET = "this version of afxdpd cannot do that yet"


def pool(*without: str, **keys: Any) -> Json:
    """A pool that is right, but for these keys."""
    content = {"name": "blue", "mode": "primary", "devices": [{"name": "veth0"}], **keys}
    return {key: value for key, value in content.items() if key not in without}


def plugin(*pools: Json, **keys: Any) -> Json:
    """A whole file."""
    return {"pools": list(pools), **keys}


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


def test_config_has_every_value_when_the_file_gives_all(tmp_path: Path) -> None:
    """Each key of the file arrives in the field of its name."""
    first = pool(devices=[{"name": "veth0"}, {"name": "ens1f0_np-1"}], udsTimeout=300, uid=256000)
    config = get_plugin_config(write(tmp_path, plugin(first, pool(name="red"), logLevel="debug")))
    assert config == PluginConfig(
        pools=(
            PoolConfig(
                name="blue",
                mode="primary",
                devices=(DeviceConfig(name="veth0"), DeviceConfig(name="ens1f0_np-1")),
                uds_timeout=300,
                uid=256000,
            ),
            PoolConfig(name="red", mode="primary", devices=(DeviceConfig(name="veth0"),)),
        ),
        log_level="debug",
    )


def test_config_has_defaults_when_keys_are_left_out(tmp_path: Path) -> None:
    """A pool closes idle connections after 30 seconds and grants nobody access; the log level is info."""
    config = get_plugin_config(str(write(tmp_path, plugin(pool()))))
    assert config.log_level == "info"
    assert (config.pools[0].uds_timeout, config.pools[0].uid) == (0, 0)


def test_pool_configs_are_the_pools_when_the_file_is_right(tmp_path: Path) -> None:
    """The function get_pool_configs returns the pools in their order."""
    file = write(tmp_path, plugin(pool(), pool(name="red")))
    assert [each.name for each in get_pool_configs(file)] == ["blue", "red"]


def test_config_is_empty_when_there_are_no_pools(tmp_path: Path) -> None:
    """A file without any pool is right, as on a node that has nothing to give yet."""
    assert get_plugin_config(write(tmp_path, plugin())).pools == ()


@pytest.mark.parametrize("change", [str.upper, str.lower, str.title, str.swapcase])
def test_keys_are_known_when_their_case_differs(change: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Keys are matched without regard to case, at every level."""

    def changed(content: Any) -> Any:
        match content:
            case dict():
                return {change(key): changed(value) for key, value in content.items()}
            case list():
                return [changed(item) for item in content]
            case _:
                return content

    content = plugin(pool(udsTimeout=60, uid=1000), logLevel="error")
    assert get_plugin_config(write(tmp_path, changed(content))) == get_plugin_config(write(tmp_path, content))
    assert not caplog.records


@pytest.mark.parametrize(
    "change",
    [
        {"name": "a"},
        {"name": "A.b-c_9"},
        {"name": "x" * 63},
        {"devices": [{"name": "-"}]},
        {"devices": [{"name": "x" * 50}]},
        {"udsTimeout": -1},
        {"udsTimeout": 30},
        {"udsTimeout": 300},
        {"uid": 1000},
        {"uid": 256000},
    ],
    ids=str,
)
def test_pool_is_taken_when_a_value_is_at_its_limit(change: Json, tmp_path: Path) -> None:
    """The first and the last value of each range belong to it."""
    assert len(get_plugin_config(write(tmp_path, plugin(pool(**change)))).pools) == 1


def test_file_is_read_when_it_begins_with_a_byte_order_mark(tmp_path: Path) -> None:
    """Editors that write a byte order mark do no harm."""
    assert get_plugin_config(write(tmp_path, b'\xef\xbb\xbf{"pools": []}')) == PluginConfig(pools=())


# -- What is refused ---------------------------------------------------------------------------------------------------


def rule(key: str, words: str, *values: object) -> list[Any]:
    """Rows of the table below: values of a pool's key that break its rule."""
    return [
        pytest.param(
            plugin(pool(**{key: value})), [f"pools[0].{key}: must be {words}: {json.dumps(value)}"], id=f"{key}={value}"
        )
        for value in values
    ]


def device_rule(*values: object) -> list[Any]:
    """The same for the names of devices."""
    return [
        pytest.param(
            plugin(pool(devices=[{"name": "veth0"}, {"name": value}])),
            [f"pools[0].devices[1].name: must be {DEVICE_NAME}: {json.dumps(value)}"],
            id=f"device={value!r:.20}",
        )
        for value in values
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        *rule("name", POOL_NAME, "", "-a", "a-", ".a", "a.", "_a", "a_", "a b", "a/b", "ä", "x" * 64, "a\n", "\na"),
        *rule("name", POOL_NAME, 5, None, True, ["a"], {"a": 1}),
        *rule("mode", "'primary' (this version has no other)", "cdq", "Primary", "", None, 1, ["primary"]),
        *device_rule("", "veth 0", "veth.0", "veth/0", "vethä", "x" * 51, "veth0\n", "..", 1, None, ["veth0"]),
        *rule("udsTimeout", UDS_TIMEOUT, -2, 1, 29, 301, 10**30, 30.0, 30.5, "30", True, False, None, [30]),
        *rule("uid", UID, -1, 1, 999, 256001, 1e3, "1000", True, None, {}),
        pytest.param({}, ["pools: is missing"], id="no pools"),
        pytest.param({"pools": None}, ["pools: must be a list: null"], id="pools null"),
        pytest.param({"pools": {}}, ["pools: must be a list: {}"], id="pools object"),
        pytest.param({"pools": "blue"}, ['pools: must be a list: "blue"'], id="pools text"),
        pytest.param({"pools": ["blue"]}, ['pools[0]: must be an object: "blue"'], id="pool text"),
        pytest.param({"pools": [[]]}, ["pools[0]: must be an object: []"], id="pool list"),
        pytest.param(plugin(pool("name")), ["pools[0].name: is missing"], id="no name"),
        pytest.param(plugin(pool("mode")), ["pools[0].mode: is missing"], id="no mode"),
        pytest.param(
            plugin(pool("devices")), ["pools[0].devices: the pool takes nothing: name its devices"], id="no devices"
        ),
        pytest.param(
            plugin(pool(devices=[])), ["pools[0].devices: the pool takes nothing: name its devices"], id="devices empty"
        ),
        pytest.param(plugin(pool(devices=None)), ["pools[0].devices: must be a list: null"], id="devices null"),
        pytest.param(plugin(pool(devices={"name": "v"})), ['pools[0].devices: must be a list: {"name": "v"}'], id="{}"),
        pytest.param(plugin(pool(devices=["v"])), ['pools[0].devices[0]: must be an object: "v"'], id="device text"),
        pytest.param(plugin(pool(devices=[{}])), ["pools[0].devices[0].name: is missing"], id="device without name"),
        pytest.param(plugin(logLevel="INFO"), [f'logLevel: must be {LEVELS}: "INFO"'], id="level in capitals"),
        pytest.param(plugin(logLevel=None), [f"logLevel: must be {LEVELS}: null"], id="level null"),
        pytest.param(b'{"pools": [], "logLevel": NaN}', [f"logLevel: must be {LEVELS}: NaN"], id="level NaN"),
        pytest.param([], ["the file: must be an object: []"], id="file list"),
        pytest.param(None, ["the file: must be an object: null"], id="file null"),
        pytest.param(b'"pools"', ['the file: must be an object: "pools"'], id="file text"),
    ],
)
def test_file_is_refused_when_it_breaks_a_rule(content: object, expected: list[str], tmp_path: Path) -> None:
    """Whatever breaks a rule is named by its path in the file, with the rule and the value."""
    assert errors_of(write(tmp_path, content)) == expected


def test_every_error_is_told_when_there_are_several(tmp_path: Path) -> None:
    """One reading finds all that is wrong, in the order of the file."""
    content = plugin(
        pool(name="-", mode="cdq", udsTimeout=5, uid=7),
        7,  # type: ignore[arg-type]
        pool("mode", devices=[{"name": "veth0"}, {"name": ""}, {"pci": "0000:81:00.1"}]),
        pool(devices=[], uid=2),
        kindCluster=True,
        logLevel="loud",
    )
    assert errors_of(write(tmp_path, content)) == [
        f'pools[0].name: must be {POOL_NAME}: "-"',
        "pools[0].mode: must be 'primary' (this version has no other): \"cdq\"",
        f"pools[0].udsTimeout: must be {UDS_TIMEOUT}: 5",
        f"pools[0].uid: must be {UID}: 7",
        "pools[1]: must be an object: 7",
        f'pools[2].devices[1].name: must be {DEVICE_NAME}: ""',
        f"pools[2].devices[2].pci: {NOT_YET}",
        "pools[2].devices[2].name: is missing",
        "pools[2].mode: is missing",
        f"pools[3].uid: must be {UID}: 2",
        f"kindCluster: {NOT_YET}",
        f'logLevel: must be {LEVELS}: "loud"',
    ]


@pytest.mark.parametrize(
    ("where", "key"),
    [
        *(("", key) for key in ("logFile", "kindCluster", "KINDCLUSTER")),
        *(
            ("pools[0].", key)
            for key in (
                "drivers",
                "nodes",
                "udsServerDisable",
                "bpfMapPinningEnable",
                "udsFuzz",
                "requiresUnprivilegedBpf",
                "ethtoolCmds",
                "UdsFuzz",
            )
        ),
        *(("pools[0].devices[0].", key) for key in ("pci", "mac", "secondary", "MAC")),
    ],
)
def test_file_is_refused_when_it_asks_for_what_is_not_done_yet(where: str, key: str, tmp_path: Path) -> None:
    """Keys of the format that are not carried out yet are errors: to ignore them would do something else."""
    content = plugin(pool())
    level = {"": content, "pools[0].": content["pools"][0]}.get(where, content["pools"][0]["devices"][0])
    level[key] = True
    assert errors_of(write(tmp_path, content)) == [f"{where}{key}: {NOT_YET}"]


def test_pools_are_refused_when_they_share_a_name(tmp_path: Path) -> None:
    """Each pool has a name of its own; the later ones are at fault."""
    content = plugin(pool(), pool(name="red"), pool(), pool())
    assert errors_of(write(tmp_path, content)) == [
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


# -- What is not known -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "warning"),
    [
        (plugin(logLevl="debug"), "logLevl: unknown key, ignored, did you mean logLevel?"),
        (plugin(Comment="x"), "Comment: unknown key, ignored"),
        (plugin(pool(UDSTIMEOUTS=30)), "pools[0].UDSTIMEOUTS: unknown key, ignored, did you mean udsTimeout?"),
        (plugin(pool(UdsTimeoutSecs="x")), "pools[0].UdsTimeoutSecs: unknown key, ignored, did you mean udsTimeout?"),
        (plugin(pool(zzz=[])), "pools[0].zzz: unknown key, ignored"),
        (
            plugin(pool(), pool(name="red", devices=[{"name": "v", "names": {}}])),
            "pools[1].devices[0].names: unknown key, ignored, did you mean name?",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unknown_key_is_warned_of_when_the_rest_is_right(
    content: Json, warning: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An unknown key is accepted, whatever its value, with a warning that names the nearest known one."""
    get_plugin_config(write(tmp_path, content))
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [(logging.WARNING, warning)]


# -- What is no configuration at all -----------------------------------------------------------------------------------


def test_file_is_refused_when_it_is_not_there(tmp_path: Path) -> None:
    """A missing file is told in the system's words."""
    assert errors_of(tmp_path / "absent.json") == ["No such file or directory"]


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


@pytest.mark.parametrize("key", ["logLevel", "devices", "name"])
def test_file_is_refused_when_a_value_is_nested_as_deeply_as_can_be_read(key: str, tmp_path: Path) -> None:
    """A value at the limit of Python's JSON parser is an error like any other, and so is one beyond it."""
    for depth in range(900, 1010, 4):
        nested = b"[" * depth + b"]" * depth
        if key == "logLevel":
            content = b'{"pools": [], "logLevel": %s}' % nested
        else:
            content = b'{"pools": [{"name": "a", "mode": "primary", "devices": [{"name": "v"}], "%s": %s}]}' % (
                key.encode(),
                nested,
            )
        (error,) = errors_of(write(tmp_path, content))
        assert error.startswith("not JSON: ") or f"{key}" in error


def test_value_is_cut_when_it_is_long(tmp_path: Path) -> None:
    """An error shows no more than 80 characters of the value."""
    (error,) = errors_of(write(tmp_path, plugin(pool(name="x" * 1000))))
    assert error == f'pools[0].name: must be {POOL_NAME}: "{"x" * 76}...'


# -- Anything at all ---------------------------------------------------------------------------------------------------

KEYS = ["pools", "name", "mode", "devices", "udsTimeout", "uid", "logLevel", "kindCluster", "drivers", "pci"]

keys = st.one_of(st.sampled_from([*KEYS, *map(str.upper, KEYS)]), st.text(max_size=12))
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=70),
    st.sampled_from(["primary", "info", "blue", "veth0", "veth0\n", 0, -1, 30, 1000]),
)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=5)),
    max_leaves=12,
)

VALID = plugin(pool(udsTimeout=60, uid=1000), pool(name="red"), logLevel="debug")


@st.composite
def mutated(draw: st.DrawFn) -> object:
    """A valid file with some of its values replaced, removed or added to."""
    content = copy.deepcopy(VALID)
    for _ in range(draw(st.integers(1, 4))):
        node: Any = content
        while True:
            places = list(node) if isinstance(node, dict) else list(range(len(node)))
            place = draw(st.sampled_from(places)) if places else None
            if place is not None and isinstance(node[place], dict | list) and draw(st.booleans()):
                node = node[place]
                continue
            if isinstance(node, dict) and (place is None or draw(st.booleans())):
                node[draw(keys)] = draw(anything)
            elif place is None or (isinstance(node, list) and draw(st.booleans())):
                node.append(draw(anything))
            elif draw(st.booleans()):
                node[place] = draw(anything)
            else:
                del node[place]
            break
    return content


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A valid file with some of its bytes replaced."""
    content = bytearray(json.dumps(VALID).encode())
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(content)))
        content[start : start + draw(st.integers(0, 4))] = draw(st.binary(max_size=4))
    return bytes(content)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for all examples of a test."""
    return tmp_path_factory.mktemp("config")


@settings(max_examples=300, deadline=None)
@given(content=st.one_of(anything, mutated(), damaged(), st.binary(max_size=40)))
def test_file_is_taken_or_refused_when_it_is_anything(content: object, directory: Path) -> None:
    """Whatever the file holds, it is a configuration that keeps the rules or a ConfigError of lines with its name."""
    file = write(directory, content)
    errors: list[str] = []
    pools: tuple[PoolConfig, ...] = ()
    try:
        pools = get_plugin_config(file).pools
    except ConfigError as exc:
        errors = str(exc).splitlines() or [""]
    for line in errors:
        assert line.startswith(f"{file}: ")
    for each in pools:
        assert each.mode == "primary"
        assert each.devices
        assert "\n" not in each.name + "".join(device.name for device in each.devices)
        assert each.idle_timeout >= 30
        assert each.uid == 0 or 1000 <= each.uid <= 256000
    assert len({each.environment_name for each in pools}) == len(pools)


# -- What follows from a configuration ---------------------------------------------------------------------------------


def one_pool(name: str = "blue", *devices: str, **keys: Any) -> PoolConfig:
    """A pool without a file."""
    return PoolConfig(
        name=name, mode="primary", devices=tuple(DeviceConfig(name=each) for each in devices or ("veth0",)), **keys
    )


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
    Paths().check(PluginConfig(pools=(one_pool("x" * 58, "v" * 6), one_pool("y" * 20, "v" * 15))))
    assert afxdpd.SUN_PATH_MAX == 107
