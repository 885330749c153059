"""From records to the rooms that the pure placement chooses among."""

from collections import defaultdict
from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from rackloom.carve.plan.values import GpuHealth
from rackloom.carve.site.problems import Kind, Rejected
from rackloom.carve.site.tables import instance, machine, machine_gpu, nvlink_interface
from rackloom.carve.site.values import Status
from rackloom.claim.place.trays import DomainRoom, Placement, TrayRequest, TrayRoom, choose_trays
from rackloom.errors import Refused

UNHEALTHY = (GpuHealth.DEGRADED, GpuHealth.NO_NVLINK, GpuHealth.DEGRADED_BANDWIDTH)


def place(
    conn: sa.Connection,
    request: TrayRequest,
    *,
    type_id: str,
    logical_partitions: Collection[str],
    allow_unhealthy: bool,
) -> Placement:
    """Machines of the type for `request`; refused as a conflict when the site has no room."""
    trays = _free_machines(conn, type_id, allow_unhealthy)
    members = _members(conn, logical_partitions)
    rooms = [
        DomainRoom(domain, tuple(rooms), members.get(domain, 0) if domain else 0)
        for domain, rooms in trays.items()
    ]
    try:
        return choose_trays(request, rooms)
    except Refused as refusal:
        raise Rejected(Kind.CONFLICT, refusal.reason, nearest_fix=refusal.nearest_fix) from None


def _free_machines(
    conn: sa.Connection, type_id: str, allow_unhealthy: bool
) -> dict[str | None, list[TrayRoom]]:
    sick = (
        sa.select(machine_gpu.c.machine_id)
        .where(machine_gpu.c.machine_id == machine.c.id, machine_gpu.c.health.in_(UNHEALTHY))
        .exists()
    )
    free: sa.Select[Any] = (
        sa.select(machine.c.id, machine.c.domain, sick.label("sick"))
        .join(instance, instance.c.machine_id == machine.c.id, isouter=True)
        .where(
            machine.c.instance_type_id == type_id,
            machine.c.status == Status.READY,
            instance.c.id.is_(None),
        )
        .order_by(machine.c.rack, machine.c.chassis_serial, machine.c.slot)
    )
    rooms: dict[str | None, list[TrayRoom]] = defaultdict(list)
    for row in conn.execute(free):
        rooms[row.domain].append(TrayRoom(row.id, allow_unhealthy or not row.sick))
    return rooms


def _members(conn: sa.Connection, logical_partitions: Collection[str]) -> dict[str, int]:
    counted = (
        sa.select(machine.c.domain, sa.func.count().label("members"))
        .select_from(nvlink_interface)
        .join(instance, instance.c.id == nvlink_interface.c.instance_id)
        .join(machine, machine.c.id == instance.c.machine_id)
        .where(
            nvlink_interface.c.logical_partition_id.in_(logical_partitions),
            nvlink_interface.c.status != Status.DELETING,
            instance.c.status != Status.TERMINATING,
            machine.c.domain.is_not(None),
        )
        .group_by(machine.c.domain)
    )
    return {row.domain: row.members for row in conn.execute(counted)}
