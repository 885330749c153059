"""Every GPU of a site through all layers, tied by the join key and by nothing else."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from rackloom.prove.picture.identities import Identities, Joined
from rackloom.prove.picture.kept import Kept, again
from rackloom.prove.picture.lookups import Lookups
from rackloom.prove.picture.shares import Name, Shares, shares
from rackloom.prove.picture.values import DeviceSeen, FabricGpu, GpuChain, MachineSeen, Picture
from rackloom.topology.facts import Fact, Source
from rackloom.topology.identity import GpuKey, SlotKey


class OnMachine(msgspec.Struct, frozen=True):
    """One GPU in a machine's record."""

    machine: MachineSeen
    module_id: int


Record = FabricGpu | OnMachine | DeviceSeen


def chains(picture: Picture) -> tuple[GpuChain, ...]:
    """One chain per GPU that any layer knows, by domain, tray and module; those without a place come last.

    The work is linear in the records. A record that contradicts the GPU in its place is not part of that
    chain: the chain's conflicts name both sides.
    """
    lookups = Lookups(picture)
    return tuple(sorted((_chain(one, lookups) for one in _identities(picture).gpus), key=_order))


class JoinedShares(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs of a site, share by share."""

    shares: Shares = Shares()
    joined: Kept[Name, Picture, tuple[GpuChain, ...]] = msgspec.field(default_factory=dict)

    @property
    def chains(self) -> tuple[GpuChain, ...]:
        """As `chains` has them of the whole picture."""
        return tuple(sorted((chain for _, found in self.joined.values() for chain in found), key=_order))


def join(picture: Picture, before: JoinedShares) -> JoinedShares:
    """Every GPU through all layers, joining only what is not as it was in the picture `before`.

    `before` may be of any picture, or `JoinedShares()`: what comes out is the same.
    """
    found = shares(picture, before.shares)
    return JoinedShares(shares=found, joined=again(before.joined, found.pictures, chains))


def key_of(gpu: FabricGpu) -> GpuKey:
    """What a switch controller knows of a GPU's identity."""
    return GpuKey(place=Fact(gpu.place, Source.NMX), fabric_guid=Fact(gpu.guid, Source.NMX))


def _identities(picture: Picture) -> Identities[Record]:
    found: Identities[Record] = Identities()
    for who, key, record in _told(picture):
        found.add(who, key, record)
    return found


def _told(picture: Picture) -> Iterator[tuple[str, GpuKey, Record]]:
    """All records about GPUs; who knows places best comes first.

    That is the controller of the domain in which the site has a machine. What others list in its places comes
    after the machine's record: whoever answers first must not take a tray off the site.
    """
    homes = _homes(picture.machines)
    others: list[FabricGpu] = []
    for gpu in picture.fabric_gpus:
        if gpu.domain in homes.get(gpu.place, ()):
            yield _by_controller(gpu)
        else:
            others.append(gpu)
    for machine in picture.machines:
        for index, key in enumerate(machine.gpus):
            module = key.place.value.module_id if key.place is not None else index + 1
            yield f"the record of machine {machine.id}", key, OnMachine(machine, module)
    yield from map(_by_controller, others)
    for device in picture.devices:
        if device.kind == "gpu":
            yield f"node {device.node}", device.key, device


def _homes(machines: Iterable[MachineSeen]) -> Mapping[SlotKey, set[str]]:
    """The domain that each place of a machine is in, as the site's records say."""
    found: defaultdict[SlotKey, set[str]] = defaultdict(set)
    for machine in machines:
        for key in machine.gpus:
            if key.place is not None:
                found[key.place.value].add(machine.domain)
    return found


def _by_controller(gpu: FabricGpu) -> tuple[str, GpuKey, Record]:
    return f"the switch controller of domain {gpu.domain}", key_of(gpu), gpu


def _chain(joined: Joined[Record], lookups: Lookups) -> GpuChain:
    chain, node = GpuChain(key=joined.key, conflicts=tuple(joined.conflicts)), None
    if (fabric := _fabric(joined)) is not None:
        chain = _with_fabric(chain, fabric, lookups)
    for _, record in joined.said:
        match record:
            case OnMachine(machine, module_id):
                wanted = lookups.wanted(machine.instance, module_id)
                chain = msgspec.structs.replace(chain, machine=machine, wanted=wanted)
            case DeviceSeen():
                chain, node = _with_device(chain, record, lookups), record.node
    return msgspec.structs.replace(chain, transfer=lookups.transfer_of(joined.key, node))


def _fabric(joined: Joined[Record]) -> FabricGpu | None:
    """What its switch controller says; of two domains that list it, that which the machine's record names."""
    told = [record for _, record in joined.said if isinstance(record, FabricGpu)]
    homes = {record.machine.domain for _, record in joined.said if isinstance(record, OnMachine)}
    return next((one for one in told if one.domain in homes), told[0] if told else None)


def _with_fabric(chain: GpuChain, gpu: FabricGpu, lookups: Lookups) -> GpuChain:
    partition = lookups.partition_of(gpu)
    logical = None if partition is None else lookups.logical(partition.logical)
    return msgspec.structs.replace(chain, fabric=gpu, partition=partition, logical=logical)


def _with_device(chain: GpuChain, device: DeviceSeen, lookups: Lookups) -> GpuChain:
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


def _order(chain: GpuChain) -> tuple[bool, str, str, int, int, str]:
    """Known places first: by domain, then chassis and slot, which is the order of trays, then module."""
    place = chain.key.place.value if chain.key.place is not None else None
    domain = chain.fabric.domain if chain.fabric else chain.machine.domain if chain.machine else ""
    name = f"{chain.device.node}/{chain.device.name}" if chain.device else ""
    if place is None:
        return True, domain, "", 0, 0, name
    tray = chain.fabric or chain.machine
    return False, domain, place.chassis_serial, tray.tray_index if tray else place.slot, place.module_id, name
