"""Which GPU is wanted in which partition, and which partition holds it now.

1. `read_desired_partitions` sorts the assignments of an intent. A GPU assigned to two logical partitions,
   or to one that has GPUs of several tenants, is contradictory: it is neither added nor removed, because
   both would be a guess about somebody's memory.
2. `with_tray_partitions` applies the `tray` policy: unassigned GPUs share memory with the rest of their
   tray only. A tray is one host with one tenant, so a partition within a tray never joins two tenants. To
   the planner a tray is a logical partition of the site. Trays are served in order while the domain's
   partition limit allows.
3. `read_layout` sorts the observed partitions by owner. A partition belongs to the site if the records
   hold its name and it is GUID-based. All others are left alone, except the factory default partition (by
   policy).

A logical partition has one home partition per domain. Where several exist, the one with most of its GPUs
stays the home, so that the fewest GPUs move. GUID-based partitions keep the names of absent GPUs; the
layout lists these, because only they may be removed without being on a managed machine.
"""

from collections import defaultdict
from collections.abc import Collection

import msgspec

from rackloom.core.partitions.domain import (
    DEFAULT_PARTITION_ID,
    DefaultPartitionPolicy,
    DomainIntent,
    DomainObservation,
    GpuHealth,
    ObservedGpu,
    ObservedPartition,
)

# Desired partition of each GPU.


class DesiredPartitions(msgspec.Struct, frozen=True):
    """Where GPUs are wanted, in the order of fabric GUIDs."""

    partition_of: dict[int, str]
    """GPU -> the logical partition that it is wanted in; a tray's where the policy puts free GPUs there."""
    contradictory: dict[int, str]
    """GPU -> why nothing is done about it. Such a GPU is neither added nor taken out: either would be a
    guess about somebody's memory."""

    @property
    def assigned(self) -> frozenset[int]:
        """All GPUs that somebody was given."""
        return frozenset(self.partition_of) | frozenset(self.contradictory)


def read_desired_partitions(intent: DomainIntent) -> DesiredPartitions:
    """Sort the assignments of `intent` into those that can be served and those that cannot be."""
    partitions: dict[int, set[str]] = defaultdict(set)
    tenants: dict[str, set[str]] = defaultdict(set)
    for assignment in intent.assignments:
        partitions[assignment.guid].add(assignment.logical_partition)
        tenants[assignment.logical_partition].add(assignment.tenant)
    wanted: dict[int, str] = {}
    contradictory: dict[int, str] = {}
    for guid in sorted(partitions):
        first, *others = sorted(partitions[guid])
        if others:
            contradictory[guid] = f"assigned to logical partitions {', '.join([first, *others])} at once"
        elif len(tenants[first]) > 1:
            contradictory[guid] = f"logical partition {first} has GPUs of several tenants"
        else:
            wanted[guid] = first
    return DesiredPartitions(wanted, contradictory)


# Observed partitions by owner.


class SitePartition(msgspec.Struct, frozen=True):
    """A partition that the site made."""

    partition: ObservedPartition
    logical_partition: str
    is_home: bool
    """Whether it is the one physical partition that its logical partition has, or keeps, in this domain."""
    wanted: frozenset[int]
    """The members that belong there; none where it is not the home."""


class PartitionLayout(msgspec.Struct, frozen=True):
    """Who holds what."""

    ours: tuple[SitePartition, ...]
    """By partition id."""
    home: dict[str, SitePartition]
    """Logical partition -> its home."""
    default: ObservedPartition | None
    untouchable: dict[int, ObservedPartition]
    """GPU -> the partition that holds it and that is not ours to change."""
    held: frozenset[int]
    """GPUs in any partition."""
    absent: frozenset[int]
    """Members of partitions that the controller does not list as GPUs: their tray is away or was swapped, and
    a GUID-based partition keeps their names."""


def read_layout(
    intent: DomainIntent, observation: DomainObservation, wishes: DesiredPartitions
) -> PartitionLayout:
    """Sort the observed partitions by owner."""
    recorded = {one.name: one.logical_partition for one in intent.owned}
    default: ObservedPartition | None = None
    named: dict[str, list[ObservedPartition]] = defaultdict(list)
    for partition in sorted(observation.partitions, key=lambda one: one.id):
        if partition.id == DEFAULT_PARTITION_ID:
            default = partition
        elif _is_site_partition(partition, recorded):
            named[recorded[partition.name]].append(partition)
    ours = [
        site_partition
        for wanted, standing in named.items()
        for site_partition in _site_partitions_of(wanted, standing, wishes)
    ]
    held = frozenset(guid for partition in observation.partitions for guid in partition.members)
    return PartitionLayout(
        ours=tuple(sorted(ours, key=lambda our: our.partition.id)),
        home={our.logical_partition: our for our in ours if our.is_home},
        default=default,
        untouchable=foreign_partitions(intent, observation),
        held=held,
        absent=held - {gpu.guid for gpu in observation.gpus},
    )


