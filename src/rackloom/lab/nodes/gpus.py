"""The GPUs of a simulated tray as NVML reports them, derived from the state of the switches.

A GPU has joined its fabric once a partition of its switches holds it. That partition is its clique:
clusterUUID is the domain, cliqueId the partition. A GPU in no partition reports IN_PROGRESS. GPU
Feature Discovery labels a node with the clique only if all its GPUs report the same one.

`TrayGpuDriver` adds driver faults: a GPU that fell off the bus, and Xid errors. It serves the IMEX
plugin and the GPU plugin. A fault shows at the next read.
"""

from collections.abc import Mapping

import msgspec

from rackloom.claim.node.fabric import FabricState, GpuFabric, NodeFabric
from rackloom.claim.node.gpu.inventory import (
    DeclaredGpu,
    DeclaredInventory,
    GpuFacts,
    GpuInventory,
    NodeGpu,
    XidError,
)
from rackloom.claim.node.plugin import Health
from rackloom.core.partitions.domain import GpuHealth
from rackloom.lab.switches.fabric import FabricGpu, FabricSnapshot, SeededNames
from rackloom.topology.join_key import Fact, GpuKey, SlotKey, Source
from rackloom.topology.rack import ComputeTray

# From the switches' state to NVML's report.


_HEALTH = {GpuHealth.HEALTHY: Health.HEALTHY, GpuHealth.UNKNOWN: Health.UNKNOWN}
"""NVML's summary of the health on the switches. Any other state is unhealthy."""


class FabricSlot(msgspec.Struct, frozen=True):
    """One GPU in its fabric. `partition` is 0 if it is in none."""

    gpu: FabricGpu
    partition: int


FabricSlots = Mapping[SlotKey, FabricSlot]


class TrayGpu(msgspec.Struct, frozen=True):
    """A GPU of a tray as its driver knows it."""

    module_id: int
    uuid: str
    fabric: GpuFabric


def fabric_slots_of(snapshot: FabricSnapshot) -> FabricSlots:
    """Every GPU of a domain, by its slot."""
    partition_of = {guid: partition.id for partition in snapshot.partitions for guid in partition.guids}
    return {
        SlotKey(gpu.chassis_serial, gpu.slot, gpu.module_id): FabricSlot(gpu, partition_of.get(gpu.guid, 0))
        for gpu in snapshot.gpus
    }


def gpus_of_tray(
    domain: str, tray: ComputeTray, slots: FabricSlots, names: SeededNames
) -> tuple[TrayGpu, ...]:
    """The GPUs of a tray by module id, without those that are not in the chassis now."""
    keys = [SlotKey(tray.chassis_serial, tray.slot, module) for module in range(1, len(tray.gpus) + 1)]
    return tuple(_tray_gpu(domain, tray, key, slots[key], names) for key in keys if key in slots)


def clique_of_gpu(gpu: GpuFabric) -> str:
    """`<clusterUUID>.<cliqueId>`, or "" for a GPU that has joined no clique."""
    return f"{gpu.cluster_uuid}.{gpu.clique_id}" if gpu.state is FabricState.COMPLETED else ""


def clique_label(gpus: tuple[TrayGpu, ...]) -> str | None:
    """The clique label of GPU Feature Discovery, or None unless all GPUs report the same clique."""
    cliques = {clique_of_gpu(gpu.fabric) for gpu in gpus}
    return (cliques.pop() or None) if len(cliques) == 1 else None


def _tray_gpu(
    domain: str, tray: ComputeTray, slot_key: SlotKey, slot: FabricSlot, names: SeededNames
) -> TrayGpu:
    uuid = names.gpu_uuid(slot.gpu.guid)
    key = GpuKey(
        place=Fact(slot_key, Source.NVML),
        fabric_guid=Fact(slot.gpu.guid, Source.NVML),
        gpu_uuid=Fact(uuid, Source.NVML),
    )
    fabric = GpuFabric(
        name=f"gpu-{slot_key.module_id - 1} ({uuid})",
        state=FabricState.COMPLETED if slot.partition else FabricState.IN_PROGRESS,
        cluster_uuid=domain,
        clique_id=slot.partition,
        key=key,
        tray=tray.tray_index,
        health=_HEALTH.get(slot.gpu.health, Health.UNHEALTHY),
        health_message=f"switches say {slot.gpu.health.name.lower().replace('_', ' ')}",
    )
    return TrayGpu(slot_key.module_id, uuid, fabric)


# The driver of a tray, with its faults.


class TrayGpuDriver:
    """The GPUs by module id. A `GpuSource` that never blocks.

    `declared` lists the model's GPUs, one for each module, in their order. A fault shows at the next read.
    """

    def __init__(self, declared: DeclaredInventory) -> None:
        self._declared = declared
        self._gpus: tuple[TrayGpu, ...] = ()
        self._lost: set[int] = set()
        self._xids: list[tuple[int, int]] = []
        self.uuids: dict[str, str] = {}
        """UUIDs of the GPUs that answer, by PCI address."""

    def set_gpus(self, gpus: tuple[TrayGpu, ...]) -> bool:
        """Set the GPUs from the state of the switches, and return whether anything changed."""
        changed = gpus != self._gpus
        self._gpus = gpus
        self._index_uuids()
        return changed

    def lose(self, module_id: int) -> None:
        """A GPU falls off the bus."""
        self._lost.add(module_id)
        self._index_uuids()

    def find(self, module_id: int) -> None:
        """A lost GPU answers again, as after a reset."""
        self._lost.discard(module_id)
        self._index_uuids()

    def find_all(self) -> None:
        """Every lost GPU answers again."""
        self._lost.clear()
        self._index_uuids()

    def strike(self, module_id: int, xid: int) -> None:
        """The driver will report an Xid error of a GPU."""
        self._xids.append((module_id, xid))

    @property
    def answering(self) -> tuple[TrayGpu, ...]:
        """The GPUs that are not lost."""
        return tuple(gpu for gpu in self._gpus if gpu.module_id not in self._lost)

    def node_fabric(self) -> NodeFabric:
        """The fabric state of the GPUs, for the IMEX plugin."""
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
        """The errors that were not read yet."""
        xids, self._xids = self._xids, []
        uuids = {gpu.module_id: gpu.uuid for gpu in self._gpus}
        return tuple(XidError(uuid=uuids[module], number=xid) for module, xid in xids if module in uuids)

    def unmonitored(self) -> frozenset[str]:
        """Every GPU can be monitored."""
        return frozenset()

    def close(self) -> None:
        """Nothing is held."""

    def _index_uuids(self) -> None:
        self.uuids.clear()
        self.uuids.update((self._model(gpu).pci_address, gpu.uuid) for gpu in self.answering)

    def _model(self, gpu: TrayGpu) -> DeclaredGpu:
        return self._declared.gpus[gpu.module_id - 1]


def _inventory_gpu(model: DeclaredGpu, gpu: TrayGpu) -> NodeGpu:
    fabric = gpu.fabric
    facts = {name: getattr(model, name) for name in GpuFacts.__struct_fields__} | {
        "uuid": gpu.uuid,
        "clique": clique_of_gpu(fabric),
        "tray": fabric.tray,
        "fabric_health": fabric.health,
    }
    key = msgspec.structs.replace(fabric.key, pci_address=Fact(model.pci_address, Source.NVML))
    return NodeGpu(**facts, key=key, fabric_message=fabric.health_message)
