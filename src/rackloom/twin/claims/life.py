"""One life of one process, which may end at any moment without a last word."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")
_CURRENT: ContextVar["Life | None"] = ContextVar("life", default=None)


class Killed(asyncio.CancelledError):
    """Raised into what still runs of a dead process, wherever it would touch the world."""


class Life:
    """A process: its tasks, and whether it is alive. `tray` is the node it runs on; "" for none of them."""

    def __init__(self, name: str, tray: str = "") -> None:
        self.name = name
        self.tray = tray
        self.is_alive = True
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Do `work` as this process."""
        with _as(self):
            task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def kill(self) -> None:
        """From here on nothing that it does has an effect."""
        self.is_alive = False
        for task in self._tasks:
            task.cancel()

    def check(self) -> None:
        """Raise `Killed` once it is dead."""
        if not self.is_alive:
            raise Killed(self.name)


def current() -> Life | None:
    """The process whose code runs now."""
    return _CURRENT.get()


@contextmanager
def _as(life: Life) -> Iterator[None]:
    token = _CURRENT.set(life)
    try:
        yield
    finally:
        _CURRENT.reset(token)
