"""The planner: what to do next so that a domain becomes what is wanted. It chooses; nobody after it does.

All removals come in one plan and all additions in a later one, made from an observation that shows the
removals done. Between any two operations a GPU is thus in at most one partition, and nobody's memory is
reachable from a partition of somebody else.

A removal that the controller refuses holds up what needs it and nothing more: its GPUs still are in the
observation where they are, so no addition takes them, none joins the partition that they ought to leave, and
the partition still counts against the limit of the domain.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType

from rackloom.carve.plan.additions import plan_additions
from rackloom.carve.plan.blockers import Blocker, Blockers, read_blockers
from rackloom.carve.plan.layout import read_layout
from rackloom.carve.plan.removals import plan_removals
from rackloom.carve.plan.trays import with_trays
from rackloom.carve.plan.values import CreatePartition, DeletePartition, Intent, Observation, Operation, Plan
from rackloom.carve.plan.wishes import read_wishes
from rackloom.errors import Refused

NOTHING: Mapping[Operation, str] = MappingProxyType({})


def make_plan(intent: Intent, observation: Observation, refused: Mapping[Operation, str] = NOTHING) -> Plan:
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
    wishes = with_trays(read_wishes(intent), intent, observation)
    layout = read_layout(intent, observation, wishes)
    blocked_gpus = read_blockers(intent, observation, wishes, layout)
    blockers = Blockers()
    for guid, blocker in blocked_gpus.items():
        blockers.add(blocker, frozenset((guid,)))
    _tell_refused(refused, observation, blockers)
    operations = _without(refused, plan_removals(intent, wishes, layout, blockers))
    if not operations:
        unserved = frozenset(blocked_gpus)
        added = plan_additions(intent, observation, wishes, layout, unserved, blockers)
        operations = _without(refused, added)
    if intent.paused is not None:
        paused = Blocker(f"the domain is paused: {intent.paused}", "resume the domain")
        blockers.add(paused, _touched(operations, observation))
        operations = []
    return Plan(
        observation=observation,
        intent_revision=intent.revision,
        operations=tuple(operations),
        blocked=blockers.told(),
    )


def _without(refused: Mapping[Operation, str], operations: list[Operation]) -> list[Operation]:
    return [one for one in operations if one not in refused]


def _tell_refused(refused: Mapping[Operation, str], observation: Observation, blockers: Blockers) -> None:
    for operation, code in refused.items():
        kind = str(operation.__struct_config__.tag)
        reason = f"the switch controller refused {kind} on partition {_called(operation)}: {code}"
        again = "find out why on the switch controller; it is asked again in the next pass"
        blockers.add(Blocker(reason, again), _touched([operation], observation))


def _called(operation: Operation) -> str:
    # Tenants read this, and the name of a partition that is not their own says whose it is.
    if isinstance(operation, CreatePartition):
        return repr(operation.name)
    return str(operation.partition_id)


def _touched(operations: Collection[Operation], observation: Observation) -> frozenset[int]:
    members = {one.id: one.members for one in observation.partitions}
    touched: frozenset[int] = frozenset()
    for one in operations:
        if isinstance(one, DeletePartition):
            touched |= members.get(one.partition_id, frozenset())
        else:
            touched |= frozenset(one.guids)
    return touched
