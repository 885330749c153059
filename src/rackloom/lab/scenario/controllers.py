"""Rackloom's controllers in the twin as processes: killed, restarted, doubled, elected, and cut off.

`ControllerProcess` is a `RestartedProcess` (lab.virtual.process): it can be killed at once, or at its
n-th crash point from now. The next life has only the state of the API server. `double` starts a second
set of controllers that also believe that they lead.

`ControllerReplicas` are two replicas under a real Lease election. It records every moment at which the
controllers of two replicas were at work together (`overlaps`), even if a replica does not believe that it
leads. There must be none.

`ApiLink` is the connection of one replica to the API server. While it is cut, requests fail after the
client's timeout, in either direction (the write may have been carried out), and watches are silent.

`ControllersClock` skews the wall clock of the controllers alone.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, cast

import msgspec

from rackloom.claim.kube.api import KubeApi, WatchEvent
from rackloom.claim.kube.leader import LeaderElection
from rackloom.core.domains.settings import DEFAULT_NAMESPACE
from rackloom.lab.kube.faults import RequestFault
from rackloom.lab.virtual.process import CrashPoints, Process, RestartedProcess, with_crash_points

CONTROLLER_LEASE = "rackloom-controller"
"""The Lease of the controllers, and their name as a user of the API server."""

# Clock and randomness.


class ClockAndRandom(msgspec.Struct, frozen=True):
    """The clock and the random generator of one run of a cluster."""

    wall: Callable[[], float]
    """Seconds since the epoch."""
    rng: random.Random


def real_clock_and_random() -> ClockAndRandom:
    """The machine's clock, and a generator without a fixed seed."""
    return ClockAndRandom(time.time, random.Random())  # noqa: S311 (jitter)


class ControllersClock:
    """The wall clock of the controllers' machine, which is `skew` seconds ahead."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self.skew = 0.0
        self._wall = wall

    def __call__(self) -> float:
        """Seconds since the epoch."""
        return self._wall() + self.skew


# The connection to the API server.


CLIENT_TIMEOUT = 5.0
"""Seconds after which a client stops waiting for an answer."""


class ApiLink:
    """The connection of one replica, used through `api`. While it is cut nothing arrives either way."""

    def __init__(self, api: KubeApi) -> None:
        self.api = cast(KubeApi, _LinkedApi(api, self))
        self._whole = asyncio.Event()
        self._whole.set()

    def cut(self) -> None:
        """From now on requests are not answered, and watches are silent."""
        self._whole.clear()

    def mend(self) -> None:
        """Requests and events arrive again."""
        self._whole.set()

    async def cross(self) -> None:
        """Pass one way of a request. Raises `KubeError` after the client's timeout where the link is cut."""
        if not self._whole.is_set():
            await asyncio.sleep(CLIENT_TIMEOUT)
            raise RequestFault().error()

    async def hear(self) -> None:
        """Pass one event. One that met a cut link is lost: raises `KubeError` once the link is mended."""
        if not self._whole.is_set():
            await self._whole.wait()
            raise RequestFault().error()


