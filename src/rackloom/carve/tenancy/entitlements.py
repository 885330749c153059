"""Who may use and operate what: tenants, providers, allocations with quotas, and operated hardware.

An organization can be a tenant, an infrastructure provider, or both. An allocation lets a tenant use a
number of machines of an instance type at a site. `check_quota` refuses more instances than the
allocations of that type hold; a constraint can never shrink below what the tenant uses.
`grant_everything` gives a tenant every machine of every type, for an embedded site.

A provider operates the machines of its sites, and the domains and chassis that they are wired to. A
domain or chassis without any known machine belongs to every provider that has a site, because someone
must be able to register it. Everything else is answered as not found.
"""

from collections.abc import Collection, Mapping
from typing import Any

import sqlalchemy as sa

from rackloom.carve.store import journal
from rackloom.carve.store.journal import EventKind, EventNote
from rackloom.carve.store.schema import (
    allocation,
    allocation_constraint,
    endpoint,
    instance,
    instance_type,
    machine,
    provider,
    site,
    tenant,
)
from rackloom.carve.store.values import IdFactory, Rejected, Status, conflict, forbidden, invalid, not_found
from rackloom.carve.store.values import RefusalKind as Refusal
from rackloom.carve.tenancy import catalog

# Organizations as tenants and providers.


# Built once: every request asks this.
_TENANT_BY_ORG = sa.select(tenant).where(tenant.c.org == sa.bindparam("org"))


_ORGS_OF_TENANTS = sa.select(tenant.c.id, tenant.c.org).where(
    tenant.c.id.in_(sa.bindparam("tenants", expanding=True))
)


def find_tenant(conn: sa.Connection, org: str) -> sa.Row[Any] | None:
    """The tenant of `org`, or None."""
    return conn.execute(_TENANT_BY_ORG, {"org": org}).one_or_none()


def get_tenant(conn: sa.Connection, org: str) -> sa.Row[Any]:
    """The tenant of `org`; refused when it has none."""
    found = find_tenant(conn, org)
    if found is None:
        raise invalid("Org does not have a Tenant associated")
    return found


def orgs_of_tenants(conn: sa.Connection, tenant_ids: Collection[str]) -> dict[str, str]:
    """The org of each tenant."""
    return {row.id: row.org for row in conn.execute(_ORGS_OF_TENANTS, {"tenants": list(tenant_ids)})}


def ensure_tenant(conn: sa.Connection, org: str, now: float, ids: IdFactory) -> sa.Row[Any]:
    """The tenant of `org`, made now if this is its first use. A provider may choose among its machines."""
    if find_tenant(conn, org) is None:
        row = {"id": ids(), "org": org, "created": now, "updated": now}
        provides = find_provider(conn, org) is not None
        conn.execute(sa.insert(tenant).values(**row, targeted_instance_creation=provides))
    return get_tenant(conn, org)


def find_provider(conn: sa.Connection, org: str) -> sa.Row[Any] | None:
    """The infrastructure provider of `org`, or None."""
    return conn.execute(sa.select(provider).where(provider.c.org == org)).one_or_none()


def get_provider(conn: sa.Connection, org: str) -> sa.Row[Any]:
    """The infrastructure provider of `org`; refused when it has none."""
    found = find_provider(conn, org)
    if found is None:
        raise invalid("Org does not have an Infrastructure Provider associated")
    return found


def orgs_of_providers(conn: sa.Connection, provider_ids: Collection[str]) -> dict[str, str]:
    """The org of each infrastructure provider."""
    rows = conn.execute(sa.select(provider.c.id, provider.c.org).where(provider.c.id.in_(provider_ids)))
    return {row.id: row.org for row in rows}


def ensure_provider(conn: sa.Connection, org: str, now: float, ids: IdFactory) -> sa.Row[Any]:
    """The infrastructure provider of `org`, made now if there is none."""
    if find_provider(conn, org) is None:
        conn.execute(sa.insert(provider).values(id=ids(), org=org, created=now, updated=now))
    return get_provider(conn, org)


# Hardware that a provider operates.


def operated_domains(provider_id: str) -> sa.Select[Any]:
    """Domain uuids that the provider operates."""
    known = sa.union(
        sa.select(machine.c.domain).where(machine.c.domain.is_not(None)),
        sa.select(endpoint.c.domain).where(endpoint.c.domain.is_not(None)),
    ).subquery()
    return sa.select(known.c.domain).where(
        _has_site(provider_id), ~_machine_of_other_provider(provider_id, machine.c.domain == known.c.domain)
    )


