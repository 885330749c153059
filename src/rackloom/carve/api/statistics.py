"""REST: statistics of a tenant, of a provider, and of the machines of its sites by instance type and tenant.

Paths and shapes are those of NVIDIA Infra Controller. It counts objects that do not exist here, too: subnets,
IP blocks and tenant accounts are always 0. Instances have more statuses here. Each has its number, so the
numbers of instances add up to the total.

`machine_stats` has the numbers of machines of a site. A machine counts as healthy if the valid reading of its
domain lists all its GPUs as healthy, and as unhealthy if it lists one of them as one that placement avoids.
It counts as neither if neither is known: it is missing, or has an unlisted GPU. So these two numbers may add
up to less than the total. The allocations of a site may promise more machines than there are. A promise
beyond the machines that are not in use is left out.
"""

from collections import Counter
from collections.abc import Collection
from uuid import UUID

import sqlalchemy as sa

from rackloom.carve.api import routing, wire
from rackloom.carve.api.auth import Caller
from rackloom.carve.api.routing import Deps, Params, ProviderReader, TenantAdmin
from rackloom.carve.api.wire import Json
from rackloom.carve.store.schema import instance_type, machine, site
from rackloom.carve.store.values import forbidden
from rackloom.carve.tenancy import catalog, entitlements, statistics
from rackloom.carve.tenancy.outdated import shown_gpu_healths
from rackloom.carve.tenancy.placement import UNHEALTHY_STATES
from rackloom.carve.tenancy.statistics import AllocatedMachines, MachineUse, StatusCounts
from rackloom.core.partitions.domain import GpuHealth
from rackloom.core.place.instance_trays import still_promised

# Query parameters.


class SiteStatsQuery(wire.Query):
    """The site of the statistics. Without one, all sites of the provider."""

    site_id: UUID | None = None


# Response models.


class ProviderMachineStats(wire.Answer):
    """Machines of a provider by status."""

    total: int
    initializing: int
    reset: int
    ready: int
    in_use: int
    decommissioned: int
    unknown: int
    error: int
    maintenance: int


class MachineStatusBreakdown(wire.Answer):
    """Machines by status."""

    total: int
    initializing: int
    ready: int
    in_use: int
    error: int
    maintenance: int
    unknown: int


class InstanceStats(wire.Answer):
    """Instances by status. `unknown` are those without a valid reading."""

    total: int
    pending: int
    provisioning: int
    configuring: int
    ready: int
    repairing: int
    updating: int
    registering: int
    terminating: int
    error: int
    unknown: int


class ObjectStats(wire.Answer):
    """Objects by status."""

    total: int
    pending: int
    provisioning: int
    ready: int
    error: int
    deleting: int


class TenantAccountStats(wire.Answer):
    """Tenant accounts by status. There are none."""

    total: int
    pending: int
    invited: int
    ready: int
    error: int


class TenantStats(wire.Answer):
    """The objects of a tenant, by status."""

    instance: InstanceStats
    vpc: ObjectStats
    subnet: ObjectStats
    tenant_account: TenantAccountStats


class ProviderStats(wire.Answer):
    """The objects of a provider, by status."""

    machine: ProviderMachineStats
    ip_block: ObjectStats
    tenant_account: TenantAccountStats


class MachineSummary(wire.Answer):
    """Machines with and without an instance type."""

    assigned: MachineStatusBreakdown
    unassigned: MachineStatusBreakdown


class TypeTenantAllocation(wire.Answer):
    """The machines of an instance type that one allocation gives."""

    id: UUID
    name: str
    allocated: int


class TypeTenant(wire.Answer):
    """The machines of an instance type that a tenant was allocated, and those that it uses."""

    id: UUID
    name: str
    allocated: int
    used_machine_stats: MachineStatusBreakdown
    allocations: list[TypeTenantAllocation]


class MachineTypeStats(wire.Answer):
    """The machines of an instance type, and the tenants that have them."""

    id: UUID
    name: str
    assigned_machine_stats: MachineStatusBreakdown
    allocated: int
    max_allocatable: int
    used_machine_stats: MachineStatusBreakdown
    tenants: list[TypeTenant]


