"""The partition planner: the next operations that bring one NVLink domain closer to its intent.

`make_plan` is a pure function. Equal inputs give equal plans, whatever the order of their parts; the
executor makes no further choices. It works in this order:

1. Derive the desired partitions and the present layout (`partition_layout`).
2. Collect blockers: GPUs that are unmanaged, not observed, without NVLink, held by a foreign partition,
   or contradictory. GPUs with the same reason are reported together, with the nearest fix.
3. Plan removals and deletions, the default partition last.
4. Only if no removal is left, plan additions: add to the home partition, else create one. With the `keep`
   policy, unassigned GPUs return to the default partition.

Removals and additions are never in one plan. Additions are planned from an observation that shows the
removals done, so between any two operations a GPU is in at most one partition, and no partition holds
GPUs of two tenants.

Operations that the controller has just refused (`refused`) are not repeated; they are reported as
blockers. A refused removal delays only what depends on it, because the observation still shows its GPUs
where they are. A create reuses the recorded name: its reply may have been lost, and the controller
refuses a second partition of that name. In a paused domain nothing is planned, and what would have been
done is reported.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from types import MappingProxyType

import msgspec

from rackloom.core.partitions.domain import (
    AddGpus,
    BlockedGpus,
    CreatePartition,
    DefaultPartitionPolicy,
    DeletePartition,
    DomainIntent,
    DomainObservation,
    GpuHealth,
    ObservedPartition,
    PartitionOperation,
    PartitionPlan,
    RemoveGpus,
    name_flaw,
    partition_name,
)
from rackloom.core.partitions.partition_layout import (
    DesiredPartitions,
    PartitionLayout,
    SitePartition,
    read_desired_partitions,
    read_layout,
    with_tray_partitions,
)
from rackloom.errors import Refused

NONE_REFUSED: Mapping[PartitionOperation, str] = MappingProxyType({})


def make_plan(
    intent: DomainIntent,
    observation: DomainObservation,
    refused: Mapping[PartitionOperation, str] = NONE_REFUSED,
) -> PartitionPlan:
    """The next operations for one domain; none when nothing can or need be done.

    `refused` are operations that the controller has just refused, with its name for the reason: they are not
    asked for again, and told of instead. Equal inputs give equal plans, whatever the order of their parts.
    Raises Refused when the two are about different domains.
    """
    if intent.domain != observation.domain:
        raise Refused(
            f"intent is for domain {intent.domain}, the observation of {observation.domain}",
            nearest_fix="read the intent of the domain that the controller names",
        )
    wishes = with_tray_partitions(read_desired_partitions(intent), intent, observation)
    layout = read_layout(intent, observation, wishes)
    blocked_gpus = find_blockers(intent, observation, wishes, layout)
    blockers = BlockerSet()
    for guid, blocker in blocked_gpus.items():
        blockers.add(blocker, frozenset((guid,)))
    _block_refused(refused, observation, blockers)
    operations = _not_refused(refused, plan_removals(intent, wishes, layout, blockers))
    if not operations:
        unserved = frozenset(blocked_gpus)
        added = plan_additions(intent, observation, wishes, layout, unserved, blockers)
        operations = _not_refused(refused, added)
    if intent.paused is not None:
        paused = Blocker(f"the domain is paused: {intent.paused}", "resume the domain")
        blockers.add(paused, _gpus_touched(operations, observation))
        operations = []
    return PartitionPlan(
        observation=observation,
        intent_revision=intent.revision,
        operations=tuple(operations),
        blocked=blockers.told(),
    )


def _not_refused(
    refused: Mapping[PartitionOperation, str], operations: list[PartitionOperation]
) -> list[PartitionOperation]:
    return [operation for operation in operations if operation not in refused]


# Why a GPU cannot join its partition, and what would unblock it.


class Blocker(msgspec.Struct, frozen=True, order=True):
    """A reason and its nearest fix."""

    reason: str
    fix: str | None


class BlockerSet:
    """Reasons collected while planning; GPUs with the same reason are told of together."""

    def __init__(self) -> None:
        self._guids: dict[Blocker, set[int]] = defaultdict(set)

    def add(self, blocker: Blocker, guids: frozenset[int]) -> None:
        """Note that `guids` cannot be served."""
        if guids:
            self._guids[blocker] |= guids

    def told(self) -> tuple[BlockedGpus, ...]:
        """All of them, in canonical order."""
        told = [
            BlockedGpus(guids=tuple(sorted(guids)), reason=blocker.reason, fix=blocker.fix)
            for blocker, guids in self._guids.items()
        ]
        return tuple(sorted(told, key=lambda one: (one.guids, one.reason)))


def _block_refused(
    refused: Mapping[PartitionOperation, str], observation: DomainObservation, blockers: BlockerSet
) -> None:
    for operation, code in refused.items():
        kind = str(operation.__struct_config__.tag)
        reason = f"the switch controller refused {kind} on partition {_partition_text(operation)}: {code}"
        again = "find out why on the switch controller; it is asked again in the next pass"
        blockers.add(Blocker(reason, again), _gpus_touched([operation], observation))


def _partition_text(operation: PartitionOperation) -> str:
    # Tenants read this, and the name of a partition that is not their own says whose it is.
    if isinstance(operation, CreatePartition):
        return repr(operation.name)
    return str(operation.partition_id)


def _gpus_touched(
    operations: Collection[PartitionOperation], observation: DomainObservation
) -> frozenset[int]:
    members = {partition.id: partition.members for partition in observation.partitions}
    touched: frozenset[int] = frozenset()
    for operation in operations:
        if isinstance(operation, DeletePartition):
            touched |= members.get(operation.partition_id, frozenset())
        else:
            touched |= frozenset(operation.guids)
    return touched


NOT_MANAGED = Blocker(
    "the GPU is on no machine that the site knows in this domain", "register its machine with the site"
)
NOT_OBSERVED = Blocker(
    "the switch controller does not list the GPU: its tray is absent, off, or was swapped",
    "bring the tray back, or move the instance to another machine",
)
NO_NVLINK = Blocker(
    "the switch controller reports GPU health NO_NVLINK", "repair the tray, or move the instance"
)


def find_blockers(
    intent: DomainIntent, observation: DomainObservation, wishes: DesiredPartitions, layout: PartitionLayout
) -> dict[int, Blocker]:
    """The GPUs that somebody wants and that cannot be put where they are wanted."""
    health = {gpu.guid: gpu.health for gpu in observation.gpus}
    recorded = {one.name for one in intent.owned}
    found = {guid: _contradictory(reason) for guid, reason in wishes.contradictory.items()}
    for guid, logical_partition in wishes.partition_of.items():
        home = layout.home.get(logical_partition)
        if guid not in intent.managed:
            found[guid] = NOT_MANAGED
        elif guid not in health:
            found[guid] = NOT_OBSERVED
        elif guid in layout.untouchable:
            partition = layout.untouchable[guid]
            found[guid] = _held_elsewhere(partition, ours=partition.name in recorded)
        elif health[guid] is GpuHealth.NO_NVLINK and not (home and guid in home.wanted):
            found[guid] = NO_NVLINK
    return found


def _contradictory(reason: str) -> Blocker:
    return Blocker(reason, "assign the GPU to one logical partition of one tenant")


def _held_elsewhere(partition: ObservedPartition, *, ours: bool) -> Blocker:
    if ours:
        return Blocker(
            f"partition {partition.name!r} is location-based, and the site only makes GUID-based ones: "
            "another hand made it, and NMX-C fixes the type at creation",
            "delete that partition on the switch controller",
        )
    # By number: the tenant reads this, and the name of a partition that is not its own says whose it is.
    return Blocker(
        f"the GPU is in partition {partition.id}, which the site did not make",
        "adopt the partition, or release the GPU from it on the switch controller",
    )


# Removals and deletions.


def plan_removals(
    intent: DomainIntent, wishes: DesiredPartitions, layout: PartitionLayout, blockers: BlockerSet
) -> list[PartitionOperation]:
    """Removals and deletions by partition id, the default partition (highest id) last."""
    # A GPU that is gone for good (its tray was swapped) is on no machine any more. Its name in a partition of
    # ours was put there by the site, and would keep other GPUs from joining for ever.
    touchable = intent.managed | layout.absent
    planned = [_removal_from_site_partition(our, touchable, wishes, blockers) for our in layout.ours]
    if layout.default:
        planned.append(_removal_from_default(layout.default, intent, wishes, blockers))
    return [operation for operation in planned if operation]


def _removal_from_site_partition(
    site_partition: SitePartition, touchable: frozenset[int], wishes: DesiredPartitions, blockers: BlockerSet
) -> PartitionOperation | None:
    excess = site_partition.partition.members - site_partition.wanted
    _block_unmanaged(site_partition.partition, excess - touchable, blockers)
    leaving = (excess & touchable) - wishes.contradictory.keys()
    if leaving == site_partition.partition.members and not _waits_for_gpus(site_partition, wishes):
        return DeletePartition(partition_id=site_partition.partition.id, name=site_partition.partition.name)
    return _remove_gpus(site_partition.partition, leaving)


def _waits_for_gpus(site_partition: SitePartition, wishes: DesiredPartitions) -> bool:
    """Whether an empty partition is to be filled."""
    if site_partition.partition.members or not site_partition.is_home:
        return False
    return site_partition.logical_partition in wishes.partition_of.values()


def _removal_from_default(
    default: ObservedPartition, intent: DomainIntent, wishes: DesiredPartitions, blockers: BlockerSet
) -> PartitionOperation | None:
    """KEEP takes out what a tenant was given, so that no tenant shares it, and drained trays.

    The other policies take out everything.
    """
    if intent.default_partition is DefaultPartitionPolicy.KEEP:
        leaving = intent.drained | wishes.assigned
        return _remove_gpus(default, default.members & intent.managed & leaving)
    strangers = default.members - intent.managed
    if not strangers:
        return DeletePartition(partition_id=default.id, name=default.name)
    _block_unmanaged(default, strangers, blockers)
    return _remove_gpus(default, default.members & intent.managed)


def _remove_gpus(partition: ObservedPartition, guids: frozenset[int]) -> RemoveGpus | None:
    if not guids:
        return None
    return RemoveGpus(partition_id=partition.id, name=partition.name, guids=tuple(sorted(guids)))


def _block_unmanaged(partition: ObservedPartition, strangers: frozenset[int], blockers: BlockerSet) -> None:
    if strangers:
        reason = f"partition {partition.name!r} also holds GPUs of no machine that the site knows"
        fix = "register their machines with the site, or take the GPUs out on the switch controller"
        blockers.add(Blocker(reason, fix), strangers)


# Additions and creations.


def plan_additions(
    intent: DomainIntent,
    observation: DomainObservation,
    wishes: DesiredPartitions,
    layout: PartitionLayout,
    blocked: frozenset[int],
    blockers: BlockerSet,
) -> list[PartitionOperation]:
    """Additions in the order of logical partitions, the default partition last.

    `blocked` are GPUs that are told of already; what else stands in the way is added to `blockers`.
    """
    namer = _PartitionNamer(intent, observation)
    planned: list[PartitionOperation] = []
    for logical_partition, guids in _gpus_to_add(wishes, layout, blocked):
        home = layout.home.get(logical_partition)
        step = _add_gpus(home, guids) if home else namer.create(logical_partition, guids)
        if isinstance(step, Blocker):
            blockers.add(step, frozenset(guids))
        else:
            planned.append(step)
    return planned + _return_to_default(intent, observation, wishes, layout)


def _gpus_to_add(
    wishes: DesiredPartitions, layout: PartitionLayout, blocked: frozenset[int]
) -> list[tuple[str, tuple[int, ...]]]:
    joining: dict[str, list[int]] = defaultdict(list)
    for guid, logical_partition in wishes.partition_of.items():
        if guid not in layout.held and guid not in blocked:
            joining[logical_partition].append(guid)
    return sorted((name, tuple(guids)) for name, guids in joining.items())


def _add_gpus(home: SitePartition, guids: tuple[int, ...]) -> AddGpus | Blocker:
    partition = home.partition
    if strangers := len(partition.members - home.wanted):
        # Who they belong to is not known: joining them would share memory with nobody knows whom.
        return Blocker(
            f"partition {partition.name!r} holds {strangers} GPUs that do not belong there and that the "
            "site may not take out",
            "take those GPUs out on the switch controller, or correct their assignment",
        )
    return AddGpus(partition_id=partition.id, name=partition.name, guids=guids)


class _PartitionNamer:
    """Hands out names for new partitions, as many as the domain can hold."""

    def __init__(self, intent: DomainIntent, observation: DomainObservation) -> None:
        self.standing = {partition.name for partition in observation.partitions}
        self.count = len(observation.partitions)
        self.limit = observation.limits.max_partitions
        self.recorded: dict[str, list[str]] = defaultdict(list)
        for one in intent.owned:
            self.recorded[one.logical_partition].append(one.name)

    def create(self, logical_partition: str, guids: tuple[int, ...]) -> CreatePartition | Blocker:
        # A name that is recorded may stand for a create whose reply was lost: the same name makes the
        # controller refuse a second one.
        name = min(self.recorded[logical_partition], default=partition_name(logical_partition))
        if wrong := name_flaw(name):
            return Blocker(f"{name!r} cannot name a partition: {wrong}", None)
        if name in self.standing:
            return Blocker(
                f"partition {name!r} stands already, and is not one that the site can use",
                "adopt that partition, or delete it on the switch controller",
            )
        if self.limit is not None and self.count >= self.limit:
            return Blocker(
                f"the domain has {self.count} partitions of at most {self.limit}",
                "delete a logical partition that has GPUs in this domain",
            )
        self.count += 1
        return CreatePartition(name=name, logical_partition=logical_partition, guids=guids)


def _return_to_default(
    intent: DomainIntent, observation: DomainObservation, wishes: DesiredPartitions, layout: PartitionLayout
) -> list[PartitionOperation]:
    """With KEEP, GPUs that nobody was given go back to where the factory had them."""
    default = layout.default
    assigned = wishes.assigned
    if (
        default is None
        or intent.default_partition is not DefaultPartitionPolicy.KEEP
        or default.members & assigned
    ):
        return []
    usable = {gpu.guid for gpu in observation.gpus if gpu.health is not GpuHealth.NO_NVLINK}
    free = tuple(sorted((usable & intent.managed) - intent.drained - layout.held - assigned))
    return [AddGpus(partition_id=default.id, name=default.name, guids=free)] if free else []
