"""The site service's own records as values: tenants, VPCs, machines, instances and logical partitions.

`read_records` needs a handful of queries for a site of any size. Large tables are read by chassis
through `RowGroups`: the database first computes one digest per group (all values as one text), and only
groups with a changed digest are fetched. Fetching and comparing thousands of rows in Python is slow, and
each row may wait for a thread that computes. Unchanged groups return the rows, and then the values, of
the previous reading.

Digests of all groups take the database half a second at 1,000 racks. So a frequent reader compares only the
chassis that a journal names since the previous reading: by a new revision, operation or operator's step of
their domain, a new status of a machine, instance or interface, or a controller that lists something else.
All are compared every `COMPARE_SECONDS`.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import chain, groupby
from operator import add, itemgetter
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.app.snapshot.cache import ReadCache, RecordMarks
from rackloom.carve.inventory import sync
from rackloom.carve.store.schema import (
    blocked_gpu,
    cordon,
    domain_revision,
    endpoint,
    endpoint_chassis,
    instance,
    logical_partition,
    machine,
    machine_gpu,
    nvlink_interface,
    operation,
    operator_step,
    status_history,
    tenant,
    vpc,
)
from rackloom.carve.store.values import Status
from rackloom.carve.tenancy import catalog
from rackloom.carve.tenancy.placement import UNLISTED, ReservedTray, reserved_trays
from rackloom.core.diagnosis.snapshot import (
    InstanceGpuRecord,
    LogicalPartitionRecord,
    MachineRecord,
    MovedGpu,
    grouped,
)
from rackloom.core.partitions.domain import GpuHealth
from rackloom.topology.join_key import Fact, GpuKey, SlotKey, Source
from rackloom.topology.part_names import PartName

# Rows in groups. Only changed groups are fetched.


GroupRows = tuple[Any, ...]
_Fixes = Mapping[tuple[str, int], str]
"""By machine and interface."""
_END_OF_VALUE, _NULL = "\x1f", "\x1e"
"""Written between values, and for none: no name holds a control character."""


class RowGroups:
    """The rows of a statement, grouped and ordered by its first column."""

    def __init__(self, statement: sa.Select[Any]) -> None:
        first, *_ = statement.selected_columns
        self._all = statement
        self._some = statement.where(first.in_(sa.bindparam("groups", expanding=True)))
        self._digests, self._some_digests = map(_digests, (self._all, self._some))

    def of(
        self, conn: sa.Connection, cache: ReadCache | None, among: Collection[str] | None = None
    ) -> Mapping[str, GroupRows]:
        """All rows by group. An unchanged group keeps the very rows of the cache.

        With `among`, only these groups are compared.
        """
        if cache is None:
            return _in_groups(conn.execute(self._all).all())
        statement, some = (self._digests, {}) if among is None else (self._some_digests, {"groups": [*among]})
        digests = {row[0]: row[1] for row in conn.execute(statement, some).all()}
        return cache.unless(digests, self._fetched, conn, among)

    def _fetched(self, conn: sa.Connection, groups: Collection[str]) -> Mapping[str, GroupRows]:
        return _in_groups(conn.execute(self._some, {"groups": list(groups)}).all())


def _digests(statement: sa.Select[Any]) -> sa.Select[Any]:
    name, *others = statement.order_by(None).subquery().c
    text = sa.func.aggregate_strings(reduce(add, map(_as_text, others)), "")
    return sa.select(name, text).group_by(name).order_by(name)


def _in_groups(rows: Sequence[sa.Row[Any]]) -> Mapping[str, GroupRows]:
    return {name: tuple(some) for name, some in groupby(rows, key=itemgetter(0))}


def _as_text(column: sa.ColumnElement[Any]) -> sa.ColumnElement[str]:
    """A value as text. SQLite writes fifteen digits of a time: nothing changes twice in ten microseconds."""
    text = column if isinstance(column.type, sa.String) else sa.cast(column, sa.Text)
    return sa.func.coalesce(text, _NULL) + _END_OF_VALUE


# The records.


_NOT_SICK = (GpuHealth.HEALTHY, GpuHealth.UNKNOWN)


class SiteRecords(msgspec.Struct, frozen=True, kw_only=True):
    """All of a site's records that a snapshot shows."""

    machines: tuple[MachineRecord, ...]
    instance_gpus: tuple[InstanceGpuRecord, ...]
    moved_gpus: tuple[MovedGpu, ...]
    logicals: tuple[LogicalPartitionRecord, ...]
    tenants: Mapping[str, str]
    vpcs: Mapping[str, str]


