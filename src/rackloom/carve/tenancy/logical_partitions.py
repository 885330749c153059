"""NVLink logical partitions: a tenant's name for a set of GPUs that shall share memory.

Creating one writes a record, which is Ready at once. The fabric gets a partition when the first GPU
joins. A deletion is refused while a VPC has it as default, with the fix, or an active instance uses it.
The record is removed when no owned partition of it is observed or being created, and no interface
refers to it. A create whose outcome was never learned does not delay this: its name stays in
`owned_partition`, so the partition is recognized and removed should it appear later.
"""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from rackloom.carve.store import journal
from rackloom.carve.store.journal import EventKind as Event
from rackloom.carve.store.journal import EventNote
from rackloom.carve.store.schema import instance, nvlink_interface, operation, owned_partition, vpc
from rackloom.carve.store.schema import logical_partition as table
from rackloom.carve.store.values import (
    Changed,
    IdFactory,
    RefusalKind,
    Rejected,
    Status,
    conflict,
    forbidden,
    invalid,
    not_found,
)
from rackloom.carve.tenancy import catalog, entitlements, interfaces

_BY_ID = sa.select(table).where(table.c.id == sa.bindparam("id"))

_partition_exists = (
    sa.select(owned_partition.c.name)
    .join(operation, operation.c.id == owned_partition.c.operation_id)
    .where(
        owned_partition.c.logical_partition_id == table.c.id,
        sa.or_(owned_partition.c.partition_id.is_not(None), operation.c.state == "pending"),
    )
)
_interface_exists = sa.select(nvlink_interface.c.id).where(
    nvlink_interface.c.logical_partition_id == table.c.id
)
_EMPTIED_PARTITIONS = sa.select(table).where(
    table.c.status == Status.DELETING, ~_partition_exists.exists(), ~_interface_exists.exists()
)
"""Built once: every pass asks it."""


def find_logical_partition(conn: sa.Connection, partition_id: str) -> sa.Row[Any] | None:
    """The logical partition, whoever owns it, or None."""
    return conn.execute(_BY_ID, {"id": partition_id}).one_or_none()


def get_logical_partition(conn: sa.Connection, tenant_id: str, partition_id: str) -> sa.Row[Any]:
    """The tenant's logical partition; refused when it does not exist or is somebody else's."""
    found = find_logical_partition(conn, partition_id)
    if found is None:
        raise not_found("Could not find NVLink Logical Partition with specified ID")
    if found.tenant_id != tenant_id:
        raise forbidden("NVLink Logical Partition is not owned by Tenant")
    return found


def create_logical_partition(
    conn: sa.Connection,
    tenant_id: str,
    *,
    site_id: str,
    name: str,
    description: str | None,
    now: float,
    ids: IdFactory,
) -> str:
    """A new logical partition, ready at once; returns its id."""
    site = catalog.get_site(conn, site_id)
    catalog.check_site_registered(site)
    entitlements.check_site_access(conn, tenant_id, site_id)
    catalog.check_nvlink_enabled(site)
    _check_name(conn, tenant_id, name)
    new = ids()
    row = {"id": new, "tenant_id": tenant_id, "site_id": site_id, "name": name, "description": description}
    conn.execute(sa.insert(table).values(**row, status=Status.READY, created=now, updated=now))
    received = "received NVLink Logical Partition creation request, pending"
    notes = (
        EventNote(Event.LOGICAL_PARTITION, new, Status.PENDING, received),
        EventNote(Event.LOGICAL_PARTITION, new, Status.READY, "NVLink Logical Partition is ready for use"),
    )
    journal.record_and_publish_new(conn, tenant_id, notes, now)
    return new


def update_logical_partition(
    conn: sa.Connection,
    tenant_id: str,
    partition_id: str,
    *,
    name: str | None,
    description: str | None,
    now: float,
) -> None:
    """Change the name or the description; None leaves it, and nothing changed leaves `updated` too."""
    partition = get_logical_partition(conn, tenant_id, partition_id)
    wanted = {"name": name, "description": description}
    changes = {key: value for key, value in wanted.items() if value not in (None, partition._mapping[key])}
    if "name" in changes:
        _check_name(conn, tenant_id, str(name))
    if changes:
        conn.execute(sa.update(table).where(table.c.id == partition_id).values(**changes, updated=now))
        note = EventNote(
            Event.LOGICAL_PARTITION, partition_id, partition.status, f"{', '.join(changes)} changed"
        )
        journal.publish_events(conn, tenant_id, [note], now)


def delete_logical_partition(
    conn: sa.Connection, tenant_id: str, partition_id: str, now: float
) -> Changed[None]:
    """Begin the deletion of a logical partition that neither a VPC nor an instance refers to."""
    partition = get_logical_partition(conn, tenant_id, partition_id)
    _check_unreferenced(conn, partition_id)
    if partition.status != Status.DELETING:
        conn.execute(
            sa.update(table).where(table.c.id == partition_id).values(status=Status.DELETING, updated=now)
        )
        received = "Received request for deletion, pending processing"
        _record_event(conn, tenant_id, partition_id, Status.DELETING, received, now)
    domains = conn.execute(
        sa.select(owned_partition.c.domain).where(owned_partition.c.logical_partition_id == partition_id)
    )
    touched = journal.increment_revisions(conn, domains.scalars())
    remove_emptied_partitions(conn, now)
    return Changed(None, touched)


def remove_emptied_partitions(conn: sa.Connection, now: float) -> None:
    """Drop the deleted logical partitions of which the fabric holds nothing any more.

    A create whose outcome was never learnt does not hold one back: its name stays in owned_partition, so
    that the partition is recognised and removed should it appear late.
    """
    emptied = conn.execute(_EMPTIED_PARTITIONS).all()
    for row in emptied:
        note = EventNote(Event.LOGICAL_PARTITION, row.id, journal.EVENT_DELETED)
        journal.publish_events(conn, row.tenant_id, [note], now)
    if emptied:
        gone = [row.id for row in emptied]
        conn.execute(sa.delete(table).where(table.c.id.in_(gone)))
        journal.delete_histories(conn, gone)


def _record_event(
    conn: sa.Connection, tenant_id: str, partition_id: str, status: Status, message: str, now: float
) -> None:
    journal.record_and_publish(
        conn, tenant_id, EventNote(Event.LOGICAL_PARTITION, partition_id, status, message), now
    )


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
            RefusalKind.INVALID,
            "NVLink Logical Partition is the default of VPCs, unable to delete",
            data={"vpcIds": ", ".join(vpcs)},
            nearest_fix=_fix_for_vpc_defaults(conn, partition_id, vpcs),
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


def _fix_for_vpc_defaults(conn: sa.Connection, partition_id: str, vpcs: Sequence[str]) -> str:
    """What makes it nobody's default: a default that instances use cannot be cleared."""
    clear = 'send "nvLinkLogicalPartitionId": "" in a PATCH of each of these VPCs'
    users = interfaces.instances_using_default(conn, partition_id, vpcs)
    return f"release {interfaces.describe_instances(users)}, then {clear}" if users else clear
