"""The partition planner: the next operations that bring one NVLink domain closer to its intent.

`make_plan` is a pure function. Equal inputs give equal plans, in any order of their parts. The
executor makes no further choices. It works in this order:

1. Derive the desired partitions and the present layout (`domain`).
2. Collect blockers: GPUs that are unmanaged, not observed, without NVLink, held by a foreign partition,
   or contradictory. GPUs with the same reason are reported together, with the nearest fix.
3. Plan removals and deletions, the default partition last.
4. Only if no removal is left, plan additions: add to the home partition, else create one. With the `keep`
   policy, unassigned GPUs return to the default partition.

Removals and additions are never in one plan. Additions are planned from an observation that shows the
removals done, so between any two operations a GPU is in at most one partition, and no partition holds
GPUs of two tenants.

Operations that the controller has just refused, or answered in no valid way (`failed`), are not repeated.
They are reported as blockers. A failed removal delays only operations that depend on it, because the
observation still shows its GPUs in their old partition. A create reuses the recorded name: its reply may have
been lost, and the controller refuses a second partition of that name. The controller chooses the id of a
partition only after the request, so the name (`rl-<logical partition>`) is the only link between a switch and
the records. In a paused domain nothing is planned, and the operations that would be due are reported. If an
observation contradicts itself about a GPU, that GPU and all that may share memory with it wait. So does a new
partition for a logical partition that wants one of them, because it may exist already, in a list that omits
it. The rest of the domain goes on: one broken GPU does not keep other GPUs from being joined or released.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from rackloom.core.partitions.domain import (
    UNCERTAIN_REASON,
    AddGpus,
    BlockedGpus,
    CreatePartition,
    DefaultPartitionPolicy,
    DeletePartition,
    DesiredPartitions,
    DomainIntent,
    DomainObservation,
    GpuHealth,
    ObservedPartition,
    PartitionLayout,
    PartitionOperation,
    PartitionPlan,
    RemoveGpus,
    doubtful_partitions,
    gpus_of_tray,
    is_tray_partition,
    read_desired_partitions,
    read_layout,
    with_tray_partitions,
)
from rackloom.errors import Refused

FailedOperations = Mapping[PartitionOperation, str | None]
"""Operations that failed in this pass -> the controller's error code. None: the outcome is unknown."""
NONE_FAILED: FailedOperations = MappingProxyType({})


class PlanningInput(NamedTuple):
    """The input of one plan."""

    intent: DomainIntent
    observation: DomainObservation
    desired: DesiredPartitions
    layout: PartitionLayout


def make_plan(
    intent: DomainIntent, observation: DomainObservation, failed: FailedOperations = NONE_FAILED
) -> PartitionPlan:
    """The next operations for one domain, none if nothing can or need be done.

    The operations of `failed` are reported, and not planned again. Raises Refused when intent and observation
    are of different domains.
    """
    if intent.domain != observation.domain:
        raise Refused(
            f"intent is for domain {intent.domain}, the observation of {observation.domain}",
            nearest_fix="read the intent of the domain that the controller names",
        )
    # The tray policy comes first: to the rest of the planner, a tray is a logical partition like any other.
    desired = with_tray_partitions(read_desired_partitions(intent), intent, observation)
    given = PlanningInput(intent, observation, desired, read_layout(intent, observation, desired))
    blocked_gpus = find_blockers(given)
    blockers = BlockerSet()
    for guid, blocker in blocked_gpus.items():
        blockers.add(blocker, frozenset((guid,)))
    _block_failed(failed, observation, blockers)
    # While a removal is left, nothing is added: additions are planned from an observation that shows the
    # removals done. A refused removal does not count, or one GPU could stop the whole domain. The observation
    # still shows its GPUs in their old partition, so nothing that depends on them is added. Nor does one that
    # waits for a certain reading.
    blockers.add(UNCERTAIN, observation.uncertain & intent.managed)
    removals = [step for step in plan_removals(given, blockers) if step not in failed]
    operations = [step for step in removals if _is_certain(step, given)]
    waiting = [step for step in removals if step not in operations]
    if not operations:
        blocked = observation.uncertain.union(blocked_gpus)
        added = [step for step in plan_additions(given, blocked, blockers) if step not in failed]
        operations = [step for step in added if _is_certain(step, given)]
        waiting += [step for step in added if step not in operations]
    blockers.add(NO_CERTAIN_READING, _gpus_touched(waiting, observation) - observation.uncertain)
    # A pause comes last, so that the report names all GPUs that the plan would have moved.
    if intent.paused is not None:
        paused = Blocker(f"the domain is paused: {intent.paused}", "resume the domain")
        blockers.add(paused, _gpus_touched(operations, observation))
        operations = []
    return PartitionPlan(
        observation=observation,
        intent_revision=intent.revision,
        operations=tuple(operations),
        blocked=blockers.blocked_gpus(),
    )


