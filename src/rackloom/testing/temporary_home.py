"""The home of a site that was given none: it is removed at the end, or by the next site after a kill.

Its owner holds a lock on a file in it, which the kernel frees when the owner ends, in any way. A home
with a file that no process holds was left behind.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "rackloom-test-"
LOCK = ".owner"


@contextmanager
def temporary_home() -> Iterator[Path]:
    """An empty directory, which is gone afterwards. Those that killed processes left are removed first."""
    remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as directory:
        home = Path(directory).resolve()
        unlocked = home / f"{LOCK}-new"
        with unlocked.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # The file gets its name only once it is held: before that, the home must not look abandoned.
            unlocked.rename(home / LOCK)
            yield home


def remove_abandoned(parent: Path) -> None:
    """Remove the temporary homes of this user below `parent` whose owners have ended."""
    for lock in parent.glob(f"{PREFIX}*/{LOCK}"):
        with suppress(OSError):
            if lock.stat().st_uid != os.getuid():
                continue
            with lock.open() as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
