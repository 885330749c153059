"""The parts of a release beside the source tree: pinned wheels, Debian packages, files of others in it.

Each is named with version, digests and licence, for the bill of materials (`sbom`) and the page of licences
(`licences`). Licences of wheels come from the metadata of what is installed here; `licences.toml` has what
no metadata says in terms of SPDX.
"""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from urllib.parse import quote

from packaging.markers import Marker

from deploy.image import debian

ROOT = Path(__file__).parents[2]
TABLE = tomllib.loads((Path(__file__).parent / "licences.toml").read_text())
_PIN = re.compile(r"^([\w.-]+)==(\S+?)(?: ; (.+?))?(?: \\)?$")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_LINUX = {
    "sys_platform": "linux",
    "platform_system": "Linux",
    "os_name": "posix",
    "platform_machine": "x86_64",
}


@dataclass(frozen=True)
class Part:
    """Something that others made and a release has in it."""

    name: str
    version: str
    licence: str
    """An SPDX expression."""
    purl: str
    digests: tuple[str, ...]
    """SHA-256 of the files that it may come as: a wheel per platform, a package per architecture."""
    where: tuple[str, ...]
    """Artefacts that have it: the wheel itself, the image `rackloom`, the image `rackloom-transfer`."""


def parts() -> list[Part]:
    """All parts: of the wheel, then Python packages, then Debian's."""
    return [*_in_the_wheel(), *_wheels(), *_packages()]


def _in_the_wheel() -> Iterator[Part]:
    for name, entry in TABLE["files"].items():
        yield Part(
            name=name,
            version=entry["version"],
            licence=entry["licence"],
            purl=f"pkg:npm/{quote(name)}@{entry['version']}",
            digests=(),
            where=("wheel", "rackloom", "rackloom-transfer"),
        )


def _wheels() -> Iterator[Part]:
    for file, where in (("runtime", ("rackloom", "rackloom-transfer")), ("nixl", ("rackloom-transfer",))):
        for name, version, digests in read_pins(ROOT / "requirements" / f"{file}.txt"):
            yield Part(
                name=name,
                version=version,
                licence=licence_of(name),
                purl=f"pkg:pypi/{name}@{version}",
                digests=digests,
                where=where,
            )


def _packages() -> Iterator[Part]:
    suite = debian.needs().suite
    locked = {arch: {each.name: each for each in debian.locked(arch)} for arch in debian.ARCHITECTURES}
    for name in sorted({name for packages in locked.values() for name in packages}):
        found = [packages[name] for packages in locked.values() if name in packages]
        yield Part(
            name=name,
            version=found[0].version,
            licence=TABLE["debian"][name],
            purl=f"pkg:deb/debian/{quote(name)}@{quote(found[0].version)}?distro={suite}",
            digests=tuple(package.sha256 for package in found),
            where=("rackloom", "rackloom-transfer"),
        )


def read_pins(path: Path) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Name, version and hashes of what a requirements file installs on Linux with the image's Python."""
    environment = {**_LINUX, "python_full_version": f"{debian.needs().python}.0"}
    environment["python_version"] = debian.needs().python
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        pin = _PIN.match(line)
        if pin is None or (pin[3] and not Marker(pin[3]).evaluate(environment)):
            continue
        digests = []
        for following in lines[number + 1 :]:
            found = _HASH.search(following)
            if found is None:
                break
            digests.append(found[1])
        yield pin[1], pin[2], tuple(digests)


def licence_of(name: str) -> str:
    """The SPDX expression of a Python package.

    Raises:
        LookupError: neither its metadata nor licences.toml has it.
    """
    if name in TABLE["python"]:
        return str(TABLE["python"][name])
    found = metadata.metadata(name).get("License-Expression")
    if not found:
        raise LookupError(
            f"{name}: its metadata has no SPDX expression: add it to deploy/release/licences.toml"
        )
    return str(found)
