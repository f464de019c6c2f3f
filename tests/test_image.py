"""examples/build_image.py: an OCI image archive of the one file."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from conftest import REQUIRE_KERNEL
from support import ROOT

pytestmark = pytest.mark.program

CONTAINERFILE = ROOT / "examples" / "Containerfile"


def executable(machine: int, *, interpreter: bool = False) -> bytes:
    """An ELF file that is as good as an executable for who does not execute it. See elf(5)."""
    header = struct.pack("<4sBB10xHHIQQQIHHHHHH", b"\x7fELF", 2, 1, 2, machine, 1, 0, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    return header + struct.pack("<I52x", 3 if interpreter else 1) + b"something to run"


def build(directory: Path, content: bytes, *options: str, **env: str) -> Path:
    """Makes an archive."""
    file, output = directory / "file", directory / "image.tar"
    file.write_bytes(content)
    done = run(*("--executable", str(file), "--output", str(output)), *options, **env)
    assert done.returncode == 0, done.stderr
    return output


def run(*options: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs the program."""
    command = [sys.executable, "-I", str(ROOT / "examples" / "build_image.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, timeout=60, check=False)


def members(archive: bytes) -> dict[str, bytes]:
    """The files in a tar archive."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def blob(files: dict[str, bytes], descriptor: dict[str, Any]) -> bytes:
    """What a descriptor describes, which has to be true."""
    content = files["blobs/" + descriptor["digest"].replace(":", "/")]
    assert descriptor["size"] == len(content)
    assert descriptor["digest"] == f"sha256:{hashlib.sha256(content).hexdigest()}"
    return content


@pytest.mark.parametrize(("machine", "name"), [(62, "amd64"), (183, "arm64")])
def test_image_is_complete_and_for_the_machine_of_its_file(tmp_path: Path, machine: int, name: str) -> None:
    """All digests and sizes are right, the layer has the file alone, and the architecture is the file's."""
    content = executable(machine)
    files = members(build(tmp_path, content, "--name", "example/afxdpd", "--tag", "1").read_bytes())
    assert json.loads(files["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
    (descriptor,) = json.loads(files["index.json"])["manifests"]
    assert descriptor["annotations"]["org.opencontainers.image.ref.name"] == "1"
    assert descriptor["annotations"]["io.containerd.image.name"] == "example/afxdpd:1"
    assert descriptor["platform"] == {"architecture": name, "os": "linux"}
    manifest = json.loads(blob(files, descriptor))
    config = json.loads(blob(files, manifest["config"]))
    assert (config["architecture"], config["os"]) == (name, "linux")
    (packed,) = (blob(files, layer) for layer in manifest["layers"])
    layer = gzip.decompress(packed)
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(layer).hexdigest()}"]
    assert members(layer) == {"afxdpd": content}
    with tarfile.open(fileobj=io.BytesIO(layer)) as tar:
        assert tar.getmember("afxdpd").mode == 0o755
    assert len(files) == 5, "and nothing else"


def test_image_does_what_the_containerfile_says(tmp_path: Path) -> None:
    """User, entry point, arguments and signal are the same in both ways to make an image."""
    files = members(build(tmp_path, executable(62)).read_bytes())
    (descriptor,) = json.loads(files["index.json"])["manifests"]
    config = json.loads(blob(files, json.loads(blob(files, descriptor))["config"]))["config"]
    lines = [line.partition(" ") for line in CONTAINERFILE.read_text().splitlines() if line and line[0] != "#"]
    said = {instruction: value for instruction, _, value in lines}
    assert said["FROM"] == "scratch"
    assert said["COPY"].split()[-1] == config["Entrypoint"][0]
    assert (said["USER"], said["STOPSIGNAL"]) == (config["User"], config["StopSignal"])
    assert json.loads(said["ENTRYPOINT"]) == config["Entrypoint"]
    assert json.loads(said["CMD"]) == config["Cmd"]


def test_image_is_the_same_when_it_is_made_again(tmp_path: Path) -> None:
    """The same file makes the same image at any time; SOURCE_DATE_EPOCH is its time."""
    first = build(tmp_path, executable(62)).read_bytes()
    assert build(tmp_path, executable(62)).read_bytes() == first
    later = build(tmp_path, executable(62), SOURCE_DATE_EPOCH="1700000000").read_bytes()
    (manifest,) = json.loads(members(later)["index.json"])["manifests"]
    config = json.loads(blob(members(later), json.loads(blob(members(later), manifest))["config"]))
    assert config["created"] == "2023-11-14T22:13:20Z"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--tag", "a b"], "'a b' is no tag"),
        (["--name", "Upper"], "'Upper' is no name of an image"),
        (["--user", "me"], "'me' is no number of a user"),
        (["--executable", "/none"], "/none: No such file"),
        (["--executable", "script"], "script: is no ELF executable"),
        (["--executable", "cut"], "cut: is no complete ELF executable"),
        (["--executable", "dynamic"], "dynamic: is not static"),
        (["--executable", "other"], "other: is for a machine that is neither of amd64, arm64"),
        (["--output", "/none/image.tar"], "/none/image.tar"),
        (["more"], "unrecognized arguments: more"),
    ],
)
def test_program_says_in_one_line_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], reason: str
) -> None:
    """Wrong arguments and files end with status 2 and one line, and no archive is made."""
    monkeypatch.chdir(tmp_path)
    Path("script").write_text("#!/bin/sh\n")
    Path("cut").write_bytes(executable(62)[:80])
    Path("dynamic").write_bytes(executable(62, interpreter=True))
    Path("other").write_bytes(executable(40))
    Path("right").write_bytes(executable(62))
    done = run("--executable", "right", "--output", "image.tar", *options)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert reason in done.stderr
    assert not Path("image.tar").exists()
    assert not list(tmp_path.glob("*.part"))


