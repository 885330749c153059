"""Join of all layers: one `GpuChain` for each GPU that any layer reports, by the join key alone.

`gpu_chains` works in three steps:

1. `GpuIdentities` collects the records of each GPU. It indexes the parts of the join key that mean
   something beyond one machine: slot and module, fabric GUID, GPU UUID. A new record is compared only
   with the GPUs that share a part with it, and `topology.identity.joins` decides whether both are one
   GPU. A record that shares one part and contradicts another is not merged; the known GPU gets a conflict
   that names both sides. Where the slot that it names is taken by a GPU that it does not match, the
   record is dropped: one slot holds one GPU.
2. The order of records decides which source is trusted about a slot. First comes the switch controller of the
   domain in which the site records the tray, then the machine records, then what other controllers list,
   then published devices. So a controller that answers first cannot take a tray off the site.
3. `LayerLookups` finds what belongs to a GPU in each layer, by the names that the layer itself uses:
   partition, logical partition, interface of the instance, node, allocation, ComputeDomain, IMEX channel,
   newest transfer. `Rails` is the one rule for which NICs serve which GPU: the NIC that the GPU's plugin
   names, then all NICs that name the GPU. PCI addresses are compared within one node only.

The work is linear in the number of records. GPUs with a known slot come first, by domain, tray and
module.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, TypeVar

import msgspec

from rackloom.core.diagnosis.snapshot import (
    AllocatedDevice,
    DeviceRecord,
    FabricGpuRecord,
    GpuChain,
    MachineRecord,
    MeasuredTransfer,
    SiteSnapshot,
    grouped,
)
from rackloom.core.domains import names
from rackloom.core.domains.compute_domain import ComputeDomain
from rackloom.errors import Refused
from rackloom.topology.join_key import Fact, GpuKey, SlotKey, Source, joins, merge_keys

# Identity: which records of different layers describe one GPU.


T = TypeVar("T")


class JoinedGpu(Generic[T]):
    """The records of one GPU, each with the name of its source."""

    def __init__(self, key: GpuKey, source: str, record: T) -> None:
        self.key = key
        self.records: list[tuple[str, T]] = [(source, record)]
        self.conflicts: list[str] = []

    @property
    def sources(self) -> str:
        """The names of all sources so far."""
        return " and ".join(source for source, _ in self.records)


class GpuIdentities(Generic[T]):
    """All GPUs that any layer reports."""

    def __init__(self) -> None:
        self._gpus: dict[int, JoinedGpu[T]] = {}
        self._at: dict[tuple[str, object], JoinedGpu[T]] = {}

    @property
    def gpus(self) -> tuple[JoinedGpu[T], ...]:
        """Each GPU once, in the order of its first record."""
        return tuple(self._gpus.values())

    def add(self, source: str, key: GpuKey, record: T) -> None:
        """Add a record to the GPU that it describes, or as a new GPU.

        Each slot, GUID and UUID leads to at most one GPU. A record that shares a part with a known GPU and
        contradicts another part describes a different GPU; the known one gets a conflict with both sides. The
        record is dropped if a contradicting GPU already holds the slot that it names, because one slot holds
        one GPU. Where two records name the same part, the first one counts.
        """
        same: list[JoinedGpu[T]] = []
        contradicting: list[JoinedGpu[T]] = []
        candidates = {id(known): known for part in parts_of(key) if (known := self._at.get(part)) is not None}
        for known in candidates.values():
            difference = _contradiction(known.key, key)
            if joins(known.key, key) and not difference:
                same.append(known)
            else:
                contradicting.append(known)
                known.conflicts.append(f"{known.sources} against {source}: {difference}")
        holder = None if key.place is None else self._at.get(("place", key.place.value))
        if holder is not None and holder not in same:
            return
        found = JoinedGpu(key, source, record)
        # A record may connect GPUs that no earlier record connected, such as a slot and a UUID.
        for known in same:
            found = self._united(known, found)
        self._gpus[id(found)] = found
        for part in parts_of(found.key):
            # A part that a contradicting GPU claims stays with that GPU: it was reported first.
            if self._at.get(part) not in contradicting:
                self._at[part] = found

    def _united(self, known: JoinedGpu[T], new: JoinedGpu[T]) -> JoinedGpu[T]:
        """Both as one GPU. If they contradict each other they stay two, and `new` gets the conflict."""
        try:
            key = merge_keys(known.key, new.key)
        except Refused as refused:
            new.conflicts.append(f"{known.sources} against {new.sources}: {refused.reason}")
            return new
        del self._gpus[id(known)]
        known.key = key
        known.records += new.records
        known.conflicts += new.conflicts
        return known


def parts_of(key: GpuKey) -> Iterator[tuple[str, object]]:
    """The parts that identify a GPU beyond one machine: all but the PCI address."""
    for part in ("place", "fabric_guid", "gpu_uuid"):
        fact = getattr(key, part)
        if fact is not None:
            yield part, fact.value


def _contradiction(known: GpuKey, new: GpuKey) -> str:
    """How two keys that share a part contradict each other, PCI addresses included; empty: they do not."""
    try:
        merge_keys(known, new)
    except Refused as refused:
        return refused.reason
    return ""


# NICs that serve a GPU, as the plugins of both report it.


class Rails:
    """The NICs among some devices that serve a GPU. PCI addresses are compared within one node only."""

    def __init__(self, devices: Iterable[DeviceRecord]) -> None:
        devices = tuple(devices)
        nics = [device for device in devices if device.kind == "nic"]
        self._naming = grouped(((nic.node, nic.partner), nic) for nic in nics if nic.partner is not None)
        self._at = {(nic.node, nic.key.pci_address.value): nic for nic in nics if nic.key.pci_address}
        self._gpus = {nic.device_id: served for served, nic in self._pairs(devices)}
        self.nics = tuple(nic for nic in nics if nic.device_id in self._gpus)
        """Those that serve a GPU, in the order given."""

    def of(self, gpu: DeviceRecord) -> tuple[DeviceRecord, ...]:
        """The NICs that serve a GPU: first the one that the GPU names, then all that name the GPU."""
        address = gpu.key.pci_address
        declared = self._at.get((gpu.node, gpu.partner_address or ""))
        naming = () if address is None else self._naming.get((gpu.node, address.value), ())
        return tuple({nic.device_id: nic for nic in (declared, *naming) if nic is not None}.values())

    def served_by(self, nic: DeviceRecord) -> str:
        """PCI address (or, where that is not published, name) of the GPU that a NIC of `nics` serves."""
        return self._gpus[nic.device_id]

    def _pairs(self, devices: Iterable[DeviceRecord]) -> Iterator[tuple[str, DeviceRecord]]:
        """GPU and NIC of each pair. What the NIC itself declares comes last, and so takes precedence."""
        for gpu in devices:
            if gpu.kind == "gpu":
                address = gpu.key.pci_address
                yield from ((address.value if address else gpu.name, nic) for nic in self.of(gpu))
        for (_, served), nics in self._naming.items():
            yield from ((served or "", nic) for nic in nics)


# Lookups by the names that each layer uses.


class LayerLookups:
    """The indexes of one snapshot that the join needs, each built once."""

    def __init__(self, snapshot: SiteSnapshot) -> None:
        self.partitions = {(partition.domain, partition.id): partition for partition in snapshot.partitions}
        self.logicals = {logical.id: logical for logical in snapshot.logicals}
        self.interfaces = {(gpu.instance, gpu.module_id): gpu for gpu in snapshot.instance_gpus}
        self.nodes = {node.name: node for node in snapshot.nodes}
        # Reversed, so that the first of several allocations of one device counts.
        self.uses = {use.device_id: use for use in reversed(snapshot.uses)}
        self.rails = Rails(snapshot.devices)
        self._domains = {domain.uid: domain for domain in snapshot.compute_domains}
        self._domain_of_claim = {claim.key: claim.domain for claim in snapshot.claims}
        self._uses_of_pod = grouped((pod, use) for use in snapshot.uses for pod in use.pods)
        self._transfers = dict(_transfers_by_key(snapshot.transfers))

    def compute_domain_of(self, use: AllocatedDevice) -> ComputeDomain | None:
        """The ComputeDomain of a channel that the pods of an allocation have."""
        uids = (self._domain_of_claim.get(other.claim, "") for other in self._of_same_pods(use))
        return next((self._domains[uid] for uid in uids if uid in self._domains), None)

    def channel_of(self, use: AllocatedDevice) -> str | None:
        """The IMEX channel of the pods of an allocation."""
        devices = (other.device for other in self._of_same_pods(use) if other.driver == names.IMEX_DRIVER)
        return next((device for device in devices if device.startswith("channel-")), None)

    def transfer_of(self, key: GpuKey, node: str | None) -> MeasuredTransfer | None:
        """The newest transfer from a GPU; a PCI address identifies it only on its own node."""
        uuid, address = key.gpu_uuid, key.pci_address
        # A UUID identifies the GPU wherever it was measured, so it takes precedence over the PCI address.
        by_uuid = None if uuid is None else self._transfers.get(("", uuid.value))
        if by_uuid is not None:
            return by_uuid if joins(by_uuid.key, key) else None
        found = None if address is None or node is None else self._transfers.get((node, address.value))
        return found if found is not None and joins(found.key, key, one_machine=True) else None

    def _of_same_pods(self, use: AllocatedDevice) -> Iterator[AllocatedDevice]:
        """All allocations of the pods of an allocation, in any of their claims."""
        return (other for pod in use.pods for other in self._uses_of_pod[pod])


def _transfers_by_key(
    transfers: Iterable[MeasuredTransfer],
) -> Iterator[tuple[tuple[str, str], MeasuredTransfer]]:
    for transfer in sorted(transfers, key=lambda transfer: transfer.at):
        if transfer.key.gpu_uuid is not None:
            yield ("", transfer.key.gpu_uuid.value), transfer
        elif transfer.key.pci_address is not None:
            yield (transfer.node, transfer.key.pci_address.value), transfer


# The join itself.


class MachineGpu(msgspec.Struct, frozen=True):
    """One GPU in a machine's record."""

    machine: MachineRecord
    module_id: int


