"""One life of one process, which may be stopped for a while, or end at any moment without a last word."""

import asyncio
import contextvars
from collections.abc import Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from rackloom.twin.virtual.event_loop import SimLoop

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
        self.is_stopped = False
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Do `work` as this process."""
        with _as(self):
            task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def kill(self) -> None:
        """From here on nothing that it does has an effect. A stopped process dies of this too."""
        self.is_alive = False
        self.go_on()
        for task in self._tasks:
            task.cancel()

    def stop(self) -> None:
        """SIGSTOP: it keeps its memory and its connections, and does nothing; its timers fire late.

        What runs of it at this moment goes on to its next pause: a request that it was about to send is sent
        only when it goes on.
        """
        self.is_stopped = True
        _loop().stop_whom(_is_stopped)

    def go_on(self) -> None:
        """SIGCONT; nothing where it runs."""
        if self.is_stopped:
            self.is_stopped = False
            _loop().go_on()

    def check(self) -> None:
        """Raise `Killed` once it is dead."""
        if not self.is_alive:
            raise Killed(self.name)


def current() -> Life | None:
    """The process whose code runs now."""
    return _CURRENT.get()


def _loop() -> SimLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop), "only in a simulation can a process be stopped"  # noqa: S101
    return loop


def _is_stopped(context: contextvars.Context) -> bool:
    life = context.get(_CURRENT)
    return life is not None and life.is_stopped


def _called(task: "asyncio.Task[Any]") -> str:
    return str(getattr(task.get_coro(), "__qualname__", task.get_name()))


class Tasks:
    """The tasks of all processes, and of their tasks. `make` is a task factory of the event loop."""

    def __init__(self) -> None:
        self._of: dict[Life, set[asyncio.Task[Any]]] = {}

    def make(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Coroutine[Any, Any, T] | Generator[Any, None, T],
        context: contextvars.Context | None = None,
    ) -> "asyncio.Task[T]":
        """A task of the process whose code makes it."""
        task = asyncio.Task(work, loop=loop, context=context)
        life = current()
        if life is not None:
            mine = self._of.setdefault(life, set())
            mine.add(task)
            task.add_done_callback(mine.discard)
        return task

    def of_the_dead(self) -> Iterator[str]:
        """What processes still do that have ended, named."""
        for life, tasks in self._of.items():
            if not life.is_alive:
                for task in tasks:
                    yield f"{life.name} has ended, and {_called(task)} goes on"


@contextmanager
def _as(life: Life) -> Iterator[None]:
    token = _CURRENT.set(life)
    try:
        yield
    finally:
        _CURRENT.reset(token)
