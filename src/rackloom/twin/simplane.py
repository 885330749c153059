"""The service under simulation: one process that lives, is killed, and lives again on the same records.

Everything from the REST application to the NMX-C driver is production code. The parts around it are ours:
the clock, the wire, and a store that can be the last thing a process does.
"""

import asyncio
import random
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa

from rackloom.carve.api.app import ApiDeps
from rackloom.carve.fabric.nmxc.driver import NmxcDriver
from rackloom.carve.fabric.ports import FabricUnavailable
from rackloom.carve.plan.values import Observation, Operation
from rackloom.carve.reconcile.clock import SteadyClock, newest_moment
from rackloom.carve.reconcile.loop import Reconciler
from rackloom.carve.site.fabric_book import Endpoint
from rackloom.carve.site.store import Store
from rackloom.carve.site.store.backend import Backend
from rackloom.twin.simworld import SimRack, SimWorld

T = TypeVar("T")

EPOCH = 1_800_000_000.0
"""Wall clock at virtual time 0."""

NOBODY_THERE = 0.1
"""Seconds until a client learns that nobody listens."""


class Killed(BaseException):
    """The process is gone: nothing after this line happens."""


class Life:
    """One process, from its start to its end. `fuse` is the number of the point at which it is killed."""

    def __init__(self, rng: random.Random, fuse: int | None) -> None:
        self.alive = True
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
            raise Killed

    def kill(self) -> None:
        """End the process where it stands."""
        self.alive = False
        self.ended.set()

    async def bury(self) -> None:
        """Take away what is left of it."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


class MortalBackend:
    """The records as one process reaches them: other tasks run meanwhile, and the process may end there."""

    is_shared = False

    def __init__(self, records: Backend, life: Life) -> None:
        self._records = records
        self._life = life

    async def transact(self, work: Callable[[sa.Connection], T], *, write: bool) -> T:
        """As the real one, with a point of death on both sides of every write."""
        await self._elsewhere()
        self._die_here(write)
        result = await self._records.transact(work, write=write)
        self._die_here(write)
        await self._elsewhere()
        return result

    def changes(self) -> AsyncGenerator[str | None, None]:
        """Nobody else writes."""
        return self._records.changes()

    async def close(self) -> None:
        """The records outlive the process."""

    def _die_here(self, write: bool) -> None:
        if write:
            self._life.checkpoint()
        elif not self._life.alive:
            raise Killed

    async def _elsewhere(self) -> None:
        for _ in range(self._life.rng.randrange(3)):
            await asyncio.sleep(0)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt to read or to change a domain ended, as far as something is known by it."""

    observation: Observation | None
    """None: it failed, and what is there is unknown."""
    begun: float
    ended: float


class WatchedDriver:
    """The driver, with its readings noted for those who judge the plane."""

    def __init__(self, driver: NmxcDriver, world: SimWorld, outcomes: list[Outcome]) -> None:
        self._driver = driver
        self._world = world
        self._outcomes = outcomes

    async def observe(self) -> Observation:
        """Read, and note what came of it."""
        begun = _now()
        try:
            observation = await self._driver.observe()
        except FabricUnavailable:
            self._outcomes.append(Outcome(observation=None, begun=begun, ended=_now()))
            raise
        self._outcomes.append(Outcome(observation=observation, begun=begun, ended=_now()))
        return observation

    async def execute(self, operation: Operation) -> int:
        """Carry out, and note what a new partition is for, or that the outcome is unknown."""
        self._world.asked(operation)
        begun = _now()
        try:
            return await self._driver.execute(operation)
        except FabricUnavailable:
            self._outcomes.append(Outcome(observation=None, begun=begun, ended=_now()))
            raise

    def notifications(self) -> AsyncIterator[None]:
        """As they come."""
        return self._driver.notifications()

    async def close(self) -> None:
        """Close."""
        await self._driver.close()


