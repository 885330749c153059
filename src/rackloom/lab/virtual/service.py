"""The site service in virtual time: replicas that die and start again on the same records.

Everything from the REST application to the NMX-C or NMX-M driver is production code. This module
supplies the clock, the identifiers, the network and the store.

`SimulatedService` runs one or several replicas. Each replica is one process after another. A new process
opens the store, reads the newest recorded moment (so that its clock does not go back), makes a first pass
over its domains, and only then answers requests. A request goes to a random open replica. It is lost if
that process dies before the answer.

`CrashingBackend` is the store as one process reaches it: a crash point lies before and after every
write. Between them other tasks run. With several replicas `ChangeFeed` delivers changed domains to the
others, as PostgreSQL's LISTEN and NOTIFY do.

`SimulatedServiceOverNmxm` is the same service with one NMX-M in front of all racks.
"""

import asyncio
import random
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from functools import cached_property
from typing import Any

import httpx2
import sqlalchemy as sa

from rackloom.carve.api.app import create_app
from rackloom.carve.api.auth import LocalIssuer
from rackloom.carve.api.routing import ApiDeps
from rackloom.carve.fabric.controller import NMX_M_PATH, FabricDriver
from rackloom.carve.fabric.nmxc.driver import NmxcDriver
from rackloom.carve.fabric.nmxm.driver import NmxmDriver
from rackloom.carve.fabric.nmxm.protocol import NmxmLogin
from rackloom.carve.inventory.endpoints import Endpoint
from rackloom.carve.reconcile.loop import SOLE_REPLICA, Reconciler
from rackloom.carve.store.database import DatabaseBackend, Store
from rackloom.carve.store.failures import StoreUnavailable
from rackloom.carve.store.journal import MonotonicSiteClock, newest_recorded_time
from rackloom.carve.store.schema import domain_revision
from rackloom.core.partitions.status_rules import valid_seconds
from rackloom.lab.switches.nmxm import NmxmService
from rackloom.lab.virtual.network import CONNECT_FAILURE_SECONDS, NmxmTransport, SimController
from rackloom.lab.virtual.process import Process, RestartedProcess, T
from rackloom.lab.virtual.racks import SimSite

SERVICE_EPOCH = 1_800_000_000.0
"""Wall clock at virtual time 0."""


RESTART_SECONDS = 5.0
"""Seconds from the death of a process to the start of the next one."""


class ServiceReplica(RestartedProcess):
    """One replica: one process after another. `app` is the REST application of the present process."""

    def __init__(
        self, name: str, app: Any, serve: Callable[["ServiceReplica", Process], Coroutine[Any, Any, None]]
    ) -> None:
        super().__init__(
            Process(name), lambda life: serve(self, life), RESTART_SECONDS, [], (StoreUnavailable,)
        )
        self.app = app
        self.is_open = False
        self.clock_lead = 0.0
        """Seconds that its clock is ahead of the others."""

    def _report(self, error: BaseException) -> None:
        # The service survives every fault of a controller: a replica that ends without a kill ends the run.
        raise error


