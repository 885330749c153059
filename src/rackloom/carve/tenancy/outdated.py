"""The statuses to show instead of the recorded ones while the readings under them are outdated.

Statuses are written when a reading is recorded, or its loss. If neither can be written, or no process does
so, rows remain Ready. So each reader calls `outdated_domains` of `observation.latest` first, and shows
rows of these domains as the status writer would have written them:

- an instance that is Ready is Unknown since the last reading, and its history begins with that entry.
- an interface that is Ready is Pending, with the reason.

Every other status claims nothing about the present, and is shown as recorded. `shown_status_column` is the
same rule in SQL, for filters. Mostly no domain is outdated, and then no row is touched.

The health of a GPU is a measurement. The records keep the last health that a switch controller reported. It
holds only while the reading that counts lists the GPU in its place. So a GPU is of unknown health while its
domain is unknown, while its machine is missing, and while the controller does not list it
(`shown_gpu_healths`).
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from rackloom.carve.observation import latest
from rackloom.carve.observation.latest import LatestObservation
from rackloom.carve.store.journal import EventKind, EventNote, StatusRecord
from rackloom.carve.store.prepared import owned_by
from rackloom.carve.store.schema import instance, machine, nvlink_interface
from rackloom.carve.store.values import Status
from rackloom.carve.tenancy import catalog
from rackloom.carve.tenancy.instances import InterfaceRow
from rackloom.core.partitions.domain import GpuHealth

OutdatedDomains = Mapping[str, LatestObservation]
"""Domain -> what is known of it, for the domains without a reading that counts."""


# Rows.


def machine_doubts(
    conn: sa.Connection, machine_ids: Collection[str], outdated: OutdatedDomains
) -> Mapping[str, LatestObservation]:
    """The machines that are in an outdated domain, with the latest observation of the domain."""
    if not outdated:
        return {}
    domains = catalog.domains_of_machines(conn, machine_ids)
    return {
        machine_id: outdated[domain]
        for machine_id, domain in domains.items()
        if domain is not None and domain in outdated
    }


def shown_status(status: str, doubt: LatestObservation | None) -> str:
    """The status of an instance, if `doubt` is the latest observation of its machine's outdated domain."""
    return Status.UNKNOWN if doubt is not None and status == Status.READY else status


def shown_history(
    instance_id: str, status: str, history: Sequence[StatusRecord], doubt: LatestObservation | None
) -> Sequence[StatusRecord]:
    """The history of an instance with that recorded status, newest first."""
    if doubt is None or doubt.unknown_since is None or status != Status.READY:
        return history
    since = doubt.unknown_since
    return [StatusRecord(instance_id, Status.UNKNOWN, doubt.doubt, since, since), *history]


def shown_interface(row: InterfaceRow, outdated: OutdatedDomains) -> InterfaceRow:
    """The interface as it is shown."""
    doubt = outdated.get(row.domain or "")
    if doubt is None or row.status != Status.READY:
        return row
    return row._replace(status=Status.PENDING, reason=doubt.doubt)


# Filters.


def shown_gpu_healths(
    conn: sa.Connection, machines: Collection[sa.Row[Any]], valid_from: float
) -> dict[str, dict[int, GpuHealth]]:
    """Machine id -> module id -> health, of machine rows. Readings before `valid_from` do not count."""
    domains = {row.domain for row in machines} - {None}
    listed = {
        (domain, gpu.chassis_serial, gpu.slot, gpu.module_id)
        for domain, known in latest.latest_of_domains(conn, domains, valid_from).items()
        if known.observation is not None
        for gpu in known.observation.gpus
    }
    recorded = catalog.gpus_of_machines(conn, [row.id for row in machines])

    def health(row: sa.Row[Any], gpu: sa.Row[Any]) -> GpuHealth:
        is_listed = (row.domain, row.chassis_serial, row.slot, gpu.module_id) in listed
        return GpuHealth(gpu.health) if is_listed and row.missing_since is None else GpuHealth.UNKNOWN

    return {row.id: {gpu.module_id: health(row, gpu) for gpu in recorded[row.id]} for row in machines}


def shown_status_column(table: sa.Table, outdated: OutdatedDomains) -> sa.ColumnElement[Any]:
    """The status of instances, or of interfaces, as a query filters by it."""
    if not outdated:
        return table.c.status
    machines = sa.select(machine.c.id).where(machine.c.domain.in_(outdated))
    here = instance.c.machine_id.in_(machines)
    if table is nvlink_interface:
        here = nvlink_interface.c.instance_id.in_(sa.select(instance.c.id).where(here))
    shown = Status.PENDING if table is nvlink_interface else Status.UNKNOWN
    return sa.case((sa.and_(table.c.status == Status.READY, here), shown), else_=table.c.status)


# Events.


def notes_of_tenant(conn: sa.Connection, tenant_id: str, valid_from: float) -> dict[str, EventNote]:
    """The instances and interfaces of a tenant that are shown otherwise than recorded, by id."""
    outdated = latest.outdated_domains(conn, valid_from)
    if not outdated:
        return {}
    of_machines = instance.join(machine, machine.c.id == instance.c.machine_id)
    with_interfaces = of_machines.join(nvlink_interface, nvlink_interface.c.instance_id == instance.c.id)
    notes = {}
    for kind, table, joined, shown in (
        (EventKind.INSTANCE, instance, of_machines, Status.UNKNOWN),
        (EventKind.INTERFACE, nvlink_interface, with_interfaces, Status.PENDING),
    ):
        mine = sa.and_(owned_by(instance.c.tenant_id, tenant_id), machine.c.domain.in_(outdated))
        ready = (
            sa.select(table.c.id, machine.c.domain)
            .select_from(joined)
            .where(mine, table.c.status == Status.READY)
            .order_by(table.c.created, table.c.id)
        )
        for object_id, domain in conn.execute(ready):
            notes[object_id] = EventNote(kind, object_id, shown, outdated[domain].doubt)
    return notes


def recorded_notes(conn: sa.Connection, shown: Mapping[str, EventNote]) -> list[EventNote]:
    """The recorded notes of objects that were shown otherwise: those of them that are Ready."""
    notes: list[EventNote] = []
    for kind, table in ((EventKind.INSTANCE, instance), (EventKind.INTERFACE, nvlink_interface)):
        ids = [object_id for object_id, note in shown.items() if note.kind is kind]
        ready = sa.select(table.c.id).where(table.c.id.in_(ids), table.c.status == Status.READY)
        notes += [EventNote(kind, object_id, Status.READY) for object_id in conn.execute(ready).scalars()]
    return notes
