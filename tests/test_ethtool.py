"""ethtool commands and what undoes them: on devices of this kernel, and by a stand-in for what they do not have."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from conftest import Kernel
from pyroute2 import IPRoute
from pyroute2.ethtool import Ethtool as OtherEthtool

from afxdpd import Ethtool

RINGS = """\
Ring parameters for veth6:
Pre-set maximums:
RX:			4096
RX Mini:		n/a
RX Jumbo:		n/a
TX:			4096
TX push buff len:	512
Current hardware settings:
RX:			{rx}
RX Mini:		n/a
RX Jumbo:		n/a
TX:			{tx}
RX Buf Len:		n/a
CQE Size:		n/a
TX Push:		off
RX Push:		off
TX push buff len:	{push}
TCP data split:		n/a

"""
CHANNELS = """\
Channel parameters for veth6:
Pre-set maximums:
RX:		n/a
TX:		n/a
Other:		1
Combined:	8
Current hardware settings:
RX:		n/a
TX:		n/a
Other:		1
Combined:	{combined}

"""
COALESCING = """\
Coalesce parameters for veth6:
Adaptive RX: {adaptive}  TX: off
stats-block-usecs:	n/a
sample-interval:	n/a

rx-usecs:	{usecs}
rx-frames:	n/a

rx-usecs-low:	0
rx-frame-low:	{low}

CQE mode RX: {cqe}  TX: n/a

