"""NVLink logical partitions: a tenant's name for a set of GPUs that shall share memory.

Creating one writes a record and nothing else; the fabric hears of it when the first GPU joins. Deleting
one ends when the newest observations no longer show any partition that the site made for it.
"""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from rackloom.carve.site import allocations, events, history, interfaces, revisions, sites
from rackloom.carve.site.events import Kind as Event
from rackloom.carve.site.events import Note
from rackloom.carve.site.problems import Kind, Rejected, conflict, forbidden, invalid, not_found
from rackloom.carve.site.tables import instance, nvlink_interface, operation, owned_partition, vpc
from rackloom.carve.site.tables import logical_partition as table
from rackloom.carve.site.values import Changed, Ids, Status

_BY_ID = sa.select(table).where(table.c.id == sa.bindparam("id"))

_held = (
    sa.select(owned_partition.c.name)
    .join(operation, operation.c.id == owned_partition.c.operation_id)
    .where(
        owned_partition.c.logical_partition_id == table.c.id,
        sa.or_(owned_partition.c.partition_id.is_not(None), operation.c.state == "pending"),
    )
)
_used = sa.select(nvlink_interface.c.id).where(nvlink_interface.c.logical_partition_id == table.c.id)
_EMPTIED = sa.select(table).where(table.c.status == Status.DELETING, ~_held.exists(), ~_used.exists())
"""Built once: every pass asks it."""


def find(conn: sa.Connection, partition_id: str) -> sa.Row[Any] | None:
    """The logical partition, whoever owns it, or None."""
    return conn.execute(_BY_ID, {"id": partition_id}).one_or_none()


def get(conn: sa.Connection, tenant_id: str, partition_id: str) -> sa.Row[Any]:
    """The tenant's logical partition; refused when it does not exist or is somebody else's."""
    found = find(conn, partition_id)
    if found is None:
        raise not_found("Could not find NVLink Logical Partition with specified ID")
    if found.tenant_id != tenant_id:
        raise forbidden("NVLink Logical Partition is not owned by Tenant")
    return found


def create(
    conn: sa.Connection,
    tenant_id: str,
    *,
    site_id: str,
    name: str,
    description: str | None,
    now: float,
    ids: Ids,
) -> str:
    """A new logical partition, ready at once; returns its id."""
    site = sites.get(conn, site_id)
    sites.check_registered(site)
    allocations.check_site_access(conn, tenant_id, site_id)
    sites.check_nvlink(site)
    _check_name(conn, tenant_id, name)
    new = ids()
    row = {"id": new, "tenant_id": tenant_id, "site_id": site_id, "name": name, "description": description}
    conn.execute(sa.insert(table).values(**row, status=Status.READY, created=now, updated=now))
    received = "received NVLink Logical Partition creation request, pending"
    notes = (
        Note(Event.LOGICAL_PARTITION, new, Status.PENDING, received),
        Note(Event.LOGICAL_PARTITION, new, Status.READY, "NVLink Logical Partition is ready for use"),
    )
    events.tell_new(conn, tenant_id, notes, now)
    return new


def update(
    conn: sa.Connection,
    tenant_id: str,
    partition_id: str,
    *,
    name: str | None,
    description: str | None,
    now: float,
) -> None:
    """Change the name or the description; None leaves it, and nothing changed leaves `updated` too."""
    partition = get(conn, tenant_id, partition_id)
    wanted = {"name": name, "description": description}
    changes = {key: value for key, value in wanted.items() if value not in (None, partition._mapping[key])}
    if "name" in changes:
        _check_name(conn, tenant_id, str(name))
    if changes:
        conn.execute(sa.update(table).where(table.c.id == partition_id).values(**changes, updated=now))
        note = Note(Event.LOGICAL_PARTITION, partition_id, partition.status, f"{', '.join(changes)} changed")
        events.publish(conn, tenant_id, [note], now)


def delete(conn: sa.Connection, tenant_id: str, partition_id: str, now: float) -> Changed[None]:
    """Begin the deletion of a logical partition that neither a VPC nor an instance refers to."""
    partition = get(conn, tenant_id, partition_id)
    _check_unreferenced(conn, partition_id)
    if partition.status != Status.DELETING:
        conn.execute(
            sa.update(table).where(table.c.id == partition_id).values(status=Status.DELETING, updated=now)
        )
        received = "Received request for deletion, pending processing"
        _tell(conn, tenant_id, partition_id, Status.DELETING, received, now)
    domains = conn.execute(
        sa.select(owned_partition.c.domain).where(owned_partition.c.logical_partition_id == partition_id)
    )
    touched = revisions.touch(conn, domains.scalars())
    remove_emptied(conn, now)
    return Changed(None, touched)


def remove_emptied(conn: sa.Connection, now: float) -> None:
    """Drop the deleted logical partitions of which the fabric holds nothing any more.

    A create whose outcome was never learnt does not hold one back: its name stays in owned_partition, so
    that the partition is recognised and removed should it appear late.
    """
    emptied = conn.execute(_EMPTIED).all()
    for row in emptied:
        note = Note(Event.LOGICAL_PARTITION, row.id, events.DELETED)
        events.publish(conn, row.tenant_id, [note], now)
    if emptied:
        gone = [row.id for row in emptied]
        conn.execute(sa.delete(table).where(table.c.id.in_(gone)))
        history.forget(conn, gone)


def _tell(
    conn: sa.Connection, tenant_id: str, partition_id: str, status: Status, message: str, now: float
) -> None:
    events.tell(conn, tenant_id, Note(Event.LOGICAL_PARTITION, partition_id, status, message), now)


def _check_name(conn: sa.Connection, tenant_id: str, name: str) -> None:
    same = sa.select(table.c.id).where(table.c.tenant_id == tenant_id, table.c.name == name)
    existing = conn.execute(same).scalar_one_or_none()
    if existing is not None:
        raise conflict(
            "An NVLink Logical Partition with specified name already exists for Tenant", id=existing
        )


def _check_unreferenced(conn: sa.Connection, partition_id: str) -> None:
    by = sa.select(vpc.c.id).where(vpc.c.logical_partition_id == partition_id).order_by(vpc.c.id)
    vpcs = conn.execute(by).scalars().all()
    if vpcs:
        raise Rejected(
            Kind.INVALID,
            "NVLink Logical Partition is the default of VPCs, unable to delete",
            data={"vpcIds": ", ".join(vpcs)},
            nearest_fix=_release_of_defaults(conn, partition_id, vpcs),
        )
    active = (
        sa.select(sa.func.count(instance.c.id.distinct()))
        .join(nvlink_interface, nvlink_interface.c.instance_id == instance.c.id)
        .where(
            nvlink_interface.c.logical_partition_id == partition_id,
            nvlink_interface.c.status != Status.DELETING,
            instance.c.status != Status.TERMINATING,
        )
    )
    count = conn.execute(active).scalar_one()
    if count:
        raise invalid(
            f"{count} active Instances are associated with this NVLink Logical Partition, unable to delete"
        )


def _release_of_defaults(conn: sa.Connection, partition_id: str, vpcs: Sequence[str]) -> str:
    """What makes it nobody's default: a default that instances use cannot be cleared."""
    clear = 'send "nvLinkLogicalPartitionId": "" in a PATCH of each of these VPCs'
    users = interfaces.users_of_defaults(conn, partition_id, vpcs)
    return f"release {interfaces.named(users)}, then {clear}" if users else clear