def read_records(conn: sa.Connection, now: float, cache: ReadCache | None = None) -> SiteRecords:
    """All records as they count now, in a handful of queries for a site of any size."""
    fixes = _column_by_key(conn, blocked_gpu.c.guid, blocked_gpu.c.fix)
    marks, among = (None, None) if cache is None else _named_chassis(conn, now, cache)
    machines, gpus, interfaces = (
        groups.of(conn, cache, among) for groups in (_MACHINE_ROWS, _GPU_ROWS, _INTERFACE_ROWS)
    )
    # Few GPUs are blocked: a map of them is faster to compare than a fix for each interface.
    blocked = grouped(
        (name, ((machine_id, module - 1), fixes[guid]))
        for name, rows in (gpus.items() if fixes else ())
        for _, machine_id, module, guid, *_ in rows
        if guid in fixes
    )
    # Rows are equal when their values are.
    trays = {name: (rows, gpus.get(name, ())) for name, rows in machines.items()}
    wanted = {name: (rows, dict(blocked.get(name, ()))) for name, rows in interfaces.items()}
    cache = cache or ReadCache()
    # Only now: after a reading that fails here, the next one looks at the same entries.
    cache.marks, cache.observed = marks, set()
    return SiteRecords(
        machines=_with_reservations(conn, chain.from_iterable(cache.again(trays, _machines)), now, cache),
        instance_gpus=tuple(chain.from_iterable(cache.again(wanted, _instance_gpus))),
        moved_gpus=tuple(_moved_gpus(conn)),
        logicals=tuple(_logical_partitions(conn)),
        tenants=_column_by_key(conn, tenant.c.id, tenant.c.org),
        vpcs=_column_by_key(conn, vpc.c.id, vpc.c.name),
    )


def with_doubts(records: SiteRecords, doubts: Mapping[str, str]) -> SiteRecords:
    """The records without their claims about GPUs in unknown domains. `doubts` are by domain.

    A record stays Ready until a loss is recorded, and it may be impossible to record it.
    """
    machines = {
        machine.id: doubts[machine.domain] for machine in records.machines if machine.domain in doubts
    }
    if not machines:
        return records
    return msgspec.structs.replace(
        records,
        instance_gpus=tuple(
            msgspec.structs.replace(gpu, status=Status.PENDING, problem=machines[gpu.machine])
            if gpu.machine in machines and gpu.status == Status.READY
            else gpu
            for gpu in records.instance_gpus
        ),
    )


def _column_by_key(conn: sa.Connection, key: sa.Column[str], value: sa.Column[str]) -> dict[str, str]:
    """One column of a table by another."""
    return {row[0]: row[1] for row in conn.execute(sa.select(key, value)).all()}


