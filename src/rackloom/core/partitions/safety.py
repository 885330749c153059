"""The safety check of a partition plan, independent of the planner, on a model of the controller.

`check_plan` raises Refused unless the plan may be executed now:

1. It is current: same domain, not paused, same intent revision, and the facts of the newest observation
   equal those that the plan is based on. While these contradict themselves about a GPU, only partitions
   without an uncertain GPU may be changed, before and after, and none be made for a logical partition that
   wants an uncertain GPU (`doubtful_partitions`, which the planner uses, too).
2. It either removes or adds, never both.
3. Each operation is replayed on the model (`apply_operation`), and the result is judged from the intent
   alone. Removals touch only partitions of the site or the default partition, only managed GPUs (or those
   of a tray, out of the site's own partition for it), and no GPU that is wanted right there (S4, S5). After
   an addition, all members of the partition belong to one logical partition of one tenant, or to one tray.
   No drained GPU joins. Names and the partition limit are respected (S2, S9).

The other rules are written a second time on purpose: a mistake of the planner would have to be repeated
here, in another form, to reach a rack. The model knows nothing of intent and shares nothing with the planner.
It has the refusals of a controller: a GPU that is not listed or already in a partition, a name that
exists, an unknown partition. It gives a new partition the lowest free id, which a real controller need
not do.
"""

from collections import defaultdict
from itertools import count

import msgspec

from rackloom.core.partitions.domain import (
    DEFAULT_PARTITION_ID,
    AddGpus,
    CreatePartition,
    DefaultPartitionPolicy,
    DeletePartition,
    DomainIntent,
    DomainObservation,
    ObservedPartition,
    PartitionHealth,
    PartitionOperation,
    PartitionPlan,
    RemoveGpus,
    doubtful_partitions,
    is_tray_partition,
)
from rackloom.core.partitions.planner import name_flaw
from rackloom.errors import Refused

PLAN_AGAIN = "plan again from the newest observation and intent"


def check_plan(plan: PartitionPlan, intent: DomainIntent, observation: DomainObservation) -> None:
    """Raise Refused unless `plan` is current and safe. `observation` is the newest one of the domain."""
    _require_current(plan, intent, observation)
    # Additions rest on an observation that shows the removals done: an answer alone is no proof.
    directions = {isinstance(operation, CreatePartition | AddGpus) for operation in plan.operations}
    if len(directions) > 1:
        raise Refused("the plan both removes and adds: additions wait until removals were seen done")
    rules = _SafetyRules(intent)
    before = observation
    for operation in plan.operations:
        after = apply_operation(before, operation)
        # A removal is judged in the state before it, an addition in the state that it makes.
        if isinstance(operation, CreatePartition | AddGpus):
            rules.allow_addition(operation, after)
        else:
            rules.allow_removal(operation, before)
        before = after


def _require_current(plan: PartitionPlan, intent: DomainIntent, observation: DomainObservation) -> None:
    if intent.domain != observation.domain:
        raise Refused(f"intent is for domain {intent.domain}, the observation of {observation.domain}")
    # Before the revision, which pausing counts up: to plan again would not help.
    if intent.paused is not None and plan.operations:
        raise Refused(f"the domain is paused: {intent.paused}", nearest_fix="resume the domain")
    if plan.intent_revision != intent.revision:
        raise Refused(
            f"the plan was made from intent {plan.intent_revision}, which is now {intent.revision}",
            nearest_fix=PLAN_AGAIN,
        )
    if observation.uncertain:
        _require_certain(plan, intent, observation)
    # The time may differ. Everything else that the plan rests on has to be as it was.
    if plan.observation.facts != observation.facts:
        raise Refused("the fabric is no longer as the plan found it", nearest_fix=PLAN_AGAIN)


def _require_certain(plan: PartitionPlan, intent: DomainIntent, observation: DomainObservation) -> None:
    # Of a partition without members it is unknown whether an uncertain GPU is in it.
    certain = {
        partition.id
        for partition in observation.partitions
        if partition.members and not partition.members & observation.uncertain
    }
    doubtful = doubtful_partitions(intent, observation)
    for operation in plan.operations:
        moved = frozenset(() if isinstance(operation, DeletePartition) else operation.guids)
        stands = (
            operation.logical_partition not in doubtful
            if isinstance(operation, CreatePartition)
            else operation.partition_id in certain
        )
        if moved & observation.uncertain or not stands:
            raise Refused(
                f"the switch controller contradicts itself about {_guid_text(observation.uncertain)}",
                nearest_fix=PLAN_AGAIN,
            )


