"""One ComputeDomain: from what is there to what to do next. Pure.

A decision names all that can be done at once, in order; the executor stops at the first action that fails.
Carrying out a decision and deciding again ends with no action and no status to write.
"""

import msgspec

from rackloom.claim.cluster import conditions, membership, teardown
from rackloom.claim.cluster.actions import Action, Create, adopt
from rackloom.claim.cluster.notices import Notice, notices
from rackloom.claim.cluster.problems import Problem, problems
from rackloom.claim.cluster.settings import Settings
from rackloom.claim.cluster.slots import slots, uses_warm_clique
from rackloom.claim.cluster.snapshot import Snapshot
from rackloom.claim.domain import names
from rackloom.claim.domain.isolation import ImexMode
from rackloom.claim.domain.objects import ComputeDomain, NodeStatus, Readiness, Status


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What to do about one ComputeDomain, in order, and what to say of it then."""

    actions: tuple[Action, ...] = ()
    status: Status | None = None
    """None: what it says already is true."""
    notices: tuple[Notice, ...] = ()
    """About the status, once it is written."""
    done: tuple[Notice, ...] = ()
    """About the actions, once they are carried out."""
    again: float | None = None
    """Seconds after which time alone may change something."""


def reconcile(snapshot: Snapshot, settings: Settings) -> Decision:
    """Decide about one ComputeDomain, or about what is left of one."""
    domain = snapshot.domain
    if domain is None:
        return Decision(actions=teardown.teardown(snapshot))
    if domain.deleting:
        return _deleted(domain, snapshot, settings)
    return _wanted(domain, snapshot, settings)


def _wanted(domain: ComputeDomain, snapshot: Snapshot, settings: Settings) -> Decision:
    actions = () if snapshot.invalid else _upkeep(domain, snapshot, settings)
    found = problems(domain, snapshot, settings)
    if not found and any(isinstance(action, Create) for action in actions):
        # What will be there is not there yet: the pass that sees it says so.
        return Decision(actions=actions)
    decision = _with_status(domain, snapshot, settings, actions, found)
    gone = () if snapshot.invalid else membership.departures(snapshot, settings)
    return msgspec.structs.replace(
        decision,
        done=tuple(_left(node.name, settings) for node in gone),
        again=membership.next_loss(snapshot, settings),
    )


def _left(node: str, settings: Settings) -> Notice:
    since = f"node {node} has not been ready for {settings.gangs.lost_after:.0f} s"
    why = f"{since}, and no pod holds a channel on it: it is no node of this ComputeDomain any more"
    return Notice(False, "NodeLeft", why)


def _upkeep(domain: ComputeDomain, snapshot: Snapshot, settings: Settings) -> tuple[Action, ...]:
    actions: list[Action] = []
    thing = snapshot.domain_thing
    if thing is not None and not (names.FINALIZER in thing.finalizers and thing.domain == thing.uid):
        actions.append(adopt(thing))
    for slot in slots(domain, snapshot, settings):
        actions += slot.filling()
    return (*actions, *membership.departures(snapshot, settings), *membership.cleaning(snapshot, settings))


def _deleted(domain: ComputeDomain, snapshot: Snapshot, settings: Settings) -> Decision:
    if names.FINALIZER not in domain.finalizers:
        return Decision()
    held_back = bool(teardown.users(snapshot))
    actions = membership.cleaning(snapshot, settings) if held_back else teardown.teardown(snapshot)
    ends = not held_back and not snapshot.held and not snapshot.nodes
    if ends:
        return Decision(actions=actions)
    return _with_status(domain, snapshot, settings, actions, _failures(snapshot))


def _failures(snapshot: Snapshot) -> tuple[Problem, ...]:
    return tuple(Problem("ApiRefused", failure) for failure in snapshot.failures)


def _with_status(
    domain: ComputeDomain,
    snapshot: Snapshot,
    settings: Settings,
    actions: tuple[Action, ...],
    found: tuple[Problem, ...],
) -> Decision:
    nodes = _nodes(domain, snapshot, settings)
    view = conditions.View(
        domain=domain,
        snapshot=snapshot,
        settings=settings,
        joined=membership.joined(snapshot, settings),
        nodes=nodes,
        problems=found,
    )
    said = conditions.conditions(view)
    status = Status(status=_readiness(said[0].status, settings), nodes=nodes, conditions=said)
    if status == domain.status:
        return Decision(actions=actions)
    return Decision(actions=actions, status=status, notices=notices(domain.status, status))


def _nodes(domain: ComputeDomain, snapshot: Snapshot, settings: Settings) -> tuple[NodeStatus, ...]:
    """In channel mode the nodes are those of the IMEX domain in which the channel was allocated."""
    if settings.imex_mode is ImexMode.HOST_MANAGED:
        return ()
    if uses_warm_clique(domain, settings):
        return () if snapshot.warm is None else snapshot.warm.nodes
    return membership.node_entries(snapshot, settings)


def _readiness(ready: str, settings: Settings) -> Readiness:
    # The field of the wire has two values, and hostManaged has always been Ready in it.
    holds = ready == "True" or settings.imex_mode is ImexMode.HOST_MANAGED
    return Readiness.READY if holds else Readiness.NOT_READY
