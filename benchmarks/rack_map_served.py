"""What the map costs a served site: CPU while nothing changes, and how soon a change is on all pages.

`rack_map.py --served` runs it. The store is on disk. Each tenant has its racks and one open
page, and every page has a stream. Switch controllers are read `READINGS` times a second, as the reconciler of
1,000 racks does, and list what they listed before. `cpu_share` is the part of a core that the map takes: all
that the process uses, less what the same readings cost without it. A change is a tray that an operator
cordons or releases. It is shown once each stream has sent it.
"""

import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import sqlalchemy as sa
from site_figures import load, resident_mib, spent

from rackloom.app.process import freeze_loaded_objects
from rackloom.app.site.rack_map import SiteSource
from rackloom.carve.inventory import endpoints, maintenance
from rackloom.carve.inventory.enrolment import seed_embedded_site
from rackloom.carve.reconcile import records
from rackloom.carve.store import schema
from rackloom.carve.store.database import Store
from rackloom.carve.store.journal import OperatorOrder
from rackloom.core.partitions.domain import (
    DomainLimits,
    DomainObservation,
    GpuHealth,
    ObservedGpu,
    ObservedPartition,
    PartitionHealth,
)
from rackloom.lab.switches.fabric import SeededNames
from rackloom.topology import profiles
from rackloom.topology.rack import NvlinkDomain, RackSite, build_site
from rackloom.web.frames import ColourMode
from rackloom.web.live import LiveMap
from rackloom.web.painters import Painters
from rackloom.web.render import render_changes

READINGS = 17
"""Domains that are read in a second: 1,000 in a minute."""
TRAYS_IN_USE, GPUS = 17, 4
CHANGES = 10


class Controller:
    """The endpoint of one domain, and the list of its controller."""

    def __init__(self, number: int, domain: NvlinkDomain, tenant: str) -> None:
        self.number = number
        self.domain = domain
        self.tenant = tenant
        self.url = f"http://127.0.0.1:{20_000 + number}"
        self.endpoint = ""

    def guid(self, tray: int, module: int) -> int:
        return (self.number + 1) * 0x1_0000 + tray * 16 + module

    @property
    def partition(self) -> str:
        """The id of its logical partition."""
        return f"logical-{self.number}"

    def observed(self) -> DomainObservation:
        """What is listed now: all GPUs, and the partition of the tenant."""
        gpus = [
            ObservedGpu(
                guid=self.guid(tray.tray_index, module),
                chassis_serial=tray.chassis_serial,
                slot=tray.slot,
                tray_index=tray.tray_index,
                module_id=module,
                health=GpuHealth.HEALTHY,
            )
            for tray in self.domain.trays
            for module in range(1, GPUS + 1)
        ]
        held = ObservedPartition(
            id=1,
            name=f"p-{self.number}",
            members=frozenset(gpu.guid for gpu in gpus if gpu.tray_index < TRAYS_IN_USE),
            health=PartitionHealth.HEALTHY,
            guid_based=True,
            multicast_groups=0,
        )
        return DomainObservation(
            domain=self.domain.uuid,
            gpus=tuple(gpus),
            partitions=(held,),
            limits=DomainLimits(),
            observed_at=time.time(),
        )

    async def read(self, store: Store) -> None:
        """Record a reading, as the reconciler does."""
        seen = self.observed()
        await store.run(records.record_observation, self.endpoint, seen, seen.observed_at)


