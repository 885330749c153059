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
4. `doubtful_partitions` names the logical partitions that may have a partition which the observation omits.
   The planner and the safety check both ask it: if they judged differently, one GPU could stop all plans.

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
    """GPU -> why it is neither added nor taken out: either would be a guess about a tenant's memory."""

    @property
    def assigned(self) -> frozenset[int]:
        """All GPUs with an assignment."""
        return frozenset(self.partition_of) | frozenset(self.contradictory)


def read_desired_partitions(intent: DomainIntent) -> DesiredPartitions:
    """Sort the assignments of `intent` into those that can be served and those that cannot be."""
    # Read all assignments first: one of the last may contradict one of the first.
    partitions: dict[int, set[str]] = defaultdict(set)
    tenants: dict[str, set[str]] = defaultdict(set)
    for assignment in intent.assignments:
        partitions[assignment.guid].add(assignment.logical_partition)
        tenants[assignment.logical_partition].add(assignment.tenant)
    wanted: dict[int, str] = {}
    contradictory: dict[int, str] = {}
    # The order of GUIDs, not of assignments: equal intents give equal plans.
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
    intent: DomainIntent, observation: DomainObservation, desired: DesiredPartitions
) -> PartitionLayout:
    """Sort the observed partitions by owner."""
    recorded = {owned.name: owned.logical_partition for owned in intent.owned}
    default: ObservedPartition | None = None
    by_logical: dict[str, list[ObservedPartition]] = defaultdict(list)
    for partition in sorted(observation.partitions, key=lambda partition: partition.id):
        # By its fixed id, before any name: the site never made the default partition.
        if partition.id == DEFAULT_PARTITION_ID:
            default = partition
        elif _is_site_partition(partition, recorded):
            by_logical[recorded[partition.name]].append(partition)
    ours: list[SitePartition] = []
    for logical_partition, partitions in by_logical.items():
        wanted = [
            frozenset(
                guid for guid in partition.members if desired.partition_of.get(guid) == logical_partition
            )
            for partition in partitions
        ]
        # The partition with most of its GPUs stays the home, so that the fewest are moved. Of equals, it is
        # the one with the lowest id: every pass has to come to the same home.
        home = max(range(len(partitions)), key=lambda index: (len(wanted[index]), -index))
        for index, partition in enumerate(partitions):
            is_home = index == home
            belonging = wanted[index] if is_home else frozenset()
            ours.append(SitePartition(partition, logical_partition, is_home, belonging))
    held = frozenset(guid for partition in observation.partitions for guid in partition.members)
    return PartitionLayout(
        ours=tuple(sorted(ours, key=lambda our: our.partition.id)),
        home={our.logical_partition: our for our in ours if our.is_home},
        default=default,
        untouchable=foreign_partitions(recorded, observation),
        held=held,
        absent=held - {gpu.guid for gpu in observation.gpus},
    )


def foreign_partitions(
    recorded: Collection[str], observation: DomainObservation
) -> dict[int, ObservedPartition]:
    """GPU -> the partition that holds it and that is not ours to change; `recorded` are the names of ours."""
    return {
        guid: partition
        for partition in sorted(observation.partitions, key=lambda partition: partition.id)
        if partition.id != DEFAULT_PARTITION_ID and not _is_site_partition(partition, recorded)
        for guid in partition.members
    }


def _is_site_partition(partition: ObservedPartition, recorded: Collection[str]) -> bool:
    # The site makes no location-based partition, and NMX-C fixes the type at creation: one under a recorded
    # name was made by somebody else, and takes no GUIDs.
    return partition.name in recorded and partition.guid_based


# The `tray` policy for unassigned GPUs.


_TRAY_PREFIX = "tray-"
"""No logical partition of a tenant begins like this: their names are uuids."""
MAX_CHASSIS_SERIAL = 48
"""Characters, so that the name fits into the records."""


def is_tray_partition(logical_partition: str) -> bool:
    """Whether it is a tray's, not a tenant's."""
    return logical_partition.startswith(_TRAY_PREFIX)


def tray_partition_of(gpu: ObservedGpu) -> str | None:
    """The logical partition of the GPU's tray; None where its chassis has no usable serial."""
    serial = gpu.chassis_serial
    # The serial becomes a part of the partition's name, and has to obey the rules of names.
    if not serial or len(serial) > MAX_CHASSIS_SERIAL or not (serial.isascii() and serial.isprintable()):
        return None
    return f"{_TRAY_PREFIX}{serial}-{gpu.slot}"


def gpus_of_tray(tray: str, observation: DomainObservation) -> frozenset[int]:
    """The GPUs that the controller lists in the tray of a tray's logical partition."""
    return frozenset(gpu.guid for gpu in observation.gpus if tray_partition_of(gpu) == tray)


def with_tray_partitions(
    desired: DesiredPartitions, intent: DomainIntent, observation: DomainObservation
) -> DesiredPartitions:
    """With the `tray` policy, adds a partition for each tray with free GPUs, if there is room.

    A GPU in a foreign partition is left where it is, and one without NVLink is not added.
    """
    if intent.default_partition is not DefaultPartitionPolicy.TRAY:
        return desired
    # Partitions of trays that stand already, by the names in the records.
    tray_names = {owned.name for owned in intent.owned if is_tray_partition(owned.logical_partition)}
    inside = {
        guid
        for partition in observation.partitions
        if partition.name in tray_names
        for guid in partition.members
    }
    recorded = {owned.name for owned in intent.owned}
    foreign = foreign_partitions(recorded, observation)
    movable = intent.managed - intent.drained - desired.assigned - foreign.keys()
    free: dict[str, list[int]] = defaultdict(list)
    for gpu in observation.gpus:
        tray = tray_partition_of(gpu)
        # A GPU that lost NVLink inside its tray's partition stays: it is in the right place.
        works = gpu.health is not GpuHealth.NO_NVLINK or gpu.guid in inside
        if tray is not None and works and gpu.guid in movable:
            free[tray].append(gpu.guid)
    served = sorted(free)
    # Tenants come before trays. A tray gets only a partition that they and foreign partitions leave over.
    limit = observation.limits.max_partitions
    if limit is not None:
        others = sum(not _is_site_partition(partition, recorded) for partition in observation.partitions)
        served = served[: max(0, limit - others - len(set(desired.partition_of.values())))]
    trays = {guid: tray for tray in served for guid in free[tray]}
    # In the order of GUIDs again: a plan may depend on no other order.
    partition_of = dict(sorted({**desired.partition_of, **trays}.items()))
    return DesiredPartitions(partition_of, desired.contradictory)


# Logical partitions that an observation is in doubt about.


def doubtful_partitions(intent: DomainIntent, observation: DomainObservation) -> frozenset[str]:
    """The logical partitions that want an uncertain GPU; the policy's tray partitions count as well.

    The partition of such a logical partition may exist already, in a list that omits it. What else is known
    about the uncertain GPU, its health or who holds it, comes from the same lists and changes nothing.
    """
    assigned = {assignment.guid for assignment in intent.assignments}
    wanting = {
        assignment.logical_partition
        for assignment in intent.assignments
        if assignment.guid in observation.uncertain
    }
    # The policy does not matter here: where it makes no partition for a tray, no plan waits for one.
    free = observation.uncertain & intent.managed - intent.drained - assigned
    listed = (tray_partition_of(gpu) for gpu in observation.gpus if gpu.guid in free)
    return frozenset(wanting.union(tray for tray in listed if tray is not None))
