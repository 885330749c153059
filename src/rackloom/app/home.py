"""The directory an embedded site lives in: store, keys, logs, and what the twin's switches remember."""

import os
from pathlib import Path

import msgspec

from rackloom.errors import Refused


class Home(msgspec.Struct, frozen=True):
    """Paths below one home directory. Everything in it is readable by its owner only."""

    path: Path

    @property
    def keys(self) -> Path:
        """Private key of the local token issuer."""
        return self.path / "keys"

    @property
    def log(self) -> Path:
        """JSON lines."""
        return self.path / "logs" / "rackloom.log"

    @property
    def twin(self) -> Path:
        """What the simulated switch controllers keep over a restart."""
        return self.path / "twin"

    def create(self) -> None:
        """Make the directories that are missing. What is written from now on is its owner's alone."""
        os.umask(0o077)
        try:
            for directory in (self.path, self.keys, self.log.parent, self.twin):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise Refused(
                f"cannot make the directory {error.filename}: {error.strerror}",
                nearest_fix="give another one with --home",
            ) from error


def default_home() -> Path:
    """`rackloom` under the XDG data directory."""
    data = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(data) / "rackloom"


def write_durably(path: Path, content: bytes) -> None:
    """Replace a file so that a crash leaves either the old content or the new one, on disk."""
    partial = path.with_suffix(path.suffix + ".partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