class _LinkedApi:
    def __init__(self, api: KubeApi, link: ApiLink) -> None:
        self._api = api
        self._link = link

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._api, name)
        return self._watched(method) if name == "watch" else self._asked(method)

    def _asked(self, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            await self._link.cross()
            answer = await method(*args, **kwargs)
            # The link may be cut during the call: then the write was carried out, and the client cannot know.
            await self._link.cross()
            return answer

        return call

    def _watched(
        self, method: Callable[..., AsyncGenerator[WatchEvent, None]]
    ) -> Callable[..., AsyncGenerator[WatchEvent, None]]:
        async def follow(*args: Any, **kwargs: Any) -> AsyncGenerator[WatchEvent, None]:
            await self._link.cross()
            async with aclosing(method(*args, **kwargs)) as events:
                async for event in events:
                    await self._link.hear()
                    yield event

        return follow


# One process.


ControllerTerm = Callable[[KubeApi], Coroutine[Any, Any, None]]
"""Runs the controllers until it is cancelled."""
RESTART_SECONDS = 1.0


class ControllerProcess(RestartedProcess):
    """The controllers as a process that starts again whenever it is killed. `api` is their API client."""

    def __init__(self, lead: ControllerTerm, api: KubeApi) -> None:
        super().__init__(Process("controllers"), self._serve_controllers, RESTART_SECONDS, [])
        self._lead = lead
        self._api = api
        self._point = self._lives = 0
        self._second: asyncio.Task[None] | None = None
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Run until cancelled. Raises the error with which the controllers fail."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            await super().run()

    async def kill(self, down: float) -> None:
        """End the process now. The next one starts `down` seconds later, without its memory."""
        self.restart_s = down
        self.life.kill()
        await self.life.wait_ended()

    def die(self, point: int, lives: int) -> None:
        """Let this life, and those after it, end at their `point`-th step from here: `lives` in all.

        Steps are counted before each write is sent, and after it was carried out.
        """
        self._point, self._lives, self.restart_s = point, lives, RESTART_SECONDS
        self.life.fuse = self.life.points + point

    def double(self) -> None:
        """Start a second set of controllers that also believe that they lead."""
        if self._tasks is not None and self._second is None:
            self._second = self._tasks.create_task(ControllerProcess(self._lead, self._api).run())

    async def single(self) -> None:
        """End the second set."""
        if self._second is not None:
            self._second.cancel()
            await asyncio.wait({self._second})
            self._second = None

    async def _serve_controllers(self, life: Process) -> None:
        if self._lives:
            # Each life counts its steps from its own start.
            life.fuse = life.points + self._point
        try:
            await self._lead(with_crash_points(self._api, life, CrashPoints()))
            raise RuntimeError("the controllers ended without an error")
        finally:
            self._lives -= bool(self._lives and life.reached_fuse)

    def _report(self, error: BaseException) -> None:
        # It failed without being killed: that is a defect, and no part of the scenario.
        raise error


# Elected replicas.


class ControllerReplica:
    """One replica. Each of its lives stands for election under a new identity."""

    def __init__(
        self,
        name: str,
        lead: ControllerTerm,
        api: KubeApi,
        chance: ClockAndRandom,
        board: "ControllerReplicas",
    ) -> None:
        self.identity = ""
        """The identity of its newest life, as the Lease would name it."""
        self.link = ApiLink(api)
        self.controllers = ControllerProcess(self._stand, self.link.api)
        self._name = name
        self._lead = lead
        self._chance = chance
        self._board = board
        self._election: LeaderElection | None = None

    @property
    def leads(self) -> bool:
        """Whether it leads according to its election."""
        return self._election is not None and self._election.is_leader

    async def _stand(self, api: KubeApi) -> None:
        wall, rng = self._chance.wall, self._chance.rng
        self.identity = f"{self._name}-{self.controllers.ended + 1}"
        self._election = LeaderElection(
            api, DEFAULT_NAMESPACE, CONTROLLER_LEASE, self.identity, wall=wall, rng=rng
        )
        await self._election.run(lambda: self._elected(api))

    async def _elected(self, api: KubeApi) -> None:
        with self._board.term(self.identity):
            await self._lead(api)


class ControllerReplicas:
    """Two replicas under one Lease, and the faults of the one that leads."""

    def __init__(self, lead: ControllerTerm, api: KubeApi, chance: ClockAndRandom) -> None:
        self.overlaps: list[str] = []
        """Terms that began before another had ended, in words. There must be none."""
        self._at_work: list[str] = []
        """Identities with controllers that run, even if they lost their election."""
        self._all = tuple(ControllerReplica(f"replica-{name}", lead, api, chance, self) for name in "ab")

    @property
    def first(self) -> ControllerProcess:
        """The processes of the first replica."""
        return self._all[0].controllers

    @property
    def leader(self) -> str | None:
        """The leader's name in the Lease, or None if there is no leader."""
        return next((replica.identity for replica in self._all if replica.leads), None)

    async def run(self) -> None:
        """Stand for election until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for replica in self._all:
                tasks.create_task(replica.controllers.run())

    async def kill_leader(self, down: float) -> str | None:
        """Kill the leader, which keeps the Lease and stands again after `down` s. None if nothing leads."""
        leader = self._leading()
        if leader is not None:
            await leader.controllers.kill(down)
        return None if leader is None else leader.identity

    def cut_off_leader(self) -> str | None:
        """The leader no longer reaches the API server. None if there is no leader."""
        leader = self._leading()
        if leader is not None:
            leader.link.cut()
        return None if leader is None else leader.identity

    def connect(self) -> None:
        """Mend all links."""
        for replica in self._all:
            replica.link.mend()

    @contextmanager
    def term(self, identity: str) -> Iterator[None]:
        """Record that its controllers are at work. Two at once are an overlap."""
        self._at_work.append(identity)
        if len(self._at_work) > 1:
            self.overlaps.append(f"{' and '.join(self._at_work)} led at once")
        try:
            yield
        finally:
            self._at_work.remove(identity)

    def _leading(self) -> ControllerReplica | None:
        return next((replica for replica in self._all if replica.leads), None)
