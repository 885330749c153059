"""Inventory sync: how a valid observation updates machines, GPUs, ownership and statuses.

The key of a GPU is its place (chassis serial, slot, module id), because a place survives the swap of a tray
and the GUID does not. `sync_gpu_mapping` writes the domain of each observed machine and the GUID and health
of each GPU, and marks GPUs of these machines that are not listed, and machines of the domain without any
listed GPU as missing. A chassis stays in its domain while its registered controller can be read, answers
for that domain and lists a GPU of it: a second domain that lists the chassis is not believed. A GUID is not
taken from a machine of another domain that is present or carries an instance. GPUs that an instance lost
(moved or swapped trays) are recorded until they return.

`apply_observations` runs the sync, carries ownership and pauses over when a chassis reports another
domain uuid, updates owned partitions and foreign trays, and then updates statuses.
`apply_if_consistent` does so only if the controllers of the domain agree, and returns the conflict
otherwise. `withdraw_reading` is for a controller that no longer reports a domain.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from rackloom.carve.observation import conflicts, latest
from rackloom.carve.observation.conflicts import ControllerConflict
from rackloom.carve.partitions import intent, ownership
from rackloom.carve.store import journal
from rackloom.carve.store.schema import endpoint, endpoint_chassis, instance, machine, machine_gpu, moved_gpu
from rackloom.carve.store.schema import observation as reading
from rackloom.carve.tenancy import status
from rackloom.carve.tenancy.placement import UNLISTED
from rackloom.core.partitions.domain import DomainObservation, ObservedGpu
from rackloom.topology.join_key import Source

# GPUs that an instance lost.


GpuModule = tuple[str, int]
"""Machine id and module id: the place of a GPU."""
SlotKey = tuple[str, int]
"""Chassis serial and slot: the place of a machine."""


class LostGpu(NamedTuple):
    """A GPU that an instance had in a place, and since when it is not there (seconds since the epoch)."""

    machine_id: str
    module_id: int
    guid: str
    since: float


# Built once: every pass that changes the mapping runs these.
_MACHINES_WITH_INSTANCE = sa.select(instance.c.machine_id).where(
    instance.c.machine_id.in_(sa.bindparam("machines", expanding=True))
)
_LOST_GPUS = (
    sa.select(moved_gpu.c.machine_id, moved_gpu.c.module_id, moved_gpu.c.guid, moved_gpu.c.since)
    .join(instance, instance.c.machine_id == moved_gpu.c.machine_id)
    .where(instance.c.created <= moved_gpu.c.since)
    .order_by(moved_gpu.c.machine_id, moved_gpu.c.module_id)
)
_DELETE_LOST = sa.delete(moved_gpu).where(
    moved_gpu.c.machine_id == sa.bindparam("from_machine"),
    moved_gpu.c.module_id == sa.bindparam("from_module"),
)


def record_lost_gpus(
    conn: sa.Connection, recorded: Mapping[GpuModule, str | None], listed: Mapping[GpuModule, str], now: float
) -> None:
    """Record which GPU an instance loses in which place. Delete the record when that GPU is back.

    `recorded` are the GUIDs of places with a record that changes now, `listed` those that the controller
    lists there. Call this before the mapping is written. Only the first GPU that an instance had in a place
    counts: its replacement is not the instance's loss. An exchanged GPU is recorded too, because it may be
    listed elsewhere later.
    """
    lost_before = {(row.machine_id, row.module_id): row.guid for row in lost_gpus_of_instances(conn)}
    back = [place for place, guid in lost_before.items() if listed.get(place) == guid]
    gone = {
        place: guid
        for place, guid in recorded.items()
        if guid is not None and listed.get(place) != guid and place not in lost_before
    }
    machines = {"machines": list({machine_id for machine_id, _ in gone})}
    held = set(conn.execute(_MACHINES_WITH_INSTANCE, machines).scalars()) if gone else set()
    lost = {place: guid for place, guid in gone.items() if place[0] in held}
    if ended := [*back, *lost]:
        conn.execute(_DELETE_LOST, [{"from_machine": place[0], "from_module": place[1]} for place in ended])
    if lost:
        rows = [LostGpu(*place, guid, now)._asdict() for place, guid in lost.items()]
        conn.execute(sa.insert(moved_gpu), rows)


def lost_gpus_of_instances(conn: sa.Connection) -> list[LostGpu]:
    """The GPUs lost by instances that still hold the machine."""
    return list(map(LostGpu._make, conn.execute(_LOST_GPUS).all()))


# Machines, domains and GPUs.


_neighbor = machine.alias()
# A chassis stays in its domain while its registered controller can be read, answers for that domain and
# lists a GPU of the chassis. A second domain that lists it then is not believed.
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

# Built once: every pass runs these.
_MACHINES_IN_CHASSIS: sa.Select[Any] = sa.select(
    machine.c.id, machine.c.chassis_serial, machine.c.slot, machine.c.domain, machine.c.missing_since
).where(machine.c.chassis_serial.in_(sa.bindparam("serials", expanding=True)), ~_stays_in_domain)
_RECORDED_GPUS = sa.select(
    machine_gpu.c.machine_id, machine_gpu.c.module_id, machine_gpu.c.guid, machine_gpu.c.health
).where(machine_gpu.c.machine_id.in_(sa.bindparam("machines", expanding=True)))
# A GPU that is listed here is no longer where it was recorded. It is not taken from a machine of another
# domain that is present or carries an instance: a false reading would release that instance.
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
_MARK_UNLISTED = (
    sa.update(machine_gpu)
    .where(
        machine_gpu.c.machine_id == sa.bindparam("at_machine"),
        machine_gpu.c.module_id == sa.bindparam("at_module"),
    )
    .values(health=UNLISTED)
)
_CLEAR_CLAIMED = sa.update(machine_gpu).where(_claimed_by_observation).values(guid=None, source=None)
_MACHINES_IN_DOMAIN = sa.select(machine.c.id, machine.c.missing_since).where(
    machine.c.domain == sa.bindparam("domain")
)


def sync_gpu_mapping(conn: sa.Connection, observation: DomainObservation, now: float) -> frozenset[str]:
    """Write the mapping that `observation` lists. Return the domains with a changed mapping."""
    slots = {(gpu.chassis_serial, gpu.slot) for gpu in observation.gpus}
    serials = list({serial for serial, _ in slots})
    rows = conn.execute(_MACHINES_IN_CHASSIS, {"serials": serials, "domain": observation.domain})
    machines = {
        (row.chassis_serial, row.slot): row for row in rows if (row.chassis_serial, row.slot) in slots
    }
    previous_domains = {row.domain for row in machines.values() if row.domain != observation.domain}
    rows = conn.execute(_RECORDED_GPUS, {"machines": [row.id for row in machines.values()]})
    recorded = {(machine_id, module_id): (guid, health) for machine_id, module_id, guid, health in rows}
    listed = {
        (machines[gpu.chassis_serial, gpu.slot].id, gpu.module_id): gpu
        for gpu in observation.gpus
        if (gpu.chassis_serial, gpu.slot) in machines
    }
    changed = {
        place: gpu for place, gpu in listed.items() if recorded.get(place) != (str(gpu.guid), int(gpu.health))
    }
    if previous_domains:
        _move_to_domain(conn, machines.values(), previous_domains, observation.domain, now)
    if changed:
        guids = {place: str(gpu.guid) for place, gpu in changed.items()}
        parameters = {"guids": list(guids.values()), "domain": observation.domain}
        replaced = {place: recorded[place][0] for place in guids if place in recorded}
        for row in conn.execute(_CLAIMED_GPUS, parameters):
            replaced[row.machine_id, row.module_id] = row.guid
        record_lost_gpus(conn, replaced, guids, now)
        _write_gpus(conn, observation.domain, changed, recorded)
    # Last: a GPU that is listed elsewhere now is not listed where it was. The health that was reported of a
    # GPU before means nothing once the controller does not list it.
    places = [
        {"at_machine": place[0], "at_module": place[1]}
        for place, (_, health) in recorded.items()
        if place not in listed and health != UNLISTED
    ]
    if places:
        conn.execute(_MARK_UNLISTED, places)
    _mark_missing(conn, observation, {row.id for row in machines.values()})
    rewired = any(recorded.get(place, (None, 0))[0] != str(gpu.guid) for place, gpu in changed.items())
    # Only a change of domain or GUID voids plans. A health is a measurement.
    return journal.increment_revisions(
        conn, {observation.domain, *previous_domains} if previous_domains or rewired else ()
    )


def _move_to_domain(
    conn: sa.Connection,
    observed: Collection[sa.Row[Any]],
    previous_domains: set[str | None],
    domain: str,
    now: float,
) -> None:
    # A machine with an absent tray moves with the rest of its chassis.
    absent = sa.and_(
        machine.c.chassis_serial.in_({row.chassis_serial for row in observed}),
        machine.c.domain.in_(set(filter(None, previous_domains))),
    )
    chosen = sa.or_(machine.c.id.in_([row.id for row in observed]), absent)
    conn.execute(sa.update(machine).where(chosen).values(domain=domain, updated=now))


def _mark_missing(conn: sa.Connection, observation: DomainObservation, observed: set[str]) -> None:
    """A machine of the domain without any GPU in the controller's list is off, absent or broken."""
    rows = conn.execute(_MACHINES_IN_DOMAIN, {"domain": observation.domain}).all()
    lost = [row.id for row in rows if row.id not in observed and row.missing_since is None]
    back = [row.id for row in rows if row.id in observed and row.missing_since is not None]
    for machine_ids, since in ((lost, observation.observed_at), (back, None)):
        if machine_ids:
            chosen = machine.c.id.in_(machine_ids)
            conn.execute(sa.update(machine).where(chosen).values(missing_since=since))


