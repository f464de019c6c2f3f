"""The program: what it prints, with which code it ends, and what signals do to it."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from conftest import Kernel
from fakes import FakeHost
from kubelet import running_kubelet
from support import PROGRAM, RESOURCE, ROOT, Pod, make_veth, paths_options, write_config

import afxdpd

AS_NOBODY = [
    sys.executable,
    "-c",
    "import os, sys, afxdpd\n"
    "if os.geteuid() == 0:\n"
    "    os.setgroups([])\n"
    "    os.setresgid(65534, 65534, 65534)\n"
    "    os.setresuid(65534, 65534, 65534)\n"
    "sys.exit(afxdpd.main(sys.argv[1:]))\n",
]
"""The program without any privilege; it may lie in a directory that only root can read."""

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(afxdpd.__file__).parent)}
pytestmark = pytest.mark.program

WAITING = "afxdp/pool: waiting for kubelet: {}/kubelet/device-plugins/kubelet.sock: No such file or directory"
"""What a daemon without a kubelet says when everything runs."""


def run(directory: Path, *arguments: str, program: Sequence[str] = PROGRAM) -> subprocess.CompletedProcess[str]:
    """Runs the program in a directory to its end."""
    return subprocess.run(
        [*program, *arguments], cwd=directory, env=ENVIRONMENT, capture_output=True, text=True, timeout=30, check=False
    )


class Daemon:
    """A running daemon, which logs to a pipe."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self.log = ""

    async def logs(self, text: str) -> None:
        """Waits until the log has this text at the end of a line."""
        assert self.process.stdout is not None
        while f"{text}\n" not in self.log:
            data = await self.process.stdout.receive_some()
            assert data, f"the daemon has ended:\n{self.log}"
            self.log += data.decode()

    async def ends(self) -> int:
        """Waits for its end, reads the rest of the log and returns the exit code."""
        assert self.process.stdout is not None
        async for data in self.process.stdout:
            self.log += data.decode()
        return await self.process.wait()


@asynccontextmanager
async def daemon(directory: Path, *options: str) -> AsyncIterator[Daemon]:
    """The daemon below a directory, with one pool, whose device is not there."""
    command = [*PROGRAM, *paths_options(directory), "--config", str(directory / "config.json"), *options]
    pipe = subprocess.PIPE
    with trio.fail_after(30):
        process = await trio.lowlevel.open_process(
            command, stdout=pipe, stderr=subprocess.STDOUT, cwd=directory, env=ENVIRONMENT
        )
        try:
            yield Daemon(process)
        finally:
            with trio.CancelScope(shield=True):
                process.kill()
                await process.wait()
                assert process.stdout is not None
                await process.stdout.aclose()


@pytest.fixture
def directory(short_path: Path) -> Path:
    """A directory that everybody may read, with a configuration and kubelet's directory."""
    short_path.chmod(0o755)
    write_config(short_path, pool=["absent0"])
    (short_path / "kubelet" / "device-plugins").mkdir(parents=True)
    return short_path


# -- Options -----------------------------------------------------------------------------------------------------------


def test_help_names_options_and_exit_codes_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """The option --help says all there is to say, and ends with 0."""
    with pytest.raises(SystemExit) as caught:
        afxdpd.main(["--help"])
    assert caught.value.code == 0
    output = capsys.readouterr()
    assert output.err == ""
    for option in (
        "config",
        "kubelet-dir",
        "pod-resources-socket",
        "uds-dir",
        "bpffs",
        "log-level",
        "log-format",
        "log-dir",
        "http",
        "schema",
        "check",
        "version",
    ):
        assert f"--{option}" in output.out
    text = " ".join(output.out.split())
    assert "Exit codes: 0 ended as asked, 1 wrong configuration or command line, 2 logging, 3 " in text
    assert "afxdpd status: shows what the running daemon does. afxdpd reload: " in text
    assert ", 4 the pools cannot be served, 5 the network for kind cannot be made. SIGHUP " in text


