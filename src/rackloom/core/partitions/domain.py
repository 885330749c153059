"""Values of one NVLink domain, and which partition wants and holds each GPU.

GPUs are keyed by fabric GUID (NMX-C gpu_uid), the only identifier that a switch controller accepts in a
GUID-based partition.

`DomainObservation` is one complete reading of the domain by its switch controller. A partial reading is no
observation. Its `facts` are everything but the time, in canonical order: a plan is current as long as they
are equal. `DomainIntent` is the desired state: assignments of GPUs to logical partitions, the partitions that
the site made, the GPUs that it manages, the policy for the factory default partition, pauses and drains.
`PartitionPlan` lists operations in execution order, and the GPUs that cannot be served with reason and fix.

The planner and the safety check read intent and observation with these functions:

1. `read_desired_partitions` sorts the assignments of an intent. A GPU assigned to two logical partitions,
   or to one that has GPUs of several tenants, is contradictory: it is neither added nor removed, because
   both would be a guess about a tenant's memory.
2. `with_tray_partitions` applies the `tray` policy: unassigned GPUs share memory with the rest of their
   tray only. A tray is one host with one tenant, so a partition within a tray never joins two tenants. To
   the planner a tray is a logical partition of the site. Trays are served in order while the domain's
   partition limit allows.
3. `read_layout` sorts the observed partitions by owner. A partition belongs to the site if the records
   hold its name and it is GUID-based. All others are left alone, except the factory default partition (by
   policy).
4. `doubtful_partitions` names the logical partitions that may have a partition which the observation omits.
   The planner and the safety check both call it: if they judged differently, one GPU could stop all plans.

A logical partition has one home partition per domain. If several exist, the one with most of its GPUs
stays the home, so that the fewest GPUs move. GUID-based partitions keep the names of absent GPUs. The
layout lists these, because only they may be removed without being on a managed machine.
"""

from collections import defaultdict
from collections.abc import Collection
from enum import IntEnum, StrEnum

import msgspec

DEFAULT_PARTITION_ID = 32766
"""NMX-C: id of the factory default partition. Ordinary ids run from 1 to 32765."""
MAX_PARTITION_ID = 2**31 - 1
"""The largest that a database takes. A controller that lists a larger one is broken, and is not believed."""


class GpuHealth(IntEnum):
    """NMX-C GpuHealth."""

    UNKNOWN = 0
    HEALTHY = 1
    DEGRADED = 2
    NO_NVLINK = 3
    DEGRADED_BANDWIDTH = 4


class PartitionHealth(IntEnum):
    """NMX-C PartitionHealth."""

    UNKNOWN = 0
    HEALTHY = 1
    DEGRADED_BANDWIDTH = 2
    DEGRADED = 3
    UNHEALTHY = 4


class DefaultPartitionPolicy(StrEnum):
    """The treatment of the factory default partition and of unassigned GPUs."""

    KEEP = "keep"
    """It stays, and GPUs return to it: full-rack, single-tenant sites (clique 32766)."""
    TRAY = "tray"
    """It is removed: GPUs without an assignment are in a partition of their tray's own."""
    NONE = "none"
    """It is removed: a GPU without an assignment is in no partition."""


