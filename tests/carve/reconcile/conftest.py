"""Replicas of the reconciler on one PostgreSQL database, against simulated racks on real sockets."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
import sqlalchemy as sa

from rackloom.carve.fabric.nmxc.driver import NmxcDriver
from rackloom.carve.inventory.enrolment import seed_embedded_site
from rackloom.carve.reconcile import loop
from rackloom.carve.reconcile.loop import Reconciler
from rackloom.carve.store import schema
from rackloom.carve.store.database import DatabaseBackend, Store, T
from rackloom.carve.tenancy import entitlements, instance_creation, logical_partitions
from rackloom.carve.tenancy.logical_partitions import NewLogicalPartition, NewVpc
from rackloom.core.partitions.domain import PartitionOperation
from rackloom.lab.switches.fabric import SeededNames, fabrics_of
from rackloom.lab.switches.servers import NmxcServer
from rackloom.topology import profiles
from rackloom.topology.rack import build_site

PROFILE = profiles.load_rack("gb200-nvl72")
PATIENCE = 60.0
NEVER = 36000.0
"""Interval of the timer, so long that only wake-ups start passes in a test."""


def new_id() -> str:
    return str(uuid.uuid4())


class MortalBackend:
    """The database of one replica, until the test cuts the replica off."""

    is_shared = True

    def __init__(self, backend: DatabaseBackend) -> None:
        self._backend = backend
        self.cut_off = False

    async def transact(self, work: Callable[[sa.Connection], T], *, write: bool, org: str = "") -> T:
        self._check()
        result = await self._backend.transact(work, write=write, org=org)
        self._check()
        return result

    async def survey(self, work: Callable[[sa.Connection], T]) -> T:
        return await self.transact(work, write=False)

    def changes(self) -> AsyncGenerator[str | None, None]:
        return self._backend.changes()

    async def close(self) -> None:
        await self._backend.close()

    def _check(self) -> None:
        if self.cut_off:
            raise ConnectionError("cut off from the database")


class WatchedDriver(NmxcDriver):
    """Records its requests to the fabric."""

    def __init__(self, replica: str, url: str, asked: list[tuple[str, str, PartitionOperation]]) -> None:
        super().__init__(url, clock=time.time)
        self._replica, self._url, self._asked = replica, url, asked

    async def execute(self, operation: PartitionOperation) -> int:
        self._asked.append((self._replica, self._url, operation))
        return await super().execute(operation)


class Replica:
    """One replica, with its own connections and reconciler."""

    def __init__(self, name: str, store: Store, backend: MortalBackend, asked: list[Any]) -> None:
        self.name = name
        self.store = store
        self.backend = backend
        self.reconciler = Reconciler(
            store,
            lambda endpoint: WatchedDriver(name, endpoint.url, asked),
            time.time,
            interval=NEVER,
            holder=name,
        )
        self.task = asyncio.create_task(self.reconciler.run())

    def domains(self) -> set[str]:
        """Domains that it reconciles now."""
        return {loop.work.domain for loop in self.reconciler.loops if loop.work.domain is not None}

    async def kill(self) -> None:
        """End it without releasing anything in the database."""
        self.backend.cut_off = True
        await self.stop()

    async def stop(self) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task


class Racks:
    """A seeded database, the fabrics, and the replicas that a test starts."""

    def __init__(self, url: str, servers: list[NmxcServer], stack: AsyncExitStack) -> None:
        self.url = url
        self.servers = servers
        self.asked: list[tuple[str, str, PartitionOperation]] = []
        self.made: list[tuple[str, str]] = []
        """Domain and name of each partition that was created."""
        self._stack = stack
        for server in servers:
            self._watch(server)

    def _watch(self, server: NmxcServer) -> None:
        known: set[int] = set()

        def note(snapshot: Any) -> None:
            now = {partition.id: partition.name for partition in snapshot.partitions}
            self.made.extend((snapshot.domain, name) for key, name in now.items() if key not in known)
            known.clear()
            known.update(now)

        note(server.fabric.snapshot())
        self.made.clear()
        server.fabric.on_change(note)

    @property
    def domains(self) -> set[str]:
        return {server.fabric.domain for server in self.servers}

    async def connect(self) -> tuple[Store, MortalBackend]:
        # The backend is reached into, because only there can a process be cut off from its database.
        backend = MortalBackend((await Store.connect(self.url))._backend)
        self._stack.push_async_callback(backend.close)
        return Store(backend), backend

    async def replica(self, name: str) -> Replica:
        replica = Replica(name, *await self.connect(), self.asked)
        self._stack.push_async_callback(replica.stop)
        await replica.reconciler.first_passes()
        return replica

    def partitions(self) -> dict[str, set[str]]:
        return {
            server.fabric.domain: {partition.name for partition in server.fabric.snapshot().partitions}
            for server in self.servers
        }

    async def audit(self, store: Store) -> list[Any]:
        return await store.read(
            lambda conn: list(conn.execute(sa.select(schema.operation).order_by(schema.operation.c.id)))
        )

    async def order(self, store: Store, count: int) -> None:
        """Create instances with GPUs that shall join a partition, in the database only. Wakes no replica."""
        now = time.time()
        tenant = await store.read(entitlements.get_tenant, "demo")
        kind = await store.read(lambda conn: conn.execute(sa.select(schema.instance_type)).one())
        wanted = NewLogicalPartition(kind.site_id, new_id())
        partition = await store.run(
            logical_partitions.create_logical_partition, tenant.id, wanted, now, new_id
        )
        network = NewVpc(site_id=kind.site_id, name=new_id(), logical_partition_id=partition)
        vpc = await store.run(logical_partitions.create_vpc, tenant.id, network, now, new_id)
        request = instance_creation.InstanceRequest(
            names=tuple(new_id() for _ in range(count)),
            vpc_id=vpc,
            instance_type_id=kind.id,
            one_domain=False,
        )
        await store.run(instance_creation.create_instances, tenant, request, time.time(), new_id)

    async def all_ready(self, store: Store) -> bool:
        found = sa.select(schema.instance.c.status)
        return await store.read(lambda conn: set(conn.execute(found).scalars())) == {"Ready"}


async def until(look: Callable[[], Any]) -> None:
    """Wait until `look` returns something true."""
    async with asyncio.timeout(PATIENCE):
        while True:
            seen = look()
            if asyncio.iscoroutine(seen):
                seen = await seen
            if seen:
                return
            await asyncio.sleep(0.02)


@pytest.fixture
def eventually() -> Callable[[Callable[[], Any]], Any]:
    return until


@pytest.fixture
def racks(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Any]:
    """Opens a site of this number of racks. Leases are shorter than in production, to save waiting."""
    monkeypatch.setattr(loop, "LEASE_SECONDS", 3.0)
    monkeypatch.setattr(loop, "RENEW_SECONDS", 0.5)
    monkeypatch.setattr(loop, "RENEW_SECONDS", 0.5)

    @asynccontextmanager
    async def opened(count: int) -> AsyncIterator[Racks]:
        site = build_site(PROFILE, count, SeededNames("test"))
        async with AsyncExitStack() as stack:
            servers = [
                await stack.enter_async_context(NmxcServer(fabric)) for fabric in fabrics_of(site, "test")
            ]
            found = Racks(postgres_url, servers, stack)
            store, _ = await found.connect()
            urls = {server.fabric.domain: server.url for server in servers}
            await store.run(seed_embedded_site, site, PROFILE, urls, now=time.time(), ids=new_id)
            yield found

    return opened
