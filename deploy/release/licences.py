"""docs/licences.md: `python -m deploy.release.licences` writes it from the pins and what they say.

What Rackloom chooses to depend on must be permissive (`PERMISSIVE`), with the exceptions that the page names.
What the image takes from Debian is what every program on that system uses; the page says which is permissive.
"""

import re
from collections.abc import Iterable

from deploy.release import copyrights
from deploy.release.pins import ROOT, Part, parts

PAGE = ROOT / "docs" / "licences.md"
PERMISSIVE = {
    "0BSD",
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "CC0-1.0",
    "LicenseRef-public-domain",
    "MIT",
    "MIT-0",
    "PSF-2.0",
    "X11",
    "Zlib",
    "blessing",
    "bzip2-1.0.6",
    "libselinux-1.0",
}
EXCEPTIONS = {
    "certifi": "MPL-2.0. It asks that changes of its own files be published; the list of certificates is "
    "shipped unchanged.",
    "pyroute2": "GPL-2.0-or-later or Apache-2.0, as the receiver chooses: Rackloom uses it under Apache-2.0.",
}
"""Packages whose licence needs a word."""
_INTRODUCTION = """\
# Licences of what is shipped

Rackloom is under Apache-2.0. This page lists what others made and a release has in it; the bill of materials
of a release ([SECURITY.md](../SECURITY.md#verify-a-release)) has the same with the digest of every file,
for programs.
`python -m deploy.release.licences` writes the page from the pins; a test compares, and refuses a Python
package whose licence is not permissive.

Two need a word:

"""
_FILES = """
## Files in the wheel

"""
_WHEELS = """
## Python packages

What `pip install rackloom` brings on Linux, and what both images have; NIXL and numpy are in
`rackloom-transfer` alone. Libraries that a wheel has bundled are named by its own licence files, below its
`.dist-info` folder.

"""
_DEBIAN = """
## Debian packages of the images

They are the system that the programs run on: unchanged, as Debian publishes them, with their sources in
Debian's archive. Each image has their licences in `/usr/share/doc/*/copyright`. **{count} of {all} are
not permissive**; they are marked. Libraries of the C and C++ runtime are under LGPL-2.1, or GPL-3.0 with
the exception for programs that are compiled with them. `coreutils` (`chroot`) is a program of its own
under GPL-3.0, and brings `libacl1`, `libattr1` and `libgmp10`. `readline` is loaded by nothing of ours:
it belongs to the interactive prompt of Python. `libdb5.3`, and `libnsl2` with what it needs
(`libcom-err2`, `libkeyutils1`), belong to modules of Python that nothing of ours imports (`dbm`, `nis`).

The last column is what the package's copyright file names, read from the locked packages by `python -m
deploy.release.copyrights`: more than the image has in it, because that file is of the whole source, with
its tests and its build. The licence is that of what the image takes; a test refuses one that the file
does not name.

"""


def page(found: Iterable[Part]) -> str:
    """The page."""
    found = list(found)
    words = [f"- **{name}** is under {text}\n" for name, text in EXCEPTIONS.items()]
    wheels = [part for part in found if part.purl.startswith("pkg:pypi/")]
    files = [part for part in found if part.purl.startswith("pkg:npm/")]
    packages = [part for part in found if part.purl.startswith("pkg:deb/")]
    introduction = _DEBIAN.format(
        count=sum(not is_permissive(part.licence) for part in packages), all=len(packages)
    )
    tables = (_FILES, _table(files), _WHEELS, _table(wheels), introduction, _table_of_debian(packages))
    return "".join([_INTRODUCTION, *words, *tables])


def refused(found: Iterable[Part]) -> list[str]:
    """Python packages and files whose licence is neither permissive nor an exception that the page names."""
    return [
        f"{part.name}: {part.licence}"
        for part in found
        if not part.purl.startswith("pkg:deb/")
        and part.name not in EXCEPTIONS
        and not is_permissive(part.licence)
    ]


def is_permissive(expression: str) -> bool:
    """Whether an SPDX expression without parentheses can be met by permissive licences alone."""
    return any(
        all(term.strip() in PERMISSIVE for term in re.split(r" AND ", choice))
        for choice in re.split(r" OR ", expression)
    )


def _table(found: Iterable[Part]) -> str:
    rows = [f"| {part.name} | {part.version} | {part.licence} |\n" for part in found]
    return "| package | version | licence |\n|---|---|---|\n" + "".join(rows)


def _table_of_debian(found: Iterable[Part]) -> str:
    named = copyrights.locked()
    rows = [
        f"| {part.name} | {part.version} | {part.licence} | "
        f"{'yes' if is_permissive(part.licence) else '**no**'} | {', '.join(named[part.name].names)} |\n"
        for part in found
    ]
    head = "| package | version | licence | permissive | its copyright file names |\n|---|---|---|---|---|\n"
    return head + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page(parts()))
