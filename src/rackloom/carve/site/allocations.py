"""What of a site a tenant may use: machines of an instance type, up to a number."""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from rackloom.carve.site import history, sites
from rackloom.carve.site.problems import conflict, forbidden, invalid
from rackloom.carve.site.tables import (
    allocation,
    allocation_constraint,
    instance,
    instance_type,
    machine,
    tenant,
)
from rackloom.carve.site.values import Ids, Status

EVERYTHING = "everything"
"""Name of the allocation that an embedded service gives a tenant at its first use."""


def check_site_access(conn: sa.Connection, tenant_id: str, site_id: str) -> None:
    """Refuse a tenant that has no allocation at the site."""
    found = sa.select(allocation.c.id).where(
        allocation.c.tenant_id == tenant_id, allocation.c.site_id == site_id
    )
    if conn.execute(found.limit(1)).first() is None:
        raise forbidden("Tenant does not have access to Site")


def check_quota(conn: sa.Connection, tenant_id: str, type_id: str, requested: int) -> None:
    """Refuse `requested` more machines of the type when the tenant's allocations do not hold them."""
    limit = conn.execute(
        sa.select(sa.func.sum(allocation_constraint.c.value))
        .join(allocation, allocation.c.id == allocation_constraint.c.allocation_id)
        .where(allocation.c.tenant_id == tenant_id, allocation_constraint.c.instance_type_id == type_id)
    ).scalar_one()
    if limit is None:
        raise forbidden("Tenant does not have an Allocation for Instance Type")
    current = conn.execute(
        sa.select(sa.func.count()).where(
            instance.c.tenant_id == tenant_id, instance.c.instance_type_id == type_id
        )
    ).scalar_one()
    if current + requested > limit:
        raise forbidden(
            "Tenant has reached the maximum number of Instances for Instance Type."
            f" Current: {current}, Requested: {requested}, Max: {limit}"
        )


def create(
    conn: sa.Connection,
    provider_id: str,
    *,
    name: str,
    description: str | None,
    tenant_id: str,
    site_id: str,
    types: Mapping[str, int],
    now: float,
    ids: Ids,
) -> str:
    """Give a tenant machines of `types` (instance type id -> number) at a site; returns the id."""
    if sites.get(conn, site_id).provider_id != provider_id:
        raise forbidden("Site is not associated with org's Infrastructure Provider")
    if conn.execute(sa.select(tenant.c.id).where(tenant.c.id == tenant_id)).first() is None:
        raise invalid("Could not find Tenant with ID specified in request", tenantId="does not exist")
    _check_types(conn, site_id, types)
    return _insert(conn, name, description, tenant_id, site_id, types, now, ids)


def grant_everything(conn: sa.Connection, tenant_id: str, now: float, ids: Ids) -> None:
    """Let a tenant use every machine of every type of every site; repeating it follows new machines."""
    for site_id, types in _all_types(conn).items():
        existing = conn.execute(
            sa.select(allocation.c.id).where(
                allocation.c.tenant_id == tenant_id,
                allocation.c.site_id == site_id,
                allocation.c.name == EVERYTHING,
            )
        ).scalar_one_or_none()
        if existing is None:
            _insert(conn, EVERYTHING, None, tenant_id, site_id, types, now, ids)
        else:
            conn.execute(
                sa.delete(allocation_constraint).where(allocation_constraint.c.allocation_id == existing)
            )
            _insert_constraints(conn, existing, types, now, ids)


def constraints_of(conn: sa.Connection, allocation_ids: list[str]) -> list[sa.Row[Any]]:
    """The constraints of several allocations."""
    table = allocation_constraint
    found = sa.select(table).where(table.c.allocation_id.in_(allocation_ids)).order_by(table.c.id)
    return list(conn.execute(found).all())


def _check_types(conn: sa.Connection, site_id: str, types: Mapping[str, int]) -> None:
    known = sa.select(instance_type.c.id).where(
        instance_type.c.site_id == site_id, instance_type.c.id.in_(list(types))
    )
    missing = sorted(set(types) - set(conn.execute(known).scalars()))
    if missing:
        raise invalid(
            "Could not find Instance Type with ID specified in request", resourceTypeId=", ".join(missing)
        )


def _all_types(conn: sa.Connection) -> dict[str, dict[str, int]]:
    counted = (
        sa.select(instance_type.c.site_id, instance_type.c.id, sa.func.count(machine.c.id))
        .join(machine, machine.c.instance_type_id == instance_type.c.id, isouter=True)
        .group_by(instance_type.c.site_id, instance_type.c.id)
        .order_by(instance_type.c.site_id, instance_type.c.id)
    )
    by_site: dict[str, dict[str, int]] = {}
    for site_id, type_id, machines in conn.execute(counted):
        by_site.setdefault(site_id, {})[type_id] = machines
    return by_site


def _insert(
    conn: sa.Connection,
    name: str,
    description: str | None,
    tenant_id: str,
    site_id: str,
    types: Mapping[str, int],
    now: float,
    ids: Ids,
) -> str:
    same = sa.select(allocation.c.id).where(
        allocation.c.tenant_id == tenant_id, allocation.c.site_id == site_id, allocation.c.name == name
    )
    existing = conn.execute(same).scalar_one_or_none()
    if existing is not None:
        raise conflict("An Allocation with specified name already exists for Tenant at Site", id=existing)
    new = ids()
    conn.execute(
        sa.insert(allocation).values(
            id=new,
            tenant_id=tenant_id,
            site_id=site_id,
            name=name,
            description=description,
            status=Status.REGISTERED,
            created=now,
            updated=now,
        )
    )
    history.record(conn, new, Status.REGISTERED, "Allocation is in force", now)
    _insert_constraints(conn, new, types, now, ids)
    return new


def _insert_constraints(
    conn: sa.Connection, allocation_id: str, types: Mapping[str, int], now: float, ids: Ids
) -> None:
    rows = [
        {
            "id": ids(),
            "allocation_id": allocation_id,
            "instance_type_id": type_id,
            "value": value,
            "created": now,
            "updated": now,
        }
        for type_id, value in types.items()
    ]
    if rows:
        conn.execute(sa.insert(allocation_constraint), rows)
