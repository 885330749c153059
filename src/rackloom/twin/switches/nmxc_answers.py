"""What a simulated controller does and answers: NMX-C messages on one side, a fabric's state on the other.

Functions of a fabric and a request that return the reply without its header, or raise FabricRefusal.
"""

from rackloom.carve.fabric.nmxc import nmx_c_pb2 as pb
from rackloom.twin.switches.fabric import FabricGpu, FabricPartition, FabricRefusal, SimulatedFabric

APP_VERSION = "twin"
CONFIGURED = 3
"""ControlPlaneState of a controller that is up."""
HEALTHY = 1


def header(fabric: SimulatedFabric, code: str = "SUCCESS") -> pb.ServerHeader:
    """The server header with a return code."""
    return pb.ServerHeader(
        domain_uuid=fabric.domain, app_ver=APP_VERSION, return_code=pb.StReturnCode.Value(f"NMX_ST_{code}")
    )


def hello(_: SimulatedFabric, request: pb.ClientHello) -> pb.ServerHello:
    """Who answers (in the header), and that the client's version suits."""
    return pb.ServerHello(major_version=request.major_version, minor_version=request.minor_version)


def domain_properties(fabric: SimulatedFabric, _: pb.GetDomainPropertiesRequest) -> pb.DomainProperties:
    """The limits of the domain."""
    limits = fabric.limits
    return pb.DomainProperties(
        max_compute_nodes=limits.max_compute_nodes,
        max_gpus_per_compute_node=limits.max_gpus_per_compute_node,
        max_num_partitions=limits.max_partitions,
        max_multicast_groups=limits.max_multicast_groups,
    )


def domain_state(fabric: SimulatedFabric, _: pb.GetDomainStateInfoRequest) -> pb.DomainStateInfo:
    """The state that heart beats carry."""
    allocated = sum(one.multicast_groups for one in fabric.partitions.values())
    return pb.DomainStateInfo(
        server_header=header(fabric),
        control_plane_state=CONFIGURED,
        available_multicast_groups=max(fabric.limits.max_multicast_groups - allocated, 0),
        nmx_controller_health=HEALTHY,
    )


def gpus(fabric: SimulatedFabric, request: pb.GetGpuInfoListRequest) -> pb.GetGpuInfoListResponse:
    """Every GPU, by seat. Narrower questions are not simulated."""
    if request.attr != pb.NMX_GPU_ATTR_ALL:
        raise FabricRefusal("NOT_SUPPORTED")
    holder = {guid: one.id for one in fabric.partitions.values() for guid in one.guids}
    seated = sorted(fabric.gpus.values(), key=lambda gpu: (gpu.host_id, gpu.module_id))
    return pb.GetGpuInfoListResponse(
        gpu_info_list=[_gpu_info(gpu, holder.get(gpu.guid, 0)) for gpu in seated]
    )


def nodes(fabric: SimulatedFabric, _: pb.GetComputeNodeInfoListRequest) -> pb.GetComputeNodeInfoListResponse:
    """Every tray with a GPU in it."""
    trays: dict[int, list[FabricGpu]] = {}
    for gpu in fabric.gpus.values():
        trays.setdefault(gpu.host_id, []).append(gpu)
    return pb.GetComputeNodeInfoListResponse(
        node_info_list=[_node_info(fabric, trays[host_id]) for host_id in sorted(trays)]
    )


def partitions(
    fabric: SimulatedFabric, request: pb.GetPartitionInfoListRequest
) -> pb.GetPartitionInfoListResponse:
    """The partitions asked for by id or name, or all."""
    ids = {one.partition_id for one in request.partition_id_list}
    names = set(request.partition_name_list)
    chosen = [
        one
        for one in fabric.snapshot().partitions
        if not (ids or names) or one.id in ids or one.name in names
    ]
    return pb.GetPartitionInfoListResponse(
        partition_info_list=[_partition_info(fabric, one) for one in chosen]
    )


