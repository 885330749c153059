"""What an observation teaches about machines: their domain, and the fabric GUID and health of each GPU.

The place (chassis serial, slot, module id) is the key, because it survives a swap of the tray; the GUID
does not. A chassis stays in its domain while the controller that is registered for it can be read, answers
for that domain and lists a GPU of it: another one that lists it too, under another uuid, is not believed.
"""

from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from rackloom.carve.plan.values import Observation, ObservedGpu
from rackloom.carve.site import moved, revisions
from rackloom.carve.site.tables import endpoint, endpoint_chassis, instance, machine, machine_gpu
from rackloom.carve.site.tables import observation as reading
from rackloom.topology.facts import Source

GpuAt = tuple[str, int]

_beside = machine.alias()
_stays = sa.exists().where(
    machine.c.domain != sa.bindparam("domain"),
    endpoint_chassis.c.chassis_serial == machine.c.chassis_serial,
    endpoint.c.id == endpoint_chassis.c.endpoint_id,
    endpoint.c.domain == machine.c.domain,
    reading.c.endpoint_id == endpoint.c.id,
    reading.c.facts.is_not(None),
    reading.c.unknown_since.is_(None),
    _beside.c.chassis_serial == machine.c.chassis_serial,
    _beside.c.domain == machine.c.domain,
    _beside.c.missing_since.is_(None),
)

# Built once: every pass asks these.
_IN_CHASSIS: sa.Select[Any] = sa.select(
    machine.c.id, machine.c.chassis_serial, machine.c.slot, machine.c.domain, machine.c.missing_since
).where(machine.c.chassis_serial.in_(sa.bindparam("serials", expanding=True)), ~_stays)
_KNOWN = sa.select(
    machine_gpu.c.machine_id, machine_gpu.c.module_id, machine_gpu.c.guid, machine_gpu.c.health
).where(machine_gpu.c.machine_id.in_(sa.bindparam("machines", expanding=True)))
# A GPU that turned up here is no longer where it was. What another domain's controller lists, or listed where
# an instance is, is not taken from there: the instance would be released by a stranger's word.
_held = sa.exists().where(instance.c.machine_id == machine.c.id)
_given_up = sa.select(machine.c.id).where(
    sa.or_(
        machine.c.domain.is_(None),
        machine.c.domain == sa.bindparam("domain"),
        sa.and_(machine.c.missing_since.is_not(None), ~_held),
    )
)
_taken = sa.and_(
    machine_gpu.c.guid.in_(sa.bindparam("guids", expanding=True)),
    sa.or_(
        sa.func.coalesce(machine_gpu.c.source, "") != Source.NMX.value,
        machine_gpu.c.machine_id.in_(_given_up),
    ),
)
_TAKEN = sa.select(machine_gpu.c.machine_id, machine_gpu.c.module_id, machine_gpu.c.guid).where(_taken)
_TAKE = sa.update(machine_gpu).where(_taken).values(guid=None, source=None)
_IN_DOMAIN = sa.select(machine.c.id, machine.c.missing_since).where(
    machine.c.domain == sa.bindparam("domain")
)


def learn(conn: sa.Connection, observation: Observation, now: float) -> frozenset[str]:
    """Write the mapping that `observation` shows; returns the domains in which it differs from before."""
    machines = _machines(conn, observation)
    before = {row.domain for row in machines.values() if row.domain != observation.domain}
    known = _known(conn, [row.id for row in machines.values()])
    told = _told(observation, machines)
    changed = {at: gpu for at, gpu in told.items() if known.get(at) != (str(gpu.guid), int(gpu.health))}
    if before:
        _move(conn, machines.values(), before, observation.domain, now)
    if changed:
        guids = {at: str(gpu.guid) for at, gpu in changed.items()}
        taken = conn.execute(_TAKEN, {"guids": list(guids.values()), "domain": observation.domain}).all()
        had = {at: known[at][0] for at in guids if at in known}
        moved.note(conn, had | {(row.machine_id, row.module_id): row.guid for row in taken}, guids, now)
        _write(conn, observation.domain, changed, known)
    _mark_missing(conn, observation, {row.id for row in machines.values()})
    rewired = any(known.get(at, (None, 0))[0] != str(gpu.guid) for at, gpu in changed.items())
    return revisions.touch(conn, {observation.domain, *before} if before or rewired else ())


