"""From records to the rooms that the pure placement chooses among."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.plan.values import GpuHealth
from rackloom.carve.site import machines
from rackloom.carve.site.problems import Kind, Rejected
from rackloom.carve.site.tables import (
    domain_dispute,
    domain_pause,
    instance,
    machine,
    machine_gpu,
    nvlink_interface,
)
from rackloom.carve.site.values import Status
from rackloom.claim.place.instances import DomainRoom, Placement, TrayRequest, TrayRoom, choose_trays
from rackloom.errors import Refused

UNHEALTHY = (GpuHealth.DEGRADED, GpuHealth.NO_NVLINK, GpuHealth.DEGRADED_BANDWIDTH)


# Built once: every new instance asks these.
_sick: sa.BindParameter[str] = sa.bindparam("sick", expanding=True)
_closed_domains = sa.union_all(sa.select(domain_pause.c.domain), sa.select(domain_dispute.c.domain))
is_in_service = sa.and_(
    machine.c.status == Status.READY,
    machine.c.missing_since.is_(None),
    sa.or_(machine.c.domain.is_(None), machine.c.domain.not_in(_closed_domains)),
    ~machines.is_cordoned,
)
"""Machines that may be given away when they are empty: of no domain that is paused or in dispute."""
_open = sa.and_(
    machine.c.instance_type_id == sa.bindparam("type"),
    is_in_service,
    machine.c.id.not_in(sa.select(instance.c.machine_id)),
)
"""Empty machines of a type that may be given away, whatever is wrong with their GPUs."""
_healthy = sa.and_(_open, machine.c.id.not_in(_sick))
_order = (machine.c.rack, machine.c.chassis_serial, machine.c.slot)
_COUNTED = sa.select(machine.c.domain, sa.func.count()).where(_healthy).group_by(machine.c.domain)
_SICK = sa.select(machine.c.id, machine.c.domain).where(_open, machine.c.id.in_(_sick)).order_by(*_order)
_FIRST = (
    sa.select(machine.c.id).where(_healthy).order_by(*_order).limit(sa.bindparam("most", type_=sa.Integer))
)
_FIRST_HERE = _FIRST.where(machine.c.domain == sa.bindparam("domain"))
_FIRST_NOWHERE = _FIRST.where(machine.c.domain.is_(None))


class Seat(str):
    """Stands for one of the healthy machines of `domain`: the choice needs no more than their number."""

    __slots__ = ("domain",)
    domain: str | None


def place(
    conn: sa.Connection, request: TrayRequest, *, type_id: str, logical_partitions: Collection[str]
) -> Placement:
    """Machines of the type for `request`; refused as a conflict when the site has no room."""
    standing = Counter[str]()
    for in_domain in members(conn, logical_partitions).values():
        standing.update(in_domain)
    # Of many machines few are sick: those are named to the database, the others counted by it.
    sick = sick_gpus(conn, None)
    try:
        chosen = choose_trays(request, rooms(conn, type_id, standing, sick))
    except Refused as refusal:
        raise Rejected(Kind.CONFLICT, refusal.reason, nearest_fix=refusal.nearest_fix) from None
    return msgspec.structs.replace(chosen, trays=_seated(conn, type_id, chosen.trays, sick))


def rooms(
    conn: sa.Connection, type_id: str, members: Mapping[str, int], sick: Mapping[str, str]
) -> list[DomainRoom]:
    """The empty machines of a type by domain: seats for the healthy ones, then the sick ones themselves.

    A domain with members is told of even where it has no room: they are to be joined there or nowhere.
    """
    asked = {"type": type_id, "sick": list(sick)}
    by_domain: dict[str | None, tuple[TrayRoom, ...]] = dict.fromkeys(members, ())
    for domain, count in conn.execute(_COUNTED, asked):
        by_domain[domain] = _seats(domain, count)
    for machine_id, domain in conn.execute(_SICK, asked) if sick else ():
        by_domain[domain] = (*by_domain.get(domain, ()), TrayRoom(machine_id, sick[machine_id]))
    return [
        DomainRoom(domain, trays, members.get(domain, 0) if domain else 0)
        for domain, trays in by_domain.items()
    ]


@lru_cache(maxsize=4096)
def _seats(domain: str | None, count: int) -> tuple[TrayRoom, ...]:
    seats = tuple(Seat(f"seat {number} in {domain}") for number in range(count))
    for seat in seats:
        seat.domain = domain
    return tuple(TrayRoom(seat) for seat in seats)


def _seated(
    conn: sa.Connection, type_id: str, trays: Sequence[str], sick: Collection[str]
) -> tuple[str, ...]:
    """The machines behind the chosen seats, each domain filled in the order of its racks."""
    wanted = Counter(tray.domain for tray in trays if isinstance(tray, Seat))
    found = {domain: iter(_first(conn, type_id, domain, most, sick)) for domain, most in wanted.items()}
    return tuple(next(found[tray.domain]) if isinstance(tray, Seat) else tray for tray in trays)


def _first(
    conn: sa.Connection, type_id: str, domain: str | None, most: int, sick: Collection[str]
) -> Sequence[str]:
    asked: dict[str, Any] = {"type": type_id, "sick": list(sick), "most": most}
    if domain is None:
        return conn.execute(_FIRST_NOWHERE, asked).scalars().all()
    return conn.execute(_FIRST_HERE, {**asked, "domain": domain}).scalars().all()


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
