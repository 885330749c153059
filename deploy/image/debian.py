"""The image's Debian packages: which, from where, and what they hold.

`packages.toml` names what the image needs. `relock` asks apt, with this machine's own sources and keys and an empty
system, which packages that takes on each architecture, and writes version, path in the archive, size and SHA-256 of
each to `packages.lock`; apt has checked these against the archive's signature. `fetch` gets exactly the files of the
lock: it tries each archive of this machine's apt configuration and keeps what has the hash. No package is installed,
and no maintainer script is run: `unpack` reads the files out of the packages.
"""

import subprocess
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from deploy.image.trees import BuildError, Tree, add, merged_usr, only_readable, read_tar, sha256, text

HERE = Path(__file__).parent
LOCK = HERE / "packages.lock"
ARCHITECTURES = ("amd64", "arm64")
_HEADER = """\
# Written by `make image-lock` from packages.toml. An archive keeps the newest version of a package only: when it
# no longer has one of these, lock again.
# architecture package version path-in-the-archive size sha256
"""
_HELPER = "/usr/lib/apt/apt-helper"


@dataclass(frozen=True)
class Wanted:
    """`packages.toml`."""

    suite: str
    python: str
    packages: tuple[str, ...]
    without: tuple[str, ...]
    leave: tuple[str, ...]


@dataclass(frozen=True)
class Package:
    """One line of the lock."""

    arch: str
    name: str
    version: str
    path: str
    size: int
    sha256: str


def wanted() -> Wanted:
    """What the image needs."""
    read = tomllib.loads((HERE / "packages.toml").read_text())
    lists = {key: tuple(read[key]) for key in ("packages", "without", "leave")}
    return Wanted(suite=read["suite"], python=read["python"], **lists)


def locked(arch: str) -> list[Package]:
    """The packages of an architecture, by name."""
    lines = [line.split() for line in LOCK.read_text().splitlines() if not line.startswith("#")]
    return [
        Package(own, name, version, path, int(size), digest)
        for own, name, version, path, size, digest in lines
        if own == arch
    ]


def fetch(packages: Sequence[Package], folder: Path) -> dict[Package, Path]:
    """The packages' files, from the folder or from an archive that apt knows.

    Raises:
        BuildError: no archive has one of them, or none was reached.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {package: folder / f"{package.name}-{package.sha256}.deb" for package in packages}
    for archive in _archives():
        lacking = [package for package, file in files.items() if not file.exists()]
        if not lacking:
            return files
        complaint = _download(archive, lacking, files)
    lacking = [package for package, file in files.items() if not file.exists()]
    if lacking:
        names = ", ".join(f"{package.name} {package.version} ({package.arch})" for package in lacking)
        raise BuildError(
            f"no archive of this machine has {names}: `make image-lock` locks what they have now\n{complaint}",
            again="404" not in complaint,
        )
    return files


def unpack(files: dict[Package, Path], leave: Iterable[str]) -> Tree:
    """What the packages hold, in a root with merged /usr, without the paths that match `leave`."""
    tree: Tree = {}
    for package, file in files.items():
        with (
            subprocess.Popen(["dpkg-deb", "--fsys-tarfile", file], stdout=subprocess.PIPE) as dpkg,
            tarfile.open(fileobj=dpkg.stdout, mode="r|") as tar,
        ):
            for path, entry in read_tar(tar):
                if not _left(path, leave):
                    add(tree, merged_usr(path), only_readable(entry), package.name)
        if dpkg.returncode:
            raise BuildError(f"dpkg-deb cannot read {file}", again=False)
        # Where scanners look for packages of images that have no dpkg.
        tree[f"var/lib/dpkg/status.d/{package.name}"] = text(_output(["dpkg-deb", "--field", str(file)]))
    return tree


def relock() -> None:
    """Write the lock anew from what the archives have now."""
    lines = [line for arch in ARCHITECTURES for line in _resolve(wanted(), arch)]
    LOCK.write_text(_HEADER + "".join(f"{line}\n" for line in lines))


def _resolve(want: Wanted, arch: str) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        # Any user of apt may read it, also the one that downloads.
        home.chmod(0o755)
        options = _private(home, arch, want)
        _output(["apt-get", *options, "-q", "update"])
        install = ["apt-get", *options, "--simulate", "--no-install-recommends", "install", *want.packages]
        chosen = [line.split() for line in _output(install).splitlines() if line.startswith("Inst ")]
        exact = [f"{words[1]}={words[2].lstrip('(')}" for words in chosen]
        stanzas = _output(["apt-cache", *options, "show", *exact]).strip().split("\n\n")
        return sorted({_line(stanza, arch) for stanza in stanzas})


def _private(home: Path, arch: str, want: Wanted) -> list[str]:
    """Options of apt: this machine's sources, and nothing else of its state."""
    for name in ("lists/partial", "cache/archives/partial"):
        (home / name).mkdir(parents=True)
    there = "Status: install ok installed\nVersion: 99:0\nMulti-Arch: foreign\n"
    status = "\n".join(f"Package: {name}\n{there}Architecture: {arch}\n" for name in want.without)
    (home / "status").write_text(status)
    # What is not Debian's suite is not considered, whatever other sources this machine has.
    pins = [f"Package: *\nPin: release n={want.suite}{more}\nPin-Priority: 500\n" for more in ("", "-*")]
    (home / "preferences").write_text("\n".join([*pins, "Package: *\nPin: release *\nPin-Priority: -1\n"]))
    settings = {
        "Dir::State": home,
        "Dir::State::lists": home / "lists",
        "Dir::State::status": home / "status",
        "Dir::Cache": home / "cache",
        "Dir::Etc::preferences": home / "preferences",
        "Dir::Etc::preferencesparts": "/dev/null",
        "APT::Architecture": arch,
        "APT::Architectures": arch,
        "APT::Update::Error-Mode": "any",
    }
    return [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]


def _line(stanza: str, arch: str) -> str:
    fields = dict(line.split(": ", 1) for line in stanza.splitlines() if ": " in line and line[0] != " ")
    return " ".join([arch, *(fields[key] for key in ("Package", "Version", "Filename", "Size", "SHA256"))])


def _archives() -> list[str]:
    """The roots of the archives that this machine's apt knows, each once."""
    command = ["apt-get", "--no-release-info", "indextargets", "--format", "$(REPO_URI)"]
    return list(dict.fromkeys(_output(command).split()))


def _download(archive: str, packages: Sequence[Package], files: dict[Package, Path]) -> str:
    """Get what this archive has of the packages; what apt complains of."""
    with tempfile.TemporaryDirectory(dir=next(iter(files.values())).parent) as folder:
        asked = [
            (
                f"{archive.rstrip('/')}/{package.path}",
                str(Path(folder) / package.sha256),
                f"SHA256:{package.sha256}",
            )
            for package in packages
        ]
        command = [
            _HELPER,
            "-o",
            "Acquire::Retries=3",
            "download-file",
            *(word for one in asked for word in one),
        ]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        for package in packages:
            file = Path(folder) / package.sha256
            if file.exists() and sha256(file) == package.sha256:
                file.rename(files[package])
    return ended.stdout + ended.stderr


def _left(path: str, leave: Iterable[str]) -> bool:
    documentation = path.startswith("usr/share/doc/") and not path.endswith("/copyright")
    return documentation or any(fnmatch(path, pattern) for pattern in leave)


def _output(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError as error:
        raise BuildError(f"{command[0]} is not here: the image is made on Debian", again=False) from error
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{' '.join(command[:1])} failed:\n{error.stdout}{error.stderr}") from error
