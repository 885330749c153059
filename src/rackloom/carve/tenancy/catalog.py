"""A provider's offer: sites, machines and instance types.

A site is registered or not, has capabilities, and a policy for the factory default partition. A machine
is a compute tray at a fixed place (chassis serial and slot). It shows as in use while it carries an
instance, else in maintenance while it is cordoned, else with its own status. An instance type groups
machines. Only GPUs whose capability names device type NVLink can join partitions. `instance_type_stats`
counts the machines of a type: those that exist, and those that are allocated, used and usable.

A provider can change only its own sites and types. An object of another provider is answered as not
found. An instance type is deleted only when no machine, instance, allocation or reservation refers to it. A
machine that is reserved keeps its type.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.store import journal
from rackloom.carve.store.prepared import (
    count_rows,
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
    cordon,
    instance,
    instance_type,
    machine,
    machine_gpu,
    tray_reservation,
)
from rackloom.carve.store.schema import site as site_table
from rackloom.carve.store.values import (
    MAX_KEPT_BYTES,
    IdFactory,
    Status,
    conflict,
    forbidden,
    has_too_large_fields,
    invalid,
    not_found,
)
from rackloom.carve.tenancy.placement import check_unreserved, is_cordoned, is_shut, reserved_trays
from rackloom.core.place.instance_trays import still_promised
from rackloom.topology.part_names import canonical_name, read_part_name

# Sites.


SITE_CAPABILITIES = (
    "nativeNetworking",
    "networkSecurityGroup",
    "nvLinkPartition",
    "flow",
    "imageBasedOperatingSystem",
)


def get_site(conn: sa.Connection, site_id: str) -> sa.Row[Any]:
    """The site. Raises Rejected (not found)."""
    return require(find_row(conn, site_table, id=site_id), "Could not find Site with specified ID")


def check_site_registered(site: sa.Row[Any]) -> None:
    """Refuse work on a site that is not in service."""
    if site.status != Status.REGISTERED:
        raise invalid("Site specified in request is not in Registered state")


def check_nvlink_enabled(site: sa.Row[Any]) -> None:
    """Refuse NVLink partitions if the site has disabled them."""
    if not site.capabilities.get("nvLinkPartition"):
        raise invalid("Site specified in request does not have NVLink Partition capability enabled")


def update_site(
    conn: sa.Connection,
    provider_id: str,
    site_id: str,
    *,
    name: str | None,
    description: str | None,
    capabilities: Mapping[str, bool | None],
    extra: Mapping[str, Any],
    now: float,
) -> None:
    """Change a site. None leaves a field or a capability as it is."""
    site = get_site(conn, site_id)
    if site.provider_id != provider_id:
        raise forbidden("Site is not associated with org's Infrastructure Provider")
    switched = {key: value for key, value in capabilities.items() if value is not None}
    changes: dict[str, Any] = {
        "capabilities": site.capabilities | switched,
        "extra": site.extra | dict(extra),
    }
    changes |= changed_values(site, name=name, description=description) | {"updated": now}
    if name not in (None, site.name):
        require_unused(find_row(conn, site_table, name=name), "A Site with specified name already exists")
    update_rows(conn, site_table, {"id": site_id}, **changes)


def changed_values(row: sa.Row[Any], **wanted: object) -> dict[str, Any]:
    """The columns of `row` that get another value. None leaves a column as it is."""
    return {key: value for key, value in wanted.items() if value not in (None, row._mapping[key])}


def merged_extra(before: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """The fields without a meaning here that an object keeps after a change. Raises Rejected if too large."""
    merged = {**before, **changed}
    if changed and has_too_large_fields(merged):
        raise invalid(
            f"the fields that have no meaning here take more than {MAX_KEPT_BYTES} bytes together",
            nearest_fix="leave some of them out",
        )
    return merged


# Machines.


MACHINE_IN_USE = "InUse"
MACHINE_MAINTENANCE = "Maintenance"

_is_ready_but_missing = sa.and_(machine.c.status == Status.READY, machine.c.missing_since.is_not(None))
shown_machine_status = sa.case(
    (instance.c.id.is_not(None), MACHINE_IN_USE),
    (is_cordoned, MACHINE_MAINTENANCE),
    (_is_ready_but_missing, Status.UNKNOWN),
    else_=machine.c.status,
)
"""A machine with an instance is in use, even if it is unhealthy. A missing one is never Ready."""


def has_machines(conn: sa.Connection) -> bool:
    """Whether the store has any machine."""
    return has_row(conn, machine)


def get_machine(conn: sa.Connection, machine_id: str) -> sa.Row[Any]:
    """The machine. Raises Rejected (not found)."""
    return require(find_row(conn, machine, id=machine_id), "Could not find Machine with specified ID")


def machine_ids_named(conn: sa.Connection, names: Collection[str]) -> set[str]:
    """Machines that names mean: an id, the name of a tray or of a part of it, or a fabric GUID."""
    found = set(conn.execute(sa.select(machine.c.id).where(machine.c.id.in_(names))).scalars())
    for name in map(canonical_name, {*names} - found):
        part = read_part_name(name)
        is_rack = sa.or_(machine.c.rack == part.rack, machine.c.chassis_serial == part.rack)
        guid = str(int(name, 16)) if name.startswith("0x") else ""
        with_gpu = sa.select(machine_gpu.c.machine_id).where(machine_gpu.c.guid == guid)
        means = sa.or_(sa.and_(is_rack, machine.c.slot == part.slot), machine.c.id.in_(with_gpu))
        found.update(conn.execute(sa.select(machine.c.id).where(means)).scalars())
    return found


@cache
def machine_listing() -> sa.Select[Any]:
    """Machines with their instance (instance_id, tenant_id, or None if free), shown_status, cordon_reason."""
    return sa.select(
        machine,
        instance.c.id.label("instance_id"),
        instance.c.tenant_id.label("tenant_id"),
        shown_machine_status.label("shown_status"),
        cordon.c.reason.label("cordon_reason"),
    ).select_from(
        machine.join(instance, instance.c.machine_id == machine.c.id, isouter=True).join(
            cordon, cordon.c.machine_id == machine.c.id, isouter=True
        )
    )


def gpus_of_machines(conn: sa.Connection, machine_ids: Collection[str]) -> dict[str, list[sa.Row[Any]]]:
    """The GPU rows of machines, in module order."""
    rows = conn.execute(
        sa.select(machine_gpu)
        .where(machine_gpu.c.machine_id.in_(machine_ids))
        .order_by(machine_gpu.c.machine_id, machine_gpu.c.module_id)
    )
    found: dict[str, list[sa.Row[Any]]] = {machine_id: [] for machine_id in machine_ids}
    for row in rows:
        found[row.machine_id].append(row)
    return found


def largest_domain_size(conn: sa.Connection, site_id: str) -> int:
    """Machines of the largest NVLink domain of the site, or of the whole site while no domain is known."""
    per_domain = (
        sa.select(sa.func.count())
        .where(machine.c.site_id == site_id, machine.c.domain.is_not(None))
        .group_by(machine.c.domain)
    )
    at_site = sa.select(sa.func.count()).where(machine.c.site_id == site_id)
    return max(conn.execute(per_domain).scalars(), default=0) or conn.execute(at_site).scalar_one()


def domains_of_machines(conn: sa.Connection, machine_ids: Collection[str]) -> dict[str, str | None]:
    """The NVLink domain of each machine, or None until a switch controller reports it."""
    rows = conn.execute(sa.select(machine.c.id, machine.c.domain).where(machine.c.id.in_(machine_ids)))
    return {row.id: row.domain for row in rows}


# Instance types.


MachineCapabilities = Mapping[str, Any]

CAPABILITY_DEVICE_TYPES = {"Network": "DPU", "GPU": "NVLink"}
"""The only device type that a capability of each type may name. The other types name none."""


def get_instance_type(conn: sa.Connection, type_id: str) -> sa.Row[Any]:
    """The instance type. Raises Rejected (not found)."""
    row = find_row(conn, instance_type, id=type_id)
    return require(row, "Could not find Instance Type with specified ID")


def nvlink_gpu_count(capabilities: Sequence[MachineCapabilities]) -> int:
    """The number of GPUs of one machine that can be put into an NVLink partition."""
    return sum(
        int(capability.get("count") or 0)
        for capability in capabilities
        if capability["type"] == "GPU" and capability.get("deviceType") == "NVLink"
    )


class InstanceTypeStats(msgspec.Struct, frozen=True):
    """Machines of a type, and how many of them are allocated and used: by all tenants, or by one."""

    machines: int
    allocated: int
    used: int
    promised: int
    """Allocated and not in use, summed over the tenants: none of them uses up another's allocation."""
    usable: int
    """Empty, neither cordoned nor in maintenance, not shut, and not reserved for another tenant than the
    one."""


