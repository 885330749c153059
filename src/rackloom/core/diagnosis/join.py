"""Join of all layers: one `GpuChain` for each GPU that any layer reports, by the join key alone.

`gpu_chains` works in three steps:

1. `GpuIdentities` collects the records of each GPU. It indexes the parts of the join key that mean
   something beyond one machine: slot and module, fabric GUID, GPU UUID. A new record is compared only
   with the GPUs that share a part with it, and `topology.identity.joins` decides whether both are one
   GPU. A record that shares one part and contradicts another is not merged; the known GPU gets a conflict
   that names both sides. Where the slot that it names is taken by a GPU that it does not match, the
   record is dropped: one slot holds one GPU.
2. The order of records decides who is believed about a slot. First comes the switch controller of the
   domain in which the site records the tray, then the machine records, then what other controllers list,
   then published devices. So a controller that answers first cannot take a tray off the site.
3. `LayerLookups` finds what belongs to a GPU in each layer, by the names that the layer itself uses:
   partition, logical partition, interface of the instance, node, allocation, ComputeDomain, IMEX channel,
   newest transfer. `Rails` is the one rule for which NICs serve which GPU: the NIC that the GPU's plugin
   names, then all NICs that name the GPU. PCI addresses are compared within one node only.

The work is linear in the number of records. GPUs with a known slot come first, by domain, tray and
module.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, TypeVar

import msgspec

from rackloom.core.diagnosis.snapshot import (
    AllocatedDevice,
    DeviceRecord,
    FabricGpuRecord,
    GpuChain,
    InstanceGpuRecord,
    LogicalPartitionRecord,
    MachineRecord,
    MeasuredTransfer,
    NodeRecord,
    PartitionRecord,
    SiteSnapshot,
)
from rackloom.core.domains import names
from rackloom.core.domains.compute_domain import ComputeDomain
from rackloom.errors import Refused
from rackloom.topology.join_key import Fact, GpuKey, SlotKey, Source, joins, merge_keys

# Identity: which records of different layers describe one GPU.


T = TypeVar("T")


class JoinedGpu(Generic[T]):
    """What was found of one GPU. `said` are the records, each with the name of who says so."""

    def __init__(self, key: GpuKey, who: str, record: T) -> None:
        self.key = key
        self.said: list[tuple[str, T]] = [(who, record)]
        self.conflicts: list[str] = []

    @property
    def speakers(self) -> str:
        """Who told of it so far."""
        return " and ".join(who for who, _ in self.said)


class GpuIdentities(Generic[T]):
    """All GPUs that any layer told of."""

    def __init__(self) -> None:
        self._gpus: dict[int, JoinedGpu[T]] = {}
        self._at: dict[tuple[str, object], JoinedGpu[T]] = {}

    @property
    def gpus(self) -> tuple[JoinedGpu[T], ...]:
        """Each GPU once, in the order in which they were first told of."""
        return tuple(self._gpus.values())

    def add(self, who: str, key: GpuKey, record: T) -> None:
        """Put a record to the GPU that it is about: a known one, or a new one.

        A record that shares one part with a known GPU and contradicts another is not about that one, which is
        noted there as a conflict with both sides. Nor is it about any other where the place that it names is
        taken by the one that it contradicts: in one place is one GPU. Parts that both name stay with who told
        of them first.
        """
        same: list[JoinedGpu[T]] = []
        others: list[JoinedGpu[T]] = []
        for known in self._candidates(key):
            difference = _contradiction(known.key, key)
            if joins(known.key, key) and not difference:
                same.append(known)
            else:
                others.append(known)
                known.conflicts.append(f"{known.speakers} against {who}: {difference}")
        holder = None if key.place is None else self._at.get(("place", key.place.value))
        if holder is not None and holder not in same:
            return
        found = JoinedGpu(key, who, record)
        for known in same:
            found = self._united(known, found)
        self._gpus[id(found)] = found
        for part in parts_of(found.key):
            if self._at.get(part) not in others:
                self._at[part] = found

    def _united(self, known: JoinedGpu[T], new: JoinedGpu[T]) -> JoinedGpu[T]:
        """Both as one GPU. Where they contradict each other they stay two, and `new` keeps the conflict."""
        try:
            key = merge_keys(known.key, new.key)
        except Refused as refused:
            new.conflicts.append(f"{known.speakers} against {new.speakers}: {refused.reason}")
            return new
        del self._gpus[id(known)]
        known.key = key
        known.said += new.said
        known.conflicts += new.conflicts
        return known

    def _candidates(self, key: GpuKey) -> list[JoinedGpu[T]]:
        found = {id(known): known for part in parts_of(key) if (known := self._at.get(part)) is not None}
        return list(found.values())


def parts_of(key: GpuKey) -> Iterator[tuple[str, object]]:
    """The parts that mean something beyond one machine: all but the PCI address."""
    for part in ("place", "fabric_guid", "gpu_uuid"):
        fact = getattr(key, part)
        if fact is not None:
            yield part, fact.value


def _contradiction(known: GpuKey, told: GpuKey) -> str:
    """Where two keys that share a part contradict each other, addresses included; empty: nowhere."""
    try:
        merge_keys(known, told)
    except Refused as refused:
        return refused.reason
    return ""


# NICs that serve a GPU, as the plugins of both report it.


class Rails:
    """The NICs among some devices. Addresses are those of one node."""

    def __init__(self, devices: Iterable[DeviceRecord]) -> None:
        devices = tuple(devices)
        self._naming: defaultdict[tuple[str, str], list[DeviceRecord]] = defaultdict(list)
        self._at: dict[tuple[str, str], DeviceRecord] = {}
        nics = [device for device in devices if device.kind == "nic"]
        for nic in nics:
            if nic.partner is not None:
                self._naming[nic.node, nic.partner].append(nic)
            if nic.key.pci_address is not None:
                self._at[nic.node, nic.key.pci_address.value] = nic
        self._gpus = {_device_name(nic): served for served, nic in self._pairs(devices)}
        self.nics = tuple(nic for nic in nics if _device_name(nic) in self._gpus)
        """Those that serve a GPU, in the order given."""

    def of(self, gpu: DeviceRecord) -> tuple[DeviceRecord, ...]:
        """The NICs that serve a GPU: first the one that it names, then all that name it."""
        address = gpu.key.pci_address
        declared = self._at.get((gpu.node, gpu.partner_address or ""))
        naming = () if address is None else self._naming.get((gpu.node, address.value), ())
        return tuple({_device_name(nic): nic for nic in (declared, *naming) if nic is not None}.values())

    def served_by(self, nic: DeviceRecord) -> str:
        """PCI address (or, where that is not published, name) of the GPU that a NIC of `nics` serves."""
        return self._gpus[_device_name(nic)]

    def _pairs(self, devices: Iterable[DeviceRecord]) -> Iterator[tuple[str, DeviceRecord]]:
        """What a NIC itself says comes last, and counts."""
        for gpu in devices:
            if gpu.kind == "gpu":
                address = gpu.key.pci_address
                yield from ((address.value if address else gpu.name, nic) for nic in self.of(gpu))
        for (_, served), nics in self._naming.items():
            yield from ((served, nic) for nic in nics)


def _device_name(nic: DeviceRecord) -> tuple[str, str, str]:
    return nic.driver, nic.pool, nic.name


# Lookups by the names that each layer uses.


DeviceName = tuple[str, str, str]
"""Driver, pool and name."""


class LayerLookups:
    """Indexes of one picture, each made once."""

    def __init__(self, picture: SiteSnapshot) -> None:
        self._partitions = {(partition.domain, partition.id): partition for partition in picture.partitions}
        self._logicals = {logical.id: logical for logical in picture.logicals}
        self._wanted = {(one.instance, one.module_id): one for one in picture.instance_gpus}
        self._nodes = {node.name: node for node in picture.nodes}
        self._uses = {(use.driver, use.pool, use.device): use for use in reversed(picture.uses)}
        self._domains = {domain.uid: domain for domain in picture.compute_domains}
        self._domain_of_claim = {f"{claim.namespace}/{claim.name}": claim.domain for claim in picture.claims}
        self._uses_of_pod = _devices_by_pod(picture.uses)
        self._rails = Rails(picture.devices)
        self._transfers = dict(_transfers_by_key(picture.transfers))

    def partition_of(self, gpu: FabricGpuRecord) -> PartitionRecord | None:
        """The physical partition that holds a GPU."""
        return None if gpu.partition is None else self._partitions.get((gpu.domain, gpu.partition))

    def logical(self, id_: str | None) -> LogicalPartitionRecord | None:
        """A logical partition by its id."""
        return None if id_ is None else self._logicals.get(id_)

    def wanted(self, instance: str | None, module_id: int) -> InstanceGpuRecord | None:
        """The interface of an instance that stands for one GPU of its machine."""
        return None if instance is None else self._wanted.get((instance, module_id))

    def node(self, name: str) -> NodeRecord | None:
        """A node by its name."""
        return self._nodes.get(name)

    def use_of(self, device: DeviceRecord) -> AllocatedDevice | None:
        """Who has a device."""
        return self._uses.get((device.driver, device.pool, device.name))

    def compute_domain_of(self, use: AllocatedDevice) -> ComputeDomain | None:
        """The ComputeDomain whose channel the pods of a use have."""
        uids = (self._domain_of_claim.get(one.claim, "") for one in self._beside(use))
        return next((self._domains[uid] for uid in uids if uid in self._domains), None)

    def channel_of(self, use: AllocatedDevice) -> str | None:
        """The IMEX channel of the pods of a use."""
        devices = (one.device for one in self._beside(use) if one.driver == names.IMEX_DRIVER)
        return next((device for device in devices if device.startswith("channel-")), None)

    def nics_of(self, gpu: DeviceRecord) -> tuple[DeviceRecord, ...]:
        """The NICs that serve a GPU, first the one that it is paired with."""
        return self._rails.of(gpu)

    def transfer_of(self, key: GpuKey, node: str | None) -> MeasuredTransfer | None:
        """The newest transfer from a GPU; PCI addresses name it only on its own node."""
        uuid, address = key.gpu_uuid, key.pci_address
        by_uuid = None if uuid is None else self._transfers.get(("", uuid.value))
        if by_uuid is not None:
            return by_uuid if joins(by_uuid.key, key) else None
        found = None if address is None or node is None else self._transfers.get((node, address.value))
        return found if found is not None and joins(found.key, key, one_machine=True) else None

    def _beside(self, use: AllocatedDevice) -> Iterator[AllocatedDevice]:
        """What the pods of a use have, in claims of theirs."""
        for pod in use.pods:
            yield from self._uses_of_pod[pod]


def _devices_by_pod(uses: Iterable[AllocatedDevice]) -> dict[str, list[AllocatedDevice]]:
    found: defaultdict[str, list[AllocatedDevice]] = defaultdict(list)
    for use in uses:
        for pod in use.pods:
            found[pod].append(use)
    return found


def _transfers_by_key(
    transfers: Iterable[MeasuredTransfer],
) -> Iterator[tuple[tuple[str, str], MeasuredTransfer]]:
    for transfer in sorted(transfers, key=lambda one: one.at):
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


def gpu_chains(picture: SiteSnapshot) -> tuple[GpuChain, ...]:
    """One chain per GPU that any layer knows, by domain, tray and module; those without a place come last.

    The work is linear in the records. A record that contradicts the GPU in its place is not part of that
    chain: the chain's conflicts name both sides.
    """
    lookups = LayerLookups(picture)
    return tuple(sorted((_gpu_chain(one, lookups) for one in _identify(picture).gpus), key=chain_order))


def fabric_key(gpu: FabricGpuRecord) -> GpuKey:
    """What a switch controller knows of a GPU's identity."""
    return GpuKey(place=Fact(gpu.place, Source.NMX), fabric_guid=Fact(gpu.guid, Source.NMX))