def operates_chassis(provider_id: str, chassis_serial: sa.ColumnElement[str] | str) -> sa.ColumnElement[bool]:
    """Whether the provider may say which controller speaks for a chassis."""
    others = _machine_of_other_provider(provider_id, machine.c.chassis_serial == chassis_serial)
    return sa.and_(_has_site(provider_id), ~others)


def operates_machine(provider_id: str) -> sa.ColumnElement[bool]:
    """Whether a row of the machine table is at a site of the provider."""
    return machine.c.site_id.in_(sa.select(site.c.id).where(site.c.provider_id == provider_id))


def check_operates_domain(conn: sa.Connection, provider_id: str, domain: str) -> None:
    """Refuse a domain that the provider does not operate."""
    mine = operated_domains(provider_id).subquery()
    if conn.execute(sa.select(mine.c.domain).where(mine.c.domain == domain)).first() is None:
        raise not_found("Could not find NVLink Domain with specified ID")


def check_operates_chassis(conn: sa.Connection, provider_id: str, chassis_serial: str) -> None:
    """Refuse a chassis that holds machines of another provider."""
    if not conn.execute(sa.select(operates_chassis(provider_id, chassis_serial))).scalar_one():
        raise not_found("Could not find Chassis with specified serial")


def check_operates_machine(conn: sa.Connection, provider_id: str, machine_id: str) -> None:
    """Refuse a machine of another provider."""
    mine = sa.select(machine.c.id).where(machine.c.id == machine_id, operates_machine(provider_id))
    if conn.execute(mine).first() is None:
        raise not_found("Could not find Machine with specified ID")


def _has_site(provider_id: str) -> sa.ColumnElement[bool]:
    return sa.exists().where(site.c.provider_id == provider_id)


