"""The process model: start, kill, stop and resume, restart, and the points at which a process may die.

A `Process` owns asyncio tasks. `kill` cancels them, and `check` raises `Killed` wherever dead code
would still touch the world, so nothing that a dead process does has an effect. `stop` and `resume` are
SIGSTOP and SIGCONT: a stopped process keeps its memory and connections, and its timers fire late. The
current process travels in a context variable.

`RestartedProcess` starts the process again whenever it ends, as kubelet restarts a container. On
cancellation it signals the process to end and kills it after the termination grace period.

A crash point is a moment at which a death can leave the world half changed: before and after a write to
the database, to the API server or to a switch, and at every fsync. `Process.checkpoint` counts the crash
points of one process, and kills it at the number `fuse` or stops it at `stop_fuse`. `CrashPoints` counts
those of a whole cluster (`with_crash_points` wraps a `KubeApi`), and a test plays the same story once per
crash point. Reads and lease renewals are not counted, because their number depends only on how long a story
takes.
"""

import asyncio
import contextvars
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar, cast

from rackloom.claim.kube.api import KubeApi
from rackloom.core.cluster.objects import LEASE
from rackloom.lab.kube.faults import RequestFault
from rackloom.lab.virtual.event_loop import SimLoop

T = TypeVar("T")
_CURRENT: ContextVar["Process | None"] = ContextVar("life", default=None)


class Killed(asyncio.CancelledError):
    """Raised in a dead process wherever code that still runs would touch the world."""


class Process:
    """A process: its tasks, and whether it is alive. `tray` is its node, or "" if it runs on none."""

    def __init__(self, name: str, tray: str = "") -> None:
        self.name = name
        self.tray = tray
        self.is_alive = True
        self.ended_at: float | None = None
        """Loop time of its death."""
        self.is_stopped = False
        self.points = 0
        """Crash points that it has passed."""
        self.fuse: int | None = None
        """The number of the crash point at which it is killed."""
        self.stop_fuse: int | None = None
        """The number of the crash point at which `stopper` is called."""
        self.stops_after_record = False
        """Whether `stopper` is called when it has recorded its next operation, before it requests that."""
        self.stopper: Callable[[], None] = lambda: None
        self.failed_writes: list[float] = []
        """Loop times at which the records refused one of its writes."""
        self._stops: list[tuple[float, float]] = []
        """(stop, resume) times. The second is infinite while it is stopped."""
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Do `work` as this process."""
        with _as_process(self):
            task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not self.is_alive and not task.cancelled():
            task.exception()  # marks the exception as retrieved: a dead process has no effect

    def kill(self) -> None:
        """From here on nothing that it does has an effect. A stopped process dies of this too."""
        if self.is_alive:
            self.ended_at = asyncio.get_running_loop().time()
        self.is_alive = False
        self.resume()
        for task in self._tasks:
            task.cancel()

    async def wait_ended(self) -> None:
        """Wait until none of its tasks runs."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def stop(self) -> None:
        """SIGSTOP: it keeps its memory and its connections, and does nothing. Its timers fire late.

        Code that runs at this moment goes on to its next pause: a request that it was about to send is sent
        only when it goes on.
        """
        if not self.is_stopped:
            self.is_stopped = True
            self._stops.append((_simulation_loop().time(), math.inf))
            _simulation_loop().stop_whom(_is_stopped)

    def resume(self) -> None:
        """SIGCONT. Does nothing if it runs."""
        if self.is_stopped:
            self.is_stopped = False
            self._stops[-1] = (self._stops[-1][0], _simulation_loop().time())
            _simulation_loop().resume()

    def running_seconds(self, since: float, until: float) -> float:
        """How long of this time it was not stopped."""
        stopped = (min(ended, until) - max(began, since) for began, ended in self._stops)
        return until - since - sum(seconds for seconds in stopped if seconds > 0)

    @property
    def reached_fuse(self) -> bool:
        """Whether it has come to the crash point of its fuse."""
        return self.fuse is not None and self.points >= self.fuse

    def check(self) -> None:
        """Raise `Killed` once it is dead."""
        if not self.is_alive:
            raise Killed(self.name)

    def checkpoint(self) -> None:
        """A crash point: the process is killed here if it is the number `fuse`. Raises `Killed` if dead."""
        self.points += 1
        if self.points == self.fuse:
            self.kill()
        elif self.points == self.stop_fuse:
            self.stopper()
        self.check()


