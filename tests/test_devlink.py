"""Subfunctions: a stand-in for the devlink program that keeps its state in a file, and netlink on the real kernel."""

from __future__ import annotations

import errno
import inspect
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
from conftest import Kernel
from support import make_veth

from afxdpd import Devlink

pytestmark = pytest.mark.program

PCI = "0000:4b:00.1"


class Program:
    """One run of the stand-in for iproute2's devlink and the driver behind it; its source is all of the program.

    It reads its arguments as devlink 6.1 does (options, object, command, handle, then keywords with their values in any
    order), and answers with devlink's words and exit codes. The directory holds ``state.json``, see Nic, and ``sys``,
    the part of sysfs that is about the NIC; an SF has its network device there while it is active.
    """

    def __init__(self, directory: Path) -> None:
        assert os.environ["LC_ALL"] == "C"
        self.file = directory / "state.json"
        self.state = json.loads(self.file.read_text())
        self.pci: str = self.state["pci"]
        self.nic = directory / "sys" / "bus" / "pci" / "devices" / self.pci

    def run(self, arguments: list[str]) -> None:
        """Does what the arguments say."""
        self.state["log"].append(" ".join(arguments))
        as_json = arguments[:1] in (["-j"], ["--json"])
        words = arguments[as_json:]
        for command, function in (
            ("port show", self.show),
            ("port add", self.add),
            ("port function set", self.function_set),
            ("port del", self.delete),
        ):
            length = len(command.split())
            if words[:length] == command.split():
                self.file.write_text(json.dumps(self.state))
                if command in self.state["refuse"]:
                    self.fail(*self.state["refuse"][command])
                output = function(words[length:])
                self.file.write_text(json.dumps(self.state))
                if output is not None:
                    print(json.dumps({"port": output}) if as_json else output)
                return
        self.fail(f'Command "{" ".join(words)}" not found')

    def show(self, words: list[str]) -> dict[str, Any]:
        """All ports."""
        if words:
            self.fail("this stand-in shows all ports or none")
        other = self.pci[:-1] + "0"
        ports = {
            f"pci/{other}/0": {"type": "eth", "netdev": "ens1f0", "flavour": "physical", "port": 0},
            f"pci/{self.pci}/0": {"type": "eth", "netdev": "ens1f1", "flavour": "physical", "port": 1},
            # Somebody's VF, and SF 1 of the other function of the card.
            f"pci/{self.pci}/1": {"type": "eth", "netdev": "ens1f1v0", "flavour": "pcivf", "pfnum": 1, "vfnum": 1},
            f"pci/{other}/9": {"type": "eth", "netdev": "ens1f0sf1", "flavour": "pcisf", "pfnum": 0, "sfnum": 1},
        }
        return ports if self.state["mute"] else ports | self.state["ports"]

    def add(self, words: list[str]) -> dict[str, Any]:
        """Makes a port with its representor."""
        handle, keywords = self.parse(words, "flavour", "pfnum", "sfnum")
        if keywords["flavour"] != "pcisf":
            self.fail("Error: ice: only pcisf is supported.", "devlink answers: Operation not supported")
        if handle != f"pci/{self.pci}":
            self.fail("devlink answers: No such device")
        if keywords["pfnum"] != self.pci[-1]:
            self.fail("Error: ice: Incorrect pfnum supplied.", "devlink answers: Invalid argument")
        number = int(keywords["sfnum"])
        if any(port["sfnum"] == number for port in self.state["ports"].values()):
            self.fail("Error: ice: the sfnum already exists.", "devlink answers: Device or resource busy")
        self.state["next"] += 1
        index = 20 + self.state["next"]
        address = f"02:00:00:00:00:{index:02x}" if self.state["driver"] == "ice" else "00:00:00:00:00:00"
        port = {
            "type": "eth",
            "netdev": f"eth{index}",
            "flavour": "pcisf",
            "controller": 0,
            "pfnum": int(self.pci[-1]),
            "sfnum": number,
            "splittable": False,
            "function": {"hw_addr": address, "state": "inactive", "opstate": "detached"},
        }
        self.make_netdev(self.nic / "net" / f"eth{index}", f"02:ff:00:00:00:{index:02x}")
        self.state["ports"][f"pci/{self.pci}/{index}"] = port
        return {f"pci/{self.pci}/{index}": port}

    def function_set(self, words: list[str]) -> None:
        """Activates a port, which brings the SF's network device."""
        handle, keywords = self.parse(words, "state")
        port = self.port(handle)
        if keywords["state"] not in ("active", "inactive"):
            self.fail(f'unknown state "{keywords["state"]}"')
        self.remove_netdev(handle)
        port["function"] |= {"state": keywords["state"], "opstate": "detached"}
        if keywords["state"] == "active" and not self.state["slow"]:
            port["function"]["opstate"] = "attached"
            index = int(handle.rpartition("/")[2])
            if self.state["driver"] == "ice":
                (self.nic / f"ice.sf.{index}").mkdir()
                self.make_netdev(self.nic / "net" / f"sfdev{index}", port["function"]["hw_addr"])
            else:
                auxiliary = self.nic / f"mlx5_core.sf.{index}"
                self.make_netdev(auxiliary / "net" / f"sfdev{index}", f"02:aa:00:00:00:{index:02x}")
                (auxiliary / "sfnum").write_text(f"{port['sfnum']}\n")

    def delete(self, words: list[str]) -> None:
        """Deletes a port, its representor and the SF's network device."""
        handle, _ = self.parse(words)
        port = self.port(handle)
        self.remove_netdev(handle)
        shutil.rmtree(self.nic / "net" / port["netdev"])
        del self.state["ports"][handle]

    def parse(self, words: list[str], *expected: str) -> tuple[str, dict[str, str]]:
        """The handle, and the keywords with their values."""
        handle, *rest = words
        keywords = dict(zip(rest[::2], rest[1::2], strict=True))
        if len(rest) != 2 * len(expected) or keywords.keys() != set(expected):
            self.fail(f"Unknown option, or one is expected: {' '.join(rest)}")
        return handle, keywords

    def port(self, handle: str) -> dict[str, Any]:
        """The port with this handle."""
        if handle not in self.state["ports"]:
            self.fail("devlink answers: No such device")
        port: dict[str, Any] = self.state["ports"][handle]
        return port

    @staticmethod
    def make_netdev(path: Path, address: str) -> None:
        """Makes a network device in sysfs."""
        path.mkdir(parents=True)
        (path / "address").write_text(f"{address}\n")

    def remove_netdev(self, handle: str) -> None:
        """Removes an SF's network device and its auxiliary device."""
        index = handle.rpartition("/")[2]
        for name in (f"net/sfdev{index}", f"ice.sf.{index}", f"mlx5_core.sf.{index}"):
            shutil.rmtree(self.nic / name, ignore_errors=True)

    @staticmethod
    def fail(*lines: str) -> NoReturn:
        """Ends as devlink does."""
        print(*lines, sep="\n", file=sys.stderr)
        sys.exit(1)


