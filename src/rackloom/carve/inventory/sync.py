"""Inventory sync: how a valid observation updates machines, GPUs, ownership and statuses.

The key of a GPU is its place (chassis serial, slot, module id), because a place survives the swap of a
tray and the GUID does not. `sync_gpu_mapping` writes the domain of each observed machine and the GUID
and health of each GPU, and marks machines of the domain without any listed GPU as missing. A chassis
stays in its domain while its registered controller can be read, answers for that domain and lists a GPU
of it: a second domain that lists the chassis is not believed. A GUID is not taken from a machine of
another domain that is present or carries an instance. GPUs that an instance lost (moved or swapped
trays) are recorded until they return.

`apply_observations` runs the sync, carries ownership and pauses over when a chassis reports another
domain uuid, updates owned partitions, and then updates statuses. `apply_if_consistent` does so only
where the controllers of the domain agree, and returns the conflict otherwise. `withdraw_reading` is for
a controller that no longer says anything about a domain.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from rackloom.carve.observation import conflicts, latest
from rackloom.carve.observation.conflicts import ControllerConflict
from rackloom.carve.partitions import intent, ownership
from rackloom.carve.store import journal
from rackloom.carve.store.schema import endpoint, endpoint_chassis, instance, machine, machine_gpu
from rackloom.carve.store.schema import moved_gpu as table
from rackloom.carve.store.schema import observation as reading
from rackloom.carve.tenancy import status
from rackloom.core.partitions.domain import DomainObservation, ObservedGpu
from rackloom.topology.join_key import Source

# GPUs that an instance lost.


MachineModule = tuple[str, int]
"""Machine and module."""


class LostGpu(NamedTuple):
    """A GPU that an instance had in a place, and when another or none was there (seconds since the epoch)."""

    machine_id: str
    module_id: int
    guid: str
    since: float


# Built once: every pass that learns something asks these.
_MACHINES_WITH_INSTANCE = sa.select(instance.c.machine_id).where(
    instance.c.machine_id.in_(sa.bindparam("machines", expanding=True))
)
_LOST_GPUS = (
    sa.select(table.c.machine_id, table.c.module_id, table.c.guid, table.c.since)
    .join(instance, instance.c.machine_id == table.c.machine_id)
    .where(instance.c.created <= table.c.since)
    .order_by(table.c.machine_id, table.c.module_id)
)
_DELETE_LOST = sa.delete(table).where(
    table.c.machine_id == sa.bindparam("from_machine"), table.c.module_id == sa.bindparam("from_module")
)
_INSERT_LOST = sa.insert(table)


def record_lost_gpus(
    conn: sa.Connection,
    had: Mapping[MachineModule, str | None],
    listed: Mapping[MachineModule, str],
    now: float,
) -> None:
    """Keep which GPU an instance loses in which place, and forget it when that one is back.

    `had` are the GUIDs of places whose record changes now, `listed` those that a controller lists there;
    called before the records follow. What stood in the place after the GPU that the instance was given is
    not its loss. A GPU that was exchanged is kept too: it may be listed elsewhere later.
    """
    before = {(row.machine_id, row.module_id): row.guid for row in lost_gpus_of_instances(conn)}
    back = [place for place, guid in before.items() if listed.get(place) == guid]
    gone = {place: guid for place, guid in had.items() if guid is not None and listed.get(place) != guid}
    lost = _lost_by_instances(conn, {place: guid for place, guid in gone.items() if place not in before})
    if ended := [*back, *lost]:
        conn.execute(_DELETE_LOST, [{"from_machine": one[0], "from_module": one[1]} for one in ended])
    if lost:
        told = [{"machine_id": at[0], "module_id": at[1], "guid": guid} for at, guid in lost.items()]
        conn.execute(_INSERT_LOST, [{**one, "since": now} for one in told])


def _lost_by_instances(conn: sa.Connection, gone: Mapping[MachineModule, str]) -> dict[MachineModule, str]:
    if not gone:
        return {}
    held = set(
        conn.execute(_MACHINES_WITH_INSTANCE, {"machines": list({place[0] for place in gone})}).scalars()
    )
    return {place: guid for place, guid in gone.items() if place[0] in held}


def lost_gpus_of_instances(conn: sa.Connection) -> list[LostGpu]:
    """What was lost by instances that still hold the machine."""
    return list(map(LostGpu._make, conn.execute(_LOST_GPUS).all()))


# Machines, domains and GPUs.


GpuPosition = tuple[str, int]

_neighbor = machine.alias()
_stays_in_domain = sa.exists().where(
    machine.c.domain != sa.bindparam("domain"),
    endpoint_chassis.c.chassis_serial == machine.c.chassis_serial,
    endpoint.c.id == endpoint_chassis.c.endpoint_id,
    endpoint.c.domain == machine.c.domain,
    reading.c.endpoint_id == endpoint.c.id,
    reading.c.facts.is_not(None),
    reading.c.unknown_since.is_(None),
    _neighbor.c.chassis_serial == machine.c.chassis_serial,
    _neighbor.c.domain == machine.c.domain,
    _neighbor.c.missing_since.is_(None),
)

# Built once: every pass asks these.
_MACHINES_IN_CHASSIS: sa.Select[Any] = sa.select(
    machine.c.id, machine.c.chassis_serial, machine.c.slot, machine.c.domain, machine.c.missing_since
).where(machine.c.chassis_serial.in_(sa.bindparam("serials", expanding=True)), ~_stays_in_domain)
_RECORDED_GPUS = sa.select(
    machine_gpu.c.machine_id, machine_gpu.c.module_id, machine_gpu.c.guid, machine_gpu.c.health
).where(machine_gpu.c.machine_id.in_(sa.bindparam("machines", expanding=True)))
# A GPU that turned up here is no longer where it was. What another domain's controller lists, or listed where
# an instance is, is not taken from there: the instance would be released by a stranger's word.
_has_instance = sa.exists().where(instance.c.machine_id == machine.c.id)
_unclaimed_machines = sa.select(machine.c.id).where(
    sa.or_(
        machine.c.domain.is_(None),
        machine.c.domain == sa.bindparam("domain"),
        sa.and_(machine.c.missing_since.is_not(None), ~_has_instance),
    )
)
_claimed_by_observation = sa.and_(
    machine_gpu.c.guid.in_(sa.bindparam("guids", expanding=True)),
    sa.or_(
        sa.func.coalesce(machine_gpu.c.source, "") != Source.NMX.value,
        machine_gpu.c.machine_id.in_(_unclaimed_machines),
    ),
)
_CLAIMED_GPUS = sa.select(machine_gpu.c.machine_id, machine_gpu.c.module_id, machine_gpu.c.guid).where(
    _claimed_by_observation
)
_CLEAR_CLAIMED = sa.update(machine_gpu).where(_claimed_by_observation).values(guid=None, source=None)
_MACHINES_IN_DOMAIN = sa.select(machine.c.id, machine.c.missing_since).where(
    machine.c.domain == sa.bindparam("domain")
)


def sync_gpu_mapping(conn: sa.Connection, observation: DomainObservation, now: float) -> frozenset[str]:
    """Write the mapping that `observation` shows; returns the domains in which it differs from before."""
    machines = _observed_machines(conn, observation)
    before = {row.domain for row in machines.values() if row.domain != observation.domain}
    known = _recorded_gpus(conn, [row.id for row in machines.values()])
    told = _observed_gpus(observation, machines)
    changed = {at: gpu for at, gpu in told.items() if known.get(at) != (str(gpu.guid), int(gpu.health))}
    if before:
        _move_to_domain(conn, machines.values(), before, observation.domain, now)
    if changed:
        guids = {at: str(gpu.guid) for at, gpu in changed.items()}
        taken = conn.execute(
            _CLAIMED_GPUS, {"guids": list(guids.values()), "domain": observation.domain}
        ).all()
        had = {at: known[at][0] for at in guids if at in known}
        record_lost_gpus(conn, had | {(row.machine_id, row.module_id): row.guid for row in taken}, guids, now)
        _write_gpus(conn, observation.domain, changed, known)
    _mark_missing(conn, observation, {row.id for row in machines.values()})
    rewired = any(known.get(at, (None, 0))[0] != str(gpu.guid) for at, gpu in changed.items())
    return journal.increment_revisions(conn, {observation.domain, *before} if before or rewired else ())


def _observed_machines(conn: sa.Connection, observation: DomainObservation) -> dict[GpuPosition, sa.Row[Any]]:
    serials = {gpu.chassis_serial for gpu in observation.gpus}
    rows = conn.execute(_MACHINES_IN_CHASSIS, {"serials": list(serials), "domain": observation.domain})
    slots = {(gpu.chassis_serial, gpu.slot) for gpu in observation.gpus}
    return {(row.chassis_serial, row.slot): row for row in rows if (row.chassis_serial, row.slot) in slots}


def _recorded_gpus(conn: sa.Connection, machine_ids: list[str]) -> dict[GpuPosition, tuple[str | None, int]]:
    rows = conn.execute(_RECORDED_GPUS, {"machines": machine_ids})
    return {(machine_id, module_id): (guid, health) for machine_id, module_id, guid, health in rows}


def _observed_gpus(
    observation: DomainObservation, machines: dict[GpuPosition, sa.Row[Any]]
) -> dict[GpuPosition, ObservedGpu]:
    return {
        (machines[gpu.chassis_serial, gpu.slot].id, gpu.module_id): gpu
        for gpu in observation.gpus
        if (gpu.chassis_serial, gpu.slot) in machines
    }


def _move_to_domain(
    conn: sa.Connection, seen: Collection[sa.Row[Any]], before: set[str | None], domain: str, now: float
) -> None:
    # A machine whose tray is away answers with the rest of its chassis, wherever that answers now.
    beside = sa.and_(
        machine.c.chassis_serial.in_({row.chassis_serial for row in seen}),
        machine.c.domain.in_({one for one in before if one is not None}),
    )
    chosen = sa.or_(machine.c.id.in_([row.id for row in seen]), beside)
    conn.execute(sa.update(machine).where(chosen).values(domain=domain, updated=now))


def _mark_missing(conn: sa.Connection, observation: DomainObservation, seen: set[str]) -> None:
    """A machine of the domain of which the controller lists no GPU is off, absent or broken."""
    rows = conn.execute(_MACHINES_IN_DOMAIN, {"domain": observation.domain}).all()
    lost = [row.id for row in rows if row.id not in seen and row.missing_since is None]
    back = [row.id for row in rows if row.id in seen and row.missing_since is not None]
    for machine_ids, since in ((lost, observation.observed_at), (back, None)):
        if machine_ids:
            chosen = machine.c.id.in_(machine_ids)
            conn.execute(sa.update(machine).where(chosen).values(missing_since=since))


def _write_gpus(
    conn: sa.Connection,
    domain: str,
    changed: dict[GpuPosition, ObservedGpu],
    known: dict[GpuPosition, tuple[str | None, int]],
) -> None:
    guids = [str(gpu.guid) for gpu in changed.values()]
    conn.execute(_CLEAR_CLAIMED, {"guids": guids, "domain": domain})
    table = machine_gpu
    at = sa.and_(
        table.c.machine_id == sa.bindparam("at_machine"), table.c.module_id == sa.bindparam("at_module")
    )
    old = [_gpu_row(where, gpu) for where, gpu in changed.items() if where in known]
    new = [_gpu_row(where, gpu) for where, gpu in changed.items() if where not in known]
    values: dict[str, Any] = {name: sa.bindparam(f"new_{name}") for name in ("guid", "source", "health")}
    if old:
        conn.execute(sa.update(table).where(at).values(**values), old)
    if new:
        keys: dict[str, Any] = {
            "machine_id": sa.bindparam("at_machine"),
            "module_id": sa.bindparam("at_module"),
        }
        conn.execute(sa.insert(table).values(**keys, **values), new)


def _gpu_row(where: GpuPosition, gpu: ObservedGpu) -> dict[str, object]:
    return {
        "at_machine": where[0],
        "at_module": where[1],
        "new_guid": str(gpu.guid),
        "new_source": Source.NMX.value,
        "new_health": int(gpu.health),
    }


# Applying observations.


def apply_observations(
    conn: sa.Connection, shown: Sequence[DomainObservation], now: float, left: Collection[str] = frozenset()
) -> None:
    """Write what the controllers of a domain have `shown`, one at least, the newest first.

    `left` are domains that its controller answered for before.
    """
    observation = shown[0]
    touched = sync_gpu_mapping(conn, observation, now)
    for one in sorted(touched - {observation.domain}):
        # The same chassis under another domain uuid: what was made there, and what was ordered, still holds.
        ownership.copy_ownership(conn, one, observation.domain)
        intent.copy_pause(conn, one, observation.domain)
        intent.delete_blocked_gpus(conn, one)
    ownership.update_owned_partitions(conn, shown, now)
    for domain in sorted({observation.domain, *touched, *left}):
        status.update_statuses(conn, domain, now)


def apply_if_consistent(
    conn: sa.Connection, domain: str, now: float, others: Collection[str] = frozenset()
) -> ControllerConflict | None:
    """Take over what the controllers of `domain` show where they agree; the dispute where they do not.

    Called when one of several told something, or tells nothing any more. `others` are domains that may list
    the same hardware: with them, and with those that do so already, the outcome is one. In a dispute nothing
    is learned.
    """
    concerned = conflicts.conflicting_domains(conn, domain).union(others)
    before = conflicts.conflict_of_domain(conn, domain)
    dispute = conflicts.update_conflict(conn, domain, before, concerned)
    _apply_valid_readings(conn, domain, now)
    for other in sorted(concerned):
        _compare_other_domain(conn, other, domain, now)
    return dispute


def _compare_other_domain(conn: sa.Connection, domain: str, with_domain: str, now: float) -> None:
    before = conflicts.conflict_of_domain(conn, domain)
    concerned = conflicts.conflicting_domains(conn, domain) | {with_domain}
    dispute = conflicts.update_conflict(conn, domain, before, concerned)
    if before is not None or dispute is not None:
        _apply_valid_readings(conn, domain, now)


def _apply_valid_readings(conn: sa.Connection, domain: str, now: float) -> None:
    shown = latest.latest_of_domain(conn, domain).shown
    if shown:
        apply_observations(conn, shown, now)
    else:
        status.update_statuses(conn, domain, now)


def withdraw_reading(conn: sa.Connection, domain: str, now: float) -> None:
    """As `compare`, where a controller tells nothing of `domain` any more.

    Those that are left need not have been read since, so what they showed counts again only after a dispute.
    """
    before = conflicts.conflict_of_domain(conn, domain)
    if before is None:
        status.update_statuses(conn, domain, now)
    else:
        apply_if_consistent(conn, domain, now)
