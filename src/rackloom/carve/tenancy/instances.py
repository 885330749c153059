"""Instances and their NVLink interfaces after their creation: listings, change and release.

All functions change intent only, as `instance_creation` does. `release_instance` marks the instance as
terminating and detaches its GPUs. Repeating it does nothing.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import sqlalchemy as sa

from rackloom.carve.store import journal
from rackloom.carve.store.journal import EventKind, EventNote
from rackloom.carve.store.prepared import PreparedListing, delete_rows, update_rows
from rackloom.carve.store.schema import instance as table
from rackloom.carve.store.schema import instance_type, machine, machine_gpu, nvlink_interface
from rackloom.carve.store.values import Changed, IdFactory, InterfaceSpec, Status, conflict, invalid
from rackloom.carve.tenancy import catalog, entitlements, instance_creation, logical_partitions
from rackloom.carve.tenancy.entitlements import QuotaKind, check_object_quota
from rackloom.carve.tenancy.instance_creation import (
    LEAVING_REASON,
    InstanceWarning,
    check_instance_name,
    nvlink_gpus_of_instance,
    publish_intent_change,
    warnings_for,
)

# Warnings.


def warnings_of_instance(conn: sa.Connection, row: sa.Row[Any]) -> tuple[InstanceWarning, ...]:
    """The warnings about an instance as its intent is now."""
    wanted = _attached_interfaces(conn, row.id)
    domain = conn.execute(sa.select(machine.c.domain).where(machine.c.id == row.machine_id)).scalar_one()
    kind = sa.select(instance_type.c.capabilities).where(instance_type.c.id == row.instance_type_id)
    capabilities = conn.execute(kind).scalar_one_or_none() or []
    return warnings_for(conn, wanted, [domain], catalog.nvlink_gpu_count(capabilities) or len(wanted))


# Change and release.


def get_instance(conn: sa.Connection, tenant_id: str, instance_id: str) -> sa.Row[Any]:
    """The tenant's instance. Raises Rejected: not found, or forbidden for another tenant's."""
    return entitlements.own_row(conn, table, tenant_id, instance_id, "Instance")


def update_instance(
    conn: sa.Connection,
    tenant_id: str,
    instance_id: str,
    *,
    name: str | None,
    description: str | None,
    wanted: Sequence[InterfaceSpec] | None,
    extra: Mapping[str, Any],
    now: float,
    ids: IdFactory,
) -> Changed[None]:
    """Change an instance. None leaves a field, and an empty list of interfaces detaches every GPU."""
    instance = get_instance(conn, tenant_id, instance_id)
    if instance.status == Status.TERMINATING:
        raise conflict("Instance is terminating and cannot be changed")
    catalog.check_site_registered(catalog.get_site(conn, instance.site_id))
    changes = catalog.changed_values(instance, name=name, description=description)
    if "name" in changes:
        check_instance_name(conn, tenant_id, instance.site_id, str(name))
    kept = catalog.merged_extra(instance.extra, extra)
    update_rows(conn, table, {"id": instance_id}, extra=kept, **changes, updated=now)
    if wanted is None or not _change_interfaces(conn, instance, wanted, now, ids):
        return Changed(None, frozenset())
    update_rows(conn, table, {"id": instance_id}, intent_at=now)
    return Changed(None, publish_intent_change(conn, [instance.machine_id], now))


def delete_instance(conn: sa.Connection, tenant_id: str, instance_id: str, now: float) -> Changed[None]:
    """Begin to release an instance. It is gone once its GPUs are observed outside the site's partitions."""
    instance = get_instance(conn, tenant_id, instance_id)
    return Changed(None, release_instance(conn, instance, "Received request for deletion", now))


def release_instance(conn: sa.Connection, instance: sa.Row[Any], reason: str, now: float) -> frozenset[str]:
    """Begin to release an instance. Return the domains to wake. Repeating it does nothing."""
    if instance.status == Status.TERMINATING:
        return frozenset()
    update_rows(conn, table, {"id": instance.id}, status=Status.TERMINATING, intent_at=now, updated=now)
    detach_all_interfaces(conn, instance.id, now)
    journal.record_and_publish(
        conn, instance.tenant_id, EventNote(EventKind.INSTANCE, instance.id, Status.TERMINATING, reason), now
    )
    return publish_intent_change(conn, [instance.machine_id], now)