class SimPlane:
    """The service, the records that outlive it, and the clock that it believes."""

    def __init__(
        self, world: SimWorld, app: Any, records: Backend, rng: random.Random, interval: float
    ) -> None:
        self.world = world
        self.app = app
        self.interval = interval
        self.skew = 0.0
        self.outcomes: dict[str, list[Outcome]] = {rack.url: [] for rack in world.racks}
        self.is_open = asyncio.Event()
        self.life: Life | None = None
        self.lives = 0
        self.points = 0
        """Points of death that all lives so far have passed."""
        self.next_fuse: int | None = None
        self.downtime = 5.0
        self.life_began = 0.0
        self.longest_silence = 2 * interval + 120.0
        """Seconds. A claim that rests on an older reading is a claim about the past: two timers, and the
        longest that a pass over a slow controller takes."""
        self._records = records
        self._rng = rng

    def wall(self) -> float:
        """What the machine believes the time is."""
        return EPOCH + _now() + self.skew

    def ids(self) -> str:
        """A new uuid."""
        return str(uuid.UUID(int=self._rng.getrandbits(128), version=4))

    def tell_now(self) -> float:
        """Virtual seconds."""
        return _now()

    async def serve(self) -> None:
        """Keep a process running until cancelled."""
        while True:
            life = Life(random.Random(self._rng.getrandbits(64)), self.next_fuse)  # noqa: S311
            self.life, self.next_fuse, self.lives = life, None, self.lives + 1
            self.life_began = _now()
            try:
                await self._open(life)
                await life.ended.wait()
            except Killed:
                life.kill()
            finally:
                self.is_open.clear()
                life.kill()
                await life.bury()
                self.points += life.points
            await asyncio.sleep(self.downtime)

    async def call(self, method: str, path: str, token: str, body: bytes | None) -> tuple[int, bytes] | None:
        """A request as a client sees it; None when the connection was lost before the answer."""
        await self.is_open.wait()
        life = self.life
        if life is None or not life.alive:
            await asyncio.sleep(NOBODY_THERE)
            return None
        asking = life.spawn(_asgi(self.app, method, path, token, body))
        await asyncio.wait({asking})
        life.tasks.remove(asking)
        if not life.alive or asking.cancelled() or isinstance(asking.exception(), Killed):
            return None
        return asking.result()

    def outcomes_of(self, rack: SimRack) -> list[Outcome]:
        """Every attempt to read a rack, oldest first."""
        return self.outcomes[rack.url]

    async def _open(self, life: Life) -> None:
        store = Store(MortalBackend(self._records, life))
        clock = SteadyClock(self.wall, _now, await store.read(newest_moment))
        reconciler = Reconciler(
            store, lambda endpoint: self._driver(life, clock, endpoint), clock, self.interval
        )
        deps = ApiDeps(
            store=store,
            clock=clock,
            ids=self.ids,
            wake=reconciler.wake,
            verifier=self.app.state.deps.verifier,
            auto_tenant=True,
        )
        self.app.state.deps = deps
        self.app.state.tenants_seen.clear()
        life.spawn(reconciler.run())
        asked, ended = life.spawn(reconciler.first_passes()), life.spawn(life.ended.wait())
        await asyncio.wait({asked, ended}, return_when=asyncio.FIRST_COMPLETED)
        if life.alive:
            self.is_open.set()

    def _driver(self, life: Life, clock: Callable[[], float], endpoint: Endpoint) -> WatchedDriver:
        rack = self.world.rack_at(endpoint.url)
        channel: Any = rack.switch.connect(life.checkpoint)
        driver = NmxcDriver(endpoint.url, clock=clock, connect=lambda _url, _tls: channel)
        return WatchedDriver(driver, self.world, self.outcomes[endpoint.url])


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _asgi(app: Any, method: str, path: str, token: str, body: bytes | None) -> tuple[int, bytes]:
    """One request straight into the application."""
    target, _, query = path.partition("?")
    headers = [(b"authorization", f"Bearer {token}".encode()), (b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": target,
        "raw_path": target.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("sim", 80),
    }
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body or b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])
