"""The process model: start, kill, stop and resume, restart, and the points at which a process may die.

A `Process` owns asyncio tasks. `kill` cancels them, and `check` raises `Killed` wherever dead code
would still touch the world, so nothing that a dead process does has an effect. `stop` and `go_on` are
SIGSTOP and SIGCONT: a stopped process keeps its memory and connections, and its timers fire late. The
current process travels in a context variable; `ProcessTasks` is a task factory that finds tasks which
outlive their process.

`RestartedProcess` starts the process again whenever it ends, as kubelet restarts a container. On
cancellation it asks the process to end and kills it after the termination grace period.

`CrashPoints` counts the moments at which a death can matter: before and after every write to the API
server (`with_crash_points` wraps a `KubeApi`) and at every fsync. A test plays the same story once per
crash point. Reads and lease renewals are not counted, because their number depends only on how long a
story takes.

`ServiceProcess` is the same model for the site service: `fuse` is the number of the crash point (a
database write or a call to a controller) at which it is killed.
"""

import asyncio
import contextvars
import os
import random
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar, cast
from unittest.mock import patch

from rackloom.claim.kube.api import KubeApi
from rackloom.core.kubernetes.objects import LEASE
from rackloom.lab.kube.faults import RequestFault
from rackloom.lab.virtual.event_loop import SimLoop

T = TypeVar("T")
_CURRENT: ContextVar["Process | None"] = ContextVar("life", default=None)


class Killed(asyncio.CancelledError):
    """Raised into what still runs of a dead process, wherever it would touch the world."""


