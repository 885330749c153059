"""NVLink logical partitions, and the VPCs that name one as the default of their instances.

A logical partition is a tenant's name for a set of GPUs that shall share memory.

Creating one writes a record, which is Ready at once. The fabric gets a partition when the first GPU
joins. A deletion is refused while a VPC has it as default, with the fix, or an active instance uses it.
The record is removed when no owned partition of it is observed or being created, and no interface
refers to it. A create whose outcome was never learned does not delay this: its name stays in
`owned_partition`, so the partition is recognized and removed should it appear later.

A VPC matters here only for its optional default logical partition, which its new instances join. The
default reserves nothing, and several VPCs may name the same logical partition. It must be the tenant's
own, at the same site, and Ready. It cannot change while an instance of the VPC has an interface on it.
A VPC is deleted only when it holds no instance. Fields of network virtualization are stored and
returned. Nothing here acts on them.
"""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.store import journal
from rackloom.carve.store.journal import EventKind as Event
from rackloom.carve.store.journal import EventNote, StatusRecord
from rackloom.carve.store.prepared import (
    PreparedStatement,
    delete_rows,
    find_row,
    insert_row,
    require_unused,
    update_rows,
)
from rackloom.carve.store.schema import instance, nvlink_interface, operation, owned_partition, tenant, vpc
from rackloom.carve.store.schema import logical_partition as partitions
from rackloom.carve.store.values import Changed, IdFactory, RefusalKind, Rejected, Status, forbidden, invalid
from rackloom.carve.tenancy import catalog, entitlements

# Logical partitions.


_partition_exists = (
    sa.select(owned_partition.c.name)
    .join(operation, operation.c.id == owned_partition.c.operation_id)
    .where(
        owned_partition.c.logical_partition_id == partitions.c.id,
        sa.or_(owned_partition.c.partition_id.is_not(None), operation.c.state == "pending"),
    )
)
_interface_exists = sa.select(nvlink_interface.c.id).where(
    nvlink_interface.c.logical_partition_id == partitions.c.id
)
_is_empty = sa.and_(~_partition_exists.exists(), ~_interface_exists.exists())
_this = sa.bindparam("partition", type_=sa.String)
# Built once: every pass runs the first, and every deletion the others.
_EMPTIED_PARTITIONS = PreparedStatement(
    sa.select(partitions).where(_is_empty, partitions.c.status == Status.DELETING)
)
_DOMAINS = PreparedStatement(
    sa.select(owned_partition.c.domain).where(owned_partition.c.logical_partition_id == _this)
)
_vpcs = sa.select(vpc.c.id).where(vpc.c.logical_partition_id == _this)
_active = (
    sa.select(sa.func.count(instance.c.id.distinct()))
    .join(nvlink_interface, nvlink_interface.c.instance_id == instance.c.id)
    .where(
        nvlink_interface.c.logical_partition_id == _this,
        nvlink_interface.c.status != Status.DELETING,
        instance.c.status != Status.TERMINATING,
    )
)
_VPCS = PreparedStatement(_vpcs.order_by(vpc.c.id))
_caller = sa.select(tenant.c.id).where(tenant.c.org == sa.bindparam("org")).scalar_subquery().label("caller")
_DELETION = PreparedStatement(
    sa.select(
        partitions,
        _vpcs.exists().label("by_vpcs"),
        _active.scalar_subquery().label("by_instances"),
        sa.exists().where(owned_partition.c.logical_partition_id == _this).label("by_partitions"),
        _is_empty.label("is_empty"),
        _caller,
    ).where(partitions.c.id == _this)
)
_NEW_PARTITION = entitlements.new_object_statement(
    sa.select(partitions.c.id).where(
        partitions.c.tenant_id == sa.bindparam("tenant"), partitions.c.name == sa.bindparam("name")
    )
)


NewObject = tuple[SimpleNamespace, Sequence[StatusRecord]]
"""The columns of a new object, with the `default` of a VPC, and its history, newest first."""


def find_logical_partition(conn: sa.Connection, partition_id: str) -> sa.Row[Any] | None:
    """The logical partition, whoever owns it, or None."""
    return find_row(conn, partitions, id=partition_id)


def get_logical_partition(conn: sa.Connection, tenant_id: str, partition_id: str) -> sa.Row[Any]:
    """The tenant's logical partition. Raises Rejected: not found, or forbidden for another tenant's."""
    return entitlements.own_row(conn, partitions, tenant_id, partition_id, "NVLink Logical Partition")


