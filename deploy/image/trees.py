"""File systems as values: what a layer of the image holds, its bytecode, and its tar.

A `Tree` maps paths, without a leading slash, to entries. Nothing of it needs a folder, root or a device node, and
the same tree is always the same tar: entries are sorted by path, times are zero, owners are numbers.
"""

import hashlib
import importlib.util
import io
import marshal
import multiprocessing
import os
import sys
import tarfile
import warnings
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

DIRECTORY, FILE, LINK = tarfile.DIRTYPE, tarfile.REGTYPE, tarfile.SYMTYPE
MACHINES = {"amd64": 62, "arm64": 183}
"""e_machine of ELF files: EM_X86_64 and EM_AARCH64."""
_UNCHECKED = (1).to_bytes(4, "little")
"""The flags of a .pyc that is valid for its source whatever its time is (PEP 552)."""
_CHUNKS = 8


@dataclass(frozen=True)
class Entry:
    """A directory, a file or a symbolic link. `data` is a file's content or a link's target."""

    kind: bytes
    mode: int
    data: bytes = b""
    owner: int = 0
    """User and group."""


Tree = dict[str, Entry]


class BuildError(Exception):
    """The image cannot be built. `again` says whether asking once more may help."""

    def __init__(self, message: str, *, again: bool = True) -> None:
        super().__init__(message)
        self.again = again


def text(content: str, mode: int = 0o644) -> Entry:
    """A text file."""
    return Entry(FILE, mode, content.encode())


def link(target: str) -> Entry:
    """A symbolic link."""
    return Entry(LINK, 0o777, target.encode())


def folder(mode: int = 0o755, owner: int = 0) -> Entry:
    """A directory."""
    return Entry(DIRECTORY, mode, owner=owner)


def add(tree: Tree, path: str, entry: Entry, source: str) -> None:
    """Put an entry into the tree.

    Raises:
        BuildError: something else is there already. Two directories are the same whatever their modes are.
    """
    there = tree.setdefault(path, entry)
    if there != entry and not there.kind == entry.kind == DIRECTORY:
        raise BuildError(f"{source}: /{path} is there already, and different", again=False)


def read_folder(folder_path: Path, below: str) -> Tree:
    """All regular files of a folder, as entries below a path of the image."""
    tree: Tree = {}
    for path in sorted(folder_path.rglob("*")):
        if path.is_symlink():
            raise BuildError(f"{path} is a symbolic link", again=False)
        if path.is_file():
            mode = 0o755 if os.access(path, os.X_OK) and path.stat().st_mode & 0o111 else 0o644
            tree[f"{below}/{path.relative_to(folder_path).as_posix()}"] = Entry(FILE, mode, path.read_bytes())
    return tree


def with_bytecode(tree: Tree) -> Tree:
    """The tree, and beside each Python module its bytecode for the Python that runs this.

    A file that this Python cannot compile (a template, say) stays without. Fixed shares of the modules go to
    processes that do nothing else: how marshal writes a name depends on what else the process holds.
    """
    modules = sorted(path for path, entry in tree.items() if entry.kind == FILE and path.endswith(".py"))
    shares = [[(path, tree[path].data) for path in modules[n::_CHUNKS]] for n in range(_CHUNKS)]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn, max_tasks_per_child=1) as pool:
        compiled = [pair for share in pool.map(_compile, shares) for pair in share]
    return tree | {path: Entry(FILE, 0o644, code) for path, code in compiled}


def write_tar(tree: Tree, path: Path) -> None:
    """Write the tree, and the directories above its entries that it does not name."""
    parents = {str(parent) for name in tree for parent in PurePosixPath(name).parents} - {"."}
    whole = {parent: folder() for parent in parents} | tree
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(whole):
            entry = whole[name]
            info = tarfile.TarInfo(name)
            info.type, info.mode, info.uid, info.gid = entry.kind, entry.mode, entry.owner, entry.owner
            if entry.kind == LINK:
                info.linkname = entry.data.decode()
            info.size = len(entry.data) if entry.kind == FILE else 0
            tar.addfile(info, io.BytesIO(entry.data) if entry.kind == FILE else None)


def read_tar(tar: tarfile.TarFile) -> Iterable[tuple[str, Entry]]:
    """The entries of a tar with owners of 0. A hard link becomes a file of its own.

    Raises:
        BuildError: it holds something that is no directory, file or link.
    """
    files: Tree = {}
    for info in tar:
        path = info.name.removeprefix("./").strip("/")
        if path in ("", "."):
            continue
        if info.isreg():
            content = tar.extractfile(info)
            assert content is not None  # noqa: S101
            files[path] = Entry(FILE, info.mode, content.read())
            yield path, files[path]
        elif info.islnk():
            yield path, files[info.linkname.removeprefix("./").strip("/")]
        elif info.issym():
            yield path, link(info.linkname)
        elif info.isdir():
            yield path, folder(info.mode)
        else:
            raise BuildError(f"/{path} is neither a file nor a directory nor a link", again=False)


def check_machine(tree: Tree, arch: str) -> None:
    """Raises `BuildError` where an ELF file is of another architecture."""
    for path, entry in tree.items():
        if entry.data[:4] == b"\x7fELF" and int.from_bytes(entry.data[18:20], "little") != MACHINES[arch]:
            raise BuildError(f"/{path} is not a program of {arch}", again=False)


def without_host(tree: Tree, host_paths: Iterable[Path]) -> None:
    """Raises `BuildError` where a file names a path of the machine that builds."""
    for path, entry in tree.items():
        for host in host_paths:
            if str(host).encode() in entry.data:
                raise BuildError(f"/{path} names {host}, a path of this machine", again=False)


def merged_usr(path: str) -> str:
    """Where a path leads in a root whose /bin, /lib, /lib64 and /sbin are links into /usr."""
    first, _, rest = path.partition("/")
    return f"usr/{path}" if first in MERGED and rest else path


MERGED = ("bin", "lib", "lib64", "sbin")


def sha256(path: Path) -> str:
    """The hash of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def only_readable(entry: Entry) -> Entry:
    """The entry without set-user-ID, set-group-ID, and rights of others to write."""
    return entry if entry.kind == LINK else replace(entry, mode=entry.mode & 0o1755)


def _compile(modules: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    compiled = []
    warnings.simplefilter("ignore")
    for path, source in modules:
        try:
            code = compile(source, f"/{path}", "exec", dont_inherit=True)
        except (SyntaxError, ValueError):
            continue
        head = importlib.util.MAGIC_NUMBER + _UNCHECKED + importlib.util.source_hash(source)
        compiled.append((importlib.util.cache_from_source(path), head + marshal.dumps(code)))
    return compiled


def python_version() -> str:
    """The minor version of the Python that runs this."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"