class Process:
    """A process: its tasks, and whether it is alive. `tray` is the node it runs on; "" for none of them."""

    def __init__(self, name: str, tray: str = "") -> None:
        self.name = name
        self.tray = tray
        self.is_alive = True
        self.is_stopped = False
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Do `work` as this process."""
        with _as_process(self):
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
        _simulation_loop().stop_whom(_is_stopped)

    def go_on(self) -> None:
        """SIGCONT; nothing where it runs."""
        if self.is_stopped:
            self.is_stopped = False
            _simulation_loop().go_on()

    def check(self) -> None:
        """Raise `Killed` once it is dead."""
        if not self.is_alive:
            raise Killed(self.name)


def current_process() -> Process | None:
    """The process whose code runs now."""
    return _CURRENT.get()


def _simulation_loop() -> SimLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop), "only in a simulation can a process be stopped"  # noqa: S101
    return loop


def _is_stopped(context: contextvars.Context) -> bool:
    life = context.get(_CURRENT)
    return life is not None and life.is_stopped


def _task_name(task: "asyncio.Task[Any]") -> str:
    return str(getattr(task.get_coro(), "__qualname__", task.get_name()))


class ProcessTasks:
    """The tasks of all processes, and of their tasks. `make` is a task factory of the event loop."""

    def __init__(self) -> None:
        self._of: dict[Process, set[asyncio.Task[Any]]] = {}

    def make(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Coroutine[Any, Any, T] | Generator[Any, None, T],
        context: contextvars.Context | None = None,
    ) -> "asyncio.Task[T]":
        """A task of the process whose code makes it."""
        task = asyncio.Task(work, loop=loop, context=context)
        life = current_process()
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
                    yield f"{life.name} has ended, and {_task_name(task)} goes on"


@contextmanager
def _as_process(life: Process) -> Iterator[None]:
    token = _CURRENT.set(life)
    try:
        yield
    finally:
        _CURRENT.reset(token)


# Restart: one process after another under one name, as kubelet restarts a container.


TERMINATION_GRACE = 30.0
"""Seconds until a process that does not end when it is asked to is killed (terminationGracePeriodSeconds)."""
ServeProcess = Callable[[Process], Coroutine[Any, Any, None]]


class RestartedProcess:
    """One process after the other under one name. `life` is the newest.

    `may_fail` are the errors with which it may end by itself, to be started again after `restart_s` seconds;
    any other is told to `defects`.
    """

    def __init__(
        self,
        life: Process,
        serve: ServeProcess,
        restart_s: float,
        defects: list[str],
        may_fail: tuple[type[Exception], ...] = (),
    ) -> None:
        self.life = life
        self._serve = serve
        self._defects = defects
        self._restart_s = restart_s
        self._may_fail = may_fail

    async def run(self) -> None:
        """Keep it until cancelled, which lets it take leave."""
        while True:
            task = self.life.spawn(self._serve(self.life))
            try:
                await asyncio.wait({task})
            finally:
                task.cancel()
                await asyncio.wait({task}, timeout=TERMINATION_GRACE)
                if not task.done():
                    self.life.kill()
                    await asyncio.wait({task})
            self._judge(task)
            self.life.kill()
            await asyncio.sleep(self._restart_s)
            self.life = Process(self.life.name, self.life.tray)

    def _judge(self, task: "asyncio.Task[None]") -> None:
        failed = None if task.cancelled() else task.exception()
        if self.life.is_alive and failed is not None and not self._is_allowed(failed):
            self._defects.append(f"{self.life.name} ended: {failed!r}")

    def _is_allowed(self, failed: BaseException) -> bool:
        if isinstance(failed, BaseExceptionGroup):
            return all(self._is_allowed(exception) for exception in failed.exceptions)
        return isinstance(failed, self._may_fail)


# Crash points: where a death can leave the world half changed.


_READS = ("get", "list")


class CrashPoints:
    """Counts. `strike(step number, tray)` is called at each; it may kill whatever it likes.

    `server_is_down` is set while requests are answered by nobody.
    """

    def __init__(self, strike: Callable[[int, str], None]) -> None:
        self._strike = strike
        self.taken = 0
        self.server_is_down = False

    def take(self, tray: str) -> None:
        """A step on a tray; "" is where the controller runs."""
        self.taken += 1
        self._strike(self.taken, tray)

    def take_as(self, life: Process) -> None:
        """A step of a process, which may be its last. Raises `Killed`."""
        life.check()
        self.take(life.tray)
        life.check()

    @contextmanager
    def of_files(self) -> Iterator[None]:
        """Take a step wherever a process makes something durable; the sync itself is left out."""

        def synced(_handle: int) -> None:
            life = current_process()
            if life is not None:
                self.take_as(life)

        with patch.object(os, "fsync", synced):
            yield


def with_crash_points(api: KubeApi, life: Process, steps: CrashPoints) -> KubeApi:
    """`api` as `life` has it: every write is a step before it is sent and one after it was carried out."""
    return cast(KubeApi, _CrashPointApi(api, life, steps))


class _CrashPointApi:
    def __init__(self, api: KubeApi, life: Process, steps: CrashPoints) -> None:
        self._api = api
        self._life = life
        self._steps = steps

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._api, name)
        if name == "watch":
            return method
        return self._read(method) if name in _READS else self._written(method)

    def _read(self, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            self._life.check()
            answer = await method(*args, **kwargs)
            self._life.check()
            return answer

        return call

    def _written(self, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            # The heartbeat of a leader is no step: how many there are says only how long a story is.
            take = self._life.check if LEASE in args else partial(self._steps.take_as, self._life)
            take()
            answer = await method(*args, **kwargs)
            take()
            if self._steps.server_is_down:
                raise RequestFault(lost="reply").error()
            return answer

        return call


# The processes of the site service. A fuse kills one at a numbered crash point.


class ServiceProcessKilled(BaseException):
    """The process is gone: nothing after this line happens."""


class ServiceProcess:
    """One process, from its start to its end. `fuse` is the number of the point at which it is killed."""

    def __init__(self, rng: random.Random, fuse: int | None) -> None:
        self.alive = True
        self.ended_at: float | None = None
        self.ended = asyncio.Event()
        self.points = 0
        self.fuse = fuse
        self.rng = rng
        self.tasks: list[asyncio.Task[Any]] = []

    def spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Run something that ends with the process."""
        task = asyncio.create_task(work)
        self.tasks.append(task)
        return task

    def checkpoint(self) -> None:
        """A point at which the process may be killed; a dead process gets no further."""
        self.points += 1
        if self.points == self.fuse:
            self.kill()
        if not self.alive:
            raise ServiceProcessKilled

    def kill(self) -> None:
        """End the process where it stands."""
        if self.alive:
            self.ended_at = asyncio.get_running_loop().time()
        self.alive = False
        self.ended.set()

    async def bury(self) -> None:
        """Take away what is left of it."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
