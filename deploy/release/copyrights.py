"""The licences in the copyright files of the image's Debian packages: `python -m deploy.release.copyrights`.

It reads /usr/share/doc/*/copyright of each package of deploy/image/packages.lock, as the image has it, and
writes copyrights.lock: the digest of the file, and the licences that it names. A file in Debian's
machine-readable format (DEP 5) names them in its fields; for others they are the texts of
/usr/share/common-licenses that it refers to, and the phrases of `_PHRASES`. That is more than a package is
under: the file is of the whole source, with its tests and its build. licences.toml says what the files are
under that the image takes; `unsupported` refuses a term there of which the copyright file does not speak.
"""

import hashlib
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from deploy.image.trees import FILE, LINK, BuildError, Tree

from deploy.image import build, debian

LOCK = Path(__file__).parent / "copyrights.lock"
_HEADER = """\
# Written by `python -m deploy.release.copyrights` from the packages of deploy/image/packages.lock.
# package, version, SHA-256 of its copyright file | licences that the file names
"""
_GNU = "as published by the Free Software Foundation; "
_LATER = r"(?: of the License)?, or \(at your option\) any later version"
_PHRASES = {
    "BSD-2-clause": "Redistribution and use in source and binary forms",
    "GCC-exception-3.1": "GCC Runtime Library Exception, version 3.1",
    "GPL-2+": rf"GNU General Public License {_GNU}(?:either )?version 2{_LATER}",
    "GPL-3+": rf"GNU General Public License {_GNU}either version 3{_LATER}",
    "LGPL-2.1+": rf"GNU Lesser General Public License(?: {_GNU}either|,) version 2.1"
    rf"(?:{_LATER}| \(or, at your option, any later version\))",
    "PSF-2": "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2",
    "public-domain": "is public domain",
}
"""By a name in the manner of Debian's, what a copyright file in prose says of a licence."""
_SPOKEN: Mapping[str, tuple[str, ...]] = {
    "Apache-2.0": ("Apache-2.0",),
    "BSD-2-Clause": ("BSD-2-clause",),
    "BSD-3-Clause": ("BSD-3-clause", "BSD-3-Clause"),
    "GCC-exception-3.1": ("GCC-exception-3.1",),
    "GPL-2.0-only": ("GPL-2",),
    "GPL-2.0-or-later": ("GPL-2+",),
    "GPL-3.0-or-later": ("GPL-3+",),
    "LGPL-2.0-or-later": ("LGPL-2+",),
    "LGPL-2.1-only": ("LGPL-2.1",),
    "LGPL-2.1-or-later": ("LGPL-2.1+",),
    "LGPL-3.0-or-later": ("LGPL-3+",),
    "LicenseRef-public-domain": ("PD", "ad-hoc", "public-domain"),
    "MIT": ("Expat", "MIT"),
    "MPL-2.0": ("MPL-2.0",),
    "PCRE2-exception": ("BINARY LIBRARY-LIKE PACKAGES exception",),
    "PSF-2.0": ("PSF-2",),
    "Sleepycat": ("Sleepycat",),
    "X11": ("X11",),
    "Zlib": ("Zlib",),
    "blessing": ("public-domain",),
    "bzip2-1.0.6": ("BSD-variant",),
    "libselinux-1.0": ("public-domain",),
}
"""SPDX licences by their names in copyright files."""


@dataclass(frozen=True)
class Copyright:
    """A line of `copyrights.lock`."""

    name: str
    version: str
    sha256: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.version} {self.sha256} | {', '.join(self.names)}"


def locked() -> dict[str, Copyright]:
    """The licences that were found, by package."""
    found = {}
    for line in LOCK.read_text().splitlines():
        if line[0] != "#":
            file, _, names = line.partition(" | ")
            name, version, digest = file.split()
            found[name] = Copyright(name, version, digest, tuple(names.split(", ")))
    return found


def read(arch: str) -> list[Copyright]:
    """The copyrights of the packages of an architecture, by name. Raises `BuildError` if one is missing."""
    packages = debian.locked(arch)
    tree = debian.unpack(debian.fetch(packages, build.cache_folder() / "packages"))
    found = []
    for package in packages:
        content = _copyright(tree, package.name)
        names = tuple(sorted(set(named_licences(content.decode()))))
        found.append(Copyright(package.name, package.version, hashlib.sha256(content).hexdigest(), names))
    return found


def named_licences(text: str) -> Iterator[str]:
    """The licences that a copyright file names, as it spells them."""
    if text.lstrip().startswith("Format:"):
        for expression in re.findall(r"^License:[ \t]*(\S.*)$", text, re.MULTILINE):
            yield from map(str.strip, re.split(r" (?:and|or|with) |,", expression))
        return
    yield from (name.rstrip(".") for name in re.findall(r"common-licenses/([\w.+-]+)", text))
    prose = " ".join(text.split())
    yield from (name for name, phrase in _PHRASES.items() if re.search(phrase, prose))


def unsupported(expression: str, names: tuple[str, ...]) -> list[str]:
    """The terms of an SPDX expression of which a copyright file that names these does not speak."""
    terms = re.split(r" (?:AND|OR|WITH) ", expression)
    return [term for term in terms if not set(_SPOKEN.get(term, ())) & set(names)]


def _copyright(tree: Tree, package: str) -> bytes:
    """The copyright file of a package; its folder may be a link to that of another."""
    folder = PurePosixPath("usr/share/doc", package)
    entry = tree.get(str(folder))
    if entry is not None and entry.kind == LINK:
        folder = folder.parent / entry.data.decode()
    file = tree.get(str(folder / "copyright"))
    if file is None or file.kind != FILE:
        raise BuildError(f"{package} has no copyright file")
    return file.data


def relock() -> None:
    """Write the lock.

    Raises:
        BuildError: a package cannot be had, or what it says differs by architecture.
    """
    amd64, arm64 = (read(arch) for arch in debian.ARCHITECTURES)
    if amd64 != arm64:
        differing = sorted({each.name for each in {*amd64} ^ {*arm64}})
        raise BuildError(f"the architectures have other copyright files of {', '.join(differing)}")
    LOCK.write_text(_HEADER + "".join(f"{each}\n" for each in amd64))


if __name__ == "__main__":
    try:
        relock()
    except BuildError as error:
        sys.exit(f"copyrights: {error}")