def instance_type_stats(
    conn: sa.Connection, type_ids: Collection[str], tenant_id: str | None, now: float
) -> dict[str, InstanceTypeStats]:
    """The numbers of each instance type: a tenant's allocation and use, or those of all tenants if None."""
    kept = {} if tenant_id is None else reserved_trays(conn, now, None)
    others = {tray.machine_id for tray in kept.values() if tray.tenant_id != tenant_id}
    type_id_column = allocation_constraint.c.instance_type_id
    summed = (
        sa.select(type_id_column, allocation.c.tenant_id, sa.func.sum(allocation_constraint.c.value))
        .join(allocation, allocation.c.id == allocation_constraint.c.allocation_id)
        .where(type_id_column.in_(type_ids))
        .group_by(type_id_column, allocation.c.tenant_id)
    )
    if tenant_id is not None:
        summed = summed.where(owned_by(allocation.c.tenant_id, tenant_id))
    allocated: dict[str, dict[str, int]] = {type_id: {} for type_id in type_ids}
    for type_id, holder, machines in conn.execute(summed):
        allocated[type_id][holder] = machines
    by_status: dict[str, Counter[str]] = {type_id: Counter() for type_id in type_ids}
    used: dict[str, Counter[str]] = {type_id: Counter() for type_id in type_ids}
    unusable = Counter[str]()
    listed = machine_listing().add_columns(is_shut.label("shut"))
    for row in conn.execute(listed.where(machine.c.instance_type_id.in_(type_ids))):
        by_status[row.instance_type_id][row.shown_status] += 1
        is_unusable = row.shut or row.id in others
        unusable[row.instance_type_id] += row.shown_status == Status.READY and is_unusable
        if row.shown_status == MACHINE_IN_USE and tenant_id in (None, row.tenant_id):
            used[row.instance_type_id][row.tenant_id] += 1
    return {
        type_id: InstanceTypeStats(
            count.total(),
            sum(allocated[type_id].values()),
            used[type_id].total(),
            still_promised(allocated[type_id], used[type_id]),
            count[Status.READY] - unusable[type_id],
        )
        for type_id, count in by_status.items()
    }