def test_version_is_printed_when_asked(tmp_path: Path) -> None:
    """The option --version prints one line, and ends with 0."""
    result = run(tmp_path, "--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"afxdpd {afxdpd.__version__}\n", "")


def test_schema_is_printed_when_asked(tmp_path: Path) -> None:
    """The option --schema prints what is in examples; it needs no configuration."""
    result = run(tmp_path, "--schema")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == (ROOT / "examples" / "config.schema.json").read_text()


def test_program_ends_with_1_when_an_option_is_unknown(tmp_path: Path) -> None:
    """An unknown option is one line on standard error."""
    result = run(tmp_path, "--verbose")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "afxdpd: unrecognized arguments: --verbose; see afxdpd --help\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["config.json"], "unrecognized arguments: config.json"),
        (["--conf", "config.json"], "unrecognized arguments: --conf config.json"),
        (["--config"], "argument --config/-config: expected one argument"),
        (["--uds-dir"], "argument --uds-dir: expected one argument"),
        (["--check=yes"], "argument --check: ignored explicit argument 'yes'"),
        (["--log-level", "loud"], "argument --log-level: invalid choice: 'loud' "),
        (["--log-level", "INFO"], "argument --log-level: invalid choice: 'INFO' "),
        (["--log-format", "xml"], "argument --log-format: invalid choice: 'xml' "),
        (["--log-dir"], "argument --log-dir: expected one argument"),
        (["--schema=yes"], "argument --schema: ignored explicit argument 'yes'"),
    ],
)
def test_program_ends_with_1_when_the_command_line_is_wrong(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is wrong with the command line is one line on standard error and the code for wrong input."""
    with pytest.raises(SystemExit) as caught:
        afxdpd.main(arguments)
    assert caught.value.code == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"afxdpd: {message}")
    assert output.err.endswith("; see afxdpd --help\n")
    assert output.err.count("\n") == 1


# -- Configuration -----------------------------------------------------------------------------------------------------


def test_program_ends_with_1_when_there_is_no_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without an option the file is config.json of the present directory; that it is missing is one line."""
    monkeypatch.chdir(tmp_path)
    assert afxdpd.main([]) == 1
    assert capsys.readouterr() == (
        "",
        "afxdpd: config.json: No such file or directory: name the configuration with --config\n",
    )


def test_program_ends_with_1_when_the_configuration_is_wrong(tmp_path: Path) -> None:
    """Everything that is wrong with the file is told, a line each, with its path in the file."""
    file = tmp_path / "wrong.json"
    file.write_text('{"pools": [{"name": "a", "devices": [{"name": ""}]}, 7], "logLevel": 5}')
    result = run(tmp_path, "--config", str(file))
    assert (result.returncode, result.stdout) == (1, "")
    lines = result.stderr.splitlines()
    assert all(line.startswith(f"afxdpd: {file}: ") for line in lines)
    assert [line.removeprefix(f"afxdpd: {file}: ").partition(": ")[0] for line in lines] == [
        "pools[0].devices[0]",
        "pools[0].mode",
        "pools[1]",
        "logLevel",
    ]


def test_unknown_key_is_warned_of_when_the_configuration_is_checked(directory: Path) -> None:
    """What the file has beyond the known keys is told on standard output, and is no error."""
    content = {"pools": [{"name": "pool", "mode": "primary", "device": [], "devices": [{"name": "absent0"}]}]}
    (directory / "config.json").write_text(json.dumps(content))
    result = run(directory, "--check", "--bpffs", str(directory))
    assert (result.returncode, result.stderr) == (0, "")
    warning, *report = result.stdout.splitlines()
    assert warning.endswith(" WARNING pools[0].device: unknown key, ignored, did you mean devices?")
    assert report[1] == "afxdp/pool: primary mode, no devices"


@pytest.mark.parametrize("option", [["--config"], ["-config"], ["--config="], ["-config="]])
def test_configuration_is_found_when_the_option_has_any_of_its_forms(
    option: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The option -config of the Go plugin, whose manifests users have, does as well, with '=' or without."""
    file = tmp_path / "absent.json"
    arguments = [f"{option[0]}{file}"] if option[0].endswith("=") else [*option, str(file)]
    assert afxdpd.main(arguments) == 1
    assert (
        capsys.readouterr().err == f"afxdpd: {file}: No such file or directory: name the configuration with --config\n"
    )


def test_program_ends_with_1_when_a_socket_path_would_be_too_long(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Paths that no socket can have are found before anything is done, also by --check."""
    long = directory / ("x" * 100)
    options = ["--config", str(directory / "config.json"), "--uds-dir", str(long)]
    for more in ([], ["--check"]):
        assert afxdpd.main([*options, *more]) == 1
        output = capsys.readouterr()
        assert output.out == ""
        assert re.fullmatch(
            rf"afxdpd: {directory}/config.json: pools\[0\]\.devices\[0\]\.name: .* 107 bytes: "
            rf"{long}/pool/absent0/afxdp.sock\n",
            output.err,
        )
    assert not long.exists()


def test_check_prints_what_pools_would_take_when_nobody_is_privileged(directory: Path) -> None:
    """The option --check tells of each pool and each device that it passes over; it needs no privilege."""
    write_config(directory, pool=["lo", "absent0"], empty=["absent1"])
    result = run(directory, "-config", "config.json", "--check", program=AS_NOBODY)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        f"node {afxdpd.Host().hostname()}: 2 pools",
        "afxdp/pool: primary mode, no devices",
        "  passes over lo: the loopback device is never taken",
        "  passes over absent0: no such device in the host's network namespace",
        "afxdp/empty: primary mode, no devices",
        "  passes over absent1: no such device in the host's network namespace",
    ]
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", "kubelet"]


def ip(*command: str) -> None:
    """Runs ip in this namespace."""
    subprocess.run(["ip", *command], check=True)


@pytest.mark.kernel
def test_check_tells_of_every_device_when_the_host_has_some(kernel: Kernel, directory: Path) -> None:
    """The report has each device that a pool takes, with what is on it, and each other one with the rule."""
    make_veth("veth0", "veth1", "veth2", "veth3", queues=2)
    make_veth("other")
    ip("link", "add", "br0", "type", "bridge")
    ip("link", "set", "veth2", "master", "br0")
    ip("-6", "route", "add", "default", "dev", "other")
    ip("address", "add", "10.1.1.1/24", "dev", "veth3")
    pools: list[dict[str, Any]] = [
        {
            "name": "named",
            "mode": "primary",
            "devices": [{"name": name} for name in ("lo", "veth0", "veth1", "veth2", "other", "absent0")],
        },
        {"name": "parts", "mode": "cdq", "devices": [{"name": "veth0"}, {"name": "veth0p"}]},
        {
            "name": "driver",
            "mode": "primary",
            "drivers": [{"name": "veth", "excludeDevices": [{"name": "veth0p"}], "excludeAddressed": True}],
        },
    ]
    (directory / "config.json").write_text(json.dumps({"pools": pools}))
    xdp = afxdpd.Xdp(kernel.bpffs)
    devices = afxdpd.Network().devices()
    held = [xdp.attach(devices[name].ifindex, 2) for name in ("veth0", "veth1")]
    try:
        xdp.pin(held[1], "named", "veth1")
        result = run(directory, "--check")
    finally:
        for attachment in held:
            attachment.close()
    assert (result.returncode, result.stderr) == (0, "")
    program = f"carries the native XDP program {held[0].prog_id}: unhealthy unless that is ours"
    not_physical = "it is not physical: only a pool that names it under devices takes it"
    assert result.stdout.splitlines() == [
        f"node {afxdpd.Host().hostname()}: 3 pools",
        "afxdp/named: primary mode, 2 devices",
        "  takes veth1: veth, 2 queues; a pod has it",
        f"  takes veth0: veth, 2 queues; {program}",
        "  passes over lo: the loopback device is never taken",
        "  passes over veth2: it is enslaved to a bridge or bond",
        "  passes over other: a default route leaves through it",
        "  passes over absent0: no such device in the host's network namespace",
        "afxdp/parts: cdq mode, no devices",
        "  passes over veth0: the pool named has it",
        "  passes over veth0p: cdq: it cannot be divided; the devices of these drivers can: ice",
        "afxdp/driver: primary mode, no devices",
        f"  passes over other: {not_physical}",
        f"  passes over otherp: {not_physical}",
        f"  passes over veth0: {not_physical}",
        "  passes over veth0p: excludeDevices: veth0p",
        f"  passes over veth1: {not_physical}",
        f"  passes over veth1p: {not_physical}",
        f"  passes over veth2: {not_physical}",
        f"  passes over veth2p: {not_physical}",
        "  passes over veth3: excludeAddressed: it has an IP address",
        f"  passes over veth3p: {not_physical}",
    ]


@pytest.mark.kernel
def test_check_tells_of_a_device_when_it_is_with_its_pod(kernel: Kernel, directory: Path) -> None:
    """A device that a pod has taken along is still its pool's; no other pool is told that it is missing."""
    make_veth("veth0")
    write_config(directory, pool=["veth0"], other=["veth0"])
    xdp = afxdpd.Xdp(kernel.bpffs)
    with Pod() as pod, contextlib.closing(xdp.attach(afxdpd.Network().devices()["veth0"].ifindex, 1)) as attachment:
        xdp.pin(attachment, "pool", "veth0")
        pod.take("veth0")
        result = run(directory, "--check")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        f"node {afxdpd.Host().hostname()}: 2 pools",
        "afxdp/pool: primary mode, no devices",
        "  has veth0: a pod has it",
        "afxdp/other: primary mode, no devices",
        "  passes over veth0: no such device in the host's network namespace",
    ]


