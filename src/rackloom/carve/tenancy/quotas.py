"""Quotas: how many objects of each kind a tenant may have.

Allocations say how many machines of a type a tenant may use; quotas bound the records that a tenant can
create beside and on them: logical partitions, VPCs, instances and interfaces, and how many trays may wait for
it in reservations. Every kind has a default; a provider at whose sites the tenant has an allocation can set
another limit for it. A limit below what the
tenant has already takes nothing away, and refuses anything new.

An object counts until its record is gone: also one in deletion, and an interface whose GPU was not yet
observed outside its partition. `check_object_quota` reads the count in the transaction that creates the
object. Transactions are serializable, so that two of them cannot exceed a limit together. Triggers of the
database keep the counts (`tenant_total`): to count rows would take longer the more a tenant has.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.store.prepared import PreparedStatement, delete_rows, find_row, insert_row
from rackloom.carve.store.schema import allocation, site, tenant_quota, tenant_total
from rackloom.carve.store.values import forbidden, not_found
from rackloom.carve.tenancy.withheld_trays import count_reserved_trays


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
    if requested == 0:
        return
    limit, current = _limit_and_use(conn, tenant_id, kind, now)
    if current + requested > limit:
        raise forbidden(
            f"Tenant has reached the maximum number of {_NOUNS[kind]}."
            f" Current: {current}, Requested: {requested}, Max: {limit}"
        )


def _value_of_kind(table: sa.Table) -> sa.ScalarSelect[Any]:
    of_tenant = table.c.tenant_id == sa.bindparam("tenant")
    return sa.select(table.c.value).where(of_tenant, table.c.kind == sa.bindparam("kind")).scalar_subquery()


_LIMIT_AND_TOTAL = PreparedStatement(
    sa.select(_value_of_kind(tenant_quota).label("limit"), _value_of_kind(tenant_total).label("total"))
)


def _limit_and_use(conn: sa.Connection, tenant_id: str, kind: QuotaKind, now: float) -> tuple[int, int]:
    (row,) = _LIMIT_AND_TOTAL.all(conn, {"tenant": tenant_id, "kind": kind})
    limit = DEFAULT_LIMITS[kind] if row.limit is None else int(row.limit)
    if kind is QuotaKind.RESERVED_TRAYS:
        return limit, count_reserved_trays(conn, tenant_id, now)
    return limit, int(row.total or 0)


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
    """Set limits of a tenant; None returns to the default."""
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
