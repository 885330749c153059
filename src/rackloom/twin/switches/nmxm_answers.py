"""What a simulated NMX-M shows of its domains: JSON on one side, the state of fabrics on the other.

Entities get ids of their own, so that nothing joins them to GUIDs by luck.
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

from rackloom.carve.plan.values import GpuHealth, PartitionHealth
from rackloom.twin.switches.fabric import FabricGpu, FabricPartition, SimulatedFabric

Json = dict[str, Any]
CREATED = "2026-01-01T00:00:00Z"
"""Every entity's: the simulation has no idea of the time of day."""

_GPU_HEALTH = {GpuHealth.DEGRADED_BANDWIDTH: "DEGRADED_BW"}


def chassis(fabric: SimulatedFabric) -> list[Json]:
    """Every chassis with a GPU in it."""
    numbers = {gpu.chassis_id: gpu.chassis_serial for gpu in fabric.gpus.values()}
    return [
        _entity(f"chassis {fabric.domain} {number}")
        | {"DomainUUID": fabric.domain, "InternalID": number, "SerialNumber": numbers[number]}
        for number in sorted(numbers)
    ]


def nodes(fabric: SimulatedFabric) -> list[Json]:
    """Every tray with a GPU in it."""
    trays = {gpu.host_id: gpu for gpu in fabric.gpus.values()}
    return [
        _entity(f"node {fabric.domain} {host_id}")
        | {"DomainUUID": fabric.domain, "LocationInfo": _location(trays[host_id]), "Health": "HEALTHY"}
        for host_id in sorted(trays)
    ]


def gpus(fabric: SimulatedFabric) -> list[Json]:
    """Every GPU, by seat."""
    holder = {guid: one.id for one in fabric.partitions.values() for guid in one.guids}
    seated = sorted(fabric.gpus.values(), key=lambda gpu: (gpu.host_id, gpu.module_id))
    return [_gpu(fabric, gpu, holder.get(gpu.guid, 0)) for gpu in seated]


def partition(fabric: SimulatedFabric, one: FabricPartition, entity: str) -> Json:
    """One partition, its members by entity or by seat as its type has it."""
    if one.guid_based:
        members: list[Any] = [gpu_entity(guid) for guid in one.guids]
    else:
        seated = [fabric.gpus[guid] for guid in one.guids if guid in fabric.gpus]
        members = [_place(fabric, gpu) for gpu in seated]
    return {
        "ID": entity,
        "PartitionID": one.id,
        "Name": one.name,
        "Type": "ID_BASED" if one.guid_based else "LOCATION_BASED",
        "Health": PartitionHealth(one.health).name,
        "Members": members or None,
        "CreatedAt": CREATED,
        "UpdatedAt": CREATED,
    }


def gpu_entity(guid: int) -> str:
    """The id of a GPU."""
    return digest(f"gpu {guid}")


def guids_of(fabrics: Iterable[SimulatedFabric]) -> Iterator[tuple[str, SimulatedFabric, int]]:
    """Entity, fabric and GUID of every GPU that is there or that a partition names."""
    for fabric in fabrics:
        named = {guid for one in fabric.partitions.values() for guid in one.guids}
        for guid in sorted(fabric.gpus.keys() | named):
            yield gpu_entity(guid), fabric, guid


def digest(what: str) -> str:
    """24 hexadecimal digits."""
    return hashlib.blake2b(what.encode(), digest_size=12).hexdigest()


def _entity(what: str) -> Json:
    return {"ID": digest(what), "Name": what, "CreatedAt": CREATED, "UpdatedAt": CREATED}


def _gpu(fabric: SimulatedFabric, gpu: FabricGpu, held_by: int) -> Json:
    return {
        "ID": gpu_entity(gpu.guid),
        "DomainUUID": fabric.domain,
        "LocationInfo": _location(gpu),
        "DeviceUID": gpu.guid,
        "DeviceID": gpu.module_id,
        "DevicePcieID": 0,
        "SystemUID": 0,
        "VendorID": 0,
        "ALIDList": [],
        "PortIDList": [],
        "PartitionID": held_by,
        "Health": _GPU_HEALTH.get(gpu.health, gpu.health.name),
    }


def _location(gpu: FabricGpu) -> Json:
    return {
        "ChassisID": gpu.chassis_id,
        "ChassisSerialNumber": gpu.chassis_serial,
        "SlotID": gpu.slot,
        "TrayIndex": gpu.tray_index,
        "HostID": gpu.host_id,
    }


def _place(fabric: SimulatedFabric, gpu: FabricGpu) -> Json:
    return {
        "DomainUUID": fabric.domain,
        "ChassisID": gpu.chassis_id,
        "SlotID": gpu.slot,
        "HostID": gpu.host_id,
        "DeviceID": gpu.module_id,
    }