def _write_gpus(
    conn: sa.Connection,
    domain: str,
    changed: dict[GpuModule, ObservedGpu],
    recorded: dict[GpuModule, tuple[str | None, int]],
) -> None:
    # First cleared where they were: a GUID is on one machine at any time.
    conn.execute(_CLEAR_CLAIMED, {"guids": [str(gpu.guid) for gpu in changed.values()], "domain": domain})
    place: dict[str, Any] = {"machine_id": sa.bindparam("at_machine"), "module_id": sa.bindparam("at_module")}
    values: dict[str, Any] = {name: sa.bindparam(f"new_{name}") for name in ("guid", "source", "health")}
    here = sa.and_(*(machine_gpu.c[name] == parameter for name, parameter in place.items()))
    known = [_gpu_row(key, gpu) for key, gpu in changed.items() if key in recorded]
    new = [_gpu_row(key, gpu) for key, gpu in changed.items() if key not in recorded]
    if known:
        conn.execute(sa.update(machine_gpu).where(here).values(values), known)
    if new:
        conn.execute(sa.insert(machine_gpu).values({**place, **values}), new)


def _gpu_row(place: GpuModule, gpu: ObservedGpu) -> dict[str, object]:
    return {
        "at_machine": place[0],
        "at_module": place[1],
        "new_guid": str(gpu.guid),
        "new_source": Source.NMX.value,
        "new_health": int(gpu.health),
    }