class NewInstanceType(msgspec.Struct, frozen=True):
    """An instance type to create."""

    site_id: str
    name: str
    description: str | None
    labels: Mapping[str, str]
    capabilities: Sequence[MachineCapabilities]


def create_instance_type(
    conn: sa.Connection, provider_id: str, wanted: NewInstanceType, now: float, ids: IdFactory
) -> str:
    """Create an instance type at a site. Return its id."""
    if get_site(conn, wanted.site_id).provider_id != provider_id:
        raise forbidden("Site is not associated with org's Infrastructure Provider")
    _check_capabilities(wanted.capabilities)
    _check_type_name(conn, wanted.site_id, wanted.name)
    row = {**msgspec.structs.asdict(wanted), "id": (new := ids()), "status": Status.READY}
    insert_row(conn, instance_type, **row, created=now, updated=now)
    journal.record_status(conn, new, Status.READY, "Instance Type is ready for use", now)
    return new


def update_instance_type(
    conn: sa.Connection,
    provider_id: str,
    type_id: str,
    *,
    name: str | None,
    description: str | None,
    labels: Mapping[str, str] | None,
    capabilities: Sequence[MachineCapabilities] | None,
    now: float,
) -> None:
    """Change an instance type. None leaves a field. Instances that run on it keep their values."""
    kind = instance_type_of_provider(conn, provider_id, type_id)
    changes = changed_values(
        kind, name=name, description=description, labels=labels, capabilities=capabilities
    )
    if "name" in changes:
        _check_type_name(conn, kind.site_id, str(name))
    if capabilities is not None:
        _check_capabilities(capabilities)
    if changes:
        update_rows(conn, instance_type, {"id": type_id}, **changes, updated=now)