def test_check_tells_of_subfunctions_when_the_pool_divides_devices() -> None:
    """The report names each subfunction with its primary, and which ones pods have."""
    config = afxdpd.get_plugin_config(ROOT / "examples" / "configs" / "cdq.json")
    device = afxdpd.NetDevice(name="ens2f0", ifindex=7, driver="ice", bus="pci", pci="0000:81:00.0", queues=8)
    allocated = {"ens2f0sf2": "small", "ens2f0sf4": "large"}
    assert list(afxdpd.check_report(config, {"ens2f0": device}, FakeHost(), allocated)) == [
        "node node-1: 2 pools",
        "afxdp/small: cdq mode, 2 devices",
        "  takes ens2f0sf1: subfunction 1 of ens2f0",
        "  takes ens2f0sf2: subfunction 2 of ens2f0; a pod has it",
        "afxdp/large: cdq mode, 3 devices",
        "  takes ens2f0sf3: subfunction 3 of ens2f0",
        "  takes ens2f0sf4: subfunction 4 of ens2f0; a pod has it",
        "  takes ens2f0sf5: subfunction 5 of ens2f0",
    ]


def test_check_passes_over_everything_when_a_rule_is_for_the_whole_pool() -> None:
    """A pool that takes nothing on this node as a whole has one line that says why, and so has a file without pools."""
    pool = afxdpd.PoolRules(
        name="a", mode="primary", devices=(afxdpd.DeviceConfig(name="v"),), requires_unprivileged_bpf=True
    )
    assert list(afxdpd.check_report(afxdpd.PluginConfig(pools=(pool,)), {}, FakeHost(), {})) == [
        "node node-1: 1 pool",
        "afxdp/a: primary mode, no devices",
        "  passes over everything: requiresUnprivilegedBpf: kernel.unprivileged_bpf_disabled is not 0 on this node",
    ]
    assert list(afxdpd.check_report(afxdpd.PluginConfig(pools=()), {}, FakeHost(), {})) == ["node node-1: no pools"]