_MACHINE_ROWS = RowGroups(
    catalog.machine_listing()
    .with_only_columns(
        machine.c.chassis_serial,
        machine.c.id,
        machine.c.slot,
        machine.c.tray_index,
        machine.c.rack,
        machine.c.domain,
        machine.c.missing_since,
        catalog.shown_machine_status.label("shown_status"),
        cordon.c.reason.label("cordon_reason"),
        instance.c.id.label("instance_id"),
        instance.c.tenant_id,
        instance.c.vpc_id,
        instance.c.created.label("held_since"),
    )
    .order_by(machine.c.chassis_serial, machine.c.slot)
)
"""Grouped by chassis, like the two statements below."""
_GPU_ROWS = RowGroups(
    sa.select(
        machine.c.chassis_serial,
        machine_gpu.c.machine_id,
        machine_gpu.c.module_id,
        machine_gpu.c.guid,
        machine_gpu.c.source,
        machine_gpu.c.health,
    )
    .join(machine_gpu, machine_gpu.c.machine_id == machine.c.id)
    .order_by(machine.c.chassis_serial, machine_gpu.c.machine_id, machine_gpu.c.module_id)
)
_INTERFACE_ROWS = RowGroups(
    sa.select(
        machine.c.chassis_serial,
        instance.c.machine_id,
        nvlink_interface.c.instance_id,
        nvlink_interface.c.device_instance,
        nvlink_interface.c.logical_partition_id,
        nvlink_interface.c.status,
        nvlink_interface.c.updated,
        nvlink_interface.c.reason,
    )
    .select_from(machine.join(instance).join(nvlink_interface))
    .where(nvlink_interface.c.status != Status.DELETING)
    .order_by(machine.c.chassis_serial, instance.c.id, nvlink_interface.c.device_instance)
)


COMPARE_SECONDS = 30.0
"""All records are compared at least so often: what no journal names is shown no later."""
_journals = (status_history, operation, operator_step)
_NEWEST_ENTRY = {journal.name: sa.select(sa.func.max(journal.c.id)) for journal in _journals}


def _new(column: sa.Column[str]) -> sa.Select[Any]:
    """A column of the entries of a journal since the previous reading."""
    return sa.select(column).where(column.table.c.id > sa.bindparam(column.table.name))


def _is_moved(domain: sa.Column[str]) -> sa.ColumnElement[bool]:
    named = (domain.in_(_new(operation.c.domain)), domain.in_(_new(operator_step.c.domain)))
    return sa.or_(domain.in_(sa.bindparam("domains", expanding=True)), *named)


_new_status, _chassis = _new(status_history.c.object_id), sa.select(machine.c.chassis_serial)
_held = machine.join(instance)
_NAMED_CHASSIS = sa.union(
    _chassis.where(_is_moved(machine.c.domain)),
    # Its machines may be gone.
    sa.select(endpoint_chassis.c.chassis_serial)
    .select_from(endpoint_chassis.join(endpoint))
    .where(_is_moved(endpoint.c.domain)),
    _chassis.where(machine.c.id.in_(_new_status)),
    _chassis.select_from(_held).where(instance.c.id.in_(_new_status)),
    _chassis.select_from(_held.join(nvlink_interface)).where(nvlink_interface.c.id.in_(_new_status)),
)


def newest_entries(conn: sa.Connection) -> Mapping[str, int]:
    """The number of the newest entry of each journal, by name, or 0 for an empty journal."""
    return {name: conn.execute(newest).scalar() or 0 for name, newest in _NEWEST_ENTRY.items()}


def _named_chassis(
    conn: sa.Connection, now: float, cache: ReadCache
) -> tuple[RecordMarks, Collection[str] | None]:
    """New marks, and the chassis that a journal names since the previous reading. None: compare all."""
    before = cache.marks
    revisions = {row[0]: row[1] for row in conn.execute(sa.select(domain_revision)).all()}
    marks = RecordMarks(revisions, newest_entries(conn), now)
    if before is None or not 0 <= now - before.compared_at < COMPARE_SECONDS:
        return marks, None
    moved = {domain for domain, revision in revisions.items() if before.revisions.get(domain) != revision}
    since = {**before.newest, "domains": list(moved | cache.observed)}
    named = set(conn.execute(_NAMED_CHASSIS, since).scalars())
    return marks._replace(compared_at=before.compared_at), named