"""
PAUSE = """\
Pause parameters for veth6:
Autonegotiate:	{autoneg}
RX:		{rx}
TX:		on
{negotiated}
"""
PRIVATE_FLAGS = """\
Private flags for veth6:
MFP               : off
legacy-rx         : {legacy}
link-down on close: on
"""
FEATURES = """\
Features for veth6:
tx-checksumming: {sum}
\ttx-checksum-ipv4: off [fixed]
\ttx-checksum-ip-generic: {generic}
\ttx-checksum-sctp: off
tcp-segmentation-offload: {sum}
\ttx-tcp-segmentation: {tso}
\ttx-tcp-mangleid-segmentation: off
generic-receive-offload: on
large-receive-offload: off [fixed]
"""


class StandIn:
    """A program ethtool that shows a text, and another one once a command has set something."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.answers()

    def answers(self, *, now: str = "", then: str = "", said: str = "", complaint: str = "", status: int = 0) -> None:
        """What it shows now and after the first command, and what it answers to commands."""
        for name, text in (("now", now), ("then", then), ("said", said), ("complaint", complaint), ("log", "")):
            (self._directory / name).write_text(text)
        self.script(
            f"""cd {self._directory}
            echo "$*" >> log
            case $1 in
                -[klgca]|--show-priv-flags) cat now ;;
                *) [ ! -e then ] || mv then now; cat said; cat complaint >&2; exit {status} ;;
            esac"""
        )

    def script(self, text: str) -> None:
        """What it does, in the shell's language."""
        program = self._directory / "ethtool"
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)

    def calls(self) -> list[str]:
        """What it was called with since the last time this was asked."""
        calls = (self._directory / "log").read_text().splitlines()
        (self._directory / "log").write_text("")
        return calls


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """The stand-in, found before any ethtool."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return StandIn(tmp_path)


class Memory:
    """Everything that was to be remembered, in order."""

    def __init__(self) -> None:
        self.calls: list[list[list[str]]] = []

    def __call__(self, commands: list[list[str]]) -> None:
        """Remembers."""
        self.calls.append(commands)

    @property
    def last(self) -> list[list[str]]:
        """What holds."""
        return self.calls[-1]


# -- The commands of the configuration ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("-K -device- gro off", ["-K", "veth6", "gro", "off"]),
        ("ethtool -X -device- equal 5 start 3", ["-X", "veth6", "equal", "5", "start", "3"]),
        ("  --set-priv-flags   -device-  legacy-rx on ", ["--set-priv-flags", "veth6", "legacy-rx", "on"]),
        ("-f -device- fw/-device-.bin", ["-f", "veth6", "fw/veth6.bin"]),
        ("-K -device- gro 'o ff'; reboot $(id)", ["-K", "veth6", "gro", "'o", "ff';", "reboot", "$(id)"]),
    ],
)
def test_arguments_are_the_words_when_a_command_is_split(command: str, arguments: list[str]) -> None:
    """A command is split at spaces, and nothing in it is for a shell; -device- becomes the name wherever it stands."""
    assert Ethtool.arguments(command, "veth6") == arguments


@pytest.mark.parametrize(
    ("command", "right"),
    [
        ("-K -device- gro off", True),
        ("ethtool --offload -device- gro off", True),
        ("-r -device-", True),
        ("-K eth0 gro off", True),
        ("", False),
        ("   ", False),
        ("ethtool", False),
        ("-K", False),
        ("ethtool -K", False),
        ("-device-", False),
        ("reboot -device-", False),
        ("ethtool ethtool -K -device- gro off", False),
    ],
)
def test_command_is_told_when_it_is_an_option_with_a_device(command: str, right: bool) -> None:
    """What is not an option with something after it cannot be an ethtool command, which the configuration refuses."""
    assert Ethtool.is_command(command) is right


@pytest.mark.parametrize(
    ("command", "undone"),
    [
        ("-K -device- gro off", True),
        ("--offload -device- gro off", True),
        ("-X -device- equal 2", True),
        ("-X -device- equal 2 hfunc xor", False),
        ("-X -device- context new", False),
        ("-U -device- flow-type udp4 action 1", True),
        ("-U -device- rx-flow-hash udp4 fn", False),
        ("-U -device- delete 4", False),
        ("-s -device- speed 1000", False),
        ("-r -device-", False),
    ],
)
def test_command_is_known_to_be_undone_when_it_is_of_such_a_kind(command: str, undone: bool) -> None:
    """Whether a command will be undone as a whole can be told from the configuration."""
    assert Ethtool.is_undone(Ethtool.arguments(command, "veth6")) is undone


# -- Settings, by the stand-in -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "show", "before", "after", "everything", "restore"),
    [
        pytest.param(
            "-G veth6 rx 512 tx 512",
            "-g",
            RINGS.format(rx=256, tx=256, push=64),
            RINGS.format(rx=512, tx=512, push=32),
            "rx 256 tx 256 tx-push-buf-len 64 tx-push off rx-push off",
            "rx 256 tx 256 tx-push-buf-len 64",
            id="rings",
        ),
        pytest.param(
            "-L veth6 combined 2",
            "-l",
            CHANNELS.format(combined=8),
            CHANNELS.format(combined=2),
            "other 1 combined 8",
            "combined 8",
            id="channels",
        ),
        pytest.param(
            "--coalesce veth6 adaptive-rx off",
            "-c",
            COALESCING.format(adaptive="on", usecs=50, low=16, cqe="on"),
            COALESCING.format(adaptive="off", usecs=0, low=8, cqe="off"),
            "adaptive-rx on adaptive-tx off rx-usecs 50 rx-usecs-low 0 rx-frames-low 16 cqe-mode-rx on",
            "adaptive-rx on rx-usecs 50 rx-frames-low 16 cqe-mode-rx on",
            id="coalescing",
        ),
        pytest.param(
            "-A veth6 autoneg off rx off",
            "-a",
            PAUSE.format(autoneg="on", rx="on", negotiated="RX negotiated: on\nTX negotiated: on"),
            PAUSE.format(autoneg="off", rx="off", negotiated=""),
            "autoneg on rx on tx on",
            "autoneg on rx on",
            id="pause",
        ),
        pytest.param(
            "--set-priv-flags veth6 legacy-rx on",
            "--show-priv-flags",
            PRIVATE_FLAGS.format(legacy="off"),
            PRIVATE_FLAGS.format(legacy="on"),
            "MFP off legacy-rx off link-down on close on",
            "legacy-rx off",
            id="private flags",
        ),
        pytest.param(
            "-K veth6 tx off",
            "-k",
            FEATURES.format(sum="on", generic="on", tso="on"),
            FEATURES.format(sum="off", generic="off", tso="off [requested on]"),
            "tx-checksum-ip-generic on tx-checksum-sctp off tx-tcp-segmentation on tx-tcp-mangleid-segmentation off "
            "generic-receive-offload on",
            "tx-checksum-ip-generic on",
            id="features",
        ),
    ],
)
def test_settings_are_restored_by_their_names_when_a_command_is_undone(
    stand_in: StandIn, command: str, show: str, before: str, after: str, everything: str, restore: str
) -> None:
    """What a command changed, named or not, gets its old value by its own name; all is known before it runs."""
    stand_in.answers(now=before, then=after)
    memory = Memory()
    Ethtool().apply(command.split(), memory)
    option = command.split()[0]
    assert [[" ".join(words) for words in commands] for commands in memory.calls] == [
        [f"{option} veth6 {everything}"],
        [f"{option} veth6 {restore}"],
    ]
    assert stand_in.calls() == [f"{show} veth6", command, f"{show} veth6"]
    Ethtool().undo(memory.last)
    assert stand_in.calls() == [f"{show} veth6", f"{option} veth6 {restore}"]


def test_undo_sets_only_what_differs_when_the_daemon_ended_early(stand_in: StandIn) -> None:
    """What was known before the command ran undoes it as well, without touching what the driver may refuse."""
    memory = Memory()
    stand_in.answers(now=RINGS.format(rx=256, tx=256, push=64), then=RINGS.format(rx=512, tx=256, push=64))
    Ethtool().apply(["-G", "veth6", "rx", "512"], memory)
    stand_in.calls()
    Ethtool().undo(memory.calls[0])
    assert stand_in.calls() == ["-g veth6", "-G veth6 rx 256"]


def test_undo_sets_nothing_when_all_is_as_it_was(stand_in: StandIn) -> None:
    """Undoing what is undone already, or was never done, is harmless."""
    memory = Memory()
    stand_in.answers(now=RINGS.format(rx=256, tx=256, push=64), then=RINGS.format(rx=256, tx=256, push=64))
    Ethtool().apply(["-G", "veth6", "rx", "256"], memory)
    assert memory.last == []
    stand_in.calls()
    Ethtool().undo(memory.calls[0])
    assert stand_in.calls() == ["-g veth6"]


def test_setting_is_undone_as_known_before_when_it_fails(stand_in: StandIn) -> None:
    """A command that fails may have changed something: what was known before it ran stays known."""
    stand_in.answers(
        now=RINGS.format(rx=256, tx=256, push=64), complaint="netlink error: Invalid argument\n", status=92
    )
    memory = Memory()
    with pytest.raises(OSError, match="Invalid argument"):
        Ethtool().apply(["-G", "veth6", "rx", "512"], memory)
    assert len(memory.calls) == 1


# -- Indirection tables, rules, and what is not undone -----------------------------------------------------------------


def test_indirection_table_goes_back_to_the_default_when_it_is_undone(stand_in: StandIn) -> None:
    """What undoes -X is known before it runs: the driver's default."""
    memory = Memory()
    Ethtool().apply(["-X", "veth6", "equal", "5", "start", "3"], memory)
    Ethtool().undo(memory.last)
    assert memory.calls == [[["-X", "veth6", "default"]]]
    assert stand_in.calls() == ["-X veth6 equal 5 start 3", "-X veth6 default"]