# -- The host ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bpffs", [".", "absent"])
def test_program_ends_with_3_when_bpffs_is_missing(bpffs: str, directory: Path) -> None:
    """A directory that is no BPF file system, or is not there, is one line that says what to do."""
    bpffs = str(directory / bpffs)
    result = run(directory, *paths_options(directory), "--bpffs", bpffs)
    assert (result.returncode, result.stdout) == (3, "")
    assert result.stderr == (
        f"afxdpd: {bpffs} is not a BPF file system: mount one there (mount -t bpf bpf {bpffs}), "
        "or name the place of one with --bpffs\n"
    )
    assert not (directory / "uds").exists()


@pytest.mark.kernel
def test_program_ends_with_3_when_it_is_not_permitted(kernel: Kernel, directory: Path) -> None:
    """Without capabilities the daemon says which it needs."""
    result = run(directory, *paths_options(directory), "--bpffs", str(kernel.bpffs), program=AS_NOBODY)
    assert (result.returncode, result.stdout) == (3, "")
    assert re.fullmatch(
        r"afxdpd: .+: not permitted: the daemon needs CAP_BPF and CAP_NET_ADMIN \(or CAP_SYS_ADMIN\)\n", result.stderr
    )


@pytest.mark.kernel
def test_program_ends_with_3_when_the_socket_directory_cannot_be_made(kernel: Kernel, directory: Path) -> None:
    """A directory that cannot be made is one line that names it and the option."""
    place = directory / "config.json" / "uds"
    result = run(directory, "--kubelet-dir", "kubelet", "--uds-dir", str(place), "--bpffs", str(kernel.bpffs))
    assert (result.returncode, result.stdout) == (3, "")
    assert result.stderr == f"afxdpd: {place}: Not a directory: name another place with --uds-dir\n"


