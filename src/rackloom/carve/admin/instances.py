"""RPCs about instances and their GPUs: find, change, release.

The list of GPU configurations is the complete desired state, as in REST. An entry without a logical
partition detaches its GPU. The status names a logical partition only for a GPU that was observed in it.
"""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from rackloom.carve.admin import common_pb2 as ids_pb
from rackloom.carve.admin import forge_pb2 as pb
from rackloom.carve.admin.deps import (
    AdminDeps,
    check_ids,
    check_version,
    config_version,
    rows_with_org,
    tenant_state,
)
from rackloom.carve.observation import latest
from rackloom.carve.store import journal
from rackloom.carve.store.prepared import require
from rackloom.carve.store.schema import instance as table
from rackloom.carve.store.schema import nvlink_interface, tenant
from rackloom.carve.store.values import Changed, InterfaceSpec, Status, check_description, check_name
from rackloom.carve.tenancy import instances, outdated
from rackloom.carve.tenancy.instances import InterfaceRow

_Row = sa.Row[Any]


async def find_ids(deps: AdminDeps, request: pb.InstanceSearchFilter) -> pb.InstanceIdList:
    """Ids by tenant, VPC or instance type, or all."""
    query = rows_with_org(table)
    if request.HasField("tenant_org_id"):
        query = query.where(tenant.c.org == request.tenant_org_id)
    if request.HasField("vpc_id"):
        query = query.where(table.c.vpc_id == request.vpc_id)
    if request.HasField("instance_type_id"):
        query = query.where(table.c.instance_type_id == request.instance_type_id)
    rows = await deps.store.read(lambda conn: conn.execute(query).all())
    return pb.InstanceIdList(instance_ids=[ids_pb.InstanceId(value=row.id) for row in rows])


async def find_by_ids(deps: AdminDeps, request: pb.InstancesByIdsRequest) -> pb.InstanceList:
    """Instances by id. Unknown ids are left out."""
    check_ids(request.instance_ids)
    wanted = [instance_id.value for instance_id in request.instance_ids]
    return pb.InstanceList(instances=await deps.store.read(_load, table.c.id.in_(wanted), deps.valid_from()))


async def find_by_machine(deps: AdminDeps, request: ids_pb.MachineId) -> pb.InstanceList:
    """The instance on a machine, if there is one."""
    return pb.InstanceList(
        instances=await deps.store.read(_load, table.c.machine_id == request.id, deps.valid_from())
    )


async def update_config(deps: AdminDeps, request: pb.InstanceConfigUpdateRequest) -> pb.Instance:
    """Change which logical partition each GPU joins. The list is the complete desired state, as in REST."""

    def work(conn: sa.Connection) -> Changed[pb.Instance]:
        row = _get(conn, request.instance_id.value)
        check_version(request, row.updated)
        if request.metadata.name:
            check_name(request.metadata.name)
        check_description(request.metadata.description)
        changed = instances.update_instance(
            conn,
            row.tenant_id,
            row.id,
            name=request.metadata.name or None,
            description=request.metadata.description or None,
            wanted=_interface_specs(request.config) if request.config.HasField("nvlink") else None,
            extra={},
            now=deps.clock(),
            ids=deps.ids,
        )
        (after,) = _load(conn, table.c.id == row.id, deps.valid_from())
        return Changed(after, changed.domains)

    return await deps.change(work)


async def release(deps: AdminDeps, request: pb.InstanceReleaseRequest) -> pb.InstanceReleaseResult:
    """Begin to release an instance."""

    def work(conn: sa.Connection) -> Changed[None]:
        row = _get(conn, request.id.value)
        return instances.delete_instance(conn, row.tenant_id, row.id, deps.clock())

    await deps.change(work)
    return pb.InstanceReleaseResult()


def _interface_specs(config: pb.InstanceConfig) -> list[InterfaceSpec]:
    return [
        InterfaceSpec(gpu_config.logical_partition_id.value, gpu_config.device_instance)
        for gpu_config in config.nvlink.gpu_configs
        # An entry that names no logical partition detaches its GPU.
        if gpu_config.logical_partition_id.value
    ]


def _get(conn: sa.Connection, instance_id: str) -> _Row:
    row = conn.execute(rows_with_org(table).where(table.c.id == instance_id)).one_or_none()
    return require(row, f"there is no instance {instance_id}")


def _load(conn: sa.Connection, which: "sa.ColumnElement[bool]", valid_from: float) -> list[pb.Instance]:
    rows = conn.execute(rows_with_org(table).where(which)).all()
    listing = instances.interface_listing().where(which).order_by(nvlink_interface.c.device_instance)
    domains = latest.outdated_domains(conn, valid_from)
    attached = [
        outdated.shown_interface(InterfaceRow._make(gpu), domains) for gpu in conn.execute(listing).all()
    ]
    histories = journal.status_histories(conn, [row.id for row in rows])
    doubts = outdated.machine_doubts(conn, [row.machine_id for row in rows], domains)
    return [
        _message(
            row,
            outdated.shown_status(row.status, doubts.get(row.machine_id)),
            [gpu for gpu in attached if gpu.instance_id == row.id],
            outdated.shown_history(row.id, row.status, histories[row.id], doubts.get(row.machine_id)),
        )
        for row in rows
    ]


def _message(
    row: _Row, status: str, attached: Sequence[InterfaceRow], history: Sequence[journal.StatusRecord]
) -> pb.Instance:
    wanted = [gpu for gpu in attached if gpu.status != Status.DELETING]
    synced = pb.SYNCED if all(gpu.status == Status.READY for gpu in attached) else pb.PENDING
    return pb.Instance(
        id=ids_pb.InstanceId(value=row.id),
        machine_id=ids_pb.MachineId(id=row.machine_id),
        metadata=pb.Metadata(name=row.name, description=row.description or ""),
        instance_type_id=row.instance_type_id,
        config=pb.InstanceConfig(
            tenant=pb.TenantConfig(tenant_organization_id=row.org),
            nvlink=pb.InstanceNVLinkConfig(gpu_configs=[_config(gpu) for gpu in wanted]),
        ),
        status=pb.InstanceStatus(
            tenant=pb.InstanceTenantStatus(
                state=tenant_state(status), state_details=history[0].message if history else ""
            ),
            configs_synced=pb.SYNCED if status == Status.READY else pb.PENDING,
            nvlink=pb.InstanceNVLinkStatus(
                gpu_statuses=[_gpu_status(gpu) for gpu in wanted], configs_synced=synced
            ),
        ),
        config_version=config_version(row.updated),
        nvlink_config_version=config_version(row.intent_at),
    )


def _config(row: InterfaceRow) -> pb.InstanceNVLinkGpuConfig:
    return pb.InstanceNVLinkGpuConfig(
        device_instance=row.device_instance,
        logical_partition_id=ids_pb.NVLinkLogicalPartitionId(value=row.logical_partition_id),
    )


def _gpu_status(row: InterfaceRow) -> pb.InstanceNVLinkGpuStatus:
    """The status names a logical partition only for a GPU that was observed in it."""
    status = pb.InstanceNVLinkGpuStatus(gpu_guid=row.guid)
    if row.domain is not None:
        status.domain_id.value = row.domain
    if row.status == Status.READY:
        status.logical_partition_id.value = row.logical_partition_id
    return status
