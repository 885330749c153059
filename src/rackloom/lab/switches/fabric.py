"""One NVLink domain as its switch controller keeps it: GPUs, partitions, limits and refusals.

`SimulatedFabric` starts as from the factory: one default partition with every GPU and all multicast
groups. Its operations are those of NMX-C (create, delete, add and remove GPUs), NMX-M's replace of the
whole member list, and events behind the service's back: another writer's partition, pulled and
inserted trays, a change of health, a factory reset, a new domain UUID. Each mutation either changes
everything or raises `FabricRefusal` with the NMX-C return code. A GUID-based partition keeps the GUIDs
of GPUs that were pulled.

Listeners see a snapshot after every change, before the change is answered. The fabric does no I/O:
servers speak the protocols, and a caller that wants partitions to survive a restart saves and restores
snapshots.

`fabrics_of` builds a fabric for each domain of a site. `SeededNames` and the GUIDs come from a seed
and do not reveal the place of a GPU, so that a join between layers that works by accident fails its tests.
"""

import hashlib
import uuid
from collections.abc import Callable, Iterable, Iterator

import msgspec

from rackloom.core.partitions.domain import DEFAULT_PARTITION_ID, GpuHealth, PartitionHealth
from rackloom.errors import Refused
from rackloom.topology.rack import NvlinkDomain, RackSite

DEFAULT_PARTITION_NAME = "Default Partition"
MAX_NAME = 255


class FabricRefusal(Exception):
    """The controller refuses. `code` is the name of an NMX-C return code without its prefix."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class FabricGpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU and its slot in the fabric."""

    guid: int
    chassis_serial: str
    chassis_id: int
    slot: int
    host_id: int
    tray_index: int
    module_id: int
    health: GpuHealth = GpuHealth.HEALTHY


class FabricPartition(msgspec.Struct, frozen=True, kw_only=True):
    """A partition with its members' GUIDs, sorted."""

    id: int
    name: str
    guids: tuple[int, ...]
    guid_based: bool = True
    health: PartitionHealth = PartitionHealth.HEALTHY
    multicast_groups: int = 0


class FabricSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All that a controller remembers."""

    domain: str
    gpus: tuple[FabricGpu, ...]
    partitions: tuple[FabricPartition, ...]


class FabricLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The capacity of the domain."""

    max_partitions: int = 72
    """No figure is published: one for each GPU of an NVL72."""
    max_multicast_groups: int = 1024
    max_compute_nodes: int = 18
    max_gpus_per_compute_node: int = 4