@pytest.mark.kernel
async def test_second_daemon_ends_with_4_when_the_first_one_runs(kernel: Kernel, directory: Path) -> None:
    """One daemon to a directory: the second says which, and the first does not notice; when it has ended it is free."""
    options = ["--config", "config.json", *paths_options(directory)]
    async with daemon(directory) as first:
        await first.logs(WAITING.format(directory))
        before = first.log
        for _ in range(2):
            second = await trio.to_thread.run_sync(lambda: run(directory, *options))
            assert (second.returncode, second.stdout) == (4, "")
            assert second.stderr == (f"afxdpd: {directory}/uds: another afxdpd serves this directory; end it first\n")
        first.process.terminate()
        assert await first.ends() == 0
        lines = [line for line in first.log.removeprefix(before).splitlines() if " pod resources: " not in line]
        assert [line.partition(" INFO ")[2].strip() for line in lines] == ["SIGTERM: ending; pods keep their devices"]
    async with daemon(directory) as third:
        await third.logs(WAITING.format(directory))


@pytest.mark.kernel
def test_program_ends_with_5_when_the_kind_network_cannot_be_made(kernel: Kernel, directory: Path) -> None:
    """A device that has a name of the kind network and is something else is one line that says what to do."""
    make_veth("afxdp-kind-br")
    pool = {"name": "pool", "mode": "primary", "drivers": [{"name": "veth"}]}
    (directory / "config.json").write_text(json.dumps({"pools": [pool], "kindCluster": True}))
    result = run(directory, *paths_options(directory))
    assert (result.returncode, result.stdout) == (5, "")
    assert result.stderr == (
        "afxdpd: the kind network cannot be made: afxdp-kind-br: a veth device has the bridge's name: "
        "delete or rename it (see ip-link(8)), or set kindCluster to false\n"
    )
    assert set(afxdpd.Network().devices()) == {"lo", "afxdp-kind-br", "afxdp-kind-brp"}


