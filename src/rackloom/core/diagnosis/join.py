"""Join of all layers: one `GpuChain` for each GPU that any layer reports, by the join key alone.

`gpu_chains` works in three steps:

1. `GpuIdentities` collects the records of each GPU. It indexes the parts of the join key that mean something
   beyond one machine: slot and module, fabric GUID, GPU UUID. A new record is compared only with the GPUs
   that share a part with it, and `topology.identity.joins` decides whether both are one GPU. A record that
   shares one part and contradicts another is not merged. The known GPU gets a conflict that names both sides.
   If a GPU that it does not match has the slot that it names, the record is dropped: one slot holds one GPU.
2. The order of records decides which source is trusted about a slot. First comes the switch controller of the
   domain in which the site records the tray, then the machine records, then the lists of other controllers,
   then published devices. So a controller that answers first cannot take a tray off the site.
3. `LayerLookups` finds the records that belong to a GPU in each layer, by the names that the layer itself
   uses: partition, logical partition, interface of the instance, node, allocation, ComputeDomain, IMEX
   channel, newest transfer. `Rails` is the one rule for which NICs serve which GPU: the NIC that the GPU's
   plugin names, then all NICs that name the GPU. PCI addresses are compared within one node only.

The work is linear in the number of records. GPUs with a known slot come first, by domain, tray and
module.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Generic, TypeVar

import msgspec

from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import ComputeDomain
from rackloom.core.diagnosis.snapshot import (
    DeviceId,
    DeviceRecord,
    FabricGpuRecord,
    GpuChain,
    MachineRecord,
    MeasuredTransfer,
    SiteSnapshot,
    grouped,
)
from rackloom.errors import Refused
from rackloom.topology.join_key import Fact, GpuKey, SlotKey, Source, joins, merge_keys, merged_if_agreed

# Identity: which records of different layers describe one GPU.


T = TypeVar("T")


class JoinedGpu(Generic[T]):
    """The records of one GPU, each with the name of its source."""

    __slots__ = ("conflicts", "key", "records")

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
        self._at_place: dict[SlotKey, JoinedGpu[T]] = {}
        self._with_guid: dict[int, JoinedGpu[T]] = {}
        self._with_uuid: dict[str, JoinedGpu[T]] = {}
        self._disputed = False
        """Whether a part of a GPU may lead to another GPU."""

    @property
    def gpus(self) -> tuple[JoinedGpu[T], ...]:
        """Each GPU once, in the order of its last record."""
        return tuple(self._gpus.values())

    def add(self, source: str, key: GpuKey, record: T) -> None:
        """Add a record to the GPU that it describes, or as a new GPU.

        Each slot, GUID and UUID leads to at most one GPU. A record that shares a part with a known GPU and
        contradicts another part describes a different GPU. The known one gets a conflict with both sides. The
        record is dropped if a contradicting GPU already holds the slot that it names, because one slot holds
        one GPU. If two records name the same part, the first one counts.
        """
        place, guid, uuid = key.place, key.fabric_guid, key.gpu_uuid
        holder = None if place is None else self._at_place.get(place.value)
        with_guid = None if guid is None else self._with_guid.get(guid.value)
        with_uuid = None if uuid is None else self._with_uuid.get(uuid.value)
        known = holder or with_guid or with_uuid
        if known is None:
            known = JoinedGpu(key, source, record)
        else:
            leads_to_one = (with_guid is None or with_guid is known) and (
                with_uuid is None or with_uuid is known
            )
            merged = merged_if_agreed(known.key, key) if leads_to_one else None
            if merged is None:
                self._add_disputed(JoinedGpu(key, source, record), (holder, with_guid, with_uuid), holder)
                return
            known.key = merged
            known.records.append((source, record))
            del self._gpus[id(known)]
        # Nearly every record: all its parts that are known lead to one GPU, and it agrees with that GPU.
        self._gpus[id(known)] = known
        if holder is None and place is not None:
            self._at_place[place.value] = known
        if with_guid is None and guid is not None:
            self._with_guid[guid.value] = known
        if with_uuid is None and uuid is not None:
            self._with_uuid[uuid.value] = known
        if self._disputed:
            self._claim_parts(known, ())

    def _add_disputed(
        self, new: JoinedGpu[T], named: Iterable[JoinedGpu[T] | None], holder: JoinedGpu[T] | None
    ) -> None:
        """Add a record with parts that lead to several GPUs, or that contradicts the only one."""
        same: list[JoinedGpu[T]] = []
        contradicting: list[JoinedGpu[T]] = []
        for known in {id(gpu): gpu for gpu in named if gpu is not None}.values():
            difference = _contradiction(known.key, new.key)
            if difference:
                contradicting.append(known)
                known.conflicts.append(f"{known.sources} against {new.sources}: {difference}")
            else:
                same.append(known)
        self._disputed = True
        if holder is not None and holder not in same:
            return
        # A record may connect GPUs that no earlier record connected, such as a slot and a UUID.
        for known in same:
            new = self._united(known, new)
        self._gpus[id(new)] = new
        self._claim_parts(new, contradicting)

    def _claim_parts(self, gpu: JoinedGpu[T], contradicting: Collection[JoinedGpu[T]]) -> None:
        """Have all parts of a GPU lead to it. Parts of a contradicting GPU stay with that GPU."""
        key = gpu.key
        if key.place is not None and self._at_place.get(key.place.value) not in contradicting:
            self._at_place[key.place.value] = gpu
        if key.fabric_guid is not None and self._with_guid.get(key.fabric_guid.value) not in contradicting:
            self._with_guid[key.fabric_guid.value] = gpu
        if key.gpu_uuid is not None and self._with_uuid.get(key.gpu_uuid.value) not in contradicting:
            self._with_uuid[key.gpu_uuid.value] = gpu

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


def _contradiction(known: GpuKey, new: GpuKey) -> str:
    """The contradiction, PCI addresses included, between two keys that share a part. Empty if they agree."""
    try:
        merge_keys(known, new)
    except Refused as refused:
        return refused.reason
    return ""


# NICs that serve a GPU, as the plugins of both report it.


class Rails:
    """The NICs among some devices that serve a GPU. PCI addresses are compared within one node only."""

    def __init__(self, devices: Iterable[DeviceRecord]) -> None:
        self._devices = tuple(devices)
        nics = [device for device in self._devices if device.kind == "nic"]
        self._nics = nics
        self._naming = grouped(((nic.node, nic.partner), nic) for nic in nics if nic.partner is not None)

    @cached_property
    def nics(self) -> tuple[DeviceRecord, ...]:
        """Those that serve a GPU, in the order given."""
        return tuple(nic for nic in self._nics if nic.device_id in self._gpus)

    def of(self, gpu: DeviceRecord) -> tuple[DeviceRecord, ...]:
        """The NICs that serve a GPU: first the one that the GPU names, then all that name the GPU."""
        address = gpu.key.pci_address
        declared = self._at.get((gpu.node, gpu.partner_address)) if gpu.partner_address else None
        naming = () if address is None else self._naming.get((gpu.node, address.value), ())
        if declared is None and len(naming) < 2:
            return tuple(naming)
        return tuple({nic.device_id: nic for nic in (declared, *naming) if nic is not None}.values())

    def served_by(self, nic: DeviceRecord) -> str:
        """PCI address (or name, if that is not published) of the GPU that a NIC of `nics` serves."""
        return self._gpus[nic.device_id]

    @cached_property
    def _at(self) -> Mapping[tuple[str, str], DeviceRecord]:
        """NICs by node and PCI address."""
        return {(nic.node, nic.key.pci_address.value): nic for nic in self._nics if nic.key.pci_address}

    @cached_property
    def _gpus(self) -> Mapping[DeviceId, str]:
        """The GPU that each NIC serves."""
        served_by = {}
        for gpu in self._devices:
            if gpu.kind == "gpu":
                address = gpu.key.pci_address
                for nic in self.of(gpu):
                    served_by[nic.device_id] = address.value if address else gpu.name
        # The NIC's own declaration comes last, so it takes precedence.
        for (_, served), nics in self._naming.items():
            served_by |= {nic.device_id: served or "" for nic in nics}
        return served_by


# Lookups by the names that each layer uses.


class LayerLookups:
    """The indexes of one snapshot that the join needs, each built once."""

    def __init__(self, snapshot: SiteSnapshot) -> None:
        self.partitions = {(partition.domain, partition.id): partition for partition in snapshot.partitions}
        self.logicals = {logical.id: logical for logical in snapshot.logicals}
        self.interfaces = {(gpu.instance, gpu.module_id): gpu for gpu in snapshot.instance_gpus}
        self.nodes = {node.name: node for node in snapshot.nodes}
        # Reversed, so that the first of several allocations of one device counts.
        self.uses = {(use.driver, use.pool, use.device): use for use in reversed(snapshot.uses)}
        self.rails = Rails(snapshot.devices)
        self._domains = {domain.uid: domain for domain in snapshot.compute_domains}
        self._domain_of_claim = {claim.key: claim.domain for claim in snapshot.claims}
        self._uses_of_pod = grouped((pod, use) for use in snapshot.uses for pod in use.pods)
        self._channels: dict[tuple[str, ...], tuple[ComputeDomain | None, str | None]] = {}
        self._transfers_by_uuid: dict[str, MeasuredTransfer] = {}
        self._transfers_by_address: dict[tuple[str, str], MeasuredTransfer] = {}
        for transfer in sorted(snapshot.transfers, key=lambda transfer: transfer.at):
            uuid, address = transfer.key.gpu_uuid, transfer.key.pci_address
            if uuid is not None:
                self._transfers_by_uuid[uuid.value] = transfer
            elif address is not None:
                self._transfers_by_address[transfer.node, address.value] = transfer

    def channel_of(self, pods: tuple[str, ...]) -> tuple[ComputeDomain | None, str | None]:
        """The ComputeDomain of a channel that these pods have, and the channel itself, in any claim."""
        found = self._channels.get(pods)
        if found is None:
            uses = [use for pod in pods for use in self._uses_of_pod[pod]]
            uids = (self._domain_of_claim.get(use.claim, "") for use in uses)
            channels = (use.device for use in uses if use.driver == names.IMEX_DRIVER)
            found = (
                next((self._domains[uid] for uid in uids if uid in self._domains), None),
                next((device for device in channels if device.startswith("channel-")), None),
            )
            self._channels[pods] = found
        return found

    def transfer_of(self, key: GpuKey, node: str | None) -> MeasuredTransfer | None:
        """The newest transfer from a GPU. A PCI address identifies it only on its own node."""
        uuid, address = key.gpu_uuid, key.pci_address
        # A UUID identifies the GPU wherever it was measured, so it takes precedence over the PCI address.
        by_uuid = None if uuid is None else self._transfers_by_uuid.get(uuid.value)
        if by_uuid is not None:
            return by_uuid if joins(by_uuid.key, key) else None
        if address is None or node is None or not self._transfers_by_address:
            return None
        found = self._transfers_by_address.get((node, address.value))
        return found if found is not None and joins(found.key, key, one_machine=True) else None


# The join itself.


class MachineGpu(msgspec.Struct, frozen=True, gc=False):
    """One GPU in a machine's record."""

    machine: MachineRecord
    module_id: int


