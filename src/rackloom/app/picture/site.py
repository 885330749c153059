"""The site service's own records as values: tenants, machines, instances, logical partitions."""

from collections.abc import Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.app.picture.known import Known
from rackloom.carve.plan.values import GpuHealth
from rackloom.carve.site import machines
from rackloom.carve.site.tables import (
    blocked_gpu,
    instance,
    logical_partition,
    machine,
    machine_gpu,
    nvlink_interface,
    tenant,
    vpc,
)
from rackloom.carve.site.values import Status
from rackloom.prove.picture.values import InstanceGpu, LogicalSeen, MachineSeen
from rackloom.topology.facts import Fact, Source
from rackloom.topology.identity import GpuKey, SlotKey

_WELL = (GpuHealth.HEALTHY, GpuHealth.UNKNOWN)


class Records(msgspec.Struct, frozen=True, kw_only=True):
    """All of a site's records that a picture shows."""

    machines: tuple[MachineSeen, ...]
    instance_gpus: tuple[InstanceGpu, ...]
    logicals: tuple[LogicalSeen, ...]
    tenants: Mapping[str, str]
    vpcs: Mapping[str, str]


def read_records(conn: sa.Connection, known: Known | None = None) -> Records:
    """Everything, in a handful of queries whatever the site's size; `known` remembers what rows told."""
    known = known or Known()
    fixes = _pairs(conn, blocked_gpu.c.guid, blocked_gpu.c.fix)
    return Records(
        machines=tuple(known.again(_trays(conn, known), _machine)),
        instance_gpus=tuple(known.again(_wishes(conn, fixes), _instance_gpu)),
        logicals=tuple(_logicals(conn)),
        tenants=_pairs(conn, tenant.c.id, tenant.c.org),
        vpcs=_pairs(conn, vpc.c.id, vpc.c.name),
    )


def _pairs(conn: sa.Connection, key: sa.Column[str], value: sa.Column[str]) -> dict[str, str]:
    """One column of a table by another."""
    return {row[0]: row[1] for row in conn.execute(sa.select(key, value))}


class _Tray(msgspec.Struct, frozen=True):
    """The rows of one machine. Rows are equal when their values are."""

    row: Any
    gpus: tuple[Any, ...]
    held: Any | None
    """That of its instance: VPC, and when it was made."""


def _trays(conn: sa.Connection, known: Known) -> dict[str, _Tray]:
    gpus = known.unless(conn.execute(_GPUS_AS_TEXT).scalar_one() or "", _gpu_rows, conn)
    held = conn.execute(sa.select(instance.c.machine_id, instance.c.vpc_id, instance.c.created)).all()
    holders = {row.machine_id: row for row in held}
    order = (machine.c.chassis_serial, machine.c.slot)
    rows = conn.execute(machines.listing().order_by(*order)).all()
    return {row.id: _Tray(row, gpus.get(row.id, ()), holders.get(row.id)) for row in rows}


def _word(column: sa.Column[Any]) -> sa.ColumnElement[str]:
    return sa.func.coalesce(sa.cast(column, sa.Text), "-") + " "


_of_gpu = machine_gpu.c
_GPUS_AS_TEXT = sa.select(
    sa.func.aggregate_strings(
        _word(_of_gpu.health)
        + _word(_of_gpu.module_id)
        + _word(_of_gpu.guid)
        + _word(_of_gpu.source)
        # Last, since whoever names machines may have put anything in their names.
        + _word(_of_gpu.machine_id),
        "\n",
    )
)
"""All GPUs of all machines in one row: to fetch thousands is dear, and they hardly ever tell anything new."""


def _gpu_rows(conn: sa.Connection) -> Mapping[str, tuple[Any, ...]]:
    order = (machine_gpu.c.machine_id, machine_gpu.c.module_id)
    rows = conn.execute(sa.select(machine_gpu).order_by(*order)).all()
    return {id_: tuple(some) for id_, some in groupby(rows, key=itemgetter(0))}


def _machine(tray: _Tray) -> MachineSeen:
    row = tray.row
    sick = [f"GPU {g.module_id} is {GpuHealth(g.health).name}" for g in tray.gpus if g.health not in _WELL]
    return MachineSeen(
        id=row.id,
        rack=row.rack,
        domain=row.domain or "",
        chassis_serial=row.chassis_serial,
        slot=row.slot,
        tray_index=row.tray_index,
        gpus=tuple(_key(row, one) for one in tray.gpus),
        status=row.shown_status,
        health=", ".join(sick),
        cordoned=row.cordon_reason is not None,
        missing_since=row.missing_since,
        instance=row.instance_id,
        held_since=None if tray.held is None else tray.held.created,
        tenant=row.tenant_id,
        vpc=None if tray.held is None else tray.held.vpc_id,
    )


def _key(tray: Any, gpu: Any) -> GpuKey:
    place = SlotKey(tray.chassis_serial, tray.slot, gpu.module_id)
    source = Source(gpu.source) if gpu.source else Source.DECLARED
    return GpuKey(
        place=Fact(place, Source.DECLARED), fabric_guid=Fact(int(gpu.guid), source) if gpu.guid else None
    )


class _Wish(msgspec.Struct, frozen=True):
    """The row of one interface of an instance, and what would let its GPU be had."""

    row: Any
    fix: str


def _wishes(conn: sa.Connection, fixes: Mapping[str, str]) -> dict[str, _Wish]:
    gpu = sa.and_(
        machine_gpu.c.machine_id == instance.c.machine_id,
        machine_gpu.c.module_id == nvlink_interface.c.device_instance + 1,
    )
    joined = nvlink_interface.join(instance, instance.c.id == nvlink_interface.c.instance_id)
    asked = (
        sa.select(nvlink_interface, instance.c.machine_id, machine_gpu.c.guid)
        .select_from(joined.join(machine_gpu, gpu, isouter=True))
        .where(nvlink_interface.c.status != Status.DELETING)
        .order_by(instance.c.id, nvlink_interface.c.device_instance)
    )
    return {row.id: _Wish(row, fixes.get(row.guid) or "") for row in conn.execute(asked).all()}


def _instance_gpu(wish: _Wish) -> InstanceGpu:
    row = wish.row
    return InstanceGpu(
        instance=row.instance_id,
        machine=row.machine_id,
        module_id=row.device_instance + 1,
        logical=row.logical_partition_id,
        status=row.status,
        since=row.updated,
        problem=row.reason or "",
        fix=wish.fix,
    )


def _logicals(conn: sa.Connection) -> Iterator[LogicalSeen]:
    for row in conn.execute(sa.select(logical_partition).order_by(logical_partition.c.id)):
        yield LogicalSeen(
            id=row.id, name=row.name, tenant=row.tenant_id, status=row.status, since=row.updated
        )
