"""Makes one static executable of afxdpd as it is installed in the environment of the Python that runs this.

`sh examples/build_single_file.sh` prepares the environment and runs it. What goes in is found, not listed: beginning
with afxdpd, the modules that are imported anywhere in the source text of what is in already, also inside functions, and
those whose names the extension modules contain; then the libraries that ldd(1) finds. How it starts: see launcher.c.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import importlib.util
import io
import marshal
import os
import re
import shlex
import struct
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HERE = Path(__file__).resolve().parent
FIRST_FD, MAX_FILES = 100, 400  # launcher.c has the same
BOOT = "_single_file"
STDLIB = Path(sysconfig.get_path("stdlib"))
PATHS = [*{Path(sysconfig.get_path(name)): None for name in ("purelib", "platlib")}, STDLIB / "lib-dynload", STDLIB]

ABSENT = {
    "ssl",  # no TLS: the daemon speaks over local sockets
    "_ssl",
    "_hashlib",  # OpenSSL's; hashlib has algorithms of its own
    "bz2",  # archives of files; who imports these does without them
    "lzma",
    "_pydecimal",  # the same as _decimal, slower
    "_uuid",  # likewise
    "cffi",  # for builds; the extension modules need _cffi_backend alone
    "pycparser",
    "setuptools",
    "distutils",
    "pip",
    "doctest",  # for developers
    "pdb",
    "pydoc",
    "readline",
    "test",
    "tkinter",
    "sqlite3",  # for pyroute2's database, which the daemon does not use
}
"""Modules that are left out, and everything below them."""

HOLLOW = ("ssl",)
"""Of these there is a module that has any name: it can be imported, and raises NotImplementedError when it is used."""

LAZY = ("pyroute2", "unittest")
"""Packages that import far more than is needed: theirs is one that has the names that others take from it."""

CODECS = re.compile(r"(aliases|ascii|idna|latin_1|punycode|raw_unicode_escape|unicode_escape|utf_.*)")
"""The codecs that go in; the others are tables of character sets."""


NOT_AT_WORK = re.compile(r"\b_?(test|benchmark)|(test|benchmark)s?\b|\b(pytest_plugin|conftest|fixtures)\b")
"""Modules that are not taken along with their whole package."""


class PackError(Exception):
    """What is missing, in one line."""


def run(*command: str | Path) -> str:
    """Runs a program and returns what it printed. Raises PackError."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603
    except OSError as exc:
        raise PackError(f"{command[0]}: {exc.strerror}") from exc
    except subprocess.CalledProcessError as exc:
        raise PackError(f"{shlex.join(map(str, command))}: {exc.stderr.strip() or exc.stdout.strip()}") from exc


# --- Modules ----------------------------------------------------------------------------------------------------------


@dataclass
class Module:
    """A module that is packed.

    Attributes:
        name: In full.
        source: Its text; None for an extension module.
        package: Whether it is one.
        file: Where it came from.
    """

    name: str
    source: bytes | None
    package: bool
    file: Path
    tree: ast.Module = field(default_factory=lambda: ast.Module([], []))


@cache
def find(name: str) -> Module | None:
    """Finds a module of the environment or of the standard library; None for one that is not there, or built in."""
    relative = Path(*name.split("."))
    for path in PATHS:
        base = path / relative
        if (base / "__init__.py").is_file():
            return Module(name, (base / "__init__.py").read_bytes(), True, base / "__init__.py")
        if base.with_name(f"{base.name}.py").is_file():
            file = base.with_name(f"{base.name}.py")
            return Module(name, file.read_bytes(), False, file)
        for suffix in EXTENSION_SUFFIXES:
            if base.with_name(base.name + suffix).is_file():
                return Module(name, None, False, base.with_name(base.name + suffix))
    if any((path / relative).is_dir() for path in PATHS) and relative.name.isidentifier():
        return Module(name, b"", True, Path("namespace"))
    return None