def _machine_of_other_provider(provider_id: str, same: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:
    theirs = sa.select(machine.c.id).join(site, site.c.id == machine.c.site_id)
    return theirs.where(same, site.c.provider_id != provider_id).correlate_except(machine, site).exists()


# Allocations and quotas.


EVERYTHING_ALLOCATION = "everything"
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


def remaining_quota(conn: sa.Connection, tenant_id: str) -> dict[str, int]:
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


def get_allocation(conn: sa.Connection, provider_id: str, allocation_id: str) -> sa.Row[Any]:
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


def update_allocation(
    conn: sa.Connection,
    provider_id: str,
    allocation_id: str,
    *,
    name: str | None,
    description: str | None,
    now: float,
) -> None:
    """Change the name or the description; None leaves it."""
    row = get_allocation(conn, provider_id, allocation_id)
    wanted = {"name": name, "description": description}
    changes = {key: value for key, value in wanted.items() if value not in (None, row._mapping[key])}
    if "name" in changes:
        _check_allocation_name(conn, row.tenant_id, row.site_id, str(name))
    if changes:
        mine = sa.update(allocation).where(allocation.c.id == allocation_id)
        conn.execute(mine.values(**changes, updated=now))


def update_allocation_constraint(
    conn: sa.Connection, provider_id: str, allocation_id: str, constraint_id: str, value: int, now: float
) -> None:
    """Change how many machines a constraint gives; never fewer than the tenant uses."""
    row = get_allocation(conn, provider_id, allocation_id)
    table = allocation_constraint
    mine = sa.and_(table.c.id == constraint_id, table.c.allocation_id == allocation_id)
    found = conn.execute(sa.select(table).where(mine)).one_or_none()
    if found is None:
        raise not_found("Could not find Allocation Constraint with specified ID")
    _check_unused_quota(conn, row.tenant_id, {found.instance_type_id: found.value - value})
    conn.execute(sa.update(table).where(mine).values(value=value, updated=now))


def delete_allocation(conn: sa.Connection, provider_id: str, allocation_id: str, now: float) -> None:
    """Take an allocation back, when the tenant uses none of it."""
    row = get_allocation(conn, provider_id, allocation_id)
    given = {
        constraint.instance_type_id: constraint.value
        for constraint in constraints_of_allocations(conn, [allocation_id])
    }
    _check_unused_quota(conn, row.tenant_id, given)
    mine = allocation_constraint.c.allocation_id == allocation_id
    conn.execute(sa.delete(allocation_constraint).where(mine))
    conn.execute(sa.delete(allocation).where(allocation.c.id == allocation_id))
    journal.delete_histories(conn, [allocation_id])
    journal.publish_events(
        conn, row.tenant_id, [EventNote(EventKind.ALLOCATION, allocation_id, journal.EVENT_DELETED)], now
    )


def create_allocation(
    conn: sa.Connection,
    provider_id: str,
    *,
    name: str,
    description: str | None,
    tenant_id: str,
    site_id: str,
    types: Mapping[str, int],
    now: float,
    ids: IdFactory,
) -> str:
    """Give a tenant machines of `types` (instance type id -> number) at a site; returns the id."""
    if catalog.get_site(conn, site_id).provider_id != provider_id:
        raise forbidden("Site is not associated with org's Infrastructure Provider")
    if conn.execute(sa.select(tenant.c.id).where(tenant.c.id == tenant_id)).first() is None:
        raise invalid("Could not find Tenant with ID specified in request", tenantId="does not exist")
    _check_instance_types(conn, site_id, types)
    return _insert_allocation(conn, name, description, tenant_id, site_id, types, now, ids)


def grant_everything(conn: sa.Connection, tenant_id: str, now: float, ids: IdFactory) -> None:
    """Let a tenant use every machine of every type of every site; repeating it follows new machines."""
    for site_id, types in _machines_by_type(conn).items():
        existing = conn.execute(
            sa.select(allocation.c.id).where(
                allocation.c.tenant_id == tenant_id,
                allocation.c.site_id == site_id,
                allocation.c.name == EVERYTHING_ALLOCATION,
            )
        ).scalar_one_or_none()
        if existing is None:
            _insert_allocation(conn, EVERYTHING_ALLOCATION, None, tenant_id, site_id, types, now, ids)
        else:
            conn.execute(
                sa.delete(allocation_constraint).where(allocation_constraint.c.allocation_id == existing)
            )
            _insert_constraints(conn, existing, types, now, ids)


def constraints_of_allocations(conn: sa.Connection, allocation_ids: list[str]) -> list[sa.Row[Any]]:
    """The constraints of several allocations."""
    table = allocation_constraint
    found = sa.select(table).where(table.c.allocation_id.in_(allocation_ids)).order_by(table.c.id)
    return list(conn.execute(found).all())


def _check_instance_types(conn: sa.Connection, site_id: str, types: Mapping[str, int]) -> None:
    known = sa.select(instance_type.c.id).where(
        instance_type.c.site_id == site_id, instance_type.c.id.in_(list(types))
    )
    missing = sorted(set(types) - set(conn.execute(known).scalars()))
    if missing:
        raise invalid(
            "Could not find Instance Type with ID specified in request", resourceTypeId=", ".join(missing)
        )


def _check_allocation_name(conn: sa.Connection, tenant_id: str, site_id: str, name: str) -> None:
    same = sa.select(allocation.c.id).where(
        allocation.c.tenant_id == tenant_id, allocation.c.site_id == site_id, allocation.c.name == name
    )
    existing = conn.execute(same).scalar_one_or_none()
    if existing is not None:
        raise conflict("An Allocation with specified name already exists for Tenant at Site", id=existing)


def _check_unused_quota(conn: sa.Connection, tenant_id: str, less: Mapping[str, int]) -> None:
    left = remaining_quota(conn, tenant_id)
    for type_id, value in sorted(less.items()):
        if value > left.get(type_id, 0):
            raise Rejected(
                Refusal.CONFLICT,
                f"{value - left.get(type_id, 0)} machines of Instance Type {type_id} are in use",
                nearest_fix="release Instances of that Instance Type first",
            )


def _machines_by_type(conn: sa.Connection) -> dict[str, dict[str, int]]:
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


def _insert_allocation(
    conn: sa.Connection,
    name: str,
    description: str | None,
    tenant_id: str,
    site_id: str,
    types: Mapping[str, int],
    now: float,
    ids: IdFactory,
) -> str:
    _check_allocation_name(conn, tenant_id, site_id, name)
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
    note = EventNote(EventKind.ALLOCATION, new, Status.REGISTERED, "Allocation is in force")
    journal.record_and_publish(conn, tenant_id, note, now)
    _insert_constraints(conn, new, types, now, ids)
    return new


def _insert_constraints(
    conn: sa.Connection, allocation_id: str, types: Mapping[str, int], now: float, ids: IdFactory
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
