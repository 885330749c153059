"""One ComputeDomain: from a snapshot to the next writes, status and events.

A decision contains everything that can be done at once, in order; the executor stops at the first write
that fails. Carrying out a decision and deciding again converges: it ends with no write and no status
change.

The finalizer and the UID label come first, then missing objects, then nodes that left and stale clique
entries. A ComputeDomain that is being deleted waits while pods hold its channels, then is taken apart.
For a UID without a ComputeDomain only teardown remains.
"""

import msgspec

from rackloom.core.domains import conditions, membership, names, owned
from rackloom.core.domains.clique import Readiness
from rackloom.core.domains.compute_domain import ComputeDomain, ComputeDomainNode, ComputeDomainStatus
from rackloom.core.domains.conditions import DomainProblem, domain_problems, status_events
from rackloom.core.domains.names import ImexMode
from rackloom.core.domains.owned import required_objects, uses_warm_clique
from rackloom.core.domains.settings import ControllerSettings
from rackloom.core.domains.snapshot import DomainSnapshot, adopt_domain
from rackloom.core.kubernetes.objects import CreateObject, EventNotice, ObjectWrite


class DomainDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What to do about one ComputeDomain, in order, and what to say of it then."""

    actions: tuple[ObjectWrite, ...] = ()
    status: ComputeDomainStatus | None = None
    """None: what it says already is true."""
    notices: tuple[EventNotice, ...] = ()
    """About the status, once it is written."""
    done: tuple[EventNotice, ...] = ()
    """About the actions, once they are carried out."""
    again: float | None = None
    """Seconds after which time alone may change something."""


def reconcile_domain(snapshot: DomainSnapshot, settings: ControllerSettings) -> DomainDecision:
    """Decide about one ComputeDomain, or about what is left of one."""
    domain = snapshot.domain
    if domain is None:
        return DomainDecision(actions=owned.teardown_writes(snapshot))
    if domain.deleting:
        return _reconcile_deleted(domain, snapshot, settings)
    return _reconcile_wanted(domain, snapshot, settings)


def _reconcile_wanted(
    domain: ComputeDomain, snapshot: DomainSnapshot, settings: ControllerSettings
) -> DomainDecision:
    actions = () if snapshot.invalid else _upkeep(domain, snapshot, settings)
    found = domain_problems(domain, snapshot, settings)
    if not found and any(isinstance(action, CreateObject) for action in actions):
        # What will be there is not there yet: the pass that sees it says so.
        return DomainDecision(actions=actions)
    decision = _with_status(domain, snapshot, settings, actions, found)
    gone = () if snapshot.invalid else membership.remove_abandoned_labels(snapshot, settings)
    return msgspec.structs.replace(
        decision,
        done=tuple(_node_left_event(node.name, settings) for node in gone),
        again=membership.seconds_to_next_loss(snapshot, settings),
    )


def _node_left_event(node: str, settings: ControllerSettings) -> EventNotice:
    since = f"node {node} has not been ready for {settings.gangs.lost_after:.0f} s"
    why = f"{since}, and no pod holds a channel on it: it is no node of this ComputeDomain any more"
    return EventNotice(False, "NodeLeft", why)


def _upkeep(
    domain: ComputeDomain, snapshot: DomainSnapshot, settings: ControllerSettings
) -> tuple[ObjectWrite, ...]:
    actions: list[ObjectWrite] = []
    thing = snapshot.domain_thing
    if thing is not None and not (names.FINALIZER in thing.finalizers and thing.domain == thing.uid):
        actions.append(adopt_domain(thing))
    for slot in required_objects(domain, snapshot, settings):
        actions += slot.filling()
    return (
        *actions,
        *membership.remove_abandoned_labels(snapshot, settings),
        *membership.remove_stale_entries(snapshot, settings),
    )


def _reconcile_deleted(
    domain: ComputeDomain, snapshot: DomainSnapshot, settings: ControllerSettings
) -> DomainDecision:
    if names.FINALIZER not in domain.finalizers:
        return DomainDecision()
    held_back = bool(owned.channel_users(snapshot))
    actions = (
        membership.remove_stale_entries(snapshot, settings) if held_back else owned.teardown_writes(snapshot)
    )
    ends = not held_back and not snapshot.held and not snapshot.nodes
    if ends:
        return DomainDecision(actions=actions)
    return _with_status(domain, snapshot, settings, actions, _api_failures(snapshot))


def _api_failures(snapshot: DomainSnapshot) -> tuple[DomainProblem, ...]:
    return tuple(DomainProblem("ApiRefused", failure) for failure in snapshot.failures)


def _with_status(
    domain: ComputeDomain,
    snapshot: DomainSnapshot,
    settings: ControllerSettings,
    actions: tuple[ObjectWrite, ...],
    found: tuple[DomainProblem, ...],
) -> DomainDecision:
    nodes = _status_nodes(domain, snapshot, settings)
    view = conditions.ConditionInputs(
        domain=domain,
        snapshot=snapshot,
        settings=settings,
        joined=membership.joined_nodes(snapshot, settings),
        nodes=nodes,
        problems=found,
    )
    said = conditions.domain_conditions(view)
    status = ComputeDomainStatus(status=_readiness(said[0].status, settings), nodes=nodes, conditions=said)
    if status == domain.status:
        return DomainDecision(actions=actions)
    return DomainDecision(actions=actions, status=status, notices=status_events(domain.status, status))


def _status_nodes(
    domain: ComputeDomain, snapshot: DomainSnapshot, settings: ControllerSettings
) -> tuple[ComputeDomainNode, ...]:
    """In channel mode the nodes are those of the IMEX domain in which the channel was allocated."""
    if settings.imex_mode is ImexMode.HOST_MANAGED:
        return ()
    if uses_warm_clique(domain, settings):
        return () if snapshot.warm is None else snapshot.warm.nodes
    return membership.node_entries(snapshot, settings)


def _readiness(ready: str, settings: ControllerSettings) -> Readiness:
    # The field of the wire has two values, and hostManaged has always been Ready in it.
    holds = ready == "True" or settings.imex_mode is ImexMode.HOST_MANAGED
    return Readiness.READY if holds else Readiness.NOT_READY
