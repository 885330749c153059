"""The page of licences of the site, from the pins: `python -m docs.site.reference licences` prints it.

A Python package that Rackloom depends on must be permissive (`PERMISSIVE`), or one of the exceptions that
the page names. Each program on Debian uses the packages that the image takes from there. The page marks
those that are not permissive.
"""

import re
from collections.abc import Iterable

from deploy.release import copyrights
from deploy.release.pins import Part, parts
from docs.site.reference.markdown import made_from

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
    "certifi": "MPL-2.0, which requires that changes of its files be published. Rackloom ships the list of "
    "certificates unchanged.",
    "pyroute2": "GPL-2.0-or-later or Apache-2.0. The receiver chooses. Rackloom uses it under Apache-2.0.",
}
"""Packages that are not under a permissive licence alone, each with the reason to accept it."""
_INTRODUCTION = f"""\
# Licences

{made_from("the pins and the metadata of their packages")}

Rackloom is under Apache-2.0. A release also contains the work of others, and this page lists it. The bill of
materials of a release (`rackloom-VERSION.cdx.json`) has the same list with the digest of every file. A test
refuses a Python package whose licence is not permissive, with two exceptions:

"""
_FILES = """
## Files in the wheel

"""
_WHEELS = """
## Python packages

`pip install rackloom` installs these on Linux, and both images contain them. NIXL and numpy are in
`rackloom-transfer` alone. A wheel names the licences of the libraries that it bundles in its `.dist-info`
folder.

"""
_DEBIAN = """
## Debian packages of the images

The programs run on this system. The packages are unchanged, as Debian publishes them, and their sources are
in Debian's archive. Each image has their licences in `/usr/share/doc/*/copyright`. **{count} of {all} are
not permissive** and are marked. The libraries of the C and C++ runtime are under LGPL-2.1, or under GPL-3.0
with the exception for programs that are compiled with them. `coreutils` (`chroot`) is a separate program
under GPL-3.0, and needs `libacl1`, `libattr1` and `libgmp10`. Rackloom does not load `readline`, which
belongs to the interactive prompt of Python. `libdb5.3`, and `libnsl2` with `libcom-err2` and
`libkeyutils1`, belong to modules of Python that Rackloom does not import (`dbm`, `nis`).

The column "licence" is about the files that the image takes. The last column lists the licences that the
package's copyright file names for the whole source, with its tests and its build. A test refuses a licence
that the file does not name.

"""


def page(found: Iterable[Part] | None = None) -> str:
    """The page, of these parts or of those that the pins name."""
    found = list(parts() if found is None else found)
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
