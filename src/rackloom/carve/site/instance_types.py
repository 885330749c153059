"""Instance types: kinds of machine, and whether their GPUs speak NVLink."""

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from rackloom.carve.site import history, sites
from rackloom.carve.site.problems import conflict, forbidden, invalid, not_found
from rackloom.carve.site.tables import instance_type as table
from rackloom.carve.site.tables import machine
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
    same = conn.execute(sa.select(table.c.id).where(table.c.site_id == site_id, table.c.name == name))
    existing = same.scalar_one_or_none()
    if existing is not None:
        raise conflict("An Instance Type with specified name already exists at Site", id=existing)
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


def assign_machines(
    conn: sa.Connection, provider_id: str, type_id: str, machine_ids: Sequence[str], now: float
) -> None:
    """Make machines of the site machines of this type."""
    kind = get(conn, type_id)
    if sites.get(conn, kind.site_id).provider_id != provider_id:
        raise forbidden("Instance Type is not associated with org's Infrastructure Provider")
    rows = conn.execute(sa.select(machine).where(machine.c.id.in_(machine_ids))).all()
    missing = sorted(set(machine_ids) - {row.id for row in rows if row.site_id == kind.site_id})
    if missing:
        raise invalid("Could not find Machines with IDs specified in request", machineIds=", ".join(missing))
    taken = sorted(row.id for row in rows if row.instance_type_id not in (None, type_id))
    if taken:
        raise conflict("Machines already belong to another Instance Type", machineIds=", ".join(taken))
    chosen = machine.c.id.in_(machine_ids)
    conn.execute(sa.update(machine).where(chosen).values(instance_type_id=type_id, updated=now))


def _check_capabilities(capabilities: Sequence[Capability]) -> None:
    for one in capabilities:
        device = one.get("deviceType")
        if device is not None and device != DEVICE_TYPES.get(one["type"]):
            raise invalid(
                "Error validating Machine Capabilities",
                deviceType=f"{device!r} is not allowed for capability type {one['type']}",
            )
