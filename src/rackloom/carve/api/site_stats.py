"""The numbers of machines and GPUs of a site, for its provider.

A machine counts as healthy when its domain is known now and its controller reports every GPU of it as
healthy, and as unhealthy when one of them is one that placement avoids. A machine of which neither is known
counts in neither, so these two numbers may add up to less than the total.

The allocations of a site are sums of all tenants, and may promise more machines than there are. What is
allocated beyond the machines of the site is left out.
"""

from collections import Counter
from collections.abc import Collection

import sqlalchemy as sa

from rackloom.carve.api import wire
from rackloom.carve.api.wire import Json
from rackloom.carve.observation import latest
from rackloom.carve.store.schema import allocation, allocation_constraint, machine, machine_gpu
from rackloom.carve.tenancy import catalog
from rackloom.carve.tenancy.placement import UNHEALTHY_STATES
from rackloom.core.partitions.domain import GpuHealth


class HealthCounts(wire.Answer):
    """Machines by health; those whose health is unknown are in neither number."""

    healthy: int
    unhealthy: int


class AllocationCounts(wire.Answer):
    """Machines by allocation."""

    allocated_in_use: int
    allocated_not_in_use: int
    unallocated: int


class MachineStats(wire.Answer):
    """How many machines a site has, by status, health and allocation. Statuses of no machine are left out."""

    total: int
    total_by_status: dict[str, int]
    total_by_health: HealthCounts
    total_by_status_and_health: dict[str, HealthCounts]
    total_by_allocation: AllocationCounts


def machine_stats(conn: sa.Connection, site_ids: Collection[str], valid_from: float) -> dict[str, Json]:
    """The `MachineStats` of each site. Readings from before `valid_from` say nothing about health."""
    rows = conn.execute(catalog.machine_listing().where(machine.c.site_id.in_(site_ids))).all()
    known = latest.latest_of_domains(conn, {row.domain for row in rows} - {None}, valid_from)
    readable = {domain for domain, reading in known.items() if reading.observation is not None}
    judged = _judged_machines(conn, site_ids)
    statuses: dict[str, Counter[str]] = {site_id: Counter() for site_id in site_ids}
    healths: dict[str, dict[str, Counter[str]]] = {site_id: {} for site_id in site_ids}
    used = Counter[str]()
    for row in rows:
        statuses[row.site_id][row.shown_status] += 1
        by_health = healths[row.site_id].setdefault(row.shown_status, Counter())
        if row.id in judged and row.domain in readable:
            by_health[judged[row.id]] += 1
        used[row.site_id] += row.instance_id is not None
    allocated = _allocated_machines(conn, site_ids)
    return {
        site_id: {
            "total": by_status.total(),
            "totalByStatus": dict(by_status),
            "totalByHealth": _health_shape(sum(healths[site_id].values(), Counter())),
            "totalByStatusAndHealth": {
                status: _health_shape(counts) for status, counts in healths[site_id].items()
            },
            "totalByAllocation": _allocation_shape(by_status.total(), used[site_id], allocated[site_id]),
        }
        for site_id, by_status in statuses.items()
    }


def _judged_machines(conn: sa.Connection, site_ids: Collection[str]) -> dict[str, str]:
    """Machine -> `healthy` or `unhealthy`, where its GPUs say either."""
    good = sa.func.min(sa.case((machine_gpu.c.health == GpuHealth.HEALTHY, 1), else_=0)).label("good")
    bad = sa.func.max(sa.case((machine_gpu.c.health.in_(UNHEALTHY_STATES), 1), else_=0)).label("bad")
    found = conn.execute(
        sa.select(machine_gpu.c.machine_id, good, bad)
        .join(machine, machine.c.id == machine_gpu.c.machine_id)
        .where(machine.c.site_id.in_(site_ids))
        .group_by(machine_gpu.c.machine_id)
    )
    return {row.machine_id: "unhealthy" if row.bad else "healthy" for row in found if row.bad or row.good}


def _allocated_machines(conn: sa.Connection, site_ids: Collection[str]) -> dict[str, int]:
    sums = (
        sa.select(allocation.c.site_id, sa.func.sum(allocation_constraint.c.value).label("value"))
        .join(allocation_constraint, allocation_constraint.c.allocation_id == allocation.c.id)
        .where(allocation.c.site_id.in_(site_ids))
        .group_by(allocation.c.site_id)
    )
    return dict.fromkeys(site_ids, 0) | {row.site_id: int(row.value) for row in conn.execute(sums)}


def _health_shape(counts: Counter[str]) -> Json:
    return {"healthy": counts["healthy"], "unhealthy": counts["unhealthy"]}


def _allocation_shape(total: int, used: int, allocated: int) -> Json:
    promised = min(max(allocated, used), total)
    return {
        "allocatedInUse": used,
        "allocatedNotInUse": promised - used,
        "unallocated": total - promised,
    }
