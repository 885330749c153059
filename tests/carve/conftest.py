"""A small site whose fabric is played by the test: two domains of three trays with four GPUs each."""

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from rackloom.carve.plan.values import (
    CreatePartition,
    GpuHealth,
    Limits,
    Observation,
    ObservedGpu,
    ObservedPartition,
    PartitionHealth,
)
from rackloom.carve.site import allocations, fabric_book, tables, tenants
from rackloom.carve.site.seed import seed_embedded_site
from rackloom.carve.site.store import Store
from rackloom.topology.identity import GpuKey
from rackloom.topology.rack import Domain, RackProfile, Site, Tray

DOMAINS = ("00000000-0000-4000-8000-00000000d001", "00000000-0000-4000-8000-00000000d002")
TRAYS, GPUS = 3, 4
START = 1000.0
_TABLES = tables.metadata.sorted_tables
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


def _domain(number: int) -> Domain:
    trays = tuple(
        Tray(
            chassis_serial=f"CHASSIS{number}",
            slot=slot,
            tray_index=slot,
            rack=f"rack{number}",
            gpus=(GpuKey(),) * GPUS,
        )
        for slot in range(TRAYS)
    )
    return Domain(uuid=DOMAINS[number], racks=(f"rack{number}",), trays=trays)


TOPOLOGY = Site(name="small", domains=(_domain(0), _domain(1)))


class SmallSite:
    """The store of a seeded site, a clock that moves when told, and two domains' worth of fabric."""

    def __init__(self, store: Store, runner: asyncio.Runner, last_id: int) -> None:
        self.store = store
        self.runner = runner
        self.now = START
        self._ids = itertools.count(last_id + 1)
        self.partitions: dict[str, dict[str, frozenset[int]]] = {domain: {} for domain in DOMAINS}
        self.health: dict[int, GpuHealth] = {}
        self.site_id = self.read(lambda conn: conn.execute(sa.select(tables.site.c.id)).scalar_one())
        self.tenant = self.read(tenants.of, "demo")
        self.type_id = self.read(lambda conn: conn.execute(sa.select(tables.instance_type.c.id)).scalar_one())
        self.endpoint = {
            domain: next(one.id for one in self.read(fabric_book.endpoints) if one.url.endswith(domain))
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
        tenant = self.run(tenants.ensure, org, self.now, self.ids)
        self.run(allocations.grant_everything, tenant.id, self.now, self.ids)
        return tenant

    def guid(self, domain: str, slot: int, device: int) -> int:
        """Above 2**63, like the GUIDs of real fabrics."""
        return (0xDB00 + DOMAINS.index(domain) << 48) + (slot << 8) + device

    def observation(self, domain: str, *, at: float | None = None) -> Observation:
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
        return Observation(
            domain=domain,
            gpus=tuple(gpus),
            partitions=tuple(partitions),
            limits=Limits(),
            observed_at=self.now if at is None else at,
        )

    def observe(self, domain: str) -> None:
        self.tick()
        self.run(
            fabric_book.record_observation, self.endpoint[domain], self.observation(domain), self.tick(0.5)
        )

    def observe_all(self) -> None:
        for domain in DOMAINS:
            self.observe(domain)

    def lose(self, domain: str, reason: str = "connection refused") -> None:
        self.run(fabric_book.record_unknown, self.endpoint[domain], reason, self.tick())

    def begin_create(self, domain: str, partition: str, name: str, guids: frozenset[int]) -> str:
        wanted = CreatePartition(name=name, logical_partition=partition, guids=tuple(sorted(guids)))
        operation: str = self.run(
            fabric_book.begin_operation, self.endpoint[domain], wanted, self.now, self.tick()
        )
        return operation

    def finish(self, operation: str, state: str = "done", code: str | None = None) -> None:
        self.run(fabric_book.finish_operation, operation, state, code, None, self.tick())

    def converge(self) -> None:
        """Make the fabric what the records want, the way a reconciler would, and look again."""
        self.observe_all()
        for domain in DOMAINS:
            wanted: dict[str, set[int]] = {}
            for one in self.read(fabric_book.intent, domain).assignments:
                wanted.setdefault(one.logical_partition, set()).add(one.guid)
            held = {f"p-{partition}": (partition, frozenset(guids)) for partition, guids in wanted.items()}
            for name, (partition, guids) in held.items():
                if name not in self.partitions[domain]:
                    self.finish(self.begin_create(domain, partition, name, guids))
            self.partitions[domain] = {name: guids for name, (_, guids) in held.items()}
        self.observe_all()


class _Template:
    """One seeded store for the whole session (its statements are compiled once), emptied for each test."""

    def __init__(self, home: Path) -> None:
        self.runner = asyncio.Runner()
        self.store = Store.open(home)
        self.next_id = 1
        urls = {domain: f"http://switch/{domain}" for domain in DOMAINS}
        self._run(seed_embedded_site, TOPOLOGY, PROFILE, urls, now=START, ids=self._ids)
        self.rows = self._run(lambda conn: {table: _all(conn, table) for table in _TABLES})

    def restore(self) -> None:
        self._run(self._restore)

    def close(self) -> None:
        self.runner.run(self.store.close())
        self.runner.close()

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


@pytest.fixture(scope="session")
def site_template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Template]:
    template = _Template(tmp_path_factory.mktemp("home"))
    yield template
    template.close()


@pytest.fixture
def small_site(site_template: _Template) -> SmallSite:
    site_template.restore()
    return SmallSite(site_template.store, site_template.runner, site_template.next_id)
