"""Work inside a network namespace."""

import ctypes
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

OWN = Path("/proc/self/ns/net")
"""The namespace of this process, which is the host's: the plugin runs with hostNetwork."""
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def inside(netns: Path, work: Callable[[], T]) -> T:
    """Call `work` in a thread that is in `netns` and ends with it, so that no other work is ever misled.

    Raises `OSError` where the namespace cannot be entered, and what `work` raises.
    """
    done: list[T] = []
    failed: list[BaseException] = []

    def enter() -> None:
        try:
            _enter(netns)
            done.append(work())
        except BaseException as error:
            # Whatever it is, it is the caller's.
            failed.append(error)

    thread = threading.Thread(target=enter, name="netns", daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


def identity(netns: Path) -> int | None:
    """A number of the namespace that no other living one has; None where there is none."""
    with suppress(OSError):
        return netns.stat().st_ino
    return None


def _enter(netns: Path) -> None:
    handle = os.open(netns, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.setns(handle, _CLONE_NEWNET):
            code = ctypes.get_errno()
            raise OSError(code, f"cannot enter network namespace {netns}: {os.strerror(code)}")
    finally:
        os.close(handle)
