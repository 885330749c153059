"""Machines as the operator writes them down, and as a switch controller shows them.

Each GPU carries the source of its GUID: `declared` here, `nmx` from the first observation on.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.plan.values import GpuHealth, Observation
from rackloom.carve.site import knowledge, machines, revisions, settle, taking_over
from rackloom.carve.site.problems import Kind, Rejected, conflict, invalid, not_found
from rackloom.carve.site.tables import cordon, drain, machine, machine_gpu, moved_gpu
from rackloom.carve.site.values import Changed
from rackloom.topology.facts import Source


class MachineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A compute tray: where it sits and how many GPUs it has."""

    chassis_serial: str
    slot: int
    tray_index: int
    rack: str
    gpus: int
    id: str = ""
    """Made from chassis serial and slot where empty."""

    @property
    def machine_id(self) -> str:
        """The id to use."""
        return self.id or f"{self.chassis_serial}-{self.slot}".lower()


class DeclaredGpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU as an operator declares it; `module_id` counts from 1."""

    module_id: int
    guid: int


def get(conn: sa.Connection, machine_id: str) -> sa.Row[Any]:
    """The machine with what it carries. Refused (not found) when there is none."""
    found = conn.execute(machines.listing().where(machine.c.id == machine_id)).one_or_none()
    if found is None:
        raise not_found(f"there is no machine {machine_id}")
    return found


def enrol(
    conn: sa.Connection,
    site_id: str,
    records: Iterable[MachineRecord],
    source: Source,
    status: str,
    now: float,
) -> tuple[list[str], list[str]]:
    """Add machines that are new; returns the ids of the new ones, and of those that were known already.

    `status` is what is known of their hosts: Ready where nobody else has a say in that, else Unknown.
    Refused, all of it, when a record contradicts a known machine: who sits where is not guessed.
    """
    created: list[str] = []
    unchanged: list[str] = []
    for record in records:
        known = _known(conn, record)
        if known is None:
            _insert(conn, site_id, record, source, status, now)
            created.append(record.machine_id)
        else:
            unchanged.append(known)
    return created, unchanged


def enrol_observed(
    conn: sa.Connection, site_id: str, observation: Observation, status: str, now: float
) -> list[str]:
    """Add the trays that a controller shows and the site does not know; returns their ids."""
    trays: dict[tuple[str, int], list[int]] = {}
    index: dict[tuple[str, int], int] = {}
    for gpu in observation.gpus:
        trays.setdefault((gpu.chassis_serial, gpu.slot), []).append(gpu.module_id)
        index[gpu.chassis_serial, gpu.slot] = gpu.tray_index
    known = conn.execute(
        sa.select(machine.c.chassis_serial, machine.c.slot).where(
            machine.c.chassis_serial.in_({serial for serial, _ in trays})
        )
    )
    new = sorted(trays.keys() - {(row.chassis_serial, row.slot) for row in known})
    records = [
        # The rack is not on this wire; the chassis is what an operator finds it by.
        MachineRecord(chassis_serial=at[0], slot=at[1], tray_index=index[at], rack=at[0], gpus=max(trays[at]))
        for at in new
    ]
    return enrol(conn, site_id, records, Source.NMX, status, now)[0]


def enrol_known(conn: sa.Connection, site_id: str, domain: str, status: str, now: float) -> None:
    """Add the machines that are known to be in `domain`: while its controllers contradict, none is."""
    shown = knowledge.of_domain(conn, domain).shown
    if shown and enrol_observed(conn, site_id, shown[0], status, now):
        # What was learned of the domain was of the machines that there were.
        taking_over.take_over(conn, shown, now)


def declare_gpus(
    conn: sa.Connection,
    machine_id: str,
    place: tuple[str, int, int],
    domain: str | None,
    gpus: Iterable[DeclaredGpu],
    now: float,
) -> Changed[None]:
    """Write a machine's place (chassis serial, slot, tray index), domain and GPUs as an operator tells them.

    It is a repair: the next observation of the domain overrules it. Refused while the machine carries an
    instance, whose GPUs would change under it, and for a GUID that another machine has.
    """
    found = get(conn, machine_id)
    if found.instance_id is not None:
        raise Rejected(
            Kind.CONFLICT,
            f"machine {machine_id} carries instance {found.instance_id}",
            nearest_fix="release the instance first",
        )
    told = {gpu.module_id: gpu.guid for gpu in gpus}
    serial, slot, tray = place
    _check_place(conn, machine_id, serial, slot)
    _check_free(conn, machine_id, told)
    values = {"chassis_serial": serial, "slot": slot, "tray_index": tray, "domain": domain, "updated": now}
    conn.execute(sa.update(machine).where(machine.c.id == machine_id).values(**values))
    conn.execute(sa.delete(machine_gpu).where(machine_gpu.c.machine_id == machine_id))
    _insert_gpus(conn, machine_id, told, Source.DECLARED)
    return Changed(None, _announce(conn, {found.domain, domain}, now))


def remove(conn: sa.Connection, machine_id: str, now: float) -> frozenset[str]:
    """Forget a machine that carries nothing; returns the domains whose intent that changes."""
    found = get(conn, machine_id)
    if found.instance_id is not None:
        raise conflict(f"machine {machine_id} carries instance {found.instance_id}")
    for table in (machine_gpu, moved_gpu, cordon, drain):
        conn.execute(sa.delete(table).where(table.c.machine_id == machine_id))
    conn.execute(sa.delete(machine).where(machine.c.id == machine_id))
    return _announce(conn, {found.domain}, now)


def _announce(conn: sa.Connection, domains: Collection[str | None], now: float) -> frozenset[str]:
    # Whose partition holds a GPU that is on no machine any more shares memory with nobody knows whom.
    for domain in sorted(one for one in domains if one is not None):
        settle.settle(conn, domain, now)
    return revisions.touch(conn, domains)


def _known(conn: sa.Connection, record: MachineRecord) -> str | None:
    at_place = sa.and_(machine.c.chassis_serial == record.chassis_serial, machine.c.slot == record.slot)
    rows = conn.execute(sa.select(machine).where(sa.or_(at_place, machine.c.id == record.machine_id))).all()
    for row in rows:
        if (row.chassis_serial, row.slot) != (record.chassis_serial, record.slot):
            raise conflict(f"machine {row.id} is recorded at {row.chassis_serial} slot {row.slot}", id=row.id)
        if record.id and row.id != record.id:
            raise conflict(
                f"{record.chassis_serial} slot {record.slot} is recorded as machine {row.id}", id=row.id
            )
        return str(row.id)
    return None


def _insert(
    conn: sa.Connection, site_id: str, record: MachineRecord, source: Source, status: str, now: float
) -> None:
    if not record.chassis_serial or not 1 <= record.gpus <= 64:
        raise invalid(f"machine {record.machine_id} needs a chassis serial, and 1 to 64 GPUs")
    conn.execute(
        sa.insert(machine).values(
            id=record.machine_id,
            site_id=site_id,
            status=status,
            chassis_serial=record.chassis_serial,
            slot=record.slot,
            tray_index=record.tray_index,
            rack=record.rack,
            created=now,
            updated=now,
        )
    )
    modules: dict[int, int | None] = dict.fromkeys(range(1, record.gpus + 1))
    _insert_gpus(conn, record.machine_id, modules, source)


def _insert_gpus(
    conn: sa.Connection, machine_id: str, gpus: Mapping[int, int | None], source: Source
) -> None:
    rows = [
        {
            "machine_id": machine_id,
            "module_id": module,
            "guid": None if guid is None else str(guid),
            "source": source.value,
            "health": GpuHealth.UNKNOWN,
        }
        for module, guid in sorted(gpus.items())
    ]
    if rows:
        conn.execute(sa.insert(machine_gpu), rows)


def _check_place(conn: sa.Connection, machine_id: str, serial: str, slot: int) -> None:
    there = sa.select(machine.c.id).where(machine.c.chassis_serial == serial, machine.c.slot == slot)
    for other in conn.execute(there.where(machine.c.id != machine_id)).scalars():
        raise conflict(f"{serial} slot {slot} is recorded as machine {other}", id=other)


def _check_free(conn: sa.Connection, machine_id: str, told: Mapping[int, int]) -> None:
    if len(set(told.values())) < len(told) or 0 in told.values():
        raise invalid("each GPU needs a GUID of its own")
    taken = sa.select(machine_gpu.c.machine_id, machine_gpu.c.guid).where(
        machine_gpu.c.guid.in_([str(guid) for guid in told.values()]), machine_gpu.c.machine_id != machine_id
    )
    for row in conn.execute(taken):
        raise conflict(f"GPU {int(row.guid):#x} is recorded on machine {row.machine_id}", id=row.machine_id)
