"""Semantic versions 2.0.0, as device attributes and selectors use them.

Build metadata is kept and takes no part in comparison. The numbers are unsigned 64-bit, as upstream has them.
"""

import functools
import re
from dataclasses import dataclass

_NUMBER = re.compile(r"[0-9]*")
_IDENTIFIER = re.compile(r"[0-9A-Za-z-]+")
_UINT64_MAX = 2**64 - 1


@functools.total_ordering
@dataclass(frozen=True, slots=True, eq=False)
class Semver:
    """A version; `prerelease` and `build` are its dot-separated parts."""

    major: int
    minor: int
    patch: int
    prerelease: tuple[int | str, ...] = ()
    build: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Semver":
        """Read `1.2.3-rc.1+build`. ValueError says what is wrong with it."""
        return _parse(text)

    @classmethod
    def normalise(cls, text: str) -> "Semver":
        """Read a version with a v prefix, missing minor or patch, or leading zeros, as `v1.02`."""
        parts = [_without_zeros(part) for part in text.removeprefix("v").split(".", 2)]
        if len(parts) < 3 and re.search("[+-]", parts[-1]):
            raise ValueError("short version cannot contain PreRelease/Build meta data")
        return _parse(".".join(parts + ["0"] * (3 - len(parts))))

    def compare(self, other: "Semver") -> int:
        """-1, 0 or 1 by precedence; build metadata does not count."""
        mine, theirs = self._precedence(), other._precedence()
        return (mine > theirs) - (mine < theirs)

    def _precedence(self) -> tuple[int, int, int, bool, tuple[tuple[bool, int, str], ...]]:
        parts = tuple(
            (False, part, "") if isinstance(part, int) else (True, 0, part) for part in self.prerelease
        )
        return self.major, self.minor, self.patch, not self.prerelease, parts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Semver) and self.compare(other) == 0

    def __lt__(self, other: "Semver") -> bool:
        return self.compare(other) < 0

    def __hash__(self) -> int:
        return hash((self.major, self.minor, self.patch, self.prerelease))

    def __str__(self) -> str:
        core = f"{self.major}.{self.minor}.{self.patch}"
        before = "-" + ".".join(map(str, self.prerelease)) if self.prerelease else ""
        return core + before + ("+" + ".".join(self.build) if self.build else "")


def _without_zeros(part: str) -> str:
    if len(part) < 2:
        return part
    bare = part.lstrip("0")
    return bare if bare[:1].isdigit() and bare[:1].isascii() else "0" + bare


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> Semver:
    if not text:
        raise ValueError("Version string empty")
    parts = text.split(".", 2)
    if len(parts) != 3:
        raise ValueError(f"No Major.Minor.Patch elements found in {text!r}")
    rest, plus, build = parts[2].partition("+")
    patch, dash, before = rest.partition("-")
    numbers = [
        _number(part, name)
        for part, name in zip((*parts[:2], patch), ("major", "minor", "patch"), strict=True)
    ]
    prerelease = tuple(_prerelease(part) for part in before.split(".")) if dash else ()
    metadata = tuple(_build(part) for part in build.split(".")) if plus else ()
    return Semver(numbers[0], numbers[1], numbers[2], prerelease, metadata)


def _number(part: str, name: str) -> int:
    if not part or not _NUMBER.fullmatch(part):
        raise ValueError(f"Invalid character(s) found in {name} number {part!r}")
    if len(part) > 1 and part[0] == "0":
        raise ValueError(f"{name.capitalize()} number must not contain leading zeroes {part!r}")
    if int(part) > _UINT64_MAX:
        raise ValueError(f"{name.capitalize()} number {part!r} is out of range")
    return int(part)


def _prerelease(part: str) -> int | str:
    if not _IDENTIFIER.fullmatch(part):
        raise ValueError(f"Invalid character(s) found in prerelease {part!r}")
    return _number(part, "prerelease") if _NUMBER.fullmatch(part) else part


def _build(part: str) -> str:
    if not _IDENTIFIER.fullmatch(part):
        raise ValueError(f"Invalid character(s) found in build meta data {part!r}")
    return part
