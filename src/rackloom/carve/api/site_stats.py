"""The numbers of machines and GPUs of a site, for its provider.

A machine counts as healthy when the reading of its domain that counts lists every GPU of it as healthy, and
as unhealthy when it lists one of them as one that placement avoids. A machine of which neither is known
counts in neither: a missing one, or one with an unlisted GPU. So these two numbers may add up to less than
the total.

The allocations of a site may promise more machines than there are. What is promised to tenants beyond the
machines that are not in use is left out.
"""

from collections import Counter
from collections.abc import Collection

import sqlalchemy as sa

from rackloom.carve.api import wire
from rackloom.carve.api.wire import Json
from rackloom.carve.store.schema import machine
from rackloom.carve.tenancy import catalog, statistics
from rackloom.carve.tenancy.gpu_health import shown_gpu_healths
from rackloom.carve.tenancy.placement import UNHEALTHY_STATES
from rackloom.core.partitions.domain import GpuHealth
from rackloom.core.place.promises import still_promised


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
    used: dict[str, Counter[tuple[str, str]]] = {site_id: Counter() for site_id in site_ids}
    """By tenant and instance type."""
    for row in rows:
        statuses[row.site_id][row.shown_status] += 1
        by_health = healths[row.site_id].setdefault(row.shown_status, Counter())
        by_health[_judged_health(gpus[row.id].values())] += 1
        if row.instance_id is not None:
            used[row.site_id][row.tenant_id, row.instance_type_id] += 1
    allocated: dict[str, Counter[tuple[str, str]]] = {site_id: Counter() for site_id in site_ids}
    for given in statistics.allocated_machines(conn, site_ids):
        allocated[given.site_id][given.tenant_id, given.type_id] += given.machines
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


def _health_shape(counts: Counter[str]) -> Json:
    return {"healthy": counts["healthy"], "unhealthy": counts["unhealthy"]}


def _allocation_shape(
    total: int, used: Counter[tuple[str, str]], allocated: Counter[tuple[str, str]]
) -> Json:
    unused = total - used.total()
    promised = min(still_promised(allocated, used), unused)
    return {
        "allocatedInUse": used.total(),
        "allocatedNotInUse": promised,
        "unallocated": unused - promised,
    }
