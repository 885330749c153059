"""The numbers of machines and GPUs of a site, for its provider.

A machine counts as healthy when the reading of its domain that counts lists every GPU of it as healthy, and
as unhealthy when it lists one of them as one that placement avoids. A machine of which neither is known
counts in neither: a missing one, or one with an unlisted GPU. So these two numbers may add up to less than
the total.

The allocations of a site are sums of all tenants, and may promise more machines than there are. What is
allocated beyond the machines of the site is left out.
"""

from collections import Counter
from collections.abc import Collection

import sqlalchemy as sa

from rackloom.carve.api import wire
from rackloom.carve.api.wire import Json
from rackloom.carve.store.schema import allocation, allocation_constraint, machine
from rackloom.carve.tenancy import catalog
from rackloom.carve.tenancy.gpu_health import shown_gpu_healths
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
    gpus = shown_gpu_healths(conn, rows, valid_from)
    statuses: dict[str, Counter[str]] = {site_id: Counter() for site_id in site_ids}
    healths: dict[str, dict[str, Counter[str]]] = {site_id: {} for site_id in site_ids}
    used = Counter[str]()
    for row in rows:
        statuses[row.site_id][row.shown_status] += 1
        by_health = healths[row.site_id].setdefault(row.shown_status, Counter())
        by_health[_judged_health(gpus[row.id].values())] += 1
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


def _judged_health(gpus: Collection[GpuHealth]) -> str:
    """What the GPUs of a machine say of it: `healthy`, `unhealthy`, or neither."""
    if any(health in UNHEALTHY_STATES for health in gpus):
        return "unhealthy"
    return "healthy" if gpus and set(gpus) == {GpuHealth.HEALTHY} else "unknown"


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
