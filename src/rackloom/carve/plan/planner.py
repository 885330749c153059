"""The planner: what to do next so that a domain becomes what is wanted. It chooses; nobody after it does.

All removals come in one plan and all additions in a later one, made from an observation that shows the
removals done. Between any two operations a GPU is thus in at most one partition, and nobody's memory is
reachable from a partition of somebody else.
"""

from rackloom.carve.plan.additions import plan_additions
from rackloom.carve.plan.blockers import Blocker, Blockers, read_blockers
from rackloom.carve.plan.layout import read_layout
from rackloom.carve.plan.removals import plan_removals
from rackloom.carve.plan.values import DeletePartition, Intent, Observation, Operation, Plan
from rackloom.carve.plan.wishes import read_wishes
from rackloom.errors import Refused


def make_plan(intent: Intent, observation: Observation) -> Plan:
    """The next operations for one domain; none when nothing can or need be done.

    Equal inputs give equal plans, whatever the order of their parts. Raises Refused when the two are about
    different domains.
    """
    if intent.domain != observation.domain:
        raise Refused(
            f"intent is for domain {intent.domain}, the observation of {observation.domain}",
            nearest_fix="read the intent of the domain that the controller names",
        )
    wishes = read_wishes(intent)
    layout = read_layout(intent, observation, wishes)
    blocked_gpus = read_blockers(intent, observation, wishes, layout)
    blockers = Blockers()
    for guid, blocker in blocked_gpus.items():
        blockers.add(blocker, frozenset((guid,)))
    operations: list[Operation] = plan_removals(intent, wishes, layout, blockers)
    if not operations:
        operations = plan_additions(intent, observation, wishes, layout, frozenset(blocked_gpus), blockers)
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


def _touched(operations: list[Operation], observation: Observation) -> frozenset[int]:
    members = {one.id: one.members for one in observation.partitions}
    touched: frozenset[int] = frozenset()
    for one in operations:
        touched |= members[one.partition_id] if isinstance(one, DeletePartition) else frozenset(one.guids)
    return touched
