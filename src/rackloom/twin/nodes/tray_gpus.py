"""The driver of one simulated tray: what it says of the GPUs, and what can go wrong with them."""

import msgspec

from rackloom.claim.node.gpu.declared import DeclaredGpu, DeclaredInventory
from rackloom.claim.node.gpu.inventory import Gpu, Inventory, Xid
from rackloom.claim.node.imex.fabric import NodeFabric
from rackloom.topology.facts import Fact, Source
from rackloom.twin.nodes.tray_fabric import SeatedGpu, clique_of_gpu


class TrayGpus:
    """The GPUs by module id. A `GpuSource`; nothing of it blocks.

    `declared` is what the model has, one for each module, in their order. A fault shows at the next look.
    """

    def __init__(self, declared: DeclaredInventory) -> None:
        self._declared = declared
        self._seated: tuple[SeatedGpu, ...] = ()
        self._lost: set[int] = set()
        self._struck: list[tuple[int, int]] = []
        self.uuids: dict[str, str] = {}
        """UUIDs of the GPUs that answer, by PCI address."""

    def follow(self, seated: tuple[SeatedGpu, ...]) -> bool:
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
    def answering(self) -> tuple[SeatedGpu, ...]:
        """The GPUs that are not lost."""
        return tuple(gpu for gpu in self._seated if gpu.module_id not in self._lost)

    def node_fabric(self) -> NodeFabric:
        """What they say of their fabric, for the IMEX plugin."""
        gpus = tuple(gpu.fabric for gpu in self.answering)
        return NodeFabric(gpus=gpus, driver_version=self._declared.driver_version)

    def read(self) -> Inventory:
        """As NVML lists the GPUs."""
        return Inventory(
            gpus=tuple(_gpu(self._model(gpu), gpu) for gpu in self.answering),
            driver_version=self._declared.driver_version,
            cuda_version=self._declared.cuda_version,
        )

    def wait(self, seconds: float) -> tuple[Xid, ...]:
        """The errors that were not told yet."""
        struck, self._struck = self._struck, []
        uuids = {gpu.module_id: gpu.uuid for gpu in self._seated}
        return tuple(Xid(uuid=uuids[module], number=xid) for module, xid in struck if module in uuids)

    def unmonitored(self) -> frozenset[str]:
        """Every GPU can be listened to."""
        return frozenset()

    def close(self) -> None:
        """Nothing is held."""

    def _name(self) -> None:
        self.uuids.clear()
        self.uuids.update((self._model(gpu).pci_address, gpu.uuid) for gpu in self.answering)

    def _model(self, gpu: SeatedGpu) -> DeclaredGpu:
        return self._declared.gpus[gpu.module_id - 1]


def _gpu(model: DeclaredGpu, seated: SeatedGpu) -> Gpu:
    fabric = seated.fabric
    return Gpu(
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
