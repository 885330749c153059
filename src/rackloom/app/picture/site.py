"""The site service's own records as values: tenants, machines, instances, logical partitions."""

from collections.abc import Iterator, Mapping
from itertools import chain, groupby
from operator import attrgetter
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.app.picture.known import Known
from rackloom.app.picture.row_groups import RowGroups, Rows
from rackloom.carve.plan.values import GpuHealth
from rackloom.carve.site import machines, moved
from rackloom.carve.site.tables import (
    blocked_gpu,
    cordon,
    instance,
    logical_partition,
    machine,
    machine_gpu,
    nvlink_interface,
    tenant,
    vpc,
)
from rackloom.carve.site.values import Status
from rackloom.prove.picture.values import InstanceGpu, LogicalSeen, MachineSeen, MovedGpu
from rackloom.topology.facts import Fact, Source
from rackloom.topology.identity import GpuKey, SlotKey

_WELL = (GpuHealth.HEALTHY, GpuHealth.UNKNOWN)


class Records(msgspec.Struct, frozen=True, kw_only=True):
    """All of a site's records that a picture shows."""

    machines: tuple[MachineSeen, ...]
    instance_gpus: tuple[InstanceGpu, ...]
    moved_gpus: tuple[MovedGpu, ...]
    logicals: tuple[LogicalSeen, ...]
    tenants: Mapping[str, str]
    vpcs: Mapping[str, str]


def read_records(conn: sa.Connection, known: Known | None = None) -> Records:
    """Everything, in a handful of queries whatever the site's size; `known` remembers what rows told."""
    known = known or Known()
    fixes = _pairs(conn, blocked_gpu.c.guid, blocked_gpu.c.fix)
    return Records(
        machines=tuple(chain.from_iterable(known.again(_trays(conn, known), _machines))),
        instance_gpus=tuple(chain.from_iterable(known.again(_wishes(conn, known, fixes), _instance_gpus))),
        moved_gpus=tuple(_moved(conn)),
        logicals=tuple(_logicals(conn)),
        tenants=_pairs(conn, tenant.c.id, tenant.c.org),
        vpcs=_pairs(conn, vpc.c.id, vpc.c.name),
    )


def _pairs(conn: sa.Connection, key: sa.Column[str], value: sa.Column[str]) -> dict[str, str]:
    """One column of a table by another."""
    return {row[0]: row[1] for row in conn.execute(sa.select(key, value))}


_MACHINES = RowGroups(
    machines.listing()
    .with_only_columns(
        machine.c.chassis_serial,
        machine.c.id,
        machine.c.slot,
        machine.c.tray_index,
        machine.c.rack,
        machine.c.domain,
        machine.c.missing_since,
        machines.shown_status.label("shown_status"),
        cordon.c.reason.label("cordon_reason"),
        instance.c.id.label("instance_id"),
        instance.c.tenant_id,
        instance.c.vpc_id,
        instance.c.created.label("held_since"),
    )
    .order_by(machine.c.chassis_serial, machine.c.slot)
)
"""By chassis, and so are their GPUs, and what is asked for these."""
_GPUS = RowGroups(
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
_INTERFACES = RowGroups(
    sa.select(
        machine.c.chassis_serial,
        instance.c.machine_id,
        nvlink_interface.c.instance_id,
        nvlink_interface.c.device_instance,
        nvlink_interface.c.logical_partition_id,
        nvlink_interface.c.status,
        nvlink_interface.c.updated,
        nvlink_interface.c.reason,
        machine_gpu.c.guid,
    )
    .select_from(
        nvlink_interface.join(instance, instance.c.id == nvlink_interface.c.instance_id)
        .join(machine, machine.c.id == instance.c.machine_id)
        .join(
            machine_gpu,
            sa.and_(
                machine_gpu.c.machine_id == instance.c.machine_id,
                machine_gpu.c.module_id == nvlink_interface.c.device_instance + 1,
            ),
            isouter=True,
        )
    )
    .where(nvlink_interface.c.status != Status.DELETING)
    .order_by(machine.c.chassis_serial, instance.c.id, nvlink_interface.c.device_instance)
)


class _Trays(msgspec.Struct, frozen=True):
    """The rows of the machines of a chassis, and of their GPUs. Rows are equal when their values are."""

    machines: Rows
    gpus: Rows


def _trays(conn: sa.Connection, known: Known) -> dict[str, _Trays]:
    gpus = _GPUS.of(conn, known)
    return {name: _Trays(rows, gpus.get(name, ())) for name, rows in _MACHINES.of(conn, known).items()}


def _machines(trays: _Trays) -> tuple[MachineSeen, ...]:
    gpus = {id_: tuple(some) for id_, some in groupby(trays.gpus, key=attrgetter("machine_id"))}
    return tuple(_machine(row, gpus.get(row.id, ())) for row in trays.machines)


def _machine(row: Any, gpus: Rows) -> MachineSeen:
    sick = [f"GPU {g.module_id} is {GpuHealth(g.health).name}" for g in gpus if g.health not in _WELL]
    return MachineSeen(
        id=row.id,
        rack=row.rack,
        domain=row.domain or "",
        chassis_serial=row.chassis_serial,
        slot=row.slot,
        tray_index=row.tray_index,
        gpus=tuple(_key(row, one) for one in gpus),
        status=row.shown_status,
        health=", ".join(sick),
        cordoned=row.cordon_reason is not None,
        missing_since=row.missing_since,
        instance=row.instance_id,
        held_since=row.held_since,
        tenant=row.tenant_id,
        vpc=row.vpc_id,
    )


def _key(tray: Any, gpu: Any) -> GpuKey:
    place = SlotKey(tray.chassis_serial, tray.slot, gpu.module_id)
    source = Source(gpu.source) if gpu.source else Source.DECLARED
    return GpuKey(
        place=Fact(place, Source.DECLARED), fabric_guid=Fact(int(gpu.guid), source) if gpu.guid else None
    )


class _Wishes(msgspec.Struct, frozen=True):
    """The rows of the interfaces of instances in a chassis, and what would let their GPUs be had."""

    rows: Rows
    fixes: tuple[str, ...]


def _wishes(conn: sa.Connection, known: Known, fixes: Mapping[str, str]) -> dict[str, _Wishes]:
    found = _INTERFACES.of(conn, known)
    return {
        name: _Wishes(rows, tuple(fixes.get(row.guid) or "" for row in rows)) for name, rows in found.items()
    }


def _instance_gpus(wishes: _Wishes) -> tuple[InstanceGpu, ...]:
    return tuple(_instance_gpu(row, fix) for row, fix in zip(wishes.rows, wishes.fixes, strict=True))


def _instance_gpu(row: Any, fix: str) -> InstanceGpu:
    return InstanceGpu(
        instance=row.instance_id,
        machine=row.machine_id,
        module_id=row.device_instance + 1,
        logical=row.logical_partition_id,
        status=row.status,
        since=row.updated,
        problem=row.reason or "",
        fix=fix,
    )


def _moved(conn: sa.Connection) -> Iterator[MovedGpu]:
    for lost in moved.of_instances(conn):
        yield MovedGpu(
            machine=lost.machine_id, module_id=lost.module_id, guid=int(lost.guid), since=lost.since
        )


def _logicals(conn: sa.Connection) -> Iterator[LogicalSeen]:
    for row in conn.execute(sa.select(logical_partition).order_by(logical_partition.c.id)):
        yield LogicalSeen(
            id=row.id, name=row.name, tenant=row.tenant_id, status=row.status, since=row.updated
        )
