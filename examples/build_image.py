"""Makes a container image of dist/afxdpd, as an OCI image archive: without registry, engine, or anything but Python.

    sh examples/build_single_file.sh
    python3 examples/build_image.py
    skopeo copy oci-archive:dist/afxdpd-image.tar docker://registry.example/afxdpd:0.1.0

`podman load`, `ctr image import` and `kind load image-archive` take such archives too. It has one layer with one file,
for the machine that the file was made for. The same file makes the same image: all times are SOURCE_DATE_EPOCH, or 0.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import hashlib
import io
import json
import os
import re
import struct
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Any, NoReturn

CHECKOUT = Path(__file__).resolve().parents[1]
CONFIG = "/etc/afxdpd/config.json"

ELF_MACHINES = {62: "amd64", 183: "arm64"}  # elf.h, and the names that images have for them
PT_INTERP = 3

VFS_CAP_REVISION_2 = 0x0200_0000  # linux/capability.h
CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_NET_ADMIN, CAP_BPF = 0, 1, 12, 39

OCI = "application/vnd.oci.image"
NAME = re.compile(r"[a-z0-9]+([._-]+[a-z0-9]+)*(:[0-9]+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*")
TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
USER = re.compile(r"[0-9]{1,9}(:[0-9]{1,9})?")


class ImageError(Exception):
    """What is wrong, in one line."""


def architecture(executable: bytes) -> str:
    """The architecture of a static executable. Raises ImageError if it is none."""
    if executable[:6] != b"\x7fELF\x02\x01" or len(executable) < 64:
        raise ImageError("is no ELF executable for a machine of 64 bits, little endian")
    (machine,) = struct.unpack_from("<H", executable, 18)
    (offset,) = struct.unpack_from("<Q", executable, 32)
    size, count = struct.unpack_from("<HH", executable, 54)
    if offset + size * count > len(executable):
        raise ImageError("is no complete ELF executable")
    for number in range(count):
        if struct.unpack_from("<I", executable, offset + number * size)[0] == PT_INTERP:
            raise ImageError("is not static: the image would not have its libraries")
    if machine not in ELF_MACHINES:
        raise ImageError(f"is for a machine that is neither of {', '.join(ELF_MACHINES.values())}")
    return ELF_MACHINES[machine]


def file_capabilities() -> str:
    """The attribute of the file by which a user who is not root has these capabilities, where the container may.

    They are permitted, not effective: the executable makes use of those that it gets, and starts without them.
    """
    bits = sum(1 << number for number in (CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_NET_ADMIN, CAP_BPF))
    return struct.pack("<IIIII", VFS_CAP_REVISION_2, bits & 0xFFFF_FFFF, 0, bits >> 32, 0).decode(
        "utf-8", "surrogateescape"
    )


def tar(files: dict[str, bytes], time: int, **attributes: Any) -> bytes:
    """A tar archive of files that are root's."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), time
            for attribute, value in attributes.items():
                setattr(member, attribute, value)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


class Layout:
    """An OCI image layout. See the specification's image-layout.md."""

    def __init__(self) -> None:
        self.files = {"oci-layout": b'{"imageLayoutVersion":"1.0.0"}'}

    def add(self, media_type: str, content: bytes) -> dict[str, Any]:
        """Adds a blob and returns its descriptor."""
        digest = hashlib.sha256(content).hexdigest()
        self.files[f"blobs/sha256/{digest}"] = content
        return {"mediaType": f"{OCI}.{media_type}", "digest": f"sha256:{digest}", "size": len(content)}

    def add_json(self, media_type: str, value: dict[str, Any]) -> dict[str, Any]:
        """Likewise, of a JSON object."""
        return self.add(media_type, json.dumps(value, separators=(",", ":")).encode())


def make_image(executable: bytes, *, name: str, tag: str, version: str, user: str, time: int) -> bytes:
    """Makes the archive of an image. Raises ImageError if the executable does not suit."""
    platform = {"architecture": architecture(executable), "os": "linux"}
    created = datetime.datetime.fromtimestamp(time, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    headers = {"SCHILY.xattr.security.capability": file_capabilities()}
    layer = tar({"afxdpd": executable}, time, mode=0o755, pax_headers=headers)
    labels = {
        "org.opencontainers.image.title": "afxdpd",
        "org.opencontainers.image.description": "AF_XDP device plugin for Kubernetes",
        "org.opencontainers.image.version": version,
        "org.opencontainers.image.created": created,
    }
    process = {
        "User": user,
        "Entrypoint": ["/afxdpd"],
        "Cmd": ["--config", CONFIG],
        "WorkingDir": "/",
        "StopSignal": "SIGTERM",
        "Labels": labels,
    }
    config = {
        "created": created,
        **platform,
        "config": process,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
        "history": [{"created": created, "created_by": "build_image.py"}],
    }
    layout = Layout()
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{OCI}.manifest.v1+json",
        "config": layout.add_json("config.v1+json", config),
        "layers": [layout.add("layer.v1.tar+gzip", gzip.compress(layer, mtime=0))],
        "annotations": labels,
    }
    annotations = {"org.opencontainers.image.ref.name": tag, "io.containerd.image.name": f"{name}:{tag}"}
    descriptor = {**layout.add_json("manifest.v1+json", manifest), "platform": platform, "annotations": annotations}
    index = {"schemaVersion": 2, "mediaType": f"{OCI}.index.v1+json", "manifests": [descriptor]}
    layout.files["index.json"] = json.dumps(index, separators=(",", ":")).encode()
    return tar(layout.files, time, mode=0o644)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Says it in one line."""
        self.exit(2, f"build_image: {message}; see --help\n")


def matching(pattern: re.Pattern[str], what: str) -> Any:
    """A type of argparse: text that a pattern matches."""

    def check(text: str) -> str:
        if not pattern.fullmatch(text):
            raise argparse.ArgumentTypeError(f"{text!r} is no {what}")
        return text

    return check


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status, 2 for anything that is wrong with arguments or files."""
    version = str(tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["version"])
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument(
        "--executable",
        type=Path,
        default=CHECKOUT / "dist" / "afxdpd",
        metavar="FILE",
        help="what is in it: dist/afxdpd",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=CHECKOUT / "dist" / "afxdpd-image.tar",
        metavar="FILE",
        help="the archive: dist/afxdpd-image.tar",
    )
    parser.add_argument(
        "--name", type=matching(NAME, "name of an image"), default="localhost/afxdpd", help="default: %(default)s"
    )
    parser.add_argument("--tag", type=matching(TAG, "tag"), default=version, help="default: %(default)s")
    parser.add_argument(
        "--user", type=matching(USER, "number of a user, or user:group"), default="0:0", help="default: root"
    )
    args = parser.parse_args(arguments)
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "") or "0"
    if not re.fullmatch("[0-9]{1,11}", epoch):
        parser.error(f"SOURCE_DATE_EPOCH is {epoch!r}, which is no number of seconds")
    image = {"name": args.name, "tag": args.tag, "version": version, "user": args.user, "time": int(epoch)}
    part = args.output.with_name(f"{args.output.name}.part")
    try:
        content = make_image(args.executable.read_bytes(), **image)
        part.write_bytes(content)
        part.replace(args.output)
    except ImageError as exc:
        parser.error(f"{args.executable}: {exc}")
    except OSError as exc:
        parser.error(f"{exc.filename}: {exc.strerror}")
    print(f"{args.output}: {args.name}:{args.tag}, {len(content)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
