"""VPCs, as far as NVLink is concerned: an optional default logical partition for their instances.

The default reserves nothing, and several VPCs may name the same logical partition. It must be the
tenant's own, at the same site, and Ready. It cannot change while an instance of the VPC has an
interface on it. A VPC is deleted only when it holds no instance. Fields of network virtualization are
stored and returned; nothing here acts on them.
"""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from rackloom.carve.store import journal
from rackloom.carve.store.journal import EventKind as Event
from rackloom.carve.store.journal import EventNote
from rackloom.carve.store.schema import instance
from rackloom.carve.store.schema import vpc as table
from rackloom.carve.store.values import (
    IdFactory,
    RefusalKind,
    Rejected,
    Status,
    conflict,
    forbidden,
    invalid,
    not_found,
)
from rackloom.carve.tenancy import catalog, entitlements, interfaces, logical_partitions

_BY_ID = sa.select(table).where(table.c.id == sa.bindparam("id"))


def get_vpc(conn: sa.Connection, tenant_id: str, vpc_id: str) -> sa.Row[Any]:
    """The tenant's VPC; refused when it does not exist or is somebody else's."""
    found = conn.execute(_BY_ID, {"id": vpc_id}).one_or_none()
    if found is None:
        raise not_found("Could not find VPC with specified ID")
    if found.tenant_id != tenant_id:
        raise forbidden("VPC is not owned by Tenant")
    return found


def create_vpc(
    conn: sa.Connection,
    tenant_id: str,
    *,
    site_id: str,
    name: str,
    description: str | None,
    logical_partition_id: str | None,
    extra: Mapping[str, Any],
    wanted_id: str | None,
    now: float,
    ids: IdFactory,
) -> str:
    """A new VPC; returns its id."""
    site = catalog.get_site(conn, site_id)
    catalog.check_site_registered(site)
    entitlements.check_site_access(conn, tenant_id, site_id)
    _check_name(conn, tenant_id, site_id, name)
    if logical_partition_id is not None:
        _check_default_partition(conn, tenant_id, site, logical_partition_id)
    new = wanted_id or ids()
    if conn.execute(sa.select(table.c.id).where(table.c.id == new)).first() is not None:
        raise conflict("A VPC with specified ID already exists", id=new)
    row = {"id": new, "tenant_id": tenant_id, "site_id": site_id, "name": name, "description": description}
    row |= {"logical_partition_id": logical_partition_id, "status": Status.READY}
    conn.execute(sa.insert(table).values(**row, extra=dict(extra), created=now, updated=now))
    journal.record_and_publish(
        conn, tenant_id, EventNote(Event.VPC, new, Status.READY, "VPC is ready for use"), now
    )
    return new


def update_vpc(
    conn: sa.Connection,
    tenant_id: str,
    vpc_id: str,
    *,
    name: str | None,
    description: str | None,
    logical_partition_id: str | None,
    extra: Mapping[str, Any],
    now: float,
) -> None:
    """Change a VPC; None leaves a field, an empty `logical_partition_id` clears the default."""
    vpc = get_vpc(conn, tenant_id, vpc_id)
    changes: dict[str, Any] = {"extra": vpc.extra | dict(extra), "updated": now}
    if name is not None and name != vpc.name:
        _check_name(conn, tenant_id, vpc.site_id, name)
        changes["name"] = name
    if description is not None:
        changes["description"] = description
    if logical_partition_id is not None and (logical_partition_id or None) != vpc.logical_partition_id:
        _check_default_unused(conn, vpc)
        if logical_partition_id:
            _check_default_partition(
                conn, tenant_id, catalog.get_site(conn, vpc.site_id), logical_partition_id
            )
        changes["logical_partition_id"] = logical_partition_id or None
    conn.execute(sa.update(table).where(table.c.id == vpc_id).values(**changes))
    journal.publish_events(conn, tenant_id, [EventNote(Event.VPC, vpc_id, vpc.status, "changed")], now)


def set_virtualization(conn: sa.Connection, tenant_id: str, vpc_id: str, kind: str, now: float) -> None:
    """Note the network virtualization that a VPC without instances is to have."""
    vpc = get_vpc(conn, tenant_id, vpc_id)
    _check_empty(conn, vpc_id, "unable to change its virtualization")
    extra = vpc.extra | {"networkVirtualizationType": kind}
    conn.execute(sa.update(table).where(table.c.id == vpc_id).values(extra=extra, updated=now))


def delete_vpc(conn: sa.Connection, tenant_id: str, vpc_id: str, now: float) -> None:
    """Remove a VPC that holds no instance."""
    get_vpc(conn, tenant_id, vpc_id)
    _check_empty(conn, vpc_id, "unable to delete")
    conn.execute(sa.delete(table).where(table.c.id == vpc_id))
    journal.delete_histories(conn, [vpc_id])
    journal.publish_events(conn, tenant_id, [EventNote(Event.VPC, vpc_id, journal.EVENT_DELETED)], now)


def _check_empty(conn: sa.Connection, vpc_id: str, unable: str) -> None:
    held = conn.execute(sa.select(sa.func.count()).where(instance.c.vpc_id == vpc_id)).scalar_one()
    if held:
        raise invalid(f"{held} Instances are associated with this VPC, {unable}")


def _check_name(conn: sa.Connection, tenant_id: str, site_id: str, name: str) -> None:
    same = sa.select(table.c.id).where(
        table.c.tenant_id == tenant_id, table.c.site_id == site_id, table.c.name == name
    )
    existing = conn.execute(same).scalar_one_or_none()
    if existing is not None:
        raise conflict("A VPC with specified name already exists at Site", id=existing)


def _check_default_partition(
    conn: sa.Connection, tenant_id: str, site: sa.Row[Any], logical_partition_id: str
) -> None:
    catalog.check_nvlink_enabled(site)
    partition = logical_partitions.find_logical_partition(conn, logical_partition_id)
    if partition is None:
        raise invalid(
            "Could not find NVLink Logical Partition with ID specified in request",
            nvLinkLogicalPartitionId="does not exist",
        )
    if partition.tenant_id != tenant_id:
        raise forbidden("NVLink Logical Partition is not owned by Tenant")
    if partition.site_id != site.id:
        raise forbidden("NVLink Logical Partition does not belong to the Site of the VPC")
    if partition.status != Status.READY:
        raise forbidden("NVLink Logical Partition is not in Ready state")


def _check_default_unused(conn: sa.Connection, vpc: sa.Row[Any]) -> None:
    users = interfaces.instances_using_default(conn, vpc.logical_partition_id, [vpc.id])
    if users:
        raise Rejected(
            RefusalKind.FORBIDDEN,
            "Existing default NVLink Logical Partition is already being used by an Instance from the VPC",
            nearest_fix=f"release {interfaces.describe_instances(users)} first",
        )
