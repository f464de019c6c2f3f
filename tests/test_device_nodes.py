"""The example plugin, and with it the framework's API, against kubelet's stand-in."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kubelet import running_kubelet
from support import ROOT

SCRIPT = ROOT / "examples" / "device_nodes.py"


@contextmanager
def plugin(kubelet_dir: Path, *resources: str) -> Iterator[subprocess.Popen[bytes]]:
    """The example as a process."""
    command = [sys.executable, str(SCRIPT), "--namespace", "test.org", "--kubelet-dir", str(kubelet_dir), *resources]
    process = subprocess.Popen(command)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.kubelet
async def test_nodes_are_announced_and_allocated_when_they_are_plugged_in(short_path: Path) -> None:
    """Real device nodes become devices, shared ones several, and come and go with the files."""
    slots = short_path / "slots"
    slots.mkdir()
    async with running_kubelet(short_path / "kubelet") as kubelet:
        with plugin(short_path / "kubelet", "null=/dev/null:2", f"slot={slots}/tty*"):
            await kubelet.wait("test.org/null", devices={"dev-null-0": "Healthy", "dev-null-1": "Healthy"})
            await kubelet.wait("test.org/slot", messages=1, devices={})
            (slots / "ttyA").symlink_to("/dev/zero")
            path = str(slots / "ttyA")
            device = path[1:].replace("/", "-") + "-0"
            await kubelet.wait("test.org/slot", devices={device: "Healthy"})
            (answer,) = await kubelet.allocate("test.org/slot", [device])
            assert answer["devices"] == [{"container_path": path, "host_path": path, "permissions": "rw"}]
            (answer,) = await kubelet.allocate("test.org/null", ["dev-null-0", "dev-null-1"])
            assert len(answer["devices"]) == 1, "one node, however often it is shared"
            (slots / "ttyA").unlink()
            await kubelet.wait("test.org/slot", devices={})
            assert (await kubelet.state("test.org/null"))["registers_total"] == 1


@pytest.mark.program
@pytest.mark.parametrize("resource", ["null", "null=", "=/dev/null", "null=dev/null"])
def test_example_says_what_is_wrong_when_a_resource_is_malformed(resource: str) -> None:
    """A resource that is none is refused with a line that shows it."""
    result = subprocess.run([sys.executable, str(SCRIPT), resource], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].endswith(f"not NAME=PATTERN or NAME=PATTERN:COUNT: {resource}")


def test_readme_shows_the_example_as_it_is() -> None:
    """The code of the README's chapters on the framework and on embedding is what is tested here and in its tests."""
    text = (ROOT / "README.md").read_text()
    chapters = {"Write your own plugin": SCRIPT, "Inside your own program": ROOT / "examples" / "embedded.py"}
    for title, script in chapters.items():
        chapter = re.split(r"\n## ", text.partition(f" {title}\n")[2])[0]
        blocks = re.findall(r"```python\n(.*?)```", chapter, re.DOTALL)
        assert blocks
        source = script.read_text()
        for block in blocks:
            assert block in source, block
