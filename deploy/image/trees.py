"""File systems as values: what a layer of the image holds, its bytecode, and its tar.

A `Tree` maps paths, without a leading slash, to entries. It needs no folder, no root and no device node,
and the same tree is always the same tar: entries are sorted by path, times are zero, owners are numbers.
"""

import hashlib
import io
import marshal
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import translate
from pathlib import Path, PurePosixPath

DIRECTORY, FILE, LINK = tarfile.DIRTYPE, tarfile.REGTYPE, tarfile.SYMTYPE
MACHINES = {"amd64": 62, "arm64": 183}
"""e_machine of an ELF header: EM_X86_64 and EM_AARCH64."""
_SHARES = 4
"""Processes that compile. The number is fixed: bytecode depends a little on what was compiled before it."""


class BuildError(Exception):
    """The image cannot be built. `again`: whether the same once more may help."""

    def __init__(self, message: str, *, again: bool = False) -> None:
        super().__init__(message)
        self.again = again


@dataclass(frozen=True)
class Entry:
    """A directory, a file or a symbolic link; `data` is the file's content or the link's target."""

    kind: bytes
    mode: int
    data: bytes = b""
    owner: int = 0
    """User and group."""


Tree = dict[str, Entry]


def directory(mode: int = 0o755, owner: int = 0) -> Entry:
    """A directory."""
    return Entry(DIRECTORY, mode, owner=owner)


def text(content: str, mode: int = 0o644) -> Entry:
    """A file with a text."""
    return Entry(FILE, mode, content.encode())


def link(target: str) -> Entry:
    """A symbolic link."""
    return Entry(LINK, 0o777, target.encode())


def add(tree: Tree, path: str, entry: Entry) -> None:
    """Put an entry into the tree.

    Raises:
        BuildError: something else is there. Two directories are the same, whatever their modes are.
    """
    there = tree.setdefault(path, entry)
    if there != entry and not there.kind == entry.kind == DIRECTORY:
        raise BuildError(f"/{path} has two contents")


def read_folder(folder: Path, below: str) -> Tree:
    """The files of a folder, below a path of the image."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return {
        f"{below}/{path.relative_to(folder).as_posix()}": Entry(
            FILE, 0o755 if path.stat().st_mode & 0o100 else 0o644, path.read_bytes()
        )
        for path in files
    }


def read_tar(tar: tarfile.TarFile) -> Iterator[tuple[str, Entry]]:
    """The entries of a tar, owned by root; a hard link is a file of its own.

    Raises:
        BuildError: one is no directory, file or link.
    """
    files: Tree = {}
    for info in tar:
        path = _path(info.name)
        if info.isreg():
            content = tar.extractfile(info)
            files[path] = Entry(FILE, _mode(info), content.read() if content else b"")
            yield path, files[path]
        elif info.islnk():
            yield path, files[_path(info.linkname)]
        elif info.issym():
            yield path, link(info.linkname)
        elif info.isdir():
            if path:
                yield path, directory(_mode(info))
        else:
            raise BuildError(f"/{path} is neither a directory nor a file nor a link")


def write_tar(tree: Tree, path: Path) -> None:
    """Write the tree, with the directories above its entries."""
    above = {str(parent) for name in tree for parent in PurePosixPath(name).parents} - {"."}
    whole = {parent: directory() for parent in above} | tree
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(whole):
            entry = whole[name]
            info = tarfile.TarInfo(name)
            info.type, info.mode, info.uid, info.gid = entry.kind, entry.mode, entry.owner, entry.owner
            if entry.kind == LINK:
                info.linkname = entry.data.decode()
            elif entry.kind == FILE:
                info.size = len(entry.data)
            tar.addfile(info, io.BytesIO(entry.data))


def without(tree: Tree, leave: Iterable[str], keep: Iterable[str] = ()) -> Tree:
    """The tree without paths that match a pattern of `leave` and none of `keep`; `*` matches slashes too."""
    left, kept = (re.compile("|".join(map(translate, patterns)) or r"\Z.") for patterns in (leave, keep))
    return {path: entry for path, entry in tree.items() if kept.match(path) or not left.match(path)}


def check_machine(tree: Tree, arch: str) -> None:
    """Raises `BuildError` where an ELF file is of another architecture."""
    for path, entry in tree.items():
        if entry.data[:4] == b"\x7fELF" and int.from_bytes(entry.data[18:20], "little") != MACHINES[arch]:
            raise BuildError(f"/{path} is no file of {arch}")


def compiler(version: str) -> str | None:
    """A Python of this minor version on this machine: the one that runs this, or one on PATH."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    return shutil.which(f"python{version}")


def with_bytecode(tree: Tree, python: str) -> Tree:
    """The tree with a .pyc beside each module. A .pyc is the same for every architecture."""
    modules = sorted(path for path, entry in tree.items() if entry.kind == FILE and path.endswith(".py"))
    shares = [[(path, tree[path].data) for path in modules[n::_SHARES]] for n in range(_SHARES)]

    def compiled(share: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
        command = [python, "-I", "-S", str(Path(__file__).with_name("bytecode.py"))]
        done = subprocess.run(command, input=marshal.dumps(share, 4), stdout=subprocess.PIPE, check=True)
        answer: list[tuple[str, bytes]] = marshal.loads(done.stdout)  # noqa: S302 (our own program's)
        return answer

    with ThreadPoolExecutor() as pool:
        pairs = [pair for answer in pool.map(compiled, shares) for pair in answer]
    return tree | {path: Entry(FILE, 0o644, data) for path, data in pairs}


def sha256(path: Path) -> str:
    """The hash of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _mode(info: tarfile.TarInfo) -> int:
    """No program takes over its owner's rights, and only the owner writes, but where all may, as in /tmp."""
    return info.mode & (0o1777 if info.mode & 0o1000 else 0o755)


def _path(name: str) -> str:
    return PurePosixPath("/", name).as_posix().strip("/")