def _with_reservations(
    conn: sa.Connection, machines: Iterable[MachineRecord], now: float, cache: ReadCache
) -> tuple[MachineRecord, ...]:
    """The machines, with their present reservations: the rows do not change when a reservation ends."""
    reserved = reserved_trays(conn, now, None)
    if not reserved:
        return tuple(machines)
    known = list(machines)
    kept = {machine.id: (machine, reserved[machine.id]) for machine in known if machine.id in reserved}
    shown = dict(zip(kept, cache.again(kept, _reserved_machine), strict=True))
    return tuple(shown.get(machine.id, machine) for machine in known)


def _reserved_machine(kept: tuple[MachineRecord, ReservedTray]) -> MachineRecord:
    machine, tray = kept
    return msgspec.structs.replace(machine, reserved_for=tray.tenant_id, reservation=tray.text())


def _machines(rows: tuple[GroupRows, GroupRows]) -> tuple[MachineRecord, ...]:
    machines, gpu_rows = rows
    gpus = {id_: tuple(some) for id_, some in groupby(gpu_rows, key=itemgetter(1))}
    return tuple(_machine(row, gpus.get(row.id, ())) for row in machines)


def _machine(row: Any, gpus: GroupRows) -> MachineRecord:
    sick = [_sickness(row, gpu) for gpu in gpus if gpu[-1] not in _NOT_SICK]
    return MachineRecord(
        id=row.id,
        rack=row.rack,
        domain=row.domain or "",
        chassis_serial=row.chassis_serial,
        slot=row.slot,
        tray_index=row.tray_index,
        gpus=tuple([_gpu_key(row.chassis_serial, row.slot, gpu) for gpu in gpus]),
        status=row.shown_status,
        health=", ".join(sick),
        cordoned=row.cordon_reason is not None,
        missing_since=row.missing_since,
        instance=row.instance_id,
        held_since=row.held_since,
        tenant=row.tenant_id,
        vpc=row.vpc_id,
    )


def _sickness(tray: Any, gpu: Any) -> str:
    name = PartName(tray.rack, tray.slot, gpu=gpu.module_id - 1)
    if gpu.health == UNLISTED:
        return f"{name} is not listed by its switch controller"
    return f"{name} is {GpuHealth(gpu.health).name}"


def _gpu_key(chassis: str, slot: int, gpu: Any) -> GpuKey:
    # Unpacked: with this number of rows, looking up their columns by name takes a third of the time.
    _, _, module, guid, source, _ = gpu
    return GpuKey(
        Fact(SlotKey(chassis, slot, module), Source.DECLARED),
        Fact(int(guid), _SOURCES[source]) if guid else None,
    )


_SOURCES: Mapping[str | None, Source] = {None: Source.DECLARED, "": Source.DECLARED, **{x: x for x in Source}}


def _instance_gpus(interfaces: tuple[GroupRows, _Fixes]) -> tuple[InstanceGpuRecord, ...]:
    rows, fixes = interfaces
    return tuple(
        InstanceGpuRecord(
            instance=instance_id,
            machine=machine_id,
            module_id=device + 1,
            logical=logical,
            status=status,
            since=updated,
            problem=reason or "",
            fix=fixes.get((machine_id, device)) or "",
        )
        for _, machine_id, instance_id, device, logical, status, updated, reason in rows
    )


def _moved_gpus(conn: sa.Connection) -> Iterator[MovedGpu]:
    for lost in sync.lost_gpus_of_instances(conn):
        yield MovedGpu(
            machine=lost.machine_id, module_id=lost.module_id, guid=int(lost.guid), since=lost.since
        )


def _logical_partitions(conn: sa.Connection) -> Iterator[LogicalPartitionRecord]:
    for row in conn.execute(sa.select(logical_partition).order_by(logical_partition.c.id)).all():
        yield LogicalPartitionRecord(
            id=row.id, name=row.name, tenant=row.tenant_id, status=row.status, since=row.updated
        )