def is_left_out(name: str) -> bool:
    """Whether a module is not packed on purpose."""
    package, _, codec = name.partition(".")
    return package in ABSENT or (package == "encodings" and codec != "" and not CODECS.fullmatch(codec))


def is_type_checking(test: ast.expr) -> bool:
    """Whether a condition is only true for type checkers."""
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING", "t.TYPE_CHECKING")


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yields all nodes, but for what only type checkers see."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and is_type_checking(child.test):
            for other in child.orelse:
                yield from walk(other)
        else:
            yield from walk(child)


class Scan:
    """Follows imports from one module on; `modules` then has everything that is reached."""

    def __init__(self, *roots: str) -> None:
        self.modules: dict[str, Module] = {}
        self.lazy: dict[str, dict[str, str]] = {name: {} for name in LAZY}
        self._todo: list[Module] = []
        for root in roots:
            if not self._add(root):
                raise PackError(f"the module {root} is not installed for {sys.executable}")
        while self._todo:
            module = self._todo.pop()
            if module.source is None:
                self.add_strings(module.file)
            else:
                module.tree = ast.parse(module.source, module.name)
                if module.name not in LAZY:
                    self._follow(module)

    def _add(self, name: str) -> bool:
        """Adds a module and the packages that it is in; returns whether there is such a module."""
        if name in self.modules:
            return True
        if is_left_out(name) or not (module := find(name)):
            return False
        parent = name.rpartition(".")[0]
        if parent and not self._add(parent):
            return False
        self.modules[name] = module
        self._todo.append(module)
        return True

    def _follow(self, module: Module) -> None:
        for node in walk(module.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self._add(alias.name)
            elif isinstance(node, ast.ImportFrom):
                self._from(self._absolute(module, "." * node.level + (node.module or "")), node)
            elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in (
                "import_module",
                "__import__",
            ):
                self._called(module, node)

    def _from(self, package: str, node: ast.ImportFrom) -> None:
        if not self._add(package):
            return
        for alias in node.names:
            if self._add(f"{package}.{alias.name}") or package not in LAZY:
                continue
            for other in ast.walk(ast.parse(self.modules[package].source or b"")):
                if isinstance(other, ast.ImportFrom) and alias.name in [
                    name.asname or name.name for name in other.names
                ]:
                    origin = self._absolute(self.modules[package], "." * other.level + (other.module or ""))
                    self.lazy[package][alias.name] = origin
                    self._from(origin, other)

    def _called(self, module: Module, node: ast.Call) -> None:
        """A module is imported by a call: the one it names, or any whose name begins so, or any of the same package."""
        name = node.args[0] if node.args else None
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            self._add(self._absolute(module, name.value))
            return
        package = module.name if module.package else module.name.rpartition(".")[0]
        prefix = f"{package}."
        if isinstance(name, ast.JoinedStr) and isinstance(name.values[0], ast.Constant):
            prefix = self._absolute(module, str(name.values[0].value))
            package = prefix.rpartition(".")[0]
        if not package or not (parent := find(package)) or parent.file.name != "__init__.py":
            return
        for file in sorted(parent.file.parent.rglob("*.py")):
            parts = [*package.split("."), *file.relative_to(parent.file.parent).with_suffix("").parts]
            if parts[-1] == "__init__":
                parts.pop()
            other = ".".join(parts)
            if other.startswith(prefix) and not NOT_AT_WORK.search(other) and all(map(str.isidentifier, parts)):
                self._add(other)

    @staticmethod
    def _absolute(module: Module, name: str) -> str:
        if not name.startswith("."):
            return name
        package = module.name if module.package else module.name.rpartition(".")[0]
        try:
            return importlib.util.resolve_name(name, package)
        except ImportError:
            return name

    def add_strings(self, file: Path) -> None:
        """Adds the modules whose names are strings in a program or library."""
        for text in set(re.findall(rb"(?<=\0)[A-Za-z_][\w.]*(?=\0)", file.read_bytes())):
            name = text.decode()
            if all(map(str.isidentifier, name.split("."))):
                self._add(name)


class WithoutDocstrings(ast.NodeTransformer):
    """Takes the docstrings out, but for those of decorated classes: dataclass() would make one where there is none."""

    def generic_visit(self, node: Any) -> Any:
        """See ast.NodeTransformer.generic_visit."""
        super().generic_visit(node)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            decorated = isinstance(node, ast.ClassDef) and node.decorator_list
            match node.body[0]:
                case ast.Expr(value=ast.Constant(value=str())) as docstring if not decorated:
                    node.body[0:1] = [] if len(node.body) > 1 else [ast.copy_location(ast.Pass(), docstring)]
        return node


HOLLOW_SOURCE = """
class _Absent(Exception):
    def __init__(self, *_, **__):
        raise NotImplementedError("the single file has no {name}")

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    value = globals()[name] = type(name, (_Absent,), {{}})
    return value
"""

LAZY_SOURCE = """
_ORIGINS = {origins!r}

def __getattr__(name):
    if name not in _ORIGINS:
        raise AttributeError(f"the single file has no {name}.{{name}}")
    import importlib
    return getattr(importlib.import_module(_ORIGINS[name]), name)
"""

BOOT_SOURCE = '''
import sys
from _frozen_importlib import spec_from_loader
from _frozen_importlib_external import ExtensionFileLoader

EXTENSIONS = {extensions!r}

class Finder:
    """Finds extension modules by their descriptors."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in EXTENSIONS:
            return None
        file = f"/proc/self/fd/{{EXTENSIONS[name]}}"
        return spec_from_loader(name, ExtensionFileLoader(name, file), origin=file)

def run():
    import gc
    sys.meta_path.insert(0, Finder)
    gc.disable()  # what is imported stays
    import afxdpd
    gc.enable()
    gc.freeze()
    sys.exit(afxdpd.main())
'''


def compiled(source: str | ast.Module, file: str) -> bytes:
    """The bytes of a .pyc file that is never compared with its source."""
    code = compile(source, file, "exec", dont_inherit=True, optimize=0)
    return importlib.util.MAGIC_NUMBER + struct.pack("<I8x", 1) + marshal.dumps(code)


def make_archive(scan: Scan, extensions: dict[str, int]) -> bytes:
    """Makes the archive of compiled modules, with what importlib.metadata knows about the distributions."""
    files: dict[str, bytes] = {}
    sources: dict[str, tuple[str | ast.Module, bool]] = {}
    readers = {name.partition(".")[0] for name, module in scan.modules.items() if b"__doc__" in (module.source or b"")}
    for name, module in scan.modules.items():
        if module.source is not None:
            tree = module.tree if name.partition(".")[0] in readers else WithoutDocstrings().visit(module.tree)
            sources[name] = (tree, module.package)
    for name in HOLLOW:
        sources[name] = (HOLLOW_SOURCE.format(name=name), False)
    for name, origins in scan.lazy.items():
        if name in sources:
            sources[name] = (LAZY_SOURCE.format(name=name, origins=dict(sorted(origins.items()))), True)
    sources[BOOT] = (BOOT_SOURCE.format(extensions=extensions), False)
    for name, (source, package) in sources.items():
        stem = name.replace(".", "/") + ("/__init__" if package else "")
        files[f"{stem}.pyc"] = compiled(source, f"{stem}.py")
    for distribution in importlib.metadata.distributions(path=[str(path) for path in PATHS]):
        directory = f"{distribution.metadata['Name'].replace('-', '_')}-{distribution.version}.dist-info"
        for file in ("METADATA", "entry_points.txt"):
            if text := distribution.read_text(file):
                head, _, _ = text.partition("\n\n")  # without the description
                files[f"{directory}/{file}"] = (head + "\n" if file == "METADATA" else text).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for path in sorted(files):
            archive.writestr(zipfile.ZipInfo(path), files[path])  # all of 1980
    return buffer.getvalue()


# --- Programs and libraries -------------------------------------------------------------------------------------------


class Linker:
    """Links the interpreter, in a temporary directory."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._cc = os.environ.get("CC", "gcc")
        archive = Path(sysconfig.get_config_var("LIBPL") or "/", sysconfig.get_config_var("LIBRARY") or "none")
        self._shared = Path(sysconfig.get_config_var("LIBDIR") or "/", sysconfig.get_config_var("LDLIBRARY") or "none")
        names = " ".join(sysconfig.get_config_var(name) or "" for name in ("LIBS", "SYSLIBS", "MODLIBS"))
        libraries = list(dict.fromkeys(word for word in names.split() if word.startswith("-l")))
        if archive.is_file():
            self._python = ["-no-pie", f"-Wl,--whole-archive,{archive},--no-whole-archive", *libraries]
        elif self._shared.is_file():
            self._python = [str(self._shared)]
        else:
            raise PackError(f"{sys.executable} has neither {archive} nor {self._shared}")

    def link(self, *options: str) -> Path:
        """Links it with further options and returns the program."""
        program = self._scratch / "interpreter"
        run(
            *(self._cc, "-O2", "-Wall", "-Wextra", f"-I{sysconfig.get_path('include')}"),
            *(HERE / "interpreter.c", "-o", program, "-Wl,--export-dynamic,--build-id=none,-s"),
            *(*options, *self._python),
        )
        return program

    def stub(self, name: str) -> Path:
        """Makes an empty library of this name."""
        file = self._scratch / f"stub-{name.replace('/', '-')}"
        options = f"-Wl,-soname,{name},-z,noseparate-code,--build-id=none"
        run(self._cc, "-shared", "-nostdlib", options, "-x", "c", "/dev/null", "-o", file)
        return file

    def libgcc(self) -> Path:
        """The library that the C library opens when a thread is ended from within."""
        return Path(run(self._cc, "-print-file-name=libgcc_s.so.1").strip())

    def stripped(self, file: Path) -> bytes:
        """The content of a program or library without what only debuggers read."""
        copy = self._scratch / "stripped"
        run("strip", "--strip-unneeded", "--remove-section=.note.gnu.build-id", "-o", copy, file)
        return copy.read_bytes()


def closure(*files: Path) -> tuple[Path, dict[str, Path]]:
    """The dynamic linker of programs and libraries, and the libraries they need by name."""
    linkers: dict[str, None] = {}
    libraries: dict[str, Path] = {}
    for file in files:
        for line in run("ldd", file).splitlines():
            words = line.split()
            if "=>" not in words and words[0].startswith("/"):
                linkers[words[0]] = None
            elif "not found" in line:
                raise PackError(f"{file} needs {words[0]}, which ldd does not find")
            elif words[1:2] == ["=>"]:
                libraries[words[0]] = Path(words[2])
    (linker,) = linkers
    return Path(linker), dict(sorted(libraries.items()))


def symbols(kind: str, file: Path) -> set[str]:
    """The names of the dynamic symbols of a program or library: of those that are "defined" or "undefined"."""
    lines = run("nm", "--dynamic", f"--{kind}-only", "--format=posix", file).splitlines()
    return {line.split()[0].partition("@")[0] for line in lines}


def unused(libraries: dict[str, Path], files: Sequence[Path]) -> set[str]:
    """Which of the libraries are named by files or other libraries, but have nothing that is taken from them.

    The C library opens libgcc_s when a thread is ended from within, so that it is always needed.
    """
    wanted = {path: symbols("undefined", path) for path in (*libraries.values(), *files)}
    return {
        name
        for name, library in libraries.items()
        if not name.startswith("libgcc_s.")
        and not symbols("defined", library) & set().union(*(wanted[path] for path in wanted if path != library))
    }


def compressed(data: bytes) -> bytes:
    """A zstd frame."""
    command = ["zstd", "-19", f"--stream-size={len(data)}", "--check", "-q", "-c"]
    try:
        return subprocess.run(command, input=data, check=True, capture_output=True).stdout  # noqa: S603
    except (OSError, subprocess.CalledProcessError) as exc:
        raise PackError(f"zstd: {exc}") from exc


def make_executable(launcher: bytes, files: Sequence[tuple[str, bytes]]) -> bytes:
    """Appends files to the launcher. See launcher.c for the format."""
    if len(files) > MAX_FILES:
        raise PackError(f"{len(files)} files are more than {MAX_FILES}")
    parts, table, offset = [launcher], [], len(launcher)
    for name, data in files:
        frame = compressed(data)
        table.append(struct.pack("=QQQ40s", offset, len(frame), len(data), name.encode()[:39]))
        parts.append(frame)
        offset += len(frame)
    return b"".join([*parts, *table, struct.pack("=8sQQ", b"afxdpd-1", offset, len(table))])


def pack(launcher: Path, scratch: Path) -> tuple[bytes, list[str]]:
    """Makes the executable; returns it, and lines that say what is in it."""
    linker = Linker(scratch)
    probe = linker.link(
        "-DFIRST_FD=0", "-DKEPT_FD=0", "-DLAST_FD=0", f"-Wl,-rpath,{sysconfig.get_config_var('LIBDIR')}"
    )
    scan = Scan("afxdpd", "encodings.utf_8", "encodings.idna", "encodings.latin_1", "encodings.ascii")
    extensions = {name: module.file for name, module in sorted(scan.modules.items()) if module.source is None}
    dynamic_linker, libraries = closure(probe, *extensions.values())
    libraries = {name: path for name, path in libraries.items() if path.resolve() != dynamic_linker.resolve()}
    libraries.setdefault("libgcc_s.so.1", linker.libgcc())
    empty = unused(libraries, [probe, *extensions.values()])
    libraries |= {name: linker.stub(name) for name in empty}

    kept = FIRST_FD + 2 + len(libraries)
    stubs = [str(linker.stub(f"/proc/self/fd/{FIRST_FD + 2 + number}")) for number in range(len(libraries))]
    program = linker.link(
        *(f"-DFIRST_FD={FIRST_FD}", f"-DKEPT_FD={kept}", f"-DLAST_FD={kept + len(extensions)}"),
        *(f"-Wl,--dynamic-linker=/proc/self/fd/{FIRST_FD}", "-Wl,--no-as-needed", *stubs, "-Wl,--as-needed"),
    )
    archive = make_archive(scan, {name: kept + 1 + number for number, name in enumerate(extensions)})
    files = [("ld.so", linker.stripped(dynamic_linker)), ("afxdpd", program.read_bytes())]
    files += [(name, linker.stripped(path)) for name, path in libraries.items()]
    files += [("modules.zip", archive)]
    files += [(name, linker.stripped(path)) for name, path in extensions.items()]
    packages = {name.partition(".")[0] for name in scan.modules} - sys.stdlib_module_names
    full = [name for name in libraries if name not in empty]
    lines = [
        f"Python {sys.version.split()[0]}, {len(scan.modules)} modules; of dependencies: {', '.join(sorted(packages))}",
        f"extension modules: {', '.join(extensions)}",
        f"libraries: {', '.join([dynamic_linker.name, *full])}",
    ]
    return make_executable(launcher.read_bytes(), files), lines


def main() -> int:
    """Runs the program; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launcher", type=Path, required=True, help="the program made of launcher.c")
    parser.add_argument("--output", type=Path, required=True, help="the executable to be made")
    args = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            content, lines = pack(args.launcher, Path(scratch))
        args.output.write_bytes(content)
        args.output.chmod(0o755)
    except (PackError, OSError) as exc:
        print(f"pack: {exc}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