def current_process() -> Process | None:
    """The process that runs the current code."""
    return _CURRENT.get()


def _simulation_loop() -> SimLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop), "only in a simulation can a process be stopped"  # noqa: S101
    return loop


def _is_stopped(context: contextvars.Context) -> bool:
    life = context.get(_CURRENT)
    return life is not None and life.is_stopped


@contextmanager
def _as_process(life: Process) -> Iterator[None]:
    token = _CURRENT.set(life)
    try:
        yield
    finally:
        _CURRENT.reset(token)


# Restart: one process after another under one name, as kubelet restarts a container.


TERMINATION_GRACE = 30.0
"""Seconds that a process has to end before it is killed (terminationGracePeriodSeconds)."""
ServeProcess = Callable[[Process], Coroutine[Any, Any, None]]


class RestartedProcess:
    """One process after the other under one name. `life` is the newest.

    `may_fail` are the errors with which it may end. It is then started again after `restart_s` seconds. Any
    other error is added to `defects`.
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
        self.ended = 0
        """Processes that have ended so far."""
        self._serve = serve
        self._defects = defects
        self.restart_s = restart_s
        self._may_fail = may_fail

    async def run(self) -> None:
        """Keep it running until cancelled. It then has the grace period to end."""
        while True:
            # A new process has its own memory: `serve` reads the records of the last one.
            task = self.life.spawn(self._serve(self.life))
            try:
                await asyncio.wait({task})
            finally:
                task.cancel()
                await asyncio.wait({task}, timeout=TERMINATION_GRACE)
                if not task.done():
                    # It ignored SIGTERM for the whole grace period.
                    self.life.kill()
                    await asyncio.wait({task})
            error = None if task.cancelled() else task.exception()
            if self.life.is_alive and error is not None and not self._is_allowed(error):
                self._report(error)
            self.life.kill()
            self.ended += 1
            await asyncio.sleep(self.restart_s)
            self.life = Process(self.life.name, self.life.tray)

    def _report(self, error: BaseException) -> None:
        self._defects.append(f"{self.life.name} ended: {error!r}")

    def _is_allowed(self, error: BaseException) -> bool:
        if isinstance(error, BaseExceptionGroup):
            return all(self._is_allowed(exception) for exception in error.exceptions)
        return isinstance(error, self._may_fail)


# Crash points: where a death can leave the world half changed.


_READS = ("get", "list")


class CrashPoints:
    """Counts crash points. `strike(step number, tray)` is called at each, and may kill any process.

    `server_is_down` is set while the server answers no request.
    """

    def __init__(self, strike: Callable[[int, str], None] = lambda step, tray: None) -> None:
        self._strike = strike
        self.taken = 0
        self.server_is_down = False

    def take(self, tray: str) -> None:
        """Count a step on a tray, or on the controller's machine if `tray` is ""."""
        self.taken += 1
        # The number identifies the step in every run of the same story: a failure is replayed by it.
        self._strike(self.taken, tray)

    def take_as(self, life: Process) -> None:
        """A step of a process, which may be its last. Raises `Killed`."""
        life.check()
        self.take(life.tray)
        life.checkpoint()


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
        return method if name == "watch" else partial(self._call, method, is_read=name in _READS)

    async def _call(
        self, method: Callable[..., Awaitable[Any]], *args: Any, is_read: bool, **kwargs: Any
    ) -> Any:
        # A lease renewal is no crash point: their number depends only on how long a story takes.
        is_point = not is_read and LEASE not in args
        take = partial(self._steps.take_as, self._life) if is_point else self._life.check
        take()
        answer = await method(*args, **kwargs)
        take()
        if self._steps.server_is_down and not is_read:
            raise RequestFault(lost="reply").error()
        return answer