def _holders(conn: sa.Connection, controllers: list[Controller]) -> None:
    """The tenants, and an instance on each tray that is in use."""
    now = time.time()
    times = {"created": now, "updated": now}
    (site,) = conn.execute(sa.select(schema.site.c.id)).scalars()
    orgs = sorted({controller.tenant for controller in controllers})
    add = conn.execute
    add(
        sa.insert(schema.tenant),
        [{"id": org, "org": org, "targeted_instance_creation": False, **times} for org in orgs],
    )
    operations = [
        {
            "id": 1 + controller.number,
            "endpoint_id": controller.endpoint,
            "domain": controller.domain.uuid,
            "kind": "create-partition",
            "partition_name": f"p-{controller.number}",
            "asked_by": controller.tenant,
            "reason": "wanted",
            "detail": {},
            "state": "done",
            "observed_at": now,
            "started": now,
            "finished": now,
            "observed_after": now,
        }
        for controller in controllers
    ]
    owned = {"tenant_id": None, "site_id": site, "status": "Ready", **times}
    logicals = [
        {**owned, "id": each.partition, "tenant_id": each.tenant, "name": each.partition}
        for each in controllers
    ]
    vpcs = [
        {**owned, "id": f"vpc-{each.number}", "tenant_id": each.tenant, "name": f"vpc-{each.number}",
         "logical_partition_id": each.partition, "extra": {}}
        for each in controllers
    ]  # fmt: skip
    machines = {
        (row.chassis_serial, row.slot): row.id
        for row in conn.execute(
            sa.select(schema.machine.c.id, schema.machine.c.chassis_serial, schema.machine.c.slot)
        )
    }
    instances = [
        {**owned, "id": f"i-{each.number}-{tray.tray_index}", "tenant_id": each.tenant,
         "vpc_id": f"vpc-{each.number}", "machine_id": machines[tray.chassis_serial, tray.slot],
         "name": f"i-{each.number}-{tray.tray_index}", "placement": "any", "intent_at": now, "extra": {}}
        for each in controllers
        for tray in each.domain.trays
        if tray.tray_index < TRAYS_IN_USE
    ]  # fmt: skip
    interfaces = [
        {"id": f"{row['id']}-{device}", "instance_id": row["id"],
         "logical_partition_id": row["vpc_id"].replace("vpc", "logical"), "device_instance": device,
         "status": "Ready", "intent_at": now, **times}
        for row in instances
        for device in range(GPUS)
    ]  # fmt: skip
    partitions = [
        {"domain": each.domain.uuid, "name": f"p-{each.number}", "logical_partition_id": each.partition,
         "partition_id": 1, "operation_id": 1 + each.number, "seen_at": now, "created": now}
        for each in controllers
    ]  # fmt: skip
    for table, rows in (
        (schema.operation, operations),
        (schema.logical_partition, logicals),
        (schema.vpc, vpcs),
        (schema.instance, instances),
        (schema.nvlink_interface, interfaces),
        (schema.owned_partition, partitions),
    ):
        add(sa.insert(table), rows)


@asynccontextmanager
async def planted(racks: int, tenants: int, home: Path) -> AsyncIterator[tuple[Store, list[Controller]]]:
    """A site of racks in use, each read once."""
    profile = profiles.load_rack("gb200-nvl72")
    site: RackSite = build_site(profile, racks, SeededNames("served"))
    controllers = [
        Controller(number, domain, f"tenant-{number % tenants:03}")
        for number, domain in enumerate(site.domains)
    ]
    store = Store.open(home)
    try:
        ids = (f"id-{number}" for number in itertools.count())
        urls = {each.domain.uuid: each.url for each in controllers}
        await store.run(seed_embedded_site, site, profile, urls, now=time.time(), ids=lambda: next(ids))
        known = {found.url: found.id for found in await store.read(endpoints.all_endpoints)}
        for each in controllers:
            each.endpoint = known[each.url]
        await store.run(read_all, controllers)
        await store.run(_holders, controllers)
        await store.run(read_all, controllers)
        yield store, controllers
    finally:
        await store.close()


def read_all(conn: sa.Connection, controllers: Sequence[Controller]) -> None:
    """Record a reading of each."""
    for each in controllers:
        records.record_observation(conn, each.endpoint, each.observed(), time.time())


async def _read_in_turn(store: Store, controllers: list[Controller]) -> None:
    """Read the controllers, one after another, `READINGS` a second. Never returns."""
    due = time.perf_counter()
    for each in itertools.cycle(controllers):
        due += 1 / READINGS
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        await each.read(store)


async def _cpu_share(seconds: float) -> float:
    begun, since = spent(), time.perf_counter()
    await asyncio.sleep(seconds)
    return (spent() - begun) / (time.perf_counter() - since)