class ObservedGpu(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A GPU as the switch controller reports it."""

    guid: int
    chassis_serial: str
    slot: int
    tray_index: int
    module_id: int
    health: GpuHealth


class ObservedPartition(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A partition as the switch controller reports it."""

    id: int
    name: str
    members: frozenset[int]
    """Fabric GUIDs."""
    health: PartitionHealth
    guid_based: bool
    """False: the partition is by location, and its members are the GPUs found there."""
    multicast_groups: int


class DomainLimits(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The capacity that the controller reports for the domain, or None if it reports none."""

    max_partitions: int | None = None
    max_multicast_groups: int | None = None
    free_multicast_groups: int | None = None
    """Multicast groups that no partition has. A number that is not reported may read as 0 (proto3)."""
    max_compute_nodes: int | None = None
    max_gpus_per_compute_node: int | None = None


class DomainObservation(msgspec.Struct, frozen=True, kw_only=True):
    """One complete, successful reading of a domain. A partial reading is no observation."""

    domain: str
    """Domain uuid from the ServerHello header."""
    gpus: tuple[ObservedGpu, ...]
    partitions: tuple[ObservedPartition, ...]
    limits: DomainLimits
    observed_at: float
    """Seconds since the epoch, taken before the first call: what changed later may be missing."""
    uncertain: frozenset[int] = frozenset()
    """Fabric GUIDs for which the lists contradict each other about the partition."""

    @property
    def facts(self) -> tuple[object, ...]:
        """The base of a plan: everything but the time, in a canonical order."""
        return (
            self.domain,
            tuple(sorted(self.gpus, key=lambda gpu: gpu.guid)),
            tuple(sorted(self.partitions, key=lambda partition: partition.id)),
            self.limits,
            self.uncertain,
        )

    @property
    def used_multicast_groups(self) -> int | None:
        """Multicast groups that partitions have. None if the controller does not report it.

        A number that is not reported reads as 0. So "no group is free" is believed only if the partitions
        have all of them.
        """
        limit, free = self.limits.max_multicast_groups, self.limits.free_multicast_groups
        # More free groups than there are: one of the two numbers is wrong, and which one is unknown.
        if limit is None or free is None or free > limit:
            return None
        if free == 0 and sum(partition.multicast_groups for partition in self.partitions) < limit:
            return None
        return limit - free


def as_known(partition: ObservedPartition, uncertain: Collection[int]) -> ObservedPartition:
    """The partition, with unknown health if it is uncertain whether it has all of its members."""
    if partition.members.isdisjoint(uncertain):
        return partition
    return msgspec.structs.replace(partition, health=PartitionHealth.UNKNOWN)


UNCERTAIN_REASON = "the switch controller contradicts itself about the partition of this GPU"


class OwnedPartition(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A partition that the site made, or has begun to make. Ownership is by recorded name."""

    name: str
    logical_partition: str
    """A tenant's, or a tray (`plan.trays`)."""
    partition_id: int | None
    """None until an observation showed the partition under this name."""


class GpuAssignment(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The logical partition that a tenant wants a GPU in."""

    guid: int
    logical_partition: str
    tenant: str


class DomainIntent(msgspec.Struct, frozen=True, kw_only=True):
    """The desired state of one domain. GPUs without an assignment shall be in no tenant's partition."""

    domain: str
    assignments: tuple[GpuAssignment, ...]
    owned: tuple[OwnedPartition, ...]
    managed: frozenset[int]
    """GUIDs of GPUs on machines known to the site. No other GPU is ever touched."""
    default_partition: DefaultPartitionPolicy
    revision: int
    """Grows with every change of intent in the store."""
    paused: str | None = None
    """The reason why an operator has paused the domain, so that nothing changes in it, or None."""
    drained: frozenset[int] = frozenset()
    """GUIDs of GPUs on drained trays: in no partition of the site, whatever its policy for free ones."""


class RemoveGpus(msgspec.Struct, frozen=True, tag="remove-gpus", kw_only=True):
    """Take GPUs out of a partition that keeps other members."""

    partition_id: int
    name: str
    guids: tuple[int, ...]


class DeletePartition(msgspec.Struct, frozen=True, tag="delete-partition", kw_only=True):
    """Delete a partition that would be empty, or the factory default partition."""

    partition_id: int
    name: str


class CreatePartition(msgspec.Struct, frozen=True, tag="create-partition", kw_only=True):
    """Create a partition with its first members. The controller chooses the id."""

    name: str
    logical_partition: str
    guids: tuple[int, ...]


class AddGpus(msgspec.Struct, frozen=True, tag="add-gpus", kw_only=True):
    """Put GPUs into an existing partition."""

    partition_id: int
    name: str
    guids: tuple[int, ...]


PartitionOperation = RemoveGpus | DeletePartition | CreatePartition | AddGpus


def is_carried_out(operation: PartitionOperation, observation: DomainObservation) -> bool:
    """Whether `observation` shows the result of `operation`."""
    # By name, not by id: the controller chooses the id of a create, so the request has none.
    members = {partition.name: partition.members for partition in observation.partitions}
    present = members.get(operation.name)
    match operation:
        case DeletePartition():
            return present is None
        case RemoveGpus():
            return present is None or present.isdisjoint(operation.guids)
        case CreatePartition() | AddGpus():
            return present is not None and present.issuperset(operation.guids)


class BlockedGpus(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs whose desired state the plan does not reach, and why."""

    guids: tuple[int, ...]
    reason: str
    fix: str | None
    """The nearest change that would unblock them, or None if there is none."""


class PartitionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Operations in the order in which they are executed.

    A plan holds removals or additions, never both: additions are planned from an observation that shows
    the removals done, so that no GPU is ever wanted in two partitions.
    """

    observation: DomainObservation
    intent_revision: int
    operations: tuple[PartitionOperation, ...]
    blocked: tuple[BlockedGpus, ...]


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
    # name was made by another writer, and takes no GUIDs.
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
    """The logical partition of the GPU's tray, or None if its chassis has no usable serial."""
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
