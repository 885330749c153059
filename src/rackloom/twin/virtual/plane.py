"""The service under simulation: processes that live, are killed, and live again on the same records.

Everything from the REST application to the NMX-C driver is production code. The parts around it are ours:
the clock, the wire, and a store that can be the last thing a process does.
"""

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec

from rackloom.carve.api.app import ApiDeps, create_app
from rackloom.carve.api.local_tokens import LocalIssuer
from rackloom.carve.fabric.nmxc.driver import NmxcDriver
from rackloom.carve.fabric.ports import FabricDriver, FabricUnavailable
from rackloom.carve.plan.values import Observation, Operation
from rackloom.carve.reconcile.clock import SteadyClock, newest_moment
from rackloom.carve.reconcile.loop import ALONE, Reconciler
from rackloom.carve.site import endpoint_registry, endpoints
from rackloom.carve.site.fabric_book import Endpoint
from rackloom.carve.site.operator_steps import Order
from rackloom.carve.site.store import Store
from rackloom.carve.site.store.backend import Backend
from rackloom.twin.virtual.liar import Liar
from rackloom.twin.virtual.life import Bulletin, Killed, Life, MortalBackend
from rackloom.twin.virtual.wire import SimSwitch
from rackloom.twin.virtual.world import SimRack, SimWorld

EPOCH = 1_800_000_000.0
"""Wall clock at virtual time 0."""

NOBODY_THERE = 0.1
"""Seconds until a client learns that nobody listens."""


SAME_MOMENT = 1e-3
"""Seconds: a reading that has just ended may not be in the records yet."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt to read or to change a domain ended, as far as something is known by it."""

    observation: Observation | None
    """None: it failed, and what is there is unknown."""
    begun: float
    ended: float
    life: Life
    """Of the process that asked."""

    def was_written_down(self, now: float) -> bool:
        """Whether its process had the time to write it down."""
        until = now if self.life.ended_at is None else min(now, self.life.ended_at)
        return self.ended < until - SAME_MOMENT


class WatchedDriver:
    """The driver, with its readings noted for those who judge the plane."""

    def __init__(self, driver: FabricDriver, world: SimWorld, outcomes: list[Outcome], life: Life) -> None:
        self._driver = driver
        self._world = world
        self._outcomes = outcomes
        self._life = life

    async def observe(self) -> Observation:
        """Read, and note what came of it."""
        begun = _now()
        try:
            observation = await self._driver.observe()
        except FabricUnavailable:
            self._note(None, begun)
            raise
        self._note(observation, begun)
        return observation

    async def execute(self, operation: Operation) -> int:
        """Carry out, and note what a new partition is for, or that the outcome is unknown."""
        self._world.asked(operation)
        begun = _now()
        try:
            return await self._driver.execute(operation)
        except FabricUnavailable:
            self._note(None, begun)
            raise

    def notifications(self) -> AsyncIterator[None]:
        """As they come."""
        return self._driver.notifications()

    async def close(self) -> None:
        """Close."""
        await self._driver.close()

    def _note(self, observation: Observation | None, begun: float) -> None:
        self._outcomes.append(Outcome(observation=observation, begun=begun, ended=_now(), life=self._life))


class Process:
    """A place where the service runs: one life after another. `app` answers for the present one."""

    def __init__(self, name: str, app: Any) -> None:
        self.name = name
        self.app = app
        self.life: Life | None = None
        self.is_open = False


