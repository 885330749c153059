"""The image's Debian packages: which they are, where they come from, and what they hold.

`packages.toml` names what the image needs. `relock` asks apt which packages that takes on each
architecture, with this machine's sources and keys, and otherwise as if nothing were installed. It writes
version, path in the archive, size and SHA-256 of each to `packages.lock`; apt got them from an index that
the archive has signed. `fetch` gets exactly the files of the lock: it asks each archive that this
machine's apt knows, and keeps what has the hash. To build from versions that the archives have dropped,
add a snapshot of them to the sources of apt. No package is installed and no maintainer script runs:
`unpack` reads the files out of the packages.
"""

import re
import subprocess
import tarfile
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.image.trees import BuildError, Tree, add, link, read_tar, sha256, text

HERE = Path(__file__).parent
ARCHITECTURES = ("amd64", "arm64")
_HEADER = """\
# Written by `make image-lock` from packages.toml. An archive has the newest version of a package only:
# when it no longer has one of these, lock again.
# architecture, package, version, path in the archive, size, SHA-256
"""
_MERGED = ("bin", "lib", "lib64", "sbin")
"""Links into /usr. Packages of this suite may still put files below them."""
_APT_HELPER = "/usr/lib/apt/apt-helper"


@dataclass(frozen=True)
class Needs:
    """`packages.toml`."""

    suite: str
    python: str
    glibc: str
    packages: tuple[str, ...]
    without: tuple[str, ...]
    leave: tuple[str, ...]
    keep: tuple[str, ...]


@dataclass(frozen=True)
class Package:
    """A line of `packages.lock`."""

    arch: str
    name: str
    version: str
    path: str
    size: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.arch} {self.name} {self.version} {self.path} {self.size} {self.sha256}"


def needs() -> Needs:
    """The needs of the image."""
    read = tomllib.loads((HERE / "packages.toml").read_text())
    lists = {key: tuple(value) for key, value in read.items() if isinstance(value, list)}
    return Needs(**(read | lists))


def locked(arch: str) -> list[Package]:
    """The packages of an architecture."""
    lines = [line.split() for line in (HERE / "packages.lock").read_text().splitlines() if line[0] != "#"]
    packages = [
        Package(of, name, version, path, int(size), digest) for of, name, version, path, size, digest in lines
    ]
    return [package for package in packages if package.arch == arch]


def relock() -> None:
    """Write the lock from what the archives have now. Raises as `resolved`."""
    packages = [package for arch in ARCHITECTURES for package in resolved(needs(), arch)]
    (HERE / "packages.lock").write_text(_HEADER + "".join(f"{package}\n" for package in packages))


def resolved(want: Needs, arch: str) -> list[Package]:
    """The packages of an architecture today, with all that they depend on, by name.

    Raises:
        BuildError: apt cannot say.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # apt downloads as a user of its own
        options = _apart(Path(folder), want, arch)
        _output("apt-get", *options, "-q", "update")
        install = ("--simulate", "--no-install-recommends", "install", *want.packages)
        steps = [line.split() for line in _output("apt-get", *options, *install).splitlines()]
        chosen = [f"{step[1]}={step[2].lstrip('(')}" for step in steps if step and step[0] == "Inst"]
        stanzas = _output("apt-cache", *options, "show", *chosen).strip().split("\n\n")
    # A version that two suites have is shown twice.
    return sorted({_package(stanza, arch) for stanza in stanzas}, key=str)


def fetch(packages: Sequence[Package], folder: Path) -> dict[Package, Path]:
    """The packages' files, from the folder or else from an archive.

    Raises:
        BuildError: no archive gave one of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {package: folder / f"{package.name}-{package.sha256}.deb" for package in packages}
    complaints = ""
    for archive in _archives() if _lacking(files) else []:
        complaints += _download(archive, _lacking(files), files)
    if lacking := _lacking(files):
        names = ", ".join(f"{package.name} {package.version} ({package.arch})" for package in lacking)
        raise BuildError(
            f"{complaints}no archive of this machine's apt gave {names}.\n"
            "  fix: `make image-lock` locks the versions that they have now",
            # A missing package will still be missing in a minute.
            again=not is_absent(complaints),
        )
    return files


