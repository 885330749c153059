"""From records to the rooms that the pure placement chooses among."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import sqlalchemy as sa

from rackloom.carve.plan.values import GpuHealth
from rackloom.carve.site import machines
from rackloom.carve.site.problems import Kind, Rejected
from rackloom.carve.site.tables import domain_pause, instance, machine, machine_gpu, nvlink_interface
from rackloom.carve.site.values import Status
from rackloom.claim.place.trays import DomainRoom, Placement, TrayRequest, TrayRoom, choose_trays
from rackloom.errors import Refused

UNHEALTHY = (GpuHealth.DEGRADED, GpuHealth.NO_NVLINK, GpuHealth.DEGRADED_BANDWIDTH)


def place(
    conn: sa.Connection, request: TrayRequest, *, type_id: str, logical_partitions: Collection[str]
) -> Placement:
    """Machines of the type for `request`; refused as a conflict when the site has no room."""
    standing = Counter[str]()
    for in_domain in members(conn, logical_partitions).values():
        standing.update(in_domain)
    found = rooms(conn, type_id, standing)
    try:
        return choose_trays(request, found)
    except Refused as refusal:
        raise Rejected(Kind.CONFLICT, refusal.reason, nearest_fix=refusal.nearest_fix) from None


def rooms(conn: sa.Connection, type_id: str, members: Mapping[str, int]) -> list[DomainRoom]:
    """The empty machines of a type by domain, with what speaks against each."""
    free: sa.Select[Any] = (
        sa.select(machine.c.id, machine.c.domain, machine.c.missing_since, domain_pause.c.reason)
        .join(instance, instance.c.machine_id == machine.c.id, isouter=True)
        .join(domain_pause, domain_pause.c.domain == machine.c.domain, isouter=True)
        .where(
            machine.c.instance_type_id == type_id,
            machine.c.status == Status.READY,
            ~machines.is_cordoned,
            instance.c.id.is_(None),
        )
        .order_by(machine.c.rack, machine.c.chassis_serial, machine.c.slot)
    )
    # Of many machines few are sick: to name the others to the database would cost more than the answer.
    sick = sick_gpus(conn, None)
    by_domain: dict[str | None, list[TrayRoom]] = defaultdict(list)
    for machine_id, domain, missing_since, pause in conn.execute(free).all():
        room = TrayRoom(machine_id, sick.get(machine_id), _shut(missing_since, pause))
        by_domain[domain].append(room)
    return [
        DomainRoom(domain, tuple(trays), members.get(domain, 0) if domain else 0)
        for domain, trays in by_domain.items()
    ]


def members(conn: sa.Connection, logical_partitions: Collection[str]) -> dict[str, dict[str, int]]:
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


def sick_gpus(conn: sa.Connection, machine_ids: Collection[str] | None) -> dict[str, str]:
    """What switch controllers say is wrong with the GPUs of machines (None: of all), where something is."""
    wanted = sa.select(machine_gpu).where(machine_gpu.c.health.in_(UNHEALTHY))
    if machine_ids is not None:
        wanted = wanted.where(machine_gpu.c.machine_id.in_(machine_ids))
    found: dict[str, list[str]] = defaultdict(list)
    for row in conn.execute(wanted.order_by(machine_gpu.c.machine_id, machine_gpu.c.module_id)):
        health = GpuHealth(row.health).name.lower().replace("_", " ")
        found[row.machine_id].append(f"GPU {row.module_id - 1} {health}")
    return {machine_id: ", ".join(told) for machine_id, told in found.items()}


def _shut(missing_since: float | None, pause: str | None) -> str | None:
    if missing_since is not None:
        return "the switch controller no longer lists it"
    return None if pause is None else f"its domain is paused: {pause}"
