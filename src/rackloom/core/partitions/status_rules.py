"""Status rules: what an observation supports saying about a GPU, an interface, an instance or a drain.

Each `why_not_...` function returns the reason why the good claim cannot be made, or None when it holds:

- joined: the GPU is in exactly one partition, the one made for its logical partition, and that
  partition holds no GPU of another tenant or of an unknown machine. A GPU without NVLink shares no
  memory.
- isolated: a GPU that joins no logical partition shares memory with no other tenant.
- released: the GPU has left the site's partitions, and no open operation may still join it.
- drained: the GPU is in no partition of the site, those for free GPUs included.

A claim needs an observation that began at or after the moment of the request, and that does not contradict
itself about the GPU. Where several controllers
of a domain were read, the claim must hold in each reading, because it cannot be known which controller
leads. A recorded blocker is appended to the reason. Tenants read partition numbers, not the names of
other owners' partitions.

Here is also the only rule of how long a reading counts as evidence of the present. Two ages matter:

- `valid_seconds`: from this age on a reading is no evidence of the present state. Every reader of the records
  applies it at the time of its own reading, so it needs no write. It holds with a full disk, a read-only
  database, a reconciler that hangs, a process that was stopped and resumed, and after a restart.
- `READING_VALID_SECONDS`: how much older than another reading of the same domain a reading may be and still
  count beside it. It bounds the first age too: no reading counts alone that would not count beside another.

A reconciler that works reads each domain once in an interval, or records that it could not. A reading is
then at most one interval and the time of one reading old. Two more intervals allow for a pass that waited
for its turn, or had operations to carry out.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import msgspec

from rackloom.core.partitions.domain import (
    DEFAULT_PARTITION_ID,
    UNCERTAIN_REASON,
    DefaultPartitionPolicy,
    DomainObservation,
    ObservedPartition,
    is_tray_partition,
)
from rackloom.core.partitions.planner import NO_NVLINK

# How long a reading counts.


READING_VALID_SECONDS = 600.0
"""A reading that is this much older than another is no evidence: its controller is not read."""
INTERVALS = 3
READ_SECONDS = 40.0
"""Bound on one reading: every protocol reads a domain in four calls with a deadline of ten seconds. NMX-C has
five calls, of which two have a deadline of five."""
DEFAULT_INTERVAL = 60.0
"""Seconds between two passes over a domain if the configuration does not set them."""


def valid_seconds(interval: float) -> float:
    """The age at which a reading is outdated, if each domain is read every `interval` seconds."""
    return min(INTERVALS * interval + READ_SECONDS, READING_VALID_SECONDS)


DEFAULT_VALID_SECONDS = valid_seconds(DEFAULT_INTERVAL)


# The claims.


WAITING_REASON = "waiting for the switch controller to be read after this was asked for"
MOST_NAMED = 4
"""Partitions that a sentence about one GPU names."""
NO_GPUS_REASON = "the switch controller lists no GPU: it is a standby, or the rack is empty"


def holders(observation: DomainObservation) -> dict[int, tuple[ObservedPartition, ...]]:
    """The partitions that hold each GPU."""
    found: dict[int, list[ObservedPartition]] = defaultdict(list)
    for partition in observation.partitions:
        for guid in partition.members:
            found[guid].append(partition)
    return {guid: tuple(holding) for guid, holding in found.items()}


class DomainFacts(msgspec.Struct, frozen=True, kw_only=True):
    """An observation together with the site's records of its GPUs and partitions."""

    observation: DomainObservation | None
    doubt: str
    """Why there is no observation, when there is none."""
    owned: Mapping[str, str]
    """Partition name -> logical partition that the site made it for."""
    lost: frozenset[str]
    """Names of partitions of the site that the newest list omits although they were not deleted."""
    blocked: Mapping[int, str]
    """Fabric GUID -> why the intent for the GPU cannot be met."""
    tenant_of: Mapping[int, str]
    """Fabric GUID -> tenant of the instance on the GPU's machine."""
    managed: frozenset[int]
    """Fabric GUIDs of all machines of the site in this domain."""
    default_partition: DefaultPartitionPolicy
    holders: Mapping[int, tuple[ObservedPartition, ...]] = {}
    """Fabric GUID -> the partitions that hold it."""
    joining: frozenset[int] = frozenset()
    """Fabric GUIDs that an operation without an answer may yet put into a partition."""
    present: frozenset[int] = frozenset()
    """Fabric GUIDs that the controller listed."""
    uncertain: frozenset[int] = frozenset()
    """Fabric GUIDs for which the controller contradicts itself about the partition."""
    no_nvlink: frozenset[int] = frozenset()
    """Fabric GUIDs of GPUs that the controller reports as NO_NVLINK."""
    others: tuple["DomainFacts", ...] = ()
    """The same facts as read from each other controller of the domain."""


class DesiredGpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU of an instance, and the logical partition that its tenant wants for it."""

    device_instance: int
    guid: int | None
    logical_partition: str | None
    intent_at: float
    tenant: str


def why_not_joined(gpu: DesiredGpu, facts: DomainFacts) -> str | None:
    """Why the GPU cannot be reported as sharing memory with its logical partition and with no other GPU."""
    return _first_reason(facts, partial(_not_joined, gpu))


def _not_joined(gpu: DesiredGpu, facts: DomainFacts) -> str | None:
    if (reason := _not_observed_since(gpu.intent_at, gpu.guid, facts)) is not None:
        return reason
    if gpu.guid is None or gpu.guid not in facts.present:
        return "the switch controller does not report this GPU"
    holding = facts.holders.get(gpu.guid, ())
    if not holding:
        return _with_blocker("the GPU is in no partition yet", gpu.guid, facts)
    # By the recorded name: a partition of another owner may hold all the right GPUs, and proves nothing.
    if len(holding) > 1 or facts.owned.get(holding[0].name) != gpu.logical_partition:
        return _with_blocker(f"the GPU is still in partition {_numbers(holding)}", gpu.guid, facts)
    if reason := _foreign_member(holding[0], gpu.tenant, facts):
        return reason
    # Membership is not enough without NVLink. A GPU with degraded NVLink does share memory.
    if gpu.guid in facts.no_nvlink:
        name = holding[0].name
        return f"{NO_NVLINK.reason}: the GPU is in partition {name}, and shares no memory in it"
    return None


def why_not_isolated(gpu: DesiredGpu, facts: DomainFacts) -> str | None:
    """Why a GPU that joins no logical partition cannot be reported as isolated from other tenants."""
    return _first_reason(facts, partial(_not_isolated, gpu))


def _not_isolated(gpu: DesiredGpu, facts: DomainFacts) -> str | None:
    if (reason := _not_observed_since(gpu.intent_at, gpu.guid, facts)) is not None:
        return reason
    holding, keeps = _partitions_of(gpu.guid, facts), facts.default_partition is DefaultPartitionPolicy.KEEP
    # Two kinds of partition are no fault: one of the tray, and the default partition under KEEP.
    of_tray = [partition for partition in holding if _is_of_tray(partition, facts)]
    foreign = [
        partition
        for partition in holding
        if partition not in of_tray and not (keeps and partition.id == DEFAULT_PARTITION_ID)
    ]
    if foreign:
        return _with_blocker(f"the GPU is still in partition {_numbers(foreign)}", gpu.guid, facts)
    reasons = (_foreign_member(partition, gpu.tenant, facts) for partition in of_tray)
    return next((reason for reason in reasons if reason), None)


def why_not_released(
    guid: int | None, logical_partition: str | None, since: float, facts: DomainFacts
) -> str | None:
    """Why the GPU cannot be reported as released from one logical partition, or from all (None)."""
    return _first_reason(facts, partial(_not_released, guid, logical_partition, since))


def _not_released(
    guid: int | None, logical_partition: str | None, since: float, facts: DomainFacts
) -> str | None:
    if guid is None:
        # No controller ever reported it, so no operation can have put it into a partition.
        return None
    if (reason := _not_observed_since(since, guid, facts)) is not None:
        return reason
    # An operation without an answer may reach the switch after this reading.
    if guid in facts.joining:
        return "an operation that joins the GPU may still be carried out"
    # The partition of its tray is where a released GPU belongs.
    ours = [
        partition
        for partition in _partitions_of(guid, facts)
        if partition.name in facts.owned
        and not _is_of_tray(partition, facts)
        and logical_partition in (None, facts.owned[partition.name])
    ]
    if ours:
        return _with_blocker(f"the GPU is still in partition {_names(ours)}", guid, facts)
    if facts.lost and guid not in facts.present:
        # A GUID-based partition keeps the names of GPUs that are away, also while a list omits it.
        missing = _first_of(sorted(facts.lost))
        return f"the switch controller lists neither the GPU nor partition {missing}, which may hold it"
    # An empty list proves nothing about a GPU that is away.
    return None if facts.present else NO_GPUS_REASON


def why_not_drained(guid: int | None, since: float, facts: DomainFacts) -> str | None:
    """Why the GPU cannot be reported as drained: in no partition of the site, not even one for free GPUs."""
    return _first_reason(facts, partial(_not_drained, guid, since))


def _not_drained(guid: int | None, since: float, facts: DomainFacts) -> str | None:
    # A release ends with tenants' partitions. A drain also ends those that hold free GPUs.
    if (reason := _not_released(guid, None, since, facts)) is not None:
        return reason
    kept = [
        partition
        for partition in _partitions_of(guid, facts)
        if partition.id == DEFAULT_PARTITION_ID or _is_of_tray(partition, facts)
    ]
    return _with_blocker(f"the GPU is still in partition {_names(kept)}", guid, facts) if kept else None


def _first_reason(facts: DomainFacts, why_not: Callable[[DomainFacts], str | None]) -> str | None:
    """The first reason in any reading: each controller may lead, so the claim must hold in all."""
    reasons = (why_not(reading) for reading in (facts, *facts.others))
    return next((reason for reason in reasons if reason is not None), None)


def _not_observed_since(since: float, guid: int | None, facts: DomainFacts) -> str | None:
    """A claim needs an observation that began at or after the request, and shows the GPU."""
    if facts.observation is None:
        return facts.doubt
    # A GPU that the reading does not list may be in a partition that a contradictory list omits.
    if guid in facts.uncertain or (facts.uncertain and guid not in facts.present):
        return f"unknown: {UNCERTAIN_REASON}"
    return WAITING_REASON if facts.observation.observed_at < since else None


def is_unknown(guids: Iterable[int | None], facts: DomainFacts) -> bool:
    """Whether it is unknown where any of the GPUs is: no reading is valid, or one contradicts itself."""
    # Any controller of the domain may lead, so the doubt of one is enough.
    uncertain = facts.uncertain.union(*(reading.uncertain for reading in facts.others))
    return facts.observation is None or not uncertain.isdisjoint(guids)


def _with_blocker(what: str, guid: int | None, facts: DomainFacts) -> str:
    blocked = None if guid is None else facts.blocked.get(guid)
    return what if blocked is None else f"{what}: {blocked}"


def _partitions_of(guid: int | None, facts: DomainFacts) -> tuple[ObservedPartition, ...]:
    return () if guid is None else facts.holders.get(guid, ())


def _is_of_tray(partition: ObservedPartition, facts: DomainFacts) -> bool:
    """Whether the site keeps free GPUs of one tray there."""
    return is_tray_partition(facts.owned.get(partition.name, ""))


def _foreign_member(partition: ObservedPartition, tenant: str, facts: DomainFacts) -> str | None:
    for guid in sorted(partition.members):
        if facts.tenant_of.get(guid, tenant) != tenant:
            return f"partition {partition.name} also holds a GPU of another tenant"
        # A member that the controller no longer lists has no hardware, and reads no memory.
        if guid in facts.present and guid not in facts.managed:
            return f"partition {partition.name} also holds a GPU of no machine of this site"
    return None


def _names(partitions: Iterable[ObservedPartition]) -> str:
    return _first_of([partition.name for partition in partitions])


def _numbers(partitions: Iterable[ObservedPartition]) -> str:
    # By number: a tenant reads this, and a name would show the owner of the partition.
    return _first_of([str(partition.id) for partition in partitions])


def _first_of(partitions: Sequence[str]) -> str:
    """All of a few. Of many the first, and the number of the others: it is stored for each GPU."""
    named = " and ".join(partitions[:MOST_NAMED])
    more = len(partitions) - MOST_NAMED
    return f"{named} and {more} more" if more > 0 else named