def is_absent(complaints: str) -> bool:
    """Whether an archive has answered that it does not have a file: a port may have the same digits."""
    return re.search(r"\s404\s", complaints) is not None


def unpack(files: dict[Package, Path]) -> Tree:
    """The files of the packages, in a root with merged /usr."""
    tree: Tree = {}
    for package, file in files.items():
        with (
            subprocess.Popen(["dpkg-deb", "--fsys-tarfile", file], stdout=subprocess.PIPE) as dpkg,
            tarfile.open(fileobj=dpkg.stdout, mode="r|") as tar,
        ):
            for path, entry in read_tar(tar):
                top = path.partition("/")[0]
                add(tree, f"usr/{path}" if top in _MERGED else path, entry)
        if dpkg.returncode:
            raise BuildError(f"dpkg-deb cannot read {file}")
        # Where scanners look for packages in an image without dpkg.
        tree[f"var/lib/dpkg/status.d/{package.name}"] = text(_output("dpkg-deb", "--field", str(file)))
    # There is no /lib64 on arm64.
    there = [name for name in _MERGED if any(path.startswith(f"usr/{name}/") for path in tree)]
    return tree | {name: link(f"usr/{name}") for name in there}


def _apart(home: Path, want: Needs, arch: str) -> list[str]:
    """Options with which apt has this machine's sources and keys, and nothing else of it."""
    for name in ("lists/partial", "cache/archives/partial"):
        (home / name).mkdir(parents=True)
    installed = f"Status: install ok installed\nVersion: 99:0\nArchitecture: {arch}\nMulti-Arch: foreign\n"
    (home / "status").write_text("\n".join(f"Package: {name}\n{installed}" for name in want.without))
    # Other sources that the machine has are not asked.
    pins = [f"Package: *\nPin: release n={want.suite}{part}\nPin-Priority: 500\n" for part in ("", "-*")]
    (home / "preferences").write_text("\n".join([*pins, "Package: *\nPin: release *\nPin-Priority: -1\n"]))
    settings = {
        "APT::Architecture": arch,
        "APT::Architectures": arch,
        "APT::Update::Error-Mode": "any",
        "Dir::Cache": home / "cache",
        "Dir::Etc::preferences": home / "preferences",
        "Dir::Etc::preferencesparts": "/dev/null",
        "Dir::State": home,
        "Dir::State::lists": home / "lists",
        "Dir::State::status": home / "status",
    }
    return [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]


def _package(stanza: str, arch: str) -> Package:
    lines = [line for line in stanza.splitlines() if ": " in line and not line.startswith(" ")]
    fields = dict(line.split(": ", 1) for line in lines)
    return Package(
        arch,
        fields["Package"],
        fields["Version"],
        fields["Filename"],
        int(fields["Size"]),
        fields["SHA256"],
    )


def _archives() -> list[str]:
    """The roots of the archives that this machine's apt knows, each once."""
    asked = ("--no-release-info", "indextargets", "Created-By: Packages", "--format", "$(REPO_URI)")
    return list(dict.fromkeys(_output("apt-get", *asked).split()))


def _lacking(files: dict[Package, Path]) -> list[Package]:
    return [package for package, file in files.items() if not file.exists()]


def _download(archive: str, packages: Sequence[Package], files: dict[Package, Path]) -> str:
    """Get those of the packages that an archive has; what apt complains of."""
    if not packages:
        return ""
    with tempfile.TemporaryDirectory(dir=files[packages[0]].parent) as folder:
        arrived = {package: Path(folder) / package.sha256 for package in packages}
        asked = [
            word
            for package, path in arrived.items()
            for word in (f"{archive.rstrip('/')}/{package.path}", str(path), f"SHA256:{package.sha256}")
        ]
        # apt's own downloader: it knows the machine's proxies and credentials.
        command = [_APT_HELPER, "-o", "Acquire::Retries=3", "download-file", *asked]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        for package, path in arrived.items():
            if path.exists() and sha256(path) == package.sha256:
                path.rename(files[package])
    return "".join(f"{line}\n" for line in done.stderr.splitlines() if line.startswith("E:"))


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError as error:
        raise BuildError(f"there is no {command[0]}: the image is built on Debian or its like") from error
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{command[0]} failed:\n{error.stdout}{error.stderr}", again=True) from error