class NewLogicalPartition(msgspec.Struct, frozen=True):
    """A logical partition to create."""

    site_id: str
    name: str
    description: str | None = None


def create_logical_partition(
    conn: sa.Connection, tenant_id: str, wanted: NewLogicalPartition, now: float, ids: IdFactory
) -> str:
    """A new logical partition, ready at once; returns its id."""
    return str(make_logical_partition(conn, tenant_id, wanted, now, ids)[0].id)


def make_logical_partition(
    conn: sa.Connection, tenant_id: str, wanted: NewLogicalPartition, now: float, ids: IdFactory
) -> NewObject:
    """As `create_logical_partition`; returns its columns and its history."""
    check_new_logical_partition(conn, tenant_id, wanted)
    new = ids()
    row = {**msgspec.structs.asdict(wanted), "id": new, "tenant_id": tenant_id, "status": Status.READY}
    row |= {"created": now, "updated": now}
    insert_row(conn, partitions, **row)
    received = "received NVLink Logical Partition creation request, pending"
    notes = (
        EventNote(Event.LOGICAL_PARTITION, new, Status.PENDING, received),
        EventNote(Event.LOGICAL_PARTITION, new, Status.READY, "NVLink Logical Partition is ready for use"),
    )
    return SimpleNamespace(**row), journal.record_and_publish_new(conn, tenant_id, notes, now)


def check_new_logical_partition(conn: sa.Connection, tenant_id: str, wanted: NewLogicalPartition) -> None:
    """Refuse a logical partition that could not be made."""
    kind = entitlements.QuotaKind.LOGICAL_PARTITIONS
    site = entitlements.site_for_new_object(
        conn, _NEW_PARTITION, tenant_id, wanted.site_id, kind, wanted.name
    )
    catalog.check_nvlink_enabled(site)
    require_unused(site.namesake, _PARTITION_NAME_IS_USED)
    entitlements.check_limit(kind, 1, site.limit, site.total)


def update_logical_partition(
    conn: sa.Connection,
    tenant_id: str,
    partition_id: str,
    *,
    name: str | None,
    description: str | None,
    now: float,
) -> None:
    """Change the name or the description. None leaves it, and nothing changed leaves `updated` too."""
    partition = get_logical_partition(conn, tenant_id, partition_id)
    changes = catalog.changed_values(partition, name=name, description=description)
    if "name" in changes:
        _check_name(conn, tenant_id, str(name))
    if changes:
        update_rows(conn, partitions, {"id": partition_id}, **changes, updated=now)
        note = EventNote(
            Event.LOGICAL_PARTITION, partition_id, partition.status, f"{', '.join(changes)} changed"
        )
        journal.publish_events(conn, tenant_id, [note], now)


def instances_using_default(
    conn: sa.Connection, logical_partition_id: str, vpc_ids: Sequence[str]
) -> list[str]:
    """The instances of VPCs with this default that have an interface on it; they keep it from changing."""
    using = (
        sa.select(nvlink_interface.c.instance_id)
        .join(instance, instance.c.id == nvlink_interface.c.instance_id)
        .where(
            instance.c.vpc_id.in_(vpc_ids), nvlink_interface.c.logical_partition_id == logical_partition_id
        )
    )
    return list(conn.execute(using.distinct().order_by(nvlink_interface.c.instance_id)).scalars())


def describe_instances(instance_ids: Sequence[str]) -> str:
    """Instances in a sentence: the first few by id, the others by their number."""
    shown = ", ".join(instance_ids[:5])
    more = len(instance_ids) - 5
    return f"Instances {shown}" + (f" and {more} more" if more > 0 else "")


