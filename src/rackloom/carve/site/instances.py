"""Instances: a tenant's use of machines, and what of their GPUs the tenant wants joined.

Every function here changes intent only. What the fabric makes of it is for `settle` to say, from
observations.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from rackloom.carve.site import (
    events,
    instance_types,
    interfaces,
    machines,
    revisions,
    settle,
    sites,
    vpcs,
)
from rackloom.carve.site.events import Kind, Note
from rackloom.carve.site.problems import Rejected, conflict, forbidden, invalid, not_found
from rackloom.carve.site.tables import instance as table
from rackloom.carve.site.tables import machine
from rackloom.carve.site.values import Changed, Ids, InterfaceWish, Status

_BY_ID = sa.select(table).where(table.c.id == sa.bindparam("id"))


def get(conn: sa.Connection, tenant_id: str, instance_id: str) -> sa.Row[Any]:
    """The tenant's instance; refused when it does not exist or is somebody else's."""
    found = conn.execute(_BY_ID, {"id": instance_id}).one_or_none()
    if found is None:
        raise not_found("Could not find Instance with specified ID")
    if found.tenant_id != tenant_id:
        raise forbidden("Instance is not owned by Tenant")
    return found


def update(
    conn: sa.Connection,
    tenant_id: str,
    instance_id: str,
    *,
    name: str | None,
    description: str | None,
    wishes: Sequence[InterfaceWish] | None,
    extra: Mapping[str, Any],
    now: float,
    ids: Ids,
) -> Changed[None]:
    """Change an instance; None leaves a field, and an empty list of interfaces detaches every GPU."""
    instance = get(conn, tenant_id, instance_id)
    if instance.status == Status.TERMINATING:
        raise conflict("Instance is terminating and cannot be changed")
    sites.check_registered(sites.get(conn, instance.site_id))
    changes: dict[str, Any] = {"extra": instance.extra | dict(extra), "updated": now}
    if name is not None and name != instance.name:
        check_name(conn, tenant_id, instance.site_id, name)
        changes["name"] = name
    if description is not None:
        changes["description"] = description
    conn.execute(sa.update(table).where(table.c.id == instance_id).values(**changes))
    if wishes is None or not _rewire(conn, instance, wishes, now, ids):
        return Changed(None, frozenset())
    conn.execute(sa.update(table).where(table.c.id == instance_id).values(intent_at=now))
    return Changed(None, announce(conn, [instance.machine_id], now))


def delete(conn: sa.Connection, tenant_id: str, instance_id: str, now: float) -> Changed[None]:
    """Begin to release an instance; it is gone once its GPUs are seen outside our partitions."""
    instance = get(conn, tenant_id, instance_id)
    return Changed(None, release(conn, instance, "Received request for deletion", now))


def release(conn: sa.Connection, instance: sa.Row[Any], reason: str, now: float) -> frozenset[str]:
    """Begin to release an instance, whoever asks; returns the domains to wake. Repeating it does nothing."""
    if instance.status == Status.TERMINATING:
        return frozenset()
    mine = sa.update(table).where(table.c.id == instance.id)
    conn.execute(mine.values(status=Status.TERMINATING, intent_at=now, updated=now))
    interfaces.detach_all(conn, instance.id, now)
    events.tell(conn, instance.tenant_id, Note(Kind.INSTANCE, instance.id, Status.TERMINATING, reason), now)
    return announce(conn, [instance.machine_id], now)


def check_name(conn: sa.Connection, tenant_id: str, site_id: str, name: str) -> None:
    """Refuse a name that another instance of the tenant has at the site."""
    same = sa.select(table.c.id).where(
        table.c.tenant_id == tenant_id, table.c.site_id == site_id, table.c.name == name
    )
    existing = conn.execute(same).scalar_one_or_none()
    if existing is not None:
        raise conflict("An Instance with specified name already exists at Site", id=existing)


def nvlink_gpus(conn: sa.Connection, site: sa.Row[Any], type_id: str | None, machine_id: str | None) -> int:
    """NVLink GPUs of an instance: what its type says, else what its machine has."""
    if type_id is None:
        return len(machines.gpus_of(conn, [machine_id])[machine_id]) if machine_id else 0
    try:
        kind = instance_types.get(conn, type_id)
    except Rejected as refusal:
        raise invalid(
            "Could not find Instance Type with ID specified in request", instanceTypeId=refusal.reason
        ) from None
    if kind.site_id != site.id:
        raise invalid("Instance Type does not belong to the Site of the VPC")
    return instance_types.nvlink_gpus(kind.capabilities)


def announce(conn: sa.Connection, machine_ids: Sequence[str], now: float) -> frozenset[str]:
    """Count the change of intent in the machines' domains, and say what it did to the statuses."""
    found = conn.execute(sa.select(machine.c.domain).where(machine.c.id.in_(machine_ids)).distinct())
    domains = found.scalars().all()
    for domain in domains:
        settle.settle(conn, domain, now)
    return revisions.touch(conn, domains)


def _rewire(
    conn: sa.Connection, instance: sa.Row[Any], wishes: Sequence[InterfaceWish], now: float, ids: Ids
) -> bool:
    vpc = vpcs.get(conn, instance.tenant_id, instance.vpc_id)
    attached = [
        InterfaceWish(row.logical_partition_id, row.device_instance)
        for row in interfaces.of(conn, instance.id)
        if row.status != Status.DELETING
    ]
    if set(attached) == set(wishes) and len(attached) == len(wishes):
        # Clients that keep the whole object send back what they have read, with something else changed.
        return False
    if vpc.logical_partition_id is not None and attached:
        raise invalid("Cannot update NVLink Interfaces if VPC has default NVLink Logical Partition")
    site = sites.get(conn, instance.site_id)
    gpus = nvlink_gpus(conn, site, instance.instance_type_id, instance.machine_id)
    interfaces.check(conn, vpc, wishes, gpus)
    if wishes:
        sites.check_nvlink(site)
    return interfaces.replace(conn, instance.id, wishes, now, ids)