def _identify(picture: SiteSnapshot) -> GpuIdentities[GpuRecord]:
    found: GpuIdentities[GpuRecord] = GpuIdentities()
    for who, key, record in _records(picture):
        found.add(who, key, record)
    return found


def _records(picture: SiteSnapshot) -> Iterator[tuple[str, GpuKey, GpuRecord]]:
    """All records about GPUs; who knows places best comes first.

    That is the controller of the domain in which the site has a machine. What others list in its places comes
    after the machine's record: whoever answers first must not take a tray off the site.
    """
    homes = _recorded_domains(picture.machines)
    others: list[FabricGpuRecord] = []
    for gpu in picture.fabric_gpus:
        if gpu.domain in homes.get(gpu.place, ()):
            yield _of_controller(gpu)
        else:
            others.append(gpu)
    for machine in picture.machines:
        for index, key in enumerate(machine.gpus):
            module = key.place.value.module_id if key.place is not None else index + 1
            yield f"the record of machine {machine.id}", key, MachineGpu(machine, module)
    yield from map(_of_controller, others)
    for device in picture.devices:
        if device.kind == "gpu":
            yield f"node {device.node}", device.key, device


def _recorded_domains(machines: Iterable[MachineRecord]) -> Mapping[SlotKey, set[str]]:
    """The domain that each place of a machine is in, as the site's records say."""
    found: defaultdict[SlotKey, set[str]] = defaultdict(set)
    for machine in machines:
        for key in machine.gpus:
            if key.place is not None:
                found[key.place.value].add(machine.domain)
    return found


