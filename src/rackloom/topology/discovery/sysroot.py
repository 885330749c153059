"""Reading files below a root that need not be this machine's own.

The tree may be a copy from elsewhere, and hostile: symbolic links are followed inside the root only, regular
files alone are read and up to a bound, and what cannot be read is absent.
"""

from pathlib import Path, PurePosixPath

from rackloom.errors import Refused, why

OWN = Path("/")
"""Where this machine itself is found."""
LONGEST = 64 * 1024
"""Bytes; a sysfs attribute has at most a page."""
LONGEST_TABLE = 16 * 1024 * 1024
"""Bytes; a table of sockets has a line of some 150 for each."""
MOST_LINKS = 40
"""Symbolic links in one path: as many as the kernel itself follows."""


class Sysroot:
    """A directory that holds `sys` and `proc` as a kernel shows them."""

    def __init__(self, root: Path = OWN) -> None:
        self.root = root

    def text(self, path: str) -> str | None:
        """A file's content without surrounding space; None where there is none."""
        found = self._read(path, LONGEST)
        return None if found is None else found.decode(errors="replace").strip()

    def whole(self, path: str) -> str | None:
        """A long file's content; None where there is none, and where it is longer than `LONGEST_TABLE`."""
        found = self._read(path, LONGEST_TABLE + 1)
        return None if found is None or len(found) > LONGEST_TABLE else found.decode(errors="replace")

    def number(self, path: str) -> int | None:
        """A file's content as an integer, decimal or `0x...`; None where it is none."""
        text = self.text(path)
        try:
            return None if text is None else int(text, 0)
        except ValueError:
            return None

    def names(self, path: str) -> tuple[str, ...]:
        """What a directory holds, in order; nothing where it does not exist."""
        found = self.real(path)
        try:
            return () if found is None else tuple(sorted(entry.name for entry in self._host(found).iterdir()))
        except OSError:
            return ()

    def real(self, path: str) -> PurePosixPath | None:
        """The path without symbolic links, as seen inside the root; None where it leads nowhere."""
        todo = list(reversed(PurePosixPath(path).parts))
        done: list[str] = []
        links = 0
        while todo:
            part = todo.pop()
            if part == "..":
                del done[-1:]
            elif part == "/":
                done.clear()
            elif (target := self._link([*done, part])) is None:
                return None
            elif target:
                links += 1
                if links > MOST_LINKS:
                    return None
                todo.extend(reversed(PurePosixPath(target).parts))
            else:
                done.append(part)
        return PurePosixPath("/", *done)

    def _link(self, parts: list[str]) -> str | None:
        """Where a symbolic link points; empty for anything else that exists; None for nothing."""
        host = self.root.joinpath(*parts)
        try:
            if host.is_symlink():
                return str(host.readlink())
            return "" if host.exists() else None
        except (OSError, ValueError):
            return None

    def _read(self, path: str, most: int) -> bytes | None:
        """Up to so many bytes of a regular file: a pipe would wait for its writer, and a device may act."""
        found = self.real(path)
        if found is None:
            return None
        try:
            at = self._host(found)
            if not at.is_file():
                return None
            with at.open("rb") as file:
                return file.read(most)
        except (OSError, ValueError):
            return None

    def _host(self, path: PurePosixPath) -> Path:
        return self.root.joinpath(*path.parts[1:])


def content_of(stated: Path) -> bytes:
    """A file that a person named beside the sysroot. Raises `Refused` where it cannot be read."""
    try:
        return stated.read_bytes()
    except OSError as error:
        raise Refused(
            f"{stated} cannot be read: {why(error)}", nearest_fix="name a file that can be read"
        ) from error
