"""NVLink interfaces: which logical partition each GPU of an instance shall join.

Interfaces change only with their instance, and a list is always the complete desired state: what is not
in it is detached. `replace_interfaces` keeps the row, and with it the readiness, of a GPU that stays in
its logical partition. A detached row stays in Deleting until an observation shows the GPU outside the
partition.

`check_interfaces` refuses device instances that the hardware does not have or that repeat, and
partitions that are not Ready, at another site, or of another tenant; the last is answered as not found.
Where the VPC has a default logical partition, every interface must name that one.

`partition_members` counts the GPUs of logical partitions in each NVLink domain, for placement and
warnings.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any, NamedTuple

import sqlalchemy as sa

from rackloom.carve.store.prepared import PreparedListing
from rackloom.carve.store.schema import instance, logical_partition, machine, machine_gpu, nvlink_interface
from rackloom.carve.store.values import IdFactory, InterfaceSpec, Status, invalid
from rackloom.core.partitions.status_rules import WAITING_REASON

LEAVING_REASON = "leaving the partition"


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


def initial_interfaces(
    conn: sa.Connection, vpc: sa.Row[Any], wanted: Sequence[InterfaceSpec] | None, gpus: int
) -> tuple[InterfaceSpec, ...]:
    """The interfaces of a new instance with `gpus` NVLink GPUs: those requested, else the VPC's default."""
    if wanted is not None:
        check_interfaces(conn, vpc, wanted, gpus)
        return tuple(wanted)
    if vpc.logical_partition_id is None:
        return ()
    return tuple(InterfaceSpec(vpc.logical_partition_id, index) for index in range(gpus))


def check_interfaces(
    conn: sa.Connection, vpc: sa.Row[Any], wanted: Sequence[InterfaceSpec], gpus: int
) -> None:
    """Refuse interfaces that the hardware, the VPC or the logical partitions do not allow."""
    if not wanted:
        return
    if vpc.logical_partition_id is None:
        check_hardware_and_partitions(conn, vpc, wanted, gpus)
        return
    _check_devices(wanted, gpus)
    for spec in wanted:
        if spec.logical_partition_id != vpc.logical_partition_id:
            raise invalid(
                f"NVLink Logical Partition {spec.logical_partition_id} of deviceInstance"
                f" {spec.device_instance} does not match NVLink Logical Partition of VPC"
            )


def check_hardware_and_partitions(
    conn: sa.Connection, vpc: sa.Row[Any], wanted: Sequence[InterfaceSpec], gpus: int
) -> None:
    """As `check_interfaces`, whatever the default of the VPC: an instance may be older than the default."""
    _check_devices(wanted, gpus)
    _check_logical_partitions(conn, vpc, wanted)


def _check_logical_partitions(conn: sa.Connection, vpc: sa.Row[Any], wanted: Sequence[InterfaceSpec]) -> None:
    ids = {spec.logical_partition_id for spec in wanted}
    rows = conn.execute(sa.select(logical_partition).where(logical_partition.c.id.in_(ids))).all()
    # Another tenant's partition is answered like one that does not exist, so that ids disclose nothing.
    found = {row.id: row for row in rows if row.tenant_id == vpc.tenant_id}
    for spec in wanted:
        partition = found.get(spec.logical_partition_id)
        if partition is None:
            raise invalid(f"Could not find NVLink Logical Partition {spec.logical_partition_id} of Tenant")
        if partition.site_id != vpc.site_id:
            raise invalid(f"NVLink Logical Partition {partition.id} does not belong to the Site of the VPC")
        if partition.status != Status.READY:
            raise invalid(f"NVLink Logical Partition {partition.id} is not in Ready state")


@cache
def interface_listing() -> sa.Select[Any]:
    """Interfaces with the GUID and the domain of their GPUs (None until observed)."""
    gpu = sa.and_(
        machine_gpu.c.machine_id == instance.c.machine_id,
        machine_gpu.c.module_id == nvlink_interface.c.device_instance + 1,
    )
    source = nvlink_interface.join(instance, instance.c.id == nvlink_interface.c.instance_id)
    source = source.join(machine, machine.c.id == instance.c.machine_id).join(machine_gpu, gpu, isouter=True)
    joined = (machine.c.domain, machine_gpu.c.guid, instance.c.site_id, instance.c.tenant_id)
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


