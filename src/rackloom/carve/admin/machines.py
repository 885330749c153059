"""RPCs about machines: GPU mapping and observed partitions, repair of the mapping, force-delete.

If a repair is wrong, the next observation overrules it. Force-delete first releases the instance. The
operator repeats the call until the machine is free, and only then is the machine removed. An earlier removal
would leave its GPUs in a partition. As in upstream, a GPU that is in no partition is shown without a domain.
A GPU is left out if the controller does not list it, or contradicts itself about its partition.
"""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from google.protobuf.empty_pb2 import Empty

from rackloom.carve.admin import common_pb2 as ids_pb
from rackloom.carve.admin import forge_pb2 as pb
from rackloom.carve.admin.deps import AdminDeps, check_ids, timestamp
from rackloom.carve.admin.partitions import PartitionListing, list_partitions
from rackloom.carve.inventory import enrolment, maintenance
from rackloom.carve.inventory.enrolment import DeclaredGpu
from rackloom.carve.observation import latest
from rackloom.carve.observation.latest import LatestObservation
from rackloom.carve.store.journal import OperatorOrder
from rackloom.carve.store.schema import machine as table
from rackloom.carve.store.values import Changed, invalid
from rackloom.carve.tenancy import catalog
from rackloom.core.partitions.domain import DomainObservation

_Row = sa.Row[Any]


async def find_ids(deps: AdminDeps, request: pb.MachineSearchConfig) -> ids_pb.MachineIdList:
    """Ids of machines. Every machine of the site has NVLink, so `mnnvl_only` leaves none out."""
    query = sa.select(table.c.id).order_by(table.c.id)
    if request.HasField("instance_type_id"):
        query = query.where(table.c.instance_type_id == request.instance_type_id)
    found = await deps.store.read(lambda conn: conn.execute(query).scalars().all())
    return ids_pb.MachineIdList(machine_ids=[ids_pb.MachineId(id=machine_id) for machine_id in found])


async def find_by_ids(deps: AdminDeps, request: pb.MachinesByIdsRequest) -> pb.MachineList:
    """Machines with their NVLink part, by their ids or any name of their trays. Others are left out."""
    check_ids(request.machine_ids)
    wanted = [machine_id.id for machine_id in request.machine_ids]
    return pb.MachineList(machines=await deps.store.read(_load, wanted, deps.valid_from()))


async def update_nvlink_info(deps: AdminDeps, request: pb.UpdateMachineNvLinkInfoRequest) -> Empty:
    """Repair the GPU mapping of a machine. The next observation overrules errors in it."""
    info = request.nvlink_info
    slots = {(gpu.slot_id, gpu.tray_index) for gpu in info.gpus}
    if len(slots) != 1 or not info.chassis_serial:
        raise invalid("nvlink_info needs a chassis_serial, and GPUs that are all in one slot")
    ((slot, tray),) = slots
    gpus = [DeclaredGpu(module_id=gpu.device_id, guid=gpu.guid) for gpu in info.gpus]
    await deps.change(
        lambda conn: enrolment.declare_gpus(
            conn,
            request.machine_id.id,
            (info.chassis_serial, slot, tray),
            info.domain_uuid.value or None,
            gpus,
            deps.clock(),
        )
    )
    return Empty()


async def force_delete(
    deps: AdminDeps, request: pb.AdminForceDeleteMachineRequest
) -> pb.AdminForceDeleteMachineResponse:
    """Release the instance on a machine. The next call, once the machine is free, removes it."""
    return await deps.change(lambda conn: _force_delete(conn, request.host_query, deps.order("force-delete")))


def _force_delete(
    conn: sa.Connection, machine_id: str, order: OperatorOrder
) -> Changed[pb.AdminForceDeleteMachineResponse]:
    machine = enrolment.get_enrolled_machine(conn, machine_id)
    reply = pb.AdminForceDeleteMachineResponse(managed_host_machine_id=machine_id)
    if machine.instance_id is None:
        reply.all_done = True
        return Changed(reply, enrolment.remove_machine(conn, machine_id, order.now))
    # Without the machine record, nothing would take the GPUs out of their partition.
    reply.instance_id = machine.instance_id
    return Changed(reply, maintenance.force_delete_instance(conn, machine_id, order).domains)


def _load(conn: sa.Connection, wanted: Sequence[str], valid_from: float) -> list[pb.Machine]:
    ids = catalog.machine_ids_named(conn, wanted)
    rows = conn.execute(catalog.machine_listing().where(table.c.id.in_(ids)).order_by(table.c.id)).all()
    gpus = catalog.gpus_of_machines(conn, [row.id for row in rows])
    listed = list_partitions(conn, valid_from)
    owners = {(partition.view.domain, partition.view.partition.name): partition for partition in listed}
    observed = {
        domain: latest.latest_of_domain(conn, domain, valid_from) for domain in {row.domain for row in rows}
    }
    return [_message(row, gpus[row.id], observed[row.domain], owners) for row in rows]


def _message(
    row: _Row, gpus: Sequence[_Row], known: LatestObservation, owners: dict[tuple[str, str], PartitionListing]
) -> pb.Machine:
    shown = pb.Machine(
        id=ids_pb.MachineId(id=row.id),
        state=row.shown_status,
        instance_type_id=row.instance_type_id,
        nvlink_info=_info(row, gpus),
    )
    if known.observation is not None:
        shown.last_observation_time.CopyFrom(timestamp(known.observation.observed_at))
        shown.nvlink_status_observation.CopyFrom(_status(gpus, known.observation, known.uncertain, owners))
    return shown


def _info(row: _Row, gpus: Sequence[_Row]) -> pb.MachineNVLinkInfo:
    place = {"tray_index": row.tray_index, "slot_id": row.slot}
    return pb.MachineNVLinkInfo(
        domain_uuid=ids_pb.NVLinkDomainId(value=row.domain) if row.domain else None,
        chassis_serial=row.chassis_serial,
        gpus=[pb.NVLinkGpu(**place, device_id=gpu.module_id, guid=int(gpu.guid or 0)) for gpu in gpus],
    )


def _status(
    gpus: Sequence[_Row],
    observed: DomainObservation,
    uncertain: frozenset[int],
    owners: dict[tuple[str, str], PartitionListing],
) -> pb.MachineNVLinkStatusObservation:
    holder = {guid: partition.name for partition in observed.partitions for guid in partition.members}
    present = {gpu.guid for gpu in observed.gpus} - uncertain
    statuses = [
        _gpu_status(gpu, observed.domain, owners.get((observed.domain, holder.get(int(gpu.guid), ""))))
        for gpu in gpus
        if gpu.guid is not None and int(gpu.guid) in present
    ]
    return pb.MachineNVLinkStatusObservation(gpu_status=statuses)


def _gpu_status(
    gpu: _Row, domain: str, held_by: PartitionListing | None
) -> pb.MachineNVLinkGpuStatusObservation:
    """As in upstream, a GPU that is in no partition has no domain either."""
    status = pb.MachineNVLinkGpuStatusObservation(
        gpu_id=gpu.guid, device_instance=gpu.module_id - 1, guid=int(gpu.guid)
    )
    if held_by is not None:
        status.domain_id.value = domain
        status.partition_id.value = held_by.id
        if held_by.view.logical_partition is not None:
            status.logical_partition_id.value = held_by.view.logical_partition
    return status