@pytest.mark.usefixtures("stand_in")
def test_default_table_is_left_alone_when_the_command_is_on_another_context() -> None:
    """A command on an RSS context of its own is not undone by resetting the device's table."""
    memory = Memory()
    Ethtool().apply(["-X", "veth6", "context", "new", "equal", "2"], memory)
    assert memory.calls == []


def test_rule_is_deleted_by_its_number_when_ethtool_told_it(stand_in: StandIn) -> None:
    """A flow rule whose place the driver chose is deleted there."""
    stand_in.answers(said="Added rule with ID 1023\n", complaint="Cannot add new rule via N-tuple: Not supported\n")
    memory = Memory()
    Ethtool().apply(["--config-ntuple", "veth6", "flow-type", "udp4", "dst-port", "11", "action", "4"], memory)
    Ethtool().undo(memory.last)
    assert stand_in.calls()[1:] == ["--config-ntuple veth6 delete 1023"]


def test_rule_is_known_before_it_is_made_when_it_has_a_place(stand_in: StandIn) -> None:
    """A flow rule whose place the command names is known before it is there; ethtool says nothing then."""
    memory = Memory()
    Ethtool().apply(["-N", "veth6", "flow-type", "udp4", "action", "4", "loc", "7"], memory)
    assert memory.calls == [[["-N", "veth6", "delete", "7"]]]
    assert stand_in.calls() == ["-N veth6 flow-type udp4 action 4 loc 7"]


@pytest.mark.parametrize("status", [1, 0], ids=["ethtool 6.3", "ethtool 6.1"])
def test_nothing_is_to_be_undone_when_a_rule_was_refused(stand_in: StandIn, status: int) -> None:
    """Where a rule was refused, the one in its place is somebody else's, and is not deleted."""
    stand_in.answers(complaint="rmgr: Cannot insert RX class rule: File exists\nCannot insert\n", status=status)
    memory = Memory()
    with pytest.raises(OSError, match="File exists"):
        Ethtool().apply(["-N", "veth6", "flow-type", "udp4", "action", "4", "loc", "7"], memory)
    assert memory.last == []