def _machines(conn: sa.Connection, observation: Observation) -> dict[GpuAt, sa.Row[Any]]:
    serials = {gpu.chassis_serial for gpu in observation.gpus}
    rows = conn.execute(_IN_CHASSIS, {"serials": list(serials), "domain": observation.domain})
    slots = {(gpu.chassis_serial, gpu.slot) for gpu in observation.gpus}
    return {(row.chassis_serial, row.slot): row for row in rows if (row.chassis_serial, row.slot) in slots}


def _known(conn: sa.Connection, machine_ids: list[str]) -> dict[GpuAt, tuple[str | None, int]]:
    rows = conn.execute(_KNOWN, {"machines": machine_ids})
    return {(machine_id, module_id): (guid, health) for machine_id, module_id, guid, health in rows}


def _told(observation: Observation, machines: dict[GpuAt, sa.Row[Any]]) -> dict[GpuAt, ObservedGpu]:
    return {
        (machines[gpu.chassis_serial, gpu.slot].id, gpu.module_id): gpu
        for gpu in observation.gpus
        if (gpu.chassis_serial, gpu.slot) in machines
    }


def _move(
    conn: sa.Connection, seen: Collection[sa.Row[Any]], before: set[str | None], domain: str, now: float
) -> None:
    # A machine whose tray is away answers with the rest of its chassis, wherever that answers now.
    beside = sa.and_(
        machine.c.chassis_serial.in_({row.chassis_serial for row in seen}),
        machine.c.domain.in_({one for one in before if one is not None}),
    )
    chosen = sa.or_(machine.c.id.in_([row.id for row in seen]), beside)
    conn.execute(sa.update(machine).where(chosen).values(domain=domain, updated=now))


def _mark_missing(conn: sa.Connection, observation: Observation, seen: set[str]) -> None:
    """A machine of the domain of which the controller lists no GPU is off, absent or broken."""
    rows = conn.execute(_IN_DOMAIN, {"domain": observation.domain}).all()
    lost = [row.id for row in rows if row.id not in seen and row.missing_since is None]
    back = [row.id for row in rows if row.id in seen and row.missing_since is not None]
    for machine_ids, since in ((lost, observation.observed_at), (back, None)):
        if machine_ids:
            chosen = machine.c.id.in_(machine_ids)
            conn.execute(sa.update(machine).where(chosen).values(missing_since=since))


def _write(
    conn: sa.Connection,
    domain: str,
    changed: dict[GpuAt, ObservedGpu],
    known: dict[GpuAt, tuple[str | None, int]],
) -> None:
    guids = [str(gpu.guid) for gpu in changed.values()]
    conn.execute(_TAKE, {"guids": guids, "domain": domain})
    table = machine_gpu
    at = sa.and_(
        table.c.machine_id == sa.bindparam("at_machine"), table.c.module_id == sa.bindparam("at_module")
    )
    old = [_row(where, gpu) for where, gpu in changed.items() if where in known]
    new = [_row(where, gpu) for where, gpu in changed.items() if where not in known]
    values: dict[str, Any] = {name: sa.bindparam(f"new_{name}") for name in ("guid", "source", "health")}
    if old:
        conn.execute(sa.update(table).where(at).values(**values), old)
    if new:
        keys: dict[str, Any] = {
            "machine_id": sa.bindparam("at_machine"),
            "module_id": sa.bindparam("at_module"),
        }
        conn.execute(sa.insert(table).values(**keys, **values), new)


def _row(where: GpuAt, gpu: ObservedGpu) -> dict[str, object]:
    return {
        "at_machine": where[0],
        "at_module": where[1],
        "new_guid": str(gpu.guid),
        "new_source": Source.NMX.value,
        "new_health": int(gpu.health),
    }
