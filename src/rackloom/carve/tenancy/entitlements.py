"""Who may use and operate what: tenants, providers, allocations, operated hardware, and quotas of objects.

An organization can be a tenant, an infrastructure provider, or both. An allocation lets a tenant use a
number of machines of an instance type at a site. `core.place.instance_trays` defines the promise, beside the
trays that are reserved for the tenant and idle. `check_quota` refuses more instances than that; a
constraint can never shrink below what the tenant uses or has reserved.
`grant_everything` gives a tenant every machine of every type, for an embedded site.

A provider operates the machines of its sites, and the domains and chassis that they are wired to. A
domain or chassis without any known machine belongs to every provider that has a site, because someone
must be able to register it. Everything else is answered as not found.

Quotas bound the records that a tenant can create beside and on its machines: logical partitions, VPCs,
instances and interfaces, and how many trays may wait for it in reservations. Every kind has a default. A
provider at whose sites the tenant has an allocation can set another limit for it. A limit below what the
tenant has already takes nothing away, and refuses anything new.

An object counts until its record is gone: also one in deletion, and an interface whose GPU was not yet
observed outside its partition. `check_object_quota` reads the count in the transaction that creates the
object. Transactions are serializable, so that two of them cannot exceed a limit together. Triggers of the
database keep the counts (`tenant_total`): to count rows would take longer the more a tenant has.
"""

from collections.abc import Collection, Mapping
from enum import StrEnum
from functools import cache
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.store import journal
from rackloom.carve.store.journal import EventKind, EventNote
from rackloom.carve.store.prepared import (
    PreparedStatement,
    delete_rows,
    find_row,
    has_row,
    insert_row,
    owned_by,
    require,
    require_unused,
    update_rows,
)
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
    tenant_quota,
    tenant_total,
)
from rackloom.carve.store.values import IdFactory, Status, conflict, forbidden, invalid, not_found
from rackloom.carve.tenancy import catalog
from rackloom.carve.tenancy.placement import count_reserved_trays, idle_reserved_machines
from rackloom.core.place.instance_trays import AllocationUse

# Organizations as tenants and providers.


def find_tenant(conn: sa.Connection, org: str) -> sa.Row[Any] | None:
    """The tenant of `org`, or None."""
    return find_row(conn, tenant, org=org)


def get_tenant(conn: sa.Connection, org: str) -> sa.Row[Any]:
    """The tenant of `org`; refused when it has none."""
    if (row := find_tenant(conn, org)) is None:
        raise invalid("Org does not have a Tenant associated")
    return row


def tenant_id_of(conn: sa.Connection, org: str) -> str:
    """The id of the tenant of `org`; refused when it has none."""
    return str(get_tenant(conn, org).id)


def tenant_id_read(conn: sa.Connection, found: sa.Row[Any] | None, org: str) -> str:
    """As `tenant_id_of`, from `found.caller` if a statement read it beside its own row."""
    return str(found.caller) if found is not None and found.caller else tenant_id_of(conn, org)


def ensure_tenant(conn: sa.Connection, org: str, now: float, ids: IdFactory) -> sa.Row[Any]:
    """The tenant of `org`, made now if this is its first use. A provider may choose among its machines."""
    if find_tenant(conn, org) is None:
        provides = find_provider(conn, org) is not None
        times = {"created": now, "updated": now}
        insert_row(conn, tenant, id=ids(), org=org, targeted_instance_creation=provides, **times)
    return get_tenant(conn, org)


def find_provider(conn: sa.Connection, org: str) -> sa.Row[Any] | None:
    """The infrastructure provider of `org`, or None."""
    return find_row(conn, provider, org=org)


def get_provider(conn: sa.Connection, org: str) -> sa.Row[Any]:
    """The infrastructure provider of `org`; refused when it has none."""
    if (row := find_provider(conn, org)) is None:
        raise invalid("Org does not have an Infrastructure Provider associated")
    return row


