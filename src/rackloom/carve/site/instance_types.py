"""Instance types: kinds of machine, and whether their GPUs speak NVLink."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.site import history, machines, sites
from rackloom.carve.site.problems import conflict, forbidden, invalid, not_found
from rackloom.carve.site.tables import allocation_constraint, instance, machine
from rackloom.carve.site.tables import instance_type as table
from rackloom.carve.site.values import Ids, Status

Capability = Mapping[str, Any]

DEVICE_TYPES = {"Network": "DPU", "GPU": "NVLink"}
"""The only device type that a capability of each type may name; the other types name none."""


def get(conn: sa.Connection, type_id: str) -> sa.Row[Any]:
    """The instance type; refused when there is none of that id."""
    found = conn.execute(sa.select(table).where(table.c.id == type_id)).one_or_none()
    if found is None:
        raise not_found("Could not find Instance Type with specified ID")
    return found


def nvlink_gpus(capabilities: Sequence[Capability]) -> int:
    """How many GPUs of one machine can be put into an NVLink partition."""
    return sum(
        int(one.get("count") or 0)
        for one in capabilities
        if one["type"] == "GPU" and one.get("deviceType") == "NVLink"
    )


class TypeStats(msgspec.Struct, frozen=True):
    """Machines of a type, and how many of them are spoken for."""

    machines: int
    allocated: int
    used: int
    usable: int
    """Empty, and neither cordoned nor in maintenance."""


def stats(conn: sa.Connection, type_ids: Collection[str]) -> dict[str, TypeStats]:
    """The numbers of several instance types."""
    constraint = allocation_constraint
    given = (
        sa.select(constraint.c.instance_type_id, sa.func.sum(constraint.c.value))
        .where(constraint.c.instance_type_id.in_(type_ids))
        .group_by(constraint.c.instance_type_id)
    )
    allocated: dict[str, int] = {row[0]: row[1] for row in conn.execute(given)}
    shown: dict[str, Counter[str]] = {type_id: Counter() for type_id in type_ids}
    for row in conn.execute(machines.listing().where(machine.c.instance_type_id.in_(type_ids))):
        shown[row.instance_type_id][row.shown_status] += 1
    return {
        type_id: TypeStats(
            count.total(), allocated.get(type_id, 0), count[machines.IN_USE], count[Status.READY]
        )
        for type_id, count in shown.items()
    }


def create(
    conn: sa.Connection,
    provider_id: str,
    *,
    site_id: str,
    name: str,
    description: str | None,
    labels: Mapping[str, str],
    capabilities: Sequence[Capability],
    now: float,
    ids: Ids,
) -> str:
    """A new instance type at a site; returns its id."""
    if sites.get(conn, site_id).provider_id != provider_id:
        raise forbidden("Site is not associated with org's Infrastructure Provider")
    _check_capabilities(capabilities)
    _check_name(conn, site_id, name)
    new = ids()
    row: dict[str, Any] = {
        "id": new,
        "site_id": site_id,
        "name": name,
        "description": description,
        "labels": dict(labels),
    }
    row |= {"capabilities": [dict(one) for one in capabilities], "status": Status.READY}
    conn.execute(sa.insert(table).values(**row, created=now, updated=now))
    history.record(conn, new, Status.READY, "Instance Type is ready for use", now)
    return new


def update(
    conn: sa.Connection,
    provider_id: str,
    type_id: str,
    *,
    name: str | None,
    description: str | None,
    labels: Mapping[str, str] | None,
    capabilities: Sequence[Capability] | None,
    now: float,
) -> None:
    """Change an instance type; None leaves a field. What runs on it keeps what it has."""
    kind = of_provider(conn, provider_id, type_id)
    wanted = {"name": name, "description": description, "labels": labels, "capabilities": capabilities}
    changes = {key: value for key, value in wanted.items() if value not in (None, kind._mapping[key])}
    if "name" in changes:
        _check_name(conn, kind.site_id, str(name))
    if capabilities is not None:
        _check_capabilities(capabilities)
    if changes:
        conn.execute(sa.update(table).where(table.c.id == type_id).values(**changes, updated=now))


def delete(conn: sa.Connection, provider_id: str, type_id: str) -> None:
    """Remove an instance type that nothing refers to."""
    of_provider(conn, provider_id, type_id)
    for user, column in (
        ("Machines", machine.c.instance_type_id),
        ("Instances", instance.c.instance_type_id),
        ("Allocations", allocation_constraint.c.instance_type_id),
    ):
        count = conn.execute(sa.select(sa.func.count()).where(column == type_id)).scalar_one()
        if count:
            raise conflict(f"{count} {user} are associated with this Instance Type, unable to delete")
    conn.execute(sa.delete(table).where(table.c.id == type_id))
    history.forget(conn, [type_id])


def of_provider(conn: sa.Connection, provider_id: str, type_id: str) -> sa.Row[Any]:
    """The provider's instance type; one of somebody else is answered like one that does not exist."""
    kind = get(conn, type_id)
    if sites.get(conn, kind.site_id).provider_id != provider_id:
        raise not_found("Could not find Instance Type with specified ID")
    return kind


def remove_machine(conn: sa.Connection, provider_id: str, type_id: str, machine_id: str, now: float) -> None:
    """Take a machine that carries nothing out of the type."""
    of_provider(conn, provider_id, type_id)
    mine = sa.and_(machine.c.id == machine_id, machine.c.instance_type_id == type_id)
    if conn.execute(sa.select(machine.c.id).where(mine)).first() is None:
        raise not_found("Could not find Machine association with specified ID")
    if conn.execute(sa.select(instance.c.id).where(instance.c.machine_id == machine_id)).first() is not None:
        raise conflict("Machine carries an Instance of this Instance Type")
    conn.execute(sa.update(machine).where(mine).values(instance_type_id=None, updated=now))


def assign_machines(
    conn: sa.Connection, provider_id: str, type_id: str, machine_ids: Sequence[str], now: float
) -> None:
    """Make machines of the site machines of this type."""
    kind = of_provider(conn, provider_id, type_id)
    rows = conn.execute(sa.select(machine).where(machine.c.id.in_(machine_ids))).all()
    missing = sorted(set(machine_ids) - {row.id for row in rows if row.site_id == kind.site_id})
    if missing:
        raise invalid("Could not find Machines with IDs specified in request", machineIds=", ".join(missing))
    taken = sorted(row.id for row in rows if row.instance_type_id not in (None, type_id))
    if taken:
        raise conflict("Machines already belong to another Instance Type", machineIds=", ".join(taken))
    chosen = machine.c.id.in_(machine_ids)
    conn.execute(sa.update(machine).where(chosen).values(instance_type_id=type_id, updated=now))


def _check_name(conn: sa.Connection, site_id: str, name: str) -> None:
    same = conn.execute(sa.select(table.c.id).where(table.c.site_id == site_id, table.c.name == name))
    existing = same.scalar_one_or_none()
    if existing is not None:
        raise conflict("An Instance Type with specified name already exists at Site", id=existing)


def _check_capabilities(capabilities: Sequence[Capability]) -> None:
    for one in capabilities:
        device = one.get("deviceType")
        if device is not None and device != DEVICE_TYPES.get(one["type"]):
            raise invalid(
                "Error validating Machine Capabilities",
                deviceType=f"{device!r} is not allowed for capability type {one['type']}",
            )
