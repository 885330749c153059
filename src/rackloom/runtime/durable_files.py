"""Files that survive a crash or a power loss: replaced whole or not at all.

`write_durably` writes a partial file, syncs it, renames it over the old one and syncs the directory. After a
crash the file has its old content or the new one. A partial file that stays was left by a crash. Once the
function returns, the new content is on the disk.
"""

import os
from contextlib import suppress
from pathlib import Path

PARTIAL = ".partial"
"""Ends the name of a file that is being written."""


def write_durably(path: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Replace `path` by `content`. Raises OSError, and the old content stays."""
    partial = path.with_name(f".{path.name}{PARTIAL}")
    # A link in its place may belong to another user who may write to this directory.
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    try:
        with os.fdopen(os.open(partial, flags, mode), "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        # A full disk has no room for a part without a reader.
        with suppress(OSError):
            partial.unlink()
        raise
    sync_directory(path.parent)


def remove_durably(path: Path) -> None:
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