class Page:
    """The stream of one tenant's page."""

    def __init__(self, live: LiveMap, painters: Painters, org: str) -> None:
        self._live = live
        self._painters = painters
        self._kind = org, ColourMode.USE
        self.number = 0
        self.sent = 0
        """Characters."""

    async def run(self) -> None:
        """Follow the map, as a stream does. Never returns."""
        with self._painters.held(self._kind):
            async with self._live.watched():
                while True:
                    now = await self._live.after(self.number)
                    sheet = await self._painters.sheet(self._kind, now)
                    self.sent += len(render_changes(sheet.since(self.number)))
                    self.number = sheet.number


async def _seconds_until_shown(live: LiveMap, pages: list[Page], machine: str, store: Store) -> float:
    """From a change to the moment at which every page has it."""
    before = _is_cordoned(live, machine)
    change = maintenance.uncordon_machine if before else maintenance.cordon_machine
    begun = time.perf_counter()
    await store.run(change, machine, OperatorOrder("benchmark", "a change", time.time()))
    while _is_cordoned(live, machine) is before:
        await live.after(live.newest.number)
    number = live.newest.number
    while min(page.number for page in pages) < number:  # noqa: ASYNC110 (polls)
        await asyncio.sleep(0.005)
    return time.perf_counter() - begun


def _is_cordoned(live: LiveMap, machine: str) -> bool:
    found = (gpu.chain.machine for gpu in live.newest.whole.gpus if gpu.chain and gpu.chain.machine)
    return next(seen.cordoned for seen in found if seen.id == machine)


async def served_figures(racks: int, tenants: int, seconds: float) -> dict[str, Any]:
    """The cost of the map for a site, by its racks and the tenants that look at it.

    `seconds` is the length of the measurement with the map, and of that without it.
    """
    with TemporaryDirectory() as folder:
        async with planted(racks, tenants, Path(folder)) as (store, controllers):
            reading = asyncio.create_task(_read_in_turn(store, controllers))
            freeze_loaded_objects()
            await asyncio.sleep(1.0)
            without = await _cpu_share(seconds)
            live = LiveMap(SiteSource(store, time.time), time.time)
            painters = Painters(9)
            orgs = sorted({each.tenant for each in controllers})
            pages = [Page(live, painters, org) for org in orgs]
            begun, cpu = time.perf_counter(), spent()
            streams = [asyncio.create_task(page.run()) for page in pages]
            while min(page.number for page in pages) < 2:  # noqa: ASYNC110 (polls)
                await asyncio.sleep(0.1)
            first, first_cpu = time.perf_counter() - begun, spent() - cpu
            before = sum(page.sent for page in pages), live.newest.number
            share = await _cpu_share(seconds)
            sent = sum(page.sent for page in pages) - before[0]
            numbers = live.newest.number - before[1]
            machines = [rack.trays[0][0].chain.machine.id for rack in live.newest.whole.racks[:CHANGES]]
            shown = []
            begun_cpu = spent()
            for machine in machines:
                shown.append(await _seconds_until_shown(live, pages, machine, store))
                await asyncio.sleep(1.0)
            of_changes = (spent() - begun_cpu) / len(machines)
            for task in (*streams, reading):
                task.cancel()
            await asyncio.gather(*streams, reading, return_exceptions=True)
    return {
        "benchmark": "rack_map",
        "measure": "served",
        "racks": racks,
        "viewers": len(pages),
        "readings_per_s": READINGS,
        "cpu_share": round(share - without, 3),
        "cpu_share_of_controllers": round(without, 3),
        "maps": numbers,
        "kib_sent": round(sent / 1024, 1),
        "seconds_until_all_drawn_first": round(first, 1),
        "cpu_seconds_until_all_drawn_first": round(first_cpu, 1),
        "seconds_until_shown_p50": round(statistics.median(shown), 2),
        "seconds_until_shown_max": round(max(shown), 2),
        "cpu_seconds_of_a_change": round(of_changes, 2),
        "resident_mib": resident_mib(),
        **load(),
    }