GpuRecord = FabricGpuRecord | MachineGpu | DeviceRecord


def gpu_chains(snapshot: SiteSnapshot) -> tuple[GpuChain, ...]:
    """One chain per GPU that any layer reports, by domain, tray and module. GPUs without a slot come last.

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
    homes = {
        (key.place.value, machine.domain)
        for machine in snapshot.machines
        for key in machine.gpus
        if key.place is not None
    }
    others: list[FabricGpuRecord] = []
    for gpu in snapshot.fabric_gpus:
        if (gpu.place, gpu.domain) in homes:
            yield _of_controller(gpu)
        else:
            others.append(gpu)
    for machine in snapshot.machines:
        source = f"the record of machine {machine.id}"
        for index, key in enumerate(machine.gpus):
            module = key.place.value.module_id if key.place is not None else index + 1
            yield source, key, MachineGpu(machine, module)
    yield from map(_of_controller, others)
    for device in snapshot.devices:
        if device.kind == "gpu":
            yield f"node {device.node}", device.key, device


def _of_controller(gpu: FabricGpuRecord) -> tuple[str, GpuKey, GpuRecord]:
    return f"the switch controller of domain {gpu.domain}", fabric_key(gpu), gpu


def _gpu_chain(joined: JoinedGpu[GpuRecord], lookups: LayerLookups) -> GpuChain:
    listed: list[FabricGpuRecord] = []
    homes: list[str] = []
    owner: MachineGpu | None = None
    device: DeviceRecord | None = None
    for _, record in joined.records:
        if isinstance(record, FabricGpuRecord):
            listed.append(record)
        elif isinstance(record, MachineGpu):
            owner = record
            homes.append(record.machine.domain)
        else:
            device = record
    fabric = listed[0] if listed else None
    if len(listed) > 1:
        # If several domains list it, that of its machine's record is trusted.
        fabric = next((gpu for gpu in listed if gpu.domain in homes), fabric)
    partition = None
    if fabric is not None and fabric.partition is not None:
        partition = lookups.partitions.get((fabric.domain, fabric.partition))
    use = None if device is None else lookups.uses.get((device.driver, device.pool, device.name))
    domain, channel = (None, None) if use is None else lookups.channel_of(use.pods)
    machine = None if owner is None else owner.machine
    return GpuChain(
        key=joined.key,
        machine=machine,
        fabric=fabric,
        partition=partition,
        logical=None if partition is None else lookups.logicals.get(partition.logical or ""),
        wanted=None
        if owner is None
        else lookups.interfaces.get((owner.machine.instance or "", owner.module_id)),
        node=None if device is None else lookups.nodes.get(device.node),
        device=device,
        use=use,
        compute_domain=domain,
        channel=channel,
        nics=() if device is None else lookups.rails.of(device),
        transfer=lookups.transfer_of(joined.key, None if device is None else device.node),
        conflicts=tuple(joined.conflicts),
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
