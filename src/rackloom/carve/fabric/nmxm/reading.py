"""Builds one observed domain from the lists of NMX-M, with the entities by which it is changed.

NMX-M may speak for several domains. A domain is chosen by its uuid or by the chassis that are
registered for the endpoint. The members of a partition name its domain, and the partition does not.

The lists are read one after the other and were seen to lag behind each other. `read_domain` raises
`FabricUnavailable` when they cannot all be true: GPUs without a unique GUID, a healthy compute node
without GPUs, or a partition number used twice. A GPU whose partition does not list it is uncertain, with
all that shares these partitions.

A partition keeps naming GPUs that are absent. `GpuGuids` remembers the GUID of every GPU that was ever
listed, and gives an unknown entity a placeholder GUID. A location without a GPU is an empty location:
not a member, but part of the full member list that a change must send.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence

import msgspec

from rackloom.carve.fabric.controller import FabricUnavailable, canonical_domain, contradicted_gpus
from rackloom.carve.fabric.nmxm import protocol
from rackloom.core.partitions.domain import (
    MAX_PARTITION_ID,
    GpuHealth,
    ObservedGpu,
    ObservedPartition,
    PartitionHealth,
)

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
"""Any other value is unknown: NEW, and values that later versions may add."""


class NmxmLists(msgspec.Struct, frozen=True, kw_only=True):
    """The complete lists of an NMX-M, which may have several domains."""

    chassis: Sequence[protocol.NmxmChassis]
    nodes: Sequence[protocol.NmxmComputeNode]
    gpus: Sequence[protocol.NmxmGpu]
    partitions: Sequence[protocol.NmxmPartition]


class PartitionState(msgspec.Struct, frozen=True, kw_only=True):
    """A partition with the entity and the members by which it is changed."""

    entity: str
    partition: ObservedPartition
    members: Mapping[int, protocol.PartitionMember]
    """Fabric GUID -> the member in NMX-M. Locations without a GPU are in `empty_locations`."""
    empty_locations: tuple[protocol.PartitionMember, ...]

    @property
    def membership(self) -> tuple[str, frozenset[protocol.PartitionMember]]:
        """Entity and members: what must not have changed when the full list of members is replaced."""
        return self.entity, frozenset(self.members.values()) | frozenset(self.empty_locations)


class DomainReading(msgspec.Struct, frozen=True, kw_only=True):
    """One domain, read completely."""

    domain: str
    gpus: tuple[ObservedGpu, ...]
    entities: Mapping[int, protocol.NmxmGpu]
    """Fabric GUID -> the GPU in NMX-M."""
    partitions: Mapping[int, PartitionState]
    """The partitions by number."""
    uncertain: frozenset[int]
    """Fabric GUIDs of GPUs about which the lists contradict each other."""

    def named(self, name: str) -> PartitionState | None:
        """The partition of this name, if there is one."""
        return next(
            (partition for partition in self.partitions.values() if partition.partition.name == name), None
        )

    def held(self) -> frozenset[int]:
        """GPUs in any partition."""
        return frozenset(
            guid for partition in self.partitions.values() for guid in partition.partition.members
        )


class GpuGuids(dict[str, int]):
    """GPU entity -> fabric GUID, of all GPUs ever listed: a partition keeps naming GPUs that are absent."""

    def guid(self, entity: str) -> int:
        """The fabric GUID. For a GPU that was never listed, a placeholder that no GPU has."""
        known = self.get(entity)
        if known is not None:
            return known
        return int.from_bytes(hashlib.blake2b(entity.encode(), digest_size=8).digest())


def read_domain(lists: NmxmLists, domain: str, names: GpuGuids) -> DomainReading:
    """The content of `domain` according to `lists`.

    The lists are read one after the other, and were seen to lag behind each other. Raises FabricUnavailable
    if one of them is incomplete. GPUs and partitions that contradict each other are `uncertain`.
    """
    mine = [gpu for gpu in lists.gpus if canonical_domain(gpu.domain_uuid) == domain]
    serials = {
        chassis.internal_id: chassis.serial_number
        for chassis in lists.chassis
        if canonical_domain(chassis.domain_uuid) == domain
    }
    guids = {gpu.device_uid for gpu in mine}
    if 0 in guids or len(guids) != len(mine):
        raise FabricUnavailable("GetGpus: GPUs without a GUID of their own")
    filled = {_tray_location(gpu.location_info) for gpu in mine}
    for node in lists.nodes:
        if canonical_domain(node.domain_uuid) != domain or node.health != "HEALTHY":
            continue
        if _tray_location(node.location_info) not in filled:
            slot = node.location_info.slot_id
            raise FabricUnavailable(f"GetGpus: the compute node in slot {slot} is healthy, but lists no GPU")
    names.update((gpu.id, gpu.device_uid) for gpu in lists.gpus)
    partitions = _partitions_of_domain(lists, domain, names)
    claims = {gpu.device_uid: gpu.partition_id for gpu in mine}
    return DomainReading(
        domain=domain,
        gpus=tuple(_observed_gpu(gpu, serials) for gpu in sorted(mine, key=lambda gpu: gpu.device_uid)),
        entities={gpu.device_uid: gpu for gpu in mine},
        partitions=partitions,
        uncertain=contradicted_gpus(claims, [state.partition for state in partitions.values()]),
    )


def domain_of_chassis(lists: NmxmLists, serials: Collection[str]) -> str:
    """The domain that the chassis are in. Raises FabricUnavailable when they are in none, or in several."""
    domains = domains_of(lists)
    found = {domain for domain, theirs in domains.items() if not theirs.isdisjoint(serials)}
    if not found and len(domains) == 1:
        # An operator may register a rack under a serial that the switches do not report.
        found = set(domains)
    if len(found) != 1:
        names = ", ".join(sorted(found or domains)) or "none"
        raise FabricUnavailable(
            f"Hello: chassis {', '.join(sorted(serials))} are not of one domain; NMX-M names {names}"
        )
    return found.pop()


def domains_of(lists: NmxmLists) -> dict[str, set[str]]:
    """Domain -> serials of its chassis."""
    found: dict[str, set[str]] = {}
    for chassis in lists.chassis:
        found.setdefault(canonical_domain(chassis.domain_uuid), set()).add(chassis.serial_number.strip())
    for gpu in lists.gpus:
        serial = gpu.location_info.chassis_serial_number.strip()
        found.setdefault(canonical_domain(gpu.domain_uuid), set()).add(serial)
    return {domain: serials - {""} for domain, serials in found.items()}


def _partitions_of_domain(lists: NmxmLists, domain: str, names: GpuGuids) -> dict[int, PartitionState]:
    only_domain = len(domains_of(lists)) == 1
    entities = {gpu.id: canonical_domain(gpu.domain_uuid) for gpu in lists.gpus}
    locations = {_canonical_location(member_location(gpu)): gpu.device_uid for gpu in lists.gpus}
    found: dict[int, PartitionState] = {}
    for partition in lists.partitions:
        # The members of a partition name its domain, and the partition does not.
        if not only_domain and domain not in _domains_of_members(partition, entities):
            continue
        if not 0 < partition.partition_id <= MAX_PARTITION_ID or partition.partition_id in found:
            raise FabricUnavailable(
                f"GetPartitions: {partition.name!r} has no number of its own in the domain"
            )
        found[partition.partition_id] = _partition_state(partition, locations, names)
    return {number: found[number] for number in sorted(found)}


def _domains_of_members(nmxm_partition: protocol.NmxmPartition, entities: Mapping[str, str]) -> set[str]:
    return {
        canonical_domain(member.domain_uuid)
        if isinstance(member, protocol.MemberLocation)
        else entities.get(member, "")
        for member in nmxm_partition.members or ()
    }


def _partition_state(
    nmxm_partition: protocol.NmxmPartition, locations: Mapping[protocol.MemberLocation, int], names: GpuGuids
) -> PartitionState:
    members: dict[int, protocol.PartitionMember] = {}
    empty: list[protocol.PartitionMember] = []
    for member in nmxm_partition.members or ():
        guid = (
            locations.get(_canonical_location(member))
            if isinstance(member, protocol.MemberLocation)
            else names.guid(member)
        )
        # A location without a GPU is empty, not a member. A change must still list it.
        if guid is None:
            empty.append(member)
        else:
            members[guid] = member
    if len(members) + len(empty) != len(nmxm_partition.members or ()):
        raise FabricUnavailable(f"GetPartitions: {nmxm_partition.name!r} has a member twice")
    observed = ObservedPartition(
        id=nmxm_partition.partition_id,
        name=nmxm_partition.name,
        members=frozenset(members),
        health=_PARTITION_HEALTH.get(nmxm_partition.health, PartitionHealth.UNKNOWN),
        guid_based=nmxm_partition.type != "LOCATION_BASED",
        multicast_groups=0,
    )
    return PartitionState(
        entity=nmxm_partition.id, partition=observed, members=members, empty_locations=tuple(empty)
    )


def _observed_gpu(gpu: protocol.NmxmGpu, serials: Mapping[int, str]) -> ObservedGpu:
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


def _tray_location(where: protocol.NmxmLocation) -> tuple[int, int, int]:
    return where.chassis_id, where.slot_id, where.host_id


def member_location(gpu: protocol.NmxmGpu) -> protocol.MemberLocation:
    """The location of a GPU, as a member of a location-based partition."""
    where = gpu.location_info
    return protocol.MemberLocation(
        domain_uuid=gpu.domain_uuid,
        chassis_id=where.chassis_id,
        slot_id=where.slot_id,
        host_id=where.host_id,
        device_id=gpu.device_id,
    )


def _canonical_location(location: protocol.MemberLocation) -> protocol.MemberLocation:
    return msgspec.structs.replace(location, domain_uuid=canonical_domain(location.domain_uuid))