def forget_instance(conn: sa.Connection, instance: sa.Row[Any], now: float) -> frozenset[str]:
    """Delete the records of an instance whose GPUs stay where they are. Return the domains to wake.

    Only for an instance whose GPUs are in no partition of the site. The GPUs of any other are released.
    """
    if instance.status == Status.TERMINATING:
        raise conflict("Instance is terminating")
    delete_rows(conn, nvlink_interface, instance_id=instance.id)
    delete_rows(conn, table, id=instance.id)
    journal.delete_histories(conn, [instance.id])
    note = EventNote(EventKind.INSTANCE, instance.id, journal.EVENT_DELETED)
    journal.publish_events(conn, instance.tenant_id, [note], now)
    return publish_intent_change(conn, [instance.machine_id], now)


# Interfaces.


class InterfaceRow(NamedTuple):
    """A row of `interface_listing`, made with `_make`: reading a field costs a tenth of that of a `Row`."""

    id: str
    instance_id: str
    logical_partition_id: str
    device_instance: int
    status: str
    reason: str | None
    created: float
    updated: float
    site_id: str
    tenant_id: str
    domain: str | None
    guid: str | None


@cache
def interface_listing() -> sa.Select[Any]:
    """Interfaces with the GUID and the domain of their GPUs (None until observed)."""
    gpu = sa.and_(
        machine_gpu.c.machine_id == table.c.machine_id,
        machine_gpu.c.module_id == nvlink_interface.c.device_instance + 1,
    )
    source = nvlink_interface.join(table, table.c.id == nvlink_interface.c.instance_id)
    source = source.join(machine, machine.c.id == table.c.machine_id).join(machine_gpu, gpu, isouter=True)
    joined = (machine.c.domain, machine_gpu.c.guid, table.c.site_id, table.c.tenant_id)
    columns = {column.name: column for column in (*nvlink_interface.c, *joined)}
    return sa.select(*(columns[name] for name in InterfaceRow._fields)).select_from(source)


@cache
def _listing_of_instances() -> PreparedListing:
    by_device = interface_listing().order_by(nvlink_interface.c.device_instance, nvlink_interface.c.created)
    return PreparedListing(by_device, nvlink_interface.c.instance_id)


def interfaces_by_instance(conn: sa.Connection, instance_ids: Sequence[str]) -> dict[str, list[InterfaceRow]]:
    """The interfaces of each instance, by device."""
    found: defaultdict[str, list[InterfaceRow]] = defaultdict(list)
    for interface in _listing_of_instances().records(conn, InterfaceRow._make, instance_ids):
        found[interface.instance_id].append(interface)
    return found


def detach_all_interfaces(conn: sa.Connection, instance_id: str, now: float) -> None:
    """Detach every GPU. The rows stay until the GPUs are observed outside their partitions."""
    mine = sa.update(nvlink_interface).where(nvlink_interface.c.instance_id == instance_id)
    conn.execute(mine.values(status=Status.DELETING, reason=LEAVING_REASON, intent_at=now, updated=now))


def _attached_interfaces(conn: sa.Connection, instance_id: str) -> list[InterfaceSpec]:
    return [
        InterfaceSpec(row.logical_partition_id, row.device_instance)
        for row in instance_creation.interfaces_of(conn, instance_id)
        if row.status != Status.DELETING
    ]


def _change_interfaces(
    conn: sa.Connection, instance: sa.Row[Any], wanted: Sequence[InterfaceSpec], now: float, ids: IdFactory
) -> bool:
    vpc = logical_partitions.get_vpc(conn, instance.tenant_id, instance.vpc_id)
    attached = _attached_interfaces(conn, instance.id)
    if set(attached) == set(wanted) and len(attached) == len(wanted):
        # Clients often send a whole object back with another field changed.
        return False
    if vpc.logical_partition_id is not None and attached:
        raise invalid("Cannot update NVLink Interfaces if VPC has default NVLink Logical Partition")
    site = catalog.get_site(conn, instance.site_id)
    gpus = nvlink_gpus_of_instance(conn, site, instance.instance_type_id, instance.machine_id)
    instance_creation.check_interfaces(conn, vpc, wanted, gpus)
    if wanted:
        catalog.check_nvlink_enabled(site)
    new = len(set(wanted) - set(attached))
    check_object_quota(conn, instance.tenant_id, QuotaKind.INTERFACES, new, now)
    return instance_creation.replace_interfaces(conn, instance.id, wanted, now, ids)