def _of_controller(gpu: FabricGpuRecord) -> tuple[str, GpuKey, GpuRecord]:
    return f"the switch controller of domain {gpu.domain}", fabric_key(gpu), gpu


def _gpu_chain(joined: JoinedGpu[GpuRecord], lookups: LayerLookups) -> GpuChain:
    chain, node = GpuChain(key=joined.key, conflicts=tuple(joined.conflicts)), None
    if (fabric := _trusted_fabric_record(joined)) is not None:
        chain = _with_fabric(chain, fabric, lookups)
    for _, record in joined.said:
        match record:
            case MachineGpu(machine, module_id):
                wanted = lookups.wanted(machine.instance, module_id)
                chain = msgspec.structs.replace(chain, machine=machine, wanted=wanted)
            case DeviceRecord():
                chain, node = _with_device(chain, record, lookups), record.node
    return msgspec.structs.replace(chain, transfer=lookups.transfer_of(joined.key, node))


def _trusted_fabric_record(joined: JoinedGpu[GpuRecord]) -> FabricGpuRecord | None:
    """What its switch controller says; of two domains that list it, that which the machine's record names."""
    told = [record for _, record in joined.said if isinstance(record, FabricGpuRecord)]
    homes = {record.machine.domain for _, record in joined.said if isinstance(record, MachineGpu)}
    return next((one for one in told if one.domain in homes), told[0] if told else None)