class SimPlane:
    """The service in one process or in several, the records that outlive them, and the clock they believe."""

    def __init__(
        self, world: SimWorld, apps: Sequence[Any], records: Backend, rng: random.Random, interval: float
    ) -> None:
        self.world = world
        self.processes = [Process(f"process-{number}", app) for number, app in enumerate(apps)]
        self.interval = interval
        self.skew = 0.0
        self.outcomes: dict[str, list[Outcome]] = {rack.url: [] for rack in world.racks}
        self.liars: dict[str, Liar] = {}
        """By URL: controllers that are registered beside the one of a rack, and contradict it."""
        self.is_open = asyncio.Event()
        """Whether any process answers."""
        self.lives = 0
        self.next_fuse: int | None = None
        self.downtime = 5.0
        self.longest_silence = 2 * interval + 120.0
        """Seconds. A claim that rests on an older reading is a claim about the past: two timers, and the
        longest that a pass over a slow controller takes."""
        self._past_points = 0
        self._records = records
        self._bulletin = Bulletin(records) if len(apps) > 1 else None
        self._rng = rng

    @property
    def living(self) -> list[Life]:
        """The lives that have not ended."""
        return [one.life for one in self.processes if one.life is not None and one.life.alive]

    @property
    def points(self) -> int:
        """Points of death that were passed so far."""
        return self._past_points + sum(life.points for life in self.living)

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
        """Keep all processes running until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for process in self.processes:
                tasks.create_task(self._keep(process))

    async def _keep(self, process: Process) -> None:
        while True:
            life = Life(random.Random(self._rng.getrandbits(64)), self.next_fuse)  # noqa: S311
            process.life, self.next_fuse, self.lives = life, None, self.lives + 1
            try:
                await self._open(process, life)
                await life.ended.wait()
            except Killed:
                life.kill()
            finally:
                self._set_open(process, open_now=False)
                life.kill()
                await life.bury()
                self._past_points += life.points
            await asyncio.sleep(self.downtime)

    def _set_open(self, process: Process, *, open_now: bool) -> None:
        process.is_open = open_now
        if any(one.is_open for one in self.processes):
            self.is_open.set()
        else:
            self.is_open.clear()

    async def call(self, method: str, path: str, token: str, body: bytes | None) -> tuple[int, bytes] | None:
        """A request as a client sees it; None when the connection was lost before the answer."""
        await self.is_open.wait()
        process = self._rng.choice([one for one in self.processes if one.is_open])
        life = process.life
        if life is None or not life.alive:
            await asyncio.sleep(NOBODY_THERE)
            return None
        asking = life.spawn(_asgi(process.app, method, path, token, body))
        await asyncio.wait({asking})
        life.tasks.remove(asking)
        if not life.alive or asking.cancelled() or isinstance(asking.exception(), Killed):
            return None
        return asking.result()

    def outcomes_of(self, rack: SimRack) -> list[Outcome]:
        """Every attempt to read a rack, oldest first."""
        return self.outcomes[rack.url]

    async def register(self, liar: Liar) -> None:
        """An operator adds a controller."""
        self.liars[liar.url] = liar
        self.outcomes[liar.url] = []
        await self._records_change(endpoints.register, liar.url, [liar.serial], self.wall(), self.ids)

    async def remove(self, liar: Liar) -> None:
        """An operator takes it away again."""
        order = Order("an operator", "it contradicts", self.wall())
        await self._records_change(endpoint_registry.delete, liar.serial, order)
        del self.liars[liar.url]

    async def _records_change(self, change: Callable[..., object], *told: object) -> None:
        await Store(self._records).run(change, *told)

    def liar_of(self, rack: SimRack) -> Liar | None:
        """The controller that contradicts that of `rack` now."""
        return next((one for one in self.liars.values() if one.concerns(rack)), None)

    async def _open(self, process: Process, life: Life) -> None:
        store = Store(MortalBackend(self._records, life, self._bulletin))
        clock = SteadyClock(self.wall, _now, await store.read(newest_moment))
        reconciler = Reconciler(
            store,
            lambda endpoint: self._driver(life, clock, endpoint),
            clock,
            self.interval,
            holder=f"{process.name}-{self.lives}" if store.is_shared else ALONE,
        )
        state = process.app.state
        state.deps = ApiDeps(
            store=store,
            clock=clock,
            ids=self.ids,
            wake=reconciler.wake,
            verifier=state.deps.verifier,
            auto_tenant=True,
        )
        state.tenants_seen.clear()
        life.spawn(reconciler.run())
        asked, ended = life.spawn(reconciler.first_passes()), life.spawn(life.ended.wait())
        await asyncio.wait({asked, ended}, return_when=asyncio.FIRST_COMPLETED)
        if life.alive:
            self._set_open(process, open_now=True)

    def _driver(self, life: Life, clock: Callable[[], float], endpoint: Endpoint) -> WatchedDriver:
        channel: Any = self._switch_at(endpoint.url).connect(life.checkpoint)
        driver = NmxcDriver(endpoint.url, clock=clock, connect=lambda _url, _tls: channel)
        return WatchedDriver(driver, self.world, self.outcomes.setdefault(endpoint.url, []), life)

    def _switch_at(self, url: str) -> SimSwitch:
        liar = self.liars.get(url)
        return self.world.rack_at(url).switch_at(url) if liar is None else liar.switch


def application(records: Store, issuer: LocalIssuer) -> Any:
    """The REST door of one process, which gives it its own clock, ids and wake-ups when it starts."""
    deps = ApiDeps(
        store=records,
        clock=lambda: EPOCH,
        ids=str,
        wake=lambda _: None,
        verifier=issuer.verifier(lambda: EPOCH),
        auto_tenant=True,
    )
    return create_app(deps)


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
