"""From the lists of NMX-M to one domain: what is observed, and by which entities it is changed."""

import hashlib
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from rackloom.carve.fabric.nmxm import wire
from rackloom.carve.fabric.ports import FabricUnavailable
from rackloom.carve.plan.values import GpuHealth, ObservedGpu, ObservedPartition, PartitionHealth

_GPU_HEALTH = {
    "HEALTHY": GpuHealth.HEALTHY,
    "DEGRADED": GpuHealth.DEGRADED,
    "NO_NVLINK": GpuHealth.NO_NVLINK,
    "DEGRADED_BW": GpuHealth.DEGRADED_BANDWIDTH,
}
_PARTITION_HEALTH = {
    "HEALTHY": PartitionHealth.HEALTHY,
    "DEGRADED": PartitionHealth.DEGRADED,
    "DEGRADED_BANDWIDTH": PartitionHealth.DEGRADED_BANDWIDTH,
    "UNHEALTHY": PartitionHealth.UNHEALTHY,
}
"""NEW is a partition whose health nobody knows yet, as is what later versions may add."""


class Lists(msgspec.Struct, frozen=True, kw_only=True):
    """What NMX-M answered, all of it: it may speak for several domains."""

    chassis: Sequence[wire.Chassis]
    nodes: Sequence[wire.ComputeNode]
    gpus: Sequence[wire.Gpu]
    partitions: Sequence[wire.Partition]


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """A partition as it stands."""

    entity: str
    seen: ObservedPartition
    members: Mapping[int, wire.Member]
    """Fabric GUID -> the member as NMX-M has it. Seats without a GPU are members, and in `empty_seats`."""
    empty_seats: tuple[wire.Member, ...]

    @property
    def membership(self) -> tuple[str, frozenset[wire.Member]]:
        """Entity and members: what must not have changed when the full list of members is replaced."""
        return self.entity, frozenset(self.members.values()) | frozenset(self.empty_seats)


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One domain, read completely."""

    domain: str
    gpus: tuple[ObservedGpu, ...]
    entities: Mapping[int, wire.Gpu]
    """Fabric GUID -> the GPU as NMX-M has it."""
    partitions: Mapping[int, Standing]
    """By number."""

    def named(self, name: str) -> Standing | None:
        """The partition of this name, if there is one."""
        return next((one for one in self.partitions.values() if one.seen.name == name), None)

    def held(self) -> frozenset[int]:
        """GPUs in any partition."""
        return frozenset(guid for one in self.partitions.values() for guid in one.seen.members)


class Names(dict[str, int]):
    """GPU entity -> fabric GUID, of all GPUs ever listed: a partition keeps naming those that are away."""

    def guid(self, entity: str) -> int:
        """The fabric GUID, or for a GPU that was never listed a number that stands for its entity.

        Such a GPU is a member without hardware; what matters of its number is that no GPU has it.
        """
        known = self.get(entity)
        return known if known is not None else _stand_in(entity)


def read_domain(lists: Lists, domain: str, names: Names) -> Reading:
    """What `lists` say of `domain`.

    The lists are read one after the other, and those of NMX-M have been seen to lag behind each other: raises
    FabricUnavailable when they cannot all be true.
    """
    mine = [gpu for gpu in lists.gpus if same_uuid(gpu.domain_uuid) == domain]
    serials = {
        one.internal_id: one.serial_number for one in lists.chassis if same_uuid(one.domain_uuid) == domain
    }
    _require_guids(mine)
    _require_nodes_filled(lists.nodes, mine, domain)
    names.update((gpu.id, gpu.device_uid) for gpu in lists.gpus)
    partitions = _partitions(lists, domain, names)
    _require_agreement(mine, partitions)
    return Reading(
        domain=domain,
        gpus=tuple(_gpu(gpu, serials) for gpu in sorted(mine, key=lambda one: one.device_uid)),
        entities={gpu.device_uid: gpu for gpu in mine},
        partitions=partitions,
    )


def domain_of_chassis(lists: Lists, serials: Collection[str]) -> str:
    """The domain that the chassis are in. Raises FabricUnavailable when they are in none, or in several."""
    domains = domains_of(lists)
    found = {domain for domain, theirs in domains.items() if not theirs.isdisjoint(serials)}
    if not found and len(domains) == 1:
        # An operator may register a rack under a serial that the switches do not report.
        found = set(domains)
    if len(found) != 1:
        told = ", ".join(sorted(found or domains)) or "none"
        raise FabricUnavailable(
            f"Hello: chassis {', '.join(sorted(serials))} are not of one domain; NMX-M names {told}"
        )
    return found.pop()


def domains_of(lists: Lists) -> dict[str, set[str]]:
    """Domain -> serials of its chassis."""
    found: dict[str, set[str]] = {}
    for one in lists.chassis:
        found.setdefault(same_uuid(one.domain_uuid), set()).add(one.serial_number.strip())
    for gpu in lists.gpus:
        serial = gpu.location_info.chassis_serial_number.strip()
        found.setdefault(same_uuid(gpu.domain_uuid), set()).add(serial)
    return {domain: serials - {""} for domain, serials in found.items()}


def same_uuid(text: str) -> str:
    """Domain uuid in lower case. Raises FabricUnavailable unless it is a uuid that names something."""
    try:
        domain = uuid.UUID(text)
    except ValueError:
        domain = uuid.UUID(int=0)
    if domain.int == 0:
        raise FabricUnavailable(f"Hello: domain uuid {text!r} names no domain")
    return str(domain)


def _partitions(lists: Lists, domain: str, names: Names) -> dict[int, Standing]:
    only_domain = len(domains_of(lists)) == 1
    entities = {gpu.id: same_uuid(gpu.domain_uuid) for gpu in lists.gpus}
    places = {_place(gpu): gpu.device_uid for gpu in lists.gpus}
    found: dict[int, Standing] = {}
    for one in lists.partitions:
        # A partition does not say which domain it is in; its members do.
        if not only_domain and domain not in _domains_of_members(one, entities):
            continue
        if not one.partition_id or one.partition_id in found:
            raise FabricUnavailable(f"GetPartitions: {one.name!r} has no number of its own in the domain")
        found[one.partition_id] = _standing(one, places, names)
    return {number: found[number] for number in sorted(found)}


def _domains_of_members(one: wire.Partition, entities: Mapping[str, str]) -> set[str]:
    return {
        same_uuid(member.domain_uuid) if isinstance(member, wire.Place) else entities.get(member, "")
        for member in one.members or ()
    }


def _standing(one: wire.Partition, places: Mapping[wire.Place, int], names: Names) -> Standing:
    members: dict[int, wire.Member] = {}
    empty: list[wire.Member] = []
    for member in one.members or ():
        guid = places.get(_canonical(member)) if isinstance(member, wire.Place) else names.guid(member)
        # A location without a GPU is an empty seat, not a member; it must still be in the full list.
        if guid is None:
            empty.append(member)
        else:
            members[guid] = member
    if len(members) + len(empty) != len(one.members or ()):
        raise FabricUnavailable(f"GetPartitions: {one.name!r} has a member twice")
    seen = ObservedPartition(
        id=one.partition_id,
        name=one.name,
        members=frozenset(members),
        health=_PARTITION_HEALTH.get(one.health, PartitionHealth.UNKNOWN),
        guid_based=one.type != "LOCATION_BASED",
        multicast_groups=0,
    )
    return Standing(entity=one.id, seen=seen, members=members, empty_seats=tuple(empty))


def _gpu(gpu: wire.Gpu, serials: Mapping[int, str]) -> ObservedGpu:
    where = gpu.location_info
    serial = where.chassis_serial_number or serials.get(where.chassis_id, "")
    return ObservedGpu(
        guid=gpu.device_uid,
        chassis_serial=serial.strip(),
        slot=where.slot_id,
        tray_index=where.tray_index,
        module_id=gpu.device_id,
        health=_GPU_HEALTH.get(gpu.health, GpuHealth.UNKNOWN),
    )


def _require_guids(gpus: Sequence[wire.Gpu]) -> None:
    guids = {gpu.device_uid for gpu in gpus}
    if 0 in guids or len(guids) != len(gpus):
        raise FabricUnavailable("GetGpus: GPUs without a GUID of their own")


def _require_nodes_filled(nodes: Iterable[wire.ComputeNode], gpus: Iterable[wire.Gpu], domain: str) -> None:
    seated = {_seat(gpu.location_info) for gpu in gpus}
    for node in nodes:
        if same_uuid(node.domain_uuid) != domain or node.health != "HEALTHY":
            continue
        if _seat(node.location_info) not in seated:
            slot = node.location_info.slot_id
            raise FabricUnavailable(f"GetGpus: the compute node in slot {slot} is healthy, but lists no GPU")


def _require_agreement(gpus: Iterable[wire.Gpu], partitions: Mapping[int, Standing]) -> None:
    """A partition that is missing from an observation would be taken for one that is gone."""
    for gpu in gpus:
        held_by = gpu.partition_id
        if held_by and (held_by not in partitions or gpu.device_uid not in partitions[held_by].members):
            raise FabricUnavailable(
                f"GetPartitions: GPU {gpu.device_uid:#x} is in partition {held_by}, which the list denies"
            )


def _seat(where: wire.LocationInfo) -> tuple[int, int, int]:
    return where.chassis_id, where.slot_id, where.host_id


def place_of(gpu: wire.Gpu) -> wire.Place:
    """The seat of a GPU, as a member of a location-based partition."""
    where = gpu.location_info
    return wire.Place(
        domain_uuid=gpu.domain_uuid,
        chassis_id=where.chassis_id,
        slot_id=where.slot_id,
        host_id=where.host_id,
        device_id=gpu.device_id,
    )


def _place(gpu: wire.Gpu) -> wire.Place:
    return _canonical(place_of(gpu))


def _canonical(place: wire.Place) -> wire.Place:
    return msgspec.structs.replace(place, domain_uuid=same_uuid(place.domain_uuid))


def _stand_in(entity: str) -> int:
    return int.from_bytes(hashlib.blake2b(entity.encode(), digest_size=8).digest())