class TenantTypeAllocation(wire.Answer):
    """The machines of an instance type that one allocation gives."""

    id: UUID
    name: str
    total: int


class TenantTypeStats(wire.Answer):
    """The machines of an instance type that a tenant was allocated, and those that it uses."""

    id: UUID
    name: str
    allocated: int
    used_machine_stats: MachineStatusBreakdown
    max_allocatable: int
    allocations: list[TenantTypeAllocation]


class TenantTypes(wire.Answer):
    """A tenant, with the instance types of its allocated machines."""

    id: UUID
    org: str
    org_display_name: str
    instance_types: list[TenantTypeStats]


# From counts to responses.


def _counts_shape(model: type[wire.Answer], counts: StatusCounts) -> Json:
    """The fields of `model`: `total`, and for each other field the number of the status of that name."""
    by_name = {status.lower(): count for status, count in counts.items()}
    fields = {name: by_name.get(name.replace("_", ""), 0) for name in model.model_fields}
    return wire.shape(model, None, **{**fields, "total": counts.total()})


def _breakdown(counts: StatusCounts | None) -> Json:
    return _counts_shape(MachineStatusBreakdown, counts or StatusCounts())


def _allocated(given: Collection[AllocatedMachines]) -> int:
    return sum(allocated.machines for allocated in given)


def _machine_type_shape(use: MachineUse, type_id: str, name: str) -> Json:
    given = [allocated for allocated in use.allocations if allocated.type_id == type_id]
    tenants = {allocated.tenant_id: allocated.org for allocated in given}
    return {
        "id": type_id,
        "name": name,
        "assignedMachineStats": _breakdown(use.by_type.get(type_id)),
        "allocated": _allocated(given),
        "maxAllocatable": use.max_allocatable(type_id),
        "usedMachineStats": _breakdown(use.used_of_type(type_id)),
        "tenants": [
            {
                "id": tenant_id,
                "name": org,
                "allocated": _allocated(mine),
                "usedMachineStats": _breakdown(use.used.get((tenant_id, type_id))),
                "allocations": [
                    {"id": part.allocation_id, "name": part.name, "allocated": part.machines} for part in mine
                ],
            }
            for tenant_id, org in tenants.items()
            for mine in [[part for part in given if part.tenant_id == tenant_id]]
        ],
    }


def _tenant_shape(use: MachineUse, tenant_id: str, org: str, names: dict[str, str]) -> Json:
    given = [allocated for allocated in use.allocations if allocated.tenant_id == tenant_id]
    types = dict.fromkeys(allocated.type_id for allocated in given)
    return {
        "id": tenant_id,
        "org": org,
        "orgDisplayName": org,
        "instanceTypes": [
            {
                "id": type_id,
                "name": names[type_id],
                "allocated": _allocated(mine),
                "usedMachineStats": _breakdown(use.used.get((tenant_id, type_id))),
                "maxAllocatable": use.max_allocatable(type_id),
                "allocations": [
                    {"id": part.allocation_id, "name": part.name, "total": part.machines} for part in mine
                ],
            }
            for type_id in types
            for mine in [[part for part in given if part.type_id == type_id]]
        ],
    }


# Routes.


router = routing.Operations()


# Machines of a site.


class HealthCounts(wire.Answer):
    """Machines by health. Machines of unknown health are in neither number."""

    healthy: int
    unhealthy: int


class AllocationCounts(wire.Answer):
    """Machines by allocation."""

    allocated_in_use: int
    allocated_not_in_use: int
    unallocated: int


class MachineStats(wire.Answer):
    """The machines of a site by status, health and allocation. Statuses of no machine are left out."""

    total: int
    total_by_status: dict[str, int]
    total_by_health: HealthCounts
    total_by_status_and_health: dict[str, HealthCounts]
    total_by_allocation: AllocationCounts