def provider_id_of(conn: sa.Connection, org: str) -> str:
    """The id of the infrastructure provider of `org`; refused when it has none."""
    return str(get_provider(conn, org).id)


def orgs_by_id(conn: sa.Connection, table: sa.Table, ids: Collection[str]) -> dict[str, str]:
    """The org of each tenant or infrastructure provider; `table` says which."""
    if len(ids) == 1:
        (only,) = ids
        row = find_row(conn, table, id=only)
        return {} if row is None else {only: row.org}
    return {row[0]: row[1] for row in conn.execute(_select_orgs(table), {"ids": list(ids)}).all()}


@cache
def _select_orgs(table: sa.Table) -> sa.Select[Any]:
    return sa.select(table.c.id, table.c.org).where(table.c.id.in_(sa.bindparam("ids", expanding=True)))


def ensure_provider(conn: sa.Connection, org: str, now: float, ids: IdFactory) -> sa.Row[Any]:
    """The infrastructure provider of `org`, made now if there is none."""
    if find_provider(conn, org) is None:
        insert_row(conn, provider, id=ids(), org=org, created=now, updated=now)
    return get_provider(conn, org)


# A tenant's own objects.


def own_row(conn: sa.Connection, table: sa.Table, tenant_id: str, object_id: str, kind: str) -> sa.Row[Any]:
    """The tenant's object. Raises Rejected: not found, or forbidden for another tenant's."""
    return require_own(find_row(conn, table, id=object_id), tenant_id, kind)


def require_own(row: sa.Row[Any] | None, tenant_id: str, kind: str) -> sa.Row[Any]:
    """`row`, if it is the tenant's object. Raises Rejected as `own_row` does."""
    found = require(row, f"Could not find {kind} with specified ID")
    if found.tenant_id != tenant_id:
        raise forbidden(f"{kind} is not owned by Tenant")
    return found


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
    """Whether the provider may register the controller of a chassis."""
    others = _machine_of_other_provider(provider_id, machine.c.chassis_serial == chassis_serial)
    return sa.and_(_has_site(provider_id), ~others)


def operates_machine(provider_id: str) -> sa.ColumnElement[bool]:
    """Whether a row of the machine table is at a site of the provider."""
    return machine.c.site_id.in_(sa.select(site.c.id).where(site.c.provider_id == provider_id))


def check_operates_domain(conn: sa.Connection, org: str, domain: str) -> None:
    """Refuse a domain that the provider does not operate."""
    mine = operated_domains(provider_id_of(conn, org)).subquery()
    if conn.execute(sa.select(mine.c.domain).where(mine.c.domain == domain)).first() is None:
        raise not_found("Could not find NVLink Domain with specified ID")


def check_operates_chassis(conn: sa.Connection, org: str, chassis_serial: str) -> None:
    """Refuse a chassis that holds machines of another provider."""
    if not conn.execute(sa.select(operates_chassis(provider_id_of(conn, org), chassis_serial))).scalar_one():
        raise not_found("Could not find Chassis with specified serial")


def check_operates_machine(conn: sa.Connection, org: str, machine_id: str) -> None:
    """Refuse a machine of another provider."""
    mine = sa.select(machine.c.id).where(
        machine.c.id == machine_id, operates_machine(provider_id_of(conn, org))
    )
    if conn.execute(mine).first() is None:
        raise not_found("Could not find Machine with specified ID")


def _has_site(provider_id: str) -> sa.ColumnElement[bool]:
    return sa.exists().where(site.c.provider_id == provider_id)


