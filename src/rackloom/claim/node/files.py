"""Files that are there whole or not at all, after a crash and after a power loss too."""

import os
from pathlib import Path

PARTIAL = ".partial"
"""Ends the name of a file that is being written; one that stays was left by a crash."""


def write_whole(path: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Replace `path` by `content`: once this returns it is on the disk."""
    partial = path.with_name(f".{path.name}{PARTIAL}")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_directory(path.parent)


def remove(path: Path) -> None:
    """Delete `path` if it is there: once this returns it stays gone."""
    path.unlink(missing_ok=True)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """A rename or an unlink is on the disk only once its directory is."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
