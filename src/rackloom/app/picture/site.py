"""The site service's own records as values: tenants, machines, instances, logical partitions."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import sqlalchemy as sa

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


def read_records(conn: sa.Connection) -> Records:
    """Everything, in a handful of queries whatever the site's size."""
    return Records(
        machines=tuple(_machines(conn)),
        instance_gpus=tuple(_instance_gpus(conn)),
        logicals=tuple(_logicals(conn)),
        tenants=_pairs(conn, tenant.c.id, tenant.c.org),
        vpcs=_pairs(conn, vpc.c.id, vpc.c.name),
    )


def _pairs(conn: sa.Connection, key: sa.Column[str], value: sa.Column[str]) -> dict[str, str]:
    """One column of a table by another."""
    return {row[0]: row[1] for row in conn.execute(sa.select(key, value))}


def _machines(conn: sa.Connection) -> Iterator[MachineSeen]:
    gpus = _gpu_rows(conn)
    vpcs = _pairs(conn, instance.c.id, instance.c.vpc_id)
    order = (machine.c.chassis_serial, machine.c.slot)
    for row in conn.execute(machines.listing().order_by(*order)):
        yield _machine(row, gpus.get(row.id, []), vpcs.get(row.instance_id))


def _gpu_rows(conn: sa.Connection) -> Mapping[str, list[Any]]:
    found: defaultdict[str, list[Any]] = defaultdict(list)
    for row in conn.execute(
        sa.select(machine_gpu).order_by(machine_gpu.c.machine_id, machine_gpu.c.module_id)
    ):
        found[row.machine_id].append(row)
    return found


def _machine(row: Any, gpus: list[Any], vpc_id: str | None) -> MachineSeen:
    sick = [f"GPU {one.module_id} is {GpuHealth(one.health).name}" for one in gpus if one.health not in _WELL]
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
        tenant=row.tenant_id,
        vpc=vpc_id,
    )


def _key(tray: Any, gpu: Any) -> GpuKey:
    place = SlotKey(tray.chassis_serial, tray.slot, gpu.module_id)
    source = Source(gpu.source) if gpu.source else Source.DECLARED
    return GpuKey(
        place=Fact(place, Source.DECLARED), fabric_guid=Fact(int(gpu.guid), source) if gpu.guid else None
    )


def _instance_gpus(conn: sa.Connection) -> Iterator[InstanceGpu]:
    fixes = _pairs(conn, blocked_gpu.c.guid, blocked_gpu.c.fix)
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
    for row in conn.execute(asked):
        yield InstanceGpu(
            instance=row.instance_id,
            machine=row.machine_id,
            module_id=row.device_instance + 1,
            logical=row.logical_partition_id,
            status=row.status,
            since=row.updated,
            problem=row.reason or "",
            fix=fixes.get(row.guid) or "",
        )


def _logicals(conn: sa.Connection) -> Iterator[LogicalSeen]:
    for row in conn.execute(sa.select(logical_partition).order_by(logical_partition.c.id)):
        yield LogicalSeen(
            id=row.id, name=row.name, tenant=row.tenant_id, status=row.status, since=row.updated
        )
