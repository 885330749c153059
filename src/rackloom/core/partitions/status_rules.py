"""Status rules: what an observation supports saying about a GPU, an interface, an instance or a drain.

Each `why_not_...` function returns the reason why the good claim cannot be made, or None when it holds:

- joined: the GPU is in exactly one partition, the one made for its logical partition, and that
  partition holds no GPU of another tenant or of an unknown machine. A GPU without NVLink shares no
  memory.
- isolated: a GPU that joins no logical partition shares memory with no other tenant.
- released: the GPU has left the site's partitions, and no open operation may still join it.
- drained: the GPU is in no partition of the site, those for free GPUs included.

A claim needs an observation that began at or after the moment of the request. Where several controllers
of a domain were read, the claim must hold in each reading, because it cannot be known which controller
leads. A recorded blocker is appended to the reason. Tenants read partition numbers, not the names of
other owners' partitions.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import msgspec

from rackloom.core.partitions.domain import (
    DEFAULT_PARTITION_ID,
    DefaultPartitionPolicy,
    DomainObservation,
    ObservedPartition,
)
from rackloom.core.partitions.partition_layout import is_tray_partition
from rackloom.core.partitions.planner import NO_NVLINK

WAITING_REASON = "waiting for the switch controller to be read after this was asked for"
NO_GPUS_REASON = "the switch controller lists no GPU: it is a standby, or the rack is empty"


def holders(observation: DomainObservation) -> dict[int, tuple[ObservedPartition, ...]]:
    """Which partitions each GPU was seen in."""
    found: dict[int, tuple[ObservedPartition, ...]] = {}
    for partition in observation.partitions:
        for guid in partition.members:
            found[guid] = (*found.get(guid, ()), partition)
    return found


class DomainFacts(msgspec.Struct, frozen=True, kw_only=True):
    """An observation together with what the records say about the GPUs and partitions in it."""

    observation: DomainObservation | None
    doubt: str
    """Why there is no observation, when there is none."""
    owned: Mapping[str, str]
    """Partition name -> logical partition that the site made it for."""
    lost: frozenset[str]
    """Names of ours that the newest list omits although nobody deleted the partition."""
    blocked: Mapping[int, str]
    """Fabric GUID -> what stands in the way of what is wanted of the GPU."""
    tenant_of: Mapping[int, str]
    """Fabric GUID -> tenant whose instance has the GPU's machine."""
    managed: frozenset[int]
    """Fabric GUIDs of all machines of the site in this domain."""
    default_partition: DefaultPartitionPolicy
    holders: Mapping[int, tuple[ObservedPartition, ...]] = {}
    """Fabric GUID -> the partitions it was seen in."""
    joining: frozenset[int] = frozenset()
    """Fabric GUIDs that an operation without an answer may yet put into a partition."""
    present: frozenset[int] = frozenset()
    """Fabric GUIDs that the controller listed."""
    no_nvlink: frozenset[int] = frozenset()
    """Fabric GUIDs of which the controller says that they have no NVLink."""
    others: tuple["DomainFacts", ...] = ()
    """The same with what each other controller showed that stands."""


class DesiredGpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU of an instance, and where its tenant wants it."""

    device_instance: int
    guid: int | None
    logical_partition: str | None
    intent_at: float
    tenant: str


def why_not_joined(gpu: DesiredGpu, facts: DomainFacts) -> str | None:
    """Why it cannot be said that the GPU shares memory with its logical partition, and with nobody else."""
    return _first_reason(facts, partial(_not_joined, gpu))


def _not_joined(gpu: DesiredGpu, facts: DomainFacts) -> str | None:
    if facts.observation is None:
        return facts.doubt
    if facts.observation.observed_at < gpu.intent_at:
        return WAITING_REASON
    if gpu.guid is None or gpu.guid not in facts.present:
        return "the switch controller does not report this GPU"
    seen = facts.holders.get(gpu.guid, ())
    if not seen:
        return _with_blocker("the GPU is in no partition yet", gpu.guid, facts)
    if len(seen) > 1 or facts.owned.get(seen[0].name) != gpu.logical_partition:
        return _with_blocker(f"the GPU is still in partition {_numbers(seen)}", gpu.guid, facts)
    return _foreign_member(seen[0], gpu.tenant, facts) or _without_nvlink(seen[0], gpu.guid, facts)


def why_not_isolated(gpu: DesiredGpu, facts: DomainFacts) -> str | None:
    """Why it cannot be said that a GPU that joins no logical partition shares memory with nobody."""
    return _first_reason(facts, partial(_not_isolated, gpu))


def _not_isolated(gpu: DesiredGpu, facts: DomainFacts) -> str | None:
    if facts.observation is None:
        return facts.doubt
    if facts.observation.observed_at < gpu.intent_at:
        return WAITING_REASON
    seen = _partitions_of(gpu.guid, facts)
    strange = [one for one in seen if not (_is_kept_default(one, facts) or _is_of_tray(one, facts))]
    if strange:
        return _with_blocker(f"the GPU is still in partition {_numbers(strange)}", gpu.guid, facts)
    reasons = (_foreign_member(one, gpu.tenant, facts) for one in seen if _is_of_tray(one, facts))
    return next((reason for reason in reasons if reason), None)


def why_not_released(
    guid: int | None, logical_partition: str | None, since: float, facts: DomainFacts
) -> str | None:
    """Why it cannot be said that the GPU has left our partitions: of one logical partition, or all (None)."""
    return _first_reason(facts, partial(_not_released, guid, logical_partition, since))


def _not_released(
    guid: int | None, logical_partition: str | None, since: float, facts: DomainFacts
) -> str | None:
    if guid is None:
        # It was never seen, so no operation can have put it anywhere.
        return None
    if facts.observation is None:
        return facts.doubt
    if facts.observation.observed_at < since:
        return WAITING_REASON
    if guid in facts.joining:
        return "an operation that joins the GPU may still be carried out"
    ours = [
        seen
        for seen in _partitions_of(guid, facts)
        if seen.name in facts.owned
        and not _is_of_tray(seen, facts)
        and logical_partition in (None, facts.owned[seen.name])
    ]
    if ours:
        return _with_blocker(f"the GPU is still in partition {_names(ours)}", guid, facts)
    if facts.lost and guid not in facts.present:
        # A GUID-based partition keeps the names of GPUs that are away, also while a list omits it.
        missing = " and ".join(sorted(facts.lost))
        return f"the switch controller lists neither the GPU nor partition {missing}, which may hold it"
    return None if facts.present else NO_GPUS_REASON


def why_not_drained(guid: int | None, since: float, facts: DomainFacts) -> str | None:
    """Why it cannot be said that the GPU is in no partition of the site, those for free GPUs included."""
    return _first_reason(facts, partial(_not_drained, guid, since))


def _not_drained(guid: int | None, since: float, facts: DomainFacts) -> str | None:
    reason = _not_released(guid, None, since, facts)
    if reason is not None:
        return reason
    kept = [
        partition
        for partition in _partitions_of(guid, facts)
        if partition.id == DEFAULT_PARTITION_ID or _is_of_tray(partition, facts)
    ]
    return _with_blocker(f"the GPU is still in partition {_names(kept)}", guid, facts) if kept else None


def _first_reason(facts: DomainFacts, why_not: Callable[[DomainFacts], str | None]) -> str | None:
    """The first reason against a claim: each controller may be the one that leads, and a bad sign counts."""
    reasons = (why_not(one) for one in (facts, *facts.others))
    return next((reason for reason in reasons if reason is not None), None)


def _with_blocker(what: str, guid: int | None, facts: DomainFacts) -> str:
    blocked = None if guid is None else facts.blocked.get(guid)
    return what if blocked is None else f"{what}: {blocked}"


def _partitions_of(guid: int | None, facts: DomainFacts) -> tuple[ObservedPartition, ...]:
    return () if guid is None else facts.holders.get(guid, ())


def _is_kept_default(partition: ObservedPartition, facts: DomainFacts) -> bool:
    return partition.id == DEFAULT_PARTITION_ID and facts.default_partition is DefaultPartitionPolicy.KEEP


def _is_of_tray(partition: ObservedPartition, facts: DomainFacts) -> bool:
    """Whether the site keeps free GPUs of one tray there."""
    return is_tray_partition(facts.owned.get(partition.name, ""))


def _foreign_member(partition: ObservedPartition, tenant: str, facts: DomainFacts) -> str | None:
    for guid in sorted(partition.members):
        if facts.tenant_of.get(guid, tenant) != tenant:
            return f"partition {partition.name} also holds a GPU of another tenant"
        # A member that the controller no longer lists is gone hardware, and reads nobody's memory.
        if guid in facts.present and guid not in facts.managed:
            return f"partition {partition.name} also holds a GPU of no machine of this site"
    return None


def _without_nvlink(partition: ObservedPartition, guid: int, facts: DomainFacts) -> str | None:
    # Being a member is not enough. A GPU that is merely slower does share memory.
    if guid not in facts.no_nvlink:
        return None
    return f"{NO_NVLINK.reason}: the GPU is in partition {partition.name}, and shares no memory in it"


def _names(partitions: Iterable[ObservedPartition]) -> str:
    return " and ".join(partition.name for partition in partitions)


def _numbers(partitions: Iterable[ObservedPartition]) -> str:
    # The tenant reads this, and the name of a partition that is not its own says whose it is.
    return " and ".join(str(partition.id) for partition in partitions)
