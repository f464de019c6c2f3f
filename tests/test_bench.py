"""The benchmark itself: its statistics, its command line, and a run of some measurements at the smallest size."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from bench_report import LINEAR, Bar, Figure, percentile, ratios, table

BENCH = [sys.executable, str(Path(__file__).with_name("bench.py"))]
MARK = "AFXDPD_BENCH_TEST"


def figure(*samples: float, name: str = "call", size: int | None = None, bars: tuple[Bar, ...] = ()) -> Figure:
    """A figure in milliseconds."""
    return Figure(
        name=name, what="a call", unit="ms", samples=list(samples), size=size, size_of="things", bars=bars
    )  # fmt: skip


def processes(mark: str) -> list[int]:
    """The processes that have a mark in their environment."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (directory / "environ").read_bytes().split(b"\0"):
                found.append(int(directory.name))
        except OSError:
            continue
    return found


def what_is_there() -> tuple[str, list[str]]:
    """This process's mounts and the network devices in its namespace."""
    return Path("/proc/self/mountinfo").read_text(), sorted(os.listdir("/sys/class/net"))


def test_percentile_is_a_sample_that_enough_are_not_above() -> None:
    """99 of 100 samples are not above p99; of a few it is the largest."""
    assert percentile(list(range(100, 0, -1)), 99) == 99
    assert percentile([3.0, 1.0, 2.0], 99) == 3.0
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([7.0], 1) == 7.0


def test_figure_has_minimum_median_p99_and_count() -> None:
    """The statistics of a figure are those of its samples, also for programs."""
    found = figure(4.0, 1.0, 2.0, 3.0).as_json()
    assert (found["minimum"], found["median"], found["p99"], found["count"]) == (1.0, 2.5, 4.0, 4)


def test_bar_is_met_by_as_much_and_missed_by_more() -> None:
    """A bar holds for its own statistic, and what is equal to it meets it."""
    bars = (Bar("median", 2), Bar("p99", 2.9))
    assert figure(1.0, 2.0, 3.0, bars=bars).missed() == [bars[1]]
    found = figure(1.0, 2.0, 3.0, bars=bars).as_json()["bars"]
    assert [bar["met"] for bar in found] == [True, False]


def test_growth_is_that_of_the_median_from_the_least_size_to_the_largest() -> None:
    """A figure with several sizes has a ratio, whatever their order; one with a single size has none."""
    figures = [figure(3.0, size=100), figure(2.0, size=10), figure(9.0, size=1000), figure(1.0, name="lone", size=1)]
    (grown,) = ratios(figures, {"call": 1.5})
    assert (grown.name, grown.samples, grown.missed()) == ("call-growth", [4.5], [Bar("median", 1.5)])
    (grown,) = ratios(figures, {"call": LINEAR})
    assert grown.bars == (Bar("median", 100),)


def test_table_says_what_was_met_and_what_missed() -> None:
    """Each figure is a line with as many columns, and the bars say how it went."""
    lines = table([figure(1.5, size=1000, bars=(Bar("median", 1), Bar("p99", 2))), figure(0.00012)]).splitlines()
    assert [line.count("|") for line in lines] == [9, 9, 9, 9]
    assert "| 1,000 things |" in lines[2]
    assert "p50 ≤ 1 MISSED, p99 ≤ 2 met" in lines[2]
    assert "| 0.0001 |" in lines[3]


@pytest.mark.program
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--only", "start,speed"], "there is no 'speed'"),
        (["--scale", "1,0"], "'0' is no number above 0"),
        (["--samples", "many"], "'many' is no number above 0"),
        (["--json", "/nonexistent/file"], "/nonexistent/file: No such file or directory"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_wrong_option_is_told_in_one_line(options: list[str], words: str) -> None:
    """It ends with 2 before anything is measured."""
    done = subprocess.run([*BENCH, *options], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert words in done.stderr


@pytest.mark.program
def test_list_names_the_measurements() -> None:
    """Each has a line."""
    done = subprocess.run([*BENCH, "--list"], capture_output=True, text=True, check=True)
    assert {"start", "allocate", "handshake", "idle"} <= {line.split()[0] for line in done.stdout.splitlines()}


@pytest.mark.kernel
@pytest.mark.kubelet
def test_run_measures_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """A run of some measurements ends with 0 and JSON that has all of them; no process, mount or device stays."""
    mark, before = uuid.uuid4().hex, what_is_there()
    wanted = "install,allocate,handshake,change,memory"
    command = [*BENCH, "--only", wanted, "--samples", "2", "--scale", "1"]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "figures.json")],
        env={**os.environ, MARK: mark},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "figures.json").read_text())
    figures = {each["name"]: each for each in report["figures"]}
    assert {"floor", "install-all", "allocate", "handshake-first", "change-came", "memory", "fds"} <= set(figures)
    assert report["left_out"] == []
    assert figures["allocate"]["count"] == 2
    for name, each in figures.items():
        assert each["minimum"] <= each["median"] <= each["p99"], each
        assert each["minimum"] > 0 or name.startswith("change"), (
            each
        )  # the kernel's word may come late on a busy machine
    assert (processes(mark), what_is_there()) == ([], before)


@pytest.mark.kernel
@pytest.mark.kubelet
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_interrupted_run_leaves_nothing_behind(number: signal.Signals) -> None:
    """Whoever ends it in the middle ends all that it has started."""
    mark, before = uuid.uuid4().hex, what_is_there()
    command = [*BENCH, "--only", "start"]
    with subprocess.Popen(command, env={**os.environ, MARK: mark}, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("start, size 8" in line for line in process.stderr)
        process.send_signal(number)
        process.stderr.read()  # to its end: nobody has it open any more
        assert process.wait(30) == (-number if number == signal.SIGKILL else 130)
    deadline = time.monotonic() + 30
    while processes(mark) and time.monotonic() < deadline:
        time.sleep(0.05)  # until the kernel is done with them
    assert (processes(mark), what_is_there()) == ([], before)


@pytest.mark.kernel
@pytest.mark.kubelet
def test_plugin_that_does_not_start_is_told(tmp_path: Path) -> None:
    """It ends with 2, and with the plugin's own last words."""
    plugin = tmp_path / "plugin"
    plugin.write_text("#!/bin/sh\ntest -s $1 && echo no such luck\nexit 3\n")
    plugin.chmod(0o755)
    command = [*BENCH, "--only", "start", "--plugin", f"{plugin} {{config}}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stdout
    assert "bench: the plugin does not start: it has ended with status 3; no such luck\n" in done.stderr