class Nic:
    """A NIC that can have SFs, behind a program of its own.

    In the state are, besides the ports: ``refuse``, what is said on standard error, by command ("port add"); ``slow``,
    whether activating an SF brings no network device yet; ``mute``, whether a new port is not shown.
    """

    def __init__(self, directory: Path, driver: str) -> None:
        self._file = directory / "state.json"
        state = {"pci": PCI, "driver": driver, "ports": {}, "next": 0, "refuse": {}, "slow": False, "mute": False}
        self._file.write_text(json.dumps({**state, "log": []}))
        self.sysfs = directory / "sys"
        for name in ("ens1f1", "ens1f1v0"):
            Program.make_netdev(self.sysfs / "devices/pci0000:4a/0000:4a:02.0" / PCI / "net" / name, "3c:fd:fe:0:0:1")
        (self.sysfs / "bus/pci/devices").mkdir(parents=True)
        (self.sysfs / "bus/pci/devices" / PCI).symlink_to(f"../../../devices/pci0000:4a/0000:4a:02.0/{PCI}")
        self.program = directory / "devlink"
        source = [
            f"#!{sys.executable} -IS",
            "from __future__ import annotations",
            "import json, os, shutil, sys",
            "from pathlib import Path",
            inspect.getsource(Program),
            f"Program(Path({str(directory)!r})).run(sys.argv[1:])",
        ]
        self.program.write_text("\n".join(source))
        self.program.chmod(0o755)

    def devlink(self) -> Devlink:
        """What is tested."""
        return Devlink(str(self.program), self.sysfs)

    def set(self, **changes: object) -> None:
        """Changes how the stand-in behaves."""
        self._file.write_text(json.dumps(json.loads(self._file.read_text()) | changes))

    def run(self, *arguments: str) -> None:
        """Lets somebody else use the program."""
        subprocess.run([self.program, *arguments], env={"LC_ALL": "C"}, check=True)

    def ports(self) -> dict[int, dict[str, Any]]:
        """The SFs by number, each as devlink shows it."""
        return {port["sfnum"]: port for port in json.loads(self._file.read_text())["ports"].values()}

    def commands(self) -> list[str]:
        """What was asked for since the last time, but for shows."""
        log = json.loads(self._file.read_text())["log"]
        self.set(log=[])
        return [command for command in log if command != "-j port show"]


@pytest.fixture
def nic(short_path: Path) -> Nic:
    """A NIC as Intel's ice drives it."""
    return Nic(short_path, "ice")


