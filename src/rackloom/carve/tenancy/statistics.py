"""Statistics: machines, instances and VPCs by status, and the machines of each type by organisation.

The database counts. Statuses are those that the lists show, so that a statistic and a list never disagree: a
machine with an instance is always InUse, and an instance whose last reading is outdated is
Unknown and not Ready.
"""

from collections import Counter
from collections.abc import Collection
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.observation import latest
from rackloom.carve.store.prepared import owned_by
from rackloom.carve.store.schema import allocation, allocation_constraint, instance, machine, tenant, vpc
from rackloom.carve.tenancy import catalog, outdated
from rackloom.core.place.instance_trays import still_promised

StatusCounts = Counter[str]
"""Status -> how many."""


class AllocatedMachines(msgspec.Struct, frozen=True):
    """Machines of an instance type that an allocation gives to a tenant."""

    allocation_id: str
    site_id: str
    name: str
    tenant_id: str
    org: str
    type_id: str
    machines: int


class MachineUse(msgspec.Struct, frozen=True):
    """The machines of some sites, and their allocations."""

    by_type: dict[str | None, StatusCounts]
    """By instance type. None stands for machines without one."""
    used: dict[tuple[str, str], StatusCounts]
    """Those that carry instances, by tenant and instance type."""
    allocations: list[AllocatedMachines]

    def used_of_type(self, type_id: str) -> StatusCounts:
        """The machines of a type that carry instances of any tenant."""
        return sum((counts for (_, of), counts in self.used.items() if of == type_id), Counter())

    def max_allocatable(self, type_id: str) -> int:
        """Ready machines of a type that no allocation has promised yet."""
        allocated, used = Counter[str](), Counter[str]()
        for given in self.allocations:
            if given.type_id == type_id:
                allocated[given.tenant_id] += given.machines
        for (tenant_id, of), counts in self.used.items():
            if of == type_id:
                used[tenant_id] += counts.total()
        promised = still_promised(allocated, used)
        return max(0, self.by_type.get(type_id, Counter())["Ready"] - promised)


def count_instances(conn: sa.Connection, tenant_id: str, valid_from: float) -> StatusCounts:
    """The instances of a tenant. Readings from before `valid_from` do not count."""
    status = outdated.shown_status_column(instance, latest.outdated_domains(conn, valid_from))
    return _count(conn, sa.select(status, sa.func.count()).where(owned_by(instance.c.tenant_id, tenant_id)))


def count_vpcs(conn: sa.Connection, tenant_id: str) -> StatusCounts:
    """The VPCs of a tenant."""
    return _count(conn, sa.select(vpc.c.status, sa.func.count()).where(owned_by(vpc.c.tenant_id, tenant_id)))


def count_machines(conn: sa.Connection, condition: sa.ColumnElement[bool]) -> StatusCounts:
    """The machines that meet a condition."""
    listed = catalog.machine_listing().where(condition)
    return _count(conn, listed.with_only_columns(catalog.shown_machine_status, sa.func.count()))


def machine_use(conn: sa.Connection, site_ids: Collection[str]) -> MachineUse:
    """The machines of the sites by status, instance type and user, and their allocations."""
    status = catalog.shown_machine_status
    counted = (
        catalog.machine_listing()
        .where(machine.c.site_id.in_(site_ids))
        .with_only_columns(machine.c.instance_type_id, instance.c.tenant_id, status, sa.func.count())
        .group_by(machine.c.instance_type_id, instance.c.tenant_id, status)
    )
    use = MachineUse({}, {}, allocated_machines(conn, site_ids))
    for type_id, tenant_id, shown, machines in conn.execute(counted):
        use.by_type.setdefault(type_id, Counter())[shown] += machines
        if tenant_id is not None and type_id is not None:
            use.used.setdefault((tenant_id, type_id), Counter())[shown] += machines
    return use


def _count(conn: sa.Connection, counted: sa.Select[Any]) -> StatusCounts:
    """Count the rows of a query of (status, count)."""
    return Counter(dict(map(tuple, conn.execute(counted.group_by(counted.selected_columns[0])))))


def allocated_machines(conn: sa.Connection, site_ids: Collection[str]) -> list[AllocatedMachines]:
    """The allocations at the sites, by organisation, name and instance type."""
    given = (
        sa.select(
            allocation.c.id,
            allocation.c.site_id,
            allocation.c.name,
            allocation.c.tenant_id,
            tenant.c.org,
            allocation_constraint.c.instance_type_id,
            allocation_constraint.c.value,
        )
        .join(allocation_constraint, allocation_constraint.c.allocation_id == allocation.c.id)
        .join(tenant, tenant.c.id == allocation.c.tenant_id)
        .where(allocation.c.site_id.in_(site_ids))
        .order_by(tenant.c.org, allocation.c.name, allocation_constraint.c.instance_type_id)
    )
    return [AllocatedMachines(*row) for row in conn.execute(given)]