GpuRecord = FabricGpuRecord | MachineGpu | DeviceRecord


def gpu_chains(snapshot: SiteSnapshot) -> tuple[GpuChain, ...]:
    """One chain per GPU that any layer reports, by domain, tray and module; GPUs without a slot come last.

    The work is linear in the records. A record that contradicts the GPU in its slot is not part of that
    chain: the chain's conflicts name both sides.
    """
    lookups = LayerLookups(snapshot)
    identities: GpuIdentities[GpuRecord] = GpuIdentities()
    for source, key, record in _records(snapshot):
        identities.add(source, key, record)
    return tuple(sorted((_gpu_chain(joined, lookups) for joined in identities.gpus), key=chain_order))


def fabric_key(gpu: FabricGpuRecord) -> GpuKey:
    """The parts of a GPU's identity that its switch controller reports."""
    return GpuKey(place=Fact(gpu.place, Source.NMX), fabric_guid=Fact(gpu.guid, Source.NMX))


def _records(snapshot: SiteSnapshot) -> Iterator[tuple[str, GpuKey, GpuRecord]]:
    """All records about GPUs, the most trusted about slots first.

    The first record of a slot holds it. So the controller of the domain in which the site records a machine
    comes before the machine's record, and other controllers that list its slots come after it: a controller
    must not take a tray off the site by answering first.
    """
    homes: Mapping[SlotKey, list[str]] = grouped(
        (key.place.value, machine.domain)
        for machine in snapshot.machines
        for key in machine.gpus
        if key.place is not None
    )
    others: list[FabricGpuRecord] = []
    for gpu in snapshot.fabric_gpus:
        if gpu.domain in homes.get(gpu.place, ()):
            yield _of_controller(gpu)
        else:
            others.append(gpu)
    for machine in snapshot.machines:
        for index, key in enumerate(machine.gpus):
            module = key.place.value.module_id if key.place is not None else index + 1
            yield f"the record of machine {machine.id}", key, MachineGpu(machine, module)
    yield from map(_of_controller, others)
    for device in snapshot.devices:
        if device.kind == "gpu":
            yield f"node {device.node}", device.key, device