# Why a GPU cannot join its partition, and what would unblock it.


class Blocker(msgspec.Struct, frozen=True, order=True):
    """A reason and its nearest fix."""

    reason: str
    fix: str | None


class BlockerSet:
    """Reasons collected while planning. GPUs with the same reason are reported together."""

    def __init__(self) -> None:
        self._guids: dict[Blocker, set[int]] = defaultdict(set)

    def add(self, blocker: Blocker, guids: frozenset[int]) -> None:
        """Note that `guids` cannot be served."""
        if guids:
            self._guids[blocker] |= guids

    def blocked_gpus(self) -> tuple[BlockedGpus, ...]:
        """All of them, in canonical order."""
        blocked = (
            BlockedGpus(guids=tuple(sorted(guids)), reason=blocker.reason, fix=blocker.fix)
            for blocker, guids in self._guids.items()
        )
        return tuple(sorted(blocked, key=lambda gpus: (gpus.guids, gpus.reason)))


NO_VALID_ANSWER = "the switch controller gave no valid answer"


def _block_failed(failed: FailedOperations, observation: DomainObservation, blockers: BlockerSet) -> None:
    for operation, code in failed.items():
        # No code means no answer: the operation may have been carried out all the same.
        kind = str(operation.__struct_config__.tag)
        # Tenants read this. The name of another owner's partition would show the owner. A number does not.
        named = operation.name if isinstance(operation, CreatePartition) else operation.partition_id
        reason = f"the switch controller refused {kind} on partition {named!r}: {code}"
        if code is None:
            reason = f"the outcome of {kind} on partition {named!r} is unknown: {NO_VALID_ANSWER}"
        again = "find out why on the switch controller; it is asked again in the next pass"
        blockers.add(Blocker(reason, again), _gpus_touched([operation], observation))


def _is_certain(operation: PartitionOperation, given: PlanningInput) -> bool:
    """Whether it changes a partition that no contradiction concerns, or makes one that cannot stand already.

    All members of a partition that is concerned are uncertain. Without members this cannot be known.
    """
    uncertain = given.observation.uncertain
    if not uncertain:
        return True
    if isinstance(operation, CreatePartition):
        return operation.logical_partition not in doubtful_partitions(given.intent, given.observation)
    # An operation on a partition changes it for all of its members, so all of them have to be certain.
    members = {partition.id: partition.members for partition in given.observation.partitions}
    held = members[operation.partition_id]
    return bool(held) and held.isdisjoint(uncertain)


def _gpus_touched(
    operations: Collection[PartitionOperation], observation: DomainObservation
) -> frozenset[int]:
    members = {partition.id: partition.members for partition in observation.partitions}
    touched: frozenset[int] = frozenset()
    for operation in operations:
        # A deletion names no GPU. It moves all GPUs that are in the partition now.
        if isinstance(operation, DeletePartition):
            touched |= members.get(operation.partition_id, frozenset())
        else:
            touched |= frozenset(operation.guids)
    return touched


UNCERTAIN = Blocker(
    UNCERTAIN_REASON, "find out on the switch controller who changes its partitions; it is read again"
)
NO_CERTAIN_READING = Blocker(
    "the GPU waits until the lists of its switch controller agree about others of its partition",
    "find out on the switch controller who changes its partitions; it is read again",
)
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