class SimulatedService:
    """The service in one process or in several, the records that outlive them, and their clock."""

    def __init__(
        self,
        world: SimSite,
        apps: Sequence[Any],
        records: DatabaseBackend,
        rng: random.Random,
        interval: float,
    ) -> None:
        self.world = world
        self.replicas = [
            ServiceReplica(f"process-{number}", app, self._serve_replica) for number, app in enumerate(apps)
        ]
        self.interval = interval
        self.skew = 0.0
        self.is_open = asyncio.Event()
        """Whether any process answers."""
        self.started: list[Process] = []
        """Every process of every replica so far."""
        self.next_fuse: int | None = None
        self._records = records
        self._feed = ChangeFeed(records) if len(apps) > 1 else None
        self._rng = rng

    @property
    def living(self) -> list[Process]:
        """The processes that run now."""
        return [replica.life for replica in self.replicas if replica.life.is_alive]

    def kill(self, restart_s: float) -> None:
        """Kill every process. Each replica starts a new one after `restart_s` seconds."""
        for replica in self.replicas:
            replica.restart_s = restart_s
            replica.life.kill()

    def wall(self) -> float:
        """The clock of the machine."""
        return SERVICE_EPOCH + _now() + self.skew

    def ids(self) -> str:
        """A new uuid."""
        return str(uuid.UUID(int=self._rng.getrandbits(128), version=4))

    def now(self) -> float:
        """Virtual seconds."""
        return _now()

    async def serve(self) -> None:
        """Keep all replicas running until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for replica in self.replicas:
                    tasks.create_task(replica.run())
        finally:
            for life in self.living:
                life.kill()
                await life.wait_ended()

    async def _serve_replica(self, replica: ServiceReplica, life: Process) -> None:
        """One process of a replica, from its start to its death."""
        self.started.append(life)
        life.fuse, self.next_fuse = self.next_fuse, None
        try:
            await self._start(replica, life)
            self._set_open(replica, open_now=True)
            await asyncio.Event().wait()
        finally:
            self._set_open(replica, open_now=False)

    def _set_open(self, replica: ServiceReplica, *, open_now: bool) -> None:
        replica.is_open = open_now
        if any(replica.is_open for replica in self.replicas):
            self.is_open.set()
        else:
            self.is_open.clear()

    async def call(self, method: str, path: str, token: str, body: bytes | None) -> tuple[int, bytes] | None:
        """Status and body of the answer, or None if the connection was lost before the answer."""
        await self.is_open.wait()
        replica = self._rng.choice([replica for replica in self.replicas if replica.is_open])
        life = replica.life
        if not life.is_alive:
            await asyncio.sleep(CONNECT_FAILURE_SECONDS)
            return None
        request = life.spawn(_asgi_request(replica.app, method, path, token, body))
        await asyncio.wait({request})
        # An answer that was computed but not delivered before the death is lost, too.
        return None if not life.is_alive or request.cancelled() else request.result()

    async def _start(self, replica: ServiceReplica, life: Process) -> None:
        """Start the service as production does, and wait for its first pass over all domains.

        Raises StoreUnavailable where the records fail: such a process ends, and is started again.
        """
        rng = random.Random(self._rng.getrandbits(64))  # noqa: S311
        store = Store(self._backend(life, rng))
        site_clock = MonotonicSiteClock(self.wall, _now, await store.read(newest_recorded_time))

        def clock() -> float:
            return site_clock() + replica.clock_lead

        reconciler = Reconciler(
            store,
            lambda endpoint: self._driver(life, clock, endpoint),
            clock,
            self.interval,
            holder=f"{life.name}-{len(self.started)}" if store.is_shared else SOLE_REPLICA,
        )
        state = replica.app.state
        state.deps = ApiDeps(
            store=store,
            clock=clock,
            ids=self.ids,
            wake=reconciler.wake,
            verifier=state.deps.verifier,
            auto_tenant=True,
            valid_seconds=valid_seconds(self.interval),
        )
        state.tenants_seen.clear()
        running, first = life.spawn(reconciler.run()), life.spawn(reconciler.first_passes())
        await asyncio.wait({running, first}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running

    def _backend(self, life: Process, rng: random.Random) -> DatabaseBackend:
        return CrashingBackend(self._records, life, rng, self._feed)

    def _driver(self, life: Process, clock: Callable[[], float], endpoint: Endpoint) -> FabricDriver:
        channel: Any = self._switch_at(endpoint.url).connect(life.checkpoint)
        return NmxcDriver(endpoint.url, clock=clock, connect=lambda _url, _tls: channel)

    def _switch_at(self, url: str) -> SimController:
        return self.world.rack_at(url).switch_at(url)


def rest_application(records: Store, issuer: LocalIssuer) -> Any:
    """The REST application of one replica. Each process sets its clock, IDs and wake-ups when it starts."""
    deps = ApiDeps(
        store=records,
        clock=lambda: SERVICE_EPOCH,
        ids=str,
        wake=lambda _domains, _org: None,
        verifier=issuer.verifier(lambda: SERVICE_EPOCH),
        auto_tenant=True,
    )
    return create_app(deps)


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _asgi_request(
    app: Any, method: str, path: str, token: str, body: bytes | None
) -> tuple[int, bytes]:
    """One request straight into the application."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = httpx2.Request(method, f"http://sim{path}", headers=headers, content=body or b"")
    answer = await httpx2.ASGITransport(app).handle_async_request(request)
    return answer.status_code, await answer.aread()


# The store as one process reaches it.