def test_subfunction_is_active_when_it_was_added(nic: Nic) -> None:
    """A new SF is a port of the NIC, made and activated by two commands, and its network device is found."""
    nic.devlink().add(PCI, 3)
    assert nic.commands() == [
        f"port add pci/{PCI} flavour pcisf pfnum 1 sfnum 3",
        f"port function set pci/{PCI}/21 state active",
    ]
    assert nic.ports()[3]["function"]["state"] == "active"
    assert nic.devlink().netdev(PCI, 3) == "sfdev21"


def test_subfunction_is_used_again_when_it_is_there(nic: Nic) -> None:
    """An SF that has the number is activated and not made again."""
    nic.devlink().add(PCI, 3)
    nic.run("port", "function", "set", f"pci/{PCI}/21", "state", "inactive")
    nic.commands()
    nic.devlink().add(PCI, 3)
    assert nic.commands() == [f"port function set pci/{PCI}/21 state active"]
    assert nic.ports()[3]["function"]["state"] == "active"
    assert nic.ports().keys() == {3}


def test_subfunction_is_deleted_when_it_cannot_be_activated(nic: Nic) -> None:
    """A new SF that is of no use does not stay, and the error is that of the activation."""
    said = ["Error: ice: Failed to add SF device.", "devlink answers: No space left on device"]
    nic.set(refuse={"port function set": said})
    with pytest.raises(OSError, match="Failed to add SF device") as caught:
        nic.devlink().add(PCI, 3)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == f"{nic.program} port function set pci/{PCI}/21 state active"
    assert nic.ports() == {}


def test_activation_error_is_told_when_the_deletion_fails_too(nic: Nic) -> None:
    """What is reported is why there is no SF, not what was tried afterwards."""
    activation, deletion = "devlink answers: Input/output error", "devlink answers: Nope"
    nic.set(refuse={"port function set": [activation], "port del": [deletion]})
    with pytest.raises(OSError, match="port function set") as caught:
        nic.devlink().add(PCI, 3)
    assert caught.value.errno == errno.EIO
    assert caught.value.strerror == activation


def test_old_subfunction_is_kept_when_it_cannot_be_activated(nic: Nic) -> None:
    """Only an SF that was made by this call is deleted after a failure."""
    nic.devlink().add(PCI, 3)
    nic.set(refuse={"port function set": ["devlink answers: Device or resource busy"]})
    with pytest.raises(OSError, match="busy"):
        nic.devlink().add(PCI, 3)
    assert nic.ports().keys() == {3}


def test_error_says_what_the_driver_says_when_a_port_is_refused(nic: Nic) -> None:
    """The driver's words are one line of text, the kernel's number is the error's, and the command is named."""
    driver = "Error: ice: SF ports are only supported in eswitch switchdev mode."
    said = [driver, "devlink answers: Operation not supported"]
    nic.set(refuse={"port add": said})
    with pytest.raises(OSError, match="switchdev") as caught:
        nic.devlink().add(PCI, 3)
    assert caught.value.errno == errno.EOPNOTSUPP
    assert caught.value.strerror == "; ".join(said)
    assert caught.value.filename == f"{nic.program} port add pci/{PCI} flavour pcisf pfnum 1 sfnum 3"


@pytest.mark.parametrize(
    ("said", "text"),
    [(["Failed to connect to devlink Netlink"], "Failed to connect to devlink Netlink"), ([], "exit status 1")],
    ids=["words", "silence"],
)
def test_error_is_eio_when_the_program_gives_no_number(nic: Nic, said: list[str], text: str) -> None:
    """A failure that the kernel has no number for is EIO, with the program's words or its exit status."""
    nic.set(refuse={"port show": said})
    with pytest.raises(OSError, match=re.escape(text)) as caught:
        nic.devlink().netdev(PCI, 3)
    assert caught.value.errno == errno.EIO


def test_error_names_the_number_when_a_new_port_is_not_shown(nic: Nic) -> None:
    """A port that devlink claims to have made and does not show is an error, not an endless search."""
    nic.set(mute=True)
    with pytest.raises(OSError, match="made SF 3") as caught:
        nic.devlink().add(PCI, 3)
    assert caught.value.errno == errno.ENODEV


def test_numbers_are_told_apart_when_a_nic_has_many(nic: Nic) -> None:
    """Each SF has its own port and network device; the other function of the card has numbers of its own."""
    devlink = nic.devlink()
    for number in (1, 2, 12):
        devlink.add(PCI, number)
    assert [devlink.netdev(PCI, number) for number in (1, 2, 12)] == ["sfdev21", "sfdev22", "sfdev23"]
    assert devlink.netdev(PCI, 3) is None
    devlink.delete(PCI, 1)
    assert nic.ports().keys() == {2, 12}
    assert devlink.netdev(PCI, 1) is None