def find_blockers(given: PlanningInput) -> dict[int, Blocker]:
    """The assigned GPUs that cannot be put into their partition."""
    intent, observation, desired, layout = given
    health = {gpu.guid: gpu.health for gpu in observation.gpus}
    recorded = {owned.name for owned in intent.owned}
    fix = "assign the GPU to one logical partition of one tenant"
    found = {guid: Blocker(reason, fix) for guid, reason in desired.contradictory.items()}
    for guid, logical_partition in desired.partition_of.items():
        home = layout.home.get(logical_partition)
        # One reason for each GPU, the one to mend first: no later check means anything before it.
        if guid not in intent.managed:
            found[guid] = NOT_MANAGED
        elif guid not in health:
            found[guid] = NOT_OBSERVED
        elif guid in layout.untouchable:
            partition = layout.untouchable[guid]
            found[guid] = _held_elsewhere(partition, ours=partition.name in recorded)
        # A GPU that lost NVLink where it belongs stays there: nothing has to move.
        elif health[guid] is GpuHealth.NO_NVLINK and not (home and guid in home.wanted):
            found[guid] = NO_NVLINK
    return found


def _held_elsewhere(partition: ObservedPartition, *, ours: bool) -> Blocker:
    if ours:
        return Blocker(
            f"partition {partition.name!r} is location-based, and the site only makes GUID-based ones: "
            "another hand made it, and NMX-C fixes the type at creation",
            "delete that partition on the switch controller",
        )
    # By number: a tenant reads this, and the name would show the owner of the partition.
    return Blocker(
        f"the GPU is in partition {partition.id}, which the site did not make",
        "adopt the partition, or release the GPU from it on the switch controller",
    )


# Removals and deletions.


def plan_removals(given: PlanningInput, blockers: BlockerSet) -> list[PartitionOperation]:
    """Removals and deletions by partition id, the default partition (highest id) last."""
    intent, observation, desired, layout = given
    planned: list[PartitionOperation | None] = []
    for ours in layout.ours:
        partition = ours.partition
        # A GPU that is gone for good (its tray was swapped) is on no machine any more. The site put its GUID
        # into its own partition, and there it would keep other GPUs from joining permanently.
        touchable = intent.managed | layout.absent
        # A machine that was removed from the site leaves nothing behind that the site made for its tray.
        if is_tray_partition(ours.logical_partition):
            touchable |= gpus_of_tray(ours.logical_partition, observation)
        excess = partition.members - ours.wanted
        _block_unmanaged(partition, excess - touchable, blockers)
        leaving = (excess & touchable) - desired.contradictory.keys()
        # An empty home partition that GPUs are about to join stays.
        is_needed = ours.is_home and ours.logical_partition in desired.partition_of.values()
        if leaving == partition.members and (leaving or not is_needed):
            planned.append(DeletePartition(partition_id=partition.id, name=partition.name))
        else:
            planned.append(_remove_gpus(partition, leaving))
    if layout.default:
        planned.append(_removal_from_default(layout.default, given, blockers))
    return [operation for operation in planned if operation]


def _removal_from_default(
    default: ObservedPartition, given: PlanningInput, blockers: BlockerSet
) -> PartitionOperation | None:
    """KEEP takes out assigned and drained GPUs, so that no tenant shares it. Other policies take out all."""
    intent = given.intent
    if intent.default_partition is DefaultPartitionPolicy.KEEP:
        leaving = intent.drained | given.desired.assigned
        return _remove_gpus(default, default.members & intent.managed & leaving)
    unmanaged = default.members - intent.managed
    if not unmanaged:
        return DeletePartition(partition_id=default.id, name=default.name)
    # Strangers keep the partition in being. The site takes out its own GPUs all the same.
    _block_unmanaged(default, unmanaged, blockers)
    return _remove_gpus(default, default.members & intent.managed)


def _remove_gpus(partition: ObservedPartition, guids: frozenset[int]) -> RemoveGpus | None:
    if not guids:
        return None
    return RemoveGpus(partition_id=partition.id, name=partition.name, guids=tuple(sorted(guids)))