def delete_logical_partition(
    conn: sa.Connection, tenant_id: str | None, partition_id: str, now: float, org: str = ""
) -> Changed[None]:
    """Begin the deletion of a logical partition that neither a VPC nor an instance refers to.

    Without `tenant_id` it is that of the tenant of `org`.
    """
    this = {"partition": partition_id}
    found = _DELETION.one_or_none(conn, {**this, "org": org})
    tenant_id = tenant_id or entitlements.tenant_id_read(conn, found, org)
    partition = entitlements.require_own(found, tenant_id, "NVLink Logical Partition")
    if partition.by_vpcs:
        vpcs = [row.id for row in _VPCS.all(conn, this)]
        # The default cannot be cleared while instances use it, so these go first.
        fix = 'send "nvLinkLogicalPartitionId": "" in a PATCH of each of these VPCs'
        if users := instances_using_default(conn, partition_id, vpcs):
            fix = f"release {describe_instances(users)}, then {fix}"
        raise Rejected(
            RefusalKind.INVALID,
            "NVLink Logical Partition is the default of VPCs, unable to delete",
            data={"vpcIds": ", ".join(vpcs)},
            nearest_fix=fix,
        )
    if partition.by_instances:
        raise invalid(
            f"{partition.by_instances} active Instances are associated with this NVLink Logical Partition,"
            " unable to delete"
        )
    received = "Received request for deletion, pending processing"
    begun = EventNote(Event.LOGICAL_PARTITION, partition_id, Status.DELETING, received)
    is_new = partition.status != Status.DELETING
    domains = [row.domain for row in _DOMAINS.all(conn, this)] if partition.by_partitions else []
    touched = journal.increment_revisions(conn, domains)
    # The record of an empty partition goes at once. Another one waits until its last GPU is seen outside.
    if partition.is_empty:
        _remove(conn, partition, [begun] if is_new else [], now)
    elif is_new:
        update_rows(conn, partitions, {"id": partition_id}, status=Status.DELETING, updated=now)
        journal.record_and_publish(conn, tenant_id, begun, now)
    return Changed(None, touched)


def remove_emptied_partitions(conn: sa.Connection, now: float) -> None:
    """Delete the records of logical partitions in deletion that have no partition and no interface left."""
    for row in _EMPTIED_PARTITIONS.all(conn, {}):
        _remove(conn, row, [], now)


def _remove(conn: sa.Connection, partition: sa.Row[Any], before: Sequence[EventNote], now: float) -> None:
    """Delete the record; its last event comes after those of `before`."""
    delete_rows(conn, partitions, id=partition.id)
    journal.delete_histories(conn, [partition.id])
    gone = EventNote(Event.LOGICAL_PARTITION, partition.id, journal.EVENT_DELETED)
    journal.publish_events(conn, partition.tenant_id, [*before, gone], now)


def _check_name(conn: sa.Connection, tenant_id: str, name: str) -> None:
    existing = find_row(conn, partitions, tenant_id=tenant_id, name=name)
    require_unused(existing, _PARTITION_NAME_IS_USED)


_PARTITION_NAME_IS_USED = "An NVLink Logical Partition with specified name already exists for Tenant"


# VPCs.


_NEW_VPC = entitlements.new_object_statement(
    sa.select(vpc.c.id).where(
        vpc.c.tenant_id == sa.bindparam("tenant"),
        vpc.c.site_id == sa.bindparam("site"),
        vpc.c.name == sa.bindparam("name"),
    )
)
_instances = sa.select(sa.func.count()).where(instance.c.vpc_id == vpc.c.id).scalar_subquery()
_HELD_VPC = PreparedStatement(
    sa.select(vpc, _instances.label("instances"), _caller).where(vpc.c.id == sa.bindparam("vpc"))
)


def get_vpc(conn: sa.Connection, tenant_id: str, vpc_id: str) -> sa.Row[Any]:
    """The tenant's VPC. Raises Rejected: not found, or forbidden for another tenant's."""
    return entitlements.own_row(conn, vpc, tenant_id, vpc_id, "VPC")


class NewVpc(msgspec.Struct, frozen=True, kw_only=True):
    """A VPC to create."""

    site_id: str
    name: str
    description: str | None = None
    logical_partition_id: str | None = None
    extra: Mapping[str, Any] = {}
    id: str | None = None
    """None: any."""


def create_vpc(conn: sa.Connection, tenant_id: str, wanted: NewVpc, now: float, ids: IdFactory) -> str:
    """A new VPC; returns its id."""
    return str(make_vpc(conn, tenant_id, wanted, now, ids)[0].id)


def make_vpc(conn: sa.Connection, tenant_id: str, wanted: NewVpc, now: float, ids: IdFactory) -> NewObject:
    """As `create_vpc`; returns its columns and its history."""
    default = check_new_vpc(conn, tenant_id, wanted)
    row = {**msgspec.structs.asdict(wanted), "tenant_id": tenant_id, "status": Status.READY}
    row |= {"id": wanted.id or ids(), "created": now, "updated": now}
    insert_row(conn, vpc, **row)
    note = EventNote(Event.VPC, row["id"], Status.READY, "VPC is ready for use")
    history = journal.record_and_publish_new(conn, tenant_id, [note], now)
    return SimpleNamespace(**row, default=default), history