class _SafetyRules:
    """Decides from intent alone which changes of a partition are allowed."""

    def __init__(self, intent: DomainIntent) -> None:
        self.managed = intent.managed
        self.drained = intent.drained
        self.policy = intent.default_partition
        self.owner_of = {owned.name: owned.logical_partition for owned in intent.owned}
        self.claims: dict[int, set[tuple[str, str]]] = defaultdict(set)
        self.tenants: dict[str, set[str]] = defaultdict(set)
        for assignment in intent.assignments:
            self.claims[assignment.guid].add((assignment.logical_partition, assignment.tenant))
            self.tenants[assignment.logical_partition].add(assignment.tenant)

    def allow_removal(self, operation: RemoveGpus | DeletePartition, before: DomainObservation) -> None:
        """S4, S5: only ours, only managed GPUs, and none that is wanted right there."""
        target = _target_partition(before, operation)
        leaving = target.members if isinstance(operation, DeletePartition) else frozenset(operation.guids)
        if target.id == DEFAULT_PARTITION_ID:
            self._require_managed(leaving)
            # Under the other policies, every GPU of the site may leave the default partition.
            if self.policy is not DefaultPartitionPolicy.KEEP:
                return
            if isinstance(operation, DeletePartition):
                raise Refused("the default partition is to be kept")
            elsewhere = self.claims.keys() | self.drained
            if unassigned := [guid for guid in operation.guids if guid not in elsewhere]:
                raise Refused(f"GPU {unassigned[0]:#x} belongs in the default partition: nobody was given it")
            return
        owner = self._owner(target)
        # A GUID that the controller does not list has no hardware: taking it out moves no GPU. A partition
        # for the free GPUs of a tray goes when the site no longer knows the machine of that tray.
        others = {gpu.guid for gpu in before.gpus if owner != f"tray-{gpu.chassis_serial}-{gpu.slot}"}
        self._require_managed(leaving & others)
        # GPUs may leave a second partition of the same logical partition for its home.
        for partition in before.partitions:
            is_ours = partition.guid_based and self.owner_of.get(partition.name) == owner
            if is_ours and partition.id != target.id:
                return
        for guid in leaving:
            if {lp for lp, _ in self.claims.get(guid, ())} == {owner}:
                raise Refused(f"the plan takes GPU {guid:#x} out of {target.name!r}, where it is wanted")

    def allow_addition(self, operation: CreatePartition | AddGpus, after: DomainObservation) -> None:
        """S2, S9: all in the changed partition are of one tenant or tray, and name and number are allowed."""
        self._require_managed(frozenset(operation.guids))
        if drained := sorted(self.drained.intersection(operation.guids)):
            raise Refused(f"the plan joins GPU {drained[0]:#x}, whose tray is drained")
        target = _target_partition(after, operation)
        if target.id == DEFAULT_PARTITION_ID:
            if self.policy is not DefaultPartitionPolicy.KEEP:
                raise Refused("no GPU joins the default partition unless it is to be kept")
            # Judge all members, not only those that join: a GPU that is there already shares memory, too.
            if assigned := sorted(target.members & self.claims.keys()):
                raise Refused(
                    f"the default partition would hold GPU {assigned[0]:#x}, which a tenant was given"
                )
            return
        if isinstance(operation, CreatePartition):
            if flaw := name_flaw(operation.name):
                raise Refused(f"{operation.name!r} cannot name a partition: {flaw}")
            # A name that is recorded for another owner would give that owner this partition.
            if self.owner_of.get(operation.name, operation.logical_partition) != operation.logical_partition:
                raise Refused(f"name {operation.name!r} is recorded for another logical partition")
            limit = after.limits.max_partitions
            if limit is not None and len(after.partitions) > limit:
                raise Refused(f"the domain would have {len(after.partitions)} partitions of at most {limit}")
            logical_partition = operation.logical_partition
        else:
            logical_partition = self._owner(target)
        if is_tray_partition(logical_partition):
            self._allow_together(target, after)
            return
        if len(self.tenants[logical_partition]) > 1:
            raise Refused(f"logical partition {logical_partition} has GPUs of several tenants")
        for guid in sorted(target.members):
            if {lp for lp, _ in self.claims.get(guid, ())} != {logical_partition}:
                raise Refused(f"partition {target.name!r} would hold GPU {guid:#x}, not of its tenant")

    def _allow_together(self, target: ObservedPartition, after: DomainObservation) -> None:
        # A tray is one host with one tenant, so its free GPUs may share memory with each other.
        if self.policy is not DefaultPartitionPolicy.TRAY:
            raise Refused("trays have partitions of their own only if that is the site's policy")
        if assigned := sorted(target.members & self.claims.keys()):
            raise Refused(
                f"partition {target.name!r} would hold GPU {assigned[0]:#x}, which a tenant was given"
            )
        # The tray of an unlisted GPU is unknown, so the GPU may not be with others of a known tray.
        trays = {gpu.guid: (gpu.chassis_serial, gpu.slot) for gpu in after.gpus}
        if len({trays.get(guid) for guid in target.members}) > 1:
            raise Refused(f"partition {target.name!r} would hold GPUs of several trays")

    def _owner(self, target: ObservedPartition) -> str:
        # The site makes no location-based partition: one under a recorded name was made by another hand.
        if target.name not in self.owner_of or not target.guid_based:
            raise Refused(f"partition {target.name!r} is not one that the site made")
        return self.owner_of[target.name]

    def _require_managed(self, guids: frozenset[int]) -> None:
        if unmanaged := sorted(guids - self.managed):
            raise Refused(f"the plan touches GPU {unmanaged[0]:#x}, which is on no machine of the site")