# -- Signals and the log -----------------------------------------------------------------------------------------------


@pytest.mark.kernel
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_daemon_ends_with_0_when_it_is_told_to(number: signal.Signals, kernel: Kernel, directory: Path) -> None:
    """SIGTERM and SIGINT end the daemon within a second, and it says which it was."""
    async with daemon(directory) as process:
        await process.logs(f"afxdpd {afxdpd.__version__}: afxdp/pool")  # the first moment in which anybody would
        process.process.send_signal(number)
        with trio.fail_after(1):
            assert await process.ends() == 0
        assert f" INFO    {number.name}: ending; pods keep their devices\n" in process.log
        assert "Traceback" not in process.log


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("config_level", "options", "levels"),
    [
        ("", [], {"INFO", "WARNING"}),
        ("debug", [], {"DEBUG", "INFO", "WARNING"}),
        ("warning", [], {"WARNING"}),
        ("debug", ["--log-level", "warning"], {"WARNING"}),
        ("warning", ["--log-level", "info"], {"INFO", "WARNING"}),
    ],
)
async def test_log_has_its_level_when_the_option_or_the_file_gives_one(
    config_level: str, options: list[str], levels: set[str], kernel: Kernel, directory: Path
) -> None:
    """The level is the option's, else the file's, else info; each line has a time and a level."""
    level = f', "logLevel": "{config_level}"' if config_level else ""
    pool = '{"name": "pool", "mode": "primary", "devices": [{"name": "absent0"}]}'
    (directory / "config.json").write_text(f'{{"pools": [{pool}]{level}}}')
    async with daemon(directory, *options) as process:
        await process.logs(WAITING.format(directory))
        process.process.terminate()
        assert await process.ends() == 0
    lines = process.log.splitlines()
    form = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR) +\S.*")
    found = {match[1] for match in map(form.fullmatch, lines) if match}
    assert found - {"DEBUG"} == levels - {"DEBUG"}
    assert found <= levels
    assert all(map(form.fullmatch, lines))


@pytest.mark.kernel
async def test_kubelet_is_told_a_whole_path_when_the_socket_directory_is_given_as_a_part(
    kernel: Kernel, directory: Path, short_path: Path
) -> None:
    """A relative --uds-dir is made absolute, since kubelet mounts what it is told."""
    make_veth("veth0")
    config = write_config(short_path, pool=["veth0"])
    command = [*PROGRAM, "--config", str(config), "--kubelet-dir", str(short_path / "kubelet"), "--uds-dir", "sockets"]
    async with running_kubelet(short_path / "kubelet") as kubelet:
        process = await trio.lowlevel.open_process(command, cwd=short_path)
        try:
            await kubelet.wait(RESOURCE, healthy=1)
            (answer,) = await kubelet.allocate(RESOURCE, ["veth0"])
            assert answer["mounts"][0]["host_path"] == str(short_path / "sockets/pool/veth0")
        finally:
            process.kill()
            await process.wait()


# -- Where the log goes ------------------------------------------------------------------------------------------------


def with_keys(directory: Path, **keys: Any) -> None:
    """Adds keys to the configuration."""
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))


@pytest.mark.kernel
async def test_log_is_json_when_the_option_says_so(kernel: Kernel, directory: Path) -> None:
    """With --log-format json each line is an object with time, level and message, from the first line to the last."""
    with_keys(directory, logLevel="info", logLevl="debug")
    async with daemon(directory, "--log-format", "json") as process:
        await process.logs(json.dumps(WAITING.format(directory)) + "}")
        process.process.terminate()
        assert await process.ends() == 0
    records = [json.loads(line) for line in process.log.splitlines()]
    assert all(record.keys() == {"time", "level", "message"} for record in records)
    assert {record["level"] for record in records} == {"info", "warning"}
    assert all(
        datetime.datetime.fromisoformat(record["time"]).utcoffset() == datetime.timedelta() for record in records
    )
    assert [record["time"] for record in records] == sorted(record["time"] for record in records)
    messages = [record["message"] for record in records]
    assert messages[0] == "logLevl: unknown key, ignored, did you mean logLevel?"
    assert f"afxdpd {afxdpd.__version__}: afxdp/pool" in messages
    assert WAITING.format(directory) in messages
    assert messages[-1] == "SIGTERM: ending; pods keep their devices"