def test_deletion_does_nothing_when_there_is_no_such_subfunction(nic: Nic) -> None:
    """To delete what is not there, or is there no more, is fine, and asks devlink for nothing."""
    nic.devlink().add(PCI, 2)
    nic.commands()
    nic.devlink().delete(PCI, 1)
    assert nic.commands() == []
    assert nic.ports().keys() == {2}


@pytest.mark.parametrize("driver", ["ice", "mlx5"])
def test_netdev_is_none_when_it_has_not_come(short_path: Path, driver: str) -> None:
    """The representor, which is there from the beginning, is never taken for the SF's own device."""
    nic = Nic(short_path, driver)
    assert nic.devlink().netdev(PCI, 3) is None
    nic.set(slow=True)
    nic.devlink().add(PCI, 3)
    assert nic.ports()[3]["netdev"] == "eth21"
    assert nic.devlink().netdev(PCI, 3) is None
    nic.set(slow=False)
    nic.devlink().add(PCI, 3)
    assert nic.devlink().netdev(PCI, 3) == "sfdev21"


@pytest.mark.parametrize("rest", ["no device", "no directory"])
def test_netdev_is_none_when_a_pod_has_it(short_path: Path, rest: str) -> None:
    """An auxiliary device without a network device in this namespace has none to name."""
    nic = Nic(short_path, "mlx5")
    nic.devlink().add(PCI, 3)
    shutil.rmtree(
        nic.sysfs / "bus/pci/devices" / PCI / "mlx5_core.sf.21/net" / ("sfdev21" if rest == "no device" else "")
    )
    assert nic.devlink().netdev(PCI, 3) is None


def test_error_says_what_to_install_when_there_is_no_program() -> None:
    """Without the program the text says so, and where it is missing."""
    with pytest.raises(
        FileNotFoundError, match="no program no-such-devlink: install it in the daemon's image"
    ) as caught:
        Devlink("no-such-devlink").add(PCI, 3)
    assert caught.value.filename == "no-such-devlink -j port show"


def test_error_is_told_when_the_program_may_not_run(nic: Nic) -> None:
    """A program that cannot be run is the kernel's answer."""
    nic.program.chmod(stat.S_IRUSR)
    with pytest.raises(PermissionError):
        nic.devlink().add(PCI, 3)


def test_program_is_found_when_it_is_on_the_path(nic: Nic, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a path of its own it is the first devlink that there is."""
    monkeypatch.setenv("PATH", f"{nic.program.parent}:{os.environ['PATH']}")
    Devlink(sysfs=nic.sysfs).add(PCI, 3)
    assert nic.ports().keys() == {3}


def test_real_program_is_understood_when_there_is_no_such_nic() -> None:
    """iproute2's own devlink refuses a NIC that does not exist, in words that end up in the error."""
    if shutil.which("devlink") is None:
        pytest.skip("there is no devlink program")
    with pytest.raises(OSError, match=r"devlink (-j port show|port add)") as caught:
        Devlink().add("ffff:ff:1f.7", 3)
    assert caught.value.strerror
    assert "\n" not in caught.value.strerror
    assert "Usage" not in caught.value.strerror


def flags(name: str) -> list[str]:
    """The flags of a device of this namespace."""
    shown = subprocess.run(["ip", "-json", "link", "show", name], check=True, capture_output=True, text=True).stdout
    return list(json.loads(shown)[0]["flags"])


@pytest.mark.kernel
def test_device_keeps_its_state_when_it_is_renamed(kernel: Kernel) -> None:
    """A device that is up is up afterwards, one that is down stays down."""
    make_veth("one")
    Devlink().rename("one", "ens1f1sf1")
    assert "UP" in flags("ens1f1sf1")
    subprocess.run(["ip", "link", "set", "ens1f1sf1", "down"], check=True)
    Devlink().rename("ens1f1sf1", "two")
    assert "UP" not in flags("two")


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("old", "new", "code", "name"),
    [
        ("none", "two", errno.ENODEV, "none"),
        ("one", "onep", errno.EEXIST, "onep"),
        ("one", "enp129s0f0np0sf1", errno.ENAMETOOLONG, "enp129s0f0np0sf1"),
    ],
    ids=["no device", "name taken", "name too long"],
)
def test_device_is_as_before_when_it_cannot_be_renamed(
    kernel: Kernel, old: str, new: str, code: int, name: str
) -> None:
    """The error has the kernel's number and the name in question, and the device is up as before."""
    make_veth("one")
    with pytest.raises(OSError, match=name) as caught:
        Devlink().rename(old, new)
    assert (caught.value.errno, caught.value.filename) == (code, name)
    assert "UP" in flags("one")