class SimulatedFabric:
    """A domain at its first boot: one default partition with every GPU and all multicast groups."""

    def __init__(self, domain: str, gpus: Iterable[FabricGpu], limits: FabricLimits | None = None) -> None:
        self.domain = domain
        self.limits = limits or FabricLimits()
        self.gpus = {gpu.guid: gpu for gpu in gpus}
        self.partitions: dict[int, FabricPartition] = {}
        self._listeners: list[Callable[[FabricSnapshot], None]] = []
        self._factory_default()

    def on_change(self, listener: Callable[[FabricSnapshot], None]) -> None:
        """Call `listener` after every change, before it is answered."""
        self._listeners.append(listener)

    def rename(self, domain: str) -> None:
        """The domain has another UUID from now on, for its controller and its GPUs."""
        self.domain = domain
        self._changed()

    def snapshot(self) -> FabricSnapshot:
        """The current state of the controller."""
        return FabricSnapshot(
            domain=self.domain,
            gpus=tuple(self.gpus[guid] for guid in sorted(self.gpus)),
            partitions=tuple(self.partitions[number] for number in sorted(self.partitions)),
        )

    def restore(self, snapshot: FabricSnapshot) -> None:
        """Take over the state of `snapshot` without a call of listeners. Refused for another domain."""
        if snapshot.domain != self.domain:
            raise Refused(f"the snapshot is of domain {snapshot.domain}, this is {self.domain}")
        self.gpus = {gpu.guid: gpu for gpu in snapshot.gpus}
        self.partitions = {partition.id: partition for partition in snapshot.partitions}

    def create(
        self, name: str, guids: Iterable[int], *, partition_id: int = 0, multicast_groups: int = 0
    ) -> int:
        """Create a GUID-based partition and return its id (the lowest free one by default)."""
        members = tuple(guids)
        # The order of the checks decides which return code a request with several faults gets.
        if not name.isascii() or len(name) > MAX_NAME or name == DEFAULT_PARTITION_NAME:
            raise FabricRefusal("BADPARAM")
        if name and any(partition.name == name for partition in self.partitions.values()):
            raise FabricRefusal("PARTITION_NAME_IN_USE")
        if not 0 <= partition_id < DEFAULT_PARTITION_ID:
            raise FabricRefusal("BADPARAM")
        if partition_id in self.partitions:
            raise FabricRefusal("PARTITION_ID_IN_USE")
        self._require_free(members)
        self._require_room(multicast_groups)
        number = partition_id or next(
            free for free in range(1, DEFAULT_PARTITION_ID) if free not in self.partitions
        )
        self.partitions[number] = FabricPartition(
            id=number, name=name, guids=tuple(sorted(members)), multicast_groups=multicast_groups
        )
        self._changed()
        return number

    def delete(self, partition_id: int, name: str = "") -> int:
        """Delete a partition. Its GPUs are then in none."""
        target = self._find(partition_id, name)
        del self.partitions[target.id]
        self._changed()
        return target.id

    def add(self, partition_id: int, guids: Iterable[int], name: str = "") -> int:
        """Put GPUs that are in no partition into one."""
        members = tuple(guids)
        target = self._find_by_guid(partition_id, name)
        self._require_free(members)
        return self._set_members(target, {*target.guids, *members})

    def remove(self, partition_id: int, guids: Iterable[int], name: str = "") -> int:
        """Take GPUs out of a partition, which stays even when it is empty."""
        members = set(guids)
        target = self._find_by_guid(partition_id, name)
        self._require_known(members)
        if not members <= set(target.guids):
            raise FabricRefusal("RESOURCE_NOT_IN_USE")
        return self._set_members(target, set(target.guids) - members)

    def replace(self, partition_id: int, guids: Iterable[int]) -> int:
        """Give a partition exactly these members, in one step (NMX-M: PUT)."""
        members = tuple(guids)
        target = self._find_by_guid(partition_id, "")
        if joining := tuple(guid for guid in members if guid not in target.guids):
            self._require_free(joining)
        return self._set_members(target, set(members))

    def gpus_by_slot(self) -> Iterator[tuple[FabricGpu, int]]:
        """Every GPU that is there, with the id of its partition, or 0 if it is in none."""
        holder = {guid: partition.id for partition in self.partitions.values() for guid in partition.guids}
        for gpu in sorted(self.gpus.values(), key=lambda gpu: (gpu.host_id, gpu.module_id)):
            yield gpu, holder.get(gpu.guid, 0)

    def present_members(self, partition: FabricPartition) -> list[FabricGpu]:
        """The GPUs of a partition that are there."""
        return [self.gpus[guid] for guid in partition.guids if guid in self.gpus]

    def known_guids(self) -> set[int]:
        """The GPUs that are there or that a partition names."""
        return {*self.gpus, *(guid for partition in self.partitions.values() for guid in partition.guids)}

    def partition_of(self, guid: int) -> int:
        """Id of the partition that holds a GPU, or 0 if none does."""
        return next((partition.id for partition in self.partitions.values() if guid in partition.guids), 0)

    def factory_reset(self) -> None:
        """Forget all partitions and boot as from the factory."""
        self.partitions.clear()
        self._factory_default()
        self._changed()

    def set_health(self, guid: int, health: GpuHealth) -> None:
        """A GPU gets better or worse."""
        self.gpus[guid] = msgspec.structs.replace(self.gpus[guid], health=health)
        self._changed()

    def remove_gpus(self, guids: Iterable[int]) -> None:
        """Trays are pulled: the GPUs are gone from the lists and from location-based partitions.

        GUID-based partitions keep the names of GPUs that are away.
        """
        for guid in guids:
            del self.gpus[guid]
        self._changed()

    def insert_gpus(self, gpus: Iterable[FabricGpu]) -> None:
        """Trays are put in, new ones or the ones that were away."""
        self.gpus |= {gpu.guid: gpu for gpu in gpus}
        self._changed()

    def put(self, partition: FabricPartition) -> None:
        """Another writer sets a partition. Its GPUs leave their previous partitions."""
        taken = set(partition.guids)
        for other in list(self.partitions.values()):
            left = tuple(guid for guid in other.guids if guid not in taken)
            self.partitions[other.id] = msgspec.structs.replace(other, guids=left)
        self.partitions[partition.id] = partition
        self._changed()

    def _factory_default(self) -> None:
        self.partitions[DEFAULT_PARTITION_ID] = FabricPartition(
            id=DEFAULT_PARTITION_ID,
            name=DEFAULT_PARTITION_NAME,
            guids=tuple(sorted(self.gpus)),
            multicast_groups=self.limits.max_multicast_groups,
        )

    def _set_members(self, target: FabricPartition, members: set[int]) -> int:
        self.partitions[target.id] = msgspec.structs.replace(target, guids=tuple(sorted(members)))
        self._changed()
        return target.id

    def _find(self, partition_id: int, name: str) -> FabricPartition:
        if not partition_id:
            named = [partition for partition in self.partitions.values() if partition.name == name]
            if not named:
                raise FabricRefusal("PARTITION_NAME_NOT_IN_USE")
            return named[0]
        target = self.partitions.get(partition_id)
        if target is None:
            raise FabricRefusal("PARTITION_ID_NOT_IN_USE")
        if name and target.name != name:
            raise FabricRefusal("PARTITION_ID_NAME_MISMATCH")
        return target

    def _find_by_guid(self, partition_id: int, name: str) -> FabricPartition:
        target = self._find(partition_id, name)
        if not target.guid_based:
            raise FabricRefusal("BADPARAM")
        return target

    def _require_known(self, guids: Iterable[int]) -> None:
        wanted = set(guids)
        if not wanted:
            raise FabricRefusal("BADPARAM")
        if not wanted <= self.known_guids():
            raise FabricRefusal("RESOURCE_BAD")

    def _require_free(self, guids: tuple[int, ...]) -> None:
        self._require_known(guids)
        if len(set(guids)) != len(guids):
            raise FabricRefusal("BADPARAM")
        if any(self.partition_of(guid) for guid in guids):
            raise FabricRefusal("RESOURCE_IN_USE")

    def _require_room(self, multicast_groups: int) -> None:
        # Multicast groups are allocated in multiples of four.
        if multicast_groups % 4:
            raise FabricRefusal("BADPARAM")
        allocated = sum(partition.multicast_groups for partition in self.partitions.values())
        over = allocated + multicast_groups > self.limits.max_multicast_groups
        if len(self.partitions) >= self.limits.max_partitions or (multicast_groups and over):
            raise FabricRefusal("RESOURCE_EXHAUSTED")

    def _changed(self) -> None:
        snapshot = self.snapshot()
        for listener in self._listeners:
            listener(snapshot)


