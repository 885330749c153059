"""What one full pass over all domains costs in CPU time, with everything to do and with nothing to do."""

import time
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from site_figures import load
from site_plant import Passes, Plant, plant, quiet

from rackloom.carve.inventory.enrolment import DEMO_ORG
from rackloom.carve.reconcile.loop import Reconciler
from rackloom.carve.store.values import Status
from rackloom.carve.tenancy import entitlements
from rackloom.carve.tenancy.entitlements import QuotaKind

NO_TIMERS = 3600.0
"""Seconds from pass to pass of a domain: with the default, some timer of a large site ends at any time."""


async def measured(domains: int, filled: int, folder: Path) -> list[dict[str, Any]]:
    """A row with everything to do, and one with nothing to do.

    A tenant has all machines of `filled` domains; in the others the factory's partition is left.
    """
    filled = min(filled, domains)
    async with plant(domains, folder) as site:
        # Filling takes minutes at 1,000 domains, and only a domain that was read lately has room.
        async with site.reconciling(acts=False):
            machines = await fill(site, filled)
        before = time.process_time(), time.perf_counter()
        async with site.reconciling(interval=NO_TIMERS) as (reconciler, passes):
            await quiet(reconciler, passes)
            everything = _row("everything", domains, machines, before, passes)
            await _require_ready(site, machines)
            nothing = await _idle_pass(reconciler, passes, domains, machines)
    return [everything, nothing]


async def fill(site: Plant, domains: int, trays: int = 18) -> int:
    """Give `trays` of every domain to one logical partition a domain; returns the number of machines."""
    where = (await site.ask("GET", "site"))[0]["id"]
    kind = (await site.ask("GET", f"instance/type?siteId={where}"))[0]["id"]
    await site.store.run(_raise_quotas, domains * 100)
    for number in range(domains):
        partition = {"siteId": where, "name": f"partition-{number}"}
        partition_id = (await site.ask("POST", "nvlink-logical-partition", partition))["id"]
        vpc = {"siteId": where, "name": f"vpc-{number}", "nvLinkLogicalPartitionId": partition_id}
        vpc_id = (await site.ask("POST", "vpc", vpc))["id"]
        batch = {"vpcId": vpc_id, "instanceTypeId": kind, "namePrefix": f"batch-{number}", "count": trays}
        await site.ask("POST", "instance/batch", batch)
    return domains * trays


def _raise_quotas(conn: sa.Connection, limit: int) -> None:
    """Let the tenant have the whole site, which the defaults do not allow above 1,800 domains."""
    tenant = entitlements.tenant_id_of(conn, DEMO_ORG)
    limits = {kind: limit for kind in QuotaKind if entitlements.DEFAULT_LIMITS[kind] < limit}
    entitlements.set_quotas(conn, tenant, limits, time.time())


async def _idle_pass(reconciler: Reconciler, passes: Passes, domains: int, machines: int) -> dict[str, Any]:
    before = time.process_time(), time.perf_counter()
    passes.ended = passes.readings = 0
    for loop in reconciler.loops:
        loop.first_pass.clear()
        loop.woken.set()
    await reconciler.first_passes()
    return _row("nothing", domains, machines, before, passes)


def _row(
    to_do: str, domains: int, machines: int, before: tuple[float, float], passes: Passes
) -> dict[str, Any]:
    cpu = passes.last_cpu - before[0]
    return {
        "measure": "full pass",
        "to_do": to_do,
        "domains": domains,
        "gpus": machines * 4,
        "cpu_s": round(cpu, 3),
        "cpu_ms_per_domain": round(cpu / domains * 1e3, 2),
        "wall_s": round(passes.last_wall - before[1], 3),
        "passes": passes.ended,
        "readings": passes.readings,
        "simulated": "switch controllers and racks: another process, its CPU time not counted",
        **load(),
    }


async def _require_ready(site: Plant, machines: int) -> None:
    answer = await site.ask("GET", f"instance?status={Status.READY}&pageSize=1")
    if not answer:
        raise RuntimeError("no instance became Ready")
