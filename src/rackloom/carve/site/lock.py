"""One process per home directory: two writers with their own reconcilers would fight over the fabric."""

import fcntl
import os
from pathlib import Path

from rackloom.errors import Refused


class HomeLock:
    """An exclusive lock on a home directory, held until `release` or the end of the process.

    The kernel drops an flock with its process, so a lock file left by a crash never blocks a restart.
    """

    def __init__(self, home: Path) -> None:
        """Take the lock. Raises Refused naming the process that has it."""
        home.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(home / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            raise Refused(
                f"{home} is in use by process {holder}",
                nearest_fix="stop that process, or choose another home directory",
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let the next process in."""
        os.close(self._fd)