def check_new_vpc(conn: sa.Connection, tenant_id: str, wanted: NewVpc) -> sa.Row[Any] | None:
    """Its default logical partition. Refuse a VPC that could not be made."""
    kind = entitlements.QuotaKind.VPCS
    site = entitlements.site_for_new_object(conn, _NEW_VPC, tenant_id, wanted.site_id, kind, wanted.name)
    require_unused(site.namesake, _VPC_NAME_IS_USED)
    default = None
    if wanted.logical_partition_id is not None:
        default = _check_default_partition(conn, tenant_id, site, wanted.logical_partition_id)
    entitlements.check_limit(kind, 1, site.limit, site.total)
    if wanted.id is not None:
        require_unused(find_row(conn, vpc, id=wanted.id), "A VPC with specified ID already exists")
    return default


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
    """Change a VPC. None leaves a field, an empty `logical_partition_id` clears the default."""
    row = get_vpc(conn, tenant_id, vpc_id)
    changes = catalog.changed_values(row, name=name, description=description)
    if "name" in changes:
        _check_vpc_name(conn, tenant_id, row.site_id, str(name))
    if logical_partition_id is not None and (logical_partition_id or None) != row.logical_partition_id:
        users = instances_using_default(conn, row.logical_partition_id, [row.id])
        if users:
            raise forbidden(
                "Existing default NVLink Logical Partition is already being used by an Instance from the VPC",
                nearest_fix=f"release {describe_instances(users)} first",
            )
        if logical_partition_id:
            _check_default_partition(
                conn, tenant_id, catalog.get_site(conn, row.site_id), logical_partition_id
            )
        changes["logical_partition_id"] = logical_partition_id or None
    kept = catalog.merged_extra(row.extra, extra)
    update_rows(conn, vpc, {"id": vpc_id}, extra=kept, **changes, updated=now)
    journal.publish_events(conn, tenant_id, [EventNote(Event.VPC, vpc_id, row.status, "changed")], now)


def set_virtualization(conn: sa.Connection, tenant_id: str, vpc_id: str, kind: str, now: float) -> None:
    """Store the network virtualization of a VPC without instances."""
    row = _empty_vpc(conn, tenant_id, vpc_id, "unable to change its virtualization")
    extra = row.extra | {"networkVirtualizationType": kind}
    update_rows(conn, vpc, {"id": vpc_id}, extra=extra, updated=now)


def delete_vpc(conn: sa.Connection, tenant_id: str | None, vpc_id: str, now: float, org: str = "") -> None:
    """Remove a VPC that holds no instance. Without `tenant_id` it is that of the tenant of `org`."""
    row = _empty_vpc(conn, tenant_id, vpc_id, "unable to delete", org)
    delete_rows(conn, vpc, id=vpc_id)
    journal.delete_histories(conn, [vpc_id])
    journal.publish_events(conn, row.tenant_id, [EventNote(Event.VPC, vpc_id, journal.EVENT_DELETED)], now)


def _empty_vpc(
    conn: sa.Connection, tenant_id: str | None, vpc_id: str, unable: str, org: str = ""
) -> sa.Row[Any]:
    found = _HELD_VPC.one_or_none(conn, {"vpc": vpc_id, "org": org})
    tenant_id = tenant_id or entitlements.tenant_id_read(conn, found, org)
    row = entitlements.require_own(found, tenant_id, "VPC")
    if row.instances:
        raise invalid(f"{row.instances} Instances are associated with this VPC, {unable}")
    return row


def _check_vpc_name(conn: sa.Connection, tenant_id: str, site_id: str, name: str) -> None:
    existing = find_row(conn, vpc, tenant_id=tenant_id, site_id=site_id, name=name)
    require_unused(existing, _VPC_NAME_IS_USED)


_VPC_NAME_IS_USED = "A VPC with specified name already exists at Site"


def _check_default_partition(
    conn: sa.Connection, tenant_id: str, site: sa.Row[Any], logical_partition_id: str
) -> sa.Row[Any]:
    catalog.check_nvlink_enabled(site)
    partition = find_logical_partition(conn, logical_partition_id)
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
    return partition