class ChangeFeed:
    """Delivers the domains with a changed intent to every replica, as PostgreSQL's NOTIFY does."""

    def __init__(self, records: DatabaseBackend) -> None:
        self._records = records
        self._noted: dict[str, int] = {}
        self._listeners: list[asyncio.Queue[str | None]] = []

    async def post(self) -> None:
        """Send the domains that the transaction which has just ended changed."""
        now = await self._records.transact(_revisions, write=False)
        changed = [domain for domain, revision in now.items() if self._noted.get(domain) != revision]
        self._noted = now
        for listener in self._listeners:
            for domain in changed:
                listener.put_nowait(domain)

    async def listen(self) -> AsyncGenerator[str | None, None]:
        """Each change from now on. The first item is None, because earlier changes were missed."""
        mine: asyncio.Queue[str | None] = asyncio.Queue()
        self._listeners.append(mine)
        try:
            yield None
            while True:
                yield await mine.get()
        finally:
            self._listeners.remove(mine)


class CrashingBackend:
    """The records as one process reaches them: other tasks run during a write, and the process may end there.

    With a feed the records are shared with other processes. Their transactions come one after another, as
    those of PostgreSQL do behind the lock that every writer takes.
    """

    def __init__(
        self,
        records: DatabaseBackend,
        life: Process,
        rng: random.Random,
        feed: ChangeFeed | None = None,
    ) -> None:
        self.is_shared = feed is not None
        self._records = records
        self._life = life
        self._rng = rng
        self._feed = feed

    async def transact(self, work: Callable[[sa.Connection], T], *, write: bool, org: str = "") -> T:
        """As the real one, with a point of death on both sides of every write."""
        await self._elsewhere()
        self._die_here(write)
        result = await self._commit(work, write=write, org=org)
        await self._elsewhere()
        return result

    async def _commit(self, work: Callable[[sa.Connection], T], *, write: bool, org: str) -> T:
        result = await self._records.transact(work, write=write, org=org)
        if write and self._feed is not None:
            # Notified before the crash point, as PostgreSQL delivers at commit even if the writer dies.
            await self._feed.post()
        self._die_here(write)
        return result

    async def survey(self, work: Callable[[sa.Connection], T]) -> T:
        """As any reading."""
        return await self.transact(work, write=False)

    def changes(self) -> AsyncGenerator[str | None, None]:
        """The writes of other processes, if there are any."""
        return self._records.changes() if self._feed is None else self._feed.listen()

    async def close(self) -> None:
        """The records outlive the process."""

    def _die_here(self, write: bool) -> None:
        if write:
            self._life.checkpoint()
        else:
            self._life.check()

    async def _elsewhere(self) -> None:
        for _ in range(self._rng.randrange(3)):
            await asyncio.sleep(0)


def _revisions(conn: sa.Connection) -> dict[str, int]:
    return {row.domain: row.revision for row in conn.execute(sa.select(domain_revision))}


# The same service with one NMX-M in front of all racks.


NMXM_ORIGIN = "http://nmx-m"
NMXM_OPERATION_SECONDS = 0.5
"""How long an accepted change takes. Other writers may act during it."""
_LOGIN = NmxmLogin("rw-user", "simulated")


def use_nmxm(world: SimSite) -> None:
    """Let every rack of a world be reached through the one NMX-M."""
    for rack in world.racks:
        rack.url = f"{NMXM_ORIGIN}{NMX_M_PATH}?domain={rack.fabric.domain}"


class SimulatedServiceOverNmxm(SimulatedService):
    """The service where `use_nmxm` put one NMX-M in front of all racks."""

    @cached_property
    def _nmxm(self) -> NmxmService:
        fabrics = tuple(rack.fabric for rack in self.world.racks)
        return NmxmService(
            fabrics, username=_LOGIN.username, password=_LOGIN.password, seconds=NMXM_OPERATION_SECONDS
        )

    def _driver(self, life: Process, clock: Callable[[], float], endpoint: Endpoint) -> FabricDriver:
        base, _, domain = endpoint.url.partition("?domain=")
        network = self.world.rack_at(endpoint.url).network
        wire = NmxmTransport(self._nmxm, network, life.checkpoint)
        return NmxmDriver(base, _static_login, clock=clock, domain=domain, transport=wire)


async def _static_login() -> NmxmLogin:
    return _LOGIN
