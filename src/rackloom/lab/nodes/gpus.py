"""The GPUs of a simulated tray as NVML reports them, derived from the state of the switches.

A GPU has joined its fabric once a partition of its switches holds it. That partition is its clique:
clusterUUID is the domain, cliqueId the partition. A GPU in no partition reports IN_PROGRESS. GPU
Feature Discovery labels a node with the clique only where all its GPUs report the same one.

`TrayGpuDriver` adds driver faults: a GPU that fell off the bus, and Xid errors. It serves the IMEX
plugin and the GPU plugin; a fault shows at the next read.
"""

from collections.abc import Mapping

import msgspec

from rackloom.claim.node.fabric import FabricState, GpuFabric, NodeFabric
from rackloom.claim.node.gpu.inventory import DeclaredGpu, DeclaredInventory, GpuInventory, NodeGpu, XidError
from rackloom.claim.node.plugin import Health
from rackloom.core.partitions.domain import GpuHealth
from rackloom.lab.switches.fabric import FabricGpu, FabricSnapshot, SeededNames
from rackloom.topology.join_key import Fact, GpuKey, SlotKey, Source
from rackloom.topology.rack import ComputeTray

# From the switches' state to what NVML reports.


_HEALTH = {GpuHealth.HEALTHY: Health.HEALTHY, GpuHealth.UNKNOWN: Health.UNKNOWN}
"""NVML's summary of what the switches say; everything else is unhealthy."""


class FabricSlot(msgspec.Struct, frozen=True):
    """One GPU in its fabric; `partition` 0 is none."""

    gpu: FabricGpu
    partition: int


FabricSlots = Mapping[SlotKey, FabricSlot]


class TrayGpu(msgspec.Struct, frozen=True):
    """A GPU of a tray as its driver knows it."""

    module_id: int
    uuid: str
    fabric: GpuFabric


def fabric_slots_of(snapshot: FabricSnapshot) -> FabricSlots:
    """Every GPU of a domain, by where it sits."""
    partition = {guid: one.id for one in snapshot.partitions for guid in one.guids}
    return {_slot_key(gpu): FabricSlot(gpu, partition.get(gpu.guid, 0)) for gpu in snapshot.gpus}


def gpus_of_tray(
    domain: str, tray: ComputeTray, seats: FabricSlots, names: SeededNames
) -> tuple[TrayGpu, ...]:
    """The GPUs of a tray by module id; those that are not in the chassis now are left out."""
    places = [SlotKey(tray.chassis_serial, tray.slot, module) for module in range(1, len(tray.gpus) + 1)]
    found = [(place, seats[place]) for place in places if place in seats]
    return tuple(_tray_gpu(domain, tray, place, seat, names) for place, seat in found)


def clique_of_gpu(gpu: GpuFabric) -> str:
    """`<clusterUUID>.<cliqueId>`; "" for a GPU that has joined no clique."""
    return f"{gpu.cluster_uuid}.{gpu.clique_id}" if gpu.state is FabricState.COMPLETED else ""


def clique_label(gpus: tuple[TrayGpu, ...]) -> str | None:
    """What GPU Feature Discovery labels the node with: nothing where its GPUs do not all say the same."""
    said = {clique_of_gpu(gpu.fabric) for gpu in gpus}
    return (said.pop() or None) if len(said) == 1 else None


def _tray_gpu(
    domain: str, tray: ComputeTray, place: SlotKey, seat: FabricSlot, names: SeededNames
) -> TrayGpu:
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
    return TrayGpu(place.module_id, uuid, fabric)


def _slot_key(gpu: FabricGpu) -> SlotKey:
    return SlotKey(gpu.chassis_serial, gpu.slot, gpu.module_id)


# The driver of a tray, with its faults.


class TrayGpuDriver:
    """The GPUs by module id. A `GpuSource`; nothing of it blocks.

    `declared` is what the model has, one for each module, in their order. A fault shows at the next look.
    """

    def __init__(self, declared: DeclaredInventory) -> None:
        self._declared = declared
        self._seated: tuple[TrayGpu, ...] = ()
        self._lost: set[int] = set()
        self._struck: list[tuple[int, int]] = []
        self.uuids: dict[str, str] = {}
        """UUIDs of the GPUs that answer, by PCI address."""

    def follow(self, seated: tuple[TrayGpu, ...]) -> bool:
        """The switches' state is now this; whether anything of it is new."""
        changed = seated != self._seated
        self._seated = seated
        self._name()
        return changed

    def lose(self, module_id: int) -> None:
        """A GPU falls off the bus."""
        self._lost.add(module_id)
        self._name()

    def find(self, module_id: int) -> None:
        """It answers again, as after a reset."""
        self._lost.discard(module_id)
        self._name()

    def strike(self, module_id: int, xid: int) -> None:
        """The driver reports an error of a GPU."""
        self._struck.append((module_id, xid))

    @property
    def answering(self) -> tuple[TrayGpu, ...]:
        """The GPUs that are not lost."""
        return tuple(gpu for gpu in self._seated if gpu.module_id not in self._lost)

    def node_fabric(self) -> NodeFabric:
        """What they say of their fabric, for the IMEX plugin."""
        gpus = tuple(gpu.fabric for gpu in self.answering)
        return NodeFabric(gpus=gpus, driver_version=self._declared.driver_version)

    def read(self) -> GpuInventory:
        """As NVML lists the GPUs."""
        return GpuInventory(
            gpus=tuple(_inventory_gpu(self._model(gpu), gpu) for gpu in self.answering),
            driver_version=self._declared.driver_version,
            cuda_version=self._declared.cuda_version,
        )

    def wait(self, seconds: float) -> tuple[XidError, ...]:
        """The errors that were not told yet."""
        struck, self._struck = self._struck, []
        uuids = {gpu.module_id: gpu.uuid for gpu in self._seated}
        return tuple(XidError(uuid=uuids[module], number=xid) for module, xid in struck if module in uuids)

    def unmonitored(self) -> frozenset[str]:
        """Every GPU can be listened to."""
        return frozenset()

    def close(self) -> None:
        """Nothing is held."""

    def _name(self) -> None:
        self.uuids.clear()
        self.uuids.update((self._model(gpu).pci_address, gpu.uuid) for gpu in self.answering)

    def _model(self, gpu: TrayGpu) -> DeclaredGpu:
        return self._declared.gpus[gpu.module_id - 1]


def _inventory_gpu(model: DeclaredGpu, seated: TrayGpu) -> NodeGpu:
    fabric = seated.fabric
    return NodeGpu(
        minor=model.minor,
        uuid=seated.uuid,
        pci_address=model.pci_address,
        product=model.product,
        memory_bytes=model.memory_bytes,
        brand=model.brand,
        architecture=model.architecture,
        compute_capability=model.compute_capability,
        addressing_mode=model.addressing_mode,
        key=msgspec.structs.replace(fabric.key, pci_address=Fact(model.pci_address, Source.NVML)),
        clique=clique_of_gpu(fabric),
        tray=fabric.tray,
        fabric_health=fabric.health,
        fabric_message=fabric.health_message,
    )