def _machine_of_other_provider(provider_id: str, same: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:
    theirs = sa.select(machine.c.id).join(site, site.c.id == machine.c.site_id)
    return theirs.where(same, site.c.provider_id != provider_id).correlate_except(machine, site).exists()


# Allocations and quotas.


EVERYTHING_ALLOCATION = "everything"
"""Name of the allocation that an embedded service grants a tenant at its first request."""


NO_ACCESS = "Tenant does not have access to Site"


def check_site_access(conn: sa.Connection, tenant_id: str, site_id: str) -> None:
    """Refuse a tenant that has no allocation at the site."""
    if not has_row(conn, allocation, tenant_id=tenant_id, site_id=site_id):
        raise forbidden(NO_ACCESS)


def allocation_uses(conn: sa.Connection, tenant_id: str, now: float) -> dict[str, AllocationUse]:
    """What the tenant may use, by the instance types that it uses, or has allocated or reserved."""
    type_id = allocation_constraint.c.instance_type_id
    summed = (
        sa.select(type_id, sa.func.sum(allocation_constraint.c.value))
        .join(allocation, allocation.c.id == allocation_constraint.c.allocation_id)
        .where(owned_by(allocation.c.tenant_id, tenant_id))
        .group_by(type_id)
    )
    allocated: dict[str, int] = dict(map(tuple, conn.execute(summed)))
    type_id = instance.c.instance_type_id
    counted = (
        sa.select(type_id, sa.func.count()).where(owned_by(instance.c.tenant_id, tenant_id)).group_by(type_id)
    )
    used: dict[str, int] = dict(map(tuple, conn.execute(counted)))
    idle = idle_reserved_machines(conn, tenant_id, now)
    return {
        type_id: AllocationUse(allocated.get(type_id), used.get(type_id, 0), idle.get(type_id, 0))
        for type_id in {**allocated, **used, **idle}
    }


def check_quota(use: AllocationUse, requested: int, reserved: int) -> None:
    """Refuse `requested` more machines, of which `reserved` wait for the tenant, beyond what it may use."""
    if use.allocated is None:
        raise forbidden("Tenant does not have an Allocation for Instance Type")
    if not use.lacking(requested, reserved):
        return
    numbers = f"Current: {use.used}, Requested: {requested}, Max: {use.allocated}"
    reason = f"Tenant has reached the maximum number of Instances for Instance Type. {numbers}"
    if use.lacking(requested, requested):
        raise forbidden(reason)
    raise forbidden(
        f"{reason}, Reserved: {use.idle}",
        nearest_fix="use the machines that are reserved for the organisation, or have the provider of the"
        " site shrink the reservation or allocate more",
    )


def get_allocation(conn: sa.Connection, provider_id: str, allocation_id: str) -> sa.Row[Any]:
    """An allocation that the provider granted. Raises Rejected (not found)."""
    mine = (
        sa.select(allocation)
        .join(site, site.c.id == allocation.c.site_id)
        .where(allocation.c.id == allocation_id, site.c.provider_id == provider_id)
    )
    return require(conn.execute(mine).one_or_none(), "Could not find Allocation with specified ID")


def update_allocation(
    conn: sa.Connection,
    provider_id: str,
    allocation_id: str,
    *,
    name: str | None,
    description: str | None,
    now: float,
) -> None:
    """Change the name or the description. None leaves it."""
    row = get_allocation(conn, provider_id, allocation_id)
    changes = catalog.changed_values(row, name=name, description=description)
    if "name" in changes:
        _check_allocation_name(conn, row.tenant_id, row.site_id, str(name))
    if changes:
        update_rows(conn, allocation, {"id": allocation_id}, **changes, updated=now)


def update_allocation_constraint(
    conn: sa.Connection, provider_id: str, allocation_id: str, constraint_id: str, value: int, now: float
) -> None:
    """Change how many machines a constraint allots; never fewer than the tenant uses or has reserved."""
    row = get_allocation(conn, provider_id, allocation_id)
    found = find_row(conn, allocation_constraint, id=constraint_id, allocation_id=allocation_id)
    constraint = require(found, "Could not find Allocation Constraint with specified ID")
    _check_unused_quota(conn, row.tenant_id, {constraint.instance_type_id: constraint.value - value}, now)
    update_rows(conn, allocation_constraint, {"id": constraint_id}, value=value, updated=now)


def delete_allocation(conn: sa.Connection, provider_id: str, allocation_id: str, now: float) -> None:
    """Delete an allocation of which the tenant uses nothing and has nothing reserved."""
    row = get_allocation(conn, provider_id, allocation_id)
    constraints = constraints_of_allocations(conn, [allocation_id])
    allocated = {constraint.instance_type_id: constraint.value for constraint in constraints}
    _check_unused_quota(conn, row.tenant_id, allocated, now)
    delete_rows(conn, allocation_constraint, allocation_id=allocation_id)
    delete_rows(conn, allocation, id=allocation_id)
    journal.delete_histories(conn, [allocation_id])
    journal.publish_events(
        conn, row.tenant_id, [EventNote(EventKind.ALLOCATION, allocation_id, journal.EVENT_DELETED)], now
    )


class NewAllocation(msgspec.Struct, frozen=True):
    """Machines to give to a tenant at a site."""

    tenant_id: str
    site_id: str
    name: str
    description: str | None = None
    types: Mapping[str, int] = {}
    """Instance type id -> number of machines."""


def create_allocation(
    conn: sa.Connection, provider_id: str, wanted: NewAllocation, now: float, ids: IdFactory
) -> str:
    """Give a tenant machines at a site. Returns the id of the allocation."""
    if catalog.get_site(conn, wanted.site_id).provider_id != provider_id:
        raise forbidden("Site is not associated with org's Infrastructure Provider")
    if not has_row(conn, tenant, id=wanted.tenant_id):
        raise invalid("Could not find Tenant with ID specified in request", tenantId="does not exist")
    known = sa.select(instance_type.c.id).where(
        instance_type.c.site_id == wanted.site_id, instance_type.c.id.in_(list(wanted.types))
    )
    if missing := sorted(set(wanted.types) - set(conn.execute(known).scalars())):
        raise invalid(
            "Could not find Instance Type with ID specified in request", resourceTypeId=", ".join(missing)
        )
    return _insert_allocation(conn, wanted, now, ids)


def grant_everything(conn: sa.Connection, tenant_id: str, now: float, ids: IdFactory) -> None:
    """Let a tenant use every machine of every type of every site; repeating it follows new machines."""
    counted = (
        sa.select(instance_type.c.site_id, instance_type.c.id, sa.func.count(machine.c.id))
        .join(machine, machine.c.instance_type_id == instance_type.c.id, isouter=True)
        .group_by(instance_type.c.site_id, instance_type.c.id)
        .order_by(instance_type.c.site_id, instance_type.c.id)
    )
    by_site: dict[str, dict[str, int]] = {}
    for site_id, type_id, machines in conn.execute(counted):
        by_site.setdefault(site_id, {})[type_id] = machines
    for site_id, types in by_site.items():
        existing = find_row(
            conn, allocation, tenant_id=tenant_id, site_id=site_id, name=EVERYTHING_ALLOCATION
        )
        if existing is None:
            wanted = NewAllocation(tenant_id, site_id, EVERYTHING_ALLOCATION, types=types)
            _insert_allocation(conn, wanted, now, ids)
        else:
            delete_rows(conn, allocation_constraint, allocation_id=existing.id)
            _insert_constraints(conn, existing.id, types, now, ids)


def constraints_of_allocations(conn: sa.Connection, allocation_ids: list[str]) -> list[sa.Row[Any]]:
    """The constraints of several allocations, by id."""
    mine = allocation_constraint.c.allocation_id.in_(allocation_ids)
    # If the database sorted them, it could walk over all constraints in the order of their ids.
    return sorted(conn.execute(sa.select(allocation_constraint).where(mine)).all(), key=lambda row: row.id)


def _check_allocation_name(conn: sa.Connection, tenant_id: str, site_id: str, name: str) -> None:
    existing = find_row(conn, allocation, tenant_id=tenant_id, site_id=site_id, name=name)
    require_unused(existing, "An Allocation with specified name already exists for Tenant at Site")


def _check_unused_quota(conn: sa.Connection, tenant_id: str, less: Mapping[str, int], now: float) -> None:
    uses = allocation_uses(conn, tenant_id, now)
    for type_id, value in sorted(less.items()):
        use = uses[type_id]
        # A constraint may always grow, also where more is in use or reserved than allocated.
        if value > max(0, use.unused):
            raise conflict(
                f"{value - use.unused} machines of Instance Type {type_id} are in use",
                nearest_fix="release Instances of that Instance Type first",
            )
        if value > max(0, use.unreserved):
            raise conflict(
                f"{value - use.unreserved} machines of Instance Type {type_id} are in use or reserved",
                nearest_fix="shrink the Tray Reservations of the Tenant first",
            )


def _insert_allocation(conn: sa.Connection, wanted: NewAllocation, now: float, ids: IdFactory) -> str:
    _check_allocation_name(conn, wanted.tenant_id, wanted.site_id, wanted.name)
    row = msgspec.structs.asdict(wanted)
    types, new = row.pop("types"), ids()
    insert_row(conn, allocation, id=new, **row, status=Status.REGISTERED, created=now, updated=now)
    note = EventNote(EventKind.ALLOCATION, new, Status.REGISTERED, "Allocation is in force")
    journal.record_and_publish(conn, wanted.tenant_id, note, now)
    _insert_constraints(conn, new, types, now, ids)
    return new


def _insert_constraints(
    conn: sa.Connection, allocation_id: str, types: Mapping[str, int], now: float, ids: IdFactory
) -> None:
    row = {"allocation_id": allocation_id, "created": now, "updated": now}
    rows = [{**row, "id": ids(), "instance_type_id": key, "value": value} for key, value in types.items()]
    if rows:
        conn.execute(sa.insert(allocation_constraint), rows)


# Quotas: how many objects of each kind a tenant may have.


class QuotaKind(StrEnum):
    """What is counted, by the name in REST."""

    LOGICAL_PARTITIONS = "nvLinkLogicalPartitions"
    VPCS = "vpcs"
    INSTANCES = "instances"
    INTERFACES = "nvLinkInterfaces"
    RESERVED_TRAYS = "reservedTrays"


DEFAULT_LIMITS: Mapping[QuotaKind, int] = {
    QuotaKind.LOGICAL_PARTITIONS: 4096,
    QuotaKind.VPCS: 4096,
    QuotaKind.INSTANCES: 32_768,
    QuotaKind.INTERFACES: 262_144,
    QuotaKind.RESERVED_TRAYS: 72,
}
"""A tenant with all trays of 1,000 racks, each GPU being moved at once, stays below the first four. Trays in
reservations are spares that nobody else can use: by default those of four racks of 18."""

_NOUNS = {
    QuotaKind.LOGICAL_PARTITIONS: "NVLink Logical Partitions",
    QuotaKind.VPCS: "VPCs",
    QuotaKind.INSTANCES: "Instances",
    QuotaKind.INTERFACES: "NVLink Interfaces",
    QuotaKind.RESERVED_TRAYS: "reserved trays",
}


class QuotaUsage(msgspec.Struct, frozen=True):
    """A quota of a tenant."""

    resource: QuotaKind
    limit: int
    used: int


def check_object_quota(
    conn: sa.Connection, tenant_id: str, kind: QuotaKind, requested: int, now: float
) -> None:
    """Refuse `requested` more objects than the tenant may have."""
    if requested:
        check_limit(kind, requested, *_limit_and_use(conn, tenant_id, kind, now))


def check_limit(kind: QuotaKind, requested: int, own_limit: int | None, current: int | None) -> None:
    """Refuse `requested` more objects beside `current` ones. None: the default limit, and none yet."""
    limit, current = DEFAULT_LIMITS[kind] if own_limit is None else own_limit, current or 0
    if current + requested > limit:
        raise forbidden(
            f"Tenant has reached the maximum number of {_NOUNS[kind]}."
            f" Current: {current}, Requested: {requested}, Max: {limit}"
        )


def _value_of_kind(table: sa.Table) -> sa.ScalarSelect[Any]:
    of_tenant = table.c.tenant_id == sa.bindparam("tenant")
    return sa.select(table.c.value).where(of_tenant, table.c.kind == sa.bindparam("kind")).scalar_subquery()


_limit, _total = _value_of_kind(tenant_quota).label("limit"), _value_of_kind(tenant_total).label("total")
_LIMIT_AND_TOTAL = PreparedStatement(sa.select(_limit, _total))


def _limit_and_use(conn: sa.Connection, tenant_id: str, kind: QuotaKind, now: float) -> tuple[int, int]:
    (row,) = _LIMIT_AND_TOTAL.all(conn, {"tenant": tenant_id, "kind": kind})
    limit = DEFAULT_LIMITS[kind] if row.limit is None else int(row.limit)
    if kind is QuotaKind.RESERVED_TRAYS:
        return limit, count_reserved_trays(conn, tenant_id, now)
    return limit, int(row.total or 0)


def new_object_statement(namesake: sa.Select[Any]) -> PreparedStatement:
    """What the rules of a new object ask of a site, in one statement; `site_for_new_object` runs it.

    `namesake` selects the id of the object with the parameter `name` of the parameter `tenant`.
    """
    access = sa.exists().where(
        allocation.c.tenant_id == sa.bindparam("tenant"), allocation.c.site_id == site.c.id
    )
    columns = (site, access.label("has_access"), namesake.scalar_subquery().label("namesake"), _limit, _total)
    return PreparedStatement(sa.select(*columns).where(site.c.id == sa.bindparam("site")))


def site_for_new_object(
    conn: sa.Connection,
    statement: PreparedStatement,
    tenant_id: str,
    site_id: str,
    kind: QuotaKind,
    name: str,
) -> sa.Row[Any]:
    """The site, with `namesake`, `limit` and `total`. Refused if the tenant cannot use it."""
    given = {"tenant": tenant_id, "site": site_id, "kind": kind, "name": name}
    found = require(statement.one_or_none(conn, given), "Could not find Site with specified ID")
    catalog.check_site_registered(found)
    if not found.has_access:
        raise forbidden(NO_ACCESS)
    return found


def count_objects(conn: sa.Connection, tenant_id: str, kind: QuotaKind) -> int:
    """How many objects of a kind the tenant has; not of reserved trays, which depend on the time."""
    row: sa.Row[Any] | None = find_row(conn, tenant_total, tenant_id=tenant_id, kind=kind)
    return 0 if row is None else int(row.value)


def quotas_of_tenant(conn: sa.Connection, tenant_id: str, now: float) -> list[QuotaUsage]:
    """Every quota of the tenant, and how much of it is used now."""
    return [QuotaUsage(kind, *_limit_and_use(conn, tenant_id, kind, now)) for kind in QuotaKind]


def set_quotas(
    conn: sa.Connection, tenant_id: str, limits: Mapping[QuotaKind, int | None], now: float
) -> None:
    """Set limits of a tenant. None returns to the default."""
    for kind, limit in limits.items():
        delete_rows(conn, tenant_quota, tenant_id=tenant_id, kind=kind)
        if limit is not None:
            insert_row(conn, tenant_quota, tenant_id=tenant_id, kind=kind, value=limit, updated=now)


def check_is_tenant_of(conn: sa.Connection, provider_id: str, tenant_id: str) -> None:
    """Refuse a tenant that has no allocation at a site of the provider."""
    given = (
        sa.select(allocation.c.id)
        .join(site, site.c.id == allocation.c.site_id)
        .where(allocation.c.tenant_id == tenant_id, site.c.provider_id == provider_id)
    )
    if conn.execute(given.limit(1)).first() is None:
        raise not_found("Could not find Tenant with specified ID")