def standby_fabric(fabric: SimulatedFabric) -> SimulatedFabric:
    """The domain as a standby controller sees it: it knows the UUID, and lists no GPU.

    The answers of a real standby are not published.
    """
    return SimulatedFabric(fabric.domain, (), fabric.limits)


def former_leader_fabric(fabric: SimulatedFabric) -> SimulatedFabric:
    """The domain as a former leader remembers it: without later changes of `fabric`."""
    memory = SimulatedFabric(fabric.domain, (), fabric.limits)
    memory.restore(fabric.snapshot())
    return memory


# The fabrics of a whole site.


MOST_RACKS = 128
"""Each domain has a controller in this process. More would take too long to start."""


def fabrics_of(site: RackSite, seed: str) -> tuple[SimulatedFabric, ...]:
    """A fabric at its first boot for each domain of `site`. Equal seeds give equal GUIDs."""
    return tuple(_domain_fabric(domain, seed) for domain in site.domains)


def _domain_fabric(domain: NvlinkDomain, seed: str) -> SimulatedFabric:
    trays = domain.trays
    limits = FabricLimits(
        max_compute_nodes=len(trays), max_gpus_per_compute_node=max(len(tray.gpus) for tray in trays)
    )
    return SimulatedFabric(domain.uuid, _domain_gpus(domain, seed), limits)


def _domain_gpus(domain: NvlinkDomain, seed: str) -> Iterator[FabricGpu]:
    chassis = {
        serial: number for number, serial in enumerate(sorted({t.chassis_serial for t in domain.trays}))
    }
    for host_id, tray in enumerate(domain.trays, 1):
        for module_id in range(1, len(tray.gpus) + 1):
            # A 64-bit GUID that does not reveal the GPU's slot, above 2**63 as in real fabrics.
            text = f"{seed} fabric guid {tray.chassis_serial} {tray.slot} {module_id}"
            yield FabricGpu(
                guid=int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) | 1 << 63,
                chassis_serial=tray.chassis_serial,
                chassis_id=chassis[tray.chassis_serial],
                slot=tray.slot,
                host_id=host_id,
                tray_index=tray.tray_index,
                module_id=module_id,
            )


# Names of a simulated site, drawn from its seed: the same home gives the same racks again.


class SeededNames(msgspec.Struct, frozen=True):
    """Names as a factory would give them.

    Serials, domain UUIDs, node names and GPU UUIDs share nothing, so that layers can be joined only by the
    join key: chassis serial, slot and module id, and the fabric GUID.
    """

    seed: str

    def site(self) -> str:
        """Name of the site."""
        return "twin"

    def rack(self, index: int) -> str:
        """Name of a rack."""
        return f"rack-{index + 1:02}"

    def chassis_serial(self, rack: int) -> str:
        """Serial of a rack's chassis."""
        return "SIM" + self._digest(f"chassis {rack}")[:10].upper()

    def domain_uuid(self, index: int) -> str:
        """UUID of an NVLink domain."""
        return str(uuid.UUID(self._digest(f"domain {index}")[:32], version=4))

    def node(self, chassis_serial: str, slot: int) -> str:
        """Name of the Kubernetes node that a tray is."""
        return f"node-{self._digest(f'kubernetes node {chassis_serial} {slot}')[:8]}"

    def gpu_uuid(self, fabric_guid: int) -> str:
        """UUID of a GPU: another one where the tray was swapped, since then the GUID is another."""
        return f"GPU-{uuid.UUID(self._digest(f'kubernetes gpu {fabric_guid}')[:32], version=4)}"

    def _digest(self, what: str) -> str:
        return hashlib.blake2b(f"{self.seed} {what}".encode(), digest_size=32).hexdigest()


def machine_id_of(chassis_serial: str, slot: int) -> str:
    """The machine id of a tray."""
    return f"{chassis_serial}-{slot}".lower()