def delete_instance_type(conn: sa.Connection, provider_id: str, type_id: str) -> None:
    """Remove an instance type that nothing refers to."""
    instance_type_of_provider(conn, provider_id, type_id)
    for user, table in (
        ("Machines", machine),
        ("Instances", instance),
        ("Allocations", allocation_constraint),
        ("Tray Reservations", tray_reservation),
    ):
        if count := count_rows(conn, table, instance_type_id=type_id):
            raise conflict(f"{count} {user} are associated with this Instance Type, unable to delete")
    delete_rows(conn, instance_type, id=type_id)
    journal.delete_histories(conn, [type_id])


def instance_type_of_provider(conn: sa.Connection, provider_id: str, type_id: str) -> sa.Row[Any]:
    """The provider's instance type. Raises Rejected (not found), also for one of another provider."""
    kind = get_instance_type(conn, type_id)
    if get_site(conn, kind.site_id).provider_id != provider_id:
        raise not_found("Could not find Instance Type with specified ID")
    return kind


def remove_machine_from_type(
    conn: sa.Connection, provider_id: str, type_id: str, machine_id: str, now: float
) -> None:
    """Remove a machine without an instance from the type."""
    instance_type_of_provider(conn, provider_id, type_id)
    mine = {"id": machine_id, "instance_type_id": type_id}
    require(find_row(conn, machine, **mine), "Could not find Machine association with specified ID")
    if has_row(conn, instance, machine_id=machine_id):
        raise conflict("Machine carries an Instance of this Instance Type")
    check_unreserved(conn, [machine_id], now)
    update_rows(conn, machine, mine, instance_type_id=None, updated=now)


def set_machine_type(
    conn: sa.Connection, provider_id: str, machine_id: str, type_id: str | None, now: float
) -> None:
    """Give a machine another instance type, or none."""
    before = get_machine(conn, machine_id).instance_type_id
    if before == type_id:
        return
    if before is not None:
        remove_machine_from_type(conn, provider_id, before, machine_id, now)
    if type_id is not None:
        assign_machines_to_type(conn, provider_id, type_id, [machine_id], now)


def set_machine_labels(conn: sa.Connection, machine_id: str, labels: Mapping[str, str], now: float) -> None:
    """Replace the labels of a machine."""
    update_rows(conn, machine, {"id": machine_id}, labels=dict(labels), updated=now)


def assign_machines_to_type(
    conn: sa.Connection, provider_id: str, type_id: str, machine_ids: Sequence[str], now: float
) -> None:
    """Assign machines of the site to this type."""
    kind = instance_type_of_provider(conn, provider_id, type_id)
    rows = conn.execute(sa.select(machine).where(machine.c.id.in_(machine_ids))).all()
    missing = sorted(set(machine_ids) - {row.id for row in rows if row.site_id == kind.site_id})
    if missing:
        raise invalid("Could not find Machines with IDs specified in request", machineIds=", ".join(missing))
    others = sorted(row.id for row in rows if row.instance_type_id not in (None, type_id))
    if others:
        raise conflict("Machines already belong to another Instance Type", machineIds=", ".join(others))
    chosen = machine.c.id.in_(machine_ids)
    conn.execute(sa.update(machine).where(chosen).values(instance_type_id=type_id, updated=now))


def _check_type_name(conn: sa.Connection, site_id: str, name: str) -> None:
    existing = find_row(conn, instance_type, site_id=site_id, name=name)
    require_unused(existing, "An Instance Type with specified name already exists at Site")


def _check_capabilities(capabilities: Sequence[MachineCapabilities]) -> None:
    for capability in capabilities:
        device = capability.get("deviceType")
        if device is not None and device != CAPABILITY_DEVICE_TYPES.get(capability["type"]):
            raise invalid(
                "Error validating Machine Capabilities",
                deviceType=f"{device!r} is not allowed for capability type {capability['type']}",
            )
