"""From the controller's lists to one observation."""

from collections.abc import Sequence

from rackloom.carve.fabric.nmxc import nmx_c_pb2 as pb
from rackloom.carve.fabric.ports import FabricUnavailable
from rackloom.carve.plan.values import (
    GpuHealth,
    Limits,
    ObservedGpu,
    ObservedPartition,
    PartitionHealth,
)

Place = tuple[int, int, int, int]
"""Chassis id, slot id, host id and GPU id: how a location-based partition names its members."""


def read_gpus(infos: Sequence[pb.GpuInfo]) -> tuple[ObservedGpu, ...]:
    """GPUs by GUID. Raises FabricUnavailable when one has no GUID, or two have the same."""
    gpus = {info.gpu_uid: _gpu(info) for info in infos}
    if 0 in gpus or len(gpus) != len(infos):
        raise FabricUnavailable("GetGpuInfoList: GPUs without a GUID of their own")
    return tuple(gpus[guid] for guid in sorted(gpus))


def read_partitions(
    infos: Sequence[pb.PartitionInfo], gpus: Sequence[pb.GpuInfo]
) -> tuple[ObservedPartition, ...]:
    """Partitions by id, the members of location-based ones looked up.

    The two lists are read one after the other. Raises FabricUnavailable when they cannot both be true: a
    controller has been seen to leave a partition out of its list for a while, and a partition that is
    missing from an observation would be taken for one that is gone.
    """
    places = {_place(gpu): gpu.gpu_uid for gpu in gpus}
    partitions = {info.partition_id.partition_id: _partition(info, places) for info in infos}
    if 0 in partitions:
        raise FabricUnavailable("GetPartitionInfoList: a partition without an id")
    if len(partitions) != len(infos):
        raise FabricUnavailable("GetPartitionInfoList: two partitions with one id")
    for gpu in gpus:
        held_by = gpu.partition_id.partition_id
        if held_by and (held_by not in partitions or gpu.gpu_uid not in partitions[held_by].members):
            raise FabricUnavailable(
                f"GPU {gpu.gpu_uid:#x} is in partition {held_by}, which the list of partitions denies"
            )
    return tuple(partitions[number] for number in sorted(partitions))


def read_limits(properties: pb.DomainProperties) -> Limits:
    """Limits of the domain; a zero is a limit that is not reported."""
    return Limits(
        max_partitions=properties.max_num_partitions or None,
        max_multicast_groups=properties.max_multicast_groups or None,
        max_compute_nodes=properties.max_compute_nodes or None,
        max_gpus_per_compute_node=properties.max_gpus_per_compute_node or None,
    )


def _gpu(info: pb.GpuInfo) -> ObservedGpu:
    return ObservedGpu(
        guid=info.gpu_uid,
        chassis_serial=info.loc.chassis_serial_number.strip(),
        slot=info.loc.location.slot_id,
        tray_index=info.loc.tray_index,
        module_id=info.gpu_id,
        health=_gpu_health(info.gpu_health),
    )


def _partition(info: pb.PartitionInfo, places: dict[Place, int]) -> ObservedPartition:
    # A location without a GPU is an empty seat, not a member.
    located = {_location(one.loc, one.gpu_id) for one in info.gpu_location_list} & places.keys()
    return ObservedPartition(
        id=info.partition_id.partition_id,
        name=info.name,
        members=frozenset(info.gpu_uid_list) | {places[place] for place in located},
        health=_partition_health(info.health),
        guid_based=info.partition_type != pb.NMX_PARTITION_TYPE_LOCATION_BASED,
        multicast_groups=info.num_allocated_multicast_groups,
    )


def _place(gpu: pb.GpuInfo) -> Place:
    return _location(gpu.loc.location, gpu.gpu_id)


def _location(location: pb.Location, gpu_id: int) -> Place:
    return (location.chassis_id, location.slot_id, location.host_id, gpu_id)


def _gpu_health(value: int) -> GpuHealth:
    """A value that later controllers may add is no health that we know."""
    return GpuHealth(value) if value in GpuHealth.__members__.values() else GpuHealth.UNKNOWN


def _partition_health(value: int) -> PartitionHealth:
    return (
        PartitionHealth(value) if value in PartitionHealth.__members__.values() else PartitionHealth.UNKNOWN
    )
