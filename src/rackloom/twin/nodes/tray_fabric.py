"""What the GPUs of a tray say of their NVLink fabric, as it follows from the state of their switches; pure.

A GPU has joined its fabric once its switches hold it in a partition, which is then its clique (NVML:
clusterUUID and cliqueId). One that is in none waits to be let in.
"""

from collections.abc import Mapping

import msgspec

from rackloom.carve.plan.values import GpuHealth
from rackloom.claim.node.imex.fabric import FabricState, GpuFabric
from rackloom.claim.node.values import Health
from rackloom.topology.facts import Fact, Source
from rackloom.topology.identity import GpuKey, SlotKey
from rackloom.topology.rack import Tray
from rackloom.twin.nodes.tray_names import TrayNames
from rackloom.twin.switches.fabric import FabricGpu, FabricSnapshot

_HEALTH = {GpuHealth.HEALTHY: Health.HEALTHY, GpuHealth.UNKNOWN: Health.UNKNOWN}
"""NVML's summary of what the switches say; everything else is unhealthy."""


class Seat(msgspec.Struct, frozen=True):
    """One GPU in its fabric; `partition` 0 is none."""

    gpu: FabricGpu
    partition: int


Seats = Mapping[SlotKey, Seat]


class SeatedGpu(msgspec.Struct, frozen=True):
    """A GPU of a tray as its driver knows it."""

    module_id: int
    uuid: str
    fabric: GpuFabric


def seats_of(snapshot: FabricSnapshot) -> Seats:
    """Every GPU of a domain, by where it sits."""
    partition = {guid: one.id for one in snapshot.partitions for guid in one.guids}
    return {_place(gpu): Seat(gpu, partition.get(gpu.guid, 0)) for gpu in snapshot.gpus}


def tray_fabric(domain: str, tray: Tray, seats: Seats, names: TrayNames) -> tuple[SeatedGpu, ...]:
    """The GPUs of a tray by module id; those that are not in the chassis now are left out."""
    places = [SlotKey(tray.chassis_serial, tray.slot, module) for module in range(1, len(tray.gpus) + 1)]
    found = [(place, seats[place]) for place in places if place in seats]
    return tuple(_gpu(domain, tray, place, seat, names) for place, seat in found)


def clique_of_gpu(gpu: GpuFabric) -> str:
    """`<clusterUUID>.<cliqueId>`; "" for a GPU that has joined no clique."""
    return f"{gpu.cluster_uuid}.{gpu.clique_id}" if gpu.state is FabricState.COMPLETED else ""


def clique_label(gpus: tuple[SeatedGpu, ...]) -> str | None:
    """What GPU Feature Discovery labels the node with: nothing where its GPUs do not all say the same."""
    said = {clique_of_gpu(gpu.fabric) for gpu in gpus}
    return (said.pop() or None) if len(said) == 1 else None


def _gpu(domain: str, tray: Tray, place: SlotKey, seat: Seat, names: TrayNames) -> SeatedGpu:
    uuid = names.gpu_uuid(seat.gpu.guid)
    key = GpuKey(
        place=Fact(place, Source.NVML),
        fabric_guid=Fact(seat.gpu.guid, Source.NVML),
        gpu_uuid=Fact(uuid, Source.NVML),
    )
    fabric = GpuFabric(
        name=f"GPU {place.module_id - 1} ({uuid})",
        state=FabricState.COMPLETED if seat.partition else FabricState.IN_PROGRESS,
        cluster_uuid=domain,
        clique_id=seat.partition,
        key=key,
        tray=tray.tray_index,
        health=_HEALTH.get(seat.gpu.health, Health.UNHEALTHY),
        health_message=f"switches say {seat.gpu.health.name.lower().replace('_', ' ')}",
    )
    return SeatedGpu(place.module_id, uuid, fabric)


def _place(gpu: FabricGpu) -> SlotKey:
    return SlotKey(gpu.chassis_serial, gpu.slot, gpu.module_id)