def _of_controller(gpu: FabricGpuRecord) -> tuple[str, GpuKey, GpuRecord]:
    return f"the switch controller of domain {gpu.domain}", fabric_key(gpu), gpu


def _gpu_chain(joined: JoinedGpu[GpuRecord], lookups: LayerLookups) -> GpuChain:
    chain, node = GpuChain(key=joined.key, conflicts=tuple(joined.conflicts)), None
    if (fabric := _trusted_fabric_record(joined)) is not None:
        partition = (
            None if fabric.partition is None else lookups.partitions.get((fabric.domain, fabric.partition))
        )
        logical = None if partition is None else lookups.logicals.get(partition.logical or "")
        chain = msgspec.structs.replace(chain, fabric=fabric, partition=partition, logical=logical)
    for _, record in joined.records:
        match record:
            case MachineGpu(machine, module_id):
                wanted = lookups.interfaces.get((machine.instance or "", module_id))
                chain = msgspec.structs.replace(chain, machine=machine, wanted=wanted)
            case DeviceRecord():
                chain, node = _with_device(chain, record, lookups), record.node
    return msgspec.structs.replace(chain, transfer=lookups.transfer_of(joined.key, node))


def _trusted_fabric_record(joined: JoinedGpu[GpuRecord]) -> FabricGpuRecord | None:
    """Its switch controller's record; if two domains list it, that of the domain in its machine's record."""
    listed = [record for _, record in joined.records if isinstance(record, FabricGpuRecord)]
    homes = {record.machine.domain for _, record in joined.records if isinstance(record, MachineGpu)}
    return next((gpu for gpu in listed if gpu.domain in homes), listed[0] if listed else None)


def _with_device(chain: GpuChain, device: DeviceRecord, lookups: LayerLookups) -> GpuChain:
    use = lookups.uses.get(device.device_id)
    return msgspec.structs.replace(
        chain,
        device=device,
        node=lookups.nodes.get(device.node),
        nics=lookups.rails.of(device),
        use=use,
        compute_domain=None if use is None else lookups.compute_domain_of(use),
        channel=None if use is None else lookups.channel_of(use),
    )


def chain_order(chain: GpuChain) -> tuple[bool, str, str, int, int, str]:
    """Known slots first: by domain, then chassis and tray, then module."""
    place = chain.key.place.value if chain.key.place is not None else None
    domain = chain.fabric.domain if chain.fabric else chain.machine.domain if chain.machine else ""
    name = f"{chain.device.node}/{chain.device.name}" if chain.device else ""
    if place is None:
        return True, domain, "", 0, 0, name
    tray = chain.fabric or chain.machine
    return False, domain, place.chassis_serial, tray.tray_index if tray else place.slot, place.module_id, name