def test_record_has_the_error_when_there_is_a_traceback(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A traceback is in the field error of its line, and a text that is no UTF-8 does no harm."""
    options = ["--config", str(directory / "config.json"), "--bpffs", str(directory), "--check"]
    assert afxdpd.main([*options, "--log-format", "json"]) == 0
    capsys.readouterr()
    try:
        raise ValueError("two\nlines")  # noqa: TRY301  as somebody's bug would
    except ValueError:
        logging.getLogger("afxdpd").exception("%s", 'it broke: "\ud800é"')
    output = capsys.readouterr()
    assert output.err == ""
    (line,) = output.out.splitlines()
    record = json.loads(line)
    assert record.keys() == {"time", "level", "message", "error"}
    assert (record["level"], record["message"]) == ("error", 'it broke: "\ud800é"')
    assert record["error"].startswith("Traceback (most recent call last):\n")
    assert record["error"].endswith("\nValueError: two\nlines")


@pytest.mark.kernel
@pytest.mark.parametrize("log_format", ["text", "json"])
async def test_log_is_in_the_file_when_the_configuration_names_one(
    log_format: str, kernel: Kernel, directory: Path
) -> None:
    """The file below --log-dir, which is made, has what standard output has from when the configuration was read."""
    with_keys(directory, logFile="afxdp-dp.log")
    file = directory / "logs" / "deep" / "afxdp-dp.log"
    waiting, text = WAITING.format(directory), ""
    if log_format == "json":
        waiting = json.dumps(waiting) + "}"
    for _ in range(2):
        async with daemon(directory, "--log-dir", str(file.parent), "--log-format", log_format) as process:
            await process.logs(waiting)
            process.process.terminate()
            assert await process.ends() == 0
        text += process.log
    assert file.read_text() == text
    assert text.count("ending; pods keep their devices") == 2
    assert file.stat().st_mode & 0o022 == 0


@pytest.mark.kernel
async def test_log_goes_to_a_new_file_when_the_old_one_was_moved_away(kernel: Kernel, directory: Path) -> None:
    """Whoever rotates the file need not tell the daemon."""
    with_keys(directory, logFile="a.txt")
    file = directory / "a.txt"
    async with daemon(directory, "--log-dir", str(directory)) as process:
        await process.logs(WAITING.format(directory))
        file.rename(directory / "a.txt.1")
        process.process.terminate()
        assert await process.ends() == 0
    assert file.read_text().endswith("SIGTERM: ending; pods keep their devices\n")
    assert (directory / "a.txt.1").read_text() + file.read_text() == process.log


@pytest.mark.parametrize(
    ("log_dir", "why"),
    [("config.json", "File exists"), ("config.json/logs", "Not a directory"), (".", "Is a directory")],
)
def test_program_ends_with_2_when_the_log_file_cannot_be_written(log_dir: str, why: str, directory: Path) -> None:
    """A log file that cannot be written is one line that names it and the option; nothing else is done."""
    with_keys(directory, logFile="kubelet.log")
    (directory / "kubelet.log").mkdir()
    place = directory / log_dir
    result = run(directory, *paths_options(directory), "--log-dir", str(place))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"afxdpd: {place / 'kubelet.log'}: {why}: name another directory with --log-dir\n"
    assert not (directory / "uds").exists()


def test_log_file_is_not_made_when_the_configuration_is_checked(directory: Path) -> None:
    """The option --check leaves nothing behind."""
    with_keys(directory, logFile="a.log")
    result = run(directory, "--check", "--log-dir", str(directory / "logs"), "--bpffs", str(directory))
    assert (result.returncode, result.stderr) == (0, "")
    assert not (directory / "logs").exists()


# -- A log that nobody reads -------------------------------------------------------------------------------------------


def all_of(fd: int) -> bytes:
    """Reads a pipe until its end, and closes it."""
    with open(fd, "rb") as file:
        return file.read()


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("count", [500, 30_000])
def test_log_says_what_is_left_out_when_nobody_reads(count: int, later: bool) -> None:
    """Who logs never waits for who reads; what there was no room for is counted in its place, the rest in order."""
    read_end, write_end = os.pipe()
    output = b""
    with open(write_end, "w", encoding="ascii") as stream:
        handler = afxdpd._OutputHandler(stream)
        record = logging.makeLogRecord({"msg": "%d é" + "x" * 100})
        for number in range(count):
            record.args = (number,)
            handler.emit(record)
        if later:
            while handler._size > afxdpd.OUTPUT_MAX // 4:
                output += os.read(read_end, 1 << 12)
            record.args = (count,)
            handler.emit(record)
        with ThreadPoolExecutor(1) as reader:
            rest = reader.submit(all_of, read_end)
            while handler._lines:  # a reader that is alive takes them all
                handler.flush()
            handler.close()
            stream.close()
            output += rest.result(60)
    lines = output.decode().splitlines()
    last = [lines.pop()] if later else []
    if count == 30_000:
        notice = lines.pop()
        assert (1 << 20) - 200 <= sum(len(line) + 1 for line in lines) <= (1 << 20) + (1 << 17)  # some is in the pipe
        assert notice == f"{count - len(lines)} lines are left out here: nobody has read the log"
    else:
        assert len(lines) == count
    assert lines == [f"{number} \\xe9{'x' * 100}" for number in range(len(lines))]
    assert last == ([f"{count} \\xe9{'x' * 100}"] if later else [])


def test_log_is_written_when_its_file_is_non_blocking() -> None:
    """Who shares standard output may have made it non-blocking: lines still arrive whole."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    with open(write_end, "w", encoding="utf-8") as stream:
        handler = afxdpd._OutputHandler(stream)
        for number in range(5000):
            handler.emit(logging.makeLogRecord({"msg": f"{number}" + "x" * 100}))
        with ThreadPoolExecutor(1) as reader:
            output = reader.submit(all_of, read_end)
            while handler._lines:
                handler.flush()
            handler.close()
            stream.close()
            assert output.result(60).decode() == "".join(f"{number}{'x' * 100}\n" for number in range(5000))


def test_log_goes_on_when_its_reader_has_gone() -> None:
    """Lines that can never be written are left out, and nothing waits for them."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "w", encoding="utf-8") as stream:
        handler = afxdpd._OutputHandler(stream)
        for _ in range(1000):
            handler.emit(logging.makeLogRecord({"msg": "x"}))
        while handler._lines:
            handler.flush()
        handler.close()


@pytest.mark.kernel
async def test_daemon_goes_on_when_nobody_reads_its_log(kernel: Kernel, directory: Path) -> None:
    """A full pipe on standard output keeps the daemon neither from serving kubelet nor from ending."""
    with_keys(directory, **{f"unknown{number}" + "x" * 80: 0 for number in range(20_000)})  # 2 MB of warnings
    async with running_kubelet(directory / "kubelet") as kubelet, daemon(directory) as process:
        await kubelet.wait(RESOURCE, streams_open=1)
        process.process.terminate()
        assert await process.process.wait() == 0
        await process.ends()
    assert process.log.startswith("2")
    assert "unknown key, ignored" in process.log
