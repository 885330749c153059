"""The join by its definition: every record is compared in turn, every lookup reads all records.

It is slow and short, so that the real join can be compared with it.
"""

import msgspec

from rackloom.core.cluster import names
from rackloom.core.diagnosis.join import JoinedGpu, MachineGpu, Rails
from rackloom.core.diagnosis.snapshot import DeviceRecord, FabricGpuRecord, GpuChain
from rackloom.errors import Refused
from rackloom.topology.join_key import joins, merge_keys


def parts_of(key):
    """The parts that identify a GPU beyond one machine: all but the PCI address."""
    facts = {part: getattr(key, part) for part in ("place", "fabric_guid", "gpu_uuid")}
    return [(part, fact.value) for part, fact in facts.items() if fact is not None]


def contradiction(known, new):
    try:
        merge_keys(known, new)
    except Refused as refused:
        return refused.reason
    return ""


class PlainIdentities:
    """Like `GpuIdentities`, without the shortcut for records that contradict nothing."""

    def __init__(self):
        self.gpus = []
        self.claimed = {}

    def add(self, source, key, record):
        new, same, contradicting = JoinedGpu(key, source, record), [], []
        for known in dict.fromkeys(self.claimed[part] for part in parts_of(key) if part in self.claimed):
            difference = contradiction(known.key, key)
            (contradicting if difference else same).append(known)
            if difference:
                known.conflicts.append(f"{known.sources} against {source}: {difference}")
        holder = self.claimed.get(("place", key.place.value)) if key.place else None
        if holder in contradicting:
            return
        for known in same:
            new = self.united(known, new)
        self.gpus.append(new)
        for part in parts_of(new.key):
            if self.claimed.get(part) not in contradicting:
                self.claimed[part] = new

    def united(self, known, new):
        if difference := contradiction(known.key, new.key):
            new.conflicts.append(f"{known.sources} against {new.sources}: {difference}")
            return new
        self.gpus.remove(known)
        known.key = merge_keys(known.key, new.key)
        known.records += new.records
        known.conflicts += new.conflicts
        return known


def plain_chain(joined, snapshot):
    """The chain of one GPU. If several records fit a name, the last counts, or the first allocation."""
    records = [record for _, record in joined.records]
    listed = [record for record in records if isinstance(record, FabricGpuRecord)]
    owners = [record for record in records if isinstance(record, MachineGpu)]
    devices = [record for record in records if isinstance(record, DeviceRecord)]
    homes = [owner.machine.domain for owner in owners]
    fabric = next((gpu for gpu in listed if gpu.domain in homes), listed[0] if listed else None)
    device = devices[-1] if devices else None
    partition = fabric and last(
        snapshot.partitions, lambda found: (found.domain, found.id) == (fabric.domain, fabric.partition)
    )
    chain = GpuChain(
        key=joined.key,
        fabric=fabric,
        partition=partition,
        logical=partition and last(snapshot.logicals, lambda found: found.id == partition.logical),
        transfer=plain_transfer(joined.key, device, snapshot.transfers),
        conflicts=tuple(joined.conflicts),
    )
    if owners:
        machine, module = owners[-1].machine, owners[-1].module_id
        wanted = last(
            snapshot.instance_gpus, lambda gpu: (gpu.instance, gpu.module_id) == (machine.instance, module)
        )
        chain = msgspec.structs.replace(chain, machine=machine, wanted=wanted)
    return chain if device is None else with_device(chain, device, snapshot)


def last(records, fits):
    """The last record that fits."""
    return next((record for record in reversed(records) if fits(record)), None)


def with_device(chain, device, snapshot):
    use = next((use for use in snapshot.uses if use.device_id == device.device_id), None)
    others = (
        [] if use is None else [other for pod in use.pods for other in snapshot.uses if pod in other.pods]
    )
    claimed = [claim.domain for other in others for claim in snapshot.claims if claim.key == other.claim]
    domains = [domain for uid in claimed for domain in snapshot.compute_domains if domain.uid == uid]
    channels = [other.device for other in others if other.driver == names.IMEX_DRIVER]
    return msgspec.structs.replace(
        chain,
        device=device,
        node=last(snapshot.nodes, lambda node: node.name == device.node),
        nics=Rails(snapshot.devices).of(device),
        use=use,
        compute_domain=next(iter(domains), None),
        channel=next((name for name in channels if name.startswith("channel-")), None),
    )


def plain_transfer(key, device, transfers):
    newest = sorted(transfers, key=lambda transfer: transfer.at)
    with_uuid = [found for found in newest if found.key.gpu_uuid and key.gpu_uuid]
    named = [found for found in with_uuid if found.key.gpu_uuid.value == key.gpu_uuid.value]
    if named:
        return named[-1] if joins(named[-1].key, key) else None
    here = [found for found in newest if device and found.node == device.node and not found.key.gpu_uuid]
    addressed = [found for found in here if found.key.pci_address and key.pci_address]
    same = [found for found in addressed if found.key.pci_address.value == key.pci_address.value]
    return same[-1] if same and joins(same[-1].key, key, one_machine=True) else None