def interfaces_of(conn: sa.Connection, instance_id: str) -> Sequence[sa.Row[Any]]:
    """The interfaces of an instance, the ones being detached too."""
    return conn.execute(
        sa.select(nvlink_interface).where(nvlink_interface.c.instance_id == instance_id)
    ).all()


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


def replace_interfaces(
    conn: sa.Connection, instance_id: str, wanted: Sequence[InterfaceSpec], now: float, ids: IdFactory
) -> bool:
    """Make `wanted` the interfaces of the instance; False when they already are.

    A GPU that stays in its logical partition keeps its row, and with it its readiness.
    """
    live = {
        InterfaceSpec(row.logical_partition_id, row.device_instance): row.id
        for row in interfaces_of(conn, instance_id)
        if row.status != Status.DELETING
    }
    unwanted = [row_id for spec, row_id in live.items() if spec not in wanted]
    new = [spec for spec in wanted if spec not in live]
    detached = sa.update(nvlink_interface).where(nvlink_interface.c.id.in_(unwanted))
    conn.execute(detached.values(status=Status.DELETING, reason=LEAVING_REASON, intent_at=now, updated=now))
    if new:
        row = {"instance_id": instance_id, "status": Status.PENDING, "reason": WAITING_REASON}
        times = {"intent_at": now, "created": now, "updated": now}
        rows = [
            {
                **row,
                **times,
                "id": ids(),
                "logical_partition_id": spec.logical_partition_id,
                "device_instance": spec.device_instance,
            }
            for spec in new
        ]
        conn.execute(sa.insert(nvlink_interface), rows)
    return bool(unwanted or new)


def detach_all_interfaces(conn: sa.Connection, instance_id: str, now: float) -> None:
    """Detach every GPU; the rows stay until the GPUs are observed outside their partitions."""
    mine = sa.update(nvlink_interface).where(nvlink_interface.c.instance_id == instance_id)
    conn.execute(mine.values(status=Status.DELETING, reason=LEAVING_REASON, intent_at=now, updated=now))


def delete_interfaces(conn: sa.Connection, instance_id: str) -> None:
    """Delete the records of all interfaces of an instance; the GPUs stay where they are."""
    conn.execute(sa.delete(nvlink_interface).where(nvlink_interface.c.instance_id == instance_id))


def _check_devices(wanted: Sequence[InterfaceSpec], gpus: int) -> None:
    if gpus == 0:
        raise invalid(
            "NVLink Interfaces require GPUs with device type NVLink",
            nvLinkInterfaces="neither the Instance Type nor the Machine has GPUs with device type NVLink",
        )
    devices = [spec.device_instance for spec in wanted]
    if any(not 0 <= device < gpus for device in devices):
        raise invalid(
            f"deviceInstance must be between 0 and {gpus - 1}",
            nvLinkInterfaces=f"each deviceInstance must be between 0 and {gpus - 1}",
        )
    if len(set(devices)) < len(devices):
        raise invalid(
            "deviceInstance must be unique", nvLinkInterfaces="a GPU may be in one logical partition only"
        )


def partition_members(conn: sa.Connection, logical_partitions: Collection[str]) -> dict[str, dict[str, int]]:
    """Logical partition -> domain -> how many GPUs are, or shall be, in it."""
    partition = nvlink_interface.c.logical_partition_id
    counted = (
        sa.select(partition, machine.c.domain, sa.func.count().label("members"))
        .select_from(nvlink_interface)
        .join(instance, instance.c.id == nvlink_interface.c.instance_id)
        .join(machine, machine.c.id == instance.c.machine_id)
        .where(
            partition.in_(logical_partitions),
            nvlink_interface.c.status != Status.DELETING,
            instance.c.status != Status.TERMINATING,
            machine.c.domain.is_not(None),
        )
        .group_by(partition, machine.c.domain)
    )
    found: dict[str, dict[str, int]] = {}
    for row in conn.execute(counted):
        found.setdefault(row.logical_partition_id, {})[row.domain] = row.members
    return found