def test_warning_is_given_once_when_a_command_is_not_undone(
    stand_in: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    """A command that nothing undoes runs, and one warning for all devices says so."""
    caplog.set_level(logging.WARNING, "afxdpd")
    memory = Memory()
    ethtool = Ethtool()
    for device in ("veth6", "veth7"):
        ethtool.apply(["-U", device, "rx-flow-hash", "udp4", "fn"], memory)
    assert memory.calls == []
    assert stand_in.calls() == ["-U veth6 rx-flow-hash udp4 fn", "-U veth7 rx-flow-hash udp4 fn"]
    assert [record.getMessage() for record in caplog.records] == [
        "ethtool -U veth6 rx-flow-hash udp4 fn: not undone at release, or not all of it"
    ]


# -- Failures ----------------------------------------------------------------------------------------------------------


def test_error_has_the_command_and_the_text_when_ethtool_says_something(stand_in: StandIn) -> None:
    """The lines that ethtool printed are one line of text, and the command is the file name."""
    stand_in.answers(complaint="netlink error: no device\n\nnetlink error: No such device\n", status=92)
    with pytest.raises(OSError, match="No such device") as caught:
        Ethtool().apply(["-s", "veth6", "speed", "10"], Memory())
    assert caught.value.errno == errno.EIO
    assert caught.value.strerror == "netlink error: no device; netlink error: No such device"
    assert caught.value.filename == "ethtool -s veth6 speed 10"


def test_error_has_the_exit_status_when_ethtool_says_nothing(stand_in: StandIn) -> None:
    """Where ethtool prints nothing, its exit status is told."""
    stand_in.script("exit 75")
    with pytest.raises(OSError, match="exit status 75"):
        Ethtool().apply(["-r", "veth6"], Memory())


def test_environment_is_plain_when_ethtool_runs(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program runs in the C locale, with PATH, no other variable, and nothing to read."""
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("SECRET", "x")
    stand_in.script('echo "$LC_ALL,$SECRET,$(cat)" >&2; exit 1')
    with pytest.raises(OSError, match=r"C,,") as caught:
        Ethtool().apply(["-r", "veth6"], Memory())
    assert caught.value.strerror == "C,,"


def test_undo_goes_on_when_one_fails(stand_in: StandIn) -> None:
    """All are tried, the newest first, and the one error names all that failed."""
    stand_in.answers(complaint="Operation not permitted\n", status=92)
    with pytest.raises(OSError, match="not permitted") as caught:
        Ethtool().undo([["-X", "veth6", "default"], ["-N", "veth6", "delete", "7"]])
    assert stand_in.calls() == ["-N veth6 delete 7", "-X veth6 default"]
    assert caught.value.filename == "ethtool -N veth6 delete 7"
    assert caught.value.strerror == "Operation not permitted; ethtool -X veth6 default: Operation not permitted"


def test_error_says_what_to_install_when_there_is_no_ethtool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ethtool the error says what to do, and nothing is left to undo."""
    monkeypatch.setenv("PATH", str(tmp_path))
    memory = Memory()
    with pytest.raises(FileNotFoundError, match=r"install it in the daemon's image") as caught:
        Ethtool().apply(["-X", "veth6", "default"], memory)
    assert caught.value.filename == "ethtool -X veth6 default"
    assert memory.last == []


def test_program_is_ended_when_it_hangs(stand_in: StandIn) -> None:
    """After its time ethtool is killed, and since it may have done its work, what undoes that stays known."""
    stand_in.script("exec sleep 1000")
    memory = Memory()
    with pytest.raises(TimeoutError, match=r"not done after 0.2 s") as caught:
        Ethtool(timeout=0.2).apply(["-X", "veth6", "equal", "2"], memory)
    assert caught.value.filename == "ethtool -X veth6 equal 2"
    assert memory.last == [["-X", "veth6", "default"]]


# -- Real devices ------------------------------------------------------------------------------------------------------


@pytest.fixture
def observe(kernel: Kernel) -> Iterator[Callable[[], tuple[Any, ...]]]:
    """veth6 of 4 queues and the tap device tap0, and a function that asks an implementation of its own for them."""
    with IPRoute() as ipr:
        ipr.link("add", ifname="veth6", kind="veth", num_rx_queues=4, num_tx_queues=4, peer={"ifname": "veth7"})
        ipr.link("add", ifname="tap0", kind="tuntap", mode="tap")
    with closing(OtherEthtool()) as other:

        def ask() -> tuple[Any, ...]:
            features = other.get_features("veth6").features
            return (
                {name: feature.enable for name, feature in features.items()},
                other.get_channels("veth6"),
                dict(other.get_coalesce("tap0")),
            )

        yield ask


@pytest.mark.kernel
@pytest.mark.parametrize(
    "command",
    [
        pytest.param("-K veth6 gro on", id="one feature"),
        pytest.param("-K veth6 tx off sg off", id="features that take others along"),
        pytest.param("--offload veth6 generic-receive-offload on rx-gro-list on tso off", id="features by their names"),
        pytest.param("-L veth6 rx 2 tx 1", id="channels"),
        pytest.param("-C tap0 rx-frames 20", id="coalescing"),
    ],
)
@pytest.mark.parametrize("known", [0, 1], ids=["before", "after"])
def test_device_is_as_it_was_when_the_command_is_undone(
    observe: Callable[[], tuple[Any, ...]], command: str, known: int
) -> None:
    """Both what was known before the command ran and what is known after it undo it wholly, and twice is harmless."""
    ethtool, memory, before = Ethtool(), Memory(), observe()
    ethtool.apply(command.split(), memory)
    assert observe() != before
    for _ in range(2):
        ethtool.undo(memory.calls[known])
        assert observe() == before


@pytest.mark.kernel
def test_commands_are_undone_in_reverse_when_there_are_several(observe: Callable[[], tuple[Any, ...]]) -> None:
    """Commands that change the same setting one after the other are undone to what was before the first."""
    ethtool, before = Ethtool(), observe()
    commands: list[list[str]] = []
    for command in ("-K veth6 gro on", "-L veth6 rx 2", "-K veth6 gro off tso off", "-L veth6 rx 3", "-K veth6 gro on"):
        memory = Memory()
        ethtool.apply(command.split(), memory)
        commands += memory.last
    ethtool.undo(commands)
    assert observe() == before


@pytest.mark.kernel
@pytest.mark.usefixtures("observe")
def test_undo_is_content_when_a_request_is_back(caplog: pytest.LogCaptureFixture) -> None:
    """A tap device's segmentation is requested and off; ethtool calls it a failure to request it again, we do not."""
    ethtool, memory = Ethtool(), Memory()
    ethtool.apply(["-K", "tap0", "tx-tcp-segmentation", "off"], memory)
    assert memory.last == [["-K", "tap0", "tx-tcp-segmentation", "on"]]
    ethtool.undo(memory.last)
    ethtool.apply(["-K", "tap0", "tx-tcp-segmentation", "off"], memory)
    assert memory.last == [["-K", "tap0", "tx-tcp-segmentation", "on"]]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.kernel
@pytest.mark.usefixtures("observe")
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("-K veth6 gor off", "bit name not found"),
        ("-K veth6 lro on", "Could not change any device features"),
        ("-K nope gro off", "No such device"),
        ("-L veth6 rx 9", "exceeds maximum"),
        ("-C tap0 rx-usecs 5", "unsupported parameter"),
        ("-G veth6 rx 512", "Operation not supported"),
        ("-A veth6 rx off", "Operation not supported"),
        ("--set-priv-flags veth6 a on", "Operation not supported"),
        ("-X veth6 equal 2", "Operation not supported"),
        ("-N veth6 flow-type udp4 dst-port 11 action 4", "Operation not supported"),
        ("-N veth6 flow-type udp4 dst-port 11 action 4 loc 3", "Operation not supported"),
        ("-N veth6 rx-flow-hash udp4 sdfn", "Operation not supported"),
        ("--frobnicate veth6 1", "bad command line"),
    ],
)
def test_command_is_told_and_leaves_nothing_to_undo_when_it_is_refused(command: str, said: str) -> None:
    """What the device refuses is an error with ethtool's words, and what is known then can be undone without one."""
    ethtool, memory = Ethtool(), Memory()
    memory([])
    with pytest.raises(OSError, match=said) as caught:
        ethtool.apply(command.split(), memory)
    assert caught.value.errno == errno.EIO
    ethtool.undo(memory.last)


@pytest.mark.kernel
def test_undo_fails_when_the_device_is_gone(observe: Callable[[], tuple[Any, ...]]) -> None:
    """A device that no longer exists is an error like any other."""
    ethtool, memory = Ethtool(), Memory()
    observe()
    ethtool.apply(["-K", "veth6", "gro", "on"], memory)
    with IPRoute() as ipr:
        ipr.link("del", ifname="veth6")
    with pytest.raises(OSError, match="No such device"):
        ethtool.undo(memory.last)