# Applying observations.


# Built once: every pass that records a changed reading runs these.
_MACHINES_ELSEWHERE = sa.select(machine.c.chassis_serial, machine.c.slot, machine.c.domain).where(
    machine.c.chassis_serial.in_(sa.bindparam("serials", expanding=True)),
    machine.c.domain != sa.bindparam("domain"),
)


def domains_sharing_hardware(conn: sa.Connection, reading: DomainObservation) -> frozenset[str]:
    """Other domains that have machines in the slots of GPUs in `reading`."""
    slots = {(gpu.chassis_serial, gpu.slot) for gpu in reading.gpus}
    serials = {serial for serial, _ in slots}
    rows = conn.execute(_MACHINES_ELSEWHERE, {"serials": list(serials), "domain": reading.domain})
    return frozenset(row.domain for row in rows if (row.chassis_serial, row.slot) in slots)


def apply_observations(
    conn: sa.Connection,
    readings: Sequence[DomainObservation],
    now: float,
    previous_domains: Collection[str] = frozenset(),
) -> None:
    """Apply the valid `readings` of a domain, at least one, the newest first.

    `previous_domains` are those that its controller reported before. The order matters: partitions are
    owned in a domain before statuses name the owners of the GPUs in them.
    """
    newest = readings[0]
    changed = sync_gpu_mapping(conn, newest, now)
    for previous in sorted(changed - {newest.domain}):
        # The same chassis under another domain uuid: its partitions and its pause go with it.
        ownership.copy_ownership(conn, previous, newest.domain)
        intent.copy_pause(conn, previous, newest.domain)
        intent.delete_blocked_gpus(conn, previous)
    # A list that contradicts itself may omit a partition, or show it before it is complete.
    if not any(reading.uncertain for reading in readings):
        ownership.update_owned_partitions(conn, readings, now)
    ownership.update_foreign_trays(conn, newest.domain, readings)
    for domain in sorted({newest.domain, *changed, *previous_domains}):
        status.update_statuses(conn, domain, now)


def apply_if_consistent(
    conn: sa.Connection, domain: str, now: float, rivals: Collection[str] = frozenset()
) -> ControllerConflict | None:
    """Apply the readings of `domain` if its controllers agree. Otherwise record and return the conflict.

    `rivals` are domains that may list the same hardware. They, and those that already have a conflict with
    `domain`, are compared in the same transaction, so that both sides of a conflict have one outcome.
    """
    rivals = conflicts.conflicting_domains(conn, domain).union(rivals)
    before = conflicts.conflict_of_domain(conn, domain)
    conflict = conflicts.update_conflict(conn, domain, before, rivals)
    _apply_valid_readings(conn, domain, now)
    for rival in sorted(rivals):
        before = conflicts.conflict_of_domain(conn, rival)
        against = conflicts.conflicting_domains(conn, rival) | {domain}
        if conflicts.update_conflict(conn, rival, before, against) is not None or before is not None:
            _apply_valid_readings(conn, rival, now)
    return conflict


def _apply_valid_readings(conn: sa.Connection, domain: str, now: float) -> None:
    # During a conflict there is no valid reading: statuses become unknown, and nothing else changes.
    readings = latest.latest_of_domain(conn, domain).shown
    if readings:
        apply_observations(conn, readings, now)
    else:
        status.update_statuses(conn, domain, now)


def withdraw_reading(conn: sa.Connection, domain: str, now: float) -> None:
    """Update `domain` after one of its controllers was lost, deleted, or now reports another domain.

    The others need not have been read since, so their readings are applied again only after a conflict.
    """
    if conflicts.conflict_of_domain(conn, domain) is None:
        status.update_statuses(conn, domain, now)
    else:
        apply_if_consistent(conn, domain, now)