def _with_fabric(chain: GpuChain, gpu: FabricGpuRecord, lookups: LayerLookups) -> GpuChain:
    partition = lookups.partition_of(gpu)
    logical = None if partition is None else lookups.logical(partition.logical)
    return msgspec.structs.replace(chain, fabric=gpu, partition=partition, logical=logical)


def _with_device(chain: GpuChain, device: DeviceRecord, lookups: LayerLookups) -> GpuChain:
    use = lookups.use_of(device)
    return msgspec.structs.replace(
        chain,
        device=device,
        node=lookups.node(device.node),
        nics=lookups.nics_of(device),
        use=use,
        compute_domain=None if use is None else lookups.compute_domain_of(use),
        channel=None if use is None else lookups.channel_of(use),
    )


def chain_order(chain: GpuChain) -> tuple[bool, str, str, int, int, str]:
    """Known places first: by domain, then chassis and slot, which is the order of trays, then module."""
    place = chain.key.place.value if chain.key.place is not None else None
    domain = chain.fabric.domain if chain.fabric else chain.machine.domain if chain.machine else ""
    name = f"{chain.device.node}/{chain.device.name}" if chain.device else ""
    if place is None:
        return True, domain, "", 0, 0, name
    tray = chain.fabric or chain.machine
    return False, domain, place.chassis_serial, tray.tray_index if tray else place.slot, place.module_id, name