def foreign_partitions(intent: DomainIntent, observation: DomainObservation) -> dict[int, ObservedPartition]:
    """GPU -> the partition that holds it and that is not ours to change."""
    recorded = {one.name for one in intent.owned}
    return {
        guid: partition
        for partition in sorted(observation.partitions, key=lambda one: one.id)
        if partition.id != DEFAULT_PARTITION_ID and not _is_site_partition(partition, recorded)
        for guid in partition.members
    }


def _is_site_partition(partition: ObservedPartition, recorded: Collection[str]) -> bool:
    # A location-based partition under our name was made by another hand: we make none, and it takes no GUIDs
    # (NMX-C fixes the type at creation).
    return partition.name in recorded and partition.guid_based


def _site_partitions_of(
    logical_partition: str, standing: list[ObservedPartition], wishes: DesiredPartitions
) -> list[SitePartition]:
    """The partitions of one logical partition. The one with most of its GPUs stays: the fewest are moved."""
    belonging = [
        frozenset(guid for guid in partition.members if wishes.partition_of.get(guid) == logical_partition)
        for partition in standing
    ]
    home = max(range(len(standing)), key=lambda index: (len(belonging[index]), -index))
    return [
        SitePartition(partition, logical_partition, index == home, members if index == home else frozenset())
        for index, (partition, members) in enumerate(zip(standing, belonging, strict=True))
    ]


# The `tray` policy for unassigned GPUs.


_TRAY_PREFIX = "tray-"
"""No logical partition of a tenant begins like this: their names are uuids."""
MAX_CHASSIS_SERIAL = 48
"""Characters, so that the name fits into the records."""


def is_tray_partition(logical_partition: str) -> bool:
    """Whether it is a tray's, not a tenant's."""
    return logical_partition.startswith(_TRAY_PREFIX)


def tray_partition_of(gpu: ObservedGpu) -> str | None:
    """What the GPU's tray is called among logical partitions; None where it cannot be told from another."""
    serial = gpu.chassis_serial
    if not serial or len(serial) > MAX_CHASSIS_SERIAL or not (serial.isascii() and serial.isprintable()):
        return None
    return f"{_TRAY_PREFIX}{serial}-{gpu.slot}"


def with_tray_partitions(
    wishes: DesiredPartitions, intent: DomainIntent, observation: DomainObservation
) -> DesiredPartitions:
    """The wishes of tenants, and with the `tray` policy those of trays with free GPUs, if there is room.

    A GPU in a partition that is not ours is left where it is, and one without NVLink is not brought in.
    """
    if intent.default_partition is not DefaultPartitionPolicy.TRAY:
        return wishes
    inside = _gpus_in_tray_partitions(intent, observation)
    movable = (
        intent.managed - intent.drained - wishes.assigned - foreign_partitions(intent, observation).keys()
    )
    free: dict[str, list[int]] = defaultdict(list)
    for gpu in observation.gpus:
        tray = tray_partition_of(gpu)
        works = gpu.health is not GpuHealth.NO_NVLINK or gpu.guid in inside
        if tray is not None and works and gpu.guid in movable:
            free[tray].append(gpu.guid)
    served = sorted(free)[: _partitions_left_for_trays(wishes, intent, observation)]
    trays = {guid: tray for tray in served for guid in free[tray]}
    return DesiredPartitions(dict(sorted({**wishes.partition_of, **trays}.items())), wishes.contradictory)


def _gpus_in_tray_partitions(intent: DomainIntent, observation: DomainObservation) -> frozenset[int]:
    names = {one.name for one in intent.owned if is_tray_partition(one.logical_partition)}
    return frozenset(
        guid for partition in observation.partitions if partition.name in names for guid in partition.members
    )


def _partitions_left_for_trays(
    wishes: DesiredPartitions, intent: DomainIntent, observation: DomainObservation
) -> int | None:
    """How many partitions tenants and strangers leave to trays; None where there is no limit."""
    limit = observation.limits.max_partitions
    if limit is None:
        return None
    names = {one.name for one in intent.owned}
    others = [
        partition
        for partition in observation.partitions
        if partition.name not in names or not partition.guid_based
    ]
    return max(0, limit - len(others) - len(set(wishes.partition_of.values())))