# The model of a switch controller.


def apply_operation(observation: DomainObservation, operation: PartitionOperation) -> DomainObservation:
    """The domain after `operation`. Raises Refused where a controller would refuse.

    The time of the observation stays as it was. A created partition gets the lowest free id, which a real
    controller need not do.
    """
    present = observation.partitions
    # A controller refuses a second partition of one name, and a GPU that is in another partition.
    if isinstance(operation, CreatePartition):
        _require_free(observation, operation.guids)
        if any(partition.name == operation.name for partition in present):
            raise Refused(f"a partition named {operation.name!r} stands already")
        used = {partition.id for partition in present}
        created = ObservedPartition(
            id=next(number for number in count(1) if number not in used),
            name=operation.name,
            members=frozenset(operation.guids),
            health=PartitionHealth.HEALTHY,
            guid_based=True,
            multicast_groups=0,
        )
        return msgspec.structs.replace(observation, partitions=(*present, created))
    target = _target_partition(observation, operation)
    if isinstance(operation, DeletePartition):
        return msgspec.structs.replace(
            observation, partitions=tuple(partition for partition in present if partition is not target)
        )
    guids = _require_distinct(operation.guids)
    if isinstance(operation, AddGpus):
        _require_free(observation, operation.guids)
        members = target.members | guids
    elif missing := guids - target.members:
        raise Refused(f"{_guid_text(missing)} not in partition {target.name!r}")
    else:
        members = target.members - guids
    changed = msgspec.structs.replace(target, members=members)
    return msgspec.structs.replace(
        observation, partitions=tuple(changed if partition is target else partition for partition in present)
    )


def _target_partition(observation: DomainObservation, operation: PartitionOperation) -> ObservedPartition:
    """The partition of an operation, by id and name, or by the name alone after a create."""
    number = None if isinstance(operation, CreatePartition) else operation.partition_id
    for partition in observation.partitions:
        if partition.name == operation.name and number in (None, partition.id):
            return partition
    raise Refused(f"no partition {number} is named {operation.name!r}")


def _require_free(observation: DomainObservation, guids: tuple[int, ...]) -> None:
    wanted = _require_distinct(guids)
    if missing := wanted - {gpu.guid for gpu in observation.gpus}:
        raise Refused(f"the controller does not list {_guid_text(missing)}")
    for partition in observation.partitions:
        if taken := wanted & partition.members:
            raise Refused(f"{_guid_text(taken)} already in partition {partition.name!r}")


def _require_distinct(guids: tuple[int, ...]) -> frozenset[int]:
    if not guids or len(set(guids)) != len(guids):
        raise Refused("an operation names at least one GPU, and each of them once")
    return frozenset(guids)


def _guid_text(guids: frozenset[int]) -> str:
    return ", ".join(f"{guid:#x}" for guid in sorted(guids))