def test_public_tools_read_the_image(tmp_path: Path) -> None:
    """skopeo and umoci find in the archive what went in: file, mode, capabilities and process."""
    for program in ("skopeo", "umoci"):
        if not shutil.which(program):
            if REQUIRE_KERNEL:
                pytest.fail(f"AFXDPD_REQUIRE_KERNEL=1, but there is no {program}")
            pytest.skip(f"there is no {program}")
    if os.getuid() != 0:
        pytest.skip("only root can unpack a file with capabilities")
    content = executable(62)
    archive = build(tmp_path, content, "--tag", "1", "--user", "65532:65532")

    def tool(*command: str) -> str:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    shown = json.loads(tool("skopeo", "inspect", f"oci-archive:{archive}:1"))
    assert (shown["Architecture"], shown["Os"], len(shown["Layers"])) == ("amd64", "linux", 1)
    layout = f"{tmp_path}/layout:1"
    tool("skopeo", "--insecure-policy", "copy", f"oci-archive:{archive}:1", f"oci:{layout}")
    tool("umoci", "unpack", "--image", layout, str(tmp_path / "bundle"))
    rootfs = tmp_path / "bundle" / "rootfs"
    assert [path.name for path in rootfs.iterdir()] == ["afxdpd"]
    assert (rootfs / "afxdpd").read_bytes() == content
    assert (rootfs / "afxdpd").stat().st_mode & 0o7777 == 0o755
    revision, *sets = struct.unpack("<5I", os.getxattr(rootfs / "afxdpd", "security.capability"))
    assert (revision, sets) == (0x0200_0000, [1 << 0 | 1 << 1 | 1 << 12, 0, 1 << (39 - 32), 0])
    process = json.loads((tmp_path / "bundle/config.json").read_text())["process"]
    assert process["args"] == ["/afxdpd", "--config", "/etc/afxdpd/config.json"]
    assert process["user"] == {"uid": 65532, "gid": 65532}