def create(fabric: SimulatedFabric, request: pb.CreatePartitionRequest) -> pb.CreatePartitionResponse:
    """A GUID-based partition; one by location is not simulated."""
    if any(one.HasField("gpu_location") for one in request.gpu_resource_id):
        raise FabricRefusal("NOT_SUPPORTED")
    made = fabric.create(
        request.name,
        [one.gpu_uid for one in request.gpu_resource_id],
        partition_id=request.partition_id.partition_id,
        multicast_groups=request.attr.multicast_groups_limit,
    )
    return pb.CreatePartitionResponse(partition_id=_id(made))


def delete(fabric: SimulatedFabric, request: pb.DeletePartitionRequest) -> pb.DeletePartitionResponse:
    """Away with a partition, by id, by name or by both."""
    gone = fabric.delete(request.partition_id.partition_id, request.name)
    return pb.DeletePartitionResponse(partition_id=_id(gone))


def add_gpus(fabric: SimulatedFabric, request: pb.UpdatePartitionRequest) -> pb.UpdatePartitionResponse:
    """More members."""
    changed = fabric.add(request.partition_id.partition_id, request.gpu_uid, request.name)
    return pb.UpdatePartitionResponse(partition_id=_id(changed))


def remove_gpus(fabric: SimulatedFabric, request: pb.UpdatePartitionRequest) -> pb.UpdatePartitionResponse:
    """Fewer members."""
    changed = fabric.remove(request.partition_id.partition_id, request.gpu_uid, request.name)
    return pb.UpdatePartitionResponse(partition_id=_id(changed))


def _partition_info(fabric: SimulatedFabric, partition: FabricPartition) -> pb.PartitionInfo:
    """One partition, its members by GUID or by seat as its type has it."""
    info = pb.PartitionInfo(
        partition_id=_id(partition.id),
        name=partition.name,
        num_gpus=len(partition.guids),
        health=pb.PartitionHealth.ValueType(partition.health),
        num_allocated_multicast_groups=partition.multicast_groups,
    )
    if partition.guid_based:
        info.partition_type = pb.NMX_PARTITION_TYPE_GPUUID_BASED
        info.gpu_uid_list.extend(partition.guids)
        return info
    info.partition_type = pb.NMX_PARTITION_TYPE_LOCATION_BASED
    seated = [fabric.gpus[guid] for guid in partition.guids if guid in fabric.gpus]
    info.gpu_location_list.extend(pb.GpuLocation(loc=_location(gpu), gpu_id=gpu.module_id) for gpu in seated)
    return info


def _gpu_info(gpu: FabricGpu, held_by: int) -> pb.GpuInfo:
    return pb.GpuInfo(
        loc=_location_info(gpu),
        gpu_id=gpu.module_id,
        gpu_uid=gpu.guid,
        gpu_health=pb.GpuHealth.ValueType(gpu.health),
        partition_id=_id(held_by) if held_by else None,
    )


def _node_info(fabric: SimulatedFabric, gpus: list[FabricGpu]) -> pb.ComputeNodeInfo:
    holders = sorted({fabric.partition_of(gpu.guid) for gpu in gpus} - {0})
    return pb.ComputeNodeInfo(
        loc=_location_info(gpus[0]),
        num_gpus=len(gpus),
        node_health=pb.NMX_COMPUTE_NODE_HEALTH_HEALTHY,
        partition_id_list=[_id(number) for number in holders],
    )


def _location_info(gpu: FabricGpu) -> pb.LocationInfo:
    return pb.LocationInfo(
        chassis_serial_number=gpu.chassis_serial, tray_index=gpu.tray_index, location=_location(gpu)
    )


def _location(gpu: FabricGpu) -> pb.Location:
    return pb.Location(chassis_id=gpu.chassis_id, slot_id=gpu.slot, host_id=gpu.host_id)


def _id(number: int) -> pb.PartitionId:
    return pb.PartitionId(partition_id=number)