def _block_unmanaged(partition: ObservedPartition, unmanaged: frozenset[int], blockers: BlockerSet) -> None:
    reason = f"partition {partition.name!r} also holds GPUs of no machine that the site knows"
    fix = "register their machines with the site, or take the GPUs out on the switch controller"
    blockers.add(Blocker(reason, fix), unmanaged)


# Additions and creations.


def plan_additions(
    given: PlanningInput, blocked: frozenset[int], blockers: BlockerSet
) -> list[PartitionOperation]:
    """Additions in the order of logical partitions, the default partition last.

    `blocked` are GPUs that are reported already. Further blockers are added to `blockers`.
    """
    namer = _PartitionNamer(given.intent, given.observation)
    planned: list[PartitionOperation] = []
    for logical_partition, guids in _gpus_to_add(given.desired, given.layout, blocked):
        home = given.layout.home.get(logical_partition)
        step: PartitionOperation | Blocker
        if home is None:
            step = namer.create(logical_partition, guids)
        elif foreign := len(home.partition.members - home.wanted):
            # Their owner is not known: to join them could share memory between two tenants.
            step = Blocker(
                f"partition {home.partition.name!r} holds {foreign} GPUs that do not belong there and that "
                "the site may not take out",
                "take those GPUs out on the switch controller, or correct their assignment",
            )
        else:
            step = AddGpus(partition_id=home.partition.id, name=home.partition.name, guids=guids)
        if isinstance(step, Blocker):
            blockers.add(step, frozenset(guids))
        else:
            planned.append(step)
    return planned + _return_to_default(given, blocked)


def _gpus_to_add(
    desired: DesiredPartitions, layout: PartitionLayout, blocked: frozenset[int]
) -> list[tuple[str, tuple[int, ...]]]:
    joining: dict[str, list[int]] = defaultdict(list)
    # A GPU in any partition waits until an observation shows that it left.
    for guid, logical_partition in desired.partition_of.items():
        if guid not in layout.held and guid not in blocked:
            joining[logical_partition].append(guid)
    return sorted((name, tuple(guids)) for name, guids in joining.items())


# Names of new partitions.


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


class _PartitionNamer:
    """Names new partitions, as many as the domain can hold."""

    def __init__(self, intent: DomainIntent, observation: DomainObservation) -> None:
        self._present = {partition.name for partition in observation.partitions}
        self._count = len(observation.partitions)
        self._limit = observation.limits.max_partitions
        self._recorded: dict[str, list[str]] = defaultdict(list)
        for owned in intent.owned:
            self._recorded[owned.logical_partition].append(owned.name)

    def create(self, logical_partition: str, guids: tuple[int, ...]) -> CreatePartition | Blocker:
        # A recorded name may belong to a create with a lost reply. Under the same name the controller
        # refuses a second partition, so a retry cannot make two.
        name = min(self._recorded[logical_partition], default=partition_name(logical_partition))
        if flaw := name_flaw(name):
            return Blocker(f"{name!r} cannot name a partition: {flaw}", None)
        if name in self._present:
            return Blocker(
                f"partition {name!r} stands already, and is not one that the site can use",
                "adopt that partition, or delete it on the switch controller",
            )
        if self._limit is not None and self._count >= self._limit:
            return Blocker(
                f"the domain has {self._count} partitions of at most {self._limit}",
                "delete a logical partition that has GPUs in this domain",
            )
        self._count += 1
        return CreatePartition(name=name, logical_partition=logical_partition, guids=guids)


def _return_to_default(given: PlanningInput, blocked: frozenset[int]) -> list[PartitionOperation]:
    """With KEEP, unassigned GPUs go back to the default partition of the factory."""
    intent, observation, desired, layout = given
    default, keeps = layout.default, intent.default_partition is DefaultPartitionPolicy.KEEP
    # An assigned GPU that could not be taken out yet would share memory with those that return.
    if default is None or not keeps or default.members & desired.assigned:
        return []
    usable = {gpu.guid for gpu in observation.gpus if gpu.health is not GpuHealth.NO_NVLINK}
    free = tuple(
        sorted((usable & intent.managed) - intent.drained - layout.held - desired.assigned - blocked)
    )
    return [AddGpus(partition_id=default.id, name=default.name, guids=free)] if free else []
