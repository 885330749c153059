"""What of a site a tenant may use: machines of an instance type, up to a number."""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from rackloom.carve.site import events, history, sites
from rackloom.carve.site.events import Kind, Note
from rackloom.carve.site.problems import Kind as Refusal
from rackloom.carve.site.problems import Rejected, conflict, forbidden, invalid, not_found
from rackloom.carve.site.tables import (
    allocation,
    allocation_constraint,
    instance,
    instance_type,
    machine,
    site,
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


def remaining(conn: sa.Connection, tenant_id: str) -> dict[str, int]:
    """Instance type -> how many more machines of it the tenant's allocations hold."""
    table = allocation_constraint
    given = (
        sa.select(table.c.instance_type_id, sa.func.sum(table.c.value))
        .join(allocation, allocation.c.id == table.c.allocation_id)
        .where(allocation.c.tenant_id == tenant_id)
        .group_by(table.c.instance_type_id)
    )
    used = (
        sa.select(instance.c.instance_type_id, sa.func.count())
        .where(instance.c.tenant_id == tenant_id)
        .group_by(instance.c.instance_type_id)
    )
    taken: dict[str, int] = {row[0]: row[1] for row in conn.execute(used)}
    return {row[0]: row[1] - taken.get(row[0], 0) for row in conn.execute(given)}


def get(conn: sa.Connection, provider_id: str, allocation_id: str) -> sa.Row[Any]:
    """An allocation that the provider gave; refused when there is none of that id."""
    mine = (
        sa.select(allocation)
        .join(site, site.c.id == allocation.c.site_id)
        .where(allocation.c.id == allocation_id, site.c.provider_id == provider_id)
    )
    found = conn.execute(mine).one_or_none()
    if found is None:
        raise not_found("Could not find Allocation with specified ID")
    return found


def update(
    conn: sa.Connection,
    provider_id: str,
    allocation_id: str,
    *,
    name: str | None,
    description: str | None,
    now: float,
) -> None:
    """Change the name or the description; None leaves it."""
    row = get(conn, provider_id, allocation_id)
    wanted = {"name": name, "description": description}
    changes = {key: value for key, value in wanted.items() if value not in (None, row._mapping[key])}
    if "name" in changes:
        _check_name(conn, row.tenant_id, row.site_id, str(name))
    if changes:
        mine = sa.update(allocation).where(allocation.c.id == allocation_id)
        conn.execute(mine.values(**changes, updated=now))


def set_constraint(
    conn: sa.Connection, provider_id: str, allocation_id: str, constraint_id: str, value: int, now: float
) -> None:
    """Change how many machines a constraint gives; never fewer than the tenant uses."""
    row = get(conn, provider_id, allocation_id)
    table = allocation_constraint
    mine = sa.and_(table.c.id == constraint_id, table.c.allocation_id == allocation_id)
    found = conn.execute(sa.select(table).where(mine)).one_or_none()
    if found is None:
        raise not_found("Could not find Allocation Constraint with specified ID")
    _check_spare(conn, row.tenant_id, {found.instance_type_id: found.value - value})
    conn.execute(sa.update(table).where(mine).values(value=value, updated=now))


def delete(conn: sa.Connection, provider_id: str, allocation_id: str, now: float) -> None:
    """Take an allocation back, when the tenant uses none of it."""
    row = get(conn, provider_id, allocation_id)
    given = {one.instance_type_id: one.value for one in constraints_of(conn, [allocation_id])}
    _check_spare(conn, row.tenant_id, given)
    mine = allocation_constraint.c.allocation_id == allocation_id
    conn.execute(sa.delete(allocation_constraint).where(mine))
    conn.execute(sa.delete(allocation).where(allocation.c.id == allocation_id))
    history.forget(conn, [allocation_id])
    events.publish(conn, row.tenant_id, [Note(Kind.ALLOCATION, allocation_id, events.DELETED)], now)


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


def _check_name(conn: sa.Connection, tenant_id: str, site_id: str, name: str) -> None:
    same = sa.select(allocation.c.id).where(
        allocation.c.tenant_id == tenant_id, allocation.c.site_id == site_id, allocation.c.name == name
    )
    existing = conn.execute(same).scalar_one_or_none()
    if existing is not None:
        raise conflict("An Allocation with specified name already exists for Tenant at Site", id=existing)


def _check_spare(conn: sa.Connection, tenant_id: str, less: Mapping[str, int]) -> None:
    left = remaining(conn, tenant_id)
    for type_id, value in sorted(less.items()):
        if value > left.get(type_id, 0):
            raise Rejected(
                Refusal.CONFLICT,
                f"{value - left.get(type_id, 0)} machines of Instance Type {type_id} are in use",
                nearest_fix="release Instances of that Instance Type first",
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
    _check_name(conn, tenant_id, site_id, name)
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
    note = Note(Kind.ALLOCATION, new, Status.REGISTERED, "Allocation is in force")
    events.tell(conn, tenant_id, note, now)
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
