"""What is sent to a controller."""

from rackloom.carve.fabric.nmxc import nmx_c_pb2 as pb
from rackloom.carve.plan.values import AddGpus, CreatePartition, DeletePartition, RemoveGpus

MULTICAST_GROUPS = 16
"""Multicast groups to ask for with a new partition. NMX-C: a multiple of 4, out of the domain's 1024, and it
cannot be changed later."""


def domain_properties(gateway_id: str) -> pb.GetDomainPropertiesRequest:
    """The limits of the domain."""
    return pb.GetDomainPropertiesRequest(context=pb.Context(), gateway_id=gateway_id)


def all_gpus(gateway_id: str) -> pb.GetGpuInfoListRequest:
    """Every GPU of the domain."""
    return pb.GetGpuInfoListRequest(context=pb.Context(), attr=pb.NMX_GPU_ATTR_ALL, gateway_id=gateway_id)


def all_partitions(gateway_id: str) -> pb.GetPartitionInfoListRequest:
    """Every partition of the domain."""
    return pb.GetPartitionInfoListRequest(context=pb.Context(), gateway_id=gateway_id)


def create(operation: CreatePartition, gateway_id: str, multicast_groups: int) -> pb.CreatePartitionRequest:
    """A GUID-based partition; the controller chooses the id."""
    return pb.CreatePartitionRequest(
        context=pb.Context(),
        name=operation.name,
        gpu_resource_id=[pb.GpuResourceId(gpu_uid=guid) for guid in operation.guids],
        attr=pb.PartitionAttr(multicast_groups_limit=multicast_groups),
        gateway_id=gateway_id,
    )


def delete(operation: DeletePartition, gateway_id: str) -> pb.DeletePartitionRequest:
    """Deletion by id and name: should the id mean another partition by now, the controller refuses."""
    return pb.DeletePartitionRequest(
        context=pb.Context(),
        partition_id=pb.PartitionId(partition_id=operation.partition_id),
        name=operation.name,
        gateway_id=gateway_id,
    )


def update(operation: AddGpus | RemoveGpus, gateway_id: str) -> pb.UpdatePartitionRequest:
    """Addition or removal of members, by id and name as for a deletion."""
    return pb.UpdatePartitionRequest(
        context=pb.Context(),
        partition_id=pb.PartitionId(partition_id=operation.partition_id),
        name=operation.name,
        gpu_uid=operation.guids,
        gateway_id=gateway_id,
        reroute=True,
    )