def machine_stats(conn: sa.Connection, site_ids: Collection[str], valid_from: float) -> dict[str, Json]:
    """The `MachineStats` of each site. Readings from before `valid_from` are ignored."""
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
    """The health of a machine, judged by its GPUs: `healthy`, `unhealthy` or `unknown`."""
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
    return {"allocatedInUse": used.total(), "allocatedNotInUse": promised, "unallocated": unused - promised}


@router.get("/tenant/current/stats", "get-current-tenant-stats", TenantStats)
def tenant_stats(conn: sa.Connection, deps: Deps, caller: TenantAdmin) -> Json:
    """The instances and VPCs of the caller by status."""
    mine = entitlements.tenant_id_of(conn, caller.org)
    instances = statistics.count_instances(conn, mine, deps.valid_from())
    nothing = StatusCounts()
    return {
        "instance": _counts_shape(InstanceStats, instances),
        "vpc": _counts_shape(ObjectStats, statistics.count_vpcs(conn, mine)),
        "subnet": _counts_shape(ObjectStats, nothing),
        "tenantAccount": _counts_shape(TenantAccountStats, nothing),
    }


@router.get(
    "/infrastructure-provider/current/stats", "get-current-infrastructure-provider-stats", ProviderStats
)
def provider_stats(conn: sa.Connection, caller: ProviderReader) -> Json:
    """The machines of the provider by status."""
    mine = entitlements.operates_machine(entitlements.provider_id_of(conn, caller.org))
    return {
        "machine": _counts_shape(ProviderMachineStats, statistics.count_machines(conn, mine)),
        "ipBlock": _counts_shape(ObjectStats, StatusCounts()),
        "tenantAccount": _counts_shape(TenantAccountStats, StatusCounts()),
    }


@router.get("/tenant/instance-type/stats", "get-tenant-instance-type-stats", list[TenantTypes])
def tenant_type_stats(
    conn: sa.Connection, caller: ProviderReader, query: Params[SiteStatsQuery]
) -> list[Json]:
    """The machines of each instance type that each tenant was allocated, and those that it uses."""
    use, names = _use(conn, caller, query)
    tenants = {given.tenant_id: given.org for given in use.allocations}
    return [_tenant_shape(use, tenant_id, org, names) for tenant_id, org in tenants.items()]


@router.get("/machine/instance-type/stats/summary", "get-machine-instance-type-stats-summary", MachineSummary)
def machine_summary(conn: sa.Connection, caller: ProviderReader, query: Params[SiteStatsQuery]) -> Json:
    """The machines with and without an instance type by status."""
    by_type = _use(conn, caller, query)[0].by_type
    unassigned = by_type.pop(None, StatusCounts())
    assigned = sum(by_type.values(), StatusCounts())
    return {"assigned": _breakdown(assigned), "unassigned": _breakdown(unassigned)}


@router.get("/machine/instance-type/stats", "get-machine-instance-type-stats", list[MachineTypeStats])
def machine_type_stats(
    conn: sa.Connection, caller: ProviderReader, query: Params[SiteStatsQuery]
) -> list[Json]:
    """The machines of each instance type by status, and the tenants that have them."""
    use, names = _use(conn, caller, query)
    return [_machine_type_shape(use, type_id, name) for type_id, name in names.items()]


def _use(conn: sa.Connection, caller: Caller, query: SiteStatsQuery) -> tuple[MachineUse, dict[str, str]]:
    """The machines of the wanted sites, and the names of their instance types."""
    provider_id = entitlements.provider_id_of(conn, caller.org)
    if query.site_id is None:
        mine = conn.execute(sa.select(site.c.id).where(site.c.provider_id == provider_id)).scalars()
        sites = list(mine)
    else:
        sites = [str(query.site_id)]
        if catalog.get_site(conn, sites[0]).provider_id != provider_id:
            raise forbidden("Site is not associated with org's Infrastructure Provider")
    types = sa.select(instance_type.c.id, instance_type.c.name).where(instance_type.c.site_id.in_(sites))
    names = {row.id: row.name for row in conn.execute(types.order_by(instance_type.c.created))}
    return statistics.machine_use(conn, sites), names
