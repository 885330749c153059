"""Values of one NVLink domain: observation, intent, plan and operations; partition names.

GPUs are keyed by fabric GUID (NMX-C gpu_uid), the only identifier that a switch controller accepts in a
GUID-based partition.

`DomainObservation` is one complete reading of the domain by its switch controller; a partial reading is
no observation. A controller lists GPUs and partitions one after the other, and the two lists may contradict
each other: `contradicted_gpus` names the GPUs about whose partition nothing is known then. All others are as
listed. Its `facts` are everything but the time, in canonical order: a plan is current as long as
they are equal. `DomainIntent` is what the site wants: assignments of GPUs to logical partitions, the
partitions that the site made, the GPUs that it manages, the policy for the factory default partition,
pauses and drains.

`PartitionPlan` lists operations in execution order, and the GPUs that cannot be served with reason and
fix. It holds removals or additions, never both.

Ownership of a partition is by its recorded name. The controller chooses the id only after the request,
and a reply can be lost, so the name (`rl-<logical partition>`) is the only link between a switch and the
records. NMX-C allows 1 to 255 printable ASCII characters and reserves the name of the default partition
(id 32766).
"""

from collections import Counter
from collections.abc import Collection, Mapping
from enum import IntEnum, StrEnum

import msgspec

DEFAULT_PARTITION_ID = 32766
"""NMX-C: id of the factory default partition; ordinary ids run from 1 to 32765."""
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
    """What happens to the factory default partition and to unassigned GPUs."""

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
    """The capacity that the controller reports for the domain; None where it reports none."""

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
    """Fabric GUIDs about whose partition the lists contradict each other."""

    @property
    def facts(self) -> tuple[object, ...]:
        """What a plan rests on: everything but the time, in a canonical order."""
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


def contradicted_gpus(claims: Mapping[int, int], partitions: Collection[ObservedPartition]) -> frozenset[int]:
    """The GPUs whose partition is uncertain. `claims`: fabric GUID -> id of the partition that the GPU names.

    A GPU is contradicted when the partition that it names does not list it, or several partitions do. What
    else these partitions hold is uncertain too: the GPU may share memory with all of them. Id 0 contradicts
    nothing: ids begin at 1, and 0 is what a field without a value reads as (proto3).
    """
    members = {partition.id: partition.members for partition in partitions}
    denied = {
        guid for guid, number in claims.items() if number and guid not in members.get(number, frozenset())
    }
    listings = Counter(guid for guids in members.values() for guid in guids)
    denied |= {guid for guid, times in listings.items() if times > 1}
    # Both sides of a contradiction are concerned: the partition that the GPU names, and those that list it.
    concerned = {claims[guid] for guid in denied & claims.keys()}
    concerned |= {number for number, guids in members.items() if not denied.isdisjoint(guids)}
    # One step is enough: a GPU that both lists place alike ties no further partition to these.
    listed = (members[number] for number in concerned & members.keys())
    naming = {guid for guid, number in claims.items() if number in concerned}
    return frozenset(naming).union(*listed)


def as_known(partition: ObservedPartition, uncertain: Collection[int]) -> ObservedPartition:
    """The partition; with unknown health where it is uncertain whether it has all of its members."""
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
    """GUIDs of GPUs on machines known to the site; no other GPU is ever touched."""
    default_partition: DefaultPartitionPolicy
    revision: int
    """Grows with every change of intent in the store."""
    paused: str | None = None
    """Why an operator has paused the domain, in which nothing is changed; None: it is not paused."""
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
    """Create a partition with its first members; the controller chooses the id."""

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
    """Whether `observation` shows what `operation` asks for."""
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
    """The nearest change that would unblock them; None where there is none."""


class PartitionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Operations in the order in which they are executed.

    A plan holds removals or additions, never both: additions are planned from an observation that shows
    the removals done, so that no GPU is ever wanted in two partitions.
    """

    observation: DomainObservation
    intent_revision: int
    operations: tuple[PartitionOperation, ...]
    blocked: tuple[BlockedGpus, ...]


# Names of partitions.


RESERVED_NAME = "Default Partition"
"""NMX-C: no other partition may have the name of the factory default partition."""
MAX_NAME_LENGTH = 255
"""NMX-C: names have up to 255 ASCII characters."""


def partition_name(logical_partition: str) -> str:
    """Name of the physical partition of `logical_partition`, unique in a domain as there is one in each.

    Names are a domain's own: the same logical partition has the same name in every domain that it reaches.
    """
    return f"rl-{logical_partition}"


def name_flaw(name: str) -> str | None:
    """Why a controller would refuse `name`, or None."""
    # Checked before the request, because the name is the only link between a switch and the records.
    if not name or not name.isascii() or not name.isprintable() or len(name) > MAX_NAME_LENGTH:
        return f"a partition name has 1 to {MAX_NAME_LENGTH} printable ASCII characters"
    if name == RESERVED_NAME:
        return "the name is reserved for the factory default partition"
    return None
